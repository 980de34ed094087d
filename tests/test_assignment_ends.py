"""Assignments whose bounds are met at their ends, start on flat sums, round, or contradict one another."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import khot
from khot import cdfs
from khot._kernels.reference import bounded_assign as bounded
from khot._kernels.reference import soft_assign as given
from test_assignment_bounds import assert_optimal, sums_of

COMPACT: tuple[Any, ...] = ("uniform", cdfs.Power(1.2), cdfs.Power(4 / 3), cdfs.Power(1.5), cdfs.Power(3.0))
CDFS: tuple[Any, ...] = ("logistic", "laplace", "normal", *COMPACT)
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


class Draws:
    """Random numbers of one seed."""

    def __init__(self, seed: int) -> None:
        self.g = torch.Generator().manual_seed(seed)

    def int(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=self.g))

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=self.g, dtype=torch.float64))

    def of(self, values: Any) -> Any:
        return values[self.int(0, len(values) - 1)]

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.g, dtype=torch.float64)

    def shares(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.g, dtype=torch.float64)


def with_full_and_empty_rows(draws: Draws, m: int, width: int) -> Tensor:
    """A matrix in [0, 1], of which some rows are full and others are empty."""
    inside = 0.05 + 0.9 * draws.shares(m, width)
    inside[draws.int(0, m - 1)] = 1
    kind = draws.shares(m)
    inside[kind < 0.15], inside[kind > 0.85] = 0, 1
    return inside


# ------------------------------------------------------------------- the total has all rows at their bounds


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("least", [False, True])
def test_a_total_that_leaves_rows_their_bounds(least: bool, seed: int) -> None:
    """Each row by itself is a soft top-k, and so is each column."""
    draws = Draws(seed)
    m, width = draws.int(2, 30), draws.int(2, 9)
    x, inside = draws.normal(m, width) + draws.of((0, 3, -40)), with_full_and_empty_rows(draws, m, width)
    tau, cdf = 10 ** draws.between(-3, 2), draws.of(CDFS)
    k = inside.sum(-1)
    bounds = (k, width + draws.int(0, 1)) if least else (draws.of((0, k / 2)), k)
    total = k.sum() if draws.int(0, 1) else k.flip(0).sum().item()  # in another order
    y, bias = khot.soft_assign(x, bounds, total=total, tau=tau, cdf=cdf, return_bias=True)
    want = khot.soft_topk(x, k, tau=tau, cdf=cdf)
    torch.testing.assert_close(y, want, rtol=0, atol=1e-11)
    assert bool((bias == bias[0]).all())
    turned = khot.soft_assign(x.mT, (0, math.inf), bounds, total=total, tau=tau, cdf=cdf)
    torch.testing.assert_close(turned, want.mT, rtol=0, atol=1e-9)


@pytest.mark.parametrize("seed", range(16))
@pytest.mark.parametrize("cdf", ["logistic", "uniform"])
def test_rows_at_their_bounds_beside_columns_with_bounds(cdf: str, seed: int) -> None:
    """With a total, or because rows at their least fill columns at their most."""
    draws = Draws(seed)
    m, width = draws.int(4, 8), draws.int(2, 4)
    x, tau = draws.normal(m, width), draws.between(0.3, 1.5)
    inside = with_full_and_empty_rows(draws, m, width)
    k, capacity = inside.sum(-1), inside.sum(-2)
    wide = (capacity - 0.1, capacity + 0.1)
    args: dict[str, Any] = [
        {"k": (0, k), "capacity": wide, "total": k.sum().item()},
        {"k": (k, width), "capacity": wide, "total": k.sum().item()},
        {"k": (k, width), "capacity": (0, capacity)},
        {"k": (0, k), "capacity": (capacity, m)},
    ][seed % 4]
    ours, bias = khot.soft_assign(x, **args, tau=tau, cdf=cdf, return_bias=True)
    torch.testing.assert_close(ours.sum(-1), k, rtol=0, atol=1e-9)
    full, empty = k == width, k == 0
    assert bool((ours[full] == 1).all()) and bool((ours[empty] == 0).all())
    # optimal for these sums, and a column is moved in the direction that its bound needs
    torch.testing.assert_close(ours, khot.soft_topk(x + bias, k, tau=tau, cdf=cdf), rtol=0, atol=1e-7)
    (_, _, least, most), columns = sums_of(x, args), ours.sum(-2)
    high, low = columns > most - 1e-7, columns < least + 1e-7
    most_paid = [-math.inf, *bias[high & ~low].tolist()]
    least_paid = [math.inf, *bias[low & ~high].tolist()]
    free = bias[~high & ~low].tolist()
    assert max(most_paid + free) <= min(least_paid) + 1e-6
    assert max(most_paid) <= min([math.inf, *free]) + 1e-6 and (not free or max(free) - min(free) <= 1e-6)


@pytest.mark.parametrize("cdf", ["logistic", "uniform", cdfs.Power(1.5)], ids=str)
@pytest.mark.parametrize("case", ["most", "least", "columns", "filled", "fill"])
def test_derivatives_where_all_bounds_are_met(case: str, cdf: Any) -> None:
    """In the bounds together with the total that has them met, in both modes."""
    draws = Draws(3)
    x, tau = draws.normal(5, 4).requires_grad_(), torch.tensor(1.1).double().requires_grad_()
    k = torch.tensor([1.2, 2.3, 0.7, 1.9]).double().requires_grad_()
    shares = torch.tensor([0.2, 0.3, 0.3, 0.2]).double()

    def call(x: Tensor, k: Tensor, tau: Tensor) -> Tensor:
        full = torch.cat([k.new_full((1,), 4), k])
        args: dict[str, Any] = {
            "most": {"k": (0, full), "capacity": (0, 3.7), "total": full.sum()},
            "least": {"k": (torch.cat([k.new_zeros(1), k]), 4), "total": k.sum()},
            "columns": {"k": (0, 3), "capacity": (k, 5), "total": k.sum()},
            "filled": {"k": (full, 4), "capacity": (0, full.sum() * shares)},
            "fill": {"k": (0, full), "capacity": (full.sum() * shares, 5)},
        }[case]
        return khot.soft_assign(x, **args, tau=tau, cdf=cdf)

    assert torch.autograd.gradcheck(call, (x, k, tau), check_forward_ad=True, fast_mode=True)


# ------------------------------------------------------------------------------------------ flat sums


def drawn(draws: Draws) -> tuple[Tensor, dict[str, Any], float, Any]:
    """Compact support, and bounds that leave most of the matrix empty, or full. At prices of 0 all rows are
    at their bounds, and at high prices nothing is between 0 and 1."""
    m, width = draws.int(2, 64), draws.int(2, 9)
    tau, cdf = 10 ** draws.between(-2.5, 1.5), draws.of(COMPACT)
    offset = draws.of((draws.between(1, 9), tau * 10 ** draws.between(0, 4)))
    x = draws.normal(m, width) + offset
    uneven = draws.of((0, 0.2))
    rows = draws.between(0.15, 0.5) * width * (1 - uneven * draws.shares(m))
    columns = rows.sum() / width * draws.between(0.1, 0.3) * (1 - uneven * draws.shares(width))
    if draws.int(0, 1):
        return x, {"k": (0, rows), "capacity": (0, columns)}, tau, cdf
    return -x, {"k": (width - rows, math.inf), "capacity": (m - columns, m)}, tau, cdf


@pytest.mark.parametrize("seed", range(8))
def test_starts_where_sums_are_flat(seed: int) -> None:
    draws = Draws(seed)
    for _ in range(20):
        x, args, tau, cdf = drawn(draws)
        y, bias = khot.soft_assign(x, **args, tau=tau, cdf=cdf, return_bias=True)
        assert bool(((y >= 0) & (y <= 1)).all())
        assert_optimal(x, args, y, bias, tau, cdf, 1e-7)


@pytest.mark.parametrize("cdf", COMPACT, ids=str)
@pytest.mark.parametrize("offset", [-50, -1, 1, 5, 100])
def test_passes_are_few_where_sums_are_flat(offset: float, cdf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The most that were seen were 66."""
    seen: list[bounded.Problem] = []
    solve = bounded.Problem.solve
    monkeypatch.setattr(
        bounded.Problem, "solve", lambda self, *args: (seen.append(self), solve(self, *args))[1]
    )
    for seed, tau in enumerate((10, 1, 0.3, 0.1, 0.03, 0.01)):
        x = Draws(seed).normal(64, 8) + offset
        few = {"k": (0.0, 2.0), "capacity": (0.0, 3.0)}
        khot.soft_assign(x, **(few if offset > 0 else {"k": (6, 8), "capacity": (61, 64)}), tau=tau, cdf=cdf)
    assert max(problem.passes for problem in seen) <= 90


@pytest.mark.parametrize("cdf", ["uniform", cdfs.Power(1.5)], ids=str)
def test_gradients_where_the_search_starts_on_flat_sums(cdf: Any) -> None:
    draws = Draws(1)
    x = (draws.normal(16, 3) + 5).requires_grad_()
    most_k = torch.full((16,), 0.8).double().requires_grad_()
    most = torch.tensor([0.91, 0.73, 0.82]).double().requires_grad_()
    tau = torch.tensor(0.35).double().requires_grad_()

    def call(x: Tensor, most_k: Tensor, most: Tensor, tau: Tensor) -> Tensor:
        return khot.soft_assign(x, (0, most_k), (0, most), tau=tau, cdf=cdf)

    assert torch.autograd.gradcheck(call, (x, most_k, most, tau), check_forward_ad=True, fast_mode=True)


# ------------------------------------------------------------------------------------------- rounding


def above(value: Tensor) -> Tensor:
    return torch.nextafter(value, torch.full_like(value, math.inf))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_bounds_one_rounding_above_what_there_is(seed: int, dtype: torch.dtype) -> None:
    """Of rows, columns and both, with masks and without, as a number and as a pair."""
    draws = Draws(seed)
    m, width = draws.int(2, 12), draws.int(2, 9)
    x, tau, cdf = draws.normal(m, width), draws.between(0.1, 2), draws.of(CDFS)
    if seed % 2:
        x[draws.shares(m, width) < 0.2] = -math.inf
    x[:, 0] = draws.normal(m)  # no row is without entries
    may = x > -math.inf
    count, below = may.sum(-1), may.sum(-2)
    rows, columns = above(count.to(dtype)), above(below.to(dtype))
    ones = may.to(x)
    for args in (
        {"k": rows},
        {"k": (rows, rows)},
        {"k": (rows, math.inf)},
        {"k": (0, math.inf), "capacity": (columns, columns)},
        {"k": rows, "capacity": columns},
        {"k": (0, rows), "total": above(count.sum().to(dtype))},
    ):
        if args.keys() == {"k"} and not isinstance(args["k"], tuple) and not bool(may.all()):
            continue  # then columns have equal sums by default, which no matrix meets
        y = khot.soft_assign(x, **args, tau=tau, cdf=cdf)
        assert torch.equal(y, ones), args
    # a least that is above its most; one row of less than all
    half = (count / 2).to(dtype)
    y = khot.soft_assign(x, (above(half), half), tau=tau, cdf=cdf)
    want = khot.soft_topk(x, half.double(), tau=tau, cdf=cdf)
    torch.testing.assert_close(y, want, rtol=0, atol=1e-9)
    # a most that is below the number of entries of +inf
    x[0, 0] = math.inf
    x[0, 1:] = torch.where(may[0, 1:], 0.0, -math.inf)
    one = torch.nextafter(torch.ones(m, dtype=dtype), torch.zeros(m, dtype=dtype))
    assert khot.soft_assign(x, (0, one), tau=tau, cdf=cdf)[0].tolist() == [1] + [0] * (width - 1)


@pytest.mark.parametrize("eps", [2.0**-52, 2.0**-23])
def test_numbers_one_rounding_above_what_there_is(eps: float) -> None:
    x, ones, up = torch.zeros(3, 4), torch.ones(3, 4), 1 + eps
    for args in (
        {"k": 4 * up},
        {"k": (4 * up, 4 * up)},
        {"k": (4 * up, 4)},
        {"k": 4, "capacity": 3 * up},
        {"k": (0, 4), "capacity": (3 * up, 3)},
        {"k": (0, 4), "total": 12 * up},
    ):
        for cdf in ("logistic", "uniform"):
            assert torch.equal(khot.soft_assign(x, **args, cdf=cdf), ones), args


@pytest.mark.parametrize("k", [4 * (1 + 1e-4), torch.tensor(4.001), torch.tensor(4.25).bfloat16()], ids=str)
def test_more_than_a_rounding_is_refused(k: Any) -> None:
    for bound in (k, (k, 5), (k, 4)):
        with pytest.raises(ValueError, match=r"^k must "):
            khot.soft_assign(torch.zeros(3, 4), bound)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("cdf", ["logistic", "uniform"])
def test_full_columns_stay_full_where_sums_miss_one_another(cdf: str, seed: int) -> None:
    """What sums miss is spread over columns that have room for it."""
    draws = Draws(seed)
    m, width = draws.int(3, 20), draws.int(3, 6)
    inside = 0.1 + 0.8 * draws.shares(m, width)
    inside[:, 0], inside[:, 1] = 1, 0
    dtype = draws.of(FLOATS[1:])
    k, capacity = inside.sum(-1).to(dtype), inside.sum(-2).to(dtype)
    y = khot.soft_assign(draws.normal(m, width), k, capacity, tau=0.5, cdf=cdf)
    assert bool((y[:, 0] == 1).all()) and bool((y[:, 1] == 0).all())
    torch.testing.assert_close(y.sum(-1), k.double(), rtol=0, atol=1e-8)
    rounding = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(y.sum(-2), capacity.double(), rtol=rounding, atol=m * rounding)


# ----------------------------------------------------------- what has no solution, and what was not found


def masked_problem(seed: int) -> tuple[Tensor, dict[str, Any], bool]:
    """Scores, bounds of any kind, and whether a matrix meets them: by linear programming. Sums of rows and
    columns alone seldom say it."""
    import scipy.optimize

    draws = Draws(seed)
    m, width = draws.int(2, 12), draws.int(2, 7)
    x, kind = draws.normal(m, width), draws.shares(m, width)
    x[kind < draws.between(0, 0.6)] = -math.inf
    x[kind > 1 - draws.of((0, 0.1))] = math.inf
    x[:, draws.int(0, width - 1)] = 0.5  # no row is without entries
    pinned, may = (x == math.inf).double(), (x > -math.inf).double()
    inside = torch.where(x.isfinite(), draws.shares(m, width), pinned)

    def around(dim: int, size: int) -> Tensor:
        wrong = 1 + draws.of((0.05, 0.8)) * (draws.shares(size) - 0.5)
        return (inside.sum(dim) * wrong).clamp(pinned.sum(dim), may.sum(dim))

    k, capacity, w = around(-1, m), around(-2, width), draws.between(0, 0.3)
    loose = ((capacity * (1 - w)).clamp(min=pinned.sum(0)), (capacity * (1 + w)).clamp(max=may.sum(0)))
    wide = ((k * (1 - w)).clamp(min=pinned.sum(1)), (k * (1 + w)).clamp(max=may.sum(1)))
    args: dict[str, Any] = [
        {"k": wide, "capacity": loose},
        {"k": wide, "capacity": loose, "total": inside.sum().item() * draws.between(0.8, 1.2)},
        {"k": k, "capacity": loose},
        {"k": k, "capacity": capacity * (k.sum() / capacity.sum())},
        {"k": k, "capacity": capacity * (1 + w), "at_most": True},
    ][seed % 5]
    rows, columns = np.kron(np.eye(m), np.ones(width)), np.kron(np.ones(m), np.eye(width))
    meant = {**args, "capacity": (0, args["capacity"])} if "at_most" in args else args
    least_k, most_k, least, most = (b.numpy() for b in sums_of(x, meant))
    # the least by which one of the bounds is missed
    sides = np.concatenate([rows, -rows, columns, -columns])
    ends: dict[str, Any] = {
        "A_ub": np.concatenate([sides, -np.ones((len(sides), 1))], 1),
        "b_ub": np.concatenate([most_k, -least_k, most, -least]),
        "bounds": [*zip(pinned.flatten().tolist(), may.flatten().tolist(), strict=True), (0, None)],
    }
    if "total" in args:
        ends |= {"A_eq": np.append(np.ones(m * width), 0)[None], "b_eq": [args["total"]]}
    found = scipy.optimize.linprog(np.append(np.zeros(m * width), 1), method="highs", **ends)
    return x, args, found.status == 0 and found.fun < 1e-9


@pytest.mark.parametrize("found", [True, False], ids=["found", "not found"])
@pytest.mark.parametrize("cdf", ["logistic", "uniform"])
def test_what_no_matrix_meets_is_told_from_what_was_not_found(
    cdf: str, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the search gives up on everything that is left to search."""
    pytest.importorskip("scipy")
    if not found:
        monkeypatch.setattr(bounded.Problem, "solve", lambda *_: None)
        monkeypatch.setattr(given, "follow", lambda *_: None)
        monkeypatch.setattr(given, "_safe", lambda *_: None)
    seen = {True: 0, False: 0}
    for seed in range(60):
        x, args, possible = masked_problem(seed)
        if possible and found:
            assert not bool(khot.soft_assign(x, **args, tau=0.3, cdf=cdf).isnan().any())
        else:
            kind = RuntimeError if possible else ValueError
            with pytest.raises(kind, match="^soft_assign did not converge" if possible else " must "):
                khot.soft_assign(x, **args, tau=0.3, cdf=cdf)
        seen[possible] += 1
    assert min(seen.values()) > 12


def test_one_matrix_of_a_batch_has_no_solution() -> None:
    """The error is about the one that has none, and a NaN among scores still comes first."""
    x, mask = Draws(0).normal(3, 8, 4), torch.ones(3, 8, 4, dtype=torch.bool)
    mask[1, :6, :2] = False  # six rows have only two columns, which have room for five of them
    for cdf in ("logistic", "uniform"):
        for args in ({"k": 1, "capacity": (0, 2.5)}, {"k": 1, "capacity": 2.5, "at_most": True}):
            assert khot.soft_assign(x[::2], **args, cdf=cdf, mask=mask[::2]).shape == (2, 8, 4)
            with pytest.raises(ValueError, match=r"^capacity must leave room for k"):
                khot.soft_assign(x, **args, cdf=cdf, mask=mask)
            with_nan = x.clone()
            with_nan[0, 0, 0] = math.nan
            y = khot.soft_assign(with_nan, **args, cdf=cdf, mask=mask)
            assert y.isnan().flatten(1).any(-1).tolist() == [True, True, False]
