"""The only file that touches names of torch which are not public.

Whatever torch may rename between releases is adapted here, so that a new release breaks one file.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.graph import GradientEdge
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, _Action
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pipelining_dualpipev.planning.actions import Action, Order
from pipelining_dualpipev.planning.placement import Placement

__all__ = [
    "GROUPED_MM",
    "TORCH_SCHEDULES",
    "UNIQUE",
    "GradientHooks",
    "TorchDispatchMode",
    "TorchSchedule",
    "WrapperTensor",
    "as_no_view",
    "compile_apart",
    "compiled_call",
    "gloo_group_beside",
    "grouped_mm",
    "has_comm_hook",
    "has_gradient_hooks",
    "has_hooks",
    "is_compiled",
    "is_profiling",
    "is_transforming",
    "is_view",
    "on_conversion",
    "pytree",
    "replace_call",
    "run_backward",
    "saving_hooks",
    "storage_of",
    "to_torch_order",
    "torch_order",
    "torch_programs",
    "version_of",
    "writes_in_place",
]


def to_torch_order(order: Order) -> dict[int, list[_Action | None]]:
    """The same order in torch's own action type."""
    return {rank: [_to_torch_action(action) for action in actions] for rank, actions in order.items()}


def _to_torch_action(action: Action) -> _Action:
    return _Action.from_str(str(action))


_groups_made: Counter[tuple[int, tuple[int, ...]]] = Counter()
_stores: dict[int, Any] = {}  # keeps a counted store alive, so that its id is not given to another one


def gloo_group_beside(group: dist.ProcessGroup | None) -> tuple[Any, dist.Store, timedelta]:
    """A gloo group of the same ranks as ``group``, for small messages between hosts; collective over ``group``.

    With it a store of its own, and the timeout of ``group``; its own is longer, so that nobody waits for that.

    ``dist.new_group`` is no good here: it is collective over the *world*, which a pipeline that is one of several does
    not want to be, and with ``use_local_synchronization=True`` it names groups by how many this rank has made, so ranks
    that made different numbers of groups wait for each other forever. A name of our own, made from the members and from
    how many such groups these members have, is the same on all of them.
    """
    store = dist.distributed_c10d._get_default_store()
    members = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
    _stores[id(store)] = store
    key = (id(store), members)
    _groups_made[key] += 1
    prefix = f"pipelining_dualpipev/{'-'.join(map(str, members))}/{_groups_made[key]}"
    own_store = dist.PrefixStore(prefix, store)
    world = group or dist.group.WORLD
    assert world is not None, "torch.distributed is initialised"
    timeout = min(world._get_backend(device).options._timeout for device in world._device_types)
    # torch's stubs do not know a backend's methods, hence Any.
    made = dist.ProcessGroupGloo(own_store, dist.get_rank(group), len(members), 2 * timeout)
    return made, dist.PrefixStore("words", own_store), timeout


class TorchSchedule(PipelineScheduleMulti):
    """torch's multi-stage schedule with its machinery taken out: what remains is its contract.

    Sub-classes implement ``step`` and ``eval``. The attributes that torch's own classes and trainers read are kept.
    """

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., Any] | None,
        *,
        args_chunk_spec: Any,
        kwargs_chunk_spec: Any,
        output_merge_spec: Any,
        scale_grads: bool,
        rank_of: Sequence[int],
    ) -> None:
        super().__init__(
            list(stages),
            n_microbatches,
            loss_fn,
            args_chunk_spec=args_chunk_spec,
            kwargs_chunk_spec=kwargs_chunk_spec,
            output_merge_spec=output_merge_spec,
            scale_grads=scale_grads,
        )
        self.num_stages = stages[0].num_stages
        self.stage_index_to_group_rank = dict(enumerate(rank_of))
        for stage in stages:
            stage.stage_index_to_group_rank = self.stage_index_to_group_rank

    @property
    def n_microbatches(self) -> int:
        """Microbatches in a step."""
        return self._n_microbatches

    @property
    def loss_fn(self) -> Callable[..., Any] | None:
        """The loss function, or None where steps run forward only."""
        return self._loss_fn

    @property
    def stages(self) -> list[Any]:
        """This rank's stages, lowest index first."""
        return self._stages

    @property
    def chunk_specs(self) -> tuple[Any, Any, Any]:
        """How positional and keyword inputs are cut along the batch, and how outputs are put together again."""
        return self._args_chunk_spec, self._kwargs_chunk_spec, self._output_merge_spec

    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return self.step(
            arg_mbs=arg_mbs,
            kwarg_mbs=kwarg_mbs,
            target_mbs=target_mbs,
            losses=losses,
            return_outputs=return_outputs,
            loss_kwargs=loss_kwargs,
        )


class _TorchGenerator(NamedTuple):
    """How to get the order of one of torch's classes, without a process group."""

    schedule: type[PipelineScheduleMulti]
    placement: Callable[[int], Placement]
    fitting: Callable[[int, int], int]
    """The nearest number of microbatches that the class takes, for a number of ranks."""


def _round_to_ranks(num_ranks: int, n: int) -> int:
    return -(-n // num_ranks) * num_ranks


TORCH_SCHEDULES = {
    "Interleaved1F1B": _TorchGenerator(
        schedules.ScheduleInterleaved1F1B, lambda num_ranks: Placement.loop(num_ranks, 2), _round_to_ranks
    ),
    "InterleavedZeroBubble": _TorchGenerator(
        schedules.ScheduleInterleavedZeroBubble, lambda num_ranks: Placement.loop(num_ranks, 2), _round_to_ranks
    ),
    "ZBVZeroBubble": _TorchGenerator(schedules.ScheduleZBVZeroBubble, Placement.v, lambda num_ranks, n: n),
    "DualPipeV": _TorchGenerator(schedules.ScheduleDualPipeV, Placement.v, lambda num_ranks, n: max(n, 2 * num_ranks)),
}
"""Torch's own multi-stage schedules with two stages a rank, by name."""


def torch_order(name: str, num_ranks: int, n_microbatches: int) -> dict[int, list[_Action | None]]:
    """The order that torch's class of that name runs, every rank's, with None for torch's bubbles.

    The class is not constructed, since that takes a process group; its generator needs no more than these numbers.
    """
    generator = object.__new__(TORCH_SCHEDULES[name].schedule)
    generator.pp_group_size = num_ranks
    generator._n_microbatches = n_microbatches
    generator._num_stages = generator.num_stages = 2 * num_ranks  # type: ignore[attr-defined]
    generator.n_local_stages = 2  # type: ignore[attr-defined]
    rounds = max(1, n_microbatches // num_ranks)
    generator.number_of_rounds = rounds  # type: ignore[attr-defined]
    generator.microbatches_per_round = n_microbatches // rounds  # type: ignore[attr-defined]
    generator.pipeline_order = {
        rank: generator._calculate_single_rank_operations(rank)  # type: ignore[attr-defined]
        for rank in range(num_ranks)
    }
    if name == "InterleavedZeroBubble":
        return generator._add_bubbles_to_actions(2 * num_ranks)  # type: ignore[attr-defined]
    return generator.pipeline_order


def torch_programs(
    name: str, num_ranks: int, n_microbatches: int, *, defer_pp_recv: bool = False
) -> dict[int, list[Any]]:
    """That order as torch lowers it: with its sends and receives, the latter moved if ``defer_pp_recv``."""
    rank_of = TORCH_SCHEDULES[name].placement(num_ranks).rank_of
    order = torch_order(name, num_ranks, n_microbatches)
    without_bubbles = {rank: [action for action in actions if action is not None] for rank, actions in order.items()}
    programs = schedules._add_send_recv(without_bubbles, lambda stage: rank_of[stage], len(rank_of))
    return schedules._defer_recv_ops(programs, lambda stage: rank_of[stage]) if defer_pp_recv else programs


def run_backward(edges: Sequence[GradientEdge], gradients: Sequence[torch.Tensor]) -> None:
    """``torch.autograd.backward(edges, gradients)`` without its checks: a fifth of the time of a small one."""
    torch.autograd.Variable._execution_engine.run_backward(
        tuple(edges), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


class WrapperTensor(torch.Tensor):
    """A tensor without storage, all of whose operations come to ``__torch_dispatch__``."""

    @staticmethod
    def __new__(cls, like: torch.Tensor, device: torch.device | str, *_: Any) -> Any:
        """One that has shape, strides and type of ``like``, and says that it is on ``device``."""
        return torch.Tensor._make_wrapper_subclass(
            cls,
            like.size(),
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=like.dtype,
            device=torch.device(device),
            requires_grad=False,
        )

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


GROUPED_MM = torch.ops.aten._grouped_mm.default
"""What experts are multiplied by where it is one operation: rows [T, K], groups [E, K, N], offsets -> [T, N]."""
UNIQUE = torch.ops.aten._unique2.default
"""What ``torch.unique`` comes down to."""


def storage_of(tensor: torch.Tensor) -> int:
    """A number that tensors have in common which share memory, also on meta, where there is no address."""
    return tensor.untyped_storage()._cdata


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd knows the tensor as a view of another."""
    return tensor._is_view()


def as_no_view(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or the same data that autograd does not know as a view: for one whose base nobody else has."""
    return torch.ops.aten._unsafe_view(tensor, tensor.shape) if tensor._is_view() else tensor


def version_of(tensor: torch.Tensor) -> int:
    """How often the tensor, or one that shares its memory, has been written in place; -1 if nobody counts."""
    return -1 if tensor.is_inference() else tensor._version


def writes_in_place(operation: Any) -> bool:
    """Whether a function is an operation of torch that writes into its first argument."""
    return isinstance(operation, torch._ops.OpOverload) and operation._schema.is_mutable


def has_comm_hook(module: DistributedDataParallel) -> bool:
    """Whether gradients are to be averaged in a way of the user's own."""
    return bool(module._comm_hooks)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(module: torch.nn.Module, *, but_of: str) -> bool:
    """Whether hooks are registered on a module, but for those that a package of that name has put there itself."""
    hooks = (hook for kind in _HOOKS for hook in getattr(module, kind).values())
    return any(not getattr(hook, "__module__", "").startswith(f"{but_of}.") for hook in hooks)


def replace_call(module: torch.nn.Module, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Let a call of the module, with its hooks, be what ``make`` makes of it."""
    module._call_impl = make(module._call_impl)  # type: ignore[method-assign]


def on_conversion(module: torch.nn.Module, then: Callable[[Callable[[torch.Tensor], torch.Tensor]], None]) -> None:
    """Let ``to``, ``half`` and the like of the module or of one around it also call ``then`` with what they apply."""
    apply = module._apply

    def both(fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> torch.nn.Module:
        converted = apply(fn, recurse)
        then(fn)
        return converted

    module._apply = both  # type: ignore[method-assign]


grouped_mm: Callable[..., torch.Tensor] = torch._grouped_mm
"""The product of groups of rows with a matrix each; ``torch.nn.functional.grouped_mm`` comes down to it."""


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Whether somebody has registered a hook for the tensor's gradient, before or after it is accumulated."""
    return bool(tensor._backward_hooks) or bool(tensor._post_accumulate_grad_hooks)


class GradientHooks:
    """The gradient hooks of a leaf, taken off it until they are put back."""

    def __init__(self, tensor: torch.Tensor) -> None:
        # Autograd holds these very dicts, and so does the handle by which a hook is removed: they are emptied, not
        # exchanged.
        own = (tensor._backward_hooks, tensor._post_accumulate_grad_hooks)
        self._hooks = [(hooks, dict(hooks)) for hooks in own if hooks]
        for hooks, _ in self._hooks:
            hooks.clear()

    def put_back(self) -> None:
        """Put them back; does nothing the second time."""
        taken, self._hooks = self._hooks, []
        for hooks, right in taken:
            later = dict(hooks)
            hooks.clear()
            hooks.update(right | later)


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether a call of the module runs compiled code, by ``module.compile()`` or ``torch.compile(module)``."""
    dynamo = sys.modules.get("torch._dynamo")  # slow to import, and there is nothing compiled without it
    wrapped = dynamo is not None and isinstance(module, dynamo.OptimizedModule)
    return wrapped or module._compiled_call_impl is not None


@dataclass
class _Apart:
    """A compiler that is no other's equal, so that dynamo finds no code for it that another has compiled."""

    compile: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.compile(*args, **kwargs)


def compiled_call(module: torch.nn.Module) -> Callable[..., Any]:
    """What a call of a compiled module runs."""
    return module._compiled_call_impl or vars(module)["forward"]


def compile_apart(module: torch.nn.Module) -> tuple[str, Callable[..., Any]] | None:
    """Compile what a call of a compiled module runs once more, with the same compiler and options.

    Returns:
        The name of the module's attribute that this is to take the place of, and itself. None if torch has changed.
    """
    from torch._dynamo.eval_frame import innermost_backend

    name = "forward" if module._compiled_call_impl is None else "_compiled_call_impl"
    compiled: Any = compiled_call(module)
    try:
        how = compiled.__closure__[compiled.__code__.co_freevars.index("self")].cell_contents
        runs, options = compiled._torchdynamo_orig_callable, {"fullgraph": how.fullgraph, "dynamic": how._dynamic}
        return name, torch.compile(runs, backend=_Apart(innermost_backend(how.callback)), **options)
    except (AttributeError, TypeError, ValueError):
        return None


def is_profiling() -> bool:
    """Whether a profiler of torch is recording in this process."""
    return bool(torch.autograd._profiler_enabled())


def is_transforming() -> bool:
    """Whether we are inside ``torch.func``: ``vmap``, ``grad`` and the like."""
    return torch._C._are_functorch_transforms_active()


def saving_hooks() -> Any:
    """The innermost ``saved_tensors_hooks`` that are in force, for comparison; checkpointing is made of them."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)
