"""A time that no schedule on a placement can beat.

Take one rank. Each of its jobs (a forward, an input gradient, a weight gradient of some microbatch) cannot start before
its *head*, the least time in which the stages before can have brought it its input, and after it at least its *tail*
must pass, what the pipeline still has to do with its result::

    head             job            tail
    |----------------|==============|--------------------------|
    way down and up                  way back, and weight gradients

To schedule such jobs on one machine, with interruptions allowed, is easy: always run the released job with the longest
tail (Jackson). What comes out is at most what any real schedule takes, which must do the same jobs uninterrupted. The
bound is the largest over all ranks. In heads and tails each stage works at one microbatch at a time, in order.

Where pairs gain by overlapping, every duration is taken times ``overlap``, as if all of it could be paired.

Source: J. R. Jackson, "An extension of Johnson's results on job lot scheduling" (1956); J. Carlier, "The one-machine
sequencing problem" (1982).
"""

from __future__ import annotations

import heapq
import math
from typing import NamedTuple

from pipelining_dualpipev.planning.actions import Action, Kind
from pipelining_dualpipev.planning.costs import CostModel
from pipelining_dualpipev.planning.placement import Placement

__all__ = ["lower_bound"]


class _Job(NamedTuple):
    head: float
    duration: float
    tail: float


def lower_bound(n_microbatches: int, costs: CostModel | None = None, *, placement: Placement) -> float:
    """A makespan below which no order of ``n_microbatches`` on ``placement`` can be, in the unit of ``costs``.

    It holds for orders that run the microbatches of a stage in order. No account is taken of memory.
    """
    costs = costs or CostModel()
    stages, n = range(placement.num_stages), n_microbatches
    gain = min(1.0, costs.overlap)
    forward, gradient, weight = (
        [gain * costs.duration(Action(stage, kind, 0)) for stage in stages]
        for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    )
    hop = [costs.hop if placement.crosses(stage) else 0.0 for stage in stages]  # from a stage to the next
    last = placement.num_stages - 1

    down = [[0.0] * n for _ in stages]  # heads of forwards
    for stage in stages:
        for mb in range(n):
            arrives = down[stage - 1][mb] + forward[stage - 1] + hop[stage - 1] if stage else 0.0
            down[stage][mb] = max(arrives, down[stage][mb - 1] + forward[stage] if mb else 0.0)
    back = [[0.0] * n for _ in stages]  # heads of input gradients
    for stage in reversed(stages):
        for mb in range(n):
            ready = down[stage][mb] + forward[stage]
            arrives = back[stage + 1][mb] + gradient[stage + 1] + hop[stage] if stage < last else 0.0
            back[stage][mb] = max(ready, arrives, back[stage][mb - 1] + gradient[stage] if mb else 0.0)
    after_gradient = [[0.0] * n for _ in stages]  # tails of input gradients
    for stage in stages:
        for mb in reversed(range(n)):
            passed_on = hop[stage - 1] + gradient[stage - 1] + after_gradient[stage - 1][mb] if stage else 0.0
            next_one = gradient[stage] + after_gradient[stage][mb + 1] if mb + 1 < n else 0.0
            after_gradient[stage][mb] = max(weight[stage], passed_on, next_one)
    after_forward = [[0.0] * n for _ in stages]  # tails of forwards
    for stage in reversed(stages):
        for mb in reversed(range(n)):
            own = gradient[stage] + after_gradient[stage][mb]
            passed_on = hop[stage] + forward[stage + 1] + after_forward[stage + 1][mb] if stage < last else 0.0
            next_one = forward[stage] + after_forward[stage][mb + 1] if mb + 1 < n else 0.0
            after_forward[stage][mb] = max(own, passed_on, next_one)

    bound = 0.0
    for rank in range(placement.num_ranks):
        jobs = []
        for stage in placement.stages_of(rank):
            for mb in range(n):
                jobs.append(_Job(down[stage][mb], forward[stage], after_forward[stage][mb]))
                jobs.append(_Job(back[stage][mb], gradient[stage], after_gradient[stage][mb]))
                jobs.append(_Job(back[stage][mb] + gradient[stage], weight[stage], 0.0))
        bound = max(bound, _one_machine(jobs))
    return bound


def _one_machine(jobs: list[_Job]) -> float:
    """The least makespan, tails included, on one machine that may interrupt a job for one with a longer tail."""
    jobs = sorted(jobs)
    released: list[tuple[float, float]] = []  # (minus the tail, what is left of the duration)
    time = makespan = 0.0
    position = 0
    while position < len(jobs) or released:
        if not released:
            time = max(time, jobs[position].head)
        while position < len(jobs) and jobs[position].head <= time:
            heapq.heappush(released, (-jobs[position].tail, jobs[position].duration))
            position += 1
        minus_tail, left = heapq.heappop(released)
        until = jobs[position].head if position < len(jobs) else math.inf
        if time + left <= until:
            time += left
            makespan = max(makespan, time - minus_tail)
        else:
            heapq.heappush(released, (minus_tail, left - (until - time)))
            time = until
    return makespan
