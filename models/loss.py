"""The model's own loss, over microbatches.

A Hugging Face model computes its loss itself, as a mean over the labels that count. The mean of such means is not the
mean over the batch where microbatches have different numbers of labels (padding). What is wanted of microbatch i is::

    n * sum_i / count         with sum_i over its labels, count over the whole batch, n microbatches

so that the mean over microbatches is ``sum / count``, the loss of the batch. `LossFunction.prepare` counts before
anything is computed. Then there are two ways to get it, of which the plan has found out which fits:

*passes*      the model takes ``num_items_in_batch`` and divides its own sum by it: it is given ``count / n``. What else
              is in its loss (the load-balancing loss of a mixture of experts) stays as it is, and its mean over the
              microbatches is taken, as with gradient accumulation.
*reweighs*    the model has a cross-entropy of its own: its mean is multiplied by ``n * count_i / count``. A CTC loss is
              a mean over rows, so rows are counted in place of labels; or a sum over them, and is multiplied by n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from pipelining_dualpipev.errors import SplitError
from pipelining_dualpipev.models.absent import Absent

__all__ = ["LABELS", "NUM_ITEMS", "LossFunction", "LossPlan", "LossWatch", "marked_labels"]

LABELS = "labels"
NUM_ITEMS = "num_items_in_batch"


@dataclass(frozen=True)
class LossPlan:
    """How a model's loss follows from its labels.

    Attributes:
        shift: how many labels at the start of each row do not count, 1 where the model predicts the next token.
        ignore_index: labels of this value do not count.
        passes_num_items: whether the model divides by ``num_items_in_batch``.
        over: what the model's own loss is a mean of, ``"labels"`` or ``"rows"``; or ``"nothing"`` if it is a sum.
    """

    shift: int
    ignore_index: int
    passes_num_items: bool
    over: str = "labels"

    def count(self, labels: torch.Tensor) -> torch.Tensor:
        """How many of the labels (or rows) count, without waiting for the device."""
        if self.over == "labels":
            return (labels[..., self.shift :] != self.ignore_index).sum()
        return torch.full((), len(labels), device=labels.device)


def marked_labels(labels: torch.Tensor) -> torch.Tensor:
    """Labels of the same shape that are all different, by which to recognise what the model makes of them."""
    return torch.arange(1, labels.numel() + 1).reshape(labels.shape).to(labels.dtype)


class LossWatch(TorchFunctionMode):
    """Watches, in the plan's dry run, what cross-entropy or CTC loss is computed of the labels."""

    def __init__(self, labels: torch.Tensor) -> None:
        super().__init__()
        self._labels = labels
        self._calls: list[tuple[torch.Tensor, int, str, Any]] = []
        self._over = "labels"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.ctc_loss:
            return self._ctc_loss(*args, **kwargs)
        result = func(*args, **kwargs)
        if func is functional.cross_entropy:
            target = args[1] if len(args) > 1 else kwargs["target"]
            self._calls.append((target, kwargs.get("ignore_index", -100), kwargs.get("reduction", "mean"), result))
        return result

    def _ctc_loss(
        self, log_probs: Any, targets: Any, *lengths: Any, reduction: str = "mean", **options: Any
    ) -> torch.Tensor:
        # It has no kernel for meta. What is made of all it takes stands for it.
        result = torch.stack([operand.sum().to(log_probs.dtype) for operand in (log_probs, targets, *lengths)]).sum()
        self._over = "rows" if reduction == "mean" else "nothing"
        self._calls.append((targets, -100, "mean", result))
        return result

    def conclude(self, loss: Any) -> LossPlan:
        """What the model's ``loss`` has turned out to be.

        Raises:
            SplitError: if it is no single cross-entropy over the labels, as far as one can see.
        """
        if len(self._calls) != 1:
            raise SplitError(
                f"the model's loss takes {len(self._calls)} cross-entropies or CTC losses where one is understood: "
                f"leave {LABELS!r} out of the example and give the schedule a loss_fn of your own"
            )
        ((target, ignore_index, reduction, result),) = self._calls
        shift = self._shift_of(target, ignore_index)
        if shift is None:
            raise SplitError(
                f"the model's loss compares with something else than its labels or the labels shifted by one: leave "
                f"{LABELS!r} out of the example and give the schedule a loss_fn of your own"
            )
        if reduction == "mean" and result is not loss:
            raise SplitError(
                f"the model adds to its mean cross-entropy, which cannot be taken apart: leave {LABELS!r} out of the "
                "example and give the schedule a loss_fn of your own"
            )
        return LossPlan(shift, ignore_index, passes_num_items=reduction == "sum", over=self._over)

    def _shift_of(self, target: torch.Tensor, ignore_index: int) -> int | None:
        values = target.value if isinstance(target, Absent) else target
        if values is None:
            return None
        flat = values.flatten()
        if flat.equal(self._labels.flatten()):
            return 0
        rest = self._labels[..., 1:]
        padded = functional.pad(rest, (0, 1), value=ignore_index)
        return 1 if any(flat.equal(shifted.flatten()) for shifted in (rest, padded)) else None


class LossFunction:
    """The ``loss_fn`` of a split model, for the schedule: the mean over microbatches is the model's own batch loss.

    ``loss_fn(output, labels)`` gives ``n * sum / count`` of one microbatch, 0 where none of its labels counts. With a
    data-parallel group the count is over the batches of all its ranks, and the gradients are meant to be averaged over
    them, as data parallelism does.
    """

    target_input = LABELS
    """The schedule takes the keyword input of this name as the target."""

    def __init__(self, plan: LossPlan, dp_group: dist.ProcessGroup | None = None) -> None:
        self._plan, self._dp_group = plan, dp_group
        self._num_items: torch.Tensor | None = None

    @property
    def num_items(self) -> torch.Tensor:
        """The number of labels that count, per microbatch of this batch (not a whole number)."""
        if self._num_items is None:
            raise ValueError(
                "the labels have not been counted: give the schedule the split model's loss_fn, which counts them; for "
                f"a loss_fn of your own leave {LABELS!r} out of the example of the split"
            )
        return self._num_items

    def prepare(self, target_mbs: Sequence[torch.Tensor] | None) -> None:
        """Count the labels of a batch, given by microbatch. Called once a step, before anything is computed."""
        if target_mbs is None:
            raise ValueError("the model computes its loss from labels: give them as labels= or target=")
        counts = [self._plan.count(labels) for labels in target_mbs]
        count = torch.stack(counts).sum()
        parts = len(target_mbs)
        if self._dp_group is not None:
            dist.all_reduce(count, group=self._dp_group)
            parts *= dist.get_world_size(self._dp_group)
        self._num_items = count.clamp(min=1).double() / parts
        if self._plan.over == "nothing":
            self._num_items = torch.ones_like(self._num_items) / parts

    def __call__(self, output: Any, target: torch.Tensor) -> torch.Tensor:
        """One microbatch's share of the batch's loss."""
        loss: torch.Tensor = output["loss"] if isinstance(output, dict) else output[0]
        if self._plan.passes_num_items:
            return loss
        count = self._plan.count(target)
        if self._plan.over == "nothing":
            return loss / self.num_items.to(loss.dtype)
        # A mean over no labels is 0/0; its share is nothing.
        return torch.where(count > 0, loss * (count / self.num_items).to(loss.dtype), torch.zeros_like(loss))
