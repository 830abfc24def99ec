"""Plans for inputs of other shapes than the example's.

A plan holds for one *signature*: the shape of each tensor among the inputs. When a longer sequence or another batch
size comes, every stage needs the plan for it, and every stage has to know of it, also one that reads no input at all.
Its neighbour tells it, without a byte on the wire: before the values that cross, each boundary is crossed by a tensor
without elements, whose shape spells out the signature::

    input_ids [2, 12], labels [2, 12]   ──>   torch.empty(0, 1, 2, 2, 12, 2, 2, 12)
                                                             │  └ so many dimensions
                                                             └ so many such tensors

Shapes of what crosses are agreed on by the schedule whenever they change, so these arrive by the same way. Each rank
then makes the same plan, since planning depends on nothing else, and keeps it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from pipelining_dualpipev._torch import pytree
from pipelining_dualpipev.errors import SplitError
from pipelining_dualpipev.models.absent import tensors_in
from pipelining_dualpipev.models.plan import SplitPlan, make_plan

__all__ = ["Plans", "Signature", "decode", "encode", "signature_of"]

Signature = tuple[int, ...]
"""Of each tensor, in the order of the plan's inputs: how many dimensions, then these."""

_LARGEST = 1 << 50  # torch computes strides, as products of sizes, for tensors without elements too


def signature_of(plan: SplitPlan, inputs: Mapping[str, Any]) -> Signature:
    """The signature of keyword inputs, which are all of the plan's."""
    tensors = [tensor for name in plan.inputs for tensor in tensors_in(inputs[name])]
    return tuple(size for tensor in tensors for size in (tensor.dim(), *tensor.shape))


def encode(signature: Signature, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Tensors without elements that tell it: one, unless sizes are very large."""
    parts: list[list[int]] = [[]]
    product = 1
    for size in signature:
        product *= max(size, 1)
        if product >= _LARGEST:
            parts.append([])
            product = max(size, 1)
        parts[-1].append(size)
    return tuple(torch.empty((0, len(parts), *part), dtype=torch.uint8, device=device) for part in parts)


def decode(received: Sequence[torch.Tensor]) -> tuple[Signature, Sequence[torch.Tensor]]:
    """The signature that the first of the tensors tell, and the tensors after them."""
    number = received[0].shape[1]
    return tuple(size for tensor in received[:number] for size in tensor.shape[2:]), received[number:]


class Plans:
    """The plans of one split, by signature.

    Args:
        skeleton: the model without weights (`models.surgery.make_skeleton`); left as it is.
        plan: for the example's shapes.

    Attributes:
        first: that plan.
    """

    def __init__(self, skeleton: nn.Module, plan: SplitPlan) -> None:
        self._skeleton, self.first = skeleton, plan
        self._plans = {signature_of(plan, plan.inputs): plan}
        self._converted: dict[tuple[tuple[torch.dtype, torch.dtype], ...], Plans] = {}

    def plan_for(self, signature: Signature) -> SplitPlan:
        """The plan for inputs of these shapes, made now if there is none yet.

        Raises:
            SplitError: if the model cannot be split so for them, or would have to be split otherwise.
        """
        if signature not in self._plans:
            self._plans[signature] = self._make(signature)
        return self._plans[signature]

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
            plan = Plans(skeleton, self.first)._make(signature_of(self.first, self.first.inputs))
            self._converted[key] = Plans(skeleton, plan)
        return self._converted[key]

    def _make(self, signature: Signature) -> SplitPlan:
        shapes = _shapes(signature)

        # Values are the same on every rank, whatever the batch is, so that the plans are.
        def ones(example: torch.Tensor) -> torch.Tensor:
            return torch.ones(next(shapes), dtype=example.dtype)

        first = self.first
        inputs = {name: pytree.tree_map_only(torch.Tensor, ones, value) for name, value in first.inputs.items()}
        with torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False):
            example = {**inputs, **first.constants}
            plan = make_plan(self._skeleton, first.num_stages, example, first.assignment.cuts)
        for what, now, before in (
            ("its parameters", plan.assignment.parameter_stage, first.assignment.parameter_stage),
            ("what a stage reads of the inputs", plan.required_inputs, first.required_inputs),
            ("the parameters that travel", plan.assignment.borrowed, first.assignment.borrowed),
            ("its loss", plan.loss, first.loss),
        ):
            if now != before:
                told = ", ".join(str(list(shape)) for shape in _shapes(signature))
                raise SplitError(
                    f"for inputs of shapes {told} the model would be split otherwise than for its example ({what}): "
                    "split it with an example of these shapes, or pad the batch"
                )
        return plan


def _shapes(signature: Signature) -> Iterator[tuple[int, ...]]:
    at = 0
    while at < len(signature):
        yield signature[at + 1 : at + 1 + signature[at]]
        at += 1 + signature[at]
