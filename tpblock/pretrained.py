"""Pretrained models on tensor-parallel ranks: each rank reads the slices that it owns, and together they write them again."""

from __future__ import annotations

import hashlib
import json
import random
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallel.agreement import exchange, together
from parallel.group import TPGroup
from parallel.state import global_tensors, named_layouts
from tpblock.config import ModelConfig
from tpblock.formats.checkpoint import Checkpoint
from tpblock.formats.convert import Plan, finish_hf, hf_plan, open_checkpoint
from tpblock.formats.files import CheckpointError, Writer, written_aside
from tpblock.formats.meta import MetaOptions
from tpblock.formats.stored import InMemory, StoredTensor, copy, difference, shard_tensor, whole_tensor
from tpblock.model import Decoder

SAMPLES, SAMPLED_NUMBERS = 8, 256
"""What of each tensor is compared between the ranks: so many runs of so many numbers."""

NOT_STORED = ("dropout", "attention_dropout", "init_std")
"""Fields of a config that say how a model is trained, and are not in the folders that it is read from."""


def load_pretrained(
    folder: str | Path,
    *,
    group: TPGroup,
    config: ModelConfig | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    finite: bool = False,
    meta: MetaOptions | None = None,
    **options: Any,
) -> Decoder:
    """A :class:`Decoder` with the weights of a Hugging Face folder, of one that ``launch.shard`` wrote for any number of ranks, or
    of Meta's consolidated files.

    The model is built on the meta device; each rank then reads its slices of the files straight into its parameters. All ranks
    of the group call it.

    Args:
        group: the tensor-parallel ranks.
        config: what to build in place of the folder's own config, for example that one with dropout.
        dtype, device: of the parameters; values are converted. Without dtype they stay as they are stored.
        finite: check that all weights are finite numbers.
        meta: for a folder of Meta's consolidated files, what its params.json does not say.
        options: further arguments of :class:`Decoder` (``sequence_parallel``, ``virtual_shards``, ``seed`` of the dropout masks,
            ...).

    Raises:
        CheckpointError: on every rank, if the architecture or a setting is not supported, a file is broken, a tensor is missing,
            unknown or of another shape, or the ranks read different folders; it names what is at fault. It is a ValueError.
        ValueError: on every rank, if the model cannot be cut over that many ranks, or an option does not fit.
    """
    with together(group, CheckpointError):
        checkpoint = open_checkpoint(folder, meta)
        model = Decoder(config or checkpoint.config, group=group, device="meta", dtype=dtype or checkpoint.dtype(), **options)
        fingerprint = _fingerprint(checkpoint)
    _check_alike("folder", fingerprint, group)
    settings = (model.config, dtype, model.group.virtual_shards, model.sequence_parallel, finite)
    _check_alike("config or options", repr(settings), group)
    with together(group, CheckpointError):
        model.to_empty(device=device or "cpu")
        replicated = _fill(model, checkpoint, finite)
    _check_alike("replicated weights", replicated, group)
    model.origin = checkpoint
    return model


def save_pretrained(
    model: Decoder,
    folder: str | Path,
    *,
    max_shard_size: int | None = None,
    tensors: Iterator[tuple[str, Tensor]] | None = None,
    ranks: TPGroup | None = None,
) -> None:
    """Writes a model that :func:`load_pretrained` made as a Hugging Face folder: the same names, dtypes and files.

    All ranks of the group call it; of several data-parallel replicas only one does. Each parameter is gathered in turn and
    written by rank 0, so that no rank holds the whole model. It is written beside ``folder``, which it becomes when complete.

    Args:
        folder: new or empty.
        max_shard_size: bytes in a file at most, unless one tensor has more; by default the files are divided as they were.
        tensors, ranks: for a model whose parameters data-parallel replicas share, or that an engine keeps (FSDP2, DeepSpeed): the
            global tensors by name, one at a time, and all ranks that go through them together. By default the model's own.

    Raises:
        CheckpointError: on every rank, if ``folder`` is there already, something cannot be written (a full disk), or the model
            is not one that load_pretrained made, with the config of its folder but for dropout.
    """
    checkpoint, group = model.origin, model.group
    if checkpoint is None:
        raise CheckpointError(
            "only a model that load_pretrained made can be written as a Hugging Face folder: this one was not"
        )
    described, ours = ({k: v for k, v in vars(c).items() if k not in NOT_STORED} for c in (checkpoint.config, model.config))
    if changed := [f"{name} {described[name]}, the model has {ours[name]}" for name in ours if ours[name] != described[name]]:
        raise CheckpointError(
            f"the config.json of {checkpoint.path} would not describe this model: it has {'; '.join(changed)}"
        )
    if not checkpoint.path.is_dir():
        raise CheckpointError(f"{checkpoint.path} is gone, whose tokenizer and other small files go with the weights")
    kinds = {name: parameter.dtype for name, parameter, _ in named_layouts(model)}
    plan = hf_plan(checkpoint, kinds, max_shard_size)
    group, tensors = ranks or group, tensors or global_tensors(model, model.group)
    with together(group, CheckpointError):
        try:
            if group.rank == 0:
                _write(tensors, plan, checkpoint, kinds, Path(folder))
        finally:
            for _ in tensors:  # the ranks are to meet in every collective, whatever happened to the file
                pass


def _write(
    tensors: Iterator[tuple[str, Tensor]], plan: Plan, checkpoint: Checkpoint, kinds: Mapping[str, torch.dtype], folder: Path
) -> None:
    places: dict[str, list[tuple[str, str, StoredTensor]]] = {}
    for file, stored_tensors in plan.items():
        for name, (stored, _) in stored_tensors.items():
            places.setdefault(stored.parameter, []).append((file, name, stored))
    with written_aside(folder) as partial, ExitStack() as stack:
        writers = {}
        for file, stored_tensors in plan.items():
            sizes = {name: (dtype, stored.shape) for name, (stored, dtype) in stored_tensors.items()}
            writers[file] = stack.enter_context(closing(Writer(partial / file, sizes, checkpoint.hf.metadata)))
        for parameter, value in tensors:
            source = {parameter: [(whole_tensor(parameter, tuple(value.shape)), InMemory(value))]}
            for file, name, stored in places[parameter]:
                tensor = torch.empty(stored.shape, dtype=value.dtype)
                copy(stored, tensor, source)
                writers[file].write(name, tensor)
        finish_hf(plan, checkpoint, partial, kinds["embedding.weight"])


@torch.no_grad()
def _fill(model: Decoder, checkpoint: Checkpoint, finite: bool) -> str:
    """Reads this rank's slices into the parameters. Returns a checksum of the replicated ones."""
    repeated = [(stored, entry) for stored, entry in checkpoint.copies.values() if checkpoint.ranks == 1]
    checksum = 0
    entries = list(named_layouts(model))
    if ignored := sorted(checkpoint.source.keys() - {name for name, _, _ in entries}):
        raise CheckpointError(f"the config given makes no {', '.join(ignored[:8])}, which {checkpoint.path} has")
    for name, parameter, layout in entries:
        if name not in checkpoint.source or checkpoint.layouts[name].shape != layout.shape:
            shape = checkpoint.layouts[name].shape if name in checkpoint.source else "none"
            raise CheckpointError(f"the config given makes {name} of shape {layout.shape}, {checkpoint.path} has {shape}")
        target = shard_tensor(name, layout, model.group.rank)
        copy(target, parameter.data, checkpoint.source, finite=finite)
        for stored, entry in repeated:
            if stored.parameter == name and difference(target, parameter.data, {name: [(stored, entry)]}):
                raise CheckpointError(f"{checkpoint.path}: the embedding is tied to the head, but the head is another tensor")
        if layout.replicated:
            values = parameter.detach().cpu().contiguous().view(torch.uint8)
            checksum = zlib.crc32(values.numpy().tobytes(), checksum)
    return str(checksum)


def _fingerprint(checkpoint: Checkpoint) -> str:
    """Of the config, the headers, checksums if the format has them, and a sample of every tensor: SAMPLES runs of its rows' first
    numbers, at places that its name decides, which tells other weights of the same shapes."""
    headers = {name: (str(entry.dtype), entry.shape, entry.start) for name, (_, entry) in checkpoint.tensors.items()}
    known = hashlib.sha256(json.dumps([dict(checkpoint.hf.config), headers], sort_keys=True).encode())
    known.update(repr(sorted(checkpoint.checksums.items())).encode())
    for name, (_, entry) in checkpoint.tensors.items():
        draw = random.Random(name)
        for _ in range(SAMPLES):
            row = draw.randrange(entry.shape[0])
            values = entry.rows(row, row + 1, sparse=True).flatten()
            at = draw.randrange(len(values))
            known.update(values[at : at + SAMPLED_NUMBERS].contiguous().view(torch.uint8).numpy().tobytes())
    return known.hexdigest()


def _check_alike(what: str, fingerprint: str, group: TPGroup) -> None:
    texts = exchange(fingerprint, group)
    if others := [str(rank) for rank, text in enumerate(texts) if text != texts[0]]:
        raise CheckpointError(
            f"rank {', '.join(others)} and rank 0 do not have the same {what}: all ranks must load the same checkpoint"
        )
