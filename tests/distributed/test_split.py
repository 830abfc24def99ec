"""Split models under the schedule on real ranks, with padding that differs between microbatches."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh

from pipelining_dualpipev import ScheduleDualPipeV, clip_grad_norm_, mean_loss
from pipelining_dualpipev.models import SplitModel, split
from tests.models.unsplit import unsplit_step
from tests.models.zoo import CASTS_TO_FP32, CONFIGS, make_batch, make_model

N = 3


def make_split(name: str, layers: int = 7, dtype: torch.dtype = torch.float64) -> tuple[SplitModel, ScheduleDualPipeV]:
    parts = split(make_model(name, layers, dtype), example=make_batch(2), device="cpu")
    return parts, ScheduleDualPipeV(parts.stages, N, parts.loss_fn)


def step(schedule: ScheduleDualPipeV, **batch: torch.Tensor) -> torch.Tensor:
    losses: list[torch.Tensor] = []
    if dist.get_rank() == 0:
        schedule.step(losses=losses, return_outputs=False, **batch)
    else:
        schedule.step()
    return mean_loss(schedule, losses)


def compare_with_unsplit(name: str) -> None:
    parts, schedule = make_split(name)
    batch = make_batch(2 * N)
    loss, gradients = unsplit_step(make_model(name), batch)
    for number in (1, 2):  # gradients add up
        assert abs(step(schedule, **batch) - loss) <= CASTS_TO_FP32 * loss
        for parameter_name, parameter in parts.named_parameters():
            expected = number * gradients[parameter_name]
            error = (parameter.grad - expected).abs().max() / expected.abs().max().clamp_min(1e-12)
            assert error <= CASTS_TO_FP32, f"{parameter_name} is off by {error:.1e}"


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", [name for name in CONFIGS if "router loss" not in name])
def test_loss_and_gradients_are_those_of_the_unsplit_model(ranks, name, num_ranks):
    ranks(num_ranks).run(compare_with_unsplit, name)


def compare_cut_otherwise(balance: str | list[int]) -> list[int]:
    parts = split(make_model("llama tied", 9), example=make_batch(2), device="cpu", balance=balance)  # type: ignore[arg-type]
    schedule = ScheduleDualPipeV(parts.stages, N, parts.loss_fn)
    for length in (10, 13):  # the second is planned anew
        batch = make_batch(2 * N, length=length)
        loss, gradients = unsplit_step(make_model("llama tied", 9), batch)
        assert abs(step(schedule, **batch) - loss) <= CASTS_TO_FP32 * loss
        for name, parameter in parts.named_parameters():
            error = (parameter.grad - gradients[name]).abs().max() / gradients[name].abs().max().clamp_min(1e-12)
            assert error <= CASTS_TO_FP32, f"{name} is off by {error:.1e}"
            parameter.grad = None
    return [event.stage for event in parts.plan.events if event.is_layer]


def test_layers_dealt_out_otherwise_give_the_gradients_of_the_unsplit_model(ranks):
    for stages in ranks(2).run(compare_cut_otherwise, [1, 6, 7]):
        assert stages == [0, 1, 1, 1, 1, 1, 2, 3, 3]
    for stages in ranks(2).run(compare_cut_otherwise, "cost"):
        assert stages == sorted(stages)
        assert set(stages) == {0, 1, 2, 3}


def balance_of_its_own() -> None:
    cuts = [1, 2, 3] if dist.get_rank() else [1, 2, 4]
    parts = split(make_model("llama", 5), example=make_batch(2), device="cpu", balance=cuts)
    ScheduleDualPipeV(parts.stages, N, parts.loss_fn)


def test_ranks_that_deal_out_layers_otherwise_are_told(ranks):
    for raised in ranks(2).run_expecting_errors(balance_of_its_own):
        assert raised.type == "RanksDisagreeError"
        assert "how the model is split" in raised.message


def compare_with_full_backwards(name: str) -> str:
    """All backwards are split with so few microbatches, and with zb=0 none is."""
    parts, schedule = make_split(name)
    whole = split(make_model(name), example=make_batch(2), device="cpu")
    unsplit = ScheduleDualPipeV(whole.stages, N, whole.loss_fn, zb=0)
    assert "I" in str(schedule.pipeline_order[dist.get_rank()])
    assert "I" not in str(unsplit.pipeline_order[dist.get_rank()])
    batch = make_batch(2 * N)
    assert step(schedule, **batch) == step(unsplit, **batch)
    for (parameter_name, ours), theirs in zip(parts.named_parameters(), whole.parameters(), strict=True):
        error = (ours.grad - theirs.grad).abs().max() / theirs.grad.abs().max().clamp_min(1e-12)
        assert error <= 1e-13, f"{parameter_name} is off by {error:.1e}"
    assert "no weight gradient has been put off so far" in unsplit.explain()
    return schedule.explain()


@pytest.mark.parametrize("name", ["llama tied", "gpt2", "mixtral", "t5"])
def test_weight_gradients_put_off_are_those_of_full_backwards(ranks, name):
    for rank, told in enumerate(ranks(2).run(compare_with_full_backwards, name)):
        lines = told.splitlines()
        assert [line.partition(":")[0] for line in lines] == [f"stage {rank}", f"stage {3 - rank}"]
        assert all("are put off to W" in line for line in lines)


def the_whole_model_on_one_rank() -> None:
    compare_with_unsplit("llama tied")


def test_one_rank_holds_both_stages(ranks):
    ranks(1).run(the_whole_model_on_one_rank)


def train_as_adamw_does_unsplit() -> None:
    parts, schedule = make_split("llama tied")
    whole = make_model("llama tied")
    ours, theirs = (torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (parts, whole))
    for seed in range(3):
        batch = make_batch(2 * N, seed)
        step(schedule, **batch)
        whole(**batch, use_cache=False).loss.backward()
        clip_grad_norm_(schedule, 0.5)
        torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    expected = dict(whole.named_parameters())
    names = [parameter_name for parameter_name, _ in parts.named_parameters()]
    assert len(names) == len(set(names))
    for parameter_name, parameter in parts.named_parameters():
        torch.testing.assert_close(parameter, expected[parameter_name], rtol=0, atol=1e-6)


def optimize_every_parameter() -> tuple[list[str], list[str], int]:
    parts, _ = make_split("llama tied")
    named = [parameter_name for parameter_name, _ in parts.named_parameters()]
    objects = list(parts.parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = torch.optim.AdamW(parts.parameters())
    assert len({id(parameter) for parameter in objects}) == len(objects) == len(optimizer.param_groups[0]["params"])
    return named, [str(warning.message) for warning in caught], len(objects)


def test_a_tied_parameter_is_given_once_and_adamw_does_not_warn(ranks):
    """torch warns of a parameter that comes twice, and would then give it two updates a step."""
    told = ranks(2).run(optimize_every_parameter)
    assert [caught for _, caught, _ in told] == [[], []]
    names = [parameter_name for named, _, _ in told for parameter_name in named]
    assert sorted(names) == sorted(parameter_name for parameter_name, _ in make_model("llama tied").named_parameters())
    assert "model.embed_tokens.weight" in told[0][0]
    assert "lm_head.weight" not in names


def test_three_adamw_steps_with_clipping_give_the_weights_of_the_unsplit_model(ranks):
    ranks(2).run(train_as_adamw_does_unsplit)


def evaluate_outputs() -> None:
    parts, schedule = make_split("gpt2")
    parts.eval()
    batch = make_batch(2 * N)
    losses: list[torch.Tensor] = []
    inputs = batch if dist.get_rank() == 0 else {}
    output = schedule.eval(losses=losses, **inputs)
    if dist.get_rank() == 0:
        whole = make_model("gpt2").eval()(**batch)
        torch.testing.assert_close(output.logits, whole.logits, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(torch.stack(losses).mean().double(), whole.loss.double(), rtol=1e-6, atol=1e-6)


def test_evaluation_gives_logits_and_the_models_loss(ranks):
    ranks(2).run(evaluate_outputs)


def bad_inputs() -> list[str]:
    parts, schedule = make_split("llama")
    batch = make_batch(2 * N)
    untrained = ScheduleDualPipeV(parts.stages, N)  # as with the loss_fn of a split without labels, which is None
    of_another_type = {**batch, "input_ids": batch["input_ids"].float()}
    words = []
    for each, given in (
        (schedule, {**batch, "pixels": batch["input_ids"]}),
        (schedule, {**batch, "position_ids": batch["input_ids"]}),
        (schedule, {**batch, "target": batch["labels"]}),
        (schedule, of_another_type),
        (untrained, batch),
        (ScheduleDualPipeV(parts.stages, N, lambda output, target: target.sum()), batch),
    ):
        try:
            step(each, **given)
        except (ValueError, RuntimeError) as error:
            words.append(str(error))
    del parts
    return words


def test_inputs_that_the_split_does_not_know_are_refused_on_every_rank(ranks):
    for unknown, unplanned, twice, of_another_type, untrained, of_my_own in ranks(2).run(bad_inputs):
        assert "pixels, which the model was not split for: it takes attention_mask, " in unknown
        assert "stage 1 needs position_ids, which it did not for the example" in unplanned
        assert "the target was given twice, as target and as labels" in twice
        assert "'input_ids' is torch.float32, but the split was planned for torch.int64" in of_another_type
        assert "losses were asked for, but there is no loss_fn" in untrained
        assert "for a loss_fn of your own leave 'labels' out of the example" in of_my_own


def other_shapes(name: str) -> None:
    """Sequences and batches of other sizes, training and evaluation in turn, with a stage that reads no input."""
    whole = make_model(name)
    example = make_batch(2)
    del example["attention_mask"]
    parts = split(whole, example=example, device="cpu")
    schedule = ScheduleDualPipeV(parts.stages, N, parts.loss_fn)
    for rows, length in ((2, 10), (1, 7), (1, 7), (4, 13), (2, 10)):
        batch = make_batch(rows * N, length=length)
        del batch["attention_mask"]
        loss, gradients = unsplit_step(whole, batch)
        assert abs(step(schedule, **batch) - loss) <= CASTS_TO_FP32 * loss
        for parameter_name, parameter in parts.named_parameters():
            expected = gradients[parameter_name]
            error = (parameter.grad - expected).abs().max() / expected.abs().max().clamp_min(1e-12)
            assert error <= CASTS_TO_FP32, f"{parameter_name} is off by {error:.1e}"
            parameter.grad = None
        longer = make_batch(rows * N, length=length + 4)
        del longer["attention_mask"]
        losses: list[torch.Tensor] = []
        schedule.eval(**(longer if dist.get_rank() == 0 else {}), losses=losses)
        assert abs(mean_loss(schedule, losses) - whole(**longer).loss) <= CASTS_TO_FP32 * loss


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_ranks"), [("llama", 2), ("llama", 3), ("t5", 2)])
def test_sequences_and_batches_of_other_sizes_are_planned_anew_on_every_rank(ranks, name, num_ranks):
    ranks(num_ranks).run(other_shapes, name)


def too_few_layers() -> None:
    split(make_model("llama", layers=3), example=make_batch(2), device="cpu")


def test_too_few_layers_are_told_on_every_rank(ranks):
    for raised in ranks(2).run_expecting_errors(too_few_layers):
        assert raised.type == "SplitError"
        assert "3 layers cannot fill 4 stages: use at most 1 rank" in raised.message


def too_few_layers_on_rank_1() -> None:
    split(make_model("llama", layers=7 - 4 * dist.get_rank()), example=make_batch(2), device="cpu")


def test_a_split_that_fails_on_one_rank_fails_on_all(ranks):
    """The others came to wait for it until the group's timeout."""
    told, own = ranks(2).run_expecting_errors(too_few_layers_on_rank_1)
    assert own.message.startswith("3 layers cannot fill 4 stages")
    assert told.message == f"rank 1: SplitError: {own.message}"


def adapters_after_the_split() -> list[str]:
    parts, schedule = make_split("llama")
    for stage, model in parts.models.items():
        for index in {0: [0, 1], 1: [2, 3], 2: [4, 5], 3: [6]}[stage]:
            model.model.layers[index].mlp.register_parameter("extra", torch.nn.Parameter(torch.ones(2)))
    step(schedule, **make_batch(2 * N))
    return [name for name, _ in parts.named_parameters() if "extra" in name]


def test_parameters_that_were_added_after_the_split_have_their_names_in_the_model(ranks):
    names = [name for names in ranks(2).run(adapters_after_the_split) for name in names]
    assert sorted(names) == [f"model.layers.{index}.mlp.extra" for index in range(7)]


def split_over_a_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    parts = split(make_model("llama"), mesh["pp"], example=make_batch(2), device="cpu", dp_group=mesh["dp"].get_group())
    schedule = ScheduleDualPipeV(parts.stages, N, parts.loss_fn)
    half = mesh["dp"].get_local_rank()
    batch = make_batch(4 * N)
    own = {name: tensor.chunk(2)[half] for name, tensor in batch.items()}
    if mesh["pp"].get_local_rank() == 0:
        schedule.step(**own)
    else:
        schedule.step()
    _, gradients = unsplit_step(make_model("llama"), batch)
    for parameter_name, parameter in parts.named_parameters():
        dist.all_reduce(parameter.grad, group=mesh["dp"].get_group())
        expected = gradients[parameter_name]
        error = (parameter.grad / 2 - expected).abs().max() / expected.abs().max()
        assert error <= CASTS_TO_FP32, f"{parameter_name} is off by {error:.1e}"


def test_over_a_mesh_the_loss_counts_the_labels_of_all_data_parallel_ranks(ranks):
    ranks(4).run(split_over_a_mesh)


# ----------------------------------------------------------------------------------------------------------- saving


class Tokenizer:
    def save_pretrained(self, directory: Path) -> None:
        (Path(directory) / "tokenizer.json").write_text("{}")


def save(
    name: str, directory: str, max_shard_size: int | str = "5GB", dtype: torch.dtype | None = torch.float32
) -> None:
    parts, schedule = make_split(name, dtype=dtype or torch.float64)
    if dtype is None:
        step(schedule, **make_batch(2 * N))
        for stage in parts.stages:
            stage.submod.bfloat16()
        step(schedule, **make_batch(2 * N))
    parts.save_pretrained(directory, tokenizer=Tokenizer(), max_shard_size=max_shard_size)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_a_saved_model_opens_in_plain_transformers_bit_for_bit(ranks, name, tmp_path):
    directory = tmp_path / "out"
    ranks(2).run(save, name, str(directory), max_shard_size=6000)
    auto = CONFIGS[name][1]
    opened, info = auto.from_pretrained(directory, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    expected = make_model(name, dtype=torch.float32)
    for (parameter_name, a), b in zip(opened.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, b), parameter_name
    files = sorted(os.listdir(directory))
    assert {"config.json", "model.safetensors.index.json", "tokenizer.json"} <= set(files)
    assert sum(file.endswith(".safetensors") for file in files) > 2
    assert os.listdir(tmp_path) == ["out"], "nothing is left beside it"


@pytest.mark.parametrize("dtype", [torch.float64, None], ids=["float64", "converted between two steps"])
def test_a_saved_model_opens_in_the_type_that_it_was_saved_in(ranks, dtype, tmp_path):
    ranks(2).run(save, "llama tied", str(tmp_path), dtype=dtype)
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = make_model("llama tied").to(dtype or torch.bfloat16)
    for (name, a), b in zip(opened.named_parameters(), expected.parameters(), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b), name


def test_saving_over_a_checkpoint_replaces_it_whole(ranks, tmp_path):
    directory = tmp_path / "out"
    directory.mkdir()
    (directory / "model.safetensors").write_text("old")
    ranks(2).run(save, "llama", str(directory))
    assert not (directory / "model.safetensors").exists()
    transformers.AutoModelForCausalLM.from_pretrained(directory)


def save_with_a_full_disk_on_rank_1(directory: str) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError("no space left on device")

    parts, _ = make_split("llama", dtype=torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr("pipelining_dualpipev.models.save.save_file", full)
        parts.save_pretrained(directory)


def test_a_rank_that_cannot_write_is_told_on_every_rank_and_the_old_checkpoint_stays(ranks, tmp_path):
    directory = tmp_path / "out"
    directory.mkdir()
    (directory / "model.safetensors").write_text("old")
    for raised in ranks(2).run_expecting_errors(save_with_a_full_disk_on_rank_1, str(directory)):
        assert raised.type == "OSError"
        assert "no space left on device" in raised.message
    assert (directory / "model.safetensors").read_text() == "old"
    assert os.listdir(tmp_path) == ["out"]


def test_a_file_in_the_way_is_told_on_every_rank(ranks, tmp_path):
    (tmp_path / "out").write_text("a file")
    for raised in ranks(2).run_expecting_errors(save, "llama", str(tmp_path / "out")):
        assert "is a file: give a directory to save in" in raised.message


# ------------------------------------------------------------------------------------------------------ disagreement


def split_with_an_example_of_its_own() -> None:
    parts = split(make_model("llama"), example=make_batch(2, length=10 + dist.get_rank()), device="cpu")
    ScheduleDualPipeV(parts.stages, N, parts.loss_fn)


def test_ranks_that_split_by_different_examples_are_told(ranks):
    for raised in ranks(2).run_expecting_errors(split_with_an_example_of_its_own):
        assert raised.type == "RanksDisagreeError"
        assert "differ in how the model is split" in raised.message
