"""RMSNorm and LayerNorm, with statistics in float32 or better whatever the activations' dtype."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from parallel.matmul import transformed
from parallel.regions import copies_for_ranks
from parallel.virtual import by_token_shard
from tpblock.config import ModelConfig, Norm, Parallelism


class TokenNorm(nn.Module):
    """What the norms share: each token is normalised alone, and the parameters' gradients are summed over all tokens.

    Under sequence parallelism a rank sees only its tokens, and the sum goes over the ranks.
    """

    biased: ClassVar[bool]

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
        if self.biased:
            self.bias = nn.Parameter(torch.zeros(dim, device=device, dtype=dtype))

    def normalize(self, x: Tensor, *parameters: Tensor) -> Tensor:
        """The norm of x [..., dim] with the parameters given, in the order of ``self.parameters()``."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Weight one, bias zero: at first the norm only normalises."""
        for name, parameter in self.named_parameters():
            nn.init.constant_(parameter, 1.0 if name == "weight" else 0.0)

    def forward(self, x: Tensor, tokens: int | None = None) -> Tensor:
        """x [..., dim] or, under sequence parallelism, this rank's rows of ``tokens`` tokens -> the same shape."""
        group, reduce_dtype = self.parallel.group, self.parallel.reduce_dtype
        parameters = [self.weight, self.bias] if self.biased else [self.weight]
        if group.invariant:
            if not self.parallel.sequence_parallel:
                tokens = None
            elif tokens is None:
                raise ValueError(
                    "with sequence parallelism, invariant mode needs the number of tokens on all ranks: norm(x, tokens)"
                )
            return by_token_shard(self.normalize, [x], parameters, group=group, tokens=tokens, reduce_dtype=reduce_dtype)
        if self.parallel.sequence_parallel and group.size > 1:
            return self.normalize(x, *copies_for_ranks(parameters, group, reduce_dtype))
        return self.normalize(x, *parameters)


class _RMSNorm(Function):
    """RMSNorm where torch has no kernel of its own for it, and goes over the tokens for each step of the formula: on the CPU.

    ::

        r  = 1 / sqrt(mean(x^2) + eps)        [..., 1], all that is kept beside x and w
        y  = x r w                            [..., d]
        dw = sum over tokens of dy x r        [d]
        dx = dy w r - x r^3 (dy x . w) / d    [..., d]
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        r = _one_over_rms(x, eps)
        ctx.save_for_backward(x, weight, r)
        ctx.eps = eps
        return x * r if weight is None else (x * r).mul_(weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, r = ctx.saved_tensors
        again = torch.is_grad_enabled()  # It is to be differentiated itself: r depends on x, and nothing may be overwritten.
        r = _one_over_rms(x, ctx.eps) if again else r
        need_dx, need_dw, _ = ctx.needs_input_grad
        dx = dw = None
        product, by_token = (dy * x).reshape(-1, x.shape[-1]), r.reshape(-1, 1)
        if need_dx:
            inner = product.sum(-1) if weight is None else product.mv(weight)
            along = inner.view(r.shape) * r.pow(3) / -x.shape[-1]
        if need_dw:
            dw = (product * by_token if again else product.mul_(by_token)).sum(0)
        del product  # before there is another of its size
        if need_dx:
            dx = (dy * r if weight is None else (dy * weight).mul_(r)).addcmul_(x, along)
        return dx, dw, None


def _rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm of x in float32 or float64."""
    eager = not (torch.compiler.is_compiling() or transformed())
    if eager and x.device.type == "cpu" and (weight is None or weight.dtype == x.dtype):
        return _RMSNorm.apply(x, weight, eps)
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def _one_over_rms(x: Tensor, eps: float) -> Tensor:
    return (x.square().mean(-1, keepdim=True) + eps).rsqrt()


class RMSNorm(TokenNorm):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang & Sennrich, 2019).

    The normalised value is rounded to the dtype of x before the product with the weight, as Llama does.
    """

    biased = False

    def normalize(self, x: Tensor, *parameters: Tensor) -> Tensor:
        (weight,) = parameters
        if x.dtype in (torch.float32, torch.float64):
            return _rms_norm(x, weight, self.eps)
        return _rms_norm(x.float(), None, self.eps).to(x.dtype) * weight


class LayerNorm(TokenNorm):
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dimension (Ba et al., 2016).

    torch keeps the statistics of half dtypes in float32.
    """

    biased = True

    def normalize(self, x: Tensor, *parameters: Tensor) -> Tensor:
        weight, bias = parameters
        return F.layer_norm(x, weight.shape, weight, bias, self.eps)


def make_norm(
    config: ModelConfig, parallel: Parallelism, device: torch.device | str | None, dtype: torch.dtype | None
) -> TokenNorm:
    """The norm that ``config`` names."""
    kind = RMSNorm if config.norm is Norm.RMSNORM else LayerNorm
    return kind(config.dim, config.norm_eps, device, dtype, parallel=parallel)
