"""Doing something on every rank such that one rank's failure is every rank's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

__all__ = ["everywhere"]

T = TypeVar("T")


def everywhere(
    do: Callable[[], T], group: dist.ProcessGroup | None, *, otherwise: Callable[[str], Exception]
) -> list[T]:
    """Do something on every rank of a group. Collective; what it does must not be.

    Args:
        do: what this rank does; its result is pickled.
        group: the ranks.
        otherwise: makes the error of a rank that has not failed itself from the words of those that have.

    Returns:
        Every rank's result.

    Raises:
        Exception: on every rank, if ``do`` has raised on one: its own there, ``otherwise(words)`` on the others.
    """
    result: T | None = None
    error: Exception | None = None
    try:
        result = do()
    except Exception as raised:
        error = raised
    told: list[Any] = [None] * dist.get_world_size(group)
    words = f"{type(error).__name__}: {error}" if error else None
    dist.all_gather_object(told, (result, words), group=group)
    if error:
        raise error
    if failed := [f"rank {rank}: {words}" for rank, (_, words) in enumerate(told) if words]:
        raise otherwise("; ".join(failed))
    return [result for result, _ in told]
