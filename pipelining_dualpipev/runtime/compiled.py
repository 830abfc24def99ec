"""Weight gradients of compiled layers, left for W by operators that a compiler takes as they are.

What `runtime.deferred` does, a compiler would look into: it knows no effect but on tensors, and drops an operation
whose results nobody uses. So here a linear layer becomes two operators, opaque to it::

    forward    y = linear(x, weight, bias, anchor, place)
    backward   dx, danchor = linear_input(dy, x, weight, ...)   notes copies of x and dy for the layer at ``place``

``anchor`` requires grad, so the backward is never dropped, whatever ``x`` is. ``place`` is a number in a tensor: one
compiled in as it is would have each layer compiled anew. The *copies* are needed because the memory of an operator's
arguments is the compiler's, which writes other things there once the operator has run.

A microbatch with a full backward runs the module as the user has compiled it. The code for those that are split is
compiled apart, in the same way, and never found in the other's place.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from functools import wraps
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.nn import functional

from pipelining_dualpipev._torch import compile_apart, compiled_call, is_compiled
from pipelining_dualpipev.runtime.deferred import Note, Operand, cast, find_operand

__all__ = ["CompiledParts", "Swap"]

_numbers = count()
_places: WeakValueDictionary[int, _Place] = WeakValueDictionary()


class _Place:
    """Where the gradient of one layer's weight is noted; the operators find it by its number, as long as it lives."""

    def __init__(self, operand: Operand, note: Callable[[Note], None]) -> None:
        self.operand, self.note = operand, note
        number = next(_numbers)
        self.number = torch.tensor(number)
        _places[number] = self


@torch.library.custom_op("pipelining_dualpipev::linear", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    anchor: torch.Tensor,
    place: torch.Tensor,
    is_linear: bool,
) -> torch.Tensor:
    """``x @ weight.T + bias`` if ``is_linear``, else ``x @ weight + bias``."""
    if is_linear:
        return functional.linear(x, weight, bias).contiguous()
    rows = x.reshape(-1, x.size(-1))
    y = rows.mm(weight) if bias is None else torch.addmm(bias, rows, weight)
    return y.view(*x.shape[:-1], y.size(-1))


@_linear.register_fake
def _(x: Any, weight: Any, bias: Any, anchor: Any, place: Any, is_linear: bool) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.size(0 if is_linear else 1))


@torch.library.custom_op("pipelining_dualpipev::linear_input", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _linear_input(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, place: torch.Tensor, is_linear: bool, needs_dx: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    found = _places[int(place)]
    found.note(Note(found.operand, x.clone(), dy.clone()))
    dx = x.new_empty(0)
    if needs_dx:
        dx = dy.reshape(-1, dy.size(-1)).mm(weight if is_linear else weight.t()).view(x.shape)
    return dx, x.new_empty(0)


@_linear_input.register_fake
def _(dy: Any, x: Any, weight: Any, place: Any, is_linear: bool, needs_dx: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape if needs_dx else 0), x.new_empty(0)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, _, anchor, place, ctx.is_linear = inputs
    ctx.anchor_dtype = anchor.dtype
    ctx.save_for_backward(x, weight, place)


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, weight, place = ctx.saved_tensors
    needs_dx, _, needs_dbias = ctx.needs_input_grad[:3]
    dx, danchor = _linear_input(dy, x, weight, place, ctx.is_linear, needs_dx)
    dbias = dy.reshape(-1, dy.size(-1)).sum(0) if needs_dbias else None
    return dx if needs_dx else None, None, dbias, danchor.to(ctx.anchor_dtype), None, None


_linear.register_autograd(_backward, setup_context=_setup)


class Swap(NamedTuple):
    """An attribute that a module has while weight gradients are put off."""

    module: nn.Module
    name: str
    value: Callable[..., Any]


class CompiledParts:
    """What runs in compiled code in a stage.

    Args:
        module: the stage's.
        note: takes what a weight gradient is made of.
    """

    def __init__(self, module: nn.Module, note: Callable[[Note], None]) -> None:
        self._module, self._note = module, note
        self._anchor = torch.empty(0, requires_grad=True)
        # By what a call of a compiled module runs: the attribute that it is, and what to put there.
        self._apart: dict[Callable[..., Any], tuple[str, Callable[..., Any]] | None] = {}
        self._places: list[_Place] = []
        self._warned = False

    def find_swaps(self, parameters: Collection[nn.Parameter]) -> tuple[set[nn.Module], list[Swap]]:
        """The modules that run in compiled code, and what to swap for their weight gradients to be put off.

        Args:
            parameters: of the stage.
        """
        places: list[_Place] = []
        swaps: list[Swap] = []
        inside: set[nn.Module] = set()
        for module in filter(is_compiled, self._module.modules()):
            inside.update(module.modules())
            runs = compiled_call(module)
            if runs not in self._apart:
                self._apart[runs] = compile_apart(module)
            if apart := self._apart[runs]:
                swaps.append(Swap(module, *apart))
        if None in self._apart.values():
            self._warn()
            return inside, []
        for module in inside:
            is_linear = _is_linear(module)
            operand = None if is_linear is None else find_operand(module.weight, parameters)
            if is_linear is not None and operand is not None:
                place = _Place(operand.as_right() if is_linear else operand, self._note)
                places.append(place)
                swaps.append(Swap(module, "forward", self._make_forward(module, place.number, is_linear=is_linear)))
        self._places = places
        return inside, swaps

    def _make_forward(self, module: Any, number: torch.Tensor, *, is_linear: bool) -> Callable[..., Any]:
        anchor = self._anchor

        @wraps(module.forward)
        def forward(x: torch.Tensor) -> torch.Tensor:  # is traced
            bias = None if module.bias is None else cast(module.bias)
            return _linear(cast(x), cast(module.weight), bias, anchor, number, is_linear)

        return forward

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                "compiled modules run their whole backward in I: torch does not tell how they were compiled, so "
                "their weight gradients are not put off to W. Schedule with zb=0, or leave them uncompiled",
                stacklevel=2,
            )


def _is_linear(module: nn.Module) -> bool | None:
    """Whether the module is `nn.Linear` or, if not, transformers' ``Conv1D``; None if it is neither."""
    kind = type(module)
    if "forward" in vars(module):
        return None
    if kind.forward is nn.Linear.forward:
        return True
    return False if (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D") else None
