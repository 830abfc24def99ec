"""Ranks as real processes: they all run, and whatever happens, they all end.

Each run carries a mark in its environment, which its children inherit wherever they go; so a process left behind is
found by looking through ``/proc``, whatever session or parent it has.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.training.test_data import words_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc"),
]

PATIENCE = 60.0  # not what is promised, but after which a test gives up
TINY = ["--batch-size", "4", "--seq-len", "16", "--held-out-batches", "1"]


class Job:
    """A run of the command line and all processes that come of it."""

    def __init__(self, folder: Path, *arguments: str, launcher: tuple[str, ...] = (), **env: str) -> None:
        self.mark = f"DUALPIPEV_TEST_MARK={uuid.uuid4()}"
        self.log = (folder / "log").open("w+")
        name, value = self.mark.split("=")
        self.process = subprocess.Popen(
            [sys.executable, *launcher, "-m", "pipelining_dualpipev.cli", "train", *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path), name: value, **env},
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def output(self) -> str:
        return Path(self.log.name).read_text()

    def pids(self) -> dict[int, dict[str, str]]:
        """The processes that bear the mark, with their environments."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):  # it has just ended, or is somebody else's
                    variables = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
                    if self.mark in variables:
                        found[int(entry.name)] = dict(v.split("=", 1) for v in variables if "=" in v)
        return found

    def pid_of_rank(self, rank: int) -> int:
        return next(pid for pid, env in self.pids().items() if env.get("RANK") == str(rank))

    def wait_until(self, condition: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not come about; the output:\n{self.output()}"
            time.sleep(0.05)

    def wait_until_it_trains(self) -> None:
        # The number of steps done stands in the progress bar only once a step is through on every rank.
        self.wait_until(lambda: self.process.poll() is not None or "loss" in self.output(), "training")
        assert self.process.poll() is None, self.output()

    def ends(self) -> int:
        """Wait for the launcher and for every process of its; returns the launcher's exit code."""
        code = self.process.wait(PATIENCE)
        self.wait_until(lambda: not self.pids(), f"the end of {self.pids().keys()}")
        return code

    def close(self) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.log.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs = []
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 200)

    def begin(*arguments: str, **kwargs: Any) -> Job:
        common = ["--data", str(tmp_path / "text.txt"), "--save", str(tmp_path / "checkpoint"), *TINY]
        jobs.append(Job(tmp_path, *common, *arguments, **kwargs))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.close()


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_ends_all_ranks_and_leaves_no_process(start: Callable[..., Job], tmp_path: Path, name: str, code: int):
    job = start("--steps", "1000000")
    job.wait_until_it_trains()
    assert len(job.pids()) == 3  # the launcher and two ranks: this is what the absence below is worth
    job.process.send_signal(signal.Signals[name])
    assert job.ends() == code
    assert f"stopped by {name}: all ranks have ended" in job.output()
    assert "Traceback" not in job.output()
    assert not (tmp_path / "checkpoint").exists()


def test_ctrl_c_while_the_ranks_are_starting(start: Callable[..., Job]):
    job = start("--steps", "1000000")
    job.wait_until(lambda: len(job.pids()) == 3, "the start of the ranks")
    job.process.send_signal(signal.SIGINT)
    assert job.ends() == 130
    assert "Traceback" not in job.output()


def test_ctrl_c_before_there_are_ranks(start: Callable[..., Job]):
    """An import that catches everything once swallowed the KeyboardInterrupt, and the training began all the same."""
    job = start("--steps", "1000000")
    maps = Path(f"/proc/{job.process.pid}/maps")
    job.wait_until(lambda: "libtorch" in maps.read_text(), "the launcher's import of torch")
    job.process.send_signal(signal.SIGINT)
    assert job.ends() == -signal.SIGINT
    assert job.output() == ""


def test_a_rank_that_is_killed_takes_the_others_along(start: Callable[..., Job], tmp_path: Path):
    job = start("--steps", "1000000")
    job.wait_until_it_trains()
    os.kill(job.pid_of_rank(1), signal.SIGKILL)
    assert job.ends() == 1
    assert "error: rank " in job.output().splitlines()[-1]
    assert not (tmp_path / "checkpoint").exists()


def test_ranks_end_when_their_launcher_is_killed_outright(start: Callable[..., Job]):
    job = start("--steps", "1000000")
    job.wait_until_it_trains()
    job.process.kill()
    assert job.ends() == -signal.SIGKILL


def test_a_mistake_that_only_the_ranks_can_see_is_one_line(start: Callable[..., Job], tmp_path: Path):
    from transformers import LlamaConfig

    model = tmp_path / "model"
    LlamaConfig(vocab_size=100, hidden_size=32, intermediate_size=8, num_hidden_layers=4).save_pretrained(model)
    job = start("--model", str(model))
    assert job.ends() == 2
    assert job.output().count("\n") == 1
    assert job.output().startswith(f"error: --model {model}: a vocabulary of 100 cannot hold the 256 byte values")


def test_under_torchrun_a_mistake_is_told_by_the_ranks_themselves(start: Callable[..., Job], tmp_path: Path):
    """Rank 0 alone can see it, as it alone cuts the text into tokens: too few here, though the bytes suffice."""
    from transformers import LlamaConfig

    model = tmp_path / "model"
    LlamaConfig(vocab_size=300, hidden_size=32, intermediate_size=8, num_hidden_layers=4).save_pretrained(model)
    words_tokenizer().save_pretrained(model)
    (tmp_path / "text.txt").write_text("This is file number 1. " * 8)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    job = start("--model", str(model), launcher=torchrun)
    assert job.ends() != 0
    told = [line for line in job.output().splitlines() if "error: " in line and "2 x 4 x 16 = 128" in line]
    assert told
    assert "Traceback" not in "\n".join(told)


def test_under_torchrun_the_command_is_a_rank(start: Callable[..., Job], tmp_path: Path):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    job = start("--steps", "3", launcher=torchrun)
    assert job.ends() == 0, job.output()
    assert job.output().count("held-out loss") == 1
    assert (tmp_path / "checkpoint" / "config.json").is_file()


def test_two_nodes_by_torchrun_alone(start: Callable[..., Job], tmp_path: Path):
    port = free_port()
    jobs = []
    for node in range(2):
        where = ("--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(node))
        where += ("--master-addr", "127.0.0.1", "--master-port", str(port))
        (tmp_path / f"node{node}").mkdir()
        jobs.append(start("--steps", "3", launcher=("-m", "torch.distributed.run", *where)))
    assert [job.ends() for job in jobs] == [0, 0], jobs[0].output()
    assert (tmp_path / "checkpoint" / "config.json").is_file()


def test_the_same_seed_gives_the_same_losses(start: Callable[..., Job]):
    last = []
    for seed in ("0", "0", "1"):
        job = start("--steps", "4", "--seed", seed)
        assert job.ends() == 0, job.output()
        last.append(job.output().splitlines()[-1])
    assert last[0] == last[1] != last[2]
    assert last[0].startswith("held-out loss ")


def test_a_run_that_is_killed_goes_on_as_if_it_had_not_been(start: Callable[..., Job], tmp_path: Path):
    straight = start("--steps", "30")
    assert straight.ends() == 0, straight.output()
    expected = [file.read_bytes() for file in sorted((tmp_path / "checkpoint").glob("*.safetensors"))]
    last = straight.output().splitlines()[-1]
    shutil.rmtree(tmp_path / "checkpoint")

    killed = start("--steps", "30", "--checkpoint-every", "4")
    killed.wait_until((tmp_path / "checkpoint.state" / "LATEST").exists, "a first state")
    os.kill(killed.pid_of_rank(1), signal.SIGKILL)
    assert killed.ends() == 1
    assert not (tmp_path / "checkpoint").exists()

    other = start("--steps", "30", "--resume", "--seed", "1")
    assert other.ends() == 2
    assert "was started with --seed 0, not 1" in other.output().splitlines()[-1]

    resumed = start("--steps", "30", "--resume")
    assert resumed.ends() == 0, resumed.output()
    assert resumed.output().splitlines()[-1] == last
    assert [file.read_bytes() for file in sorted((tmp_path / "checkpoint").glob("*.safetensors"))] == expected


def test_a_run_goes_on_with_more_steps_on_another_number_of_ranks(start: Callable[..., Job], tmp_path: Path):
    assert start("--steps", "3", "--checkpoint-every", "100").ends() == 0
    again = start("--steps", "3", "--resume")
    assert again.ends() == 2
    assert "has done its 3 steps: give more than that as --steps" in again.output().splitlines()[-1]
    more = start("--steps", "5", "--resume", "--ranks", "1")
    assert more.ends() == 0, more.output()
    assert "2 steps in" in more.output()
    assert "5/5" in more.output()


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
