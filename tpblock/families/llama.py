"""Llama 1 to 3 and models stored like them (SmolLM2): pre-norm, RMSNorm, SwiGLU, grouped-query attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tpblock.config import Bias, ModelConfig
from tpblock.families.fields import GATED_ACTIVATIONS, choose, flag, rope, sizes, take
from tpblock.formats.stored import Stored

TENSORS = {
    "embedding.weight": (Stored("model.embed_tokens.weight"),),
    "stack.blocks.{i}.norm_1.weight": (Stored("model.layers.{i}.input_layernorm.weight"),),
    "stack.blocks.{i}.attention.qkv.weight": (
        Stored("model.layers.{i}.self_attn.q_proj.weight", ("q",)),
        Stored("model.layers.{i}.self_attn.k_proj.weight", ("k",)),
        Stored("model.layers.{i}.self_attn.v_proj.weight", ("v",)),
    ),
    "stack.blocks.{i}.attention.qkv.bias": (
        Stored("model.layers.{i}.self_attn.q_proj.bias", ("q",)),
        Stored("model.layers.{i}.self_attn.k_proj.bias", ("k",)),
        Stored("model.layers.{i}.self_attn.v_proj.bias", ("v",)),
    ),
    "stack.blocks.{i}.attention.out.weight": (Stored("model.layers.{i}.self_attn.o_proj.weight"),),
    "stack.blocks.{i}.attention.out.bias": (Stored("model.layers.{i}.self_attn.o_proj.bias"),),
    "stack.blocks.{i}.norm_2.weight": (Stored("model.layers.{i}.post_attention_layernorm.weight"),),
    "stack.blocks.{i}.feedforward.up.weight": (
        Stored("model.layers.{i}.mlp.gate_proj.weight", ("gate",)),
        Stored("model.layers.{i}.mlp.up_proj.weight", ("up",)),
    ),
    "stack.blocks.{i}.feedforward.up.bias": (
        Stored("model.layers.{i}.mlp.gate_proj.bias", ("gate",)),
        Stored("model.layers.{i}.mlp.up_proj.bias", ("up",)),
    ),
    "stack.blocks.{i}.feedforward.down.weight": (Stored("model.layers.{i}.mlp.down_proj.weight"),),
    "stack.blocks.{i}.feedforward.down.bias": (Stored("model.layers.{i}.mlp.down_proj.bias"),),
    "stack.norm.weight": (Stored("model.norm.weight"),),
    "head.weight": (Stored("lm_head.weight"),),
}


def config(hf: Mapping[str, Any]) -> ModelConfig:
    # What the files of Llama 1 and 2 lack means what LlamaConfig of transformers makes of it.
    hf = {"num_key_value_heads": None, "rope_theta": 10_000.0, "attention_bias": False, "mlp_bias": False, **hf}
    attention = Bias.QKV | Bias.OUT if flag(hf, "attention_bias") else Bias.NONE
    feedforward = Bias.FEEDFORWARD if flag(hf, "mlp_bias") else Bias.NONE
    return ModelConfig(
        **sizes(hf),
        kv_heads=take(hf, "num_key_value_heads", null=True),  # null: as many as query heads
        head_dim=take(hf, "head_dim", None),  # null or missing: hidden_size / num_attention_heads
        activation=choose(hf, "hidden_act", GATED_ACTIVATIONS),
        norm_eps=take(hf, "rms_norm_eps"),
        bias=attention | feedforward,
        **rope(hf),
    )
