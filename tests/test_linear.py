"""The two linears against torch.nn.Linear with the whole weight: outputs and every gradient, on 1 to 4 ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from parallel import collectives
from parallel.group import TPGroup, single_device
from parallel.layout import Layout, Part, attention_parts
from parallel.linear import ColumnParallelLinear, RowParallelLinear
from parallel.regions import add_pieces, gather_pieces, take_pieces
from parallel.state import gather_state, named_layouts, scatter_state
from tests.helpers import EXACT, OpRecord, labelled, randn, rows_of
from tests.pool import Pool, device_type

RANKS = [1, 2, 3, 4]
Linear = ColumnParallelLinear | RowParallelLinear


@dataclass(frozen=True)
class Case:
    """One linear and one input, whose leading dimensions are ``shape``.

    ``fused`` makes parts gate and up of that size, ``heads`` parts q, k and v of heads of width 2, ``frozen`` names what needs
    no gradient: "x", "weight", "bias".
    """

    in_features: int = 7
    out_features: int = 9
    bias: bool = True
    shape: tuple[int, ...] = (5,)
    sequence_parallel: bool = False
    gather_output: bool = False
    input_is_parallel: bool = True
    fused: int = 0
    heads: tuple[int, int] | None = None
    frozen: tuple[str, ...] = ()

    def parts(self, ranks: int) -> list[Part] | None:
        if self.heads:
            return list(attention_parts(*self.heads, 2, ranks))
        return [Part.even(name, self.fused, ranks) for name in ("gate", "up")] if self.fused else None

    def whole(self) -> tuple[nn.Linear, Tensor, Tensor]:
        """torch's own layer, its input, and its output."""
        linear = nn.Linear(self.in_features, self.out_features, self.bias, dtype=torch.float64)
        with torch.no_grad():
            linear.weight.copy_(randn(self.out_features, self.in_features, seed=1))
            if self.bias:
                linear.bias.copy_(randn(self.out_features, seed=2))
        x = randn(*self.shape, self.in_features, seed=3, requires_grad="x" not in self.frozen)
        self.freeze(linear)
        return linear, x, linear(x)

    def freeze(self, linear: nn.Module) -> None:
        for name, parameter in linear.named_parameters():
            parameter.requires_grad_(name not in self.frozen)


def last(layout: Layout) -> Layout:
    """How the activation beside a weight with this layout is cut."""
    assert layout.dim is not None
    return Layout((layout.shape[layout.dim],), -1, layout.parts)


def compare(linear: Linear, whole: nn.Linear, given: Tensor, dx: Tensor | None) -> None:
    """Every gradient: of the input, and of the parameters once gathered."""
    assert (given.grad is None) == (dx is None)
    if dx is not None:
        assert_close(given.grad, dx, **EXACT)
    gathered = gather_state(linear, linear.group, gradients=True)
    expected = {name: parameter.grad for name, parameter in whole.named_parameters() if parameter.grad is not None}
    assert gathered.keys() == expected.keys()
    for name in expected:
        assert_close(gathered[name], expected[name], **EXACT, msg=lambda text, name=name: f"{name}.grad: {text}")


def column(group: TPGroup, case: Case) -> None:
    whole, x, y = case.whole()
    linear = ColumnParallelLinear(
        case.in_features,
        case.out_features,
        case.bias,
        dtype=torch.float64,
        group=group,
        parts=case.parts(group.size),
        gather_output=case.gather_output,
        sequence_parallel=case.sequence_parallel,
    )
    scatter_state(linear, dict(whole.named_parameters()), group)
    case.freeze(linear)
    mine = rows_of(case.shape[0], group) if case.sequence_parallel else slice(None)
    given = x.detach()[mine].clone().requires_grad_(x.requires_grad)
    result = linear(given, tokens=case.shape[0]) if case.sequence_parallel else linear(given)

    columns = last(linear.layouts["weight"])
    widths = [columns.local_size(rank) for rank in range(group.size)]
    # Every rank has its own gradient, also of columns that several ranks hold, where the whole layer's is their sum.
    cotangents = [randn(*case.shape, width, seed=10 + rank) for rank, width in enumerate(widths)]
    dy = randn(*y.shape, seed=4) if case.gather_output else add_pieces(cotangents, columns)
    expected, cotangent = (y, dy) if case.gather_output else (take_pieces(y, columns, group.rank), cotangents[group.rank])
    assert_close(result, expected, **EXACT)
    assert result.requires_grad == y.requires_grad
    if y.requires_grad:
        y.backward(dy)
        result.backward(cotangent)
    compare(linear, whole, given, None if x.grad is None else x.grad[mine])


def row(group: TPGroup, case: Case) -> None:
    whole, x, y = case.whole()
    linear = RowParallelLinear(
        case.in_features,
        case.out_features,
        case.bias,
        dtype=torch.float64,
        group=group,
        parts=case.parts(group.size),
        input_is_parallel=case.input_is_parallel,
        sequence_parallel=case.sequence_parallel,
    )
    scatter_state(linear, dict(whole.named_parameters()), group)
    case.freeze(linear)
    mine = rows_of(case.shape[0], group) if case.sequence_parallel else slice(None)
    inputs = last(linear.layouts["weight"])
    given = take_pieces(x.detach(), inputs, group.rank) if case.input_is_parallel else x.detach().clone()
    result = linear(given.requires_grad_(x.requires_grad))

    dy = randn(*y.shape, seed=4)
    assert_close(result, y[mine], **EXACT)
    assert result.requires_grad == y.requires_grad
    if y.requires_grad:
        y.backward(dy)
        result.backward(dy[mine].clone())
    dx = x.grad
    if dx is not None and case.input_is_parallel:
        dx = take_pieces(dx, inputs, group.rank)
    compare(linear, whole, given, dx)


COLUMN_CASES = {
    "plain": Case(),
    "no bias": Case(bias=False),
    "even": Case(in_features=8, out_features=24),
    "one column a rank": Case(out_features=4),
    "gathered": Case(gather_output=True),
    "fused": Case(out_features=10, fused=5),
    "fused and gathered": Case(out_features=10, fused=5, gather_output=True),
    "qkv": Case(out_features=36, heads=(12, 3)),
    "shared kv": Case(out_features=12, heads=(4, 1)),
    "shared kv, no bias": Case(out_features=12, heads=(4, 1), bias=False),
    "shared kv, gathered": Case(out_features=12, heads=(4, 1), gather_output=True),
    "tokens cut": Case(sequence_parallel=True, shape=(8,)),
    "tokens cut unevenly": Case(sequence_parallel=True, shape=(7,)),
    "fewer tokens than ranks": Case(sequence_parallel=True, shape=(1,)),
    "tokens cut, gathered": Case(sequence_parallel=True, shape=(7,), gather_output=True, out_features=10, fused=5),
    "tokens cut, shared kv": Case(sequence_parallel=True, shape=(7,), out_features=12, heads=(4, 1)),
    "1-D": Case(shape=()),
    "3-D": Case(shape=(2, 3)),
    "4-D": Case(shape=(2, 1, 3)),
    "no tokens": Case(shape=(0,)),
    "frozen input": Case(frozen=("x",)),
    "frozen weight": Case(frozen=("weight",)),
    "frozen weight and bias": Case(frozen=("weight", "bias")),
    "only the bias": Case(frozen=("x", "weight")),
    "all frozen": Case(frozen=("x", "weight", "bias")),
    "frozen input, tokens cut": Case(frozen=("x",), sequence_parallel=True, shape=(7,)),
    "frozen weight, tokens cut": Case(frozen=("weight",), sequence_parallel=True, shape=(7,)),
}

ROW_CASES = {
    "plain": Case(),
    "no bias": Case(bias=False),
    "even": Case(in_features=24, out_features=8),
    "one input a rank": Case(in_features=4),
    "whole input": Case(input_is_parallel=False),
    "whole input in parts": Case(in_features=10, fused=5, input_is_parallel=False),
    "parts": Case(in_features=10, fused=5),
    "tokens cut": Case(sequence_parallel=True, shape=(8,)),
    "tokens cut unevenly": Case(sequence_parallel=True, shape=(7,)),
    "fewer tokens than ranks": Case(sequence_parallel=True, shape=(1,)),
    "tokens cut, whole input": Case(sequence_parallel=True, shape=(7,), input_is_parallel=False),
    "1-D": Case(shape=()),
    "3-D": Case(shape=(2, 3)),
    "4-D": Case(shape=(2, 1, 3)),
    "no tokens": Case(shape=(0,)),
    "frozen input": Case(frozen=("x",)),
    "frozen weight": Case(frozen=("weight",)),
    "only the bias": Case(frozen=("x", "weight")),
    "all frozen": Case(frozen=("x", "weight", "bias")),
    "only the bias, tokens cut": Case(frozen=("x", "weight"), sequence_parallel=True, shape=(7,)),
}


@pytest.mark.parametrize("name", COLUMN_CASES)
def test_column_equals_torch(pool: Pool, name: str) -> None:
    for ranks in RANKS:
        pool.run(ranks, column, COLUMN_CASES[name])


@pytest.mark.parametrize("name", ROW_CASES)
def test_row_equals_torch(pool: Pool, name: str) -> None:
    for ranks in RANKS:
        pool.run(ranks, row, ROW_CASES[name])


# -- a column-parallel layer into a row-parallel one


def feedforward(group: TPGroup, d_ff: int) -> None:
    """A gated feed-forward with odd widths against plain torch."""
    gate, up, down = randn(d_ff, 6, seed=1), randn(d_ff, 6, seed=2), randn(6, d_ff, seed=3)
    x, dy = randn(5, 6, seed=4, requires_grad=True), randn(5, 6, seed=5)
    whole = torch.cat([gate, up]).requires_grad_()
    whole_down = down.clone().requires_grad_()
    gated = F.silu(x @ whole[:d_ff].T) * (x @ whole[d_ff:].T)
    y = gated @ whole_down.T
    y.backward(dy)

    parts = [Part.even(name, d_ff, group.size) for name in ("gate", "up")]
    first = ColumnParallelLinear(6, 2 * d_ff, False, dtype=torch.float64, group=group, parts=parts)
    second = RowParallelLinear(d_ff, 6, False, dtype=torch.float64, group=group, parts=parts[1:])
    scatter_state(first, {"weight": whole}, group)
    scatter_state(second, {"weight": whole_down}, group)
    given = x.detach().clone().requires_grad_()
    local_gate, local_up = first.split(first(given))
    result = second(F.silu(local_gate) * local_up)
    result.backward(dy)
    assert_close(result, y, **EXACT)
    assert_close(given.grad, x.grad, **EXACT)
    assert_close(gather_state(first, group, gradients=True)["weight"], whole.grad, **EXACT)
    assert_close(gather_state(second, group, gradients=True)["weight"], whole_down.grad, **EXACT)


def test_c41_a_width_of_five_on_two_ranks(pool: Pool) -> None:
    pool.run(2, feedforward, 5)


def test_c42_three_gates_and_three_ups_on_two_ranks(pool: Pool) -> None:
    pool.run(2, feedforward, 3)


@pytest.mark.parametrize("ranks", RANKS)
def test_odd_widths_from_column_to_row(pool: Pool, ranks: int) -> None:
    for d_ff in (4, 7, 101):
        pool.run(ranks, feedforward, d_ff)


def fused_rows(group: TPGroup) -> Tensor:
    parts = [Part.even(name, 4, group.size) for name in ("gate", "up")]
    linear = ColumnParallelLinear(1, 8, False, dtype=torch.float64, group=group, parts=parts)
    scatter_state(linear, {"weight": labelled(8, 1)}, group)
    return linear.weight[:, 0]


def test_c49_a_shard_is_its_gate_then_its_up(pool: Pool) -> None:
    assert [rows.tolist() for rows in pool.run(2, fused_rows)] == [[0, 1, 4, 5], [2, 3, 6, 7]]


# -- biases


def row_with_weight_zero(group: TPGroup) -> tuple[Tensor, Tensor]:
    linear = RowParallelLinear(8, 3, dtype=torch.float64, group=group)
    bias = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    scatter_state(linear, {"weight": torch.zeros(3, 8), "bias": bias}, group)
    y = linear(take_pieces(randn(5, 8), last(linear.layouts["weight"]), group.rank))
    y.sum().backward()
    assert linear.bias is not None and linear.bias.grad is not None
    return y, linear.bias.grad


@pytest.mark.parametrize("ranks", RANKS)
def test_c14_the_row_bias_is_added_once(pool: Pool, ranks: int) -> None:
    for y, gradient in pool.run(ranks, row_with_weight_zero):
        assert y.tolist() == [[1.0, -2.0, 3.0]] * 5
        assert gradient.tolist() == [5.0] * 3


def penalty(group: TPGroup, kind: type[ColumnParallelLinear] | type[RowParallelLinear]) -> None:
    linear = kind(8, 8, dtype=torch.float64, group=group)
    x = randn(5, linear.weight.shape[1], requires_grad=True)
    (gradient,) = torch.autograd.grad(linear(x).square().sum(), x, create_graph=True)
    gradient.square().sum().backward()


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_second_derivatives_over_ranks_are_refused(pool: Pool, kind: type[ColumnParallelLinear]) -> None:
    """Collectives in backward are not in its graph: without an error, terms of the other ranks would be missing."""
    pool.run(1, penalty, kind)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        pool.run(2, penalty, kind)


def bias_shapes(group: TPGroup) -> list[tuple[int, ...]]:
    model = nn.Module()
    model.column = ColumnParallelLinear(6, 8, group=group)
    model.row = RowParallelLinear(8, 6, group=group)
    model.temperature = nn.Parameter(torch.tensor(0.5))
    layouts = {name: layout for name, _, layout in named_layouts(model)}
    assert layouts["temperature"].replicated and layouts["row.bias"].replicated
    scatter_state(model, gather_state(model, group) | {"temperature": torch.tensor(0.25)}, group)
    assert model.temperature.item() == 0.25
    return [tuple(model.column.bias.shape), tuple(model.row.bias.shape), tuple(model.temperature.shape)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_c17_which_biases_are_cut(pool: Pool, ranks: int) -> None:
    assert pool.run(ranks, bias_shapes) == [[(8 // ranks,), (6,), ()]] * ranks


# -- the order of things


KINDS = ("all_reduce", "all_gather", "reduce_scatter")


def order(group: TPGroup, kind: str, sequence_parallel: bool) -> list[str]:
    """GEMMs and communication of one backward pass."""
    if kind == "column":
        linear: Linear = ColumnParallelLinear(8, 8, False, group=group, sequence_parallel=sequence_parallel)
        x = torch.ones(4, 8, requires_grad=True)
    else:
        linear = RowParallelLinear(8, 8, False, group=group, sequence_parallel=sequence_parallel)
        x = torch.ones(4, 8 // group.size, requires_grad=True)
    y = linear(x, tokens=4 * group.size) if kind == "column" and sequence_parallel else linear(x)
    record = OpRecord()

    def noted(kind: str, start: Callable[..., Callable[[], Tensor]]) -> Callable[..., Callable[[], Tensor]]:
        def started(*args: Any) -> Callable[[], Tensor]:
            record.names.append(kind)
            pending = start(*args)
            return lambda: record.names.append("wait") or pending()

        return started

    starts = {f"start_{kind}": noted(kind, getattr(collectives, f"start_{kind}")) for kind in KINDS}
    with record, mock.patch.multiple(collectives, **starts):
        y.backward(torch.ones_like(y))
    return [name.removeprefix("aten.") for name in record.names if name in {"aten.mm", "wait", *KINDS}]


def test_the_input_gradient_travels_while_the_weight_gradient_is_computed(pool: Pool) -> None:
    """The first GEMM is dx = dy W, the second dW = dy^T x (seen by the order in which autograd needs them)."""
    expected = ["mm", "all_reduce", "mm", "wait"]
    assert pool.run(2, order, "column", False) == [expected] * 2


def test_both_travel_under_sequence_parallelism(pool: Pool) -> None:
    """x is gathered again while dx is computed, and dx is scattered while dW is."""
    expected = ["all_gather", "mm", "reduce_scatter", "wait", "mm", "wait"]
    assert pool.run(2, order, "column", True) == [expected] * 2


def test_a_row_backward_sends_nothing_or_one_gather(pool: Pool) -> None:
    assert pool.run(2, order, "row", False) == [["mm", "mm"]] * 2
    assert pool.run(2, order, "row", True) == [["all_gather", "wait", "mm", "mm"]] * 2


def gemm_shapes(group: TPGroup) -> list[tuple[int, ...]]:
    """The results of a column backward's GEMMs, in order."""
    shapes = []

    class Shapes(OpRecord):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = super().__torch_dispatch__(func, types, args, kwargs)
            if self.names[-1] == "aten.mm":
                shapes.append(tuple(result.shape))
            return result

    y = ColumnParallelLinear(6, 8, False, group=group)(torch.ones(5, 6, requires_grad=True))
    with Shapes():
        y.sum().backward()
    return shapes


def test_the_gemm_before_the_collective_is_that_of_the_input(pool: Pool) -> None:
    assert pool.run(2, gemm_shapes) == [[(5, 6), (4, 6)]] * 2


# -- dtypes, devices, autocast


def autocast(group: TPGroup, sequence_parallel: bool) -> None:
    """Parameters stay float32, products are bf16: outputs and gradients near those of torch.nn.Linear."""
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8))
    x = randn(6, 8, dtype=torch.float32, requires_grad=True)
    dy = randn(6, 8, seed=1, dtype=torch.bfloat16)
    first = ColumnParallelLinear(8, 12, group=group, sequence_parallel=sequence_parallel)
    second = RowParallelLinear(12, 8, group=group, sequence_parallel=sequence_parallel)
    scatter_state(first, dict(whole[0].named_parameters()), group)
    scatter_state(second, dict(whole[1].named_parameters()), group)
    mine = rows_of(6, group) if sequence_parallel else slice(None)
    given = x.detach()[mine].clone().requires_grad_()
    with torch.autocast(device_type(), dtype=torch.bfloat16):
        y = whole(x)
        result = second(first(given, tokens=6))
    assert result.dtype == y.dtype == torch.bfloat16
    y.backward(dy)
    result.backward(dy[mine])
    loose = {"rtol": 0.03, "atol": 0.03}
    assert_close(result, y[mine], **loose)
    assert given.grad is not None and given.grad.dtype == torch.float32
    assert_close(given.grad, x.grad[mine], **loose)
    for ours, theirs in ((first, whole[0]), (second, whole[1])):
        gathered = gather_state(ours, group, gradients=True)
        for name, parameter in theirs.named_parameters():
            assert gathered[name].dtype == torch.float32
            assert_close(gathered[name], parameter.grad, **loose)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("ranks", RANKS)
def test_autocast(pool: Pool, ranks: int, sequence_parallel: bool) -> None:
    pool.run(ranks, autocast, sequence_parallel)


def dtypes_and_devices(group: TPGroup) -> None:
    for kind in (ColumnParallelLinear, RowParallelLinear):
        half = kind(8, 8, dtype=torch.bfloat16, group=group, name="layer")
        assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
        direct = kind(8, 8, group=group, seed=5, name="layer")
        assert {p.dtype for p in direct.parameters()} == {torch.float32}
        meta = kind(8, 8, device="meta", group=group, seed=5, name="layer")
        assert all(p.is_meta for p in meta.parameters())
        assert [p.shape for p in meta.parameters()] == [p.shape for p in direct.parameters()]
        meta.to_empty(device=torch.get_default_device())
        meta.reset_parameters(5, "layer")
        assert all(torch.equal(a, b) for a, b in zip(meta.parameters(), direct.parameters(), strict=True))
        assert kind(8, 8, bias=False, group=group).bias is None


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_dtypes_and_devices(pool: Pool, ranks: int) -> None:
    pool.run(ranks, dtypes_and_devices)


def initial_values(group: TPGroup, kind: type[Linear]) -> dict[str, Tensor]:
    return gather_state(kind(40, 50, group=group, seed=3, name="some"), group)


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_initial_values_are_those_of_the_single_device(pool: Pool, kind: type[Linear]) -> None:
    single = initial_values(single_device(), kind)
    assert single["weight"].std().item() == pytest.approx(120**-0.5, rel=0.05)
    assert not single["bias"].any()
    for ranks in RANKS[1:]:
        for values in pool.run(ranks, initial_values, kind):
            assert all(torch.equal(values[name], single[name]) for name in single)
    assert not torch.equal(kind(40, 50, group=single_device(), seed=3, name="other").weight, single["weight"])
    assert not torch.equal(kind(40, 50, group=single_device(), seed=4, name="some").weight, single["weight"])


def test_extra_repr_names_sizes_and_rank() -> None:
    column = ColumnParallelLinear(4, 6, group=single_device(), parts=[Part.even("gate", 3, 1), Part.even("up", 3, 1)])
    assert repr(column) == "ColumnParallelLinear(in=4, out=6 (gate 3, up 3), rank 0 of 1)"
    assert repr(RowParallelLinear(4, 6, group=single_device())) == "RowParallelLinear(in=4, out=6, rank 0 of 1)"


def without_collectives(group: TPGroup) -> list[str]:
    """local() and leaves() send nothing, forward or backward."""
    column, row = ColumnParallelLinear(6, 8, group=group), RowParallelLinear(8, 6, group=group)
    x = torch.ones(3, 6, requires_grad=True)
    with OpRecord() as record:
        row.leaves(column.local([x]))[0].sum().backward()
    return record.collectives


def test_local_and_leaves_send_nothing(pool: Pool) -> None:
    assert pool.run(2, without_collectives) == [[]] * 2


# -- errors, on all ranks, before anything is sent


def misuse(group: TPGroup, what: str) -> None:
    column, row = ColumnParallelLinear(6, 8, group=group), RowParallelLinear(8, 6, group=group)
    whole_row = RowParallelLinear(8, 6, group=group, input_is_parallel=False)
    tokens_cut = ColumnParallelLinear(6, 8, group=group, sequence_parallel=True)
    local = row.layouts["weight"].local_size(group.rank)
    uses = {
        "column width": lambda: column(torch.ones(3, 7)),
        "local width": lambda: column.local([torch.ones(3, 7)]),
        "row width": lambda: row(torch.ones(3, local + 1)),
        "whole width": lambda: whole_row(torch.ones(3, 9)),
        "tokens": lambda: tokens_cut(torch.ones(3, 6), tokens=20),
        "no tokens": lambda: tokens_cut(torch.ones(3, 6)),
        "column dtype": lambda: column(torch.ones(3, 6).double()),
        "gathered dtype": lambda: tokens_cut(torch.ones(3, 6).half()),
        "row dtype": lambda: row(torch.ones(3, local, dtype=torch.int64)),
        "column scalar": lambda: column(torch.ones(())),
        "row scalar": lambda: row(torch.ones(())),
    }
    with OpRecord() as record:
        try:
            uses[what]()
        finally:
            assert record.collectives == [], "sent something before it refused"


@pytest.mark.parametrize(
    ("what", "ranks", "message"),
    [
        ("column width", 1, "ColumnParallelLinear expects inputs of width 6, got 7"),
        ("column width", 2, "ColumnParallelLinear expects inputs of width 6, got 7"),
        ("local width", 2, "ColumnParallelLinear expects inputs of width 6, got 7"),
        ("row width", 1, "RowParallelLinear expects this rank's 8 of 8 inputs, got 9"),
        ("row width", 2, "RowParallelLinear expects this rank's 4 of 8 inputs, got 5"),
        ("whole width", 1, "RowParallelLinear expects inputs of width 8, got 9"),
        ("whole width", 2, "RowParallelLinear expects inputs of width 8, got 9"),
        ("column dtype", 1, "ColumnParallelLinear has a weight of torch.float32, got an input of torch.float64"),
        ("gathered dtype", 2, "ColumnParallelLinear has a weight of torch.float32, got an input of torch.float16"),
        ("row dtype", 2, "RowParallelLinear has a weight of torch.float32, got an input of torch.int64"),
        ("column scalar", 2, "expects inputs of at least one dimension"),
        ("row scalar", 1, "expects inputs of at least one dimension"),
        ("no tokens", 2, "needs tokens=..., the total over the ranks"),
        ("tokens", 2, r"deals 20 tokens as \[10, 10\] over 2 ranks, rank 0 was given 3"),
    ],
)
def test_inputs_that_do_not_fit(pool: Pool, what: str, ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pool.run(ranks, misuse, what)


def construct(group: TPGroup, kind: type[Linear], sizes: tuple[int, int], parts: list[Part] | None) -> None:
    kind(*sizes, group=group, parts=parts)


@pytest.mark.parametrize(
    ("kind", "sizes", "parts", "message"),
    [
        (ColumnParallelLinear, (0, 4), None, "in_features=0 and out_features=4"),
        (ColumnParallelLinear, (4, -1), None, "in_features=4 and out_features=-1"),
        (RowParallelLinear, (4, 0), None, "in_features=4 and out_features=0"),
        (RowParallelLinear, (-4, 1), None, "in_features=-4 and out_features=1"),
        (ColumnParallelLinear, (4.0, 8), None, "in_features=4.0 and out_features=8"),
        (RowParallelLinear, (8, "4"), None, "in_features=8 and out_features=4"),
        (ColumnParallelLinear, (4, 1), None, "output: 1 cannot be dealt over 2"),
        (RowParallelLinear, (1, 4), None, "input: 1 cannot be dealt over 2"),
        (ColumnParallelLinear, (4, 8), [Part.even("gate", 3, 2), Part.even("up", 3, 2)], r"gate 3 \+ up 3 = 6 .* \(8, 4\)"),
        (RowParallelLinear, (8, 4), [Part.even("up", 6, 2)], r"up 6 = 6 .* \(4, 8\)"),
        (ColumnParallelLinear, (4, 6), [Part.even("a", 6, 3)], "part a is dealt over 3 shards, the group has 2"),
        (RowParallelLinear, (6, 4), [Part.even("a", 6, 1)], "part a is dealt over 1 shards, the group has 2"),
    ],
)
def test_sizes_that_have_no_meaning(
    pool: Pool, kind: type[Linear], sizes: tuple[int, int], parts: list[Part] | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        pool.run(2, construct, kind, sizes, parts)


def test_gathered_weights_are_in_global_order(pool: Pool) -> None:
    for ranks in RANKS:
        for weight in pool.run(ranks, ordered_weight):
            assert torch.equal(weight, labelled(10, 3))


def ordered_weight(group: TPGroup) -> Tensor:
    parts = [Part.even(name, 5, group.size) for name in ("gate", "up")]
    linear = ColumnParallelLinear(3, 10, False, dtype=torch.float64, group=group, parts=parts)
    scatter_state(linear, {"weight": labelled(10, 3)}, group)
    return gather_pieces(linear.weight.detach(), linear.layouts["weight"], group)
