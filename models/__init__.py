"""Cutting models into the stages of a V, and putting what was trained together again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipelining_dualpipev.models.parts import SplitModel
from pipelining_dualpipev.models.plan import SplitPlan
from pipelining_dualpipev.models.resume import load_checkpoint, save_checkpoint
from pipelining_dualpipev.models.split import plan_split, split
from pipelining_dualpipev.models.stack import StackPlan
from pipelining_dualpipev.models.verify import Verification, verify

if TYPE_CHECKING:
    from pipelining_dualpipev.models.load import from_pretrained

__all__ = [
    "split",
    "from_pretrained",
    "plan_split",
    "save_checkpoint",
    "load_checkpoint",
    "verify",
    "SplitModel",
    "SplitPlan",
    "StackPlan",
    "Verification",
]


def __getattr__(name: str) -> Any:
    if name == "from_pretrained":  # with transformers, which the others do without
        from pipelining_dualpipev.models.load import from_pretrained

        return from_pretrained
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
