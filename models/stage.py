"""One stage: the model's own forward, in which only this stage's units are called.

::

    forward(*received, **inputs)
      1. what was received is put where the plan says, by root
      2. the model's forward runs; each call of a unit is the plan's next event
           an event of this stage    the unit is called, with its hooks, and what it gives is kept
           another stage's           what it would give is handed out: what was received, else an Absent
      3. after this stage's last event the forward is left (the last stage runs it to its end)
      4. what crosses to the next stage is returned

A stage whose forward goes another way than the plan's, or lets an Absent into a unit, raises: never a wrong number.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any

import torch
from torch import nn

from pipelining_dualpipev._torch import is_view, on_conversion, pytree, replace_call
from pipelining_dualpipev.errors import SplitError
from pipelining_dualpipev.models.absent import Absent, tensors_in
from pipelining_dualpipev.models.calls import (
    PLAIN,
    Computed,
    Description,
    HandedThrough,
    Leaf,
    Snapshot,
    check_constant,
    leaves_of,
    without_known,
)
from pipelining_dualpipev.models.dry_run import Event, accepts
from pipelining_dualpipev.models.kept import Kept, holders_of_buffers, kept_in, refuse_written
from pipelining_dualpipev.models.loss import LABELS, NUM_ITEMS, LossFunction
from pipelining_dualpipev.models.plan import SplitPlan
from pipelining_dualpipev.models.roots import Root, told
from pipelining_dualpipev.models.shapes import Key, Plans, decode, encode, inputs_reaching
from pipelining_dualpipev.models.surgery import (
    convert_absent,
    glue_of,
    make_parameters_absent,
    refuse_hooks_on_glue,
    set_tensor,
)

__all__ = ["StageModule"]


class _StageDone(BaseException):
    """Leaves the model's forward; no model catches it by accident."""


class _Run:
    """One forward of a stage: how far it is in the plan, and the values that it has."""

    def __init__(self, plan: SplitPlan, stage: int, values: dict[Root, torch.Tensor]) -> None:
        self.plan, self.values = plan, values
        self.left = sum(event.stage == stage for event in plan.events)
        self.next_event = 0
        self.as_given = {root: value for root, value in values.items() if root in plan.as_given}
        if plan.writes_in_place:
            self.values = {root: value.clone() for root, value in values.items()}
        self.kept: list[Kept] | None = None
        self.within = ""  # which unit's call


_active: ContextVar[_Run | None] = ContextVar("the stage's forward that is running", default=None)


class StageModule(nn.Module):
    """A stage of a split model.

    Args:
        skeleton: the whole model without weights; not changed.
        plan: of the split, for the shapes of its example.
        plans: for other shapes; the stages of a rank share them.
        stage: which one.
        parameters: the stage's parameters by name; tied ones may be one object.
        device: where the stage runs.
        loss_fn: on the last stage, what knows the number of labels.

    Attributes:
        required_inputs: names of the inputs that `forward` takes.
        accepted_inputs: names of all inputs of the plan, also of those that no stage requires.
        split_description: the plan in words; the schedule makes sure that it is the same on every rank.
    """

    def __init__(
        self,
        skeleton: nn.Module,
        plan: SplitPlan,
        plans: Plans,
        stage: int,
        parameters: Mapping[str, nn.Parameter],
        device: torch.device | str,
        loss_fn: LossFunction | None = None,
    ) -> None:
        super().__init__()
        self._plan, self._plans, self._stage = plan, plans, stage
        self._device, self._loss_fn = torch.device(device), loss_fn
        self._is_last = stage == plan.num_stages - 1
        self.required_inputs = inputs_reaching(plan, stage)
        self.accepted_inputs = frozenset(plans.names)
        fixed = sorted((name, value) for name, value in plan.constants.items() if isinstance(value, PLAIN))
        self.split_description = f"{plan.explain()}\n{fixed}"
        self.model = copy.deepcopy(skeleton)
        local = plan.local_parameters(stage)
        make_parameters_absent(self.model, plan.names, keep=local, device=self._device)
        for name in local:
            set_tensor(self.model, name, parameters[name])
        for module in self.model.modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, buffer.to(self._device))
        self._takes_num_items = accepts(self.model, NUM_ITEMS)
        self._found: list[tuple[list[torch.Tensor], Key]] = []
        self._glue = glue_of(self.model, plan.units)
        self._holders = holders_of_buffers(self.model, plan.units)
        on_conversion(self.model, self._follow)
        direct = {event.unit for event in plan.events if event.is_direct}
        for fqn, unit in ((fqn, self.model.get_submodule(fqn)) for fqn in plan.units.units):
            replace_call(unit, partial(self._replace, fqn))
            if fqn in direct:  # and nowhere else: a compiler would have to look through it
                unit.forward = wraps(unit.forward)(self._replace(fqn, unit.forward))
        self._borrowed = [
            (name, first)
            for name, first in plan.names.items()
            if first in plan.assignment.borrowed[stage] and name not in local
        ]

    @property
    def tied_parameters(self) -> dict[str, nn.Parameter]:
        """The stage's parameters that several stages hold or that have several names, under the first.

        The schedule sees that on one rank they stay one object, and sums their gradients over `tied_stages`.
        """
        names, tied = self._plan.names, self.tied_stages
        local = (name for name in self._plan.local_parameters(self._stage) if names[name] in tied)
        return {names[name]: self.model.get_parameter(name) for name in local}

    @property
    def tied_stages(self) -> dict[str, tuple[int, ...]]:
        """By the same names all stages that hold them; the same on every stage."""
        return self._plan.tied_stages()

    def _follow(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """The stage's parameters have been converted: so is what it knows of those of other stages."""
        known = self._plans.types()
        types = {dtype: convert(torch.empty(0, dtype=dtype, device=self._device)).dtype for dtype in known}
        if any(before != now for before, now in types.items()):
            self._plans = self._plans.converted(types)
            self._plan = self._plans.first
            convert_absent(self.model, types)

    def forward(self, *received: torch.Tensor, **inputs: Any) -> Any:
        """Run the stage on one microbatch.

        Args:
            received: what crosses the boundary before: the shapes of the inputs (see `models.shapes`) and values in
                the plan's order; nothing on the first stage.
            inputs: the inputs in ``required_inputs``.

        Returns:
            A tuple of what crosses the boundary after; on the last stage the model's own output.

        Raises:
            SplitError: if inputs are not like the plan's, a value that the stage lacks is needed, or there is a hook
                where it would run on some stages and not on others.
        """
        refuse_hooks_on_glue(self._glue)
        self._check_types(inputs)
        key, values = decode(received) if self._stage else (self._find(inputs), received)
        plan = self._plans.get(key, inputs)
        roots = plan.boundaries[self._stage - 1] if self._stage else []
        assert len(values) == len(roots), f"{len(values)} values received, {len(roots)} cross"
        run = _Run(plan, self._stage, dict(zip(roots, values, strict=True)))
        for name, first in self._borrowed:
            set_tensor(self.model, name, run.values[Root("parameter", first)])
        arguments = self._arguments(plan, inputs)
        output = None
        if run.left or self._is_last:
            token = _active.set(run)
            try:
                output = self.model(**arguments)
            except _StageDone:
                pass
            finally:
                _active.reset(token)
        if self._is_last:
            refuse_written(run.kept or ())
            output = without_known(output)
            lacking = [tensor for tensor in tensors_in(output) if isinstance(tensor, Absent)]
            if lacking:
                raise SplitError(f"the model's output has a tensor that the last stage lacks: {lacking[0]!r}")
            return output
        outgoing = (self._outgoing(root, run) for root in plan.boundaries[self._stage])
        return (*encode(key, self._device), *outgoing)

    def prepare_inputs(
        self, kwarg_mbs: Sequence[Mapping[str, Any]], told: Sequence[Key] | None = None
    ) -> tuple[Key, ...] | None:
        """Find or make the plan for each microbatch, before a step.

        Args:
            kwarg_mbs: by microbatch the inputs in ``required_inputs``.
            told: what the first stage's module has returned; None on the first stage.

        Returns:
            On the first stage what says, beside the shapes of the inputs, which plans these are.

        Raises:
            SplitError: if the model cannot be split so for one of them.
        """
        if told is not None:
            for key, inputs in zip(told, kwarg_mbs, strict=True):
                self._plans.get(key, inputs)
            return None
        if self._stage:
            return None
        for inputs in kwarg_mbs:
            self._check_types(inputs)
        self._found = [
            (_all_tensors(inputs), self._plans.find(inputs, training=self.model.training)) for inputs in kwarg_mbs
        ]
        return tuple(key for _, key in self._found)

    def _find(self, inputs: Mapping[str, Any]) -> Key:
        """The key found by `prepare_inputs`, without looking at the data again."""
        tensors = _all_tensors(inputs)
        for index, (known, key) in enumerate(self._found):
            if len(known) == len(tensors) and all(one is other for one, other in zip(known, tensors, strict=True)):
                del self._found[index]  # and with it the inputs, once the step is over
                return key
        return self._plans.find(inputs, training=self.model.training)

    def _check_types(self, inputs: Mapping[str, Any]) -> None:
        for name, example in self._plan.inputs.items():
            if inputs.get(name) is not None:
                _check_types(name, inputs[name], example)

    def _arguments(self, plan: SplitPlan, inputs: dict[str, Any]) -> dict[str, Any]:
        arguments = dict(plan.constants)
        for name, example in plan.inputs.items():
            if name in plan.required_inputs[self._stage]:
                given = inputs.get(name)
                if given is None:
                    raise SplitError(f"stage {self._stage} needs the input {name!r}, which the first stage was given")
                # Another stage of this rank is given the same tensor.
                arguments[name] = (
                    pytree.tree_map_only(torch.Tensor, torch.clone, given) if plan.writes_in_place else given
                )
            else:
                arguments[name] = self._absent_input(name, example)
        if self._takes_num_items and LABELS in plan.inputs:
            counted = self._loss_fn is not None and self._is_last
            # As float32, so that a loss in half precision is not made a double.
            arguments[NUM_ITEMS] = self._loss_fn.num_items.float() if counted else torch.ones(())  # type: ignore[union-attr]
        return arguments

    def _absent_input(self, name: str, example: Any) -> Any:
        def absent(tensor: torch.Tensor) -> Absent:
            return Absent.like(tensor, self._device, Root("input", name))

        return (
            absent(example)
            if isinstance(example, torch.Tensor)
            else pytree.tree_map_only(torch.Tensor, absent, example)
        )

    def _outgoing(self, root: Root, run: _Run) -> torch.Tensor:
        value = run.as_given.get(root, run.values.get(root))
        if value is None:
            assert root.kind == "parameter", f"{root} was not computed"
            value = self.model.get_parameter(self._local_name(root.name))
        # torch's own schedules detach outputs in place, which a view or a leaf does not allow.
        if value.is_leaf or is_view(value) or not value.is_contiguous():
            value = value.clone(memory_format=torch.contiguous_format)
        return value

    def _local_name(self, first: str) -> str:
        return next(name for name in self._plan.local_parameters(self._stage) if self._plan.names[name] == first)

    def _replace(self, fqn: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def replaced(*args: Any, **kwargs: Any) -> Any:
            run = _active.get()
            if run is None or run.within == fqn:
                # Activation checkpointing runs a layer again in the backward; a call of a unit comes to its forward.
                return call(*args, **kwargs)
            event = self._next_event(run, fqn)
            if self._is_last and event.is_layer and run.kept is None:
                run.kept = kept_in(self._holders)
            if event.stage != self._stage:
                return self._stand_in(event, run, args, kwargs)
            args, kwargs = without_known(args), without_known(kwargs)
            before = Snapshot(args, kwargs)
            around, run.within = run.within, fqn
            output = call(*args, **kwargs)
            run.within = around
            self._keep(event, run, before.changes(output))
            run.left -= 1
            if run.left == 0 and not self._is_last:
                raise _StageDone
            return output

        return replaced

    def _next_event(self, run: _Run, fqn: str) -> Event:
        events = run.plan.events
        if run.next_event >= len(events) or events[run.next_event].unit != fqn:
            planned = events[run.next_event].unit if run.next_event < len(events) else "the end"
            raise SplitError(
                f"the forward of stage {self._stage} goes another way than planned: call {run.next_event} is {fqn}, "
                f"planned was {planned}. Give split() an example like the inputs of this step, and leave nothing in "
                "the forward to chance (LayerDrop)"
            )
        event = events[run.next_event]
        run.next_event += 1
        return event

    def _keep(self, event: Event, run: _Run, changes: list[Any]) -> None:
        if [change.place for change in changes] != [description.place for description in event.gives]:
            raise SplitError(f"{event.unit} gave other things than in the plan: {[change.place for change in changes]}")
        for change, description in zip(changes, event.gives, strict=True):
            for leaf, spec in zip(leaves_of(change.value), description.leaves, strict=True):
                if not isinstance(spec, Computed):
                    check_constant(event.unit, spec, leaf)
                    continue
                if isinstance(leaf, Absent):
                    raise SplitError(
                        f"{event.unit} was given a value that its stage, {self._stage}, lacks: {told(leaf.roots)}"
                    )
                root = event.root(spec.output)
                run.values[root] = leaf
                if root in run.plan.as_given:
                    run.as_given[root] = leaf.clone()

    def _stand_in(self, event: Event, run: _Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = Snapshot(args, kwargs) if len(event.gives) > 1 or _hands_through(event.gives[0]) else None
        arguments = dict(before.tensors()) if before and any(map(_hands_through, event.gives)) else {}

        def resolve(leaf: Leaf) -> Any:
            if isinstance(leaf, Computed):
                root = event.root(leaf.output)
                value = run.values.get(root)
                if value is None:
                    meta = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
                    value = Absent(meta, self._device, frozenset({root}))
                return value
            if isinstance(leaf, HandedThrough):
                return arguments[leaf.path]
            # A copy, as the call itself would give a new one: the forward's own code may write into it.
            return leaf.value.to(self._device, copy=True) if isinstance(leaf.value, torch.Tensor) else leaf.value

        for description in event.gives[1:]:
            assert before is not None
            before.apply(description.place, description.build(resolve))
        return event.gives[0].build(resolve)


def _hands_through(description: Description) -> bool:
    return any(isinstance(leaf, HandedThrough) for leaf in description.leaves)


def _all_tensors(inputs: Mapping[str, Any]) -> list[torch.Tensor]:
    return [tensor for name in sorted(inputs) for tensor in tensors_in(inputs[name])]


def _check_types(name: str, value: Any, example: Any) -> None:
    found, planned = ([tensor.dtype for tensor in tensors_in(tree)] for tree in (value, example))
    if found != planned:
        raise SplitError(
            f"the input {name!r} is {_listed(found)}, but the split was planned for {_listed(planned)}: give such, or "
            "split the model with an example like this"
        )


def _listed(types: list[torch.dtype]) -> str:
    return ", ".join(map(str, types)) or "no tensor"
