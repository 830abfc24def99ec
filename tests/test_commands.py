"""`dualpipev show`, `check` and `simulate`: what they write, and how they end."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import Result
from typer.testing import CliRunner

from pipelining_dualpipev import cli
from pipelining_dualpipev.planning import CostModel, Placement, dualpipev_order, lower, lower_bound, simulate, tune
from pipelining_dualpipev.planning.formats import read_order, write_csv
from pipelining_dualpipev.viewing import to_text

COSTS = CostModel(1.0, 1.2, 0.8, hop=0.1)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def test_show_draws_text():
    done = run("show", "--ranks", 2, "--microbatches", 5)
    assert done.exit_code == 0
    assert to_text(simulate(dualpipev_order(2, 5), placement=Placement.v(2))) in done.output


@pytest.mark.parametrize("tuned", [False, True])
def test_show_writes_the_order_that_others_read(tmp_path: Path, tuned: bool):
    file = tmp_path / "order.csv"
    arguments = ["show", "--ranks", 3, "--microbatches", 6, "--costs", "1:1.2:0.8", "--hop", 0.1, "--out", file]
    assert run(*arguments, *(["--tuned"] if tuned else [])).exit_code == 0
    expected = tune(3, 6, COSTS).order if tuned else dualpipev_order(3, 6)
    assert read_order(file) == expected
    assert run("show", "--order", file, "--out", tmp_path / "again.csv").exit_code == 0
    assert (tmp_path / "again.csv").read_text() == file.read_text()


def test_show_writes_pictures_and_traces(tmp_path: Path):
    for name in ("step.svg", "step.html", "step.json", "step.txt"):
        assert run("show", "--ranks", 2, "--microbatches", 4, "--out", tmp_path / name).exit_code == 0
    assert ElementTree.parse(tmp_path / "step.svg").getroot().tag.endswith("svg")
    assert (tmp_path / "step.svg").read_text() in (tmp_path / "step.html").read_text()
    assert json.loads((tmp_path / "step.json").read_text())["traceEvents"]


def test_show_says_the_step_as_json(tmp_path: Path):
    told = json.loads(run("show", "--ranks", 2, "--microbatches", 4, "--costs", "1:1.2:0.8", "--json").output)
    expected = simulate(dualpipev_order(2, 4), CostModel(1.0, 1.2, 0.8), placement=Placement.v(2))
    assert told["makespan"] == expected.makespan
    assert [rank["bubble"] for rank in told["ranks"]] == [expected.bubble(rank) for rank in range(2)]
    assert [[a["action"] for a in rank["actions"]] for rank in told["ranks"]] == [
        [str(action) for action in actions] for actions in dualpipev_order(2, 4).values()
    ]
    both = run("show", "--json", "--out", tmp_path / "step.svg")
    assert both.exit_code == 2
    assert "give one of them" in both.stderr
    assert not (tmp_path / "step.svg").exists()


def test_show_takes_costs_from_a_file(tmp_path: Path):
    COSTS.save(tmp_path / "costs.json")
    done = run("show", "--ranks", 2, "--microbatches", 4, "--costs", tmp_path / "costs.json", "--overlap", 0.9)
    assert "F 1, I 1.2, W 0.8, hop 0.1, pair 0.9 (F + B)" in done.output


@pytest.mark.parametrize("lowered", [False, True])
def test_check_passes_what_is_lawful(tmp_path: Path, lowered: bool):
    order = dualpipev_order(3, 7)
    file = tmp_path / "order.csv"
    file.write_text(write_csv(lower(order, placement=Placement.v(3)) if lowered else order))
    done = run("check", file)
    assert (done.exit_code, done.output) == (0, f"{file}: lawful, 3 ranks, 7 microbatches\n")
    assert json.loads(run("check", file, "--json").output) == {
        "lawful": True,
        "microbatches": 7,
        "ranks": 3,
        "problem": None,
    }


def test_check_names_the_law_that_is_broken(tmp_path: Path):
    order = dualpipev_order(2, 4)
    programs = write_csv(lower(order, placement=Placement.v(2)))
    file = tmp_path / "order.csv"
    for text, arguments, law in [
        (write_csv(order).replace("0F2,", ""), [], "complete"),
        (write_csv(order), ["--microbatches", 5], "complete"),
        (write_csv(order), ["--cap", 4], "bounded"),
        (programs.replace("1RECV_F0,1RECV_F1", "1RECV_F1,1RECV_F0"), [], "matched"),
        ("0F0,1F1,0B0,1B1\n1F0,1B0,0F1,0B1\n", [], "at home"),
    ]:
        file.write_text(text)
        done = run("check", file, *arguments)
        assert done.exit_code == 1, text
        assert f"law '{law}' broken" in done.output
        told = json.loads(run("check", file, *arguments, "--json").output)
        assert not told["lawful"]
        assert told["problem"] in done.output


def test_simulate_says_what_the_simulation_says():
    done = run("simulate", "--ranks", 4, "--microbatches", 16, "--costs", "1:1.2:0.8", "--hop", 0.1, "--json")
    told = json.loads(done.output)
    assert list(told["schedules"]) == ["1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV", "DualPipeV, tuned"]
    reference = simulate(dualpipev_order(4, 16), COSTS, placement=Placement.v(4))
    assert told["schedules"]["DualPipeV"]["makespan"] == reference.makespan
    assert told["schedules"]["DualPipeV"]["peak_in_flight"] == 9
    assert told["schedules"]["DualPipeV, tuned"]["makespan"] == tune(4, 16, COSTS).timeline.makespan
    assert told["lower_bound"] == lower_bound(16, COSTS, placement=Placement.v(4))
    assert told["left_out"] == {}
    # 1F1B's own formula: (P - 1) (F + B) of waiting, in stages twice as large, and hops on the way.
    assert run("simulate", "--json", "--hop", 0).exit_code == 0
    plain = json.loads(run("simulate", "--ranks", 4, "--microbatches", 16, "--json").output)["schedules"]["1F1B"]
    assert plain == {"makespan": (16 + 3) * 6, "bubble": pytest.approx(3 / 19), "peak_in_flight": 8, "peak_bytes": 0}


def test_simulate_says_what_is_left_out_and_why():
    done = run("simulate", "--ranks", 4, "--microbatches", 5)
    assert done.exit_code == 0
    assert "Interleaved1F1B is left out: it takes 8 microbatches, not 5" in done.output
    assert "DualPipeV, tuned" in done.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "--ranks", "0"], "num_ranks is 0"),
        (["show", "--costs", "1:2"], "give three numbers F:I:W"),
        (["show", "--costs", "1:-2:1"], "backward_input is -2.0"),
        (["show", "--costs", "nowhere.json"], "cannot read nowhere.json"),
        (["show", "--out", "step.png"], "give a name that ends in one of .svg, .html, .json, .csv, .txt"),
        (["show", "--out", "no/where.svg"], "cannot write no/where.svg"),
        (["simulate", "--microbatches", "0"], "n_microbatches is 0"),
        (["check", "nowhere.csv"], "does not exist"),
        (["check", "README.md"], "is not an action"),
    ],
)
def test_a_question_that_is_wrong_ends_with_2(arguments, words):
    done = run(*arguments)
    assert done.exit_code == 2
    assert words in " ".join(done.output.split())
    assert "Traceback" not in done.output
