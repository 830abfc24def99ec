"""Models of images alone."""

from __future__ import annotations

from typing import Any

__all__ = ["IMAGES"]

_PYRAMID = {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "patch_size": 4}

IMAGES: dict[str, dict[str, Any]] = {
    "bit": {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [3, 3], "num_groups": 4},
    "regnet": {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [3, 3], "groups_width": 16},
    "swin": _PYRAMID,
    "swinv2": _PYRAMID,
    "donut-swin": _PYRAMID,
    "convnext": {"hidden_sizes": [16, 32], "depths": [3, 3], "num_stages": 2},
    "convnextv2": {"hidden_sizes": [16, 32], "depths": [3, 3], "num_stages": 2},
    "resnet": {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [3, 3], "layer_type": "basic"},
}
