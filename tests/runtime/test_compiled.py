"""Compiled modules are split as others are: I then W is a plain backward, and the code for B is left alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import aot_module_simplified, make_boxed_func
from torch import fx, nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from pipelining_dualpipev.planning import Placement, dualpipev_order, lower
from pipelining_dualpipev.runtime import compiled
from pipelining_dualpipev.runtime.weight_grad import AtOperations
from pipelining_dualpipev.testing import Stack
from pipelining_dualpipev.testing.step import LocalPipeline
from tests.runtime.test_weight_grad import assert_same_gradients, split_backward

# Dynamo looks at the .grad of what it is given, and reports the warning about that as an error.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture(autouse=True)
def nothing_compiled_yet():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Overwriting(fx.Interpreter):
    """Runs a graph, and writes over whatever of its own it needs no more, as a compiler does that reuses memory."""

    def __init__(self, graph: fx.GraphModule, kept: set[int]) -> None:
        super().__init__(graph)
        self.kept = kept
        self.places = {node: place for place, node in enumerate(graph.graph.nodes)}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        used_later = {
            value.untyped_storage().data_ptr()
            for node, value in {**self.env, n: result}.items()
            if isinstance(value, torch.Tensor) and any(self.places[user] > self.places[n] for user in node.users)
        }
        if n.op != "output":
            for value in list(self.env.values()):
                if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel():
                    at = value.untyped_storage().data_ptr()
                    if at not in used_later and at not in self.kept:
                        value.detach().fill_(torch.nan)
        return result


def overwriting(graph: fx.GraphModule, examples: list[torch.Tensor]) -> Callable[..., Any]:
    kept: set[int] = set()

    def run(graph: fx.GraphModule, _: Any, *, forward: bool) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if forward:  # what comes from outside, parameters too
                kept.update(arg.untyped_storage().data_ptr() for arg in args)
            return Overwriting(graph, kept).run(*args)

        return make_boxed_func(call)

    return aot_module_simplified(
        graph,
        examples,
        fw_compiler=lambda graph, examples: run(graph, examples, forward=True),
        bw_compiler=lambda graph, examples: run(graph, examples, forward=False),
    )


class Block(nn.Module):
    """What is put off in compiled code: the weights of ``up``, ``mid`` and ``down``."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.up, self.mid, self.down = nn.Linear(width, 8), Conv1D(8, 8), nn.Linear(8, width, bias=False)
        self.norm, self.own = nn.LayerNorm(8), nn.Parameter(torch.randn(width, width) / width)
        self.breaks = False
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.mid(torch.tanh(self.norm(self.up(x)))))
        if self.breaks:
            torch._dynamo.graph_break()
        return x + torch.tanh(self.down(y) @ self.own)


class Checkpointed(nn.Module):
    def __init__(self, block: nn.Module, *, use_reentrant: bool) -> None:
        super().__init__()
        self.block, self.use_reentrant = block, use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=self.use_reentrant)


class Owning(nn.Module):
    """Has a matrix of its own, so its operations are looked at, and the compiled block within is called meanwhile."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.matrix = block, nn.Parameter(torch.eye(4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x @ self.matrix)


def compiled_blocks(stage: nn.Module, backend: str = "eager", **options: Any) -> nn.Module:
    for module in stage.modules():
        if isinstance(module, Block):
            module.compile(backend=backend, **options)
    return stage


def with_a_break(stage: nn.Module) -> nn.Module:
    stage[0].breaks = True
    return torch.compile(stage, backend="eager")


def in_place(stage: nn.Module) -> nn.Module:
    stage.compile(backend="eager")
    return stage


def whole(stage: nn.Module, backend: Any = "eager") -> nn.Module:
    return torch.compile(stage, backend=backend, fullgraph=True)


Make = Callable[[nn.Module], nn.Module]
WAYS: dict[str, tuple[Make, Make]] = {
    "blocks": (lambda block: block, lambda stage: compiled_blocks(stage, "aot_eager", fullgraph=True)),
    "blocks, checkpointed": (lambda block: Checkpointed(block, use_reentrant=False), compiled_blocks),
    "blocks, checkpointed as of old": (lambda block: Checkpointed(block, use_reentrant=True), compiled_blocks),
    "blocks in modules that are not": (Owning, lambda stage: compiled_blocks(stage, "aot_eager", fullgraph=True)),
    "the stage, wrapped": (lambda block: block, whole),
    "the stage, in place": (lambda block: block, in_place),
    "the stage, with a break": (lambda block: block, with_a_break),
    "the stage, by a compiler that reuses memory": (lambda block: block, lambda stage: whole(stage, overwriting)),
}
QUICK = ("blocks", "the stage, by a compiler that reuses memory")
PUT_OFF = ("up.weight", "mid.weight", "down.weight", "matrix")


@pytest.mark.parametrize("way", [way if way in QUICK else pytest.param(way, marks=pytest.mark.slow) for way in WAYS])
def test_a_compiled_module_is_split_for_real(way):
    make, compile_ = WAYS[way]
    torch.manual_seed(0)
    plain = nn.Sequential(make(Block()), nn.Tanh(), make(Block()))
    module = compile_(copy.deepcopy(plain))
    deferred = AtOperations(module)
    before, put_off = [dict(vars(inner)) for inner in module.modules()], []
    for splits in (True, False, True, True):
        inputs = [torch.randn(5, 4, dtype=torch.float64).requires_grad_()]
        inputs.append(inputs[0].detach().clone().requires_grad_())
        plain(inputs[0]).square().sum().backward()
        if splits:
            put_off.append(split_backward(deferred, lambda x=inputs[1]: module(x).square().sum()))
        else:
            module(inputs[1]).square().sum().backward()
        assert torch.equal(inputs[0].grad, inputs[1].grad)
        if len(put_off) == 1 and splits:
            assert [p.grad is None for p in module.parameters()] == [
                name.endswith(PUT_OFF) for name, _ in module.named_parameters()
            ]
        deferred.forget()
    for work in put_off:
        work()
    assert_same_gradients(module, plain, 1e-13)
    assert [dict(vars(inner)) for inner in module.modules()] == before
    share = sum(p.numel() for name, p in module.named_parameters() if name.endswith(PUT_OFF))
    assert deferred.explain().startswith(f"the weight gradients of {share} of ")


def test_without_a_gradient_for_its_input_a_layer_is_not_dropped():
    torch.manual_seed(0)
    plain = Block()
    module, x = copy.deepcopy(plain), torch.randn(5, 4, dtype=torch.float64)
    module.compile(backend="aot_eager", fullgraph=True)
    plain(x).square().sum().backward()
    work = split_backward(AtOperations(module), lambda: module(x).square().sum())
    assert module.up.weight.grad is None
    work()
    assert_same_gradients(module, plain)


def test_layers_of_one_kind_share_their_code_and_a_full_backward_has_its_own():
    graphs: list[bool] = []

    def counting(graph: fx.GraphModule, examples: Any) -> Any:
        graphs.append("pipelining_dualpipev" in graph.code)
        return graph.forward

    stage, x = nn.Sequential(*(Block() for _ in range(4))), torch.randn(5, 4, dtype=torch.float64)
    for block in stage:
        block.compile(backend=counting, fullgraph=True)
    deferred = AtOperations(stage)
    for _ in range(2):
        split_backward(deferred, lambda: stage(x.clone().requires_grad_()).sum())()
        stage(x.clone().requires_grad_()).sum().backward()
        deferred.forget()
    assert sorted(graphs) == [False, True]


@pytest.mark.slow
def test_under_autocast():
    torch.manual_seed(0)
    plain = Block().float()
    module, x = copy.deepcopy(plain), torch.randn(5, 4)
    module.compile(backend="eager", fullgraph=True)

    def run(block: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return block(x).float().square().sum()

    run(plain).backward()
    split_backward(AtOperations(module), lambda: run(module))()
    assert_same_gradients(module, plain)


def test_a_step_of_compiled_stages():
    torch.manual_seed(0)
    n, placement = 5, Placement.v(2)
    stack = Stack([nn.Sequential(Block(), Block()) for _ in range(4)], width=4)
    pipeline = LocalPipeline(lower(dualpipev_order(2, n), placement=placement), placement, stack, n)
    for stage in stack.layers:
        compiled_blocks(stage, fullgraph=True)
    for seed in range(2):
        assert not [result for result in pipeline.step(seed) if isinstance(result, Exception)]
        pipeline.step_whole(seed)
        pipeline.assert_gradients_equal()
    assert "the weight gradients of 256 of 352 parameters" in pipeline.runners[0][0].explain()


def test_without_a_way_to_compile_apart_all_is_done_in_i_and_a_warning_says_so(monkeypatch):
    monkeypatch.setattr(compiled, "compile_apart", lambda module: None)
    module = nn.Sequential(nn.Linear(4, 4), Block().float()).double()
    module[1].compile(backend="eager")
    plain, deferred, x = copy.deepcopy(module), AtOperations(module), torch.randn(5, 4, dtype=torch.float64)
    plain(x).square().sum().backward()
    with pytest.warns(UserWarning, match="compiled modules run their whole backward in I") as warned:
        work = split_backward(deferred, lambda: module(x).square().sum())
    assert len(warned) == 1
    assert [p.grad is None for p in module.parameters()] == [True] + [False] * (len(list(module.parameters())) - 1)
    work()
    assert_same_gradients(module, plain)
