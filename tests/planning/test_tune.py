"""Tuned orders: lawful, within memory, never slower than the reference, and near what is possible at all."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelining_dualpipev.planning import (
    CostModel,
    Placement,
    check_order,
    check_programs,
    dualpipev_order,
    lower,
    lower_bound,
    simulate,
    tune,
)
from pipelining_dualpipev.planning.actions import Order
from pipelining_dualpipev.testing import cost_models


def held_until_weight_gradients(order: Order) -> int:
    """Counted apart from the code: the most (stage, microbatch) of a rank with a forward and no weight gradient yet."""
    most = 0
    for actions in order.values():
        text = [str(single) for action in actions for single in action.singles]
        begun = [sum("F" in one for one in text[: i + 1]) for i in range(len(text))]
        over = [sum("W" in one or "B" in one for one in text[:i]) for i in range(len(text))]
        most = max(most, *(b - o for b, o in zip(begun, over, strict=True)))
    return most


@given(st.integers(1, 5), st.integers(1, 14), st.data())
@settings(max_examples=80, deadline=None)
def test_tuned_is_lawful_within_memory_and_never_slower(num_ranks, n, data):
    costs = data.draw(cost_models(num_stages=2 * num_ranks))
    placement, reference = Placement.v(num_ranks), dualpipev_order(num_ranks, n)
    tuned = tune(num_ranks, n, costs)
    check_order(tuned.order, n, placement=placement, cap=min(2 * n, 2 * num_ranks + 1))
    check_programs(lower(tuned.order, placement=placement), placement=placement)
    assert held_until_weight_gradients(tuned.order) <= held_until_weight_gradients(reference)
    makespan = simulate(tuned.order, costs, placement=placement).makespan
    assert makespan == tuned.timeline.makespan
    assert makespan <= simulate(reference, costs, placement=placement).makespan * (1 + 1e-9)
    assert makespan >= lower_bound(n, costs, placement=placement) * (1 - 1e-9)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 6])
def test_with_equal_costs_no_order_is_faster(num_ranks):
    """At F:I:W = 1:1:1, no hop and no gain by overlapping, the lower bound itself is reached for every n."""
    placement = Placement.v(num_ranks)
    for n in range(1, 8 * num_ranks + 1):
        makespan = tune(num_ranks, n, CostModel()).timeline.makespan
        assert makespan == pytest.approx(lower_bound(n, placement=placement), rel=1e-9), n


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 3, 15, 16, 31, 32, 33, 64, 100, 128])
def test_with_equal_costs_no_order_of_16_ranks_is_faster(n):
    makespan = tune(16, n, CostModel()).timeline.makespan
    assert makespan <= 1.01 * lower_bound(n, placement=Placement.v(16))


def test_pairs_are_kept_where_they_gain_much():
    tuned = tune(4, 16, CostModel(overlap=0.5))
    reference = dualpipev_order(4, 16)
    pairs = [sum(bool(a.parts) for row in order.values() for a in row) for order in (tuned.order, reference)]
    assert pairs[0] >= 0.8 * pairs[1]


def test_a_rank_in_the_middle_floats_its_weight_gradients_into_gaps():
    tuned = tune(3, 6, CostModel())
    # The tuned step has as much work and 6 units less of waiting than the reference's: none but filling and draining.
    reference = simulate(dualpipev_order(3, 6), placement=Placement.v(3))
    assert reference.makespan == 6 * 2 * 3 + (3 - 1) * 2
    assert tuned.timeline.makespan == 6 * 2 * 3 + (3 - 1)


def test_memory_that_is_allowed_is_kept_to_in_bytes():
    costs = CostModel(1.0, 1.3, 0.7, activation_bytes=[3.0, 1.0, 1.0, 2.0])
    roomy = tune(2, 8, costs)
    peak = max(roomy.timeline.peak_bytes(rank) for rank in range(2))
    tight = tune(2, 8, costs, max_bytes=peak)
    assert max(tight.timeline.peak_bytes(rank) for rank in range(2)) <= peak


def test_memory_that_does_not_suffice_is_told_with_both_numbers():
    with pytest.raises(ValueError, match=r"within 3 microbatches \(the reference holds 9\): allow as much"):
        tune(4, 10, CostModel(), max_in_flight=3)
    with pytest.raises(ValueError, match=r"within 8 bytes \(the reference holds 18\)"):
        tune(4, 10, CostModel(activation_bytes=2.0), max_bytes=8.0)


def test_costs_for_other_stages_are_refused():
    with pytest.raises(ValueError, match="forward has 4 costs, the pipeline 6 stages"):
        tune(3, 6, CostModel(forward=[1.0] * 4))
