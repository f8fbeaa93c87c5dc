"""Sharding, resharding and merging: tensor by tensor, on one process, without torch.distributed."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import torch

from tpblock.formats.checkpoint import SIDE_FILES, Checkpoint, model_layouts
from tpblock.formats.files import (
    DTYPE_NAMES,
    CheckpointError,
    Entry,
    Progress,
    Writer,
    check_new,
    checksum,
    read_json,
    written_aside,
)
from tpblock.formats.hf import INDEX, hf_names, open_hf, shard_by_size
from tpblock.formats.meta import PARAMS, MetaOptions, open_meta
from tpblock.formats.sharded import MANIFEST, Manifest, RankFile, describe, open_sharded, rank_file
from tpblock.formats.stored import Source, StoredTensor, apart, blocks, shard_tensor

Plan = Mapping[str, Mapping[str, tuple[StoredTensor, torch.dtype]]]
"""What to write: for each file its tensors by name."""

Stages = Callable[[str, int], Progress]
"""Called with what begins now and how many bytes it goes through; what it returns is told of them as they pass."""


def quiet(_what: str, _bytes: int) -> Progress:
    return lambda _: None


def open_checkpoint(path: str | Path, meta: MetaOptions | None = None) -> Checkpoint:
    """A Hugging Face folder, one that :func:`shard` wrote, or one of Meta's, for which ``meta`` says what it does not."""
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder")
    if any((path / name).exists() for name in ("extra.json", "config.toml")) and not (path / "config.json").exists():
        raise CheckpointError(
            f"{path} is of a training run, which --resume of launch.train goes on from: it is no model's folder"
        )
    if not (path / MANIFEST).exists() and (path / "consolidated.00.pth").exists():
        return open_meta(path, meta or MetaOptions())
    if meta and meta != MetaOptions():
        raise CheckpointError(f"{path} is no folder of Meta's: what {meta} would say is in its config")
    return open_sharded(path) if (path / MANIFEST).exists() else open_hf(path)


def dtypes(checkpoint: Checkpoint) -> dict[str, torch.dtype]:
    """The dtype of each parameter.

    Raises:
        CheckpointError: if tensors of one parameter differ, as q and k that are to be one fused weight.
    """
    found = {}
    for name, tensors in checkpoint.source.items():
        kinds = {entry.dtype for _, entry in tensors}
        if len(kinds) > 1:
            raise CheckpointError(f"{checkpoint.path}: the tensors that make {name} are of {', '.join(map(str, kinds))}")
        found[name] = kinds.pop()
    return found


def shard_plan(checkpoint: Checkpoint, ranks: int) -> Plan:
    """A file for each rank, with the parameters under our names.

    Raises:
        CheckpointError: if the model cannot be cut over that many ranks.
    """
    if ranks < 1:
        raise CheckpointError(f"there must be one tensor-parallel rank at least, got {ranks}")
    try:
        layouts = model_layouts(checkpoint.config, ranks)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    kinds = dtypes(checkpoint)
    return {
        rank_file(rank, ranks): {name: (shard_tensor(name, layout, rank), kinds[name]) for name, layout in layouts.items()}
        for rank in range(ranks)
    }


def hf_plan(checkpoint: Checkpoint, kinds: Mapping[str, torch.dtype] | None = None, max_shard_size: int | None = None) -> Plan:
    """The files of the Hugging Face folder that it came from, or others of ``max_shard_size`` bytes at most.

    ``kinds``: the dtype of each parameter, if not those that it has.
    """
    kinds = kinds or dtypes(checkpoint)
    names = hf_names(checkpoint.config, checkpoint.family, checkpoint.layouts, checkpoint.hf.files)
    tensors = {name: (stored, kinds[stored.parameter]) for name, stored in names.items()}
    files = checkpoint.hf.files
    if max_shard_size is not None:
        files = shard_by_size({name: (dtype, stored.shape) for name, (stored, dtype) in tensors.items()}, max_shard_size)
    plan: dict[str, dict[str, tuple[StoredTensor, torch.dtype]]] = {}
    for name, tensor in tensors.items():
        if name not in files:
            raise CheckpointError(f"{checkpoint.path} does not say in which file {name} was")
        plan.setdefault(files[name], {})[name] = tensor
    return plan


@dataclass(frozen=True)
class Conversion:
    """A checkpoint that is to be written in another form.

    Attributes:
        source: what is read.
        plan, metadata: the files to write.
        finish: writes what stands beside them, once they are there.
        checked: whether it is told their checksums.
    """

    source: Checkpoint
    plan: Plan
    metadata: Mapping[str, str]
    finish: Callable[[Path, list[RankFile]], None]
    checked: bool = False

    @property
    def bytes(self) -> int:
        return sum(math.prod(stored.shape) * dtype.itemsize for file in self.plan.values() for stored, dtype in file.values())

    def run(self, out: Path, *, verify: bool = False, finite: bool = False, stages: Stages = quiet) -> None:
        """Writes it to a folder that takes its name when it is complete.

        Args:
            verify: check the checksums of the source, and compare what was written with it bit by bit.
            finite: check that all values are finite numbers.

        Raises:
            CheckpointError: naming the file or tensor at fault. ``out`` is then as it was.
        """
        check_new(out)
        if verify:
            check_checksums(self.source, stages)
        check_copies(self.source, stages)
        if finite:
            check_finite(self.source, stages)
        with written_aside(out) as partial:
            self.finish(partial, self._write(partial, stages("writing", self.bytes)))
            written = open_checkpoint(partial)  # every shape and dtype against the config
            if written.bytes != self.bytes:
                raise CheckpointError(f"{partial} has {written.bytes} bytes of weights, the config makes it {self.bytes}")
            if verify:
                compare(written, self.source, stages)

    def _write(self, folder: Path, progress: Progress) -> list[RankFile]:
        """Two files at a time: copying, checksums and writing let other threads run."""
        stopped = Event()

        def write(file: str) -> RankFile:
            tensors = self.plan[file]
            sizes = {name: (dtype, stored.shape) for name, (stored, dtype) in tensors.items()}
            metadata = {"file": file} if self.checked else self.metadata  # what the other rank's file lacks
            with closing(Writer(folder / file, sizes, metadata, checked=self.checked)) as writer:
                for name in writer.order:
                    stored, dtype = tensors[name]
                    for block in blocks(stored, dtype, self.source.source):
                        if stopped.is_set():
                            raise CheckpointError("stopped")
                        writer.write(name, block)
                        progress(block.nbytes)
            return RankFile(name=file, size=writer.size, crc32=writer.checksum)

        with ThreadPoolExecutor(2) as threads:
            try:
                return list(threads.map(write, self.plan))
            except BaseException:  # Ctrl-C, too
                stopped.set()
                raise


def sharding(checkpoint: Checkpoint, ranks: int) -> Conversion:
    """To a sharded folder for so many ranks."""
    plan, kinds = shard_plan(checkpoint, ranks), dtypes(checkpoint)

    def finish(folder: Path, files: list[RankFile]) -> None:
        manifest = Manifest(
            ranks=ranks,
            files=files,
            tensors={
                name: describe(layout, DTYPE_NAMES[kinds[name]])
                for name, layout in model_layouts(checkpoint.config, ranks).items()
            },
            hf_config=dict(checkpoint.hf.config),
            hf_files=dict(checkpoint.hf.files),
            hf_metadata=dict(checkpoint.hf.metadata),
        )
        (folder / MANIFEST).write_text(manifest.model_dump_json(indent=1))
        copy_side_files(checkpoint, folder)

    return Conversion(checkpoint, plan, {}, finish, checked=True)


def merging(checkpoint: Checkpoint, max_shard_size: int | None = None) -> Conversion:
    """To the Hugging Face folder that it came from, or one with files of ``max_shard_size`` bytes at most."""
    plan = hf_plan(checkpoint, max_shard_size=max_shard_size)
    return Conversion(checkpoint, plan, checkpoint.hf.metadata, lambda folder, _: finish_hf(plan, checkpoint, folder))


def shard(checkpoint: Checkpoint, out: Path, ranks: int, **options: Any) -> None:
    """Writes a sharded folder. ``options``: of :meth:`Conversion.run`."""
    sharding(checkpoint, ranks).run(out, **options)


def merge(checkpoint: Checkpoint, out: Path, **options: Any) -> None:
    """Writes the Hugging Face folder again. ``options``: of :meth:`Conversion.run`."""
    merging(checkpoint).run(out, **options)


def finish_hf(plan: Plan, checkpoint: Checkpoint, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Writes what a Hugging Face folder has beside the weights, with ``dtype`` in config.json if it says which one they are of."""
    if len(plan) > 1:
        write_hf_index(plan, folder)
    copy_side_files(checkpoint, folder)
    config = dict(checkpoint.hf.config)
    for field in ("dtype", "torch_dtype"):
        if dtype is not None and field in config:
            config[field] = str(dtype).removeprefix("torch.")
    path = folder / "config.json"
    if not path.exists() or read_json(path) != config:  # else it stays as it was written
        path.write_text(json.dumps(config, indent=2) + "\n")


def write_hf_index(plan: Plan, folder: Path) -> None:
    """The index of several files, as transformers writes it."""
    tensors = [(stored.shape, dtype) for file in plan.values() for stored, dtype in file.values()]
    numbers = sum(torch.Size(shape).numel() for shape, _ in tensors)
    size = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in tensors)
    index = {
        "metadata": {"total_parameters": numbers, "total_size": size},
        "weight_map": {name: file for file, names in plan.items() for name in names},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def copy_side_files(checkpoint: Checkpoint, folder: Path) -> None:
    for path in sorted(checkpoint.path.iterdir()):
        known = path.name in ("LICENSE", "NOTICE") or path.suffix in SIDE_FILES
        known = known and path.name not in (INDEX, MANIFEST, PARAMS)
        if known and path.is_file() and not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)


def compare(written: Checkpoint, checkpoint: Checkpoint, stages: Stages = quiet) -> None:
    """A CheckpointError, naming the tensor and the largest difference, unless two checkpoints hold the same bits."""
    kinds, progress = dtypes(checkpoint), stages("comparing", written.bytes)
    for name, (stored, entry) in written.tensors.items():
        if entry.dtype != kinds[stored.parameter]:
            raise CheckpointError(
                f"{written.path}: {name} is of {entry.dtype}, in {checkpoint.path} {kinds[stored.parameter]}"
            )
        if most := _apart(stored, entry, checkpoint.source, progress):
            raise CheckpointError(f"{written.path}: {name} differs from {checkpoint.path} by up to {most:g}")


def check_copies(checkpoint: Checkpoint, stages: Stages = quiet) -> None:
    """A CheckpointError, naming the tensor and the largest difference, if what is there several times is not the same."""
    if not checkpoint.copies:
        return
    progress = stages("comparing copies", sum(entry.size for _, entry in checkpoint.copies.values()))
    for name, (stored, entry) in checkpoint.copies.items():
        if most := _apart(stored, entry, checkpoint.source, progress):
            raise CheckpointError(
                f"{checkpoint.path}: {name} differs from the first copy of {stored.parameter} by up to {most:g}"
            )


def _apart(stored: StoredTensor, entry: Entry, source: Source, progress: Progress) -> float:
    """The largest difference between a tensor of a file and what a source has for it."""
    worst, at = 0.0, 0
    for block in blocks(stored, entry.dtype, source):
        worst = max(worst, apart(block, entry.rows(at, at + len(block))))
        at += len(block)
        progress(block.nbytes)
    return worst


def check_checksums(checkpoint: Checkpoint, stages: Stages = quiet) -> None:
    """A CheckpointError, naming the file, if one is not what was written. Only sharded folders have checksums."""
    if not checkpoint.checksums:
        return
    progress = stages("checksums", checkpoint.bytes)
    for file, expected in checkpoint.checksums.items():
        found = checksum(checkpoint.path / file, progress)
        if found != expected:
            raise CheckpointError(f"{checkpoint.path / file} has CRC-32 {found:08x}, {MANIFEST} says {expected:08x}")


def check_finite(checkpoint: Checkpoint, stages: Stages = quiet) -> None:
    """A CheckpointError that names the tensors in which not all values are finite numbers."""
    progress, found = stages("looking for NaN and infinity", checkpoint.bytes), []
    for name, (_, entry) in checkpoint.tensors.items():
        finite = True
        for rows in entry.blocks():
            finite &= bool(torch.stack(rows.aminmax()).isfinite().all())  # far faster than isfinite of all
            progress(rows.nbytes)
        if not finite:
            found.append(name)
    if found:
        told = ", ".join(found[:8]) + (f" and {len(found) - 8} more" if len(found) > 8 else "")
        raise CheckpointError(f"{checkpoint.path} has values that are not finite numbers in {told}")
