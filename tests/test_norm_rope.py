"""Norms and rotary embeddings: by hand, against transformers, and in half precision.

transformers is imported where it is used, so that the workers of the pool need not load it.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.testing import assert_close

from parallel.group import TPGroup, single_device
from parallel.state import gather_state, scatter_state
from tests.helpers import EXACT, randn, rows_of
from tests.pool import Pool
from tpblock.config import ModelConfig, Norm, Parallelism, Position
from tpblock.context import Context, Keys
from tpblock.model import Decoder
from tpblock.norm import LayerNorm, RMSNorm, make_norm
from tpblock.rope import LinearScaling, Llama3Scaling, LongRopeScaling, apply_rotary, rotary_tables

# -- norms by hand


def test_layer_norm_by_hand() -> None:
    """Of [2, -2, 4, 0] the mean is 1 and the variance (1 + 9 + 9 + 1) / 4 = 5."""
    norm = LayerNorm(4, eps=1e-300, dtype=torch.float64)
    y = norm(torch.tensor([2.0, -2.0, 4.0, 0.0], dtype=torch.float64))
    assert_close(y * math.sqrt(5), torch.tensor([1.0, -3.0, 3.0, -1.0], dtype=torch.float64))
    assert_close(y, torch.tensor([0.4472, -1.3416, 1.3416, -0.4472], dtype=torch.float64), rtol=0, atol=5e-5)
    assert y.sum().abs() < 1e-12


def test_rms_norm_by_hand() -> None:
    """Of [2, -2, 4, 0] the mean square is (4 + 4 + 16 + 0) / 4 = 6. Unlike LayerNorm's, the result keeps signs and zeros."""
    norm = RMSNorm(4, eps=1e-300, dtype=torch.float64)
    y = norm(torch.tensor([2.0, -2.0, 4.0, 0.0], dtype=torch.float64))
    assert_close(y * math.sqrt(6), torch.tensor([2.0, -2.0, 4.0, 0.0], dtype=torch.float64))
    assert_close(y, torch.tensor([0.8165, -0.8165, 1.6330, 0.0], dtype=torch.float64), rtol=0, atol=5e-5)


def test_norms_agree_without_a_mean_and_take_weights() -> None:
    x = randn(5, 8)
    x -= x.mean(-1, keepdim=True)
    weight, bias = randn(8, seed=1), randn(8, seed=2)
    rms, layer = RMSNorm(8, dtype=torch.float64), LayerNorm(8, dtype=torch.float64)
    assert_close(rms(x), layer(x), **EXACT)
    with torch.no_grad():
        rms.weight.copy_(weight)
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
    assert_close(rms(x) + bias, layer(x), **EXACT)
    rms.reset_parameters()
    layer.reset_parameters()
    assert torch.equal(rms.weight, torch.ones_like(weight)) and not layer.bias.any()


def test_epsilon_is_inside_the_root() -> None:
    x = torch.tensor([1.0, 1.0])
    assert_close(RMSNorm(2, eps=3.0)(x), torch.tensor([0.5, 0.5]))
    assert_close(LayerNorm(2, eps=3.0)(torch.tensor([1.0, -1.0])), torch.tensor([0.5, -0.5]))
    assert torch.equal(RMSNorm(2)(torch.zeros(2)), torch.zeros(2))


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_norm_gradients(kind: type[RMSNorm | LayerNorm]) -> None:
    norm = kind(4, dtype=torch.float64)
    tensors = [
        randn(3, 4, requires_grad=True),
        *(randn(4, seed=i, requires_grad=True) for i, _ in enumerate(norm.parameters())),
    ]
    for parts in [tensors, [tensors[0], *(t.detach() for t in tensors[1:])], [tensors[0].detach(), *tensors[1:]]]:
        assert torch.autograd.gradcheck(norm.normalize, parts)
        assert torch.autograd.gradgradcheck(norm.normalize, parts)
    of_other_strides = randn(4, 2, 3, requires_grad=True).transpose(0, 2)
    assert torch.autograd.gradcheck(norm.normalize, [of_other_strides, *tensors[1:]])


def test_rms_norm_is_torchs() -> None:
    """Forward to the last bit; and under torch.func, which differentiates torch's own."""
    x, weight, dy = (randn(*shape, seed=i, dtype=torch.float32) for i, shape in enumerate([(50, 33), (33,), (50, 33)]))
    norm = RMSNorm(33)

    def norm_of(x: Tensor, weight: Tensor) -> Tensor:
        return norm.normalize(x, weight)

    theirs = functools.partial(F.rms_norm, normalized_shape=(33,), eps=norm.eps)
    assert torch.equal(norm.normalize(x, weight), theirs(x, weight=weight))
    inputs = x.requires_grad_(), weight.requires_grad_()
    expected = torch.autograd.grad(theirs(x, weight=weight), inputs, dy)
    assert_close(torch.autograd.grad(norm.normalize(*inputs), inputs, dy), expected)
    assert_close(torch.func.vjp(norm.normalize, *inputs)[1](dy), expected)
    with torch.no_grad(), forward_ad.dual_level():
        along = [forward_ad.unpack_dual(f(forward_ad.make_dual(x, dy), weight=weight)).tangent for f in (norm_of, theirs)]
    assert_close(*along)


def test_make_norm_reads_the_config() -> None:
    config = ModelConfig(vocab_size=8, dim=12, layers=1, heads=2, norm_eps=0.5)
    norm = make_norm(config, Parallelism(), None, torch.float64)
    assert isinstance(norm, RMSNorm) and norm.eps == 0.5 and norm.weight.shape == (12,) and norm.weight.dtype == torch.float64
    config = ModelConfig(vocab_size=8, dim=12, layers=1, heads=2, norm=Norm.LAYERNORM)
    assert isinstance(make_norm(config, Parallelism(), "meta", None), LayerNorm)


# -- half precision

HARD_INPUTS = {
    "one channel 300 times the others": lambda x: x * torch.ones(x.shape[-1]).index_fill(0, torch.tensor(7), 300.0),
    "tiny": lambda x: x * 0.058,
    "usual": lambda x: x,
}


def ulps(a: Tensor, b: Tensor) -> int:
    """How many bf16 numbers apart a and b are at most."""

    def ordered(x: Tensor) -> Tensor:
        bits = x.bfloat16().view(torch.int16).int()
        return torch.where(bits < 0, -32768 - bits, bits)

    return int((ordered(a) - ordered(b)).abs().max())


@pytest.mark.parametrize("name", HARD_INPUTS)
@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_c65_bf16_norms_keep_their_statistics_in_float32(kind: type[RMSNorm | LayerNorm], name: str) -> None:
    """Within one bf16 step of the norm of the same numbers in float64."""
    x = HARD_INPUTS[name](randn(64, 1024, dtype=torch.float32)).bfloat16()
    exact = kind(1024, dtype=torch.float64)(x.double()).bfloat16()
    assert ulps(kind(1024, dtype=torch.bfloat16)(x), exact) <= 1


def test_c65_tells_statistics_in_bf16() -> None:
    """The fault that the test above is for: squares summed in bf16."""
    x = HARD_INPUTS["one channel 300 times the others"](randn(64, 1024, dtype=torch.float32)).bfloat16()
    total = torch.zeros(64, dtype=torch.bfloat16)
    for column in x.unbind(-1):
        total = total + column * column
    wrong = x * torch.rsqrt(total / 1024 + 1e-5).unsqueeze(-1)
    exact = RMSNorm(1024, dtype=torch.float64)(x.double()).bfloat16()
    assert ulps(wrong, exact) > 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", HARD_INPUTS)
def test_c61_half_precision_rms_norm_is_that_of_llama(name: str, dtype: torch.dtype) -> None:
    """The cast comes before the product with the weight: bit for bit."""
    from transformers.models.llama import modeling_llama

    x = HARD_INPUTS[name](randn(64, 512, dtype=torch.float32)).to(dtype)
    ours, theirs = RMSNorm(512, eps=1e-6, dtype=dtype), modeling_llama.LlamaRMSNorm(512, eps=1e-6).to(dtype)
    with torch.no_grad():
        theirs.weight.copy_(ours.weight.copy_(1 + 0.3 * randn(512, seed=1, dtype=torch.float32)))
    assert torch.equal(ours(x), theirs(x))
    # A weight kept in float32 beside half-precision activations gives float32, as theirs does.
    assert torch.equal(ours.float()(x), theirs.float()(x))


def test_c61_tells_a_product_before_the_cast() -> None:
    x = randn(64, 512, dtype=torch.bfloat16)
    weight = (1 + 0.3 * randn(512, seed=1)).bfloat16()
    norm = RMSNorm(512, eps=1e-6, dtype=torch.bfloat16)
    with torch.no_grad():
        norm.weight.copy_(weight)
    assert not torch.equal((RMSNorm(512, eps=1e-6)(x.float()) * weight.float()).bfloat16(), norm(x))


# -- norms on tokens that are cut


def norm_of_tokens(group: TPGroup, kind: type[RMSNorm | LayerNorm]) -> None:
    x, dy = randn(7, 6, requires_grad=True), randn(7, 6, seed=1)
    whole = kind(6, dtype=torch.float64)
    whole(x).backward(dy)
    norm = kind(6, dtype=torch.float64, parallel=Parallelism(group=group, sequence_parallel=True))
    scatter_state(norm, dict(whole.named_parameters()), group)
    mine = rows_of(7, group)
    given = x.detach()[mine].clone().requires_grad_()
    norm(given).backward(dy[mine])
    assert_close(given.grad, x.grad[mine], **EXACT)
    for name, gradient in gather_state(norm, group, gradients=True).items():
        assert_close(gradient, getattr(whole, name).grad, **EXACT)


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_norm_gradients_are_summed_over_the_tokens_of_all_ranks(
    pool: Pool, ranks: int, kind: type[RMSNorm | LayerNorm]
) -> None:
    pool.run(ranks, norm_of_tokens, kind)


# -- rotary embeddings

SEQ, HEADS = 10, 3


def heads(head_dim: int, seed: int = 0) -> Tensor:
    return randn(2, SEQ, HEADS, head_dim, seed=seed, dtype=torch.float32)


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_rotary_equals_llama(theta: float) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama import modeling_llama

    config = LlamaConfig(
        hidden_size=3 * 8, num_attention_heads=3, head_dim=8, rope_parameters={"rope_type": "default", "rope_theta": theta}
    )
    q, k = heads(8), heads(8, seed=1)
    cos, sin = modeling_llama.LlamaRotaryEmbedding(config)(q, torch.arange(SEQ)[None])
    expected = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
    tables = rotary_tables(torch.arange(SEQ), 8, theta)
    for ours, theirs in zip((q, k), expected, strict=True):
        assert_close(apply_rotary(ours, tables), theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("fraction", [0.25, 0.5, 1.0])
def test_partial_rotary_equals_gpt_neox(fraction: float) -> None:
    from transformers import GPTNeoXConfig
    from transformers.models.gpt_neox import modeling_gpt_neox

    config = GPTNeoXConfig(
        hidden_size=3 * 16,
        num_attention_heads=3,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": fraction},
    )
    q, k = heads(16), heads(16, seed=1)
    cos, sin = modeling_gpt_neox.GPTNeoXRotaryEmbedding(config)(q, torch.arange(SEQ)[None])
    assert cos.shape[-1] == int(16 * fraction)
    expected = modeling_gpt_neox.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
    tables = rotary_tables(torch.arange(SEQ), int(16 * fraction), 10_000.0)
    for ours, theirs in zip((q, k), expected, strict=True):
        assert_close(apply_rotary(ours, tables), theirs, rtol=1e-6, atol=1e-6)


LONGROPE = LongRopeScaling(
    short_factor=(1.0, 1.1, 1.3, 1.5),
    long_factor=(1.2, 2.0, 3.5, 5.0),
    original_max_seq_len=16,
    attention_factor=1.19,
)
SCALINGS = {
    "linear": LinearScaling(factor=3.0),
    # of the four frequencies of base 100 one is kept, two lie between, one is divided
    "llama3": Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=64),
    "longrope": LONGROPE,
}


@pytest.mark.parametrize("seq", [16, 17])
@pytest.mark.parametrize("kind", SCALINGS)
def test_scaled_frequencies_equal_transformers(kind: str, seq: int) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    ours = SCALINGS[kind]
    numbers = {name.replace("max_seq_len", "max_position_embeddings"): value for name, value in vars(ours).items()}
    config = LlamaConfig(
        hidden_size=3 * 8,
        num_attention_heads=3,
        max_position_embeddings=64,
        rope_parameters={"rope_type": kind, "rope_theta": 100.0, **numbers},
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq)
    assert (factor == 1.0) == (kind != "longrope")
    cos, sin = rotary_tables(torch.arange(seq), 8, 100.0, torch.float64, scaling=ours)
    angles = torch.arange(seq)[:, None] * frequencies.double()
    assert_close(cos, angles.cos() * factor, rtol=0, atol=1e-5)
    assert_close(sin, angles.sin() * factor, rtol=0, atol=1e-5)
    plain = rotary_tables(torch.arange(seq), 8, 100.0, torch.float64)
    assert (cos - plain[0]).abs().max() > 0.1


def test_positions_are_part_of_a_longer_sequence() -> None:
    """Which factors are used depends on the length of the whole."""
    for total, length in ((16, 16), (17, 17), (17, 20)):
        whole = rotary_tables(torch.arange(length), 8, 100.0, scaling=LONGROPE)
        part = rotary_tables(torch.arange(5, 9), 8, 100.0, scaling=LONGROPE, total=total)
        assert all(torch.equal(p, w[5:9]) for p, w in zip(part, whole, strict=True))


def test_rotary_is_a_rotation_of_pairs_by_hand() -> None:
    """Features i and i + half turn by position / theta^(2i / dim)."""
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64).expand(1, 3, 1, 4)
    y = apply_rotary(x, rotary_tables(torch.arange(3), 4, 100.0, torch.float64))[0, :, 0]
    for position in range(3):
        for i, angle in enumerate((position, position / 10)):
            turned = complex(1 + i, 3 + i) * complex(math.cos(angle), math.sin(angle))
            assert y[position, i].item() == pytest.approx(turned.real, abs=1e-12)
            assert y[position, i + 2].item() == pytest.approx(turned.imag, abs=1e-12)


def test_rotary_scores_depend_on_the_distance_alone() -> None:
    q, k = randn(1, 1, 1, 8), randn(1, 1, 1, 8, seed=1)

    def score(at_q: int, at_k: int) -> float:
        turned = [
            apply_rotary(t, rotary_tables(torch.tensor([at]), 8, 1e4, torch.float64)) for t, at in ((q, at_q), (k, at_k))
        ]
        return (turned[0] * turned[1]).sum().item()

    for distance in (0, 1, 5, 63):
        expected = score(distance, 0)
        assert [score(at + distance, at) for at in (3, 17, 500)] == pytest.approx([expected] * 3, abs=1e-10)
    assert score(0, 0) == pytest.approx((q * k).sum().item())
    assert abs(score(5, 0) - score(0, 5)) > 1e-3, "direction matters"


def test_rotary_leaves_the_rest_alone_and_keeps_lengths() -> None:
    x = heads(16)
    y = apply_rotary(x, rotary_tables(torch.arange(SEQ), 4, 1e4))
    assert torch.equal(y[..., 4:], x[..., 4:])
    assert torch.equal(y[:, 0], x[:, 0])
    assert_close(y.norm(dim=-1), x.norm(dim=-1))
    assert not torch.equal(y[:, 1:, :, :4], x[:, 1:, :, :4])


def test_rotary_gradient() -> None:
    tables = rotary_tables(torch.arange(4), 4, 1e4, torch.float64)
    assert torch.autograd.gradcheck(lambda x: apply_rotary(x, tables), randn(1, 4, 1, 6, requires_grad=True))


def test_half_precision_rotates_in_float32() -> None:
    """At position 2000 a bf16 angle would be off by several radians."""
    x = randn(1, 1, 2, 8, dtype=torch.bfloat16)
    tables = rotary_tables(torch.tensor([2000]), 8, 1e4)
    assert tables[0].dtype == tables[1].dtype == torch.float32
    result = apply_rotary(x, tables)
    assert result.dtype == torch.bfloat16
    exact = apply_rotary(x.double(), rotary_tables(torch.tensor([2000]), 8, 1e4, torch.float64))
    assert_close(result, exact.bfloat16(), rtol=2**-7, atol=1e-3)


def test_tables_stay_in_float32_whatever_the_model_is_turned_into() -> None:
    config = ModelConfig(vocab_size=8, dim=8, layers=1, heads=2, max_seq_len=16)
    model = Decoder(config, group=single_device()).to(torch.bfloat16)
    assert not list(model.buffers())
    assert model(torch.zeros(1, 16, dtype=torch.long)).dtype == torch.bfloat16
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)):
        context = Context.build(config, 1, 16, device=torch.device("cpu"), dtype=dtype)
        assert context.rotary is not None
        assert [table.dtype for table in context.rotary] == [expected] * 2
        assert [table.shape for table in context.rotary] == [(16, 2)] * 2


def test_learned_positions_have_no_tables() -> None:
    config = ModelConfig(vocab_size=8, dim=8, layers=1, heads=2, position=Position.LEARNED)
    assert Context.build(config, 1, 4, device=torch.device("cpu"), dtype=torch.float32).rotary is None


def test_a_context_for_another_window_is_refused() -> None:
    config = ModelConfig(vocab_size=8, dim=8, layers=1, heads=2, sliding_window=3)
    context = Context.build(
        dataclasses.replace(config, sliding_window=None), 1, 4, device=torch.device("cpu"), dtype=torch.float32
    )
    with pytest.raises(ValueError, match="a Context for a sliding window of None, the model's is 3: use Context.build"):
        context.check(config, training=False)


def test_masks_are_made_only_where_the_causal_flag_does_not_do() -> None:
    cpu = torch.device("cpu")
    assert Keys.of(0, 5, None, cpu) == Keys.of(0, 5, 5, cpu) == Keys.of(9, 1, None, cpu) == Keys()
    assert Keys.of(9, 1, 4, cpu) == Keys(6)
    first, mask = Keys.of(3, 2, 3, cpu)
    assert first == 1 and mask is not None and mask.tolist() == [[True, True, True, False], [False, True, True, True]]
