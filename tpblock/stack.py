"""A stack of blocks and the final norm: the trunk of a decoder."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from parallel.group import TPGroup
from tpblock.block import Block
from tpblock.config import ModelConfig, Parallelism
from tpblock.context import Context
from tpblock.init import initialise
from tpblock.norm import make_norm


class Stack(nn.Module):
    """``config.layers`` blocks, then the final norm that a pre-norm residual stream needs before the head.

    Args:
        activation_checkpointing: keep only each block's input and compute the block again in backward.
        Others: as for :class:`Block`.
    """

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
    ) -> None:
        super().__init__()
        group = group if virtual_shards is None else group.with_virtual_shards(virtual_shards)
        parallel = Parallelism(group=group, sequence_parallel=sequence_parallel, reduce_dtype=reduce_dtype)
        self.activation_checkpointing = activation_checkpointing
        self.blocks = nn.ModuleList(
            Block(config, layer=i, device=device, dtype=dtype, seed=None, **vars(parallel)) for i in range(config.layers)
        )
        self.norm = make_norm(config, parallel, device, dtype)
        if seed is not None:
            initialise(self, group, seed, std=config.init_std, layers=config.layers)

    def forward(self, x: Tensor, context: Context | None = None, *, step: int | None = None) -> Tensor:
        """x -> the normed output of the last block, of the same shape; arguments as for :meth:`Block.forward`."""
        context = self.blocks[0].check(x, context, step)  # type: ignore[operator]
        for block in self.blocks:
            if self.activation_checkpointing and self.training:
                # Dropout masks are functions of coordinates: there is no generator state to preserve.
                x = checkpoint(block, x, context, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, context)
        return self.norm(x, context.tokens)
