"""Hugging Face folders: config.json, safetensors files and, if there are several, their index."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from parallel.layout import Layout
from tpblock.config import ModelConfig
from tpblock.families import Family
from tpblock.formats.checkpoint import (
    Checkpoint,
    HuggingFace,
    check_plausible,
    model_layouts,
    parse_config,
    source_of,
    stored_as,
)
from tpblock.formats.files import CheckpointError, Entry, is_plain_name, read_header, read_json
from tpblock.formats.stored import StoredTensor, whole_tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
HEAD = "head.weight"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def open_hf(folder: Path) -> Checkpoint:
    """A Hugging Face folder. All headers are read and checked against the config, no weights.

    Raises:
        CheckpointError: naming the file, field or tensor at fault.
    """
    hf_config = read_json(folder / "config.json")
    config, family = parse_config(hf_config)
    entries, metadata = _read_headers(folder)
    check_plausible(config, entries.values())
    layouts = model_layouts(config)
    tensors = {}
    for name, stored in hf_names(config, family, layouts, entries).items():
        if name not in entries:
            raise CheckpointError(f"{folder}: the tensor {name} is missing")
        _check_entry(folder, name, stored, entries[name])
        tensors[name] = (stored, entries[name])
    copies = {}
    if config.tied_embeddings:
        for head in family.tensors.get(HEAD, ()):  # some folders hold it all the same
            if head.name in entries:
                embedding = whole_tensor("embedding.weight", layouts["embedding.weight"].shape)
                _check_entry(folder, head.name, embedding, entries[head.name])
                copies[head.name] = (embedding, entries[head.name])
    unknown = [name for name in entries if name not in tensors | copies and not name.endswith(family.not_weights)]
    if unknown:
        raise CheckpointError(f"{folder} has tensors that the model lacks: {', '.join(sorted(unknown)[:8])}")
    hf = HuggingFace(hf_config, {name: entries[name].path.name for name in entries if name in tensors}, metadata)
    return Checkpoint(
        folder, "Hugging Face folder", 1, config, family, hf, layouts, tensors, source_of(tensors.values()), copies
    )


def _check_entry(folder: Path, name: str, stored: StoredTensor, entry: Entry) -> None:
    if entry.shape != stored.shape:
        raise CheckpointError(f"{folder}: {name} has shape {entry.shape}, config.json makes it {stored.shape}")
    if not entry.dtype.is_floating_point:
        raise CheckpointError(f"{folder}: {name} is of {entry.dtype}, weights are floating-point numbers")


def hf_names(
    config: ModelConfig, family: Family, layouts: Mapping[str, Layout], names: Iterable[str]
) -> dict[str, StoredTensor]:
    """The tensors of a folder that has these names, which lack the family's prefix if the folder's all do."""
    stored: dict[str, StoredTensor] = {}
    for parameter, layout in layouts.items():
        stored |= stored_as(parameter, layout, family, config)
    if not any(name.startswith(family.prefix) for name in names):
        stored = {name.removeprefix(family.prefix): tensor for name, tensor in stored.items()}
    return stored


def _read_headers(folder: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """The tensors of all files of a folder."""
    index = folder / INDEX
    if not index.exists():
        pickles = [path.name for path in sorted(folder.iterdir()) if path.suffix in PICKLES]
        if pickles and not (folder / SINGLE).exists():
            raise CheckpointError(
                f"{folder} has {pickles[0]}, but no {SINGLE}: only safetensors files are read, since a pickle may run what it likes"
            )
        return read_header(folder / SINGLE)
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index} has no weight_map from names of tensors to names of files")
    files = sorted(set(weight_map.values()))
    if (folder / SINGLE).exists() and SINGLE not in files:
        raise CheckpointError(f"{folder} has {SINGLE}, and {INDEX} that names other files: which are the weights?")
    for file in files:
        if Path(file).name != file:
            raise CheckpointError(f"{index} names a file outside the folder: {file!r}")
        if not is_plain_name(file):
            raise CheckpointError(
                f"{index} names {file!r}: only safetensors files are read, since a pickle may run what it likes"
            )
    entries: dict[str, Entry] = {}
    metadata: dict[str, str] = {}
    for file in files:
        found, metadata = read_header(folder / file)
        for name, entry in found.items():
            if weight_map.get(name) != file:
                raise CheckpointError(f"{folder / file} has {name}, the index has it in {weight_map.get(name)}")
            entries[name] = entry
    if missing := sorted(weight_map.keys() - entries.keys()):
        raise CheckpointError(f"{folder}: the index has {missing[0]} in {weight_map[missing[0]]}, that file lacks it")
    return entries, metadata


def shard_by_size(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], limit: int) -> dict[str, str]:
    """The file of each tensor, no file larger than ``limit`` bytes unless by a single tensor."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, (dtype, shape) in tensors.items():
        bytes_ = dtype.itemsize * torch.Size(shape).numel()
        if groups[-1] and size + bytes_ > limit:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += bytes_
    if len(groups) == 1:
        return dict.fromkeys(groups[0], SINGLE)
    return {
        name: f"model-{i:05d}-of-{len(groups):05d}.safetensors" for i, names in enumerate(groups, start=1) for name in names
    }
