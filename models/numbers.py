"""Tensors that are made where no tensor subclass is asked, in a dry run: of absent numbers, and of random ones.

``torch.tensor([a, b])`` reads its numbers where no tensor subclass is asked, and would find no data in an `Absent`. So
does ``mask[[a, b], [c, d]] = False``, which makes tensors of its lists. A mode sees the call before. It is needed in
the dry run alone: a stage has the inputs that such numbers come from.

Nor is a subclass asked by ``torch.rand(2)``, or a dropout of ``torch.ones(2)``: the state of the generator tells that
numbers were drawn. Every stage has others, so what glue draws becomes an `Absent` with a root of its own, by which to
see whether more than one stage has a use for it. What a unit draws and gives is handed on.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from pipelining_dualpipev._torch import pytree
from pipelining_dualpipev.models.absent import Absent, on_known
from pipelining_dualpipev.models.roots import Demand, recording

__all__ = ["AbsentNumbers"]

_INDEXING = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)


class AbsentNumbers(TorchFunctionMode):
    """While it is entered, a tensor of absent numbers is absent, with their roots."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and args and isinstance(args[0], (list, tuple)):
            numbers = _absent(args[0])
            if numbers:
                return _tensor_of(numbers, func, args, kwargs)
        if func in _INDEXING and isinstance(args[1], (list, tuple)):
            args = (args[0], type(args[1])(map(_indices, args[1])), *args[2:])
        before = torch.default_generator.get_state()
        result = func(*args, **kwargs)
        return result if torch.default_generator.get_state().equal(before) else _drawn(func, args, result)


def _drawn(func: Any, args: Any, result: Any) -> Any:
    """What ``func`` has given, in which its random numbers can be known again."""
    root = recording.draw(getattr(func, "__name__", str(func)))

    def known_again(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, Absent):
            return tensor
        if any(tensor is given for given in args):
            # It is written in place, and goes by its name: who comes this far has other numbers in it.
            if recording.pretends:
                recording.drew_in_place = True
            elif recording.demands is not None:
                recording.demands.append(Demand(recording.events, frozenset({root})))
            return tensor
        if func is torch.rand and not recording.pretends:
            tensor.fill_(recording.draws)
        return Absent(tensor.to("meta"), tensor.device, frozenset({root}), tensor)

    return pytree.tree_map_only(torch.Tensor, known_again, result)


def _absent(numbers: Any) -> list[Absent]:
    return [x for x in pytree.tree_leaves(numbers) if isinstance(x, Absent)]


def _indices(part: Any) -> Any:
    """A part of an index, as a tensor if it is a list of numbers of which some are absent."""
    numbers = _absent(part) if isinstance(part, (list, tuple)) else []
    return _tensor_of(numbers, torch.tensor, (part,), {}) if numbers else part


def _tensor_of(numbers: list[Absent], func: Any, args: Any, kwargs: dict[str, Any]) -> Absent:
    def number(x: Absent) -> torch.Tensor:
        return torch.ones((), dtype=x.dtype) if x.value is None else x.value

    device = kwargs.pop("device", None) or numbers[0].device
    values = pytree.tree_map_only(Absent, number, args[0])
    made = on_known(partial(_made_of, func), (values, *args[1:]), kwargs)
    roots = frozenset().union(*(x.roots for x in numbers))
    if recording.used is not None:
        recording.used |= roots
    known = all(x.value is not None for x in numbers)
    return Absent(made.to("meta"), device, roots, made if known else None)


def _made_of(func: Any, numbers: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    made: torch.Tensor = func(pytree.tree_map_only(torch.Tensor, torch.Tensor.item, numbers), *args, **kwargs)
    return made
