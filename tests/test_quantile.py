"""Exact order statistics against NumPy's sort and quantile, in float64."""

from __future__ import annotations

import math
import typing
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import khot
from drawn import normal
from khot.quantiles import InterpolationName

INF, NAN = math.inf, math.nan
LEVELS = (0.0, 0.1, 0.25, 0.5, 0.77, 0.999, 1.0)
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
INTERPOLATIONS = pytest.mark.parametrize("interpolation", typing.get_args(InterpolationName))
Q_LIST = torch.tensor(LEVELS, dtype=torch.float64)


def long_row(kind: str, n: int) -> Tensor:
    x = normal(n)
    if kind == "half tied":
        x[::2] = 0.25
    if kind == "few values":
        x = (2 * x).round()
    if kind == "equal":
        x.fill_(-3.0)
    if kind == "sorted":
        x = x.sort().values
    if kind == "periodic":  # with the period of the sample's strides
        x = torch.where(torch.arange(n) % 128 == 0, x, x + 100)
    if kind == "one outlier among ties":
        x.fill_(1.0)
        x[n // 3] = 2.0
    if kind == "signed zeros":
        x = torch.where(x > 1, x, 0.0 * x)
    return x


KINDS = ["normal", "half tied", "few values", "equal", "sorted", "periodic", "one outlier among ties"]
KINDS += ["signed zeros"]


def by_numpy(x: Tensor, q: Any, interpolation: str = "linear", dim: int = -1) -> Tensor:
    """numpy.quantile of the same numbers in float64, rounded once."""
    value = np.quantile(x.detach().double().numpy(), np.asarray(q), axis=dim, method=interpolation)
    return torch.from_numpy(np.asarray(value)).to(x.dtype)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


# --------------------------------------------------------------------------------------- values


@DTYPES
@INTERPOLATIONS
@pytest.mark.parametrize("n", [1, 2, 3, 8, 101, 2048])
def test_quantile_is_numpy_s(dtype: torch.dtype, interpolation: InterpolationName, n: int) -> None:
    x = normal(3, n).to(dtype)
    assert_same(khot.quantile(x, Q_LIST, interpolation=interpolation), by_numpy(x, LEVELS, interpolation))
    for q in LEVELS:
        assert_same(khot.quantile(x, q, interpolation=interpolation), by_numpy(x, q, interpolation))


@DTYPES
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [2049, 20_000])
def test_long_rows(dtype: torch.dtype, kind: str, n: int) -> None:
    x = long_row(kind, n).to(dtype)
    assert_same(khot.quantile(x, Q_LIST), by_numpy(x, LEVELS))
    ordered = np.sort(x.double().numpy())
    for k in (1, 2, 3, n // 3, n // 2, n - 1, n):
        assert khot.kth_value(x, k, largest=False).item() == ordered[k - 1]
        assert khot.kth_value(x, k).item() == ordered[n - k]


def test_a_sample_that_misleads() -> None:
    """A range that misses the place, above and below: what the sample reads differs from all the rest."""
    n = 40_000
    size = n // 128 + 128
    stride = n // size
    noise, read = 1, []
    for i in range(size):
        noise = (noise * 1664525 + 1013904223) % 2**32
        read.append(i * stride + (noise * stride >> 32))
    for shift in (100.0, -100.0):
        for dtype in (torch.float32, torch.float64):
            x = normal(n).to(dtype)
            x[read] += shift
            assert_same(khot.quantile(x, Q_LIST), by_numpy(x, LEVELS))


@INTERPOLATIONS
def test_infinite_entries(interpolation: InterpolationName) -> None:
    """Every position of rows with infinite ends: the entries of the sorted row, and between two of them the
    infinite one, or NaN between −inf and inf."""
    for row in ([-INF, 1, 2, INF], [-INF, -INF, INF, INF], [1, INF, INF], [-INF, 1], [INF], [-INF, -INF]):
        x = torch.tensor(row)
        for quarter in range(4 * len(row) - 3):
            position, q = quarter / 4, quarter / 4 / max(1, len(row) - 1)
            a, b = row[math.floor(position)], row[math.ceil(position)]
            w = position - math.floor(position)
            whole = {"lower": a, "higher": b, "nearest": row[round(position)]}
            between = a if a == b else a * (1 - w) + b * w
            want = whole.get(interpolation, between)
            if interpolation == "midpoint" and a != b:
                want = (a + b) / 2
            got = khot.quantile(x[torch.randperm(len(row))], q, interpolation=interpolation)
            assert_same(got, torch.tensor(float(want)))


def test_great_numbers_do_not_overflow() -> None:
    top = torch.finfo(torch.float64).max
    x = torch.tensor([-top, top], dtype=torch.float64)
    for interpolation in ("linear", "midpoint"):
        assert khot.quantile(x, 0.5, interpolation=interpolation).item() == 0  # type: ignore[arg-type]
    assert khot.quantile(torch.tensor([65504.0, -65504.0]).half(), 0.25).item() == -32752


def test_other_types_of_numbers() -> None:
    x = torch.arange(5e6, dtype=torch.float64)
    for q in (np.float32(0.3), np.float64(0.3), np.int64(1), Fraction(1, 3)):
        assert khot.quantile(x, q) == khot.quantile(x, float(q))
        assert khot.quantile(x, q, mask=x < 5) == khot.quantile(x, float(q), mask=x < 5)
        assert khot.soft_quantile(x[:5], q) == khot.soft_quantile(x[:5], float(q))


def test_position_is_computed_in_float64() -> None:
    """In float32, 0.3 (n − 1) is wrong here."""
    n = 2**25 + 4
    place = math.floor(0.3 * (n - 1))
    assert torch.tensor(0.3) * (n - 1) != place
    x = torch.zeros(n, dtype=torch.float16)
    x[place:] = 1
    assert khot.quantile(x, 0.3, interpolation="lower") == 1
    assert khot.kth_value(x, place + 1, largest=False) == 1


# ------------------------------------------------------------------------- shapes, dims, masks


@pytest.mark.parametrize("shape", [(), (5,), (3, 5), (2, 3, 5), (0, 5), (2, 0, 5)], ids=str)
@pytest.mark.parametrize("q", [0.3, torch.tensor(0.3), torch.tensor([0.3, 0.9]), torch.empty(0)], ids=str)
@pytest.mark.parametrize("keepdim", [False, True])
def test_shapes_are_torch_s(shape: tuple[int, ...], q: Any, keepdim: bool) -> None:
    x = normal(*shape).float()
    for dim in (*range(-max(len(shape), 1), max(len(shape), 1)), None):
        if (shape[dim] if dim is not None and shape else x.numel()) == 0:
            with pytest.raises(ValueError, match=r"^input must have at least one entry"):
                khot.quantile(x, q, dim, keepdim)
            continue
        got = khot.quantile(x, q, dim, keepdim)
        leaf = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(khot.quantile(leaf, q, dim, keepdim).sum(), leaf)
        assert grad.sum().item() == pytest.approx(got.numel())
        if x.numel():
            wide = q.double() if isinstance(q, Tensor) else q
            assert_same(got, torch.quantile(x.double(), wide, dim, keepdim).float())
        else:  # torch.quantile refuses
            assert got.shape == (*torch.as_tensor(q).shape, *x.sum(dim, keepdim=keepdim).shape)
        if dim is not None and not keepdim:
            assert_same(khot.kth_value(x, 1, dim), x.amax(dim))


@INTERPOLATIONS
def test_masks(interpolation: InterpolationName) -> None:
    x = normal(4, 9)
    x[1, 2], x[2, 0] = -INF, INF
    mask = torch.rand(4, 9, generator=torch.Generator().manual_seed(1)) < 0.6
    x[~mask] = torch.tensor([NAN, INF, -INF]).double().repeat(99)[: int((~mask).sum())]
    got = khot.quantile(x, Q_LIST, mask=mask, interpolation=interpolation)
    smallest = khot.kth_value(x, 2, mask=mask, largest=False)
    for i in range(4):
        row = x[i][mask[i]]
        assert_same(got[:, i], khot.quantile(row, Q_LIST, interpolation=interpolation))
        assert_same(smallest[i], row.sort().values[1])
    flat = khot.quantile(x, 0.4, None, mask=mask, interpolation=interpolation)
    assert_same(flat, khot.quantile(x[mask], 0.4, interpolation=interpolation))


@DTYPES
@pytest.mark.parametrize("kind", ["any", "ties", "zeros", "infinite", "wild", "rounded"])
@pytest.mark.parametrize("n", [1, 2, 7, 50, 3000, 100_000])
def test_weighted_quantiles_are_numpy_s(n: int, kind: str, dtype: torch.dtype) -> None:
    x, weights = normal(4, n).to(dtype), normal(4, n, seed=1).abs()
    if kind == "ties":
        x, weights = (3 * x).round(), (3 * weights).ceil().long()
    if kind == "zeros":
        weights[:, 1:] *= normal(4, n, seed=2)[:, 1:] < -0.3
        x[1] = x[1].abs().sqrt().log()
    if kind == "infinite":
        x[:, ::3], x[:, 1::5], x[2] = INF, -INF, INF
    if kind == "wild":
        weights = 10 ** (20 * normal(4, n, seed=1))
    if kind == "rounded":  # which decides whether the sums reach a level
        weights[:] = torch.tensor([[0.1], [0.7], [0.9], [0.001]])
    options: dict[str, Any] = {"method": "inverted_cdf", "weights": weights.numpy()}
    want = np.quantile(x.double().numpy(), np.array(LEVELS), axis=-1, **options)
    assert_same(khot.quantile(x, Q_LIST, weights=weights).double(), torch.from_numpy(want))
    many = khot.quantile(x, Q_LIST.repeat(3), weights=weights)  # a sort serves so many
    assert_same(many.double(), torch.from_numpy(want).repeat(3, 1))


def test_weights_masks_and_shapes() -> None:
    x, weights = normal(4, 9), normal(4, 9, seed=1).abs()
    mask = torch.rand(4, 9, generator=torch.Generator().manual_seed(1)) < 0.6
    mask[3], weights[2] = False, 0
    alone = [khot.quantile(a[m], Q_LIST, weights=w[m]) for a, m, w in zip(x[:2], mask, weights, strict=False)]
    flat = khot.quantile(x[mask], 0.4, weights=weights[mask])
    x[~mask], weights[~mask] = NAN, -INF
    got = khot.quantile(x, Q_LIST, weights=weights, mask=mask)
    assert_same(got[:, :2], torch.stack(alone, 1))
    assert got[:, 2:].isnan().all()
    assert_same(khot.quantile(x, 0.4, None, weights=weights, mask=mask), flat)
    whole, column = normal(3, 2, 5), torch.tensor([1.0, 3.0]).unsqueeze(-1)
    got = khot.quantile(whole, torch.tensor([0.2, 0.9]), 1, True, weights=column)
    want = np.quantile(
        whole.numpy(), [0.2, 0.9], axis=1, keepdims=True, method="inverted_cdf",
        weights=column.expand(3, 2, 5).numpy(),
    )  # fmt: skip
    assert_same(got, torch.from_numpy(want))


def test_bad_weights() -> None:
    x = normal(3)

    def by_weights(weights: Tensor) -> Tensor:
        return khot.quantile(x.expand_as(weights), 0.5, weights=weights)

    for bad in (-1.0, INF, NAN):
        given = torch.tensor([[1.0, bad, 1.0]])
        for quantile in (by_weights, torch.func.vmap(by_weights)):
            with pytest.raises(ValueError, match=f"^weights must be finite and >= 0, but got {bad}"):
                quantile(given)
        compiled = torch.compile(by_weights, fullgraph=True, backend="eager")
        assert compiled(given).isnan().all()
    with pytest.raises(
        ValueError, match=r"^weights must broadcast to the input's shape \(3,\), but got \(2,\)"
    ):
        khot.quantile(x, 0.5, weights=torch.ones(2))
    with pytest.raises(ValueError, match=r"^interpolation must be left out with weights, but got .lower."):
        khot.quantile(x, 0.5, weights=torch.ones(3), interpolation="lower")


@pytest.mark.parametrize("n", [1, 4, 9, 19, 99])
def test_the_conformal_rank_is_that_of_exact_arithmetic(n: int) -> None:
    scores = normal(n)
    ordered = [*sorted(scores.tolist()), INF]
    for percent in range(101):
        place = max(1, math.ceil(Fraction(100 - percent, 100) * (n + 1)))
        for alpha in (percent / 100, torch.tensor(percent / 100)):
            assert khot.conformal_quantile(scores, alpha).item() == ordered[place - 1]


def test_conformal_quantiles_of_classes() -> None:
    scores, label = normal(40), torch.arange(40) % 7 % 4
    of_class = label == torch.arange(5).unsqueeze(-1)  # there is nothing of the last one
    got = khot.conformal_quantile(scores.expand(5, -1), 0.25, mask=of_class)
    want = [khot.conformal_quantile(scores[row], 0.25) for row in of_class]
    assert_same(got, torch.stack(want))
    assert got[-1] == INF
    assert khot.conformal_quantile(normal(3, 6, 2), torch.tensor([0.2, 0.4]), dim=1).shape == (3, 2)


def test_rows_in_which_nothing_takes_part() -> None:
    mask = torch.tensor([[True, True, False], [False, False, False]])
    x = normal(2, 3)
    assert khot.quantile(x, 0.5, mask=mask).isnan().tolist() == [False, True]
    with pytest.raises(
        ValueError, match=r"^k must lie in \[1, number of entries that take part\], but got 1"
    ):
        khot.kth_value(x, 1, mask=mask)
    got = torch.func.vmap(lambda x, mask: khot.kth_value(x, 1, mask=mask))(x, mask)
    assert got.isnan().tolist() == [False, True]


# ---------------------------------------------------------------------------------- derivatives


@INTERPOLATIONS
def test_gradients(interpolation: InterpolationName) -> None:
    x, q = normal(1, 3, 6).requires_grad_(), torch.tensor([0.0, 0.31, 0.77, 1.0], dtype=torch.float64)
    mask = torch.tensor([True, True, False, True, True, True])

    def of_x(x: Tensor) -> Tensor:
        return (
            khot.quantile(x, q, 1, interpolation=interpolation)
            + khot.quantile(x, 0.4, interpolation=interpolation, mask=mask).sum()
        )

    torch.autograd.gradcheck(of_x, x, check_forward_ad=True, check_batched_grad=True)
    torch.autograd.gradgradcheck(lambda x: of_x(x) ** 2, x, fast_mode=True)
    if interpolation == "linear":
        inside = q[1:3].clone().requires_grad_()
        torch.autograd.gradcheck(khot.quantile, (x, inside), check_forward_ad=True)
        torch.autograd.gradgradcheck(khot.quantile, (x, inside))


@DTYPES
def test_gradient_goes_to_the_lowest_index_of_equal_entries(dtype: torch.dtype) -> None:
    x = torch.tensor([[1.0, 2, 3, 2, 2], [0.0, -0.0, 5, -0.0, 0.0], [7, 7, 7, 7, 7]], dtype=dtype)
    x.requires_grad_()
    (grad,) = torch.autograd.grad(khot.kth_value(x, torch.tensor([3, 4, 5])).sum(), x)
    assert grad.tolist() == [[0, 1, 0, 0, 0], [1, 0, 0, 0, 0], [1, 0, 0, 0, 0]]
    (grad,) = torch.autograd.grad(khot.quantile(x, 0.4375).sum(), x)
    assert grad.tolist() == [[0, 1, 0, 0, 0], [1, 0, 0, 0, 0], [1, 0, 0, 0, 0]]


def test_gradients_of_infinities_and_nan() -> None:
    x = torch.tensor([[-INF, 1.0, 2, INF], [-INF, -INF, 3, 4], [NAN, 1, 2, 3]], requires_grad=True)
    for q in (0.0, 0.1, 1.0):
        (grad,) = torch.autograd.grad(khot.quantile(x, q)[:2].nan_to_num(0, 0, 0).sum(), x)
        assert grad[0].eq(0).all()
    (grad,) = torch.autograd.grad(khot.quantile(x, 0.5).sum(), x)
    assert grad[0].tolist() == [0, 0.5, 0.5, 0]
    assert grad[1].eq(0).all()
    assert grad[2].isnan().all()


def test_the_gradient_of_a_masked_row_stays_with_the_entries_that_take_part() -> None:
    x = torch.tensor([5.0, 5.0, 1.0, 5.0], requires_grad=True)
    khot.kth_value(x, 1, mask=torch.tensor([False, True, True, True])).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0, 1, 0, 0]
