"""Sharded checkpoints that any number of ranks can load, through torch.distributed.checkpoint.

A checkpoint is a folder of that format plus ``extra.json``. Every cut tensor is stored under its global shape, each rank
writing the pieces that it is the first to hold; a loading rank reads the pieces that it holds, whatever the cut was when saved.
Optimizer state is stored as ``optimizer.<parameter>.<key>`` and cut like its parameter.

torch asks a tensor for its chunks through three methods (torch/distributed/_checkpointable.py); DTensor is one answer to them,
which knows only torch.chunk's even split, :class:`_ShardOfGlobal` is another, which asks the Layout.

The format's index is a pickle, its tensors lie in others. Both are read so that nothing they name can run: a hostile folder is
an error like a damaged one.
"""

from __future__ import annotations

import json
import pickle
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from parallel.agreement import together
from parallel.fsdp import held, is_sharded, overlap
from parallel.group import TPGroup
from parallel.layout import Layout, Piece, Run
from parallel.state import NamedLayout, named_layouts


class _Box(NamedTuple):
    """A run of the global tensor along one or two dimensions, and the same elements in the local one."""

    offsets: torch.Size
    sizes: torch.Size
    local: tuple[slice, ...]

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(self.offsets, self.sizes)


class _ShardOfGlobal(Tensor):
    """A rank's shard that presents itself to torch.distributed.checkpoint as chunks of the global tensor."""

    local: Tensor
    cut: Layout  # Tensor.layout is something else
    rows: Run
    rank: int

    @staticmethod
    def __new__(cls, local: Tensor, layout: Layout, rows: Run, rank: int) -> _ShardOfGlobal:
        self = Tensor._make_subclass(cls, local)
        self.local, self.cut, self.rows, self.rank = local, layout, rows, rank
        return self

    def size(self, dim: int | None = None) -> Any:
        shape = torch.Size(self.cut.shape)
        return shape if dim is None else shape[dim]

    def _boxes(self, pieces: Sequence[Piece]) -> list[_Box]:
        """The pieces as far as they lie in the rows that this replica keeps."""
        boxes = []
        whole = Piece("", 0, 0, self.cut.shape[0])
        for piece in pieces if self.cut.dim is not None else (whole,):
            offsets, sizes = [0] * len(self.cut.shape), list(self.cut.shape)
            local = [slice(0, self.rows.length)] + [slice(0, size) for size in sizes[1:]]
            if self.cut.dim in (0, None):
                run = overlap(Run(piece.local, piece.local + piece.length), self.rows)
                offsets[0] = piece.start - piece.local + self.rows.start + run.start
                sizes[0], local[0] = run.length, slice(*run)
            else:
                assert self.cut.dim is not None
                offsets[0], sizes[0] = self.rows
                sizes[0] = self.rows.length
                offsets[self.cut.dim], sizes[self.cut.dim] = piece.start, piece.length
                local[self.cut.dim] = slice(piece.local, piece.local + piece.length)
            if sizes[0]:
                boxes.append(_Box(torch.Size(offsets), torch.Size(sizes), tuple(local)))
        return boxes

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.local)
        writes = self.cut.dim is not None or self.rank == 0  # what TP ranks replicate, the first writes
        boxes = self._boxes(self.cut.owned(self.rank)) if writes else []
        return [
            WriteItem(
                MetadataIndex(fqn, box.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(box.chunk, properties, self.size()),
            )
            for box in boxes
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [box.chunk for box in self._boxes(self.cut.pieces(self.rank))]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        boxes, at = self._boxes(self.cut.pieces(self.rank)), index.index
        # A loading rank gives the place among its own pieces, a writing one a place among all ranks' chunks.
        if at is None or at >= len(boxes) or boxes[at].offsets != index.offset:
            at = next(i for i, box in enumerate(boxes) if box.offsets == index.offset)
        return self.local[boxes[at].local]


def _as_stored(value: Tensor, layout: Layout, group: TPGroup) -> Tensor:
    local, rows, replicas = held(value)
    return local if layout.replicated and replicas is None else _ShardOfGlobal(local, layout, rows, group.rank)


def _participants(model: nn.Module, group: TPGroup) -> TPGroup:
    """The ranks that write or read together: the group, or under FSDP2, where replicas share parameters, all there are."""
    if not any(is_sharded(parameter) for _, parameter, _ in named_layouts(model)):
        return group
    assert dist.group.WORLD is not None
    return TPGroup.from_process_group(dist.group.WORLD)


_INDEX_CLASSES = {
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},  # from Python 3.13 on
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata"),
        *("TensorProperties", "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
}


class _IndexUnpickler(pickle.Unpickler):
    """Reads torch's index of a checkpoint, which is a pickle, and no other pickle: what it names beyond the index's own classes
    and dtypes is refused before it could run."""

    def find_class(self, module: str, name: str) -> Any:
        known = name in _INDEX_CLASSES.get(module, ())
        if known or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"its index names {module}.{name}, which no index of tensors has")


class _Reader(dcp.FileSystemReader):
    """torch's reader, but for its index. Everything stored must be a tensor: these are read with ``weights_only``."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(Path(self.path) / ".metadata", "rb") as file:
            index = _IndexUnpickler(file).load()
        if not isinstance(index, Metadata) or not isinstance(index.state_dict_metadata, dict):
            raise pickle.UnpicklingError("its index is no torch.distributed.checkpoint.metadata.Metadata")
        for name, stored in index.state_dict_metadata.items():
            dtype = getattr(getattr(stored, "properties", None), "dtype", None)
            sized = isinstance(stored, TensorStorageMetadata) and isinstance(getattr(stored, "size", None), torch.Size)
            if not sized or not isinstance(dtype, torch.dtype):
                raise pickle.UnpicklingError(f"its index has {name}, which is no tensor")
        return index


def save_checkpoint(
    path: str | Path,
    model: nn.Module,
    group: TPGroup,
    optimizer: torch.optim.Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Writes model, optimizer state and ``extra`` (anything JSON can hold) to the new folder ``path``.

    All ranks of ``group`` call it; of several data-parallel replicas only one does, unless FSDP2 shards the model over them:
    then all do.
    It is written to ``path`` + ".partial" and renamed when complete, so ``path`` either is whole or does not exist.

    Raises:
        ValueError: on every rank, if ``path`` exists.
        RuntimeError: on every rank, if writing fails on any (a full disk, say).
    """
    path, everyone = Path(path), _participants(model, group)
    partial = path.with_name(path.name + ".partial")
    with together(everyone, ValueError):
        if everyone.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)  # what an interrupted run left, perhaps of more ranks
        if path.exists():
            raise ValueError(f"the checkpoint {path} exists already")
    state: dict[str, Any] = {}
    for name, parameter, layout in named_layouts(model):
        state[name] = _as_stored(parameter.detach(), layout, group)
        for key, value in (optimizer.state.get(parameter, {}) if optimizer else {}).items():
            shaped = torch.is_tensor(value) and value.shape == parameter.shape
            state[f"optimizer.{name}.{key}"] = _as_stored(value, layout, group) if shaped else torch.as_tensor(value)
    _run(lambda: dcp.save(state, checkpoint_id=partial, **_among(everyone)), f"writing the checkpoint {path}")
    with together(everyone, RuntimeError):
        if everyone.rank == 0:
            try:
                (partial / "extra.json").write_text(json.dumps(dict(extra or {}), indent=2))
                partial.rename(path)
            except OSError as error:
                raise RuntimeError(f"writing the checkpoint {path} failed: {error}") from error


def load_checkpoint(
    path: str | Path, model: nn.Module, group: TPGroup, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Fills ``model`` and ``optimizer`` from a folder that :func:`save_checkpoint` wrote at any number of ranks.

    Returns:
        the ``extra`` that was saved.

    Raises:
        ValueError: on every rank and with the model unchanged, if there is no complete checkpoint at ``path``, or if a tensor
            is missing, unknown, or of another shape or dtype; it names them.
        RuntimeError: on every rank and with the model unchanged, if reading fails.
    """
    path, everyone = Path(path), _participants(model, group)
    with together(everyone, ValueError):
        if not path.is_dir():
            raise ValueError(f"there is no checkpoint {path}")
        if not (path / "extra.json").is_file():
            raise ValueError(f"{path} is not a complete checkpoint (it has no extra.json)")
    with together(everyone, RuntimeError):
        stored, extra = _read_index(path)
    entries = list(named_layouts(model))
    with together(everyone, ValueError):
        _check_stored(path, {k: v for k, v in stored.items() if not k.startswith("optimizer.")}, entries)
    weights = [torch.empty_like(parameter, requires_grad=False) for _, parameter, _ in entries]
    state = {e.name: _as_stored(local, e.layout, group) for e, local in zip(entries, weights, strict=True)}
    moments: dict[nn.Parameter, dict[str, Tensor]] = {parameter: {} for _, parameter, _ in entries}
    counters_beside = _counters_beside(optimizer) if optimizer else set()
    for name, parameter, layout in entries if optimizer else ():
        prefix = f"optimizer.{name}."
        for key, meta in stored.items():
            if key.startswith(prefix):
                assert isinstance(meta, TensorStorageMetadata)
                shaped = tuple(meta.size) == layout.shape
                dtype = meta.properties.dtype
                device = parameter.device if shaped or parameter in counters_beside else torch.device("cpu")
                local = (
                    torch.empty_like(parameter, dtype=dtype, requires_grad=False)
                    if shaped
                    else torch.empty(meta.size, dtype=dtype, device=device)
                )
                moments[parameter][key.removeprefix(prefix)] = local
                state[key] = _as_stored(local, layout, group) if shaped else local
    if optimizer and not any(moments.values()):
        raise ValueError(f"{path} was saved without optimizer state")
    _run(lambda: dcp.load(state, storage_reader=_Reader(path), **_among(everyone)), f"reading the checkpoint {path}")
    with torch.no_grad():
        for (_, parameter, _), local in zip(entries, weights, strict=True):
            parameter.copy_(local)
    if optimizer:
        for parameter, restored in moments.items():
            optimizer.state.pop(parameter, None)
            if restored:
                optimizer.state[parameter] = restored
    return extra


def _read_index(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the checkpoint says it holds, and its ``extra``."""
    try:
        return _Reader(path).read_metadata().state_dict_metadata, json.loads((path / "extra.json").read_text())
    except Exception as error:  # a damaged pickle raises nearly anything
        raise RuntimeError(f"reading the checkpoint {path} failed: {_reason(error)}") from error


def _counters_beside(optimizer: torch.optim.Optimizer) -> set[nn.Parameter]:
    """The parameters whose step counters the optimizer wants on their device; those of the others are on the CPU."""
    beside = [group for group in optimizer.param_groups if group.get("fused") or group.get("capturable")]
    return {parameter for group in beside for parameter in group["params"]}


def _check_stored(path: Path, stored: Mapping[str, Any], entries: Sequence[NamedLayout]) -> None:
    names = {entry.name for entry in entries}
    if missing := sorted(names - stored.keys()):
        raise ValueError(f"{path} lacks {', '.join(missing)}")
    if unknown := sorted(stored.keys() - names):
        raise ValueError(f"{path} has tensors that the model lacks: {', '.join(unknown)}")
    for name, parameter, layout in entries:
        shape, dtype = tuple(stored[name].size), stored[name].properties.dtype
        if shape != layout.shape:
            raise ValueError(f"{name} has shape {shape} in {path}, the model's is {layout.shape}")
        if dtype != parameter.dtype:
            raise ValueError(f"{name} is {dtype} in {path}, the model's is {parameter.dtype}")


def _among(group: TPGroup) -> dict[str, Any]:
    return {"no_dist": True} if group.size == 1 else {"process_group": group.connected}


def _reason(error: BaseException) -> str:
    """Its text, or its type's name if it has none (EOFError, say)."""
    return str(error) or type(error).__name__


def _run(action: Callable[[], object], what: str) -> None:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # a single device is no mistake
            action()
    except CheckpointException as error:  # a BaseException, which the caller's `except Exception` would miss
        reasons = "; ".join(f"rank {rank}: {_reason(failure[0])}" for rank, failure in error.failures.items())
        raise RuntimeError(f"{what} failed: {reasons}") from error
