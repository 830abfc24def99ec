"""One rank's part in a pipeline, step by step.

::

    agree       all ranks have come, for the same kind of step, and none has an error to tell
    deliver     keyword inputs go to the stages that read them by name
    execute     the program of this kind of step, then hooks on gradients; at its end the ranks compare notes
    average     gradients over the replicas of a stage in other pipelines, where there are any

All of it is one generator a step, over whatever wires it is given: a schedule drives it over torch.distributed, a test
drives the generators of all ranks in one process.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
from torch import nn

from pipelining_dualpipev.errors import RankLostError
from pipelining_dualpipev.planning.actions import Order
from pipelining_dualpipev.planning.placement import Placement
from pipelining_dualpipev.runtime.control import agree
from pipelining_dualpipev.runtime.data_parallel import Replicas
from pipelining_dualpipev.runtime.executor import Executor, StepResult, Wires
from pipelining_dualpipev.runtime.gradients import Seed, one
from pipelining_dualpipev.runtime.hooks import HeldHooks
from pipelining_dualpipev.runtime.inputs import NamedInputs
from pipelining_dualpipev.runtime.loss import Loss
from pipelining_dualpipev.runtime.microbatches import Microbatches
from pipelining_dualpipev.runtime.observe import Observer
from pipelining_dualpipev.runtime.stage import StageRunner
from pipelining_dualpipev.runtime.tied import TiedGradients
from pipelining_dualpipev.runtime.transport import ContactLostError, Handle

__all__ = ["Pipeline"]


class Pipeline:
    """This rank's stages, wired to the other ranks'.

    Args:
        training: every rank's program of a training step.
        evaluation: every rank's program of a forward-only step.
        placement: which rank holds which stage.
        runners: this rank's stages by index.
        wires: to the other ranks.
        required_inputs: for each rank the keyword inputs that its stages read by name.
        prepares: whether the first stage's module has something to say of the inputs.
        replicas: of this rank's stages in other pipelines.

    Attributes:
        tied: this rank's parameters that other ranks hold too.
    """

    def __init__(
        self,
        training: Order,
        evaluation: Order,
        *,
        placement: Placement,
        runners: dict[int, StageRunner],
        wires: Wires,
        required_inputs: Sequence[frozenset[str]],
        prepares: bool = False,
        replicas: Replicas | None = None,
    ) -> None:
        self._replicas = replicas or Replicas(())
        self._lost: RankLostError | None = None
        rank = wires.transport.rank
        self._runners, self._wires = runners, wires
        self._device = next(iter(runners.values())).device
        source = placement.rank_of[0]
        self._named_inputs = {
            trains: NamedInputs(required_inputs, prepares=prepares, source=source, device=self._device, wires=wires)
            for trains in (True, False)
        }
        modules = [runner.module for runner in runners.values()]
        self.tied = TiedGradients(modules, placement, wires.transport, wires.control)
        self._executors = {
            trains: Executor(programs[rank], placement=placement, runners=runners, wires=wires, tied=self.tied)
            for trains, programs in ((True, training), (False, evaluation))
        }
        # By kind of step, as are all notes of shapes: what the last one that succeeded was like, for which they hold.
        self._last: dict[bool, object] = {}

    def observe(self, observer: Observer | None) -> None:
        """Have ``observer`` look on in the training steps that follow; None: nobody but a profiler that is on."""
        self._executors[True].observer = observer

    def step(
        self,
        inputs: Microbatches,
        loss: Loss | None,
        seed: Seed = one,
        *,
        trains: bool,
        keep_outputs: bool,
        finalize: bool = True,
        error: Exception | None = None,
    ) -> Generator[Handle, None, StepResult]:
        """One step of this rank.

        Args:
            inputs: this rank's, by microbatch.
            loss: on the last stage's rank, where one is wanted.
            seed: of each backward.
            trains: or forward only.
            keep_outputs: whether the result has the last stage's outputs.
            finalize: whether gradients are averaged over data-parallel ranks at the end.
            error: why the step cannot be run here, if so; it is raised on every rank.

        Raises:
            RanksDisagreeError: on every rank, if they do not all run the same kind of step or one has an error.
            PipelineError: on every rank, if an action of any rank raised, also in another data-parallel replica.
            RankLostError: on every rank that is left, if one has ended or does not come; also from then on.
        """
        if self._lost is not None:
            raise RankLostError(f"an earlier step has failed for good: {self._lost}")
        try:
            result = yield from self._step(inputs, loss, seed, trains, keep_outputs, finalize, error)
        except Exception as wrong:
            if isinstance(wrong, RankLostError):
                self._lost = wrong
            if trains and finalize:
                yield from self._replicas.end_step(failed=True)
            raise
        if trains and finalize:
            yield from self._replicas.end_step(failed=False)
        return result

    def _step(
        self,
        inputs: Microbatches,
        loss: Loss | None,
        seed: Seed,
        trains: bool,
        keep_outputs: bool,
        finalize: bool,
        error: Exception | None,
    ) -> Generator[Handle, None, StepResult]:
        signature = (inputs.signature(), self._state())
        announce = yield from agree(
            self._wires.control,
            {"the kind of step": "training" if trains else "evaluation", "finalize_gradients": finalize},
            inputs.keyword_inputs(),
            changed=self._last.get(trains) != signature,
            error=error or (None if finalize else self.tied.cannot_wait()),
        )
        # Should the step fail, the ranks' notes about each other's shapes may differ: the next one announces again.
        self._last.pop(trains, None)
        lost = None
        try:
            inputs = yield from self._named_inputs[trains].deliver(inputs, announce=announce)
        except ContactLostError as error:  # the others may not know yet, and are not to wait for this rank
            lost = error
        if inputs.told is not None and announce and 0 not in self._runners:
            self._prepare(inputs)
        if trains:
            self.tied.begin_step()
        hooks = HeldHooks(self._parameters() if trains else ())
        try:
            result = yield from self._executors[trains].run(
                inputs,
                loss,
                seed,
                announce=announce,
                keep_outputs=keep_outputs,
                finalize=finalize,
                when_complete=hooks.call,
                lost=lost,
            )
        finally:
            hooks.release()
        self._last[trains] = signature
        return result

    def _prepare(self, inputs: Microbatches) -> None:
        try:
            for runner in self._runners.values():
                runner.prepare_inputs(inputs.kwargs, inputs.told)
        except Exception:  # what is wrong is found again by the forward, whose errors reach all ranks
            pass

    def _parameters(self) -> dict[nn.Parameter, None]:
        """This rank's, each once."""
        return dict.fromkeys(p for runner in self._runners.values() for p in runner.module.parameters())

    def _state(self) -> tuple[object, ...]:
        """What beside the inputs may change the shapes, types or gradients that cross between stages."""
        kind = self._device.type
        modules = [runner.module for runner in self._runners.values()]
        return (
            torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
            *(module.training for module in modules),
            *((parameter.requires_grad, parameter.dtype) for module in modules for parameter in module.parameters()),
        )
