"""Layers to stages: every layer once and in order, never worse than evenly, and near the best there is."""

from __future__ import annotations

import sys
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelining_dualpipev.planning import CostModel, Placement, balance, dualpipev_order, simulate, stage_costs

COSTS = CostModel(1.0, 1.2, 0.8, hop=0.1)


def makespan(layers: list[float], cut: list[range], n: int, embedding: float = 0.0, head: float = 0.0) -> float:
    num_ranks = len(cut) // 2
    costs = stage_costs(layers, cut, COSTS, embedding=embedding, head=head)
    return simulate(dualpipev_order(num_ranks, n), costs, placement=Placement.v(num_ranks)).makespan


def evenly(total: int, num_stages: int) -> list[range]:
    return [range(s * total // num_stages, (s + 1) * total // num_stages) for s in range(num_stages)]


def assert_each_once_and_in_order(cut: list[range], total: int, num_ranks: int) -> None:
    assert len(cut) == 2 * num_ranks
    assert [layer for stage in cut for layer in stage] == list(range(total))
    assert all(cut)


@given(st.integers(1, 4), st.data())
@settings(max_examples=25, deadline=None)
def test_never_worse_than_evenly(num_ranks, data):
    layers = data.draw(st.lists(st.floats(0.1, 5.0), min_size=2 * num_ranks, max_size=24))
    embedding, head = data.draw(st.tuples(st.floats(0.0, 8.0), st.floats(0.0, 8.0)))
    n = data.draw(st.integers(1, 3 * num_ranks))
    cut = balance(layers, num_ranks, embedding=embedding, head=head, costs=COSTS, n_microbatches=n)
    assert_each_once_and_in_order(cut, len(layers), num_ranks)
    even = makespan(layers, evenly(len(layers), 2 * num_ranks), n, embedding, head)
    assert makespan(layers, cut, n, embedding, head) <= even * (1 + 1e-9)


def assert_near_the_best(layers: list[float], num_ranks: int, embedding: float, head: float) -> None:
    n, total = 2 * num_ranks, len(layers)
    partitions = [
        [range(start, end) for start, end in pairwise((0, *inner, total))]
        for inner in combinations(range(1, total), 2 * num_ranks - 1)
    ]
    best = min(makespan(layers, cut, n, embedding, head) for cut in partitions)
    ours = makespan(layers, balance(layers, num_ranks, embedding=embedding, head=head, costs=COSTS), n, embedding, head)
    assert ours <= 1.02 * best


def test_legs_of_unequal_length_are_found_where_they_are_best():
    # Begun from legs of the same length, the search ended at 111.5; with 4 and 2 layers on rank 0 it is 108.2.
    assert_near_the_best([1.5, 1.5, 1.5, 1.5, 1.0, 1.5, 1.5, 3.0, 0.5, 1.5], 2, 0.0, 1.0)


@given(st.integers(2, 3), st.data())
@settings(max_examples=25, deadline=None)
def test_within_two_per_cent_of_the_best_of_all_partitions(num_ranks, data):
    sizes = st.sampled_from([0.5, 1.0, 1.5, 3.0])
    layers = data.draw(st.lists(sizes, min_size=2 * num_ranks, max_size=10 if num_ranks == 2 else 9))
    embedding, head = data.draw(st.tuples(st.sampled_from([0.0, 0.5, 2.0]), st.sampled_from([0.0, 1.0, 4.0])))
    assert_near_the_best(layers, num_ranks, embedding, head)


@pytest.mark.parametrize("num_ranks", [*range(1, 7), *(pytest.param(p, marks=pytest.mark.slow) for p in range(7, 17))])
def test_every_layer_is_placed_once_and_in_order_and_never_worse_than_evenly(num_ranks, monkeypatch):
    # From wherever the search begins it may only get better, so a short one shows as much as a long one.
    monkeypatch.setattr(sys.modules[balance.__module__], "_SIMULATIONS", 3)
    for total in range(1, 81):
        if total < 2 * num_ranks:
            with pytest.raises(ValueError, match=f"{total} layers cannot fill {2 * num_ranks} stages"):
                balance([1.0] * total, num_ranks)
            continue
        layers = [1.0 + 0.5 * (layer % 3) for layer in range(total)]
        cut = balance(layers, num_ranks, embedding=0.5, head=3.0, costs=COSTS, n_microbatches=2)
        assert_each_once_and_in_order(cut, total, num_ranks)
        even = makespan(layers, evenly(total, 2 * num_ranks), 2, embedding=0.5, head=3.0)
        assert makespan(layers, cut, 2, embedding=0.5, head=3.0) <= even * (1 + 1e-9)


def test_a_heavy_head_leaves_fewer_layers_to_rank_0():
    layers = [1.0] * 32
    cut = balance(layers, 4, head=4.0, costs=COSTS, n_microbatches=16)
    per_rank = [len(cut[rank]) + len(cut[7 - rank]) for rank in range(4)]
    assert max(per_rank[0] + 4, *per_rank[1:]) == 9  # 36 units on 4 ranks
    assert makespan(layers, cut, 16, head=4.0) < 0.85 * makespan(layers, evenly(32, 8), 16, head=4.0)


def test_memory_moves_layers_from_the_full_rank():
    sizes = [3.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 3.0]
    cut = balance([1.0] * 8, 2, layer_bytes=sizes, end_bytes=1.0, max_bytes=7.0)
    held = [sum(sizes[layer] for stage in (cut[r], cut[3 - r]) for layer in stage) for r in range(2)]
    assert held[0] + 1.0 <= 7.0
    assert held[1] <= 7.0
    with pytest.raises(ValueError, match=r"some rank holds at least 7 bytes, 6\.5 are allowed: use more ranks"):
        balance([1.0] * 8, 2, layer_bytes=sizes, end_bytes=1.0, max_bytes=6.5)


def test_what_does_not_fit_is_told():
    with pytest.raises(ValueError, match="7 layers cannot fill 8 stages: use at most 3 ranks"):
        balance([1.0] * 7, 4)
    with pytest.raises(ValueError, match="layer_bytes has 3 numbers for 4 layers"):
        balance([1.0] * 4, 2, layer_bytes=[1.0] * 3)
    with pytest.raises(ValueError, match="forward is given per stage"):
        balance([1.0] * 4, 2, costs=CostModel(forward=[1.0, 2.0]))
