"""Keys and values of the tokens seen so far, so that generating the next one costs one token's work."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tpblock.model import Decoder


class KVCache:
    """For each layer and each shard that this rank owns: its keys and values [batch, K_s, max_len, head_dim], allocated at once.

    ``length`` tokens of each sequence are in it; ``Decoder.next_logits`` adds to them.

    Keys are kept as rotated, so the rotary frequencies must not change on the way: those of a :class:`LongRopeScaling` are taken
    for a sequence of ``max_len`` tokens from the first token on.

    Args:
        model: whose keys and values these are; the cache is of its dtype and on its device.
        batch: the number of sequences.
        max_len: the most tokens that a sequence may have, those of the prompt included.
    """

    def __init__(self, model: Decoder, batch: int, max_len: int) -> None:
        config, weight = model.config, model.head_weight
        if model.sequence_parallel:
            raise ValueError("a KV cache needs a model without sequence_parallel, which has no tokens to cut in generation")
        if max_len > config.max_seq_len:
            raise ValueError(f"a KV cache of {max_len} tokens is longer than the model's max_seq_len {config.max_seq_len}")
        self.batch, self.max_len, self.length = batch, max_len, 0
        kv_heads = [shard.kv_heads for shard in model.stack.blocks[0].attention.shards]  # type: ignore[union-attr]
        self.layers = [
            [
                torch.zeros(2, batch, heads, max_len, config.head_dim, dtype=weight.dtype, device=weight.device)
                for heads in kv_heads
            ]
            for _ in range(config.layers)
        ]

    def check(self, batch: int, new: int) -> None:
        """A ValueError unless ``new`` tokens of ``batch`` sequences can be added."""
        if batch != self.batch:
            raise ValueError(f"a KV cache of {self.batch} sequences was given tokens of {batch}")
        if self.length + new > self.max_len:
            raise ValueError(f"{new} tokens after {self.length} overflow a KV cache of {self.max_len}")

    def append(self, layer: int, shard: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores k and v [batch, K_s, new, head_dim] of a layer and local shard after those of the tokens before.

        Returns all there are, [batch, K_s, length + new, head_dim]. ``length`` stays: it counts once all layers have theirs.
        """
        stored = self.layers[layer][shard][..., : self.length + k.shape[2], :]
        stored[0, :, :, self.length :] = k
        stored[1, :, :, self.length :] = v
        return stored[0], stored[1]
