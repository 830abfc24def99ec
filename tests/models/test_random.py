"""Random numbers that a forward draws outside of its layers: every stage runs that code, and is to have the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers as hf
from torch import nn

from pipelining_dualpipev import SplitError
from pipelining_dualpipev.models import plan_split
from pipelining_dualpipev.models.verify import Chain
from tests.models.zoo import VOCABULARY, make_batch

Glue = Callable[[nn.Module, int, torch.Tensor, torch.Tensor], torch.Tensor]


class Drops(nn.Module):
    """Layers that change nothing, with ``glue`` after each, which is given what the first of them gave."""

    def __init__(self, glue: Glue, p: float = 0.5) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(32, 32)) for _ in range(4)])
        for layer in self.layers:
            nn.init.eye_(layer[0].weight)
            nn.init.zeros_(layer[0].bias)
        self.dropout, self.glue, self.p = nn.Dropout(p), glue, p

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        first = x = self.layers[0](x)
        mask = self.glue(self, -1, x, first)
        for index, layer in enumerate(self.layers[1:]):
            x = self.glue(self, index, layer(x), mask)
        return (x,)


def by_module(model: Drops, index: int, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return model.dropout(mask) if index < 0 else x * mask


def by_function(model: Drops, index: int, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return nn.functional.dropout(mask, model.p, model.training) if index < 0 else x * mask


def by_noise(model: Drops, index: int, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.rand(32) if index < 0 else x * mask


def of_ones(model: Drops, index: int, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return nn.functional.dropout(torch.ones(x.shape), model.p, model.training) if index < 0 else x * mask


def written(model: Drops, index: int, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if index < 0:
        mask = torch.empty(32)
        mask.uniform_()
    return mask if index < 0 else x * mask


def at_once(model: Drops, index: int, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x + torch.randn(32) if index == 0 else nn.functional.dropout(x, model.p) if index == 1 else x


def drops_layers(model: Drops, index: int, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x * 0 if torch.rand([]) < model.p else x


EXAMPLE = {"x": torch.ones(4, 32)}


def test_a_dropout_that_several_stages_go_by_is_drawn_once():
    """Each stage had a mask of its own, so that nearly nothing was left."""
    chain = Chain(Drops(by_module), 2, EXAMPLE)
    (output,) = chain.forward(EXAMPLE)[0]
    assert set(output.flatten().tolist()) == {0.0, 8.0}, "kept three times or dropped three times"
    assert 0.25 < (output == 0).float().mean() < 0.75
    for stage in chain.stages.values():
        stage.eval()
    assert chain.forward(EXAMPLE)[0][0].equal(EXAMPLE["x"])


@pytest.mark.parametrize(
    ("glue", "name"),
    [
        (by_function, "bernoulli_"),
        (by_noise, "rand"),
        (of_ones, "dropout"),
        (written, "uniform_"),
        (drops_layers, "rand"),
    ],
)
def test_what_several_stages_would_each_draw_is_refused(glue, name):
    with pytest.raises(SplitError, match=rf"outside of its layers \({name}\), which stages . and . use"):
        plan_split(Drops(glue), 2, example=EXAMPLE)


def test_a_model_that_is_put_in_training_mode_after_the_split_is_planned_for_that():
    """Models are loaded in evaluation mode, in which there is no dropout to be seen."""
    chain = Chain(Drops(by_function).eval(), 2, EXAMPLE)
    assert chain.forward(EXAMPLE)[0][0].equal(EXAMPLE["x"])
    for stage in chain.stages.values():
        stage.train()
    with pytest.raises(SplitError, match="draws random numbers outside of its layers"):
        chain.forward(EXAMPLE)


def test_what_a_single_stage_has_a_use_for_it_may_draw():
    model = Drops(at_once)
    before = torch.get_rng_state()
    chain = Chain(model, 2, EXAMPLE)
    assert torch.get_rng_state().equal(before), "a dry run draws nothing of the caller's"
    assert (chain.forward(EXAMPLE)[0][0] == 0).any()


def test_layers_that_are_dropped_with_probability_0_are_not_dropped():
    chain = Chain(Drops(drops_layers, p=0.0), 2, EXAMPLE)
    assert chain.forward(EXAMPLE)[0][0].equal(EXAMPLE["x"])


def test_t5s_decoder_layers_go_by_one_dropout_of_what_the_encoder_gives():
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 4, "num_heads": 4}
    model = hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, **sizes)).train()
    boundaries = plan_split(model, 2, example=make_batch(2)).boundaries
    crossing = [{root.name for root in boundary} for boundary in boundaries]
    assert "encoder.dropout" in crossing[1] & crossing[2]
    assert not any("encoder.final_layer_norm" in names for names in crossing)


class GivesNoise(nn.Module):
    """A layer that adds noise, and gives it for the others to add."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.linear, self.in_place = nn.Linear(4, 4), in_place

    def forward(self, x: torch.Tensor, noise: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        if noise is None and self.in_place:
            noise = torch.empty(4)
            noise.uniform_()
        elif noise is None:
            noise = torch.rand(4) + torch.nn.functional.dropout(torch.ones_like(x[0]), 0.5)
        return self.linear(x) * 0 + noise, noise


class PassesNoise(nn.Module):
    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([GivesNoise(in_place=in_place) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        noise, total = None, 0
        for layer in self.layers:
            x, noise = layer(x, noise)
            total = total + x
        return (total,)


def test_what_a_layer_has_drawn_and_gives_is_drawn_in_each_step_and_handed_on():
    """It came of no input, so it was taken for a constant, and was what the dry run had drawn, in all steps."""
    example = {"x": torch.ones(2, 4)}
    chain = Chain(PassesNoise(in_place=False), 2, example)
    model = PassesNoise(in_place=False)
    totals = []
    for _ in range(2):
        with torch.random.fork_rng():
            expected = model(**example)[0]
        totals.append(chain.forward(example)[0][0])
        torch.testing.assert_close(totals[-1], expected)
    assert not totals[0].allclose(totals[1])


def test_what_a_layer_draws_in_place_and_gives_is_refused():
    with pytest.raises(SplitError, match=r"layers\.0 writes random numbers .* gives one of shape \[4\]"):
        plan_split(PassesNoise(in_place=True), 2, example={"x": torch.ones(2, 4)})
