"""What programs on several ranks share: options, the ranks, the sizes that fit."""

from __future__ import annotations

import argparse
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.timing import RESULTS
from parallel.group import TPGroup, single_device
from tpblock import Decoder, ModelConfig

LONGEST_NAME = 60
"""Characters of a file's name that say what was run; hardware, versions and commit follow."""
IDLE = timedelta(days=1)
"""How long ranks that are not needed wait for the others."""


def add_places(parser: argparse.ArgumentParser) -> None:
    """The options that say where a program runs and what it writes goes."""
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: one GPU a rank")
    add_out(parser)


def add_out(parser: argparse.ArgumentParser) -> None:
    """The option that says where results go."""
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="of the results (benchmarks/results)")


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options. Of several ranks only the first shows help and mistakes."""
    if os.environ.get("RANK", "0") == "0":
        return parser.parse_args(arguments)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        return parser.parse_args(arguments)


def refuse(message: str) -> NoReturn:
    """Ends this rank with what is wrong about the command line, which rank 0 says."""
    if os.environ.get("RANK", "0") == "0":
        print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def tp_sizes(text: str) -> list[int]:
    sizes = sorted({int(size) for size in text.split(",")})
    if sizes[0] < 1:
        raise argparse.ArgumentTypeError(f"a number of ranks is at least 1, got {sizes[0]}")
    return sizes


def without_out(arguments: Sequence[str], *others: str) -> list[str]:
    """The arguments without --out and other options that name a place of this machine."""
    places = ("--out", *others)
    kept, skip = [], False
    for argument in arguments:
        if not skip and argument.partition("=")[0] not in places:
            kept.append(argument)
        skip = argument in places
    return kept


def name_of_run(options: argparse.Namespace, parser: argparse.ArgumentParser, names: Mapping[str, str]) -> str:
    """What was asked for beside the defaults, so that no run overwrites another's files: too long a name ends in a checksum.

    Args:
        names: the options that tell runs apart, each with what is written before its value.
    """
    told = []
    for option, prefix in names.items():
        value, default = getattr(options, option), parser.get_default(option)
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        if text != str(default):
            told.append(f"{prefix}{text}")
    name = " ".join(told)
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 9]} {zlib.crc32(name.encode()):08x}"


def sizes_that_fit(config: ModelConfig, sizes: Sequence[int], world: int) -> tuple[list[int], list[str]]:
    """The TP sizes that can run, and for each other one the reason why not."""
    fit, notes = [], []
    for size in sizes:
        try:
            if size > world:
                raise ValueError(f"only {world} ranks were started")
            Decoder(config, group=TPGroup(0, size), device="meta")
            fit.append(size)
        except ValueError as error:
            notes.append(f"Not measured at {size} ranks: {error}.")
    return fit, notes


def device_bytes(device_type: str) -> int:
    """The memory of a GPU, or of this machine."""
    if device_type == "cuda":
        return torch.cuda.get_device_properties(int(os.environ.get("LOCAL_RANK", "0"))).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def start(device_type: str) -> torch.device:
    """Joins the ranks that torchrun started, if it did, and returns this one's device."""
    device = torch.device(device_type)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=IDLE)
    return device


def group_of(size: int, world: int) -> TPGroup | None:
    """The first ``size`` ranks, or None on the others; every rank calls this."""
    if size == 1:
        return single_device() if not dist.is_initialized() or dist.get_rank() == 0 else None
    assert dist.group.WORLD is not None
    ranks = dist.group.WORLD if size == world else dist.new_group(list(range(size)), timeout=IDLE)
    return TPGroup.from_process_group(ranks) if dist.get_rank() < size else None


@contextmanager
def pretended_group(size: int, rank: int = 0) -> Iterator[TPGroup]:
    """A rank of a group whose other ranks do not exist and whose collectives send nothing. No other process group may exist."""
    if size == 1:
        yield single_device()
        return
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        assert dist.group.WORLD is not None
        yield TPGroup.from_process_group(dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def run_program(main: Callable[[], None]) -> None:
    """Runs a program, and ends a rank's process at once: gloo's threads abort it now and then while Python ends."""
    main()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
