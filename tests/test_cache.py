"""Generation with a KV cache: however the tokens come in, the logits are those of the whole sequence at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from parallel.group import TPGroup, single_device
from parallel.state import scatter_state
from tests.helpers import EXACT, OpRecord
from tests.oracle_loading import random_state
from tests.pool import Pool
from tpblock import (
    Activation,
    Bias,
    Decoder,
    KVCache,
    Llama3Scaling,
    LongRopeScaling,
    ModelConfig,
    Norm,
    Placement,
    Position,
    QKNorm,
)

BATCH, SEQ = 2, 9
LLAMA = ModelConfig(vocab_size=23, dim=12, layers=2, heads=6, kv_heads=2, head_dim=4, d_ff=14, max_seq_len=12)
GPT2 = replace(
    LLAMA,
    kv_heads=6,
    norm=Norm.LAYERNORM,
    activation=Activation.GELU_TANH,
    position=Position.LEARNED,
    bias=True,
    tied_embeddings=True,
)
NEOX = replace(LLAMA, head_dim=8, rotary_fraction=0.25, placement=Placement.PARALLEL, bias=True)
MISTRAL = replace(LLAMA, sliding_window=3, full_attention_layers=(1,))
QWEN3 = replace(LLAMA, qk_norm=QKNorm.PER_HEAD, bias=Bias.QKV, placement=Placement.PARALLEL_TWO_NORMS)
STRETCHED = replace(
    LLAMA,
    rope_theta=100.0,
    sliding_window=4,
    rope_scaling=Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=16),
)
CONFIGS = {"llama": LLAMA, "gpt2": GPT2, "neox": NEOX, "window": MISTRAL, "qk-norm": QWEN3, "scaling": STRETCHED}
CHUNKS = {
    "prompt, then tokens": (4, 1, 1, 1, 1, 1),
    "tokens": (1,) * SEQ,
    "chunks": (2, 3, 4),
    "a long chunk": (1, 7, 1),
    "at once": (SEQ,),
}


def token_ids(config: ModelConfig) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(1)
    return torch.randint(config.vocab_size, (BATCH, SEQ), generator=generator, device="cpu").to(torch.get_default_device())


def decoder(config: ModelConfig, group: TPGroup, **options: Any) -> Decoder:
    model = Decoder(config, group=group, **{"dtype": torch.float64, **options})
    weight = model.head_weight
    state = {name: value.to(weight.device, weight.dtype) for name, value in random_state(config).items()}
    scatter_state(model, state, model.group)
    return model


def decode(model: Decoder, chunks: Sequence[int]) -> list[Tensor]:
    """The logits after each chunk of the sequences."""
    cache, found = KVCache(model, BATCH, SEQ), []
    for chunk in token_ids(model.config).split(list(chunks), 1):
        found.append(model.next_logits(chunk, cache))
    assert cache.length == SEQ
    return found


def decode_all(group: TPGroup, config: ModelConfig) -> list[list[Tensor]]:
    model = decoder(config, group)
    whole = model(token_ids(config)).detach()
    for name, chunks in CHUNKS.items():
        at = -1
        for chunk, logits in zip(chunks, decode(model, chunks), strict=True):
            at += chunk
            assert_close(logits, whole[:, at], **EXACT, msg=lambda m, name=name, at=at: f"{name}, token {at}: {m}")
            assert not logits.requires_grad
    return [decode(model, chunks) for chunks in CHUNKS.values()]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_logits_are_those_of_the_whole_sequence(pool: Pool, config: ModelConfig, ranks: int) -> None:
    """And the same bytes on every rank."""
    first, *others = pool.run(ranks, decode_all, config)
    for other in others:
        for ours, theirs in zip(first, other, strict=True):
            assert all(map(torch.equal, ours, theirs))


def decode_by_tokens(group: TPGroup, config: ModelConfig, dtype: torch.dtype) -> list[Tensor]:
    return decode(decoder(config, group, virtual_shards=4, dtype=dtype), CHUNKS["prompt, then tokens"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gpt2", "window", "qk-norm"])
def test_invariant_mode_gives_the_same_bytes_on_any_number_of_ranks(pool: Pool, name: str, dtype: torch.dtype) -> None:
    (one,) = pool.run(1, decode_by_tokens, CONFIGS[name], dtype)
    assert all(len(row.unique()) > 10 for logits in one for row in logits)
    for ranks in (2, 3, 4):
        for found in pool.run(ranks, decode_by_tokens, CONFIGS[name], dtype):
            assert all(map(torch.equal, found, one))


def test_longrope_takes_the_frequencies_of_the_capacity() -> None:
    """Cached keys cannot be rotated again when a sequence grows long: the long factors hold from the first token on."""
    scaling = LongRopeScaling(short_factor=(1.0, 1.5), long_factor=(2.0, 9.0), original_max_seq_len=5, attention_factor=1.1)
    model = decoder(replace(LLAMA, rope_scaling=scaling), single_device())
    whole = model(token_ids(LLAMA)).detach()
    found = decode(model, CHUNKS["prompt, then tokens"])
    assert_close(torch.stack(found, 1), whole[:, 3:], **EXACT)
    short = token_ids(LLAMA)[:, :4]
    assert_close(model.next_logits(short, KVCache(model, BATCH, 5)), model(short).detach()[:, -1], **EXACT)
    assert not torch.allclose(found[0], model(short)[:, -1])


def test_memory_is_allocated_at_once_and_only_for_the_shards_of_a_rank() -> None:
    for group, heads in ((single_device(), [2]), (TPGroup(1, 2), [1]), (TPGroup(virtual_shards=3), [1, 1, 1])):
        model = Decoder(LLAMA, group=group, dtype=torch.bfloat16, device="meta")
        cache = KVCache(model, 5, 7)
        shapes = [[tuple(t.shape) for t in layer] for layer in cache.layers]
        assert shapes == [[(2, 5, h, 7, 4) for h in heads]] * 2
        assert {t.dtype for layer in cache.layers for t in layer} == {torch.bfloat16}
    model = decoder(LLAMA, single_device())
    cache = KVCache(model, BATCH, SEQ)
    places = [t.data_ptr() for layer in cache.layers for t in layer]
    for chunk in token_ids(LLAMA).split(1, 1):
        model.next_logits(chunk, cache)
    assert places == [t.data_ptr() for layer in cache.layers for t in layer]


def sends(group: TPGroup) -> list[str]:
    model = decoder(LLAMA, group)
    cache = KVCache(model, BATCH, SEQ)
    with OpRecord() as record:
        model.next_logits(token_ids(LLAMA)[:, :3], cache)
    return record.collectives


def test_a_step_sends_two_sums_a_layer_one_for_the_embedding_and_the_logits(pool: Pool) -> None:
    for found in pool.run(2, sends):
        assert found == ["all_reduce"] * (2 * LLAMA.layers + 1) + ["all_gather"]


def test_refusals() -> None:
    model = decoder(LLAMA, single_device())
    ids = token_ids(LLAMA)
    cache = KVCache(model, BATCH, 6)
    model.next_logits(ids[:, :4], cache)
    with pytest.raises(ValueError, match="3 tokens after 4 overflow a KV cache of 6"):
        model.next_logits(ids[:, :3], cache)
    assert cache.length == 4
    model.next_logits(ids[:, :2], cache)
    with pytest.raises(ValueError, match="1 tokens after 6 overflow a KV cache of 6"):
        model.next_logits(ids[:, :1], cache)
    with pytest.raises(ValueError, match="a KV cache of 2 sequences was given tokens of 1"):
        model.next_logits(ids[:1, :1], cache)
    with pytest.raises(ValueError, match="a KV cache of 13 tokens is longer than the model's max_seq_len 12"):
        KVCache(model, BATCH, 13)
    for wrong in (ids[0], ids[:, :0]):
        with pytest.raises(ValueError, match=r"token ids must be \[batch, new tokens\], one at least"):
            model.next_logits(wrong, cache)
    with pytest.raises(ValueError, match="a KV cache needs a model without sequence_parallel"):
        KVCache(decoder(LLAMA, single_device(), sequence_parallel=True), BATCH, SEQ)


def test_dropout_is_refused_in_training() -> None:
    model = decoder(replace(LLAMA, attention_dropout=0.1), single_device())
    cache = KVCache(model, BATCH, SEQ)
    with pytest.raises(ValueError, match=r"cannot be used in training with dropout 0\.1: call model.eval\(\) first"):
        model.next_logits(token_ids(LLAMA), cache)
    assert cache.length == 0
    model.eval()
    assert_close(model.next_logits(token_ids(LLAMA), cache), model(token_ids(LLAMA)).detach()[:, -1], **EXACT)
