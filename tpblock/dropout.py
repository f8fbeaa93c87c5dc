"""Dropout whose mask is a function of (seed, site, step, global coordinates): the same on any number of ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from parallel import rng
from tpblock.context import Context


class Dropout(nn.Module):
    """Zeroes elements with probability p in training and scales the rest by 1/(1-p).

    ``key_stream`` must be called once (``initialise`` does) before it is used in training.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.key: Tensor | None = None  # no buffer, which to_empty would wipe

    def key_stream(self, seed: int, name: str) -> None:
        """Ties the masks to (seed, name); ``name`` is the module's path in the model."""
        self.key = torch.tensor(rng.stream_key(seed, name)[0], device="cpu")

    @property
    def active(self) -> bool:
        """Whether it would change anything."""
        return self.training and self.p > 0

    def forward(
        self, x: Tensor, context: Context, *, offset: int, run: int | None = None, stride: int | None = None
    ) -> Tensor:
        """x with elements dropped; ``offset``, ``run``, ``stride`` give its global coordinates as in ``rng.dropout``."""
        if not self.active:
            return x
        if self.key is None:
            raise ValueError("dropout has no stream yet: call tpblock.initialise(model, seed) first")
        if context.step is None:
            raise ValueError(f"dropout {self.p} in training needs step=...: its masks are a function of the step")
        return rng.dropout(x, self.p, key=self.key, step=context.step, offset=offset, run=run, stride=stride)

    def extra_repr(self) -> str:
        return f"p={self.p}"
