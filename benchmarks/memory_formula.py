"""How many bytes a rank needs to train a Decoder: a formula, for parameters, gradients, optimizer and kept activations.

Parameters: column-parallel weights hold (q + 2k) d and g f d numbers a block on a rank, row-parallel ones d q and d f, embedding
and head v d each (q, k, f, v: this rank's rows of query heads, KV heads, d_ff and vocabulary; g = 2 if gated, else 1); norms,
row-parallel biases and the table of positions are whole on every rank. Gradients are as many bytes, AdamW keeps two numbers of
the parameters' dtype for each, and a step count of 4 bytes a parameter tensor.

Activations: what backward reads and what therefore lives from the end of forward until then. With T tokens, S of them on this
rank between the sharded regions (S = T, or under sequence parallelism this rank's share, about T/n), e bytes a number, w the
bytes of a statistic (4, for float64 8; LayerNorm's in half precision on the CPU 2), a layer of the pre-norm block keeps:

::

    norm_1        x, for dx: S d e (in half precision its float32 copy S d 4); the normalised x, for the weight's gradient, S d e
                  (RMSNorm on the CPU; torch.layer_norm and fused kernels compute it again from x); 1 or 2 statistics S w
    qkv           its input h: S d e (gathered again in backward under sequence parallelism)
                  its output, of which v is a part: T (q + 2k) e
    attention     q and k rotated: T (q + k) e; output, which is the input of out, T q e; a logsumexp a query: T H_r w
    QK-norm       the normalised q and k T (q + k) e, in half precision also float32 copies T (q + k) 4; T (H_r + K_r) w
    norm_2        as norm_1
    up            its input: S d e; its output T g f e (not for ReLU, whose backward reads its result)
    activation    its result, which is the input of down: T f e; gated also silu(gate): T f e
    down, out     nothing more: their outputs are only added

The paper's 34 T d bytes a layer (equation 1, without the attention's scores) are these terms for GPT (q = k = d, f = 4 d, e = 2,
LayerNorm) but for its two dropout masks of T d, which are not kept here: they are drawn again from coordinates. Of them 10 T d,
here 8, stand outside the sharded regions, cut by sequence parallelism alone. Its 5 T d a s / d of the scores falls away with a
fused attention, which computes them again. The forms of the parallel block keep one norm's input for both branches:
PARALLEL computes qkv and up with one product, whose output lives as a whole because v does; PARALLEL_TWO_NORMS keeps the gathered
tokens (T in place of S), since the norms stand within the region. Beside the layers:

::

    embedding     the looked-up rows T 8 and a mask T, with several ranks; ids of learned positions: S 8
    rotary        two tables of seq x rotary_dim / 2 statistics, for all layers
    final norm    as norm_1
    head          linear_cross_entropy keeps the gradients that it has computed, and neither logits nor its input: of the weight
                  v d e (float32 if there are several chunks of tokens), of the tokens T d e

With activation checkpointing a layer keeps its input, S d e, instead.

Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (2022), section 4 (equations 1 to 4).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.flops import Shares
from benchmarks.workload import Workload
from parallel.layout import deal
from tpblock import Activation, Bias, ModelConfig, Norm, Placement, Position, QKNorm

LOSS_CHUNK = 1024
"""Tokens whose logits a Decoder holds at once, unless it is told otherwise."""


@dataclass(frozen=True)
class Bytes:
    """What a rank holds of each kind, in bytes."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """Their sum. No moment of a step need hold it: activations go as gradients come."""
        return self.parameters + self.gradients + self.optimizer + self.activations


def training_bytes(workload: Workload, rank: int = 0, ranks: int = 1, *, fused_norm: bool = False) -> Bytes:
    """The bytes of one rank of several.

    Args:
        fused_norm: RMSNorm keeps its input alone, as torch's kernel on GPUs does.

    Raises:
        ValueError: for what the formula leaves out: dropout, and sliding windows shorter than the sequence.
    """
    config = workload.config
    if config.dropout or config.attention_dropout:
        raise ValueError(f"the formula is for a model without dropout, got {config.dropout} and {config.attention_dropout}")
    if config.sliding_window is not None and config.sliding_window < workload.seq:
        raise ValueError(
            f"the formula is for whole attention, got a window of {config.sliding_window} of {workload.seq} tokens"
        )
    own = Shares.of(config, rank, ranks)
    tensors = parameter_sizes(config, own)
    parameters = workload.dtype.itemsize * sum(tensors)
    return Bytes(
        parameters=parameters,
        gradients=parameters,
        optimizer=2 * parameters + 4 * len(tensors),
        activations=_Activations(workload, own, rank, ranks, fused_norm).total(),
    )


def parameter_sizes(config: ModelConfig, own: Shares) -> list[int]:
    """The number of elements of every parameter tensor of a rank."""
    d, gated = config.dim, 2 if config.activation.gated else 1
    norm = [d] * (2 if config.norm is Norm.LAYERNORM else 1)
    qkv, up = own.q + 2 * own.k, gated * own.f
    columns = [qkv + up] if config.placement is Placement.PARALLEL else [qkv, up]
    block = [
        *norm * (1 if config.placement is Placement.PARALLEL else 2),
        *(rows * d for rows in columns),
        d * own.q,
        d * own.f,
    ]
    if config.placement is Placement.PARALLEL:
        block += columns if config.has_bias(Bias.QKV) else []
    else:
        block += [rows for rows, kind in zip(columns, (Bias.QKV, Bias.FEEDFORWARD), strict=True) if config.has_bias(kind)]
    block += [d for kind in (Bias.OUT, Bias.FEEDFORWARD) if config.has_bias(kind)]
    block += [config.head_dim] * (2 if config.qk_norm is QKNorm.PER_HEAD else 0)
    tables = [own.v * d] * (1 if config.tied_embeddings else 2)
    tables += [config.max_seq_len * d] if config.position is Position.LEARNED else []
    return block * config.layers + tables + norm


class _Activations:
    """The terms of the module's docstring for one rank."""

    def __init__(self, workload: Workload, own: Shares, rank: int, ranks: int, fused_norm: bool) -> None:
        self.workload, self.config, self.own, self.ranks, self.fused_norm = workload, workload.config, own, ranks, fused_norm
        self.tokens = workload.tokens
        self.rows = deal(self.tokens, ranks)[rank].length if workload.sequence_parallel else self.tokens
        self.e = workload.dtype.itemsize
        self.w = 8 if workload.dtype == torch.float64 else 4
        self.half = self.e < 4

    def total(self) -> int:
        config, d, e = self.config, self.config.dim, self.e
        layer = self.rows * d * e if self.workload.activation_checkpointing else self.block()
        chunks = -(-self.tokens // LOSS_CHUNK)
        head = self.own.v * d * (max(e, 4) if chunks > 1 else e) + self.tokens * d * e
        return config.layers * layer + self.embedding() + self.norm_input(self.rows) + self.norm_rest(self.rows) + head

    def embedding(self) -> int:
        config = self.config
        rows = self.tokens * (8 + 1) if self.ranks > 1 else 0
        if config.position is Position.LEARNED:
            return rows + self.rows * 8
        return rows + 2 * self.workload.seq * config.rotary_dim // 2 * self.w

    def norm_input(self, rows: int, width: int = 0) -> int:
        """The input that a norm keeps; RMSNorm in half precision a float32 copy."""
        copied = self.half and self.config.norm is Norm.RMSNORM
        return rows * (width or self.config.dim) * (4 if copied else self.e)

    def norm_rest(self, rows: int) -> int:
        """What a norm keeps beside its input, for each token or head: statistics, and RMSNorm the normalised value."""
        if self.config.norm is Norm.LAYERNORM:
            return rows * 2 * (self.e if self.half and not self.fused_norm else self.w)
        return rows * self.w + (0 if self.fused_norm and not self.half else rows * self.config.dim * self.e)

    def block(self) -> int:
        config, own, tokens, d, e = self.config, self.own, self.tokens, self.config.dim, self.e
        gated = config.activation.gated
        heads, kv_heads = own.q // config.head_dim, own.k // config.head_dim
        two = config.placement is Placement.PARALLEL_TWO_NORMS
        rows = tokens if two else self.rows
        total = 0
        norms = 1 if config.placement is Placement.PARALLEL else 2
        shares_input = two and not (self.half and config.norm is Norm.RMSNORM)
        total += (1 if shares_input else norms) * self.norm_input(rows)
        total += norms * (self.norm_rest(rows) + rows * d * e)
        total += tokens * (own.q + 2 * own.k) * e  # the output of qkv
        if config.position is Position.ROPE or config.qk_norm is QKNorm.PER_HEAD:
            total += tokens * (own.q + own.k) * e
        if config.qk_norm is QKNorm.PER_HEAD:
            copies = (4 if self.half else 0) + (0 if self.fused_norm and not self.half else e)
            total += tokens * ((own.q + own.k) * copies + (heads + kv_heads) * self.w)
        total += tokens * own.q * e + tokens * heads * self.w  # the attention's output, logsumexp
        relu = config.activation is Activation.RELU and config.placement is not Placement.PARALLEL
        total += tokens * own.f * e * ((2 + 2) if gated else 1 if relu else 2)
        return total
