"""Weights of which several ranks start with one of their own, though only one rank's may count.

A parameter that stages of several ranks hold (`models.assign`, `models.stack`) is one parameter only as long as all of
them have the same values: the step sums its gradients, and every optimiser then takes the same step. But each rank has
copied it from a model of its own, which is another one where the processes were not started from one seed; or it has
made it, where the model is on meta. So, as `DistributedDataParallel` does, the first rank's values are sent to the
others. What a single rank holds needs no such thing: it is what that rank has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from pipelining_dualpipev.errors import RanksDisagreeError, SplitError
from pipelining_dualpipev.models.agree import everywhere
from pipelining_dualpipev.planning.placement import Placement

__all__ = ["start_replicas_alike"]


def start_replicas_alike(modules: Mapping[int, Any], group: dist.ProcessGroup | None) -> None:
    """Let replicas of a parameter have the values of the first rank that holds it. Collective.

    Args:
        modules: this rank's stages, with weights.
        group: the pipeline's.

    Raises:
        RanksDisagreeError: on every rank, if they differ in what is replicated, for then the models do.
    """
    rank_of, rank = Placement.v(dist.get_world_size(group)).rank_of, dist.get_rank(group)
    own = {name: parameter for module in modules.values() for name, parameter in module.tied_parameters.items()}
    tied = {name: stages for module in modules.values() for name, stages in module.tied_stages.items()}
    holders = {name: sorted({rank_of[stage] for stage in stages}) for name, stages in sorted(tied.items())}
    holders = {name: ranks for name, ranks in holders.items() if len(ranks) > 1}
    told = everywhere(lambda: holders, group, otherwise=SplitError)
    first = told[0]
    for other, known in enumerate(told):
        if known != first:
            differ = sorted({*known, *first} - {name for name in known if known[name] == first.get(name)})
            raise RanksDisagreeError(
                f"the ranks differ in which of them hold {differ[0]}: rank 0 has {first.get(differ[0])}, "
                f"rank {other} has {known.get(differ[0])}. Split the same model on every rank"
            )
    for name, ranks in holders.items():
        if rank == ranks[0]:
            for other in ranks[1:]:
                dist.send(own[name].detach(), group=group, group_dst=other)
        elif rank in ranks:
            dist.recv(own[name].detach(), group=group, group_src=ranks[0])
