"""The conjugate pairs: what each gives forward and backward on 1 to 4 ranks, against values computed whole on every rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from parallel.group import TPGroup
from parallel.layout import Layout, Part, attention_parts, column_layout
from parallel.regions import (
    copies_for_ranks,
    copy_to_ranks,
    gather_from_ranks,
    gather_tokens,
    merge_tokens,
    reduce_from_ranks,
    reduce_scatter_tokens,
    scatter_to_ranks,
    split_tokens,
    sum_over_holders,
    take_pieces,
    token_counts,
)
from parallel.virtual import sum_shards
from tests.helpers import EXACT, OpRecord, labelled, randn, rows_of
from tests.pool import Pool

RANKS = [1, 2, 3, 4]


def of_rank(rank: int, *shape: int, seed: int = 0) -> Tensor:
    """What a rank contributes; all ranks can compute what all others contribute."""
    return randn(*shape, seed=1000 * seed + rank)


def of_all(group: TPGroup, *shape: int, seed: int = 0) -> Tensor:
    return torch.stack([of_rank(rank, *shape, seed=seed) for rank in range(group.size)])


def transposed(x: Tensor) -> Tensor:
    """The same values, not contiguous."""
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def check_pair(f: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, dy: Tensor, dx: Tensor) -> None:
    """f(x) == y, and dy comes back as dx, without a change to x or dy, for contiguous and other strides alike."""
    for stride in (torch.clone, transposed):
        given, cotangent = stride(x).requires_grad_(), stride(dy)
        result = f(given)
        (back,) = torch.autograd.grad(result, given, cotangent)
        assert_close(result, y, **EXACT)
        assert_close(back, dx, **EXACT)
        assert torch.equal(given, x) and torch.equal(cotangent, dy), "wrote to a tensor that it does not own"
    given = x.clone().requires_grad_()  # expanded gradients, as sum() gives them
    (ones,) = torch.autograd.grad(f(given).sum(), given)
    (same,) = torch.autograd.grad(f(given), given, torch.ones_like(y))
    assert torch.equal(ones, same)


# -- the pairs one by one


def copy_and_reduce(group: TPGroup) -> None:
    x = randn(5, 3)
    dy = of_all(group, 5, 3, seed=1)
    check_pair(lambda t: copy_to_ranks(t, group), x, x, dy[group.rank], dy.sum(0))
    partial = of_all(group, 5, 3, seed=2)
    check_pair(lambda t: reduce_from_ranks(t, group), partial[group.rank], partial.sum(0), dy[0], dy[0])
    check_pair(lambda t: reduce_from_ranks(t * 1, group, owned=True), partial[group.rank], partial.sum(0), dy[0], dy[0])


@pytest.mark.parametrize("ranks", RANKS)
def test_c26_copy_and_reduce(pool: Pool, ranks: int) -> None:
    pool.run(ranks, copy_and_reduce)


def reduce_of_a_replicated_loss(group: TPGroup) -> Tensor:
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    reduce_from_ranks(x, group).sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("ranks", RANKS)
def test_c26_a_replicated_loss_has_gradient_one(pool: Pool, ranks: int) -> None:
    for gradient in pool.run(ranks, reduce_of_a_replicated_loss):
        assert torch.equal(gradient, torch.ones(3, dtype=torch.float64))


def gather_and_scatter(group: TPGroup, units: int, dim: int) -> None:
    """Uneven pieces of two parts along each dimension, positive or negative."""
    parts = [Part.even("a", units, group.size), Part.even("b", units + 1, group.size, unit=2)]
    shape = [3, 4]
    shape.insert(dim if dim >= 0 else dim + 3, sum(part.size for part in parts))
    layout = Layout(tuple(shape), dim, tuple(parts))
    whole, cotangent = randn(*shape), randn(*shape, seed=1)
    held, held_cotangent = take_pieces(whole, layout, group.rank), take_pieces(cotangent, layout, group.rank)
    check_pair(lambda t: scatter_to_ranks(t, layout, group), whole, held, held_cotangent, cotangent)
    check_pair(lambda t: gather_from_ranks(t, layout, group), held, whole, cotangent, held_cotangent)


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3])
@pytest.mark.parametrize("ranks", RANKS)
def test_gather_and_scatter_of_uneven_pieces(pool: Pool, ranks: int, dim: int) -> None:
    for units in {ranks, 5, 8}:
        pool.run(ranks, gather_and_scatter, units, dim)


def gather_and_scatter_shared(group: TPGroup, heads: int, kv_heads: int) -> None:
    """Rows that several ranks hold: gradients of a scattered row add up, and a gathered row is its first holder's."""
    layout = column_layout((2 * heads + 4 * kv_heads, 3), attention_parts(heads, kv_heads, 2, group.size))
    whole = randn(*layout.shape)
    held = [take_pieces(whole, layout, rank) for rank in range(group.size)]
    cotangents = [randn(*layout.local_shape(rank), seed=rank + 1) for rank in range(group.size)]
    total = torch.zeros_like(whole)
    for rank, cotangent in enumerate(cotangents):
        for piece in layout.pieces(rank):
            total[piece.start : piece.start + piece.length] += cotangent[piece.local : piece.local + piece.length]
    mine = group.rank
    check_pair(lambda t: scatter_to_ranks(t, layout, group), whole, held[mine], cotangents[mine], total)
    expected = torch.zeros_like(held[mine])
    for piece in layout.owned(mine):
        expected[piece.local : piece.local + piece.length] = total[piece.start : piece.start + piece.length]
    check_pair(lambda t: gather_from_ranks(t, layout, group), held[mine], whole, total, expected)


@pytest.mark.parametrize(("ranks", "heads", "kv_heads"), [(1, 4, 2), (2, 4, 1), (3, 7, 1), (4, 4, 2), (4, 9, 3), (2, 9, 3)])
def test_gather_and_scatter_of_shared_kv_rows(pool: Pool, ranks: int, heads: int, kv_heads: int) -> None:
    pool.run(ranks, gather_and_scatter_shared, heads, kv_heads)


def tokens_there_and_back(group: TPGroup, tokens: int) -> None:
    mine = rows_of(tokens, group)
    whole, cotangent = randn(tokens, 3), randn(tokens, 3, seed=1)
    partial, dy = of_all(group, tokens, 3, seed=2), of_all(group, tokens, 3, seed=3)
    check_pair(lambda t: gather_tokens(t, tokens, group), whole[mine], whole, dy[group.rank], dy.sum(0)[mine])
    check_pair(
        lambda t: reduce_scatter_tokens(t, tokens, group),
        partial[group.rank],
        partial.sum(0)[mine],
        cotangent[mine],
        cotangent,
    )
    check_pair(lambda t: split_tokens(t, group), whole, whole[mine], cotangent[mine], cotangent)
    check_pair(lambda t: merge_tokens(t, tokens, group), whole[mine], whole, cotangent, cotangent[mine])


@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 13])
@pytest.mark.parametrize("ranks", RANKS)
def test_tokens_in_any_number(pool: Pool, ranks: int, tokens: int) -> None:
    pool.run(ranks, tokens_there_and_back, tokens)


def test_token_counts_are_dealt_evenly() -> None:
    counts = [token_counts(7, TPGroup(0, n)) for n in (1, 2, 3, 4)]
    assert counts == [[7], [4, 3], [3, 2, 2], [2, 2, 2, 1]]


def holders(group: TPGroup, heads: int, kv_heads: int) -> None:
    parts = (*attention_parts(heads, kv_heads, 2, group.size), Part.even("up", 5, group.size))
    layout = column_layout((2 * heads + 4 * kv_heads + 5, 3), parts)
    held = take_pieces(randn(*layout.shape), layout, group.rank)
    cotangents = [randn(*layout.local_shape(rank), seed=rank + 1) for rank in range(group.size)]
    total = torch.zeros(layout.shape, dtype=torch.float64)
    for rank, cotangent in enumerate(cotangents):
        for piece in layout.pieces(rank):
            total[piece.start : piece.start + piece.length] += cotangent[piece.local : piece.local + piece.length]
    expected = take_pieces(total, layout, group.rank)
    check_pair(lambda t: sum_over_holders(t, layout, group), held, held, cotangents[group.rank], expected)
    bias = Layout(layout.shape[:1], 0, parts)
    check_pair(
        lambda t: sum_over_holders(t, bias, group), held[:, 0], held[:, 0], cotangents[group.rank][:, 0], expected[:, 0]
    )


@pytest.mark.parametrize(("ranks", "heads", "kv_heads"), [(1, 4, 2), (2, 4, 1), (3, 7, 1), (4, 4, 2), (4, 9, 3), (2, 4, 2)])
def test_sum_over_holders(pool: Pool, ranks: int, heads: int, kv_heads: int) -> None:
    pool.run(ranks, holders, heads, kv_heads)


def holders_send(group: TPGroup, heads: int, kv_heads: int) -> list[str]:
    layout = column_layout((heads + 2 * kv_heads, 3), attention_parts(heads, kv_heads, 1, group.size))
    held = take_pieces(randn(*layout.shape), layout, group.rank).requires_grad_()
    with OpRecord() as record:
        sum_over_holders(held, layout, group).sum().backward()
    return record.collectives


def test_sum_over_holders_is_free_where_nothing_is_shared(pool: Pool) -> None:
    assert pool.run(2, holders_send, 4, 2) == [[]] * 2
    assert pool.run(4, holders_send, 4, 2) == [["all_reduce"]] * 4
    assert pool.run(1, holders_send, 4, 2) == [[]]


# -- gradients of whole functions by finite differences


def differentiate(group: TPGroup) -> None:
    """Functions from a replicated tensor to a replicated one, through every pair: torch's gradcheck perturbs it alike on every
    rank, so that its numerical gradient is that of the whole function."""
    tokens, width = 5, 4
    weight = of_rank(group.rank, tokens, width)
    layout = Layout((tokens, width), 1, (Part.even("a", width, group.size),))
    shared = column_layout((16, 1), attention_parts(4, 2, 2, group.size))
    mine = rows_of(tokens, group)

    def copy_reduce(x: Tensor) -> Tensor:
        return reduce_from_ranks(torch.sin(copy_to_ranks(x, group) * weight), group)

    def scatter_gather(x: Tensor) -> Tensor:
        return gather_from_ranks(torch.sin(scatter_to_ranks(x, layout, group) * (group.rank + 1)), layout, group)

    def scatter_reduce_shared(x: Tensor) -> Tensor:
        return reduce_from_ranks(torch.sin(scatter_to_ranks(x, shared, group) * (group.rank + 1)).sum(), group)

    def scatter_gather_shared(x: Tensor) -> Tensor:
        return gather_from_ranks(torch.sin(scatter_to_ranks(x, shared, group)), shared, group)

    def split_merge(x: Tensor) -> Tensor:
        return merge_tokens(torch.sin(split_tokens(x, group) * weight[mine]), tokens, group)

    def sequence_parallel(x: Tensor) -> Tensor:
        whole = gather_tokens(torch.sin(split_tokens(x, group)), tokens, group)
        return merge_tokens(reduce_scatter_tokens(torch.sin(whole * weight), tokens, group), tokens, group)

    for function in (copy_reduce, scatter_gather, split_merge, sequence_parallel):
        assert torch.autograd.gradcheck(function, randn(tokens, width, requires_grad=True))
    for function in (scatter_reduce_shared, scatter_gather_shared):
        assert torch.autograd.gradcheck(function, randn(16, 1, requires_grad=True))


@pytest.mark.parametrize("ranks", RANKS)
def test_c26_gradcheck(pool: Pool, ranks: int) -> None:
    pool.run(ranks, differentiate)


# -- nothing is written to


def siblings(group: TPGroup) -> tuple[float, float]:
    """Branches that receive one gradient tensor: an all-reduce in place would corrupt it for the others."""
    x = torch.ones((), dtype=torch.float64, requires_grad=True)
    (copy_to_ranks(x, group) + copy_to_ranks(x, group)).backward()
    assert x.grad is not None
    twice, x.grad = x.grad, None
    (copy_to_ranks(x, group) + x).backward()
    return twice.item(), x.grad.item()


@pytest.mark.parametrize("ranks", RANKS)
def test_sibling_branches_keep_their_gradient(pool: Pool, ranks: int) -> None:
    assert pool.run(ranks, siblings) == [(2 * ranks, ranks + 1)] * ranks


def planted_siblings(group: TPGroup) -> float:
    """The fault that the test above is for."""

    class InPlace(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            torch.distributed.all_reduce(grad, group=group.process_group)
            return grad

    x = torch.ones((), dtype=torch.float64, requires_grad=True)
    (InPlace.apply(x) + InPlace.apply(x)).backward()
    return x.grad.item()


def test_sibling_branches_tell_an_all_reduce_in_place(pool: Pool) -> None:
    assert pool.run(2, planted_siblings) == [8, 8]


# -- what is sent


def copies_of_many(group: TPGroup) -> list[str]:
    """Tensors of several shapes, one of them 0-d, one that needs no gradient, one that is not used."""
    tensors = [randn(4, 3), randn(5), randn(), randn(2, 2), randn(3)]
    for i in (0, 1, 2, 4):
        tensors[i].requires_grad_()
    cotangents = [of_all(group, *t.shape, seed=i + 1) for i, t in enumerate(tensors)]
    copies = copies_for_ranks(tensors, group)
    assert all(torch.equal(c, t) for c, t in zip(copies, tensors, strict=True))
    with OpRecord() as record:
        sum((copies[i] * cotangents[i][group.rank]).sum() for i in range(4)).backward()
    for i in (0, 1, 2):
        assert_close(tensors[i].grad, cotangents[i].sum(0), **EXACT)
    assert tensors[3].grad is None
    assert tensors[4].grad is None or not tensors[4].grad.any()
    return record.collectives


@pytest.mark.parametrize("ranks", RANKS)
def test_copies_of_several_tensors_send_one_all_reduce(pool: Pool, ranks: int) -> None:
    assert pool.run(ranks, copies_of_many) == [["all_reduce"] if ranks > 1 else []] * ranks


# -- precision and sums


def in_half(group: TPGroup, reduce_dtype: torch.dtype | None) -> list[bool]:
    """For each pair that sums: is the bf16 result the exact sum, rounded once?"""
    tokens = 256
    half = of_all(group, tokens, 8).bfloat16()
    exact = half.double().sum(0).bfloat16()
    mine = rows_of(tokens, group)
    x = torch.zeros(tokens, 8, dtype=torch.bfloat16, requires_grad=True)
    x_rows = torch.zeros(mine.stop - mine.start, 8, dtype=torch.bfloat16, requires_grad=True)
    copied, gathered = (
        copy_to_ranks(x, group, reduce_dtype),
        gather_tokens(x_rows, tokens, group, reduce_dtype),
    )
    results = [
        (reduce_from_ranks(half[group.rank], group, reduce_dtype), exact),
        (reduce_scatter_tokens(half[group.rank], tokens, group, reduce_dtype), exact[mine]),
        (torch.autograd.grad(copied, x, half[group.rank])[0], exact),
        (torch.autograd.grad(gathered, x_rows, half[group.rank])[0], exact[mine]),
    ]
    assert all(result.dtype == torch.bfloat16 for result, _ in results)
    return [torch.equal(result, expected) for result, expected in results]


def test_half_precision_is_summed_in_float32_where_asked(pool: Pool) -> None:
    assert pool.run(4, in_half, torch.float32) == [[True] * 4] * 4
    assert pool.run(4, in_half, None) == [[False] * 4] * 4  # the test would notice


def sums_of_ones(group: TPGroup) -> list[Tensor]:
    tokens = 2 * group.size + 1
    ones = torch.ones(tokens, 2)
    return [reduce_from_ranks(ones, group), reduce_scatter_tokens(ones, tokens, group)]


@pytest.mark.parametrize("ranks", RANKS)
def test_c30_sums_are_sums(pool: Pool, ranks: int) -> None:
    """On gloo a reduce-scatter that is asked for an average may return the sum: nothing here asks for one."""
    for result in pool.run(ranks, sums_of_ones):
        assert all(torch.equal(total, torch.full_like(total, ranks)) for total in result)


def empty_tokens(group: TPGroup) -> list[tuple[int, ...]]:
    x = torch.zeros(0, 3, requires_grad=True)
    results = [
        gather_tokens(x, 0, group),
        reduce_scatter_tokens(x, 0, group),
        reduce_from_ranks(x, group),
        copy_to_ranks(x, group),
    ]
    sum(result.sum() for result in results).backward()
    return [tuple(result.shape) for result in results] + [tuple(x.grad.shape)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_tokens_at_all(pool: Pool, ranks: int) -> None:
    assert pool.run(ranks, empty_tokens) == [[(0, 3)] * 5] * ranks


def test_pieces_of_a_replicated_layout_are_copies() -> None:
    whole = labelled(3, 2)
    held = take_pieces(whole, Layout((3, 2)), 1)
    assert torch.equal(held, whole) and held.data_ptr() != whole.data_ptr()


def add_to_results(group: TPGroup) -> None:
    """A residual added in place, as one may to any result that is not the input itself."""
    for of in (group, group.with_virtual_shards(group.size)):
        for scatter in (False, True):
            x = randn(5, 3).requires_grad_()
            if of.invariant:
                y = sum_shards([2 * x], of, scatter=scatter)
            else:
                y = reduce_scatter_tokens(2 * x, 5, of) if scatter else reduce_from_ranks(2 * x, of)
            y += 1
            y.sum().backward()
            assert x.grad is not None and torch.equal(x.grad, torch.full_like(x, 2.0))


@pytest.mark.parametrize("ranks", RANKS)
def test_results_can_be_written_to(pool: Pool, ranks: int) -> None:
    pool.run(ranks, add_to_results)


# -- errors, before anything is sent


def misuse(group: TPGroup, what: str) -> None:
    features = column_layout((6, 2), [Part.even("output", 6, group.size)]).features
    own = features.local_size(group.rank)
    uses: dict[str, Callable[[], Tensor]] = {
        "gather_tokens": lambda: gather_tokens(randn(3, 2), 8, group),
        "merge_tokens": lambda: merge_tokens(randn(9, 2), 8, group),
        "reduce_scatter_tokens": lambda: reduce_scatter_tokens(randn(10, 2), 8, group),
        "scatter_to_ranks": lambda: scatter_to_ranks(randn(3, 8), features, group),
        "gather_from_ranks": lambda: gather_from_ranks(randn(2, own - 1), features, group),
    }
    with OpRecord() as record:
        try:
            uses[what]()
        finally:
            assert record.collectives == [], "sent something before it refused"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("gather_tokens", r"is to give \d rows, of 8 tokens in all, got shape \(3, 2\)"),
        ("merge_tokens", r"is to give \d rows, of 8 tokens in all, got shape \(9, 2\)"),
        ("reduce_scatter_tokens", r"is to give 8 rows, of 8 tokens in all, got shape \(10, 2\)"),
        ("scatter_to_ranks", r"dimension -1 is to be of length 6, got shape \(3, 8\)"),
        ("gather_from_ranks", r"dimension -1 is to be of length \d, got shape \(2, \d\)"),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_sizes_that_do_not_fit(pool: Pool, what: str, ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"{what}: .*{message}"):
        pool.run(ranks, misuse, what)
