"""How does a training step scale with the number of tensor-parallel ranks, and where does its time go?

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.scaling --tp 1,2 --preset stack-100m --layers 4
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.scaling --tp 1,2 --weak --dim 256 --seq-len 64

Every size of --tp that fits into the ranks started, into the model and into memory (memory_formula.py) runs on the first ranks; the
others wait idle at a barrier meanwhile. --strong gives every size the same batch, --weak N ranks N times the batch.

For each size these take turns (see timing.py):

* the step (forward, backward, gradient clipping and AdamW), whole, which the rates come from, and in phases that ranks meet
  between;
* its computation: the same phases with collectives that do nothing;
* its collectives alone: those that a step was seen to run, one after the other;
* a matrix product, the yardstick of the MFU (model FLOPs utilisation) unless --peak-tflops gives one.

Communication is *exposed* where the step in phases takes longer than its computation (this includes waiting for the slowest
rank), and *hidden* is what the collectives alone take beyond that. Either may be slightly negative by noise; hidden is below
zero, too, where ranks wait for each other longer than they send.

TFLOP/s count what the model needs (see flops.py: 6 operations a parameter and token and the attention's), not what is computed
twice. Peak memory is that of all tensors of a rank at the worst moment of a step. With --compile the times are those of compiled
code; collectives and peak memory are counted in a step before.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from benchmarks import plots
from benchmarks.flops import training_flops
from benchmarks.memory_formula import peak_bytes
from benchmarks.program import (
    add_places,
    device_bytes,
    group_of,
    parse,
    refuse,
    run_program,
    sizes_that_fit,
    start,
    tp_sizes,
    without_out,
)
from benchmarks.scaling_report import Result, as_json, report
from benchmarks.timing import Phases, Ranks, command, file_stem, header, measure, save
from benchmarks.traffic import replay
from benchmarks.workload import DTYPES, PHASES, Training, Workload, add_options, config_from, model_name, silently
from parallel.matmul import matmul
from parallel.traffic import Recorder, Sent


def run_size(training: Training, *, rounds: int, warmup: int, compiled: bool) -> Result:
    """Measures one size on the ranks of its group, all of which call this."""
    group, device, workload = training.group, training.device, training.workload
    training.step()  # the optimizer allocates its state
    traffic = count_traffic(training)
    peak = training.peak_bytes()
    if compiled:
        torch.compiler.reset()  # what the sizes before have compiled counts towards the limit of recompilations
        training.model.compile()
    n = 8192 if device.type == "cuda" else 1024
    a, b = (torch.ones(n, n, device=device, dtype=workload.dtype) for _ in range(2))
    contenders: dict[str, Callable[[], object] | Phases] = {
        "step": training.step,
        "phases": training.phases,
        "matrix": lambda: matmul(a, b),
    }
    if group.size > 1:
        contenders["computation"] = {phase: silently(run) for phase, run in training.phases.items()}
        contenders["collectives"] = {phase: replay(traffic[phase], group, device) for phase in PHASES}
    ranks = Ranks(device, group)
    samples = measure(contenders, ranks, rounds=rounds, warmup=warmup)
    return Result(
        ranks=group.size,
        batch=workload.batch,
        tokens=workload.tokens,
        valid=training.valid,
        samples=samples,
        traffic=traffic,
        peak_bytes=int(ranks.slowest([float(peak)])[0]),
        flops=training_flops(workload.config, workload.batch, workload.seq).model,
        matrix_flops=2 * n**3,
    )


def count_traffic(training: Training) -> dict[str, list[Sent]]:
    """Each phase's collectives of one step."""
    traffic = {}
    for phase, run in training.phases.items():
        with Recorder(training.group) as recorder:
            run()
        traffic[phase] = recorder.collectives
    return traffic


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node N -m benchmarks.scaling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tp", type=tp_sizes, default=[1, 2, 4, 8], metavar="N,...", help="tensor-parallel sizes (1,2,4,8)")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--strong", action="store_true", help="the same batch for every size (the default)")
    kind.add_argument("--weak", action="store_true", help="N ranks get N times the batch")
    parser.add_argument("--sequence-parallel", action="store_true", help="cut the tokens between the sharded regions")
    parser.add_argument("--checkpointing", action="store_true", help="compute each block again in backward")
    parser.add_argument("--compile", action="store_true", help="compile the model with torch.compile")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="rounds that are kept (default: 7)")
    parser.add_argument("--warmup", type=int, default=2, metavar="N", help="rounds before them that are dropped (default: 2)")
    parser.add_argument("--peak-tflops", type=float, metavar="X", help="of a device, for the MFU (default: measured)")
    add_places(parser)
    add_options(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(parser(), arguments)
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    workload, sizes, notes = checked(options, world)
    device = start(options.device)
    given = sys.argv[1:] if arguments is None else list(arguments)
    about = describe(options, command("benchmarks.scaling", world, without_out(given)), device)
    results = []
    for size in sizes:
        group = group_of(size, world)
        if group is not None:
            training = Training(grown(workload, size, options.weak), group, device)
            results.append(run_size(training, rounds=options.rounds, warmup=options.warmup, compiled=options.compile))
            del training
        if dist.is_initialized():
            dist.barrier()  # here the ranks wait that this size has no use for
    if dist.is_initialized():
        dist.destroy_process_group()
    if rank > 0:
        return
    if any(size < world for size in sizes):
        notes.append(f"Of the {world} ranks started, those that a size has no use for waited idle.")
    text = report(results, options.weak, options.peak_tflops, notes)
    print(text)
    stem = file_stem(*name_parts(options, world), device=device)
    save(stem, title(options), text, about, {str(result.ranks): as_json(result) for result in results}, options.out)
    plots.scaling(results, options.weak, title(options), options.out / f"{stem}.png")
    print(f"\n{stem}.md, .json and .png")


def grown(workload: Workload, size: int, weak: bool) -> Workload:
    return replace(workload, batch=workload.batch * size) if weak else workload


def checked(options: argparse.Namespace, world: int) -> tuple[Workload, list[int], list[str]]:
    """The work, the sizes that fit, and the reasons of those that do not; ends the program if nothing is left."""
    try:
        if options.rounds < 1 or options.warmup < 0:
            raise ValueError(f"--rounds is at least 1 and --warmup at least 0, got {options.rounds} and {options.warmup}")
        if options.compile and not options.warmup:
            raise ValueError("--compile needs --warmup 1 at least, in which it compiles, got 0")
        if options.peak_tflops is not None and options.peak_tflops <= 0:
            raise ValueError(f"--peak-tflops is above 0, got {options.peak_tflops}")
        workload = Workload(
            config_from(options),
            options.batch,
            options.seq_len,
            DTYPES[options.dtype],
            options.sequence_parallel,
            options.checkpointing,
            options.padding,
        )
    except ValueError as error:
        refuse(str(error))
    possible, notes = sizes_that_fit(workload.config, options.tp, world)
    sizes, memory = [], device_bytes(options.device)
    for size in possible:
        load, on_gpu = grown(workload, size, options.weak), options.device == "cuda"
        need = peak_bytes(load, 0, size, on_gpu=on_gpu) * (1 if on_gpu else size)  # the CPU's memory is that of all ranks
        if need <= memory:
            sizes.append(size)
        else:
            notes.append(
                f"Not measured at {size} ranks: it takes {need / 1e9:,.1f} GB, there are {memory / 1e9:,.1f} GB of memory."
            )
    if not sizes:
        refuse(" ".join(notes))
    return workload, sizes, notes


def title(options: argparse.Namespace) -> str:
    return f"{'Weak' if options.weak else 'Strong'} scaling of a training step: {model_name(options)}"


def modes(options: argparse.Namespace) -> list[str]:
    names = ("sequence parallel", "checkpointing", "compile")
    return [name for name in names if getattr(options, name.replace(" ", "_"))]


def name_parts(options: argparse.Namespace, world: int) -> list[str]:
    kind = "weak" if options.weak else "strong"
    shape = f"{options.batch} x {options.seq_len}"
    return ["scaling", kind, model_name(options)[:80], shape, options.dtype, *modes(options), f"{world} ranks"]


def describe(options: argparse.Namespace, line: str, device: torch.device) -> dict[str, str]:
    grows = " a rank" if options.weak else ""
    return header(line, device) | {
        "model": model_name(options),
        "batch": f"{options.batch} sequences{grows} of {options.seq_len} tokens, {options.dtype}",
        "modes": ", ".join(modes(options)) or "none",
        "rounds": f"{options.rounds} kept, {options.warmup} dropped before them",
    }


if __name__ == "__main__":
    run_program(main)
