from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings

from tests.distributed.pool import Ranks, WorkerPool
from tests.profiles import NIGHTLY, examples

# No example has a deadline: these machines are noisy, and no test is about time.
settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.register_profile(NIGHTLY, deadline=None, print_blob=True, max_examples=examples(100))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))


@pytest.fixture(scope="session")
def worker_pool() -> Iterator[WorkerPool]:
    pool = WorkerPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def ranks(worker_pool: WorkerPool) -> Callable[[int], Ranks]:
    """``ranks(2).run(fn, *args)`` calls ``fn`` on two ranks of a gloo process group; see distributed/pool.py."""
    return worker_pool.ranks
