"""How many bytes does a rank need for training: measured, and beside them the formula (memory_formula.py)?

    python -m benchmarks.memory --tp 1,2,4,8 --preset stack-100m --layers 4
    torchrun --nproc-per-node 2 -m benchmarks.memory --tp 1,2,4,8 --dim 256

Every TP size of --tp, with and without sequence parallelism and activation checkpointing: parameters, gradients and the
optimizer's state are the bytes of their tensors after a step; activations are what forward allocates and leaves for backward, and
the peak is that of all tensors at the worst moment of a step (on the CPU by following every tensor's storage, on a GPU by its
allocator). Beside each stands what the formula says. The table shows the rank that needs most. The peak may be less than the sum,
since activations go as gradients come, or more, for what is computed with takes memory, too.

Sizes of at most as many ranks as torchrun started run on them. Of larger ones the first process alone runs the first rank (which no
other exceeds) in a process group that sends nothing: its tensors are of the right sizes, their values are not.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch
import torch.distributed as dist

from benchmarks import plots
from benchmarks.memory_formula import Bytes, peak_bytes, training_bytes
from benchmarks.meter import held_bytes, meter
from benchmarks.program import (
    add_places,
    group_of,
    parse,
    pretended_group,
    refuse,
    run_program,
    sizes_that_fit,
    start,
    tp_sizes,
    without_out,
)
from benchmarks.timing import command, file_stem, header, save, table
from benchmarks.workload import DTYPES, Training, Workload, add_options, config_from, model_name
from parallel import matmul
from parallel.group import TPGroup

LETTING_GO = 0.2
"""Seconds after which the thread that sends has surely let go of the tensors that it sent."""
KINDS = ("parameters", "gradients", "optimizer", "activations")


@dataclass(frozen=True)
class Measured:
    """Of one rank: what it holds, the peak of a step, and what the formula says."""

    rank: int
    ranks: int
    measured: Bytes
    formula: Bytes
    peak: int
    peak_formula: int

    @property
    def peak_ratio(self) -> float:
        return self.peak / self.peak_formula

    def difference(self, kind: str) -> float:
        """Per cent by which the measured bytes exceed the formula's, of one kind or of the "total"."""
        return 100 * (getattr(self.measured, kind) / getattr(self.formula, kind) - 1)


def measure_rank(workload: Workload, group: TPGroup, device: torch.device) -> Measured:
    """Takes three steps: the first allocates the optimizer's state, the second is measured phase by phase, the third's peak."""
    training = Training(workload, group, device)
    training.step()
    training.optimizer.zero_grad(set_to_none=True)
    with meter(device) as used:
        training.forward()
        if group.size > 1 and dist.get_backend(group.process_group) != "fake":
            time.sleep(LETTING_GO)
        activations = used.now
    training.backward()
    measured = Bytes(
        parameters=held_bytes(training.model.parameters()),
        gradients=held_bytes(parameter.grad for parameter in training.model.parameters()),
        optimizer=held_bytes(training.state),
        activations=activations,
    )
    on_gpu = device.type == "cuda"
    formula = training_bytes(workload, group.rank, group.size, on_gpu=on_gpu)
    onednn = matmul.ONEDNN_IS_FASTER and not on_gpu
    peak = peak_bytes(workload, group.rank, group.size, on_gpu=on_gpu, onednn=onednn)
    return Measured(group.rank, group.size, measured, formula, training.peak_bytes(), peak)


def variants(workload: Workload, size: int) -> list[Workload]:
    """Sequence parallelism (of several ranks) and checkpointing, off and on."""
    return [
        replace(workload, sequence_parallel=sequence, activation_checkpointing=again)
        for sequence in ((False, True) if size > 1 else (False,))
        for again in (False, True)
    ]


def modes(workload: Workload) -> str:
    names = {"sequence parallel": workload.sequence_parallel, "checkpointing": workload.activation_checkpointing}
    return ", ".join(name for name, on in names.items() if on) or "-"


@dataclass(frozen=True)
class Line:
    """One size in one mode, with every rank that was measured."""

    workload: Workload
    by_rank: list[Measured]
    real: bool

    @property
    def most(self) -> Measured:
        return max(self.by_rank, key=lambda rank: rank.measured.total)

    @property
    def row(self) -> dict[str, str]:
        most, named = self.most, [*zip(KINDS, KINDS, strict=True), ("sum", "total")]
        return {
            "ranks": f"{most.ranks}{'' if self.real else ', first alone'}",
            "mode": modes(self.workload),
            **{f"{name}, MB": self._told(kind) for name, kind in named},
            "peak of a step, MB": f"{most.peak / 1e6:.3f}",
            "peak by the formula, MB": f"{most.peak_formula / 1e6:.3f}",
            "peak, measured / formula": f"{most.peak_ratio:.3f}",
        }

    def _told(self, kind: str) -> str:
        return f"{getattr(self.most.measured, kind) / 1e6:.3f} ({self.most.difference(kind):+.2f} %)"

    @property
    def bar(self) -> Mapping[str, object]:
        short = {"sequence_parallel": "SP", "activation_checkpointing": "checkpointing"}
        on = [name for field, name in short.items() if getattr(self.workload, field)]
        most = self.most
        return {
            "name": ", ".join([f"TP {most.ranks}", *on]),
            "measured": asdict(most.measured),
            "formula": asdict(most.formula),
        }


def measure_all(workload: Workload, sizes: Sequence[int], world: int, device: torch.device) -> list[Line]:
    """The lines of all sizes, on rank 0; the others return when they are needed no more."""
    lines = []
    for size in (size for size in sizes if size <= world):
        group = group_of(size, world)
        if group is not None:
            for variant in variants(workload, size):
                mine = measure_rank(variant, group, device)
                everyone = [mine] * size
                if size > 1:
                    dist.all_gather_object(everyone, mine, group=group.process_group)
                lines.append(Line(variant, everyone, real=True))
        if dist.is_initialized():
            dist.barrier()
    rank = dist.get_rank() if dist.is_initialized() else 0
    if dist.is_initialized():
        dist.destroy_process_group()
    if rank > 0:
        return []
    for size in (size for size in sizes if size > world):
        with pretended_group(size) as group:
            lines += [Line(v, [measure_rank(v, group, device)], real=False) for v in variants(workload, size)]
    return lines


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tp", type=tp_sizes, default=[1, 2, 4, 8], metavar="N,...", help="tensor-parallel sizes (1,2,4,8)")
    add_places(parser)
    add_options(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(parser(), arguments)
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    try:
        workload = Workload(
            config_from(options), options.batch, options.seq_len, DTYPES[options.dtype], padding=options.padding
        )
        training_bytes(workload)
    except ValueError as error:
        refuse(str(error))
    sizes, notes = sizes_that_fit(workload.config, options.tp, max(options.tp))
    if not sizes:
        refuse(" ".join(notes))
    device = start(options.device)
    given = sys.argv[1:] if arguments is None else list(arguments)
    about = header(command("benchmarks.memory", world, without_out(given)), device) | {
        "model": model_name(options),
        "batch": f"{options.batch} sequences of {options.seq_len} tokens, {options.dtype}",
        "in brackets": "by how much the measured bytes exceed the formula's",
    }
    lines = measure_all(workload, sizes, world, device)
    if rank > 0:
        return
    title = f"Memory of a rank in training: {model_name(options)}"
    if any(not line.real for line in lines):
        notes.append("first alone: the first rank in a process group that sends nothing.")
    text = "\n\n".join([table([line.row for line in lines]), *notes])
    print(text)
    shape = f"{options.batch} x {options.seq_len}"
    stem = file_stem("memory", model_name(options)[:80], shape, options.dtype, f"{world} ranks", device=device)
    samples = {f"{line.most.ranks} ranks, {modes(line.workload)}": [asdict(one) for one in line.by_rank] for line in lines}
    save(stem, title, text, about, samples, options.out)
    plots.memory([line.bar for line in lines], title, options.out / f"{stem}.png")
    print(f"\n{stem}.md, .json and .png")


if __name__ == "__main__":
    run_program(main)
