"""Misuse of Block, Stack and Decoder: a ValueError with the numbers, on every rank, before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from parallel.group import TPGroup
from parallel.regions import token_counts
from tests.helpers import OpRecord
from tests.pool import Pool
from tpblock.block import Block
from tpblock.config import ModelConfig, Placement, Position
from tpblock.context import Context
from tpblock.model import Decoder
from tpblock.stack import Stack

BASE: dict[str, Any] = {"vocab_size": 11, "dim": 8, "layers": 2, "heads": 4, "kv_heads": 2, "d_ff": 10, "max_seq_len": 6}
RANKS = [1, 2, 4]
Case = tuple[dict[str, Any], Callable[[TPGroup, ModelConfig], Any], str]


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape)


def ids(*shape: int, first: int = 1) -> torch.Tensor:
    tokens = torch.ones(*shape, dtype=torch.long)
    tokens.view(-1)[0] = first
    return tokens


def context(config: ModelConfig, batch: int, seq: int, **options: Any) -> Context:
    return Context.build(config, batch, seq, device=torch.get_default_device(), dtype=torch.float32, **options)


def block(group: TPGroup, config: ModelConfig, *args: Any, sequence_parallel: bool = False, **options: Any) -> None:
    Block(config, group=group, sequence_parallel=sequence_parallel)(*args, **options)


def stack(group: TPGroup, config: ModelConfig, *args: Any, sequence_parallel: bool = False, **options: Any) -> None:
    Stack(config, group=group, sequence_parallel=sequence_parallel)(*args, **options)


def decoder(group: TPGroup, config: ModelConfig, *args: Any, sequence_parallel: bool = False, **options: Any) -> None:
    Decoder(config, group=group, sequence_parallel=sequence_parallel)(*args, **options)


def use(group: TPGroup, name: str) -> None:
    """One misuse, and a record of what it sent."""
    change, call, _ = CASES[name]
    with OpRecord() as record:
        try:
            call(group, ModelConfig(**{**BASE, **change}))
        finally:
            assert record.collectives == [], f"sent {record.collectives} before it refused"


LEARNED = {"position": Position.LEARNED}
CASES: dict[str, Case] = {
    # sizes of inputs
    "block width": ({}, lambda g, c: block(g, c, ones(2, 3, 9)), r"a block of dim 8 takes \[batch, seq, 8\], got \(2, 3, 9\)"),
    "block dimensions": ({}, lambda g, c: block(g, c, ones(6, 8)), r"takes \[batch, seq, 8\], got \(6, 8\)"),
    "stack width": ({}, lambda g, c: stack(g, c, ones(2, 3, 7)), r"a block of dim 8 takes .*, got \(2, 3, 7\)"),
    "parallel block width": (
        {"placement": Placement.PARALLEL},
        lambda g, c: block(g, c, ones(2, 3, 9)),
        r"takes \[batch, seq, 8\], got \(2, 3, 9\)",
    ),
    "block and context": (
        {},
        lambda g, c: block(g, c, ones(2, 3, 8), context(c, 2, 4)),
        r"expects an input of shape \(2, 4, 8\), got \(2, 3, 8\)",
    ),
    "stack and context": (
        {},
        lambda g, c: stack(g, c, ones(2, 3, 8), context(c, 3, 3)),
        r"expects an input of shape \(3, 3, 8\), got \(2, 3, 8\)",
    ),
    # sequence parallelism
    "tokens without context": (
        {},
        lambda g, c: block(g, c, ones(3, 8), sequence_parallel=True),
        "under sequence parallelism a block needs a Context",
    ),
    "too many tokens": (
        {},
        lambda g, c: block(g, c, ones(13, 8), context(c, 2, 6), sequence_parallel=True),
        r"expects an input of shape \(\d+, 8\), got \(13, 8\)",
    ),
    "tokens not flattened": (
        {},
        lambda g, c: stack(g, c, ones(2, 6, 8), context(c, 2, 6), sequence_parallel=True),
        r"expects an input of shape \(\d+, 8\), got \(2, 6, 8\)",
    ),
    # contexts
    "step twice": (
        {},
        lambda g, c: block(g, c, ones(2, 3, 8), context(c, 2, 3, step=1), step=1),
        "step is part of the Context that was given",
    ),
    "context without rotary tables": (
        {},
        lambda g, c: block(g, c, ones(2, 3, 8), Context(2, 3)),
        r"without rotary tables, Position\.ROPE needs them: use Context\.build",
    ),
    "context with rotary tables": (
        LEARNED,
        lambda g, c: block(g, c, ones(2, 3, 8), context(ModelConfig(**BASE), 2, 3)),
        r"with rotary tables, Position\.LEARNED has no use for them",
    ),
    # length
    "block length": ({}, lambda g, c: block(g, c, ones(1, 7, 8)), "a sequence of 7 tokens is longer than .* max_seq_len 6"),
    "decoder length": ({}, lambda g, c: decoder(g, c, ids(2, 7)), "a sequence of 7 tokens is longer than .* max_seq_len 6"),
    "learned length": (
        LEARNED,
        lambda g, c: decoder(g, c, ids(2, 7)),
        "a sequence of 7 tokens is longer than .* max_seq_len 6",
    ),
    # tokens and labels
    "flat ids": ({}, lambda g, c: decoder(g, c, ids(6)), r"token ids must be \[batch, seq\], got shape \(6,\)"),
    "id too large": ({}, lambda g, c: decoder(g, c, ids(2, 3, first=11)), "token id 11 is outside the vocabulary of 11"),
    "id negative": ({}, lambda g, c: decoder(g, c, ids(2, 3, first=-1)), "token id -1 is outside the vocabulary of 11"),
    "id ignored": ({}, lambda g, c: decoder(g, c, ids(2, 3, first=-100)), "token id -100 is outside the vocabulary of 11"),
    "ids of a float": ({}, lambda g, c: decoder(g, c, ones(2, 3)), "a token id is an integer below 11, got .* torch.float32"),
    "id under sequence parallelism": (
        {},
        lambda g, c: decoder(g, c, ids(2, 3, first=99), sequence_parallel=True),
        "token id 99 is outside the vocabulary of 11",
    ),
    "labels": (
        {},
        lambda g, c: decoder(g, c, ids(2, 3), ids(2, 4)),
        r"labels of shape \(2, 4\) do not match token ids of shape \(2, 3\)",
    ),
    "flat labels": (
        {},
        lambda g, c: decoder(g, c, ids(2, 3), ids(6)),
        r"labels of shape \(6,\) do not match token ids of shape \(2, 3\)",
    ),
    # dropout
    "block dropout": ({"dropout": 0.1}, lambda g, c: block(g, c, ones(2, 3, 8)), r"dropout 0\.1 in training needs step="),
    "stack dropout": ({"dropout": 0.1}, lambda g, c: stack(g, c, ones(2, 3, 8)), r"dropout 0\.1 in training needs step="),
    "decoder dropout": ({"dropout": 0.1}, lambda g, c: decoder(g, c, ids(2, 3), ids(2, 3)), r"dropout 0\.1 in training needs"),
    "attention dropout": (
        {"attention_dropout": 0.2},
        lambda g, c: decoder(g, c, ids(2, 3), sequence_parallel=True),
        r"dropout 0\.2 in training needs step=",
    ),
    "dropout with a context": (
        {"dropout": 0.1},
        lambda g, c: block(g, c, ones(2, 3, 8), context(c, 2, 3)),
        r"dropout 0\.1 in training needs step=",
    ),
    "step of another type": (
        {"dropout": 0.1},
        lambda g, c: decoder(g, c, ids(2, 3), step="1"),
        r"the dropout step must be an integer in \[0, 2\*\*63\), got '1'",
    ),
    "negative step": (
        {"attention_dropout": 0.1},
        lambda g, c: decoder(g, c, ids(2, 3), step=-1),
        r"the dropout step must be an integer in \[0, 2\*\*63\), got -1",
    ),
    "negative first token": (
        {"dropout": 0.1},
        lambda g, c: decoder(g, c, ids(2, 3), step=1, first_token=-3),
        r"the first token must be an integer in \[0, 2\*\*63\), got -3",
    ),
    "first token amid a sequence": (
        {"attention_dropout": 0.1},
        lambda g, c: decoder(g, c, ids(2, 3), step=1, first_token=4),
        "first_token 4 is not the beginning of a sequence of 3 tokens",
    ),
    # dtypes
    "block dtype": ({}, lambda g, c: block(g, c, ones(2, 3, 8).double()), "of torch.float32, got an input of torch.float64"),
    "block of integers": ({}, lambda g, c: block(g, c, ids(2, 3, 8)), "of torch.float32, got an input of torch.int64"),
    "two norms, dtype": (
        {"placement": Placement.PARALLEL_TWO_NORMS},
        lambda g, c: stack(
            g, c, ones(6, 8).split(token_counts(6, g))[g.rank].half(), context(c, 2, 3), sequence_parallel=True
        ),
        "of torch.float32, got an input of torch.float16",
    ),
    "integer parameters": ({}, lambda g, c: Decoder(c, group=g, dtype=torch.int64), "dtype must be a floating .* torch.int64"),
    "integer sums": ({}, lambda g, c: Block(c, group=g, reduce_dtype=torch.int32), "reduce_dtype must be .* torch.int32"),
    "name of a dtype": ({}, lambda g, c: Decoder(c, group=g, dtype="bfloat16"), "dtype must be .*, got 'bfloat16'"),
    # the loss, before the model communicates
    "label too large": ({}, lambda g, c: decoder(g, c, ids(2, 3), ids(2, 3, first=11)), "label 11 is outside the vocabulary"),
    "labels of a float": ({}, lambda g, c: decoder(g, c, ids(2, 3), ones(2, 3)), "a label is an integer below 11, got"),
    "label smoothing": (
        {},
        lambda g, c: decoder(g, c, ids(2, 3), ids(2, 3), label_smoothing=1.5),
        "label_smoothing lies between 0 and 1, got 1.5",
    ),
    "z-loss": ({}, lambda g, c: decoder(g, c, ids(2, 3), ids(2, 3), z_loss=-1.0), r"z_loss is at least 0, got -1\.0"),
    "loss chunk": ({}, lambda g, c: Decoder(c, group=g, loss_chunk=0), "loss_chunk must be at least 1, got 0"),
}


@pytest.mark.parametrize("name", CASES)
def test_misuse(pool: Pool, name: str) -> None:
    for ranks in RANKS:
        with pytest.raises(ValueError, match=CASES[name][2]):
            pool.run(ranks, use, name)


def evaluate(group: TPGroup) -> bool:
    """Without training there is no dropout, and no need for a step."""
    config = ModelConfig(**{**BASE, "dropout": 0.1, "attention_dropout": 0.1})
    model = Decoder(config, group=group).eval()
    plain = Decoder(ModelConfig(**BASE), group=group)
    return torch.equal(model(ids(2, 3)), plain(ids(2, 3)))


def test_evaluation_needs_no_step(pool: Pool) -> None:
    assert pool.run(1, evaluate) == [True]
    assert pool.run(2, evaluate) == [True] * 2


def build(group: TPGroup, kind: type[Block | Stack | Decoder], change: dict[str, Any], device: str | None) -> None:
    with OpRecord() as record:
        try:
            kind(ModelConfig(**{**BASE, **change}), group=group, device=device)
        finally:
            assert record.collectives == []


@pytest.mark.parametrize("device", [None, "meta"])
@pytest.mark.parametrize("kind", [Block, Stack, Decoder])
def test_more_ranks_than_there_is_to_deal(pool: Pool, kind: type[Block | Stack | Decoder], device: str | None) -> None:
    heads = {"heads": 3, "kv_heads": 1, "head_dim": 4}
    with pytest.raises(ValueError, match=r"3 query heads cannot be dealt over 4 .* \(KV heads: 1\)"):
        pool.run(4, build, kind, heads, device)
    pool.run(3, build, kind, heads, device)
    with pytest.raises(ValueError, match="3 cannot be dealt over 4 tensor-parallel shards, one would hold none"):
        pool.run(4, build, kind, {"d_ff": 3}, device)
    if kind is Decoder:
        with pytest.raises(ValueError, match="vocab: 2 cannot be dealt over 3 tensor-parallel shards, one would hold none"):
            pool.run(3, build, kind, {"vocab_size": 2}, device)
    else:
        pool.run(3, build, kind, {"vocab_size": 2}, device)


def wrong_label(group: TPGroup, label: int) -> None:
    config = ModelConfig(**BASE)
    Decoder(config, group=group)(ids(2, 3), ids(2, 3, first=label))


@pytest.mark.parametrize("ranks", RANKS)
def test_labels_outside_the_vocabulary(pool: Pool, ranks: int) -> None:
    for label in (11, -1):
        with pytest.raises(ValueError, match=f"label {label} is outside the vocabulary of 11"):
            pool.run(ranks, wrong_label, label)
    pool.run(ranks, wrong_label, -100)
