"""What splitting a backward costs, and holds, beside torch's own way: ``python -m tests.bench.weight_grad``.

A stage from the middle of a model: its layers, hidden states in and out. In each round each way runs once, so that a
noisy moment hits both; ratios are those of medians of one run. Times are of the processor, not of the clock, since
machines are shared. B is a plain backward. Gradients are there already
and are added to, as in all but the first microbatch of a step. *Held* is what F and I together have taken from the
allocator and not given back.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
import transformers as hf
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from pipelining_dualpipev.runtime.weight_grad import AtOperations
from tests.bench.common import machine

# width, inner width, layers, heads, batch, length
SIZES = {
    "tiny": (64, 172, 2, 4, 1, 16),
    "small": (256, 688, 4, 8, 2, 128),
    "medium": (512, 1376, 4, 8, 1, 256),
}
CASES = [(kind, size) for kind in ("llama", "gpt2") for size in SIZES] + [("mixtral", "small")]


class Middle(nn.Module):
    """The layers of a causal language model."""

    def __init__(self, kind: str, size: str) -> None:
        super().__init__()
        width, inner, layers, heads, *_ = SIZES[size]
        common = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": 512}
        common |= {"num_attention_heads": heads, "num_key_value_heads": heads // 2}
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config: Any = {
            "llama": lambda: hf.LlamaConfig(**common),
            "gpt2": lambda: hf.GPT2Config(n_embd=width, n_layer=layers, n_head=heads, vocab_size=512, **dropout),
            "mixtral": lambda: hf.MixtralConfig(**common, num_local_experts=8, num_experts_per_tok=2),
        }[kind]()
        torch.manual_seed(0)
        body = hf.AutoModel.from_config(config, attn_implementation="sdpa").train()
        self.layers = body.h if kind == "gpt2" else body.layers
        self.rotary = getattr(body, "rotary_emb", None)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        options: dict[str, Any] = {}
        if self.rotary is not None:
            options["position_embeddings"] = self.rotary(hidden, torch.arange(hidden.shape[1])[None])
        for layer in self.layers:
            output = layer(hidden, **options)
            hidden = output[0] if isinstance(output, tuple) else output
        return hidden


Phases = Iterator[str]
"""Runs one phase of a microbatch at each ``next``, and tells its name; what it holds between is held."""


def plain(module: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> Phases:
    y = module(x)
    yield "F"
    y.backward(dy)
    yield "B"


def torch_split(module: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> Phases:
    y = module(x)
    yield "F"
    _, groups = stage_backward_input([y], [dy], [x], module.parameters())
    del y
    yield "I"
    stage_backward_weight(module.parameters(), groups)
    yield "W"


def ours(deferred: AtOperations, module: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> Phases:
    with deferred.deferring():
        y = module(x)
    yield "F"
    with deferred.collecting():
        y.backward(dy)
    work = deferred.take()
    del y
    yield "I"
    work()
    yield "W"


def held_bytes(run: Callable[..., Phases], *args: Any) -> int:
    """What F and I have taken from the allocator and not given back, in bytes."""
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        phases = run(*args)
        for name in phases:
            if name == "I":
                break
    return sum(event.self_cpu_memory_usage for event in profile.key_averages())


def measure(kind: str, size: str, rounds: int) -> dict[str, dict[str, float]]:
    """By way, the median time in ms of each phase, and under ``held`` the bytes."""
    module = Middle(kind, size)
    width, _, _, _, batch, length = SIZES[size]
    deferred = AtOperations(module)
    ways: dict[str, tuple[Any, ...]] = {
        "plain": (plain, module),
        "torch": (torch_split, module),
        "ours": (ours, deferred, module),
    }
    times: dict[str, dict[str, list[float]]] = {way: {} for way in ways}
    for number in range(rounds + 2):
        for way, (run, *given) in ways.items():
            x, dy = torch.randn(batch, length, width).requires_grad_(), torch.randn(batch, length, width)
            phases = run(*given, x, dy)
            before = time.process_time()
            for name in phases:
                now = time.process_time()
                if number >= 2:
                    times[way].setdefault(name, []).append(1e3 * (now - before))
                before = time.process_time()
    medians = {way: {name: median(values) for name, values in phases.items()} for way, phases in times.items()}
    for way, (run, *given) in ways.items():
        if way != "plain":
            x, dy = torch.randn(batch, length, width).requires_grad_(), torch.randn(batch, length, width)
            medians[way]["held"] = held_bytes(run, *given, x, dy)
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", nargs="*", default=[], help="such as llama-small; by default all")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"float32, one thread, medians of {options.rounds} rounds, ms of processor time. "
        f"{machine()}, transformers {hf.__version__}.\n"
    )
    heads = ["layers of", "F", "B", "torch: I", "W", "(I+W)/B", "held, MiB"]
    heads += ["ours: F", "I", "W", "(I+W)/B", "held, MiB", "to torch's"]
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for kind, size in CASES:
        if options.only and f"{kind}-{size}" not in options.only:
            continue
        ways = measure(kind, size, options.rounds)
        base, cells = ways["plain"], [f"{kind} {size}", f"{ways['plain']['F']:.1f}", f"{ways['plain']['B']:.1f}"]
        for way in ("torch", "ours"):
            one = ways[way]
            cells += [f"{one[name]:.1f}" for name in (("I", "W") if way == "torch" else ("F", "I", "W"))]
            cells += [f"{(one['I'] + one['W']) / base['B']:.2f}", f"{one['held'] / 2**20:.2f}"]
        print("| " + " | ".join([*cells, f"{ways['ours']['held'] / ways['torch']['held']:.2f}"]) + " |", flush=True)


if __name__ == "__main__":
    main()
