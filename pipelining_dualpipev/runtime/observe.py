"""Who looks on while a rank computes: nobody, torch's profiler, or a measurement.

The executor enters an *observer's* context around each action, where the action really works: not while it waits for
what another rank sends. Whether a profiler is on is asked once a step, so that a step which nobody looks at pays for
one empty context an action, a third of a microsecond.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch.profiler import record_function

from pipelining_dualpipev._torch import is_profiling
from pipelining_dualpipev.planning.actions import Kind

__all__ = ["Observer", "default_observer"]

Observer = Callable[[Kind, int, int], AbstractContextManager[object]]
"""Gives the context in which an action's kind, on a stage and a microbatch, is to run."""

_NOTHING = nullcontext()


def default_observer() -> Observer:
    """For a step: if a profiler of torch is on, each action is a range in it, like ``FORWARD stage 3 microbatch 5``."""
    return _named if is_profiling() else _unobserved


def _named(kind: Kind, stage: int, microbatch: int) -> AbstractContextManager[object]:
    return record_function(f"{kind.name} stage {stage} microbatch {microbatch}")


def _unobserved(kind: Kind, stage: int, microbatch: int) -> AbstractContextManager[object]:
    return _NOTHING
