"""The feed-forward sublayer: gated (SwiGLU) or plain."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parallel.layout import Part
from parallel.linear import ColumnParallelLinear, RowParallelLinear
from tpblock.config import Activation, Bias, ModelConfig, Parallelism, Placement
from tpblock.context import Context


class FeedForward(nn.Module):
    """Gated: ``down(silu(gate x) * up x)`` with gate and up as one column-parallel weight [2 d_ff, d]; plain: ``down(act(up x))``.

    ``down`` is row-parallel [d, d_ff]. With ``Placement.PARALLEL`` the block computes gate and up together with the attention's
    projection, and calls :meth:`mix`.
    """

    def __init__(
        self,
        config: ModelConfig,
        parallel: Parallelism = Parallelism(),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.activation = config.activation
        names = ("gate", "up") if config.activation.gated else ("up",)
        self.parts: tuple[Part, ...] = tuple(Part.even(name, config.d_ff, parallel.group.shards) for name in names)
        bias, options = config.has_bias(Bias.FEEDFORWARD), {"device": device, "dtype": dtype, "seed": None, **vars(parallel)}
        self.up = None
        if config.placement is not Placement.PARALLEL:
            width = sum(part.size for part in self.parts)
            self.up = ColumnParallelLinear(config.dim, width, bias, parts=self.parts, **options)
        self.down = RowParallelLinear(config.d_ff, config.dim, bias, parts=self.parts[-1:], **options)

    def mix(self, ys: Sequence[Tensor]) -> list[Tensor]:
        """[..., 2 d_ff_r] -> [..., d_ff_r] (gated), or elementwise, of each shard."""
        return [self._activate(y) for y in ys]

    def _activate(self, y: Tensor) -> Tensor:
        match self.activation:
            case Activation.SWIGLU:
                gate, up = y.chunk(2, dim=-1)
                return F.silu(gate) * up
            case Activation.GELU:
                return F.gelu(y)
            case Activation.GELU_TANH:
                return F.gelu(y, approximate="tanh")
            case Activation.RELU:
                return F.relu(y)

    def forward(self, h: Tensor, context: Context) -> Tensor:
        """h -> the feed-forward sublayer's output, both [B, S, d] or, under sequence parallelism, [tokens of this rank, d]."""
        assert self.up is not None
        return self.down.from_shards(self.mix(self.up.shards(h, context.tokens)))
