"""Matrix products through the faster of the libraries that torch brings.

On x86 CPUs torch hands float32 products to MKL, which uses AVX-512 on Intel's processors only. On others that have it oneDNN,
to which torch gives bfloat16, takes half the time for the same product. It sums in longer runs: of 4096 random summands its result
is off by 6e-7 of itself (root mean square), MKL's by 3e-7. Everything else is left to torch: other dtypes, GPUs, products too small
to be worth the call, torch.func's transforms and forward-mode differentiation, and all of them while
``torch.backends.mkldnn.enabled`` is False.

``_linear_pointwise`` is what torch's compiler calls for a linear with constant weights: it is not public, and the tests hold it
to torch's own product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active
from torch.autograd import Function, forward_ad
from torch.nn import functional as F
from torch.utils.flop_counter import flop_registry, mm_flop, register_flop_formula

FEWEST_ROWS, FEWEST_PRODUCTS = 16, 2**22
"""Of an output and of multiplications: below, a call of oneDNN gains nothing."""

MOST_COPIED = 2**21
"""Numbers of a transposed operand at a time, where it is larger than the result."""

_LINEAR = getattr(torch.ops.mkldnn, "_linear_pointwise", None)  # not in every build of torch


def _onednn_is_faster() -> bool:
    if not torch.backends.mkl.is_available() or _LINEAR is None:
        return False
    processor = torch.cpu.get_capabilities()
    return bool(processor.get("avx512_f")) and "Intel" not in str(processor.get("cpu_name"))


ONEDNN_IS_FASTER = _onednn_is_faster()


def _takes_onednn(a: Tensor, b: Tensor, bias: Tensor | None) -> bool:
    """Whether [..., k] @ [k, n] + [n] is for oneDNN."""
    return (
        ONEDNN_IS_FASTER
        and a.dtype == b.dtype == torch.float32
        and a.device.type == b.device.type == "cpu"
        and a.ndim > 1
        and b.ndim == 2
        and a.shape[-1] == b.shape[0]
        and a.numel() >= FEWEST_ROWS * a.shape[-1]
        and a.numel() * b.shape[1] >= FEWEST_PRODUCTS
        and (bias is None or (bias.dtype == a.dtype and bias.device == a.device and bias.shape == b.shape[1:]))
        and not torch.is_autocast_enabled("cpu")
        and not transformed()
        and (torch.compiler.is_compiling() or bool(torch.backends.mkldnn.enabled))
    )


def transformed() -> bool:
    """Whether torch.func or forward-mode differentiation is at work, for which autograd functions of our own have no rules."""
    return _are_functorch_transforms_active() or forward_ad._current_level >= 0


def _product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    assert _LINEAR is not None
    return _LINEAR.default(a, b.t(), None if bias is None else bias.contiguous(), "none", [], "")


def _torchs(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return a.matmul(b) if bias is None else F.linear(a, b.t(), bias)


def _onednn(a: Tensor, b: Tensor, bias: Tensor | None, spare: Tensor | None = None) -> Tensor:
    """It takes b in any order and would copy an a that is not contiguous: all of it, in memory that nobody has counted."""
    if a.is_contiguous():
        return _product(a, b, bias)
    if spare is not None:
        return _product(spare.view(a.shape).copy_(a), b, bias)
    if a.numel() <= MOST_COPIED or a.shape[-1] < b.shape[1]:  # The parts' results are copied, too.
        return _product(a.contiguous(), b, bias)
    parts = a.chunk(-(-a.numel() // MOST_COPIED))
    y = a.new_empty(*a.shape[:-1], b.shape[1])
    for part, rows in zip(parts, y.split([len(part) for part in parts]), strict=True):
        rows.copy_(_product(part.contiguous(), b, bias))
    return y


@torch.library.custom_op("tpblock::matmul", mutates_args=())
def _opaque(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """For torch.compile, which takes oneDNN's own operator for one with constant weights."""
    return _onednn(a, b, bias) if torch.backends.mkldnn.enabled else _torchs(a, b, bias)


@_opaque.register_fake
def _(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return a.new_empty(*a.shape[:-1], b.shape[1])


@register_flop_formula(torch.ops.tpblock.matmul)
def _opaque_flops(a: tuple[int, ...], b: tuple[int, ...], *_: object, **__: object) -> int:
    return mm_flop((a[:-1].numel(), a[-1]), b)  # type: ignore[attr-defined]


def _onednn_flops(a: tuple[int, ...], w: tuple[int, ...], *_: object, **__: object) -> int:
    return mm_flop((a[:-1].numel(), a[-1]), (w[1], w[0]))  # type: ignore[attr-defined]


if _LINEAR is not None and _LINEAR not in flop_registry:
    register_flop_formula(_LINEAR)(_onednn_flops)


def matmul(a: Tensor, b: Tensor, bias: Tensor | None = None, *, spare: Tensor | None = None) -> Tensor:
    """a [..., k] @ b [k, n] + bias [n], for use inside of autograd functions.

    Where a graph has to be recorded after all, in a backward that is to be differentiated itself, it is torch's own product.

    ``spare``: memory as large as a, of its dtype, that may be written over, in case a has to be copied.
    """
    if _takes_onednn(a, b, bias):
        if torch.compiler.is_compiling():
            return torch.ops.tpblock.matmul(a, b, bias)
        if not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (a, b, bias))):
            return _onednn(a, b, bias, spare)
    return _torchs(a, b, bias)


class _Recorded(Function):
    """The place in the graph of a product that is made after it: without memory, of the product's shape.

    What backward needs is saved before the product is made, as torch's own linear does it, so that activation checkpointing can
    leave out the last product of what it computes again.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.new_empty(1).expand(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        need_dx, need_dw = ctx.needs_input_grad
        dx = matmul(dy, weight) if need_dx else None
        return dx, matmul(dy.flatten(0, -2).t(), x.flatten(0, -2)) if need_dw else None


class _Made(Function):
    """The product in its recorded place."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return matmul(x, weight.t(), bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return dy, None, None, dy.flatten(0, -2).sum(0) if ctx.needs_input_grad[3] else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear``: x [..., in] with weight [out, in] and bias [out] gives [..., out]."""
    if not _takes_onednn(x, weight.t(), bias):
        return F.linear(x, weight, bias)
    if not torch.is_grad_enabled():
        return matmul(x, weight.t(), bias)
    return _Made.apply(_Recorded.apply(x, weight), x, weight, bias)
