"""DeepSpeed's ZeRO beside tensor parallelism against the single device, and each fault that launch.deepspeed corrects or refuses."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed (make install says why)")

import deepspeed

import launch.deepspeed as ours
from parallel.group import TPGroup, single_device
from parallel.state import gather_state, named_layouts, scatter_state
from tests.helpers import OpRecord
from tests.pool import Pool, device_type
from tests.programs import ROOT, python, torchrun
from tpblock import Decoder, ModelConfig
from tpblock.config import Norm, Placement, Position

STEPS, BATCH, SEQ, CLIP = 10, 8, 6, 0.5
MESHES = [(2, 1), (2, 2), (4, 1)]
"""(tp, dp)."""
STAGES = [0, 1, 2, 3]

# 6 query and 3 KV heads: dealt 4 + 2 over 2 ranks; over 4, the first two share a KV head and the others have one each.
UNEVEN = ModelConfig(vocab_size=19, dim=24, layers=2, heads=6, kv_heads=3, d_ff=10, init_std=0.3)
MULTI_QUERY = ModelConfig(vocab_size=19, dim=16, layers=2, heads=4, kv_heads=1, d_ff=12, init_std=0.3, bias=True)
GPT = ModelConfig(
    vocab_size=19,
    dim=16,
    layers=2,
    heads=4,
    d_ff=12,
    init_std=0.3,
    bias=True,
    norm=Norm.LAYERNORM,
    position=Position.LEARNED,
    max_seq_len=SEQ,
    tied_embeddings=True,
    placement=Placement.PARALLEL,
)
TWO_NORMS = replace(MULTI_QUERY, placement=Placement.PARALLEL_TWO_NORMS)


@dataclass(frozen=True)
class Case:
    """A run of STEPS optimizer steps."""

    model: ModelConfig = UNEVEN
    stage: int = 1
    optimizer: str = "SGD"
    accumulation: int = 1
    sequence_parallel: bool = False
    checkpointing: bool = False
    clip: float = CLIP
    dtype: str = "float32"
    grad_accum_dtype: str | None = None
    virtual_shards: int | None = None
    groups: int = 1
    """Into how many parameter groups the optimizer's parameters are dealt."""

    def settings(self, dp: int) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": BATCH // dp // self.accumulation,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clip,
            "zero_optimization": {"stage": self.stage},
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": self.dtype == "bfloat16"},
            "fp16": {"enabled": self.dtype == "float16"},
        }
        if self.grad_accum_dtype:
            settings["data_types"] = {"grad_accum_dtype": self.grad_accum_dtype}
        return settings

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        parameters = list(model.parameters())
        groups = [{"params": parameters[i :: self.groups]} for i in range(self.groups)]
        if self.optimizer == "SGD":
            return torch.optim.SGD(groups, lr=0.1, momentum=0.5)
        return torch.optim.AdamW(groups, lr=3e-3, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1)

    def make_model(self, group: TPGroup) -> Decoder:
        return Decoder(
            self.model,
            group=group,
            sequence_parallel=self.sequence_parallel and group.size > 1,
            activation_checkpointing=self.checkpointing,
            virtual_shards=self.virtual_shards if group.size > 1 else None,
            dtype=getattr(torch, self.dtype),
        )

    @property
    def on_one_device(self) -> Case:
        """The case whose reference is this one's: what ranks, stages and dtypes must not change is left out."""
        return replace(
            self,
            stage=0,
            accumulation=1,
            sequence_parallel=False,
            checkpointing=False,
            dtype="float32",
            grad_accum_dtype=None,
            virtual_shards=None,
            groups=1,
        )


@dataclass
class Run:
    """Losses [STEPS] (this replica's), gradient norms before clipping [STEPS], global weights before and after."""

    losses: Tensor
    norms: list[float | None]
    before: dict[str, Tensor]
    after: dict[str, Tensor]


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cpu").manual_seed(step)
    text = torch.randint(19, (BATCH, SEQ + 1), generator=generator, device="cpu").to(torch.get_default_device())
    return text[:, :-1], text[:, 1:]


@cache
def one_device(case: Case) -> Run:
    """Plain torch: no DeepSpeed, no torch.distributed."""
    model = case.make_model(single_device())
    optimizer = case.make_optimizer(model)
    before, losses, norms = gather_state(model, single_device()), [], []
    for step in range(STEPS):
        loss = model(*batch_of(step))
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip or float("inf")).item())
        optimizer.step()
        losses.append(loss.detach())
    return Run(torch.stack(losses), norms, before, gather_state(model, single_device()))


def step_of(engine: Any, mesh: DeviceMesh, step: int, accumulation: int) -> Tensor:
    """One optimizer step on this replica's share of the global batch. Returns its mean loss."""
    losses = []
    dp, rank = mesh["dp"].size(), mesh.get_local_rank("dp")
    for ids, labels in zip(*(t.chunk(dp)[rank].chunk(accumulation) for t in batch_of(step)), strict=True):
        loss = engine(ids, labels=labels)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach().float())
    return torch.stack(losses).mean()


def train(mesh: DeviceMesh, cases: list[Case]) -> list[tuple[Tensor, list[float | None], dict[str, Tensor], dict[str, Tensor]]]:
    return [train_one(mesh, case) for case in cases]


def train_one(mesh: DeviceMesh, case: Case) -> tuple[Tensor, list[float | None], dict[str, Tensor], dict[str, Tensor]]:
    model = case.make_model(TPGroup.from_mesh(mesh["tp"]))
    engine = ours.initialize(model, mesh, case.settings(mesh["dp"].size()), case.make_optimizer(model))
    before, losses, norms = ours.gather_state(engine), [], []
    assert engine.get_global_grad_norm() is None or case.stage > 0 or case.dtype != "float32"
    for step in range(STEPS):
        losses.append(step_of(engine, mesh, step, case.accumulation))
        norms.append(engine.get_global_grad_norm())
    after = ours.gather_state(engine)
    engine.destroy()
    return torch.stack(losses), norms, before, after


def check(pools: dict[int, Pool], tp: int, dp: int, cases: list[Case]) -> None:
    """In float32 every number is that of the single device to 1e-5; in half precision losses and norms within rounding."""
    ranks = pools[tp * dp].run_mesh(tp, dp, train, cases)
    for i, case in enumerate(cases):
        expected, exact = one_device(case.on_one_device), case.dtype == "float32"
        assert not case.clip or min(n for n in expected.norms if n) > case.clip, "nothing would be clipped"
        losses = torch.stack([ranks[rank][i][0] for rank in range(tp * dp)])
        where = f"TP {tp}, DP {dp}, {case}"
        for rank in range(tp * dp):  # alike in a replica
            assert torch.equal(losses[rank], losses[rank // tp * tp]), where
        distance = (losses.mean(0) - expected.losses).abs().max()
        assert distance < (1e-5 if exact else 0.05), f"{where}: losses differ by {distance:.2g}"
        for _, norms, before, after in (ranks[rank][i] for rank in range(tp * dp)):
            assert norms == pytest.approx(expected.norms, rel=1e-5 if exact else 0.04), where
            for name, value in expected.after.items():
                if exact:
                    assert torch.equal(before[name], expected.before[name]), f"{where}: {name} at the beginning"
                update, due = after[name].float() - before[name].float(), value - expected.before[name]
                distance = (update - due).abs().max()
                assert distance < (1e-5 if exact else 0.2), f"{where}: {name} differs by {distance:.2g}"


@pytest.fixture(scope="module")
def pools(pool: Pool) -> Iterator[dict[int, Pool]]:
    """By number of ranks: DeepSpeed needs a mesh of the whole world."""
    pair = Pool(2)
    yield {2: pair, 4: pool}
    pair.close()


# -- the matrix


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("tp", "dp"), MESHES)
def test_ten_steps_are_those_of_one_device(pools: dict[int, Pool], tp: int, dp: int, stage: int) -> None:
    check(
        pools,
        tp,
        dp,
        [
            Case(UNEVEN, stage),
            Case(UNEVEN, stage, accumulation=2, sequence_parallel=True, optimizer="AdamW"),
            Case(MULTI_QUERY, stage, sequence_parallel=True, groups=2),
            Case(MULTI_QUERY, stage, accumulation=2, optimizer="AdamW"),
            Case(GPT, stage, accumulation=2, sequence_parallel=True),
        ],
    )
