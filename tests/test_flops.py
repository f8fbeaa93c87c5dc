"""The FLOP formula of the benchmarks against what torch counts in a real step, on one rank and summed over several.

torch has no count for the fused attention of CPUs: it is counted here with torch's own function for that of GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from benchmarks.flops import Flops, training_flops
from parallel.group import TPGroup, single_device
from tests.pool import Pool
from tpblock import Activation, Decoder, ModelConfig, Norm, Placement, Position, QKNorm, preset

BATCH, SEQ = 2, 6

LLAMA = ModelConfig(vocab_size=21, dim=16, layers=2, heads=8, kv_heads=4, d_ff=26)
GPT = ModelConfig(
    vocab_size=20,
    dim=16,
    layers=2,
    heads=4,
    activation=Activation.GELU,
    norm=Norm.LAYERNORM,
    position=Position.LEARNED,
    max_seq_len=8,
    bias=True,
    tied_embeddings=True,
)


CONFIGS = {
    "grouped-query": LLAMA,
    "gpt": GPT,
    "heads of another width": replace(LLAMA, head_dim=4),
    "uneven: 9 query, 3 KV heads": replace(LLAMA, heads=9, kv_heads=3, head_dim=4, d_ff=27, vocab_size=23),
    "multi-query": replace(LLAMA, kv_heads=1),
    "two KV heads": replace(LLAMA, kv_heads=2, layers=3),
    "parallel": replace(LLAMA, placement=Placement.PARALLEL),
    "parallel, multi-query": replace(LLAMA, placement=Placement.PARALLEL, kv_heads=1),
    "two norms": replace(GPT, placement=Placement.PARALLEL_TWO_NORMS),
    "qk-norm": replace(LLAMA, qk_norm=QKNorm.PER_HEAD),
    "sliding window": replace(LLAMA, sliding_window=2),
}


FUSED_ON_CPU: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(grad, q, k, v)
    ),
}


@contextmanager
def counted(into: list[int]) -> Iterator[None]:
    with FlopCounterMode(display=False, custom_mapping=FUSED_ON_CPU) as counter:
        yield
    into.append(counter.get_total_flops())


def count(group: TPGroup, config: ModelConfig, sp: bool = False, again: bool = False, fused: bool = True) -> list[int]:
    """[forward with labels, backward] as torch counts them on this rank."""
    model = Decoder(config, group=group, sequence_parallel=sp, activation_checkpointing=again, loss_chunk=5)
    ids = torch.arange(BATCH * SEQ).view(BATCH, SEQ) % config.vocab_size
    found: list[int] = []
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH] if fused else SDPBackend.MATH):
        with counted(found):
            loss = model(ids, ids)
        with counted(found):
            loss.backward()
    return found


def phases(flops: Flops) -> list[int]:
    return [flops.forward, flops.backward + flops.attention_again + flops.recomputation]


@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_one_rank_takes_what_torch_counts(config: ModelConfig, again: bool) -> None:
    flops = training_flops(config, BATCH, SEQ, activation_checkpointing=again)
    assert count(single_device(), config, again=again) == phases(flops)
    assert flops.executed == sum(phases(flops)) and flops.duplicated == 0


def test_attention_that_keeps_its_scores_computes_nothing_again() -> None:
    flops = training_flops(LLAMA, BATCH, SEQ, flash=False)
    assert count(single_device(), LLAMA, fused=False) == phases(flops)
    assert flops.executed == flops.model == training_flops(LLAMA, BATCH, SEQ).model


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("sp", [False, True], ids=["whole", "sequence-parallel"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_each_rank_takes_what_torch_counts_and_their_sum_is_that_of_one(
    pool: Pool, config: ModelConfig, sp: bool, ranks: int
) -> None:
    formula = [training_flops(config, BATCH, SEQ, rank, ranks) for rank in range(ranks)]
    assert pool.run(ranks, count, config, sp) == [phases(flops) for flops in formula]
    total, duplicated = sum(flops.executed for flops in formula), sum(flops.duplicated for flops in formula)
    assert total - duplicated == training_flops(config, BATCH, SEQ).executed
    assert (duplicated > 0) == (config.kv_heads < ranks)


def test_ranks_that_compute_again_sum_up_as_well(pool: Pool) -> None:
    config = CONFIGS["two KV heads"]
    formula = [training_flops(config, BATCH, SEQ, rank, 4, activation_checkpointing=True) for rank in range(4)]
    assert pool.run(4, count, config, True, True) == [phases(flops) for flops in formula]
    single = training_flops(config, BATCH, SEQ, activation_checkpointing=True)
    assert sum(flops.executed - flops.duplicated for flops in formula) == single.executed


def test_a_large_model_takes_about_six_operations_a_parameter_and_token() -> None:
    config = preset("llama-3-8b")
    flops = training_flops(config, 1, 128)
    assert flops.model / 128 / (config.parameters() - config.vocab_size * config.dim) == pytest.approx(6, rel=0.01)


def test_dropout_is_refused() -> None:
    with pytest.raises(ValueError, match=r"without dropout, got 0.1 and 0"):
        training_flops(replace(LLAMA, dropout=0.1), BATCH, SEQ)
