"""Who am I in the tensor-parallel group.

A :class:`TPGroup` is passed to everything that communicates; there is no global parallel state. A group of one device
holds no process group and never touches ``torch.distributed``, so the single-device model is the same code at size 1.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from parallel.compiled import carrier
from parallel.layout import Run, deal


@dataclass(frozen=True)
class TPGroup:
    """The ranks that share one copy of the model.

    ``rank`` is this process's place in the group (0 <= rank < size), which is what decides the shard that it owns.
    ``process_group`` is None when ``size`` is 1, and for a group that cannot communicate: on the meta device it still tells
    what each rank would hold.

    ``virtual_shards`` turns on invariant mode: parameters are cut into that many shards whatever the number of ranks, each rank
    owns a contiguous run of them, and all sums over shards have the same bits for every ``size`` (see tree.py). Without it
    there is one shard a rank.

    ``shared_memory``: CPUs of one machine exchange through memory where they can, instead of gloo (see shared_memory.py).
    """

    rank: int = 0
    size: int = 1
    process_group: dist.ProcessGroup | None = None
    virtual_shards: int | None = None
    shared_memory: bool = True
    over_gloo: bool = field(init=False, repr=False, compare=False)
    """Whether gloo carries what ranks send from their CPUs."""
    cpu_name: str = field(init=False, repr=False, compare=False, default="")
    """The name under which torch's functional collectives know who carries tensors of CPUs in compiled code."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} is outside a tensor-parallel group of size {self.size}")
        if self.virtual_shards is not None and self.virtual_shards < 1:
            raise ValueError(f"there must be at least one virtual shard, not {self.virtual_shards} virtual shards")
        if self.virtual_shards is not None and self.virtual_shards < self.size:
            raise ValueError(
                f"{self.virtual_shards} virtual shards cannot be dealt over {self.size} ranks, one would own none"
            )

        ranks = self.process_group
        over_gloo = ranks is not None and "cpu:gloo" in dist.get_backend_config(ranks)
        object.__setattr__(self, "over_gloo", over_gloo)
        if ranks is not None:
            object.__setattr__(self, "cpu_name", carrier(ranks) if over_gloo and self.shared_memory else ranks.group_name)

    def __deepcopy__(self, _: object) -> TPGroup:
        """Itself: a copy of a module communicates over the same ranks, and a process group cannot be copied."""
        return self

    @property
    def shards(self) -> int:
        """Into how many shards parameters are cut."""
        return self.size if self.virtual_shards is None else self.virtual_shards

    @property
    def invariant(self) -> bool:
        """Whether results must not depend on the number of ranks."""
        return self.virtual_shards is not None

    @property
    def owners(self) -> tuple[Run, ...]:
        """The run of shards that each rank owns."""
        return deal(self.shards, self.size)

    @property
    def virtual_owners(self) -> tuple[Run, ...] | None:
        """``owners`` in invariant mode, else None: what a Layout is told."""
        return self.owners if self.invariant else None

    @property
    def local_shards(self) -> range:
        """The shards that this rank owns."""
        return range(*self.owners[self.rank])

    def with_virtual_shards(self, virtual_shards: int | None) -> TPGroup:
        """The same ranks in invariant mode with that many shards (None: in the default mode)."""
        return replace(self, virtual_shards=virtual_shards)

    @property
    def connected(self) -> dist.ProcessGroup:
        """The process group, or a ValueError if there is none: torch would take all ranks that were started instead."""
        if self.process_group is None:
            raise ValueError(f"a tensor-parallel group of size {self.size} needs a process group to communicate")
        return self.process_group

    @property
    def name(self) -> str:
        """The name under which torch's functional collectives know the process group."""
        return self.connected.group_name

    @classmethod
    def from_process_group(cls, process_group: dist.ProcessGroup) -> TPGroup:
        """The group of an initialised ``torch.distributed`` process group that this process belongs to."""
        size = dist.get_world_size(process_group)
        if size < 1:
            raise ValueError("this process is not a member of the process group that it was given")
        if size == 1:
            return single_device()
        return cls(dist.get_rank(process_group), size, process_group)

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh) -> TPGroup:
        """The group along a one-dimensional mesh, for example ``TPGroup.from_mesh(mesh["tp"])``."""
        if mesh.ndim != 1:
            raise ValueError(
                f"TPGroup needs a mesh of one dimension, this one has {mesh.ndim} ({mesh.mesh_dim_names}): "
                'slice it first, as in mesh["tp"]'
            )
        if mesh.get_coordinate() is None:
            raise ValueError(f"this rank is not one of the mesh's {mesh.size()}")
        return cls.from_process_group(mesh.get_group())

    @classmethod
    def from_environment(cls) -> TPGroup:
        """All ranks that torchrun started, as one group (its process group must be initialised first if there are several).

        Without torchrun's variables it is the single device.
        """
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world == 1:
            return single_device()
        if not dist.is_initialized():
            raise ValueError(
                f"torchrun started {world} ranks: call torch.distributed.init_process_group() before TPGroup.from_environment()"
            )
        assert dist.group.WORLD is not None
        return cls.from_process_group(dist.group.WORLD)


def single_device() -> TPGroup:
    """The group of one device. It needs no ``torch.distributed`` at all."""
    return TPGroup()
