"""What trains a model on data-parallel replicas of tensor-parallel ranks: plain or DistributedDataParallel, FSDP2, DeepSpeed.

All are used alike. A step is ``accumulation`` micro-batches a replica, each of its own rows of the global batch:

    for micro_batch in ...:
        engine.micro_batch(ids, labels, step=..., first_token=...)
    loss, norm = engine.step()                # means and norms over all ranks, the same everywhere
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from parallel import collectives
from parallel.checkpoint import load_checkpoint, save_checkpoint
from parallel.data import ReplicaAverage
from parallel.gradients import clip_grad_norm_
from parallel.group import TPGroup, single_device
from parallel.state import global_tensors
from tpblock import Decoder

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


class Engine(ABC):
    """A model in training.

    Args:
        model: this rank's shards, the same on every replica.
        make_optimizer: called with the model once its parameters are what the engine makes of them.
        mesh: all ranks, with dimensions ("dp", "tp"); None on the single device.
        clip: largest norm of the gradient.
        accumulation: micro-batches of a replica in a step.

    Attributes:
        model: without what wraps it.
        module: what is called.
        replicas: those that see other rows of the batch, as a group.
    """

    module: Any
    optimizer: Any

    def __init__(
        self, model: Decoder, make_optimizer: MakeOptimizer, mesh: DeviceMesh | None, clip: float, accumulation: int = 1
    ) -> None:
        self.model, self.mesh, self.clip, self.accumulation = model, mesh, clip, accumulation
        self.replicas = single_device() if mesh is None else TPGroup.from_mesh(mesh["dp"])
        self._losses: list[Tensor] = []
        self.start(make_optimizer)

    @abstractmethod
    def start(self, make_optimizer: MakeOptimizer) -> None:
        """Sets ``module`` and ``optimizer``."""

    @abstractmethod
    def backward(self, ids: Tensor, labels: Tensor, last: bool, coordinates: Mapping[str, Any]) -> Tensor:
        """Adds the gradients of a micro-batch to those of the step; the replicas need not exchange any before the ``last``.
        Returns the loss."""

    def update(self) -> Tensor:
        """Clips the average gradient, takes the optimizer's step and clears the gradients. Returns the norm before clipping."""
        norm = clip_grad_norm_(self.model, self.clip, self.model.group)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def micro_batch(self, ids: Tensor, labels: Tensor, **coordinates: Any) -> None:
        """Forward and backward of this replica's next micro-batch [sequences, tokens]."""
        last = len(self._losses) == self.accumulation - 1
        self._losses.append(self.backward(ids, labels, last, coordinates).detach())

    def step(self) -> tuple[Tensor, Tensor]:
        """The optimizer's step after ``accumulation`` micro-batches. Returns their mean loss and the norm of the gradient."""
        losses, self._losses = torch.stack(self._losses), []
        return self.everyones(losses).double().mean().to(losses.dtype), self.update()

    def everyones(self, values: Tensor) -> Tensor:
        """All replicas' values [n] in their order, [replicas * n]."""
        return collectives.all_gather(values, self.replicas, [len(values)] * self.replicas.size)

    def set_learning_rate(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def global_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each parameter's name and global tensor, one at a time. All ranks go through it together."""
        return global_tensors(self.model, self.model.group)

    def save(self, path: Path, extra: Mapping[str, Any]) -> None:
        """Writes a checkpoint that any engine but DeepSpeed can load on any number of ranks."""
        if self.replicas.rank == 0:
            save_checkpoint(path, self.model, self.model.group, self.optimizer, extra)

    def load(self, path: Path) -> dict[str, Any]:
        """Reads model and optimizer. Returns what was saved as ``extra``."""
        return load_checkpoint(path, self.model, self.model.group, self.optimizer)


class Ddp(Engine):
    """Every replica has a whole optimizer and adds its gradients to the others' while backward goes on. One replica: plain torch.

    In invariant mode the replicas' micro-batches are added in a fixed order instead, at the end (parallel/data.py). Gradients in
    half precision are added up over the replicas in float32.
    """

    def start(self, make_optimizer: MakeOptimizer) -> None:
        self.module, self.average = self.model, None
        if self.model.group.invariant:
            numbered = self.replicas.with_virtual_shards(self.replicas.size * self.accumulation)
            self.average = ReplicaAverage(self.model, numbered)
        elif self.replicas.size > 1:
            self.module = DistributedDataParallel(
                self.model, process_group=self.replicas.process_group, gradient_as_bucket_view=True
            )
            if next(self.model.parameters()).dtype.itemsize < 4:
                # By a lambda: it compares annotations with the classes, and here annotations are text.
                self.module.register_comm_hook(self.replicas, lambda replicas, bucket: _average_in_float32(replicas, bucket))
        self.optimizer = make_optimizer(self.model)

    def backward(self, ids: Tensor, labels: Tensor, last: bool, coordinates: Mapping[str, Any]) -> Tensor:
        waits = isinstance(self.module, DistributedDataParallel) and not last
        with self.module.no_sync() if waits else nullcontext():
            loss = self.module(ids, labels=labels, **coordinates)
            if self.average is not None:
                loss.backward()
                self.average.add()
            else:
                (loss / self.accumulation).backward()
        return loss

    def update(self) -> Tensor:
        if self.average is not None:
            self.average.finish()
        return super().update()


def _average_in_float32(replicas: TPGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """What DistributedDataParallel does with a bucket of gradients, but for the dtype."""
    wide = bucket.buffer().float() / replicas.size
    work = dist.all_reduce(wide, group=replicas.process_group, async_op=True)
    return work.get_future().then(lambda done: bucket.buffer().copy_(done.value()[0]))


class Fsdp2(Engine):
    """Replicas share parameters, gradients and optimizer state: a block's parameters are gathered for the time it computes."""

    def start(self, make_optimizer: MakeOptimizer) -> None:
        assert self.mesh is not None
        dtype = next(self.model.parameters()).dtype
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if dtype.itemsize < 4 else None)
        for block in self.model.stack.blocks:
            fully_shard(block, mesh=self.mesh["dp"], mp_policy=policy)
        self.module = fully_shard(self.model, mesh=self.mesh["dp"], mp_policy=policy)
        assert isinstance(self.module, FSDPModule)
        self.optimizer = make_optimizer(self.model)

    def backward(self, ids: Tensor, labels: Tensor, last: bool, coordinates: Mapping[str, Any]) -> Tensor:
        self.module.set_requires_gradient_sync(last)
        loss = self.module(ids, labels=labels, **coordinates)
        (loss / self.accumulation).backward()
        return loss

    def save(self, path: Path, extra: Mapping[str, Any]) -> None:
        save_checkpoint(path, self.model, self.model.group, self.optimizer, extra)


class DeepSpeed(Engine):
    """DeepSpeed's ZeRO: replicas share optimizer state (1), gradients too (2), parameters too (3), or nothing (0).

    Its checkpoints are its own: they load at the same numbers of ranks and the same stage. In bfloat16 its optimizer works on a
    float32 copy of the parameters.

    Args:
        zero: its settings of that name, {"stage": 2}.
        rows: sequences of a replica's micro-batch.
    """

    def __init__(self, *args: Any, zero: Mapping[str, Any], rows: int, **options: Any) -> None:
        self.zero, self.rows = zero, rows
        super().__init__(*args, **options)

    def start(self, make_optimizer: MakeOptimizer) -> None:
        parameter = next(self.model.parameters())
        os.environ.setdefault("DS_ACCELERATOR", parameter.device.type)
        try:
            import launch.deepspeed as deepspeed
        except ImportError as error:
            raise ValueError(f"DeepSpeed is not installed ({error}): pip install 'tpblock[deepspeed]'") from error
        self.library = deepspeed
        config = {
            "train_micro_batch_size_per_gpu": self.rows,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clip,
            "zero_optimization": self.zero,
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": parameter.dtype == torch.bfloat16},
        }
        self.module = deepspeed.initialize(self.model, self.mesh, config, make_optimizer(self.model))
        self.optimizer = self.module.optimizer

    def backward(self, ids: Tensor, labels: Tensor, last: bool, coordinates: Mapping[str, Any]) -> Tensor:
        loss = self.module(ids, labels=labels, **coordinates)
        self.module.backward(loss)
        if not last:
            self.module.step()  # counts micro-batches; it updates after the last
        return loss

    def update(self) -> Tensor:
        self.module.step()
        return torch.tensor(self.module.get_global_grad_norm(), dtype=torch.float64)

    def global_tensors(self) -> Iterator[tuple[str, Tensor]]:
        return self.library.global_tensors(self.module)

    def save(self, path: Path, extra: Mapping[str, Any]) -> None:
        self.module.save_checkpoint(path.parent, tag=path.name, client_state=extra, save_latest=False)

    def load(self, path: Path) -> dict[str, Any]:
        _, extra = self.module.load_checkpoint(path.parent, tag=path.name)
        return extra
