from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.distributed.pool import Ranks, WorkerPool


@pytest.fixture(scope="session")
def worker_pool() -> Iterator[WorkerPool]:
    pool = WorkerPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def ranks(worker_pool: WorkerPool) -> Callable[[int], Ranks]:
    """``ranks(2).run(fn, *args)`` calls ``fn`` on two ranks of a gloo process group; see distributed/pool.py."""
    return worker_pool.ranks
