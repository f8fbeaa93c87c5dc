"""What do the parts of a training step cost on this machine? Measures the rates that benchmarks.predict divides by.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 -m benchmarks.calibrate
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 -m benchmarks.calibrate --check
    OMP_NUM_THREADS=1 python -m benchmarks.calibrate --fake-tp 1,2,4,8 --preset llama-2-7b --batch 1

For 1, 2, 4, ... up to all ranks started, with that many at work at the same time (see cost_model.py on contention): the three
products of a linear and its gradients, attention forward and backward, what is bound by memory (with the library's own functions),
launching a layer and a step with next to no work, and collectives from 1 KB to 16 MB one after the other, with nothing computed
beside them, to which alpha + beta x bytes is fitted. All of them take turns, round by round, and medians count.

--check: training steps of several models take turns with them, too, and are compared with what the rates predict.

--fake-tp: one process plays rank 0 of a group whose other ranks do not exist (torch's fake process group), and runs forward and
backward of a block with that rank's share of the weights: the computation of a rank of more ranks than there are devices, measured
and predicted from the same run's rates.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from benchmarks.cost_model import Collective, Link, Machine, Plan, Speeds, compute_seconds, dtype_name, predict
from benchmarks.program import (
    add_places,
    device_bytes,
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
from benchmarks.rates import MESSAGES, TINY, Calibration, Contenders, Scale
from benchmarks.timing import CLOCKS, Phases, Ranks, Spread, command, file_stem, header, measure, save, table
from benchmarks.work import block_work
from benchmarks.workload import DTYPES, PHASES, Training, Workload, add_options, config_from, given_changes, model_name
from parallel.group import TPGroup, single_device
from tpblock import Block, Context, ModelConfig

Found = tuple[Machine, list[dict[str, str]], Mapping[int, Mapping[str, Sequence[float]]]]
"""The rates, the rows of a comparison, and by number of ranks the seconds of all contenders, one a round."""
CHECKED = {
    "dim 256, 4 layers": Workload(ModelConfig(vocab_size=4096, dim=256, layers=4, heads=8), 4, 128),
    "dim 512, 4 layers": Workload(ModelConfig(vocab_size=4096, dim=512, layers=4, heads=8), 2, 256),
    "dim 768, 2 layers, 4 KV heads": Workload(ModelConfig(vocab_size=8192, dim=768, layers=2, heads=12, kv_heads=4), 2, 256),
}
"""The models of --check."""


def machine_of(
    speeds: Mapping[int, Speeds],
    fitted: Mapping[int, dict[str, Collective]],
    dtype: torch.dtype,
    device: torch.device,
    world: int,
) -> Machine:
    """What was measured, as what benchmarks.predict reads."""
    node, name = None, dtype_name(dtype)
    if fitted:
        ranks = max(fitted)
        one = fitted[ranks]["all_reduce"]
        rounds = 2 * (ranks - 1)
        node = Link(latency=one.seconds / rounds, bandwidth=rounds / ranks / max(one.seconds_per_byte, 1e-15))
    gpu = device.type == "cuda"
    return Machine(
        name=torch.cuda.get_device_name(device) if gpu else f"CPU, {os.cpu_count()} cores",
        sources={"all rates": "measured by benchmarks.calibrate"},
        peak={name: max(rate for _, rate in speeds[1].matrix[name])},
        memory_bytes=device_bytes(device.type) // (1 if gpu else world),
        devices_per_node=world,
        asynchronous=gpu,
        shared=not gpu,
        speeds=dict(speeds),
        collectives=dict(fitted),
        largest_collective=MESSAGES[-1] if fitted else None,
        node=node,
    )


def rates(machine: Machine) -> str:
    """The tables of what was measured."""
    speeds, links = [], []
    for ranks, speed in sorted(machine.speeds.items()):
        row = {"ranks at once": str(ranks)}
        row |= {f"{side:.0f}^3, GFLOP/s": f"{rate / 1e9:.1f}" for points in speed.matrix.values() for side, rate in points}
        row |= {f"{key}, GB/s": f"{points[-1][1] / 1e9:.2f}" for key, points in speed.memory.items() if key.endswith(" add")}
        row |= {f"{phase}, us a layer": f"{1e6 * launch.layer:.0f}" for phase, launch in speed.launch.items()}
        speeds.append(row | {"hidden beside a product, %": f"{100 * speed.overlap:.0f}"})
    for ranks, kinds in sorted(machine.collectives.items()):
        for kind, one in kinds.items():
            rate = f"{1e-9 / one.seconds_per_byte:.2f}" if one.seconds_per_byte else "-"
            cells = {
                "alpha, us": f"{1e6 * one.seconds:.1f}",
                "1/beta, GB/s": rate,
                "error of the fit, %": f"{100 * one.error:.0f}",
            }
            links.append({"ranks": str(ranks), "collective": kind} | cells)
    return "\n\n".join(table(rows) for rows in (speeds, links) if rows)


def check_row(
    name: str, workload: Workload, ranks: int, samples: Mapping[str, Sequence[float]], machine: Machine
) -> dict[str, str]:
    """A model's measured step beside the predicted one."""
    found = predict(workload, Plan(tp=ranks, micro=workload.batch), machine)
    measured = Spread.of([1000 * s for s in samples[f"{name}: step"]])
    row = {"model": name, "ranks": str(ranks), "measured, ms": f"{measured:.1f}", "predicted, ms": f"{1000 * found.step:.1f}"}
    for phase in PHASES:
        seconds, parts = Spread.of(samples[f"{name}: phases, {phase}"]).median, found.seconds[phase]
        row[f"{phase}, predicted/measured"] = f"{(parts.compute + parts.exposed) / seconds:.2f}"
    return row | {"step, predicted/measured": f"{1000 * found.step / measured.median:.3f}"}


def fake_rows(
    workload: Workload, sizes: Sequence[int], device: torch.device, scale: Scale, options: argparse.Namespace
) -> Found:
    """Seconds of a block's forward and backward on rank 0 of each size, measured and, from all rates of the run, predicted."""
    one = Calibration(single_device(), device, workload.dtype, scale)
    samples: dict[str, list[float]] = {}
    for size in sizes:
        with pretended_group(size) as group:
            contenders: Contenders = {**one.contenders, f"TP {size}": block_phases(workload, group, device)}
            ranks, clock = Ranks(device, single_device()), CLOCKS[options.clock]
            found = measure(contenders, ranks, rounds=options.rounds, warmup=1, clock=clock)
        for name, seconds in found.items():
            samples.setdefault(name, []).extend(seconds)
    machine = machine_of({1: one.speeds(samples)}, {}, workload.dtype, device, 1)
    rows = []
    for size in sizes:
        row = {"TP": str(size)}
        for name, phase in zip(("forward", "backward"), block_work(workload, 0, size), strict=True):
            spread = Spread.of([1000 * s for s in samples[f"TP {size}, {name}"]])
            told = 1000 * (compute_seconds(phase, machine, 1, workload.dtype) + machine.speeds[1].launch[name].layer)
            row |= {f"{name}, ms": f"{spread:.2f}", f"{name}, predicted/measured": f"{told / spread.median:.2f}"}
        rows.append(row)
    return machine, rows, {1: samples}


def block_phases(workload: Workload, group: TPGroup, device: torch.device) -> Phases:
    """Forward and backward of a block with this rank's share of the weights."""
    config, dtype = workload.config, workload.dtype
    block = Block(config, group=group, device=device, dtype=dtype)
    context = Context.build(config, workload.batch, workload.seq, device=device, dtype=dtype)
    x = torch.randn(workload.batch, workload.seq, config.dim, device=device, dtype=dtype, requires_grad=True)
    dy, made = torch.randn_like(x), []

    def forward() -> None:
        block.zero_grad(set_to_none=True)
        x.grad = None
        made.append(block(x, context))

    return {"forward": forward, "backward": lambda: made.pop().backward(dy)}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node N -m benchmarks.calibrate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--tp", type=tp_sizes, metavar="N,...", help="numbers of ranks (default: 1, 2, 4, ... as were started)"
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--check", action="store_true", help="also measure training steps, and compare them with the prediction")
    kind.add_argument(
        "--fake-tp", type=tp_sizes, metavar="N,...", help="a block of the model on rank 0 of so many pretended ranks"
    )
    parser.add_argument(
        "--rounds", type=int, default=7, metavar="N", help="rounds that are kept (default: 7); one more is dropped"
    )
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="processor: for one rank on a machine that is not idle"
    )
    parser.add_argument("--quick", action="store_true", help="the smallest sizes only, to try the program")
    add_places(parser)
    add_options(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(parser(), arguments)
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    sizes = options.tp or [2**n for n in range(min(world, TINY.heads).bit_length())]
    try:
        _check_options(options, sizes, world)
        workload = Workload(config_from(options), options.batch, options.seq_len, DTYPES[options.dtype])
    except ValueError as error:
        refuse(str(error))
    device = start(options.device)
    given = sys.argv[1:] if arguments is None else list(arguments)
    about = header(command("benchmarks.calibrate", world, without_out(given)), device)
    about |= {"dtype": options.dtype, "rounds": f"{options.rounds} kept, 1 dropped before them", "clock": options.clock}
    scale = Scale(device, options.quick)
    if options.fake_tp:
        fit_sizes, notes = sizes_that_fit(workload.config, options.fake_tp, max(options.fake_tp))
        if not fit_sizes:
            refuse(" ".join(notes))
        machine, rows, seconds = fake_rows(workload, fit_sizes, device, scale, options)
        title = f"A block's computation on rank 0: {model_name(options)}, {options.batch} x {options.seq_len} tokens"
        text = "\n\n".join([table(rows), *notes])
        parts = ["fake tp", model_name(options)[:80], f"{options.batch} x {options.seq_len}", options.dtype]
    else:
        found = calibrate(sizes, world, device, workload.dtype, scale, options)
        if dist.is_initialized():
            dist.destroy_process_group()
        if found is None or rank > 0:
            return
        machine, rows, seconds = found
        title, parts = "Rates of this machine", ["calibration", options.dtype, f"{world} ranks"]
        text = rates(machine)
        if rows:
            title, parts, text = f"{title}, and steps predicted from them", [*parts, "check"], f"{table(rows)}\n\n{text}"
    print(text)
    parts += ["quick"] * options.quick + ["processor time"] * (options.clock == "processor")
    stem = file_stem(*parts, device=device)
    save(stem, title, text, about, {"machine": machine.model_dump(), "compared": rows, "seconds": seconds}, options.out)
    print(f"\n{stem}.md and .json")


def _check_options(options: argparse.Namespace, sizes: Sequence[int], world: int) -> None:
    if options.rounds < 1:
        raise ValueError(f"--rounds is at least 1, got {options.rounds}")
    if sizes[0] != 1 or sizes[-1] > min(world, TINY.heads):
        raise ValueError(f"--tp begins with 1 and ends with the ranks started at most ({world}; {TINY.heads}), got {sizes}")
    if options.clock == "processor" and world > 1:
        raise ValueError(f"processor time does not see ranks wait for each other: it is for one rank, {world} were started")
    if options.fake_tp and world > 1:
        raise ValueError(f"--fake-tp is for one process, which plays a rank; {world} were started")
    batch = {name: getattr(options, name) for name in ("batch", "seq_len", "padding")}
    changed = [name for name, value in batch.items() if value != parser().get_default(name)]
    if not options.fake_tp and (options.preset or given_changes(options) or changed):
        raise ValueError("a model or batch has no effect without --fake-tp: the machine is measured, whatever it is to train")
    if options.fake_tp and (options.tp or "padding" in changed):
        raise ValueError("--tp and --padding have no effect with --fake-tp: one process computes a block of whole sequences")


def calibrate(
    sizes: Sequence[int], world: int, device: torch.device, dtype: torch.dtype, scale: Scale, options: argparse.Namespace
) -> Found | None:
    """Measures all sizes, one after the other; the ranks that one has no use for wait at a barrier."""
    speeds: dict[int, Speeds] = {}
    fitted: dict[int, dict[str, Collective]] = {}
    measured: dict[int, dict[str, list[float]]] = {}
    models = {name: replace(workload, dtype=dtype) for name, workload in CHECKED.items()} if options.check else {}
    for size in sizes:
        group = group_of(size, world)
        if group is not None:
            one = Calibration(group, device, dtype, scale)
            contenders: Contenders = dict(one.contenders)
            for name, workload in models.items():
                training = Training(workload, group, device)
                contenders |= {f"{name}: step": training.step, f"{name}: phases": training.phases}
            samples = measure(contenders, Ranks(device, group), rounds=options.rounds, warmup=1, clock=CLOCKS[options.clock])
            speeds[size], measured[size] = one.speeds(samples), samples
            if size > 1:
                fitted[size] = one.fitted(samples)
            del one, contenders
        if dist.is_initialized():
            dist.barrier()
    if speeds.keys() != set(sizes):  # a rank that was not in all groups; the first reports
        return None
    machine = machine_of(speeds, fitted, dtype, device, world)
    rows = [check_row(name, load, n, measured[n], machine) for name, load in models.items() for n in sizes]
    return machine, rows, measured


if __name__ == "__main__":
    run_program(main)
