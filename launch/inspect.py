"""Shows what is in a checkpoint of any format: the model, its files, and how each tensor is cut.

python -m launch.inspect Llama-2-7b-tp4 --verify --check-finite
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Annotated

import tyro

from launch.convert import Meta, describe, new_console, new_table, progress, run, size
from parallel.layout import Layout
from tpblock.config import ModelConfig
from tpblock.formats.checkpoint import Checkpoint
from tpblock.formats.convert import check_checksums, check_copies, check_finite, open_checkpoint
from tpblock.formats.meta import MetaOptions
from tpblock.formats.stored import StoredTensor


@dataclass(frozen=True)
class InspectConfig:
    """Show what is in a checkpoint: a Hugging Face folder, one that launch.shard wrote, or Meta's consolidated files."""

    path: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """What to look at."""
    verify: bool = False
    """Read all files: check their checksums, if the format has them, and that values held several times are the same."""
    check_finite: bool = False
    """Look for NaN and infinity, and name the tensors that have them."""
    meta: Meta = field(default_factory=MetaOptions)


def inspect(config: InspectConfig) -> None:
    console = new_console()
    checkpoint = open_checkpoint(config.path, config.meta)
    describe(checkpoint, console)
    console.print(summary(checkpoint.config))
    table = new_table("file", ">tensors", ">numbers", ">bytes")
    for file, tensors in by_file(checkpoint).items():
        entries = [checkpoint.tensors[name][1] for name in tensors]
        numbers = sum(entry.size // entry.dtype.itemsize for entry in entries)
        table.add_row(file, str(len(entries)), f"{numbers:,}", size(sum(entry.size for entry in entries)))
    console.print(table)
    table = new_table("tensor", "dtype", "global shape", "shapes in the files", "cut")
    for row in dict.fromkeys(rows(checkpoint)):
        table.add_row(*row)
    console.print(table)
    with progress(console) as stages:
        if config.verify:
            check_checksums(checkpoint, stages)
            check_copies(checkpoint, stages)
        if config.check_finite:
            check_finite(checkpoint, stages)
    if config.verify:
        told = "checksums agree" if checkpoint.checksums else "sizes agree with the headers, this format has no checksums"
        console.print(told + (", and so do the copies that several ranks hold" if checkpoint.copies else ""))
    if config.check_finite:
        console.print("all values are finite numbers")


def summary(config: ModelConfig) -> str:
    """The fields of a config that are not as they are by default."""
    told = [
        f"{f.name} {str(value.name).lower() if isinstance(value, Enum) else value}"
        for f in fields(config)
        if (value := getattr(config, f.name)) != f.default
    ]
    return ", ".join(told)


def by_file(checkpoint: Checkpoint) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, (_, entry) in checkpoint.tensors.items():
        found.setdefault(entry.path.name, []).append(name)
    return found


def rows(checkpoint: Checkpoint) -> list[tuple[str, str, str, str, str]]:
    """A line for each tensor, with ``{i}`` for the number of the block, so that blocks that are alike give the same lines."""
    tensors: dict[str, list[str]] = {}
    for name in checkpoint.tensors:
        tensors.setdefault(name.rsplit("/", 1)[-1], []).append(name)
    found = []
    for name, keys in tensors.items():
        stored, entry = checkpoint.tensors[keys[0]]
        shapes = [checkpoint.tensors[key][1].shape for key in keys]
        layout = checkpoint.layouts[stored.parameter]
        told = (
            ", ".join(f"{shapes.count(shape)} of {shape}" for shape in dict.fromkeys(shapes))
            if len(keys) > 1
            else str(shapes[0])
        )
        cut = how_cut(layout) if checkpoint.checksums else held(stored, layout)
        plain = re.sub(r"\.\d+\.", ".{i}.", name)
        found.append((plain, str(entry.dtype).removeprefix("torch."), str(layout.shape), told, cut))
    return found


def how_cut(layout: Layout) -> str:
    """The rows of each part that the ranks hold."""
    if layout.dim is None:
        return "not cut, every rank has it"
    parts = []
    for part in layout.parts:
        counts = [run.length for run in part.runs]
        same = f"{len(counts)} x {counts[0]}" if len(set(counts)) == 1 else "+".join(map(str, counts))
        different = len(set(part.runs))
        parts.append(f"{part.name} {same}" + (f" ({different} different)" if different < len(counts) else ""))
    return f"dim {layout.dim}: {', '.join(parts)}"


def held(stored: StoredTensor, layout: Layout) -> str:
    """Which parts of the parameter a tensor holds, and how they lie in it."""
    names: Mapping[str, None] = {}
    if layout.dim is not None:
        starts = layout.part_starts
        runs = [extent.box[layout.dim] for extent in stored.extents]
        names = dict.fromkeys(
            p.name for p in layout.parts for run in runs if starts[p.name] <= run.start < starts[p.name] + p.size
        )
    module = stored.parameter.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    return f"{module}: {', '.join(names) or 'all'}" + (", transposed" if stored.transposed else "")


def main(arguments: Sequence[str] | None = None, program: str = "-m launch.inspect") -> None:
    run(inspect, InspectConfig, arguments, program)


if __name__ == "__main__":
    main()
