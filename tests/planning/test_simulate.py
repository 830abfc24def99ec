"""The simulator, against times one can work out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelining_dualpipev.planning import CostModel, Placement, dualpipev_order, lower_bound, simulate
from pipelining_dualpipev.testing import cost_models, orders


def test_one_microbatch_takes_its_way_down_and_up_and_back():
    costs = CostModel(forward=2.0, backward_input=3.0, backward_weight=5.0, hop=0.5)
    # Down and up: 4 forwards and 2 hops between ranks (0-1 and 2-3; the fold is none); then the gradients back.
    timeline = simulate(dualpipev_order(2, 1), costs, placement=Placement.v(2))
    assert timeline.spans[0][-1].end == 4 * 2.0 + 2 * 0.5 + 4 * 3.0 + 2 * 0.5 + 5.0
    # Rank 1 has no input gradient to wait for at the end, but both of its weight gradients to do.
    assert timeline.makespan == 4 * 2.0 + 2 * 0.5 + 3 * 3.0 + 0.5 + 2 * 5.0


def test_one_rank_never_waits():
    for n in (1, 2, 3, 8):
        timeline = simulate(dualpipev_order(1, n), placement=Placement.v(1))
        assert timeline.makespan == 2 * n * 3.0


@pytest.mark.parametrize(("num_ranks", "n"), [(2, 4), (4, 8), (4, 10), (8, 20)])
def test_the_makespan_is_the_work_and_the_known_bubble(num_ranks: int, n: int):
    """DualPipeV's bubble without overlap gain: (P-1) (F&B + B - 3W) with F&B = F + B, from the paper's table."""
    costs = CostModel()
    bubble = (num_ranks - 1) * ((1 + 2) + 2 - 3 * 1)
    makespan = simulate(dualpipev_order(num_ranks, n), costs, placement=Placement.v(num_ranks)).makespan
    assert makespan == 2 * n * 3 + bubble


def test_a_pair_hands_its_forward_on_before_its_backward():
    order = dualpipev_order(2, 4)
    spans = simulate(order, CostModel(overlap=0.5), placement=Placement.v(2)).spans
    pairs = [span for row in spans.values() for span in row if span.action.parts]
    assert pairs
    assert all(span.end - span.start == pytest.approx(1.5) for span in pairs)
    assert all(span.forward_end - span.start == pytest.approx(0.5) for span in pairs)


@given(orders(max_ranks=5, max_microbatches=12), st.data())
@settings(max_examples=150)
def test_no_makespan_is_below_the_lower_bound(case, data):
    costs = data.draw(cost_models(case.placement.num_stages))
    bound = lower_bound(case.n_microbatches, costs, placement=case.placement)
    assert simulate(case.order, costs, placement=case.placement).makespan >= bound * (1 - 1e-9)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_where_the_bound_is_known_it_is_tight(num_ranks):
    """One microbatch goes down, up and back, and then its last weight gradient is left; one rank never waits."""
    placement = Placement.v(num_ranks)
    costs = CostModel(2.0, 3.0, 0.5, hop=0.25)
    hops = 2 * (2 * num_ranks - 2) * 0.25
    assert lower_bound(1, costs, placement=placement) == 2 * num_ranks * (2.0 + 3.0) + hops + 0.5
    assert (
        lower_bound(7, placement=Placement.v(1)) == simulate(dualpipev_order(1, 7), placement=Placement.v(1)).makespan
    )


def test_bubbles_and_microbatches_in_flight():
    timeline = simulate(
        dualpipev_order(2, 1), CostModel(activation_bytes=[1000.0, 10.0, 20.0, 500.0]), placement=Placement.v(2)
    )
    # 0F0 at 0, 3F0 at 3 and its I at once, W in the gap, 0I0 at 7, 0W0 until 9.
    assert timeline.makespan == 9
    assert timeline.bubble(0) == pytest.approx(1 - 6 / 9)
    assert timeline.in_flight(0) == [(0.0, 1), (3.0, 2), (5.0, 1), (8.0, 0)]
    assert (timeline.peak_in_flight(0), timeline.peak_in_flight(1)) == (2, 2)
    assert (timeline.peak_bytes(0), timeline.peak_bytes(1)) == (1500, 30)


def test_costs_may_differ_by_stage():
    costs = CostModel(forward=[1.0, 2.0, 3.0, 4.0], backward_input=0.0, backward_weight=0.0)
    assert simulate(dualpipev_order(2, 1), costs, placement=Placement.v(2)).makespan == 10.0
