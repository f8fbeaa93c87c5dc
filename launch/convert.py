"""What shard, reshard, merge and inspect share: their options, how they end, the plan and the progress bars.

They run in one process, need no torchrun, and end with one line and exit code 2 if something is wrong.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, TypeVar

import torch
import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from tpblock.formats import files
from tpblock.formats.checkpoint import Checkpoint
from tpblock.formats.convert import Conversion
from tpblock.formats.files import CheckpointError, check_new
from tpblock.formats.meta import MetaOptions

T = TypeVar("T")

Meta = Annotated[MetaOptions, tyro.conf.OmitArgPrefixes]


@dataclass(frozen=True)
class ConvertConfig:
    """What the programs that write a checkpoint have in common."""

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """The checkpoint to read."""
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """The folder to write: new or empty. It gets its name when it is complete."""
    dry_run: bool = False
    """Show the plan and stop."""
    verify: bool = False
    """Check the checksums of the source, and read the output back to compare every value with the source bit by bit."""
    check_finite: bool = False
    """Look for NaN and infinity in the source first."""
    meta: Meta = field(default_factory=MetaOptions)


def run(program: Callable[[T], None], kind: type[T], arguments: Sequence[str] | None, name: str) -> None:
    """Runs a program with the options of its command line. ``name``: "-m launch.shard", or "tpblock shard"."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        if os.environ["RANK"] == "0":
            sys.stderr.write(f"error: {name} runs in one process: start it without torchrun\n")
        sys.exit(2)
    options = tyro.cli(kind, args=arguments, prog=name.replace("-m", "python -m"), config=(tyro.conf.FlagCreatePairsOff,))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what is half written is removed
    torch.set_num_threads(1)  # copying is bound by memory; threads would wait for each other, and for other programs
    try:
        program(options)
    except (CheckpointError, OSError) as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def convert(conversion: Conversion, config: ConvertConfig) -> None:
    """Shows the plan, and carries it out."""
    console = new_console()
    describe(conversion.source, console)
    console.print(f"writes {config.out}: {len(conversion.plan)} files, {size(conversion.bytes)}")
    table = new_table("file", ">tensors", ">numbers", ">bytes")
    for file, tensors in conversion.plan.items():
        numbers = [torch.Size(stored.shape).numel() for stored, _ in tensors.values()]
        total = sum(n * dtype.itemsize for n, (_, dtype) in zip(numbers, tensors.values(), strict=True))
        table.add_row(file, f"{len(tensors):,}", f"{sum(numbers):,}", size(total))
    console.print(table)
    check_new(config.out)
    free = shutil.disk_usage(next(path for path in config.out.absolute().parents if path.exists())).free
    console.print(f"{size(free)} free on its disk")
    if conversion.bytes > free:
        raise CheckpointError(f"{config.out} needs {size(conversion.bytes)}, its disk has {size(free)} free")
    if config.dry_run:
        return
    with progress(console) as stages:
        conversion.run(config.out, verify=config.verify, finite=config.check_finite, stages=stages)
    console.print(f"{config.out} is complete" + (" and equal to its source in every bit" if config.verify else ""))


def describe(checkpoint: Checkpoint, console: Console) -> None:
    """What a checkpoint is, in a few lines."""
    config, entries = checkpoint.config, [entry for _, entry in checkpoint.tensors.values()]
    dtypes = sorted({str(entry.dtype).removeprefix("torch.") for entry in entries})
    console.print(f"reads {checkpoint.path}: {checkpoint.kind}, {size(checkpoint.bytes)}")
    console.print(
        f"{checkpoint.hf.config['architectures'][0]}, {config.parameters():,} parameters in {', '.join(dtypes)}, "
        f"{len(entries):,} tensors in {len({entry.path for entry in entries})} files"
    )


class Bars(Progress):
    """Progress bars as :data:`Stages`: one for each thing that is done, with bytes and speed."""

    def __call__(self, what: str, total: int) -> files.Progress:
        task = self.add_task(what, total=total)
        return lambda count: self.advance(task, count)


def new_console() -> Console:
    return Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 160)


def progress(console: Console) -> Bars:
    columns = (TextColumn("{task.description:<16}"), BarColumn(None), DownloadColumn(), TransferSpeedColumn())
    return Bars(*columns, TimeRemainingColumn(), console=console, expand=console.is_terminal)


def new_table(*headings: str) -> Table:
    """A table with these columns, those that begin with > aligned to the right."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for heading in headings:
        table.add_column(heading.removeprefix(">"), justify="right" if heading[0] == ">" else "left", overflow="fold")
    return table


def size(count: int) -> str:
    """Bytes for the eye: 1.2 GB is 1.2 thousand million bytes."""
    value, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


def parse_size(text: str) -> int:
    """The bytes that 5GB, 300 MB or 1000 mean.

    Raises:
        CheckpointError: if it means none.
    """
    number = text.strip().upper().removesuffix("B")
    factor = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}.get(number[-1:], 1)
    try:
        count = int(float(number.rstrip("KMGT")) * factor)
    except (ValueError, OverflowError):
        count = 0
    if count < 1:
        raise CheckpointError(f"{text!r} is no size; 5GB and 300MB are")
    return count
