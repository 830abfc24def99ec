"""Mistakes are told on every rank, with the numbers and the remedy, before any tensor has moved."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from pipelining_dualpipev import ScheduleDualPipeV
from tests.distributed.stacks import WIDTH, Cut, make_batch, make_layers, mean_square


def construct(held: dict[int, tuple[list[int], int]], n_by_rank: list[object], **options: object) -> None:
    indices, num_stages = held[dist.get_rank()]
    stages = [PipelineStage(nn.Linear(WIDTH, WIDTH), i, num_stages, torch.device("cpu")) for i in indices]
    loss_fn = None if options.pop("no_loss_on", None) == dist.get_rank() else mean_square
    ScheduleDualPipeV(stages, n_by_rank[dist.get_rank()], loss_fn, **options)  # type: ignore[arg-type]


RIGHT = {0: ([0, 3], 4), 1: ([1, 2], 4)}
CONSTRUCTOR = {
    "stages of a loop": (
        ({0: ([0, 2], 4), 1: ([1, 3], 4)}, [4, 4]),
        "rank 0: it was given 2 stages (0, 2), but this schedule over 2 ranks has 2 stages (0, 3) here: build those; "
        "rank 1: it was given 2 stages (1, 3), but this schedule over 2 ranks has 2 stages (1, 2) here: build those",
    ),
    "ranks swapped": (
        ({0: ([1, 2], 4), 1: ([0, 3], 4)}, [4, 4]),
        "rank 0: it was given 2 stages (1, 2), but this schedule over 2 ranks has 2 stages (0, 3) here",
    ),
    "one stage": (
        ({0: ([0, 3], 4), 1: ([1], 4)}, [4, 4]),
        "rank 1: it was given 1 stage (1), but this schedule over 2 ranks has 2 stages (1, 2) here",
    ),
    "three stages": (
        ({0: ([0, 1, 3], 4), 1: ([1, 2], 4)}, [4, 4]),
        "rank 0: it was given 3 stages (0, 1, 3), but this schedule over 2 ranks has 2 stages (0, 3) here",
    ),
    "a wrong num_stages": (
        ({0: ([0, 3], 4), 1: ([1, 2], 6)}, [4, 4]),
        "rank 1: its stages say num_stages=6, but this schedule over 2 ranks has 4 stages: build them with num_stages=",
    ),
    "no microbatches": ((RIGHT, [4, 0]), "rank 1: n_microbatches is 0: a step has at least 1 microbatch"),
    "half a microbatch": ((RIGHT, [2.5, 4]), "rank 0: n_microbatches is 2.5: give a whole number, 1 or more"),
    "different numbers": (
        (RIGHT, [4, 6]),
        "the ranks differ in n_microbatches: rank 0 has 4, rank 1 has 6. Give the same on every rank",
    ),
}


@pytest.mark.parametrize("case", CONSTRUCTOR)
def test_a_schedule_that_cannot_be_made_is_refused_on_every_rank(ranks, case):
    args, words = CONSTRUCTOR[case]
    for raised in ranks(2).run_expecting_errors(construct, *args):
        assert raised.type in ("ValueError", "RanksDisagreeError")
        assert words in raised.message


def test_a_loss_function_on_one_rank_only_is_refused(ranks):
    for raised in ranks(2).run_expecting_errors(construct, RIGHT, [4, 4], no_loss_on=1):
        assert "whether there is a loss_fn: rank 0 has True, rank 1 has False" in raised.message


def test_deferred_receives_are_refused_with_the_reason(ranks):
    for raised in ranks(2).run_expecting_errors(construct, RIGHT, [4, 4], defer_pp_recv=True):
        assert "defer_pp_recv=True" in raised.message
        assert "leave it False" in raised.message


def no_stages() -> None:
    ScheduleDualPipeV([], 4)


def test_no_stages_at_all(ranks):
    for raised in ranks(2).run_expecting_errors(no_stages):
        assert "stages is empty" in raised.message


def step_with(rows: int, n: int, then_rows: int, **given: object) -> str:
    """A step that must fail on every rank, then one that must work; the failure's words."""
    cut = Cut(make_layers(4), n)
    x, target = make_batch(rows)
    words = ""
    try:
        cut.step(x, target=target, **given)
    except ValueError as error:
        words = str(error)
    x, target = make_batch(then_rows)
    cut.step(x, target=target)
    mean_square(cut.run_whole(x), target).backward()
    cut.assert_gradients_equal()
    return words


@pytest.mark.parametrize(("rows", "remedy"), [(10, "1, 2, 5, 10"), (3, "1, 3"), (0, "a larger batch")])
def test_a_batch_that_does_not_divide_is_told_on_every_rank_and_the_next_step_is_right(ranks, rows, remedy):
    for words in ranks(2).run(step_with, rows, 4, 8):
        assert f"has {rows} rows, which do not divide into 4 microbatches: use a batch of a multiple of 4" in words
        assert remedy in words


def wrong_calls() -> list[str]:
    cut = Cut(make_layers(4), 2)
    x, target = make_batch(4)
    first = cut.rank == 0
    calls = [
        lambda: cut.schedule.step(arg_mbs=[(x,)]) if first else cut.schedule.step(),
        lambda: cut.schedule.step(x, target_mbs=[target, target]) if first else cut.schedule.step(),
        lambda: cut.schedule.step(x, target=target) if first else cut.schedule.step(x),
        lambda: cut.schedule.step(kwarg_mbs=[1, 2]) if first else cut.schedule.step(),
        lambda: cut.schedule.step(x, target=target) if first else cut.schedule.eval(),
    ]
    words = []
    for call in calls:
        try:
            call()
        except (ValueError, TypeError) as error:
            words.append(str(error))
    cut.step(x, target=target)
    mean_square(cut.run_whole(x), target).backward()
    cut.assert_gradients_equal()
    return words


def test_wrong_calls_are_told_on_every_rank_and_the_next_step_is_right(ranks):
    expected = [
        "arg_mbs has 1 entries for 2 microbatches: give one for each",
        "give either whole-batch inputs or arg_mbs, kwarg_mbs and target_mbs, not both",
        "positional inputs were given here, but the first stage is on rank 0: give them there",
        "kwarg_mbs[0] is a int: give a dict of keyword inputs",
        "the kind of step: rank 0 has training, rank 1 has evaluation",
    ]
    for words in ranks(2).run(wrong_calls):
        assert len(words) == len(expected)
        for told, wanted in zip(words, expected, strict=True):
            assert wanted in told


def gradients_disabled() -> str:
    cut = Cut(make_layers(4), 2)
    x, target = make_batch(4)
    with torch.no_grad():
        try:
            cut.step(x, target=target)
        except RuntimeError as error:
            return str(error)
    return ""


def test_a_training_step_without_gradients_says_to_call_eval(ranks):
    assert all("call eval() instead" in words for words in ranks(2).run(gradients_disabled))


def a_loss_that_is_no_number() -> None:
    cut = Cut(make_layers(4), 2, loss_fn=lambda output, target: output - target)
    x, target = make_batch(4)
    cut.step(x, target=target)


def test_a_loss_that_is_no_number_is_told_on_every_rank(ranks):
    for raised in ranks(2).run_expecting_errors(a_loss_that_is_no_number):
        assert raised.type == "PipelineError"
        assert f"of shape [2, {WIDTH}]: return one number, a tensor with 1 element" in raised.message
