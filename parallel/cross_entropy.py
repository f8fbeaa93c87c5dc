"""The arithmetic of the cross entropy over a cut vocabulary; vocab.py holds the functions to call.

Shapes as there: T tokens, V vocabulary, V_r this rank's columns of it, d width. A rank owns one shard r of the columns, or in
invariant mode several: whatever depends on the columns is then done shard by shard, for the reasons that virtual.py gives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from parallel import collectives
from parallel.group import TPGroup
from parallel.layout import Part, Run
from parallel.matmul import matmul
from parallel.shared_memory import Pending
from parallel.virtual import aligned, joined, sum_shards

_BLOCK, _BLOCK_CPU = 2**24, 2**20
"""How many logits the dense form takes to float32 at once: its work space stays small, and fits the caches of a CPU."""


@dataclass(frozen=True)
class TokenLoss:
    """The loss of a token and its gradient for one shard of the columns, in the pieces that both forms of the loss share.

    For the logits z of one token with label y, of which the shard holds z_r, with s the label smoothing and c the z-loss:

    ::

        m = max_v z_v      S = sum_v exp(z_v - m)      lse = m + log S
        loss  = log S - (1 - s) (z_y - m) - s/V sum_v (z_v - m) + c lse^2
        dz_v  = (1 + 2 c lse) exp(z_v - m) / S - (1 - s) [v = y] - s/V

    A shard gives m_r, S_r = sum over its v of exp(z_v - m_r), z_y if it holds y, and with smoothing its sum of z_v - m_r. One
    all-gather of these 3 or 4 numbers a token lets every rank merge them in the same order, hence to the same bits. (To
    all-reduce the maximum, then the sums, is two exchanges to wait for, with a pass over the logits in between.)

    exp(z_v - m) / S is softmax(z_r)_v, which torch computes in one pass, times the shard's share of the probability,
    S_r exp(m_r - m) / S. All of it is float32, or float64 for float64 logits; sums are of logits shifted by their maximum.
    """

    part: Part  # of the vocabulary over the shards
    shard: int
    ignore_index: int
    label_smoothing: float
    z_loss: float

    @property
    def run(self) -> Run:
        """The columns of the shard."""
        return self.part.runs[self.shard]

    def _place(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Each label's local column (some column if it is not here) and whether it is absent: not here, or ignored. [T, 1]"""
        labels, run = labels.unsqueeze(-1), self.run
        absent = (labels < run.start) | (labels >= run.stop) | (labels == self.ignore_index)
        return (labels - run.start).clamp(0, run.length - 1), absent

    def local(self, z: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [T, V_r], labels [T] -> softmax(z) over the shard's columns, and its statistics [3 or 4, T]."""
        column, absent = self._place(labels)
        dtype = torch.promote_types(z.dtype, torch.float32)
        top = z.amax(-1).to(dtype)
        only_inf = top == -math.inf  # softmax gives nan, but other shards' columns may well be finite
        label_logit = z.gather(-1, column).to(dtype).masked_fill(absent, 0).squeeze(-1)
        shifted_sum = [(z - top.masked_fill(only_inf, 0).unsqueeze(-1)).sum(-1)] if self.label_smoothing else []
        p = torch.softmax(z, -1, dtype=dtype)
        exp_sum = p.amax(-1).reciprocal().masked_fill(only_inf, 0)  # the largest is exp(m_r - m_r) / S_r
        return p, torch.stack([top, exp_sum, label_logit, *shifted_sum])

    def merge(self, statistics: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """All shards' statistics [shards, 3 or 4, T] -> every token's loss [T] and, by shard, the factor of its softmax in the
        gradient [shards, T], (1 + 2 c lse) times the shard's share of the probability."""
        tops, exp_sums, label_logits, *shifted_sums = statistics.unbind(1)
        top = tops.amax(0)
        exp_sums = exp_sums * (tops - top).exp()
        total = exp_sums.sum(0)
        log_total = total.log()
        loss = log_total - (1 - self.label_smoothing) * (label_logits.sum(0) - top)
        if self.label_smoothing:
            moved = [run.length * (t - top) for run, t in zip(self.part.runs, tops.unbind(0), strict=True)]
            loss = loss - self.label_smoothing / self.part.size * (shifted_sums[0] + torch.stack(moved)).sum(0)
        factors = exp_sums / total
        if self.z_loss:
            lse = top + log_total
            loss = loss + self.z_loss * lse.square()
            factors = factors * (1 + 2 * self.z_loss * lse)
        return loss.masked_fill(labels == self.ignore_index, 0), factors

    def logit_gradient(self, p: Tensor, factor: Tensor, labels: Tensor, grad: Tensor | None, out: Tensor) -> Tensor:
        """Writes the gradient of the logits to ``out`` [T, V_r], and over p. ``grad``: that of the losses [T]; None: ones."""
        column, absent = self._place(labels)
        weight = torch.ones_like(factor) if grad is None else grad
        weight = weight.masked_fill(labels == self.ignore_index, 0).unsqueeze(-1)
        factor = factor.unsqueeze(-1)
        p.masked_fill_(factor == 0, 0)  # It may be the nan of a softmax over nothing but -inf.
        scale, shift = factor * weight, weight * (-self.label_smoothing / self.part.size)
        at_label = torch.addcmul(shift, p.gather(-1, column), scale)
        at_label += (weight * (self.label_smoothing - 1)).masked_fill(absent, 0)
        return torch.addcmul(shift, p, scale, out=out).scatter_(-1, column, at_label.to(out.dtype))


def _merge(losses: Sequence[TokenLoss], statistics: Sequence[Tensor], labels: Tensor, group: TPGroup) -> tuple[Tensor, Tensor]:
    """This rank's shards' statistics -> every token's loss [T], the same bits on every rank, and the factors of this rank's
    shards [shards, T]. One all-gather."""
    kinds, own = statistics[0].shape[0], group.local_shards
    everyone = collectives.all_gather(torch.cat(list(statistics)), group, [kinds * run.length for run in group.owners])
    loss, factors = losses[0].merge(everyone.view(group.shards, kinds, -1), labels)
    return loss, factors[own.start : own.stop]


def _by_shard(x: Tensor, dim: int, losses: Sequence[TokenLoss], group: TPGroup) -> Sequence[Tensor]:
    """This rank's columns of the logits, or rows of the weight or bias, as one tensor a shard."""
    return [aligned(s) for s in x.split([loss.run.length for loss in losses], dim)] if group.invariant else [x]


class DenseCrossEntropy(Function):
    """The tokens' losses [T] of logits [T, V_r]. Keeps the logits as they came and one number a token and shard."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, labels: Tensor, losses: Sequence[TokenLoss], group: TPGroup) -> Tensor:
        statistics = [
            torch.cat([loss.local(shard[rows], labels[rows])[1] for rows in _blocks(shard)], 1)
            for loss, shard in zip(losses, _by_shard(z, -1, losses, group), strict=True)
        ]
        token_losses, factors = _merge(losses, statistics, labels, group)
        ctx.save_for_backward(z, labels, factors)
        ctx.losses, ctx.group = losses, group
        return token_losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        z, labels, factors = ctx.saved_tensors
        dzs = []
        for loss, shard, factor in zip(ctx.losses, _by_shard(z, -1, ctx.losses, ctx.group), factors, strict=True):
            dz = torch.empty_like(shard)
            for rows in _blocks(shard):
                p = torch.softmax(shard[rows], -1, dtype=factor.dtype)
                loss.logit_gradient(p, factor[rows], labels[rows], grad[rows], dz[rows])
            dzs.append(dz)
        return joined(dzs, -1), None, None, None


def _blocks(z: Tensor) -> list[slice]:
    """Runs of rows of about ``_BLOCK`` elements; all rows at once under torch.compile, which fuses the work space away."""
    tokens, width = z.shape
    size = _BLOCK_CPU if z.device.type == "cpu" else _BLOCK
    step = max(tokens if torch.compiler.is_compiling() else size // width, 1)
    return [slice(at, at + step) for at in range(0, max(tokens, 1), step)]


class LinearCrossEntropy(Function):
    """The sum of the tokens' losses of logits x W^T + b, which exist for ``chunk`` tokens at a time.

    Forward computes each chunk's gradients while it has the logits, for an incoming gradient of one. It keeps those that
    ``needs`` asks for (of x, W, b), and neither x nor W. The division of a mean stays outside: it would make gradients that
    float16 cannot hold.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        losses: Sequence[TokenLoss],
        group: TPGroup,
        counts: list[int] | None,
        chunk: int,
        needs: tuple[bool, bool, bool],
        reduce_dtype: torch.dtype | None,
    ) -> Tensor:
        full = x if counts is None else collectives.all_gather(x, group, counts)
        weights = _by_shard(weight, 0, losses, group)
        biases = [None] * len(losses) if bias is None else _by_shard(bias, 0, losses, group)
        need_dx, need_dw, need_db = needs
        dxs = [torch.empty_like(full) if need_dx else None for _ in losses]
        dws: list[Tensor | None] = [None] * len(losses)
        dbs: list[Tensor | None] = [None] * len(losses)

        def losses_of(at: int) -> Tensor:
            """The losses of the tokens of one chunk; adds their gradients. A function, so that no logits outlive it."""
            rows, y = full[at : at + chunk], labels[at : at + chunk]
            if group.invariant:
                rows = aligned(rows)
            zs = [matmul(rows, w.t(), b) for w, b in zip(weights, biases, strict=True)]
            ps, statistics = zip(*(loss.local(z, y) for loss, z in zip(losses, zs, strict=True)), strict=True)
            token_losses, factors = _merge(losses, statistics, y, group)
            if any(needs):
                for i, loss in enumerate(losses):
                    dz = loss.logit_gradient(ps[i], factors[i], y, None, zs[i])
                    if (dx := dxs[i]) is not None:
                        dx[at : at + chunk] = matmul(dz, weights[i])
                    if need_dw:
                        dws[i] = _accumulate(dws[i], matmul(dz.t(), rows, spare=ps[i]))
                    if need_db:
                        dbs[i] = _accumulate(dbs[i], dz.sum(0))
            return token_losses

        total = torch.cat([losses_of(at) for at in range(0, max(full.shape[0], 1), chunk)]).sum()
        ctx.save_for_backward(*dxs, *dws, *dbs)
        ctx.needs, ctx.group, ctx.counts, ctx.reduce_dtype, ctx.dtype = needs, group, counts, reduce_dtype, full.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        need_dx, need_dw, need_db = ctx.needs
        kept = ctx.saved_tensors
        shards = len(kept) // 3
        dx = dw = db = finish_dx = None
        if need_dx:
            leaves = [_scaled(leaf, grad, ctx.dtype) for leaf in kept[:shards]]
            finish_dx = _start_sum(leaves, ctx.group, ctx.counts, ctx.reduce_dtype)
        if need_dw:
            dw = _scaled(joined(kept[shards : 2 * shards], 0), grad, ctx.dtype)
        if need_db:
            db = _scaled(joined(kept[2 * shards :], 0), grad, ctx.dtype)
        if finish_dx is not None:
            dx = finish_dx()
        return dx, dw, db, *(None,) * 7


def _start_sum(leaves: list[Tensor], group: TPGroup, counts: list[int] | None, reduce_dtype: torch.dtype | None) -> Pending:
    """Begins the sum of the shards' input gradients, which it may overwrite: whole, or with ``counts`` this rank's rows."""
    if group.invariant:
        total = sum_shards(leaves, group, scatter=counts is not None, reduce_dtype=reduce_dtype)
        return lambda: total
    if counts is None:
        return collectives.start_all_reduce(leaves[0], group, reduce_dtype)
    return collectives.start_reduce_scatter(leaves[0], group, counts, reduce_dtype)


def _accumulate(total: Tensor | None, summand: Tensor) -> Tensor:
    """The sum over the chunks, in float32 or better: half precision would drop the later chunks' small contributions."""
    if total is None:
        return summand
    if total.dtype != torch.promote_types(total.dtype, torch.float32):
        total = total.float()
    return total.add_(summand)


def _scaled(value: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """value * factor as a new tensor of ``dtype``, rounded once."""
    # A factor without dimensions would be rounded to value's dtype first, which in half precision would skew all gradients.
    out = torch.empty_like(value, dtype=dtype)
    return torch.mul(value, factor.reshape(1), out=out)
