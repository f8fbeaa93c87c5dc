"""safetensors files: headers checked as they are read, rows read as they are needed, files written tensor by tensor."""

from __future__ import annotations

import json
import math
import mmap
import os
import shutil
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

DTYPES = {  # in the order in which safetensors sorts the tensors of a file, last first
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

JSON_BYTES = 100_000_000
"""How large a JSON file may be: as large as the header of a safetensors file."""


BLOCK_BYTES = 1 << 20
"""How much of a file is read at once: little enough to stay in the processor's cache until it is written. Reading whole rows is
faster than mapping them into memory, which stops at every few pages."""

WRITE_BYTES = 1 << 18
"""How much is written in one call. For more, Linux looks for large runs of free memory, which may take longer than the writing."""

Progress = Callable[[int], None]
"""Called with the bytes that were read or written since it was called last."""


class CheckpointError(ValueError):
    """Files that are missing, damaged, hostile, or not what is asked of them. Nothing was written, no model changed."""


@dataclass(frozen=True)
class Entry:
    """A tensor of a file: ``start`` is its first byte, counted from the beginning of the file."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def rows(self, first: int, stop: int, *, sparse: bool = False) -> Tensor:
        """The rows [first, stop) along dimension 0. Changes to them stay private.

        The disk gives these rows and no more, or if only columns of them are wanted (``sparse``), the pages that these lie in.
        """
        shape = (stop - first, *self.shape[1:])
        size, at = math.prod(shape) * self.dtype.itemsize, self.start + first * (self.size // self.shape[0])
        try:
            with open(self.path, "rb", buffering=0) as file:
                if sparse:
                    page = at % mmap.ALLOCATIONGRANULARITY
                    memory = mmap.mmap(file.fileno(), page + size, access=mmap.ACCESS_COPY, offset=at - page)
                    memory.madvise(mmap.MADV_RANDOM)  # nothing around what is asked for
                    return torch.frombuffer(memory, dtype=self.dtype, offset=page, count=math.prod(shape)).view(shape)
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
                rows = torch.empty(shape, dtype=self.dtype)
                data = rows.view(-1).view(torch.uint8).numpy().data
                while data:
                    if not (count := os.preadv(file.fileno(), [data], at)):
                        raise OSError("it has become shorter")
                    at, data = at + count, data[count:]
                return rows
        except (OSError, ValueError) as error:  # it was there, and long enough, when its header was read
            raise CheckpointError(f"cannot read {self.path}: {error}") from error

    def blocks(self) -> Iterator[Tensor]:
        """All rows in order, some at a time."""
        each = max(1, BLOCK_BYTES * self.shape[0] // self.size)
        for first in range(0, self.shape[0], each):
            yield self.rows(first, min(first + each, self.shape[0]))


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number in JSON")


def is_plain_name(file: str) -> bool:
    """Whether that is a name for a safetensors file in the folder itself, not one that leads out of it."""
    return Path(file).name == file and file.endswith(".safetensors") and file.isprintable()


def check_readable(path: Path) -> None:
    """An OSError or a ValueError unless there is a regular file: opening a pipe would wait for ever. Links are followed, since
    caches of downloads hold nothing else."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("it is no regular file")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        CheckpointError: if there is none, or the file is larger than any of ours.
    """
    try:
        check_readable(path)
        if path.stat().st_size > JSON_BYTES:
            raise ValueError(f"it has {path.stat().st_size:,} bytes, at most {JSON_BYTES:,} are read")
        text = path.read_text(encoding="utf-8")
        value = json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
        json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair could not be written again
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"cannot read {path}: it holds no JSON object")
    return value


def read_header(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """The tensors of a safetensors file, and its metadata.

    Raises:
        CheckpointError: if the file is missing, truncated, longer than its header says, or its header makes no sense.
    """
    try:
        check_readable(path)
        with safe_open(path, "pt"):  # checks lengths, offsets and types
            pass
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length), object_pairs_hook=_no_duplicates)
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    metadata = header.pop("__metadata__", None) or {}
    entries = {}
    for name, fields in header.items():
        if fields["dtype"] not in DTYPES:
            raise CheckpointError(f"{path}: {name} is of type {fields['dtype']}, supported are {', '.join(DTYPES)}")
        entries[name] = Entry(path, DTYPES[fields["dtype"]], tuple(fields["shape"]), 8 + length + fields["data_offsets"][0])
    return entries, metadata


class Writer:
    """Writes a safetensors file whose tensors are known beforehand but come one at a time, in any order.

    The bytes are those of ``safetensors.torch.save_file``. The space is taken at once, so that a full disk is noticed before
    anything is computed. With ``checked``, ``checksum`` is the CRC-32 of what follows the header, if the tensors came in their
    order in the file.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        metadata: Mapping[str, str],
        *,
        checked: bool = False,
    ):
        kinds = list(DTYPES)
        order = sorted(tensors, key=lambda name: (-kinds.index(DTYPE_NAMES[tensors[name][0]]), name))
        header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
        at = 0
        for name in order:
            dtype, shape = tensors[name]
            size = math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self.path, self.order, self.checked, self.checksum = path, order, checked, 0
        self._next = {name: 8 + len(text) + header[name]["data_offsets"][0] for name in order}
        self.size = 8 + len(text) + at
        self._file = open(path, "wb")  # noqa: SIM115
        try:
            os.posix_fallocate(self._file.fileno(), 0, self.size)
            self._file.write(len(text).to_bytes(8, "little") + text)
            self._file.flush()
        except BaseException:
            self._file.close()
            raise

    def write(self, name: str, value: Tensor) -> None:
        """Writes a contiguous tensor on the CPU in its place, or the next rows of it."""
        data = value.contiguous().view(-1).view(torch.uint8).numpy().data
        while data:
            at = self._next[name]
            written = os.pwrite(self._file.fileno(), data[: WRITE_BYTES - at % WRITE_BYTES], at)
            if self.checked:
                self.checksum = zlib.crc32(data[:written], self.checksum)
            self._next[name], data = at + written, data[written:]

    def close(self) -> None:
        self._file.close()


def checksum(path: Path, progress: Progress = lambda _: None) -> int:
    """The CRC-32 of a safetensors file's tensors, as :class:`Writer` counts it."""
    with open(path, "rb") as file:
        file.seek(8 + int.from_bytes(file.read(8), "little"))
        value = 0
        while block := file.read(1 << 24):
            value = zlib.crc32(block, value)
            progress(len(block))
    return value


def check_new(folder: Path) -> None:
    """A CheckpointError unless ``folder`` does not exist or is empty."""
    try:
        taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    except OSError as error:
        raise CheckpointError(f"cannot write {folder}: {error.strerror or error}") from error
    if taken:
        raise CheckpointError(f"{folder} is there already and not empty: the output needs a folder of its own")


@contextmanager
def written_aside(folder: Path) -> Iterator[Path]:
    """A new folder beside ``folder`` to write to, which takes its name when the block ends well and is removed when it does not.

    It is called .NAME.RANDOM.partial. A process that is killed leaves it behind; nothing else is ever removed.

    Raises:
        CheckpointError: if ``folder`` is there and not empty, or something cannot be written (a full disk).
    """
    folder = Path(os.path.abspath(folder))  # "." has no name to add to
    check_new(folder)
    partial = folder.with_name(f".{folder.name}.{uuid4().hex[:8]}.partial")
    made: list[Path] = []
    try:
        made = [parent for parent in partial.parents if not parent.exists()]
        partial.mkdir(parents=True)
        yield partial
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)
    except OSError as error:
        raise CheckpointError(f"cannot write {folder}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        with suppress(OSError):  # parents that were made are left only if they hold something
            for parent in made:
                parent.rmdir()
