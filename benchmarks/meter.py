"""How many bytes tensors take, measured: on the CPU by following their storages, on a GPU by its allocator."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary


class LiveBytes(TorchDispatchMode):
    """Follows the storages that operations under it make, each counted once however many tensors view it.

    What an operation allocates and frees within itself is not seen, and storages from before do not count, nor does their end.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known = WeakIdKeyDictionary()
        self._lock = threading.RLock()  # a storage may end in the thread that sent it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for storage in _storages((args, kwargs)):
            self._known.setdefault(storage, None)
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            if storage not in self._known:
                self._known[storage] = None
                self._add(storage.nbytes())
                weakref.finalize(storage, self._add, -storage.nbytes())
        return result

    def _add(self, size: int) -> None:
        with self._lock:
            self.now += size
            self.peak = max(self.peak, self.now)


class AllocatedBytes:
    """The same from the allocator of a CUDA device, which rounds each block up to 512 bytes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __enter__(self) -> AllocatedBytes:
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self._before = torch.cuda.memory_allocated(self.device)
        return self

    def __exit__(self, *error: object) -> None:
        pass

    @property
    def now(self) -> int:
        return torch.cuda.memory_allocated(self.device) - self._before

    @property
    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device) - self._before


def meter(device: torch.device) -> LiveBytes | AllocatedBytes:
    """To be used with ``with``: bytes that operations under it have allocated and that still live, and the most at once."""
    return AllocatedBytes(device) if device.type == "cuda" else LiveBytes()


def held_bytes(tensors: Iterable[object]) -> int:
    """Bytes of the storages of these tensors (found in any nest of lists and dicts), each once."""
    return sum(storage.nbytes() for storage in {id(s): s for s in _storages(list(tensors))}.values())


def _storages(values: object) -> list[torch.UntypedStorage]:
    return [value.untyped_storage() for value in tree_iter(values) if isinstance(value, Tensor)]
