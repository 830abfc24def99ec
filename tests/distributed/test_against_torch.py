"""What the README says that torch's own ScheduleDualPipeV gets wrong and ours gets right: shown, side by side.

Each claim of the README is one test here. The model has four stages on two ranks: an embedding, two linear layers and
a head, which shares its weight with the embedding where a test says so. Both ends are on rank 0, as the V has it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.pipelining as torch_pipelining
from torch import nn
from torch.distributed.pipelining import PipelineStage

import pipelining_dualpipev

pytestmark = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="the README's claims are about torch 2.13"
)

VOCABULARY, WIDTH = 11, 6
NUM_STAGES = 4
OURS, TORCHS = pipelining_dualpipev.ScheduleDualPipeV, torch_pipelining.ScheduleDualPipeV


def make_modules(tied: bool = False) -> list[nn.Module]:
    torch.manual_seed(0)
    first, last = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
    if tied:
        last.weight = first.weight
    middle = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(NUM_STAGES - 2)]
    return [module.double() for module in (first, *middle, last)]


def make_batch(n_microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randint(VOCABULARY, (2, 2 * n_microbatches), generator=generator)
    return x, y


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target)


def gradients(modules: list[nn.Module]) -> dict[str, torch.Tensor]:
    return {
        f"{stage}.{name}": parameter.grad
        for stage, module in enumerate(modules)
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def reference(n_microbatches: int, *, tied: bool = False, steps: int = 1) -> dict[str, torch.Tensor]:
    """The gradients of the unsplit model in this process."""
    modules = make_modules(tied)
    x, y = make_batch(n_microbatches)
    for _ in range(steps):
        loss_fn(nn.Sequential(*modules)(x), y).backward()
    return gradients(modules)


def make_schedule(name: str, modules: list[nn.Module], n_microbatches: int) -> Any:
    """Either class, over the same two stages, by the same call."""
    rank = dist.get_rank()
    stages = [PipelineStage(modules[i], i, NUM_STAGES, torch.device("cpu")) for i in (rank, NUM_STAGES - 1 - rank)]
    return {"ours": OURS, "torch": TORCHS}[name](stages, n_microbatches, loss_fn=loss_fn)


def train(
    name: str, n_microbatches: int, tied: bool = False, steps: int = 1, frozen: tuple[int, ...] = ()
) -> dict[str, torch.Tensor]:
    modules = make_modules(tied)
    for stage in frozen:
        modules[stage].requires_grad_(False)
    schedule = make_schedule(name, modules, n_microbatches)
    x, y = make_batch(n_microbatches)
    for _ in range(steps):
        schedule.step(*((x,) if dist.get_rank() == 0 else ()), target=y)
    return gradients(modules)


def evaluate(name: str, n_microbatches: int) -> torch.Tensor | None:
    schedule = make_schedule(name, make_modules(), n_microbatches)
    x, _ = make_batch(n_microbatches)
    return schedule.eval(*((x,) if dist.get_rank() == 0 else ()))


def merged(by_rank: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: gradient for grads in by_rank for name, gradient in grads.items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            found[name], gradient, rtol=1e-12, atol=1e-14, msg=lambda m, name=name: f"{name}: {m}"
        )


def wrong_in(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> set[str]:
    assert found.keys() == expected.keys()
    return {name for name in expected if not torch.allclose(found[name], expected[name])}


def test_where_both_are_right_they_agree(ranks):
    """So that what follows cannot come from a use of torch's class that it was not made for."""
    expected = reference(8)
    assert_same(merged(ranks(2).run(train, "torch", 8)), expected)
    assert_same(merged(ranks(2).run(train, "ours", 8)), expected)


@pytest.mark.parametrize("n_microbatches", [1, 2, 3])
def test_fewer_microbatches_than_stages(ranks, n_microbatches):
    refused = ranks(2).run_expecting_errors(train, "torch", n_microbatches)
    assert [error.type for error in refused] == ["ValueError"] * 2
    assert_same(merged(ranks(2).run(train, "ours", n_microbatches)), reference(n_microbatches))


def test_eval(ranks):
    failed = ranks(2).run_expecting_errors(evaluate, "torch", 8)
    assert [error.type for error in failed] == ["TypeError", "AssertionError"]
    modules, (x, _) = make_modules(), make_batch(8)
    output, nothing = ranks(2).run(evaluate, "ours", 8)
    torch.testing.assert_close(output, nn.Sequential(*modules)(x), rtol=1e-12, atol=1e-14)
    assert nothing is None


def test_tied_embedding(ranks):
    """torch divides the shared gradient by n for each of its stages, and what was added in between only once."""
    expected = reference(8, tied=True)
    torchs = merged(ranks(2).run(train, "torch", 8, tied=True))
    assert wrong_in(torchs, expected) == {"0.weight", "3.weight"}
    assert torchs["0.weight"].norm() < expected["0.weight"].norm() / 2
    assert_same(merged(ranks(2).run(train, "ours", 8, tied=True)), expected)


def test_accumulation_over_two_steps(ranks):
    """torch divides what has been accumulated, at the end of each step: the first step's part is divided twice."""
    one, two = reference(8), reference(8, steps=2)
    torchs = merged(ranks(2).run(train, "torch", 8, steps=2))
    assert_same(torchs, {name: gradient / 8 + gradient for name, gradient in one.items()})
    assert_same(merged(ranks(2).run(train, "ours", 8, steps=2)), two)


def test_frozen_first_stage(ranks):
    """torch leaves out weight gradients of the stage above it, without a word; the other stages are right."""
    expected = {name: gradient for name, gradient in reference(8).items() if name != "0.weight"}
    torchs = merged(ranks(2).run(train, "torch", 8, frozen=(0,)))
    assert wrong_in(torchs, expected) == {"1.0.weight", "1.0.bias"}
    assert_same(merged(ranks(2).run(train, "ours", 8, frozen=(0,))), expected)
