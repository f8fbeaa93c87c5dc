"""The average of gradients over data-parallel replicas, in an order that depends on nothing."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from parallel import tree
from parallel.group import TPGroup


class ReplicaAverage:
    """Averages a model's gradients over micro-batches, as a fixed binary tree over all of them (see tree.py).

    An ordinary all-reduce adds the replicas up in an order that depends on where an element lies in its bucket, and so on how the
    parameter is cut over tensor-parallel ranks. This one adds them in one order for all.

    ::

        average = ReplicaAverage(model, replicas)                    # replicas: the group along the mesh's dp dimension
        for micro_batch in replicas.local_shards:                    # global numbers of this replica's micro-batches
            model(ids[micro_batch], labels=labels[micro_batch]).backward()
            average.add()
        average.finish()                                             # .grad is now the average, alike on all replicas

    With one micro-batch a replica (the default), TP2 x DP2 has the bits of TP1 x DP2. With
    ``replicas.with_virtual_shards(4)`` the global batch is 4 micro-batches whatever the number of replicas, and 1, 2 and 4 of
    them give the same bits. Micro-batches are to be of equal size, their losses means over their own tokens.
    """

    def __init__(self, model: nn.Module, replicas: TPGroup) -> None:
        self.model, self.replicas = model, replicas
        self._leaves: list[list[Tensor | None]] = []

    def add(self) -> None:
        """Takes the gradients of one micro-batch and clears them."""
        self._leaves.append([parameter.grad for parameter in self.model.parameters()])
        self.model.zero_grad(set_to_none=True)

    @torch.no_grad()
    def finish(self) -> None:
        """Sets every gradient to the average over all replicas' micro-batches.

        Raises:
            ValueError: if this replica did not add as many micro-batches as are its own.
        """
        leaves, self._leaves = self._leaves, []
        due = len(self.replicas.local_shards)
        if len(leaves) != due:
            raise ValueError(
                f"replica {self.replicas.rank} has {due} of {self.replicas.shards} micro-batches, got {len(leaves)}"
            )
        for parameter, *grads in zip(self.model.parameters(), *leaves, strict=True):
            if parameter.requires_grad:
                given = [torch.zeros_like(parameter) if grad is None else grad for grad in grads]
                parameter.grad = tree.all_reduce(given, self.replicas) / self.replicas.shards
