"""The main job with no options: one command, to a checkpoint that plain transformers opens."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from pipelining_dualpipev.training.config import TrainConfig
from pipelining_dualpipev.training.data import ByteEncoding, held_out_loss, load_data

LAST_LINE = re.compile(r"held-out loss ([\d.]+) nats a byte, bigram baseline ([\d.]+) ")


@pytest.mark.slow
def test_with_no_options_a_llama_learns_the_standard_library(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "pipelining_dualpipev.cli", "train"],
        cwd=tmp_path,
        env=dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(Path(__file__).parents[2])),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    found = LAST_LINE.match(done.stdout.splitlines()[-1])
    assert found, done.stdout
    held_out, bigram = map(float, found.groups())
    assert held_out <= 2.4
    assert held_out < bigram
    assert "120/120" in done.stderr, "a progress bar that came to its end"

    # One process, plain transformers, the same held-out bytes.
    config = TrainConfig()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / config.save)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert 1e6 <= parameters <= 5e6
    data = load_data(config, ByteEncoding())
    assert held_out_loss(model, data.held_out, config.batch_size) == pytest.approx(held_out, abs=1e-4)
