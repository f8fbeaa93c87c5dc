"""Phi-3, Phi-3.5-mini, Phi-4 and Phi-4-mini: Llama with q, k, v in one matrix and gate and up in another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tpblock.config import ModelConfig
from tpblock.families import llama
from tpblock.families.fields import GATED_ACTIVATIONS, choose, only, rope, sizes, take
from tpblock.formats.stored import Order, Stored

TENSORS = {
    **llama.TENSORS,
    "stack.blocks.{i}.attention.qkv.weight": (
        Stored("model.layers.{i}.self_attn.qkv_proj.weight", ("q", "k", "v"), Order.CONCATENATED),
    ),
    "stack.blocks.{i}.feedforward.up.weight": (
        Stored("model.layers.{i}.mlp.gate_up_proj.weight", ("gate", "up"), Order.CONCATENATED),
    ),
}


def config(hf: Mapping[str, Any]) -> ModelConfig:
    only(hf, attention_bias=False, mlp_bias=False, lm_head_bias=False, full_attn_mod=1, interpolate_factor=1)
    hf = {"partial_rotary_factor": 1.0, **hf}  # Phi-3's files lack it and Phi-4-mini's have 0.75
    return ModelConfig(
        **sizes(hf),
        kv_heads=take(hf, "num_key_value_heads"),
        head_dim=take(hf, "head_dim", None),  # null or missing: hidden_size / num_attention_heads
        activation=choose(hf, "hidden_act", GATED_ACTIVATIONS),
        norm_eps=take(hf, "rms_norm_eps"),
        sliding_window=take(hf, "sliding_window", null=True),  # null: none
        **rope(hf, fraction="partial_rotary_factor"),
    )
