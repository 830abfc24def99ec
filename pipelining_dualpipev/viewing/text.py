"""A step as text, for terminals and for pages that show code.

Time runs to the right, and each rank has two rows, one for forwards and one for backwards::

    rank 0  F  0123456a  b  c  d7  ...e      `a` is microbatch 0 on the rank's late stage
            B          a+ b+ c+  d+...       its backward: the input gradient `a`, the weight gradient `+`

Microbatches of a rank's first stage are numbers. Those of its other stages are the same numbers with the first digit as
a letter, a for 0 to j for 9, so that both take the same room: ``12`` and ``b2``. An action that takes more room than
its number is filled up with ``-``; where there is less, it is ``*``. A dot is time in which the rank waits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from pipelining_dualpipev.planning.actions import Action, Kind
from pipelining_dualpipev.planning.simulate import Span, Timeline

__all__ = ["to_text"]


def to_text(timeline: Timeline, *, columns: int | None = None) -> str:
    """Draw the step; the shortest forward or input gradient is as wide as the largest microbatch's number.

    Args:
        timeline: what to draw.
        columns: how wide a line may be; a longer step is cut into blocks, one under the other. None for any width.
    """
    parts = [part for spans in timeline.spans.values() for span in spans for part in _parts(span, timeline)]
    shortest = min(
        (end - start for kind, _, start, end in parts if kind is not Kind.BACKWARD_WEIGHT and end > start), default=1.0
    )
    digits = len(str(max((single.microbatch for _, single, _, _ in parts), default=0)))
    paper = _Paper(scale=digits / shortest, digits=digits, makespan=timeline.makespan)
    rows = []
    for rank, spans in timeline.spans.items():
        first = min((single.stage for span in spans for single in span.action.singles), default=0)
        forward, backward = paper.rows([part for span in spans for part in _parts(span, timeline)], first)
        rows += [(f"rank {rank}  F  ", forward), ("B  ", backward)]
    margin = max((len(label) for label, _ in rows), default=0)
    block = max(1, paper.width if columns is None else columns - margin)
    return "\n\n".join(
        "\n".join(f"{label:>{margin}}{row[start : start + block]}".rstrip() for label, row in rows)
        for start in range(0, max(1, paper.width), block)
    )


def _parts(span: Span, timeline: Timeline) -> Iterator[tuple[Kind, Action, float, float]]:
    """The forward, input gradient and weight gradient of a span, each with its times."""
    for single in span.action.singles:
        start = span.forward_end if span.action.parts and single.kind is not Kind.FORWARD else span.start
        end = span.forward_end if single.kind is Kind.FORWARD else span.end
        if single.kind is not Kind.FULL_BACKWARD:
            yield single.kind, single, start, end
            continue
        gradient = timeline.costs.duration(single._replace(kind=Kind.BACKWARD_INPUT))
        whole = timeline.costs.duration(single)
        middle = start + (end - start) * (gradient / whole if whole else 0.5)
        yield Kind.BACKWARD_INPUT, single, start, middle
        yield Kind.BACKWARD_WEIGHT, single, middle, end


@dataclass(frozen=True)
class _Paper:
    """What it is drawn on: columns a unit of time, and the digits of a number."""

    scale: float
    digits: int
    makespan: float

    @property
    def width(self) -> int:
        return math.ceil(round(self.makespan * self.scale, 6))

    def rows(self, parts: list[tuple[Kind, Action, float, float]], first_stage: int) -> tuple[str, str]:
        forward, backward = ["."] * self.width, ["."] * self.width
        for kind, single, start, end in parts:
            begin, room = self.column(start), self.column(end) - self.column(start)
            row, other = (forward, backward) if kind is Kind.FORWARD else (backward, forward)
            row[begin : begin + room] = self.cell(kind, single, room, single.stage != first_stage)
            other[begin : begin + room] = " " * room
        return "".join(forward), "".join(backward)

    def column(self, time: float) -> int:
        return round(round(time * self.scale, 6))

    def cell(self, kind: Kind, single: Action, room: int, late: bool) -> str:
        if kind is Kind.BACKWARD_WEIGHT:
            return "+" * room
        name = f"{single.microbatch:0{self.digits}}"
        if late:
            name = chr(ord("a") + int(name[0])) + name[1:]
        return name.ljust(room, "-") if room >= len(name) else "*" * room
