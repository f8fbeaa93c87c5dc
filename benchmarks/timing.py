"""The timing loop of all benchmarks, the arithmetic of their rates, and result files that say how they were made.

Contenders take turns in one run, in an order that is reversed every round, so that whatever else the machine does falls on all
of them alike. Compare them by ratios within a round; seconds of different runs are not comparable on a busy machine.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from parallel import collectives
from parallel.group import TPGroup

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"

Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "processor": time.process_time}
"""processor: the time that the threads of this process computed, without that in which they slept or other programs had the
processor. Ranks that wait for each other spin for a moment before they sleep, which counts; the rest of their waiting does not.
For one rank, or for a machine that is shared, knowing that."""


class Ranks:
    """The ranks whose devices are timed together: those of ``group``, by default all that there are (or the single process)."""

    def __init__(self, device: torch.device, group: TPGroup | None = None) -> None:
        self.device = device
        if group is None and dist.is_initialized():
            assert dist.group.WORLD is not None
            group = TPGroup.from_process_group(dist.group.WORLD)
        self._group = group or TPGroup()

    def meet(self) -> None:
        """Waits until this rank's device has nothing left to do and every rank has come here."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self.device.type == "cpu":  # through shared memory: gloo's barrier takes longer than what may be timed
            collectives.all_reduce(torch.zeros(()), self._group)
        elif self._group.size > 1:
            dist.barrier(group=self._group.process_group)

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """Of each value, the maximum over the ranks."""
        values = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        return collectives.all_reduce(values, self._group, "max").tolist()


Phases = Mapping[str, Callable[[], object]]
"""A contender in several phases, each timed apart: all ranks meet between them."""


def measure(
    contenders: Mapping[str, Callable[[], object] | Phases],
    ranks: Ranks,
    *,
    rounds: int,
    warmup: int = 2,
    steps: int = 1,
    clock: Clock = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds a call of each contender, one value a round: the slowest rank's, all ranks starting together.

    Those of a contender in phases are named "contender, phase".

    Args:
        rounds, warmup: how many rounds are kept, and how many come before them and are dropped.
        steps: calls in a row that make one value (their mean), so that short ones are not drowned by the barrier.
    """
    kept: dict[str, list[float]] = {key: [] for name, contender in contenders.items() for key in _keys(name, contender)}

    def timed(run: Callable[[], object], calls: int) -> float:
        ranks.meet()
        begin = clock()
        for _ in range(calls):
            run()
        ranks.meet()
        return clock() - begin

    for turn in range(warmup + rounds):
        for name in list(contenders) if turn % 2 == 0 else reversed(list(contenders)):
            contender = contenders[name]
            if isinstance(contender, Mapping):
                turns = [[timed(run, 1) for run in contender.values()] for _ in range(steps)]
                seconds = [sum(phase) for phase in zip(*turns, strict=True)]
            else:
                seconds = [timed(contender, steps)]
            if turn >= warmup:
                for key, total in zip(_keys(name, contender), seconds, strict=True):
                    kept[key].append(total / steps)
    return {name: ranks.slowest(seconds) for name, seconds in kept.items()}


def _keys(name: str, contender: Callable[[], object] | Phases) -> list[str]:
    return [f"{name}, {phase}" for phase in contender] if isinstance(contender, Mapping) else [name]


@dataclass(frozen=True)
class Spread:
    """The median of a sample, and the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, sample: Sequence[float]) -> Spread:
        if len(sample) == 1:
            return cls(sample[0], sample[0], sample[0])
        low, median, high = statistics.quantiles(sample, n=4, method="inclusive")
        return cls(median, low, high)

    def __format__(self, spec: str) -> str:
        return f"{self.median:{spec}} ({self.low:{spec}} to {self.high:{spec}})"


class Interval(NamedTuple):
    """A value, and the ends of its 95% confidence interval."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Throughput:
    """What a step of ``tokens`` tokens (those of the global batch, once, however many ranks share it) amounts to.

    ``valid``: how many of them count, the rest being padding or ignored labels.
    """

    tokens: int
    valid: int
    seconds: float
    devices: int

    @property
    def raw_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def valid_per_second(self) -> float:
        return self.valid / self.seconds

    @property
    def raw_per_second_and_device(self) -> float:
        return self.raw_per_second / self.devices


def strong_scaling_efficiency(one: float, several: float, devices: int) -> float:
    """t_1 / (N t_N): seconds of one device over those of N for the same global batch. 1 is perfect."""
    return one / (devices * several)


def weak_scaling_efficiency(one: float, several: float) -> float:
    """t_1 / t_N: seconds of one device over those of N for N times the batch. 1 is perfect."""
    return one / several


def command(module: str, world: int, arguments: Sequence[str]) -> str:
    """The command line of this run; arguments that name paths of this machine are for the caller to leave out."""
    threads = os.environ.get("OMP_NUM_THREADS")
    prefix = f"OMP_NUM_THREADS={threads} " if threads else ""
    start = "python" if world == 1 else f"torchrun --nproc-per-node {world}"
    return f"{prefix}{start} -m {module} {shlex.join(arguments)}".strip()


def file_stem(*parts: str, device: torch.device | None) -> str:
    """A file name of ``parts``, the hardware if any was measured, torch's version and the commit, in small letters, digits, dots
    and hyphens."""
    hardware = []
    if device is not None:
        hardware = [torch.cuda.get_device_name(device) if device.type == "cuda" else f"{_cpu()} {os.cpu_count()} cores"]
    text = " ".join([*parts, *hardware, f"torch {torch.__version__}", commit().replace("with uncommitted changes", "changed")])
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def header(command: str, device: torch.device) -> dict[str, str]:
    """What a result was measured with. It names the hardware, never the machine."""
    described = {
        "command": command,
        "commit": commit(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "cpu": f"{_cpu()}, {os.cpu_count()} cores",
        "threads a rank": str(torch.get_num_threads()),
        "versions": versions(),
    }
    if hasattr(os, "getloadavg"):
        described["load average at the start"] = f"{os.getloadavg()[0]:.1f}"
    return described


def versions() -> str:
    return f"torch {torch.__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"


def commit() -> str:
    """The commit of the code, marked if the measured files differ from it."""
    try:
        name = _git("rev-parse", "--short", "HEAD")
        changed = _git("status", "--porcelain", "--", "parallel", "tpblock", "launch", "benchmarks/*.py")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{name} with uncommitted changes" if changed else name


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows of one set of columns as a Markdown table."""
    columns = list(rows[0])
    lines = [columns, ["---"] * len(columns), *([row[column] for column in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def save(
    name: str, title: str, text: str, about: Mapping[str, str], samples: Mapping[str, object], folder: Path = RESULTS
) -> None:
    """Writes ``name.md`` (to be read: the title, what it was measured with, ``text``) and ``name.json`` (with all samples)."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = "\n".join(f"- {key}: {f'`{value}`' if key == 'command' else value}" for key, value in about.items())
    (folder / f"{name}.md").write_text(f"# {title}\n\n{facts}\n\n{text}\n")
    (folder / f"{name}.json").write_text(json.dumps({"title": title, **about, "samples": samples}, indent=1) + "\n")
