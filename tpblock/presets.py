"""Published models as configs. ``preset("llama-2-7b")`` gives one, ``PRESETS`` lists them with their sources."""

from __future__ import annotations

from dataclasses import dataclass

from tpblock.config import Activation, ModelConfig, Norm, Placement, Position


@dataclass(frozen=True)
class Preset:
    """A config and where its numbers come from."""

    config: ModelConfig
    source: str


def _gpt(dim: int, layers: int, heads: int, max_seq_len: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=50257,
        dim=dim,
        layers=layers,
        heads=heads,
        activation=Activation.GELU_TANH,
        norm=Norm.LAYERNORM,
        position=Position.LEARNED,
        max_seq_len=max_seq_len,
        bias=True,
        tied_embeddings=True,
    )


PRESETS: dict[str, Preset] = {
    "stack-100m": Preset(
        ModelConfig(vocab_size=32000, dim=512, layers=30, heads=8, d_ff=1408, norm_eps=1e-6),
        "A Transformer Block chapter's Stack-100M: d 512, 30 layers, d_ff 1408, RMSNorm, SwiGLU, no biases. "
        "It gives neither heads nor vocabulary: 8 heads of 64 and Llama 2's 32,000 here",
    ),
    "llama-2-7b": Preset(
        ModelConfig(vocab_size=32000, dim=4096, layers=32, heads=32, d_ff=11008, max_seq_len=4096),
        "Touvron et al., Llama 2 (2023); config.json of meta-llama/Llama-2-7b",
    ),
    "llama-3-8b": Preset(
        ModelConfig(
            vocab_size=128256, dim=4096, layers=32, heads=32, kv_heads=8, d_ff=14336, rope_theta=500_000.0, max_seq_len=8192
        ),
        "Llama Team, The Llama 3 Herd of Models (2024), table 3; config.json of meta-llama/Meta-Llama-3-8B",
    ),
    "llama-3-70b": Preset(
        ModelConfig(
            vocab_size=128256, dim=8192, layers=80, heads=64, kv_heads=8, d_ff=28672, rope_theta=500_000.0, max_seq_len=8192
        ),
        "Llama Team, The Llama 3 Herd of Models (2024), table 3; config.json of meta-llama/Meta-Llama-3-70B",
    ),
    "gpt-2": Preset(
        _gpt(768, 12, 12, 1024),
        "Radford et al., Language Models are Unsupervised Multitask Learners (2019); config.json of openai-community/gpt2. "
        "Dropout (0.1 in the original) is off",
    ),
    "gpt-2-xl": Preset(
        _gpt(1600, 48, 25, 1024),
        "Radford et al., Language Models are Unsupervised Multitask Learners (2019), the 1542M model: 25 heads",
    ),
    "gpt-3-175b": Preset(
        _gpt(12288, 96, 96, 2048),
        "Brown et al., Language Models are Few-Shot Learners (2020), table 2.1. Its alternating sparse attention is dense here",
    ),
    "gpt-neox-20b": Preset(
        ModelConfig(
            vocab_size=50432,
            dim=6144,
            layers=44,
            heads=64,
            d_ff=24576,
            activation=Activation.GELU_TANH,
            norm=Norm.LAYERNORM,
            placement=Placement.PARALLEL_TWO_NORMS,
            rotary_fraction=0.25,
            max_seq_len=2048,
            bias=True,
        ),
        "Black et al., GPT-NeoX-20B (2022); configs/20B.yml of EleutherAI/gpt-neox",
    ),
    "palm-8b": Preset(
        ModelConfig(
            vocab_size=256000,
            dim=4096,
            layers=32,
            heads=16,
            kv_heads=1,
            head_dim=256,
            d_ff=16384,
            placement=Placement.PARALLEL,
            tied_embeddings=True,
        ),
        "Chowdhery et al., PaLM (2022), table 1: parallel block, multi-query, SwiGLU. Its LayerNorm has no bias: RMSNorm here",
    ),
}


def preset(name: str) -> ModelConfig:
    """The config of a published model. A ValueError lists the names there are."""
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name].config
