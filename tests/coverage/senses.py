"""Random images and sounds in the forms that models take them, and how many places they take among the words."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

__all__ = ["codebooks", "image_forms", "places_taken", "sound_forms", "wave_forms"]

ROWS = 2
_BINS = (
    *("num_mel_bins", "input_feat_per_channel", "feature_size", "input_dim", "n_mels"),
    "feature_projection_input_dim",
)


def image_forms(model: nn.Module, dtype: torch.dtype, generator: torch.Generator) -> Iterator[dict[str, torch.Tensor]]:
    """One image a row: as pixels, as patches with a grid or in a strip, and as several crops a row."""
    size = _find(model.config, "image_size", 32)
    size = size[0] if isinstance(size, (list, tuple)) else size["height"] if isinstance(size, dict) else size
    patch = _find(model.config, "patch_size", 8)
    patch = patch if isinstance(patch, int) else patch[0]
    merge = _find(model.config, "spatial_merge_size", 2)
    time = _find(model.config, "temporal_patch_size", None) or _find(model.config, "patch_temporal", 1)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    sizes = torch.tensor([[size, size]] * ROWS)
    side = 2 * merge
    grid = torch.tensor([[1, side, side]] * ROWS)
    flat = noise(ROWS * side * side, 3 * time * patch * patch)
    squares = noise(ROWS * side * side, 3, patch, patch)
    pixels = noise(ROWS, 3, size, size)
    high = getattr(getattr(model.config, "high_res_vision_config", None), "image_size", size)
    asked = {  # of what looks at an image
        "qformer_input_ids": torch.randint(3, 30, (ROWS, 5), generator=generator),
        "qformer_attention_mask": torch.ones(ROWS, 5, dtype=torch.long),
    }
    yield {
        "pixel_values": pixels,
        "image_sizes": sizes,
        "high_res_pixel_values": noise(ROWS, 3, high, high),
        **asked,
    }
    yield {"pixel_values": pixels}
    yield {
        "pixel_values": flat,
        "image_grid_thw": grid,
        "image_grid_hw": grid[:, 1:],
        "image_merge_sizes": torch.tensor([merge] * ROWS),
    }
    yield {"pixel_values": squares, "image_grid_thw": grid}
    yield {"pixel_values": squares[None], "image_grid_thw": grid}
    yield {
        "pixel_values": noise(1, 3, patch, ROWS * (2 * side) ** 2 * patch),
        "target_sizes": torch.tensor([[2 * side, 2 * side]] * ROWS),
    }
    yield {
        "pixel_values": noise(ROWS * 4, merge * patch, merge * patch, 3),
        "image_grid_thw": grid // torch.tensor([1, merge, merge]),
    }
    yield {"pixel_values": noise(ROWS * 4, time, patch, patch, 3)}
    yield {
        "pixel_values": noise(ROWS, 1, 3, size, size),
        "image_sizes": sizes,
        "pixel_attention_mask": torch.ones(ROWS, 1, dtype=torch.bool),
    }
    yield {"pixel_values": noise(ROWS, 3, 3, size, size), "image_sizes": sizes}
    yield {"pixel_values": noise(ROWS, 2, 3, size, size), "image_sizes": sizes, **asked}
    yield {
        "pixel_values": noise(ROWS, 16, 3 * patch * patch),
        "spatial_shapes": torch.tensor([[4, 4]] * ROWS),
        "pixel_attention_mask": torch.ones(ROWS, 16, dtype=torch.long),
        "image_token_pooling": torch.arange(ROWS * 16).reshape(ROWS, 2, 2, 2, 2).transpose(2, 3).reshape(-1, 4),
        "image_grids": torch.tensor([[2, 2, 0, 0]] * ROWS),
    }
    yield {
        "pixel_values": noise(ROWS, 16, 3 * patch * patch),
        "image_position_ids": torch.cartesian_prod(torch.arange(4), torch.arange(4)).repeat(ROWS, 1, 1),
    }
    yield {
        "protein_input_ids": torch.randint(4, 24, (ROWS, 8), generator=generator),
        "protein_attention_mask": torch.ones(ROWS, 8, dtype=torch.long),
    }
    yield {  # in tiles
        "pixel_values": noise(ROWS, 1, 4, 3, size, size),
        "aspect_ratio_ids": torch.tensor([[6], [8]]),
        "aspect_ratio_mask": torch.ones(ROWS, 1, 4, dtype=torch.long),
    }
    yield {
        "flattened_patches": torch.cat(
            [
                1 + torch.arange(16).repeat(ROWS, 1)[..., None] // 4,
                1 + torch.arange(16).repeat(ROWS, 1)[..., None] % 4,
                noise(ROWS, 16, 3 * patch * patch),
            ],
            dim=-1,
        )
    }


def sound_forms(model: nn.Module, dtype: torch.dtype, generator: torch.Generator) -> Iterator[dict[str, torch.Tensor]]:
    """Sound as frames of features, in either order, one by one and four stacked.

    ``attention_mask`` is for what hears and reads no words; a batch with words has that of the words instead.
    """
    config = model.config
    bins = next(
        (found for name in _BINS if (found := _find(config, name, None)) is not None),
        8,
    )
    whole = 2 * (_find(config, "max_source_positions", 0) or 64)  # some take but this; others make one of eight of it
    for length, stacked in itertools.product(dict.fromkeys((whole, 64, 32, 128, 200)), (1, 4)):
        frames = torch.randn(ROWS, length, stacked * bins, generator=generator, dtype=dtype)
        mask = torch.ones(ROWS, length, dtype=torch.long)
        masks = {"attention_mask": _shorter(mask), "feature_attention_mask": mask, "input_features_mask": mask}
        yield {"input_features": frames.transpose(1, 2).contiguous(), **masks}
        yield {"input_features": frames, **masks, "input_features_mask": mask.bool()}


def wave_forms(model: nn.Module, dtype: torch.dtype, generator: torch.Generator) -> Iterator[dict[str, torch.Tensor]]:
    """Sound as it is, and no noise to be added to it; for ``attention_mask`` see `sound_forms`."""
    for shape in ((ROWS, 800), (ROWS, 1, 800), (ROWS, 4000), (ROWS, 1, 4000)):
        mask = torch.ones(ROWS, shape[-1], dtype=torch.long)
        wave = torch.randn(*shape, generator=generator, dtype=dtype)
        yield {"input_values": wave, "attention_mask": _shorter(mask), "padding_mask": mask, "sample": False}


def _shorter(mask: torch.Tensor) -> torch.Tensor:
    """The last row is padded at its end."""
    shorter = mask.clone()
    shorter[-1, -(mask.shape[1] // 4) :] = 0
    return shorter


def codebooks(config: Any) -> int:
    """How many codes a model has for a moment of sound; 0 if it has none."""
    return _find(config, "num_codebooks", 0) or len(_find(config, "delay_pattern", ()))


def places_taken(model: nn.Module, form: dict[str, torch.Tensor], kind: str) -> int | None:
    """How many places a row's image or sound takes among the words, None where the model has no say in that.

    Raises:
        Exception: whatever the model makes of a form that is not its own.
    """
    names = ("get_image_features", "get_video_features") if kind == "image" else (f"get_{kind}_features",)
    places = [(each, name) for name in names for each in (getattr(model, "model", None), model)]
    features = next((found for each, name in places if (found := getattr(each, name, None))), None)
    if features is None:
        return None
    takes = inspect.signature(features).parameters
    with torch.no_grad():
        found = features(**{name: value for name, value in form.items() if name in takes})
    if getattr(found, "deepstack_features", None) and found.get("pooler_output") is None:
        (_, found), *_ = found.deepstack_features
    if hasattr(found, "pooler_output"):
        found = found.pooler_output if found.pooler_output is not None else found.last_hidden_state
    while isinstance(found, tuple) and found and not isinstance(found[0], torch.Tensor):
        found = found[0]
    tensors = list(found) if isinstance(found, (list, tuple)) else [found]
    if len({tensor.shape[-1] for tensor in tensors}) > 1:
        tensors = tensors[:1]
    return sum(tensor.shape[:-1].numel() for tensor in tensors) // ROWS


def _find(config: Any, name: str, default: Any) -> Any:
    """A field of the config or of one of those it holds, the first that has it."""
    inner = [value for value in vars(config).values() if hasattr(value, "to_dict")]
    ordered = sorted(inner, key=lambda each: "text" in type(each).__name__.lower())
    for each in (*ordered, config):
        found = getattr(each, name, None)
        if found is not None:
            return found
    return next((found for each in ordered if (found := _find(each, name, None)) is not None), default)
