"""Checking types in processes of their own, so that one that crashes, hangs or eats memory is only that one's loss.

A child imports torch and transformers once and checks one type after another. Each has a time limit; a child that
exceeds it is killed, and a new one goes on with the next type.
"""

from __future__ import annotations

import multiprocessing as mp
import resource
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from queue import SimpleQueue
from typing import Any

from tests.coverage.compare import Result

__all__ = ["check_all"]

_MEMORY = 6 << 30  # bytes of address space
Check = Callable[[str, str], Result]


def check_all(types: Sequence[tuple[str, str]], *, check: Check, jobs: int, timeout: float) -> Iterator[Result]:
    """The results of (task, model type) pairs as they come.

    Args:
        types: what to check.
        check: a function at the top of a module.
        jobs: how many processes.
        timeout: seconds for one type; the import in a new process comes on top.
    """
    children: SimpleQueue[_Child] = SimpleQueue()
    all_children = [_Child(check) for _ in range(min(jobs, len(types)))]
    for child in all_children:
        children.put(child)

    def one(task: str, model_type: str) -> Result:
        child = children.get()
        try:
            return child.check(task, model_type, timeout)
        finally:
            children.put(child)

    with ThreadPoolExecutor(max(len(all_children), 1)) as threads:
        try:
            for done in as_completed([threads.submit(one, *pair) for pair in types]):
                yield done.result()
        finally:
            for child in all_children:
                child.end()


class _Child:
    """A process that checks, started when it is needed."""

    _STARTS = 120.0  # seconds to import everything, on a machine that does other things too

    def __init__(self, check: Check) -> None:
        self._check = check
        self._process: Any = None
        self._connection: Any = None

    def check(self, task: str, model_type: str, timeout: float) -> Result:
        if self._process is None:
            self._start()
        self._connection.send((task, model_type))
        try:
            if self._connection.poll(timeout):
                result: Result = self._connection.recv()
                return result
            reason = f"took longer than {timeout:.0f} seconds"
        except (EOFError, OSError):
            self._process.join()
            reason = f"the process ended with {self._process.exitcode}"
        self.end()
        return Result(task, model_type, "no answer", reason)

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._connection.close()
            self._process = None

    def _start(self) -> None:
        context = mp.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._check), daemon=True)
        self._process.start()
        theirs.close()
        if not self._connection.poll(self._STARTS) or self._connection.recv() != "ready":
            raise RuntimeError("a process to check model types in did not start")


def _serve(connection: Any, check: Check) -> None:
    import torch
    import transformers

    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")  # transformers has much to say about tiny models
    connection.send("ready")
    while True:
        try:
            task, model_type = connection.recv()
        except EOFError:
            return
        connection.send(check(task, model_type))
