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

from pipelining_dualpipev.errors import ScheduleError
from pipelining_dualpipev.planning.actions import Action, Kind, Order
from pipelining_dualpipev.planning.costs import CostModel
from pipelining_dualpipev.planning.placement import Placement

__all__ = ["Span", "Timeline", "simulate"]


@dataclass(frozen=True)
class Span:
    """When one action of one rank runs; ``forward_end`` is when the forward of a pair is done (else ``end``)."""

    action: Action
    start: float
    end: float
    forward_end: float


@dataclass(frozen=True)
class Timeline:
    """A simulated step: each rank's actions with their times, in order."""

    spans: dict[int, list[Span]]

    @property
    def makespan(self) -> float:
        """The time from the start of the step until the last action of any rank ends."""
        return max((spans[-1].end for spans in self.spans.values() if spans), default=0.0)


def simulate(order: Order, costs: CostModel | None = None, *, placement: Placement) -> Timeline:
    """Play ``order`` (compute actions only) against ``costs`` (by default F = I = W = 1, nothing gained by pairs).

    A pair is taken to hand its forward's output over as soon as that forward is done, and its gradient at its end.

    Raises:
        ScheduleError: if the ranks come to wait for each other; the message says who waits for what.
    """
    costs = costs or CostModel()
    rank_of = placement.rank_of
    spans: dict[int, list[Span]] = {rank: [] for rank in order}
    forward_done: dict[tuple[int, int], float] = {}
    gradient_done: dict[tuple[int, int], float] = {}
    parked: dict[tuple[Kind, int, int], list[int]] = defaultdict(list)
    waits_for: dict[int, str] = {}
    runnable = list(order)

    def missing_input(single: Action) -> tuple[Kind, int, int] | None:
        """What this action still waits for, as (kind, stage, microbatch)."""
        for kind, stage in _inputs(single, placement.num_stages):
            done = forward_done if kind is Kind.FORWARD else gradient_done
            if (stage, single.microbatch) not in done:
                return kind, stage, single.microbatch
        return None

    def inputs_ready(single: Action) -> float:
        ready = 0.0
        for kind, stage in _inputs(single, placement.num_stages):
            done = forward_done if kind is Kind.FORWARD else gradient_done
            hop = costs.hop if rank_of[stage] != rank_of[single.stage] else 0.0
            ready = max(ready, done[stage, single.microbatch] + hop)
        return ready

    while runnable:
        rank = runnable.pop()
        row, actions = spans[rank], order[rank]
        while len(row) < len(actions):
            action = actions[len(row)]
            missing = next(filter(None, map(missing_input, action.singles)), None)
            if missing:
                parked[missing].append(rank)
                waits_for[rank] = f"rank {rank} at {action} waits for {missing[1]}{missing[0].value}{missing[2]}"
                break
            start = max(row[-1].end if row else 0.0, *map(inputs_ready, action.singles))
            end = start + costs.duration(action)
            first = action.singles[0]
            forward_end = start + costs.overlap * costs.duration(first) if action.parts else end
            row.append(Span(action, start, end, forward_end))
            for single in action.singles:
                key = (single.stage, single.microbatch)
                if single.kind is Kind.FORWARD:
                    forward_done[key] = forward_end
                    runnable += parked.pop((Kind.FORWARD, *key), ())
                elif single.kind is not Kind.BACKWARD_WEIGHT:
                    gradient_done[key] = end
                    runnable += parked.pop((Kind.BACKWARD_INPUT, *key), ())

    stuck = [waits_for[rank] for rank, row in spans.items() if len(row) < len(order[rank])]
    if stuck:
        raise ScheduleError(f"law 'acyclic': the ranks wait for each other: {'; '.join(stuck)}")
    return Timeline(spans)


def _inputs(action: Action, num_stages: int) -> list[tuple[Kind, int]]:
    """What an action needs of its own microbatch: (FORWARD or BACKWARD_INPUT, stage)."""
    stage = action.stage
    if action.kind is Kind.FORWARD:
        return [(Kind.FORWARD, stage - 1)] if stage > 0 else []
    if action.kind is Kind.BACKWARD_WEIGHT:
        return [(Kind.BACKWARD_INPUT, stage)]
    own_forward = [(Kind.FORWARD, stage)]
    return [*own_forward, (Kind.BACKWARD_INPUT, stage + 1)] if stage + 1 < num_stages else own_forward
