"""What the actions of a schedule cost, in any one unit of time."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

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
        if not action.parts:
            return self._durations[action.kind, action.stage]
        total = 0.0
        for part in action.parts:
            total += self._durations[part.kind, part.stage]
        return self.overlap * total

    @cached_property
    def _durations(self) -> _Durations:
        return _Durations(self)  # a step asks for the same few a hundred thousand times

    def check_stages(self, num_stages: int) -> None:
        """See that costs given per stage are given for each of ``num_stages`` stages.

        Raises:
            ValueError: naming the cost and both numbers.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Sequence) and len(value) != num_stages:
                raise ValueError(
                    f"{field.name} has {len(value)} costs, the pipeline {num_stages} stages: give one number for all "
                    f"stages, or {num_stages}"
                )

    def to_json(self) -> str:
        """The costs as a JSON object with the attributes' names."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> CostModel:
        """The inverse of `to_json`; what is left out has its default.

        Raises:
            ValueError: if the text is not such an object, naming what in it is wrong.
        """
        try:
            given = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"the costs are not JSON: {error}") from None
        known = [field.name for field in fields(cls)]
        if not isinstance(given, dict):
            raise ValueError(f"the costs are a {type(given).__name__}: give an object with any of {', '.join(known)}")
        if unknown := sorted(set(given) - set(known)):
            raise ValueError(f"the costs have {', '.join(unknown)}: known are {', '.join(known)}")
        values: dict[str, Any] = {name: _checked(name, value) for name, value in given.items()}
        return cls(**values)

    def save(self, path: str | Path) -> None:
        """Write `to_json` to a file."""
        Path(path).write_text(self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> CostModel:
        """Read what `save` has written.

        Raises:
            ValueError: as `from_json`.
            OSError: if the file cannot be read.
        """
        return cls.from_json(Path(path).read_text())

    def __str__(self) -> str:
        costs = [("F", self.forward), ("I", self.backward_input), ("W", self.backward_weight), ("hop", self.hop)]
        return ", ".join([*(f"{name} {_range(cost)}" for name, cost in costs), f"pair {self.overlap:g} (F + B)"])


class _Durations(dict[tuple[Kind, int], float]):
    """By kind and stage, each worked out when it is first asked for."""

    def __init__(self, costs: CostModel) -> None:
        super().__init__()
        self._costs = costs

    def __missing__(self, key: tuple[Kind, int]) -> float:
        kind, stage = key
        gradient, weight = at(self._costs.backward_input, stage), at(self._costs.backward_weight, stage)
        takes = {
            Kind.FORWARD: at(self._costs.forward, stage),
            Kind.BACKWARD_INPUT: gradient,
            Kind.BACKWARD_WEIGHT: weight,
            Kind.FULL_BACKWARD: gradient + weight,
        }
        self[key] = takes.get(kind, 0.0)
        return self[key]


def at(cost: Cost, stage: int) -> float:
    """The cost of one stage."""
    return cost if isinstance(cost, (float, int)) else cost[stage]


def _range(cost: Cost) -> str:
    if not isinstance(cost, Sequence):
        return f"{cost:.4g}"
    return f"{min(cost):.4g} to {max(cost):.4g}" if min(cost) < max(cost) else f"{cost[0]:.4g}"


def _checked(name: str, value: Any) -> Cost:
    per_stage = isinstance(value, list) and name not in ("overlap", "hop")
    for number in value if per_stage else [value]:
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number < math.inf:
            kinds = (
                "a number of 0 or more, or a list of them"
                if name not in ("overlap", "hop")
                else "a number of 0 or more"
            )
            raise ValueError(f"{name} is {value!r}: give {kinds}")
    return value
