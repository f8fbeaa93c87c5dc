"""What the library must equal: decoder-only transformers written out from torch.nn alone, importing nothing of ours.

Plain on purpose: one linear for each of q, k, v, gate and up, attention with its softmax written out, nothing fused, nothing
cut. test_oracle.py checks it against Hugging Face's modules.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class OracleConfig:
    """``placement``: pre, parallel or parallel_two_norms. ``rotary_dim``: rotated features a head, 0 for learned positions.

    ``bias``: for all linears, or the names of those that have one: qkv, out, feedforward. ``qk_norm``: RMSNorm of every query and
    key head. ``rope_scaling``: ``kind`` (linear, llama3, longrope) and its numbers. ``window``: how many tokens one sees, itself
    included, but in ``full_layers``.
    """

    vocab_size: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    d_ff: int
    activation: str
    norm: str
    norm_eps: float
    placement: str
    rotary_dim: int
    rope_theta: float
    max_seq_len: int
    bias: bool | frozenset[str]
    tied_embeddings: bool
    qk_norm: bool = False
    rope_scaling: dict[str, Any] = field(default_factory=dict)
    window: int | None = None
    full_layers: tuple[int, ...] = ()

    def biased(self, linears: str) -> bool:
        return self.bias if isinstance(self.bias, bool) else linears in self.bias


def no_dropout(site: str, x: Tensor) -> Tensor:
    return x


def norm(config: OracleConfig) -> nn.Module:
    kinds = {"rmsnorm": nn.RMSNorm, "layernorm": nn.LayerNorm}
    return kinds[config.norm](config.dim, eps=config.norm_eps)


def frequency(i: int, seq: int, config: OracleConfig) -> float:
    """The angle by which pair i of a head turns from one position to the next in a sequence of ``seq`` tokens."""
    plain, scaling = config.rope_theta ** (-2 * i / config.rotary_dim), config.rope_scaling
    match scaling.get("kind"):
        case "linear":
            return plain / scaling["factor"]
        case "longrope":
            name = "long_factor" if seq > scaling["original_max_seq_len"] else "short_factor"
            return plain / scaling[name][i]
        case "llama3":
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            turns = scaling["original_max_seq_len"] * plain / (2 * math.pi)
            if turns > high:
                return plain
            if turns < low:
                return plain / scaling["factor"]
            share = (turns - low) / (high - low)
            return (1 - share) * plain / scaling["factor"] + share * plain
    return plain


def rotate(x: Tensor, config: OracleConfig) -> Tensor:
    """Feature i < rotary_dim/2 of each head of x [batch, heads, seq, head_dim] turns with feature i + rotary_dim/2."""
    half, seq = config.rotary_dim // 2, x.shape[2]
    position = torch.arange(seq, dtype=torch.float64)
    frequencies = torch.tensor([frequency(i, seq, config) for i in range(half)], dtype=torch.float64)
    angle = (position[:, None] * frequencies).to(torch.promote_types(x.dtype, torch.float32))
    factor = config.rope_scaling.get("attention_factor", 1.0)
    cos, sin = factor * angle.cos(), factor * angle.sin()
    first, second = x[..., :half], x[..., half : 2 * half]
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
    return torch.cat([turned, x[..., 2 * half :]], -1)


class OracleBlock(nn.Module):
    """One block. ``dropout`` is called with the name of a site (1 and 2 after the sublayers, "attention" on the weights)."""

    def __init__(self, config: OracleConfig, layer: int = 0) -> None:
        super().__init__()
        self.config = config
        self.window = None if layer in config.full_layers else config.window
        dim, inner, kv_inner = config.dim, config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.norm_1 = norm(config)
        self.q = nn.Linear(dim, inner, config.biased("qkv"))
        self.k = nn.Linear(dim, kv_inner, config.biased("qkv"))
        self.v = nn.Linear(dim, kv_inner, config.biased("qkv"))
        self.o = nn.Linear(inner, dim, config.biased("out"))
        if config.qk_norm:
            self.q_norm, self.k_norm = (nn.RMSNorm(config.head_dim, eps=config.norm_eps) for _ in range(2))
        if config.placement != "parallel":
            self.norm_2 = norm(config)
        if config.activation == "swiglu":
            self.gate = nn.Linear(dim, config.d_ff, config.biased("feedforward"))
        self.up = nn.Linear(dim, config.d_ff, config.biased("feedforward"))
        self.down = nn.Linear(config.d_ff, dim, config.biased("feedforward"))
        self.dropout: Callable[[str, Tensor], Tensor] = no_dropout

    def attention(self, h: Tensor) -> Tensor:
        config = self.config
        batch, seq, _ = h.shape

        def heads(x: Tensor) -> Tensor:
            return x.view(batch, seq, -1, config.head_dim).transpose(1, 2)

        q, k, v = heads(self.q(h)), heads(self.k(h)), heads(self.v(h))
        if config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if config.rotary_dim:
            q, k = rotate(q, config), rotate(k, config)
        k, v = (x.repeat_interleave(config.heads // config.kv_heads, 1) for x in (k, v))
        scores = q @ k.transpose(2, 3) / config.head_dim**0.5
        distance = torch.arange(seq)[:, None] - torch.arange(seq)
        unseen = distance < 0 if self.window is None else (distance < 0) | (distance >= self.window)
        weights = self.dropout("attention", scores.masked_fill(unseen, -torch.inf).softmax(-1))
        return self.o((weights @ v).transpose(1, 2).reshape(batch, seq, -1))

    def feedforward(self, h: Tensor) -> Tensor:
        match self.config.activation:
            case "swiglu":
                return self.down(F.silu(self.gate(h)) * self.up(h))
            case "gelu":
                return self.down(F.gelu(self.up(h)))
            case "gelu_tanh":
                return self.down(F.gelu(self.up(h), approximate="tanh"))
            case "relu":
                return self.down(F.relu(self.up(h)))
        raise ValueError(self.config.activation)

    def forward(self, x: Tensor) -> Tensor:
        match self.config.placement:
            case "pre":
                x = x + self.dropout("1", self.attention(self.norm_1(x)))
                return x + self.dropout("2", self.feedforward(self.norm_2(x)))
            case "parallel":
                h = self.norm_1(x)
                return x + self.dropout("1", self.attention(h) + self.feedforward(h))
            case "parallel_two_norms":
                return x + self.dropout("1", self.attention(self.norm_1(x)) + self.feedforward(self.norm_2(x)))
        raise ValueError(self.config.placement)


class OracleStack(nn.Module):
    """The blocks and the final norm."""

    def __init__(self, config: OracleConfig) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(OracleBlock(config, i) for i in range(config.layers))
        self.norm = norm(config)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class OracleDecoder(nn.Module):
    """Embedding, stack, head and loss."""

    def __init__(self, config: OracleConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.positions = nn.Parameter(torch.zeros(config.max_seq_len, config.dim)) if not config.rotary_dim else None
        self.stack = OracleStack(config)
        self.head = None if config.tied_embeddings else nn.Linear(config.dim, config.vocab_size, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits [batch, seq, vocab]."""
        x = self.embedding(ids)
        if self.positions is not None:
            x = x + self.positions[: ids.shape[1]]
        weight = self.embedding.weight if self.head is None else self.head.weight
        return F.linear(self.stack(x), weight)

    def loss(self, ids: Tensor, labels: Tensor, label_smoothing: float = 0.0, z_loss: float = 0.0) -> Tensor:
        """The mean cross entropy over the labels that are not -100; z_loss times the mean square of the log-normaliser."""
        logits = self(ids).flatten(0, 1)
        loss = F.cross_entropy(logits, labels.flatten(), label_smoothing=label_smoothing)
        if z_loss:
            loss = loss + z_loss * logits.logsumexp(-1)[labels.flatten() != -100].square().mean()
        return loss
