"""The decoder-only language model: embedding, stack, head, loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parallel.group import TPGroup
from parallel.linear import ColumnParallelLinear, column_parallel_linear
from parallel.regions import copy_to_ranks, gather_from_ranks, split_tokens
from parallel.virtual import by_token_shard
from parallel.vocab import VocabParallelEmbedding, check_loss, linear_cross_entropy
from tpblock.cache import KVCache
from tpblock.config import ModelConfig, Parallelism, Position
from tpblock.context import Context
from tpblock.init import initialise
from tpblock.stack import Stack


class Decoder(nn.Module):
    """Token embedding (cut along the vocabulary), stack of blocks, output head (cut along the vocabulary, or the embedding itself).

    Called with labels it returns the mean cross entropy, without ever gathering logits over the ranks.

    Args:
        config: sizes and choices, all global.
        group: the tensor-parallel ranks; ``single_device()`` needs no torch.distributed.
        sequence_parallel: cut the activations between the sharded regions along their tokens (Korthikanti et al., 2022).
        reduce_dtype: the dtype in which partial sums are added over the ranks, e.g. torch.float32 for bf16 models.
        virtual_shards: invariant mode: cut the model into this many shards whatever the number of ranks, and give every result
            the same bits for every number of ranks up to it.
        activation_checkpointing: compute each block again in backward rather than keep its activations.
        device, dtype: of the parameters. On "meta" nothing is drawn: ``to_empty``, then :meth:`initialise` or load values.
        seed: initial values and dropout masks are a function of it, the parameters' names and global coordinates.
        loss_chunk: how many tokens' logits are held at once while the loss is computed.

    Raises:
        ValueError: if the group has more ranks than query heads, d_ff or vocabulary rows.
    """

    origin: Any = None
    """The checkpoint that the weights were read from (formats.checkpoint.Checkpoint), which knows how to write them again."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        group: TPGroup,
        sequence_parallel: bool = False,
        reduce_dtype: torch.dtype | None = None,
        virtual_shards: int | None = None,
        activation_checkpointing: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        seed: int | None = 0,
        loss_chunk: int = 1024,
    ) -> None:
        super().__init__()
        group = group if virtual_shards is None else group.with_virtual_shards(virtual_shards)
        self.config, self.group, self.sequence_parallel, self.reduce_dtype = config, group, sequence_parallel, reduce_dtype
        if loss_chunk < 1:
            raise ValueError(f"loss_chunk must be at least 1, got {loss_chunk}")
        self.loss_chunk = loss_chunk
        parallel = Parallelism(group=group, sequence_parallel=sequence_parallel, reduce_dtype=reduce_dtype)
        options = {"device": device, "dtype": dtype, "seed": None, **vars(parallel)}
        self.embedding = VocabParallelEmbedding(config.vocab_size, config.dim, **options)
        self.positions = None
        if config.position is Position.LEARNED:
            self.positions = nn.Parameter(torch.empty(config.max_seq_len, config.dim, device=device, dtype=dtype))
        self.stack = Stack(config, activation_checkpointing=activation_checkpointing, **options)
        self.head = None
        if not config.tied_embeddings:
            vocab = self.embedding.layouts["weight"].parts
            self.head = ColumnParallelLinear(config.dim, config.vocab_size, False, parts=vocab, **options)
        if seed is not None:
            self.initialise(seed)

    def initialise(self, seed: int = 0) -> None:
        """Draws all parameters and keys the dropout sites: needed after ``to_empty``, unless values are loaded."""
        initialise(self, self.group, seed, std=self.config.init_std, layers=self.config.layers)

    @property
    def head_weight(self) -> nn.Parameter:
        """This rank's rows [V_r, d] of the output head."""
        return self.embedding.weight if self.head is None else self.head.weight

    def forward(
        self,
        ids: Tensor,
        labels: Tensor | None = None,
        *,
        step: int | None = None,
        first_token: int = 0,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> Tensor:
        """The logits of all tokens, or with ``labels`` their loss.

        Args:
            ids: token ids [batch, seq], the same on every rank of the group.
            labels: [batch, seq], the token that each position is to predict (already shifted); -100 is ignored.
            step, first_token: coordinates of the dropout masks, see :class:`Context`.
            label_smoothing, z_loss: see ``vocab_parallel_cross_entropy``.

        Returns:
            Without labels: logits [batch, seq, vocab_size], whole on every rank. With: the mean cross entropy, 0-d, the same
            on every rank.
        """
        if ids.ndim != 2:
            raise ValueError(f"token ids must be [batch, seq], got shape {tuple(ids.shape)}")
        if labels is not None and labels.shape != ids.shape:
            raise ValueError(f"labels of shape {tuple(labels.shape)} do not match token ids of shape {tuple(ids.shape)}")
        batch, seq = ids.shape
        weight = self.embedding.weight
        context = Context.build(
            self.config, batch, seq, device=weight.device, dtype=weight.dtype, step=step, first_token=first_token
        )
        context.check(self.config, self.training)  # this and the next before the embedding communicates
        if labels is not None:
            check_loss(
                labels, vocab_size=self.config.vocab_size, group=self.group, label_smoothing=label_smoothing, z_loss=z_loss
            )
        hidden = self.stack(self._embed(ids, context), context)
        if labels is None:
            return self._logits(hidden, context).view(batch, seq, -1)
        return linear_cross_entropy(
            hidden.flatten(0, -2),
            self.head_weight,
            labels.flatten(),
            vocab_size=self.config.vocab_size,
            group=self.group,
            sequence_parallel=self.sequence_parallel,
            tokens=context.tokens,
            chunk_tokens=self.loss_chunk,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            reduce_dtype=self.reduce_dtype,
        )

    @torch.no_grad()
    def next_logits(self, ids: Tensor, cache: KVCache) -> Tensor:
        """The logits [batch, vocab_size] of the token after ``ids``, the same bytes on every rank, for generation.

        Args:
            ids: [batch, new tokens], those that follow what is in the cache: a whole prompt, one token, or any number.
            cache: keys and values of the tokens before; those of ``ids`` are added.
        """
        if ids.ndim != 2 or not ids.shape[1]:
            raise ValueError(f"token ids must be [batch, new tokens], one at least, got shape {tuple(ids.shape)}")
        weight = self.embedding.weight
        context = Context.build(self.config, *ids.shape, device=weight.device, dtype=weight.dtype, cache=cache)
        context.check(self.config, self.training)
        hidden = self.stack(self._embed(ids, context), context)
        cache.length += context.seq
        return self._logits(hidden[:, -1], context)

    def _embed(self, ids: Tensor, context: Context) -> Tensor:
        x = self.embedding(ids)
        if self.positions is None:
            return x
        group, sharded = self.group, self.sequence_parallel
        positions = torch.arange(context.tokens, device=ids.device)[:, None] % context.seq + context.start
        if sharded:
            positions = split_tokens(positions, group)
        if group.invariant:
            tokens = context.tokens if sharded else None
            return by_token_shard(
                _add_positions, [x, positions], [self.positions], group=group, tokens=tokens, reduce_dtype=self.reduce_dtype
            )
        table = copy_to_ranks(self.positions, group, self.reduce_dtype) if sharded else self.positions
        return _add_positions(x.flatten(0, -2), positions, table).view(x.shape)

    def _logits(self, hidden: Tensor, context: Context) -> Tensor:
        layout = self.embedding.layouts["weight"]  # the head's, too
        shards = column_parallel_linear(
            hidden,
            self.head_weight,
            layout=layout,
            group=self.group,
            sequence_parallel=self.sequence_parallel,
            tokens=context.tokens,
            reduce_dtype=self.reduce_dtype,
        )
        return gather_from_ranks(torch.cat(shards, -1), layout.features, self.group)


def _add_positions(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    return x + F.embedding(positions[:, 0], table)
