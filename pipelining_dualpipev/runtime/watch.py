"""Waiting for ranks that may have ended, or may never come.

A wait inside gloo ends when the peer's process does, but only for those that wait for that very peer; neither aborting
nor destroying the group wakes the others, and ``wait(timeout)`` closes the connection. So what all ranks wait for
together is waited for by a thread, and the rank itself waits for the thread and looks around now and then::

    rank 0   thread   work.wait() .............................. (for good)
             rank     done? alarm? done? alarm? done? alarm! ──> [2] who has ended? ──> [3] RankLostError: rank 3
    rank 2   thread   work.wait() ──> connection closed by rank 3
             rank     done? error ──> [1] raise the alarm ─────> [2] who has ended? ──> [3] RankLostError: rank 3

[1] The alarm is a key in the group's store, whose value is in words what has happened, where that is known. [2] To send
to a process that has ended is an error at once, as every rank is connected to every other; so each finds out by itself.

[3] What others have begun together would go on waiting inside gloo, and a process does not end before that does. A
receive whose wait runs out of time closes the connection, here on purpose, and with it whatever waits for it.

If nothing happens for the group's timeout, whoever is not waiting too has not come. All of this is about the small
messages between hosts, never about tensors on a device, so no stream is concerned.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from pipelining_dualpipev.errors import RankLostError

__all__ = ["Watch"]

_GLANCE = 0.5  # seconds between two looks at the store
_SETTLE = 2.0  # seconds in which every rank has heard of a closed connection
_PROBE_TAG, _CLOSING_TAG = 1, 2
_ALARM = "alarm"


class _Wait:
    """One wait, handed to the thread."""

    def __init__(self, until: Callable[[], object]) -> None:
        self.until = until
        self.done = threading.Event()
        self.error: Exception | None = None


def _run_waits(waits: SimpleQueue[_Wait | None]) -> None:
    while (wait := waits.get()) is not None:
        try:
            wait.until()
        except Exception as error:  # told by the rank that waits for this
            wait.error = error
        done = wait.done
        del wait  # so that this thread holds nothing of it when anybody goes on
        done.set()


def _end(waits: SimpleQueue[_Wait | None], thread: threading.Thread) -> None:
    """End the thread before the interpreter does: one that came out of gloo after that would abort the process."""
    waits.put(None)
    if thread is not threading.current_thread():
        thread.join(_SETTLE)


class Watch:
    """Waits for what all ranks of a group do together.

    Args:
        group: a gloo group.
        store: the group's own, for the alarm.
        patience: how long to wait for the others.
    """

    def __init__(self, group: Any, store: dist.Store, patience: timedelta) -> None:
        self._group, self._store, self._patience = group, store, patience
        self._others = [rank for rank in range(group.size()) if rank != group.rank()]
        self._number = 0
        self._probes: list[tuple[dist.Work, torch.Tensor]] = []
        self._waits: SimpleQueue[_Wait | None] = SimpleQueue()
        thread = threading.Thread(target=_run_waits, args=(self._waits,), daemon=True, name="pipelining_dualpipev")
        thread.start()
        weakref.finalize(self, _end, self._waits, thread)

    def wait(self, until: Callable[[], object]) -> None:
        """Return when ``until`` does, which waits for works of the group: the same ones on all ranks.

        Raises:
            RankLostError: if a rank has ended, or has not come.
        """
        self._number += 1
        wait, start, told = _Wait(until), time.monotonic(), False
        self._waits.put(wait)
        while not wait.done.wait(_GLANCE):
            if self._has(_ALARM):
                raise self._lost(None)
            if not told:
                self._set(self._presence(self._group.rank()))
                told = True
            if time.monotonic() - start > self._patience.total_seconds():
                raise self._late()
        if wait.error is not None:
            raise self._lost(wait.error) from wait.error

    def _presence(self, rank: int) -> str:
        return f"waits/{self._number}/{rank}"

    def _has(self, key: str) -> bool:
        try:
            return self._store.check([key])
        except RuntimeError:  # the rank that hosts the store has ended, which is an alarm by itself
            return True

    def _set(self, key: str, words: str = "") -> None:
        with contextlib.suppress(RuntimeError):
            self._store.set(key, words)

    def _lost(self, error: Exception | None) -> RankLostError:
        """The error to raise here, after one of the connection, or where another rank has raised the alarm."""
        words = self._alarm()
        if not words:
            self._set(_ALARM)
            deadline = time.monotonic() + _SETTLE
            while not (ended := [r for r in self._others if not self._answers(r)]) and time.monotonic() < deadline:
                time.sleep(0.1)
            if ended:
                what = f"{_ranks(ended)} ended while others were in a step"
            else:
                what = f"the ranks have lost touch: {error or 'another rank has raised the alarm'}"
            words = f"{what}. Start all ranks again"
        return self._give_up(words)

    def _give_up(self, words: str) -> RankLostError:
        """Say why, and close all connections [3]; not before the others have looked who still answers."""
        self._set(_ALARM, words)
        time.sleep(2 * _GLANCE)
        for rank in self._others:
            with contextlib.suppress(RuntimeError):
                self._group.recv([torch.empty(1)], rank, _CLOSING_TAG).wait(timedelta(milliseconds=1))
        return RankLostError(words)

    def _alarm(self) -> str:
        try:
            return self._store.get(_ALARM).decode() if self._store.check([_ALARM]) else ""
        except RuntimeError:
            return ""

    def _answers(self, rank: int) -> bool:
        probe = torch.zeros(1)
        try:
            self._probes.append((self._group.send([probe], rank, _PROBE_TAG), probe))
        except RuntimeError:
            return False
        return True

    def _late(self) -> RankLostError:
        absent = [rank for rank in range(self._group.size()) if not self._has(self._presence(rank))]
        words = (
            f"{_ranks(absent) or 'some rank'} did not come to the step that the others are in within "
            f"{self._patience.total_seconds():.0f} s, the process group's timeout: every rank has to call step() or "
            "eval() as often as the others. Start all ranks again"
        )
        return self._give_up(words)


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else ""
