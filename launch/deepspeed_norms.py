"""What DeepSpeed's optimizers add up for the norm of all gradients, corrected for tensor parallelism.

Each of its optimizers (ZeRO stage 1 or 2, stage 3, bfloat16 and float16 without ZeRO) has a norm of its own. The tag on cut
parameters makes most of them right; what it leaves wrong is replaced on the optimizer that an engine has made. launch.deepspeed,
which calls this, says where DeepSpeed is imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from parallel.gradients import grad_norm
from parallel.state import named_layouts


class SharedRows:
    """What several tensor-parallel ranks hold of some parameters (KV heads, when there are fewer of them than ranks).

    DeepSpeed's norm counts a tagged parameter on every rank. It is therefore given gradients in which the rows are zero that an
    earlier rank holds, too: what it adds up is then each row once.
    """

    def __init__(self, model: nn.Module, rank: int) -> None:
        self.rank = rank
        self.layouts = {parameter: layout for _, parameter, layout in named_layouts(model) if layout.shared}

    def once(self, gradient: Tensor, parameter: nn.Parameter, start: int = 0) -> Tensor:
        """The elements of the flattened gradient from ``start`` on, repeated rows zeroed; itself if there are none.

        Elements beyond the parameter's are padding.
        """
        layout = self.layouts.get(parameter)
        if layout is None:
            return gradient
        assert layout.dim is not None
        shape, end = torch.Size(layout.local_shape(self.rank)), start + gradient.numel()
        flat = gradient.new_zeros(max(end, shape.numel()))
        flat[start:end] = gradient.flatten()
        whole, owned = flat[: shape.numel()].view(shape), set(layout.owned(self.rank))
        for piece in layout.pieces(self.rank):
            if piece not in owned:
                whole.narrow(layout.dim, piece.local, piece.length).zero_()
        return flat[start:end]


def correct_norms(engine: Any) -> None:
    """Has the optimizer of a TensorParallelEngine count every element of the gradient once, where it would not.

    Stages 1 to 3 are right but for shared rows. Without ZeRO, in half precision, the tags are lost (the unfused optimizer takes
    the norm of gradients, not of parameters), and ours is used. In float32 see ``clip_fp32_gradients``.
    """
    optimizer, shared = engine.optimizer, SharedRows(engine.module, engine.tp_group.rank)
    if isinstance(optimizer, FP16_UnfusedOptimizer):
        _use_our_norm(engine, optimizer)
    elif not shared.layouts:
        return
    elif isinstance(optimizer, BF16_Optimizer):
        _correct_bf16(optimizer, shared)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer):
        _correct_stages_1_and_2(optimizer, shared)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        _correct_stage_3(optimizer, shared)


def _use_our_norm(engine: Any, optimizer: Any) -> None:
    unscale_and_clip_grads = optimizer.unscale_and_clip_grads

    def with_our_norm(_: Any, apply_scale: bool = True) -> Any:
        scaled = float(grad_norm(engine.module, engine.tp_group))  # of gradients of the loss times the loss scale
        optimizer._global_grad_norm = scaled / optimizer.loss_scale_config.cur_scale
        return unscale_and_clip_grads(scaled, apply_scale)

    optimizer.unscale_and_clip_grads = with_our_norm


def _correct_bf16(optimizer: Any, shared: SharedRows) -> None:
    get_grads_for_norm = optimizer.get_grads_for_norm

    def counted(for_clipping: bool = False) -> Any:
        if for_clipping:
            return get_grads_for_norm(for_clipping)
        gradients, experts = get_grads_for_norm()
        groups = zip(optimizer.fp32_groups_gradients, optimizer.bf16_groups, strict=True)
        of = {id(g): p for gs, ps in groups for g, p in zip(gs, ps, strict=True)}
        return [shared.once(gradient, of[id(gradient)]) for gradient in gradients], experts

    optimizer.get_grads_for_norm = counted


def _correct_stages_1_and_2(optimizer: Any, shared: SharedRows) -> None:
    """A partition is a run of the flattened parameters: it may begin and end within one."""
    get_grad_norm_direct = optimizer.get_grad_norm_direct

    def counted(gradients: list[Tensor], params: list[nn.Parameter], norm_type: float = 2) -> Any:
        first = next(o for o, p in zip(optimizer.first_offset, optimizer.params_in_partition, strict=True) if p is params)
        pairs = _without_padding(gradients, params)
        once = [shared.once(g, p, first if i == 0 else 0) for i, (g, p) in enumerate(pairs)]
        return get_grad_norm_direct(once, params, norm_type)

    optimizer.get_grad_norm_direct = counted


def _without_padding(gradients: list[Tensor], params: list[nn.Parameter]) -> Iterator[tuple[Tensor, nn.Parameter]]:
    return zip((g for g in gradients if not getattr(g, "_zero_padding", False)), params, strict=False)


def _correct_stage_3(optimizer: Any, shared: SharedRows) -> None:
    """Each parameter is flattened, padded and cut on its own."""
    get_grad_norm_direct = optimizer.get_grad_norm_direct

    def counted(gradients: list[Tensor], params: list[Any], norm_type: float = 2) -> Any:
        starts = [parameter.partition_numel() * optimizer._get_param_partition_rank(parameter) for parameter in params]
        once = [shared.once(g, p, start) for g, p, start in zip(gradients, params, starts, strict=True)]
        return get_grad_norm_direct(once, params, norm_type)

    optimizer.get_grad_norm_direct = counted
