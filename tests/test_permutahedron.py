"""The projection onto the permutahedron, and ranks and sorted rows by projection."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import khot
import oracles
from khot._kernels.reference import permutahedron as reference
from projection_rows import ROWS, f64, randn, ranks

INF, NAN = math.inf, math.nan
REGULARIZATIONS = ("l2", "kl")
every_regularization = pytest.mark.parametrize("regularization", REGULARIZATIONS)


def project(z: Tensor, w: Tensor, tau: Any = 1.0, regularization: str = "l2", **options: Any) -> Tensor:
    return khot.project_permutahedron(z, w, tau=tau, regularization=regularization, **options)  # type: ignore[arg-type]


def rank(x: Tensor, tau: Any = 1.0, regularization: str = "l2", **options: Any) -> Tensor:
    return khot.soft_rank(x, tau=tau, method="projection", regularization=regularization, **options)  # type: ignore[arg-type]


def sort(x: Tensor, tau: Any = 1.0, regularization: str = "l2", **options: Any) -> Tensor:
    return khot.soft_sort(x, tau=tau, method="projection", regularization=regularization, **options)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------- values

POWERS = (1.2, 4 / 3, 2.5, 3.0)
every_p = pytest.mark.parametrize("p", POWERS)


@every_regularization
@pytest.mark.parametrize("kind", ROWS)
def test_agrees_with_the_formula_of_the_regression(kind: str, regularization: str) -> None:
    for n in (1, 2, 3, 5, 8, 17, 40):
        z, w = ROWS[kind](n)
        for tau in (0.01, 0.3, 1.0, 20.0):
            want = oracles.permutahedron(z / tau, w, regularization == "kl")
            scale = 1 + np.abs(want).max()
            for kernel in (project, by_reference):
                got = kernel(z, w, tau, regularization).numpy()
                assert np.abs(got - want).max() <= 1e-13 * n * scale, (n, tau, kernel)


def by_reference(z: Tensor, w: Tensor, tau: float, regularization: str) -> Tensor:
    return reference.permutahedron(z, w, f64(tau), regularization)[0]


@every_p
@pytest.mark.parametrize("kind", ROWS)
def test_a_p_norm_agrees_with_the_formula_of_the_regression(kind: str, p: float) -> None:
    turn = list(ROWS).index(kind)  # each length with each temperature under two of three kinds
    for i, n in enumerate((1, 2, 3, 12)):
        z, w = ROWS[kind](n)
        for tau in (0.01, 1.0, 20.0, 0.01)[(turn + i) % 3 :][:2] if n > 1 else (1.0,):
            want = oracles.permutahedron(z / tau, w, p=p)
            got = project(z, w, tau, p=p)
            # a root of a p-norm's sum is exact to the rounding of u, of which y is the power
            assert np.abs(got.numpy() - want).max() <= 1e-9 * (1 + np.abs(want).max()), (n, tau)
            assert abs(got.sum() - w.sum()) <= 1e-12 * n * (1 + w.abs().max())
            assert_majorised(got, w)


@every_p
def test_a_p_norm_of_a_top_k_gives_the_sparse_mask(p: float) -> None:
    x, w = randn(4, 9), (torch.arange(9) < 3).double()
    for dtype, atol in ((torch.float64, 1e-12), (torch.float32, 5e-7), (torch.bfloat16, 2**-8)):
        got = project(x.to(dtype), w, 0.7, p=p)
        assert got.dtype == dtype
        want = khot.sparse_topk(x.to(dtype).double(), 3, tau=0.7, p=p)
        torch.testing.assert_close(got.double(), want, rtol=0, atol=atol)


@every_p
def test_a_p_norm_has_the_unusual_rows_of_the_others(p: float) -> None:
    """Infinite scores, NaN, a mask, hard, a batch of no rows; w of a partial ranking has a block of zeros."""
    w = f64([3.0, 2.0, 1.0, 0.0, 0.0])
    z = f64([[INF, 1.0, 0.5, -INF, -INF], [INF, INF, 0.0, 0.1, 7.0], [NAN, 0.0, 0.0, 0.0, 0.0]])
    y = project(z, w, 0.5, p=p)
    assert y[0, 0] == 3 and y[0, 3] == y[0, 4] == 0
    torch.testing.assert_close(y[1, :2], f64([2.5, 2.5]))
    torch.testing.assert_close(y[1].sum(), w.sum())
    assert y[2].isnan().all()
    mask = torch.tensor([True, False, True, True, True])
    x = f64([0.3, NAN, 2.0, -1.0, 0.0]).requires_grad_()
    got = project(x, ranks(5), 1.0, p=p, mask=mask)
    kept = x[mask].detach()
    torch.testing.assert_close(got[mask].detach(), project(kept, f64([5.0, 3.0, 2.0, 1.0]), 1.0, p=p))
    (grad,) = torch.autograd.grad((got * randn(5, seed=3)).sum(), x)
    assert got[1] == 0 and grad[1] == 0 and grad.isfinite().all()
    hard = project(x.nan_to_num(0), w, 1.0, p=p, hard=True)
    assert hard.tolist() == [2.0, 1.0, 3.0, 0.0, 0.0]
    assert project(z[:0], w, p=p).shape == (0, 5)
    empty = project(z[:, :0], w[:0], p=p)
    assert empty.shape == (3, 0)
    tied = f64([1.0, 1.0, 0.0, 0.0]).requires_grad_()
    y = project(tied, f64([1.0, 0.0, 0.0, 0.0]), 0.1, p=p)
    torch.testing.assert_close(y, f64([0.5, 0.5, 0.0, 0.0]))
    (grad,) = torch.autograd.grad((y * randn(4, seed=4)).sum(), tied)
    assert grad.isfinite().all()


@every_p
def test_gradients_of_a_p_norm_in_all_arguments_in_both_modes(p: float) -> None:
    z, w = randn(2, 5).requires_grad_(), randn(5, seed=1).requires_grad_()
    tau = f64([0.4, 3.0]).requires_grad_()

    def call(z: Tensor, w: Tensor, tau: Tensor) -> Tensor:
        return project(z, w, tau, p=p)

    assert torch.autograd.gradcheck(call, (z, w, tau), check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, (z, w, tau), fast_mode=True)


def assert_majorised(y: Tensor, w: Tensor) -> None:
    """y is in the permutahedron of w: no m entries sum to more than the m largest w, all n to as much."""
    ours, theirs = (t.sort(descending=True).values.cumsum(-1) for t in (y, w))
    assert (ours <= theirs + 1e-12).all() and abs(ours[-1] - theirs[-1]) <= 1e-12


@every_regularization
def test_hard_is_the_vertex_of_the_largest_product_with_the_gradient_of_the_projection(
    regularization: str,
) -> None:
    for seed, tau in itertools.product(range(5), (0.3, 2.0)):
        z, w = randn(5, seed=seed).requires_grad_(), randn(5, seed=seed + 10).requires_grad_()
        y = project(z, w, tau, regularization, hard=True)
        vertices = w[torch.tensor(list(itertools.permutations(range(5))))]
        assert torch.equal(y, vertices[(vertices @ z).argmax()])
        soft = project(z, w, tau, regularization)
        v = randn(5, seed=seed + 20)
        for got, want in zip(
            torch.autograd.grad(y, (z, w), v), torch.autograd.grad(soft, (z, w), v), strict=True
        ):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-14)
    mask = torch.tensor([True, False, True, True])
    x, w = f64([1.0, NAN, 3.0, 1.0]), f64([5.0, 9.0, 7.0, 6.0])
    assert project(x, w, mask=mask, hard=True).tolist() == [6, 0, 7, 5]
    assert project(x, w, hard=True).isnan().all()


@pytest.mark.parametrize(
    ("dtype", "rounding"),
    [(torch.float32, 2e-6), (torch.float16, 2**-10), (torch.bfloat16, 2**-7)],
    ids=str,
)
@every_regularization
def test_every_dtype_has_its_own_accuracy_and_no_nan(
    regularization: str, dtype: torch.dtype, rounding: float
) -> None:
    for scale, tau in itertools.product((1e-6, 1.0, 1e4), (1e-6, 1e-2, 1.0, 1e6)):
        x = (scale * randn(2, 300)).to(dtype).requires_grad_()
        for operator in (rank, sort):
            y = operator(x, tau, regularization)
            want = operator(x.detach().double(), tau, regularization)
            assert y.dtype == dtype
            torch.testing.assert_close(y.detach().double(), want, rtol=rounding, atol=rounding)
            (grad,) = torch.autograd.grad(y.double().square().mean(), x)
            assert not grad.isnan().any()


def test_scores_of_any_size() -> None:
    """Equal scores share w exactly, and different ones of any size get their own."""
    for big in (1e20, 1e200, 1e308):
        x = f64([big, 1.0, big, -big, 0.5, -big])
        for regularization, pair in (("l2", (5.5, 1.5)), ("kl", (5.5, 1.5))):
            y = rank(x, 1e-3, regularization)
            want = f64([pair[0], 4.0, pair[0], pair[1], 3.0, pair[1]])
            torch.testing.assert_close(y, want, rtol=1e-14, atol=0)
    x = torch.tensor([3e38, 2e38, -3e38], requires_grad=True)
    y = rank(x, 1e-30)
    assert y.tolist() == [3, 2, 1] and torch.autograd.grad(y.sum(), x)[0].tolist() == [0, 0, 0]


# ------------------------------------------------------------------------------------- gradients

SHAPES = {"shared": (5,), "per row": (2, 5), "broadcast": (1, 5)}


@every_regularization
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_gradients_in_all_arguments_in_both_modes(regularization: str, shape: tuple[int, ...]) -> None:
    args = [randn(2, 5), randn(*shape, seed=1), f64([0.6, 1.9])]
    args = [a.requires_grad_() for a in args]

    def call(z: Tensor, w: Tensor, tau: Tensor) -> Tensor:
        return project(z, w, tau, regularization)

    # the random rows pool some entries and leave others alone
    assert any((call(*args)[i] - call(*args)[i].sort().values).abs().sum() > 0 for i in range(2))
    assert torch.autograd.gradcheck(call, args, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(call, args, check_fwd_over_rev=True, fast_mode=True)


# ------------------------------------------------------------------------------------- masks and infinities


@every_regularization
@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("inside", [NAN, INF, -INF, 1e300])
def test_masked_entries_take_no_part(regularization: str, descending: bool, inside: float) -> None:
    mask = torch.tensor([[True, True, False, True, False, True], [False, True, True, False, False, False]])
    mask = torch.cat((mask, mask.new_zeros(1, 6), mask.new_ones(1, 6)))
    x = torch.where(mask, randn(4, 6), inside).requires_grad_()
    for tau in (0.05, 1.0, 30.0):
        for operator in (rank, sort):
            y = operator(x, tau, regularization, descending=descending, mask=mask)
            (grad,) = torch.autograd.grad(y.square().sum(), x)
            assert grad.isfinite().all() and (grad[~mask] == 0).all()
            for i in range(4):
                row = x[i, mask[i]].detach().requires_grad_()
                want = operator(row, tau, regularization, descending=descending)
                got = y[i, mask[i]] if operator is rank else y[i, : len(row)]
                rest = y[i, ~mask[i]] if operator is rank else y[i, len(row) :]
                torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
                assert (rest == 0).all()
                (want_grad,) = torch.autograd.grad(want.square().sum(), row)
                torch.testing.assert_close(grad[i, mask[i]], want_grad, rtol=1e-10, atol=1e-10)
        w = torch.where(mask, randn(4, 6, seed=3), NAN).requires_grad_()
        y = project(x, w, tau, regularization, mask=mask)
        for i in range(4):
            want = project(x[i, mask[i]], w[i, mask[i]], tau, regularization)
            torch.testing.assert_close(y[i, mask[i]], want, rtol=1e-12, atol=1e-12)
            assert (y[i, ~mask[i]] == 0).all()
        (grad,) = torch.autograd.grad(y.square().sum(), w)
        assert grad.isfinite().all() and (grad[~mask] == 0).all()


@every_regularization
def test_infinite_scores_have_the_ends_of_the_ranks(regularization: str) -> None:
    x = f64([0.3, INF, -INF, -0.7, INF, 1.1, -INF]).requires_grad_()
    y = rank(x, 0.5, regularization)
    torch.testing.assert_close(y[[1, 4]], f64([6.5, 6.5]))
    torch.testing.assert_close(y[[2, 6]], f64([1.5, 1.5]))
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    assert grad.isfinite().all() and (grad[[1, 2, 4, 6]] == 0).all()
    # −inf under the mask stays apart from −inf that takes part
    kept = rank(x.detach(), 0.5, regularization, mask=torch.arange(7) < 6)
    torch.testing.assert_close(kept[:6], rank(x.detach()[:6], 0.5, regularization))


def test_infinite_values_make_their_block_infinite() -> None:
    x = f64([1.0, INF, 0.0, 0.5]).requires_grad_()
    y = sort(x, descending=True)
    assert (y == INF).any() and not y.isnan().any()
    total = torch.where(y.isfinite(), y, 0).sum()
    assert torch.autograd.grad(total, x)[0].isfinite().all()
    assert (sort(-x, descending=True) == -INF).any()
    assert sort(f64([INF, -INF]), 1e3).isnan().all()  # the mean of both is nothing


def test_an_exponential_of_zero_takes_no_digits_from_its_block() -> None:
    """With "kl", a block in which an entry of e^w is 0 has the sum of the others."""
    z, w = ranks(4), f64([1.0, 0.5, 0.0, -INF])
    for y in (torch.ops.khot.permutahedron(z, w, f64(1.0), "kl")[0], by_reference(z, w, 1.0, "kl")):
        assert y[:2].tolist() == [1.0, 0.5]
        torch.testing.assert_close(y[2:].exp(), f64([1.0, 0.0]).softmax(-1), rtol=1e-14, atol=0)


# ------------------------------------------------------------------------------------- shapes and transforms


def test_w_lies_along_dim_or_broadcasts() -> None:
    x, w = randn(3, 4, 2), randn(4, seed=1)
    want = torch.stack([torch.stack([project(x[i, :, j], w) for j in range(2)], -1) for i in range(3)])
    for weights in (w, w[:, None], w[None, :, None], w[:, None].expand(4, 2), w[:, None].expand(3, 4, 2)):
        assert torch.equal(project(x, weights, dim=1), want)
        assert torch.equal(project(x, weights, dim=-2), want)
    perm = torch.tensor([2, 0, 3, 1])
    assert torch.equal(project(x, w[perm], dim=1), want)  # the order of w does not matter


# ------------------------------------------------------------------------------------- bad input

X = torch.tensor([[3.0, -1.0, 2.0, 0.5], [0.1, 0.2, 0.3, 0.4]])
W = torch.tensor([4.0, 3.0, 2.0, 1.0])


SHAPES_OF_W = [(3,), (5,), (1,), (), (3, 4), (2, 1), (1, 2, 4)]
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    *(({"w": torch.ones(shape)}, ValueError, "w must have the 4 entries") for shape in SHAPES_OF_W),
    *(
        ({"w": W.where(W > 1, bad)}, ValueError, f"w must be finite, but got {bad}")
        for bad in (NAN, INF, -INF)
    ),
    ({"regularization": "l1"}, ValueError, "regularization must be one of 'l2', 'kl', but got 'l1'"),
    ({"p": 1.1}, ValueError, "p must lie in [1.15, 3], but got 1.1"),
    ({"p": 1.5, "regularization": "kl"}, ValueError, "p must be left out with regularization='kl'"),
]


def assert_raises(error: type[Exception], said: str, call: Callable[[], Any]) -> None:
    with pytest.raises(error) as info:
        call()
    assert str(info.value).startswith(said)


@pytest.mark.parametrize(("options", "error", "said"), BAD)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], said: str) -> None:
    arguments: dict[str, Any] = {"input": X, "w": W, **options}
    assert_raises(error, said, lambda: khot.project_permutahedron(**arguments))


@pytest.mark.parametrize("operator", [khot.soft_rank, khot.soft_sort], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"method": "pav"}, ValueError, "method must be one of 'count', 'projection', but got 'pav'"),
        ({"regularization": "entropy"}, ValueError, "regularization must be one of 'l2', 'kl'"),
        ({"cdf": "logistic"}, ValueError, "cdf must be left out with method='projection'"),
        ({"method": "count", "regularization": "kl"}, ValueError, "regularization must be left out"),
    ],
)
def test_bad_methods(
    operator: Callable[..., Tensor], options: dict[str, Any], error: type[Exception], said: str
) -> None:
    assert_raises(error, said, lambda: operator(X, **{"method": "projection", **options}))
