"""linear_cross_entropy against torch with whole logits: values, memory, communication, and invariant mode; on 1 to 4 ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from parallel import cross_entropy
from parallel.group import TPGroup
from parallel.layout import column_layout
from parallel.regions import gather_pieces
from parallel.traffic import Recorder, Sent
from parallel.vocab import vocab_part
from tests.helpers import OpRecord
from tests.losses import (
    OPTIONS,
    RANKS,
    SIZES,
    WIDTH,
    Head,
    Options,
    Traffic,
    difference,
    head_expected,
    head_results,
    head_results_of,
    joined,
    off,
)
from tests.pool import Pool

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


def test_chunks_are_not_summed_in_half_precision(pool: Pool) -> None:
    """That would be outside the tolerance."""
    head = Head(tokens=600, chunk=4, dtype=torch.bfloat16, options=Options(0.1, 1e-3, ignored=0.1), scale=3.0)
    actual, expected = joined(pool.run(2, with_patch, "_accumulate", sum_in_half, head))[2], head_expected(head)[2]
    assert actual is not None and expected is not None
    assert difference(actual, expected) > HEAD_TOLERANCES[torch.bfloat16][1]


def test_gradients_are_not_skewed(pool: Pool) -> None:
    """Gradients are scaled by 1.3318 and not by 1.3281, which is what bfloat16 makes of it."""
    head = Head(tokens=600, chunk=64, dtype=torch.bfloat16, options=Options(reduction="sum"), scale=1.3318)
    expected = head_expected(head)[1:]
    for actual, e in zip(joined(pool.run(2, head_results, head))[1:], expected, strict=True):
        assert actual is not None and e is not None
        assert abs(projection(actual, e) - 1) < 1e-3
    for actual, e in zip(joined(pool.run(2, with_patch, "_scaled", scale_in_half, head))[1:], expected, strict=True):
        assert actual is not None and e is not None
        assert abs(projection(actual, e) - 1) > 2e-3


def projection(actual: Tensor, expected: Tensor) -> float:
    """The factor between the two, however noisy ``actual`` is."""
    return float((actual.double() * expected).sum() / expected.square().sum())


def sum_in_half(total: Tensor | None, summand: Tensor) -> Tensor:
    return summand if total is None else total + summand


def scale_in_half(value: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) * factor.to(dtype)


def with_patch(group: TPGroup, name: str, mistake: Callable[..., Any], head: Head) -> list[Tensor | None]:
    with mock.patch.object(cross_entropy, name, mistake):
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


def record_head(group: TPGroup, head: Head, grad: bool = True) -> tuple[list[Any], ...]:
    """What is sent forward, and backward; the matrix products."""
    x, weight, bias, labels = head.local(group)
    forward, backward, operators = Recorder(group), Recorder(group), OpRecord()
    with operators, forward, torch.set_grad_enabled(grad):
        loss = head.loss(group, x, weight, bias, labels)
    if grad:
        with operators, backward:
            loss.backward()
    sent, names = (forward.collectives, backward.collectives), operators.names
    return *sent, [n for n in names if n.startswith(("aten.mm", "aten.addmm"))]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("ranks", RANKS)
def test_chunked_never_holds_all_logits(pool: Pool, ranks: int, sequence_parallel: bool, grad: bool) -> None:
    """No tensor is larger than a chunk's logits, of which there are two at a time; the separate functions do make all."""
    head = Head(vocab=256, tokens=200, chunk=50, sequence_parallel=sequence_parallel, options=Options(0.1, 1e-3))
    for largest, most in pool.run(ranks, record_memory, head, True, grad):
        assert largest <= 50 * -(-256 // ranks)
        assert most == 2
    for largest, _ in pool.run(ranks, record_memory, head, False, grad):
        assert largest >= 200 * (256 // ranks)


def record_memory(group: TPGroup, head: Head, chunked: bool, grad: bool) -> tuple[int, int]:
    """The largest tensor, and how many there are at a time that are about as large as a chunk's logits."""
    x, weight, bias, labels = head.local(group)
    with Traffic(large=head.chunk * (head.vocab // group.size)) as traffic, torch.set_grad_enabled(grad):
        loss = (head.loss if chunked else head.unchunked)(group, x, weight, bias, labels)
        if grad:
            loss.backward()
    return traffic.largest, traffic.most


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_chunked_communication(pool: Pool, smoothing: float, sequence_parallel: bool) -> None:
    """Forward 3 or 4 numbers a token, once a chunk (and x, once, under sequence parallelism); backward dx, once."""
    head = Head(tokens=22, chunk=8, sequence_parallel=sequence_parallel, options=Options(smoothing))
    kinds = 4 if smoothing else 3
    for forward, backward, _ in pool.run(2, record_head, head):
        statistics = [Sent("all_gather", 2 * kinds * n, torch.float64) for n in (8, 8, 6)]
        if sequence_parallel:
            assert forward == [Sent("all_gather", 22 * WIDTH, torch.float64), *statistics]
            assert backward == [Sent("reduce_scatter", 22 * WIDTH, torch.float64)]
        else:
            assert forward == statistics
            assert backward == [Sent("all_reduce", 22 * WIDTH, torch.float64)]


def test_chunked_reduces_in_the_dtype_asked_for(pool: Pool) -> None:
    head = Head(tokens=22, dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for _, backward, _ in pool.run(2, record_head, head):
        assert backward == [Sent("all_reduce", 22 * WIDTH, torch.float32)]
    actual, expected = joined(pool.run(2, head_results, head)), head_expected(head)
    assert difference(actual[1], expected[1]) < 6e-3  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("frozen", "grad", "products", "sent"),
    [((), True, 3, 1), (("x",), True, 2, 0), (("weight", "bias"), True, 2, 1), ((), False, 1, 0)],
)
def test_chunked_computes_what_is_needed(pool: Pool, frozen: tuple[str, ...], grad: bool, products: int, sent: int) -> None:
    """Three matrix products a chunk with all gradients, one without autograd; nothing is sent for an input that is frozen."""
    head = Head(tokens=22, chunk=8, frozen=frozen)
    for _, backward, names in pool.run(2, record_head, head, grad):
        assert len(names) == 3 * products
        assert len(backward) == sent


# Invariant mode --------------------------------------------------------------------------------------------------------------


def whole_results(group: TPGroup, virtual_shards: int | None, head: Head, chunked: bool) -> list[Tensor | None]:
    """The loss, dx of all tokens, and the gradients of the whole weight and bias, over ``virtual_shards``."""
    group = group.with_virtual_shards(virtual_shards)
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
    alone = pool.run(1, whole_results, 6, head, chunked)[0]
    for a, e in zip(alone, head_expected(head), strict=True):
        assert a is not None and e is not None
        assert difference(a, e) < {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2}[dtype]
    for ranks in (2, 3, 4):
        for results in pool.run(ranks, whole_results, 6, head, chunked):
            for a, e in zip(results, alone, strict=True):
                assert a is not None and e is not None and torch.equal(a, e), ranks
    usual = pool.run(3, whole_results, None, head, chunked)[0][1], pool.run(1, whole_results, None, head, chunked)[0][1]
    assert not torch.equal(*usual)  # dx differs without the mode
