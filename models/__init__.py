"""Cutting models into the stages of a V, and putting what was trained together again."""

from pipelining_dualpipev.models.load import from_pretrained
from pipelining_dualpipev.models.plan import SplitPlan
from pipelining_dualpipev.models.resume import load_checkpoint, save_checkpoint
from pipelining_dualpipev.models.split import SplitModel, plan_split, split
from pipelining_dualpipev.models.verify import Verification, verify

__all__ = [
    "split",
    "from_pretrained",
    "plan_split",
    "save_checkpoint",
    "load_checkpoint",
    "verify",
    "SplitModel",
    "SplitPlan",
    "Verification",
]
