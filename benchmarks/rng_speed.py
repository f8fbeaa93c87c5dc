"""How fast are the library's random numbers beside torch's own? One CPU thread.

    python -m benchmarks.rng_speed

Each row times a function of torch and its counterpart here in turns and takes the medians. Numbers are in millions of elements
a second. It keeps nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from parallel import rng
from parallel.group import single_device
from parallel.layout import Layout, Part, column_layout, row_layout

REPEATS = 15
KEY = rng.stream_key(0, "site")[0]


class Row(NamedTuple):
    what: str
    elements: int
    torchs: Callable[[], object]
    ours: Callable[[], object]


def normal_row(what: str, layout: Layout, dtype: torch.dtype = torch.float32) -> Row:
    weight = torch.empty(layout.shape, dtype=dtype)
    group = single_device()
    return Row(
        f"{what}, {str(dtype).removeprefix('torch.')}",
        weight.numel(),
        lambda: weight.normal_(std=0.02),  # torch.randn without the time to allocate
        lambda: rng.normal_(weight, layout, group, seed=0, name="w", std=0.02),
    )


def dropout_row(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Row:
    x = torch.randn(shape, dtype=dtype)
    return Row(
        f"dropout, {tuple(shape)}, {str(dtype).removeprefix('torch.')}",
        x.numel(),
        lambda: F.dropout(x, 0.1),
        lambda: rng.dropout(x, 0.1, key=KEY, step=1),
    )


def forward_backward_row(shape: tuple[int, ...]) -> Row:
    x, cotangent = torch.randn(shape, requires_grad=True), torch.randn(shape)

    def both(y: Tensor) -> None:
        torch.autograd.grad(y, x, cotangent)

    return Row(
        f"dropout and its gradient, {tuple(shape)}",
        x.numel(),
        lambda: both(F.dropout(x, 0.1)),
        lambda: both(rng.dropout(x, 0.1, key=KEY, step=1)),
    )


def rows() -> list[Row]:
    return [
        normal_row("normal_ [2048, 2048] by rows", column_layout((2048, 2048), [Part.even("all", 2048, 1)])),
        normal_row("normal_ [2048, 2048] by columns", row_layout((2048, 2048), [Part.even("all", 2048, 1)])),
        normal_row("normal_ [8192, 512] by columns", row_layout((8192, 512), [Part.even("all", 512, 1)])),
        normal_row("normal_ [512, 4096] by columns", row_layout((512, 4096), [Part.even("all", 4096, 1)])),
        normal_row("normal_ [2048, 2048] by rows", column_layout((2048, 2048), [Part.even("all", 2048, 1)]), torch.bfloat16),
        dropout_row((2048, 1024)),
        dropout_row((2048, 1024), torch.bfloat16),
        forward_backward_row((2048, 1024)),
    ]


def seconds(function: Callable[[], object]) -> float:
    """Of this thread's time, so that other programs on the machine count less."""
    begin = time.thread_time()
    function()
    return time.thread_time() - begin


def main() -> None:
    torch.set_num_threads(1)
    print(f"{'M elements/s, one thread':<48}{'torch':>8}{'ours':>8}{'ratio':>8}")
    for row in rows():
        row.torchs(), row.ours()
        times = [(seconds(row.torchs), seconds(row.ours)) for _ in range(REPEATS)]
        theirs, ours = (row.elements / statistics.median(column) / 1e6 for column in zip(*times, strict=True))
        print(f"{row.what:<48}{theirs:>8.0f}{ours:>8.0f}{ours / theirs:>8.2f}")


if __name__ == "__main__":
    main()
