"""The order that costs ask for: a variant of DualPipeV's, with weight gradients where ranks would wait.

The reference order pairs forwards with backwards wherever it can, and splits only the backwards at both ends of a step.
That is right where a pair gains by overlapping. Where it gains little, a pair holds its gradient back until the whole
of it is done, and its weight gradient runs where the rank above is waiting::

    reference   (F7&B3) ......... (F4&B0)          I3 W3 are one block inside the pair
    tuned        F7 I3 | W1 W3 ..  F4 I0 |         I3 leaves early, W fills the gap

So `tune` tries a few variants, and takes the one that simulates best:

1. of the reference's pairs, all are kept, none, or none of the last (or first) few of each rank;
2. backwards that are not in a pair are split, and every forward, input gradient and pair keeps its place;
3. the steps are played against the costs, and whenever a rank would wait, a weight gradient that was put off *floats*
   into the gap; it is run before anything else where its activations take the room of the next forward.

The reference itself is one of the candidates, so what comes out is never slower than it, by simulation. The same costs
give the same order on every rank.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pipelining_dualpipev.planning.actions import Action, Kind, Order, dualpipev_order
from pipelining_dualpipev.planning.bound import lower_bound
from pipelining_dualpipev.planning.costs import CostModel, at
from pipelining_dualpipev.planning.placement import Placement
from pipelining_dualpipev.planning.simulate import Timeline, simulate

__all__ = ["Tuned", "tune"]

_PATIENCE = (0.5, 1.0)
_CLOSE = 1e-9  # makespans nearer to each other than this share are the same


@dataclass(frozen=True)
class Tuned:
    """What `tune` has chosen.

    Attributes:
        order: rank to its compute actions.
        timeline: the order played against the costs.
        variant: what was changed of the reference, in words.
    """

    order: Order
    timeline: Timeline
    variant: str


def tune(
    num_ranks: int,
    n_microbatches: int,
    costs: CostModel,
    *,
    max_in_flight: int | None = None,
    max_bytes: float | None = None,
) -> Tuned:
    """The variant of `dualpipev_order` that takes the least time under ``costs``, within the memory allowed.

    Args:
        num_ranks: ranks in the pipeline, P.
        n_microbatches: microbatches in a step, n.
        costs: of the 2P stages.
        max_in_flight: the most microbatches whose activations a rank may hold, each counted from its forward until its
            *weight* gradient, since that still needs the stage's input. By default as many as the reference, which is
            at most 2P + 1.
        max_bytes: the most bytes of activations that a rank may hold, counted in the same way with the costs'
            ``activation_bytes``.

    Raises:
        ValueError: if a number is below 1, the costs are for another number of stages, or no variant fits the memory;
            the message says what the reference needs.
    """
    reference = dualpipev_order(num_ranks, n_microbatches)
    placement = Placement.v(num_ranks)
    costs.check_stages(placement.num_stages)
    ones = [1.0] * placement.num_stages
    sizes = [at(costs.activation_bytes, stage) for stage in range(placement.num_stages)]
    needed, needed_bytes = (max(_peak(row, each) for row in reference.values()) for each in (ones, sizes))
    budgets = [
        _Budget(ones, needed if max_in_flight is None else max_in_flight),
        _Budget(sizes, math.inf if max_bytes is None else max_bytes),
    ]
    bound = lower_bound(n_microbatches, costs, placement=placement) * (1 + _CLOSE)

    least, best, variant = math.inf, None, ""
    if needed <= budgets[0].limit and needed_bytes <= budgets[1].limit:
        best, variant = reference, "the reference"
        least = simulate(reference, costs, placement=placement).makespan
    favourite: tuple[float, _Unpaired] = math.inf, _ALL
    tries: list[tuple[_Unpaired, float]] = [(unpaired, 0.0) for unpaired in _variants(num_ranks)]
    while tries and least > bound:
        unpaired, patience = tries.pop(0)
        floating = _Floating(unpaired.of(reference), placement, costs, budgets, patience, stop_at=favourite[0])
        if (floated := floating.run()) is not None:
            favourite = floating.makespan, unpaired
            if favourite[0] < least * (1 - _CLOSE):
                least, best, variant = favourite[0], floated, f"{unpaired}, weight gradients floated"
        if not tries and patience == 0.0 and favourite[0] < math.inf:
            tries = [(favourite[1], patience) for patience in _PATIENCE]
    if best is None:
        raise ValueError(_does_not_fit(max_in_flight, needed, max_bytes, needed_bytes))
    return Tuned(best, simulate(best, costs, placement=placement), variant)


def _does_not_fit(max_in_flight: int | None, needed: float, max_bytes: float | None, needed_bytes: float) -> str:
    allowed = [f"{max_in_flight} microbatches (the reference holds {needed:.0f})"] if max_in_flight is not None else []
    allowed += [f"{max_bytes:.4g} bytes (the reference holds {needed_bytes:.4g})"] if max_bytes is not None else []
    return (
        f"no order of DualPipeV keeps each rank within {' and '.join(allowed)}: allow as much as the reference, make "
        "microbatches smaller, or put fewer layers on a rank"
    )


class _Unpaired(NamedTuple):
    """Which pairs of each rank are taken apart."""

    first: float
    last: float

    def of(self, order: Order) -> Order:
        return {rank: list(self._row(actions)) for rank, actions in order.items()}

    def _row(self, actions: list[Action]) -> Iterator[Action]:
        pairs, seen = sum(bool(action.parts) for action in actions), 0
        for action in actions:
            if action.parts:
                seen += 1
                if seen <= self.first or pairs - seen < self.last:
                    yield from action.parts
                    continue
            yield action

    def __str__(self) -> str:
        if self == (0, 0):
            return "all pairs kept"
        if self.last == math.inf:
            return "no pairs"
        first = f"first {self.first:.0f} and " if self.first else ""
        return f"{first}last {self.last:.0f} pairs of each rank taken apart"


_ALL = _Unpaired(0, math.inf)


def _variants(num_ranks: int) -> list[_Unpaired]:
    end = num_ranks - 1
    ends = [_Unpaired(0, end), _Unpaired(0, 2 * end), _Unpaired(end, end)]
    return list(dict.fromkeys([_ALL, _Unpaired(0, 0), *ends]))


class _Budget(NamedTuple):
    """What a microbatch takes on each stage from its forward until its weight gradient, and what a rank may hold."""

    sizes: list[float]
    limit: float


def _peak(actions: list[Action], sizes: list[float]) -> float:
    held = peak = 0.0
    for action in actions:
        for single in action.singles:  # a pair's forward comes first
            if single.kind is Kind.FORWARD:
                held += sizes[single.stage]
                peak = max(peak, held)
            elif single.kind is not Kind.BACKWARD_INPUT:
                held -= sizes[single.stage]
    return peak


class _Task(NamedTuple):
    """A forward, a backward that is split, or a pair of them with a backward that is not."""

    action: Action
    forward: Action | None
    backward: Action | None
    duration: float


class _Rank:
    """One rank while the step is played: what it still has to do, and what it has done."""

    def __init__(self, actions: list[Action], costs: CostModel, budgets: list[_Budget]) -> None:
        self.todo: deque[_Task] = deque()
        self.put_off: deque[Action] = deque()
        self.done: list[Action] = []
        self.free = 0.0
        self.left = 0.0  # what all that is not yet done takes
        self.budgets = budgets
        self.held = [0.0] * len(budgets)
        for action in actions:
            self.left += costs.duration(action)
            if action.kind is Kind.BACKWARD_WEIGHT:
                continue
            if action.kind is Kind.FULL_BACKWARD:
                action = Action(action.stage, Kind.BACKWARD_INPUT, action.microbatch)
            singles = action.singles
            forward = singles[0] if singles[0].kind is Kind.FORWARD else None
            backward = singles[-1] if singles[-1].kind is not Kind.FORWARD else None
            self.todo.append(_Task(action, forward, backward, costs.duration(action)))

    def has_room_for(self, task: _Task) -> bool:
        if task.forward is None:
            return True
        for held, budget in zip(self.held, self.budgets, strict=True):
            if held + budget.sizes[task.forward.stage] > budget.limit:
                return False
        return True

    def hold(self, stage: int, times: int) -> None:
        for index, budget in enumerate(self.budgets):
            self.held[index] += times * budget.sizes[stage]


class _Floating:
    """Plays an order and lets its weight gradients float: event by event, a rank at a time.

    ``patience`` is how much of a weight gradient may stick out of the gap it floats into, as a share: with 0 it must
    fit, with 1 any gap will do. Where it is not known yet when the next action can start, a gap is taken to be long.
    """

    def __init__(
        self,
        order: Order,
        placement: Placement,
        costs: CostModel,
        budgets: list[_Budget],
        patience: float,
        *,
        stop_at: float,
    ) -> None:
        budgets = [budget for budget in budgets if budget.limit < math.inf]
        self.ranks = [_Rank(order[rank], costs, budgets) for rank in range(placement.num_ranks)]
        self.rank_of, self.last, self.overlap = placement.rank_of, placement.num_stages - 1, costs.overlap
        self.stop_at, self.stopped = stop_at, False
        stages = range(placement.num_stages)
        self.hops = [costs.hop if placement.crosses(stage) else 0.0 for stage in stages]  # to the stage above
        self.forward = [at(costs.forward, stage) for stage in stages]
        self.weight = [at(costs.backward_weight, stage) for stage in stages]
        self.floats_into = [(1 - patience) * weight for weight in self.weight]
        # When the input of a stage's forward and of its backward are there; infinite until that is known. A stage's
        # own forward needs no entry: it stands before the backward in the same rank's list.
        n = 1 + max(single.microbatch for action in order[0] for single in action.singles)
        self.inputs = [[math.inf if stage else 0.0] * n for stage in stages]
        self.gradients = [[math.inf if stage < self.last else 0.0] * n for stage in stages]
        self.events = [(0.0, rank) for rank in range(placement.num_ranks)]

    def run(self) -> Order | None:
        """The order with its weight gradients placed; None where memory does not suffice, or it would take too long."""
        while self.events and not self.stopped:
            time, rank = heapq.heappop(self.events)
            if time >= self.ranks[rank].free:
                self._next(rank, time)
        if self.stopped or any(state.todo for state in self.ranks):
            return None
        return {rank: state.done for rank, state in enumerate(self.ranks)}

    @property
    def makespan(self) -> float:
        """When the last action of any rank has ended."""
        return max(state.free for state in self.ranks)

    def _next(self, rank: int, time: float) -> None:
        state = self.ranks[rank]
        if not state.todo or not state.has_room_for(state.todo[0]):
            if state.put_off:
                self._run_weight(rank, time)
            return
        task = state.todo[0]
        ready = time
        if task.forward:
            ready = max(ready, self.inputs[task.forward.stage][task.forward.microbatch])
        if task.backward:
            ready = max(ready, self.gradients[task.backward.stage][task.backward.microbatch])
        if ready <= time:
            self._run(rank, state.todo.popleft(), time)
        elif state.put_off and ready - time >= self.floats_into[state.put_off[0].stage]:
            self._run_weight(rank, time)
        elif ready < math.inf:
            heapq.heappush(self.events, (ready, rank))

    def _run(self, rank: int, task: _Task, time: float) -> None:
        state, end = self.ranks[rank], time + task.duration
        if task.forward:
            stage, microbatch = task.forward.stage, task.forward.microbatch
            state.hold(stage, 1)
            if stage < self.last:
                forward_end = time + self.overlap * self.forward[stage] if task.backward else end
                self.inputs[stage + 1][microbatch] = forward_end + self.hops[stage]
                heapq.heappush(self.events, (forward_end + self.hops[stage], self.rank_of[stage + 1]))
        if task.backward:
            stage, microbatch = task.backward.stage, task.backward.microbatch
            if stage > 0:
                self.gradients[stage - 1][microbatch] = end + self.hops[stage - 1]
                heapq.heappush(self.events, (end + self.hops[stage - 1], self.rank_of[stage - 1]))
            if task.forward:
                state.hold(stage, -1)
            else:
                state.put_off.append(Action(stage, Kind.BACKWARD_WEIGHT, microbatch))
        self._finish(rank, task.action, time, end)

    def _run_weight(self, rank: int, time: float) -> None:
        action = self.ranks[rank].put_off.popleft()
        self.ranks[rank].hold(action.stage, -1)
        self._finish(rank, action, time, time + self.weight[action.stage])

    def _finish(self, rank: int, action: Action, start: float, end: float) -> None:
        state = self.ranks[rank]
        state.done.append(action)
        state.left -= end - start
        state.free = end
        self.stopped |= end + state.left >= self.stop_at
        heapq.heappush(self.events, (end, rank))
