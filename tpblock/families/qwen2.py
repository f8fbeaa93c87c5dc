"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values alone, stored under the same names.

That there are biases is part of the architecture; config.json does not say so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tpblock.config import Bias, ModelConfig
from tpblock.families import llama
from tpblock.families.fields import GATED_ACTIVATIONS, choose, rope, sizes, take, windows

TENSORS = llama.TENSORS


def config(hf: Mapping[str, Any]) -> ModelConfig:
    return ModelConfig(
        **sizes(hf),
        kv_heads=take(hf, "num_key_value_heads"),
        head_dim=take(hf, "head_dim", None),  # null or missing: hidden_size / num_attention_heads
        activation=choose(hf, "hidden_act", GATED_ACTIVATIONS),
        norm_eps=take(hf, "rms_norm_eps"),
        bias=Bias.QKV,
        **windows(hf),
        **rope(hf),
    )
