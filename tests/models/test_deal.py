"""Which layers go on which stage: dealt out by what they cost, by their parameters, or as one is told."""

from __future__ import annotations

import pytest
import transformers
from torch import nn

from pipelining_dualpipev import SplitError
from pipelining_dualpipev.models import plan_split
from pipelining_dualpipev.models.plan import SplitPlan
from pipelining_dualpipev.models.shapes import Plans
from pipelining_dualpipev.models.surgery import make_skeleton
from tests.models.zoo import make_batch, make_model

BATCH = make_batch(2)


def with_a_large_head(layers: int = 12, tied: bool = False) -> nn.Module:
    """A head that takes as much as two layers."""
    config = transformers.LlamaConfig(
        vocab_size=320,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config)


def layers_of_stages(plan: SplitPlan) -> list[list[int]]:
    layers = [event for event in plan.events if event.is_layer]
    return [[i for i, event in enumerate(layers) if event.stage == stage] for stage in range(plan.num_stages)]


def per_rank(stages: list[list[int]]) -> list[int]:
    return [len(stages[rank]) + len(stages[-1 - rank]) for rank in range(len(stages) // 2)]


def test_a_head_that_costs_much_leaves_fewer_layers_to_its_rank():
    plan = plan_split(with_a_large_head(), 2, example=BATCH, balance="cost")
    flops = [event.flops for event in plan.events]
    layer, head = flops[1], flops[-1]
    assert flops[0] == 0  # the embedding looks up
    assert head == 2 * 20 * 16 * 320  # a multiplication and an addition for each of 20 tokens, 16 x 320
    stages = layers_of_stages(plan)
    assert [number for stage in stages for number in stage] == list(range(12))
    first, second = per_rank(stages)
    assert abs((first * layer + head) - second * layer) <= layer
    assert per_rank(layers_of_stages(plan_split(with_a_large_head(), 2, example=BATCH))) == [6, 6]


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_shared_out_with_both_ends_on_rank_0_and_tied_ones_once(tied):
    model = with_a_large_head(16, tied=tied)
    plan = plan_split(model, 2, example=BATCH, balance="parameters")
    stages = layers_of_stages(plan)
    assert [number for stage in stages for number in stage] == list(range(16))
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    ends = 320 * 16 * (1 if tied else 2)
    first, second = per_rank(stages)
    assert abs(first * layer + ends - second * layer) <= layer


def test_cuts_are_taken_as_they_are_and_kept_for_inputs_of_other_shapes():
    model = make_model("llama", 7)
    plan = plan_split(model, 2, example=BATCH, balance=[1, 5, 6])
    assert layers_of_stages(plan) == [[0], [1, 2, 3, 4], [5], [6]]
    longer = make_batch(2, length=14)
    plans = Plans(make_skeleton(model), plan)
    again = plans.get(plans.find(longer), longer)
    assert again.assignment.holders == plan.assignment.holders
    assert layers_of_stages(again) == layers_of_stages(plan)


def test_layers_of_an_encoder_and_a_decoder_are_in_one_row():
    plan = plan_split(make_model("t5", 6), 2, example=make_batch(2), balance="cost")
    stages = layers_of_stages(plan)
    assert [number for stage in stages for number in stage] == list(range(sum(map(len, stages))))


def test_plain_layers_are_dealt_out_by_parameters_or_cuts():
    layers = [nn.Linear(8, 8 * width) for width in (1, 1, 1, 1, 9, 1)]
    assert list(plan_split(layers, 2, balance=[2, 3, 5]).stage_of.values()) == [0, 0, 1, 2, 2, 3]
    by_parameters = list(plan_split(layers, 2, balance="parameters").stage_of.values())
    assert by_parameters == sorted(by_parameters)
    heavy = min(by_parameters[4], 3 - by_parameters[4])
    assert sum(min(stage, 3 - stage) == heavy for stage in by_parameters) == 2  # the heavy one, and one per other stage


@pytest.mark.parametrize(
    ("balance", "words"),
    [
        ([1, 2], "2 cuts, 4 stages need 3"),
        ([1, 1, 3], r"balance is \[1, 1, 3\], which leaves a stage without a layer"),
        ([0, 2, 3], "rising from 1 to at most 6"),
        ([2, 3, 7], "the last of the 7 layers"),
        ("evenly", "balance is 'evenly': give 'uniform', 'cost', 'parameters', or a list of cuts"),
    ],
)
def test_what_is_no_balance_is_told(balance, words):
    with pytest.raises(SplitError, match=words):
        plan_split(make_model("llama", 7), 2, example=BATCH, balance=balance)


def test_what_is_not_known_of_plain_layers_is_told():
    with pytest.raises(SplitError, match="balance='cost' needs what is not known of these layers"):
        plan_split([nn.Linear(2, 2)] * 4, 1, balance="cost")
    with pytest.raises(SplitError, match="balance='parameters' needs"):
        plan_split([lambda: nn.Linear(2, 2)] * 4, 1, balance="parameters")
    with pytest.raises(SplitError, match="no layer has any"):
        plan_split([nn.Tanh()] * 4, 1, balance="parameters")
