"""Pipelines over process groups that are not the world."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from pipelining_dualpipev import clip_grad_norm_
from tests.distributed.stacks import Cut, make_batch, make_layers, mean_square


def several_pipelines(groups: list[list[int]]) -> None:
    """Each group is a pipeline of its own; ranks have made different numbers of groups before."""
    for _ in range(dist.get_rank()):
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
    mine = None
    for members in groups:
        group = dist.new_group(members)
        if dist.get_rank() in members:
            mine = group
    for seed in range(2):  # two schedules over one group
        cut = Cut(make_layers(4, seed=seed + min(dist.get_process_group_ranks(mine))), 3, group=mine)
        x, target = make_batch(6, seed=dist.get_process_group_ranks(mine)[0])
        cut.step(x, target=target)
        mean_square(cut.run_whole(x), target).backward()
        cut.assert_gradients_equal()
        clip_grad_norm_(cut.schedule, 0.1)


@pytest.mark.parametrize("groups", [[[0, 1], [2, 3]], [[0, 2], [1, 3]]])
def test_a_pipeline_may_be_one_of_several(ranks, groups):
    ranks(4).run(several_pipelines, groups)
