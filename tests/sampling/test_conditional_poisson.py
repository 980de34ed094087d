"""Conditional Poisson sampling against enumeration, a dynamic programme, and statistics of its draws."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import grad, gradcheck, gradgradcheck

import subsets
from drawn import normal
from khot import sigmoid_topk
from khot.sampling._tilt import tilt
from khot.sampling.conditional_poisson import (
    calibrate,
    entropy,
    joint_marginals,
    kl,
    log_normalizer,
    log_prob,
    marginals,
    sample,
)

INF, NAN = math.inf, math.nan
SCALES = (0.3, 3.0, 30.0)

each_scale = pytest.mark.parametrize("scale", SCALES)


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def assert_close(got: Tensor, want: Tensor, tol: float = 1e-10) -> None:
    """Asserts that errors are within tol·max(1, abs(want)), and that infinities are equal."""
    torch.testing.assert_close(got, want, rtol=tol, atol=tol)


# --------------------------------------------------------------------------------------------- values


@each_scale
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 10])
def test_everything_by_enumeration(n: int, scale: float) -> None:
    theta, other = scale * normal(2, n, seed=n)
    ks = torch.arange(n + 1)
    rows, others = theta.expand(n + 1, n), other.expand(n + 1, n)
    got = {f: f(rows, ks) for f in (log_normalizer, marginals, joint_marginals, entropy)}
    divergence = kl(rows, others, ks)
    for k in range(n + 1):
        S = subsets.subsets(n, k)
        law, other_law = (subsets.conditional_poisson_law(t, k) for t in (theta, other))
        pi, joint, H = subsets.moments(law, S)
        assert_close(log_prob(S, theta, k), law)
        assert_close(got[log_normalizer][k], (S @ theta).logsumexp(0))
        assert_close(got[marginals][k], pi)
        assert_close(got[joint_marginals][k], joint)
        assert_close(got[entropy][k], H)
        assert_close(divergence[k], (law.exp() * (law - other_law)).sum())


def _sizes(n: int) -> Tensor:
    ks = {1, 2, 3, n // 100, n // 10, n // 3, n // 2, n - n // 10, n - 3, n - 2, n - 1}
    return torch.tensor(sorted(k for k in ks if 0 < k < n))


@each_scale
@pytest.mark.parametrize("n", [30, 1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_normalizer_by_dynamic_programme(n: int, scale: float) -> None:
    theta, k = scale * normal(n, seed=n), _sizes(n)
    want = torch.from_numpy(subsets.dynamic_programme(theta.numpy()))[k]
    rows = theta.expand(len(k), n)
    assert_close(log_normalizer(rows, k), want, 1e-10)
    # for float32 the logits themselves are rounded first
    single = theta.float()
    want = torch.from_numpy(subsets.dynamic_programme(single.double().numpy()))[k]
    assert_close(log_normalizer(single.expand(len(k), n), k).double(), want, 1e-6)


@each_scale
def test_marginals_and_log_prob_by_dynamic_programme(scale: float) -> None:
    n, k = 200, torch.tensor([1, 2, 20, 100, 199])
    theta = scale * normal(n, seed=1)
    log_z = subsets.dynamic_programme(theta.numpy())
    got = marginals(theta.expand(5, n), k)
    for i in (0, 17, int(theta.argmax()), int(theta.argmin())):
        others = np.delete(theta.numpy(), i)
        without = subsets.dynamic_programme(others)
        want = np.exp(theta[i].item() + without[k - 1] - log_z[k])
        assert_close(got[:, i], torch.from_numpy(want))
    assert_close(got.sum(-1), k.double())
    S = torch.zeros(5, n)
    for row, size in zip(S, k, strict=True):
        row[torch.randperm(n, generator=seeded(int(size)))[:size]] = 1
    assert_close(log_prob(S, theta.expand(5, n), k), (S.double() @ theta) - torch.from_numpy(log_z)[k], 1e-11)


def test_equal_logits_count_subsets() -> None:
    n = 1_000
    k = torch.tensor([0, 1, 10, 500, 999, 1000])
    theta = torch.full((6, n), 7.0, dtype=torch.float64)
    count = torch.tensor([math.log(math.comb(n, int(i))) for i in k], dtype=torch.float64)
    assert_close(log_normalizer(theta, k), count + 7.0 * k, 1e-13)
    assert_close(entropy(theta, k), count, 1e-12)
    assert_close(marginals(theta, k), (k.double() / n).unsqueeze(-1).expand(6, n), 1e-14)


# --------------------------------------------------------------------------------------- certain units


def test_certain_units_are_left_out_of_the_sums() -> None:
    free = normal(6, seed=3)
    theta = torch.cat((f64(INF, -INF), free, f64(INF)))
    inner = slice(2, 8)
    assert_close(log_normalizer(theta, 5), log_normalizer(free, 3))
    pi = marginals(theta, 5)
    assert pi[[0, 1, 8]].tolist() == [1, 0, 1]
    assert_close(pi[inner], marginals(free, 3))
    assert_close(entropy(theta, 5), entropy(free, 3))
    joint = joint_marginals(theta, 5)
    assert_close(joint[0], pi)
    assert_close(joint[1], torch.zeros(9, dtype=torch.float64))
    value = f64(1, 0, 1, 0, 0, 1, 0, 1, 1)
    assert_close(log_prob(value, theta, 5), log_prob(value[inner], free, 3))
    for impossible in (f64(0, 0, 1, 1, 0, 1, 0, 1, 1), f64(1, 1, 1, 0, 0, 1, 0, 0, 1)):
        assert log_prob(impossible, theta, 5) == -INF
    assert_close(kl(theta, theta + 0, 5), f64(0)[0], 1e-14)


def test_kl_is_infinite_where_q_cannot_draw_what_p_can() -> None:
    p = f64(0.3, -0.2, 0.5, 1.0)
    assert kl(p, f64(0, 0, 0, -INF), 2) == INF
    assert kl(p, f64(0, 0, 0, INF), 2) == INF
    assert_close(kl(f64(0.3, -0.2, 0.5, -INF), p, 2), -log_prob_of_avoiding(p, 3, 2, f64(0.3, -0.2, 0.5)))


def log_prob_of_avoiding(theta: Tensor, unit: int, k: int, rest: Tensor) -> Tensor:
    """log P(unit ∉ S) under theta; KL(p ‖ q) = −log q(A) where p is q given A."""
    return log_normalizer(rest, k) - log_normalizer(theta, k)


def test_other_sizes_cannot_be_drawn() -> None:
    value = f64(1, 1, 0, 0)
    assert log_prob(value, normal(4), 1) == -INF
    assert log_prob(value.bool(), normal(4), 2) > -INF
    assert log_prob(value.long(), normal(4), 2) == log_prob(value, normal(4), 2)


@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("other", [0.5, 2.0, -1.0, 1e-300, INF])
def test_values_are_zeros_and_ones(other: float, dim: int) -> None:
    value = f64(1, 1, 0, 0).repeat(4, 1)
    theta = normal(4, 4)
    value[2, 1] = other
    with pytest.raises(ValueError, match=f"value must be 0 or 1, but got {other}"):
        log_prob(value.movedim(-1, dim), theta.movedim(-1, dim), 2, dim)
    value[2, 1] = NAN  # as in a draw from a row with a NaN
    seen = log_prob(value.movedim(-1, dim), theta.movedim(-1, dim), 2, dim)
    assert seen.isnan().tolist() == [False, False, True, False]
    value[2, 1] = other  # where values cannot be read there is no exception
    seen = torch.vmap(lambda v, t: log_prob(v, t, 2))(value, theta)
    assert seen.isnan().tolist() == [False, False, True, False]


@pytest.mark.parametrize("f", [log_normalizer, marginals, joint_marginals, entropy, sample])
def test_nan_stays_in_its_row(f: Callable[..., Tensor]) -> None:
    theta = normal(3, 5)
    theta[1, 2] = NAN
    y = f(theta, 2, generator=seeded()) if f is sample else f(theta, 2)
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all()


def test_more_than_k_certain_units_make_their_row_nan() -> None:
    theta = torch.stack((f64(INF, INF, 0), f64(0, 0, 0)))
    for k in (0, 1):
        for y in (marginals(theta, k), sample(theta, k)):
            assert y[0].isnan().all()
            assert (y[1].sum() - k).abs() < 1e-15


def test_k_must_leave_enough_units() -> None:
    with pytest.raises(ValueError, match="k must lie in"):
        marginals(f64(0, -INF, -INF), 2)
    with pytest.raises(ValueError, match="k must lie in"):
        sample(f64(0, -INF, -INF), 2)


def test_empty() -> None:
    for batch, n, k in (((0,), 5, 2), ((3, 0), 5, 2), ((3,), 0, 0)):
        theta = torch.zeros(*batch, n)
        assert log_normalizer(theta, k).shape == batch
        assert marginals(theta, k).shape == sample(theta, k).shape == calibrate(theta).shape == (*batch, n)
        assert joint_marginals(theta, k).shape == (*batch, n, n)
        assert entropy(theta, k).shape == batch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_rounded_once(dtype: torch.dtype) -> None:
    theta = normal(3, 40).to(dtype)
    for f in (log_normalizer, marginals, joint_marginals, entropy):
        y = f(theta, 15)
        assert y.dtype == dtype
        torch.testing.assert_close(y, f(theta.double(), 15).to(dtype), rtol=0, atol=0)
    assert sample(theta, 15).dtype == dtype


# ------------------------------------------------------------------------------------------ gradients


def _functions(n: int, k: int) -> dict[str, Callable[[Tensor], Tensor]]:
    value = torch.zeros(n)
    value[:k] = 1
    other = normal(n, seed=9)
    return {
        "log_normalizer": lambda x: log_normalizer(x, k),
        "marginals": lambda x: marginals(x, k),
        "joint_marginals": lambda x: joint_marginals(x, k),
        "log_prob": lambda x: log_prob(value, x, k),
        "entropy": lambda x: entropy(x, k),
        "kl_p": lambda x: kl(x, other, k),
        "kl_q": lambda x: kl(other, x, k),
        "calibrate": lambda x: calibrate(sigmoid_topk(x, k)),  # on the plane Σπ = k
    }


@pytest.mark.parametrize("name", list(_functions(1, 1)))
@pytest.mark.parametrize("n,k", [(2, 1), (5, 2), (6, 5)])
def test_gradients(name: str, n: int, k: int) -> None:
    f = _functions(n, k)[name]
    x = normal(n, seed=n).requires_grad_()
    fast = name in ("calibrate", "joint_marginals")  # along random directions
    assert gradcheck(f, x, check_forward_ad=True, fast_mode=fast)
    assert gradgradcheck(f, x, fast_mode=fast)


def test_gradients_pass_by_certain_units() -> None:
    x = f64(0.3, INF, -0.5, -INF, 1.0)
    for k in (1, 2, 4):
        for f in (log_normalizer, entropy, lambda x, k: marginals(x, k).square().sum()):
            leaf = x.clone().requires_grad_()
            (g,) = grad(f(leaf, k), leaf)
            assert g.isfinite().all()
            assert g[[1, 3]].tolist() == [0, 0]


@each_scale
def test_gradient_at_size(scale: float) -> None:
    """Cov·v for n = 1000: the covariance from joint inclusion, and a difference of the normalizer."""
    n, k = 1000, 300
    theta = (scale * normal(n, seed=2)).requires_grad_()
    v = normal(n, seed=3)
    pi = marginals(theta, k)
    (got,) = grad(pi @ v, theta)
    with torch.no_grad():
        covariance = joint_marginals(theta, k) - pi.unsqueeze(-1) * pi
        assert_close(got, covariance @ v, 1e-11)
        assert_close(covariance.sum(-1), torch.zeros(n, dtype=torch.float64), 1e-11)


# ---------------------------------------------------------------------------------------- calibration

HARD = {
    "two carry the variance": f64(0.5, 0.5, 1 - 1e-9, 1e-9),
    "two of four": f64(0.999, 0.5, 0.5, 0.001),
    "turned round by pareto": f64(0.99, 0.01),
    "one left out": f64(0.999, 0.999, 0.999, 0.999, 0.004),
    "small": f64(0.9, 0.6, 0.5, 0.0, 1.0, 0.3, 0.7),
    "equal": torch.full((8,), 0.25, dtype=torch.float64),
    "all but one": sigmoid_topk(10 * normal(1000, seed=1), 999),
    "few of many": sigmoid_topk(10 * normal(1000, seed=2), 10),
    "half": sigmoid_topk(3 * normal(100, seed=3), 50),
    "mild": sigmoid_topk(0.3 * normal(20, seed=4), 3),
    "steep": sigmoid_topk(30 * normal(20, seed=5), 10),
}


@pytest.mark.parametrize("name", list(HARD))
def test_calibration(name: str) -> None:
    probs = HARD[name]
    theta = calibrate(probs)
    k = probs.sum().round()
    assert torch.ops.khot.calibrate(tilt(torch.logit(probs), k, -1).z, k)[1] <= 13
    assert (marginals(theta, k) - probs).abs().max() <= 1e-12
    assert abs(torch.sigmoid(theta).sum() - k) <= 1e-10
    certain = (probs == 0) | (probs == 1)
    assert (theta.isinf() == certain).all()


def test_calibration_of_many_rows_and_of_float32() -> None:
    k = torch.tensor([1, 2, 50, 99])
    probs = sigmoid_topk(2 * normal(4, 100, seed=7), k)
    theta = calibrate(sigmoid_topk(2 * normal(4, 100, seed=7).float(), k))
    assert theta.dtype == torch.float32
    assert_close(marginals(theta.double(), k), probs, 1e-6)
    for row, one in zip(calibrate(probs), probs, strict=True):
        assert_close(row, calibrate(one), 1e-10)


def test_gradient_of_calibration_at_size() -> None:
    """θ(π(θ)) = θ up to a constant: a gradient without a constant part passes unchanged."""
    theta = (2 * normal(300, seed=8)).requires_grad_()
    v = normal(300, seed=9)
    v = v - v.mean()
    got = calibrate(marginals(theta, 100))
    (g,) = grad((got - got.mean()) @ v, theta)
    assert_close(g, v, 1e-9)


@pytest.mark.parametrize(
    "probs, what",
    [
        (f64(0.5, 0.6), "distance of probs' sum from an integer"),
        (f64(1.5, 0.5), r"probs must lie in \[0, 1\]"),
        (f64(-0.5, 0.5), r"probs must lie in \[0, 1\]"),
        (f64(NAN, 0.5), r"probs must lie in \[0, 1\]"),
        (torch.tensor(0.5), "probs must have at least one dim, along which the units lie"),
    ],
)
def test_probs_must_be_inclusion_probabilities(probs: Tensor, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        calibrate(probs)


# -------------------------------------------------------------------------------------------- draws


def test_draws_have_k_ones() -> None:
    theta = torch.stack([s * normal(2, 50, seed=1) for s in SCALES])  # (3, 2, 50)
    k = torch.tensor([[0, 1], [17, 25], [49, 50]])
    x = sample(theta, k, sample_shape=(7,), generator=seeded())
    assert x.shape == (7, 3, 2, 50)
    assert ((x == 0) | (x == 1)).all()
    assert (x.sum(-1) == k).all()


@pytest.mark.parametrize("scale, k", [(0.3, 50), (1.0, 40)])
def test_distribution_of_draws_by_halves(scale: float, k: int) -> None:
    """How many units of the first half are drawn, and the inclusion of each. Each test fails at a rate of
    1e-6."""
    n, draws = 100, 20_000
    theta = scale * normal(n, seed=3)
    # large enough that units are drawn by halves
    assert (marginals(theta, k) * (1 - marginals(theta, k))).sum() > 16
    x = sample(theta, k, sample_shape=(draws,), generator=seeded(4))
    subsets.assert_inclusion(x.sum(0), draws, marginals(theta, k))
    first, second, whole = (subsets.dynamic_programme(t.numpy()) for t in (theta[:50], theta[50:], theta))
    sizes = np.arange(k + 1)
    law = np.where((sizes <= 50) & (k - sizes <= 50), 1.0, 0.0)
    law[law > 0] = np.exp(first[sizes[law > 0]] + second[k - sizes[law > 0]] - whole[k])
    counts = np.bincount(x[:, :50].sum(-1).int().numpy(), minlength=k + 1)
    subsets.assert_frequencies(counts, law)


@pytest.mark.slow
def test_a_million_units() -> None:
    n, k = 10**6, 500_000
    theta = 3 * normal(n, seed=1)
    x = sample(theta, k, generator=seeded())
    assert x.sum() == k
    assert log_prob(x, theta, k).isfinite()
    assert abs(marginals(theta, k).sum() - k) <= 1e-6
    count = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    assert_close(log_normalizer(torch.zeros(n, dtype=torch.float64), k), f64(count)[0], 1e-13)
