"""Weights that several ranks make for themselves, of which only one rank's may count.

A parameter that stages of several ranks hold (`models.assign`) is copied from the whole model, or read from a
checkpoint, by each of them, and is the same everywhere. A model that is on meta has no weights to copy: each rank makes
its own, at random, and for the replicas to be one parameter the first rank's have to be sent to the others.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from pipelining_dualpipev.models.plan import SplitPlan
from pipelining_dualpipev.models.stage import StageModule
from pipelining_dualpipev.planning.placement import Placement

__all__ = ["send_made_weights"]


def send_made_weights(
    model: nn.Module, plan: SplitPlan, modules: Mapping[int, StageModule], group: dist.ProcessGroup | None
) -> None:
    """Let replicas of parameters that ``model`` has on meta be those of the first rank that holds them. Collective.

    Args:
        model: that was split.
        plan: of the split.
        modules: this rank's stages, whose weights have been made.
        group: the pipeline's.
    """
    rank_of = Placement.v(dist.get_world_size(group)).rank_of
    rank = dist.get_rank(group)
    on_meta = {name for name, parameter in model.named_parameters() if parameter.is_meta}
    own = {name: parameter for module in modules.values() for name, parameter in module.tied_parameters.items()}
    for name, stages in sorted(plan.tied_stages().items()):
        ranks = sorted({rank_of[stage] for stage in stages})
        if name not in on_meta or len(ranks) == 1 or rank not in ranks:
            continue
        with torch.no_grad():
            if rank == ranks[0]:
                for other in ranks[1:]:
                    dist.send(own[name].detach(), group=group, group_dst=other)
            else:
                dist.recv(own[name].detach(), group=group, group_src=ranks[0])
