"""Cutting a Hugging Face model into the stages of a V: plan, then build."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from transformers import AutoModelForCausalLM, PretrainedConfig

from pipelining_dualpipev.models.loss import LossFunction
from pipelining_dualpipev.models.plan import SplitPlan, make_plan
from pipelining_dualpipev.models.replicas import send_made_weights
from pipelining_dualpipev.models.save import save_pretrained
from pipelining_dualpipev.models.shapes import Plans
from pipelining_dualpipev.models.stage import StageModule
from pipelining_dualpipev.models.surgery import initialize, make_skeleton, refuse_hooks_on_glue
from pipelining_dualpipev.planning.placement import Placement

__all__ = ["SplitModel", "build_stages", "make_stages", "plan_skeleton", "plan_split", "split", "where"]


class SplitModel:
    """This rank's two stages of a model, under the model's own names.

    Attributes:
        stages: two torch `PipelineStage`, for a schedule.
        loss_fn: the model's own loss, for the schedule (None if the example had no labels).
        plan: what runs where.
        config: the model's.
    """

    def __init__(
        self,
        modules: Mapping[int, StageModule],
        plan: SplitPlan,
        skeleton: nn.Module,
        group: dist.ProcessGroup | None,
        device: torch.device,
        loss_fn: LossFunction | None,
    ) -> None:
        self._modules, self._group, self._skeleton = dict(modules), group, skeleton
        self.plan, self.loss_fn, self.config = plan, loss_fn, getattr(skeleton, "config", None)
        self.stages = [
            PipelineStage(module, stage, plan.num_stages, device, group=group) for stage, module in modules.items()
        ]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters by the model's own names; one that both stages share comes once, by its first name."""
        seen: set[nn.Parameter] = set()
        for module in self._modules.values():
            for name, parameter in module.model.named_parameters():
                if parameter not in seen:
                    seen.add(parameter)
                    yield self.plan.names[name], parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, each once."""
        return (parameter for _, parameter in self.named_parameters())

    def train(self, mode: bool = True) -> SplitModel:
        """Put all modules in training mode, or in evaluation mode if ``mode`` is False."""
        for module in self._modules.values():
            module.train(mode)
        return self

    def eval(self) -> SplitModel:
        """Put all modules in evaluation mode."""
        return self.train(False)

    def explain(self) -> str:
        """The plan in words."""
        return self.plan.explain()

    def save_pretrained(
        self, directory: str | PathLike[str], tokenizer: Any = None, max_shard_size: int | str = "5GB"
    ) -> None:
        """Write a checkpoint that ``from_pretrained`` of plain transformers opens. Collective.

        Every rank writes its own weights as safetensors shards; rank 0 adds the index, the config, the generation
        config and the tokenizer if one is given. All of it is written beside ``directory`` and then moved there, so
        that what is found there is always whole. The file system must be one that all ranks share.

        Args:
            directory: created; what was there before is replaced.
            tokenizer: anything with a ``save_pretrained``.
            max_shard_size: bytes, or text like ``"5GB"``.

        Raises:
            OSError: on every rank, if one could not write.
        """
        save_pretrained(
            [module.model for module in self._modules.values()],
            self._skeleton,
            self.plan,
            list(self._modules),
            directory,
            group=self._group,
            tokenizer=tokenizer,
            max_shard_size=max_shard_size,
        )


def plan_split(
    model_or_config: nn.Module | PretrainedConfig, num_ranks: int, *, example: Mapping[str, Any]
) -> SplitPlan:
    """Plan, without processes or weights, how a model is split over ``num_ranks`` ranks.

    Args:
        model_or_config: a model, which is left as it is and may be on meta, or the config of a causal language model.
        num_ranks: P; the model is cut into 2P stages.
        example: one microbatch of keyword inputs.

    Raises:
        SplitError: if it cannot be split so, with the reason.
    """
    if isinstance(model_or_config, PretrainedConfig):
        with torch.device("meta"):
            model_or_config = AutoModelForCausalLM.from_config(model_or_config)
    return _plan(model_or_config, num_ranks, example)[0]


def _plan(model: nn.Module, num_ranks: int, example: Mapping[str, Any]) -> tuple[SplitPlan, nn.Module]:
    skeleton = make_skeleton(model)
    plan = plan_skeleton(skeleton, num_ranks, example)
    refuse_hooks_on_glue(model, plan.units)
    return plan, skeleton


def plan_skeleton(skeleton: nn.Module, num_ranks: int, example: Mapping[str, Any]) -> SplitPlan:
    """Plan the V of a skeleton (`models.surgery.make_skeleton`) over ``num_ranks`` ranks; it is left as it is."""
    return make_plan(skeleton, Placement.v(num_ranks).num_stages, example)


def where(
    group_or_mesh: dist.ProcessGroup | DeviceMesh | None, device: torch.device | str | None
) -> tuple[dist.ProcessGroup | None, torch.device]:
    """The group and the device that a caller has meant."""
    group = group_or_mesh.get_group() if isinstance(group_or_mesh, DeviceMesh) else group_or_mesh
    if device is None:
        device = torch.accelerator.current_accelerator() or "cpu" if torch.accelerator.is_available() else "cpu"
    return group, torch.device(device)


def split(
    model: nn.Module,
    group_or_mesh: dist.ProcessGroup | DeviceMesh | None = None,
    *,
    example: Mapping[str, Any],
    device: torch.device | str | None = None,
    dp_group: dist.ProcessGroup | None = None,
) -> SplitModel:
    """Cut a Hugging Face model into the 2P stages of a V over the P ranks of a group; each rank builds its two.

    Every stage runs the model's own forward, so this needs no code for any architecture.

    Args:
        model: left as it is; each rank copies the weights of its own stages. It may be on meta: then each rank makes
            its own weights, by the model's own initialisation, and no more.
        group_or_mesh: the pipeline's group, or a mesh of one dimension; by default the world.
        example: one microbatch of keyword inputs (``input_ids``, ``attention_mask``, ``labels``, ...), on every rank.
            Shapes matter, values do not. With ``labels`` the last stage computes the model's own loss.
        device: where the stages run; by default the current accelerator, or the CPU if there is none.
        dp_group: over which batches differ and gradients will be averaged; the loss then counts the labels of all.

    Raises:
        SplitError: on every rank, if the model cannot be split so, with the reason.
    """
    group, device = where(group_or_mesh, device)
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    plan, skeleton = _plan(model, num_ranks, example)
    loss_fn = LossFunction(plan.loss, dp_group) if plan.loss else None
    own = Placement.v(num_ranks).stages_of(rank)
    modules = build_stages(model, skeleton, plan, own, device, loss_fn)
    send_made_weights(model, plan, modules, group)
    return SplitModel(modules, plan, skeleton, group, device, loss_fn)


def build_stages(
    model: nn.Module,
    skeleton: nn.Module,
    plan: SplitPlan,
    stages: tuple[int, ...],
    device: torch.device,
    loss_fn: LossFunction | None,
) -> dict[int, StageModule]:
    """The modules of the given stages, with weights; a parameter that two of them share is one object."""
    weights = dict(model.named_parameters(remove_duplicate=False))
    parameters: dict[str, nn.Parameter] = {}
    for first in {plan.names[name] for stage in stages for name in plan.local_parameters(stage)}:
        weight = weights[first]
        data = torch.empty_like(weight, device=device) if weight.is_meta else weight.detach().to(device, copy=True)
        parameters[first] = nn.Parameter(data, requires_grad=weight.requires_grad)
    modules = make_stages(skeleton, plan, stages, parameters, device, loss_fn)
    made = {parameter for first, parameter in parameters.items() if weights[first].is_meta}
    if made:
        _initialize(made, modules)
    return modules


def make_stages(
    skeleton: nn.Module,
    plan: SplitPlan,
    stages: tuple[int, ...],
    parameters: Mapping[str, nn.Parameter],
    device: torch.device,
    loss_fn: LossFunction | None,
) -> dict[int, StageModule]:
    """The modules of the given stages around ``parameters``, which are given by their first names."""
    plans = Plans(skeleton, plan)
    return {
        stage: StageModule(
            skeleton,
            plan,
            plans,
            stage,
            {name: parameters[plan.names[name]] for name in plan.local_parameters(stage)},
            device,
            loss_fn,
        )
        for stage in stages
    }


def _initialize(fresh: set[nn.Parameter], modules: Mapping[int, StageModule]) -> None:
    done: set[nn.Parameter] = set()
    for stage in modules.values():
        for module in stage.model.modules():
            own = {parameter for parameter in module.parameters(recurse=False) if parameter in fresh}
            if own - done:
                initialize(stage.model, module)
                done |= own
