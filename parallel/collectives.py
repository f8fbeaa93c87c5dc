"""Raw collectives over a TPGroup. No autograd here: see regions.py for the differentiable pairs.

Each is begun and then waited for. Under torch.compile they go through torch's functional collectives, which it can trace. Those
wrap each call in autograd formulas written in Python, so that in eager code the ``start_*`` functions, on which a block waits, call
the process group itself; or, between CPUs of one machine, shared_memory.py. What the process group carries overlaps with what
follows; in shared memory the copy is made at the beginning, and the sum at the end. None writes to a tensor that the caller did not
hand over: a buffer that the caller has just made and owns is written "owned" below.

Uneven token counts (``counts``, one a rank) are padded to the largest on the wire and trimmed on arrival, nowhere else (and not at
all in shared memory).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives
from torch import Tensor

from parallel import shared_memory
from parallel.group import TPGroup
from parallel.shared_memory import Pending

_ops = torch.ops._c10d_functional
_SUM = dist.ReduceScatterOptions()


def _shared(device: torch.device, most: int, group: TPGroup) -> shared_memory.Channel | None:
    """The memory through which the ranks exchange tensors of at most so many bytes each; None if they do not."""
    if torch.compiler.is_compiling() or device.type != "cpu" or most > shared_memory.SLOT_BYTES:
        return None
    if not (group.over_gloo and group.shared_memory):
        return None
    return shared_memory.channel(group)


def start_all_reduce(owned: Tensor, group: TPGroup, reduce_dtype: torch.dtype | None = None) -> Pending:
    """Begins the sum of ``owned`` over the ranks. It may reuse the buffer."""
    if group.size == 1:
        return lambda: owned
    dtype = owned.dtype
    wire = (owned if reduce_dtype is None else owned.to(reduce_dtype)).contiguous()
    if channel := _shared(wire.device, wire.nbytes, group):
        pending = shared_memory.start_all_reduce(wire, channel)
        return lambda: pending().to(dtype)
    if torch.compiler.is_compiling():
        handle = _ops.all_reduce(wire, "sum", group.name)
        return lambda: _ops.wait_tensor(handle).to(dtype)
    work = group.connected.allreduce([wire])
    return lambda: _wait(work, wire).to(dtype)


def all_reduce(x: Tensor, group: TPGroup, op: str = "sum") -> Tensor:
    """The sum (or "max", "min", ...) of ``x`` over the ranks, out of place."""
    if group.size == 1:
        return x
    if op == "sum" and (channel := _shared(x.device, x.nbytes, group)):
        return shared_memory.start_all_reduce(x.detach().clone(memory_format=torch.contiguous_format), channel)()
    return _ops.wait_tensor(_ops.all_reduce(x.contiguous(), op, group.name))


def start_all_gather(x: Tensor, group: TPGroup, counts: Sequence[int]) -> Pending:
    """Begins to stack the ranks' rows along dimension 0: [counts[rank], ...] -> [sum(counts), ...]."""
    if group.size == 1:
        return lambda: x
    widest = max(counts)
    if channel := _shared(x.device, widest * x.shape[1:].numel() * x.itemsize, group):
        return shared_memory.start_all_gather(x, channel, counts)
    mine = _pad_rows(x, widest).contiguous()
    if torch.compiler.is_compiling():
        pending = partial(_ops.wait_tensor, _ops.all_gather_into_tensor(mine, group.size, group.name))
    else:
        rows = mine.new_empty(widest * group.size, *mine.shape[1:])
        pending = partial(_wait, group.connected.all_gather_single(rows, mine), rows)
    if sum(counts) == widest * group.size:
        return pending
    return lambda: torch.cat([rows[:n] for rows, n in zip(pending().split(widest), counts, strict=True)])


def all_gather(x: Tensor, group: TPGroup, counts: Sequence[int]) -> Tensor:
    """Stacks the ranks' rows along dimension 0: [counts[rank], ...] -> [sum(counts), ...]."""
    return start_all_gather(x, group, counts)()


def start_reduce_scatter(x: Tensor, group: TPGroup, counts: Sequence[int], reduce_dtype: torch.dtype | None = None) -> Pending:
    """Begins to sum ``x`` over the ranks, each keeping its rows: [sum(counts), ...] -> [counts[rank], ...]."""
    if group.size == 1:
        return lambda: x
    dtype, widest = x.dtype, max(counts)
    wire = x if reduce_dtype is None else x.to(reduce_dtype)
    if channel := _shared(wire.device, wire.nbytes, group):
        pending = shared_memory.start_reduce_scatter(wire, channel, counts)
        return lambda: pending().to(dtype)
    if sum(counts) != widest * group.size:
        wire = torch.cat([_pad_rows(rows, widest) for rows in wire.split(list(counts))])
    wire = wire.contiguous()
    if torch.compiler.is_compiling():
        pending = partial(_ops.wait_tensor, _ops.reduce_scatter_tensor(wire, "sum", group.size, group.name))
    else:
        rows = wire.new_empty(widest, *wire.shape[1:])
        pending = partial(_wait, group.connected.reduce_scatter_single(rows, wire, _SUM), rows)
    return lambda: pending()[: counts[group.rank]].to(dtype)


def all_to_all(x: Tensor, group: TPGroup, *, given: Sequence[int], taken: Sequence[int], most: int) -> Tensor:
    """Sends rank r the next ``given[r]`` rows of ``x`` and stacks the ``taken[r]`` rows that each rank r sent.

    ``most``: how many rows any rank sends at most.
    """
    if channel := _shared(x.device, most * x.shape[1:].numel() * x.itemsize, group):
        return shared_memory.start_all_to_all(x, channel, given, taken)()
    return _ops.wait_tensor(_ops.all_to_all_single(x.contiguous(), list(taken), list(given), group.name))


def _wait(work: dist.Work, result: Tensor) -> Tensor:
    work.wait()
    return result


def _pad_rows(x: Tensor, rows: int) -> Tensor:
    if x.shape[0] == rows:
        return x
    return torch.cat([x, x.new_zeros(rows - x.shape[0], *x.shape[1:])])
