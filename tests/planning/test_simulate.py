"""The simulator, against times one can work out by hand."""

from __future__ import annotations

import pytest

from pipelining_dualpipev.planning import CostModel, Placement, dualpipev_order, simulate


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


def test_costs_may_differ_by_stage():
    costs = CostModel(forward=[1.0, 2.0, 3.0, 4.0], backward_input=0.0, backward_weight=0.0)
    assert simulate(dualpipev_order(2, 1), costs, placement=Placement.v(2)).makespan == 10.0
