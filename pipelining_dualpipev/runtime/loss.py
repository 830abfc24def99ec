"""How the last stage's output becomes a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Loss"]


@dataclass(frozen=True)
class Loss:
    """The step's loss function, with what is given to it beside output and target."""

    function: Callable[..., Any]
    kwargs: dict[str, Any]

    def of(self, output: Any, target: Any) -> tuple[torch.Tensor, list[Any]]:
        """The loss of one microbatch, and a list that holds its metrics if there are any.

        Raises:
            ValueError: if what the function has returned is no loss.
        """
        value = self.function(output, target, **self.kwargs)
        metrics: list[Any] = []
        if isinstance(value, tuple) and len(value) == 2:
            value, metrics = value[0], [value[1]]
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            shape = f" of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else ""
            raise ValueError(
                f"loss_fn returned a {type(value).__name__}{shape}: return one number, a tensor with 1 element, or a "
                "tuple of it and of metrics"
            )
        return value, metrics
