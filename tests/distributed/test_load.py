"""A checkpoint of transformers opened over ranks: the same weights, of which each rank has read its own alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

from pipelining_dualpipev import ScheduleDualPipeV, mean_loss
from pipelining_dualpipev.models import SplitModel, from_pretrained
from pipelining_dualpipev.models.files import StoredTensor
from tests.models.zoo import CONFIGS, make_batch, make_model

pytestmark = pytest.mark.slow

N = 3
NAMES = ["llama", "llama tied", "gpt2", "gemma3", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "t5"]
INDEX = "model.safetensors.index.json"


def store(name: str, directory: Path, layers: int = 8, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """What plain transformers has saved."""
    model = make_model(name, layers=layers, dtype=dtype)
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):  # no two alike, also where transformers starts with ones
            parameter.add_(0.001 * (index + 1))
        for index, buffer in enumerate(dict(model.named_buffers()).values()):
            if any(buffer is kept for kept in model.state_dict(keep_vars=True).values()):
                buffer.add_(0.01 * (index + 1))
    model.save_pretrained(directory, max_shard_size="20KB")
    return model


def step(parts: SplitModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    schedule = ScheduleDualPipeV(parts.stages, N, parts.loss_fn)
    losses: list[torch.Tensor] = []
    if dist.get_rank() == 0:
        schedule.step(**batch, losses=losses)
    else:
        schedule.step()
    return mean_loss(schedule, losses)


def open_train_and_save(source: str, result: str) -> dict[str, Any]:
    read = 0

    def count(self: StoredTensor, index: Any, get: Any = StoredTensor.__getitem__) -> torch.Tensor:
        nonlocal read
        data = get(self, index)
        read += data.nbytes
        return data

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StoredTensor, "__getitem__", count)
        parts = from_pretrained(source, example=make_batch(2), device="cpu")
    loaded = {name: parameter.detach().clone() for name, parameter in parts.named_parameters()}
    parts.train()
    loss = step(parts, make_batch(2 * N))
    torch.optim.SGD(parts.parameters(), lr=0.1).step()
    parts.save_pretrained(result)
    trained = {name: parameter.detach().clone() for name, parameter in parts.named_parameters()}
    return {"read": read, "loaded": loaded, "trained": trained, "loss": loss}


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_opened_trained_saved_and_opened_by_transformers(ranks, name, num_ranks, tmp_path):
    model = store(name, tmp_path / "source")
    told = ranks(num_ranks).run(open_train_and_save, str(tmp_path / "source"), str(tmp_path / "result"))
    expected = dict(model.named_parameters())
    own = [name for part in told for name in part["loaded"]]
    assert sorted(own) == sorted(expected), "each parameter is on one rank"
    buffers = sum(tensor.nbytes for key, tensor in model.state_dict().items() if key in dict(model.named_buffers()))
    for part in told:
        for key, value in part["loaded"].items():
            assert torch.equal(value, expected[key]), key
        size = buffers + sum(value.nbytes for value in part["loaded"].values())
        assert part["read"] == pytest.approx(size, rel=0.01)

    loss = model(**make_batch(2 * N), use_cache=False).loss
    loss.backward()
    assert told[0]["loss"] == pytest.approx(loss.item(), rel=1e-5)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    opened, info = CONFIGS[name][1].from_pretrained(tmp_path / "result", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    trained = {key: value for part in told for key, value in part["trained"].items()}
    for key, value in opened.named_parameters():
        assert torch.equal(value, trained[key]), key
        torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-5)
    theirs = dict(model.named_buffers())
    for key, value in opened.named_buffers():
        assert torch.equal(value, theirs[key]), key
    files = [{file.name for file in (tmp_path / where).glob("*.safetensors")} for where in ("source", "result")]
    keys = [
        {key for file in names for key in load_file(tmp_path / where / file)}
        for where, names in zip(("source", "result"), files, strict=True)
    ]
    assert keys[0] == keys[1], "the keys are those that transformers has written"


def open_in(source: str, dtype: str) -> dict[str, tuple[torch.dtype, bool]]:
    parts = from_pretrained(source, example=make_batch(2), device="cpu", dtype=dtype)
    assert not any(module.training for stage in parts.stages for module in stage.submod.modules())
    return {name: (parameter.dtype, parameter.requires_grad) for name, parameter in parts.named_parameters()}


def test_types_are_those_that_transformers_gives(ranks, tmp_path):
    """T5 keeps some weights in float32 though it is opened in float16."""
    store("t5", tmp_path / "source")
    found = {}
    for part in ranks(2).run(open_in, str(tmp_path / "source"), "float16"):
        found |= part
    opened = CONFIGS["t5"][1].from_pretrained(tmp_path / "source", dtype=torch.float16)
    assert found == {name: (parameter.dtype, True) for name, parameter in opened.named_parameters()}
    assert {dtype for dtype, _ in found.values()} == {torch.float16, torch.float32}


def open_by_name(cache: str, result: str) -> None:
    parts = from_pretrained(
        "somebody/tiny", example=make_batch(2), device="cpu", cache_dir=cache, local_files_only=True, revision="old"
    )
    parts.save_pretrained(result)


def test_a_name_on_the_hub_is_looked_up_as_transformers_does(ranks, tmp_path):
    """In a cache laid out as the hub's, so that nothing is downloaded; what generates text is kept as well."""
    repository = tmp_path / "cache" / "models--somebody--tiny"
    model = store("llama", repository / "snapshots" / "1234")
    settings = GenerationConfig(max_new_tokens=7, eos_token_id=2)
    settings.save_pretrained(repository / "snapshots" / "1234")
    (repository / "refs").mkdir()
    (repository / "refs" / "old").write_text("1234")
    ranks(2).run(open_by_name, str(tmp_path / "cache"), str(tmp_path / "result"))
    opened = CONFIGS["llama"][1].from_pretrained(tmp_path / "result")
    assert opened.generation_config.max_new_tokens == 7
    for (key, value), expected in zip(opened.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(value, expected), key


def test_a_name_that_is_not_in_the_cache_is_told_on_every_rank(ranks, tmp_path):
    for error in ranks(2).run_expecting_errors(open_by_name, str(tmp_path / "cache"), str(tmp_path / "result")):
        assert "somebody/tiny" in error.message


# ----------------------------------------------------------------------------------------------- what can be wrong


def open_only(source: str) -> None:
    from_pretrained(source, example=make_batch(2), device="cpu")


def file_of(directory: Path, key: str) -> Path:
    return directory / json.loads((directory / INDEX).read_text())["weight_map"][key]


KEY = "model.layers.4.mlp.up_proj.weight"  # on stage 2 of four, so on rank 1 of two


def lose_the_file(directory: Path) -> str:
    file = file_of(directory, KEY)
    file.unlink()
    return f"lacks the file {file.name}, which the index says holds 'model."


def cut_the_file_short(directory: Path) -> str:
    file = file_of(directory, KEY)
    file.write_bytes(file.read_bytes()[:-100])
    return f"{file}, which holds 'model.*is cut short or damaged: "


def lose_the_key(directory: Path) -> str:
    file = file_of(directory, KEY)
    save_file({key: tensor for key, tensor in load_file(file).items() if key != KEY}, file)
    return f"{file} lacks '{KEY}', which the index says it holds"


def lose_the_key_everywhere(directory: Path) -> str:
    lose_the_key(directory)
    index = json.loads((directory / INDEX).read_text())
    del index["weight_map"][KEY]
    (directory / INDEX).write_text(json.dumps(index))
    return f"no file of {directory} holds '{KEY}': the weights are not of this config"


def change_the_shape(directory: Path) -> str:
    file = file_of(directory, KEY)
    save_file({**load_file(file), KEY: torch.zeros(24, 15)}, file)
    return (
        rf"{KEY} is made of '{KEY}' in {file} and has shape \[24, 15\], the model's has \[24, 16\]: the weights are "
        "not of this config"
    )


def spoil_the_index(directory: Path) -> str:
    (directory / INDEX).write_text("{}")
    return f"{INDEX} is no index of a checkpoint: KeyError: 'weight_map'"


def have_no_weights(directory: Path) -> str:
    for file in directory.glob("*.safetensors*"):
        file.unlink()
    return f"has neither model.safetensors nor {INDEX}"


@pytest.mark.parametrize(
    "spoil",
    [
        lose_the_file,
        cut_the_file_short,
        lose_the_key,
        lose_the_key_everywhere,
        change_the_shape,
        spoil_the_index,
        have_no_weights,
    ],
)
def test_what_is_wrong_with_a_file_is_told_on_every_rank(ranks, spoil, tmp_path):
    store("llama", tmp_path / "source")
    words = spoil(tmp_path / "source")
    raised = ranks(2).run_expecting_errors(open_only, str(tmp_path / "source"))
    assert len(raised) == 2
    for error in raised:
        assert error.type == "CheckpointError"
        with pytest.raises(AssertionError, match=words):
            raise AssertionError(error.message)


def test_an_expert_that_is_missing_is_told_and_not_left_out(ranks, tmp_path):
    store("mixtral", tmp_path / "source")
    directory, key = tmp_path / "source", "model.layers.4.block_sparse_moe.experts.2.w1.weight"
    file = file_of(directory, key)
    save_file({name: tensor for name, tensor in load_file(file).items() if name != key}, file)
    index = json.loads((directory / INDEX).read_text())
    del index["weight_map"][key]
    (directory / INDEX).write_text(json.dumps(index))
    for error in ranks(2).run_expecting_errors(open_only, str(directory)):
        assert error.type == "CheckpointError"
        assert "model.layers.4.mlp.experts.gate_up_proj" in error.message


def test_embeddings_that_the_model_ties_but_the_files_do_not_are_refused(ranks, tmp_path):
    model = store("llama", tmp_path / "source")
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    (tmp_path / "source" / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    for error in ranks(2).run_expecting_errors(open_only, str(tmp_path / "source")):
        assert error.type == "CheckpointError"
        assert "different values for lm_head.weight and model.embed_tokens.weight" in error.message


def open_where_one_rank_lacks_the_directory(source: str) -> None:
    open_only(source if dist.get_rank() == 0 else f"{source}-elsewhere")


def test_a_rank_that_lacks_the_directory_is_told_on_the_others(ranks, tmp_path):
    store("llama", tmp_path / "source")
    here, there = ranks(2).run_expecting_errors(open_where_one_rank_lacks_the_directory, str(tmp_path / "source"))
    assert here.type == "CheckpointError"
    assert here.message.startswith("rank 1: ")
    assert "source-elsewhere" in there.message


def test_a_quantized_checkpoint_is_refused(ranks, tmp_path):
    store("llama", tmp_path / "source")
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    for error in ranks(2).run_expecting_errors(open_only, str(tmp_path / "source")):
        assert "is quantized, which cannot be trained" in error.message


def train_over_its_own_directory(source: str) -> None:
    parts = from_pretrained(source, example=make_batch(2), device="cpu").train()
    parts.save_pretrained(source)
    shutil.rmtree(source) if dist.get_rank() == 0 else None
    step(parts, make_batch(2 * N))  # the weights are no view of a file that has gone


def test_a_checkpoint_may_be_replaced_by_what_was_opened_from_it(ranks, tmp_path):
    store("llama", tmp_path / "source")
    ranks(2).run(train_over_its_own_directory, str(tmp_path / "source"))
