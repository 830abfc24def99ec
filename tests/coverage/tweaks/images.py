"""Models of images alone."""

from __future__ import annotations

from typing import Any

__all__ = ["IMAGES"]

_PYRAMID = {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "patch_size": 4}

IMAGES: dict[str, dict[str, Any]] = {
    "bit": {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [3, 3], "num_groups": 4},
    "convnext": {"hidden_sizes": [16, 32], "depths": [3, 3], "num_stages": 2},
    "convnextv2": {"hidden_sizes": [16, 32], "depths": [3, 3], "num_stages": 2},
    "cvt": {"embed_dim": [16, 32, 64], "num_heads": [1, 2, 4], "depth": [1, 2, 3], "image_size": 64},
    "donut-swin": _PYRAMID,
    "efficientnet": {"image_size": 64, "width_coefficient": 0.025, "depth_coefficient": 1.0},
    "hgnet_v2": {
        "stem_channels": [3, 8, 8],
        "stage_in_channels": [8, 16, 32, 64],
        "stage_mid_channels": [8] * 4,
        "stage_out_channels": [16, 32, 64, 64],
        "stage_numb_of_layers": [2] * 4,
        "hidden_sizes": [16, 32, 64, 64],
    },
    "levit": {
        "image_size": 128,
        "patch_size": 16,
        "hidden_sizes": [16, 32, 48],
        "num_attention_heads": [2, 4, 6],
        "depths": [2, 2, 2],
        "key_dim": [8, 8, 8],
    },
    "mobilevitv2": {"image_size": 64, "patch_size": 2, "width_multiplier": 0.25},
    "pvt": {
        "image_size": 64,
        "hidden_sizes": [16, 32, 48, 64],
        "num_attention_heads": [1, 2, 3, 4],
        "mlp_ratios": [2] * 4,
    },
    "regnet": {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [3, 3], "groups_width": 16},
    "resnet": {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [3, 3], "layer_type": "basic"},
    "swin": _PYRAMID,
    "swinv2": _PYRAMID,
}
