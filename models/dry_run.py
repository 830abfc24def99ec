"""One run of the whole model on no data, in which each call of a unit becomes an *event*.

::

    forward()  ──glue──>  unit 0  ──glue──>  unit 1  ──glue──>  ...  ──>  output, loss
                 │          │                                               │
              demands:   used: roots of what it took                     roots, and how the
              data that  gave: what others are to be handed              labels came into it
              was seen   in its place (`models.calls`)
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from pipelining_dualpipev._torch import pytree, replace_call, version_of
from pipelining_dualpipev.errors import SplitError
from pipelining_dualpipev.models.absent import Absent, refuse_spoiled, tensors_in
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
from pipelining_dualpipev.models.guards import Tape
from pipelining_dualpipev.models.loss import LABELS, NUM_ITEMS, LossPlan, LossWatch, marked_labels
from pipelining_dualpipev.models.numbers import AbsentNumbers
from pipelining_dualpipev.models.roots import Demand, Root, pretending, recording
from pipelining_dualpipev.models.surgery import make_parameters_absent, refuse_in_autograd_function
from pipelining_dualpipev.models.units import Units

__all__ = ["DryRun", "Event", "accepts", "on_meta"]


@dataclass
class Event:
    """One call of a unit.

    Attributes:
        unit: FQN of the unit.
        index: which call it is.
        is_layer: whether the unit is a layer.
        is_direct: whether its ``forward`` was called, past its hooks, as a few models do.
        uses: roots of what it takes, but for its own parameters.
        gives: what it gives, without the tensors.
        stage: where it is made.
        flops: of its forward, if they were counted.
        writes_buffer: the name of a buffer of its unit that it writes into, or nothing.
    """

    unit: str
    index: int
    is_layer: bool
    is_direct: bool = False
    uses: frozenset[Root] = frozenset()
    gives: tuple[Description, ...] = ()
    stage: int = -1
    flops: int = 0
    writes_buffer: str = ""

    def root(self, output: int) -> Root:
        """The root of its output of that number."""
        return Root("event", self.unit, self.index, output)


class DryRun:
    """One run of the whole model on no data.

    Args:
        skeleton: the model without weights; left as it is.
        units: of it.
        names: each name of a parameter to its first one.
        inputs: what has tensors in it.
        constants: what has none.
        decisive: the inputs whose values are those of a batch; of the others they only stand for some.
        draws: what glue gets where it draws evenly from 0 to 1.
        counts_flops: whether those of each event are counted.

    Attributes:
        events: calls of units, in order.
        demands: what glue needed, but for the output.
        output: roots of the model's output.
        loss: how it comes about; None if there are no labels.
        writes_in_place: whether anything is written into what a unit gave, or an input.
        written_by_units: of what units gave that into which one of them has written.
        written_by_glue: and that into which glue has.
        tape: of what was done with inputs.
        chances: what code has seen of random numbers that glue has drawn.
    """

    def __init__(
        self,
        skeleton: nn.Module,
        units: Units,
        names: dict[str, str],
        inputs: dict[str, Any],
        constants: dict[str, Any],
        decisive: Collection[str],
        *,
        draws: float,
        counts_flops: bool,
    ) -> None:
        self._counts_flops = counts_flops
        self.events: list[Event] = []
        self.demands: list[Demand] = []
        self.tape = Tape()
        model = copy.deepcopy(skeleton)
        for fqn in units.units:
            own = {canonical for name, canonical in names.items() if name.startswith(f"{fqn}.")}
            unit, event = model.get_submodule(fqn), partial(Event, fqn, is_layer=fqn in units.layers)
            replace_call(unit, partial(self._record, event, unit, own))
            direct = self._record(partial(event, is_direct=True), unit, own, unit.forward)
            unit.forward = wraps(unit.forward)(direct)
        make_parameters_absent(model, names, keep=(), device="cpu")
        values = {name: pytree.tree_map_only(torch.Tensor, torch.clone, value) for name, value in inputs.items()}
        watch = None
        if isinstance(values.get(LABELS), torch.Tensor):
            values[LABELS] = marked_labels(values[LABELS])
            watch = LossWatch(values[LABELS].clone())
            if accepts(model, NUM_ITEMS):
                constants = {**constants, NUM_ITEMS: torch.ones(())}
        absent = {name: _valued(value, Root("input", name)) for name, value in values.items()}
        for name in values.keys() & set(decisive) - {LABELS}:  # whose values are marks
            self.tape.add_input(name, [tensor.value for tensor in tensors_in(absent[name])])  # type: ignore[attr-defined]
        with (
            recording.dry_run_of(self.demands, self.tape, draws),
            torch.random.fork_rng(devices=[]),
            torch.no_grad(),
            AbsentNumbers(),
            watch or nullcontext(),
        ):
            output = model(**absent, **constants)
        self.writes_in_place, self.chances = recording.writes_in_place, recording.chances
        self.written_by_units, self.written_by_glue = recording.written_by_units, recording.written_by_glue
        self.loss: LossPlan | None = None
        if watch is not None:
            self.loss = watch.conclude(output["loss"] if isinstance(output, dict) else output[0])
        refuse_spoiled(tensors_in(output))
        roots = (tensor.roots for tensor in tensors_in(output) if isinstance(tensor, Absent))
        self.output: frozenset[Root] = frozenset().union(*roots)

    def _record(
        self, make: Callable[..., Event], unit: nn.Module, own: set[str], call: Callable[..., Any]
    ) -> Callable[..., Any]:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            event = make(index=len(self.events))
            fqn = event.unit
            if recording.unit == fqn:  # a call of the unit comes to its forward
                return call(*args, **kwargs)
            refuse_in_autograd_function(fqn)
            self.events.append(event)
            recording.events = len(self.events)
            before = Snapshot(args, kwargs)
            describe = _Describer(event, before)
            real = [tensor for _, tensor in before.tensors() if not isinstance(tensor, Absent)]
            versions = [(tensor, version_of(tensor)) for tensor in real]
            buffers = [(name, buffer, version_of(buffer)) for name, buffer in unit.named_buffers()]
            drawn = recording.drawn
            counter = FlopCounterMode(display=False) if self._counts_flops else nullcontext()
            with pretending(fqn) as used, counter:
                try:
                    output = call(*args, **kwargs)
                except (RuntimeError, NotImplementedError, IndexError, TypeError, ValueError) as error:
                    if isinstance(error, SplitError):
                        raise
                    raise SplitError(f"the dry run of {fqn} failed: {type(error).__name__}: {error}") from error
                describe.is_sure, describe.drew_in_place = not recording.guessed, recording.drew_in_place
            if isinstance(counter, FlopCounterMode):
                event.flops = counter.get_total_flops()
            event.uses = frozenset(
                root
                for root in used
                if not (root.kind == "parameter" and root.name in own)
                and not (root.kind == "random" and root.output > drawn)
            )
            event.writes_buffer = next((name for name, buffer, seen in buffers if version_of(buffer) != seen), "")
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
    """Describes what one event gives; tensors that it has computed are numbered, and become roots themselves.

    Attributes:
        is_sure: whether the call has pretended no value, by which it may have given something else.
        drew_in_place: whether it has written random numbers into a real tensor.
    """

    is_sure = True
    drew_in_place = False

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
            if self.drew_in_place:
                raise SplitError(
                    f"{self._event.unit} writes random numbers into a tensor and gives one of shape {list(leaf.shape)} "
                    "that comes of no input or parameter, so a constant to other stages, which it may not be: let it "
                    "draw by a function that gives a new tensor (torch.rand)"
                )
            return Constant(leaf.clone())  # made from shapes alone; the forward's own code may yet write into it
        if leaf.value is not None and not leaf.roots and self.is_sure:
            return Constant(leaf.value.clone())
        computed = Computed(len(self._numbers), tuple(leaf.shape), leaf.dtype)
        leaf.becomes_given(self._event.root(computed.output), is_sure=self.is_sure)
        self._numbers[id(leaf)] = computed
        return computed


def _valued(tree: Any, root: Root) -> Any:
    def valued(tensor: torch.Tensor) -> Absent:
        absent = Absent(on_meta(tensor), "cpu", frozenset({root}), tensor.detach().cpu())
        absent.memory.given = True
        return absent

    return pytree.tree_map_only(torch.Tensor, valued, tree)


def accepts(model: nn.Module, name: str) -> bool:
    """Whether the model's forward takes a keyword of that name, or any."""
    parameters = inspect.signature(model.forward).parameters
    return name in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like it, without data."""
    return torch.empty_like(tensor, device="meta")
