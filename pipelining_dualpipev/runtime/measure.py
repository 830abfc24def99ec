"""What a pipeline's work really takes: some real steps, timed action by action.

A cost model that was guessed plans for a machine that nobody has. So a few steps are run with a stopwatch around every
action, on every rank, and what they have left is taken back::

    remember     gradients, buffers, random state
    set clocks   how far each rank's clock is from rank 0's
    warm up      steps that are not timed
    steps        each action's start and end; on an accelerator, by events in its stream
    take back    gradients, buffers, random state
    share        every rank gets all times, and works out the same from them

**Clocks.** The clocks of two hosts differ by any amount. A collective cannot end on one rank before it has begun on the
other, so each one bounds the difference from both sides::

    rank 0   begun ------- ended           ended there, by its clock, minus begun here  >=  difference
    rank r        begun ------- ended      begun there, by its clock, minus ended here  <=  difference

After several of them the bounds are as close as the quickest collective is short, and the middle is taken. (It is the
method of NTP: D. L. Mills, "Internet time synchronization", 1991.)

**Hops.** Between a result and its use lies more than the hop where the user had other work. So only those times count
in which the receiving rank was idle when the result was produced.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from pipelining_dualpipev.planning.actions import Action, Kind
from pipelining_dualpipev.planning.costs import CostModel
from pipelining_dualpipev.planning.placement import Placement
from pipelining_dualpipev.planning.simulate import Span, Timeline
from pipelining_dualpipev.runtime.control import Control, agree
from pipelining_dualpipev.runtime.executor import drive
from pipelining_dualpipev.runtime.ordered import OrderedSchedule

__all__ = ["measure_costs", "measure_timeline"]

_CLOCK_ROUNDS = 16
_BACKWARDS = (Kind.FULL_BACKWARD, Kind.BACKWARD_INPUT)

_Row = list[Span]  # one rank's actions of a step


def measure_costs(schedule: OrderedSchedule, *args: Any, steps: int = 3, warm_up: int = 2, **kwargs: Any) -> CostModel:
    """Time some real training steps and say what the schedule's stages cost. Collective.

    F, I and W of a stage are medians over microbatches and steps; the loss counts to the last stage's forward. Where a
    stage's backwards are never split, its B is shared out as in the other stages; where some are and others are not,
    I + W is the mean of both. The hop is the median of the times that an idle rank waited for a result which another
    had just produced, so it has in it what the rank itself does around an action.

    Afterwards gradients, buffers and the random state of torch are what they were; no optimizer has been called. Hooks
    of parameters and modules run as in any step.

    Args:
        schedule: with a ``loss_fn``, on every rank.
        args: inputs of a step, as for ``schedule.step``, on the ranks that give them there.
        steps: how many steps are timed, 1 or more; the same on every rank.
        warm_up: how many are run before, 0 or more; the same on every rank.
        kwargs: keyword inputs and ``target``, as for ``schedule.step``.

    Returns:
        The costs in seconds, the same on every rank: ``ScheduleDualPipeV(costs=...)`` takes them as they are. What
        stages hold (``activation_bytes``) is not measured.

    Raises:
        ValueError: on every rank, if the schedule has no ``loss_fn``, or a number is too small.
        RanksDisagreeError: on every rank, if the numbers differ.
        PipelineError: as ``schedule.step``; what is to be taken back is.
    """
    return measure_timeline(schedule, *args, steps=steps, warm_up=warm_up, **kwargs).costs


def measure_timeline(
    schedule: OrderedSchedule, *args: Any, steps: int = 3, warm_up: int = 2, **kwargs: Any
) -> Timeline:
    """As `measure_costs`, but gives a step as it went, in seconds, with what its actions cost in ``costs``.

    Of the steps timed it is the one whose makespan is the median. A pair is its forward and its backward, one after the
    other, as it was run. The viewing functions draw it, alone or beside ``simulate(order, timeline.costs)``.
    """
    control, placement = schedule.control, schedule.placement
    drive(agree(control, {"steps": steps, "warm_up": warm_up}, changed=False, error=_error(schedule, steps, warm_up)))
    stopwatch = _Stopwatch(schedule.device)
    mine: list[_Row] = []
    with _left_as_it_was(schedule):
        offset = _offset(control)
        for number in range(warm_up + steps):
            stopwatch.start()
            schedule.pipeline.observe(stopwatch if number >= warm_up else None)
            try:
                schedule.step(*args, return_outputs=False, **kwargs)
            finally:
                schedule.pipeline.observe(None)
            if number >= warm_up:
                mine.append(stopwatch.spans(offset))
    reply = control.gather(mine)
    reply.wait()
    rows: list[list[_Row]] = reply.result
    measured = [dict(enumerate(row[step] for row in rows)) for step in range(steps)]
    measured.sort(key=lambda step: _end(step) - _begin(step))
    middle = measured[(steps - 1) // 2]
    return Timeline(_from_zero(middle), _costs(measured, placement))


def _error(schedule: OrderedSchedule, steps: int, warm_up: int) -> ValueError | None:
    if schedule.loss_fn is None:
        return ValueError("the schedule has no loss_fn, so it has no training steps to measure: make it with one")
    if steps < 1 or warm_up < 0:
        return ValueError(f"steps is {steps} and warm_up {warm_up}: time 1 step or more, after 0 or more")
    return None


class _Mark(NamedTuple):
    """An action with the moments at which it began and ended: seconds of the host's clock, or events of a stream."""

    action: Action
    start: Any
    end: Any


class _Stopwatch:
    """An observer (`runtime.observe`) that notes when each action that computes begins and ends."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_host = device.type == "cpu"
        self._marks: list[_Mark] = []

    def start(self) -> None:
        """Begin anew: before a step."""
        self._marks = []
        if not self._on_host:
            # Only here, between steps, is the device waited for: its events count from one whose host time is known.
            torch.accelerator.synchronize(self._device)
            self._origin = time.perf_counter(), self._moment()

    @contextmanager
    def __call__(self, kind: Kind, stage: int, microbatch: int) -> Iterator[None]:
        if kind.is_communication:
            yield
            return
        start = self._moment()
        yield
        self._marks.append(_Mark(Action(stage, kind, microbatch), start, self._moment()))

    def spans(self, offset: float) -> _Row:
        """What was noted, on rank 0's clock, which is ``offset`` behind this one."""
        if not self._on_host:
            torch.accelerator.synchronize(self._device)
        row = []
        for action, start, end in self._marks:
            end_time = self._seconds(end) - offset
            row.append(Span(action, self._seconds(start) - offset, end_time, end_time))
        return row

    def _moment(self) -> Any:
        if self._on_host:
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def _seconds(self, moment: Any) -> float:
        if self._on_host:
            return float(moment)
        host, event = self._origin
        return float(host + event.elapsed_time(moment) / 1e3)


def _offset(control: Control) -> float:
    """By how much this rank's clock is ahead of rank 0's."""
    mine: list[tuple[float, float]] = []
    for _ in range(_CLOCK_ROUNDS):
        begun = time.perf_counter()
        control.all_max([0]).wait()
        mine.append((begun, time.perf_counter()))
    reply = control.gather(mine)
    reply.wait()
    rounds = list(zip(mine, reply.result[0], strict=True))
    least = max(begun - ended_there for (begun, _), (_, ended_there) in rounds)
    most = min(ended - begun_there for (_, ended), (begun_there, _) in rounds)
    return 0.0 if control.rank == 0 else (least + most) / 2


@contextmanager
def _left_as_it_was(schedule: OrderedSchedule) -> Iterator[None]:
    """Take back whatever the steps inside have left behind."""
    parameters = list(schedule.parameters())
    modules = [stage.submod for stage in schedule.stages]
    gradients = [parameter.grad for parameter in parameters]
    buffers = [(buffer, buffer.clone()) for module in modules for buffer in module.buffers()]
    metrics, device = schedule.metrics, schedule.device
    devices, kind = ([], "cuda") if device.type == "cpu" else ([device], device.type)
    with torch.random.fork_rng(devices, device_type=kind):
        try:
            for parameter in parameters:
                parameter.grad = None
            yield
        finally:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
            schedule.metrics = metrics


def _begin(step: dict[int, _Row]) -> float:
    return min(row[0].start for row in step.values())


def _end(step: dict[int, _Row]) -> float:
    return max(row[-1].end for row in step.values())


def _from_zero(step: dict[int, _Row]) -> dict[int, _Row]:
    zero = _begin(step)
    return {
        rank: [Span(span.action, span.start - zero, span.end - zero, span.end - zero) for span in row]
        for rank, row in step.items()
    }


def _costs(steps: list[dict[int, _Row]], placement: Placement) -> CostModel:
    took: dict[tuple[Kind, int], list[float]] = {}
    for span in (span for step in steps for row in step.values() for span in row):
        took.setdefault((span.action.kind, span.action.stage), []).append(span.end - span.start)
    stages = range(placement.num_stages)

    def median(kind: Kind, stage: int) -> float:
        return statistics.median(took[kind, stage])

    split = [stage for stage in stages if (Kind.BACKWARD_INPUT, stage) in took]
    shares = [_weight_share(median, stage) for stage in split]
    usual = statistics.median(shares) if shares else 0.5
    gradients, weights = [], []
    for stage in stages:
        whole = took.get((Kind.FULL_BACKWARD, stage), [])
        share, backwards = usual, [statistics.median(whole)] * len(whole)
        if stage in split:
            apart = median(Kind.BACKWARD_INPUT, stage) + median(Kind.BACKWARD_WEIGHT, stage)
            share = _weight_share(median, stage)
            backwards += [apart] * len(took[Kind.BACKWARD_INPUT, stage])
        backward = statistics.fmean(backwards)
        gradients.append((1 - share) * backward)
        weights.append(share * backward)
    forwards = [median(Kind.FORWARD, stage) for stage in stages]
    hops = [hop for step in steps for hop in _hops(step, placement)]
    return CostModel(forwards, gradients, weights, hop=max(0.0, statistics.median(hops)) if hops else 0.0)


def _weight_share(median: Callable[[Kind, int], float], stage: int) -> float:
    gradient, weight = median(Kind.BACKWARD_INPUT, stage), median(Kind.BACKWARD_WEIGHT, stage)
    return weight / (gradient + weight) if gradient + weight else 0.5


def _hops(step: dict[int, _Row], placement: Placement) -> Iterator[float]:
    """How long each result travelled that an idle rank of another waited for."""
    ended = {span.action: span.end for row in step.values() for span in row}
    ends = {(action.stage, action.microbatch): end for action, end in ended.items() if action.kind in _BACKWARDS}
    for row in step.values():
        free = -float("inf")
        for span in row:
            kind, stage, microbatch = span.action.kind, span.action.stage, span.action.microbatch
            produced = None
            if kind is Kind.FORWARD and placement.crosses(stage - 1):
                produced = ended[Action(stage - 1, Kind.FORWARD, microbatch)]
            elif kind in _BACKWARDS and placement.crosses(stage):
                produced = ends[stage + 1, microbatch]
            if produced is not None and free < produced:
                yield span.start - produced
            free = span.end
