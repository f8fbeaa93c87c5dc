"""The transformer block: one forward, driven by where the norms stand (``Placement``)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from parallel.group import TPGroup
from parallel.linear import ColumnParallelLinear
from parallel.regions import copy_to_ranks, gather_tokens, token_counts
from tpblock.attention import Attention
from tpblock.config import ModelConfig, Parallelism, Placement
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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        seed: int | None = 0,
    ) -> None:
        super().__init__()
        parallel = Parallelism(group=group, sequence_parallel=sequence_parallel, reduce_dtype=reduce_dtype)
        self.config, self.parallel = config, parallel
        fused = config.placement is Placement.PARALLEL
        self.norm_1 = make_norm(config, parallel, device, dtype)
        self.attention = Attention(config, parallel, device, dtype, project=not fused)
        self.norm_2 = None if fused else make_norm(config, parallel, device, dtype)
        self.feedforward = FeedForward(config, parallel, device, dtype, project=not fused)
        self.fused = None
        if fused:
            parts = self.attention.parts + self.feedforward.parts
            width = sum(part.size for part in parts)
            self.fused = ColumnParallelLinear(
                config.dim, width, config.bias, device, dtype, parts=parts, seed=None, **vars(parallel)
            )
        self.dropout_1 = Dropout(config.dropout)
        self.dropout_2 = Dropout(config.dropout)
        if seed is not None and self.norm_1.weight.device.type != "meta":
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
        match self.config.placement:
            case Placement.PRE:
                x = self._add(x, self.attention(self.norm_1(x), context), self.dropout_1, context)
                return self._add(x, self.feedforward(self.norm_2(x), context), self.dropout_2, context)  # type: ignore[misc]
            case Placement.PARALLEL:
                assert self.fused is not None
                y = self.fused(self.norm_1(x), context.tokens)
                width = self.attention.local_width
                qkv, up = y[..., :width], y[..., width:]
            case Placement.PARALLEL_TWO_NORMS:
                qkv, up = self._two_norms(x, context)
        out, down = self.attention.out, self.feedforward.down
        both = out.partial(self.attention.mix(qkv, context)) + down.partial(self.feedforward.mix(up))
        return self._add(x, down.add_bias(out.add_bias(out.reduce(both))), self.dropout_1, context)

    def _two_norms(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """The projections of norm_1(x) and norm_2(x), entering the sharded region once: x is made whole *before* the norms, whose
        own backward is linear, so that one sum over the ranks serves both branches."""
        group, qkv, up = self.parallel.group, self.attention.qkv, self.feedforward.up
        assert qkv is not None and up is not None and self.norm_2 is not None
        first, second = list(self.norm_1.parameters()), list(self.norm_2.parameters())
        if self.parallel.sequence_parallel:
            x = gather_tokens(x, context.tokens, group, self.parallel.reduce_dtype)
            weights = copy_to_ranks(*first, *second, group=group)
        else:
            x, *weights = copy_to_ranks(x, *first, *second, group=group, reduce_dtype=self.parallel.reduce_dtype)
        first, second = weights[: len(first)], weights[len(first) :]
        return qkv.local(self.norm_1.normalize(x, *first)), up.local(self.norm_2.normalize(x, *second))

    def _add(self, x: Tensor, update: Tensor, dropout: Dropout, context: Context) -> Tensor:
        """The residual sum, with dropout on the update at its global coordinates."""
        first = context.first_token
        if self.parallel.sequence_parallel:
            first += sum(token_counts(context.tokens, self.parallel.group)[: self.parallel.group.rank])
        return x + dropout(update, context, offset=first * self.config.dim)

    def check(self, x: Tensor, context: Context | None, step: int | None) -> Context:
        """The context of a forward pass on x, or a ValueError that says what does not fit."""
        dim = self.config.dim
        if self.parallel.sequence_parallel:
            if context is None:
                raise ValueError("under sequence parallelism a block needs a Context: its input does not show the batch's shape")
            shape = (token_counts(context.tokens, self.parallel.group)[self.parallel.group.rank], dim)
        elif context is not None:
            shape = (context.batch, context.seq, dim)
        elif x.ndim == 3 and x.shape[-1] == dim:
            return Context.build(self.config, x.shape[0], x.shape[1], device=x.device, dtype=x.dtype, step=step)
        else:
            raise ValueError(f"a block of dim {dim} takes [batch, seq, {dim}], got {tuple(x.shape)}")
        if step is not None:
            raise ValueError("step is part of the Context that was given")
        if tuple(x.shape) != shape:
            raise ValueError(f"this block expects an input of shape {shape}, got {tuple(x.shape)}")
        return context
