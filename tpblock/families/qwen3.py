"""Qwen3: Llama with RMS-normalised query and key heads, whose width is not bound to the model's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tpblock.config import Bias, ModelConfig, QKNorm
from tpblock.families import llama
from tpblock.families.fields import GATED_ACTIVATIONS, choose, flag, rope, sizes, take, windows
from tpblock.formats.stored import Stored

TENSORS = {
    **llama.TENSORS,
    "stack.blocks.{i}.attention.q_norm.weight": (Stored("model.layers.{i}.self_attn.q_norm.weight"),),
    "stack.blocks.{i}.attention.k_norm.weight": (Stored("model.layers.{i}.self_attn.k_norm.weight"),),
}


def config(hf: Mapping[str, Any]) -> ModelConfig:
    return ModelConfig(
        **sizes(hf),
        kv_heads=take(hf, "num_key_value_heads"),
        head_dim=take(hf, "head_dim"),
        activation=choose(hf, "hidden_act", GATED_ACTIVATIONS),
        norm_eps=take(hf, "rms_norm_eps"),
        bias=Bias.QKV | Bias.OUT if flag(hf, "attention_bias") else Bias.NONE,
        qk_norm=QKNorm.PER_HEAD,
        **windows(hf),
        **rope(hf),
    )
