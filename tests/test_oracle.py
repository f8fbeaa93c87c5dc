"""The oracle equals Hugging Face's Llama, GPT-NeoX and GPT-2: outputs, loss and every gradient, in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.oracle import OracleBlock, OracleConfig, OracleDecoder

TOLERANCE = 1e-10
BATCH, SEQ, VOCAB = 2, 7, 61

Getter = Callable[[str], Tensor]


@contextmanager
def single_is_double() -> Iterator[None]:
    """Hugging Face's modules cast to float32 inside (norm statistics, rotary tables, softmax): here to float64, so that
    their own code can be compared to 1e-10."""
    with ExitStack() as stack:
        for name in ("float32", "float"):
            stack.enter_context(mock.patch.object(torch, name, torch.float64))
        stack.enter_context(mock.patch.object(Tensor, "float", Tensor.double))
        yield


def llama_block(hf: Getter, layer: int) -> dict[str, Tensor]:
    at = f"model.layers.{layer}"
    names = {
        "norm_1": "input_layernorm",
        "norm_2": "post_attention_layernorm",
        **{name: f"self_attn.{name}_proj" for name in "qkvo"},
        **{name: f"mlp.{name}_proj" for name in ("gate", "up", "down")},
    }
    return {f"{ours}.weight": hf(f"{at}.{theirs}.weight") for ours, theirs in names.items()}


def neox_block(hf: Getter, layer: int) -> dict[str, Tensor]:
    at = f"gpt_neox.layers.{layer}"
    names = {
        "norm_1": "input_layernorm",
        "norm_2": "post_attention_layernorm",
        "o": "attention.dense",
        "up": "mlp.dense_h_to_4h",
        "down": "mlp.dense_4h_to_h",
    }
    out = {f"{ours}.{kind}": hf(f"{at}.{theirs}.{kind}") for ours, theirs in names.items() for kind in ("weight", "bias")}
    for kind in ("weight", "bias"):
        fused = hf(f"{at}.attention.query_key_value.{kind}")  # for each head in turn its q, k and v rows
        heads = fused.view(NEOX.heads, 3, NEOX.head_dim, *fused.shape[1:])
        out |= {f"{name}.{kind}": heads[:, i].flatten(0, 1) for i, name in enumerate("qkv")}
    return out


def gpt2_block(hf: Getter, layer: int) -> dict[str, Tensor]:
    at = f"transformer.h.{layer}"
    out = {}
    for kind in ("weight", "bias"):
        for ours, theirs in {"norm_1": "ln_1", "norm_2": "ln_2"}.items():
            out[f"{ours}.{kind}"] = hf(f"{at}.{theirs}.{kind}")
        for ours, theirs in {"o": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}.items():
            out[f"{ours}.{kind}"] = hf(f"{at}.{theirs}.{kind}").t()  # Conv1D keeps [in, out]
        q, k, v = hf(f"{at}.attn.c_attn.{kind}").t().chunk(3)
        out |= {f"q.{kind}": q, f"k.{kind}": k, f"v.{kind}": v}
    return out


LLAMA = OracleConfig(
    vocab_size=VOCAB,
    dim=24,
    layers=2,
    heads=6,
    kv_heads=2,
    head_dim=6,
    d_ff=37,
    activation="swiglu",
    norm="rmsnorm",
    norm_eps=1e-5,
    placement="pre",
    rotary_dim=6,
    rope_theta=500.0,
    max_seq_len=16,
    bias=False,
    tied_embeddings=False,
)
NEOX = OracleConfig(
    vocab_size=VOCAB,
    dim=32,
    layers=2,
    heads=4,
    kv_heads=4,
    head_dim=8,
    d_ff=37,
    activation="gelu",
    norm="layernorm",
    norm_eps=1e-5,
    placement="parallel_two_norms",
    rotary_dim=2,
    rope_theta=500.0,
    max_seq_len=16,
    bias=True,
    tied_embeddings=False,
)
GPT2 = OracleConfig(
    vocab_size=VOCAB,
    dim=24,
    layers=2,
    heads=4,
    kv_heads=4,
    head_dim=6,
    d_ff=37,
    activation="gelu_tanh",
    norm="layernorm",
    norm_eps=1e-5,
    placement="pre",
    rotary_dim=0,
    rope_theta=1.0,
    max_seq_len=16,
    bias=True,
    tied_embeddings=True,
)


def llama(config: OracleConfig) -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.dim,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_dim,
            intermediate_size=config.d_ff,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            max_position_embeddings=config.max_seq_len,
        )
    )


def neox(config: OracleConfig) -> nn.Module:
    return GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.dim,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            intermediate_size=config.d_ff,
            hidden_act="gelu",
            layer_norm_eps=config.norm_eps,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": config.rope_theta,
                "partial_rotary_factor": config.rotary_dim / config.head_dim,
            },
            max_position_embeddings=config.max_seq_len,
            use_parallel_residual=True,
        )
    )


def gpt2(config: OracleConfig) -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=config.vocab_size,
            n_embd=config.dim,
            n_layer=config.layers,
            n_head=config.heads,
            n_inner=config.d_ff,
            n_positions=config.max_seq_len,
            layer_norm_epsilon=config.norm_eps,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )


def outside(model: nn.Module, hf: Getter) -> dict[str, Tensor]:
    """What lies outside the blocks: embeddings, final norm, head."""
    match model:
        case LlamaForCausalLM():
            names = {
                "embedding.weight": "model.embed_tokens.weight",
                "stack.norm.weight": "model.norm.weight",
                "head.weight": "lm_head.weight",
            }
        case GPTNeoXForCausalLM():
            names = {
                "embedding.weight": "gpt_neox.embed_in.weight",
                "stack.norm.weight": "gpt_neox.final_layer_norm.weight",
                "stack.norm.bias": "gpt_neox.final_layer_norm.bias",
                "head.weight": "lm_head.weight",
            }
        case _:
            names = {
                "embedding.weight": "transformer.wte.weight",
                "positions": "transformer.wpe.weight",
                "stack.norm.weight": "transformer.ln_f.weight",
                "stack.norm.bias": "transformer.ln_f.bias",
            }
    return {ours: hf(theirs) for ours, theirs in names.items()}


FAMILIES = [
    pytest.param(LLAMA, llama, llama_block, id="llama"),
    pytest.param(NEOX, neox, neox_block, id="gpt-neox"),
    pytest.param(GPT2, gpt2, gpt2_block, id="gpt2"),
]


def build(config: OracleConfig, make: Callable[[OracleConfig], nn.Module], block: Callable[..., dict[str, Tensor]]):
    """Hugging Face's model with random values in every parameter, the oracle with the same, and the map of names."""
    torch.manual_seed(5)
    theirs = make(config).double().train()
    theirs.config._attn_implementation = "eager"  # with softmax's float32 under our patch
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            centre = 1.0 if "norm" in name or ".ln_" in name else 0.0
            parameter.normal_(centre if name.endswith("weight") else 0.0, 0.3)

    def to_oracle(hf: Getter) -> dict[str, Tensor]:
        state = outside(theirs, hf)
        for i in range(config.layers):
            state |= {f"stack.blocks.{i}.{name}": value for name, value in block(hf, i).items()}
        return state

    oracle = OracleDecoder(config).double()
    oracle.load_state_dict(to_oracle(lambda name: theirs.get_parameter(name).detach()))
    return theirs, oracle, to_oracle


def assert_close(ours: Tensor, theirs: Tensor, what: str) -> None:
    error = (ours - theirs).abs().max().item()
    scale = theirs.abs().max().item()
    assert scale > 1e-9, f"{what} is zero: nothing to compare"
    assert error <= TOLERANCE * max(1.0, scale), f"{what}: differs by {error:.3g} of {scale:.3g}"


@pytest.mark.parametrize(("config", "make", "block"), FAMILIES)
def test_decoder_equals_transformers(config: OracleConfig, make, block) -> None:
    with single_is_double():
        theirs, oracle, to_oracle = build(config, make, block)
        generator = torch.Generator().manual_seed(3)
        ids = torch.randint(VOCAB, (BATCH, SEQ), generator=generator)
        labels = torch.randint(VOCAB, (BATCH, SEQ), generator=generator)
        labels[0, 2] = -100
        out = theirs(input_ids=ids, shift_labels=labels, labels=labels, use_cache=False)
        out.loss.backward()
        assert_close(oracle(ids), out.logits, "logits")
        loss = oracle.loss(ids, labels)
        assert_close(loss, out.loss, "loss")
        loss.backward()

    expected = to_oracle(lambda name: theirs.get_parameter(name).grad)
    names = {name for name, _ in oracle.named_parameters()}
    assert names == set(expected)
    key_biases = 0
    for name in names:
        if name.endswith("k.bias") and not config.rotary_dim:
            # Without rotary embeddings a key bias adds the same to all scores of a query: softmax does not see it.
            assert oracle.get_parameter(name).grad.abs().max() < 1e-12
            key_biases += 1
            continue
        assert_close(oracle.get_parameter(name).grad, expected[name], f"gradient of {name}")
    assert key_biases == (config.layers if config is GPT2 else 0)


@pytest.mark.parametrize(("config", "make", "block"), FAMILIES)
def test_block_equals_transformers(config: OracleConfig, make, block) -> None:
    """One layer alone, with a random input and cotangent."""
    with single_is_double():
        theirs, oracle, _ = build(config, make, block)
        generator = torch.Generator().manual_seed(4)
        x, cotangent = (torch.randn(BATCH, SEQ, config.dim, dtype=torch.float64, generator=generator) for _ in range(2))
        mask = torch.full((SEQ, SEQ), -torch.inf, dtype=torch.float64).triu(1)[None, None]
        x_theirs, x_oracle = x.clone().requires_grad_(), x.clone().requires_grad_()
        positions = torch.arange(SEQ)[None]
        match theirs:
            case LlamaForCausalLM():
                layer, rotary = theirs.model.layers[1], theirs.model.rotary_emb(x, positions)
                y = layer(x_theirs, attention_mask=mask, position_embeddings=rotary)
            case GPTNeoXForCausalLM():
                layer, rotary = theirs.gpt_neox.layers[1], theirs.gpt_neox.rotary_emb(x, positions)
                y = layer(x_theirs, attention_mask=mask, position_embeddings=rotary)
            case _:
                y = theirs.transformer.h[1](x_theirs, attention_mask=mask)
        y.backward(cotangent)
        mine: OracleBlock = oracle.stack.blocks[1]
        out = mine(x_oracle)
        out.backward(cotangent)
    assert_close(out, y, "output")
    assert_close(x_oracle.grad, x_theirs.grad, "gradient of the input")
    for name, value in block(lambda name: theirs.get_parameter(name).grad, 1).items():
        if not (name == "k.bias" and not config.rotary_dim):
            assert_close(mine.get_parameter(name).grad, value, f"gradient of {name}")


@pytest.mark.parametrize(("config", "make", "block"), FAMILIES)
def test_every_weight_matters(config: OracleConfig, make, block) -> None:
    """Were a weight ignored by both, the comparison would not show it: each one moves the logits by itself."""
    with single_is_double():
        _, oracle, _ = build(config, make, block)
        ids = torch.randint(VOCAB, (1, SEQ), generator=torch.Generator().manual_seed(3))
        before = oracle(ids).detach()
        with torch.no_grad():
            for name, parameter in oracle.named_parameters():
                if name.endswith("k.bias") and not config.rotary_dim:
                    continue
                parameter.mul_(1.5)
                assert (oracle(ids) - before).abs().max() > 1e-4, name
                parameter.div_(1.5)


def test_shared_key_values_and_parallel_block() -> None:
    """What no family above has: multi-query attention, ReLU, the parallel block with one norm, against a loop over heads."""
    config = OracleConfig(**{**vars(NEOX), "placement": "parallel", "kv_heads": 1, "activation": "relu", "layers": 1})
    torch.manual_seed(0)
    block = OracleBlock(config).double()
    x = torch.randn(1, SEQ, config.dim, dtype=torch.float64)
    h = block.norm_1(x)
    q, k, v = block.q(h)[0], block.k(h)[0], block.v(h)[0]

    def turn(row: Tensor, position: int) -> Tensor:
        angle = torch.tensor(float(position), dtype=torch.float64)  # rotary_dim 2: one pair, frequency 1
        row = row.clone()
        row[0], row[1] = row[0] * angle.cos() - row[1] * angle.sin(), row[1] * angle.cos() + row[0] * angle.sin()
        return row

    out = torch.zeros(SEQ, config.heads * config.head_dim, dtype=torch.float64)
    for head in range(config.heads):
        columns = slice(head * config.head_dim, (head + 1) * config.head_dim)
        for i in range(SEQ):
            scores = [turn(q[i, columns], i) @ turn(k[j], j) / config.head_dim**0.5 for j in range(i + 1)]
            out[i, columns] = torch.stack(scores).softmax(0) @ v[: i + 1]
    expected = x + block.o(out)[None] + block.down(block.up(h).clamp_min(0))
    assert_close(block(x), expected, "output")
