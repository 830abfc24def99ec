"""What is refused before a process is started: with the numbers, and what to do."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipelining_dualpipev.training.config import TrainConfig
from pipelining_dualpipev.training.model import check_model


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    (tmp_path / "text.txt").write_text("some words. " * 1000)
    return TrainConfig(data=str(tmp_path / "text.txt"), save=str(tmp_path / "checkpoint"))


def test_what_is_right_passes(config: TrainConfig):
    config.check()
    check_model(config)
    TrainConfig().check()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"ranks": 0}, "--ranks is 0: it has to be 1 or more"),
        ({"ranks": -3}, "--ranks is -3"),
        ({"microbatches": 0}, "--microbatches is 0: it has to be 1 or more"),
        ({"steps": 0}, "--steps is 0: it has to be 1 or more"),
        ({"batch_size": 0}, "--batch-size is 0"),
        ({"seq_len": 1}, "--seq-len is 1: it has to be 2 or more"),
        ({"warmup": -1}, "--warmup is -1"),
        ({"checkpoint_every": -1}, "--checkpoint-every is -1"),
        ({"resume": True}, r"--resume: .*checkpoint\.state holds no state of a run: give the --save of a run that had"),
        ({"held_out_batches": 0}, "--held-out-batches is 0"),
        ({"learning_rate": 0.0}, "--learning-rate is 0.0: it has to be above 0"),
        ({"learning_rate": float("nan")}, "--learning-rate is nan"),
        ({"clip_norm": -1.0}, "--clip-norm is -1.0"),
        ({"weight_decay": float("inf")}, "--weight-decay is inf"),
        ({"device": "tpu"}, "--device is tpu: it has to be auto, cpu or cuda"),
        ({"batch_size": 30}, "--batch-size 30 cannot be cut into --microbatches 4 .*batch size of 28 or 32"),
        ({"batch_size": 3}, "--batch-size 3 .*--microbatches 4 .*batch size of 4, or"),
        ({"layers": 3}, "--layers 3 cannot fill the 4 stages of --ranks 2: use 4 layers or more, or at most 1 ranks"),
        ({"batch_size": 512}, r"holds 12,000 bytes: .* 2 x 512 x 64 = 65,536: .*lower --batch-size or --seq-len"),
    ],
)
def test_numbers_that_cannot_work(config: TrainConfig, wrong: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        replace(config, **wrong).check()


def test_a_save_directory_that_is_a_file(config: TrainConfig, tmp_path: Path):
    (tmp_path / "file").write_text("precious")
    for save in ("file", "file/checkpoint"):
        with pytest.raises(ValueError, match=r"--save .*file is a file: give a new directory"):
            replace(config, save=str(tmp_path / save)).check()
    assert (tmp_path / "file").read_text() == "precious"


def test_a_save_directory_with_something_else_in_it(config: TrainConfig, tmp_path: Path):
    """A checkpoint replaces the directory as a whole: somebody's other files must not go with it."""
    photos = tmp_path / "photos"
    photos.mkdir()
    replace(config, save=str(photos)).check()  # empty is fine
    (photos / "summer.png").write_bytes(b"...")
    with pytest.raises(ValueError, match=r"holds 1 files and no config\.json, so it is not a checkpoint"):
        replace(config, save=str(photos)).check()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_save_directory_without_permission(config: TrainConfig, tmp_path: Path):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    with pytest.raises(ValueError, match="no permission to write"):
        replace(config, save=str(locked / "checkpoint")).check()


def test_models_that_are_not_there(config: TrainConfig, tmp_path: Path):
    with pytest.raises(ValueError, match=r"--model bert: not a directory in .*one of llama, gpt2"):
        check_model(replace(config, model="bert"))
    with pytest.raises(ValueError, match=r"a directory without config\.json"):
        check_model(replace(config, model=str(tmp_path)))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"its config\.json cannot be read"):
        check_model(replace(config, model=str(tmp_path)))


def test_models_with_fewer_layers_than_stages(config: TrainConfig, tmp_path: Path):
    with pytest.raises(
        ValueError, match=r"llama: 4 layers cannot fill the 6 stages of 3 ranks: .*2 ranks, or --layers 6"
    ):
        check_model(replace(config, ranks=3))
    check_model(replace(config, ranks=3, layers=6))
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 3}')
    with pytest.raises(ValueError, match="3 layers cannot fill the 4 stages of 2 ranks: use at most 1 ranks"):
        check_model(replace(config, model=str(tmp_path)))
    check_model(replace(config, model=str(tmp_path), ranks=1))
    with pytest.raises(ValueError, match="--layers 8 is for built-in models"):
        check_model(replace(config, model=str(tmp_path), layers=8))
