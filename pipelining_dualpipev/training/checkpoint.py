"""Stopping a training run and going on with it.

The state of a run is kept beside its ``--save`` directory, in one of the same name with ``.state`` at the end. A run
that goes on has to be the same run: what decides the data and the weights is compared. The number of ranks, of
microbatches and of steps may change.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipelining_dualpipev.training.config import TrainConfig

__all__ = ["is_due", "keep_state", "resume"]

_SAME = (
    "model",
    "layers",
    "data",
    "batch_size",
    "seq_len",
    "learning_rate",
    "warmup",
    "weight_decay",
    "held_out_batches",
    "seed",
)


def is_due(config: TrainConfig, step: int) -> bool:
    """Whether the state of the run is to be kept after ``step`` steps."""
    return bool(config.checkpoint_every) and (step % config.checkpoint_every == 0 or step == config.steps)


def keep_state(config: TrainConfig, step: int, model: Any, optimizer: Any, rates: Any) -> None:
    """Save the state of the run after ``step`` steps. Collective over the world."""
    from pipelining_dualpipev.models import save_checkpoint

    settings = {name: getattr(config, name) for name in _SAME}
    save_checkpoint(config.state, model, optimizer, rates, extra={"step": step, "settings": settings})


def resume(config: TrainConfig, model: Any, optimizer: Any, rates: Any) -> int:
    """Load the state of the run if it is to go on; the number of steps that it has done. Collective over the world.

    Raises:
        ValueError: on every rank, if there is no such state, or if it is of another run.
    """
    from pipelining_dualpipev.models import load_checkpoint

    if not config.resume:
        return 0
    extra = load_checkpoint(Path(config.state), model, optimizer, rates)
    for name, saved in extra["settings"].items():
        if saved != getattr(config, name):
            option = f"--{name.replace('_', '-')}"
            raise ValueError(
                f"--resume: the run in {config.state} was started with {option} {saved}, not {getattr(config, name)}: "
                f"give the same, or start another with another --save"
            )
    step: int = extra["step"]
    if step >= config.steps:
        raise ValueError(
            f"--resume: the run in {config.state} has done its {step} steps: give more than that as --steps"
        )
    return step
