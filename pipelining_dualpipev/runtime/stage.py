"""One stage's share of autograd: the forward and the backward of one microbatch, between its two boundaries.

The graph of a model that is cut is cut too. What crosses a boundary is a detached leaf on the receiving side and a
gradient edge on the sending side::

    stage s            |   stage s+1
    ... --> output     |   leaf --> ... --> output
              \\_ edge   |     \\_ .grad
                ^------- gradient -----+

Between forward and backward a stage keeps its leaves and the *edges* of its outputs, not the outputs: an output's
storage is free once it is sent, unless the stage's own graph has saved it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.pipelining import PipelineStage

from pipelining_dualpipev._torch import run_backward
from pipelining_dualpipev.runtime.data_parallel import DataParallelStage, stage_module
from pipelining_dualpipev.runtime.gradients import Seed, one, seeding
from pipelining_dualpipev.runtime.weight_grad import AtOperations, FromBuilder, WeightGradients

__all__ = ["StageRunner", "TensorMeta", "changed_metas", "metas_of"]


class TensorMeta(NamedTuple):
    """What the receiver of a tensor has to know before it arrives."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def __str__(self) -> str:
        grad = ", requires grad" if self.requires_grad else ""
        return f"{self.dtype} {list(self.shape)}{grad}"


def metas_of(tensors: Sequence[torch.Tensor]) -> tuple[TensorMeta, ...]:
    """The metadata of each tensor."""
    return tuple(TensorMeta(tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for tensor in tensors)


def changed_metas(now: Sequence[TensorMeta], before: Sequence[TensorMeta]) -> ValueError:
    """What to say where a stage gives other tensors than those that its neighbour was told of."""
    told, agreed = "; ".join(map(str, now)), "; ".join(map(str, before))
    return ValueError(
        f"the stage gave ({told}), where it gave ({agreed}) before with inputs of the same shapes: what a stage gives "
        "may depend on its inputs' shapes, not on their values"
    )


def _without_autocast(device_type: str) -> AbstractContextManager[object]:
    """For a backward: its operations have the types of their forwards, whatever the caller of the step has entered."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


class _InFlight(NamedTuple):
    """A microbatch between its forward and its backward: where gradients come in and where they go out."""

    leaves: list[torch.Tensor]
    edges: list[GradientEdge]


class StageRunner:
    """Runs one `PipelineStage`, of which it reads the module, the index and ``dw_builder``.

    Attributes:
        seed: of the step that is running, for losses that the stage injects.
    """

    def __init__(self, stage: PipelineStage) -> None:
        self.index: int = stage.stage_index
        self.is_last: bool = stage.stage_index == stage.num_stages - 1
        self.module: torch.nn.Module = stage.submod
        self.device = torch.device(stage.device)
        own = stage_module(stage.submod)
        self.required_inputs: tuple[str, ...] | None = getattr(own, "required_inputs", None)
        self._prepare_inputs: Callable[..., Any] | None = getattr(own, "prepare_inputs", None)
        builder = stage.dw_builder
        self._accepted_inputs: frozenset[str] | None = getattr(own, "accepted_inputs", None)
        self._data_parallel = DataParallelStage(stage.submod)
        self.seed: Seed = one
        self._weight_gradients: WeightGradients = AtOperations(stage.submod, sharded=self._data_parallel.is_sharded)
        if builder:
            self._weight_gradients = FromBuilder(builder)
        self._in_flight: dict[int, _InFlight] = {}
        self._put_off: dict[int, Callable[[], None]] = {}

    def forget(self) -> None:
        """Drop whatever a step that failed has left."""
        self._in_flight.clear()
        self._put_off.clear()
        self._weight_gradients.forget()

    def explain(self) -> str:
        """In words, which weight gradients are put off."""
        return f"stage {self.index}: {self._weight_gradients.explain()}"

    def check_inputs(self, kwarg_mbs: Sequence[Mapping[str, Any]]) -> None:
        """Raise if the step gives a keyword input that a module which lists its ``accepted_inputs`` does not know.

        Raises:
            ValueError: naming it; without this it would go nowhere, and be missed by nobody.
        """
        if self._accepted_inputs is None:
            return
        if unknown := {name for mb in kwarg_mbs for name in mb} - self._accepted_inputs:
            accepted = ", ".join(sorted(self._accepted_inputs))
            remedy = f"{accepted}. Give split() an example with all inputs of a step" if accepted else "one by position"
            raise ValueError(
                f"the step was given {', '.join(sorted(unknown))}, which the model was not split for: it takes {remedy}"
            )

    def prepare_inputs(self, kwarg_mbs: Sequence[Mapping[str, Any]], told: Any = None) -> Any:
        """Let the module prepare for the step's keyword inputs, if it has a method for that.

        Args:
            kwarg_mbs: by microbatch those that have reached this rank; on the first stage's all.
            told: what this has returned for the first stage.
        """
        return self._prepare_inputs(kwarg_mbs, told) if self._prepare_inputs is not None else None

    def select_inputs(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Of the step's keyword inputs those that this stage takes: the ones it names, or all if it names none."""
        if self.required_inputs is None:
            return dict(kwargs)
        return {name: kwargs[name] for name in self.required_inputs if name in kwargs}

    def forward(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], *, grad: bool, split: bool, last: bool = False
    ) -> Any:
        """The module's output as it is; tensors of ``args`` that require grad are where this stage's backward ends.

        Args:
            args: the tensors received, or on the first stage the step's positional inputs.
            kwargs: the step's keyword inputs for this stage.
            grad: whether a backward will follow.
            split: whether that backward will be split into I and W.
            last: whether this stage's gradients are complete with it.
        """
        deferring = self._weight_gradients.deferring() if self._puts_off(split, last) else nullcontext()
        without_grad = nullcontext() if grad else torch.no_grad()
        with without_grad, seeding(self.seed), self._data_parallel.forward(), deferring:
            return self.module(*args, **kwargs)

    def output_tensors(self, output: Any) -> tuple[torch.Tensor, ...]:
        """A middle stage's output as the tuple of tensors that the next stage receives.

        Raises:
            TypeError: if there is anything but tensors in it.
        """
        outputs = tuple(output) if isinstance(output, (tuple, list)) else (output,)
        for value in outputs:
            if not isinstance(value, torch.Tensor):
                raise TypeError(
                    f"stage {self.index} returned a {type(value).__name__}: every stage but the last returns a tensor "
                    "or a tuple of tensors, which the next stage receives as its positional arguments"
                )
        return outputs

    def keep(self, microbatch: int, received: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """Remember where the backward of ``microbatch`` begins and ends."""
        self._in_flight[microbatch] = _InFlight(
            [tensor for tensor in received if tensor.requires_grad],
            [get_gradient_edge(tensor) for tensor in outputs if tensor.requires_grad],
        )

    def backward(
        self, microbatch: int, gradients: Sequence[torch.Tensor | None], *, split: bool = False, last: bool = False
    ) -> list[torch.Tensor | None]:
        """Run the backward of ``microbatch``: all of it, or its input gradient if ``split``.

        Args:
            microbatch: which.
            gradients: of those outputs that require grad, in order; None where there is none.
            split: put the weight gradients off until `backward_weight`.
            last: whether this stage's gradients are complete with it.

        Returns:
            The gradients of those received tensors that require grad, in order; None where the stage did not use one.
        """
        leaves, edges = self._in_flight.pop(microbatch)
        roots = [(edge, gradient) for edge, gradient in zip(edges, gradients, strict=True) if gradient is not None]
        if last and self._data_parallel.is_sharded:
            for waiting in list(self._put_off):
                self.backward_weight(waiting)
        self._data_parallel.before_backward(last=last)
        if roots:
            collecting = self._weight_gradients.collecting() if self._puts_off(split, last) else nullcontext()
            with seeding(self.seed), _without_autocast(self.device.type), collecting:
                run_backward([edge for edge, _ in roots], [gradient for _, gradient in roots])
        work = self._weight_gradients.take()
        if split:
            self._put_off[microbatch] = work
        else:
            work()
        return [leaf.grad for leaf in leaves]

    def backward_weight(self, microbatch: int) -> None:
        """Run what `backward` has put off, if that was not needed earlier."""
        if work := self._put_off.pop(microbatch, None):
            work()

    def _puts_off(self, split: bool, last: bool) -> bool:
        """Whether a backward leaves weight gradients for later. A sharded stage's last one reduces what is there."""
        return split and not (last and self._data_parallel.is_sharded)
