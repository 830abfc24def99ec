"""Benchmarks are run by hand; here only that each starts: one once asked another for a name that had moved away."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

NAMES = sorted(path.stem for path in (Path(__file__).parents[1] / "bench").glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_can_be_imported(name):
    importlib.import_module(f"tests.bench.{name}")
