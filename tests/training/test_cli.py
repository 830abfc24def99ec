"""What the command line passes on, and how it says what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from pipelining_dualpipev import cli
from pipelining_dualpipev.models import Verification
from pipelining_dualpipev.training.config import TrainConfig
from pipelining_dualpipev.training.launch import RanksFailedError


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, TrainConfig]]:
    """What would have been run."""
    runs: list[tuple[str, TrainConfig]] = []
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cli, "launch", lambda config: runs.append(("launch", config)))
    monkeypatch.setattr(cli, "run_as_rank", lambda config: runs.append(("rank", config)))
    return runs


def test_without_options_it_launches_the_defaults(given: list[tuple[str, TrainConfig]]):
    assert CliRunner().invoke(cli.app, ["train"]).exit_code == 0
    assert given == [("launch", TrainConfig())]


def test_every_option_arrives(given: list[tuple[str, TrainConfig]]):
    wanted = TrainConfig(
        ranks=3,
        microbatches=5,
        model="gpt2",
        layers=6,
        data="text",
        steps=7,
        save="there",
        batch_size=10,
        seq_len=11,
        learning_rate=0.5,
        warmup=2,
        weight_decay=0.25,
        clip_norm=0.75,
        held_out_batches=4,
        seed=9,
        device="cpu",
        checkpoint_every=13,
        resume=True,
    )
    arguments = [
        f"--{name.replace('_', '-')}" + (f"={value}" if not isinstance(value, bool) else "")
        for name, value in vars(wanted).items()
    ]
    assert all(value != vars(TrainConfig())[name] for name, value in vars(wanted).items())
    assert CliRunner().invoke(cli.app, ["train", *arguments]).exit_code == 0
    assert given == [("launch", wanted)]


def test_under_torchrun_it_is_a_rank_of_as_many_as_there_are(
    given: list[tuple[str, TrainConfig]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert CliRunner().invoke(cli.app, ["train"]).exit_code == 0
    assert given == [("rank", TrainConfig(ranks=4))]


def test_ranks_zero_is_not_taken_for_the_default(given: list[tuple[str, TrainConfig]]):
    CliRunner().invoke(cli.app, ["train", "--ranks", "0"])
    assert given[0][1].ranks == 0


def test_torchrun_and_ranks_that_differ(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    result = CliRunner().invoke(cli.app, ["train", "--ranks", "2"])
    assert result.exit_code == 2
    assert result.stderr == "[rank 0] error: --ranks is 2, but 4 ranks have been started: leave --ranks out\n"


def test_a_rank_that_failed_is_one_line_and_another_exit_code(monkeypatch: pytest.MonkeyPatch):
    def launch(config: TrainConfig) -> None:
        raise RanksFailedError("rank 1 ended first, with signal 9, SIGKILL")

    monkeypatch.setattr(cli, "launch", launch)
    result = CliRunner().invoke(cli.app, ["train"])
    assert result.exit_code == 1
    assert result.stderr == "error: rank 1 ended first, with signal 9, SIGKILL\n"


def test_help_names_the_options_and_needs_no_torch():
    code = "import sys; from pipelining_dualpipev.cli import main; sys.modules['torch'] = None; main()"
    env = dict(os.environ, COLUMNS="200")
    run = subprocess.run([sys.executable, "-c", code, "train", "--help"], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    for option in ("--ranks", "--microbatches", "--model", "--data", "--steps", "--save"):
        assert option in run.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ranks", "0"], "--ranks is 0: it has to be 1 or more"),
        (["--model", "no/such/model"], "--model no/such/model: not a directory in"),
        (["--batch-size", "6"], "cannot be cut into --microbatches 4"),
    ],
)
def test_a_mistake_is_one_line_without_starting_a_process(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess.Popen, "__init__", lambda *a, **k: pytest.fail("a process was started"))
    result = CliRunner().invoke(cli.app, ["train", *arguments])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_verify_a_directory(tmp_path: Path):
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=4, pad_token_id=0
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    result = CliRunner().invoke(cli.app, ["verify", "--model", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("the split model is the model: loss ")
    result = CliRunner().invoke(cli.app, ["verify", "--model", str(tmp_path), "--ranks", "3"])
    assert result.exit_code == 2
    assert "4 layers cannot fill the 6 stages of 3 ranks" in result.stderr


def test_verify_of_a_split_that_is_wrong_has_another_exit_code(monkeypatch: pytest.MonkeyPatch):
    wrong = Verification(loss=1.0, expected_loss=1.0, errors={"a": 0.0, "b": 0.5}, tolerance=1e-6)
    monkeypatch.setattr("pipelining_dualpipev.training.verify.verify_model", lambda *args, **options: wrong)
    result = CliRunner().invoke(cli.app, ["verify"])
    assert result.exit_code == 1
    assert "NOT the model" in result.stdout
    assert "worst of 2 gradients b, off by 5.0e-01" in result.stdout
    result = CliRunner().invoke(cli.app, ["verify", "--json"])
    assert result.exit_code == 1
    told = json.loads(result.stdout)
    assert not told["matches"]
    assert (told["worst"], told["error"]) == ("b", 0.5)
