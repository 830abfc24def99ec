"""Taking parameters out of a model and putting others in, with the model's forward none the wiser."""

from __future__ import annotations

import copy
import sys
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import nn
from torch.autograd.function import FunctionCtx

from pipelining_dualpipev._torch import has_hooks
from pipelining_dualpipev.errors import SplitError
from pipelining_dualpipev.models.absent import Absent
from pipelining_dualpipev.models.roots import Root
from pipelining_dualpipev.models.units import Units

__all__ = [
    "convert_absent",
    "glue_of",
    "initialize",
    "make_parameters_absent",
    "make_skeleton",
    "names_of_parameters",
    "refuse_in_autograd_function",
    "refuse_hooks_on_glue",
    "set_tensor",
]


def names_of_parameters(model: nn.Module) -> dict[str, str]:
    """Every name of a parameter to the first name of the same parameter; tied ones have several."""
    first: dict[nn.Parameter, str] = {}
    return {
        name: first.setdefault(parameter, name) for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def make_skeleton(model: nn.Module) -> nn.Module:
    """A copy of ``model`` with its parameters on the meta device and its buffers real; the model is left as it is.

    Buffers of a model that is on meta itself are made by the model's own initialisation.
    """
    on_meta = {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
        for parameter in model.parameters()
    }
    skeleton = copy.deepcopy(model, dict(on_meta))
    for module in skeleton.modules():
        on_meta_too = [(name, buffer) for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
        for name, buffer in on_meta_too:
            setattr(module, name, torch.empty_like(buffer, device="cpu"))
        if on_meta_too:
            initialize(skeleton, module)
    return skeleton


def initialize(model: nn.Module, module: nn.Module) -> None:
    """Run the model's own initialisation on one of its modules.

    Raises:
        SplitError: if there is none.
    """
    own = getattr(model, "_init_weights", None) or getattr(module, "reset_parameters", None)
    if own is None:
        raise SplitError(
            f"a {type(module).__name__} of the model is on meta and has neither the model's _init_weights nor a "
            "reset_parameters to be initialised by: give the model with real weights"
        )
    with torch.no_grad():
        own(module) if hasattr(model, "_init_weights") else own()


def make_parameters_absent(
    model: nn.Module, names: dict[str, str], *, keep: Collection[str], device: torch.device | str
) -> None:
    """Replace each parameter whose name is not in ``keep`` by an `Absent`, so that the forward finds that instead."""
    absent: dict[str, Absent] = {}
    for name, first in names.items():
        if name not in keep:
            if first not in absent:
                absent[first] = Absent.like(model.get_parameter(name), device, Root("parameter", first))
            set_tensor(model, name, absent[first])
    # Forwards ask for `next(self.parameters()).dtype`; a module that keeps none of its own has to answer too.
    for module in model.modules():
        if next(nn.Module.parameters(module), None) is None and next(_absent_in(module), None) is not None:
            vars(module)["parameters"] = lambda recurse=True, module=module: _absent_in(module)


def _absent_in(module: nn.Module) -> Iterator[Absent]:
    return (value for inner in module.modules() for value in vars(inner).values() if isinstance(value, Absent))


def convert_absent(model: nn.Module, types: Mapping[torch.dtype, torch.dtype]) -> None:
    """Let each `Absent` in the place of a parameter have the type that ``types`` gives for its own."""
    converted: dict[Absent, Absent] = {}
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, Absent):
                if value not in converted:
                    meta = value.meta.to(types.get(value.dtype, value.dtype))
                    converted[value] = Absent(meta, value.device, value.roots)
                setattr(module, name, converted[value])


def set_tensor(model: nn.Module, name: str, value: torch.Tensor) -> None:
    """Let ``name`` be this parameter, or a plain tensor, of which state dicts and the like know nothing."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    delattr(module, leaf)  # for setattr to register a parameter as such, and nothing else as one
    setattr(module, leaf, value)


def glue_of(model: nn.Module, units: Units) -> dict[str, nn.Module]:
    """The modules above the units, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if units.is_glue(name) and next(module.parameters(), None) is not None
    }


def refuse_hooks_on_glue(glue: Mapping[str, nn.Module]) -> None:
    """Raise if a hook is registered above the units, where a stage that stops early would never run it.

    Args:
        glue: see `glue_of`.

    Raises:
        SplitError: naming the module.
    """
    for name, module in glue.items():
        if has_hooks(module, but_of="transformers"):
            raise SplitError(
                f"{name or 'the model itself'} ({type(module).__name__}) has a hook, but its forward runs on every "
                "stage and ends early on most: register hooks, or what brings them like fully_shard, on layers, or on "
                "the stages after the split"
            )


def refuse_in_autograd_function(unit: str) -> None:
    """Raise if the caller is called, however deep, from the forward of an autograd function.

    Such a function computes the gradients of what it calls by itself, as the stacks of reversible layers do, and does
    not know that another stage computes a part: these gradients would be lost without a word.

    Raises:
        SplitError: naming the unit and the function.
    """
    frame = sys._getframe(1)
    while frame is not None:
        arguments = frame.f_code.co_varnames[: frame.f_code.co_argcount]
        first = frame.f_locals.get(arguments[0]) if arguments else None
        if isinstance(first, FunctionCtx) and frame.f_code.co_name == "forward":
            raise SplitError(
                f"{unit} is called by an autograd function ({type(first).__name__.removesuffix('Backward')}), which "
                "computes its gradients by itself, over all layers at once, so it cannot be split: train the model "
                "unsplit, or let its forward call the layers directly (and checkpoint them with use_reentrant=False)"
            )
        frame = frame.f_back  # type: ignore[assignment]
