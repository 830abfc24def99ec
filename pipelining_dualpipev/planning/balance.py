"""Which layers go on which stage.

To give every stage the same number of layers is wrong as soon as the ends of the model cost something: the embedding
and the head are both on rank 0, at the two ends of the V, and all ranks wait for the one with the most to do::

    rank 0   embedding  layers i0         layers j0  head      <- fewer layers here
    rank 1              layers i1         layers j1
      :                    :                 :
    rank P-1            layers .. one run of layers ..

So what has to be even is the *rank's* load, over both of its stages:

1. the least load L is found by bisection. Whether L suffices is decided from the outside in: rank 0 takes a few layers
   from the front and as many from the back as fit, rank 1 goes on from there. For each number taken from the front it
   is enough to know the most that can have been taken from the back.
2. which of the partitions is best, the simulation says: from 1, from some whose two legs have a given share of each
   rank's work, and from the even one, layers are moved along the pipeline, one at a time, as long as the step gets
   shorter. Several shares, since what is best for the legs depends on where the large layers are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from pipelining_dualpipev.planning.actions import dualpipev_order
from pipelining_dualpipev.planning.costs import CostModel
from pipelining_dualpipev.planning.placement import Placement
from pipelining_dualpipev.planning.simulate import simulate

__all__ = ["balance", "stage_costs"]

_SIMULATIONS = 300  # the most that the search may take
_NEAR = 1e-4  # how near to the least load, as a share, the bisection comes; then layers are moved anyway
_SHARES = (0.5, 0.3, 0.7)
_CLOSE = 1e-9  # loads nearer to each other than this share are the same

_Cuts = tuple[int, ...]  # 0, where each stage but the first begins, and the number of layers


def balance(
    layers: Sequence[float],
    num_ranks: int,
    *,
    embedding: float = 0.0,
    head: float = 0.0,
    costs: CostModel | None = None,
    n_microbatches: int | None = None,
    layer_bytes: Sequence[float] | None = None,
    end_bytes: float = 0.0,
    max_bytes: float | None = None,
) -> list[range]:
    """Cut layers into the 2P stages of the V so that a step takes least, by simulation; never worse than evenly.

    Args:
        layers: what each layer costs, in order, in any unit: measured, or its parameters or flops.
        num_ranks: ranks in the pipeline, P.
        embedding: what runs on the first stage beside its layers, in the same unit.
        head: what runs on the last stage beside its layers, in the same unit.
        costs: F, I and W of one unit, each one number, the hop and the overlap; by default 1, 1, 1, 0 and 1.
        n_microbatches: microbatches in the step that is simulated; by default 2P.
        layer_bytes: what each layer takes on its rank, all in all.
        end_bytes: what embedding and head take on rank 0.
        max_bytes: the most that a rank may hold.

    Returns:
        For each stage the indices of its layers, at least one.

    Raises:
        ValueError: if there are fewer layers than stages, the numbers of costs and bytes differ, or no partition keeps
            every rank within ``max_bytes``; with both numbers and what would do.
    """
    num_stages, total = Placement.v(num_ranks).num_stages, len(layers)
    if total < num_stages:
        remedy = f"use at most {total // 2} ranks" if total > 1 else "a V has at least 2 stages"
        raise ValueError(f"{total} layers cannot fill {num_stages} stages: {remedy}")
    sizes = [0.0] * total if layer_bytes is None else layer_bytes
    if len(sizes) != total:
        raise ValueError(f"layer_bytes has {len(sizes)} numbers for {total} layers: give one for each")
    work, memory = _Load.of(layers, embedding + head), _Load.of(sizes, end_bytes)
    limit = memory.total if max_bytes is None else max_bytes
    evened = _least(work, memory, limit, num_ranks)
    if evened is None:
        smallest = _least(memory, work, work.total, num_ranks)
        assert smallest is not None
        needed = max(memory.of_rank(smallest, rank) for rank in range(num_ranks))
        raise ValueError(
            f"some rank holds at least {needed:.4g} bytes, {limit:.4g} are allowed: use more ranks, or shard what the "
            "layers hold"
        )
    search = _Search(layers, embedding, head, costs or CostModel(), n_microbatches or num_stages, num_ranks)
    even = tuple(stage * total // num_stages for stage in range(num_stages + 1))
    starts = dict.fromkeys([evened, even, *(_by_share(work, num_ranks, share) for share in _SHARES)])
    fits = sorted((cuts for cuts in starts if memory.fits(cuts, num_ranks, limit)), key=search.makespan)
    best = min((search.improved(cuts, memory, limit) for cuts in fits), key=search.makespan)
    return [range(start, end) for start, end in pairwise(best)]


def stage_costs(
    layers: Sequence[float], cut: Sequence[range], costs: CostModel, *, embedding: float = 0.0, head: float = 0.0
) -> CostModel:
    """The costs of the stages that ``cut`` makes of the layers; the arguments are those of `balance`."""
    units = [sum(layers[layer] for layer in stage) for stage in cut]
    units[0] += embedding
    units[-1] += head
    one = {"forward": costs.forward, "backward_input": costs.backward_input, "backward_weight": costs.backward_weight}
    for name, cost in one.items():
        if not isinstance(cost, (int, float)):
            raise ValueError(f"{name} is given per stage, but here it is what one unit of a layer costs: give a number")
    f, i, w = ([cost * unit for unit in units] for cost in one.values() if isinstance(cost, (int, float)))
    return CostModel(f, i, w, overlap=costs.overlap, hop=costs.hop)


class _Load(NamedTuple):
    """Sums over layers, of work or of bytes; the ends are what rank 0 has beside its layers."""

    sums: tuple[float, ...]
    ends: float

    @classmethod
    def of(cls, values: Sequence[float], ends: float) -> _Load:
        return cls(tuple(accumulate(values, initial=0.0)), ends)

    @property
    def total(self) -> float:
        return self.sums[-1] + self.ends

    def between(self, start: int, end: int) -> float:
        return self.sums[end] - self.sums[start]

    def of_rank(self, cuts: _Cuts, rank: int) -> float:
        late = len(cuts) - 2 - rank
        ends = 0.0 if rank else self.ends
        return ends + self.between(cuts[rank], cuts[rank + 1]) + self.between(cuts[late], cuts[late + 1])

    def fits(self, cuts: _Cuts, num_ranks: int, limit: float) -> bool:
        return all(self.of_rank(cuts, rank) <= limit * (1 + _CLOSE) for rank in range(num_ranks))


def _least(first: _Load, second: _Load, second_limit: float, num_ranks: int) -> _Cuts | None:
    """The partition whose largest rank is least by ``first``, with every rank within the limit by ``second``."""
    best = _within(first, first.total, second, second_limit, num_ranks)
    low, high = first.total / num_ranks, first.total  # no largest rank is below the mean
    while best and high - low > _NEAR * high:
        middle = (low + high) / 2
        if found := _within(first, middle, second, second_limit, num_ranks):
            best, high = found, max(first.of_rank(found, rank) for rank in range(num_ranks))
        else:
            low = middle
    return best


def _by_share(work: _Load, num_ranks: int, share: float) -> _Cuts:
    """Each rank an equal part of the work, and its first stage ``share`` of that, to the nearest layer."""
    layers, total = len(work.sums) - 1, work.sums[-1]
    of_first = max(0.0, work.total / num_ranks - work.ends) if num_ranks > 1 else total
    of_ranks = [of_first, *[(total - of_first) / max(1, num_ranks - 1)] * (num_ranks - 1)]
    aims = [*(share * part for part in of_ranks), *((1 - share) * part for part in reversed(of_ranks))]
    cuts = [0]
    for stage, aim in enumerate(accumulate(aims[:-1]), 1):
        nearest = min(range(layers + 1), key=lambda cut: abs(work.sums[cut] - aim))
        cuts.append(min(max(nearest, cuts[-1] + 1), layers - (2 * num_ranks - stage)))
    return (*cuts, layers)


def _within(first: _Load, first_limit: float, second: _Load, second_limit: float, num_ranks: int) -> _Cuts | None:
    """A partition that keeps every rank within both limits, or None: ranks are filled from the outside in."""

    loads = [(first, first_limit * (1 + _CLOSE)), (second, second_limit * (1 + _CLOSE))]

    def from_back(rank: int, i: int, x: int, j: int) -> int | None:
        """Where the layers before ``j`` begin that fit on the rank beside those from ``i`` to ``x``."""
        begin = 0
        for load, limit in loads:
            room = limit - load.between(i, x) - (0.0 if rank else load.ends)
            if room < 0:
                return None
            begin = max(begin, bisect_left(load.sums, load.sums[j] - room))
        return begin

    total = len(first.sums) - 1
    # After each rank: where the layers left begin, to the least place where they end, and how that came.
    frontier: dict[int, tuple[int, tuple[tuple[int, int], ...]]] = {0: (total, ())}
    for rank in range(num_ranks - 1):
        following: dict[int, tuple[int, tuple[tuple[int, int], ...]]] = {}
        left = 2 * (num_ranks - rank - 1)
        for i, (j, path) in frontier.items():
            for x in range(i + 1, j - left):
                begin = from_back(rank, i, x, j)
                if begin is None or begin >= j:
                    break
                y = max(begin, x + left)
                if x not in following or y < following[x][0]:
                    following[x] = y, (*path, (x, y))
        frontier = following
    for i, (j, path) in frontier.items():
        if from_back(num_ranks - 1, i, j, j) is not None:
            return (0, *(x for x, _ in path), (i + j) // 2, *(y for _, y in reversed(path)), total)
    return None


class _Search:
    """Moves layers between neighbouring stages as long as the simulated step gets shorter."""

    def __init__(
        self, layers: Sequence[float], embedding: float, head: float, costs: CostModel, n: int, num_ranks: int
    ) -> None:
        self.layers, self.embedding, self.head, self.costs = layers, embedding, head, costs
        self.placement, self.order = Placement.v(num_ranks), dualpipev_order(num_ranks, n)
        self.known: dict[_Cuts, float] = {}

    def makespan(self, cuts: _Cuts) -> float:
        if cuts not in self.known:
            cut = [range(start, end) for start, end in pairwise(cuts)]
            costs = stage_costs(self.layers, cut, self.costs, embedding=self.embedding, head=self.head)
            self.known[cuts] = simulate(self.order, costs, placement=self.placement).makespan
        return self.known[cuts]

    def improved(self, cuts: _Cuts, memory: _Load, limit: float) -> _Cuts:
        allowed = min(_SIMULATIONS, len(self.known) + _SIMULATIONS // 3)
        least, moved = self.makespan(cuts), True
        while moved:
            moved = False
            for other in self._moves(cuts):
                if len(self.known) >= allowed:
                    return cuts
                if memory.fits(other, self.placement.num_ranks, limit) and self.makespan(other) < least * (1 - _CLOSE):
                    cuts, least, moved = other, self.makespan(other), True
                    break
        return cuts

    @staticmethod
    def _moves(cuts: _Cuts) -> Iterator[_Cuts]:
        """Every run of neighbouring cuts, short ones first, moved by one layer either way."""
        inner = range(1, len(cuts) - 1)
        for length in range(1, len(inner) + 1):
            for first in range(1, len(inner) - length + 2):
                for step in (-1, 1):
                    moved = [*cuts]
                    for at in range(first, first + length):
                        moved[at] += step
                    if all(start < end for start, end in pairwise(moved)):
                        yield tuple(moved)
