"""What goes into a step and comes out of it, in the forms that people give and expect."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from pipelining_dualpipev import ScheduleDualPipeV, stage_indices
from tests.distributed.stacks import (
    WIDTH,
    Cut,
    assert_close,
    gradients,
    make_batch,
    make_layers,
    mean_square,
    num_stages,
)

# ------------------------------------------------------------------------------------------------------ keyword inputs


class Plain(nn.Module):
    """Takes what the step is given on its own rank, as torch has it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, power: int = 1) -> torch.Tensor:
        return self.layer(x * mask) ** power


def given_differently(on_rank_1: dict[str, Any]) -> str:
    torch.manual_seed(0)
    cut = Cut([Plain() for _ in range(4)], 2)
    x, target = make_batch(4)
    mask = (make_batch(4, seed=9)[0] > 0).double()
    words = ""
    try:
        if cut.rank == 0:
            cut.schedule.step(x, target=target, mask=mask, power=2)
        else:
            cut.schedule.step(**on_rank_1)
    except ValueError as error:
        words = str(error)
    cut.schedule.step(*(x,) * (cut.rank == 0), target=target if cut.rank == 0 else None, mask=mask, power=2)
    h = x
    for layer in cut.whole:
        h = layer(h, mask=mask, power=2)
    mean_square(h, target).backward()
    cut.assert_gradients_equal()
    return words


@pytest.mark.parametrize(
    ("on_rank_1", "words"),
    [
        (
            {"mask": torch.ones(4, 3), "power": 2},
            "keyword input 'mask': rank 0 has torch.float64 [2, 6] a microbatch, ",
        ),
        ({"mask": torch.ones(4, WIDTH), "power": 2}, "rank 1 has torch.float32 [2, 6] a microbatch"),
        ({"mask": torch.ones(4, WIDTH, dtype=torch.float64)}, "keyword input 'power': rank 0 has 2, rank 1 has None"),
        ({"mask": torch.ones(4, WIDTH).double(), "power": 3}, "keyword input 'power': rank 0 has 2, rank 1 has 3"),
    ],
    ids=["shape", "type", "missing", "value"],
)
def test_ranks_that_give_different_keyword_inputs_are_told_which(ranks, on_rank_1, words):
    for told in ranks(2).run(given_differently, on_rank_1):
        assert "the ranks of this pipeline do not agree" in told
        assert words in told


class Scaled(nn.Module):
    """Takes from wherever the first stage is what each stage multiplies by."""

    required_inputs = ("scale",)

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
        return self.layer(x).tanh() * scale


def trained_and_evaluated_by_turns(training: Any, evaluation: Any) -> None:
    torch.manual_seed(0)
    cut = Cut([Scaled() for _ in range(num_stages())], 4)
    x, target = make_batch(4)
    for scale, step in [(training, cut.schedule.step), (evaluation, cut.schedule.eval)] * 2:
        losses: list[torch.Tensor] = []
        step(*(x,), target=target, scale=scale, losses=losses) if cut.rank == 0 else step()
        h = x
        for layer in cut.whole:
            h = layer(h, scale)
        loss = mean_square(h, target)
        if cut.rank == 0:
            torch.testing.assert_close(torch.stack(losses).mean(), loss.detach())
        if step == cut.schedule.step:
            loss.backward()
            cut.assert_gradients_equal()


@pytest.mark.parametrize(
    ("training", "evaluation"),
    [
        (2.0, 3.0),
        (torch.full((4, 1), 2.0), torch.full((4, 1), 3.0, dtype=torch.float64)),
        (torch.full((4, 1), 2.0), torch.full((4, WIDTH), 3.0)),
        (torch.full((4, 1), 2.0), 3.0),
    ],
    ids=["number", "type", "shape", "either"],
)
def test_inputs_by_name_may_be_others_in_training_than_in_evaluation(ranks, training, evaluation):
    """A step after an evaluation went by the numbers and shapes of that: wrong gradients, an abort, or for ever."""
    ranks(2).run(trained_and_evaluated_by_turns, training, evaluation)


# ---------------------------------------------------------------------------------------------- shapes that change


class PerToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x)) + x.mean(-2, keepdim=True)


def tokens(rows: int, length: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, rows, length, WIDTH, generator=generator, dtype=torch.float64).unbind()


def lengths_and_types() -> None:
    torch.manual_seed(0)
    n = num_stages() + 1
    layers = [PerToken().double() for _ in range(num_stages())]
    cut = Cut(layers, n)
    first = cut.rank == 0
    for step, (rows, length) in enumerate([(n, 3), (n, 5), (2 * n, 5), (n, 2)]):
        x, target = tokens(rows, length, step)
        cut.step(x, target=target)
        mean_square(cut.run_whole(x), target).backward()
        x, target = tokens(3 * n, length + 1, step)  # evaluation has shapes of its own
        output = cut.schedule.eval(x) if first else cut.schedule.eval()
        if first:
            assert_close([output], [cut.run_whole(x)], 1e-12, "output")
    cut.assert_gradients_equal()
    mbs = [tokens(1 + index % 2, 2 + index, index) for index in range(n)]  # within one step
    if first:
        outputs = cut.schedule.step(arg_mbs=[(x,) for x, _ in mbs], target_mbs=[target for _, target in mbs])
        expected = [cut.run_whole(x) for x, _ in mbs]
        assert_close(outputs, expected, 1e-12, "output, by microbatch as lengths differ")
    else:
        cut.schedule.step()
    for x, target in mbs:
        (mean_square(cut.run_whole(x), target) / n).backward()
    cut.assert_gradients_equal()
    for stack in (layers, cut.whole):
        for layer in stack:
            layer.zero_grad()
            layer.float()
    x, target = (tensor.float() for tensor in tokens(n, 3))
    cut.step(x, target=target)
    mean_square(cut.run_whole(x), target).backward()
    cut.assert_gradients_equal(1e-5)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_length_batch_size_and_type_may_change_between_steps_and_lengths_within_one(ranks, num_ranks):
    ranks(num_ranks).run(lengths_and_types)


# --------------------------------------------------------------------------------------- what crosses between stages


class Odd(nn.Module):
    """Passes on transposed, expanded and sliced tensors, booleans, integers, and floats without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.row = nn.Parameter(torch.randn(1, WIDTH, dtype=torch.float64))

    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if len(given) == 1:
            x, keep, count, plain = given[0], given[0] > 0, torch.arange(len(given[0])), given[0].detach()
        else:
            transposed, expanded, sliced, keep, count, plain = given
            x = transposed.T * expanded + sliced.repeat(1, 2) + plain
        y = torch.where(keep, self.layer(x).tanh(), x * 0.5) + count[:, None]
        return y.T, self.row.expand_as(y), y[:, ::2], ~keep, count + 1, y.detach()


class Last(Odd):
    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        return super().forward(*given)[0].T


def odd_tensors() -> None:
    torch.manual_seed(0)
    n = num_stages()
    cut = Cut([Last() if index == num_stages() - 1 else Odd() for index in range(num_stages())], n)
    for seed in range(2):
        x, target = make_batch(3 * n, seed)
        cut.step(x, target=target)
        for x_mb, target_mb in zip(x.chunk(n), target.chunk(n), strict=True):
            values: tuple[torch.Tensor, ...] = (x_mb,)
            for layer in cut.whole[:-1]:
                values = layer(*values)
            (mean_square(cut.whole[-1](*values), target_mb) / n).backward()
    cut.assert_gradients_equal()


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_views_of_every_kind_booleans_integers_and_floats_without_gradient_cross(ranks, num_ranks):
    ranks(num_ranks).run(odd_tensors)


# ------------------------------------------------------------------------------------------------ losses and targets


def shaped_loss(shape: str) -> None:
    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = mean_square(output, target)
        return {"one": loss.reshape(1), "view": torch.stack([loss, loss])[:1], "number": loss}[shape]

    cut = Cut(make_layers(4), 5, loss_fn)
    x, target = make_batch(10)
    losses = cut.step(x, target=target)
    mean_square(cut.run_whole(x), target).backward()
    cut.assert_gradients_equal()
    if cut.rank == 0:
        expected = [mean_square(cut.run_whole(a), b) for a, b in zip(x.chunk(5), target.chunk(5), strict=True)]
        assert_close([loss.reshape(()) for loss in losses], expected, 1e-14, "loss")


def test_a_loss_may_be_a_vector_of_one_or_a_view(ranks):
    for shape in ("one", "view", "number"):
        ranks(2).run(shaped_loss, shape)


class Named(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": self.layer(x), "twice": x * 2}


def trees(form: str) -> Any:
    x, target = make_batch(10)
    weight = target.abs()

    def loss_fn(output: dict[str, torch.Tensor], given: Any) -> Any:
        assert output.keys() == {"out", "twice"}
        wanted, weights = {
            "dict": lambda: (given["target"], given["weight"]),
            "tuple": lambda: given,
            "absent": lambda: (torch.zeros_like(output["out"]), torch.ones_like(output["out"])),
        }[form]()
        loss = (weights * (output["out"] - wanted) ** 2).mean()
        return loss, {"largest": output["out"].max(), "rows": len(wanted)}

    layers = make_layers(4)
    layers[-1] = Named(layers[-1])
    cut = Cut(layers, 5, loss_fn)
    target_given = {"dict": {"target": target, "weight": weight}, "tuple": (target, weight), "absent": None}[form]
    losses: list[torch.Tensor] = []
    output = None
    if cut.rank == 0:
        output = cut.schedule.step(x, target=target_given, losses=losses)
    else:
        cut.schedule.step()
    whole = cut.run_whole(x)
    expected, (wanted, weights) = whole["out"], (target, weight)
    if form == "absent":
        wanted, weights = torch.zeros_like(target), torch.ones_like(target)
    (weights * (expected - wanted) ** 2).mean().backward()
    cut.assert_gradients_equal()
    if cut.rank != 0:
        return cut.schedule.metrics
    assert_close([output["out"], output["twice"]], [expected, whole["twice"]], 1e-14, "output")
    assert [metric["rows"] for metric in cut.schedule.metrics] == [2] * 5
    assert not any(metric["largest"].requires_grad for metric in cut.schedule.metrics)
    return [float(metric["largest"]) for metric in cut.schedule.metrics] == [
        float(c.max()) for c in expected.detach().chunk(5)
    ]


@pytest.mark.parametrize("form", ["dict", "tuple", "absent"])
def test_targets_are_trees_outputs_reach_the_loss_as_they_are_and_metrics_come_back_by_microbatch(ranks, form):
    assert ranks(2).run(trees, form) == [True, []]


# ---------------------------------------------------------------------------------------------------------- evaluation


def evaluation(n: int, with_loss: bool) -> None:
    cut = Cut(make_layers(num_stages()), n, mean_square if with_loss else None)
    first = cut.rank == 0
    x, target = make_batch(2 * n)

    def evaluate() -> None:
        losses: list[torch.Tensor] = []
        with torch.no_grad():
            expected = cut.run_whole(x)
            output = cut.schedule.eval(x, target=target, losses=losses) if first else cut.schedule.eval()
        plain = cut.schedule.eval(x) if first else cut.schedule.eval()
        if first:
            assert_close([output, plain], [expected] * 2, 1e-14, "output")
            assert not output.requires_grad
            assert len(losses) == (n if with_loss else 0)
        assert (not first) or not with_loss or abs(torch.stack(losses).mean() - mean_square(expected, target)) < 1e-14

    evaluate()  # before any training
    assert all(gradient is None for layer in cut.mine.values() for gradient in gradients(layer))
    for _ in range(2 * with_loss):
        cut.step(x, target=target)
        mean_square(cut.run_whole(x), target).backward()
        evaluate()
        cut.assert_gradients_equal()


@pytest.mark.parametrize("with_loss", [False, True], ids=["without loss_fn", "with loss_fn"])
def test_evaluation_before_between_and_after_training(ranks, with_loss):
    for num_ranks, n in ((2, 4), (2, 1), (4, 9)):
        ranks(num_ranks).run(evaluation, n, with_loss)


# ------------------------------------------------------------------------------------- torch's arguments, newest form


def torchs_arguments() -> None:
    layers = make_layers(4)
    whole = copy.deepcopy(layers)
    mine = stage_indices(dist.get_rank(), 2)
    stages = [PipelineStage(layers[index], index, 4, torch.device("cpu")) for index in mine]
    schedule = ScheduleDualPipeV(
        stages,
        4,
        mean_square,
        None,
        None,
        None,
        True,
        True,
        False,
        max_active_stages=3,
        unshard_lookahead=2,
        max_outstanding_sends=4,
        defer_reduce_grad_wait=True,
    )
    x, target = make_batch(8)
    for finalize in (False, True):
        given = {"target": target} if schedule.has_last_stage else {}
        schedule.step(*(x,) * schedule.has_first_stage, **given, finalize_gradients=finalize)
        h = x
        for layer in whole:
            h = layer(h)
        mean_square(h, target).backward()
    for index in mine:
        assert_close(gradients(layers[index]), gradients(whole[index]), 1e-12, f"gradient of stage {index}")


def test_torchs_newest_arguments_are_taken(ranks):
    ranks(2).run(torchs_arguments)


def finalized_differently() -> None:
    cut = Cut(make_layers(4), 4)
    x, target = make_batch(8)
    cut.schedule.step(*(x,) * (cut.rank == 0), target=target, finalize_gradients=cut.rank == 0)


def test_ranks_that_differ_in_finalize_gradients_are_told(ranks):
    for raised in ranks(2).run_expecting_errors(finalized_differently):
        assert "finalize_gradients: rank 0 has True, rank 1 has False" in raised.message
