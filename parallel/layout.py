"""How a parameter is cut: the one description that initial values, checkpoints, norms and checks all read.

Only integers here, no tensors and no communication. Vocabulary used in the whole library:

* *unit*: what cannot be cut, e.g. an attention head (``head_dim`` rows) or a single row;
* *part*: a named section of the cut dimension that is dealt on its own, e.g. ``gate`` and ``up`` of a fused weight;
* *shard*: what one rank owns: for each part, in order, one contiguous run of its units;
* *piece*: such a run, with its place in the global tensor and in the local one.

A fused weight is therefore global ``[gate; up]`` and local ``[gate_r; up_r]``, never a plain slice of the global one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class Run(NamedTuple):
    """The half-open range [start, stop)."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


def deal(units: int, shards: int, unit: int = 1) -> tuple[Run, ...]:
    """Deals ``units`` in order over ``shards`` as evenly as possible, the first shards taking one more.

    Returns one run a shard, in rows of ``unit`` each: ``deal(9, 2)`` is ``(0, 5), (5, 9)``.
    """
    base, extra = divmod(units, shards)
    starts = [(i * base + min(i, extra)) * unit for i in range(shards + 1)]
    return tuple(Run(a, b) for a, b in zip(starts, starts[1:], strict=False))


@dataclass(frozen=True)
class Part:
    """A named section of the cut dimension and the run of it that each shard holds, in rows counted within the part."""

    name: str
    size: int
    runs: tuple[Run, ...]

    @classmethod
    def even(cls, name: str, units: int, shards: int, *, unit: int = 1) -> Part:
        """``units`` of ``unit`` rows each, dealt as evenly as they go. A ValueError if a shard would hold none."""
        if units < shards:
            raise ValueError(f"{name}: {units} cannot be dealt over {shards} tensor-parallel ranks, one would hold none")
        return cls(name, units * unit, deal(units, shards, unit))


def attention_parts(heads: int, kv_heads: int, head_dim: int, shards: int) -> tuple[Part, Part, Part]:
    """The parts ``q``, ``k``, ``v`` of a fused projection for multi-head, grouped-query and multi-query attention.

    With at least as many KV heads as shards, whole KV groups are dealt (3 KV heads of 3 query heads each over 2 shards: 6 and 3
    query heads). With fewer, shards are dealt to KV heads, each shard holding one KV head and some of its query heads, so a KV
    head is held by several shards (2 KV heads on 4 shards: 0, 0, 1, 1). Either way every shard runs an ordinary grouped
    attention: its query heads divide evenly over its KV heads.
    """
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads are not a multiple of {kv_heads} KV heads")
    if heads < shards:
        raise ValueError(f"{heads} query heads cannot be dealt over {shards} tensor-parallel ranks (KV heads: {kv_heads})")
    group = heads // kv_heads
    if kv_heads >= shards:
        kv = deal(kv_heads, shards)
        q = tuple(Run(run.start * group, run.stop * group) for run in kv)
    else:
        kv, q = (), ()
        for head, holders in enumerate(deal(shards, kv_heads)):
            kv += (Run(head, head + 1),) * holders.length
            q += tuple(Run(head * group + a, head * group + b) for a, b in deal(group, holders.length))

    def rows(runs: tuple[Run, ...]) -> tuple[Run, ...]:
        return tuple(Run(a * head_dim, b * head_dim) for a, b in runs)

    return (
        Part("q", heads * head_dim, rows(q)),
        Part("k", kv_heads * head_dim, rows(kv)),
        Part("v", kv_heads * head_dim, rows(kv)),
    )


class Piece(NamedTuple):
    """A run of the cut dimension: ``length`` rows at ``start`` of the global tensor, at ``local`` of the shard."""

    part: str
    start: int
    local: int
    length: int


@dataclass(frozen=True)
class Layout:
    """How a tensor of global ``shape`` is cut along ``dim`` (None: every rank holds all of it)."""

    shape: tuple[int, ...]
    dim: int | None = None
    parts: tuple[Part, ...] = ()

    def __post_init__(self) -> None:
        if self.dim is None:
            return
        total = sum(part.size for part in self.parts)
        if total != self.shape[self.dim]:
            sizes = " + ".join(f"{part.name} {part.size}" for part in self.parts)
            raise ValueError(f"the parts {sizes} = {total} do not fill dimension {self.dim} of {self.shape}")

    @property
    def replicated(self) -> bool:
        return self.dim is None

    @cached_property
    def part_starts(self) -> dict[str, int]:
        """Where each part begins in the global cut dimension."""
        starts, at = {}, 0
        for part in self.parts:
            starts[part.name] = at
            at += part.size
        return starts

    def pieces(self, shard: int) -> tuple[Piece, ...]:
        """What ``shard`` holds, in local order. A replicated tensor has none: it is not cut."""
        pieces, local = [], 0
        for part in self.parts:
            run = part.runs[shard]
            pieces.append(Piece(part.name, self.part_starts[part.name] + run.start, local, run.length))
            local += run.length
        return tuple(pieces)

    def owned(self, shard: int) -> tuple[Piece, ...]:
        """The pieces that ``shard`` is the first to hold: over all shards they cover the global tensor exactly once."""
        earlier = {(p.part, p.start) for other in range(shard) for p in self.pieces(other)}
        return tuple(p for p in self.pieces(shard) if (p.part, p.start) not in earlier)

    @cached_property
    def shared(self) -> tuple[Part, ...]:
        """The parts of which several shards hold the same rows (KV heads, when there are more ranks than KV heads)."""
        return tuple(part for part in self.parts if len(set(part.runs)) < len(part.runs))

    def local_size(self, shard: int) -> int:
        """The length of the cut dimension on ``shard``."""
        return sum(part.runs[shard].length for part in self.parts)

    def local_shape(self, shard: int) -> tuple[int, ...]:
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], self.local_size(shard), *self.shape[self.dim + 1 :])

    def local_sections(self, shard: int) -> list[int]:
        """The local length of each part, for ``Tensor.split``."""
        return [part.runs[shard].length for part in self.parts]


def column_layout(shape: Sequence[int], parts: Sequence[Part]) -> Layout:
    """Cut along the output: dimension 0 of a weight [out, in] or of its bias [out]."""
    return Layout(tuple(shape), 0, tuple(parts))


def row_layout(shape: Sequence[int], parts: Sequence[Part]) -> Layout:
    """Cut along the input: dimension 1 of a weight [out, in]."""
    return Layout(tuple(shape), 1, tuple(parts))
