"""Stages that are replicated or sharded over data-parallel ranks: one reduction a step, after its last backward.

A pipeline calls a module's backward n times a step and wants its gradients reduced once. Both of torch's wrappers can
reduce after every backward only, so each is told otherwise::

    dp 0   rank 0 ── rank 1   a pipeline
             │          │     replicas of the same stages: their gradients are to be averaged, once a step
    dp 1   rank 0 ── rank 1   another

*DistributedDataParallel* is run under ``no_sync``, and its gradients are averaged here when the step is over: each
parameter once, also one that two wrapped stages share. Its own reducer would wait for hooks of the very last backward,
which a parameter that this one microbatch did not use never gives.

*fully_shard* gathers, reduces and frees by hooks of its own. They are told before each backward whether it is the
stage's last one; until then, gradients add up unsharded. That one reduces them in its midst, so weight gradients that
have been put off are computed before it, and its own are not put off.

Its replicas meet at each gather, so their pipelines have to run one order: that is made sure of when they are made.

Before gradients are averaged, the replicas tell each other whether their pipelines' step went well: if it failed in
one of them it fails in all, and none waits for what another will never send.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from pipelining_dualpipev.errors import PipelineError, RanksDisagreeError
from pipelining_dualpipev.runtime.control import Control, DistributedControl
from pipelining_dualpipev.runtime.lending import lend
from pipelining_dualpipev.runtime.transport import Handle

__all__ = ["DataParallelStage", "Replicas", "refuse_other_orders", "replicated_modules", "stage_module"]

_BUCKET_BYTES = 25 * 2**20  # DistributedDataParallel's default


def stage_module(module: nn.Module) -> nn.Module:
    """The module that says what a stage needs (``required_inputs`` and such), without DistributedDataParallel."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def replicated_modules(module: nn.Module) -> list[tuple[str, DistributedDataParallel]]:
    """The DistributedDataParallel in a stage: around it, or around parts of it."""
    return [(name, inner) for name, inner in module.named_modules() if isinstance(inner, DistributedDataParallel)]


class DataParallelStage:
    """What has to be done around the forwards and backwards of one stage."""

    def __init__(self, module: nn.Module) -> None:
        self._replicated = [inner for _, inner in replicated_modules(module)]
        self._sharded = [inner for inner in module.modules() if isinstance(inner, FSDPModule)]
        self._syncs: bool | None = None

    @property
    def is_sharded(self) -> bool:
        """Whether the last backward itself reduces gradients, so that all of them have to be there with it."""
        return bool(self._sharded)

    def forward(self) -> AbstractContextManager[object]:
        """To be entered around each forward."""
        if not self._replicated:
            return nullcontext()
        stack = ExitStack()
        for module in self._replicated:
            stack.enter_context(module.no_sync())
        return stack

    def before_backward(self, *, last: bool) -> None:
        """To be called before each backward, with whether it is the step's last one of this stage."""
        if last is self._syncs:
            return
        for module in self._sharded:
            module.set_is_last_backward(last)
            module.set_reshard_after_backward(last, recurse=False)
            module.set_requires_gradient_sync(last, recurse=False)
        self._syncs = last


def refuse_other_orders(modules: Sequence[nn.Module], order: int, pipeline: Control) -> None:
    """Make sure that all pipelines which share sharded stages run the same order. Collective over all their ranks.

    Args:
        modules: this rank's stages.
        order: of this pipeline, as a number that tells orders apart.
        pipeline: this rank's line to the others of its pipeline, which are told.

    Raises:
        RanksDisagreeError: on every rank of these pipelines, which would have come to wait for each other in a step.
    """
    others: set[int] = set()
    for group in _sharding_groups(modules):
        orders = DistributedControl(group).gather(order)
        orders.wait()
        others |= set(orders.result) - {order}
    told = pipeline.gather(others)
    told.wait()
    for rank, others in enumerate(told.result):
        if others:
            raise RanksDisagreeError(
                f"the stages of rank {rank} are sharded by fully_shard over pipelines that run other orders than this "
                f"one (by digest {min(others)}, here {order}), so that they would wait for each other: give all "
                "pipelines the same n_microbatches, zb and costs (those that one of them has measured)"
            )


def _sharding_groups(modules: Sequence[nn.Module]) -> list[dist.ProcessGroup]:
    parameters = (parameter for module in modules for parameter in module.parameters())
    meshes = {parameter.device_mesh: None for parameter in parameters if isinstance(parameter, DTensor)}
    groups = {id(group): group for mesh in meshes for group in mesh.get_all_groups()}
    return list(groups.values())


class Replicas:
    """Averages the gradients of this rank's replicated stages over their replicas.

    Making one is collective over the replicas.

    Args:
        modules: this rank's stages.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = [inner for module in modules for _, inner in replicated_modules(module)]
        groups = {id(module.process_group): module.process_group for module in self._modules}
        self._groups = list(groups.values())
        self._controls = [DistributedControl(group) for group in self._groups]

    def end_step(self, *, failed: bool) -> Generator[Handle, None, None]:
        """Average the gradients of a training step; to be called after every one, also one that failed.

        Raises:
            PipelineError: if it failed in another replica of the pipeline, or left a parameter without gradient.
        """
        for group, control in zip(self._groups, self._controls, strict=True):
            parameters = list(self._parameters(group))
            have = [int(parameter.grad is not None) for _, parameter, _ in parameters]
            reply = control.all_max([int(failed), *have])
            yield reply
            others_failed, *used = reply.result
            if failed:
                continue  # this rank's own error is about to be raised
            if others_failed:
                raise PipelineError(
                    "the step failed in another data-parallel replica of this pipeline, whose ranks say why: its "
                    "gradients were not averaged here, zero them"
                )
            gradients = []
            for (name, parameter, may_be_unused), used_somewhere in zip(parameters, used, strict=True):
                if used_somewhere:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    gradients.append(parameter.grad)
                elif not may_be_unused:
                    raise PipelineError(
                        f"{name} got no gradient in this step, which DistributedDataParallel takes for a mistake: "
                        "freeze it, or wrap the stage with find_unused_parameters=True"
                    )
            _average(gradients, group)

    def _parameters(self, group: dist.ProcessGroup) -> Iterator[tuple[str, nn.Parameter, bool]]:
        """Name and parameter of what is averaged over a group, each once; and whether it may be without gradient."""
        seen: set[nn.Parameter] = set()
        for module in self._modules:
            if module.process_group is group:
                for name, parameter in module.module.named_parameters():
                    if parameter.requires_grad and name not in module.parameters_to_ignore and parameter not in seen:
                        seen.add(parameter)
                        yield name, parameter, module.find_unused_parameters


def _average(gradients: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Let each be the mean over the group, in buckets of one type and device that are all on their way at once."""
    buckets: list[list[torch.Tensor]] = []
    open_buckets: dict[tuple[torch.dtype, torch.device], tuple[list[torch.Tensor], int]] = {}
    for gradient in gradients:
        kind = (gradient.dtype, gradient.device)
        bucket, held = open_buckets.get(kind, ([], _BUCKET_BYTES))
        if held >= _BUCKET_BYTES:
            bucket, held = [], 0
            buckets.append(bucket)
        bucket.append(gradient)
        open_buckets[kind] = (bucket, held + gradient.nbytes)
    on_their_way = []
    for bucket in buckets:
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket]).div_(dist.get_world_size(group))
        on_their_way.append((dist.all_reduce(lend(flat), group=group, async_op=True), flat))
    for bucket, (work, flat) in zip(buckets, on_their_way, strict=True):
        work.wait()
        for gradient, mean in zip(bucket, flat.split([gradient.numel() for gradient in bucket]), strict=True):
            gradient.copy_(mean.view_as(gradient))
