"""Opening a checkpoint so that each rank reads its own two stages and nothing else.

``AutoModel.from_pretrained(...)`` and `split` would do, if every rank had room for the whole model. Instead:

::

    config.json ──> the model on meta ──> [1] buffers    read by all: glue may look at them, and they are small
                                          [2] plan       as `split` makes it, without weights
    *.safetensors ───────────────────────> [3] parameters of this rank's stages, through transformers' own conversion
                                              (experts fused, keys renamed), onto the device
                                          [4] stages     a parameter with several names is one object

For [1] and [3] transformers is given a model in which everything that is not to be read is not there: no key of a file
matches it, so it stays unread. Whatever is wrong with a file on one rank is raised on all.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging as hf_logging

from pipelining_dualpipev.errors import CheckpointError
from pipelining_dualpipev.models.agree import everywhere
from pipelining_dualpipev.models.deal import Balance
from pipelining_dualpipev.models.files import CheckpointFiles
from pipelining_dualpipev.models.loss import LossFunction
from pipelining_dualpipev.models.parts import SplitModel
from pipelining_dualpipev.models.split import make_stages, plan_skeleton, where
from pipelining_dualpipev.models.surgery import make_parameters_absent, make_skeleton, names_of_parameters
from pipelining_dualpipev.planning.placement import Placement

__all__ = ["from_pretrained"]


def from_pretrained(
    name_or_dir: str | PathLike[str],
    group_or_mesh: dist.ProcessGroup | DeviceMesh | None = None,
    *,
    example: Mapping[str, Any],
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    dp_group: dist.ProcessGroup | None = None,
    balance: Balance = "uniform",
    config: PretrainedConfig | None = None,
    model_class: Any = None,
    **hub: Any,
) -> SplitModel:
    """Open a checkpoint of transformers as the 2P stages of a V; each rank reads the bytes of its own two. Collective.

    As with ``from_pretrained`` of transformers, the modules are in evaluation mode: call ``train()`` before training.

    Args:
        name_or_dir: a directory with safetensors, or a name on the hub, which is looked up as transformers does.
        group_or_mesh: the pipeline's group, or a mesh of one dimension; by default the world.
        example: one microbatch of keyword inputs, on every rank (see `split`).
        dtype: of the weights; by default what the config says.
        device: where the stages run; by default the current accelerator, or the CPU if there is none.
        dp_group: over which batches differ (see `split`).
        balance: which layers go on which stage (see `split`).
        config: instead of the checkpoint's own, for one with other dropout, attention implementation and so on.
        model_class: an Auto class of transformers, or a class of a model; by default the one that the config names.
        hub: for the look-up: ``revision``, ``token``, ``cache_dir``, ``local_files_only``, ``subfolder``.

    Raises:
        CheckpointError: on every rank, naming file and key, if a file is missing or cut short, or a tensor is missing
            or has another shape than the model's.
        SplitError: on every rank, if the model cannot be split so.
    """
    group, device = where(group_or_mesh, device)
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    opened: list[SplitModel] = []

    def open_own_part() -> None:
        with CheckpointFiles(name_or_dir, **hub) as files:
            own_config = copy.deepcopy(config) or AutoConfig.from_pretrained(name_or_dir, **hub)
            skeleton = _make_skeleton(files, own_config, dtype, model_class, **hub)
            _load_buffers(skeleton, files)
            plan = plan_skeleton(skeleton, num_ranks, example, balance)
            own = Placement.v(num_ranks).stages_of(rank)
            keep = {name for stage in own for name in plan.local_parameters(stage)}
            with _progress_bar(rank == 0):
                parameters = _load_parameters(skeleton, plan.names, keep, files, device)
            if rank == 0:
                _warn_of_unused_keys(skeleton, files)
        loss_fn = LossFunction(plan.loss, dp_group) if plan.loss else None
        modules = make_stages(skeleton, plan, own, parameters, device, loss_fn)
        opened.append(SplitModel(modules, plan, skeleton, group, device, loss_fn).eval())

    everywhere(open_own_part, group, otherwise=CheckpointError)
    return opened[0]


def _make_skeleton(
    files: CheckpointFiles, config: Any, dtype: torch.dtype | str | None, model_class: Any, **hub: Any
) -> Any:
    """The model with its parameters on meta, of the types that transformers would give them, and real buffers."""
    if getattr(config, "quantization_config", None) is not None:
        raise CheckpointError(f"{files.place} is quantized, which cannot be trained: give the original weights")
    named = (getattr(config, "architectures", None) or [None])[0]
    model_class = model_class or (getattr(transformers, named, None) if named else None) or AutoModelForCausalLM
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype or config.dtype or torch.get_default_dtype()
    with torch.device("meta"):
        make = model_class.from_config if hasattr(model_class, "from_config") else model_class._from_config
        model = make(config, dtype=dtype)
    kept_precise = model._get_dtype_plan(dtype)
    if kept_precise:
        pattern, groups, _ = build_glob_alternation(list(kept_precise))
        for name, parameter in model.named_parameters():
            if found := pattern.search(name):
                parameter.data = parameter.data.to(kept_precise[groups[found.lastgroup]])
    if files.look_up("generation_config.json") is not None:
        model.generation_config = GenerationConfig.from_pretrained(files.place, **hub)
    return make_skeleton(model)


def _load_buffers(skeleton: nn.Module, files: CheckpointFiles) -> None:
    """Fill the buffers of ``skeleton`` that the files hold; others are as the model has made them."""
    names = names_of_parameters(skeleton)
    if len(skeleton.state_dict()) == len(names):
        return
    loader = copy.deepcopy(skeleton)
    make_parameters_absent(loader, names, keep=(), device="cpu")
    _read_into(loader, files, torch.device("cpu"), required=())
    loaded = dict(loader.named_buffers())
    for name, buffer in skeleton.named_buffers():
        buffer.copy_(loaded[name])


def _load_parameters(
    skeleton: nn.Module, names: dict[str, str], keep: Collection[str], files: CheckpointFiles, device: torch.device
) -> dict[str, nn.Parameter]:
    """The parameters in ``keep``, by their first names."""
    loader: Any = copy.deepcopy(skeleton)
    make_parameters_absent(loader, names, keep=keep, device=device)
    for module in loader.modules():
        for name, _ in list(module.named_buffers(recurse=False)):
            delattr(module, name)
    tied: dict[str, list[str]] = {}
    for name in keep:
        tied.setdefault(names[name], []).append(name)
    _read_into(loader, files, device, required=tied.values())
    skeleton._weight_conversions = loader._weight_conversions  # to save it so
    trained = dict(skeleton.named_parameters(remove_duplicate=False))
    parameters: dict[str, nn.Parameter] = {}
    for first, aliases in tied.items():
        read = [name for name in aliases if not loader.get_parameter(name).is_meta]
        values = [loader.get_parameter(name).detach() for name in read]
        if any(not torch.equal(values[0], other) for other in values[1:]):
            raise CheckpointError(
                f"{files.place} holds different values for {' and '.join(sorted(read))}, which the model ties: "
                "give a config with tie_word_embeddings=False"
            )
        parameters[first] = nn.Parameter(values[0], requires_grad=trained[first].requires_grad)
    return parameters


def _read_into(loader: Any, files: CheckpointFiles, device: torch.device, required: Collection[list[str]]) -> None:
    """Let transformers read what ``loader`` has into it. Of each list of names in ``required`` one has to be there."""
    info, _ = convert_and_load_state_dict_in_model(
        loader,
        files.tensors,
        LoadStateDictConfig(
            weight_mapping=get_model_conversion_mapping(loader),
            dtype=next((p.dtype for p in loader.parameters()), torch.get_default_dtype()),
            device_map={"": device},
        ),
    )

    def told(name: str) -> str:
        sources = [files.tensors[key] for key, target in _targets(loader, files) if target == name]
        return ", ".join(f"{source.key!r} in {source.file}" for source in sources[:3]) or "nothing"

    for name, found, expected in sorted(info.mismatched_keys):
        raise CheckpointError(
            f"{name} is made of {told(name)} and has shape {list(found)}, the model's has {list(expected)}: the "
            "weights are not of this config"
        )
    for name, words in sorted(info.conversion_errors.items()):
        raise CheckpointError(f"{name} cannot be made of {told(name)}: {words.strip().splitlines()[-1]}")
    lacking = sorted(names[0] for names in required if info.missing_keys.issuperset(names))
    if lacking:
        more = f" and {len(lacking) - 1} more parameters of its stages" if len(lacking) > 1 else ""
        raise CheckpointError(
            f"no file of {files.place} holds {lacking[0]!r}{more}: the weights are not of this config"
        )


def _targets(model: Any, files: CheckpointFiles) -> Iterator[tuple[str, str]]:
    """Each key in the files, and the name in ``model`` that transformers' conversion gives it."""
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    own = model.state_dict()
    for key in files.tensors:
        target, _ = rename_source_key(key, renamings, converters, model.base_model_prefix, own)
        if target not in own and key in own:
            target, _ = rename_source_key(key, [], [], model.base_model_prefix, own)
        yield key, target


def _warn_of_unused_keys(skeleton: Any, files: CheckpointFiles) -> None:
    own = skeleton.state_dict()
    known = re.compile("|".join(skeleton._keys_to_ignore_on_load_unexpected or ["(?!)"]))
    unused = sorted(key for key, target in _targets(skeleton, files) if target not in own and not known.search(target))
    if unused:
        more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        warnings.warn(f"{files.place} holds {unused[0]!r}{more}, which the model has no use for", stacklevel=4)


@contextmanager
def _progress_bar(shown: bool) -> Iterator[None]:
    """Let transformers show its bar, or not."""
    was_shown = hf_logging.is_progress_bar_enabled()
    if not shown:
        hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            hf_logging.enable_progress_bar()
