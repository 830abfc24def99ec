"""Our CSV in torch's runtime, and torch's CSV in ours."""

from __future__ import annotations

import pytest
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from pipelining_dualpipev.planning import (
    CostModel,
    Placement,
    check_order,
    check_programs,
    dualpipev_order,
    lower,
    tune,
)
from pipelining_dualpipev.planning.formats import read_order, write_csv
from tests.planning.torch_oracle import torch_order

ORDERS = {
    "reference": (dualpipev_order(4, 10), 10),
    "few microbatches": (dualpipev_order(3, 2), 2),
    "tuned": (tune(3, 7, CostModel(1.0, 1.2, 0.8)).order, 7),
}


def torch_runtime(num_ranks: int, n_microbatches: int) -> _PipelineScheduleRuntime:
    """The runtime without its constructor, which takes a process group: what reading and writing CSV needs of it."""
    runtime = object.__new__(_PipelineScheduleRuntime)
    placement = Placement.v(num_ranks)
    runtime.pipeline_order = {}
    runtime._n_microbatches = n_microbatches
    runtime._stages, runtime._defer_pp_recv = [], False
    runtime._num_stages = placement.num_stages
    runtime.stage_index_to_group_rank = dict(enumerate(placement.rank_of))
    runtime.pp_group_size = num_ranks
    return runtime


@pytest.mark.parametrize("name", ORDERS)
def test_torch_loads_our_programs_and_writes_them_back(name, tmp_path):
    order, n = ORDERS[name]
    num_ranks = len(order)
    programs = lower(order, placement=Placement.v(num_ranks))
    (tmp_path / "ours.csv").write_text(write_csv(programs))
    runtime = torch_runtime(num_ranks, n)
    runtime._load_csv(str(tmp_path / "ours.csv"), format="compute_comms")
    loaded = runtime.pipeline_order_with_comms
    assert {rank: [str(action) for action in row] for rank, row in loaded.items()} == {
        rank: [str(action) for action in row] for rank, row in programs.items()
    }
    runtime._dump_csv(str(tmp_path / "theirs.csv"), format="compute_comms")
    assert read_order(tmp_path / "theirs.csv") == programs
    check_programs(tmp_path / "theirs.csv", placement=Placement.v(num_ranks))


@pytest.mark.parametrize("name", ORDERS)
def test_torch_loads_our_order_and_lowers_it(name, tmp_path):
    order, n = ORDERS[name]
    (tmp_path / "ours.csv").write_text(write_csv(order))
    runtime = torch_runtime(len(order), n)
    runtime._load_csv(str(tmp_path / "ours.csv"), format="compute_only")
    without_transfers = [
        [str(action) for action in row if not any(word in str(action) for word in ("SEND", "RECV", "SHARD", "REDUCE"))]
        for row in runtime.pipeline_order_with_comms.values()
    ]
    assert without_transfers == [list(map(str, row)) for row in order.values()]


def test_torchs_own_order_loads_here(tmp_path):
    rows = torch_order(4, 10)
    text = "\n".join(",".join(row) for row in rows.values()) + "\n"
    (tmp_path / "torch.csv").write_text(text)
    assert check_order(tmp_path / "torch.csv", 10, placement=Placement.v(4)) == dualpipev_order(4, 10)
