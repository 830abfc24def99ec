"""What concerns the gradients and losses of all ranks together: the norm, clipping, the batch's loss, added losses.

The gradient of a step is that of the mean of n microbatch losses, so each backward begins not with 1 but with a *seed*
of 1/n, times a `GradScaler`'s scale where there is one. A loss that is added in a middle stage has to begin with the
same seed. That stage is on another rank and does not see the last stage's loss, but every rank knows the seed::

    stage 3   x = inject_loss(x, router_loss) ---> x ---> ... ---> stage 7   loss
              backward: dx passes, router_loss gets the seed <---- dx <----  the seed
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from pipelining_dualpipev.runtime.lending import lend

__all__ = ["Seed", "clip_grad_norm_", "inject_loss", "mean_loss", "one", "seeding"]

Seed = Callable[[torch.Tensor], torch.Tensor]
"""Gives the gradient that the backward of a loss begins with."""


def one(loss: torch.Tensor) -> torch.Tensor:
    """The seed of a loss whose backward is run as it is, as outside of a schedule."""
    return torch.ones_like(loss)


_seed: ContextVar[Seed] = ContextVar("the seed of the step that is running", default=one)


class seeding:  # noqa: N801 -- read as the function it is used as, at a fifth of a generator's cost
    """Let `inject_loss` use this seed; entered around forwards, and around backwards, where checkpoints run again."""

    __slots__ = ("_seed", "_token")

    def __init__(self, seed: Seed) -> None:
        self._seed = seed

    def __enter__(self) -> None:
        self._token = _seed.set(self._seed)

    def __exit__(self, *_: object) -> None:
        _seed.reset(self._token)


class _InjectLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.seed = _seed.get()(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grad, ctx.seed


def inject_loss(x: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    """Add a loss that a stage in the middle of the model has computed (of a mixture's router, say) to the step's loss.

    Each microbatch's is weighted as its main loss is: the step's gradient is that of ``mean(losses) + mean(injected)``,
    or of the sums with ``scale_grads=False``. An autograd function of one's own that returns a gradient for such a
    loss does not see these weights: torch's schedules divide all gradients in the end, this one scales the losses in
    the beginning. Reported losses do not contain it.

    Outside of a schedule ``loss`` counts once for each backward that goes through ``x``, whatever that begins with.

    Args:
        x: any tensor on the way to the model's output; the loss counts when a gradient comes back through it.
        loss: one number, of any shape with 1 element.

    Returns:
        ``x``, to be used in its place.

    Raises:
        ValueError: if ``loss`` is not one number.
    """
    if loss.numel() != 1:
        raise ValueError(f"the injected loss has shape {list(loss.shape)}: give one number, a tensor with 1 element")
    return _InjectLoss.apply(x, loss) if torch.is_grad_enabled() else x


class _Pipeline(Protocol):
    """What is needed of a schedule here."""

    scale_grads: bool

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The pipeline's process group."""

    @property
    def device(self) -> torch.device:
        """Where this rank's stages are."""

    def parameters(self) -> Iterable[torch.nn.Parameter]:
        """This rank's parameters, each once."""

    def counted_elsewhere(self) -> set[torch.nn.Parameter]:
        """Those of them that an earlier rank holds too."""


def mean_loss(schedule: _Pipeline, losses: Sequence[torch.Tensor]) -> torch.Tensor:
    """The batch's loss on every rank, from the ``losses`` that a step has filled in on the loss rank.

    It is the mean over the microbatches; with ``scale_grads=False``, where ``loss_fn`` is taken to give each
    microbatch's share of the batch's loss, it is their sum. Either way it is the value whose gradient ``step`` has
    accumulated. Collective: every rank calls it, the others with the empty list that their step has left.

    Returns:
        A tensor without dimensions, float64, on this rank's device.
    """
    total = torch.zeros((), dtype=torch.float64, device=schedule.device)
    if losses:
        stacked = torch.stack([loss.reshape(()) for loss in losses]).to(total)
        total = stacked.mean() if schedule.scale_grads else stacked.sum()
    dist.all_reduce(lend(total), group=schedule.group)
    return total


def clip_grad_norm_(schedule: _Pipeline, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Clip the gradient of the whole model, over all stages of all ranks, as torch's function does for one process.

    A parameter that several stages share (tied embeddings) counts once, also if they are on several ranks, and so do
    replicas of a stage; of a parameter that is sharded (`torch.distributed.tensor.DTensor`) all shards count.
    Collective: every rank calls it, also one without gradients; all apply the same factor.

    Args:
        schedule: whose stages' gradients to clip.
        max_norm: the largest norm to leave.
        norm_type: p of the p-norm; ``math.inf`` for the largest entry.

    Returns:
        The norm before clipping, float64, on every rank.

    Raises:
        ValueError: if ``norm_type`` is not above 0 or ``max_norm`` is negative.
    """
    norm_type, max_norm = float(norm_type), float(max_norm)
    if not norm_type > 0 or not max_norm >= 0:
        raise ValueError(
            f"max_norm is {max_norm}, norm_type {norm_type}: use a norm_type above 0, a max_norm of 0 or more"
        )
    elsewhere = schedule.counted_elsewhere()
    found = [(parameter.grad, parameter in elsewhere) for parameter in schedule.parameters()]
    gradients = [gradient for gradient, _ in found if gradient is not None]
    counted = [gradient for gradient, is_elsewhere in found if gradient is not None and not is_elsewhere]
    norm = torch.linalg.vector_norm(torch.stack(_norms(counted, norm_type, schedule.device)), norm_type)
    if math.isinf(norm_type):
        dist.all_reduce(lend(norm), op=dist.ReduceOp.MAX, group=schedule.group)
    else:
        norm = norm**norm_type
        dist.all_reduce(lend(norm), group=schedule.group)
        norm = norm ** (1.0 / norm_type)
    # As torch's own function has it.
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in gradients:
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        local.mul_(factor.to(local.device, local.dtype))
    return norm


def _norms(gradients: Sequence[torch.Tensor], norm_type: float, device: torch.device) -> list[torch.Tensor]:
    """A norm for each mesh that gradients are sharded over, and one for those that are not; 0 if there are none."""
    by_mesh: dict[object, list[torch.Tensor]] = defaultdict(list)
    for gradient in gradients:
        by_mesh[gradient.device_mesh if isinstance(gradient, DTensor) else None].append(gradient)
    norms = [torch.nn.utils.get_total_norm(alike, norm_type) for alike in by_mesh.values()]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    return [norm.to(device, torch.float64) for norm in whole] or [torch.zeros((), dtype=torch.float64, device=device)]
