"""Raw collectives over a TPGroup. No autograd here: see regions.py for the differentiable pairs.

Each is begun and then waited for. Between CPUs of one machine shared_memory.py carries it where the group lets it, and all else the
process group. What that carries overlaps with what follows; in shared memory the copy is made at the beginning, and the sum at the
end. None writes to a tensor that the caller did not hand over: a buffer that the caller has just made and owns is written "owned"
below.

Compiled code begins torch's functional collectives, which torch.compile can trace, and which choose in the same way when they run
(compiled.py). They wrap each call in autograd formulas written in Python, for which reason eager code does without. Since they pad
where eager code need not, all ranks of a group compile the same code, or none.

Uneven token counts (``counts``, one a rank) are padded to the largest on the wire and trimmed on arrival, nowhere else (and not at
all by eager code in shared memory).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives
from torch import Tensor

from parallel import shared_memory
from parallel.group import TPGroup
from parallel.shared_memory import Pending
from parallel.traffic import note

_functional = torch.ops._c10d_functional
_SUM = dist.ReduceScatterOptions()


def start_all_reduce(owned: Tensor, group: TPGroup, reduce_dtype: torch.dtype | None = None) -> Pending:
    """Begins the sum of ``owned`` over the ranks. It may reuse the buffer."""
    if group.size == 1:
        return lambda: owned
    dtype = owned.dtype
    wire = (owned if reduce_dtype is None else owned.to(reduce_dtype)).contiguous()
    if channel := _shared(wire.device, wire.nbytes, group):
        note("all_reduce", wire.numel(), wire.dtype, group.size)
        pending = shared_memory.start_all_reduce(wire, channel, wire)
    else:
        pending = _start("all_reduce", wire, group)
    return lambda: pending().to(dtype)


def all_reduce(x: Tensor, group: TPGroup, op: str = "sum") -> Tensor:
    """The sum (or "max", "min", ...) of ``x`` over the ranks, out of place."""
    if group.size == 1:
        return x
    if op != "sum":
        return _functional.wait_tensor(_functional.all_reduce(x.contiguous(), op, group.name))
    if channel := _shared(x.device, x.nbytes, group):
        note("all_reduce", x.numel(), x.dtype, group.size)
        return shared_memory.start_all_reduce(x, channel)()
    if torch.compiler.is_compiling():  # whose collective copies x itself
        return _start("all_reduce", x.contiguous(), group)()
    return _start("all_reduce", x.detach().clone(memory_format=torch.contiguous_format), group)()


def start_all_gather(x: Tensor, group: TPGroup, counts: Sequence[int]) -> Pending:
    """Begins to stack the ranks' rows along dimension 0: [counts[rank], ...] -> [sum(counts), ...]."""
    if group.size == 1:
        return lambda: x
    widest = max(counts)
    if channel := _shared(x.device, widest * x.shape[1:].numel() * x.itemsize, group):
        note("all_gather", sum(counts) * x.shape[1:].numel(), x.dtype, group.size)
        return shared_memory.start_all_gather(x, channel, counts)
    pending = _start("all_gather", _pad_rows(x, widest).contiguous(), group)
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
        note("reduce_scatter", wire.numel(), wire.dtype, group.size)
        pending = shared_memory.start_reduce_scatter(wire, channel, counts)
        return lambda: pending().to(dtype)
    if sum(counts) != widest * group.size:
        wire = torch.cat([_pad_rows(rows, widest) for rows in wire.split(list(counts))])
    pending = _start("reduce_scatter", wire.contiguous(), group)
    return lambda: pending()[: counts[group.rank]].to(dtype)


def all_to_all(x: Tensor, group: TPGroup, *, given: Sequence[int], taken: Sequence[int], most: int) -> Tensor:
    """Sends rank r the next ``given[r]`` rows of ``x`` and stacks the ``taken[r]`` rows that each rank r sent.

    ``most``: how many rows any rank sends at most.
    """
    if channel := _shared(x.device, most * x.shape[1:].numel() * x.itemsize, group):
        note("all_to_all", x.numel(), x.dtype, group.size, given[group.rank] / max(1, sum(given)))
        return shared_memory.start_all_to_all(x, channel, given, taken)()
    return _functional.wait_tensor(_functional.all_to_all_single(x.contiguous(), list(taken), list(given), group.name))


def _shared(device: torch.device, most: int, group: TPGroup) -> shared_memory.Channel | None:
    """The memory through which the ranks exchange tensors of at most so many bytes each; None if they do not."""
    if torch.compiler.is_compiling() or device.type != "cpu" or not (group.over_gloo and group.shared_memory):
        return None
    return shared_memory.channel(group.connected, most)


def _start(kind: str, wire: Tensor, group: TPGroup) -> Pending:
    """Begins a collective of tensors of one shape on all ranks. An all-reduce may overwrite ``wire``."""
    ranks, size = group.connected, group.size
    if torch.compiler.is_compiling():
        name = group.cpu_name if wire.device.type == "cpu" else group.name
        if kind == "all_reduce":
            handle = _functional.all_reduce(wire, "sum", name)
        elif kind == "all_gather":
            handle = _functional.all_gather_into_tensor(wire, size, name)
        else:
            handle = _functional.reduce_scatter_tensor(wire, "sum", size, name)
        return lambda: _functional.wait_tensor(handle)
    result = wire
    if kind == "all_reduce":
        work = ranks.allreduce([wire])
    elif kind == "all_gather":
        result = wire.new_empty(wire.shape[0] * size, *wire.shape[1:])
        work = ranks.all_gather_single(result, wire)
    else:
        result = wire.new_empty(wire.shape[0] // size, *wire.shape[1:])
        work = ranks.reduce_scatter_single(result, wire, _SUM)

    def wait() -> Tensor:
        work.wait()
        return result

    return wait


def _pad_rows(x: Tensor, rows: int) -> Tensor:
    if x.shape[0] == rows:
        return x
    return torch.cat([x, x.new_zeros(rows - x.shape[0], *x.shape[1:])])
