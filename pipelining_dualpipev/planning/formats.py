"""Orders as people and torch write them: dicts of strings or of torch's actions, and CSV.

torch's CSV has a line a rank and a cell an action; an empty cell, like None in a list, is a bubble, which says nothing
about the order and is left out.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelining_dualpipev.errors import ScheduleError
from pipelining_dualpipev.planning.actions import Action, Order
from pipelining_dualpipev.planning.placement import Placement

__all__ = ["AnyOrder", "placement_of", "read_order", "write_csv"]

AnyOrder = Mapping[int, Sequence[Any]] | str | Path
"""Rank to actions (`Action`, text, a torch action, None), or CSV text, or the path of a CSV file."""


def read_order(order: AnyOrder) -> Order:
    """An order in any of its written forms.

    Raises:
        ValueError: if something in it is no action.
        OSError: if a file cannot be read.
    """
    if isinstance(order, Path) or (isinstance(order, str) and "\n" not in order and order.endswith(".csv")):
        order = Path(order).read_text()
    rows = dict(enumerate(csv.reader(io.StringIO(order)))) if isinstance(order, str) else order
    return {
        rank: [_action(cell) for cell in row if cell is not None and str(cell).strip()] for rank, row in rows.items()
    }


def _action(cell: Any) -> Action:
    # torch's action type is private, but its text is what it is read from.
    return cell if isinstance(cell, Action) else Action.parse(str(cell))


def write_csv(order: Order) -> str:
    """The order, or the programs, as CSV in torch's format."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for rank in sorted(order):
        writer.writerow(map(str, order[rank]))
    return text.getvalue()


def placement_of(order: Order) -> Placement:
    """Which rank holds which stage, as the order's own actions have it.

    Raises:
        ScheduleError: if a stage has actions on two ranks, or none.
    """
    rank_of: dict[int, int] = {}
    for rank, actions in order.items():
        for single in (single for action in actions for single in action.singles):
            if rank_of.setdefault(single.stage, rank) != rank:
                raise ScheduleError(
                    f"law 'at home' broken: stage {single.stage} has actions on rank {rank_of[single.stage]} and, "
                    f"{single}, on rank {rank}"
                )
    return Placement.of(rank_of)
