"""All ranks of a pipeline in one process and one thread, in an order that the caller chooses.

On real ranks an interleaving happens or does not; here it is drawn. Each rank's step is a generator that yields where
it waits (`runtime.executor`). The cluster holds all of them, and again and again picks one thing that can happen next:
a rank whose handle is ready goes on, or a transfer that both sides have posted arrives::

    rank 0 ──┐                       ┌── rank 0 goes on
    rank 1 ──┼── what can happen? ───┼── 1SEND → 2RECV arrives     <- the chooser picks one
    rank 2 ──┘                       └── rank 2 goes on

Real modules, real autograd, no ports, and thousands of interleavings a minute. When nothing can happen and some rank
is not done, that is a deadlock, and the cluster says who waits for what.

A message is late for as long as the chooser does not pick its arrival. What can arrive depends on the wires:

``"buffered"``    a message arrives once it is sent, in any order between pairs, in sequence within a direction
``"rendezvous"``  a transfer needs both sides, and those of a pair of ranks happen in their joint sequence
``"streams"``     as before, and each rank does its transfers strictly one after another (one communication stream)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import torch

from pipelining_dualpipev.runtime.executor import Wires
from pipelining_dualpipev.runtime.transport import Handle

__all__ = ["Chooser", "LocalCluster", "first"]

T = TypeVar("T")
Chooser = Callable[[int], int]
"""Given how many things can happen next, the index of the one that does."""


def first(_: int) -> int:
    """The chooser that always lets the first thing happen: lowest rank first, deliveries when no rank can go on."""
    return 0


class _Post:
    """One side of a transfer, posted by a rank; ready once the transfer has happened."""

    def __init__(self, rank: int, peer: int, sends: bool, tensors: Sequence[torch.Tensor]) -> None:
        self.rank, self.peer, self.sends, self.tensors = rank, peer, sends, list(tensors)
        self.ready = False

    def wait(self) -> None:
        assert self.ready, "the cluster resumes a rank when what it waits for is ready"

    def __str__(self) -> str:
        return f"a tensor from rank {self.peer}"


class _AllSent:
    """Ready once everything that a rank has sent has left."""

    def __init__(self, posts: Sequence[_Post]) -> None:
        self._posts = posts

    @property
    def ready(self) -> bool:
        return all(post.ready for post in self._posts)

    def wait(self) -> None:
        assert self.ready, "the cluster resumes a rank when what it waits for is ready"

    def __str__(self) -> str:
        return f"ranks {sorted({post.peer for post in self._posts if not post.ready})} to take what was sent"


class _Transport:
    """`Transport` of one rank of the cluster."""

    def __init__(self, rank: int, network: _Network) -> None:
        self.rank, self.num_ranks, self._network = rank, network.num_ranks, network

    def send(self, peer: int, tensors: Sequence[torch.Tensor]) -> None:
        # What is on the wire must not change when the sender goes on writing.
        self._network.post(_Post(self.rank, peer, True, [tensor.detach().clone() for tensor in tensors]))

    def receive(self, peer: int, buffers: Sequence[torch.Tensor]) -> Handle:
        return self._network.post(_Post(self.rank, peer, False, buffers))

    def finish(self) -> Handle:
        return _AllSent([post for post in self._network.posted[self.rank] if post.sends])


class _Network:
    """What is posted and has not arrived."""

    def __init__(self, num_ranks: int, kind: str) -> None:
        if kind not in ("buffered", "rendezvous", "streams"):
            raise ValueError(f"transport {kind!r} is not one of 'buffered', 'rendezvous', 'streams'")
        self.num_ranks, self._kind = num_ranks, kind
        self.posted: dict[int, list[_Post]] = {rank: [] for rank in range(num_ranks)}

    def post(self, post: _Post) -> _Post:
        self.posted[post.rank].append(post)
        return post

    def can_arrive(self) -> list[tuple[_Post, _Post]]:
        """The (send, receive) pairs that may happen now."""
        heads: dict[tuple[int, int, bool], _Post] = {}
        blocked: dict[int, _Post] = {}
        first_of_pair: dict[tuple[int, int], _Post] = {}
        for rank, posts in self.posted.items():
            self.posted[rank] = posts = [post for post in posts if not post.ready]
            for post in posts:
                blocked.setdefault(rank, post)
                first_of_pair.setdefault((rank, post.peer), post)
                heads.setdefault((rank, post.peer, post.sends), post)
        found = []
        for (rank, peer, sends), send in heads.items():
            receive = heads.get((peer, rank, False))
            if not sends or receive is None:
                continue
            both = (send, receive)
            if self._kind != "buffered" and any(first_of_pair[p.rank, p.peer] is not p for p in both):
                continue
            if self._kind == "streams" and any(blocked[p.rank] is not p for p in both):
                continue
            found.append(both)
        return found

    @staticmethod
    def arrive(send: _Post, receive: _Post) -> None:
        told = (
            f"rank {send.rank} sent {_listed(send.tensors)}, rank {receive.rank} waited for {_listed(receive.tensors)}"
        )
        assert [(t.shape, t.dtype) for t in send.tensors] == [(t.shape, t.dtype) for t in receive.tensors], told
        for buffer, tensor in zip(receive.tensors, send.tensors, strict=True):
            buffer.copy_(tensor)
        send.ready = receive.ready = True
        send.tensors = []


def _listed(tensors: Sequence[torch.Tensor]) -> str:
    return f"{[(list(tensor.shape), tensor.dtype) for tensor in tensors]}"


class _Reply:
    """An answer that is ready once everybody it needs has spoken."""

    def __init__(self, what: str) -> None:
        self._what = what
        self.ready = False
        self.result: Any = None

    def give(self, result: Any) -> None:
        self.ready, self.result = True, result

    def wait(self) -> None:
        assert self.ready, "the cluster resumes a rank when what it waits for is ready"

    def __str__(self) -> str:
        return self._what


class _Switchboard:
    """Carries words between the ranks, at once and in sequence."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.messages: dict[tuple[int, int], list[Any]] = defaultdict(list)
        self.listening: dict[tuple[int, int], list[_Reply]] = defaultdict(list)
        self.meetings: list[dict[int, tuple[str, Any, _Reply]]] = []
        self.attended: dict[int, int] = defaultdict(int)

    def meet(self, rank: int, kind: str, value: Any, combine: Callable[[list[Any]], Any]) -> _Reply:
        """The rank's next collective."""
        number = self.attended[rank]
        self.attended[rank] += 1
        if number == len(self.meetings):
            self.meetings.append({})
        meeting = self.meetings[number]
        reply = _Reply(f"the other ranks to join {kind} number {number}")
        meeting[rank] = (kind, value, reply)
        assert len({kind for kind, _, _ in meeting.values()}) == 1, f"collective {number} differs: {meeting}"
        if len(meeting) == self.num_ranks:
            result = combine([meeting[r][1] for r in range(self.num_ranks)])
            for _, _, waiting in meeting.values():
                waiting.give(result)
        return reply

    def connect(self, sender: int, receiver: int) -> None:
        messages, listening = self.messages[sender, receiver], self.listening[sender, receiver]
        while messages and listening:
            listening.pop(0).give(messages.pop(0))


class _Control:
    """`Control` of one rank of the cluster."""

    def __init__(self, rank: int, switchboard: _Switchboard) -> None:
        self.rank, self.num_ranks, self._switchboard = rank, switchboard.num_ranks, switchboard

    def all_max(self, values: list[int]) -> _Reply:
        return self._switchboard.meet(
            self.rank, "all_max", values, lambda all_: [max(c) for c in zip(*all_, strict=True)]
        )

    def all_sum(self, values: list[float]) -> _Reply:
        return self._switchboard.meet(
            self.rank, "all_sum", values, lambda all_: [sum(c) for c in zip(*all_, strict=True)]
        )

    def gather(self, thing: object) -> _Reply:
        return self._switchboard.meet(self.rank, "gather", thing, list)

    def send(self, peer: int, thing: object) -> None:
        self._switchboard.messages[self.rank, peer].append(thing)
        self._switchboard.connect(self.rank, peer)

    def receive(self, peer: int) -> _Reply:
        reply = _Reply(f"a word from rank {peer}")
        self._switchboard.listening[peer, self.rank].append(reply)
        self._switchboard.connect(peer, self.rank)
        return reply

    def finish(self) -> Handle:
        reply = _Reply("words to leave")
        reply.give(None)
        return reply


class LocalCluster:
    """Wires for ``num_ranks`` ranks in this process, and the loop that runs them.

    Args:
        num_ranks: ranks in the pipeline.
        chooser: picks what happens next; with hypothesis, ``lambda n: data.draw(st.integers(0, n - 1))``.
        transport: how the wires behave, see the module.
    """

    def __init__(self, num_ranks: int, chooser: Chooser = first, *, transport: str = "buffered") -> None:
        self._chooser = chooser
        self._network = _Network(num_ranks, transport)
        switchboard = _Switchboard(num_ranks)
        self.wires = [Wires(_Transport(r, self._network), _Control(r, switchboard)) for r in range(num_ranks)]

    def run(self, steps: Sequence[Generator[Handle, None, T]]) -> list[T | Exception]:
        """Run one generator a rank to its end; what each returned, or the exception it raised, by rank.

        Raises:
            AssertionError: if ranks are left that can never go on, saying what each waits for.
        """
        results: dict[int, T | Exception] = {}
        waiting: dict[int, Any] = {}

        def resume(rank: int) -> None:
            waiting.pop(rank, None)
            try:
                waiting[rank] = next(steps[rank])
            except StopIteration as end:
                results[rank] = end.value
            except Exception as error:
                results[rank] = error

        for rank in range(len(steps)):
            waiting[rank] = None  # nothing: it may start
        while waiting:
            ranks = [rank for rank, handle in sorted(waiting.items()) if handle is None or handle.ready]
            arrivals = self._network.can_arrive()
            if not ranks and not arrivals:
                stuck = "; ".join(f"rank {rank} waits for {handle}" for rank, handle in sorted(waiting.items()))
                raise AssertionError(f"deadlock: {stuck}")
            choice = self._chooser(len(ranks) + len(arrivals))
            if choice < len(ranks):
                handle = waiting[ranks[choice]]
                if handle is not None:
                    handle.wait()
                resume(ranks[choice])
            else:
                self._network.arrive(*arrivals[choice - len(ranks)])
        return [results[rank] for rank in range(len(steps))]
