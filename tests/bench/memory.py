"""Peak memory of a training step as the number of microbatches grows: ours beside torch's ScheduleDualPipeV.

    OMP_NUM_THREADS=1 python -m tests.bench.memory

Prints a Markdown table for docs/benchmarks.md. A stage's activation is 4 MB, its weights are next to nothing, and
outputs are not kept. Each row is two fresh processes a class, so that the one has not used what the other is measured
by. Counted are the bytes of tensors that a step has at once, at its peak, beyond those from before it (inputs and
weights); beside it by how much the process has grown over steps before, which no profiler looks into. For that, glibc
is told to give large blocks back (MALLOC_MMAP_THRESHOLD_): left alone it keeps them in a heap that frays.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
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
from tests.bench.common import machine, peak_bytes

ROWS, WIDTH = 256, 4096  # 4 MB in float32
CLASSES = {"ours": pipelining_dualpipev.ScheduleDualPipeV, "torch": torch_pipelining.ScheduleDualPipeV}


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * self.weight)


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


def measure(rank: int, name: str, n: int, num_ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    mine = stage_indices(rank, num_ranks)
    stages = [PipelineStage(Scale(), index, 2 * num_ranks, torch.device("cpu")) for index in mine]
    schedule = CLASSES[name](stages, n, loss_fn=loss_fn)
    given: tuple[Any, ...] = (torch.zeros(n * ROWS, WIDTH),) if rank == 0 else ()
    target = {"target": torch.zeros(n * ROWS, WIDTH)} if rank == 0 else {}

    def step() -> None:
        schedule.step(*given, **target, losses=[], return_outputs=False)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(2):
        step()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    Path(folder, f"rank{rank}").write_text(f"{peak_bytes(step)} {grown}")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # read when a process starts
    print(f"{options.ranks} ranks over gloo, one thread each. {machine()}.\n")
    columns = [f"{name}, {what}" for name in CLASSES for what in ("tensors", "process")]
    print(f"| n | {' | '.join(f'{column}, MB' for column in columns)} | to n = {options.microbatches[0]}: |", end="")
    print(f" {' | '.join(columns)} |\n|{'---|' * 10}")
    first: list[list[int]] = []
    for n in options.microbatches:
        figures: list[list[int]] = []
        for name in CLASSES:
            with tempfile.TemporaryDirectory() as folder:
                mp.spawn(measure, (name, n, options.ranks, folder), nprocs=options.ranks)
                ranks = [Path(folder, f"rank{r}").read_text().split() for r in range(options.ranks)]
            figures += [[int(rank[kind]) for rank in ranks] for kind in (0, 1)]
        first = first or figures
        cells = [" / ".join(f"{value / 1e6:.0f}" for value in values) for values in figures]
        ratios = [
            " / ".join(f"{a / max(b, 1):.2f}" for a, b in zip(now, then, strict=True))
            for now, then in zip(figures, first, strict=True)
        ]
        print(f"| {n} | {' | '.join(cells)} | | {' | '.join(ratios)} |", flush=True)


if __name__ == "__main__":
    main()
