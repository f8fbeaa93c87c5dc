"""vocab_parallel_cross_entropy against F.cross_entropy of the whole logits, on 1 to 4 ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from parallel import cross_entropy
from parallel.cross_entropy import DenseCrossEntropy, TokenLoss
from parallel.group import TPGroup, single_device
from parallel.layout import Part
from parallel.traffic import Recorder, Sent
from parallel.vocab import linear_cross_entropy, vocab_parallel_cross_entropy, vocab_part
from tests.helpers import randn
from tests.losses import (
    OPTIONS,
    RANKS,
    SIZES,
    WIDTH,
    Options,
    draw_labels,
    loss_and_gradient,
    off,
    on_cpu,
    take,
    torch_loss,
)
from tests.pool import Pool

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


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("ranks", [2, 3])
def test_dense_communication(pool: Pool, ranks: int, smoothing: float) -> None:
    """One exchange of 3 or 4 float32 numbers a token forward, none backward."""
    for sent in pool.run(ranks, record_dense, smoothing):
        assert sent == [Sent("all_gather", (4 if smoothing else 3) * 24 * ranks, torch.float32)]


def record_dense(group: TPGroup, smoothing: float) -> list[Sent]:
    with Recorder(group) as recorder:
        dense(group, 257, torch.bfloat16, Options(smoothing, 1e-3, ignored=0.2))
    return recorder.collectives


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
    x = arguments.pop("x", randn(3, WIDTH)).to(torch.get_default_device())
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
        ({"vocab_size": 2}, "vocab: 2 cannot be dealt over 4 tensor-parallel shards"),
        ({"sequence_parallel": True}, r"deals 3 tokens as \[1, 1, 1, 0\] over 4 ranks, rank . was given \(3,\)"),
        ({"x": randn(3, WIDTH).int()}, "the logits must be of a floating dtype, got torch.int32"),
        ({"x": randn(3, WIDTH).half()}, "x is of torch.float16, the weight of torch.float64"),
        ({"bias": torch.zeros(1)}, r"does not fit a weight of shape \(., 12\) and a bias of shape \(1,\)"),
    ],
)
def test_wrong_chunked_losses(pool: Pool, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pool.run(4, wrong_loss, True, arguments)


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
