"""`ScheduleDualPipeV` over hand-made stages on real ranks, compared with the same stack unsplit."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import ScheduleDualPipeV as TorchDualPipeV

from pipelining_dualpipev import clip_grad_norm_, mean_loss, stage_indices
from tests.distributed.stacks import WIDTH, Cut, assert_close, gradients, make_batch, make_layers, mean_square


def numbers_of_microbatches(num_ranks: int) -> list[int]:
    return sorted({1, 2, 3, 2 * num_ranks, 2 * num_ranks + 1, 4 * num_ranks})


def train_five_steps(n: int) -> None:
    cut = Cut(make_layers(2 * dist.get_world_size()), n)
    ours = torch.optim.AdamW(cut.schedule.parameters(), lr=1e-2)
    theirs = torch.optim.AdamW(cut.whole.parameters(), lr=1e-2)
    for step in range(5):
        x, target = make_batch(2 * n, seed=step)
        losses = cut.step(x, target=target)
        loss = mean_square(cut.run_whole(x), target)
        loss.backward()
        cut.assert_gradients_equal()
        assert abs(mean_loss(cut.schedule, losses) - loss) <= 1e-12 * loss
        ours.step()
        theirs.step()
        ours.zero_grad()
        theirs.zero_grad()
    cut.assert_weights_equal()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_loss_gradients_and_weights_after_five_steps_are_those_of_the_unsplit_stack(ranks, num_ranks):
    for n in numbers_of_microbatches(num_ranks):
        ranks(num_ranks).run(train_five_steps, n)


def losses_and_outputs(n: int) -> tuple[object, ...]:
    cut = Cut(make_layers(4), n)
    x, target = make_batch(3 * n)
    given = (x,) if cut.rank == 0 else ()
    losses: list[torch.Tensor] = ["stale"]  # type: ignore[list-item]
    output = cut.schedule.step(*given, target=target if cut.rank == 0 else None, losses=losses)
    assert cut.schedule.step(*given, target=target, return_outputs=False) is None
    if cut.rank != 0:
        assert output is None
        assert losses == ["stale"], "left alone where there are no losses"
        return (cut.schedule.loss_rank, cut.schedule.has_first_stage, cut.schedule.has_last_stage)
    whole = cut.run_whole(x)
    assert_close([output], [whole], 1e-14, "output")
    expected = [mean_square(o, t) for o, t in zip(whole.chunk(n), target.chunk(n), strict=True)]
    assert_close(losses, expected, 1e-14, "loss")
    assert not any(tensor.requires_grad for tensor in [output, *losses])
    return (cut.schedule.loss_rank, cut.schedule.has_first_stage, cut.schedule.has_last_stage)


def test_losses_are_in_microbatch_order_and_outputs_are_put_together(ranks):
    assert ranks(2).run(losses_and_outputs, 5) == [(0, True, True), (0, False, False)]


def steps_before_an_optimizer_step() -> None:
    cut = Cut(make_layers(2 * dist.get_world_size()), 4)
    for step in range(3):
        x, target = make_batch(8, seed=step)
        cut.step(x, target=target)
        mean_square(cut.run_whole(x), target).backward()
    cut.assert_gradients_equal()


def test_gradients_of_several_steps_add_up(ranks):
    ranks(2).run(steps_before_an_optimizer_step)


def evaluate_between_steps() -> None:
    cut = Cut(make_layers(2 * dist.get_world_size()), 3)
    first = cut.rank == 0
    x, target = make_batch(6)
    for _ in range(2):
        before = copy.deepcopy([g for layer in cut.mine.values() for g in gradients(layer)])
        losses: list[torch.Tensor] = []
        output = cut.schedule.eval(x, target=target, losses=losses) if first else cut.schedule.eval()
        after = [g for layer in cut.mine.values() for g in gradients(layer)]
        assert_close(after, before, 0.0, "untouched gradient")
        if first:
            whole = cut.run_whole(x)
            assert_close([output], [whole], 1e-14, "output")
            assert_close([torch.stack(losses).mean()], [mean_square(whole, target)], 1e-14, "loss")
            assert cut.schedule.eval(x, losses=losses).shape == (6, WIDTH)
            assert losses == [], "no target, no losses"
        else:
            cut.schedule.eval()
        cut.step(x, target=target)
        mean_square(cut.run_whole(x), target).backward()
        cut.assert_gradients_equal()


def test_evaluation_between_steps_gives_losses_and_leaves_gradients_alone(ranks):
    ranks(3).run(evaluate_between_steps)


def forward_only_without_a_loss_function() -> None:
    cut = Cut(make_layers(4), 2, loss_fn=None)
    x, _ = make_batch(4)
    with torch.no_grad():
        output = cut.schedule.step(x) if cut.rank == 0 else cut.schedule.step()
        if cut.rank == 0:
            assert_close([output], [cut.run_whole(x)], 1e-14, "output")


def test_without_a_loss_function_a_step_runs_forward_only(ranks):
    ranks(2).run(forward_only_without_a_loss_function)


def microbatches_cut_beforehand() -> None:
    cut = Cut(make_layers(4), 3, loss_fn=scaled_square)
    x, target = make_batch(6)
    losses: list[torch.Tensor] = []
    if cut.rank == 0:
        cut.schedule.step(
            arg_mbs=[(mb,) for mb in x.chunk(3)],
            target_mbs=list(target.chunk(3)),
            losses=losses,
            loss_kwargs={"factor": 3.0},
        )
        assert len(losses) == 3
    else:
        cut.schedule.step()
    scaled_square(cut.run_whole(x), target, factor=3.0).backward()
    cut.assert_gradients_equal()


def scaled_square(output: torch.Tensor, target: torch.Tensor, factor: float) -> torch.Tensor:
    return factor * mean_square(output, target)


def test_microbatches_cut_beforehand_and_loss_kwargs(ranks):
    ranks(2).run(microbatches_cut_beforehand)


def a_sum_instead_of_a_mean() -> None:
    def sum_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return ((output - target) ** 2).sum()

    cut = Cut(make_layers(4), 4, loss_fn=sum_square, scale_grads=False)
    x, target = make_batch(8)
    losses = cut.step(x, target=target)
    loss = sum_square(cut.run_whole(x), target)
    loss.backward()
    cut.assert_gradients_equal()
    assert abs(mean_loss(cut.schedule, losses) - loss) <= 1e-12 * loss


def test_with_scale_grads_off_microbatch_losses_are_summed(ranks):
    ranks(2).run(a_sum_instead_of_a_mean)


class Branches(nn.Module):
    """Passes several tensors on, among them integers, a view, one that nobody uses and one without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2 * WIDTH, dtype=torch.float64)

    def forward(self, x, *rest):
        left, right = self.layer(x).chunk(2, dim=-1)  # views that are not contiguous
        ids = torch.arange(len(x)) if not rest else rest[1] + 1
        return left.tanh(), right, ids, x.detach() * 2, left * 0.5


class Join(Branches):
    def forward(self, x, right=None, ids=None, plain=None, unused=None):
        output = self.layer(x)[..., :WIDTH] + 0.1
        if right is None:
            return output
        return output * right + ids[:, None] + plain


def several_tensors_cross() -> None:
    torch.manual_seed(0)
    num_stages = 2 * dist.get_world_size()
    layers = [Join() if index % 2 else Branches() for index in range(num_stages)]
    cut = Cut(layers, 4)
    x, target = make_batch(8)
    for _ in range(2):  # the second step announces nothing
        cut.step(x, target=target)
        whole: tuple[torch.Tensor, ...] = ()
        for mb, mb_target in zip(x.chunk(4), target.chunk(4), strict=True):
            whole = (mb,)
            for layer in cut.whole:
                out = layer(*whole)
                whole = out if isinstance(out, tuple) else (out,)
            (mean_square(whole[0], mb_target) / 4).backward()
        cut.assert_gradients_equal()


def test_several_tensors_cross_a_boundary_views_and_integers_among_them(ranks):
    """Two ranks cross them between ranks (0 and 1); one rank hands them over at the fold."""
    ranks(1).run(several_tensors_cross)
    ranks(2).run(several_tensors_cross)


class Scaled(nn.Module):
    """Reads an input by name, wherever it lives."""

    required_inputs = ("mask", "power")

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x, mask=None, power=1):
        return self.layer(x * mask) ** power


def inputs_by_name() -> None:
    torch.manual_seed(0)
    num_stages = 2 * dist.get_world_size()
    cut = Cut([Scaled() for _ in range(num_stages)], 4)
    for rows, power in ((4, 1), (4, 1), (8, 1), (8, 2)):
        x, target = make_batch(rows)
        mask = (make_batch(rows, seed=rows)[0] > 0).double()
        cut.step(x, target=target, mask=mask, power=power)
        h = x
        for layer in cut.whole:
            h = layer(h, mask=mask, power=power)
        mean_square(h, target).backward()
        cut.assert_gradients_equal()


def test_inputs_given_on_rank_0_reach_the_stages_that_name_them(ranks):
    ranks(3).run(inputs_by_name)


def keyword_inputs_on_every_rank() -> None:
    class Plain(Scaled):
        required_inputs = None  # type: ignore[assignment]

    torch.manual_seed(0)
    cut = Cut([Plain() for _ in range(4)], 2)
    x, target = make_batch(4)
    mask = (make_batch(4, seed=9)[0] > 0).double()
    if cut.rank == 0:
        cut.schedule.step(x, target=target, mask=mask)
    else:
        cut.schedule.step(mask=mask)
    h = x
    for layer in cut.whole:
        h = layer(h, mask=mask)
    mean_square(h, target).backward()
    cut.assert_gradients_equal()


def test_keyword_inputs_given_on_every_rank_as_torch_wants_them(ranks):
    ranks(2).run(keyword_inputs_on_every_rank)


def shapes_that_change() -> None:
    cut = Cut(make_layers(4), 2)
    for rows in (4, 4, 8, 2, 8):
        x, target = make_batch(rows, seed=rows)
        cut.step(x, target=target)
        mean_square(cut.run_whole(x), target).backward()
    cut.assert_gradients_equal()
    x, target = make_batch(4)
    lengths = [(1, 3), (3, 5)]  # rows differ between the microbatches of one step
    for length in lengths:
        xs, ts = [x[:rows] for rows in length], [target[:rows] for rows in length]
        if cut.rank == 0:
            cut.schedule.step(arg_mbs=[(mb,) for mb in xs], target_mbs=ts)
        else:
            cut.schedule.step()
        for a, t in zip(xs, ts, strict=True):
            (mean_square(cut.run_whole(a), t) / 2).backward()
    cut.assert_gradients_equal()


def test_shapes_may_change_from_step_to_step_and_within_one(ranks):
    ranks(2).run(shapes_that_change)


def frozen_stages() -> None:
    num_stages = 2 * dist.get_world_size()
    layers = make_layers(num_stages)
    cut = Cut(layers, 4)
    x, target = make_batch(8)
    for frozen in ([0], [0, 1], [0, 1, 2], [], [num_stages - 1], range(num_stages)):
        for stack in (cut.whole, layers):
            for index, layer in enumerate(stack):
                layer.requires_grad_(index not in frozen)
                layer.zero_grad()
        cut.step(x, target=target)
        loss = mean_square(cut.run_whole(x), target)
        if loss.requires_grad:
            loss.backward()
        cut.assert_gradients_equal()


def test_frozen_stages_get_no_gradient_and_cost_the_others_nothing_of_theirs(ranks):
    ranks(2).run(frozen_stages)
    ranks(3).run(frozen_stages)


def clipped(norm_type: float, max_norm: float) -> None:
    layers = make_layers(2 * dist.get_world_size())
    layers[-1][0].weight = layers[0][0].weight  # shared by the two stages of rank 0
    cut = Cut(layers, 4)
    if cut.rank == 1:
        for layer in cut.mine.values():
            layer.requires_grad_(False)  # a rank without gradients joins in
    cut.whole[1].requires_grad_(False)
    cut.whole[2].requires_grad_(False)
    x, target = make_batch(8)
    cut.step(x, target=target)
    mean_square(cut.run_whole(x), target).backward()
    ours = clip_grad_norm_(cut.schedule, max_norm, norm_type)
    theirs = torch.nn.utils.clip_grad_norm_(cut.whole.parameters(), max_norm, norm_type)
    assert_close([ours], [theirs], 1e-12, "norm")
    cut.assert_gradients_equal()


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_clipping_counts_all_stages_and_a_tied_parameter_once(ranks, norm_type):
    ranks(2).run(clipped, norm_type, 1e-3)
    ranks(2).run(clipped, norm_type, 1e3)


def torch_beside_ours() -> None:
    """torch's schedule gives what it gives when ours was never there, on the same stages too."""
    x, target = make_batch(8)

    def torch_step(layers: list[nn.Module], stages: list[PipelineStage] | None = None) -> list[torch.Tensor | None]:
        mine = stage_indices(dist.get_rank(), 2)
        stages = stages or [PipelineStage(layers[i], i, 4, torch.device("cpu")) for i in mine]
        schedule = TorchDualPipeV(stages, 4, loss_fn=mean_square)
        if dist.get_rank() == 0:
            schedule.step(x, target=target, losses=[])
        else:
            schedule.step(losses=[])
        return [g for i in mine for g in gradients(layers[i])]

    before = torch_step(make_layers(4))
    layers = make_layers(4)
    cut = Cut(layers, 4)
    cut.step(x, target=target)
    for layer in layers:
        layer.zero_grad()
    assert_close(torch_step(layers, cut.schedule.stages), before, 0.0, "torch's gradient")
    assert_close(torch_step(make_layers(4)), before, 0.0, "torch's gradient")


def test_torchs_own_schedules_are_as_they_were(ranks):
    ranks(2).run(torch_beside_ours)
