"""What FSDP2 (``torch.distributed.fsdp.fully_shard``) makes of a parameter: a DTensor, cut along its rows over the replicas.

A parameter that tensor parallelism has cut already is cut once more: of its local rows [rows of this TP rank, ...] each
data-parallel replica keeps a run. Everything that walks over parameters goes through :func:`held` and :func:`whole`, which take
plain tensors as well.

Source: Zhao et al., PyTorch FSDP (2023).
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from parallel.layout import Run


class Held(NamedTuple):
    """The rows of a TP rank's local tensor that this replica keeps, and the replicas that share it (None: each has all rows)."""

    tensor: Tensor
    rows: Run
    replicas: dist.ProcessGroup | None


def is_sharded(tensor: Tensor) -> bool:
    """Whether FSDP2 has cut it. Its module takes a third of a second to import, and there is no DTensor before that."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def held(tensor: Tensor) -> Held:
    """What this rank holds of a local tensor.

    Raises:
        ValueError: for a DTensor that fully_shard does not make.
    """
    if not is_sharded(tensor):
        return Held(tensor, Run(0, tensor.shape[0] if tensor.ndim else 1), None)
    sharded: Any = tensor
    if sharded.device_mesh.ndim != 1 or not sharded.placements[0].is_shard(0):
        raise ValueError(
            f"a parameter is a DTensor with placements {tuple(sharded.placements)}: only fully_shard over one mesh dimension "
            "is known here"
        )
    mesh, local = sharded.device_mesh, sharded.to_local()
    each = -(-tensor.shape[0] // mesh.size())  # as torch.chunk cuts
    start = min(mesh.get_local_rank() * each, tensor.shape[0])
    return Held(local, Run(start, start + local.shape[0]), mesh.get_group())


def whole(tensor: Tensor) -> Tensor:
    """The TP rank's local tensor with all its rows: one all-gather over the replicas, if they share it."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def cut_again(model: nn.Module) -> None:
    """Frees what FSDP2 has gathered and not freed: after a forward pass the outermost module keeps its parameters whole for
    backward, which does not come if the pass was without gradients. Until then its parameters are not the optimizer's."""
    library: Any = sys.modules.get("torch.distributed.fsdp")
    for module in model.modules() if library else ():
        if isinstance(module, library.FSDPModule):
            module.reshard()


def overlap(run: Run, rows: Run) -> Run:
    """What of a run of local rows lies in ``rows``, counted from the first of these."""
    start, stop = max(run.start, rows.start), min(run.stop, rows.stop)
    return Run(start - rows.start, max(start, stop) - rows.start)
