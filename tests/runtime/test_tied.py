"""Gradients of parameters that several ranks hold, summed along these ranks and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from pipelining_dualpipev.planning import Placement
from pipelining_dualpipev.runtime.executor import Wires
from pipelining_dualpipev.runtime.tied import TiedGradients
from pipelining_dualpipev.runtime.transport import ContactLostError
from pipelining_dualpipev.testing import LocalCluster

TYPES = (torch.float32, torch.float64)


class Holder(nn.Module):
    """Stage ``rank`` of three ranks, which all hold two parameters, of different types."""

    def __init__(self) -> None:
        super().__init__()
        self.held = nn.ParameterDict({str(dtype)[6:]: nn.Parameter(torch.zeros(3, dtype=dtype)) for dtype in TYPES})
        self.tied_parameters = dict(self.held.items())
        self.tied_stages = dict.fromkeys(self.tied_parameters, (0, 1, 2))

    def accumulate(self, value: float) -> None:
        for parameter in self.held.values():
            gradient = torch.full_like(parameter, value)
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


class Cut:
    """A transport whose connection to one peer is lost."""

    def __init__(self, right: Any, lost: int) -> None:
        self.rank, self.num_ranks, self._right, self._lost = right.rank, right.num_ranks, right, lost

    def send(self, peer: int, tensors: Sequence[torch.Tensor]) -> None:
        if peer == self._lost:
            raise ContactLostError(peer, RuntimeError("connection closed"))
        self._right.send(peer, tensors)

    def receive(self, peer: int, buffers: Sequence[torch.Tensor]) -> Any:
        if peer == self._lost:
            raise ContactLostError(peer, RuntimeError("connection closed"))
        return self._right.receive(peer, buffers)


def make(wires: Sequence[Wires]) -> tuple[list[Holder], list[TiedGradients]]:
    holders = [Holder() for _ in wires]
    placement = Placement.v(len(wires))
    return holders, [
        TiedGradients([holder], placement, wire.transport, wire.control)
        for holder, wire in zip(holders, wires, strict=True)
    ]


def told(holders: Sequence[Holder]) -> list[float]:
    return [parameter.grad.unique().item() for holder in holders for parameter in holder.held.values()]


def test_what_has_been_summed_is_not_summed_again():
    cluster = LocalCluster(3)
    holders, tied = make(cluster.wires)
    for total in (6.0, 12.0):
        for value, holder, of_rank in zip((1.0, 2.0, 3.0), holders, tied, strict=True):
            of_rank.begin_step()
            holder.accumulate(value)
        assert cluster.run([of_rank.end_step(failed=False) for of_rank in tied]) == [None] * 3
        assert told(holders) == [total] * 6


def test_after_a_step_that_another_rank_has_failed_in_nothing_counts_as_summed():
    """Else the next step would begin by dropping what later ranks have of it."""
    cluster = LocalCluster(3)
    holders, tied = make(cluster.wires)
    for holder in holders:
        holder.accumulate(1.0)
    cluster.run([of_rank.end_step(failed=rank == 0) for rank, of_rank in enumerate(tied)])
    for of_rank in tied:
        of_rank.begin_step()
    assert told(holders) == [1.0] * 6


def test_a_rank_that_ends_in_the_middle_of_the_sum_leaves_nobody_waiting():
    """Rank 1 has lost rank 2. Rank 0 waits for rank 1 only, and is owed an answer for each type of gradients."""
    cluster = LocalCluster(3)
    wires = list(cluster.wires)
    wires[1] = Wires(Cut(wires[1].transport, lost=2), wires[1].control)
    holders, tied = make(wires)
    tied[2]._sum = lambda *_: iter(())  # type: ignore[method-assign,assignment]  # it has ended by then
    for holder in holders:
        holder.accumulate(1.0)
    first, second, _ = cluster.run([of_rank.end_step(failed=False) for of_rank in tied])
    assert first is None
    assert isinstance(second, ContactLostError)
    tied[1].begin_step()
    assert told(holders[1:2]) == [1.0] * 2
