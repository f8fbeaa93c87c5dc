"""What one rank does in a training step: matrix products, attention, passes over memory and collectives. A formula, as flops.py.

For T tokens, S of them on this rank between the sharded regions (S = T, or under sequence parallelism T/n rounded up), e bytes a
number, and q, k, f, v the rank's rows as in flops.py. Passes count what must be read and written once:

::

    norm          forward 2 S d e     backward 3 S d e       rotary   2 T (q + k) e each way
    activation    gated: forward 3 T f e, backward 5 T f e; else 2 and 3
    residual      3 S d e for each sum, forward and backward
    heads         2 T (q + 2k) e in backward, where gradients of q, k and v are put side by side
    loss          for T v logits: read, softmax in float32, gradient: T v (2 e + 8); chunks after the first add to dW, 12 v d
    embedding     forward 2 T d e     backward v d e + 2 T d e
    update        gradient norm e, clipping 2 e, AdamW (fused: p, g, m, v read, p, m, v written) 7 e: 10 e a parameter

An implementation of several kernels passes more often: its measured rate is then so much lower (see calibrate.py).

A collective may have a product that it does not wait for: the input gradient's sum runs while the weight gradient is computed.
The collectives are the ones that benchmarks.traffic sees in a real step, which a test compares. Under sequence parallelism their
tensors are padded to the longest share, as on GPUs and between machines; CPUs of one machine share memory, where nothing is padded.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from benchmarks.flops import Shares
from benchmarks.memory_formula import LOSS_CHUNK, parameter_sizes
from benchmarks.workload import Workload
from parallel.layout import deal
from parallel.traffic import Sent
from tpblock import Bias, Norm, Placement, Position, QKNorm


class Product(NamedTuple):
    """[m, k] x [k, n]."""

    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def side(self) -> float:
        """Of the cube with as many operations."""
        return round((self.m * self.n * self.k) ** (1 / 3), 3)


class Attention(NamedTuple):
    """Causal, fused, on the heads of a rank. Operations are those of the whole square, of which a kernel may leave out half."""

    tokens: int
    seq: int
    width: int
    backward: bool = False

    @property
    def flops(self) -> int:
        return (10 if self.backward else 4) * self.tokens * self.seq * self.width


class Pass(NamedTuple):
    """Work that is bound by memory: of which kind, and the bytes that must be read and written."""

    kind: str
    bytes: int


class Send(NamedTuple):
    """A collective, and what is computed meanwhile."""

    what: Sent
    beside: Product | None = None


@dataclass(frozen=True)
class Phase:
    """What a phase of the step consists of, and how often each part occurs."""

    products: Counter[Product] = field(default_factory=Counter)
    attention: Counter[Attention] = field(default_factory=Counter)
    passes: Counter[Pass] = field(default_factory=Counter)
    sent: Counter[Send] = field(default_factory=Counter)

    def add(self, other: Phase, times: int = 1) -> None:
        for name, counter in vars(self).items():
            for key, number in getattr(other, name).items():
                counter[key] += number * times

    @property
    def flops(self) -> int:
        products = sum(number * product.flops for product, number in self.products.items())
        return products + sum(number * attention.flops for attention, number in self.attention.items())

    @property
    def collectives(self) -> Counter[Sent]:
        found: Counter[Sent] = Counter()
        for send, number in self.sent.items():
            found[send.what] += number
        return found


class _Rank:
    """The terms of the module's docstring for one rank."""

    def __init__(self, workload: Workload, rank: int, ranks: int) -> None:
        self.workload, self.config, self.ranks = workload, workload.config, ranks
        self.own = Shares.of(workload.config, rank, ranks)
        self.tokens, self.e = workload.tokens, workload.dtype.itemsize
        self.sp = workload.sequence_parallel and ranks > 1
        self.widest = deal(self.tokens, ranks)[0].length
        self.rows = self.widest if self.sp else self.tokens
        self.norm_size = self.config.dim * (2 if self.config.norm is Norm.LAYERNORM else 1)

    def passed(self, phase: Phase, kind: str, numbers: int, times: int = 1) -> None:
        phase.passes[Pass(kind, numbers * self.e)] += times

    def send(
        self, phase: Phase, kind: str, elements: int, beside: Product | None = None, dtype: torch.dtype | None = None
    ) -> None:
        if self.ranks > 1:
            phase.sent[Send(Sent(kind, elements, dtype or self.workload.dtype), beside)] += 1

    @property
    def whole(self) -> int:
        """Elements of the activations on the wire: under sequence parallelism padded to the longest share."""
        return (self.widest * self.ranks if self.sp else self.tokens) * self.config.dim

    def enter(self, forward: Phase, backward: Phase, columns: Product) -> None:
        """A column-parallel linear."""
        t, o, d = columns
        dx, dw = Product(t, d, o), Product(o, d, t)
        forward.products[columns] += 1
        backward.products.update([dx, dw])
        if self.config.placement is Placement.PARALLEL_TWO_NORMS:
            return  # the block enters for both
        if self.sp:
            self.send(forward, "all_gather", self.whole)
            self.send(backward, "all_gather", self.whole, beside=dx)
        self.send(backward, "reduce_scatter" if self.sp else "all_reduce", self.whole, beside=dw)

    def leave(self, forward: Phase, backward: Phase) -> None:
        """The sum of row-parallel linears' results."""
        self.send(forward, "reduce_scatter" if self.sp else "all_reduce", self.whole)
        if self.sp:
            self.send(backward, "all_gather", self.whole)

    def block(self) -> tuple[Phase, Phase, Phase]:
        """Forward, backward, and what activation checkpointing computes again of forward."""
        config, own, t, d = self.config, self.own, self.tokens, self.config.dim
        forward, backward, again = Phase(), Phase(), Phase()
        gate = 2 if config.activation.gated else 1
        qkv, up = own.q + 2 * own.k, gate * own.f
        two, sequential = config.placement is Placement.PARALLEL_TWO_NORMS, config.placement is Placement.PRE
        norms = 1 if config.placement is Placement.PARALLEL else 2
        norm_rows = t if two else self.rows
        self.passed(forward, config.norm.value, 2 * norm_rows * d, norms)
        self.passed(backward, f"{config.norm.value} backward", 3 * norm_rows * d, norms)
        for width in [qkv + up] if config.placement is Placement.PARALLEL else [qkv, up]:
            self.enter(forward, backward, Product(t, width, d))
        if config.qk_norm is QKNorm.PER_HEAD:
            self.passed(forward, Norm.RMSNORM.value, 2 * t * (own.q + own.k))
            self.passed(backward, f"{Norm.RMSNORM.value} backward", 3 * t * (own.q + own.k))
            self.send(backward, "all_reduce", 2 * config.head_dim)
        if config.position is Position.ROPE:
            self.passed(forward, "rotary", 2 * t * (own.q + own.k))
            self.passed(backward, "rotary backward", 2 * t * (own.q + own.k))
        forward.attention[Attention(t, self.workload.seq, own.q)] += 1
        backward.attention[Attention(t, self.workload.seq, own.q, backward=True)] += 1
        self.passed(backward, "add", 2 * t * qkv)
        self.passed(forward, config.activation.value, (3 if gate == 2 else 2) * t * own.f)
        self.passed(backward, f"{config.activation.value} backward", (5 if gate == 2 else 3) * t * own.f)
        sums = 2 if sequential else 1
        self.passed(forward, "add", 3 * self.rows * d, sums)
        self.passed(backward, "add", 3 * self.rows * d, sums)
        forward.products[Product(t, d, own.q)] += 1
        if two and self.sp:
            self.send(forward, "all_gather", self.whole)
            self.send(backward, "reduce_scatter", self.whole)
            self.send(backward, "all_reduce", 2 * self.norm_size)
        elif two:
            self.send(backward, "all_reduce", self.whole + 2 * self.norm_size)
        elif self.sp:
            for _ in range(norms):
                self.send(backward, "all_reduce", self.norm_size)
        if sequential:
            self.leave(forward, backward)
        again.add(forward)  # backward needs nothing of the last product, so that recomputation ends before it
        forward.products[Product(t, d, own.f)] += 1
        self.leave(forward, backward)
        for width in (own.q, own.f):
            backward.products.update([Product(t, width, d), Product(d, width, t)])
        if self.sp:
            for linears in (Bias.OUT, Bias.FEEDFORWARD):
                if config.has_bias(linears):
                    self.send(backward, "all_reduce", d)
        if config.kv_heads < self.ranks:
            shared = 2 * config.kv_heads * config.head_dim
            self.send(backward, "all_reduce", shared * d)
            if config.has_bias(Bias.QKV):
                self.send(backward, "all_reduce", shared)
        return forward, backward, again

    def rest(self) -> tuple[Phase, Phase]:
        """Forward and backward of embedding, final norm, head and loss."""
        config, v, t, d, e = self.config, self.own.v, self.tokens, self.config.dim, self.e
        forward, backward = Phase(), Phase()
        self.passed(forward, "add", 2 * t * d)
        self.passed(backward, "add", v * d + 2 * t * d)
        self.leave(forward, backward)
        if config.position is Position.LEARNED:
            self.passed(forward, "add", 3 * self.rows * d)
            self.passed(backward, "add", (config.max_seq_len + self.rows) * d)
            if self.sp:
                self.send(backward, "all_reduce", config.max_seq_len * d)
        self.passed(forward, config.norm.value, 2 * self.rows * d)
        self.passed(backward, f"{config.norm.value} backward", 3 * self.rows * d)
        if self.sp:
            self.send(backward, "all_reduce", self.norm_size)
            self.send(forward, "all_gather", self.whole)
        statistics = torch.promote_types(self.workload.dtype, torch.float32)
        for at in range(0, t, LOSS_CHUNK):
            chunk = min(LOSS_CHUNK, t - at)
            forward.products.update([Product(chunk, v, d), Product(chunk, d, v), Product(v, d, chunk)])
            forward.passes[Pass("loss", chunk * v * (2 * e + 2 * statistics.itemsize))] += 1
            if at:
                forward.passes[Pass("add", 3 * v * d * max(e, 4))] += 1
            self.send(forward, "all_gather", 3 * chunk * self.ranks, dtype=statistics)
        self.passed(backward, "add", 2 * (t + v) * d)
        self.send(backward, "reduce_scatter" if self.sp else "all_reduce", self.whole)
        return forward, backward

    def update(self) -> Phase:
        phase = Phase()
        self.passed(phase, "update", 10 * sum(parameter_sizes(self.config, self.own)))
        self.send(phase, "all_reduce", 1, dtype=torch.float64)
        return phase


def block_work(workload: Workload, rank: int = 0, ranks: int = 1) -> tuple[Phase, Phase]:
    """Forward and backward of one block, with recomputation if the workload asks for it."""
    forward, backward, again = _Rank(workload, rank, ranks).block()
    if workload.activation_checkpointing:
        backward.add(again)
    return forward, backward


def step_work(workload: Workload, rank: int = 0, ranks: int = 1) -> dict[str, Phase]:
    """Forward, backward and optimizer of one micro-batch, which is the workload's batch."""
    one = _Rank(workload, rank, ranks)
    forward, backward = one.rest()
    for phase, block in zip((forward, backward), block_work(workload, rank, ranks), strict=True):
        phase.add(block, workload.config.layers)
    return {"forward": forward, "backward": backward, "optimizer": one.update()}
