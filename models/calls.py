"""What a call of a unit gives, so that a stage which does not make the call can hand out the same.

Mostly that is its return value. But a layer may also write into containers that it was passed (a dict of shared keys
and values), and transformers collects some inner outputs by hooks (router logits). All of it is a list of *changes*,
each at a *place*, in an order that is the same whenever the call is made:

======================  ========================================================
``("output",)``         the return value
``("write", path)``     an entry of a dict or list among the arguments
``("remove", path)``    an entry that was there and is no more
``("capture", key, i)`` the i-th thing the call has added to a collector's list
======================  ========================================================

A change is described leaf by leaf: a tensor that the call has computed (it travels), one of the call's own arguments
handed through, or a constant.
"""

from __future__ import annotations

import sys
from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from pipelining_dualpipev._torch import pytree
from pipelining_dualpipev.errors import SplitError
from pipelining_dualpipev.models.absent import Absent

__all__ = [
    "PLAIN",
    "Change",
    "Computed",
    "Constant",
    "Description",
    "HandedThrough",
    "Snapshot",
    "check_constant",
    "leaves_of",
    "without_known",
]


class Computed(NamedTuple):
    """A tensor that the call computes; ``output`` numbers those of one call."""

    output: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class HandedThrough(NamedTuple):
    """The argument at ``path`` itself."""

    path: str


class Constant(NamedTuple):
    """A value that does not depend on parameters or inputs."""

    value: Any


PLAIN = (bool, int, float, complex, str, type(None))
"""What is told as it is, if a call gives it: the same whatever the data are, or the split is wrong."""

_NOTHING = object()

Leaf = Computed | HandedThrough | Constant
Place = tuple[Any, ...]


class Change(NamedTuple):
    """A value that a call has given, and where."""

    place: Place
    value: Any


class Description(NamedTuple):
    """A change without its tensors."""

    place: Place
    structure: pytree.TreeSpec
    leaves: tuple[Leaf, ...]

    def __str__(self) -> str:
        # Not the data of constants, which follow from the shapes of the inputs.
        leaves = [
            leaf.value.shape if isinstance(leaf, Constant) and isinstance(leaf.value, torch.Tensor) else leaf
            for leaf in self.leaves
        ]
        return f"{self.place} {self.structure} {leaves}"

    @classmethod
    def of(cls, change: Change, describe: Callable[[Any], Leaf]) -> Description:
        """Describe each leaf of a change."""
        leaves, structure = pytree.tree_flatten(change.value)
        return cls(change.place, structure, tuple(map(describe, leaves)))

    def build(self, resolve: Callable[[Leaf], Any]) -> Any:
        """The value again, from what stands for each leaf."""
        if self.structure.is_leaf():
            return resolve(self.leaves[0])
        return pytree.tree_unflatten(list(map(resolve, self.leaves)), self.structure)


class Snapshot:
    """A call's arguments before it is made, by which to tell afterwards what it has changed."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._arguments = (args, kwargs)
        self._entries = dict(_entries(self._arguments))
        self._collected = {key: len(values) for key, values in _collector().items()}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The arguments' tensors, each with its path."""
        for path, leaf in pytree.tree_flatten_with_path(self._arguments)[0]:
            if isinstance(leaf, torch.Tensor):
                yield pytree.keystr(path), leaf

    def changes(self, output: Any) -> list[Change]:
        """What the call that returned ``output`` has given."""
        found = [Change(("output",), output)]
        now = dict(_entries(self._arguments))
        for path, value in now.items():
            if _is_written(self._entries.get(path, _NOTHING), value):
                found.append(Change(("write", path), value))
        for path in self._entries:
            above = path[:-1]  # whoever writes a container anew has removed what was in it
            if path not in now and now.get(above) is self._entries.get(above):
                found.append(Change(("remove", path), None))
        for key, before in self._collected.items():
            for index, value in enumerate(_collector()[key][before:]):
                found.append(Change(("capture", key, index), value))
        return found

    def apply(self, place: Place, value: Any) -> None:
        """Make a change (that is not the output) as if the call had."""
        if place[0] == "capture":
            _collector()[place[1]].append(value)
            return
        *way, last = place[1]
        container: Any = self._arguments
        for key in way:
            container = container[key]
        if place[0] == "remove":
            if isinstance(container, list):
                del container[last:]
            else:
                container.pop(last, None)
            return
        if isinstance(container, list):
            container.extend([None] * (last + 1 - len(container)))
        container[last] = value


def _collector() -> dict[str, list[Any]]:
    """The lists to which transformers' hooks add outputs during a forward; none outside of one."""
    capturing = sys.modules.get("transformers.utils.output_capturing")  # a model of transformers has loaded it
    active = capturing._active_collector.get() if capturing is not None else None
    return {key: values for key, values in (active or {}).items() if isinstance(values, list)}


def check_constant(unit: str, spec: Leaf, given: Any) -> None:
    """Raise if a unit gives something else than the constant that other stages go on with: what follows from data.

    Raises:
        SplitError: with both. Of a tensor only the shape is compared, which needs no wait for its device.
    """
    if not isinstance(spec, Constant):
        return
    if isinstance(given, PLAIN) and given != spec.value:
        raise SplitError(
            f"{unit} gave {given!r}, in the plan it was {spec.value!r}: what follows from data has to reach "
            "other stages as a tensor, so let it give a tensor"
        )
    if isinstance(given, torch.Tensor) and given.shape != getattr(spec.value, "shape", None):
        raise SplitError(
            f"{unit} gave a tensor of shape {list(given.shape)}, in the plan it was {spec.value!r}, a constant: "
            "what follows from data has to be made of a tensor that it is given"
        )


def leaves_of(value: Any) -> list[Any]:
    """The leaves of a nest of containers; mostly it is one tensor, for which pytree takes its time."""
    return [value] if isinstance(value, torch.Tensor) else pytree.tree_leaves(value)


def _is_written(before: Any, now: Any) -> bool:
    if isinstance(now, PLAIN):  # one that is computed anew is another object each time
        return not isinstance(before, PLAIN) or before != now
    return before is not now


def _entries(value: Any, path: tuple[Any, ...] = (), depth: int = 0) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Everything held by a dict or list within the arguments, which are containers themselves, by the way to it."""
    for key, inner in list(enumerate(value) if isinstance(value, (list, tuple)) else value.items()):
        if depth >= 2 and not isinstance(value, tuple):
            yield (*path, key), inner
        if depth < 6 and is_container(inner):
            yield from _entries(inner, (*path, key), depth + 1)


def is_container(value: Any) -> bool:
    """Whether it holds others, which a unit reads or writes there."""
    return not isinstance(value, torch.Tensor) and isinstance(value, (dict, list, tuple, UserDict))


class _Data(torch.autograd.Function):
    """The data of an Absent as a tensor of its own, whose gradient goes on to what was written into the Absent."""

    @staticmethod
    def forward(ctx: Any, absent: Absent) -> torch.Tensor:
        return absent.value.detach()  # type: ignore[union-attr]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def without_known(tree: Any) -> Any:
    """Real tensors in place of Absents whose data is known: what a unit that is really called is given.

    Dicts and lists stay the same objects, since a unit may write into them for others to read.
    """
    if isinstance(tree, Absent):
        return tree if tree.value is None else _Data.apply(tree) if tree.requires_grad else tree.value
    if not is_container(tree):
        return tree
    if not isinstance(tree, tuple):
        for key, inner in list(enumerate(tree) if isinstance(tree, list) else tree.items()):
            known = without_known(inner)
            if known is not inner:
                tree[key] = known
    else:
        known_too = [without_known(inner) for inner in tree]
        if any(now is not before for now, before in zip(known_too, tree, strict=True)):
            return type(tree)(*known_too) if hasattr(tree, "_fields") else tuple(known_too)
    return tree
