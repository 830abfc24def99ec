"""Whether a model will fit, before anyone books machines: bytes by rank, and how much of a step ranks wait.

Of a rank's two stages is known, from the plan of the split and a forward without data (`models.footprint`):

* *parameters* and *gradients*, a tied one once; the optimizer's *state*, so many bytes for each parameter;
* *activations*, at the peak of a step: each microbatch in flight holds its stage's share, and how many are in flight at
  once the simulated schedule tells.

What is not counted: what an operation needs only while it runs, buffers of communication, and what the allocator
wastes.

Over data-parallel *shards* (``fully_shard``) only the optimizer's state is divided: the schedule keeps a stage's
parameters gathered and its gradients whole until the stage's last backward, so both are there in full at the peak, and
the rank's own shard of the parameters beside them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from pipelining_dualpipev.errors import SplitError
from pipelining_dualpipev.models.deal import Balance
from pipelining_dualpipev.models.footprint import StageFootprint, measure_footprint
from pipelining_dualpipev.models.plan import SplitPlan
from pipelining_dualpipev.models.split import plan_split
from pipelining_dualpipev.planning.actions import dualpipev_order
from pipelining_dualpipev.planning.costs import CostModel
from pipelining_dualpipev.planning.placement import Placement
from pipelining_dualpipev.planning.simulate import simulate
from pipelining_dualpipev.planning.tune import tune

__all__ = ["OPTIMIZERS", "Estimate", "Job", "RankBytes", "estimate", "remedies"]

OPTIMIZERS = {"adamw": 2, "momentum": 1, "sgd": 0}
"""By name, how many numbers of a parameter's own type the optimizer keeps for it."""


@dataclass(frozen=True)
class Job:
    """What is to be trained, and how.

    Attributes:
        num_ranks: P.
        n_microbatches: microbatches in a step.
        rows: sequences in a microbatch.
        seq_len: tokens in a sequence.
        dtype: of parameters, gradients and optimizer state.
        optimizer: one of `OPTIMIZERS`.
        shards: data-parallel ranks that share one stage's optimizer state (``fully_shard``); 1 for none.
        checkpointing: whether each layer keeps its input only and runs again in the backward.
        balance: how layers are dealt out, as `split` takes it.
    """

    num_ranks: int
    n_microbatches: int
    rows: int = 1
    seq_len: int = 2048
    dtype: torch.dtype = torch.bfloat16
    optimizer: str = "adamw"
    shards: int = 1
    checkpointing: bool = False
    balance: Balance = "uniform"


class _Look(NamedTuple):
    """What is known of a model on so many ranks, whatever else the job is like."""

    plan: SplitPlan
    footprints: list[StageFootprint]
    trained: frozenset[str]


@dataclass(frozen=True)
class RankBytes:
    """What one rank holds at the peak of a step, in bytes."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True)
class Estimate:
    """What `estimate` has found.

    Attributes:
        job: what it is for.
        ranks: bytes, by rank.
        bubble: share of a step in which ranks wait, under the reference order, by the costs below.
        tuned_bubble: the same under the order that `planning.tune` finds.
        costs: F, I and W of the stages in floating-point operations; ``activation_bytes`` in bytes.
    """

    job: Job
    ranks: list[RankBytes]
    bubble: float
    tuned_bubble: float
    costs: CostModel
    look: _Look

    @property
    def plan(self) -> SplitPlan:
        """The plan of the split."""
        return self.look.plan

    @property
    def layers(self) -> list[list[str]]:
        """For each stage the names of its layers."""
        layers: list[list[str]] = [[] for _ in range(self.plan.num_stages)]
        for event in self.plan.events:
            if event.is_layer and event.unit not in layers[event.stage]:
                layers[event.stage].append(event.unit)
        return layers

    @property
    def most(self) -> int:
        """The bytes of the fullest rank."""
        return max(rank.total for rank in self.ranks)


def estimate(config: Any, job: Job) -> Estimate:
    """What training the model of a config would take.

    Args:
        config: of a causal language model of transformers.
        job: what is asked.

    Raises:
        ValueError: if a number is too small or the optimizer is not known.
        SplitError: if the model cannot be split so, or what it holds cannot be told without data.
    """
    _check(job)
    return _estimate(_look_at(config, job), job)


def remedies(config: Any, estimated: Estimate, max_bytes: int) -> Iterator[Estimate]:
    """Changes of a job with which it fits, each of one thing alone if that is enough.

    They are: checkpointing; more shards, up to 64; more ranks, as many as there are layers for. If none of these will
    do alone: more ranks with checkpointing.
    """
    job = estimated.job
    more_shards = [replace(job, shards=job.shards * 2**k) for k in range(1, 7) if job.shards * 2**k <= 64]
    more_ranks = list(_looks_with_more_ranks(config, job))
    kinds = [
        [(estimated.look, replace(job, checkpointing=True))],
        [(estimated.look, each) for each in more_shards],
        more_ranks,
        [(look, replace(each, checkpointing=True)) for look, each in more_ranks],
    ]
    found = False
    for number, kind in enumerate(kinds):
        if found and number == len(kinds) - 1:
            return
        fitting = (each for each in (_estimate(look, changed) for look, changed in kind) if each.most <= max_bytes)
        if (first := next(fitting, None)) is not None and first.job != job:
            found = True
            yield first


def _looks_with_more_ranks(config: Any, job: Job) -> Iterator[tuple[_Look, Job]]:
    for k in range(1, 7):
        changed = replace(job, num_ranks=job.num_ranks * 2**k)
        try:
            yield _look_at(config, changed), changed
        except SplitError:
            return  # too few layers for so many ranks


def _look_at(config: Any, job: Job) -> _Look:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=job.dtype)
    ids = torch.ones(job.rows, job.seq_len, dtype=torch.long)
    example = {"input_ids": ids, "labels": ids}
    plan = plan_split(model, job.num_ranks, example=example, balance=job.balance)
    assert isinstance(plan, SplitPlan), "of a model, not of plain layers"
    trained = frozenset(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    return _Look(plan, measure_footprint(model, plan, example), trained)


def _estimate(look: _Look, job: Job) -> Estimate:
    costs = _costs(look.footprints, checkpointing=job.checkpointing)
    placement = Placement.v(job.num_ranks)
    timeline = simulate(dualpipev_order(job.num_ranks, job.n_microbatches), costs, placement=placement)
    tuned = tune(job.num_ranks, job.n_microbatches, costs).timeline
    ranks = []
    for rank in range(job.num_ranks):
        stages = placement.stages_of(rank)
        activations = round(timeline.peak_bytes(rank))
        if job.checkpointing:
            activations += max(look.footprints[stage].largest_layer_bytes for stage in stages)
        ranks.append(_rank_bytes(look, stages, job, activations))
    bubble, tuned_bubble = (
        sum(each.bubble(rank) for rank in range(job.num_ranks)) / job.num_ranks for each in (timeline, tuned)
    )
    return Estimate(job, ranks, bubble, tuned_bubble, costs, look)


def _check(job: Job) -> None:
    for name in ("num_ranks", "n_microbatches", "rows", "seq_len", "shards"):
        if getattr(job, name) < 1:
            raise ValueError(f"{name} is {getattr(job, name)}: it has to be 1 or more")
    if job.optimizer not in OPTIMIZERS:
        raise ValueError(f"the optimizer is {job.optimizer!r}: give one of {', '.join(OPTIMIZERS)}")


def _costs(footprints: list[StageFootprint], *, checkpointing: bool) -> CostModel:
    """In floating-point operations: a backward computes each product twice, once of them for a weight in W."""
    forward = [stage.weight_flops + stage.other_flops for stage in footprints]
    again = forward if checkpointing else [0.0] * len(forward)
    return CostModel(
        forward=forward,
        backward_input=[
            stage.weight_flops + 2 * stage.other_flops + once_more
            for stage, once_more in zip(footprints, again, strict=True)
        ],
        backward_weight=[stage.weight_flops for stage in footprints],
        activation_bytes=[
            float(stage.checkpointed_bytes if checkpointing else stage.saved_bytes) for stage in footprints
        ],
    )


def _rank_bytes(look: _Look, stages: tuple[int, ...], job: Job, activations: int) -> RankBytes:
    plan = look.plan
    own = {plan.names[name] for stage in stages for name in plan.local_parameters(stage)}
    sizes = {name: shape.numel() * dtype.itemsize for name, (shape, dtype) in plan.parameter_sizes.items()}
    parameters = sum(sizes[name] for name in own)
    gradients = sum(sizes[name] for name in own & look.trained)
    return RankBytes(
        parameters=parameters + (math.ceil(parameters / job.shards) if job.shards > 1 else 0),
        gradients=gradients,
        optimizer=math.ceil(gradients * OPTIMIZERS[job.optimizer] / job.shards),
        activations=activations,
    )
