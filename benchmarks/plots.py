"""The plots of the benchmarks, as PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("Agg")  # no display needed
from matplotlib import pyplot

from benchmarks.timing import Interval, Spread

if TYPE_CHECKING:
    from benchmarks.cost_model import Prediction
    from benchmarks.scaling_report import Result

COLOURS = {"forward": "#4477aa", "backward": "#66ccee", "optimizer": "#228833", "exposed": "#ee6677"}


def scaling(results: Sequence[Result], weak: bool, title: str, path: Path) -> None:
    """Time against ranks with the ideal line, and beside it where the time of a step goes."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    ranks = [result.ranks for result in results]
    spreads = [Spread.of([1000 * s for s in result.samples["step"]]) for result in results]
    medians = [spread.median for spread in spreads]
    around = [[s.median - s.low for s in spreads], [s.high - s.median for s in spreads]]
    left.errorbar(ranks, medians, yerr=around, marker="o", capsize=3, label="measured, with quartiles")
    first = ranks[0]
    ideal = [medians[0] * (1 if weak else first / n) for n in ranks]
    left.plot(ranks, ideal, linestyle="--", color="grey", label=f"ideal, from {first} rank{'s' if first > 1 else ''}")
    left.set_xscale("log", base=2)
    left.set_yscale("log")
    left.set_xticks(ranks, [str(n) for n in ranks])
    left.set(xlabel="tensor-parallel ranks", ylabel="step, ms")
    left.grid(alpha=0.3, which="both")
    left.legend()
    stacked(right, results)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def stacked(axes: Any, results: Sequence[Result]) -> None:
    """One bar a size: computation by phase, on it exposed communication; what is hidden is hatched within the computation."""
    places = list(range(len(results)))
    bottom = [0.0] * len(results)
    for phase in ("forward", "backward", "optimizer"):
        heights = [1000 * result.median(f"{'computation' if result.ranks > 1 else 'phases'}, {phase}") for result in results]
        axes.bar(places, heights, bottom=bottom, width=0.6, color=COLOURS[phase], label=f"{phase}, computation")
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
        hidden = [min(h, 1000 * result.hidden_in(phase)) for h, result in zip(heights, results, strict=True)]
        under = [b - h for b, h in zip(bottom, hidden, strict=True)]
        name = "meanwhile hidden communication" if phase == "optimizer" else None
        axes.bar(places, hidden, bottom=under, width=0.6, fill=False, hatch="///", linewidth=0, label=name)
    exposed = [1000 * max(0.0, Spread.of(result.exposed).median) for result in results]
    axes.bar(places, exposed, bottom=bottom, width=0.6, color=COLOURS["exposed"], label="exposed communication and waiting")
    axes.set_xticks(places, [str(result.ranks) for result in results])
    axes.set(xlabel="tensor-parallel ranks", ylabel="step in phases, ms")
    axes.grid(alpha=0.3, axis="y")
    axes.legend(fontsize=8)


def memory(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Bytes by kind, measured, one bar a row, and the formula's sum as a mark on it."""
    figure, axes = pyplot.subplots(figsize=(max(6, 0.7 * len(rows) + 3), 5), layout="constrained")
    places = list(range(len(rows)))
    bottom = [0.0] * len(rows)
    for kind in rows[0]["measured"]:
        heights = [row["measured"][kind] / 1e6 for row in rows]
        axes.bar(places, heights, bottom=bottom, width=0.6, label=kind)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    marks = [sum(row["formula"].values()) / 1e6 for row in rows]
    axes.plot(places, marks, linestyle="none", marker="_", markersize=22, color="black", label="formula, sum")
    axes.set_xticks(places, [row["name"] for row in rows], rotation=60, ha="right", fontsize=8)
    axes.set(ylabel="MB on a rank")
    axes.grid(alpha=0.3, axis="y")
    axes.legend(fontsize=8)
    axes.set_title(title, fontsize=10)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def ratios(bars: Sequence[tuple[str, Interval, float | None]], title: str, path: Path) -> None:
    """One horizontal bar a ratio with its confidence interval, a line at 1, and a mark at the goal where there is one."""
    figure, axes = pyplot.subplots(figsize=(10, 1.5 + 0.25 * len(bars)), layout="constrained")
    places = list(range(len(bars)))
    found = [interval for _, interval, _ in bars]
    around = [[s.median - s.low for s in found], [s.high - s.median for s in found]]
    colours = [COLOURS["optimizer"] if s.high < 1 else COLOURS["exposed"] if s.low > 1 else "#bbbbbb" for s in found]
    axes.barh(places, [s.median for s in found], xerr=around, capsize=2, color=colours)
    goals = [(goal, place) for place, (_, _, goal) in zip(places, bars, strict=True) if goal is not None]
    if goals:
        x, y = zip(*goals, strict=True)
        axes.plot(x, y, linestyle="none", marker="|", markersize=12, markeredgewidth=2, color="black", label="goal")
        axes.legend()
    axes.axvline(1, color="grey", linestyle="--")
    axes.set_yticks(places, [label for label, _, _ in bars], fontsize=7)
    axes.set_ylim(-0.6, len(bars) - 0.4)
    axes.invert_yaxis()
    axes.set(xlabel="ratio, with 95% confidence interval")
    axes.grid(alpha=0.3, axis="x")
    axes.set_title(title, fontsize=10)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def predictions(found: Mapping[int, Sequence[Prediction]], title: str, path: Path) -> None:
    """For each number of GPUs a bar a plan: computation and exposed communication. Plans that do not fit are hatched."""
    figure, all_axes = pyplot.subplots(
        1, len(found), figsize=(max(6, 4.5 * len(found)), 4.8), layout="constrained", squeeze=False
    )
    for axes, (gpus, plans) in zip(all_axes[0], found.items(), strict=True):
        places, bottom = list(range(len(plans))), [0.0] * len(plans)
        parts = {
            "computation": (COLOURS["forward"], [plan.compute for plan in plans]),
            "exposed, tensor parallelism": (COLOURS["exposed"], [plan.exposed for plan in plans]),
            "exposed, between replicas": ("#ccbb44", [plan.data for plan in plans]),
        }
        for label, (colour, heights) in parts.items():
            axes.bar(places, heights, bottom=bottom, width=0.6, color=colour, label=label)
            bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
        outside = [0.0 if plan.fits else height for plan, height in zip(plans, bottom, strict=True)]
        axes.bar(places, outside, width=0.6, fill=False, hatch="///", linewidth=0, label="does not fit into memory")
        names = [f"{p.plan.tp} x {p.plan.dp}{f' {p.plan.engine}' if p.plan.dp > 1 else ''}" for p in plans]
        axes.set_xticks(places, names, rotation=60, ha="right", fontsize=8)
        axes.set(title=f"{gpus} GPUs", xlabel="TP x DP", ylabel="predicted step, s")
        axes.grid(alpha=0.3, axis="y")
    all_axes[0][0].legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
