"""Which model to train: a local directory as transformers writes them, or a small built-in configuration.

A directory with weights is loaded; one with only a ``config.json`` is trained from scratch, and so is a built-in. The
tokens are those of the directory's own tokenizer, or bytes. Nothing is ever downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelining_dualpipev.training.config import TrainConfig
from pipelining_dualpipev.training.data import ByteEncoding, Encoding, TokenizerEncoding

if TYPE_CHECKING:
    from pipelining_dualpipev.models import SplitModel

__all__ = [
    "BUILT_IN",
    "build_model",
    "check_model",
    "check_vocabulary",
    "first_line",
    "load_encoding",
    "open_config",
    "open_model",
]

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.json")
# What a model of width 128 needs to learn within a minute: transformers' own 0.02 suits widths of thousands.
_INITIALIZER_RANGE = 0.05


def _llama(vocabulary: int, length: int, layers: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=max(length, 1024),
        initializer_range=_INITIALIZER_RANGE,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )


def _gpt2(vocabulary: int, length: int, layers: int) -> Any:
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=vocabulary,
        n_embd=128,
        n_inner=512,
        n_layer=layers,
        n_head=4,
        n_positions=max(length, 1024),
        initializer_range=_INITIALIZER_RANGE,
        bos_token_id=None,
        eos_token_id=None,
    )


BUILT_IN: dict[str, Callable[[int, int, int], Any]] = {"llama": _llama, "gpt2": _gpt2}
BUILT_IN_LAYERS = 4


def check_model(config: TrainConfig) -> None:
    """Refuse a model that is not there, or that has too few layers for the ranks.

    Raises:
        ValueError: with the numbers and what to change.
    """
    directory = Path(config.model)
    built_in = config.model in BUILT_IN and not directory.is_dir()
    if not built_in and not (directory / "config.json").is_file():
        what = "a directory without config.json" if directory.is_dir() else f"not a directory in {Path.cwd()}"
        raise ValueError(
            f"--model {config.model}: {what}, and not a built-in: give a directory that save_pretrained has written, "
            f"or one of {', '.join(BUILT_IN)}"
        )
    if not built_in and config.layers is not None:
        raise ValueError(
            f"--layers {config.layers} is for built-in models: {directory / 'config.json'} has its own number"
        )
    layers = (config.layers or BUILT_IN_LAYERS) if built_in else _num_layers(_load_config(directory))
    if layers is not None and layers < 2 * config.ranks:
        deeper = f", or --layers {2 * config.ranks}" if built_in else ""
        remedy = (
            f"use at most {layers // 2} ranks{deeper}" if layers >= 2 or deeper else "the V needs at least 2 layers"
        )
        raise ValueError(
            f"--model {config.model}: {layers} layers cannot fill the {2 * config.ranks} stages of "
            f"{config.ranks} ranks: {remedy}"
        )


def load_encoding(config: TrainConfig) -> Encoding:
    """Load the model directory's own tokenizer, or take bytes if it has none.

    Raises:
        ValueError: if there are files of a tokenizer that transformers cannot load.
    """
    directory = Path(config.model)
    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        return ByteEncoding()
    from transformers import AutoTokenizer

    try:
        return TokenizerEncoding(AutoTokenizer.from_pretrained(directory, local_files_only=True))
    except Exception as error:  # of a dozen types, if the directory is not what it should be
        raise ValueError(f"--model {directory}: its tokenizer cannot be loaded: {first_line(error)}") from error


def check_vocabulary(config: TrainConfig, encoding: Encoding) -> None:
    """Refuse a model directory whose vocabulary is too small for the tokens.

    Raises:
        ValueError: with the numbers and what to change.
    """
    directory = Path(config.model)
    if not directory.is_dir():
        return
    rows = getattr(_load_config(directory).get_text_config(), "vocab_size", None)
    if rows is not None and rows < encoding.vocabulary:
        kind = "byte values" if isinstance(encoding, ByteEncoding) else "tokens of its tokenizer"
        raise ValueError(
            f"--model {directory}: a vocabulary of {rows} cannot hold the {encoding.vocabulary} {kind}: "
            f"give the directory the tokenizer that goes with the model, or train one from a config.json with "
            f"vocab_size {encoding.vocabulary} or more"
        )


def open_model(config: TrainConfig, encoding: Encoding, example: dict[str, Any], device: Any) -> SplitModel:
    """Load or make this rank's part of the model, in float32. Collective over the world.

    From safetensors each rank reads its own part; otherwise each has the whole model first, and keeps its part.

    Raises:
        ValueError: if transformers cannot load it, or if it cannot be split so.
    """
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    from pipelining_dualpipev.models import from_pretrained, split

    directory = Path(config.model)
    if not any(directory.glob("*.safetensors")):
        return split(build_model(config, encoding), dist.group.WORLD, example=example, device=device)
    try:
        return from_pretrained(
            directory,
            dist.group.WORLD,
            example=example,
            dtype=torch.float32,
            device=device,
            model_class=AutoModelForCausalLM,
            local_files_only=True,
        )
    except Exception as error:  # of a dozen types, if the directory is not what it should be
        raise ValueError(f"--model {directory}: it cannot be loaded: {first_line(error)}") from error


def build_model(config: TrainConfig, encoding: Encoding) -> Any:
    """Make the whole model in float32, the same on every rank, or load it from PyTorch's own files.

    Raises:
        ValueError: if transformers cannot.
    """
    import torch
    from transformers import AutoModelForCausalLM

    directory = Path(config.model)
    torch.manual_seed(config.seed)
    if not directory.is_dir():
        make = BUILT_IN[config.model]
        return AutoModelForCausalLM.from_config(
            make(encoding.vocabulary, config.seq_len, config.layers or BUILT_IN_LAYERS), dtype=torch.float32
        )
    try:
        if any(directory.glob("pytorch_model*.bin")):
            return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
        return AutoModelForCausalLM.from_config(_load_config(directory), dtype=torch.float32)
    except Exception as error:  # of a dozen types, if the directory is not what it should be
        raise ValueError(f"--model {directory}: transformers cannot load it: {first_line(error)}") from error


def open_config(model: str, *, length: int, layers: int | None = None) -> Any:
    """The configuration of a model directory, of a ``config.json`` itself, or of a built-in.

    Raises:
        ValueError: if it is none of them, or cannot be read.
    """
    path = Path(model)
    if path.is_file():
        return _load_config(path)
    check_model(TrainConfig(model=model, layers=layers, ranks=1))
    if path.is_dir():
        return _load_config(path)
    return BUILT_IN[model](ByteEncoding().vocabulary, length, layers or BUILT_IN_LAYERS)


def _load_config(directory: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # of a dozen types, if the directory is not what it should be
        raise ValueError(f"--model {directory}: its config.json cannot be read: {first_line(error)}") from error


def _num_layers(model_config: Any) -> int | None:
    """Return the number of layers, or None where the configuration does not say: then the splitter will."""
    return getattr(model_config.get_text_config(), "num_hidden_layers", None)


def first_line(error: BaseException) -> str:
    """The first line of an error's words, or its type if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
