"""What each stage computes and holds for one microbatch, found out by a forward of the whole model on no data.

Formulas for this are written for one architecture at a time, and are wrong for the next. But what autograd keeps of a
forward it asks for by name: every tensor that is saved goes through ``saved_tensors_hooks``. So the model runs once on
the meta device, where tensors have shapes and no memory, and three things are watched:

1. calls of units, which the plan has in order, so that it is known whose stage is running;
2. saved tensors: each storage counts once for each stage, parameters do not count;
3. matrix products: those with a weight are computed again for the weight's gradient (W), the others are not.

Attention counts as a kernel that never writes the matrix of its weights to memory (flash attention): it keeps its
inputs, its output, and one number for each query. Where a value decides (``if mask.all()``), the answer is yes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from pipelining_dualpipev._torch import GROUPED_MM, TorchDispatchMode, pytree, storage_of
from pipelining_dualpipev.errors import SplitError
from pipelining_dualpipev.models.plan import SplitPlan

__all__ = ["StageFootprint", "measure_footprint"]

_WITH_WEIGHTS = {torch.ops.aten.mm, torch.ops.aten.addmm}
_OF_ACTIVATIONS = {torch.ops.aten.bmm, torch.ops.aten.baddbmm}


@dataclass
class StageFootprint:
    """Of one stage, for one microbatch.

    Attributes:
        saved_bytes: what autograd keeps from the forward until the input gradient, in bytes.
        checkpointed_bytes: the same where each layer keeps its input only, and runs again in the backward.
        largest_layer_bytes: what such a layer keeps while it is run again; the most of any layer.
        weight_flops: of products with weights, in the forward.
        other_flops: of the other products, in the forward.
    """

    saved_bytes: int = 0
    checkpointed_bytes: int = 0
    largest_layer_bytes: int = 0
    weight_flops: float = 0.0
    other_flops: float = 0.0


def measure_footprint(model: nn.Module, plan: SplitPlan, example: Mapping[str, Any]) -> list[StageFootprint]:
    """Run a model that is on meta on an example, and tell for each stage of a plan what it computes and holds.

    Args:
        model: on meta, in the type that it will have; left as it is.
        plan: of its split.
        example: the one of the plan.

    Raises:
        SplitError: if the model's forward cannot run without data, with the reason.
    """
    model = copy.deepcopy(model).train()
    watch = _Watch(plan, {storage_of(parameter) for parameter in model.parameters()})
    for fqn in plan.units.units:
        unit = model.get_submodule(fqn)
        unit.register_forward_pre_hook(watch.enter, with_kwargs=True)
        unit.register_forward_hook(watch.leave)
    inputs = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), dict(example))
    try:
        with torch.enable_grad(), watch.saving(), _FlashAttention(watch), _Products(watch):
            model(**inputs, **plan.constants)
    except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
        raise SplitError(
            f"the model's forward does not run without data, so what it holds is not known: {type(error).__name__}: "
            f"{error}. Measure a real step instead, with torch.profiler and profile_memory=True"
        ) from error
    return watch.stages


@dataclass
class _Watch:
    """Which unit is running, and what that means for its stage."""

    plan: SplitPlan
    parameters: set[int]
    calls: int = 0
    in_layer: bool = False
    layer_bytes: int = 0
    seen: dict[int, set[int]] = field(default_factory=dict)
    # So that no storage is freed and its number given to another.
    kept: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stages = [StageFootprint() for _ in range(self.plan.num_stages)]
        self.seen = {stage: set() for stage in range(self.plan.num_stages)}

    @property
    def stage(self) -> int:
        return self.plan.events[max(self.calls - 1, 0)].stage

    @property
    def now(self) -> StageFootprint:
        return self.stages[self.stage]

    def enter(self, unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.calls += 1
        self.in_layer, self.layer_bytes = self.plan.events[self.calls - 1].is_layer, 0
        if self.in_layer:
            inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            self.now.checkpointed_bytes += sum(tensor.nbytes for tensor in inputs if tensor.requires_grad)

    def leave(self, unit: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.in_layer = False
        self.now.largest_layer_bytes = max(self.now.largest_layer_bytes, self.layer_bytes)
        self.layer_bytes = 0

    @contextmanager
    def saving(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor):
            yield

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = storage_of(tensor)
        if storage not in self.parameters and storage not in self.seen[self.stage]:
            self.seen[self.stage].add(storage)
            self.kept.append(tensor)
            size = tensor.untyped_storage().nbytes()
            self.now.saved_bytes += size
            if self.in_layer:
                self.layer_bytes += size
            else:
                self.now.checkpointed_bytes += size
        return tensor


class _Products(TorchDispatchMode):
    """Counts matrix products, and answers where a value decides."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return args[0].dtype.is_floating_point or True
        output = func(*args, **(kwargs or {}))
        kind = func.overloadpacket
        if kind in _WITH_WEIGHTS:
            self._watch.now.weight_flops += flop_registry[kind](*args, **(kwargs or {}), out_val=output)
        elif kind in _OF_ACTIVATIONS:
            self._watch.now.other_flops += flop_registry[kind](*args, **(kwargs or {}), out_val=output)
        elif func is GROUPED_MM:
            self._watch.now.weight_flops += 2.0 * output.numel() * args[0].shape[-1]
        return output


class _FlashAttention(TorchFunctionMode):
    """Has attention keep what a flash kernel keeps; on meta it would be computed in single steps."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        query, key, value = args[:3] if len(args) >= 3 else (kwargs[name] for name in ("query", "key", "value"))
        products = query.shape[-2] * key.shape[-2] * (query.shape[-1] + value.shape[-1])
        self._watch.now.other_flops += 2.0 * query.shape[:-2].numel() * products
        return _Attention.apply(query, key, value)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        # Kernels give [batch, length, heads, width], seen as [batch, heads, length, width].
        output = query.new_empty((*query.shape[:-3], query.shape[-2], query.shape[-3], value.shape[-1]))
        output = output.transpose(-3, -2)
        sums = query.new_empty(query.shape[:-1], dtype=torch.promote_types(query.dtype, torch.float32))
        ctx.save_for_backward(query, key, value, output, sums)
        return output
