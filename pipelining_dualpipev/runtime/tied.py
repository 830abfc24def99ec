"""Parameters that several ranks hold: their gradients are summed over these ranks at the end of a step.

A module that a model calls on several stages is held by each of them, and each computes a part of its gradient. So that
all replicas stay one parameter, every rank has to take the same optimiser step, with the whole gradient. It goes along
the ranks that hold it and back::

    rank 0 ──g0──> rank 1 ──g0+g1──> rank 3          whoever holds the parameter, by rank
           <──sum──       <───sum─── g0+g1+g3 = sum

which takes two messages a rank, adds in one order, and gives all of them the same bits. Before that the same way is
gone by a few words: which of the parameters have a gradient, and whether the step has failed, so that nobody waits for
what will not be sent.

Gradients add up over several steps. What has been summed already must not be summed again, so when the next step begins
the first of the ranks keeps it, and the others start from nothing. Whether a stage's gradients are summed is noted of
the stage and not of its schedule: the next step may be another schedule's, for a batch of fewer microbatches, say.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from pipelining_dualpipev._torch import has_gradient_hooks
from pipelining_dualpipev.planning.placement import Placement
from pipelining_dualpipev.runtime.control import Control
from pipelining_dualpipev.runtime.data_parallel import stage_module
from pipelining_dualpipev.runtime.transport import ContactLostError, Handle, Transport

__all__ = ["TiedGradients"]

Steps = Generator[Handle, None, None]

_with_summed_gradients: WeakSet[nn.Module] = WeakSet()
"""Stages whose parameters' gradients are sums over all ranks that hold them."""


class _Words(NamedTuple):
    """What is told before gradients are sent; each as of any of the ranks so far."""

    failed: bool
    have: tuple[bool, ...]
    frozen: tuple[bool, ...]

    def and_of(self, other: _Words) -> _Words:
        return _Words(
            self.failed or other.failed,
            tuple(a or b for a, b in zip(self.have, other.have, strict=True)),
            tuple(a or b for a, b in zip(self.frozen, other.frozen, strict=True)),
        )


class TiedGradients:
    """This rank's parameters that other ranks hold too.

    Args:
        modules: this rank's stages. One that has such parameters has two attributes: ``tied_parameters``, the
            parameters by name, and ``tied_stages``, by the same names the stages that hold them.
        placement: which rank holds which stage.
        transport: to the other ranks.
        control: likewise, for words.
    """

    def __init__(
        self, modules: Iterable[nn.Module], placement: Placement, transport: Transport, control: Control
    ) -> None:
        self._transport, self._control, self._rank = transport, control, transport.rank
        self._modules = [stage_module(module) for module in modules]
        by_ranks: dict[tuple[int, ...], dict[str, nn.Parameter]] = {}
        for module in self._modules:
            stages: Mapping[str, Sequence[int]] = getattr(module, "tied_stages", None) or {}
            for name, parameter in (getattr(module, "tied_parameters", None) or {}).items():
                ranks = tuple(sorted({placement.rank_of[stage] for stage in stages.get(name, ())}))
                if len(ranks) > 1:
                    by_ranks.setdefault(ranks, {})[name] = parameter
        # In one order on all ranks, so that each pair of them sends and receives in one order.
        self._sets = [(ranks, dict(sorted(by_ranks[ranks].items()))) for ranks in sorted(by_ranks)]

    def counted_elsewhere(self) -> set[nn.Parameter]:
        """Those that an earlier rank holds too."""
        return {p for ranks, parameters in self._sets if ranks[0] != self._rank for p in parameters.values()}

    def cannot_wait(self) -> ValueError | None:
        """Why a step cannot leave these gradients to be summed by a later one, if so."""
        for ranks, parameters in self._sets:
            for name, parameter in parameters.items():
                if has_gradient_hooks(parameter):
                    return ValueError(
                        f"finalize_gradients=False: {name} has gradient hooks, which are to see the whole gradient of "
                        f"this step, and ranks {', '.join(map(str, ranks))} hold it: leave finalize_gradients at True"
                    )
        return None

    def begin_step(self) -> None:
        """To be called before a training step, and before hooks are held back."""
        if _with_summed_gradients.issuperset(self._modules):
            for parameter in self.counted_elsewhere():
                parameter.grad = None
        self._are_summed(False)

    def end_step(self, *, failed: bool) -> Steps:
        """Sum; to be called by every rank after its last backward, also where something has failed.

        Raises:
            ContactLostError: if a rank is gone; this one has gone through all its messages nevertheless.
            ValueError: if a parameter is trained on one rank and frozen on another.
        """
        errors: list[Exception] = []
        self._are_summed(True)
        for ranks, parameters in self._sets:
            try:
                words = yield from self._agree(ranks, parameters, failed or bool(errors), errors)
                if words.failed:
                    self._are_summed(False)
                    continue
                used = [p for (_, p), have in zip(parameters.items(), words.have, strict=True) if have]
                yield from self._sum(ranks, used, errors)
            except ValueError as error:
                errors.append(error)
        if errors:
            self._are_summed(False)
            raise errors[0]

    def _are_summed(self, yes: bool) -> None:
        for module in self._modules:
            (_with_summed_gradients.add if yes else _with_summed_gradients.discard)(module)

    def _agree(
        self, ranks: tuple[int, ...], parameters: dict[str, nn.Parameter], failed: bool, errors: list[Exception]
    ) -> Generator[Handle, None, _Words]:
        words = _Words(
            failed,
            tuple(parameter.grad is not None for parameter in parameters.values()),
            tuple(not parameter.requires_grad for parameter in parameters.values()),
        )
        for peer, _, sends in _way(ranks, self._rank):
            try:
                if sends:
                    self._control.send(peer, tuple(words))
                else:
                    reply = self._control.receive(peer)
                    yield reply
                    words = words.and_of(_Words(*reply.result))
            except ContactLostError as error:
                errors.append(error)
                words = words._replace(failed=True)
        for name, have, frozen in zip(parameters, words.have, words.frozen, strict=True):
            if have and frozen and not words.failed:
                raise ValueError(
                    f"{name}, which ranks {', '.join(map(str, ranks))} hold, is frozen on one of them and trained on "
                    "another: set its requires_grad alike on all of them"
                )
        return words

    def _sum(self, ranks: tuple[int, ...], parameters: list[nn.Parameter], errors: list[Exception]) -> Steps:
        gone: set[int] = set()
        for gradients in _of_one_type(parameters):
            total = torch.cat([gradient.reshape(-1) for gradient in gradients])
            for peer, is_back, sends in _way(ranks, self._rank):
                if peer in gone:
                    continue  # whoever waits beyond it gets what there is, and will be told that it is nothing
                try:
                    if sends:
                        self._transport.send(peer, [total])
                    else:
                        arrived = torch.empty_like(total)
                        yield self._transport.receive(peer, [arrived])
                        total = arrived if is_back else arrived.add_(total)
                except ContactLostError as error:
                    errors.append(error)
                    gone.add(peer)
            if not gone:
                sums = total.split([gradient.numel() for gradient in gradients])
                for gradient, part in zip(gradients, sums, strict=True):
                    gradient.copy_(part.view_as(gradient))


def _way(ranks: tuple[int, ...], rank: int) -> list[tuple[int, bool, bool]]:
    """The messages of one rank along the others and back: with which rank, whether on the way back, whether sent."""
    at = ranks.index(rank)
    before, after = ranks[:at][-1:], ranks[at + 1 :][:1]
    there = [*((peer, False, False) for peer in before), *((peer, False, True) for peer in after)]
    return [*there, *((peer, True, not sends) for peer, _, sends in reversed(there))]


def _of_one_type(parameters: Iterable[nn.Parameter]) -> list[list[Any]]:
    """The gradients, made where there are none, by type; of a sharded one this rank's part."""
    by_type: dict[torch.dtype, list[Any]] = {}
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        by_type.setdefault(local.dtype, []).append(local)
    return [by_type[dtype] for dtype in sorted(by_type, key=str)]
