"""``dualpipev plan``: which layers go where, what each rank will hold, and whether it fits.

It ends with 0 where the job fits (or no memory was given), with 1 where it does not, and with 2 where the question
itself is wrong.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from pipelining_dualpipev.models.estimate import Estimate, Job

__all__ = ["plan"]

_DOES_NOT_FIT = 1
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_TYPES = ("float32", "bfloat16", "float16")


def plan(
    model: Annotated[
        str, typer.Option(help="A model directory, a config.json (no weights are read), or a built-in: llama, gpt2.")
    ] = "llama",
    layers: Annotated[
        int | None, typer.Option(help="Layers of a built-in model.", show_default="4, or as in the config")
    ] = None,
    ranks: Annotated[int, typer.Option(help="Ranks of the pipeline; the model is cut into twice as many stages.")] = 2,
    microbatches: Annotated[int, typer.Option(help="Microbatches in a step; must divide the batch size.")] = 8,
    batch_size: Annotated[
        int | None,
        typer.Option(help="Sequences in a step, in all microbatches together.", show_default="one a microbatch"),
    ] = None,
    seq_len: Annotated[int, typer.Option(help="Tokens in a sequence.")] = 2048,
    dtype: Annotated[
        str, typer.Option(help=f"Of parameters, gradients and optimizer state: {', '.join(_TYPES)}.")
    ] = "bfloat16",
    optimizer: Annotated[
        str, typer.Option(help="adamw (two numbers for each parameter), momentum (one), sgd (none).")
    ] = "adamw",
    data_parallel_shards: Annotated[
        int,
        typer.Option(help="Data-parallel ranks over which fully_shard divides a stage's optimizer state; 1: none."),
    ] = 1,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Each layer keeps its input only, and runs again in the backward.")
    ] = False,
    balance: Annotated[
        str, typer.Option(help="How layers are dealt out: uniform, cost, parameters, or cuts like 1,3,5.")
    ] = "uniform",
    memory: Annotated[
        str | None, typer.Option(help="What a rank has, like 80GB or 24GiB; without it nothing is held against it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Say it as JSON, bytes in full.")] = False,
) -> None:
    """Say which layers each stage gets, what each rank holds, how much of a step is idle, and whether it fits.

    `dualpipev plan --model my-model --ranks 8 --microbatches 32 --seq-len 4096 --memory 80GB`

    The model is never built: its forward runs once on tensors that have shapes and no data. Ends with 1 if it does not
    fit, and says what would.
    """
    has = None if memory is None else _bytes(memory)
    job = _job(ranks, microbatches, batch_size, seq_len, dtype, optimizer, data_parallel_shards, checkpointing, balance)
    from pipelining_dualpipev.models.estimate import estimate, remedies
    from pipelining_dualpipev.training.model import open_config

    config = open_config(model, length=seq_len, layers=layers)
    estimated = estimate(config, job)
    fits = has is None or estimated.most <= has
    would_fit = [] if has is None or fits else list(remedies(config, estimated, has))
    if as_json:
        changes = [{"change": _change(job, each), "total": each.most} for each in would_fit]
        print(json.dumps({**_as_json(estimated), "memory": has, "fits": fits, "would_fit": changes}, indent=2))
    else:
        print(_as_text(estimated))
        if has is not None:
            print(_verdict(estimated, has, would_fit))
    if not fits:
        raise typer.Exit(_DOES_NOT_FIT)


def _job(
    ranks: int,
    microbatches: int,
    batch_size: int | None,
    seq_len: int,
    dtype: str,
    optimizer: str,
    shards: int,
    checkpointing: bool,
    balance: str,
) -> Job:
    batch_size = microbatches if batch_size is None else batch_size
    if microbatches < 1 or batch_size < 1 or batch_size % microbatches:
        raise ValueError(
            f"--batch-size {batch_size} cannot be cut into {microbatches} microbatches: give a multiple of them"
        )
    if dtype not in _TYPES:
        raise ValueError(f"--dtype is {dtype!r}: give one of {', '.join(_TYPES)}")
    import torch

    from pipelining_dualpipev.models.estimate import Job

    return Job(
        num_ranks=ranks,
        n_microbatches=microbatches,
        rows=batch_size // microbatches,
        seq_len=seq_len,
        dtype=getattr(torch, dtype),
        optimizer=optimizer,
        shards=shards,
        checkpointing=checkpointing,
        balance=[int(cut) for cut in balance.split(",")] if re.fullmatch(r"\d+(,\d+)*", balance) else balance,  # type: ignore[arg-type]
    )


def _bytes(text: str) -> int:
    match = re.fullmatch(r"([\d.]+)\s*([A-Za-z]*)", text.strip())
    try:
        assert match is not None
        return round(float(match[1]) * _UNITS[match[2].upper()])
    except (AssertionError, ValueError, KeyError):
        raise ValueError(f"--memory is {text!r}: give bytes, or a number with a unit, like 80GB or 24GiB") from None


def _as_json(estimated: Estimate) -> dict[str, Any]:
    return {
        "stages": [
            {"stage": stage, "rank": min(stage, 2 * estimated.job.num_ranks - 1 - stage), "layers": layers}
            for stage, layers in enumerate(estimated.layers)
        ],
        "ranks": [
            {
                "parameters": rank.parameters,
                "gradients": rank.gradients,
                "optimizer": rank.optimizer,
                "activations": rank.activations,
                "total": rank.total,
            }
            for rank in estimated.ranks
        ],
        "bubble": estimated.bubble,
        "tuned_bubble": estimated.tuned_bubble,
    }


def _as_text(estimated: Estimate) -> str:
    cells = [["rank", "layers", "parameters", "gradients", "optimizer", "activations", "all"]]
    layers = estimated.layers
    for rank, held in enumerate(estimated.ranks):
        sizes = (held.parameters, held.gradients, held.optimizer, held.activations, held.total)
        ends = [_span(layers[stage]) for stage in (rank, 2 * estimated.job.num_ranks - 1 - rank)]
        cells.append([str(rank), " and ".join(ends), *map(_readable, sizes)])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rows = ["  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in cells]
    return "\n".join(
        [
            *rows,
            "",
            f"idle: {estimated.bubble:.1%} of a step in the reference order, {estimated.tuned_bubble:.1%} tuned; by "
            "floating-point operations, with nothing lost on the way between ranks",
            "not counted: what an operation needs only while it runs, buffers of communication, and what the allocator "
            "wastes",
        ]
    )


def _span(layers: list[str]) -> str:
    """The layers of a stage by their numbers."""
    first, last = (layer.rpartition(".")[2] for layer in (layers[0], layers[-1]))
    return first if first == last else f"{first}-{last}"


def _readable(size: float) -> str:
    for unit in ("TB", "GB", "MB", "KB"):
        if size >= _UNITS[unit]:
            return f"{size / _UNITS[unit]:.1f} {unit}"
    return f"{size:.0f} B"


def _verdict(estimated: Estimate, has: int, would_fit: list[Estimate]) -> str:
    fullest = max(range(len(estimated.ranks)), key=lambda rank: estimated.ranks[rank].total)
    needed = f"rank {fullest} needs {_readable(estimated.most)} and has {_readable(has)}"
    if estimated.most <= has:
        return f"it fits: {needed}"
    if not would_fit:
        return (
            f"it does not fit: {needed}. Neither checkpointing, nor 64 shards, nor as many ranks as there are layers "
            "for would do: make sequences or microbatches smaller, or take a smaller type"
        )
    lines = [f"  {_change(estimated.job, each)}: {_readable(each.most)}" for each in would_fit]
    return "\n".join([f"it does not fit: {needed}. It would with", *lines])


def _change(job: Job, changed: Estimate) -> str:
    options = []
    if changed.job.num_ranks != job.num_ranks:
        options.append(f"--ranks {changed.job.num_ranks}")
    if changed.job.shards != job.shards:
        options.append(f"--data-parallel-shards {changed.job.shards}")
    if changed.job.checkpointing != job.checkpointing:
        options.append("--checkpointing")
    return " ".join(options)
