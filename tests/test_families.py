"""Each family of Hugging Face models against transformers: tiny random models, written by it and read on any number of ranks.

transformers is imported where it is used, so that the workers of the pool need not load it.
"""

from __future__ import annotations

import filecmp
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from parallel.group import TPGroup, single_device
from parallel.state import gather_state, named_layouts
from tests.exact import exact
from tests.pool import Pool
from tests.programs import ROOT
from tests.tiny_models import MODELS, SIZES, SPECIAL, Model, build, gpt2, llama_like, neox
from tpblock import Activation, Placement, load_pretrained
from tpblock.families import FAMILIES
from tpblock.formats.checkpoint import Checkpoint
from tpblock.formats.convert import open_checkpoint, shard
from tpblock.formats.files import CheckpointError, Entry
from tpblock.formats.hf import hf_names
from tpblock.formats.stored import InMemory, Order, Stored, copy, whole_tensor
from tpblock.pretrained import save_pretrained
from tpblock.rope import LinearScaling, Llama3Scaling, LongRopeScaling

SEQ = 9


# --- transformers' side


Results = dict[str, Tensor]


@dataclass(frozen=True)
class Theirs:
    """A model of transformers, the folder that it was saved to, a batch, and what it computes."""

    folder: Path
    model: Any
    ids: Tensor
    results: Results

    @property
    def labels(self) -> Tensor:
        """The next tokens."""
        return torch.nn.functional.pad(self.ids[:, 1:], (0, 1), value=-100)


def stored_name(name: str, model: Any) -> str:
    """What transformers calls a parameter in a file."""
    return "embed_out.weight" if model.config.model_type == "gpt_neox" and name == "lm_head.weight" else name


def their_results(model: Any, ids: Tensor) -> Results:
    with exact():
        out = model(ids, labels=ids)
    model.zero_grad()
    out.loss.backward()
    grads = {f"grad/{stored_name(name, model)}": parameter.grad for name, parameter in model.named_parameters()}
    return {name: value.detach().clone() for name, value in ({"logits": out.logits, "loss": out.loss} | grads).items()}


def write(model: Model, folder: Path) -> Theirs:
    made = build(model)
    made.save_pretrained(folder, max_shard_size="8KB")
    ids = torch.randint(61, (2, SEQ), generator=torch.Generator().manual_seed(1))
    return Theirs(folder, made, ids, their_results(made, ids))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Theirs]:
    """The model of that name, made once."""
    made: dict[str, Theirs] = {}

    def get(name: str) -> Theirs:
        if name not in made:
            made[name] = write(MODELS[name], tmp_path_factory.mktemp(name))
        return made[name]

    return get


# --- our side


@dataclass(frozen=True)
class Variant:
    """How to load a model. ``tensors`` replaces entries of its family's table, ``config`` fields of its config."""

    dtype: torch.dtype = torch.float64
    sequence_parallel: bool = False
    tensors: Mapping[str, tuple[Stored, ...]] | None = None
    config: Mapping[str, Any] | None = None


def under_their_names(values: Mapping[str, Tensor], checkpoint: Checkpoint) -> Results:
    """Global tensors of ours as the checkpoint's family stores them."""
    results = {}
    for name, stored in hf_names(checkpoint.config, checkpoint.family, checkpoint.layouts, checkpoint.hf.files).items():
        value = values[stored.parameter]
        results[name] = torch.empty(stored.shape, dtype=value.dtype)
        copy(
            stored, results[name], {stored.parameter: [(whole_tensor(stored.parameter, tuple(value.shape)), InMemory(value))]}
        )
    return results


def measure(group: TPGroup, folder: Path, ids: Tensor, labels: Tensor, variants: list[Variant]) -> list[Results]:
    found = []
    for variant in variants:
        architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
        family = FAMILIES[architecture]
        right = open_checkpoint(folder)
        planted = replace(family, tensors={**family.tensors, **(variant.tensors or {})})
        config = replace(right.config, **variant.config) if variant.config else None
        with mock.patch.dict(FAMILIES, {architecture: planted}):
            model = load_pretrained(
                folder,
                group=group,
                config=config,
                dtype=variant.dtype,
                sequence_parallel=variant.sequence_parallel,
                loss_chunk=5,
            )
        logits = model(ids)
        loss = model(ids, labels)
        loss.backward()
        grads = under_their_names(gather_state(model, group, gradients=True), right)
        results = {"logits": logits, "loss": loss} | {f"grad/{name}": value for name, value in grads.items()}
        found.append({name: value.detach() for name, value in results.items()})
    return found


def distances(results: Results, expected: Results) -> dict[str, float]:
    """The norm of each difference, relative to the norm of what is expected."""
    assert results.keys() == expected.keys(), results.keys() ^ expected.keys()
    assert all(results[name].shape == value.shape for name, value in expected.items())
    return {name: ((results[name].double() - value).norm() / value.norm()).item() for name, value in expected.items()}


TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}


def wrong(results: Results, expected: Results, variant: Variant) -> dict[str, float]:
    return {name: d for name, d in distances(results, expected).items() if not d <= TOLERANCES[variant.dtype]}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_logits_loss_and_all_gradients_equal_transformers(
    pool: Pool, theirs: Callable[[str], Theirs], name: str, ranks: int
) -> None:
    it = theirs(name)
    assert len(list(it.folder.glob("*.safetensors"))) > 1
    variants = [Variant(), Variant(dtype=torch.float32, sequence_parallel=ranks == 3)]
    if ranks in (2, 4):
        variants.append(Variant(sequence_parallel=True))
    for outcome in pool.run(ranks, measure, it.folder, it.ids, it.labels, variants):
        for variant, results in zip(variants, outcome, strict=True):
            assert not wrong(results, it.results, variant), (ranks, variant)


def test_exact_computes_what_transformers_leaves_to_float32() -> None:
    from transformers.models.llama import modeling_llama

    x = torch.randn(4, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    norm = modeling_llama.LlamaRMSNorm(64, eps=1e-5).double()
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert (norm(x) - expected).abs().max() > 1e-9
    with exact():
        assert torch.zeros(1).float().dtype == torch.float64
        assert (norm(x) - expected).abs().max() < 1e-14
    assert torch.zeros(1).float().dtype == torch.float32
    assert modeling_llama.torch is torch


# --- mistakes that must show


LAYER = "stack.blocks.{i}."
QKV, UP = LAYER + "attention.qkv.weight", LAYER + "feedforward.up.weight"


def plant(architecture: str, parameter: str, **changes: Any) -> dict[str, tuple[Stored, ...]]:
    """An entry of a family's table with other fields."""
    return {parameter: tuple(replace(stored, **changes) for stored in FAMILIES[architecture].tensors[parameter])}


def swapped(architecture: str, parameter: str, *parts: str) -> dict[str, tuple[Stored, ...]]:
    stored = FAMILIES[architecture].tensors[parameter]
    return {parameter: tuple(replace(each, parts=(part,)) for each, part in zip(stored, parts, strict=True))}


WRONG_TABLES = {
    "q and k swapped": ("llama", swapped("LlamaForCausalLM", QKV, "k", "q", "v")),
    "gate and up swapped": ("llama", swapped("LlamaForCausalLM", UP, "up", "gate")),
    "[up | gate]": ("phi3", plant("Phi3ForCausalLM", UP, parts=("up", "gate"))),
    "[Q | K | V] read head by head": ("gpt2", plant("GPT2LMHeadModel", QKV, order=Order.PER_HEAD)),
    "heads read as [Q | K | V]": ("neox", plant("GPTNeoXForCausalLM", QKV, order=Order.CONCATENATED)),
    "heads of the bias read as [Q | K | V]": (
        "neox",
        plant("GPTNeoXForCausalLM", LAYER + "attention.qkv.bias", order=Order.CONCATENATED),
    ),
    "a square matrix not transposed": ("gpt2", plant("GPT2LMHeadModel", LAYER + "attention.out.weight", transposed=False)),
    "rotary pairs": ("llama", plant("LlamaForCausalLM", QKV, pairs=True)),
}


@pytest.mark.parametrize("mistake", WRONG_TABLES)
def test_wrong_tables_show(pool: Pool, theirs: Callable[[str], Theirs], mistake: str) -> None:
    name, tensors = WRONG_TABLES[mistake]
    it, variant = theirs(name), Variant(dtype=torch.float32, tensors=tensors)
    for outcome in pool.run(2, measure, it.folder, it.ids, it.labels, [variant]):
        found = wrong(outcome[0], it.results, variant)
        assert found["logits"] > 1e-2
        assert len(found) > len(it.results) / 2


WRONG_CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"norm_eps": 1.1e-3}),
    ("llama", {"rope_theta": 10_500.0}),
    ("llama3", {"rope_scaling": None}),
    ("llama3", {"rope_scaling": Llama3Scaling(factor=4, low_freq_factor=1, high_freq_factor=5, original_max_seq_len=8)}),
    ("llama-biases", {"rope_scaling": LinearScaling(factor=2.6)}),
    ("mistral", {"sliding_window": 5}),
    ("mistral", {"sliding_window": None}),
    ("qwen2-window", {"full_attention_layers": (1,)}),
    ("qwen2-window", {"full_attention_layers": (0, 1)}),
    ("gpt2", {"activation": Activation.GELU}),
    ("gpt2-untied", {"activation": Activation.GELU_TANH}),
    ("neox", {"placement": Placement.PRE}),
    ("neox", {"rotary_fraction": 0.5}),
    ("neox-sequential", {"placement": Placement.PARALLEL_TWO_NORMS}),
    (
        "phi3",
        {
            "rope_scaling": LongRopeScaling(
                long_factor=(2, 5), short_factor=(1, 1.5), original_max_seq_len=8, attention_factor=1.4
            )
        },
    ),
    (
        "phi3",
        {
            "rope_scaling": LongRopeScaling(
                long_factor=(2, 5), short_factor=(1, 1.5), original_max_seq_len=9, attention_factor=1
            )
        },
    ),
]


def wrong_logits(group: TPGroup, folder: Path, ids: Tensor, changes: Mapping[str, Any]) -> Tensor:
    config = replace(open_checkpoint(folder).config, **changes)
    return load_pretrained(folder, group=group, config=config, dtype=torch.float32)(ids).detach()


@pytest.mark.parametrize(("name", "changes"), WRONG_CONFIGS)
def test_wrong_configs_show(theirs: Callable[[str], Theirs], name: str, changes: dict[str, Any]) -> None:
    """Each field is read, and float32's tolerance is below what the smallest mistake makes of it."""
    it, variant = theirs(name), Variant(dtype=torch.float32)
    logits = wrong_logits(single_device(), it.folder, it.ids, changes)
    assert wrong({"logits": logits}, {"logits": it.results["logits"]}, variant)


# --- writing, and what is read


def rewrite(group: TPGroup, folder: Path, out: Path, virtual_shards: int | None = None) -> None:
    save_pretrained(load_pretrained(folder, group=group, virtual_shards=virtual_shards), out)


@pytest.mark.parametrize("name", MODELS)
def test_folders_are_written_as_they_were(pool: Pool, theirs: Callable[[str], Theirs], tmp_path: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM

    it = theirs(name)
    for ranks, virtual_shards in ((1, None), (3, None), (2, 4)):
        out = tmp_path / str(ranks)
        pool.run(ranks, rewrite, it.folder, out, virtual_shards)
        files = {path.name for path in it.folder.iterdir()}
        assert {path.name for path in out.iterdir()} == files
        assert json.loads((out / "config.json").read_text()) == json.loads((it.folder / "config.json").read_text())
        same, different, _ = filecmp.cmpfiles(it.folder, out, files - {"config.json"}, shallow=False)
        assert len(same) == len(files) - 1 > 2 and not different
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "3", dtype="auto").state_dict()
    assert again.keys() == it.model.state_dict().keys()
    assert all(torch.equal(again[key], value) for key, value in it.model.state_dict().items())


def bytes_read(group: TPGroup, folder: Path) -> dict[str, int]:
    """Of loading: what it copies from files, and what it maps of tensors that are cut along their rows. Of the model: what it
    holds, of that the parameters that are not cut, and those that are stored as tensors cut along their rows."""
    checkpoint = open_checkpoint(folder)
    by_rows = {
        (entry.path, entry.start)
        for stored, entry in checkpoint.tensors.values()
        if checkpoint.layouts[stored.parameter].dim == 0 and not stored.transposed
    }
    found = dict.fromkeys(("copied", "mapped by rows"), 0)
    rows = Entry.rows

    def counting_copy(*args: Any, **options: Any) -> int:
        with mock.patch.object(Entry, "rows", counting_rows):
            size = copy(*args, **options)
        found["copied"] += size
        return size

    def counting_rows(entry: Entry, first: int, stop: int, *, sparse: bool = False) -> Tensor:
        values = rows(entry, first, stop, sparse=sparse)
        found["mapped by rows"] += values.nbytes * ((entry.path, entry.start) in by_rows)
        return values

    with mock.patch("tpblock.pretrained.copy", counting_copy):
        model = load_pretrained(folder, group=group)
    transposed = {stored.parameter for stored, _ in checkpoint.tensors.values() if stored.transposed}
    layouts = [(name, parameter.nbytes, layout) for name, parameter, layout in named_layouts(model)]
    return found | {
        "held": sum(size for _, size, _ in layouts),
        "not cut": sum(size for _, size, layout in layouts if layout.replicated),
        "held by rows": sum(size for name, size, layout in layouts if layout.dim == 0 and name not in transposed),
    }


EVEN = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 40}
EVEN_MODELS = {
    "llama": llama_like("Llama", **EVEN | {"num_key_value_heads": 4}),
    "qwen3": llama_like("Qwen3", **EVEN | {"num_key_value_heads": 4, "head_dim": 8, "tie_word_embeddings": True}),
    "gpt2": gpt2(vocab_size=64, n_embd=32, n_head=4, n_inner=40),
    "neox": neox(**EVEN),
    "phi3": llama_like("Phi3", **EVEN | {"num_key_value_heads": 4}),
}


@pytest.mark.parametrize("name", EVEN_MODELS)
def test_each_rank_reads_its_share_alone(pool: Pool, tmp_path: Path, name: str) -> None:
    build(EVEN_MODELS[name]).save_pretrained(tmp_path, max_shard_size="20KB")
    total = open_checkpoint(tmp_path).bytes
    for ranks in (1, 2, 4):
        for found in pool.run(ranks, bytes_read, tmp_path):
            assert found["copied"] == found["held"] == found["not cut"] + (total - found["not cut"]) // ranks
            assert found["mapped by rows"] == found["held by rows"] < found["held"]
            assert 0 < found["not cut"] < total / 4


# --- folders as the hub has them


def edit(folder: Path, out: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], **fields: Any) -> Path:
    """A folder of one file, with other tensors and other fields of config.json ("gone" removes one)."""
    tensors = {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}
    config = json.loads((folder / "config.json").read_text()) | fields
    out.mkdir()
    save_file(
        {name: value.contiguous() for name, value in change(tensors).items()}, out / "model.safetensors", {"format": "pt"}
    )
    (out / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value != "gone"}))
    return out


def logits_of(group: TPGroup, folder: Path, ids: Tensor) -> Tensor:
    return load_pretrained(folder, group=group)(ids).detach()


def test_gpt2_as_on_the_hub(pool: Pool, theirs: Callable[[str], Theirs], tmp_path: Path) -> None:
    """Without the prefix, with the causal masks that old files hold; both are written as transformers reads them."""
    from transformers import GPT2LMHeadModel

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors = {name.removeprefix("transformer."): value for name, value in tensors.items()}
        masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 16, 16).tril().bool() for i in range(2)}
        return tensors | masks | {"h.1.attn.masked_bias": torch.tensor(-1e4)}

    it = theirs("gpt2")
    folder = edit(it.folder, tmp_path / "hub", change, tie_word_embeddings="gone", n_ctx=16)
    assert "h.0.attn.c_attn.bias" in load_file(folder / "model.safetensors")
    for ranks in (1, 2):
        for logits in pool.run(ranks, logits_of, folder, it.ids):
            torch.testing.assert_close(logits, it.results["logits"], rtol=0, atol=1e-10)
    pool.run(2, rewrite, folder, tmp_path / "again")
    read, written = (set(load_file(f / "model.safetensors")) for f in (folder, tmp_path / "again"))
    assert read - written == {"h.0.attn.bias", "h.1.attn.bias", "h.1.attn.masked_bias"} and written < read
    state = GPT2LMHeadModel.from_pretrained(tmp_path / "again", dtype="auto").state_dict()
    assert all(torch.equal(state[name], value) for name, value in it.model.state_dict().items())


def test_pythia_as_on_the_hub(pool: Pool, theirs: Callable[[str], Theirs], tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        layer = "gpt_neox.layers.1.attention."
        buffers = {f"{layer}bias": torch.ones(1, 1, 16, 16).bool(), f"{layer}masked_bias": torch.tensor(-1e9)}
        return tensors | buffers | {f"{layer}rotary_emb.inv_freq": torch.ones(1)}

    it = theirs("neox")
    old = {"rotary_emb_base": 100, "rotary_pct": 0.25, "rope_parameters": "gone", "attention_bias": "gone"}
    folder = edit(it.folder, tmp_path / "hub", change, **old)
    for logits in pool.run(2, logits_of, folder, it.ids):
        torch.testing.assert_close(logits, it.results["logits"], rtol=0, atol=1e-10)


def test_a_tied_head_that_is_stored(pool: Pool, theirs: Callable[[str], Theirs], tmp_path: Path) -> None:
    """As in Qwen3-0.6B. It must be the embedding; what is written is without it."""

    def with_head(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}

    def with_another(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors = with_head(tensors)
        tensors["lm_head.weight"][-1, -1] += 1  # which the last rank alone holds
        return tensors

    it = theirs("qwen3")
    folder = edit(it.folder, tmp_path / "same", with_head)
    for logits in pool.run(3, logits_of, folder, it.ids):
        torch.testing.assert_close(logits, it.results["logits"], rtol=0, atol=1e-10)
    pool.run(3, rewrite, folder, tmp_path / "again")
    assert "lm_head.weight" not in load_file(tmp_path / "again" / "model.safetensors")
    folder = edit(it.folder, tmp_path / "another", with_another)
    with pytest.raises(CheckpointError, match="the embedding is tied to the head, but the head is another tensor"):
        pool.run(3, logits_of, folder, it.ids)
    folder = edit(it.folder, tmp_path / "short", lambda tensors: tensors | {"lm_head.weight": torch.zeros(60, 18).double()})
    with pytest.raises(CheckpointError, match=r"lm_head.weight has shape \(60, 18\), config.json makes it \(61, 18\)"):
        pool.run(3, logits_of, folder, it.ids)


# --- faults that users of other libraries met


def local_state(group: TPGroup, folder: Path) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter, _ in named_layouts(load_pretrained(folder, group=group))}


def test_c18_biases_of_qwen2(pool: Pool, theirs: Callable[[str], Theirs], tmp_path: Path) -> None:
    """q, k and v biases are read, none may lack, none is left over, and ranks that share a KV head share its bias."""
    it = theirs("qwen2")  # 6 query heads, 2 KV heads, head_dim 4
    name = "model.layers.1.self_attn.k_proj.bias"
    bias = it.model.state_dict()[name]
    for rank, state in enumerate(pool.run(4, local_state, it.folder)):
        rows = state["stack.blocks.1.attention.qkv.bias"][-8:-4]
        assert torch.equal(rows, bias.view(2, 4)[rank // 2])
    folder = edit(it.folder, tmp_path / "less", lambda tensors: {key: t for key, t in tensors.items() if key != name})
    with pytest.raises(CheckpointError, match=f"the tensor {name} is missing"):
        open_checkpoint(folder)
    extra = "model.layers.1.self_attn.o_proj.bias"
    folder = edit(it.folder, tmp_path / "more", lambda tensors: tensors | {extra: torch.zeros(24).double()})
    with pytest.raises(CheckpointError, match=f"tensors that the model lacks: {extra}"):
        open_checkpoint(folder)


def fused(order: Order, q: Tensor, k: Tensor, v: Tensor, kv_heads: int, head_dim: int) -> Tensor:
    """q, k and v as one tensor, written out with views."""
    if order is Order.CONCATENATED:
        return torch.cat([q, k, v])
    heads = [t.reshape(kv_heads, -1, head_dim, *t.shape[1:]) for t in (q, k, v)]
    return torch.cat(heads, dim=1).reshape(-1, *q.shape[1:])


def logits_with(group: TPGroup, folder: Path, architecture: str, tensors: Any, ids: Tensor) -> Tensor:
    family = FAMILIES[architecture]
    with mock.patch.dict(FAMILIES, {architecture: replace(family, tensors={**family.tensors, **tensors})}):
        return logits_of(group, folder, ids)


@pytest.mark.parametrize(
    ("name", "order"),
    [("llama", Order.CONCATENATED), ("llama", Order.PER_HEAD), ("qwen2", Order.CONCATENATED), ("qwen2", Order.PER_GROUP)],
)
def test_c44_each_order_of_fused_tensors(
    pool: Pool, theirs: Callable[[str], Theirs], tmp_path: Path, name: str, order: Order
) -> None:
    it = theirs(name)
    kv_heads = it.model.config.num_key_value_heads
    head_dim = it.model.config.hidden_size // it.model.config.num_attention_heads

    def fuse(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for key in [key for key in tensors if "q_proj" in key]:
            parts = [tensors.pop(key.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj")]
            tensors[key.replace("q_proj", "qkv")] = fused(order, *parts, kv_heads, head_dim)
        return tensors

    folder = edit(it.folder, tmp_path / "fused", fuse)
    table = {
        f"{LAYER}attention.qkv.{kind}": (Stored(f"model.layers.{{i}}.self_attn.qkv.{kind}", ("q", "k", "v"), order),)
        for kind in ("weight", "bias")
    }
    architecture = MODELS[name].architecture
    for ranks in (1, 2, 3):
        for logits in pool.run(ranks, logits_with, folder, architecture, table, it.ids):
            torch.testing.assert_close(logits, it.results["logits"], rtol=0, atol=1e-10)


def test_c44_an_unknown_order_is_refused(theirs: Callable[[str], Theirs]) -> None:
    it = theirs("phi3")
    for order in (None, "zigzag"):
        table = plant("Phi3ForCausalLM", QKV, order=order)
        with pytest.raises(ValueError, match=rf"qkv_proj.weight holds 3 parts: .* Order.PER_GROUP, not {order!r}"):
            logits_with(single_device(), it.folder, "Phi3ForCausalLM", table, it.ids)


def test_c45_the_order_is_stated_and_a_mismatch_shows(theirs: Callable[[str], Theirs], tmp_path: Path) -> None:
    """The architecture's table states it, since no shape tells; what a sharded folder says of its parts must fit the config."""
    for architecture, family in FAMILIES.items():
        for stored in family.tensors[QKV]:
            assert len(stored.parts) == 1 or isinstance(stored.order, Order), architecture
    shard(open_checkpoint(theirs("phi3").folder), tmp_path / "sharded", 2)
    path = tmp_path / "sharded" / "manifest.json"
    manifest = json.loads(path.read_text())
    parts = manifest["tensors"]["stack.blocks.0.attention.qkv.weight"]["parts"]
    parts[1], parts[2] = parts[2], parts[1]
    path.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"blocks\.0\.attention\.qkv\.weight is cut in another way"):
        open_checkpoint(tmp_path / "sharded")


def test_c47_conv1d_of_gpt2_on_two_ranks(pool: Pool, theirs: Callable[[str], Theirs]) -> None:
    it = theirs("gpt2")
    weights = it.model.state_dict()
    up, qkv = weights["transformer.h.0.mlp.c_fc.weight"], weights["transformer.h.0.attn.c_attn.weight"]
    assert (up.shape, qkv.shape) == ((20, 23), (20, 60))  # [in, out], neither square
    states = pool.run(2, local_state, it.folder)
    assert torch.equal(torch.cat([state["stack.blocks.0.feedforward.up.weight"] for state in states]), up.t())
    first = states[0]["stack.blocks.0.attention.qkv.weight"]  # 3 of 5 heads, of 4 rows each
    assert torch.equal(first, torch.cat([part[:, :12].t() for part in qkv.split(20, dim=1)]))
    for logits in pool.run(2, logits_of, it.folder, it.ids):
        torch.testing.assert_close(logits, it.results["logits"], rtol=0, atol=1e-10)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_c51_fused_and_separate_gate_and_up_are_read_alike(
    pool: Pool, theirs: Callable[[str], Theirs], tmp_path: Path, ranks: int
) -> None:
    def separate(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for key in [key for key in tensors if "gate_up_proj" in key]:
            gate, up = tensors.pop(key).chunk(2)
            tensors |= {key.replace("gate_up", "gate"): gate, key.replace("gate_up", "up"): up}
        for key in [key for key in tensors if "qkv_proj" in key]:
            parts = tensors.pop(key).split([24, 12, 12])
            tensors |= {key.replace("qkv", part): value for part, value in zip("qkv", parts, strict=True)}
        return tensors

    it = theirs("phi3")
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}
    folder = edit(it.folder, tmp_path / "llama", separate, architectures=["LlamaForCausalLM"], **rope)
    for ours, same in zip(pool.run(ranks, local_state, it.folder), pool.run(ranks, local_state, folder), strict=True):
        assert ours.keys() == same.keys()
        assert all(torch.equal(ours[name], value) for name, value in same.items())


def test_c54_tied_models_are_written_without_a_head_and_untied_ones_need_it(
    pool: Pool, theirs: Callable[[str], Theirs], tmp_path: Path
) -> None:
    it = theirs("llama3")
    pool.run(2, rewrite, it.folder, tmp_path / "again")
    names = json.loads((tmp_path / "again" / "model.safetensors.index.json").read_text())["weight_map"]
    assert "lm_head.weight" not in names and "model.embed_tokens.weight" in names
    for logits in pool.run(2, logits_of, tmp_path / "again", it.ids):
        torch.testing.assert_close(logits, it.results["logits"], rtol=0, atol=1e-10)
    folder = edit(it.folder, tmp_path / "untied", lambda tensors: tensors, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"the tensor lm_head.weight is missing"):
        pool.run(2, logits_of, folder, it.ids)


# --- docs/families.md


def documented(group: TPGroup, code: str, folder: Path, ids: Tensor) -> Tensor:
    with mock.patch.dict(FAMILIES):
        exec(code, {})
        return logits_of(group, folder, ids)


@pytest.mark.parametrize("bias", [False, True])
def test_the_family_of_the_documentation(pool: Pool, tmp_path: Path, bias: bool) -> None:
    text = (ROOT / "docs" / "families.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    rope = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
    it = write(Model("StableLmForCausalLM", SIZES | SPECIAL | {"rope_parameters": rope, "use_qkv_bias": bias}), tmp_path)
    for ranks in (1, 2):
        for logits in pool.run(ranks, documented, code, tmp_path, it.ids):
            torch.testing.assert_close(logits, it.results["logits"], rtol=0, atol=1e-10)
    assert "StableLmForCausalLM" not in FAMILIES


def test_the_documentation_lists_the_families() -> None:
    text = (ROOT / "docs" / "families.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == {"architectures", *FAMILIES}
