"""A step that fails on one rank fails on all, soon, with the words of where it began; the next one is right."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipelining_dualpipev import PipelineError
from tests.distributed.stacks import Cut, make_batch, make_layers, mean_square


class Fragile(nn.Module):
    """Raises in the forward or the backward of its ``at``-th call."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.calls, self.at, self.where = layer, 0, -1, ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        failing = self.calls - 1 == self.at
        if failing and self.where == "forward":
            raise ArithmeticError("a bit fell over")
        y = self.layer(x)
        if failing and self.where == "backward" and y.requires_grad:
            y.register_hook(_fall_over)
        return y


def _fall_over(_: torch.Tensor) -> None:
    raise ArithmeticError("a bit fell over")


def fail_and_go_on(where: str, stage: int, microbatch: int, warm: bool) -> tuple[str, bool]:
    cut = Cut([Fragile(layer) for layer in make_layers(2 * dist.get_world_size())], 4)
    x, target = make_batch(8)
    if warm:  # shapes are known, and no words travel ahead of tensors
        cut.step(x, target=target)
    if stage in cut.mine:
        fragile = cut.mine[stage]
        fragile.calls, fragile.at, fragile.where = 0, microbatch, where  # type: ignore[assignment]
    with pytest.raises(PipelineError) as raised:
        cut.step(x, target=target)
    for layer in cut.mine.values():
        layer.zero_grad()
        layer.at = -1  # type: ignore[assignment]
    cut.step(x, target=target)
    mean_square(cut.run_whole(x), target).backward()
    cut.assert_gradients_equal()
    return str(raised.value), isinstance(raised.value.__cause__, ArithmeticError)


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_action_that_raises_is_told_on_every_rank_and_the_next_step_is_right(ranks, where, warm):
    for stage, microbatch in ((0, 0), (2, 3), (5, 1)):
        rank = min(stage, 5 - stage)
        told = ranks(3).run(fail_and_go_on, where, stage, microbatch, warm)
        assert [is_cause for _, is_cause in told] == [r == rank for r in range(3)]
        for words, _ in told:
            assert f"rank {rank}, stage {stage}, microbatch {microbatch}, action {stage}" in words
            assert words.endswith("ArithmeticError: a bit fell over")
