"""Runs a model on the ranks given and compares it with the single device: byte by byte in invariant mode, else by tolerances.

torchrun --nproc-per-node 4 -m launch.verify --model llama-2-7b --layers 1 --virtual-shards 4
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from launch.environment import Environment, Options, UserError, launch, make_deterministic, parse
from parallel.gradients import clip_grad_norm_
from parallel.group import TPGroup, single_device
from parallel.regions import merge_tokens
from parallel.state import gather_state
from tpblock import Decoder, ModelConfig, load_pretrained, preset
from tpblock.formats.checkpoint import read_config

TOLERANCES = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 5e-2}
"""Largest relative differences (norm of the difference over norm) that orders of summation explain, without invariant mode."""

SMALL = ModelConfig(vocab_size=1009, dim=144, layers=2, heads=9, kv_heads=3, d_ff=403)


@dataclass(frozen=True)
class VerifyConfig(Options):
    """Run a model on the ranks given, compare it with the single device, and exit with 1 if they differ."""

    model: str = "small"
    """A preset (llama-2-7b, gpt-2, ...), the folder of a Hugging Face model, or "small": 9 query and 3 KV heads, odd widths."""
    layers: int | None = None
    """Blocks to keep of a preset, so that a large model fits."""
    virtual_shards: int | None = None
    """Invariant mode with that many virtual shards: every byte has to be the same."""
    sequence_parallel: bool = False
    """Cut the activations between the sharded regions along their tokens as well."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Number format of parameters and activations."""
    fp32_sums: bool = False
    """Add partial sums over the ranks in float32 (for bfloat16)."""
    dropout: float = 0.0
    """Probability of dropout after each sublayer and on the attention weights."""
    activation_checkpointing: bool = False
    """Compute each block again in backward."""
    batch: int = 2
    """Sequences."""
    seq_len: int = 64
    """Tokens a sequence."""
    steps: int = 2
    """AdamW steps."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    seed: int = 0
    """Of weights, tokens and dropout."""

    def model_config(self) -> ModelConfig:
        if Path(self.model).is_dir():
            if self.layers is not None:
                raise ValueError("--layers goes with a preset: a folder is verified as it is")
            config = read_config(self.model)[0]
        else:
            config = SMALL if self.model == "small" else preset(self.model)
        changes: dict[str, Any] = {"dropout": self.dropout, "attention_dropout": self.dropout}
        if self.layers is not None:
            changes["layers"] = self.layers
        return dataclasses.replace(config, **changes)


class Counting(TorchDispatchMode):
    """Counts the collectives that are issued while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional" and "wait" not in func.__name__:
            self.counts[func.__name__.split(".")[0].rstrip("_")] += 1
        return func(*args, **(kwargs or {}))


@dataclass
class Outcome:
    """What a run computed, whole: for each kind of quantity its tensors by name."""

    tensors: dict[str, dict[str, Tensor]]
    collectives: Counter[str]


def build(config: VerifyConfig, group: TPGroup, device: torch.device) -> Decoder:
    """The model on one group."""
    options: dict[str, Any] = {
        "group": group,
        "virtual_shards": config.virtual_shards,
        "sequence_parallel": config.sequence_parallel,
        "reduce_dtype": torch.float32 if config.fp32_sums else None,
        "activation_checkpointing": config.activation_checkpointing,
        "dtype": getattr(torch, config.dtype),
        "device": device,
        "seed": config.seed,
    }
    shape = config.model_config()
    return load_pretrained(config.model, config=shape, **options) if Path(config.model).is_dir() else Decoder(shape, **options)


def compute(config: VerifyConfig, model: Decoder, device: torch.device) -> Outcome:
    """Forward, backward, clipping and AdamW."""
    group, vocab_size = model.group, model.config.vocab_size
    # AdamW makes a full step of a gradient that is nothing but rounding (that of the biases of keys, say). Where rounding is
    # allowed, a large eps makes steps proportional to the gradients.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3 if config.virtual_shards is None else 1e-8)
    kinds = ("hidden states", "loss", "gradients", "gradient norm", "clipped gradients", "weights")
    tensors: dict[str, dict[str, Tensor]] = {kind: {} for kind in kinds}
    hidden: list[Tensor] = []
    model.stack.register_forward_hook(lambda _module, _inputs, output: hidden.append(output.detach()))
    generator = torch.Generator().manual_seed(config.seed)
    counting = Counting()
    for step in range(config.steps):
        ids = torch.randint(vocab_size, (config.batch, config.seq_len + 1), generator=generator).to(device)
        with counting:
            loss = model(ids[:, :-1], labels=ids[:, 1:], step=step)
            loss.backward()
        name = f"step {step + 1}"
        states = hidden[-1].flatten(0, -2)
        if config.sequence_parallel:
            states = merge_tokens(states, config.batch * config.seq_len, group)
        tensors["hidden states"][name] = states
        tensors["loss"][name] = loss.detach()
        for key, gradient in gather_state(model, group, gradients=True).items():
            tensors["gradients"][f"{key}, {name}"] = gradient
        tensors["gradient norm"][name] = clip_grad_norm_(model, config.clip, group)
        for key, gradient in gather_state(model, group, gradients=True).items():
            tensors["clipped gradients"][f"{key}, {name}"] = gradient
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    tensors["weights"] = gather_state(model, group)
    return Outcome(tensors, counting.counts)


def compare(ours: Outcome, single: Outcome, allowed: float | None) -> tuple[Table, bool]:
    """A table with the worst tensor of each kind, and whether all are equal. ``allowed`` None: the bytes have to be the same."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for heading in ("largest difference", "absolute", "relative", "allowed", "at", ""):
        right = heading in ("absolute", "relative", "allowed")
        table.add_column(heading, justify="right" if right else "left", no_wrap=heading != "at", overflow="fold")
    all_equal = True
    for kind, tensors in single.tensors.items():
        differing, worst = 0, ("", 0.0, -1.0)
        for name, expected in tensors.items():
            got = ours.tensors[kind][name]
            change = (got.double() - expected.double()).flatten()
            relative = (change.norm() / expected.double().norm().clamp_min(1e-300)).item()
            differing += not (same_bytes(got, expected) if allowed is None else relative <= allowed)
            if not relative <= worst[2]:
                worst = (name, change.abs().max().item(), relative)
        all_equal &= not differing
        verdict = f"{differing} of {len(tensors)} DIFFER" if differing else ("same bytes" if allowed is None else "equal")
        bound = "0" if allowed is None else f"{allowed:.0e}"
        table.add_row(kind, f"{worst[1]:.1e}", f"{worst[2]:.1e}", bound, worst[0], verdict)
    return table, all_equal


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(*(t.detach().cpu().contiguous().view(-1).view(torch.uint8) for t in (a, b)))


def verify(config: VerifyConfig, env: Environment) -> None:
    """The program: what every rank runs."""
    with env.together("settings"):
        if config.steps < 1 or config.batch < 1 or config.seq_len < 1:
            raise ValueError(
                f"--steps, --batch and --seq-len must be at least 1, got {config.steps}, {config.batch}, {config.seq_len}"
            )
        if env.world > env.group.size:
            raise ValueError(
                f"{env.world} ranks with --tp {env.group.size}: verify runs one replica, start {env.group.size} ranks"
            )
        shape = config.model_config()
    console = Console(quiet=not env.is_main, highlight=False)
    invariant = config.virtual_shards is not None
    mode = f"invariant mode, {config.virtual_shards} virtual shards" if invariant else "default mode"
    console.print(f"{config.model}: {shape.parameters():,} parameters, {config.dtype}, {env.group.size} ranks, {mode}")
    if invariant:
        make_deterministic(env.device)
    with env.together("model"):
        model = build(config, env.group, env.device)
    with env.together("results"):
        ours = compute(config, model, env.device)
    env.close()  # the single device is the business of rank 0 alone, nobody waits for it
    if not env.is_main:
        return
    single = compute(config, build(config, single_device(), env.device), env.device)
    table, equal = compare(ours, single, None if invariant else TOLERANCES[config.dtype])
    console.print(table)
    counts = ", ".join(f"{count} {name}" for name, count in sorted(ours.collectives.items())) or "none"
    console.print(f"collectives of {config.steps} forward and backward passes: {counts}", soft_wrap=True)
    if not equal:
        raise UserError(f"{env.group.size} ranks differ from the single device", code=1)
    console.print(f"{env.group.size} ranks equal the single device")


def main(arguments: Sequence[str] | None = None, program: str = "-m launch.verify") -> None:
    config = parse(VerifyConfig, arguments, program)
    launch(partial(verify, config), config, program)


if __name__ == "__main__":
    main()
