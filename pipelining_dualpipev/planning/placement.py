"""Which stage lives on which rank.

A pipeline of 2P stages on P ranks can be laid out in more than one way. DualPipeV lays it in a V: it runs down the
ranks and back up, so that every rank holds one early and one late stage::

    rank 0      stage 0          stage 2P-1      <- inputs and loss live on the same rank
    rank 1        stage 1       stage 2P-2
      :              :           :
    rank P-1         stage P-1, stage P          <- the fold: a hand-over inside one rank

Everything else (generator, laws, lowering, executor) is given a `Placement` and never writes ``2P-1-r`` itself, so
that another layout is another value, not another code path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

__all__ = ["Placement", "stage_indices"]


def stage_indices(rank: int, num_ranks: int) -> tuple[int, int]:
    """The two stages that ``rank`` holds in a V over ``num_ranks`` ranks: ``(rank, 2 * num_ranks - 1 - rank)``.

    Raises:
        ValueError: if ``num_ranks`` is below 1 or ``rank`` is not one of ``0..num_ranks-1``.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks is {num_ranks}: a pipeline has at least 1 rank")
    if not 0 <= rank < num_ranks:
        raise ValueError(f"rank {rank} is not one of the {num_ranks} ranks 0..{num_ranks - 1}")
    return rank, 2 * num_ranks - 1 - rank


@dataclass(frozen=True)
class Placement:
    """A map of stages to ranks. ``rank_of[stage]`` is the rank that holds the stage; every rank holds at least one.

    Raises:
        ValueError: if the ranks named are not exactly ``0..P-1``.
    """

    rank_of: tuple[int, ...]

    def __post_init__(self) -> None:
        ranks = set(self.rank_of)
        if not ranks or ranks != set(range(max(ranks) + 1)):
            raise ValueError(f"a placement names the ranks 0..P-1, each at least once; these are {sorted(ranks)}")

    @classmethod
    def v(cls, num_ranks: int) -> Placement:
        """2P stages down the ranks and back up: rank r holds stages r and 2P-1-r."""
        stage_indices(0, num_ranks)
        return cls((*range(num_ranks), *reversed(range(num_ranks))))

    @classmethod
    def loop(cls, num_ranks: int, stages_per_rank: int = 1) -> Placement:
        """Stages dealt round the ranks in turn, as torch's interleaved schedules have them: stage s on rank s % P."""
        return cls(tuple(range(num_ranks)) * stages_per_rank)

    @classmethod
    def of(cls, mapping: Placement | Mapping[int, int] | Sequence[int]) -> Placement:
        """From any map of stage to rank."""
        if isinstance(mapping, Placement):
            return mapping
        if isinstance(mapping, Mapping):
            if sorted(mapping) != list(range(len(mapping))):
                raise ValueError(f"a placement maps every stage 0..{len(mapping) - 1}; this one maps {sorted(mapping)}")
            mapping = [mapping[stage] for stage in range(len(mapping))]
        return cls(tuple(mapping))

    @property
    def num_stages(self) -> int:
        """How many stages the pipeline has."""
        return len(self.rank_of)

    @cached_property
    def num_ranks(self) -> int:
        """How many ranks the pipeline has."""
        return max(self.rank_of) + 1

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that ``rank`` holds, lowest first."""
        return tuple(stage for stage, home in enumerate(self.rank_of) if home == rank)

    def crosses(self, stage: int) -> bool:
        """Whether there is a boundary between ``stage`` and ``stage + 1``, and it lies between two ranks."""
        return 0 <= stage < self.num_stages - 1 and self.rank_of[stage] != self.rank_of[stage + 1]
