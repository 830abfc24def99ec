"""Outputs of microbatches are put together, also where these are not alike."""

from __future__ import annotations

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from pipelining_dualpipev.runtime.microbatches import merge_outputs


def test_what_only_some_microbatches_have_is_listed_by_microbatch():
    """Rank 0 alone raised after a step that had trained, over the outputs of rows with and without images."""
    images = (torch.ones(3),)
    merged = merge_outputs(
        [
            CausalLMOutputWithPast(loss=torch.tensor(1.0), logits=torch.zeros(2, 4)),
            CausalLMOutputWithPast(loss=torch.tensor(2.0), logits=torch.ones(1, 4), hidden_states=images),
        ]
    )
    assert isinstance(merged, CausalLMOutputWithPast)
    assert merged.loss.tolist() == [1.0, 2.0]
    assert merged.logits.tolist() == [[0.0] * 4] * 2 + [[1.0] * 4]
    assert merged.hidden_states == [None, images]


def test_outputs_that_have_nothing_in_common_are_listed():
    outputs = [torch.ones(2), (torch.ones(2), torch.ones(1))]
    assert merge_outputs(outputs) == outputs
