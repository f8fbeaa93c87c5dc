"""Mistakes that others have made, to be made on purpose: a comparison that lets one pass has no teeth.

Each is a context manager that patches the library inside a worker process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from parallel import collectives
from parallel.cross_entropy import TokenLoss
from parallel.group import TPGroup
from parallel.layout import Layout
from parallel.linear import RowParallelLinear
from tpblock.dropout import Dropout

Plant = Callable[[], AbstractContextManager[Any]]


def patches(**replacements: Any) -> Plant:
    """Replaces names, written with __ for the dot: ``parallel__linear__f=...``."""

    @contextmanager
    def planted() -> Iterator[None]:
        with ExitStack() as stack:
            for name, replacement in replacements.items():
                stack.enter_context(mock.patch(name.replace("__", "."), replacement))
            yield

    return planted


def first_argument(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x


def all_arguments(*tensors: Tensor, **_: Any) -> Any:
    return tensors[0] if len(tensors) == 1 else tensors


def bias_before_reduction(self: RowParallelLinear, x: Tensor) -> Tensor:
    y = self.partial(x)
    return self.reduce(y if self.bias is None else y + self.bias)


def bias_before_parallel_reduction(self: RowParallelLinear, x: Tensor) -> Tensor:
    y = F.linear(x, self.weight)
    return y if self.bias is None else y + self.bias


def local_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, **_: Any) -> Tensor:
    return F.linear(x, weight, bias)


class SumsBothWays(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TPGroup, reduce_dtype: torch.dtype | None) -> Tensor:
        ctx.group = group
        return collectives.all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return collectives.all_reduce(grad, ctx.group), None, None


class SumsAndAverages(Function):
    @staticmethod
    def forward(ctx: Any, group: TPGroup, reduce_dtype: torch.dtype | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(collectives.all_reduce(g, ctx.group) / ctx.group.size for g in grads)


def count_replicas(value: Tensor, layout: Layout, group: TPGroup) -> list[Tensor]:
    return [value]


def plain_slice(full: Tensor, layout: Layout, rank: int) -> Tensor:
    if layout.dim is None:
        return full.clone()
    start = sum(layout.local_size(r) for r in range(rank))
    return full.narrow(layout.dim, start, layout.local_size(rank)).clone()


def smooth_over_local_columns(self: TokenLoss, e: Tensor, *arguments: Any) -> Tensor:
    dz = logit_gradient(self, e, *arguments)
    return dz.sub_(self.label_smoothing * (1 / self.run.length - 1 / self.part.size))


logit_gradient = TokenLoss.logit_gradient


def dropout_by_local_index(self: Dropout, x: Tensor, context: Any, **_: Any) -> Tensor:
    return dropout_forward(self, x, context, offset=0)


dropout_forward = Dropout.forward


PLANTS: dict[str, Plant] = {
    "row bias added on every rank": patches(parallel__linear__RowParallelLinear__forward=bias_before_reduction),
    "biases of a parallel block added on every rank": patches(
        parallel__linear__RowParallelLinear__partial=bias_before_parallel_reduction,
        parallel__linear__RowParallelLinear__add_bias=lambda self, y: y,
    ),
    "output not reduced": patches(parallel__linear__reduce_from_ranks=first_argument),
    "output reduced again in backward": patches(parallel__regions___ReduceFromRanks=SumsBothWays),
    "input gradient not reduced": patches(
        parallel__linear__column_parallel_linear=local_linear, tpblock__model__column_parallel_linear=local_linear
    ),
    "gradients of shared KV heads not summed": patches(parallel__linear__sum_over_holders=first_argument),
    "norm gradients not summed": patches(tpblock__norm__copy_to_ranks=all_arguments),
    "norm gradients averaged": patches(parallel__regions___CopyToRanks=SumsAndAverages),
    "row bias gradients not summed": patches(parallel__linear__copy_to_ranks=all_arguments),
    "position gradients not summed": patches(tpblock__model__copy_to_ranks=all_arguments),
    "gradients entering two norms not summed": patches(tpblock__block__copy_to_ranks=all_arguments),
    "embedding not reduced": patches(parallel__vocab__reduce_from_ranks=first_argument),
    "replicated gradients counted on every rank": patches(parallel__gradients__counted_pieces=count_replicas),
    "fused weights cut into plain slices": patches(parallel__state__take_pieces=plain_slice),
    "labels smoothed over this rank's columns": patches(
        parallel__cross_entropy__TokenLoss__logit_gradient=smooth_over_local_columns
    ),
    "dropout by local index": patches(tpblock__dropout__Dropout__forward=dropout_by_local_index),
}
