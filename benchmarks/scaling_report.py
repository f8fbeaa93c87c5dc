"""What benchmarks.scaling measured of each size, the numbers that follow from it, and the tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.timing import Spread, Throughput, strong_scaling_efficiency, table, weak_scaling_efficiency
from benchmarks.traffic import Traffic, by_size
from benchmarks.workload import PHASES
from parallel.traffic import Sent


@dataclass(frozen=True)
class Result:
    """What was measured of one size: ``samples`` in seconds, one a round, and ``traffic``, each phase's collectives of a rank."""

    ranks: int
    batch: int
    tokens: int
    valid: int
    samples: Mapping[str, Sequence[float]]
    traffic: Mapping[str, Sequence[Sent]]
    peak_bytes: int
    flops: int
    matrix_flops: int

    def median(self, name: str) -> float:
        return Spread.of(self.samples[name]).median

    def by_round(self, name: str) -> list[float]:
        """The sum of a contender's phases, one a round. One rank has nothing to send, so that its step is its computation."""
        if self.ranks == 1 and name != "phases":
            return self.by_round("phases") if name == "computation" else [0.0] * len(self.samples["step"])
        return [sum(phases) for phases in zip(*(self.samples[f"{name}, {phase}"] for phase in PHASES), strict=True)]

    @property
    def exposed(self) -> list[float]:
        """Seconds that communication adds to the computation, one a round."""
        return [step - work for step, work in zip(self.by_round("phases"), self.by_round("computation"), strict=True)]

    @property
    def hidden(self) -> list[float]:
        """Seconds of the collectives that run while something is computed, one a round."""
        return [sent - waited for sent, waited in zip(self.by_round("collectives"), self.exposed, strict=True)]

    def hidden_in(self, phase: str) -> float:
        """The median seconds of a phase's collectives that run while it computes something, at least zero."""
        if self.ranks == 1:
            return 0.0
        names = ("collectives", "computation", "phases")
        sent, work, step = (self.samples[f"{name}, {phase}"] for name in names)
        return max(0.0, Spread.of([c + w - s for c, w, s in zip(sent, work, step, strict=True)]).median)

    def share(self, seconds: Sequence[float]) -> Spread:
        """Per cent of the step in phases, round by round."""
        return Spread.of([100 * part / step for part, step in zip(seconds, self.by_round("phases"), strict=True)])

    @property
    def throughput(self) -> Throughput:
        return Throughput(self.tokens, self.valid, self.median("step"), self.ranks)

    @property
    def tflops_a_device(self) -> float:
        return self.flops / self.median("step") / self.ranks / 1e12

    @property
    def matrix_tflops(self) -> float:
        return self.matrix_flops / self.median("matrix") / 1e12

    @property
    def sent(self) -> list[Sent]:
        return [one for phase in PHASES for one in self.traffic[phase]]


def time_row(result: Result, one: Result | None, weak: bool, peak_tflops: float | None) -> dict[str, str]:
    rate = result.throughput
    efficiency = "-"
    if one is not None and weak:
        efficiency = f"{weak_scaling_efficiency(one.median('step'), result.median('step')):.3f}"
    elif one is not None:
        efficiency = f"{strong_scaling_efficiency(one.median('step'), result.median('step'), result.ranks):.3f}"
    peak = result.matrix_tflops if peak_tflops is None else peak_tflops
    return {
        "ranks": str(result.ranks),
        "batch": str(result.batch),
        **{f"{phase}, ms": f"{1000 * result.median(f'phases, {phase}'):.2f}" for phase in PHASES},
        "step, ms": f"{Spread.of([1000 * s for s in result.samples['step']]):.2f}",
        "tokens/s": f"{rate.raw_per_second:,.0f}",
        "valid tokens/s": f"{rate.valid_per_second:,.0f}",
        "tokens/s a device": f"{rate.raw_per_second_and_device:,.0f}",
        "TFLOP/s a device": f"{result.tflops_a_device:.3f}",
        "peak TFLOP/s": f"{peak:.3f}",
        "MFU, %": f"{100 * result.tflops_a_device / peak:.1f}",
        "efficiency t1/tN" if weak else "efficiency t1/(N tN)": efficiency,
    }


def communication_row(result: Result) -> dict[str, str]:
    total = Traffic.of(result.sent)
    return {
        "ranks": str(result.ranks),
        "computation, ms": f"{Spread.of([1000 * s for s in result.by_round('computation')]):.2f}",
        "collectives alone, ms": f"{Spread.of([1000 * s for s in result.by_round('collectives')]):.2f}",
        "exposed, ms": f"{Spread.of([1000 * s for s in result.exposed]):.2f}",
        "exposed, % of the step": f"{result.share(result.exposed):.1f}",
        "hidden, % of the step": f"{result.share(result.hidden):.1f}",
        "collectives a step": str(total.number),
        "their tensors, MB": f"{total.bytes / 1e6:.3f}",
        "sent by a rank, MB": f"{total.sent / 1e6:.3f}",
        "peak memory of a rank, MB": f"{result.peak_bytes / 1e6:.1f}",
    }


def traffic_rows(result: Result) -> list[dict[str, str]]:
    return [
        {
            "ranks": str(result.ranks),
            "phase": phase,
            "collective": one.kind,
            "elements": f"{one.elements:,}",
            "dtype": str(one.dtype).removeprefix("torch."),
            "number": str(number),
            "MB in all": f"{number * one.bytes / 1e6:.3f}",
        }
        for phase in PHASES
        for one, number in by_size(result.traffic[phase])
    ]


def report(results: Sequence[Result], weak: bool, peak_tflops: float | None, notes: Sequence[str]) -> str:
    """The tables as Markdown, and what is to be said beside them."""
    one = next((result for result in results if result.ranks == 1), None)
    parts = [
        table([time_row(result, one, weak, peak_tflops) for result in results]),
        table([communication_row(result) for result in results]),
    ]
    sent = [row for result in results for row in traffic_rows(result)]
    parts += [table(sent)] if sent else []
    return "\n\n".join([*parts, *notes])


def as_json(result: Result) -> dict[str, object]:
    """All samples and counts, and the numbers of the tables before they were rounded."""
    rate, total = result.throughput, Traffic.of(result.sent)
    return {
        **{
            name: getattr(result, name)
            for name in ("ranks", "batch", "tokens", "valid", "peak_bytes", "flops", "matrix_flops")
        },
        "tokens_per_second": rate.raw_per_second,
        "valid_tokens_per_second": rate.valid_per_second,
        "tflops_a_device": result.tflops_a_device,
        "exposed_seconds": result.exposed,
        "hidden_seconds": result.hidden,
        "collectives": total.number,
        "collective_bytes": total.bytes,
        "sent_bytes": total.sent,
        "traffic": traffic_rows(result),
        "seconds": dict(result.samples),
    }
