"""Models of images and words, and the parts that only they have."""

from __future__ import annotations

from typing import Any

__all__ = ["IMAGES_AND_WORDS"]

_CROPS = {"image_grid_pinpoints": [[32, 64], [64, 32]]}  # two beside the image as a whole
_FOUR_TO_ONE = {"out_hidden_size": 128}
_WITH_PLACES = {"image_token_id": 97, "video_token_id": 98}
_MERGING_EARLY = {**_WITH_PLACES, "insert_layer_id": 2}

IMAGES_AND_WORDS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(["llava_next", "llava_next_video", "llava_onevision"], _CROPS),
    **dict.fromkeys(["minicpm_ocr", "minicpmv4_6"], _MERGING_EARLY),
    **dict.fromkeys(["muse_glimmer", "muse_spark"], _FOUR_TO_ONE),
    "janus_vqgan": {"base_channels": 32, "channel_multiplier": [1, 1], "latent_channels": 32, "num_embeddings": 20},
    "llama4_vision_model": {"intermediate_size": 128},
    "minicpmv4_7": {
        **_MERGING_EARLY,
        "image_start_id": 95,
        "image_end_id": 96,
        "slice_start_id": 92,
        "slice_end_id": 93,
        "newline_id": 94,
    },
    "mllama_vision_model": {
        "attention_heads": 4,
        "num_global_layers": 2,
        "intermediate_layers_indices": [1, 3],
        "vision_output_dim": 96,
    },
    "molmo2_adapter": {"vision_feature_layer": [4, 2]},
    "molmo2_vision": {"image_size": [32, 32]},
    "muse_spark_audio": {"patch_sizes": [4, 2], "hidden_sizes": [16, 32], "depths": [1, 1], "num_hidden_layers": 2},
    "nemotron_h_omni": _WITH_PLACES,
    "qwen2_5_omni_thinker": {"vision_start_token_id": 90, "vision_end_token_id": 91},
    "t5gemma2": {"image_token_index": 97},
    "unlimited_ocr_sam_vision_model": {
        "output_channels": 16,
        "window_size": 2,
        "global_attn_indexes": [2, 5],
        "mlp_dim": 48,
        "downsample_channels": [16, 32],
    },
    "vipllava": {"vision_feature_layer": [-2, -4]},
}
