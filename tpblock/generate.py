"""New tokens one after another, greedily or drawn, the same on every rank of a tensor-parallel group."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np
import torch
from torch import Tensor

from parallel.rng import stream_key
from tpblock.cache import KVCache
from tpblock.config import ModelConfig
from tpblock.model import Decoder
from tpblock.rope import LongRopeScaling

LEAST_TEMPERATURE = 1e-6
"""That is as good as greedy already, and logits divided by much less overflow."""


def generate(
    model: Decoder,
    ids: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop: Collection[int] = (),
) -> Iterator[Tensor]:
    """Yields the tokens that follow ``ids``, a step at a time: [batch], on the model's device, the same on every rank.

    All ranks of the model's group call it and go through it together. Each holds the keys and values of its own heads only.

    Args:
        ids: prompts [batch, prompt], all of one length, the same on every rank.
        max_new_tokens: how many tokens at most, a stop token included.
        temperature: 0 takes the token with the highest logit (of several the lowest id), anything above draws.
        top_k, top_p: draw among some of the tokens only, see :func:`warp`.
        seed: draws are a function of it, of the number of the step and of the sequence's place in the batch, so that with the
            same logits they are the same on any number of ranks.
        stop: token ids that end a sequence. The others of the batch go on, while it repeats that token.

    Raises:
        ValueError: if a number is out of range, or prompt and new tokens are longer than the model's ``max_seq_len``; at a
            step, if the logits are not finite numbers.
    """
    check_request(model.config, ids, max_new_tokens)
    check_sampling(temperature, top_k, top_p)
    key, _ = stream_key(seed, "generate")
    return _steps(model, ids.to(model.head_weight.device), max_new_tokens, temperature, top_k, top_p, key, sorted(stop))


def check_request(config: ModelConfig, ids: Tensor, max_new_tokens: int) -> None:
    """A ValueError unless a model of ``config`` can go on from ``ids`` for so many tokens."""
    if ids.ndim != 2 or not ids.numel():
        raise ValueError(f"prompts need a token at least, got ids [batch, prompt] of shape {tuple(ids.shape)}")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    for id_ in (int(ids.min()), int(ids.max())):
        if not 0 <= id_ < config.vocab_size:
            raise ValueError(f"the token id {id_} is not in the model's vocabulary of {config.vocab_size}")
    if ids.shape[1] + max_new_tokens > config.max_seq_len:
        raise ValueError(
            f"a prompt of {ids.shape[1]} tokens and {max_new_tokens} new ones are longer than the model's max_seq_len "
            f"{config.max_seq_len}"
        )


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """A ValueError if one is out of range."""
    if temperature != 0 and not LEAST_TEMPERATURE <= temperature < float("inf"):
        raise ValueError(f"temperature must be 0, or finite and at least {LEAST_TEMPERATURE:g}, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, got {top_p}")


def warp(logits: Tensor, temperature: float, top_k: int | None = None, top_p: float | None = None) -> Tensor:
    """Logits [..., vocab] -> those of the distribution to draw from, minus infinity for tokens that are left out.

    As transformers does it and in the same order: divided by the temperature; then those below the ``top_k``-th left out; then,
    of what remains, the least probable ones left out as long as their probabilities add up to 1 - ``top_p`` at most (nucleus
    sampling, Holtzman et al., 2020). The most probable token always remains.
    """
    scores = logits / temperature
    if top_k is not None:
        least = scores.topk(min(top_k, scores.shape[-1])).values[..., -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    if top_p is not None:
        ascending, order = scores.sort(-1)
        out = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
        out[..., -1] = False
        scores = scores.masked_fill(out.scatter(-1, order, out), -torch.inf)
    return scores


def draw(scores: Tensor, key: int, step: int) -> Tensor:
    """One token [batch] for each row of warped logits [batch, vocab], on the CPU: where the row's number in (0, 1) falls when
    the tokens' probabilities are laid end to end. That number is a function of (key, step, row)."""
    words = np.random.Generator(np.random.Philox(key=np.array([key, step], np.uint64))).integers(2**32, size=len(scores))
    ends = scores.softmax(-1, dtype=torch.float64).cumsum(-1)
    places = torch.from_numpy((words + 0.5) / 2**32)[:, None] * ends[:, -1:]
    return torch.searchsorted(ends, places, right=True)[:, 0]


def _steps(
    model: Decoder,
    ids: Tensor,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    key: int,
    stop: list[int],
) -> Iterator[Tensor]:
    ended = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
    stop_ids = torch.tensor(stop, dtype=ids.dtype, device=ids.device)
    total, short = ids.shape[1] + max_new_tokens, _short(model.config)
    cache = KVCache(model, ids.shape[0], min(total, short) if ids.shape[1] <= short else total)
    for step in range(max_new_tokens):
        if cache.length == cache.max_len:  # the sequence has outgrown the short factors: all its keys turn otherwise now
            cache = KVCache(model, ids.shape[0], total)
        logits = model.next_logits(ids[:, cache.length :], cache)
        if not logits.amax(-1).isfinite().all():  # on every rank: all have the same logits
            raise ValueError(
                f"the logits of new token {step + 1} are not finite numbers: the weights are damaged, or overflow"
            )
        if temperature == 0:
            tokens = logits.argmax(-1)  # the first of several
        else:
            # On the CPU, where sums do not depend on how threads of a GPU meet.
            warped = warp(logits.to("cpu", torch.promote_types(logits.dtype, torch.float32)), temperature, top_k, top_p)
            tokens = draw(warped, key, step).to(ids.device)
        tokens = torch.where(ended, ids[:, -1], tokens)
        yield tokens
        if stop:
            ended = ended | torch.isin(tokens, stop_ids)
            if ended.all():
                return
        ids = torch.cat([ids, tokens[:, None]], dim=1)


def _short(config: ModelConfig) -> int:
    """Up to which length a sequence keeps its rotary frequencies."""
    scaling = config.rope_scaling
    return scaling.original_max_seq_len if isinstance(scaling, LongRopeScaling) else config.max_seq_len
