"""A model and a batch from the command line, and the training step that the programs measure."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.meter import held_bytes, meter
from benchmarks.traffic import silent_collectives
from parallel.gradients import clip_grad_norm_
from parallel.group import TPGroup
from tpblock import PRESETS, Activation, Decoder, ModelConfig, Norm, Placement, preset

IGNORED = -100
"""The label of a token that does not count in the loss."""
PHASES = ("forward", "backward", "optimizer")
"""Those of a training step, in their order."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
SIZES = {"vocab_size": 4096, "dim": 512, "layers": 4, "heads": 8}
"""Those of the model without --preset, where the command line gives no others."""
OPTIONAL_SIZES = ("kv_heads", "head_dim", "d_ff")
CHOICES = {"activation": Activation, "norm": Norm, "placement": Placement}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that say what is trained."""
    model = parser.add_argument_group(
        "model", "a published one, with what is given beside it in place of its own, or one of sizes"
    )
    model.add_argument("--preset", choices=PRESETS, help="a published model")
    for name in (*SIZES, *OPTIONAL_SIZES):
        default = f" (without --preset: {SIZES[name]})" if name in SIZES else " (without --preset: follows from the others)"
        model.add_argument(flag(name), type=int, metavar="N", help=name.replace("_", " ") + default)
    for name, kind in CHOICES.items():
        model.add_argument(flag(name), choices=[member.value for member in kind], help=f"of the blocks: {name}")
    batch = parser.add_argument_group("batch and training")
    batch.add_argument("--batch", type=int, default=4, metavar="N", help="sequences a step (default: 4)")
    batch.add_argument("--seq-len", type=int, default=512, metavar="N", help="tokens a sequence (default: 512)")
    batch.add_argument(
        "--padding", type=float, default=0.0, metavar="P", help="share of each sequence that is padding: not valid"
    )
    batch.add_argument("--dtype", choices=DTYPES, default="float32", help="of parameters and activations (default: float32)")


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def given_changes(options: argparse.Namespace) -> dict[str, object]:
    """The fields of the config that the command line gives."""
    names = (*SIZES, *OPTIONAL_SIZES, *CHOICES)
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}


def config_from(options: argparse.Namespace) -> ModelConfig:
    """The model that the command line asks for, long enough for its sequences.

    Raises:
        ValueError: if the sizes do not fit each other.
    """
    given = given_changes(options).items()
    changes: dict[str, Any] = {name: CHOICES[name](value) if name in CHOICES else value for name, value in given}
    if options.preset is None:
        config = ModelConfig(**{**SIZES, **changes})
        return replace(config, max_seq_len=max(config.max_seq_len, options.seq_len))
    config = replace(preset(options.preset), **changes)
    if options.seq_len > config.max_seq_len:
        raise ValueError(f"--seq-len {options.seq_len} is longer than the {config.max_seq_len} tokens of {options.preset}")
    return config


def model_name(options: argparse.Namespace) -> str:
    """The preset and what differs from it, or the sizes."""
    changes = given_changes(options)
    if options.preset is None:
        changes = {**SIZES, **changes}
    told = [f"{name.replace('_', ' ')} {value}" for name, value in changes.items()]
    return ", ".join([options.preset or "decoder", *told])


@dataclass(frozen=True)
class Workload:
    """What is trained, and how, apart from the ranks. ``padding``: the share of every sequence, at its end, without labels."""

    config: ModelConfig
    batch: int
    seq: int
    dtype: torch.dtype = torch.float32
    sequence_parallel: bool = False
    activation_checkpointing: bool = False
    padding: float = 0.0

    def __post_init__(self) -> None:
        if self.batch < 1 or self.seq < 2:
            raise ValueError(f"there must be a sequence of 2 tokens at least, got {self.batch} of {self.seq}")
        if not 0 <= self.padding < 1:
            raise ValueError(f"padding is a share of at least 0 and below 1, got {self.padding}")

    @property
    def tokens(self) -> int:
        return self.batch * self.seq

    def data(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Token ids and labels [batch, seq], the same on every rank: each token's label is the next one; the last of a sequence
        has none, and neither has padding."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(self.config.vocab_size, (self.batch, self.seq), generator=generator)
        labels = ids.roll(-1, dims=1)
        labels[:, min(self.seq - 1, round(self.seq * (1 - self.padding))) :] = IGNORED
        return ids.to(device), labels.to(device)


class Training:
    """A decoder with its optimizer on one rank, and a step of it in three phases.

    The optimizer is AdamW at a learning rate of zero: it does all of its work, and every repetition starts from the same
    weights, whatever was done with the collectives. Its step begins with the gradient norm and clipping, as in launch.train.
    """

    def __init__(self, workload: Workload, group: TPGroup, device: torch.device) -> None:
        self.workload, self.group, self.device = workload, group, device
        self.model = Decoder(
            workload.config,
            group=group,
            sequence_parallel=workload.sequence_parallel,
            activation_checkpointing=workload.activation_checkpointing,
            device=device,
            dtype=workload.dtype,
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, weight_decay=0.0, fused=True)
        self.ids, self.labels = workload.data(device)
        self.loss: Tensor | None = None

    @property
    def valid(self) -> int:
        """How many tokens of the batch have a label that counts."""
        return int((self.labels != IGNORED).sum())

    @property
    def phases(self) -> dict[str, Callable[[], None]]:
        """The phases of a step, to be called in this order."""
        return dict(zip(PHASES, (self.forward, self.backward, self.update), strict=True))

    def forward(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.loss = self.model(self.ids, self.labels)

    def backward(self) -> None:
        assert self.loss is not None
        self.loss.backward()
        self.loss = None

    def update(self) -> None:
        clip_grad_norm_(self.model, 1.0, self.group)
        self.optimizer.step()

    def peak_bytes(self) -> int:
        """Bytes of all tensors of this rank at the worst moment of a step that is not the first."""
        self.optimizer.zero_grad(set_to_none=True)
        held = held_bytes([*self.model.parameters(), self.state, self.ids, self.labels])
        with meter(self.device) as used:
            self.step()
        return held + used.peak

    @property
    def state(self) -> list[object]:
        """What the optimizer keeps, once it has taken a step."""
        return [self.optimizer.state[parameter] for parameter in self.model.parameters()]

    def step(self) -> None:
        self.forward()
        self.backward()
        self.update()


def silently(run: Callable[[], None]) -> Callable[[], None]:
    """The same with collectives that do nothing."""

    def silent() -> None:
        with silent_collectives():
            run()

    return silent
