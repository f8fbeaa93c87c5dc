"""The way between shards and global tensors: in memory and through checkpoints, from any number of ranks to any other."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.testing import assert_close

from parallel.checkpoint import load_checkpoint, save_checkpoint
from parallel.group import TPGroup, single_device
from parallel.regions import gather_pieces, take_pieces
from parallel.state import gather_state, named_layouts, scatter_state
from tests.helpers import OpRecord, Sample, labelled
from tests.pool import Pool
from tpblock.config import Activation, ModelConfig, Norm, Placement, Position
from tpblock.model import Decoder

RANKS = [1, 2, 3, 4]

CONFIGS = {
    "llama": ModelConfig(vocab_size=13, dim=8, layers=2, heads=4, kv_heads=2, d_ff=10),
    "gpt": ModelConfig(
        vocab_size=10,
        dim=8,
        layers=1,
        heads=4,
        d_ff=11,
        activation=Activation.GELU,
        norm=Norm.LAYERNORM,
        position=Position.LEARNED,
        max_seq_len=6,
        bias=True,
        tied_embeddings=True,
    ),
    "parallel": ModelConfig(
        vocab_size=11, dim=8, layers=1, heads=9, kv_heads=3, head_dim=2, d_ff=7, placement=Placement.PARALLEL, bias=True
    ),
}


def decoder(config: ModelConfig, group: TPGroup, **options: Any) -> Decoder:
    return Decoder(config, group=group, dtype=options.pop("dtype", torch.float64), **options)


def labels(model: nn.Module) -> dict[str, Tensor]:
    """A global tensor for each parameter, no two elements alike over all of them."""
    state, first = {}, 0
    for name, _, layout in named_layouts(model):
        state[name] = labelled(*layout.shape, first=first)
        first += state[name].numel()
    return state


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# -- the layouts of a module tree


def test_a_tied_parameter_comes_up_once() -> None:
    tied = [entry.name for entry in named_layouts(decoder(CONFIGS["gpt"], single_device()))]
    assert tied[:2] == ["positions", "embedding.weight"] and "head.weight" not in tied
    assert "head.weight" in [entry.name for entry in named_layouts(decoder(CONFIGS["llama"], single_device()))]
    model = nn.Module()
    model.a, model.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    model.b.weight = model.a.weight
    assert [entry.name for entry in named_layouts(model)] == ["a.weight"]
    assert list(gather_state(model, single_device())) == ["a.weight"]


@pytest.mark.parametrize("name", CONFIGS)
def test_names_are_those_of_torch(name: str) -> None:
    model = decoder(CONFIGS[name], single_device())
    entries = list(named_layouts(model))
    assert [(e.name, e.parameter) for e in entries] == list(model.named_parameters())
    assert all(e.layout.shape == tuple(e.parameter.shape) for e in entries)


def every_module_has_its_layouts(group: TPGroup, config: ModelConfig) -> None:
    """However a model came about: directly, copied, converted, or from the meta device."""
    model = decoder(config, group)
    expected = {name: layout for name, _, layout in named_layouts(model)}
    cut = [name for name, layout in expected.items() if not layout.replicated]
    assert (len(cut) >= 4) and all("norm" not in name and name != "positions" for name in cut)

    def check(model: nn.Module) -> None:
        entries = list(named_layouts(model))
        assert {e.name: e.layout for e in entries} == expected
        assert all(tuple(e.parameter.shape) == e.layout.local_shape(group.rank) for e in entries)

    check(model)
    clone = copy.deepcopy(model)
    check(clone)
    assert same(gather_state(clone, group), gather_state(model, group))
    with torch.no_grad():
        next(clone.parameters()).zero_()
    assert not same(gather_state(clone, group), gather_state(model, group))
    ids = torch.zeros(1, 3, dtype=torch.long)
    copy.deepcopy(model)(ids, ids).backward()  # a copy communicates over the same ranks

    check(copy.deepcopy(model).to(torch.bfloat16))
    meta = decoder(config, group, device="meta")
    check(meta)
    meta.to_empty(device=torch.get_default_device())
    check(meta)
    meta.initialise()
    assert same(gather_state(meta, group), gather_state(model, group))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("ranks", RANKS)
def test_layouts_survive_copies_and_conversions(pool: Pool, ranks: int, name: str) -> None:
    pool.run(ranks, every_module_has_its_layouts, CONFIGS[name])


# -- in memory


def there_and_back(group: TPGroup, config: ModelConfig) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Each rank's shard of labelled tensors, and all of them gathered again."""
    model = decoder(config, group)
    state = labels(model)
    scatter_state(model, state, group)
    gathered = gather_state(model, group)
    assert same(gathered, state)
    for name, parameter, layout in named_layouts(model):
        assert torch.equal(parameter, take_pieces(state[name], layout, group.rank))
        parameter.grad = parameter.detach() + 0.5
    assert same(gather_state(model, group, gradients=True), {name: value + 0.5 for name, value in state.items()})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert same(gathered, state), "what was gathered is a view of the model"
    scatter_state(model, gathered, group)
    gathered["embedding.weight"].zero_()
    assert model.embedding.weight.any(), "the model is a view of what was scattered"
    return dict(model.named_parameters()), gathered


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("ranks", RANKS)
def test_scattered_and_gathered_again(pool: Pool, ranks: int, name: str) -> None:
    pool.run(ranks, there_and_back, CONFIGS[name])


def test_c40_a_vocabulary_of_ten_on_four_ranks(pool: Pool) -> None:
    state = labels(decoder(CONFIGS["gpt"], single_device()))
    shards = [shard["embedding.weight"] for shard, _ in pool.run(4, there_and_back, CONFIGS["gpt"])]
    assert [len(rows) for rows in shards] == [3, 3, 2, 2]
    assert torch.equal(torch.cat(shards), state["embedding.weight"])
    assert state["embedding.weight"].shape == (10, 8)


def test_c49_gate_and_up_are_cut_alike(pool: Pool) -> None:
    """d_ff 10 on 2 ranks: rank r has gate rows 5r to 5r+5, then up rows 5r to 5r+5."""
    whole = labels(decoder(CONFIGS["llama"], single_device()))["stack.blocks.0.feedforward.up.weight"]
    for rank, (shard, _) in enumerate(pool.run(2, there_and_back, CONFIGS["llama"])):
        rows = slice(5 * rank, 5 * rank + 5)
        assert torch.equal(shard["stack.blocks.0.feedforward.up.weight"], torch.cat([whole[:10][rows], whole[10:][rows]]))


def reshard(group: TPGroup, config: ModelConfig, state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = decoder(config, group)
    scatter_state(model, state, group)
    return dict(model.named_parameters()), gather_state(model, group)


@pytest.mark.parametrize("name", CONFIGS)
def test_c50_from_one_to_two_to_four_and_back(pool: Pool, name: str) -> None:
    """Equal at every stage, and the shards too: a fault that undoes itself would show in these."""
    config = CONFIGS[name]
    state = labels(decoder(config, single_device()))
    at: dict[int, Any] = {}
    for ranks in (1, 2, 4, 2, 1):
        results = pool.run(ranks, reshard, config, state)
        shards = [shard for shard, _ in results]
        assert all(same(a, b) for a, b in zip(at.setdefault(ranks, shards), shards, strict=True))
        for _, gathered in results:
            assert same(gathered, state)
        state = results[-1][1]
    for rank in range(4):  # by the definition of the parts: nothing of the library's own arithmetic
        rows = at[4][rank]["embedding.weight"]
        count = len(rows)
        start = sum(len(at[4][r]["embedding.weight"]) for r in range(rank))
        assert torch.equal(rows, state["embedding.weight"][start : start + count])


def refused(group: TPGroup, change: dict[str, Tensor | None], *, checkpoint: Path | None = None) -> str:
    """The error, after checks that nothing was sent and nothing changed."""
    model = Sample(group)
    before = gather_state(model, group)
    state: dict[str, Any] = {name: value + 1 for name, value in before.items()} | change
    state = {name: value for name, value in state.items() if value is not None}
    with OpRecord() as record, pytest.raises(ValueError) as caught:
        scatter_state(model, state, group)
    assert record.collectives == []
    assert same(gather_state(model, group), before)
    return str(caught.value)


@pytest.mark.parametrize("ranks", [1, 2])
def test_states_that_do_not_fit(pool: Pool, ranks: int) -> None:
    for change, expected in (
        ({"out.bias": None, "norm": None}, "the state lacks norm, out.bias"),
        ({"out.biass": torch.zeros(6)}, "the state has tensors that the model lacks: out.biass"),
        ({"out.weight": torch.zeros(8, 6)}, "out.weight has shape (8, 6), the model's is (6, 8)"),
        ({"scale": torch.zeros(1)}, "scale has shape (1,), the model's is ()"),
    ):
        assert pool.run(ranks, refused, change) == [expected] * ranks


# -- checkpoints


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)


def train(model: Decoder, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator("cpu").manual_seed(step)
        ids = torch.randint(model.config.vocab_size, (2, 5), generator=generator, device="cpu").to(torch.get_default_device())
        optimizer.zero_grad()
        model(ids, ids.roll(-1)).backward()
        optimizer.step()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer, group: TPGroup) -> dict[str, Tensor]:
    """Weights and optimizer state, global."""
    state = gather_state(model, group)
    for name, parameter, layout in named_layouts(model):
        for key, value in optimizer.state.get(parameter, {}).items():
            whole = gather_pieces(value, layout, group) if value.ndim else value
            state[f"{name}.{key}"] = whole.clone()
    return state


def save_at(group: TPGroup, config: ModelConfig, path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Three steps, a checkpoint, three more: the state at the checkpoint and at the end."""
    model = decoder(config, group)
    optimizer = make_optimizer(model)
    train(model, optimizer, range(3))
    save_checkpoint(path, model, group, optimizer, {"step": 3, "data": [1, 2.5, None, "x"]})
    saved = everything(model, optimizer, group)
    train(model, optimizer, range(3, 6))
    return saved, everything(model, optimizer, group)


def load_at(group: TPGroup, config: ModelConfig, path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The state as loaded into a model with other values, and after three steps more."""
    model = decoder(config, group, seed=99)
    optimizer = make_optimizer(model)
    train(model, optimizer, range(7, 8))  # what is there is replaced
    extra = load_checkpoint(path, model, group, optimizer)
    assert extra == {"step": 3, "data": [1, 2.5, None, "x"]}
    loaded = everything(model, optimizer, group)
    train(model, optimizer, range(3, 6))
    return loaded, everything(model, optimizer, group)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("saved_at", [1, 2, 4])
def test_c78_saved_on_some_ranks_and_resumed_on_others(pool: Pool, tmp_path: Path, saved_at: int, name: str) -> None:
    """Weights and moments come back bit for bit, and training goes on as if it had not stopped."""
    config, path = CONFIGS[name], tmp_path / "checkpoint"
    saved, finished = pool.run(saved_at, save_at, config, path)[0]
    assert any(key.endswith("exp_avg_sq") for key in saved)
    for ranks in RANKS:
        for loaded, resumed in pool.run(ranks, load_at, config, path):
            assert same(loaded, saved)
            assert resumed.keys() == finished.keys()
            for key, value in resumed.items():
                assert_close(value, finished[key], rtol=1e-6, atol=1e-9)
    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    weights = {key: meta for key, meta in metadata.items() if not key.startswith("optimizer.")}
    assert weights.keys() == {key for key, _, _ in named_layouts(decoder(config, single_device()))}
    for meta in metadata.values():  # every element is there once, also of rows that several ranks hold
        assert sum(math.prod(chunk.sizes) for chunk in meta.chunks) == math.prod(meta.size)


def save_labels(group: TPGroup, config: ModelConfig, path: Path, virtual_shards: int | None) -> None:
    group = group.with_virtual_shards(virtual_shards)
    model = decoder(config, group)
    scatter_state(model, labels(model), group)
    save_checkpoint(path, model, group)


def load_labels(group: TPGroup, config: ModelConfig, path: Path, virtual_shards: int | None) -> None:
    group = group.with_virtual_shards(virtual_shards)
    model = decoder(config, group)
    load_checkpoint(path, model, group)
    state = labels(model)
    for name, parameter, layout in named_layouts(model):
        assert torch.equal(parameter, take_pieces(state[name], layout, group.rank)), name


@pytest.mark.parametrize("name", CONFIGS)
def test_checkpoints_go_between_virtual_shards_and_ranks(pool: Pool, tmp_path: Path, name: str) -> None:
    """A rank with several virtual shards may hold the same KV rows twice."""
    config = CONFIGS[name]
    for at, virtual_shards in ((2, 4), (1, 4), (3, None)):
        path = tmp_path / f"{at} {virtual_shards}"
        pool.run(at, save_labels, config, path, virtual_shards)
        for ranks, other in ((1, None), (3, None), (1, 4), (2, 4), (3, 4)):
            pool.run(ranks, load_labels, config, path, other)


def save_half(group: TPGroup, path: Path) -> None:
    """Special values and half precision, weights only."""
    model = Sample(group, torch.bfloat16)
    state = {name: value.bfloat16() for name, value in labels(model).items()}
    state["norm"] = torch.tensor([math.nan, -0.0, math.inf, 1e-40, 1, 2]).bfloat16()
    scatter_state(model, state, group)
    save_checkpoint(path, model, group)


def load_half(group: TPGroup, path: Path) -> dict[str, Tensor]:
    model = Sample(group, torch.bfloat16)
    assert load_checkpoint(path, model, group) == {}
    return gather_state(model, group)


def test_checkpoints_keep_every_bit_of_half_precision(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "folder with a space" / "checkpoint"
    pool.run(4, save_half, path)
    model = Sample(single_device(), torch.bfloat16)
    expected = {name: value.bfloat16() for name, value in labels(model).items()}
    expected["norm"] = torch.tensor([math.nan, -0.0, math.inf, 1e-40, 1, 2]).bfloat16()
    for ranks in RANKS:
        for loaded in pool.run(ranks, load_half, path):
            for name, value in expected.items():
                assert torch.equal(loaded[name].view(-1).view(torch.int16), value.view(-1).view(torch.int16)), name
    assert sorted(item.name for item in path.parent.iterdir()) == ["checkpoint"]


def frozen_norm(group: TPGroup, path: Path) -> None:
    """A parameter that is not trained has no optimizer state, before and after."""

    def build() -> tuple[Decoder, torch.optim.AdamW]:
        model = decoder(CONFIGS["llama"], group)
        model.stack.norm.requires_grad_(False)
        return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])

    model, optimizer = build()
    train(model, optimizer, range(1))
    save_checkpoint(path, model, group, optimizer)
    again, other = build()
    load_checkpoint(path, again, group, other)
    assert same(everything(again, other, group), everything(model, optimizer, group))
    states = [o.state_dict()["state"] for o in (optimizer, other)]
    assert states[0].keys() == states[1].keys()


@pytest.mark.parametrize("ranks", [1, 2])
def test_parameters_that_are_not_trained(pool: Pool, tmp_path: Path, ranks: int) -> None:
    pool.run(ranks, frozen_norm, tmp_path / "checkpoint")


def change_config(config: ModelConfig, **change: Any) -> ModelConfig:
    return ModelConfig(**{**vars(config), **change})


def load_into_another(group: TPGroup, path: Path, config: ModelConfig, dtype: torch.dtype, with_optimizer: bool) -> str:
    """The error on loading, after a check that the model and its optimizer are as before."""
    model = decoder(config, group, dtype=dtype)
    optimizer = make_optimizer(model)
    train(model, optimizer, range(1))
    before = everything(model, optimizer, group)
    with pytest.raises(ValueError) as caught:
        load_checkpoint(path, model, group, optimizer if with_optimizer else None)
    assert same(everything(model, optimizer, group), before)
    return str(caught.value).replace(str(path), "PATH")


def test_c75_checkpoints_that_do_not_fit(pool: Pool, tmp_path: Path) -> None:
    base, path = CONFIGS["llama"], tmp_path / "checkpoint"
    pool.run(2, save_at, base, path)
    up = "stack.blocks.0.feedforward.up"
    shape = "stack.blocks.0.feedforward.up.weight has shape (20, 8) in PATH, the model's is (22, 8)"
    cases: list[tuple[ModelConfig, torch.dtype, str]] = [
        (change_config(base, bias=True), torch.float64, f"PATH lacks .*{up}.bias"),
        (change_config(base, layers=1), torch.float64, r"PATH has tensors that the model lacks: stack\.blocks\.1\."),
        (change_config(base, tied_embeddings=True), torch.float64, r"PATH has tensors that the model lacks: head\.weight"),
        (change_config(base, d_ff=11), torch.float64, shape.replace("(", r"\(").replace(")", r"\)")),
        (base, torch.float32, r"embedding\.weight is torch\.float64 in PATH, the model's is torch\.float32"),
    ]
    for ranks in (1, 2):
        for config, dtype, message in cases:
            for error in pool.run(ranks, load_into_another, path, config, dtype, True):
                assert_matches(error, message)


def assert_matches(text: str, pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        raise ValueError(text)


def test_c75_no_checkpoint_and_no_optimizer(pool: Pool, tmp_path: Path) -> None:
    path, config = tmp_path / "checkpoint", CONFIGS["gpt"]
    for ranks in (1, 2):
        for error in pool.run(ranks, load_into_another, path, config, torch.float64, False):
            assert error == "there is no checkpoint PATH"
    save_checkpoint(path, decoder(config, single_device()), single_device())
    for ranks in (1, 2):
        for error in pool.run(ranks, load_into_another, path, config, torch.float64, True):
            assert error == "PATH was saved without optimizer state"
    with pytest.raises(ValueError, match="exists already"):
        save_checkpoint(path, decoder(config, single_device()), single_device())


def interrupted_save(group: TPGroup, old: Path, new: Path, failing: int) -> str:
    """A rank's disk is full while the second checkpoint is written: the error, after checks that nothing is lost."""
    model = Sample(group)
    before = gather_state(model, group)
    save_checkpoint(old, model, group, extra={"step": 1})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    full = mock.patch.object(FileSystemWriter, "write_data", side_effect=OSError("no space left"))
    with pytest.raises(RuntimeError) as caught:
        if group.rank == failing:
            with full:
                save_checkpoint(new, model, group, extra={"step": 2})
        else:
            save_checkpoint(new, model, group, extra={"step": 2})
    assert not new.exists()
    with pytest.raises(ValueError, match="there is no checkpoint"):
        load_checkpoint(new, model, group)
    assert load_checkpoint(old, model, group) == {"step": 1}
    assert same(gather_state(model, group), before)
    save_checkpoint(new, model, group, extra={"step": 3})  # the disk has space again
    assert load_checkpoint(new, model, group) == {"step": 3}
    return str(caught.value)


@pytest.mark.parametrize(("ranks", "failing"), [(1, 0), (2, 0), (2, 1), (4, 2)])
def test_a_failed_write_names_its_rank_and_leaves_the_old_checkpoint(
    pool: Pool, tmp_path: Path, ranks: int, failing: int
) -> None:
    for error in pool.run(ranks, interrupted_save, tmp_path / "old", tmp_path / "new", failing):
        assert_matches(error, rf"writing the checkpoint .*new failed: rank {failing}: .*no space left")
    assert sorted(item.name for item in tmp_path.iterdir()) == ["new", "old"]


def save_sample(group: TPGroup, path: Path) -> None:
    save_checkpoint(path, Sample(group), group)


def load_damaged(group: TPGroup, path: Path) -> None:
    model = Sample(group)
    with torch.no_grad():
        model.norm.fill_(7)
    before = gather_state(model, group)
    with pytest.raises(RuntimeError, match="reading the checkpoint"):
        load_checkpoint(path, model, group)
    assert same(gather_state(model, group), before)


@pytest.mark.parametrize("files", ["*.distcp", ".metadata", "extra.json"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_damaged_checkpoint_leaves_the_model_alone(pool: Pool, tmp_path: Path, ranks: int, files: str) -> None:
    pool.run(2, save_sample, tmp_path / "checkpoint")
    for file in (tmp_path / "checkpoint").glob(files):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    pool.run(ranks, load_damaged, tmp_path / "checkpoint")


def test_a_new_run_does_not_keep_files_of_an_interrupted_one(pool: Pool, tmp_path: Path) -> None:
    """Four ranks die in the middle, two start again: their checkpoint is theirs alone."""
    partial = tmp_path / "checkpoint.partial"
    partial.mkdir()
    (partial / "__3_0.distcp").write_bytes(b"left over")
    pool.run(2, save_sample, tmp_path / "checkpoint")
    assert sorted(item.name for item in tmp_path.iterdir()) == ["checkpoint"]
    assert sorted(item.name for item in (tmp_path / "checkpoint").glob("*.distcp")) == ["__0_0.distcp", "__1_0.distcp"]
