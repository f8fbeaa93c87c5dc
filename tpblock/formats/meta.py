"""Meta's Llama folders: consolidated.00.pth, consolidated.01.pth, ..., one file a model-parallel rank, and params.json."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from parallel.layout import Layout
from tpblock.config import ModelConfig
from tpblock.families import Family
from tpblock.formats.checkpoint import Checkpoint, HuggingFace, check_plausible, model_layouts, parse_config, stored_as
from tpblock.formats.files import CheckpointError, Entry, check_readable, read_json
from tpblock.formats.hf import hf_names, shard_by_size
from tpblock.formats.stored import InMemory, Readable, Source, Stored, StoredTensor, apart

PARAMS = "params.json"

FILE_BYTES = 5_000_000_000
"""In a file of the Hugging Face folder that such a checkpoint is merged to, at most."""

TENSORS = {
    "embedding.weight": (Stored("tok_embeddings.weight"),),
    "stack.blocks.{i}.norm_1.weight": (Stored("layers.{i}.attention_norm.weight"),),
    "stack.blocks.{i}.attention.qkv.weight": (
        Stored("layers.{i}.attention.wq.weight", ("q",), pairs=True),
        Stored("layers.{i}.attention.wk.weight", ("k",), pairs=True),
        Stored("layers.{i}.attention.wv.weight", ("v",)),
    ),
    "stack.blocks.{i}.attention.out.weight": (Stored("layers.{i}.attention.wo.weight"),),
    "stack.blocks.{i}.norm_2.weight": (Stored("layers.{i}.ffn_norm.weight"),),
    "stack.blocks.{i}.feedforward.up.weight": (
        Stored("layers.{i}.feed_forward.w1.weight", ("gate",)),
        Stored("layers.{i}.feed_forward.w3.weight", ("up",)),
    ),
    "stack.blocks.{i}.feedforward.down.weight": (Stored("layers.{i}.feed_forward.w2.weight"),),
    "stack.norm.weight": (Stored("norm.weight"),),
    "head.weight": (Stored("output.weight"),),
}

NOT_WEIGHTS = ("rope.freqs",)

CUT_ALONG = {"wq": 0, "wk": 0, "wv": 0, "w1": 0, "w3": 0, "output": 0, "wo": 1, "w2": 1}
"""The dimension along which the files cut a matrix, by the last word of its name. The embedding's is told by its shape."""


@dataclass(frozen=True)
class MetaOptions:
    """What params.json does not say."""

    max_seq_len: int | None = None
    """The longest sequence: 2048 for Llama 1, 4096 for Llama 2, 8192 for Llama 3, 131072 for Llama 3.1 and later."""
    rope_factor: float | None = None
    """By how much a model with use_scaled_rope stretches its rotary embeddings: 8 for Llama 3.1 and 3.3, 32 for Llama 3.2."""
    norm_policy: Literal["error", "first", "mean"] = "error"
    """What to do if the files disagree in the weights of a norm: refuse them, take those of the first file, or the mean."""


def open_meta(folder: Path, options: MetaOptions) -> Checkpoint:
    """A folder of consolidated files. Of the weights only the norms are read, which every file has.

    Raises:
        CheckpointError: naming the file, field or tensor at fault, or the option that params.json needs beside it.
    """
    files = [_read(path) for path in _paths(folder)]
    params = read_json(folder / PARAMS)
    hf_config = _hf_config(params, files, options, folder)
    config, family = parse_config(hf_config)
    check_plausible(config, [entry for file in files for entry in file.values()])
    layouts = model_layouts(config)
    tensors: dict[str, tuple[StoredTensor, Entry]] = {}
    source: dict[str, list[tuple[StoredTensor, Readable]]] = {}
    for parameter, layout in layouts.items():
        for name, stored in stored_as(parameter, layout, Family(family.config, TENSORS), config).items():
            entries = _entries(name, files, folder)
            pieces: list[tuple[StoredTensor, Readable]] = list(_pieces(name, stored, entries, folder))
            tensors |= {f"{entry.path.name}/{name}": (piece, entry) for (piece, _), entry in zip(pieces, entries, strict=True)}
            if len(stored.shape) == 1:
                pieces = [(stored, _norm(name, entries, options, folder))]
            source.setdefault(parameter, []).extend(pieces)
    if unknown := sorted({f"{entry.path.name}/{name}" for file in files for name, entry in file.items()} - tensors.keys()):
        raise CheckpointError(f"{folder} has tensors that the model lacks: {', '.join(unknown[:8])}")
    hf = HuggingFace(hf_config, _hf_files(config, family, layouts, source), {"format": "pt"})
    kind = f"Meta's consolidated files, {len(files)} of them"
    return Checkpoint(folder, kind, len(files), config, family, hf, layouts, tensors, source, {})


def _paths(folder: Path) -> list[Path]:
    paths = sorted(folder.glob("consolidated.*.pth"))
    for i, path in enumerate(paths):
        if path.name != f"consolidated.{i:02d}.pth":
            raise CheckpointError(f"{folder} has {path.name}, but no consolidated.{i:02d}.pth")
    return paths


def _read(path: Path) -> dict[str, Entry]:
    """The tensors of a file. Its pickle may make tensors and nothing else; their values stay in the file."""
    try:
        check_readable(path)
        found = torch.load(path, weights_only=True, mmap=True, map_location="meta")
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path} is refused: its pickle asks for more than tensors, and was not run") from error
    except (OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError, EOFError) as error:
        raise CheckpointError(f"cannot read {path}: {(str(error) or type(error).__name__).splitlines()[0]}") from error
    if not isinstance(found, dict) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in found.items()):
        raise CheckpointError(f"{path} is not a dict of tensors")
    entries = {}
    for name, value in found.items():
        if name.endswith(NOT_WEIGHTS):
            continue
        plain = value.layout is torch.strided and value.dtype.is_floating_point and value.dim() in (1, 2)
        plain = plain and value.is_contiguous() and value.numel() > 0
        # Where a tensor that was itself saved from the meta device would lie is None.
        storage = getattr(value.untyped_storage(), "_checkpoint_offset", None) if plain else None
        start = None if storage is None else storage + value.storage_offset() * value.itemsize
        if start is None or start + value.nbytes > path.stat().st_size:
            raise CheckpointError(f"{path}: {name} is no vector or matrix of floating-point numbers that lie in this file")
        entries[name] = Entry(path, value.dtype, tuple(value.shape), start)
    return entries


def _hf_config(
    params: Mapping[str, Any], files: Sequence[Mapping[str, Entry]], options: MetaOptions, folder: Path
) -> dict[str, Any]:
    """config.json for the model. What params.json leaves out is read off the tensors."""

    def take(field: str) -> Any:
        if field not in params:
            raise CheckpointError(f"{folder / PARAMS} lacks {field}")
        return params[field]

    def rows(name: str) -> int:
        return sum(entry.shape[0] for entry in _entries(name, files, folder))

    max_seq_len = options.max_seq_len or params.get("max_seq_len")
    if max_seq_len is None:
        raise CheckpointError(
            f"{folder / PARAMS} does not say how long sequences may be, which --max-seq-len of launch.shard and "
            "launch.merge has to, or load_pretrained(meta=MetaOptions(max_seq_len=...)): "
            "2048 for Llama 1, 4096 for Llama 2, 8192 for Llama 3, 131072 for Llama 3.1 and later"
        )
    scaling = None
    if params.get("use_scaled_rope"):
        if options.rope_factor is None:
            raise CheckpointError(
                f"{folder / PARAMS} has use_scaled_rope without its factor, which --rope-factor of launch.shard and "
                "launch.merge has to give, or load_pretrained(meta=MetaOptions(rope_factor=...)): "
                "8 for Llama 3.1 and 3.3, 32 for Llama 3.2"
            )
        scaling = {
            "rope_type": "llama3",
            "factor": options.rope_factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    vocab_size = rows("output.weight")
    if params.get("vocab_size", -1) not in (-1, vocab_size):
        raise CheckpointError(f"{folder}: output.weight has {vocab_size} rows, vocab_size is {params['vocab_size']}")
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": None,  # the tokenizer knows
        "dtype": str(files[0]["output.weight"].dtype).removeprefix("torch."),
        "eos_token_id": None,
        "hidden_act": "silu",
        "hidden_size": take("dim"),
        "intermediate_size": rows("layers.0.feed_forward.w1.weight"),
        "max_position_embeddings": max_seq_len,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": take("n_heads"),
        "num_hidden_layers": take("n_layers"),
        "num_key_value_heads": params.get("n_kv_heads") or take("n_heads"),
        "rms_norm_eps": take("norm_eps"),
        "rope_scaling": scaling,
        "rope_theta": params.get("rope_theta", 10_000.0),
        "tie_word_embeddings": False,
        "vocab_size": vocab_size,
    }


def _entries(name: str, files: Sequence[Mapping[str, Entry]], folder: Path) -> list[Entry]:
    for i, file in enumerate(files):
        if name not in file:
            raise CheckpointError(f"{folder / f'consolidated.{i:02d}.pth'} lacks {name}")
    return [file[name] for file in files]


def _pieces(name: str, whole: StoredTensor, entries: Sequence[Entry], folder: Path) -> Iterator[tuple[StoredTensor, Entry]]:
    """What each file's tensor holds of the parameter.

    Llama 1 and 2 cut the embedding along its features, Llama 3 along the vocabulary. Its files have as many features as the model
    in the second case and fewer in the first; a single file has all of both, and it does not matter.
    """
    dim = CUT_ALONG.get(name.split(".")[-2], 0)
    if name == "tok_embeddings.weight" and entries[0].shape[1:] != whole.shape[1:]:
        dim = 1
    replicated = len(whole.shape) == 1
    sizes = [whole.shape[dim]] * len(entries) if replicated else [e.shape[dim] if len(e.shape) == 2 else 0 for e in entries]
    expected = [(*whole.shape[:dim], size, *whole.shape[dim + 1 :]) for size in sizes]
    if [entry.shape for entry in entries] != expected or not replicated and sum(sizes) != whole.shape[dim]:
        shapes = ", ".join(str(entry.shape) for entry in entries)
        raise CheckpointError(f"{folder}: {name} has the shapes {shapes}, {PARAMS} makes it {whole.shape} in all")
    if len(kinds := {str(entry.dtype) for entry in entries}) > 1:
        raise CheckpointError(f"{folder}: {name} is of {', '.join(sorted(kinds))} in different files")
    at = 0
    for entry, size in zip(entries, sizes, strict=True):
        yield whole if replicated else whole.cut(dim, at, at + size), entry
        at += size


def _norm(name: str, entries: Sequence[Entry], options: MetaOptions, folder: Path) -> Readable:
    """The weights of a norm, which every file has whole."""
    values = [entry.rows(0, entry.shape[0]) for entry in entries]
    for entry, value in zip(entries, values, strict=True):
        if options.norm_policy == "error" and (most := apart(value, values[0])):
            raise CheckpointError(
                f"{folder}: {name} of {entry.path.name} differs from that of {entries[0].path.name} by up to {most:g}; "
                'norm_policy (--norm-policy) "first" or "mean" takes one of them or their mean'
            )
    if options.norm_policy == "mean":
        return InMemory(torch.stack(values).double().mean(0).to(entries[0].dtype))
    return entries[0]


def _hf_files(config: ModelConfig, family: Family, layouts: Mapping[str, Layout], source: Source) -> dict[str, str]:
    names = hf_names(config, family, layouts, [family.prefix])
    return shard_by_size(
        {name: (source[stored.parameter][0][1].dtype, stored.shape) for name, stored in names.items()}, FILE_BYTES
    )
