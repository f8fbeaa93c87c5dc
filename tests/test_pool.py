"""The pool itself: that a failure on some rank cannot pass unseen, and that the pool serves the next test all the same."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from parallel.group import TPGroup
from tests.pool import Pool, WorkerError


def describe(group: TPGroup, extra: Tensor) -> tuple[int, int, Tensor, int]:
    total = torch.full((2,), float(group.rank), dtype=torch.bfloat16)
    if group.size > 1:
        dist.all_reduce(total, group=group.process_group)
    return group.rank, group.size, total + extra.to(total.device), torch.get_num_threads()


def coordinates(mesh: DeviceMesh) -> tuple[int, int, int, int]:
    return mesh["dp"].get_local_rank(), mesh["tp"].get_local_rank(), TPGroup.from_mesh(mesh["tp"]).size, dist.get_rank()


def fail(group: TPGroup, ranks: tuple[int, ...]) -> None:
    if group.rank in ranks:
        raise ValueError(f"{group.rank} will not")


def fail_before_a_collective(group: TPGroup) -> None:
    fail(group, (1,))
    dist.barrier(group.process_group)


def die(group: TPGroup) -> None:
    if group.rank == 1:
        os._exit(3)


def oversleep(group: TPGroup) -> None:
    if group.rank == 1:
        time.sleep(60)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_rank_answers(pool: Pool, ranks: int) -> None:
    results = pool.run(ranks, describe, torch.ones(2))
    assert [r[:2] for r in results] == [(rank, ranks) for rank in range(ranks)]
    for result in results:
        assert torch.equal(result[2], torch.full((2,), sum(range(ranks)) + 1.0, dtype=torch.bfloat16))
        assert result[2].device.type == "cpu"
        assert result[3] == 1


@pytest.mark.parametrize(("tp", "dp"), [(2, 2), (1, 2), (2, 1), (3, 1), (4, 1)])
def test_mesh(pool: Pool, tp: int, dp: int) -> None:
    assert pool.run_mesh(tp, dp, coordinates) == [(rank // tp, rank % tp, tp, rank) for rank in range(tp * dp)]


def test_the_same_error_on_all_ranks_comes_through(pool: Pool) -> None:
    pids = pool.pids()
    with pytest.raises(ValueError, match="0 will not") as caught:
        pool.run(3, fail, (0, 1, 2))
    notes = "".join(caught.value.__notes__)
    assert all(f"rank {rank} of 3" in notes for rank in range(3))
    assert "in fail\n" in notes
    assert pool.pids() == pids  # all in step: no need to start anew


def test_an_error_on_some_ranks_is_another_error(pool: Pool) -> None:
    with pytest.raises(WorkerError, match="1 of 2 ranks failed: rank 1: ValueError: 1 will not"):
        pool.run(2, fail, (1,))
    assert len(pool.run(2, describe, torch.ones(2))) == 2


def test_ranks_left_in_a_collective_do_not_hang_the_test(pool: Pool) -> None:
    began = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        pool.run(2, fail_before_a_collective)
    assert time.monotonic() - began < 30
    rank_0, rank_1 = str(caught.value).split("--- rank ")[1:3]
    assert "in barrier" in rank_0 and "in fail_before_a_collective" in rank_0
    assert rank_1.startswith("1 raised") and "1 will not" in rank_1
    assert len(pool.run(4, describe, torch.ones(2))) == 4


def test_a_hang_shows_stacks(pool: Pool) -> None:
    with pytest.raises(WorkerError, match=r"no answer from ranks \[1\] after 1 s(.|\n)*in oversleep"):
        pool.run(2, oversleep, timeout=1)


def test_a_dead_rank_is_named(pool: Pool) -> None:
    with pytest.raises(WorkerError, match=r"ranks \[1\] died(.|\n)*rank 1 \(exit code 3\)"):
        pool.run(2, die)
