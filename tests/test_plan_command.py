"""`dualpipev plan`: what it says, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import Result
from transformers import LlamaConfig
from typer.testing import CliRunner

from pipelining_dualpipev import cli
from pipelining_dualpipev.models.estimate import Job, estimate, remedies
from pipelining_dualpipev.training.model import open_config

SMALL = ["--layers", "8", "--ranks", "2", "--microbatches", "4", "--seq-len", "32", "--dtype", "float32"]
MB = 10**6


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, ["plan", *map(str, arguments)])


def job(**changes: object) -> Job:
    return Job(**{"num_ranks": 2, "n_microbatches": 4, "seq_len": 32, "dtype": torch.float32, **changes})


def small_config():
    return open_config("llama", length=32, layers=8)


def test_it_says_what_the_estimate_says():
    estimated = estimate(small_config(), job())
    told = json.loads(run(*SMALL, "--json").output)
    assert [rank["total"] for rank in told["ranks"]] == [rank.total for rank in estimated.ranks]
    assert told["stages"][3] == {"stage": 3, "rank": 0, "layers": ["model.layers.6", "model.layers.7"]}
    assert told["bubble"] == estimated.bubble > told["tuned_bubble"]
    assert (told["fits"], told["memory"]) == (True, None)
    words = run(*SMALL, "--memory", "1GB").output
    assert "0-1 and 6-7" in words
    assert f"it fits: rank 0 needs {estimated.most / MB:.1f} MB and has 1.0 GB" in words


@pytest.mark.slow
def test_what_does_not_fit_ends_with_1_and_says_what_would():
    estimated = estimate(small_config(), job())
    checkpointed = estimate(small_config(), job(checkpointing=True))
    wider = estimate(small_config(), job(num_ranks=4))
    assert wider.most < checkpointed.most < estimated.most
    done = run(*SMALL, "--memory", checkpointed.most)
    assert done.exit_code == 1
    assert f"  --checkpointing: {checkpointed.most / MB:.1f} MB" in done.output
    assert f"  --ranks 4: {wider.most / MB:.1f} MB" in done.output
    done = run(*SMALL, "--memory", wider.most, "--json")
    assert done.exit_code == 1
    assert {"change": "--ranks 4", "total": wider.most} in json.loads(done.output)["would_fit"]
    hopeless = run(*SMALL, "--memory", "1KB")
    assert hopeless.exit_code == 1
    assert "Neither checkpointing, nor 64 shards" in hopeless.output


@pytest.mark.slow
def test_more_ranks_and_checkpointing_come_together_only_if_neither_will_do_alone():
    start = estimate(small_config(), job(n_microbatches=8, seq_len=256))
    both = estimate(small_config(), job(n_microbatches=8, seq_len=256, num_ranks=4, checkpointing=True))
    (only,) = remedies(small_config(), start, both.most)
    assert (only.job, only.most) == (both.job, both.most)


def test_each_option_changes_what_it_should():
    plain, rank = estimate(small_config(), job()), 1
    sgd = estimate(small_config(), job(optimizer="sgd")).ranks[rank]
    assert (sgd.optimizer, sgd.total) == (0, plain.ranks[rank].total - plain.ranks[rank].optimizer)
    half = estimate(small_config(), job(dtype=torch.bfloat16)).ranks[rank]
    assert half.parameters == plain.ranks[rank].parameters // 2
    sharded = estimate(small_config(), job(shards=4)).ranks[rank]
    assert sharded.optimizer == plain.ranks[rank].optimizer // 4
    assert sharded.parameters == plain.ranks[rank].parameters * 5 // 4  # its shard, beside what is gathered
    assert sharded.gradients == plain.ranks[rank].gradients
    long = estimate(small_config(), job(seq_len=64)).ranks[rank]
    assert long.activations == 2 * plain.ranks[rank].activations
    more = estimate(small_config(), job(n_microbatches=40)).ranks[rank]
    assert more.total == estimate(small_config(), job(n_microbatches=80)).ranks[rank].total


def test_a_directory_or_its_config_is_enough(tmp_path: Path):
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2
    )
    config.save_pretrained(tmp_path)
    arguments = ["--seq-len", 16, "--balance", "1,2,3", "--json"]
    by_directory, by_file = (run("--model", path, *arguments) for path in (tmp_path, tmp_path / "config.json"))
    assert by_directory.exit_code == 0
    assert by_directory.output == by_file.output
    assert [len(stage["layers"]) for stage in json.loads(by_file.output)["stages"]] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "nowhere"], "--model nowhere: not a directory"),
        (["--ranks", "3"], "4 layers cannot fill 6 stages: use at most 2 ranks"),
        (["--batch-size", "9", "--microbatches", "4"], "--batch-size 9 cannot be cut into 4 microbatches"),
        (["--dtype", "int8"], "--dtype is 'int8': give one of float32, bfloat16, float16"),
        (["--optimizer", "lion"], "the optimizer is 'lion': give one of adamw, momentum, sgd"),
        (["--memory", "80 GBs"], "--memory is '80 GBs': give bytes, or a number with a unit"),
        (["--data-parallel-shards", "0"], "shards is 0: it has to be 1 or more"),
        (["--balance", "best"], "balance is 'best'"),
        (["--balance", "1,2"], "balance has 2 cuts, 4 stages need 3"),
    ],
)
def test_a_question_that_is_wrong_ends_with_2(arguments, words):
    done = run(*arguments, "--seq-len", 16)
    assert done.exit_code == 2
    assert words in done.output
    assert "Traceback" not in done.output
