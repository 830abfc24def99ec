"""Schedules side by side, under the same costs.

All of them run the same model, cut into 2P stages over P ranks. 1F1B has one stage a rank, so two neighbouring stages
make one of its own; interleaved 1F1B deals the stages round the ranks, stage s on rank s % P, and so has a hop between
any two. What a schedule holds is counted in stages of the 2P, so that it can be compared.

torch's orders come from torch's own generators, which the caller hands in: there is no torch in here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipelining_dualpipev.planning.actions import Action, Kind, Order, dualpipev_order
from pipelining_dualpipev.planning.costs import Cost, CostModel, at
from pipelining_dualpipev.planning.placement import Placement
from pipelining_dualpipev.planning.simulate import Timeline, simulate
from pipelining_dualpipev.planning.tune import tune

__all__ = ["Compared", "compare", "one_f_one_b_order"]


@dataclass(frozen=True)
class Compared:
    """One schedule's figures.

    Attributes:
        name: of the schedule.
        timeline: the step, simulated.
        peak_in_flight: the most (stage, microbatch) that a rank holds, in stages of the 2P.
        peak_bytes: the most bytes of activations that a rank holds, if the costs know what a stage holds.
    """

    name: str
    timeline: Timeline
    peak_in_flight: int
    peak_bytes: float

    @property
    def bubble(self) -> float:
        """The idle share of all ranks together, from 0 to 1."""
        ranks = list(self.timeline.spans)
        return sum(map(self.timeline.bubble, ranks)) / len(ranks)


def one_f_one_b_order(num_ranks: int, n_microbatches: int) -> Order:
    """1F1B with one stage a rank: P-1-r forwards, then a forward and a backward in turn, then the backwards left.

    Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (PipeDream-Flush, 2021).
    """
    order: Order = {}
    for rank in range(num_ranks):
        ahead = min(n_microbatches, num_ranks - 1 - rank)
        forwards = [Action(rank, Kind.FORWARD, mb) for mb in range(n_microbatches)]
        backwards = [Action(rank, Kind.FULL_BACKWARD, mb) for mb in range(n_microbatches)]
        turns = [action for turn in zip(forwards[ahead:], backwards, strict=False) for action in turn]
        order[rank] = [*forwards[:ahead], *turns, *backwards[n_microbatches - ahead :]]
    return order


def compare(
    num_ranks: int,
    n_microbatches: int,
    costs: CostModel,
    others: Mapping[str, tuple[Order, Placement]],
) -> list[Compared]:
    """Simulate 1F1B, ``others`` (orders of 2P stages, with their placement), DualPipeV and DualPipeV tuned.

    Raises:
        ValueError: as `tune`.
    """
    tuned = tune(num_ranks, n_microbatches, costs)
    loop = Placement.loop(num_ranks)
    one_f_one_b = simulate(one_f_one_b_order(num_ranks, n_microbatches), _in_pairs(costs, num_ranks), placement=loop)
    timelines = {
        "1F1B": one_f_one_b,
        **{name: simulate(order, costs, placement=placement) for name, (order, placement) in others.items()},
        "DualPipeV": simulate(dualpipev_order(num_ranks, n_microbatches), costs, placement=Placement.v(num_ranks)),
        "DualPipeV, tuned": tuned.timeline,
    }
    return [
        Compared(
            name,
            timeline,
            max(map(timeline.peak_in_flight, timeline.spans)) * (2 if timeline is one_f_one_b else 1),
            max(map(timeline.peak_bytes, timeline.spans)),
        )
        for name, timeline in timelines.items()
    ]


def _in_pairs(costs: CostModel, num_ranks: int) -> CostModel:
    """The costs of P stages, each made of two neighbouring ones."""

    def summed(cost: Cost) -> list[float]:
        return [at(cost, 2 * stage) + at(cost, 2 * stage + 1) for stage in range(num_ranks)]

    return CostModel(
        forward=summed(costs.forward),
        backward_input=summed(costs.backward_input),
        backward_weight=summed(costs.backward_weight),
        overlap=costs.overlap,
        hop=costs.hop,
        activation_bytes=summed(costs.activation_bytes),
    )
