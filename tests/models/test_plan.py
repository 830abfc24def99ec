"""The plan, what it refuses, and what the split leaves alone."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from pipelining_dualpipev import SplitError
from pipelining_dualpipev.models import plan_split
from pipelining_dualpipev.models.absent import Absent
from pipelining_dualpipev.models.roots import Root
from pipelining_dualpipev.models.verify import Chain
from tests.models.unsplit import unsplit_microbatches, unsplit_step
from tests.models.zoo import CASTS_TO_FP32, CONFIGS, make_batch, make_model, microbatch

N = 2


def test_the_plan_in_words():
    words = plan_split(make_model("llama", layers=4), 2, example=make_batch(2)).explain()
    assert words.splitlines() == [
        "stage 0 (rank 0): model.embed_tokens, model.layers.0",
        "    2,544 parameters; reads attention_mask, input_ids",
        "    -> output 0 of model.layers.0 [2, 10, 16]: 2,560 bytes a microbatch",
        "stage 1 (rank 1): model.layers.1",
        "    1,952 parameters; reads attention_mask",
        "    -> output 0 of model.layers.1 [2, 10, 16]: 2,560 bytes a microbatch",
        "stage 2 (rank 1): model.layers.2",
        "    1,952 parameters; reads attention_mask",
        "    -> output 0 of model.layers.2 [2, 10, 16]: 2,560 bytes a microbatch",
        "stage 3 (rank 0): model.layers.3, model.norm, lm_head",
        "    2,560 parameters; reads attention_mask, labels",
    ]


def test_a_config_is_planned_without_weights():
    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=8192, intermediate_size=28672, num_hidden_layers=16, num_attention_heads=64
    )
    example = {"input_ids": torch.zeros(1, 128, dtype=torch.long)}
    plan = plan_split(config, 4, example=example)
    assert [root.name for root in plan.boundaries[3]] == ["model.layers.7"]
    assert plan.boundary_bytes(3) == 128 * 8192 * 4
    assert plan.required_inputs == [("input_ids",), *[()] * 7]


@pytest.mark.parametrize(("layers", "num_ranks", "remedy"), [(7, 4, "at most 3 ranks"), (3, 2, "at most 1 rank")])
def test_fewer_layers_than_stages(layers, num_ranks, remedy):
    with pytest.raises(SplitError, match=f"{layers} layers cannot fill {2 * num_ranks} stages: use {remedy}"):
        plan_split(make_model("llama", layers), num_ranks, example=make_batch(2))


def test_layers_are_dealt_out_evenly_and_in_order():
    for layers in range(6, 14):
        plan = plan_split(make_model("llama", layers), 3, example=make_batch(1))
        stages = [event.stage for event in plan.events if event.is_layer]
        assert stages == sorted(stages)
        counts = [stages.count(stage) for stage in range(6)]
        assert max(counts) - min(counts) <= 1
        assert sum(counts) == layers


@pytest.mark.parametrize("name", CONFIGS)
def test_the_model_is_left_as_it_is_and_can_be_split_again(name):
    model, batch = make_model(name), make_batch(2 * N)
    before, forwards = copy.deepcopy(model.state_dict()), [module.forward.__qualname__ for module in model.modules()]
    losses = [Chain(model, 2, example=microbatch(batch, 0, N)).step(batch, N) for _ in range(2)]
    assert losses[0] == losses[1]
    assert [module.forward.__qualname__ for module in model.modules()] == forwards
    assert not any("forward" in vars(module) for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    unsplit_step(model, batch)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_parameter_is_on_one_rank_and_every_weight_a_copy(name):
    model = make_model(name)
    chain = Chain(model, 2, example=make_batch(1))
    held: dict[str, set[int]] = {}
    ours = set()
    for stage, module in chain.stages.items():
        for parameter_name, parameter in module.model.named_parameters():
            held.setdefault(chain.plan.names[parameter_name], set()).add(min(stage, 3 - stage))
            ours.add(parameter)
    assert held.keys() == dict(model.named_parameters()).keys()
    assert all(len(ranks) == 1 for ranks in held.values())
    assert len(ours) == len(list(model.parameters())), "a tied parameter is one object"
    assert not ours & set(model.parameters())


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_on_meta_gets_its_weights_and_buffers_from_its_own_initialisation(name):
    batch = make_batch(2 * N)
    chain = Chain(make_model(name, dtype=torch.float32, device="meta"), 2, example=microbatch(batch, 0, N))
    loss = chain.step(batch, N)
    assert 2.5 < loss < 6, "about the logarithm of the vocabulary, as of a fresh model"
    # With these weights the model that was never on meta is the same, so that its buffers are the right ones.
    whole = make_model(name, dtype=torch.float32)
    state = {
        chain.plan.names[parameter_name]: parameter
        for stage in chain.stages.values()
        for parameter_name, parameter in stage.model.named_parameters()
    }
    with torch.no_grad():
        for parameter_name, parameter in whole.named_parameters():
            parameter.copy_(state[parameter_name])
    if "router loss" not in name:
        assert abs(unsplit_step(whole, batch)[0] - loss) < 10 * CASTS_TO_FP32 * loss


def test_an_input_that_has_not_reached_a_stage_is_named():
    chain = Chain(make_model("llama"), 2, example=make_batch(2))
    with pytest.raises(SplitError, match="stage 1 needs the input 'attention_mask', which the first stage was given"):
        chain.stages[1](*chain.stages[0](**make_batch(2)))


def test_a_hook_on_glue_is_refused_by_name():
    model = make_model("llama")
    model.model.register_forward_hook(lambda module, args, output: None)
    with pytest.raises(SplitError, match=r"^model \(LlamaModel\) has a hook"):
        plan_split(model, 2, example=make_batch(2))


@pytest.mark.parametrize("layer", range(7))
def test_hooks_of_a_layer_act_as_on_the_model_unsplit(layer):
    """On its own stage alone, also behind the stage's last layer, and on what the next stage is sent."""
    model = make_model("llama")
    called: list[str] = []

    def change(module, args, output):
        called.append("forward")
        return output * 1.5

    def note(module, grad_input, grad_output):
        called.append("backward")

    model.model.layers[layer].register_forward_hook(change)
    model.model.layers[layer].register_full_backward_hook(note)
    batch = make_batch(2 * N)
    expected_loss, expected = unsplit_microbatches(model, batch, N, shift=1)
    chain = Chain(model, 2, example=microbatch(batch, 0, N))
    called.clear()
    assert torch.allclose(chain.step(batch, N).double(), expected_loss, rtol=CASTS_TO_FP32)
    gradients = chain.gradients()
    assert gradients.keys() == expected.keys()
    for name, grad in expected.items():
        assert torch.allclose(gradients[name], grad, rtol=CASTS_TO_FP32, atol=1e-9), name
    assert called == ["forward", "backward"] * N


class Outer(nn.Module):
    """A model whose own forward looks at what a layer gave, or writes it into a tensor of its own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(3, 3)) for _ in range(4)])
        self.kind = kind

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for layer in self.layers[:3]:
            x = layer(x)
        if self.kind == "looks" and x.sum() > 0:
            x = x * 2
        if self.kind == "writes":
            own = torch.zeros(x.shape)
            own[:] = x
            x = own
        return (self.layers[3](x),)


class Remembers(nn.Module):
    """A layer that writes what it computes into a dict and a list of its caller's, and uses what others wrote."""

    def __init__(self, index: int, reads_data: bool) -> None:
        super().__init__()
        self.inner, self.index, self.reads_data = nn.Linear(3, 3), index, reads_data

    def forward(self, x: torch.Tensor, notes: dict, mask: torch.Tensor) -> torch.Tensor:
        x = self.inner(x).tanh() + notes["known"]["ones"] * mask
        for earlier in (notes.get(self.index - 1), notes.get(self.index - 3), *notes["all"]):
            if earlier is not None:
                x = x + earlier
        notes[self.index] = 2 * x
        notes["all"].append(x * notes["calls"])
        notes["calls"] += 1 if not self.reads_data else int(x.abs().sum() > -1) + int(x.sum() > 1e6)
        return x


class Sharing(nn.Module):
    """A model whose layers share a dict, in which glue has put what it knows on every stage."""

    def __init__(self, reads_data: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Remembers(index, reads_data and index == 5) for index in range(8)])

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        notes = {"calls": 1, "all": [], "known": {"ones": torch.ones_like(x)}}
        for layer in self.layers:
            x = layer(x, notes, mask)
        return (x,)


def test_what_a_layer_writes_into_a_dict_reaches_later_layers_of_its_stage_and_of_others():
    """A stage passed its layers a copy of a dict in which it had put real tensors for known ones: a write was lost."""
    model, x, mask = Sharing().double(), torch.randn(2, 3).double(), torch.rand(2, 3).double()
    chain = Chain(model, 2, example={"x": x, "mask": mask})
    output, received, sent = chain.forward({"x": x, "mask": mask})
    expected = model(x, mask)[0]
    torch.testing.assert_close(output[0], expected)
    expected.sum().backward()
    output[0].sum().backward()
    for stage in (2, 1, 0):
        torch.autograd.backward(
            [out for out, into in zip(sent[stage], received[stage + 1], strict=True) if into.grad is not None],
            [into.grad for into in received[stage + 1] if into.grad is not None],
        )
    for name, gradient in chain.gradients().items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad)


def test_a_number_that_follows_from_data_is_refused_where_it_is_not_as_planned():
    """The dry run has no data and takes the number for another one, which other stages would go on with."""
    inputs = {"x": torch.randn(2, 3), "mask": torch.rand(2, 3)}
    chain = Chain(Sharing(reads_data=True), 2, example=inputs)
    with pytest.raises(SplitError, match=r"layers\.5 gave 7, in the plan it was 8: .* let it give a tensor"):
        chain.forward(inputs)


def test_a_forward_that_looks_at_what_another_stage_has_is_refused():
    with pytest.raises(SplitError, match=r"asks for the value of a tensor that another stage has .*model|layers.2"):
        plan_split(Outer("looks"), 2, example={"x": torch.ones(2, 3)})


def test_what_glue_copies_into_a_tensor_of_its_own_travels_to_whoever_uses_it():
    model = Outer("writes")
    chain = Chain(model, 2, example={"x": torch.ones(2, 3)})
    x = torch.randn(2, 3)
    output, _, _ = chain.forward({"x": x})
    torch.testing.assert_close(output[0], model(x)[0])


class Twice(Outer):
    def forward(self, x):
        for layer in (*self.layers, self.layers[0]):
            x = layer(x)
        return (x,)


def share_across_ranks() -> Outer:
    model = Outer("")
    model.layers[1][0].weight = model.layers[3][0].weight
    return model


@pytest.mark.parametrize(
    ("make", "tied"),
    [
        (share_across_ranks, {"layers.1.0.weight": (1, 3)}),
        (lambda: Twice(""), {"layers.0.0.weight": (0, 3), "layers.0.0.bias": (0, 3)}),
    ],
    ids=["shared", "called twice"],
)
def test_what_layers_on_several_stages_share_is_held_by_each_and_its_gradients_are_summed(make, tied):
    model, x = make(), torch.randn(2, 3)
    chain = Chain(model, 2, example={"x": torch.ones(2, 3)})
    assert chain.plan.tied_stages() == tied
    chain.step({"x": x}, 1, lambda output, _: output[0].square().sum())
    model(x)[0].square().sum().backward()
    found = chain.gradients()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)


class Within(Outer):
    def forward(self, x):
        for layer in self.layers:
            x = layer[0](x)
        return (x,)


def test_layers_past_which_what_is_within_them_is_called_are_told():
    with pytest.raises(SplitError, match=r"calls none of its 4 layers \(layers\.0, \.\.\.\), but maybe"):
        plan_split(Within(""), 2, example={"x": torch.ones(2, 3)})


class Reversible(Outer):
    class _Stack(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, model):
            for layer in model.layers:
                x = layer(x)
            return x

        @staticmethod
        def backward(ctx, grad):
            raise NotImplementedError

    def forward(self, x):
        return (self._Stack.apply(x, self),)


def test_layers_whose_gradients_an_autograd_function_computes_are_refused_rather_than_lost():
    with pytest.raises(SplitError, match=r"layers\.0 is called by an autograd function \(_Stack\), which computes"):
        plan_split(Reversible(""), 2, example={"x": torch.ones(2, 3)})


def test_what_is_made_from_an_absents_shape_is_known_until_it_is_written():
    absent = Absent.like(torch.empty(2, 3), "cpu", Root("input", "x"))
    known = torch.ones_like(absent)
    assert known.sum().item() == 6
    assert type(known * torch.ones(3)) is torch.Tensor
    view = known[0]
    view.copy_(absent[0])
    with pytest.raises(SplitError, match="from input x"):
        known.sum().item()
    with pytest.raises(SplitError, match="writes what another stage has"):
        torch.zeros(2, 3).copy_(absent)


def test_experts_in_one_operation_are_planned_in_float32():
    """The grouped product has kernels for float32, but the one for meta that the dry run calls takes bfloat16 alone."""
    config = CONFIGS["qwen3_moe"][0](4)
    model = transformers.AutoModelForCausalLM.from_config(
        config, experts_implementation="grouped_mm", dtype=torch.float32
    )
    batch = make_batch(4)
    chain = Chain(model, 2, example=microbatch(batch, 0, 2))
    loss, gradients = unsplit_step(model, batch)
    assert chain.step(batch, 2) == pytest.approx(loss.item(), rel=1e-6)
    for name, gradient in chain.gradients().items():
        torch.testing.assert_close(gradient, gradients[name], rtol=1e-4, atol=1e-6)


A_LARGE_MODEL = """
import resource
import sys
import torch
from transformers import LlamaConfig
from pipelining_dualpipev.models import plan_split
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
config = LlamaConfig(vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
                     num_attention_heads=64, num_key_value_heads=8, max_position_embeddings=8192)
ids = torch.ones(1, 4096, dtype=torch.long)
before = peak()
plan = plan_split(config, 8, example={"input_ids": ids, "attention_mask": ids, "labels": ids})
held = sum(plan.parameter_sizes[name][0].numel() for stage in range(16) for name in plan.local_parameters(stage))
print(held, len(plan.boundaries), peak() - before)
"""


@pytest.mark.slow
def test_a_model_of_70_billion_parameters_is_planned_in_less_than_a_gigabyte():
    done = subprocess.run(
        [sys.executable, "-c", A_LARGE_MODEL],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=Path(__file__).parents[2],
    )
    held, boundaries, taken = map(int, done.stdout.split())
    assert held > 70e9
    assert boundaries == 15
    assert taken < 1e9, done.stderr


def test_a_number_of_labels_that_the_loss_would_not_heed_is_refused():
    example = {**make_batch(2), "num_items_in_batch": 37}
    with pytest.raises(SplitError, match="counts the labels of each batch itself: leave 'num_items_in_batch' out"):
        plan_split(make_model("llama"), 2, example=example)
