"""What benchmarks.calibrate measures: the contenders of one number of ranks, and what their seconds say about the machine.

Collectives are timed one after the other by ranks that do nothing else. On CPUs of one machine they go through memory that they
share, but above parallel.shared_memory.SLOT_BYTES through gloo, which no line fitted to smaller ones knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.cost_model import Collective, Launch, Speeds, dtype_name, fit
from benchmarks.timing import Phases, Spread
from benchmarks.work import Attention, Product
from benchmarks.workload import PHASES, Training, Workload, silently
from parallel import collectives
from parallel.cross_entropy import TokenLoss
from parallel.group import TPGroup, single_device
from parallel.layout import Part
from parallel.matmul import matmul
from tpblock import Activation, ModelConfig, Norm
from tpblock.config import Parallelism
from tpblock.feedforward import FeedForward
from tpblock.norm import make_norm
from tpblock.rope import apply_rotary, rotary_tables

Contenders = dict[str, Callable[[], object] | Phases]
MESSAGES = [2**n for n in range(10, 25, 2)]
"""Bytes of the tensors that are sent, 1 KB to 16 MB: all of them below SLOT_BYTES."""
BESIDE = 2**18
"""Numbers in float32 that are summed while a product is computed."""
HEAD = 64
TINY = ModelConfig(vocab_size=64, dim=64, layers=1, heads=8, d_ff=64)
"""A model whose steps are all launches. As many heads as there may be ranks."""
LAYERS = (1, 9)


class Scale:
    """Sizes that a device is measured with, and how much work makes one value: long against the clock and a barrier."""

    def __init__(self, device: torch.device, small: bool) -> None:
        gpu = device.type == "cuda"
        self.products = [Product(n, n, n) for n in ([512, 1024, 2048, 4096, 8192] if gpu else [64, 128, 256, 512, 1024])]
        self.products += [] if gpu else [Product(256, 4096, 4096)]  # weights that fit into no cache, gradients in fresh pages
        self.sequences = [512, 2048, 8192] if gpu else [128, 256, 512, 1024]
        self.sizes = [2**n for n in ((20, 24, 28) if gpu else (17, 20, 22, 24))]
        self.flops, self.bytes, self.calls = (10**12, 10**10, 100) if gpu else (2 * 10**8, 2 * 10**7, 8)
        if small:
            self.products, self.sequences, self.sizes = self.products[:2], self.sequences[:1], self.sizes[:1]

    def calls_of(self, flops: int = 0, size: int = 0) -> int:
        return max(1, min(200, int(1 / (flops / self.flops + size / self.bytes))))


def repeated(run: Callable[[], object], times: int) -> Callable[[], object]:
    def several() -> None:
        for _ in range(times):
            run()

    return several


def _first(feedforward: FeedForward, x: Tensor) -> Tensor:
    return feedforward.mix([x])[0]


class Calibration:
    """The contenders of one number of ranks and dtype, and what their seconds say."""

    def __init__(self, group: TPGroup, device: torch.device, dtype: torch.dtype, scale: Scale) -> None:
        self.group, self.device, self.dtype, self.scale = group, device, dtype, scale
        self.contenders: Contenders = {}
        self.calls: dict[str, int] = {}
        self.work: dict[str, tuple[str, float, float]] = {}  # of each: the table, the place in it, operations or bytes
        for product in scale.products:
            self._products(product)
        for seq in scale.sequences:
            self._attention(seq)
        for size in scale.sizes:
            self._passes(size // dtype.itemsize)
        for layers in LAYERS:
            self._launches(layers)
        if group.size > 1:
            for size in MESSAGES:
                self._collectives(size // dtype.itemsize)
            self._overlap()

    def _add(self, name: str, run: Callable[[], object], times: int, where: tuple[str, float, float]) -> None:
        self.contenders[name], self.calls[name], self.work[name] = repeated(run, times), times, where

    def _random(self, *shape: int, grad: bool = False) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype, requires_grad=grad)

    def _products(self, product: Product) -> None:
        """y = x W^T, dx = dy W and dW = dy^T x, one after the other."""
        m, n, k = product
        x, w, dy = self._random(m, k), self._random(n, k), self._random(m, n)
        flops = 3 * product.flops

        def run() -> None:
            matmul(x, w.t())
            matmul(dy, w)
            matmul(dy.t(), x)

        self._add(f"products {m} {n} {k}", run, self.scale.calls_of(flops=flops), ("matrix", product.side, flops))

    def _attention(self, seq: int) -> None:
        heads = max(1, 1024 // seq)
        q, k, v = (self._random(1, heads, seq, HEAD, grad=True) for _ in range(3))
        dy = self._random(1, heads, seq, HEAD)
        forward, backward = (Attention(seq, seq, heads * HEAD, back).flops for back in (False, True))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)

        def run() -> None:
            with torch.no_grad():
                F.scaled_dot_product_attention(q, k, v, is_causal=True)

        def back() -> None:
            torch.autograd.grad(mixed, (q, k, v), dy, retain_graph=True)

        name, places = dtype_name(self.dtype), [(run, "forward", forward), (back, "backward", backward)]
        for call, way, flops in places:
            times = self.scale.calls_of(flops=4 * flops)
            self._add(f"attention {seq} {way}", call, times, (f"attention {name} {way}", seq, flops))

    def _passes(self, numbers: int) -> None:
        """Both ways of each function, and the bytes that work.py counts for it. ``numbers``: in its input, or the wider one."""
        width = 512
        config = ModelConfig(vocab_size=8, dim=width, layers=1, heads=8)
        rows, size = max(1, numbers // width), numbers * self.dtype.itemsize
        for norm in Norm:
            module = make_norm(replace(config, norm=norm), Parallelism(), self.device, self.dtype)
            x = self._random(rows, width, grad=True)
            self._both_ways(norm.value, module, [x], 2 * size, 3 * size, module.parameters())
        tables = rotary_tables(torch.arange(rows, device=self.device), HEAD, 10_000.0)
        x = self._random(1, rows, width // HEAD, HEAD, grad=True)
        self._both_ways("rotary", lambda x: apply_rotary(x, tables), [x], 2 * size, 2 * size)
        for activation in Activation:
            feedforward = FeedForward(replace(config, activation=activation), device="meta")
            wide = 2 if activation.gated else 1
            x = self._random(rows, width * wide, grad=True)
            forward, backward = (3, 5) if activation.gated else (2, 3)
            self._both_ways(activation.value, partial(_first, feedforward), [x], forward * size, backward * size)
        a, b = self._random(rows, width), self._random(rows, width)
        self._memory("add", lambda: a + b, 3 * size)
        columns = 4096
        z = self._random(max(1, numbers // columns), columns)
        y = torch.zeros(len(z), dtype=torch.long, device=self.device)
        loss = TokenLoss(Part.even("vocab", columns, 1), 0, -100, 0.0, 0.0)
        out = torch.empty_like(z)

        def token_loss() -> None:
            p, statistics = loss.local(z, y)
            _, factors = loss.merge(statistics[None], y)
            loss.logit_gradient(p, factors[0], y, None, out)

        self._memory("loss", token_loss, z.numel() * (2 * z.itemsize + 2 * max(z.itemsize, 4)))
        weights = replace(TINY, vocab_size=max(8, numbers // (2 * TINY.dim)))
        training = Training(Workload(weights, 1, 2, self.dtype), single_device(), self.device)
        training.forward()
        training.backward()
        training.update()
        count = sum(p.numel() for p in training.model.parameters())
        self._memory("update", training.update, 10 * count * self.dtype.itemsize)

    def _both_ways(
        self,
        kind: str,
        function: Callable[[Tensor], Tensor],
        inputs: list[Tensor],
        forward: int,
        backward: int,
        parameters: Iterable[Tensor] = (),
    ) -> None:
        y = function(*inputs)
        dy, wanted = torch.randn_like(y), [*inputs, *parameters]

        def run() -> None:
            with torch.no_grad():
                function(*inputs)

        self._memory(kind, run, forward)
        self._memory(f"{kind} backward", lambda: torch.autograd.grad(y, wanted, dy, retain_graph=True), backward)

    def _memory(self, kind: str, run: Callable[[], object], size: int) -> None:
        self._add(
            f"{kind} {size}", run, self.scale.calls_of(size=4 * size), (f"memory {dtype_name(self.dtype)} {kind}", size, size)
        )

    def _launches(self, layers: int) -> None:
        training = Training(Workload(replace(TINY, layers=layers), 1, 4, self.dtype), self.group, self.device)
        training.step()
        self.contenders[f"launches {layers}"] = {name: silently(run) for name, run in training.phases.items()}

    def _collectives(self, elements: int) -> None:
        group, calls = self.group, self.scale.calls
        x, part = (torch.zeros(n, device=self.device, dtype=self.dtype) for n in (elements, elements // group.size))
        counts = [elements // group.size] * group.size
        size = elements * x.itemsize
        runs: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: collectives.start_all_reduce(x, group)(),
            "all_gather": lambda: collectives.all_gather(part, group, counts),
            "reduce_scatter": lambda: collectives.start_reduce_scatter(x, group, counts)(),
        }
        times = max(1, min(calls, calls * 2**18 // size))
        for kind, run in runs.items():
            self._add(f"{kind} {size}", run, times, (f"sent {kind}", size, 1.0))

    def _overlap(self) -> None:
        """A product, a sum over the ranks, and both at once."""
        group, (m, n, k) = self.group, self.scale.products[min(3, len(self.scale.products) - 1)]
        x, a, b = torch.zeros(BESIDE, device=self.device), self._random(m, k), self._random(k, n)

        def both() -> None:
            finish = collectives.start_all_reduce(x, group)
            matmul(a, b)
            finish()

        runs = {"product": lambda: matmul(a, b), "sum": lambda: collectives.start_all_reduce(x, group)(), "both": both}
        for name, run in runs.items():
            self.contenders[f"beside, {name}"] = repeated(run, self.scale.calls // 2)

    def _seconds(self, samples: Mapping[str, Sequence[float]], name: str) -> float:
        return Spread.of(samples[name]).median / self.calls.get(name, 1)

    def speeds(self, samples: Mapping[str, Sequence[float]]) -> Speeds:
        tables: dict[str, list[tuple[float, float]]] = {}
        for name, (where, place, work) in self.work.items():
            seconds = self._seconds(samples, name)
            if where.endswith(" update"):  # a whole optimizer step, whose launches are counted apart
                launch = self._launch(samples, "optimizer")
                seconds = max(seconds - launch.layer - launch.rest, 0.1 * seconds)
            tables.setdefault(where, []).append((place, work / seconds))
        named = {
            group: {
                key.removeprefix(f"{group} "): tuple(points) for key, points in tables.items() if key.startswith(f"{group} ")
            }
            for group in ("attention", "memory")
        }
        return Speeds(
            matrix={dtype_name(self.dtype): tuple(tables["matrix"])},
            launch={phase: self._launch(samples, phase) for phase in PHASES},
            overlap=self._hidden(samples) if self.group.size > 1 else 0.0,
            **named,
        )

    def _hidden(self, samples: Mapping[str, Sequence[float]]) -> float:
        product, sent, both = (Spread.of(samples[f"beside, {name}"]).median for name in ("product", "sum", "both"))
        return min(1.0, max(0.0, (product + sent - both) / min(product, sent)))

    def _launch(self, samples: Mapping[str, Sequence[float]], phase: str) -> Launch:
        few, many = (self._seconds(samples, f"launches {layers}, {phase}") for layers in LAYERS)
        layer = max(0.0, (many - few) / (LAYERS[1] - LAYERS[0]))
        return Launch(layer=layer, rest=max(0.0, few - LAYERS[0] * layer))

    def fitted(self, samples: Mapping[str, Sequence[float]]) -> dict[str, Collective]:
        sent: dict[str, dict[int, float]] = {}
        for name, (where, size, _) in self.work.items():
            if where.startswith("sent "):
                sent.setdefault(where.removeprefix("sent "), {})[int(size)] = self._seconds(samples, name)
        return {kind: fit(points) for kind, points in sent.items()}
