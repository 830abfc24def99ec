"""A process that ends right after a collective over gloo ends well."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from pipelining_dualpipev.runtime.lending import lend, wait_until_returned

_ENDINGS = """
import os, sys
import torch.distributed as dist
from pipelining_dualpipev.runtime.control import DistributedControl

folder, (cpu, *_) = sys.argv[1], sorted(os.sched_getaffinity(0))
ranks = []
for pair in range(4):
    for rank in range(2):
        ranks.append(os.fork())
        if not ranks[-1]:
            dist.init_process_group("gloo", init_method=f"file://{folder}/{pair}", rank=rank, world_size=2)
            control = DistributedControl(None)
            for thread in map(int, os.listdir("/proc/self/task")):
                with open(f"/proc/self/task/{thread}/comm") as name:
                    if "gloo_runloop" in name.read():
                        os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
                os.sched_setaffinity(thread, {cpu})
            control.gather(rank).wait()
            sys.exit()
print(*(os.waitpid(rank, 0)[1] for rank in ranks))
"""


def test_what_gloo_holds_is_on_loan_until_it_lets_go():
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as threads:  # to make a group is to wait for the others
        make = lambda rank: dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=20))  # noqa: E731
        early, late = threads.map(make, range(2))
    mine, others = torch.ones(3), torch.ones(3)
    early.allreduce([lend(mine)])
    assert not wait_until_returned(patience=0.05)
    late.allreduce([lend(others)]).wait()
    assert wait_until_returned()
    assert mine.tolist() == others.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setscheduler"), reason="the scheduler's classes are Linux's")
def test_a_process_that_ends_before_gloo_has_let_go_is_not_aborted(tmp_path):
    """gloo's threads get the processor last; without the wait at exit nearly every second process was aborted."""
    (tmp_path / "endings.py").write_text(_ENDINGS)
    command = [sys.executable, str(tmp_path / "endings.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert (done.stdout.split(), done.stderr) == (["0"] * 8, "")
