"""Ours equals the oracle on 1, 2, 3 and 4 ranks, sequence parallelism off and on: forward, backward and optimizer steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from parallel.gradients import check_replicas, clip_grad_norm_
from parallel.group import TPGroup
from parallel.state import gather_state
from tests.equality import (
    ADAMW,
    BFLOAT16,
    EXACT,
    FLOOR,
    MAX_NORM,
    STEPS,
    TOLERANCES,
    Case,
    Inputs,
    Results,
    Variant,
    assert_equal,
    build,
    failures,
    gradients,
    make_inputs,
    measure,
    measure_part,
    prefixed,
    reference,
    updates,
)
from tests.oracle_loading import is_softmax_invariant, to_oracle
from tests.pool import Pool
from tpblock import (
    Activation,
    Bias,
    Block,
    Llama3Scaling,
    LongRopeScaling,
    ModelConfig,
    Norm,
    Placement,
    Position,
    QKNorm,
)

LLAMA = ModelConfig(vocab_size=257, dim=20, layers=2, heads=9, kv_heads=3, head_dim=4, d_ff=101, max_seq_len=16)
MQA = ModelConfig(
    vocab_size=29, dim=16, layers=2, heads=4, kv_heads=1, d_ff=13, activation=Activation.GELU, bias=True, max_seq_len=16
)
GPT2 = ModelConfig(
    vocab_size=257,
    dim=20,
    layers=2,
    heads=5,
    d_ff=23,
    activation=Activation.GELU_TANH,
    norm=Norm.LAYERNORM,
    position=Position.LEARNED,
    bias=True,
    tied_embeddings=True,
    max_seq_len=16,
)
PALM = ModelConfig(
    vocab_size=31,
    dim=16,
    layers=2,
    heads=4,
    kv_heads=1,
    head_dim=6,
    d_ff=21,
    placement=Placement.PARALLEL,
    bias=True,
    tied_embeddings=True,
    max_seq_len=16,
)
NEOX = ModelConfig(
    vocab_size=37,
    dim=32,
    layers=2,
    heads=4,
    d_ff=19,
    activation=Activation.GELU,
    norm=Norm.LAYERNORM,
    placement=Placement.PARALLEL_TWO_NORMS,
    rotary_fraction=0.25,
    bias=True,
    max_seq_len=16,
)
RELU = ModelConfig(vocab_size=11, dim=12, layers=2, heads=6, kv_heads=2, d_ff=9, activation=Activation.RELU, max_seq_len=8)
QWEN2 = replace(LLAMA, bias=Bias.QKV)
QWEN3 = replace(LLAMA, head_dim=16, qk_norm=QKNorm.PER_HEAD)
MISTRAL = replace(LLAMA, sliding_window=3, full_attention_layers=(1,))
LLAMA3 = replace(
    LLAMA,
    head_dim=8,
    rope_theta=100.0,  # of its four frequencies one is kept, two lie between, one is divided
    rope_scaling=Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=64),
)
PHI3 = replace(
    LLAMA,
    head_dim=8,
    rope_scaling=LongRopeScaling(
        short_factor=(1.0, 1.1, 1.3, 1.5), long_factor=(1.2, 2.0, 3.5, 5.0), original_max_seq_len=7, attention_factor=1.2
    ),
)


def with_dropout(config: ModelConfig) -> ModelConfig:
    return ModelConfig(**{**vars(config), "dropout": 0.3, "attention_dropout": 0.2})


CASES = {
    "llama": Case(LLAMA),
    "multi-query": Case(MQA, batch=3, seq=7),
    "gpt2": Case(GPT2, label_smoothing=0.4, z_loss=1e-2),
    "palm": Case(PALM, batch=3, seq=8),
    "neox": Case(NEOX, batch=3, seq=7),
    "fewer tokens than ranks": Case(RELU, batch=1, seq=3, label_smoothing=0.2),
    "qkv biases": Case(QWEN2),
    "qk-norm": Case(QWEN3),
    "sliding window": Case(MISTRAL),
    "llama3 scaling": Case(LLAMA3),
    "longrope, short": Case(PHI3, seq=7),
    "longrope, long": Case(PHI3, seq=8),
    "dropout": Case(with_dropout(MQA)),
    "dropout in a parallel block": Case(with_dropout(NEOX)),
}
BOTH = (False, True)


def check(pool: Pool, ranks: int, case: Case, variants: list[Variant]) -> None:
    """Every variant, on every rank, against the oracle."""
    outcomes = pool.run(ranks, measure, case, make_inputs(case), variants)
    for rank, results in enumerate(outcomes):
        for variant, result in zip(variants, results, strict=True):
            expected = reference(case, variant.dtype)
            assert_equal(result, expected, case.config, TOLERANCES[variant.dtype], f"rank {rank} of {ranks}, {variant}")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_float64_equals_the_oracle(pool: Pool, case: Case, ranks: int) -> None:
    check(pool, ranks, case, [Variant(sequence_parallel=sp) for sp in BOTH])


@pytest.mark.parametrize(
    ("name", "ranks"), [("llama", 2), ("multi-query", 3), ("gpt2", 2), ("neox", 4), ("fewer tokens than ranks", 4)]
)
def test_the_process_groups_own_collectives_equal_the_oracle(pool: Pool, name: str, ranks: int) -> None:
    virtual_shards = (None, 4)
    variants = [Variant(sequence_parallel=sp, own_collectives=True, virtual_shards=v) for sp in BOTH for v in virtual_shards]
    check(pool, ranks, CASES[name], variants)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_c23_qk_norm_gradients_are_complete_with_fewer_kv_heads_than_ranks(pool: Pool, ranks: int) -> None:
    """Ranks that share a key head each know a part of its gradient, and so of that of the norm's weight."""
    case = Case(replace(MQA, head_dim=6, qk_norm=QKNorm.PER_HEAD))
    assert {"grad/stack.blocks.0.q_norm.weight", "block/grad/k_norm.weight"} <= reference(case).keys()
    check(pool, ranks, case, [Variant(sequence_parallel=sp) for sp in BOTH])


@pytest.mark.parametrize("name", ["llama", "dropout"])
def test_activation_checkpointing_equals_the_oracle(pool: Pool, name: str) -> None:
    variants = [Variant(sequence_parallel=sp, activation_checkpointing=True, loss_chunk=1024) for sp in BOTH]
    check(pool, 2, CASES[name], variants)


@pytest.mark.parametrize("name", ["multi-query", "neox", "qk-norm"])
def test_autocast_equals_the_oracle(pool: Pool, name: str) -> None:
    """float32 weights, bfloat16 matrix products."""
    case = CASES[name]
    variants = [Variant(sequence_parallel=sp, dtype=torch.float32, autocast=torch.bfloat16) for sp in BOTH]
    for ranks in (1, 2):
        for rank, results in enumerate(pool.run(ranks, measure, case, make_inputs(case), variants)):
            for variant, result in zip(variants, results, strict=True):
                where = f"rank {rank} of {ranks}, {variant}"
                assert_equal(result, reference(case, torch.float32), case.config, BFLOAT16, where)


@pytest.mark.parametrize(
    ("name", "ranks"), [("llama", 1), ("multi-query", 3), ("palm", 2), ("dropout", 2), ("gpt2", 4), ("qk-norm", 3)]
)
def test_invariant_mode_equals_the_oracle(pool: Pool, name: str, ranks: int) -> None:
    check(pool, ranks, CASES[name], [Variant(sequence_parallel=sp, virtual_shards=4) for sp in BOTH])


@pytest.mark.parametrize(
    ("name", "ranks"), [("llama", 1), ("llama", 2), ("gpt2", 2), ("palm", 3), ("neox", 4), ("qk-norm", 2)]
)
def test_float32_and_bfloat16_equal_the_oracle(pool: Pool, name: str, ranks: int) -> None:
    half = [Variant(sequence_parallel=sp, dtype=torch.bfloat16, reduce_dtype=r) for sp in BOTH for r in (None, torch.float32)]
    single = [Variant(sequence_parallel=sp, dtype=torch.float32) for sp in BOTH]
    check(pool, ranks, CASES[name], single + half)


# --- teeth


MISTAKES = [
    # the mistake, a case on 2 ranks with or without sequence parallelism that has to show it, and a key that has to be wrong
    ("row bias added on every rank", "multi-query", False, "logits"),
    ("row bias added on every rank", "multi-query", True, "logits"),
    ("biases of a parallel block added on every rank", "neox", False, "block/out"),
    ("output not reduced", "llama", False, "block/out"),
    ("output reduced again in backward", "llama", False, "block/grad/o.weight"),
    ("input gradient not reduced", "llama", False, "block/dx"),
    ("gradients of shared KV heads not summed", "multi-query", False, "grad/stack.blocks.0.k.bias"),
    ("gradients of shared KV heads not summed", "palm", True, "grad/stack.blocks.1.v.weight"),
    ("norm gradients not summed", "llama", True, "grad/stack.norm.weight"),
    ("norm gradients averaged", "llama", True, "grad/stack.norm.weight"),
    ("row bias gradients not summed", "multi-query", True, "grad/stack.blocks.0.o.bias"),
    ("position gradients not summed", "gpt2", True, "grad/positions"),
    ("gradients entering two norms not summed", "neox", False, "grad/stack.blocks.0.norm_2.weight"),
    ("gradients entering two norms not summed", "neox", True, "grad/stack.blocks.0.norm_1.bias"),
    ("embedding not reduced", "gpt2", False, "logits"),
    ("replicated gradients counted on every rank", "neox", False, "norm/2.0"),
    ("fused weights cut into plain slices", "llama", False, "block/out"),
    ("labels smoothed over this rank's columns", "gpt2", False, "grad/embedding.weight"),
    ("QK-norm gradients not summed", "qk-norm", False, "grad/stack.blocks.0.q_norm.weight"),
    ("QK-norm gradients not summed", "qk-norm", True, "block/grad/k_norm.weight"),
    ("QK-norm after rotary", "qk-norm", False, "block/out"),
    ("window off by one", "sliding window", False, "block/out"),
    ("value biases on queries", "qkv biases", False, "block/out"),
    ("dropout by local index", "dropout", False, "block/out"),
    ("dropout by local index", "dropout in a parallel block", True, "block/out"),
]


@pytest.mark.parametrize(("mistake", "name", "sequence_parallel", "key"), MISTAKES)
def test_a_planted_mistake_is_found(pool: Pool, mistake: str, name: str, sequence_parallel: bool, key: str) -> None:
    """At every tolerance, by the ranks between them."""
    case = CASES[name]
    variants = [Variant(sequence_parallel=sequence_parallel, dtype=dtype, plant=mistake) for dtype in TOLERANCES]
    outcomes = pool.run(2, measure, case, make_inputs(case), variants)
    for i, (dtype, tolerance) in enumerate(TOLERANCES.items()):
        wrong = [failures(results[i], reference(case, dtype), case.config, tolerance) for results in outcomes]
        assert any(key in found for found in wrong), f"{mistake} passes in {dtype}"


# --- other uses


def use_otherwise(group: TPGroup, case: Case, inputs: Inputs, sequence_parallel: bool) -> dict[str, Results]:
    """Gradients with some parameters frozen; accumulated over two passes; of inputs and cotangents with odd strides."""
    inputs, variant = inputs.to(torch.float64), Variant(sequence_parallel=sequence_parallel)
    found = {}

    model = build(group, case, inputs, variant)
    frozen = ("embedding", "blocks.0.norm", "qkv", "fused", "feedforward.down.bias")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(word in name for word in frozen))
    model(inputs.ids, inputs.labels, step=0, **case.loss_options).backward()
    found["frozen"] = prefixed("grad", gradients(model, group, case.config))

    model = build(group, case, inputs, variant)
    for _ in range(2):
        (0.5 * model(inputs.ids, inputs.labels, step=0, **case.loss_options)).backward()
    found["accumulated"] = prefixed("grad", gradients(model, group, case.config))

    expanded = replace(inputs, cotangent=torch.ones_like(inputs.cotangent[:1, :1]).expand_as(inputs.cotangent))
    strided = replace(expanded, x=inputs.x.permute(2, 1, 0).contiguous().permute(2, 1, 0))
    assert not strided.x.is_contiguous() or case.batch == 1
    plain = replace(inputs, cotangent=torch.ones_like(inputs.cotangent))
    found["strided"] = measure_part(group, case, strided, variant, Block)
    found["plain"] = measure_part(group, case, plain, variant, Block)
    return found


@pytest.mark.parametrize("name", ["llama", "multi-query", "gpt2", "palm", "neox"])
def test_other_uses_equal_the_oracle(pool: Pool, name: str) -> None:
    case = CASES[name]
    for sp in BOTH:
        for found in pool.run(2, use_otherwise, case, make_inputs(case), sp):
            everything = {key: value for key, value in reference(case).items() if key.startswith("grad/")}
            assert_equal(found["accumulated"], everything, case.config, EXACT, "accumulated")
            thawed = {key: everything[key] for key in found["frozen"]}
            assert 3 <= len(thawed) < len(everything)
            assert_equal(found["frozen"], thawed, case.config, EXACT, "frozen")
            assert_equal(found["strided"], found["plain"], case.config, EXACT, "strides")


# --- any sizes


@st.composite
def models(draw: st.DrawFn) -> tuple[Case, Variant, int]:
    ranks = draw(st.integers(1, 4))
    kv_heads = draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(-(-ranks // kv_heads), 4))
    position, placement = draw(st.sampled_from(Position)), draw(st.sampled_from(Placement))
    biases = [Bias.NONE, Bias.OUT, Bias.QKV | Bias.FEEDFORWARD, Bias.ALL]
    if placement is not Placement.PARALLEL:
        biases += [Bias.QKV, Bias.FEEDFORWARD]
    config = ModelConfig(
        vocab_size=draw(st.integers(4, 40)),
        dim=draw(st.integers(2, 12)),
        layers=draw(st.integers(1, 2)),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 3)),
        d_ff=draw(st.integers(4, 15)),
        activation=draw(st.sampled_from(Activation)),
        norm=draw(st.sampled_from(Norm)),
        # RMS and variance of nearly constant activations would amplify rounding.
        norm_eps=1e-2,
        placement=placement,
        position=position,
        bias=draw(st.sampled_from(biases)),
        qk_norm=draw(st.sampled_from(QKNorm)),
        sliding_window=draw(st.sampled_from([None, 2, 4])),
        tied_embeddings=draw(st.booleans()),
        dropout=draw(st.sampled_from([0.0, 0.25])),
        attention_dropout=draw(st.sampled_from([0.0, 0.25])),
        max_seq_len=8,
    )
    case = Case(
        config,
        batch=draw(st.integers(1, 3)),
        seq=draw(st.integers(2, 6)),
        label_smoothing=draw(st.sampled_from([0.0, 0.1])),
        z_loss=draw(st.sampled_from([0.0, 1e-2])),
    )
    variant = Variant(
        sequence_parallel=draw(st.booleans()),
        activation_checkpointing=draw(st.booleans()),
        loss_chunk=draw(st.integers(1, 20)),
    )
    return case, variant, ranks


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), print_blob=False)
@given(drawn=models())
def test_any_sizes_equal_the_oracle(pool: Pool, drawn: tuple[Case, Variant, int]) -> None:
    case, variant, ranks = drawn
    check(pool, ranks, case, [variant])


# --- data parallelism beside it


def train_on_a_mesh(mesh: DeviceMesh, case: Case, inputs: Inputs, variants: list[Variant]) -> list[Results]:
    """This replica's part of the batch, with DistributedDataParallel over the replicas."""
    group, replica, replicas = TPGroup.from_mesh(mesh["tp"]), mesh["dp"].get_local_rank(), mesh["dp"].size()
    inputs = inputs.to(torch.float64)
    ids, labels = (t.chunk(replicas)[replica] for t in (inputs.ids, inputs.labels))
    out = []
    for variant in variants:
        model = build(group, case, inputs, variant)
        replicated = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
        results: dict[str, Any] = {}
        for step in range(STEPS):
            loss = replicated(ids, labels, step=step, first_token=replica * ids.numel(), **case.loss_options)
            optimizer.zero_grad()
            loss.backward()
            if step == 0:
                results |= prefixed("grad", gradients(model, group, case.config))
            norm = clip_grad_norm_(model, MAX_NORM, group)
            if step == 0:
                results["norm/2.0"] = norm
            optimizer.step()
        check_replicas(model, group)
        after, before = to_oracle(gather_state(model, group), case.config), to_oracle(inputs.state, case.config)
        out.append(results | updates(after, before))
    return out


@pytest.mark.parametrize("name", ["llama", "gpt2", "dropout", "dropout in a parallel block"])
def test_c29_two_replicas_of_two_ranks_equal_one_device_on_the_full_batch(pool: Pool, name: str) -> None:
    case = CASES[name]
    variants = [Variant(sequence_parallel=sp) for sp in BOTH]
    outcomes = pool.run_mesh(2, 2, train_on_a_mesh, case, make_inputs(case), variants)
    for rank, results in enumerate(outcomes):
        for variant, result in zip(variants, results, strict=True):
            expected = {key: value for key, value in reference(case).items() if key in result}
            assert {"norm/2.0", "grad/embedding.weight", "update/stack.norm.weight"} <= expected.keys()
            assert_equal(result, expected, case.config, EXACT, f"rank {rank}, {variant}")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_there_is_something_to_compare(case: Case) -> None:
    """No expected value is small, unless it is zero by nature, and gradients are clipped by a factor that shows."""
    expected = reference(case)
    for key, value in expected.items():
        if is_softmax_invariant(key, case.config):
            assert key.startswith("update/") or value.norm() < 1e-12, key
        else:
            assert value.norm() > 10 * FLOOR, key
    assert expected["norm/2.0"] > 2 * MAX_NORM


def test_the_comparison_itself() -> None:
    """It has to see one wrong element in one tensor, a nan, and a missing result."""
    case = CASES["llama"]
    expected = reference(case)
    for key in ("logits", "block/grad/k.weight", "update/stack.norm.weight", "loss"):
        wrong = {name: value.clone() for name, value in expected.items()}
        assert not failures(wrong, expected, case.config, EXACT)
        flat = wrong[key].view(-1)
        flat[-1] *= 1 + 1e-7
        assert list(failures(wrong, expected, case.config, EXACT)) == [key]
        flat[-1] = torch.nan
        assert list(failures(wrong, expected, case.config, EXACT)) == [key]
        del wrong[key]
        with pytest.raises(AssertionError, match=key):
            failures(wrong, expected, case.config, EXACT)
