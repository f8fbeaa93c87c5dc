"""Loads Hugging Face folders (config.json, safetensors), each rank reading the slices that it owns."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from parallel.group import TPGroup
from parallel.state import NamedLayout, named_layouts
from tpblock.config import ModelConfig
from tpblock.families import Family, family_of
from tpblock.model import Decoder


def read_config(folder: str | Path) -> tuple[ModelConfig, Family]:
    """The model that a folder's config.json describes. A ValueError says what is missing or not supported."""
    path = Path(folder) / "config.json"
    try:
        hf_config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    family = family_of(hf_config)
    return family.config(hf_config), family


def load_pretrained(
    folder: str | Path,
    *,
    group: TPGroup,
    config: ModelConfig | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    **options: Any,
) -> Decoder:
    """A :class:`Decoder` with the weights of a Hugging Face folder.

    The model is built on the meta device; each rank then reads its slices of the files straight into its parameters.

    Args:
        group: the tensor-parallel ranks.
        config: what to build in place of the folder's own config, for example that one with dropout.
        dtype, device: of the parameters; values are converted.
        options: further arguments of :class:`Decoder` (``sequence_parallel``, ``virtual_shards``, ``seed`` of the dropout masks,
            ...).

    Raises:
        ValueError: if the architecture or a setting is not supported, a file is broken, or a tensor is missing, unknown or of
            another shape; it names it.
    """
    described, family = read_config(folder)
    config = config or described
    model = Decoder(config, group=group, device="meta", dtype=dtype, **options)
    model.to_empty(device=device or "cpu")
    with ExitStack() as stack, torch.no_grad():
        files = _open(Path(folder), stack)
        read = [_fill(entry, family, files, model.group.rank) for entry in named_layouts(model)]
    known = set().union(*read) | ({family.names["head.weight"]} if config.tied_embeddings else set())
    if unknown := sorted(files.keys() - known):
        raise ValueError(f"{folder} has tensors that the model lacks: {', '.join(unknown[:8])}")
    return model


def _fill(entry: NamedLayout, family: Family, files: Mapping[str, Any], rank: int) -> set[str]:
    """Reads this rank's slices of a parameter into it. Returns the names of the tensors that it consists of."""
    parameter, layout = entry.parameter, entry.layout
    if layout.dim is None:
        source = _hf_name(entry.name, None, family)
        parameter.copy_(_slice(files, source, layout.shape)[:])
        return {source}
    sources = {part.name: _hf_name(entry.name, part.name, family) for part in layout.parts}
    sizes = {part.name: part.size for part in layout.parts}
    for piece in layout.pieces(rank):
        shape = list(layout.shape)
        shape[layout.dim] = sizes[piece.part]
        start = piece.start - layout.part_starts[piece.part]
        rows = (slice(None),) * layout.dim + (slice(start, start + piece.length),)
        values = _slice(files, sources[piece.part], tuple(shape))[rows]
        parameter.narrow(layout.dim, piece.local, piece.length).copy_(values)
    return set(sources.values())


def _hf_name(name: str, part: str | None, family: Family) -> str:
    number = re.search(r"\.(\d+)\.", name)
    pattern = name.replace(number[0], ".{i}.") if number else name
    target = family.names.get(pattern) or family.names.get(f"{pattern}:{part}")
    if target is None:
        raise ValueError(f"the model has {name}, which models of this family lack: the config given is of another shape")
    return target.replace("{i}", number[1]) if number else target


def _slice(files: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> Any:
    """A tensor of the folder that is read as it is indexed, or a ValueError if it is missing or of another shape."""
    if name not in files:
        raise ValueError(f"the tensor {name} is missing")
    view = files[name].get_slice(name)
    if tuple(view.get_shape()) != shape:
        raise ValueError(f"{name} has shape {tuple(view.get_shape())}, the config makes it {shape}")
    return view


def _open(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """For each tensor name of the folder the open file that has it."""
    index = folder / "model.safetensors.index.json"
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else ["model.safetensors"]
        for name in names:
            if Path(name).name != name:
                raise ValueError(f"{index} names a file outside the folder: {name!r}")
        handles = [stack.enter_context(safe_open(folder / name, "pt")) for name in names]
    except (OSError, KeyError, json.JSONDecodeError, SafetensorError) as error:
        raise ValueError(f"cannot read the weights in {folder}: {error}") from error
    return {tensor: handle for handle in handles for tensor in handle.keys()}  # noqa: SIM118
