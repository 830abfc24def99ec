"""Whether a split model is the model: all stages in one process, beside the model that is not split.

The stages are chained by hand as a pipeline would, and cut from each other's graph at every boundary::

    stage 0 ──out──> detach ──> stage 1 ──out──> detach ──> ... ──> loss
       <──grad──       └──<──grad──       └──<──

so a value that should have crossed a boundary and did not shows as a gradient that is wrong or lacking.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pipelining_dualpipev.errors import SplitError
from pipelining_dualpipev.models.loss import LABELS, LossFunction
from pipelining_dualpipev.models.plan import SplitPlan, make_plan
from pipelining_dualpipev.models.split import build_stages
from pipelining_dualpipev.models.stack import layers_of
from pipelining_dualpipev.models.stage import StageModule
from pipelining_dualpipev.models.surgery import glue_of, make_skeleton, refuse_hooks_on_glue
from pipelining_dualpipev.planning.placement import Placement

__all__ = ["Chain", "Verification", "compare", "verify"]

Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Verification:
    """How a split model compares with the model that is not split.

    Attributes:
        loss: of the split model.
        expected_loss: of the other.
        errors: for each parameter the largest difference of its gradients over the largest of the expected ones (or
            over what rounding leaves of the model's largest gradient, if that is more; 0 where both are within that);
            infinite where one of the models has no gradient, or one that is not finite.
        tolerance: up to which an error is rounding.
    """

    loss: float
    expected_loss: float
    errors: dict[str, float]
    tolerance: float

    @property
    def loss_error(self) -> float:
        """The difference of the losses over the expected one."""
        return _finite(abs(self.loss - self.expected_loss) / max(abs(self.expected_loss), 1e-12))

    @property
    def worst(self) -> tuple[str, float]:
        """The parameter with the largest error, and that."""
        return max(self.errors.items(), key=lambda item: item[1])

    @property
    def matches(self) -> bool:
        """Whether loss and gradients are the same but for rounding."""
        return self.loss_error <= self.tolerance and self.worst[1] <= self.tolerance

    def __str__(self) -> str:
        name, error = self.worst
        return (
            f"{'the split model is the model' if self.matches else 'the split model is NOT the model'}: "
            f"loss {self.loss:.6f}, not split {self.expected_loss:.6f}; worst of {len(self.errors)} gradients "
            f"{name}, off by {error:.1e} (rounding: up to {self.tolerance:.0e})"
        )


def verify(model: nn.Module, num_ranks: int, batch: Mapping[str, Any]) -> Verification:
    """Split a model in this process, and compare loss and every gradient with those of the model itself.

    It needs memory for the model twice, with gradients.

    Args:
        model: with weights, on one device. Its ``grad`` fields have to be empty, and are so again in the end. In
            training mode both start from the same random state, but dropout between layers may draw in another order:
            eval mode is safer.
        num_ranks: P; the model is cut into 2P stages.
        batch: keyword inputs with ``labels``, on the device of the model.

    Raises:
        SplitError: if it cannot be split so.
        ValueError: if there are no labels, or gradients that would be lost.
        TypeError: if the model is plain layers, which have no loss.
    """
    if layers_of(model) is not None:
        raise TypeError(
            "plain layers have no loss of their own to compare: train them beside the unsplit nn.Sequential"
        )
    if LABELS not in batch:
        raise ValueError(f"the batch has {', '.join(batch)} and no {LABELS}: give them, for there to be a loss")
    if any(parameter.grad is not None for parameter in model.parameters()):
        raise ValueError("the model has gradients, which would be lost: clear them by model.zero_grad()")
    return compare(Chain(model, num_ranks, batch), model, batch)


def compare(
    chain: Chain, model: nn.Module, batch: Mapping[str, Any], loss_fn: Callable[..., torch.Tensor] | None = None
) -> Verification:
    """What `verify` does, with a chain that is there.

    Args:
        chain: of ``model``, with a batch like this one as its example.
        model: as it was when the chain was made of it.
        batch: keyword inputs.
        loss_fn: ``loss_fn(output, None)`` for a model whose own loss is not to be taken.
    """
    device = next(model.parameters()).device
    with torch.random.fork_rng([device] if device.type != "cpu" else [], device_type=device.type):
        torch.manual_seed(0)
        loss = chain.step(batch, 1, loss_fn)
    found = chain.gradients()
    with torch.random.fork_rng([device] if device.type != "cpu" else [], device_type=device.type):
        torch.manual_seed(0)
        output = model(**{**chain.plan.constants, **batch})
        if loss_fn is not None:
            expected_loss = loss_fn(output, None)
        else:
            expected_loss = output["loss"] if isinstance(output, dict) else output[0]
        expected_loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    # Against the largest of all, a gradient below rounding is zero (of attention to one place, say), and what is left
    # of it is noise.
    sizes = [float(gradient.abs().max()) for gradient in expected.values() if gradient.numel()]
    largest = max(filter(math.isfinite, sizes), default=0.0)
    errors = {name: _error(found.get(name), expected.get(name), largest) for name in found.keys() | expected.keys()}
    model.zero_grad(set_to_none=True)
    types = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    # The same operations on the same rows: what may differ is how a mean is divided, and the order in which the
    # gradients of a tied parameter are added. (transformers computes the loss in float32 whatever the model's type.)
    rounding = max(torch.finfo(dtype).eps for dtype in types | {torch.float32})
    return Verification(loss.item(), expected_loss.item(), errors, tolerance=16 * rounding)


def _error(found: torch.Tensor | None, expected: torch.Tensor | None, largest: float) -> float:
    if found is None or expected is None:
        return math.inf
    if not expected.numel():
        return 0.0
    kind = torch.finfo(expected.dtype)
    below_rounding = max(kind.eps * largest, kind.tiny)
    size = expected.abs().max()
    if size <= below_rounding and found.abs().max() <= below_rounding:
        return 0.0
    return _finite(((found - expected).abs().max() / size.clamp_min(below_rounding)).item())


def _finite(error: float) -> float:
    return error if math.isfinite(error) else math.inf


class Chain:
    """The 2P stages of a model in one process; those of one rank share tied parameters, as they do in a real split.

    Attributes:
        plan: of the split.
        stages: the modules by index.
        loss_fn: the model's own loss, None if the example has no labels.
    """

    def __init__(self, model: nn.Module, num_ranks: int, example: Mapping[str, Any]) -> None:
        skeleton = make_skeleton(model)
        placement = Placement.v(num_ranks)
        self.plan: SplitPlan = make_plan(skeleton, placement.num_stages, example)
        refuse_hooks_on_glue(glue_of(model, self.plan.units))
        self.loss_fn = LossFunction(self.plan.loss) if self.plan.loss else None
        self.stages: dict[int, StageModule] = {}
        device = next(model.parameters()).device
        if device.type == "meta":  # its weights are made where the stages are
            device = torch.device("cpu")
        for rank in range(num_ranks):
            own = placement.stages_of(rank)
            self.stages |= build_stages(model, skeleton, self.plan, own, device, self.loss_fn)
        for stage in self.stages.values():
            stage.train(model.training)

    def step(
        self, batch: Mapping[str, Any], n: int, loss_fn: Callable[..., torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Forward and backward of a batch in ``n`` microbatches; the mean of their losses. Gradients add up."""
        microbatches = [batch] if n == 1 else [{k: v.chunk(n)[i] for k, v in batch.items()} for i in range(n)]
        if loss_fn is None:
            if self.loss_fn is None:
                raise SplitError(f"the example had no {LABELS}: there is no loss")
            self.loss_fn.prepare([inputs[LABELS] for inputs in microbatches])
            loss_fn = self.loss_fn
        losses = []
        for inputs in microbatches:
            output, received, sent = self.forward(inputs)
            loss = loss_fn(output, inputs.get(LABELS))  # type: ignore[arg-type]  # its own has labels
            losses.append(loss.detach())
            (loss / n).backward()
            for stage in range(len(self.stages) - 2, -1, -1):
                pairs = [
                    (out, into.grad)
                    for out, into in zip(sent[stage], received[stage + 1], strict=True)
                    if into.grad is not None
                ]
                torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])
        return torch.stack(losses).mean()

    def forward(
        self,
        inputs: Mapping[str, Any],
        around: Callable[[int], AbstractContextManager[object]] = lambda stage: nullcontext(),
    ) -> tuple[Any, list[Any], list[Any]]:
        """One microbatch through all stages: the last one's output, and what each has received and sent.

        Args:
            inputs: of the microbatch; what is no tensor is the example's.
            around: gives for each stage a context to enter around its forward.
        """
        received: list[tuple[torch.Tensor, ...]] = [()]
        sent = []
        output: Any = None
        tensors = inputs.keys() - self.plan.constants.keys()
        for stage in range(len(self.stages)):
            module = self.stages[stage]
            with around(stage):
                output = module(
                    *received[-1], **{name: inputs[name] for name in module.required_inputs if name in tensors}
                )
            if stage < len(self.stages) - 1:
                sent.append(output)
                received.append(tuple(t.detach().requires_grad_(t.requires_grad) for t in output))
        return output, received, sent

    def gradients(self) -> Gradients:
        """The gradient of each parameter that has one, by its first name; of replicas the sum, as a schedule has it."""
        found: dict[str, dict[nn.Parameter, torch.Tensor]] = {}
        for stage in self.stages.values():
            for name, parameter in stage.model.named_parameters():
                if parameter.grad is not None:
                    found.setdefault(self.plan.names[name], {})[parameter] = parameter.grad
        return {name: torch.stack(list(gradients.values())).sum(0) for name, gradients in found.items()}
