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
            "omniasr_ctc",
        ],
        _SMALL_CONV,
    ),
    "whisper": {"max_source_positions": 16, "max_target_positions": 32, "num_mel_bins": 8},
}
