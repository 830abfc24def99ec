"""What each rank computes, and in which order.

An *action* is written as torch writes it: ``0F3`` is the forward of microbatch 3 on stage 0, ``7I0`` and ``7W0`` the
input and the weight gradient of microbatch 0 on stage 7, ``7B3`` both at once, ``(0F7;7B3)OVERLAP_F_B`` a forward and a
backward that may run overlapped.

`dualpipev_order` gives every rank's list in one closed form. On rank r of P, with its early stage "0" and its late
stage "1", it is the eight steps of the reference::

    step 1   F0            2(P-r-1) times    fill the ranks below
    step 2   F0 F1         r+1               both directions are in flight
    step 3   I1 W1 F1      P-r-1             the first backwards come up; weight gradients fill the gaps
    step 4   F0&B1 F1&B0   n-2P+r+1          steady state: every forward is paired with a backward
    step 5   B1 F1&B0      P-r-1             no forwards are left for stage 0
    step 6   B1 B0         r+1               no forwards are left at all; the last P backwards of the rank are split
    step 7   W I0          P-r-1             put-off weight gradients fill the gaps of the way out
    step 8   W             r+1               and the rest

Steps 4 to 6 are one loop, ``F0&B1 F1&B0`` with whatever forwards are left. Written like that, the list needs no
n >= 2P: with fewer microbatches each step simply runs dry sooner.

Source: https://github.com/deepseek-ai/DualPipe (dualpipev.py), steps 1-8 of ``DualPipeV.step``.
"""

from __future__ import annotations

import re
from collections import deque
from enum import Enum
from typing import NamedTuple

from pipelining_dualpipev.planning.placement import stage_indices

__all__ = ["Action", "Kind", "Order", "dualpipev_order"]


class Kind(str, Enum):
    """What an action does; the values are torch's."""

    FORWARD = "F"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    FULL_BACKWARD = "B"
    OVERLAP_F_B = "OVERLAP_F_B"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"

    # Enum's own hash is a Python function, and kinds are hashed for every action of every schedule.
    __hash__ = str.__hash__

    @property
    def is_communication(self) -> bool:
        """Whether the action moves tensors between ranks."""
        return self in _COMMUNICATION


_COMMUNICATION = frozenset({Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B})
_SINGLE = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|F|I|W|B)(\d+)")
_PAIR = re.compile(r"\((.*)\)OVERLAP_F_B")


class Action(NamedTuple):
    """One step of a rank: ``kind`` on (``stage``, ``microbatch``), or a pair that holds its ``parts``.

    A pair has stage and microbatch -1. A send or receive names the stage of its own side: ``1SEND_F4`` sends stage 1's
    output of microbatch 4 to stage 2, which does ``2RECV_F4``; ``2SEND_B4`` sends the gradient back, ``1RECV_B4``.
    """

    stage: int
    kind: Kind
    microbatch: int
    parts: tuple[Action, ...] = ()

    @classmethod
    def pair(cls, *parts: Action) -> Action:
        """A forward (and its send) with the full backward of another microbatch or stage."""
        return cls(-1, Kind.OVERLAP_F_B, -1, parts)

    @classmethod
    def parse(cls, text: str) -> Action:
        """The inverse of ``str``.

        Raises:
            ValueError: if the text is not an action.
        """
        text = text.strip()
        if match := _PAIR.fullmatch(text):
            return cls.pair(*(cls.parse(part) for part in match.group(1).split(";")))
        if match := _SINGLE.fullmatch(text):
            stage, kind, microbatch = match.groups()
            return cls(int(stage), Kind(kind), int(microbatch))
        raise ValueError(f"{text!r} is not an action: write stage, kind, microbatch like 0F3, or (0F7;7B3)OVERLAP_F_B")

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.kind.value}"
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    def __repr__(self) -> str:
        return str(self)

    @property
    def singles(self) -> tuple[Action, ...]:
        """The action's parts, or the action itself where it is no pair."""
        return self.parts or (self,)


Order = dict[int, list[Action]]
"""Rank to the actions it runs, in order: compute actions only (an order), or sends and receives too (programs)."""


class _RankList:
    """One rank's list while it is written: counts what each leg has done and holds the weight gradients put off."""

    def __init__(self, stages: tuple[int, int], n_microbatches: int, *, early: int, unsplit: int, zb: int) -> None:
        self.stages = stages
        self.n = n_microbatches
        self.early = early  # how many backwards at the start are split
        self.unsplit = unsplit  # from which backward on they are split again, until the end
        self.zb = zb  # only the last that many of these are
        self.actions: list[Action] = []
        self.forwards = [0, 0]
        self.backwards = [0, 0]
        self.put_off: deque[Action] = deque()

    def has_forward(self, leg: int) -> bool:
        return self.forwards[leg] < self.n

    @property
    def splits(self) -> bool:
        """Whether the rank's next backward is split."""
        done = sum(self.backwards)
        if self.early <= done < self.unsplit:
            return False
        to_come = 2 * self.n - max(done, self.unsplit) + max(0, min(self.early, self.unsplit) - done)
        return to_come <= self.zb

    def _next_forward(self, leg: int) -> Action:
        self.forwards[leg] += 1
        return Action(self.stages[leg], Kind.FORWARD, self.forwards[leg] - 1)

    def _next_backward(self, leg: int, split: bool) -> Action:
        stage, microbatch = self.stages[leg], self.backwards[leg]
        self.backwards[leg] += 1
        if not split:
            return Action(stage, Kind.FULL_BACKWARD, microbatch)
        self.put_off.append(Action(stage, Kind.BACKWARD_WEIGHT, microbatch))
        return Action(stage, Kind.BACKWARD_INPUT, microbatch)

    def forward(self, leg: int) -> bool:
        """Append the leg's next forward; False where it has none left."""
        if not self.has_forward(leg):
            return False
        self.actions.append(self._next_forward(leg))
        return True

    def backward(self, leg: int) -> None:
        self.actions.append(self._next_backward(leg, self.splits))

    def pair(self, forward_leg: int, backward_leg: int) -> None:
        self.actions.append(Action.pair(self._next_forward(forward_leg), self._next_backward(backward_leg, False)))

    def weights(self, times: int) -> None:
        for _ in range(min(times, len(self.put_off))):
            self.actions.append(self.put_off.popleft())


def _rank_order(rank: int, num_ranks: int, n: int, zb: int) -> list[Action]:
    to_fold = num_ranks - 1 - rank
    early_backwards = min(to_fold, n)  # those of step 3, and as many again on the way out in step 7
    unsplit = 2 * n - min(2 * n, num_ranks)
    todo = _RankList(stage_indices(rank, num_ranks), n, early=early_backwards, unsplit=unsplit, zb=zb)
    # With so few microbatches stage 1 runs out of forwards during step 3. Its weight gradients are worth more in the
    # gaps that follow than between the input gradients that the ranks above wait for.
    short = 3 * n <= 2 * num_ranks

    for _ in range(2 * to_fold):  # step 1
        todo.forward(0)
    for _ in range(min(n, rank + 1)):  # step 2
        todo.forward(0)
        todo.forward(1)
    for _ in range(early_backwards):  # step 3
        todo.backward(1)
        if short:
            if not todo.forward(1):
                todo.weights(1)
        else:
            todo.weights(1)
            todo.forward(1)
    if short:
        todo.weights(max(0, 2 * (to_fold - n + 1)))
    for i in range(n - early_backwards):  # steps 4, 5 and 6
        for forward_leg, backward_leg in ((0, 1), (1, 0)):
            # The rank of the fold has nothing to overlap its very first backward with: pairing it would only hold the
            # gradient back.
            first_at_fold = i == 0 and forward_leg == 0 and to_fold == 0
            if todo.has_forward(forward_leg) and not todo.splits and not first_at_fold:
                todo.pair(forward_leg, backward_leg)
            else:
                todo.forward(forward_leg)
                todo.backward(backward_leg)
    for _ in range(early_backwards):  # step 7
        todo.weights(1)
        todo.backward(0)
    todo.weights(len(todo.put_off))  # step 8
    return todo.actions


def dualpipev_order(num_ranks: int, n_microbatches: int, *, forward_only: bool = False, zb: int | None = None) -> Order:
    """The compute actions of every rank under DualPipeV, for any number of ranks and microbatches.

    For ``n_microbatches >= 2 * num_ranks`` it is the reference's list, action for action. A rank never holds more than
    ``min(2 * n_microbatches, 2 * num_ranks + 1)`` microbatches' activations.

    Args:
        num_ranks: ranks in the pipeline, P; the model has 2P stages.
        n_microbatches: microbatches in a step, n.
        forward_only: leave the backwards out (evaluation); the forwards keep their order.
        zb: the most backwards that a rank splits into an input and a weight gradient, 0 for none. Of those that it
            would split the last ones are, since what they put off fills the gaps at the end. By default as many as
            the schedule has use for: at most 2P-1.

    Returns:
        Rank to its list of actions.

    Raises:
        ValueError: if either number is below 1, or ``zb`` below 0.
    """
    if zb is not None and zb < 0:
        raise ValueError(f"zb is {zb}: give the most backwards that a rank may split, 0 or more, or None for no bound")
    if n_microbatches < 1:
        raise ValueError(f"n_microbatches is {n_microbatches}: a step has at least 1 microbatch")
    stage_indices(0, num_ranks)
    most = 2 * n_microbatches if zb is None else zb
    order = {rank: _rank_order(rank, num_ranks, n_microbatches, most) for rank in range(num_ranks)}
    return forwards_of(order) if forward_only else order


def forwards_of(order: Order) -> Order:
    """The order with everything but its forwards left out."""
    return {
        rank: [single for action in actions for single in action.singles if single.kind is Kind.FORWARD]
        for rank, actions in order.items()
    }
