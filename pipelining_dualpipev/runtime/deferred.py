"""Linear-like operations whose weight gradient is left for later, and what computes it then.

::

    plain autograd                                   here
    y = x @ w            saves x, w                  the same
    backward(dy)         dx = dy @ w.T               dx = dy @ w.T
                         dw = x.T @ dy               note (window of the parameter, x, dy)      [1]
                                                     W: dw = x.T @ dy, into AccumulateGrad      [2]

The weight need not be a parameter itself: a slice, a transpose or one expert of a stack is a *window* into it. The
operation gets the weight detached, so that nothing of the window's own graph is run in I.

What is computed, and in which order it is summed, is what autograd would do, to the bit. A microbatch's whole gradient
of a parameter goes through its AccumulateGrad node [2], once, as in a plain backward.

Only what is known to be right is taken: `defer` says None to everything else, which is then done at once, in I.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from pipelining_dualpipev._torch import as_no_view, grouped_mm, has_gradient_hooks, is_transforming, storage_of

__all__ = ["Note", "Operand", "accumulate", "cast", "find_operand", "linear", "operation_of"]


class Operand(NamedTuple):
    """The right operand of a product: a parameter, or a strided window into it.

    Attributes:
        parameter: the leaf that the gradient is for.
        size: of the operand, [in, out] or [experts, in, out].
        stride: its strides in the parameter's storage.
        offset: of its first element from the parameter's.
    """

    parameter: nn.Parameter
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @property
    def is_column_major(self) -> bool:
        """As autograd asks it of a weight, to choose which of two equal products gives the gradient."""
        return self.stride[-2] == 1 and self.stride[-1] == self.size[-2]

    def as_right(self) -> Operand:
        """The same of a weight [out, in], which is multiplied by transposed."""
        size, stride = self.size, self.stride
        return self._replace(size=torch.Size((size[1], size[0])), stride=(stride[1], stride[0]))

    def fit(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """The operand's gradient as the parameter's, if the operand is all of it; None for a real window."""
        if self.offset or gradient.numel() != self.parameter.numel():
            return None
        for fitted, stride in (
            (gradient, self.stride),
            (gradient.transpose(-2, -1), (*self.stride[:-2], self.stride[-1], self.stride[-2])),
        ):
            if fitted.shape == self.parameter.shape and stride == self.parameter.stride():
                return fitted
        return None


class Note(NamedTuple):
    """What a weight gradient is made of; ``offsets`` are the experts' last rows where products are grouped."""

    operand: Operand
    x: torch.Tensor
    # The tensor that autograd handed over, not a view of it: AccumulateGrad takes over a gradient that nobody else
    # holds, and would then add later microbatches' into it.
    dy: torch.Tensor
    offsets: torch.Tensor | None = None

    def gradient(self) -> torch.Tensor:
        """The operand's gradient."""
        if self.offsets is not None:
            if self.operand.stride[-2] == 1:
                return grouped_mm(self.dy.t(), self.x, offs=self.offsets).transpose(-2, -1)
            return grouped_mm(self.x.t(), self.dy, offs=self.offsets)
        x, dy = (tensor.reshape(-1, tensor.size(-1)) for tensor in (self.x, self.dy))
        return dy.t().mm(x).t() if self.operand.is_column_major else x.t().mm(dy)


_TOGETHER = 1 << 20  # bytes


def accumulate(notes: Sequence[Note]) -> None:
    """W of one microbatch: add the gradients to the parameters', each parameter's once."""
    by_parameter: dict[nn.Parameter, list[Note]] = {}
    for note in notes:
        by_parameter.setdefault(note.operand.parameter, []).append(note)
    # A call of the engine costs as much as a small product; a large gradient is not kept waiting for company.
    ready: list[nn.Parameter] = []
    gradients: list[torch.Tensor] = []
    with torch.no_grad():
        for parameter, own in by_parameter.items():
            ready.append(parameter)
            gradients.append(_sum(parameter, own))
            if sum(gradient.nbytes for gradient in gradients) >= _TOGETHER:
                torch.autograd.backward(ready, gradients)
                ready, gradients = [], []
        if ready:
            torch.autograd.backward(ready, gradients)


def _sum(parameter: nn.Parameter, notes: list[Note]) -> torch.Tensor:
    total: torch.Tensor | None = None
    for note in notes:
        part = note.gradient().to(parameter.dtype)
        fitted = note.operand.fit(part)
        if fitted is not None and total is None:
            total = fitted
            continue
        if total is None:
            total = torch.zeros_like(parameter)
        if fitted is not None:
            total.add_(fitted)
        else:
            _, size, stride, offset = note.operand
            # A gradient of all of a parameter that came first may be laid out in another way than the parameter.
            total = total.contiguous()
            total.as_strided(size, stride, total.storage_offset() + offset).add_(part)
    assert total is not None
    return total


# What a weight may be made by from its parameter: views that show every element at most once, and pass it on as it is.
_VIEWS = {
    f"{name}Backward0"
    for name in (
        "Alias",
        "Permute",
        "Select",
        "Slice",
        "Split",
        "SplitWithSizes",
        "Squeeze",
        "T",
        "Transpose",
        "Unbind",
        "Unsqueeze",
        "View",
    )
}


def find_operand(weight: Any, parameters: Collection[nn.Parameter] | None) -> Operand | None:
    """Where ``weight`` is in one of ``parameters``; None unless autograd would give it there and nowhere else.

    Without ``parameters`` any will do. What a stage has received is no ``nn.Parameter``, so it never does.
    """
    if type(weight) not in (torch.Tensor, nn.Parameter) or not weight.requires_grad:
        return None
    if has_gradient_hooks(weight) or weight.retains_grad:
        return None
    leaf = weight
    if not weight.is_leaf:
        node = weight.grad_fn
        while node is not None and node.name() in _VIEWS:
            node = node.next_functions[0][0]
        leaf = getattr(node, "variable", None)
        if leaf is None or not leaf.is_contiguous():
            return None
    if (
        (parameters is not None and leaf not in parameters)
        or type(leaf) is not nn.Parameter
        or has_gradient_hooks(leaf)
    ):
        return None
    plain = weight.layout is torch.strided and weight.is_floating_point() and weight.dtype is leaf.dtype
    if not plain or storage_of(weight) != storage_of(leaf):
        return None
    return Operand(leaf, weight.size(), weight.stride(), weight.storage_offset() - leaf.storage_offset())


class _Call(NamedTuple):
    """An operation ``x @ right (+ bias)``, with the weight as it was given and as a right operand."""

    x: Any
    weight: Any
    bias: Any = None
    is_linear: bool = False
    offsets: Any = None


def _of_linear(input: Any, weight: Any, bias: Any = None) -> _Call:
    return _Call(input, weight, bias, is_linear=True)


def _of_addmm(bias: Any, x: Any, weight: Any) -> _Call | None:
    fits = isinstance(bias, torch.Tensor) and isinstance(weight, torch.Tensor) and bias.shape == weight.shape[1:]
    return _Call(x, weight, bias) if fits and weight.dim() == 2 else None


def _of_grouped(x: Any, weight: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> _Call | None:
    plain = isinstance(offs, torch.Tensor) and bias is None and out_dtype is None
    fits = isinstance(x, torch.Tensor) and x.dim() == 2
    return _Call(x, weight, offsets=offs) if plain and fits else None


_OPERATIONS: dict[Any, Callable[..., _Call | None]] = {
    functional.linear: _of_linear,
    torch.addmm: _of_addmm,
    torch.mm: _Call,
    torch.matmul: _Call,
    torch.Tensor.mm: _Call,
    torch.Tensor.matmul: _Call,
    torch.Tensor.__matmul__: _Call,
    grouped_mm: _of_grouped,
}


def operation_of(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> _Call | None:
    """The operation that a call is, if it is one of those that can be deferred."""
    make = _OPERATIONS.get(function)
    if make is None or not torch.is_grad_enabled() or torch.compiler.is_compiling() or is_transforming():
        return None
    try:
        call = make(*args, **kwargs)
    except TypeError:  # arguments of another form, such as out=
        return None
    if call is None or type(call.x) not in (torch.Tensor, nn.Parameter) or call.x.layout is not torch.strided:
        return None
    has_shape = isinstance(call.weight, torch.Tensor) and call.weight.dim() == (2 if call.offsets is None else 3)
    has_bias = call.bias is None or type(call.bias) in (torch.Tensor, nn.Parameter)
    return call if has_shape and has_bias and call.x.dim() >= 2 and call.x.is_floating_point() else None


def linear(call: _Call, operand: Operand, note: Callable[[Note], None], anchor: torch.Tensor) -> torch.Tensor:
    """Run the operation; its backward calls ``note`` in place of computing the weight's gradient.

    Args:
        call: the operation.
        operand: where its weight is.
        note: takes what the weight gradient is made of.
        anchor: an empty tensor that requires grad, so that the result does, whatever ``x`` is.
    """
    weight = call.weight.detach()
    if call.offsets is not None:
        return _Grouped.apply(call.x, anchor, weight, call.offsets, operand, note)
    if call.is_linear:
        operand = operand.as_right()
    return _Product.apply(call.x, anchor, call.bias, weight, call.is_linear, operand, note)


def cast(tensor: torch.Tensor) -> torch.Tensor:
    """What autocast, if it is on, makes of an operand."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or tensor.dtype is torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))


class _Product(torch.autograd.Function):
    """``x @ w.T + bias`` if ``is_linear``, else ``x @ w (+ bias)``."""

    @staticmethod
    def forward(
        ctx: Any, x: Any, anchor: Any, bias: Any, weight: Any, is_linear: bool, operand: Operand, note: Any
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.x_dtype, ctx.is_linear, ctx.operand, ctx.note = x.dtype, is_linear, operand, note
        x, weight, bias = cast(x), cast(weight), None if bias is None else cast(bias)
        ctx.save_for_backward(x, weight)
        if is_linear:
            product = functional.linear(x, weight, bias)
        else:
            product = torch.matmul(x, weight) if bias is None else torch.addmm(bias, x, weight)
        # A product of more than two dimensions is a view of one with two, which may not be written into when it comes
        # out of a function of one's own, as it may when it comes out of torch's.
        return as_no_view(product)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor | None) -> Any:
        dx = dbias = None
        if dy is not None:
            x, weight = ctx.saved_tensors
            rows = dy.reshape(-1, dy.size(-1))
            if ctx.needs_input_grad[0]:
                dx = rows.mm(weight if ctx.is_linear else weight.t()).view(x.shape).to(ctx.x_dtype)
            if ctx.needs_input_grad[2]:
                dbias = rows.sum(0)
            ctx.note(Note(ctx.operand, x, dy))
        return dx, None, dbias, None, None, None, None


class _Grouped(torch.autograd.Function):
    """Rows of ``x`` in groups, each times its own matrix of ``weight`` [experts, in, out]."""

    @staticmethod
    def forward(ctx: Any, x: Any, anchor: Any, weight: Any, offsets: Any, operand: Operand, note: Any) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.operand, ctx.note = operand, note
        ctx.save_for_backward(x, weight, offsets)
        return grouped_mm(x, weight, offs=offsets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor | None) -> Any:
        dx = None
        if dy is not None:
            x, weight, offsets = ctx.saved_tensors
            if ctx.needs_input_grad[0]:
                dx = grouped_mm(dy, weight.transpose(-2, -1), offs=offsets)
            ctx.note(Note(ctx.operand, x, dy, offsets))
        return dx, None, None, None, None, None
