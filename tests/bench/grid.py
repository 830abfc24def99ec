"""How near a tuned order comes to the lower bound, beside the reference and torch's ZBV.

    python -m tests.bench.grid

Prints a Markdown table for docs/benchmarks.md: for each number of ranks, costs and hop, over every number of
microbatches from 1 to 8P, the median and the largest makespan over the lower bound. Nothing is gained by overlapping.
It is simulation, so the figures are the same on any machine. All of it takes about twenty minutes, most of them for 16
ranks; ``--ranks`` and ``--every`` make it shorter.
"""

from __future__ import annotations

import argparse
import statistics

from pipelining_dualpipev._torch import torch_order
from pipelining_dualpipev.planning import CostModel, Placement, dualpipev_order, lower_bound, simulate, tune
from pipelining_dualpipev.planning.formats import read_order

WORK = [(1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (1.0, 1.5, 0.5), (1.0, 0.8, 1.2)]
HOPS = [0.0, 0.1]


def over_bound(num_ranks: int, n: int, costs: CostModel) -> tuple[float, float, float]:
    """The makespans of the reference order, of ZBV and of the tuned order, over the lower bound."""
    placement = Placement.v(num_ranks)
    bound = lower_bound(n, costs, placement=placement)
    zbv = read_order(torch_order("ZBVZeroBubble", num_ranks, n))
    plain = [simulate(order, costs, placement=placement).makespan for order in (dualpipev_order(num_ranks, n), zbv)]
    return plain[0] / bound, plain[1] / bound, tune(num_ranks, n, costs).timeline.makespan / bound


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--every", type=int, default=1, help="only every so many numbers of microbatches, from 1 on")
    options = parser.parse_args()
    print("Makespan over the lower bound, median / largest over the microbatches.\n")
    print("| ranks | microbatches | F:I:W | hop | reference | ZBV | tuned |")
    print("|---|---|---|---|---|---|---|")
    for num_ranks in options.ranks:
        numbers = range(1, 8 * num_ranks + 1, options.every)
        told = f"1 to {numbers[-1]}" + (f", every {options.every}th" if options.every > 1 else "")
        for work in WORK:
            for hop in HOPS:
                ratios = [over_bound(num_ranks, n, CostModel(*work, hop=hop)) for n in numbers]
                cells = [f"{statistics.median(each):.3f} / {max(each):.3f}" for each in zip(*ratios, strict=True)]
                name = ":".join(f"{cost:g}" for cost in work)
                print(f"| {num_ranks} | {told} | {name} | {hop:g} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
