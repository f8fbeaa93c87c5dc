"""This library: the sequential (pre-norm) block and model, the same over gloo and with torch's own products, and the parallel
block, which sends less often."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from benchmarks.peers.common import EPS, Case, Contender, gathered, kind, weights
from parallel import matmul
from parallel.group import TPGroup
from parallel.regions import split_tokens
from parallel.state import named_layouts, scatter_state
from tpblock import Block, Context, Decoder, ModelConfig, Placement

PACKAGES: tuple[str, ...] = ()


class Ours(Contender):
    def __init__(self, case: Case, placement: Placement, shared_memory: bool) -> None:
        super().__init__(case)
        group, state = replace(TPGroup.from_environment(), shared_memory=shared_memory), weights(case)
        config = ModelConfig(
            vocab_size=case.vocab,
            dim=case.dim,
            layers=case.layers,
            heads=case.heads,
            d_ff=case.d_ff,
            norm_eps=EPS,
            max_seq_len=case.seq,
            placement=placement,
        )
        if placement is Placement.PARALLEL:  # one norm, and the first projections of both sublayers as one matrix
            for i in range(case.layers):
                prefix = f"stack.blocks.{i}"
                del state[f"{prefix}.norm_2.weight"]
                pair = [state.pop(f"{prefix}.{name}.weight") for name in ("attention.qkv", "feedforward.up")]
                state[f"{prefix}.fused.weight"] = torch.cat(pair)
        make = Block if case.what == "block" else Decoder
        module: nn.Module = make(config, group=group, sequence_parallel=case.sequence_parallel, seed=None)
        prefix = "stack.blocks.0." if case.what == "block" else ""
        scatter_state(module, {name.removeprefix(prefix): value for name, value in state.items()}, group)
        self.module, self.call = module, self.compiled(module)
        self.context = Context.build(config, case.batch, case.seq, device=self.x.device, dtype=self.x.dtype)
        if case.sequence_parallel:
            self.x, self.dy = (split_tokens(t.flatten(0, 1), group) for t in (self.x, self.dy))
        self.x.requires_grad_()

    def forward(self) -> Tensor:
        return self.call(self.x, self.context) if self.case.what == "block" else self.call(self.ids, self.labels)

    def gradients(self) -> Iterator[tuple[str, Tensor | None, bool]]:
        for name, parameter, layout in named_layouts(self.module):
            yield kind(name), parameter.grad, layout.replicated

    def whole(self, activation: Tensor) -> Tensor:
        return gathered(activation, 0).view(self.shape) if self.case.sequence_parallel else activation


def build(case: Case, name: str) -> Contender:
    placement = Placement.PARALLEL if name == "tpblock-parallel" else Placement.PRE
    if name == "tpblock-mkl":
        matmul.ONEDNN_IS_FASTER = False
    return Ours(case, placement, shared_memory=name != "tpblock-gloo")
