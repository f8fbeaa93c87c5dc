"""What all blocks of one forward pass share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from parallel.rng import check_word
from tpblock.cache import KVCache
from tpblock.config import ModelConfig, Position
from tpblock.rope import rotary_tables


class Keys(NamedTuple):
    """The keys that the tokens of a forward pass read: those from position ``first`` on, of them those of ``mask`` [seq, keys].

    Without a mask several tokens read causally from position 0, and a single one reads all.
    """

    first: int = 0
    mask: Tensor | None = None

    @classmethod
    def of(cls, start: int, seq: int, window: int | None, device: torch.device) -> Keys:
        """For tokens at positions start..start+seq-1, each of which attends to itself and the ``window - 1`` before it."""
        first = 0 if window is None else max(0, start - window + 1)
        if seq == 1 or (start == 0 and (window is None or seq <= window)):
            return cls(first)
        token, key = torch.arange(start, start + seq, device=device)[:, None], torch.arange(first, start + seq, device=device)
        mask = key <= token
        return cls(first, mask if window is None else mask & (key > token - window))


@dataclass(frozen=True)
class Context:
    """The shape and coordinates of one batch.

    Attributes:
        batch, seq: this replica's batch shape; its ``batch * seq`` tokens in row-major order are what sequence parallelism cuts.
        rotary: cos and sin tables [seq, rotary_dim / 2], float32 or better; None without rotary embeddings.
        step: the number of the training step (or micro-batch): dropout masks are a function of it. Needed only with dropout.
        first_token: the index of this replica's first token in the global batch (data-parallel rank * batch * seq), so that
            replicas draw different masks, the same as one device would for the whole batch.
        start: the position of each sequence's first token.
        cache: keys and values of the ``start`` tokens before, to which each layer adds its own; None: there are none.
        window: the model's sliding window.
        keys, window_keys: what tokens read in layers without and with the window.
    """

    batch: int
    seq: int
    rotary: tuple[Tensor, Tensor] | None = None
    step: int | None = None
    first_token: int = 0
    start: int = 0
    cache: KVCache | None = None
    window: int | None = None
    keys: Keys = Keys()
    window_keys: Keys = Keys()

    @property
    def tokens(self) -> int:
        return self.batch * self.seq

    def check(self, config: ModelConfig, training: bool) -> None:
        """A ValueError if a model of ``config`` lacks something here, or would ignore something."""
        if (self.rotary is not None) != (config.position is Position.ROPE):
            raise ValueError(
                f"a Context without rotary tables, {config.position} needs them: use Context.build"
                if self.rotary is None
                else f"a Context with rotary tables, {config.position} has no use for them"
            )
        if self.window != config.sliding_window:
            raise ValueError(
                f"a Context for a sliding window of {self.window}, the model's is {config.sliding_window}: use Context.build"
            )
        dropout = config.dropout or config.attention_dropout
        if training and dropout:
            if self.cache is not None:
                raise ValueError(f"a KV cache cannot be used in training with dropout {dropout}: call model.eval() first")
            if self.step is None:
                raise ValueError(f"dropout {dropout} in training needs step=...: its masks are a function of the step")
            if not isinstance(self.step, Tensor):
                check_word("dropout step", self.step)
            check_word("first token", self.first_token)
            if config.attention_dropout and self.first_token % max(self.seq, 1):
                raise ValueError(
                    f"first_token {self.first_token} is not the beginning of a sequence of {self.seq} tokens, "
                    "where the masks of attention dropout begin"
                )

    @classmethod
    def build(
        cls,
        config: ModelConfig,
        batch: int,
        seq: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        step: int | None = None,
        first_token: int = 0,
        cache: KVCache | None = None,
    ) -> Context:
        """The context of a batch, with tables for activations of ``dtype``, at positions 0..seq-1 or after those in ``cache``."""
        if seq > config.max_seq_len:
            raise ValueError(f"a sequence of {seq} tokens is longer than the model's max_seq_len {config.max_seq_len}")
        start, total = 0, seq
        if cache is not None:
            cache.check(batch, seq)
            start, total = cache.length, cache.max_len
        rotary = None
        if config.position is Position.ROPE:
            rotary = rotary_tables(
                torch.arange(start, start + seq, device=device),
                config.rotary_dim,
                config.rope_theta,
                torch.promote_types(dtype, torch.float32),
                scaling=config.rope_scaling,
                total=total,
            )
        window = config.sliding_window
        keys, window_keys = (Keys.of(start, seq, reach, device) for reach in (None, window))
        return cls(batch, seq, rotary, step, first_token, start, cache, window, keys, window_keys)
