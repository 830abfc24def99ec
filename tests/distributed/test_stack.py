"""Plain layers split over ranks: they train as the ``nn.Sequential`` does that is not split, and nothing is shared."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipelining_dualpipev import ScheduleDualPipeV, SplitError, clip_grad_norm_, mean_loss
from pipelining_dualpipev.models import SplitModel, load_checkpoint, plan_split, save_checkpoint, split
from tests.distributed.stacks import WIDTH, make_batch

N = 5
Names = dict[str, torch.Tensor]


class Pair(nn.Module):
    """Two tensors of what it is given, one or two; they cross together."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = value if isinstance(value, tuple) else (value, value)
        return self.inner(x).tanh(), x + y


class Sum(nn.Module):
    def forward(self, value: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return value[0] + value[1]


def make_whole() -> nn.Sequential:
    """Ten layers: some without parameters, one that writes in place, some that give two tensors, two tied."""
    torch.manual_seed(3)
    layers = OrderedDict(
        embed=nn.Linear(WIDTH, WIDTH, bias=False),
        pair=Pair(),
        again=Pair(),
        sum=Sum(),
        block=nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH)),
        relu=nn.ReLU(inplace=True),
        norm=nn.BatchNorm1d(WIDTH),
        linear=nn.Linear(WIDTH, WIDTH),
        tanh=nn.Tanh(),
        head=nn.Linear(WIDTH, WIDTH, bias=False),
    )
    layers["head"].weight = layers["embed"].weight
    layers["linear"].bias.requires_grad_(False)
    return nn.Sequential(layers).double()


def builders(built: list[int]) -> list[Callable[[], nn.Module]]:
    """What builds ten layers, each with weights of its own, and notes which ones were built."""

    def build(index: int) -> nn.Module:
        built.append(index)
        torch.manual_seed(index)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()

    return [functools.partial(build, index) for index in range(10)]


class Training:
    """A split stack with an optimiser, or the same on the whole."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if isinstance(model, SplitModel):
            self.schedule = ScheduleDualPipeV(model.stages, N, nn.functional.mse_loss)

    def step(self, seed: int) -> float:
        x, target = make_batch(4 * N, seed)
        if not isinstance(self.model, SplitModel):  # by microbatches, as batch norm sees them
            loss = torch.zeros((), dtype=torch.float64)
            for part, wanted in zip(x.chunk(N), target.chunk(N), strict=True):
                share = nn.functional.mse_loss(self.model(part), wanted) / N
                share.backward()
                loss += share.detach()
        else:
            losses: list[torch.Tensor] = []
            self.schedule.step(x, target=target, losses=losses) if dist.get_rank() == 0 else self.schedule.step()
            loss = mean_loss(self.schedule, losses)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss)


def state_of(parts: SplitModel) -> Names:
    return {name: tensor.clone() for stage in parts.models for name, tensor in parts.own_tensors(stage).items()}


def train(kind: str, directory: str) -> tuple[list[int], list[float], Names]:
    built: list[int] = []
    parts = split(make_whole() if kind == "sequential" else builders(built), device="cpu")
    training = Training(parts)
    losses = [training.step(seed) for seed in range(2)]
    save_checkpoint(directory, parts, training.optimizer)
    names = [name for name, _ in parts.named_parameters()]
    assert len(names) == len(set(names))
    return built, [*losses, training.step(2)], state_of(parts)


def go_on(kind: str, directory: str) -> tuple[list[float], Names]:
    parts = split(make_whole() if kind == "sequential" else builders([]), device="cpu")
    training = Training(parts)
    training.step(7)
    load_checkpoint(directory, parts, training.optimizer)
    return [training.step(2)], state_of(parts)


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2)])
@pytest.mark.parametrize("kind", ["sequential", "builders"])
def test_plain_layers_train_as_the_sequential_does_and_go_on_over_other_ranks(ranks, kind, before, after, tmp_path):
    directory = str(tmp_path / "state")
    built: list[int] = []
    whole = make_whole() if kind == "sequential" else nn.Sequential(*(make() for make in builders(built)))
    training = Training(whole)
    expected = [training.step(seed) for seed in range(3)]
    told = ranks(before).run(train, kind, directory)
    again = ranks(after).run(go_on, kind, directory)
    if kind == "builders":
        assert sorted(index for built_there, _, _ in told for index in built_there) == built, "each once, over all"
        on_rank_0 = [index for index in built if index * 2 * before // 10 in (0, 2 * before - 1)]
        assert told[0][0] == on_rank_0
    assert told[0][1] == pytest.approx(expected, rel=1e-12)
    assert again[0][0] == pytest.approx(expected[2:], rel=1e-12)
    wanted = {name: tensor for name, tensor in whole.state_dict().items() if name != "head.weight"}
    for found in ([state for _, _, state in told], [state for _, state in again]):
        names = [name for state in found for name in state]
        assert sorted(names) == sorted(wanted), "the Sequential's own names, a tied one once"
        for state in found:
            for name, value in state.items():
                torch.testing.assert_close(value, wanted[name], rtol=1e-10, atol=1e-12)
    unsplit = Training(make_whole() if kind == "sequential" else nn.Sequential(*(make() for make in builders([]))))
    load_checkpoint(directory, unsplit.model, unsplit.optimizer)
    assert unsplit.step(2) == pytest.approx(expected[2], rel=1e-12)


def test_a_plan_of_plain_layers_builds_none():
    built: list[int] = []
    words = plan_split(builders(built), 2).explain()
    assert words.splitlines() == [
        "stage 0 (rank 0): 0, 1, 2",
        "stage 1 (rank 1): 3, 4",
        "stage 2 (rank 1): 5, 6, 7",
        "stage 3 (rank 0): 8, 9",
    ]
    assert built == []
    assert plan_split(make_whole(), 1).explain().startswith("stage 0 (rank 0): embed, pair, again, sum, block\n")


WITHOUT_TRANSFORMERS = """
import sys
import torch, torch.distributed as dist
from torch import nn
import pipelining_dualpipev
from pipelining_dualpipev.models import split, plan_split, save_checkpoint
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
layers = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
plan_split(layers, 2)
parts = split(layers, device="cpu")
schedule = pipelining_dualpipev.ScheduleDualPipeV(parts.stages, 2, nn.functional.mse_loss)
schedule.step(torch.ones(4, 3), target=torch.ones(4, 3))
save_checkpoint(sys.argv[1], parts)
print("transformers" in sys.modules)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_transformers_is_not_imported(tmp_path):
    command = [sys.executable, "-c", WITHOUT_TRANSFORMERS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2])
    assert done.stdout.split() == ["False"], done.stderr


# -------------------------------------------------------------------------------------------------- what is shared


def shared(kind: str) -> Any:
    layers: list[Any] = [nn.Linear(WIDTH, WIDTH) for _ in range(8)]
    if kind == "buffers":
        layers[2] = layers[0] = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    if kind == "hidden":
        object.__setattr__(layers[2], "head", [layers[7]])  # a list: nn.Module does not look into it
    if kind == "made before":
        return [lambda layer=layer: layer for layer in layers]
    return nn.Sequential(*layers)


SHARED = [
    ("buffers", r"2\.1, which layers of 2 ranks share, has buffers, of which each rank would have its own\. Give each"),
    ("hidden", r"the layers 2, 3, 4, 5 uses a parameter of shape \[6, 6\] that is none of its own"),
    ("made before", r"[02]\.weight was there before the function that builds layer [02] was called"),
]


def split_shared(kind: str) -> None:
    split(shared(kind), device="cpu")


@pytest.mark.parametrize(("kind", "words"), SHARED)
def test_what_cannot_stay_the_same_on_two_ranks_is_refused_on_every_rank(ranks, kind, words):
    """Each rank would train its copy by a part of the gradient, or go by buffers of its own, and nobody notice."""
    for raised in ranks(2).run_expecting_errors(split_shared, kind):
        assert raised.type == "SplitError"
        with pytest.raises(AssertionError, match=words):
            raise AssertionError(raised.message)


def what_layers_share(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(WIDTH, WIDTH).double() for _ in range(10)]
    if kind == "on a rank":
        layers[1] = layers[9] = layers[0]  # twice on stage 0, and on stage 3
        layers[5] = layers[4]  # on stages 1 and 2
        object.__setattr__(layers[6], "other", [layers[7]])
    else:
        layers[3] = layers[6] = layers[0]  # on all ranks
        layers[5].weight = layers[9].weight
    return nn.Sequential(*layers)


def train_what_is_shared(kind: str, directory: str) -> list[str]:
    whole = what_layers_share(kind)
    training = Training(split(whole, device="cpu"))
    unsplit = Training(whole)
    for seed in range(3):
        assert training.step(seed) == pytest.approx(unsplit.step(seed), rel=1e-12)
        x, target = make_batch(4 * N, seed)
        if dist.get_rank() == 0:
            training.schedule.step(x, target=target)
        else:
            training.schedule.step()
        nn.functional.mse_loss(whole(x), target).backward()
        norms = clip_grad_norm_(training.schedule, 0.1), nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
        torch.testing.assert_close(*norms, rtol=1e-10, atol=1e-12)
    save_checkpoint(directory, training.model, training.optimizer)
    for each in (training, unsplit):
        each.optimizer.step()
    expected = dict(whole.named_parameters())
    for name, parameter in training.model.named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-10, atol=1e-12)
    changed = {name: tensor.clone() for name, tensor in training.model.named_parameters()}
    again = Training(what_layers_share(kind))
    load_checkpoint(directory, again.model, again.optimizer)
    load_checkpoint(directory, training.model, training.optimizer)
    loaded = dict(again.model.named_parameters())
    for name, parameter in training.model.named_parameters():
        assert parameter.equal(loaded[name])
        assert not parameter.equal(changed[name])
    return [name for stage in training.model.models for name in training.model.own_tensors(stage)]


@pytest.mark.parametrize(("kind", "num_ranks"), [("on a rank", 2), ("over ranks", 2), ("over ranks", 3)])
def test_what_layers_share_has_one_gradient_and_is_saved_once(ranks, kind, num_ranks, tmp_path):
    saved = [
        name for names in ranks(num_ranks).run(train_what_is_shared, kind, str(tmp_path / "state")) for name in names
    ]
    assert sorted(saved) == sorted(name for name, _ in what_layers_share(kind).named_parameters())


# ------------------------------------------------------------------------------------------------- what is refused


def misuse(kind: str) -> None:
    layers: list[Any] = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    if kind == "few":
        layers = layers[:3]
    if kind == "meta":
        layers[1] = nn.Linear(WIDTH, WIDTH, device="meta")
    if kind == "number":
        layers[1] = 3
    if kind == "fails":
        layers[1] = lambda: 1 / 0
    if kind == "no module":
        layers[1] = lambda: 3
    whole = layers if kind in ("number", "fails", "no module") else nn.Sequential(*layers)
    if kind == "hook":
        whole.register_forward_hook(lambda module, args, output: None)
    if kind == "crossing":
        whole[1] = nn.LSTM(WIDTH, WIDTH)
    if kind == "other":
        whole = nn.Linear(WIDTH, WIDTH)
    parts = split(whole, device="cpu")
    if kind == "save":
        parts.save_pretrained("nowhere")
    schedule = ScheduleDualPipeV(parts.stages, 2, nn.functional.mse_loss)
    x = torch.ones(4, WIDTH)
    inputs: dict[str, tuple[Any, ...]] = {"two inputs": (x, x)}
    named = {"x": x} if kind == "named" else {}
    if dist.get_rank() == 0:
        schedule.step(*(inputs.get(kind, (x,)) if not named else ()), target=x, **named)
    else:
        schedule.step()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("few", "3 layers cannot fill 4 stages: use at most 1 rank"),
        ("meta", "layer 1 is on meta, without weights: give a function that builds it"),
        ("number", "number 1 of the list is a int: give layers, or functions"),
        ("fails", "layer 1 could not be built: ZeroDivisionError"),
        ("no module", "layer 1 was built as a int: let the function return a module"),
        ("hook", "the Sequential itself has a hook"),
        ("crossing", "layer 1 gives a tuple, but what crosses to the next stage is a tensor"),
        ("other", "a Linear has a forward of its own"),
        ("save", "keep it by models.save_checkpoint"),
        ("two inputs", "layers take one input, the step was given 2"),
        ("named", "the step was given x, which the model was not split for: it takes one by position"),
    ],
)
def test_what_does_not_fit_is_told_on_every_rank(ranks, kind, words):
    for raised in ranks(2).run_expecting_errors(misuse, kind):
        assert words in raised.message


def test_what_is_no_model_is_told():
    with pytest.raises(TypeError, match="a int cannot be split: give a model, its config, or a list of layers"):
        plan_split(3, 2)  # type: ignore[arg-type]
    with pytest.raises(SplitError, match="7 layers cannot fill 8 stages: use at most 3 ranks"):
        plan_split([nn.Identity] * 7, 4)
