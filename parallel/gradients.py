"""Gradient norm and clipping that count every global element once, and checks that replicas agree."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from parallel import collectives
from parallel.group import TPGroup
from parallel.layout import Layout
from parallel.regions import replace_shared_rows, shared_rows
from parallel.state import NamedLayout, named_layouts


@torch.no_grad()
def grad_norm(model: nn.Module, group: TPGroup, p: float = 2.0) -> Tensor:
    """The p-norm (p = 1, 2 or inf) of all gradients as one global vector, a 0-d tensor that is the same on every rank.

    Replicated parameters count once, and so do rows that several ranks hold. Powers are summed in float32, or float64 for
    float64 gradients. One all-reduce of one number.

    Raises:
        ValueError: for another p, or if no parameter has a gradient.
    """
    if p not in (1.0, 2.0, math.inf):
        raise ValueError(f"the gradient norm is defined for p = 1, 2 and inf, got {p}")
    norms = [
        torch.linalg.vector_norm(piece, p, dtype=torch.promote_types(piece.dtype, torch.float32))
        for _, parameter, layout in named_layouts(model)
        if parameter.grad is not None
        for piece in counted_pieces(parameter.grad, layout, group)
    ]
    if all(parameter.grad is None for parameter in model.parameters()):
        raise ValueError("no parameter has a gradient: call grad_norm after loss.backward()")
    device = next(model.parameters()).device
    dtype = torch.float64 if any(n.dtype == torch.float64 for n in norms) else torch.float32
    local = torch.stack([n.to(dtype) for n in norms]) if norms else torch.zeros(1, dtype=dtype, device=device)
    if p == math.inf:
        return collectives.all_reduce(local.max(), group, "max")
    total = collectives.all_reduce(local.pow(p).sum(), group)
    return total.pow(1 / p)


def counted_pieces(value: Tensor, layout: Layout, group: TPGroup) -> list[Tensor]:
    """The views of a local tensor that this rank answers for, so that over all ranks every global element comes up once."""
    if layout.dim is None:
        return [value] if group.rank == 0 else []
    owned = layout.owned(group.rank)
    if len(owned) == len(layout.parts):
        return [value]
    return [value.narrow(layout.dim, piece.local, piece.length) for piece in owned]


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float, group: TPGroup, p: float = 2.0) -> Tensor:
    """Scales all gradients so that their global p-norm is at most ``max_norm``; returns the norm before clipping.

    The factor is ``min(1, max_norm / (norm + 1e-6))``, as in ``torch.nn.utils.clip_grad_norm_``.
    """
    norm = grad_norm(model, group, p)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    for grad in grads:
        grad.mul_(factor.to(grad.dtype))
    return norm


@torch.no_grad()
def check_replicas(model: nn.Module, group: TPGroup) -> None:
    """Checks that whatever several ranks hold is the same to the bit on all of them.

    Raises a ValueError on every rank that names each parameter whose copies differ, with the largest difference.
    """
    names, spreads = [], []
    for name, parameter, layout in _held_by_several(model, group):
        reference = _first_holders(parameter, layout, group)
        differs = (parameter.view(torch.uint8) != reference.view(torch.uint8)).any()
        spread = (parameter - reference).abs().max().double()
        names.append(name)
        spreads.append(torch.where(differs, spread.clamp_min(torch.finfo(torch.float64).tiny), 0.0))
    if not names:
        return
    largest = collectives.all_reduce(torch.stack(spreads), group, "max").tolist()
    found = [f"{name} (by up to {spread:.3g})" for name, spread in zip(names, largest, strict=True) if spread != 0]
    if found:
        raise ValueError(f"{len(found)} parameters differ between the ranks that hold them: {', '.join(found)}")


@torch.no_grad()
def sync_replicated(model: nn.Module, group: TPGroup) -> None:
    """Gives whatever several ranks hold the values of its first holder, on all of them."""
    for _, parameter, layout in _held_by_several(model, group):
        parameter.copy_(_first_holders(parameter, layout, group))


def _held_by_several(model: nn.Module, group: TPGroup) -> list[NamedLayout]:
    return [e for e in named_layouts(model) if e.layout.shared or (e.layout.replicated and group.size > 1)]


def _first_holders(value: Tensor, layout: Layout, group: TPGroup) -> Tensor:
    """``value`` with its first holder's bits wherever several ranks hold it. Sums bytes to which one rank alone contributes."""
    if layout.replicated:
        octets = value.contiguous().view(torch.uint8)
        return collectives.all_reduce(octets if group.rank == 0 else torch.zeros_like(octets), group).view(value.dtype)
    octets = value.unsqueeze(-1).contiguous().view(torch.uint8)
    first = collectives.all_reduce(shared_rows(octets, layout, layout.owned(group.rank)), group)
    return replace_shared_rows(octets, first, layout, group).view(value.dtype).squeeze(-1)
