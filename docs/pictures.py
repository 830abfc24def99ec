"""Draws the pictures and tables in the pages from the code, so that they cannot say anything else than the code does.

    python docs/pictures.py        writes them into the pages again

In a page, what is drawn stands between the comments ``<!-- drawn: NAME -->`` and ``<!-- end -->``; tests/docs compares
each with what is drawn here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from pipelining_dualpipev.planning import Action, Kind, Placement, dualpipev_order, simulate

DOCS = Path(__file__).parent
BLOCK = re.compile(r"(<!-- drawn: ([\w-]+) -->\n)(.*?)(?=<!-- end -->)", re.DOTALL)
NUM_RANKS, N = 4, 10


def name_of(action: Action) -> str:
    """Microbatches going down the V are digits, those coming back up are letters."""
    return (str if action.stage < NUM_RANKS else lambda i: chr(ord("a") + i))(action.microbatch)


def time() -> str:
    """One step of every rank against time: F, I and W take one unit each, and a pair as long as its parts."""
    order = dualpipev_order(NUM_RANKS, N)
    timeline = simulate(order, placement=Placement.v(NUM_RANKS))
    width = round(timeline.makespan)
    lines = []
    for rank, spans in timeline.spans.items():
        forward, backward = ["."] * width, ["."] * width
        for span in spans:
            start = round(span.start)
            for single in span.action.singles:
                if single.kind is Kind.FORWARD:
                    forward[start] = name_of(single)
                    start += 1
                if single.kind in (Kind.BACKWARD_INPUT, Kind.FULL_BACKWARD):
                    backward[start] = name_of(single)
                    start += 1
                if single.kind in (Kind.BACKWARD_WEIGHT, Kind.FULL_BACKWARD):
                    backward[start] = "+"
                    start += 1
        both = [" " if b != "." else f for f, b in zip(forward, backward, strict=True)]
        other = [" " if f not in ". " else b for f, b in zip(both, backward, strict=True)]
        lines += [f"rank {rank}  F  {''.join(both)}".rstrip(), f"        B  {''.join(other)}".rstrip()]
    return fenced(lines)


def steps() -> str:
    """Each rank's list, cut into the eight steps of the reference."""
    order = dualpipev_order(NUM_RANKS, N)
    lines = []
    for rank, actions in order.items():
        below, above = NUM_RANKS - rank - 1, rank + 1
        steady = N - 2 * NUM_RANKS + above
        # The fold has nothing to overlap its first backward with, so its first pair is written apart.
        apart = 1 if below == 0 else 0
        sizes = [2 * below, 2 * above, 3 * below, 2 * steady + apart, 2 * below, 2 * above, 2 * below, above]
        sizes[5] = len(actions) - sum(sizes[:5]) - sum(sizes[6:])
        rest = iter(actions)
        for number, size in enumerate(sizes, 1):
            words = " ".join(short(next(rest)) for _ in range(size))
            lines.append(f"{f'rank {rank}' if number == 1 else '':8}step {number}  {words}".rstrip())
        assert next(rest, None) is None
    return fenced(lines)


def short(action: Action) -> str:
    return "&".join(map(str, action.singles))


def fenced(lines: list[str]) -> str:
    return "\n".join(["```text", *lines, "```", ""])


def options(name: str) -> str:
    """The options of a command of ``dualpipev``, from the command itself."""
    import typer.main

    from pipelining_dualpipev.cli import app

    lines = ["| option | default | |", "|---|---|---|"]
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    for option in command.params:
        shown = option.show_default if isinstance(option.show_default, str) else f"`{option.default}`"
        lines.append(f"| `{option.opts[0]}` | {shown} | {option.help} |")
    return "\n".join([*lines, ""])


PICTURES: dict[str, Callable[[], str]] = {
    "time": time,
    "steps": steps,
    "train-options": partial(options, "train"),
    "verify-options": partial(options, "verify"),
}


def pages() -> Iterator[Path]:
    yield from [*sorted(DOCS.rglob("*.md")), DOCS.parent / "README.md"]


def drawn(page: str) -> str:
    """The page with its pictures drawn anew."""
    return BLOCK.sub(lambda match: match[1] + PICTURES[match[2]](), page)


if __name__ == "__main__":
    for path in pages():
        old = path.read_text()
        if (new := drawn(old)) != old:
            path.write_text(new)
            print(f"{path}: drawn anew", file=sys.stderr)
