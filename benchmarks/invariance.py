"""What does invariant mode cost beside the default mode? Time, bytes sent and peak memory of a block, forward and backward.

    python -m benchmarks.invariance                                               one device
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 -m benchmarks.invariance        several ranks

Contenders take turns in one run (see timing.py): the default mode, the tree of parallel/tree.py, and the same virtual shards
with sums of integers: every leaf is rounded to integers under a power-of-two scale that ranks agree on (a maximum, which no
order can change), and a stock all-reduce adds those, which is exact in any order. Bytes are those that a rank sends with the
usual ring algorithms, memory is that of all tensors at the worst moment, parameters and gradients included.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.block import Size, check_equal, milliseconds
from benchmarks.meter import meter
from benchmarks.program import add_out, parse, run_program, start, without_out
from benchmarks.timing import CLOCKS, Ranks, Spread, command, file_stem, header, measure, save, table
from benchmarks.traffic import Traffic
from parallel import collectives
from parallel.group import TPGroup
from parallel.regions import split_tokens
from parallel.traffic import Recorder
from tpblock import Block, Context

SIZES = [Size(512, 1, 512, 2), Size(1024, 4, 512)]
Step = Callable[[], Tensor]


def integer_all_reduce(leaves: Sequence[Tensor], group: TPGroup) -> Tensor:
    """The sum of all shards' leaves [..., d] through int64 (float32 leaves) or int32 (half-precision leaves)."""
    kind, bits = (torch.int64, 62) if leaves[0].dtype == torch.float32 else (torch.int32, 30)
    largest = torch.stack([leaf.abs().amax(-1, keepdim=True) for leaf in leaves]).amax(0).float()
    largest = collectives.all_reduce(largest, group, "max").clamp_min(torch.finfo(torch.float32).tiny)
    room = bits - (group.shards - 1).bit_length() - torch.frexp(largest).exponent
    total = torch.zeros(leaves[0].shape, dtype=kind, device=leaves[0].device)
    for leaf in leaves:
        total += torch.ldexp(leaf.double(), room).round().to(kind)
    total = collectives.all_reduce(total, group)
    return torch.ldexp(total.double(), -room).to(leaves[0].dtype)


class Contender:
    """A block in one mode, its share of the input, and one forward and backward of it."""

    def __init__(
        self, size: Size, group: TPGroup, sequence_parallel: bool, virtual_shards: int | None, integers: bool
    ) -> None:
        self.group = group.with_virtual_shards(virtual_shards)
        self.integers = integers
        self.block = Block(size.config, group=self.group, sequence_parallel=sequence_parallel)
        generator = torch.Generator().manual_seed(0)
        x, dy = (torch.randn(size.batch, size.seq, size.dim, generator=generator) for _ in range(2))
        self.context = Context.build(size.config, size.batch, size.seq, device=x.device, dtype=x.dtype)
        if sequence_parallel:
            x, dy = (split_tokens(t.flatten(0, 1), self.group).clone() for t in (x, dy))
        self.x, self.dy = x.requires_grad_(), dy

    def step(self) -> Tensor:
        self.block.zero_grad(set_to_none=True)
        self.x.grad = None
        with self.transport():
            y = self.block(self.x, self.context)
            y.backward(self.dy)
        return y.detach()

    @contextmanager
    def transport(self) -> Iterator[None]:
        if self.integers:
            with mock.patch("parallel.tree.all_reduce", integer_all_reduce):
                yield
        else:
            yield

    def sent(self) -> float:
        with Recorder(self.group) as recorder:
            self.step()
        return Traffic.of(recorder.collectives).sent

    def peak_memory(self) -> float:
        """Bytes of all tensors that a step makes and that are alive at its worst moment."""
        with meter(self.x.device) as used:
            self.step()
        return float(used.peak)


def compare(size: Size, group: TPGroup, ranks: Ranks, sequence: bool, options: argparse.Namespace) -> list[dict[str, Any]]:
    shards = sorted({group.size, 4} - {1})
    contenders = {"default": Contender(size, group, sequence, None, False)}
    contenders |= {f"tree, V = {v}": Contender(size, group, sequence, v, False) for v in shards}
    if not sequence:
        contenders["integers, V = 4"] = Contender(size, group, sequence, 4, True)
    expected = contenders["default"].step()
    for name, contender in contenders.items():
        if not sequence:  # with it, ranks may hold other tokens in the two modes
            check_equal(name, contender.step(), expected)
    steps = {name: contender.step for name, contender in contenders.items()}
    samples = measure(steps, ranks, rounds=options.rounds, steps=size.steps, clock=CLOCKS[options.clock])
    sent = {name: contender.sent() for name, contender in contenders.items()}
    memory = dict(zip(contenders, ranks.slowest([c.peak_memory() for c in contenders.values()]), strict=True))
    rows = []
    for name, seconds in samples.items():
        ratios = [ours / default for ours, default in zip(seconds, samples["default"], strict=True)]
        row = {
            "block": f"{size}{', sequence parallel' if sequence else ''}",
            "mode": name,
            "ms": milliseconds(seconds),
            "time, ratio": f"{Spread.of(ratios):.3f}",
            "sent, MB": f"{sent[name] / 1e6:.2f}",
            "sent, ratio": f"{sent[name] / sent['default']:.3f}" if sent["default"] else "-",
            "peak memory, MB": f"{memory[name] / 1e6:.0f}",
            "memory, ratio": f"{memory[name] / memory['default']:.2f}",
        }
        rows.append({"row": row, "seconds": seconds})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.invariance", description=str(__doc__).split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7, help="how many rounds are kept")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="processor: leave out what other programs take")
    add_out(parser)
    options = parse(parser)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    ranks = Ranks(start("cpu"))
    group = TPGroup.from_environment()
    about = header(command("benchmarks.invariance", world, without_out(sys.argv[1:])), ranks.device)
    results = [
        result
        for size in SIZES
        for sequence in ((False, True) if world > 1 else (False,))
        for result in compare(size, group, ranks, sequence, options)
    ]
    if world > 1:
        dist.destroy_process_group()
    if group.rank == 0:
        text = table([result["row"] for result in results])
        print(text)
        title = "Invariant mode beside the default mode: forward and backward of one block"
        samples = {f"{r['row']['block']}, {r['row']['mode']}": r["seconds"] for r in results}
        stem = file_stem("invariance", f"{world} ranks", device=ranks.device)
        save(stem, title, text, about | {"rounds": str(options.rounds)}, samples, options.out)


if __name__ == "__main__":
    run_program(main)
