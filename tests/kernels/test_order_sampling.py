"""Order sampling's inclusion probabilities and calibration, compiled and reference, against an integral in 30
digits."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch
from torch import Tensor

from khot import sigmoid_topk
from khot._kernels.reference import order_sampling as reference
from khot._ops.tilting import tilt_rows

KERNELS = {
    "in use": (torch.ops.khot.order_inclusion, torch.ops.khot.order_calibrate),
    "reference": (reference.order_inclusion, reference.order_calibrate),
}


def integral(theta: Tensor, k: int) -> Tensor:
    """π_i = ∫ f_i(t) P(fewer than k of the others are below t) dt in 30 digits, by the trapezoidal rule: its
    error is about exp(−2π·π/step)."""
    with mpmath.workdps(30):
        units, step = [mpmath.mpf(t) for t in theta.tolist()], mpmath.mpf(1) / 6
        reach = int(6 * (75 + theta.abs().max()))
        total = [mpmath.mpf(0)] * len(units)
        for node in range(-reach, reach + 1):
            below = [1 / (1 + mpmath.exp(-step * node - t)) for t in units]
            for i, own in enumerate(below):
                few = [mpmath.mpf(1)] + [mpmath.mpf(0)] * (k - 1)  # P(so many of the others are below)
                for p in below[:i] + below[i + 1 :]:
                    few = [few[0] * (1 - p)] + [few[s] * (1 - p) + few[s - 1] * p for s in range(1, k)]
                total[i] += step * own * (1 - own) * mpmath.fsum(few)
        return torch.tensor([float(t) for t in total], dtype=torch.float64)


def scores(n: int, scale: float, rows: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(n)
    return scale * torch.randn(rows, n, generator=generator, dtype=torch.float64)


def sizes(k: int, rows: int = 1) -> Tensor:
    return torch.full((rows,), float(k), dtype=torch.float64)


@pytest.mark.parametrize("n, k, scale", [(3, 1, 1.0), (6, 2, 6.0), (7, 3, 0.1)])
def test_inclusion_is_the_integral(n: int, k: int, scale: float) -> None:
    theta = tilt_rows(scores(n, scale), sizes(k)).z
    want = integral(theta[0], k)
    for inclusion, _ in KERNELS.values():
        pi, out = inclusion(theta, sizes(k))
        torch.testing.assert_close(pi[0], want, rtol=2e-13, atol=0)
        torch.testing.assert_close(out[0], 1 - want, rtol=2e-12, atol=1e-15)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("n, k, scale", [(3, 1, 1.0), (6, 2, 3.0), (7, 3, 0.1)])
def test_calibration_is_right_by_the_integral(n: int, k: int, scale: float, kernels: str) -> None:
    probs = sigmoid_topk(scores(n, scale), k)
    theta = KERNELS[kernels][1](torch.logit(probs), sizes(k))
    torch.testing.assert_close(integral(theta[0], k), probs[0], rtol=0, atol=1e-8)


@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0, 15.0])
@pytest.mark.parametrize("n", [2, 5, 16, 33, 257, 1_000])
def test_as_the_reference(n: int, scale: float) -> None:
    """With certain units, for sizes at both ends."""
    theta = scores(n, scale, rows=4)
    theta[1, : n // 4], theta[2, : n // 4] = math.inf, -math.inf
    k = torch.tensor([1, n // 2, n // 3, n - 1], dtype=torch.float64)
    probs = sigmoid_topk(theta, k)
    goal = torch.logit(probs)
    z = tilt_rows(theta, k).z
    for got, want in zip(torch.ops.khot.order_inclusion(z, k), reference.order_inclusion(z, k), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-15)
    found = torch.ops.khot.order_calibrate(goal, k)
    pi, out = reference.order_inclusion(tilt_rows(found, k).z, k)
    torch.testing.assert_close(pi, probs, rtol=1e-4, atol=1e-8)
    torch.testing.assert_close(out, (-goal).sigmoid(), rtol=1e-4, atol=1e-8)
    certain = goal.isinf()
    assert torch.equal(found[certain], goal[certain])


@pytest.mark.parametrize("ordered", [True, False], ids=["order", "conditional Poisson"])
@pytest.mark.parametrize("n", [2, 3, 8, 16, 17])
def test_rows_of_few_units_are_calibrated_in_groups(n: int, ordered: bool) -> None:
    """Of any spread, beside rows that are not ordinary, and with several sizes in a group: against the
    probabilities of single rows, which are computed in another way."""
    rows = 45
    spread = torch.logspace(-1, 1.5, rows, dtype=torch.float64).unsqueeze(-1)
    spread = spread[torch.randperm(rows, generator=torch.Generator().manual_seed(0))]
    k = torch.full((rows,), float(max(1, n // 3)), dtype=torch.float64)
    k[16:32] = torch.arange(16) % (n - 1) + 1
    theta = spread * scores(n, 1.0, rows)
    theta[3, 0], theta[20, 1] = math.inf, -math.inf
    probs = sigmoid_topk(theta, k)
    goal = torch.logit(probs)
    goal[9] = math.nan
    kernel = torch.ops.khot.order_calibrate if ordered else lambda z, k: torch.ops.khot.calibrate(z, k)[0]
    found = kernel(goal, k)
    z = tilt_rows(found, k).z
    pi, out = torch.ops.khot.order_inclusion(z, k) if ordered else torch.ops.khot.inclusion(z, k)[1:]
    usual = torch.arange(rows) != 9
    tolerance = 1e-8 if ordered else 1e-12
    torch.testing.assert_close(pi[usual], probs[usual], rtol=1e-4 if ordered else 1e-9, atol=tolerance)
    torch.testing.assert_close(out[usual], (-goal).sigmoid()[usual], rtol=1e-4, atol=tolerance)
    assert found[9].isnan().all()
    alone = torch.cat([kernel(goal[i : i + 1], k[i : i + 1]) for i in range(rows)])
    alone_z = tilt_rows(alone, k).z
    torch.testing.assert_close(alone_z[usual], z[usual], rtol=0, atol=1e-6 if ordered else 1e-9)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        many = kernel(goal.repeat(64 * 8, 1), k.repeat(64 * 8))
        torch.set_num_threads(1)
        assert torch.equal(
            many[usual.repeat(64 * 8)], kernel(goal.repeat(64 * 8, 1), k.repeat(64 * 8))[usual.repeat(64 * 8)]
        )
    finally:
        torch.set_num_threads(before)


def test_ends_and_rows_that_are_not_numbers() -> None:
    goal = torch.tensor([[math.nan, 1.0, 2.0], [math.inf, -math.inf, math.inf], [0.0, 0.0, math.inf]])
    k = torch.tensor([1.0, 2.0, 2.0], dtype=torch.float64)
    theta = torch.ops.khot.order_calibrate(goal.double(), k)
    assert theta[0].isnan().all()
    assert theta[1].tolist() == [math.inf, -math.inf, math.inf]
    assert theta[2, 0] == theta[2, 1] and theta[2, 2] == math.inf
    half = torch.full((4,), 2.5, dtype=torch.float64)
    assert torch.ops.khot.order_calibrate(scores(6, 1.0, 4), half).isnan().all()
    assert torch.ops.khot.order_inclusion(goal.double(), k)[0][0].isnan().all()
