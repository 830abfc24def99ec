"""Check every type of every mapping, and write the page: ``python -m tests.coverage --out docs/reference/coverage.md``.

It exits with 1 if a type is wrong or gave no answer.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.coverage.compare import Result, check
from tests.coverage.page import exact_on_page, summary, write_page
from tests.coverage.tasks import TASKS
from tests.coverage.workers import Check, check_all


def main(arguments: list[str] | None = None, *, check: Check = check) -> int:
    """Run, print a line a type, write the page; 1 if a type is wrong, or no longer exact though the page says so."""
    parser = argparse.ArgumentParser(prog="python -m tests.coverage", description=__doc__.partition("\n")[0])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="all by default")
    parser.add_argument("--types", nargs="+", help="model types; all by default")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one type")
    parser.add_argument("--out", type=Path, help="the page: the sections of these tasks are written anew")
    options = parser.parse_args(arguments)
    if options.out and options.types:
        parser.error("--types with --out: a section of the page is written whole, so leave one of them out")
    failed = []
    for task in options.tasks:
        types = [name for name in TASKS[task].classes if options.types is None or name in options.types]
        results = []
        pairs = [(task, name) for name in types]
        for result in check_all(pairs, check=check, jobs=options.jobs, timeout=options.timeout):
            results.append(result)
            print(_line(result), flush=True)
        was_exact = exact_on_page(options.out) if options.out else set()
        failed += [result for result in results if _fails(result, was_exact)]
        if options.out:  # as soon as there is something to write, since the whole takes long
            write_page(options.out, results)
        print(f"{task}: {summary(results)}")
    for result in failed:
        print(f"FAILED {result.task} {result.model_type}: {result.verdict}: {result.reason}")
    return 1 if failed else 0


def _fails(result: Result, was_exact: set[tuple[str, str]]) -> bool:
    stopped = result.verdict != "exact" and (result.task, result.model_type) in was_exact
    return stopped or result.verdict in ("WRONG", "no answer")


def _line(result: Result) -> str:
    told = f"{result.verdict:9} {result.task:14} {result.model_type:24} {result.seconds:5.1f} s"
    if result.boundaries:
        loss = "" if result.own_loss else " outputs"
        told += f" {result.error:.0e} {result.dtype}{loss} {result.deferred:.0%} {list(result.boundaries)}"
    return f"{told} {result.reason}".rstrip()


if __name__ == "__main__":
    sys.exit(main())
