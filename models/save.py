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
from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import nn
from transformers.core_model_loading import revert_weight_conversion

from pipelining_dualpipev.models.agree import everywhere
from pipelining_dualpipev.models.plan import SplitPlan

__all__ = ["own_tensors", "save_pretrained"]

_INDEX = "model.safetensors.index.json"


def save_pretrained(
    models: Sequence[nn.Module],
    skeleton: nn.Module,
    plan: SplitPlan,
    stages: Sequence[int],
    directory: str | PathLike[str],
    *,
    group: dist.ProcessGroup | None,
    tokenizer: Any,
    max_shard_size: int | str,
) -> None:
    """See `SplitModel.save_pretrained`; ``models`` are the whole-model modules of this rank's ``stages``."""
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
        state = _own_state(models, plan, stages)
        shards = split_torch_state_dict_into_shards(state, max_shard_size=max_shard_size)
        parts = [{name: state[name] for name in tensors} for tensors in shards.filename_to_tensors.values() if tensors]
        counts = everywhere(lambda: len(parts), group, otherwise=_not_saved)
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


def own_tensors(model: nn.Module, plan: SplitPlan, stage: int) -> dict[str, torch.Tensor]:
    """The parameters and persistent buffers that ``stage`` has to save, by the model's own names.

    Each is saved once, by the first stage that holds it, and a tied parameter by its first name. Buffers are on every
    stage; those of a unit count where it runs, others on the first.
    """
    return {
        name: tensor
        for name, tensor in model.state_dict().items()
        if plan.names.get(name, name) == name and plan.home_of(name) == stage
    }


def _own_state(models: Iterable[nn.Module], plan: SplitPlan, stages: Iterable[int]) -> dict[str, torch.Tensor]:
    """This rank's parameters and buffers, under the names that a checkpoint has."""
    state: dict[str, torch.Tensor] = {}
    for model, stage in zip(models, stages, strict=True):
        state |= revert_weight_conversion(model, own_tensors(model, plan, stage))
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
