"""A tensor that another stage has: shape, type and device, but no data.

Every stage runs the whole model's own forward (see `models.plan`). What it does not own, weights of other stages and
what their layers compute, is an `Absent`. The forward's own code around the layers goes on as if it were there::

    hidden = self.embed_tokens(input_ids)         # another stage's: an Absent [2, 128, 4096]
    positions = torch.arange(hidden.shape[1])     # real: it takes the shape only
    hidden = hidden * self.scale                  # an Absent again, at no cost
    if mask.all(): ...                            # needs the value: an error, never a guess

An operation on an Absent gives an Absent, computed on the meta device. Each remembers its *roots*: which inputs,
parameters and layer outputs it came from. That is how the plan finds out what has to travel.

In the plan's dry run, and only there, two things are different. Inputs are Absents that also carry a *value*, so that
decisions made on them (is there any padding?) are made, and noted as read. And inside a layer, whose outcome does
not matter then, a value that is not there is *pretended*.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from pipelining_dualpipev._torch import GROUPED_MM, WrapperTensor, pytree, storage_of, writes_in_place
from pipelining_dualpipev.errors import SplitError

__all__ = ["Absent", "Demand", "Root", "pretending", "recording", "refuse_spoiled", "tensors_in", "told"]

aten = torch.ops.aten


class Root(NamedTuple):
    """Where a value comes from: an ``"input"`` or a ``"parameter"`` by name, or an output of an ``"event"``.

    An event is one call of a unit (`models.plan`); its outputs are numbered.
    """

    kind: str
    name: str
    event: int = -1
    output: int = -1

    def __str__(self) -> str:
        return f"{self.kind} {self.name}" if self.kind != "event" else f"output {self.output} of {self.name}"


class Demand(NamedTuple):
    """Glue has looked at data, or written it where it cannot be followed: who comes this far must have it.

    Attributes:
        events: how many units had been called before.
        roots: of the data.
    """

    events: int
    roots: frozenset[Root]


class _Recording(threading.local):
    """What the dry run wants to know of the operations that run meanwhile."""

    dry_run = False
    pretends = False
    unit = ""  # whose call is running, by name
    used: set[Root] | None = None  # in a unit: roots of whatever operations have taken; another set in each call
    demands: list[Demand] | None = None  # of glue
    events = 0  # how many units have been called so far
    writes_in_place = False  # into something that a unit gave


recording = _Recording()

# They take a tensor for its shape, type and device alone, so their result is as real as if it had been there.
_SHAPE_ONLY = {
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.new_empty.default,
}
_SMALL = 1 << 20  # elements; larger ones need no value in the dry run, where nobody looks at hidden states


class _Memory:
    """What the views of one tensor have in common: writing into one of them writes into all.

    Attributes:
        roots: where the data comes from.
        known: whether the tensors that share this hold their data.
        given: whether a unit gave it, so that writing into it would write into what a stage receives.
        maker: the call of a unit in which it was made (its ``recording.used``); None outside of one.
        spoiled: in the dry run, the call and the name of a unit that has written into it, though it was made outside of
            that call and given by no unit: what other stages have in its place knows nothing of that.
    """

    __slots__ = ("given", "known", "maker", "roots", "spoiled")

    def __init__(self, roots: frozenset[Root], known: bool) -> None:
        self.roots, self.known, self.given = roots, known, False
        self.maker = recording.used
        self.spoiled: tuple[set[Root] | None, str] | None = None


class Absent(WrapperTensor):
    """A tensor without data. See the module.

    Attributes:
        meta: its stand-in on the meta device; views of one tensor share storage there too.
        memory: what it has in common with its views.
    """

    meta: torch.Tensor
    memory: _Memory
    _value: torch.Tensor | None

    @staticmethod
    def __new__(  # noqa: D102
        cls,
        meta: torch.Tensor,
        device: torch.device | str,
        roots: frozenset[Root] = frozenset(),
        value: torch.Tensor | None = None,
        memory: _Memory | None = None,
    ) -> Absent:
        self = super().__new__(cls, meta, device)
        self.meta, self._value = meta, value
        self.memory = memory or _Memory(roots, known=value is not None)
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    @classmethod
    def like(cls, tensor: torch.Tensor, device: torch.device | str, root: Root) -> Absent:
        """What stands for ``tensor`` where it is not."""
        # empty_like is written in Python for meta, and 50 times slower.
        meta = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
        return cls(meta, device, frozenset({root}))

    @property
    def roots(self) -> frozenset[Root]:
        """Where it comes from."""
        return self.memory.roots

    @property
    def value(self) -> torch.Tensor | None:
        """The data, if it is known: it follows from shapes alone or, in the dry run, from the inputs alone."""
        return self._value if self.memory.known else None

    def becomes_given(self, root: Root) -> None:
        """From here on it is a unit's output."""
        self.memory, self._value = _Memory(frozenset({root}), known=False), None
        self.memory.given = True

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Absent({list(self.shape)}, {self.dtype}, from {told(self.roots)})"

    def __format__(self, spec: str) -> str:
        return format(self.item() if self.dim() == 0 else repr(self), spec)

    def tolist(self) -> Any:
        """The data as Python numbers, where they are known or pretended."""
        return _read(self, torch.ones(self.shape, dtype=self.dtype)).tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = dict(kwargs or {})
        if func is aten._local_scalar_dense.default:
            return _read(args[0], torch.ones((), dtype=args[0].dtype)).item()
        operands = [x for x in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(x, torch.Tensor)]
        absent = [x for x in operands if isinstance(x, Absent)]
        refuse_spoiled(absent)
        device = kwargs.get("device") or absent[0].device
        if func in _SHAPE_ONLY:
            return _from_shape(func, args, kwargs, device)
        if func is aten.equal.default:
            for x in absent:
                _read(x, x.meta)
            known = all(x.value is not None for x in absent)
            return func(*pytree.tree_map_only(Absent, lambda x: x.value, args)) if known else False
        roots = frozenset().union(*(x.roots for x in absent))
        if recording.used is not None:
            recording.used |= roots
        if func is aten.nonzero.default:
            return _nonzero(args[0], device, roots)
        known = all(x.value is not None for x in absent)
        if writes_in_place(func):
            _note_write(args[0], roots, known)
        if not known or recording.dry_run:
            if func is aten.index.Tensor:
                args = (args[0], _without_masks(args[1]), *args[2:])
            result = _on_meta(func, args, kwargs)
            value = _on_values(func, args, kwargs) if known else None
            return _wrap(result, value, operands, device, roots)
        # A stage that is really run, on what it knows: a view still shares its memory, anything else is simply real.
        value = _on_values(func, args, kwargs)
        return (
            _wrap(_on_meta(func, args, kwargs), value, operands, device, roots)
            if _shares_memory(value, absent)
            else value
        )


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """All tensors in a nest of containers."""
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def refuse_spoiled(tensors: Iterable[torch.Tensor]) -> None:
    """Raise if one of them is used though a unit has written into it where others cannot follow.

    Raises:
        SplitError: naming the unit.
    """
    for tensor in tensors:
        spoiled = tensor.memory.spoiled if isinstance(tensor, Absent) else None
        if spoiled is not None and spoiled[0] is not recording.used:
            raise SplitError(
                f"{spoiled[1]} writes in place into a tensor of shape {list(tensor.shape)} that it was given and that "
                "is used afterwards, where other stages would not see it: let it return what it computes"
            )


def told(roots: frozenset[Root] | set[Root]) -> str:
    """A few roots in words."""
    words = sorted(map(str, roots))
    return ", ".join(words[:3]) + (f" and {len(words) - 3} more" if len(words) > 3 else "") if words else "nothing"


@contextmanager
def pretending(unit: str) -> Iterator[set[Root]]:
    """In the dry run, inside a unit: values may be pretended; yields what becomes the roots that the unit has used."""
    before = recording.pretends, recording.used, recording.unit
    used: set[Root] = set()
    recording.pretends, recording.used, recording.unit = True, used, unit
    try:
        yield used
    finally:
        recording.pretends, recording.used, recording.unit = before


def _read(tensor: Absent, pretended: torch.Tensor) -> torch.Tensor:
    """The tensor's data, for Python code that asks for it."""
    if recording.pretends and recording.used is not None:
        recording.used |= tensor.roots
    elif recording.demands is not None and tensor.value is not None:
        recording.demands.append(Demand(recording.events, tensor.roots))
    if tensor.value is not None:
        return tensor.value
    if recording.pretends:
        return pretended
    raise SplitError(
        f"the model's forward asks for the value of a tensor that another stage has ({tensor!r}), outside of any "
        "layer: it cannot be split"
    )


def _note_write(target: Any, roots: frozenset[Root], known: bool) -> None:
    """Something is written in place: into an Absent, all of whose views are then written; or into a real tensor."""
    if isinstance(target, Absent):
        memory = target.memory
        recording.writes_in_place |= recording.dry_run and memory.given
        if recording.pretends and not memory.given and memory.maker is not recording.used:
            memory.spoiled = recording.used, recording.unit
        memory.roots |= roots
        memory.known &= known
    elif recording.pretends:
        pass  # within a unit, whose outcome does not matter in the dry run
    elif recording.demands is not None:
        # A real tensor has no roots: who uses it cannot be told any more.
        recording.demands.append(Demand(recording.events, roots))
    elif not known:
        raise SplitError(
            f"the model's forward writes what another stage has ({told(roots)}) into a tensor of its own, outside of "
            "any layer: it cannot be split"
        )


def _to_meta(tree: Any) -> Any:
    def stand_in(x: torch.Tensor) -> torch.Tensor:
        return x.meta if isinstance(x, Absent) else x if x.is_meta else x.to("meta")

    return pytree.tree_map_only(torch.Tensor, stand_in, tree)


def _on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    args, kwargs = _to_meta(args), _to_meta(kwargs)
    if "device" in kwargs:
        kwargs["device"] = torch.device("meta")
    # Writing by index or mask has no meta kernel for every case, and changes no shape.
    if func is aten.index_put_.default:
        return args[0]
    if func in (aten.index_put.default, aten.masked_scatter.default):
        return torch.empty_like(args[0])
    if func is GROUPED_MM and args[0].dim() == 2 and args[1].dim() == 3:
        # Experts: its kernels take float32 too, the one for meta does not.
        dtype = kwargs.get("out_dtype") or args[0].dtype
        return args[0].new_empty((args[0].shape[0], args[1].shape[2]), dtype=dtype)
    return func(*args, **kwargs)


def _on_values(func: Any, args: Any, kwargs: Any) -> Any:
    args, kwargs = pytree.tree_map_only(Absent, lambda x: x.value, (args, kwargs))
    return func(*args, **kwargs)


def _wrap(result: Any, value: Any, operands: list[torch.Tensor], device: Any, roots: frozenset[Root]) -> Any:
    """Absents for the tensors of a result; what was written in place is itself, what is a view shares its memory."""
    absent = [x for x in operands if isinstance(x, Absent)]
    same = {id(x.meta): x for x in absent}
    memories = {storage_of(x.meta): x.memory for x in absent}
    leaves, structure = pytree.tree_flatten(result)
    values = pytree.tree_leaves(value) if value is not None else [None] * len(leaves)

    def wrap(leaf: Any, data: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) in same:
            return same[id(leaf)]
        return Absent(leaf, device, roots, data, memories.get(storage_of(leaf)))

    return pytree.tree_unflatten([wrap(leaf, data) for leaf, data in zip(leaves, values, strict=True)], structure)


def _shares_memory(value: Any, absent: list[Absent]) -> bool:
    own = {storage_of(x.value) for x in absent if x.value is not None}
    return any(storage_of(x) in own for x in tensors_in(value))


def _from_shape(func: Any, args: Any, kwargs: Any, device: Any) -> Absent:
    meta = _on_meta(func, args, kwargs)
    if recording.dry_run and meta.numel() > _SMALL:
        return Absent(meta, device)
    where = "cpu" if recording.dry_run else device
    like = torch.empty_strided(args[0].size(), args[0].stride(), dtype=args[0].dtype, device=where)
    return Absent(meta, device, value=func(like, *args[1:], **{**kwargs, "device": where}))


def _nonzero(tensor: Any, device: Any, roots: frozenset[Root]) -> Absent:
    """Its result's shape follows from values; where they are pretended there is one hit."""
    hits = _read(tensor, torch.empty(0))
    if tensor.value is None:
        return Absent(torch.empty((1, tensor.dim()), dtype=torch.long, device="meta"), device, roots)
    found = torch.nonzero(hits)
    return Absent(found.to("meta"), device, roots, found)


def _without_masks(indices: Any) -> list[Any]:
    """Indices whose masks are replaced by as many positions as they hit, since a result's shape follows from that."""
    positions: list[Any] = []
    for index in indices:
        if not isinstance(index, torch.Tensor) or index.dtype not in (torch.bool, torch.uint8):
            positions.append(index)
            continue
        data: torch.Tensor | None = index
        if isinstance(index, Absent):
            _read(index, torch.empty(0))
            data = index.value
        if data is not None and not data.is_meta:
            found = data.nonzero(as_tuple=True)
            roots = index.roots if isinstance(index, Absent) else frozenset()
            positions += [Absent(x.to("meta"), index.device, roots, x) for x in found]
        else:
            positions += [torch.zeros(1, dtype=torch.long, device="meta")] * index.dim()
    return positions
