"""One training step of ours beside torch's schedules: the same small Llama, the same data, two ranks.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m tests.bench.step_time

Prints a Markdown table for docs/benchmarks.md. What makes the figures comparable:

* One run holds a model for every schedule, all with the same weights at the start, and goes round them: each round
  times one step of each, beginning with another one each time. A slow moment of the machine then hits all alike.
* A step's time is that of the slowest rank, from a barrier before it. Told is the median of the rounds, and as the
  ratio to 1F1B the median of the ratios within a round.
* Memory is what a step allocates in tensors beyond what is there when it begins, at its peak, with the gradients and
  without keeping outputs. It is read from torch's profiler in a step that is not timed. The process's own size would
  mix the schedules, for an allocator does not give back what one of them has used.
* 1F1B has two stages, the others four; they hold the same layers. Losses must agree in the end, or it is an error.

There is no pass or fail on time here.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.pipelining as torch_pipelining
import transformers
from torch import nn
from torch.distributed.pipelining import PipelineStage
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

import pipelining_dualpipev
from pipelining_dualpipev.planning import Placement
from tests.bench.common import machine, peak_bytes

BASELINE = "torch Schedule1F1B"


class LlamaPart(nn.Module):
    """Some consecutive layers of a Llama, with the embedding before the first and the head behind the last."""

    def __init__(self, config: LlamaConfig, layers: range) -> None:
        super().__init__()
        total = config.num_hidden_layers
        torch.manual_seed(0)
        embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.embedding = embedding if layers.start == 0 else None
        self.rotary = LlamaRotaryEmbedding(config)
        self.layers = nn.ModuleList()
        for index in layers:
            torch.manual_seed(index + 1)  # a layer begins the same, whichever part it has come to be in
            self.layers.append(LlamaDecoderLayer(config, index))
        self.head = nn.Sequential(LlamaRMSNorm(config.hidden_size), head) if layers.stop == total else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        positions = torch.arange(x.shape[1], device=x.device)[None]
        rotary = self.rotary(x, positions)
        for layer in self.layers:
            x = layer(x, position_embeddings=rotary)
        return x if self.head is None else self.head(x)


def loss_fn(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


@dataclass
class Candidate:
    """One schedule with its own copy of the model, and what was measured of it."""

    name: str
    schedule: Any
    optimizer: torch.optim.Optimizer
    has_first: bool
    has_last: bool
    seconds: list[float] = field(default_factory=list)
    loss: float = 0.0
    peak_bytes: int = 0

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        losses: list[torch.Tensor] = []
        target = {"target": y} if self.has_last else {}
        self.schedule.step(*((x,) if self.has_first else ()), **target, losses=losses, return_outputs=False)
        if losses:
            self.loss = torch.stack(losses).mean().item()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def candidates(config: LlamaConfig, n: int) -> list[Candidate]:
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    v, loop, line = Placement.v(num_ranks), Placement.loop(num_ranks, 2), Placement.loop(num_ranks)
    table: list[tuple[str, Callable[..., Any], Placement]] = [
        ("ours, ScheduleDualPipeV", pipelining_dualpipev.ScheduleDualPipeV, v),
        ("torch ScheduleDualPipeV", torch_pipelining.ScheduleDualPipeV, v),
        ("torch ScheduleZBVZeroBubble", torch_pipelining.ScheduleZBVZeroBubble, v),
        ("torch ScheduleInterleaved1F1B", torch_pipelining.ScheduleInterleaved1F1B, loop),
        (BASELINE, lambda stages, *args, **kw: torch_pipelining.Schedule1F1B(stages[0], *args, **kw), line),
    ]
    made = []
    for name, schedule, placement in table:
        num_stages = placement.num_stages
        size = config.num_hidden_layers // num_stages
        mine = placement.stages_of(rank)
        parts = [LlamaPart(config, range(i * size, (i + 1) * size)) for i in mine]
        stages = [PipelineStage(part, i, num_stages, torch.device("cpu")) for i, part in zip(mine, parts, strict=True)]
        optimizer = torch.optim.SGD([p for part in parts for p in part.parameters()], lr=0.1)
        made.append(Candidate(name, schedule(stages, n, loss_fn=loss_fn), optimizer, 0 in mine, num_stages - 1 in mine))
    return made


def measure(config: LlamaConfig, n: int, options: argparse.Namespace) -> list[Candidate]:
    generator = torch.Generator().manual_seed(n)
    tokens = torch.randint(config.vocab_size, (n * options.sequences, options.length + 1), generator=generator)
    x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    everyone = candidates(config, n)
    for _ in range(options.warm_up):
        for candidate in everyone:
            candidate.step(x, y)
            candidate.update()
    for number in range(options.rounds):
        for candidate in everyone[number % len(everyone) :] + everyone[: number % len(everyone)]:
            dist.barrier()
            start = time.perf_counter()
            candidate.step(x, y)
            seconds = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            candidate.seconds.append(seconds.item())
            candidate.update()
    for candidate in everyone:
        dist.barrier()
        candidate.peak_bytes = peak_bytes(lambda candidate=candidate: candidate.step(x, y))  # type: ignore[misc]
    return everyone


def row(n: int, candidate: Candidate, base: Candidate, peaks: list[int], base_peaks: list[int], batch: int) -> str:
    median = statistics.median(candidate.seconds)
    cells = [
        str(n),
        candidate.name,
        f"{median * 1e3:.0f}",
        f"{batch / median:.1f}",
        " / ".join(f"{peak / 2**20:.0f}" for peak in peaks),
        f"{candidate.loss:.6f}",
        f"{statistics.median(a / b for a, b in zip(candidate.seconds, base.seconds, strict=True)):.2f}",
        " / ".join(f"{peak / of:.2f}" for peak, of in zip(peaks, base_peaks, strict=True)),
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--sequences", type=int, default=2, help="in a microbatch")
    parser.add_argument("--length", type=int, default=64, help="of a sequence")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.width,
        intermediate_size=options.width * 8 // 3,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        attn_implementation="sdpa",
    )
    lines = []
    for n in options.microbatches:
        everyone = measure(config, n, options)
        for candidate in everyone:
            known = torch.tensor([candidate.loss if candidate.has_last else 0.0], dtype=torch.float64)
            dist.all_reduce(known)
            candidate.loss = known.item()
        peaks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(peaks, [candidate.peak_bytes for candidate in everyone])
        by_candidate = list(zip(*peaks, strict=True))
        at = next(i for i, candidate in enumerate(everyone) if candidate.name == BASELINE)
        for candidate, own in zip(everyone, by_candidate, strict=True):
            batch = n * options.sequences
            lines.append(row(n, candidate, everyone[at], list(own), list(by_candidate[at]), batch))
            assert abs(candidate.loss - everyone[at].loss) < 1e-5, f"{candidate.name}: {candidate.loss}"
    if dist.get_rank() == 0:
        parameters = sum(p.numel() for p in LlamaPart(config, range(options.layers)).parameters())
        print(
            f"Llama, {parameters / 1e6:.1f} M parameters, {options.layers} layers of width {options.width}, float32; "
            f"microbatches of {options.sequences} x {options.length} tokens; {dist.get_world_size()} ranks over gloo, "
            f"one thread each; {options.rounds} rounds after {options.warm_up} to warm up. "
            f"{machine()}, transformers {transformers.__version__}.\n"
        )
        print(
            "| n | schedule | step, ms | samples/s | peak, MiB (rank 0 / 1) | last loss | time to 1F1B | peak to 1F1B |"
        )
        print("|---|---|---|---|---|---|---|---|")
        print("\n".join(lines))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
