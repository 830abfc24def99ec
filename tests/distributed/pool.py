"""Worker processes that live as long as the test session and play the ranks of one test after another.

Starting a process per rank and test, as ``torch.multiprocessing.spawn`` does, imports torch and transformers each
time: five seconds a process. These workers import once. What a test needs beside that, and what makes sharing safe:

* A test sends a *top-level function of its module* and gets the results by rank. The function travels as its module's
  name and file with its own name, never as code; the worker loads that file once (see worker.py).
* Every job has a process group of its own (gloo, over a fresh TCP store), one thread a rank, seeded generators, and
  the warning filters that stand in the test: a warning in a worker is an error there too.
* A failure is told for every rank that failed, the first one first. The rest are woken by the closed connections of
  the first; one that is not is shown with its stacks, like one that exceeds the time, then killed and replaced.
* A worker that dies fails the test and is replaced. The next job finds a complete, clean set.
* The workers cannot outlive the session: each ends as soon as its connection to the parent does.

::

    def double(x):                                # in the test's module
        return x * 2 * dist.get_rank()

    def test_double(ranks):
        assert ranks(3).run(double, 5) == [0, 10, 20]
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Pipe, wait
from pathlib import Path
from typing import Any

from tests.distributed.worker import STACKS_SIGNAL

START_TIMEOUT = 180.0  # to import torch, transformers and the test's module; on a busy machine this takes its time
GRACE = 10.0  # for the other ranks to follow after one has failed, and to leave the process group
MAX_WORKERS = 8


class JobError(Exception):
    """A job failed on at least one rank; the message tells of each."""


@dataclass(frozen=True)
class Raised:
    """What a rank raised, from ``run_expecting_errors``."""

    type: str
    message: str
    traceback: str = field(default="", compare=False, repr=False)


@dataclass
class _Failure:
    kind: str  # "died", "raised" or "stuck"
    at: float
    words: str


class _Worker:
    """The parent's end of one worker process."""

    def __init__(self) -> None:
        self.connection, theirs = Pipe()
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 -- open as long as the worker is
        env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1", TOKENIZERS_PARALLELISM="false")
        if "lo" in (name for _, name in socket.if_nameindex()):
            env["GLOO_SOCKET_IFNAME"] = "lo"  # a host name that does not resolve is no reason to fail
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("worker.py")), str(theirs.fileno())],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C is for the parent, which then ends the workers
        )
        theirs.close()
        self.connection.send(sys.path)
        self.ready = False

    def log_end(self) -> int:
        return os.fstat(self.log.fileno()).st_size

    def log_since(self, start: int) -> str:
        return os.pread(self.log.fileno(), 1 << 20, start).decode(errors="replace")

    def stacks(self) -> str:
        """Every thread's Python stack, written by the worker's fault handler."""
        start = self.log_end()
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(STACKS_SIGNAL)
        deadline = time.monotonic() + 2.0
        size = -1
        while time.monotonic() < deadline and (self.log_end() == start or self.log_end() != size):
            size = self.log_end()
            time.sleep(0.05)
        return self.log_since(start).rstrip() or "(no answer to the request for its stacks)"

    def end(self) -> None:
        """Kill the process and whatever it has started."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def close(self) -> None:
        self.end()
        self.connection.close()
        self.log.close()


class WorkerPool:
    """Starts workers when a job first needs them, lends them to jobs, replaces those that are lost."""

    def __init__(self) -> None:
        self._workers: list[_Worker | None] = []
        atexit.register(self.close)

    def ranks(self, num_ranks: int) -> Ranks:
        """Ask for ``num_ranks`` ranks; nothing starts before a job does."""
        if not 1 <= num_ranks <= MAX_WORKERS:
            raise ValueError(f"{num_ranks} ranks: the pool has 1 to {MAX_WORKERS}")
        return Ranks(self, num_ranks)

    def pids(self) -> list[int]:
        """The processes that are running now."""
        return [worker.process.pid for worker in self._workers if worker is not None and worker.process.poll() is None]

    def take(self, num_ranks: int) -> list[_Worker]:
        """``num_ranks`` workers, started and ready."""
        while len(self._workers) < num_ranks:
            self._workers.append(None)
        taken: list[_Worker] = []
        for index in range(num_ranks):
            worker = self._workers[index]
            if worker is not None and worker.process.poll() is not None:  # died between two jobs
                worker.close()
                worker = None
            if worker is None:
                worker = self._workers[index] = _Worker()
            taken.append(worker)
        for worker in taken:
            if not worker.ready:
                self._await_ready(worker)
        return taken

    def _await_ready(self, worker: _Worker) -> None:
        with contextlib.suppress(EOFError, OSError):
            if worker.connection.poll(START_TIMEOUT):
                worker.connection.recv()
                worker.ready = True
                return
        words = worker.log_since(0)
        self.discard(worker)
        raise JobError(f"a worker did not start:\n{words}")

    def discard(self, worker: _Worker) -> None:
        """End a worker; the next job that needs it gets a new one."""
        self._workers[self._workers.index(worker)] = None
        worker.close()

    def close(self) -> None:
        """End all workers."""
        atexit.unregister(self.close)
        for worker in self._workers:
            if worker is not None:
                worker.close()
        self._workers.clear()


class Ranks:
    """``num_ranks`` ranks of a process group, ready to run a function."""

    def __init__(self, pool: WorkerPool, num_ranks: int) -> None:
        self._pool = pool
        self.num_ranks = num_ranks

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0, **kwargs: Any) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on every rank at once and return the results by rank.

        ``timeout`` is in seconds, from the moment that all ranks have imported what they need; the process group's own
        is half of it, so that a rank that waits in vain usually gets to say where. Raises ``JobError`` when any rank
        fails.
        """
        results, failures = _Job(self._pool, self.num_ranks, timeout, patient=False).play(fn, args, kwargs)
        if failures:
            raise JobError(_tell(fn, self.num_ranks, failures))
        return [results[rank] for rank in range(self.num_ranks)]

    def run_expecting_errors(
        self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0, **kwargs: Any
    ) -> list[Any]:
        """Like ``run``, with a ``Raised`` in the place of the result of each rank that raised.

        No rank is hurried because another has failed. A rank that dies or gets stuck still fails the test.
        """
        results, failures = _Job(self._pool, self.num_ranks, timeout, patient=True).play(fn, args, kwargs)
        if failures:
            raise JobError(_tell(fn, self.num_ranks, failures))
        return [results[rank] for rank in range(self.num_ranks)]


class _Job:
    """One function on some workers; see worker.py for the four steps."""

    def __init__(self, pool: WorkerPool, num_ranks: int, timeout: float, *, patient: bool) -> None:
        self.pool = pool
        self.num_ranks = num_ranks
        self.timeout = timeout
        self.patient = patient  # errors are results, and nobody is hurried by them
        self.results: dict[int, Any] = {}
        self.failures: dict[int, _Failure] = {}
        self.finished: set[int] = set()

    def play(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[dict[int, Any], dict[int, _Failure]]:
        reference = _reference(fn)
        payload = pickle.dumps((list(warnings.filters), pickle.dumps((args, kwargs))))
        self.workers = dict(enumerate(self.pool.take(self.num_ranks)))
        starts = {rank: worker.log_end() for rank, worker in self.workers.items()}
        clean: set[int] = set()
        try:
            for rank in self.workers:
                self._send(rank, ("prepare", reference, payload, rank, self.num_ranks, self.timeout / 2))
            answers = self._collect(set(self.workers), START_TIMEOUT, "importing", hurry=False)
            if not self.failures:
                for rank in self.workers:
                    self._send(rank, ("go", answers[0]))
                self._collect(set(self.workers), self.timeout, "running", hurry=not self.patient)
            for rank in self.workers:
                self._finish(rank)
            alive = {rank for rank in self.workers if rank not in self.failures or self.failures[rank].kind == "raised"}
            clean.update(self._collect(alive, GRACE, "leaving the process group", hurry=False))
        finally:
            for rank, worker in self.workers.items():
                if words := worker.log_since(starts[rank]):
                    print(f"--- rank {rank} wrote:\n{words}", end="")
                if rank not in clean:
                    self.pool.discard(worker)
        return self.results, self.failures

    def _send(self, rank: int, message: tuple[Any, ...]) -> None:
        with contextlib.suppress(OSError):  # it died: _collect sees that
            self.workers[rank].connection.send(message)

    def _finish(self, rank: int) -> None:
        if rank not in self.finished:
            self.finished.add(rank)
            self._send(rank, ("finish",))

    def _collect(self, waiting: set[int], limit: float, what: str, *, hurry: bool) -> dict[int, Any]:
        """Wait for one answer of each rank; returns the answers of those that did not fail."""
        answers: dict[int, Any] = {}
        connections = {self.workers[rank].connection: rank for rank in waiting}
        deadline = time.monotonic() + limit
        while connections:
            ready = wait(list(connections), max(0.0, deadline - time.monotonic()))
            for connection in ready:
                rank = connections.pop(connection)  # type: ignore[call-overload]
                self._answer(rank, answers)
                if hurry and rank in self.failures:
                    self._finish(rank)  # its connections close, which wakes the ranks that wait for it
                    deadline = min(deadline, time.monotonic() + GRACE)
            if not ready:
                self._give_up(set(connections.values()), what)
                break
        return answers

    def _answer(self, rank: int, answers: dict[int, Any]) -> None:
        worker = self.workers[rank]
        try:
            step, *rest = worker.connection.recv()
        except (EOFError, OSError):
            code = worker.process.wait()
            how = f"signal {-code}, {signal.strsignal(-code)}" if code < 0 else f"exit code {code}"
            words = f"the worker died ({how})\n{worker.log_since(0)[-4000:]}".rstrip()
            self.failures[rank] = _Failure("died", time.monotonic(), words)
            return
        if step == "done":
            self.results[rank] = pickle.loads(rest[0])
        elif step == "raised" and self.patient:
            self.results[rank] = Raised(*rest[0])
        elif step in ("raised", "unprepared"):
            (_, _, words), at = rest
            self.failures[rank] = _Failure("raised", at, words)
            return
        answers[rank] = rest[0] if rest else None

    def _give_up(self, stuck: set[int], what: str) -> None:
        why = ", after another rank had failed" if self.failures else ""
        for rank in sorted(stuck):  # all stacks before the first kill, which would move the others
            words = f"still {what} when its time was up{why}; now killed. Its stacks:\n{self.workers[rank].stacks()}"
            self.failures.setdefault(rank, _Failure("stuck", time.monotonic(), words))
        for rank in stuck:
            self.workers[rank].end()


def _reference(fn: Callable[..., Any]) -> tuple[str, str, str]:
    """(module, file, qualified name): how a worker finds the function again."""
    name = getattr(fn, "__qualname__", "")
    if not inspect.isfunction(fn) or "<" in name:
        raise TypeError(f"{name or repr(fn)}: a job must be a top-level function of a module, which workers can import")
    return fn.__module__, str(Path(inspect.getfile(fn)).resolve()), name


def _tell(fn: Callable[..., Any], num_ranks: int, failures: dict[int, _Failure]) -> str:
    """Every failure, the one that began it first: a death follows from nothing, a stuck rank is never the cause."""
    order = {"died": 0, "raised": 1, "stuck": 2}
    ranked = sorted(failures.items(), key=lambda item: (order[item[1].kind], item[1].at))
    first = ranked[0][1].at
    lines = [f"{fn.__qualname__} failed on {len(failures)} of {num_ranks} ranks"]
    for rank, failure in ranked:
        when = "" if failure.at == first else f", {max(0.0, failure.at - first):.2f} s later"
        lines.append(f"----- rank {rank}{when} -----\n{failure.words}")
    return "\n".join(lines)
