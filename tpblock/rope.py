"""Rotary position embeddings (Su et al., RoFormer, 2021), in the half-split form of GPT-NeoX, Llama and Hugging Face.

Feature i of the first half of the rotated features is paired with feature i of the second half. Tables are computed for each
forward pass rather than kept in buffers, so no conversion of the model can round them and no meta-device build can lose them.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_tables(
    positions: Tensor, rotary_dim: int, theta: float, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """cos and sin of ``position * theta^(-2i/rotary_dim)``, each [len(positions), rotary_dim / 2], in ``dtype``."""
    exponents = torch.arange(0, rotary_dim, 2, device=positions.device, dtype=dtype) / rotary_dim
    angles = positions.to(dtype)[:, None] * theta**-exponents
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates the first 2 * tables' width features of every head of x [batch, seq, heads, head_dim] in the tables' precision."""
    cos, sin = (table[:, None, :] for table in tables)
    half = cos.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
    return torch.cat([rotated, rest], dim=-1) if rest.shape[-1] else rotated
