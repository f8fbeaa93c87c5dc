"""The integers that say which rank holds what."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.layout import Layout, Part, Run, attention_parts, column_layout, deal, row_layout
from parallel.regions import add_pieces, join_pieces, take_pieces
from tests.helpers import labelled

HEADS = [
    *[(32, 8, n) for n in range(1, 17)],
    *[(9, 3, n) for n in (2, 3, 4)],
    *[(71, 1, n) for n in range(2, 9)],
    (14, 2, 7),
    (4, 2, 4),
    (25, 25, 2),
]


def lengths(part: Part) -> list[int]:
    return [run.length for run in part.runs]


# -- deal and Part


def test_deal_gives_the_first_shards_one_more() -> None:
    assert deal(9, 2) == (Run(0, 5), Run(5, 9))
    assert deal(257, 4) == ((0, 65), (65, 129), (129, 193), (193, 257))
    assert deal(9, 2, unit=64) == ((0, 320), (320, 576))
    assert deal(2, 4) == ((0, 1), (1, 2), (2, 2), (2, 2))
    assert deal(5, 1) == ((0, 5),)


@given(units=st.integers(0, 1000), shards=st.integers(1, 40), unit=st.integers(1, 64))
def test_deal_covers_everything_in_order_and_evenly(units: int, shards: int, unit: int) -> None:
    runs = deal(units, shards, unit)
    assert len(runs) == shards
    assert runs[0].start == 0 and runs[-1].stop == units * unit
    assert all(a.stop == b.start for a, b in zip(runs, runs[1:], strict=False))
    sizes = [run.length for run in runs]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] in (0, unit)


def test_part_even() -> None:
    part = Part.even("gate", 5, 2, unit=3)
    assert part == Part("gate", 15, (Run(0, 9), Run(9, 15)))
    assert lengths(Part.even("d_ff", 101, 4)) == [26, 25, 25, 25]


@pytest.mark.parametrize(("units", "shards"), [(1, 2), (3, 4), (0, 1)])
def test_part_refuses_to_leave_a_rank_without_any(units: int, shards: int) -> None:
    with pytest.raises(ValueError, match=f"gate: {units} cannot be dealt over {shards} tensor-parallel shards"):
        Part.even("gate", units, shards)


@pytest.mark.parametrize(
    "runs",
    [
        (Run(0, 2), Run(3, 5)),  # a hole
        (Run(0, 3), Run(2, 5)),  # an overlap that is not the whole run
        (Run(1, 3), Run(3, 5)),  # does not start at 0
        (Run(0, 3), Run(3, 4)),  # stops early
        (Run(0, 3), Run(3, 6)),  # stops late
        (Run(3, 5), Run(0, 3)),  # out of order
        (Run(0, 5), Run(5, 5)),  # an empty run
        (Run(0, 0), Run(0, 5)),
        (),
    ],
)
def test_part_refuses_runs_that_do_not_cover_it(runs: tuple[Run, ...]) -> None:
    with pytest.raises(ValueError, match=r"gate: the runs .* do not cover its 5 rows"):
        Part("gate", 5, runs)


# -- attention_parts


def check_heads(heads: int, kv_heads: int, head_dim: int, shards: int) -> None:
    """All that attention relies on, from the definition: query head h reads KV head h // (heads / kv_heads)."""
    group = heads // kv_heads
    q, k, v = attention_parts(heads, kv_heads, head_dim, shards)
    assert (q.name, k.name, v.name) == ("q", "k", "v")
    assert (q.size, k.size, v.size) == (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
    assert k.runs == v.runs
    assert len(q.runs) == len(k.runs) == shards
    seen: list[int] = []
    for rows, kv_rows in zip(q.runs, k.runs, strict=True):
        assert all(edge % head_dim == 0 for edge in (*rows, *kv_rows))
        mine = range(rows.start // head_dim, rows.stop // head_dim)
        held = range(kv_rows.start // head_dim, kv_rows.stop // head_dim)
        seen += mine
        assert len(mine) >= 1 and len(held) >= 1
        assert len(mine) % len(held) == 0, "not an ordinary grouped attention"
        local_group = len(mine) // len(held)
        assert [held[i // local_group] for i in range(len(mine))] == [h // group for h in mine]
        assert {h // group for h in mine} == set(held), "holds a KV head that none of its query heads reads"
    assert seen == list(range(heads))
    counts, kv_counts = lengths(q), lengths(k)
    if kv_heads >= shards:  # whole groups are dealt
        assert max(kv_counts) - min(kv_counts) <= head_dim
        assert max(counts) - min(counts) <= group * head_dim
    else:
        assert set(kv_counts) == {head_dim}
        for run in set(k.runs):  # the holders of one KV head share its query heads evenly
            of_head = [c for c, r in zip(counts, k.runs, strict=True) if r == run]
            assert max(of_head) - min(of_head) <= head_dim


@pytest.mark.parametrize(("heads", "kv_heads", "shards"), HEADS)
def test_attention_parts_of_known_models(heads: int, kv_heads: int, shards: int) -> None:
    check_heads(heads, kv_heads, 64, shards)


@st.composite
def head_counts(draw: st.DrawFn) -> tuple[int, int, int, int]:
    kv_heads, group = draw(st.integers(1, 12)), draw(st.integers(1, 9))
    heads = kv_heads * group
    return heads, kv_heads, draw(st.integers(1, 5)), draw(st.integers(1, min(heads, 20)))


@given(head_counts())
def test_attention_parts_of_any_sizes(sizes: tuple[int, int, int, int]) -> None:
    check_heads(*sizes)


def test_attention_parts_by_hand() -> None:
    q, k, _ = attention_parts(9, 3, 1, 2)
    assert (q.runs, k.runs) == (((0, 6), (6, 9)), ((0, 2), (2, 3)))
    q, k, _ = attention_parts(9, 3, 1, 4)
    assert (q.runs, k.runs) == (((0, 2), (2, 3), (3, 6), (6, 9)), ((0, 1), (0, 1), (1, 2), (2, 3)))
    q, k, _ = attention_parts(25, 25, 1, 2)
    assert q.runs == k.runs == ((0, 13), (13, 25))
    q, k, _ = attention_parts(14, 2, 1, 7)
    assert lengths(q) == [2, 2, 2, 1, 3, 2, 2]
    assert [run.start for run in k.runs] == [0, 0, 0, 0, 1, 1, 1]


def test_c37_two_kv_heads_on_four_ranks() -> None:
    _, k, v = attention_parts(4, 2, 8, 4)
    assert [run.start // 8 for run in k.runs] == [0, 0, 1, 1]
    assert lengths(k) == lengths(v) == [8, 8, 8, 8]


@pytest.mark.parametrize(("heads", "kv_heads", "shards"), [(4, 4, 5), (4, 1, 8), (9, 3, 10)])
def test_attention_parts_refuse_more_ranks_than_heads(heads: int, kv_heads: int, shards: int) -> None:
    with pytest.raises(ValueError, match=rf"{heads} query heads .* over {shards} .*\(KV heads: {kv_heads}\)"):
        attention_parts(heads, kv_heads, 8, shards)


def test_attention_parts_refuse_uneven_groups() -> None:
    with pytest.raises(ValueError, match="10 query heads are not a multiple of 4 KV heads"):
        attention_parts(10, 4, 8, 2)


# -- Layout


def test_layout_of_a_fused_weight_by_hand() -> None:
    parts = (Part.even("gate", 3, 2), Part.even("up", 3, 2))
    layout = column_layout((6, 4), parts)
    assert layout.part_starts == {"gate": 0, "up": 3}
    assert layout.pieces(0) == (("gate", 0, 0, 2), ("up", 3, 2, 2))
    assert layout.pieces(1) == (("gate", 2, 0, 1), ("up", 5, 1, 1))
    assert [layout.local_shape(r) for r in (0, 1)] == [(4, 4), (2, 4)]
    assert [layout.local_sections(r) for r in (0, 1)] == [[2, 2], [1, 1]]
    assert not layout.replicated and layout.shared == ()
    row = row_layout((4, 3), parts[:1])
    assert [row.local_shape(r) for r in (0, 1)] == [(4, 2), (4, 1)]


def test_layout_of_shared_kv_rows_by_hand() -> None:
    layout = column_layout((8, 3), attention_parts(4, 2, 1, 4))
    assert [part.name for part in layout.shared] == ["k", "v"]
    assert [[piece.part for piece in layout.owned(r)] for r in range(4)] == [["q", "k", "v"], ["q"], ["q", "k", "v"], ["q"]]
    assert layout.pieces(3) == (("q", 3, 0, 1), ("k", 5, 1, 1), ("v", 7, 2, 1))


def test_replicated_layout() -> None:
    layout = Layout((3, 4))
    assert layout.replicated and layout.pieces(1) == () and layout.shared == ()
    assert layout.local_shape(2) == (3, 4)
    assert Layout(()).local_shape(0) == ()


def test_layout_along_the_last_dimension() -> None:
    assert Layout((2, 5), -1, (Part.even("vocab", 5, 2),)).local_shape(1) == (2, 2)


def test_layout_refuses_parts_that_do_not_fill_it() -> None:
    parts = (Part.even("gate", 3, 2), Part.even("up", 4, 2))
    with pytest.raises(ValueError, match=r"gate 3 \+ up 4 = 7 do not fill dimension 0 of \(8, 4\)"):
        Layout((8, 4), 0, parts)


def test_layout_refuses_two_parts_of_one_name() -> None:
    with pytest.raises(ValueError, match="gate, gate"):
        Layout((6, 4), 0, (Part.even("gate", 3, 2), Part.even("gate", 3, 2)))


def test_layout_refuses_parts_dealt_over_different_numbers_of_ranks() -> None:
    with pytest.raises(ValueError, match="gate over 2, up over 3"):
        Layout((6, 4), 0, (Part.even("gate", 3, 2), Part.even("up", 3, 3)))


def test_layout_of_a_rank_with_several_shards_by_hand() -> None:
    """Three virtual shards on two ranks: the first holds two of them one after the other, not gate after gate."""
    parts = (Part.even("gate", 6, 3), Part.even("up", 6, 3))
    layout = column_layout((12, 1), parts, deal(3, 2))
    assert layout.pieces_by_shard(0) == [(("gate", 0, 0, 2), ("up", 6, 2, 2)), (("gate", 2, 4, 2), ("up", 8, 6, 2))]
    assert layout.pieces(1) == (("gate", 4, 0, 2), ("up", 10, 2, 2))
    assert [layout.shard_sizes(rank) for rank in (0, 1)] == [[4, 4], [4]]
    assert [layout.local_size(rank) for rank in (0, 1)] == [8, 4]
    assert not layout.uncut and not column_layout((12, 1), parts, deal(3, 1)).uncut
    assert column_layout((3, 1), (Part.even("a", 3, 1),)).uncut
    shared = column_layout((8, 3), attention_parts(4, 2, 1, 4), deal(4, 2))
    assert [[piece.part for piece in shared.owned(rank)] for rank in (0, 1)] == [["q", "k", "v", "q"]] * 2


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, int]:
    """Any layout and its number of ranks: some plain parts, perhaps those of an attention, along any dimension, dealt over
    shards of which each rank owns one or several."""
    shards = draw(st.integers(1, 6))
    ranks = draw(st.integers(1, shards))
    parts: list[Part] = []
    if draw(st.booleans()):
        kv_heads = draw(st.integers(1, 4))
        group = draw(st.integers(math.ceil(shards / kv_heads), math.ceil(shards / kv_heads) + 2))
        parts += attention_parts(kv_heads * group, kv_heads, draw(st.integers(1, 3)), shards)
    for i in range(draw(st.integers(0 if parts else 1, 3))):
        parts.append(Part.even(f"part{i}", draw(st.integers(shards, 2 * shards + 1)), shards, unit=draw(st.integers(1, 3))))
    shape = draw(st.lists(st.integers(1, 3), min_size=0, max_size=2))
    dim = draw(st.integers(0, len(shape)))
    shape.insert(dim, sum(part.size for part in parts))
    owners = deal(shards, ranks) if ranks < shards or draw(st.booleans()) else None
    return Layout(tuple(shape), dim, tuple(parts), owners), ranks


@given(layouts())
def test_owned_pieces_tile_the_global_dimension_once(case: tuple[Layout, int]) -> None:
    layout, ranks = case
    rows = [row for rank in range(ranks) for p in layout.owned(rank) for row in range(p.start, p.start + p.length)]
    assert sorted(rows) == list(range(layout.shape[layout.dim]))
    for rank in range(ranks):
        pieces = layout.pieces(rank)
        assert set(layout.owned(rank)) <= set(pieces)
        assert [row for p in pieces for row in range(p.local, p.local + p.length)] == list(range(layout.local_size(rank)))
        assert [piece.length for piece in pieces] == layout.local_sections(rank)
        assert [sum(p.length for p in shard) for shard in layout.pieces_by_shard(rank)] == layout.shard_sizes(rank)


@settings(deadline=None)  # the first tensor operations of a process take their time
@given(layouts())
def test_taking_and_joining_pieces_is_the_identity(case: tuple[Layout, int]) -> None:
    layout, ranks = case
    whole = labelled(*layout.shape)
    shards = [take_pieces(whole, layout, rank) for rank in range(ranks)]
    for rank, held in enumerate(shards):
        assert tuple(held.shape) == layout.local_shape(rank)
        assert held.untyped_storage().nbytes() == held.nbytes, "a shard keeps the whole tensor alive"
    assert torch.equal(join_pieces(shards, layout), whole)


@settings(deadline=None)
@given(layouts())
def test_adding_pieces_counts_each_holder(case: tuple[Layout, int]) -> None:
    layout, ranks = case
    holders = add_pieces([torch.ones(layout.local_shape(rank)) for rank in range(ranks)], layout)
    assert holders.shape == layout.shape
    for part, rows in zip(layout.parts, holders.split([part.size for part in layout.parts], layout.dim or 0), strict=True):
        for row, values in enumerate(rows.unbind(layout.dim or 0)):
            assert (values == sum(run.start <= row < run.stop for run in part.runs)).all()


@settings(deadline=None)
@given(layouts(), st.booleans())
def test_each_piece_of_a_rank_is_that_piece_of_the_whole(case: tuple[Layout, int], negative: bool) -> None:
    layout, ranks = case
    dim: int = layout.dim
    if negative:
        layout = Layout(layout.shape, dim - len(layout.shape), layout.parts, layout.owners)
    whole = labelled(*layout.shape)
    sections = dict(zip([p.name for p in layout.parts], whole.split([p.size for p in layout.parts], dim), strict=True))
    for rank in range(ranks):
        held = iter(take_pieces(whole, layout, rank).split(layout.local_sections(rank), dim))
        for shard in range(*layout.rank_shards[rank]):
            for part in layout.parts:
                run = part.runs[shard]
                assert torch.equal(next(held), sections[part.name].narrow(dim, run.start, run.length))
