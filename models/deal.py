"""Which layers go on which stage: as many to each, or so that no rank has more to do, or to hold, than it must.

Rank 0 has both ends of the model beside its layers, and a head costs as much as several layers. How much, is known
without running anything::

    what is called      embedding   layer 0   layer 1  ...  layer L-1   norm   head
    flops, from the     |-- first --| |-------- layers --------------| |-- last --|
    dry run
    "cost"              planning.balance: the V whose simulated step is shortest

``"parameters"`` does the same with numbers of parameters, which is what memory and the optimizer feel. Whatever was
chosen is kept: the plan for other inputs has the same layers on the same stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from pipelining_dualpipev.errors import SplitError
from pipelining_dualpipev.planning.balance import balance as balanced

__all__ = ["Balance", "Weights", "deal_out"]

Balance = Literal["uniform", "cost", "parameters"] | Sequence[int]
"""How layers are dealt out; or for each stage but the first the number of its first layer."""


class Weights(NamedTuple):
    """What runs on the first stage beside its layers, each layer, and what runs on the last stage beside its own."""

    first: float
    layers: Sequence[float]
    last: float


def deal_out(
    num_layers: int,
    num_stages: int,
    balance: Balance = "uniform",
    weights: Mapping[str, Callable[[], Weights]] | None = None,
) -> list[int]:
    """The stage of each layer, in order.

    Args:
        num_layers: of the model.
        num_stages: 2P.
        balance: ``"uniform"`` for as many layers to each stage as to any other, but for one; ``"cost"`` or
            ``"parameters"`` for that share of the work or the parameters to each *rank* which makes the simulated step
            shortest; or the cuts themselves.
        weights: for the two names what is to be balanced, where it is known.

    Raises:
        SplitError: if there are too few layers, or ``balance`` is none for them.
    """
    if num_layers < num_stages:
        fits = num_layers // 2
        remedy = f"use at most {fits} rank{'s' * (fits != 1)}" if fits else "a model that small cannot be split"
        raise SplitError(f"{num_layers} layers cannot fill {num_stages} stages: {remedy}")
    if balance == "uniform":
        return [number * num_stages // num_layers for number in range(num_layers)]
    if not isinstance(balance, str):
        return _cut(num_layers, num_stages, list(balance))
    if balance not in ("cost", "parameters"):
        raise SplitError(f"balance is {balance!r}: give 'uniform', 'cost', 'parameters', or a list of cuts")
    if weights is None or balance not in weights:
        raise SplitError(
            f"balance={balance!r} needs what is not known of these layers before they run: give 'uniform', or a list "
            "of cuts"
        )
    first, layers, last = weights[balance]()
    if not any(layers):
        raise SplitError(f"balance={balance!r}, but no layer has any: give 'uniform', or a list of cuts")
    stages = balanced(layers, num_stages // 2, embedding=first, head=last)
    return [stage for stage, numbers in enumerate(stages) for _ in numbers]


def _cut(num_layers: int, num_stages: int, cuts: list[int]) -> list[int]:
    told = f"for each of {num_stages} stages but the first the number of its first layer"
    if len(cuts) != num_stages - 1:
        raise SplitError(f"balance has {len(cuts)} cuts, {num_stages} stages need {num_stages - 1}: give {told}")
    if not all(before < after for before, after in pairwise([0, *cuts, num_layers])):
        raise SplitError(
            f"balance is {cuts}, which leaves a stage without a layer: give {told}, rising from 1 to at most "
            f"{num_layers - 1}, the last of the {num_layers} layers"
        )
    return [sum(cut <= number for cut in cuts) for number in range(num_layers)]
