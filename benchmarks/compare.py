"""Is this library faster than its peers? The same model, weights, data and ranks, after a check that the results are equal.

    pip install -e '.[bench]'
    python -m benchmarks.compare
    python -m benchmarks.compare --sizes latency --peers megatron --megatron-python OTHER/bin/python

The peers as they are on the package index: torch DTensor's best plan, transformers' tp_plan, Megatron-Core (as it is, and with
torch's SDPA for its attention), and DeepSpeed AutoTP; besides, our own parallel block against our sequential one, and ours against
ours over gloo and with torch's own products. Each runs in processes of its own, which are started once and take turns by
command: in each round ours and a peer's follow each other, in an order that alternates. The ratio is ours over theirs, taken
round by round: its median with a 95% bootstrap confidence interval.

Megatron-Core is part of the extra on Python 3.11. It may be in an environment of its own instead, which ``--megatron-python``
names: ``python3.11 -m venv OTHER && OTHER/bin/pip install torch==2.13.0 megatron-core==0.16.1``.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path

import numpy
import torch
from rich.console import Console
from rich.progress import Progress

from benchmarks import plots
from benchmarks.peers.common import HEAD_DIM, PASSES, Case, UnsupportedError
from benchmarks.peers.remote import FailedError, Remote
from benchmarks.program import name_of_run, without_out
from benchmarks.timing import CLOCKS, RESULTS, Interval, Spread, command, file_stem, header, save, table

OURS = "tpblock"
SIZES = {"latency": (256, 1, 64), "middle": (512, 1, 512), "compute": (1024, 4, 512), "large": (2048, 4, 512)}
"""dim, batch, seq. ``large`` is the compute-bound size of wider models, which takes long on a CPU."""
BOUNDS = {"latency": 0, "middle": 1, "compute": 2, "large": 2}
OTHERS = (0.60, 0.80, 0.92)
GOALS = {"megatron": (0.85, 0.92, 0.97), "dtensor": OTHERS, "transformers": OTHERS, "autotp": OTHERS}
"""Ratios of forward and backward at two ranks to be reached, where bound by latency, in the middle, bound by computing."""
PEERS = ("dtensor", "transformers", "autotp", "megatron", "megatron-sdpa", "megatron-fused", "parallel", "gloo", "mkl")
DEFAULT_PEERS = ",".join(peer for peer in PEERS if peer != "megatron-fused")
TURN, MOST_STEPS = 0.1, 200
"""So many seconds a turn lasts about, in steps of which there are at most so many."""
FEWEST = 10
TOLERANCE = 1e-4
TITLE = "This library and its peers"
NAMES = {"peers": "", "what": "", "sizes": "", "passes": "", "sequence_parallel": "sp ", "compile": "compile "}
NAMES |= {"layers": "layers ", "clock": ""}
"""Options that the results' names tell, each with what is written before it."""
EXPLAINED = """\
Ratios are ours over the peer's, below 1 where ours is faster; goal: what the library is held to. Collectives: of a forward and
backward, if eager.

Ours, eager or compiled, exchanges through shared memory between ranks on one machine, and multiplies float32 matrices with oneDNN
where that is faster than MKL (AVX-512 without Intel); every peer goes through gloo and MKL. `gloo` is ours over gloo, `mkl` ours
with MKL: those ratios are what the one and the other make alone."""

Start = Callable[[str], Remote]
"""Makes a contender of a name, not yet running."""


@dataclass(frozen=True)
class Turns:
    """How many rounds are kept, and how many come before them and are dropped. After ``seconds`` FEWEST rounds are enough."""

    rounds: int
    warmup: int
    seconds: float = math.inf


@dataclass(frozen=True)
class Named:
    """A case with the name of its size."""

    size: str
    case: Case

    def __str__(self) -> str:
        case = self.case
        told = [f"{case.what}, {self.size} (dim {case.dim}, {case.batch * case.seq} tokens)"]
        return ", ".join(told + ["sequence parallel"] * case.sequence_parallel + ["compiled"] * case.compile)


@dataclass(frozen=True)
class Row:
    """Two contenders in one case and pass: seconds a step, round by round."""

    named: Named
    run: str
    peer: str
    ours: list[float]
    theirs: list[float]
    collectives: tuple[int | None, int | None]
    goal: float | None

    @property
    def label(self) -> str:
        return f"{self.named}, {PASSES[self.run]}, {self.peer}"

    @property
    def ratio(self) -> Interval:
        """The median of the rounds' ratios in its 95% confidence interval."""
        return interval([a / b for a, b in zip(self.ours, self.theirs, strict=True)])

    def cells(self) -> dict[str, str]:
        ours, theirs = (Spread.of([1000 * s for s in seconds]).median for seconds in (self.ours, self.theirs))
        sent = ["-" if number is None else str(number) for number in self.collectives]
        return {
            "case": str(self.named),
            "pass": PASSES[self.run],
            "peer": self.peer,
            "ours, ms": f"{ours:.2f}",
            "peer, ms": f"{theirs:.2f}",
            "ratio (95% CI)": f"**{self.ratio.median:.3f}** ({self.ratio.low:.3f} to {self.ratio.high:.3f})",
            "goal": "" if self.goal is None else f"{self.goal:.2f}",
            "rounds": str(len(self.ours)),
            "collectives, ours; peer": "; ".join(sent),
        }


@dataclass
class Report:
    """What came of a run. ``notes``: why a line of the table is missing; ``errors``: where that is no one's choice: results that
    differ, a contender that failed; ``versions``: by contender."""

    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    versions: dict[str, list[str]] = field(default_factory=dict)

    def text(self) -> str:
        parts = [table([row.cells() for row in self.rows])] if self.rows else []
        parts.append(EXPLAINED)
        notes = [*(f"Error: {text}" for text in self.errors), *dict.fromkeys(self.notes)]
        return "\n\n".join(parts + (["Notes:\n\n" + "\n".join(f"- {note}" for note in notes)] if notes else []))


def interval(sample: Sequence[float], resamples: int = 10_000) -> Interval:
    """The median of a sample in its 95% confidence interval, by the percentile bootstrap."""
    drawn = numpy.random.default_rng(0).choice(numpy.asarray(sample), (resamples, len(sample)))
    low, high = numpy.percentile(numpy.median(drawn, axis=1), [2.5, 97.5])
    return Interval(float(numpy.median(sample)), float(low), float(high))


def mismatch(ours: Mapping[str, Sequence[float]], theirs: Mapping[str, Sequence[float]]) -> str | None:
    """What differs of two contenders' results, each a value and its scale."""
    if ours.keys() != theirs.keys():
        return f"one gives {', '.join(ours)}; the other {', '.join(theirs)}"
    for name, (value, scale) in ours.items():
        if not abs(value - theirs[name][0]) <= TOLERANCE * abs(scale):
            return f"{name} {value:.8g} of ours, {theirs[name][0]:.8g} of theirs"
    return None


def pair(peer: str) -> tuple[str, str]:
    """The contenders whose ratio is asked for. "parallel": our parallel block over our sequential one; "gloo" and "mkl": ours over
    ours without shared memory, or without oneDNN."""
    if peer == "parallel":
        return "tpblock-parallel", OURS
    return OURS, f"tpblock-{peer}" if peer in ("gloo", "mkl") else peer


def take_turns(contenders: Sequence[Remote], run: str, turns: Turns) -> tuple[list[float], list[float]]:
    """Seconds a step of both, one value a round: the slowest rank's. The order alternates; warm-up rounds are dropped, and the
    last of them settles how many steps are a turn."""
    steps = 1
    kept: tuple[list[float], list[float]] = ([], [])
    begin = time.monotonic()
    for turn in range(turns.warmup + turns.rounds):
        if turn >= turns.warmup + FEWEST and time.monotonic() - begin > turns.seconds:
            break
        seconds = {i: max(contenders[i].ask(do="time", run=run, steps=steps)) for i in ((0, 1) if turn % 2 == 0 else (1, 0))}
        if turn >= turns.warmup:
            for i, values in enumerate(kept):
                values.append(seconds[i])
        elif turn == turns.warmup - 1:
            steps = max(1, min(MOST_STEPS, math.ceil(TURN / max(min(seconds.values()), 1e-9))))
    return kept


def versus(
    peer: str, ours: Remote, cases: Sequence[Named], runs: Sequence[str], start: Start, report: Report, turns: Turns
) -> Iterator[str]:
    """A pair of contenders in every case, what comes of it into ``report``. Yields what comes next."""
    contenders = [ours if name == OURS else start(name) for name in pair(peer)]
    try:
        for named in cases:
            yield f"{peer}: {named}"
            try:
                checks = []
                for contender in reversed(contenders):  # the peer may not be able to
                    report.versions[contender.name] = contender.ask(do="build", case=asdict(named.case))[0]
                note_other_torch(peer, [report.versions[contender.name][0] for contender in contenders], report)
                for contender in contenders:
                    checks.append(contender.ask(do="check")[0])
                difference = mismatch(*(check["numbers"] for check in checks)) if peer != "parallel" else None
                if difference:
                    report.errors.append(f"{peer} is not compared in {named}: {difference}")
                    continue
                sent = (checks[0]["collectives"], checks[1]["collectives"])
                for run in runs:
                    yield f"{peer}: {named}, {run}"
                    goal = GOALS[peer][BOUNDS[named.size]] if peer in GOALS and run == "backward" and ours.ranks == 2 else None
                    report.rows.append(Row(named, run, peer, *take_turns(contenders, run, turns), sent, goal))
            except UnsupportedError as error:
                report.notes.append(f"{peer}, {_told(named)}: {error}.")
            except FailedError as error:
                report.errors.append(f"{peer}, {named}: failed.\n\n```\n{error}\n```".replace("\n", "\n  "))
    finally:
        for contender in contenders:
            if contender is not ours:
                contender.stop()


def note_other_torch(peer: str, versions: Sequence[str], report: Report) -> None:
    """Says if the second contender has another torch: Megatron-Core may run in an environment of its own."""
    ours, theirs = versions
    if theirs != ours:
        report.notes.append(f"{peer} runs on {theirs}, ours on {ours}.")


def _told(named: Named) -> str:
    """What of a case a peer may lack, so that the same reason is noted once."""
    told = [named.case.what] + ["sequence parallel"] * named.case.sequence_parallel + ["compiled"] * named.case.compile
    return ", ".join(told)


def all_cases(
    sizes: Sequence[str], what: Sequence[str], sequence_parallel: Sequence[bool], compiled: Sequence[bool], layers: int
) -> list[Named]:
    cases = []
    for kind, size, sharded, compile_ in product(what, sizes, sequence_parallel, compiled):
        dim, batch, seq = SIZES[size]
        case = Case(kind, dim, batch, seq, sequence_parallel=sharded, compile=compile_)
        cases.append(Named(size, replace(case, layers=layers) if kind == "model" else case))
    return cases


def processes(clock: str, ranks: int, megatron_python: str) -> Start:
    """How a contender is really started."""

    def start(name: str) -> Remote:
        python = megatron_python if name.startswith("megatron") else sys.executable
        return Remote(name, [python, "-W", "ignore", "-m", "benchmarks.peers", name, clock], ranks)

    return start


def write(report: Report, about: Mapping[str, str], stem: str, folder: Path) -> str:
    """Table and notes, samples, plot. Returns the text."""
    text = report.text()
    samples = {row.label: {"ours": row.ours, "peer": row.theirs} for row in report.rows}
    save(stem, TITLE, text, about, samples, folder)
    if report.rows:
        bars = [(row.label, row.ratio, row.goal) for row in report.rows]
        plots.ratios(bars, f"Time of ours over the peer's, {about['ranks']} ranks", folder / f"{stem}.png")
    return text


def listed(choices: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        given = text.split(",")
        if unknown := [name for name in given if name not in choices]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(choices)}")
        return given

    return parse


SWITCH = {"off": [False], "on": [True], "both": [False, True]}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare",
        description=str(__doc__).split("\n")[0],
        epilog="Peers: pip install -e '.[bench]'. A peer that is not installed is noted and left out.",
    )
    parser.add_argument("--peers", type=listed(PEERS), default=DEFAULT_PEERS, help=f"of {', '.join(PEERS)}")
    parser.add_argument("--sizes", type=listed(list(SIZES)), default="latency,middle,compute", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--what", type=listed(["block", "model"]), default="block,model", help="of block, model")
    passes = "; ".join(f"{name}: {told}" for name, told in PASSES.items() if name != told)
    parser.add_argument(
        "--passes", type=listed(list(PASSES)), default=",".join(PASSES), help=f"of {', '.join(PASSES)}; {passes}"
    )
    parser.add_argument("--sequence-parallel", choices=SWITCH, default="both", help="default: both")
    parser.add_argument("--compile", choices=SWITCH, default="both", help="torch.compile (default: both, eager and compiled)")
    parser.add_argument("--layers", type=int, default=4, help="blocks of a whole model (default: 4)")
    parser.add_argument("--ranks", type=int, default=2, help="default: 2; the goals are of 2 ranks of one thread each")
    parser.add_argument("--rounds", type=int, default=40, help="how many rounds are kept (default: 40)")
    parser.add_argument("--warmup", type=int, default=3, help="how many come before and are dropped, at least 1 (default: 3)")
    parser.add_argument(
        "--line-seconds", type=float, default=120.0, metavar="S", help=f"after which {FEWEST} rounds are enough (default: 120)"
    )
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default="wall",
        help="processor: of one rank, or on a shared machine: leaves out other programs and sleep, but not the moment for which "
        "ranks that wait spin",
    )
    parser.add_argument(
        "--megatron-python",
        metavar="PATH",
        default=sys.executable,
        help="an interpreter that has megatron-core (default: this)",
    )
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="where the results go")
    return parser


def main(arguments: Sequence[str] | None = None, start: Start | None = None) -> int:
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.warmup < 1 or options.rounds < 1:
        parser.error("--rounds and --warmup are at least 1")
    heads = min(SIZES[size][0] // HEAD_DIM for size in options.sizes)
    if not 1 <= options.ranks <= heads:
        parser.error(f"--ranks is from 1 to {heads}, the heads of the narrowest size, got {options.ranks}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    device = torch.device("cpu")
    about = header(command("benchmarks.compare", 1, without_paths(sys.argv[1:] if arguments is None else arguments)), device)
    about |= {"ranks": str(options.ranks), "threads a rank": os.environ["OMP_NUM_THREADS"], "clock": options.clock}
    switches = (SWITCH[options.sequence_parallel], SWITCH[options.compile])
    cases = all_cases(options.sizes, options.what, *switches, options.layers)
    start = start or processes(options.clock, options.ranks, options.megatron_python)
    report, interrupted = Report(), False
    turns, ours = Turns(options.rounds, options.warmup, options.line_seconds), start(OURS)
    try:
        with Progress(console=Console(stderr=True)) as progress:
            lines = len(cases) * (1 + len(options.passes))
            task = progress.add_task("", total=len(options.peers) * lines)
            for i, peer in enumerate(options.peers, 1):
                for doing in versus(peer, ours, cases, options.passes, start, report, turns):
                    progress.update(task, description=doing, advance=1)
                progress.update(task, completed=i * lines)
    except KeyboardInterrupt:
        interrupted = True
        report.errors.append("interrupted: what comes after these lines was not measured.")
    finally:
        ours.stop()
    order = {str(named): i for i, named in enumerate(cases)}
    report.rows.sort(key=lambda row: (order[str(row.named)], list(PASSES).index(row.run)))
    about |= {"rounds": f"{options.rounds} at most"}
    about |= {f"versions of {name}": ", ".join(versions) for name, versions in report.versions.items()}
    parts = ["compare", f"{options.ranks} ranks", name_of_run(options, parser, NAMES), *["interrupted"] * interrupted]
    stem = file_stem(*parts, device=device)
    print(write(report, about, stem, options.out))
    for text in report.errors if report.rows else [*report.errors, "nothing was compared"]:
        print(f"error: {text}", file=sys.stderr)
    return 1 if report.errors or not report.rows else 0


def without_paths(arguments: Sequence[str]) -> list[str]:
    """The arguments without --out, which names a place of this machine, and with the other interpreter's left open."""
    given = without_out(arguments)
    if "--megatron-python" in given[:-1]:
        given[given.index("--megatron-python") + 1] = "OTHER/bin/python"
    return ["--megatron-python=OTHER/bin/python" if a.startswith("--megatron-python=") else a for a in given]


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was measured is written then, too
    sys.exit(main())
