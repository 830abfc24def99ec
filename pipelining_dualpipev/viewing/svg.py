"""A step as a picture: self-contained SVG, and a page of HTML around it.

The strip is the one that DualPipe's own figures have made known: a row a rank, time to the right, widths in proportion,
a colour for the operation, and the microbatch's number inside::

    rank 0   [0][1][2][3][0][4].....   F      light: the rank's first stage, dark: its other ones
    9.1% idle        [0    ][1    ]    B      a pair is two halves, one over the other, in one border
              ____-------------_____      how many microbatches the rank holds

Several timelines are drawn one under the other on the same axis: two schedules, or a step as planned and as measured.
Pointing at a microbatch dims all others; that takes no script, but a browser of 2023 or later, and the picture opened
by itself or in the page (not as an image within another page).

Source of the look: https://github.com/deepseek-ai/DualPipe (images/dualpipe.png).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import NamedTuple

from pipelining_dualpipev.planning.actions import Action, Kind
from pipelining_dualpipev.planning.simulate import Span, Timeline

__all__ = ["to_html", "to_svg"]

_ROW, _SILHOUETTE, _GAP = 26.0, 14.0, 8.0  # heights
_LEFT, _TITLE, _LEGEND = 84.0, 24.0, 34.0
_NARROWEST, _MAX_WIDTH = 15.0, 24000.0

_COLOURS = {  # light and dark, by operation
    Kind.FORWARD: ("#fdd0a2", "#f0882d"),
    Kind.FULL_BACKWARD: ("#b5deb0", "#4aa558"),
    Kind.BACKWARD_INPUT: ("#b7dbee", "#4196c8"),
    Kind.BACKWARD_WEIGHT: ("#d6c8ea", "#8a68bd"),
}
_NAMES = {
    Kind.FORWARD: "forward",
    Kind.FULL_BACKWARD: "full backward",
    Kind.BACKWARD_INPUT: "input gradient",
    Kind.BACKWARD_WEIGHT: "weight gradient",
}
_STYLE = """
text { font: 11px system-ui, "Segoe UI", Helvetica, Arial, "DejaVu Sans", sans-serif; fill: #1f2328; }
.a text { text-anchor: middle; font-size: 9.5px; }
.a rect { stroke: #ffffff; stroke-width: 0.7; }
.pair { fill: none; stroke: #1f2328; stroke-width: 1; }
.title { font-weight: 600; font-size: 12px; }
.small { font-size: 9.5px; fill: #57606a; }
.held { fill: #d8dee4; }
.axis { stroke: #afb8c1; stroke-width: 0.7; }
"""


class _Box(NamedTuple):
    """Where one action is drawn."""

    x: float
    y: float
    width: float
    height: float


def to_svg(timelines: Timeline | Mapping[str, Timeline]) -> str:
    """Draw one step, or several on one axis.

    Args:
        timelines: a timeline, or some by the titles to draw over them. The costs and the idle share are added to each.

    Returns:
        An SVG document; its width grows with the time, so that the shortest action still shows its number.
    """
    named = {"One step": timelines} if isinstance(timelines, Timeline) else dict(timelines)
    longest = max((timeline.makespan for timeline in named.values()), default=0.0)
    scale = _scale(list(named.values()), longest)
    parts: list[str] = []
    y = 0.0
    for y, title, timeline, rank in _rows(named):
        if rank is None:
            parts.append(f'<text class="title" x="6" y="{_n(y + 12)}">{escape(_headline(title, timeline))}</text>')
        else:
            parts += [*_labels(timeline, rank, y), *_rank(timeline, rank, y, scale)]
    y += _ROW + _SILHOUETTE + 2 * _GAP
    parts += _legend(y)
    width, height = max(720.0, _LEFT + longest * scale + 12), y + _LEGEND
    microbatches = {
        single.microbatch
        for timeline in named.values()
        for spans in timeline.spans.values()
        for span in spans
        for single in span.action.singles
    }
    lit = "\n".join(f"svg:has(.m{mb}:hover) .a:not(.m{mb}) {{ opacity: 0.2; }}" for mb in sorted(microbatches))
    size = f'width="{_n(width)}" height="{_n(height)}" viewBox="0 0 {_n(width)} {_n(height)}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
            f"<style>{_STYLE}{lit}\n</style>",
            f'<rect width="{_n(width)}" height="{_n(height)}" fill="#ffffff"/>',
            *parts,
            "</svg>\n",
        ]
    )


def _rows(named: Mapping[str, Timeline]) -> Iterator[tuple[float, str, Timeline, int | None]]:
    """From where down each rank's row is drawn, and, as of no rank, each title."""
    y = 6.0
    for title, timeline in named.items():
        yield y, title, timeline, None
        y += _TITLE
        for rank in timeline.spans:
            yield y, title, timeline, rank
            y += _ROW + _SILHOUETTE + _GAP
        y += _GAP


def _labels_alone(named: Mapping[str, Timeline]) -> str:
    """The names of the rows once more, to lie over the picture's own while that is scrolled away under them."""
    parts, bottom = [], 0.0
    for y, _, timeline, rank in _rows(named):
        if rank is not None:
            bottom = y + _ROW + _SILHOUETTE + _GAP
            box = _Box(0, y - 2, _LEFT - 2, _ROW + _SILHOUETTE + 6)  # borders of pairs reach beyond their row
            parts += [f'<rect {_rect(box)} fill="#ffffff"/>', *_labels(timeline, rank, y)]
    return f'<svg class="labels" width="{_n(_LEFT)}" height="{_n(bottom)}">{"".join(parts)}</svg>'


def to_html(timelines: Timeline | Mapping[str, Timeline], *, title: str = "A pipeline step") -> str:
    """The picture in a page of its own, scrolling sideways under the names of its rows, and each rank's figures."""
    named = {"One step": timelines} if isinstance(timelines, Timeline) else dict(timelines)
    rows = [
        f"<tr><td>{escape(name)}</td><td>{rank}</td><td>{timeline.bubble(rank):.1%}</td>"
        f"<td>{timeline.peak_in_flight(rank)}</td></tr>"
        for name, timeline in named.items()
        for rank in timeline.spans
    ]
    return "\n".join(
        [
            "<!DOCTYPE html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
            "<style>body { font: 14px system-ui, sans-serif; margin: 16px; background: #ffffff; color: #1f2328; }",
            ".strip { overflow-x: auto; display: grid; } .strip > svg { grid-area: 1 / 1; }",
            ".labels { position: sticky; left: 0; pointer-events: none; }",
            "td, th { padding: 2px 12px; text-align: right; }",
            "td:first-child, th:first-child { text-align: left; }</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            f'<div class="strip">{to_svg(named)}{_labels_alone(named)}</div>',
            "<p>Point at a microbatch to follow it through all stages.</p>",
            "<table><tr><th>schedule</th><th>rank</th><th>idle</th><th>most microbatches held</th></tr>",
            *rows,
            "</table></body></html>\n",
        ]
    )


def _n(value: float) -> str:
    """A number as short as it can be said."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _scale(timelines: list[Timeline], longest: float) -> float:
    """Pixels a unit of time: enough for the shortest action's number, within reason."""
    durations = [
        (span.forward_end if span.action.parts else span.end) - span.start
        for timeline in timelines
        for spans in timeline.spans.values()
        for span in spans
    ]
    shortest = min((duration for duration in durations if duration > 0), default=1.0)
    return min(_NARROWEST / shortest, _MAX_WIDTH / longest) if longest else 1.0


def _headline(title: str, timeline: Timeline) -> str:
    ranks = list(timeline.spans)
    idle = sum(timeline.bubble(rank) for rank in ranks) / max(1, len(ranks))
    return f"{title} · {timeline.costs} · takes {timeline.makespan:.5g}, {idle:.1%} idle"


def _labels(timeline: Timeline, rank: int, y: float) -> Iterator[str]:
    yield f'<text x="6" y="{_n(y + _ROW / 2 - 1)}">rank {rank}</text>'
    yield f'<text class="small" x="6" y="{_n(y + _ROW / 2 + 10)}">{timeline.bubble(rank):.1%} idle</text>'
    told = f"holds up to {timeline.peak_in_flight(rank)}"
    yield f'<text class="small" x="6" y="{_n(y + _ROW + _SILHOUETTE)}">{told}</text>'


def _rank(timeline: Timeline, rank: int, y: float, scale: float) -> Iterator[str]:
    spans = timeline.spans[rank]
    stages = {single.stage for span in spans for single in span.action.singles}
    early = min(stages, default=0)
    bottom = _n(y + _ROW)
    yield f'<path class="axis" d="M{_n(_LEFT)} {bottom}H{_n(_LEFT + timeline.makespan * scale)}"/>'
    borders = []  # over everything else of the row
    for span in spans:
        box = _Box(_LEFT + span.start * scale, y, (span.end - span.start) * scale, _ROW)
        halves = [box._replace(height=_ROW / 2), box._replace(y=y + _ROW / 2, height=_ROW / 2)]
        for part, place in zip(span.action.singles, halves if span.action.parts else [box], strict=True):
            yield _action(part, place, span, dark=part.stage != early)
        if span.action.parts:
            borders.append(f'<rect class="pair" {_rect(box)}/>')
    yield from borders
    yield from _silhouette(timeline, rank, y + _ROW + 2, scale)


def _rect(box: _Box) -> str:
    return f'x="{_n(box.x)}" y="{_n(box.y)}" width="{_n(box.width)}" height="{_n(box.height)}"'


def _action(action: Action, box: _Box, span: Span, *, dark: bool) -> str:
    number = str(action.microbatch)
    label = f'<text x="{_n(box.x + box.width / 2)}" y="{_n(box.y + box.height / 2 + 3.4)}">{number}</text>'
    fits = box.width >= 5.5 * len(number) + 1
    told = f"{action}: stage {action.stage}, microbatch {number}, from {span.start:.5g} to {span.end:.5g}"
    return (
        f'<g class="a m{number}"><title>{told}</title>'
        f'<rect {_rect(box)} fill="{_COLOURS[action.kind][dark]}"/>{label if fits else ""}</g>'
    )


def _silhouette(timeline: Timeline, rank: int, top: float, scale: float) -> Iterator[str]:
    """How many microbatches the rank holds, over time, as an area; all ranks to the same height."""
    highest = max(timeline.peak_in_flight(each) for each in timeline.spans)
    base = top + _SILHOUETTE
    path = f"M{_n(_LEFT)} {_n(base)}"
    for time, held in timeline.in_flight(rank):
        path += f"H{_n(_LEFT + time * scale)}V{_n(base - held / max(1, highest) * _SILHOUETTE)}"
    yield f'<path class="held" d="{path}Z"/>'


def _legend(y: float) -> Iterator[str]:
    x = 6.0
    for kind, (light, dark) in _COLOURS.items():
        yield f'<rect x="{_n(x)}" y="{_n(y)}" width="12" height="12" fill="{light}"/>'
        yield f'<rect x="{_n(x + 12)}" y="{_n(y)}" width="12" height="12" fill="{dark}"/>'
        yield f'<text x="{_n(x + 29)}" y="{_n(y + 10)}">{_NAMES[kind]}</text>'
        x += 132
    yield f'<text class="small" x="{_n(x)}" y="{_n(y + 10)}">light: first stage of the rank, dark: the other</text>'
