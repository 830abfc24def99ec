"""A schedule played against a cost model.

Every rank runs its list in order; an action starts once its rank is free and its inputs are there, and a result
reaches another rank one hop after it is produced. Sends never block: this is the time that the order itself allows,
which `lowering` then takes as the order of transfers.

A rank that waits is parked under the action it waits for, and woken when that one ends, so each action is looked at a
bounded number of times and P=64, n=512 takes well under a second.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from pipelining_dualpipev.errors import ScheduleError
from pipelining_dualpipev.planning.actions import Action, Kind, Order
from pipelining_dualpipev.planning.costs import CostModel, at
from pipelining_dualpipev.planning.placement import Placement

__all__ = ["Span", "Timeline", "simulate"]


_Key = tuple[int, int]  # stage, microbatch
_Need = tuple[
    dict[_Key, float], int, float
]  # where it is noted that it is done, of which stage, and the hop from there


_RELEASES = (Kind.FULL_BACKWARD, Kind.BACKWARD_INPUT)


class Span(NamedTuple):
    """When one action of one rank runs; ``forward_end`` is when the forward of a pair is done (else ``end``)."""

    action: Action
    start: float
    end: float
    forward_end: float


@dataclass(frozen=True)
class Timeline:
    """A simulated step: each rank's actions with their times, in order."""

    spans: dict[int, list[Span]]
    costs: CostModel

    @property
    def makespan(self) -> float:
        """The time from the start of the step until the last action of any rank ends."""
        return max((spans[-1].end for spans in self.spans.values() if spans), default=0.0)

    def bubble(self, rank: int) -> float:
        """How much of the makespan the rank is idle, from 0 to 1."""
        busy = sum(span.end - span.start for span in self.spans[rank])
        return 1.0 - busy / self.makespan if self.makespan else 0.0

    def in_flight(self, rank: int) -> list[tuple[float, int]]:
        """How many microbatches the rank holds, each from the start of its forward to the end of its input gradient.

        As steps: (time, number from then on), by time, one entry for each time at which the number changes.
        """
        changes: dict[float, int] = defaultdict(int)
        for span in self.spans[rank]:
            for single in span.action.singles:
                if single.kind is Kind.FORWARD:
                    changes[span.start] += 1
                elif single.kind is not Kind.BACKWARD_WEIGHT:
                    changes[span.end] -= 1
        steps, held = [], 0
        for time in sorted(changes):
            if changes[time]:
                held += changes[time]
                steps.append((time, held))
        return steps

    def peak_in_flight(self, rank: int) -> int:
        """The most microbatches that the rank holds at once; an action's own are counted before others are released."""
        held = peak = 0
        for span in self.spans[rank]:
            held += sum(single.kind is Kind.FORWARD for single in span.action.singles)
            peak = max(peak, held)
            held -= sum(single.kind in _RELEASES for single in span.action.singles)
        return peak

    def peak_bytes(self, rank: int) -> float:
        """The most bytes of activations that the rank holds at once, if the cost model knows what a stage holds."""
        held = peak = 0.0
        for span in self.spans[rank]:
            sizes = {single: at(self.costs.activation_bytes, single.stage) for single in span.action.singles}
            held += sum(size for single, size in sizes.items() if single.kind is Kind.FORWARD)
            peak = max(peak, held)
            held -= sum(size for single, size in sizes.items() if single.kind in _RELEASES)
        return peak


def simulate(order: Order, costs: CostModel | None = None, *, placement: Placement) -> Timeline:
    """Play ``order`` (compute actions only) against ``costs`` (by default F = I = W = 1, nothing gained by pairs).

    A pair is taken to hand its forward's output over as soon as that forward is done, and its gradient at its end.

    Raises:
        ScheduleError: if the ranks come to wait for each other; the message says who waits for what.
    """
    costs = costs or CostModel()
    forward_done: dict[_Key, float] = {}
    gradient_done: dict[_Key, float] = {}
    needs = _needs(placement, costs.hop, forward_done, gradient_done)
    spans: dict[int, list[Span]] = {rank: [] for rank in order}
    parked: dict[tuple[int, _Key], list[int]] = defaultdict(list)  # by table and key: the ranks that wait for it
    runnable = list(order)

    while runnable:
        rank = runnable.pop()
        row, actions = spans[rank], order[rank]
        free = row[-1].end if row else 0.0
        for position in range(len(row), len(actions)):
            action = actions[position]
            missing = None
            start = free
            for single in action.parts or (action,):
                for table, source, hop in needs[single.kind, single.stage]:
                    done = table.get((source, single.microbatch))
                    if done is None:
                        missing = id(table), (source, single.microbatch)
                    elif done + hop > start:
                        start = done + hop
            if missing:
                parked[missing].append(rank)
                break
            free = start + costs.duration(action)
            forward_end = start + costs.overlap * costs.duration(action.parts[0]) if action.parts else free
            row.append(Span(action, start, free, forward_end))
            for single in action.parts or (action,):
                if single.kind is Kind.BACKWARD_WEIGHT:
                    continue
                forward = single.kind is Kind.FORWARD
                table, key = forward_done if forward else gradient_done, (single.stage, single.microbatch)
                table[key] = forward_end if forward else free
                if (id(table), key) in parked:
                    runnable += parked.pop((id(table), key))

    if parked:
        raise ScheduleError(
            f"law 'acyclic': the ranks wait for each other: {_stuck(order, spans, parked, forward_done)}"
        )
    return Timeline(spans, costs)


def _needs(
    placement: Placement, hop: float, forward_done: dict[_Key, float], gradient_done: dict[_Key, float]
) -> dict[tuple[Kind, int], list[_Need]]:
    """For each kind of action and stage what it needs of its own microbatch."""
    needs: dict[tuple[Kind, int], list[_Need]] = {}
    for stage in range(placement.num_stages):
        needs[Kind.FORWARD, stage] = (
            [(forward_done, stage - 1, hop if placement.crosses(stage - 1) else 0.0)] if stage > 0 else []
        )
        own_forward: _Need = (forward_done, stage, 0.0)
        from_above: _Need = (gradient_done, stage + 1, hop if placement.crosses(stage) else 0.0)
        backward = [own_forward, from_above] if stage + 1 < placement.num_stages else [own_forward]
        needs[Kind.FULL_BACKWARD, stage] = needs[Kind.BACKWARD_INPUT, stage] = backward
        needs[Kind.BACKWARD_WEIGHT, stage] = [(gradient_done, stage, 0.0)]
    return needs


def _stuck(
    order: Order,
    spans: dict[int, list[Span]],
    parked: dict[tuple[int, _Key], list[int]],
    forward_done: dict[_Key, float],
) -> str:
    told = []
    for (table, (stage, microbatch)), ranks in parked.items():
        kind = Kind.FORWARD if table == id(forward_done) else Kind.BACKWARD_INPUT
        for rank in ranks:
            at = order[rank][len(spans[rank])]
            told.append(f"rank {rank} at {at} waits for {Action(stage, kind, microbatch)}")
    return "; ".join(sorted(told))
