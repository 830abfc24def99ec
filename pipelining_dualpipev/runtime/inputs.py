"""Keyword inputs that a stage reads by name, wherever the stage is.

A step's inputs are given on the rank of the first stage. A stage further down may want some of them too: an attention
mask, say. Its module says so (``required_inputs``), and before the program runs, that rank sends each other rank the
ones that its stages name::

    rank 0 {input_ids, attention_mask}  --attention_mask-->  rank 1 (stages 1, 2 require it)
                                        --attention_mask-->  rank 2 ...

These transfers come first in the one global order of transfers, by rank, so they cannot get in the way of the
program's. As with activations, words travel ahead only in a step in which something may have changed. If the first
stage's module has something to say of the inputs (``prepare_inputs``), it is among them, so that all ranks can do what
follows from it at once, and not one after another when the first microbatch reaches them.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch

from pipelining_dualpipev.runtime.executor import Wires
from pipelining_dualpipev.runtime.microbatches import Microbatches
from pipelining_dualpipev.runtime.stage import TensorMeta
from pipelining_dualpipev.runtime.transport import Handle

__all__ = ["NamedInputs"]

_Shipment = list[dict[str, Any]]  # by microbatch: name to a tensor's metadata, or to the value itself
_Words = tuple[_Shipment, Any]  # and what the first stage's module has said


class NamedInputs:
    """Carries keyword inputs from the first stage's rank to those whose stages name them.

    Args:
        wanted: for each rank the names that its stages require.
        prepares: whether the first stage's module has something to say of the inputs.
        source: the rank of the first stage.
        device: where tensors travel from and to.
        wires: to the other ranks.
    """

    def __init__(
        self, wanted: Sequence[frozenset[str]], *, prepares: bool, source: int, device: torch.device, wires: Wires
    ) -> None:
        self._prepares = prepares
        self._wanted, self._source, self._device, self._wires = wanted, source, device, wires
        self._rank = wires.transport.rank
        self._expected: _Shipment | None = None

    def deliver(self, inputs: Microbatches, *, announce: bool) -> Generator[Handle, None, Microbatches]:
        """Send or receive; return this rank's inputs with what reached it added.

        Args:
            inputs: this rank's own.
            announce: something may have changed, so words travel ahead.
        """
        if self._rank == self._source:
            for peer, names in enumerate(self._wanted):
                if (names or self._prepares) and peer != self._source:
                    self._send(peer, names, inputs, announce)
            return inputs
        if not self._wanted[self._rank] and not self._prepares:
            return inputs
        told = None
        if announce:
            words = self._wires.control.receive(self._source)
            yield words
            self._expected, told = words.result
        assert self._expected is not None, "the first step announces"
        buffers: list[torch.Tensor] = []
        kwargs = [dict(mb) for mb in inputs.kwargs]
        for mb, shipment in zip(kwargs, self._expected, strict=True):
            for name, value in shipment.items():
                if isinstance(value, TensorMeta):
                    value = torch.empty(value.shape, dtype=value.dtype, device=self._device)
                    buffers.append(value)
                mb[name] = value
        if buffers:
            yield self._wires.transport.receive(self._source, buffers)
        return Microbatches(inputs.args, kwargs, inputs.targets, told)

    def _send(self, peer: int, names: frozenset[str], inputs: Microbatches, announce: bool) -> None:
        present = [{name: mb[name] for name in sorted(names) if name in mb} for mb in inputs.kwargs]
        if announce:
            shipment: _Shipment = [
                {
                    name: TensorMeta(tuple(value.shape), value.dtype, False)
                    if isinstance(value, torch.Tensor)
                    else value
                    for name, value in mb.items()
                }
                for mb in present
            ]
            words: _Words = shipment, inputs.told
            self._wires.control.send(peer, words)
        tensors = [
            value.detach().to(self._device).contiguous()
            for mb in present
            for value in mb.values()
            if isinstance(value, torch.Tensor)
        ]
        if tensors:
            self._wires.transport.send(peer, tensors)
