"""What does a block cost beside what it must cost? Forward and backward of one pre-norm Llama block, in float32.

    python -m benchmarks.block                                                    one device
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.block             several ranks

On one device the yardstick is the same block in plain torch.nn; besides, one so small that its arithmetic is nothing shows what
Python costs. On several ranks it is a limit that no implementation of the same
sharding can beat without overlapping the two: this rank's computation, run on all ranks at once with collectives that do
nothing, plus the raw time of the necessary collectives back to back. Everything that is compared takes turns in one run (see
timing.py), after a check that the results are equal. The table gives medians with their quartiles; ratios are taken round by
round. Other libraries' blocks are compare.py's business.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.plain import PlainBlock
from benchmarks.program import add_places, parse, pretended_group, run_program, start, without_out
from benchmarks.timing import CLOCKS, Clock, Ranks, Spread, command, file_stem, header, measure, save, table
from benchmarks.traffic import replay, silent_collectives
from parallel.group import TPGroup
from parallel.regions import split_tokens
from parallel.state import gather_state
from parallel.traffic import Sent
from tpblock import Block, Context, ModelConfig

Step = Callable[[], object]
TITLE = "Forward and backward of one block"


@dataclass(frozen=True)
class Size:
    """One block and its batch. ``steps``: how many steps in a row make one sample."""

    dim: int
    batch: int
    seq: int
    steps: int = 1

    @property
    def tokens(self) -> int:
        return self.batch * self.seq

    @property
    def config(self) -> ModelConfig:
        return ModelConfig(vocab_size=1, dim=self.dim, layers=1, heads=self.dim // 64)

    def __str__(self) -> str:
        return f"dim {self.dim}, {self.tokens} tokens"


ONE_RANK = [Size(512, 1, 512, 2), Size(1024, 2, 512)]
SEVERAL_RANKS = [Size(1024, 4, 512), Size(512, 1, 512, 4), Size(256, 1, 64, 40)]


class Case:
    """Our block of one size, its input x and cotangent dy, and this rank's share of those two."""

    def __init__(self, size: Size, group: TPGroup, device: torch.device, sequence_parallel: bool = False) -> None:
        self.size, self.group, self.sequence_parallel = size, group, sequence_parallel
        self.block = Block(size.config, group=group, sequence_parallel=sequence_parallel, device=device)
        generator = torch.Generator().manual_seed(0)
        shape = (size.batch, size.seq, size.dim)
        self.x, self.dy = (torch.randn(shape, generator=generator).to(device) for _ in range(2))
        self.context = Context.build(size.config, size.batch, size.seq, device=device, dtype=self.x.dtype)
        self.x_local, self.dy_local = self.local(self.x).requires_grad_(), self.local(self.dy)

    def local(self, t: Tensor) -> Tensor:
        return split_tokens(t.flatten(0, 1), self.group) if self.sequence_parallel else t.clone()

    def step(self) -> Tensor:
        """One forward and backward of our block."""
        self.block.zero_grad(set_to_none=True)
        self.x_local.grad = None
        y = self.block(self.x_local, self.context)
        y.backward(self.dy_local)
        return y.detach()

    def plain(self) -> Callable[[], Tensor]:
        """The same step in plain torch.nn with the same weights on the whole batch, once it has given the same results."""
        config, x = self.size.config, self.x.clone().requires_grad_()
        assert self.context.rotary is not None
        block = PlainBlock(config.dim, config.heads, config.d_ff, config.norm_eps).to(x.device)
        block.load_state_dict(gather_state(self.block, self.group))
        cos, sin = (t[:, None] for t in self.context.rotary)

        def step() -> Tensor:
            block.zero_grad(set_to_none=True)
            x.grad = None
            y = block(x, cos, sin)
            y.backward(self.dy)
            return y.detach()

        ours, theirs = self.step(), step()
        assert self.x_local.grad is not None and x.grad is not None
        check_equal("output", ours, self.local(theirs))
        check_equal("input gradient", self.x_local.grad, self.local(x.grad))
        for name, gradient in gather_state(self.block, self.group, gradients=True).items():
            check_equal(f"gradient of {name}", gradient, block.get_parameter(name).grad)
        return step

    def computation(self) -> None:
        """The step with collectives that do nothing: the results are wrong, the work is this rank's."""
        with silent_collectives():
            self.step()

    def collectives(self) -> Callable[[], object]:
        """The collectives that a step cannot do without, of zeros, one after the other, as the library sends them.

        Two sublayers, each with one all-reduce forward and one backward. Under sequence parallelism each gathers the tokens
        and reduce-scatters its output; backward gathers the incoming gradient and (not having kept it) the input, and
        reduce-scatters the input's gradient. The gradients of the two norms' weights are summed.
        """
        whole, dtype = self.size.tokens * self.size.dim, self.x.dtype
        gather, scatter, norm = (
            Sent(kind, elements, dtype)
            for kind, elements in (("all_gather", whole), ("reduce_scatter", whole), ("all_reduce", self.size.dim))
        )
        sums = [Sent("all_reduce", whole, dtype)] * (2 * 2)
        sent = [gather] * (2 * 3) + [scatter] * (2 * 2) + [norm] * 2 if self.sequence_parallel else sums
        return replay(sent, self.group, self.x.device)


def check_equal(what: str, ours: Tensor, theirs: Tensor | None) -> None:
    """To float32's rounding, relative to the largest value."""
    assert theirs is not None
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4 * theirs.abs().max().item(), msg=lambda m: f"{what}: {m}")


@dataclass(frozen=True)
class Result:
    """One line of the table, and the samples behind it."""

    row: dict[str, str]
    samples: dict[str, list[float]]


def one_rank(size: Size, ranks: Ranks, rounds: int, clock: Clock) -> Result:
    case = Case(size, TPGroup(), ranks.device)
    samples = measure({"tpblock": case.step, "torch.nn": case.plain()}, ranks, rounds=rounds, steps=size.steps, clock=clock)
    row = {
        "block": str(size),
        "tpblock, ms": milliseconds(samples["tpblock"]),
        "torch.nn, ms": milliseconds(samples["torch.nn"]),
    }
    ratios = [ours / theirs for ours, theirs in zip(samples["tpblock"], samples["torch.nn"], strict=True)]
    return Result(row | {"ratio (goal 1.00)": f"{Spread.of(ratios):.3f}"}, samples)


def overhead(ranks: Ranks, rounds: int, clock: Clock) -> Result:
    """What Python costs: a block so small that its arithmetic is nothing, alone and on two ranks that send nothing."""
    size = Size(128, 1, 4, 100)
    alone = Case(size, TPGroup(), ranks.device)
    contenders: dict[str, Step] = {"torch.nn": alone.plain(), "one rank": alone.step}
    with pretended_group(2) as group:
        contenders["two ranks"] = Case(size, group, ranks.device).computation
        samples = measure(contenders, ranks, rounds=rounds, steps=size.steps, clock=clock)
    row = {"block": str(size)} | {f"{name}, ms": f"{Spread.of([1000 * s for s in samples[name]]):.3f}" for name in contenders}
    for name in ("one rank", "two ranks"):
        ratios = [ours / theirs for ours, theirs in zip(samples[name], samples["torch.nn"], strict=True)]
        row[f"{name} / torch.nn"] = f"{Spread.of(ratios):.2f}"
    return Result(row, samples)


def against_limit(size: Size, sequence: bool, group: TPGroup, ranks: Ranks, rounds: int, clock: Clock) -> Result:
    case = Case(size, group, ranks.device, sequence)
    case.plain()
    contenders: dict[str, Step] = {"block": case.step, "computation": case.computation, "collectives": case.collectives()}
    samples = measure(contenders, ranks, rounds=rounds, steps=size.steps, clock=clock)
    row = {"block": f"{size}{', sequence parallel' if sequence else ''}"}
    row |= {f"{name}, ms": milliseconds(seconds) for name, seconds in samples.items()}
    ratios = [ours / (work + sent) for ours, work, sent in zip(*samples.values(), strict=True)]
    return Result(row | {"block over limit": f"{Spread.of(ratios):.3f}"}, samples)


def milliseconds(seconds: Sequence[float]) -> str:
    return f"{Spread.of([1000 * s for s in seconds]):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.block", description=str(__doc__).split("\n")[0])
    parser.add_argument("--ranks", type=int, help="how many ranks there must be (default: as many as torchrun started)")
    parser.add_argument("--rounds", type=int, default=15, help="how many rounds are kept")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="processor: leave out what other programs take")
    parser.add_argument(
        "--transport", choices=["shared-memory", "gloo"], default="shared-memory", help="between CPUs of one machine"
    )
    add_places(parser)
    options = parse(parser)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if options.ranks not in (None, world):
        parser.error(f"--ranks {options.ranks}, but {world} started: use torchrun --nproc-per-node {options.ranks}")
    device = start(options.device)
    ranks, clock = Ranks(device), CLOCKS[options.clock]
    group = replace(TPGroup.from_environment(), shared_memory=options.transport == "shared-memory")
    about = header(command("benchmarks.block", world, without_out(sys.argv[1:])), device) | {
        "rounds": str(options.rounds),
        "clock": options.clock,
        "transport": options.transport,
    }
    if world == 1:
        tables = [
            [one_rank(size, ranks, options.rounds, clock) for size in ONE_RANK],
            [overhead(ranks, options.rounds, clock)],
        ]
    else:
        forms = [(size, sequence) for size in SEVERAL_RANKS for sequence in (False, True)]
        tables = [[against_limit(*form, group, ranks, options.rounds, clock) for form in forms]]
        dist.destroy_process_group()
    if group.rank > 0:
        return
    how = [options.transport] * (world > 1) + ["processor time"] * (options.clock != "wall")
    text = "\n\n".join(table([result.row for result in results]) for results in tables)
    print(text)
    samples = {result.row["block"]: result.samples for results in tables for result in results}
    save(file_stem("block", f"{world} ranks", *how, device=device), TITLE, text, about, samples, options.out)


if __name__ == "__main__":
    run_program(main)
