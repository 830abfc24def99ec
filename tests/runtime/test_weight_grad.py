"""I and then W are a plain backward: to the bit for one microbatch, whatever the module."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pipelining_dualpipev import PipelineError
from pipelining_dualpipev.planning import Placement, dualpipev_order, lower
from pipelining_dualpipev.runtime.weight_grad import AtOperations
from pipelining_dualpipev.testing import Stack
from pipelining_dualpipev.testing.step import LocalPipeline


def split_backward(deferred: AtOperations, run: Callable[[], torch.Tensor]) -> Callable[[], None]:
    """F and I of one microbatch; W is returned."""
    with deferred.deferring():
        loss = run()
    with deferred.collecting():
        loss.backward()
    return deferred.take()


def assert_same_gradients(ours: nn.Module, theirs: nn.Module, tolerance: float = 0.0, but: str | None = None) -> None:
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), f"{name}: {a.grad} against {b.grad}"
        if a.grad is None or b.grad is None:
            continue
        allowed = 1e-13 if but is not None and name.endswith(but) else tolerance
        error = ((a.grad - b.grad).abs().max() / b.grad.abs().max().clamp_min(1e-30)).item()
        assert error <= allowed, f"{name} is off by {error:.1e}"


class Module(nn.Module):
    """One operation on parameters: a matrix, a stack of matrices and a vector."""

    def __init__(self, operation: Callable[..., torch.Tensor], dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.operation = operation
        self.matrix = nn.Parameter(torch.randn(4, 4, dtype=dtype))
        self.stack = nn.Parameter(torch.randn(3, 4, 4, dtype=dtype))
        self.vector = nn.Parameter(torch.randn(4, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.operation(self, x)


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, gradient):
        return 3 * gradient


linear = functional.linear
OFFSETS = torch.tensor([2, 2, 5], dtype=torch.int32)
DEFERRED = {
    "linear": lambda m, x: linear(x, m.matrix),
    "linear with a bias": lambda m, x: linear(x, m.matrix, bias=m.vector),
    "linear by names": lambda m, x: linear(input=x, weight=m.matrix),
    "matmul": lambda m, x: x @ m.matrix,
    "matmul with a transpose": lambda m, x: x.matmul(m.matrix.T),
    "mm": lambda m, x: torch.mm(x, m.matrix),
    "addmm": lambda m, x: torch.addmm(m.vector, x, m.matrix),
    "an expert": lambda m, x: linear(x, m.stack[1]) + linear(x, m.stack[2]),
    "an expert twice": lambda m, x: linear(linear(x, m.stack[1]), m.stack[1]),
    "an expert by a tensor": lambda m, x: x @ m.stack[torch.tensor(2)],
    "a slice": lambda m, x: linear(x, m.matrix[1:3]),
    "columns": lambda m, x: linear(x[:, :2], m.matrix[:, 1:3]),
    "chunks": lambda m, x: linear(x, m.matrix.chunk(2)[1]),
    "a view": lambda m, x: linear(x, m.stack.view(12, 4)),
    "a window and the whole": lambda m, x: linear(x, m.matrix[1:]).sum() + linear(x, m.matrix.mT),
    "the whole both ways": lambda m, x: linear(x @ m.matrix, m.matrix),
    "twice": lambda m, x: linear(torch.tanh(linear(x, m.matrix)), m.matrix),
    "three dimensions": lambda m, x: linear(x.reshape(1, 5, 4), m.matrix, m.vector),
    "rows none": lambda m, x: linear(x[:0], m.matrix).sum() + linear(x, m.matrix),
}
AT_ONCE = {
    "one row without a dimension": lambda m, x: linear(x[0], m.matrix),
    "a computed weight": lambda m, x: linear(x, m.matrix * 2),
    "a weight with a gradient of its own": lambda m, x: linear(x, StraightThrough.apply(m.matrix)),
    "a repeated weight": lambda m, x: linear(x, m.matrix[:1].expand(3, 4)),
    "a weight on the left": lambda m, x: m.matrix @ x.T,
    "addmm with a factor": lambda m, x: torch.addmm(m.vector, x, m.matrix, alpha=2),
    "einsum": lambda m, x: torch.einsum("ri,io->ro", x, m.matrix),
    "a product in torch.func": lambda m, x: torch.func.vmap(lambda row: linear(row[None], m.matrix))(x),
}


@pytest.mark.parametrize("input_needs_grad", [True, False])
@pytest.mark.parametrize("name", [*DEFERRED, *AT_ONCE])
def test_operations_on_parameters_are_right_to_the_bit_and_put_off_where_they_can_be(name, input_needs_grad):
    module = Module((DEFERRED | AT_ONCE)[name])
    plain, deferred = copy.deepcopy(module), AtOperations(module)
    x = torch.randn(5, 4, dtype=torch.float64)
    inputs = [x.clone().requires_grad_(input_needs_grad) for _ in range(2)]
    for number in (1, 2):
        plain(inputs[0]).square().sum().backward()
        work = split_backward(deferred, lambda: module(inputs[1]).square().sum())
        if number == 1:
            assert (module.matrix.grad is None and module.stack.grad is None) == (name in DEFERRED)
            if input_needs_grad:
                assert torch.equal(inputs[0].grad, inputs[1].grad)
        work()
        assert_same_gradients(module, plain)


@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_products_are_right_to_the_bit(transposed):
    module = Module(
        lambda m, x: functional.grouped_mm(x, m.stack.mT if transposed else m.stack, offs=OFFSETS), torch.float32
    )
    plain, deferred, x = copy.deepcopy(module), AtOperations(module), torch.randn(5, 4, requires_grad=True)
    plain(x).square().sum().backward()
    work = split_backward(deferred, lambda: module(x).square().sum())
    assert module.stack.grad is None
    work()
    assert_same_gradients(module, plain)


def test_what_is_received_is_no_parameter_of_the_stage():
    """A tied weight that comes over the boundary is a leaf too, whose gradient has to go back right after I."""
    received = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    module = Module(lambda m, x: linear(x @ m.matrix, received))
    work = split_backward(AtOperations(module), lambda: module(torch.randn(5, 4, dtype=torch.float64)).sum())
    assert received.grad is not None
    assert module.matrix.grad is None
    work()
    assert module.matrix.grad is not None


def test_a_gradient_that_another_parameter_takes_over_stays_as_it_was_until_w():
    """A sum hands one gradient to both of its terms, and AccumulateGrad keeps one that nobody else holds."""
    module = Module(lambda m, x: linear(x.view(1, 4, 4), m.matrix) + m.stack)
    module.stack = nn.Parameter(module.stack[:1].detach().clone())
    plain, deferred = copy.deepcopy(module), AtOperations(module)
    put_off = []
    for seed in range(3):
        x = torch.full((4, 4), seed + 1.0, dtype=torch.float64)
        plain(x).square().sum().backward()
        put_off.append(split_backward(deferred, lambda x=x: module(x).square().sum()))
    for work in put_off:
        work()
    assert_same_gradients(module, plain, 1e-13)


class Block(nn.Module):
    """A layer with everything that is put off or not, and a checkpoint inside of it."""

    def __init__(self, reentrant: bool | None = None, width: int = 4) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.reentrant = reentrant
        self.up, self.norm, self.down = nn.Linear(width, 8), nn.LayerNorm(8), nn.Linear(8, width, bias=False)
        self.own = nn.Parameter(torch.randn(width, width) / width)
        self.double()
        self.ran = 0

    def body(self, x: torch.Tensor) -> torch.Tensor:
        self.ran += 1
        return self.down(torch.tanh(self.norm(self.up(x)))) + x @ self.own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(x @ self.own)
        if self.reentrant is None:
            return self.body(x)
        return checkpoint(self.body, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_layer_runs_again_in_i_and_not_in_w(reentrant, outside):
    block = Block(None if outside else reentrant)
    plain, deferred = copy.deepcopy(block), AtOperations(block)
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)

    def run(module: nn.Module) -> torch.Tensor:
        y = checkpoint(module, x, use_reentrant=reentrant) if outside else module(x)
        return y.square().sum()

    run(plain).backward()
    work = split_backward(deferred, lambda: run(block))
    assert block.ran == 2
    assert block.up.weight.grad is None
    assert block.down.weight.grad is None
    assert block.norm.weight.grad is not None
    work()
    assert block.ran == 2
    assert_same_gradients(block, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_autocast(dtype):
    block = Block().to(dtype)
    plain, deferred, x = copy.deepcopy(block), AtOperations(block), torch.randn(5, 4, dtype=dtype, requires_grad=True)

    def run(module: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = module.down(torch.tanh(module.up(x)))
        assert y.dtype == (torch.float64 if dtype is torch.float64 else torch.bfloat16)
        return y.float().square().sum()

    run(plain).backward()
    work = split_backward(deferred, lambda: run(block))
    assert block.up.weight.grad is None
    work()
    assert block.up.weight.grad.dtype == dtype
    assert_same_gradients(block, plain)


def test_low_rank_adapters_on_frozen_layers():
    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(2)
            self.base, self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)
            self.double()
            self.base.requires_grad_(False)

        def forward(self, x):
            return self.base(x) + self.b(self.a(x))

    module = nn.Sequential(Adapted(), nn.Tanh(), Adapted())
    plain, deferred, x = copy.deepcopy(module), AtOperations(module), torch.randn(5, 4, dtype=torch.float64)
    plain(x).sum().backward()
    split_backward(deferred, lambda: module(x).sum())()
    assert_same_gradients(module, plain)
    assert deferred.explain() == "the weight gradients of 32 of 32 parameters (100.0%) are put off to W"


def test_an_embedding_tied_to_the_head_of_the_same_stage():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            self.embed, self.head = nn.Embedding(7, 4).double(), nn.Linear(4, 7, bias=False).double()
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(torch.tanh(self.embed(ids)))

    module = Tied()
    plain, deferred, ids = copy.deepcopy(module), AtOperations(module), torch.tensor([[1, 2, 2, 5]])
    plain(ids).square().sum().backward()
    split_backward(deferred, lambda: module(ids).square().sum())()
    assert_same_gradients(module, plain)


@pytest.mark.parametrize("kind", ["tensor", "accumulated", "node"])
def test_hooks_see_what_they_see_in_a_plain_backward(kind):
    def run(put_off: bool) -> tuple[list[torch.Tensor], Block]:
        block, seen = Block(), []
        weight = block.up.weight
        if kind == "tensor":
            weight.register_hook(lambda gradient: seen.append(gradient.clone()) or 2 * gradient)
        elif kind == "accumulated":
            weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
        else:
            node = torch.autograd.graph.get_gradient_edge(weight).node
            node.register_prehook(lambda gradients: seen.append(gradients[0].clone()))
        deferred = AtOperations(block)
        for seed in range(2):
            x = torch.full((5, 4), seed + 1.0, dtype=torch.float64)
            if put_off:
                split_backward(deferred, lambda x=x: block(x).square().sum())()
            else:
                block(x).square().sum().backward()
        return seen, block

    (ours, block), (theirs, plain) = run(True), run(False)
    assert len(ours) == 2
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert_same_gradients(block, plain)


def test_the_module_is_as_it_was_and_looks_like_itself_meanwhile():
    block, hooked = Block(), []
    block.up.register_forward_hook(lambda *_: hooked.append("up"))
    block.down.forward = own = lambda x: functional.linear(x, block.down.weight) * 2
    keys, types = list(block.state_dict()), [type(module) for module in block.modules()]
    before = [dict(vars(module)) for module in block.modules()]
    deferred = AtOperations(block)
    with deferred.deferring():
        assert list(block.state_dict()) == keys
        assert [type(module) for module in block.modules()] == types
        assert list(inspect.signature(block.forward).parameters) == ["x"]
        block(torch.randn(5, 4, dtype=torch.float64))
    assert hooked == ["up"]
    assert block.down.forward is own
    with pytest.raises(ArithmeticError), deferred.deferring():
        raise ArithmeticError
    before[0]["ran"] = block.ran
    assert [dict(vars(module)) for module in block.modules()] == before


def test_a_model_may_write_into_what_a_linear_layer_gave():
    """As RoCBert does with its embeddings: torch forbids it for views that a function of one's own has made."""

    class Adding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4, dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            y += x
            return (y**2).sum()

    module, x = Adding(), torch.randn(2, 3, 4, dtype=torch.float64)
    plain = copy.deepcopy(module)
    plain(x).backward()
    split_backward(AtOperations(module), lambda: module(x))()
    assert_same_gradients(module, plain)


def test_layers_that_are_exchanged_between_steps_are_found():
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()
    deferred, x = AtOperations(module), torch.randn(5, 4, dtype=torch.float64)
    split_backward(deferred, lambda: module(x).sum())()
    module[0] = nn.Linear(4, 4).double()
    deferred.forget()
    work = split_backward(deferred, lambda: module(x).sum())
    assert module[0].weight.grad is None
    work()
    assert module[0].weight.grad is not None


def test_a_gradient_taken_in_the_middle_of_a_forward_is_refused():
    block, x = Block(), torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    with AtOperations(block).deferring(), pytest.raises(RuntimeError, match="schedule with zb=0"):
        torch.autograd.grad(block(x).sum(), x)


class FailsOnce(torch.autograd.Function):
    fails = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if FailsOnce.fails:
            FailsOnce.fails = False
            raise ArithmeticError("a bit fell over")
        return gradient


def test_what_an_input_gradient_that_failed_has_noted_is_not_in_the_next_step():
    class Failing(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3).double()

        def forward(self, x):
            return self.linear(FailsOnce.apply(self.linear(x)))

    placement, n = Placement.v(2), 2
    stack = Stack([*Stack.linear(4).layers[:3], Failing()])
    pipeline = LocalPipeline(lower(dualpipev_order(2, n), placement=placement), placement, stack, n)
    FailsOnce.fails = True
    assert all(isinstance(result, PipelineError) for result in pipeline.step())
    assert pipeline.runners[0][3]._weight_gradients._notes is None
    pipeline.zero_grad()
    pipeline.step(1)
    pipeline.step_whole(1)
    pipeline.assert_gradients_equal()
    assert "the weight gradients of 9 of 12 parameters" in pipeline.runners[0][3].explain()
