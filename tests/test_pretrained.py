"""Llama folders written by transformers, read on any number of ranks."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from parallel.group import TPGroup, single_device
from tests.pool import Pool
from tpblock import load_pretrained
from tpblock.formats.checkpoint import read_config

SHAPE = {"vocab_size": 61, "hidden_size": 36, "intermediate_size": 50, "num_hidden_layers": 2, "num_attention_heads": 6}


def write_llama(folder: Path, **changes: Any) -> Any:
    """A tiny random model of transformers, and its folder of several files."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, num_key_value_heads=3, rms_norm_eps=1e-6, initializer_range=0.2, **changes)
    model = LlamaForCausalLM(config).double().eval()
    model.save_pretrained(folder, max_shard_size="40KB")
    return model


def logits(group: TPGroup, folder: str, ids: Tensor, **options: Any) -> Tensor:
    model = load_pretrained(folder, group=group, dtype=torch.float64, **options)
    with torch.no_grad():
        return model(ids)


@pytest.mark.parametrize("tied", [False, True])
def test_logits_equal_transformers(pool: Pool, tmp_path: Path, tied: bool) -> None:
    theirs = write_llama(tmp_path, tie_word_embeddings=tied)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ids = torch.randint(61, (2, 9))
    with torch.no_grad():
        expected = theirs(ids).logits
    for ranks in (1, 2, 3, 4):
        for result in pool.run(ranks, logits, str(tmp_path), ids):
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)  # transformers norms in float32


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
        (lambda folder: break_config(folder, architectures=["Bert"]), "Bert is not supported; there are LlamaForCausalLM"),
        (lambda folder: break_config(folder, rms_norm_eps="gone"), "config.json lacks rms_norm_eps"),
        (lambda folder: break_config(folder, hidden_act="gelu"), "hidden_act = 'gelu' is not supported"),
        (lambda folder: break_config(folder, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}), "rope type 'yarn'"),
        (lambda folder: break_config(folder, intermediate_size=49), r"gate_proj.weight has shape \(50, 36\), .*\(49, 36\)"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot read"),
        (lambda folder: edit_tensors(folder, **{NORM: None}), "model.norm.weight is missing"),
        (lambda folder: edit_tensors(folder, **{NORM: torch.ones(35)}), r"model.norm.weight has shape \(35,\)"),
        (lambda folder: next(folder.glob("*.safetensors")).unlink(), "cannot read the weights"),
        (lambda folder: next(folder.glob("*.safetensors")).write_bytes(b"\x00" * 20), "cannot read the weights"),
    ],
)
def test_broken_folders(tmp_path: Path, change: Any, fault: str) -> None:
    write_llama(tmp_path)
    change(tmp_path)
    with pytest.raises(ValueError, match=fault):
        load_pretrained(tmp_path, group=single_device())


def test_index_outside_the_folder(tmp_path: Path) -> None:
    write_llama(tmp_path)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = "../elsewhere.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match="outside the folder"):
        load_pretrained(tmp_path, group=single_device())


def test_another_config(tmp_path: Path) -> None:
    """With dropout, whose masks follow the seed; one with parameters that the folder has no values for is refused."""
    write_llama(tmp_path)
    config = dataclasses.replace(read_config(tmp_path)[0], dropout=0.5)
    ids = torch.arange(12).view(1, 12)
    losses = [
        load_pretrained(tmp_path, group=single_device(), config=config, seed=seed)(ids, labels=ids, step=1).item()
        for seed in (0, 0, 1)
    ]
    assert losses[0] == losses[1] != losses[2]
    with pytest.raises(
        ValueError, match=r"the model has stack\.blocks\.0\.attention\.qkv\.bias, which models of this family lack"
    ):
        load_pretrained(tmp_path, group=single_device(), config=dataclasses.replace(config, bias=True))
