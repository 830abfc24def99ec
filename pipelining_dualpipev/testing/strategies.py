"""Hypothesis strategies: lawful orders, orders with one fault, costs, and small models to run them with.

::

    @given(orders(), stage_stacks_for..., st.data())
    def test_my_lowering(case, data):
        check_training_step(case.order, case.n_microbatches, placement=case.placement, ...)

Orders come from ours, from torch's own generators, and from a random list scheduler, which knows no schedule at all: it
appends whatever may come next on whichever rank, so that everything lawful can come out.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from pipelining_dualpipev._torch import TORCH_SCHEDULES, torch_order
from pipelining_dualpipev.planning.actions import Action, Kind, Order, dualpipev_order
from pipelining_dualpipev.planning.costs import CostModel
from pipelining_dualpipev.planning.formats import read_order
from pipelining_dualpipev.planning.lowering import lower
from pipelining_dualpipev.planning.placement import Placement
from pipelining_dualpipev.testing.step import Stack, add_loss

__all__ = ["Mutant", "OrderCase", "choosers", "cost_models", "mutants", "orders", "stage_stacks"]


class OrderCase(NamedTuple):
    """An order with what it is an order of."""

    order: Order
    n_microbatches: int
    placement: Placement


def choosers() -> st.SearchStrategy[Callable[[int], int]]:
    """Choosers for a `LocalCluster`: who goes next is drawn, and shrinks to the lowest rank."""
    return st.randoms(use_true_random=False).map(lambda source: lambda count: source.randrange(count))


@st.composite
def orders(draw: st.DrawFn, max_ranks: int = 6, max_microbatches: int | None = None) -> OrderCase:
    """Lawful orders: ours, torch's, and random ones on a V or a loop. At most 4 microbatches a rank by default."""
    source = draw(st.sampled_from(["ours", "random", *TORCH_SCHEDULES]))
    num_ranks = draw(st.integers(1, max_ranks))
    n = draw(st.integers(1, max_microbatches or 4 * num_ranks))
    if source == "ours":
        return OrderCase(dualpipev_order(num_ranks, n), n, Placement.v(num_ranks))
    if source == "random":
        placement = draw(st.sampled_from([Placement.v(num_ranks), *(Placement.loop(num_ranks, k) for k in (1, 2, 3))]))
        return OrderCase(_random_order(placement, n, draw(st.randoms(use_true_random=False))), n, placement)
    schedule = TORCH_SCHEDULES[source]
    n = max(schedule.fitting(num_ranks, n), 1)
    return OrderCase(read_order(torch_order(source, num_ranks, n)), n, schedule.placement(num_ranks))


def _random_order(placement: Placement, n: int, source: random.Random) -> Order:
    """Append what may come next until all is done: a forward, a full backward, an input or a weight gradient."""
    order: Order = {rank: [] for rank in range(placement.num_ranks)}
    stages = range(placement.num_stages)
    forwards, gradients = [0] * placement.num_stages, [0] * placement.num_stages
    owed: list[list[int]] = [[] for _ in stages]  # microbatches whose weight gradient is still to come
    while True:
        possible: list[tuple[Kind, int]] = []
        for stage in stages:
            if forwards[stage] < n and (stage == 0 or forwards[stage - 1] > forwards[stage]):
                possible.append((Kind.FORWARD, stage))
            above = n if stage == placement.num_stages - 1 else gradients[stage + 1]
            if gradients[stage] < min(forwards[stage], above):
                possible.append((Kind.BACKWARD_INPUT, stage))
                if not owed[stage]:  # a full backward would do its weight gradient before those that are owed
                    possible.append((Kind.FULL_BACKWARD, stage))
            if owed[stage]:
                possible.append((Kind.BACKWARD_WEIGHT, stage))
        if not possible:
            return order
        kind, stage = source.choice(possible)
        if kind is Kind.FORWARD:
            microbatch, forwards[stage] = forwards[stage], forwards[stage] + 1
        elif kind is Kind.BACKWARD_WEIGHT:
            microbatch = owed[stage].pop(0)
        else:
            microbatch, gradients[stage] = gradients[stage], gradients[stage] + 1
            if kind is Kind.BACKWARD_INPUT:
                owed[stage].append(microbatch)
        order[placement.rank_of[stage]].append(Action(stage, kind, microbatch))


class Mutant(NamedTuple):
    """A lawful order with one fault.

    Attributes:
        fault: which one.
        law: the law that it breaks, where it is not harmless.
        order: the order or the programs.
        is_programs: whether ``order`` is lowered.
        cap: how many microbatches in flight to allow.
    """

    fault: str
    law: str
    order: Order
    is_programs: bool
    cap: int


FAULTS = {
    "two transfers swapped": "complete|matched|acyclic",
    "a receive dropped": "complete",
    "a send before its producer": "complete",
    "an action twice": "complete",
    "a pair's backward split": "paired",
    "one forward too early for the cap": "bounded",
}
"""The kinds of fault that `mutants` makes, each with the law (or laws) that it breaks."""


@st.composite
def mutants(draw: st.DrawFn, case: OrderCase) -> Mutant:
    """The order of ``case`` with one fault of a kind that it can have."""
    programs = lower(case.order, placement=case.placement)
    order = {rank: list(actions) for rank, actions in case.order.items()}
    sites: dict[str, list[tuple[int, int]]] = {fault: [] for fault in FAULTS}
    for rank, program in programs.items():
        for at, action in enumerate(program):
            if action.kind in (Kind.RECV_F, Kind.RECV_B):
                sites["a receive dropped"].append((rank, at))
            if action.kind in (Kind.SEND_F, Kind.SEND_B):
                sites["a send before its producer"].append((rank, at))
        if sum(action.kind.is_communication for action in program) > 1:
            sites["two transfers swapped"].append((rank, 0))
    cap = 0
    for rank, actions in order.items():
        sites["an action twice"] += [(rank, at) for at in range(len(actions))]
        sites["a pair's backward split"] += [(rank, at) for at, action in enumerate(actions) if action.parts]
        peak, at = _peak(actions)
        cap = max(cap, peak)
    first_rank = case.placement.rank_of[0]
    peak, at = _peak(order[first_rank])
    if peak == cap and any(_is_first_forward(action) for action in order[first_rank][at + 1 :]):
        sites["one forward too early for the cap"].append((first_rank, at))

    fault = draw(st.sampled_from([fault for fault, places in sites.items() if places]))
    rank, at = draw(st.sampled_from(sites[fault]))
    is_programs = fault in ("two transfers swapped", "a receive dropped", "a send before its producer")
    row = (programs if is_programs else order)[rank]
    if fault == "two transfers swapped":
        transfers = [i for i, action in enumerate(row) if action.kind.is_communication]
        one, other = draw(st.lists(st.sampled_from(transfers), min_size=2, max_size=2, unique=True))
        row[one], row[other] = row[other], row[one]
    elif fault == "a receive dropped":
        del row[at]
    elif fault == "a send before its producer":
        send = row.pop(at)
        made = next(i for i, action in enumerate(row) if _produces(action, send))
        row.insert(draw(st.integers(0, made)), send)
    elif fault == "an action twice":
        row.insert(draw(st.integers(0, len(row))), row[at])
    elif fault == "a pair's backward split":
        forward, backward = row[at].parts
        row[at] = Action.pair(forward, backward._replace(kind=Kind.BACKWARD_INPUT))
        row.insert(at + 1, backward._replace(kind=Kind.BACKWARD_WEIGHT))
    else:
        later = next(i for i in range(at + 1, len(row)) if _is_first_forward(row[i]))
        action = row[later]
        row[later : later + 1] = [part for part in action.parts if part.kind is not Kind.FORWARD]
        row.insert(at + 1, action.singles[0])
    return Mutant(fault, FAULTS[fault], programs if is_programs else order, is_programs, cap)


def _is_first_forward(action: Action) -> bool:
    return action.singles[0].kind is Kind.FORWARD and action.singles[0].stage == 0


def _produces(action: Action, send: Action) -> bool:
    kinds = (Kind.FORWARD,) if send.kind is Kind.SEND_F else (Kind.FULL_BACKWARD, Kind.BACKWARD_INPUT)
    return any(
        single.kind in kinds and (single.stage, single.microbatch) == (send.stage, send.microbatch)
        for single in action.singles
    )


def _peak(actions: list[Action]) -> tuple[int, int]:
    """The most microbatches in flight, and the first position at which it is reached."""
    held = peak = position = 0
    for at, action in enumerate(actions):
        for single in action.singles:
            held += {Kind.FORWARD: 1, Kind.FULL_BACKWARD: -1, Kind.BACKWARD_INPUT: -1}.get(single.kind, 0)
            if held > peak:
                peak, position = held, at
    return peak, position


def cost_models(num_stages: int | None = None) -> st.SearchStrategy[CostModel]:
    """Cost models; with ``num_stages`` also some whose stages differ."""
    cost = st.floats(0.125, 4.0)
    per_stage = st.one_of(cost, st.lists(cost, min_size=num_stages, max_size=num_stages)) if num_stages else cost
    return st.builds(
        CostModel,
        forward=per_stage,
        backward_input=per_stage,
        backward_weight=per_stage,
        overlap=st.floats(0.5, 1.0),
        hop=st.floats(0.0, 1.0),
    )


class _Layer(nn.Module):
    """A stage that does one small thing, and may add its mark to integers that are passed along."""

    def __init__(self, width: int, kind: str, passes_integers: bool) -> None:
        super().__init__()
        self.kind, self.passes_integers = kind, passes_integers
        if kind == "experts":
            self.experts = nn.Parameter(torch.randn(2, width, width, dtype=torch.float64) / width)
        elif kind == "linear":
            self.linear = nn.Linear(width, width, dtype=torch.float64)
        elif kind != "no parameters":
            self.weight = nn.Parameter(torch.randn(width, width, dtype=torch.float64) / width)
        if kind == "beside the input":
            self.extra = nn.Parameter(torch.randn(width, dtype=torch.float64))

    def forward(self, x: torch.Tensor, ids: torch.Tensor | None = None) -> torch.Tensor | tuple[torch.Tensor, ...]:
        if ids is not None:
            x = x + 0.1 * ids.to(x.dtype)[:, None]
        y = torch.sin(x)
        if self.kind == "experts":
            y = torch.cat([y[:1] @ self.experts[0], nn.functional.linear(y[1:], self.experts[1])])
        elif self.kind == "linear":
            y = checkpoint(self.linear, y, use_reentrant=False)
        elif self.kind != "no parameters":
            y = y @ self.weight
        if self.kind == "twice":
            y = torch.tanh(y) @ self.weight.T
        if self.kind == "beside the input":
            y = y + self.extra.exp()
        if self.kind == "adds a loss":
            y = add_loss(y, torch.tanh(y @ self.weight).square().mean())
        if not self.passes_integers:
            return y
        return y, (torch.arange(len(x)) if ids is None else ids + 1)


@st.composite
def stage_stacks(draw: st.DrawFn, placement: Placement) -> Stack:
    """Small random stacks for a placement, in fp64.

    They differ in width, in which stages are frozen, have no parameters, use one twice, by slices or in a checkpoint,
    use one that does not touch the input, or add a loss, and in where integers are passed along. Where the first and
    the last stage are on one rank they may share a parameter.
    """
    width, num_stages = draw(st.integers(1, 4)), placement.num_stages
    kinds = st.sampled_from(["once", "twice", "no parameters", "beside the input", "linear", "experts", "adds a loss"])
    with torch.random.fork_rng():
        torch.manual_seed(draw(st.integers(0, 3)))
        layers = [
            _Layer(width, draw(kinds), passes_integers=stage < num_stages - 1 and draw(st.booleans()))
            for stage in range(num_stages)
        ]
    ends = layers[0], layers[-1]
    words = [layer.kind for layer in layers]
    may_tie = placement.rank_of[0] == placement.rank_of[-1] and all(hasattr(end, "weight") for end in ends)
    if may_tie and num_stages > 1 and draw(st.booleans()):
        ends[1].weight = ends[0].weight
        words.append("tied")
    for stage in draw(st.sets(st.integers(0, num_stages - 1), max_size=num_stages)):
        layers[stage].requires_grad_(False)
        words[stage] += " (frozen)"
    return Stack(layers, width, ", ".join(words))
