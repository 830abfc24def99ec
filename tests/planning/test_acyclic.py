"""The law *acyclic*: programs that deadlock under some transports and not under others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelining_dualpipev import ScheduleError
from pipelining_dualpipev.planning import Action, Placement, dualpipev_order, lower
from pipelining_dualpipev.planning.acyclic import WIRES, check_acyclic


def programs_of(*rows: str) -> dict[int, list[Action]]:
    return {rank: [Action.parse(text) for text in row.split()] for rank, row in enumerate(rows)}


@given(st.integers(1, 8), st.integers(1, 24), st.booleans())
def test_acyclic(num_ranks: int, n: int, forward_only: bool):
    placement = Placement.v(num_ranks)
    order = dualpipev_order(num_ranks, n, forward_only=forward_only)
    check_acyclic(lower(order, placement=placement), placement=placement)


def test_two_that_each_wait_for_the_other_to_receive_first_deadlock_where_sends_block():
    """On two ranks in a V, rank 0 takes the first result before it gives the second input; rank 1 wants it first."""
    programs = programs_of(
        "0F0 0SEND_F0 0F1 3RECV_F0 3F0 0SEND_F1 3RECV_F1 3F1",
        "1RECV_F0 1F0 2F0 1RECV_F1 2SEND_F0 1F1 2F1 2SEND_F1",
    )
    with pytest.raises(ScheduleError, match=r"law 'acyclic' broken where transfers are 'blocking': ") as raised:
        check_acyclic(programs, placement=Placement.v(2))
    chain = str(raised.value).split(": ", 1)[1].split(", which waits for ")
    assert chain[0] == chain[-1]
    assert set(chain) == {"0SEND_F1", "2SEND_F0"}
    with pytest.raises(ScheduleError, match="'one stream'"):
        check_acyclic(programs, placement=Placement.v(2), wires=["one stream"])
    check_acyclic(programs, placement=Placement.v(2), wires=["fifo"])


def test_a_program_that_uses_what_comes_of_its_own_later_action_is_a_cycle_on_every_wire():
    programs = programs_of("3RECV_F0 3F0 0F0 0SEND_F0", "1RECV_F0 1F0 2F0 2SEND_F0")
    for wire in WIRES:
        with pytest.raises(ScheduleError, match=f"'{wire}'") as raised:
            check_acyclic(programs, placement=Placement.v(2), wires=[wire])
        assert "2SEND_F0" in str(raised.value)
