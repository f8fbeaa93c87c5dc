"""Every engine on every mesh takes the steps of the single device."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from launch.data import Corpus
from launch.engines import Ddp, DeepSpeed, Engine, Fsdp2
from launch.environment import UserError
from launch.train_config import TrainConfig
from launch.trainer import Trainer
from parallel.group import TPGroup, single_device
from parallel.state import gather_state
from tests.pool import Pool
from tpblock import Decoder, ModelConfig

STEPS, BATCH, SEQ, CLIP = 10, 8, 6, 0.5
MESHES = [(2, 1), (1, 2), (2, 2), (1, 4)]
"""(tp, dp)."""
# Two tensor-parallel ranks share its KV head. With dropout, so that a replica's masks must be those of its rows.
MODEL = ModelConfig(vocab_size=19, dim=16, layers=1, heads=4, kv_heads=1, d_ff=12, init_std=0.2, bias=True, dropout=0.2)
ENGINES = ["ddp", "fsdp2", "zero 0", "zero 1", "zero 2", "zero 3"]


@dataclass(frozen=True)
class Case:
    engine: str
    optimizer: str = "SGD"
    sequence_parallel: bool = False
    accumulation: int = 1
    dtype: torch.dtype = torch.float32
    virtual_shards: int | None = None

    def model(self, group: TPGroup) -> Decoder:
        group = group.with_virtual_shards(self.virtual_shards)
        return Decoder(MODEL, group=group, sequence_parallel=self.sequence_parallel, dtype=self.dtype)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.optimizer == "SGD":  # shows a wrong clip factor, which Adam hides
            return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        return torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1)

    def start(self, mesh: DeviceMesh | None) -> Engine:
        model = self.model(single_device() if mesh is None else TPGroup.from_mesh(mesh["tp"]))
        options: dict[str, Any] = {"clip": CLIP, "accumulation": self.accumulation}
        match self.engine.split():
            case ["ddp"]:
                return Ddp(model, self.make_optimizer, mesh, **options)
            case ["fsdp2"]:
                return Fsdp2(model, self.make_optimizer, mesh, **options)
            case [_, stage]:
                assert mesh is not None
                # By default parameters as small as these are never partitioned, and all gradients fit one bucket.
                zero = {"stage": int(stage), "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 600}
                rows = BATCH // mesh["dp"].size() // self.accumulation
                return DeepSpeed(model, self.make_optimizer, mesh, zero=zero, rows=rows, **options)
        raise AssertionError(self.engine)


@dataclass
class Run:
    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cpu").manual_seed(step)
    text = torch.randint(19, (BATCH, SEQ + 1), generator=generator, device="cpu").to(torch.get_default_device())
    return text[:, :-1], text[:, 1:]


def take_steps(engine: Engine, steps: range) -> Run:
    losses, norms = [], []
    replica = engine.replicas
    rows = BATCH // replica.size // engine.accumulation
    for step in steps:
        parts = zip(*(t.chunk(replica.size)[replica.rank].split(rows) for t in batch_of(step)), strict=True)
        for number, (ids, labels) in enumerate(parts, start=replica.rank * engine.accumulation):
            engine.micro_batch(ids, labels, step=step, first_token=number * rows * SEQ)
        loss, norm = engine.step()
        losses.append(loss.item())
        norms.append(norm.item())
    return Run(losses, norms, {name: tensor.cpu().clone() for name, tensor in engine.global_tensors()})


@cache
def expected(case: Case) -> Run:
    """Plain torch on all rows at once."""
    model, losses, norms = case.model(single_device()), [], []
    optimizer = case.make_optimizer(model)
    for step in range(STEPS):
        loss = model(*batch_of(step), step=step)
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        losses.append(loss.item())
        optimizer.step()
    assert min(norms) > CLIP, "nothing would be clipped"
    return Run(losses, norms, gather_state(model, single_device()))


def check(run: Run, due: Run, tolerance: float, where: object) -> None:
    count = len(run.losses)
    assert run.losses == pytest.approx(due.losses[-count:], rel=tolerance), where
    assert run.norms == pytest.approx(due.norms[-count:], rel=tolerance), where
    for name, value in due.weights.items():
        distance = (run.weights[name].float() - value.float()).abs().max().item()
        assert distance <= tolerance, f"{where}: {name} differs by {distance:.2g}"


def on_mesh(mesh: DeviceMesh, cases: list[Case]) -> list[Run]:
    os.environ["DS_ACCELERATOR"] = mesh.device_type
    return [take_steps(case.start(mesh), range(STEPS)) for case in cases]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("tp", "dp"), MESHES)
def test_c29_c30_ten_steps_are_those_of_one_device(pools: dict[int, Pool], tp: int, dp: int, engine: str) -> None:
    """With and without sequence parallelism and accumulation, either optimizer with each. Averages over replicas are sums divided
    by their number, whatever the backend makes of an average."""
    if engine.startswith("zero"):
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed (make install says why)")
    ways = list(product((False, True) if tp > 1 else (False,), (1, 2)))
    cases = [Case(engine, ("SGD", "AdamW")[sum(map(int, way)) % 2], *way) for way in ways]
    for rank, runs in enumerate(pools[tp * dp].run_mesh(tp, dp, on_mesh, cases)):
        for case, run in zip(cases, runs, strict=True):
            check(run, expected(Case("", case.optimizer)), 1e-5, f"rank {rank}, TP {tp}, DP {dp}, {case}")


# -- number formats and bits


def gradients_in_bfloat16(mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    """Of the embedding, averaged over the replicas: by DistributedDataParallel, and from the replicas' own."""
    replica, replicas = mesh["dp"].get_local_rank(), mesh["dp"].size()
    ids, labels = (t.chunk(replicas)[replica] for t in batch_of(0))
    engine = Case("ddp", dtype=torch.bfloat16).start(mesh)
    engine.backward(ids, labels, True, {"step": 0})
    mine = engine.model.embedding.weight.grad
    alone = Case("ddp", dtype=torch.bfloat16).model(single_device())
    alone(ids, labels, step=0).backward()
    gradients = engine.everyones(alone.embedding.weight.grad.float()[None])  # type: ignore[union-attr]
    assert mine is not None
    return mine.cpu(), gradients.mean(0).bfloat16().cpu()


def test_half_precision_gradients_are_added_over_replicas_in_float32(pools: dict[int, Pool]) -> None:
    for averaged, due in pools[4].run_mesh(1, 4, gradients_in_bfloat16):
        assert averaged.dtype == torch.bfloat16 and (averaged != due).float().mean() < 0.01


@pytest.mark.parametrize("engine", ENGINES)
def test_bfloat16(pools: dict[int, Pool], engine: str) -> None:
    """Losses and norms within rounding of float32. In it DeepSpeed alone keeps small changes of the weights."""
    if engine.startswith("zero"):
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed (make install says why)")
    for runs in pools[4].run_mesh(2, 2, on_mesh, [Case(engine, accumulation=2, dtype=torch.bfloat16)]):
        due = expected(Case(""))
        assert runs[0].losses == pytest.approx(due.losses, rel=0.03)
        assert runs[0].norms == pytest.approx(due.norms, rel=0.1)


@pytest.mark.parametrize(("tp", "dp"), MESHES)
def test_invariant_mode_has_the_bits_of_one_device(pools: dict[int, Pool], tp: int, dp: int) -> None:
    """Whatever the number of ranks of each kind, if there are as many micro-batches."""
    due = take_steps(Case("ddp", "AdamW", accumulation=4, virtual_shards=3).start(None), range(STEPS))
    cases = [Case("ddp", "AdamW", sp, 4 // dp, virtual_shards=3) for sp in (False, True)]
    for runs in pools[tp * dp].run_mesh(tp, dp, on_mesh, cases):
        for case, run in zip(cases, runs, strict=True):
            check(run, due, 0.0, case)


# -- checkpoints


def half_a_run(mesh: DeviceMesh | None, case: Case, path: Path, first: int) -> Run:
    """The first five steps and a checkpoint, or the last five from there."""
    if mesh is not None:
        os.environ["DS_ACCELERATOR"] = mesh.device_type
    engine = case.start(mesh)
    if first:
        assert engine.load(path)["steps"] == first
    run = take_steps(engine, range(first, first + 5))
    if not first:
        with torch.no_grad():  # as validation does: after it FSDP2 holds parameters whole that are not the optimizer's
            engine.module(*batch_of(0), step=0)
        engine.save(path, {"steps": 5})
    return run


@pytest.mark.parametrize(
    ("saved", "at", "loaded", "then"),
    [
        ("fsdp2", (2, 2), "ddp", (1, 4)),
        ("ddp", (2, 2), "fsdp2", (2, 1)),
        ("fsdp2", (1, 2), "fsdp2", (2, 2)),
        ("fsdp2", (2, 1), "ddp", None),
        ("zero 1", (2, 2), "zero 1", (2, 2)),
        ("zero 3", (2, 2), "zero 3", (2, 2)),
    ],
)
def test_c78_a_run_goes_on_under_another_engine_on_other_ranks(
    pools: dict[int, Pool], tmp_path: Path, saved: str, at: tuple[int, int], loaded: str, then: tuple[int, int] | None
) -> None:
    if "zero" in saved:
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed (make install says why)")
    path = tmp_path / "checkpoints" / "step-5"
    path.parent.mkdir()
    first, second = Case(saved, "AdamW", accumulation=2), Case(loaded, "AdamW")
    pools[at[0] * at[1]].run_mesh(*at, half_a_run, first, path, 0)
    runs = (
        [half_a_run(None, second, path, 5)]
        if then is None
        else pools[then[0] * then[1]].run_mesh(*then, half_a_run, second, path, 5)
    )
    for run in runs:
        check(run, expected(Case("", "AdamW")), 1e-5, (first, second))


# -- batches

TEXT = np.random.default_rng(0).integers(0, 256, 4000).astype(np.uint8)
TINY = TrainConfig(dim=16, layers=1, heads=2, kv_heads=1, d_ff=8, batch=8, seq_len=6, steps=4, warmup=0).completed()


class Strange(Corpus):
    """Gives other labels to whom it is given."""

    def batch(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        ids, labels = super().batch(*args, **options)
        return ids, labels.flip(0)


def trainer_with(mesh: DeviceMesh, strange: int | None) -> None:
    corpus = (Strange if mesh.get_rank() == strange else Corpus)(TEXT, TEXT)
    device = torch.device(torch.get_default_device())
    Trainer(TINY, TPGroup.from_mesh(mesh["tp"]), mesh, device, corpus).step(0)


def test_a_rank_with_another_batch_than_its_replicas_is_found(pools: dict[int, Pool]) -> None:
    """On all ranks of all replicas, so that none waits for those that stop."""
    pools[4].run_mesh(2, 2, trainer_with, None)
    for strange, where in ((3, "rank 1 of 2 of replica 1"), (0, "rank 1 of 2 of replica 0")):
        with pytest.raises(UserError, match=f"tensor-parallel {where} was given another batch than rank 0"):
            pools[4].run_mesh(2, 2, trainer_with, strange)


def batches_seen(mesh: DeviceMesh) -> Tensor:
    seen: list[Tensor] = []
    device = torch.device(torch.get_default_device())
    trainer = Trainer(TINY, TPGroup.from_mesh(mesh["tp"]), mesh, device, Corpus(TEXT, TEXT))
    trainer.engine.micro_batch = lambda ids, labels, **_: seen.append(ids)  # type: ignore[method-assign]
    trainer.engine.step = lambda: (cast(Tensor, None), cast(Tensor, None))  # type: ignore[method-assign]
    trainer.step(0)
    return torch.cat(seen).cpu()


def test_replicas_see_the_rows_of_one_global_batch(pools: dict[int, Pool]) -> None:
    seen = pools[4].run_mesh(2, 2, batches_seen)
    assert torch.equal(seen[0], seen[1]) and torch.equal(seen[2], seen[3])
    rows, _ = Corpus(TEXT, TEXT).batch(6, 8, seed=0, step=0)
    assert torch.equal(torch.cat([seen[0], seen[2]]), rows) and len(rows.unique(dim=0)) == 8


# -- the optimizer


def test_norms_and_biases_do_not_decay() -> None:
    trainer = Trainer(TINY, single_device(), None, torch.device("cpu"), Corpus(TEXT, TEXT))
    model = Decoder(replace(MODEL, vocab_size=256), group=single_device())
    optimizer = trainer._optimizer(model)
    decays = {p: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        assert decays[parameter] == (0.0 if "norm" in name or name.endswith("bias") else TINY.weight_decay), name
    assert set(decays.values()) == {0.0, 0.1}


def test_the_learning_rate_rises_and_falls() -> None:
    config = TrainConfig(lr=2.0, warmup=4, steps=12)
    rates = [config.learning_rate(step) for step in range(13)]
    assert rates[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert rates[8] == pytest.approx(1.1) and rates[12] == pytest.approx(0.2)
    assert rates[4:] == sorted(rates[4:], reverse=True)
