"""Initial values of a module tree: GPT-2 / Megatron-LM, the same global tensors on any number of ranks.

Source: Radford et al., GPT-2 (2019); Shoeybi et al., Megatron-LM (2019).
"""

from __future__ import annotations

from torch import nn

from parallel import rng
from parallel.group import TPGroup
from parallel.state import named_layouts
from tpblock.attention import Attention
from tpblock.dropout import Dropout
from tpblock.feedforward import FeedForward
from tpblock.norm import LayerNorm, RMSNorm


def initialise(model: nn.Module, group: TPGroup, seed: int = 0, *, std: float = 0.02, layers: int = 1) -> None:
    """Fills every parameter of ``model`` and keys its dropout sites, from ``seed`` and the qualified names alone.

    Weights get N(0, std); the two matrices of a block that write the residual (``attention.out``, ``feedforward.down``) get
    N(0, std / sqrt(2 * layers)), since a stack adds 2 * layers of their outputs; biases zero; norm weights one.
    Works on any tree of these modules. On the meta device there is nothing to fill and the dropout sites are keyed alone: call
    it again after ``to_empty``, or load values.
    """
    residual_writers: set[nn.Parameter] = set()
    norm_parameters: set[nn.Parameter] = set()
    for name, module in model.named_modules():
        if isinstance(module, Attention):
            residual_writers.add(module.out.weight)
        elif isinstance(module, FeedForward):
            residual_writers.add(module.down.weight)
        elif isinstance(module, RMSNorm | LayerNorm):
            norm_parameters.update(module.parameters())
            module.reset_parameters()
        elif isinstance(module, Dropout):
            module.key_stream(seed, name)
    for name, parameter, layout in named_layouts(model):
        if parameter in norm_parameters:
            continue
        if name.rpartition(".")[2] == "bias":
            nn.init.zeros_(parameter)
            continue
        scale = (2 * layers) ** -0.5 if parameter in residual_writers else 1.0
        rng.normal_(parameter, layout, group, seed=seed, name=name, std=std * scale)
