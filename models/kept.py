"""What the model's own forward, outside of its layers, keeps from one call to the next in its buffers.

Every stage runs that forward on a copy of the model, and all but the last leave it early. So what is written before the
first layer is written on every stage; what is written later, only on some::

    self.step += 1                       # on every stage: allowed
    for layer in self.layers: x = layer(x - self.mean)
    self.mean.lerp_(x.mean(0), 0.1)      # on the last stage; the others would go on with the old mean: refused

The last stage sees all of the forward, in the mode that it is in. Buffers that are not persistent may be made anew
(rotary embeddings do so for a longer sequence): they follow from the inputs, and whoever reads them has made them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn

from pipelining_dualpipev._torch import version_of
from pipelining_dualpipev.errors import SplitError
from pipelining_dualpipev.models.units import Units

__all__ = ["Kept", "holders_of_buffers", "kept_in", "refuse_written"]


class Kept(NamedTuple):
    """A buffer as it was."""

    name: str
    module: nn.Module
    buffer: torch.Tensor
    version: int


def holders_of_buffers(model: nn.Module, units: Units) -> list[tuple[str, nn.Module]]:
    """The modules outside of the units that have buffers of their own, by name."""
    own = ((name, module) for name, module in model.named_modules() if units.is_glue(name))
    return [(name, module) for name, module in own if next(module.buffers(recurse=False), None) is not None]


def kept_in(holders: Iterable[tuple[str, nn.Module]]) -> list[Kept]:
    """Their buffers, by which to see later what was written."""
    return [
        Kept(f"{of}.{name}" if of else name, module, buffer, version_of(buffer))
        for of, module in holders
        for name, buffer in module.named_buffers(recurse=False)
    ]


def refuse_written(before: Iterable[Kept]) -> None:
    """Raise if one of the buffers has been written in place since, or is a persistent one and another tensor now.

    Raises:
        SplitError: naming it.
    """
    for name, module, buffer, version in before:
        own = name.rpartition(".")[2]
        is_another = getattr(module, own) is not buffer and own in module.state_dict()
        if is_another or version_of(buffer) != version:
            raise SplitError(
                f"the model's own forward writes into its buffer {name} behind its first layer, where only the last "
                "stage would see it: write it within a layer, or after the step"
            )
