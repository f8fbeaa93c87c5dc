"""The vocabulary-parallel embedding against torch.nn.Embedding, alone and tied to the head, on 1 to 4 ranks; torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parallel.group import TPGroup, single_device
from parallel.regions import gather_pieces
from parallel.vocab import VocabParallelEmbedding, linear_cross_entropy, vocab_part
from tests.helpers import OpRecord, randn, rows_of
from tests.losses import RANKS, SIZES, WIDTH, Head, Options, draw_labels, off, on_cpu
from tests.pool import Pool


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
    return vocab_part(units, TPGroup(0, ranks) if ranks > 1 else single_device()).runs


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
    expected = ["reduce_scatter", "all_gather"] if sequence_parallel else ["all_reduce"]
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
    with pytest.raises(ValueError, match="vocab: 3 cannot be dealt over 4 tensor-parallel shards"):
        VocabParallelEmbedding(3, 4, group=TPGroup(0, 4))


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
