"""The public tools turned on themselves: what they call lawful is, what they break is found."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import nn

from pipelining_dualpipev import PipelineError, ScheduleError
from pipelining_dualpipev.planning import Placement, check_order, check_programs, dualpipev_order, lower, simulate
from pipelining_dualpipev.testing import (
    Stack,
    check_training_step,
    choosers,
    cost_models,
    mutants,
    orders,
    stage_stacks,
)
from pipelining_dualpipev.testing.cluster import Chooser
from pipelining_dualpipev.testing.step import LocalPipeline
from pipelining_dualpipev.testing.strategies import FAULTS, Mutant, OrderCase
from tests.parallel import on_all_cores
from tests.profiles import examples

TRANSPORTS = st.sampled_from(["buffered", "rendezvous", "streams"])
RELAXED = [HealthCheck.too_slow, HealthCheck.data_too_large]


@given(orders(), st.data())
@settings(max_examples=examples(200))
def test_orders_are_lawful_and_so_are_their_programs_whatever_the_costs(case, data):
    check_order(case.order, case.n_microbatches, placement=case.placement)
    costs = data.draw(cost_models(case.placement.num_stages))
    check_programs(lower(case.order, placement=case.placement, costs=costs), placement=case.placement)


@given(orders(max_ranks=5), TRANSPORTS, choosers(), st.data())
@settings(max_examples=examples(100), suppress_health_check=RELAXED)
def test_a_lawful_order_trains_any_stack_as_if_it_was_not_cut(case, transport, chooser, data):
    stack = data.draw(stage_stacks(case.placement))
    check_training_step(
        case.order, case.n_microbatches, placement=case.placement, stack=stack, chooser=chooser, transport=transport
    )


@pytest.mark.slow
def test_two_thousand_drawn_training_steps():
    numbers = range(4) if settings.default.derandomize else random.sample(range(2**32), 4)
    on_all_cores(train_drawn_orders, numbers)


def train_drawn_orders(number: int) -> None:
    """A fourth of them, drawn with this number; two steps each."""

    @seed(number)
    @given(orders(), TRANSPORTS, choosers(), st.data())
    @settings(max_examples=examples(250), deadline=None, database=None, print_blob=True, suppress_health_check=RELAXED)
    def train(case: OrderCase, transport: str, chooser: Chooser, data: st.DataObject) -> None:
        stack = data.draw(stage_stacks(case.placement))
        check_training_step(
            case.order, case.n_microbatches, placement=case.placement, stack=stack, chooser=chooser, transport=transport
        )

    train()


def broken_law(mutant: Mutant, case: OrderCase) -> str | None:
    """The law that the checker says the mutant breaks."""
    try:
        if mutant.is_programs:
            check_programs(mutant.order, placement=case.placement)
        else:
            check_order(mutant.order, case.n_microbatches, placement=case.placement, cap=mutant.cap)
    except ScheduleError as error:
        return str(error).split("'")[1]
    return None


@pytest.mark.slow
def test_an_order_with_one_fault_is_rejected_by_the_law_it_breaks_or_is_right_all_the_same():
    rejected = dict.fromkeys(FAULTS, 0)

    @given(orders(max_ranks=4), st.data())
    @settings(max_examples=examples(1200), suppress_health_check=RELAXED)
    def check(case: OrderCase, data: st.DataObject) -> None:
        mutant: Mutant = data.draw(mutants(case))
        law = broken_law(mutant, case)
        if law is not None:
            assert law in mutant.law.split("|")
            rejected[mutant.fault] += 1
            return
        # Two transfers swapped whose order nobody minds: every law still holds, so it must run right.
        assert mutant.fault == "two transfers swapped"
        check_training_step(mutant.order, case.n_microbatches, placement=case.placement, lower_order=None, steps=1)

    check()
    assert all(rejected.values()), rejected
    assert sum(rejected.values()) > 1000


@pytest.mark.slow
@given(orders(max_ranks=4, max_microbatches=8), TRANSPORTS, choosers(), st.data())
@settings(max_examples=examples(100), suppress_health_check=RELAXED)
def test_a_rank_that_raises_at_any_action_leaves_nobody_waiting(case, transport, chooser, data):
    programs = lower(case.order, placement=case.placement)
    stack = Stack.linear(case.placement.num_stages)
    pipeline = LocalPipeline(programs, case.placement, stack, case.n_microbatches, chooser=chooser, transport=transport)
    if data.draw(st.booleans()):
        pipeline.step()  # then no shapes travel ahead in the step that fails
    rank = data.draw(st.integers(0, case.placement.num_ranks - 1))
    computing = [single for action in case.order[rank] for single in action.singles]
    action = data.draw(st.sampled_from(computing))
    pipeline.fail_at(action, ArithmeticError("a bit fell over"))
    results = pipeline.step()
    assert all(isinstance(result, PipelineError) for result in results)
    told = f"stage {action.stage}, microbatch {action.microbatch}, action {action}: ArithmeticError: a bit fell over"
    assert {str(result) for result in results} == {f"rank {rank}, {told}"}
    pipeline.zero_grad()
    pipeline.step(1)
    pipeline.step_whole(1)
    pipeline.assert_gradients_equal()


@pytest.mark.parametrize("num_ranks", range(1, 7))
def test_the_simulated_peak_of_microbatches_in_flight_is_the_one_of_real_runs(num_ranks):
    """Counted by the graphs that are alive: each holds a node of ours, from a stage's forward to its backward."""
    for n in range(1, 4 * num_ranks + 1):
        placement, order = Placement.v(num_ranks), dualpipev_order(num_ranks, n)
        counts = [Count() for _ in range(num_ranks)]
        layers = [
            nn.Sequential(Watched(counts[placement.rank_of[stage]]), layer)
            for stage, layer in enumerate(Stack.linear(2 * num_ranks).layers)
        ]
        pipeline = LocalPipeline(lower(order, placement=placement), placement, Stack(layers), n)
        assert not any(isinstance(result, Exception) for result in pipeline.step())
        timeline = simulate(order, placement=placement)
        assert [count.peak for count in counts] == [timeline.peak_in_flight(rank) for rank in range(num_ranks)]
        assert max(count.peak for count in counts) == min(2 * n, 2 * num_ranks + 1)
        assert [count.now for count in counts] == [0] * num_ranks


class Count:
    """How many graphs of a rank are alive, and the most there were."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def add(self) -> None:
        self.now += 1
        self.peak = max(self.peak, self.now)

    def __deepcopy__(self, _: object) -> Count:
        return Count()  # of the copy that is not cut


class Sentinel(torch.autograd.Function):
    """Does nothing, and counts for as long as autograd keeps it."""

    @staticmethod
    def forward(ctx, x, weight, count):
        ctx.watched = Held(count)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.watched = None  # as a saved tensor is dropped by its backward
        return grad, None, None


class Held:
    def __init__(self, count: Count) -> None:
        self.count = count
        count.add()

    def __del__(self) -> None:
        self.count.now -= 1


class Watched(nn.Module):
    def __init__(self, count: Count) -> None:
        super().__init__()
        self.count, self.weight = count, nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return Sentinel.apply(x, self.weight, self.count)
