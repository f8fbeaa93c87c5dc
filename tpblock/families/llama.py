"""Llama 1 and 2, and models stored like them (SmolLM2): pre-norm, RMSNorm, SwiGLU, grouped-query attention, no biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tpblock.config import ModelConfig
from tpblock.families.fields import rope_theta, take

NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    "stack.blocks.{i}.norm_1.weight": "model.layers.{i}.input_layernorm.weight",
    "stack.blocks.{i}.attention.qkv.weight:q": "model.layers.{i}.self_attn.q_proj.weight",
    "stack.blocks.{i}.attention.qkv.weight:k": "model.layers.{i}.self_attn.k_proj.weight",
    "stack.blocks.{i}.attention.qkv.weight:v": "model.layers.{i}.self_attn.v_proj.weight",
    "stack.blocks.{i}.attention.out.weight": "model.layers.{i}.self_attn.o_proj.weight",
    "stack.blocks.{i}.norm_2.weight": "model.layers.{i}.post_attention_layernorm.weight",
    "stack.blocks.{i}.feedforward.up.weight:gate": "model.layers.{i}.mlp.gate_proj.weight",
    "stack.blocks.{i}.feedforward.up.weight:up": "model.layers.{i}.mlp.up_proj.weight",
    "stack.blocks.{i}.feedforward.down.weight": "model.layers.{i}.mlp.down_proj.weight",
    "stack.norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}


def config(hf: Mapping[str, Any]) -> ModelConfig:
    for field, only in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        if hf.get(field, only) != only:
            raise ValueError(f"config.json: {field} = {hf[field]!r} is not supported for Llama, only {only!r}")
    return ModelConfig(
        vocab_size=take(hf, "vocab_size"),
        dim=take(hf, "hidden_size"),
        layers=take(hf, "num_hidden_layers"),
        heads=take(hf, "num_attention_heads"),
        kv_heads=take(hf, "num_key_value_heads"),
        head_dim=hf.get("head_dim"),  # type: ignore[arg-type]  # None: dim // heads, here as there
        d_ff=take(hf, "intermediate_size"),
        norm_eps=take(hf, "rms_norm_eps"),
        rope_theta=rope_theta(hf),
        max_seq_len=take(hf, "max_position_embeddings"),
        tied_embeddings=take(hf, "tie_word_embeddings"),
    )
