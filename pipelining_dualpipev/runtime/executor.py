"""Running one rank's program.

A program is a list of actions, computing and communicating ones (`planning.lowering`). The executor goes through it
once a step, as a generator: wherever it needs something that may not be there yet it yields the handle of it, and goes
on when the driver has waited. Under torch.distributed the driver is `transport.drive`; a test can drive all ranks of a
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

**When an action raises**, the others must not be left waiting for what this rank will never send. So it *drains*: it
computes nothing more, but runs the rest of its transfers, with zeros for what is missing. Where shapes travel ahead,
the word of the failure travels instead, and the receiver drains too. At the end of each step the ranks compare notes,
and if one failed all raise, with its words. Every transfer was done, so the next step starts clean. A rank whose
process has ended is *gone*: its transfers are left out, and that the ranks cannot compare notes any more is told by
`runtime.watch`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from pipelining_dualpipev._torch import pytree
from pipelining_dualpipev.errors import PipelineError
from pipelining_dualpipev.planning.actions import Action, Kind
from pipelining_dualpipev.planning.placement import Placement
from pipelining_dualpipev.runtime.control import Control
from pipelining_dualpipev.runtime.gradients import Seed
from pipelining_dualpipev.runtime.loss import Loss
from pipelining_dualpipev.runtime.microbatches import Microbatches
from pipelining_dualpipev.runtime.observe import Observer, default_observer
from pipelining_dualpipev.runtime.stage import StageRunner, TensorMeta, changed_metas, metas_of
from pipelining_dualpipev.runtime.tied import TiedGradients
from pipelining_dualpipev.runtime.transport import ContactLostError, Handle, Transport

__all__ = ["Executor", "StepResult", "Wires"]

Steps = Generator[Handle, None, None]
_Key = tuple[int, int]  # stage, microbatch


@dataclass(frozen=True)
class Wires:
    """What an executor is wired to; the two go over different groups, so words never hold up tensors."""

    transport: Transport
    control: Control


@dataclass(frozen=True)
class Failure:
    """An action that raised, as it is told to the other ranks."""

    rank: int
    action: str
    stage: int
    microbatch: int
    error: str

    def __str__(self) -> str:
        return f"rank {self.rank}, stage {self.stage}, microbatch {self.microbatch}, action {self.action}: {self.error}"


@dataclass
class StepResult:
    """What the last stage's rank has of a step, by microbatch; empty elsewhere."""

    losses: list[torch.Tensor] = field(default_factory=list)
    metrics: list[Any] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)


def _detached(tree: Any) -> Any:
    """The same with all its tensors detached."""
    if isinstance(tree, torch.Tensor):
        return tree.detach()
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, tree)


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
        tied: parameters of these stages that other ranks hold too.

    Attributes:
        observer: who looks on while actions run; None for whoever `observe` finds.
    """

    def __init__(
        self,
        program: Sequence[Action],
        *,
        placement: Placement,
        runners: dict[int, StageRunner],
        wires: Wires,
        tied: TiedGradients,
    ) -> None:
        self._placement, self._runners, self._wires, self._tied = placement, runners, wires, tied
        self._rank = wires.transport.rank
        self.observer: Observer | None = None
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
        self._steps = [(actions[single.kind], single) for single in singles]
        self._split = {(s.stage, s.microbatch) for s in singles if s.kind is Kind.BACKWARD_INPUT}
        backwards = [s for s in singles if s.kind in (Kind.FULL_BACKWARD, Kind.BACKWARD_INPUT)]
        self._last_backward = {single.stage: single.microbatch for single in backwards}
        self._trains = bool(backwards)
        self._last_of_all = backwards[-1] if backwards else None
        # What crosses into a stage, as noted in the last step in which something changed.
        self._crossing: dict[_Key, tuple[TensorMeta, ...]] = {}
        self._clear()

    def _clear(self) -> None:
        self._activations: dict[_Key, _Arriving] = {}
        self._to_send: dict[_Key, Sequence[torch.Tensor]] = {}
        self._gradients: dict[_Key, _Arriving] = {}
        self._gradients_to_send: dict[_Key, Sequence[torch.Tensor | None]] = {}
        self._result = StepResult()
        self._failure: Failure | None = None
        self._cause: Exception | None = None
        self._gone: set[int] = set()
        for runner in self._runners.values():
            runner.forget()

    def run(
        self,
        inputs: Microbatches,
        loss: Loss | None,
        seed: Seed,
        *,
        announce: bool,
        keep_outputs: bool,
        finalize: bool,
        when_complete: Callable[[], None],
        lost: ContactLostError | None = None,
    ) -> Generator[Handle, None, StepResult]:
        """One step.

        Args:
            inputs: this rank's microbatches; positional ones are read by the first stage, targets by the last.
            loss: None where only outputs are wanted.
            seed: of a backward; known on every rank.
            announce: something may have changed, so shapes travel ahead of tensors; the same on every rank.
            keep_outputs: whether the result has the last stage's outputs (detached).
            finalize: whether this step's gradients are whole at its end: each stage's last backward reduces them, if
                the stage is sharded, and those of tied parameters are summed over their ranks.
            when_complete: called at the end of a training step; what it raises is told as of the last backward.
            lost: why the step has failed already, if so.

        Raises:
            PipelineError: on every rank, if an action of any rank raised; its exception is the cause where it did.
        """
        self._clear()
        self._inputs, self._loss, self._seed, self._when_complete = inputs, loss, seed, when_complete
        self._observed = self.observer or default_observer()
        for runner in self._runners.values():
            runner.seed = seed
        self._announce, self._keep_outputs, self._finalize = announce, keep_outputs, finalize
        if lost is not None:
            self._gone.add(lost.peer)
            self._failure = Failure(self._rank, "delivery of inputs", 0, 0, str(lost))
        for do, action in self._steps:
            if self._failure is not None and not action.kind.is_communication:
                continue
            try:
                steps = do(action.stage, action.microbatch)
                if steps is not None:
                    yield from steps
            except Exception as error:
                self._fail(str(action), error, action.stage, action.microbatch)
        if last := self._last_of_all:
            try:
                if finalize:
                    yield from self._tied.end_step(failed=self._failure is not None)
                if self._failure is None:
                    self._when_complete()
            except Exception as error:
                self._fail(str(last), error, last.stage, last.microbatch)
        yield from self._end_together()
        result, self._result = self._result, StepResult()
        return result

    def _fail(self, action: str, error: Exception, stage: int = 0, microbatch: int = 0) -> None:
        if isinstance(error, ContactLostError):
            self._gone.add(error.peer)
        if self._failure is None:  # what follows from a failure is none
            self._failure = Failure(self._rank, action, stage, microbatch, f"{type(error).__name__}: {error}")
            self._cause = error

    def _end_together(self) -> Steps:
        # Only after a failure is anything left to arrive.
        arriving = [arriving.handle for arriving in (*self._activations.values(), *self._gradients.values())]
        for handle in (*arriving, self._wires.transport.finish(), self._wires.control.finish()):
            while handle is not None:
                try:
                    yield handle
                    break
                except ContactLostError as error:  # each time one connection less to wait for
                    self._gone.add(error.peer)
        failed = self._wires.control.all_max([int(self._failure is not None)])
        yield failed
        if failed.result == [0]:
            return
        notes = self._wires.control.gather(self._failure if self._cause else None)
        yield notes
        cause = self._cause
        self._clear()
        raise PipelineError("; ".join(str(note) for note in notes.result if note)) from cause

    # ---------------------------------------------------------------------------------------------------- computing

    def _forward(self, stage: int, microbatch: int) -> Steps:
        runner, key = self._runners[stage], (stage, microbatch)
        received: Sequence[Any] = ()
        if stage > 0:
            arriving = self._activations.pop(key)
            if arriving.handle is not None:
                yield arriving.handle
            received = arriving.tensors
        with self._observed(Kind.FORWARD, stage, microbatch):
            output = runner.forward(
                received if stage > 0 else self._inputs.args[microbatch],
                runner.select_inputs(self._inputs.kwargs[microbatch]),
                grad=self._trains,
                split=key in self._split,
                last=self._completes(stage, microbatch),
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
            self._result.outputs.append(_detached(output))
        if self._loss is None:
            return ()
        target = self._inputs.targets[microbatch] if self._inputs.targets is not None else None
        with nullcontext() if self._trains else torch.no_grad():
            value, metrics = self._loss.of(output, target)
        self._result.metrics += map(_detached, metrics)
        self._result.losses.append(value.detach().clone())  # a view would keep all of what it is a view of
        if value.requires_grad:
            last_stage = self._placement.num_stages - 1
            self._gradients[last_stage, microbatch] = _Arriving(None, [self._seed(value.detach())])
        return (value,)

    def _hand_on(self, stage: int, microbatch: int, outputs: Sequence[torch.Tensor]) -> None:
        handed = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in outputs]
        if self._placement.crosses(stage):
            self._to_send[stage, microbatch] = handed
        else:
            self._activations[stage + 1, microbatch] = _Arriving(None, handed)

    def _completes(self, stage: int, microbatch: int) -> bool:
        return self._finalize and self._last_backward.get(stage) == microbatch

    def _full_backward(self, stage: int, microbatch: int) -> Steps:
        return self._backward(stage, microbatch, split=False)

    def _backward_input(self, stage: int, microbatch: int) -> Steps:
        return self._backward(stage, microbatch, split=True)

    def _backward(self, stage: int, microbatch: int, *, split: bool) -> Steps:
        arriving = self._gradients.pop((stage, microbatch), _Arriving(None, ()))
        if arriving.handle is not None:
            yield arriving.handle
        last = self._completes(stage, microbatch)
        with self._observed(Kind.BACKWARD_INPUT if split else Kind.FULL_BACKWARD, stage, microbatch):
            gradients = self._runners[stage].backward(microbatch, arriving.tensors, split=split, last=last)
        if self._placement.crosses(stage - 1):
            self._gradients_to_send[stage, microbatch] = gradients
        elif stage > 0:
            self._gradients[stage - 1, microbatch] = _Arriving(None, gradients)

    def _backward_weight(self, stage: int, microbatch: int) -> None:
        with self._observed(Kind.BACKWARD_WEIGHT, stage, microbatch):
            self._runners[stage].backward_weight(microbatch)

    # ------------------------------------------------------------------------------------------------ communicating

    def _send_forward(self, stage: int, microbatch: int) -> None:
        peer, key = self._placement.rank_of[stage + 1], (stage + 1, microbatch)
        tensors = self._to_send.pop((stage, microbatch), None)
        if peer in self._gone:
            return
        if self._announce:
            self._crossing[key] = () if tensors is None else metas_of(tensors)
            self._wires.control.send(peer, self._failure if tensors is None else self._crossing[key])
        elif tensors is not None and metas_of(tensors) != self._crossing[key]:
            error = changed_metas(metas_of(tensors), self._crossing[key])
            self._fail(str(Action(stage, Kind.SEND_F, microbatch)), error, stage, microbatch)
            tensors = None
        with self._observed(Kind.SEND_F, stage, microbatch):
            self._send(peer, stage, tensors, self._crossing[key])

    def _receive_forward(self, stage: int, microbatch: int) -> Steps:
        peer, key = self._placement.rank_of[stage - 1], (stage, microbatch)
        if peer in self._gone:
            self._crossing[key] = ()
            return
        if self._announce:
            words = self._wires.control.receive(peer)
            yield words
            if isinstance(words.result, Failure):
                self._failure = self._failure or words.result
                self._crossing[key] = ()
            else:
                self._crossing[key] = words.result
        with self._observed(Kind.RECV_F, stage, microbatch):
            self._activations[key] = self._receive(peer, stage, self._crossing[key], requires_grad=True)

    def _send_backward(self, stage: int, microbatch: int) -> None:
        peer, gradients = self._placement.rank_of[stage - 1], self._gradients_to_send.pop((stage, microbatch), None)
        if peer not in self._gone:
            with self._observed(Kind.SEND_B, stage, microbatch):
                self._send(peer, stage, gradients, self._needing_grad(stage, microbatch))

    def _receive_backward(self, stage: int, microbatch: int) -> None:
        peer = self._placement.rank_of[stage + 1]
        if peer not in self._gone:
            metas = self._needing_grad(stage + 1, microbatch)
            with self._observed(Kind.RECV_B, stage, microbatch):
                self._gradients[stage, microbatch] = self._receive(peer, stage, metas, requires_grad=False)

    def _needing_grad(self, stage: int, microbatch: int) -> list[TensorMeta]:
        """Those tensors that cross into ``stage`` for which a gradient goes back."""
        return [meta for meta in self._crossing[stage, microbatch] if meta.requires_grad]

    def _send(
        self, peer: int, stage: int, tensors: Sequence[torch.Tensor | None] | None, metas: Sequence[TensorMeta]
    ) -> None:
        """Send what the peer waits for: zeros for a gradient that the stage made no use of, or after a failure."""
        device = self._runners[stage].device
        full = [
            torch.zeros(meta.shape, dtype=meta.dtype, device=device) if tensor is None else tensor.contiguous()
            for tensor, meta in zip(tensors or [None] * len(metas), metas, strict=True)
        ]
        if full:
            self._wires.transport.send(peer, full)

    def _receive(self, peer: int, stage: int, metas: Sequence[TensorMeta], *, requires_grad: bool) -> _Arriving:
        device = self._runners[stage].device
        buffers = [
            torch.empty(meta.shape, dtype=meta.dtype, device=device, requires_grad=requires_grad and meta.requires_grad)
            for meta in metas
        ]
        # The wire writes into what shares the storage but is no part of autograd.
        handle = self._wires.transport.receive(peer, [buffer.detach() for buffer in buffers]) if buffers else None
        return _Arriving(handle, buffers)
