"""One worker of the pool in pool.py: a process that imports torch once and then plays a rank in one job after another.

A job goes through four steps, each started by the parent, so that all ranks enter and leave together::

    parent                                   worker
      | -- prepare: function, arguments ------> |   [1] load the module, unpickle; rank 0 opens the store
      | <------------------ prepared: port ---- |
      | -- go: port --------------------------> |   [2] join the process group, call the function
      | <-- done: result, or raised: error ---- |
      | -- finish ----------------------------> |   [3] leave the process group
      | <---------------------------- clean --- |   [4] ready for the next job

Step 3 has to wait for the parent: a rank that is first to return (or to raise) and takes its connections down with it
would make its neighbours fail for no reason of their own.

A second thread reads the parent's messages. It is also the worker's lifeline: when the parent is gone, however it
went, the read ends and the worker with it, busy or not.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import importlib
import importlib.util
import os
import pickle
import queue
import random
import reprlib
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

STACKS_SIGNAL = signal.SIGUSR1  # answered by every thread's Python stack on stderr, even while stuck in C


class BackgroundError(RuntimeError):
    """A thread or a finalizer raised during a job whose function returned as if all were well."""


def main(fd: int) -> None:
    faulthandler.enable()
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    connection = Connection(fd)
    inbox: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
    sys.path[:] = connection.recv()
    threading.Thread(target=_read, args=(connection, inbox), name="lifeline", daemon=True).start()
    import torch

    torch.set_num_threads(1)
    connection.send(("ready",))
    while True:
        _job(connection, inbox)


def _read(connection: Connection, inbox: queue.SimpleQueue[tuple[Any, ...]]) -> None:
    while True:
        try:
            inbox.put(connection.recv())
        except (EOFError, OSError):
            os._exit(1)


def _job(connection: Connection, inbox: queue.SimpleQueue[tuple[Any, ...]]) -> None:
    import torch.distributed as dist

    _, reference, payload, rank, num_ranks, timeout = inbox.get()
    store: Any = None
    with contextlib.ExitStack() as scope:
        try:  # [1]
            arguments, filters = _load(reference, payload)
            function = _find(reference)
            if rank == 0:
                store = dist.TCPStore("127.0.0.1", 0, num_ranks, is_master=True, wait_for_workers=False)
        except BaseException as error:
            connection.send(("unprepared", _describe(error), time.monotonic()))
        else:
            connection.send(("prepared", None if store is None else store.port))
        step, *port = inbox.get()
        if step == "go":
            scope.enter_context(_fresh_state())
            scope.enter_context(_warning_filters(filters))
            try:  # [2]
                limit = datetime.timedelta(seconds=timeout)
                if store is None:
                    store = dist.TCPStore("127.0.0.1", port[0], num_ranks, is_master=False, timeout=limit)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=limit)
                result = pickle.dumps(_call(function, *arguments))
            except BaseException as error:
                connection.send(("raised", _describe(error), time.monotonic()))
            else:
                connection.send(("done", result))
            inbox.get()
    if dist.is_initialized():  # [3]
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    connection.send(("clean",))  # [4]


def _load(reference: tuple[str, str, str], payload: bytes) -> tuple[Any, Any]:
    """Load the function's module and only then unpickle: the arguments may be of the module's own types."""
    name, path, _ = reference
    filters, arguments = pickle.loads(payload)
    with _warning_filters(filters):
        load_module(name, path)
        return pickle.loads(arguments), filters


def load_module(name: str, path: str) -> ModuleType:
    """The module ``name`` from the file ``path``, loaded at most once.

    Under pytest's importlib mode a test module's name need not be importable, so the file decides, and the name only
    says under what entry of ``sys.modules`` pickle will look for it.
    """
    if name in sys.modules:
        return sys.modules[name]
    parent, _, child = name.rpartition(".")
    if parent:  # the packages above it, where there are any: relative imports need them
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(parent)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    if parent in sys.modules:
        setattr(sys.modules[parent], child, module)
    return module


def _find(reference: tuple[str, str, str]) -> Callable[..., Any]:
    found: Any = sys.modules[reference[0]]
    for part in reference[2].split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the function; what fails in the background while it runs fails the job."""
    seen: list[str] = []

    def in_thread(event: threading.ExceptHookArgs) -> None:
        name = event.thread.name if event.thread is not None else "?"
        words = traceback.format_exception(event.exc_type, event.exc_value, event.exc_traceback)
        seen.append(f"in thread {name}:\n{''.join(words)}")

    def unraisable(event: Any) -> None:
        words = traceback.format_exception(event.exc_type, event.exc_value, event.exc_traceback)
        seen.append(f"{event.err_msg or 'Exception ignored in'} {event.object!r}:\n{''.join(words)}")

    hooks = threading.excepthook, sys.unraisablehook
    threading.excepthook, sys.unraisablehook = in_thread, unraisable
    try:
        result = function(*args, **kwargs)
    finally:
        threading.excepthook, sys.unraisablehook = hooks
    if seen:
        raise BackgroundError("\n".join(seen))
    return result


@contextlib.contextmanager
def _fresh_state() -> Iterator[None]:
    """The same start for every job, and nothing left to the next one of what a test is likely to set."""
    import torch

    random.seed(0)
    torch.manual_seed(0)
    dtype = torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(1)


@contextlib.contextmanager
def _warning_filters(filters: list[tuple[Any, ...]]) -> Iterator[None]:
    """The filters that stand in the test: pytest's, with those of the test's own marks."""
    with warnings.catch_warnings():
        warnings.resetwarnings()
        for action, message, category, module, line in reversed(filters):
            warnings.filterwarnings(action, _pattern(message), category, _pattern(module), line)
        yield


def _pattern(pattern: Any) -> str:
    if pattern is None:
        return ""
    return pattern if isinstance(pattern, str) else pattern.pattern  # type: ignore[no-any-return]


def _describe(error: BaseException) -> tuple[str, str, str]:
    """(type, message, traceback); a bare assertion also tells the local variables it looked at."""
    words = "".join(traceback.format_exception(error)).rstrip()
    if isinstance(error, AssertionError) and not str(error) and error.__traceback__ is not None:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        words += "\nwith" + "".join(f"\n    {key} = {reprlib.repr(value)}" for key, value in frame.f_locals.items())
    return type(error).__name__, str(error), words


if __name__ == "__main__":
    main(int(sys.argv[1]))
