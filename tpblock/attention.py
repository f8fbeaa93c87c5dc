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
from parallel.virtual import copy_to_shards
from tpblock.config import Bias, ModelConfig, Parallelism, Placement, QKNorm
from tpblock.context import Context
from tpblock.dropout import Dropout
from tpblock.norm import RMSNorm
from tpblock.rope import apply_rotary


class HeadShard(NamedTuple):
    """The heads of one shard: its first query head, and how many query and KV heads it has."""

    first: int
    heads: int
    kv_heads: int


class Attention(nn.Module):
    """q, k, v projection (one fused column-parallel weight [(H + 2K) D, d]), attention, output projection (row-parallel [d, H D]).

    With ``Placement.PARALLEL`` there is no projection of its own: the block computes it together with the feed-forward's, and
    calls :meth:`mix`. ``layer`` is its number in the stack.
    """

    def __init__(
        self,
        config: ModelConfig,
        parallel: Parallelism = Parallelism(),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        layer: int = 0,
    ) -> None:
        super().__init__()
        self.config, self.parallel, self.layer = config, parallel, layer
        self.windowed = config.window(layer) is not None
        self.parts: tuple[Part, ...] = attention_parts(config.heads, config.kv_heads, config.head_dim, parallel.group.shards)
        q, k, _ = self.parts
        self.shards = [
            HeadShard(*(rows // config.head_dim for rows in (q.runs[s].start, q.runs[s].length, k.runs[s].length)))
            for s in parallel.group.local_shards
        ]
        options = {"device": device, "dtype": dtype, "seed": None, **vars(parallel)}
        self.qkv = None
        if config.placement is not Placement.PARALLEL:
            width, bias = sum(part.size for part in self.parts), config.has_bias(Bias.QKV)
            self.qkv = ColumnParallelLinear(config.dim, width, bias, parts=self.parts, **options)
        self.q_norm = self.k_norm = None
        if config.qk_norm is QKNorm.PER_HEAD:
            self.q_norm, self.k_norm = (RMSNorm(config.head_dim, config.norm_eps, device, dtype) for _ in range(2))
        self.out = RowParallelLinear(q.size, config.dim, config.has_bias(Bias.OUT), parts=[q], **options)
        self.dropout = Dropout(config.attention_dropout)

    def mix(self, qkvs: Sequence[Tensor], context: Context) -> list[Tensor]:
        """[B*S or (B, S), (H_r + 2 K_r) D] -> [same, H_r D] of each shard: QK-norm, rotary, causal attention of its heads."""
        norms: list[tuple[Tensor, ...]] = [()] * len(qkvs)
        if self.q_norm is not None and self.k_norm is not None:
            # The weights' gradients are sums over the shards, also of those that hold the same KV head: each knows only the part
            # of its gradient that comes from its own queries.
            weights = [self.q_norm.weight, self.k_norm.weight]
            norms = copy_to_shards(weights, self.parallel.group, self.parallel.reduce_dtype)
        return [self._mix(place, qkv, norms[place], context) for place, qkv in enumerate(qkvs)]

    def _mix(self, place: int, qkv: Tensor, norms: Sequence[Tensor], context: Context) -> Tensor:
        batch, seq, dim, shard = context.batch, context.seq, self.config.head_dim, self.shards[place]
        heads, kv_heads = shard.heads, shard.kv_heads
        qk, v = qkv.reshape(batch, seq, heads + 2 * kv_heads, dim).split([heads + kv_heads, kv_heads], dim=2)
        q, k = self._prepare(qk, shard, norms, context.rotary).split([heads, kv_heads], dim=2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        first, mask = context.window_keys if self.windowed else context.keys
        if context.cache is not None:
            k, v = (t[:, :, first:] for t in context.cache.append(self.layer, place, k, v))
        if self.dropout.active:
            mixed = self._with_dropout(q, k, v, shard, mask, context)
        else:
            causal = mask is None and context.start == 0
            mixed = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=heads != kv_heads)
        return mixed.transpose(1, 2).reshape(*qkv.shape[:-1], heads * dim)

    def _prepare(self, qk: Tensor, shard: HeadShard, norms: Sequence[Tensor], rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        """Query heads and beside them key heads [B, S, H_r + K_r, D] -> the same, normed and rotated (one rotation for both)."""
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk.split([shard.heads, shard.kv_heads], dim=2)
            qk = torch.cat([self.q_norm.normalize(q, norms[0]), self.k_norm.normalize(k, norms[1])], dim=2)
        return qk if rotary is None else apply_rotary(qk, rotary)

    def _with_dropout(
        self, q: Tensor, k: Tensor, v: Tensor, shard: HeadShard, mask: Tensor | None, context: Context
    ) -> Tensor:
        """Attention with its weights written out [B, H_r, S, S], since SDPA cannot be given the global mask."""
        seq, total = context.seq, self.config.heads
        k, v = (t.repeat_interleave(shard.heads // shard.kv_heads, dim=1) for t in (k, v))
        scores = q @ k.transpose(-2, -1) * self.config.head_dim**-0.5
        if mask is None:
            mask = torch.ones(seq, seq, dtype=torch.bool, device=q.device).tril()
        statistics = torch.promote_types(q.dtype, torch.float32)
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1, dtype=statistics).to(q.dtype)
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
