"""What the benchmarks share: on which machine, how long in turns, and how much memory."""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def in_turns(names: Sequence[str], rounds: int, warm_up: int, take: Callable[[str], list[float]]) -> dict[str, Any]:
    """Figures of each contender by round, after so many to warm up; the slowest rank's. Collective.

    The contenders take turns, every other round in the opposite order, so that what the machine does beside is shared.
    """
    found: dict[str, list[list[float]]] = {name: [] for name in names}
    for number in range(warm_up + rounds):
        for name in names[:: 1 if number % 2 else -1]:
            dist.barrier()
            figures = torch.tensor(take(name), dtype=torch.float64)
            dist.all_reduce(figures, op=dist.ReduceOp.MAX)
            if number >= warm_up:
                found[name].append(figures.tolist())
    return found


def peak_bytes(step: Callable[[], None]) -> int:
    """The most bytes in tensors that the step has at once, beyond those from before it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    events.sort(key=lambda event: event["ts"])
    now = peak = 0
    for event in events:
        now += event["args"]["Bytes"]
        peak = max(peak, now)
    return peak


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = (
        [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.exists()
        else []
    )
    return names[0] if names else platform.processor() or platform.machine()


def machine() -> str:
    """Processors, Python and torch."""
    return f"{os.cpu_count()} x {_processor()}; Python {platform.python_version()}, torch {torch.__version__}"
