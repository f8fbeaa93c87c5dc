"""transformers: its LlamaForCausalLM with SDPA attention, cut by its own ``tp_plan="auto"``."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

from benchmarks.peers.common import EPS, HEAD_DIM, Case, Contender, UnsupportedError, full, separate, separate_kind, weights

PACKAGES: tuple[str, ...] = ("transformers",)


def llama_config(case: Case) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=case.vocab,
        hidden_size=case.dim,
        intermediate_size=case.d_ff,
        num_hidden_layers=case.layers,
        num_attention_heads=case.heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=case.seq,
        rms_norm_eps=EPS,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
    )


def llama(case: Case) -> LlamaForCausalLM:
    """The uncut model; of a block's case only the layer has its weights."""
    model = LlamaForCausalLM(llama_config(case))
    model.load_state_dict(separate(weights(case)), strict=case.what == "model")
    return model


class Llama(Contender):
    """A LlamaForCausalLM that something has cut; of it, in a block's case, the first layer."""

    def __init__(self, case: Case, model: nn.Module) -> None:
        super().__init__(case)
        with torch.device("meta"):
            self.shapes = {name: p.shape for name, p in LlamaForCausalLM(llama_config(case)).named_parameters()}
        self.names = {parameter: name for name, parameter in model.named_parameters()}
        self.module = model if case.what == "model" else model.model.layers[0]
        self.call = self.compiled(self.module)
        self.rotary = model.model.rotary_emb(self.x, torch.arange(case.seq)[None])
        self.x.requires_grad_()

    def forward(self) -> Tensor:
        if self.case.what == "model":
            return self.call(input_ids=self.ids, labels=self.ids).loss  # which it shifts itself
        y = self.call(self.x, position_embeddings=self.rotary)
        return y[0] if isinstance(y, tuple) else y

    def gradients(self) -> Iterator[tuple[str, Tensor | None, bool]]:
        for parameter in self.module.parameters():
            name = self.names[parameter]
            yield separate_kind(name), parameter.grad, parameter.shape == self.shapes[name]

    def whole(self, activation: Tensor) -> Tensor:
        return full(activation)


def build(case: Case, name: str) -> Contender:
    if case.sequence_parallel:
        raise UnsupportedError("its tp_plan of Llama has no sequence parallelism")
    with tempfile.TemporaryDirectory() as folder:
        llama_config(case).to_json_file(Path(folder, "config.json"))  # save_pretrained would write on the first rank alone
        save_file(llama(case).state_dict(), Path(folder, "model.safetensors"), metadata={"format": "pt"})
        model = LlamaForCausalLM.from_pretrained(
            folder, distributed_config=DistributedConfig(tp_plan="auto"), attn_implementation="sdpa", dtype=torch.float32
        )
    return Llama(case, model.train())
