"""Launches without Python of calls whose numbers are learned: run by `test_native.py` with `launches.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

import khot
import recorded
from answers import answers
from kernels.launching import COST, device, of_operators, ordinary, same, scores, seen
from khot._core import eager
from khot._kernels.triton import launch

__all__ = ["device", "seen"]  # fixtures

Call = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def nothing_is_prepared() -> None:
    eager.forget(), launch.forget()


#: Calls of rows (..., 32) and a number between 1 and 3, and the extension's names for them.
LEARNED: dict[str, tuple[str, Call]] = {
    "k": ("soft_topk", lambda x, a: khot.soft_topk(x, a)),
    "tau": ("soft_topk", lambda x, a: khot.soft_topk(x, 3, tau=a)),
    "both": ("soft_topk", lambda x, a: khot.soft_topk(x, a, tau=a)),
    "tau, masked": ("soft_topk", lambda x, a: khot.soft_topk(x, 3, tau=a, mask=COST[0] > 0.3)),
    "tau, log": ("soft_topk", lambda x, a: khot.log_soft_topk(x, 3, tau=a)),
    "tau, hard": ("soft_topk", lambda x, a: khot.soft_topk(x, 3, tau=a, hard=True)),
    "tau of magnitudes": ("soft_topk_magnitude", lambda x, a: khot.soft_topk_magnitude(x, 3, tau=a)),
    "budget": ("soft_budget", lambda x, a: khot.soft_budget(x, COST[0], a)),
    "tau by value": ("soft_budget", lambda x, a: khot.soft_budget(x, COST[0], 3.3, tau=a, by="value")),
    "tau of ranks": ("soft_rank", lambda x, a: khot.soft_rank(x, tau=a, descending=True)),
    "tau of a sort": ("soft_sort", lambda x, a: khot.soft_sort(x, tau=a, descending=True)),
}
learned = pytest.mark.parametrize("name", LEARNED)


def number(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    draws = torch.rand(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return (1 + 2 * draws).to(dtype)


def gradients(call: Call, x: Tensor, a: Tensor, grad: Tensor, wanted: tuple[bool, bool]) -> list[Tensor]:
    leaves = [v.detach().requires_grad_(w) for v, w in zip((x, a), wanted, strict=True)]
    y = call(*leaves)
    return [y.detach(), *torch.autograd.grad(y, [v for v in leaves if v.requires_grad], grad)]


@learned
@pytest.mark.parametrize("shape", [(1,), (3,), (2, 1), (2, 3)], ids=str)
def test_gradients_are_those_of_the_ordinary_way(
    name: str, shape: tuple[int, ...], seen: list[recorded.Launch]
) -> None:
    entry, call = LEARNED[name]
    x, grad = scores(2, 3, 32), scores(2, 3, 32).flip(-1)
    for wanted in ((True, True), (False, True)):
        for dtype in (torch.float32, torch.float64):
            a = number(*shape, dtype=dtype)
            with ordinary():
                right = gradients(call, x, a, grad, wanted)
            gradients(call, x, a, grad, wanted)
            seen.clear()
            with answers(entry) as answered:
                found = gradients(call, x, a, grad, wanted)
            assert answered == [True] and len(of_operators(seen)) == (3 if name == "tau, hard" else 2)
            assert same(found, right) and found[-1].shape == a.shape


@learned
def test_second_derivatives(name: str, seen: list[recorded.Launch]) -> None:
    entry, call = LEARNED[name]
    x, a = scores(6, 32).requires_grad_(), number(6).requires_grad_()
    v = scores(6, 32).flip(0)

    def derivatives() -> list[Tensor]:
        dx, da = torch.autograd.grad(call(x, a), (x, a), v, create_graph=True)
        return [dx, da, *torch.autograd.grad(dx.square().sum() + da.square().sum(), (x, a))]

    with ordinary():
        wanted = derivatives()
    gradients(call, x, a, v, (True, True))
    with answers(entry) as answered:
        found = derivatives()
    assert answered == [True]
    assert all(torch.allclose(p, q, rtol=1e-4, atol=1e-5) for p, q in zip(found, wanted, strict=True))


def test_a_number_that_is_computed_has_its_own_gradient(seen: list[recorded.Launch]) -> None:
    """It is expanded to the rows, and an integer is converted, before the launch sees it."""
    x, raw = scores(2, 3, 32), torch.tensor([[0.5], [1.0]], requires_grad=True)
    call = lambda: torch.autograd.grad(khot.soft_topk(x, 3, tau=raw.exp()).square().sum(), raw)  # noqa: E731
    with ordinary():
        wanted = call()
    call()
    with answers() as answered:
        found = call()
    assert answered == [True] and same(list(found), list(wanted))


def test_compiled_autograd_knows_the_numbers(seen: list[recorded.Launch]) -> None:
    from torch._dynamo import compiled_autograd

    _, call = LEARNED["tau"]
    x, a, grad = scores(6, 32), number(1), torch.ones(6, 32)
    grad[:, ::2] = -1
    with ordinary():
        _, *wanted = gradients(call, x, a, grad, (True, True))
    gradients(call, x, a, grad, (True, True))
    leaves = x.clone().requires_grad_(), a.clone().requires_grad_()
    with compiled_autograd._enable(partial(torch.compile, backend="eager")), answers() as answered:
        call(*leaves).backward(grad)
    assert answered == [True]
    assert same([v.grad for v in leaves if v.grad is not None], wanted)
