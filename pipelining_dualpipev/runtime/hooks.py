"""Gradient hooks of parameters, called once a step with what the step has made, whole.

A step runs a backward for each microbatch, and some of them in two parts. A hook called by each would see pieces, and a
post-accumulate hook what earlier steps have left in ``.grad`` besides. Whoever averages or applies gradients in a hook
would do it to pieces, or twice. So where a parameter has hooks::

    a step begins   .grad and the hooks are set aside
    its actions     backwards add up in .grad, with nobody looking
    it ends         the sum goes through the parameter's AccumulateGrad once, with the hooks in place:
                    a tensor hook gets the sum and may replace it, a post-accumulate hook finds it in .grad
                    what was set aside is added to what they leave there

Only such a parameter needs a second tensor for it. Hooks on the AccumulateGrad node cannot be seen: they are called as
autograd comes by, for each microbatch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn

from pipelining_dualpipev._torch import GradientHooks, has_gradient_hooks

__all__ = ["HeldHooks"]


class _Held(NamedTuple):
    parameter: nn.Parameter
    before: torch.Tensor | None
    hooks: GradientHooks


class HeldHooks:
    """The hooks of those parameters that have any, held back from now on.

    Args:
        parameters: of this rank's stages, each once.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._held: list[_Held] = []
        for parameter in parameters:
            if parameter.requires_grad and has_gradient_hooks(parameter):
                self._held.append(_Held(parameter, parameter.grad, GradientHooks(parameter)))
                parameter.grad = None

    def call(self) -> None:
        """The gradients of the step are complete: put the hooks back and call them. `release` has to follow."""
        parameters, gradients = [], []
        for parameter, _, hooks in self._held:
            hooks.put_back()
            if parameter.grad is not None:
                parameters.append(parameter)
                gradients.append(parameter.grad)
                parameter.grad = None
        if parameters:
            # In one go: a hook on several parameters' gradients waits for all that the backward comes by.
            torch.autograd.backward(parameters, gradients)

    def release(self) -> None:
        """Put back what was set aside, also if the step has failed; does nothing the second time."""
        held, self._held = self._held, []
        for parameter, before, hooks in held:
            hooks.put_back()
            if before is not None:
                if parameter.grad is not None:
                    before.add_(parameter.grad)
                parameter.grad = before
