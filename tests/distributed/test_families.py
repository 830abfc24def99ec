"""Weight gradients that are put off, in models of all families, cut and under the schedule on two ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from pipelining_dualpipev import ScheduleDualPipeV
from pipelining_dualpipev.models import split
from tests.models.families import FAMILIES, SEQ2SEQ, make_tiny
from tests.models.unsplit import unsplit_step
from tests.models.zoo import CASTS_TO_FP32, make_batch

N = 2


def compare_with_full_backwards_and_the_model_unsplit(family: str) -> None:
    """All backwards are split with so few microbatches, and with zb=0 none is."""
    model = make_tiny(family, layers=2 if family in SEQ2SEQ else 4)
    batch = make_batch(2 * N)
    _, unsplit = unsplit_step(model, batch)
    parts = split(model, example=make_batch(2), device="cpu")
    gradients: list[dict[str, torch.Tensor | None]] = []
    for zb in (0, None):
        schedule = ScheduleDualPipeV(parts.stages, N, parts.loss_fn, zb=zb)
        assert ("I" in str(schedule.pipeline_order[dist.get_rank()])) == (zb is None)
        schedule.step(**batch) if dist.get_rank() == 0 else schedule.step()
        gradients.append({name: parameter.grad for name, parameter in parts.named_parameters()})
        for parameter in parts.parameters():
            parameter.grad = None
    assert all("are put off to W" in line for line in schedule.explain().splitlines())
    whole, put_off = gradients
    for name, ours in put_off.items():
        if name not in unsplit:  # frozen
            assert ours is None
            continue
        for theirs, tolerance in ((whole[name], 1e-13), (unsplit[name], CASTS_TO_FP32)):
            error = (ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-12)
            assert error <= tolerance, f"{name} is off by {error:.1e}"


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_full_backwards_and_of_the_unsplit_model(ranks, family):
    ranks(2).run(compare_with_full_backwards_and_the_model_unsplit, family)
