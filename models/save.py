"""Writing a checkpoint that plain transformers opens, each rank its own part.

::

    out.writing-1234/                    beside the place, while it is written
      model-00001-of-00004.safetensors   rank 0
      model-00003-of-00004.safetensors   rank 1
      ...
      model.safetensors.index.json       rank 0, from what each rank says it has written
      config.json, generation_config.json, tokenizer files
    out.writing-1234/ -> out/            one rename at the end; what was there goes after

Whatever happens before the rename, what is found at the place is what was there before, whole.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from transformers.core_model_loading import revert_weight_conversion

from pipelining_dualpipev.models.agree import everywhere
from pipelining_dualpipev.models.parts import SplitModel

__all__ = ["save_pretrained"]

_INDEX = "model.safetensors.index.json"


def save_pretrained(
    model: SplitModel,
    skeleton: Any,
    directory: str | PathLike[str],
    *,
    group: dist.ProcessGroup | None,
    tokenizer: Any,
    max_shard_size: int | str,
) -> None:
    """See `SplitModel.save_pretrained`; ``skeleton`` is the whole model without weights."""
    place = Path(directory).absolute()
    rank = dist.get_rank(group)

    def prepare() -> str:
        if place.exists() and not place.is_dir():
            raise NotADirectoryError(f"{place} is a file: give a directory to save in")
        aside = place.with_name(f"{place.name}.writing-{os.getpid()}")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        return str(aside)

    names = everywhere(lambda: prepare() if rank == 0 else "", group, otherwise=_not_saved)
    aside = Path(names[0])
    try:
        parts: list[dict[str, torch.Tensor]] = []

        def divide() -> int:
            state = _own_state(model)
            shards = split_torch_state_dict_into_shards(state, max_shard_size=max_shard_size)
            parts.extend({name: state[name] for name in part} for part in shards.filename_to_tensors.values() if part)
            return len(parts)

        counts = everywhere(divide, group, otherwise=_not_saved)
        total, before = sum(counts), sum(counts[:rank])

        def write() -> dict[str, tuple[str, int]]:
            written: dict[str, tuple[str, int]] = {}
            for number, part in enumerate(parts, start=before + 1):
                file = f"model-{number:05d}-of-{total:05d}.safetensors"
                save_file(part, aside / file, metadata={"format": "pt"})
                written |= {name: (file, tensor.nbytes) for name, tensor in part.items()}
            return written

        everything = everywhere(write, group, otherwise=_not_saved)
        everywhere(
            lambda: _finish(aside, place, everything, skeleton, tokenizer) if rank == 0 else None,
            group,
            otherwise=_not_saved,
        )
    finally:
        if rank == 0:
            shutil.rmtree(aside, ignore_errors=True)


def _not_saved(words: str) -> OSError:
    return OSError(f"the checkpoint could not be saved: {words}")


def _own_state(model: SplitModel) -> dict[str, torch.Tensor]:
    """This rank's parameters and buffers, under the names that a checkpoint has."""
    state: dict[str, torch.Tensor] = {}
    for stage, whole in model.models.items():
        state |= revert_weight_conversion(whole, model.own_tensors(stage))
    return {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}


def _finish(
    aside: Path,
    place: Path,
    everything: Sequence[dict[str, tuple[str, int]]],
    skeleton: Any,
    tokenizer: Any,
) -> None:
    files = {name: file for written in everything for name, (file, _) in written.items()}
    size = sum(nbytes for written in everything for _, nbytes in written.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(files.items()))}
    (aside / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
    config = skeleton.config
    config.architectures = [type(skeleton).__name__]
    config.save_pretrained(aside)
    if getattr(skeleton, "generation_config", None) is not None and skeleton.can_generate():
        skeleton.generation_config.save_pretrained(aside)
    if tokenizer is not None:
        tokenizer.save_pretrained(aside)
    old = place.with_name(f"{place.name}.old-{os.getpid()}")
    if place.exists():
        place.rename(old)
    aside.rename(place)
    shutil.rmtree(old, ignore_errors=True)
