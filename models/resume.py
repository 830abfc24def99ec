"""Stopping a training run and going on with it: on the same ranks bit for bit, or on another number of ranks.

`save_pretrained` keeps the weights. A run also has an optimiser's state, a learning-rate schedule, random numbers and
a place in its data. They are written by torch's distributed checkpoint (DCP), everything that belongs to a parameter
under the name that the parameter has in the model, so that it does not matter which rank holds it:

::

    model/model.layers.3.mlp.up_proj.weight              the parameter (or buffer)
    optimizer/model.layers.3.mlp.up_proj.weight          its group, and state that is no tensor
    optimizer/model.layers.3.mlp.up_proj.weight/exp_avg  state
    groups, scheduler, extra                             of rank 0
    random/1-of-4                                        of each rank; good for as many ranks only

A checkpoint is written beside the one before it, and then named as the latest by replacing one small file. Whenever a
run is killed, what that file names is whole:

::

    runs/state/
      LATEST       "state-3"
      state-3/     a DCP directory
      state-4/     being written; the next save sweeps it away if this one comes to nothing
"""

from __future__ import annotations

import os
import pickle
import random
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from pipelining_dualpipev.errors import CheckpointError
from pipelining_dualpipev.models.agree import everywhere
from pipelining_dualpipev.models.parts import SplitModel
from pipelining_dualpipev.models.surgery import names_of_parameters

__all__ = ["load_checkpoint", "save_checkpoint"]

_LATEST = "LATEST"


def save_checkpoint(
    directory: str | PathLike[str],
    model: SplitModel,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    *,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write down all that a training run needs to go on. Collective over the model's group.

    It replaces the one before in ``directory``, which stays the latest until this one is whole. Gradients are not
    saved: call it between steps. Over a data-parallel mesh one replica saves, and all of them load.

    Args:
        directory: created; on a file system that all ranks share.
        model: whose parameters and persistent buffers are saved.
        optimizer: over parameters of ``model``.
        scheduler: anything with a ``state_dict``; rank 0's is saved.
        extra: whatever else, such as the position in the data; rank 0's is saved. It is pickled.

    Raises:
        OSError: on every rank, if one could not write.
    """
    place, group = Path(directory).absolute(), model.stages[0].group
    rank = dist.get_rank(group)

    def prepare() -> str:
        state = _own_state(model, optimizer, rank, dist.get_world_size(group))
        if rank == 0:
            state["scheduler"] = None if scheduler is None else scheduler.state_dict()
            state["extra"] = dict(extra or {})
        prepared.append(state)
        return _next_name(place) if rank == 0 else ""

    prepared: list[dict[str, Any]] = []
    name = everywhere(prepare, group, otherwise=_not_saved)[0]
    try:
        dcp.save(
            prepared[0],
            checkpoint_id=place / name,
            planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=group,
        )
    except CheckpointException as error:  # on every rank alike
        raise _not_saved(str(error)) from error
    everywhere(lambda: _publish(place, name) if rank == 0 else None, group, otherwise=_not_saved)


def load_checkpoint(
    directory: str | PathLike[str],
    model: SplitModel | nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
) -> dict[str, Any]:
    """Go on from what `save_checkpoint` has written. Collective over the group of a split model.

    The model may be split over another number of ranks than the one that was saved, or not be split. Over as many ranks
    as before each also gets its random state back (of Python and torch, on the CPU and its device), and the steps that
    follow are the same to the bit.

    Args:
        directory: that `save_checkpoint` was given.
        model: its parameters and persistent buffers are overwritten.
        optimizer: over parameters of ``model``, in the same groups as before. Its state and settings are replaced.
        scheduler: its state is replaced.

    Returns:
        The ``extra`` that was saved.

    Raises:
        CheckpointError: on every rank, if there is no whole checkpoint, or if it is of another model or optimiser.
    """
    found: list[dict[str, Any]] = []

    def load() -> None:
        rank, num_ranks = 0, 1
        if isinstance(model, SplitModel):
            group = model.stages[0].group
            rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
        checkpoint = _Reader(Path(directory).absolute())
        held = _held_tensors(model)
        checkpoint.fill({f"model/{name}": [t.detach() for t in tensors] for name, tensors in held.items()})
        if optimizer is not None:
            _load_optimizer(optimizer, _names(model), checkpoint)
        if scheduler is not None:
            scheduler.load_state_dict(checkpoint.value("scheduler"))
        own_random = f"random/{rank}-of-{num_ranks}"
        if own_random in checkpoint.keys:
            _set_random_state(checkpoint.value(own_random), _device(model))
        found.append(checkpoint.value("extra"))

    if isinstance(model, SplitModel):
        everywhere(load, model.stages[0].group, otherwise=CheckpointError)
    else:
        load()
    return found[0]


# ------------------------------------------------------------------------------------------------- what is in it


def _own_state(model: SplitModel, optimizer: torch.optim.Optimizer | None, rank: int, num_ranks: int) -> dict[str, Any]:
    state: dict[str, Any] = {f"random/{rank}-of-{num_ranks}": _random_state(_device(model))}
    for stage in model.models:
        state |= {f"model/{name}": tensor.detach() for name, tensor in model.own_tensors(stage).items()}
    if optimizer is None:
        return state
    packed = optimizer.state_dict()
    if rank == 0:
        state["groups"] = [_settings(group) for group in packed["param_groups"]]
    for index, (number, name) in enumerate(_members(optimizer, _names(model))):
        if not any(model.plan.saves(name, stage) for stage in model.models):
            continue  # another rank has it too
        entries = packed["state"].get(index, {})
        tensors = {key: value for key, value in entries.items() if isinstance(value, torch.Tensor)}
        rest = {key: value for key, value in entries.items() if key not in tensors}
        state[f"optimizer/{name}"] = {"group": number, "entries": rest}
        state |= {f"optimizer/{name}/{key}": value for key, value in tensors.items()}
    return state


def _load_optimizer(optimizer: torch.optim.Optimizer, names: dict[nn.Parameter, str], checkpoint: _Reader) -> None:
    if "groups" not in checkpoint.keys:
        raise CheckpointError(f"{checkpoint.place} holds no optimizer: load it without one")
    packed = optimizer.state_dict()
    groups = checkpoint.value("groups")
    if len(groups) != len(packed["param_groups"]):
        raise CheckpointError(
            f"{checkpoint.place} holds an optimizer of {len(groups)} parameter groups, this one has "
            f"{len(packed['param_groups'])}: make it as it was when it was saved"
        )
    members = _members(optimizer, names)
    records = checkpoint.values(f"optimizer/{name}" for _, name in members)
    state: dict[int, dict[str, Any]] = {}
    for index, ((number, name), record) in enumerate(zip(members, records, strict=True)):
        if record["group"] != number:
            raise CheckpointError(
                f"{name} was in parameter group {record['group']} of the optimizer and is now in {number}: make the "
                "optimizer as it was when it was saved"
            )
        state[index] = record["entries"] | checkpoint.tensors_under(f"optimizer/{name}/")
    checkpoint.fill(
        {
            f"optimizer/{name}/{key}": [value]
            for index, (_, name) in enumerate(members)
            for key, value in state[index].items()
            if isinstance(value, torch.Tensor)
        }
    )
    optimizer.load_state_dict(
        {
            "state": {index: entries for index, entries in state.items() if entries},
            "param_groups": [
                {**saved, "params": own["params"]} for saved, own in zip(groups, packed["param_groups"], strict=True)
            ],
        }
    )
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, entries in state.items():  # torch gives all of it the type of the parameter
        for key, value in entries.items():
            now = optimizer.state[parameters[index]][key]
            if isinstance(value, torch.Tensor) and now.dtype != value.dtype:
                optimizer.state[parameters[index]][key] = value.to(now.device)


def _members(optimizer: torch.optim.Optimizer, names: dict[nn.Parameter, str]) -> list[tuple[int, str]]:
    """The group and the name of each parameter, in the order in which an optimiser's state dict numbers them."""
    members = [
        (number, names.get(parameter))
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    ]
    for number, name in members:
        if name is None:
            raise CheckpointError(f"group {number} of the optimizer holds a parameter that is none of the model's")
    return members  # type: ignore[return-value]


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _names(model: SplitModel | nn.Module) -> dict[nn.Parameter, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def _held_tensors(model: SplitModel | nn.Module) -> dict[str, list[torch.Tensor]]:
    """What a model holds of each parameter and persistent buffer; both stages of a rank have buffers of all units."""
    held: dict[str, list[torch.Tensor]] = {}
    if isinstance(model, SplitModel):
        parts = [(module, model.plan.names) for module in model.models.values()]
    else:
        parts = [(model, names_of_parameters(model))]
    for module, first_names in parts:
        for name, tensor in module.state_dict().items():
            held.setdefault(first_names.get(name, name), []).append(tensor)
    return held


def _device(model: SplitModel | nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _random_state(device: torch.device) -> dict[str, Any]:
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state(device)
    return state


def _set_random_state(state: dict[str, Any], device: torch.device) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type], device)


# ---------------------------------------------------------------------------------------------- where it is


def _next_name(place: Path) -> str:
    """A name for the next checkpoint, with all swept away that is not the latest."""
    place.mkdir(parents=True, exist_ok=True)
    latest = _latest(place)
    for other in place.glob("state-*"):
        if other.name != latest:
            shutil.rmtree(other)
    return f"state-{int(latest.removeprefix('state-')) + 1 if latest else 0}"


def _latest(place: Path) -> str | None:
    file = place / _LATEST
    return file.read_text().strip() if file.exists() else None


def _publish(place: Path, name: str) -> None:
    before = _latest(place)
    aside = place / f"{_LATEST}.writing"
    with aside.open("w") as file:
        file.write(f"{name}\n")
        file.flush()
        os.fsync(file.fileno())
    aside.replace(place / _LATEST)
    if before is not None:
        shutil.rmtree(place / before, ignore_errors=True)


def _not_saved(words: str) -> OSError:
    return OSError(f"the checkpoint could not be saved: {words}")


class _Reader:
    """The latest checkpoint in a directory. Each rank reads for itself.

    Attributes:
        place: the directory of the checkpoint.
        keys: what DCP knows of each key.
    """

    def __init__(self, directory: Path) -> None:
        name = _latest(directory)
        if name is None:
            raise CheckpointError(
                f"{directory} holds no checkpoint of save_checkpoint: there is no file {_LATEST} in it"
            )
        self.place = directory / name
        try:
            metadata: Metadata = dcp.FileSystemReader(self.place).read_metadata()
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{self.place} is damaged: {type(error).__name__}: {error}") from error
        self.keys = metadata.state_dict_metadata
        self._refuse_lost_bytes(metadata)
        self._under: dict[str, list[str]] = {}
        for key in self.keys:
            head, _, tail = key.rpartition("/")
            self._under.setdefault(f"{head}/", []).append(tail)

    def _refuse_lost_bytes(self, metadata: Metadata) -> None:
        sizes = {path.name: path.stat().st_size for path in self.place.iterdir()}
        for index, info in metadata.storage_data.items():
            size, needed = sizes.get(info.relative_path), info.offset + info.length
            if size is None or size < needed:
                how = "is missing" if size is None else f"is cut short: it has {size:,} bytes of at least {needed:,}"
                raise CheckpointError(
                    f"{self.place} is damaged: the file {info.relative_path}, which holds {index.fqn!r}, {how}"
                )

    def value(self, key: str) -> Any:
        """Something that is no tensor."""
        return next(self.values([key]))

    def values(self, keys: Iterable[str]) -> Iterator[Any]:
        """Several such things, in their order."""
        wanted = dict.fromkeys(keys)
        self._check(wanted)
        yield from self._read(wanted).values()

    def tensors_under(self, prefix: str) -> dict[str, torch.Tensor]:
        """A tensor of the right size and type for each key that continues ``prefix``, not filled yet."""
        described = {tail: self.keys[prefix + tail] for tail in self._under.get(prefix, [])}
        return {
            tail: torch.empty(entry.size, dtype=entry.properties.dtype)
            for tail, entry in described.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def fill(self, tensors: Mapping[str, list[torch.Tensor]]) -> None:
        """Write what is saved under each key into all of the tensors given for it."""
        self._check(tensors)
        for key, copies in tensors.items():
            saved = tuple(self.keys[key].size)  # type: ignore[union-attr]
            if tuple(copies[0].shape) != saved:
                raise CheckpointError(
                    f"{key} has shape {list(saved)} in {self.place} and {list(copies[0].shape)} here: it is of "
                    "another model"
                )
        read = self._read({key: copies[0] for key, copies in tensors.items()})
        for key, copies in tensors.items():
            for copy in copies[1:]:
                copy.copy_(read[key])

    def _check(self, keys: Iterable[str]) -> None:
        if lacking := [key for key in keys if key not in self.keys]:
            more = f" and {len(lacking) - 1} more keys" if len(lacking) > 1 else ""
            raise CheckpointError(f"{self.place} lacks {lacking[0]!r}{more}: it is of another model")

    def _read(self, state: dict[str, Any]) -> dict[str, Any]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            try:
                dcp.load(
                    state,
                    checkpoint_id=self.place,
                    planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                    no_dist=True,
                )
            except CheckpointException as error:
                raise CheckpointError(f"{self.place} is damaged: {error}") from error
        return state
