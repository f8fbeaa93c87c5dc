"""The layouts of a module tree, and the way between local shards and global tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from parallel.fsdp import cut_again, held, whole
from parallel.group import TPGroup
from parallel.layout import Layout
from parallel.regions import gather_pieces, take_pieces

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""What torch.compile and its activation checkpointing put into the names of parameters."""


class NamedLayout(NamedTuple):
    name: str
    parameter: nn.Parameter
    layout: Layout


def named_layouts(model: nn.Module) -> Iterator[NamedLayout]:
    """Every parameter of ``model`` once (a tied one under its first name) with its layout.

    Modules that hold cut parameters say so in a dict ``layouts``; a parameter that is in none is replicated. Names are those of
    the model itself, also if it is wrapped (DistributedDataParallel, DeepSpeed's engine, torch.compile). Under FSDP2 the
    parameters are the optimizer's: not to be called between a forward pass and its backward.
    """
    cut_again(model)
    seen: set[nn.Parameter] = set()
    for path, module in unwrapped(model).named_modules():
        prefix = ".".join(word for word in path.split(".") if word not in WRAPPERS)
        layouts = getattr(module, "layouts", {})
        for key, parameter in module.named_parameters(recurse=False):
            if parameter in seen:
                continue
            seen.add(parameter)
            layout = layouts.get(key, Layout(tuple(parameter.shape)))
            yield NamedLayout(f"{prefix}.{key}" if prefix else key, parameter, layout)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model in DistributedDataParallel, torch.compile's module or DeepSpeed's engine; a plain one is itself."""
    while type(model).__name__ in ("DistributedDataParallel", "DeepSpeedEngine"):
        model = model.module  # type: ignore[assignment]
    return model


@torch.no_grad()
def global_tensors(model: nn.Module, group: TPGroup) -> Iterator[tuple[str, Tensor]]:
    """Each parameter's name and global tensor, on every rank, one at a time. All ranks go through it together."""
    for name, parameter, layout in named_layouts(model):
        yield name, gather_pieces(whole(parameter.detach()), layout, group)


@torch.no_grad()
def gather_state(model: nn.Module, group: TPGroup, *, gradients: bool = False) -> dict[str, Tensor]:
    """The global tensor of every parameter (or of its gradient), on every rank. For models that fit on one device."""
    state = {}
    for name, parameter, layout in named_layouts(model):
        value = parameter.grad if gradients else parameter
        if value is not None:
            state[name] = gather_pieces(whole(value.detach()), layout, group).clone()
    return state


@torch.no_grad()
def scatter_state(model: nn.Module, state: dict[str, Tensor], group: TPGroup) -> None:
    """Copies this rank's shard of each global tensor into ``model``.

    Raises a ValueError naming the tensor, before anything is changed, if one is missing, unknown or of another shape.
    """
    entries = list(named_layouts(model))
    names = {entry.name for entry in entries}
    if missing := sorted(names - state.keys()):
        raise ValueError(f"the state lacks {', '.join(missing)}")
    if unknown := sorted(state.keys() - names):
        raise ValueError(f"the state has tensors that the model lacks: {', '.join(unknown)}")
    for name, _, layout in entries:
        if tuple(state[name].shape) != layout.shape:
            raise ValueError(f"{name} has shape {tuple(state[name].shape)}, the model's is {layout.shape}")
    for name, parameter, layout in entries:
        local, rows, _ = held(parameter)
        local.copy_(take_pieces(state[name], layout, group.rank)[slice(*rows)] if local.ndim else state[name])
