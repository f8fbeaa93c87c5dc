"""Trains a model with tensor parallelism, and compares the run with the same steps on a single device.

    torchrun --nproc-per-node 2 -m launch.train --steps 100
    torchrun --nproc-per-node 2 -m launch.train --init FOLDER --steps 100

The model is a small Llama-shaped one, or with --init a pretrained one. Each run has a folder of its own: config.json,
metrics.jsonl (one line a logged step), loss.png, checkpoints/step-N, and with --init the trained model as a Hugging Face folder.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from launch.data import VOCABULARY, Corpus
from launch.environment import Environment, Options, UserError, launch, make_deterministic, parse
from launch.report import PRETRAINED, TOLERANCES, Reporter, Tolerances, Trace, compare
from launch.tokenizer import TOKENIZER, read_tokenizer
from parallel.checkpoint import load_checkpoint, save_checkpoint
from parallel.gradients import clip_grad_norm_
from parallel.group import TPGroup, single_device
from parallel.state import gather_state
from tpblock import Decoder, ModelConfig, load_pretrained, save_pretrained
from tpblock.formats.convert import open_checkpoint

KEPT_CHECKPOINTS = 2
RESUMED_ALIKE = ("dropout", "dtype", "batch", "seq_len", "seed", "virtual_shards")
"""What a resumed run may not change unnoticed: with it, the same steps would be others."""
SIZES = {"dim": 128, "layers": 4, "heads": 4, "kv_heads": 2, "d_ff": None}
"""Those of the small model, where the command line gives no others."""


@dataclass(frozen=True)
class TrainConfig(Options):
    """Train a small Llama-shaped model, or go on training a pretrained one, with tensor parallelism, on the source files of
    Python's standard library."""

    init: Path | None = None
    """A pretrained model to start from: a Hugging Face folder, or one that launch.shard wrote. The text is cut into the tokens of
    its tokenizer.json, or into bytes without one. The trained model is written as a folder of the same kind at the end."""
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
    steps: int = 400
    """Optimizer steps."""
    batch: int = 8
    """Sequences a step, over all ranks."""
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
    """A checkpoint to go on from (runs/1/checkpoints/step-100), saved at any number of ranks."""
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
        if self.init is None:
            sizes = {name: size for name, size in SIZES.items() if getattr(self, name) is None}
            return replace(self, dtype=self.dtype or "float32", **sizes)  # type: ignore[arg-type]
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
        for name in ("steps", "batch", "seq_len", "checkpoint_every", "validate_every", "validation_batches", "log_every"):
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
        if env.world > env.group.size:
            raise ValueError(
                f"{env.world} ranks with --tp {env.group.size} would be {env.world // env.group.size} data-parallel replicas, "
                f"which this program does not train: start {env.group.size} ranks, or leave --tp away"
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
        return early * (1 if self.init is None else PRETRAINED), late

    def learning_rate(self, step: int) -> float:
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


@dataclass
class Trainer:
    """A model on a group with its optimizer and text. The single-device run is the same object on another group."""

    config: TrainConfig
    group: TPGroup
    device: torch.device
    corpus: Corpus
    first_step: int = 0
    trace: Trace = field(default_factory=Trace)

    def __post_init__(self) -> None:
        config, dtype = self.config, getattr(torch, str(self.config.dtype))
        self.group = self.group.with_virtual_shards(config.virtual_shards)
        options: Any = {
            "group": self.group,
            "sequence_parallel": config.sequence_parallel,
            "reduce_dtype": torch.float32 if dtype == torch.bfloat16 else None,
            "device": self.device,
            "dtype": dtype,
            "seed": config.seed,
        }
        if config.init is None:
            self.model = Decoder(config.model(), **options)
        else:
            self.model = load_pretrained(config.init, config=config.model(), **options)
        matrices = [p for p in self.model.parameters() if p.ndim >= 2]
        vectors = [p for p in self.model.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        # On the CPU the fused form rounds the last elements of a tensor otherwise than the rest, and which these are depends on
        # how the tensor is cut.
        fused = self.device.type != "cpu" or not self.group.invariant
        self.optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=fused)

    def resume(self, path: Path) -> None:
        try:
            extra = load_checkpoint(path, self.model, self.group, self.optimizer)
        except RuntimeError as error:  # damaged files: told in a line, on every rank
            raise UserError(str(error)) from error
        for name in RESUMED_ALIKE:
            saved, ours = extra["config"][name], getattr(self.config, name)
            if saved != ours:
                raise ValueError(f"{path} was saved by a run with {name} {saved}, this one has {name} {ours}")
        threads, ours = extra.get("threads"), torch.get_num_threads()
        if self.group.invariant and self.device.type == "cpu" and threads != ours:
            raise ValueError(
                f"{path} was saved by ranks of {threads} threads, these have {ours}, which makes other bits: "
                f"start them with OMP_NUM_THREADS={threads}"
            )
        self.first_step = extra["steps"]
        if self.first_step >= self.config.steps:
            raise ValueError(
                f"{path} was saved after step {self.first_step}, --steps {self.config.steps} leaves nothing to do"
            )

    def step(self, step: int) -> tuple[Tensor, Tensor]:
        """One optimizer step. Returns loss and gradient norm, the same on every rank."""
        config = self.config
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = config.learning_rate(step)
        ids, labels = self.corpus.batch(config.seq_len, config.batch, seed=config.seed, step=step)
        loss = self.model(ids.to(self.device), labels=labels.to(self.device), step=step)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = clip_grad_norm_(self.model, config.clip, self.group)
        self.optimizer.step()
        self.trace.append(loss.detach(), norm)
        return loss.detach(), norm

    @torch.no_grad()
    def validate(self) -> float:
        """The mean loss over fixed batches of held-out text."""
        config = self.config
        self.model.eval()
        batches = self.corpus.validation_batches(config.seq_len, config.batch, config.validation_batches)
        losses = [self.model(ids.to(self.device), labels=labels.to(self.device)) for ids, labels in batches]
        self.model.train()
        return torch.stack(losses).double().mean().item()

    def save(self, folder: Path, steps: int) -> None:
        """Writes checkpoints/step-N, then removes older ones but the latest."""
        checkpoints = folder / "checkpoints"
        checkpoints.mkdir(exist_ok=True)
        extra = {"steps": steps, "threads": torch.get_num_threads(), "config": json.loads(_as_json(self.config))}
        save_checkpoint(checkpoints / f"step-{steps}", self.model, self.group, self.optimizer, extra)
        if self.group.rank == 0:
            complete = [path for path in checkpoints.glob("step-*") if path.suffix != ".partial"]
            complete.sort(key=lambda path: int(path.name.removeprefix("step-")))
            for old in complete[:-KEPT_CHECKPOINTS]:
                shutil.rmtree(old)


def train(config: TrainConfig, env: Environment) -> None:
    """The program: what every rank runs."""
    if config.virtual_shards is not None:
        make_deterministic(env.device)
    with env.together("settings"):
        config = config.completed()
        config.check(env)
        corpus = config.corpus()
    env.agree("training text", corpus.fingerprint())
    with env.together("model"):
        trainer = Trainer(config, env.group, env.device, corpus)
    if config.resume:
        with env.together("checkpoint"):
            trainer.resume(config.resume)
    folder = _run_folder(config, env)
    tokens = config.batch * config.seq_len
    with Reporter(folder, config.steps, tokens, enabled=env.is_main, device=env.device, unit=corpus.unit) as reporter:
        reporter.start(asdict(config), trainer.model.config.parameters(), env.group.size)
        run(trainer, folder, reporter)
        if config.init is not None:
            with env.together("trained model"):
                save_pretrained(trainer.model, folder / "model")
        weights = gather_state(trainer.model, trainer.group) if config.compare else {}
        env.close()  # the comparison is the business of rank 0 alone, nobody waits for it
        if not env.is_main:
            return
        if config.compare:
            single = Trainer(config, single_device(), env.device, corpus)
            if config.resume:
                single.resume(config.resume)
            for step in reporter.steps("one device", single.first_step):
                single.step(step)
            single_weights = gather_state(single.model, single.group)
            comparison = compare(trainer.trace, weights, single.trace, single_weights, config.allowed(), trainer.first_step)
            reporter.comparison(comparison, env.group.size)
        reporter.finish(*([] if config.init is None else ["model"]))
    if config.compare and not comparison.equal:
        hint = ". If only later steps do, training may have amplified rounding (a lower --lr, or --dtype float64, would tell)"
        raise UserError(
            f"the run on {env.group.size} ranks differs from the single device by more than allowed"
            + (hint if config.virtual_shards is None else ""),
            code=1,
        )


def run(trainer: Trainer, folder: Path, reporter: Reporter) -> None:
    """Trains to the last step, with all that happens on the way."""
    config = trainer.config
    reporter.validation(trainer.first_step, trainer.validate())
    for step in reporter.steps("training", trainer.first_step):
        loss, norm = trainer.step(step)
        done = step + 1
        if done % config.log_every == 0 or done == config.steps:
            if not math.isfinite(loss):  # replicated, so that all ranks see it
                raise UserError(f"the loss is {float(loss)} at step {done}: try a lower --lr than {config.lr:g}")
            reporter.step(done, loss, norm, config.learning_rate(step))
        if done % config.validate_every == 0 or done == config.steps:
            with reporter.paused():
                reporter.validation(done, trainer.validate())
        if done % config.checkpoint_every == 0 or done == config.steps:
            with reporter.paused():
                trainer.save(folder, done)


def _run_folder(config: TrainConfig, env: Environment) -> Path:
    """The run's folder, made by rank 0."""
    name = ""
    with env.together("folder"):
        if env.is_main:
            number = 1
            while config.out is None and Path("runs", str(number)).exists():
                number += 1
            folder = config.out or Path("runs", str(number))
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise ValueError(f"--out {folder} is there already and not empty: a run needs a folder of its own")
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ValueError(f"cannot make the folder {folder}: {error.strerror}") from error
            (folder / "config.json").write_text(_as_json(config))
            name = str(folder)
    return Path(env.exchange("folder", name)[0])


def _as_json(config: TrainConfig) -> str:
    return json.dumps(asdict(config), indent=2, default=str)


def main(arguments: Sequence[str] | None = None, program: str = "-m launch.train") -> None:
    config = parse(TrainConfig, arguments, program)
    launch(partial(train, config), config, program)


if __name__ == "__main__":
    main()
