"""How many floating-point operations a training step of a Decoder takes: a formula, by layer, phase and rank.

Matrix products alone count, an m x k by k x n product as 2 m k n, as in torch.utils.flop_counter, whose count of a real step the
tests compare with. For T = batch x seq tokens, d = dim, L layers, and on one rank q = query heads x head_dim, k = KV heads x
head_dim, f = d_ff, g = 2 if gated else 1, V = vocabulary:

::

    forward of a block    qkv 2 T d (q + 2k)     out 2 T q d     up 2 T d g f     down 2 T f d
                          attention 4 T seq q: scores and weighted sum, over the whole square of tokens and keys
                          (a kernel that leaves out what the causal mask hides does about half of it)
    backward of a block   each linear twice its forward: one product for dx and one for dW
                          attention 8 T seq q, and 2 T seq q more to compute the scores again (``flash``: a fused kernel,
                          which does not keep them)
    head and loss         6 T d V, all of it in forward: linear_cross_entropy computes dx and dW with the logits
    recomputation         with activation checkpointing backward starts with the block's forward without its last
                          product (down), of which nothing is needed again

The same numbers with the q, k, f and V that a rank owns are that rank's. Heads, d_ff and vocabulary rows are dealt without a rest
being counted twice or left out, so that the ranks' sum is the count of one device, with one exception: where there are fewer KV
heads than ranks, several ranks hold the same KV head, and each computes its keys and values (``duplicated``). The attention
itself is on the query heads, which no two ranks share.

Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (2022), appendix A; Chowdhery et al.,
PaLM (2022), appendix B (utilisation leaves recomputation out).
"""

from __future__ import annotations

from dataclasses import dataclass

from parallel.layout import attention_parts, deal
from tpblock import ModelConfig


@dataclass(frozen=True)
class Flops:
    """Operations of one step on one rank.

    Attributes:
        forward: including all of the head's and the loss's.
        backward: without recomputation.
        attention_again: scores that a fused attention computes again in backward.
        recomputation: blocks that activation checkpointing computes again in backward.
        duplicated: of forward, backward and recomputation, what another rank computes, too.
    """

    forward: int
    backward: int
    attention_again: int = 0
    recomputation: int = 0
    duplicated: int = 0

    @property
    def model(self) -> int:
        """What the model needs, however it is computed: without anything done twice on this rank."""
        return self.forward + self.backward

    @property
    def executed(self) -> int:
        return self.model + self.attention_again + self.recomputation


@dataclass(frozen=True)
class Shares:
    """What a rank owns, in rows: q of the query heads, k of the KV heads, f of d_ff, v of the vocabulary; ``first_holder``: whether
    no rank before it holds the same KV heads."""

    q: int
    k: int
    f: int
    v: int
    first_holder: bool

    @classmethod
    def of(cls, config: ModelConfig, rank: int = 0, ranks: int = 1) -> Shares:
        q, k, _ = (part.runs for part in attention_parts(config.heads, config.kv_heads, config.head_dim, ranks))
        f, v = deal(config.d_ff, ranks)[rank], deal(config.vocab_size, ranks)[rank]
        return cls(q[rank].length, k[rank].length, f.length, v.length, rank == 0 or k[rank] != k[rank - 1])


def training_flops(
    config: ModelConfig,
    batch: int,
    seq: int,
    rank: int = 0,
    ranks: int = 1,
    *,
    activation_checkpointing: bool = False,
    flash: bool = True,
) -> Flops:
    """The operations of forward with labels and backward on one rank of several.

    Raises:
        ValueError: with dropout, which changes what is computed again.
    """
    if config.dropout or config.attention_dropout:
        raise ValueError(f"the formula is for a model without dropout, got {config.dropout} and {config.attention_dropout}")
    own, tokens, d = Shares.of(config, rank, ranks), batch * seq, config.dim
    qkv, kv = 2 * tokens * d * (own.q + 2 * own.k), 2 * tokens * d * 2 * own.k
    out, down = 2 * tokens * own.q * d, 2 * tokens * own.f * d
    up = down * (2 if config.activation.gated else 1)
    attention = 4 * tokens * seq * own.q
    block, head = qkv + out + up + down + attention, 2 * tokens * d * own.v
    recomputation = config.layers * (block - down) if activation_checkpointing else 0
    passes = 3 + (1 if activation_checkpointing else 0)
    return Flops(
        forward=config.layers * block + 3 * head,
        backward=config.layers * 2 * block,
        attention_again=config.layers * attention // 2 if flash else 0,
        recomputation=recomputation,
        duplicated=0 if own.first_holder else config.layers * passes * kv,
    )
