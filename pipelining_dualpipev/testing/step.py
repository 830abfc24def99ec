"""A training step of an order in a `LocalCluster`, compared with the same stages run one after another.

This is the test that no law can replace: whatever an order looks like, the losses and the gradient of every parameter
that come out of it must be those of the model that was never cut.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from pipelining_dualpipev.planning.actions import Action, Kind, Order, forwards_of
from pipelining_dualpipev.planning.formats import AnyOrder, placement_of, read_order
from pipelining_dualpipev.planning.laws import check_order
from pipelining_dualpipev.planning.lowering import lower
from pipelining_dualpipev.planning.placement import Placement
from pipelining_dualpipev.runtime.executor import StepResult
from pipelining_dualpipev.runtime.gradients import inject_loss
from pipelining_dualpipev.runtime.loss import Loss
from pipelining_dualpipev.runtime.microbatches import Microbatches
from pipelining_dualpipev.runtime.pipeline import Pipeline
from pipelining_dualpipev.runtime.stage import StageRunner
from pipelining_dualpipev.testing.cluster import Chooser, LocalCluster, first

__all__ = ["LocalPipeline", "Stack", "add_loss", "check_training_step"]

ROWS = 2  # of a microbatch
_METHODS = {
    Kind.FORWARD: "forward",
    Kind.FULL_BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward",
    Kind.BACKWARD_WEIGHT: "backward_weight",
}


def _mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


_by_hand: ContextVar[list[torch.Tensor] | None] = ContextVar("losses that the uncut stack adds", default=None)


def add_loss(x: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    """`inject_loss` in a stage; in the stack that is not cut, to be compared with, a term of its loss."""
    added = _by_hand.get()
    if added is None:
        return inject_loss(x, loss)
    added.append(loss)
    return x


@dataclass(frozen=True)
class Stack:
    """A small model as one module a stage: the first takes a tensor [rows, width], the last returns one.

    Between them a stage may pass on a tensor or a tuple of tensors, which the next gets as positional arguments.
    """

    layers: Sequence[nn.Module]
    width: int = 3
    words: str = field(default="linear layers", compare=False)

    @classmethod
    def linear(cls, num_stages: int, width: int = 3) -> Stack:
        """A linear layer and a tanh a stage, in fp64, always the same ones."""
        with torch.random.fork_rng():
            torch.manual_seed(num_stages)
            layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()).double() for _ in range(num_stages)]
        return cls(layers, width)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """One microbatch through all stages, uncut."""
        values: tuple[Any, ...] = (x,)
        for layer in self.layers:
            output = layer(*values)
            values = output if isinstance(output, tuple) else (output,)
        return values[0]


class LocalPipeline:
    """The stages of a stack in a cluster: every rank's real executor over wires in this process.

    Args:
        programs: every rank's lowered program of a training step.
        placement: which rank holds which stage.
        stack: the stages; not copied, so that their gradients can be looked at.
        n_microbatches: microbatches in a step.
        chooser: who goes next, see `LocalCluster`.
        transport: how the wires behave, see `testing.cluster`.
    """

    def __init__(
        self,
        programs: Order,
        placement: Placement,
        stack: Stack,
        n_microbatches: int,
        *,
        chooser: Chooser = first,
        transport: str = "rendezvous",
    ) -> None:
        self.placement, self.stack, self.n_microbatches = placement, stack, n_microbatches
        self.whole = copy.deepcopy(stack)
        cluster = LocalCluster(placement.num_ranks, chooser, transport=transport)
        self._run = cluster.run
        evaluation = lower(forwards_of(programs), placement=placement)
        self.runners: list[dict[int, StageRunner]] = [
            {stage: StageRunner(self._stage(stage)) for stage in placement.stages_of(rank)}
            for rank in range(placement.num_ranks)
        ]
        self._pipelines = [
            Pipeline(
                programs,
                evaluation,
                placement=placement,
                runners=runners,
                wires=wires,
                required_inputs=[frozenset()] * placement.num_ranks,
            )
            for runners, wires in zip(self.runners, cluster.wires, strict=True)
        ]

    def _stage(self, stage: int) -> Any:
        return SimpleNamespace(
            submod=self.stack.layers[stage],
            stage_index=stage,
            num_stages=self.placement.num_stages,
            device="cpu",
            dw_builder=None,
        )

    def batch(self, seed: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Inputs and targets of a step, by microbatch; the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        shape = (2, self.n_microbatches, ROWS, self.stack.width)
        inputs, targets = torch.randn(shape, generator=generator, dtype=torch.float64)
        return list(inputs), list(targets)

    def step(
        self, seed: int = 0, *, trains: bool = True, errors: dict[int, Exception] | None = None
    ) -> list[StepResult | Exception]:
        """A step on every rank: its result or the exception it raised, by rank.

        Args:
            seed: of the batch.
            trains: False for a forward-only step.
            errors: by rank, what it says it cannot run the step for.
        """
        inputs, targets = self.batch(seed)
        n, rank_of = self.n_microbatches, self.placement.rank_of
        given = [Microbatches.none(n) for _ in self._pipelines]
        given[rank_of[0]] = Microbatches([(mb,) for mb in inputs], [{}] * n, None)
        given[rank_of[-1]] = Microbatches(given[rank_of[-1]].args, [{}] * n, targets)
        loss = Loss(_mean_square, {})
        return self._run(
            [
                pipeline.step(
                    given[rank],
                    loss if rank == rank_of[-1] else None,
                    self._seed,
                    trains=trains,
                    keep_outputs=rank == rank_of[-1],
                    error=(errors or {}).get(rank),
                )
                for rank, pipeline in enumerate(self._pipelines)
            ]
        )

    def fail_at(self, action: Action, error: Exception) -> None:
        """Let a computing action (F, B, I or W) raise ``error`` in place of what it does, once, on its own rank."""
        runner = self.runners[self.placement.rank_of[action.stage]][action.stage]
        method = _METHODS[action.kind]
        right, calls = getattr(runner, method), iter(range(self.n_microbatches))

        def wrong(*args: Any, **kwargs: Any) -> Any:
            # A stage's forwards are in order, and say not which one they are.
            microbatch = next(calls) if action.kind is Kind.FORWARD else args[0]
            if microbatch != action.microbatch:
                return right(*args, **kwargs)
            setattr(runner, method, right)
            raise error

        setattr(runner, method, wrong)

    def _seed(self, loss: torch.Tensor) -> torch.Tensor:
        return torch.full_like(loss, 1.0 / self.n_microbatches)

    def step_whole(self, seed: int = 0) -> list[torch.Tensor]:
        """The same step on the copy that is not cut; its losses by microbatch."""
        losses = []
        for x, target in zip(*self.batch(seed), strict=True):
            added: list[torch.Tensor] = []
            token = _by_hand.set(added)
            loss = _mean_square(self.whole.run(x), target)
            _by_hand.reset(token)
            losses.append(loss.detach())
            loss = loss + sum(added)
            if loss.requires_grad:
                (loss / self.n_microbatches).backward()
        return losses

    def zero_grad(self) -> None:
        """Forget all gradients, of the stages and of the copy."""
        for layer in (*self.stack.layers, *self.whole.layers):
            layer.zero_grad()

    def assert_gradients_equal(self, tolerance: float = 1e-12) -> None:
        """Raise AssertionError where a gradient of a stage is not that of the copy; missing is not zero."""
        for stage, (ours, theirs) in enumerate(zip(self.stack.layers, self.whole.layers, strict=True)):
            for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
                what = f"the gradient of {name} in stage {stage}"
                assert (a.grad is None) == (b.grad is None), f"{what} is {a.grad}, uncut it is {b.grad}"
                if a.grad is not None and b.grad is not None:
                    _assert_close(a.grad, b.grad, tolerance, what)


def _assert_close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float, what: str) -> None:
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, msg=lambda words: f"{what}: {words}")


def check_training_step(
    order: AnyOrder,
    n_microbatches: int,
    *,
    placement: Placement | None = None,
    stack: Stack | None = None,
    chooser: Chooser = first,
    transport: str = "rendezvous",
    steps: int = 2,
    lower_order: Callable[..., Order] | None = lower,
) -> None:
    """Run training steps of ``order`` in a `LocalCluster` and compare loss and every gradient with the uncut stack.

    Args:
        order: every rank's compute actions, in any form that `check_order` takes.
        n_microbatches: microbatches in a step.
        placement: which rank holds which stage; by default as the order has it.
        stack: the stages; by default a linear layer each.
        chooser: picks what happens next, so that interleavings can be drawn; by default the lowest rank goes on.
        transport: how the wires behave: ``"buffered"``, ``"rendezvous"`` or ``"streams"``.
        steps: how many to run; gradients add up over them. Shapes travel ahead of tensors in the first one only.
        lower_order: makes programs of the order, called as `planning.lower` is; None if ``order`` already is programs.

    Raises:
        ScheduleError: if the order breaks a law.
        AssertionError: if it deadlocks, or a loss or a gradient differs.
    """
    if lower_order is None:
        programs = read_order(order)
        placement = placement or placement_of(programs)
    else:
        placement = placement or placement_of(read_order(order))
        programs = lower_order(check_order(order, n_microbatches, placement=placement), placement=placement)
    stack = stack or Stack.linear(placement.num_stages)
    pipeline = LocalPipeline(programs, placement, stack, n_microbatches, chooser=chooser, transport=transport)
    for seed in range(steps):
        results = pipeline.step(seed)
        for result in results:
            if isinstance(result, Exception):
                raise result
        last = results[placement.rank_of[-1]]
        assert isinstance(last, StepResult)
        for microbatch, (ours, theirs) in enumerate(zip(last.losses, pipeline.step_whole(seed), strict=True)):
            _assert_close(ours, theirs, 1e-12, f"the loss of microbatch {microbatch}")
        pipeline.assert_gradients_equal()
