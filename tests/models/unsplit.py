"""What a split model has to give: loss and gradients of the model that is not split."""

from __future__ import annotations

import copy

import torch
from torch import nn

from tests.models.zoo import microbatch


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
