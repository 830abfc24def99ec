"""Models of sound, and of sound and words."""

from __future__ import annotations

from typing import Any

__all__ = ["SOUNDS"]

_SMALL_CONV = {
    "conv_dim": [16, 16],
    "conv_stride": [4, 4],
    "conv_kernel": [8, 4],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "vocab_size": 32,
}

_SMALL_TOKENIZER = {"num_filters": 4, "downsampling_ratios": [2, 2, 4, 5], "depths": [1] * 5}

SOUNDS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        [
            "wav2vec2",
            "hubert",
            "data2vec-audio",
            "unispeech",
            "unispeech-sat",
            "wavlm",
            "wav2vec2-conformer",
            "sew",
            "sew-d",
            "omniasr_audio",
        ],
        _SMALL_CONV,
    ),
    "dia": {"delay_pattern": [0, 1, 2]},
    "dia_decoder": {
        "cross_num_attention_heads": 4,
        "cross_num_key_value_heads": 2,
        "cross_head_dim": 8,
        "cross_hidden_size": 32,
    },
    "fun_asr_nano": {
        "adaptor_config": {
            "hidden_size": 32,
            "intermediate_size": 8,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "projector_hidden_size": 32,
        }
    },
    "fun_asr_nano_encoder": {"num_stacked_frames": 4, "num_timestamp_prediction_layers": 2},
    "granite_speech5_encoder": {"num_key_value_heads": 4},
    "mimi": {"num_filters": 4, "upsample_groups": 32},
    "moonshine": {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "nemotron3_5_transcribe_word_timestamp": {"blank_token_id": 98},
    "qwen3_asr_encoder": {"n_window_infer": 100},
    "vibevoice_acoustic_tokenizer": _SMALL_TOKENIZER,
    "vibevoice_acoustic_tokenizer_encoder": _SMALL_TOKENIZER,
    "vibevoice_diffusion": {"latent_size": 32},
    "voxtral": {"audio_token_id": 98},
    "voxtral_encoder": {"intermediate_size": 64},
    "voxtral_realtime_encoder": {"initializer_range": 0.05},  # else gradients of its attention are near rounding
    "whisper": {"max_source_positions": 16, "max_target_positions": 32, "num_mel_bins": 8},
}
