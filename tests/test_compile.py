"""torch.compile takes a block on two ranks as one graph, collectives and their backward included, and changes nothing."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
import torch._dynamo.utils
from torch import Tensor

from parallel.group import TPGroup
from parallel.regions import token_counts
from parallel.state import scatter_state
from tests.oracle_loading import part_of, random_state
from tests.pool import Pool
from tpblock import Activation, Block, Context, ModelConfig, Norm, Placement

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


@pytest.mark.skipif(not shutil.which("g++"), reason="inductor compiles C++")
@pytest.mark.skipif(" " in torch.__file__, reason="inductor cannot link against a torch whose path has a space")
def test_c84_inductor(pool: Pool) -> None:
    for found in pool.run(2, compare, *CASES["parallel, sequence parallel"], "inductor", timeout=240):
        assert max(distance for _, distance in found) < 1e-5, found
