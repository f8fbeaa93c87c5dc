"""Folders of pretrained models: broken ones, other configs and dtypes, and how they are written.

That each family computes what transformers does is in test_families.py, damage to files of every kind in test_hostile.py.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from parallel.group import TPGroup, single_device
from parallel.state import gather_state
from tests.pool import Pool
from tpblock import CheckpointError, load_pretrained, save_pretrained
from tpblock.formats.checkpoint import read_config

SHAPE = {"vocab_size": 61, "hidden_size": 36, "intermediate_size": 50, "num_hidden_layers": 2, "num_attention_heads": 6}


def write_llama(folder: Path) -> None:
    """A tiny random model of transformers, as several files."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, num_key_value_heads=3, rms_norm_eps=1e-6, initializer_range=0.2)
    LlamaForCausalLM(config).double().save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 1


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    write_llama(folder)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(original, tmp_path / "llama")


def break_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "gone"}))


def edit_tensors(folder: Path, **changes: Tensor | None) -> None:
    """Rewrites the file in which a tensor lies, without it or with another."""
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for name, value in changes.items():
            if name in tensors:
                tensors.pop(name)
                if value is not None:
                    tensors[name] = value
        save_file(tensors, path)


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (
            lambda folder: break_config(folder, architectures=["Bert"]),
            "Bert is not supported; there are GPT2.*, LlamaForCausalLM",
        ),
        (lambda folder: break_config(folder, rms_norm_eps="gone"), "config.json lacks rms_norm_eps"),
        (lambda folder: break_config(folder, hidden_act="gelu"), "hidden_act = 'gelu' is not supported"),
        (lambda folder: break_config(folder, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}), "rope type 'yarn'"),
        (lambda folder: break_config(folder, intermediate_size=49), r"gate_proj.weight has shape \(50, 36\), .*\(49, 36\)"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot read"),
        (lambda folder: edit_tensors(folder, **{NORM: None}), f"the index has {NORM} in .*, that file lacks it"),
        (lambda folder: edit_tensors(folder, **{NORM: torch.ones(35)}), r"model.norm.weight has shape \(35,\)"),
        (lambda folder: next(folder.glob("*.safetensors")).unlink(), r"cannot read .*model-\d+-of-\d+.safetensors: "),
        (
            lambda folder: next(folder.glob("*.safetensors")).write_bytes(b"\x00" * 20),
            r"cannot read .*model-\d+-of-\d+.safetensors: ",
        ),
    ],
)
def test_broken_folders(folder: Path, change: Any, fault: str) -> None:
    change(folder)
    with pytest.raises(CheckpointError, match=fault):
        load_pretrained(folder, group=single_device())


def test_a_tensor_that_the_index_lacks_too(folder: Path) -> None:
    edit_tensors(folder, **{NORM: None})
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"][NORM]
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=f"the tensor {NORM} is missing"):
        load_pretrained(folder, group=single_device())


def test_index_outside_the_folder(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][NORM] = "../elsewhere.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="outside the folder: '../elsewhere.safetensors'"):
        load_pretrained(folder, group=single_device())


def test_another_config(original: Path) -> None:
    """With dropout, whose masks follow the seed; one that has other parameters than the folder is refused."""
    config = dataclasses.replace(read_config(original)[0], dropout=0.5)
    ids = torch.arange(12).view(1, 12)
    losses = [
        load_pretrained(original, group=single_device(), config=config, seed=seed)(ids, labels=ids, step=1).item()
        for seed in (0, 0, 1)
    ]
    assert losses[0] == losses[1] != losses[2]
    for changes, fault in (
        ({"bias": True}, r"makes stack\.blocks\.0\.attention\.qkv\.bias of shape \(72,\), .* has none"),
        ({"layers": config.layers - 1}, r"makes no stack\.blocks\.\d\.attention\.out\.weight, .*, which .* has"),
        ({"tied_embeddings": True}, r"makes no head\.weight, which .* has"),
        ({"d_ff": 49}, r"makes stack\.blocks\.0\.feedforward\.up\.weight of shape \(98, 36\), .* has \(100, 36\)"),
    ):
        with pytest.raises(CheckpointError, match=f"the config given {fault}"):
            load_pretrained(original, group=single_device(), config=dataclasses.replace(config, **changes))


def trained(group: TPGroup, folder: Path, out: Path) -> dict[str, Tensor]:
    """Loads in float32, changes every weight, writes files of at most 20 kB."""
    model = load_pretrained(folder, group=group, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    save_pretrained(model, out, max_shard_size=20_000)
    return gather_state(model, group)


@pytest.mark.parametrize("ranks", [1, 2])
def test_changed_weights_in_another_dtype(pool: Pool, original: Path, tmp_path: Path, ranks: int) -> None:
    from transformers import AutoModelForCausalLM

    pool.run(ranks, trained, original, tmp_path / "out")
    files = list((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > len(list(original.glob("*.safetensors"))) and max(path.stat().st_size for path in files) < 24_000
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"
    before = AutoModelForCausalLM.from_pretrained(original, dtype="auto").state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").state_dict()
    for name, value in before.items():
        assert after[name].dtype == torch.float32
        assert torch.equal(after[name], value.float() + 1), name


def storages(group: TPGroup, folder: Path) -> list[tuple[int, int]]:
    model = load_pretrained(folder, group=group)
    return [(parameter.untyped_storage().nbytes(), parameter.nbytes) for parameter in model.parameters()]


def test_c74_a_shard_owns_its_storage_and_no_more(pool: Pool, tmp_path: Path) -> None:
    write_llama(tmp_path)
    for sizes in pool.run(2, storages, tmp_path):
        assert all(storage == own for storage, own in sizes)
