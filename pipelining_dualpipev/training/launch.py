"""Starting the ranks of one machine, and ending them: all of them, always.

torch's elastic launcher starts a process a rank, tells each its place through the environment, watches them, and on a
failure or a signal ends the rest. Where torchrun has done this already, on one machine or several, the same command is
a rank itself::

    dualpipev train            torchrun --nproc-per-node 2 -m pipelining_dualpipev.cli train
        |  [1] check                             |
        |  [2] elastic_launch                    |
        +-- rank 0 [3]                           +-- rank 0
        +-- rank 1 [3]                           +-- rank 1

What the launcher leaves open, and what is done about it:

* A rank that is told to end while it waits inside gloo would not notice: Python runs a signal handler only when the
  wait is over. So [3] gives the signals back their default meaning, which is to end at once, and does so before it
  imports torch, which takes seconds. There is nothing to clean up: a checkpoint appears by one rename or not at all.
* The agent passes on the signal that it gets, and Python makes a traceback of a Ctrl-C in a rank that has not come to
  [3]. So the launcher tells the agent SIGTERM, whichever signal it was.
* A launcher that is killed outright tells nobody. So each rank looks for its parent once a second.
* A mistake of the user is to be one line, not a report per rank. So a rank leaves its words in the error file that the
  launcher has given it, and the launcher says them once and exits with `USER_ERROR`.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import uuid
from types import FrameType

from pipelining_dualpipev.training.config import TrainConfig

__all__ = ["USER_ERROR", "RanksFailedError", "is_launched", "launch", "run_as_rank"]

USER_ERROR = 2
_PATIENCE = "5"  # seconds between asking a rank to end and killing it


class RanksFailedError(RuntimeError):
    """A rank failed other than by a mistake of the user; it has shown its own traceback."""


def is_launched() -> bool:
    """Say whether this process is a rank already, started by torchrun or in the same way."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run_as_rank(config: TrainConfig) -> None:
    """Train as the rank that the environment says this process is; rank 0 prints the result.

    Raises:
        ValueError: on every rank, if the run cannot go as asked.
    """
    ranks = int(os.environ["WORLD_SIZE"])
    if config.ranks != ranks:
        raise ValueError(f"--ranks is {config.ranks}, but {ranks} ranks have been started: leave --ranks out")
    from pipelining_dualpipev.training.loop import train

    result = train(config)
    if result is not None:
        print(result, flush=True)


def launch(config: TrainConfig) -> None:
    """Start the ranks on this machine and wait for them.

    Raises:
        ValueError: if the run cannot go as asked; if that can be seen from here, before a process is started.
        RanksFailedError: if a rank failed for another reason.
        SystemExit: if a signal ended the run, with 128 and its number, as shells have it.
    """
    config.check()
    from pipelining_dualpipev.training.model import check_model

    check_model(config)
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher import LaunchConfig, elastic_launch

    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _PATIENCE)
    if "lo" in (name for _, name in socket.if_nameindex()):
        # All ranks are here: whether this machine's name can be resolved need not matter.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    _quieten()
    with tempfile.TemporaryDirectory(prefix="dualpipev-") as logs:
        agent = LaunchConfig(
            signals_to_handle="SIGTERM",
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=config.ranks,
            run_id=str(uuid.uuid4()),
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
        )
        command = ("-m", __name__, json.dumps(dataclasses.asdict(config)), str(os.getpid()))
        received = []

        def stop(number: int, _: FrameType | None) -> None:
            signal.signal(number, signal.SIG_IGN)  # the ranks are being ended: a second time would disturb that
            received.append(signal.Signals(number))
            raise SignalException("the ranks are to end", signal.SIGTERM)

        for number in _signals("SIGINT", "SIGHUP", "SIGQUIT"):
            signal.signal(number, stop)
        try:
            elastic_launch(agent, sys.executable)(*command)
        except ChildFailedError as failed:
            _explain(failed)
        except SignalException as stopped:
            by = received[0] if received else stopped.sigval
            print(f"stopped by {by.name}: all ranks have ended", file=sys.stderr)
            raise SystemExit(128 + by) from None


def _explain(failed: Exception) -> None:
    rank, failure = failed.get_first_failure()  # type: ignore[attr-defined]
    if failure.exitcode == USER_ERROR and isinstance(failure.message, dict):
        _, _, words = failure.message["message"].partition(": ")  # it begins with the exception's type
        raise ValueError(words) from None
    how = f"exit code {failure.exitcode}"
    if failure.exitcode < 0:
        how = f"signal {-failure.exitcode}, {failure.signal_name()}"
    raise RanksFailedError(f"rank {rank} ended first, with {how}; the others have been ended") from None


def _quieten() -> None:
    """Drop the elastic launcher's own log: what it reports is told here in fewer words. LOGLEVEL brings it back."""
    if "LOGLEVEL" not in os.environ:
        logger = logging.getLogger("torch.distributed.elastic")
        logger.addHandler(logging.NullHandler())
        logger.propagate = False


def _signals(*names: str) -> list[signal.Signals]:
    """Return those of the signals that this system has."""
    return [signal.Signals[name] for name in names if name in signal.Signals.__members__]


def _be_a_rank(config: str, launcher: str) -> int:
    """Run as a process that `launch` has started [3]; returns the exit code."""
    for number in _signals("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"):
        signal.signal(number, signal.SIG_DFL)
    threading.Thread(target=_end_without, args=(int(launcher),), daemon=True).start()
    try:
        run_as_rank(TrainConfig(**json.loads(config)))
    except ValueError as error:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
        return USER_ERROR
    except Exception:
        print(f"rank {os.environ['RANK']} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        return 1
    return 0


def _end_without(launcher: int) -> None:
    """End this process soon after its launcher has gone."""
    while os.getppid() == launcher:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(_be_a_rank(*sys.argv[1:]))
