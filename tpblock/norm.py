"""RMSNorm and LayerNorm, with statistics in float32 or better whatever the activations' dtype."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parallel.regions import copy_to_ranks
from tpblock.config import ModelConfig, Norm, Parallelism


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang & Sennrich, 2019).

    The normalised value is rounded to the dtype of x before the product with the weight, as Llama does.
    Under sequence parallelism each rank sees its tokens only, and the weight's gradient is summed over the ranks.
    """

    def __init__(
        self,
        dim: int,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        parallel: Parallelism = Parallelism(),
    ) -> None:
        super().__init__()
        self.eps, self.parallel = eps, parallel
        self.weight = nn.Parameter(torch.ones(dim, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def normalize(self, x: Tensor, weight: Tensor) -> Tensor:
        """The norm of x [..., dim] with the weight given."""
        if x.dtype in (torch.float32, torch.float64):
            return F.rms_norm(x, weight.shape, weight, self.eps)
        return F.rms_norm(x.float(), weight.shape, None, self.eps).to(x.dtype) * weight

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if self.parallel.sequence_parallel:
            weight = copy_to_ranks(weight, group=self.parallel.group)
        return self.normalize(x, weight)


class LayerNorm(nn.Module):
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dimension (Ba et al., 2016)."""

    def __init__(
        self,
        dim: int,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        parallel: Parallelism = Parallelism(),
    ) -> None:
        super().__init__()
        self.eps, self.parallel = eps, parallel
        self.weight = nn.Parameter(torch.ones(dim, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(dim, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def normalize(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """The norm of x [..., dim] with the weight and bias given (torch keeps the statistics of half dtypes in float32)."""
        return F.layer_norm(x, weight.shape, weight, bias, self.eps)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if self.parallel.sequence_parallel:
            weight, bias = copy_to_ranks(weight, bias, group=self.parallel.group)
        return self.normalize(x, weight, bias)


def make_norm(
    config: ModelConfig, parallel: Parallelism, device: torch.device | str | None, dtype: torch.dtype | None
) -> RMSNorm | LayerNorm:
    """The norm that ``config`` names."""
    kind = RMSNorm if config.norm is Norm.RMSNORM else LayerNorm
    return kind(config.dim, config.norm_eps, device, dtype, parallel=parallel)
