"""`verify` tells a split that is the model from one that is not, and names the parameter."""

from __future__ import annotations

import math

import pytest
import torch

from pipelining_dualpipev.models import verify
from pipelining_dualpipev.models.stage import StageModule
from pipelining_dualpipev.models.verify import _error
from tests.models.zoo import make_batch, make_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama tied", "gpt2", "gpt_oss"])
def test_a_split_that_is_right(name, dtype):
    model = make_model(name, dtype=dtype).eval()
    report = verify(model, 2, make_batch(4))
    assert report.matches, report
    assert report.errors.keys() == {name for name, _ in model.named_parameters()}
    assert str(report).startswith("the split model is the model: loss ")
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_loss_of_a_model_that_gives_a_tuple_is_its_first():
    model = make_model("llama").eval()

    class Plain(type(model)):  # type: ignore[misc]
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs).to_tuple()

    model.__class__ = Plain
    assert verify(model, 2, make_batch(4)).matches


def test_a_boundary_that_cuts_the_gradient_off_is_found(monkeypatch):
    outgoing = StageModule._outgoing

    def detached(self: StageModule, root, run):
        value = outgoing(self, root, run)
        return value.detach() if self._stage == 1 else value

    monkeypatch.setattr(StageModule, "_outgoing", detached)
    report = verify(make_model("llama").eval(), 2, make_batch(4))
    assert not report.matches
    assert report.worst[1] == math.inf
    assert report.loss_error == 0
    lacking = {name for name, error in report.errors.items() if error == math.inf}
    assert "model.embed_tokens.weight" in lacking
    assert "lm_head.weight" not in lacking
    assert "NOT the model" in str(report)


def test_a_gradient_that_is_a_little_off_is_found_and_named(monkeypatch):
    outgoing = StageModule._outgoing

    def scaled(self: StageModule, root, run):
        value = outgoing(self, root, run)
        if self._stage == 0:
            value.register_hook(lambda gradient: gradient * 1.01)
        return value

    monkeypatch.setattr(StageModule, "_outgoing", scaled)
    report = verify(make_model("llama").eval(), 2, make_batch(4))
    assert not report.matches
    name, error = report.worst
    assert name.startswith(("model.embed_tokens", "model.layers.0.", "model.layers.1."))
    assert error == pytest.approx(0.01, rel=0.1)


def test_what_rounding_leaves_of_a_gradient_that_is_zero_is_not_compared():
    """Attention to one place has none, and what is computed of it is noise that differs."""
    noise = torch.full((3,), 1e-20, dtype=torch.float64)
    assert _error(noise, -noise, largest=1.0) == 0
    assert _error(noise, -noise, largest=1e-18) == 2
    assert _error(1e9 * noise, noise, largest=1.0) > 1e-6
    assert _error(noise, 1e9 * noise, largest=1.0) == pytest.approx(1)
    empty = torch.empty(0)
    assert _error(empty, empty, largest=1.0) == 0
    assert _error(None, noise, largest=1.0) == math.inf


def test_what_it_needs_is_told():
    model, batch = make_model("llama"), make_batch(4)
    with pytest.raises(ValueError, match="has input_ids, attention_mask and no labels"):
        verify(model, 2, {name: value for name, value in batch.items() if name != "labels"})
    with pytest.raises(TypeError, match="plain layers have no loss of their own"):
        verify(torch.nn.Sequential(model), 2, batch)
    model(**batch).loss.backward()
    with pytest.raises(ValueError, match=r"would be lost: clear them by model.zero_grad\(\)"):
        verify(model, 2, batch)
