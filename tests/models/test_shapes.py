"""Signatures of inputs: told by tensors without elements, and refused where the split would have to be another."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from pipelining_dualpipev import SplitError
from pipelining_dualpipev.models.shapes import decode, encode
from pipelining_dualpipev.models.verify import Chain

SIZES = st.integers(0, 2**40)


@given(st.lists(SIZES, max_size=12).map(tuple))
@example(())
@example((2, 4, 4096, 2, 4, 4096, 2, 4, 4096))
@example((3, 2**40, 2**40, 2**40))
def test_what_is_encoded_is_decoded_without_an_element(signature):
    told = encode(signature, torch.device("cpu"))
    assert all(tensor.numel() == 0 and tensor.untyped_storage().nbytes() == 0 for tensor in told)
    rest = torch.ones(3)
    assert decode([*told, rest]) == (signature, [rest])


def test_inputs_of_ordinary_sizes_take_one_tensor():
    assert len(encode((2, 8, 4096, 2, 8, 4096, 2, 8, 4096), torch.device("cpu"))) == 1


class MasksLongInputs(nn.Module):
    """Its third stage reads the mask, but only where there are more than two rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(3, 3)) for _ in range(4)])

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for index, layer in enumerate(self.layers):
            x = layer(x * mask if index == 2 and x.shape[0] > 2 else x)
        return (x,)


def test_shapes_for_which_the_model_would_be_split_otherwise_are_refused():
    model = MasksLongInputs()
    chain = Chain(model, 2, example={"x": torch.ones(2, 3), "mask": torch.ones(2, 1)})
    fits = {"x": torch.randn(1, 3), "mask": torch.zeros(1, 1)}
    torch.testing.assert_close(chain.forward(fits)[0][0], model(**fits)[0])
    with pytest.raises(SplitError, match=r"x \[4, 3\], mask \[4, 1\] stage 2 needs mask, which it did not"):
        chain.forward({"x": torch.ones(4, 3), "mask": torch.ones(4, 1)})
