"""How many examples hypothesis draws: by default what CI has time for, a hundred times as many at night.

``HYPOTHESIS_PROFILE=nightly pytest`` is the one command for the night.
"""

from __future__ import annotations

import os

NIGHTLY = "nightly"


def is_nightly() -> bool:
    """Whether there is time for everything."""
    return os.environ.get("HYPOTHESIS_PROFILE") == NIGHTLY


def examples(number: int) -> int:
    """The number of examples for a test that draws ``number`` by day."""
    return 100 * number if is_nightly() else number
