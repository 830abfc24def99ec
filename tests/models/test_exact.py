"""A split model is the model: its loss and every gradient, with padding that differs between microbatches."""

from __future__ import annotations

import copy

import pytest
import torch

from pipelining_dualpipev.models.verify import Chain
from tests.models.unsplit import unsplit_microbatches, unsplit_step
from tests.models.zoo import CASTS_TO_FP32, CONFIGS, EXACT, make_batch, make_model, microbatch

N = 3
SHIFT = {"t5": 0}  # the others predict the next token


def assert_same(ours, theirs, tolerance: float) -> None:
    (our_loss, found), (loss, gradients) = ours, theirs
    assert abs(our_loss - loss) <= tolerance * abs(loss)
    assert found.keys() == gradients.keys()
    for parameter, gradient in gradients.items():
        error = (found[parameter] - gradient).abs().max() / gradient.abs().max().clamp_min(1e-12)
        assert error <= tolerance, f"{parameter} is off by {error:.1e}"


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", [name for name in CONFIGS if "router loss" not in name])
def test_loss_and_every_gradient_are_those_of_the_unsplit_model(name, num_ranks):
    model, batch = make_model(name), make_batch(2 * N)
    chain = Chain(model, num_ranks, example=microbatch(batch, 0, N))
    ours = chain.step(batch, N), chain.gradients()
    assert_same(ours, unsplit_step(model, batch), CASTS_TO_FP32)
    # The causal loss of a microbatch is divided by another number, in fp32; T5's is multiplied, in fp64.
    exact = EXACT if name == "t5" else 1e-7
    assert_same(ours, unsplit_microbatches(model, batch, N, SHIFT.get(name, 1)), exact)


def test_a_microbatch_whose_labels_are_all_ignored_gives_nothing():
    for name in ("llama", "t5"):
        model, batch = make_model(name), make_batch(2 * N)
        batch["labels"][:2] = -100
        chain = Chain(model, 2, example=microbatch(batch, 0, N))
        chain.loss_fn.prepare(list(batch["labels"].chunk(N)))
        output, _, _ = chain.forward(microbatch(batch, 0, N))
        loss = chain.loss_fn(output, batch["labels"][:2])
        assert loss == 0
        loss.backward()
        assert all((gradient == 0).all() for gradient in chain.gradients().values())
        for stage in chain.stages.values():
            stage.zero_grad()
        assert_same((chain.step(batch, N), chain.gradients()), unsplit_step(model, batch), CASTS_TO_FP32)


def test_a_batch_without_any_label_gives_nothing():
    model, batch = make_model("llama"), make_batch(2 * N)
    batch["labels"][:] = -100
    chain = Chain(model, 2, example=microbatch(batch, 0, N))
    assert chain.step(batch, N) == 0
    assert all((gradient == 0).all() for gradient in chain.gradients().values())


def test_router_losses_are_averaged_over_microbatches_as_gradient_accumulation_does():
    name = "mixtral with router loss"
    model, batch = make_model(name), make_batch(2 * N)
    plain = copy.deepcopy(model)
    total = (batch["labels"][:, 1:] != -100).sum()
    expected = torch.zeros((), dtype=torch.float64)
    for index in range(N):
        inputs = microbatch(batch, index, N)
        loss = plain(**inputs, use_cache=False, num_items_in_batch=total / N).loss / N
        loss.backward()
        expected += loss.detach()
    chain = Chain(model, 2, example=microbatch(batch, 0, N))
    ours = chain.step(batch, N), chain.gradients()
    assert_same(ours, (expected, {n: p.grad for n, p in plain.named_parameters()}), 1e-7)
    without_router_loss = chain.step(batch, N) - 0.1 * chain.forward(microbatch(batch, 0, N))[0].aux_loss
    assert without_router_loss < ours[0], "the router loss is part of it"


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_gives_the_same_gradients(name, reentrant):
    model, batch = make_model(name), make_batch(2 * N)
    expected = unsplit_microbatches(model, batch, N, 1)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    chain = Chain(model, 2, example=microbatch(batch, 0, N))
    assert_same((chain.step(batch, N), chain.gradients()), expected, 1e-7)


def test_a_mask_that_the_example_did_not_need_is_obeyed():
    """An example without padding takes another way through the masks than a batch with it: values do not matter."""
    model, batch = make_model("llama"), make_batch(2 * N)
    example = {name: torch.ones_like(tensor) for name, tensor in microbatch(batch, 0, N).items()}
    chain = Chain(model, 2, example=example)
    assert all("attention_mask" in stage.required_inputs for stage in chain.stages.values())
    assert_same((chain.step(batch, N), chain.gradients()), unsplit_step(model, batch), CASTS_TO_FP32)


def test_without_a_mask_none_is_required():
    model, batch = make_model("llama"), make_batch(2 * N)
    del batch["attention_mask"]
    chain = Chain(model, 2, example=microbatch(batch, 0, N))
    assert [chain.stages[s].required_inputs for s in range(1, 4)] == [(), (), ("labels",)]
    assert chain.plan.required_inputs == [("input_ids",), (), (), ("labels",)]
    assert {"input_ids", "labels"} <= set(chain.stages[0].required_inputs), "it may be given all"
    assert_same((chain.step(batch, N), chain.gradients()), unsplit_step(model, batch), CASTS_TO_FP32)


def test_an_encoder_decoders_second_embedding_is_looked_up_where_the_first_is():
    model, batch = make_model("t5"), make_batch(2 * N)
    chain = Chain(model, 2, example=microbatch(batch, 0, N))
    stage_of = {event.unit: event.stage for event in chain.plan.events}
    assert stage_of["encoder.embed_tokens"] == stage_of["decoder.embed_tokens"] == 0
    assert stage_of["lm_head"] == 3
    first, last = chain.stages[0].model, chain.stages[3].model
    assert first.decoder.embed_tokens.weight is last.lm_head.weight
    assert [("labels" in chain.stages[s].required_inputs) for s in range(4)] == [True, False, False, True]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3", "t5", "gpt2", "deepseek_v3"])
def test_inputs_of_other_shapes_are_planned_anew(name):
    """Also for stages that read no input by value, and back again; the stages that the plans belong to stay."""
    model, batch = make_model(name), make_batch(2 * N)
    del batch["attention_mask"]
    chain = Chain(model, 2, example=microbatch(batch, 0, N))
    for rows, length in ((N, 7), (2 * N, 10), (4 * N, 13), (N, 7)):
        batch = make_batch(rows, length=length)
        del batch["attention_mask"]
        for stage in chain.stages.values():
            stage.zero_grad()
        ours = chain.step(batch, N), chain.gradients()
        assert_same(ours, unsplit_microbatches(model, batch, N, SHIFT.get(name, 1)), CASTS_TO_FP32)


def test_planning_anew_draws_no_random_number():
    model, batch = make_model("llama"), make_batch(2 * N)
    chain = Chain(model, 2, example=microbatch(batch, 0, N))
    longer = make_batch(2, length=14)
    chain.loss_fn.prepare([longer["labels"]])
    before = torch.get_rng_state()
    chain.forward(longer)
    assert torch.equal(torch.get_rng_state(), before)
