"""Real steps, timed: equal costs on every rank, nothing left behind, and actions that torch's profiler can name."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipelining_dualpipev import measure_costs, measure_timeline
from pipelining_dualpipev.planning import CostModel, Kind, Timeline, dualpipev_order, simulate
from pipelining_dualpipev.planning.placement import Placement
from pipelining_dualpipev.viewing import to_svg, to_trace
from tests.distributed.stacks import WIDTH, Cut, gradients, make_batch, make_layers

N, NAP = 5, 0.01


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(2 * NAP)
        return gradient


class Slow(nn.Module):
    """Takes at least NAP to go forward, and twice that back."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(NAP)
        return SlowBackward.apply(x)


def given(cut: Cut, n: int = N) -> dict[str, Any]:
    x, target = make_batch(2 * n)
    return {"arg_mbs": [(mb,) for mb in x.split(2)], "target_mbs": list(target.split(2))} if cut.rank == 0 else {}


def measure_a_slow_stage(tmp: str) -> tuple[str, CostModel, Timeline]:
    layers = make_layers(4)
    layers[2].append(Slow())
    cut = Cut(layers, N)
    timeline = measure_timeline(cut.schedule, **given(cut), steps=1, warm_up=1)
    path = f"{tmp}/{cut.rank}.json"
    timeline.costs.save(path)
    return path, timeline.costs, timeline


def test_costs_are_of_the_stages_that_take_the_time_and_equal_on_every_rank(ranks, tmp_path):
    (path, costs, timeline), (_, others, other_timeline) = ranks(2).run(measure_a_slow_stage, str(tmp_path))
    assert costs == others == CostModel.load(path)
    assert timeline == other_timeline
    assert costs.forward[2] >= NAP
    assert costs.backward_input[2] + costs.backward_weight[2] >= 2 * NAP
    assert min(*costs.backward_input, *costs.backward_weight) > 0
    # What was timed is the order that was run, each action once; pairs one after the other.
    order = dualpipev_order(2, N)
    for rank, actions in order.items():
        assert [s.action for s in timeline.spans[rank]] == [single for a in actions for single in a.singles]
        row = timeline.spans[rank]
        assert all(a.start <= a.end <= b.start for a, b in pairwise(row))
    assert min(row[0].start for row in timeline.spans.values()) == 0.0
    assert timeline.makespan >= 3 * NAP * N
    # The same looks on it as on a simulated one, on the same axis.
    planned = simulate(order, costs, placement=Placement.v(2))
    assert to_svg({"measured": timeline, "planned": planned}).count('class="title"') == 2
    events = json.loads(to_trace(timeline, microseconds=1e6))["traceEvents"]
    last = max(event["ts"] + event["dur"] for event in events if "dur" in event)
    assert last == pytest.approx(timeline.makespan * 1e6)


class Forgetful(nn.Module):
    """Has running statistics, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(WIDTH).double(), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.norm(x))


def leave_no_trace() -> None:
    layers = make_layers(4)
    for layer in layers:
        layer.append(Forgetful())
    cut = Cut(layers, N)
    mine = list(cut.mine.values())
    cut.schedule.step(**given(cut))
    before = [[g.clone() for g in gradients(layer)] for layer in mine]
    same = [gradients(layer) for layer in mine]
    states = [{name: value.clone() for name, value in layer.state_dict().items()} for layer in mine]
    random = torch.get_rng_state()
    measure_costs(cut.schedule, **given(cut), steps=1, warm_up=0)
    for layer, values, objects, state in zip(mine, before, same, states, strict=True):
        assert all(now is then for now, then in zip(gradients(layer), objects, strict=True))
        assert all(torch.equal(now, then) for now, then in zip(gradients(layer), values, strict=True))
        assert all(torch.equal(layer.state_dict()[name], then) for name, then in state.items())
    assert torch.equal(torch.get_rng_state(), random)


def test_a_measurement_leaves_gradients_statistics_and_random_numbers_as_they_were(ranks):
    ranks(2).run(leave_no_trace)


def with_a_clock_of_its_own() -> tuple[float, float]:
    ahead, clock = 1000.0 * dist.get_rank(), time.perf_counter
    cut = Cut(make_layers(4), N)
    time.perf_counter = lambda: clock() + ahead  # type: ignore[assignment]
    try:
        timeline = measure_timeline(cut.schedule, **given(cut), steps=2, warm_up=0)
    finally:
        time.perf_counter = clock
    return timeline.makespan, timeline.costs.hop


def test_clocks_of_two_hosts_may_differ(ranks):
    for makespan, hop in ranks(2).run(with_a_clock_of_its_own):
        assert makespan < 500
        assert hop < 500


def without_a_loss() -> None:
    measure_costs(Cut(make_layers(4), N, loss_fn=None).schedule)


def other_steps_on_each_rank() -> None:
    cut = Cut(make_layers(4), N)
    measure_costs(cut.schedule, **given(cut), steps=1 + cut.rank)


def no_steps() -> None:
    cut = Cut(make_layers(4), N)
    measure_costs(cut.schedule, **given(cut), steps=cut.rank)


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (without_a_loss, "the schedule has no loss_fn"),
        (other_steps_on_each_rank, "steps: rank 0 has 1, rank 1 has 2"),
        (no_steps, "time 1 step or more"),
    ],
)
def test_what_cannot_be_measured_is_told_on_every_rank(ranks, job, words):
    for raised in ranks(2).run_expecting_errors(job):
        assert words in raised.message


def profile_a_step() -> tuple[list[str], list[str]]:
    cut = Cut(make_layers(4), N)
    cut.schedule.step(**given(cut))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        cut.schedule.step(**given(cut))
    seen = [event.name for event in profile.events() if " microbatch " in event.name]
    told = [
        f"{Kind(part.computation_type.value).name} stage {part.stage_index} microbatch {part.microbatch_index}"
        for action in cut.schedule.pipeline_order_with_comms[cut.rank]
        for part in action.sub_actions or (action,)
    ]
    return seen, told


def test_torchs_profiler_names_every_action_in_order(ranks):
    for seen, told in ranks(2).run(profile_a_step):
        assert seen == told
        assert "FORWARD stage" in seen[0] or "RECV_F stage" in seen[0]
