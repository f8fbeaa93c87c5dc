"""Sharded folders: one safetensors file for each rank with what it holds, and manifest.json, which says what that is."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from parallel.layout import Layout
from tpblock.formats.checkpoint import Checkpoint, HuggingFace, check_plausible, model_layouts, parse_config, source_of
from tpblock.formats.files import DTYPE_NAMES, DTYPES, CheckpointError, Entry, is_plain_name, read_header, read_json
from tpblock.formats.stored import StoredTensor, shard_tensor

MANIFEST = "manifest.json"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class PartRuns(_Strict):
    """A part of a cut dimension, and for each rank the rows [start, stop) of the part that it holds."""

    name: str
    size: int
    runs: list[list[int]]


class TensorLayout(_Strict):
    """A global parameter and how it is cut. ``dim`` None: every rank holds all of it."""

    shape: list[int]
    dtype: str
    dim: int | None
    parts: list[PartRuns]


class RankFile(_Strict):
    """A file, its size in bytes, and the CRC-32 of the bytes after its header."""

    name: str
    size: int
    crc32: int


class Manifest(_Strict):
    """manifest.json. ``hf_config``, ``hf_files`` and ``hf_metadata`` are those of the Hugging Face folder that it came from, and
    that it can be merged to."""

    format: Literal["tpblock-sharded"] = "tpblock-sharded"
    version: Literal[1] = 1
    ranks: int
    files: list[RankFile]
    tensors: dict[str, TensorLayout]
    hf_config: dict[str, Any]
    hf_files: dict[str, str]
    hf_metadata: dict[str, str]


def rank_file(rank: int, ranks: int) -> str:
    return f"rank-{rank:05d}-of-{ranks:05d}.safetensors"


def describe(layout: Layout, dtype: str) -> TensorLayout:
    """A layout as the manifest has it."""
    parts = [PartRuns(name=p.name, size=p.size, runs=[list(run) for run in p.runs]) for p in layout.parts]
    return TensorLayout(shape=list(layout.shape), dtype=dtype, dim=layout.dim, parts=parts)


def read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    try:
        return Manifest.model_validate(read_json(path))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"{path}: {where}: {first['msg']}") from error


def open_sharded(folder: Path) -> Checkpoint:
    """A folder that was sharded for some number of ranks. All headers are read and checked against the config, no weights.

    Raises:
        CheckpointError: naming the file, field or tensor at fault.
    """
    manifest = read_manifest(folder)
    config, family = parse_config(manifest.hf_config)
    ranks = manifest.ranks
    if ranks < 1 or ranks != len(manifest.files):
        raise CheckpointError(f"{folder / MANIFEST}: it is for {ranks} ranks and names {len(manifest.files)} files")
    for rank, file in enumerate(manifest.files):
        if file.name != rank_file(rank, ranks):
            raise CheckpointError(
                f"{folder / MANIFEST}: the file of rank {rank} is {file.name!r}, it should be {rank_file(rank, ranks)!r}"
            )
    for name, hf_file in manifest.hf_files.items():
        if not is_plain_name(hf_file):
            raise CheckpointError(f"{folder / MANIFEST}: {name} was in {hf_file!r}, which is no name for a safetensors file")
    headers = []
    for file in manifest.files:
        entries, metadata = read_header(folder / file.name)
        if metadata.get("file", file.name) != file.name:
            raise CheckpointError(f"{folder / file.name} was written as {metadata['file']}: the files were renamed")
        headers.append(entries)
    check_plausible(config, [entry for entries in headers for entry in entries.values()])
    try:
        layouts = model_layouts(config, ranks)
    except ValueError as error:
        raise CheckpointError(f"{folder / MANIFEST}: {error}") from error
    for name, layout in layouts.items():
        told = manifest.tensors.get(name)
        if told is None:
            raise CheckpointError(f"{folder / MANIFEST}: {name} is missing")
        if told.dtype not in DTYPES or not DTYPES[told.dtype].is_floating_point:
            raise CheckpointError(f"{folder / MANIFEST}: {name} is of {told.dtype}, weights are floating-point numbers")
        if told != describe(layout, told.dtype):
            raise CheckpointError(
                f"{folder / MANIFEST}: {name} is cut in another way than the config makes it for {ranks} ranks"
            )
    if unknown := manifest.tensors.keys() - layouts.keys():
        raise CheckpointError(f"{folder / MANIFEST} has tensors that the model lacks: {', '.join(sorted(unknown)[:8])}")
    tensors: dict[str, tuple[StoredTensor, Entry]] = {}
    copies, sources = {}, []
    for rank, (file, entries) in enumerate(zip(manifest.files, headers, strict=True)):
        path = folder / file.name
        if path.stat().st_size != file.size:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes, the manifest says {file.size}")
        if different := sorted(entries.keys() ^ layouts.keys()):
            raise CheckpointError(f"{path} and the config differ in the tensors {', '.join(different[:8])}")
        for name, layout in layouts.items():
            entry, stored = entries[name], shard_tensor(name, layout, rank)
            if entry.shape != stored.shape or DTYPE_NAMES[entry.dtype] != manifest.tensors[name].dtype:
                raise CheckpointError(
                    f"{path}: {name} is {entry.dtype} of shape {entry.shape}, the manifest makes it "
                    f"{manifest.tensors[name].dtype} of shape {stored.shape}"
                )
            tensors[f"{file.name}/{name}"] = (stored, entry)
            owned = shard_tensor(name, layout, rank, owned=True)
            sources.append((owned, entry))
            if owned.extents != stored.extents:
                copies[f"{file.name}/{name}"] = (stored, entry)
    hf = HuggingFace(manifest.hf_config, manifest.hf_files, manifest.hf_metadata)
    sums = {file.name: file.crc32 for file in manifest.files}
    return Checkpoint(
        folder, f"sharded for {ranks} ranks", ranks, config, family, hf, layouts, tensors, source_of(sources), copies, sums
    )
