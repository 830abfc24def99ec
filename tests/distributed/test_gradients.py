"""Gradients in everyday uses that a pipeline easily gets wrong, compared with the stack unsplit in one process.

Each case is run on 2 and 4 ranks, with 2P and 2P+1 microbatches.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.distributed.stacks import WIDTH, Cut, assert_close, make_batch, make_layers, mean_square, num_stages

pytestmark = pytest.mark.slow

VOCABULARY = 9


def run_whole(cut: Cut, x: torch.Tensor, target: torch.Tensor, n: int, loss_fn: Any = mean_square) -> None:
    """The step unsplit, microbatch by microbatch."""
    for x_mb, target_mb in zip(x.chunk(n), target.chunk(n), strict=True):
        loss = loss_fn(cut.run_whole(x_mb), target_mb)
        if loss.requires_grad:
            (loss / n).backward()


def compare(cut: Cut, n: int, steps: int = 2, batch: Callable[[int, int], Any] = make_batch, **options: Any) -> None:
    """Steps on both, whose gradients add up."""
    for seed in range(steps):
        x, target = batch(2 * n, seed)
        cut.step(x, target=target)
        run_whole(cut, x, target, n, **options)
    cut.assert_gradients_equal()


# -------------------------------------------------------------------------------------------- what a language model is


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T


def language_layers() -> list[nn.Module]:
    layers = make_layers(num_stages())
    return [nn.Embedding(VOCABULARY, WIDTH).double(), *layers[1:-1], Head()]


def make_tokens(rows: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and the next ones, of which some are ignored: from row to row very different numbers, and once all."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randint(VOCABULARY, (2, rows, 5), generator=generator)
    for row in range(rows):
        y[row, row % 6 :] = -100
    y[:2] = -100  # the whole first microbatch
    return x, y


class TokenLoss:
    """The mean over all tokens of the batch that count, wherever they are."""

    def prepare(self, targets: list[torch.Tensor]) -> None:
        self.count, self.n = sum(int((target >= 0).sum()) for target in targets), len(targets)

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")
        return self.n * loss / self.count


def unequal_token_counts(n: int, tied: bool) -> None:
    layers = language_layers()
    if tied:
        layers[-1].weight = layers[0].weight
    cut = Cut(layers, n, TokenLoss())
    for seed in range(2):
        x, y = make_tokens(2 * n, seed)
        losses = cut.step(x, target=y)
        loss = nn.functional.cross_entropy(cut.run_whole(x).flatten(0, 1), y.flatten())
        loss.backward()
        if cut.rank == 0:
            assert losses[0] == 0, "a microbatch without tokens counts nothing"
            assert_close([torch.stack(losses).mean()], [loss], 1e-12, "loss")
    cut.assert_gradients_equal()
    if cut.rank == 0:
        assert (layers[-1].weight is layers[0].weight) is tied


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_loss_over_all_tokens_of_the_batch_with_unequal_counts_and_a_microbatch_that_has_none(run, tied):
    run(unequal_token_counts, tied)


# ------------------------------------------------------------------------------------------------ frozen in some part


class Adapted(nn.Module):
    """A frozen layer with a small trainable one beside it, as LoRA has it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(WIDTH, 2, dtype=torch.float64))
        self.up = nn.Parameter(torch.randn(2, WIDTH, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + x @ self.down @ self.up


def frozen(n: int, what: str) -> None:
    layers = language_layers()
    if what == "only adapters train":
        layers = [Adapted(layer) if 0 < index < len(layers) - 1 else layer for index, layer in enumerate(layers)]
        layers[0].requires_grad_(False)
        layers[-1].requires_grad_(False)
    elif what == "only the embedding frozen":
        layers[0].requires_grad_(False)
    else:
        nn.ModuleList(layers[: len(layers) - 1]).requires_grad_(False)
    cut = Cut(layers, n, TokenLoss())
    for freeze in (None, False, True):  # as made, then the middle unfrozen, and frozen again
        if freeze is not None:
            for stack in (layers, cut.whole):
                stack[2].requires_grad_(not freeze)
        x, y = make_tokens(2 * n)
        cut.step(x, target=y)
        nn.functional.cross_entropy(cut.run_whole(x).flatten(0, 1), y.flatten()).backward()
        cut.assert_gradients_equal()


@pytest.mark.parametrize("what", ["only adapters train", "only the embedding frozen", "only the head trains"])
def test_what_is_frozen_has_no_gradient_and_everything_else_has_the_right_one(run, what):
    run(frozen, what)


# ------------------------------------------------------------------------------------------- how parameters are used


class Uses(nn.Module):
    """One parameter twice, and one that reaches the output without touching the input."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64) / 3)
        self.beside = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.tanh(x @ self.twice) @ self.twice) + self.beside.exp()


def uses(n: int) -> None:
    torch.manual_seed(0)
    compare(Cut([Uses() for _ in range(num_stages())], n), n)


def test_parameters_used_twice_and_beside_the_input(run):
    run(uses)


# ------------------------------------------------------------------------------------------- activation checkpointing


class Checkpointed(nn.Module):
    """A layer with dropout that is run again in the backward; counts its calls and notes its masks."""

    def __init__(self, layer: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.layer, self.use_reentrant = layer, use_reentrant
        self.masks: dict[float, list[torch.Tensor]] = {}

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        mask = torch.rand_like(y) > 0.4
        self.masks.setdefault(float(x.detach().sum()), []).append(mask)
        return y * mask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


class Replayed(nn.Module):
    """The same with the masks that were drawn."""

    def __init__(self, layer: nn.Module, masks: list[torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.masks = layer, iter(masks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * next(self.masks)


def checkpointed(n: int, use_reentrant: bool) -> None:
    plain = make_layers(num_stages())
    plain[0] = nn.Sequential(plain[0])  # reentrant checkpoints need an input that requires grad
    layers = [plain[0], *(Checkpointed(copy.deepcopy(layer), use_reentrant) for layer in plain[1:])]
    cut = Cut(layers, n)
    x, target = make_batch(2 * n)
    cut.step(x, target=target)
    masks: list[list[torch.Tensor]] = []
    for index, layer in cut.mine.items():
        if index:
            found = list(layer.masks.values())
            assert [len(pair) for pair in found] == [2] * n, "each block is run once more for each microbatch"
            assert all(torch.equal(first, again) for first, again in found), "with the same random numbers"
            masks += [[index], [first for first, _ in found]]  # type: ignore[list-item]
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, masks)
    by_stage = {key[0]: value for each in everywhere for key, value in zip(each[::2], each[1::2], strict=True)}
    cut.whole = nn.ModuleList([plain[0], *(Replayed(plain[i], by_stage[i]) for i in range(1, len(plain)))])
    for layer in plain:
        layer.zero_grad()
    run_whole(cut, x, target, n)
    cut.assert_gradients_equal()


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_activation_checkpointing_runs_each_block_once_more_with_the_same_random_numbers(run, use_reentrant):
    run(checkpointed, use_reentrant)


# ------------------------------------------------------------------------------------ what a forward leaves in a module


class Counting(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.norm = layer, nn.BatchNorm1d(WIDTH, dtype=torch.float64)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.norm(self.layer(x))


def counting(n: int) -> None:
    cut = Cut([Counting(layer) for layer in make_layers(num_stages())], n)
    compare(cut, n)
    for index, layer in cut.mine.items():
        assert layer.calls == 2 * n
        assert_close(layer.buffers(), cut.whole[index].buffers(), 1e-12, f"buffer of stage {index}")


def test_each_forward_is_run_once_a_microbatch_and_running_statistics_are_those_of_the_unsplit_stack(run):
    run(counting)


def random_draws(n: int) -> None:
    layers = [nn.Sequential(layer, nn.Dropout(0.3)) for layer in make_layers(num_stages())]
    cut = Cut(layers, n)
    x, target = make_batch(2 * n)
    torch.manual_seed(5)
    cut.step(x, target=target)
    drawn = torch.get_rng_state()
    torch.manual_seed(5)
    for _ in range(2 * n):
        nn.functional.dropout(torch.zeros(2, WIDTH, dtype=torch.float64), 0.3)
    assert torch.equal(torch.get_rng_state(), drawn)


def test_no_more_random_numbers_are_drawn_than_the_forwards_need(run):
    run(random_draws)


# --------------------------------------------------------------------------------------------------- mixed precision


def autocast_on_and_off(n: int) -> None:
    layers = [layer.float() for layer in make_layers(num_stages())]
    cut = Cut(layers, n, lambda output, target: mean_square(output.float(), target))
    for enabled in (False, True, True, False):
        x, target = (tensor.float() for tensor in make_batch(2 * n))
        for layer in (*layers, *cut.whole):
            layer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            cut.step(x, target=target)
        for x_mb, target_mb in zip(x.chunk(n), target.chunk(n), strict=True):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                loss = mean_square(cut.run_whole(x_mb).float(), target_mb) / n
            loss.backward()
        cut.assert_gradients_equal(1e-6)


def test_autocast_may_be_on_in_one_step_and_off_in_the_next(run):
    run(autocast_on_and_off)
