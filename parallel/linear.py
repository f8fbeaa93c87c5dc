"""The two Megatron linears. Their docstrings are their algebra; everything else in the library is built on them.

Shapes: T tokens (any number of leading dimensions), I = in_features, O = out_features, n ranks, O_r and I_r this rank's share
(O/n and I/n when they divide, dealt as evenly as possible when not), T_r this rank's tokens under sequence parallelism.

Source: Shoeybi et al., Megatron-LM (2019), section 3; Korthikanti et al., Reducing Activation Recomputation (2022), section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from parallel import collectives, rng
from parallel.group import TPGroup
from parallel.layout import Layout, Part, column_layout, row_layout
from parallel.matmul import linear, matmul
from parallel.regions import (
    check_dtypes,
    copy_to_ranks,
    gather_from_ranks,
    reduce_from_ranks,
    reduce_scatter_tokens,
    scatter_to_ranks,
    sum_over_holders,
    token_counts,
)
from parallel.virtual import (
    aligned,
    as_matrix,
    by_token_shard,
    check_supported,
    copy_to_shards,
    forbid_compilation,
    gather_to_shards,
    sum_shards,
    weight_shards,
)


class _ColumnLinear(Function):
    """y = x W^T + b, with the collective on dx under way while dW is computed (and, under sequence parallelism, the second
    gather of x under way while dx is computed)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: TPGroup,
        counts: list[int] | None,
        reduce_dtype: torch.dtype | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.counts, ctx.reduce_dtype, ctx.has_bias = group, counts, reduce_dtype, bias is not None
        if counts is not None:
            x = collectives.all_gather(x, group, counts)
        return matmul(x, weight.t(), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        group, counts, reduce_dtype = ctx.group, ctx.counts, ctx.reduce_dtype
        need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
        dx = dw = db = finish_dx = None
        finish_x = collectives.start_all_gather(x, group, counts) if counts is not None and need_dw else None
        if need_dx:
            partial = matmul(dy, weight)
            if counts is None:
                finish_dx = collectives.start_all_reduce(partial, group, reduce_dtype)
            else:
                finish_dx = collectives.start_reduce_scatter(partial, group, counts, reduce_dtype)
        if need_dw:
            full = x if finish_x is None else finish_x()
            dw = matmul(as_matrix(dy).t(), as_matrix(full))
        if ctx.has_bias and need_db:
            db = as_matrix(dy).sum(0)
        if finish_dx is not None:
            dx = finish_dx()
        return dx, dw, db, None, None, None


def column_parallel_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    layout: Layout,
    group: TPGroup,
    sequence_parallel: bool = False,
    tokens: int | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """``F.linear`` with a weight cut along its output as ``layout`` says; see :class:`ColumnParallelLinear` for the algebra.

    Returns:
        y_s [..., O_s] for each shard that this rank owns: one, or in invariant mode several.
    """
    counts = None
    if sequence_parallel:
        if tokens is None:  # Ranks that each guessed the total from their own rows would wait for each other.
            raise ValueError("under sequence parallelism a column-parallel linear needs tokens=..., the total over the ranks")
        counts = token_counts(tokens, group)
        if x.shape[0] != counts[group.rank]:
            raise ValueError(
                f"sequence parallelism deals {tokens} tokens as {counts} over {group.size} ranks, "
                f"rank {group.rank} was given {x.shape[0]}"
            )
    if group.invariant:
        check_supported(x)
        if tokens is not None and sequence_parallel:
            copies: Sequence[Tensor] = gather_to_shards(x, tokens, group, reduce_dtype)
        else:
            copies = [copy for (copy,) in copy_to_shards([aligned(as_matrix(x))], group, reduce_dtype)]
        ys = linear_shards(copies, weight, bias, layout, group)
        return ys if sequence_parallel else [y.view(*x.shape[:-1], y.shape[-1]) for y in ys]
    if group.size == 1:
        return [linear(x, weight, bias)]
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    return [_ColumnLinear.apply(x, weight, bias, group, counts, reduce_dtype)]


def linear_shards(xs: Sequence[Tensor], weight: Tensor, bias: Tensor | None, layout: Layout, group: TPGroup) -> list[Tensor]:
    """``F.linear`` of each shard that this rank owns with its own x, without any collective."""
    if not group.invariant:
        return [linear(xs[0], weight, bias)]
    weights = weight_shards(weight, layout, group.rank)
    if bias is None:
        return [linear(x, w) for x, w in zip(xs, weights, strict=True)]
    biases = weight_shards(bias, column_layout(layout.shape[:1], layout.parts, layout.owners), group.rank)
    return [linear(x, w, b) for x, w, b in zip(xs, weights, biases, strict=True)]


class ColumnParallelLinear(nn.Module):
    """A linear cut along its output, so that each rank computes some of the columns of y.

    ::

        W  [O, I]     rank r holds W_r [O_r, I];   b [O], b_r [O_r]
        forward       y_r = x W_r^T + b_r          x [T, I] whole  ->  y_r [T, O_r]     no collective
        grad input    dx  = sum_r dy_r W_r         [T, I]          one all-reduce, while dW_r is computed
        grad weight   dW_r = dy_r^T x              [O_r, I]        no collective
        grad bias     db_r = sum_T dy_r            [O_r]           no collective

    With ``sequence_parallel`` x is this rank's tokens x_r [T_r, I] (``regions.split_tokens`` cuts a whole x): forward all-gathers
    it, the input gradient is reduce-scattered, and backward gathers x again (overlapped with dy_r W_r) rather than keep it whole.

    Args:
        in_features, out_features, bias, device, dtype: as in ``torch.nn.Linear``, all of global size.
        group: the ranks that share the weight.
        parts: named sections of the output, each dealt on its own; a fused ``gate`` and ``up`` of d_ff each gives the local
            weight [2*d_ff/n, I] with this rank's gate rows first, then its up rows. Default: one part of single rows.
        gather_output: return the whole y [T, O] on every rank (one more all-gather) in global order.
        sequence_parallel: x is cut along its tokens (dimension 0).
        reduce_dtype: the dtype in which input gradients are summed over the ranks; None: their own.
        seed, name: initial values are a function of these and of the global coordinates alone (see rng.py); layers that
            are to differ need different names. ``seed=None`` leaves them unset for an enclosing module to fill.

    Rows that several ranks hold (KV heads when there are fewer than ranks) get the sum of their gradients over the holders:
    one more all-reduce, of those rows, in backward.

    In invariant mode (``group.virtual_shards``) a rank owns several shards r, computes each on its own, and the sum is a tree.

    Raises:
        ValueError: if the parts do not add up to ``out_features``, or a rank would hold none of a part.
    """

    layouts: dict[str, Layout]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        group: TPGroup,
        parts: Sequence[Part] | None = None,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        reduce_dtype: torch.dtype | None = None,
        seed: int | None = 0,
        name: str = "",
    ) -> None:
        super().__init__()
        check_sizes("ColumnParallelLinear", in_features, out_features)
        check_dtypes("ColumnParallelLinear", dtype=dtype, reduce_dtype=reduce_dtype)
        self.in_features, self.out_features, self.group = in_features, out_features, group
        self.gather_output, self.sequence_parallel, self.reduce_dtype = gather_output, sequence_parallel, reduce_dtype
        parts = parts or [Part.even("output", out_features, group.shards)]
        check_parts("ColumnParallelLinear", parts, group)
        layout = column_layout((out_features, in_features), parts, group.virtual_owners)
        self.layouts = {"weight": layout}
        self.weight = nn.Parameter(torch.empty(layout.local_shape(group.rank), device=device, dtype=dtype))
        if bias:
            self.layouts["bias"] = column_layout((out_features,), parts, group.virtual_owners)
            shape = self.layouts["bias"].local_shape(group.rank)
            self.bias: nn.Parameter | None = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        if seed is not None:
            self.reset_parameters(seed, name)

    def reset_parameters(self, seed: int = 0, name: str = "") -> None:
        """Draws the weight from N(0, 1/(3 in_features)), the variance of ``torch.nn.Linear``, and clears the bias."""
        reset_linear(self, seed, name)

    def forward(self, x: Tensor, tokens: int | None = None) -> Tensor:
        """y, of the shapes given above. ``tokens``: the total over the ranks, needed under sequence parallelism."""
        shards = self.shards(x, tokens)
        y = shards[0] if len(shards) == 1 else torch.cat(shards, -1)
        if self.gather_output:
            y = gather_from_ranks(y, self.layouts["weight"].features, self.group)
        return y

    def shards(self, x: Tensor, tokens: int | None = None) -> list[Tensor]:
        """y_r as one tensor for each shard that this rank owns: what the sharded region between two linears works on."""
        return column_parallel_linear(
            self._checked(x),
            *self._parameters_of_holders(),
            layout=self.layouts["weight"],
            group=self.group,
            sequence_parallel=self.sequence_parallel,
            tokens=tokens,
            reduce_dtype=self.reduce_dtype,
        )

    def local(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """x_s W_s^T + b_s of each shard, without the collectives on x and dx, for a caller that has entered the sharded region
        itself (``copy_to_ranks``, ``gather_tokens``, ...): the counterpart of :meth:`RowParallelLinear.leaves`."""
        xs = [self._checked(x) for x in xs]
        return linear_shards(xs, *self._parameters_of_holders(), self.layouts["weight"], self.group)

    def _checked(self, x: Tensor) -> Tensor:
        check_input("ColumnParallelLinear", x, self.weight)
        if x.shape[-1] != self.in_features:
            raise ValueError(f"ColumnParallelLinear expects inputs of width {self.in_features}, got {x.shape[-1]}")
        return x

    def _parameters_of_holders(self) -> tuple[Tensor, Tensor | None]:
        weight = sum_over_holders(self.weight, self.layouts["weight"], self.group, self.reduce_dtype)
        if self.bias is None:
            return weight, None
        return weight, sum_over_holders(self.bias, self.layouts["bias"], self.group, self.reduce_dtype)

    def split(self, y: Tensor) -> tuple[Tensor, ...]:
        """The local parts of an output [..., O_r], in order (in invariant mode those of each shard in turn), as views."""
        return y.split(self.layouts["weight"].local_sections(self.group.rank), dim=-1)

    def extra_repr(self) -> str:
        parts = ", ".join(f"{part.name} {part.size}" for part in self.layouts["weight"].parts)
        return f"in={self.in_features}, out={self.out_features} ({parts}), rank {self.group.rank} of {self.group.size}"


class RowParallelLinear(nn.Module):
    """A linear cut along its input, so that each rank computes a partial sum of all of y.

    ::

        W  [O, I]     rank r holds W_r [O, I_r];   b [O] whole on every rank
        forward       y = sum_r x_r W_r^T + b      x_r [T, I_r]  ->  y [T, O]    one all-reduce; b added once, after it
        grad input    dx_r = dy W_r                [T, I_r]                      no collective
        grad weight   dW_r = dy^T x_r              [O, I_r]                      no collective
        grad bias     db = sum_T dy                [O]                           no collective

    With ``sequence_parallel`` the all-reduce becomes a reduce-scatter to this rank's tokens y_r [T_r, O], backward
    all-gathers dy, and db is summed over the ranks (an all-reduce of [O]).

    Args:
        in_features, out_features, bias, device, dtype: as in ``torch.nn.Linear``, all of global size.
        group: the ranks that share the weight.
        parts: named sections of the input, dealt as the outputs of the column-parallel layer that feeds this one.
        input_is_parallel: x is x_r already. If False, x is whole and each rank takes its pieces of it.
        sequence_parallel: cut the output along its tokens (dimension 0).
        reduce_dtype: the dtype in which partial sums are added over the ranks; None: their own.
        seed, name: as for :class:`ColumnParallelLinear`.

    Raises:
        ValueError: if the parts do not add up to ``in_features``, or a rank would hold none of a part.
    """

    layouts: dict[str, Layout]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        group: TPGroup,
        parts: Sequence[Part] | None = None,
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
        reduce_dtype: torch.dtype | None = None,
        seed: int | None = 0,
        name: str = "",
    ) -> None:
        super().__init__()
        check_sizes("RowParallelLinear", in_features, out_features)
        check_dtypes("RowParallelLinear", dtype=dtype, reduce_dtype=reduce_dtype)
        self.in_features, self.out_features, self.group = in_features, out_features, group
        self.input_is_parallel, self.sequence_parallel = input_is_parallel, sequence_parallel
        self.reduce_dtype = reduce_dtype
        parts = parts or [Part.even("input", in_features, group.shards)]
        check_parts("RowParallelLinear", parts, group)
        layout = row_layout((out_features, in_features), parts, group.virtual_owners)
        self.layouts = {"weight": layout}
        self.weight = nn.Parameter(torch.empty(layout.local_shape(group.rank), device=device, dtype=dtype))
        if bias:
            self.bias: nn.Parameter | None = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        if seed is not None:
            self.reset_parameters(seed, name)

    def reset_parameters(self, seed: int = 0, name: str = "") -> None:
        """Draws the weight from N(0, 1/(3 in_features)), the variance of ``torch.nn.Linear``, and clears the bias."""
        reset_linear(self, seed, name)

    def leaves(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """The summands x_s W_s^T [T, O] of the shards that this rank owns, for a caller that adds to them before one
        :meth:`reduce`."""
        layout, rank = self.layouts["weight"], self.group.rank
        for x, width in zip(xs, layout.shard_sizes(rank), strict=True):
            check_input("RowParallelLinear", x, self.weight)
            if x.shape[-1] != width:
                raise ValueError(
                    f"RowParallelLinear expects this rank's {width} of {self.in_features} inputs, got {x.shape[-1]}"
                )
        if not self.group.invariant:
            return [linear(xs[0], self.weight)]
        check_supported(xs[0])
        leaves = linear_shards([as_matrix(x) for x in xs], self.weight, None, layout, self.group)
        return [leaf.view(*xs[0].shape[:-1], self.out_features) for leaf in leaves]

    def reduce(self, leaves: Sequence[Tensor]) -> Tensor:
        """The sum of all ranks' summands (without the bias): [T, O], or [T_r, O] under sequence parallelism.

        It may reuse the memory of the summands.
        """
        if self.group.invariant:
            return sum_shards(leaves, self.group, scatter=self.sequence_parallel, reduce_dtype=self.reduce_dtype)
        if self.sequence_parallel:
            return reduce_scatter_tokens(leaves[0], leaves[0].shape[0], self.group, self.reduce_dtype)
        return reduce_from_ranks(leaves[0], self.group, self.reduce_dtype, owned=True)

    def add_bias(self, y: Tensor, tokens: int | None = None) -> Tensor:
        """y + b, b's gradient summed over all tokens. ``tokens``: their number, under sequence parallelism."""
        if self.bias is None:
            return y
        if self.group.invariant:
            if not self.sequence_parallel:
                tokens = None
            elif tokens is None:
                raise ValueError("with sequence parallelism, invariant mode needs the number of tokens on all ranks")
            return by_token_shard(torch.add, [y], [self.bias], group=self.group, tokens=tokens, reduce_dtype=self.reduce_dtype)
        bias = copy_to_ranks(self.bias, self.group, self.reduce_dtype) if self.sequence_parallel else self.bias
        return y + bias.to(y.dtype)  # autocast leaves sums alone, and would make y float32 here

    def forward(self, x: Tensor) -> Tensor:
        """y, of the shapes given above."""
        layout, rank = self.layouts["weight"], self.group.rank
        check_input("RowParallelLinear", x, self.weight)
        if not self.input_is_parallel:
            if x.shape[-1] != self.in_features:
                raise ValueError(f"RowParallelLinear expects inputs of width {self.in_features}, got {x.shape[-1]}")
            x = scatter_to_ranks(x, layout.features, self.group)
        elif x.shape[-1] != layout.local_size(rank):
            raise ValueError(
                f"RowParallelLinear expects this rank's {layout.local_size(rank)} of {self.in_features} inputs, "
                f"got {x.shape[-1]}"
            )
        xs = [aligned(shard) for shard in x.split(layout.shard_sizes(rank), -1)] if self.group.invariant else [x]
        return self.from_shards(xs)

    def from_shards(self, xs: Sequence[Tensor]) -> Tensor:
        """y from x_r as one tensor for each shard that this rank owns, as :meth:`ColumnParallelLinear.shards` gives them."""
        if self.layouts["weight"].uncut:
            return linear(xs[0], self.weight, self.bias)
        leaves = self.leaves(xs)
        return self.add_bias(self.reduce(leaves), tokens=leaves[0].shape[0])

    def extra_repr(self) -> str:
        return f"in={self.in_features}, out={self.out_features}, rank {self.group.rank} of {self.group.size}"


def check_input(layer: str, x: Tensor, weight: Tensor) -> None:
    """A ValueError for an input that ``F.linear`` could not take, whatever its width."""
    if x.ndim == 0:
        raise ValueError(f"{layer} expects inputs of at least one dimension, got a 0-d tensor")
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise ValueError(f"{layer} has a weight of {weight.dtype}, got an input of {x.dtype}")


def check_sizes(layer: str, in_features: int, out_features: int) -> None:
    if not all(isinstance(size, int) and size >= 1 for size in (in_features, out_features)):
        raise ValueError(f"{layer} needs positive sizes, got in_features={in_features} and out_features={out_features}")


def check_parts(layer: str, parts: Sequence[Part], group: TPGroup) -> None:
    if group.invariant:
        forbid_compilation()
    for part in parts:
        if len(part.runs) != group.shards:
            raise ValueError(f"{layer}: part {part.name} is dealt over {len(part.runs)} shards, the group has {group.shards}")


def reset_linear(module: ColumnParallelLinear | RowParallelLinear, seed: int, name: str) -> None:
    std = (3 * module.in_features) ** -0.5
    rng.normal_(module.weight, module.layouts["weight"], module.group, seed=seed, name=f"{name}.weight", std=std)
    if module.bias is not None:
        nn.init.zeros_(module.bias)
