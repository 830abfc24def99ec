"""torch's own schedules through the same laws; where torch breaks one, the fact is pinned."""

from __future__ import annotations

import pytest

from pipelining_dualpipev import ScheduleError
from pipelining_dualpipev._torch import TORCH_SCHEDULES, torch_order, torch_programs
from pipelining_dualpipev.planning import check_order, check_programs


def sizes(name: str) -> list[tuple[int, int]]:
    fitting = TORCH_SCHEDULES[name].fitting
    return sorted({(num_ranks, fitting(num_ranks, n)) for num_ranks in (1, 2, 3, 4, 8) for n in (2, 6, 8, 16, 24)})


@pytest.mark.parametrize("name", TORCH_SCHEDULES)
def test_torchs_orders_are_lawful(name):
    for num_ranks, n in sizes(name):
        placement = TORCH_SCHEDULES[name].placement(num_ranks)
        check_order(torch_order(name, num_ranks, n), n, placement=placement)


@pytest.mark.parametrize("name", TORCH_SCHEDULES)
def test_torchs_lowerings_match(name):
    """Its programs are matched and acyclic, or break a law: which ones do is pinned below."""
    broken = set()
    for num_ranks, n in sizes(name):
        placement = TORCH_SCHEDULES[name].placement(num_ranks)
        try:
            check_programs(torch_programs(name, num_ranks, n), placement=placement)
        except ScheduleError as error:
            broken.add(str(error).split("'")[1])
    assert broken == BROKEN_BY_LOWERING[name]


BROKEN_BY_LOWERING: dict[str, set[str]] = {name: set() for name in TORCH_SCHEDULES}


def test_torchs_deferred_receives_break_matched():
    """With P=3 and n=6 it gives silently wrong gradients on real ranks (measured with torch 2.13)."""
    with pytest.raises(ScheduleError, match="law 'matched' broken"):
        check_programs(
            torch_programs("DualPipeV", 3, 6, defer_pp_recv=True), placement=TORCH_SCHEDULES["DualPipeV"].placement(3)
        )
