"""Meta's consolidated files, made from tiny Llamas of transformers: read on any number of ranks, and merged to folders."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel.group import TPGroup, single_device
from tests.exact import exact
from tests.pool import Pool
from tests.programs import ROOT
from tpblock import CheckpointError, MetaOptions, load_pretrained
from tpblock.formats.checkpoint import read_config
from tpblock.formats.convert import merge, open_checkpoint, shard

SHAPE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8}
OPTIONS = MetaOptions(max_seq_len=128)
SCALED = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 500.0,
}
NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "model.layers": "layers",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
}


def llama(**changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    fields = SHAPE | {"num_key_value_heads": 4, "max_position_embeddings": 128, "initializer_range": 0.2} | changes
    with exact():
        model = LlamaForCausalLM(LlamaConfig(**fields, rms_norm_eps=1e-5)).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
    return model


def paired(weight: Tensor, heads: int) -> Tensor:
    """The rows of each head as rotary pairs: row i of its first half, row i of its second, and so on."""
    return torch.cat([torch.stack(head.chunk(2), 1).flatten(0, 1) for head in weight.chunk(heads)])


def meta_name(name: str) -> str:
    for theirs, metas in NAMES.items():
        name = name.replace(theirs, metas)
    return name


def write_meta(folder: Path, model: Any, files: int, embedding_dim: int, **params: Any) -> None:
    """A folder as Meta's training leaves it: each linear cut evenly, norms and rotary frequencies in every file."""
    config = model.config
    folder.mkdir(exist_ok=True)
    shards: list[dict[str, Tensor]] = [{"rope.freqs": torch.zeros(2)} for _ in range(files)]
    for theirs, value in model.state_dict().items():
        name = meta_name(theirs)
        if ".wq." in name or ".wk." in name:
            value = paired(value, config.num_attention_heads if ".wq." in name else config.num_key_value_heads)
        if value.dim() == 1:
            pieces = [value] * files
        else:
            by_columns = ".wo." in name or ".w2." in name or (name.startswith("tok_") and embedding_dim == 1)
            pieces = list(value.chunk(files, dim=int(by_columns)))
        for shard_, piece in zip(shards, pieces, strict=True):
            shard_[name] = piece.clone()
    for i, shard_ in enumerate(shards):
        torch.save(shard_, folder / f"consolidated.{i:02d}.pth")
    said = {
        "dim": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "vocab_size": config.vocab_size,
        "multiple_of": 16,
        "norm_eps": config.rms_norm_eps,
    } | params
    (folder / "params.json").write_text(json.dumps({key: value for key, value in said.items() if value is not None}))


def edit(path: Path, **changes: Tensor | None) -> None:
    tensors = torch.load(path, weights_only=True) | {name.replace("__", "."): value for name, value in changes.items()}
    torch.save({name: value for name, value in tensors.items() if value is not None}, path)


def logits(group: TPGroup, folder: Path, ids: Tensor, options: MetaOptions) -> Tensor:
    with torch.no_grad():
        return load_pretrained(folder, group=group, meta=options)(ids)


CASES: Mapping[str, tuple[int, int, dict[str, Any]]] = {
    "one file": (1, 0, {}),
    "two files, features cut": (2, 1, {}),
    "four files, vocabulary cut": (4, 0, {}),
    "four files, features cut, multi-head": (4, 1, {"num_key_value_heads": 8}),
    "four files, each with half of a KV head": (4, 0, {"num_key_value_heads": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_c67_logits_equal_transformers(pool: Pool, tmp_path: Path, case: str) -> None:
    files, embedding_dim, changes = CASES[case]
    model = llama(**changes)
    multi_head = model.config.num_key_value_heads == 8
    write_meta(tmp_path, model, files, embedding_dim, n_kv_heads=None if multi_head else model.config.num_key_value_heads)
    ids = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), exact():
        expected = model(ids).logits
    for ranks in (1, 2, 3, 4):
        for found in pool.run(ranks, logits, tmp_path, ids, OPTIONS):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("files", "embedding_dim"), [(1, 0), (2, 1), (4, 0)])
def test_merged_folder_has_the_weights_of_the_original(tmp_path: Path, files: int, embedding_dim: int) -> None:
    """C67: straight from Meta's files and by way of a sharded folder, bit by bit, and transformers loads it."""
    from transformers import LlamaForCausalLM

    model = llama(rope_parameters=SCALED).bfloat16()
    write_meta(tmp_path / "meta", model, files, embedding_dim, vocab_size=-1, use_scaled_rope=True, rope_theta=500.0)
    options = dataclasses.replace(OPTIONS, rope_factor=8.0)
    checkpoint = open_checkpoint(tmp_path / "meta", options)
    model.save_pretrained(tmp_path / "hf")
    assert checkpoint.config == read_config(tmp_path / "hf")[0]
    merge(checkpoint, tmp_path / "out", verify=True)
    shard(checkpoint, tmp_path / "tp3", 3, verify=True)
    merge(open_checkpoint(tmp_path / "tp3"), tmp_path / "out3")
    assert not (tmp_path / "out" / "params.json").exists()
    for out in ("out", "out3"):
        loaded = LlamaForCausalLM.from_pretrained(tmp_path / out, dtype="auto")
        assert loaded.dtype == torch.bfloat16
        assert loaded.config.rope_parameters == model.config.rope_parameters
        for name, value in model.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], value), name
        ids = torch.arange(9).view(1, 9)
        assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_what_params_json_does_not_say_is_asked_for(tmp_path: Path) -> None:
    write_meta(tmp_path, llama(), 1, 0, use_scaled_rope=True)
    with pytest.raises(CheckpointError, match=r"--max-seq-len.*2048 for Llama 1, 4096 for Llama 2, 8192 for Llama 3, 131072"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"--rope-factor.*8 for Llama 3\.1 and 3\.3, 32 for Llama 3\.2"):
        open_checkpoint(tmp_path, OPTIONS)
    checkpoint = open_checkpoint(tmp_path, MetaOptions(max_seq_len=128, rope_factor=32))
    assert checkpoint.hf.config["rope_scaling"]["factor"] == 32
    llama().save_pretrained(tmp_path / "hf")
    with pytest.raises(CheckpointError, match="is no folder of Meta's"):
        open_checkpoint(tmp_path / "hf", OPTIONS)


def test_c20_norms_that_differ_between_files(tmp_path: Path) -> None:
    model = llama()
    write_meta(tmp_path, model, 2, 1)
    name = "layers.1.ffn_norm.weight"
    first = model.state_dict()["model.layers.1.post_attention_layernorm.weight"]
    second = first.clone()
    second[3] += 0.25
    edit(tmp_path / "consolidated.01.pth", **{name: second})
    with pytest.raises(
        CheckpointError, match=rf"{re.escape(name)} of consolidated\.01\.pth differs .* by up to 0\.25; norm_policy"
    ):
        load_pretrained(tmp_path, group=single_device(), meta=OPTIONS)
    for policy, expected in (("first", first), ("mean", (first + second) / 2)):
        options = dataclasses.replace(OPTIONS, norm_policy=policy)  # type: ignore[arg-type]
        loaded = load_pretrained(tmp_path, group=single_device(), meta=options)
        assert torch.equal(loaded.state_dict()["stack.blocks.1.norm_2.weight"], expected)


class Payload:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return Path.touch, (self.target,)


def test_c93_a_payload_is_refused_and_does_not_run(tmp_path: Path) -> None:
    folder, mark = tmp_path / "meta", tmp_path / "ran"
    write_meta(folder, llama(), 1, 0)
    path = folder / "consolidated.00.pth"
    torch.save(torch.load(path, weights_only=True) | {"extra": Payload(mark)}, path)
    with pytest.raises(CheckpointError, match="is refused: its pickle asks for more than tensors"):
        open_checkpoint(folder, OPTIONS)
    assert not mark.exists()
    torch.load(path, weights_only=False)  # the payload is one
    assert mark.exists()
    mark.unlink()
    path.write_bytes(pickle.dumps(Payload(mark)))  # no archive at all
    with pytest.raises(CheckpointError, match=re.escape(str(path))):
        open_checkpoint(folder, OPTIONS)
    assert not mark.exists()


def test_c93_no_pickle_is_run_anywhere_in_the_source() -> None:
    for file in (file for folder in ("parallel", "tpblock", "launch") for file in (ROOT / folder).rglob("*.py")):
        text = file.read_text()
        assert not re.search(r"weights_only\s*=\s*False|\bpickle\.loads?\(", text), file
        assert text.count("torch.load(") == len(re.findall(r"torch\.load\([^()]*weights_only=True", text)), file


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda f: edit(f / "consolidated.01.pth", norm__weight=None), r"consolidated\.01\.pth lacks norm\.weight"),
        (lambda f: edit(f / "consolidated.01.pth", step=torch.ones(1)), r"lacks: consolidated\.01\.pth/step"),
        (lambda f: edit(f / "consolidated.01.pth", step=torch.tensor(1)), r"01\.pth: step is no vector or matrix"),
        (
            lambda f: edit(f / "consolidated.01.pth", step=torch.empty(3, device="meta")),
            r"01\.pth: step is no vector or matrix",
        ),
        (lambda f: edit(f / "consolidated.01.pth", step=torch.eye(3).to_sparse()), r"01\.pth: step is no vector or matrix"),
        (lambda f: pipe(f / "consolidated.01.pth"), r"cannot read .*01\.pth: it is no regular file"),
        (lambda f: torch.save([1], f / "consolidated.01.pth"), "is not a dict of tensors"),
        (lambda f: (f / "consolidated.01.pth").unlink(), "output.weight has 32 rows, vocab_size is 64"),
        (lambda f: (f / "consolidated.01.pth").rename(f / "consolidated.02.pth"), r"but no consolidated\.01\.pth"),
        (lambda f: (f / "consolidated.01.pth").write_bytes(b"\x00" * 99), "cannot read"),
        (
            lambda f: edit(f / "consolidated.01.pth", norm__weight=torch.ones(32)),
            "norm.weight is of torch.float32, torch.float64",
        ),
        (
            lambda f: edit(f / "consolidated.01.pth", norm__weight=torch.ones(31)),
            r"norm\.weight has the shapes \(32,\), \(31,\)",
        ),
        (lambda f: (f / "params.json").write_text('{"dim": 32, "n_layers": 2}'), "lacks n_heads"),
        (lambda f: (f / "params.json").write_text('{"vocab_size": 65}'), "output.weight has 64 rows, vocab_size is 65"),
        (lambda f: (f / "params.json").unlink(), "cannot read"),
    ],
)
def test_broken_folders(tmp_path: Path, change: Any, fault: str) -> None:
    write_meta(tmp_path, llama(), 2, 1)
    change(tmp_path)
    with pytest.raises(CheckpointError, match=fault):
        open_checkpoint(tmp_path, OPTIONS)
