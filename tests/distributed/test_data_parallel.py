"""Pipelines beside each other: stages replicated by DDP or sharded by fully_shard, two replicas of two ranks.

Ranks 0 and 1 are one pipeline, 2 and 3 the other; {0, 2} and {1, 3} hold the same stages. Each replica gets half of the
batch, and what comes out has to be the gradient of the whole batch in one process.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import ScheduleDualPipeV as TorchDualPipeV
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from pipelining_dualpipev import PipelineError, ScheduleDualPipeV, clip_grad_norm_, mean_loss, stage_indices
from pipelining_dualpipev.models import split
from tests.distributed.stacks import assert_close, make_batch, make_layers, mean_square
from tests.models import zoo
from tests.models.unsplit import unsplit_step

pytestmark = pytest.mark.slow

PIPELINES, REPLICAS = [[0, 1], [2, 3]], [[0, 2], [1, 3]]


class Replicated:
    """The stages of this process in its pipeline, wrapped by ``wrap(stage, dp_group)``; and the stack unsplit."""

    def __init__(self, layers: list[nn.Module], n: int, wrap: Any, schedule: Any = ScheduleDualPipeV) -> None:
        me = dist.get_rank()
        self.groups = [[dist.new_group(members) for members in kind] for kind in (PIPELINES, REPLICAS)]
        (self.pipeline,) = (g for g, m in zip(self.groups[0], PIPELINES, strict=True) if me in m)
        (self.replicas,) = (g for g, m in zip(self.groups[1], REPLICAS, strict=True) if me in m)
        self.rank, self.replica = dist.get_rank(self.pipeline), dist.get_rank(self.replicas)
        self.whole = nn.Sequential(*copy.deepcopy(nn.ModuleList(layers)))
        self.mine = {index: wrap(layers[index], self.replicas) for index in stage_indices(self.rank, 2)}
        cpu = torch.device("cpu")
        stages = [PipelineStage(m, i, 4, cpu, group=self.pipeline) for i, m in self.mine.items()]
        self.schedule = schedule(stages, n, mean_square)

    def step(self, x: torch.Tensor, target: torch.Tensor) -> None:
        x, target = x.chunk(2)[self.replica], target.chunk(2)[self.replica]
        if self.rank == 0:
            self.schedule.step(x, target=target, losses=[], return_outputs=False)
        else:
            self.schedule.step()

    def step_both(self, seed: int, rows: int = 16) -> None:
        x, target = make_batch(rows, seed=seed)
        self.step(x, target)
        mean_square(self.whole(x), target).backward()

    def gradients(self) -> dict[str, torch.Tensor | None]:
        found = {}
        for index, module in self.mine.items():
            for name, parameter in module.named_parameters():
                grad = parameter.grad
                found[f"{index}.{name.replace('module.', '')}"] = (
                    grad.full_tensor() if isinstance(grad, DTensor) else grad
                )
        return found

    def assert_gradients_equal(self) -> None:
        theirs = dict(self.whole.named_parameters(remove_duplicate=False))
        for name, grad in self.gradients().items():
            assert_close([grad], [theirs[name].grad], 1e-12, f"gradient of {name}")


def replicate(stage: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    return DistributedDataParallel(stage, process_group=group)


def replicate_parts(stage: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    stage[0] = DistributedDataParallel(stage[0], process_group=group)
    return stage


def shard(stage: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    return fully_shard(stage, mesh=DeviceMesh.from_group(group, "cpu"))


def shard_parts(stage: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    mesh = DeviceMesh.from_group(group, "cpu")
    fully_shard(stage[0], mesh=mesh)
    return fully_shard(stage, mesh=mesh)


WRAPPERS = {"DDP": replicate, "DDP inside": replicate_parts, "fully_shard": shard, "fully_shard inside": shard_parts}


def two_steps(how: str, n: int, accumulate: bool) -> None:
    torch.manual_seed(0)
    run = Replicated(make_layers(4), n, WRAPPERS[how])
    ours = torch.optim.AdamW(run.schedule.parameters(), lr=1e-2)
    theirs = torch.optim.AdamW(run.whole.parameters(), lr=1e-2)
    for step in range(4):
        run.step_both(seed=step, rows=4 * n)
        run.assert_gradients_equal()
        if not accumulate or step % 2:
            norm = clip_grad_norm_(run.schedule, 0.1)
            assert_close([norm], [torch.nn.utils.clip_grad_norm_(run.whole.parameters(), 0.1)], 1e-12, "norm")
            run.assert_gradients_equal()
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("how", WRAPPERS)
def test_gradients_are_the_mean_over_the_replicas_and_so_is_their_norm(ranks, how, accumulate):
    for n in (1, 4, 5):
        ranks(4).run(two_steps, how, n, accumulate)


def hooks_while_gradients_add_up(how: str) -> None:
    run, n = Replicated(make_layers(4), 5, WRAPPERS[how]), 5
    parameters = [p for module in run.mine.values() for p in module.parameters()]
    seen: dict[nn.Parameter, list[torch.Tensor]] = {p: [] for p in parameters}
    for p in parameters:
        p.register_hook(lambda gradient, p=p: seen[p].append(gradient.clone()))
        p.register_post_accumulate_grad_hook(lambda p: seen[p].append(p.grad.clone()))
    for seed in range(2):
        run.step_both(seed, rows=4 * n)
    run.assert_gradients_equal()
    theirs = [p for index in run.mine for p in run.whole[index].parameters()]
    run.whole.zero_grad()
    run.step_both(1, rows=4 * n)
    for p, uncut in zip(parameters, theirs, strict=True):
        assert len(seen[p]) == 6
        for gradient in seen[p][2:4]:
            if isinstance(gradient, DTensor):
                gradient = gradient.full_tensor()
            else:
                dist.all_reduce(gradient.div_(2), group=run.replicas)
            assert_close([gradient], [uncut.grad], 1e-12, "what a hook saw")


def test_hooks_see_the_gradient_of_one_step_once(ranks):
    for how in WRAPPERS:
        ranks(4).run(hooks_while_gradients_add_up, how)


def tied_under_ddp() -> None:
    layers = make_layers(4)
    layers[3][0].weight = layers[0][0].weight
    run = Replicated(layers, 4, replicate)
    for step in range(2):
        run.step_both(seed=step)
    run.assert_gradients_equal()
    if run.rank == 0:
        assert run.mine[0].module[0].weight is run.mine[3].module[0].weight


def test_a_parameter_tied_between_two_replicated_stages_is_averaged_once(ranks):
    ranks(4).run(tied_under_ddp)


class Sometimes(nn.Module):
    """Uses its second layer for some inputs only."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.often, self.seldom = layer, copy.deepcopy(layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.seldom(x) if x.sum() > 0 else self.often(x)


def seldom_used(find_unused: bool) -> None:
    def wrap(stage: nn.Module, group: dist.ProcessGroup) -> nn.Module:
        return DistributedDataParallel(stage, process_group=group, find_unused_parameters=find_unused)

    layers = make_layers(4)
    layers[0] = Sometimes(layers[0])
    run = Replicated(layers, 4, wrap)
    x, target = make_batch(16)
    x = x.abs()
    x[8:] *= -1  # one replica uses one layer, the other the other
    run.step(x, target)
    for x_mb, target_mb in zip(x.chunk(8), target.chunk(8), strict=True):
        (mean_square(run.whole(x_mb), target_mb) / 8).backward()
    run.assert_gradients_equal()


def test_what_one_replica_does_not_use_is_averaged_all_the_same(ranks):
    ranks(4).run(seldom_used, True)
    ranks(4).run(seldom_used, False)


def never_used(find_unused: bool) -> str:
    def wrap(stage: nn.Module, group: dist.ProcessGroup) -> nn.Module:
        return DistributedDataParallel(stage, process_group=group, find_unused_parameters=find_unused)

    layers = make_layers(4)
    layers[1].unused = nn.Parameter(torch.zeros(2))
    layers[1].forward = layers[1][0].forward
    run = Replicated(layers, 4, wrap)
    run.whole[1].forward = run.whole[1][0].forward
    try:
        run.step_both(seed=0)
    except PipelineError as error:
        return str(error)
    run.assert_gradients_equal()
    return ""


def test_a_parameter_without_gradient_is_told_unless_ddp_was_told_of_it(ranks):
    assert ranks(4).run(never_used, True) == [""] * 4
    told = ranks(4).run(never_used, False)
    assert ["unused got no gradient" in words and "find_unused_parameters=True" in words for words in told] == [
        False,
        True,
    ] * 2


class Falls(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.falls = layer, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.falls:
            raise ArithmeticError("a bit fell over")
        return self.layer(x)


def fails_in_one_replica(bad_batch: bool) -> str:
    run = Replicated([Falls(layer) for layer in make_layers(4)], 4, replicate)
    here = run.replica == 1
    if here and not bad_batch and run.rank == 1:
        run.mine[2].module.falls = True
    x, target = make_batch(16)
    words = ""
    try:
        if bad_batch and here and run.rank == 0:
            run.schedule.step(x[:3], target=target[:3])
        else:
            run.step(x, target)
    except (PipelineError, ValueError) as error:
        words = str(error)
    for module in run.mine.values():
        module.module.falls = False
        module.zero_grad()
    run.step_both(seed=3)
    run.assert_gradients_equal()
    return words


@pytest.mark.parametrize("bad_batch", [False, True])
def test_a_step_that_fails_in_one_replica_fails_in_all_and_nobody_waits(ranks, bad_batch):
    told = ranks(4).run(fails_in_one_replica, bad_batch)
    assert all("failed in another data-parallel replica" in words for words in told[:2])
    assert all(("3 rows" if bad_batch else "a bit fell over") in words for words in told[2:])


class CountCollectives(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for kind in ("_allgather_base_", "_reduce_scatter_base_", "allreduce_"):
            self.count[kind] += func._schema.name == f"c10d::{kind}"
        return func(*args, **(kwargs or {}))


def finalized_later(how: str) -> list[int]:
    run = Replicated(make_layers(4), 4, WRAPPERS[how])
    counts = []
    for seed, finalize in enumerate((False, False, True)):
        x, target = make_batch(16, seed=seed)
        mine, wanted = x.chunk(2)[run.replica], target.chunk(2)[run.replica]
        with CountCollectives() as counter:
            given = {"target": wanted} if run.rank == 0 else {}
            run.schedule.step(*(mine,) * (run.rank == 0), **given, finalize_gradients=finalize)
        counts.append(counter.count["allreduce_"] + counter.count["_reduce_scatter_base_"])
        mean_square(run.whole(x), target).backward()
    run.assert_gradients_equal()
    return counts


@pytest.mark.parametrize("how", WRAPPERS)
def test_gradients_that_are_not_to_be_finalized_yet_are_reduced_with_the_last_step(ranks, how):
    for counts in ranks(4).run(finalized_later, how):
        assert counts[:2] == [0, 0]
        assert counts[2] > 0


def collectives(inside: bool) -> list[Counter[str]]:
    counts = []
    for schedule in (ScheduleDualPipeV, TorchDualPipeV):
        run = Replicated(make_layers(4), 4, shard_parts if inside else shard, schedule)
        x, target = make_batch(16)
        run.step(x, target)
        with CountCollectives() as counter:
            run.step(x, target)
        counts.append(counter.count)
    return counts


@pytest.mark.parametrize("inside", [False, True])
def test_sharded_stages_gather_and_reduce_no_more_often_than_under_torchs_schedule(ranks, inside):
    for ours, theirs in ranks(4).run(collectives, inside):
        for kind in ("_allgather_base_", "_reduce_scatter_base_"):
            assert 0 < ours[kind] <= theirs[kind], (ours, theirs)


def reductions_of_ddp() -> int:
    run = Replicated(make_layers(4), 4, replicate)
    x, target = make_batch(16)
    with CountCollectives() as counter:
        run.step(x, target)
    return counter.count["allreduce_"]


def test_replicated_stages_are_reduced_once_a_step(ranks):
    assert ranks(4).run(reductions_of_ddp) == [1] * 4


def communication_hook() -> None:
    def wrap(stage: nn.Module, group: dist.ProcessGroup) -> nn.Module:
        wrapped = DistributedDataParallel(stage, process_group=group)
        wrapped.register_comm_hook(None, lambda state, bucket: None)  # type: ignore[arg-type, return-value]
        return wrapped

    Replicated(make_layers(4), 4, wrap)


def test_a_communication_hook_is_refused_by_name(ranks):
    for raised in ranks(4).run_expecting_errors(communication_hook):
        assert "rank 0: stage 0 has a DistributedDataParallel with a communication hook" in raised.message


def split_model(name: str, how: str) -> None:
    groups = [[dist.new_group(members) for members in kind] for kind in (PIPELINES, REPLICAS)]
    pipeline, replicas = (
        next(g for g, m in zip(made, kind, strict=True) if dist.get_rank() in m)
        for made, kind in zip(groups, (PIPELINES, REPLICAS), strict=True)
    )
    n, batch = 3, zoo.make_batch(12)
    loss, expected = unsplit_step(zoo.make_model(name), batch)
    parts = split(zoo.make_model(name), pipeline, example=zoo.make_batch(2), device="cpu", dp_group=replicas)
    for stage in parts.stages:
        if how == "fully_shard":
            mesh = DeviceMesh.from_group(replicas, "cpu")
            for layer in stage.submod.model.model.layers:
                if dict(layer.named_parameters()):
                    fully_shard(layer, mesh=mesh)
            fully_shard(stage.submod, mesh=mesh)
        else:
            stage.submod = DistributedDataParallel(stage.submod, process_group=replicas)
    schedule = ScheduleDualPipeV(parts.stages, n, parts.loss_fn)
    mine = {key: value.chunk(2)[dist.get_rank(replicas)] for key, value in batch.items()}
    losses: list[torch.Tensor] = []
    for number in (1, 2):
        if dist.get_rank(pipeline) == 0:
            schedule.step(losses=losses, return_outputs=False, **mine)
        else:
            schedule.step()
        mean = mean_loss(schedule, losses)
        dist.all_reduce(mean, group=replicas)
        assert abs(mean / 2 - loss) <= zoo.CASTS_TO_FP32 * loss
        for parameter_name, parameter in parts.named_parameters():
            grad = parameter.grad.full_tensor() if how == "fully_shard" else parameter.grad
            assert_close([grad], [number * expected[parameter_name]], zoo.CASTS_TO_FP32, parameter_name)


def test_a_split_model_under_data_parallelism_counts_the_labels_of_all_replicas(ranks):
    ranks(4).run(split_model, "llama", "DDP")
    ranks(4).run(split_model, "llama tied", "DDP")
    ranks(4).run(split_model, "llama", "fully_shard")


def test_tied_weights_that_are_sharded_apart_are_refused(ranks):
    for raised in ranks(4).run_expecting_errors(split_model, "llama tied", "fully_shard"):
        assert raised.type == "ValueError"
        assert "model.embed_tokens.weight is tied between stages 0 and 3" in raised.message
