"""What the ranks of a pipeline tell each other once, when a schedule is made.

Each rank describes what it was given and what is wrong with it; all read all descriptions and come to the same verdict,
so that a mistake on one rank is an error on every rank and never a rank that waits for one that has raised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.pipelining import PipelineStage

from pipelining_dualpipev._torch import has_comm_hook
from pipelining_dualpipev.errors import RanksDisagreeError
from pipelining_dualpipev.planning.actions import Order
from pipelining_dualpipev.planning.placement import Placement
from pipelining_dualpipev.runtime.control import Control, digest_of
from pipelining_dualpipev.runtime.data_parallel import replicated_modules, stage_module

__all__ = ["agree_on_setup"]


@dataclass(frozen=True)
class _Setup:
    """One rank's arguments, as far as the others need to know them."""

    n_microbatches: object
    scale_grads: bool
    has_loss_fn: bool
    order: int
    split: int
    required_inputs: frozenset[str]
    prepares: bool
    problems: list[str]


def agree_on_setup(
    control: Control,
    planner: Callable[[int], tuple[Order, Placement]],
    stages: Sequence[PipelineStage],
    n_microbatches: int,
    loss_fn: Callable[..., Any] | None,
    grad_scaler: Any,
    *,
    scale_grads: bool,
    problem: str | None = None,
) -> tuple[Order, Placement, list[frozenset[str]], bool]:
    """Plan, and make sure that all ranks have planned the same and hold the stages that go with it. Collective.

    Args:
        control: this rank's line to the others.
        planner: gives the order and the placement for a number of ranks; a ValueError of it is told to all.
        stages: this rank's stages, lowest index first.
        n_microbatches: microbatches in a step.
        loss_fn: the loss function or None.
        grad_scaler: the schedule's argument.
        scale_grads: the schedule's argument.
        problem: what is already known to be wrong on this rank.

    Returns:
        The order, the placement, for each rank the keyword inputs that its stages read by name, and whether the first
        stage's module has something to say of a step's inputs.

    Raises:
        ValueError: if some rank's arguments are wrong; the same words on every rank.
        RanksDisagreeError: if each could be right, but not together.
    """
    problems = [problem] if problem else []
    order: Order = {}
    placement = Placement((0,))
    if not isinstance(n_microbatches, int) or isinstance(n_microbatches, bool):
        problems.append(f"n_microbatches is {n_microbatches!r}: give a whole number, 1 or more")
    else:
        try:
            order, placement = planner(control.num_ranks)
            problems += _misplaced(stages, placement, control.rank)
        except ValueError as error:
            problems.append(str(error))
    problems += _unsupported(stages) + _untied(stages) + _unfit(loss_fn, grad_scaler, control.num_ranks)
    modules = {stage.stage_index: stage_module(stage.submod) for stage in stages}
    required = [getattr(module, "required_inputs", None) or () for module in modules.values()]
    reply = control.gather(
        _Setup(
            n_microbatches=n_microbatches,
            scale_grads=scale_grads,
            has_loss_fn=loss_fn is not None,
            order=digest_of(order),
            split=digest_of(*sorted({getattr(stage_module(s.submod), "split_description", "") for s in stages})),
            required_inputs=frozenset().union(*required),
            prepares=hasattr(modules.get(0), "prepare_inputs"),
            problems=problems,
        )
    )
    reply.wait()
    setups: list[_Setup] = reply.result
    if told := [f"rank {rank}: {problem}" for rank, setup in enumerate(setups) for problem in setup.problems]:
        raise ValueError("; ".join(told))
    _compare(setups)
    prepares = any(setup.prepares for setup in setups)
    return order, placement, [setup.required_inputs for setup in setups], prepares


def _compare(setups: Sequence[_Setup]) -> None:
    for field, words in (
        ("n_microbatches", "n_microbatches"),
        ("scale_grads", "scale_grads"),
        ("has_loss_fn", "whether there is a loss_fn"),
        ("order", "their order of actions (by digest)"),
        ("split", "how the model is split (by digest of explain() and of what in the example is no tensor)"),
    ):
        values = [getattr(setup, field) for setup in setups]
        if len(set(values)) > 1:
            each = ", ".join(f"rank {rank} has {value}" for rank, value in enumerate(values))
            raise RanksDisagreeError(f"the ranks differ in {words}: {each}. Give the same on every rank")


def _unfit(loss_fn: Any, grad_scaler: Any, num_ranks: int) -> list[str]:
    problems = []
    if loss_fn is not None and not callable(loss_fn):
        problems.append(f"loss_fn is a {type(loss_fn).__name__}: give a function of (output, target)")
    if grad_scaler is not None and num_ranks > 1 and not isinstance(grad_scaler, ShardedGradScaler):
        problems.append(
            f"grad_scaler is a {type(grad_scaler).__name__}, which would skip a step on the rank that has found an "
            "overflow and not on the others: use torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler with the "
            "pipeline's process_group"
        )
    return problems


def _misplaced(stages: Sequence[PipelineStage], placement: Placement, rank: int) -> list[str]:
    held, wanted = [stage.stage_index for stage in stages], placement.stages_of(rank)
    number = placement.num_stages
    if wrong := [stage.num_stages for stage in stages if stage.num_stages != number]:
        return [
            f"its stages say num_stages={wrong[0]}, but this schedule over {placement.num_ranks} ranks has {number} "
            f"stages: build them with num_stages={number}"
        ]
    if tuple(held) != wanted:
        return [
            f"it was given {_stages(held)}, but this schedule over {placement.num_ranks} ranks has {_stages(wanted)} "
            "here: build those"
        ]
    return []


def _stages(indices: Sequence[int]) -> str:
    return f"{len(indices)} stage{'s' * (len(indices) != 1)} ({', '.join(map(str, indices))})"


def _unsupported(stages: Sequence[PipelineStage]) -> list[str]:
    return [
        f"stage {stage.stage_index} has a DistributedDataParallel{f' ({name})' if name else ''} with a communication "
        "hook, which would have to be called once a backward: gradients are averaged once a step here. Leave it out"
        for stage in stages
        for name, module in replicated_modules(stage.submod)
        if has_comm_hook(module)
    ]


def _untied(stages: Sequence[PipelineStage]) -> list[str]:
    """Parameters that two of the stages are to share, and no longer do: each would get its part of the gradient."""
    first: dict[str, tuple[int, Any]] = {}
    problems = []
    for stage in stages:
        tied = getattr(stage_module(stage.submod), "tied_parameters", None) or {}
        for name, parameter in tied.items():
            other, shared = first.setdefault(name, (stage.stage_index, parameter))
            if shared is not parameter:
                problems.append(
                    f"{name} is tied between stages {other} and {stage.stage_index}, but is a parameter of its own in "
                    "each: wrap neither of the modules that hold it in fully_shard, or untie the model before the split"
                )
    return problems
