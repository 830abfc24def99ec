"""A run that is stopped and gone on with: to the bit on the same ranks, and exactly on another number of ranks."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from torch.distributed import checkpoint as dcp

from pipelining_dualpipev import ScheduleDualPipeV, clip_grad_norm_, mean_loss
from pipelining_dualpipev.models import SplitModel, load_checkpoint, save_checkpoint, split
from tests.models.zoo import make_batch, make_model

pytestmark = pytest.mark.slow

N = 3
State = dict[str, torch.Tensor]


class Run:
    """Training of a tiny model whose dropout draws random numbers, with all that a run has."""

    def __init__(self, name: str, seed: int, layers: int = 8) -> None:
        whole = make_model(name, layers, dtype=torch.float32)
        for module in whole.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.1
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in whole.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
        self.model: Any = split(whole, example=make_batch(2), device="cpu") if dist.is_initialized() else whole
        self.optimizer = torch.optim.AdamW(groups(self.model), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.9**step)
        self.position = 0
        if isinstance(self.model, SplitModel):
            self.schedule = ScheduleDualPipeV(self.model.stages, N, self.model.loss_fn)

    def loss(self) -> torch.Tensor:
        batch = make_batch(2 * N, seed=self.position)
        self.position += 1
        if not isinstance(self.model, SplitModel):
            loss = self.model(**batch, use_cache=False).loss
            loss.backward()
            return loss.detach()
        losses: list[torch.Tensor] = []
        if dist.get_rank() == 0:
            self.schedule.step(**batch, losses=losses)
        else:
            self.schedule.step()
        return mean_loss(self.schedule, losses)

    def step(self) -> float:
        loss = self.loss()
        if isinstance(self.model, SplitModel):
            clip_grad_norm_(self.schedule, 1.0)
        else:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return float(loss)

    def save(self, directory: str) -> None:
        extra = {"position": self.position}
        save_checkpoint(directory, self.model, self.optimizer, self.scheduler, extra=extra)

    def load(self, directory: str) -> None:
        self.position = load_checkpoint(directory, self.model, self.optimizer, self.scheduler)["position"]

    def state(self) -> State:
        """Everything there is of each parameter."""
        state = {}
        for name, parameter in self.model.named_parameters():
            state[name] = parameter.detach().clone()
            for key, value in self.optimizer.state[parameter].items():
                state[f"{name}: {key}"] = value.clone()
        if isinstance(self.model, torch.nn.Module):
            kept = self.model.state_dict()
            state |= {name: kept[name].clone() for name, _ in self.model.named_buffers() if name in kept}
        return state


def groups(model: Any) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


# -------------------------------------------------------------------------------------------------- the same ranks


def stop_and_go_on(name: str, directory: str, steps: int) -> None:
    run = Run(name, seed=1)
    for _ in range(3):
        run.step()
    run.save(directory)
    python, expected = random.getstate(), [run.step() for _ in range(steps)]
    again = Run(name, seed=2)
    again.step()
    random.random()
    again.load(directory)
    assert random.getstate() == python
    assert again.position == 3
    assert [again.step() for _ in range(steps)] == expected
    theirs = run.state()
    assert all(torch.equal(value, theirs[key]) for key, value in again.state().items())


@pytest.mark.parametrize("name", ["gpt2", "llama tied", "deepseek_v3"])
def test_on_the_same_ranks_the_next_ten_losses_are_the_same_to_the_bit(ranks, name, tmp_path):
    ranks(2).run(stop_and_go_on, name, str(tmp_path / "state"), 10)


# ----------------------------------------------------------------------------------------------- on other ranks


def begin(name: str, directory: str) -> tuple[State, list[float], list[float]]:
    run = Run(name, seed=1)
    for _ in range(3):
        run.step()
    run.save(directory)
    state, rates = run.state(), run.scheduler.get_last_lr()
    run.model.eval()  # dropout would draw other numbers on other ranks
    return state, rates, [run.step() for _ in range(3)]


def go_on(name: str, directory: str) -> tuple[State, list[float], list[float]]:
    run = Run(name, seed=2)
    run.load(directory)
    assert run.position == 3
    state, rates = run.state(), run.scheduler.get_last_lr()
    run.model.eval()
    return state, rates, [run.step() for _ in range(3)]


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 1), (1, 3)])
@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_on_another_number_of_ranks(ranks, name, before, after, tmp_path):
    saved = ranks(before).run(begin, name, str(tmp_path / "state"))
    loaded = ranks(after).run(go_on, name, str(tmp_path / "state"))
    compare(saved, loaded)


@pytest.mark.parametrize("name", ["gpt2", "deepseek_v3", "t5"])
def test_into_the_model_that_is_not_split(ranks, name, tmp_path):
    saved = ranks(2).run(begin, name, str(tmp_path / "state"))
    compare(saved, [go_on(name, str(tmp_path / "state"))])


def compare(saved: list[tuple[State, list[float], list[float]]], loaded: list[Any]) -> None:
    there = {key: value for state, _, _ in saved for key, value in state.items()}
    here = {key: value for state, _, _ in loaded for key, value in state.items()}
    assert here.keys() >= there.keys()
    assert all(torch.equal(value, here[key]) for key, value in there.items())
    for _, rates, losses in loaded:
        assert rates == saved[0][1]
        assert losses == pytest.approx(saved[0][2], rel=1e-4)


def half_precision(directory: str) -> None:
    """torch gives an optimiser's state the type of its parameter; what was saved in float32 stays in float32."""
    parts = split(make_model("llama", dtype=torch.bfloat16), example=make_batch(2), device="cpu")
    optimizer = torch.optim.AdamW(parts.parameters())
    for parameter in parts.parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(5.0),
            "exp_avg": torch.randn(parameter.shape),
            "exp_avg_sq": torch.rand(parameter.shape),
        }
    before = {parameter: dict(entries) for parameter, entries in optimizer.state.items()}
    save_checkpoint(directory, parts, optimizer)
    load_checkpoint(directory, parts, optimizer)
    for parameter, entries in before.items():
        for key, value in entries.items():
            assert optimizer.state[parameter][key].dtype == torch.float32
            assert torch.equal(optimizer.state[parameter][key], value)


def test_state_in_float32_of_weights_in_bfloat16(ranks, tmp_path):
    ranks(2).run(half_precision, str(tmp_path / "state"))


# ------------------------------------------------------------------------------------------------------- crashes


def save_and_fail(directory: str, where: str) -> list[str]:
    run = Run("llama", seed=1)
    run.step()
    run.save(directory)
    expected = run.state()
    run.step()
    with pytest.MonkeyPatch.context() as patch:

        def full(*args: Any, **kwargs: Any) -> None:
            raise OSError("no space left on device")

        if where == "write" and dist.get_rank() == 1:
            patch.setattr(dcp.FileSystemWriter, "write_data", full)
        if where == "publish" and dist.get_rank() == 0:
            patch.setattr(Path, "replace", full)
        with pytest.raises(OSError, match="no space left on device"):
            run.save(directory)
    dist.barrier()
    again = Run("llama", seed=2)
    again.load(directory)
    assert all(torch.equal(value, expected[key]) for key, value in again.state().items())
    again.step()
    again.save(directory)
    dist.barrier()
    return sorted(path.name for path in Path(directory).iterdir())


@pytest.mark.parametrize("where", ["write", "publish"])
def test_a_save_that_fails_is_told_on_every_rank_and_leaves_the_one_before(ranks, where, tmp_path):
    for left in ranks(2).run(save_and_fail, str(tmp_path / "state"), where):
        assert left == ["LATEST", "state-1"], "and the next save sweeps its remains away"


# -------------------------------------------------------------------------------------------------- what is refused


def load_other(directory: str, what: str) -> None:
    run = Run("llama", seed=1, layers=7 if what == "model" else 8)
    if what == "groups":
        run.optimizer = torch.optim.AdamW(run.model.parameters())
    if what == "membership":
        swapped = groups(run.model)[::-1]
        run.optimizer = torch.optim.AdamW(swapped)
    if what == "foreign":
        run.optimizer.param_groups[0]["params"].append(torch.nn.Parameter(torch.zeros(1)))
    run.load(f"{directory}{'-elsewhere' if what == 'place' else ''}")


def save_other(directory: str, what: str) -> None:
    if what == "optimizer":
        save_checkpoint(directory, Run("llama", seed=1).model)
    else:
        run = Run("llama" if what != "shape" else "llama tied", seed=1)
        run.save(directory)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("place", "holds no checkpoint of save_checkpoint: there is no file LATEST in it"),
        ("optimizer", "holds no optimizer: load it without one"),
        ("groups", "an optimizer of 2 parameter groups, this one has 1"),
        ("membership", "was in parameter group 1 of the optimizer and is now in 0"),
        ("foreign", "group 0 of the optimizer holds a parameter that is none of the model's"),
        ("shape", "lacks 'model/lm_head.weight'"),
        ("damage", "state-0 is damaged"),
        ("truncation", "', is cut short: it has "),
        ("loss", "/state-0 is damaged: the file __1_0.distcp, which holds '"),
    ],
)
def test_what_does_not_fit_is_told_on_every_rank(ranks, what, words, tmp_path):
    directory = str(tmp_path / "state")
    ranks(2).run(save_other, directory, what)
    if what == "damage":
        metadata = tmp_path / "state" / "state-0" / ".metadata"
        metadata.write_bytes(metadata.read_bytes()[:10])
    written = tmp_path / "state" / "state-0" / "__1_0.distcp"
    if what == "truncation":
        written.write_bytes(written.read_bytes()[:-2000])
    if what == "loss":
        written.unlink()
    for raised in ranks(2).run_expecting_errors(load_other, directory, what):
        assert raised.type == "CheckpointError"
        assert words in raised.message


def test_a_parameter_of_another_shape_is_told(ranks, tmp_path):
    ranks(2).run(save_other, str(tmp_path / "state"), "plain")
    config = hf.LlamaConfig(**json.loads(make_model("llama", 8).config.to_json_string(use_diff=False)))
    config.intermediate_size = 25
    with pytest.raises(ValueError, match=r"mlp.gate_proj.weight has shape \[24, 16\] in .* and \[25, 16\] here"):
        load_checkpoint(tmp_path / "state", hf.LlamaForCausalLM(config))
