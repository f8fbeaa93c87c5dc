"""What the ranks send (parallel/traffic.py records it): added up, sent again alone, or left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel import collectives
from parallel.group import TPGroup
from parallel.traffic import Sent


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
    """A function that runs these collectives, as the library does, on zeros, with nothing to compute in between."""
    buffers: dict[tuple[int, torch.dtype], Tensor] = {}

    def zeros(elements: int, dtype: torch.dtype) -> Tensor:
        return buffers.setdefault((elements, dtype), torch.zeros(elements, dtype=dtype, device=device))

    def call(one: Sent) -> Callable[[], object]:
        whole = zeros(one.elements, one.dtype)
        if one.kind == "all_reduce":
            return lambda: collectives.start_all_reduce(whole, group)()
        part, counts = zeros(one.elements // group.size, one.dtype), [one.elements // group.size] * group.size
        if one.kind == "all_gather":
            return lambda: collectives.all_gather(part, group, counts)
        if one.kind == "reduce_scatter":
            return lambda: collectives.start_reduce_scatter(whole[: sum(counts)], group, counts)()
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
