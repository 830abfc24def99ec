"""A tape of what a dry run has seen tells for which other inputs it would see the same."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from pipelining_dualpipev.models.guards import Guards, Tape

MASKS = st.lists(st.booleans(), min_size=4, max_size=4).map(torch.tensor)
SCALE = torch.tensor([1, 2, 3, 4])


def run(tape: Tape, function, *args, writes: bool = False):
    return tape.run(function, args, {}, writes=writes)


def guards_of(mask: torch.Tensor, look) -> Guards:
    tape, given_mask = Tape(), mask.clone()
    tape.add_input("mask", [given_mask])
    look(tape, given_mask)
    return tape.guards()


@given(MASKS, MASKS)
def test_a_number_that_was_seen_holds_for_whatever_gives_the_same(mask, other):
    def look(tape: Tape, mask: torch.Tensor) -> None:
        scaled = run(tape, torch.mul, mask, SCALE)
        run(tape, torch.neg, scaled)  # nobody looks at it
        tape.see(run(tape, torch.sum, scaled))

    guards = guards_of(mask, look)
    assert guards.names == {"mask"}
    assert not guards.failing({"mask": [mask]})
    assert bool(guards.failing({"mask": [other]})) == ((mask * SCALE).sum() != (other * SCALE).sum())


@given(MASKS, MASKS)
def test_of_places_only_the_number_may_matter(mask, other):
    guards = guards_of(mask, lambda tape, mask: tape.see(run(tape, torch.nonzero, mask), only_shape=True))
    assert bool(guards.failing({"mask": [other]})) == (mask.sum() != other.sum())


@given(MASKS, MASKS)
def test_what_is_written_in_place_is_written_anew_each_time(mask, other):
    """Into a copy of the input, and into a tensor of the forward's own, by a view of it."""

    def look(tape: Tape, mask: torch.Tensor) -> None:
        own = torch.zeros(4, 2)
        column = own.select(1, 0)
        run(tape, torch.Tensor.add_, column, mask, writes=True)
        run(tape, torch.Tensor.logical_not_, mask, writes=True)
        run(tape, torch.Tensor.add_, column, mask, writes=True)
        run(tape, torch.Tensor.mul_, column, mask, writes=True)
        tape.see(run(tape, torch.clone, own))

    guards = guards_of(mask, look)
    for _ in range(2):
        assert bool(guards.failing({"mask": [other]})) == (not mask.equal(other))
        assert not guards.failing({"mask": [mask]})


def test_nothing_seen_needs_no_input():
    guards = guards_of(torch.ones(4, dtype=torch.bool), lambda tape, mask: run(tape, torch.sum, mask))
    assert guards.names == frozenset()
    assert guards.failing({}) == set()


def test_a_way_that_cannot_be_gone_with_other_values_is_another_way():
    def look(tape: Tape, mask: torch.Tensor) -> None:
        places = run(tape, torch.nonzero, mask)
        tape.see(run(tape, torch.reshape, places, (2,)))

    guards = guards_of(torch.tensor([True, False, True, False]), look)
    assert not guards.failing({"mask": [torch.tensor([True, False, True, False])]})
    failing = guards.failing({"mask": [torch.tensor([True, True, True, False])]})
    assert len(failing) == 1
    guards.dropped |= failing
    assert not guards.failing({"mask": [torch.tensor([True, True, True, False])]})


def test_inputs_stay_as_they_are():
    guards = guards_of(
        torch.ones(4, dtype=torch.bool),
        lambda tape, mask: tape.see(run(tape, torch.Tensor.logical_not_, mask, writes=True)),
    )
    mask = torch.ones(4, dtype=torch.bool)
    assert not guards.failing({"mask": [mask]})
    assert mask.all()
