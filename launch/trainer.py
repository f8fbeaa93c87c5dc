"""A model in training: its engine, optimizer and text."""

from __future__ import annotations

import math
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from launch.data import Corpus
from launch.engines import Ddp, DeepSpeed, Engine, Fsdp2
from launch.environment import UserError
from launch.report import Trace
from launch.train_config import TrainConfig
from parallel import collectives
from parallel.group import TPGroup, single_device
from tpblock import Decoder, load_pretrained

KEPT_CHECKPOINTS = 2
RESUMED_ALIKE = ("dropout", "dtype", "batch", "seq_len", "seed", "virtual_shards")
"""What a resumed run may not change unnoticed: with it, the same steps would be others."""


@dataclass
class Trainer:
    """A model on a mesh of ranks with dimensions ("dp", "tp"), or with None on the single device."""

    config: TrainConfig
    group: TPGroup
    mesh: DeviceMesh | None
    device: torch.device
    corpus: Corpus
    first_step: int = 0
    trace: Trace = field(default_factory=Trace)

    def __post_init__(self) -> None:
        self.replicas = 1 if self.mesh is None else self.mesh["dp"].size()
        self.micro_batches = self.replicas * self.config.accumulation
        """Those of a step, on all replicas."""
        self.rows = self.config.batch // self.micro_batches
        """The sequences of a replica's micro-batch."""
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
        self.engine = self._engine()

    @classmethod
    def single(cls, config: TrainConfig, device: torch.device, corpus: Corpus, replicas: int) -> Trainer:
        """The same steps on the single device, with as many micro-batches as all replicas have."""
        alone = replace(config, engine="ddp", zero_stage=None, accumulation=config.accumulation * replicas)
        return cls(alone, single_device(), None, device, corpus)

    def _engine(self) -> Engine:
        config = self.config
        options: Any = {"clip": config.clip, "accumulation": config.accumulation}
        match config.engine:
            case "ddp":
                return Ddp(self.model, self._optimizer, self.mesh, **options)
            case "fsdp2":
                return Fsdp2(self.model, self._optimizer, self.mesh, **options)
            case "deepspeed":
                options |= {"zero": {"stage": config.zero_stage}, "rows": self.rows}
                return DeepSpeed(self.model, self._optimizer, self.mesh, **options)

    def _optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW, without weight decay on norms and biases."""
        config, parameters = self.config, list(model.parameters())
        matrices, vectors = [p for p in parameters if p.ndim >= 2], [p for p in parameters if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        # On the CPU the fused form rounds the last elements of a tensor otherwise than the rest, and which these are depends on
        # how the tensor is cut.
        fused = self.device.type != "cpu" or not self.group.invariant
        return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=fused)

    def resume(self, path: Path) -> None:
        if self.config.engine != "deepspeed" and any(path.glob("*mp_rank_*")):
            raise ValueError(f"{path} was saved by DeepSpeed: go on from it with --engine deepspeed")
        try:
            extra = self.engine.load(path)
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
        parts, ours = extra.get("micro_batches"), self.micro_batches
        if self.group.invariant and parts != ours:
            raise ValueError(
                f"{path} was saved by a run of {parts} micro-batches a step, this one has {ours}, which makes other bits: "
                f"--accumulation times the replicas ({self.config.accumulation} x {self.engine.replicas.size}) must be {parts}"
            )
        self.first_step = extra["steps"]
        if self.first_step >= self.config.steps:
            raise ValueError(
                f"{path} was saved after step {self.first_step}, --steps {self.config.steps} leaves nothing to do"
            )

    def step(self, step: int) -> tuple[Tensor, Tensor]:
        """One optimizer step. Returns loss and gradient norm, the same on every rank."""
        config, replica = self.config, self.engine.replicas
        self.engine.set_learning_rate(config.learning_rate(step))
        rows = self.corpus.batch(
            config.seq_len, config.batch, seed=config.seed, step=step, dp_rank=replica.rank, dp_size=replica.size
        )
        batch = [tensor.to(self.device) for tensor in rows]
        check_same_batch(batch, self.group, replica)
        parts = zip(*(tensor.split(self.rows) for tensor in batch), strict=True)
        for number, (ids, labels) in enumerate(parts, start=replica.rank * config.accumulation):
            self.engine.micro_batch(ids, labels, step=step, first_token=number * self.rows * config.seq_len)
        loss, norm = self.engine.step()
        self.trace.append(loss, norm)
        return loss, norm

    @torch.no_grad()
    def validate(self) -> float:
        """The mean loss over fixed batches of held-out text, in micro-batches as in training."""
        config, replica, module = self.config, self.engine.replicas, self.engine.module
        module.eval()
        losses = []
        for batch in self.corpus.validation_batches(config.seq_len, config.batch, config.validation_batches):
            mine = (tensor.to(self.device).chunk(replica.size)[replica.rank].split(self.rows) for tensor in batch)
            losses += [module(ids, labels=labels) for ids, labels in zip(*mine, strict=True)]
        module.train()
        everyones = self.engine.everyones(torch.stack(losses)).tolist()
        return math.fsum(everyones) / len(everyones)  # exact, so that their order does not matter

    def save(self, folder: Path, steps: int) -> None:
        """Writes checkpoints/step-N, then removes older ones but the latest.

        Raises:
            UserError: perhaps on some ranks only, if something cannot be written (a full disk).
        """
        checkpoints = folder / "checkpoints"
        settings = {
            name: value if isinstance(value, int | float | None) else str(value) for name, value in asdict(self.config).items()
        }
        extra = {
            "steps": steps,
            "threads": torch.get_num_threads(),
            "micro_batches": self.micro_batches,
            "config": settings,
        }
        try:
            checkpoints.mkdir(exist_ok=True)
            self.engine.save(checkpoints / f"step-{steps}", extra)
            if self.group.rank == 0 and self.engine.replicas.rank == 0:
                complete = [path for path in checkpoints.glob("step-*") if path.suffix != ".partial"]
                complete.sort(key=lambda path: int(path.name.removeprefix("step-")))
                for old in complete[:-KEPT_CHECKPOINTS]:
                    shutil.rmtree(old)
        except (OSError, RuntimeError) as error:
            raise UserError(str(error), code=1) from error


def check_same_batch(batch: Sequence[Tensor], group: TPGroup, replicas: TPGroup) -> None:
    """A UserError on every rank of every replica if ranks that share a copy of the model were given different tokens.

    Args:
        batch: tensors on the device of the groups' backend.
    """
    if group.size == 1:
        return  # a copy of its own
    checksum = 0
    for tensor in batch:
        checksum = zlib.crc32(tensor.cpu().contiguous().numpy().tobytes(), checksum)
    mine = torch.tensor([checksum], device=batch[0].device)
    shared = collectives.all_gather(mine, group, [1] * group.size)
    checksums = collectives.all_gather(shared, replicas, [group.size] * replicas.size).view(replicas.size, group.size)
    for replica, (first, *others) in enumerate(checksums.tolist()):
        for rank, other in enumerate(others, start=1):
            if other != first:
                raise UserError(
                    f"tensor-parallel rank {rank} of {group.size} of replica {replica} was given another batch than rank 0, with "
                    "which it shares a copy of the model"
                )
