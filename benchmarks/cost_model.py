"""How long a training step takes on a machine: what a rank does (work.py) divided by measured or published rates. No timing here.

::

    seconds of a phase = sum of products    2 m n k / rate(side)           rate interpolated between measured sizes
                       + sum of attention   operations / rate(seq)
                       + sum of passes      bytes / bandwidth(kind, bytes)
                       + launches           seconds a layer and a step, however small the tensors
                       + sum of exposed     alpha + beta x bytes of the whole tensor, less what runs beside a product

``side`` is the edge of the cube with as many operations. On a GPU (``asynchronous``) the host launches while the device works: the
longer of the two counts. Where a published bandwidth alone is known (kind "any"), a product also takes no less than its operands
need.

Contention. On a CPU the ranks share cores, caches and memory channels. No factor is assumed for that: all rates of a calibration
are measured with N ranks at work at the same time, for each N (``Machine.speeds``). So the model has no answer for more ranks than
were measured (``shared``). GPUs do not share: rates of the largest N measured hold for all beyond. Collectives are measured between
ranks that do nothing else. What is not modelled: other programs, ranks waiting for one slow rank, clocks that fall with heat.

Overlap. ``Speeds.overlap`` is the share of the shorter that vanishes when a collective and a product run at once. It applies to the
input gradient's sum beside the weight gradient, and to the collectives of data parallelism beside the backward of the last micro-
batch (DistributedDataParallel) or beside forward and backward (FSDP2), apart from the first gather. Tensor- and data-parallel
collectives are taken not to slow each other.

The line of a collective holds up to the largest that was measured (``Machine.largest_collective``). On a CPU those above
parallel.shared_memory.SLOT_BYTES (32 MiB) go through gloo, so that it must not be trusted there: ``Prediction.beyond`` is the
largest of a step that lies beyond.

Collectives between ranks that were not measured follow the ring: an all-reduce of n ranks takes 2 (n - 1) steps of ``latency`` and
sends 2 (n - 1)/n of the tensor over the slowest link, an all-gather or a reduce-scatter half of both. A group over several nodes
with m of its ranks on each uses the m network adapters of these.
"""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import numpy
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from benchmarks.flops import Shares, training_flops
from benchmarks.memory_formula import Bytes, parameter_sizes, peak_bytes, training_bytes
from benchmarks.timing import Throughput
from benchmarks.work import Phase, step_work
from benchmarks.workload import PHASES, Workload

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Points = Annotated[tuple[tuple[Positive, Positive], ...], Field(min_length=1)]
BUCKET = 25 * 2**20
"""Bytes of gradients that DistributedDataParallel sends at once."""
Engine = Literal["ddp", "fsdp2"]


class Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Launch(Model):
    """Seconds that launching a phase takes: for each layer, and for the rest of the step."""

    layer: NotNegative
    rest: NotNegative


class Speeds(Model):
    """What one rank reaches while all do the same.

    Attributes:
        matrix: by dtype, operations a second for products of each side.
        attention: by dtype and direction ("float32 forward"), operations a second for each sequence length.
        memory: by dtype and kind of pass ("float32 rmsnorm"), bytes a second for each size; "any" stands for those not listed.
        launch: by phase.
        overlap: the share of the shorter that vanishes when a collective and a product run at once.
    """

    matrix: dict[str, Points]
    attention: dict[str, Points]
    memory: dict[str, Points]
    launch: dict[str, Launch]
    overlap: Annotated[float, Field(ge=0, le=1)]

    def exposed(self, sent: float, compute: float) -> float:
        """What is left of the seconds of a collective beside those of a computation."""
        return sent - self.overlap * min(sent, compute)


class Collective(Model):
    """seconds + seconds_per_byte x bytes of the whole tensor; ``error``: relative, root mean square, of the fit."""

    seconds: NotNegative
    seconds_per_byte: NotNegative
    error: NotNegative = 0.0

    def __call__(self, size: float) -> float:
        return self.seconds + self.seconds_per_byte * size


class Link(Model):
    """Between two neighbours of a ring: seconds of a step, bytes a second in one direction, and seconds to start a collective."""

    latency: NotNegative
    bandwidth: Positive
    start: NotNegative = 0.0

    def collective(self, kind: str, ranks: int, lanes: int = 1) -> Collective:
        """``lanes``: how many such links the ring has beside each other."""
        rounds = (2 if kind == "all_reduce" else 1) * (ranks - 1)
        return Collective(
            seconds=self.start + rounds * self.latency, seconds_per_byte=rounds / ranks / (self.bandwidth * lanes)
        )


class Machine(Model):
    """The devices, and how they are connected.

    Attributes:
        peak: by dtype, operations a second that the MFU refers to.
        memory_bytes: of a device.
        speeds: by the number of ranks at work at the same time.
        collectives: measured ones by number of ranks and kind.
        largest_collective: bytes of the largest of them; None: not known, as of a data sheet.
        node, network: links within a node and between nodes; None: not known.
        shared: the ranks share cores, and nothing is known of more of them than were measured.
    """

    name: str
    sources: dict[str, str]
    peak: dict[str, Positive]
    memory_bytes: Positive
    devices_per_node: Annotated[int, Field(ge=1)]
    asynchronous: bool
    shared: bool
    speeds: dict[int, Speeds]
    collectives: dict[int, dict[str, Collective]] = {}
    largest_collective: Positive | None = None
    node: Link | None = None
    network: Link | None = None

    @model_validator(mode="after")
    def _complete(self) -> Machine:
        if 1 not in self.speeds:
            raise ValueError(f"the speeds of a single rank are missing, there are those of {sorted(self.speeds)}")
        return self

    @classmethod
    def load(cls, path: Path) -> Machine:
        """Of a calibration's JSON. A ValueError says what is wrong with it."""
        try:
            found = json.loads(path.read_text())
        except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{path.name} cannot be read as JSON: {error}") from None
        machine = found.get("samples", {}) if isinstance(found, dict) else {}
        machine = machine.get("machine") if isinstance(machine, dict) else None
        if not isinstance(machine, dict):
            raise ValueError(f"{path.name} is not a file of benchmarks.calibrate: it has no samples.machine")
        try:
            return cls.model_validate(machine)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            raise ValueError(f"{path.name}, {place or 'machine'}: {first['msg']}") from None

    def speed(self, active: int) -> Speeds:
        """Of a rank while ``active`` are at work: the nearest measured number that is not below, on GPUs the largest there is."""
        enough = [ranks for ranks in self.speeds if ranks >= active]
        if not enough and self.shared:
            raise ValueError(
                f"{self.name} was measured with {max(self.speeds)} ranks at most, which share its cores: not with {active}"
            )
        return self.speeds[min(enough) if enough else max(self.speeds)]

    def collective(self, kind: str, ranks: int, apart: int = 1) -> Collective:
        """Between ``ranks`` ranks of which neighbours are ``apart`` devices from each other."""
        spread = ranks * apart > self.devices_per_node
        if not spread and kind in self.collectives.get(ranks, {}):
            return self.collectives[ranks][kind]
        link = self.network if spread else self.node
        if link is None:
            where = f"over nodes of {self.devices_per_node} devices" if spread else "within a node"
            known = (
                f"measured were {', '.join(map(str, sorted(self.collectives)))}" if self.collectives else "none were measured"
            )
            raise ValueError(f"{self.name} says nothing about collectives of {ranks} ranks {where}: {known}")
        together = max(1, min(ranks, self.devices_per_node // apart)) if spread else 1
        found = link.collective(kind, ranks, lanes=together)
        if spread and self.node is not None and together > 1:
            inside = self.node.collective(kind, ranks)
            found = found.model_copy(update={"seconds_per_byte": max(found.seconds_per_byte, inside.seconds_per_byte)})
        return found


def interpolate(points: Points, at: float) -> float:
    """Between measured points, in logarithms of both; beyond them the nearest one's value."""
    ordered = sorted(points)
    place = bisect.bisect_left([x for x, _ in ordered], at)
    if place in (0, len(ordered)):
        return ordered[max(0, place - 1)][1]
    (x0, y0), (x1, y1) = ordered[place - 1 : place + 1]
    share = math.log(at / x0) / math.log(x1 / x0)
    return math.exp(math.log(y0) + share * math.log(y1 / y0))


def fit(samples: Mapping[int, float]) -> Collective:
    """alpha and beta by least squares over {bytes: seconds}, each weighted by 1/seconds so that all sizes count alike.

    Neither is negative: if the best line has a negative one, that is zero and the other is fitted alone.
    """
    sizes, seconds = (numpy.array(list(values), dtype=float) for values in (samples.keys(), samples.values()))
    rows = numpy.stack([numpy.ones_like(sizes), sizes], axis=1) / seconds[:, None]
    best = numpy.linalg.lstsq(rows, numpy.ones_like(sizes), rcond=None)[0]
    for column in (0, 1):
        if best[column] < 0:
            other = rows[:, 1 - column]
            best = numpy.zeros(2)
            best[1 - column] = other.sum() / (other @ other)
    error = float(numpy.sqrt(numpy.mean((rows @ best - 1) ** 2)))
    return Collective(seconds=float(best[0]), seconds_per_byte=float(best[1]), error=error)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _points(table: Mapping[str, Points], key: str, machine: Machine, fallback: str = "") -> Points:
    found = table.get(key) or table.get(fallback)
    if found is None:
        raise ValueError(f"{machine.name} has no rate for {key}; there are {', '.join(table)}")
    return found


@dataclass(frozen=True)
class Seconds:
    """Of a phase: on the device, and beyond that for collectives."""

    compute: float
    exposed: float = 0.0


def compute_seconds(phase: Phase, machine: Machine, active: int, dtype: torch.dtype) -> float:
    """What the work of a phase takes on a device, without launches and collectives."""
    speeds, name = machine.speed(active), dtype_name(dtype)
    total = 0.0
    if phase.products:
        rates, any_bandwidth = _points(speeds.matrix, name, machine), speeds.memory.get("any")
        for p, number in phase.products.items():
            seconds = p.flops / interpolate(rates, p.side)
            if any_bandwidth is not None:
                operands = (p.m * p.k + p.k * p.n + p.m * p.n) * dtype.itemsize
                seconds = max(seconds, operands / interpolate(any_bandwidth, operands))
            total += number * seconds
    for a, number in phase.attention.items():
        rates = _points(speeds.attention, f"{name} {'backward' if a.backward else 'forward'}", machine)
        total += number * a.flops / interpolate(rates, a.seq)
    for one, number in phase.passes.items():
        bandwidth = _points(speeds.memory, f"{name} {one.kind}", machine, "any")
        total += number * one.bytes / interpolate(bandwidth, one.bytes)
    return total


def exposed_seconds(phase: Phase, machine: Machine, tp: int, active: int, dtype: torch.dtype) -> float:
    """What tensor parallelism's collectives add to a phase."""
    total = 0.0
    for send, number in phase.sent.items():
        sent = machine.collective(send.what.kind, tp)(send.what.bytes)
        if send.beside is not None:
            beside = Phase()
            beside.products[send.beside] = 1
            sent = machine.speed(active).exposed(sent, compute_seconds(beside, machine, active, dtype))
        total += number * sent
    return total


def phase_seconds(name: str, phase: Phase, workload: Workload, machine: Machine, tp: int, active: int) -> Seconds:
    compute = compute_seconds(phase, machine, active, workload.dtype)
    launch = machine.speed(active).launch[name]
    launches = launch.layer * workload.config.layers + launch.rest
    compute = max(compute, launches) if machine.asynchronous else compute + launches
    return Seconds(compute, exposed_seconds(phase, machine, tp, active, workload.dtype) if tp > 1 else 0.0)


@dataclass(frozen=True)
class Plan:
    """How devices share the work: ``tp`` ranks hold one copy of the model, ``dp`` replicas share the batch, each of which takes
    ``micro`` sequences at a time. ``master``: AdamW keeps float32 copies of the parameters and its two numbers in float32."""

    tp: int
    dp: int = 1
    micro: int = 1
    engine: Engine = "ddp"
    master: bool = False

    @property
    def devices(self) -> int:
        return self.tp * self.dp


@dataclass(frozen=True)
class Prediction:
    """A step. ``seconds`` by phase, ``data``: seconds that data parallelism's collectives add; ``held``: bytes of a rank, by kind;
    ``memory``: those of all its tensors at the worst moment; ``beyond``: bytes of the largest collective, if the CPUs were measured
    with smaller ones only, else zero."""

    plan: Plan
    micro_batches: int
    tokens: int
    seconds: Mapping[str, Seconds]
    data: float
    model_flops: int
    peak: float
    held: Bytes
    memory: int
    usable: float
    beyond: float

    @property
    def compute(self) -> float:
        return sum(phase.compute for phase in self.seconds.values())

    @property
    def exposed(self) -> float:
        """Of tensor parallelism."""
        return sum(phase.exposed for phase in self.seconds.values())

    @property
    def step(self) -> float:
        return self.compute + self.exposed + self.data

    @property
    def throughput(self) -> Throughput:
        return Throughput(self.tokens, self.tokens, self.step, self.plan.devices)

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: of the peak, by the operations that the model needs (recomputation left out)."""
        return self.model_flops / (self.step * self.plan.devices * self.peak)

    @property
    def fits(self) -> bool:
        return self.memory <= self.usable


def predict(workload: Workload, plan: Plan, machine: Machine, usable: float = 0.9) -> Prediction:
    """A step of ``workload``, whose batch is the global one, on the first rank, which owns most where sizes do not divide.

    Args:
        usable: the share of a device's memory that tensors can have; the rest is the context's, the collectives' and lost
            between blocks.

    Raises:
        ValueError: if the batch cannot be dealt so, or the machine lacks a rate.
    """
    if workload.batch % (plan.dp * plan.micro):
        raise ValueError(
            f"{workload.batch} sequences cannot be dealt over {plan.dp} replicas in micro-batches of {plan.micro}"
        )
    micro_batches = workload.batch // (plan.dp * plan.micro)
    small = replace(workload, batch=plan.micro)
    work = step_work(small, 0, plan.tp)
    held = _held(small, plan, micro_batches, machine)
    active = plan.devices
    if plan.engine == "fsdp2":
        work["optimizer"] = _shared(work["optimizer"], plan.dp)
    seconds = {name: phase_seconds(name, work[name], small, machine, plan.tp, active) for name in PHASES}
    data = _data_seconds(small, plan, micro_batches, machine, seconds)
    for name in ("forward", "backward"):
        seconds[name] = Seconds(micro_batches * seconds[name].compute, micro_batches * seconds[name].exposed)
    name = dtype_name(workload.dtype)
    if name not in machine.peak:
        raise ValueError(f"{machine.name} has no rate for {name}; there are {', '.join(machine.peak)}")
    return Prediction(
        plan=plan,
        micro_batches=micro_batches,
        tokens=workload.tokens,
        seconds=seconds,
        data=data,
        model_flops=training_flops(workload.config, workload.batch, workload.seq).model,
        peak=machine.peak[name],
        held=held,
        memory=_peak(small, plan, micro_batches, machine, held),
        usable=usable * machine.memory_bytes,
        beyond=_beyond(small, plan, machine, work),
    )


def _beyond(small: Workload, plan: Plan, machine: Machine, work: Mapping[str, Phase]) -> float:
    """Bytes of the largest collective, if it is larger than those that CPUs were measured with."""
    sizes = [float(send.what.bytes) for phase in work.values() for send in phase.sent]
    if plan.dp > 1:
        block, rest = _gathered(small, plan.tp)
        wide = max(small.dtype.itemsize, 4)
        sizes.append(_bucket(small, plan.tp)[1] * wide if plan.engine == "ddp" else float(max(block, rest) * wide))
    most = max(sizes, default=0.0)
    known = machine.largest_collective
    return most if machine.shared and known is not None and most > known else 0.0


def _bucket(small: Workload, tp: int) -> tuple[int, float]:
    """How many buckets of gradients DistributedDataParallel sends, and the numbers in each."""
    block, rest = _gathered(small, tp)
    numbers = small.config.layers * block + rest
    buckets = -(-numbers * small.dtype.itemsize // BUCKET)
    return buckets, numbers / buckets


def _shared(update: Phase, replicas: int) -> Phase:
    """The optimizer's phase where every replica does its part."""
    part = Phase(sent=update.sent)
    for one, number in update.passes.items():
        part.passes[one._replace(bytes=-(-one.bytes // replicas))] += number
    return part


def _held(small: Workload, plan: Plan, micro_batches: int, machine: Machine) -> Bytes:
    """training_bytes with what the replicas share, and with float32 copies."""
    held = training_bytes(small, 0, plan.tp, on_gpu=machine.asynchronous)
    numbers = held.parameters // small.dtype.itemsize
    if plan.master and small.dtype.itemsize < 4:
        held = replace(held, optimizer=12 * numbers)
    if plan.engine != "fsdp2" or plan.dp == 1:
        return held
    shared = {name: -(-getattr(held, name) // plan.dp) for name in ("parameters", "gradients", "optimizer")}
    if micro_batches > 1:  # gradients of all but the last micro-batch are added up whole, in the dtype of the reduction
        shared["gradients"] = max(small.dtype.itemsize, 4) * numbers
    return replace(held, **shared)


def _peak(small: Workload, plan: Plan, micro_batches: int, machine: Machine, held: Bytes) -> int:
    """peak_bytes, with what the replicas share and what keeps them together. Several replicas have gradients all the time, too:
    DistributedDataParallel's buckets, FSDP2's of other blocks."""
    on_gpu, several = machine.asynchronous, plan.dp > 1 or micro_batches > 1
    alone = training_bytes(small, 0, plan.tp, on_gpu=on_gpu)
    peak = peak_bytes(small, 0, plan.tp, on_gpu=on_gpu, accumulate=several)
    return peak + held.total - alone.total + (_engine_bytes(small, plan) if plan.dp > 1 else 0)


def _engine_bytes(small: Workload, plan: Plan) -> int:
    """What FSDP2 has gathered (the block in use, its gradients, the next block, and the root, which stays); or the bucket that
    DistributedDataParallel sends in float32."""
    e = small.dtype.itemsize
    if plan.engine == "fsdp2":
        block, rest = _gathered(small, plan.tp)
        return (3 * block + rest) * e
    return 2 * BUCKET if e < 4 else 0


def _gathered(small: Workload, tp: int) -> tuple[int, int]:
    """The numbers that a rank's block has, and those of the rest of the model."""
    config, own = small.config, Shares.of(small.config, 0, tp)
    one, two = (sum(parameter_sizes(replace(config, layers=n, full_attention_layers=()), own)) for n in (1, 2))
    return two - one, 2 * one - two


def _data_seconds(small: Workload, plan: Plan, micro_batches: int, machine: Machine, seconds: Mapping[str, Seconds]) -> float:
    """What the replicas' collectives add to a step. Gradients in half precision are added up in float32, as launch.train does."""
    if plan.dp == 1:
        return 0.0
    e, wide = small.dtype.itemsize, max(small.dtype.itemsize, 4)

    def sent(kind: str, numbers: float, width: int) -> float:
        return machine.collective(kind, plan.dp, apart=plan.tp)(numbers * width)

    def left(sent: float, phase: str) -> float:
        """What is exposed of so many seconds beside the computation of a phase."""
        return machine.speed(plan.devices).exposed(sent, seconds[phase].compute)

    block, rest = _gathered(small, plan.tp)
    layers = small.config.layers
    if plan.engine == "ddp":
        buckets, numbers = _bucket(small, plan.tp)
        last = sent("all_reduce", numbers, wide)  # the last bucket is full when backward is over
        return max(last, left(buckets * last, "backward"))
    gather, first = layers * sent("all_gather", block, e), sent("all_gather", rest, e)
    reduced = layers * sent("reduce_scatter", block, wide) + sent("reduce_scatter", rest, wide)
    before = micro_batches * left(gather, "forward") + first
    behind = (micro_batches - 1) * left(gather, "backward")
    return before + behind + max(sent("reduce_scatter", rest, wide), left(gather + reduced, "backward"))
