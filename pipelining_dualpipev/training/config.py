"""What a training run can be asked for, and what is refused before anything is started.

Every mistake that can be seen without torch is found here: in the launcher before it starts a process, and, where
torchrun has started the ranks, on each of them before a tensor moves. A message carries the numbers that do not fit
and the options that would make them fit.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from pipelining_dualpipev.training.text import find_text

__all__ = ["TrainConfig"]


@dataclass(frozen=True)
class TrainConfig:
    """The options of a training run; `dualpipev train --help` tells what each is for.

    The defaults train a Llama of one million parameters in well under a minute on two cores.
    """

    ranks: int = 2
    microbatches: int = 4
    model: str = "llama"
    layers: int | None = None
    data: str | None = None
    steps: int = 120
    save: str = "runs/train"
    batch_size: int = 32
    seq_len: int = 64
    learning_rate: float = 3e-3
    warmup: int = 20
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    held_out_batches: int = 16
    seed: int = 0
    device: str = "auto"
    checkpoint_every: int = 0
    resume: bool = False

    @property
    def state(self) -> str:
        """Where the state of the run is kept, from which it can be resumed."""
        return f"{self.save.rstrip('/')}.state"

    @property
    def microbatch_size(self) -> int:
        """Sequences in a microbatch."""
        return self.batch_size // self.microbatches

    @property
    def batch_tokens(self) -> int:
        """Tokens that a step reads."""
        return self.batch_size * self.seq_len

    def check(self) -> None:
        """Refuse what cannot work.

        Raises:
            ValueError: with the numbers and what to change.
        """
        self._check_numbers()
        self._check_save()
        text = find_text(self.data)
        if not (Path(self.model) / "config.json").is_file():  # bytes are the tokens, so their number is known already
            check_length(self, text.source, text.total, "bytes")

    def _check_numbers(self) -> None:
        for option, least in (
            ("ranks", 1),
            ("microbatches", 1),
            ("batch_size", 1),
            ("seq_len", 2),
            ("steps", 1),
            ("warmup", 0),
            ("held_out_batches", 1),
            ("checkpoint_every", 0),
        ):
            value = getattr(self, option)
            if value < least:
                raise ValueError(f"{_flag(option)} is {value}: it has to be {least} or more")
        for option, value in (("learning_rate", self.learning_rate), ("clip_norm", self.clip_norm)):
            if not value > 0:
                raise ValueError(f"{_flag(option)} is {value}: it has to be above 0")
        if not (self.weight_decay >= 0 and math.isfinite(self.weight_decay)):
            raise ValueError(f"--weight-decay is {self.weight_decay}: it has to be 0 or more")
        if self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"--device is {self.device}: it has to be auto, cpu or cuda")
        if self.layers is not None and self.layers < 2 * self.ranks:
            raise ValueError(
                f"--layers {self.layers} cannot fill the {2 * self.ranks} stages of --ranks {self.ranks}: "
                f"use {2 * self.ranks} layers or more, or at most {max(1, self.layers // 2)} ranks"
            )
        if self.batch_size % self.microbatches:
            below = self.batch_size // self.microbatches * self.microbatches
            nearest = " or ".join(str(size) for size in (below, below + self.microbatches) if size)
            raise ValueError(
                f"--batch-size {self.batch_size} cannot be cut into --microbatches {self.microbatches} of one size: "
                f"use a batch size of {nearest}, or a number of microbatches that divides {self.batch_size}"
            )

    def _check_save(self) -> None:
        save = Path(self.save)
        above = next(path for path in (save, *save.absolute().parents) if path.exists())
        if not above.is_dir():
            raise ValueError(
                f"--save {save}: {above} is a file: give a new directory, or that of a checkpoint to replace"
            )
        if not os.access(above, os.W_OK | os.X_OK):
            raise ValueError(f"--save {save}: no permission to write in {above}: give another directory")
        if self.resume and not (Path(self.state) / "LATEST").is_file():
            raise ValueError(
                f"--resume: {self.state} holds no state of a run: give the --save of a run that had --checkpoint-every"
            )
        if save.is_dir() and not (save / "config.json").is_file():
            others = sum(1 for _ in save.iterdir())
            if others:
                raise ValueError(
                    f"--save {save}: the directory holds {others} files and no config.json, so it is not a checkpoint "
                    f"to replace: give a new directory, or an empty one"
                )


def check_length(config: TrainConfig, source: str, available: int, unit: str) -> None:
    """Refuse text too short for one training batch and one held-out batch.

    Raises:
        ValueError: with the numbers and what to change.
    """
    if available < 2 * config.batch_tokens:
        raise ValueError(
            f"{source} holds {available:,} {unit}: one batch to train on and one to hold out take "
            f"2 x {config.batch_size} x {config.seq_len} = {2 * config.batch_tokens:,}: "
            f"give more text with --data, or lower --batch-size or --seq-len"
        )


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")
