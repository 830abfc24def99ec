"""What splitting costs: a stage's forward beside its bare layers, and the planning of a large model.

    OMP_NUM_THREADS=1 python -m tests.bench.split_overhead

Prints Markdown tables for docs/benchmarks.md. Times are of the processor, not of the clock, so that other work on the
machine counts little. There is no pass or fail on time here.
"""

from __future__ import annotations

import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from pipelining_dualpipev.models.split import make_stages, plan_skeleton
from pipelining_dualpipev.models.surgery import make_skeleton
from pipelining_dualpipev.models.verify import Chain
from pipelining_dualpipev.planning import Placement

ROUNDS = 60
WARMUP = 5
TOKENS = (2, 64)


def timed(do: Callable[[], Any]) -> float:
    begun = time.process_time()
    do()
    return time.process_time() - begun


def forward_overhead(layers_a_stage: int, hidden: int) -> None:
    """A mid stage's forward, and its layers called in a loop with the arguments that the model gives them."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=4 * layers_a_stage,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    model = LlamaForCausalLM(config)
    ids = torch.randint(256, TOKENS)
    inputs = {"input_ids": ids, "labels": ids}
    chain = Chain(model, 2, inputs)
    assert chain.loss_fn is not None
    chain.loss_fn.prepare([ids])
    _, received, _ = chain.forward(inputs)
    stage = chain.stages[1]
    layers = list(model.model.layers[layers_a_stage : 2 * layers_a_stage])
    given: dict[str, Any] = {}
    hook = layers[0].register_forward_pre_hook(lambda _, args, kwargs: given.update(kwargs), with_kwargs=True)
    model(input_ids=ids, use_cache=False)
    hook.remove()

    def bare() -> torch.Tensor:
        hidden_states = received[1][-1]
        for layer in layers:
            hidden_states = layer(hidden_states, **given)
        return hidden_states

    assert torch.equal(bare(), stage(*received[1])[-1])
    pairs = [(timed(lambda: stage(*received[1])), timed(bare)) for _ in range(WARMUP + ROUNDS)][WARMUP:]
    ratio = statistics.median(ours / theirs for ours, theirs in pairs)
    ours, theirs = (1e3 * statistics.median(column) for column in zip(*pairs, strict=True))
    print(f"| {layers_a_stage} | {hidden} | {ours:.2f} | {theirs:.2f} | {ratio:.2f} |", flush=True)


def large_model(num_ranks: int, length: int) -> None:
    """A config of Llama's 70 B, to the plan and the two stages of one rank, all on meta."""
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        max_position_embeddings=8192,
    )
    ids = torch.ones(1, length, dtype=torch.long)
    example = {"input_ids": ids, "attention_mask": ids, "labels": ids}
    before, begun = _peak(), time.process_time()
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    made = time.process_time()
    skeleton = make_skeleton(model)
    plan = plan_skeleton(skeleton, num_ranks, example)
    planned = time.process_time()
    stages, device = Placement.v(num_ranks).stages_of(0), torch.device("meta")
    parameters = {name: _on_meta(parameter) for name, parameter in skeleton.named_parameters()}
    make_stages(skeleton, plan, stages, parameters, device, loss_fn=None)
    built = time.process_time()
    count = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"| {count / 1e9:.1f} B | {plan.num_stages} | {length} | {made - begun:.1f} | {planned - made:.1f} | "
        f"{built - planned:.1f} | {built - begun:.1f} | {(_peak() - before) / 1e6:.0f} |"
    )


def _on_meta(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter, device="meta"))


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> None:
    print(
        f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"{torch.get_num_threads()} thread; microbatches of {TOKENS[0]} x {TOKENS[1]} tokens, {ROUNDS} rounds.\n"
    )
    print("| parameters | stages | sequence | model, s | plan, s | two stages, s | all, s | peak, MB |")
    print("|---|---|---|---|---|---|---|---|")
    large_model(8, 4096)
    print("\n| layers a stage | hidden | stage's forward, ms | bare layers, ms | ratio |")
    print("|---|---|---|---|---|")
    for layers_a_stage, hidden in ((1, 256), (4, 256), (4, 512)):
        forward_overhead(layers_a_stage, hidden)


if __name__ == "__main__":
    main()
