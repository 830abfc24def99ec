"""Moving tensors between ranks.

The executor never waits by itself. It posts a transfer, gets a `Handle`, and yields that handle where it needs the
result; whoever drives it waits::

    executor  --receive-->  transport  --irecv-->  wire
       |                        |
       +<------ Handle ---------+
       |
       +--yield Handle--> driver: handle.wait()

A send needs no handle, but its tensor must live until it has left. gloo does not say when without blocking
(``is_completed()`` stays False until ``wait()``), and waiting at once would stall the rank until its peer is there.
What we know for free is the order: both sides of a pair post their common transfers in one joint sequence, so once
something that came *after* a send in that sequence has arrived, the peer has taken the send, and waiting for it costs
nothing. That is when it is dropped, and at the end of the step the rest.

On CUDA ``wait()`` makes the current stream wait, not the host. Work that produced a tensor and the send that takes it
are ordered by the stream they were posted on.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

__all__ = ["ContactLostError", "DistributedTransport", "Handle", "Transport", "contact", "drive"]

T = TypeVar("T")


class ContactLostError(Exception):
    """What was on its way between this rank and ``peer`` will not arrive; the executor knows what to do."""

    def __init__(self, peer: int, error: Exception) -> None:
        super().__init__(f"lost contact with rank {peer}: {error}")
        self.peer = peer


@contextmanager
def contact(peer: int) -> Iterator[None]:
    """Around what is posted to a peer, or waited for: its errors are those of the connection."""
    try:
        yield
    except RuntimeError as error:
        raise ContactLostError(peer, error) from error


class Handle(Protocol):
    """Something the executor has asked for and not yet got."""

    def wait(self) -> None:
        """Return once it is there. May be called again."""


def drive(steps: Generator[Handle, None, T]) -> T:
    """Run a generator to its end, waiting for each handle that it yields; return what it returns."""
    try:
        handle = next(steps)
        while True:
            try:
                handle.wait()
            except Exception as error:  # of a connection: who yielded the handle is to say what follows
                handle = steps.throw(error)
            else:
                handle = next(steps)
    except StopIteration as end:
        return end.value


class Transport(Protocol):
    """Wires from one rank of a pipeline to the others."""

    rank: int
    num_ranks: int

    def send(self, peer: int, tensors: Sequence[torch.Tensor]) -> None:
        """Post the sending of these tensors; they are kept alive until they have left."""

    def receive(self, peer: int, buffers: Sequence[torch.Tensor]) -> Handle:
        """Post the receiving into these buffers, in the order in which the peer sends."""

    def finish(self) -> Handle:
        """Everything that was sent has left."""


class _Arrival:
    """The receives of one transfer."""

    __slots__ = ("_peer", "_position", "_transport", "_works")

    def __init__(self, transport: DistributedTransport, peer: int, position: int, works: list[dist.Work]) -> None:
        self._transport, self._peer, self._position, self._works = transport, peer, position, works

    def wait(self) -> None:
        works, self._works = self._works, []
        if not works:  # nothing has come, so nothing is known of the peer
            return
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise ContactLostError(self._peer, error) from error
        self._transport._taken_before(self._peer, self._position)


class _AllSent:
    """Every send posted so far."""

    __slots__ = ("_transport",)

    def __init__(self, transport: DistributedTransport) -> None:
        self._transport = transport

    def wait(self) -> None:
        for peer, position in self._transport._positions.items():
            self._transport._taken_before(peer, position)


class DistributedTransport:
    """`Transport` over a process group of torch.distributed; ranks are those of the group."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        world = dist.group.WORLD
        assert world is not None, "torch.distributed is initialised"
        self._group = group or world
        self.rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)
        # Per peer: the place of the next transfer in the joint sequence, and the sends not yet known to have left.
        self._positions: Counter[int] = Counter()
        self._leaving: dict[int, deque[tuple[int, list[dist.Work], Sequence[torch.Tensor]]]] = defaultdict(deque)

    def send(self, peer: int, tensors: Sequence[torch.Tensor]) -> None:
        """See `Transport.send`."""
        works = self._post(dist.isend, peer, tensors)
        self._leaving[peer].append((self._next_position(peer), works, tensors))

    def receive(self, peer: int, buffers: Sequence[torch.Tensor]) -> Handle:
        """See `Transport.receive`."""
        works = self._post(dist.irecv, peer, buffers)
        return _Arrival(self, peer, self._next_position(peer), works)

    def finish(self) -> Handle:
        """See `Transport.finish`."""
        return _AllSent(self)

    def _post(self, operation: Callable[..., Any], peer: int, tensors: Sequence[torch.Tensor]) -> list[dist.Work]:
        tensors = [tensor for tensor in tensors if tensor.numel()]  # of the others both sides know all there is
        try:
            if len(tensors) == 1:
                # What dist.isend and dist.irecv do in the end, without looking up the group each time.
                post = self._group.send if operation is dist.isend else self._group.recv
                return [post([tensors[0]], peer, 0)]
            ops = [dist.P2POp(operation, tensor, group=self._group, group_peer=peer) for tensor in tensors]
            return dist.batch_isend_irecv(ops) if ops else []
        except RuntimeError as error:
            raise ContactLostError(peer, error) from error

    def _next_position(self, peer: int) -> int:
        self._positions[peer] += 1
        return self._positions[peer] - 1

    def _taken_before(self, peer: int, position: int) -> None:
        leaving = self._leaving[peer]
        while leaving and leaving[0][0] < position:
            _, works, _ = leaving.popleft()
            with contact(peer):
                for work in works:
                    work.wait()
