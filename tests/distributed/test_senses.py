"""Models that see, hear, or pass several tensors on, under the schedule on real ranks, with uneven padding."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipelining_dualpipev import ScheduleDualPipeV, mean_loss
from pipelining_dualpipev.models import split
from tests.models.senses import batch_for, make

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
