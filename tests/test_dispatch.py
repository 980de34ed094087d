"""A kernel in Python is called at once where torch's dispatcher would only look it up, and nowhere else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import khot
from khot._core.dispatch import OPERATORS, define
from khot._core.precision import wide_dtype

OPERATOR = OPERATORS["topk_mask"]
X = torch.tensor([[3.0, 1.0, 2.0], [1.0, 2.0, 3.0]])
K = torch.tensor(2.0, dtype=torch.float64)


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Subclass(Tensor):
    pass


def serve(monkeypatch: pytest.MonkeyPatch, operator: Any, kernel: Callable[..., Any]) -> None:
    """Let the operator call this kernel on the CPU, for one test."""
    monkeypatch.setattr(operator, "_faster", {})
    monkeypatch.setattr(operator, "compute", operator.compute)
    operator.serve("cpu", kernel)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls without the dispatcher."""
    calls: list[Any] = []

    def kernel(*args: Any) -> Any:
        calls.append(args)
        return OPERATOR.kernel(*args)

    serve(monkeypatch, OPERATOR, kernel)
    return calls


@pytest.mark.parametrize(
    "x", [X, torch.nn.Parameter(X), X.expand(2, 2, 3)], ids=["plain", "parameter", "view"]
)
def test_a_plain_call_goes_to_the_kernel(called: list[Any], x: Tensor) -> None:
    y = OPERATOR(x, K)
    assert len(called) == 1
    assert torch.equal(y, (x > 1).to(x.dtype))


@pytest.mark.parametrize(
    "context",
    [
        Functions,
        Operations,
        lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    ],
    ids=["function mode", "dispatch mode", "profiler"],
)
def test_what_sees_operators_sees_this_one(called: list[Any], context: Callable[[], Any]) -> None:
    with context():
        y = OPERATOR(X, K)
    assert not called
    assert torch.equal(y, (X > 1).float())


def test_the_profiler_has_its_name() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        OPERATOR(X, K)
    assert "khot::topk_mask" in {event.key for event in profile.key_averages()}


@pytest.mark.parametrize(
    "x",
    [
        torch.complex(torch.zeros(2, 3), -X).conj().imag,
        X.as_subclass(Subclass),
        torch._efficientzerotensor((2, 3)),
    ],
    ids=["negative", "subclass", "zeros"],
)
def test_other_tensors_go_to_the_dispatcher(called: list[Any], x: Tensor) -> None:
    with contextlib.suppress(NotImplementedError):  # torch's, of zeros that are not in memory
        y = OPERATOR(x, K)
        assert torch.equal(y.as_subclass(Tensor), OPERATOR.kernel(x.clone().as_subclass(Tensor), K))
    assert not called


def test_transforms_go_to_the_dispatcher(called: list[Any]) -> None:
    y = torch.func.vmap(lambda x: OPERATOR(x, K))(X)
    assert not [args for args in called if torch._C._functorch.is_functorch_wrapped_tensor(args[0])]
    assert torch.equal(y, (X > 1).float())


def test_gradients_of_all_kinds_pass_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The soft top-k, its backward kernel included, with derivatives that the kernels do not have."""
    for name in ("soft_topk", "soft_topk_backward"):
        operator = OPERATORS[name]
        serve(monkeypatch, operator, operator.kernel)
    x = torch.randn(2, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x.requires_grad_()
    tau = torch.ones(2, dtype=torch.float64, requires_grad=True)

    def call(x: Tensor, tau: Tensor) -> Tensor:
        return khot.soft_topk(x, 3, tau=tau)

    assert torch.autograd.gradcheck(call, (x, tau), check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(call, (x, tau))


def test_an_operator_is_what_its_kernel_says() -> None:
    """The schema is the kernel's annotations, and the results are as the words say."""

    def kernel(
        x: Tensor, known: Tensor | None, k: int, tau: float, name: str, fast: bool, dtype: torch.dtype,
        y: Tensor | None = None, group: str = "", *, chosen: Any = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        rows = x.new_zeros(x.shape[:-1], dtype=wide_dtype(x.device))
        return x.clone(), rows, x.new_zeros(x.shape, dtype=torch.int32), x.new_zeros(x.shape[:-1])

    operator = define("test_of_words", kernel, "x, x[row] wide, x int32, x[row]", spread=True)
    try:
        arguments = "Tensor x, Tensor? known, SymInt k, float tau, str name, bool fast, ScalarType dtype"
        four = "(Tensor, Tensor, Tensor, Tensor)"
        given = f"({arguments}, Tensor? y=None) -> {four}"
        spread = f"({arguments}, Tensor? y, str group) -> {four}"
        assert str(operator.overload._schema) == f"khot::test_of_words{given}"
        assert str(operator.spread.overload._schema) == f"khot::reference_test_of_words{spread}"
        for _ in range(5):
            shape = [int(n) for n in torch.randint(0, 4, (int(torch.randint(1, 4, ())),))]
            args = torch.zeros(shape, dtype=torch.bfloat16), None, 3, 1.0, "", True, torch.float32
            torch.library.opcheck(operator.overload, args, test_utils=("test_schema", "test_faketensor"))
    finally:
        del OPERATORS["test_of_words"], OPERATORS["reference_test_of_words"]
