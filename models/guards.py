"""What a dry run has decided by the values of inputs, and whether it would decide the same for others.

A plan (`models.plan`) is made of shapes and, here and there, of values: whether any place is padding, how many patches
an image has. So the dry run keeps a tape of its operations on values that follow from the inputs alone, and of what
Python code has seen of them::

    attention_mask ──> bool ──> all ──> seen: False
    image_grid_thw ──> prod ──> sum ──> seen: 32

Played again with other inputs, it tells what the forward would see this time. Where that is the same, so is the plan.
Only what leads to something that was seen is kept: mostly a few operations on whole numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from pipelining_dualpipev._torch import pytree, storage_of

__all__ = ["Guards", "Tape"]

_LARGE = 1 << 18  # bytes


class _Slot(NamedTuple):
    """Stands for a tensor on the tape."""

    number: int


@dataclass(frozen=True)
class _Step:
    """An operation; ``results`` are slots by their place among the leaves of what it gives."""

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    results: tuple[int | None, ...]
    touched: frozenset[int]  # storages of operands and results
    changed: frozenset[int]  # storages of results and of what is written in place


@dataclass(frozen=True)
class _Seen:
    """What Python code has seen of a slot: its data, or only its shape."""

    slot: int
    data: torch.Tensor | torch.Size


class Tape:
    """Remembers operations on known data, in a dry run."""

    def __init__(self) -> None:
        self._slots = WeakTensorKeyDictionary()
        self._storages: list[int] = []  # by slot
        self._given: dict[int, torch.Tensor] = {}  # what no noted operation has made, by slot
        self._memories: dict[int, torch.UntypedStorage] = {}  # of these, as it was at first, by storage
        self._inputs: dict[str, list[int]] = {}
        self._from_inputs: set[int] = set()  # storages
        self._steps: list[_Step | _Seen] = []

    def add_input(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        """From here on these are the tensors of the input ``name``."""
        self._inputs[name] = [self._new_slot(tensor) for tensor in tensors]
        self._from_inputs |= {storage_of(tensor) for tensor in tensors}

    def run(self, function: Callable[..., Any], args: Any, kwargs: Any, *, writes: bool) -> Any:
        """``function(*args, **kwargs)``, noted if an input or what has come of one is among the arguments.

        Args:
            function: to call, now and when the tape is played.
            args: with real tensors.
            kwargs: likewise.
            writes: whether it writes into its first argument.
        """
        operands = [leaf for leaf in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(leaf, torch.Tensor)]
        if not any(tensor in self._slots or self._is_of_inputs(tensor) for tensor in operands):
            return function(*args, **kwargs)
        noted_args, noted_kwargs = pytree.tree_map_only(torch.Tensor, self._slot_of, (args, kwargs))
        result = function(*args, **kwargs)
        made = [leaf if isinstance(leaf, torch.Tensor) else None for leaf in pytree.tree_leaves(result)]
        changed = {storage_of(tensor) for tensor in made if tensor is not None}
        if writes:
            changed.add(storage_of(args[0]))
        if any(map(self._is_of_inputs, operands)):
            self._from_inputs |= changed
        results = tuple(None if tensor is None else self._new_slot(tensor) for tensor in made)
        touched = frozenset(changed | {storage_of(tensor) for tensor in operands})
        self._steps.append(_Step(function, noted_args, noted_kwargs, results, touched, frozenset(changed)))
        return result

    def see(self, tensor: torch.Tensor, *, only_shape: bool = False) -> None:
        """Note that code has seen it."""
        if self._is_of_inputs(tensor):
            self._steps.append(_Seen(self._slot_of(tensor).number, tensor.shape if only_shape else tensor.clone()))

    def guards(self) -> Guards:
        """What leads to everything that was seen."""
        kept: list[_Step | _Seen] = []
        needed: set[int] = set()
        for step in reversed(self._steps):
            if isinstance(step, _Seen):
                needed.add(self._storages[step.slot])
            elif step.changed & needed:
                needed |= step.touched
            else:
                continue
            kept.append(step)

        def is_needed(slot: int) -> bool:
            return self._storages[slot] in needed

        inputs = {name: slots for name, slots in self._inputs.items() if any(map(is_needed, slots))}
        given = {slot: tensor for slot, tensor in self._given.items() if is_needed(slot)}
        memories = {storage: self._memories[storage] for storage in map(storage_of, given.values())}
        return Guards(inputs, given, memories, tuple(reversed(kept)))

    def _is_of_inputs(self, tensor: torch.Tensor) -> bool:
        return storage_of(tensor) in self._from_inputs

    def _slot_of(self, tensor: torch.Tensor) -> _Slot:
        if tensor not in self._slots:
            self._given[self._new_slot(tensor)] = tensor
            memory = tensor.untyped_storage()
            # A copy, since it may be written into; large ones, of which there would be many, seldom are.
            self._memories.setdefault(storage_of(tensor), memory.clone() if memory.nbytes() < _LARGE else memory)
        return _Slot(self._slots[tensor])

    def _new_slot(self, tensor: torch.Tensor) -> int:
        if tensor not in self._slots:
            self._slots[tensor] = len(self._storages)
            self._storages.append(storage_of(tensor))
        return int(self._slots[tensor])


@dataclass
class Guards:
    """Whether a dry run with other inputs of the same shapes would see what it has seen.

    Attributes:
        dropped: of the steps those that have turned out not to matter.
    """

    _inputs: Mapping[str, Sequence[int]]
    _given: Mapping[int, torch.Tensor]
    _memories: Mapping[int, torch.UntypedStorage]
    _steps: Sequence[_Step | _Seen]
    dropped: set[int] = field(default_factory=set)

    @property
    def names(self) -> frozenset[str]:
        """The inputs whose values decide."""
        return frozenset(self._inputs)

    def failing(self, inputs: Mapping[str, Sequence[torch.Tensor]]) -> set[int]:
        """Which of the things seen would be others now; nothing, if the plan holds.

        Args:
            inputs: the tensors of each input in `names`, on any device.
        """
        left = {number for number, step in enumerate(self._steps) if isinstance(step, _Seen)} - self.dropped
        if not left:
            return set()
        memories = {storage: memory.clone() for storage, memory in self._memories.items()}
        data = {slot: _in_memory(tensor, memories[storage_of(tensor)]) for slot, tensor in self._given.items()}
        for name, slots in self._inputs.items():
            copies = (tensor.detach().to("cpu", copy=True) for tensor in inputs[name])
            data |= dict(zip(slots, copies, strict=True))
        failed: set[int] = set()
        with torch.no_grad():
            for number, step in enumerate(self._steps):
                if isinstance(step, _Step):
                    try:
                        _play(step, data)
                    except (RuntimeError, IndexError, TypeError, ValueError):  # what comes after fits other values
                        return failed | {later for later in left if later > number}
                elif number in left and not _same(data[step.slot], step.data):
                    failed.add(number)
        return failed


def _in_memory(like: torch.Tensor, memory: torch.UntypedStorage) -> torch.Tensor:
    """The tensor with other data, which it shares with those that shared them before."""
    place = like.storage_offset(), like.size(), like.stride()
    return torch.empty(0, dtype=like.dtype, device=like.device).set_(memory, *place)


def _play(step: _Step, data: dict[int, torch.Tensor]) -> None:
    # Most operations take no nested lists, and this is done for every microbatch: a pytree takes ten times as long.
    args = [_filled(value, data) for value in step.args]
    kwargs = {name: _filled(value, data) for name, value in step.kwargs.items()}
    made = step.function(*args, **kwargs)
    leaves = (made,) if isinstance(made, torch.Tensor) else pytree.tree_leaves(made)
    data |= {slot: leaf for slot, leaf in zip(step.results, leaves, strict=True) if slot is not None}


def _filled(value: Any, data: Mapping[int, torch.Tensor]) -> Any:
    if isinstance(value, _Slot):
        return data[value.number]
    if not isinstance(value, (list, tuple, dict)):
        return value
    return pytree.tree_map_only(
        _Slot, lambda slot: data[slot.number], value, is_leaf=lambda leaf: isinstance(leaf, _Slot)
    )


def _same(found: torch.Tensor, seen: torch.Tensor | torch.Size) -> bool:
    return found.equal(seen) if isinstance(seen, torch.Tensor) else found.shape == seen
