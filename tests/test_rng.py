"""Initial values and dropout masks: equal for every cut, and random. All ranks are played by this one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from parallel import rng
from parallel.group import TPGroup, single_device
from parallel.layout import Layout, Part, attention_parts, column_layout, row_layout

KEY = rng.stream_key(0, "site")[0]
GOLDEN_KEY = (3930824689563388107, 1013411806289747434)
GOLDEN_NORMALS = [0.0575598553, 0.594740689, 1.52421188, 0.22066465]
GOLDEN_MASK = "01001111101100111011110101110011"


def group_of(rank: int, size: int) -> TPGroup:
    """Rank ``rank`` of ``size``, with a stand-in for the process group: nothing here communicates."""
    return TPGroup(rank, size)


def draw(
    layout: Layout,
    rank: int = 0,
    size: int = 1,
    *,
    seed: int = 5,
    name: str = "w",
    dtype: torch.dtype = torch.float32,
    **scale: float,
) -> Tensor:
    local = torch.full(layout.local_shape(rank), math.nan, dtype=dtype)
    assert rng.normal_(local, layout, group_of(rank, size), seed=seed, name=name, **scale) is local
    return local


def stream(count: int, *, seed: int = 5, name: str = "w") -> Tensor:
    """The first ``count`` normal numbers of a stream, in float64."""
    return draw(Layout((count,)), seed=seed, name=name).double()


def take(full: Tensor, layout: Layout, rank: int) -> Tensor:
    assert layout.dim is not None
    return torch.cat([full.narrow(layout.dim, p.start, p.length) for p in layout.pieces(rank)], layout.dim)


# Sizes such that every part is longer than a block of 32768 numbers, and no cut is on the border of one.
LAYOUTS: dict[str, Callable[[int], Layout]] = {
    "column": lambda n: column_layout((96, 401), [Part.even("output", 96, n)]),
    "column, uneven": lambda n: column_layout((101, 401), [Part.even("output", 101, n)]),
    "row, uneven": lambda n: row_layout((401, 101), [Part.even("input", 101, n)]),
    "row, one long column": lambda n: row_layout((150_000, 5), [Part.even("input", 5, n)]),
    "fused gate and up": lambda n: column_layout((202, 401), [Part.even("gate", 101, n), Part.even("up", 101, n)]),
    "9 query and 3 KV heads": lambda n: column_layout((15 * 32, 400), attention_parts(9, 3, 32, n)),
    "2 KV heads, shared": lambda n: column_layout((10 * 32, 600), attention_parts(6, 2, 32, n)),
    "1 KV head, shared": lambda n: column_layout((6 * 64, 600), attention_parts(4, 1, 64, n)),
    "bias": lambda n: column_layout((100_003,), [Part.even("output", 100_003, n)]),
    "three dimensions": lambda n: Layout((7, 61, 90), 1, (Part.even("middle", 61, n),)),
}


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("case", LAYOUTS)
def test_shards_are_slices_of_the_single_device_tensor(case: str, ranks: int) -> None:
    full = draw(LAYOUTS[case](1), mean=0.5, std=0.02)
    layout = LAYOUTS[case](ranks)
    for rank in range(ranks):
        assert torch.equal(draw(layout, rank, ranks, mean=0.5, std=0.02), take(full, layout, rank))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["column, uneven", "row, uneven"])
def test_a_dtype_changes_the_rounding_alone(case: str, dtype: torch.dtype) -> None:
    full = draw(LAYOUTS[case](1))
    layout = LAYOUTS[case](3)
    for rank in range(3):
        assert torch.equal(draw(layout, rank, 3, dtype=dtype), take(full, layout, rank).to(dtype))


def test_a_replicated_tensor_is_whole_on_every_rank() -> None:
    layout = Layout((300, 111))
    assert torch.equal(draw(layout, 0, 1), draw(layout, 2, 3))


def test_each_part_is_a_stream_of_its_own() -> None:
    """A part's values depend neither on the parts beside it nor on their order."""
    gate, up = Part.even("gate", 101, 1), Part.even("up", 101, 1)
    fused = draw(column_layout((202, 257), [gate, up]))
    assert torch.equal(fused[:101], draw(column_layout((101, 257), [gate])))
    assert torch.equal(fused[101:], draw(column_layout((101, 257), [up])))
    assert not torch.equal(fused[:101], fused[101:])


def test_memory_order_does_not_matter() -> None:
    layout = column_layout((100, 300), [Part.even("output", 100, 1)])
    strided = torch.empty(300, 100).t()
    rng.normal_(strided, layout, single_device(), seed=5, name="w")
    assert torch.equal(strided, draw(layout))
    inside = torch.zeros(100, 302)
    rng.normal_(inside[:, 1:-1], layout, single_device(), seed=5, name="w")
    assert torch.equal(inside[:, 1:-1], draw(layout))
    assert not inside[:, 0].any() and not inside[:, -1].any()


def test_mean_and_std_scale_the_same_numbers() -> None:
    layout = Layout((50_000,))
    torch.testing.assert_close(draw(layout, mean=3.0, std=0.02), draw(layout) * 0.02 + 3, rtol=1e-6, atol=1e-7)
    assert torch.equal(draw(layout, mean=3.0, std=0.0), torch.full((50_000,), 3.0))


def test_empty_and_scalar_tensors() -> None:
    assert draw(Layout((0, 4))).shape == (0, 4)
    assert draw(Layout(())) == stream(1)[0]


def test_a_meta_tensor_is_left_for_later() -> None:
    layout = Layout((3, 4))
    module = torch.nn.Linear(4, 3, bias=False, device="meta")
    rng.normal_(module.weight, layout, single_device(), seed=5, name="w")
    assert module.weight.is_meta
    module.to_empty(device="cpu")
    rng.normal_(module.weight, layout, single_device(), seed=5, name="w")
    assert torch.equal(module.weight, draw(layout))
    assert module.weight.requires_grad and module.weight.grad_fn is None


class CountingPhilox(np.random.Philox):
    words = 0

    def random_raw(self, size: Any = None, output: Any = True) -> Any:
        CountingPhilox.words += 2 * size
        return super().random_raw(size, output)


@pytest.mark.parametrize("cut", [column_layout, row_layout])
def test_a_rank_draws_about_its_share(cut: Callable[..., Layout], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np.random, "Philox", CountingPhilox)
    for ranks in (1, 2, 4):
        layout = cut((1024, 1024), [Part.even("all", 1024, ranks)])
        for rank in range(ranks):
            CountingPhilox.words = 0
            draw(layout, rank, ranks)
            assert 1 <= CountingPhilox.words / (1024 * 1024 / ranks) < 1.1


def test_global_random_states_are_left_alone() -> None:
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state(legacy=False)
    draw(LAYOUTS["fused gate and up"](1))
    rng.dropout(torch.ones(1000), 0.5, key=KEY, step=1)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert str(np.random.get_state(legacy=False)) == str(numpy_state)


# What the numbers are


def test_philox_words_are_the_published_and_numpys() -> None:
    # The known answer for counter 0 and key 0 of philox4x64-10 in the Random123 distribution (kat_vectors).
    zero = torch.zeros((), dtype=torch.int64)
    words = rng.philox_words(torch.tensor([-1]), zero, zero).numpy().view(np.uint64).ravel()
    assert [f"{w:016x}" for w in words] == ["16554d9eca36314c", "db20fe9d672d0fdc", "d7e772cee186176b", "7e68b68aec7ba23b"]
    for key in ((1, 2), (2**63 - 1, 2**62 + 12345), rng.stream_key(3, "x")):
        for first in (0, 2**33 - 50, 2**60 + 7):
            theirs = np.random.Philox(key=np.array(key, np.uint64), counter=np.array([first, 0, 0, 0], np.uint64))
            ours = rng.philox_words(torch.arange(first, first + 100), *(torch.tensor(k) for k in key))
            assert np.array_equal(ours.numpy().ravel(), theirs.random_raw(400).view(np.int32))


def test_normals_are_box_muller_of_the_words() -> None:
    """Against the formula in float64, one number at a time. Block b holds 16384 radii, then 16384 angles."""
    values = stream(3 * 32768)
    words = np.random.Philox(key=np.array(rng.stream_key(5, "w"), np.uint64)).random_raw(3 * 16384).view(np.int32)
    for block in range(3):
        for i in range(0, 16384, 97):
            w, v = int(words[block * 32768 + i]), int(words[block * 32768 + 16384 + i])
            radius = math.sqrt(-2 * math.log(abs(w | 1) / 2**31))
            angle = math.pi * v / 2**31
            assert values[block * 32768 + i].item() == pytest.approx(radius * math.cos(angle), rel=1e-5, abs=2e-6)
            assert values[block * 32768 + 16384 + i].item() == pytest.approx(radius * math.sin(angle), rel=1e-5, abs=2e-6)


@pytest.mark.parametrize("word", [0, 1, -1, 2**31 - 1, -(2**31)])
def test_no_word_gives_infinity_or_nan(word: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Constant:
        def random_raw(self, size: int) -> np.ndarray:
            return np.full(2 * size, word, np.int32).view(np.uint64)

    monkeypatch.setattr(rng, "_philox", lambda key, counter: Constant())
    largest = stream(32768).abs().max().item()
    assert largest <= math.sqrt(2 * math.log(2**31)) + 1e-5
    if word == 0:
        assert largest > 6.55  # the tails reach as far as 32-bit words allow


def test_golden_values() -> None:
    """A change of these numbers changes every model that was ever trained from a seed."""
    assert rng.stream_key(1234, "layers.0.up.weight:output") == GOLDEN_KEY
    values = draw(column_layout((64, 64), [Part.even("output", 64, 1)]), seed=1234, name="layers.0.up.weight")
    torch.testing.assert_close(values[0, :4], torch.tensor(GOLDEN_NORMALS), rtol=1e-6, atol=0)
    mask = rng.dropout(torch.ones(32), 0.5, key=1234, step=7) != 0
    assert "".join(str(int(k)) for k in mask) == GOLDEN_MASK


# Statistics. Seeds are fixed, so the tests are deterministic; a bound of 4 standard errors is one that 1 in 16,000 seeds miss.


def standard_errors(values: Tensor, expected: float, variance: float) -> float:
    """How many standard errors the mean of ``values`` is from ``expected``, given the variance of one value."""
    return (values.mean().item() - expected) * math.sqrt(values.numel() / variance)


def correlation(a: Tensor, b: Tensor) -> float:
    """The correlation of two samples in standard errors."""
    a, b = a.double().flatten() - a.double().mean(), b.double().flatten() - b.double().mean()
    return (a @ b / (a.norm() * b.norm())).item() * math.sqrt(a.numel())


def kolmogorov(values: Tensor) -> float:
    """The Kolmogorov-Smirnov distance to N(0, 1), times sqrt(n): above 1.95 for one sample in a thousand."""
    n = values.numel()
    expected = torch.special.ndtr(values.sort().values)
    grid = torch.arange(n + 1, dtype=torch.float64) / n
    return torch.maximum(expected - grid[:-1], grid[1:] - expected).max().item() * math.sqrt(n)


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_normal_moments_and_distribution(seed: int) -> None:
    z = stream(1 << 20, seed=seed)
    for power, expected, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(standard_errors(z**power, expected, variance)) < 4, f"moment {power}"
    assert kolmogorov(z) < 1.95


def test_the_moment_and_distribution_checks_see_small_faults() -> None:
    z = stream(1 << 20)
    assert kolmogorov(z * 1.01) > 1.95 and kolmogorov(z + 0.005) > 1.95
    assert kolmogorov(z.clamp(-2.5, 2.5)) > 1.95
    assert abs(standard_errors(z + 0.01, 0, 1)) > 4
    assert abs(standard_errors((z * 1.01) ** 2, 1, 2)) > 4
    assert abs(standard_errors(z.clamp(-3, 3) ** 4, 3, 96)) > 4


def test_tails() -> None:
    z = stream(1 << 24)
    for bound in (3.0, 4.0, 5.0):
        for tail in (z > bound, z < -bound):
            expected = z.numel() * 0.5 * math.erfc(bound / math.sqrt(2))
            assert abs(tail.sum().item() - expected) < 4 * math.sqrt(expected)
    assert 5 < z.max() < 6.56 and -6.56 < z.min() < -5


def test_neighbours_are_not_correlated() -> None:
    """Also the squares, and at the distances of Box-Muller's partner (16384) and of the next block (32768)."""
    z = stream(1 << 20)
    for lag in (1, 2, 16383, 16384, 16385, 32768):
        assert abs(correlation(z[lag:], z[:-lag])) < 4
        assert abs(correlation(z[lag:] ** 2, z[:-lag] ** 2)) < 4
    partners = z.view(-1, 2, 16384)
    assert abs(correlation(partners[:, 0] ** 2, partners[:, 1] ** 2)) < 4


def test_shards_names_seeds_and_parts_are_not_correlated() -> None:
    parts = (Part.even("gate", 512, 4), Part.even("up", 512, 4))
    shards = [draw(column_layout((1024, 512), parts), rank, 4) for rank in range(4)]
    samples = [part for shard in shards for part in shard.chunk(2)]
    plain = column_layout((128, 512), (Part.even("gate", 128, 1),))
    samples += [draw(plain, name=name) for name in ("w1", "layers.0.w", "layers.1.w", "layers.10.w")]
    samples += [draw(plain, seed=seed) for seed in (0, 1, 2, 6, 5 + 2**32)]
    for i, a in enumerate(samples):
        for b in samples[:i]:
            assert abs(correlation(a, b)) < 4.5  # 136 pairs
            assert abs(correlation(a**2, b**2)) < 4.5


def test_the_correlation_check_sees_small_faults() -> None:
    z = stream(1 << 17)
    a, b = z.chunk(2)
    assert abs(correlation(a, b + 0.02 * a)) > 4.5
    assert abs(correlation((a * b.abs()) ** 2, b**2)) > 4.5
    assert abs(correlation(a[1:], (0.02 * a + b)[1:])) > 4.5


# Dropout


def mask_of(shape: tuple[int, ...], p: float = 0.3, *, key: int = KEY, step: int = 7, **cut: int) -> Tensor:
    return rng.dropout(torch.ones(shape), p, key=key, step=step, **cut) != 0


def test_the_mask_compares_words_with_p() -> None:
    words = np.random.Philox(key=np.array([KEY, 7], np.uint64)).random_raw(200_000).view(np.uint32)
    for p in (0.1, 0.5, 0.9):
        assert np.array_equal(mask_of((400_000,), p).numpy(), words >= round(p * 2**32))


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_keep_fraction_and_scale(p: float) -> None:
    x = torch.rand(1 << 20, dtype=torch.float64) + 1
    y = rng.dropout(x, p, key=KEY, step=7)
    mask = y != 0
    assert abs(standard_errors(mask.double(), 1 - p, p * (1 - p))) < 4
    torch.testing.assert_close(y, torch.where(mask, x / (1 - p), 0.0), rtol=1e-14, atol=0)
    for lag in (1, 2, 7, 8, 64, 1024):
        assert abs(correlation(mask[lag:], mask[:-lag])) < 4


def test_the_mask_differs_between_steps_and_places() -> None:
    masks = [mask_of((1 << 16,), step=step) for step in (0, 1, 2, 2**62)]
    masks += [mask_of((1 << 16,), key=rng.stream_key(seed, name)[0]) for seed, name in ((0, "a"), (0, "b"), (1, "a"))]
    for i, a in enumerate(masks):
        for b in masks[:i]:
            assert abs(correlation(a, b)) < 4.5
    assert torch.equal(mask_of((1 << 16,), step=2), masks[2])


@pytest.mark.parametrize("tokens", [[37], [19, 18], [13, 12, 12], [1, 36], [10, 9, 9, 9]])
def test_token_shards_see_the_mask_of_all_tokens(tokens: list[int]) -> None:
    width = 4801  # odd, and long enough for several chunks
    full = mask_of((37, width))
    first = 0
    for count in tokens:
        assert torch.equal(mask_of((count, width), offset=first * width), full[first : first + count])
        first += count


@pytest.mark.parametrize("length", [7, 8, 20])
@pytest.mark.parametrize("heads", [[9], [5, 4], [3, 3, 3], [3, 2, 2, 2]])
def test_head_and_batch_shards_see_the_mask_of_all_heads(heads: list[int], length: int) -> None:
    square = length * length
    full = mask_of((4, 9, length, length))
    first = 0
    for count in heads:
        for sequence, batch in ((0, 4), (1, 3), (2, 1)):
            shape = (batch, count, length, length)
            offset = (sequence * 9 + first) * square
            local = mask_of(shape, offset=offset, run=count * square, stride=9 * square)
            assert torch.equal(local, full[sequence : sequence + batch, first : first + count])
        first += count


@pytest.mark.parametrize("offset, stride", [(0, 40), (3, 43), (8, 48), (5, 48), (2**40 + 11, 2**33 + 1), (100, 10), (4, 0)])
def test_both_ways_to_make_the_mask_agree(offset: int, stride: int) -> None:
    """numpy's words on the CPU, torch operations elsewhere."""
    key, step = torch.tensor(KEY), torch.tensor(7)
    for shape, run in (((6, 5, 8), 40), ((240,), 240), ((240, 1), 1)):
        arguments = (key, step, shape, 1 << 30, offset, run, stride)
        fast, traceable = rng._numpy_mask(*arguments), rng._traceable_mask(*arguments)
        assert traceable.dtype == torch.bool and torch.equal(fast, traceable)
        for i, row in enumerate(fast.view(-1, run)):
            assert torch.equal(row, mask_of((run,), 0.25, offset=offset + i * stride))


@pytest.mark.parametrize("p", [0.0001, 0.5, 1 - 1e-12])
def test_both_ways_agree_on_extreme_thresholds(p: float) -> None:
    arguments = (torch.tensor(KEY), torch.tensor(7), (5000,), min(round(p * 2**32), 2**32 - 1), 0, 5000, 5000)
    assert torch.equal(rng._numpy_mask(*arguments), rng._traceable_mask(*arguments))


def test_keys_and_steps_may_be_tensors() -> None:
    x = torch.ones(1000)
    y = rng.dropout(x, 0.3, key=torch.tensor(KEY), step=torch.tensor(7))
    assert torch.equal(y, rng.dropout(x, 0.3, key=KEY, step=7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_mask_does_not_depend_on_the_dtype(dtype: torch.dtype) -> None:
    y = rng.dropout(torch.ones(3, 1000, dtype=dtype), 0.3, key=KEY, step=7)
    assert y.dtype == dtype and torch.equal(y != 0, mask_of((3, 1000)))


def test_strided_inputs() -> None:
    x = torch.randn(6, 50, 4).permute(2, 0, 1)
    assert not x.is_contiguous()
    assert torch.equal(rng.dropout(x, 0.3, key=KEY, step=7), rng.dropout(x.contiguous(), 0.3, key=KEY, step=7))


def test_dropped_infinities_are_zero() -> None:
    y = rng.dropout(torch.full((1000,), math.inf), 0.3, key=KEY, step=7)
    assert torch.equal(y, torch.where(mask_of((1000,)), math.inf, 0.0))


def test_the_gradient_has_the_same_mask() -> None:
    x = torch.randn(7, 300, dtype=torch.float64, requires_grad=True)
    cotangent = torch.randn(7, 300, dtype=torch.float64)
    rng.dropout(x, 0.3, key=KEY, step=7).backward(cotangent)
    torch.testing.assert_close(x.grad, torch.where(mask_of((7, 300)), cotangent / 0.7, 0.0), rtol=1e-14, atol=0)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_finds_the_same_mask(use_reentrant: bool) -> None:
    def layer(x: Tensor) -> Tensor:
        return rng.dropout(torch.tanh(x), 0.3, key=KEY, step=7).square()

    x = torch.randn(7, 300, dtype=torch.float64, requires_grad=True)
    (plain,) = torch.autograd.grad(layer(x).sum(), x)
    checkpoint(layer, x, use_reentrant=use_reentrant, preserve_rng_state=False).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, plain)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_compiled_whole_and_once(as_tensor: bool) -> None:
    def layer(x: Tensor, step: int | Tensor) -> Tensor:
        y = rng.dropout(x * 2, 0.3, key=KEY, step=step, offset=16)
        return rng.dropout(y, 0.1, key=KEY + 1, step=step, run=60, stride=600, offset=3)

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    x = torch.randn(2, 300, requires_grad=True)
    for step in range(6):
        eager, traced = layer(x, step), compiled(x, torch.tensor(step) if as_tensor else step)
        assert torch.equal(eager, traced)
        cotangent = torch.randn_like(x)
        assert torch.equal(torch.autograd.grad(eager, x, cotangent)[0], torch.autograd.grad(traced, x, cotangent)[0])
    assert counter.frame_count == (1 if as_tensor else 2)  # an int is a constant until it first changes


def test_blocks_with_tensor_keys_share_one_compilation() -> None:
    """An int attribute of a module would be a constant: one compilation a block, and an error after the eighth."""

    class Site(torch.nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.key = torch.tensor(rng.stream_key(0, name)[0])

        def forward(self, x: Tensor, step: int) -> Tensor:
            return rng.dropout(x, 0.3, key=self.key, step=step)

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    sites = [Site(f"layers.{i}") for i in range(10)]
    x = torch.ones(30, 40)
    masks = [torch.compile(site, backend=counter, fullgraph=True)(x, 3) for site in sites]
    assert counter.frame_count == 1
    assert all(torch.equal(mask, site(x, 3)) for mask, site in zip(masks, sites, strict=True))
    assert len({mask.numpy().tobytes() for mask in masks}) == len(sites)


def test_the_traceable_mask_compiles() -> None:
    """The way of other devices, which has no opaque operator to hide behind."""
    compiled = torch.compile(rng._traceable_mask, backend="aot_eager", fullgraph=True)
    for step in (3, 4):
        arguments = (torch.tensor(KEY), torch.tensor(step), (5, 3, 7), 1 << 30, 11, 21, 23)
        assert torch.equal(compiled(*arguments), rng._numpy_mask(*arguments))


def test_the_operator_is_registered_soundly() -> None:
    torch.library.opcheck(rng._numpy_mask, (torch.tensor(KEY), torch.tensor(7), (6, 10), 1 << 30, 3, 10, 12))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_gets_the_values_of_the_cpu() -> None:
    layout = LAYOUTS["row, uneven"](1)
    local = torch.empty(layout.shape, device="cuda")
    assert torch.equal(rng.normal_(local, layout, single_device(), seed=5, name="w").cpu(), draw(layout))
    x = torch.randn(5, 3, 77)
    cut = {"offset": 5, "run": 231, "stride": 1001}
    for function in (rng.dropout, torch.compile(rng.dropout, fullgraph=True)):
        y = function(x.cuda(), 0.3, key=KEY, step=7, **cut)
        assert torch.equal(y.cpu(), rng.dropout(x, 0.3, key=KEY, step=7, **cut))


def test_p_of_zero_is_the_input_itself() -> None:
    x = torch.randn(5)
    assert rng.dropout(x, 0.0, key=KEY, step=7) is x
    assert torch.equal(F.dropout(x, 0.0), x)


# Errors


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5, math.nan])
def test_a_wrong_probability_is_named(p: float) -> None:
    with pytest.raises(ValueError, match=rf"\[0, 1\), got {p}"):
        rng.dropout(torch.ones(3), p, key=KEY, step=7)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"run": 5}, "runs of 5 indices do not cover 12 elements"),
        ({"run": 0}, "runs of 0 indices do not cover 12 elements"),
        ({"run": 4}, "3 runs of 4 indices need a stride"),
        ({"offset": -1}, "offset must be an integer in .* got -1"),
        ({"step": -1}, "step must be an integer in .* got -1"),
        ({"step": 1.5}, "step must be an integer in .* got 1.5"),
        ({"key": 2**63}, "key must be an integer in .* got 9223372036854775808"),
    ],
)
def test_wrong_dropout_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rng.dropout(torch.ones(12), 0.1, **({"key": KEY, "step": 7} | arguments))


@pytest.mark.parametrize("seed", [-1, 2**63, 1.0, True, None, "1"])
def test_a_wrong_seed_is_named(seed: Any) -> None:
    for call in (lambda: rng.stream_key(seed, "w"), lambda: draw(Layout((3,)), seed=seed)):
        with pytest.raises(ValueError, match=rf"seed must be an integer in \[0, 2\*\*63\), got {seed!r}"):
            call()


def test_wrong_tensors_are_named() -> None:
    layout = column_layout((8, 4), [Part.even("output", 8, 2)])
    with pytest.raises(ValueError, match=r"w: rank 1 of 2 holds a shard of shape \(4, 4\), got a tensor of shape \(8, 4\)"):
        rng.normal_(torch.empty(8, 4), layout, group_of(1, 2), seed=0, name="w")
    with pytest.raises(ValueError, match=r"w: normal numbers need a floating dtype, got torch\.int64"):
        rng.normal_(torch.empty(3, dtype=torch.int64), Layout((3,)), single_device(), seed=0, name="w")
    for std in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match=f"w: the standard deviation must be finite and not negative, got {std}"):
            draw(Layout((3,)), std=std)
