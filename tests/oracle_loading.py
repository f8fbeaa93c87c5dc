"""The way from our models to the oracle's: its config, and our global tensors under its names."""

from __future__ import annotations

import torch
from torch import Tensor

from parallel.group import single_device
from parallel.state import named_layouts
from tests.oracle import OracleConfig, OracleDecoder
from tpblock import Bias, Decoder, LinearScaling, Llama3Scaling, LongRopeScaling, ModelConfig, Position, QKNorm

SCALINGS = {LinearScaling: "linear", Llama3Scaling: "llama3", LongRopeScaling: "longrope"}


def oracle_config(config: ModelConfig) -> OracleConfig:
    scaling = config.rope_scaling
    return OracleConfig(
        vocab_size=config.vocab_size,
        dim=config.dim,
        layers=config.layers,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        d_ff=config.d_ff,
        activation=config.activation.value,
        norm=config.norm.value,
        norm_eps=config.norm_eps,
        placement=config.placement.value,
        rotary_dim=config.rotary_dim if config.position is Position.ROPE else 0,
        rope_theta=config.rope_theta,
        max_seq_len=config.max_seq_len,
        bias=frozenset(str(linears.name).lower() for linears in Bias(config.bias)),
        tied_embeddings=config.tied_embeddings,
        qk_norm=config.qk_norm is QKNorm.PER_HEAD,
        rope_scaling={} if scaling is None else {"kind": SCALINGS[type(scaling)], **vars(scaling)},
        window=config.sliding_window,
        full_layers=config.full_attention_layers,
    )


def to_oracle(state: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Global tensors (weights or gradients) of a Block, Stack or Decoder under the oracle's names, fused ones taken apart."""
    inner, kv_inner = config.heads * config.head_dim, config.kv_heads * config.head_dim
    attention = {"q": inner, "k": kv_inner, "v": kv_inner}
    feedforward = {"gate": config.d_ff, "up": config.d_ff} if config.activation.gated else {"up": config.d_ff}
    fused = {"attention.qkv": attention, "feedforward.up": feedforward, "fused": attention | feedforward}
    renamed = {
        "attention.out": "o",
        "feedforward.down": "down",
        "attention.q_norm": "q_norm",
        "attention.k_norm": "k_norm",
    }
    out: dict[str, Tensor] = {}
    for name, value in state.items():
        for ours, parts in fused.items():
            head, found, kind = name.partition(f"{ours}.")
            if found:
                sections = value.split(list(parts.values()))
                out |= {f"{head}{part}.{kind}": section for part, section in zip(parts, sections, strict=True)}
                break
        else:
            for ours, theirs in renamed.items():
                name = name.replace(f"{ours}.", f"{theirs}.")
            out[name] = value
    return out


def part_of(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors under a prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def random_state(config: ModelConfig, seed: int = 0, std: float = 0.2) -> dict[str, Tensor]:
    """A value for every global tensor of a Decoder, in float64: larger than initial values, no bias zero, no norm weight one,
    so that no term of the algebra can hide."""
    generator = torch.Generator("cpu").manual_seed(seed)
    model = Decoder(config, group=single_device(), device="meta")
    norms = {f"{name}.weight" for name, module in model.named_modules() if "norm" in name.rpartition(".")[2]}
    state = {}
    for name, _, layout in named_layouts(model):
        value = torch.randn(layout.shape, generator=generator, dtype=torch.float64, device="cpu")
        state[name] = 1 + 0.3 * value if name in norms else value * (0.3 if name.endswith("bias") else std)
    return state


def oracle_decoder(config: ModelConfig, state: dict[str, Tensor]) -> OracleDecoder:
    """The oracle, in float64, with the values of a Decoder's global state."""
    oracle = OracleDecoder(oracle_config(config)).double()
    oracle.load_state_dict(to_oracle(state, config))
    return oracle


def is_softmax_invariant(name: str, config: ModelConfig) -> bool:
    """Whether the gradient of an oracle parameter is zero in exact arithmetic: a key bias adds the same to all scores of a
    query, unless rotary embeddings turn it by a key's position or the key is normalised with it."""
    return name.endswith("k.bias") and config.position is Position.LEARNED and config.qk_norm is QKNorm.NONE
