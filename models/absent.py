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

from collections.abc import Iterable
from typing import Any

import torch

from pipelining_dualpipev._torch import GROUPED_MM, UNIQUE, WrapperTensor, pytree, storage_of, writes_in_place
from pipelining_dualpipev.errors import SplitError
from pipelining_dualpipev.models.roots import Demand, Root, recording, told

__all__ = ["Absent", "on_known", "refuse_spoiled", "tensors_in"]

aten = torch.ops.aten


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
# The shape of their result follows from values.
_SHAPED_BY_VALUES = {
    aten.nonzero.default,
    aten.repeat_interleave.Tensor,
    aten.masked_select.default,
    aten.bincount.default,
    UNIQUE,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
}
_SMALL = 1 << 20  # elements; larger ones need no value in the dry run, where nobody looks at hidden states


class _Memory:
    """What the views of one tensor have in common: writing into one of them writes into all.

    Attributes:
        roots: where the data comes from.
        known: whether the tensors that share this hold their data.
        given: whether a unit gave it or it is an input, so that writing into it would write into what a stage is given.
        received: whether a unit gave it, so that what is written into it before it is handed on is in it.
        maker: the call of a unit in which it was made (its ``recording.used``); None outside of one.
        unit: the name of that unit.
        root: of what a unit gave.
        spoiled: in the dry run, the call and the name of a unit that has written into it, though it was made outside of
            that call and received from no unit: what other stages have in its place knows nothing of that.
    """

    __slots__ = ("given", "known", "maker", "received", "root", "roots", "spoiled", "unit")

    def __init__(self, roots: frozenset[Root], known: bool) -> None:
        self.roots, self.known = roots, known
        self.given = self.received = False
        self.root: Root | None = None
        self.maker, self.unit = recording.used, recording.unit
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

    def becomes_given(self, root: Root, *, is_sure: bool) -> None:
        """From here on it is a unit's output; of which a value is still known if that ``is_sure`` and not random."""
        known = self.value is not None and is_sure and not any(root.kind == "random" for root in self.roots)
        self.memory = _Memory(frozenset({root}), known)
        self.memory.given = self.memory.received = True
        self.memory.root = root

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
                _ask_for(x)
            return all(x.value is not None for x in absent) and bool(_seen(on_known(_are_equal, args, {})))
        roots = frozenset().union(*(x.roots for x in absent))
        if recording.dry_run and torch.Tag.nondeterministic_seeded in func.tags:
            roots |= {recording.draw(func.overloadpacket.__name__)}
        if recording.used is not None:
            recording.used |= roots
        if func in _SHAPED_BY_VALUES:
            return _shaped_by_values(func, args, kwargs, absent, device, roots)
        known = all(x.value is not None for x in absent)
        if writes_in_place(func):
            _note_write(args[0], roots, known)
        if not known or recording.dry_run:
            if func is aten.index.Tensor:
                args = (args[0], _without_masks(args[1]), *args[2:])
            result = _on_meta(func, args, kwargs)
            value = on_known(func, args, kwargs) if known else None
            return _wrap(result, value, operands, device, roots)
        # A stage that is really run, on what it knows: a view still shares its memory, anything else is simply real.
        value = on_known(func, args, kwargs)
        return (
            _wrap(_on_meta(func, args, kwargs), value, operands, device, roots)
            if _shares_memory(value, absent)
            else value
        )


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """All tensors in a nest of containers."""
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def refuse_spoiled(tensors: Iterable[torch.Tensor]) -> None:
    """Raise if one of them is used though a unit has made it, or written into it, where others cannot follow.

    Raises:
        SplitError: naming the unit.
    """
    for tensor in tensors:
        if not isinstance(tensor, Absent):
            continue
        memory, spoiled = tensor.memory, tensor.memory.spoiled
        if memory.maker is not None and memory.maker is not recording.used and memory.roots:
            raise SplitError(
                f"{memory.unit} computes a tensor of shape {list(tensor.shape)} that is used outside of it and is "
                "nothing that it returns or writes into a dict or list (it may keep it, or put it into a cache): other "
                "stages would not see it, so let it return what it computes"
            )
        if spoiled is not None and spoiled[0] is not recording.used:
            raise SplitError(
                f"{spoiled[1]} writes in place into a tensor of shape {list(tensor.shape)} that it was given and that "
                "is used afterwards, where other stages would not see it: let it return what it computes"
            )


def _read(tensor: Absent, pretended: torch.Tensor) -> torch.Tensor:
    """The tensor's data, for Python code that asks for it."""
    _ask_for(tensor)
    if tensor.value is None:
        return pretended
    if recording.dry_run and not recording.pretends and any(root.kind == "random" for root in tensor.roots):
        recording.chances += (tensor.value.tolist(),)
    return _seen(tensor.value)


def _seen(value: torch.Tensor, *, only_shape: bool = False) -> torch.Tensor:
    if recording.tape is not None:
        recording.tape.see(value, only_shape=only_shape)
    return value


def _ask_for(tensor: Absent) -> None:
    """Something depends on the tensor's data: raise if they are neither known nor pretended."""
    if recording.pretends and recording.used is not None:
        recording.used |= tensor.roots
    elif recording.demands is not None and tensor.value is not None:
        recording.demands.append(Demand(recording.events, tensor.roots))
    if tensor.value is not None:
        return
    if not recording.pretends:
        raise SplitError(
            f"the model's forward asks for the value of a tensor that another stage has ({tensor!r}), outside of any "
            "layer, so it cannot be split; if the forward also takes what it makes of that as an input, give it that"
        )
    recording.guessed = True


def _note_write(target: Any, roots: frozenset[Root], known: bool) -> None:
    """Something is written in place: into an Absent, all of whose views are then written; or into a real tensor."""
    if isinstance(target, Absent):
        memory = target.memory
        recording.writes_in_place |= recording.dry_run and memory.given
        if memory.root is not None:
            (recording.written_by_units if recording.pretends else recording.written_by_glue).add(memory.root)
        if recording.pretends and not memory.received and memory.maker is not recording.used:
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
    if func is aten.split_with_sizes.default and recording.pretends:
        dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
        args = (args[0], _fitting(args[1], args[0].shape[dim]), *args[2:])
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


def on_known(func: Any, args: Any, kwargs: Any) -> Any:
    """Call it on the data of what is absent but known; the dry run's tape notes it."""
    args, kwargs = pytree.tree_map_only(Absent, lambda x: x.value, (args, kwargs))
    if recording.tape is None:
        return func(*args, **kwargs)
    return recording.tape.run(func, args, kwargs, writes=writes_in_place(func))


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return torch.tensor(one.equal(other))


def _hits(mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return mask.nonzero(as_tuple=True)


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


def _shaped_by_values(func: Any, args: Any, kwargs: Any, absent: list[Absent], device: Any, roots: Any) -> Any:
    """Run on values, which are read for it; on ones where they are pretended."""
    for x in absent:
        _ask_for(x)
    known = all(x.value is not None for x in absent)
    if known:
        found: Any = on_known(func, args, kwargs)
        for result in tensors_in(found):
            _seen(result, only_shape=True)
    elif func is aten.nonzero.default:  # one hit does as well as a great many
        found = torch.zeros((1, args[0].dim()), dtype=torch.long)
    else:

        def data(x: Absent) -> torch.Tensor:
            return torch.ones(x.shape, dtype=x.dtype) if x.value is None else x.value

        found = func(*pytree.tree_map_only(Absent, data, args), **pytree.tree_map_only(Absent, data, kwargs))

    def wrapped(result: torch.Tensor) -> Absent:
        return Absent(result.to("meta"), device, roots, result if known else None)

    return pytree.tree_map_only(torch.Tensor, wrapped, found)


def _fitting(sizes: list[int], whole: int) -> list[int]:
    """Sizes that add up to ``whole``, as those that were pretended in their place would have."""
    ends = [min(sum(sizes[: number + 1]), whole) for number in range(len(sizes))]
    ends[-1:] = [whole] if ends else []
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def _without_masks(indices: Any) -> list[Any]:
    """Indices whose masks are replaced by as many positions as they hit, since a result's shape follows from that."""
    positions: list[Any] = []
    for index in indices:
        if not isinstance(index, torch.Tensor) or index.dtype not in (torch.bool, torch.uint8):
            positions.append(index)
            continue
        data: torch.Tensor | None = index
        if isinstance(index, Absent):
            _ask_for(index)
            data = index.value
        if data is not None and not data.is_meta:
            found = on_known(_hits, (data,), {})
            roots = index.roots if isinstance(index, Absent) else frozenset()
            positions += [Absent(x.to("meta"), index.device, roots, _seen(x, only_shape=True)) for x in found]
        else:
            positions += [torch.zeros(1, dtype=torch.long, device="meta")] * index.dim()
    return positions
