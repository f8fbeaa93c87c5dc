"""What all blocks of one forward pass share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from parallel.rng import check_word
from tpblock.config import ModelConfig, Position
from tpblock.rope import rotary_tables


@dataclass(frozen=True)
class Context:
    """The shape and coordinates of one batch.

    Attributes:
        batch, seq: this replica's batch shape; its ``batch * seq`` tokens in row-major order are what sequence parallelism cuts.
        rotary: cos and sin tables [seq, rotary_dim / 2], float32 or better; None without rotary embeddings.
        step: the number of the training step (or micro-batch): dropout masks are a function of it. Needed only with dropout.
        first_token: the index of this replica's first token in the global batch (data-parallel rank * batch * seq), so that
            replicas draw different masks, the same as one device would for the whole batch.
    """

    batch: int
    seq: int
    rotary: tuple[Tensor, Tensor] | None = None
    step: int | None = None
    first_token: int = 0

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
        dropout = config.dropout or config.attention_dropout
        if training and dropout:
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
    ) -> Context:
        """The context of a batch at positions 0..seq-1, with tables for activations of ``dtype``."""
        if seq > config.max_seq_len:
            raise ValueError(f"a sequence of {seq} tokens is longer than the model's max_seq_len {config.max_seq_len}")
        rotary = None
        if config.position is Position.ROPE:
            positions = torch.arange(seq, device=device)
            rotary = rotary_tables(positions, config.rotary_dim, config.rope_theta, torch.promote_types(dtype, torch.float32))
        return cls(batch, seq, rotary, step, first_token)
