"""FSDP2 over the replicas of a tensor-parallel model: the same numbers as the single device."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.testing import assert_close

from parallel.checkpoint import load_checkpoint, save_checkpoint
from parallel.fsdp import is_sharded
from parallel.gradients import check_replicas, clip_grad_norm_, grad_norm, sync_replicated
from parallel.group import TPGroup, single_device
from parallel.state import gather_state, named_layouts, scatter_state
from tests.helpers import EXACT
from tests.pool import Pool
from tpblock import Decoder, ModelConfig, Norm, Placement, Position

KINDS = {
    "llama": ModelConfig(vocab_size=23, dim=24, layers=2, heads=6, kv_heads=3, d_ff=10),
    "shared kv": ModelConfig(vocab_size=23, dim=24, layers=2, heads=4, kv_heads=1, d_ff=9, bias=True, tied_embeddings=True),
    "gpt": ModelConfig(
        vocab_size=23,
        dim=24,
        layers=1,
        heads=4,
        d_ff=10,
        norm=Norm.LAYERNORM,
        position=Position.LEARNED,
        max_seq_len=8,
        bias=True,
    ),
    "parallel": ModelConfig(vocab_size=23, dim=24, layers=2, heads=4, placement=Placement.PARALLEL, d_ff=10),
}
Way = tuple[str, bool, str]
"""Kind, whether with sequence parallelism, optimizer."""


def sharded(config: ModelConfig, mesh: DeviceMesh, **options: Any) -> tuple[Decoder, TPGroup]:
    group = TPGroup.from_mesh(mesh["tp"])
    model = Decoder(config, group=group, dtype=torch.float64, **options)
    for block in model.stack.blocks:
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"]), group


def trained(model: Any, group: TPGroup, rows: slice, steps: int, path: Path, load: bool) -> dict[str, Tensor]:
    """Takes AdamW steps, first from ``path`` if it is to be loaded, then saves there beside it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if load:
        load_checkpoint(path, model, group, optimizer)
    ids, labels = batch()
    for _ in range(steps):
        optimizer.zero_grad()
        model(ids[rows], labels=labels[rows]).backward()
        optimizer.step()
    save_checkpoint(path.with_name(f"{path.name}-after" if load else path.name), model, group, optimizer)
    return gather_state(model, group)


def fsdp_steps(mesh: DeviceMesh, steps: int, path: Path, load: bool) -> dict[str, Tensor]:
    model, group = sharded(KINDS["shared kv"], mesh)
    dp, replica = mesh["dp"].size(), mesh["dp"].get_local_rank()
    return trained(model, group, slice(replica * 4 // dp, (replica + 1) * 4 // dp), steps, path, load)


def plain_steps(group: TPGroup, steps: int, path: Path, load: bool) -> dict[str, Tensor]:
    return trained(Decoder(KINDS["shared kv"], group=group, dtype=torch.float64), group, slice(0, 4), steps, path, load)


def test_checkpoints_move_between_fsdp_and_tensor_parallelism_alone(pool: Pool, tmp_path: Path) -> None:
    """Weights and AdamW's moments: two steps here and two there are four on the single device."""
    expected = plain_steps(single_device(), 4, tmp_path / "expected", False)
    pool.run_mesh(2, 2, fsdp_steps, 2, tmp_path / "fsdp", False)
    pool.run(3, plain_steps, 2, tmp_path / "plain", False)
    results = pool.run(3, plain_steps, 2, tmp_path / "fsdp", True)
    results += pool.run_mesh(2, 2, fsdp_steps, 2, tmp_path / "plain", True)
    for result in results:
        for name, value in expected.items():
            assert_close(result[name], value, **EXACT)


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(23, (4, 7), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1], ids[:, 1:]


def train(model: Any, group: TPGroup, ids: Tensor, labels: Tensor, optimizer: str) -> dict[str, Any]:
    make = {"sgd": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9), "adamw": lambda p: torch.optim.AdamW(p, lr=0.01)}
    optim = make[optimizer](model.parameters())
    out: dict[str, Any] = {"norms": [], "losses": []}
    for step in range(4):
        optim.zero_grad()
        loss = model(ids, labels=labels)
        loss.backward()
        if step == 0:
            out["p"] = [grad_norm(model, group, p).item() for p in (1.0, math.inf)]
            out["grads"] = gather_state(model, group, gradients=True)
        out["norms"].append(clip_grad_norm_(model, 0.4, group).item())
        out["losses"].append(loss.item())
        optim.step()
    out["weights"] = gather_state(model, group)
    return out


def on_ranks(mesh: DeviceMesh, ways: list[Way]) -> list[dict[str, Any]]:
    return [on_rank(mesh, *way) for way in ways]


def on_rank(mesh: DeviceMesh, kind: str, sequence_parallel: bool, optimizer: str) -> dict[str, Any]:
    model, group = sharded(KINDS[kind], mesh, sequence_parallel=sequence_parallel)
    assert [name for name, _, _ in named_layouts(model)] == [n for n, _, _ in named_layouts(Decoder(KINDS[kind], group=group))]
    ids, labels = batch()
    dp, replica = mesh["dp"].size(), mesh["dp"].get_local_rank()
    rows = slice(replica * 4 // dp, (replica + 1) * 4 // dp)
    out = train(model, group, ids[rows], labels[rows], optimizer)
    check_replicas(model, group)
    before = gather_state(model, group)
    with torch.no_grad():
        model(ids[rows])  # leaves the outermost module's parameters whole
    sync_replicated(model, group)
    scatter_state(model, {name: value * 2 for name, value in before.items()}, group)
    assert all(is_sharded(parameter) for parameter in model.parameters())
    for name, value in gather_state(model, group).items():
        assert torch.equal(value, before[name] * 2)
    return out


@pytest.mark.parametrize(("tp", "dp"), [(1, 2), (2, 2), (1, 4)])
def test_training_equals_the_single_device(pool: Pool, tp: int, dp: int) -> None:
    ways: list[Way] = [
        ("llama", False, "sgd"),
        ("shared kv", True, "sgd"),
        ("gpt", True, "adamw"),
        ("parallel", True, "sgd"),
    ]
    outcomes = pool.run_mesh(tp, dp, on_ranks, ways)
    for i, (kind, _, optimizer) in enumerate(ways):
        alone = Decoder(KINDS[kind], group=single_device(), dtype=torch.float64)
        expected = train(alone, single_device(), *batch(), optimizer)
        losses = torch.tensor([results[i]["losses"] for results in outcomes]).double().mean(0)
        assert_close(losses, torch.tensor(expected["losses"]).double(), rtol=1e-6, atol=0)
        for result in (results[i] for results in outcomes):
            assert_close(result["norms"], expected["norms"], **EXACT)
            assert_close(result["p"], expected["p"], **EXACT)
            for what in ("grads", "weights"):
                for name, value in expected[what].items():
                    assert_close(result[what][name], value, **EXACT, msg=lambda m, n=name, w=what, k=kind: f"{k} {w} {n}: {m}")
