"""Faults that users of other libraries met in whole blocks and models, one test each. More under the same numbering elsewhere:
``grep -rn "def test_c[0-9]" tests``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel import collectives
from parallel.group import TPGroup
from parallel.regions import token_counts
from parallel.state import gather_state, named_layouts, scatter_state
from tests.equality import EXACT, Case, Variant, assert_equal, make_inputs, measure, reference
from tests.oracle_loading import part_of, random_state
from tests.pool import Pool
from tpblock import Activation, Block, Context, Decoder, ModelConfig, Norm, Placement, Position, Stack

TINY = ModelConfig(vocab_size=23, dim=16, layers=2, heads=4, d_ff=10, max_seq_len=16)
BATCH, SEQ = 2, 7


def changed(config: ModelConfig, **changes: Any) -> ModelConfig:
    return ModelConfig(**{**vars(config), **changes})


def ids_of(config: ModelConfig, seed: int = 0) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    ids = torch.randint(config.vocab_size, (BATCH, SEQ), generator=generator, device="cpu")
    return ids.to(torch.get_default_device())


def activations(config: ModelConfig, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(1)
    x = torch.randn(BATCH, SEQ, config.dim, dtype=torch.float64, generator=generator, device="cpu")
    return x.to(torch.get_default_device(), dtype)


def context_of(config: ModelConfig, x: Tensor, step: int | None = 0) -> Context:
    return Context.build(config, BATCH, SEQ, device=x.device, dtype=x.dtype, step=step)


def rows_of(x: Tensor, group: TPGroup, sequence_parallel: bool) -> Tensor:
    """What this rank is given of x."""
    return x.flatten(0, 1).split(token_counts(BATCH * SEQ, group))[group.rank] if sequence_parallel else x


def whole(rows: Tensor, group: TPGroup, sequence_parallel: bool) -> Tensor:
    """The inverse."""
    if not sequence_parallel:
        return rows
    return collectives.all_gather(rows.detach(), group, token_counts(BATCH * SEQ, group)).view(BATCH, SEQ, -1)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-10) -> bool:
    return a.shape == b.shape and bool((a - b).norm() <= tolerance * b.norm())


# --- initial values


def standard_deviations(group: TPGroup) -> dict[str, float]:
    config = ModelConfig(vocab_size=1000, dim=256, layers=12, heads=8, d_ff=683)
    model = Decoder(config, group=group)
    found = {}
    for name, value in gather_state(model, group).items():
        parts = {"qkv": ("q", "k", "v"), "up": ("gate", "up")}.get(name.split(".")[-2], ("",))
        for part, section in zip(parts, value.chunk(len(parts)), strict=True):
            found[f"{name} {part}".strip()] = section.std().item()
    return {name: std for name, std in found.items() if "norm" not in name}


@pytest.mark.parametrize("ranks", [1, 2])
def test_c01_c02_only_what_writes_the_residual_has_the_scaled_deviation(pool: Pool, ranks: int) -> None:
    found = pool.run(ranks, standard_deviations)[0]
    scaled = {name for name, std in found.items() if std == pytest.approx(0.02 / 24**0.5, rel=0.03)}
    base = {name for name, std in found.items() if std == pytest.approx(0.02, rel=0.03)}
    writers = ("attention.out", "feedforward.down")
    assert scaled == {f"stack.blocks.{i}.{matrix}.weight" for i in range(12) for matrix in writers}
    assert base == found.keys() - scaled
    assert {"stack.blocks.11.feedforward.up.weight gate", "stack.blocks.0.attention.qkv.weight v", "head.weight"} <= base


EVERYTHING = changed(
    TINY,
    heads=6,
    kv_heads=2,
    head_dim=4,
    bias=True,
    norm=Norm.LAYERNORM,
    position=Position.LEARNED,
    activation=Activation.GELU_TANH,
)


def initial_state(group: TPGroup, config: ModelConfig) -> dict[str, Tensor]:
    return gather_state(Decoder(config, group=group, seed=3), group)


def initial_state_on_mesh(mesh: DeviceMesh, config: ModelConfig) -> dict[str, Tensor]:
    return initial_state(TPGroup.from_mesh(mesh["tp"]), config)


@pytest.mark.parametrize("config", [EVERYTHING, changed(TINY, heads=9, kv_heads=3, head_dim=4, placement=Placement.PARALLEL)])
def test_c05_initial_tensors_are_bit_equal_on_any_ranks(pool: Pool, config: ModelConfig) -> None:
    expected = pool.run(1, initial_state, config)[0]
    found = [*pool.run(4, initial_state, config), *pool.run(3, initial_state, config)]
    found += pool.run_mesh(2, 2, initial_state_on_mesh, config)
    for state in found:
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], value) for name, value in expected.items())


def losses(group: TPGroup, config: ModelConfig, sequence_parallel: bool) -> list[float]:
    model = Decoder(config, group=group, sequence_parallel=sequence_parallel, seed=7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    out = []
    for step in range(4):
        loss = model(ids_of(config, step), ids_of(config, step + 1), step=step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        out.append(loss.item())
    return out


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_c06_one_seed_gives_one_loss_curve(pool: Pool, dropout: float) -> None:
    config = changed(EVERYTHING, dropout=dropout, attention_dropout=dropout)
    expected = pool.run(1, losses, config, False)[0]
    assert expected[0] != expected[1]
    for ranks, sequence_parallel in ((2, False), (4, False), (2, True), (4, True)):
        for found in pool.run(ranks, losses, config, sequence_parallel):
            assert found == pytest.approx(expected, rel=1e-5)


def from_meta(group: TPGroup, config: ModelConfig) -> list[bool]:
    device = torch.get_default_device()
    direct = Decoder(config, group=group, seed=3)
    model = Decoder(config, group=group, seed=3, device="meta")
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not list(model.buffers())  # nothing that to_empty could wipe and initialise forget
    model.to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    model.initialise(3)
    ids = ids_of(config)
    pairs = zip(direct.named_parameters(), model.named_parameters(), strict=True)
    return [
        *(name == other and torch.equal(a, b) for (name, a), (other, b) in pairs),
        torch.equal(direct(ids, ids, step=1), model(ids, ids, step=1)),  # dropout masks and rotary tables too
    ]


@pytest.mark.parametrize("ranks", [1, 2])
def test_c07_a_model_built_on_meta_is_the_one_built_directly(pool: Pool, ranks: int) -> None:
    for config in (EVERYTHING, TINY):
        config = changed(config, dropout=0.2, attention_dropout=0.1)
        assert all(all(found) for found in pool.run(ranks, from_meta, config))


# --- dropout


def masks(group: TPGroup, config: ModelConfig, sequence_parallel: bool) -> dict[str, Tensor]:
    """What a block's dropout sites keep, of this rank's elements, at steps 0 and 1."""
    block = Block(config, group=group, sequence_parallel=sequence_parallel, dtype=torch.float64, seed=5)
    kept: dict[str, Tensor] = {}
    for name, site in (("1", block.dropout_1), ("2", block.dropout_2), ("attention", block.attention.dropout)):

        def note(module: nn.Module, inputs: tuple[Tensor, ...], out: Tensor, name: str = name) -> None:
            assert (inputs[0] != 0).any()
            kept[f"{name} at {step}"] = (out != 0) | (inputs[0] == 0)

        site.register_forward_hook(note)
    with torch.no_grad():
        block.attention.qkv.weight.copy_(block.attention.qkv.weight[:1].expand_as(block.attention.qkv.weight))
    x = torch.ones(BATCH, SEQ, config.dim, dtype=torch.float64)
    for step in (0, 1):
        block(rows_of(x, group, sequence_parallel), context_of(config, x, step))
    return kept


def test_c08_residual_masks_are_equal_on_all_ranks_and_differ_between_token_shards(pool: Pool) -> None:
    config = changed(TINY, dropout=0.5)
    one = pool.run(1, masks, config, False)[0]
    shares = [mask.double().mean() for mask in one.values()]
    assert all(abs(share - 0.5) < 0.2 for share in shares)
    assert not torch.equal(one["1 at 0"], one["2 at 0"]) and not torch.equal(one["1 at 0"], one["1 at 1"])
    for ranks in (2, 3):
        for found in pool.run(ranks, masks, config, False):
            assert all(torch.equal(found[site], one[site]) for site in one if site[0] != "a")
        shards = pool.run(ranks, masks, config, True)
        for site in (site for site in one if site[0] != "a"):
            assert torch.equal(torch.cat([shard[site] for shard in shards]), one[site].flatten(0, 1))
            least = min(len(shard[site]) for shard in shards)
            assert not torch.equal(shards[0][site][:least], shards[1][site][:least])


def test_c11_attention_masks_differ_between_the_heads_of_all_ranks(pool: Pool) -> None:
    """All heads have the same weights, so that their masks alone can differ."""
    config = changed(TINY, attention_dropout=0.5)
    one = pool.run(1, masks, config, False)[0]["attention at 0"]
    for ranks in (2, 4):
        for sequence_parallel in (False, True):
            shards = [found["attention at 0"] for found in pool.run(ranks, masks, config, sequence_parallel)]
            assert torch.equal(torch.cat(shards, 1), one)
    heads = [one[b, h] for b in range(BATCH) for h in range(config.heads)]
    assert all(not torch.equal(a, b) for i, a in enumerate(heads) for b in heads[:i])


# --- biases, the parallel block


PARALLEL_BIASED = [
    pytest.param(changed(TINY, placement=placement, bias=True, kv_heads=kv_heads), id=f"{placement.value}-{kv_heads}")
    for placement in (Placement.PARALLEL, Placement.PARALLEL_TWO_NORMS)
    for kv_heads in (1, 4)
]


def block_output(group: TPGroup, config: ModelConfig, sequence_parallel: bool, dtype: torch.dtype) -> tuple[Tensor, int]:
    """y of a block with large biases, and how often dropout ran on activations."""
    block = Block(config, group=group, sequence_parallel=sequence_parallel, dtype=dtype, seed=5)
    state = {name: v.to(torch.get_default_device(), dtype) for name, v in random_state(config).items()}
    scatter_state(block, part_of(state, "stack.blocks.0."), group)
    calls: list[Tensor] = []
    for site in (block.dropout_1, block.dropout_2):
        site.register_forward_hook(lambda module, inputs, out: calls.append(out))
    x = activations(config, dtype)
    y = block(rows_of(x, group, sequence_parallel), context_of(config, x))
    return whole(y, group, sequence_parallel), len(calls)


@pytest.mark.parametrize("config", PARALLEL_BIASED)
def test_c15_a_parallel_block_adds_biases_and_drops_once(pool: Pool, config: ModelConfig) -> None:
    expected = pool.run(1, block_output, config, False, torch.float32)[0][0]
    dropping = changed(config, dropout=0.5)
    expected_dropped = pool.run(1, block_output, dropping, False, torch.float64)[0][0]
    dropped = expected_dropped == activations(config)  # where the update fell away the residual stands, to the bit
    assert 0.3 < dropped.double().mean() < 0.7
    for sequence_parallel in (False, True):
        for y, _ in pool.run(2, block_output, config, sequence_parallel, torch.float32):
            assert close(y, expected, 1e-6)
        for y, calls in pool.run(2, block_output, dropping, sequence_parallel, torch.float64):
            assert calls == 1
            assert close(y, expected_dropped)
            assert torch.equal(y == activations(config), dropped)


# --- sequence parallelism


BIASED = changed(TINY, bias=True, norm=Norm.LAYERNORM, activation=Activation.GELU)


def stack_gradients(group: TPGroup, config: ModelConfig, sequence_parallel: bool) -> dict[str, Tensor]:
    """The local gradients of a stack on this rank, and its output and input gradient."""
    stack = Stack(config, group=group, sequence_parallel=sequence_parallel, dtype=torch.float64)
    scatter_state(stack, part_of(random_state(config), "stack."), group)
    x = rows_of(activations(config), group, sequence_parallel).clone().requires_grad_()
    y = stack(x, context_of(config, x))
    y.backward(rows_of(activations(config).sin(), group, sequence_parallel))
    assert x.grad is not None
    grads = {name: parameter.grad for name, parameter in stack.named_parameters() if parameter.grad is not None}
    return grads | {"y": whole(y, group, sequence_parallel), "dx": whole(x.grad, group, sequence_parallel)}


@pytest.mark.parametrize("placement", Placement)
def test_c19_replicated_gradients_under_sequence_parallelism_are_the_sums(pool: Pool, placement: Placement) -> None:
    config = changed(BIASED, placement=placement)
    one = pool.run(1, stack_gradients, config, False)[0]
    replicated = [n for n in one if "norm" in n or n.endswith(("out.bias", "down.bias"))]
    norms = 1 if placement is Placement.PARALLEL else 2
    assert len(replicated) == 2 * (norms * config.layers + 1) + 2 * config.layers
    for ranks in (2, 3):
        found = pool.run(ranks, stack_gradients, config, True)
        for name in replicated:
            assert close(found[0][name], one[name]), name
            assert all(torch.equal(other[name], found[0][name]) for other in found[1:]), name


def test_c21_fourteen_tokens_of_sequences_of_seven_on_four_ranks(pool: Pool) -> None:
    one = pool.run(1, stack_gradients, BIASED, False)[0]
    for ranks in (2, 3, 4):
        for found in pool.run(ranks, stack_gradients, BIASED, True):
            assert close(found["y"], one["y"]) and close(found["dx"], one["dx"])


def wrong_rows(group: TPGroup) -> None:
    block = Block(TINY, group=group, sequence_parallel=True)
    x = torch.zeros(BATCH * SEQ, TINY.dim)  # all of them, where this rank's are due
    block(x, context_of(TINY, x))


def test_c21_other_than_this_ranks_tokens_are_refused_before_any_collective(pool: Pool) -> None:
    with pytest.raises(ValueError, match=r"expects an input of shape \(7, 16\), got \(14, 16\)"):
        pool.run(2, wrong_rows)


# --- query, key and value heads


def test_c25_multi_query_gradients_are_whole_on_every_rank(pool: Pool) -> None:
    config = changed(BIASED, kv_heads=1)
    one = pool.run(1, stack_gradients, config, False)[0]
    kv, inner = 2 * config.head_dim, config.heads * config.head_dim
    for ranks in (2, 3, 4):
        for sequence_parallel in (False, True):
            for found in pool.run(ranks, stack_gradients, config, sequence_parallel):
                for kind in ("weight", "bias"):
                    name = f"blocks.0.attention.qkv.{kind}"
                    mine, all_rows = found[name][-kv:], one[name][inner:]
                    assert close(mine, all_rows), (ranks, name)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks"), [(9, 3, 2), (9, 3, 4), (4, 2, 4), (14, 2, 4), (6, 2, 3), (5, 5, 4), (4, 1, 4)]
)
def test_c35_heads_that_do_not_divide_work(pool: Pool, heads: int, kv_heads: int, ranks: int) -> None:
    config = changed(TINY, heads=heads, kv_heads=kv_heads, head_dim=4, layers=1, bias=True)
    case, variant = Case(config), Variant(sequence_parallel=True)
    for results in pool.run(ranks, measure, case, make_inputs(case), [variant]):
        assert_equal(results[0], reference(case), config, EXACT, f"{ranks} ranks")


def build(group: TPGroup, kind: Callable[..., nn.Module], config: ModelConfig) -> None:
    kind(config, group=group)


@pytest.mark.parametrize("kind", [Block, Stack, Decoder])
def test_c35_more_ranks_than_query_heads_are_refused_at_construction(pool: Pool, kind: Callable[..., nn.Module]) -> None:
    config = changed(TINY, heads=3, kv_heads=1, head_dim=4)
    with pytest.raises(ValueError, match=r"3 query heads cannot be dealt over 4 tensor-parallel shards \(KV heads: 1\)"):
        pool.run(4, build, kind, config)


@pytest.mark.parametrize(("change", "message"), [({"d_ff": 3}, "3 .*4 tensor"), ({"vocab_size": 2}, "vocab: 2 .*4 tensor")])
def test_c41_sizes_below_the_number_of_ranks_are_refused(pool: Pool, change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pool.run(4, build, Decoder, changed(TINY, **change))


@pytest.mark.parametrize("d_ff", [3, 5])
@pytest.mark.parametrize("placement", Placement)
def test_c41_c42_odd_widths_equal_the_oracle(pool: Pool, d_ff: int, placement: Placement) -> None:
    """Where the fused gate and up of 2 * 3 rows would divide, but neither of its parts does."""
    config = changed(TINY, d_ff=d_ff, placement=placement, layers=1)
    case = Case(config)
    for results in pool.run(2, measure, case, make_inputs(case), [Variant()]):
        assert_equal(results[0], reference(case), config, EXACT, f"d_ff {d_ff}")


# --- optimizers, tied embeddings, recomputation


def tied_step(group: TPGroup, sequence_parallel: bool) -> tuple[Tensor, Tensor, list[str]]:
    config = changed(TINY, tied_embeddings=True)
    model = Decoder(config, group=group, sequence_parallel=sequence_parallel, dtype=torch.float64)
    scatter_state(model, random_state(config), group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(ids_of(config), ids_of(config, 1)).backward()
    grad = gather_state(model, group, gradients=True)["embedding.weight"]
    optimizer.step()
    return grad, gather_state(model, group)["embedding.weight"], [entry.name for entry in named_layouts(model)]


def test_c55_a_tied_weight_is_one_parameter_with_the_sum_of_both_gradients(pool: Pool) -> None:
    grad, after, names = pool.run(1, tied_step, False)[0]
    assert [name for name in names if "embedding" in name or "head" in name] == ["embedding.weight"]
    for ranks in (2, 4):
        for sequence_parallel in (False, True):
            for found_grad, found_after, found_names in pool.run(ranks, tied_step, sequence_parallel):
                assert close(found_grad, grad) and close(found_after, after) and found_names == names


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw, one tensor at a time": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=False, eps=1e-6),
    "adamw, foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=True, eps=1e-6),
    "adamw, fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True, eps=1e-6),
}


def steps(group: TPGroup, name: str, sequence_parallel: bool) -> dict[str, Tensor]:
    config = changed(TINY, kv_heads=1, bias=True)
    model = Decoder(config, group=group, sequence_parallel=sequence_parallel, dtype=torch.float64)
    before = random_state(config)
    scatter_state(model, before, group)
    optimizer = OPTIMIZERS[name](model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        model(ids_of(config, step), ids_of(config, step + 1)).backward()
        optimizer.step()
    return {key: value - before[key].to(value.device) for key, value in gather_state(model, group).items()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_c79_elementwise_optimizers_step_as_on_one_device(pool: Pool, name: str) -> None:
    expected = pool.run(1, steps, name, False)[0]
    for ranks in (2, 4):
        for sequence_parallel in (False, True):
            for found in pool.run(ranks, steps, name, sequence_parallel):
                assert all(close(found[key], value, 1e-9) for key, value in expected.items())


def recomputed(group: TPGroup, sequence_parallel: bool) -> tuple[bool, int]:
    """Whether checkpointing changes any bit of the loss and the gradients; how many more times blocks ran with it."""
    config = changed(TINY, dropout=0.2, attention_dropout=0.2, kv_heads=2)
    found, calls = [], []
    for checkpointing in (False, True):
        model = Decoder(
            config, group=group, sequence_parallel=sequence_parallel, activation_checkpointing=checkpointing, seed=4
        )
        calls.append(0)
        for block in model.stack.blocks:

            def count(module: nn.Module, inputs: Any) -> None:
                calls[-1] += 1

            block.dropout_1.register_forward_pre_hook(count)
        loss = model(ids_of(config), ids_of(config, 1), step=6)
        loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True)), calls[1] - calls[0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_c82_recomputation_draws_the_same_masks(pool: Pool, ranks: int) -> None:
    for sequence_parallel in (False, True):
        for same, again in pool.run(ranks, recomputed, sequence_parallel):
            assert same
            assert again == TINY.layers  # it did recompute


def test_c81_gelu_is_the_exact_form_and_gelu_tanh_the_approximation() -> None:
    x = torch.linspace(-4, 4, 101, dtype=torch.float64)
    exact = x * 0.5 * (1 + torch.erf(x / 2**0.5))
    approximate = 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
    for activation, expected in ((Activation.GELU, exact), (Activation.GELU_TANH, approximate)):
        block = Block(changed(TINY, activation=activation), group=TPGroup())
        torch.testing.assert_close(block.feedforward.mix([x])[0], expected, rtol=0, atol=1e-12)
    assert (exact - approximate).abs().max() > 1e-4  # they can be told apart
    with pytest.raises(ValueError, match="activation must be one of .*Activation.GELU_TANH.*, got 'gelu_fast'"):
        changed(TINY, activation="gelu_fast")
