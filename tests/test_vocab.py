"""The vocabulary-parallel embedding and cross entropy against torch with the whole vocabulary, on 1 to 4 ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parallel import cross_entropy
from parallel.cross_entropy import DenseCrossEntropy, TokenLoss
from parallel.group import TPGroup, single_device
from parallel.layout import Layout, Part, column_layout
from parallel.linear import column_parallel_linear
from parallel.regions import gather_pieces, take_pieces
from parallel.vocab import VocabParallelEmbedding, linear_cross_entropy, vocab_parallel_cross_entropy, vocab_part
from tests.helpers import OpRecord, randn, rows_of
from tests.pool import Pool, device_type

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


# Cross entropy of given logits ----------------------------------------------------------------------------------------------

DENSE_TOLERANCES = {torch.float64: (1e-12, 1e-14), torch.float32: (2e-6, 5e-7), torch.bfloat16: (2**-8, 5e-7)}
"""rtol and atol of gradients. bfloat16: each element is rounded once."""
LOSS_TOLERANCES = {torch.float64: (1e-12, 0), torch.float32: (2e-6, 2e-7), torch.bfloat16: (2e-6, 2e-7)}
SHAPE = (3, 8)


def dense_inputs(vocab: int, dtype: torch.dtype, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    logits = (2 * randn(*SHAPE, vocab, seed=vocab)).to(dtype)
    labels = draw_labels(SHAPE, vocab, options)
    cotangent = randn(*(SHAPE if options.reduction == "none" else ()), seed=5)
    return logits, labels, cotangent


def dense(group: TPGroup, vocab: int, dtype: torch.dtype, options: Options) -> tuple[Tensor, Tensor]:
    """The loss and this rank's gradient of its logits."""
    logits, labels, cotangent = dense_inputs(vocab, dtype, options)
    local = take(logits, -1, group).requires_grad_()
    before = local.detach().clone()
    loss = vocab_parallel_cross_entropy(local, labels, vocab_size=vocab, group=group, **options.arguments)
    loss.backward(cotangent.to(loss.dtype))
    assert torch.equal(local, before)
    assert local.grad is not None
    return loss, local.grad


def dense_all(group: TPGroup, vocab: int, dtype: torch.dtype, cases: list[Options]) -> list[tuple[Tensor, Tensor]]:
    return [tuple(t.detach().cpu() for t in dense(group, vocab, dtype, options)) for options in cases]  # type: ignore[misc]


def dense_expected(vocab: int, dtype: torch.dtype, options: Options) -> tuple[Tensor, Tensor]:
    """The same from torch, in float32 or better."""
    logits, labels, cotangent = dense_inputs(vocab, dtype, options)
    logits = logits.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    loss = torch_loss(logits, labels, options)
    loss.backward(cotangent.to(loss.dtype))
    assert logits.grad is not None
    return loss.detach().cpu(), logits.grad.cpu()


@pytest.mark.parametrize("dtype", list(DENSE_TOLERANCES), ids=str)
@pytest.mark.parametrize(("ranks", "vocab"), [(1, 257), *SIZES])
def test_dense_equals_torch(pool: Pool, ranks: int, vocab: int, dtype: torch.dtype) -> None:
    """Loss and gradient; all reductions, smoothing, z-loss, some or all tokens ignored; the same loss bits on every rank."""
    results = pool.run(ranks, dense_all, vocab, dtype, OPTIONS)
    for i, options in enumerate(OPTIONS):
        loss, gradient = dense_expected(vocab, dtype, options)
        actual = [result[i] for result in results]
        assert actual[0][0].dtype == loss.dtype
        assert all(torch.equal(a[0].nan_to_num(77), actual[0][0].nan_to_num(77)) for a in actual), options
        assert not off(actual[0][0], loss, *LOSS_TOLERANCES[dtype]), options
        assert not off(torch.cat([a[1] for a in actual], -1), gradient, *DENSE_TOLERANCES[dtype]), options


@pytest.mark.parametrize("dtype", list(DENSE_TOLERANCES), ids=str)
def test_dense_tolerances_have_teeth(pool: Pool, dtype: torch.dtype) -> None:
    """Leaving a term out, or smoothing over the local columns, is outside every tolerance."""
    base = Options(label_smoothing=0.1, z_loss=1e-2, ignored=0.3)
    loss, gradient = dense_expected(257, dtype, base)
    wrong = [replace(base, label_smoothing=0.0), replace(base, z_loss=0.0), replace(base, label_smoothing=0.101)]
    results = [pool.run(2, dense_all, 257, dtype, wrong), pool.run(2, locally_smoothed, 257, dtype, base)]
    for per_rank in results:
        for actual in zip(*per_rank, strict=True):
            assert off(actual[0][0], loss, *LOSS_TOLERANCES[dtype])
            assert off(torch.cat([a[1] for a in actual], -1), gradient, *DENSE_TOLERANCES[dtype])


def locally_smoothed(group: TPGroup, vocab: int, dtype: torch.dtype, options: Options) -> list[tuple[Tensor, Tensor]]:
    """With s / V_r in place of s / V."""
    logits, labels, cotangent = dense_inputs(vocab, dtype, options)
    local = take(logits, -1, group).requires_grad_()
    loss = TokenLoss(vocab_part(vocab, group), group.rank, -100, options.label_smoothing, options.z_loss)
    with mock.patch.object(Part, "__post_init__"):  # which would refuse
        loss = replace(loss, part=replace(loss.part, size=loss.run.length))
    losses = DenseCrossEntropy.apply(local.flatten(0, -2), labels.flatten(), (loss,), group)
    mean = losses.sum() / (labels != -100).sum()
    mean.backward(cotangent.to(mean.dtype))
    assert local.grad is not None
    return [(mean.detach().cpu(), local.grad.cpu())]


def test_many_blocks(pool: Pool) -> None:
    """Logits taken to float32 a few rows at a time, to the same bits."""
    options = Options(label_smoothing=0.1, z_loss=1e-2, ignored=0.3)
    whole, blocks = pool.run(2, dense, 257, torch.bfloat16, options), pool.run(2, dense_in_blocks, 257, options)
    for a, b in zip(whole, blocks, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def dense_in_blocks(group: TPGroup, vocab: int, options: Options) -> tuple[Tensor, Tensor]:
    with mock.patch.multiple(cross_entropy, _BLOCK=5 * vocab // group.size, _BLOCK_CPU=5 * vocab // group.size):
        return dense(group, vocab, torch.bfloat16, options)


@pytest.mark.parametrize("ranks", RANKS)
def test_infinite_logits(pool: Pool, ranks: int) -> None:
    """Columns at -inf, all of rank 1's among them, have no probability and no gradient, as in torch."""
    logits = randn(6, 8, seed=1)
    masked = logits.clone()
    masked[:, : (8 + ranks - 1) // ranks] = -torch.inf
    masked[0] = logits[0]
    masked[:, 7] = logits[:, 7]
    labels = torch.tensor([0, 7, 7, 7, 7, 7])
    whole = masked.clone().requires_grad_()
    loss = F.cross_entropy(whole, labels)
    loss.backward()
    results = pool.run(ranks, loss_and_gradient, masked, labels, {})
    assert loss.isfinite()
    assert not off(results[0][0], loss, 1e-12)
    assert not off(torch.cat([r[1] for r in results], -1), whole.grad, 1e-12)  # type: ignore[arg-type]


def loss_and_gradient(group: TPGroup, logits: Tensor, labels: Tensor, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Of whole logits [T, V] that the test gives."""
    device = torch.get_default_device()
    local = take(logits.to(device), -1, group).requires_grad_()
    loss = vocab_parallel_cross_entropy(local, labels.to(device), vocab_size=logits.shape[-1], group=group, **arguments)
    loss.sum().backward()
    assert local.grad is not None
    return loss, local.grad


@pytest.mark.parametrize("ranks", RANKS)
def test_no_tokens(pool: Pool, ranks: int) -> None:
    for reduction, expected in (("mean", torch.tensor(torch.nan)), ("sum", torch.zeros(())), ("none", torch.zeros(0))):
        logits, labels = torch.zeros(0, 8), torch.zeros(0, dtype=torch.long)
        results = pool.run(ranks, loss_and_gradient, logits, labels, {"reduction": reduction})
        assert all(torch.allclose(r[0], expected, equal_nan=True) for r in results)


def test_dense_keeps_logits_and_one_number_a_token() -> None:
    logits = randn(40, 64, dtype=torch.bfloat16, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        vocab_parallel_cross_entropy(logits, draw_labels((40,), 64), vocab_size=64, group=single_device(), reduction="none")
    kept = {(t.dtype, t.numel()) for t in saved}
    assert kept == {(torch.bfloat16, 40 * 64), (torch.int64, 40), (torch.float32, 40)}


# The chunked linear + cross entropy -----------------------------------------------------------------------------------------

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


HEADS = [
    *(Head(options=options) for options in OPTIONS if options.reduction != "none"),
    *(Head(chunk=chunk) for chunk in (1, 23, 1000)),
    *(Head(tokens=tokens) for tokens in (5, 10)),
    Head(bias=False),
    *(Head(frozen=frozen) for frozen in (("x",), ("weight",), ("bias",), ("x", "bias"), ("weight", "bias"))),
]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("ranks", "vocab"), [(1, 257), *SIZES])
def test_chunked_equals_torch(pool: Pool, ranks: int, vocab: int, sequence_parallel: bool) -> None:
    """Loss and all gradients in float64: options, chunks that divide the tokens or not, uneven tokens, frozen tensors."""
    heads = [replace(head, vocab=vocab, sequence_parallel=sequence_parallel) for head in HEADS]
    results = pool.run(ranks, head_results_of, heads)
    for i, head in enumerate(heads):
        actual, expected = joined([result[i] for result in results]), head_expected(head)
        for a, e in zip(actual, expected, strict=True):
            assert (a is None) == (e is None), head
            assert a is None or not off(a, e, 1e-11, 1e-12), head  # type: ignore[arg-type]


# The norm of the error by the norm of the value, of the loss and of gradients: about twice what rounding makes of it.
HEAD_TOLERANCES = {torch.float32: (1e-6, 1e-6), torch.bfloat16: (4e-3, 6e-3), torch.float16: (5e-4, 8e-4)}


@pytest.mark.parametrize("dtype", list(HEAD_TOLERANCES), ids=str)
@pytest.mark.parametrize("ranks", RANKS)
def test_chunked_in_low_precision(pool: Pool, ranks: int, dtype: torch.dtype) -> None:
    """In half precision no further from float64 than the two separate functions (but for a tenth), however many the chunks."""
    base = Head(tokens=600, dtype=dtype, options=Options(0.1, 1e-3, ignored=0.1), scale=3.0)
    heads = [replace(base, chunk=chunk) for chunk in (4, 64, 1000)]
    results, plain = pool.run(ranks, head_results_of, heads), pool.run(ranks, head_results_of, [base], False)
    expected, separate = head_expected(base), joined([result[0] for result in plain])
    for i, head in enumerate(heads):
        for k, (a, e, s) in enumerate(zip(joined([result[i] for result in results]), expected, separate, strict=True)):
            assert a is not None and e is not None and s is not None
            assert difference(a, e) <= max(HEAD_TOLERANCES[dtype][min(k, 1)], 1e-7), (head, k)
            assert k == 0 or dtype == torch.float32 or difference(a, e) <= 1.1 * difference(s, e), (head, k)


def test_float16_keeps_small_gradients(pool: Pool) -> None:
    """The mean over many tokens makes gradients of the logits that float16 has no numbers for; here they are divided later."""
    head = Head(tokens=4096, chunk=512, vocab=32, dtype=torch.float16, scale=1 / 16, gain=1024.0, frozen=("weight", "bias"))
    actual, separate = (joined(pool.run(2, head_results, head, chunked)) for chunked in (True, False))
    expected = head_expected(head)
    assert actual[1] is not None and separate[1] is not None and expected[1] is not None
    assert difference(actual[1], expected[1]) < HEAD_TOLERANCES[torch.float16][1] < difference(separate[1], expected[1])


def test_low_precision_tolerances_have_teeth(pool: Pool) -> None:
    """Sums over chunks kept in bfloat16, and a scale rounded to it, are outside."""
    head = Head(tokens=600, chunk=4, dtype=torch.bfloat16, options=Options(0.1, 1e-3, ignored=0.1), scale=3.0)
    expected = head_expected(head)
    for mistake in (sum_in_half, scale_in_half):
        actual = joined(pool.run(2, with_patch, mistake, head))
        assert difference(actual[2], expected[2]) > HEAD_TOLERANCES[head.dtype][1], mistake  # type: ignore[arg-type]


def sum_in_half(total: Tensor | None, summand: Tensor) -> Tensor:
    return summand if total is None else total + summand


def scale_in_half(value: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) * factor.to(dtype) * 1.007


def with_patch(group: TPGroup, mistake: Callable[..., Any], head: Head) -> list[Tensor | None]:
    with mock.patch.object(cross_entropy, "_accumulate" if mistake is sum_in_half else "_scaled", mistake):
        return head_results(group, head)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_autocast(pool: Pool, sequence_parallel: bool) -> None:
    """float32 parameters, products in bfloat16, a float32 loss and float32 gradients, as the separate functions give."""
    head = Head(tokens=64, chunk=10, dtype=torch.float32, sequence_parallel=sequence_parallel)
    chunked, separate = (joined(pool.run(2, under_autocast, head, c)) for c in (True, False))
    for a, s in zip(chunked, separate, strict=True):
        assert a is not None and s is not None
        assert a.dtype == s.dtype == torch.float32
        assert difference(a, s) < 6e-3
        assert difference(a, s) > 1e-7 or a.ndim == 0  # bfloat16 was used


def under_autocast(group: TPGroup, head: Head, chunked: bool) -> list[Tensor | None]:
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        return head_results(group, head, chunked)


@pytest.mark.parametrize("ranks", [1, 2])
def test_backward_twice(pool: Pool, ranks: int) -> None:
    """What forward kept survives a backward, and neither it nor the incoming gradient is written to."""
    assert all(pool.run(ranks, backward_twice))


def backward_twice(group: TPGroup) -> bool:
    head = Head(dtype=torch.float32)
    x, weight, bias, labels = head.local(group)
    loss = head.loss(group, x, weight, bias, labels)
    incoming = torch.full((), 3.0)
    first = torch.autograd.grad(loss, (x, weight, bias), incoming, retain_graph=True)  # type: ignore[arg-type]
    kept = [g.clone() for g in first]
    second = torch.autograd.grad(loss, (x, weight, bias), incoming)  # type: ignore[arg-type]
    assert incoming.item() == 3.0
    return all(torch.equal(k, s) and torch.equal(k, f) for k, f, s in zip(kept, first, second, strict=True))


# Memory, work and communication ---------------------------------------------------------------------------------------------


class Traffic(OpRecord):
    """Also the size of the largest floating tensor that an operator makes, and the elements and dtype of what is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.sent: list[tuple[int, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if isinstance(out, Tensor) and out.is_floating_point():
            self.largest = max(self.largest, out.numel())
        if str(func).startswith("_c10d_functional.") and "wait" not in str(func):
            self.sent.append((args[0].numel(), args[0].dtype))
        return out


def record_head(group: TPGroup, head: Head, chunked: bool, grad: bool = True) -> tuple[int, list[Any], list[Any], list[str]]:
    """The largest tensor; what is sent forward, and backward; the matrix products."""
    x, weight, bias, labels = head.local(group)
    with Traffic() as forward, torch.set_grad_enabled(grad):
        loss = (head.loss if chunked else head.unchunked)(group, x, weight, bias, labels)
    backward = Traffic()
    if grad:
        with backward:
            loss.backward()
    names = forward.names + backward.names
    sent = [list(zip(t.collectives, t.sent, strict=True)) for t in (forward, backward)]
    return max(forward.largest, backward.largest), *sent, [n for n in names if n.startswith(("aten.mm", "aten.addmm"))]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("ranks", RANKS)
def test_chunked_never_holds_all_logits(pool: Pool, ranks: int, sequence_parallel: bool) -> None:
    """No tensor is larger than a chunk's logits, the weight or the input; and the separate functions do make one."""
    head = Head(vocab=256, tokens=200, chunk=30, sequence_parallel=sequence_parallel)
    width = -(-256 // ranks)
    bound = max(30 * width, width * WIDTH, 200 * WIDTH + ranks * WIDTH)
    assert all(largest <= bound for largest, *_ in pool.run(ranks, record_head, head, True))
    assert all(largest >= 200 * (256 // ranks) > bound for largest, *_ in pool.run(ranks, record_head, head, False))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_chunked_communication(pool: Pool, smoothing: float, sequence_parallel: bool) -> None:
    """Forward 3 or 4 numbers a token, once a chunk (and x, once, under sequence parallelism); backward dx, once."""
    head = Head(tokens=22, chunk=8, sequence_parallel=sequence_parallel, options=Options(smoothing))
    kinds = 4 if smoothing else 3
    for _, forward, backward, _ in pool.run(2, record_head, head, True):
        statistics = [("all_gather_into_tensor", (kinds * n, torch.float64)) for n in (8, 8, 6)]
        if sequence_parallel:
            assert forward == [("all_gather_into_tensor", (11 * WIDTH, torch.float64)), *statistics]
            assert backward == [("reduce_scatter_tensor", (22 * WIDTH, torch.float64))]
        else:
            assert forward == statistics
            assert backward == [("all_reduce", (22 * WIDTH, torch.float64))]


def test_chunked_reduces_in_the_dtype_asked_for(pool: Pool) -> None:
    head = Head(tokens=22, dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for _, _, backward, _ in pool.run(2, record_head, head, True):
        assert backward == [("all_reduce", (22 * WIDTH, torch.float32))]
    actual, expected = joined(pool.run(2, head_results, head)), head_expected(head)
    assert difference(actual[1], expected[1]) < 6e-3  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("frozen", "grad", "products", "sent"),
    [((), True, 3, 1), (("x",), True, 2, 0), (("weight", "bias"), True, 2, 1), ((), False, 1, 0)],
)
def test_chunked_computes_what_is_needed(pool: Pool, frozen: tuple[str, ...], grad: bool, products: int, sent: int) -> None:
    """Three matrix products a chunk with all gradients, one without autograd; nothing is sent for an input that is frozen."""
    head = Head(tokens=22, chunk=8, frozen=frozen)
    for _, _, backward, names in pool.run(2, record_head, head, True, grad):
        assert len(names) == 3 * products
        assert len(backward) == sent


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("ranks", [2, 3])
def test_dense_communication(pool: Pool, ranks: int, smoothing: float) -> None:
    """One exchange of 3 or 4 float32 numbers a token forward, none backward."""
    for sent in pool.run(ranks, record_dense, smoothing):
        assert sent == [("all_gather_into_tensor", ((4 if smoothing else 3) * 24, torch.float32))]


def record_dense(group: TPGroup, smoothing: float) -> list[Any]:
    with Traffic() as traffic:
        dense(group, 257, torch.bfloat16, Options(smoothing, 1e-3, ignored=0.2))
    return list(zip(traffic.collectives, traffic.sent, strict=True))


# The embedding --------------------------------------------------------------------------------------------------------------


def embed(
    group: TPGroup, vocab: int, dtype: torch.dtype, sequence_parallel: bool, ids: Tensor, cotangent: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The table, the output and the gradient of the table, of this rank."""
    device = torch.get_default_device()
    layer = VocabParallelEmbedding(
        vocab, WIDTH, dtype=dtype, group=group, sequence_parallel=sequence_parallel, seed=3, name="embedding"
    )
    y = layer(ids.to(device))
    dy = cotangent.to(device)
    if sequence_parallel:
        dy = dy.flatten(0, -2)[rows_of(ids.numel(), group)]
    y.backward(dy)
    assert layer.weight.grad is not None
    return layer.weight, y, layer.weight.grad


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("ranks", "vocab"), [(1, 257), *SIZES])
def test_embedding_equals_torch(pool: Pool, ranks: int, vocab: int, dtype: torch.dtype, sequence_parallel: bool) -> None:
    """The table is the single device's and so is every output, to the bit; the gradient to rounding, 0 for ids not seen."""
    whole = VocabParallelEmbedding(vocab, WIDTH, dtype=dtype, group=single_device(), seed=3, name="embedding")
    plain = nn.Embedding(vocab, WIDTH, _weight=whole.weight.detach().clone())
    ids = draw_labels((3, 7), vocab)
    cotangent = randn(3, 7, WIDTH, seed=9, dtype=dtype)
    expected = plain(ids)
    expected.backward(cotangent)
    results = pool.run(ranks, embed, vocab, dtype, sequence_parallel, ids, cotangent)
    assert torch.equal(torch.cat([r[0] for r in results]), plain.weight)
    if sequence_parallel:
        assert [len(r[1]) for r in results] == [count.stop - count.start for count in vocab_runs(21, ranks)]
        assert torch.equal(torch.cat([r[1] for r in results]), expected.flatten(0, -2))
    else:
        assert all(torch.equal(r[1], expected) for r in results)
    gradient = torch.cat([r[2] for r in results])
    assert plain.weight.grad is not None
    assert not off(gradient, plain.weight.grad, {torch.bfloat16: 2**-7, torch.float32: 1e-6}.get(dtype, 1e-12), 1e-7)
    unseen = torch.ones(vocab, dtype=torch.bool)
    unseen[ids] = False
    assert torch.equal(gradient[unseen], torch.zeros_like(gradient[unseen]))
    if vocab == 257:
        assert 0.01 < abs(plain.weight.double().std().item() - 1) + 0.011 < 0.06


def vocab_runs(units: int, ranks: int) -> Any:
    return vocab_part(units, TPGroup(0, ranks, mock.Mock()) if ranks > 1 else single_device()).runs


@pytest.mark.parametrize("ranks", [2, 4])
def test_embedding_of_infinite_rows(pool: Pool, ranks: int) -> None:
    """A row that is not finite stays where it is: ids of other ranks neither read it nor add to its gradient."""
    for y, gradient in pool.run(ranks, embed_infinite):
        assert torch.equal(y.isnan().any(-1), torch.tensor([True, False, False, False]))
        assert gradient.isfinite().all()


def embed_infinite(group: TPGroup) -> tuple[Tensor, Tensor]:
    layer = VocabParallelEmbedding(8, WIDTH, group=group)
    with torch.no_grad():
        layer.weight[0 if group.rank == 0 else slice(None)] = torch.nan
        if group.rank:
            layer.weight[-1] = 1.0
    last = [run.stop - 1 for run in layer.layouts["weight"].parts[0].runs]
    y = layer(torch.tensor([0, last[0], last[1], last[-1]]))
    y.nan_to_num().sum().backward()
    assert layer.weight.grad is not None
    return y, layer.weight.grad


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_embedding_communication(pool: Pool, sequence_parallel: bool) -> None:
    """One collective of the activations' size forward; backward none, or one under sequence parallelism."""
    expected = ["reduce_scatter_tensor", "all_gather_into_tensor"] if sequence_parallel else ["all_reduce"]
    for names in pool.run(2, record_embedding, sequence_parallel):
        assert names == expected


def record_embedding(group: TPGroup, sequence_parallel: bool) -> list[str]:
    layer = VocabParallelEmbedding(16, WIDTH, group=group, sequence_parallel=sequence_parallel)
    with OpRecord() as record:
        layer(torch.arange(6).view(2, 3)).sum().backward()
    return record.collectives


def test_embedding_on_meta_has_no_values() -> None:
    layer = VocabParallelEmbedding(16, WIDTH, "meta", group=single_device(), seed=None)
    assert layer.weight.is_meta and layer(torch.zeros(2, 3, dtype=torch.long, device="meta")).shape == (2, 3, WIDTH)


# Invariant mode --------------------------------------------------------------------------------------------------------------


def invariant(group: TPGroup, head: Head, chunked: bool) -> list[Tensor | None]:
    """The loss, dx of all tokens, and the gradients of the whole weight and bias, over 6 virtual shards."""
    group = group.with_virtual_shards(6)
    loss, dx, dw, db = head_results(group, head, chunked)
    layout = column_layout((head.vocab, WIDTH), [vocab_part(head.vocab, group)], group.owners)
    return [loss, dx, *(None if g is None else gather_pieces(g, layout, group).cpu() for g in (dw, db))]


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_invariant_mode(pool: Pool, dtype: torch.dtype, sequence_parallel: bool, chunked: bool) -> None:
    """The bits of the loss and of every gradient are those of one rank; and they are the right numbers."""
    options = Options(0.1, 1e-3, ignored=0.2)
    head = Head(
        sequence_parallel=sequence_parallel,
        dtype=dtype,
        options=options,
        reduce_dtype=torch.promote_types(dtype, torch.float32),
    )
    alone = pool.run(1, invariant, head, chunked)[0]
    for a, e in zip(alone, head_expected(head), strict=True):
        assert a is not None and e is not None
        assert difference(a, e) < {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2}[dtype]
    for ranks in (2, 3, 4):
        for results in pool.run(ranks, invariant, head, chunked):
            for a, e in zip(results, alone, strict=True):
                assert a is not None and e is not None and torch.equal(a, e), ranks


# torch.compile --------------------------------------------------------------------------------------------------------------


def compiled(group: TPGroup, which: str, sequence_parallel: bool, bad: bool = False) -> bool:
    """Whether ``which``, compiled in one graph, gives the same as without; ``bad``: with an id outside the vocabulary."""
    torch.compiler.reset()
    head = Head(sequence_parallel=sequence_parallel, options=Options(0.1, 1e-3, ignored=0.2))
    x, weight, bias, labels = head.local(group)
    layer = VocabParallelEmbedding(257, WIDTH, group=group, sequence_parallel=sequence_parallel, dtype=torch.float64)
    assert bias is not None
    functions: dict[str, tuple[Callable[[Tensor], Tensor], tuple[Tensor, ...]]] = {
        "dense": (lambda y: head.unchunked(group, x, weight, bias, y), (x, weight, bias)),
        "chunked": (lambda y: head.loss(group, x, weight, bias, y), (x, weight, bias)),
        "embedding": (lambda y: layer(y.clamp(min=0)).square().mean(), (layer.weight,)),
    }
    function, inputs = functions[which]
    traced = torch.compile(function, fullgraph=True, backend="aot_eager")
    if bad:
        labels[3] = 257
        traced(labels)
    expected, actual = function(labels), traced(labels)
    gradients = zip(torch.autograd.grad(actual, inputs), torch.autograd.grad(expected, inputs), strict=True)
    return not off(actual, expected, 1e-12) and not any(off(a, e, 1e-12, 1e-13) for a, e in gradients)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("which", ["dense", "chunked", "embedding"])
def test_compiles_in_one_graph(pool: Pool, which: str, sequence_parallel: bool) -> None:
    assert all(pool.run(2, compiled, which, sequence_parallel))


@on_cpu
@pytest.mark.parametrize(("which", "what"), [("chunked", "label"), ("embedding", "token id")])
def test_compiled_code_refuses_too(pool: Pool, which: str, what: str) -> None:
    with pytest.raises(ValueError, match=f"{what} 257 is outside the vocabulary of 257"):
        pool.run(1, compiled, which, False, True)


# Errors ---------------------------------------------------------------------------------------------------------------------

WRONG_LOSSES: list[tuple[dict[str, Any], str]] = [
    ({"labels": torch.tensor([0, 10, 2])}, "label 10 is outside the vocabulary of 10"),
    ({"labels": torch.tensor([0, -1, 2])}, "label -1 is outside the vocabulary of 10"),
    ({"labels": torch.tensor([0, -100, 2]), "ignore_index": -1}, "label -100 is outside the vocabulary of 10"),
    ({"labels": torch.tensor([0.0, 1.0, 2.0])}, "label is an integer below 10, got a tensor of torch.float32"),
    ({"labels": torch.tensor([True, False, True])}, "label is an integer below 10, got a tensor of torch.bool"),
    ({"labels": torch.tensor([0, 1])}, r"labels have shape \(2,\), the logits are of tokens of shape \(3,\)"),
    ({"label_smoothing": 1.5}, "label_smoothing lies between 0 and 1, got 1.5"),
    ({"label_smoothing": -0.1}, "label_smoothing lies between 0 and 1, got -0.1"),
    ({"z_loss": -1.0}, "z_loss is at least 0, got -1.0"),
    ({"reduction": "average"}, "reduction is one of .*, got 'average'"),
]


def wrong_loss(group: TPGroup, chunked: bool, arguments: dict[str, Any]) -> None:
    arguments = {"labels": torch.tensor([0, 1, 2]), "vocab_size": 10, "group": group, **arguments}
    labels = arguments.pop("labels").to(torch.get_default_device())
    weight = take(randn(10, WIDTH), 0, group)
    x = randn(3, WIDTH)
    if chunked:
        linear_cross_entropy(x, weight, labels, **arguments)
    else:
        vocab_parallel_cross_entropy(F.linear(x, weight), labels, **arguments)


@on_cpu
@pytest.mark.parametrize(("arguments", "message"), WRONG_LOSSES, ids=[message for _, message in WRONG_LOSSES])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("ranks", [1, 4])
def test_wrong_losses(pool: Pool, ranks: int, chunked: bool, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pool.run(ranks, wrong_loss, chunked, arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reduction": "none"}, "reduction is one of mean, sum, got 'none'"),
        ({"chunk_tokens": 0}, "chunk_tokens is at least 1, got 0"),
        ({"vocab_size": 2}, "vocab: 2 cannot be dealt over 4 tensor-parallel ranks"),
        ({"sequence_parallel": True}, r"deals 3 tokens as \[1, 1, 1, 0\] over 4 ranks, rank . was given \(3,\)"),
        ({"bias": torch.zeros(1)}, r"does not fit a weight of shape \(., 12\) and a bias of shape \(1,\)"),
    ],
)
def test_wrong_chunked_losses(pool: Pool, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pool.run(4, wrong_loss, True, arguments)


@on_cpu
@pytest.mark.parametrize("ranks", RANKS)
def test_wrong_ids(pool: Pool, ranks: int) -> None:
    for ids, message in (
        (torch.tensor([[0, 8]]), "token id 8 is outside the vocabulary of 8"),
        (torch.tensor([[-1, 3]]), "token id -1 is outside the vocabulary of 8"),
        (torch.tensor([[0.0, 3.0]]), "token id is an integer below 8, got a tensor of torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            pool.run(ranks, embed, 8, torch.float32, False, ids, torch.zeros(1, 2, WIDTH))


def test_wrong_tables() -> None:
    with pytest.raises(ValueError, match="positive sizes, got num_embeddings=0 and embedding_dim=4"):
        VocabParallelEmbedding(0, 4, group=single_device())
    with pytest.raises(ValueError, match="vocab: 3 cannot be dealt over 4 tensor-parallel ranks"):
        VocabParallelEmbedding(3, 4, group=TPGroup(0, 4, mock.Mock()))


# Faults that other systems had, by their number ------------------------------------------------------------------------------


class Tied(nn.Module):
    """An embedding whose table is also the output head."""

    def __init__(self, group: TPGroup) -> None:
        super().__init__()
        self.group = group
        self.embedding = VocabParallelEmbedding(10, WIDTH, dtype=torch.float64, group=group, seed=1, name="embedding")

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embedding(ids).tanh()
        return linear_cross_entropy(hidden, self.embedding.weight, labels, vocab_size=10, group=self.group, chunk_tokens=4)


def tied_steps(group: TPGroup) -> list[Tensor]:
    """The gradient at the first step, and the table after one and after three steps of AdamW."""
    model = Tied(group)
    assert len(list(model.parameters())) == 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    ids, labels = draw_labels((2, 5), 10, seed=1), draw_labels((2, 5), 10, seed=2)
    seen = []
    for _ in range(3):
        optimizer.zero_grad()
        model(ids, labels).backward()
        assert model.embedding.weight.grad is not None
        seen.append(model.embedding.weight.grad.clone())
        optimizer.step()
        seen.append(model.embedding.weight.detach().clone())
    layout = model.embedding.layouts["weight"]
    return [gather_pieces(t, layout, group).cpu() for t in (seen[0], seen[1], seen[5])]


@pytest.mark.parametrize("ranks", RANKS)
def test_c55_a_tied_weight_gets_the_sum_of_both_gradients(pool: Pool, ranks: int) -> None:
    whole = Tied(single_device()).embedding.weight.detach()
    table, head = whole.clone().requires_grad_(), whole.clone().requires_grad_()
    ids, labels = draw_labels((2, 5), 10, seed=1), draw_labels((2, 5), 10, seed=2)
    F.cross_entropy(F.linear(F.embedding(ids, table).tanh(), head).flatten(0, 1), labels.flatten()).backward()
    assert table.grad is not None and head.grad is not None
    parameter = nn.Parameter(whole.clone())
    parameter.grad = table.grad + head.grad
    torch.optim.AdamW([parameter], lr=0.1).step()
    alone = tied_steps(single_device())
    for gradient, once, thrice in pool.run(ranks, tied_steps):
        assert not off(gradient, table.grad + head.grad, 1e-11, 1e-13)
        assert off(gradient, head.grad, 1e-3, 1e-3) and off(gradient, table.grad, 1e-3, 1e-3)
        assert not off(once, parameter.detach(), 1e-9)
        assert not off(thrice, alone[2], 1e-9)


@pytest.mark.parametrize("scale", [1.0, 1000.0])
@pytest.mark.parametrize("ranks", RANKS)
def test_c56_label_smoothing_is_over_the_whole_vocabulary(pool: Pool, ranks: int, scale: float) -> None:
    logits, labels = scale * randn(16, 8, seed=2, dtype=torch.float32), draw_labels((16,), 8)
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole, labels, label_smoothing=0.1)
    expected.backward()
    results = pool.run(ranks, loss_and_gradient, logits, labels, {"label_smoothing": 0.1})
    assert all(torch.equal(r[0], results[0][0]) for r in results)
    assert not off(results[0][0], expected, 1e-6)
    gradient = torch.cat([r[1] for r in results], -1)
    assert gradient.isfinite().all()
    assert not off(gradient, whole.grad, 1e-6, 1e-6)  # type: ignore[arg-type]


@on_cpu
@pytest.mark.parametrize("ranks", RANKS)
def test_c57_labels_outside_the_vocabulary_raise(pool: Pool, ranks: int) -> None:
    with pytest.raises(ValueError, match="label 9 is outside the vocabulary of 8"):
        pool.run(ranks, loss_and_gradient, randn(3, 8), torch.tensor([1, 9, 2]), {})


@pytest.mark.parametrize("ranks", RANKS)
def test_c57_ignored_labels_give_no_loss_and_no_gradient(pool: Pool, ranks: int) -> None:
    logits, labels = randn(3, 8), torch.tensor([1, -100, 2])
    results = pool.run(ranks, loss_and_gradient, logits, labels, {"reduction": "none"})
    assert results[0][0][1] == 0 and results[0][0][0] != 0
    assert all(torch.equal(r[1][1], torch.zeros_like(r[1][1])) for r in results)
    mean = pool.run(ranks, loss_and_gradient, logits, labels, {})[0][0]
    assert not off(mean, F.cross_entropy(logits, labels), 1e-12)
    for loss, gradient in pool.run(ranks, loss_and_gradient, logits, torch.full((3,), -100), {}):
        assert loss.isnan() and torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_c58_full_logits_raise(pool: Pool, ranks: int) -> None:
    with pytest.raises(ValueError, match="of 8 columns of the logits, got 8: these are logits gathered over all ranks"):
        pool.run(ranks, with_full_logits)


def with_full_logits(group: TPGroup) -> None:
    vocab_parallel_cross_entropy(randn(3, 8), draw_labels((3,), 8), vocab_size=8, group=group)


def test_c58_logits_of_a_padded_vocabulary_raise(pool: Pool) -> None:
    with pytest.raises(ValueError, match="rank . of 2 holds 4 of 8 columns of the logits, got 5$"):
        pool.run(2, with_padded_logits)


def with_padded_logits(group: TPGroup) -> None:
    vocab_parallel_cross_entropy(randn(3, 5), draw_labels((3,), 8), vocab_size=8, group=group)
