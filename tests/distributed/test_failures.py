"""A step that fails on one rank fails on all, soon, with the words of where it began; the next one is right."""

from __future__ import annotations

import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipelining_dualpipev import PipelineError, RankLostError
from tests.distributed.pool import JobError
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


# ---------------------------------------------------------------------------------------------- ranks that are no more


class Deadly(nn.Module):
    """Ends its process in its ``at``-th call."""

    def __init__(self, layer: nn.Module, at: int) -> None:
        super().__init__()
        self.layer, self.at, self.calls = layer, at, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.layer(x)


def a_rank_that_is_killed(folder: str, victim: int, at: int, named_inputs: bool) -> None:
    num_ranks = dist.get_world_size()
    layers = make_layers(2 * num_ranks)
    layers[victim] = Deadly(layers[victim], at)
    if named_inputs:
        for layer in layers:
            layer.required_inputs = ()  # type: ignore[assignment]
    cut = Cut(layers, 4)
    x, target = make_batch(8)
    start = time.monotonic()
    told = []
    for _ in range(3):
        try:
            cut.step(x, target=target)
        except RankLostError as error:
            told.append(str(error))
    Path(folder, f"{cut.rank}").write_text(json.dumps([time.monotonic() - start, told]))


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "at"), [(3, 0), (1, 2), (0, 5), (2, 6)])
def test_a_rank_that_is_killed_is_named_by_all_others_within_seconds(ranks, tmp_path, victim, at):
    with pytest.raises(JobError, match="died"):
        ranks(4).run(a_rank_that_is_killed, str(tmp_path), victim, at, False)
    others = [rank for rank in range(4) if rank != victim]
    for rank in others:
        seconds, told = json.loads((tmp_path / str(rank)).read_text())
        assert told[0] == f"rank {victim} ended while others were in a step. Start all ranks again"
        assert all(words == f"an earlier step has failed for good: {told[0]}" for words in told[1:])
        assert seconds < 10


def a_rank_that_never_comes(group_seconds: float) -> str:
    group = dist.new_group(timeout=timedelta(seconds=group_seconds))
    cut = Cut(make_layers(6), 4, group=group)
    x, target = make_batch(8)
    cut.step(x, target=target)
    if cut.rank == 1:
        return ""
    try:
        cut.step(x, target=target)
    except RankLostError as error:
        return str(error)
    return "nothing"


@pytest.mark.slow
def test_a_rank_that_never_calls_step_is_named_by_those_that_did(ranks):
    first, absent, last = ranks(3).run(a_rank_that_never_comes, 3.0)
    assert absent == ""
    for words in (first, last):
        assert words.startswith("rank 1 did not come to the step that the others are in within 3 s")
