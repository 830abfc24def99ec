"""From text to batches, and the number that a held-out loss has to beat.

The position in the data must be worth one integer, or a run could not be resumed from a checkpoint and two ranks could
not be known to read the same. So there is no iterator with a state: batch number ``step`` is a function of the text,
the seed and ``step`` (`Tokens.batch`). The held-out windows lie evenly over the held-out text and are always the same;
they are a whole number of training batches, as the stages are built for that shape.

    text, training part  --> tokens --> [1] step -> (batch, length) windows at random places
                         --> bytes  --> [2] bigram counts
    text, held-out part  --> tokens --> [3] fixed windows --> held-out loss    \\  both in nats a byte,
                                              the same bytes --> bigram loss   /   over the same bytes

A token is a byte unless the model brings a tokenizer: ids 0 to 255 are the byte's value, and there are no special ones,
so plain transformers evaluates such a checkpoint on ``torch.tensor([list(text.encode())])``. A window is its own label,
as transformers has it: T tokens make T-1 predictions, and nothing before the window is seen. With a tokenizer, losses
are turned into nats a byte by the bytes that the predicted tokens stand for.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pipelining_dualpipev.training.config import TrainConfig, check_length
from pipelining_dualpipev.training.text import Text, find_text, hold_out

__all__ = ["ByteEncoding", "Encoding", "HeldOut", "TokenizerEncoding", "TrainingData", "held_out_loss", "load_data"]

# Only to guess how much text a held-out batch takes before it is cut into tokens; too much does no harm.
_BYTES_A_TOKEN = 6
_CHUNK = 1 << 22


class Encoding(Protocol):
    """How text becomes tokens, and tokens text."""

    vocabulary: int
    bytes_a_token: int

    def encode(self, text: bytes) -> torch.Tensor:
        """Return the token ids of ``text``, one dimension."""

    def decode(self, ids: torch.Tensor) -> bytes:
        """Return the text of the token ids ``ids``, one dimension."""


class ByteEncoding:
    """A token is a byte; its id is the byte's value."""

    vocabulary = 256
    bytes_a_token = 1

    def encode(self, text: bytes) -> torch.Tensor:
        """Return ``text`` as uint8: an eighth of the memory of int64."""
        return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)

    def decode(self, ids: torch.Tensor) -> bytes:
        """Return the bytes that ``ids`` are."""
        return bytes(ids.tolist())


class TokenizerEncoding:
    """The tokens of a transformers tokenizer. Bytes that are not UTF-8 are read as the replacement character."""

    bytes_a_token = _BYTES_A_TOKEN

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.vocabulary = len(tokenizer)

    def encode(self, text: bytes) -> torch.Tensor:
        """Return the ids of ``text``, without the special tokens that would begin or end it."""
        words = text.decode("utf-8", errors="replace")
        return torch.tensor(self.tokenizer(words, add_special_tokens=False)["input_ids"], dtype=torch.int32)

    def decode(self, ids: torch.Tensor) -> bytes:
        """Return the text that ``ids`` stand for."""
        words: str = self.tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False)
        return words.encode("utf-8", errors="replace")


@dataclass(frozen=True)
class HeldOut:
    """The windows that the loss is measured on, and what they are worth in bytes."""

    windows: torch.Tensor  # (a multiple of the batch size, length), int64
    predicted_bytes: int  # in all tokens but each window's first
    bigram: float  # nats a byte, over those bytes

    def batches(self, batch_size: int) -> tuple[torch.Tensor, ...]:
        """Cut the windows into batches of ``batch_size``."""
        return self.windows.split(batch_size)

    def per_byte(self, per_token: float) -> float:
        """Turn a mean loss a predicted token into nats a byte."""
        rows, length = self.windows.shape
        return per_token * rows * (length - 1) / self.predicted_bytes


@dataclass(frozen=True)
class TrainingData:
    """Tokens to train on and windows to measure on."""

    source: str
    tokens: torch.Tensor  # one dimension
    held_out: HeldOut
    held_out_files: int

    def batch(self, step: int, config: TrainConfig) -> torch.Tensor:
        """Return batch number ``step``: (batch size, length) int64, the same on every machine for one seed."""
        # By a hash: torch's generator looks at 32 bits of its seed, and those of neighbours are alike.
        digest = hashlib.sha256(f"{config.seed} {step}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))
        places = len(self.tokens) - config.seq_len + 1
        starts = torch.randint(places, (config.batch_size, 1), generator=generator)
        return self.tokens[starts + torch.arange(config.seq_len)].long()


def load_data(config: TrainConfig, encoding: Encoding) -> TrainingData:
    """Read the text of ``config`` and cut it into tokens.

    Raises:
        ValueError: if it is too short for one batch to train on and one to hold out.
    """
    text = find_text(config.data)
    training, held = hold_out(text, least=config.batch_tokens * encoding.bytes_a_token)
    tokens, held_tokens = _encode(training, encoding), _encode(held, encoding)
    if min(len(tokens), len(held_tokens)) < config.batch_tokens:
        check_length(config, text.source, len(tokens) + len(held_tokens), "tokens")
        raise ValueError(
            f"{text.source} holds {len(tokens):,} tokens to train on and {len(held_tokens):,} held out: a batch takes "
            f"{config.batch_size} x {config.seq_len} = {config.batch_tokens:,} of each: "
            f"give more text with --data, or lower --batch-size or --seq-len"
        )
    windows = _even_windows(held_tokens, config)
    return TrainingData(text.source, tokens, _measure(windows, training, encoding), len(held.pieces))


def held_out_loss(model: torch.nn.Module, held_out: HeldOut, batch_size: int) -> float:
    """Measure a whole, unsplit transformers model on the held-out windows, in nats a byte.

    This is what the pipeline's own held-out loss must equal: the same windows, in the same batches.
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    with torch.no_grad():
        losses = []
        for batch in held_out.batches(batch_size):
            batch = batch.to(device)
            losses.append(model(input_ids=batch, labels=batch, use_cache=False).loss.double())
    model.train(was_training)
    return held_out.per_byte(torch.stack(losses).mean().item())


def _encode(text: Text, encoding: Encoding) -> torch.Tensor:
    # Piece by piece: a tokenizer's record of a text takes a hundred times the text's memory.
    return torch.cat([encoding.encode(piece.read()) for piece in text.pieces if len(piece)] or [torch.empty(0)])


def _even_windows(tokens: torch.Tensor, config: TrainConfig) -> torch.Tensor:
    """Cut windows that do not overlap and lie evenly over ``tokens``: a whole number of batches."""
    fit = len(tokens) // config.batch_tokens
    rows = min(fit, config.held_out_batches) * config.batch_size
    starts = torch.arange(rows) * (len(tokens) // rows)
    return tokens[starts.unsqueeze(1) + torch.arange(config.seq_len)].long()


def _measure(windows: torch.Tensor, training: Text, encoding: Encoding) -> HeldOut:
    log_probability = bigram_model([piece.read() for piece in training.pieces])
    nats, count = 0.0, 0
    for window in windows:
        text = torch.tensor(list(encoding.decode(window)))
        predicted = min(len(encoding.decode(window[1:])), len(text) - 1)
        pairs = text[-predicted - 1 :] if predicted > 0 else text[:0]
        nats -= log_probability[pairs[:-1], pairs[1:]].sum().item()
        count += max(0, predicted)
    if not count:
        raise ValueError(
            "the held-out tokens stand for no text at all: is this the tokenizer that the model goes with?"
        )
    return HeldOut(windows, count, nats / count)


def bigram_model(texts: list[bytes], strength: float = 16.0) -> torch.Tensor:
    """Fit P(byte | the byte before) to ``texts``.

    Counts are smoothed with the single bytes' frequencies (MacKay and Peto, 1995, with a fixed ``strength``), and those
    by adding one, so that no byte is impossible.

    Returns:
        Log probabilities (256, 256), float64, by the byte before and the byte.
    """
    counts = torch.zeros(256 * 256, dtype=torch.int64)
    for text in texts:
        for start in range(0, len(text) - 1, _CHUNK):
            part = torch.frombuffer(bytearray(text[start : start + _CHUNK + 1]), dtype=torch.uint8).long()
            counts += torch.bincount(part[:-1] * 256 + part[1:], minlength=256 * 256)
    pairs = counts.view(256, 256).double()
    single = pairs.sum(0) + 1
    single /= single.sum()
    return ((pairs + strength * single) / (pairs.sum(1, keepdim=True) + strength)).log()
