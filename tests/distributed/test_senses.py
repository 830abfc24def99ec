"""Models that see, hear, or pass several tensors on, under the schedule on real ranks, with uneven padding."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipelining_dualpipev import RanksDisagreeError, ScheduleDualPipeV, SplitError, mean_loss
from pipelining_dualpipev.models import shapes, split
from tests.models.senses import batch_for, make, with_images
from tests.models.test_replanning import CutsToLength, rows

N = 3
# In float32 whatever the model's type, and divided by the labels of a microbatch's share instead of their number.
LOSS_IN_FP32 = 1e-6
SHIFTED = {"whisper": 0, "albert": 0}  # the others predict the next token


def expected_step(name: str, microbatches: list[dict[str, Any]]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of the unsplit model, microbatch by microbatch, each weighted by the labels that count."""
    model = make(name)
    shift = SHIFTED.get(name, 1)
    counts = [
        (mb["labels"][:, shift:] != -100).sum() if mb["labels"].dim() > 1 else mb["labels"].numel()
        for mb in microbatches
    ]
    total = torch.zeros((), dtype=torch.float64)
    for inputs, count in zip(microbatches, counts, strict=True):
        loss = model(**copy.deepcopy(inputs)).loss * (count / sum(counts))
        loss.backward()
        total += loss.detach()
    return total, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def compare_with_unsplit(name: str) -> tuple[int, ...]:
    batch = batch_for(name, 2 * N)
    microbatches = [{key: value.chunk(N)[index] for key, value in batch.items()} for index in range(N)]
    loss, gradients = expected_step(name, microbatches)
    parts = split(make(name), example=microbatches[0], device="cpu")
    schedule = ScheduleDualPipeV(parts.stages, N, parts.loss_fn)
    for number in (1, 2):  # gradients add up; and the second step announces no shapes
        losses: list[torch.Tensor] = []
        schedule.step(**(batch if dist.get_rank() == 0 else {}), losses=losses)
        assert abs(mean_loss(schedule, losses) - loss) <= LOSS_IN_FP32 * loss
        for parameter_name, parameter in parts.named_parameters():
            expected = gradients.get(parameter_name)
            if expected is None:  # of parameters that the model does not use
                assert parameter.grad is None or not parameter.grad.any(), parameter_name
                continue
            error = (parameter.grad - number * expected).abs().max() / expected.abs().max().clamp_min(1e-12)
            assert error <= LOSS_IN_FP32, f"{parameter_name} is off by {error:.1e}"
    return tuple(len(boundary) for boundary in parts.plan.boundaries)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tensors"),
    [
        ("qwen2_5_vl", (2, 3, 3)),  # images in every microbatch
        ("whisper", (2, 3, 2)),
        ("gemma3n", (3, 5, 5)),
        ("swin", (1, 1, 1)),
    ],
)
def test_loss_and_gradients_are_those_of_the_unsplit_model(ranks, name, tensors):
    assert ranks(2).run(compare_with_unsplit, name) == [tensors, tensors]


def train_with_and_without_images(example: list[list[tuple[int, int]]]) -> str:
    """Steps of microbatches of all kinds; between them one that cannot be planned."""
    generator = torch.Generator().manual_seed(0)

    def cut(*kinds: list[list[tuple[int, int]]]) -> list[dict[str, torch.Tensor]]:
        return [with_images(images, generator) for images in kinds]

    parts = split(make("qwen2_5_vl"), example=cut(example)[0], device="cpu")
    schedule = ScheduleDualPipeV(parts.stages, N, parts.loss_fn)
    bad = cut([[]], [[(4, 4)]], [[]])
    bad[1]["pixel_values"] = bad[1]["pixel_values"][:8]
    told = ""
    for microbatches in (
        cut([[(4, 4)]], [[]], [[(4, 4), (2, 4)]]),
        cut([[]], [[]], [[]]),
        bad,
        cut([[(2, 8)]], [[]], [[(2, 4), (4, 4)]]),  # as the first, but for what follows from values
        cut([[]], [[(4, 4)]], [[]]),
    ):
        for parameter in parts.parameters():
            parameter.grad = None
        losses: list[torch.Tensor] = []
        given = microbatches if dist.get_rank() == 0 else None
        if microbatches is bad:
            with pytest.raises((SplitError, RanksDisagreeError)) as caught:
                schedule.step(kwarg_mbs=given, losses=losses)
            told = str(caught.value)
            continue
        loss, gradients = expected_step("qwen2_5_vl", microbatches)
        schedule.step(kwarg_mbs=given, losses=losses)
        assert abs(mean_loss(schedule, losses) - loss) <= LOSS_IN_FP32 * loss
        for name, parameter in parts.named_parameters():
            if name not in gradients:
                assert parameter.grad is None or not parameter.grad.any(), name
                continue
            error = (parameter.grad - gradients[name]).abs().max() / gradients[name].abs().max().clamp_min(1e-12)
            assert error <= LOSS_IN_FP32, f"{name} is off by {error:.1e}"
    return told


@pytest.mark.slow
@pytest.mark.parametrize("example", [[[(4, 4)]], [[]]], ids=["with an image", "without"])
def test_images_come_and_go_between_microbatches_and_steps(ranks, example):
    told = ranks(2).run(train_with_and_without_images, example)
    assert "pixel_values [8, 48]" in told[0]
    assert told[1] == f"rank 0: {told[0]}"


def train_where_values_decide() -> int:
    torch.manual_seed(0)
    planned_in_forward = []
    make_plan = shapes.make_plan

    def watched(*args: Any, **kwargs: Any) -> Any:
        planned_in_forward.append(any(isinstance(f.frame.f_locals.get("received"), tuple) for f in inspect.stack()))
        return make_plan(*args, **kwargs)

    shapes.make_plan = watched
    try:
        _train_where_values_decide()
    finally:
        shapes.make_plan = make_plan
    assert not any(planned_in_forward), "ranks plan at once, before the step, and not each when its turn has come"
    return len(planned_in_forward)


def _train_where_values_decide() -> None:
    model = CutsToLength()
    parts = split(model, example=rows(2, 3), device="cpu")
    schedule = ScheduleDualPipeV(parts.stages, 2, lambda output, target: (output[0].sum(1) * target).mean())
    target = torch.ones(2, 4)
    for lengths in ((3, 2), (1, 5), (1, 5), (2, 2)):
        microbatches = [rows(*lengths), rows(*lengths[::-1])]
        model.zero_grad()
        for inputs in microbatches:
            (model(**inputs)[0].sum(1) * target).mean().div(2).backward()
        for parameter in parts.parameters():
            parameter.grad = None
        first = dist.get_rank() == 0
        schedule.step(kwarg_mbs=microbatches if first else None, target_mbs=[target] * 2 if first else None)
        for name, parameter in parts.named_parameters():
            torch.testing.assert_close(parameter.grad, model.get_parameter(name).grad)


@pytest.mark.slow
def test_a_step_may_cross_in_other_shapes_than_the_last_though_its_inputs_have_the_same(ranks):
    # Rows of 3 are the example's; of 5 and, without layer 2, of 2 are new.
    assert ranks(2).run(train_where_values_decide) == [2, 2]
