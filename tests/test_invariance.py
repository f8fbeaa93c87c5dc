"""Invariant mode: every byte of training is the same on any number of ranks, and each rule that makes it so is needed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from parallel import collectives, tree
from parallel import linear as linear_module
from parallel.checkpoint import load_checkpoint, save_checkpoint
from parallel.data import ReplicaAverage
from parallel.gradients import check_replicas, clip_grad_norm_, grad_norm
from parallel.group import TPGroup, single_device
from parallel.layout import Run
from parallel.linear import ColumnParallelLinear, RowParallelLinear
from parallel.regions import copies_for_ranks
from parallel.state import gather_state
from parallel.virtual import check_supported, weight_shards
from tests.pool import Pool
from tpblock import Activation, Bias, Decoder, LinearScaling, ModelConfig, Norm, Placement, Position, QKNorm
from tpblock.config import Parallelism
from tpblock.dropout import Dropout
from tpblock.norm import RMSNorm

TINY = ModelConfig(vocab_size=44, dim=52, layers=2, heads=8, kv_heads=4, head_dim=6, d_ff=76, max_seq_len=16, init_std=0.1)


@dataclass(frozen=True)
class Case:
    """A model, how it runs, and what it trains on."""

    config: ModelConfig = TINY
    virtual_shards: int | None = 4
    dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype | None = None
    sequence_parallel: bool = False
    activation_checkpointing: bool = False
    batch: int = 3
    seq: int = 7
    steps: int = 2
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def model(self, group: TPGroup) -> Decoder:
        return Decoder(
            self.config,
            group=group,
            virtual_shards=self.virtual_shards,
            sequence_parallel=self.sequence_parallel,
            reduce_dtype=self.reduce_dtype,
            activation_checkpointing=self.activation_checkpointing,
            dtype=self.dtype,
            seed=5,
        )

    def batch_of(self, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(self.config.vocab_size, (self.batch, self.seq + 1), generator=generator)
        return ids[:, :-1], ids[:, 1:]


Record = dict[str, Tensor]


def train(case: Case, group: TPGroup, first: int = 0, model: Decoder | None = None, optimizer: Any = None) -> Record:
    """Everything that training computes, gathered, by name."""
    model = model or case.model(group)
    group = model.group
    optimizer = optimizer or adamw(model)
    run: Record = {}
    for step in range(first, case.steps):
        ids, labels = case.batch_of(step)
        loss = model(ids, labels=labels, step=step, label_smoothing=case.label_smoothing, z_loss=case.z_loss)
        loss.backward()
        run[f"{step}/loss"] = loss.detach()
        run |= {f"{step}/gradient/{name}": g for name, g in gather_state(model, group, gradients=True).items()}
        run[f"{step}/norm"] = clip_grad_norm_(model, 0.5, group)
        run |= {f"{step}/clipped/{name}": g for name, g in gather_state(model, group, gradients=True).items()}
        optimizer.step()
        optimizer.zero_grad()
        run |= {f"{step}/weight/{name}": w for name, w in gather_state(model, group).items()}
    check_replicas(model, group)
    model.eval()
    with torch.no_grad():
        run["logits"] = model(case.batch_of(0)[0])
    return run


def adamw(model: Decoder) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def differing(a: Record, b: Record) -> list[str]:
    """The names under which the bytes are not the same."""
    assert a.keys() == b.keys() and len(a) > 10
    return [name for name in a if not torch.equal(octets(a[name]), octets(b[name]))]


def octets(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def against_single(group: TPGroup, cases: Sequence[Case]) -> list[list[str]]:
    """For each case what differs between ``group`` and the single device, on which no option of parallelism has a meaning."""
    found = []
    for case in cases:
        plain = dataclasses.replace(case, sequence_parallel=False, activation_checkpointing=False)
        ours = train(case, group)
        found.append(differing(ours, train(plain, single_device())) if group.rank == 0 else [])
    return found


PRECISIONS = [
    {"dtype": torch.float32},
    {"dtype": torch.bfloat16},
    {"dtype": torch.bfloat16, "reduce_dtype": torch.float32},
]
DROPOUT = {"dropout": 0.1, "attention_dropout": 0.1}
GPT = dict(
    norm=Norm.LAYERNORM, activation=Activation.GELU_TANH, position=Position.LEARNED, bias=True, tied_embeddings=True, **DROPOUT
)
CONFIGS = {
    "grouped-query": TINY,
    "multi-query": dataclasses.replace(TINY, kv_heads=1, vocab_size=257, dropout=0.1, bias=True),
    "gpt": dataclasses.replace(TINY, kv_heads=8, **GPT),
    "parallel": dataclasses.replace(TINY, placement=Placement.PARALLEL, kv_heads=2, bias=True, **DROPOUT),
    "two norms": dataclasses.replace(
        TINY, placement=Placement.PARALLEL_TWO_NORMS, norm=Norm.LAYERNORM, activation=Activation.GELU, bias=True, dropout=0.1
    ),
    "qk-norm": dataclasses.replace(TINY, kv_heads=2, bias=Bias.QKV, qk_norm=QKNorm.PER_HEAD),
    "window": dataclasses.replace(
        TINY, sliding_window=3, full_attention_layers=(1,), rope_scaling=LinearScaling(factor=2.0), **DROPOUT
    ),
    "uneven": dataclasses.replace(TINY, heads=9, kv_heads=3, head_dim=6, d_ff=101, vocab_size=53, tied_embeddings=True),
}


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_bytes_equal_the_single_device(pool: Pool, name: str, ranks: int) -> None:
    cases = [
        Case(CONFIGS[name], sequence_parallel=sp, activation_checkpointing=sp, label_smoothing=0.1 * sp, **precision)
        for precision in PRECISIONS
        for sp in (False, True)
    ]
    assert pool.run(ranks, against_single, cases)[0] == [[]] * len(cases)


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_in_a_narrower_dtype(pool: Pool, ranks: int) -> None:
    narrow: dict[str, Any] = {"dtype": torch.float32, "reduce_dtype": torch.bfloat16}
    cases = [Case(CONFIGS[name], sequence_parallel=sp, **narrow) for name in ("gpt", "two norms") for sp in (False, True)]
    assert pool.run(ranks, against_single, cases)[0] == [[]] * 4


def long_training(group: TPGroup, case: Case) -> list[str]:
    return against_single(group, [case])[0]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_twenty_steps(pool: Pool, ranks: int) -> None:
    config = dataclasses.replace(TINY, **DROPOUT)
    case = Case(config, virtual_shards=8, steps=20, sequence_parallel=True, activation_checkpointing=True)
    assert pool.run(ranks, long_training, case)[0] == []


@pytest.mark.parametrize("ranks", [3, 5, 8])
def test_runs_of_eight_virtual_shards(wide_pool: Pool, ranks: int) -> None:
    """Uneven runs of one, two and three shards, and a rank for every shard."""
    config = dataclasses.replace(TINY, kv_heads=2, **DROPOUT)
    cases = [
        Case(config, virtual_shards=8, sequence_parallel=sp, **p) for sp, p in ((True, PRECISIONS[0]), (False, PRECISIONS[1]))
    ]
    assert wide_pool.run(ranks, against_single, cases)[0] == [[]] * 2


@st.composite
def drawn_cases(draw: st.DrawFn) -> tuple[int, Case]:
    shards = draw(st.integers(2, 8))
    ranks = draw(st.integers(2, min(4, shards)))
    kv_heads = draw(st.integers(1, 4))
    heads = kv_heads * draw(st.integers(-(-shards // kv_heads), -(-shards // kv_heads) + 1))
    activation = draw(st.sampled_from(Activation))
    position = draw(st.sampled_from(Position))
    config = ModelConfig(
        vocab_size=draw(st.integers(shards, 70)),
        dim=draw(st.integers(2, 40)),
        layers=draw(st.integers(1, 2)),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 5)),
        d_ff=draw(st.integers(shards, 90)),
        activation=activation,
        norm=draw(st.sampled_from(Norm)),
        placement=draw(st.sampled_from(Placement)),
        position=position,
        bias=draw(st.sampled_from([Bias.NONE, Bias.OUT, Bias.QKV | Bias.FEEDFORWARD, Bias.ALL])),
        qk_norm=draw(st.sampled_from(QKNorm)),
        sliding_window=draw(st.sampled_from([None, 3])),
        tied_embeddings=draw(st.booleans()),
        dropout=draw(st.sampled_from([0.0, 0.2])),
        attention_dropout=draw(st.sampled_from([0.0, 0.2])),
        max_seq_len=16,
        init_std=0.3,
    )
    case = Case(
        config,
        virtual_shards=shards,
        sequence_parallel=draw(st.booleans()),
        activation_checkpointing=draw(st.booleans()),
        batch=draw(st.integers(1, 3)),
        seq=draw(st.integers(1, 9)),
        steps=1,
        label_smoothing=draw(st.sampled_from([0.0, 0.1])),
        z_loss=draw(st.sampled_from([0.0, 1e-2])),
        **draw(st.sampled_from(PRECISIONS)),
    )
    return ranks, case


@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(drawn=drawn_cases())
def test_a_hundred_drawn_configurations(pool: Pool, drawn: tuple[int, Case]) -> None:
    ranks, case = drawn
    assert pool.run(ranks, against_single, [case])[0] == [[]]


@pytest.mark.parametrize("virtual_shards", [None, 4])
def test_ranks_without_tokens(pool: Pool, virtual_shards: int | None) -> None:
    """They recompute the same course in backward as the others do, or these would wait for them."""
    config = dataclasses.replace(TINY, **DROPOUT)
    case = Case(config, virtual_shards, sequence_parallel=True, activation_checkpointing=True, batch=2, seq=1)
    found = pool.run(4, against_single, [case])[0][0]
    assert virtual_shards is None or found == []


# Each rule broken on purpose.


def local_sum_then_all_reduce(leaves: Sequence[Tensor], group: TPGroup) -> Tensor:
    """The subtrees of a rank as ever, then the backend's own order."""
    values = {Run(s, s + 1): leaf for s, leaf in enumerate(leaves, group.local_shards.start)}
    total = sum(tree.fold(node, values) for node in tree.subtrees(group.owners[group.rank], group.shards))
    return collectives.all_reduce(total, group) if isinstance(total, Tensor) else total


def left_fold(leaves: Sequence[Tensor], group: TPGroup) -> Tensor:
    """Shards of a rank from left to right, then ranks from left to right."""
    local = leaves[0]
    for leaf in leaves[1:]:
        local = local + leaf
    every = collectives.all_gather(local.reshape(1, -1), group, [1] * group.size).unbind(0)
    total = every[0]
    for other in every[1:]:
        total = total + other
    return total.view(leaves[0].shape)


def one_product_a_rank(xs: Sequence[Tensor], weight: Tensor, bias: Tensor | None, layout: Any, group: TPGroup) -> list[Tensor]:
    """All shards of a row-parallel weight in one product; those of a column-parallel one as ever."""
    if layout.dim == 0:
        return original_linear_shards(xs, weight, bias, layout, group)
    whole = F.linear(torch.cat(list(xs), -1), torch.cat(weight_shards(weight, layout, group.rank), 1))
    return [whole, *(torch.zeros_like(whole) for _ in xs[1:])]


original_linear_shards = linear_module.linear_shards


def tokens_by_rank(
    function: Callable[..., Tensor], per_token: Any, parameters: Any, *, group: TPGroup, tokens: int | None, **_: Any
) -> Tensor:
    copies = parameters if tokens is None else copies_for_ranks(parameters, group)
    return function(*per_token, *copies)


def norm_of_whole_tensors(model: Any, group: TPGroup, p: float = 2.0) -> Tensor:
    """Each parameter's local tensor as one, then an ordinary all-reduce."""
    powers = []
    for parameter, owners in ((e.parameter, e.layout.owners) for e in named(model)):
        power = torch.linalg.vector_norm(parameter.grad, p).pow(p)
        powers.append(power if owners else power / group.size)
    return collectives.all_reduce(torch.stack(powers).sum(), group).pow(1 / p)


def named(model: Any) -> Any:
    from parallel.state import named_layouts

    return named_layouts(model)


def local_dropout(self: Dropout, x: Tensor, context: Any, **_: Any) -> Tensor:
    return original_dropout(self, x, context, offset=0)


original_dropout = Dropout.forward


def patch_linears() -> AbstractContextManager[Any]:
    return mock.patch("parallel.linear.linear_shards", one_product_a_rank)


def patch_norms() -> AbstractContextManager[Any]:
    return mock.patch("tpblock.norm.by_token_shard", tokens_by_rank)


BROKEN: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "nothing": nullcontext,
    "left fold in rank order": lambda: mock.patch("parallel.tree.all_reduce", left_fold),
    "the backend's all-reduce": lambda: mock.patch("parallel.tree.all_reduce", local_sum_then_all_reduce),
    "one row product a rank": patch_linears,
    "token sums without the tree": patch_norms,
    "norm over whole local tensors": lambda: mock.patch("parallel.gradients.grad_norm", norm_of_whole_tensors),
    "dropout by local index": lambda: mock.patch("tpblock.dropout.Dropout.forward", local_dropout),
}


def broken_run(group: TPGroup, case: Case, rule: str) -> int:
    with BROKEN[rule]():
        return len(against_single(group, [case])[0])


@pytest.mark.parametrize("rule", BROKEN)
def test_each_rule_is_needed(pool: Pool, rule: str) -> None:
    config = dataclasses.replace(TINY, dim=96, d_ff=200, head_dim=12, dropout=0.1, attention_dropout=0.1)
    cases = [Case(config, virtual_shards=8, sequence_parallel=sp, batch=8, seq=16) for sp in (False, True)]
    found = [pool.run(ranks, broken_run, case, rule)[0] for ranks in (2, 3, 4) for case in cases]
    assert any(found) == (rule != "nothing")


# Checkpoints and data parallelism.


def train_on(group: TPGroup, case: Case) -> Record:
    return train(case, group)


def first_half(group: TPGroup, case: Case, path: str) -> None:
    model = case.model(group)
    optimizer = adamw(model)
    train(dataclasses.replace(case, steps=case.steps // 2), group, model=model, optimizer=optimizer)
    save_checkpoint(path, model, model.group, optimizer)


def second_half(group: TPGroup, case: Case, path: str) -> Record:
    model = case.model(group)
    optimizer = adamw(model)
    load_checkpoint(path, model, model.group, optimizer)
    return train(case, group, first=case.steps // 2, model=model, optimizer=optimizer)


def test_resume_on_another_number_of_ranks(pool: Pool, tmp_path: Any) -> None:
    config = dataclasses.replace(TINY, kv_heads=2, tied_embeddings=True, **DROPOUT)
    case = Case(config, steps=4, sequence_parallel=True)
    whole = pool.run(4, train_on, case)[0]
    for saved, resumed in ((2, 3), (3, 1), (1, 4)):
        path = str(tmp_path / f"{saved}-{resumed}")
        pool.run(saved, first_half, case, path)
        rest = pool.run(resumed, second_half, case, path)[0]
        assert differing(rest, {name: whole[name] for name in rest}) == []


def train_replicas(mesh: DeviceMesh, case: Case, micro_batches: int | None) -> Record:
    """Steps on a global batch of which each replica has its rows, in as many micro-batches as are its own."""
    replicas = TPGroup.from_mesh(mesh["dp"]).with_virtual_shards(micro_batches)
    model = case.model(TPGroup.from_mesh(mesh["tp"]))
    average, optimizer, run = ReplicaAverage(model, replicas), adamw(model), {}
    rows = case.batch // replicas.shards
    for step in range(case.steps):
        ids, labels = (t.split(rows) for t in case.batch_of(step))
        for micro in replicas.local_shards:
            model(ids[micro], labels=labels[micro], step=step, first_token=micro * rows * case.seq).backward()
            average.add()
        average.finish()
        run |= {f"{step}/gradient/{name}": g for name, g in gather_state(model, model.group, gradients=True).items()}
        run[f"{step}/norm"] = clip_grad_norm_(model, 0.5, model.group)
        optimizer.step()
        optimizer.zero_grad()
        run |= {f"{step}/weight/{name}": w for name, w in gather_state(model, model.group).items()}
    return run


@pytest.mark.parametrize("precision", PRECISIONS)
def test_data_parallel_replicas(pool: Pool, precision: dict[str, Any]) -> None:
    case = Case(dataclasses.replace(TINY, **DROPOUT), batch=8, **precision)
    two = {tp: pool.run_mesh(tp, 2, train_replicas, case, None)[0] for tp in (1, 2)}
    assert differing(two[1], two[2]) == []
    fixed = {
        (tp, dp): pool.run_mesh(tp, dp, train_replicas, case, 4)[0] for tp, dp in ((1, 1), (1, 2), (1, 4), (2, 2), (4, 1))
    }
    for run in fixed.values():
        assert differing(run, fixed[1, 1]) == []
    assert differing(two[1], fixed[1, 1])  # two halves are not four quarters: the comparison can tell


# What the mode refuses.


def test_refusals() -> None:
    case = Case()
    model, (ids, labels) = case.model(single_device()), case.batch_of(0)
    with pytest.raises(ValueError, match="autocast"), torch.autocast("cpu", torch.bfloat16):
        model(ids, labels=labels)
    for fullgraph in (False, True):
        torch.compiler.reset()
        with pytest.raises(AssertionError, match="invariant_mode_cannot_be_compiled"):
            torch.compile(model.stack.blocks[0], backend="eager", fullgraph=fullgraph)(torch.randn(3, 7, 52))
    with pytest.raises(AssertionError, match="invariant_mode_cannot_be_compiled"):
        torch.compile(model, backend="eager")(ids, labels=labels)
    on_gpu = mock.Mock(device=torch.device("cuda"))
    for mode in ({"mode": False}, {"mode": True, "warn_only": True}):
        torch.use_deterministic_algorithms(**mode)
        try:
            with pytest.raises(ValueError, match="on CUDA needs torch.use_deterministic_algorithms"):
                check_supported(on_gpu)
        finally:
            torch.use_deterministic_algorithms(False)
    for shards, fault in ((9, "8 query heads cannot be dealt over 9"), (0, "0 virtual shards"), (-1, "-1 virtual shards")):
        with pytest.raises(ValueError, match=fault):
            dataclasses.replace(case, virtual_shards=shards).model(single_device())
    with pytest.raises(ValueError, match="2 virtual shards cannot be dealt over 3 ranks"):
        TPGroup(0, 3).with_virtual_shards(2)


@pytest.mark.parametrize("virtual_shards", [1, 4])
def test_the_gradient_norm_asks_for_the_group_of_the_model(virtual_shards: int) -> None:
    model = Case(virtual_shards=virtual_shards).model(single_device())
    ids, labels = Case().batch_of(0)
    model(ids, labels=labels).backward()
    with pytest.raises(ValueError, match=f"cut into {virtual_shards} virtual shards, the group given into 1 shards"):
        clip_grad_norm_(model, 1.0, single_device())
    assert clip_grad_norm_(model, 1.0, model.group) > 0


def test_gradient_norm_without_cut_parameters() -> None:
    model = torch.nn.LayerNorm(3)
    model(torch.randn(2, 3)).square().sum().backward()
    assert grad_norm(model, TPGroup(virtual_shards=4)) > 0


def test_norms_must_know_all_tokens() -> None:
    """A rank that took its own tokens for all of them would sum the gradient over no others."""
    parallel = Parallelism(group=single_device().with_virtual_shards(2), sequence_parallel=True)
    with pytest.raises(ValueError, match="needs the number of tokens on all ranks"):
        RMSNorm(8, parallel=parallel)(torch.ones(4, 8))


def test_single_tokens_and_none() -> None:
    group = single_device().with_virtual_shards(2)
    first, second = ColumnParallelLinear(4, 6, group=group), RowParallelLinear(6, 4, group=group)
    for shape in [(4,), (0, 4), (0, 3, 4), (2, 3, 4)]:
        x = torch.randn(shape, requires_grad=True)
        y = second(first(x))
        y.sum().backward()
        assert y.shape == shape and x.grad is not None
