"""Gradient norm and clipping that count every global element once, and checks that replicas agree."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel import collectives
from parallel.fsdp import held, is_sharded, overlap, whole
from parallel.group import TPGroup
from parallel.layout import Layout, Piece, Run
from parallel.regions import replace_shared_rows, shared_rows
from parallel.state import NamedLayout, named_layouts
from parallel.virtual import aligned


@torch.no_grad()
def grad_norm(model: nn.Module, group: TPGroup, p: float = 2.0) -> Tensor:
    """The p-norm (p = 1, 2 or inf) of all gradients as one global vector, a 0-d tensor that is the same on every rank.

    Replicated parameters count once, and so do rows that several ranks hold. Powers are summed in float32, or float64 for
    float64 gradients. One collective, of one number, or in invariant mode of one a shard and parameter; under FSDP2 one more,
    over the replicas.

    Raises:
        ValueError: for another p, if no parameter has a gradient, or if the group's virtual shards are not the model's.
    """
    if p not in (1.0, 2.0, math.inf):
        raise ValueError(f"the gradient norm is defined for p = 1, 2 and inf, got {p}")
    entries = [(e.parameter.grad, e.layout) for e in named_layouts(model) if e.parameter.grad is not None]
    if not entries:
        raise ValueError("no parameter has a gradient: call grad_norm after loss.backward()")
    replicated = [grad for grad, layout in entries if layout.replicated]
    cut = [(grad, layout) for grad, layout in entries if not layout.replicated]
    for _, layout in cut:
        if (layout.owners is not None) != group.invariant or layout.rank_shards != group.owners:
            mode = f"{len(layout.parts[0].runs)} {'virtual ' if layout.owners else ''}shards"
            raise ValueError(
                f"the model is cut into {mode}, the group given into {group.shards} {'virtual ' if group.invariant else ''}shards: "
                "pass the group that the model was built with (Decoder.group)"
            )
    if group.invariant and any(is_sharded(grad) for grad, _ in entries):
        raise ValueError("FSDP2 adds gradients up in an order that depends on the number of ranks: not for invariant mode")
    if group.invariant and cut:
        total = _invariant_power(replicated, cut, group, p)
    else:
        total = _combined(_local_power(entries, group, p), group, p)
    norm = total if p == math.inf else total.pow(1 / p)
    return norm.to(torch.float64 if any(grad.dtype == torch.float64 for grad, _ in entries) else torch.float32)


def _local_power(entries: Sequence[tuple[Tensor, Layout]], group: TPGroup, p: float) -> Tensor:
    """The power of what this TP rank counts: what it owns, and on the first rank what is replicated."""
    by_replicas: dict[dist.ProcessGroup | None, list[Tensor]] = {None: []}
    for grad, layout in entries:
        local, rows, replicas = held(grad)
        counted = by_replicas.setdefault(replicas, [])
        if layout.replicated:
            counted += [local] if group.rank == 0 else []
        elif layout.dim == 0:
            runs = [overlap(Run(piece.local, piece.local + piece.length), rows) for piece in layout.owned(group.rank)]
            counted += [local[slice(*run)] for run in runs]
        else:
            counted += _owned_views(local, layout, layout.owned(group.rank))
    device = held(entries[0][0]).tensor.device
    powers = []
    for replicas, counted in by_replicas.items():
        power = _power([tensor for tensor in counted if tensor.numel()], p, device)
        powers.append(power if replicas is None else _combined(power, TPGroup.from_process_group(replicas), p))
    return _total([power.view(1) for power in powers], p)


def _combined(power: Tensor, group: TPGroup, p: float) -> Tensor:
    return _largest(power, group) if p == math.inf else collectives.all_reduce(power, group)


def _invariant_power(replicated: list[Tensor], cut: list[tuple[Tensor, Layout]], group: TPGroup, p: float) -> Tensor:
    """The same for any number of ranks: each shard's power of each parameter is computed on its own and gathered, and all
    ranks add them up alike."""
    shards = []
    for i in range(len(group.local_shards)):
        powers = []
        for grad, layout in cut:
            owned = set(layout.owned(group.rank))
            mine = [piece for piece in layout.pieces_by_shard(group.rank)[i] if piece in owned]
            views = [aligned(view) for view in _owned_views(grad, layout, mine)]
            powers.append(_power(views, p, grad.device))
        shards.append(torch.stack(powers))
    everyone = collectives.all_gather(torch.stack(shards), group, [run.length for run in group.owners])
    return _total([everyone.flatten(), *(_power([grad], p, grad.device).view(1) for grad in replicated)], p)


def _owned_views(value: Tensor, layout: Layout, pieces: Sequence[Piece]) -> list[Tensor]:
    assert layout.dim is not None
    return [value.narrow(layout.dim, piece.local, piece.length) for piece in pieces]


def _power(tensors: list[Tensor], p: float, device: torch.device) -> Tensor:
    """The sum of |x|^p over all elements (the maximum of |x| for p = inf), of norms in float32 or better. 0-d, float64."""
    norms = [torch.linalg.vector_norm(t, p, dtype=torch.promote_types(t.dtype, torch.float32)).double() for t in tensors]
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(norms).amax() if p == math.inf else torch.stack(norms).pow(p).sum()


def _total(powers: list[Tensor], p: float) -> Tensor:
    flat = torch.cat(powers)
    return flat.amax() if p == math.inf else flat.sum()


def _largest(local: Tensor, group: TPGroup) -> Tensor:
    """The largest of the ranks' values, elementwise. By a gather, since nan may or may not survive an all-reduce's maximum."""
    return collectives.all_gather(local.unsqueeze(0), group, [1] * group.size).amax(0)


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float, group: TPGroup, p: float = 2.0) -> Tensor:
    """Scales all gradients so that their global p-norm is at most ``max_norm``; returns the norm before clipping.

    The factor is ``min(1, max_norm / (norm + 1e-6))``, as in ``torch.nn.utils.clip_grad_norm_``.
    """
    if not max_norm >= 0:
        raise ValueError(f"max_norm must not be negative, got {max_norm}")
    norm = grad_norm(model, group, p)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    for grad in grads:
        # A factor without dimensions would be rounded to grad's dtype first, half precision being coarser than the bound.
        local = held(grad).tensor
        torch.mul(local, factor.reshape((1,) * local.ndim), out=local)
    return norm


@torch.no_grad()
def check_replicas(model: nn.Module, group: TPGroup) -> None:
    """Checks that whatever several ranks hold is the same to the bit on all of them.

    Raises a ValueError on every rank that names each parameter whose copies differ, with the largest difference.
    """
    names, spreads = [], []
    for name, parameter, layout in _held_by_several(model, group):
        value = whole(parameter)
        reference = _first_holders(value, layout, group)
        differs = (_octets(value) != _octets(reference)).any(-1)
        spread = (value.double() - reference.double()).abs().clamp_min(torch.finfo(torch.float64).tiny)
        names.append(name)
        spreads.append(torch.where(differs, spread, 0.0).amax())
    if not names:
        return
    largest = _largest(torch.stack(spreads), group).tolist()
    found = [f"{name} (by up to {spread:.3g})" for name, spread in zip(names, largest, strict=True) if spread != 0]
    if found:
        raise ValueError(f"{len(found)} parameters differ between the ranks that hold them: {', '.join(found)}")


@torch.no_grad()
def sync_replicated(model: nn.Module, group: TPGroup) -> None:
    """Gives whatever several ranks hold the values of its first holder, on all of them."""
    for _, parameter, layout in _held_by_several(model, group):
        local, rows, _ = held(parameter)
        value = _first_holders(whole(parameter), layout, group)
        local.copy_(value[slice(*rows)] if value.ndim else value)


def _held_by_several(model: nn.Module, group: TPGroup) -> list[NamedLayout]:
    return [e for e in named_layouts(model) if e.layout.shared or (e.layout.replicated and group.size > 1)]


def _octets(value: Tensor) -> Tensor:
    """The bytes of each element: [...] -> [..., bytes]."""
    return value.unsqueeze(-1).contiguous().view(torch.uint8)


def _first_holders(value: Tensor, layout: Layout, group: TPGroup) -> Tensor:
    """``value`` with its first holder's bits wherever several ranks hold it: a sum of bytes that one rank alone gives."""
    octets = _octets(value)
    if layout.replicated:
        first = collectives.all_reduce(octets if group.rank == 0 else torch.zeros_like(octets), group)
    else:
        shared = collectives.all_reduce(shared_rows(octets, layout, layout.owned(group.rank)), group)
        first = replace_shared_rows(octets, shared, layout, group)
    return first.view(value.dtype).squeeze(-1)
