"""The options of launch.train."""

from __future__ import annotations

import argparse
import json
import math
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from launch.data import VOCABULARY, Corpus
from launch.environment import Environment, Options, UserError
from launch.report import COPIED, PRETRAINED, TOLERANCES, Tolerances
from launch.tokenizer import TOKENIZER, read_tokenizer
from tpblock import ModelConfig
from tpblock.config import default_d_ff
from tpblock.formats.convert import open_checkpoint

SIZES = {"dim": 128, "layers": 4, "heads": 4, "kv_heads": 2, "d_ff": None}
"""Those of the small model, where the command line gives no others."""


@dataclass(frozen=True)
class TrainConfig(Options):
    """Train a small Llama-shaped model, or go on training a pretrained one, with tensor parallelism, on the source files of
    Python's standard library."""

    config: Path | None = None
    """A TOML file with any of these options (batch = 16, zero_stage = 2), which the command line overrides. A run's config.toml
    is such a file."""
    init: Path | None = None
    """A pretrained model to start from: a Hugging Face folder, or one that launch.shard wrote. The text is cut into the tokens of
    its tokenizer.json, or into bytes without one. The trained model is written as a Hugging Face folder at the end."""
    dim: int | None = None
    """Width of the model; 128 if not given. This and the other sizes are those of the folder with --init."""
    layers: int | None = None
    """Number of blocks; 4 if not given."""
    heads: int | None = None
    """Query heads a block; 4 if not given."""
    kv_heads: int | None = None
    """Key and value heads a block, 2 if not given: as many as --heads is multi-head attention, fewer grouped-query, 1
    multi-query."""
    d_ff: int | None = None
    """Width of the feed-forward; 8/3 of --dim rounded up to a multiple of 64 if not given."""
    dropout: float = 0.0
    """Probability of dropout after each sublayer. Its masks do not depend on the number of ranks."""
    sequence_parallel: bool = False
    """Cut the activations between the sharded regions along their tokens as well."""
    virtual_shards: int | None = None
    """Invariant mode: cut the model into that many shards, and compute the same bytes on every number of ranks up to it."""
    dtype: Literal["float32", "bfloat16", "float64"] | None = None
    """Number format of parameters and activations; float32, or that of the folder of --init, if not given. float64 compares best
    with the single device, bfloat16 worst."""
    engine: Literal["ddp", "fsdp2", "deepspeed"] = "ddp"
    """What keeps the data-parallel replicas together, of which there are as many as --tp goes into the ranks. ddp: each has a
    whole optimizer. fsdp2: they share parameters, gradients and optimizer state. deepspeed: they share what --zero-stage says."""
    zero_stage: Literal[0, 1, 2, 3] | None = None
    """What the replicas share under DeepSpeed: nothing (0), optimizer state (1, if not given), gradients too (2), parameters too
    (3)."""
    steps: int = 400
    """Optimizer steps."""
    batch: int = 8
    """Sequences a step, over all ranks and micro-batches."""
    accumulation: int = 1
    """Micro-batches a step: a replica goes through its sequences in so many parts, adding their gradients up."""
    seq_len: int = 128
    """Bytes a sequence, or tokens of the tokenizer with --init."""
    lr: float = 1e-3
    """Highest learning rate: reached after --warmup steps, then falling to a tenth along a cosine."""
    warmup: int = 40
    """Steps over which the learning rate rises to --lr."""
    weight_decay: float = 0.1
    """AdamW's weight decay, on matrices only."""
    clip: float = 1.0
    """Largest norm of the gradient; a longer one is scaled down to it."""
    seed: int = 0
    """Initial values, dropout masks and batches are functions of it."""
    out: Path | None = None
    """Folder of the run, which must be new or empty; if not given, the next free one of runs/1, runs/2, ..."""
    resume: Path | None = None
    """A checkpoint to go on from (runs/1/checkpoints/step-100), saved by ddp or fsdp2 at any number of ranks; by deepspeed at the
    same numbers and stage."""
    checkpoint_every: int = 100
    """Steps between checkpoints; the last step is saved always, and the latest two are kept."""
    validate_every: int = 50
    """Steps between measurements of the loss on held-out text."""
    validation_batches: int = 8
    """Batches of --batch sequences in such a measurement."""
    log_every: int = 1
    """Steps between lines of metrics.jsonl."""
    compare: bool = True
    """At the end, take the same steps on a single device and compare."""

    def completed(self) -> TrainConfig:
        """With what was not given filled in.

        Raises:
            ValueError: if sizes are given beside a folder that has its own.
        """
        if self.engine == "deepspeed" and self.zero_stage is None:
            return replace(self, zero_stage=1).completed()
        if self.init is None:
            sizes = {name: size for name, size in SIZES.items() if getattr(self, name) is None}
            filled = replace(self, dtype=self.dtype or "float32", **sizes)  # type: ignore[arg-type]
            assert filled.dim is not None
            return (
                filled if filled.d_ff is not None else replace(filled, d_ff=default_d_ff(filled.dim, ModelConfig.activation))
            )
        given = [f"--{name.replace('_', '-')} {getattr(self, name)}" for name in SIZES if getattr(self, name) is not None]
        if given:
            raise ValueError(f"{', '.join(given)} cannot go with --init: the sizes are those of {self.init}")
        if self.dtype is not None:
            return self
        dtype = str(open_checkpoint(self.init).dtype()).removeprefix("torch.")
        if dtype not in TOLERANCES:
            raise ValueError(
                f"{self.init} holds {dtype}, which is not trained in: give --dtype, one of {', '.join(TOLERANCES)}"
            )
        return replace(self, dtype=dtype)  # type: ignore[arg-type]

    def check(self, env: Environment) -> None:
        """A ValueError for what ModelConfig does not see."""
        for name in (
            "steps",
            "batch",
            "accumulation",
            "seq_len",
            "checkpoint_every",
            "validate_every",
            "validation_batches",
            "log_every",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        for name in ("lr", "clip", "timeout"):
            if not getattr(self, name) > 0:
                raise ValueError(f"--{name} must be positive, got {getattr(self, name)}")
        for name in ("warmup", "weight_decay", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name.replace('_', '-')} must not be negative, got {getattr(self, name)}")
        if self.heads and self.dim and self.heads > 0 and self.dim % self.heads:
            raise ValueError(f"--dim {self.dim} is not a multiple of --heads {self.heads}")
        replicas = env.world // env.group.size
        if self.batch % (replicas * self.accumulation):
            raise ValueError(
                f"--batch {self.batch} does not divide into {self.accumulation} micro-batches on each of {replicas} data-parallel "
                f"replicas ({env.world} ranks, --tp {env.group.size})"
            )
        if self.engine != "ddp" and self.virtual_shards is not None:
            raise ValueError(f"--engine {self.engine} adds gradients up in its own order: --virtual-shards needs --engine ddp")
        if self.engine != "deepspeed" and self.zero_stage is not None:
            raise ValueError(f"--zero-stage {self.zero_stage} is DeepSpeed's, --engine is {self.engine}")
        if self.engine != "ddp" and env.mesh is None:
            raise ValueError(f"--engine {self.engine} needs ranks: start 2 or more with torchrun")
        if self.engine == "deepspeed" and self.dtype == "float64":
            raise ValueError("--engine deepspeed trains in float32 or bfloat16, not in float64")
        if self.engine == "deepspeed" and self.resume and self.compare:
            raise ValueError(
                "a single device cannot load DeepSpeed's checkpoints, to compare with: --resume needs --no-compare"
            )

    def model(self) -> ModelConfig:
        """What is trained."""
        if self.init is not None:
            return replace(open_checkpoint(self.init).config, dropout=self.dropout)
        sizes: Any = {name: getattr(self, name) for name in SIZES}
        return ModelConfig(vocab_size=VOCABULARY, max_seq_len=self.seq_len, dropout=self.dropout, **sizes)

    def corpus(self) -> Corpus:
        """What it is trained on.

        Raises:
            ValueError: if the model and its text do not go together.
        """
        model = self.model()
        if self.seq_len > model.max_seq_len:
            raise ValueError(f"--seq-len {self.seq_len} is longer than the max_seq_len {model.max_seq_len} of {self.init}")
        tokenizer = None
        if self.init is not None and (self.init / TOKENIZER).exists():
            tokenizer = read_tokenizer(self.init)
        corpus = Corpus.standard_library(tokenizer=tokenizer)
        corpus.check(self.seq_len, model.vocab_size)
        return corpus

    def allowed(self) -> Tolerances:
        """How far the run may be from the one on a single device."""
        if self.virtual_shards is not None:
            return 0.0, 0.0
        early, late = TOLERANCES[str(self.dtype)]
        copied = self.engine == "deepspeed" and self.dtype == "bfloat16"
        return early * (1 if self.init is None else PRETRAINED) * (COPIED if copied else 1), late

    def learning_rate(self, step: int) -> float:
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))

    def toml(self) -> str:
        """The options that have a value, as a file for --config; without the folder, for each run has its own."""
        values = {name: value for name, value in asdict(self).items() if value is not None and name not in ("config", "out")}
        return "".join(f"{name} = {_toml(value)}\n" for name, value in values.items())


def from_file(arguments: Sequence[str]) -> TrainConfig | None:
    """The options of the file that --config names on the command line; None if it names none.

    Raises:
        UserError: if the file cannot be read, or has an option that there is not or of another type.
    """
    chosen = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    chosen.add_argument("--config", type=Path)
    path = chosen.parse_known_args(arguments)[0].config
    if path is None:
        return None
    try:
        options = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    written = {field.name: str(field.type).removesuffix(" | None") for field in fields(TrainConfig) if field.name != "config"}
    kinds = get_type_hints(TrainConfig)
    values: dict[str, Any] = {}
    for option, value in options.items():
        name = option.replace("-", "_")
        if name not in written:
            raise UserError(f"{path}: there is no option {option}; there are {', '.join(sorted(written))}")
        if not _is_a(value, kinds[name]):
            kind = written[name].replace("Literal[", "one of ").replace("Path", "str").rstrip("]")
            raise UserError(f"{path}: {option} must be {kind}, got {value!r}")
        values[name] = Path(value) if written[name] == "Path" else value
    return TrainConfig(**values)


def _is_a(value: object, kind: Any) -> bool:
    """Whether a value of a TOML file is of an option's type."""
    if get_origin(kind) is Literal:
        return any(value == choice and type(value) is type(choice) for choice in get_args(kind))
    if choices := get_args(kind):
        return any(_is_a(value, choice) for choice in choices)
    return type(value) in {float: (int, float), Path: (str,)}.get(kind, (kind,))


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, int | float) else json.dumps(str(value), ensure_ascii=False)
