"""Models that see or hear, or pass several tensors on; and what of their glue a dry run has to follow."""

from __future__ import annotations

import pytest
import torch
import transformers as hf

from pipelining_dualpipev.errors import SplitError
from pipelining_dualpipev.models import plan_split, verify
from pipelining_dualpipev.models.absent import Absent
from pipelining_dualpipev.models.calls import without_known
from pipelining_dualpipev.models.numbers import AbsentNumbers
from pipelining_dualpipev.models.roots import Root, pretending
from pipelining_dualpipev.models.verify import Chain
from tests.models.senses import batch_for, make


@pytest.mark.parametrize("name", ["qwen2_5_vl", "whisper", "gemma3n"])
def test_loss_and_every_gradient_are_those_of_the_unsplit_model(name):
    model, batch = make(name), batch_for(name, 2)
    plan = plan_split(model, 2, example=batch)
    assert max(len(boundary) for boundary in plan.boundaries) > 1
    report = verify(model, 2, batch)
    assert report.errors.keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    assert report.worst[1] < 1e-12, report
    assert report.loss_error < 1e-7  # in float32, and divided by another number


def test_layers_of_the_vision_tower_are_dealt_out_too():
    plan = plan_split(make("qwen2_5_vl"), 2, example=batch_for("qwen2_5_vl", 2))
    stages = {event.unit: event.stage for event in plan.events if event.is_layer}
    assert stages["model.visual.blocks.0"] == stages["model.visual.blocks.1"] == 0
    assert stages["model.visual.blocks.2"] == stages["model.language_model.layers.0"] == 1
    assert stages["model.language_model.layers.3"] == 3


def absent(values: list[int], *, known: bool) -> Absent:
    value = torch.tensor(values)
    return Absent(value.to("meta"), "cpu", frozenset({Root("input", "ids")}), value if known else None)


@pytest.mark.parametrize(
    "operation",
    [
        torch.repeat_interleave,
        lambda x: torch.repeat_interleave(x, x),
        lambda x: x.masked_select(x > 1),
        torch.bincount,
        lambda x: x.unique(),
        lambda x: (x > 1).nonzero(),
    ],
)
def test_a_shape_that_follows_from_known_values_is_right(operation):
    expected = operation(torch.tensor([1, 3, 2]))
    result = operation(absent([1, 3, 2], known=True))
    assert result.shape == expected.shape
    if isinstance(result, Absent):
        assert result.roots == {Root("input", "ids")}
    assert torch.equal(without_known(result), expected)


def test_a_shape_that_follows_from_values_that_are_not_there_is_an_error():
    with pytest.raises(SplitError, match="asks for the value of a tensor that another stage has"):
        torch.repeat_interleave(absent([1, 3, 2], known=False))
    with pretending("a unit") as used:
        assert torch.repeat_interleave(absent([1, 3, 2], known=False)).shape == (3,)
    assert used == {Root("input", "ids")}


def test_a_tensor_of_absent_numbers_is_absent():
    one, two = absent([1], known=True)[0], absent([2], known=True)[0]
    with AbsentNumbers():
        both = torch.tensor([[one], [two]], dtype=torch.int32)
    assert both.value.tolist() == [[1], [2]]
    assert both.dtype == torch.int32
    assert both.roots == {Root("input", "ids")}
    with AbsentNumbers():
        assert torch.tensor([one, absent([5], known=False)[0]]).value is None


def test_lists_of_absent_numbers_index_as_those_that_are_there_do():
    """UDOP marks the patches that lie under words so, in tuples of rows and of columns."""
    rows, columns = absent([0, 1], known=True), absent([2, 1], known=True)
    marked = torch.ones_like(absent([[0, 0, 0], [0, 0, 0]], known=False))  # follows from a shape, so it is known
    expected = torch.ones(2, 3, dtype=torch.long)
    expected[[0, 1], [2, 1]] = 7
    with AbsentNumbers():
        marked[tuple(rows), tuple(columns)] = 7
        found = marked[tuple(rows), [2, 1]]
    assert torch.equal(without_known(marked), expected)
    assert torch.equal(without_known(found), torch.tensor([7, 7]))
    assert marked.roots == {Root("input", "ids")}


def test_rows_that_a_layer_sorts_by_expert_are_split_into_as_many_as_there_are():
    """How many each expert gets is pretended in a dry run; they have to add up all the same."""
    config = hf.JetMoeConfig(
        vocab_size=37,
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=4,
        num_key_value_heads=2,
        kv_channels=4,
        num_local_experts=4,
    )
    torch.manual_seed(0)
    model = hf.JetMoeForCausalLM._from_config(config, experts_implementation="eager").double().train()
    report = verify(model, 2, batch_for("llama", 2))
    assert report.worst[1] < 1e-12, report


def test_inputs_that_a_model_writes_into_are_the_stages_own():
    """FSMT overwrites ignored labels, twice where two stages of a rank are given the same tensor."""
    config = hf.FSMTConfig(
        langs=["en", "de"],
        src_vocab_size=37,
        tgt_vocab_size=37,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_position_embeddings=32,
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
    )
    torch.manual_seed(0)
    model = hf.FSMTForConditionalGeneration._from_config(config).train()  # it cannot do double
    batch = batch_for("llama", 2)
    labels = batch["labels"].clone()
    chain = Chain(model, 2, batch)
    loss = chain.step(batch, 1)
    assert torch.equal(batch["labels"], labels)
    assert chain.plan.writes_in_place
    assert abs(loss - model(**batch).loss) < 1e-6


@pytest.mark.parametrize(("reduction", "over"), [("sum", "nothing"), ("mean", "rows")])
def test_a_ctc_loss_of_microbatches_is_that_of_the_batch(reduction, over):
    config = hf.Wav2Vec2Config(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=24,
        conv_dim=[8, 8],
        conv_stride=[4, 4],
        conv_kernel=[8, 4],
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        feat_extract_norm="layer",
        apply_spec_augment=False,
        layerdrop=0.0,
        ctc_loss_reduction=reduction,
        **dict.fromkeys(("hidden_dropout", "attention_dropout", "activation_dropout", "final_dropout"), 0.0),
        feat_proj_dropout=0.0,
    )
    torch.manual_seed(0)
    model = hf.Wav2Vec2ForCTC._from_config(config).double().train()
    labels = torch.randint(1, 20, (6, 5))
    labels[2:, 3:] = -100  # of different lengths
    batch = {"input_values": torch.randn(6, 400, dtype=torch.float64), "labels": labels}
    chain = Chain(model, 2, {name: value[:2] for name, value in batch.items()})
    assert chain.plan.loss.over == over
    loss = chain.step(batch, 3)
    expected = model(**batch).loss
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    found = chain.gradients()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-6, atol=1e-9)


def test_a_reversible_stack_is_refused_with_the_reason():
    """Reformer's layers run in an autograd function, whose backward no stage would come to: gradients would be lost."""
    config = hf.ReformerConfig(
        vocab_size=37,
        hidden_size=16,
        feed_forward_size=24,
        num_attention_heads=2,
        attention_head_size=8,
        attn_layers=["local"] * 4,
        local_attn_chunk_length=5,
        axial_pos_embds=False,
        max_position_embeddings=32,
        is_decoder=True,
    )
    model = hf.ReformerModelWithLMHead._from_config(config)
    told = r"is called by an autograd function \(_ReversibleFunction\), which .* so it cannot be split"
    with pytest.raises(SplitError, match=told):
        plan_split(model, 2, example=batch_for("llama", 2))
