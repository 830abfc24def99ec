"""DualPipeV for ``torch.distributed.pipelining``.

The names below are looked up on first use, so that ``pipelining_dualpipev.planning``, which is pure Python, can be
imported on a machine without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipelining_dualpipev.errors import (
        CheckpointError,
        PipelineError,
        RankLostError,
        RanksDisagreeError,
        ScheduleError,
        SplitError,
    )
    from pipelining_dualpipev.planning.placement import stage_indices
    from pipelining_dualpipev.runtime.gradients import clip_grad_norm_, inject_loss, mean_loss
    from pipelining_dualpipev.runtime.measure import measure_costs, measure_timeline
    from pipelining_dualpipev.schedule import ScheduleDualPipeV, ScheduleFromOrder

__all__ = [
    "ScheduleDualPipeV",
    "ScheduleFromOrder",
    "stage_indices",
    "mean_loss",
    "clip_grad_norm_",
    "inject_loss",
    "measure_costs",
    "measure_timeline",
    "CheckpointError",
    "PipelineError",
    "RankLostError",
    "RanksDisagreeError",
    "ScheduleError",
    "SplitError",
]

_HOME = {
    "ScheduleDualPipeV": "schedule",
    "ScheduleFromOrder": "schedule",
    "stage_indices": "planning.placement",
    "mean_loss": "runtime.gradients",
    "clip_grad_norm_": "runtime.gradients",
    "inject_loss": "runtime.gradients",
    "measure_costs": "runtime.measure",
    "measure_timeline": "runtime.measure",
    "CheckpointError": "errors",
    "PipelineError": "errors",
    "RankLostError": "errors",
    "RanksDisagreeError": "errors",
    "ScheduleError": "errors",
    "SplitError": "errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
