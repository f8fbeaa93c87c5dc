"""What a tensor of a file holds of the model's global parameters, and the copying between any two such descriptions.

A family's table says how Hugging Face stores a parameter (:class:`Stored`); a :class:`Layout` says what a rank holds of it. Both
become :class:`StoredTensor`: a tensor, the parameter that it is a piece of, and the boxes of the parameter that lie in it.
:func:`copy` fills one from those of another checkpoint, so that loading, saving, sharding, resharding, merging and
comparing are one loop.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from parallel.layout import Layout, Run
from tpblock.config import ModelConfig
from tpblock.formats.files import BLOCK_BYTES, CheckpointError


class Order(Enum):
    """How the parts of a fused tensor lie in it.

    CONCATENATED: one after the other, [Q | K | V] (GPT-2, Phi-3).
    PER_HEAD: for each query head its rows of each part, [q_0 k_0 v_0 | q_1 k_1 v_1 | ...] (GPT-NeoX, BLOOM).
    PER_GROUP: for each KV head its query heads' rows, then its own, [q_0 q_1 k_0 v_0 | ...] (Falcon).
    """

    CONCATENATED = "concatenated"
    PER_HEAD = "per_head"
    PER_GROUP = "per_group"


@dataclass(frozen=True)
class Stored:
    """A tensor of a Hugging Face checkpoint.

    Attributes:
        name: its name; ``{i}`` stands for the block's number.
        parts: which parts of our parameter it holds, in this order (all, if none are named).
        order: how the parts lie in it; to be stated if there are several, since no shape tells.
        transposed: it is our matrix transposed (GPT-2's Conv1D).
        pairs: the rows of each head are stored as rotary pairs, row i of the first half before row i of the second (Meta).
    """

    name: str
    parts: tuple[str, ...] = ()
    order: Order | None = None
    transposed: bool = False
    pairs: bool = False


class Extent(NamedTuple):
    """A box of a global parameter and where it lies in a tensor, both in the parameter's orientation. Rows that follow one
    another in the parameter lie ``step`` apart in the tensor."""

    box: tuple[Run, ...]
    origin: tuple[int, ...]
    step: int = 1

    def within(self, box: tuple[Run, ...]) -> tuple[slice, ...]:
        """The slices of the tensor that hold ``box``, which lies in this extent's."""
        starts = [o + (b.start - own.start) * s for o, b, own, s in zip(self.origin, box, self.box, self._steps, strict=True)]
        return tuple(slice(a, a + (b.length - 1) * s + 1, s) for a, b, s in zip(starts, box, self._steps, strict=True))

    @property
    def _steps(self) -> tuple[int, ...]:
        return (self.step,) + (1,) * (len(self.box) - 1)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that holds ``extents`` of a global parameter. ``shape`` is as stored, that is after the transposition if any."""

    parameter: str
    shape: tuple[int, ...]
    extents: tuple[Extent, ...]
    transposed: bool = False

    def oriented(self, tensor: Tensor) -> Tensor:
        """The tensor in the parameter's orientation."""
        return tensor.t() if self.transposed else tensor

    def cut(self, dim: int, first: int, stop: int) -> StoredTensor:
        """What its slice [first, stop) along ``dim`` (as stored) holds."""
        axis = 1 - dim if self.transposed else dim
        extents = []
        for extent in self.extents:
            box, origin, step = list(extent.box), list(extent.origin), extent.step if axis == 0 else 1
            begin = max(0, -((origin[axis] - first) // step))  # the first row that lies at ``first`` or after it
            end = min(box[axis].length, -((origin[axis] - stop) // step))
            if begin < end:
                origin[axis] += begin * step - first
                box[axis] = Run(box[axis].start + begin, box[axis].start + end)
                extents.append(Extent(tuple(box), tuple(origin), extent.step))
        shape = (*self.shape[:dim], stop - first, *self.shape[dim + 1 :])
        return StoredTensor(self.parameter, shape, tuple(extents), self.transposed)


class Readable(Protocol):
    """A tensor that can be read some rows at a time: an Entry of a file, or :class:`InMemory`."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    def rows(self, first: int, stop: int, *, sparse: bool = False) -> Tensor: ...


@dataclass(frozen=True)
class InMemory:
    """A tensor as a :class:`Readable`."""

    tensor: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def rows(self, first: int, stop: int, *, sparse: bool = False) -> Tensor:
        return self.tensor[first:stop]


Source = Mapping[str, Sequence[tuple[StoredTensor, Readable]]]
"""Where the global parameters of a model can be read: for each its tensors, which cover it exactly once."""


def _whole(shape: Sequence[int]) -> tuple[Run, ...]:
    return tuple(Run(0, size) for size in shape)


def whole_tensor(parameter: str, shape: tuple[int, ...]) -> StoredTensor:
    """The global parameter itself."""
    return StoredTensor(parameter, shape, (Extent(_whole(shape), (0,) * len(shape)),))


def shard_tensor(parameter: str, layout: Layout, rank: int, *, owned: bool = False) -> StoredTensor:
    """What ``rank`` holds of a parameter. With ``owned``, only what it is the first to hold, so that the ranks' extents cover
    the parameter exactly once."""
    if layout.dim is None:
        whole = whole_tensor(parameter, layout.shape)
        return StoredTensor(parameter, whole.shape, whole.extents if rank == 0 or not owned else ())
    pieces = layout.owned(rank) if owned else layout.pieces(rank)
    extents = tuple(_run(layout, piece.start, piece.length, piece.local) for piece in pieces)
    return StoredTensor(parameter, layout.local_shape(rank), extents)


def hf_tensors(parameter: str, layout: Layout, stored: Sequence[Stored], config: ModelConfig) -> dict[str, StoredTensor]:
    """The Hugging Face tensors of a parameter by name. ``layout`` is the parameter's for any number of ranks.

    A parameter of block 7, ``stack.blocks.7.attention.qkv.weight``, has 7 in place of ``{i}`` in their names.
    """
    number = next((word for word in parameter.split(".") if word.isdigit()), "")
    tensors = {}
    for each in stored:
        name = each.name.replace("{i}", number)
        if layout.dim is None:
            tensors[name] = whole_tensor(parameter, layout.shape)
            continue
        named = {part.name: part for part in layout.parts}
        parts = [named[part] for part in each.parts or named]
        if len(parts) > 1 and not isinstance(each.order, Order):
            orders = ", ".join(str(order) for order in Order)
            raise ValueError(f"{name} holds {len(parts)} parts: its family must say which of {orders}, not {each.order!r}")
        groups = {Order.PER_HEAD: config.heads, Order.PER_GROUP: config.kv_heads}.get(each.order, 1)  # type: ignore[arg-type]
        extents: list[Extent] = []
        at = 0
        for group in range(groups):
            for part in parts:
                length = part.size // groups
                start = layout.part_starts[part.name] + group * length
                extents += _runs(layout, start, length, at, config.head_dim if each.pairs else None)
                at += length
        shape = list(layout.shape)
        shape[layout.dim] = at
        tensors[name] = StoredTensor(
            parameter, tuple(reversed(shape)) if each.transposed else tuple(shape), tuple(extents), each.transposed
        )
    return tensors


def _run(layout: Layout, start: int, length: int, at: int, step: int = 1) -> Extent:
    """Rows [start, start + length) of a parameter's cut dimension that lie at ``at`` of a tensor, ``step`` apart."""
    assert layout.dim is not None
    box, origin = list(_whole(layout.shape)), [0] * len(layout.shape)
    box[layout.dim], origin[layout.dim] = Run(start, start + length), at
    return Extent(tuple(box), tuple(origin), step)


def _runs(layout: Layout, start: int, length: int, at: int, head_dim: int | None) -> Iterator[Extent]:
    """The same in one extent, or with ``head_dim`` in two a head: the rotary pairs of a head lie side by side in the tensor."""
    if head_dim is None:
        yield _run(layout, start, length, at)
        return
    for head in range(0, length, head_dim):
        yield _run(layout, start + head, head_dim // 2, at + head, step=2)
        yield _run(layout, start + head + head_dim // 2, head_dim // 2, at + head + 1, step=2)


def _intersection(a: tuple[Run, ...], b: tuple[Run, ...]) -> tuple[Run, ...] | None:
    box = tuple(Run(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b, strict=True))
    return box if all(run.length > 0 for run in box) else None


def regions(
    target: StoredTensor, tensor: Tensor, source: Source, *, whole_rows: bool = False
) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of views that are to hold the same values: of ``tensor``, and of rows of the source. All of the target's extents are
    covered, about BLOCK_BYTES of the source at a time. With ``whole_rows``, all columns are read where only some are wanted,
    which is faster if the others will be wanted soon.
    """
    ours = target.oriented(tensor)
    for stored, readable in source[target.parameter]:
        for theirs in stored.extents:
            for extent in target.extents:
                box = _intersection(extent.box, theirs.box)
                if box is None:
                    continue
                view, where = ours[extent.within(box)], theirs.within(box)
                if stored.transposed:
                    view, where = view.t(), where[::-1]
                rows, sparse = where[0], any(s.stop - s.start < n for s, n in zip(where[1:], readable.shape[1:], strict=True))
                count = len(range(rows.start, rows.stop, rows.step))
                each = max(1, BLOCK_BYTES // max(1, rows.step * math.prod(readable.shape[1:]) * readable.dtype.itemsize))
                for at in range(0, count, each):
                    first = rows.start + at * rows.step
                    stop = min(rows.stop, first + (each - 1) * rows.step + 1)
                    values = readable.rows(first, stop, sparse=sparse and not whole_rows)
                    values = values[(slice(None, None, rows.step), *where[1:])]
                    yield view[at : at + len(values)], values


def copy(target: StoredTensor, tensor: Tensor, source: Source, *, finite: bool = False) -> int:
    """Fills ``tensor`` from a source, converting values to its dtype. Returns the bytes that were read.

    Raises:
        CheckpointError: with ``finite``, if a value is not a finite number, or is none in the tensor's dtype.
    """
    read = 0
    for view, values in regions(target, tensor, source):
        view.copy_(values)
        if finite and not (view.float() if view.itemsize == 1 else view).isfinite().all():
            raise CheckpointError(f"{target.parameter} holds values that are not finite numbers of {view.dtype}")
        read += values.nbytes
    return read


def blocks(target: StoredTensor, dtype: torch.dtype, source: Source) -> Iterator[Tensor]:
    """The rows of a tensor in order, about BLOCK_BYTES at a time: contiguous. Rows that lie in the source as they are wanted are
    not copied once they are read."""
    each = max(1, BLOCK_BYTES // (math.prod(target.shape[1:]) * dtype.itemsize))
    for first in range(0, target.shape[0], each):
        part = target.cut(0, first, min(first + each, target.shape[0]))
        block = torch.empty(part.shape, dtype=dtype)
        for view, values in regions(part, block, source, whole_rows=True):
            if view.shape == block.shape and view.is_contiguous() and values.is_contiguous() and values.dtype == dtype:
                block = values
            else:
                view.copy_(values)
        yield block


def difference(target: StoredTensor, tensor: Tensor, source: Source) -> float:
    """The largest difference between ``tensor`` and what the source would fill it with; 0 if and only if all bits are the same
    (after the conversion to the tensor's dtype)."""
    return max((apart(view, values.to(view)) for view, values in regions(target, tensor, source)), default=0.0)


def apart(a: Tensor, b: Tensor) -> float:
    """The largest difference of two tensors of one dtype; 0 if and only if all bits are the same."""
    if torch.equal(_bits(a), _bits(b)):
        return 0.0
    largest = (a.double() - b.double()).abs().nan_to_num(math.inf).max().item()
    return max(largest, math.ulp(0.0))  # signs of zero and kinds of nan differ by nothing


def _bits(tensor: Tensor) -> Tensor:
    whole_numbers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(whole_numbers[tensor.dtype.itemsize])


def check_covered(parameter: str, tensors: Iterable[StoredTensor], shape: tuple[int, ...]) -> None:
    """A ValueError unless the tensors hold as many elements as the parameter: a mistake in a family's table."""
    held = sum(math.prod(run.length for run in extent.box) for tensor in tensors for extent in tensor.extents)
    if held != math.prod(shape):
        raise ValueError(f"the family's table stores {held:,} numbers of {parameter}, which has {math.prod(shape):,}: {shape}")
