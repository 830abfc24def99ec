"""How long it takes to plan: to generate an order, to lower it, to simulate it, to bound it.

    python -m tests.bench.planning

Prints a Markdown table for docs/benchmarks.md, medians of three, in seconds. There is no pass or fail on time here.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

from pipelining_dualpipev.planning import Placement, dualpipev_order, lower, lower_bound, simulate

SIZES = [(2, 8), (4, 16), (8, 64), (16, 128), (32, 256), (64, 512), (64, 1024)]
REPEATS = 3


def timed(do: Callable[..., Any], *args: Any, **options: Any) -> float:
    times = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        do(*args, **options)
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def main() -> None:
    print(f"Python {platform.python_version()}, one thread, medians of {REPEATS}, seconds.\n")
    print("| ranks | microbatches | actions | generate | simulate | lower | lower bound |")
    print("|---|---|---|---|---|---|---|")
    for num_ranks, n in SIZES:
        placement, order = Placement.v(num_ranks), dualpipev_order(num_ranks, n)
        actions = sum(len(action.singles) for row in order.values() for action in row)
        times = [
            timed(dualpipev_order, num_ranks, n),
            timed(simulate, order, placement=placement),
            timed(lower, order, placement=placement),
            timed(lower_bound, n, placement=placement),
        ]
        print(f"| {num_ranks} | {n} | {actions:,} | {' | '.join(f'{t:.3f}' for t in times)} |", flush=True)


if __name__ == "__main__":
    main()
