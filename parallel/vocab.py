"""What is cut along the vocabulary: the embedding, and the cross entropy of logits that no rank ever holds whole.

Shapes: V vocabulary, d width, n ranks, V_r this rank's share of V (V/n when it divides, dealt as evenly as possible when not),
T tokens (any number of leading dimensions), T_r this rank's tokens under sequence parallelism.

Source: Shoeybi et al., Megatron-LM (2019), section 3; the z-loss: Chowdhery et al., PaLM (2022), section 5.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parallel import rng
from parallel.cross_entropy import DenseCrossEntropy, LinearCrossEntropy, TokenLoss
from parallel.group import TPGroup
from parallel.layout import Layout, Part, Run, column_layout
from parallel.regions import check_dtypes, reduce_from_ranks, reduce_scatter_tokens, token_counts
from parallel.virtual import check_supported


def vocab_part(vocab_size: int, group: TPGroup) -> Part:
    """How the vocabulary is dealt, alike for the embedding, the output head and the loss."""
    return Part.even("vocab", vocab_size, group.shards)


def rank_rows(part: Part, group: TPGroup) -> Run:
    """The rows of the vocabulary that this rank holds: its shards' runs, which are neighbours."""
    shards = group.local_shards
    return Run(part.runs[shards[0]].start, part.runs[shards[-1]].stop)


def _checked(ids: Tensor, vocab_size: int, what: str, ignore_index: int | None = None) -> Tensor:
    """The ids, or a ValueError if one is outside [0, V). They are alike on all ranks, so either all go on or none does."""
    if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool:
        raise ValueError(f"a {what} is an integer below {vocab_size}, got a tensor of {ids.dtype}")
    check = _traceable_check if torch.compiler.is_compiling() else _check
    return check(ids.long(), vocab_size, what, ignore_index)


def _check(ids: Tensor, vocab_size: int, what: str, ignore_index: int | None) -> Tensor:
    if ids.is_meta:
        return ids
    inside = (ids >= 0) & (ids < vocab_size)
    if ignore_index is not None:
        inside |= ids == ignore_index
    if ids.device.type != "cpu":  # To read the answer here would stall the device: it asserts when it gets there.
        torch._assert_async(inside.all(), f"a {what} is outside the vocabulary of {vocab_size}")
    elif not inside.all():
        raise ValueError(f"{what} {ids[~inside][0].item()} is outside the vocabulary of {vocab_size}")
    return ids


@torch.library.custom_op("tpblock::check_ids", mutates_args=())
def _traceable_check(ids: Tensor, vocab_size: int, what: str, ignore_index: int | None) -> Tensor:
    """As one operation of a compiled graph, where _assert_async on the CPU would end the process rather than raise."""
    return _check(ids, vocab_size, what, ignore_index).clone()


@_traceable_check.register_fake
def _(ids: Tensor, vocab_size: int, what: str, ignore_index: int | None) -> Tensor:
    return torch.empty_like(ids)


class VocabParallelEmbedding(nn.Module):
    """A table of embeddings cut along the vocabulary. Every rank looks up the ids that it holds.

    ::

        W  [V, d]     rank r holds W_r [V_r, d], rows [start_r, stop_r)
        forward       y = sum_r (W_r[id - start_r] where r holds id, else 0)    ids [T]  ->  y [T, d]    one all-reduce
        grad weight   dW_r[v] = sum of dy over the tokens whose id is v         [V_r, d]                 no collective

    One rank alone adds something to each row, so y is that rank's row to the bit, in any dtype. With ``sequence_parallel`` the
    all-reduce becomes a reduce-scatter to y_r [T_r, d] of the flattened tokens, and backward all-gathers dy.

    Args:
        num_embeddings, embedding_dim, device, dtype: as in ``torch.nn.Embedding``, of global size.
        group: the ranks that share the table.
        sequence_parallel: cut the output along its flattened tokens.
        reduce_dtype: the dtype in which rows are added over the ranks; None, and always in invariant mode: their own, which is
            exact.
        seed, name: initial values are a function of these and of the global coordinates alone (see rng.py).
            ``seed=None`` leaves them unset for an enclosing module to fill.

    Raises:
        ValueError: if a size is not positive or a rank would hold none of the vocabulary; in forward, for ids that are not
            integers, and for one outside the vocabulary (on an accelerator, which reading ids would stall, its own assertion
            fails instead).
    """

    layouts: dict[str, Layout]

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        group: TPGroup,
        sequence_parallel: bool = False,
        reduce_dtype: torch.dtype | None = None,
        seed: int | None = 0,
        name: str = "",
    ) -> None:
        super().__init__()
        if num_embeddings < 1 or embedding_dim < 1:
            raise ValueError(
                f"VocabParallelEmbedding needs positive sizes, got num_embeddings={num_embeddings} "
                f"and embedding_dim={embedding_dim}"
            )
        check_dtypes("VocabParallelEmbedding", dtype=dtype, reduce_dtype=reduce_dtype)
        self.num_embeddings, self.embedding_dim, self.group = num_embeddings, embedding_dim, group
        # A narrower dtype would round rows, and only where there are several ranks.
        self.sequence_parallel, self.reduce_dtype = sequence_parallel, None if group.invariant else reduce_dtype
        layout = column_layout((num_embeddings, embedding_dim), [vocab_part(num_embeddings, group)], group.virtual_owners)
        self.layouts = {"weight": layout}
        self.weight = nn.Parameter(torch.empty(layout.local_shape(group.rank), device=device, dtype=dtype))
        if seed is not None:
            self.reset_parameters(seed, name)

    def reset_parameters(self, seed: int = 0, name: str = "") -> None:
        """Draws the table from N(0, 1), as ``torch.nn.Embedding`` does."""
        rng.normal_(self.weight, self.layouts["weight"], self.group, seed=seed, name=f"{name}.weight")

    def forward(self, ids: Tensor) -> Tensor:
        """ids [T], alike on every rank -> [T, d] on every rank, or [T_r, d] under sequence parallelism."""
        ids = _checked(ids, self.num_embeddings, "token id")
        y = F.embedding(ids, self.weight) if self.group.size == 1 else self._partial(ids)
        if self.group.invariant:
            y = y + 0.0  # A negative zero stays one unless other ranks' zeros are added to it.
        if self.sequence_parallel:
            y = y.flatten(0, -2)
            return reduce_scatter_tokens(y, y.shape[0], self.group, self.reduce_dtype)
        return reduce_from_ranks(y, self.group, self.reduce_dtype, owned=True)

    def _partial(self, ids: Tensor) -> Tensor:
        """This rank's summand: its rows at the ids that it holds, zero at the others."""
        run = rank_rows(self.layouts["weight"].parts[0], self.group)
        elsewhere = (ids < run.start) | (ids >= run.stop)
        # An id held elsewhere looks up some row or other, which is then cleared, and so is its gradient. Taking the remainder
        # spreads these over the rows: with a single row for all of them, backward would queue up to add zeros to that row.
        rows = F.embedding((ids - run.start).remainder(run.length), self.weight)
        return rows.masked_fill(elsewhere.unsqueeze(-1), 0)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, rank {self.group.rank} of {self.group.size}"


def _token_losses(
    vocab_size: int, group: TPGroup, ignore_index: int, label_smoothing: float, z_loss: float
) -> tuple[TokenLoss, ...]:
    """One for each shard of the vocabulary that this rank owns."""
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing lies between 0 and 1, got {label_smoothing}")
    if not z_loss >= 0:
        raise ValueError(f"z_loss is at least 0, got {z_loss}")
    part = vocab_part(vocab_size, group)
    return tuple(TokenLoss(part, shard, ignore_index, label_smoothing, z_loss) for shard in group.local_shards)


def _checked_labels(
    width: int, labels: Tensor, shape: torch.Size | tuple[int, ...], losses: tuple[TokenLoss, ...], group: TPGroup
) -> Tensor:
    """The labels, flat, unless they or the width of the logits are wrong, which is found before any collective."""
    loss, own = losses[0], sum(loss.run.length for loss in losses)
    if width != own:
        hint = ": these are logits gathered over all ranks" if width == loss.part.size else ""
        raise ValueError(
            f"rank {group.rank} of {group.size} holds {own} of {loss.part.size} columns of the logits, got {width}{hint}"
        )
    if labels.shape != torch.Size(shape):
        raise ValueError(f"labels have shape {tuple(labels.shape)}, the logits are of tokens of shape {tuple(shape)}")
    return _checked(labels.reshape(-1), loss.part.size, "label", loss.ignore_index)


def _check_reduction(reduction: str, *known: str) -> None:
    if reduction not in known:
        raise ValueError(f"reduction is one of {', '.join(known)}, got {reduction!r}")


def check_loss(
    labels: Tensor, *, vocab_size: int, group: TPGroup, ignore_index: int = -100, label_smoothing: float, z_loss: float
) -> None:
    """What the losses below refuse of these arguments, for a model to refuse before it communicates."""
    _token_losses(vocab_size, group, ignore_index, label_smoothing, z_loss)
    _checked(labels, vocab_size, "label", ignore_index)


def _check_logits(dtype: torch.dtype) -> None:
    if not dtype.is_floating_point:
        raise ValueError(f"the logits must be of a floating dtype, got {dtype}")


def _mean(total: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """total / number of tokens that count. With none the mean is nan and its gradient zero, as in torch."""
    valid = (labels != ignore_index).sum()
    return (total / valid.clamp(min=1)).masked_fill(valid == 0, math.nan)


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    group: TPGroup,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """``F.cross_entropy`` of logits [T, V] from each rank's columns of them [T, V_r], the same bits on every rank.

    ::

        forward        logits_r [T, V_r], labels [T] whole  ->  loss [] or [T]    one all-gather of 3 numbers a token (with
                                                                                  smoothing 4), see cross_entropy.py
        grad logits_r  [T, V_r]                                                   no collective

    Args:
        logits: this rank's columns, any number of leading dimensions (see :func:`vocab_part`).
        labels: integers, of the logits' leading dimensions, alike on every rank.
        ignore_index, label_smoothing, reduction: as in ``F.cross_entropy``.
        z_loss: adds ``z_loss * logsumexp(logits)**2`` to the loss of each token that is not ignored.

    Returns:
        The loss, from statistics in float32: float32 for float16 and bfloat16 logits (as ``F.cross_entropy`` of their float32
        copy, or under autocast), else of the logits' dtype.

    Raises:
        ValueError: if a label is outside the vocabulary (on an accelerator its own assertion fails instead) or not an integer,
            or the labels' shape is another; if the logits are not this rank's columns, for example all of them; for
            ``label_smoothing`` outside [0, 1], ``z_loss`` below 0, an unknown reduction.
    """
    _check_reduction(reduction, "mean", "sum", "none")
    _check_logits(logits.dtype)
    losses = _token_losses(vocab_size, group, ignore_index, label_smoothing, z_loss)
    flat = _checked_labels(logits.shape[-1], labels, logits.shape[:-1], losses, group)
    if group.invariant:
        check_supported(logits)
    by_token = DenseCrossEntropy.apply(logits.reshape(-1, logits.shape[-1]), flat, losses, group)
    if reduction == "none":
        return by_token.view(labels.shape)
    return by_token.sum() if reduction == "sum" else _mean(by_token.sum(), flat, ignore_index)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    group: TPGroup,
    bias: Tensor | None = None,
    sequence_parallel: bool = False,
    tokens: int | None = None,
    chunk_tokens: int = 2048,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    reduce_dtype: torch.dtype | None = None,
) -> Tensor:
    """``vocab_parallel_cross_entropy(column_parallel_linear(x, weight, bias), labels)`` without the logits [T, V_r].

    Only the logits of ``chunk_tokens`` tokens exist at a time. Forward computes the gradients with them, for no more matrix
    products than the two functions take, and backward scales them:

    ::

        forward       x [T, d] whole  ->  loss []     one all-gather a chunk, of 3 numbers a token (with smoothing 4)
                      each chunk c of the tokens:     z = x_c W_r^T + b_r, dz from it (cross_entropy.py),
                                                      dx_c = dz W_r, dW_r += dz^T x_c, db_r += sum of dz over the tokens
        grad input    g sum_r dx   [T, d]             one all-reduce, while g dW_r is computed
        grad weight   g dW_r [V_r, d], g db_r [V_r]   no collective

    With ``sequence_parallel`` x is this rank's tokens x_r [T_r, d] of T flattened ones: forward all-gathers it once, dx is
    reduce-scattered. Gradients of tensors that need none are not computed, and without autograd none are.

    Args:
        x: [T, d] with any number of leading dimensions, or [T_r, d].
        weight, bias: a column-parallel output head, [V_r, d] and [V_r]; the weight may be that of the embedding.
        labels: of x's leading dimensions, alike on every rank; under sequence parallelism all T, in any shape.
        tokens: T under sequence parallelism; by default the number of labels.
        chunk_tokens: how many tokens' logits exist at a time, once in float32 and once in x's dtype.
        reduction: "mean" or "sum".
        reduce_dtype: the dtype in which dx is summed over the ranks; None: its own.

    The other arguments, the value returned and what is refused are as in :func:`vocab_parallel_cross_entropy`.
    """
    _check_reduction(reduction, "mean", "sum")
    losses = _token_losses(vocab_size, group, ignore_index, label_smoothing, z_loss)
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is at least 1, got {chunk_tokens}")
    counts = None
    if sequence_parallel:
        tokens = labels.numel() if tokens is None else tokens
        counts = token_counts(tokens, group)
        if x.shape[:-1] != (counts[group.rank],):
            raise ValueError(
                f"sequence parallelism deals {tokens} tokens as {counts} over {group.size} ranks, "
                f"rank {group.rank} was given {tuple(x.shape[:-1])}"
            )
        labels = labels.reshape(-1)
    shape = x.shape[:-1] if counts is None else (sum(counts),)
    labels = _checked_labels(weight.shape[0], labels, shape, losses, group)
    if x.shape[-1] != weight.shape[1] or (bias is not None and bias.shape != weight.shape[:1]):
        biased = "no bias" if bias is None else f"a bias of shape {tuple(bias.shape)}"
        raise ValueError(f"x of width {x.shape[-1]} does not fit a weight of shape {tuple(weight.shape)} and {biased}")
    _check_logits(x.dtype)
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise ValueError(f"x is of {x.dtype}, the weight of {weight.dtype}")
    if group.invariant:
        check_supported(x)
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    grad = torch.is_grad_enabled()
    needs = (grad and x.requires_grad, grad and weight.requires_grad, grad and bias is not None and bias.requires_grad)
    x = x.reshape(-1, x.shape[-1])
    total = LinearCrossEntropy.apply(x, weight, bias, labels, losses, group, counts, chunk_tokens, needs, reduce_dtype)
    return total if reduction == "sum" else _mean(total, labels, ignore_index)
