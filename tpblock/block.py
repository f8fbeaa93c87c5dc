"""The transformer block: one forward, driven by where the norms stand (``Placement``)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from parallel.group import TPGroup
from parallel.linear import ColumnParallelLinear
from parallel.regions import token_counts
from parallel.virtual import copy_to_shards, gather_to_shards
from tpblock.attention import Attention
from tpblock.config import Bias, ModelConfig, Parallelism, Placement
from tpblock.context import Context
from tpblock.dropout import Dropout
from tpblock.feedforward import FeedForward
from tpblock.init import initialise
from tpblock.norm import make_norm


class Block(nn.Module):
    """Attention and feed-forward with their norms and residuals.

    ::

        PRE                  x = x + A(norm_1(x));  x = x + F(norm_2(x))
        PARALLEL             h = norm_1(x);         x = x + A(h) + F(h)      q, k, v, gate and up read h as one column GEMM
        PARALLEL_TWO_NORMS   x = x + A(norm_1(x)) + F(norm_2(x))

    Collectives of activations (each of tokens x dim; all-reduces, or with sequence parallelism reduce-scatters and
    all-gathers): PRE two forward and two backward, both parallel forms one forward and one backward.

    Args:
        config: sizes and choices.
        group, sequence_parallel, reduce_dtype: see :class:`Parallelism`.
        virtual_shards: invariant mode, see :class:`TPGroup`.
        layer: its number in a stack, which decides whether the sliding window applies.
        device, dtype: of the parameters.
        seed: initial values and dropout masks are a function of it, the parameters' names and global coordinates.
            None leaves both to an enclosing module, or to ``initialise``.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        group: TPGroup,
        sequence_parallel: bool = False,
        reduce_dtype: torch.dtype | None = None,
        virtual_shards: int | None = None,
        layer: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        seed: int | None = 0,
    ) -> None:
        super().__init__()
        group = group if virtual_shards is None else group.with_virtual_shards(virtual_shards)
        parallel = Parallelism(group=group, sequence_parallel=sequence_parallel, reduce_dtype=reduce_dtype)
        self.config, self.parallel = config, parallel
        fused = config.placement is Placement.PARALLEL
        self.norm_1 = make_norm(config, parallel, device, dtype)
        self.attention = Attention(config, parallel, device, dtype, layer=layer)
        self.norm_2 = None if fused else make_norm(config, parallel, device, dtype)
        self.feedforward = FeedForward(config, parallel, device, dtype)
        self.fused = None
        if fused:
            parts = self.attention.parts + self.feedforward.parts
            width = sum(part.size for part in parts)
            self.fused = ColumnParallelLinear(
                config.dim, width, config.has_bias(Bias.QKV), device, dtype, parts=parts, seed=None, **vars(parallel)
            )
        self.dropout_1 = Dropout(config.dropout)
        self.dropout_2 = Dropout(config.dropout)
        if seed is not None:
            initialise(self, group, seed, std=config.init_std, layers=config.layers)

    def forward(self, x: Tensor, context: Context | None = None, *, step: int | None = None) -> Tensor:
        """x [batch, seq, dim] -> the same shape; under sequence parallelism x is this rank's tokens [tokens_r, dim].

        Args:
            context: the batch's coordinates; needed under sequence parallelism, else taken from the shape of x.
            step: number of the training step, for dropout; only without ``context``, which has its own.

        Raises:
            ValueError: if x does not fit the config or the context.
        """
        context = self.check(x, context, step)
        tokens = context.tokens
        match self.config.placement:
            case Placement.PRE:
                assert self.norm_2 is not None
                x = self._add(x, self.attention(self.norm_1(x, tokens), context), self.dropout_1, context)
                return self._add(x, self.feedforward(self.norm_2(x, tokens), context), self.dropout_2, context)
            case Placement.PARALLEL:
                assert self.fused is not None
                widths = [(shard.heads + 2 * shard.kv_heads) * self.config.head_dim for shard in self.attention.shards]
                ys = self.fused.shards(self.norm_1(x, tokens), tokens)
                halves = [y.split([width, y.shape[-1] - width], dim=-1) for y, width in zip(ys, widths, strict=True)]
                qkvs, ups = [qkv for qkv, _ in halves], [up for _, up in halves]
            case Placement.PARALLEL_TWO_NORMS:
                qkvs, ups = self._two_norms(x, tokens)
        out, down = self.attention.out, self.feedforward.down
        attended, fed = self.attention.mix(qkvs, context), self.feedforward.mix(ups)
        update = out.reduce([a + f for a, f in zip(out.leaves(attended), down.leaves(fed), strict=True)])
        return self._add(x, down.add_bias(out.add_bias(update, tokens), tokens), self.dropout_1, context)

    def _two_norms(self, x: Tensor, tokens: int) -> tuple[list[Tensor], list[Tensor]]:
        """The projections of norm_1(x) and norm_2(x), entering the sharded region once: x is made whole *before* the norms, whose
        own backward is linear, so that one sum over the ranks serves both branches."""
        group, reduce_dtype, qkv, up = self.parallel.group, self.parallel.reduce_dtype, self.attention.qkv, self.feedforward.up
        assert qkv is not None and up is not None and self.norm_2 is not None
        first, second = list(self.norm_1.parameters()), list(self.norm_2.parameters())
        if self.parallel.sequence_parallel:
            xs = gather_to_shards(x, tokens, group, reduce_dtype)
            weights = copy_to_shards([*first, *second], group, reduce_dtype)
            copies = [(x_s, *w_s) for x_s, w_s in zip(xs, weights, strict=True)]
        else:
            copies = copy_to_shards([x.flatten(0, -2), *first, *second], group, reduce_dtype)
        n = len(first)
        return (
            qkv.local([self.norm_1.normalize(x_s, *w_s[:n]) for x_s, *w_s in copies]),
            up.local([self.norm_2.normalize(x_s, *w_s[n:]) for x_s, *w_s in copies]),
        )

    def _add(self, x: Tensor, update: Tensor, dropout: Dropout, context: Context) -> Tensor:
        """The residual sum, with dropout on the update at its global coordinates."""
        update = update.view(x.shape)
        if not dropout.active:
            return x + update
        first = context.first_token
        if self.parallel.sequence_parallel:
            first += sum(token_counts(context.tokens, self.parallel.group)[: self.parallel.group.rank])
        return x + dropout(update, context, offset=first * self.config.dim)

    def check(self, x: Tensor, context: Context | None, step: int | None) -> Context:
        """The context of a forward pass on x, or a ValueError that says what does not fit. Nothing has been sent by then."""
        dim = self.config.dim
        if context is None:
            if self.parallel.sequence_parallel:
                raise ValueError(
                    "under sequence parallelism a block needs a Context: its input does not show the batch's shape"
                )
            if x.ndim != 3 or x.shape[-1] != dim:
                raise ValueError(f"a block of dim {dim} takes [batch, seq, {dim}], got {tuple(x.shape)}")
            context = Context.build(self.config, x.shape[0], x.shape[1], device=x.device, dtype=x.dtype, step=step)
        elif step is not None:
            raise ValueError("step is part of the Context that was given")
        shape: tuple[int, ...] = (context.batch, context.seq, dim)
        if self.parallel.sequence_parallel:
            shape = (token_counts(context.tokens, self.parallel.group)[self.parallel.group.rank], dim)
        if tuple(x.shape) != shape:
            raise ValueError(f"this block expects an input of shape {shape}, got {tuple(x.shape)}")
        dtype = self.attention.out.weight.dtype
        if x.dtype != dtype and not torch.is_autocast_enabled(x.device.type):
            raise ValueError(f"this block has parameters of {dtype}, got an input of {x.dtype}")
        context.check(self.config, self.training)
        return context
