"""Collectives of CPU tensors over gloo as direct exchanges: every rank sends each other rank what that one is to have, at once.

gloo's own collectives run on a thread of theirs, in rounds, each waiting for the one before; its reduce-scatter is an all-reduce
of a copy. A message between two ranks needs neither, so that small collectives take half the time, and reduce-scatters of any size
do (docs/performance.md). What arrives is added in the order of the ranks: all of them get the same bits.

The functions begin a collective of a contiguous x, which must stay as it is until the :data:`Pending` that they return was called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from parallel import traffic
from parallel.group import TPGroup

Pending = Callable[[], Tensor]
"""A collective under way: call it to wait for the result."""


def start_all_reduce(x: Tensor, group: TPGroup) -> Pending:
    """The sum of x over the ranks."""
    traffic.note("all_reduce", x.numel(), x.dtype, x.nbytes * (group.size - 1))
    return _start_sum([x] * group.size, group)


def start_reduce_scatter(x: Tensor, group: TPGroup, counts: Sequence[int]) -> Pending:
    """The sum of x [sum(counts), ...] over the ranks, of which each keeps its rows: [counts[rank], ...]."""
    given = x.detach().split(list(counts))
    traffic.note("reduce_scatter", x.numel(), x.dtype, x.nbytes - given[group.rank].nbytes)
    return _start_sum(given, group)


def start_all_gather(x: Tensor, group: TPGroup, counts: Sequence[int]) -> Pending:
    """The ranks' rows stacked: [counts[rank], ...] -> [sum(counts), ...]."""
    rows = x.new_empty(sum(counts), *x.shape[1:])
    traffic.note("all_gather", rows.numel(), x.dtype, x.nbytes * (group.size - 1))
    wait = _start([x.detach()] * group.size, rows.split(list(counts)), group)
    return lambda: wait() or rows


def start_all_to_all(x: Tensor, group: TPGroup, given: Sequence[int], taken: Sequence[int]) -> Pending:
    """The ``taken[r]`` rows that each rank r sends, stacked, from the ``given[r]`` rows for each rank of x [sum(given), ...]."""
    rows, parts = x.new_empty(sum(taken), *x.shape[1:]), x.detach().split(list(given))
    traffic.note("all_to_all", x.numel(), x.dtype, x.nbytes - parts[group.rank].nbytes)
    wait = _start(parts, rows.split(list(taken)), group)
    return lambda: wait() or rows


def _start_sum(given: Sequence[Tensor], group: TPGroup) -> Pending:
    """The sum over the ranks of what each gives to this one."""
    mine = given[group.rank]
    taken = [mine if rank == group.rank else torch.empty_like(mine) for rank in range(group.size)]
    wait = _start(given, taken, group)

    def finish() -> Tensor:
        wait()
        total = taken[0] + taken[1]
        for other in taken[2:]:
            total += other
        return total

    return finish


def _start(given: Sequence[Tensor], taken: Sequence[Tensor], group: TPGroup) -> Callable[[], None]:
    """Sends ``given[r]`` to each rank r and fills ``taken[r]`` with what it sends. To be called for the end."""
    ranks, others = group.connected, [rank for rank in range(group.size) if rank != group.rank]
    works = [ranks.recv([taken[rank]], rank, traffic.TAG) for rank in others if taken[rank].numel()]
    works += [ranks.send([given[rank]], rank, traffic.TAG) for rank in others if given[rank].numel()]
    if taken[group.rank] is not given[group.rank]:
        taken[group.rank].copy_(given[group.rank])

    def wait() -> None:
        for work in works:
            work.wait()

    return wait
