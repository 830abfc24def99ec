"""The page of the docs that says which types split: written from results, never by hand.

Each task has a section, which a run of that task writes anew; the sections of others stay.
"""

from __future__ import annotations

import datetime
import platform
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from tests.coverage.compare import NUM_RANKS, Result
from tests.coverage.tasks import TASKS

__all__ = ["exact_on_page", "summary", "write_page"]

_VERDICTS = {
    "exact": "loss and every gradient are those of the model that is not split: none is off by more than rounding of "
    "single precision, 2e-6 of its largest entry, since transformers computes losses in that; most are equal to the "
    "bit. An image or sound changes what the model says, and no parameter starts at zero, which would hide others",
    "WRONG": "a loss or a gradient differs",
    "refused": "`split` says that it cannot, and why",
    "not built": "no tiny model of it, or none that runs on random inputs, could be made here; nothing is known of it",
    "no answer": "took too long, or took its process with it",
}


def write_page(page: Path, results: Sequence[Result], today: datetime.date | None = None) -> None:
    """Write the sections of the tasks in ``results``, and the head with the counts of all."""
    sections = _sections(page)
    made = f"Made on {today or datetime.date.today()} with torch {torch.__version__}, transformers "
    made += f"{transformers.__version__}, Python {platform.python_version()}, on a CPU."
    for task in TASKS:
        if own := sorted((r for r in results if r.task == task), key=lambda result: result.model_type):
            sections[task] = [made, "", *_table(own)]
    lines = _head(sections)
    for task in TASKS:
        if task in sections:
            lines += ["", f"## {TASKS[task].title}", "", *sections[task]]
    page.write_text("\n".join(lines) + "\n")


def exact_on_page(page: Path) -> set[tuple[str, str]]:
    """The (task, model type) pairs that the page says are exact."""
    rows = ((task, row.split(" | ")) for task, lines in _sections(page).items() for row in lines)
    return {(task, cells[0].removeprefix("| ")) for task, cells in rows if cells[1:2] == ["exact"]}


def summary(results: Sequence[Result]) -> str:
    """How many of each verdict, in words."""
    counts = Counter(result.verdict for result in results)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in _VERDICTS if counts[verdict]) or "nothing"


def _sections(page: Path) -> dict[str, list[str]]:
    """The lines of each task's section."""
    sections: dict[str, list[str]] = {}
    for part in (page.read_text() if page.exists() else "").split("\n## ")[1:]:
        title, *lines = part.rstrip("\n").split("\n")
        task = next((task for task in TASKS if TASKS[task].title == title), None)
        if task is not None:
            sections[task] = lines[1:]
    return sections


def _head(sections: dict[str, list[str]]) -> list[str]:
    lines = [
        "# Which models split",
        "",
        "<!-- Written by `python -m tests.coverage --out docs/reference/coverage.md`. Do not edit. -->",
        "",
        f"Each model type of transformers, built tiny with random weights, is split into {2 * NUM_RANKS} stages and "
        "compared with itself unsplit: the loss and the gradient of every parameter, in double precision (in single "
        "where the model cannot do double: marked fp32).",
        "",
    ]
    lines += [f"- *{verdict}*: {meaning}." for verdict, meaning in _VERDICTS.items()]
    lines += [
        "",
        "*Tensors* is how many cross each boundary, forward. *Deferred* is the share of the parameters whose weight "
        "gradients a schedule puts off to W. *Outputs*: the model's own loss cannot be taken apart into microbatches, "
        "so a loss over its outputs was compared, as a `loss_fn` of your own would be. *Told*: given as an input was "
        "what the model would else find out by layers of its own and decide by, for which it would be refused.",
        "",
        "| | types | " + " | ".join(_VERDICTS) + " |",
        "|---|" + "---:|" * (len(_VERDICTS) + 1),
    ]
    for task in TASKS:
        verdicts = [row.split(" | ")[1].strip("*") for row in sections.get(task, ()) if row.count(" | ") >= 4]
        counts = Counter(verdict for verdict in verdicts if verdict in _VERDICTS)
        if counts:
            numbers = " | ".join(str(counts[verdict]) for verdict in _VERDICTS)
            lines.append(f"| {TASKS[task].title} | {sum(counts.values())} | {numbers} |")
    return lines


def _table(results: Sequence[Result]) -> list[str]:
    lines = ["| type | verdict | tensors | deferred | |", "|---|---|---|---:|---|"]
    for result in results:
        compared = result.verdict in ("exact", "WRONG")
        remarks = [
            "fp32" if compared and result.dtype == "float32" else "",
            "outputs" if not result.own_loss else "",
            f"told {', '.join(f'`{name}`' for name in result.told)}" if result.told else "",
            _cell(result.reason),
        ]
        tensors = ", ".join(map(str, result.boundaries))
        share = f"{result.deferred:.0%}" if compared else ""
        verdict = result.verdict if result.verdict == "exact" else f"**{result.verdict}**"
        lines.append(f"| {result.model_type} | {verdict} | {tensors} | {share} | {'; '.join(filter(None, remarks))} |")
    return lines


def _cell(words: str) -> str:
    """Words of an error as plain text within a table."""
    for special in "\\`*_<>[]|~":
        words = words.replace(special, f"\\{special}")
    return words
