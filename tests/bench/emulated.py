"""How near a real step comes to the simulated one: stages that sleep, on real gloo processes, beside torch's schedules.

    OMP_NUM_THREADS=1 python -m tests.bench.emulated

A stage's forward, input gradient and weight gradient sleep for known times and compute nothing, so the processor does
not matter and ranks do not fight for it: what a step takes beyond its simulated makespan is the schedule's and gloo's.
Every class runs in the same processes, their rounds interleaved. Prints a Markdown table for docs/benchmarks.md: the
simulated makespan of each class's own order under these costs, the measured wall time of the slowest rank, and the
median of their ratios.

The weight gradient sleeps in the stage's ``dw_builder``, which all classes call in W, or at the end of a full backward.
torch's ScheduleInterleaved1F1B, which takes microbatches in multiples of the ranks, has its own placement.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.pipelining as torch_pipelining
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.pipelining import PipelineStage

import pipelining_dualpipev
from pipelining_dualpipev._torch import TORCH_SCHEDULES, torch_order
from pipelining_dualpipev.planning import CostModel, Placement, dualpipev_order, simulate, tune
from pipelining_dualpipev.planning.formats import read_order
from tests.bench.common import in_turns, machine

ROWS, WIDTH = 1, 16
OURS = "ours, ScheduleDualPipeV"
TUNED = "ours, costs given"
TORCH = {
    "torch ScheduleDualPipeV": "DualPipeV",
    "torch ScheduleZBVZeroBubble": "ZBVZeroBubble",
    "torch ScheduleInterleaved1F1B": "Interleaved1F1B",
}


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: float, backward_input: float) -> torch.Tensor:
        ctx.seconds = backward_input
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.seconds)
        return gradient.clone(), None, None


class Emulated(nn.Module):
    """Passes a tensor on, and takes its time."""

    def __init__(self, forward: float, backward_input: float) -> None:
        super().__init__()
        self.seconds = forward, backward_input
        self.weight = nn.Parameter(torch.zeros(()))  # without one, the first stage would have no backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sleep.apply(x + self.weight, *self.seconds)


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).sum()


def schedules(num_ranks: int, n: int, costs: CostModel) -> dict[str, tuple[Placement, float]]:
    """By name, where each has its stages and what its step takes in simulation."""
    v = Placement.v(num_ranks)
    reference = simulate(dualpipev_order(num_ranks, n), costs, placement=v).makespan
    found = {OURS: (v, reference), TUNED: (v, tune(num_ranks, n, costs).timeline.makespan)}
    for told, name in TORCH.items():
        if TORCH_SCHEDULES[name].fitting(num_ranks, n) == n:
            placement = TORCH_SCHEDULES[name].placement(num_ranks)
            order = read_order(torch_order(name, num_ranks, n))
            found[told] = placement, simulate(order, costs, placement=placement).makespan
    return found


def build(name: str, rank: int, placement: Placement, n: int, costs: CostModel) -> Any:
    assert isinstance(costs.forward, float)
    assert isinstance(costs.backward_input, float)
    assert isinstance(costs.backward_weight, float)
    seconds = costs.backward_weight

    def weight_gradient() -> Callable[..., None]:
        return lambda *_: time.sleep(seconds)

    cpu = torch.device("cpu")
    stages = [
        PipelineStage(
            Emulated(costs.forward, costs.backward_input),
            index,
            placement.num_stages,
            cpu,
            dw_builder=weight_gradient,
        )
        for index in placement.stages_of(rank)
    ]
    if name in (OURS, TUNED):
        options = {"costs": costs} if name == TUNED else {}
        return pipelining_dualpipev.ScheduleDualPipeV(stages, n, loss_fn=loss_fn, **options)
    return getattr(torch_pipelining, name.removeprefix("torch "))(stages, n, loss_fn=loss_fn)


def measure(rank: int, num_ranks: int, n: int, rounds: int, work: list[float], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    costs = CostModel(*work)
    made = {}
    for name, (placement, _) in schedules(num_ranks, n, costs).items():
        last = placement.rank_of[-1] == rank
        args = (torch.zeros(n * ROWS, WIDTH),) if rank == placement.rank_of[0] else ()
        kwargs = {"target": torch.zeros(n * ROWS, WIDTH), "losses": []} if last else {}
        made[name] = build(name, rank, placement, n, costs), args, kwargs

    def take(name: str) -> list[float]:
        schedule, args, kwargs = made[name]
        begun = time.perf_counter()
        schedule.step(*args, return_outputs=False, **kwargs)
        return [time.perf_counter() - begun]

    seconds = in_turns(list(made), rounds, 1, take)
    if rank == 0:
        Path(folder, "seconds").write_text(
            json.dumps({name: [took for (took,) in rows] for name, rows in seconds.items()})
        )
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=12)
    parser.add_argument("--costs", default="1:1:1", help="F:I:W")
    parser.add_argument("--unit", type=float, default=0.010, help="seconds")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    work = [float(cost) * options.unit for cost in options.costs.split(":")]
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options.ranks, options.microbatches, options.rounds, work, folder)
        mp.spawn(measure, arguments, nprocs=options.ranks)
        seconds = json.loads(Path(folder, "seconds").read_text())
    simulated = schedules(options.ranks, options.microbatches, CostModel(*work))
    print(
        f"{options.ranks} ranks, {options.microbatches} microbatches, F:I:W {options.costs} of "
        f"{options.unit * 1e3:g} ms, {options.rounds} rounds after 1 to warm up. {machine()}.\n"
    )
    print("| schedule | simulated, ms | measured, ms | measured to simulated | measured to ours |")
    print("|---|---|---|---|---|")
    for name, times in seconds.items():
        makespan = simulated[name][1]
        to_ours = statistics.median(a / b for a, b in zip(times, seconds[OURS], strict=True))
        measured = statistics.median(times)
        print(f"| {name} | {makespan * 1e3:.0f} | {measured * 1e3:.0f} | {measured / makespan:.3f} | {to_ours:.2f} |")


if __name__ == "__main__":
    main()
