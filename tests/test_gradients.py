"""The gradient norm, clipping, and the checks that replicas agree, on 1 to 4 ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from parallel.gradients import check_replicas, clip_grad_norm_, grad_norm, sync_replicated
from parallel.group import TPGroup, single_device
from parallel.regions import take_pieces
from parallel.state import gather_state, named_layouts
from tests.helpers import EXACT, OpRecord, Sample, randn
from tests.pool import Pool
from tpblock.config import ModelConfig
from tpblock.model import Decoder

RANKS = [1, 2, 3, 4]
NORMS = [1.0, 2.0, math.inf]


def give_gradients(model: nn.Module, rank: int, scale: float = 1.0) -> nn.Module:
    """Each parameter gets this rank's shard of random numbers that depend on its name, in its own dtype."""
    for i, (_, parameter, layout) in enumerate(named_layouts(model)):
        parameter.grad = take_pieces(randn(*layout.shape, seed=100 + i, dtype=parameter.dtype) * scale, layout, rank)
    return model


def whole_sample(dtype: torch.dtype = torch.float64, **sizes: int) -> nn.Module:
    return give_gradients(Sample(single_device(), dtype, **sizes), 0)


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


# -- norm and clipping


def norms_and_clipped(group: TPGroup, sizes: dict[str, int]) -> None:
    for p in NORMS:
        model, whole = give_gradients(Sample(group, **sizes), group.rank), whole_sample(**sizes)
        expected = torch.nn.utils.get_total_norm(gradients(whole), p)
        norm = grad_norm(model, group, p)
        assert norm.shape == () and norm.dtype == torch.float64
        assert_close(norm, expected, **EXACT)
        for max_norm in (expected.item() * 2, expected.item() / 3):
            before = [g.clone() for g in gradients(model)]
            returned = clip_grad_norm_(model, max_norm, group, p)
            assert_close(returned, torch.nn.utils.clip_grad_norm_(whole.parameters(), max_norm, p), **EXACT)
            gathered = gather_state(model, group, gradients=True)
            for name, parameter in whole.named_parameters():
                assert_close(gathered[name], parameter.grad, **EXACT)
            changed = not all(torch.equal(a, b) for a, b in zip(before, gradients(model), strict=True))
            assert changed == (max_norm < expected)
        assert_close(grad_norm(model, group, p), expected / 3, rtol=1e-5, atol=0)


@pytest.mark.parametrize("sizes", [{}, {"heads": 4, "kv_heads": 1}, {"heads": 9, "kv_heads": 3}])
@pytest.mark.parametrize("ranks", RANKS)
def test_norm_and_clipping_equal_torch(pool: Pool, ranks: int, sizes: dict[str, int]) -> None:
    """Also where ranks hold the same KV rows, which count once."""
    pool.run(ranks, norms_and_clipped, sizes)


CONFIG = ModelConfig(vocab_size=13, dim=8, layers=2, heads=4, kv_heads=2, d_ff=10, bias=True, tied_embeddings=True)


def train_once(group: TPGroup, sequence_parallel: bool, clip: float) -> tuple[list[float], dict[str, Tensor]]:
    """All norms of a decoder's gradients, and the gradients clipped."""
    model = Decoder(CONFIG, group=group, sequence_parallel=sequence_parallel, dtype=torch.float64)
    ids = torch.arange(10).view(2, 5)
    model(ids, ids.roll(-1)).backward()
    norms = [grad_norm(model, group, p).item() for p in NORMS]
    gathered = list(gather_state(model, group, gradients=True).values())
    assert norms == pytest.approx([torch.nn.utils.get_total_norm(gathered, p).item() for p in NORMS], rel=1e-10)
    clip_grad_norm_(model, clip, group)
    return norms, gather_state(model, group, gradients=True)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_c31_norms_and_clipped_gradients_are_those_of_one_device(pool: Pool, sequence_parallel: bool) -> None:
    clip = 0.01
    norms, clipped = train_once(single_device(), False, clip)
    assert norms[1] > 2 * clip
    assert torch.nn.utils.get_total_norm(list(clipped.values())).item() == pytest.approx(clip, rel=1e-3)
    for ranks in RANKS:
        for got_norms, got in pool.run(ranks, train_once, sequence_parallel, clip):
            assert got_norms == pytest.approx(norms, rel=1e-9)
            assert got.keys() == clipped.keys()
            for name, gradient in got.items():
                assert_close(gradient, clipped[name], **EXACT)


def half_norm(group: TPGroup, dtype: torch.dtype) -> tuple[Tensor, float]:
    """The norm, and the exact one of the same rounded gradients."""
    model = give_gradients(Sample(group, dtype, heads=64, kv_heads=64), group.rank)
    whole = whole_sample(dtype, heads=64, kv_heads=64)
    return grad_norm(model, group), math.sqrt(sum(g.double().square().sum().item() for g in gradients(whole)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ranks", RANKS)
def test_half_precision_gradients_are_summed_in_float32(pool: Pool, ranks: int, dtype: torch.dtype) -> None:
    for norm, exact in pool.run(ranks, half_norm, dtype):
        assert norm.dtype == torch.float32
        assert norm.item() == pytest.approx(exact, rel=1e-6)
    whole = whole_sample(dtype, heads=64, kv_heads=64)
    assert torch.nn.utils.get_total_norm(gradients(whole)).item() != pytest.approx(exact, rel=1e-4)  # torch's own would fail


def large_half_norm(group: TPGroup) -> float:
    """Squares that float16 cannot hold."""
    return grad_norm(give_gradients(Sample(group, torch.float16), group.rank, scale=1000), group).item()


def test_float16_squares_do_not_overflow(pool: Pool) -> None:
    whole = give_gradients(Sample(single_device(), torch.float16), 0, scale=1000)
    exact = math.sqrt(sum(g.double().square().sum().item() for g in gradients(whole)))
    assert exact > 2000
    assert pool.run(2, large_half_norm) == pytest.approx([exact] * 2, rel=1e-6)


def clipped_half(group: TPGroup) -> None:
    model = give_gradients(Sample(group, torch.bfloat16), group.rank)
    clip_grad_norm_(model, 0.5, group)
    assert all(g.dtype == torch.bfloat16 for g in gradients(model))
    assert grad_norm(model, group).item() == pytest.approx(0.5, rel=1e-3)


def test_half_precision_gradients_are_clipped_in_place(pool: Pool) -> None:
    pool.run(2, clipped_half)


def some_without(group: TPGroup, names: tuple[str, ...]) -> tuple[float, Tensor | None]:
    model = give_gradients(Sample(group), group.rank)
    for name, parameter in model.named_parameters():
        if name in names:
            parameter.grad = None
    clip_grad_norm_(model, 1e-3, group)
    give_again = give_gradients(model, group.rank)
    for name, parameter in give_again.named_parameters():
        if name in names:
            parameter.grad = None
    return grad_norm(model, group).item(), model.qkv.weight.grad


def test_parameters_without_gradients_are_left_out(pool: Pool) -> None:
    whole = whole_sample()
    rest = [p.grad for name, p in whole.named_parameters() if p.grad is not None and name not in ("qkv.weight", "norm")]
    expected = torch.nn.utils.get_total_norm(rest).item()
    for norm, gradient in pool.run(4, some_without, ("qkv.weight", "norm")):
        assert norm == pytest.approx(expected, rel=1e-10) and gradient is None
    only_cut = tuple(name for name, _ in whole.named_parameters() if name not in ("qkv.weight", "qkv.bias"))
    expected = torch.nn.utils.get_total_norm([p.grad for n, p in whole.named_parameters() if n not in only_cut]).item()
    assert [norm for norm, _ in pool.run(4, some_without, only_cut)] == pytest.approx([expected] * 4, rel=1e-10)


def not_finite(group: TPGroup, value: float, where: str) -> list[float]:
    """One element of the last rank's shard (of every copy, where it is replicated) is not a number, or infinite."""
    model = give_gradients(Sample(group), group.rank)
    gradient = dict(model.named_parameters())[where].grad
    assert gradient is not None
    if where == "norm" or group.rank == group.size - 1:
        gradient.view(-1)[0] = value
    return [grad_norm(model, group, p).item() for p in NORMS]


@pytest.mark.parametrize("where", ["qkv.weight", "out.weight", "norm"])
@pytest.mark.parametrize("ranks", RANKS)
def test_what_is_not_finite_shows_on_every_rank(pool: Pool, ranks: int, where: str) -> None:
    for norms in pool.run(ranks, not_finite, math.nan, where):
        assert all(math.isnan(norm) for norm in norms), norms
    for norms in pool.run(ranks, not_finite, -math.inf, where):
        assert norms == [math.inf] * 3


def sends(group: TPGroup) -> list[str]:
    model = give_gradients(Sample(group), group.rank)
    with OpRecord() as record:
        grad_norm(model, group)
    return record.collectives


def test_a_norm_is_one_all_reduce(pool: Pool) -> None:
    assert pool.run(2, sends) == [["all_reduce"]] * 2
    assert pool.run(1, sends) == [[]]


def wrong_norm(group: TPGroup, p: float, gradients_given: bool) -> None:
    model: nn.Module = Sample(group)
    if gradients_given:
        give_gradients(model, group.rank)
    with OpRecord() as record:
        try:
            clip_grad_norm_(model, 1.0, group, p)
        finally:
            assert record.collectives == []


@pytest.mark.parametrize(
    ("p", "given", "message"),
    [
        (3.0, True, r"defined for p = 1, 2 and inf, got 3\.0"),
        (0.0, True, r"got 0\.0"),
        (-math.inf, True, "got -inf"),
        (2.0, False, "no parameter has a gradient: call grad_norm after loss.backward"),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_norm_errors(pool: Pool, ranks: int, p: float, given: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pool.run(ranks, wrong_norm, p, given)


@pytest.mark.parametrize("bound", [-1.0, math.nan])
def test_bounds_that_have_no_meaning(bound: float) -> None:
    with pytest.raises(ValueError, match=f"max_norm must not be negative, got {bound}"):
        clip_grad_norm_(whole_sample(), bound, single_device())


# -- replicas


def change_on(group: TPGroup, rank: int, tensor: Tensor, change: Callable[[Tensor], Any]) -> None:
    if group.rank == rank:
        with torch.no_grad():
            change(tensor)


def add(amount: float) -> Callable[[Tensor], Any]:
    return lambda t: t.add_(amount)


def set_first(value: float) -> Callable[[Tensor], Any]:
    return lambda t: t.view(-1)[:1].fill_(value)


def message_of(model: nn.Module, group: TPGroup) -> str:
    try:
        check_replicas(model, group)
    except ValueError as error:
        return str(error)
    return ""


def drift(group: TPGroup, dtype: torch.dtype) -> None:
    """Found and named on all ranks, then gone."""
    model = Sample(group, dtype)
    before = gather_state(model, group)
    assert message_of(model, group) == ""
    change_on(group, 1, model.norm, add(2**-7))
    found = message_of(model, group)
    assert found == "1 parameters differ between the ranks that hold them: norm (by up to 0.00781)", found
    change_on(group, group.size - 1, model.scale, add(2.0))
    assert model.out.bias is not None
    change_on(group, 0, model.out.bias, set_first(-1.0))
    found = message_of(model, group)
    assert found.startswith("3 parameters differ") and "scale (by up to 2)" in found
    assert found.index("scale") < found.index("norm") < found.index("out.bias")
    sync_replicated(model, group)
    assert message_of(model, group) == ""
    after = gather_state(model, group)
    if group.rank == 0:
        assert before["out.bias"].view(-1)[0] == 0
        before["out.bias"].view(-1)[0] = -1.0  # the first holder's value wins
        assert all(torch.equal(before[name], after[name]) for name in before)
    replicas = {name: p for name, p, layout in named_layouts(model) if layout.replicated}
    gathered = {name: everyone(p, group) for name, p in replicas.items()}
    assert all(torch.equal(copy, copies[0]) for copies in gathered.values() for copy in copies)


def everyone(tensor: Tensor, group: TPGroup) -> list[Tensor]:
    copies = [torch.empty_like(tensor) for _ in range(group.size)]
    torch.distributed.all_gather(copies, tensor.detach(), group=group.process_group)
    return copies


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_c28_a_drifted_replica_is_named_and_brought_back(pool: Pool, ranks: int, dtype: torch.dtype) -> None:
    pool.run(ranks, drift, dtype)


def drift_of_a_thousandth(group: TPGroup) -> list[str]:
    model = Decoder(CONFIG, group=group)
    norm = model.stack.blocks[1].norm_1.weight
    change_on(group, 1, norm, add(1e-3))
    first = message_of(model, group)
    sync_replicated(model, group)
    return [first, message_of(model, group), str(torch.equal(norm, torch.ones_like(norm)))]


def test_c28_in_a_decoder(pool: Pool) -> None:
    expected = "1 parameters differ between the ranks that hold them: stack.blocks.1.norm_1.weight (by up to 0.001)"
    assert pool.run(2, drift_of_a_thousandth) == [[expected, "", "True"]] * 2
    assert pool.run(4, drift_of_a_thousandth) == [[expected, "", "True"]] * 4


def shared_drift(group: TPGroup) -> None:
    """Ranks 0, 1 and 2, 3 hold a KV head each: a copy that differs is found, and takes its first holder's values."""
    model = Sample(group)
    before = gather_state(model, group)
    q, k, v = model.qkv.split(model.qkv.weight.detach().T)
    assert message_of(model, group) == ""
    change_on(group, 3, v, add(0.25))
    assert message_of(model, group).endswith("hold them: qkv.weight (by up to 0.25)")
    change_on(group, 0, k, add(0.5))
    change_on(group, 1, q, add(1.0))  # no one else holds these
    assert message_of(model, group).endswith("hold them: qkv.weight (by up to 0.5)")
    sync_replicated(model, group)
    assert message_of(model, group) == ""
    layout = model.qkv.layouts["weight"]
    expected = before["qkv.weight"]
    for piece in layout.pieces(0):
        if piece.part == "k":
            expected[piece.start : piece.start + piece.length] += 0.5
    for piece in layout.pieces(1):
        if piece.part == "q":
            expected[piece.start : piece.start + piece.length] += 1.0
    assert torch.equal(model.qkv.weight, take_pieces(expected, layout, group.rank))


def test_c28_shared_kv_rows(pool: Pool) -> None:
    pool.run(4, shared_drift)


def only_bits_differ(group: TPGroup, rank: int, value: float, everywhere: bool) -> tuple[str, str, bool]:
    """Values that compare equal, or with nothing at all: negative zero, and not-a-number."""
    model = Sample(group)
    with torch.no_grad():
        model.norm.zero_()
    for holder in range(group.size) if everywhere else [rank]:
        change_on(group, holder, model.norm, set_first(value))
    found = message_of(model, group)
    sync_replicated(model, group)
    bits = everyone(model.norm.detach().view(torch.int64), group)
    return found, message_of(model, group), all(torch.equal(b, bits[0]) for b in bits)


@pytest.mark.parametrize("value", [-0.0, math.nan, math.inf])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_c28_bits_that_do_not_show_in_a_difference(pool: Pool, rank: int, value: float) -> None:
    for found, after, alike in pool.run(3, only_bits_differ, rank, value, False):
        assert found.startswith("1 parameters differ between the ranks that hold them: norm (by up to "), found
        assert after == "" and alike
    for found, after, alike in pool.run(3, only_bits_differ, rank, value, True):
        assert found == after == "" and alike


def test_one_device_has_no_replicas() -> None:
    model = Sample(single_device())
    with OpRecord() as record:
        check_replicas(model, single_device())
        sync_replicated(model, single_device())
    assert record.collectives == []


# -- initial values


def initial(group: TPGroup) -> dict[str, tuple[bool, Tensor]]:
    model = Decoder(CONFIG, group=group)
    return {name: (layout.replicated, parameter) for name, parameter, layout in named_layouts(model)}


def test_c04_shards_differ_and_replicas_are_equal(pool: Pool) -> None:
    first, second = pool.run(2, initial)
    assert first.keys() == second.keys()
    for name, (replicated, values) in first.items():
        other = second[name][1]
        if replicated:
            assert torch.equal(values, other), name
        elif name.endswith("weight"):
            common = tuple(slice(0, min(a, b)) for a, b in zip(values.shape, other.shape, strict=True))
            assert not (values[common] == other[common]).any(), name
    assert {replicated for replicated, _ in first.values()} == {True, False}
