"""The command line: ``dualpipev train`` and ``verify``, and the commands that plan and look.

The latter are in `commands` and `plan_command`.

Each command reads its options and calls the room that does the work. Nothing heavy is imported before a command runs,
so ``--help`` answers at once.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from pipelining_dualpipev.commands import check, show, simulate_schedules
from pipelining_dualpipev.plan_command import plan
from pipelining_dualpipev.training.config import TrainConfig
from pipelining_dualpipev.training.launch import USER_ERROR, RanksFailedError, is_launched, launch, run_as_rank

__all__ = ["app", "main"]

app = typer.Typer(
    name="dualpipev",
    help="DualPipeV for torch.distributed.pipelining: train a Hugging Face model on the V, or see a step beforehand.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

_DEFAULT = TrainConfig()


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Turn an error that its words explain into one line and an exit code; anything else keeps its traceback."""
    try:
        yield
    except ValueError as error:
        _say(f"error: {error}")
        raise typer.Exit(USER_ERROR) from None
    except RanksFailedError as error:
        _say(f"error: {error}")
        raise typer.Exit(1) from None


def _say(words: str) -> None:
    rank = f"[rank {os.environ['RANK']}] " if is_launched() else ""
    print(rank + words, file=sys.stderr, flush=True)


for _name, _command in (("show", show), ("check", check), ("simulate", simulate_schedules), ("plan", plan)):
    app.command(_name)(_plain_errors()(_command))


@app.command()
def train(
    ranks: Annotated[
        int | None,
        typer.Option(
            help="Ranks of the pipeline; the model is cut into twice as many stages.",
            show_default="2, or as many as torchrun has started",
        ),
    ] = None,
    microbatches: Annotated[
        int, typer.Option(help="Microbatches in a step; must divide the batch size. Best from twice the ranks upward.")
    ] = _DEFAULT.microbatches,
    model: Annotated[
        str,
        typer.Option(
            help="A model directory as save_pretrained writes it (without weights it is trained from scratch; "
            "without a tokenizer its tokens are bytes), or a small built-in: llama, gpt2."
        ),
    ] = _DEFAULT.model,
    layers: Annotated[
        int | None, typer.Option(help="Layers of a built-in model, at least twice the ranks.", show_default="4")
    ] = _DEFAULT.layers,
    data: Annotated[
        str | None,
        typer.Option(help="A text file, or a folder of them.", show_default="the source of Python's standard library"),
    ] = _DEFAULT.data,
    steps: Annotated[int, typer.Option(help="Training steps.")] = _DEFAULT.steps,
    save: Annotated[str, typer.Option(help="Where to write the checkpoint; one that is there is replaced.")] = (
        _DEFAULT.save
    ),
    batch_size: Annotated[int, typer.Option(help="Sequences in a step, in all microbatches together.")] = (
        _DEFAULT.batch_size
    ),
    seq_len: Annotated[int, typer.Option(help="Tokens in a sequence.")] = _DEFAULT.seq_len,
    learning_rate: Annotated[float, typer.Option(help="The highest; reached after the warmup.")] = (
        _DEFAULT.learning_rate
    ),
    warmup: Annotated[
        int, typer.Option(help="Steps of linear warmup, at most half of all; a cosine follows.")
    ] = _DEFAULT.warmup,
    weight_decay: Annotated[float, typer.Option(help="Of AdamW, on matrices.")] = _DEFAULT.weight_decay,
    clip_norm: Annotated[float, typer.Option(help="The largest gradient norm, over all stages; inf for any.")] = (
        _DEFAULT.clip_norm
    ),
    held_out_batches: Annotated[int, typer.Option(help="The most batches to measure the held-out loss on.")] = (
        _DEFAULT.held_out_batches
    ),
    seed: Annotated[int, typer.Option(help="Of the first weights and of the order of the data.")] = _DEFAULT.seed,
    device: Annotated[
        str, typer.Option(help="cpu, cuda, or auto: cuda if every rank of this machine has a GPU of its own.")
    ] = _DEFAULT.device,
    checkpoint_every: Annotated[
        int,
        typer.Option(
            help="Keep the state of the run every so many steps, and at the end, in a directory named like --save with "
            ".state at its end. 0: never."
        ),
    ] = _DEFAULT.checkpoint_every,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on from that state; the numbers of ranks, microbatches and steps may differ from before.",
        ),
    ] = _DEFAULT.resume,
) -> None:
    """Train a causal language model under DualPipeV and write a checkpoint that plain transformers opens.

    With no options, a Llama of one million parameters learns the source of Python's standard library, byte by byte, on
    two CPU ranks within a minute. The last line tells its held-out loss beside what a bigram model reaches on the
    same bytes.

    Run plainly, it starts all ranks on this machine. Under torchrun it is one of the ranks, on as many machines as
    torchrun spans: `torchrun --nnodes 2 --nproc-per-node 4 ... -m pipelining_dualpipev.cli train`
    """
    config = TrainConfig(
        ranks=_default_ranks() if ranks is None else ranks,
        microbatches=microbatches,
        model=model,
        layers=layers,
        data=data,
        steps=steps,
        save=save,
        batch_size=batch_size,
        seq_len=seq_len,
        learning_rate=learning_rate,
        warmup=warmup,
        weight_decay=weight_decay,
        clip_norm=clip_norm,
        held_out_batches=held_out_batches,
        seed=seed,
        device=device,
        checkpoint_every=checkpoint_every,
        resume=resume,
    )
    with _plain_errors():
        (run_as_rank if is_launched() else launch)(config)


@app.command()
def verify(
    model: Annotated[
        str, typer.Option(help="A model directory as save_pretrained writes it, or a small built-in: llama, gpt2.")
    ] = _DEFAULT.model,
    ranks: Annotated[int, typer.Option(help="Ranks to split it over.")] = _DEFAULT.ranks,
    batch_size: Annotated[int, typer.Option(help="Rows of the batch.")] = 2,
    seq_len: Annotated[int, typer.Option(help="Tokens in a row.")] = 32,
    seed: Annotated[int, typer.Option(help="Of the tokens, and of the weights where there are none.")] = _DEFAULT.seed,
) -> None:
    """Split a model in this process and compare its loss and every gradient with those of the model itself.

    It needs no other process, and memory for the model twice with its gradients. The line that it prints names the
    parameter whose gradient is off most; if that is more than rounding, the exit code is 1.
    """
    from pipelining_dualpipev.training.verify import verify_model

    with _plain_errors():
        report = verify_model(model, ranks, batch_size=batch_size, seq_len=seq_len, seed=seed)
    print(report)
    if not report.matches:
        raise typer.Exit(1)


def _default_ranks() -> int:
    return int(os.environ["WORLD_SIZE"]) if is_launched() else _DEFAULT.ranks


def main() -> None:
    """Run the command line; the entry point of the ``dualpipev`` script.

    Ctrl-C ends this process at once until `launch` has ranks to end: a ``KeyboardInterrupt`` would be lost where an
    import catches all exceptions, or where the process is a rank that waits inside gloo.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    app()


if __name__ == "__main__":
    main()
