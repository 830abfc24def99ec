"""I and then W are a plain backward for models of many families: to the bit for one microbatch."""

from __future__ import annotations

import copy

import pytest

from pipelining_dualpipev.runtime.weight_grad import AtOperations
from tests.models.families import FAMILIES, make_tiny
from tests.models.zoo import make_batch
from tests.runtime.test_weight_grad import assert_same_gradients, split_backward

# A parameter that three modules of one stage share is summed in another order; products with an x that is not
# contiguous go another way through matmul.
NOT_TO_THE_BIT = {"bart": "shared.weight", "mt5": "shared.weight", "pegasus": "shared.weight", "mamba": "_proj.weight"}
# There experts are gathered into a stack of their own, whose gradient is no window's: it is done at once, in I.
AT_ONCE = "batched_mm"
CASES = [*((family, "eager") for family in FAMILIES), ("mixtral", AT_ONCE), ("qwen3_moe", AT_ONCE)]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "experts"), CASES)
def test_models_of_hugging_face_are_right_to_the_bit(family, experts):
    model, batches = make_tiny(family, experts=experts), [make_batch(2, seed) for seed in range(3)]
    plain, deferred = copy.deepcopy(model), AtOperations(model)
    put_off = []
    for batch in batches:
        plain(**batch, use_cache=False).loss.backward()
        put_off.append(split_backward(deferred, lambda batch=batch: model(**batch, use_cache=False).loss))
        if len(put_off) == 1:
            waiting = {name: p.numel() for name, p in model.named_parameters() if p.grad is None}
            if experts == AT_ONCE:
                assert waiting
                assert not any("experts" in name for name in waiting)
            else:
                assert sum(waiting.values()) > 0.5 * sum(p.numel() for p in model.parameters())
            put_off[0]()
            assert_same_gradients(model, plain, but=NOT_TO_THE_BIT.get(family))
    for work in put_off[1:]:
        work()
    assert_same_gradients(model, plain, 1e-13)
