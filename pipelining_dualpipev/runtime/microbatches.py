"""From a batch to its microbatches, and back.

A step is given either a whole batch, which is cut along dimension 0 (or as a chunk spec says), or microbatches that
the caller has cut. Both end as the same `Microbatches`. torch cuts a batch of 10 into 4 as 3, 3, 2, 2, whose mean of
means is not the batch's mean, so a batch that does not divide is refused here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.pipelining.microbatch import TensorChunkSpec, merge_chunks, split_args_kwargs_into_chunks

from pipelining_dualpipev._torch import pytree

__all__ = ["Microbatches", "cut_batch", "merge_outputs", "take_cut"]


@dataclass(frozen=True)
class Microbatches:
    """A step's inputs on this rank, by microbatch.

    Attributes:
        args: by position.
        kwargs: by keyword.
        targets: for the loss, if there are any.
        told: what the first stage's module has said of the keyword inputs, if anything.
    """

    args: list[tuple[Any, ...]]
    kwargs: list[dict[str, Any]]
    targets: list[Any] | None
    told: Any = None

    @classmethod
    def none(cls, n_microbatches: int) -> Microbatches:
        """The inputs of a rank that was given none."""
        return cls([()] * n_microbatches, [{}] * n_microbatches, None)

    def with_target_as(self, name: str) -> Microbatches:
        """Make the target and the keyword input ``name`` one and the same, whichever of them was given."""
        named = [mb[name] for mb in self.kwargs if name in mb]
        if self.targets is None:
            return Microbatches(self.args, self.kwargs, named) if named else self
        if named:
            raise ValueError(f"the target was given twice, as target and as {name}: give one of them")
        kwargs = [{**mb, name: target} for mb, target in zip(self.kwargs, self.targets, strict=True)]
        return Microbatches(self.args, kwargs, self.targets)

    def signature(self) -> tuple[Any, ...]:
        """What is the same in two steps only if all that crosses between stages has the same shapes."""
        return _describe(self.args), _describe(self.kwargs), _describe(self.targets), self.told

    def keyword_inputs(self) -> dict[str, object] | None:
        """Each keyword input by name: shapes and types over the microbatches, as words; None if there are none."""
        names = sorted({name for mb in self.kwargs for name in mb})
        words: dict[str, object] = {
            f"keyword input {name!r}": _told([mb.get(name) for mb in self.kwargs]) for name in names
        }
        return words or None


def _told(values: list[Any]) -> str:
    told = [", ".join(map(_told_leaf, pytree.tree_leaves(value))) or "nothing" for value in values]
    return told[0] if len(set(told)) == 1 else "; ".join(told)


def _told_leaf(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{leaf.dtype} {list(leaf.shape)} a microbatch"
    return repr(leaf) if isinstance(leaf, (bool, int, float, str)) else type(leaf).__name__


def _describe(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.shape, tree.dtype, tree.requires_grad
    # By hand, as they are what most inputs are made of and this is done every step.
    if type(tree) in (tuple, list):
        return type(tree), *map(_describe, tree)
    if type(tree) is dict:
        return dict, *((name, _describe(value)) for name, value in tree.items())
    leaves, structure = pytree.tree_flatten(tree)
    return str(structure), *(_describe(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves)


def cut_batch(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: Any,
    n_microbatches: int,
    args_chunk_spec: tuple[TensorChunkSpec, ...] | None = None,
    kwargs_chunk_spec: dict[str, TensorChunkSpec] | None = None,
) -> Microbatches:
    """Cut a whole batch into ``n_microbatches``; what is no tensor is given to each.

    Raises:
        ValueError: if some tensor does not divide, naming it, its size and ``n_microbatches``.
    """
    _check_divides("argument", args, args_chunk_spec, n_microbatches)
    _check_divides("input", kwargs, kwargs_chunk_spec, n_microbatches)
    _check_divides("target", (target,), None, n_microbatches)
    arg_mbs: list[tuple[Any, ...]] = [()] * n_microbatches
    kwarg_mbs: list[dict[str, Any]] = [{}] * n_microbatches
    if args:
        arg_mbs, _ = split_args_kwargs_into_chunks(args, None, n_microbatches, args_chunk_spec)
    if kwargs:
        _, kwarg_mbs = split_args_kwargs_into_chunks((), kwargs, n_microbatches, None, kwargs_chunk_spec)
    target_mbs = None
    if target is not None:
        target_mbs = [mb for (mb,) in split_args_kwargs_into_chunks((target,), None, n_microbatches)[0]]
    return Microbatches(arg_mbs, kwarg_mbs, target_mbs)


def _check_divides(what: str, values: Any, spec: Any, n: int) -> None:
    specs = spec if spec is not None else pytree.tree_map(lambda value: TensorChunkSpec(0), values)
    leaves, leaf_specs = pytree.tree_flatten_with_path(values)[0], pytree.tree_leaves(specs)
    for (path, leaf), leaf_spec in zip(leaves, leaf_specs, strict=True):
        if not isinstance(leaf, torch.Tensor) or not isinstance(leaf_spec, TensorChunkSpec):
            continue
        name = f"{what} {pytree.keystr(path)}" if what != "target" else "the target"
        if leaf.dim() == 0:
            raise ValueError(
                f"{name} is a tensor without dimensions, which cannot be cut into {n} microbatches: "
                "pass a Python number, or pre-split inputs (arg_mbs, kwarg_mbs, target_mbs)"
            )
        size = leaf.shape[leaf_spec.split_dim]
        if size % n or size == 0:
            fits = [m for m in range(1, size + 1) if size % m == 0]
            remedy = f"n_microbatches that divides it ({', '.join(map(str, fits[-8:]))})" if fits else "a larger batch"
            raise ValueError(
                f"{name} has {size} rows, which do not divide into {n} microbatches: "
                f"use a batch of a multiple of {n}, or {remedy}"
            )


def take_cut(
    arg_mbs: Sequence[Any] | None,
    kwarg_mbs: Sequence[Mapping[str, Any]] | None,
    target_mbs: Sequence[Any] | None,
    n_microbatches: int,
) -> Microbatches:
    """Microbatches that the caller has cut: lists with one entry a microbatch.

    Raises:
        TypeError: if one is no list, or its entries are no tuples or dicts.
        ValueError: if one has not ``n_microbatches`` entries.
    """
    for name, mbs in (("arg_mbs", arg_mbs), ("kwarg_mbs", kwarg_mbs), ("target_mbs", target_mbs)):
        if mbs is None:
            continue
        if not isinstance(mbs, (list, tuple)):
            raise TypeError(f"{name} is a {type(mbs).__name__}: give a list with one entry a microbatch")
        if len(mbs) != n_microbatches:
            raise ValueError(f"{name} has {len(mbs)} entries for {n_microbatches} microbatches: give one for each")
    args = [mb if isinstance(mb, tuple) else (mb,) for mb in arg_mbs or [()] * n_microbatches]
    for index, kwargs in enumerate(kwarg_mbs or ()):
        if not isinstance(kwargs, Mapping):
            raise TypeError(f"kwarg_mbs[{index}] is a {type(kwargs).__name__}: give a dict of keyword inputs")
    return Microbatches(
        args, [dict(mb) for mb in kwarg_mbs or [{}] * n_microbatches], list(target_mbs) if target_mbs else None
    )


def merge_outputs(outputs: Sequence[Any], spec: Any = None) -> Any:
    """The last stage's outputs put together: tensors along dimension 0, those without dimensions as a vector.

    What cannot be put together so (no tensor, or tensors of different lengths) becomes a list with one entry a
    microbatch, and so does what only some microbatches have, with None for the others.
    """
    if spec is not None:
        return merge_chunks(list(outputs), spec)
    flat = [pytree.tree_flatten(output) for output in outputs]
    if any(structure != flat[0][1] for _, structure in flat):
        return _merge_unlike(outputs)
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return pytree.tree_unflatten([_merge_leaf(list(column)) for column in columns], flat[0][1])


def _merge_unlike(outputs: Sequence[Any]) -> Any:
    if not all(isinstance(output, dict) for output in outputs):
        return list(outputs)
    names = dict.fromkeys(name for output in outputs for name in output)
    columns = {name: [output.get(name) for output in outputs] for name in names}
    everywhere = {name for name in names if all(name in output for output in outputs)}
    merged = {name: merge_outputs(column) if name in everywhere else column for name, column in columns.items()}
    return type(outputs[0])(**merged)


def _merge_leaf(values: list[Any]) -> Any:
    if not all(isinstance(value, torch.Tensor) for value in values):
        return values
    if len({(value.dim(), value.shape[1:]) for value in values}) > 1:
        return values
    return torch.stack(values) if values[0].dim() == 0 else torch.cat(values)
