"""The model's own switches do on stages what they do on the model, thrown before the split or after it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pipelining_dualpipev import SplitError
from pipelining_dualpipev.models.verify import Chain
from tests.models.unsplit import unsplit_microbatches
from tests.models.zoo import make_batch, make_model, microbatch

N = 2
LAYERS = 4
SHIFT = {"t5": 0}
Switch = Callable[[Any], object]


def make_chain(model: nn.Module, batch: dict[str, torch.Tensor]) -> Chain:
    return Chain(model, 2, example=microbatch(batch, 0, N))


def assert_alike(chain: Chain, model: nn.Module, batch: dict[str, torch.Tensor], tolerance: float, shift: int) -> None:
    """The chain does on a batch what the model does."""
    loss, found = chain.step(batch, N), chain.gradients()
    expected_loss, expected = unsplit_microbatches(model, batch, N, shift)
    assert abs(loss - expected_loss) <= tolerance * expected_loss
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert found[name].dtype == gradient.dtype, name
        error = (found[name] - gradient).abs().max() / gradient.abs().max().clamp_min(1e-12)
        assert error <= tolerance, f"{name} is off by {error:.1e}"


def thrown(model: nn.Module, switch: Switch, when: str, batch: dict[str, torch.Tensor]) -> Chain:
    """The model's stages with a switch thrown on the model before the split, or on each stage's model after it."""
    if when == "before":
        switch(model)
        return make_chain(model, batch)
    chain = make_chain(model, batch)
    for stage in chain.stages.values():
        switch(stage.model)
    switch(model)
    return chain


WHEN = pytest.mark.parametrize("when", ["before", "after"])


@WHEN
@pytest.mark.parametrize(
    ("name", "dtype"), [("llama tied", torch.bfloat16), ("gpt_oss", torch.bfloat16), ("t5", torch.float32)]
)
def test_another_type(name, dtype, when):
    model, batch = make_model(name, LAYERS), make_batch(2 * N)
    chain = thrown(model, lambda model: model.to(dtype), when, batch)
    assert_alike(chain, model, batch, 1e-5 if dtype == torch.float32 else 0.05, SHIFT.get(name, 1))
    if when == "after":
        first, last = chain.stages[0].model, chain.stages[3].model
        assert first.get_input_embeddings().weight.dtype == dtype
        if name == "llama tied":
            assert first.get_input_embeddings().weight is last.lm_head.weight


@WHEN
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant, when):
    model, batch = make_model("llama", LAYERS), make_batch(2 * N)
    calls: list[str] = []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda module, args: calls.append("mlp"))
    enable: Switch = lambda model: model.gradient_checkpointing_enable({"use_reentrant": reentrant})  # noqa: E731
    chain = thrown(model, enable, when, batch)
    calls.clear()
    assert_alike(chain, model, batch, 1e-7, 1)
    assert len(calls) == 4 * N * LAYERS, "each layer is run again in the backward, by the chain and by the model"


@WHEN
def test_training_and_evaluation(when):
    model, batch = make_model("gpt2", LAYERS), make_batch(2 * N)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    chain = thrown(model, lambda model: model.eval(), when, batch)
    assert_alike(chain, model, batch, 1e-7, 1)
    before = chain.step(batch, N)
    for stage in chain.stages.values():
        stage.train()
    assert abs(chain.step(batch, N) - before) > 1e-3, "dropout draws"


@WHEN
@pytest.mark.parametrize(("name", "attention"), [("llama", "eager"), ("gpt2", "eager"), ("qwen3", "eager")])
def test_another_attention(name, attention, when):
    model, batch = make_model(name, LAYERS), make_batch(2 * N)
    chain = thrown(model, lambda model: model.set_attn_implementation(attention), when, batch)
    assert_alike(chain, model, batch, 1e-7, 1)


@WHEN
@pytest.mark.parametrize(("name", "experts"), [("qwen3_moe", "batched_mm"), ("mixtral", "batched_mm")])
def test_another_way_through_the_experts(name, experts, when):
    model, batch = make_model(name, LAYERS), make_batch(2 * N)
    chain = thrown(model, lambda model: model.set_experts_implementation(experts), when, batch)
    assert_alike(chain, model, batch, 1e-7, 1)


class Adapter(nn.Module):
    """A product of low rank beside a linear module whose own weight is frozen."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False, dtype=base.weight.dtype)
        self.up = nn.Linear(2, base.out_features, bias=False, dtype=base.weight.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("first", [0, 2], ids=["in all layers", "behind the fold"])
def test_adapters(first):
    model, batch = make_model("llama", LAYERS), make_batch(2 * N)
    model.requires_grad_(False)
    for layer in model.model.layers[first:]:
        layer.self_attn.q_proj = Adapter(layer.self_attn.q_proj)
        layer.mlp.down_proj = Adapter(layer.mlp.down_proj)
    chain = make_chain(model, batch)
    assert_alike(chain, model, batch, 1e-7, 1)
    assert all(".up." in name or ".down." in name for name in chain.gradients())


@WHEN
@pytest.mark.parametrize("where", ["model.layers.1", "model.layers.2.mlp", "model.norm", "lm_head"])
def test_hooks_on_units_and_below(where, when):
    model, batch = make_model("llama", LAYERS), make_batch(2 * N)
    seen: list[str] = []

    def hook(model: Any) -> None:
        module = model.get_submodule(where)
        module.register_forward_pre_hook(lambda module, args: seen.append("before"))
        module.register_forward_hook(lambda module, args, output: output * 1.5)
        module.register_full_backward_hook(lambda module, grad_input, grad_output: seen.append("backward"))

    chain = thrown(copy.deepcopy(model), hook, when, batch)
    seen.clear()
    chain.step(batch, N)
    assert seen == ["before", "backward"] * N, "on its own stage alone"
    hook(model)
    for stage in chain.stages.values():
        stage.zero_grad()
    assert_alike(chain, model, batch, 1e-7, 1)


def test_a_hook_on_glue_of_a_stage_is_refused_when_it_runs():
    """Most stages leave its forward early, so it would run on some and not on others."""
    batch = make_batch(2 * N)
    chain = make_chain(make_model("llama", LAYERS), batch)
    chain.stages[1].model.model.register_forward_hook(lambda module, args, output: None)
    with pytest.raises(SplitError, match=r"^model \(LlamaModel\) has a hook"):
        chain.step(batch, N)
