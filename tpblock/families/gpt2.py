"""GPT-2: pre-norm, LayerNorm, learned positions, biases everywhere. Its Conv1D keeps matrices transposed, [in, out]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tpblock.config import Bias, ModelConfig, Norm, Position
from tpblock.families.fields import ACTIVATIONS, choose, layers, only, take
from tpblock.formats.stored import Order, Stored

PREFIX = "transformer."  # the files of openai-community/gpt2 lack it
NOT_WEIGHTS = (".attn.bias", ".attn.masked_bias")  # causal masks in older files; .attn.c_attn.bias is a weight

TENSORS = {
    "embedding.weight": (Stored("transformer.wte.weight"),),
    "positions": (Stored("transformer.wpe.weight"),),
    "stack.blocks.{i}.norm_1.weight": (Stored("transformer.h.{i}.ln_1.weight"),),
    "stack.blocks.{i}.norm_1.bias": (Stored("transformer.h.{i}.ln_1.bias"),),
    "stack.blocks.{i}.attention.qkv.weight": (
        Stored("transformer.h.{i}.attn.c_attn.weight", ("q", "k", "v"), Order.CONCATENATED, transposed=True),
    ),
    "stack.blocks.{i}.attention.qkv.bias": (
        Stored("transformer.h.{i}.attn.c_attn.bias", ("q", "k", "v"), Order.CONCATENATED),
    ),
    "stack.blocks.{i}.attention.out.weight": (Stored("transformer.h.{i}.attn.c_proj.weight", transposed=True),),
    "stack.blocks.{i}.attention.out.bias": (Stored("transformer.h.{i}.attn.c_proj.bias"),),
    "stack.blocks.{i}.norm_2.weight": (Stored("transformer.h.{i}.ln_2.weight"),),
    "stack.blocks.{i}.norm_2.bias": (Stored("transformer.h.{i}.ln_2.bias"),),
    "stack.blocks.{i}.feedforward.up.weight": (Stored("transformer.h.{i}.mlp.c_fc.weight", transposed=True),),
    "stack.blocks.{i}.feedforward.up.bias": (Stored("transformer.h.{i}.mlp.c_fc.bias"),),
    "stack.blocks.{i}.feedforward.down.weight": (Stored("transformer.h.{i}.mlp.c_proj.weight", transposed=True),),
    "stack.blocks.{i}.feedforward.down.bias": (Stored("transformer.h.{i}.mlp.c_proj.bias"),),
    "stack.norm.weight": (Stored("transformer.ln_f.weight"),),
    "stack.norm.bias": (Stored("transformer.ln_f.bias"),),
    "head.weight": (Stored("lm_head.weight"),),
}


def config(hf: Mapping[str, Any]) -> ModelConfig:
    only(hf, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False)
    only(hf, reorder_and_upcast_attn=False, add_cross_attention=False)
    dim = take(hf, "n_embd")
    return ModelConfig(
        vocab_size=take(hf, "vocab_size"),
        dim=dim,
        layers=layers(hf, "n_layer"),
        heads=take(hf, "n_head"),
        d_ff=take(hf, "n_inner", None) or 4 * dim,  # null or missing: 4 * n_embd
        activation=choose(hf, "activation_function", ACTIVATIONS),
        norm=Norm.LAYERNORM,
        norm_eps=take(hf, "layer_norm_epsilon"),
        position=Position.LEARNED,
        max_seq_len=take(hf, "n_positions"),
        bias=Bias.ALL,
        tied_embeddings=take(hf, "tie_word_embeddings", True),  # GPT-2's own files lack it, and their head
    )
