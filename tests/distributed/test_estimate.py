"""`dualpipev plan` says what a rank will hold; here a real step is run, and what it holds is counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from pipelining_dualpipev import ScheduleDualPipeV
from pipelining_dualpipev._torch import storage_of
from pipelining_dualpipev.models import split
from pipelining_dualpipev.models.estimate import Job, estimate
from tests.models.zoo import CONFIGS, VOCABULARY

ROWS, LENGTH = 2, 24


class Held:
    """The bytes of tensors that autograd holds: each storage once, from the first time it is saved to the last drop."""

    def __init__(self, parameters: set[int]) -> None:
        self.parameters, self.holders = parameters, dict[int, list[int]]()
        self.now = self.peak = 0

    def save(self, tensor: torch.Tensor) -> Any:
        storage = storage_of(tensor)
        if storage in self.parameters:
            return tensor
        holders, size = self.holders.setdefault(storage, [0, tensor.untyped_storage().nbytes()])
        self.holders[storage][0] += 1
        if not holders:
            self.now += size
            self.peak = max(self.peak, self.now)
        return _Saved(self, tensor)

    def drop(self, storage: int) -> None:
        self.holders[storage][0] -= 1
        if not self.holders[storage][0]:
            self.now -= self.holders.pop(storage)[1]


class _Saved:
    def __init__(self, held: Held, tensor: torch.Tensor) -> None:
        self.held, self.tensor = held, tensor

    def __del__(self) -> None:
        self.held.drop(storage_of(self.tensor))


def count(name: str, n: int, balance: Any) -> tuple[int, int, int, int]:
    """Bytes of parameters, gradients, optimizer state, and of activations at the peak of a step."""
    model = AutoModelForCausalLM.from_config(CONFIGS[name][0](5), dtype=torch.float32)
    ids = torch.randint(1, VOCABULARY, (n * ROWS, LENGTH))
    parts = split(model, example={"input_ids": ids[:ROWS], "labels": ids[:ROWS]}, device="cpu", balance=balance)
    schedule = ScheduleDualPipeV(parts.stages, n, parts.loss_fn)
    optimizer = torch.optim.AdamW(parts.parameters())
    held = Held({storage_of(parameter) for parameter in parts.parameters()})
    batch = {"input_ids": ids, "labels": ids} if dist.get_rank() == 0 else {}
    with torch.autograd.graph.saved_tensors_hooks(held.save, lambda saved: getattr(saved, "tensor", saved)):
        schedule.step(**batch, return_outputs=False)
    assert held.now == 0
    optimizer.step()
    state = [value for of in optimizer.state.values() for value in of.values() if isinstance(value, torch.Tensor)]
    gradients = [parameter.grad for parameter in parts.parameters() if parameter.grad is not None]
    return (
        sum(parameter.nbytes for parameter in parts.parameters()),
        sum(gradient.nbytes for gradient in gradients),
        sum(tensor.nbytes for tensor in state),
        held.peak,
    )


@pytest.mark.parametrize(
    ("name", "n", "balance"),
    [("llama tied", 6, "uniform"), ("gpt2", 3, "cost"), ("qwen3", 8, [1, 2, 4])],
)
def test_bytes_are_those_of_a_real_step_by_rank(ranks, name, n, balance):
    job = Job(2, n, rows=ROWS, seq_len=LENGTH, dtype=torch.float32, balance=balance)
    estimated = estimate(CONFIGS[name][0](5), job)
    for rank, counted in enumerate(ranks(2).run(count, name, n, balance)):
        told = estimated.ranks[rank]
        for which, bytes_ in zip(("parameters", "gradients", "optimizer", "activations"), counted, strict=True):
            assert getattr(told, which) == pytest.approx(bytes_, rel=0.05), f"{which} of rank {rank}"
        assert told.total == pytest.approx(sum(counted), rel=0.05)
