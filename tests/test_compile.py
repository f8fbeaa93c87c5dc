"""torch.compile takes a block on several ranks as one graph, collectives and their backward included, and changes nothing, neither
the results nor what carries them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo.utils
from torch import Tensor

from parallel import collectives, shared_memory
from parallel.group import TPGroup
from parallel.regions import token_counts
from parallel.state import scatter_state
from tests.oracle_loading import part_of, random_state
from tests.pool import Pool
from tpblock import Activation, Block, Context, Decoder, ModelConfig, Norm, Placement

BATCH, SEQ, STEPS = 2, 5, (0, 1, 2, 3)

PRE = ModelConfig(vocab_size=8, dim=16, layers=1, heads=4, kv_heads=2, d_ff=25, max_seq_len=8)
GPT = ModelConfig(
    vocab_size=8,
    dim=16,
    layers=1,
    heads=4,
    kv_heads=1,
    d_ff=25,
    activation=Activation.GELU_TANH,
    norm=Norm.LAYERNORM,
    bias=True,
    max_seq_len=8,
)


def changed(config: ModelConfig, **changes: Any) -> ModelConfig:
    return ModelConfig(**{**vars(config), **changes})


CASES = {
    "pre": (PRE, False),
    "pre, biases, multi-query, sequence parallel": (GPT, True),
    "parallel": (changed(PRE, placement=Placement.PARALLEL), False),
    "parallel, sequence parallel": (changed(PRE, placement=Placement.PARALLEL), True),
    "two norms": (changed(GPT, placement=Placement.PARALLEL_TWO_NORMS), False),
    "two norms, sequence parallel": (changed(GPT, placement=Placement.PARALLEL_TWO_NORMS), True),
    "dropout": (changed(PRE, dropout=0.3, attention_dropout=0.2), False),
    "dropout, sequence parallel": (changed(GPT, dropout=0.3, attention_dropout=0.2), True),
}


def results(block: Any, parameters: list[Tensor], x: Tensor, cotangent: Tensor, context: Context) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    y = block(x, context)
    grads = torch.autograd.grad(y, [x, *parameters], cotangent)
    return {"y": y} | {f"gradient {i}": grad for i, grad in enumerate(grads)}


def compare(group: TPGroup, config: ModelConfig, sp: bool, backend: str) -> list[tuple[str, float]]:
    """The relative distance of each result of the compiled block from the eager one's, at several training steps."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    block = Block(config, group=group, sequence_parallel=sp, seed=1)
    state = {name: value.float() for name, value in part_of(random_state(config), "stack.blocks.0.").items()}
    scatter_state(block, state, group)
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    counts = token_counts(BATCH * SEQ, group)
    x, cotangent = (torch.randn(BATCH, SEQ, config.dim) for _ in range(2))
    if sp:
        x, cotangent = (t.flatten(0, 1).split(counts)[group.rank] for t in (x, cotangent))
    found = []
    for step in STEPS:
        context = Context.build(config, BATCH, SEQ, device=x.device, dtype=x.dtype, step=step)
        parameters = list(block.parameters())
        ours = results(compiled, parameters, x, cotangent, context)  # before the eager block could fill a cache
        eager = results(block, parameters, x, cotangent, context)
        for name, value in eager.items():
            found.append((f"step {step}, {name}", ((ours[name] - value).norm() / value.norm()).item()))
    # 0 and 1 are constants to the compiler, then the step becomes a variable: it must not compile at every step.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= (3 if config.dropout else 1)
    return found


@pytest.mark.parametrize(("config", "sp"), CASES.values(), ids=CASES)
def test_c84_a_compiled_block_equals_the_eager_one(pool: Pool, config: ModelConfig, sp: bool) -> None:
    for found in pool.run(2, compare, config, sp, "aot_eager"):
        assert len(found) >= len(STEPS) * 6
        assert max(distance for _, distance in found) < 1e-6, found


inductor = pytest.mark.skipif(not shutil.which("g++") or " " in torch.__file__, reason="inductor links C++ against torch")
"""It needs g++, and a torch whose path has no space."""


@inductor
def test_c84_inductor(pool: Pool) -> None:
    for found in pool.run(2, compare, *CASES["parallel, sequence parallel"], "inductor", timeout=240):
        assert max(distance for _, distance in found) < 1e-5, found


@inductor
def test_inductor_on_ranks_of_different_sizes(pool: Pool) -> None:
    """Heads, d_ff and tokens on three ranks, so that the compiler weighs other sizes on each."""
    for found in pool.run(3, compare, *CASES["parallel, sequence parallel"], "inductor", timeout=240):
        assert max(distance for _, distance in found) < 1e-5, found


def compare_models(group: TPGroup, sp: bool) -> float:
    """The largest distance of a compiled model's loss and gradients from the eager one's, with checkpointing."""
    torch._dynamo.reset()
    config = changed(GPT, vocab_size=20, placement=Placement.PARALLEL)
    model = Decoder(config, group=group, sequence_parallel=sp, activation_checkpointing=True, seed=1)
    ids = torch.arange(BATCH * SEQ).view(BATCH, SEQ)

    def run(forward: Callable[..., Tensor]) -> list[Tensor]:
        loss = forward(ids, ids)
        return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]

    ours, eager = run(torch.compile(model, fullgraph=True, backend="aot_eager")), run(model)
    return max(((a - b).norm() / b.norm().clamp_min(1e-6)).item() for a, b in zip(ours, eager, strict=True))


@pytest.mark.parametrize("sp", [False, True], ids=["whole", "sequence parallel"])
def test_a_compiled_model_on_ranks_of_different_sizes(pool: Pool, sp: bool) -> None:
    assert max(pool.run(3, compare_models, sp)) < 1e-5


# -- what carries the collectives of compiled code


@contextmanager
def exchanges() -> Iterator[list[str]]:
    """The collectives that go through shared memory."""
    kinds: list[str] = []
    start = shared_memory.Channel.start

    def noted(self: Any, kind: str, *args: Any, **options: Any) -> Any:
        kinds.append(kind)
        return start(self, kind, *args, **options)

    with mock.patch.object(shared_memory.Channel, "start", noted):
        yield kinds


def all_kinds(x: Tensor, group: TPGroup, counts: list[int]) -> tuple[Tensor, ...]:
    """One collective of each kind, begun before the first is waited for."""
    rows = x[: counts[group.rank]]
    pending = [
        collectives.start_all_gather(rows, group, counts),
        collectives.start_reduce_scatter(x, group, counts),
        collectives.start_all_reduce(x * 2, group),
    ]
    return *(finish() for finish in pending), collectives.all_reduce(x, group)


KINDS = ["all_gather", "reduce_scatter", "all_reduce", "all_reduce"]


def carried(group: TPGroup, counts: list[int], shared: bool, width: int, compiled_ranks: list[int]) -> tuple[bool, list[str]]:
    """Whether the results are right, which are sums of whole numbers, and what went through shared memory."""
    torch._dynamo.reset()
    group = replace(group, shared_memory=shared)
    compiled = torch.compile(all_kinds, fullgraph=True, backend="aot_eager")
    x = torch.arange(sum(counts) * width, dtype=torch.float32).view(-1, width) % 64
    mine = x + group.rank
    total = x * group.size + sum(range(group.size))
    start = sum(counts[: group.rank])
    gathered = torch.cat([x[:n] + rank for rank, n in enumerate(counts)])
    expected = [gathered, total[start : start + counts[group.rank]], 2 * total, total]
    with exchanges() as kinds:
        results = (compiled if group.rank in compiled_ranks else all_kinds)(mine, group, counts)
    same = all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    return same and torch.equal(mine, x + group.rank), kinds


@pytest.mark.parametrize("counts", [[2, 1], [3, 3, 2], [1, 1, 0, 0]], ids=str)
def test_compiled_code_goes_through_shared_memory(pool: Pool, counts: list[int]) -> None:
    everyone = list(range(len(counts)))
    assert pool.run(len(counts), carried, counts, True, 5, everyone) == [(True, KINDS)] * len(counts)


def test_a_group_without_shared_memory_compiles_to_the_process_group(pool: Pool) -> None:
    assert pool.run(2, carried, [2, 1], False, 5, [0, 1]) == [(True, [])] * 2


def test_what_is_too_large_for_a_slot_goes_through_the_process_group(pool: Pool) -> None:
    width = shared_memory.SLOT_BYTES // 8 + 1  # two rows are too large for a slot, one is not
    assert pool.run(2, carried, [1, 1], True, width, [0, 1]) == [(True, ["all_gather"])] * 2


def test_large_sums_in_parts(pool: Pool) -> None:
    """An all-reduce is two collectives then."""
    for same, kinds in pool.run(3, carried, [2, 2, 2], True, shared_memory.WHOLE_BYTES // 16, [0, 1, 2]):
        assert same and kinds == ["all_gather", "reduce_scatter", *["reduce_scatter", "all_gather"] * 2]


@pytest.mark.parametrize("shared", [True, False])
def test_a_compiled_rank_and_an_eager_one_meet(pool: Pool, shared: bool) -> None:
    assert pool.run(2, carried, [2, 2], shared, 5, [1]) == [(True, KINDS if shared else [])] * 2


def at_odds(group: TPGroup) -> None:
    torch._dynamo.reset()
    summed = torch.compile(lambda x: collectives.all_reduce(x, group), fullgraph=True, backend="aot_eager")
    summed(torch.ones(6 if group.rank == 1 else 4))


def test_compiled_ranks_at_odds_are_told(pool: Pool) -> None:
    with pytest.raises(
        RuntimeError, match="rank 1 gives rank 0 24 bytes in all_reduce of torch.float32, which expects 16 bytes"
    ):
        pool.run(2, at_odds)
