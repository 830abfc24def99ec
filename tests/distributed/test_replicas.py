"""Modules that a model calls on stages of several ranks: each holds one, and all of them stay the one that they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from safetensors.torch import load_file
from torch import nn

from pipelining_dualpipev import ScheduleDualPipeV, clip_grad_norm_, mean_loss
from pipelining_dualpipev.models import SplitModel, from_pretrained, load_checkpoint, save_checkpoint, split
from tests.models.unsplit import unsplit_step
from tests.models.zoo import CASTS_TO_FP32, make_batch

N = 3
SLOW = pytest.mark.slow
SIZES = {"vocab_size": 37, "hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 24, "pad_token_id": 0}


def make_albert(dtype: torch.dtype = torch.float64) -> nn.Module:
    """One layer that is called four times, so every stage holds it; also the embedding is tied to the head."""
    config = hf.AlbertConfig(
        **SIZES,
        embedding_size=8,
        num_hidden_layers=4,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    return hf.AlbertForMaskedLM(config).to(dtype).train()


def make_zamba2(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Two blocks that come back in turn between layers of their own."""
    types = ["mamba", "hybrid"] * 4
    config = hf.Zamba2Config(
        **SIZES,
        num_hidden_layers=8,
        layers_block_type=types,
        layer_types=types,
        num_mem_blocks=2,
        num_key_value_heads=4,
        attention_head_dim=8,
        mamba_d_state=4,
        mamba_headdim=8,
        n_mamba_heads=4,
        mamba_ngroups=1,
        adapter_rank=4,
        chunk_size=8,
        max_position_embeddings=32,
    )
    torch.manual_seed(0)
    return hf.Zamba2ForCausalLM(config).to(dtype).train()


MAKE = {"albert": make_albert, "zamba2": make_zamba2}


def make_split(name: str, model: nn.Module | None = None) -> tuple[SplitModel, ScheduleDualPipeV]:
    parts = split(model or MAKE[name](), example=make_batch(2), device="cpu")
    return parts, ScheduleDualPipeV(parts.stages, N, parts.loss_fn)


def step(schedule: ScheduleDualPipeV, **batch: Any) -> torch.Tensor:
    losses: list[torch.Tensor] = []
    given = {name: value for name, value in batch.items() if name == "finalize_gradients" or dist.get_rank() == 0}
    schedule.step(**given, **({"losses": losses, "return_outputs": False} if dist.get_rank() == 0 else {}))
    return mean_loss(schedule, losses)


def compare(parts: SplitModel, expected: dict[str, torch.Tensor], times: float = 1) -> None:
    for name, parameter in parts.named_parameters():
        wanted = times * expected[name]
        error = (parameter.grad - wanted).abs().max() / wanted.abs().max().clamp_min(1e-12)
        assert error <= CASTS_TO_FP32, f"{name} is off by {error:.1e}"


def gradients_over_several_steps(name: str) -> int:
    parts, schedule = make_split(name)
    batch = make_batch(2 * N)
    loss, expected = unsplit_step(MAKE[name](), batch)
    for number in (1, 2):  # gradients add up, and are summed over ranks once each
        assert abs(step(schedule, **batch) - loss) <= CASTS_TO_FP32 * loss
        compare(parts, expected, number)
    step(schedule, **batch, finalize_gradients=False)
    step(schedule, **batch)
    compare(parts, expected, 4)
    for parameter in parts.parameters():
        parameter.grad.zero_()
    step(schedule, **batch)
    compare(parts, expected)
    return len(schedule.counted_elsewhere())


# Four calls of one layer are no six stages.
@pytest.mark.parametrize(("name", "num_ranks"), [("albert", 2), ("zamba2", 2), pytest.param("zamba2", 3, marks=SLOW)])
def test_every_replica_has_the_whole_gradient_however_many_steps_add_up(ranks, name, num_ranks):
    first, *others = ranks(num_ranks).run(gradients_over_several_steps, name)
    assert first == 0
    assert any(others)


def train_and_save(name: str, directory: str) -> None:
    whole = MAKE[name]()
    parts, schedule = make_split(name)
    ours, theirs = (torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (parts, whole))
    for seed in range(3):
        batch = make_batch(2 * N, seed)
        step(schedule, **batch)
        whole(**batch).loss.backward()
        expected_norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        assert abs(clip_grad_norm_(schedule, 0.5) / expected_norm - 1) < 1e-6, "each replica is counted once"
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    parts.save_pretrained(directory)
    save_checkpoint(f"{directory}-state", parts, ours)
    again, schedule = make_split(name)
    optimizer = torch.optim.AdamW(again.parameters(), lr=1e-2)
    load_checkpoint(f"{directory}-state", again, optimizer)
    for (parameter_name, a), b in zip(again.named_parameters(), parts.parameters(), strict=True):
        assert torch.equal(a, b), parameter_name
        assert torch.equal(optimizer.state[a]["exp_avg"], ours.state[b]["exp_avg"]), parameter_name
    of_own = {"device": "cpu", "dtype": torch.float64, "model_class": type(whole)}
    opened = from_pretrained(directory, example=make_batch(2), **of_own)
    for (parameter_name, a), b in zip(opened.named_parameters(), parts.parameters(), strict=True):
        assert torch.equal(a, b), parameter_name


@pytest.mark.parametrize("name", ["albert", pytest.param("zamba2", marks=pytest.mark.slow)])
def test_three_adamw_steps_with_clipping_give_the_unsplit_weights_which_are_saved_once(ranks, name, tmp_path):
    directory = tmp_path / "out"
    ranks(2).run(train_and_save, name, str(directory))
    whole = MAKE[name]()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    for seed in range(3):
        whole(**make_batch(2 * N, seed)).loss.backward()
        torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    opened, info = type(whole).from_pretrained(directory, output_loading_info=True, dtype=torch.float64)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for (name, a), b in zip(opened.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6, msg=name)
    stored = [name for file in sorted(directory.glob("*.safetensors")) for name in load_file(file)]
    assert len(stored) == len(set(stored)), "each is in one file"


def made_by_each_rank(kind: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    with torch.device("meta" if kind == "meta" else "cpu"):
        model = make_albert()
    if kind == "other seeds":
        torch.manual_seed(dist.get_rank())
        for parameter in model.parameters():
            nn.init.normal_(parameter)
    torch.manual_seed(dist.get_rank())
    parts, schedule = make_split("albert", model)
    shared = [parameter.detach() for name, parameter in parts.named_parameters() if "albert_layers" in name]
    if kind == "meta":
        return shared, []
    optimizer = torch.optim.AdamW(parts.parameters())
    before = [parameter.clone() for parameter in shared]
    step(schedule, **make_batch(2 * N))
    optimizer.step()
    return before, shared


@pytest.mark.parametrize("kind", ["meta", "other seeds"])
def test_whatever_weights_each_rank_has_those_of_a_replica_are_the_first_ranks(ranks, kind):
    first, second = ranks(2).run(made_by_each_rank, kind)
    for a, b in zip(first, second, strict=True):
        assert len(a) == len(b)
        assert all(torch.equal(one, other) for one, other in zip(a, b, strict=True))
    assert any(a.std() > 0 for a in first[0])


def two_schedules() -> None:
    parts, schedule = make_split("albert")
    other = ScheduleDualPipeV(parts.stages, 2 * N, parts.loss_fn)
    batch = make_batch(2 * N)
    _, expected = unsplit_step(make_albert(), batch)
    for number, each in enumerate((schedule, other, schedule), start=1):
        step(each, **batch)
        compare(parts, expected, number)


def test_gradients_add_up_over_steps_of_two_schedules_of_the_same_stages(ranks):
    ranks(2).run(two_schedules)


def trained_here_and_frozen_there() -> None:
    parts, schedule = make_split("albert")
    for name, parameter in parts.named_parameters():
        if name.endswith("ffn.weight") and dist.get_rank() == 1:
            parameter.requires_grad_(False)
    step(schedule, **make_batch(2 * N))


def test_a_replica_frozen_on_one_rank_is_told_on_every_rank(ranks):
    for raised in ranks(2).run_expecting_errors(trained_here_and_frozen_there):
        assert raised.type == "PipelineError"
        assert "ffn.weight, which ranks 0, 1 hold, is frozen on one of them and trained on another" in raised.message


def fails_once() -> list[str]:
    parts, schedule = make_split("albert")
    batch = make_batch(2 * N)
    _, expected = unsplit_step(make_albert(), batch)
    step(schedule, **batch)
    layer = parts.stages[0].submod.get_submodule("model.albert.encoder.albert_layer_groups.0")
    told = []

    def fail(*_: object) -> None:
        raise ValueError("on purpose")

    handle = layer.register_forward_hook(fail) if dist.get_rank() == 1 else None
    try:
        step(schedule, **batch)
    except RuntimeError as error:
        told.append(str(error))
    if handle is not None:
        handle.remove()
    for parameter in parts.parameters():
        parameter.grad = None
    step(schedule, **batch)
    compare(parts, expected)
    return told


def test_after_a_step_that_failed_the_next_one_sums_again(ranks):
    for told in ranks(2).run(fails_once):
        assert "on purpose" in told[0]
