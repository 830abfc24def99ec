"""What a schedule itself costs: a step whose modules do next to nothing, ours beside torch's ScheduleDualPipeV.

    OMP_NUM_THREADS=1 python -m tests.bench.overhead

Prints a Markdown table for docs/benchmarks.md: wall time and process CPU time per action (each forward, input and
weight gradient; a full backward is one), the slowest rank's. Both classes are in the same processes, their rounds
interleaved; told are the medians of the rounds and of the ratios within a round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.pipelining as torch_pipelining
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.pipelining import PipelineStage

import pipelining_dualpipev
from pipelining_dualpipev import stage_indices
from pipelining_dualpipev.planning import dualpipev_order
from tests.bench.common import machine

CLASSES = {"ours": pipelining_dualpipev.ScheduleDualPipeV, "torch": torch_pipelining.ScheduleDualPipeV}


class Trivial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output * target).sum()


def measure(rank: int, num_ranks: int, n: int, rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    actions = sum(len(action.singles) for action in dualpipev_order(num_ranks, n)[rank])
    given: tuple[Any, ...] = (torch.ones(n, 4),) if rank == 0 else ()
    target = {"target": torch.ones(n, 4)} if rank == 0 else {}
    schedules = {}
    for name, schedule in CLASSES.items():
        stages = [
            PipelineStage(Trivial(), i, 2 * num_ranks, torch.device("cpu")) for i in stage_indices(rank, num_ranks)
        ]
        schedules[name] = schedule(stages, n, loss_fn=loss_fn)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in CLASSES}
    for number in range(rounds + 2):
        for name in list(CLASSES)[:: 1 if number % 2 else -1]:
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(3):
                schedules[name].step(*given, **target, losses=[], return_outputs=False)
            took = torch.tensor([time.perf_counter() - wall, time.process_time() - cpu], dtype=torch.float64)
            took /= 3 * actions
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            if number >= 2:
                seconds[name].append((took[0].item(), took[1].item()))
    if rank == 0:
        Path(folder, "seconds").write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    print(f"{options.microbatches} microbatches, {options.rounds} rounds of 3 steps. {machine()}.\n")
    print("| ranks | time | ours, us an action | torch, us an action | ours to torch |\n|---|---|---|---|---|")
    for num_ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(measure, (num_ranks, options.microbatches, options.rounds, folder), nprocs=num_ranks)
            seconds = json.loads(Path(folder, "seconds").read_text())
        for kind, what in enumerate(("wall", "CPU")):
            ours, theirs = ([took[kind] for took in seconds[name]] for name in CLASSES)
            ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
            medians = [f"{statistics.median(values) * 1e6:.0f}" for values in (ours, theirs)]
            print(f"| {num_ranks} | {what} | {' | '.join(medians)} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
