"""Tools to test a schedule with, ours or your own: a cluster in one process, and strategies for hypothesis.

Hypothesis is imported when a strategy is first asked for; the cluster does without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pipelining_dualpipev.testing.cluster import LocalCluster
from pipelining_dualpipev.testing.step import Stack, check_training_step

if TYPE_CHECKING:
    from pipelining_dualpipev.testing.strategies import choosers, cost_models, mutants, orders, stage_stacks

__all__ = [
    "LocalCluster",
    "Stack",
    "check_training_step",
    "choosers",
    "cost_models",
    "mutants",
    "orders",
    "stage_stacks",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.strategies"), name)
