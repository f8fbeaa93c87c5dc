"""What several test files share: tensors that every rank draws alike, a record of the operators that run, oneDNN's products."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # entering the first dispatch mode would import it, in the middle of a test
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from parallel import collectives, matmul
from parallel.group import TPGroup
from parallel.layout import attention_parts
from parallel.linear import ColumnParallelLinear, RowParallelLinear
from parallel.regions import token_counts
from parallel.traffic import Sent, collective, listeners

EXACT = {"rtol": 1e-10, "atol": 1e-10}
"""Tolerances of float64 comparisons: far below any wrong term, far above rounding."""


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64, requires_grad: bool = False) -> Tensor:
    """Normal numbers on the default device, the same on every rank and every device."""
    generator = torch.Generator("cpu").manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    return values.to(torch.get_default_device(), dtype).requires_grad_(requires_grad)


def labelled(*shape: int, dtype: torch.dtype = torch.float64, first: int = 0) -> Tensor:
    """A tensor in which every element is another number, so that a misplaced one shows."""
    return torch.arange(first, first + math.prod(shape), dtype=dtype).reshape(shape)


def rows_of(tokens: int, group: TPGroup) -> slice:
    """The rows of this rank under sequence parallelism."""
    counts = token_counts(tokens, group)
    start = sum(counts[: group.rank])
    return slice(start, start + counts[group.rank])


def own_collectives() -> AbstractContextManager[object]:
    """Collectives are those of the process group, as on GPUs, instead of exchanges through shared memory."""
    return mock.patch.object(collectives, "_shared", lambda *_: None)


class OpRecord(TorchDispatchMode):
    """The names of all operators that run inside it, in order, e.g. ``aten.mm``, and the kinds of the collectives among them."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.collectives: list[str] = []

    def __enter__(self) -> OpRecord:
        listeners.append(self._note)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        listeners.remove(self._note)
        super().__exit__(*error)

    def _note(self, sent: Sent) -> None:
        self.collectives.append(sent.kind)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func).removesuffix(".default"))
        if kind := collective(func):
            self.collectives.append(kind)
        return func(*args, **(kwargs or {}))


def onednn_everywhere() -> AbstractContextManager[Any]:
    """oneDNN's products on any processor and of any size."""
    return mock.patch.multiple(matmul, ONEDNN_IS_FASTER=True, FEWEST_ROWS=1, FEWEST_PRODUCTS=1)


class Sample(nn.Module):
    """One of each kind of parameter: replicated, column-parallel with KV rows that ranks may share, row-parallel, 0-d."""

    def __init__(self, group: TPGroup, dtype: torch.dtype = torch.float64, *, heads: int = 4, kv_heads: int = 2) -> None:
        super().__init__()
        self.group = group
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=dtype))
        self.norm = nn.Parameter(torch.ones(6, dtype=dtype))
        parts = attention_parts(heads, kv_heads, 2, group.size)
        width = sum(part.size for part in parts)
        self.qkv = ColumnParallelLinear(6, width, dtype=dtype, group=group, parts=parts, name="qkv")
        self.out = RowParallelLinear(2 * heads, 6, dtype=dtype, group=group, parts=parts[:1], name="out")

    def forward(self, x: Tensor) -> Tensor:
        """Each query head plus a function of the KV head that it reads."""
        q, k, v = self.qkv.split(self.qkv(x * self.norm))
        kv = (k.tanh() * v).unflatten(-1, (-1, 2))
        kv = kv.repeat_interleave(q.shape[-1] // k.shape[-1], dim=-2).flatten(-2)
        return self.out(torch.sin(q) * kv) * self.scale
