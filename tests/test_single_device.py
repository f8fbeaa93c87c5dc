"""The single device needs no torch.distributed, and the ways to make a TPGroup."""

from __future__ import annotations

import copy
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from parallel.collectives import all_reduce
from parallel.gradients import check_replicas, clip_grad_norm_
from parallel.group import TPGroup, single_device
from parallel.linear import ColumnParallelLinear
from tests.helpers import OpRecord
from tests.pool import Pool
from tpblock.config import ModelConfig, Placement
from tpblock.model import Decoder

ROOT = Path(__file__).parents[1]
CONFIG = ModelConfig(vocab_size=11, dim=8, layers=1, heads=2, dropout=0.1, attention_dropout=0.1)


def in_a_fresh_process(code: str, **environment: str) -> str:
    """The output of a Python program that sees this clone and no variables of torchrun but those given."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_training_without_torch_distributed() -> None:
    """Everything that could start a process group is made to fail."""
    out = in_a_fresh_process(
        """
        import torch, torch.distributed as dist
        def refuse(*args, **kwargs):
            raise AssertionError("torch.distributed was used")
        for name in ("init_process_group", "new_group", "all_reduce", "barrier", "get_rank", "get_world_size"):
            setattr(dist, name, refuse)
        from parallel.gradients import check_replicas, clip_grad_norm_, sync_replicated
        from parallel.state import gather_state, scatter_state
        from tpblock import Block, Decoder, ModelConfig, Placement, Stack, TPGroup, single_device
        group = single_device()
        for placement in Placement:
            config = ModelConfig(vocab_size=11, dim=8, layers=2, heads=4, kv_heads=2, dropout=0.1, placement=placement)
            for sequence_parallel in (False, True):
                model = Decoder(config, group=group, sequence_parallel=sequence_parallel)
                optimizer = torch.optim.AdamW(model.parameters())
                ids = torch.arange(10).view(2, 5)
                for step in range(2):
                    loss = model(ids, ids.roll(-1), step=step)
                    loss.backward()
                    clip_grad_norm_(model, 1.0, group)
                    optimizer.step()
            check_replicas(model, group)
            sync_replicated(model, group)
            scatter_state(model, gather_state(model, group), group)
            model.eval()(ids)
            Stack(config, group=group).eval()(torch.ones(2, 3, 8))
            Block(config, group=group).eval()(torch.ones(2, 3, 8))
        print(dist.is_initialized(), TPGroup.from_environment() == group == TPGroup(), loss.isfinite().item())
        """
    )
    assert out == "False True True\n"


def trained(group: TPGroup) -> list[str]:
    model = Decoder(CONFIG, group=group, sequence_parallel=True)
    ids = torch.arange(10).view(2, 5)
    with OpRecord() as record:
        model(ids, ids, step=0).backward()
        clip_grad_norm_(model, 1.0, group)
        check_replicas(model, group)
    return record.collectives


def test_the_single_device_sends_nothing(pool: Pool) -> None:
    assert trained(single_device()) == []
    assert all(pool.run(2, trained))  # the record would show it


# -- random state


def random_states() -> list[Tensor]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_available():
        states += torch.cuda.get_rng_state_all()
    return states


@pytest.mark.parametrize("placement", Placement)
def test_building_and_training_leave_the_global_random_state_alone(placement: Placement) -> None:
    import random

    import numpy as np

    python, numpy, before = random.getstate(), np.random.get_state()[1].copy(), random_states()
    model = Decoder(ModelConfig(**{**vars(CONFIG), "placement": placement}), group=single_device())
    ids = torch.arange(10).view(2, 5)
    model(ids, ids, step=0).backward()
    assert all(torch.equal(a, b) for a, b in zip(before, random_states(), strict=True))
    assert random.getstate() == python
    assert (np.random.get_state()[1] == numpy).all()


def test_the_global_random_state_does_not_matter() -> None:
    models = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        models.append(Decoder(CONFIG, group=single_device(), seed=7))
    ids = torch.arange(10).view(2, 5)
    losses = [model(ids, ids, step=3) for model in models]
    assert torch.equal(*losses)
    assert not torch.equal(losses[0], Decoder(CONFIG, group=single_device(), seed=8)(ids, ids, step=3))
    assert not torch.equal(losses[0], models[0](ids, ids, step=4))


# -- making groups


def test_the_single_device_by_itself() -> None:
    group = single_device()
    assert (group.rank, group.size, group.process_group) == (0, 1, None)
    assert group == TPGroup() and copy.deepcopy(group) is group


@pytest.mark.parametrize(("rank", "size"), [(1, 1), (-1, 2), (2, 2), (0, 0)])
def test_ranks_outside_the_group(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} is outside a tensor-parallel group of size {size}"):
        TPGroup(rank, size)


def test_several_ranks_need_a_process_group_to_communicate() -> None:
    """Without one a group still tells what each rank holds, on the meta device."""
    group = TPGroup(1, 2)
    linear = ColumnParallelLinear(4, 7, group=group, device="meta", seed=None)
    assert linear.weight.shape == (3, 4)
    with pytest.raises(ValueError, match="a tensor-parallel group of size 2 needs a process group to communicate"):
        all_reduce(torch.ones(2), group)


def test_a_group_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        single_device().size = 2


def from_process_group(group: TPGroup) -> tuple[Any, ...]:
    assert group.process_group is not None
    again = TPGroup.from_process_group(group.process_group)
    total = torch.full((1,), float(group.rank))
    dist.all_reduce(total, group=again.process_group)
    return again == group, again.rank, again.size, again.name == group.name, total.item()


def test_from_process_group(pool: Pool) -> None:
    assert pool.run(3, from_process_group) == [(True, rank, 3, True, 3.0) for rank in range(3)]


def not_a_member(group: TPGroup) -> str:
    others = dist.new_group([0], use_local_synchronization=False)
    if group.rank == 0:
        return str(TPGroup.from_process_group(others) == single_device())
    with pytest.raises(ValueError) as caught:
        TPGroup.from_process_group(others)
    return str(caught.value)


def test_from_a_process_group_of_one_or_of_others(pool: Pool) -> None:
    expected = "this process is not a member of the process group that it was given"
    assert pool.run(4, not_a_member) == ["True", *[expected] * 3]


def from_mesh(mesh: DeviceMesh) -> tuple[Any, ...]:
    tp, dp = TPGroup.from_mesh(mesh["tp"]), TPGroup.from_mesh(mesh["dp"])
    with pytest.raises(ValueError) as caught:
        TPGroup.from_mesh(mesh)
    return tp.rank, tp.size, tp.process_group is None, dp.rank, dp.size, str(caught.value)


def test_from_mesh(pool: Pool) -> None:
    for tp, dp in ((2, 2), (4, 1), (1, 2)):
        results = pool.run_mesh(tp, dp, from_mesh)
        assert [r[:5] for r in results] == [(rank % tp, tp, tp == 1, rank // tp, dp) for rank in range(tp * dp)]
        for result in results:
            assert result[5] == (
                "TPGroup needs a mesh of one dimension, this one has 2 (('dp', 'tp')): slice it first, as in mesh[\"tp\"]"
            )


def from_environment(group: TPGroup) -> tuple[int, int]:
    import os
    from unittest import mock

    with mock.patch.dict(os.environ, WORLD_SIZE="4"):
        made = TPGroup.from_environment()
    with mock.patch.dict(os.environ, WORLD_SIZE="1"):
        assert TPGroup.from_environment() == single_device()
    return made.rank, made.size


def test_from_environment(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pool.run(4, from_environment) == [(rank, 4) for rank in range(4)]
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert TPGroup.from_environment() == single_device()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"torchrun started 2 ranks: call torch\.distributed\.init_process_group\(\) before"):
        TPGroup.from_environment()
