"""Dealing the events of a dry run out to the stages (step 3 and 4 of `models.plan`).

Layers are dealt out in the order of their calls (`models.deal`). What comes before the first one runs on the first
stage, what comes after the last one on the last, what comes between with the layers before it. There are two reasons to
move an event that is no layer further up than that:

* its unit has been called before, or shares its parameters with a unit that has been (an encoder-decoder's second
  embedding): then it runs there, if what it uses is there already, and only its result travels;
* its unit shares its parameters with one that runs at the end (a decoder's embedding and the head): stage 0 is on the
  same rank as the last one, so both can hold the one parameter.

A unit that is called on several stages all the same (a block that comes back every few layers, a stack that is run
through twice) is held by each of them, and so is a parameter that units of several stages share. On one rank that is
one object; over ranks they are replicas, whose gradients `runtime.tied` sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from pipelining_dualpipev.errors import SplitError
from pipelining_dualpipev.models.deal import Balance, Weights, deal_out
from pipelining_dualpipev.models.roots import Demand, Root
from pipelining_dualpipev.models.units import Units

if TYPE_CHECKING:
    from pipelining_dualpipev.models.dry_run import Event

__all__ = ["Assignment", "assign"]


@dataclass(frozen=True)
class Assignment:
    """Where everything is.

    Attributes:
        homes: for each unit that is called the stages of its calls, in order.
        holders: for each name of a parameter the stages that hold it under that name, in order; one or more.
        boundaries: for each boundary the roots that cross it.
        required_inputs: for each stage the inputs that it reads by value, by name.
        borrowed: for each stage the parameters that it reads though another holds them; they cross like outputs.
    """

    homes: dict[str, tuple[int, ...]]
    holders: dict[str, tuple[int, ...]]
    boundaries: list[list[Root]]
    required_inputs: list[tuple[str, ...]]
    borrowed: list[frozenset[str]]


def assign(
    events: Sequence[Event],
    units: Units,
    names: dict[str, str],
    num_stages: int,
    demands: Sequence[Demand],
    balance: Balance,
    sizes: Mapping[str, int],
    before: Assignment | None = None,
) -> Assignment:
    """Set the stage of each event, and say what that means for parameters, inputs and boundaries.

    Args:
        events: in the order of their calls.
        units: of the model.
        names: each name of a parameter to its first one.
        num_stages: 2P.
        demands: what glue needs, the last of them for the model's output.
        balance: how layers are dealt out (see `models.deal`).
        sizes: the number of elements of each parameter, by first name.
        before: of the same model for other inputs: calls and parameters stay where they were.

    Raises:
        SplitError: if it cannot be done.
    """
    layers = [event for event in events if event.is_layer]
    parameters_of = {
        unit: {first for name, first in names.items() if name.startswith(f"{unit}.")} for unit in units.units
    }
    if before is None:
        _place_layers(events, layers, units, parameters_of, num_stages, balance, sizes)
        _place_others(events, layers, parameters_of, num_stages)
    else:
        _place_as(before, events, names)
    uses = _uses(events, demands, num_stages)
    _refuse_drawn_twice(uses)
    holders = before.holders if before is not None else _place_parameters(events, units, names, num_stages, uses)
    held = {first: [set(holders[name]) for name in names if names[name] == first] for first in set(names.values())}
    source = {first: min(set.union(*stages)) for first, stages in held.items()}

    def stage_of(root: Root) -> int:
        return events[root.event].stage if root.kind == "event" else source[root.name]

    needs: list[set[Root]] = [set() for _ in range(num_stages)]
    required: list[set[str]] = [set() for _ in range(num_stages)]
    for stage, root in uses:
        if root.kind == "random":
            continue  # which stays on its stage
        if root.kind == "input":
            required[stage].add(root.name)
        elif root.kind == "parameter" and stage in set.intersection(*held[root.name]):
            continue  # under whatever name it is asked for
        elif stage_of(root) < stage:
            needs[stage].add(root)
        elif stage_of(root) > stage:
            remedy = ": split the model with an example that has all kinds of inputs" if before is not None else ""
            raise SplitError(f"{root} is on stage {stage_of(root)}, but stage {stage} before it uses it{remedy}")
    boundaries = [
        sorted({root for later in needs[stage + 1 :] for root in later if stage_of(root) <= stage})
        for stage in range(num_stages - 1)
    ]
    borrowed = [frozenset(root.name for root in need if root.kind == "parameter") for need in needs]
    return Assignment(_homes(events), holders, boundaries, [tuple(sorted(names_)) for names_ in required], borrowed)


def _place_layers(
    events: Sequence[Event],
    layers: Sequence[Event],
    units: Units,
    parameters_of: Mapping[str, set[str]],
    num_stages: int,
    balance: Balance,
    sizes: Mapping[str, int],
) -> None:
    """Set the stages of the layers."""
    if not layers and units.layers:
        raise SplitError(
            f"the model's forward calls none of its {len(units.layers)} layers ({min(units.layers)}, ...), but maybe "
            "modules within them, past the split: let it call the layers themselves, layer(x)"
        )
    weights = {
        "cost": lambda: _weights(events, [event.flops for event in events]),
        "parameters": lambda: _weights(events, _new_elements(events, parameters_of, sizes)),
    }
    for event, stage in zip(layers, deal_out(len(layers), num_stages, balance, weights), strict=True):
        event.stage = stage


def _place_as(before: Assignment, events: Iterable[Event], names: Iterable[str]) -> None:
    """Set the stage of each event to that of the same call before; where its unit is kept, if there was none."""
    calls: dict[str, int] = {}
    for event in events:
        homes = before.homes.get(event.unit) or before.holders[next(n for n in names if n.startswith(f"{event.unit}."))]
        number = calls[event.unit] = calls.get(event.unit, -1) + 1
        event.stage = homes[min(number, len(homes) - 1)]


def _weights(events: Sequence[Event], values: Sequence[int]) -> Weights:
    """What each event weighs, added up: to the layer before it, or to an end of the model."""
    numbers = [event.index for event in events if event.is_layer]
    layers = [sum(values[start:end]) for start, end in pairwise([*numbers, numbers[-1] + 1])]
    return Weights(sum(values[: numbers[0]]), layers, sum(values[numbers[-1] + 1 :]))


def _new_elements(
    events: Sequence[Event], parameters_of: Mapping[str, set[str]], sizes: Mapping[str, int]
) -> list[int]:
    """How many elements of parameters each event's unit brings that no event before it has."""
    seen: set[str] = set()
    new = []
    for event in events:
        fresh = parameters_of[event.unit] - seen
        seen |= fresh
        new.append(sum(sizes[first] for first in fresh))
    return new


def _uses(events: Sequence[Event], demands: Iterable[Demand], num_stages: int) -> list[tuple[int, Root]]:
    """(stage, what it uses): its own events do, and glue on each stage that comes that far."""
    reached = [0] * num_stages
    for event in events:
        reached[event.stage] = max(reached[event.stage], event.index + 1)
    reached[-1] = len(events) + 1  # the last stage runs to the end
    uses = [(event.stage, root) for event in events for root in event.uses]
    uses += [
        (stage, root)
        for demand in demands
        for stage in range(num_stages)
        if reached[stage] > demand.events
        for root in demand.roots
    ]
    return uses


def _place_others(
    events: Sequence[Event], layers: Sequence[Event], parameters_of: dict[str, set[str]], num_stages: int
) -> None:
    last_layer = layers[-1].index
    at_the_end = {name for event in events[last_layer + 1 :] for name in parameters_of[event.unit]}
    stage = 0
    homes: dict[str, int] = {}
    for event in events:
        if event.is_layer:
            stage = event.stage
        else:
            event.stage = num_stages - 1 if event.index > last_layer else stage
            earlier = _earlier_home(event, homes, parameters_of, at_the_end if event.index < last_layer else set())
            if earlier is not None and earlier < event.stage and _is_there(event, events, earlier):
                event.stage = earlier
        homes.setdefault(event.unit, event.stage)


def _earlier_home(
    event: Event, homes: dict[str, int], parameters_of: dict[str, set[str]], at_the_end: set[str]
) -> int | None:
    """The stage where this event's unit, or one that holds all of its parameters, already is."""
    if event.unit in homes:
        return homes[event.unit]
    own = parameters_of[event.unit]
    shared = [stage for unit, stage in homes.items() if own and own <= parameters_of[unit]]
    if shared:
        return min(shared)
    return 0 if own & at_the_end else None


def _is_there(event: Event, events: Sequence[Event], stage: int) -> bool:
    return all(root.kind != "event" or events[root.event].stage <= stage for root in event.uses)


def _place_parameters(
    events: Sequence[Event],
    units: Units,
    names: dict[str, str],
    num_stages: int,
    uses: Iterable[tuple[int, Root]],
) -> dict[str, tuple[int, ...]]:
    unit_stages: dict[str, set[int]] = {}
    for event in events:
        unit_stages.setdefault(event.unit, set()).add(event.stage)
    unit_stages |= _of_uncalled(units, unit_stages)
    # Parameters of glue are where they are used first; what nothing uses is kept by the first stage.
    first_use: dict[str, int] = {}
    for stage, root in uses:
        if root.kind == "parameter":
            first_use[root.name] = min(stage, first_use.get(root.name, num_stages))
    holders: dict[str, tuple[int, ...]] = {}
    for name, first in names.items():
        unit = units.unit_of(name)
        holders[name] = tuple(sorted(unit_stages.get(unit, {0}))) if unit else (first_use.get(first, 0),)
    return holders


def _of_uncalled(units: Units, called: Mapping[str, set[int]]) -> dict[str, set[int]]:
    """Layers that other inputs may call, as these do the layers around them, go with the one before in their stack."""
    places: dict[str, set[int]] = {}
    last: dict[str, int] = {}
    for unit in units.units:
        stack = unit.rpartition(".")[0]
        if unit in called:
            last[stack] = max(called[unit])
        elif unit in units.layers and stack in last:
            places[unit] = {last[stack]}
    return places


def _refuse_drawn_twice(uses: Iterable[tuple[int, Root]]) -> None:
    drawn_on: dict[Root, int] = {}
    for stage, root in uses:
        if root.kind == "random" and drawn_on.setdefault(root, stage) != stage:
            raise SplitError(
                f"the model's forward draws random numbers outside of its layers ({root.name}), which stages "
                f"{drawn_on[root]} and {stage} use and would each draw anew: let a module draw them, such as an "
                "nn.Dropout, which runs on one stage for all, or switch it off"
            )


def _homes(events: Iterable[Event]) -> dict[str, tuple[int, ...]]:
    homes: dict[str, tuple[int, ...]] = {}
    for event in events:
        homes[event.unit] = (*homes.get(event.unit, ()), event.stage)
        if event.writes_buffer and len(set(homes[event.unit])) > 1:
            stages = ", ".join(map(str, sorted(set(homes[event.unit]))))
            raise SplitError(
                f"{event.unit} is called on stages {stages} and writes into its buffer {event.writes_buffer}, of which "
                "each stage would have its own: use a module for each call, or one without such buffers"
            )
    return homes
