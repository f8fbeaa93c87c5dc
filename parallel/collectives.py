"""Raw collectives over a TPGroup. No autograd here: see regions.py for the differentiable pairs.

All go through torch's functional collectives, which run eagerly, overlap with what follows until they are waited for, and are
traced by torch.compile as they stand. None writes to a tensor that the caller did not hand over: the ``start_*`` functions take
a buffer that the caller has just made and owns (written "owned" below), the others leave their input alone.

Uneven token counts (``counts``, one a rank) are padded to the largest on the wire and trimmed on arrival, nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed._functional_collectives
from torch import Tensor

from parallel.group import TPGroup

Pending = Callable[[], Tensor]
"""A collective under way: call it to wait for the result."""

_ops = torch.ops._c10d_functional


def start_all_reduce(owned: Tensor, group: TPGroup, reduce_dtype: torch.dtype | None = None) -> Pending:
    """Begins the sum of ``owned`` over the ranks. It may reuse the buffer."""
    if group.size == 1:
        return lambda: owned
    dtype = owned.dtype
    wire = (owned if reduce_dtype is None else owned.to(reduce_dtype)).contiguous()
    # The in-place form saves an allocation the size of the activations, but cannot be traced (the compiler reuses buffers itself).
    reduce = _ops.all_reduce if torch.compiler.is_compiling() else _ops.all_reduce_
    handle = reduce(wire, "sum", group.name)
    return lambda: _ops.wait_tensor(handle).to(dtype)


def all_reduce(x: Tensor, group: TPGroup, op: str = "sum") -> Tensor:
    """The sum (or "max", "min", ...) of ``x`` over the ranks, out of place."""
    if group.size == 1:
        return x
    return _ops.wait_tensor(_ops.all_reduce(x.contiguous(), op, group.name))


def start_all_gather(x: Tensor, group: TPGroup, counts: Sequence[int]) -> Pending:
    """Begins to stack the ranks' rows along dimension 0: [counts[rank], ...] -> [sum(counts), ...]."""
    if group.size == 1:
        return lambda: x
    widest = max(counts)
    handle = _ops.all_gather_into_tensor(_pad_rows(x, widest).contiguous(), group.size, group.name)

    def finish() -> Tensor:
        gathered = _ops.wait_tensor(handle)
        if sum(counts) == widest * group.size:
            return gathered
        return torch.cat([rows[:n] for rows, n in zip(gathered.split(widest), counts, strict=True)])

    return finish


def all_gather(x: Tensor, group: TPGroup, counts: Sequence[int]) -> Tensor:
    """Stacks the ranks' rows along dimension 0: [counts[rank], ...] -> [sum(counts), ...]."""
    return start_all_gather(x, group, counts)()


def start_reduce_scatter(x: Tensor, group: TPGroup, counts: Sequence[int], reduce_dtype: torch.dtype | None = None) -> Pending:
    """Begins to sum ``x`` over the ranks, each keeping its rows: [sum(counts), ...] -> [counts[rank], ...]."""
    if group.size == 1:
        return lambda: x
    dtype, widest = x.dtype, max(counts)
    wire = x if reduce_dtype is None else x.to(reduce_dtype)
    if sum(counts) != widest * group.size:
        wire = torch.cat([_pad_rows(rows, widest) for rows in wire.split(list(counts))])
    handle = _ops.reduce_scatter_tensor(wire.contiguous(), "sum", group.size, group.name)
    return lambda: _ops.wait_tensor(handle)[: counts[group.rank]].to(dtype)


def all_to_all(x: Tensor, group: TPGroup, *, given: Sequence[int], taken: Sequence[int]) -> Tensor:
    """Sends rank r the next ``given[r]`` rows of ``x`` and stacks the ``taken[r]`` rows that each rank r sent."""
    return _ops.wait_tensor(_ops.all_to_all_single(x.contiguous(), list(taken), list(given), group.name))


def _pad_rows(x: Tensor, rows: int) -> Tensor:
    if x.shape[0] == rows:
        return x
    return torch.cat([x, x.new_zeros(rows - x.shape[0], *x.shape[1:])])
