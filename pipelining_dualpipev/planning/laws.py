"""What every schedule must satisfy.

A schedule that is wrong shows itself as a hang on a cluster, or, worse, as a gradient that is off by one microbatch.
Each law here is small enough to be read, has a name, and reports the rank, the position and the action that breaks
it, with a few actions around it. They know nothing of DualPipeV: they hold for any order on any placement.

============  =========================================================================================
*at home*     every action is on the rank that holds its stage; nothing is sent between stages of one rank
*complete*    each F, I and W of each (stage, microbatch) exactly once; B counts as I then W; F < I < W
*in order*    the microbatches of a stage run in order
*paired*      a pair is a forward (and its send) and a full backward of another stage or microbatch
*matched*     for each two ranks the sends of one are the receives of the other, in one joint sequence
*acyclic*     no rank waits for itself, under each of four kinds of transport (`planning.acyclic`)
============  =========================================================================================

A program also has to keep data in line with its transfers: nothing is sent before it is computed, nothing used
before it is received (part of *complete*: a transfer missing, twice, or on the wrong side of its action).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, NoReturn

from pipelining_dualpipev.errors import ScheduleError
from pipelining_dualpipev.planning.actions import Action, Kind, Order
from pipelining_dualpipev.planning.acyclic import check_acyclic
from pipelining_dualpipev.planning.lowering import peer_rank
from pipelining_dualpipev.planning.placement import Placement

__all__ = ["check_order", "check_programs"]

_CONTEXT = 3  # actions shown on either side of the one that breaks a law


class _Place(NamedTuple):
    rank: int
    position: int


_Wire = tuple[str, int, int]  # what travels: F or B, the boundary's lower stage, the microbatch


def check_order(order: Mapping[int, Sequence[Action | str]], n_microbatches: int, *, placement: Placement) -> Order:
    """Check an order of compute actions against the laws *at home*, *complete*, *in order* and *paired*.

    Args:
        order: rank to its actions, as `Action` or text like ``"0F3"``.
        n_microbatches: microbatches in a step.
        placement: which rank holds which stage.

    Returns:
        The order, parsed.

    Raises:
        ScheduleError: naming the law, the rank, the position and the action.
    """
    parsed = _parse(order)
    _check_at_home(parsed, placement)
    _check_paired(parsed)
    _check_complete(parsed, n_microbatches, placement)
    _check_in_order(parsed)
    return parsed


def check_programs(programs: Mapping[int, Sequence[Action | str]], *, placement: Placement) -> Order:
    """Check lowered programs against *at home*, *matched*, *acyclic* and the transfers' part of *complete*.

    Raises:
        ScheduleError: naming the law, the rank, the position and the action.
    """
    parsed = _parse(programs)
    _check_at_home(parsed, placement)
    _check_transfers_complete(parsed, placement)
    _check_matched(parsed, placement)
    check_acyclic(parsed, placement=placement)
    return parsed


def _parse(order: Mapping[int, Sequence[Action | str]]) -> Order:
    return {rank: [Action.parse(a) if isinstance(a, str) else a for a in actions] for rank, actions in order.items()}


def _singles(order: Order) -> Iterator[tuple[_Place, Action]]:
    for rank, actions in order.items():
        for position, action in enumerate(actions):
            for single in action.singles:
                yield _Place(rank, position), single


def _broken(law: str, order: Order, place: _Place, why: str) -> NoReturn:
    actions = order[place.rank]
    first = max(0, place.position - _CONTEXT)
    around = [
        f">{action}<" if position == place.position else str(action)
        for position, action in enumerate(actions[first : place.position + _CONTEXT + 1], start=first)
    ]
    raise ScheduleError(
        f"law '{law}' broken on rank {place.rank} at position {place.position}: {why}\n"
        f"    ... {' '.join(around) or 'nothing here'} ..."
    )


def _check_at_home(order: Order, placement: Placement) -> None:
    if sorted(order) != list(range(placement.num_ranks)):
        raise ScheduleError(
            f"law 'at home' broken: the placement has ranks 0..{placement.num_ranks - 1}, the order has {sorted(order)}"
        )
    for place, single in _singles(order):
        if not 0 <= single.stage < placement.num_stages:
            _broken("at home", order, place, f"{single} names a stage that is not one of 0..{placement.num_stages - 1}")
        home = placement.rank_of[single.stage]
        if home != place.rank:
            _broken("at home", order, place, f"{single} is for stage {single.stage}, which rank {home} holds")
        if single.kind.is_communication:
            step = 1 if single.kind in (Kind.SEND_F, Kind.RECV_B) else -1
            if not 0 <= single.stage + step < placement.num_stages:
                _broken("at home", order, place, f"{single} has no stage {single.stage + step} at its other end")
            if peer_rank(single, placement) == place.rank:
                _broken("at home", order, place, f"{single} would go from rank {place.rank} to itself")


def _check_paired(order: Order) -> None:
    for rank, actions in order.items():
        for position, action in enumerate(actions):
            if not action.parts and action.kind is not Kind.OVERLAP_F_B:
                continue
            place = _Place(rank, position)
            kinds = [part.kind for part in action.parts if not part.kind.is_communication]
            if kinds != [Kind.FORWARD, Kind.FULL_BACKWARD]:
                _broken("paired", order, place, f"{action} must be one forward and then one full backward")
            forward, backward = (part for part in action.parts if not part.kind.is_communication)
            if (forward.stage, forward.microbatch) == (backward.stage, backward.microbatch):
                _broken("paired", order, place, f"{action} pairs a forward with its own backward")


def _check_complete(order: Order, n_microbatches: int, placement: Placement) -> None:
    done: dict[tuple[str, int, int], _Place] = {}
    for place, single in _singles(order):
        if single.kind.is_communication:
            _broken("complete", order, place, f"{single} is no compute action: check_programs takes programs")
        if not 0 <= single.microbatch < n_microbatches:
            why = f"{single} names a microbatch that is not one of 0..{n_microbatches - 1}"
            _broken("complete", order, place, why)
        for letter in "IW" if single.kind is Kind.FULL_BACKWARD else single.kind.value:
            key = (letter, single.stage, single.microbatch)
            if key in done:
                _broken("complete", order, place, f"the {letter} of {single} is already done at {done[key].position}")
            needed = {"F": None, "I": "F", "W": "I"}[letter]
            if needed and (needed, *key[1:]) not in done:
                _broken(
                    "complete", order, place, f"{single} comes before its {single.stage}{needed}{single.microbatch}"
                )
            done[key] = place
    backwards = any(letter != "F" for letter, _, _ in done)
    for stage, rank in enumerate(placement.rank_of):
        for microbatch in range(n_microbatches):
            for letter in "FIW" if backwards else "F":
                if (letter, stage, microbatch) not in done:
                    end = _Place(rank, len(order[rank]))
                    _broken("complete", order, end, f"{stage}{letter}{microbatch} is missing")


def _check_in_order(order: Order) -> None:
    latest: dict[tuple[int, str], int] = defaultdict(lambda: -1)
    for place, single in _singles(order):
        for letter in "IW" if single.kind is Kind.FULL_BACKWARD else single.kind.value:
            before = latest[single.stage, letter]
            if single.microbatch < before:
                why = f"{single} comes after microbatch {before} of the same stage"
                _broken("in order", order, place, why)
            latest[single.stage, letter] = single.microbatch


def _check_transfers_complete(programs: Order, placement: Placement) -> None:
    """Every transfer once, after what produces it and before what uses it."""
    done: dict[tuple[Kind, int, int], _Place] = {}

    def need(kinds: tuple[Kind, ...], single: Action, place: _Place) -> None:
        if not any((kind, single.stage, single.microbatch) in done for kind in kinds):
            wanted = f"{single.stage}{kinds[0].value}{single.microbatch}"
            _broken("complete", programs, place, f"{single} comes before its {wanted}")

    gradient = (Kind.FULL_BACKWARD, Kind.BACKWARD_INPUT)
    for place, single in _singles(programs):
        key = (single.kind, single.stage, single.microbatch)
        if key in done:
            _broken("complete", programs, place, f"{single} is already there at {done[key].position}")
        if single.kind is Kind.FORWARD and placement.crosses(single.stage - 1):
            need((Kind.RECV_F,), single, place)
        elif single.kind in gradient and placement.crosses(single.stage):
            need((Kind.RECV_B,), single, place)
        elif single.kind is Kind.SEND_F:
            need((Kind.FORWARD,), single, place)
        elif single.kind is Kind.SEND_B:
            need(gradient, single, place)
        done[key] = place

    for kind, stage, microbatch in list(done):
        if kind is Kind.FORWARD and placement.crosses(stage):
            send = Kind.SEND_F
        elif kind in gradient and placement.crosses(stage - 1):
            send = Kind.SEND_B
        else:
            continue
        if (send, stage, microbatch) not in done:
            rank = placement.rank_of[stage]
            end = _Place(rank, len(programs[rank]))
            _broken("complete", programs, end, f"{stage}{send.value}{microbatch} is missing")


def _check_matched(programs: Order, placement: Placement) -> None:
    """The joint sequence of transfers between two ranks is the same on both; so are then those of each direction."""
    sequences: dict[tuple[int, int], list[tuple[_Wire, _Place, Action]]] = defaultdict(list)
    for place, single in _singles(programs):
        if single.kind.is_communication:
            forwards = single.kind in (Kind.SEND_F, Kind.RECV_F)
            lower_stage = single.stage if single.kind in (Kind.SEND_F, Kind.RECV_B) else single.stage - 1
            wire = ("F" if forwards else "B", lower_stage, single.microbatch)
            sequences[place.rank, peer_rank(single, placement)].append((wire, place, single))
    for (rank, peer), ours in sequences.items():
        theirs = sequences.get((peer, rank), [])
        for index, (wire, place, single) in enumerate(ours):
            if index >= len(theirs):
                _broken("matched", programs, place, f"{single} has no counterpart on rank {peer}")
            other_wire, other_place, other = theirs[index]
            if wire != other_wire:
                why = f"{single} is transfer {index} with rank {peer}, whose transfer {index} is {other}"
                _broken("matched", programs, place, f"{why}, at its position {other_place.position}")
