"""Calls without Python, by one table: run by `test_native.py` with `launches.py`."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import khot
import recorded
from answers import answers
from kernels.launching import (
    COST,
    EACH,
    agrees,
    device,
    of_operators,
    ordinary,
    prepare,
    same,
    scores,
    seen,
    takes_the_ordinary_way,
    with_gradient,
)
from khot._core import eager
from khot._kernels.triton import launch

__all__ = ["device", "seen"]  # fixtures

CDFS = ("logistic", "laplace", "normal", "uniform")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

#: Calls of rows (6, 32) that are plain, and the extension's names for them.
PLAIN: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "plain": ("soft_topk", lambda x: khot.soft_topk(x, 3, tau=0.7)),
    **{
        name: ("soft_topk", partial(getattr(khot, f"{name}_topk"), k=3))
        for name in ("sigmoid", "laplace", "sparse")
    },
    "magnitude": ("soft_topk_magnitude", lambda x: khot.soft_topk_magnitude(x, 3, tau=0.7)),
    "magnitude, p": ("soft_topk_magnitude", lambda x: khot.soft_topk_magnitude(x, 3, p=1.5)),
    "magnitude, k": ("soft_topk_magnitude", lambda x: khot.soft_topk_magnitude(x, torch.arange(6), tau=EACH)),
    "budget": ("soft_budget", lambda x: khot.soft_budget(x, COST, 3.3, tau=0.7)),
    "budget of columns": ("soft_budget", lambda x: khot.soft_budget(x, COST[0], 3.3, cdf="normal")),
    "budget, by value": ("soft_budget", lambda x: khot.soft_budget(x, COST, EACH, by="value", at_most=True)),
    "budget, smallest": ("soft_budget", lambda x: khot.soft_budget(x, COST, 3, largest=False)),
    "rank": ("soft_rank", lambda x: khot.soft_rank(x, tau=0.7)),
    "rank, descending": ("soft_rank", lambda x: khot.soft_rank(x, tau=EACH, descending=True)),
    "sort": ("soft_sort", lambda x: khot.soft_sort(x, tau=0.7)),
    "sort, descending": ("soft_sort", lambda x: khot.soft_sort(x, tau=EACH, descending=True)),
    "magnitude, masked": ("soft_topk_magnitude", lambda x: khot.soft_topk_magnitude(x, 3, mask=COST > 0.3)),
    "budget, masked": ("soft_budget", lambda x: khot.soft_budget(x, COST[0], 3.3, mask=COST > 0.3)),
    "budget, masked columns": (
        "soft_budget",
        lambda x: khot.soft_budget(x, COST, EACH, mask=COST[0] > 0.3, largest=False),
    ),
    "rank, masked": ("soft_rank", lambda x: khot.soft_rank(x, tau=0.7, mask=COST > 0.3)),
    "rank, descending, masked columns": (
        "soft_rank",
        lambda x: khot.soft_rank(x, descending=True, mask=COST[0] > 0.3),
    ),
    "sort, masked": ("soft_sort", lambda x: khot.soft_sort(x, tau=0.7, mask=COST > 0.3)),
    "sort, descending, masked columns": (
        "soft_sort",
        lambda x: khot.soft_sort(x, descending=True, mask=COST[0] > 0.3),
    ),
    "transport": ("soft_topk", lambda x: khot.ot_topk(x, 3, epsilon=0.3)),
    "masked": ("soft_topk", lambda x: khot.soft_topk(x, 3, mask=COST > 0.3)),
    "masked columns": ("soft_topk", lambda x: khot.soft_topk(x, 3, mask=COST[0] > 0.3)),
    "smallest": ("soft_topk", lambda x: khot.log_soft_topk(x, 3, largest=False)),
    "k of each row": ("soft_topk", lambda x: khot.soft_topk(x, EACH)),
    "k of each row, integers": ("soft_topk", lambda x: khot.soft_topk(x, torch.arange(1, 7))),
    "k of each row, strided": ("soft_topk", lambda x: khot.soft_topk(x, EACH.double().repeat(2)[::2] + 1)),
    "tau of each row": ("soft_topk", lambda x: khot.soft_topk(x, 3, tau=EACH.double())),
    "both of all rows": ("soft_topk", lambda x: khot.soft_topk(x, EACH[:1] + 2, tau=EACH[:1])),
}


#: The same of their columns, which are copied. Gradients come in other strides, so their launches differ.
COLUMNS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "columns": ("soft_topk", lambda x: khot.soft_topk(x, 3, 0)),
    "columns, masked": ("soft_topk", lambda x: khot.soft_topk(x, EACH.new_ones(32), -2, mask=COST > 0.3)),
    "columns, as rows": ("soft_topk", lambda x: khot.soft_topk(x.mT, 3).mT),
    "hard": ("topk_mask", lambda x: khot.topk_mask(x, 3) * x),
    "hard, k of a half": ("topk_mask", lambda x: khot.topk_mask(x, 2.5) * x),
    "columns, hard": ("topk_mask", lambda x: khot.topk_mask(x, 3, 0) * x),
    "columns of magnitudes": ("soft_topk_magnitude", lambda x: khot.soft_topk_magnitude(x, 3, 0)),
    "columns of ranks, masked": ("soft_rank", lambda x: khot.soft_rank(x, 0, mask=COST[:, :1] > 0.3)),
    "columns of a sort": ("soft_sort", lambda x: khot.soft_sort(x, 0)),
}


#: Calls of rows (..., 32) and a number between 1 and 3, and the extension's names for them.
LEARNED: dict[str, tuple[str, Callable[[Tensor, Tensor], Tensor]]] = {
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


@pytest.mark.parametrize("name", PLAIN | COLUMNS)
def test_plain_calls_are_those_of_the_ordinary_way(name: str, seen: list[recorded.Launch]) -> None:
    """With the launches that Triton would make. The gradients of columns come in other strides."""
    entry, call = (PLAIN | COLUMNS)[name]
    agrees(call, scores(6, 32), entry, name in PLAIN, seen)


@pytest.mark.parametrize("name", PLAIN | COLUMNS)
def test_checkpoints(name: str, seen: list[recorded.Launch]) -> None:
    """What a call saves is counted, and again when it is made again; so all calls go the same way."""
    _, call = (PLAIN | COLUMNS)[name]
    x, grad = scores(6, 32), scores(6, 32).flip(0)
    wanted = with_gradient(call, x, grad)
    launch.forget()
    for _ in range(2):
        leaf = x.clone().requires_grad_()
        y = checkpoint(lambda x: call(x) * 1, leaf, use_reentrant=False)
        found = [y.detach(), *torch.autograd.grad(y, leaf, grad)]
        assert all(torch.allclose(a, b, rtol=1e-6, atol=1e-6) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [1, 3, 32])
def test_topk_of_short_rows(k: int, dtype: torch.dtype, seen: list[recorded.Launch]) -> None:
    """With ties and NaN, of rows, of columns of another tensor, and of one row."""
    x = scores(6, 32, dtype=dtype).round(decimals=1)
    x[0, 3] = torch.nan
    v = scores(6, k, dtype=dtype)

    def found(x: Tensor, **flags: bool) -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        values, indices = khot.topk(leaf, k, **flags)
        assert not indices.requires_grad
        (grad,) = torch.autograd.grad(values, leaf, v[: len(values)].view_as(values), create_graph=True)
        assert grad.requires_grad is False or values.requires_grad
        return [values.detach().nan_to_num(7), indices, grad.detach()]

    for given, flags in (
        (x, {}),
        (x, {"largest": False}),
        (x, {"sorted": False}),
        (x.T.contiguous().T, {}),
        (x[2:3], {}),
        (x[:4].view(2, 2, 32), {}),
    ):
        v = scores(*given.shape[:-1], k, dtype=dtype)
        with ordinary():
            wanted = found(given, **flags)
        found(given, **flags)
        seen.clear()
        with answers("topk") as answered:
            assert same(found(given, **flags), wanted)
            with torch.inference_mode():
                assert all(each.is_inference() for each in khot.topk(given, k, **flags))
        assert answered == [True] * 2 and len(of_operators(seen)) == 2


def test_other_calls_take_the_ordinary_way(seen: list[recorded.Launch]) -> None:
    """And errors come from there."""
    x, held = scores(6, 32), scores(6 * 32 + 1)

    def tangent() -> None:
        with forward_ad.dual_level():
            khot.soft_topk(forward_ad.make_dual(x, torch.ones_like(x)), 3)

    def counted() -> None:
        with FlopCounterMode(display=False):
            khot.soft_topk(x, 3)

    khot.soft_topk(x, 3), khot.soft_topk(x, 3)
    takes_the_ordinary_way(
        "soft_topk",
        [
            lambda: khot.soft_topk(scores(6, 64)[:, :32], 3),
            lambda: khot.soft_topk(held[1:].view(6, 32), 3),  # not aligned
            lambda: khot.soft_topk(x, 3, tau=1e-25),
            lambda: khot.soft_topk(x, 3, cdf=khot.cdfs.Power(1.5)),
            lambda: khot.soft_topk(x[:0], 3),
            lambda: torch.func.grad(lambda x: khot.soft_topk(x, 3)[0, 0])(x),
            lambda: torch.func.vmap(lambda x: khot.soft_topk(x, 3))(x),
            tangent,
            counted,
        ],
        [
            *((lambda k=k: khot.soft_topk(x, k), "k must") for k in (-1, 33, "2", True, math.nan)),
            (lambda: khot.soft_topk(x, 3, mask=COST), "mask must"),
            (lambda: khot.soft_topk(x, torch.ones(5)), "k must"),
            (lambda: khot.soft_topk(x, 3, cdf="other"), "cdf must"),  # type: ignore[arg-type]
        ],
    )
    wrong: dict[str, list[tuple[Callable[[], Any], str]]] = {
        "soft_topk_magnitude": [
            (lambda: khot.soft_topk_magnitude(x, 2.5), "k must"),  # type: ignore[arg-type]
            (lambda: khot.soft_topk_magnitude(x, 3, p=4), "p must"),
        ],
        "soft_budget": [
            (lambda: khot.soft_budget(x, COST, -1), "budget must"),
            (lambda: khot.soft_budget(x, COST[:, :3], 1), "cost must"),
            (lambda: khot.soft_budget(x, COST, 3, by="count"), "by must"),  # type: ignore[arg-type]
            (lambda: khot.soft_budget(x, COST, 3, at_most=1), "at_most must"),  # type: ignore[arg-type]
        ],
        "soft_rank": [
            (lambda: khot.soft_rank(x, tau=0), "tau must"),
            (lambda: khot.soft_rank(x, descending="yes"), "descending must"),  # type: ignore[arg-type]
        ],
        "soft_sort": [(lambda: khot.soft_sort(x, method="other"), "method must")],  # type: ignore[arg-type]
        "topk": [(lambda k=k: khot.topk(x, k), "k must") for k in (33, -1, 3.0, True)],
    }
    for name, calls in wrong.items():
        takes_the_ordinary_way(name, [], calls)
    leaf = x.clone().requires_grad_()
    for call in (
        lambda: khot.topk(x, 4),  # nothing is prepared for it
        lambda: khot.topk(x, 3, 0),
        lambda: khot.topk(x[:5], 3),
        lambda: torch.func.vmap(lambda x: khot.topk(x, 3).values)(x),
        lambda: checkpoint(lambda x: khot.topk(x, 3).values * 1, leaf, use_reentrant=False),
        lambda: khot.topk(x.double(), 3),
    ):
        launch.forget()
        khot.topk(x, 3)
        with answers("topk") as answered:
            call()
        assert answered == [False]


@pytest.mark.parametrize("name", PLAIN | LEARNED)
def test_second_derivatives(name: str, seen: list[recorded.Launch]) -> None:
    entry, call = (PLAIN | LEARNED)[name]
    leaves = [v.requires_grad_() for v in (scores(6, 32), number(6))][: 1 + (name in LEARNED)]
    v = scores(6, 32).flip(0)

    def derivatives() -> list[Tensor]:
        y = call(*leaves)
        first = torch.autograd.grad(y, leaves, v, create_graph=True)
        again = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
        return [each.detach() for each in (y, *first, *again)]

    with ordinary():
        wanted = derivatives()
    derivatives()
    with answers(entry) as answered:
        found = derivatives()
    assert answered == [True]
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(
            a, b, rtol=1e-5 if name in PLAIN else 1e-4, atol=1e-6 if name in PLAIN else 1e-5
        )


def number(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    draws = torch.rand(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return (1 + 2 * draws).to(dtype)


def gradients(
    call: Callable[[Tensor, Tensor], Tensor], x: Tensor, a: Tensor, grad: Tensor, wanted: tuple[bool, bool]
) -> list[Tensor]:
    leaves = [v.detach().requires_grad_(w) for v, w in zip((x, a), wanted, strict=True)]
    y = call(*leaves)
    return [y.detach(), *torch.autograd.grad(y, [v for v in leaves if v.requires_grad], grad)]


@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.parametrize("shape", [(1,), (3,), (2, 1), (2, 3)], ids=str)
def test_learned_numbers_get_the_gradients_of_the_ordinary_way(
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


@pytest.mark.parametrize("name", ["magnitude", "budget", "rank, descending", "k of each row"])
def test_a_gradient_without_a_prepared_launch(name: str, seen: list[recorded.Launch]) -> None:
    """That of rows of which only the forward launch has been made; afterwards it is prepared."""
    entry, call = PLAIN[name]
    x, grad = scores(6, 32), scores(6, 32).flip(0)
    with ordinary():
        wanted = with_gradient(call, x, grad)
    eager.forget(), launch.forget()
    call(x)
    call(x)
    for launches in (4, 2):
        seen.clear()
        with answers(entry) as answered:
            assert same(with_gradient(call, x, grad), wanted)
        assert answered == [True] and len(of_operators(seen)) <= launches


@pytest.mark.parametrize("name", PLAIN)
def test_gradients_that_are_not_as_a_launch_reads_them(name: str, seen: list[recorded.Launch]) -> None:
    """Those of a sum, which are one number, and those that begin anywhere: the second is prepared."""
    entry, call = PLAIN[name]
    x, held = scores(6, 32).requires_grad_(), scores(6 * 32 + 1).flip(0)
    for grad in (torch.ones(()).expand(6, 32), held[1:].view(6, 32)):
        with ordinary():
            wanted = torch.autograd.grad(call(x), x, grad.contiguous())[0]
        eager.forget(), launch.forget()
        call(x.detach())
        for _ in range(2):
            seen.clear()
            with answers(entry) as answered:
                found = torch.autograd.grad(call(x), x, grad)[0]
            assert answered == [True] and torch.equal(found, wanted)
        assert len(of_operators(seen)) == 2


@pytest.mark.parametrize("name", ["magnitude, k", "tau"])
def test_compiled_autograd_takes_the_node_as_it_is(name: str, seen: list[recorded.Launch]) -> None:
    from torch._dynamo import compiled_autograd

    entry, call = (PLAIN | LEARNED)[name]
    leaves = [v.requires_grad_() for v in (scores(6, 32), number(1))][: 1 + (name in LEARNED)]
    grad = torch.where(torch.arange(32) % 2 == 0, -1.0, 1.0).repeat(6, 1)
    with ordinary():
        wanted = torch.autograd.grad(call(*leaves), leaves, grad)
    torch.autograd.grad(call(*leaves), leaves, grad)
    with compiled_autograd._enable(partial(torch.compile, backend="eager")), answers(entry) as answered:
        call(*leaves).backward(grad)
    assert answered == [True] and same([v.grad for v in leaves if v.grad is not None], list(wanted))


def test_what_is_read_again_is_not_to_be_changed(seen: list[recorded.Launch]) -> None:
    x, tau = scores(6, 32).requires_grad_(), EACH.clone()
    for _ in range(2):
        with answers() as answered:
            y = khot.soft_topk(x, 3, tau=tau)
    assert answered == [True]
    tau.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_cdf_and_dtype_is_taken(dtype: torch.dtype, seen: list[recorded.Launch]) -> None:
    x, mask = scores(6, 32, dtype=dtype), COST[0] > 0.3
    for cdf in CDFS if dtype == torch.float32 else CDFS[:1]:
        for F in (cdf, khot.cdfs.resolve(cdf)):
            agrees(partial(khot.soft_topk, k=2, cdf=F), x)
    for name in ("soft_topk_magnitude", "soft_budget", "soft_rank", "soft_sort"):
        given = {"soft_topk_magnitude": (3,), "soft_budget": (COST, 3.3)}.get(name, ())
        call = lambda x, name=name, given=given: getattr(khot, name)(x, *given, mask=mask)  # noqa: E731
        agrees(call, x, name)
        assert call(x).dtype == dtype


def test_layers_take_the_same_way(seen: list[recorded.Launch]) -> None:
    """A layer asks how many entries of each row may be selected, and passes that on."""
    x, grad = scores(6, 32), scores(6, 32).flip(0)
    x[0, 2:] = -torch.inf
    for layer in (
        khot.nn.SoftTopK(3),
        khot.nn.SoftTopK(3, 0),
        partial(khot.nn.SoftTopK(3), mask=COST[0] > 0.3),
    ):
        with ordinary():
            wanted = with_gradient(layer, x, grad)
        prepare(layer, x)
        with answers("soft_topk_of_selectable") as answered:
            found = with_gradient(layer, x, grad)
        assert answered == [True] and same(found, wanted)


MASKED: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "soft_topk": ("soft_topk", lambda x, m, dim=-1: khot.soft_topk(x, 2, dim, largest=False, mask=m)),
    "magnitude": ("soft_topk_magnitude", lambda x, m, dim=-1: khot.soft_topk_magnitude(x, 2, dim, mask=m)),
    "rank": ("soft_rank", lambda x, m, dim=-1: khot.soft_rank(x, dim, mask=m)),
    "sort": ("soft_sort", lambda x, m, dim=-1: khot.soft_sort(x, dim, mask=m)),
    "sort, descending": ("soft_sort", lambda x, m, dim=-1: khot.soft_sort(x, dim, descending=True, mask=m)),
}
every_masked = pytest.mark.parametrize("name", MASKED)


@every_masked
def test_masked_rows_with_infinities_and_nan(name: str, seen: list[recorded.Launch]) -> None:
    """Also under the mask, and in the gradients there."""
    entry, masked = MASKED[name]
    mask = COST > 0.3
    x, grad = scores(6, 32), scores(6, 32).flip(0)
    for row, (value, there) in enumerate(
        [(torch.nan, False), (torch.inf, False), (-torch.inf, True), (torch.nan, True), (-0.0, True)]
    ):
        x[row, int((mask[row] == there).nonzero()[0])] = value
        grad[row, int((~mask[row]).nonzero()[1])] = (torch.inf, torch.nan, 1.0, 2.0, -0.0)[row]
    call = partial(masked, m=mask)
    with ordinary():
        wanted = with_gradient(call, x, grad)
    prepare(call, x)
    with answers(entry) as answered:
        found = with_gradient(call, x, grad)
    assert answered == [True] and wanted[0].isnan().any() and not wanted[0].isnan().all()
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(7), b.nan_to_num(7))


@every_masked
def test_masks_of_every_layout(name: str, seen: list[recorded.Launch]) -> None:
    """Those that broadcast, those with entries elsewhere, and those that no kernel reads as they are."""
    entry, masked = MASKED[name]
    whole = scores(2, 3, 4, 16) > -0.7
    for mask in (
        whole,
        whole[0, 0, 0],
        whole[:, :1, :1],
        torch.ones(3, 4, 1, dtype=torch.bool),
        whole[:, :, :1],
        whole.mT.contiguous().mT,
        whole.transpose(0, 2).contiguous().transpose(0, 2),
        scores(2, 3, 4, 32)[..., ::2] > -0.7,
        (scores(17) > -0.7)[1:],
    ):
        agrees(partial(masked, m=mask), scores(2, 3, 4, 16), entry, False)
    x = scores(2, 3, 4, 16)
    for dim in (1, 2):
        agrees(partial(masked, m=x != x.amax(dim, keepdim=True), dim=dim), x, entry, False)


@pytest.mark.parametrize("name", [name for name in MASKED if name != "rank"])  # whose kernel is not emulated
def test_long_masked_rows(name: str, seen: list[recorded.Launch]) -> None:
    """Rows of more than one program."""
    entry, masked = MASKED[name]
    x = scores(3, 1_100)
    agrees(partial(masked, m=x.flip(0) > -0.7), x, entry)


def test_a_mask_is_not_to_be_changed_before_the_gradient(seen: list[recorded.Launch]) -> None:
    x, mask = scores(6, 32).requires_grad_(), COST > 0.3
    prepare(lambda x: khot.soft_topk(x, 3, mask=mask), x)
    with answers() as answered:
        y = khot.soft_topk(x, 3, mask=mask)
    assert answered == [True]
    mask.logical_not_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_results_may_be_changed_in_place(seen: list[recorded.Launch]) -> None:
    """What is made after the launch is not read again."""
    x, grad = scores(6, 32), scores(6, 32).flip(0)
    for entry, call in (PLAIN["sort, masked"], PLAIN["magnitude, masked"], PLAIN["rank, masked"]):
        with ordinary():
            wanted = with_gradient(call, x, grad)
        prepare(call, x)
        leaf = x.clone().requires_grad_()
        with answers(entry) as answered:
            y = call(leaf)
        y.add_(1)
        assert answered == [True] and torch.equal(torch.autograd.grad(y, leaf, grad)[0], wanted[1])
