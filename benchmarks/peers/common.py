"""What every contender offers, and the loop in which it waits for commands.

The contenders run in other programs' environments too, so this file and theirs import nothing but torch, numpy, what they time, and
files of this repository that need no more.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import re
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.timing import CLOCKS, Ranks, measure
from parallel.traffic import collective, listeners

HEAD_DIM, EPS, IGNORED = 64, 1e-5, -100
PASSES = {"forward": "forward", "backward": "forward + backward", "step": "forward + backward + step"}
"""What is timed: the name in commands, and what it is called where it is shown. forward alone is without gradients."""
MODULES = {
    "tpblock": "tpblock_",
    "tpblock-parallel": "tpblock_",
    "tpblock-gloo": "tpblock_",
    "tpblock-mkl": "tpblock_",
    "dtensor": "dtensor",
    "transformers": "transformers_",
    "autotp": "autotp",
    "megatron": "megatron",
    "megatron-sdpa": "megatron",
    "megatron-fused": "megatron",
}
"""The file of each contender; its function ``build(case, name)`` makes it."""


class UnsupportedError(Exception):
    """The contender cannot do this case, for the reason given. Raised on every rank, before any collective."""


@dataclass(frozen=True)
class Case:
    """A Llama block, or a model of ``layers`` blocks with untied embedding and head, and its batch."""

    what: str
    dim: int
    batch: int
    seq: int
    layers: int = 1
    vocab: int = 4096
    sequence_parallel: bool = False
    compile: bool = False

    @property
    def heads(self) -> int:
        return self.dim // HEAD_DIM

    @property
    def d_ff(self) -> int:
        return -(-(8 * self.dim // 3) // 64) * 64


def weights(case: Case) -> dict[str, Tensor]:
    """The global weights that every contender starts from, under the names of ``tpblock.Decoder``."""
    generator = torch.Generator().manual_seed(1)
    dim, d_ff = case.dim, case.d_ff
    block = {"norm_1": (dim,), "attention.qkv": (3 * dim, dim), "attention.out": (dim, dim), "norm_2": (dim,)}
    block |= {"feedforward.up": (2 * d_ff, dim), "feedforward.down": (dim, d_ff)}
    shapes = {f"stack.blocks.{i}.{name}": shape for i in range(case.layers) for name, shape in block.items()}
    if case.what == "model":
        shapes |= {"embedding": (case.vocab, dim), "stack.norm": (dim,), "head": (case.vocab, dim)}
    drawn = {f"{name}.weight": torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {name: 1 + 0.1 * value if value.ndim == 1 else 0.02 * value for name, value in drawn.items()}


SEPARATE = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.out": ("self_attn.o_proj",),
    "feedforward.up": ("mlp.gate_proj", "mlp.up_proj"),
    "feedforward.down": ("mlp.down_proj",),
    "norm_1": ("input_layernorm",),
    "norm_2": ("post_attention_layernorm",),
    "stack.norm": ("model.norm",),
    "embedding": ("model.embed_tokens",),
    "head": ("lm_head",),
}
"""Our names of a block's and a model's weights, and those of transformers' Llama, which fuses none."""


def separate(ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights under the names of transformers' LlamaForCausalLM."""
    state = {}
    for name, value in ours.items():
        layer = re.match(r"stack\.blocks\.(\d+)\.", name)
        theirs = SEPARATE[kind(name)]
        for part, chunk in zip(theirs, value.chunk(len(theirs)), strict=True):
            state[f"{f'model.layers.{layer[1]}.' if layer else ''}{part}.weight"] = chunk.contiguous()
    return state


def kind(name: str) -> str:
    """What a parameter of ours is, whichever block it is in: ``attention.qkv`` and so on."""
    return re.sub(r"(^stack\.blocks\.\d+\.)|(\.weight$)", "", name)


def separate_kind(name: str) -> str:
    """The same of a parameter under transformers' name."""
    return next(ours for ours, theirs in SEPARATE.items() if any(f".{part}.weight" in f".{name}" for part in theirs))


class Contender(ABC):
    """One implementation of a case, on this rank. Its x, dy, ids and labels start out the same on every rank.

    A subclass sets ``module``, whose parameters are trained, and brings ``x`` and ``dy`` into the form that it takes them in.
    """

    module: nn.Module

    def __init__(self, case: Case) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(2)
        self.x, self.dy = (torch.randn(self.shape, generator=generator) for _ in range(2))
        self.ids = torch.randint(case.vocab, (case.batch, case.seq), generator=generator)
        self.labels = self.ids.roll(-1, dims=1)
        self.labels[:, -1] = IGNORED

    @abstractmethod
    def forward(self) -> Tensor:
        """A block's y, or a model's loss."""

    def backward(self, out: Tensor) -> None:
        out.backward(self.dy if self.case.what == "block" else None)

    @abstractmethod
    def gradients(self) -> Iterator[tuple[str, Tensor | None, bool]]:
        """The gradient of each parameter with its ``kind``, and whether every rank has the same one."""

    def whole(self, activation: Tensor) -> Tensor:
        """A y or dx of this rank as [batch, seq, dim]."""
        return activation

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the whole x, y, dx and dy."""
        return self.case.batch, self.case.seq, self.case.dim

    def compiled(self, module: nn.Module) -> Any:
        return torch.compile(module, dynamic=False) if self.case.compile else module

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        """AdamW at a learning rate of zero: it does all of its work and changes nothing. Its groups are those that must not be
        mixed: DTensors and other tensors."""
        parameters = list(self.module.parameters())
        groups = [[p for p in parameters if isinstance(p, DTensor) is distributed] for distributed in (True, False)]
        return torch.optim.AdamW([{"params": group} for group in groups if group], lr=0.0, weight_decay=0.0, fused=True)

    def run(self, what: str) -> Tensor:
        """One of PASSES."""
        if what == "forward":
            with torch.no_grad():
                return self.forward()
        self.module.zero_grad(set_to_none=True)
        self.x.grad = None
        out = self.forward()
        self.backward(out)
        if what == "step":
            self.optimizer.step()
        return out

    def results(self) -> dict[str, tuple[float, float]]:
        """Numbers that agree where the results do, each with the scale at which they are compared: the loss, or y and dx along a
        random direction, and the norm of the gradients of each kind of weight."""
        out = self.run("backward")
        numbers = {}
        if self.case.what == "block":
            probe = torch.randn(self.shape, generator=torch.Generator().manual_seed(3)).double()
            assert self.x.grad is not None
            for name, t in (("output", out), ("input gradient", self.x.grad)):
                value = self.whole(t.detach()).double()
                numbers[name] = float((value * probe).sum() / probe.norm()), float(value.square().mean().sqrt())
        else:
            numbers["loss"] = float(full(out.detach())), float(full(out.detach()))
        squares: dict[str, Tensor] = {}
        for name, gradient, replicated in self.gradients():
            if gradient is None:
                raise ValueError(f"no gradient of {name}")
            square = full(gradient).double().square().sum()
            if not (replicated or isinstance(gradient, DTensor)):
                dist.all_reduce(square)
            squares[name] = squares.get(name, torch.zeros((), dtype=torch.float64)) + square
        for name, square in sorted(squares.items()):
            numbers[f"gradient of {name}"] = (float(square.sqrt()),) * 2
        return numbers


def full(t: Tensor) -> Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def gathered(t: Tensor, dim: int) -> Tensor:
    """The equal pieces of all ranks side by side."""
    pieces = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, t.contiguous())
    return torch.cat(pieces, dim)


class Collectives(TorchDispatchMode):
    """Counts the collectives that run under it, those of DTensor included."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __enter__(self) -> Collectives:
        listeners.append(self._count)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        listeners.remove(self._count)
        super().__exit__(*error)

    def _count(self, _: object) -> None:
        self.number += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # it comes again as operations on local tensors
        kind = collective(func) or ""
        self.number += any(word in kind for word in ("reduce", "gather", "all_to_all", "alltoall"))
        return func(*args, **(kwargs or {}))


def serve(name: str, clock: str) -> None:
    """Answers each line of standard input with one line: ``value``, or why there is none (``unsupported``, ``error``).

    Between commands the rank waits for its next line, which takes no processor time. Whatever the libraries print goes to
    standard error.
    """
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    dist.init_process_group("gloo")
    contenders: list[Contender] = []

    def answer(do: str, **request: Any) -> Any:
        if do == "build":
            contenders.clear()
            torch._dynamo.reset()
            module = importlib.import_module(f"benchmarks.peers.{MODULES[name]}")
            contenders.append(module.build(Case(**request["case"]), name))
            packages = [f"{package} {importlib.metadata.version(package)}" for package in module.PACKAGES]
            return [f"torch {torch.__version__}", *packages]
        contender = contenders[0]
        if do == "check":
            numbers = contender.results()
            if contender.case.compile:
                return {"numbers": numbers, "collectives": None}
            with Collectives() as collectives:
                contender.run("backward")
            return {"numbers": numbers, "collectives": collectives.number}
        run, steps = request["run"], request["steps"]
        [[seconds]] = measure(
            {name: lambda: contender.run(run)},
            Ranks(torch.device("cpu")),
            rounds=1,
            warmup=0,
            steps=steps,
            clock=CLOCKS[clock],
        ).values()
        return seconds

    for line in iter(sys.stdin.readline, ""):
        try:
            reply = {"value": answer(**json.loads(line))}
        except UnsupportedError as error:
            reply = {"unsupported": str(error)}
        except ModuleNotFoundError as error:
            reply = {"unsupported": f"not installed ({error})"}
        except Exception:
            reply = {"error": "\n".join(traceback.format_exc().strip().splitlines()[-8:])}
        print(json.dumps(reply), file=replies, flush=True)
    os._exit(0)  # the many groups that Megatron-Core makes abort the process now and then when they are torn down
