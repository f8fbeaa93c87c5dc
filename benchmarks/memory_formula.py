"""How many bytes a rank needs to train a Decoder: a formula, for parameters, gradients, optimizer, kept activations, and the peak.

Parameters: column-parallel weights hold (q + 2k) d and g f d numbers a block on a rank, row-parallel ones d q and d f, embedding
and head v d each (q, k, f, v: this rank's rows of query heads, KV heads, d_ff and vocabulary; g = 2 if gated, else 1); norms,
row-parallel biases and the table of positions are whole on every rank. Gradients are as many bytes, AdamW keeps two numbers of
the parameters' dtype for each, and a step count of 4 bytes a parameter tensor.

Activations: what backward reads and what therefore lives from the end of forward until then. With T tokens, S of them on this
rank between the sharded regions (S = T, or under sequence parallelism this rank's share, about T/n), e bytes a number, w the
bytes of a statistic (4, for float64 8; LayerNorm's in half precision on the CPU 2), a layer of the pre-norm block keeps:

::

    norm_1        x, for dx: S d e, from which it is normalised again for the weight's gradient (in half precision RMSNorm keeps a
                  float32 copy S d 4, and the normalised x S d e); 1 or 2 statistics S w
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

The peak is that of all tensors at once: parameters, the optimizer's state, the batch (16 bytes a token), what backward still
keeps, the gradients that it has computed, and what is being computed with. It is found by a ledger (``_Step``), which goes through
the operations of a step in their order, adds each one's result and takes away what it was the last to read. The worst moments:

::

    last block, forward   the sublayer's result T d e and its sum with the residual T d e; in the parallel forms both branches'
                          results and their sum
    head, forward         everything is kept; logits c v e and their softmax c v w of a chunk of c tokens (half precision on the CPU
                          a float32 copy c v 4); dx T d e and a chunk's part of it c d e, the weight's gradient v d e and from
                          the second chunk on a chunk's part of it v d e; the head's input S d e, whole T d e
    head, backward        both gradients once more, scaled
    activation, backward  what is before the block's last product is kept; beside it the gradients of the residual stream S d e,
                          of down d f e, and three of T f e if gated: of the product and of its two factors; in the parallel
                          forms, whose two last products come first, also those of out d q e and T q e
    column linear, back.  its output's gradient, the partial sum of its input's T d e, its weight's; under sequence parallelism
                          also its input gathered again T d e; the weight's once more if several ranks hold its KV heads;
                          where oneDNN computes it (parallel/matmul.py) a transposed copy of the output's gradient, or a part of it
    norm, backward        its input and as much for the gradient of that; QK-norm is the same of the keys, then of the queries
    embedding, backward   all gradients, the rows' T d e, and the table's v d e; or with a tied head the table's three times
    optimizer             parameters, gradients and state: clipping and the fused AdamW write to what there is

Of the last and the first block only the larger counts: in between activations go as gradients come. With checkpointing each block
is whole while its backward runs. The gradients of PARALLEL's two halves of its one product are put together in a copy. Tokens that
ranks cannot share evenly are padded for a collective, in copies. Left out: what kernels and communication libraries allocate
inside, a few numbers a token, gradients of norms and biases on their way, and what computing a block again takes beside its result
(it shows where heads are wider than d_ff).

Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (2022), section 4 (equations 1 to 4).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.flops import Shares
from benchmarks.workload import Workload
from parallel import matmul
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


def training_bytes(workload: Workload, rank: int = 0, ranks: int = 1, *, on_gpu: bool = False) -> Bytes:
    """The bytes of one rank of several.

    Args:
        on_gpu: in half precision LayerNorm has float32 statistics, and the softmax of the loss reads half precision.

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
        activations=_Activations(workload, own, rank, ranks, on_gpu).total(),
    )


def peak_bytes(
    workload: Workload,
    rank: int = 0,
    ranks: int = 1,
    *,
    on_gpu: bool = False,
    onednn: bool = False,
    accumulate: bool = False,
) -> int:
    """The bytes of all tensors of one rank of several at the worst moment of a step.

    Args:
        on_gpu: as for :func:`training_bytes`.
        onednn: float32 products are oneDNN's, as on this machine's CPU if ``matmul.ONEDNN_IS_FASTER``: a few MB of copies.
        accumulate: the gradients of micro-batches before are there, and new ones are added to them.
    """
    held = training_bytes(workload, rank, ranks, on_gpu=on_gpu)
    own = Shares.of(workload.config, rank, ranks)
    return _Step(_Activations(workload, own, rank, ranks, on_gpu), held, onednn, accumulate).run()


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

    def __init__(self, workload: Workload, own: Shares, rank: int, ranks: int, on_gpu: bool) -> None:
        self.workload, self.config, self.own, self.ranks, self.on_gpu = workload, workload.config, own, ranks, on_gpu
        self.tokens = workload.tokens
        self.rows = deal(self.tokens, ranks)[rank].length if workload.sequence_parallel else self.tokens
        self.e = workload.dtype.itemsize
        self.w = 8 if workload.dtype == torch.float64 else 4
        self.half = self.e < 4

    def total(self) -> int:
        config, d, e = self.config, self.config.dim, self.e
        layer = self.rows * d * e if self.workload.activation_checkpointing else self.block()
        return config.layers * layer + self.embedding() + self.norm_input(self.rows) + self.norm_rest(self.rows) + self.head()

    @property
    def chunks(self) -> int:
        return -(-self.tokens // LOSS_CHUNK)

    def head(self) -> int:
        width = max(self.e, 4) if self.chunks > 1 else self.e
        return self.config.dim * (self.own.v * width + self.tokens * self.e)

    def embedding(self) -> int:
        config = self.config
        rows = self.tokens * (8 + 1) if self.ranks > 1 else 0
        if config.position is Position.LEARNED:
            return rows + self.rows * 8
        return rows + 2 * self.workload.seq * config.rotary_dim // 2 * self.w

    def norm_input(self, rows: int) -> int:
        """The input that a norm keeps; RMSNorm in half precision a float32 copy."""
        copied = self.half and self.config.norm is Norm.RMSNORM
        return rows * self.config.dim * (4 if copied else self.e)

    def norm_rest(self, rows: int) -> int:
        """What a norm keeps beside its input, for each token or head: statistics, and RMSNorm in half precision its result."""
        if self.config.norm is Norm.LAYERNORM:
            return rows * 2 * (self.e if self.half and not self.on_gpu else self.w)
        return self.rms_rest(rows, self.config.dim)

    def rms_rest(self, rows: int, width: int) -> int:
        return rows * self.w + (rows * width * self.e if self.half else 0)

    def head_norm(self, width: int) -> tuple[int, int]:
        """What the norm of queries or keys of ``width`` rows keeps: copies of its input, and the rest."""
        copies = self.tokens * width * 4 if self.half else 0
        return copies, self.rms_rest(self.tokens * width // self.config.head_dim, self.config.head_dim)

    def block(self) -> int:
        config, own, tokens, d, e = self.config, self.own, self.tokens, self.config.dim, self.e
        gated = config.activation.gated
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
            total += sum(self.head_norm(own.q)) + sum(self.head_norm(own.k))
        total += tokens * own.q * e + tokens * own.q // config.head_dim * self.w  # the attention's output, logsumexp
        relu = config.activation is Activation.RELU and config.placement is not Placement.PARALLEL
        total += tokens * own.f * e * ((2 + 2) if gated else 1 if relu else 2)
        return total


class _Step:
    """A ledger of a step: what lives after each operation, and the most that ever did. Sizes are in bytes."""

    def __init__(self, kept: _Activations, held: Bytes, onednn: bool, accumulate: bool) -> None:
        self.kept, self.held, self.config, self.accumulate = kept, held, kept.config, accumulate
        self.onednn = onednn and kept.workload.dtype == torch.float32
        workload, own, d, e = kept.workload, kept.own, kept.config.dim, kept.e
        self.base = held.parameters + held.optimizer + (held.gradients if accumulate else 0) + 16 * kept.tokens
        self.final = kept.norm_input(kept.rows), kept.norm_rest(kept.rows)
        self.now = self.peak = self.base + held.activations - kept.head() - sum(self.final)
        self.sharded = workload.sequence_parallel and kept.ranks > 1
        self.x, self.row = kept.tokens * d * e, kept.rows * d * e
        self.whole = self.x if self.sharded else 0  # gathered
        wire = -(-kept.tokens // kept.ranks) * kept.ranks * d * e
        self.padded = wire if self.sharded and wire > self.x else 0
        self.short = (kept.ranks - kept.tokens % kept.ranks) * wire // kept.ranks if self.padded else 0
        self.table, self.d = own.v * d * e, d * e
        self.f, self.q = kept.tokens * own.f * e, kept.tokens * own.q * e
        self.qk, self.qkv = (kept.tokens * (own.q + k * own.k) * e for k in (1, 2))
        self.gated = self.config.activation.gated
        self.up = self.f * (2 if self.gated else 1)

    def take(self, *sizes: int) -> None:
        self.now += sum(sizes)
        self.peak = max(self.peak, self.now)

    def free(self, *sizes: int) -> None:
        self.now -= sum(sizes)

    def keep(self, gradient: int) -> None:
        """A weight's gradient has been computed: it stays, or is added to the one that is there."""
        self.free(gradient if self.accumulate else 0)

    def run(self) -> int:
        self.block_forward()
        self.take(*self.final)
        self.head_forward()
        self.head_backward()
        self.norm(self.row, *self.final)
        for _ in range(self.config.layers):
            self.block()
        self.embedding()
        return self.peak if self.accumulate else max(self.peak, self.base + self.held.gradients)

    def block_forward(self) -> None:
        """The end of the last one, where the sublayers' results are summed over the ranks."""
        pre = self.config.placement is Placement.PRE
        variables = self.f + 2 * self.row if pre else self.qkv + self.up  # which are kept anyway without checkpointing
        self.take(variables if self.kept.workload.activation_checkpointing else 0)
        self.take(self.x if pre else 3 * self.x)  # both branches' results and their sum, which alone stays
        self.free(0 if pre else 2 * self.x)
        self.reduce_scatter()
        if not self.sharded:  # the sum with the bias, or with the residual
            self.take(self.x)
        self.now = self.base + self.held.activations - self.kept.head() - sum(self.final)

    def head_forward(self) -> None:
        kept, rows = self.kept, min(self.kept.tokens, LOSS_CHUNK)
        logits, softmax = rows * kept.own.v * kept.e, rows * kept.own.v * kept.w
        copy = softmax if kept.half and not kept.on_gpu else 0
        self.take(self.row)
        self.gather()
        self.take(self.x)
        for chunk in range(min(kept.chunks, 3)):  # all later ones are like the third
            self.take(logits, copy, softmax)
            self.free(copy)
            self.take(5 * kept.ranks * rows * kept.w)  # all ranks' three statistics of a token, and two in working on them
            self.free(5 * kept.ranks * rows * kept.w)
            self.take(rows * self.d)
            self.free(rows * self.d)
            self.take(self.table)
            if chunk == 1 and kept.half:
                self.take(2 * self.table)
            self.free(logits, softmax, self.table if chunk else 0, self.table if chunk == 1 and kept.half else 0)
        self.free(self.row, self.whole)

    def head_backward(self) -> None:
        self.take(self.x)
        self.reduce_scatter()
        self.take(self.table)
        self.free(self.kept.head(), self.whole)
        self.keep(0 if self.config.tied_embeddings else self.table)

    def gather(self) -> None:
        """Under sequence parallelism this rank's tokens -> all; while these are put together, beside the padded ones."""
        self.take(self.padded, self.whole)
        self.free(self.padded)

    def reduce_scatter(self) -> None:
        """Under sequence parallelism all tokens, which stay, -> the sums of this rank's. Short shares are copied twice for it."""
        self.take(self.short, self.padded)
        self.free(self.short)
        self.take(self.row if self.sharded else 0)
        self.free(self.padded)

    def norm(self, row: int, kept_input: int, rest: int, *, residual: bool = False, rms: bool = False) -> None:
        """From the gradient of a norm's output to that of its input, added to that of the residual stream if there is one."""
        if self.kept.half and (rms or self.config.norm is Norm.RMSNORM):
            wide = 2 * row
            self.take(row, row)  # of the product with the weight
            self.free(row, row, rest)
            self.take(wide)  # in float32
            self.free(row)
            self.take(wide)
            self.free(wide, kept_input)
            self.take(row)
            self.free(wide)
        else:
            self.take(row)
            self.free(row, kept_input, rest)
        if residual:
            self.take(row)
            self.free(row, row)

    def row_linear(self, x: int, weight: int, kept_input: int) -> None:
        """From the gradient of the output, which lives on, to that of the input x and of the weight."""
        self.take(x)
        self.gradient_of(weight, self.x)
        self.free(kept_input)
        self.keep(weight)

    def gradient_of(self, weight: int, dy: int) -> None:
        """The product dy^T x, for which oneDNN is given a copy of dy^T; if it is large in parts, whose results are copied."""
        kept = self.kept
        self.take(weight)
        if self.onednn and weight // kept.e * kept.tokens >= matmul.FEWEST_PRODUCTS:
            parts = -(-dy // (kept.e * matmul.MOST_COPIED)) if dy >= weight else 1
            copies = dy // parts + (weight // parts if parts > 1 else 0)
            self.take(copies)
            self.free(copies)

    def column_linear(self, y: int, *, whole: bool = False, heads: bool = False) -> None:
        """From the gradient of the output y to that of the input and of the weight.

        ``whole``: the input is all tokens already. ``heads``: KV heads are a part of y; where several ranks hold the same, their
        gradients are summed in a buffer of all heads, and put into a copy of the weight's.
        """
        gathered = self.sharded and not whole
        weight = y // self.kept.tokens * self.config.dim
        if gathered:
            self.take(self.padded or self.x, self.x)
            self.reduce_scatter()
            self.take(self.x if self.padded else 0)
            self.gradient_of(weight, y)
            self.free(self.padded, 2 * self.x)
        else:
            self.take(self.x)
            self.gradient_of(weight, y)
        self.free(y, self.x if whole else self.row)
        if heads and self.config.kv_heads < self.kept.ranks:
            buffer = 2 * self.config.kv_heads * self.config.head_dim * self.d
            self.take(2 * buffer)
            self.free(buffer)
            self.take(weight)
            self.free(buffer, weight)
        self.keep(weight)

    def activation(self, kept_input: int) -> None:
        if self.gated:
            self.take(2 * self.f)  # of silu(gate) and of up
            self.free(2 * self.f)
            self.take(self.f)  # of gate
            self.free(self.f, kept_input)
            self.take(self.up)
            self.free(self.up)
        else:
            self.take(self.f)
            self.free(self.f, kept_input)

    def attention(self, kept_input: int) -> None:
        """From the gradient of the output to that of q, k and v as one tensor."""
        kept, config = self.kept, self.config
        heads, rotated = kept.own.q // config.head_dim, config.position is Position.ROPE
        apart = rotated or config.qk_norm is QKNorm.PER_HEAD
        self.take(self.qkv)
        self.free(self.q, self.q, kept.tokens * heads * kept.w, kept_input, self.qk if apart else 0)
        self.take(self.qk)
        self.free(self.qk)
        if rotated:
            work = round(self.qk * config.rotary_dim / config.head_dim * (4.5 if kept.half else 2))
            self.take(work)
            self.free(work)
        if config.qk_norm is QKNorm.PER_HEAD:
            self.take(self.qk - self.q)
            for rows, row in ((kept.own.k, self.qk - self.q), (kept.own.q, self.q)):
                self.norm(row, *kept.head_norm(rows), rms=True)
            self.free(self.qk - self.q)
        self.take(self.qkv)
        self.free(self.qkv)

    def block(self) -> None:
        kept, config = self.kept, self.config
        d, own, placement = self.d, kept.own, config.placement
        again = kept.workload.activation_checkpointing
        norm_input, whole_input = kept.norm_input(kept.rows), kept.norm_input(kept.tokens)
        rest, whole_rest = kept.norm_rest(kept.rows), kept.norm_rest(kept.tokens)
        relu = config.activation is Activation.RELU  # which keeps its result, the input of down
        parallel = placement is not Placement.PRE
        fused = placement is Placement.PARALLEL
        self.gather()
        if again:
            copied = norm_input > self.row or (self.sharded and placement is Placement.PARALLEL_TWO_NORMS)
            self.take(kept.block() - (0 if copied else self.row))
            self.take(self.x if parallel else 0)  # the result of out
            self.free(self.x if parallel else 0)
        self.row_linear(self.f, d * own.f, 0 if relu else self.f)
        if parallel:
            self.row_linear(self.q, d * own.q, 0)
        self.free(self.whole)
        self.activation(self.f if relu else 0 if fused else self.up)
        if not parallel:
            self.column_linear(self.up)
            self.norm(self.row, norm_input, rest, residual=True)
            self.gather()
            self.row_linear(self.q, d * own.q, 0)
            self.free(self.whole)
        self.attention(self.qkv + (self.up if fused else 0))
        if fused:
            self.take(self.qkv + self.up)  # both halves' gradients, put together
            self.free(self.qkv + self.up)
            self.column_linear(self.qkv + self.up, heads=True)
            self.norm(self.row, norm_input, rest, residual=True)
        elif parallel:
            shares = not (kept.half and config.norm is Norm.RMSNORM)
            self.column_linear(self.up, whole=True)
            self.norm(self.x, 0 if shares else whole_input, whole_rest)
            self.column_linear(self.qkv, whole=True, heads=True)
            self.norm(self.x, whole_input, whole_rest, residual=True)
            if kept.ranks > 1:
                self.take(self.x)  # beside the gradients of the norms, for one collective
                self.free(self.x)
            self.reduce_scatter()
            self.free(self.whole)
            self.take(self.row)
            self.free(2 * self.row)
        else:
            self.column_linear(self.qkv, heads=True)
            self.norm(self.row, norm_input, rest, residual=True)
        self.free(self.row if again and copied else 0)

    def embedding(self) -> None:
        several = self.kept.ranks > 1
        positions = self.config.max_seq_len * self.d if self.config.position is Position.LEARNED else 0
        self.take(positions)
        self.keep(positions)
        self.gather()
        self.free(self.row if self.sharded else 0)
        self.take(self.x if several else 0)  # with zeros for the rows that other ranks hold
        self.free(self.x if several else 0)
        self.take(self.table)
        self.free(self.x)
        self.take(self.table if self.config.tied_embeddings else 0)
