"""The executor's own ways, on the local cluster; drawn orders, stacks and failures are in tests/testing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipelining_dualpipev import PipelineError, RanksDisagreeError
from pipelining_dualpipev.planning import Placement, dualpipev_order, lower
from pipelining_dualpipev.testing import LocalCluster, Stack
from pipelining_dualpipev.testing.step import LocalPipeline


def make_pipeline(num_ranks: int, n: int) -> LocalPipeline:
    placement = Placement.v(num_ranks)
    programs = lower(dualpipev_order(num_ranks, n), placement=placement)
    return LocalPipeline(programs, placement, Stack.linear(2 * num_ranks), n)


def test_a_forward_only_step_gives_outputs_and_losses_and_no_gradients():
    pipeline = make_pipeline(3, 4)
    for seed in range(2):
        last = pipeline.step(seed, trains=False)[0]
        for output, x in zip(last.outputs, pipeline.batch(seed)[0], strict=True):
            torch.testing.assert_close(output, pipeline.whole.run(x))
        torch.testing.assert_close(last.losses, pipeline.step_whole(seed))
    assert all(parameter.grad is None for layer in pipeline.stack.layers for parameter in layer.parameters())


def test_nothing_is_kept_between_steps():
    pipeline = make_pipeline(2, 5)
    pipeline.step()
    for runners in pipeline.runners:
        for runner in runners.values():
            assert not runner._in_flight
            assert not runner._put_off
    for rank in pipeline._pipelines:
        for executor in rank._executors.values():
            assert not executor._activations
            assert not executor._to_send
            assert not executor._gradients
            assert not executor._gradients_to_send


def test_a_gradient_that_a_stage_makes_no_use_of_is_zero_where_it_is_sent():
    class Unused(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(torch.ones_like(x))

    pipeline = make_pipeline(2, 2)
    runner = pipeline.runners[1][1]
    runner.module = Unused(runner.module)
    pipeline.step()
    assert all((parameter.grad == 0).all() for parameter in pipeline.stack.layers[0].parameters())
    assert all((parameter.grad != 0).any() for parameter in pipeline.stack.layers[1].parameters())


def test_an_error_found_before_the_step_is_raised_on_every_rank_and_as_it_is_where_it_is():
    pipeline = make_pipeline(3, 2)
    results = pipeline.step(errors={1: KeyError("no such input")})
    assert [type(result) for result in results] == [RanksDisagreeError, KeyError, RanksDisagreeError]
    assert "rank 1: 'no such input'" in str(results[0])
    pipeline.step()
    pipeline.step_whole()
    pipeline.assert_gradients_equal()


def test_outputs_whose_shape_depends_on_values_are_refused_on_every_rank():
    class Ragged(nn.Module):
        rows = 2

        def forward(self, x):
            return x[: self.rows]

    pipeline = make_pipeline(2, 2)
    pipeline.runners[0][0].module = Ragged()
    pipeline.step()
    Ragged.rows = 1
    for error in pipeline.step():
        assert isinstance(error, PipelineError)
        assert "gave (torch.float64 [1, 3]), where it gave (torch.float64 [2, 3])" in str(error)


def test_a_middle_stage_that_returns_no_tensor_is_named():
    class Dict(nn.Module):
        def forward(self, x):
            return {"x": x}

    pipeline = make_pipeline(2, 1)
    pipeline.runners[1][1].module = Dict()
    with pytest.raises(
        PipelineError, match="TypeError: stage 1 returned a dict: every stage but the last returns a ten"
    ):
        raise pipeline.step()[0]


def test_a_cluster_that_cannot_go_on_says_who_waits_for_what():
    cluster = LocalCluster(2)

    def waits(rank: int):
        yield cluster.wires[rank].transport.receive(1 - rank, [torch.empty(1)])

    with pytest.raises(
        AssertionError, match="rank 0 waits for a tensor from rank 1; rank 1 waits for a tensor from rank 0"
    ):
        cluster.run([waits(0), waits(1)])
