"""One split, batches of all kinds: images come and go, shapes change, and values decide otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pipelining_dualpipev import SplitError
from pipelining_dualpipev.models import shapes
from pipelining_dualpipev.models.verify import Chain, compare
from tests.models.senses import make, with_images
from tests.models.zoo import make_batch, make_model

KINDS: dict[str, list[list[tuple[int, int]]]] = {
    "one each": [[(4, 4)], [(4, 4)]],
    "none": [[], []],
    "two and none": [[(4, 4), (2, 4)], []],
    "large and two": [[(4, 8)], [(4, 4), (4, 4)]],
    "as many patches in another shape": [[(2, 8)], [(4, 4)]],
}


def batch_of(kind: str, seed: int = 0) -> dict[str, torch.Tensor]:
    return with_images(KINDS[kind], torch.Generator().manual_seed(seed))


@pytest.fixture
def dry_runs(monkeypatch) -> list[Any]:
    """Grows by one with each plan that is made for other inputs than the example."""
    made: list[Any] = []
    make_plan = shapes.make_plan
    monkeypatch.setattr(shapes, "make_plan", lambda *args, **kwargs: made.append(args) or make_plan(*args, **kwargs))
    return made


@pytest.mark.slow
@pytest.mark.parametrize("example", ["one each", "none"])
def test_images_come_and_go(example, dry_runs):
    """Also with an example that had none: the tower for images is then on the first stage."""
    model = make("qwen2_5_vl")
    chain = Chain(model, 2, batch_of(example))
    towers = {e.stage for e in chain.plan.events if "visual" in e.unit}
    assert towers == ({0, 1} if example == "one each" else set())
    for seed in (1, 2):
        for kind in KINDS:
            found = compare(chain, model, batch_of(kind, seed))
            assert found.matches, f"{kind}: {found}"
            for stage in chain.stages.values():
                stage.zero_grad()
    # On each of two ranks, which have their own plans in this process too, and only for what is new. Other shapes of
    # as many patches come to the same plan, of which only the first stage makes sure.
    assert len(dry_runs) == 2 * (len(KINDS) - 2) + 1


class AddsAtTheEnd(nn.Module):
    """Where there are two inputs, a module comes last that is not called for one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4)) for _ in range(4)])
        self.extra = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, more: torch.Tensor | None = None) -> tuple[torch.Tensor]:
        for layer in self.layers:
            x = layer(x)
        return (x if more is None else self.extra(x + more),)


def test_where_the_place_of_a_module_is_no_longer_free_the_example_is_to_have_it():
    chain = Chain(AddsAtTheEnd(), 2, {"x": torch.randn(2, 4)})
    with pytest.raises(SplitError, match=r"more \[2, 4\].* stage 3, but stage 0 .* with an example that has all kinds"):
        chain.forward({"x": torch.randn(2, 4), "more": torch.randn(2, 4)})
    model = AddsAtTheEnd()
    both = {"x": torch.randn(2, 4), "more": torch.randn(2, 4)}
    chain = Chain(model, 2, both)
    for inputs in ({"x": both["x"]}, both):
        assert outputs_match(chain, model, inputs)


class CutsToLength(nn.Module):
    """Its rows become as long as the longest, which only values tell, and only long ones go through layer 2."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(5)])

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor]:
        longest = int(mask.sum(1).max())
        x = self.embed(ids)[:, :longest]
        for index, layer in enumerate(self.layers):
            if index != 2 or longest > 3:
                x = layer(x)
        return (x * mask[:, :longest, None],)


def rows(*lengths: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(sum(lengths))
    mask = (torch.arange(6) < torch.tensor(lengths)[:, None]).long()
    return {"ids": torch.randint(1, 8, mask.shape) * mask, "mask": mask}


def outputs_match(chain: Chain, model: nn.Module, inputs: dict[str, torch.Tensor]) -> bool:
    return chain.forward(inputs)[0][0].equal(model(**inputs)[0])


def test_values_that_lead_another_way_are_planned_for(dry_runs):
    model = CutsToLength()
    chain = Chain(model, 2, rows(2, 3))
    assert chain.plan.guards.names == {"mask"}
    assert chain.plan.assignment.holders["layers.2.0.weight"] == (1,), "with layer 1"
    for lengths in ((3, 2), (1, 5), (5, 5), (2, 4), (3, 1)):
        assert outputs_match(chain, model, rows(*lengths))
    # The longest is 5, once on each rank, and 4, which gives tensors of another shape.
    assert len(dry_runs) == 4


class Pools(nn.Module):
    """It halves the length of words and mask, as the strides of a speech model do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.embed(ids).unflatten(1, (-1, 2)).mean(2), mask.unflatten(1, (-1, 2)).any(2)


class SkipsForItsMask(nn.Module):
    """Its own code asks for a mask that a layer has computed, of the mask that is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pools()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4)) for _ in range(5)])

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor]:
        x, mask = self.pool(ids, mask)
        for index, layer in enumerate(self.layers):
            if index != 2 or not mask.all():
                x = layer(x) * mask[..., None]
        return (x,)


@pytest.mark.parametrize("example", [rows(2, 3), rows(6, 6)], ids=["padding", "none"])
def test_glue_may_decide_by_what_a_layer_computes_of_inputs_alone(example, dry_runs):
    """The first stage finds it out of the inputs before the step; the others look at what they receive."""
    model = SkipsForItsMask()
    chain = Chain(model, 2, example)
    assert chain.plan.guards.names == {"mask"}
    for lengths in ((6, 5), (4, 4), (6, 6), (2, 5), (5, 5)):
        assert outputs_match(chain, model, rows(*lengths))
    assert len(dry_runs) == 2, "the other way, once on each rank"


def test_what_was_seen_and_does_not_matter_is_not_planned_for_again(dry_runs):
    model, batch = make_model("llama"), make_batch(2)
    assert not batch["attention_mask"].all()
    chain = Chain(model, 2, {**batch, "attention_mask": torch.ones_like(batch["attention_mask"])})
    for length in (0, 1, 2, 3):
        batch["attention_mask"][1, -1 - length :] = 0
        assert compare(chain, model, batch).matches
        for stage in chain.stages.values():
            stage.zero_grad()
    assert len(dry_runs) == 1, "on the first stage, and only to see that it is the same plan"


class Halves(nn.Module):
    """It decides by values of ``more``, but only where there are more than two rows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        return self.inner(x[:2] if x.shape[0] > 2 and more.sum() < 0 else x)


class HalvesFirst(AddsAtTheEnd):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0] = Halves()

    def forward(self, x: torch.Tensor, more: torch.Tensor) -> tuple[torch.Tensor]:  # type: ignore[override]
        x = self.layers[0](x, more)
        for layer in self.layers[1:]:
            x = layer(x)
        return (x,)


def test_a_look_at_what_did_not_decide_for_the_example_is_no_guard():
    """Other ranks do not have it, so all plan with ones in its place."""
    model = HalvesFirst()
    chain = Chain(model, 2, {"x": torch.randn(2, 4), "more": torch.ones(2, 4)})
    assert chain.plan.decisive == set()
    for sign in (1, 1, -1):
        assert outputs_match(chain, model, {"x": torch.randn(3, 4), "more": sign * torch.rand(3, 4)})


class CountsInVain(AddsAtTheEnd):
    """It reads a number of its input to no purpose."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:  # type: ignore[override]
        float(x.sum())
        return super().forward(x)


def test_what_was_seen_otherwise_often_and_never_mattered_is_no_longer_looked_at(dry_runs):
    chain = Chain(CountsInVain(), 2, {"x": torch.zeros(2, 4)})
    for number in range(8):
        chain.forward({"x": torch.full((2, 4), float(number))})
    assert len(dry_runs) == shapes._SEEN_OTHERWISE


def test_what_the_example_had_may_be_left_out_as_with_the_model_itself():
    model, batch = make_model("llama"), make_batch(2)
    chain = Chain(model, 2, batch)
    without_mask = {name: value for name, value in batch.items() if name != "attention_mask"}
    assert compare(chain, model, without_mask).matches
    only_words = {"input_ids": batch["input_ids"]}
    torch.testing.assert_close(chain.forward(only_words)[0]["logits"], model(**only_words)["logits"], rtol=0, atol=0)


def test_a_rank_that_plans_otherwise_than_the_first_stage_says_so():
    chain = Chain(make_model("llama"), 2, make_batch(2))
    (told, *values) = chain.stages[0](**make_batch(2, length=9))
    chain.stages[1]._plans._skeletons[True].model.norm = nn.Identity()
    with pytest.raises(SplitError, match=r"input_ids \[2, 9\].* this rank plans otherwise than the first stage"):
        chain.stages[1](told, *values, attention_mask=make_batch(2, length=9)["attention_mask"])


def test_what_is_no_tensor_is_refused_by_name():
    chain = Chain(make_model("llama"), 2, make_batch(2))
    with pytest.raises(SplitError, match="the input 'use_cache' is a bool: give a step tensors"):
        chain.stages[0](**make_batch(2), use_cache=True)


@pytest.mark.slow
def test_plans_that_were_long_not_used_are_dropped_and_made_again(dry_runs, monkeypatch):
    monkeypatch.setattr(shapes, "_KEPT", 2)
    model = make_model("llama")
    chain = Chain(model, 2, make_batch(2))
    for length in (8, 9, 10, 8):
        inputs = {"input_ids": make_batch(2, length=length)["input_ids"]}
        torch.testing.assert_close(chain.forward(inputs)[0]["logits"], model(**inputs)["logits"], rtol=0, atol=0)
    assert len(dry_runs) == 2 * 4
