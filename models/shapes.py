"""Plans for other inputs than the example's: other shapes, an image more or none, values that decide otherwise.

A plan holds for one *signature*, which is which inputs there are, of which shapes and types, as long as its guards do
(`models.guards`). The first stage, where all inputs are, finds the plan for a microbatch, or has it made. Every other
stage needs the same one, also a stage that reads no input at all. Its neighbour tells it, without a byte on the wire:
before the values that cross, each boundary is crossed by a tensor without elements, whose shape spells out which plan
it is and, so that it can be made where it is not known yet, for what signature::

    plan 8141..., input_ids [2, 12], labels [2, 12]   ──>   torch.empty(0, 1, 8141..., 1, 2, 12, 2, 2, 12, ...)
                                                                           └ so many such tensors

Shapes of what crosses are agreed on by the schedule whenever they change, so these are known and not sent. Planning
depends on nothing but the signature and the values of *decisive* inputs, which reach every rank; so each makes the same
plan, and keeps it. That it is the same is checked.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from pipelining_dualpipev._torch import pytree
from pipelining_dualpipev.errors import SplitError
from pipelining_dualpipev.models.absent import tensors_in
from pipelining_dualpipev.models.guards import Guards
from pipelining_dualpipev.models.plan import SplitPlan, make_plan

__all__ = ["Key", "Plans", "decode", "encode", "inputs_reaching"]

Signature = tuple[int, ...]
"""Of each input: its form (none, a tensor, what the example has, or a list of so many), then of each of its tensors the
type, the number of dimensions, and these."""
Key = tuple[int, ...]
"""A plan's digest and its signature."""

_LARGEST = 1 << 50  # torch computes strides, as products of sizes, for tensors without elements too
_NONE, _TENSOR, _AS_IN_EXAMPLE, _LIST = range(4)
_TYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
_NUMBERS = {dtype: number for number, dtype in enumerate(_TYPES)}
_KEPT = 256  # signatures; the plans of others are made anew when they come back
_SEEN_OTHERWISE = 3  # times that the same plan came of it


def encode(key: Key, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Tensors without elements that tell it: one, unless sizes are very large."""
    parts: list[list[int]] = [[]]
    product = 1
    for size in key:
        product *= max(size, 1)
        if product >= _LARGEST:
            parts.append([])
            product = max(size, 1)
        parts[-1].append(size)
    return tuple(torch.empty((0, len(parts), *part), dtype=torch.uint8, device=device) for part in parts)


def decode(received: Sequence[torch.Tensor]) -> tuple[Key, Sequence[torch.Tensor]]:
    """The key that the first of the tensors tell, and the tensors after them."""
    number = received[0].shape[1]
    return tuple(size for tensor in received[:number] for size in tensor.shape[2:]), received[number:]


class _Kept(NamedTuple):
    """A plan, and what was seen each time that it came out; it holds if the same is seen again."""

    plan: SplitPlan
    guards: list[Guards]


class Plans:
    """The plans of one split.

    Args:
        skeleton: the model without weights (`models.surgery.make_skeleton`); left as it is.
        plan: for the example.

    Attributes:
        first: that plan.
        names: of all inputs that there may be, in the order of a signature.
    """

    def __init__(self, skeleton: nn.Module, plan: SplitPlan) -> None:
        self._skeleton, self.first = skeleton, plan
        self.names = (*plan.inputs, *plan.optional)
        self._plans: OrderedDict[Signature, dict[int, _Kept]] = OrderedDict()
        self._keep(self.signature_of(plan.inputs), plan)
        self._converted: dict[tuple[tuple[torch.dtype, torch.dtype], ...], Plans] = {}

    def signature_of(self, inputs: Mapping[str, Any]) -> Signature:
        """The signature of keyword inputs.

        Raises:
            SplitError: if one of them is neither a tensor, nor a list of some, nor like the example's.
        """
        signature: list[int] = []
        for name in self.names:
            value = inputs.get(name)
            signature.append(self._form_of(name, value))
            for tensor in _tensors(value):
                signature += (_NUMBERS[tensor.dtype], tensor.dim(), *tensor.shape)
        return tuple(signature)

    def find(self, inputs: Mapping[str, Any]) -> Key:
        """The key of the plan for these inputs, of which there have to be all; it is made now if there is none yet.

        Raises:
            SplitError: if the model cannot be split so for them, or would have to be split otherwise.
        """
        signature = self.signature_of(inputs)
        tensors = {name: _tensors(inputs.get(name)) for name in self.first.decisive}
        for digest, kept in self._known(signature).items():
            if not all(guards.failing(tensors) for guards in kept.guards):
                return digest, *signature
        plan = self._make(signature, inputs)
        known = self._known(signature).get(plan.digest)
        if known is None:
            self._keep(signature, plan)
        elif len(known.guards) < _SEEN_OTHERWISE:
            known.guards.append(plan.guards)
        else:  # it has come to the same so often that it does not matter
            known.guards[0].dropped |= known.guards[0].failing(tensors)
        return plan.digest, *signature

    def get(self, key: Key, inputs: Mapping[str, Any]) -> SplitPlan:
        """The plan of a key, made now if there is none yet.

        Args:
            key: from the first stage.
            inputs: with those whose values decide, if there are any.

        Raises:
            SplitError: if the model cannot be split so, or this rank has planned otherwise than the first stage.
        """
        digest, *rest = key
        signature = tuple(rest)
        if digest not in self._known(signature) and self._keep(signature, self._make(signature, inputs)) != digest:
            raise SplitError(
                f"for inputs {self._told(signature)} this rank plans otherwise than the first stage: the same versions "
                "of the model's code and of transformers are needed on every rank"
            )
        return self._known(signature)[digest].plan

    def types(self) -> set[torch.dtype]:
        """Those of the model's parameters and buffers."""
        return {tensor.dtype for tensor in (*self._skeleton.parameters(), *self._skeleton.buffers())}

    def converted(self, types: Mapping[torch.dtype, torch.dtype]) -> Plans:
        """The plans of the same split with all parameters and buffers of other types, the same object each time."""
        key = tuple(sorted(types.items(), key=str))
        if key not in self._converted:
            skeleton = copy.deepcopy(self._skeleton)
            for tensor in (*skeleton.parameters(), *skeleton.buffers()):
                tensor.data = tensor.data.to(types.get(tensor.dtype, tensor.dtype))
            plan = Plans(skeleton, self.first)._make(self.signature_of(self.first.inputs), self.first.values)
            self._converted[key] = Plans(skeleton, plan)
        return self._converted[key]

    def _known(self, signature: Signature) -> dict[int, _Kept]:
        """The plans for a signature, by digest."""
        if signature not in self._plans:
            self._plans[signature] = {}
            if len(self._plans) > _KEPT:
                self._plans.popitem(last=False)
        self._plans.move_to_end(signature)
        return self._plans[signature]

    def _keep(self, signature: Signature, plan: SplitPlan) -> int:
        self._known(signature)[plan.digest] = _Kept(plan, [plan.guards])
        return plan.digest

    def _form_of(self, name: str, value: Any) -> int:
        example = self.first.inputs.get(name)
        if value is None:
            return _NONE
        if isinstance(value, torch.Tensor):
            return _TENSOR
        if example is not None and pytree.tree_structure(value) == pytree.tree_structure(example):
            return _AS_IN_EXAMPLE
        if isinstance(value, (list, tuple)) and all(isinstance(leaf, torch.Tensor) for leaf in value):
            return _LIST + len(value)
        raise SplitError(
            f"the input {name!r} is a {type(value).__name__}: give a step tensors or lists of them, and the rest to "
            "split() in its example"
        )

    def _make(self, signature: Signature, inputs: Mapping[str, Any]) -> SplitPlan:
        first = self.first

        # Values are the same on every rank, so that the plans are: real ones where they decide, which reach them all.
        def ones(like: torch.Tensor) -> torch.Tensor:
            return torch.ones(like.shape, dtype=like.dtype)

        example = {
            name: pytree.tree_map_only(torch.Tensor, ones, value) for name, value in self._inputs_of(signature).items()
        }
        for name in first.decisive & example.keys():
            if inputs.get(name) is None:
                raise SplitError(f"the input {name!r}, of whose values the plan depends, has not reached this stage")
            example[name] = pytree.tree_map_only(torch.Tensor, lambda x: x.detach().cpu(), inputs[name])
        with torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False):
            try:
                plan = make_plan(self._skeleton, first.num_stages, {**first.constants, **example}, before=first)
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                raise SplitError(f"for inputs {self._told(signature)} the dry run failed: {error}") from error
        self._refuse_changes(signature, plan)
        return plan

    def _refuse_changes(self, signature: Signature, plan: SplitPlan) -> None:
        first = self.first
        for what, now, before in (
            ("the parameters that travel", plan.assignment.borrowed, first.assignment.borrowed),
            ("its loss", plan.loss or first.loss, first.loss),
        ):
            if now != before:
                raise SplitError(
                    f"for inputs {self._told(signature)} the model would be split otherwise than for its example "
                    f"({what}): split it with an example of these, or pad the batch"
                )
        for stage in range(1, plan.num_stages):
            if lacking := set(plan.required_inputs[stage]) - set(inputs_reaching(first, stage)):
                raise SplitError(
                    f"for inputs {self._told(signature)} stage {stage} needs {', '.join(sorted(lacking))}, which it "
                    "did not for the example: split the model with an example that has all kinds of inputs"
                )

    def _inputs_of(self, signature: Signature) -> dict[str, Any]:
        """Inputs of that signature, on meta."""
        numbers = iter(signature)
        inputs: dict[str, Any] = {}

        def tensor() -> torch.Tensor:
            dtype = _TYPES[next(numbers)]
            return torch.empty([next(numbers) for _ in range(next(numbers))], dtype=dtype, device="meta")

        for name in self.names:
            form = next(numbers)
            if form == _TENSOR:
                inputs[name] = tensor()
            elif form == _AS_IN_EXAMPLE:
                inputs[name] = pytree.tree_map_only(torch.Tensor, lambda _: tensor(), self.first.inputs[name])
            elif form != _NONE:
                inputs[name] = [tensor() for _ in range(form - _LIST)]
        return inputs

    def _told(self, signature: Signature) -> str:
        return ", ".join(
            f"{name} {' '.join(str(list(tensor.shape)) for tensor in tensors_in(value))}"
            for name, value in self._inputs_of(signature).items()
        )


def _tensors(value: Any) -> Sequence[torch.Tensor]:
    return () if value is None else (value,) if isinstance(value, torch.Tensor) else tensors_in(value)


def inputs_reaching(first: SplitPlan, stage: int) -> tuple[str, ...]:
    """Names of the inputs that reach a stage, if a step has them: what it reads, and what its planning depends on.

    The first stage may see them all: they are there.
    """
    if stage == 0:
        return tuple(sorted((*first.inputs, *first.optional)))
    return tuple(sorted({*first.required_inputs[stage], *first.decisive}))
