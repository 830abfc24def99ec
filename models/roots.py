"""Where the data of a tensor comes from, and what the dry run of a plan notes about it.

A *root* is an input of the model, a parameter, or an output of one call of a unit. Every `models.absent.Absent` knows
its own, so whatever a unit or the forward's own code takes tells what has to be brought there. Random numbers are a
root too: of what glue draws every stage has its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pipelining_dualpipev.models.guards import Tape

__all__ = ["Demand", "Root", "pretending", "recording", "told"]


class Root(NamedTuple):
    """Where a value comes from: an ``"input"`` or a ``"parameter"`` by name, or an output of an ``"event"``.

    An event is one call of a unit (`models.plan`); its outputs are numbered. ``"random"`` is what an operation has
    drawn, named after it and numbered.
    """

    kind: str
    name: str
    event: int = -1
    output: int = -1

    def __str__(self) -> str:
        return f"{self.kind} {self.name}" if self.kind != "event" else f"output {self.output} of {self.name}"


class Demand(NamedTuple):
    """Glue has looked at data, or written it where it cannot be followed: who comes this far must have it.

    Attributes:
        events: how many units had been called before.
        roots: of the data.
    """

    events: int
    roots: frozenset[Root]


class _Recording(threading.local):
    """What the dry run wants to know of the operations that run meanwhile."""

    dry_run = False
    pretends = False
    unit = ""  # whose call is running, by name
    used: set[Root] | None = None  # in a unit: roots of whatever operations have taken; another set in each call
    guessed = False  # in a unit: whether a value that is not there was pretended
    drew_in_place = False  # in a unit: whether random numbers were written into a real tensor
    demands: list[Demand] | None = None  # of glue
    events = 0  # how many units have been called so far
    writes_in_place = False  # into something that a unit gave, or an input
    tape: Tape | None = None  # of what is done with known data
    drawn = 0  # how often random numbers were drawn
    draws = 0.0  # what glue gets where it draws evenly from 0 to 1
    chances: tuple[object, ...] = ()  # what code has seen of these

    def __init__(self) -> None:
        self.written_by_units: set[Root] = set()  # what units gave and one has written into
        self.written_by_glue: set[Root] = set()

    @contextmanager
    def dry_run_of(self, demands: list[Demand], tape: Tape, draws: float) -> Iterator[None]:
        """Record a dry run."""
        self.dry_run, self.writes_in_place, self.events, self.drawn = True, False, 0, 0
        self.demands, self.tape, self.draws, self.chances = demands, tape, draws, ()
        self.written_by_units, self.written_by_glue = set(), set()
        try:
            yield
        finally:
            self.dry_run, self.demands, self.tape = False, None, None

    def draw(self, operation: str) -> Root:
        """A new root, of the random numbers that glue draws now."""
        self.drawn += 1
        return Root("random", operation, output=self.drawn)


recording = _Recording()


def told(roots: frozenset[Root] | set[Root]) -> str:
    """A few roots in words."""
    words = sorted(map(str, roots))
    return ", ".join(words[:3]) + (f" and {len(words) - 3} more" if len(words) > 3 else "") if words else "nothing"


@contextmanager
def pretending(unit: str) -> Iterator[set[Root]]:
    """In the dry run, inside a unit: values may be pretended; yields what becomes the roots that the unit has used."""
    names = ("pretends", "used", "unit", "guessed", "drew_in_place")
    before = {name: getattr(recording, name) for name in names}
    used: set[Root] = set()
    recording.pretends, recording.used, recording.unit = True, used, unit
    recording.guessed = recording.drew_in_place = False
    try:
        yield used
    finally:
        for name, value in before.items():
            setattr(recording, name, value)
