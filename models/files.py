"""The safetensors files of a checkpoint: found, checked, and read one tensor at a time.

A checkpoint is one file, or several with an index that says which file holds which key. Opening one reads no more than
its header; a tensor's bytes are read when it is asked for.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from pipelining_dualpipev.errors import CheckpointError

__all__ = ["CheckpointFiles", "StoredTensor"]


class StoredTensor:
    """A tensor in a file. Indexing it reads, as transformers' conversion does with a safetensors slice.

    Attributes:
        file: where it is.
        key: its name there.
    """

    def __init__(self, file: Path, key: str, data: Any) -> None:
        self.file, self.key, self._data = file, key, data

    def __getitem__(self, index: Any) -> torch.Tensor:
        try:
            # Copied, because what safetensors gives is the mapped file itself, which a training step would write into.
            return self._data[index].clone()
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.file}: the tensor {self.key!r} cannot be read: {error}") from error


class CheckpointFiles:
    """The open files of a checkpoint; a context manager.

    Args:
        name_or_dir: a directory, or a name that the hub of transformers knows.
        hub: keyword arguments of transformers' own look-up (``revision``, ``token``, ``local_files_only``, ...).

    Attributes:
        tensors: everything in the files, by key; nothing has been read.

    Raises:
        CheckpointError: if a file is missing or cut short, or lacks a key that the index says it holds.
    """

    def __init__(self, name_or_dir: str | PathLike[str], **hub: Any) -> None:
        self.place = str(name_or_dir)
        self.tensors: dict[str, StoredTensor] = {}
        self._hub = hub
        self._open = ExitStack()
        try:
            for path, promised in self._find().items():
                self._add(path, promised)
        except BaseException:
            self._open.close()
            raise

    def __enter__(self) -> CheckpointFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def look_up(self, file: str) -> Path | None:
        """Where a file of the checkpoint is on this machine, None if there is none of that name."""
        found = cached_file(self.place, file, _raise_exceptions_for_missing_entries=False, **self._hub)
        return None if found is None else Path(found)

    def _find(self) -> dict[Path, list[str]]:
        """Each file, with the keys that the index says it holds."""
        index = self.look_up(SAFE_WEIGHTS_INDEX_NAME)
        if index is None:
            single = self.look_up(SAFE_WEIGHTS_NAME)
            if single is None:
                raise CheckpointError(
                    f"{self.place} has neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}: open it with plain "
                    "transformers and save it again, which writes them"
                )
            return {single: []}
        try:
            files: dict[str, list[str]] = {}
            for key, file in json.loads(index.read_text())["weight_map"].items():
                files.setdefault(file, []).append(key)
        except (ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{index} is no index of a checkpoint: {type(error).__name__}: {error}") from error
        paths = {file: self.look_up(file) for file in sorted(files)}
        for file, path in paths.items():
            if path is None:
                raise CheckpointError(
                    f"{self.place} lacks the file {file}, which the index says holds {files[file][0]!r}"
                    + (f" and {len(files[file]) - 1} more" if len(files[file]) > 1 else "")
                )
        return {path: files[file] for file, path in paths.items() if path is not None}

    def _add(self, path: Path, promised: list[str]) -> None:
        try:
            file = self._open.enter_context(safe_open(path, framework="pt"))
            keys = set(file.keys())
        except (SafetensorError, OSError) as error:
            holding = f", which holds {promised[0]!r}," if promised else ""
            raise CheckpointError(f"{path}{holding} is cut short or damaged: {error}") from error
        if lacking := [key for key in promised if key not in keys]:
            raise CheckpointError(f"{path} lacks {lacking[0]!r}, which the index says it holds")
        for key in keys:
            self.tensors[key] = StoredTensor(path, key, file.get_slice(key))
