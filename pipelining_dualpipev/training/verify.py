"""`dualpipev verify`: a model directory, split in one process and compared with itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelining_dualpipev.training.config import TrainConfig
from pipelining_dualpipev.training.data import ByteEncoding
from pipelining_dualpipev.training.model import build_model, check_model, first_line

if TYPE_CHECKING:
    from pipelining_dualpipev.models import Verification

__all__ = ["verify_model"]


def verify_model(model: str, num_ranks: int, *, batch_size: int = 2, seq_len: int = 32, seed: int = 0) -> Verification:
    """Compare a model split over ``num_ranks`` ranks with the model itself, in float32, on one batch of random tokens.

    Args:
        model: a directory, with weights or without, or the name of a built-in.
        num_ranks: P.
        batch_size: rows; each is padded a little more than the one before.
        seq_len: tokens in a row.
        seed: of the tokens, and of the weights where there are none.

    Raises:
        ValueError: if it cannot be loaded or split.
    """
    from pipelining_dualpipev.models import verify

    for option, value, least in (("ranks", num_ranks, 1), ("batch-size", batch_size, 1), ("seq-len", seq_len, 2)):
        if value < least:
            raise ValueError(f"--{option} is {value}: it has to be {least} or more")
    config = TrainConfig(model=model, ranks=num_ranks, seq_len=seq_len, seed=seed)
    check_model(config)
    whole = _load(config).eval()
    return verify(whole, num_ranks, _random_batch(whole, batch_size, seq_len, seed))


def _load(config: TrainConfig) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    directory = Path(config.model)
    if not any(directory.glob("*.safetensors")):
        return build_model(config, ByteEncoding())
    try:
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
    except Exception as error:  # of a dozen types, if the directory is not what it should be
        raise ValueError(f"--model {directory}: transformers cannot load it: {first_line(error)}") from error


def _random_batch(model: Any, batch_size: int, seq_len: int, seed: int) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(vocabulary, (batch_size, seq_len), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, batch_size):
        mask[row, seq_len - row % (seq_len - 1) :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask == 1, ids, -100)}
