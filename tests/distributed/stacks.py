"""Small stacks of layers, cut by hand into a V, and the same stack unsplit to compare with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from pipelining_dualpipev import ScheduleDualPipeV, stage_indices

WIDTH = 6


def num_stages() -> int:
    return 2 * dist.get_world_size()


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


def make_layers(num_stages: int, seed: int = 0) -> list[nn.Module]:
    """One layer a stage, in fp64, the same on every rank."""
    torch.manual_seed(seed)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(num_stages)]


def make_batch(rows: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, WIDTH)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


class Cut:
    """A stack cut into a V over a group, beside a copy of it that is not cut."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        n_microbatches: int,
        loss_fn: Callable[..., torch.Tensor] | None = mean_square,
        group: dist.ProcessGroup | None = None,
        **options: object,
    ) -> None:
        self.rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self.whole = nn.ModuleList(copy.deepcopy(nn.ModuleList(layers)))
        self.mine = {index: layers[index] for index in stage_indices(self.rank, num_ranks)}
        cpu = torch.device("cpu")
        stages = [PipelineStage(m, index, 2 * num_ranks, cpu, group=group) for index, m in self.mine.items()]
        self.schedule = ScheduleDualPipeV(stages, n_microbatches, loss_fn, **options)  # type: ignore[arg-type]

    def step(self, *args: object, target: object = None, **kwargs: object) -> list[torch.Tensor]:
        """A training step with inputs on rank 0 only; the losses (empty elsewhere)."""
        losses: list[torch.Tensor] = []
        if self.rank == 0:
            self.schedule.step(*args, target=target, losses=losses, return_outputs=False, **kwargs)
        else:
            self.schedule.step()
        return losses

    def run_whole(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.whole:
            x = layer(x)
        return x

    def assert_gradients_equal(self, tolerance: float = 1e-12) -> None:
        for index, layer in self.mine.items():
            assert_close(gradients(layer), gradients(self.whole[index]), tolerance, f"gradient of stage {index}")

    def assert_weights_equal(self, tolerance: float = 1e-12) -> None:
        for index, layer in self.mine.items():
            assert_close(layer.parameters(), self.whole[index].parameters(), tolerance, f"weight of stage {index}")


def gradients(module: nn.Module) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in module.parameters()]


def assert_close(
    ours: Iterable[torch.Tensor | None], theirs: Iterable[torch.Tensor | None], tolerance: float, what: str
) -> None:
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert (a is None) == (b is None), f"{what} {index}: {a} against {b}"
        if a is not None and b is not None:
            error = ((a - b).abs().max() / b.abs().max().clamp_min(1e-30)).item()
            assert error <= tolerance, f"{what} {index} is off by {error:.2e}"
