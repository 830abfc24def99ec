"""What waits for W is what W needs, not the graph: a step's peak is that of full backwards and of the queue of W."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from pipelining_dualpipev import ScheduleFromOrder, stage_indices
from pipelining_dualpipev.planning import Action, Kind, dualpipev_order
from pipelining_dualpipev.planning.actions import Order
from tests.bench.common import peak_bytes
from tests.distributed.stacks import mean_square

ROWS, WIDE = 512, 16
TENSOR = ROWS * WIDE * 8
WAITING = 4  # tensors: what its two linear layers were given, and the gradients of what they gave


class Deep(nn.Module):
    """Two linear layers, with more between them than they keep themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(WIDE, WIDE, bias=False).double() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(6):
            x = torch.sin(x)
        return self.second(x)


def reordered(order: Order, backward: Kind) -> Order:
    """The same forwards and backwards, all of one kind, unpaired; each W there is at the very end."""
    kinds = dict.fromkeys((Kind.FULL_BACKWARD, Kind.BACKWARD_INPUT), backward)
    new = {}
    for rank, actions in order.items():
        singles = [single for action in actions for single in action.singles if single.kind is not Kind.BACKWARD_WEIGHT]
        new[rank] = [Action(stage, kinds.get(kind, kind), mb) for stage, kind, mb, _ in singles]
        if backward is Kind.BACKWARD_INPUT:
            new[rank] += [Action(s, Kind.BACKWARD_WEIGHT, mb) for s, kind, mb, _ in new[rank] if kind is backward]
    return new


def peak_of(order: Order, n: int) -> int:
    cpu, rank = torch.device("cpu"), dist.get_rank()
    stages = [PipelineStage(Deep(), index, 4, cpu) for index in stage_indices(rank, 2)]
    schedule = ScheduleFromOrder(stages, order, n, mean_square)
    x = torch.randn(n * ROWS, WIDE, dtype=torch.float64)

    def step() -> None:
        schedule.step(*([x] if rank == 0 else []), target=x if rank == 0 else None, return_outputs=False)

    step()
    return peak_bytes(step)


def peaks(n: int) -> list[int]:
    order = dualpipev_order(2, n)
    return [peak_of(reordered(order, kind), n) for kind in (Kind.FULL_BACKWARD, Kind.BACKWARD_INPUT)]


def test_a_step_holds_no_more_than_with_full_backwards_but_for_the_queue_of_w(ranks):
    n = 8
    for at_once, put_off in ranks(2).run(peaks, n):
        assert at_once < put_off <= at_once + (2 * n * WAITING + 0.5) * TENSOR
