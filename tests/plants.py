"""Mistakes that others have made, to be made on purpose: a comparison that lets one pass has no teeth.

Each is a context manager that patches the library inside a worker process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parallel import collectives, regions
from parallel.cross_entropy import TokenLoss
from parallel.group import TPGroup
from parallel.layout import Layout
from parallel.linear import ColumnParallelLinear, RowParallelLinear
from tpblock.attention import Attention
from tpblock.context import Keys
from tpblock.dropout import Dropout
from tpblock.rope import apply_rotary

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


def bias_before_reduction(self: RowParallelLinear, xs: Sequence[Tensor]) -> Tensor:
    return self.reduce([F.linear(x, self.weight, self.bias) for x in xs])


def leaves_with_bias(self: RowParallelLinear, xs: Sequence[Tensor]) -> list[Tensor]:
    return [F.linear(x, self.weight, self.bias) for x in xs]


def local_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, **_: Any) -> list[Tensor]:
    return [F.linear(x, weight, bias)]


def reduce_both_ways(x: Tensor, group: TPGroup, *arguments: Any, **options: Any) -> Tensor:
    return regions.copy_to_ranks(reduce_from_ranks(x, group, *arguments, **options), group)


reduce_from_ranks = regions.reduce_from_ranks


def copy_and_average(tensors: Sequence[Tensor], group: TPGroup, *_: Any) -> tuple[Tensor, ...]:
    copies = regions.copies_for_ranks(tensors, group)
    for copy in copies:
        copy.register_hook(lambda grad: grad / group.size)
    return copies


def one_copy_a_shard(tensors: Sequence[Tensor], group: TPGroup, *_: Any) -> list[tuple[Tensor, ...]]:
    return [tuple(tensors)]


def norm_of_all_copies(model: nn.Module, group: TPGroup, p: float = 2.0) -> Tensor:
    powers = torch.stack([torch.linalg.vector_norm(parameter.grad, p).double() for parameter in model.parameters()])
    if p == math.inf:
        return collectives.all_reduce(powers.amax(), group, "max")
    return collectives.all_reduce(powers.pow(p).sum(), group).pow(1 / p)


def plain_slice(full: Tensor, layout: Layout, rank: int) -> Tensor:
    if layout.dim is None:
        return full.clone()
    start = sum(layout.local_size(r) for r in range(rank))
    return full.narrow(layout.dim, start, layout.local_size(rank)).clone()


def smooth_over_local_columns(self: TokenLoss, e: Tensor, *arguments: Any, **options: Any) -> Tensor:
    dz = logit_gradient(self, e, *arguments, **options)
    return dz.sub_(self.label_smoothing * (1 / self.run.length - 1 / self.part.size))


logit_gradient = TokenLoss.logit_gradient


def dropout_by_local_index(self: Dropout, x: Tensor, context: Any, **_: Any) -> Tensor:
    return dropout_forward(self, x, context, offset=0)


dropout_forward = Dropout.forward


def wider_window(start: int, seq: int, window: int | None, device: torch.device) -> Keys:
    return keys_of(start, seq, None if window is None else window + 1, device)


keys_of = Keys.of


def norm_after_rotary(self: Attention, qk: Tensor, shard: Any, norms: Any, rotary: Any) -> Tensor:
    return prepare(self, apply_rotary(qk, rotary), shard, norms, None)


prepare = Attention._prepare


def reversed_bias(self: ColumnParallelLinear) -> tuple[Tensor, Tensor | None]:
    weight, bias = parameters_of_holders(self)
    return weight, None if bias is None else bias.flip(0)


parameters_of_holders = ColumnParallelLinear._parameters_of_holders


PLANTS: dict[str, Plant] = {
    "row bias added on every rank": patches(parallel__linear__RowParallelLinear__from_shards=bias_before_reduction),
    "biases of a parallel block added on every rank": patches(
        parallel__linear__RowParallelLinear__leaves=leaves_with_bias,
        parallel__linear__RowParallelLinear__add_bias=lambda self, y, tokens: y,
    ),
    "output not reduced": patches(parallel__linear__reduce_from_ranks=first_argument),
    "output reduced again in backward": patches(parallel__linear__reduce_from_ranks=reduce_both_ways),
    "input gradient not reduced": patches(
        parallel__linear__column_parallel_linear=local_linear, tpblock__model__column_parallel_linear=local_linear
    ),
    "gradients of shared KV heads not summed": patches(parallel__linear__sum_over_holders=first_argument),
    "norm gradients not summed": patches(tpblock__norm__copies_for_ranks=first_argument),
    "norm gradients averaged": patches(tpblock__norm__copies_for_ranks=copy_and_average),
    "row bias gradients not summed": patches(parallel__linear__copy_to_ranks=first_argument),
    "position gradients not summed": patches(tpblock__model__copy_to_ranks=first_argument),
    "gradients entering two norms not summed": patches(tpblock__block__copy_to_shards=one_copy_a_shard),
    "embedding not reduced": patches(parallel__vocab__reduce_from_ranks=first_argument),
    "replicated gradients counted on every rank": patches(
        parallel__gradients__grad_norm=norm_of_all_copies, tests__equality__grad_norm=norm_of_all_copies
    ),
    "fused weights cut into plain slices": patches(parallel__state__take_pieces=plain_slice),
    "labels smoothed over this rank's columns": patches(
        parallel__cross_entropy__TokenLoss__logit_gradient=smooth_over_local_columns
    ),
    "QK-norm gradients not summed": patches(tpblock__attention__copy_to_shards=one_copy_a_shard),
    "QK-norm after rotary": patches(tpblock__attention__Attention___prepare=norm_after_rotary),
    "window off by one": patches(tpblock__context__Keys__of=wider_window),
    "value biases on queries": patches(parallel__linear__ColumnParallelLinear___parameters_of_holders=reversed_bias),
    "dropout by local index": patches(tpblock__dropout__Dropout__forward=dropout_by_local_index),
}
