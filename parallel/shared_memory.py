"""Collectives of CPU tensors between ranks on one machine, through memory that they share.

A rank writes what it gives into a slot of its own and counts up a word beside it; whoever needs it waits for the count, and reads.
No thread and no socket stands between. A collective of gloo has both, and its threads are woken while every core computes: between
small products it takes many times as long (docs/performance.md). What is summed is summed in the order
of the ranks, so that all of them get the same bits.

The order in which two processes see each other's writes is that of x86: other processors are left to gloo, as are ranks on
several machines. The memory has no name, and ends with the last process that holds it; what large tensors have
once used of the slots stays taken. Only one thread of a rank may be in the collectives of a group at a time.
"""

from __future__ import annotations

import mmap
import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NoReturn
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from parallel.layout import deal

Pending = Callable[[], Tensor]
"""A collective under way: call it to wait for the result."""

SLOTS = 2
"""How many collectives a rank may have under way before it has to end the first."""
SLOT_BYTES = 32 << 20
"""The most that a rank gives to a collective; what is not used of it takes no memory."""
WHOLE_BYTES = 1 << 20
"""Of larger tensors each of several ranks sums a part, and the parts are gathered; smaller ones every rank sums as a whole."""
SPIN_SECONDS = 2e-3
"""How long a rank that waits only lets others run, before it sleeps."""
SLEEP_SECONDS = 2e-4
LOOK_SECONDS = 0.05
"""How often it looks then whether the other one's process is still there."""
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
DTYPES = tuple(sorted({t for t in vars(torch).values() if isinstance(t, torch.dtype)}, key=str))

# The words (of 8 bytes) of a rank, a page: how many collectives it has ended, and for each slot the number of the collective in it,
# its kind, and what of the slot is for each rank (start and length in bytes).
_PAGE = mmap.PAGESIZE
_ENDED = 2  # after the mark by which the memory is known
_NUMBER, _KIND, _PARTS = range(3)
_MOST_RANKS = (_PAGE // 8 // (1 + SLOTS) - _PARTS) // 2


class Channel:
    """The memory that the ranks of one process group share, and where this rank is in the sequence of their collectives."""

    def __init__(self, memory: mmap.mmap, ranks: dist.ProcessGroup, pids: Sequence[int], timeout: float) -> None:
        self.rank, self.size, self.pids, self.timeout = ranks.rank(), ranks.size(), pids, timeout
        self._names = dist.get_process_group_ranks(ranks)
        self._words = memoryview(memory).cast("q")
        with torch.inference_mode(False):  # else nothing could be written to it outside of that mode
            self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._number = 0
        self._failure: str | None = None
        self._under_way: dict[int, Exchange] = {}

    @staticmethod
    def needed(size: int) -> int:
        """Bytes for so many ranks."""
        return size * (_PAGE + SLOTS * SLOT_BYTES)

    def start(
        self,
        kind: str,
        x: Tensor,
        taken: Sequence[int],
        combine: Callable[[list[Tensor]], Tensor],
        given: Sequence[int] | None = None,
    ) -> Pending:
        """Begins a collective.

        Args:
            taken: how many numbers of what each rank gives are for this one.
            combine: the result from these, flat.
            given: how many numbers of x are for each rank, in order; None: all of them for every one.
        """
        if self._failure:
            raise RuntimeError(f"ranks cannot go on after one of their collectives has failed: {self._failure}")
        assert x.nbytes <= SLOT_BYTES, (kind, x.shape, x.dtype)
        if given is not None and sum(given) != x.numel():
            raise ValueError(f"{kind}: {x.numel()} numbers of {x.dtype} are given, the ranks are told of {given}")
        number, before = self._number + 1, self._number + 1 - SLOTS
        if before in self._under_way:
            self._under_way[before]()
        for rank in range(self.size):  # who has not ended it may still be reading this slot
            self._wait(rank, self._word(rank, _ENDED), before, kind)
        self._number = number
        self._slot(self.rank, number, x.numel(), x.dtype).view(x.shape).copy_(x.detach())
        words, at, first = self._words, 0, self._header(self.rank, number)
        words[first + _KIND] = _code(kind, x.dtype)
        for rank in range(self.size):
            length = (x.numel() if given is None else given[rank]) * x.itemsize
            words[first + _PARTS + 2 * rank], words[first + _PARTS + 2 * rank + 1] = at, length
            at += 0 if given is None else length
        words[first + _NUMBER] = number  # last: from now on the others read
        self._under_way[number] = Exchange(self, number, kind, taken, x.dtype, combine)
        return self._under_way[number]

    def given(self, rank: int, number: int, kind: str, size: int, dtype: torch.dtype) -> Tensor:
        """What a rank gives this one in a collective, once it does."""
        words, first = self._words, self._header(rank, number)
        self._wait(rank, first + _NUMBER, number, kind)
        start, length = words[first + _PARTS + 2 * self.rank], words[first + _PARTS + 2 * self.rank + 1]
        code = words[first + _KIND]
        if (length, code) != (size * dtype.itemsize, _code(kind, dtype)):
            self._fail(
                RuntimeError(
                    f"rank {self._names[rank]} gives rank {self._names[self.rank]} {length} bytes in {_told(code)}, which expects "
                    f"{size * dtype.itemsize} bytes in {_told(_code(kind, dtype))}: ranks must call the same collectives in the "
                    "same order, with shapes and dtypes that fit"
                )
            )
        return self._slot(rank, number, size, dtype, start)

    def end(self, number: int) -> None:
        """Says that this rank has read all that it needs."""
        del self._under_way[number]
        self._words[self._word(self.rank, _ENDED)] = min(self._under_way, default=self._number + 1) - 1

    def _fail(self, error: Exception) -> NoReturn:
        self._failure = str(error)
        raise error

    def _word(self, rank: int, word: int) -> int:
        return rank * _PAGE // 8 + word

    def _header(self, rank: int, number: int) -> int:
        return self._word(rank, _PAGE // 8 // (1 + SLOTS) * (1 + number % SLOTS))

    def _slot(self, rank: int, number: int, size: int, dtype: torch.dtype, start: int = 0) -> Tensor:
        start += self.size * _PAGE + (rank * SLOTS + number % SLOTS) * SLOT_BYTES
        return self._bytes[start : start + size * dtype.itemsize].view(dtype)

    def _wait(self, rank: int, word: int, least: int, kind: str) -> None:
        """Until a word of a rank is at least that."""
        words = self._words
        if words[word] >= least:
            return
        begin, checked = time.monotonic(), 0.0
        while words[word] < least:
            waited = time.monotonic() - begin
            if waited < SPIN_SECONDS:
                os.sched_yield()
                continue
            time.sleep(SLEEP_SECONDS)
            peer = f"rank {self._names[rank]} in {kind}"
            if waited > self.timeout:
                self._fail(dist.DistBackendError(f"waited {waited:.0f} s for {peer}, which did not come"))
            if waited > checked + LOOK_SECONDS:
                checked = waited
                if not _alive(self.pids[rank]) and words[word] < least:
                    self._fail(dist.DistBackendError(f"waited for {peer}, whose process has ended"))


class Exchange:
    """A collective under way. It is called for its result; more often is no harm."""

    def __init__(
        self,
        channel: Channel,
        number: int,
        kind: str,
        taken: Sequence[int],
        dtype: torch.dtype,
        combine: Callable[[list[Tensor]], Tensor],
    ) -> None:
        self._channel, self._number, self._kind, self._taken, self._dtype = channel, number, kind, taken, dtype
        self._combine = combine
        self._result: Tensor | None = None

    def __call__(self) -> Tensor:
        if self._result is None:
            channel, kind = self._channel, self._kind
            given = [channel.given(rank, self._number, kind, size, self._dtype) for rank, size in enumerate(self._taken)]
            with torch.no_grad():
                self._result = self._combine(given)
            channel.end(self._number)
        return self._result


def in_parts(x: Tensor, channel: Channel) -> bool:
    """Whether an all-reduce of x is two collectives, the second of which begins when the result is waited for."""
    return channel.size > 2 and x.nbytes > WHOLE_BYTES


def start_all_reduce(x: Tensor, channel: Channel, out: Tensor | None = None) -> Pending:
    """The sum over the ranks. As below it is written to ``out``, if given (contiguous); here that may be x itself.

    What is returned is to be called once: in parts, each call would begin a gather."""
    if in_parts(x, channel):
        counts = [run.length for run in deal(x.numel(), channel.size)]
        part = start_reduce_scatter(x.reshape(-1), channel, counts)
        return lambda: start_all_gather(part(), channel, counts, _flat(out))().view(x.shape)
    taken = [x.numel()] * channel.size
    return channel.start("all_reduce", x, taken, lambda given: _sum(given, out).view(x.shape))


def start_reduce_scatter(x: Tensor, channel: Channel, counts: Sequence[int], out: Tensor | None = None) -> Pending:
    """The sum of x [sum(counts), ...] over the ranks, of which each keeps its rows: [counts[rank], ...]."""
    row, shape = x.shape[1:].numel(), (counts[channel.rank], *x.shape[1:])
    taken = [counts[channel.rank] * row] * channel.size
    given = [count * row for count in counts]
    return channel.start("reduce_scatter", x, taken, lambda parts: _sum(parts, out).view(shape), given)


def start_all_gather(x: Tensor, channel: Channel, counts: Sequence[int], out: Tensor | None = None) -> Pending:
    """The ranks' rows stacked: [counts[rank], ...] -> [sum(counts), ...]."""
    row, shape = x.shape[1:].numel(), (sum(counts), *x.shape[1:])
    taken = [count * row for count in counts]
    return channel.start("all_gather", x, taken, lambda given: torch.cat(given, out=_flat(out)).view(shape))


def start_all_to_all(x: Tensor, channel: Channel, given: Sequence[int], taken: Sequence[int]) -> Pending:
    """The ``taken[r]`` rows that each rank r gives, stacked, from the ``given[r]`` rows for each rank of x [sum(given), ...]."""
    row, shape = x.shape[1:].numel(), (sum(taken), *x.shape[1:])
    rows = [[count * row for count in counts] for counts in (taken, given)]
    return channel.start("all_to_all", x, rows[0], lambda parts: torch.cat(parts).view(shape), given=rows[1])


def _sum(given: list[Tensor], out: Tensor | None) -> Tensor:
    total = torch.add(given[0], given[1], out=_flat(out))
    for other in given[2:]:
        total += other
    return total


def _flat(out: Tensor | None) -> Tensor | None:
    return None if out is None else out.detach().view(-1)


# -- setting up

_channels: WeakKeyDictionary[dist.ProcessGroup, Channel | None] = WeakKeyDictionary()


def channel(ranks: dist.ProcessGroup, most: int = 0) -> Channel | None:
    """The memory through which ranks exchange tensors of at most so many bytes each; None if they cannot. All ranks call it."""
    if most > SLOT_BYTES:
        return None
    if ranks not in _channels:
        with _disable_current_modes():
            _channels[ranks] = _connect(ranks)
    return _channels[ranks]


def _connect(ranks: dist.ProcessGroup) -> Channel | None:
    """Rank 0 makes the memory; the others open it by its place among the files of that process."""
    size, machine, memory = Channel.needed(ranks.size()), _machine(), None
    with ExitStack() as files:
        mark = b""
        with suppress(OSError):
            if ranks.rank() == 0 and machine:
                memory = files.enter_context(open(os.memfd_create("tpblock"), "r+b", buffering=0))
                memory.write(mark := os.urandom(16))
                memory.truncate(size)
        told: list[tuple[str, int, int, bytes]] = [("", 0, 0, b"")] * ranks.size()
        mine = machine, os.getpid(), memory.fileno() if memory else -1, mark
        dist.all_gather_object(told, mine, group=ranks)
        mapped = None
        with suppress(OSError, ValueError):
            if machine and len({where for where, *_ in told}) == 1 and ranks.size() <= _MOST_RANKS:
                _, pid, number, mark = told[0]
                with open(f"/proc/{pid}/fd/{number}", "r+b", buffering=0) as file:
                    mapped = mmap.mmap(file.fileno(), size)
                if mapped[:16] != mark:  # another machine's that has the same names
                    mapped = None
        opened: list[bool] = [False] * ranks.size()
        dist.all_gather_object(opened, mapped is not None, group=ranks)
    if mapped is None or not all(opened):
        return None
    timeout = ranks._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    return Channel(mapped, ranks, [pid for _, pid, *_ in told], timeout)


def _code(kind: str, dtype: torch.dtype) -> int:
    return KINDS.index(kind) + len(KINDS) * DTYPES.index(dtype)


def _told(code: int) -> str:
    return f"{KINDS[code % len(KINDS)]} of {DTYPES[code // len(KINDS)]}"


def _machine() -> str:
    """What processes that can share memory have in common; nothing if this one can share none."""
    if platform.machine() not in ("x86_64", "AMD64") or not hasattr(os, "memfd_create"):  # that is Linux
        return ""
    with suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text()} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _alive(pid: int) -> bool:
    """Whether a process runs. One that has ended and that nobody has asked about yet does not."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
