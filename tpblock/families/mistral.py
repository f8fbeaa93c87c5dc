"""Mistral: Llama with a sliding window, stored under the same names. There are no biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tpblock.config import ModelConfig
from tpblock.families import llama
from tpblock.families.fields import GATED_ACTIVATIONS, choose, only, rope, sizes, take

TENSORS = llama.TENSORS


def config(hf: Mapping[str, Any]) -> ModelConfig:
    only(hf, layer_types=None)  # a window in some layers alone, which MistralForCausalLM of transformers would not heed
    return ModelConfig(
        **sizes(hf),
        kv_heads=take(hf, "num_key_value_heads"),
        head_dim=take(hf, "head_dim", None),  # null or missing: hidden_size / num_attention_heads
        activation=choose(hf, "hidden_act", GATED_ACTIVATIONS),
        norm_eps=take(hf, "rms_norm_eps"),
        sliding_window=take(hf, "sliding_window", null=True),  # null: none (v0.2 and v0.3)
        **rope(hf),
    )
