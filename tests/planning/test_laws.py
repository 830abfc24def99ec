"""The laws of a schedule, as properties over drawn numbers of ranks and microbatches; and that they can be broken."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipelining_dualpipev import ScheduleError
from pipelining_dualpipev.planning import (
    Action,
    CostModel,
    Kind,
    Placement,
    check_order,
    check_programs,
    dualpipev_order,
    lower,
    simulate,
)
from tests.parallel import on_all_cores
from tests.planning.torch_oracle import torch_order
from tests.profiles import is_nightly

pipelines = st.tuples(st.integers(1, 9), st.integers(1, 24))


@given(pipelines, st.booleans())
@example((1, 1), False)
@example((16, 1), False)
@example((16, 10), False)  # 3n <= 2P, where weight gradients are placed differently
@example((16, 11), False)
def test_complete_in_order_at_home_paired(pipeline: tuple[int, int], forward_only: bool):
    num_ranks, n = pipeline
    check_order(dualpipev_order(num_ranks, n, forward_only=forward_only), n, placement=Placement.v(num_ranks))


@given(pipelines, st.booleans())
@example((3, 6), False)  # where torch's deferred receives are out of order
def test_matched(pipeline: tuple[int, int], forward_only: bool):
    num_ranks, n = pipeline
    placement = Placement.v(num_ranks)
    check_programs(
        lower(dualpipev_order(num_ranks, n, forward_only=forward_only), placement=placement), placement=placement
    )


@given(pipelines, st.integers(0, 20))
@example((6, 4), 3)  # 3n <= 2P, where weight gradients are placed differently
def test_every_law_holds_however_many_backwards_are_split(pipeline: tuple[int, int], zb: int):
    num_ranks, n = pipeline
    placement, order = Placement.v(num_ranks), dualpipev_order(num_ranks, n, zb=zb)
    check_order(order, n, placement=placement, cap=min(2 * n, 2 * num_ranks + 1))
    check_programs(lower(order, placement=placement), placement=placement)
    unbounded = dualpipev_order(num_ranks, n)
    for rank, actions in order.items():
        assert splits(actions) == min(zb, splits(unbounded[rank]))
    assert simulate(order, placement=placement).makespan >= simulate(unbounded, placement=placement).makespan


def splits(actions: list[Action]) -> int:
    return sum(action.kind is Kind.BACKWARD_INPUT for action in actions)


def test_a_negative_bound_is_told():
    with pytest.raises(ValueError, match="zb is -1: give the most backwards that a rank may split, 0 or more"):
        dualpipev_order(2, 4, zb=-1)


@given(pipelines, st.floats(0.1, 3), st.floats(0.1, 3), st.floats(0.1, 3), st.floats(0.5, 1), st.floats(0, 1))
def test_matched_whatever_the_costs_that_order_the_transfers(pipeline, f, i, w, overlap, hop):
    num_ranks, n = pipeline
    placement, costs = Placement.v(num_ranks), CostModel(f, i, w, overlap=overlap, hop=hop)
    check_programs(lower(dualpipev_order(num_ranks, n), placement=placement, costs=costs), placement=placement)


@given(st.integers(1, 12), st.integers(0, 24))
def test_reference(num_ranks: int, more: int):
    n = 2 * num_ranks + more
    ours = {rank: [str(action) for action in actions] for rank, actions in dualpipev_order(num_ranks, n).items()}
    assert ours == torch_order(num_ranks, n)


@given(pipelines)
def test_programs_are_the_order_with_transfers_between(pipeline: tuple[int, int]):
    num_ranks, n = pipeline
    order = dualpipev_order(num_ranks, n)
    for rank, program in lower(order, placement=Placement.v(num_ranks)).items():
        without = [
            Action.pair(*(part for part in action.parts if not part.kind.is_communication)) if action.parts else action
            for action in program
            if not action.kind.is_communication
        ]
        assert without == order[rank]


@given(pipelines)
def test_bounded(pipeline: tuple[int, int]):
    """In program order no rank holds more than min(2n, 2P+1) microbatches between forward and input gradient."""
    num_ranks, n = pipeline
    for actions in dualpipev_order(num_ranks, n).values():
        held = peak = 0
        for single in (single for action in actions for single in action.singles):
            held += {Kind.FORWARD: 1, Kind.FULL_BACKWARD: -1, Kind.BACKWARD_INPUT: -1}.get(single.kind, 0)
            peak = max(peak, held)
        assert peak <= min(2 * n, 2 * num_ranks + 1)


def test_lowered_two_ranks_as_a_picture():
    """Sends right after what they send, receives as early as the one order of transfers allows."""
    programs = lower(dualpipev_order(2, 1), placement=Placement.v(2))
    assert {rank: " ".join(map(str, program)) for rank, program in programs.items()} == {
        0: "0F0 0SEND_F0 3RECV_F0 3F0 3I0 3SEND_B0 0RECV_B0 3W0 0I0 0W0",
        1: "1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2I0 1I0 1SEND_B0 2W0 1W0",
    }


@pytest.mark.slow
def test_every_law_for_up_to_sixteen_ranks_and_sixty_four_microbatches():
    on_all_cores(check_every_law, range(16, 0, -1))


def check_every_law(num_ranks: int) -> None:
    """Orders all; programs from 2P+2 microbatches on every fourth by day, and all of them at night."""
    placement = Placement.v(num_ranks)
    for n in range(1, 65):
        order = dualpipev_order(num_ranks, n)
        check_order(order, n, placement=placement, cap=min(2 * n, 2 * num_ranks + 1))
        if n <= 2 * num_ranks + 1 or n % 4 == 0 or is_nightly():
            check_programs(lower(order, placement=placement), placement=placement)


# ------------------------------------------------------------------------------------------ each law can be broken


def order_of(*rows: str) -> dict[int, list[str]]:
    return {rank: row.split() for rank, row in enumerate(rows)}


BROKEN_ORDERS = {
    "an action twice": ("complete", 0, 1, order_of("0F0 0F0 1F0 1B0 0B0")),
    "an action missing": ("complete", 0, 3, order_of("0F0 1F0 1B0")),
    "only the weight gradient missing": ("complete", 0, 5, order_of("0F0 1F0 1I0 1W0 0I0")),
    "a backward before its forward": ("complete", 0, 1, order_of("0F0 1B0 1F0 0B0")),
    "a weight gradient before its input gradient": ("complete", 0, 2, order_of("0F0 1F0 1W0 1I0 0B0")),
    "a full backward and a weight gradient": ("complete", 0, 3, order_of("0F0 1F0 1B0 1W0 0B0")),
    "a microbatch too many": ("complete", 0, 1, order_of("0F0 0F1 1F0 1B0 0B0")),
    "on another rank": ("at home", 1, 0, order_of("0F0 3F0 3B0", "0B0 1F0 2F0 2B0 1B0")),
    "a stage that is not there": ("at home", 0, 0, order_of("9F0 0F0 1F0 1B0 0B0")),
    "a split backward in a pair": ("paired", 0, 1, order_of("0F0 (1F0;0I0)OVERLAP_F_B")),
    "a forward paired with its own backward": ("paired", 0, 1, order_of("0F0 (1F0;1B0)OVERLAP_F_B 0B0")),
}


@pytest.mark.parametrize("case", BROKEN_ORDERS)
def test_an_order_that_breaks_a_law_is_told_where(case: str):
    law, rank, position, order = BROKEN_ORDERS[case]
    with pytest.raises(ScheduleError, match=f"law '{law}' broken on rank {rank} at position {position}:"):
        check_order(order, 1, placement=Placement.v(len(order)))


def test_microbatches_out_of_order_break_in_order():
    order = order_of("0F1 0F0 1F0 1F1 1B0 1B1 0B0 0B1")
    with pytest.raises(
        ScheduleError, match=r"law 'in order' broken on rank 0 at position 1: 0F0 comes after microbatch 1"
    ):
        check_order(order, 2, placement=Placement.v(1))


def test_the_error_shows_the_actions_around():
    with pytest.raises(ScheduleError, match=re.escape("... 0F0 >0F0< 1F0 1B0 0B0 ...")):
        check_order(BROKEN_ORDERS["an action twice"][3], 1, placement=Placement.v(1))


def test_ranks_that_wait_for_each_other_are_told():
    order = order_of("3B0 3F0 0F0 0B0", "1F0 2F0 2B0 1B0")
    with pytest.raises(ScheduleError, match=r"rank 0 at 3B0 waits for 3F0; rank 1 at 1F0 waits for 0F0"):
        simulate({rank: [Action.parse(a) for a in row] for rank, row in order.items()}, placement=Placement.v(2))


@st.composite
def lowered_with_one_fault(draw: st.DrawFn) -> tuple[str, str, dict[int, list[Action]], Placement]:
    """Programs of ours with one transfer moved, dropped or doubled: fault, laws it may break, programs, placement."""
    num_ranks, n = draw(st.integers(2, 6)), draw(st.integers(1, 16))
    placement = Placement.v(num_ranks)
    programs = lower(dualpipev_order(num_ranks, n), placement=placement)
    rank = draw(st.integers(0, num_ranks - 1))
    program = programs[rank]
    transfers = [i for i, action in enumerate(program) if action.kind.is_communication]
    at = draw(st.sampled_from(transfers))
    fault = draw(st.sampled_from(["drop", "double", "swap", "send early"]))
    if fault == "drop":
        del program[at]
        return fault, "complete|matched", programs, placement
    if fault == "double":
        program.insert(at, program[at])
        return fault, "complete", programs, placement
    if fault == "swap":
        other = draw(st.sampled_from(transfers))
        program[at], program[other] = program[other], program[at]
        same_peer = {_peer(program[at], placement), _peer(program[other], placement)}
        if at == other or len(same_peer) == 2:
            fault = "harmless"  # the joint sequence with each peer is what it was, or data may still be in line
        return fault, "complete|matched", programs, placement
    sends = [i for i in transfers if program[i].kind in (Kind.SEND_F, Kind.SEND_B)]
    at = draw(st.sampled_from(sends))
    program.insert(0, program.pop(at))
    return fault, "complete|matched", programs, placement


def _peer(action: Action, placement: Placement) -> int:
    step = 1 if action.kind in (Kind.SEND_F, Kind.RECV_B) else -1
    return placement.rank_of[action.stage + step]


@given(lowered_with_one_fault())
def test_a_program_with_one_fault_is_rejected(drawn: tuple[str, str, dict[int, list[Action]], Placement]):
    fault, laws, programs, placement = drawn
    if fault == "harmless":
        return
    with pytest.raises(ScheduleError, match=f"law '({laws})' broken"):
        check_programs(programs, placement=placement)
