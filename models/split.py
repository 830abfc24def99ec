"""Cutting a model into the stages of a V: plan, then build.

There are two kinds. A model with a forward of its own, like those of transformers, is split by running that forward on
every stage (`models.plan`, `models.stage`). Plain layers are only dealt out (`models.stack`). The second kind, and any
model that is none of transformers, is split without importing transformers, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pipelining_dualpipev.errors import SplitError
from pipelining_dualpipev.models.agree import everywhere
from pipelining_dualpipev.models.deal import Balance
from pipelining_dualpipev.models.loss import LossFunction
from pipelining_dualpipev.models.parts import SplitModel
from pipelining_dualpipev.models.plan import SplitPlan, make_plan
from pipelining_dualpipev.models.replicas import start_replicas_alike
from pipelining_dualpipev.models.shapes import Plans
from pipelining_dualpipev.models.stack import Layers, StackPlan, build_stack, layers_of, plan_stack
from pipelining_dualpipev.models.stage import StageModule
from pipelining_dualpipev.models.surgery import glue_of, initialize, make_skeleton, refuse_hooks_on_glue
from pipelining_dualpipev.planning.placement import Placement

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["build_stages", "make_stages", "plan_skeleton", "plan_split", "split", "where"]

Example = Mapping[str, Any]


def plan_split(
    model_or_config: nn.Module | Layers | PretrainedConfig,
    num_ranks: int,
    *,
    example: Example | None = None,
    balance: Balance = "uniform",
) -> SplitPlan | StackPlan:
    """Plan, without processes or weights, how a model is split over ``num_ranks`` ranks.

    Args:
        model_or_config: a model, which is left as it is and may be on meta, or the config of a causal language model;
            or plain layers (see `split`), of which none is built.
        num_ranks: P; the model is cut into 2P stages.
        example: one microbatch of keyword inputs. Plain layers need none.
        balance: how layers are dealt out (see `split`).

    Raises:
        SplitError: if it cannot be split so, with the reason.
        TypeError: if it is nothing that can be split.
    """
    if (layers := layers_of(model_or_config)) is not None:
        return plan_stack(layers, Placement.v(num_ranks).num_stages, balance)
    if not isinstance(model_or_config, nn.Module):
        model_or_config = _on_meta(model_or_config)
    return _plan(model_or_config, num_ranks, example, balance)[0]


def _on_meta(config: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM, PretrainedConfig

    if not isinstance(config, PretrainedConfig):
        raise TypeError(f"a {type(config).__name__} cannot be split: give a model, its config, or a list of layers")
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def _plan(model: nn.Module, num_ranks: int, example: Example | None, balance: Balance) -> tuple[SplitPlan, nn.Module]:
    if example is None:
        raise TypeError(
            f"a {type(model).__name__} has a forward of its own, which is run once to see what crosses from stage to "
            "stage: give example=, one microbatch of its keyword inputs"
        )
    skeleton = make_skeleton(model)
    plan = plan_skeleton(skeleton, num_ranks, example, balance)
    refuse_hooks_on_glue(glue_of(model, plan.units))
    return plan, skeleton


def plan_skeleton(skeleton: nn.Module, num_ranks: int, example: Example, balance: Balance = "uniform") -> SplitPlan:
    """Plan the V of a skeleton (`models.surgery.make_skeleton`) over ``num_ranks`` ranks; it is left as it is."""
    return make_plan(skeleton, Placement.v(num_ranks).num_stages, example, balance)


def where(
    group_or_mesh: dist.ProcessGroup | DeviceMesh | None, device: torch.device | str | None
) -> tuple[dist.ProcessGroup | None, torch.device]:
    """The group and the device that a caller has meant."""
    group = group_or_mesh.get_group() if isinstance(group_or_mesh, DeviceMesh) else group_or_mesh
    if device is None:
        device = torch.accelerator.current_accelerator() or "cpu" if torch.accelerator.is_available() else "cpu"
    return group, torch.device(device)


def split(
    model: nn.Module | Layers,
    group_or_mesh: dist.ProcessGroup | DeviceMesh | None = None,
    *,
    example: Example | None = None,
    device: torch.device | str | None = None,
    dp_group: dist.ProcessGroup | None = None,
    balance: Balance = "uniform",
) -> SplitModel:
    """Cut a model into the 2P stages of a V over the P ranks of a group; each rank builds its two. Collective.

    Every stage runs the model's own forward, so this needs no code for any architecture. Plain layers, which are called
    one after another, are only dealt out: the step is given one input, a target, and a ``loss_fn`` of
    yours. Layers that belong together go into an ``nn.Sequential`` of their own, which stays whole.

    Args:
        model: a Hugging Face model, or any other with a forward that takes keywords; left as it is, each rank copies
            the weights of its own stages (those that several ranks hold are sent by the first of them). It may be on
            meta: then each rank makes its own weights, by the model's own initialisation, and no more. Or plain layers:
            an ``nn.Sequential``, a list of modules, or a list of functions without arguments that return one each. A
            function is called on the rank that owns its layer and nowhere else, and has to make all of the layer: what
            two functions are to share has to be on one rank.
        group_or_mesh: the pipeline's group, or a mesh of one dimension; by default the world.
        example: one microbatch of keyword inputs (``input_ids``, ``attention_mask``, ``labels``, ...), on every rank,
            with all kinds of inputs that a step will have; steps may leave some out, and have them of other shapes.
            With ``labels`` the last stage computes the model's own loss. Plain layers need no example.
        device: where the stages run; by default the current accelerator, or the CPU if there is none.
        dp_group: over which batches differ and gradients will be averaged; the model's own loss then counts the labels
            of all.
        balance: which layers go on which stage. ``"uniform"``: as many on each. ``"cost"``: so that a step takes least
            by simulation, with the floating point operations of the example's forward as what everything costs, the
            embedding and the head on rank 0 included (not for plain layers, which are not run). ``"parameters"``: the
            same with numbers of parameters. Or for each stage but the first the number of its first layer: with
            ``[1, 3, 5]`` stage 0 has layer 0, stage 1 has layers 1 and 2. The same on every rank.

    Raises:
        SplitError: on every rank, if the model cannot be split so, with the reason.
        TypeError: if it needs an example.
    """
    group, device = where(group_or_mesh, device)
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    own = Placement.v(num_ranks).stages_of(rank)
    built: list[SplitModel] = []

    def build() -> None:
        if (layers := layers_of(model)) is not None:
            stages, stack = build_stack(layers, plan_stack(layers, 2 * num_ranks, balance), own, device)
            built.append(SplitModel(stages, stack, skeleton=None, group=group, device=device, loss_fn=None))
            return
        if not isinstance(model, nn.Module):
            raise TypeError(f"a {type(model).__name__} cannot be split: give a model, or a list of layers")
        plan, skeleton = _plan(model, num_ranks, example, balance)
        loss_fn = LossFunction(plan.loss, dp_group) if plan.loss else None
        modules = build_stages(model, skeleton, plan, own, device, loss_fn)
        built.append(SplitModel(modules, plan, skeleton, group, device, loss_fn))

    everywhere(build, group, otherwise=SplitError)
    start_replicas_alike(built[0].modules, group)
    return built[0]


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
