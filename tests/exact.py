"""transformers in float64 throughout.

Its models compute norms, rotary tables, eager softmax and the loss in float32 whatever the dtype of their weights, so that a
float64 model differs from exact arithmetic by 1e-7. In here they do not, and 1e-9 tells a wrong term from rounding.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor


class _Float64(ModuleType):
    """torch, where float32 is float64."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def exact() -> Iterator[None]:
    """Models of transformers, of modules that are imported already, compute in float64 while they are built and run in here."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("transformers.")]
    with ExitStack() as stack:
        for module in modules:
            if vars(module).get("torch") is torch:
                stack.enter_context(mock.patch.object(module, "torch", _Float64("torch")))
        stack.enter_context(mock.patch.object(Tensor, "float", Tensor.double))
        yield
