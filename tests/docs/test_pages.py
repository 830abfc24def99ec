"""What the pages show is what happens: their code runs, their output is compared, their pictures are drawn again."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
TUTORIALS = sorted((ROOT / "docs/tutorial").glob("*.md"))
NUMBER = re.compile(r"\d+\.\d+")


def blocks(page: str, language: str, after: str = "") -> list[str]:
    """The fenced blocks of a page in one language; ``after`` is the comment that has to stand before them."""
    return re.findall(rf"^{after}```{language}\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


def run_on_ranks(script: str, folder: Path, num_ranks: int = 2) -> str:
    """Run it as the page says, with torchrun; a warning is an error here as in every other test.

    What a rank prints goes to a file of its own: into one pipe, ranks write in the middle of each other's lines.
    """
    (folder / "script.py").write_text(script)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command += ["--log-dir", "logs", "--redirects", "1", "script.py"]
    env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT), PYTHONWARNINGS="error")
    done = subprocess.run([sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return "".join(log.read_text() for log in sorted(folder.glob("logs/**/stdout.log")))


def assert_same_output(said: str, shown: str) -> None:
    """The same lines, in whatever order the ranks came to write them; losses may differ in their last digit."""
    lines = [sorted(text.strip().splitlines()) for text in (said, shown)]
    assert [NUMBER.sub("#", line) for line in lines[0]] == [NUMBER.sub("#", line) for line in lines[1]]
    numbers = [[float(number) for line in text for number in NUMBER.findall(line)] for text in lines]
    assert numbers[0] == pytest.approx(numbers[1], abs=0.011)


@pytest.mark.slow
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_runs_and_prints_what_it_shows(page, tmp_path):
    text = page.read_text()
    said = run_on_ranks("\n".join(blocks(text, "python")), tmp_path)
    (shown,) = blocks(text, "text", after="<!-- output -->\n")
    assert_same_output(said, shown)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain stages", "hugging face"])
def test_the_scripts_of_the_readme_run(name, tmp_path):
    (script,) = blocks(README, "python", after=f"<!-- script: {name} -->\n")
    assert len([line for line in script.splitlines() if line]) <= 16
    said = run_on_ranks(script, tmp_path)
    assert "rank 0" in said
    assert "rank 1" in said


@pytest.mark.slow
def test_the_script_on_data_parallelism_gives_all_ranks_one_norm(tmp_path):
    (script,) = blocks(
        (ROOT / "docs/how-to/data-parallel.md").read_text(), "python", "<!-- script: data parallel -->\n"
    )
    said = run_on_ranks(script, tmp_path, num_ranks=4)
    assert len(set(re.findall(r"gradient norm \d+\.\d+", said))) == 1
    assert len(said.splitlines()) == 4


@pytest.mark.slow
def test_the_script_on_plain_layers_tells_which_rank_holds_which(tmp_path):
    (script,) = blocks(
        (ROOT / "docs/explanation/splitting.md").read_text(), "python", "<!-- script: plain layers -->\n"
    )
    said = run_on_ranks(script, tmp_path).splitlines()
    holds = [", ".join(f"{index}.linear1.weight" for index in own) for own in ((1, 6), (2, 3, 4, 5))]
    assert sorted(said) == [f"rank {rank} holds {names}" for rank, names in enumerate(holds)]


@pytest.mark.slow
def test_the_page_on_fuzzing_fuzzes(tmp_path):
    page = (ROOT / "docs/how-to/fuzz-a-schedule.md").read_text()
    (script,) = blocks(page, "python", after="<!-- script: fuzz -->\n")
    assert len([line for line in script.splitlines() if line]) <= 10
    names: dict[str, Any] = {}
    exec(script, names)
    names["test_my_schedule"]()
    exec(blocks(page, "python")[0], {})


@pytest.fixture(scope="module")
def pictures() -> Any:
    spec = importlib.util.spec_from_file_location("docs_pictures", ROOT / "docs/pictures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_files_are_those_that_the_code_draws(pictures):
    for name, draw in pictures.FILES.items():
        assert (ROOT / "docs" / name).read_text() == draw(), f"docs/{name} is out of date: run docs/pictures.py"


def test_pictures_are_those_that_the_code_draws(pictures):
    found = set()
    for page in pictures.pages():
        text = page.read_text()
        assert pictures.drawn(text) == text, f"{page} is out of date: run docs/pictures.py"
        found |= {match[2] for match in pictures.BLOCK.finditer(text)}
    assert found == set(pictures.PICTURES)


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CHANGELOG.md"], ids=lambda path: path.name)
def test_links_of_the_front_pages_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_readme_has_the_two_commands():
    """.ci/run takes the second from there."""
    for name, last in (("train", "dualpipev train"), ("tests", "pytest")):
        (command,) = blocks(README, "sh", after=f"<!-- command: {name} -->\n")
        assert command.rstrip().endswith(f".venv/bin/{last}")
