"""What multiplies a loss: a GradScaler, and the weight of losses that are injected in a middle stage.

Each case is run on 2 and 4 ranks, with 2P and 2P+1 microbatches.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.utils.checkpoint import checkpoint

from pipelining_dualpipev import inject_loss
from tests.distributed.stacks import (
    WIDTH,
    Cut,
    assert_close,
    gradients,
    make_batch,
    make_layers,
    mean_square,
    num_stages,
)

pytestmark = pytest.mark.slow


class Half(nn.Module):
    """A layer in float16, whose gradients overflow where told."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.overflows = layer.half(), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x.half())
        return y + (y - y.detach()) * 6e4 * 6e4 if self.overflows else y


def scaled_by_a_grad_scaler(n: int) -> None:
    cut_layers = [Half(layer) for layer in make_layers(num_stages())]
    scaler = ShardedGradScaler("cpu", init_scale=2.0**10, process_group=dist.group.WORLD)
    cut = Cut(cut_layers, n, lambda output, target: mean_square(output.float(), target), grad_scaler=scaler)
    optimizer = torch.optim.SGD(cut.schedule.parameters(), lr=0.1)
    before = copy.deepcopy(list(cut.schedule.parameters()))
    for overflows in (True, False):
        optimizer.zero_grad()
        for index, layer in cut.mine.items():
            layer.overflows = overflows and index == num_stages() // 2  # on the last rank alone
        x, target = (tensor.float() for tensor in make_batch(2 * n))
        losses = cut.step(x, target=target)
        scaler.unscale_(optimizer)
        if not overflows:
            for x_mb, target_mb in zip(x.chunk(n), target.chunk(n), strict=True):
                loss = mean_square(cut.run_whole(x_mb).float(), target_mb)
                (loss * 2**10 / n).backward()
            for parameter in cut.whole.parameters():
                parameter.grad /= 2**10
            cut.assert_gradients_equal(5e-3)
            if losses:
                assert_close(losses[-1:], [loss], 1e-3, "loss, which is not scaled")
        scaler.step(optimizer)
        scaler.update()
        moved = [not torch.equal(a, b) for a, b in zip(cut.schedule.parameters(), before, strict=True)]
        assert any(moved) is not overflows, "all ranks skip where one overflows"
    assert scaler.get_scale() == 2.0**9


def test_a_grad_scaler_cancels_and_one_ranks_overflow_skips_the_step_on_all(run):
    run(scaled_by_a_grad_scaler)


def plain_scaler() -> None:
    Cut(make_layers(4), 4, grad_scaler=torch.amp.GradScaler("cpu"))


def test_a_scaler_that_would_skip_on_one_rank_alone_is_refused(ranks):
    for raised in ranks(2).run_expecting_errors(plain_scaler):
        assert "use torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler" in raised.message


# ------------------------------------------------------------------------------------------------ losses in the middle


class Routed(nn.Module):
    """A layer with a loss of its own."""

    def __init__(self, layer: nn.Module, checkpointed: bool) -> None:
        super().__init__()
        self.layer, self.checkpointed = layer, checkpointed
        self.router = nn.Linear(WIDTH, 3, dtype=torch.float64)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.router(x).logsumexp(-1).square().mean()

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return inject_loss(self.layer(x), 0.3 * self.loss(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x)


def injected(n: int, checkpointed: bool, scale_grads: bool) -> None:
    torch.manual_seed(1)
    layers = [Routed(layer, checkpointed) for layer in make_layers(num_stages())]
    cut = Cut(layers, n, scale_grads=scale_grads)
    for seed in range(2):
        x, target = make_batch(2 * n, seed)
        cut.step(x, target=target)
        for x_mb, target_mb in zip(x.chunk(n), target.chunk(n), strict=True):
            total, value = torch.zeros((), dtype=torch.float64), x_mb
            for layer in cut.whole:
                total, value = total + 0.3 * layer.loss(value), layer.layer(value)
            ((total + mean_square(value, target_mb)) / (n if scale_grads else 1)).backward()
    cut.assert_gradients_equal()
    with torch.no_grad():
        cut.schedule.eval(x) if cut.rank == 0 else cut.schedule.eval()


@pytest.mark.parametrize(("checkpointed", "scale_grads"), [(False, True), (True, True), (False, False)])
def test_a_loss_injected_in_the_middle_is_weighted_as_the_main_one(run, checkpointed, scale_grads):
    run(injected, checkpointed, scale_grads)


def injected_under_a_scaler(n: int) -> None:
    torch.manual_seed(1)
    layers = [Routed(layer, False) for layer in make_layers(num_stages())]
    scaler = ShardedGradScaler("cpu", init_scale=2.0**10, process_group=dist.group.WORLD)
    plain, scaled = Cut(copy.deepcopy(layers), n), Cut(layers, n, grad_scaler=scaler)
    x, target = make_batch(2 * n)
    for cut in (plain, scaled):
        cut.step(x, target=target)
    scaler.unscale_(torch.optim.SGD(scaled.schedule.parameters()))
    for index in plain.mine:
        assert_close(gradients(scaled.mine[index]), gradients(plain.mine[index]), 1e-12, f"gradient of stage {index}")


def test_an_injected_loss_is_scaled_by_the_grad_scaler_too(run):
    run(injected_under_a_scaler)


def test_outside_of_a_schedule_an_injected_loss_counts_once():
    x, router = torch.ones(3, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    (inject_loss(x, router**2).sum() * 5).backward()
    assert x.grad.tolist() == [5.0] * 3
    assert router.grad == 4.0
    with pytest.raises(ValueError, match=r"shape \[3\]: give one number"):
        inject_loss(x, x)
