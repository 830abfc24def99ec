"""What ranks tell each other beside tensors.

Before a step computes anything its ranks agree, by the maxima of five integers over all ranks::

    [digest, -digest, given, -given, flag]  --MAX-->  digest equal on all ranks  <=>  max(digest) == -max(-digest)

*digest* stands for what must be the same everywhere (train or eval, say), *given* for what must be the same on those
ranks that have it (keyword inputs); the others put in the least there is, twice, which no maximum notices. *flag* is
0 where all is as in the step before, 1 where something may have changed (a new shape), 2 where this rank cannot run the
step at all. Only when it does not come out even are words exchanged, and then every rank raises the same.

Small objects also travel ahead of tensors (their shapes, when these are new). All of it goes over a gloo group of our
own, so nothing here waits for a device.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Generator
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist

from pipelining_dualpipev._torch import gloo_group_beside
from pipelining_dualpipev.errors import RanksDisagreeError
from pipelining_dualpipev.runtime.lending import lend
from pipelining_dualpipev.runtime.transport import Handle, contact
from pipelining_dualpipev.runtime.watch import Watch

__all__ = ["Control", "DistributedControl", "Reply", "agree", "digest_of"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_LARGE = 2**62  # more than any digest
_SAME, _CHANGED, _UNABLE = 0, 1, 2


class Reply(Handle, Protocol[T_co]):
    """A handle that holds an answer once it has been waited for."""

    @property
    def result(self) -> T_co:
        """The answer."""


class Control(Protocol):
    """Small messages between the ranks of one pipeline. Each collective must be called by every rank, in one order."""

    rank: int
    num_ranks: int

    def all_max(self, values: list[int]) -> Reply[list[int]]:
        """The elementwise maximum over all ranks."""

    def all_sum(self, values: list[float]) -> Reply[list[float]]:
        """The elementwise sum over all ranks."""

    def gather(self, thing: object) -> Reply[list[Any]]:
        """Every rank's (picklable) object, by rank, on every rank."""

    def send(self, peer: int, thing: object) -> None:
        """Post an object to a peer."""

    def receive(self, peer: int) -> Reply[Any]:
        """The next object from a peer; to be waited for before the one after it is asked for."""

    def finish(self) -> Handle:
        """Every object that was sent has left."""


def digest_of(*things: object) -> int:
    """A number that is the same on every rank where the things have the same ``repr``."""
    return int.from_bytes(hashlib.blake2b(repr(things).encode(), digest_size=7).digest(), "big")


def agree(
    control: Control,
    facts: dict[str, object],
    given: dict[str, object] | None = None,
    *,
    changed: bool,
    error: Exception | None = None,
) -> Generator[Handle, None, bool]:
    """Yield until all ranks have come; then return whether anything changed on any of them.

    Args:
        control: this rank's line to the others.
        facts: what must be the same on all ranks, by the name it is reported under.
        given: what must be the same on all ranks that have any, in the same form.
        changed: whether something this rank knows of differs from the step before.
        error: why this rank cannot run the step. It is raised here as it is, and told to all other ranks.

    Raises:
        RanksDisagreeError: on every rank, if the facts differ or another rank has an error.
    """
    digest, digest_given = digest_of(facts), digest_of(given)
    all_given = [digest_given, -digest_given] if given else [-_LARGE, -_LARGE]
    reply = control.all_max([digest, -digest, *all_given, _UNABLE if error else int(changed)])
    yield reply
    highest, minus_lowest, highest_given, minus_lowest_given, flag = reply.result
    nobody_has = highest_given == -_LARGE
    if flag != _UNABLE and highest == -minus_lowest and (nobody_has or highest_given == -minus_lowest_given):
        return flag == _CHANGED
    words = control.gather((facts, given, str(error) if error else None))
    yield words
    if error:
        raise error
    raise RanksDisagreeError(_disagreement(words.result))


def _disagreement(words: list[tuple[dict[str, object], dict[str, object] | None, str | None]]) -> str:
    errors = [f"rank {rank}: {error}" for rank, (_, _, error) in enumerate(words) if error]
    if errors:
        return "; ".join(errors)
    lines = []
    for all_facts in (
        {rank: facts for rank, (facts, _, _) in enumerate(words)},
        {rank: given for rank, (_, given, _) in enumerate(words) if given},
    ):
        names = dict.fromkeys(name for facts in all_facts.values() for name in facts)
        for name in names:
            values = {rank: facts.get(name) for rank, facts in all_facts.items()}
            if len(set(map(repr, values.values()))) > 1:
                lines.append(f"{name}: {', '.join(f'rank {rank} has {value}' for rank, value in values.items())}")
    return f"the ranks of this pipeline do not agree. {'; '.join(lines)}. Give the same on every rank"


class _Reduced(Generic[T]):
    """Everyone's numbers to rank 0, and what they come to back from it.

    That is 1 + log2(P) messages one after the other; gloo's all-reduce goes around a ring, which takes 2P - 2.
    """

    def __init__(self, watch: Watch, group: Any, values: torch.Tensor, combine: Callable[..., torch.Tensor]) -> None:
        self._watch, self._group, self._values, self._combine = watch, group, values, combine
        self._parts = [torch.empty_like(values) for _ in range(group.size())] if group.rank() == 0 else []
        options = dist.GatherOptions()
        options.rootRank = 0
        parts = [[lend(part) for part in self._parts]] if self._parts else []
        self._gathering: dist.Work | None = group.gather(parts, [lend(values)], options)

    def wait(self) -> None:
        if self._gathering is not None:
            self._watch.wait(self._there_and_back)
        self._gathering = None

    def _there_and_back(self) -> None:
        assert self._gathering is not None, "waited for once"
        self._gathering.wait()
        if self._parts:
            self._values = self._combine(torch.stack(self._parts), dim=0)
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._group.broadcast([lend(self._values)], options).wait()

    @property
    def result(self) -> list[T]:
        return self._values.tolist()


class _Gathered:
    """Two rounds: how long everybody's pickle is, then the pickles, padded to the longest."""

    def __init__(self, watch: Watch, group: Any, thing: object) -> None:
        self._watch, self._group = watch, group
        self._mine = _to_bytes(thing)
        self._sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
        length = torch.tensor([len(self._mine)])
        self._work: dist.Work | None = group.allgather([[lend(size) for size in self._sizes]], [lend(length)])
        self._things: list[Any] | None = None

    def wait(self) -> None:
        if self._things is None:
            self._watch.wait(self._both_rounds)
        self._work = None

    def _both_rounds(self) -> None:
        assert self._work is not None, "waited for once"
        self._work.wait()
        sizes = [int(size) for size in self._sizes]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(self._mine)] = self._mine
        parts = [torch.zeros_like(padded) for _ in sizes]
        self._group.allgather([[lend(part) for part in parts]], [lend(padded)]).wait()
        self._things = [_from_bytes(part[:size]) for part, size in zip(parts, sizes, strict=True)]

    @property
    def result(self) -> list[Any]:
        assert self._things is not None, "waited for before it is read"
        return self._things


class _Message:
    """An object from a peer: its length, then its pickle."""

    def __init__(self, group: Any, peer: int) -> None:
        self._group, self._peer = group, peer
        self._size = torch.zeros(1, dtype=torch.int64)
        self._work = group.recv([self._size], peer, 0)
        self.result: Any = None

    def wait(self) -> None:
        with contact(self._peer):
            self._work.wait()
            data = torch.zeros(int(self._size), dtype=torch.uint8)
            self._group.recv([data], self._peer, 0).wait()
        self.result = _from_bytes(data)


class _AllSent:
    def __init__(self, leaving: list[tuple[int, dist.Work, torch.Tensor]]) -> None:
        self._leaving = leaving

    def wait(self) -> None:
        while self._leaving:
            peer, work, _ = self._leaving.pop()
            with contact(peer):
                work.wait()


class DistributedControl:
    """`Control` over a gloo group made beside the pipeline's own; making one is collective over that group."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group, store, timeout = gloo_group_beside(group)
        self._watch = Watch(self._group, store, timeout)
        self.rank, self.num_ranks = self._group.rank(), self._group.size()
        self._leaving: list[tuple[int, dist.Work, torch.Tensor]] = []

    def all_max(self, values: list[int]) -> Reply[list[int]]:
        """See `Control.all_max`."""
        return _Reduced(self._watch, self._group, torch.tensor(values, dtype=torch.int64), torch.amax)

    def all_sum(self, values: list[float]) -> Reply[list[float]]:
        """See `Control.all_sum`."""
        return _Reduced(self._watch, self._group, torch.tensor(values, dtype=torch.float64), torch.sum)

    def gather(self, thing: object) -> Reply[list[Any]]:
        """See `Control.gather`."""
        return _Gathered(self._watch, self._group, thing)

    def send(self, peer: int, thing: object) -> None:
        """See `Control.send`."""
        data = _to_bytes(thing)
        for tensor in (torch.tensor([len(data)]), data):
            with contact(peer):
                self._leaving.append((peer, self._group.send([tensor], peer, 0), tensor))

    def receive(self, peer: int) -> Reply[Any]:
        """See `Control.receive`."""
        with contact(peer):
            return _Message(self._group, peer)

    def finish(self) -> Handle:
        """See `Control.finish`."""
        leaving, self._leaving = self._leaving, []
        return _AllSent(leaving)


def _to_bytes(thing: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(thing)), dtype=torch.uint8)


def _from_bytes(data: torch.Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())
