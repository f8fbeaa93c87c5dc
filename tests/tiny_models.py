"""Tiny models of transformers, one or more for each family that is supported.

transformers is imported where it is used, so that the workers of the pool need not load it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tests.exact import exact

LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | {
    "original_max_position_embeddings": 8,
    "rope_theta": 500.0,
}
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 5.0], "rope_theta": 100.0}
SIZES = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 25,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
} | {
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
}
SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


@dataclass(frozen=True)
class Model:
    """A tiny model: the name of its class in transformers, and the fields of its config."""

    architecture: str
    fields: Mapping[str, Any]


def llama_like(name: str, **changes: Any) -> Model:
    return Model(f"{name}ForCausalLM", SIZES | SPECIAL | {"rms_norm_eps": 1e-3} | changes)


def neox(**changes: Any) -> Model:
    fields = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
    return Model("GPTNeoXForCausalLM", fields | SPECIAL | {"layer_norm_eps": 1e-3} | changes)


def gpt2(**changes: Any) -> Model:
    sizes = {"vocab_size": 61, "n_embd": 20, "n_layer": 2, "n_head": 5, "n_positions": 16, "n_inner": 23}
    return Model("GPT2LMHeadModel", sizes | SPECIAL | {"layer_norm_epsilon": 1e-3} | changes)


MODELS = {
    "llama": llama_like("Llama", num_attention_heads=4, num_key_value_heads=None),
    "llama3": llama_like("Llama", num_key_value_heads=2, rope_parameters=LLAMA3, tie_word_embeddings=True),
    "llama-biases": llama_like(
        "Llama",
        head_dim=6,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters={"rope_type": "linear", "factor": 2.5, "rope_theta": 100.0},
    ),
    "mistral": llama_like("Mistral", num_attention_heads=5, num_key_value_heads=1, head_dim=4, sliding_window=4),
    "mistral-full": llama_like("Mistral", sliding_window=None, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "qwen2": llama_like("Qwen2", use_sliding_window=False, num_key_value_heads=2),
    "qwen2-window": llama_like(
        "Qwen2",
        num_hidden_layers=3,
        use_sliding_window=True,
        sliding_window=3,
        max_window_layers=1,
        tie_word_embeddings=True,
    ),
    "qwen3": llama_like(
        "Qwen3", num_attention_heads=4, num_key_value_heads=1, hidden_size=18, head_dim=8, tie_word_embeddings=True
    ),
    "qwen3-biases": llama_like("Qwen3", head_dim=4, attention_bias=True),
    "gpt2": gpt2(),
    "gpt2-untied": gpt2(n_inner=None, n_head=4, tie_word_embeddings=False, activation_function="gelu"),
    "neox": neox(hidden_size=48, rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.25}),
    "neox-sequential": neox(
        num_attention_heads=4,
        use_parallel_residual=False,
        attention_bias=False,
        hidden_act="gelu_fast",
        rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.7},
    ),
    "phi3": llama_like("Phi3", original_max_position_embeddings=9, rope_parameters=LONG),
    "phi3-long": llama_like(
        "Phi3",
        num_key_value_heads=2,
        hidden_size=36,
        original_max_position_embeddings=8,
        rope_parameters=LONG | {"partial_rotary_factor": 0.75},
        sliding_window=5,
        tie_word_embeddings=True,
    ),
}
"""Heads, feed-forward and vocabulary that no number of ranks divides, fewer KV heads than ranks, both sides of a longrope."""


def build(model: Model) -> Any:
    """A model of transformers with every parameter drawn anew: no bias is zero, no norm's weight one. Values are of float32."""
    import transformers

    kind = getattr(transformers, model.architecture)
    with exact():
        made = kind(kind.config_class(**model.fields)).double().eval()
    generator = torch.Generator("cpu").manual_seed(0)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            value = 0.3 * torch.randn(parameter.shape, generator=generator)
            is_norm = re.search(r"(norm|ln_.)\.weight$", name)
            parameter.copy_(1 + value if is_norm else value)
    return made
