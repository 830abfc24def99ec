"""The commands that plan and look, and run nothing: ``dualpipev show``, ``check`` and ``simulate``.

`cli` hangs them beside ``train``. They end with 0; with 1 where what was asked about does not hold (`check`: an order
breaks a law); with 2 where the question itself is wrong.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from pipelining_dualpipev.errors import ScheduleError
from pipelining_dualpipev.planning import (
    Action,
    Compared,
    CostModel,
    Kind,
    Placement,
    Timeline,
    check_order,
    check_programs,
    compare,
    dualpipev_order,
    lower_bound,
    simulate,
    tune,
)
from pipelining_dualpipev.planning.actions import Order
from pipelining_dualpipev.planning.formats import placement_of, read_order, write_csv
from pipelining_dualpipev.viewing import to_html, to_svg, to_text, to_trace

__all__ = ["check", "show", "simulate_schedules"]

_BROKEN = 1

_Ranks = Annotated[int, typer.Option(help="Ranks of the pipeline; it has twice as many stages.")]
_Microbatches = Annotated[int, typer.Option(help="Microbatches in a step.")]
_Costs = Annotated[
    str,
    typer.Option(
        help="What a stage takes for a forward, an input gradient and a weight gradient, as F:I:W; or a JSON file that "
        "CostModel.save wrote, whose hop and overlap then count."
    ),
]
_Hop = Annotated[
    float | None, typer.Option(help="Time from one rank to the next.", show_default="0, or as in the file")
]
_Overlap = Annotated[
    float | None,
    typer.Option(help="What a pair takes, as a share of its parts.", show_default="1, or as in the file"),
]


def show(
    ranks: _Ranks = 4,
    microbatches: _Microbatches = 10,
    costs: _Costs = "1:1:1",
    hop: _Hop = None,
    overlap: _Overlap = None,
    tuned: Annotated[bool, typer.Option("--tuned", help="The order that the costs ask for.")] = False,
    order: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="A CSV file in torch's format to show instead; it says ranks and microbatches.",
            show_default="DualPipeV",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="A file to write: .svg or .html (a picture), .json (a trace for Perfetto), .csv (the order, in "
            "torch's format) or .txt.",
            show_default="text, to the terminal",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Say it as JSON: every action with its times.")] = False,
) -> None:
    """Draw a step of DualPipeV, or of an order in a CSV file, against time.

    `dualpipev show --ranks 8 --microbatches 20 --costs 1:1.2:0.8 --tuned --out step.html`
    """
    model = _cost_model(costs, hop, overlap)
    if order is not None:
        actions = _without_transfers(read_order(order))
        placement, title = placement_of(actions), order.name
    else:
        placement = Placement.v(ranks)
        actions = tune(ranks, microbatches, model).order if tuned else dualpipev_order(ranks, microbatches)
        title = f"DualPipeV{', tuned' * tuned}, {ranks} ranks, {microbatches} microbatches"
    model.check_stages(placement.num_stages)
    timeline = simulate(actions, model, placement=placement)
    if as_json:
        if out is not None:
            raise ValueError(f"--json prints, --out writes {out}: give one of them")
        print(json.dumps(_as_json(timeline), indent=2))
        return
    if out is None:
        print(f"{title}: {model}; takes {timeline.makespan:.5g}\n")
        print(to_text(timeline, columns=shutil.get_terminal_size().columns if sys.stdout.isatty() else None))
        return
    writers = {
        ".svg": lambda: to_svg({title: timeline}),
        ".html": lambda: to_html({title: timeline}, title=title),
        ".json": lambda: to_trace(timeline),
        ".csv": lambda: write_csv(actions),
        ".txt": lambda: to_text(timeline) + "\n",
    }
    if out.suffix not in writers:
        raise ValueError(f"{out} ends in {out.suffix!r}: give a name that ends in one of {', '.join(writers)}")
    text = writers[out.suffix]()
    try:
        out.write_text(text)
    except OSError as error:
        raise ValueError(f"cannot write {out}: {error.strerror}") from None
    print(f"wrote {out}")


def _as_json(timeline: Timeline) -> dict[str, Any]:
    ranks = [
        {
            "rank": rank,
            "bubble": timeline.bubble(rank),
            "peak_in_flight": timeline.peak_in_flight(rank),
            "actions": [{"action": str(span.action), "start": span.start, "end": span.end} for span in spans],
        }
        for rank, spans in timeline.spans.items()
    ]
    return {"costs": json.loads(timeline.costs.to_json()), "makespan": timeline.makespan, "ranks": ranks}


def check(
    file: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, help="A CSV file in torch's format, a line a rank.")
    ],
    microbatches: Annotated[
        int | None, typer.Option(help="Microbatches in a step.", show_default="as many as the file has")
    ] = None,
    cap: Annotated[
        int | None, typer.Option(help="The most microbatches a rank may hold.", show_default="any number")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Say it as JSON.")] = False,
) -> None:
    """Check an order, or lowered programs, against the laws that keep a step from hanging or being wrong.

    Ends with 0 where every law holds, and with 1 where one is broken: which, on which rank, at which action. A file
    with sends and receives is checked as programs too: that they match, and that no rank waits for itself.
    """
    given = read_order(file)
    singles = [single for row in given.values() for action in row for single in action.singles]
    if not singles:
        raise ValueError(f"{file} holds no actions: give a line for each rank, a cell for each action, like 0F3")
    n = 1 + max(single.microbatch for single in singles) if microbatches is None else microbatches
    problem = None
    try:
        placement = placement_of(given)
        check_order(_without_transfers(given), n, placement=placement, cap=cap)
        if any(single.kind.is_communication for single in singles):
            check_programs(given, placement=placement)
    except ScheduleError as error:
        problem = str(error)
    if as_json:
        print(json.dumps({"lawful": problem is None, "microbatches": n, "ranks": len(given), "problem": problem}))
    else:
        print(problem or f"{file}: lawful, {len(given)} ranks, {n} microbatches")
    if problem:
        raise typer.Exit(_BROKEN)


def simulate_schedules(
    ranks: _Ranks = 4,
    microbatches: _Microbatches = 16,
    costs: _Costs = "1:1:1",
    hop: _Hop = None,
    overlap: _Overlap = None,
    as_json: Annotated[bool, typer.Option("--json", help="Say it as JSON.")] = False,
) -> None:
    """Compare schedules under given costs: how long a step takes, how much of it is idle, and what a rank holds.

    All run the same model, cut into twice as many stages as there are ranks. A schedule of torch's that does not take
    this number of microbatches is left out, with the reason.
    """
    model = _cost_model(costs, hop, overlap)
    others, left_out = _torch_orders(ranks, microbatches)
    rows = compare(ranks, microbatches, model, others)
    bound = lower_bound(microbatches, model, placement=Placement.v(ranks))
    if as_json:
        schedules = {
            row.name: {
                "makespan": row.timeline.makespan,
                "bubble": row.bubble,
                "peak_in_flight": row.peak_in_flight,
                "peak_bytes": row.peak_bytes,
            }
            for row in rows
        }
        told = {"costs": json.loads(model.to_json()), "lower_bound": bound, "schedules": schedules}
        print(json.dumps({**told, "left_out": left_out}, indent=2))
        return
    print(f"{ranks} ranks, {microbatches} microbatches: {model}; no order on the V takes less than {bound:.5g}\n")
    print(_table(rows))
    for name, why in left_out.items():
        print(f"{name} is left out: {why}")


def _table(rows: list[Compared]) -> str:
    has_bytes = any(row.peak_bytes for row in rows)
    cells = [["schedule", "makespan", "bubble", "held", *(["bytes"] if has_bytes else [])]]
    for row in rows:
        figures = [f"{row.timeline.makespan:.5g}", f"{row.bubble:.1%}", str(row.peak_in_flight)]
        cells.append([row.name, *figures, *([f"{row.peak_bytes:.4g}"] if has_bytes else [])])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            text.ljust(width) if column == 0 else text.rjust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    ]
    return "\n".join([*lines, "", "held: most microbatches on a rank, in stages of the V", ""])


def _torch_orders(num_ranks: int, n: int) -> tuple[dict[str, tuple[Order, Placement]], dict[str, str]]:
    """Torch's orders for these numbers, and why some are not there. Imports torch."""
    from pipelining_dualpipev._torch import TORCH_SCHEDULES, torch_order

    orders: dict[str, tuple[Order, Placement]] = {}
    left_out = {}
    for name in ("Interleaved1F1B", "ZBVZeroBubble"):
        generator = TORCH_SCHEDULES[name]
        if (fitting := generator.fitting(num_ranks, n)) != n:
            left_out[name] = f"it takes {fitting} microbatches, not {n}"
            continue
        orders[name] = read_order(torch_order(name, num_ranks, n)), generator.placement(num_ranks)
    return orders, left_out


def _without_transfers(order: Order) -> Order:
    """The compute actions of programs; those inside a pair stay a pair."""

    def stripped(action: Action) -> Action:
        return Action.pair(*(part for part in action.parts if not part.kind.is_communication))

    return {
        rank: [
            stripped(action) if action.kind is Kind.OVERLAP_F_B else action
            for action in actions
            if not action.kind.is_communication
        ]
        for rank, actions in order.items()
    }


def _cost_model(costs: str, hop: float | None, overlap: float | None) -> CostModel:
    if costs.endswith(".json"):
        try:
            given = json.loads(CostModel.load(costs).to_json())
        except OSError as error:
            raise ValueError(f"cannot read {costs}: {error.strerror}") from None
    else:
        parts = costs.split(":")
        try:
            values = [float(part) for part in parts]
        except ValueError:
            values = []
        if len(values) != 3:
            raise ValueError(f"the costs are {costs!r}: give three numbers F:I:W, like 1:1.2:0.8, or a .json file")
        given = dict(zip(("forward", "backward_input", "backward_weight"), values, strict=True))
    given |= {name: value for name, value in (("hop", hop), ("overlap", overlap)) if value is not None}
    return CostModel.from_json(json.dumps(given))
