"""Ranks, sorting, permutations, quantiles: accuracy, hard limits, memory, unusual and bad input.

The checks for every operator (gradients, transforms, layouts) are in test_operators.py.
"""

from __future__ import annotations

import itertools
import math
import typing
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import khot
import oracles
from drawn import f64
from drawn import normal as randn
from khot import cdfs
from khot._core.interpolation import InterpolationName
from khot._kernels.reference import laplace as scans
from khot._ops.laplace import laplace_thresholds
from largest import Largest

INF, NAN = math.inf, math.nan
EPS = {torch.float64: 2.0**-52, torch.float32: 2.0**-23}
CDFS: dict[str, tuple[str | cdfs.CDF, float | None]] = {
    "logistic": ("logistic", None),
    "laplace": ("laplace", None),
    "normal": ("normal", None),
    "uniform": ("uniform", None),
    "power": (cdfs.Power(4 / 3), 4 / 3),
}

every_cdf = pytest.mark.parametrize("name", CDFS)
full_support = pytest.mark.parametrize("name", ["logistic", "laplace", "normal"])
every_row = pytest.mark.parametrize("scores", oracles.ADVERSARIAL)
either_order = pytest.mark.parametrize("descending", [False, True], ids=["ascending", "descending"])
interpolations = pytest.mark.parametrize("interpolation", typing.get_args(InterpolationName))


def row(scores: str, n: int, seed: int = 0) -> Tensor:
    return oracles.ADVERSARIAL[scores](n, torch.Generator().manual_seed(seed))


# ----------------------------------------------------------------------------------- accuracy


@every_cdf
@every_row
def test_within_rounding_of_50_digits_on_the_adversarial_list(name: str, scores: str) -> None:
    cdf, p = CDFS[name]
    n = 8
    turn = list(CDFS).index(name) + list(oracles.ADVERSARIAL).index(scores)
    for i, (dtype, absolute) in enumerate(((torch.float64, 1e-12), (torch.float32, 5e-7))):
        x = row(scores, n).to(dtype)
        tau = oracles.TAUS[(turn + i) % 2]  # the other one with the next rows and the next CDF
        options: dict[str, Any] = {"tau": tau, "cdf": cdf, "descending": True}
        rank = khot.soft_rank(x, **options).double().numpy()
        assert np.abs(rank - oracles.soft_rank(x, tau, name, p)).max() <= absolute * n / 2, tau

        sort, want = khot.soft_sort(x, **options).double().numpy(), levels(x, tau, name, p)
        finite = np.isfinite(want)
        assert (sort[~finite] == want[~finite]).all()
        allowed = 4 * EPS[dtype] * (np.abs(want) + tau) + 1e-12 * tau
        assert (np.abs(sort[finite] - want[finite]) <= allowed[finite]).all(), tau


@every_cdf
@pytest.mark.parametrize("scores", ["normal_1", "normal_10000", "cauchy", "clusters", "ties", "minus_inf"])
def test_permutations_within_rounding_of_50_digits(name: str, scores: str) -> None:
    cdf, p = CDFS[name]
    x64 = row(scores, 10)
    turn = list(CDFS).index(name) + list(oracles.ADVERSARIAL).index(scores)
    for dtype, absolute, relative in ((torch.float64, 1e-12, 1e-11), (torch.float32, 5e-7, 1e-5)):
        x, turn = x64.to(dtype), turn + 1
        for tau in oracles.TAUS[turn % 2 :: 2]:  # the others in the other dtype, and with the next CDF
            want, log_want = oracles.soft_permutation(x, tau, name, p)
            P = khot.soft_permutation(x, tau=tau, cdf=cdf, descending=True).double().numpy()
            assert np.abs(P - want).max() <= absolute, tau
            if cdfs.resolve(cdf).full_support:  # elsewhere log P is singular at the edge
                log_p = khot.log_soft_permutation(x, tau=tau, cdf=cdf, descending=True).double().numpy()
                np.testing.assert_allclose(log_p, log_want, rtol=relative, atol=absolute, err_msg=str(tau))


@every_row
def test_laplace_within_rounding_of_plain_sums_at_300_entries(scores: str) -> None:
    x = row(scores, 300, seed=1)
    for tau in oracles.TAUS:
        z = ((x - x.unsqueeze(-1)) / tau).nan_to_num(0, 2e3, -2e3)  # x_j − x_i; equal infinite ones
        want = cdfs.Laplace().cdf(z).sum(-1) + 0.5
        torch.testing.assert_close(
            khot.soft_rank(x, tau=tau, descending=True), want, rtol=0, atol=300 * 1e-13
        )
        # the inverse: C at the soft sort is i − ½
        t = khot.soft_sort(x, tau=tau, descending=True)
        finite = t.isfinite()
        hi, lo = laplace_thresholds(x, scans.half_levels(x), f64(tau))
        z = ((x - hi.unsqueeze(-1)) - lo.unsqueeze(-1)) / tau
        counts = cdfs.Laplace().cdf(z).sum(-1)
        torch.testing.assert_close(counts[finite], scans.half_levels(x)[finite], rtol=0, atol=300 * 1e-13)
        torch.testing.assert_close(hi[finite] + lo[finite], t[finite], rtol=1e-15, atol=1e-15 * tau)


def levels(x: Tensor, tau: float, name: str, p: float | None) -> np.ndarray:
    return oracles.soft_levels(x, np.arange(len(x)) + 0.5, tau, name, p)


def test_scores_of_ten_thousand_at_a_tau_of_one_ten_thousandth() -> None:
    # x/τ reaches 1e8, where sums of e^(±x/τ) overflow, and float64 keeps 8 digits behind the point
    x, tau = 1e4 * randn(40), 1e-4
    x[20:] = x[:20] + tau * (1 + randn(20, seed=1).abs())  # pairs that do overlap
    want = oracles.soft_rank(x, tau, "laplace")
    assert np.abs(khot.soft_rank(x, tau=tau, descending=True).numpy() - want).max() <= 1e-12
    hi, lo = laplace_thresholds(x, scans.half_levels(x), f64(tau))
    exact = levels(x, tau, "laplace", None)
    # as pairs, the thresholds have the digits that their sum has lost
    assert np.abs((hi + lo).numpy() - exact).max() <= 2.0**-52 * np.abs(exact).max()
    z = ((x - hi.unsqueeze(-1)) - lo.unsqueeze(-1)) / tau
    counts = cdfs.Laplace().cdf(z).sum(-1)
    torch.testing.assert_close(counts, scans.half_levels(x), rtol=0, atol=1e-12)
    P, log_p = oracles.soft_permutation(x[15:25], tau, "laplace")
    options: dict[str, Any] = {"tau": tau, "descending": True}
    assert np.abs(khot.soft_permutation(x[15:25], **options).numpy() - P).max() <= 1e-12
    np.testing.assert_allclose(khot.log_soft_permutation(x[15:25], **options).numpy(), log_p, rtol=1e-12)


@full_support
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_finite_at_scores_of_ten_thousand(name: str, dtype: torch.dtype) -> None:
    cdf = CDFS[name][0]
    x = (1e4 * randn(3, 60)).to(dtype)
    x[:, 30] = x[:, 31]
    operators: list[Callable[..., Tensor]] = [
        khot.soft_rank,
        khot.soft_sort,
        khot.soft_permutation,
        khot.log_soft_permutation,
        khot.soft_median,
        lambda x, **options: khot.losses.permutation_cross_entropy(x, x.argsort(-1), **options),
    ]
    for operator in operators:
        for create_graph in (False, True):
            leaf, tau = (
                x.clone().requires_grad_(),
                torch.tensor(1e-4, dtype=torch.float64, requires_grad=True),
            )
            y = operator(leaf, tau=tau, cdf=cdf)
            assert y.isfinite().all()
            for g in torch.autograd.grad(y.sum(), (leaf, tau), create_graph=create_graph):
                assert g.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [1, 7, 192, 193, 5_000])
def test_order_sorts(dtype: torch.dtype, n: int) -> None:
    # both sides of where counting digits begins; ties, zeros of both signs, infinities, subnormals
    x = randn(4, n) * f64([1e-320, 1.0, 1e30, 0.0]).unsqueeze(-1)
    x[1] = x[1].round()
    x[2, ::3], x[2, 1::3] = INF, -INF
    x[3, ::2] = -0.0
    x = x.to(dtype)
    one = torch.ones((), dtype=torch.float64)
    for operator in (torch.ops.khot.laplace_count, torch.ops.khot.laplace_thresholds):
        *_, order, _ = operator(x, None, one, True)
        order = order.long()
        assert torch.equal(order.sort().values, torch.arange(n).expand(4, n))
        assert torch.equal(x.gather(-1, order), x.sort(descending=True).values)


# -------------------------------------------------------------------------------- hard limits


@every_cdf
@either_order
def test_small_tau_gives_the_hard_answer_for_every_order_of_five(name: str, descending: bool) -> None:
    cdf, n = CDFS[name][0], 5
    values = f64([-2.0, -0.5, 0.25, 3.0, 7.0])
    x = torch.stack([values[list(order)] for order in itertools.permutations(range(n))])
    options: dict[str, Any] = {"tau": 1e-4, "cdf": cdf, "descending": descending}
    by_size = x.argsort(-1, descending=descending)
    torch.testing.assert_close(
        khot.soft_rank(x, **options), by_size.argsort(-1).double() + 1, rtol=0, atol=1e-12
    )
    P = khot.soft_permutation(x, **options)
    torch.testing.assert_close(P, torch.eye(n, dtype=torch.float64)[by_size], rtol=0, atol=1e-12)
    # the extremes lie ln(2n)·τ or so beyond the scores
    want = x.sort(-1, descending=descending).values
    torch.testing.assert_close(khot.soft_sort(x, **options), want, rtol=0, atol=4e-4)
    torch.testing.assert_close((P @ x.unsqueeze(-1)).squeeze(-1), want, rtol=0, atol=1e-10)
    q = f64([0.0, 0.25, 0.5, 0.75, 1.0])
    quantiles = khot.soft_quantile(x, q, tau=1e-4, cdf=cdf)
    torch.testing.assert_close(quantiles, values.unsqueeze(-1).expand_as(quantiles), rtol=0, atol=4e-4)


# of five entries and of four: at places, between them, and half-way between them
LEVELS = [0.0, 0.1, 0.125, 0.25, 0.3, 0.375, 0.5, 0.625, 0.77, 0.875, 1.0, 1 / 3, 1 / 6, 5 / 6]


@pytest.mark.parametrize(
    ("name", "interpolation", "n"),
    # every rule with all lengths and CDFs, by turns
    [
        (name, interpolation, (1, 2, 4, 5)[(i + j) % 4])
        for i, name in enumerate(CDFS)
        for j, interpolation in enumerate(typing.get_args(InterpolationName))
    ],
)
def test_interpolated_quantiles_are_those_of_the_soft_places(name: str, interpolation: Any, n: int) -> None:
    cdf, p = CDFS[name]
    x = randn(n, seed=n)
    for tau in (0.3, 3.0):
        places = oracles.soft_levels(x, np.arange(n) + 0.5, tau, name, p)
        want = np.quantile(places, LEVELS, method=interpolation)
        got = khot.soft_quantile(x, f64(LEVELS), tau=tau, cdf=cdf, interpolation=interpolation)
        torch.testing.assert_close(got, f64(want), rtol=0, atol=1e-12)
        one = [khot.soft_quantile(x, q, tau=tau, cdf=cdf, interpolation=interpolation) for q in LEVELS]
        torch.testing.assert_close(torch.stack(one), got, rtol=0, atol=1e-14)


@interpolations
def test_interpolated_quantiles_with_masks_infinite_scores_and_half_precision(interpolation: Any) -> None:
    options: dict[str, Any] = {"interpolation": interpolation, "tau": 0.5}
    q, x = f64(LEVELS), randn(3, 7)
    mask = torch.tensor([[True] * 7, [True, False] * 3 + [True], [False] * 7])
    got = khot.soft_quantile(x.masked_fill(~mask, NAN), q, mask=mask, **options)
    for i in (0, 1):
        torch.testing.assert_close(got[:, i], khot.soft_quantile(x[i, mask[i]], q, **options))
    assert got[:, 2].isnan().all()
    infinite = f64([INF, 1.0, -INF, 2.0]).requires_grad_()
    soft_sort = [-INF, *khot.soft_sort(f64([1.0, 2.0]), tau=0.5).tolist(), INF]
    got = khot.soft_quantile(infinite, q, **options)
    torch.testing.assert_close(
        got.detach(), khot.quantile(f64(soft_sort), q, interpolation=interpolation), equal_nan=True
    )
    got[got.isfinite()].sum().backward()
    assert infinite.grad is not None and infinite.grad.isfinite().all()
    row = x[0].clone()
    row[2] = NAN
    assert khot.soft_quantile(row, q, **options).isnan().all()
    for dtype in (torch.bfloat16, torch.float16):
        low = x.to(dtype)
        exact = khot.soft_quantile(low.double(), q, **options)
        rounded = khot.soft_quantile(low, q, **options)
        assert rounded.dtype == dtype
        assert ((rounded.double() - exact).abs() <= 0.501 * torch.finfo(dtype).eps * exact.abs()).all()


@every_cdf
@pytest.mark.parametrize("scores", ["normal_1", "normal_1e-06", "ties", "equal"])
@pytest.mark.parametrize("n", [3, 64, 1000])
def test_float32_permutations_are_doubly_stochastic(n: int, scores: str, name: str) -> None:
    """Small shares keep their digits. Those of equal scores are all rounded in the same way, so that their
    errors would add up."""
    x, cdf = row(scores, n).float(), CDFS[name][0]
    for tau in (1.0, 0.01):
        P, want = (khot.soft_permutation(v, tau=tau, cdf=cdf).double() for v in (x, x.double()))
        one = torch.ones(n, dtype=torch.float64)
        torch.testing.assert_close(P.sum(-1), one, rtol=0, atol=1e-6)
        torch.testing.assert_close(P.sum(-2), one, rtol=0, atol=1e-6)
        torch.testing.assert_close(P, want, rtol=2e-5, atol=1e-12)


# -------------------------------------------------------------------------------- what holds


def test_first_rows_replace_dim_by_two() -> None:
    x = randn(2, 5, 3)
    assert khot.soft_permutation(x, 1, k=2).shape == (2, 2, 5, 3)
    for operator in (khot.soft_permutation, khot.log_soft_permutation):
        assert operator(x, k=0).shape == (2, 5, 0, 3)


@every_cdf
@pytest.mark.parametrize("operator", [khot.soft_permutation, khot.log_soft_permutation])
def test_the_first_rows_are_those_of_the_whole_matrix(operator: Callable[..., Tensor], name: str) -> None:
    """With a tie, infinities, a NaN and a mask."""
    x, mask, weights = randn(3, 7), torch.arange(7) != 3, randn(3, 7, 7)
    x[0, 2], x[0, 5], x[1, 3], x[2, 4] = INF, -INF, NAN, x[2, 1]
    options: dict[str, Any] = {"tau": 0.6, "cdf": CDFS[name][0], "descending": True}
    for selected in (None, mask):
        for k in (1, 4, 6, 7):
            found = []
            for rows in (None, k):
                leaf = x.clone().requires_grad_()
                P = operator(leaf, mask=selected, k=rows, **options)[:, :k]
                finite = torch.where(P.isfinite(), P, 0)
                found.append((P, *torch.autograd.grad((finite * weights[:, :k]).sum(), leaf)))
            # shares under a power may be differences of y, whose last digits their logarithms see
            atol = 1e-9 if operator is khot.log_soft_permutation and name == "power" else 1e-12
            torch.testing.assert_close(*found, rtol=1e-12, atol=atol, equal_nan=True)


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("q", [0.3, f64(0.3), f64([0.1]), f64([0.1, 0.5, 0.5]), f64([])], ids=str)
def test_quantiles_have_the_shapes_of_torch(dim: int, keepdim: bool, q: Any) -> None:
    x = randn(2, 5, 3)
    if isinstance(q, Tensor) and q.numel() == 0:
        assert khot.soft_quantile(x, q, dim, keepdim).shape == (0, *x.sum(dim, keepdim=keepdim).shape)
        return
    want = torch.quantile(x, q, dim, keepdim)
    got = khot.soft_quantile(x, q, dim, keepdim, tau=1e-3)
    assert got.shape == want.shape
    assert khot.soft_median(x, dim, keepdim).shape == x.median(dim, keepdim).values.shape


def test_gradient_in_q() -> None:
    x, tau = randn(2, 6).requires_grad_(), f64([2.0, 3.0]).requires_grad_()
    q = f64([0.1, 0.37, 0.83]).requires_grad_()  # linear interpolation has kinks at whole positions
    for name, linear in itertools.product(CDFS, (False, True)):

        def call(x: Tensor, q: Tensor, tau: Tensor, name: str = name, linear: bool = linear) -> Tensor:
            interpolation: Any = "linear" if linear else None
            return khot.soft_quantile(x, q, tau=tau, cdf=CDFS[name][0], interpolation=interpolation)

        torch.autograd.gradcheck(call, (x, q, tau), check_forward_ad=True, fast_mode=True)
        torch.autograd.gradgradcheck(call, (x, q, tau), check_fwd_over_rev=True, fast_mode=True)


# -------------------------------------------------------------------------------------- kinks


def gradient(x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(khot.soft_median(x, cdf="uniform"), x)[0]


def test_a_generalised_gradient_at_a_kink_need_not_be_one_sided() -> None:
    # the outer entries lie where the uniform CDF reaches 0 and 1, at ½ from the median
    x, h = f64([-0.5, 0.0, 0.5]), 1e-3
    assert gradient(x).tolist() == [0, 1, 0]
    assert gradient(x + f64([-h, 0, h])).tolist() == [0, 1, 0]  # the limit from here
    # in the middle entry, the slope of the median is ½ on both sides
    for step in (-h, h):
        moved = khot.soft_median(x + f64([0.0, step, 0.0]), cdf="uniform")
        assert abs(moved.item() / step - 0.5) <= 1e-12


# ------------------------------------------------------------------------------------- memory


def test_ranks_of_a_million() -> None:
    x = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0))
    leaf = x.clone().requires_grad_()
    rank = khot.soft_rank(leaf, tau=0.1)
    assert abs(rank.detach().double().sum().item() / (1e6 * (1e6 + 1) / 2) - 1) <= 1e-7
    (grad,) = torch.autograd.grad(rank, leaf, x)
    # homogeneous of degree 0 in (x, τ), invariant under shifts
    assert abs(grad.double().sum().item()) <= 1e-6 * grad.double().abs().sum().item()
    at = torch.tensor([0, 10, 999_999])
    want = (
        0.5 + torch.stack([cdfs.Laplace().cdf((x[i].double() - x.double()) / 0.1).sum() for i in at])
    ).float()
    torch.testing.assert_close(rank[at].detach(), want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("n", [5_000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_memory_is_linear(n: int) -> None:
    from test_counting import PeakMemory

    x = torch.randn(n, generator=torch.Generator().manual_seed(0)).requires_grad_()
    square = 8 * n * n
    for cdf, part in (("logistic", n / 1_000), ("laplace", n / 40)):
        with PeakMemory() as forward:
            rank = khot.soft_rank(x, cdf=cdf)
        assert forward.peak <= square / part
        with PeakMemory() as backward:
            torch.autograd.grad(rank, x, torch.ones_like(x))
        assert backward.peak <= square / part
    with PeakMemory() as sort:
        torch.autograd.grad(khot.soft_sort(x), x, torch.ones_like(x))
    assert sort.peak <= square * 40 / n


# ------------------------------------------------------------------------------- unusual input


@every_cdf
def test_infinite_entries_stand_at_the_ends(name: str) -> None:
    options: dict[str, Any] = {"tau": 0.5, "cdf": CDFS[name][0]}
    x = f64([0.3, INF, -INF, -0.7, INF, 1.1, -INF]).requires_grad_()
    finite = [0, 3, 5]
    inner = x.detach()[finite]
    rank = khot.soft_rank(x, **options)
    assert rank[[1, 4]].tolist() == [6.5, 6.5] and rank[[2, 6]].tolist() == [1.5, 1.5]
    torch.testing.assert_close(rank[finite].detach(), khot.soft_rank(inner, **options) + 2)
    sort = khot.soft_sort(x, **options)
    assert sort[:2].tolist() == [-INF, -INF] and sort[5:].tolist() == [INF, INF]
    torch.testing.assert_close(sort[2:5].detach(), khot.soft_sort(inner, **options))
    P = khot.soft_permutation(x, **options)
    assert (P[:2, [2, 6]] == 0.5).all() and (P[5:, [1, 4]] == 0.5).all()
    torch.testing.assert_close(P[2:5, finite].detach(), khot.soft_permutation(inner, **options))
    torch.testing.assert_close(P.sum(-1), torch.ones(7).double(), rtol=0, atol=1e-12)
    torch.testing.assert_close(P.sum(-2), torch.ones(7).double(), rtol=0, atol=1e-12)
    log_p = khot.log_soft_permutation(x, **options)
    torch.testing.assert_close(log_p.exp(), P, rtol=0, atol=1e-13)
    quantiles = khot.soft_quantile(x, f64([0.0, 0.5, 1.0]), **options)
    assert quantiles[0] == -INF and quantiles[2] == INF and quantiles[1].isfinite()
    for y in (rank, sort, P, log_p, quantiles):
        for create_graph in (False, True):
            total = torch.where(y.isfinite(), y, 0).square().sum()
            (grad,) = torch.autograd.grad(total, x, retain_graph=True, create_graph=create_graph)
            assert grad.isfinite().all() and (grad[[1, 2, 4, 6]] == 0).all()


@pytest.mark.parametrize("name", ["laplace", "logistic"])
def test_values_that_stand_for_infinity(name: str) -> None:
    for dtype in (torch.float32, torch.float64):
        low = torch.finfo(dtype).min if name == "laplace" else -3e38
        x = torch.tensor([0.3, low, 1.0, low, -1e30, 2.0], dtype=dtype).requires_grad_()
        r = khot.soft_rank(x, cdf=name)
        torch.testing.assert_close(
            r.detach()[[1, 3, 4]], torch.tensor([1.5, 1.5, 3.0], dtype=dtype), rtol=0, atol=1e-6
        )
        for y in (r, khot.soft_sort(x, cdf=name), khot.soft_permutation(x, cdf=name)):
            (grad,) = torch.autograd.grad(y.clamp(-9, 9).sum(), x)
            assert y.isfinite().all() and grad.isfinite().all()


# ----------------------------------------------------------------------------------- bad input

X = torch.tensor([[3.0, -1.0, 2.0, 0.5], [0.1, 0.2, 0.3, 0.4]])


@pytest.mark.parametrize(
    ("q", "error", "said"),
    [
        (f64([0.1, 1.1]), ValueError, "q must lie in"),
        (f64([[0.1]]), ValueError, "q must be a number or have at most one dim"),
    ],
)
def test_bad_q(q: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=f"^{said}"):
        khot.soft_quantile(X, q)


@pytest.mark.parametrize("cdf", ["laplace", "uniform"])
@pytest.mark.parametrize("operator", [khot.soft_permutation, khot.log_soft_permutation])
def test_a_matrix_in_parts_is_the_same(
    operator: Callable[..., Tensor], cdf: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values, gradients to second order and forward mode; with infinities, a NaN and a mask."""
    x = torch.randn(3, 7, generator=torch.Generator().manual_seed(5)).double()
    x[0, 2], x[1, 3] = math.inf, math.nan
    mask = torch.tensor([True, True, True, True, False, True, True])
    v = torch.randn(3, 7, 7, generator=torch.Generator().manual_seed(6)).double()
    direction = torch.ones_like(x)
    results = []
    for part in (1 << 30, 42):  # all places at once, and two at a time
        monkeypatch.setattr("khot._core.parts.PART", part)
        leaf, tau = x.clone().requires_grad_(), torch.tensor(0.7).double().requires_grad_()
        P = operator(leaf, tau=tau, cdf=cdf, mask=mask)
        weighted = (v * P.masked_fill(~P.isfinite(), 0)).sum()
        first = torch.autograd.grad(weighted, (leaf, tau), create_graph=True)
        second = torch.autograd.grad(first[0].square().sum() + first[1].square(), (leaf, tau))
        with forward_ad.dual_level():
            dual = operator(forward_ad.make_dual(x, direction), tau=0.7, cdf=cdf, mask=mask)
            tangent = forward_ad.unpack_dual(dual).tangent
        results.append([P, *first, *second, tangent])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12, equal_nan=True)


def test_a_large_matrix_is_not_widened_at_once() -> None:
    """No result inside has an entry in double for each pair of place and entry."""

    x = torch.randn(1500, generator=torch.Generator().manual_seed(7)).requires_grad_()
    with Largest() as mode:
        torch.autograd.grad(khot.soft_permutation(x).diagonal().sum(), x)
    assert mode.nbytes == 4 * 1500**2
