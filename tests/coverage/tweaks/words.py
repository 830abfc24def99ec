"""Models of words alone."""

from __future__ import annotations

from typing import Any

__all__ = ["WORDS"]

_ALL_HEADS = {"num_key_value_heads": 4}  # latent attention has no groups of heads
_ALTERNATING = ["sliding_attention", "full_attention"] * 3
_SHARED_KEYS = {"num_kv_shared_layers": 2, "layer_types": _ALTERNATING}


def _sections(*sizes: int) -> dict[str, Any]:
    """Of rotary positions in time, height and width."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sizes)}}


WORDS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        [
            "axk1",
            "axk2",
            "deepseek_v2",
            "deepseek_v3",
            "deepseek_v32",
            "glm4_moe_lite",
            "glm_moe_dsa",
            "minicpm3",
            "mistral_large4_text",
            "sarvam_mla",
            "youtu",
        ],
        _ALL_HEADS,
    ),
    **dict.fromkeys(["gemma4_text", "gemma4_unified_text"], _SHARED_KEYS),
    "gemma3n_text": {**_SHARED_KEYS, "activation_sparsity_pattern": None},
    **dict.fromkeys(["esmc", "mistral4"], _ALL_HEADS),
    **dict.fromkeys(
        [
            "qwen2_vl_text",
            "qwen2_5_vl_text",
            "qwen2_5_omni_text",
            "glm4v_text",
            "glm46v_text",
            "glm_ocr_text",
            "glmga_text",
            "paddleocr_vl_text",
        ],
        _sections(1, 1, 2),
    ),
    **dict.fromkeys(["cosmos3_edge_text", "hunyuan_vl_text", "hy_v4_vl_text"], _sections(2, 1, 1)),
    "glm4v_moe_text": _sections(0, 1, 1),
    "bailing_hybrid": {
        **_ALL_HEADS,
        "n_group": 1,
        "topk_group": 1,
        "layer_group_size": 3,
        "num_mtp_layers": 0,
        "layer_types": None,
        "head_dim": 8,
    },
    "blt": {"encoder_hash_byte_group_size": [2, 3], "encoder_hash_byte_group_vocab": 50},
    "blt_local_decoder": {"hidden_size_global": 32},
    "blt_local_encoder": {"hidden_size_global": 32},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
        }
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense"] + ["sparse"] * 5},
    "dots3_note_text": {
        **_ALL_HEADS,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 8,
    },
    "ernie4_5_vl_moe_text": {**_sections(1, 1, 2), "moe_intermediate_size": [16, 8]},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
    "gemma4_assistant": {
        "text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 6}
    },
    "gemma4_unified_assistant": {"text_config": {"num_kv_shared_layers": 6}},
    "glm5_next_text": {
        **_ALL_HEADS,
        "qk_rope_head_dim": 0,
        "index_kpool": 2,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 3]]},
    "inkling2_loop_text": {"unpadded_vocab_size": 99},
    "inkling2_text": {"unpadded_vocab_size": 99},
    "kimi_linear": {**_ALL_HEADS, "linear_head_dim": 8, "linear_num_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 3},
    "longcat_flash": {
        **_ALL_HEADS,
        "num_layers": 6,
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 16,
        "moe_topk": 2,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
    },
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "mpt": {"emb_pdrop": 0, "resid_pdrop": 0, "attn_pdrop": ...},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        "hc_lowrank": 8,
        "ngram_vocab_size_base": 50,
        "rope_parameters": None,
    },
    "reformer": {
        "attn_layers": ["local"] * 6,
        "axial_pos_embds": False,
        "lsh_attn_chunk_length": 4,
        "local_attn_chunk_length": 4,
    },
    "roc_bert": {
        "pronunciation_vocab_size": 20,
        "shape_vocab_size": 20,
        "pronunciation_embed_dim": 8,
        "shape_embed_dim": 8,
    },
    "xmod": {"languages": ["en"], "default_language": "en"},
    "zamba": {
        "num_hidden_layers": 8,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "layers_block_type": None,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "zamba2": {
        "num_hidden_layers": 8,
        "layers_block_type": ["mamba", "hybrid"] * 4,
        "layer_types": ["mamba", "hybrid"] * 4,
        "num_mem_blocks": 2,
        "mamba_headdim": 16,
        "n_mamba_heads": 4,
        "mamba_ngroups": 1,
        "adapter_rank": 4,
        "attention_head_dim": 16,
    },
    "zaya": {"num_experts_per_tok": 1},
    # encoder-decoders
    "led": {"attention_window": 4, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64},
    "longt5": {"local_radius": 4},
    "switch_transformers": {"num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 2, "add_router_probs": True},
    # encoders
    "bros": {"hidden_size": 64},
    "deberta-v2": {
        "relative_attention": True,
        "position_buckets": 8,
        "pos_att_type": ["p2c", "c2p"],
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
    },
    "funnel": {"block_sizes": [2, 2, 2], "d_inner": 48},
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4},
    "lilt": {"hidden_size": 48},
    "luke": {"entity_vocab_size": 20, "entity_emb_size": 16},
    "neomme": {
        "embedding_rank": 16,
        "rope_parameters": {"full_attention": {"partial_rotary_factor": 0.5}},
    },
    "perceiver": {
        "max_position_embeddings": 12,  # it takes just so many words
        "num_latents": 8,
        "d_latents": 32,
        "num_self_attends_per_block": 6,
        "num_self_attention_heads": 4,
        "num_cross_attention_heads": 4,
    },
}
