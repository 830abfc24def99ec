"""What counts as a layer: members of the outermost list, or of lists further down where that one is too short."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pipelining_dualpipev.errors import SplitError
from pipelining_dualpipev.models import plan_split, verify
from pipelining_dualpipev.models.units import find_units
from pipelining_dualpipev.models.verify import Chain
from tests.models.senses import batch_for, make
from tests.models.zoo import make_model


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("swin", "swin.encoder.layers.{}.blocks.{}"),
        ("convnext", "convnext.encoder.stages.{}.layers.{}"),
        ("resnet", "resnet.encoder.stages.{}.layers.{}"),
    ],
)
def test_a_list_that_is_too_short_is_descended_into(name, layers):
    """Two resolutions cannot fill four stages, their blocks can."""
    model, batch = make(name), batch_for(name, 2)
    plan = plan_split(model, 2, example=batch)
    inner = {0: 2 if name == "swin" else 3, 1: 3}
    assert plan.units.layers == {layers.format(outer, i) for outer, number in inner.items() for i in range(number)}
    assert {event.stage for event in plan.events if event.is_layer} == {0, 1, 2, 3}
    report = verify(model, 2, batch)
    assert report.worst[1] < 1e-12, report
    assert report.loss_error < 1e-12


def test_a_list_that_is_long_enough_is_not():
    model = make("swin")
    assert find_units(model, 2).layers == {"swin.encoder.layers.0", "swin.encoder.layers.1"}
    assert len(find_units(model, 3).layers) == 5


def test_lists_within_layers_that_are_no_stacks_are_not_descended_into():
    """A mixture's experts, or a Sequential of linear modules, are no layers."""
    for name in ("mixtral", "llama"):
        assert len(find_units(make_model(name, layers=3), 4).layers) == 3
    block = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)) for _ in range(3))
    assert find_units(nn.ModuleDict({"layers": block}), 4).layers == {"layers.0", "layers.1", "layers.2"}


class Block(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.blocks = nn.ModuleList(blocks)


def test_a_layer_without_a_list_within_stays_one_beside_those_with_one():
    stages = nn.ModuleList([Block(), Block(Block(), Block(), Block())])
    units = find_units(nn.ModuleDict({"stages": stages}), 4)
    assert units.layers == {"stages.0", "stages.1.blocks.0", "stages.1.blocks.1", "stages.1.blocks.2"}
    assert units.units.keys() == units.layers | {"stages.1.linear"}


def test_too_few_layers_all_the_way_down_are_told():
    with pytest.raises(SplitError, match="5 layers cannot fill 6 stages: use at most 2 ranks"):
        plan_split(make("swin"), 3, example=batch_for("swin", 2))


class PastTheCall(nn.Module):
    """Some layers' forward is called as it is, that of the first in a checkpoint, that of the third also by a call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(3, 3)) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        first, second, third, fourth = self.layers
        x = checkpoint(first.forward, x, use_reentrant=False)
        x = third.forward(second(x).tanh())
        return (fourth.forward(third(x).tanh()),)


def test_layers_whose_forward_is_called_directly_are_split_too():
    """As SqueezeBERT calls them; a hook is run where the unsplit model runs it, and once."""
    model, x, called = PastTheCall(), torch.randn(2, 3), []
    for index, layer in enumerate(model.layers):
        layer.register_forward_hook(lambda *_, index=index: called.append(index))
    chain = Chain(model, 2, example={"x": torch.ones(2, 3)})
    assert [event.is_direct for event in chain.plan.events] == [True, False, True, False, True]
    assert {event.stage for event in chain.plan.events} == {0, 1, 2, 3}
    called.clear()
    chain.step({"x": x}, 1, lambda output, _: output[0].square().sum())
    assert called == [1, 2]
    model(x)[0].square().sum().backward()
    found = chain.gradients()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)
