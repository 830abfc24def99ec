"""From compute actions to programs: where each rank sends and receives.

An order says what each rank computes. What it does not say is in which order the tensors travel, and that decides
whether a real run can deadlock, and how long transfers wait behind each other. Placing each receive on its own, where
it is convenient for its rank, is how two ranks come to disagree about whose message is next.

So there is one order of transfers for the whole pipeline:

1. the schedule is simulated, with unit costs unless better ones are known;
2. every transfer is sorted by the time it is produced, ties by position and rank;
3. each rank gets its part of that one list: a send right after the action that produces it, a receive as early as the
   list allows, that is right after the rank's previous transfer.

::

    rank 0:  0F0 0SEND_F0 0F1 0SEND_F1 ...   3RECV_F0 3F0 ...
    rank 1:  1RECV_F0 1F0 2F0 1RECV_F1 2SEND_F0 ...

All ranks' lists are then parts of one sequence, so it cannot deadlock, even when each send blocks until it is
received: the earliest transfer not yet done has both sides free to do it.

A pair ``(0F7;7B3)OVERLAP_F_B`` becomes ``(0F7;0SEND_F7;7B3)OVERLAP_F_B``: its forward's output leaves before its
backward begins.
"""

from __future__ import annotations

from typing import NamedTuple

from pipelining_dualpipev.planning.actions import Action, Kind, Order
from pipelining_dualpipev.planning.costs import CostModel
from pipelining_dualpipev.planning.placement import Placement
from pipelining_dualpipev.planning.simulate import simulate

__all__ = ["lower", "peer_rank"]


class _Transfer(NamedTuple):
    """Sorted as written: by time produced, then by the producer's position, then by rank."""

    time: float
    position: int
    sender: int
    receiver: int
    send: Action
    receive: Action


def _transfer(action: Action, time: float, position: int, placement: Placement) -> _Transfer | None:
    """What this compute action hands to another rank, if anything."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind is Kind.FORWARD and placement.crosses(stage):
        target, send, receive = stage + 1, Kind.SEND_F, Kind.RECV_F
    elif action.kind in (Kind.FULL_BACKWARD, Kind.BACKWARD_INPUT) and placement.crosses(stage - 1):
        target, send, receive = stage - 1, Kind.SEND_B, Kind.RECV_B
    else:
        return None
    return _Transfer(
        round(time, 9),  # so that equal times stay equal when they were summed in different orders
        position,
        placement.rank_of[stage],
        placement.rank_of[target],
        Action(stage, send, microbatch),
        Action(target, receive, microbatch),
    )


def lower(order: Order, *, placement: Placement, costs: CostModel | None = None) -> Order:
    """Give every rank its sends and receives, in one global order of transfers.

    Args:
        order: rank to compute actions.
        placement: which rank holds which stage; nothing is sent between stages of one rank.
        costs: by which to simulate; by default F = I = W = 1.

    Returns:
        Rank to program: the order's actions with ``SEND_F``, ``RECV_F``, ``SEND_B``, ``RECV_B`` between them.

    Raises:
        ScheduleError: if the order itself cannot run, whatever the transport.
    """
    timeline = simulate(order, costs, placement=placement)
    transfers = [
        transfer
        for spans in timeline.spans.values()
        for position, span in enumerate(spans)
        for single in span.action.singles
        if (
            transfer := _transfer(
                single, span.forward_end if single.kind is Kind.FORWARD else span.end, position, placement
            )
        )
    ]
    transfers.sort()

    # gaps[rank][i]: what stands before the rank's i-th compute action; a pair keeps its forward's send inside.
    gaps: dict[int, list[list[Action]]] = {rank: [[] for _ in range(len(order[rank]) + 1)] for rank in order}
    inside: dict[int, dict[int, Action]] = {rank: {} for rank in order}
    reached = dict.fromkeys(order, 0)
    for transfer in transfers:
        producer = order[transfer.sender][transfer.position]
        if producer.parts and transfer.send.kind is Kind.SEND_F:
            inside[transfer.sender][transfer.position] = transfer.send
        else:
            gaps[transfer.sender][transfer.position + 1].append(transfer.send)
        reached[transfer.sender] = transfer.position + 1
        gaps[transfer.receiver][reached[transfer.receiver]].append(transfer.receive)

    programs: Order = {}
    for rank, actions in order.items():
        program: list[Action] = []
        for position, action in enumerate(actions):
            program += gaps[rank][position]
            if send := inside[rank].get(position):
                forward, backward = action.parts
                action = Action.pair(forward, send, backward)
            program.append(action)
        programs[rank] = program + gaps[rank][len(actions)]
    return programs


def peer_rank(action: Action, placement: Placement) -> int:
    """The rank at the other end of a send or receive."""
    step = 1 if action.kind in (Kind.SEND_F, Kind.RECV_B) else -1
    return placement.rank_of[action.stage + step]
