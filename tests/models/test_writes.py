"""What a layer writes into its arguments: told to other stages where that can be done, and refused where it cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pipelining_dualpipev import SplitError
from pipelining_dualpipev.models import plan_split
from pipelining_dualpipev.models.verify import Chain

Write = Callable[[int, torch.Tensor, Any], torch.Tensor]


class Layer(nn.Module):
    def __init__(self, index: int, write: Write) -> None:
        super().__init__()
        self.inner, self.index, self.write = nn.Linear(3, 3), index, write

    def forward(self, x: torch.Tensor, place: Any) -> torch.Tensor:
        return self.write(self.index, self.inner(x).tanh(), place)


class Model(nn.Module):
    """Eight layers that are all given one place to write to, which the model makes and looks at in the end."""

    def __init__(
        self,
        write: Write,
        make: Callable[[torch.Tensor], Any],
        end: Callable[[torch.Tensor, Any], torch.Tensor] = lambda x, place: x,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(3, 3)
        self.layers = nn.ModuleList([Layer(index, write) for index in range(8)])
        self.make, self.end = make, end
        self.double()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        x = self.embed(x)
        place = self.make(x)
        for layer in self.layers:
            x = layer(x * 1, place)  # a copy, which autograd may keep while the place is written
        return (self.end(x, place),)


def assert_alike(model: Model) -> None:
    """On four stages it gives what it gives on none, and all gradients."""
    x = torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3)
    chain = Chain(model, 2, example={"x": x})
    output, received, sent = chain.forward({"x": x})
    expected = model(x)[0]
    torch.testing.assert_close(output[0], expected)
    for result in (expected, output[0]):
        result.square().sum().backward()
    for stage in (2, 1, 0):
        edges = zip(sent[stage], received[stage + 1], strict=True)
        pairs = [(out, into.grad) for out, into in edges if into.grad is not None]
        torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])
    found = chain.gradients()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)


def one_puts_and_the_next_takes(index: int, x: torch.Tensor, place: Any) -> torch.Tensor:
    if "taken" in place:
        return x * place.pop("taken")
    place["taken"] = x.mean()
    return x


def a_list_is_cleared(index: int, x: torch.Tensor, place: Any) -> torch.Tensor:
    held = place["list"]
    if len(held) == 3:
        x = x + sum(held)
        held.clear()
    held.append(x)
    return x


def all_is_in_a_dict_of_a_dict(index: int, x: torch.Tensor, place: Any) -> torch.Tensor:
    if index % 3 == 0:
        place["inner"] = {"values": [x, 0.5], "count": index}
    x = x + place["inner"]["values"][0] * place["inner"]["values"][1] * place["inner"]["count"]
    place["inner"]["count"] += 1
    return x


def what_is_not_wanted_any_more_is_none(index: int, x: torch.Tensor, place: Any) -> torch.Tensor:
    if place.get("last") is not None:
        x, place["last"] = x + place["last"], None
    else:
        place["last"] = 2 * x
    return x


@pytest.mark.parametrize(
    "write",
    [
        one_puts_and_the_next_takes,
        a_list_is_cleared,
        all_is_in_a_dict_of_a_dict,
        what_is_not_wanted_any_more_is_none,
    ],
)
def test_what_is_put_into_a_dict_or_list_or_taken_out_of_it_is_so_on_all_stages(write):
    """What was taken out stayed where it was on the other stages, and a later layer used it again."""
    assert_alike(Model(write, lambda x: {"list": []}))


def adds_in_place(index: int, x: torch.Tensor, place: Any) -> torch.Tensor:
    place.add_(x)
    return x


@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.zeros(2, 3, dtype=x.dtype),
        lambda x: torch.zeros_like(x),
        lambda x: x * 1,
    ],
    ids=["zeros", "zeros like", "computed"],
)
def test_a_tensor_into_which_layers_write_in_place_is_refused(make):
    """Each stage added its own layers' share into a tensor of its own: a wrong sum, and nobody was told."""
    model = Model(adds_in_place, make, lambda x, place: x + place)
    with pytest.raises(SplitError, match=r"layers\.0 writes in place into a tensor of shape \[2, 3\] that"):
        plan_split(model, 2, example={"x": torch.ones(2, 3, dtype=torch.float64)})


def test_an_input_into_which_a_layer_writes_in_place_is_refused():
    class Masks(Model):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor]:
            for layer in self.layers:
                x = layer(x, mask)
            return (x,)

    model = Masks(lambda index, x, mask: x * mask.mul_(0.5), lambda x: None)
    example = {"x": torch.ones(2, 3, dtype=torch.float64), "mask": torch.ones(2, 3, dtype=torch.float64)}
    with pytest.raises(SplitError, match=r"layers\.0 writes in place into a tensor of shape \[2, 3\] that"):
        plan_split(model, 2, example=example)


def test_what_a_layer_gave_may_be_written_in_place_by_later_ones():
    """It travels, and with what was written."""
    assert_alike(Model(adds_in_place, lambda x: x, lambda x, place: x + place))


def test_a_layer_may_write_in_place_into_what_nobody_uses_after_it():
    class Scales(Model):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            x = self.embed(x)
            for layer in self.layers:
                scaled = x * 2
                x = layer(x, scaled)
            return (x,)

    assert_alike(Scales(lambda index, x, scaled: x + scaled.mul_(0.1), lambda x: None))
    assert_alike(Scales(lambda index, x, scaled: scaled.mul_(0.1).add_(x), lambda x: None))


def test_an_object_that_is_put_into_a_dict_is_refused():
    def write(index: int, x: torch.Tensor, place: Any) -> torch.Tensor:
        place["layer"] = object()
        return x

    with pytest.raises(SplitError, match=r"layers\.0 puts a object into a dict or list that it was given"):
        plan_split(Model(write, lambda x: {}), 2, example={"x": torch.ones(2, 3, dtype=torch.float64)})


class ComesBack(nn.Module):
    """A module that every layer is followed by."""

    def __init__(self, again: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(3, 3)) for _ in range(4)])
        self.again = again

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        for layer in self.layers:
            x = self.again(layer(x))
        return (x,)


def test_a_module_of_several_stages_may_not_write_into_its_buffers():
    """Each stage counted by itself: statistics were of a part of the calls, and nobody noticed."""
    norm = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with pytest.raises(SplitError, match=r"again is called on stages 0, 1 and writes into its buffer 1\.num_batches"):
        plan_split(ComesBack(norm), 2, example={"x": torch.ones(2, 3)})
    plan = plan_split(ComesBack(norm).eval(), 2, example={"x": torch.ones(2, 3)})
    assert plan.tied_stages()["again.0.weight"] == (0, 1, 2, 3)


class Cache:
    """An object that layers keep things in, as transformers' caches are."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []


def test_what_a_layer_keeps_in_an_object_that_others_read_is_refused():
    """PI0's second tower attends to the first one's cache; split, it found in it what its own stage had put there."""

    def keep_and_read(index: int, x: torch.Tensor, cache: Cache) -> torch.Tensor:
        cache.kept.append(x * 2)
        return x if index < 4 else x + cache.kept[index - 4]

    def keep(index: int, x: torch.Tensor, cache: Cache) -> torch.Tensor:
        cache.kept = [x * 2]
        return x

    for write, end in ((keep_and_read, lambda x, cache: x), (keep, lambda x, cache: x + cache.kept[0])):
        model = Model(write, lambda x: Cache(), end)
        with pytest.raises(SplitError, match=r"layers\.[07] computes a tensor .* nothing that it returns"):
            plan_split(model, 2, example={"x": torch.ones(2, 3, dtype=torch.float64)})
    assert_alike(Model(keep, lambda x: Cache()))  # nobody reads it


def a_part(room: torch.Tensor, x: torch.Tensor) -> None:
    room[:, 1:] = x[:, 1:]


def at_indices(room: torch.Tensor, x: torch.Tensor) -> None:
    indices = torch.tensor([2, 0])
    room.index_copy_(1, indices, x[:, indices])


def under_a_mask(room: torch.Tensor, x: torch.Tensor) -> None:
    room.masked_scatter_(torch.ones_like(room, dtype=torch.bool), x)


def added(room: torch.Tensor, x: torch.Tensor) -> None:
    room.add_(x)
    room[0].mul_(2)


class Gathering(Model):
    """What the middle layers compute is written into a tensor that is made like the first one's."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        first = x = self.embed(x)
        for index, layer in enumerate(self.layers):
            x = layer(x, None)
            if index in (2, 4, 7):
                room = first.new_zeros(first.shape)
                self.make(room, x)
                x = room
        return (x,)


@pytest.mark.parametrize("write", [a_part, at_indices, under_a_mask, added])
def test_what_is_written_into_a_new_tensor_like_one_of_another_stage_has_its_gradient(write):
    """The loss was right, and all before had no gradient, without a word: in a speech model that hears in chunks."""
    assert_alike(Gathering(lambda index, x, place: x, write))


class Keeps(Model):
    """Its own forward writes into a buffer, before the first layer or behind it."""

    def __init__(self, keep: Callable[[Any, torch.Tensor], None], *, early: bool, persistent: bool = True) -> None:
        super().__init__(lambda index, x, place: x, lambda x: None)
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64), persistent=persistent)
        self.keep, self.early = keep, early

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        if self.early:
            self.keep(self, x)
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h - self.mean, None)
        if not self.early:
            self.keep(self, h)
        return (h,)


def in_place(model: Any, x: torch.Tensor) -> None:
    model.mean.lerp_(x.detach().mean(0), 0.1)


def anew(model: Any, x: torch.Tensor) -> None:
    model.mean = model.mean + x.detach().mean(0)


@pytest.mark.parametrize("write", [in_place, anew])
def test_a_buffer_that_the_forward_writes_behind_its_layers_is_refused(write):
    """Only the last stage comes to it: the first ones would compute with the mean of no microbatch."""
    x = torch.ones(2, 3, dtype=torch.float64)
    chain = Chain(Keeps(write, early=False).train(), 2, example={"x": x})
    with pytest.raises(SplitError, match="writes into its buffer mean behind its first layer"):
        chain.forward({"x": x})


def ones(model: Any, x: torch.Tensor) -> None:
    model.mean = torch.ones_like(model.mean)


def test_a_buffer_that_follows_from_the_inputs_may_be_written():
    assert_alike(Keeps(ones, early=True))
    assert_alike(Keeps(ones, early=False, persistent=False))
    assert_alike(
        Keeps(lambda model, x: setattr(model, "mean", torch.ones_like(model.mean)), early=False, persistent=False)
    )


class KeepsOne(Model):
    """What a layer gave is written into outside of it, and used by later stages too."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        x = self.embed(x)
        for index, layer in enumerate(self.layers):
            x = layer(x, None)
            if index in (1, 4):
                kept = x
                kept += self.make(x)
                x = kept * 1
        return (x + kept,)


def test_what_glue_writes_into_is_sent_as_it_was_given():
    """It was sent as it was written, and every further stage wrote into it once more: a loss that was a little off."""
    for write in (lambda x: 1.0, lambda x: x.detach().cos()):
        assert_alike(KeepsOne(lambda index, x, place: x * 1, write))


def test_what_a_layer_and_glue_write_into_is_refused():
    def write(index: int, x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        if index == 3:
            place += x.detach()
        return x

    class Both(Model):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            x = kept = self.embed(x)
            kept += 1
            for layer in self.layers:
                x = layer(x * 1, kept)
            return (x + kept,)

    with pytest.raises(SplitError, match="output 0 of embed is written into in place by a layer and by"):
        plan_split(Both(write, lambda x: None), 2, example={"x": torch.ones(2, 3, dtype=torch.float64)})


class GivesZeros(nn.Module):
    """A layer that gives zeros of its own making, into which the model's own code writes."""

    def __init__(self, *, like: bool) -> None:
        super().__init__()
        self.linear, self.like = nn.Linear(3, 3), like

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x), torch.zeros_like(x) if self.like else torch.zeros(3)


class Counts(nn.Module):
    def __init__(self, *, like: bool) -> None:
        super().__init__()
        self.first = GivesZeros(like=like)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(3, 3)) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        x, count = self.first(x)
        for layer in self.layers:
            count += 1
            x = layer(x) * count
        return (x,)


@pytest.mark.parametrize("like", [True, False])
def test_what_glue_writes_into_a_layers_constant_is_not_there_the_next_time(like):
    """The dry run's writes, and those of each step, were found in it by the next one."""
    model = Counts(like=like)
    chain = Chain(model, 2, example={"x": torch.ones(2, 3)})
    for _ in range(3):
        x = torch.randn(2, 3)
        torch.testing.assert_close(chain.forward({"x": x})[0][0], model(x)[0])
