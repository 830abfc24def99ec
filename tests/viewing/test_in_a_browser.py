"""The pictures in a real browser: numbers are inside their boxes, and pointing at a microbatch lights it everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelining_dualpipev.planning import CostModel, Placement, Timeline, dualpipev_order, simulate, tune
from pipelining_dualpipev.viewing import to_html, to_svg
from tests.viewing.browser import Browser, is_there

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_there(), reason="chromium and chromedriver are not installed"),
]

COSTS = CostModel(1.0, 1.2, 0.8, hop=0.1, overlap=0.9)
OPACITY = """
const lit = [], dimmed = [];
for (const action of document.querySelectorAll('.a'))
    (getComputedStyle(action).opacity == 1 ? lit : dimmed).push(action.getAttribute('class').slice(3));
return [lit, dimmed];
"""
MIDDLE = (
    "const b = document.querySelectorAll('%s')[%d].getBoundingClientRect(); return [b.x + b.width/2, b.y + b.height/2]"
)
TOO_WIDE = """
return [...document.querySelectorAll('.a')].filter(action => {
    const text = action.querySelector('text'), box = action.querySelector('rect').getBoundingClientRect();
    if (!text) return false;
    const number = text.getBoundingClientRect();
    return number.left < box.left - .5 || number.right > box.right + .5
        || number.top < box.top || number.bottom > box.bottom;
}).map(action => action.textContent)
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


def timelines() -> dict[str, Timeline]:
    placement = Placement.v(4)
    return {
        "reference": simulate(dualpipev_order(4, 12), COSTS, placement=placement),
        "tuned": tune(4, 12, COSTS).timeline,
    }


@pytest.mark.parametrize(("name", "draw"), [("step.svg", to_svg), ("step.html", to_html)])
def test_pointing_at_a_microbatch_lights_it_through_all_stages_and_nothing_else(browser, tmp_path, name, draw):
    (tmp_path / name).write_text(draw(timelines()))
    browser.open(tmp_path / name)
    browser.point_at(0, 0)
    lit, dimmed = browser.run(OPACITY)
    assert dimmed == []
    assert browser.run(TOO_WIDE) == []
    actions = [
        single
        for timeline in timelines().values()
        for row in timeline.spans.values()
        for span in row
        for single in span.action.singles
    ]
    assert len(lit) == len(actions)
    browser.point_at(*browser.run(MIDDLE % (".m3 rect", 4)))
    lit, dimmed = browser.run(OPACITY)
    assert set(lit) == {"3"}
    assert len(lit) == sum(action.microbatch == 3 for action in actions)
    assert "3" not in dimmed
    assert len(dimmed) == len(actions) - len(lit)


def test_the_names_of_the_rows_stay_while_the_strip_is_scrolled(browser, tmp_path: Path):
    (tmp_path / "step.html").write_text(to_html(timelines()))
    browser.open(tmp_path / "step.html")
    where = "const b = document.querySelector('%s').getBoundingClientRect(); return [b.left, b.top]"
    before = browser.run(where % ".labels"), browser.run(where % ".strip > svg:not(.labels)")
    assert before[0] == before[1]
    browser.run("document.querySelector('.strip').scrollLeft = 300")
    after = browser.run(where % ".labels"), browser.run(where % ".strip > svg:not(.labels)")
    assert after[0] == before[0]
    assert after[1] == [before[1][0] - 300, before[1][1]]
    # It is possible to point at what is next to the names.
    under = "return document.elementFromPoint(%f, %f).closest('.a') !== null"
    assert browser.run(under % tuple(browser.run(MIDDLE % (".m9 rect", 2))))
