"""Plain layers, called one after another: an ``nn.Sequential``, a list of layers, or of functions that build one each.

No dry run is needed to split them, no example and no weights: a layer takes what the one before it gave, and nothing
else crosses::

    nn.Sequential of 8 layers, 2 ranks

    0  1 │ 2  3 │ 4  5 │ 6  7        each stage is the Sequential of its own layers, which keep their names ("3.weight")
    rank 0 rank 1 rank 1 rank 0

What needs care is what layers share. Each rank copies [1] or builds [2] its layers together, so that a module or a
parameter that they share stays one. Over ranks there are as many copies, each with its part of the gradient: these are
summed (`runtime.tied`) if the layers are given. What is hidden [3] or was made before its builder was called [4] cannot
be known to be shared, and is refused; so are buffers of a shared layer, which no sum keeps the same.
"""

from __future__ import annotations

import copy
import gc
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from pipelining_dualpipev._torch import has_hooks
from pipelining_dualpipev.errors import SplitError
from pipelining_dualpipev.models.deal import Balance, Weights, deal_out

__all__ = ["Layers", "StackPlan", "build_stack", "layers_of", "plan_stack"]

Layers = Sequence[nn.Module | Callable[[], nn.Module]]
"""Layers, or functions without arguments that return one."""

_REMEDY = "Give each layer its own, or use a number of ranks at which they meet (rank r of P holds stages r and 2P-1-r)"


@dataclass(frozen=True)
class StackPlan:
    """Which layer runs on which stage.

    Attributes:
        num_stages: 2P for P ranks.
        stage_of: the stage of each layer, by the layer's name.
        names: every name of a parameter to the first name of the same parameter; of layers that are yet to be built
            only those of this rank, once they are.
    """

    num_stages: int
    stage_of: dict[str, int]
    names: dict[str, str] = field(default_factory=dict, repr=False)

    def saves(self, name: str, stage: int) -> bool:
        """Whether ``stage`` saves a parameter (by its first name) or a buffer: those of its own layers."""
        return self.names.get(name, name) == name and stage == self._home(name)

    def tied_stages(self) -> dict[str, tuple[int, ...]]:
        """By first name the stages that hold a parameter, for each that has several names."""
        stages: dict[str, list[int]] = {}
        for name, first in self.names.items():
            stages.setdefault(first, []).append(self._home(name))
        return {first: tuple(sorted(set(homes))) for first, homes in stages.items() if len(homes) > 1}

    def _home(self, name: str) -> int:
        """The stage of the layer that a parameter or buffer belongs to."""
        return self.stage_of[name.partition(".")[0]]

    def layers(self, stage: int) -> list[str]:
        """The names of a stage's layers, in order."""
        return [name for name, home in self.stage_of.items() if home == stage]

    def explain(self) -> str:
        """The plan in words: the layers of each stage."""
        return "\n".join(
            f"stage {stage} (rank {min(stage, self.num_stages - 1 - stage)}): {', '.join(self.layers(stage))}"
            for stage in range(self.num_stages)
        )


class StackStage(nn.Module):
    """A stage of plain layers.

    Attributes:
        model: its layers, under the names that they have in the whole.
        required_inputs: no input reaches it by name.
        accepted_inputs: nor can a step give one.
        split_description: the plan in words; the schedule makes sure that it is the same on every rank.
        tied_parameters: those of its parameters that have several names, under the first. The schedule sees that on one
            rank they stay one, and sums the gradients of those that several ranks hold.
        tied_stages: by the same names all stages that hold them.
    """

    required_inputs: tuple[str, ...] = ()
    accepted_inputs: frozenset[str] = frozenset()

    def __init__(self, layers: Mapping[str, nn.Module], plan: StackPlan, stage: int) -> None:
        super().__init__()
        self.model = nn.Sequential(OrderedDict(layers))
        self.split_description = plan.explain()
        self._stage, self._is_last = stage, stage == plan.num_stages - 1
        self._last_layer = plan.layers(stage)[-1]
        # What is received is a leaf that requires grad, into which autograd lets nobody write.
        self._writes_in_place = any(getattr(module, "inplace", False) for module in self.modules())
        self.tied_stages = plan.tied_stages()
        own = self.model.named_parameters()
        self.tied_parameters = {plan.names[name]: p for name, p in own if plan.names[name] in self.tied_stages}

    def forward(self, *received: torch.Tensor) -> object:
        """Run the layers on one microbatch.

        Args:
            received: what the stage before has given, one tensor or several; on the first stage the step's input.

        Returns:
            What the last of the layers gives.

        Raises:
            SplitError: if that cannot cross to the next stage.
            TypeError: if the step was not given one input.
        """
        if self._stage == 0 and len(received) != 1:
            raise TypeError(f"layers take one input, the step was given {len(received)}: put them into one tensor")
        if self._stage and self._writes_in_place:
            received = tuple(tensor.clone() for tensor in received)
        output = self.model(received[0] if len(received) == 1 else received)
        if not self._is_last and not _can_cross(output):
            raise SplitError(
                f"layer {self._last_layer} gives a {type(output).__name__}, but what crosses to the next stage is a "
                "tensor or a tuple of two or more: put it and the layer after it into an nn.Sequential of their own"
            )
        return output


def _can_cross(output: object) -> bool:
    if type(output) is tuple and len(output) > 1:
        return all(isinstance(value, torch.Tensor) for value in output)
    return isinstance(output, torch.Tensor)


def layers_of(model: object) -> dict[str, nn.Module | Callable[[], nn.Module]] | None:
    """The layers by name, if ``model`` is plain layers; else None.

    Raises:
        SplitError: if a list holds what is no layer, or there is a hook on the whole.
    """
    if isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward:
        if has_hooks(model, but_of="transformers"):
            raise SplitError(
                f"the {type(model).__name__} itself has a hook, but no stage runs all of it: register hooks on its "
                "layers, or on the stages after the split"
            )
        names = [name for name, _ in model.named_modules(remove_duplicate=False) if name and "." not in name]
        return dict(zip(names, model, strict=True))
    if not isinstance(model, (nn.ModuleList, list, tuple)):
        return None
    for index, layer in enumerate(model):
        if not callable(layer):
            raise SplitError(
                f"number {index} of the list is a {type(layer).__name__}: give layers, or functions without arguments "
                "that return one"
            )
    return {str(index): layer for index, layer in enumerate(model)}


def plan_stack(layers: Mapping[str, object], num_stages: int, balance: Balance = "uniform") -> StackPlan:
    """Deal layers out to stages, in order (see `models.deal`). What they cost is not known, for none is run.

    Raises:
        SplitError: if there are too few, or two ranks would share a buffer.
    """
    modules = {name: layer for name, layer in layers.items() if isinstance(layer, nn.Module)}

    def sizes() -> Weights:
        return Weights(0, [sum(p.numel() for p in layer.parameters()) for layer in modules.values()], 0)

    weights = {"parameters": sizes} if len(modules) == len(layers) else {}
    stage_of = dict(zip(layers, deal_out(len(layers), num_stages, balance, weights), strict=True))
    plan = StackPlan(num_stages, stage_of, _names(modules))
    _refuse_shared_buffers(modules, plan)
    return plan


def _names(layers: Mapping[str, nn.Module]) -> dict[str, str]:
    """Every name of a parameter to the first one of the same parameter."""
    first: dict[nn.Parameter, str] = {}
    return {
        name: first.setdefault(parameter, name)
        for layer_name, layer in layers.items()
        for name, parameter in layer.named_parameters(prefix=layer_name, remove_duplicate=False)
    }


def _refuse_shared_buffers(layers: Mapping[str, nn.Module], plan: StackPlan) -> None:
    ranks: dict[nn.Module, set[int]] = {}
    for name, layer in layers.items():
        stage = plan.stage_of[name]
        for inner_name, inner in layer.named_modules(prefix=name):
            ranks.setdefault(inner, set()).add(min(stage, plan.num_stages - 1 - stage))
            if len(ranks[inner]) > 1 and next(inner.buffers(recurse=False), None) is not None:
                raise SplitError(
                    f"{inner_name}, which layers of {len(ranks[inner])} ranks share, has buffers, of which each rank "
                    f"would have its own. {_REMEDY}"
                )


def build_stack(
    layers: Mapping[str, nn.Module | Callable[[], nn.Module]],
    plan: StackPlan,
    stages: Iterable[int],
    device: torch.device,
) -> tuple[dict[int, StackStage], StackPlan]:
    """The given stages, which one rank holds, and the plan with the names of their parameters.

    Raises:
        SplitError: if a layer cannot be built or has no weights, or shares some with another rank.
    """
    own = {name: layers[name] for stage in stages for name in plan.layers(stage)}
    made_here = _build({name: make for name, make in own.items() if not isinstance(make, nn.Module)})
    built = _copy({name: layer for name, layer in own.items() if isinstance(layer, nn.Module)}) | made_here
    for name, layer in built.items():
        if any(tensor.is_meta for tensor in (*layer.parameters(), *layer.buffers())) and device.type != "meta":
            raise SplitError(
                f"layer {name} is on meta, without weights: give a function that builds it, which is called on the "
                "layer's own rank alone"
            )
        layer.to(device)
    plan = replace(plan, names={**plan.names, **_names(made_here)})
    made = {stage: StackStage({name: built[name] for name in plan.layers(stage)}, plan, stage) for stage in stages}
    return made, plan


def _copy(layers: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    memo: dict[int, object] = {}
    copies = copy.deepcopy(dict(layers), memo)  # [1]
    registered = {parameter for layer in copies.values() for parameter in layer.parameters()}
    # [3] Whatever the layers hold has been copied too. A parameter among it that no layer here has registered is one
    # that somebody else trains.
    for copied in memo.values():
        if isinstance(copied, nn.Parameter) and copied.requires_grad and copied not in registered:
            raise SplitError(
                f"one of the layers {', '.join(layers)} uses a parameter of shape {list(copied.shape)} that is none of "
                f"its own, nor of another layer of its rank, where it would be a copy that is not trained. {_REMEDY}"
            )
    return copies


def _build(makers: Mapping[str, Callable[[], nn.Module]]) -> dict[str, nn.Module]:
    if not makers:
        return {}
    existing = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Parameter)]  # keeps their ids theirs
    ids = set(map(id, existing))
    built: dict[str, nn.Module] = {}
    for name, make in makers.items():  # [2]
        try:
            layer = make()
        except Exception as error:
            raise SplitError(
                f"layer {name} could not be built: {type(error).__name__}: {error} (what is not a module is called, "
                "without arguments, to build one)"
            ) from error
        if not isinstance(layer, nn.Module):
            raise SplitError(f"layer {name} was built as a {type(layer).__name__}: let the function return a module")
        for inner, parameter in layer.named_parameters():
            if id(parameter) in ids:  # [4]
                raise SplitError(
                    f"{name}.{inner} was there before the function that builds layer {name} was called, so that the "
                    "builder of another rank's layer may use it too: make it in the function, or give the layer itself"
                )
        built[name] = layer
    return built
