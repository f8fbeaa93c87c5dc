"""How a parameter is cut: the one description that initial values, checkpoints, norms and checks all read.

Only integers here, no tensors and no communication. Vocabulary used in the whole library:

* *unit*: what cannot be cut, e.g. an attention head (``head_dim`` rows) or a single row;
* *part*: a named section of the cut dimension that is dealt on its own, e.g. ``gate`` and ``up`` of a fused weight;
* *shard*: for each part, in order, one contiguous run of its units; a rank owns one shard, or in invariant mode several;
* *piece*: such a run, with its place in the global tensor and in the local one.

A fused weight is therefore global ``[gate; up]`` and local ``[gate_r; up_r]``, never a plain slice of the global one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
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
    """A named section of the cut dimension and the run of it that each shard holds, in rows counted within the part.

    Runs are in order and cover the part; neighbouring shards may hold the same run, but not parts of one another's.
    """

    name: str
    size: int
    runs: tuple[Run, ...]

    def __post_init__(self) -> None:
        before = Run(0, 0)
        for run in (*self.runs, Run(self.size, self.size + 1)):
            if run.length < 1 or (run != before and run.start != before.stop):
                raise ValueError(
                    f"{self.name}: the runs {[tuple(r) for r in self.runs]} do not cover its {self.size} rows in order"
                )
            before = run

    @classmethod
    def even(cls, name: str, units: int, shards: int, *, unit: int = 1) -> Part:
        """``units`` of ``unit`` rows each, dealt as evenly as they go. A ValueError if a shard would hold none."""
        if units < shards:
            raise ValueError(f"{name}: {units} cannot be dealt over {shards} tensor-parallel shards, one would hold none")
        return cls(name, units * unit, deal(units, shards, unit))


def attention_parts(heads: int, kv_heads: int, head_dim: int, shards: int) -> tuple[Part, Part, Part]:
    """The parts ``q``, ``k``, ``v`` of a fused projection for multi-head, grouped-query and multi-query attention.

    With at least as many KV heads as shards, whole KV groups are dealt (3 KV heads of 3 query heads each over 2 shards: 6
    and 3 query heads). With fewer, shards are dealt to KV heads, each shard holding one KV head and some of its query heads,
    so a KV head is held by several shards (2 KV heads on 4 shards: 0, 0, 1, 1). Either way every shard runs an ordinary
    grouped attention: its query heads divide evenly over its KV heads.
    """
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"{heads} query heads are not a multiple of {kv_heads} KV heads")
    if heads < shards:
        raise ValueError(f"{heads} query heads cannot be dealt over {shards} tensor-parallel shards (KV heads: {kv_heads})")
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
    """How a tensor of global ``shape`` is cut along ``dim`` (None: every rank holds all of it).

    ``owners`` says which run of shards each rank owns; None: one shard a rank.
    """

    shape: tuple[int, ...]
    dim: int | None = None
    parts: tuple[Part, ...] = ()
    owners: tuple[Run, ...] | None = None
    # What follows from these and is asked for in every forward pass. (torch.compile cannot trace cached_property.)
    rank_shards: tuple[Run, ...] = field(init=False, repr=False, compare=False)
    """The run of shards that each rank owns."""
    uncut: bool = field(init=False, repr=False, compare=False)
    """Whether there is one shard, so that the local tensor is the global one."""
    shared: tuple[Part, ...] = field(init=False, repr=False, compare=False)
    """The parts of which several shards hold the same rows (KV heads, when there are more shards than KV heads)."""
    sizes_by_shard: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """The length of the cut dimension of each shard."""

    def __post_init__(self) -> None:
        self._check()
        count = len(self.parts[0].runs) if self.parts else 0
        rank_shards = self.owners if self.owners is not None else tuple(Run(shard, shard + 1) for shard in range(count))
        shared = tuple(part for part in self.parts if any(a == b for a, b in pairwise(part.runs)))
        sizes = tuple(sum(run.length for run in runs) for runs in zip(*(part.runs for part in self.parts), strict=True))
        derived = {"rank_shards": rank_shards, "uncut": count == 1, "shared": shared, "sizes_by_shard": sizes}
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def _check(self) -> None:
        if self.dim is None:
            return
        names, shards = [part.name for part in self.parts], {len(part.runs) for part in self.parts}
        if len(set(names)) < len(names):
            raise ValueError(f"the parts of one tensor need different names, got {', '.join(names)}")
        if len(shards) > 1:
            dealt = ", ".join(f"{part.name} over {len(part.runs)}" for part in self.parts)
            raise ValueError(f"the parts of one tensor must be dealt over the same number of ranks, got {dealt}")
        total = sum(part.size for part in self.parts)
        if total != self.shape[self.dim]:
            sizes = " + ".join(f"{part.name} {part.size}" for part in self.parts)
            raise ValueError(f"the parts {sizes} = {total} do not fill dimension {self.dim} of {self.shape}")

    @property
    def replicated(self) -> bool:
        return self.dim is None

    @property
    def part_starts(self) -> dict[str, int]:
        """Where each part begins in the global cut dimension."""
        starts, at = {}, 0
        for part in self.parts:
            starts[part.name] = at
            at += part.size
        return starts

    def shard_sizes(self, rank: int) -> list[int]:
        """The length of the cut dimension of each shard that ``rank`` owns."""
        run = self.rank_shards[rank]
        return list(self.sizes_by_shard[run.start : run.stop])

    def pieces_by_shard(self, rank: int) -> list[tuple[Piece, ...]]:
        """What each shard of ``rank`` holds, part by part, in local order."""
        shards, local, starts = [], 0, self.part_starts
        for shard in range(*self.rank_shards[rank]):
            pieces = []
            for part in self.parts:
                run = part.runs[shard]
                pieces.append(Piece(part.name, starts[part.name] + run.start, local, run.length))
                local += run.length
            shards.append(tuple(pieces))
        return shards

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """What ``rank`` holds, in local order: shard by shard, part by part. A replicated tensor has none: it is not cut."""
        return () if self.replicated else tuple(piece for pieces in self.pieces_by_shard(rank) for piece in pieces)

    def owned(self, rank: int) -> tuple[Piece, ...]:
        """The pieces that ``rank`` is the first to hold: over all ranks they cover the global tensor exactly once."""
        if self.replicated:
            return ()
        shards = zip(range(*self.rank_shards[rank]), self.pieces_by_shard(rank), strict=True)
        return tuple(
            piece
            for shard, pieces in shards
            for part, piece in zip(self.parts, pieces, strict=True)
            if shard == 0 or part.runs[shard] != part.runs[shard - 1]  # those that share a run are neighbours
        )

    @property
    def features(self) -> Layout:
        """How activations are cut whose last dimension runs along the cut dimension of this tensor."""
        assert self.dim is not None
        return Layout((self.shape[self.dim],), -1, self.parts, self.owners)

    def local_size(self, rank: int) -> int:
        """The length of the cut dimension on ``rank``."""
        return sum(self.shard_sizes(rank))

    def local_sections(self, rank: int) -> list[int]:
        """The local length of each piece, for ``Tensor.split``."""
        return [piece.length for piece in self.pieces(rank)]

    def local_shape(self, rank: int) -> tuple[int, ...]:
        if self.dim is None:
            return self.shape
        shape = list(self.shape)
        shape[self.dim] = self.local_size(rank)
        return tuple(shape)


def column_layout(shape: Sequence[int], parts: Sequence[Part], owners: tuple[Run, ...] | None = None) -> Layout:
    """Cut along the output: dimension 0 of a weight [out, in] or of its bias [out]."""
    return Layout(tuple(shape), 0, tuple(parts), owners)


def row_layout(shape: Sequence[int], parts: Sequence[Part], owners: tuple[Run, ...] | None = None) -> Layout:
    """Cut along the input: dimension 1 of a weight [out, in]."""
    return Layout(tuple(shape), 1, tuple(parts), owners)
