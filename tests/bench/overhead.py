"""What a schedule itself costs: a step whose modules do next to nothing, ours beside torch's ScheduleDualPipeV.

    OMP_NUM_THREADS=1 python -m tests.bench.overhead

Prints a Markdown table for docs/benchmarks.md: wall time and process CPU time per action (each forward, input and
weight gradient; a full backward is one), the slowest rank's. Both classes are in the same processes, their rounds
interleaved; told are the medians of the rounds and of the ratios within a round.

Beside them the *floor*: the same program with no schedule at all, a loop that posts the same transfers to the group and
calls the modules and autograd. No schedule in Python over this group can be faster.
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
from torch.autograd.graph import get_gradient_edge
from torch.distributed.pipelining import PipelineStage

import pipelining_dualpipev
from pipelining_dualpipev import stage_indices
from pipelining_dualpipev.planning import Placement, dualpipev_order, lower
from pipelining_dualpipev.planning.actions import Kind
from tests.bench.common import in_turns, machine


class Trivial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output * target).sum()


class Floor:
    """The program of a step on [n, 4] ones, run by a loop that knows these modules, shapes and gradients."""

    def __init__(self, stages: list[PipelineStage], n: int, loss_fn: Any) -> None:
        self.stages = {stage.stage_index: stage.submod for stage in stages}
        self.placement, self.loss_fn = Placement.v(stages[0].num_stages // 2), loss_fn
        program = lower(dualpipev_order(self.placement.num_ranks, n), placement=self.placement)[dist.get_rank()]
        singles = [single for action in program for single in action.singles]
        self.actions = [(single.kind, single.stage, single.microbatch) for single in singles]

    def step(self, *args: torch.Tensor, target: torch.Tensor | None = None, **_: Any) -> None:
        world, last, rank_of = dist.group.WORLD, self.placement.num_stages - 1, self.placement.rank_of
        inputs = args[0].split(1) if args else ()
        targets = target.split(1) if target is not None else ()
        posted, arrived, graphs, sent = {}, {}, {}, []
        for kind, stage, mb in self.actions:
            if kind in (Kind.SEND_F, Kind.SEND_B):
                onward = stage + 1 if kind is Kind.SEND_F else stage - 1
                tensor = arrived.pop((kind, stage, mb))
                sent.append((world.send([tensor], rank_of[onward], 0), tensor))
            elif kind in (Kind.RECV_F, Kind.RECV_B):
                buffer, source = torch.empty(1, 4), stage - 1 if kind is Kind.RECV_F else stage + 1
                posted[kind, stage, mb] = world.recv([buffer], rank_of[source], 0), buffer
            elif kind is Kind.FORWARD:
                if stage == 0:
                    x = inputs[mb]
                elif self.placement.crosses(stage - 1):
                    work, x = posted.pop((Kind.RECV_F, stage, mb))
                    work.wait()
                    x.requires_grad_()
                else:
                    x = arrived.pop((Kind.SEND_F, stage - 1, mb)).requires_grad_()
                output = self.stages[stage](x)
                if stage == last:
                    output = self.loss_fn(output, targets[mb])
                else:
                    arrived[Kind.SEND_F, stage, mb] = output.detach()
                graphs[stage, mb] = x, get_gradient_edge(output)
            elif kind in (Kind.FULL_BACKWARD, Kind.BACKWARD_INPUT):
                x, edge = graphs.pop((stage, mb))
                if stage == last:
                    gradient = torch.ones(())
                elif self.placement.crosses(stage):
                    work, gradient = posted.pop((Kind.RECV_B, stage, mb))
                    work.wait()
                else:
                    gradient = arrived.pop((Kind.SEND_B, stage + 1, mb))
                torch.autograd.backward((edge,), (gradient,))
                arrived[Kind.SEND_B, stage, mb] = x.grad
        for work, _ in sent:
            work.wait()


CLASSES = {
    "ours": pipelining_dualpipev.ScheduleDualPipeV,
    "torch": torch_pipelining.ScheduleDualPipeV,
    "floor": Floor,
}


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

    def take(name: str) -> list[float]:
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(3):
            schedules[name].step(*given, **target, losses=[], return_outputs=False)
        return [(time.perf_counter() - wall) / (3 * actions), (time.process_time() - cpu) / (3 * actions)]

    seconds = in_turns(list(CLASSES), rounds, 2, take)
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
    heads = ["ranks", "time", "ours, us an action", "torch", "floor", "ours to torch", "floor to torch"]
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for num_ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(measure, (num_ranks, options.microbatches, options.rounds, folder), nprocs=num_ranks)
            seconds = json.loads(Path(folder, "seconds").read_text())
        for kind, what in enumerate(("wall", "CPU")):
            took = {name: [times[kind] for times in seconds[name]] for name in CLASSES}
            cells = [f"{statistics.median(times) * 1e6:.0f}" for times in took.values()]
            for name in ("ours", "floor"):
                ratios = [a / b for a, b in zip(took[name], took["torch"], strict=True)]
                cells.append(f"{statistics.median(ratios):.2f}")
            print(f"| {num_ranks} | {what} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
