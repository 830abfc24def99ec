"""The order that a schedule says it runs, and `ScheduleFromOrder` on torch's orders and one written as CSV."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from pipelining_dualpipev import ScheduleFromOrder, mean_loss
from pipelining_dualpipev._torch import TORCH_SCHEDULES, torch_order
from tests.distributed.stacks import Cut, assert_close, gradients, make_batch, make_layers, mean_square


def orders_of_all_ranks(n: int) -> list[dict[int, list[str]]]:
    cut = Cut(make_layers(2 * dist.get_world_size()), n)
    assert isinstance(cut.schedule, PipelineScheduleMulti)
    return [
        {rank: [str(action) for action in actions] for rank, actions in order.items()}
        for order in (cut.schedule.pipeline_order, cut.schedule.pipeline_order_with_comms)
    ]


def test_every_rank_knows_the_order_of_all_in_torchs_action_type(ranks):
    first, second = ranks(2).run(orders_of_all_ranks, 4)
    assert first == second
    compute, programs = first
    assert compute[1][:2] == ["1F0", "2F0"]
    assert programs[1][0] == "1RECV_F0"
    assert any(";0SEND_F" in action and action.endswith("OVERLAP_F_B") for action in programs[0])


def an_order_of_torchs(name: str, num_ranks: int) -> None:
    n = TORCH_SCHEDULES[name].fitting(num_ranks, 4)
    placement = TORCH_SCHEDULES[name].placement(num_ranks)
    layers = make_layers(placement.num_stages)
    whole = copy.deepcopy(layers)
    rank, cpu = dist.get_rank(), torch.device("cpu")
    mine = placement.stages_of(rank)
    stages = [PipelineStage(layers[index], index, placement.num_stages, cpu) for index in mine]
    schedule = ScheduleFromOrder(stages, torch_order(name, num_ranks, n), n, mean_square)
    x, target = make_batch(2 * n)
    losses: list[torch.Tensor] = []
    given = (x,) if schedule.has_first_stage else ()
    schedule.step(*given, target=target if schedule.has_last_stage else None, losses=losses)
    expected = x
    for layer in whole:
        expected = layer(expected)
    loss = mean_square(expected, target)
    loss.backward()
    assert abs(mean_loss(schedule, losses) - loss) <= 1e-12 * loss
    for index in mine:
        assert_close(gradients(layers[index]), gradients(whole[index]), 1e-12, f"gradient of stage {index}")


@pytest.mark.parametrize("name", ["ZBVZeroBubble", "Interleaved1F1B", "InterleavedZeroBubble"])
def test_torchs_orders_run_on_the_same_runtime(ranks, name):
    ranks(2).run(an_order_of_torchs, name, 2)
    ranks(3).run(an_order_of_torchs, name, 3)


ONE_F_ONE_B = """\
0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3
1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3
"""


def an_order_as_csv(text: str) -> None:
    layers = make_layers(2)
    whole = copy.deepcopy(layers)
    rank = dist.get_rank()
    stage = PipelineStage(layers[rank], rank, 2, torch.device("cpu"))
    schedule = ScheduleFromOrder([stage], text, 4, mean_square)
    x, target = make_batch(8)
    schedule.step(*((x,) if rank == 0 else ()), target=target if rank == 1 else None)
    mean_square(whole[1](whole[0](x)), target).backward()
    assert_close(gradients(layers[rank]), gradients(whole[rank]), 1e-12, "gradient")


def test_an_order_written_as_csv_runs_and_a_wrong_one_is_told_on_every_rank(ranks):
    ranks(2).run(an_order_as_csv, ONE_F_ONE_B)
    for raised in ranks(2).run_expecting_errors(an_order_as_csv, ONE_F_ONE_B.replace("0F2,", "")):
        assert "law 'complete' broken on rank 0" in raised.message
    for raised in ranks(2).run_expecting_errors(an_order_as_csv, ONE_F_ONE_B + "2F0,2F1,2F2,2F3\n"):
        assert "the order is for 3 ranks, the stages' group has 2: run it on 3" in raised.message
