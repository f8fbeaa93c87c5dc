"""Megatron-Core with its local layer specification (no TransformerEngine).

Three forms: plain; with its attention replaced by torch's SDPA, which the others use; and with its fused SwiGLU besides, which
torch.compile makes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.peers.common import EPS, HEAD_DIM, IGNORED, Case, Contender, UnsupportedError, kind, weights

PACKAGES: tuple[str, ...] = ("megatron-core",)

NAMES = {
    "attention.qkv": "self_attention.linear_qkv",
    "attention.out": "self_attention.linear_proj",
    "feedforward.up": "mlp.linear_fc1",
    "feedforward.down": "mlp.linear_fc2",
    "norm_1": "input_layernorm",
    "norm_2": "pre_mlp_layernorm",
}
"""Our names within a block, and its."""


class SDPA(nn.Module):
    """In the place of its DotProductAttention."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:
        """[seq, batch, heads, head_dim] each -> [seq, batch, heads * head_dim]."""
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).flatten(2)


class Megatron(Contender):
    def __init__(self, case: Case, *, sdpa: bool, fused: bool) -> None:
        super().__init__(case)
        ranks = dist.get_world_size()
        config = TransformerConfig(
            num_layers=case.layers,
            hidden_size=case.dim,
            num_attention_heads=case.heads,
            ffn_hidden_size=case.d_ff,
            tensor_model_parallel_size=ranks,
            normalization="RMSNorm",
            layernorm_epsilon=EPS,
            gated_linear_unit=True,
            activation_func=F.silu,
            add_bias_linear=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            bias_activation_fusion=fused,
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=False,
            persist_layer_norm=False,
            use_cpu_initialization=True,
        )
        spec = get_gpt_layer_local_spec(normalization="RMSNorm")
        if sdpa:
            spec.submodules.self_attention.submodules.core_attention = SDPA
        if case.what == "block":
            self.module: nn.Module = TransformerLayer(config, spec.submodules, layer_number=1)
        else:
            self.module = GPTModel(config, spec, case.vocab, case.seq, position_embedding_type="rope")
        self.parameters = {self._name(ours): ours for ours in weights(case)}
        self._fill()
        self.call = self.compiled(self.module)
        angles = torch.arange(case.seq)[:, None] * 10_000.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        self.rotary = torch.cat([angles, angles], -1)[:, None, None]
        self.mask = torch.ones(1, 1, case.seq, case.seq, dtype=torch.bool).triu(1)
        self.positions = torch.arange(case.seq).expand(case.batch, -1)
        self.counts = (self.labels != IGNORED).float()
        self.valid = self.counts.sum()
        self.labels = self.labels.clamp(min=0)  # a label of -100 would give a number and a gradient
        self.x, self.dy = (t.transpose(0, 1).contiguous() for t in (self.x, self.dy))  # its activations are [seq, batch, dim]
        self.x.requires_grad_()

    def _name(self, ours: str) -> str:
        outside = {"embedding": "embedding.word_embeddings", "stack.norm": "decoder.final_layernorm", "head": "output_layer"}
        if kind(ours) in outside:
            return f"{outside[kind(ours)]}.weight"
        prefix = f"decoder.layers.{ours.split('.')[2]}." if self.case.what == "model" else ""
        return f"{prefix}{NAMES[kind(ours)]}.weight"

    @torch.no_grad()
    def _fill(self) -> None:
        """Its qkv goes head by head (q, k, v of one, then of the next), gate and up as ours."""
        rank, ranks, dim, state = dist.get_rank(), dist.get_world_size(), self.case.dim, weights(self.case)
        for name, parameter in self.module.named_parameters():
            value = state[self.parameters[name]]
            match kind(self.parameters[name]):
                case "attention.qkv":
                    by_head = value.view(3, self.case.heads, HEAD_DIM, dim).transpose(0, 1)
                    value = by_head.chunk(ranks)[rank].reshape(-1, dim)
                case "feedforward.up":
                    value = value.view(2, -1, dim).chunk(ranks, 1)[rank].reshape(-1, dim)
                case "attention.out" | "feedforward.down":
                    value = value.chunk(ranks, 1)[rank]
                case "embedding" | "head":
                    value = value.chunk(ranks)[rank]
            parameter.copy_(value)

    def forward(self) -> Tensor:
        if self.case.what == "block":
            return self.call(self.x, attention_mask=self.mask, rotary_pos_emb=self.rotary)[0]
        losses = self.call(self.ids, self.positions, self.mask, labels=self.labels)
        return (losses * self.counts).sum() / self.valid

    def gradients(self) -> Iterator[tuple[str, Tensor | None, bool]]:
        for name, parameter in self.module.named_parameters():
            yield kind(self.parameters[name]), parameter.grad, parameter.ndim == 1

    def whole(self, activation: Tensor) -> Tensor:
        return activation.transpose(0, 1)


def build(case: Case, name: str) -> Contender:
    if case.sequence_parallel:
        raise UnsupportedError("it refuses sequence parallelism with norms of plain torch, and has no others on CPU")
    if not parallel_state.is_initialized():
        # It asks for the CUDA device and its generators wherever it makes a buffer or drops out (with probability 0 here).
        torch.cuda.current_device = lambda: torch.device("cpu")
        tensor_parallel.get_cuda_rng_tracker().fork = contextlib.nullcontext
        parallel_state.initialize_model_parallel(dist.get_world_size())
    return Megatron(case, sdpa=name != "megatron", fused=name == "megatron-fused")
