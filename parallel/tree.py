"""Sums whose bits do not depend on the number of ranks.

Floating-point addition does not associate, so a sum over ranks has the bits of the order in which it was taken. Here every sum
over the V virtual shards of a model is one fixed binary tree over V leaves, each node rounded to the leaves' dtype. A rank owns
a contiguous run of the leaves. It folds the largest subtrees that lie inside its run, sends their values where the rest of the
tree is finished, and whoever owns which leaf, the same additions have been made.

Transport of an all-reduce over n ranks: an all-to-all in which each rank receives all others' nodes for 1/n of the elements,
the end of the tree there, and an all-gather. When a rank's run is one subtree (V / n a power of two) that is
2 (n-1)/n of the tensor a rank, the bytes of a ring all-reduce; other runs are several subtrees and send each of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from parallel import collectives
from parallel.group import TPGroup
from parallel.layout import Run, deal


def children(node: Run) -> tuple[Run, Run]:
    """The two halves of a node over leaves [start, stop): the left one is the largest power of two below its length."""
    middle = node.start + (1 << (node.length - 1).bit_length() - 1)
    return Run(node.start, middle), Run(middle, node.stop)


def subtrees(run: Run, leaves: int) -> list[Run]:
    """The largest nodes of the tree over ``leaves`` leaves that lie inside ``run``, in order; together they cover it."""

    def visit(node: Run) -> list[Run]:
        if run.start <= node.start and node.stop <= run.stop:
            return [node]
        if node.stop <= run.start or run.stop <= node.start:
            return []
        left, right = children(node)
        return visit(left) + visit(right)

    return visit(Run(0, leaves)) if run.length else []


def fold(node: Run, values: Mapping[Run, Tensor]) -> Tensor:
    """The value of ``node`` from the values of nodes below it, by the tree's additions."""
    if node in values:
        return values[node]
    left, right = children(node)
    return fold(left, values) + fold(right, values)


def reduce_scatter(leaves: Sequence[Tensor], group: TPGroup, counts: Sequence[int]) -> Tensor:
    """The tree sum of all ranks' leaves, of which each rank keeps its rows.

    Args:
        leaves: one tensor [sum(counts), ...] for each of this rank's shards, all of one shape.
        counts: how many rows each rank keeps.

    Returns:
        [counts[rank], ...]
    """
    run, root = group.owners[group.rank], Run(0, group.shards)
    values = {Run(shard, shard + 1): leaf for shard, leaf in enumerate(leaves, run.start)}
    if group.size == 1:
        return fold(root, values)
    nodes = [fold(node, values) for node in subtrees(run, group.shards)]
    if len(nodes) == 1:
        outgoing = nodes[0]
    else:
        by_rank = zip(*(node.split(list(counts)) for node in nodes), strict=True)
        outgoing = torch.cat([chunk for chunks in by_rank for chunk in chunks])
    mine = counts[group.rank]
    by_owner = [subtrees(owner, group.shards) for owner in group.owners]
    arriving = [node for owned in by_owner for node in owned]
    received = collectives.all_to_all(
        outgoing,
        group,
        given=[len(nodes) * count for count in counts],
        taken=[len(owned) * mine for owned in by_owner],
        most=max(map(len, by_owner)) * sum(counts),
    )
    return fold(root, dict(zip(arriving, received.split(mine), strict=True) if mine else {root: received}))


def all_reduce(leaves: Sequence[Tensor], group: TPGroup) -> Tensor:
    """The tree sum of all ranks' leaves, on every rank. All leaves have one shape."""
    if group.size == 1:
        return reduce_scatter(leaves, group, [])
    counts = [run.length for run in deal(leaves[0].numel(), group.size)]
    mine = reduce_scatter([leaf.reshape(-1) for leaf in leaves], group, counts)
    return collectives.all_gather(mine, group, counts).view(leaves[0].shape)
