"""Tiny configs of any model type, made from the config class itself by shrinking what it knows.

A config class says by its annotations (or the arguments of its constructor) which sizes it has. The names are much
the same all over transformers, so one table of names does for nearly all types; dropout is found by its name. A config
that holds others (text, vision, audio) is made of tiny ones. What cannot be guessed is in `tests.coverage.tweaks`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

from tests.coverage.tweaks import TWEAKS

__all__ = ["VOCABULARY", "tiny_config"]

VOCABULARY = 99
LAYERS = 6  # enough for what repeats every two or three layers, and more than the four stages

_GROUPS: tuple[tuple[Any, str], ...] = (
    (VOCABULARY, "vocab_size text_vocab_size vocab_size_per_layer_input unpadded_vocab_size decoder_vocab_size"),
    (
        LAYERS,
        "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers depth "
        "num_encoder_layers num_hidden_layers_decoder encoder_num_layers decoder_num_layers num_blocks "
        "speech_encoder_layers encoder_num_hidden_layers decoder_num_hidden_layers",
    ),
    (
        32,
        "hidden_size d_model n_embd dim embedding_size hidden_dim embed_dim word_embed_proj_dim emb_dim lru_width "
        "out_hidden_size d_embed projection_dim proj_dim encoder_hidden_size decoder_hidden_size output_dim "
        "encoder_embed_dim decoder_embed_dim backbone_hidden_size input_embedding_dim projection_hidden_size "
        "projector_hidden_size projector_input_dim projector_output_dim text_hidden_size vision_hidden_size "
        "vision_output_dim adapter_in_dim adapter_input_size adapter_out_dim audio_embed_dim codebook_dim "
        "downsample_hidden_size image_text_hidden_size mm_embed_dim output_proj_dims projection_hidden_dim "
        "audio_hidden_size",
    ),
    (
        48,
        "intermediate_size ffn_dim n_inner d_ff encoder_ffn_dim decoder_ffn_dim mlp_hidden_size ffn_hidden_size "
        "dim_feedforward d_inner encoder_intermediate_size decoder_intermediate_size dense_intermediate_size "
        "projection_intermediate_size speech_encoder_intermediate_size",
    ),
    (
        16,
        "moe_intermediate_size shared_expert_intermediate_size expert_intermediate_size mamba_d_head mamba_head_dim "
        "moe_shared_expert_intermediate_size mamba_headdim q_lora_rank kv_lora_rank o_lora_rank index_head_dim "
        "expert_ffn_hidden_size indexer_head_dim mm_posemb_size shared_experts_intermediate_size conv_channels "
        "subsampling_conv_channels",
    ),
    (24, "shared_intermediate_size"),
    (
        4,
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
        "num_decoder_attention_heads num_encoder_attention_heads mamba_n_heads mamba_num_heads "
        "linear_num_value_heads num_experts num_local_experts n_routed_experts moe_num_experts "
        "encoder_num_attention_heads decoder_num_attention_heads n_mamba_heads "
        "speech_encoder_attention_heads",
    ),
    (
        2,
        "num_key_value_heads num_kv_heads linear_num_key_heads num_experts_per_tok moe_topk moe_k moe_top_k "
        "index_n_heads num_kv_shared_layers altup_num_inputs mamba_expand top_k_experts encoder_num_key_value_heads "
        "decoder_num_key_value_heads",
    ),
    (
        8,
        "head_dim d_kv kv_channels attention_head_dim global_head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim "
        "state_size mamba_d_state ssm_state_size chunk_size mamba_chunk_size linear_key_head_dim "
        "linear_value_head_dim attention_window_size hidden_size_per_layer_input patch_size num_mel_bins "
        "input_feat_per_channel num_conv_pos_embeddings feature_size feature_projection_input_dim context_size",
    ),
    (
        1,
        "n_shared_experts num_shared_experts n_group topk_group num_expert_groups first_k_dense_replace n_groups "
        "mamba_n_groups mamba_ngroups",
    ),
    (4, "sliding_window index_topk mamba_d_conv mamba_dt_rank time_step_rank laurel_rank rotary_dim adapter_rank"),
    (
        64,
        "max_position_embeddings n_positions n_ctx max_seq_len seq_length max_target_positions max_source_positions "
        "max_sequence_length decoder_max_position_embeddings encoder_max_position_embeddings",
    ),
    (32, "image_size max_image_size"),
    (3, "num_channels in_channels"),
    (2, "num_conv_pos_embedding_groups num_labels"),
    (4, "mm_tokens_per_image latent_query_num num_query_tokens"),
    (192, "patch_embed_hidden_size"),  # three colours of a patch
    (0, "pad_token_id decoder_start_token_id"),
    (0.02, "initializer_range"),  # of some towers 1e-10, which leaves no gradient to compare
    (0.0, "mask_time_prob mask_feature_prob layerdrop encoder_layerdrop decoder_layerdrop"),
    (1, "bos_token_id"),
    (2, "eos_token_id"),
    (False, "apply_spec_augment use_cache"),
)
_SIZES = {name: size for size, names in _GROUPS for name in names.split()}
_DROPOUT = re.compile(r"dropout|pdrop|drop_path|drop_rate|layerdrop|jitter_noise")
_TOKEN = re.compile(r"(image|video|audio|vision|boi|eoi|boa|eoa|speech|start|end|mask|sep|cls|unk).*(token|_id$|index)")


def tiny_config(model_type: str) -> Any:
    """A tiny config of that type.

    Raises:
        Exception: whatever transformers makes of sizes that do not go together.
    """
    return _tiny(CONFIG_MAPPING[model_type])


def _tiny(config_class: type[PretrainedConfig], settings: Mapping[str, Any] = MappingProxyType({})) -> Any:
    tweaks = dict(TWEAKS.get(config_class.model_type, {}))
    fields = _fields(config_class)
    options = {name: value for name, value in settings.items() if name not in _SIZES}
    for name, default in fields.items():
        if name in _SIZES and not isinstance(default, (list, tuple, dict, str)):
            options[name] = _SIZES[name]
        elif name == "image_size" and isinstance(default, (list, tuple)):
            options[name] = [_SIZES[name]] * len(default)
        elif _DROPOUT.search(name) and isinstance(default, float):
            options[name] = 0.0
    for name, inner in _sub_configs(config_class).items():
        own = tweaks.pop(name, {})
        options[name] = _tiny(*inner).to_dict() | own if isinstance(own, dict) else own
    options |= tweaks
    config = config_class(**{name: value for name, value in options.items() if value is not ...})
    _let_tokens_fit(config)
    return config


def _fields(config_class: type[PretrainedConfig]) -> dict[str, Any]:
    """The names that the class knows, with the defaults of those that have one."""
    own = [base for base in reversed(config_class.__mro__) if issubclass(base, PretrainedConfig)]
    fields = {name: getattr(base, name, None) for base in own for name in inspect.get_annotations(base)}
    for name, parameter in inspect.signature(config_class.__init__).parameters.items():
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            fields[name] = None if parameter.default is parameter.empty else parameter.default
    for generic in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"):
        fields.setdefault(generic, None)
    return fields


def _sub_configs(config_class: type[PretrainedConfig]) -> dict[str, tuple[type[PretrainedConfig], Mapping[str, Any]]]:
    """The classes of the configs that it holds, and what it sets in them."""
    if not config_class.sub_configs:
        return {}
    try:
        default = config_class()
    except Exception:  # it has no defaults for them, or not such that go together
        default = None
    found = {}
    for name, given in config_class.sub_configs.items():
        spec = config_class.sub_configs_defaults.get(name)
        usual = getattr(spec, "model_type", None)
        guess = default is None and usual in CONFIG_MAPPING
        inner = CONFIG_MAPPING[usual] if guess else type(getattr(default, name, None))
        if issubclass(inner, PretrainedConfig):
            settings = getattr(spec, "init_kwargs", None) or {}
            found[name] = inner, {key: value for key, value in settings.items() if not isinstance(value, dict)}
        elif given.__name__ != "AutoConfig":
            found[name] = given, {}
    return found


def _let_tokens_fit(config: Any) -> None:
    """Special tokens beyond the vocabulary get places at its end, each its own."""
    place = VOCABULARY
    for name, value in list(vars(config).items()):
        if isinstance(value, int) and not isinstance(value, bool) and value >= VOCABULARY and _TOKEN.search(name):
            place -= 1
            setattr(config, name, place)
