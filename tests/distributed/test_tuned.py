"""`ScheduleDualPipeV(costs=...)` on real ranks: another order, the same gradients."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from pipelining_dualpipev.planning import CostModel, dualpipev_order, tune
from tests.distributed.stacks import Cut, make_batch, make_layers, mean_square


def train_tuned(n: int, costs: CostModel) -> bool:
    num_ranks = dist.get_world_size()
    cut = Cut(make_layers(2 * num_ranks), n, costs=costs)
    for step in range(2):
        x, target = make_batch(2 * n, seed=step)
        cut.step(x, target=target)
        mean_square(cut.run_whole(x), target).backward()
        cut.assert_gradients_equal()
    actions = [str(action) for action in cut.schedule.pipeline_order[cut.rank]]
    assert actions == [str(action) for action in tune(num_ranks, n, costs).order[cut.rank]]
    return actions != [str(action) for action in dualpipev_order(num_ranks, n)[cut.rank]]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_gradients_of_a_tuned_order_are_those_of_the_unsplit_stack(ranks, num_ranks):
    costs = CostModel(1.0, 1.2, 0.8, hop=0.1)
    assert all(ranks(num_ranks).run(train_tuned, 2 * num_ranks + 1, costs))


def costs_that_differ() -> None:
    overlap = 0.5 if dist.get_rank() else 1.0
    Cut(make_layers(4), 8, costs=CostModel(overlap=overlap))


def test_ranks_whose_costs_make_other_orders_are_told(ranks):
    for raised in ranks(2).run_expecting_errors(costs_that_differ):
        assert raised.type == "RanksDisagreeError"
        assert "the ranks differ in their order of actions" in raised.message


def costs_for_other_stages() -> None:
    Cut(make_layers(4), 8, costs=CostModel(forward=[1.0] * 6))


def test_costs_for_another_number_of_stages_are_told_on_every_rank(ranks):
    for raised in ranks(2).run_expecting_errors(costs_for_other_stages):
        assert "forward has 6 costs, the pipeline 4 stages" in raised.message
