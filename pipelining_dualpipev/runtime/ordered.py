"""Any order of actions behind torch's contract for a multi-stage schedule: `step` and `eval`.

Made once, it plans (`planning`): the order of every rank is lowered to programs. Each step then

1. cuts the batch into microbatches,
2. agrees with the other ranks that all can and will run the same step (`runtime.control`),
3. sends keyword inputs to the stages that read them by name (`runtime.inputs`),
4. runs its program (`runtime.executor`).

Whatever is wrong is found in 1 or 2, on every rank, before a tensor has moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.microbatch import TensorChunkSpec

from pipelining_dualpipev._torch import TorchSchedule, to_torch_order
from pipelining_dualpipev.planning.actions import Order, forwards_of
from pipelining_dualpipev.planning.lowering import lower
from pipelining_dualpipev.planning.placement import Placement
from pipelining_dualpipev.runtime.control import DistributedControl, digest_of
from pipelining_dualpipev.runtime.data_parallel import Replicas, refuse_other_orders
from pipelining_dualpipev.runtime.executor import Wires
from pipelining_dualpipev.runtime.loss import Loss
from pipelining_dualpipev.runtime.microbatches import Microbatches, cut_batch, merge_outputs, take_cut
from pipelining_dualpipev.runtime.pipeline import Pipeline
from pipelining_dualpipev.runtime.setup import agree_on_setup
from pipelining_dualpipev.runtime.stage import StageRunner
from pipelining_dualpipev.runtime.transport import DistributedTransport, drive

__all__ = ["OrderedSchedule", "Planner"]

Planner = Callable[[int], tuple[Order, Placement]]
"""Gives the order of every rank, and where the stages are, for a number of ranks."""


@dataclass(frozen=True)
class _Given:
    """The inputs of a step as the caller gave them: a whole batch, or cut beforehand."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    arg_mbs: Sequence[Any] | None
    kwarg_mbs: Sequence[dict[str, Any]] | None
    target_mbs: Sequence[Any] | None

    @property
    def is_cut(self) -> bool:
        return any(mbs is not None for mbs in (self.arg_mbs, self.kwarg_mbs, self.target_mbs))


class OrderedSchedule(TorchSchedule):
    """A schedule that runs the order that ``planner`` gives; sub-classes say where it comes from.

    Attributes:
        group: the pipeline's process group.
        device: where this rank's stages are.
        rank: this rank in the group.
        placement: which rank holds which stage.
        control: this rank's line to the others, for small messages.
        pipeline: what runs this rank's part of a step.
        metrics: of the last step, what ``loss_fn`` has returned beside the loss, by microbatch; empty on other ranks.
    """

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., Any] | None,
        planner: Planner,
        *,
        args_chunk_spec: tuple[TensorChunkSpec, ...] | None,
        kwargs_chunk_spec: dict[str, TensorChunkSpec] | None,
        output_merge_spec: dict[str, Any] | tuple[Any] | None,
        scale_grads: bool,
        grad_scaler: torch.amp.GradScaler | None,
        problem: str | None = None,
    ) -> None:
        stages = sorted(stages, key=lambda stage: stage.stage_index)
        if not stages:
            raise ValueError("stages is empty: give the stages that this rank holds")
        group = stages[0].group
        control = DistributedControl(group)
        order, placement, required_inputs, prepares = agree_on_setup(
            control, planner, stages, n_microbatches, loss_fn, grad_scaler, scale_grads=scale_grads, problem=problem
        )
        refuse_other_orders([stage.submod for stage in stages], digest_of(order), control)
        super().__init__(
            stages,
            n_microbatches,
            loss_fn,
            args_chunk_spec=args_chunk_spec,
            kwargs_chunk_spec=kwargs_chunk_spec,
            output_merge_spec=output_merge_spec,
            scale_grads=scale_grads,
            rank_of=placement.rank_of,
        )
        self.group = group
        self.device = torch.device(stages[0].device)
        self.rank = control.rank
        self.metrics: list[Any] = []
        self._grad_scaler = grad_scaler
        self.placement, self.control = placement, control
        self._runners = {stage.stage_index: StageRunner(stage) for stage in stages}
        if self.device.type != "cpu":
            # The group's first communication has to be one that all of its ranks take part in (NCCL).
            dist.all_reduce(torch.zeros(1, device=self.device), group=group)

        programs = lower(order, placement=placement)
        self.pipeline_order = to_torch_order(order)
        self.pipeline_order_with_comms = to_torch_order(programs)
        self.pipeline = Pipeline(
            programs,
            lower(forwards_of(order), placement=placement),
            placement=placement,
            runners=self._runners,
            wires=Wires(DistributedTransport(group), control),
            required_inputs=required_inputs,
            prepares=prepares,
            replicas=Replicas([stage.submod for stage in stages]),
        )

    # -------------------------------------------------------------------------------------------------- facts to ask

    @property
    def loss_rank(self) -> int:
        """The rank in the group that holds the last stage: where targets are read and losses appear."""
        return self.placement.rank_of[-1]

    @property
    def has_first_stage(self) -> bool:
        """Whether this rank holds the first stage, where positional inputs are read."""
        return 0 in self._runners

    @property
    def has_last_stage(self) -> bool:
        """Whether this rank holds the last stage."""
        return self.rank == self.loss_rank

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """This rank's parameters; one that its stages share comes once."""
        seen: set[torch.nn.Parameter] = set()
        for runner in self._runners.values():
            for parameter in runner.module.parameters():
                if parameter not in seen:
                    seen.add(parameter)
                    yield parameter

    def counted_elsewhere(self) -> set[torch.nn.Parameter]:
        """Those of this rank's parameters that an earlier rank holds too, with the same gradient after a step."""
        return self.pipeline.tied.counted_elsewhere()

    def explain(self) -> str:
        """In words, a line for each of this rank's stages: which share of its weight gradients is put off to W.

        It tells of what has run, so ask after a step.
        """
        return "\n".join(runner.explain() for runner in self._runners.values())

    # -------------------------------------------------------------------------------------------------------- running

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        arg_mbs: Sequence[Any] | None = None,
        kwarg_mbs: Sequence[dict[str, Any]] | None = None,
        target_mbs: Sequence[Any] | None = None,
        finalize_gradients: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Run one training step: forward and backward of every microbatch. Gradients are added to ``.grad``.

        Every rank calls it, once. The rank of the first stage gives the inputs, the rank of the last one the target
        (in a V both are rank 0); the others may call it bare.

        Args:
            args: whole-batch positional inputs of the first stage.
            target: whole-batch target of ``loss_fn``, a tensor or a tree of tensors.
            losses: a list, which on ``loss_rank`` is cleared and filled with one detached loss a microbatch.
            return_outputs: whether to keep the last stage's outputs and return them, detached and put together.
            loss_kwargs: more keyword arguments for ``loss_fn``.
            arg_mbs: positional inputs cut beforehand, a tuple a microbatch; in place of ``args``.
            kwarg_mbs: keyword inputs cut beforehand, a dict a microbatch; in place of ``kwargs``.
            target_mbs: targets cut beforehand; in place of ``target``.
            finalize_gradients: False where another step will follow before the optimizer's, so that gradients of
                replicated or sharded stages need not be reduced over data-parallel ranks yet; the same on every rank.
            kwargs: whole-batch keyword inputs.

        Returns:
            The outputs of the batch on ``loss_rank``, None elsewhere and where ``return_outputs`` is False.

        Raises:
            ValueError: on every rank, before anything is computed, if some rank's arguments do not fit.
            RuntimeError: if gradients are disabled. Use `eval`.
            PipelineError: on every rank, if an action of any rank raised, with its words. The next step is right, but
                of this one some gradients have been added and others not: zero them.
            RankLostError: on every rank that is left, if one has ended, within seconds on gloo; or if one does not call
                ``step`` within the group's timeout.
        """
        given = _Given(args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs)
        trains = self.loss_fn is not None
        return self._run(given, trains, losses, return_outputs, loss_kwargs, finalize_gradients, losses is not None)

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        arg_mbs: Sequence[Any] | None = None,
        kwarg_mbs: Sequence[dict[str, Any]] | None = None,
        target_mbs: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the forwards only, without autograd; losses too if there are a ``loss_fn`` and a target.

        Arguments and result are those of `step`. It does not call ``module.eval()``.
        """
        given = _Given(args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs)
        return self._run(given, False, losses, return_outputs, loss_kwargs, True)

    def _run(
        self,
        given: _Given,
        trains: bool,
        losses: list[Any] | None,
        return_outputs: bool,
        loss_kwargs: dict[str, Any] | None,
        finalize: bool,
        must_train: bool = False,
    ) -> Any:
        if losses is not None and not isinstance(losses, list):
            raise TypeError(f"losses is a {type(losses).__name__}: give a list, which the step fills")
        inputs, loss, error = Microbatches.none(self.n_microbatches), None, None
        try:
            if must_train and not trains:
                raise ValueError(
                    "losses were asked for, but there is no loss_fn, without which a step is forward only: give the "
                    "schedule one (that of a split model is None if the example of its split had no labels)"
                )
            inputs = self._cut(given)
            loss = self._loss_of_step(inputs, trains, loss_kwargs or {})
        except Exception as wrong:  # it is raised once the other ranks have been told
            error = wrong
        keep_outputs = return_outputs and self.has_last_stage
        if trains:
            self._seed(torch.ones((), device=self.device))  # a scaler begins with its first use, on every rank
        result = drive(
            self.pipeline.step(
                inputs, loss, self._seed, trains=trains, keep_outputs=keep_outputs, finalize=finalize, error=error
            )
        )
        self.metrics = result.metrics
        if losses is not None and self.has_last_stage:
            losses[:] = result.losses
        if result.outputs:
            return merge_outputs(result.outputs, self.chunk_specs[2])
        return None

    def _cut(self, given: _Given) -> Microbatches:
        name = getattr(self.loss_fn, "target_input", None)
        if given.is_cut:
            if given.args or given.kwargs or given.target is not None:
                raise ValueError("give either whole-batch inputs or arg_mbs, kwarg_mbs and target_mbs, not both")
            mbs = take_cut(given.arg_mbs, given.kwarg_mbs, given.target_mbs, self.n_microbatches)
        else:
            specs = self.chunk_specs[:2]
            mbs = cut_batch(given.args, given.kwargs, given.target, self.n_microbatches, *specs)
        if mbs.args != [()] * self.n_microbatches and not self.has_first_stage:
            first = self.placement.rank_of[0]
            raise ValueError(
                f"positional inputs were given here, but the first stage is on rank {first}: give them there"
            )
        mbs = mbs.with_target_as(name) if name else mbs
        for runner in self._runners.values():
            runner.check_inputs(mbs.kwargs)
        return replace(mbs, told=self._runners[0].prepare_inputs(mbs.kwargs)) if 0 in self._runners else mbs

    def _loss_of_step(self, inputs: Microbatches, trains: bool, loss_kwargs: dict[str, Any]) -> Loss | None:
        if trains and not torch.is_grad_enabled():
            raise RuntimeError("step() needs gradients, which are disabled here (torch.no_grad): call eval() instead")
        if self.loss_fn is None or not self.has_last_stage or (not trains and inputs.targets is None):
            return None
        prepare = getattr(self.loss_fn, "prepare", None)
        if prepare is not None:
            prepare(inputs.targets)
        return Loss(self.loss_fn, loss_kwargs)

    def _seed(self, loss: torch.Tensor) -> torch.Tensor:
        seed = torch.full_like(loss, 1.0 / self.n_microbatches if self.scale_grads else 1.0)
        return seed if self._grad_scaler is None else self._grad_scaler.scale(seed).to(loss.dtype)
