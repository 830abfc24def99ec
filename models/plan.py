"""What runs on which stage, and what travels between stages: found out by one dry run of the model's own forward.

Splitters usually rewrite a model's forward, family by family, or replace the layers that a stage lacks by identities
and hope that this changes nothing else. Here every stage runs the forward as it is, and only the *units*
(`models.units`) are taken out of its hands. That needs a plan:

1. every parameter becomes an `Absent`, every input an Absent with a value, and the model is run once, on no data;
2. each call of a unit is an *event*: noted are the roots of whatever it used, and what it gave (`models.calls`);
3. the layers are dealt out to the stages, in order (`models.deal`); other events go where their data is::

       embed  layer 0  layer 1 | layer 2  layer 3 | layer 4  layer 5 | layer 6  layer 7  norm  head
       ------- stage 0 --------  ---- stage 1 ----  ---- stage 2 ----  --------- stage 3 ----------

4. what a stage uses and an earlier one gave crosses each boundary in between; inputs that it uses, it *requires*.

The same plan is made on every rank. It holds for inputs of the shapes of the example; `models.shapes` has others made.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from pipelining_dualpipev._torch import pytree, replace_call, version_of
from pipelining_dualpipev.errors import SplitError
from pipelining_dualpipev.models.absent import Absent, refuse_spoiled, tensors_in
from pipelining_dualpipev.models.assign import Assignment, assign
from pipelining_dualpipev.models.calls import (
    PLAIN,
    Change,
    Computed,
    Constant,
    Description,
    HandedThrough,
    Leaf,
    Snapshot,
)
from pipelining_dualpipev.models.deal import Balance
from pipelining_dualpipev.models.loss import LABELS, NUM_ITEMS, LossPlan, LossWatch, marked_labels
from pipelining_dualpipev.models.numbers import AbsentNumbers
from pipelining_dualpipev.models.roots import Demand, Root, pretending, recording
from pipelining_dualpipev.models.surgery import make_parameters_absent, names_of_parameters, refuse_in_autograd_function
from pipelining_dualpipev.models.units import Units, find_units

__all__ = ["Event", "SplitPlan", "make_plan"]


@dataclass
class Event:
    """One call of a unit.

    Attributes:
        unit: FQN of the unit.
        index: which call it is.
        is_layer: whether the unit is a layer.
        uses: roots of what it takes, but for its own parameters.
        gives: what it gives, without the tensors.
        stage: where it is made.
        flops: of its forward, if they were counted.
    """

    unit: str
    index: int
    is_layer: bool
    uses: frozenset[Root] = frozenset()
    gives: tuple[Description, ...] = ()
    stage: int = -1
    flops: int = 0

    def root(self, output: int) -> Root:
        """The root of its output of that number."""
        return Root("event", self.unit, self.index, output)


@dataclass(frozen=True)
class SplitPlan:
    """Which module runs on which stage, and what crosses each boundary.

    Attributes:
        num_stages: 2P for P ranks.
        boundaries: for each of the ``num_stages - 1`` boundaries the values that cross it, in the order they travel.
        required_inputs: for each stage the model inputs that it reads by value.
        loss: how the model's loss follows from the labels; None if the example has none.
    """

    num_stages: int
    units: Units
    events: tuple[Event, ...]
    assignment: Assignment
    names: dict[str, str]
    inputs: dict[str, Any]
    constants: dict[str, Any]
    loss: LossPlan | None
    writes_in_place: bool
    parameter_sizes: dict[str, tuple[torch.Size, torch.dtype]] = field(repr=False)

    @property
    def boundaries(self) -> list[list[Root]]:
        """What crosses from each stage to the next."""
        return self.assignment.boundaries

    @property
    def required_inputs(self) -> list[tuple[str, ...]]:
        """The inputs that each stage reads by value."""
        return self.assignment.required_inputs

    def local_parameters(self, stage: int) -> list[str]:
        """FQNs of the parameters that ``stage`` holds, in order; a tied one under each of its names there."""
        return [name for name in self.names if stage in self.assignment.holders[name]]

    def tied_stages(self) -> dict[str, tuple[int, ...]]:
        """By first name the stages that hold a parameter, for each that has several names or is held several times."""
        stages: dict[str, list[int]] = {}
        for name, first in self.names.items():
            stages.setdefault(first, []).extend(self.assignment.holders[name])
        return {first: tuple(sorted(set(held))) for first, held in stages.items() if len(held) > 1}

    def saves(self, name: str, stage: int) -> bool:
        """Whether ``stage`` is the one that saves a parameter (by its first name) or a buffer.

        That is the first that holds the parameter. Buffers are on every stage; those of a unit are saved where it runs
        first, others by the first stage.
        """
        if name in self.names:
            return self.names[name] == name and stage == self.assignment.holders[name][0]
        unit = self.units.unit_of(name)
        return stage == next((event.stage for event in self.events if event.unit == unit), 0)

    def shape_of(self, root: Root) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and type of a value that crosses."""
        if root.kind == "parameter":
            return self.parameter_sizes[root.name]
        for description in self.events[root.event].gives:
            for leaf in description.leaves:
                if isinstance(leaf, Computed) and leaf.output == root.output:
                    return leaf.shape, leaf.dtype
        raise KeyError(root)

    def boundary_bytes(self, boundary: int) -> int:
        """Bytes that cross a boundary forward, for one microbatch."""
        sizes = (self.shape_of(root) for root in self.boundaries[boundary])
        return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in sizes)

    def explain(self) -> str:
        """The plan in words: for each stage its units, parameters and required inputs, and what crosses to the next."""
        lines = []
        for stage in range(self.num_stages):
            units = list(dict.fromkeys(event.unit for event in self.events if event.stage == stage))
            shown = ", ".join(units if len(units) <= 6 else [*units[:3], "...", *units[-2:]])
            names = {self.names[name] for name in self.local_parameters(stage)}
            count = sum(self.parameter_sizes[name][0].numel() for name in names)
            rank = min(stage, self.num_stages - 1 - stage)
            lines.append(f"stage {stage} (rank {rank}): {shown}")
            reads = ", ".join(self.required_inputs[stage]) or "no input"
            lines.append(f"    {count:,} parameters; reads {reads}")
            if stage < self.num_stages - 1:
                crossing = "; ".join(f"{root} {list(self.shape_of(root)[0])}" for root in self.boundaries[stage])
                lines.append(f"    -> {crossing}: {self.boundary_bytes(stage):,} bytes a microbatch")
        return "\n".join(lines)


def make_plan(
    skeleton: nn.Module, num_stages: int, example: Mapping[str, Any], balance: Balance = "uniform"
) -> SplitPlan:
    """Plan the split of ``skeleton`` (parameters on meta, buffers real; left as it is) into ``num_stages`` stages.

    Args:
        skeleton: see `models.surgery.make_skeleton`.
        num_stages: 2P.
        example: one microbatch of keyword inputs. Shapes matter; of values only what the forward decides on.
        balance: how layers are dealt out (see `models.deal`).

    Raises:
        SplitError: if there are fewer layers than stages, or the forward needs what a stage does not have.
    """
    model = copy.deepcopy(skeleton)
    names = names_of_parameters(model)
    sizes = {name: (tensor.size(), tensor.dtype) for name, tensor in model.named_parameters()}
    units = find_units(model, num_stages)
    dry_run = _DryRun(model, units, names, counts_flops=balance == "cost")
    make_parameters_absent(model, names, keep=(), device="cpu")
    inputs = {name: value for name, value in example.items() if tensors_in(value)}
    constants = {name: value for name, value in example.items() if name not in inputs}
    if "use_cache" in inspect.signature(model.forward).parameters:
        constants.setdefault("use_cache", False)  # a stage has no use for another's keys and values
    final_uses, loss = dry_run.run(inputs, constants)
    demands = [*dry_run.demands, Demand(len(dry_run.events), final_uses)]
    elements = {name: size.numel() for name, (size, _) in sizes.items()}
    assignment = assign(dry_run.events, units, names, num_stages, demands, balance, elements)
    return SplitPlan(
        num_stages=num_stages,
        units=units,
        events=tuple(dry_run.events),
        assignment=assignment,
        names=names,
        inputs={name: pytree.tree_map_only(torch.Tensor, _on_meta, value) for name, value in inputs.items()},
        constants=constants,
        loss=loss,
        writes_in_place=dry_run.writes_in_place,
        parameter_sizes=sizes,
    )


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta")


class _DryRun:
    """One run of the whole model on no data."""

    def __init__(self, model: nn.Module, units: Units, names: dict[str, str], *, counts_flops: bool) -> None:
        self._model, self._counts_flops = model, counts_flops
        self.events: list[Event] = []
        self.demands: list[Demand] = []
        self.writes_in_place = False
        for fqn, unit in units.units.items():
            own = {canonical for name, canonical in names.items() if name.startswith(f"{fqn}.")}
            replace_call(unit, partial(self._record, fqn, fqn in units.layers, own))

    def run(self, inputs: dict[str, Any], constants: dict[str, Any]) -> tuple[frozenset[Root], LossPlan | None]:
        """Run; gives what the model's output is made of, and how its loss comes about."""
        values = {name: pytree.tree_map_only(torch.Tensor, torch.clone, value) for name, value in inputs.items()}
        watch = None
        if isinstance(values.get(LABELS), torch.Tensor):
            values[LABELS] = marked_labels(values[LABELS])
            watch = LossWatch(values[LABELS].clone())
            if accepts(self._model, NUM_ITEMS):
                constants = {**constants, NUM_ITEMS: torch.ones(())}
        absent = {name: _valued(value, Root("input", name)) for name, value in values.items()}
        recording.dry_run, recording.writes_in_place = True, False
        recording.demands, recording.events = self.demands, 0
        try:
            with torch.no_grad(), AbsentNumbers(), watch or nullcontext():
                output = self._model(**absent, **constants)
        finally:
            recording.dry_run, recording.demands = False, None
        self.writes_in_place = recording.writes_in_place
        loss = None
        if watch is not None:
            loss = watch.conclude(output["loss"] if isinstance(output, dict) else output[0])
        refuse_spoiled(tensors_in(output))
        roots = (tensor.roots for tensor in tensors_in(output) if isinstance(tensor, Absent))
        return frozenset().union(*roots), loss

    def _record(self, fqn: str, is_layer: bool, own: set[str], call: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            refuse_in_autograd_function(fqn)
            event = Event(fqn, len(self.events), is_layer)
            self.events.append(event)
            recording.events = len(self.events)
            before = Snapshot(args, kwargs)
            describe = _Describer(event, before)
            real = [tensor for _, tensor in before.tensors() if not isinstance(tensor, Absent)]
            versions = [(tensor, version_of(tensor)) for tensor in real]
            counter = FlopCounterMode(display=False) if self._counts_flops else nullcontext()
            with pretending(fqn) as used, counter:
                try:
                    output = call(*args, **kwargs)
                except (RuntimeError, NotImplementedError, IndexError, TypeError, ValueError) as error:
                    if isinstance(error, SplitError):
                        raise
                    raise SplitError(f"the dry run of {fqn} failed: {type(error).__name__}: {error}") from error
            if isinstance(counter, FlopCounterMode):
                event.flops = counter.get_total_flops()
            event.uses = frozenset(root for root in used if not (root.kind == "parameter" and root.name in own))
            changes = before.changes(output)
            _refuse_what_others_would_not_see(fqn, versions, changes)
            event.gives = tuple(Description.of(change, describe) for change in changes)
            return output

        return recorded


def _refuse_what_others_would_not_see(
    unit: str, versions: Iterable[tuple[torch.Tensor, int]], changes: Iterable[Change]
) -> None:
    for tensor, version in versions:  # for Absents, see `absent.refuse_spoiled`
        if version_of(tensor) != version:
            raise SplitError(
                f"{unit} writes in place into a tensor of shape {list(tensor.shape)} that it was given, where other "
                "stages would not see it: let it return what it computes"
            )
    for change in changes:
        for leaf in pytree.tree_leaves(change.value) if change.place[0] == "write" else ():
            if not isinstance(leaf, (torch.Tensor, *PLAIN)):
                raise SplitError(
                    f"{unit} puts a {type(leaf).__name__} into a dict or list that it was given, where other stages "
                    "would not see it: only tensors, numbers and text can be told to them"
                )


class _Describer:
    """Describes what one event gives; tensors that it has computed are numbered, and become roots themselves."""

    def __init__(self, event: Event, before: Snapshot) -> None:
        self._event = event
        self._arguments = {id(tensor): (path, getattr(tensor, "roots", None)) for path, tensor in before.tensors()}
        self._numbers: dict[int, Computed] = {}

    def __call__(self, leaf: Any) -> Leaf:
        if not isinstance(leaf, torch.Tensor):
            return Constant(leaf)
        if id(leaf) in self._numbers:  # the same tensor at a second place
            return self._numbers[id(leaf)]
        path, roots = self._arguments.get(id(leaf), (None, None))
        written = isinstance(leaf, Absent) and leaf.memory.spoiled is not None
        if path is not None and roots == getattr(leaf, "roots", None) and not written:
            return HandedThrough(path)
        if not isinstance(leaf, Absent):
            return Constant(leaf)  # made from shapes alone
        if leaf.value is not None and not leaf.roots:
            return Constant(leaf.value)
        computed = Computed(len(self._numbers), tuple(leaf.shape), leaf.dtype)
        leaf.becomes_given(self._event.root(computed.output))
        self._numbers[id(leaf)] = computed
        return computed


def _valued(tree: Any, root: Root) -> Any:
    def valued(tensor: torch.Tensor) -> Absent:
        absent = Absent(_on_meta(tensor), "cpu", frozenset({root}), tensor.detach().cpu())
        absent.memory.given = True
        return absent

    return pytree.tree_map_only(torch.Tensor, valued, tree)


def accepts(model: nn.Module, name: str) -> bool:
    """Whether the model's forward takes a keyword of that name, or any."""
    parameters = inspect.signature(model.forward).parameters
    return name in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
