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

`models.dry_run` does 1 and 2, `models.assign` 3 and 4. The same plan is made on every rank. It holds for inputs like
the example; `models.shapes` has others made.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pipelining_dualpipev._torch import pytree
from pipelining_dualpipev.errors import SplitError
from pipelining_dualpipev.models.absent import tensors_in
from pipelining_dualpipev.models.assign import Assignment, assign
from pipelining_dualpipev.models.calls import Computed
from pipelining_dualpipev.models.deal import Balance
from pipelining_dualpipev.models.dry_run import DryRun, Event, on_meta
from pipelining_dualpipev.models.guards import Guards
from pipelining_dualpipev.models.loss import LABELS, NUM_ITEMS, LossPlan
from pipelining_dualpipev.models.roots import Demand, Root
from pipelining_dualpipev.models.surgery import names_of_parameters
from pipelining_dualpipev.models.units import Units, find_units

__all__ = ["SplitPlan", "make_plan"]


@dataclass(frozen=True)
class SplitPlan:
    """Which module runs on which stage, and what crosses each boundary.

    Attributes:
        num_stages: 2P for P ranks.
        boundaries: for each of the ``num_stages - 1`` boundaries the values that cross it, in the order they travel.
        required_inputs: for each stage the model inputs that it reads by value.
        inputs: the example's tensors by name, on meta.
        optional: names of other inputs that the model's forward takes.
        loss: how the model's loss follows from the labels; None if the example has none.
        as_given: what crosses as its unit gave it, though glue writes into it: every stage's glue does so for itself.
        guards: what the forward has decided by the values of inputs.
        decisive: names of inputs of whose values a plan may depend, also one for other inputs than these; ``values``
            has those of the example.
    """

    num_stages: int
    units: Units
    events: tuple[Event, ...]
    assignment: Assignment
    names: dict[str, str]
    inputs: dict[str, Any]
    optional: tuple[str, ...]
    constants: dict[str, Any]
    loss: LossPlan | None
    writes_in_place: bool
    as_given: frozenset[Root]
    guards: Guards = field(repr=False)
    decisive: frozenset[str]
    values: dict[str, Any] = field(repr=False)
    parameter_sizes: dict[str, tuple[torch.Size, torch.dtype]] = field(repr=False)

    @property
    def boundaries(self) -> list[list[Root]]:
        """What crosses from each stage to the next."""
        return self.assignment.boundaries

    @property
    def required_inputs(self) -> list[tuple[str, ...]]:
        """The inputs that each stage reads by value."""
        return self.assignment.required_inputs

    @functools.cached_property
    def digest(self) -> int:
        """A number by which ranks tell plans apart: of everything that stages have to agree on."""
        shapes = [
            (name, tensor.shape, tensor.dtype) for name, value in self.inputs.items() for tensor in tensors_in(value)
        ]
        calls = [(event.unit, event.stage, *map(str, event.gives)) for event in self.events]
        written = self.writes_in_place, sorted(self.as_given)
        told = repr((shapes, calls, self.boundaries, self.required_inputs, self.loss, written))
        # Objects without words of their own tell their address, which is another on each rank.
        told = re.sub(r" at 0x[0-9a-f]+", "", told)
        return int.from_bytes(hashlib.sha256(told.encode()).digest()[:5], "big")

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
    skeleton: nn.Module,
    num_stages: int,
    example: Mapping[str, Any],
    balance: Balance = "uniform",
    before: SplitPlan | None = None,
) -> SplitPlan:
    """Plan the split of ``skeleton`` (parameters on meta, buffers real; left as it is) into ``num_stages`` stages.

    Args:
        skeleton: see `models.surgery.make_skeleton`.
        num_stages: 2P.
        example: one microbatch of keyword inputs. Shapes matter; of values only what the forward decides on.
        balance: how layers are dealt out (see `models.deal`).
        before: the plan for another example, by which everything is where it is already.

    Raises:
        SplitError: if there are fewer layers than stages, or the forward needs what a stage does not have.
    """
    if LABELS in example and example.get(NUM_ITEMS) is not None:
        raise SplitError(f"the split model's loss counts the labels of each batch itself: leave {NUM_ITEMS!r} out")
    names = names_of_parameters(skeleton)
    sizes = {name: (tensor.size(), tensor.dtype) for name, tensor in skeleton.named_parameters()}
    units = find_units(skeleton, num_stages)
    inputs = {name: value for name, value in example.items() if tensors_in(value)}
    constants = {name: value for name, value in example.items() if name not in inputs}
    if "use_cache" in inspect.signature(skeleton.forward).parameters:
        constants.setdefault("use_cache", False)  # a stage has no use for another's keys and values
    real = inputs if before is None else before.decisive
    run = functools.partial(DryRun, skeleton, units, names, inputs, constants, real, counts_flops=balance == "cost")
    dry_run = run(draws=1.0)
    demands = [*_demands(dry_run, run), Demand(len(dry_run.events), dry_run.output)]
    elements = {name: size.numel() for name, (size, _) in sizes.items()}
    placed = before.assignment if before is not None else None
    assignment = assign(dry_run.events, units, names, num_stages, demands, balance, elements, placed)
    optional = _parameters_of(skeleton) - inputs.keys() - {LABELS, NUM_ITEMS}
    guards = dry_run.tape.guards()
    decisive = before.decisive if before is not None else guards.names
    if before is None and units.units.keys() != {event.unit for event in dry_run.events}:
        # Other inputs may call what this example has not; where they go, the forward finds out from whole numbers.
        whole = {name for name, value in inputs.items() if not any(map(torch.is_floating_point, tensors_in(value)))}
        decisive |= optional | whole - {LABELS}
    return SplitPlan(
        num_stages=num_stages,
        units=units,
        events=tuple(dry_run.events),
        assignment=assignment,
        names=names,
        inputs={name: pytree.tree_map_only(torch.Tensor, on_meta, value) for name, value in inputs.items()},
        optional=tuple(sorted(optional)),
        constants=constants,
        loss=dry_run.loss,
        writes_in_place=dry_run.writes_in_place,
        as_given=_as_given(dry_run, assignment),
        guards=guards,
        decisive=decisive,
        values={name: value for name, value in inputs.items() if name in decisive},
        parameter_sizes=sizes,
    )


def _demands(dry_run: DryRun, run: Callable[..., DryRun]) -> list[Demand]:
    if not dry_run.chances or dry_run.chances != run(draws=0.0).chances:
        return dry_run.demands
    # What was drawn has decided nothing: a layer is dropped with probability 0, say.
    return [
        Demand(demand.events, frozenset(root for root in demand.roots if root.kind != "random"))
        for demand in dry_run.demands
    ]


def _as_given(dry_run: DryRun, assignment: Assignment) -> frozenset[Root]:
    crossing = {root for boundary in assignment.boundaries for root in boundary}
    for root in sorted(crossing & dry_run.written_by_glue & dry_run.written_by_units):
        raise SplitError(
            f"{root} is written into in place by a layer and by the forward's own code, which other stages would do "
            "again: let one of them make a new tensor"
        )
    return frozenset(crossing & dry_run.written_by_glue)


def _parameters_of(model: nn.Module) -> set[str]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name for name, p in inspect.signature(model.forward).parameters.items() if p.kind in kinds}
