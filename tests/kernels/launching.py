"""What the tests of launches without Python share: the device that records them, and how calls are compared.

Tests that use these fixtures are run by `test_native.py`, in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import triton
from benchmarks import host
from torch import Tensor
from triton.runtime import driver

import recorded
from answers import answers
from khot._core import arguments, eager
from khot._kernels.triton import launch


@pytest.fixture(scope="module", autouse=True)
def device() -> Iterator[None]:
    recorded.library()
    host._register()
    driver.set_active(recorded.Driver())  # type: ignore[arg-type]
    launch.forget()  # what was prepared for the driver of another file
    recorded.use()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arguments, "readable", lambda *_, **__: False)
        patch.setattr(triton.compiler, "compile", recorded.NotCompiled)
        yield


@pytest.fixture
def seen() -> Iterator[list[recorded.Launch]]:
    """The launches, in whose place the reference kernels write the results."""
    found: list[recorded.Launch] = []
    recorded.emulate(found)
    yield found
    recorded.stop()


@contextmanager
def ordinary(start: bool = True) -> Iterator[None]:
    """The ordinary way for every call; with ``start``, by Triton's launcher."""
    with pytest.MonkeyPatch.context() as patch:
        for name in (*eager.ON_GPUS, "start") if start else eager.ON_GPUS:
            patch.setattr(eager, name, eager._ordinary)
        yield


def scores(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


def with_gradient(call: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> list[Tensor]:
    leaf = x.detach().requires_grad_()
    y = call(leaf)
    return [y.detach(), *torch.autograd.grad(y, leaf, grad)]


def prepare(call: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Make the call once, with its gradient."""
    with_gradient(call, x, torch.ones_like(x))


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(
        torch.equal(x, y) and x.dtype == y.dtype and x.stride() == y.stride()
        for x, y in zip(a, b, strict=True)
    )


def of_operators(launches: list[recorded.Launch]) -> list[recorded.Launch]:
    """Those that the ordinary way makes, too, and not what goes around them."""
    return [each for each in launches if recorded.compiled[each.function - 1].name != "_around"]


def same_launch(own: recorded.Launch, tritons: recorded.Launch) -> bool:
    """Whether both pass the same but for the addresses, which are of other tensors, and as many of these."""
    kinds = (*recorded.compiled[own.function - 1].kept.values(), "scratch", "scratch")
    passed = zip(kinds, own.values, tritons.values, strict=True)
    same_place = (own.function, own.place) == (tritons.function, tritons.place)
    return same_place and all(a != 0 if kind.startswith("*") else a == b for kind, a, b in passed)


COST = torch.rand(6, 32, generator=torch.Generator().manual_seed(1)) + 0.1
EACH = torch.arange(1, 7) / 2  # a number for each row


def agrees(
    call: Callable[[Tensor], Tensor],
    x: Tensor,
    name: str = "soft_topk",
    rows: bool = True,
    seen: list[recorded.Launch] | None = None,
) -> None:
    """With and without a gradient, once it is prepared; with ``seen``, the launches are Triton's, too."""
    seen, grad = [] if seen is None else seen, x.flip(0)
    seen.clear()
    with ordinary():
        wanted = with_gradient(call, x, grad)
    theirs = list(seen)
    prepare(call, x)
    seen.clear()
    with answers(name) as answered:
        found = with_gradient(call, x, grad)
        own = of_operators(seen)
        with torch.no_grad():
            assert torch.equal(call(x), wanted[0])
        with torch.inference_mode():
            assert call(x).is_inference() and torch.equal(call(x), wanted[0])
    assert answered == [True] * 4 and len(own) == len(theirs)
    if (
        not rows
    ):  # the ordinary way's last operation decides how far their entries are apart, and the gradients'
        found, wanted = ([each.contiguous() for each in both] for both in (found, wanted))
        own, theirs = own[:1], theirs[:1]
    assert same(found, wanted) and all(map(same_launch, own, theirs))


Calls = Sequence[Callable[[], Any]]


def takes_the_ordinary_way(name: str, calls: Calls, wrong: Sequence[tuple[Callable[[], Any], str]]) -> None:
    """No call is answered, nor an error made, elsewhere; and no random number is used twice, or before an
    error."""

    def state(call: Callable[[], Any]) -> Tensor:
        torch.manual_seed(3)
        call()
        return torch.get_rng_state()

    for call in calls:
        with answers(name) as answered:
            after = state(call)
        assert answered == [False]
        with ordinary():
            assert torch.equal(state(call), after)
    before = torch.get_rng_state()
    for call, message in wrong:
        for _ in range(3):  # nor is a plan made
            with answers(name) as answered, pytest.raises((ValueError, TypeError), match=message):
                call()
            assert answered == [False] and torch.equal(torch.get_rng_state(), before)
