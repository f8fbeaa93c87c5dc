"""What the tests of the embedding and of both forms of the cross entropy share: inputs, torch's answer, comparisons."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from parallel.group import TPGroup
from parallel.layout import Layout, Part, column_layout
from parallel.linear import column_parallel_linear
from parallel.regions import gather_pieces, take_pieces
from parallel.vocab import linear_cross_entropy, vocab_parallel_cross_entropy, vocab_part
from tests.helpers import OpRecord, randn, rows_of
from tests.pool import device_type

RANKS = [1, 2, 3, 4]
SIZES = [(2, 8), (2, 257), (3, 257), (4, 257), (4, 10)]
"""Ranks and vocabularies: divided evenly, and not."""

on_cpu = pytest.mark.skipif(device_type() != "cpu", reason="on CUDA a bad label fails an assertion of the device")


@dataclass(frozen=True)
class Options:
    """How the loss of ``tokens`` tokens is asked for, of which every ``1 / ignored`` is ignored."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    reduction: str = "mean"
    ignored: float = 0.0
    ignore_index: int = -100

    @property
    def arguments(self) -> dict[str, Any]:
        names = ("label_smoothing", "z_loss", "reduction", "ignore_index")
        return {name: getattr(self, name) for name in names}


OPTIONS = [
    Options(smoothing, z_loss, reduction, ignored)
    for smoothing, z_loss, reduction, ignored in itertools.product(
        (0.0, 0.1), (0.0, 1e-2), ("mean", "sum", "none"), (0.0, 0.3, 1.0)
    )
] + [Options(label_smoothing=1.0, ignored=0.3), Options(ignored=0.3, ignore_index=3, label_smoothing=0.1)]


def draw_labels(shape: tuple[int, ...], vocab: int, options: Options = Options(), seed: int = 7) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    labels = torch.randint(vocab, shape, generator=generator, device="cpu")
    ignored = torch.rand(shape, generator=generator, device="cpu") < options.ignored
    return labels.masked_fill(ignored, options.ignore_index).to(torch.get_default_device())


def torch_loss(logits: Tensor, labels: Tensor, options: Options) -> Tensor:
    """F.cross_entropy of whole logits plus the z-loss, in the dtype of the logits."""
    flat, y = logits.flatten(0, -2), labels.flatten()
    arguments = options.arguments
    z_loss, reduction = arguments.pop("z_loss"), arguments.pop("reduction")
    losses = F.cross_entropy(flat, y, reduction="none", **arguments)
    squares = (flat.logsumexp(-1) ** 2).masked_fill(y == options.ignore_index, 0)
    if reduction == "none":
        return (losses + z_loss * squares).view(labels.shape)
    reduced = F.cross_entropy(flat, y, reduction=reduction, **arguments)
    valid = (y != options.ignore_index).sum().clamp(min=1) if reduction == "mean" else 1
    return reduced + z_loss * squares.sum() / valid


def take(whole: Tensor, dim: int, group: TPGroup) -> Tensor:
    """This rank's columns of logits (``dim`` -1), or rows of a weight or bias (0)."""
    size = whole.shape[dim]
    return take_pieces(whole, Layout((size,), dim, (vocab_part(size, group),), group.owners), group.rank)


def off(actual: Tensor, expected: Tensor, rtol: float, atol: float = 0.0) -> bool:
    """Whether some element is off by more than ``rtol`` of itself plus ``atol`` of the largest."""
    assert actual.shape == expected.shape
    expected = expected.detach()
    largest = expected.abs().nan_to_num().max() if expected.numel() else 0
    return not torch.allclose(actual.double(), expected.double(), rtol=rtol, atol=float(atol * largest), equal_nan=True)


def difference(actual: Tensor, expected: Tensor) -> float:
    """The norm of the error by the norm of the value."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def loss_and_gradient(group: TPGroup, logits: Tensor, labels: Tensor, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Of whole logits [T, V] that the test gives."""
    device = torch.get_default_device()
    local = take(logits.to(device), -1, group).requires_grad_()
    loss = vocab_parallel_cross_entropy(local, labels.to(device), vocab_size=logits.shape[-1], group=group, **arguments)
    loss.sum().backward()
    assert local.grad is not None
    return loss, local.grad


WIDTH = 12


@dataclass(frozen=True)
class Head:
    """One use of linear_cross_entropy. ``frozen`` names what needs no gradient: "x", "weight", "bias"."""

    vocab: int = 257
    tokens: int = 23
    chunk: int = 5
    options: Options = Options(ignored=0.2)
    sequence_parallel: bool = False
    bias: bool = True
    frozen: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float64
    reduce_dtype: torch.dtype | None = None
    scale: float = 1.0
    gain: float = 1.0

    def whole(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        x = randn(self.tokens, WIDTH, seed=1, dtype=self.dtype) / self.gain
        weight = randn(self.vocab, WIDTH, seed=2, dtype=self.dtype) * self.gain
        bias = randn(self.vocab, seed=3, dtype=self.dtype) if self.bias else None
        return x, weight, bias, draw_labels((self.tokens,), self.vocab, self.options)

    def local(self, group: TPGroup) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        x, weight, bias, labels = self.whole()
        if self.sequence_parallel:
            x = x[rows_of(self.tokens, group)].clone()
        weight = take(weight, 0, group)
        bias = None if bias is None else take(bias, 0, group)
        self.require_grad(x, weight, bias)
        return x, weight, bias, labels

    def require_grad(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        for name, t in (("x", x), ("weight", weight), ("bias", bias)):
            if t is not None:
                t.requires_grad_(name not in self.frozen)

    def loss(self, group: TPGroup, x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
        return linear_cross_entropy(
            x,
            weight,
            labels,
            bias=bias,
            vocab_size=self.vocab,
            group=group,
            sequence_parallel=self.sequence_parallel,
            chunk_tokens=self.chunk,
            reduce_dtype=self.reduce_dtype,
            **self.options.arguments,
        )

    def unchunked(self, group: TPGroup, x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
        ys = column_parallel_linear(
            x,
            weight,
            bias,
            layout=column_layout((self.vocab, WIDTH), [vocab_part(self.vocab, group)], group.owners),
            group=group,
            sequence_parallel=self.sequence_parallel,
            tokens=self.tokens,
            reduce_dtype=self.reduce_dtype,
        )
        return vocab_parallel_cross_entropy(
            torch.cat(ys, -1), labels, vocab_size=self.vocab, group=group, **self.options.arguments
        )


def head_results(group: TPGroup, head: Head, chunked: bool = True) -> list[Tensor | None]:
    """The loss, and the gradients of x (of all tokens), and of this rank's weight and bias."""
    x, weight, bias, labels = head.local(group)
    loss = (head.loss if chunked else head.unchunked)(group, x, weight, bias, labels)
    (loss * head.scale).backward()
    dx = x.grad
    if head.sequence_parallel and dx is not None:
        layout = column_layout((head.tokens, WIDTH), [Part.even("tokens", head.tokens, group.shards)], group.owners)
        dx = gather_pieces(dx, layout, group)
    return [loss, dx, weight.grad, None if bias is None else bias.grad]


def head_results_of(group: TPGroup, heads: list[Head], chunked: bool = True) -> list[list[Tensor | None]]:
    return [[None if t is None else t.detach().cpu() for t in head_results(group, head, chunked)] for head in heads]


def head_expected(head: Head) -> list[Tensor | None]:
    """The same from torch in float64, from the same inputs."""
    x, weight, bias, labels = head.whole()
    x, weight, bias = x.double(), weight.double(), None if bias is None else bias.double()
    head.require_grad(x, weight, bias)
    loss = torch_loss(F.linear(x, weight, bias), labels, head.options)
    (loss * head.scale).backward()
    return [loss.detach(), x.grad, weight.grad, None if bias is None else bias.grad]


def joined(results: list[list[Tensor | None]]) -> list[Tensor | None]:
    """One list of global tensors from the ranks' lists; the loss and dx must be the same bits on every rank."""
    first = results[0]
    for other in results[1:]:
        for a, b in zip(first[:2], other[:2], strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a.nan_to_num(77), b.nan_to_num(77))  # type: ignore[union-attr]
    return first[:2] + [None if first[i] is None else torch.cat([r[i] for r in results]) for i in (2, 3)]  # type: ignore[misc]


class Traffic(OpRecord):
    """Also about floating tensors of at least ``large`` elements that operators make: the size of the largest, and how many exist
    at a time."""

    def __init__(self, large: int = 0) -> None:
        super().__init__()
        self.large, self.largest, self.most = large, 0, 0
        self.alive: set[weakref.ref[Any]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if isinstance(out, Tensor) and out.is_floating_point() and out.numel() >= self.large:
            self.largest = max(self.largest, out.numel())
            self.alive.add(weakref.ref(out.untyped_storage(), self.alive.discard))  # equal to one of the same storage
            self.most = max(self.most, len(self.alive))
        return out
