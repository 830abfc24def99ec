"""The law *acyclic*: nobody waits, however indirectly, for himself.

Whether a program can deadlock depends on the transport. All of what must come before what is one graph: an action
comes after the one before it on its rank, after its data, and a transfer comes after whatever its *wire* has to do
first. Four wires differ in that last point alone:

==============  ============================================================================================
blocking        the host waits in each send and receive until the other side is there (rendezvous)
one stream      the host posts and goes on; a rank does its transfers strictly one after another
stream a pair   the same, but only among the transfers with one peer
fifo            sends to a peer in order, receives from a peer in order, nothing else; receives are posted early
==============  ============================================================================================

A transfer is one node for both of its sides, so it waits for what either of them has to do first. A cycle is told as
the chain of who waits for whom.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple

from pipelining_dualpipev.errors import ScheduleError
from pipelining_dualpipev.planning.actions import Action, Kind, Order
from pipelining_dualpipev.planning.lowering import peer_rank
from pipelining_dualpipev.planning.placement import Placement

__all__ = ["WIRES", "check_acyclic"]


class _Transfer(NamedTuple):
    """A tensor's way over a boundary, the same for sender and receiver."""

    kind: str  # "F" down, "B" back
    lower_stage: int
    microbatch: int

    def __str__(self) -> str:
        down = f"{self.lower_stage}SEND_F{self.microbatch}"
        return down if self.kind == "F" else f"{self.lower_stage + 1}SEND_B{self.microbatch}"


class _Compute(NamedTuple):
    """One rank's action."""

    rank: int
    action: Action

    def __str__(self) -> str:
        return f"{self.action} on rank {self.rank}"


_Node = _Transfer | _Compute


class _Wire(NamedTuple):
    """What a transfer's side has to wait for: the side's chain, and whether a receive waits for its host to come by."""

    chain: Callable[[Action, int], Hashable]  # (action, peer) -> the chain whose last transfer comes first
    host_waits: bool
    receives_posted_early: bool


WIRES = {
    "blocking": _Wire(lambda action, peer: "rank", host_waits=True, receives_posted_early=False),
    "one stream": _Wire(lambda action, peer: "rank", host_waits=False, receives_posted_early=False),
    "stream a pair": _Wire(lambda action, peer: peer, host_waits=False, receives_posted_early=False),
    "fifo": _Wire(
        lambda action, peer: (peer, action.kind in (Kind.SEND_F, Kind.SEND_B)),
        host_waits=False,
        receives_posted_early=True,
    ),
}
"""The four transports by name."""


def check_acyclic(programs: Order, *, placement: Placement, wires: Iterable[str] = tuple(WIRES)) -> None:
    """Check that lowered programs cannot deadlock, under each of the four wires or those named.

    Raises:
        ScheduleError: naming the wire and the cycle.
    """
    for name in wires:
        if cycle := _find_cycle(_waits_for(programs, placement, WIRES[name])):
            chain = ", which waits for ".join(map(str, [*cycle, cycle[0]]))
            raise ScheduleError(f"law 'acyclic' broken where transfers are '{name}': {chain}")


def _waits_for(programs: Order, placement: Placement, wire: _Wire) -> dict[_Node, list[_Node]]:
    waits: dict[_Node, list[_Node]] = defaultdict(list)
    for rank, program in programs.items():
        computed: _Node | None = None  # the rank's last compute action
        reached: _Node | None = None  # the last thing its host has waited in
        chains: dict[Hashable, _Node] = {}
        for single in (single for action in program for single in action.singles):
            node: _Node
            if not single.kind.is_communication:
                node = _Compute(rank, single)
                waits[node] += [*([reached] if reached else []), *_data(single, placement)]
                computed = reached = node
                continue
            node = _transfer_of(single)
            chain = wire.chain(single, peer_rank(single, placement))
            sends = single.kind in (Kind.SEND_F, Kind.SEND_B)
            before = [chains.get(chain)]
            if wire.host_waits:
                before.append(reached)
            elif sends or not wire.receives_posted_early:
                before.append(computed)
            waits[node] += [other for other in before if other is not None]
            chains[chain] = node
            if wire.host_waits:
                reached = node
    return waits


def _transfer_of(action: Action) -> _Transfer:
    down = action.kind in (Kind.SEND_F, Kind.RECV_F)
    lower_stage = action.stage if action.kind in (Kind.SEND_F, Kind.RECV_B) else action.stage - 1
    return _Transfer("F" if down else "B", lower_stage, action.microbatch)


def _data(action: Action, placement: Placement) -> list[_Node]:
    """What an action needs that another rank sends. What its own rank computes comes earlier in its program anyway."""
    stage = action.stage
    if action.kind is Kind.FORWARD and placement.crosses(stage - 1):
        return [_Transfer("F", stage - 1, action.microbatch)]
    if action.kind in (Kind.FULL_BACKWARD, Kind.BACKWARD_INPUT) and placement.crosses(stage):
        return [_Transfer("B", stage, action.microbatch)]
    return []


def _find_cycle(waits: dict[_Node, list[_Node]]) -> list[_Node]:
    """A cycle of nodes each of which waits for the next, or nothing."""
    blocks: dict[_Node, list[_Node]] = defaultdict(list)
    open_waits = {node: len(before) for node, before in waits.items()}
    for node, before in waits.items():
        for other in before:
            blocks[other].append(node)
            open_waits.setdefault(other, 0)
    free = deque(node for node, count in open_waits.items() if count == 0)
    while free:
        node = free.popleft()
        del open_waits[node]
        for blocked in blocks[node]:
            open_waits[blocked] -= 1
            if open_waits[blocked] == 0:
                free.append(blocked)
    if not open_waits:
        return []
    # Each node left waits for one that is left: follow these until one comes again.
    node = next(iter(open_waits))
    path: list[_Node] = []
    seen: dict[_Node, int] = {}
    while node not in seen:
        seen[node] = len(path)
        path.append(node)
        node = next(other for other in waits[node] if other in open_waits)
    return path[seen[node] :]
