"""Tiny models of several families, random, in fp64, and batches with padding that differs between microbatches."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from torch import nn

VOCABULARY = 37
LENGTH = 10


def _common(layers: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "max_position_embeddings": 32,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _gpt2(layers: int) -> Any:
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return hf.GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=layers, n_head=4, n_positions=32, **dropout)


def _gpt_neox(layers: int) -> Any:
    common = {name: value for name, value in _common(layers).items() if name not in ("num_key_value_heads", "head_dim")}
    return hf.GPTNeoXConfig(**common, rotary_pct=0.5)


def _gemma3(layers: int) -> Any:
    types = ["sliding_attention", "full_attention"] * layers
    return hf.Gemma3TextConfig(**_common(layers), sliding_window=4, layer_types=types[:layers], query_pre_attn_scalar=4)


def _mixtral(layers: int) -> Any:
    return hf.MixtralConfig(**_common(layers), num_local_experts=4, num_experts_per_tok=2)


def _mixtral_with_router_loss(layers: int) -> Any:
    return hf.MixtralConfig(
        **_common(layers),
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        router_aux_loss_coef=0.1,
    )


def _qwen3_moe(layers: int) -> Any:
    return hf.Qwen3MoeConfig(**_common(layers), moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2)


def _gpt_oss(layers: int) -> Any:
    return hf.GptOssConfig(**_common(layers), num_local_experts=4, num_experts_per_tok=2, sliding_window=4)


def _deepseek_v3(layers: int) -> Any:
    common = {name: value for name, value in _common(layers).items() if name not in ("num_key_value_heads", "head_dim")}
    return hf.DeepseekV3Config(
        **common,
        num_key_value_heads=4,
        moe_intermediate_size=8,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=4,
    )


def _t5(layers: int) -> Any:
    return hf.T5Config(
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=4,
        d_ff=24,
        num_layers=layers - layers // 2,
        num_decoder_layers=layers // 2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
        tie_word_embeddings=True,
    )


CAUSAL = hf.AutoModelForCausalLM
CONFIGS: dict[str, tuple[Any, Any]] = {
    "llama": (lambda layers: hf.LlamaConfig(**_common(layers)), CAUSAL),
    "llama tied": (lambda layers: hf.LlamaConfig(**_common(layers), tie_word_embeddings=True), CAUSAL),
    "gpt2": (_gpt2, CAUSAL),
    "qwen3": (lambda layers: hf.Qwen3Config(**_common(layers), tie_word_embeddings=False), CAUSAL),
    "gemma3": (_gemma3, CAUSAL),
    "mixtral": (_mixtral, CAUSAL),
    "mixtral with router loss": (_mixtral_with_router_loss, CAUSAL),
    "gpt_neox": (_gpt_neox, CAUSAL),
    "qwen3_moe": (_qwen3_moe, CAUSAL),
    "deepseek_v3": (_deepseek_v3, CAUSAL),
    "gpt_oss": (_gpt_oss, CAUSAL),
    "t5": (_t5, hf.AutoModelForSeq2SeqLM),
}

WITHOUT_SDPA = {"gpt_oss"}

# Against a whole batch: transformers computes the causal loss in fp32 whatever the model's type, T5 its attention
# weights, the mixtures their routing. Rounding then differs with the rows that are computed together.
CASTS_TO_FP32 = 1e-6
# Against the unsplit model run on the same microbatches nothing is left to differ.
EXACT = 1e-9


def make_model(name: str, layers: int = 7, dtype: torch.dtype = torch.float64, device: str = "cpu") -> nn.Module:
    make_config, auto = CONFIGS[name]
    torch.manual_seed(0)
    with torch.device(device):
        model = auto.from_config(
            make_config(layers),
            experts_implementation="eager",
            attn_implementation="eager" if name in WITHOUT_SDPA else "sdpa",
        )
    return model.to(dtype).train()


def make_batch(rows: int, seed: int = 0, length: int = LENGTH) -> dict[str, torch.Tensor]:
    """Token ids, mask and labels of ``rows`` rows, of very different lengths."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, length - (row * 3) % (length - 2) :] = 0
    mask[0] = 1
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": torch.where(mask == 1, ids, -100)}


def microbatch(batch: dict[str, torch.Tensor], index: int, n: int) -> dict[str, torch.Tensor]:
    return {name: tensor.chunk(n)[index] for name, tensor in batch.items()}
