"""Gradient hooks see the gradient of a step, once, whole and alone, however many backwards have made it."""

from __future__ import annotations

import torch
from torch import nn

from pipelining_dualpipev import PipelineError
from pipelining_dualpipev.planning import Action, Placement, dualpipev_order, lower
from pipelining_dualpipev.testing import Stack
from pipelining_dualpipev.testing.step import LocalPipeline

N, PLACEMENT = 5, Placement.v(2)


def make_pipeline(layers: list[nn.Module] | None = None) -> LocalPipeline:
    stack = Stack(layers) if layers else Stack.linear(4)
    return LocalPipeline(lower(dualpipev_order(2, N), placement=PLACEMENT), PLACEMENT, stack, N)


def step(pipeline: LocalPipeline, seed: int) -> list[PipelineError]:
    return [result for result in pipeline.step(seed) if isinstance(result, PipelineError)]


def gradients_of_steps(pipeline: LocalPipeline, *seeds: int) -> list[dict[str, torch.Tensor]]:
    """Of each step alone, by parameter, from the stack that is not cut."""
    found = []
    for seed in seeds:
        whole = nn.ModuleList(pipeline.whole.layers)
        whole.zero_grad()
        pipeline.step_whole(seed)
        found.append({name: p.grad.clone() for name, p in whole.named_parameters()})
    return found


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_hooks_see_each_steps_gradient_once_while_gradients_add_up_over_steps():
    pipeline = make_pipeline()
    parameters = dict(nn.ModuleList(pipeline.stack.layers).named_parameters())
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in parameters}
    accumulated: dict[str, list[torch.Tensor]] = {name: [] for name in parameters}
    replaced = ("1.0.weight", "3.0.bias")
    for name, parameter in parameters.items():
        parameter.register_hook(
            lambda gradient, name=name: (
                seen[name].append(gradient.clone()) or (gradient * 3 if name in replaced else None)
            )
        )
        if not name.startswith("0."):
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: accumulated[name].append(p.grad.clone()))
    for seed in range(2):
        assert not step(pipeline, seed)
    expected = gradients_of_steps(pipeline, 0, 1)
    for name, parameter in parameters.items():
        factor = 3 if name in replaced else 1
        assert len(seen[name]) == 2
        for ours, theirs in zip(seen[name], expected, strict=True):
            assert_close(ours, theirs[name])
        for ours, theirs in zip(accumulated[name], expected, strict=name[0] != "0"):
            assert_close(ours, factor * theirs[name])
        assert_close(parameter.grad, factor * (expected[0][name] + expected[1][name]))
    assert "the weight gradients of 9 of 12 parameters" in pipeline.runners[0][0].explain(), "put off in spite of hooks"


def test_a_parameter_tied_over_two_stages_of_a_rank_shows_the_sum_of_both():
    layers = list(Stack.linear(4).layers)
    layers[3][0].weight = layers[0][0].weight
    pipeline, seen = make_pipeline(layers), []
    pipeline.whole.layers[3][0].weight = pipeline.whole.layers[0][0].weight
    layers[0][0].weight.register_hook(lambda gradient: seen.append(gradient.clone()) and None)
    for seed in range(2):
        assert not step(pipeline, seed)
    assert len(seen) == 2
    for ours, theirs in zip(seen, gradients_of_steps(pipeline, 0, 1), strict=True):
        assert_close(ours, theirs["0.0.weight"])


def test_a_hook_may_use_the_gradient_up_and_one_on_several_waits_for_all():
    """As an optimizer does that steps in a hook, so that gradients need not be kept."""
    pipeline = make_pipeline()
    linear = pipeline.stack.layers[2][0]
    before, together = linear.weight.detach().clone(), []

    def apply(parameter: nn.Parameter) -> None:
        with torch.no_grad():
            parameter -= parameter.grad
        parameter.grad = None

    linear.weight.register_post_accumulate_grad_hook(apply)
    torch.autograd.graph.register_multi_grad_hook([linear.weight, linear.bias], together.append)
    assert not step(pipeline, 0)
    (expected,) = gradients_of_steps(pipeline, 0)
    assert linear.weight.grad is None
    assert_close(before - linear.weight, expected["2.0.weight"])
    assert len(together) == 1
    assert_close(together[0][1], expected["2.0.bias"])


def test_only_parameters_with_hooks_have_a_second_gradient_meanwhile():
    pipeline = make_pipeline()
    linear = pipeline.stack.layers[1][0]
    assert not step(pipeline, 0)
    kept, meanwhile = (linear.weight.grad, linear.bias.grad), []
    linear.bias.register_hook(lambda gradient: None)
    linear.register_forward_hook(lambda *_: meanwhile.append((linear.weight.grad, linear.bias.grad)))
    assert not step(pipeline, 0)
    assert meanwhile[0][0] is kept[0]
    assert meanwhile[0][1] is None
    assert linear.weight.grad is kept[0], "added to"
    assert linear.bias.grad is kept[1]


def test_a_hook_that_raises_raises_on_every_rank_and_the_next_step_is_right():
    pipeline, calls = make_pipeline(), []

    def falls(gradient: torch.Tensor) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise ArithmeticError("a bit fell over")

    pipeline.stack.layers[1][0].weight.register_hook(falls)
    assert [("a bit fell over" in str(error), "rank 1" in str(error)) for error in step(pipeline, 0)] == [
        (True, True)
    ] * 2
    pipeline.zero_grad()
    assert not step(pipeline, 1)
    pipeline.step_whole(1)
    pipeline.assert_gradients_equal()
    assert len(calls) == 2


def test_a_step_that_fails_calls_no_hook_and_leaves_them_in_place():
    pipeline, calls = make_pipeline(), []
    weight = pipeline.stack.layers[1][0].weight
    weight.register_hook(lambda gradient: calls.append(1))
    weight.register_hook(lambda gradient: None).remove()
    assert not step(pipeline, 0)
    before = weight.grad
    pipeline.fail_at(Action.parse("2B3"), ArithmeticError("a bit fell over"))
    assert len(step(pipeline, 1)) == 2
    assert len(calls) == 1
    assert weight.grad is before
    weight.square().sum().backward()
    assert len(calls) == 2
