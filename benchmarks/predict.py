"""Which TP x DP for my model? Predicts a training step for every way to share it out over some numbers of GPUs.

    python -m benchmarks.predict --model llama3-70b --gpus 8,16,64 --gpu h100
    python -m benchmarks.predict --model path/to/config.json --gpus 4 --gpu benchmarks/results/calibration-....json

--gpu names a data sheet (data_sheets.py, where what is assumed of it stands) or a file that benchmarks.calibrate wrote on the
machine itself. For each number of GPUs every TP that the model and a node allow is tried, the rest being replicas (DP). These are
kept together by DistributedDataParallel (ddp) or share parameters, gradients and optimizer state (fsdp2). Sequence parallelism,
activation checkpointing (shown as recompute) and the size of micro-batches are chosen, the first two unless the command line
settles them: shown is the fastest that fits for each TP x DP and engine, or if none fits the smallest. cost_model.py has the
arithmetic.

Memory is the peak of memory_formula.py and what the engine adds: with several replicas or micro-batches gradients are there all the
time, and FSDP2 has some blocks gathered (a little more is counted than it takes: a block's gradients twice). Fragments are left
out: 0.9 of a device counts as usable. On a calibrated CPU collectives larger than the largest measured are noted. AdamW keeps its
two numbers in the parameters' dtype, as launch.train does with ddp and fsdp2; --master-weights: in float32, with a float32 copy of
the parameters.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks import plots
from benchmarks.cost_model import Engine, Machine, Plan, Prediction, predict
from benchmarks.data_sheets import SHEETS, machine
from benchmarks.program import name_of_run, refuse, sizes_that_fit, tp_sizes, without_out
from benchmarks.timing import RESULTS, command, commit, file_stem, save, table, versions
from benchmarks.workload import DTYPES, Workload
from parallel.shared_memory import SLOT_BYTES
from tpblock import PRESETS, CheckpointError, ModelConfig, preset
from tpblock.formats.checkpoint import read_config

ENGINES: tuple[Engine, ...] = ("ddp", "fsdp2")
Choice = tuple[Prediction, Workload]

NAMES = {"batch": "batch ", "seq_len": "seq ", "dtype": "", "tp": "tp ", "engine": "", "sequence_parallel": "sp "}
NAMES |= {"checkpointing": "checkpointing ", "master_weights": "master ", "gpus_per_node": "nodes of "}
NAMES |= {"usable_memory": "memory ", "matrix_efficiency": "efficiency "}
"""Options that the results' names tell, each with what is written before it."""


def model_of(name: str) -> tuple[str, ModelConfig]:
    """A preset, however it is spelled, or the model of a Hugging Face folder or its config.json, and what to call it."""

    def plain(text: str) -> str:
        return re.sub(r"[^a-z0-9]", "", text.lower())

    for known in PRESETS:
        if plain(known) == plain(name):
            return known, preset(known)
    path = Path(name)
    if path.exists():
        folder = path if path.is_dir() else path.parent
        try:
            return folder.resolve().name, read_config(folder)[0]
        except (CheckpointError, OSError) as error:
            raise ValueError(f"{name}: {error}") from None
    raise ValueError(f"unknown model {name!r}; there are {', '.join(PRESETS)}, and folders with a config.json of Hugging Face")


def machine_of(options: argparse.Namespace) -> Machine:
    """The data sheet or calibration that --gpu names."""
    path, efficiency = Path(options.gpu), options.matrix_efficiency
    if options.gpu in SHEETS or path.suffix != ".json":
        return machine(options.gpu, 0.75 if efficiency is None else efficiency, options.gpus_per_node or 8)
    if efficiency is not None:
        raise ValueError("--matrix-efficiency is for data sheets: a calibration has measured it")
    found = Machine.load(path)
    return found.model_copy(update={"devices_per_node": options.gpus_per_node or found.devices_per_node})


def both(settled: bool | None) -> tuple[bool, ...]:
    return (False, True) if settled is None else (settled,)


def choices(
    workload: Workload, tp: int, dp: int, engine: Engine, on: Machine, options: argparse.Namespace
) -> Iterator[Choice]:
    """Every way to run on tp x dp devices with that engine."""
    local = workload.batch // dp
    micros = [n for n in range(1, local + 1) if local % n == 0 and (n & (n - 1) == 0 or n == local)]
    for sequence in both(options.sequence_parallel) if tp > 1 else (False,):
        for again in both(options.checkpointing):
            work = replace(workload, sequence_parallel=sequence, activation_checkpointing=again)
            for micro in micros:
                plan = Plan(tp, dp, micro, engine, options.master_weights)
                found = predict(work, plan, on, options.usable_memory)
                yield found, work
                if not found.fits and engine == "ddp":
                    break  # larger ones need more; with fsdp2 the largest keeps no whole gradients


def best(found: Sequence[Choice]) -> Choice:
    """The fastest that fits, else the smallest."""
    fit = [choice for choice in found if choice[0].fits]
    return min(fit, key=lambda c: c[0].step) if fit else min(found, key=lambda c: c[0].memory)


def plans(workload: Workload, gpus: int, on: Machine, options: argparse.Namespace) -> tuple[list[Choice], list[str]]:
    """The best choice for each TP x DP and engine, and why some TP are missing."""
    node = min(gpus, on.devices_per_node)
    if gpus % node:
        raise ValueError(f"{gpus} GPUs are not whole nodes of {on.devices_per_node}")
    asked = range(1, node + 1) if options.tp is None else options.tp
    sizes = [n for n in asked if node % n == 0]
    fit, unfit = sizes_that_fit(workload.config, sizes, gpus)
    notes = [note.replace("Not measured at", "No TP of") for note in unfit]
    notes += [f"No TP of {n} ranks: it does not divide the {node} GPUs of a node." for n in options.tp or () if n not in sizes]
    rows: list[Choice] = []
    for tp in fit:
        dp = gpus // tp
        if workload.batch % dp:
            notes.append(f"No TP {tp} x DP {dp}: {workload.batch} sequences cannot be dealt over {dp} replicas.")
            continue
        for engine in ENGINES if options.engine is None else (options.engine,):
            if dp > 1 or engine == "ddp" or options.engine is not None:
                rows.append(best(list(choices(workload, tp, dp, engine, on, options))))
    beyond = max((found.beyond for found, _ in rows), default=0.0)
    if beyond:
        notes.append(
            f"Collectives of up to {beyond / 1e6:.1f} MB; {(on.largest_collective or 0) / 1e6:.1f} MB is the largest measured: "
            f"do not trust their seconds. Above {SLOT_BYTES / 1e6:.1f} MB they go through gloo instead of shared memory."
        )
    if not rows:
        raise ValueError(f"nothing runs on {gpus} GPUs. {' '.join(notes)}")
    return rows, notes


def several(gpus: int) -> str:
    return f"{gpus} GPU{'s' if gpus > 1 else ''}"


def name_of(found: Prediction) -> str:
    return f"TP {found.plan.tp} x DP {found.plan.dp}"


def row_of(choice: Choice, chosen: Choice) -> dict[str, str]:
    found, work = choice
    modes = [name for name, on in (("SP", work.sequence_parallel), ("recompute", work.activation_checkpointing)) if on]
    mark = "**" if choice is chosen and found.fits else ""
    gigabytes = f"{found.memory / 1e9:.0f} of {found.usable / 1e9:.0f}"
    return {
        "TP x DP": f"{mark}{found.plan.tp} x {found.plan.dp}{mark}",
        "engine": found.plan.engine if found.plan.dp > 1 else "-",
        "micro-batches": f"{found.micro_batches} of {found.plan.micro}",
        "modes": ", ".join(modes) or "-",
        "step, s": f"{found.step:.3f}",
        "computation, s": f"{found.compute:.3f}",
        "exposed TP, s": f"{found.exposed:.3f}",
        "exposed DP, s": f"{found.data:.3f}",
        "tokens/s a GPU": f"{found.throughput.raw_per_second_and_device:,.0f}",
        "MFU, %": f"{100 * found.mfu:.1f}",
        "memory, GB": gigabytes if found.fits else f"does not fit: {gigabytes}",
    }


def advice(gpus: int, rows: Sequence[Choice], chosen: Choice) -> str:
    """One sentence: what to take and why."""
    found = chosen[0]
    if not found.fits:
        return (
            f"For {several(gpus)}: nothing fits; the smallest, {name_of(found)}, needs {found.memory / 1e9:.0f} GB "
            f"of the {found.usable / 1e9:.0f} GB that a GPU has for it."
        )
    engine = f" with {found.plan.engine}" if found.plan.dp > 1 else ""
    text = f"For {several(gpus)}: {name_of(found)}{engine}, {found.throughput.raw_per_second:,.0f} tokens/s"
    fitting = [row[0] for row in rows if row[0].fits]
    if len(fitting) == 1:
        return f"{text}, because {'nothing else fits' if len(rows) > 1 else 'there is no other way'}."
    second = sorted(fitting, key=lambda f: f.step)[1]
    more = 100 * (second.step / found.step - 1)
    parts = {
        "computation": second.compute - found.compute,
        "communication of tensor parallelism": second.exposed - found.exposed,
        "communication between replicas": second.data - found.data,
    }
    most = max(parts, key=lambda name: parts[name])
    other = f"{name_of(second)}{f' with {second.plan.engine}' if second.plan.dp > 1 else ''}"
    without = "" if len(fitting) == len(rows) else f" of the {len(fitting)} of {len(rows)} that fit"
    return f"{text}, because it is the fastest{without}: the next, {other}, takes {more:.1f} % longer, by more {most}."


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.predict", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    either = argparse.BooleanOptionalAction
    parser.add_argument("--model", required=True, help=f"{', '.join(PRESETS)}, or a Hugging Face folder or config.json")
    parser.add_argument("--gpus", type=tp_sizes, default=[8, 16, 64], metavar="N,...", help="numbers of GPUs (8,16,64)")
    parser.add_argument(
        "--gpu", default="h100", help=f"{', '.join(SHEETS)}, or a file of benchmarks.calibrate (default: h100)"
    )
    parser.add_argument("--batch", type=int, default=256, metavar="N", help="sequences a step, of all replicas (default: 256)")
    parser.add_argument("--seq-len", type=int, metavar="N", help="tokens a sequence (default: 4096, or what the model allows)")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="of parameters and activations (default: bfloat16, or the calibration's)"
    )
    parser.add_argument("--tp", type=tp_sizes, metavar="N,...", help="only these tensor-parallel sizes")
    parser.add_argument("--engine", choices=ENGINES, help="only this engine for the replicas")
    parser.add_argument("--sequence-parallel", action=either, help="always, or never (default: what is faster)")
    parser.add_argument("--checkpointing", action=either, help="always, or never (default: what is faster of what fits)")
    parser.add_argument("--master-weights", action="store_true", help="AdamW in float32 with a float32 copy of the parameters")
    parser.add_argument(
        "--gpus-per-node", type=int, metavar="N", help="default: 8, or the calibration's; TP stays within a node"
    )
    parser.add_argument("--usable-memory", type=float, default=0.9, metavar="P", help="share of a GPU's memory (default: 0.9)")
    parser.add_argument("--matrix-efficiency", type=float, metavar="P", help="of a data sheet's peak (default: 0.75)")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="of the results (benchmarks/results)")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = parser().parse_args(given)
    try:
        if not 0 < options.usable_memory <= 1:
            raise ValueError(f"--usable-memory is above 0 and at most 1, got {options.usable_memory}")
        if options.gpus_per_node is not None and options.gpus_per_node < 1:
            raise ValueError(f"--gpus-per-node is at least 1, got {options.gpus_per_node}")
        name, config = model_of(options.model)
        on = machine_of(options)
        dtype = options.dtype or ("bfloat16" if "bfloat16" in on.peak else next(iter(on.peak)))
        seq = min(4096, config.max_seq_len) if options.seq_len is None else options.seq_len
        if seq > config.max_seq_len:
            raise ValueError(f"--seq-len {seq} is longer than the {config.max_seq_len} tokens of {name}")
        workload = Workload(config, options.batch, seq, DTYPES[dtype])
        found = {gpus: plans(workload, gpus, on, options) for gpus in options.gpus}
    except ValueError as error:
        refuse(str(error))
    best_of = {gpus: best(rows) for gpus, (rows, _) in found.items()}
    parts = []
    for gpus, (rows, notes) in found.items():
        parts += [
            f"## {several(gpus)}",
            advice(gpus, rows, best_of[gpus]),
            table([row_of(row, best_of[gpus]) for row in rows]),
            *notes,
        ]
    title = f"{name} on {on.name}: {options.batch} sequences of {seq} tokens, {dtype}"
    text = "\n\n".join(parts)
    print(f"{title}\n\n{text}")
    shown = Path(options.gpu).name if Path(options.gpu).suffix == ".json" else options.gpu
    about = {
        "command": command("benchmarks.predict", 1, without_out(_names_only(given))),
        "commit": commit(),
        "versions": versions(),
        "machine": on.name,
    }
    about |= {f"of the machine, {what}": source for what, source in on.sources.items()}
    told = [*map(str, options.gpus), "gpus", name_of_run(options, parser(), NAMES)]
    stem = file_stem("predict", name, Path(shown).stem, *told, device=None)
    samples = {str(gpus): [as_json(row) for row in rows] for gpus, (rows, _) in found.items()}
    save(stem, title, text, about, samples, options.out)
    plots.predictions(
        {gpus: [row[0] for row in rows] for gpus, (rows, _) in found.items()}, title, options.out / f"{stem}.png"
    )
    print(f"\n{stem}.md, .json and .png")


def _names_only(arguments: Sequence[str]) -> list[str]:
    """The arguments with the last part of whatever is a path, which says nothing elsewhere."""
    parted = [argument.rpartition("=") if argument.startswith("-") else ("", "", argument) for argument in arguments]
    return [f"{option}{equals}{Path(value).name if '/' in value else value}" for option, equals, value in parted]


def as_json(choice: Choice) -> dict[str, object]:
    found, work = choice
    return {
        **vars(found.plan),
        "sequence_parallel": work.sequence_parallel,
        "checkpointing": work.activation_checkpointing,
        "micro_batches": found.micro_batches,
        "step_seconds": found.step,
        "seconds": {name: vars(seconds) for name, seconds in found.seconds.items()},
        "data_parallel_seconds": found.data,
        "tokens_per_second": found.throughput.raw_per_second,
        "mfu": found.mfu,
        "bytes": {**vars(found.held), "peak": found.memory, "usable": found.usable},
        "fits": found.fits,
    }


if __name__ == "__main__":
    main()
