from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def run(ranks: Any) -> Callable[..., None]:
    """Run a job on 2 and on 4 ranks; its first argument is the number of microbatches."""

    def run(job: Callable[..., Any], *args: Any) -> None:
        for num_ranks in (2, 4):
            for n in (2 * num_ranks, 2 * num_ranks + 1):
                ranks(num_ranks).run(job, n, *args)

    return run
