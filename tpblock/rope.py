"""Rotary position embeddings (Su et al., RoFormer, 2021), in the half-split form of GPT-NeoX, Llama and Hugging Face.

Feature i of the first half of the rotated features is paired with feature i of the second half. Tables are computed for each
forward pass rather than kept in buffers, so no conversion of the model can round them and no meta-device build can lose them.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import torch
from torch import Tensor


class _Scaling:
    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            numbers = value if isinstance(value, tuple) else (value,)
            if not all(
                isinstance(n, int | float) and not isinstance(n, bool) and 0 < n <= sys.float_info.max for n in numbers
            ):
                raise ValueError(f"{name} of the rotary scaling must be positive numbers, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class LinearScaling(_Scaling):
    """All frequencies divided by ``factor``, as if positions lay that much closer (Chen et al., Position Interpolation, 2023)."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling(_Scaling):
    """Low frequencies divided by ``factor``, high ones kept, a linear passage between the two (Llama 3.1).

    High are those that turn more than ``high_freq_factor`` times within ``original_max_seq_len`` positions, low those that turn
    fewer than ``low_freq_factor`` times.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_seq_len: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.low_freq_factor < self.high_freq_factor:
            raise ValueError(f"low_freq_factor {self.low_freq_factor} must be below high_freq_factor {self.high_freq_factor}")


@dataclass(frozen=True, kw_only=True)
class LongRopeScaling(_Scaling):
    """Each frequency divided by a factor of its own (Ding et al., LongRoPE, 2024; Phi-3 of 128k).

    The short factors serve sequences of up to ``original_max_seq_len`` tokens, the long ones longer sequences; each has one
    number a frequency (rotary_dim / 2). ``attention_factor`` multiplies cos and sin, in both.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_seq_len: int
    attention_factor: float


RopeScaling = LinearScaling | Llama3Scaling | LongRopeScaling


def rotary_tables(
    positions: Tensor,
    rotary_dim: int,
    theta: float,
    dtype: torch.dtype = torch.float32,
    *,
    scaling: RopeScaling | None = None,
    total: int | None = None,
) -> tuple[Tensor, Tensor]:
    """cos and sin of ``position * frequency``, each [len(positions), rotary_dim / 2], in ``dtype``.

    Frequency i is ``theta^(-2i/rotary_dim)``, changed as ``scaling`` says. ``total`` is the length of the whole sequence of which
    these are positions (default: their number).
    """
    exponents = torch.arange(0, rotary_dim, 2, device=positions.device, dtype=dtype) / rotary_dim
    frequencies = scaled(theta**-exponents, scaling, total or len(positions))
    angles = positions.to(dtype)[:, None] * frequencies
    if isinstance(scaling, LongRopeScaling):
        return angles.cos() * scaling.attention_factor, angles.sin() * scaling.attention_factor
    return angles.cos(), angles.sin()


def scaled(frequencies: Tensor, scaling: RopeScaling | None, total: int) -> Tensor:
    """The rotary frequencies [rotary_dim / 2] for a sequence of ``total`` tokens."""
    match scaling:
        case None:
            return frequencies
        case LinearScaling():
            return frequencies / scaling.factor
        case Llama3Scaling():
            turns = frequencies * (scaling.original_max_seq_len / (2 * math.pi))
            kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
            kept = kept.clamp(0, 1)
            return kept * frequencies + (1 - kept) * frequencies / scaling.factor
        case LongRopeScaling():
            factors = scaling.long_factor if total > scaling.original_max_seq_len else scaling.short_factor
            return frequencies / torch.tensor(factors, dtype=frequencies.dtype, device=frequencies.device)


def apply_rotary(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates the first 2 * tables' width features of every head of x [batch, seq, heads, head_dim] in the tables' precision."""
    cos, sin = (table[:, None, :] for table in tables)
    half = cos.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
    return torch.cat([rotated, rest], dim=-1) if rest.shape[-1] else rotated
