"""All stages of a split in one process, chained by hand as a pipeline would: detached at every boundary."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from pipelining_dualpipev.models.loss import LossFunction
from pipelining_dualpipev.models.plan import SplitPlan, make_plan
from pipelining_dualpipev.models.split import build_stages
from pipelining_dualpipev.models.stage import StageModule
from pipelining_dualpipev.models.surgery import make_skeleton
from tests.models.zoo import microbatch


class Chain:
    """The 2P stages of ``model``; those of one rank share tied parameters, as they do in a real split."""

    def __init__(self, model: nn.Module, num_ranks: int, example: dict[str, Any]) -> None:
        skeleton = make_skeleton(model)
        self.plan: SplitPlan = make_plan(skeleton, 2 * num_ranks, example)
        self.loss_fn = LossFunction(self.plan.loss) if self.plan.loss else None
        self.stages: dict[int, StageModule] = {}
        for rank in range(num_ranks):
            own = (rank, 2 * num_ranks - 1 - rank)
            self.stages |= build_stages(model, skeleton, self.plan, own, torch.device("cpu"), self.loss_fn)

    def step(self, batch: dict[str, torch.Tensor], n: int) -> torch.Tensor:
        """Forward and backward of every microbatch; the mean of the losses."""
        assert self.loss_fn is not None
        self.loss_fn.prepare(list(batch["labels"].chunk(n)))
        losses = []
        for index in range(n):
            inputs = microbatch(batch, index, n)
            output, received, sent = self.forward(inputs)
            loss = self.loss_fn(output, inputs["labels"])
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

    def forward(self, inputs: dict[str, torch.Tensor]) -> tuple[Any, list[Any], list[Any]]:
        received: list[tuple[torch.Tensor, ...]] = [()]
        sent = []
        output: Any = None
        for stage in range(len(self.stages)):
            module = self.stages[stage]
            output = module(*received[-1], **{name: inputs[name] for name in module.required_inputs})
            if stage < len(self.stages) - 1:
                sent.append(output)
                received.append(tuple(t.detach().requires_grad_(t.requires_grad) for t in output))
        return output, received, sent

    def gradients(self) -> dict[str, torch.Tensor]:
        return {
            self.plan.names[name]: parameter.grad
            for stage in self.stages.values()
            for name, parameter in stage.model.named_parameters()
            if parameter.grad is not None
        }


def unsplit_step(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of the whole batch through a copy of the model."""
    model = copy.deepcopy(model)
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def unsplit_microbatches(
    model: nn.Module, batch: dict[str, torch.Tensor], n: int, shift: int
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The same, microbatch by microbatch, each weighted by its share of the labels that count."""
    model = copy.deepcopy(model)
    total = (batch["labels"][:, shift:] != -100).sum().double()
    loss = torch.zeros((), dtype=torch.float64)
    for index in range(n):
        inputs = microbatch(batch, index, n)
        share = (inputs["labels"][:, shift:] != -100).sum() / total
        if share:
            part = model(**inputs, use_cache=False).loss * share
            part.backward()
            loss += part.detach()
    return loss, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
