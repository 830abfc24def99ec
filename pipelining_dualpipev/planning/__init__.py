"""Schedules as data: who computes what, when, and what travels between the ranks. Pure Python, no torch."""

from pipelining_dualpipev.planning.actions import Action, Kind, dualpipev_order
from pipelining_dualpipev.planning.balance import balance, stage_costs
from pipelining_dualpipev.planning.bound import lower_bound
from pipelining_dualpipev.planning.compare import Compared, compare
from pipelining_dualpipev.planning.costs import CostModel
from pipelining_dualpipev.planning.laws import check_order, check_programs
from pipelining_dualpipev.planning.lowering import lower
from pipelining_dualpipev.planning.placement import Placement, stage_indices
from pipelining_dualpipev.planning.simulate import Timeline, simulate
from pipelining_dualpipev.planning.tune import Tuned, tune

__all__ = [
    "Action",
    "Kind",
    "Placement",
    "stage_indices",
    "dualpipev_order",
    "check_order",
    "check_programs",
    "lower",
    "CostModel",
    "simulate",
    "Timeline",
    "lower_bound",
    "tune",
    "Tuned",
    "balance",
    "stage_costs",
    "compare",
    "Compared",
]
