"""The front door: `ScheduleDualPipeV`, used as torch's class of that name, and `ScheduleFromOrder`.

::

    stages = [PipelineStage(early, r, 2 * P, device), PipelineStage(late, 2 * P - 1 - r, 2 * P, device)]
    schedule = ScheduleDualPipeV(stages, n_microbatches=8, loss_fn=loss_fn)
    schedule.step(x, target=y, losses=losses)      # rank 0: inputs, targets and losses live there
    schedule.step()                                # the other ranks

The two differ in where their order of actions comes from; what they do with it is `runtime.ordered`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.microbatch import TensorChunkSpec

from pipelining_dualpipev.planning.actions import Order, dualpipev_order
from pipelining_dualpipev.planning.costs import CostModel
from pipelining_dualpipev.planning.formats import AnyOrder, placement_of, read_order
from pipelining_dualpipev.planning.laws import check_order
from pipelining_dualpipev.planning.placement import Placement
from pipelining_dualpipev.planning.tune import tune
from pipelining_dualpipev.runtime.ordered import OrderedSchedule

__all__ = ["ScheduleDualPipeV", "ScheduleFromOrder"]


class ScheduleDualPipeV(OrderedSchedule):
    """DualPipeV over P ranks, each holding stages r and 2P-1-r of 2P, for any number of microbatches.

    Making one is collective: every rank of the stages' group makes it, with the same arguments.

    Args:
        stages: this rank's two stages, in any order. Of each, the module, the index, the device, the group and
            ``dw_builder`` are used. A module may have an attribute ``required_inputs``, names of the step's keyword
            inputs that it takes; these reach it from rank 0. A module without it is given every keyword input that
            was passed to ``step`` on its own rank, as torch does. An attribute ``accepted_inputs`` names all that a
            step may give. A method ``prepare_inputs(kwarg_mbs, told)`` of the first stage's module is called before
            each step, with ``told`` None; what crosses between stages may change with what it returns, as it may with
            shapes. Where it has changed, that of other stages' modules is called too, with that as ``told``.
        n_microbatches: microbatches in a step, 1 or more; also fewer than there are stages.
        loss_fn: ``loss_fn(output, target, **loss_kwargs)`` gives one microbatch's loss, one number, or a tuple of it
            and of metrics, which the attribute ``metrics`` has after the step, detached and by microbatch. It is called
            on rank 0, which holds the last stage. Without it steps run forward only. If it has a method
            ``prepare(targets)``, that is called once a step before anything is computed, with every microbatch's
            target. If it has an attribute ``target_input``, the keyword input of that name is the target.
        args_chunk_spec: how to cut positional inputs into microbatches; by default along dimension 0.
        kwargs_chunk_spec: the same for keyword inputs.
        output_merge_spec: how to put the last stage's outputs together; by default along dimension 0.
        scale_grads: True where ``loss_fn`` gives a mean: the gradient is then that of the mean over microbatches. It is
            the loss that is scaled, at the start of each backward. False where ``loss_fn`` gives a share of a sum.
        backward_requires_autograd: accepted for torch's sake; a training step always needs gradients enabled.
        defer_pp_recv: must be False. Moving receives on their own makes ranks disagree about whose message is next.
        max_active_stages: accepted for torch's sake: ``fully_shard``'s own hooks gather a stage's parameters here.
        unshard_lookahead: accepted likewise; these hooks prefetch as ``fully_shard`` is told to.
        defer_reduce_grad_wait: accepted likewise; the last backward of a stage waits for its own reduction.
        max_outstanding_sends: accepted: a sent tensor is dropped as soon as its receiver is known to have it.
        grad_scaler: for float16: its scale multiplies the gradient that each backward begins with. Reported losses are
            not scaled. As all ranks have to skip a step in which one has found an overflow, it is torch's
            ``ShardedGradScaler`` (of ``torch.distributed.fsdp.sharded_grad_scaler``) over the pipeline's group.
        zb: the most backwards that a rank splits into an input gradient (I) and a weight gradient (W) put off, 0 for
            none; by default as many as fill gaps. Between I and W a stage holds the inputs and output gradients of its
            linear operations.
        costs: what the 2P stages cost; the order is then the one that `planning.tune` finds for them, never slower
            than the reference by simulation. Give the same on every rank. Without it the order is the reference's.

    Raises:
        ValueError: on every rank, if any rank's stages or arguments do not fit, saying which and what would.
    """

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., Any] | None = None,
        args_chunk_spec: tuple[TensorChunkSpec, ...] | None = None,
        kwargs_chunk_spec: dict[str, TensorChunkSpec] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any] | None = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
        *,
        max_active_stages: int | None = None,
        unshard_lookahead: int | None = None,
        max_outstanding_sends: int | None = None,
        defer_reduce_grad_wait: bool = False,
        grad_scaler: torch.amp.GradScaler | None = None,
        zb: int | None = None,
        costs: CostModel | None = None,
    ) -> None:
        def planner(num_ranks: int) -> tuple[Order, Placement]:
            if costs is None:
                return dualpipev_order(num_ranks, n_microbatches, zb=zb), Placement.v(num_ranks)
            if zb is not None:
                raise ValueError(
                    f"zb={zb} is for the reference order, costs ask for one of their own: give one of them"
                )
            return tune(num_ranks, n_microbatches, costs).order, Placement.v(num_ranks)

        problem = None
        if defer_pp_recv:
            problem = (
                "defer_pp_recv=True moves receives without their sends, so that ranks come to disagree about whose "
                "message is next: leave it False (receives are posted as early as the order of transfers allows anyway)"
            )
        super().__init__(
            stages,
            n_microbatches,
            loss_fn,
            planner,
            args_chunk_spec=args_chunk_spec,
            kwargs_chunk_spec=kwargs_chunk_spec,
            output_merge_spec=output_merge_spec,
            scale_grads=scale_grads,
            grad_scaler=grad_scaler,
            problem=problem,
        )


class ScheduleFromOrder(OrderedSchedule):
    """Run an order of one's own, or of torch's, with the same runtime: any placement, any number of stages a rank.

    Making one is collective. The order is checked against the laws of `planning.laws` first, and lowered to programs
    whose transfers are in one global order, so that what passes cannot deadlock.

    Args:
        stages: this rank's stages, in any order: those whose actions the order gives to this rank.
        order: every rank's compute actions: a dict of rank to a list of strings (``"0F3"``) or torch actions (None,
            torch's bubble, is left out), or CSV text or the path of a CSV file in torch's format, a line a rank.
        n_microbatches: microbatches in a step, 1 or more.
        loss_fn: as for `ScheduleDualPipeV`; called on the rank of the last stage.
        placement: which rank holds which stage; by default as the order has it.
        args_chunk_spec: as for `ScheduleDualPipeV`.
        kwargs_chunk_spec: as for `ScheduleDualPipeV`.
        output_merge_spec: as for `ScheduleDualPipeV`.
        scale_grads: as for `ScheduleDualPipeV`.
        grad_scaler: as for `ScheduleDualPipeV`.

    Raises:
        ValueError: on every rank, if the order breaks a law (naming it, the rank, the position and the action), or if
            some rank's stages or arguments do not fit.
    """

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        order: AnyOrder,
        n_microbatches: int,
        loss_fn: Callable[..., Any] | None = None,
        *,
        placement: Placement | Mapping[int, int] | Sequence[int] | None = None,
        args_chunk_spec: tuple[TensorChunkSpec, ...] | None = None,
        kwargs_chunk_spec: dict[str, TensorChunkSpec] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any] | None = None,
        scale_grads: bool = True,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        def planner(num_ranks: int) -> tuple[Order, Placement]:
            read = read_order(order)
            where = placement_of(read) if placement is None else Placement.of(placement)
            if where.num_ranks != num_ranks:
                raise ValueError(
                    f"the order is for {where.num_ranks} ranks, the stages' group has {num_ranks}: run it on "
                    f"{where.num_ranks}"
                )
            return check_order(read, n_microbatches, placement=where), where

        super().__init__(
            stages,
            n_microbatches,
            loss_fn,
            planner,
            args_chunk_spec=args_chunk_spec,
            kwargs_chunk_spec=kwargs_chunk_spec,
            output_merge_spec=output_merge_spec,
            scale_grads=scale_grads,
            grad_scaler=grad_scaler,
        )
