"""The pre-norm Llama block in plain torch.nn, as one would write it for a single device: what the benchmarks compare with."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class PlainBlock(nn.Module):
    """RMSNorm, fused q, k, v, rotary causal attention through SDPA; RMSNorm, SwiGLU with gate and up fused; no biases.

    Its parameters have the names of ``tpblock.Block``.
    """

    def __init__(self, dim: int, heads: int, d_ff: int, eps: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.RMSNorm(dim, eps), nn.RMSNorm(dim, eps)
        self.attention, self.feedforward = nn.Module(), nn.Module()
        self.attention.qkv, self.attention.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.feedforward.up, self.feedforward.down = nn.Linear(dim, 2 * d_ff, bias=False), nn.Linear(d_ff, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [batch, seq, dim]; cos and sin [seq, 1, head_dim / 2]."""
        q, k, v = self.attention.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        x = x + self.attention.out(mixed.transpose(1, 2).flatten(2))
        gate, up = self.feedforward.up(self.norm_2(x)).chunk(2, dim=-1)
        return x + self.feedforward.down(F.silu(gate) * up)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embeddings of x [batch, seq, heads, head_dim] in the half-split form."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
