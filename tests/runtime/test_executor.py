"""The executor under drawn interleavings, with real modules and autograd, all ranks in this process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pipelining_dualpipev import PipelineError, RanksDisagreeError
from pipelining_dualpipev.planning import Placement, dualpipev_order, lower
from pipelining_dualpipev.runtime.executor import Loss
from pipelining_dualpipev.runtime.microbatches import Microbatches
from pipelining_dualpipev.runtime.pipeline import Pipeline
from pipelining_dualpipev.runtime.stage import StageRunner
from pipelining_dualpipev.testing import LocalCluster

WIDTH = 3
TRANSPORTS = ["buffered", "pairs", "streams"]


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


class Local:
    """A V of small layers in a cluster, beside the same layers unsplit."""

    def __init__(self, num_ranks: int, n: int, chooser: Callable[[int], int], transport: str) -> None:
        torch.manual_seed(0)
        self.n, self.placement = n, Placement.v(num_ranks)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(2 * num_ranks)]
        self.layers, self.whole = layers, copy.deepcopy(layers)
        self.cluster = LocalCluster(num_ranks, chooser, transport=transport)
        programs = [
            lower(dualpipev_order(num_ranks, n, forward_only=only), placement=self.placement) for only in (False, True)
        ]
        self.runners: list[dict[int, StageRunner]] = [
            {index: StageRunner(self._stage(index)) for index in self.placement.stages_of(rank)}
            for rank in range(num_ranks)
        ]
        self.pipelines = [
            Pipeline(
                *programs,
                placement=self.placement,
                runners=runners,
                wires=wires,
                required_inputs=[frozenset()] * num_ranks,
            )
            for runners, wires in zip(self.runners, self.cluster.wires, strict=True)
        ]

    def _stage(self, index: int) -> Any:
        return SimpleNamespace(
            submod=self.layers[index], stage_index=index, num_stages=len(self.layers), device="cpu", dw_builder=None
        )

    def batch(self, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x, target = torch.randn(2, 2 * self.n, WIDTH, generator=generator, dtype=torch.float64)
        return x, target

    def step(self, seed: int = 0, trains: bool = True, errors: dict[int, Exception] | None = None) -> list[Any]:
        x, target = self.batch(seed)
        inputs = [Microbatches([(mb,) for mb in x.chunk(self.n)], [{}] * self.n, list(target.chunk(self.n)))]
        inputs += [Microbatches.none(self.n)] * (len(self.pipelines) - 1)
        loss = Loss(mean_square, {}, 1.0 / self.n)
        return self.cluster.run(
            [
                pipeline.step(inputs[rank], loss, trains=trains, keep_outputs=rank == 0, error=(errors or {}).get(rank))
                for rank, pipeline in enumerate(self.pipelines)
            ]
        )

    def run_whole(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.whole:
            x = layer(x)
        return x

    def step_whole(self, seed: int = 0) -> torch.Tensor:
        x, target = self.batch(seed)
        loss = mean_square(self.run_whole(x), target)
        loss.backward()
        return loss.detach()

    def assert_gradients_equal(self) -> None:
        for ours, theirs in zip(self.layers, self.whole, strict=True):
            for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-15)

    def zero_grad(self) -> None:
        for layer in (*self.layers, *self.whole):
            layer.zero_grad()


@given(st.integers(1, 5), st.integers(1, 12), st.sampled_from(TRANSPORTS), st.data())
@settings(max_examples=60)
def test_whatever_the_interleaving_two_steps_equal_the_unsplit_model(num_ranks, n, transport, data):
    local = Local(num_ranks, n, lambda count: data.draw(st.integers(0, count - 1)), transport)
    for seed in range(2):  # the first announces shapes, the second does not
        results = local.step(seed)
        loss = local.step_whole(seed)
        torch.testing.assert_close(torch.stack(results[0].losses).mean(), loss, rtol=1e-12, atol=1e-15)
        assert [result.losses for result in results[1:]] == [[]] * (num_ranks - 1)
    local.assert_gradients_equal()
    (output,) = [torch.cat(local.step(0, trains=False)[0].outputs)]
    torch.testing.assert_close(output, local.run_whole(local.batch(0)[0]))
    local.assert_gradients_equal()


class FaultError(Exception):
    pass


def fail_at(local: Local, stage: int, method: str, call: int) -> Callable[[], None]:
    """Make the ``call``-th forward or backward of a stage raise; returns what mends it."""
    runner = local.runners[local.placement.rank_of[stage]][stage]
    right, calls = getattr(runner, method), 0

    def wrong(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call + 1:
            raise FaultError("a bit fell over")
        return right(*args, **kwargs)

    setattr(runner, method, wrong)
    return lambda: delattr(runner, method)


@given(
    st.integers(1, 4),
    st.integers(1, 8),
    st.sampled_from(TRANSPORTS),
    st.sampled_from(["forward", "backward"]),
    st.booleans(),
    st.data(),
)
@settings(max_examples=80)
def test_when_an_action_raises_every_rank_is_told_and_the_next_step_is_right(
    num_ranks, n, transport, method, announced, data
):
    local = Local(num_ranks, n, lambda count: data.draw(st.integers(0, count - 1)), transport)
    if not announced:  # then the failure happens in a step in which no words travel ahead
        local.step()
    stage, call = data.draw(st.integers(0, 2 * num_ranks - 1)), data.draw(st.integers(0, n - 1))
    mend = fail_at(local, stage, method, call)
    failures = local.step()
    rank = local.placement.rank_of[stage]
    for error in failures:
        assert isinstance(error, PipelineError)
        assert str(error).startswith(f"rank {rank}, stage {stage}, microbatch {call}, action {stage}")
        assert str(error).endswith("FaultError: a bit fell over")
    assert [isinstance(error.__cause__, FaultError) for error in failures] == [r == rank for r in range(num_ranks)]
    mend()
    local.zero_grad()
    local.step(1)
    local.step_whole(1)
    local.assert_gradients_equal()


def test_an_error_found_before_the_step_is_raised_on_every_rank_as_it_is_where_it_is():
    local = Local(3, 2, lambda count: 0, "buffered")
    results = local.step(errors={1: KeyError("no such input")})
    assert [type(result) for result in results] == [RanksDisagreeError, KeyError, RanksDisagreeError]
    assert "rank 1: 'no such input'" in str(results[0])
    local.step()
    local.step_whole()
    local.assert_gradients_equal()


def test_outputs_whose_shape_depends_on_values_are_refused_on_every_rank():
    class Ragged(nn.Module):
        rows = 2

        def forward(self, x):
            return x[: self.rows]

    local = Local(2, 2, lambda count: 0, "buffered")
    local.runners[0][0].module = Ragged()
    local.step()
    Ragged.rows = 1
    for error in local.step():
        assert isinstance(error, PipelineError)
        assert "gave (torch.float64 [1, 3]), where it gave (torch.float64 [2, 3])" in str(error)


def test_a_middle_stage_that_returns_no_tensor_is_named():
    class Dict(nn.Module):
        def forward(self, x):
            return {"x": x}

    local = Local(2, 1, lambda count: 0, "buffered")
    local.runners[1][1].module = Dict()
    with pytest.raises(
        PipelineError, match="TypeError: stage 1 returned a dict: every stage but the last returns a ten"
    ):
        raise local.step()[0]


def test_a_cluster_that_cannot_go_on_says_who_waits_for_what():
    cluster = LocalCluster(2)

    def waits(rank: int) -> Any:
        yield cluster.wires[rank].transport.receive(1 - rank, [torch.empty(1)])

    with pytest.raises(
        AssertionError, match="rank 0 waits for a tensor from rank 1; rank 1 waits for a tensor from rank 0"
    ):
        cluster.run([waits(0), waits(1)])
