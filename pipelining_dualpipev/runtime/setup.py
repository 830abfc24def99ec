"""What the ranks of a pipeline tell each other once, when a schedule is made.

Each rank describes what it was given; all read all descriptions and come to the same verdict, so that a mistake on one
rank is an error on every rank and never a rank that waits for one that has raised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel

from pipelining_dualpipev.errors import RanksDisagreeError
from pipelining_dualpipev.planning.placement import stage_indices

__all__ = ["Setup", "check_setup", "describe_setup"]


@dataclass(frozen=True)
class Setup:
    """One rank's arguments, as far as the others need to know them."""

    stages: tuple[int, ...]
    num_stages: tuple[int, ...]
    n_microbatches: object
    scale_grads: bool
    trains: bool
    required_inputs: frozenset[str]
    problem: str | None


def describe_setup(
    stages: Sequence[PipelineStage],
    n_microbatches: int,
    loss_fn: Callable[..., Any] | None,
    *,
    scale_grads: bool,
    defer_pp_recv: bool,
) -> Setup:
    """This rank's arguments, with whatever is wrong with them by themselves."""
    problem = None
    if defer_pp_recv:
        problem = (
            "defer_pp_recv=True moves receives without their sends, so that ranks come to disagree about whose message "
            "is next: leave it False (receives are already placed as early as the order of transfers allows)"
        )
    if loss_fn is not None and not callable(loss_fn):
        problem = f"loss_fn is a {type(loss_fn).__name__}: give a function of (output, target)"
    for stage in stages:
        for name, module in stage.submod.named_modules(prefix=f"stage {stage.stage_index}"):
            if isinstance(module, (DistributedDataParallel, FSDPModule)):
                problem = (
                    f"{name} is wrapped for data parallelism ({type(module).__name__}), which does not yet know when a "
                    "step's last backward is: average the gradients over the data-parallel group after step() instead"
                )
    required = [getattr(stage.submod, "required_inputs", None) or () for stage in stages]
    return Setup(
        stages=tuple(stage.stage_index for stage in stages),
        num_stages=tuple(stage.num_stages for stage in stages),
        n_microbatches=n_microbatches,
        scale_grads=scale_grads,
        trains=loss_fn is not None,
        required_inputs=frozenset().union(*required),
        problem=problem,
    )


def check_setup(setups: Sequence[Setup]) -> None:
    """Raise, with the same words on every rank, if the ranks' arguments do not make a DualPipeV pipeline.

    Raises:
        ValueError: if some rank's arguments are wrong.
        RanksDisagreeError: if each could be right, but not together.
    """
    num_ranks = len(setups)
    problems = []
    for rank, setup in enumerate(setups):
        wanted = stage_indices(rank, num_ranks)
        if any(number != 2 * num_ranks for number in setup.num_stages):
            problems.append(
                f"rank {rank}'s stages say num_stages={max(setup.num_stages)}, but a V over {num_ranks} ranks has "
                f"{2 * num_ranks}: build them with num_stages={2 * num_ranks}"
            )
        elif setup.stages != wanted:
            problems.append(
                f"rank {rank} holds {len(setup.stages)} stage{'s' * (len(setup.stages) != 1)} "
                f"({', '.join(map(str, setup.stages))}): under DualPipeV over {num_ranks} ranks it holds 2, stages "
                f"{wanted[0]} and {wanted[1]}"
            )
        if not isinstance(setup.n_microbatches, int) or isinstance(setup.n_microbatches, bool):
            problems.append(f"rank {rank} has n_microbatches={setup.n_microbatches!r}: give a whole number, 1 or more")
        elif setup.n_microbatches < 1:
            problems.append(f"rank {rank} has n_microbatches={setup.n_microbatches}: a step has at least 1")
        if setup.problem:
            problems.append(f"rank {rank}: {setup.problem}")
    if problems:
        raise ValueError("; ".join(problems))
    for name, what in (
        ("n_microbatches", "n_microbatches"),
        ("scale_grads", "scale_grads"),
        ("trains", "whether it has a loss_fn"),
    ):
        values = [getattr(setup, name) for setup in setups]
        if len(set(values)) > 1:
            told = ", ".join(f"rank {rank} has {value}" for rank, value in enumerate(values))
            raise RanksDisagreeError(f"the ranks differ in {what}: {told}. Give the same on every rank")
