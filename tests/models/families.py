"""Tiny models of many families by their model type: a config takes of one table what it knows."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers as hf
from torch import nn

VOCABULARY = 37

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "word_embed_proj_dim"), 16),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 24),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "rotary_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"), 32),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "state_size", "mamba_d_state", "time_step_rank"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 12),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("sliding_window", "lru_width", "attention_window_size"), 16),
    **dict.fromkeys(("dropout", "dropout_rate", "attention_dropout", "activation_dropout", "hidden_dropout"), 0.0),
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "resid_dropout", "embed_dropout"), 0.0),
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"), 0.0),
    **dict.fromkeys(("pad_token_id", "decoder_start_token_id"), 0),
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers")
_LAYERS += ("encoder_layers", "decoder_layers")
_EXCEPTIONS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_key_value_heads": 4},
    "deepseek_v3": {"num_key_value_heads": 4},
    "mpt": {"attn_pdrop": None},
}
SEQ2SEQ = ("bart", "mt5", "pegasus")
FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "olmo", "olmo2", "cohere"),
    *("starcoder2", "stablelm", "granite", "glm", "smollm3", "nemotron", "opt", "bloom", "falcon", "gpt2", "gptj"),
    *("gpt_neo", "gpt_neox", "gpt_bigcode", "codegen", "mpt", "mamba", "recurrent_gemma", "mixtral", "qwen2_moe"),
    *("qwen3_moe", "olmoe", "granitemoe", "deepseek_v2", "deepseek_v3", "gpt_oss", *SEQ2SEQ),
)


def make_tiny(
    model_type: str, dtype: torch.dtype = torch.float64, experts: str = "eager", layers: int = 2
) -> nn.Module:
    """The same random model each time, in training mode, without dropout; an even number of layers."""
    config_class = type(hf.AutoConfig.for_model(model_type))
    known = {name for base in config_class.__mro__ for name in getattr(base, "__annotations__", {})}
    known |= set(inspect.signature(config_class.__init__).parameters)
    sizes = _SIZES | dict.fromkeys(_LAYERS, layers)
    options = {**{name: size for name, size in sizes.items() if name in known}, **_EXCEPTIONS.get(model_type, {})}
    if model_type == "gpt_neo":
        options["attention_types"] = [[["global", "local"], layers // 2]]
    config = config_class(**{name: value for name, value in options.items() if value is not None})
    auto = hf.AutoModelForSeq2SeqLM if model_type in SEQ2SEQ else hf.AutoModelForCausalLM
    torch.manual_seed(0)
    return auto.from_config(config, experts_implementation=experts).to(dtype).train()
