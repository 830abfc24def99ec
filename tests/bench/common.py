"""What the benchmarks share: on which machine, and how much memory."""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch


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
