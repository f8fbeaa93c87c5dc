"""What compiled code communicates through on CPUs: torch's functional collectives, over a process group of our own.

torch.compile traces the functional collectives alone. It keeps their order, which must be that of the other ranks, runs none twice
unless it is told to, and lets other work run between their beginning and the wait. They find who carries a tensor by a name, when
they run. Under a name of ours they find a :class:`Carrier`, which takes the path that eager code takes. (Its base class and the
registration are torch's own, but not public: tests/test_compile.py holds what they do to eager code's results.)
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _register_process_group

from parallel import shared_memory

_carriers: WeakKeyDictionary[dist.ProcessGroup, tuple[str, Carrier]] = WeakKeyDictionary()
_numbers = count()


def carrier(ranks: dist.ProcessGroup) -> str:
    """The name of a process group of the same ranks whose CPUs exchange through shared memory where they can."""
    if ranks not in _carriers:
        # The number: torch knows a name (and keeps the small carrier) for good, a process group may end, and another have its name.
        name = f"{ranks.group_name}/shared memory {next(_numbers)}"
        _carriers[ranks] = name, Carrier(ranks)
        _register_process_group(dist.GroupName(name), _carriers[ranks][1])
    return _carriers[ranks][0]


class Carrier(dist.ProcessGroup):
    """The three collectives that compiled code begins, through shared memory or else by the process group. Torch calls them with
    lists since it can join several."""

    def __init__(self, ranks: dist.ProcessGroup) -> None:
        super().__init__(ranks.rank(), ranks.size())  # type: ignore[call-arg]
        self._ranks = ref(ranks)  # which must be free to end

    @property
    def _own(self) -> dist.ProcessGroup:
        ranks = self._ranks()
        if ranks is None:
            raise RuntimeError("compiled code communicates over a process group that has ended")
        return ranks

    def allreduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        return _Work([self._all_reduce(tensor, opts) for tensor in tensors])

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        return _Work([self._all_gather(output, x) for output, x in zip(outputs, inputs, strict=True)])

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        return _Work([self._reduce_scatter(output, x, opts) for output, x in zip(outputs, inputs, strict=True)])

    def _all_reduce(self, x: Tensor, opts: Any) -> Callable[[], object]:
        if opts.reduceOp == dist.ReduceOp.SUM and (channel := shared_memory.channel(self._own, x.nbytes)):
            pending = shared_memory.start_all_reduce(x, channel, x)
            if not shared_memory.in_parts(x, channel):
                return pending
            total = pending()  # at once: the compiler keeps the order of beginnings, but not of waits
            return lambda: total
        return self._own.allreduce([x], opts).wait

    def _all_gather(self, output: Tensor, x: Tensor) -> Callable[[], object]:
        if channel := shared_memory.channel(self._own, x.nbytes):
            return shared_memory.start_all_gather(x, channel, [x.shape[0]] * self.size(), output)
        return self._own.all_gather_single(output, x).wait

    def _reduce_scatter(self, output: Tensor, x: Tensor, opts: Any) -> Callable[[], object]:
        if channel := shared_memory.channel(self._own, x.nbytes):  # only sums are begun
            return shared_memory.start_reduce_scatter(x, channel, [output.shape[0]] * self.size(), output)
        return self._own.reduce_scatter_single(output, x, opts).wait


class _Work(dist.Work):
    """Collectives under way, as torch waits for them."""

    def __init__(self, waits: list[Callable[[], object]]) -> None:
        super().__init__()
        self._waits = waits

    def wait(self, timeout: object = None) -> bool:
        for wait in self._waits:
            wait()
        return True
