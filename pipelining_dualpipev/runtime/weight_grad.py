"""Putting the weight gradients of a microbatch off, from its input gradient (I) to later (W).

What I leaves for W is a stage's own matter. The stage runner asks for it in two places::

    forward of a microbatch that will be split     with weight_gradients.deferring(): module(...)
    I                                              with weight_gradients.deferring(): backward; work = take()
    W                                              work()

Whether a microbatch is split is decided before its forward runs, since that is when its graph is made.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

__all__ = ["AllInInput", "FromBuilder", "WeightGradients"]


class WeightGradients(Protocol):
    """How one stage puts off its weight gradients."""

    def deferring(self) -> AbstractContextManager[None]:
        """Entered around the forward and the input gradient of a microbatch that is split."""

    def take(self) -> Callable[[], None]:
        """What the backward that just ran has left to do; called once after each I (and each B, then run at once)."""


class AllInInput:
    """I runs the whole backward and leaves nothing: right for every module, with nothing put off."""

    def deferring(self) -> AbstractContextManager[None]:
        """See `WeightGradients.deferring`."""
        return nullcontext()

    def take(self) -> Callable[[], None]:
        """See `WeightGradients.take`."""
        return _nothing


class FromBuilder(AllInInput):
    """The user's own ``PipelineStage(dw_builder=...)``: called after a backward, it gives what is left to do."""

    def __init__(self, dw_builder: Callable[[], Callable[..., None]]) -> None:
        self._dw_builder = dw_builder

    def take(self) -> Callable[[], None]:
        """See `WeightGradients.take`."""
        return self._dw_builder()


def _nothing() -> None:
    pass
