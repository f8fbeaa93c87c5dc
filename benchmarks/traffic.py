"""What the ranks send: counted with sizes, sent again alone, or left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from parallel import collectives
from parallel.group import TPGroup


@dataclass(frozen=True)
class Sent:
    """One collective.

    Attributes:
        kind: all_reduce, all_gather, reduce_scatter or all_to_all.
        elements: of the whole tensor: what an all-reduce or a reduce-scatter sums, what an all-gather returns.
        sent: bytes that one rank sends with the usual ring algorithm.
    """

    kind: str
    elements: int
    dtype: torch.dtype
    sent: float = field(compare=False, default=0.0)

    @property
    def bytes(self) -> int:
        return self.elements * self.dtype.itemsize


KINDS = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_gather_into_tensor": "all_gather",
    "all_to_all_single": "all_to_all",
}


class Recorder(TorchDispatchMode):
    """Notes every collective that runs under it, in order.

    On a ring of n ranks each sends (n - 1)/n of the whole tensor in a reduce-scatter or an all-gather, and twice that in an
    all-reduce, which is the two in a row.
    """

    def __init__(self, group: TPGroup) -> None:
        super().__init__()
        self.group = group
        self.collectives: list[Sent] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        namespace, _, name = func.name().partition("::")
        name = name.partition(".")[0]
        if namespace in ("_c10d_functional", "c10d", "c10d_functional") and name != "wait_tensor":
            if name not in KINDS:
                raise ValueError(
                    f"the collective {namespace}::{name} is not one of those that are counted: {', '.join(KINDS)}"
                )
            self.collectives.append(self._sent(KINDS[name], args))
        return func(*args, **(kwargs or {}))

    def _sent(self, kind: str, args: tuple[Any, ...]) -> Sent:
        x, others = args[0], (self.group.size - 1) / self.group.size
        match kind:
            case "all_gather":
                return Sent(kind, x.numel() * args[1], x.dtype, others * x.nbytes * args[1])
            case "all_to_all":
                given = args[2]
                return Sent(kind, x.numel(), x.dtype, x.nbytes * (1 - given[self.group.rank] / sum(given)))
            case "all_reduce":
                return Sent(kind, x.numel(), x.dtype, 2 * others * x.nbytes)
            case _:
                return Sent(kind, x.numel(), x.dtype, others * x.nbytes)


@dataclass(frozen=True)
class Traffic:
    """The sum of several collectives."""

    number: int
    bytes: int
    sent: float

    @classmethod
    def of(cls, collectives: Sequence[Sent]) -> Traffic:
        return cls(len(collectives), sum(c.bytes for c in collectives), sum(c.sent for c in collectives))


def by_size(collectives: Sequence[Sent]) -> list[tuple[Sent, int]]:
    """Each kind and size of collective with its number, those that send most in all first."""
    return sorted(Counter(collectives).items(), key=lambda item: -item[0].bytes * item[1])


def replay(sent: Sequence[Sent], group: TPGroup, device: torch.device) -> Callable[[], object]:
    """A function that runs these collectives on zeros, one after the other, with nothing to compute in between."""
    buffers: dict[tuple[int, torch.dtype], Tensor] = {}

    def zeros(elements: int, dtype: torch.dtype) -> Tensor:
        return buffers.setdefault((elements, dtype), torch.zeros(elements, dtype=dtype, device=device))

    def call(one: Sent) -> Callable[[], object]:
        whole, ranks = zeros(one.elements, one.dtype), group.process_group
        if one.kind == "all_reduce":
            return lambda: dist.all_reduce(whole, group=ranks)
        part = zeros(one.elements // group.size, one.dtype)
        if one.kind == "all_gather":
            return lambda: dist.all_gather_single(whole, part, group=ranks)
        if one.kind == "reduce_scatter":
            return lambda: dist.reduce_scatter_single(part, whole, group=ranks)
        raise ValueError(f"a collective of kind {one.kind} cannot be sent again")

    calls = [call(one) for one in sent]
    return lambda: [call() for call in calls]


_buffers: dict[tuple[object, ...], Tensor] = {}


def _repeated(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The rows of x over and over, so that the values are such as occur; zeros if it has none."""
    if not x.shape[0]:
        return x.new_zeros(shape)
    return x.repeat(-(-shape[0] // x.shape[0]), *[1] * (x.ndim - 1))[: shape[0]]


def _gathered(x: Tensor, group: TPGroup, counts: Sequence[int]) -> Tensor:
    shape = (sum(counts), *x.shape[1:])
    if torch.compiler.is_compiling():
        return _repeated(x, shape)
    key = (*shape, x.dtype, x.device)
    if key not in _buffers:
        _buffers[key] = _repeated(x.detach(), shape)
    return _buffers[key].detach()


# Made once: compiled code is compiled again for functions that it has not seen.
_SILENT: dict[str, Callable[..., object]] = {
    "start_all_reduce": lambda owned, *_: lambda: owned,
    "all_reduce": lambda x, *_: x,
    "start_all_gather": lambda x, group, counts: lambda: _gathered(x, group, counts),
    "all_gather": _gathered,
    "start_reduce_scatter": lambda x, group, counts, *_: lambda: x[: counts[group.rank]],
}


@contextmanager
def silent_collectives() -> Iterator[None]:
    """Replaces the collectives by ones that return at once something of the right shape: the results are wrong, the work is
    this rank's (in compiled code, where a gather cannot return a tensor from before, also its copy of the rows).

    Those of the default mode only: invariant mode has one more, all_to_all.
    """
    real = {name: getattr(collectives, name) for name in _SILENT}
    for name, function in _SILENT.items():
        setattr(collectives, name, function)
    try:
        yield
    finally:
        for name, function in real.items():
            setattr(collectives, name, function)
