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
"""Told of each collective of exchange.py, for which torch runs no operator."""

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


def note(kind: str, elements: int, dtype: torch.dtype, sent: float) -> None:
    """Tells who listens of a collective of exchange.py, as :class:`Sent` describes it."""
    for listener in listeners:
        listener(Sent(kind, elements, dtype, sent))


@dataclass(frozen=True)
class Sent:
    """One collective.

    Attributes:
        kind: all_reduce, all_gather, reduce_scatter or all_to_all; any other has its operator's name, and no elements.
        elements: of the whole tensor: what an all-reduce or a reduce-scatter sums, what an all-gather returns.
        sent: bytes that one rank sends: with the usual ring algorithm; in shared memory, that it writes.
    """

    kind: str
    elements: int
    dtype: torch.dtype | None
    sent: float = field(compare=False, default=0.0)

    @property
    def bytes(self) -> int:
        return 0 if self.dtype is None else self.elements * self.dtype.itemsize


def collective(op: Any) -> str | None:
    """The kind of collective that an operator starts, as in :class:`Sent`; None if it starts none (waiting for one does not)."""
    if op.namespace not in ("_c10d_functional", "c10d"):
        return None
    name = op.name().partition("::")[2].partition(".")[0]
    return None if name == "wait_tensor" else KINDS.get(name, name)


class Recorder(TorchDispatchMode):
    """Notes every collective that runs under it, in order.

    On a ring of n ranks each sends (n - 1)/n of the whole tensor in a reduce-scatter or an all-gather, and twice that in an
    all-reduce, which is the two in a row.
    """

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
        whole, ranks = args[0], self.group.size
        others = (ranks - 1) / ranks
        match kind:
            case "all_reduce":
                whole = whole[0] if of_the_group else whole
                return Sent(kind, whole.numel(), whole.dtype, 2 * others * whole.nbytes)
            case "all_gather":
                size = 1 if of_the_group else ranks  # which is given the result, too, as its first argument
                return Sent(kind, whole.numel() * size, whole.dtype, others * whole.nbytes * size)
            case "reduce_scatter":
                whole = args[1] if of_the_group else whole
                return Sent(kind, whole.numel(), whole.dtype, others * whole.nbytes)
            case "all_to_all":
                given = args[2]
                return Sent(kind, whole.numel(), whole.dtype, whole.nbytes * (1 - given[self.group.rank] / sum(given)))
        return Sent(kind, 0, whole.dtype if isinstance(whole, Tensor) else None)
