"""What a run tells: the terminal, metrics.jsonl, the loss curve, and the comparison with the single device."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

EARLY_STEPS = 3
Tolerances = tuple[float, float | None]
TOLERANCES: dict[str, Tolerances] = {"float64": (1e-12, 1e-9), "float32": (1e-5, 5e-3), "bfloat16": (5e-3, None)}
"""Largest relative differences that orders of summation explain: in the first steps, and after many of them.

Training amplifies rounding: slowly at a calm learning rate, fast beyond it and in bfloat16, where later steps prove nothing.
"""

PRETRAINED = 10
"""By how much a model that was trained before may differ more in the first steps: its layers are many, and its weights amplify
rounding (SmolLM2-135M on 2 ranks: gradient norms 2e-5 apart in float32, 2e-12 in float64, losses 1.4e-2 in bfloat16)."""

COPIED = 10
"""The same for DeepSpeed in bfloat16, whose optimizer changes a float32 copy of the weights: it keeps the small changes of the
first steps, which bfloat16 rounds away (gradient norms 1e-2 apart in step 3 of the small model)."""


@dataclass
class Trace:
    """Loss and gradient norm of every step, left on the device until they are asked for."""

    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)

    def append(self, loss: Tensor, norm: Tensor) -> None:
        self.losses.append(loss)
        self.norms.append(norm)


@dataclass(frozen=True)
class Difference:
    """The largest difference in one quantity, and where it is."""

    quantity: str
    absolute: float
    relative: float
    where: str
    tolerance: float | None

    @property
    def equal(self) -> bool:
        """Whether it is within the tolerance; None for the tolerance allows all."""
        return self.tolerance is None or self.relative <= self.tolerance  # False for NaN


@dataclass(frozen=True)
class Comparison:
    differences: list[Difference]

    @property
    def equal(self) -> bool:
        return all(difference.equal for difference in self.differences)


def compare(
    ours: Trace,
    our_weights: dict[str, Tensor],
    single: Trace,
    single_weights: dict[str, Tensor],
    tolerances: Tolerances,
    first: int = 0,
) -> Comparison:
    """Loss and gradient norm step by step, and the weights after the last step, of two runs from step ``first`` on."""
    early, late = tolerances
    steps = len(single.losses)
    spans = [(min(EARLY_STEPS, steps), early), (steps, late)][: 2 if steps > EARLY_STEPS else 1]
    differences = []
    for quantity, a, b in (("loss", ours.losses, single.losses), ("grad norm", ours.norms, single.norms)):
        expected = torch.stack(b).double().cpu()
        absolute = (torch.stack(a).double().cpu() - expected).abs()
        relative = absolute / expected.abs()
        for count, tolerance in spans:
            at = int(relative[:count].argmax())
            name = f"{quantity}, steps {first + 1}-{first + count}"
            where = f"step {first + at + 1}"
            differences.append(Difference(name, absolute[:count].max().item(), relative[at].item(), where, tolerance))
    worst = Difference("weights at the end", 0.0, 0.0, "none", late)
    for name, weight in single_weights.items():
        change = our_weights[name].double().cpu() - weight.double().cpu()
        ratio = (change.norm() / weight.double().cpu().norm()).item()
        largest = max(worst.absolute, change.abs().max().item())
        relative_norm, where = (worst.relative, worst.where) if ratio <= worst.relative else (ratio, name)
        worst = Difference(worst.quantity, largest, relative_norm, where, late)
    return Comparison([*differences, worst])


class Reporter:
    """Talks on rank 0 (``enabled``), is silent on the others. On a terminal a progress bar, elsewhere a line now and then."""

    def __init__(
        self, folder: Path, steps: int, tokens: int, *, enabled: bool, device: torch.device, unit: str = "byte"
    ) -> None:
        self.folder, self.total, self.tokens, self.enabled, self.device = folder, steps, tokens, enabled, device
        self.unit = unit
        self.console = Console(quiet=not enabled, highlight=False)
        bar = (TextColumn("{task.description}"), BarColumn(None), MofNCompleteColumn(), TextColumn("{task.fields[told]}"))
        self.progress = Progress(
            *bar, TimeRemainingColumn(), console=self.console, expand=True, disable=not self.console.is_terminal
        )
        self.task: TaskID | None = None
        self.file: IO[str] | None = None
        self.curves: dict[str, list[tuple[int, float]]] = {"training": [], "validation": []}
        self._clock = self._began = time.perf_counter()
        self._last_logged = 0

    def __enter__(self) -> Reporter:
        if self.enabled:
            self.file = open(self.folder / "metrics.jsonl", "w", buffering=1)  # line by line
        self.progress.start()
        self.console.show_cursor()  # a rank that torchrun ends could not give it back
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()
        if self.file:
            self.file.close()

    def start(self, config: dict[str, Any], parameters: int, ranks: int, replicas: int = 1) -> None:
        """What runs where: ``replicas`` copies of the model, each on ``ranks`` tensor-parallel ranks."""
        where = f"{ranks} tensor-parallel ranks ({self.device.type})" if ranks > 1 else f"a single device ({self.device.type})"
        if replicas > 1:
            stage = f" at ZeRO stage {config['zero_stage']}" if config["engine"] == "deepspeed" else ""
            where = f"{replicas} replicas ({config['engine']}{stage}) of {where}"
        self.console.print(f"{parameters:,} parameters in {config['dtype']} on {where}")
        told = ", ".join(f"{name} {value}" for name, value in config.items() if value is not None)
        self.console.print(told, style="dim")
        if config["init"] is not None:
            how = "tokens of its tokenizer.json" if self.unit == "token" else "bytes, for it has no tokenizer.json"
            self.console.print(f"from {config['init']}, the text as {how}")
        self.console.print(f"{config['steps']:,} steps of {self.tokens:,} tokens, kept in {self.folder}")

    def steps(self, what: str, first: int) -> Iterator[int]:
        """The numbers of the steps to take, shown as progress."""
        if not self.console.is_terminal:
            self.console.print(f"{what}: {self.total - first} steps")
        self.task = self.progress.add_task(f"{what:<10}", total=self.total, completed=first, told="")
        self._clock, self._last_logged = time.perf_counter(), first
        for step in range(first, self.total):
            yield step
            self.progress.update(self.task, completed=step + 1)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent inside does not count in tokens/s."""
        began = time.perf_counter()
        yield
        self._clock += time.perf_counter() - began

    def step(self, step: int, loss: Tensor, norm: Tensor, lr: float) -> None:
        """Logs a step; ``step`` counts those that are done."""
        if not self.enabled:
            return
        values = {"loss": float(loss), "grad_norm": float(norm)}  # waits for the device
        now = time.perf_counter()
        rate = self.tokens * (step - self._last_logged) / (now - self._clock)
        self._clock, self._last_logged = now, step
        self._write({"step": step, **values, "lr": lr, "tokens_per_s": rate, "seconds": now - self._began})
        self.curves["training"].append((step, values["loss"]))
        told = f"loss {values['loss']:.3f}  grad norm {values['grad_norm']:.2f}  {rate:,.0f} tokens/s"
        assert self.task is not None
        self.progress.update(self.task, told=told)
        tenth = max(1, self.total // 10)
        if not self.console.is_terminal and (step % tenth == 0 or step == self.total):
            self.console.print(f"step {step:>{len(str(self.total))}}/{self.total}  {told}")

    def validation(self, step: int, loss: float) -> None:
        if not self.enabled:
            return
        self._write({"step": step, "validation_loss": loss})
        self.curves["validation"].append((step, loss))
        self.console.print(f"step {step:>{len(str(self.total))}}/{self.total}  validation loss {loss:.3f}")

    def comparison(self, comparison: Comparison, ranks: int) -> None:
        """The table, and its numbers as the last line of metrics.jsonl."""
        self._write({"comparison": [{**vars(d), "equal": d.equal} for d in comparison.differences]})
        self.progress.stop()
        table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for heading in ("largest difference", "absolute", "relative", "allowed", "at", ""):
            table.add_column(
                heading, justify="right" if heading in ("absolute", "relative", "allowed") else "left", no_wrap=True
            )
        for d in comparison.differences:
            verdict = ("equal" if d.equal else "DIFFERS") if d.tolerance is not None else ""
            allowed = f"{d.tolerance:.0e}" if d.tolerance is not None else "any"
            where = d.where if len(d.where) <= 12 else "..." + d.where[-9:]
            table.add_row(d.quantity, f"{d.absolute:.1e}", f"{d.relative:.1e}", allowed, where, verdict)
        self.console.print(f"{ranks} ranks against a single device:" if ranks > 1 else "a single device against itself:")
        self.console.print(table)

    def finish(self, *more: str) -> None:
        """Draws the loss curve and says where everything is."""
        self.progress.stop()
        plot(self.curves, self.folder / "loss.png", self.unit)
        self.console.print(", ".join([f"{self.folder}: metrics.jsonl", "loss.png", f"checkpoints/step-{self.total}", *more]))

    def _write(self, line: dict[str, Any]) -> None:
        if self.file:
            self.file.write(json.dumps(line) + "\n")


def plot(curves: dict[str, list[tuple[int, float]]], path: Path, unit: str = "byte") -> None:
    """The curves of loss against step as a PNG."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name, style in (("training", {"linewidth": 0.8}), ("validation", {"marker": "o", "markersize": 4})):
        if curves[name]:
            axes.plot(*zip(*curves[name], strict=True), label=name, **style)
    axes.set(xlabel="step", ylabel=f"cross entropy (nats per {unit})", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
