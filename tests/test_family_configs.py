"""How config.json files are read: those of published models as the hub has them, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from parallel.group import single_device
from tpblock import Activation, Bias, Block, CheckpointError, Llama3Scaling, LongRopeScaling, ModelConfig, Placement, QKNorm
from tpblock.families.fields import ACTIVATIONS
from tpblock.formats.checkpoint import parse_config


def silu(**fields: Any) -> dict[str, Any]:
    """What config.json files of most families have in common. ``torch_dtype`` is what transformers 5 calls dtype."""
    common = {"hidden_act": "silu", "initializer_range": 0.02, "torch_dtype": "bfloat16", "use_cache": True}
    return common | {"bos_token_id": 1, "eos_token_id": 2, "transformers_version": "4.40.0"} | fields


def layers(dim: int, width: int, count: int, heads: int, kv_heads: int, vocab: int, longest: int) -> dict[str, Any]:
    return {
        "hidden_size": dim,
        "intermediate_size": width,
        "num_hidden_layers": count,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": longest,
    }


LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "pretraining_tp": 1, "rms_norm_eps": 1e-5}
LLAMA31 = LLAMA | {"attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False, "rope_theta": 500000.0}
MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "attention_dropout": 0.0, "rms_norm_eps": 1e-6} | {
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "use_sliding_window": False,
}
PHI3 = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "attention_bias": False, "attention_dropout": 0.0} | {
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
SCALED = {"high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"}

HUB: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "gpt2": (
        {
            "activation_function": "gelu_new",
            "architectures": ["GPT2LMHeadModel"],
            "attn_pdrop": 0.1,
            "embd_pdrop": 0.1,
            "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-05,
            "model_type": "gpt2",
            "n_ctx": 1024,
            "n_embd": 768,
            "n_head": 12,
            "n_layer": 12,
            "n_positions": 1024,
            "resid_pdrop": 0.1,
            "summary_type": "cls_index",
            "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
            "vocab_size": 50257,
        },
        124_439_808,
        {"d_ff": 3072, "tied_embeddings": True, "bias": Bias.ALL, "dropout": 0.0, "activation": Activation.GELU_TANH},
    ),
    "pythia-160m": (
        {
            "architectures": ["GPTNeoXForCausalLM"],
            "hidden_act": "gelu",
            "hidden_size": 768,
            "initializer_range": 0.02,
            "intermediate_size": 3072,
            "layer_norm_eps": 1e-05,
            "max_position_embeddings": 2048,
            "model_type": "gpt_neox",
            "num_attention_heads": 12,
            "num_hidden_layers": 12,
            "rotary_emb_base": 10000,
            "rotary_pct": 0.25,
            "tie_word_embeddings": False,
            "torch_dtype": "float16",
            "use_cache": True,
            "use_parallel_residual": True,
            "vocab_size": 50304,
        },
        162_322_944,
        {"rotary_dim": 16, "placement": Placement.PARALLEL_TWO_NORMS, "bias": Bias.ALL},
    ),
    "Llama-2-7b-hf": (
        silu(**LLAMA, **layers(4096, 11008, 32, 32, 32, 32000, 4096), rope_scaling=None, tie_word_embeddings=False),
        6_738_415_616,
        {"rope_theta": 10_000.0, "bias": Bias.NONE, "rope_scaling": None},
    ),
    "Llama-3.1-8B": (
        silu(
            **LLAMA31,
            **layers(4096, 14336, 32, 32, 8, 128256, 131072),
            rope_scaling=SCALED | {"factor": 8.0},
            tie_word_embeddings=False,
        ),
        8_030_261_248,
        {"rope_scaling": Llama3Scaling(factor=8, low_freq_factor=1, high_freq_factor=4, original_max_seq_len=8192)},
    ),
    "Llama-3.2-1B": (
        silu(
            **LLAMA31,
            **layers(2048, 8192, 16, 32, 8, 128256, 131072),
            rope_scaling=SCALED | {"factor": 32.0},
            tie_word_embeddings=True,
            head_dim=64,
        ),
        1_235_814_400,
        {"rope_scaling": Llama3Scaling(factor=32, low_freq_factor=1, high_freq_factor=4, original_max_seq_len=8192)},
    ),
    "SmolLM2-135M": (
        silu(
            **LLAMA | {"attention_bias": False, "mlp_bias": False, "rope_theta": 100000, "is_llama_config": True},
            **layers(576, 1536, 30, 9, 3, 49152, 8192),
            rope_interleaved=False,
            rope_scaling=None,
            tie_word_embeddings=True,
        ),
        134_515_008,
        {"rope_theta": 100_000.0, "head_dim": 64},
    ),
    "Mistral-7B-v0.1": (
        silu(**MISTRAL, **layers(4096, 14336, 32, 32, 8, 32000, 32768), rope_theta=10000.0, sliding_window=4096),
        7_241_732_096,
        {"sliding_window": 4096, "full_attention_layers": ()},
    ),
    "Mistral-7B-v0.3": (
        silu(**MISTRAL, **layers(4096, 14336, 32, 32, 8, 32768, 32768), rope_theta=1000000.0, sliding_window=None),
        7_248_023_552,
        {"sliding_window": None, "rope_theta": 1e6},
    ),
    "Qwen2-0.5B": (
        silu(**QWEN2, **layers(896, 4864, 24, 14, 2, 151936, 131072), max_window_layers=24, tie_word_embeddings=True),
        494_032_768,
        {"bias": Bias.QKV, "sliding_window": None},
    ),
    "Qwen2-7B": (
        silu(**QWEN2, **layers(3584, 18944, 28, 28, 4, 152064, 131072), max_window_layers=28, tie_word_embeddings=False),
        7_615_616_512,
        {"bias": Bias.QKV, "sliding_window": None, "norm_eps": 1e-6},
    ),
    "Qwen3-0.6B": (
        silu(
            **layers(1024, 3072, 28, 16, 8, 151936, 40960),
            architectures=["Qwen3ForCausalLM"],
            model_type="qwen3",
            attention_bias=False,
            attention_dropout=0.0,
            head_dim=128,
            max_window_layers=28,
            rms_norm_eps=1e-6,
            rope_scaling=None,
            rope_theta=1000000,
            sliding_window=None,
            tie_word_embeddings=True,
            use_sliding_window=False,
        ),
        596_049_920,
        {"head_dim": 128, "qk_norm": QKNorm.PER_HEAD, "bias": Bias.NONE},
    ),
    "Phi-3-mini-4k-instruct": (
        silu(**PHI3, **layers(3072, 8192, 32, 32, 32, 32064, 4096), rope_scaling=None, sliding_window=2047),
        3_821_079_552,
        {"sliding_window": 2047, "rope_scaling": None, "rotary_fraction": 1.0},
    ),
    "Phi-3-mini-128k-instruct": (  # but for the factors, which are not all 1 and 2
        silu(
            **PHI3,
            **layers(3072, 8192, 32, 32, 32, 32064, 131072),
            rope_scaling={"long_factor": [2.0] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
            sliding_window=262144,
        ),
        3_821_079_552,
        {
            "rope_scaling": LongRopeScaling(
                short_factor=(1.0,) * 48,
                long_factor=(2.0,) * 48,
                original_max_seq_len=4096,
                attention_factor=1.1902380714238083,  # sqrt(1 + log(32) / log(4096)), as its own code has it
            )
        },
    ),
}
"""Fields of config.json files of the hub, the number of parameters that is published, and some of what they make."""


@pytest.mark.parametrize("name", HUB)
def test_configs_of_the_hub(name: str) -> None:
    import transformers

    fields, parameters, expected = HUB[name]
    config = parse_config(fields)[0]
    assert config.parameters() == parameters
    assert {key: getattr(config, key) for key in expected} == expected
    # What transformers 5 makes of the same file, which it writes in another form.
    kind = getattr(transformers, fields["architectures"][0]).config_class
    today = kind(**json.loads(json.dumps(fields))).to_dict()
    assert "rope_scaling" not in today and ("rope_parameters" in today) == (name != "gpt2")
    assert parse_config(today | {"architectures": fields["architectures"]})[0] == config


OPTIONAL = {
    "gpt2": {"n_inner", "tie_word_embeddings"},
    "gpt_neox": {"attention_bias", "partial_rotary_factor"},
    "llama": {"num_key_value_heads", "head_dim", "rope_theta", "attention_bias", "mlp_bias"},
    "mistral": {"head_dim"},
    "qwen2": {"head_dim"},
    "qwen3": set(),
    "phi3": {"head_dim", "partial_rotary_factor", "attention_bias"},
}
"""What files of a family may lack; max_window_layers is not asked for without a window."""

IGNORED = {
    *("model_type", "initializer_range", "torch_dtype", "use_cache", "bos_token_id", "eos_token_id", "transformers_version"),
    *("attn_pdrop", "embd_pdrop", "resid_pdrop", "attention_dropout", "n_ctx", "summary_type", "task_specific_params"),
    *("pretraining_tp", "is_llama_config", "rope_interleaved", "max_window_layers", "rope_scaling"),
}


@pytest.mark.parametrize("name", HUB)
def test_what_a_file_lacks_is_not_made_up(name: str) -> None:
    fields = HUB[name][0]
    family = fields["model_type"]
    for field in fields.keys() - IGNORED - OPTIONAL[family] - {"architectures"}:
        if field == "original_max_position_embeddings" and fields["rope_scaling"] is None:
            continue
        if field == "sliding_window" and family.startswith("qwen"):
            continue
        with pytest.raises(CheckpointError, match=f"config.json lacks {'rope_theta' if field == 'rotary_emb_base' else ''}"):
            parse_config({key: value for key, value in fields.items() if key != field})


PHI4_MINI = HUB["Phi-3-mini-128k-instruct"][0] | {
    **layers(3072, 8192, 32, 24, 8, 200064, 131072),
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 0.75,
    "tie_word_embeddings": True,
}


def test_partial_rotary_embeddings_of_phi4_mini() -> None:
    config = parse_config(PHI4_MINI)[0]
    assert (config.rotary_dim, config.head_dim, config.parameters()) == (96, 128, 3_836_021_760)


WINDOWS = HUB["Qwen2-7B"][0] | {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 21}


def test_windows_of_qwen2() -> None:
    assert parse_config(WINDOWS)[0].full_attention_layers == tuple(range(21))
    kinds = ["sliding_attention", "full_attention"] * 14  # what today's files say decides
    config = parse_config(WINDOWS | {"layer_types": kinds})[0]
    assert [config.window(i) for i in range(3)] == [4096, None, 4096]
    assert parse_config(WINDOWS | {"max_window_layers": 28})[0].sliding_window is None


def broken(name: str, **changes: Any) -> dict[str, Any]:
    return HUB[name][0] | changes


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        (
            broken("gpt2", architectures=["GPT2Model"]),
            "GPT2Model is not supported; there are GPT2LMHeadModel, .*Qwen3ForCausalLM",
        ),
        (broken("gpt2", architectures=None), "architecture None is not supported"),
        (
            broken("gpt2", scale_attn_by_inverse_layer_idx=True),
            "scale_attn_by_inverse_layer_idx = True is not supported, only F",
        ),
        (broken("gpt2", scale_attn_weights=False), "scale_attn_weights = False is not supported, only True"),
        (broken("gpt2", reorder_and_upcast_attn=True), "reorder_and_upcast_attn = True is not supported"),
        (broken("gpt2", add_cross_attention=True), "add_cross_attention = True is not supported"),
        (
            broken("gpt2", activation_function="quick_gelu"),
            "'quick_gelu' is not supported; there are gelu, gelu_new, gelu_fast",
        ),
        (broken("gpt2", n_positions=None), "n_positions is null"),
        (broken("Llama-2-7b-hf", intermediate_size=None), "intermediate_size is null"),
        (broken("Llama-2-7b-hf", hidden_act="gelu"), "hidden_act = 'gelu' is not supported; there are silu, swish"),
        (broken("Llama-2-7b-hf", partial_rotary_factor=0.5), "partial_rotary_factor = 0.5 is not supported, only 1.0"),
        (broken("Llama-2-7b-hf", num_attention_heads=33), "makes no model: .*33"),
        (broken("Llama-2-7b-hf", num_attention_heads="32"), "makes no model: heads must be a positive integer, got '32'"),
        (broken("Llama-2-7b-hf", quantization_config={"bits": 4}), "quantised weights are not supported"),
        (
            broken("Llama-2-7b-hf", rope_scaling={"type": "dynamic", "factor": 2.0}),
            "rope type 'dynamic' is not .* default, linear",
        ),
        (broken("Llama-3.1-8B", rope_scaling={"rope_type": "llama3", "factor": 8.0}), "lacks low_freq_factor"),
        (broken("Mistral-7B-v0.1", layer_types=["full_attention"] * 32), "layer_types = .* is not supported"),
        (
            WINDOWS | {"layer_types": ["chunked_attention"] * 28},
            "has chunked_attention, supported are full_attention, sliding",
        ),
        (WINDOWS | {"layer_types": ["full_attention"] * 27}, "layer_types has 27 entries for num_hidden_layers = 28"),
        (broken("Qwen2-7B", layer_types=["sliding_attention"] * 28), "there is no sliding window to use"),
        (broken("Phi-3-mini-4k-instruct", attention_bias=True), "attention_bias = True is not supported, only False"),
        (PHI4_MINI | {"lm_head_bias": True}, "lm_head_bias = True is not supported"),
        (
            PHI4_MINI | {"partial_rotary_factor": 0.5},
            "short_factor of rope_scaling has 48 numbers, 64 rotated features need 32",
        ),
        (PHI4_MINI | {"rope_scaling": {"type": "yarn", "factor": 32.0}}, "rope type 'yarn' is not supported"),
    ],
)
def test_unsupported_configs(fields: dict[str, Any], fault: str) -> None:
    with pytest.raises(CheckpointError, match=fault):
        parse_config(fields)


def test_c81_names_of_activations() -> None:
    from transformers.activations import ACT2FN

    x = torch.linspace(-4, 4, 101, dtype=torch.float64)
    for name, activation in ACTIVATIONS.items():
        config = ModelConfig(vocab_size=8, dim=4, layers=1, heads=2, activation=activation)
        ours = Block(config, group=single_device()).feedforward.mix([x])[0]
        torch.testing.assert_close(ours, ACT2FN[name](x), rtol=0, atol=1e-10)
    assert ACTIVATIONS["gelu"] is Activation.GELU
    assert {ACTIVATIONS[name] for name in ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")} == {Activation.GELU_TANH}
    with pytest.raises(CheckpointError, match="hidden_act = 'mish' is not supported; there are gelu, gelu_new"):
        parse_config(broken("pythia-160m", hidden_act="mish"))
