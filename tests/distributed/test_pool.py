"""The pool is what every multi-process test rests on, so it is tested first: an error must not get lost in it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed.pool import JobError, Raised, Ranks, WorkerPool

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@dataclass
class Pair:
    """A type of this module: arguments and results of it must survive the way to a worker and back."""

    left: int
    right: int


def describe_rank(scale: int, *, offset: int = 0) -> tuple[int, int, float]:
    x = torch.tensor([float(dist.get_rank() * scale + offset)])
    dist.all_reduce(x)
    return dist.get_rank(), dist.get_world_size(), x.item()


def swap(pair: Pair) -> Pair:
    assert isinstance(pair, Pair)
    return Pair(pair.right, pair.left + dist.get_rank())


def pid() -> int:
    return os.getpid()


def surroundings() -> tuple[int, str | None, str]:
    return torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS"), dist.get_backend()


def draw() -> tuple[float, float]:
    return random.random(), torch.rand(()).item()


def set_float64() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)


def default_dtype() -> tuple[torch.dtype, int]:
    return torch.get_default_dtype(), torch.get_num_threads()


def fail_on(rank: int, message: str) -> int:
    if dist.get_rank() == rank:
        raise LookupError(message)
    dist.recv(torch.empty(1), src=rank)
    return 0


def fail_everywhere() -> None:
    raise KeyError(f"rank {dist.get_rank()}")


def fail_late_on_others() -> int:
    """Rank 0 fails at once, and the others need more time for their own result than any follow-up error would take."""
    if dist.get_rank() == 0:
        raise ValueError("first")
    time.sleep(0.5)
    return dist.get_rank()


def disagree(width: int) -> None:
    seen = width + dist.get_rank()
    assert seen == width


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        a_place_to_hang()


def a_place_to_hang() -> None:
    while True:
        time.sleep(0.05)


def die_on(rank: int, number: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), number)
    dist.barrier()


def warn() -> None:
    warnings.warn("look out", UserWarning, stacklevel=1)


def fail_in_a_thread() -> None:
    thread = threading.Thread(target=fail_everywhere)
    thread.start()
    thread.join()


def unpicklable() -> object:
    return lambda: None


def speak() -> None:
    print(f"rank {dist.get_rank()} was here")


def test_results_come_in_the_order_of_ranks(ranks):
    assert ranks(3).run(describe_rank, 10, offset=1) == [(0, 3, 33.0), (1, 3, 33.0), (2, 3, 33.0)]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_any_number_of_ranks_after_any_other(ranks, num_ranks):
    total = float(sum(range(num_ranks)))
    assert ranks(num_ranks).run(describe_rank, 1) == [(rank, num_ranks, total) for rank in range(num_ranks)]


def test_types_of_the_test_module_go_there_and_back(ranks):
    assert ranks(2).run(swap, Pair(1, 2)) == [Pair(2, 1), Pair(2, 2)]


def test_workers_persist_from_job_to_job(ranks):
    first = ranks(2).run(pid)
    assert ranks(2).run(pid) == first
    assert ranks(1).run(pid) == first[:1]
    assert os.getpid() not in first


def test_a_rank_has_one_thread_and_gloo(ranks):
    assert ranks(2).run(surroundings) == [(1, "1", "gloo")] * 2


def test_each_job_starts_with_the_same_seeds_and_dtype(ranks):
    first = ranks(2).run(draw)
    assert first[0] == first[1]
    ranks(2).run(set_float64)
    assert ranks(2).run(default_dtype) == [(torch.float32, 1)] * 2
    assert ranks(2).run(draw) == first


def test_an_error_names_its_rank_and_its_line_and_the_first_comes_first(ranks):
    with pytest.raises(JobError) as caught:
        ranks(3).run(fail_on, 1, "no such thing")
    words = str(caught.value)
    assert "fail_on failed on 3 of 3 ranks" in words
    headings = [line for line in words.splitlines() if line.startswith("-----")]
    assert headings[0] == "----- rank 1 -----"
    assert all("s later" in heading for heading in headings[1:])
    assert "raise LookupError(message)\nLookupError: no such thing" in words
    assert "dist.recv(torch.empty(1), src=rank)" in words  # where the others waited


def test_every_failing_rank_is_told(ranks):
    with pytest.raises(JobError) as caught:
        ranks(2).run(fail_everywhere)
    assert "KeyError: 'rank 0'" in str(caught.value)
    assert "KeyError: 'rank 1'" in str(caught.value)


def test_a_bare_assertion_tells_what_it_saw(ranks):
    with pytest.raises(JobError) as caught:
        ranks(2).run(disagree, 5)
    assert "failed on 1 of 2 ranks\n----- rank 1 -----" in str(caught.value)
    assert str(caught.value).endswith("AssertionError\nwith\n    width = 5\n    seen = 6")


def test_the_next_job_after_an_error_is_clean_and_has_the_same_workers(ranks):
    before = ranks(2).run(pid)
    with pytest.raises(JobError):
        ranks(2).run(fail_on, 0, "")
    assert ranks(2).run(describe_rank, 1) == [(0, 2, 1.0), (1, 2, 1.0)]
    assert ranks(2).run(pid) == before


def test_expected_errors_stand_in_the_place_of_results(ranks):
    expected = [Raised("KeyError", "'rank 0'"), Raised("KeyError", "'rank 1'")]
    assert ranks(2).run_expecting_errors(fail_everywhere) == expected


def test_expecting_errors_hurries_nobody(ranks):
    assert ranks(2).run_expecting_errors(fail_late_on_others) == [Raised("ValueError", "first"), 1]


def test_a_stuck_rank_is_shown_with_its_stack_and_replaced(ranks):
    before = ranks(2).run(pid)
    with pytest.raises(JobError) as caught:
        ranks(2).run(hang_on, 1, timeout=1.0)
    words = str(caught.value)
    assert "failed on 1 of 2 ranks" in words
    assert "still running when its time was up" in words
    assert "in a_place_to_hang" in words
    after = ranks(2).run(pid)
    assert after[0] == before[0]
    assert after[1] != before[1]
    with pytest.raises(ProcessLookupError):
        os.kill(before[1], 0)


def test_a_stuck_rank_fails_the_job_that_expects_errors_too(ranks):
    with pytest.raises(JobError, match="a_place_to_hang"):
        ranks(2).run_expecting_errors(hang_on, 0, timeout=1.0)


def test_a_dead_worker_fails_the_test_and_is_replaced(ranks):
    before = ranks(2).run(pid)
    with pytest.raises(JobError) as caught:
        ranks(2).run(die_on, 1, signal.SIGKILL)
    first, second = [part.split("-----") for part in str(caught.value).split("----- rank ")[1:]]
    assert first[0].strip() == "1"
    assert "the worker died (signal 9" in first[1]
    assert second[0].startswith("0, ")
    after = ranks(2).run(pid)
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_a_crash_in_native_code_shows_where(ranks):
    with pytest.raises(JobError, match=r"signal 11[^$]*Fatal Python error[^$]*in die_on"):
        ranks(1).run(die_on, 0, signal.SIGSEGV)


def test_a_worker_that_dies_between_jobs_is_replaced(ranks, worker_pool):
    before = ranks(2).run(pid)
    os.kill(before[0], signal.SIGKILL)
    _wait_until(lambda: before[0] not in worker_pool.pids())
    after = ranks(2).run(pid)
    assert after[0] != before[0]
    assert after[1] == before[1]


def test_a_warning_is_an_error_in_a_worker(ranks):
    with pytest.raises(JobError, match="UserWarning: look out"):
        ranks(1).run(warn)


@pytest.mark.filterwarnings("ignore:look out")
def test_a_filter_of_the_test_holds_in_the_workers(ranks):
    ranks(1).run(warn)


def test_an_error_in_a_thread_fails_the_job(ranks):
    with pytest.raises(JobError, match=r"BackgroundError: in thread[^$]*KeyError: 'rank 0'"):
        ranks(1).run(fail_in_a_thread)


def test_a_result_that_cannot_travel_is_an_error(ranks):
    with pytest.raises(JobError, match=r"(?i)pickle"):
        ranks(1).run(unpicklable)
    assert ranks(1).run(describe_rank, 1) == [(0, 1, 0.0)]


def test_only_top_level_functions_are_taken(ranks):
    def inner() -> None: ...

    with pytest.raises(TypeError, match="inner: a job must be a top-level function"):
        ranks(1).run(inner)
    with pytest.raises(TypeError, match="lambda"):
        ranks(1).run(lambda: None)


def test_what_a_rank_prints_is_shown(ranks, capsys):
    ranks(2).run(speak)
    assert "rank 1 was here" in capsys.readouterr().out


@pytest.mark.parametrize("num_ranks", [0, 9])
def test_a_number_of_ranks_out_of_reach_is_refused(ranks, num_ranks):
    with pytest.raises(ValueError, match=f"{num_ranks} ranks: the pool has 1 to 8"):
        ranks(num_ranks)


@pytest.mark.slow
def test_workers_start_when_first_needed_and_end_with_the_pool():
    pool = WorkerPool()
    two = pool.ranks(2)
    assert pool.pids() == []
    assert Ranks(pool, 1).run(pid) == pool.pids()
    assert two.run(pid) == pool.pids()
    pids = pool.pids()
    pool.close()
    for number in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(number, 0)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_its_session(tmp_path, how):
    """An interrupt in the middle of a job, and a parent that has no chance to clean up."""
    (tmp_path / "test_it.py").write_text(
        textwrap.dedent("""
            import pathlib, os, time

            def stay(folder):
                import torch.distributed as dist
                pathlib.Path(folder, f"pid{dist.get_rank()}").write_text(str(os.getpid()))
                time.sleep(600)

            def test_stay(ranks, request):
                ranks(2).run(stay, str(request.config.rootpath), timeout=600)
        """)
    )
    # What a shell runs in the background is started with interrupts ignored, and so would all of its children be.
    (tmp_path / "conftest.py").write_text(
        "import signal\n"
        "from tests.conftest import ranks, worker_pool\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    )
    session = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "--rootdir", tmp_path, "-c", os.devnull, "--import-mode=importlib"],
        cwd=tmp_path,
        env=dict(os.environ, PYTHONPATH=str(ROOT)),
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    pids = [int(_wait_for(tmp_path / f"pid{rank}")) for rank in (0, 1)]
    session.send_signal(how)
    session.wait(30)
    _wait_until(lambda: not any(map(_alive, pids)))


def _wait_for(path: Path) -> str:
    _wait_until(lambda: path.exists() and path.read_text() != "")
    return path.read_text()


def _wait_until(condition) -> None:
    deadline = time.monotonic() + 120  # generous: a guard against waiting for ever, not a bound
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _alive(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{number}/stat")
    return not (status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z")
