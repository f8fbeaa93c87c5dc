"""Products through oneDNN are torch's own, in forward and backward, and nothing but the speed tells them apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from parallel import matmul as module
from parallel.group import TPGroup
from parallel.matmul import linear, matmul
from tests import test_equality, test_invariance
from tests.equality import TOLERANCES, Variant, assert_equal, make_inputs, measure, reference
from tests.helpers import onednn_everywhere
from tests.pool import Pool

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch was built without oneDNN")

ONEDNN, MM = "mkldnn::_linear_pointwise", {"aten::mm", "aten::addmm", "aten::matmul", "aten::linear"}


@pytest.fixture
def onednn() -> Iterator[None]:
    with onednn_everywhere():
        yield


class Products(TorchDispatchMode):
    """The names of the operators that multiply matrices, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().partition(".")[0] in MM | {ONEDNN}:
            self.names.append(func.name().partition(".")[0])
        return func(*args, **(kwargs or {}))


def grads(
    function: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None, again: bool = False
) -> list[Tensor]:
    """y, the gradients, and with ``again`` the gradients of these gradients' squares."""
    inputs = [t.detach().requires_grad_() for t in (x, weight, bias) if t is not None]
    y = function(*inputs)
    first = torch.autograd.grad((y * y).sum(), inputs, create_graph=again)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), inputs) if again else []  # type: ignore[arg-type]
    return [y, *first, *second]


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


INPUTS = {
    "matrix": (numbers(33, 20), numbers(7, 20)),
    "batches": (numbers(3, 5, 20), numbers(7, 20)),
    "columns of a wider one": (numbers(9, 44)[:, 4:24], numbers(7, 20)),
    "transposed": (numbers(20, 9).t(), numbers(20, 7).t()),
    "one row": (numbers(1, 20), numbers(7, 20)),
    "one column": (numbers(9, 1), numbers(7, 1)),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", INPUTS)
def test_a_linear_and_its_gradients(onednn: None, name: str, bias: bool) -> None:
    x, weight = INPUTS[name]
    b = numbers(weight.shape[0]) if bias else None
    with Products() as seen:
        ours = grads(linear, x, weight, b)
    assert seen.names == [ONEDNN] * 3
    for value, expected in zip(ours, grads(F.linear, x, weight, b), strict=True):
        torch.testing.assert_close(value, expected)


@pytest.mark.parametrize(
    "bias", [numbers(14)[::2], numbers(1).expand(7), numbers(1), numbers(1, 7)], ids=lambda b: f"{[*b.shape]}"
)
def test_a_bias_of_any_strides_and_shape(onednn: None, bias: Tensor) -> None:
    x, weight = INPUTS["batches"]
    for value, expected in zip(grads(linear, x, weight, bias), grads(F.linear, x, weight, bias), strict=True):
        torch.testing.assert_close(value, expected)
    with pytest.raises(RuntimeError):
        linear(x, weight, numbers(6))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_transforms_of_torch_func(onednn: None, compiled: bool) -> None:
    (x, weight), bias = INPUTS["batches"], numbers(7)

    def all_of(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        def loss(x: Tensor) -> Tensor:
            return function(x, weight, bias).square().sum()

        torch._dynamo.reset()
        transforms = torch.func.grad(loss), torch.func.vmap(loss), lambda x: torch.func.jvp(loss, (x,), (x,))[1]
        if compiled:
            transforms = tuple(torch.compile(f, backend="aot_eager", fullgraph=True) for f in transforms)  # type: ignore[assignment]
        return tuple(f(x) for f in transforms)

    for value, expected in zip(all_of(linear), all_of(F.linear), strict=True):
        torch.testing.assert_close(value, expected)


def test_forward_mode_differentiation(onednn: None) -> None:
    x, weight = INPUTS["batches"]
    with forward_ad.dual_level():
        y = linear(forward_ad.make_dual(x, x), weight, numbers(7))
        assert y.grad_fn is None
        torch.testing.assert_close(forward_ad.unpack_dual(y).tangent, x @ weight.t())


def test_only_a_bias_to_be_trained(onednn: None) -> None:
    x, weight = INPUTS["matrix"]
    bias = numbers(7).requires_grad_()
    for product in (linear(x, weight, bias), matmul(x, weight.t(), bias)):
        product.sum().backward()
    torch.testing.assert_close(bias.grad, torch.full((7,), 2.0 * len(x)))


@pytest.mark.parametrize("most", [1, 60, 10**9])
def test_a_transposed_operand_is_copied_in_parts(onednn: None, most: int) -> None:
    a, b = numbers(20, 9).t(), numbers(20, 7)
    with mock.patch.object(module, "MOST_COPIED", most), torch.no_grad(), Products() as seen:
        y, spared = matmul(a, b, numbers(7)), matmul(a, b, spare=numbers(9, 20))
        batches = matmul(numbers(6, 5, 20)[::2], b)
        wider = matmul(a, numbers(20, 21))
    torch.testing.assert_close(y, a @ b + numbers(7))
    torch.testing.assert_close(spared, a @ b)
    torch.testing.assert_close(batches, numbers(6, 5, 20)[::2] @ b)
    torch.testing.assert_close(wider, a @ numbers(20, 21))
    assert len(seen.names) == {1: 9 + 1 + 3, 60: 3 + 1 + 3, 10**9: 3}[most] + 1


def test_the_gradient_of_a_gradient(onednn: None) -> None:
    x, weight = INPUTS["matrix"]
    ours, theirs = (grads(f, x, weight, numbers(7), again=True) for f in (linear, F.linear))
    for value, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-3)


def test_only_what_is_asked_for_is_computed(onednn: None) -> None:
    x, weight = INPUTS["matrix"]
    for frozen in (0, 1):
        inputs = [t.clone().requires_grad_(i != frozen) for i, t in enumerate((x, weight))]
        with Products() as seen:
            linear(*inputs).sum().backward()
        assert seen.names == [ONEDNN] * 2 and inputs[frozen].grad is None
    with torch.no_grad():
        assert linear(x, weight).grad_fn is None


def test_what_is_left_to_torch(onednn: None, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = INPUTS["matrix"]

    def by_torch(x: Tensor, weight: Tensor) -> bool:
        with Products() as seen, torch.no_grad():
            assert linear(x, weight).dtype == matmul(x, weight.t()).dtype == F.linear(x, weight).dtype
        return ONEDNN not in seen.names

    assert not by_torch(x, weight)
    assert by_torch(x.double(), weight.double())
    assert by_torch(x[0], weight)
    assert by_torch(x[:0], weight)
    with torch.autocast("cpu"):
        assert by_torch(x, weight)
    for name, most in (("FEWEST_ROWS", 33), ("FEWEST_PRODUCTS", 33 * 20 * 7)):
        with mock.patch.object(module, name, most):
            assert not by_torch(x, weight)
        with mock.patch.object(module, name, most + 1):
            assert by_torch(x, weight)
    for where, name in ((torch.backends.mkldnn, "enabled"), (module, "ONEDNN_IS_FASTER")):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, False)
            assert by_torch(x, weight)
        assert not by_torch(x, weight)


def test_sizes_that_do_not_fit_are_torchs_error(onednn: None) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        linear(numbers(3, 4), numbers(5, 6))


@pytest.mark.parametrize(
    ("found", "faster"),
    [
        ({"avx512_f": True, "cpu_name": "AMD EPYC"}, True),
        ({"avx512_f": False, "cpu_name": "AMD EPYC"}, False),
        ({"avx512_f": True, "cpu_name": "Intel(R) Xeon(R) Platinum"}, False),
        ({"architecture": "aarch64"}, False),
    ],
)
def test_which_processors(monkeypatch: pytest.MonkeyPatch, found: dict[str, Any], faster: bool) -> None:
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)
    assert module._onednn_is_faster() is faster
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert not module._onednn_is_faster()


def test_operations_are_counted(onednn: None) -> None:
    x, weight = INPUTS["batches"]
    for function in (linear, F.linear, lambda x, w, b: torch.ops.tpblock.matmul(x, w.t(), b)):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            function(x, weight, numbers(7))
        assert counter.get_total_flops() == 2 * 15 * 20 * 7


def test_a_compiled_linear(onednn: None) -> None:
    x, weight = INPUTS["batches"]
    with mock.patch.object(module, "_onednn", wraps=module._onednn) as calls:
        ours = grads(torch.compile(linear, backend="aot_eager", fullgraph=True), x, weight, numbers(7))
    assert calls.call_count == 3
    for value, expected in zip(ours, grads(F.linear, x, weight, numbers(7)), strict=True):
        torch.testing.assert_close(value, expected)


def test_switched_off_after_compilation(onednn: None, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = INPUTS["batches"]
    compiled = torch.compile(linear, backend="aot_eager", fullgraph=True)
    with mock.patch.object(module, "_onednn", wraps=module._onednn) as calls:
        compiled(x, weight)
        monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
        torch.testing.assert_close(compiled(x, weight), F.linear(x, weight))
    assert calls.call_count == 1


def test_recomputation_stops_before_the_last_product(onednn: None) -> None:
    x, first, last = numbers(9, 20).requires_grad_(), numbers(7, 20), numbers(5, 7)
    with Products() as seen:
        checkpoint(lambda x: linear(linear(x, first).relu(), last), x, use_reentrant=False).sum().backward()
    assert seen.names == [ONEDNN] * (2 + 1 + 2)


def measured(group: TPGroup, case: Any, inputs: Any, variants: list[Variant]) -> Any:
    with onednn_everywhere(), Products() as seen:
        results = measure(group, case, inputs, variants)
    assert seen.names.count(ONEDNN) > 20
    return results


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", ["llama", "gpt2", "palm", "fewer tokens than ranks"])
def test_models_equal_the_oracle(pool: Pool, name: str, ranks: int) -> None:
    case = test_equality.CASES[name]
    variants = [Variant(sequence_parallel=sp, dtype=torch.float32) for sp in (False, True)]
    expected = reference(case, torch.float32)
    for rank, results in enumerate(pool.run(ranks, measured, case, make_inputs(case), variants)):
        for variant, result in zip(variants, results, strict=True):
            assert_equal(result, expected, case.config, TOLERANCES[torch.float32], f"rank {rank} of {ranks}, {variant}")


def against_single(group: TPGroup, cases: list[test_invariance.Case]) -> list[list[str]]:
    with onednn_everywhere():
        return test_invariance.against_single(group, cases)


@pytest.mark.parametrize("ranks", [2, 3])
def test_invariant_mode_has_the_same_bytes(pool: Pool, ranks: int) -> None:
    cases = [
        test_invariance.Case(test_invariance.CONFIGS[name], sequence_parallel=sp)
        for name in ("grouped-query", "gpt", "uneven")
        for sp in (False, True)
    ]
    assert pool.run(ranks, against_single, cases)[0] == [[]] * len(cases)
