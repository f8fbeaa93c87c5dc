"""torch's DTensor: a Llama of plain torch.nn, cut by ``parallelize_module``.

The plan is the best that it offers without private interfaces: attention and feed-forward each take their input once (so that
its gradient is summed once, not for every linear), q, k, v, gate and up are cut along their output, the two others along their
input. A fused qkv or gate and up cannot be cut so. With sequence parallelism the norms work on a shard of each sequence; their
weights' gradients are summed over the ranks only in the optimizer's step. The model's embedding, head and loss are cut along the
vocabulary (``loss_parallel``).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F

from benchmarks.peers.common import (
    EPS,
    HEAD_DIM,
    Case,
    Contender,
    UnsupportedError,
    gathered,
    separate,
    separate_kind,
    weights,
)
from benchmarks.plain import rotate

PACKAGES: tuple[str, ...] = ()


class Attention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (-1, HEAD_DIM)) for linear in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, dim: int, d_ff: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(dim, d_ff, bias=False), nn.Linear(dim, d_ff, bias=False)
        self.down_proj = nn.Linear(d_ff, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(case.dim, EPS), nn.RMSNorm(case.dim, EPS)
        self.self_attn, self.mlp = Attention(case.dim), FeedForward(case.dim, case.d_ff)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """Without embedding and head if the case is a block. Its names are those of transformers."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(Layer(case) for _ in range(case.layers))
        self.whole = case.what == "model"
        if self.whole:
            self.model.embed_tokens, self.model.norm = nn.Embedding(case.vocab, case.dim), nn.RMSNorm(case.dim, EPS)
            self.lm_head = nn.Linear(case.dim, case.vocab, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.whole:
            x = self.model.embed_tokens(x)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return self.lm_head(self.model.norm(x)) if self.whole else x


class ByDTensor(Contender):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        ranks = dist.get_world_size()
        if case.sequence_parallel and case.seq % ranks:
            raise UnsupportedError(f"{case.seq} tokens a sequence on {ranks} ranks")
        self.module = Llama(case)
        self.module.load_state_dict(separate(weights(case)))
        residual = Shard(1) if case.sequence_parallel else Replicate()
        rowwise = RowwiseParallel(output_layouts=residual)
        layer = {
            "self_attn": PrepareModuleInput(
                input_layouts=(residual, None, None), desired_input_layouts=(Replicate(), None, None), use_local_output=False
            ),
            "mlp": PrepareModuleInput(input_layouts=(residual,), desired_input_layouts=(Replicate(),), use_local_output=False),
            **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
            **{f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
            "self_attn.o_proj": rowwise,
            "mlp.down_proj": rowwise,
        }
        if case.sequence_parallel:
            layer |= {"input_layernorm": SequenceParallel(), "post_attention_layernorm": SequenceParallel()}
        plan = {f"model.layers.{i}.{name}": style for i in range(case.layers) for name, style in layer.items()}
        if case.what == "model":
            plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=residual)
            plan["lm_head"] = ColwiseParallel(input_layouts=residual, output_layouts=Shard(-1), use_local_output=False)
            if case.sequence_parallel:
                plan["model.norm"] = SequenceParallel()
        parallelize_module(self.module, init_device_mesh("cpu", (ranks,)), plan)
        self.call = self.compiled(self.module)
        angles = torch.arange(case.seq)[:, None] * 10_000.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        self.cos, self.sin = angles.cos()[:, None], angles.sin()[:, None]
        if case.sequence_parallel:
            self.x, self.dy = (t.chunk(ranks, 1)[dist.get_rank()].contiguous() for t in (self.x, self.dy))
        self.x.requires_grad_()

    def forward(self) -> Tensor:
        if self.case.what == "block":
            return self.call(self.x, self.cos, self.sin)
        logits = self.call(self.ids, self.cos, self.sin)
        with loss_parallel():
            return F.cross_entropy(logits.flatten(0, 1), self.labels.flatten())

    def backward(self, out: Tensor) -> None:
        with loss_parallel():
            super().backward(out)

    def gradients(self) -> Iterator[tuple[str, Tensor | None, bool]]:
        for name, parameter in self.module.named_parameters():
            yield separate_kind(name), parameter.grad, parameter.ndim == 1

    def whole(self, activation: Tensor) -> Tensor:
        return gathered(activation, 1) if self.case.sequence_parallel else activation


def build(case: Case, name: str) -> Contender:
    return ByDTensor(case)
