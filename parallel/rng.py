"""Random numbers that are functions of (seed, name, global coordinates), so that no value depends on the number of ranks.

Everything comes from one counter-based generator, Philox4x64-10: a *key* of two 64-bit words names an endless stream of words,
any of which can be computed without the ones before it. Initial values and dropout masks read words by global position, so a
rank computes the words of its own shard and gets what the single device gets there. No global random state is read or written.

Sources: Salmon, Moraes, Dror & Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC11); Box & Muller, "A note on the
generation of random normal deviates" (1958).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from parallel.group import TPGroup
from parallel.layout import Layout

_BLOCK = 1 << 15  # normals that are made at a time, from as many 32-bit words
_CHUNK = 1 << 17  # numbers (normals or words) that are held at a time beside the result
_WORDS = 8  # 32-bit words that one step of the Philox counter gives
_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_KEY_STEPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)


def stream_key(seed: int, name: str) -> tuple[int, int]:
    """The Philox key of the stream ``name``: two words of 63 bits, which fit the signed integers of torch.

    Raises:
        ValueError: unless ``seed`` is an int in [0, 2**63).
    """
    check_word("seed", seed)
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little") >> 1, int.from_bytes(digest[8:], "little") >> 1


@torch.no_grad()
def normal_(
    local: Tensor, layout: Layout, group: TPGroup, *, seed: int, name: str, mean: float = 0.0, std: float = 1.0
) -> Tensor:
    """Fills ``local``, this rank's shard of the global tensor that ``layout`` describes, with N(mean, std^2). Returns it.

    Each part of the layout is a stream of its own, ``"{name}:{part}"`` (a replicated tensor is the stream ``name``), and a
    part's elements are numbered with the cut dimension first: row by row for a weight [O, I] cut along O, column by column for
    one cut along I. The piece that a rank holds is then one run of its stream, and all that the rank computes of it. Numbers
    are made in float32 on the CPU and converted to the tensor's dtype and device. Their last bit may differ between processors
    for which numpy computes logarithms and sines differently (x86 with AVX2 and with AVX-512 are alike).

    A tensor on the meta device has no values and is left alone: call this again after ``to_empty``.

    Raises:
        ValueError: if ``local`` is not of this rank's shape or not floating, or ``seed`` or ``std`` is out of range.
    """
    if tuple(local.shape) != layout.local_shape(group.rank):
        raise ValueError(
            f"{name}: rank {group.rank} of {group.size} holds a shard of shape {layout.local_shape(group.rank)}, "
            f"got a tensor of shape {tuple(local.shape)}"
        )
    if not local.is_floating_point():
        raise ValueError(f"{name}: normal numbers need a floating dtype, got {local.dtype}")
    if not 0 <= std < math.inf:
        raise ValueError(f"{name}: the standard deviation must be finite and not negative, got {std}")
    check_word("seed", seed)
    if local.is_meta or local.numel() == 0:
        return local
    if layout.dim is None:
        _fill(local, 0, _Normals(stream_key(seed, name), 0, mean, std))
        return local
    width = local.numel() // local.shape[layout.dim]
    for piece in layout.pieces(group.rank):
        start = (piece.start - layout.part_starts[piece.part]) * width
        stream = _Normals(stream_key(seed, f"{name}:{piece.part}"), start, mean, std)
        _fill(local.narrow(layout.dim, piece.local, piece.length), layout.dim, stream)
    return local


def _fill(target: Tensor, dim: int, stream: _Normals) -> None:
    """Fills ``target`` in the order of its elements with dimension ``dim`` first, a chunk at a time."""
    if dim == 0 and target.is_contiguous():
        target = target.view(-1)
        if target.device.type == "cpu" and target.dtype == torch.float32:
            stream.read(target)
            return
    width = target.numel() // target.shape[dim]
    lines = max(1, _CHUNK // width)
    buffer = torch.empty(min(lines, target.shape[dim]) * width, dtype=torch.float32, device="cpu")
    for chunk in target.split(lines, dim):
        values = buffer[: chunk.numel()]
        stream.read(values)
        values = values.view(chunk.movedim(dim, 0).shape).movedim(0, dim)
        chunk.copy_(values.contiguous())  # transposed on its own: three times as fast as while copying


class _Normals:
    """Reads the normal numbers of one key in order, from number ``start`` on.

    Block b is made of words [b * _BLOCK, (b + 1) * _BLOCK) of the key's stream. A block is always made whole: vectorised
    logarithms and sines may differ in the last bit between the middle and the end of an array, and so with where a cut falls.
    """

    def __init__(self, key: tuple[int, int], start: int, mean: float, std: float) -> None:
        block, self._used = divmod(start, _BLOCK)
        self._words = _philox(key, block * _BLOCK // _WORDS)
        self._mean, self._std = np.float32(mean), np.float32(std)
        self._block = np.empty(_BLOCK, np.float32)
        self._work = np.empty((2, _BLOCK // 2), np.float32)
        self._make_block()

    def read(self, out: Tensor) -> None:
        """Fills ``out``, a contiguous float32 CPU tensor of one dimension, with the next numbers."""
        numbers, done = out.detach().numpy(), 0
        while done < numbers.size:
            if self._used == _BLOCK:
                self._make_block()
                self._used = 0
            n = min(numbers.size - done, _BLOCK - self._used)
            numbers[done : done + n] = self._block[self._used : self._used + n]
            done, self._used = done + n, self._used + n

    def _make_block(self) -> None:
        """Box-Muller: radius sqrt(-2 log u), angle 2 pi v, from signed 32-bit words 2^31 u (the sign is dropped) and 2^32 v.

        A float32 holds a small word exactly, so u is as fine as 2^-30 near 0 and numbers reach sqrt(2 log 2^31) = 6.55. Angles
        lie in [-pi, pi].
        """
        words = self._words.random_raw(_BLOCK // 2).view(np.int32).reshape(2, -1)
        radius, angle = self._work
        cosine, sine = halves = self._block.reshape(2, -1)
        np.bitwise_or(words[0], 1, out=words[0])  # no word is 0, and each odd one stands for the middle of its neighbours
        np.multiply(words[0], np.float32(2**-31), out=radius, dtype=np.float32)
        np.abs(radius, out=radius)
        np.log(radius, out=radius)
        np.multiply(radius, np.float32(-2), out=radius)
        np.sqrt(radius, out=radius)
        np.multiply(radius, self._std, out=radius)
        np.multiply(words[1], np.float32(math.pi * 2**-31), out=angle, dtype=np.float32)
        np.cos(angle, out=cosine)
        np.sin(angle, out=sine)
        np.multiply(halves, radius, out=halves)
        if self._mean:
            np.add(self._block, self._mean, out=self._block)


def _philox(key: tuple[int, int], counter: int) -> np.random.Philox:
    """numpy's generator (about 700 million 32-bit words a second) at a counter. Its first words are those of counter + 1."""
    return np.random.Philox(key=np.array(key, np.uint64), counter=np.array([counter, 0, 0, 0], np.uint64))


def check_word(what: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise ValueError(f"the {what} must be an integer in [0, 2**63), got {value!r}")


def dropout(
    x: Tensor,
    p: float,
    *,
    key: int | Tensor,
    step: int | Tensor,
    offset: int = 0,
    run: int | None = None,
    stride: int | None = None,
) -> Tensor:
    """``x`` (any shape and strides) with each element set to 0 with probability p, the others scaled by 1 / (1 - p).

    The element of *global* flat index g is kept if the 32-bit word g of the Philox stream of (``key``, ``step``) is at least
    2**32 p. The caller says which indices ``x`` holds: its elements, in order, are runs of ``run`` consecutive indices, run i
    beginning at ``offset + i * stride``.

    * Tokens t0, ... of [tokens, d]: one run (the default), offset = t0 * d.
    * Heads h0, ... of attention weights [batch, heads, T, T]: run = local heads * T * T, stride = all heads * T * T, offset =
      h0 * T * T (plus the global index of the first sequence * stride).

    A pure function: recomputation in backward (activation checkpointing) finds the same mask. torch.compile traces it whole,
    with a changing ``step`` as a variable. With p = 0 it is ``x`` itself.

    Args:
        key: names the place in the model, in [0, 2**63): ``stream_key(seed, name)[0]``. Or a 0-d int64 tensor, which is what a
            module should hold: torch.compile takes an int attribute for a constant, and compiles anew for each block.
        step: names the forward pass, in [0, 2**63): passes that are to differ have different ones. Or a 0-d int64 tensor.

    Raises:
        ValueError: if a number is out of range (p must be in [0, 1)), or the runs do not cover ``x``.
    """
    if not 0 <= p < 1:
        raise ValueError(f"the dropout probability must be in [0, 1), got {p}")
    if p == 0:
        return x
    # Ranks without tokens (numel 0) go on, too: their recomputation in backward has to take the same course as the others'.
    run = max(x.numel(), 1) if run is None else run
    if run < 1 or x.numel() % run:
        raise ValueError(f"runs of {run} indices do not cover {x.numel()} elements (shape {tuple(x.shape)})")
    if stride is None and run < x.numel():
        raise ValueError(f"{x.numel() // run} runs of {run} indices need a stride")
    check_word("dropout offset", offset)
    keys = _word_tensor("dropout key", key, x.device), _word_tensor("dropout step", step, x.device)
    make_mask = _numpy_mask if x.device.type == "cpu" else _traceable_mask
    threshold = min(round(p * 2**32), _LOW)
    mask = make_mask(*keys, x.shape, threshold, offset, run, run if stride is None else stride)
    return torch.where(mask, x, 0.0).mul_(1 / (1 - p))


@torch.library.custom_op("tpblock::keep_mask", mutates_args=())
def _numpy_mask(key: Tensor, step: Tensor, shape: Sequence[int], threshold: int, offset: int, run: int, stride: int) -> Tensor:
    """The mask from numpy's words, on the CPU. Opaque to the compiler."""
    mask = np.empty(math.prod(shape), np.bool_)
    bits, counter = _philox((int(key), int(step)), 0), 0
    for i, row in enumerate(mask.reshape(-1, run)):
        for begin in range(0, run, _CHUNK):
            part = row[begin : begin + _CHUNK]
            first, skip = divmod(offset + i * stride + begin, _WORDS)
            if first != counter:
                bits.advance((first - counter) % 2**256)
            counters = -(-(skip + part.size) // _WORDS)
            words = bits.random_raw(counters * _WORDS // 2).view(np.uint32)
            np.greater_equal(words[skip : skip + part.size], threshold, out=part)
            counter = first + counters
    return torch.from_numpy(mask).view(list(shape))


@_numpy_mask.register_fake
def _(key: Tensor, step: Tensor, shape: Sequence[int], threshold: int, offset: int, run: int, stride: int) -> Tensor:
    return key.new_empty(list(shape), dtype=torch.bool)


def _traceable_mask(
    key: Tensor, step: Tensor, shape: Sequence[int], threshold: int, offset: int, run: int, stride: int
) -> Tensor:
    """The same mask from torch operations, on the device of ``key``. The compiler fuses them."""
    starts = torch.arange(math.prod(shape) // run, device=key.device).unsqueeze(1) * stride + offset
    counters = starts // _WORDS + torch.arange((run + 2 * _WORDS - 2) // _WORDS, device=key.device)
    words = philox_words(counters, key, step).flatten(1)
    if starts.shape[0] == 1 or stride % _WORDS == 0:
        words = words.narrow(1, offset % _WORDS, run)
    else:  # the runs begin at different places within a counter's words
        words = words.gather(1, starts % _WORDS + torch.arange(run, device=key.device))
    flipped = words ^ -(2**31)  # the order of unsigned words, as signed ones
    return (flipped >= threshold - 2**31).view(list(shape))


def philox_words(counters: Tensor, key: Tensor, step: Tensor) -> Tensor:
    """The eight 32-bit words of numpy's Philox4x64-10 of (key, step) at each counter: int64 [...] -> int32 [..., 8].

    Unsigned 64-bit arithmetic on torch's signed integers: sums, low products and xor are the same bits.
    """
    zero = torch.zeros_like(counters)
    a, b, c, d = counters + 1, zero, zero, zero  # numpy steps the counter before its first output
    for i in range(10):
        if i:
            key, step = key + _signed(_KEY_STEPS[0]), step + _signed(_KEY_STEPS[1])
        (high_a, low_a), (high_c, low_c) = _multiply(a, _MULTIPLIERS[0]), _multiply(c, _MULTIPLIERS[1])
        a, b, c, d = high_c ^ b ^ key, low_c, high_a ^ d ^ step, low_a
    return torch.stack([a, b, c, d], -1).view(torch.int32)


def _multiply(a: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """The high and the low 64 bits of the unsigned product a * m, from products of 32-bit halves."""
    a_high, a_low, m_high, m_low = _high(a), a & _LOW, m >> 32, m & _LOW
    outer = a_high * m_low
    middle = a_low * m_high + (outer & _LOW) + _high(a_low * m_low)  # below 2**64
    return a_high * m_high + _high(outer) + _high(middle), a * _signed(m)


def _high(a: Tensor) -> Tensor:
    return (a >> 32) & _LOW


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def _word_tensor(what: str, value: int | Tensor, device: torch.device) -> Tensor:
    """A key or step as a 0-d tensor: compilers take a changing tensor for a variable."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    check_word(what, value)
    return torch.full((), value, dtype=torch.int64, device=device)
