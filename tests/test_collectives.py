"""How much is sent: every collective of every block, forward and backward, with its size, against the formula.

Sizes are those of the whole tensor: what an all-reduce or a reduce-scatter sums, what an all-gather returns.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from parallel import collectives, shared_memory
from parallel.gradients import clip_grad_norm_, grad_norm
from parallel.group import TPGroup
from parallel.linear import RowParallelLinear
from parallel.regions import token_counts
from parallel.traffic import Recorder, Sent
from tests.helpers import OpRecord, own_collectives
from tests.pool import Pool, WorkerError
from tpblock import Activation, Bias, Block, Context, Decoder, ModelConfig, Norm, Placement, Position, QKNorm

BATCH, SEQ, DIM, LAYERS = 2, 6, 16, 3
TOKENS = BATCH * SEQ

PRE = ModelConfig(vocab_size=20, dim=DIM, layers=LAYERS, heads=8, kv_heads=4, d_ff=24, max_seq_len=SEQ)
PRE_BIASED = ModelConfig(**{**vars(PRE), "bias": True, "norm": Norm.LAYERNORM, "activation": Activation.GELU})
PARALLEL = ModelConfig(**{**vars(PRE), "placement": Placement.PARALLEL})
PARALLEL_BIASED = ModelConfig(**{**vars(PRE_BIASED), "placement": Placement.PARALLEL})
TWO_NORMS = ModelConfig(**{**vars(PRE), "placement": Placement.PARALLEL_TWO_NORMS})
TWO_NORMS_BIASED = ModelConfig(**{**vars(PRE_BIASED), "placement": Placement.PARALLEL_TWO_NORMS})
MQA = ModelConfig(**{**vars(PRE_BIASED), "kv_heads": 1})
PARALLEL_MQA = ModelConfig(**{**vars(PARALLEL), "kv_heads": 1})
CONFIGS = {
    "pre": PRE,
    "pre, biases": PRE_BIASED,
    "parallel": PARALLEL,
    "parallel, biases": PARALLEL_BIASED,
    "two norms": TWO_NORMS,
    "two norms, biases": TWO_NORMS_BIASED,
    "multi-query": MQA,
    "qk-norm, two biases": ModelConfig(**{**vars(MQA), "qk_norm": QKNorm.PER_HEAD, "bias": Bias.QKV | Bias.OUT}),
    "parallel, multi-query": PARALLEL_MQA,
}


@contextmanager
def recorded(into: list[Counter[Sent]], group: TPGroup) -> Iterator[None]:
    with Recorder(group) as recorder:
        yield
    into.append(Counter(recorder.collectives))


def plain(counts: list[Counter[Sent]]) -> list[dict[tuple[str, int, str], int]]:
    """What goes through a pipe and reads well in a failure."""
    return [{(s.kind, s.elements, str(s.dtype).removeprefix("torch.")): n for s, n in count.items()} for count in counts]


def expected(*sent: tuple[int, str, int], dtype: str = "float32") -> dict[tuple[str, int, str], int]:
    total: Counter[tuple[str, int, str]] = Counter()
    for times, kind, elements in sent:
        if times:
            total[kind, elements, dtype] += times
    return dict(total)


def activations(group: TPGroup, sp: bool, batch: int, seq: int, dtype: torch.dtype) -> tuple[Tensor, Context]:
    context = Context.build(PRE, batch, seq, device=torch.get_default_device(), dtype=dtype, step=0)
    shape = (token_counts(batch * seq, group)[group.rank], DIM) if sp else (batch, seq, DIM)
    return torch.randn(shape, dtype=dtype, requires_grad=True), context


def run_block(
    group: TPGroup,
    config: ModelConfig,
    sp: bool,
    options: dict[str, Any] | None = None,
    batch: int = BATCH,
    planted: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> list[Any]:
    """[what forward sent, what backward sent, what forward without autograd sent]"""
    options = options or {}
    block = Block(config, group=group, sequence_parallel=sp, **options)
    x, context = activations(group, sp, batch, SEQ, options.get("dtype", torch.float32))
    counts: list[Counter[Sent]] = []
    with planted():
        with recorded(counts, group):
            y = block(x, context)
        with recorded(counts, group):
            y.backward(torch.ones_like(y))
        with torch.no_grad(), recorded(counts, group):
            block(x, context)
    return plain(counts)


def forward_of(config: ModelConfig, sp: bool, tokens: int = TOKENS) -> list[tuple[int, str, int]]:
    """The two sublayers of a sequential block enter and leave the sharded region each, those of a parallel block together."""
    times, size = 2 if config.placement is Placement.PRE else 1, tokens * DIM
    return [(times, "all_gather", size), (times, "reduce_scatter", size)] if sp else [(times, "all_reduce", size)]


def backward_of(config: ModelConfig, sp: bool, ranks: int, tokens: int = TOKENS) -> list[tuple[int, str, int]]:
    times, size = 2 if config.placement is Placement.PRE else 1, tokens * DIM
    norm = DIM * (2 if config.norm is Norm.LAYERNORM else 1)
    two_norms = config.placement is Placement.PARALLEL_TWO_NORMS
    sent = []
    if sp:
        # dy gathered, dx scattered; x gathered again for the weight gradient, but for two norms, which keep it whole
        sent += [(times, "all_gather", size), (times, "reduce_scatter", size), (0 if two_norms else times, "all_gather", size)]
        sent += [(1, "all_reduce", 2 * norm) if two_norms else (times, "all_reduce", norm)]
        sent += [(config.has_bias(linears), "all_reduce", DIM) for linears in (Bias.OUT, Bias.FEEDFORWARD)]
    elif two_norms:
        sent += [(1, "all_reduce", size + 2 * norm)]  # dx with the gradients of both norms' parameters
    else:
        sent += [(times, "all_reduce", size)]
    if config.kv_heads < ranks:
        rows = 2 * config.kv_heads * config.head_dim
        sent += [(1, "all_reduce", rows * DIM), (config.has_bias(Bias.QKV), "all_reduce", rows)]
    if config.qk_norm is QKNorm.PER_HEAD:
        sent += [(1, "all_reduce", 2 * config.head_dim)]
    return sent


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("sp", [False, True], ids=["whole", "sequence-parallel"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_block_sends_what_its_formula_says(pool: Pool, config: ModelConfig, sp: bool, ranks: int) -> None:
    forward = expected(*forward_of(config, sp)) if ranks > 1 else {}
    backward = expected(*backward_of(config, sp, ranks)) if ranks > 1 else {}
    for found in pool.run(ranks, run_block, config, sp):
        assert found == [forward, backward, forward]


def test_half_precision_halves_the_bytes(pool: Pool) -> None:
    for found in pool.run(2, run_block, PRE, False, {"dtype": torch.bfloat16}):
        assert found[:2] == [expected((2, "all_reduce", TOKENS * DIM), dtype="bfloat16")] * 2


def sums_in_float32(*sent: tuple[int, str, int]) -> dict[tuple[str, int, str], int]:
    gathered = expected(*(item for item in sent if item[1] == "all_gather"), dtype="bfloat16")
    return gathered | expected(*(item for item in sent if item[1] != "all_gather"))


@pytest.mark.parametrize("sp", [False, True], ids=["whole", "sequence-parallel"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_reduce_dtype_is_that_of_all_sums_and_of_nothing_else(pool: Pool, config: ModelConfig, sp: bool) -> None:
    options = {"dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    forward, backward = sums_in_float32(*forward_of(config, sp)), sums_in_float32(*backward_of(config, sp, 2))
    for found in pool.run(2, run_block, config, sp, options):
        assert found == [forward, backward, forward]


@pytest.mark.parametrize("own", [False, True])
def test_tokens_that_do_not_divide_are_padded_to_the_longest_share_only(pool: Pool, own: bool) -> None:
    """3 * 6 = 18 tokens on 4 ranks: 5, 5, 4, 4 are sent as 5 each by the process group's collectives."""
    tokens = 20 if own else 18
    for found in pool.run(4, run_block, PRE, True, None, 3, own_collectives if own else nullcontext):
        assert found[:2] == [expected(*forward_of(PRE, True, tokens)), expected(*backward_of(PRE, True, 4, tokens))]


@pytest.mark.parametrize("sp", [False, True], ids=["whole", "sequence-parallel"])
def test_the_process_groups_own_collectives_are_as_many(pool: Pool, sp: bool) -> None:
    for found in pool.run(2, run_block, PARALLEL_MQA, sp, None, BATCH, own_collectives):
        assert found[:2] == [expected(*forward_of(PARALLEL_MQA, sp)), expected(*backward_of(PARALLEL_MQA, sp, 2))]


# --- through shared memory


def exchanged(group: TPGroup, counts: list[int], dtype: torch.dtype) -> list[bool]:
    """Whether each collective gives what the process group's own gives, and leaves its input alone."""
    tokens, rank, same = sum(counts), group.rank, []
    generator = torch.Generator().manual_seed(rank)
    x = torch.randint(-8, 8, (tokens, 3), generator=generator).to(dtype)
    part = torch.randint(-8, 8, (3, counts[rank]), generator=generator).to(dtype).t()  # not contiguous
    turned = counts[rank:] + counts[:rank]  # rank r gives counts[r + s] rows to rank s, and so is given by it
    given, taken = turned, turned
    calls: list[Callable[[], Tensor]] = [
        lambda: collectives.start_all_reduce(x.clone(), group)(),
        lambda: collectives.start_all_gather(part, group, counts)(),
        lambda: collectives.start_reduce_scatter(x, group, counts)(),
        lambda: collectives.all_to_all(x, group, given=given, taken=taken, most=tokens),
    ]
    before = x.clone(), part.clone()
    for call in calls:
        result = call()
        with own_collectives():
            expected = call()
        same.append(result.dtype == dtype and torch.equal(result, expected))
        same.append(torch.equal(x, before[0]) and torch.equal(part, before[1]))
    started = [collectives.start_all_gather(part * n, group, counts) for n in range(3)]  # several under way
    same += [torch.equal(pending(), n * calls[1]()) for n, pending in reversed(list(enumerate(started)))]
    return same


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "counts", [[3, 3], [2, 1], [1, 0], [4, 4, 3], [1, 0, 0], [2, 2, 2, 2], [3, 2, 2, 2], [0, 0, 0, 0]], ids=str
)
def test_shared_memory_gives_what_the_process_group_gives(pool: Pool, counts: list[int], dtype: torch.dtype) -> None:
    """Whole numbers, whose sums are exact in any order."""
    for rank in pool.run(len(counts), exchanged, counts, dtype):
        assert rank and all(rank), rank


def sums(group: TPGroup, rows: int) -> list[Tensor]:
    x = torch.randn(rows, 7, generator=torch.Generator().manual_seed(group.rank))
    return [collectives.start_all_reduce(x.clone(), group)(), x]


@pytest.mark.parametrize("rows", [101, 50_001], ids=["summed whole", "summed in parts"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_rank_adds_in_the_order_of_the_ranks(pool: Pool, ranks: int, rows: int) -> None:
    found = pool.run(ranks, sums, rows)
    total = found[0][1] + found[1][1]
    for _, x in found[2:]:
        total = total + x
    assert all(torch.equal(direct, total) for direct, _ in found)


def how_it_went(group: TPGroup, elements: int) -> list[str]:
    with OpRecord() as record:
        total = collectives.start_all_reduce(torch.ones(elements), group)()
    assert total.eq(group.size).all()
    return [name for name in record.names if name.startswith("c10d.")] + record.collectives


def test_tensors_too_large_for_a_slot_go_through_the_process_group(pool: Pool) -> None:
    most = shared_memory.SLOT_BYTES // 4
    for small, large in zip(pool.run(2, how_it_went, most), pool.run(2, how_it_went, most + 1), strict=True):
        assert small == ["all_reduce"]
        assert large == ["c10d.allreduce_", "all_reduce"]


def at_odds(group: TPGroup, call: str) -> None:
    """Rank 1 does something else than the others."""
    odd, x = group.rank == 1, torch.ones(6, 2)
    if call == "shapes":
        collectives.start_all_reduce(x[: 4 if odd else 6].clone(), group)()
    elif call == "dtypes":
        collectives.start_all_reduce(x.int() if odd else x, group)()
    elif odd:
        collectives.start_reduce_scatter(x, group, [3, 3])()
    else:
        collectives.start_all_reduce(x, group)()


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (
            "shapes",
            r"rank 1 gives rank 0 32 bytes in all_reduce of torch.float32, which expects 48 bytes in all_reduce of torch.float32",
        ),
        (
            "dtypes",
            r"rank 1 gives rank 0 48 bytes in all_reduce of torch.int32, which expects 48 bytes in all_reduce of torch.float32",
        ),
        ("kinds", r"rank 1 gives rank 0 24 bytes in reduce_scatter of torch.float32, which expects 48 bytes in all_reduce of"),
    ],
)
def test_ranks_at_odds_are_told(pool: Pool, call: str, told: str) -> None:
    with pytest.raises(RuntimeError, match=told):
        pool.run(2, at_odds, call)


def many_under_way(group: TPGroup) -> bool:
    """More than there are slots for, ended in an order of their own, while ranks come at different times."""
    rank, n = group.rank, group.size
    good, late, before = True, None, 0.0
    for turn in range(60):
        if (turn + rank) % 7 == 0:
            time.sleep(0.002)
        if late is not None:  # the turn before has left it, with all that came after it ended
            good &= bool(late().eq(before).all())
        xs = [torch.full((5, 3), float(turn * 10 + i + rank)) for i in range(4)]
        pending = [collectives.start_reduce_scatter(x, group, [5] + [0] * (n - 1)) for x in xs[:2]]
        pending += [collectives.start_all_reduce(x, group) for x in xs[2:]]
        order = torch.randperm(4, generator=torch.Generator().manual_seed(turn)).tolist()
        for i in order:
            result, total = pending[i](), sum(float(turn * 10 + i + r) for r in range(n))
            good &= bool(result.eq(total).all()) and result.shape[0] == (5 if i >= 2 or rank == 0 else 0)
        late = collectives.start_all_reduce(torch.full((2,), float(turn + rank)), group)
        collectives.start_all_reduce(torch.full((3,), -1.0), group)()
        before = sum(float(turn + r) for r in range(n))
    return good


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_many_collectives_under_way(pool: Pool, ranks: int) -> None:
    assert all(pool.run(ranks, many_under_way))


def ends(group: TPGroup) -> None:
    collectives.start_all_reduce(torch.ones(2), group)()
    if group.rank == 1:
        os._exit(3)
    collectives.start_all_reduce(torch.ones(2), group)()


def test_a_rank_that_ends_is_told_by_those_who_wait(pool: Pool) -> None:
    with pytest.raises(WorkerError, match=r"rank 0 raised(.|\n)*waited for rank 1 in all_reduce, whose process has ended"):
        pool.run(2, ends)


def comes_late(group: TPGroup) -> None:
    channel = shared_memory.channel(group.connected)
    assert channel is not None
    if group.rank == 1:
        time.sleep(1.5)
    with mock.patch.object(channel, "timeout", 0.5):
        collectives.start_all_reduce(torch.ones(2), group)()


def test_a_rank_that_does_not_come_in_time_is_told(pool: Pool) -> None:
    with pytest.raises(
        WorkerError, match="rank 0: DistBackendError: waited [01] s for rank 1 in all_reduce, which did not come"
    ):
        pool.run(2, comes_late)


# --- a whole model


def run_decoder(group: TPGroup, config: ModelConfig, sp: bool, chunk: int, options: dict[str, Any] | None = None) -> list[Any]:
    """[forward with the loss, backward, gradient norm, clipping]"""
    model = Decoder(config, group=group, sequence_parallel=sp, loss_chunk=chunk, **(options or {}))
    ids = torch.arange(TOKENS).view(BATCH, SEQ) % config.vocab_size
    counts: list[Counter[Sent]] = []
    with recorded(counts, group):
        loss = model(ids, ids)
    with recorded(counts, group):
        loss.backward()
    with recorded(counts, group):
        grad_norm(model, model.group)
    with recorded(counts, group):
        clip_grad_norm_(model, 0.1, model.group)
    return plain(counts)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_decoder_sends_what_its_blocks_send_and_little_more(pool: Pool, ranks: int) -> None:
    """The embedding is reduced once, the loss is one gather of three numbers a token, the norm one number."""
    size = TOKENS * DIM
    for forward, backward, norm, clipping in pool.run(ranks, run_decoder, PRE, False, 1000):
        assert forward == expected((2 * LAYERS + 1, "all_reduce", size), (1, "all_gather", 3 * TOKENS * ranks))
        assert backward == expected((2 * LAYERS + 1, "all_reduce", size))
        assert list(norm) == [("all_reduce", 1, "float64")] and list(norm.values()) == [1]
        assert clipping == norm


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_sequence_parallel_decoder(pool: Pool, ranks: int) -> None:
    """With learned positions, whose table's gradient is summed, and tied embeddings."""
    config = ModelConfig(**{**vars(PRE_BIASED), "position": Position.LEARNED, "tied_embeddings": True})
    size = TOKENS * DIM
    blocks_forward = [(LAYERS * times, kind, n) for times, kind, n in forward_of(config, True)]
    blocks_backward = [(LAYERS * times, kind, n) for times, kind, n in backward_of(config, True, ranks)]
    for forward, backward, norm, _ in pool.run(ranks, run_decoder, config, True, 1000):
        outside = [(1, "reduce_scatter", size), (1, "all_gather", size), (1, "all_gather", 3 * TOKENS * ranks)]
        assert forward == expected(*blocks_forward, *outside)
        outside = [
            (1, "all_gather", size),  # the embedding's dy
            (1, "reduce_scatter", size),  # the head's dx
            (1, "all_reduce", 2 * DIM),  # the final norm
            (1, "all_reduce", config.max_seq_len * DIM),
        ]
        assert backward == expected(*blocks_backward, *outside)
        assert list(norm.values()) == [1]


@pytest.mark.parametrize("sp", [False, True], ids=["whole", "sequence-parallel"])
def test_a_decoder_makes_all_sums_in_the_reduce_dtype(pool: Pool, sp: bool) -> None:
    config = ModelConfig(**{**vars(PRE_BIASED), "position": Position.LEARNED, "kv_heads": 1})
    options = {"dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    for forward, backward, *_ in pool.run(2, run_decoder, config, sp, 1000, options):
        sent = [*forward, *backward]
        assert {dtype for kind, _, dtype in sent if kind != "all_gather"} == {"float32"}
        # the loss gathers float32 statistics, sequence parallelism activations
        assert {dtype for kind, _, dtype in sent if kind == "all_gather"} == {"float32", *(["bfloat16"] if sp else [])}


def test_a_chunked_loss_gathers_three_numbers_a_token_in_all(pool: Pool) -> None:
    for forward, *_ in pool.run(2, run_decoder, PRE, False, 4):
        gathers = {key: n for key, n in forward.items() if key[0] == "all_gather"}
        assert gathers == expected((3, "all_gather", 3 * 4 * 2))


# --- teeth


@contextmanager
def reduced_twice() -> Iterator[None]:
    reduce = RowParallelLinear.reduce

    def twice(self: RowParallelLinear, leaves: Any) -> Tensor:
        y = reduce(self, leaves)
        return y + 0 * collectives.all_reduce(y.detach(), self.group)

    with mock.patch.object(RowParallelLinear, "reduce", twice):
        yield


@contextmanager
def branches_reduced_apart() -> Iterator[None]:
    """A parallel block that sums attention and feed-forward over the ranks one after the other."""
    leaves = RowParallelLinear.leaves

    def reduced(self: RowParallelLinear, xs: Any) -> list[Tensor]:
        return [self.reduce(leaves(self, xs))]

    with mock.patch.object(RowParallelLinear, "leaves", reduced):
        yield


@pytest.mark.parametrize(("config", "plant"), [(PRE, reduced_twice), (PARALLEL, branches_reduced_apart)])
def test_a_block_that_sends_too_much_is_found(pool: Pool, config: ModelConfig, plant: Any) -> None:
    right = expected(*forward_of(config, False))
    for found in pool.run(2, run_block, config, False, None, BATCH, plant):
        assert found[0] != right
        assert sum(found[0].values()) > sum(right.values())
