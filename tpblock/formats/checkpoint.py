"""A checkpoint of any format as something to read: its model's config, and where each global parameter lies in its files."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from parallel.group import TPGroup
from parallel.layout import Layout
from parallel.state import named_layouts
from tpblock.config import ModelConfig
from tpblock.families import Family, family_of
from tpblock.formats.files import CheckpointError, Entry, read_json
from tpblock.formats.stored import Source, StoredTensor, check_covered, hf_tensors
from tpblock.model import Decoder

SIDE_FILES = (".json", ".txt", ".model", ".jinja", ".md")
"""What else a folder holds that goes wherever the weights go: tokenizer, generation settings, licence (LICENSE and NOTICE, too)."""


@dataclass(frozen=True)
class HuggingFace:
    """How a model is written as a Hugging Face folder.

    Attributes:
        config: config.json.
        files: the file of each tensor.
        metadata: of the files.
    """

    config: Mapping[str, Any]
    files: Mapping[str, str]
    metadata: Mapping[str, str]


@dataclass(frozen=True)
class Checkpoint:
    """Weights in files.

    Attributes:
        path: the folder.
        kind: what it is, in words.
        ranks: into how many shards it is cut.
        config, family: the model.
        hf: how it was, or is to be, a Hugging Face folder.
        layouts: of every parameter, on one device.
        tensors: all tensors of the files, by name, or by ``file/name`` in formats whose files have the same names.
        source: the same by parameter, each parameter covered once.
        copies: tensors that repeat what the source has, named likewise: a tied head, what several ranks hold.
        checksums: the CRC-32 of each file, if the format has them.
    """

    path: Path
    kind: str
    ranks: int
    config: ModelConfig
    family: Family
    hf: HuggingFace
    layouts: Mapping[str, Layout]
    tensors: Mapping[str, tuple[StoredTensor, Entry]]
    source: Source
    copies: Mapping[str, tuple[StoredTensor, Entry]]
    checksums: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def dtype(self) -> torch.dtype:
        """The one dtype of all tensors, or a CheckpointError that names those there are."""
        found: dict[torch.dtype, str] = {}
        for name, (_, entry) in self.tensors.items():
            found.setdefault(entry.dtype, name)
        if len(found) > 1:
            told = ", ".join(f"{dtype} ({name})" for dtype, name in found.items())
            raise CheckpointError(f"{self.path} has tensors of several dtypes, {told}: say which one the model is to have")
        return next(iter(found))

    @property
    def bytes(self) -> int:
        return sum(entry.size for _, entry in self.tensors.values())


def read_config(folder: str | Path) -> tuple[ModelConfig, Family]:
    """The model that a folder's config.json describes.

    Raises:
        CheckpointError: if a field is missing or has a value that is not supported.
    """
    return parse_config(read_json(Path(folder) / "config.json"))


def parse_config(hf_config: Mapping[str, Any]) -> tuple[ModelConfig, Family]:
    """As :func:`read_config`, of what config.json holds."""
    try:
        family = family_of(hf_config)
        return family.config(hf_config), family
    except CheckpointError:
        raise
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
        raise CheckpointError(f"config.json makes no model: {error}") from error


def model_layouts(config: ModelConfig, ranks: int = 1) -> dict[str, Layout]:
    """The layouts of all parameters of a model on so many ranks, without building it.

    Raises:
        ValueError: if it cannot be cut over that many.
    """
    layouts = {}
    # Layers differ in values alone: one is built, and stands for all.
    one = dataclasses.replace(config, layers=1, full_attention_layers=())
    model = Decoder(one, group=TPGroup(0, ranks), device="meta", seed=None)
    for name, _, layout in named_layouts(model):
        for i in range(config.layers if name.startswith("stack.blocks.0.") else 1):
            layouts[name.replace("stack.blocks.0.", f"stack.blocks.{i}.")] = layout
    return layouts


def stored_as(parameter: str, layout: Layout, family: Family, config: ModelConfig) -> dict[str, StoredTensor]:
    """The Hugging Face tensors of a parameter by name."""
    pattern = ".".join("{i}" if word.isdigit() else word for word in parameter.split("."))
    if pattern not in family.tensors:
        raise CheckpointError(f"the model has {parameter}, which models of this family lack")
    tensors = hf_tensors(parameter, layout, family.tensors[pattern], config)
    check_covered(parameter, tensors.values(), layout.shape)
    return tensors


def check_plausible(config: ModelConfig, entries: Collection[Entry]) -> None:
    """A CheckpointError if the config makes a model far larger than the files, before its layers are gone through."""
    numbers = sum(math.prod(entry.shape) for entry in entries)
    if config.layers > len(entries):
        raise CheckpointError(f"config.json makes a model of {config.layers} layers, the files hold {len(entries)} tensors")
    if config.parameters() > 4 * numbers:
        parameters = f"{config.parameters():,}" if config.parameters() < 1 << 63 else "more than 2^63"
        raise CheckpointError(f"config.json makes a model of {parameters} parameters, the files hold {numbers:,} numbers")


def source_of(tensors: Iterable[tuple[StoredTensor, Entry]]) -> Source:
    by_parameter: dict[str, list[tuple[StoredTensor, Entry]]] = {}
    for stored, entry in tensors:
        by_parameter.setdefault(stored.parameter, []).append((stored, entry))
    return by_parameter
