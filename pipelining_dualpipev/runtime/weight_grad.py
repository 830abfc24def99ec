"""Putting the weight gradients of a microbatch off, from its input gradient (I) to later (W).

Walking the autograd graph, as torch does, costs more than it saves: the graph is searched for every microbatch and held
until W, and checkpointed layers run again in W. Here the graph of a microbatch that will be split is made another one
to begin with, in its forward::

    forward   with deferring(): module(...)       linear-like operations are made to leave their weights out
    I         with collecting(): backward         they note what the weight gradients are made of; the graph is gone
              work = take()
    W         work()                              the weight gradients, and nothing else

While either context lasts, and no longer, modules that own a matrix have a ``forward`` of their own: an ``nn.Linear``
calls the operation at once, any other module has its operations looked at, one by one (`runtime.deferred`). What is
not recognised there is done in I. Checkpointed layers, which run again in I, do as in their forward. Compiled modules
run other compiled code meanwhile (`runtime.compiled`). A microbatch with a full backward (B) runs the module as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from pipelining_dualpipev._torch import saving_hooks
from pipelining_dualpipev.runtime.compiled import CompiledParts, Swap
from pipelining_dualpipev.runtime.deferred import Note, accumulate, find_operand, linear, operation_of

__all__ = ["AtOperations", "FromBuilder", "WeightGradients"]


class WeightGradients(Protocol):
    """How one stage puts off its weight gradients."""

    def deferring(self) -> AbstractContextManager[None]:
        """Entered around the forward of a microbatch that is split."""

    def collecting(self) -> AbstractContextManager[None]:
        """Entered around the input gradient of such a microbatch."""

    def take(self) -> Callable[[], None]:
        """What the backward that just ran has left to do; called once after each I (and each B, then run at once)."""

    def forget(self) -> None:
        """A step begins, or has failed: drop what is left of the last one."""

    def explain(self) -> str:
        """In words, what is put off."""


class FromBuilder:
    """The user's own ``PipelineStage(dw_builder=...)``: called after a backward, it gives what is left to do."""

    def __init__(self, dw_builder: Callable[[], Callable[..., None]]) -> None:
        self._dw_builder = dw_builder

    def deferring(self) -> AbstractContextManager[None]:
        """See `WeightGradients.deferring`."""
        return nullcontext()

    def collecting(self) -> AbstractContextManager[None]:
        """See `WeightGradients.collecting`."""
        return nullcontext()

    def take(self) -> Callable[[], None]:
        """See `WeightGradients.take`."""
        return self._dw_builder()

    def forget(self) -> None:
        """See `WeightGradients.forget`."""

    def explain(self) -> str:
        """See `WeightGradients.explain`."""
        return "what is put off is up to its own dw_builder"


def _nothing() -> None:
    pass


class AtOperations:
    """Weight gradients put off at the linear-like operations of a module, whatever it is.

    Args:
        module: a stage's. It is the same before and after each context; parameters, state dict and types never change.
        sharded: whether `fully_shard` exchanges its parameters while it runs, so that they cannot be listed before.
    """

    def __init__(self, module: nn.Module, *, sharded: bool = False) -> None:
        self._module, self._sharded = module, sharded
        self._swaps: list[Swap] = []
        self._parameters: frozenset[nn.Parameter] = frozenset()
        self._notes: list[Note] | None = None
        self._deferred: set[nn.Parameter] = set()
        self._anchor = torch.empty(0, requires_grad=True)
        self._compiled = CompiledParts(module, self._note)

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """See `WeightGradients.deferring`."""
        swaps = self._swaps = self._swaps or self._find_swaps()
        before = [vars(module).get(name) for module, name, _ in swaps]
        try:
            # By way of the dict: nothing of nn.Module's own bookkeeping needs to know, and the cost is nil.
            for module, name, value in swaps:
                vars(module)[name] = value
            yield
        finally:
            for (module, name, _), own in zip(swaps, before, strict=True):
                if own is None:
                    vars(module).pop(name, None)
                else:
                    vars(module)[name] = own

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """See `WeightGradients.collecting`."""
        notes: list[Note] = []
        self._notes = notes
        try:
            with self.deferring():
                yield
        except BaseException:
            self._notes = None
            raise

    def take(self) -> Callable[[], None]:
        """See `WeightGradients.take`."""
        notes, self._notes = self._notes, None
        return partial(accumulate, notes) if notes else _nothing

    def forget(self) -> None:
        """See `WeightGradients.forget`. Modules may have been exchanged between steps, so they are looked up again."""
        self._notes, self._swaps = None, []

    def explain(self) -> str:
        """See `WeightGradients.explain`. Counted from what has run, not guessed from the modules."""
        deferred, of = self.counts()
        if not self._deferred:
            return "no weight gradient has been put off so far"
        words = (
            f"the weight gradients of {deferred:,} of {of:,} parameters ({deferred / max(of, 1):.1%}) are put off to W"
        )
        if self._sharded:
            return f"{words}, but for those of the last microbatch, whose I reduces all, as the stage is sharded"
        if placed := sum(p.numel() for p in self._trained() if isinstance(p, DTensor)):
            words += f"; {placed:,} are in DTensors, whose gradients may have to be communicated, which W never does"
        return words

    def counts(self) -> tuple[int, int]:
        """How many numbers the weight gradients have that were put off so far, and how many all of them have."""
        trained = self._trained()
        known = self._deferred if self._sharded else self._deferred.intersection(trained)
        return sum(p.numel() for p in known), sum(p.numel() for p in trained)

    def _trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._module.parameters() if parameter.requires_grad]

    # ---------------------------------------------------------------------------------------------------- the modules

    def _find_swaps(self) -> list[Swap]:
        self._parameters = frozenset(self._module.parameters())
        compiled, swaps = self._compiled.find_swaps(frozenset() if self._sharded else self._parameters)
        for module in self._module.modules():
            if module in compiled or not _owns_matrix(module) or isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
                continue
            is_linear = type(module).forward is nn.Linear.forward and "forward" not in vars(module)
            swaps.append(Swap(module, "forward", self._as_linear(module) if is_linear else self._as_watched(module)))
        return swaps

    def _as_linear(self, module: nn.Module) -> Callable[..., Any]:
        right = module.forward

        @wraps(right)
        def forward(input: torch.Tensor) -> torch.Tensor:
            output = self._defer(functional.linear, (input, module.weight, module.bias), {})
            return right(input) if output is None else output

        return forward

    def _as_watched(self, module: nn.Module) -> Callable[..., Any]:
        right = module.forward

        @wraps(right)  # models look at the signatures of their modules' forwards
        def forward(*args: Any, **kwargs: Any) -> Any:
            with _Watching(self._defer):
                return right(*args, **kwargs)

        return forward

    def _defer(self, function: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor | None:
        """The operation's result, if it is one whose weight gradient can be left for W; else None."""
        call = operation_of(function, args, kwargs)
        operand = None if call is None else find_operand(call.weight, None if self._sharded else self._parameters)
        if call is None or operand is None:
            return None
        return linear(call, operand, self._note, self._anchor)

    def _note(self, note: Note) -> None:
        if self._notes is None:
            raise RuntimeError(
                "a gradient was taken through a layer in the middle of its stage's forward, where weight gradients "
                "that are put off cannot be told from those that were not asked for: schedule with zb=0"
            )
        self._notes.append(note)
        self._deferred.add(note.operand.parameter)


def _owns_matrix(module: nn.Module) -> bool:
    return any(parameter.dim() >= 2 for parameter in module.parameters(recurse=False))


class _Watching(TorchFunctionMode):
    """Offers each operation to ``defer`` first.

    A checkpoint that begins inside the module runs its part again without coming through the module's forward, so
    not under this mode either. There both times nothing is deferred.
    """

    def __init__(self, defer: Callable[..., torch.Tensor | None]) -> None:
        super().__init__()
        self._defer, self._hooks = defer, saving_hooks()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # a compiled layer inside, see `runtime.compiled`
            return func(*args, **kwargs)
        output = self._defer(func, args, kwargs) if saving_hooks() == self._hooks else None
        return func(*args, **kwargs) if output is None else output
