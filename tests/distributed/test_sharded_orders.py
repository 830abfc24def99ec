"""Pipelines whose stages are sharded over each other have to run one order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipelining_dualpipev import RanksDisagreeError, ScheduleDualPipeV
from tests.distributed.stacks import make_layers
from tests.distributed.test_data_parallel import Replicated, replicate, shard

pytestmark = pytest.mark.slow


def other_order_in_one_pipeline(sharded: bool) -> str:
    """They differ in how many backwards are split: each pipeline by itself is right."""

    def schedule(stages: Any, n: int, loss_fn: Any) -> ScheduleDualPipeV:
        ours = torch.distributed.get_rank() < 2
        return ScheduleDualPipeV(stages, n, loss_fn, zb=None if ours else 0)

    def only_rank_0(stage: Any, group: Any) -> Any:
        return shard(stage, group) if torch.distributed.get_rank() % 2 == 0 else stage

    try:
        run = Replicated(make_layers(4), 6, only_rank_0 if sharded else replicate, schedule)
    except RanksDisagreeError as error:
        return str(error)
    run.step_both(seed=0, rows=24)
    run.assert_gradients_equal()
    return ""


def test_other_orders_over_sharded_stages_are_refused_on_every_rank(ranks):
    """They came to wait for each other's shards in the first step."""
    told = ranks(4).run(other_order_in_one_pipeline, True)
    assert told[0] == told[1] != told[2] == told[3], "each pipeline tells the digest of its own order, and the other"
    for words in told:
        assert "the stages of rank 0 are sharded by fully_shard over pipelines that run other orders" in words
        assert "give all pipelines the same n_microbatches, zb and costs" in words


def test_replicated_stages_may_be_run_in_any_order(ranks):
    assert set(ranks(4).run(other_order_in_one_pipeline, False)) == {""}
