"""A step as a trace in Chrome's event format, which chrome://tracing and https://ui.perfetto.dev open.

Each rank is a row. A pair is one slice with its forward and its backward inside, and a counter under each row tells how
many microbatches the rank holds.

Source: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU ("Trace Event Format").
"""

from __future__ import annotations

import json
from typing import Any

from pipelining_dualpipev.planning.actions import Action
from pipelining_dualpipev.planning.simulate import Timeline

__all__ = ["to_trace"]


def to_trace(timeline: Timeline, *, microseconds: float = 1000.0) -> str:
    """The step as JSON text.

    Args:
        timeline: what to write.
        microseconds: how long one unit of the timeline's time is: 1e6 where its costs are in seconds.
    """
    events: list[dict[str, Any]] = []
    for rank, spans in timeline.spans.items():
        events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}})
        for span in spans:
            events.append(_slice(span.action, rank, span.start * microseconds, span.end * microseconds))
            if span.action.parts:
                forward, backward = span.action.parts
                events.append(_slice(forward, rank, span.start * microseconds, span.forward_end * microseconds))
                events.append(_slice(backward, rank, span.forward_end * microseconds, span.end * microseconds))
        for time, held in timeline.in_flight(rank):
            counter = {"name": f"in flight on rank {rank}", "ph": "C", "pid": 0, "ts": time * microseconds}
            events.append({**counter, "args": {"microbatches": held}})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"


def _slice(action: Action, rank: int, start: float, end: float) -> dict[str, Any]:
    event = {"name": str(action), "cat": action.kind.name, "ph": "X", "pid": 0, "tid": rank}
    if not action.parts:
        event["args"] = {"stage": action.stage, "microbatch": action.microbatch}
    return {**event, "ts": start, "dur": end - start}
