"""Tokens, batches, held-out windows and the bigram baseline."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipelining_dualpipev.training.config import TrainConfig
from pipelining_dualpipev.training.data import (
    ByteEncoding,
    HeldOut,
    TokenizerEncoding,
    bigram_model,
    held_out_loss,
    load_data,
)
from pipelining_dualpipev.training.model import build_model, check_vocabulary, load_encoding, open_model
from pipelining_dualpipev.training.text import find_text, hold_out


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(30):
        (folder / f"{i}.txt").write_text(f"This is file number {i}, größer als {i - 1}. " * 20, encoding="utf-8")
    return TrainConfig(data=str(folder), batch_size=4, microbatches=2, seq_len=16, held_out_batches=3)


def words_tokenizer() -> Any:
    """A tokenizer of pieces, made here: nothing is downloaded."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from tokenizers.decoders import ByteLevel
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["This is file number 12, größer als 11. "] * 5, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_a_byte_is_a_token():
    ids = ByteEncoding().encode("aé\n".encode())
    assert ids.tolist() == [97, 195, 169, 10]
    assert ByteEncoding().decode(ids) == "aé\n".encode()


def test_a_batch_is_a_function_of_seed_and_step(config: TrainConfig):
    data, again = load_data(config, ByteEncoding()), load_data(config, ByteEncoding())
    batch = data.batch(7, config)
    assert batch.shape == (4, 16)
    assert batch.dtype == torch.long
    assert torch.equal(batch, again.batch(7, config))
    others = [data.batch(8, config), data.batch(7, replace(config, seed=1)), data.batch(7, replace(config, seed=-1))]
    assert not any(torch.equal(batch, other) for other in others)


def test_every_window_of_the_text_can_be_drawn():
    data = load_data(TrainConfig(data=__file__, batch_size=1, microbatches=1, seq_len=64), ByteEncoding())
    short = replace(data, tokens=torch.arange(66, dtype=torch.uint8))
    config = TrainConfig(batch_size=64, seq_len=64)
    assert set(short.batch(0, config)[:, 0].tolist()) == {0, 1, 2}
    assert short.batch(0, config)[:, -1].max() == 65


def test_training_never_sees_what_is_held_out(config: TrainConfig):
    folder = Path(str(config.data))
    for i in range(30):
        (folder / f"{i}.txt").write_bytes(bytes([i + 1]) * 400)
    data = load_data(config, ByteEncoding())
    held, trained = set(data.held_out.windows.flatten().tolist()), set(data.tokens.tolist())
    assert held
    assert held | trained <= set(range(1, 31))
    assert not held & trained
    assert data.held_out_files == 30 - len(trained)


def test_held_out_windows_do_not_overlap_and_fill_whole_batches(config: TrainConfig):
    everything = bytes(range(200))
    file = Path(str(config.data)) / "one.txt"
    file.write_bytes(everything)
    data = load_data(replace(config, data=str(file)), ByteEncoding())
    assert data.held_out.windows.shape == (4, 16)  # 64 bytes of the tail: one batch
    assert data.held_out.windows.flatten().tolist() == list(everything[-64:])
    assert [len(batch) for batch in load_data(TrainConfig(), ByteEncoding()).held_out.batches(32)] == [32] * 16


def test_a_tokenizer_makes_the_tokens_and_losses_are_told_in_bytes(config: TrainConfig):
    encoding = TokenizerEncoding(words_tokenizer())
    data = load_data(config, encoding)
    assert data.tokens.max() >= 256
    spans = [len(encoding.decode(window[1:])) for window in data.held_out.windows]
    assert data.held_out.predicted_bytes == sum(spans) > data.held_out.windows[:, 1:].numel()
    tokens = data.held_out.windows[:, 1:].numel()
    assert data.held_out.per_byte(2.0) == pytest.approx(2.0 * tokens / sum(spans))


def test_bytes_that_are_not_utf8_are_no_reason_to_fail(config: TrainConfig):
    assert "�" in TokenizerEncoding(words_tokenizer()).decode(
        TokenizerEncoding(words_tokenizer()).encode(b"abc\xff\xfe")
    ).decode("utf-8")


def test_a_text_too_short_for_its_tokens_tells_both_numbers(config: TrainConfig, tmp_path: Path):
    (tmp_path / "short.txt").write_text("This is file number 1. " * 8)  # enough bytes, too few tokens
    short = replace(config, data=str(tmp_path / "short.txt"))
    short.check()
    with pytest.raises(ValueError, match=r"short\.txt holds \d+ tokens.*2 x 4 x 16 = 128.*give more text with --data"):
        load_data(short, TokenizerEncoding(words_tokenizer()))


def test_the_bigram_model_is_a_distribution_and_what_counting_gives():
    table = bigram_model([b"abababac", b"", b"a"], strength=2.0).exp()
    torch.testing.assert_close(table.sum(1), torch.ones(256, dtype=torch.float64))
    a, b, c = b"abc"
    # The bytes that follow another: b a b a b a c. Before smoothing, b follows a 3 times in 4.
    single_b = (3 + 1) / (7 + 256)
    assert table[a, b].item() == pytest.approx((3 + 2 * single_b) / (4 + 2))
    assert table[b, a] > table[b, c]
    assert (table > 0).all()


def test_bigrams_do_not_run_from_one_file_into_the_next():
    assert torch.equal(bigram_model([b"ab", b"cd"]), bigram_model([b"cd", b"ab"]))
    assert not torch.equal(bigram_model([b"ab", b"cd"]), bigram_model([b"abcd"]))


def test_bigrams_are_counted_across_the_chunks_that_a_text_is_read_in(monkeypatch: pytest.MonkeyPatch):
    text = bytes(range(50)) * 3
    whole = bigram_model([text])
    monkeypatch.setattr("pipelining_dualpipev.training.data._CHUNK", 7)
    assert torch.equal(bigram_model([text]), whole)


def test_the_baseline_is_measured_on_the_very_bytes_that_the_model_predicts(config: TrainConfig):
    """A model that knows the bigrams, and nothing else, scores exactly the baseline."""
    data = load_data(config, ByteEncoding())
    training, _ = hold_out(find_text(config.data), least=config.batch_tokens)
    table = bigram_model([piece.read() for piece in training.pieces])

    class Bigrams(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(table)  # log probabilities are logits

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, use_cache: bool) -> Any:
            logits = self.table[input_ids[:, :-1]]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
            return type("Output", (), {"loss": loss})

    measured = held_out_loss(Bigrams(), data.held_out, config.batch_size)
    assert measured == pytest.approx(data.held_out.bigram, rel=1e-9)


def test_the_held_out_loss_of_an_untrained_model_is_that_of_guessing(config: TrainConfig):
    model = build_model(replace(config, model="gpt2"), ByteEncoding()).train()
    torch.nn.init.zeros_(model.get_output_embeddings().weight)
    windows = torch.randint(0, 256, (8, 16))
    held_out = HeldOut(windows, predicted_bytes=8 * 15, bigram=0.0)
    assert held_out_loss(model, held_out, 4) == pytest.approx(math.log(256), rel=1e-6)
    assert model.training


def test_a_model_directory_brings_its_own_tokenizer_or_reads_bytes(config: TrainConfig, tmp_path: Path):
    model = build_model(config, ByteEncoding())
    model.save_pretrained(tmp_path / "bytes")
    assert isinstance(load_encoding(replace(config, model=str(tmp_path / "bytes"))), ByteEncoding)
    words_tokenizer().save_pretrained(tmp_path / "bytes")
    here = replace(config, model=str(tmp_path / "bytes"))
    encoding = load_encoding(here)
    assert isinstance(encoding, TokenizerEncoding)
    with pytest.raises(ValueError, match=r"a vocabulary of 256 cannot hold the \d+ tokens of its tokenizer"):
        check_vocabulary(here, encoding)
    check_vocabulary(here, ByteEncoding())


def open_on_a_rank(config: TrainConfig) -> dict[str, torch.Tensor]:
    ids = torch.zeros(2, 16, dtype=torch.long)
    parts = open_model(config, ByteEncoding(), {"input_ids": ids, "labels": ids}, torch.device("cpu"))
    return {name: parameter.detach() for name, parameter in parts.named_parameters()}


def test_a_directory_with_weights_goes_on_and_one_with_only_a_config_starts_from_scratch(
    ranks, config: TrainConfig, tmp_path: Path
):
    model = build_model(config, ByteEncoding())
    assert 1e6 < model.num_parameters() < 5e6
    model.save_pretrained(tmp_path)
    here = replace(config, model=str(tmp_path))
    expected = dict(model.named_parameters())

    def opened(config: TrainConfig) -> dict[str, torch.Tensor]:
        first, second = ranks(2).run(open_on_a_rank, config)
        assert not first.keys() & second.keys()
        assert {**first, **second}.keys() == expected.keys()
        return {**first, **second}

    assert all(torch.equal(value, expected[name]) for name, value in opened(here).items())
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    assert all(torch.equal(value, expected[name]) for name, value in opened(here).items())
    (tmp_path / "pytorch_model.bin").unlink()
    assert not all(torch.equal(value, expected[name]) for name, value in opened(replace(here, seed=1)).items())


def test_a_file_of_weights_that_is_no_such_thing(ranks, config: TrainConfig, tmp_path: Path):
    build_model(config, ByteEncoding()).config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    for raised in ranks(2).run_expecting_errors(open_on_a_rank, replace(config, model=str(tmp_path))):
        assert raised.type == "ValueError"
        assert "it cannot be loaded: " in raised.message
        assert "model.safetensors is cut short or damaged" in raised.message
