"""Invariant mode: the pairs of regions.py over virtual shards, with every sum a fixed tree (see tree.py).

| function           | forward                                    | backward                                              |
|--------------------|--------------------------------------------|-------------------------------------------------------|
| copy_to_shards     | a copy for each of this rank's shards      | tree sum over all shards                              |
| gather_to_shards   | all-gather of token rows, then as above    | tree sum over all shards, of this rank's token rows   |
| sum_shards         | tree sum over all shards                   | the gradient to each of this rank's shards            |
| weight_shards      | a parameter as one tensor a shard          | the shards' gradients as one tensor                   |
| by_token_shard     | a function of tokens and small parameters  | the parameters' gradients a tree sum over token shards|

Two rules make the bits of everything between these sums independent of the number of ranks. Work is done shard by shard, so that
every matrix product and every elementwise pass has the same shapes and strides whoever owns the shard. And operands start at
multiples of 64 bytes, since vectorised code may treat the elements before such a boundary differently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from parallel import collectives, tree
from parallel.group import TPGroup
from parallel.layout import Layout, deal
from parallel.regions import copies_for_ranks, gather_tokens, token_counts


def _tree_sum(leaves: Sequence[Tensor], group: TPGroup, counts: list[int] | None, reduce_dtype: torch.dtype | None) -> Tensor:
    """The sum of all shards' leaves: whole, or with ``counts`` this rank's rows of it. Nodes are of ``reduce_dtype``."""
    dtype = leaves[0].dtype
    if reduce_dtype is not None:
        leaves = [leaf.to(reduce_dtype) for leaf in leaves]
    total = tree.all_reduce(leaves, group) if counts is None else tree.reduce_scatter(leaves, group, counts)
    return total.to(dtype)


class _CopyToShards(Function):
    @staticmethod
    def forward(ctx: Any, group: TPGroup, reduce_dtype: torch.dtype | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.reduce_dtype = group, reduce_dtype
        return tuple(t.view_as(t) for _ in group.local_shards for t in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        each = len(grads) // len(ctx.group.local_shards)
        leaves = [joined([g.reshape(-1) for g in grads[at : at + each]]) for at in range(0, len(grads), each)]
        total = _tree_sum(leaves, ctx.group, None, ctx.reduce_dtype).split([g.numel() for g in grads[:each]])
        return None, None, *(t.view(g.shape).to(g.dtype) for t, g in zip(total, grads[:each], strict=True))


class _GatherToShards(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: TPGroup, counts: list[int], reduce_dtype: torch.dtype | None
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.counts, ctx.reduce_dtype = group, counts, reduce_dtype
        full = aligned(collectives.all_gather(x, group, counts))
        return tuple(full.view_as(full) for _ in group.local_shards)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _tree_sum(grads, ctx.group, ctx.counts, ctx.reduce_dtype), None, None, None


class _SumShards(Function):
    @staticmethod
    def forward(
        ctx: Any, group: TPGroup, counts: list[int] | None, reduce_dtype: torch.dtype | None, *leaves: Tensor
    ) -> Tensor:
        ctx.group, ctx.counts, ctx.shards = group, counts, len(leaves)
        return _tree_sum(leaves, group, counts, reduce_dtype).detach()  # as in regions._ReduceFromRanks

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.counts is not None:
            grad = aligned(collectives.all_gather(grad, ctx.group, ctx.counts))
        return None, None, None, *(grad,) * ctx.shards


class _WeightShards(Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, dim: int, sizes: list[int]) -> tuple[Tensor, ...]:
        ctx.dim = dim
        return tuple(aligned(shard) for shard in weight.split(sizes, dim))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return joined(grads, ctx.dim), None, None


def joined(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """``torch.cat``, which would copy even a single tensor."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim)


def aligned(x: Tensor) -> Tensor:
    """``x``, copied unless it is contiguous and starts at a multiple of 64 bytes."""
    return x if x.is_contiguous() and x.data_ptr() % 64 == 0 else x.clone(memory_format=torch.contiguous_format)


def as_matrix(x: Tensor) -> Tensor:
    """[..., width] -> [tokens, width]; a single vector is one token."""
    return x.flatten(0, -2) if x.ndim > 1 else x.unsqueeze(0)


def copy_to_shards(
    tensors: Sequence[Tensor], group: TPGroup, reduce_dtype: torch.dtype | None = None
) -> list[tuple[Tensor, ...]]:
    """For each of this rank's shards its own copy of the tensors, whose gradients are summed in ONE exchange."""
    if not group.invariant:
        return [copies_for_ranks(tensors, group, reduce_dtype)]
    copies = _CopyToShards.apply(group, reduce_dtype, *tensors)
    return [copies[at : at + len(tensors)] for at in range(0, len(copies), len(tensors))]


def gather_to_shards(x: Tensor, tokens: int, group: TPGroup, reduce_dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
    """[tokens of this rank, ...] -> for each of this rank's shards all tokens [tokens, ...]."""
    if not group.invariant:
        return (gather_tokens(x, tokens, group, reduce_dtype),)
    return _GatherToShards.apply(x, group, token_counts(tokens, group), reduce_dtype)


def sum_shards(
    leaves: Sequence[Tensor], group: TPGroup, *, scatter: bool = False, reduce_dtype: torch.dtype | None = None
) -> Tensor:
    """The sum of all shards' leaves [tokens, ...], or with ``scatter`` the rows of this rank's tokens of it."""
    counts = token_counts(leaves[0].shape[0], group) if scatter else None
    return _SumShards.apply(group, counts, reduce_dtype, *leaves)


def weight_shards(parameter: Tensor, layout: Layout, rank: int) -> tuple[Tensor, ...]:
    """A local parameter as one contiguous tensor for each shard that ``rank`` owns."""
    assert layout.dim is not None
    return _WeightShards.apply(parameter, layout.dim, layout.shard_sizes(rank))


def by_token_shard(
    function: Callable[..., Tensor],
    per_token: Sequence[Tensor],
    parameters: Sequence[Tensor],
    *,
    group: TPGroup,
    tokens: int | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> Tensor:
    """``function(*per_token, *parameters)`` for a function of each token alone, with the parameters' gradients summed over the
    tokens in an order that does not depend on who holds them.

    The tensors of ``per_token`` are [..., width] with all tokens on every rank or, if ``tokens`` gives their number, with this
    rank's [T_r, width]. The result has the shape of the first.
    """
    check_supported(per_token[0])
    rows = [as_matrix(x) for x in per_token]
    if tokens is None:  # Every rank has all token shards and makes the same sum.
        tokens, group = rows[0].shape[0], TPGroup(virtual_shards=group.shards)
    counts = [run.length for run in deal(tokens, group.shards)[group.local_shards.start : group.local_shards.stop]]
    copies = copy_to_shards(parameters, group, reduce_dtype)
    shards = zip(*(x.split(counts) for x in rows), strict=True)
    done = [function(*(aligned(x) for x in shard), *copy) for shard, copy in zip(shards, copies, strict=True)]
    return joined(done).view(per_token[0].shape)


def check_supported(x: Tensor) -> None:
    """A ValueError for settings under which bits could depend on the number of ranks after all."""
    invariant_mode_cannot_be_compiled()
    if torch.is_autocast_enabled(x.device.type):
        raise ValueError(
            "invariant mode (virtual_shards) cannot run under autocast: build the model in the dtype it is to use"
        )
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    if x.device.type == "cuda" and (only_warned or not torch.are_deterministic_algorithms_enabled()):
        raise ValueError(
            "invariant mode (virtual_shards) on CUDA needs torch.use_deterministic_algorithms(True) "
            "and CUBLAS_WORKSPACE_CONFIG=:4096:8"
        )


def invariant_mode_cannot_be_compiled() -> None:
    """Does nothing. Once :func:`forbid_compilation` has marked it, torch.compile stops at it with its name."""


def forbid_compilation() -> None:
    """Makes torch.compile fail on whatever calls :func:`check_supported`, since a compiler may fuse and reorder as it likes.

    To raise from there would not do: unless asked for one whole graph, the compiler would leave that frame alone, and compile
    the ones below it.
    """
    import torch._dynamo  # seconds that only this mode pays

    torch._dynamo.forbid_in_graph(invariant_mode_cannot_be_compiled)
