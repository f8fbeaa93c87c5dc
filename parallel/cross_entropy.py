"""The arithmetic of the cross entropy over a cut vocabulary; vocab.py holds the functions to call.

Shapes as there: T tokens, V vocabulary, V_r this rank's columns of it, d width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from parallel import collectives
from parallel.group import TPGroup
from parallel.layout import Part, Run

_BLOCK, _BLOCK_CPU = 2**24, 2**20
"""How many logits the dense form takes to float32 at once: its work space does not grow with the tokens, and suits the caches."""


@dataclass(frozen=True)
class TokenLoss:
    """The loss of a token and its gradient, in the pieces that the dense and the chunked form share.

    For the logits z of one token with label y, of which this rank holds z_r, with s the label smoothing and c the z-loss:

    ::

        m = max_v z_v      S = sum_v exp(z_v - m)      lse = m + log S
        loss  = log S - (1 - s) (z_y - m) - s/V sum_v (z_v - m) + c lse^2
        dz_v  = (1 + 2 c lse) exp(z_v - m) / S - (1 - s) [v = y] - s/V

    A rank gives m_r, S_r = sum over its v of exp(z_v - m_r), z_y if it holds y, and with smoothing its sum of z_v - m_r. One
    all-gather of these 3 or 4 numbers a token lets every rank merge them in the same order, hence to the same bits. (To
    all-reduce the maximum, then the sums, is two exchanges to wait for, with a pass over the logits in between.)

    exp(z_v - m) / S is softmax(z_r)_v, which torch computes in one pass, times this rank's share of the probability,
    S_r exp(m_r - m) / S. All of it is float32, or float64 for float64 logits, and shifted by the maximum before it is added up.
    """

    part: Part  # of the vocabulary over the ranks
    group: TPGroup
    ignore_index: int
    label_smoothing: float
    z_loss: float

    @property
    def run(self) -> Run:
        """The columns that this rank holds."""
        return self.part.runs[self.group.rank]

    def _place(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Each label's local column (some column if it is not here) and whether it is absent: not here, or ignored. [T, 1]"""
        labels, run = labels.unsqueeze(-1), self.run
        absent = (labels < run.start) | (labels >= run.stop) | (labels == self.ignore_index)
        return (labels - run.start).clamp(0, run.length - 1), absent

    def local(self, z: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [T, V_r], labels [T] -> softmax(z) over this rank's columns, and this rank's statistics [3 or 4, T]."""
        column, absent = self._place(labels)
        p = _softmax(z)
        top = z.amax(-1).to(p.dtype)
        only_inf = top == -math.inf  # softmax gives nan, but the other ranks' columns may well be finite
        exp_sum = p.amax(-1).reciprocal().masked_fill(only_inf, 0)  # the largest is exp(m_r - m_r) / S_r
        label_logit = z.gather(-1, column).to(p.dtype).masked_fill(absent, 0).squeeze(-1)
        statistics = [top, exp_sum, label_logit]
        if self.label_smoothing:
            statistics.append((z - top.masked_fill(only_inf, 0).unsqueeze(-1)).sum(-1))
        return p, torch.stack(statistics)

    def merge(self, statistics: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's statistics -> every token's loss [T], the same bits on every rank, and d(lse + c lse^2)/d(lse) times this
        rank's share of its probability [T], the factor of its softmax in the gradient. One all-gather."""
        kinds, rank, ranks = statistics.shape[0], self.group.rank, self.group.size
        everyone = collectives.all_gather(statistics, self.group, [kinds] * ranks).view(ranks, kinds, -1)
        tops, exp_sums, label_logits, *shifted_sums = everyone.unbind(1)
        top = tops.amax(0)
        exp_sums = exp_sums * (tops - top).exp()
        total = exp_sums.sum(0)
        log_total = total.log()
        loss = log_total - (1 - self.label_smoothing) * (label_logits.sum(0) - top)
        if self.label_smoothing:
            moved = [run.length * (t - top) for run, t in zip(self.part.runs, tops.unbind(0), strict=True)]
            loss = loss - self.label_smoothing / self.part.size * (shifted_sums[0] + torch.stack(moved)).sum(0)
        factor = exp_sums[rank] / total
        if self.z_loss:
            lse = top + log_total
            loss = loss + self.z_loss * lse.square()
            factor = factor * (1 + 2 * self.z_loss * lse)
        return loss.masked_fill(labels == self.ignore_index, 0), factor

    def logit_gradient(self, p: Tensor, factor: Tensor, labels: Tensor, grad: Tensor | None, out: Tensor) -> Tensor:
        """Writes the gradient of the logits to ``out`` [T, V_r], and over p. ``grad``: that of the losses [T]; None: ones."""
        column, absent = self._place(labels)
        weight = torch.ones_like(factor) if grad is None else grad
        weight = weight.masked_fill(labels == self.ignore_index, 0).unsqueeze(-1)
        factor = factor.unsqueeze(-1)
        p.masked_fill_(factor == 0, 0)  # which may be the nan of a softmax over nothing but -inf
        scale, shift = factor * weight, weight * (-self.label_smoothing / self.part.size)
        at_label = torch.addcmul(shift, p.gather(-1, column), scale) + (weight * (self.label_smoothing - 1)).masked_fill(
            absent, 0
        )
        return torch.addcmul(shift, p, scale, out=out).scatter_(-1, column, at_label.to(out.dtype))


class DenseCrossEntropy(Function):
    """The tokens' losses [T] of logits [T, V_r]. Keeps the logits as they came and one number a token."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, labels: Tensor, loss: TokenLoss) -> Tensor:
        statistics = [loss.local(z[rows], labels[rows])[1] for rows in _blocks(z)]
        losses, factor = loss.merge(torch.cat(statistics, 1), labels)
        ctx.save_for_backward(z, labels, factor)
        ctx.loss = loss
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        z, labels, factor = ctx.saved_tensors
        dz = torch.empty_like(z)
        for rows in _blocks(z):
            ctx.loss.logit_gradient(_softmax(z[rows]), factor[rows], labels[rows], grad[rows], out=dz[rows])
        return dz, None, None


def _softmax(z: Tensor) -> Tensor:
    return torch.softmax(z, -1, dtype=torch.promote_types(z.dtype, torch.float32))


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
        loss: TokenLoss,
        counts: list[int] | None,
        chunk: int,
        needs: tuple[bool, bool, bool],
        reduce_dtype: torch.dtype | None,
    ) -> Tensor:
        full = x if counts is None else collectives.all_gather(x, loss.group, counts)
        need_dx, need_dw, need_db = needs
        dx = torch.empty_like(full) if need_dx else None
        dw = db = None
        losses = []
        for at in range(0, max(full.shape[0], 1), chunk):
            rows, y = full[at : at + chunk], labels[at : at + chunk]
            z = F.linear(rows, weight, bias)
            p, statistics = loss.local(z, y)
            chunk_losses, factor = loss.merge(statistics, y)
            losses.append(chunk_losses)
            if not any(needs):
                continue
            dz = loss.logit_gradient(p, factor, y, None, out=z)
            if dx is not None:
                dx[at : at + chunk] = dz.matmul(weight)
            if need_dw:
                dw = _accumulate(dw, dz.t().matmul(rows))
            if need_db:
                db = _accumulate(db, dz.sum(0))
        ctx.save_for_backward(dx, dw, db)
        ctx.group, ctx.counts, ctx.reduce_dtype, ctx.dtype = loss.group, counts, reduce_dtype, full.dtype
        return torch.cat(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw, db = ctx.saved_tensors
        finish: Callable[[], Tensor | None] = lambda: None  # noqa: E731
        if dx is not None:
            partial = _scaled(dx, grad, ctx.dtype)
            if ctx.counts is None:
                finish = collectives.start_all_reduce(partial, ctx.group, ctx.reduce_dtype)
            else:
                finish = collectives.start_reduce_scatter(partial, ctx.group, ctx.counts, ctx.reduce_dtype)
        dw, db = (None if t is None else _scaled(t, grad, ctx.dtype) for t in (dw, db))
        return finish(), dw, db, None, None, None, None, None, None


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
