"""Weight gradients that are put off where other machinery is about: sharding, replicas, DTensors, the user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

from pipelining_dualpipev import ScheduleDualPipeV, stage_indices
from pipelining_dualpipev.planning import dualpipev_order
from tests.distributed.stacks import WIDTH, assert_close, make_batch, make_layers, mean_square
from tests.distributed.test_data_parallel import WRAPPERS, Replicated


class Watched(TorchDispatchMode):
    """Counts matrix products, and whatever communicates."""

    def __init__(self) -> None:
        super().__init__()
        self.products = self.collectives = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += func is torch.ops.aten.mm.default
        self.collectives += "c10d" in func.namespace
        return func(*args, **(kwargs or {}))


def step_and_watch_w(schedule: ScheduleDualPipeV, step: Callable[[], None]) -> Watched:
    watched = Watched()
    for runner in schedule._runners.values():
        right = runner.backward_weight

        def backward_weight(microbatch: int, right: Any = right) -> None:
            with watched:
                right(microbatch)

        runner.backward_weight = backward_weight  # type: ignore[method-assign]
    step()
    return watched


def count_in_w(how: str, n: int) -> None:
    run = Replicated(make_layers(4), n, WRAPPERS[how])
    run.step_both(0, rows=4 * n)
    watched = step_and_watch_w(run.schedule, lambda: run.step_both(1, rows=4 * n))
    run.assert_gradients_equal()
    assert watched.collectives == 0
    # A sharded stage's last I reduces all, and on rank 1 no other backward is split with so few microbatches.
    puts_off = "shard" not in how or (n > 1 and run.rank == 0)
    assert (watched.products > 0) == puts_off
    told = run.schedule.explain().splitlines()
    words = "the weight gradients of 36 of 42 parameters (85.7%) are put off to W" if puts_off else "no weight gradient"
    assert all(words in line for line in told)
    assert all(("as the stage is sharded" in line) == (puts_off and "shard" in how) for line in told)


@pytest.mark.slow
@pytest.mark.parametrize("how", WRAPPERS)
def test_under_data_parallelism_w_computes_and_communicates_nothing(ranks, how):
    for n in (1, 5):
        ranks(4).run(count_in_w, how, n)


class Experts(nn.Module):
    """A plain layer, one that is cut by rows over the ranks of a mesh, and a stack of experts that is dealt to them."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.mesh, self.plain = mesh, nn.Linear(WIDTH, WIDTH, bias=False).double()
        rows, stack = (torch.randn(*more, WIDTH, WIDTH, dtype=torch.float64) / WIDTH for more in ((), (4,)))
        placed = (t if mesh is None else distribute_tensor(t, mesh, [Shard(0)]) for t in (rows, stack))
        self.rows, self.stack = map(nn.Parameter, placed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.plain(x))
        if self.mesh is None:
            return linear(x, self.rows) + sum(linear(x, expert) for expert in self.stack)
        x_everywhere = DTensor.from_local(x, self.mesh, [Replicate()])
        x_here = x_everywhere.to_local(grad_placements=[Partial()])
        part = sum(linear(x_here, expert) for expert in self.stack.to_local())
        assert isinstance(part, torch.Tensor)
        return (
            linear(x_everywhere, self.rows).full_tensor()
            + DTensor.from_local(part, self.mesh, [Partial()]).full_tensor()
        )


def in_dtensors(n: int) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("experts", "pipeline"))
    stacks = []
    for experts in (None, mesh["experts"]):
        torch.manual_seed(0)
        stacks.append([Experts(experts) for _ in range(4)])
    whole, layers = stacks
    group, cpu = mesh["pipeline"].get_group(), torch.device("cpu")
    rank = dist.get_rank(group)
    stages = [PipelineStage(layers[index], index, 4, cpu, group=group) for index in stage_indices(rank, 2)]
    schedule = ScheduleDualPipeV(stages, n, mean_square)

    def step(seed: int) -> None:
        x, target = make_batch(2 * n, seed)
        schedule.step(x, target=target) if rank == 0 else schedule.step()
        mean_square(nn.Sequential(*whole)(x), target).backward()

    step(0)
    watched = step_and_watch_w(schedule, lambda: step(1))
    assert watched.products > 0
    assert watched.collectives == 0
    for stage in stages:
        for ours, theirs in zip(stage.submod.parameters(), whole[stage.stage_index].parameters(), strict=True):
            grad = ours.grad.full_tensor() if isinstance(ours, DTensor) else ours.grad
            assert_close([grad], [theirs.grad], 1e-12, f"stage {stage.stage_index}")
    return schedule.explain()


@pytest.mark.slow
def test_weights_in_dtensors_are_done_at_once_and_those_beside_them_are_put_off(ranks):
    for told in ranks(4).run(in_dtensors, 5):
        assert "the weight gradients of 36 of 216 parameters (16.7%) are put off to W; 180 are in DTensors" in told


class Later(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, notes: list[Any]) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.notes = notes
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        ctx.notes.append((dy, x))
        return dy @ weight, None, None


class PutsOff(nn.Module):
    """A layer that puts its own weight gradient off, as ``dw_builder`` is for."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight, self.notes, self.built = weight, [], 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(Later.apply(x, self.weight, self.notes))

    def build(self) -> Callable[[], None]:
        notes = list(self.notes)
        self.notes.clear()
        self.built += 1

        def work() -> None:
            for dy, x in notes:
                gradient = dy.T @ x
                self.weight.grad = gradient if self.weight.grad is None else self.weight.grad + gradient

        return work


def put_off_by_the_user(n: int) -> None:
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64)) for _ in range(4)]
    weights[3] = weights[0]
    layers, cpu = [PutsOff(weight) for weight in weights], torch.device("cpu")
    mine = {index: layers[index] for index in stage_indices(dist.get_rank(), 2)}
    stages = [PipelineStage(layer, index, 4, cpu, dw_builder=layer.build) for index, layer in mine.items()]
    schedule = ScheduleDualPipeV(stages, n, mean_square)
    expected = [torch.zeros_like(weight) for weight in weights]
    for seed in range(2):
        x, target = make_batch(2 * n, seed)
        schedule.step(x, target=target) if dist.get_rank() == 0 else schedule.step()
        y = x
        for weight in weights:
            y = torch.tanh(y @ weight.T)
        for sum_, gradient in zip(expected, torch.autograd.grad(mean_square(y, target), weights), strict=True):
            sum_ += gradient
    for index, layer in mine.items():
        assert layer.built == 2 * n
        assert_close([layer.weight.grad], [expected[index]], 1e-12, f"stage {index}")
    assert "up to its own dw_builder" in schedule.explain()


def test_a_dw_builder_of_the_users_own_with_a_weight_that_two_stages_share(ranks):
    for n in (1, 5):
        ranks(2).run(put_off_by_the_user, n)


def weights_put_off_by_the_user() -> list[str]:
    events: list[str] = []

    class Noted(nn.Linear):
        def forward(self, x):
            events.append("F")
            return super().forward(x)

    def builder():
        events.append("I")
        return lambda: events.append("W")

    cpu = torch.device("cpu")
    stages = [PipelineStage(Noted(WIDTH, WIDTH), index, 2, cpu, dw_builder=builder) for index in range(2)]
    schedule = ScheduleDualPipeV(stages, 1, loss_fn=mean_square)
    x, target = (t.float() for t in make_batch(1))
    schedule.step(x, target=target)
    return events


def test_the_users_own_dw_builder_is_asked_after_each_backward_and_its_work_done_in_w(ranks):
    (events,) = ranks(1).run(weights_put_off_by_the_user)
    assert " ".join(map(str, dualpipev_order(1, 1)[0])) == "0F0 1F0 1B0 0I0 0W0"
    assert events == ["F", "F", "I", "W", "I", "W"]
