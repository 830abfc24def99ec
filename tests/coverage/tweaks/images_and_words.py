"""Models of images and words, and the parts that only they have."""

from __future__ import annotations

from typing import Any

__all__ = ["IMAGES_AND_WORDS"]

_CROPS = {"image_grid_pinpoints": [[32, 64], [64, 32]]}  # two beside the image as a whole
_FIRST_CODE = 80  # of the words that are codes of images
_CODES = range(10)
_FOUR_TO_ONE = {"out_hidden_size": 128}
_IMAGE_AT = {"image_token_index": 97}
_SAM = {"output_channels": 16, "window_size": 2, "global_attn_indexes": [2, 5], "mlp_dim": 48}
_SAM_AND_DOWN = {**_SAM, "downsample_channels": [16, 32]}
_SMALL_VQGAN = {"base_channels": 32, "channel_multiplier": [1, 1], "latent_channels": 32, "num_res_blocks": 1}
_WITH_PLACES = {"image_token_id": 97, "video_token_id": 98}
_MERGING_EARLY = {**_WITH_PLACES, "insert_layer_id": 2}

IMAGES_AND_WORDS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(["blip-2", "instructblip", "t5gemma2"], _IMAGE_AT),
    **dict.fromkeys(["deepseek_ocr2_sam_vision_model", "unlimited_ocr_sam_vision_model"], _SAM_AND_DOWN),
    **dict.fromkeys(["llava_next", "llava_next_video", "llava_onevision"], _CROPS),
    **dict.fromkeys(["minicpm_ocr", "minicpmv4_6"], _MERGING_EARLY),
    **dict.fromkeys(["muse_glimmer", "muse_spark"], _FOUR_TO_ONE),
    "apertus1p5": {"image_token_offset": _FIRST_CODE, "audio_token_offset": _FIRST_CODE + len(_CODES)},
    "apertus1p5_vision_tokenizer": {**_SMALL_VQGAN, "codebook_size": len(_CODES)},
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "chameleon": {
        "vocabulary_map": {
            "<image>": 97,
            **{f"IMGIMG{chr(ord('A') + code)}Z": _FIRST_CODE + code for code in _CODES},
        }
    },
    "chameleon_vqgan": {**_SMALL_VQGAN, "num_embeddings": len(_CODES)},
    "dots3_note_vision_encoder": {"mlp_layer_types": ["dense"] * 4 + ["sparse"] * 2},
    "emu3": {
        "vocabulary_map": {
            "<|extra_200|>": 96,
            "<image>": 97,
            **{f"<|visual token {code:06}|>": _FIRST_CODE + code for code in _CODES},
        }
    },
    "emu3_vqgan": {**_SMALL_VQGAN, "codebook_size": len(_CODES)},
    "florence_vision": {
        "depths": [1, 1],
        "patch_size": [7, 3],
        "patch_stride": [4, 2],
        "patch_padding": [3, 1],
        "patch_prenorm": [False, True],
        "embed_dim": [16, 32],
        "num_heads": [2, 4],
        "num_groups": [2, 4],
        "window_size": 4,
    },
    "gemma4_unified_vision": {"pooling_kernel_size": 1},
    "granite4_vision": {
        **_CROPS,
        "downsample_rate": "1/2",
        "deepstack_layer_map": [[-3, 0], [-2, 5]],
        "spatial_target_layers": [1, 2, 3, 4],
        "vision_config": {"hidden_size": 64},  # a head for each
    },
    "granite_docling_vision": {"deepstack_visual_indexes": [1, 3, 4]},
    "idefics": {"freeze_text_layers": False, "freeze_vision_layers": False},
    "inkling_vision": {"patch_size": 4, "num_hidden_layers": 4},
    "instructblipvideo": {"video_token_index": 97},
    "janus_vqgan": {**_SMALL_VQGAN, "num_embeddings": len(_CODES)},
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
    "sam_vision_model": _SAM,
    "vipllava": {"vision_feature_layer": [-2, -4]},
    "wavtokenizer_encoder": {"num_filters": 4, "codebook_size": 4},
}
