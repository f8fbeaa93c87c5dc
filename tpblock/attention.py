"""Causal self-attention on the heads that a rank owns: multi-head, grouped-query and multi-query.

Legend: B batch, S sequence, H and K query and KV heads in all, H_r and K_r this rank's, D head_dim, d model dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parallel.layout import Part, attention_parts
from parallel.linear import ColumnParallelLinear, RowParallelLinear
from tpblock.config import ModelConfig, Parallelism
from tpblock.context import Context
from tpblock.dropout import Dropout
from tpblock.rope import apply_rotary


class HeadShard(NamedTuple):
    """The heads of one shard: its first query head, and how many query and KV heads it has."""

    first: int
    heads: int
    kv_heads: int


class Attention(nn.Module):
    """q, k, v projection (one fused column-parallel weight [(H + 2K) D, d]), attention, output projection (row-parallel [d, H D]).

    With ``project=False`` there is no projection of its own: the block computes it together with the feed-forward's, and
    calls :meth:`mix`.
    """

    def __init__(
        self,
        config: ModelConfig,
        parallel: Parallelism = Parallelism(),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        project: bool = True,
    ) -> None:
        super().__init__()
        self.config, self.parallel = config, parallel
        self.parts: tuple[Part, ...] = attention_parts(config.heads, config.kv_heads, config.head_dim, parallel.group.shards)
        q, k, _ = self.parts
        self.shards = [
            HeadShard(*(rows // config.head_dim for rows in (q.runs[s].start, q.runs[s].length, k.runs[s].length)))
            for s in parallel.group.local_shards
        ]
        self.qkv = None
        if project:
            self.qkv = ColumnParallelLinear(
                config.dim,
                sum(part.size for part in self.parts),
                config.bias,
                device,
                dtype,
                parts=self.parts,
                seed=None,
                **vars(parallel),
            )
        self.out = RowParallelLinear(
            config.heads * config.head_dim,
            config.dim,
            config.bias,
            device,
            dtype,
            parts=self.parts[:1],
            seed=None,
            **vars(parallel),
        )
        self.dropout = Dropout(config.attention_dropout)

    def mix(self, qkvs: Sequence[Tensor], context: Context) -> list[Tensor]:
        """[B*S or (B, S), (H_r + 2 K_r) D] -> [same, H_r D] of each shard: rotary, causal attention of its heads."""
        return [self._mix(qkv, shard, context) for qkv, shard in zip(qkvs, self.shards, strict=True)]

    def _mix(self, qkv: Tensor, shard: HeadShard, context: Context) -> Tensor:
        batch, seq, dim = context.batch, context.seq, self.config.head_dim
        heads, kv_heads = shard.heads, shard.kv_heads
        qkv_heads = qkv.reshape(batch, seq, heads + 2 * kv_heads, dim)
        if context.rotary is None:
            q, k, v = qkv_heads.split([heads, kv_heads, kv_heads], dim=2)
        else:  # q and k lie side by side: one rotation serves both
            qk, v = qkv_heads.split([heads + kv_heads, kv_heads], dim=2)
            q, k = apply_rotary(qk, context.rotary).split([heads, kv_heads], dim=2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if self.training and self.dropout.p > 0:
            mixed = self._with_dropout(q, k, v, shard, context)
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
        return mixed.transpose(1, 2).reshape(*qkv.shape[:-1], heads * dim)

    def _with_dropout(self, q: Tensor, k: Tensor, v: Tensor, shard: HeadShard, context: Context) -> Tensor:
        """Attention with its weights written out [B, H_r, S, S], since SDPA cannot be given the global mask."""
        seq, total = context.seq, self.config.heads
        k, v = (t.repeat_interleave(shard.heads // shard.kv_heads, dim=1) for t in (k, v))
        scores = q @ k.transpose(-2, -1) * self.config.head_dim**-0.5
        future = torch.ones(seq, seq, dtype=torch.bool, device=q.device).triu(1)
        statistics = torch.promote_types(q.dtype, torch.float32)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1, dtype=statistics).to(q.dtype)
        square = seq * seq
        weights = self.dropout(
            weights,
            context,
            offset=(context.first_token // max(seq, 1) * total + shard.first) * square,
            run=shard.heads * square,
            stride=total * square,
        )
        return weights @ v

    def forward(self, h: Tensor, context: Context) -> Tensor:
        """h -> the attention sublayer's output, both [B, S, d] or, under sequence parallelism, [tokens of this rank, d]."""
        assert self.qkv is not None
        return self.out.from_shards(self.mix(self.qkv.shards(h, context.tokens), context))
