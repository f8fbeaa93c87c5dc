"""GPT-NeoX and Pythia: LayerNorm, ungated feed-forward, partial rotary; attention and feed-forward side by side on two norms.

``query_key_value`` holds the rows of head 0's query, key and value, then those of head 1: it has the shape of [Q | K | V], but
not its order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tpblock.config import Bias, ModelConfig, Norm, Placement
from tpblock.families.fields import ACTIVATIONS, choose, flag, rope, sizes, take
from tpblock.formats.stored import Order, Stored

PREFIX = "gpt_neox."
NOT_WEIGHTS = (".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")  # masks and frequencies in older files

TENSORS = {
    "embedding.weight": (Stored("gpt_neox.embed_in.weight"),),
    "stack.blocks.{i}.norm_1.weight": (Stored("gpt_neox.layers.{i}.input_layernorm.weight"),),
    "stack.blocks.{i}.norm_1.bias": (Stored("gpt_neox.layers.{i}.input_layernorm.bias"),),
    "stack.blocks.{i}.attention.qkv.weight": (
        Stored("gpt_neox.layers.{i}.attention.query_key_value.weight", ("q", "k", "v"), Order.PER_HEAD),
    ),
    "stack.blocks.{i}.attention.qkv.bias": (
        Stored("gpt_neox.layers.{i}.attention.query_key_value.bias", ("q", "k", "v"), Order.PER_HEAD),
    ),
    "stack.blocks.{i}.attention.out.weight": (Stored("gpt_neox.layers.{i}.attention.dense.weight"),),
    "stack.blocks.{i}.attention.out.bias": (Stored("gpt_neox.layers.{i}.attention.dense.bias"),),
    "stack.blocks.{i}.norm_2.weight": (Stored("gpt_neox.layers.{i}.post_attention_layernorm.weight"),),
    "stack.blocks.{i}.norm_2.bias": (Stored("gpt_neox.layers.{i}.post_attention_layernorm.bias"),),
    "stack.blocks.{i}.feedforward.up.weight": (Stored("gpt_neox.layers.{i}.mlp.dense_h_to_4h.weight"),),
    "stack.blocks.{i}.feedforward.up.bias": (Stored("gpt_neox.layers.{i}.mlp.dense_h_to_4h.bias"),),
    "stack.blocks.{i}.feedforward.down.weight": (Stored("gpt_neox.layers.{i}.mlp.dense_4h_to_h.weight"),),
    "stack.blocks.{i}.feedforward.down.bias": (Stored("gpt_neox.layers.{i}.mlp.dense_4h_to_h.bias"),),
    "stack.norm.weight": (Stored("gpt_neox.final_layer_norm.weight"),),
    "stack.norm.bias": (Stored("gpt_neox.final_layer_norm.bias"),),
    "head.weight": (Stored("embed_out.weight"),),
}


def config(hf: Mapping[str, Any]) -> ModelConfig:
    # Pythia's files lack attention_bias: GPTNeoXConfig of transformers means by that that there are biases.
    attention = Bias.QKV | Bias.OUT if flag(hf, "attention_bias", True) else Bias.NONE
    return ModelConfig(
        **sizes(hf),
        activation=choose(hf, "hidden_act", ACTIVATIONS),
        norm=Norm.LAYERNORM,
        norm_eps=take(hf, "layer_norm_eps"),
        placement=Placement.PARALLEL_TWO_NORMS if flag(hf, "use_parallel_residual") else Placement.PRE,
        bias=attention | Bias.FEEDFORWARD,
        **rope(hf, theta="rotary_emb_base", fraction="rotary_pct"),
    )
