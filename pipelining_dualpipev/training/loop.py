"""What one rank of a training run does, from the process group to the checkpoint.

::

            rank 0                               the other ranks
    [1]     join the process group; find the device
    [2]     check the options                    check the options          every rank learns of every complaint
    [3]     read the text, tokenize              --
    [4]     open its own two stages of the model
    [5]     step(input_ids, labels, losses)      step()                     then clip over all stages, AdamW
    [6]     eval(...) on the held-out windows    eval()
    [7]     write the checkpoint, each rank its own weights

The first and the last stage are both on rank 0, so inputs, labels and losses live there. A complaint on one rank alone
(a directory that only one machine lacks) would leave the others waiting for it; so ranks tell each other after every
phase before the first step, and all raise the same words.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from pipelining_dualpipev import ScheduleDualPipeV, clip_grad_norm_, mean_loss
from pipelining_dualpipev.training.checkpoint import is_due, keep_state, resume
from pipelining_dualpipev.training.config import TrainConfig
from pipelining_dualpipev.training.data import ByteEncoding, TrainingData, load_data
from pipelining_dualpipev.training.model import check_model, check_vocabulary, load_encoding, open_model

__all__ = ["TrainResult", "learning_rate_factor", "train"]

# Reading a loss or a norm waits for the device: once in so many steps is enough.
PROGRESS_EVERY = 5


@dataclass(frozen=True)
class TrainResult:
    """What a run came to; rank 0 has it."""

    steps: int
    seconds: float  # in the steps alone
    tokens_per_second: float
    train_loss: float  # nats a token, over the last steps
    held_out_loss: float  # nats a byte
    bigram: float  # nats a byte, over the same bytes
    held_out_bytes: int
    held_out_files: int
    save: str
    peak_bytes: int  # resident memory of the rank that took most

    def __str__(self) -> str:
        return (
            f"{self.steps} steps in {self.seconds:.1f} s, {self.tokens_per_second:,.0f} tokens/s, at most "
            f"{self.peak_bytes / 1e9:.2f} GB a rank; checkpoint in {self.save}\n"
            f"held-out loss {self.held_out_loss:.4f} nats a byte, bigram baseline {self.bigram:.4f} "
            f"({self.held_out_bytes:,} bytes of {self.held_out_files} files)"
        )


def train(config: TrainConfig) -> TrainResult | None:
    """Run this rank's part of a training run. Every rank calls it, with the same configuration.

    Returns:
        The result on rank 0, None on the others.

    Raises:
        ValueError: on every rank, if any of them cannot run as asked.
    """
    with _process_group(config) as device:
        with _agreed():
            config.check()
            check_model(config)
        rank = dist.get_rank()
        with _agreed():
            encoding = load_encoding(config)
            data = load_data(config, encoding) if rank == 0 else None
            check_vocabulary(config, encoding)
        example = {
            name: torch.zeros(config.microbatch_size, config.seq_len, dtype=torch.long, device=device)
            for name in ("input_ids", "labels")
        }
        with _agreed():
            model = open_model(config, encoding, example, device)
        schedule = ScheduleDualPipeV(model.stages, config.microbatches, model.loss_fn)

        steps, seconds, train_loss = _train_steps(config, schedule, model, data, device)
        held_out = _held_out_loss(config, schedule, model, data, device)
        tokenizer = None if isinstance(encoding, ByteEncoding) else getattr(encoding, "tokenizer", None)
        model.save_pretrained(config.save, tokenizer=tokenizer)
        peak = _peak_bytes()
        if data is None:
            return None
        return TrainResult(
            steps=steps,
            seconds=seconds,
            tokens_per_second=steps * config.batch_tokens / seconds,
            train_loss=train_loss,
            held_out_loss=data.held_out.per_byte(held_out),
            bigram=data.held_out.bigram,
            held_out_bytes=data.held_out.predicted_bytes,
            held_out_files=data.held_out_files,
            save=config.save,
            peak_bytes=peak,
        )


def learning_rate_factor(step: int, config: TrainConfig) -> float:
    """Return the learning rate of a step over the highest: a linear warmup, then a cosine down to a twentieth."""
    warmup = min(config.warmup, config.steps // 2)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    done = (step - warmup) / max(1, config.steps - warmup)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def _train_steps(
    config: TrainConfig, schedule: Any, model: Any, data: TrainingData | None, device: torch.device
) -> tuple[int, float, float]:
    """Train; the steps that were done, their seconds, and the last loss."""
    optimizer = torch.optim.AdamW(
        _parameter_groups(model, config.weight_decay), lr=config.learning_rate, betas=(0.9, 0.95)
    )
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, config))
    first = resume(config, model, optimizer, rates)
    model.train()
    losses: list[torch.Tensor] = []
    shown, begun = math.nan, time.perf_counter()
    with tqdm(
        total=config.steps, initial=first, disable=data is None, unit="step", dynamic_ncols=True, mininterval=0.5
    ) as bar:
        for step in range(first, config.steps):
            batch = None if data is None else data.batch(step, config)
            schedule.step(**_inputs(batch, device), losses=losses, return_outputs=False)
            norm = clip_grad_norm_(schedule, config.clip_norm)
            optimizer.step()
            rates.step()
            optimizer.zero_grad()
            bar.update()
            last = step + 1 == config.steps
            keeps = is_due(config, step + 1)
            if not (last or keeps) and (step + 1) % PROGRESS_EVERY:
                continue
            if not math.isfinite(norm):  # the same number on every rank, so all of them stop here
                raise ValueError(
                    f"the gradient's norm is {float(norm)} at step {step + 1} of {config.steps}: "
                    f"lower --learning-rate (now {config.learning_rate})"
                )
            if keeps:  # never over a state that is good with one that is not
                keep_state(config, step + 1, model, optimizer, rates)
            if data is not None:
                shown = torch.stack(losses).mean().item()
                speed = (step + 1 - first) * config.batch_tokens / (time.perf_counter() - begun)
                bar.set_postfix_str(f"loss {shown:.3f}, {speed:,.0f} tokens/s", refresh=last)
    return config.steps - first, time.perf_counter() - begun, shown


def _held_out_loss(
    config: TrainConfig, schedule: Any, model: Any, data: TrainingData | None, device: torch.device
) -> float:
    """Return the mean loss of a predicted token, on every rank."""
    model.eval()
    count = torch.tensor(0 if data is None else len(data.held_out.windows) // config.batch_size, device=device)
    dist.broadcast(count, src=0)
    batches = [None] * int(count) if data is None else data.held_out.batches(config.batch_size)
    total, losses = torch.zeros((), dtype=torch.float64, device=device), []  # type: ignore[var-annotated]
    for batch in batches:
        schedule.eval(**_inputs(batch, device), losses=losses, return_outputs=False)
        total += mean_loss(schedule, losses)
    return total.item() / len(batches)


def _inputs(batch: torch.Tensor | None, device: torch.device) -> dict[str, torch.Tensor]:
    """Return a step's keyword inputs: the batch, which is its own label, on rank 0; nothing elsewhere."""
    if batch is None:
        return {}
    batch = batch.to(device)
    return {"input_ids": batch, "labels": batch}


def _parameter_groups(model: Any, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices are decayed; norms and biases, which have one dimension, are not."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


@contextmanager
def _process_group(config: TrainConfig) -> Iterator[torch.device]:
    """Join the run's process group, and leave it at the end; gives this rank's device."""
    device = _device(config)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, _cpus() // _local_world_size()))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        yield device
        dist.barrier()  # a rank that leaves early closes connections that another may still be reading from
    finally:
        dist.destroy_process_group()


def _device(config: TrainConfig) -> torch.device:
    """Return this rank's own GPU if every rank of this machine has one, else the CPU."""
    local, gpus = _local_world_size(), torch.cuda.device_count()
    if config.device == "cuda" and gpus < local:
        raise ValueError(
            f"--device cuda: this machine has {gpus} GPUs for {local} ranks: use at most {gpus} ranks, or --device cpu"
        )
    if config.device == "cpu" or gpus < local:
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def _local_world_size() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _agreed() -> Iterator[None]:
    """Raise a ValueError of any rank on every rank, before any goes on."""
    error = None
    try:
        yield
    except ValueError as wrong:
        error = wrong
    complaints: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(complaints, None if error is None else str(error))
    told = [(rank, words) for rank, words in enumerate(complaints) if words is not None]
    if told:
        rank, words = told[0]
        everybody = all(complaint == words for complaint in complaints)
        raise ValueError(words if everybody or rank == 0 else f"rank {rank}: {words}") from error


def _peak_bytes() -> int:
    """Return the most resident memory that any rank has held."""
    try:
        import resource
        import sys

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    except ImportError:  # Windows
        peak = 0
    peaks = [0] * dist.get_world_size()
    dist.all_gather_object(peaks, peak)
    return max(peaks)
