"""What a ModelConfig refuses, and how many parameters models have: the worked numbers of the sources, and the real modules."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.group import TPGroup, single_device
from parallel.state import named_layouts
from tpblock.config import Activation, Bias, ModelConfig, Norm, Placement, Position, QKNorm, default_d_ff
from tpblock.model import Decoder
from tpblock.presets import PRESETS, preset
from tpblock.rope import LinearScaling, LongRopeScaling

SMALL: dict[str, Any] = {"vocab_size": 11, "dim": 12, "layers": 2, "heads": 3}


def longrope(short: int = 2, long: int = 2) -> LongRopeScaling:
    return LongRopeScaling(
        short_factor=(1.0,) * short, long_factor=(2.0,) * long, original_max_seq_len=8, attention_factor=1.0
    )


def on_rank(rank: int, size: int) -> TPGroup:
    """A group that can hold parameters on the meta device, but not communicate."""
    return TPGroup(rank, size, object() if size > 1 else None)


# -- errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 0}, "vocab_size must be a positive integer, got 0"),
        ({"dim": -12}, "dim must be a positive integer, got -12"),
        ({"dim": 12.0, "head_dim": 4}, r"dim must be a positive integer, got 12\.0"),
        ({"layers": 0}, "layers must be a positive integer, got 0"),
        ({"layers": True}, "layers must be a positive integer, got True"),
        ({"heads": 0}, "heads must be a positive integer, got 0"),
        ({"heads": None}, "heads must be a positive integer, got None"),
        ({"dim": "12"}, "dim must be a positive integer, got '12'"),
        ({"dropout": "0.1"}, "dropout must be a finite number, got '0.1'"),
        ({"init_std": math.inf}, "init_std must be a finite number, got inf"),
        ({"rope_theta": None}, "rope_theta must be a finite number, got None"),
        ({"bias": "no"}, r"bias must be one of Bias\.QKV, Bias\.OUT, Bias\.FEEDFORWARD, got 'no'"),
        ({"qk_norm": True}, r"qk_norm must be one of QKNorm\.NONE, QKNorm\.PER_HEAD, got True"),
        ({"placement": Placement.PARALLEL, "bias": Bias.QKV}, r"both have a bias or neither, got <?Bias\.QKV"),
        ({"placement": Placement.PARALLEL, "bias": Bias.OUT | Bias.FEEDFORWARD}, "both have a bias or neither"),
        ({"sliding_window": 0}, "sliding_window must be a positive integer, got 0"),
        ({"full_attention_layers": (1,)}, r"full_attention_layers \(1,\) have no effect without a sliding_window"),
        ({"sliding_window": 3, "full_attention_layers": (0, 2)}, "full_attention_layers has 2, the layers are 0 to 1"),
        ({"rope_scaling": 8.0}, r"rope_scaling must be one of .*Llama3Scaling.* or None, got 8\.0"),
        ({"rope_scaling": longrope(short=3)}, "short_factor of rope_scaling has 3 numbers, 4 rotated features need 2"),
        ({"rope_scaling": longrope(long=1)}, "long_factor of rope_scaling has 1 numbers, 4 rotated features need 2"),
        ({"position": Position.LEARNED, "rope_scaling": LinearScaling(factor=2.0)}, r"LinearScaling\(.* no effect with"),
        ({"tied_embeddings": 1}, "tied_embeddings must be True or False, got 1"),
        ({"heads": 0, "head_dim": 4}, "heads must be a positive integer, got 0"),
        ({"kv_heads": 0}, "kv_heads must be a positive integer, got 0"),
        ({"head_dim": 0}, "head_dim must be a positive integer, got 0"),
        ({"d_ff": 0}, "d_ff must be a positive integer, got 0"),
        ({"max_seq_len": 0}, "max_seq_len must be a positive integer, got 0"),
        ({"heads": 5}, "dim 12 is not a multiple of heads 5: give head_dim"),
        ({"heads": 6, "kv_heads": 4}, "heads 6 is not a multiple of kv_heads 4"),
        ({"kv_heads": 6}, "heads 3 is not a multiple of kv_heads 6"),
        ({"dropout": 1.0}, r"dropout must be at least 0 and below 1, got 1\.0"),
        ({"dropout": -0.1}, r"dropout must be at least 0 and below 1, got -0\.1"),
        ({"dropout": math.nan}, "dropout must be a finite number, got nan"),
        ({"attention_dropout": 1.5}, r"attention_dropout must be at least 0 and below 1, got 1\.5"),
        ({"norm_eps": 0.0}, r"norm_eps must be positive, got 0\.0"),
        ({"rope_theta": -1.0}, r"rope_theta must be positive, got -1\.0"),
        ({"init_std": 0.0}, r"init_std must be positive, got 0\.0"),
        ({"init_std": math.nan}, "init_std must be a finite number, got nan"),
        ({"rope_theta": 10**400}, "rope_theta must be a finite number, got 10"),
        ({"sliding_window": 4, "full_attention_layers": ("0",)}, "full_attention_layers has '0', the layers are"),
        ({"rotary_fraction": 0.0}, r"rotary_fraction must be above 0 and at most 1, got 0\.0"),
        ({"rotary_fraction": 1.5}, r"rotary_fraction must be above 0 and at most 1, got 1\.5"),
        ({"rotary_fraction": 0.25}, r"rotary_fraction 0\.25 of head_dim 4 rotates 1 features"),
        ({"head_dim": 5}, r"rotary_fraction 1\.0 of head_dim 5 rotates 5 features: .* even"),
        ({"position": Position.LEARNED, "rope_theta": 5e5}, r"rope_theta 500000\.0, .* no effect with Position\.LEARNED"),
        ({"position": Position.LEARNED, "rotary_fraction": 0.5}, r"rotary_fraction 0\.5 and .* no effect"),
        ({"activation": "swiglu"}, r"activation must be one of Activation\.SWIGLU, .*, got 'swiglu'"),
        ({"norm": "layernorm"}, r"norm must be one of Norm\.RMSNORM, Norm\.LAYERNORM, got 'layernorm'"),
        ({"placement": "pre"}, r"placement must be one of Placement\.PRE, .*, got 'pre'"),
        ({"position": None}, r"position must be one of Position\.ROPE, Position\.LEARNED, got None"),
    ],
)
def test_config_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{**SMALL, **change})


def test_config_fills_in_what_follows() -> None:
    config = ModelConfig(**SMALL)
    assert (config.kv_heads, config.head_dim, config.d_ff, config.rotary_dim) == (3, 4, 64, 4)
    assert ModelConfig(**SMALL, activation=Activation.RELU).d_ff == 48
    assert ModelConfig(**SMALL, head_dim=8, rotary_fraction=0.25).rotary_dim == 2
    assert dataclasses.replace(config, layers=3).d_ff == 64
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.dim = 24
    with pytest.raises(TypeError):
        ModelConfig(11, 12, 2, 3)  # by keyword only


def test_true_and_false_are_short_for_all_biases_and_none() -> None:
    assert ModelConfig(**SMALL, bias=True) == ModelConfig(**SMALL, bias=Bias.ALL) != ModelConfig(**SMALL, bias=Bias.QKV)
    assert ModelConfig(**SMALL, bias=False) == ModelConfig(**SMALL) and ModelConfig(**SMALL).bias is Bias.NONE
    config = ModelConfig(**SMALL, bias=Bias.QKV | Bias.OUT)
    assert [config.has_bias(linears) for linears in Bias] == [True, True, False]


def test_windows_of_layers() -> None:
    config = ModelConfig(**{**SMALL, "layers": 4}, sliding_window=5, full_attention_layers=(1, 3))
    assert [config.window(layer) for layer in range(4)] == [5, None, 5, None]
    assert ModelConfig(**SMALL).window(0) is None


def test_default_widths_of_the_sources() -> None:
    gated = Activation.SWIGLU
    assert default_d_ff(2048, gated) == 5504
    assert default_d_ff(4096, gated) == 10944
    assert default_d_ff(4096, gated, 256) == 11008
    assert default_d_ff(512, gated) == 1408
    assert default_d_ff(768, gated) == 2048  # 8 * 768 / 3 is a multiple already
    for plain in (Activation.GELU, Activation.GELU_TANH, Activation.RELU):
        assert default_d_ff(12288, plain) == 49152
    assert [a for a in Activation if a.gated] == [gated]


# -- parameter counts


def test_the_worked_ffn_of_llama_2_7b() -> None:
    config = preset("llama-2-7b")
    matrix = config.dim * config.d_ff
    assert round(matrix / 1e6, 1) == 45.1
    assert round(3 * matrix / 1e6) == 135
    assert round(3 * matrix * config.layers / 1e9, 1) == 4.3


def test_the_worked_blocks_and_model_of_llama_2_7b() -> None:
    config = preset("llama-2-7b")
    narrow = dataclasses.replace(config, d_ff=default_d_ff(config.dim, config.activation))
    assert narrow.d_ff == 10944
    assert round(narrow.block_parameters() / 1e6, 1) == 201.6
    assert round(config.block_parameters() / 1e6, 1) == 202.4
    assert round(narrow.parameters() / 1e9, 2) == 6.71
    assert round(config.parameters() / 1e9, 2) == 6.74
    assert config.parameters() == 6_738_415_616


def test_the_worked_ffn_of_width_2048() -> None:
    """8/3 of the width in three matrices is about 4 of the width in two."""
    d_ff = default_d_ff(2048, Activation.SWIGLU)
    assert 3 * 2048 * d_ff == 33_816_576
    assert 2 * 2048 * default_d_ff(2048, Activation.GELU) == 33_554_432


PUBLISHED = {
    "stack-100m": (100e6, 30e6),  # "about 100M", of which its blocks are 96.4M
    "llama-2-7b": (6.74e9, 0.005e9),
    "llama-3-8b": (8.03e9, 0.005e9),
    "llama-3-70b": (70.6e9, 0.05e9),
    "gpt-2": (124.4e6, 0.05e6),
    "gpt-2-xl": (1.56e9, 0.005e9),
    "gpt-3-175b": (174.6e9, 0.1e9),
    "gpt-neox-20b": (20.6e9, 0.05e9),
    "palm-8b": (8.63e9, 0.1e9),
}


@pytest.mark.parametrize("name", PRESETS)
def test_preset_has_its_published_size(name: str) -> None:
    size, tolerance = PUBLISHED[name]
    assert abs(preset(name).parameters() - size) <= tolerance, f"{preset(name).parameters():,}"


def test_presets_name_their_source() -> None:
    assert all(entry.source for entry in PRESETS.values())
    assert {"stack-100m", "llama-2-7b", "llama-3-8b", "llama-3-70b", "gpt-2", "gpt-3-175b", "gpt-neox-20b"} <= PRESETS.keys()
    stack = preset("stack-100m")
    assert (stack.dim, stack.layers, stack.d_ff, stack.bias) == (512, 30, 1408, Bias.NONE)
    assert stack.layers * stack.block_parameters() == 30 * (4 * 512**2 + 3 * 512 * 1408 + 2 * 512) == 96_368_640
    with pytest.raises(ValueError, match="unknown preset 'gpt-5'; there are stack-100m, llama-2-7b"):
        preset("gpt-5")


# -- the formula against the modules


def on_meta(config: ModelConfig, group: TPGroup) -> Decoder:
    return Decoder(config, group=group, device="meta")


def one_layer(config: ModelConfig) -> ModelConfig:
    """Blocks are alike: one stands for all, and large models stay quick to build."""
    return dataclasses.replace(config, layers=1)


def check_formula(config: ModelConfig) -> None:
    model = on_meta(config, single_device())
    assert sum(p.numel() for p in model.parameters()) == config.parameters()
    for block in model.stack.blocks:
        assert sum(p.numel() for p in block.parameters()) == config.block_parameters()


@pytest.mark.parametrize("name", PRESETS)
def test_c38_the_formula_is_the_sum_over_the_parameters_of_presets(name: str) -> None:
    config = preset(name)
    check_formula(config)
    rest = config.parameters() - config.layers * config.block_parameters()
    assert one_layer(config).parameters() == rest + config.block_parameters()


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    """Any small model."""
    placement = draw(st.sampled_from(Placement))
    biases = [Bias.NONE, Bias.OUT, Bias.QKV | Bias.FEEDFORWARD, Bias.ALL]
    if placement is not Placement.PARALLEL:
        biases += [Bias.QKV, Bias.FEEDFORWARD | Bias.OUT]
    kv_heads, group, head_dim = draw(st.integers(1, 4)), draw(st.integers(1, 4)), 2 * draw(st.integers(1, 3))
    return ModelConfig(
        vocab_size=draw(st.integers(4, 30)),
        dim=draw(st.integers(1, 13)),
        layers=draw(st.integers(1, 3)),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=head_dim,
        d_ff=draw(st.integers(4, 21)),
        activation=draw(st.sampled_from(Activation)),
        norm=draw(st.sampled_from(Norm)),
        placement=placement,
        position=draw(st.sampled_from(Position)),
        max_seq_len=draw(st.integers(1, 9)),
        bias=draw(st.sampled_from(biases)),
        qk_norm=draw(st.sampled_from(QKNorm)),
        tied_embeddings=draw(st.booleans()),
    )


@settings(deadline=None, max_examples=40)
@given(configs())
def test_c38_the_formula_is_the_sum_over_the_parameters_of_any_model(config: ModelConfig) -> None:
    check_formula(config)


def test_c38_fused_qkv_rows() -> None:
    config = ModelConfig(**{**SMALL, "heads": 6, "kv_heads": 2, "head_dim": 4})
    block = on_meta(config, single_device()).stack.blocks[0]
    assert block.attention.qkv.weight.shape == ((6 + 2 * 2) * 4, 12)
    fused = dataclasses.replace(config, placement=Placement.PARALLEL)
    block = on_meta(fused, single_device()).stack.blocks[0]
    assert block.fused.weight.shape == ((6 + 2 * 2) * 4 + 2 * config.d_ff, 12)


# -- shards


def check_shards(config: ModelConfig, ranks: int) -> None:
    """All ranks' parameters, what several hold counted once, are the model."""
    models = [on_meta(config, on_rank(rank, ranks)) for rank in range(ranks)]
    owned = 0
    for rank, model in enumerate(models):
        for _, parameter, layout in named_layouts(model):
            assert tuple(parameter.shape) == layout.local_shape(rank)
            if layout.dim is None:
                owned += parameter.numel() if rank == 0 else 0
            else:
                rows = parameter.numel() // parameter.shape[layout.dim]
                owned += rows * sum(piece.length for piece in layout.owned(rank))
    assert owned == config.parameters()


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("name", PRESETS)
def test_shards_of_presets_add_up(name: str, ranks: int) -> None:
    check_shards(one_layer(preset(name)), ranks)


@settings(deadline=None, max_examples=25)
@given(configs(), st.integers(1, 4))
def test_shards_of_any_model_add_up(config: ModelConfig, ranks: int) -> None:
    check_shards(config, min(ranks, config.heads))


def test_shards_of_llama_3_70b_are_an_eighth() -> None:
    """On 8 ranks everything divides: apart from the norms, each holds an eighth."""
    config = preset("llama-3-70b")
    norms = (2 * config.layers + 1) * config.dim
    for rank in (0, 7):
        held = sum(p.numel() for p in on_meta(one_layer(config), on_rank(rank, 8)).parameters())
        whole = one_layer(config).parameters()
        assert held == (whole - 3 * config.dim) // 8 + 3 * config.dim
    assert (config.parameters() - norms) % 8 == 0


def test_meta_models_hold_no_memory() -> None:
    assert all(p.is_meta and p.dtype == torch.float32 for p in on_meta(preset("gpt-2"), single_device()).parameters())
