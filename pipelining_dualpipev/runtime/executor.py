"""Running one rank's program.

A program is a list of actions, computing and communicating ones (`planning.lowering`). The executor goes through it
once a step, as a generator: wherever it needs something that may not be there yet it yields the handle of it, and goes
on when the driver has waited. Under torch.distributed the driver is `drive`, below; a test can drive all ranks of a
pipeline in one process and choose who goes next::

    executor                                        driver
    1RECV_F0   post the receive
    1F0        yield its handle  -----------------> wait
               <----------------------------------- resume
               run the module, keep the edges
    1SEND_F0   post the send, go on

Between actions a tensor is in one of four tables, each keyed by (stage, microbatch): activations that came in,
outputs that wait to be sent, gradients that came in, input gradients that wait to be sent. Between two stages of one
rank (the fold) the hand-over is from table to table. Every entry is taken out by the action that uses it, so a step
holds what is in flight and no more, whatever the number of microbatches.

A receiver must know what is coming. In a step in which something may have changed each activation's shapes travel
ahead of it, and both sides note them; in the steps after that nothing but tensors travels, and the sender checks
each against what was noted. A gradient has the shape of its activation, so it needs no words.

Nothing is yielded inside ``no_grad`` or autocast: they are the thread's, and the driver may run another rank meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils import _pytree as pytree

from pipelining_dualpipev.errors import PipelineError
from pipelining_dualpipev.planning.actions import Action, Kind
from pipelining_dualpipev.planning.placement import Placement
from pipelining_dualpipev.runtime.control import Control
from pipelining_dualpipev.runtime.microbatches import Microbatches
from pipelining_dualpipev.runtime.stage import StageRunner, TensorMeta, metas_of
from pipelining_dualpipev.runtime.transport import Handle, Transport

__all__ = ["Executor", "Loss", "StepResult", "Wires", "drive"]

T = TypeVar("T")
Steps = Generator[Handle, None, None]
_Key = tuple[int, int]  # stage, microbatch


def drive(steps: Generator[Handle, None, T]) -> T:
    """Run a generator to its end, waiting for each handle that it yields; return what it returns."""
    try:
        while True:
            next(steps).wait()
    except StopIteration as end:
        return end.value


@dataclass(frozen=True)
class Wires:
    """What an executor is wired to; the two go over different groups, so words never hold up tensors."""

    transport: Transport
    control: Control


@dataclass(frozen=True)
class Loss:
    """How the last stage's output becomes a loss, and the gradient its backward begins with."""

    function: Callable[..., Any]
    kwargs: dict[str, Any]
    scale: float


@dataclass
class StepResult:
    """What the last stage's rank has of a step, by microbatch; empty elsewhere."""

    losses: list[torch.Tensor] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)


class _Arriving(NamedTuple):
    """Tensors, and what to wait for before they are read (None where they are here)."""

    handle: Handle | None
    tensors: Sequence[Any]


class Executor:
    """One rank's stages with their program for one mode (training, or forward only).

    Args:
        program: this rank's actions, sends and receives among them.
        placement: which rank holds which stage.
        runners: this rank's stages by index.
        wires: to the other ranks.
    """

    def __init__(
        self, program: Sequence[Action], *, placement: Placement, runners: dict[int, StageRunner], wires: Wires
    ) -> None:
        self._placement, self._runners, self._wires = placement, runners, wires
        self._rank = wires.transport.rank
        actions: dict[Kind, Callable[[int, int], Steps | None]] = {
            Kind.FORWARD: self._forward,
            Kind.FULL_BACKWARD: self._full_backward,
            Kind.BACKWARD_INPUT: self._backward_input,
            Kind.BACKWARD_WEIGHT: self._backward_weight,
            Kind.SEND_F: self._send_forward,
            Kind.RECV_F: self._receive_forward,
            Kind.SEND_B: self._send_backward,
            Kind.RECV_B: self._receive_backward,
        }
        singles = [single for action in program for single in action.singles]
        self._steps = [(actions[single.kind], single.stage, single.microbatch) for single in singles]
        self._split = {(s.stage, s.microbatch) for s in singles if s.kind is Kind.BACKWARD_INPUT}
        self._trains = any(single.kind in (Kind.FULL_BACKWARD, Kind.BACKWARD_INPUT) for single in singles)
        # What crosses into a stage, as noted in the last step in which something changed.
        self._crossing: dict[_Key, tuple[TensorMeta, ...]] = {}
        self._clear()

    def _clear(self) -> None:
        self._activations: dict[_Key, _Arriving] = {}
        self._to_send: dict[_Key, Sequence[torch.Tensor]] = {}
        self._gradients: dict[_Key, _Arriving] = {}
        self._gradients_to_send: dict[_Key, Sequence[torch.Tensor | None]] = {}
        self._result = StepResult()
        for runner in self._runners.values():
            runner.forget()

    def run(
        self, inputs: Microbatches, loss: Loss | None, *, announce: bool, keep_outputs: bool
    ) -> Generator[Handle, None, StepResult]:
        """One step.

        Args:
            inputs: this rank's microbatches; positional ones are read by the first stage, targets by the last.
            loss: None where only outputs are wanted.
            announce: something may have changed, so shapes travel ahead of tensors; the same on every rank.
            keep_outputs: whether the result has the last stage's outputs (detached).
        """
        self._clear()
        self._inputs, self._loss = inputs, loss
        self._announce, self._keep_outputs = announce, keep_outputs
        for do, stage, microbatch in self._steps:
            steps = do(stage, microbatch)
            if steps is not None:
                yield from steps
        yield self._wires.transport.finish()
        yield self._wires.control.finish()
        result, self._result = self._result, StepResult()
        return result

    # ---------------------------------------------------------------------------------------------------- computing

    def _forward(self, stage: int, microbatch: int) -> Steps:
        runner, key = self._runners[stage], (stage, microbatch)
        received: Sequence[Any] = ()
        if stage > 0:
            arriving = self._activations.pop(key)
            if arriving.handle is not None:
                yield arriving.handle
            received = arriving.tensors
        output = runner.forward(
            received if stage > 0 else self._inputs.args[microbatch],
            runner.select_inputs(self._inputs.kwargs[microbatch]),
            grad=self._trains,
            split=key in self._split,
        )
        if runner.is_last:
            ends = self._finish_output(output, microbatch)
        else:
            ends = runner.output_tensors(output)
            self._hand_on(stage, microbatch, ends)
        if self._trains:
            runner.keep(microbatch, received, ends)

    def _finish_output(self, output: Any, microbatch: int) -> tuple[torch.Tensor, ...]:
        """Loss and output of the last stage; returns where the backward begins."""
        if self._keep_outputs:
            self._result.outputs.append(pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, output))
        if self._loss is None:
            return ()
        target = self._inputs.targets[microbatch] if self._inputs.targets is not None else None
        with torch.set_grad_enabled(self._trains):
            value = self._loss.function(output, target, **self._loss.kwargs)
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            shape = f" of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else ""
            raise ValueError(
                f"loss_fn returned a {type(value).__name__}{shape} for microbatch {microbatch}: return one number, a "
                "tensor with 1 element"
            )
        self._result.losses.append(value.detach())
        if value.requires_grad:
            seed = torch.full_like(value, self._loss.scale)
            self._gradients[self._placement.num_stages - 1, microbatch] = _Arriving(None, [seed])
        return (value,)

    def _hand_on(self, stage: int, microbatch: int, outputs: Sequence[torch.Tensor]) -> None:
        handed = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in outputs]
        if self._placement.crosses(stage):
            self._to_send[stage, microbatch] = handed
        else:
            self._activations[stage + 1, microbatch] = _Arriving(None, handed)

    def _full_backward(self, stage: int, microbatch: int) -> Steps:
        return self._backward(stage, microbatch, split=False)

    def _backward_input(self, stage: int, microbatch: int) -> Steps:
        return self._backward(stage, microbatch, split=True)

    def _backward(self, stage: int, microbatch: int, *, split: bool) -> Steps:
        arriving = self._gradients.pop((stage, microbatch), _Arriving(None, ()))
        if arriving.handle is not None:
            yield arriving.handle
        gradients = self._runners[stage].backward(microbatch, arriving.tensors, split=split)
        if self._placement.crosses(stage - 1):
            self._gradients_to_send[stage, microbatch] = gradients
        elif stage > 0:
            self._gradients[stage - 1, microbatch] = _Arriving(None, gradients)

    def _backward_weight(self, stage: int, microbatch: int) -> None:
        self._runners[stage].backward_weight(microbatch)

    # ------------------------------------------------------------------------------------------------ communicating

    def _send_forward(self, stage: int, microbatch: int) -> None:
        peer, key = self._placement.rank_of[stage + 1], (stage + 1, microbatch)
        tensors = self._to_send.pop((stage, microbatch))
        metas = metas_of(tensors)
        if self._announce:
            self._wires.control.send(peer, metas)
            self._crossing[key] = metas
        elif metas != self._crossing[key]:
            raise PipelineError(
                f"stage {stage} gave {_listed(metas)} for microbatch {microbatch}, where it gave "
                f"{_listed(self._crossing[key])} in an earlier step with inputs of the same shapes: a stage's output "
                "shapes may depend on its inputs' shapes, not on their values"
            )
        if tensors:
            self._wires.transport.send(peer, [tensor.contiguous() for tensor in tensors])

    def _receive_forward(self, stage: int, microbatch: int) -> Steps:
        peer, key = self._placement.rank_of[stage - 1], (stage, microbatch)
        if self._announce:
            words = self._wires.control.receive(peer)
            yield words
            self._crossing[key] = words.result
        self._activations[key] = self._receive(peer, stage, self._crossing[key], requires_grad=True)

    def _send_backward(self, stage: int, microbatch: int) -> None:
        gradients = self._gradients_to_send.pop((stage, microbatch))
        metas = self._needing_grad(stage, microbatch)
        device = self._runners[stage].device
        # The stage before is waiting for each; where the stage made no use of a tensor its gradient is zero.
        tensors = [
            torch.zeros(meta.shape, dtype=meta.dtype, device=device) if gradient is None else gradient.contiguous()
            for gradient, meta in zip(gradients, metas, strict=True)
        ]
        if tensors:
            self._wires.transport.send(self._placement.rank_of[stage - 1], tensors)

    def _receive_backward(self, stage: int, microbatch: int) -> None:
        metas = self._needing_grad(stage + 1, microbatch)
        peer = self._placement.rank_of[stage + 1]
        self._gradients[stage, microbatch] = self._receive(peer, stage, metas, requires_grad=False)

    def _needing_grad(self, stage: int, microbatch: int) -> list[TensorMeta]:
        """Those tensors that cross into ``stage`` for which a gradient goes back."""
        return [meta for meta in self._crossing[stage, microbatch] if meta.requires_grad]

    def _receive(self, peer: int, stage: int, metas: Sequence[TensorMeta], *, requires_grad: bool) -> _Arriving:
        device = self._runners[stage].device
        buffers = [
            torch.empty(meta.shape, dtype=meta.dtype, device=device, requires_grad=requires_grad and meta.requires_grad)
            for meta in metas
        ]
        # The wire writes into what shares the storage but is no part of autograd.
        handle = self._wires.transport.receive(peer, [buffer.detach() for buffer in buffers]) if buffers else None
        return _Arriving(handle, buffers)


def _listed(metas: Sequence[TensorMeta]) -> str:
    return f"({'; '.join(map(str, metas))})"
