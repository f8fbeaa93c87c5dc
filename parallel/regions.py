"""The conjugate pairs of tensor parallelism: what is one collective forward is its transpose backward.

| function              | forward                  | backward           | Megatron-LM's name                         |
|-----------------------|--------------------------|--------------------|--------------------------------------------|
| copy_to_ranks         | identity                 | all-reduce         | copy_to_model_parallel_region              |
| reduce_from_ranks     | all-reduce               | identity           | reduce_from_model_parallel_region          |
| scatter_to_ranks      | this rank's pieces       | gather             | scatter_to_model_parallel_region           |
| gather_from_ranks     | gather the pieces        | this rank's pieces | gather_from_model_parallel_region          |
| gather_tokens         | all-gather of tokens     | reduce-scatter     | gather_from_sequence_parallel_region       |
| reduce_scatter_tokens | reduce-scatter of tokens | all-gather         | reduce_scatter_to_sequence_parallel_region |
| split_tokens          | this rank's tokens       | all-gather         | scatter_to_sequence_parallel_region        |
| merge_tokens          | all-gather of tokens     | this rank's tokens |                                            |
| sum_over_holders      | identity                 | sum of shared rows |                                            |

The pairs hold when the loss is computed alike on every rank (a replicated loss, which is what all functions of this library
give). Everything is out of place: an incoming gradient is never written to, since a sibling branch may hold the same tensor.
Backward has no graph of its own: on several ranks a second derivative is an error, not a sum without the other ranks' terms.

Source: Shoeybi et al., Megatron-LM, 2019 (f and g); Korthikanti et al., 2022 (sequence parallelism, g and g-bar).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from parallel import collectives, tree
from parallel.group import TPGroup
from parallel.layout import Layout, Piece, deal


def token_counts(tokens: int, group: TPGroup) -> list[int]:
    """How many of ``tokens`` flattened tokens each rank holds under sequence parallelism, the first ranks one more.

    In invariant mode the tokens are dealt over the virtual shards, and a rank holds those of its shards.
    """
    runs = deal(tokens, group.shards)
    return [sum(run.length for run in runs[a:b]) for a, b in group.owners]


def take_pieces(full: Tensor, layout: Layout, rank: int) -> Tensor:
    """The shard of ``rank``, copied out of a global tensor (dimension ``layout.dim`` of it global)."""
    if layout.dim is None:
        return full.clone()
    pieces = [full.narrow(layout.dim, p.start, p.length) for p in layout.pieces(rank)]
    return torch.cat(pieces, layout.dim)


def join_pieces(shards: list[Tensor], layout: Layout) -> Tensor:
    """The global tensor from all ranks' shards. Of rows that several ranks hold, the first holder's are taken."""
    assert layout.dim is not None
    pieces = [
        (piece.start, shard.narrow(layout.dim, piece.local, piece.length))
        for rank, shard in enumerate(shards)
        for piece in layout.owned(rank)
    ]
    return torch.cat([rows for _, rows in sorted(pieces, key=lambda item: item[0])], layout.dim)


def add_pieces(shards: list[Tensor], layout: Layout) -> Tensor:
    """The global tensor, from all ranks' shards, in which rows that several ranks hold are the sum of theirs."""
    assert layout.dim is not None
    shape = list(shards[0].shape)
    shape[layout.dim] = sum(part.size for part in layout.parts)
    full = shards[0].new_zeros(shape)
    for rank, shard in enumerate(shards):
        for piece in layout.pieces(rank):
            full.narrow(layout.dim, piece.start, piece.length).add_(shard.narrow(layout.dim, piece.local, piece.length))
    return full


def gather_pieces(local: Tensor, layout: Layout, group: TPGroup, *, add_shared: bool = False) -> Tensor:
    """The global tensor on every rank, from each rank's shard of it. One all-gather, no autograd.

    Of rows that several ranks hold, the first holder's are taken, or with ``add_shared`` the sum over the holders.
    """
    if layout.dim is None or layout.uncut:
        return local
    counts = [layout.local_size(rank) for rank in range(group.size)]
    rows = collectives.all_gather(local.movedim(layout.dim, 0), group, counts)
    join = add_pieces if add_shared and layout.shared else join_pieces
    return join([r.movedim(0, layout.dim) for r in rows.split(counts)], layout)


class _CopyToRanks(Function):
    @staticmethod
    def forward(ctx: Any, group: TPGroup, reduce_dtype: torch.dtype | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.reduce_dtype = group, reduce_dtype
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        flat = torch.cat([g.reshape(-1) for g in grads])
        summed = collectives.start_all_reduce(flat, ctx.group, ctx.reduce_dtype)().split([g.numel() for g in grads])
        # A small part is copied: as a parameter's gradient it would keep the whole sum, the activations' too, in memory.
        parts = [s.clone() if 2 * s.numel() < flat.numel() else s for s in summed]
        return None, None, *(s.view(g.shape).to(g.dtype) for s, g in zip(parts, grads, strict=True))


class _ReduceFromRanks(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TPGroup, reduce_dtype: torch.dtype | None, owned: bool) -> Tensor:
        # Detached, since autograd would take an input that is returned as it is for a view, and refuse y += z on it.
        return collectives.start_all_reduce(x if owned else x.clone(), group, reduce_dtype)().detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad, None, None, None


class _ScatterToRanks(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout, group: TPGroup) -> Tensor:
        ctx.layout, ctx.group = layout, group
        return take_pieces(x, layout, group.rank)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return gather_pieces(grad, ctx.layout, ctx.group, add_shared=True), None, None


class _GatherFromRanks(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout, group: TPGroup) -> Tensor:
        ctx.layout, ctx.group = layout, group
        return gather_pieces(x, layout, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        layout, rank = ctx.layout, ctx.group.rank
        held = take_pieces(grad, layout, rank)
        for piece in set(layout.pieces(rank)) - set(layout.owned(rank)):  # the result has the first holder's rows, not these
            held.narrow(layout.dim, piece.local, piece.length).zero_()
        return held, None, None


class _GatherTokens(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: list[int], group: TPGroup, reduce_dtype: torch.dtype | None) -> Tensor:
        ctx.counts, ctx.group, ctx.reduce_dtype = counts, group, reduce_dtype
        return collectives.all_gather(x, group, counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return collectives.start_reduce_scatter(grad, ctx.group, ctx.counts, ctx.reduce_dtype)(), None, None, None


class _ReduceScatterTokens(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: list[int], group: TPGroup, reduce_dtype: torch.dtype | None) -> Tensor:
        ctx.counts, ctx.group = counts, group
        return collectives.start_reduce_scatter(x, group, counts, reduce_dtype)().detach()  # as in _ReduceFromRanks

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return collectives.all_gather(grad, ctx.group, ctx.counts), None, None, None


class _SplitTokens(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: list[int], group: TPGroup) -> Tensor:
        ctx.counts, ctx.group = counts, group
        return x.narrow(0, sum(counts[: group.rank]), counts[group.rank]).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return collectives.all_gather(grad, ctx.group, ctx.counts), None, None


class _MergeTokens(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: list[int], group: TPGroup) -> Tensor:
        ctx.counts, ctx.group = counts, group
        return collectives.all_gather(x, group, counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.narrow(0, sum(ctx.counts[: ctx.group.rank]), ctx.counts[ctx.group.rank]).clone(), None, None


class _SumOverHolders(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout, group: TPGroup, reduce_dtype: torch.dtype | None) -> Tensor:
        ctx.layout, ctx.group, ctx.reduce_dtype = layout, group, reduce_dtype
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        layout, group = ctx.layout, ctx.group
        wire = grad if ctx.reduce_dtype is None else grad.to(ctx.reduce_dtype)
        if group.invariant:
            summed = tree.all_reduce([shared_rows(wire, layout, p) for p in layout.pieces_by_shard(group.rank)], group)
        else:
            summed = collectives.all_reduce(shared_rows(wire, layout, layout.pieces(group.rank)), group)
        return replace_shared_rows(grad, summed.to(grad.dtype), layout, group), None, None, None


def shared_rows(local: Tensor, layout: Layout, pieces: Sequence[Piece]) -> Tensor:
    """The parts of which several shards hold the same rows (KV heads) at their global size, filled by ``pieces`` of ``local``."""
    buffer = local.new_zeros(sum(part.size for part in layout.shared), *local.shape[1:])
    for piece, rows in _shared_places(layout, pieces):
        buffer[rows] = local[piece.local : piece.local + piece.length]
    return buffer


def replace_shared_rows(local: Tensor, shared: Tensor, layout: Layout, group: TPGroup) -> Tensor:
    """A copy of ``local`` with the rows that several shards hold taken from ``shared``, of the shape of :func:`shared_rows`."""
    out = local.clone()
    for piece, rows in _shared_places(layout, layout.pieces(group.rank)):
        out[piece.local : piece.local + piece.length] = shared[rows]
    return out


def _shared_places(layout: Layout, pieces: Sequence[Piece]) -> Iterator[tuple[Piece, slice]]:
    offsets, total, starts = {}, 0, layout.part_starts
    for part in layout.shared:
        offsets[part.name] = total - starts[part.name]
        total += part.size
    for piece in pieces:
        if piece.part in offsets:
            start = piece.start + offsets[piece.part]
            yield piece, slice(start, start + piece.length)


def check_dtypes(owner: str, **dtypes: torch.dtype | None) -> None:
    """A ValueError unless each of them is a floating dtype, or None."""
    for name, dtype in dtypes.items():
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"{owner}: {name} must be a floating torch.dtype, got {dtype!r}")


def _check_rows(function: str, x: Tensor, rows: int, tokens: int, group: TPGroup) -> None:
    if not x.ndim or x.shape[0] != rows:
        raise ValueError(
            f"{function}: rank {group.rank} of {group.size} is to give {rows} rows, of {tokens} tokens in all, "
            f"got shape {tuple(x.shape)}"
        )


def _check_width(function: str, x: Tensor, layout: Layout, width: int) -> None:
    assert layout.dim is not None
    if not -x.ndim <= layout.dim < x.ndim or x.shape[layout.dim] != width:
        raise ValueError(f"{function}: dimension {layout.dim} is to be of length {width}, got shape {tuple(x.shape)}")


def copies_for_ranks(tensors: Sequence[Tensor], group: TPGroup, reduce_dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
    """:func:`copy_to_ranks` of several tensors, whose gradients are summed in ONE all-reduce."""
    return tuple(tensors) if group.size == 1 else _CopyToRanks.apply(group, reduce_dtype, *tensors)


def copy_to_ranks(tensor: Tensor, group: TPGroup, reduce_dtype: torch.dtype | None = None) -> Tensor:
    """Marks a replicated tensor as used in a sharded computation: its gradient is summed over the ranks."""
    return copies_for_ranks([tensor], group, reduce_dtype)[0]


def reduce_from_ranks(x: Tensor, group: TPGroup, reduce_dtype: torch.dtype | None = None, owned: bool = False) -> Tensor:
    """The sum of partial results over the ranks, on every rank. Shape unchanged.

    ``owned``: the sum may be written over ``x`` (no backward formula keeps it, as after a product or a sum, and the caller
    does not read it again), which spares a copy of the activations.
    """
    return x if group.size == 1 else _ReduceFromRanks.apply(x, group, reduce_dtype, owned)


def scatter_to_ranks(x: Tensor, layout: Layout, group: TPGroup) -> Tensor:
    """This rank's pieces of a replicated tensor along ``layout.dim`` (negative dimensions are welcome)."""
    if layout.dim is not None:
        _check_width("scatter_to_ranks", x, layout, sum(part.size for part in layout.parts))
    return x if layout.uncut else _ScatterToRanks.apply(x, layout, group)


def gather_from_ranks(x: Tensor, layout: Layout, group: TPGroup) -> Tensor:
    """The whole tensor, in global order, from every rank's pieces along ``layout.dim``."""
    if layout.dim is not None:
        _check_width("gather_from_ranks", x, layout, layout.local_size(group.rank))
    return x if layout.uncut else _GatherFromRanks.apply(x, layout, group)


def gather_tokens(x: Tensor, tokens: int, group: TPGroup, reduce_dtype: torch.dtype | None = None) -> Tensor:
    """[tokens of this rank, ...] -> [tokens, ...], entering a region whose gradients are partial sums."""
    counts = token_counts(tokens, group)
    _check_rows("gather_tokens", x, counts[group.rank], tokens, group)
    return x if group.size == 1 else _GatherTokens.apply(x, counts, group, reduce_dtype)


def reduce_scatter_tokens(x: Tensor, tokens: int, group: TPGroup, reduce_dtype: torch.dtype | None = None) -> Tensor:
    """Partial sums [tokens, ...] -> the summed rows of this rank's tokens."""
    _check_rows("reduce_scatter_tokens", x, tokens, tokens, group)
    return x if group.size == 1 else _ReduceScatterTokens.apply(x, token_counts(tokens, group), group, reduce_dtype)


def split_tokens(x: Tensor, group: TPGroup) -> Tensor:
    """A replicated [tokens, ...] -> this rank's rows of it."""
    return x if group.size == 1 else _SplitTokens.apply(x, token_counts(x.shape[0], group), group)


def merge_tokens(x: Tensor, tokens: int, group: TPGroup) -> Tensor:
    """[tokens of this rank, ...] -> a replicated [tokens, ...], used alike on every rank."""
    counts = token_counts(tokens, group)
    _check_rows("merge_tokens", x, counts[group.rank], tokens, group)
    return x if group.size == 1 else _MergeTokens.apply(x, counts, group)


def sum_over_holders(parameter: Tensor, layout: Layout, group: TPGroup, reduce_dtype: torch.dtype | None = None) -> Tensor:
    """Marks a column-parallel parameter of which ranks share rows: their gradients become the sum over the holders."""
    return _SumOverHolders.apply(parameter, layout, group, reduce_dtype) if layout.shared else parameter
