"""What the actions of a schedule cost, in any one unit of time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipelining_dualpipev.planning.actions import Action, Kind

__all__ = ["CostModel"]

Cost = float | Sequence[float]


@dataclass(frozen=True)
class CostModel:
    """Durations of a stage's work on one microbatch; a number for all stages, or one per stage.

    Attributes:
        forward: F.
        backward_input: I.
        backward_weight: W. A full backward costs I + W.
        overlap: what a pair costs, as a share of F + B: 1 where nothing is gained by pairing.
        hop: from the end of an action until its result has arrived on another rank.
        activation_bytes: what a stage holds of a microbatch from its forward until its input gradient, in bytes.
    """

    forward: Cost = 1.0
    backward_input: Cost = 1.0
    backward_weight: Cost = 1.0
    overlap: float = 1.0
    hop: float = 0.0
    activation_bytes: Cost = 0.0

    def duration(self, action: Action) -> float:
        """How long the action keeps its rank; sends and receives take none of the rank's own time."""
        kind, stage = action.kind, action.stage
        if kind is Kind.FORWARD:
            return at(self.forward, stage)
        if kind is Kind.BACKWARD_INPUT:
            return at(self.backward_input, stage)
        if kind is Kind.BACKWARD_WEIGHT:
            return at(self.backward_weight, stage)
        if kind is Kind.FULL_BACKWARD:
            return at(self.backward_input, stage) + at(self.backward_weight, stage)
        if kind is Kind.OVERLAP_F_B:
            return self.overlap * sum(self.duration(part) for part in action.parts)
        return 0.0


def at(cost: Cost, stage: int) -> float:
    """The cost of one stage."""
    return cost[stage] if isinstance(cost, Sequence) else cost
