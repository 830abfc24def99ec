"""Tiny models that see or hear, or pass several tensors on, with batches for them; random, in fp64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers as hf
from torch import nn

from tests.models.zoo import CONFIGS, VOCABULARY, make_batch, make_model

_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IMAGE, START, END, VIDEO = 36, 35, 34, 33
_PATCH = 4  # pixels along each side of a patch; an image takes a place among the words for every 2 by 2 of them


def _qwen2_5_vl() -> nn.Module:
    vision = {
        "depth": 3,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "out_hidden_size": 16,
        "patch_size": _PATCH,
        "spatial_merge_size": 2,
        "temporal_patch_size": 1,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    }
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 0]}
    config = hf.Qwen2_5_VLConfig(
        text_config={**_TEXT, "num_hidden_layers": 4, "rope_parameters": rope},
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    return hf.Qwen2_5_VLForConditionalGeneration._from_config(config)


def _whisper() -> nn.Module:
    config = hf.WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=16,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        num_mel_bins=8,
        max_source_positions=8,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        dropout=0.0,
    )
    return hf.WhisperForConditionalGeneration._from_config(config)


def _gemma3n() -> nn.Module:
    config = hf.Gemma3nTextConfig(
        **_TEXT,
        num_hidden_layers=6,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 3,
        sliding_window=4,
        hidden_size_per_layer_input=4,
        vocab_size_per_layer_input=VOCABULARY,
        laurel_rank=4,
        altup_num_inputs=2,
        activation_sparsity_pattern=None,
    )
    return hf.Gemma3nForCausalLM._from_config(config)


def _swin() -> nn.Module:
    config = hf.SwinConfig(
        image_size=32, embed_dim=16, depths=[2, 3], num_heads=[2, 4], window_size=4, patch_size=4, drop_path_rate=0.0
    )
    return hf.SwinForImageClassification._from_config(config)


def _convnext() -> nn.Module:
    return hf.ConvNextForImageClassification._from_config(
        hf.ConvNextConfig(hidden_sizes=[16, 32], depths=[3, 3], num_stages=2)
    )


def _resnet() -> nn.Module:
    config = hf.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[3, 3], layer_type="basic")
    return hf.ResNetForImageClassification._from_config(config)


_MAKERS = {
    "qwen2_5_vl": _qwen2_5_vl,
    "whisper": _whisper,
    "gemma3n": _gemma3n,
    "swin": _swin,
    "convnext": _convnext,
    "resnet": _resnet,
}


def make(name: str) -> nn.Module:
    """The model of that name, the same one each time."""
    if name in CONFIGS:
        return make_model(name)
    torch.manual_seed(0)
    return _MAKERS[name]().double().train()


def batch_for(name: str, rows: int) -> dict[str, Any]:
    """A batch of ``rows`` rows; words have padding that differs between them."""
    generator = torch.Generator().manual_seed(0)
    if name in ("swin", "convnext", "resnet"):
        pixels = torch.randn(rows, 3, 32, 32, generator=generator, dtype=torch.float64)
        return {"pixel_values": pixels, "labels": torch.arange(rows) % 2}
    batch = make_batch(rows)
    if name == "whisper":
        sound = torch.randn(rows, 8, 16, generator=generator, dtype=torch.float64)
        return {"input_features": sound, "labels": batch["labels"]}
    if name == "qwen2_5_vl":
        return with_images([[(4, 4)]] * rows, generator)
    return batch


def with_images(
    images: Sequence[Sequence[tuple[int, int]]], generator: torch.Generator, length: int = 12
) -> dict[str, torch.Tensor]:
    """A batch for qwen2_5_vl with as many images as you like in each row.

    Args:
        images: for each row the height and width of each of its images, in patches.
        generator: of words and pixels.
        length: of the rows, if the images leave some room for words.
    """
    length = max(length, *(4 + sum(high * wide // 4 + 2 for high, wide in row) for row in images))
    ids = torch.randint(3, 30, (len(images), length), generator=generator)
    mask = torch.ones_like(ids)
    for row, own in enumerate(images):
        place = 1
        for high, wide in own:
            end = place + 1 + high * wide // 4
            ids[row, place], ids[row, place + 1 : end], ids[row, end] = START, IMAGE, END
            place = end + 1
        mask[row, length - row % 4 :] = 0
    ids = ids * mask
    batch = {
        "input_ids": ids,
        "attention_mask": mask,
        "mm_token_type_ids": (ids == IMAGE).long(),
        "labels": torch.where((mask == 0) | (ids > 30), -100, ids),
    }
    sizes = [size for row in images for size in row]
    if not sizes:
        return batch
    patches = sum(high * wide for high, wide in sizes)
    return {
        **batch,
        "pixel_values": torch.randn(patches, 3 * _PATCH**2, generator=generator, dtype=torch.float64),
        "image_grid_thw": torch.tensor([[1, *size] for size in sizes]),
    }
