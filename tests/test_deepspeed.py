"""DeepSpeed's ZeRO beside tensor parallelism against the single device, and the faults that our helper corrects or refuses."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.elastic.utils.distributed import get_free_port

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed (make install says why)")

import deepspeed

import launch.deepspeed as ours
from parallel.group import TPGroup, single_device
from parallel.state import gather_state, scatter_state
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
MULTI_QUERY = ModelConfig(vocab_size=19, dim=16, layers=2, heads=4, kv_heads=1, d_ff=12, init_std=0.2, bias=True)
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
EVEN = replace(MULTI_QUERY, vocab_size=20)
ONE_LAYER = replace(MULTI_QUERY, layers=1)
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
            # By default parameters as small as these are never partitioned, and all gradients fit one bucket.
            "zero_optimization": {
                "stage": self.stage,
                "stage3_param_persistence_threshold": 0,
                "stage3_prefetch_bucket_size": 300,
                "reduce_bucket_size": 600,
            },
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


def train(
    mesh: DeviceMesh, cases: list[Case]
) -> list[tuple[Tensor, list[float | None], dict[str, Tensor], dict[str, Tensor]]]:
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
            pairs = ((before, after), (expected.before, expected.after))
            assert norms == pytest.approx(expected.norms, rel=1e-5 if exact else 0.04), where
            for name, value in expected.after.items():
                if exact:
                    assert torch.equal(before[name], expected.before[name]), f"{where}: {name} at the beginning"
                    distance = (after[name] - value).abs().max()
                    assert distance < 1e-5, f"{where}: {name} differs by {distance:.2g}"
            update, due = (torch.cat([(b[n].float() - a[n].float()).flatten() for n in expected.after]) for a, b in pairs)
            assert (update - due).norm() < (1e-4 if exact else 0.2) * due.norm(), where


# -- the matrix


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("tp", "dp"), MESHES)
def test_ten_steps_are_those_of_one_device(pools: dict[int, Pool], tp: int, dp: int, stage: int) -> None:
    """SGD shows a wrong clip factor, which Adam hides. Over 4 ranks all models but GPT share KV rows, over 2 MULTI_QUERY.

    ONE_LAYER in two parameter groups has the shared rows on both sides of a boundary between ZeRO's partitions.
    """
    cases = [
        Case(UNEVEN, stage, sequence_parallel=stage % 2 == 0),
        Case(ONE_LAYER, stage, accumulation=2, sequence_parallel=stage % 2 == 1, groups=2),
        Case((UNEVEN, GPT, MULTI_QUERY, GPT)[stage], stage, "AdamW", accumulation=2, sequence_parallel=True),
    ]
    check(pools, tp, dp, cases)


@pytest.mark.parametrize("stage", STAGES)
def test_other_ways_to_build_the_model(pools: dict[int, Pool], stage: int) -> None:
    cases = [
        Case(TWO_NORMS, stage, sequence_parallel=True, accumulation=2),
        Case(GPT, stage, checkpointing=True),
        Case(MULTI_QUERY, stage, virtual_shards=4, sequence_parallel=True),
        Case(UNEVEN, stage, "AdamW", clip=0.0),
    ]
    check(pools, 2, 1, cases)


def test_data_parallel_replicas_alone(pools: dict[int, Pool]) -> None:
    check(pools, 1, 4, [Case(UNEVEN, 1), Case(MULTI_QUERY, 3, "AdamW", accumulation=2)])


@pytest.mark.parametrize("stage", STAGES)
def test_bfloat16(pools: dict[int, Pool], stage: int) -> None:
    cases = [
        Case(UNEVEN, stage, dtype="bfloat16", sequence_parallel=True),
        Case(MULTI_QUERY, stage, "AdamW", dtype="bfloat16", accumulation=2),
    ]
    if stage:  # at stage 1 this is another optimizer of DeepSpeed's
        cases.append(Case(MULTI_QUERY, stage, dtype="bfloat16", grad_accum_dtype="fp32"))
    check(pools, 2, 1, cases)


def test_c32_global_norm_on_two_ranks_is_that_of_one(pools: dict[int, Pool]) -> None:
    """Sharded and replicated parameters each count as they are, whatever the dtype and whether ZeRO flattens them."""
    for dtype, tolerance in (("float32", 1e-5), ("bfloat16", 0.02)):
        for model in (UNEVEN, MULTI_QUERY):
            cases = [Case(model, stage, dtype=dtype) for stage in (0, 1)]
            expected = one_device(cases[0].on_one_device).norms[0]
            for rank in pools[2].run_mesh(2, 1, first_norms, cases):
                assert rank == pytest.approx([expected] * 2, rel=tolerance)


def first_norms(mesh: DeviceMesh, cases: list[Case]) -> list[float | None]:
    norms = []
    for case in cases:
        engine = make_engine(mesh, case)
        step_of(engine, mesh, 0, case.accumulation)
        norms.append(engine.get_global_grad_norm())
        engine.destroy()
    return norms


def make_engine(mesh: DeviceMesh, case: Case, **settings: Any) -> ours.TensorParallelEngine:
    model = case.make_model(TPGroup.from_mesh(mesh["tp"]))
    return ours.initialize(model, mesh, case.settings(mesh["dp"].size()) | settings, case.make_optimizer(model))


def norms_without(mesh: DeviceMesh, correction: str, cases: list[Case]) -> list[float | None]:
    """What DeepSpeed computes when one of our corrections is left out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ours, correction, lambda *_: None)
        return first_norms(mesh, cases)


@pytest.mark.parametrize(
    ("correction", "cases"),
    [
        ("_tag", [Case(UNEVEN, stage) for stage in (1, 2, 3)]),
        ("correct_norms", [Case(MULTI_QUERY, stage) for stage in (1, 2, 3)]),
        ("correct_norms", [Case(UNEVEN, 0, dtype="bfloat16")]),
        ("correct_norms", [Case(MULTI_QUERY, 1, dtype="bfloat16", grad_accum_dtype="fp32")]),
    ],
)
def test_each_correction_is_needed(pools: dict[int, Pool], correction: str, cases: list[Case]) -> None:
    """So that one that is not any more shows: after an upgrade of DeepSpeed, say."""
    expected = one_device(cases[0].on_one_device).norms[0]
    assert expected
    for rank in pools[2].run_mesh(2, 1, norms_without, correction, cases):
        assert all(norm and abs(norm / expected - 1) > 0.03 for norm in rank), rank


# -- batch sizes and settings


def test_batch_sizes_count_data_parallel_replicas() -> None:
    sizes = ours.BatchSizes(12, 3, 2)
    for given in (sizes._asdict(), {"train_batch_size": 12, "gradient_accumulation_steps": 2}):
        assert ours.batch_sizes(given, 2, 4) == sizes
    assert ours.batch_sizes({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}, 2, 4) == sizes
    assert ours.batch_sizes({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 3}, 2, 4) == sizes
    assert ours.batch_sizes({"train_batch_size": 12}, 2, 4) == (12, 6, 1)
    assert ours.batch_sizes({"train_micro_batch_size_per_gpu": 3}, 2, 4) == (6, 3, 1)
    for wrong in (
        {"train_batch_size": 5},
        {"train_batch_size": 1},
        {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 4},
    ):
        with pytest.raises(ValueError, match=r"train_batch_size \d+ is not .*DP 2; .* TP 4"):
            ours.batch_sizes(wrong, 2, 4)
    with pytest.raises(ValueError, match="train_batch_size must be a whole number, got 'auto'"):
        ours.batch_sizes({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 3}, 2, 4)
    with pytest.raises(ValueError, match="needs train_batch_size or train_micro_batch_size_per_gpu"):
        ours.batch_sizes({"gradient_accumulation_steps": 2}, 2, 4)


def batch_of_two(mesh: DeviceMesh, total: int) -> int:
    """The engine's batch size; an error has what had been communicated at its end."""
    model = Decoder(MULTI_QUERY, group=TPGroup.from_mesh(mesh["tp"]))
    settings = {"train_batch_size": total, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    with OpRecord() as record:
        try:
            engine = ours.initialize(model, mesh, settings, torch.optim.SGD(model.parameters()))
        except ValueError as error:
            raise ValueError(f"{error} {record.collectives}") from error
    size = engine.train_batch_size()
    engine.destroy()
    return size


def test_c88_four_ranks_in_pairs_have_a_batch_of_two(pool: Pool) -> None:
    assert pool.run_mesh(2, 2, batch_of_two, 2) == [2] * 4
    with pytest.raises(ValueError, match=r"train_batch_size 4 is not .* 2 data-parallel replicas \(DP 2; .* TP 2, .*\) \[\]"):
        pool.run_mesh(2, 2, batch_of_two, 4)


SETTINGS = Case(MULTI_QUERY).settings(1)


def initialize_with(mesh: DeviceMesh, settings: dict[str, Any], optimizer: str = "SGD", model: ModelConfig = UNEVEN) -> None:
    decoder = Decoder(model, group=TPGroup.from_mesh(mesh["tp"]))
    made = None if "optimizer" in settings else getattr(torch.optim, optimizer)(decoder.parameters())
    ours.initialize(decoder, mesh, SETTINGS | settings, made)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"data_types": {"grad_accum_dtype": torch.float32}}, r"must be JSON: data_types.grad_accum_dtype is torch.float32"),
        ({"a": [1, {2}]}, r"must be JSON: a\[1\] is \{2\}, a set"),
        ({"optimizer": {"type": "Muon"}}, "Muon needs whole matrices, and each of the 2 tensor-parallel ranks"),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel.autotp_size replaces the mpu"),
        ({"sequence_parallel_size": 2}, "sequence_parallel_size replaces the data-parallel groups"),
        ({"hybrid_engine": {"enabled": True}}, "hybrid_engine merges shards"),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}, "zero_hpz_partition_size makes groups"),
    ],
)
def test_settings_that_would_go_wrong(pools: dict[int, Pool], settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        pools[2].run_mesh(2, 1, initialize_with, settings)


def test_optimizers_of_whole_matrices(pools: dict[int, Pool]) -> None:
    with pytest.raises(ValueError, match="Adafactor needs whole matrices"):
        pools[2].run_mesh(2, 1, initialize_with, {}, "Adafactor")
    with pytest.raises(ValueError, match="Adafactor needs whole matrices"):
        pools[2].run_mesh(2, 1, made_later)
    with pytest.raises(ValueError, match="Muon needs whole matrices"):
        pools[2].run_mesh(2, 1, by_the_documented_way, {"optimizer": {"type": "Muon"}})


def made_later(mesh: DeviceMesh) -> None:
    model = Decoder(UNEVEN, group=TPGroup.from_mesh(mesh["tp"]))
    ours.initialize(model, mesh, SETTINGS, torch.optim.Adafactor)


def by_the_documented_way(mesh: DeviceMesh, settings: dict[str, Any]) -> None:
    os.environ["LOCAL_RANK"] = str(torch.get_default_device().index or 0)
    model = Decoder(UNEVEN, group=TPGroup.from_mesh(mesh["tp"]))
    deepspeed.initialize(model=model, mpu=ours.mpu(mesh), config=SETTINGS | settings)


def test_offload_where_ranks_share_rows(pools: dict[int, Pool]) -> None:
    settings = {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "zero_force_ds_cpu_optimizer": False,
    }
    with pytest.raises(
        ValueError, match=r"offload_optimizer does not work where ranks share rows \(4 parameters .* 2 tensor-par"
    ):
        pools[2].run_mesh(2, 1, initialize_with, settings, "SGD", MULTI_QUERY)


def named_adam(mesh: DeviceMesh) -> str:
    """The config's AdamW: DeepSpeed's own would be compiled first."""
    engine = make_engine_of(mesh, {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": (0.8, 0.9)}}})
    kind = engine.basic_optimizer
    engine.destroy()
    return f"{type(kind).__module__}.{type(kind).__name__}"


def make_engine_of(mesh: DeviceMesh, settings: dict[str, Any]) -> ours.TensorParallelEngine:
    return ours.initialize(Decoder(UNEVEN, group=TPGroup.from_mesh(mesh["tp"])), mesh, SETTINGS | settings)


@pytest.mark.skipif(device_type() != "cpu", reason="on GPUs it is DeepSpeed's fused one")
def test_an_optimizer_of_the_config_needs_no_compiler(pools: dict[int, Pool]) -> None:
    assert pools[2].run_mesh(2, 1, named_adam) == ["torch.optim.adamw.AdamW"] * 2


def wrong_mesh(mesh: DeviceMesh, kind: str) -> None:
    ranks = torch.arange(2).view(1, 2) if kind == "names" else torch.tensor([[1, 0]])
    names = ("replicas", "shards") if kind == "names" else ("dp", "tp")
    ours.mpu(DeviceMesh(mesh.device_type, ranks, mesh_dim_names=names))


def test_meshes_that_do_not_fit(pools: dict[int, Pool]) -> None:
    with pytest.raises(ValueError, match=r"dimensions \(\"dp\", \"tp\"\), this one has \('replicas', 'shards'\)"):
        pools[2].run_mesh(2, 1, wrong_mesh, "names")
    with pytest.raises(ValueError, match=r"all 2 ranks with rank = dp \* tp_size \+ tp, this one is \[\[1, 0\]\]"):
        pools[2].run_mesh(2, 1, wrong_mesh, "order")
    with pytest.raises(ValueError, match=r"mesh of all 4 ranks .* this one is \[\[0, 1\]\]"):
        pools[4].run_mesh(2, 1, initialize_with, {})


def unit_of(mesh: DeviceMesh) -> list[int]:
    unit = ours.mpu(mesh)
    return [
        unit.get_model_parallel_rank(),
        unit.get_model_parallel_world_size(),
        torch.distributed.get_rank(unit.get_model_parallel_group()),
        unit.get_data_parallel_rank(),
        unit.get_data_parallel_world_size(),
        torch.distributed.get_rank(unit.get_data_parallel_group()),
    ]


def test_mpu(pools: dict[int, Pool]) -> None:
    expected = [[tp, 2, tp, dp, 2, dp] for dp in range(2) for tp in range(2)]
    assert pools[4].run_mesh(2, 2, unit_of) == expected


# -- models that do not fit


def built_for_one_rank(mesh: DeviceMesh) -> None:
    model = Decoder(UNEVEN, group=single_device())
    ours.initialize(model, mesh, SETTINGS, torch.optim.SGD(model.parameters()))


def test_a_model_that_is_cut_for_another_number_of_ranks(pools: dict[int, Pool]) -> None:
    with pytest.raises(ValueError, match=r"embedding.weight is cut over 1 ranks, the mesh has 2 tensor-parallel ranks"):
        pools[2].run_mesh(2, 1, built_for_one_rank)


def built_on_meta(mesh: DeviceMesh) -> None:
    model = Decoder(UNEVEN, group=TPGroup.from_mesh(mesh["tp"]), device="meta")
    ours.initialize(model, mesh, SETTINGS, torch.optim.SGD(model.parameters()))


class OtherAccelerator:
    def device_name(self) -> str:
        return "other"


def with_another_accelerator(mesh: DeviceMesh) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ours, "get_accelerator", OtherAccelerator)
        initialize_with(mesh, {})


def test_a_model_elsewhere(pools: dict[int, Pool]) -> None:
    with pytest.raises(ValueError, match=r"the model has no values yet, it is on the meta device"):
        pools[2].run_mesh(2, 1, built_on_meta)
    with pytest.raises(
        ValueError, match=r"the model is on (\w+)(:\d)?, DeepSpeed has chosen other: set DS_ACCELERATOR=\1 before"
    ):
        pools[2].run_mesh(2, 1, with_another_accelerator)


def shards_without_layouts(mesh: DeviceMesh, width: int) -> None:
    """Linears cut by hand: ``width`` rows on rank 0, 4 on rank 1, with values of their own."""
    rank = mesh.get_local_rank("tp")
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(4, 4 if rank else width))
    ours.initialize(model, mesh, SETTINGS, torch.optim.SGD(model.parameters()))


def test_shards_that_no_layout_tells_of(pools: dict[int, Pool]) -> None:
    with pytest.raises(ValueError, match=r"0.weight has no layout, and its shape is \(3, 4\) on rank 0, \(4, 4\) on rank 1"):
        pools[2].run_mesh(2, 1, shards_without_layouts, 3)
    with pytest.raises(ValueError, match=r"2 parameters differ between the ranks that hold them: 0.weight .* needs a layout"):
        pools[2].run_mesh(2, 1, shards_without_layouts, 4)


def built_in_zero_init(mesh: DeviceMesh, config: ModelConfig, with_mpu: bool) -> None:
    os.environ.setdefault("LOCAL_RANK", "0")  # as torchrun would
    settings = SETTINGS | {"zero_optimization": {"stage": 3}}
    given = {"mpu": ours.mpu(mesh)} if with_mpu else {"data_parallel_group": mesh.get_group("dp")}
    with deepspeed.zero.Init(config_dict_or_path=settings, **given):
        model = Decoder(config, group=TPGroup.from_mesh(mesh["tp"]), seed=None)
    ours.initialize(model, mesh, settings, torch.optim.SGD(model.parameters()))


@pytest.mark.parametrize("config", [EVEN, UNEVEN], ids=["even", "uneven"])
def test_zero_init_with_an_mpu(pools: dict[int, Pool], config: ModelConfig) -> None:
    """DeepSpeed would partition over the tensor-parallel ranks, too: gloo aborts if their shards differ in size."""
    with pytest.raises(ValueError, match=r"zero.Init partitions over all ranks whatever its mpu, the 2 tensor-parallel ones"):
        pools[2].run_mesh(2, 1, built_in_zero_init, config, True)


def test_a_model_that_is_partitioned_already(pools: dict[int, Pool]) -> None:
    with pytest.raises(ValueError, match=r"embedding.weight is partitioned already, by deepspeed.zero.Init. Build the model"):
        pools[2].run_mesh(2, 1, built_in_zero_init, UNEVEN, False)


def with_another_models_optimizer(mesh: DeviceMesh) -> None:
    model, other = (Decoder(EVEN, group=TPGroup.from_mesh(mesh["tp"])) for _ in range(2))
    ours.initialize(model, mesh, SETTINGS, torch.optim.SGD(other.parameters()))


def test_an_optimizer_of_another_model(pools: dict[int, Pool]) -> None:
    with pytest.raises(ValueError, match=r"the optimizer has 23 parameters that are not the model's, among them one of shape"):
        pools[2].run_mesh(2, 1, with_another_models_optimizer)


# -- deepspeed.initialize without the helper


def without_mpu(mesh: DeviceMesh) -> list[bool]:
    model = Decoder(UNEVEN, group=TPGroup.from_mesh(mesh["tp"]))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    os.environ["LOCAL_RANK"] = str(torch.get_default_device().index or 0)
    with pytest.raises(ValueError, match=r"cut over 2 tensor-parallel ranks, and deepspeed.initialize was not told of them"):
        deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters()), config=dict(SETTINGS))
    return [torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]


def test_a_forgotten_mpu(pools: dict[int, Pool]) -> None:
    """DeepSpeed would copy rank 0's shards to the other tensor-parallel ranks."""
    for unchanged in pools[2].run_mesh(2, 1, without_mpu):
        assert all(unchanged)


def with_mpu(mesh: DeviceMesh, case: Case) -> list[float | None]:
    model = case.make_model(TPGroup.from_mesh(mesh["tp"]))
    os.environ.pop("LOCAL_RANK", None)  # which DeepSpeed insists on, and who starts ranks by hand need not know
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=case.make_optimizer(model), mpu=ours.mpu(mesh), config=case.settings(mesh["dp"].size())
    )
    norms = []
    for step in range(3):
        step_of(engine, mesh, step, case.accumulation)
        norms.append(engine.get_global_grad_norm())
    engine.destroy()
    return norms


@pytest.mark.parametrize("stage", STAGES)
def test_the_documented_way_in_gives_the_same_engine(pools: dict[int, Pool], stage: int) -> None:
    case = Case(MULTI_QUERY, stage)
    for norms in pools[2].run_mesh(2, 1, with_mpu, case):
        assert norms == pytest.approx(one_device(case.on_one_device).norms[:3], rel=1e-5)


def plain_model(mesh: DeviceMesh) -> str:
    model = nn.Linear(4, 4)
    os.environ["LOCAL_RANK"] = str(torch.get_default_device().index or 0)
    deepspeed.utils.groups.mpu = None  # it keeps the last engine's
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters()), config=dict(SETTINGS))
    name = type(engine).__name__
    engine.destroy()
    return name


def test_models_that_are_not_cut_are_left_alone(pools: dict[int, Pool]) -> None:
    assert pools[2].run_mesh(1, 2, plain_model) == ["DeepSpeedEngine"] * 2


# -- the whole model, checkpoints


def saved_whole(mesh: DeviceMesh, case: Case, folder: Path) -> tuple[dict[str, Tensor], bool]:
    engine = make_engine(mesh, case)
    step_of(engine, mesh, 0, case.accumulation)
    engine.save_16bit_model(folder)
    state = ours.gather_state(engine)
    engine.destroy()
    written = torch.load(folder / "pytorch_model.bin", weights_only=True)
    return state, written.keys() == state.keys() and all(torch.equal(written[name], t.cpu()) for name, t in state.items())


@pytest.mark.parametrize("stage", STAGES)
def test_save_16bit_model_writes_the_whole_model(pools: dict[int, Pool], tmp_path: Path, stage: int) -> None:
    case = Case(UNEVEN, stage, dtype="bfloat16")
    whole = case.make_model(single_device())
    for state, as_written in pools[2].run_mesh(2, 1, saved_whole, case, tmp_path):
        assert as_written
        scatter_state(whole, state, single_device())  # a ValueError if a name or shape were not the single device's
        assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}


def goes_on(mesh: DeviceMesh, case: Case, folder: Path) -> bool:
    """Whether a new engine with other weights continues from a checkpoint with the bits of the one that saved it."""
    ends = []
    for part in ("saves", "loads"):
        model = case.make_model(TPGroup.from_mesh(mesh["tp"]))
        if part == "loads":
            model.initialise(1)
        engine = ours.initialize(model, mesh, case.settings(mesh["dp"].size()), case.make_optimizer(model))
        if part == "saves":
            for step in range(3):
                step_of(engine, mesh, step, case.accumulation)
            engine.save_checkpoint(folder, client_state={"note": "kept"})
        else:
            _, client_state = engine.load_checkpoint(folder)
            assert client_state["note"] == "kept" and engine.global_steps == 3
        losses = [step_of(engine, mesh, step, case.accumulation) for step in (3, 4)]
        ends.append([*losses, torch.tensor(engine.get_global_grad_norm()), *ours.gather_state(engine).values()])
        engine.destroy()
    return all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def loads(mesh: DeviceMesh, case: Case, folder: Path) -> None:
    engine = make_engine(mesh, case)
    try:
        engine.load_checkpoint(folder)
    finally:
        engine.destroy()


@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_goes_on_with_the_same_bits(pools: dict[int, Pool], tmp_path: Path, stage: int) -> None:
    case = Case(MULTI_QUERY, stage, "AdamW", accumulation=2)
    assert all(pools[2].run_mesh(2, 1, goes_on, case, tmp_path))
    told = "was saved with tensor-parallel ranks 2, now 1; data-parallel replicas 1, now 2, and DeepSpeed cannot convert it"
    with pytest.raises(ValueError, match=told):
        pools[2].run_mesh(1, 2, loads, case, tmp_path)
    with pytest.raises(
        ValueError, match=rf"was saved with ZeRO stage {stage}, now {(stage + 1) % 4}, and DeepSpeed cannot convert it"
    ):
        pools[2].run_mesh(2, 1, loads, replace(case, stage=(stage + 1) % 4), tmp_path)
    with pytest.raises(ValueError, match=r"was saved with dtype float32, now bfloat16"):
        pools[2].run_mesh(2, 1, loads, replace(case, dtype="bfloat16"), tmp_path)


def test_a_checkpoint_of_both_kinds_of_ranks(pools: dict[int, Pool], tmp_path: Path) -> None:
    for stage in (1, 3):
        assert all(pools[4].run_mesh(2, 2, goes_on, Case(UNEVEN, stage, "AdamW", dtype="bfloat16"), tmp_path / str(stage)))


def test_a_folder_without_a_checkpoint(pools: dict[int, Pool], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no checkpoint: the file .*latest is missing"):
        pools[2].run_mesh(2, 1, loads, Case(), tmp_path)
    (tmp_path / "latest").write_text("global_step7")
    with pytest.raises(ValueError, match=r"global_step7 is no checkpoint that an engine of launch.deepspeed saved"):
        pools[2].run_mesh(2, 1, loads, Case(), tmp_path)


# -- as programs


DOCUMENT = (ROOT / "docs" / "deepspeed.md").read_text()
EXAMPLE = re.search(r"```python\n(# mine_ds.py.*?)```", DOCUMENT, re.DOTALL)


@pytest.mark.slow
def test_the_example_of_the_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun, as plain Python (which would need mpi4py), and with nothing compiled for it."""
    assert EXAMPLE is not None
    (tmp_path / "mpi4py.py").write_text("raise ModuleNotFoundError('mpi4py is missing')\n")
    (tmp_path / "mine_ds.py").write_text(EXAMPLE[1])
    assert len(EXAMPLE[1].splitlines()) <= 40
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    printed = []
    for ended in (torchrun(2, "mine_ds.py", cwd=tmp_path), python("mine_ds.py", cwd=tmp_path)):
        assert ended.code == 0, ended.errors
        printed.append([float(x) for x in re.findall(r"(?:loss|norm) (\d+\.\d+)", ended.output)])
    told = [float(x) for x in re.findall(r"(?:loss|norm) (\d+\.\d+)", DOCUMENT)]
    assert len(told) == 10 and printed[0] == pytest.approx(told, abs=2e-3)
    assert printed[1] == pytest.approx(told, abs=2e-3)
    assert not (tmp_path / "extensions").exists() or not list((tmp_path / "extensions").rglob("*.so"))


@pytest.mark.slow
def test_numactl_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's launcher starts the example without it, and names it where it is asked to bind ranks to cores."""
    assert EXAMPLE is not None
    (tmp_path / "mine_ds.py").write_text(EXAMPLE[1])
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    launcher = ("-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", str(get_free_port()))
    ended = python(*launcher, "mine_ds.py", cwd=tmp_path)
    assert ended.code == 0, ended.errors
    told, printed = (re.findall(r"step \d: loss \d+\.\d", text) for text in (DOCUMENT, ended.output))
    assert len(told) == 5 and printed == told
    ended = python(*launcher, "--bind_cores_to_rank", "mine_ds.py", cwd=tmp_path)
    assert ended.code != 0 and "No such file or directory: 'numactl'" in ended.errors
