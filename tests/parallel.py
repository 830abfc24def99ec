"""Long tests of one process, on both of the cores that the suite is meant for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any


def on_all_cores(check: Callable[[Any], object], cases: Iterable[Any]) -> None:
    """Call ``check``, a module's function, with each case, in as many processes as there are cores, up to four.

    Raises:
        Exception: what the first of the cases that failed has raised.
    """
    workers = min(os.cpu_count() or 1, 4)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for running in [pool.submit(check, case) for case in cases]:
            running.result()
