"""Draws the pictures and tables in the pages from the code, so that they cannot say anything else than the code does.

    python docs/pictures.py        writes them into the pages again

In a page, what is drawn stands between the comments ``<!-- drawn: NAME -->`` and ``<!-- end -->``; tests/docs compares
each with what is drawn here. Whole files, like the strip of the README, are drawn too.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from pipelining_dualpipev.planning import Action, Placement, dualpipev_order, simulate
from pipelining_dualpipev.viewing import to_svg, to_text

DOCS = Path(__file__).parent
BLOCK = re.compile(r"(<!-- drawn: ([\w-]+) -->\n)(.*?)(?=<!-- end -->)", re.DOTALL)
NUM_RANKS, N = 4, 10


def time() -> str:
    """One step of every rank against time: F, I and W take one unit each, and a pair as long as its parts."""
    order = dualpipev_order(NUM_RANKS, N)
    return fenced(to_text(simulate(order, placement=Placement.v(NUM_RANKS))).splitlines())


def strip() -> str:
    """The same as a picture."""
    timeline = simulate(dualpipev_order(NUM_RANKS, N), placement=Placement.v(NUM_RANKS))
    return to_svg({f"DualPipeV, {NUM_RANKS} ranks, {N} microbatches": timeline})


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
        if option.name == "help":
            continue
        shown = option.show_default if isinstance(option.show_default, str) else f"`{option.default}`"
        lines.append(f"| `{option.opts[0]}` | {shown} | {option.help} |")
    return "\n".join([*lines, ""])


PICTURES: dict[str, Callable[[], str]] = {
    "time": time,
    "steps": steps,
    **{f"{name}-options": partial(options, name) for name in ("train", "verify", "plan", "show", "check", "simulate")},
}


FILES: dict[str, Callable[[], str]] = {"dualpipev.svg": strip}
"""Files of their own under docs/, that pages show."""


def pages() -> Iterator[Path]:
    yield from [*sorted(DOCS.rglob("*.md")), DOCS.parent / "README.md"]


def drawn(page: str) -> str:
    """The page with its pictures drawn anew."""
    return BLOCK.sub(lambda match: match[1] + PICTURES[match[2]](), page)


if __name__ == "__main__":
    for name, draw in FILES.items():
        (DOCS / name).write_text(draw())
    for path in pages():
        old = path.read_text()
        if (new := drawn(old)) != old:
            path.write_text(new)
            print(f"{path}: drawn anew", file=sys.stderr)
