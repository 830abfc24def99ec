"""Pictures of a step: what is in them, and where."""

from __future__ import annotations

import itertools
import json
import re
from xml.etree import ElementTree

import pytest

from pipelining_dualpipev.planning import CostModel, Placement, Timeline, dualpipev_order, simulate
from pipelining_dualpipev.viewing import to_html, to_svg, to_text, to_trace

SVG = "{http://www.w3.org/2000/svg}"


def step(num_ranks: int = 3, n: int = 7, costs: CostModel | None = None) -> Timeline:
    return simulate(dualpipev_order(num_ranks, n), costs, placement=Placement.v(num_ranks))


def singles(timeline: Timeline) -> list[str]:
    return [str(single) for spans in timeline.spans.values() for span in spans for single in span.action.singles]


def boxes(root: ElementTree.Element) -> dict[str, dict[str, float]]:
    """The rectangle of each action, by the action that its tooltip names."""
    found = {}
    for group in root.iter(f"{SVG}g"):
        rect = group.find(f"{SVG}rect")
        name = group.find(f"{SVG}title").text.split(":")[0]
        assert name not in found
        found[name] = {key: float(rect.get(key)) for key in ("x", "y", "width", "height")}
    return found


@pytest.mark.parametrize("costs", [CostModel(), CostModel(1.0, 1.5, 0.5, overlap=0.8, hop=0.1)])
def test_every_action_is_drawn_once_in_proportion(costs):
    timeline = step(costs=costs)
    drawn = boxes(ElementTree.fromstring(to_svg(timeline)))
    assert sorted(drawn) == sorted(singles(timeline))
    spans = {str(s): span for row in timeline.spans.values() for span in row for s in span.action.singles}
    scale = {round(drawn[name]["width"] / (span.end - span.start), 1) for name, span in spans.items()}
    assert len(scale) == 1
    left = {round(drawn[name]["x"] - span.start * min(scale)) for name, span in spans.items()}
    assert max(left) - min(left) <= 1


def test_nothing_of_a_rank_overlaps_but_the_two_halves_of_a_pair():
    timeline = step()
    drawn = boxes(ElementTree.fromstring(to_svg(timeline)))
    for spans in timeline.spans.values():
        for before, after in itertools.pairwise(spans):
            first, second = drawn[str(before.action.singles[0])], drawn[str(after.action.singles[0])]
            assert first["x"] + first["width"] <= second["x"] + 0.02
        for span in spans:
            if span.action.parts:
                top, bottom = (drawn[str(part)] for part in span.action.parts)
                assert (top["x"], top["width"]) == (bottom["x"], bottom["width"])
                assert top["y"] + top["height"] == bottom["y"]


def test_pointing_at_a_microbatch_dims_every_other():
    root = ElementTree.fromstring(to_svg(step(2, 5)))
    style = root.find(f"{SVG}style").text
    rules = dict(re.findall(r"svg:has\(\.(m\d+):hover\) \.a:not\(\.(m\d+)\)", style))
    assert rules == {f"m{i}": f"m{i}" for i in range(5)}
    classes = [group.get("class").split() for group in root.iter(f"{SVG}g")]
    assert {name for _, name in classes} == set(rules)


def test_the_picture_says_costs_idle_time_and_peak():
    timeline = step(2, 4, CostModel(1.0, 1.5, 0.5, hop=0.25))
    text = " ".join(ElementTree.fromstring(to_svg({"Mine & yours": timeline})).itertext())
    assert "Mine & yours · F 1, I 1.5, W 0.5, hop 0.25, pair 1 (F + B)" in text
    for rank in timeline.spans:
        assert f"{timeline.bubble(rank):.1%} idle" in text
        assert f"holds up to {timeline.peak_in_flight(rank)}" in text


def test_two_timelines_have_one_axis():
    short, long = step(2, 4), step(2, 4, CostModel(2.0, 2.0, 2.0))
    root = ElementTree.fromstring(to_svg({"short": short, "long": long}))
    widths = [
        float(group.find(f"{SVG}rect").get("width"))
        for group in root.iter(f"{SVG}g")
        if group.find(f"{SVG}title").text.startswith("0F0:")
    ]
    assert widths[1] == pytest.approx(2 * widths[0], abs=0.02)


def test_the_page_holds_the_picture_and_nothing_from_elsewhere():
    timeline = step()
    page = to_html({"Ours <1>": timeline}, title="A & B")
    assert to_svg({"Ours <1>": timeline}) in page
    assert "Ours &lt;1&gt;" in page
    assert "<script" not in page
    assert re.findall(r"(?:src|href|url)\W", page) == []
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", page) == []


def test_text_of_the_fold_of_two_ranks():
    # 1F0 2F0 1F1 2F1 1F2 2B0 (2F2;1B0) 2B1 1B1 2I2 1I2 2W2 1W2: 1F0 waits for rank 0, and so does 2I2.
    assert to_text(step(2, 3)).splitlines()[2:] == [
        "rank 1  F  .0a1b2  c      .",
        "        B  .     a+ 0+b+1+.c2++",
    ]


def test_text_with_two_digits_and_unequal_costs_keeps_time():
    timeline = step(2, 12, CostModel(1.0, 1.2, 0.8, hop=0.1))
    rows = to_text(timeline).splitlines()
    assert rows[0].startswith("rank 0  F  000102a0")
    assert "b1" in rows[0]  # microbatch 11 on its way up
    assert max(map(len, rows)) - len("rank 0  F  ") <= 2 * timeline.makespan + 1


def test_long_text_is_cut_into_blocks_that_say_the_same():
    whole = to_text(step())
    cut = to_text(step(), columns=31).split("\n\n")
    assert all(len(line) <= 31 for block in cut for line in block.splitlines())
    label = len("rank 0  F  ")
    glued = [
        "".join(line.ljust(31)[label:] for line in lines).rstrip()
        for lines in zip(*map(str.splitlines, cut), strict=True)
    ]
    assert glued == [line[label:] for line in whole.splitlines()]


def test_the_trace_has_every_action_with_its_times():
    timeline = step(costs=CostModel(overlap=0.8))
    events = json.loads(to_trace(timeline, microseconds=10.0))["traceEvents"]
    slices = {event["name"]: event for event in events if event["ph"] == "X"}
    for rank, spans in timeline.spans.items():
        for span in spans:
            whole = slices[str(span.action)]
            assert (whole["tid"], whole["ts"]) == (rank, pytest.approx(10 * span.start))
            assert whole["ts"] + whole["dur"] == pytest.approx(10 * span.end)
            for part in span.action.parts:
                inner = slices[str(part)]
                assert whole["ts"] <= inner["ts"]
                assert inner["ts"] + inner["dur"] <= whole["ts"] + whole["dur"] + 1e-9
    assert set(slices) == {*singles(timeline), *(str(s.action) for row in timeline.spans.values() for s in row)}
    held = [
        event["args"]["microbatches"] for event in events if event["ph"] == "C" and event["name"].endswith("rank 0")
    ]
    assert max(held) == timeline.peak_in_flight(0)
    assert held[-1] == 0
