"""Which collectives a computation runs, with their sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from parallel.group import TPGroup

listeners: list[Callable[[Sent], None]] = []
"""Told of each collective of eager code through shared memory, for which torch runs no operator."""

KINDS = {
    "all_reduce": "all_reduce",
    "allreduce_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "_allgather_base_": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
"""By the names of torch's operators: those of the functional collectives, and of the process group (with one more underscore)."""


@dataclass(frozen=True)
class Sent:
    """One collective.

    Attributes:
        kind: all_reduce, all_gather, reduce_scatter or all_to_all; any other has its operator's name, and no elements.
        elements: of the whole tensor: what an all-reduce or a reduce-scatter sums, what an all-gather returns.
        sent: bytes that one rank sends with the usual ring algorithm, whatever carries them here.
    """

    kind: str
    elements: int
    dtype: torch.dtype | None
    sent: float = field(compare=False, default=0.0)

    @property
    def bytes(self) -> int:
        return 0 if self.dtype is None else self.elements * self.dtype.itemsize

    @classmethod
    def on_a_ring(cls, kind: str, elements: int, dtype: torch.dtype, ranks: int, kept: float = 0.0) -> Sent:
        """On a ring of n ranks each sends (n - 1)/n of the whole tensor in a reduce-scatter or an all-gather, and twice that in an
        all-reduce, which is the two in a row; in an all-to-all all but what it keeps, which is that share of the tensor."""
        share = {"all_reduce": 2 * (ranks - 1) / ranks, "all_to_all": 1 - kept}.get(kind, (ranks - 1) / ranks)
        return cls(kind, elements, dtype, share * elements * dtype.itemsize)


def note(kind: str, elements: int, dtype: torch.dtype, ranks: int, kept: float = 0.0) -> None:
    """Tells who listens of a collective for which eager code runs no operator; the arguments are those of ``Sent.on_a_ring``."""
    for listener in listeners:
        listener(Sent.on_a_ring(kind, elements, dtype, ranks, kept))


def collective(op: Any) -> str | None:
    """The kind of collective that an operator starts, as in :class:`Sent`; None if it starts none (waiting for one does not)."""
    if op.namespace not in ("_c10d_functional", "c10d"):
        return None
    name = op.name().partition("::")[2].partition(".")[0]
    return None if name == "wait_tensor" else KINDS.get(name, name)


class Recorder(TorchDispatchMode):
    """Notes every collective that runs under it, in order."""

    def __init__(self, group: TPGroup) -> None:
        super().__init__()
        self.group = group
        self.collectives: list[Sent] = []

    def __enter__(self) -> Recorder:
        listeners.append(self.collectives.append)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        listeners.remove(self.collectives.append)
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if (kind := collective(func)) is not None:
            self.collectives.append(self._sent(kind, func.namespace == "c10d", args))
        return func(*args, **(kwargs or {}))

    def _sent(self, kind: str, of_the_group: bool, args: tuple[Any, ...]) -> Sent:
        whole, ranks, kept = args[0], self.group.size, 0.0
        if kind not in KINDS.values():
            return Sent(kind, 0, whole.dtype if isinstance(whole, Tensor) else None)
        if of_the_group:  # an all-reduce is given a list; the others their result first
            whole = {"all_reduce": lambda: whole[0], "reduce_scatter": lambda: args[1]}.get(kind, lambda: whole)()
        elements = whole.numel() * (ranks if kind == "all_gather" and not of_the_group else 1)
        if kind == "all_to_all":
            kept = args[2][self.group.rank] / sum(args[2])
        return Sent.on_a_ring(kind, elements, whole.dtype, ranks, kept)
