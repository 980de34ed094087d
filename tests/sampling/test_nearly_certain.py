"""Every design and function of khot.sampling on rows whose k likeliest units are far ahead of the others.

There 1 − π, Σπ(1 − π) and the probabilities of all samples but one come near the rounding errors of 1, or
below. The oracles are sums over all subsets, in 60 digits.
"""

from __future__ import annotations

import itertools
import math

import mpmath
import pytest
import torch
from tests.subsets import assert_inclusion
from torch import Tensor

import khot
from khot import sampling
from khot.distributions import KHot
from khot.sampling import conditional_poisson as cp

GAPS = [1, 10, 30, 37, 70, 76, 100, 300, 700]
CLOSE = [name for name, d in sampling.designs.items() if d.fixed_size and d.close]
# The arithmetic is in float64 whatever the dtype, which only rounds what is given: to gaps that leave π apart
# from 1, that do not, and beyond the underflow of its exponentials.
CASES = [
    *((torch.float64, gap) for gap in GAPS),
    *((torch.float32, gap) for gap in (10, 30, 100, 700)),
    *((torch.bfloat16, gap) for gap in (1, 37, 300)),
    *((torch.float16, gap) for gap in (10, 76, 700)),
]
#: Of all sizes two, so that each dtype and each gap has all of them.
TURNS = {case: 2 * i for i, case in enumerate(CASES)}
every_gap = pytest.mark.parametrize(("dtype", "gap"), CASES, ids=str)
SIZES = [(4, 2), (5, 3), (5, 1), (6, 5), (24, 9)]  # n and k
SMALL = [size for size in SIZES if size[0] < 10]


def sizes(dtype: torch.dtype, gap: float, turn: int = 0) -> list[tuple[int, int]]:
    first = TURNS[dtype, gap] + turn
    return [SIZES[(first + i) % len(SIZES)] for i in range(2)]


def scores(n: int, k: int, gap: float, dtype: torch.dtype, rows: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(100 * n + k)
    x = 2.5 * torch.randn(rows, n, generator=generator, dtype=torch.float64)
    x[:, :k] += gap
    return x.to(dtype)


def law(theta: Tensor, k: int) -> tuple[list[tuple[int, ...]], list[mpmath.mpf]]:
    """All k-subsets, and their probabilities ∝ exp Σθ."""
    sets = list(itertools.combinations(range(len(theta)), k))
    with mpmath.workdps(60 + 1400):
        units = [mpmath.e ** mpmath.mpf(t) for t in theta.tolist()]
        weights = [mpmath.fprod(units[i] for i in S) for S in sets]
        total = mpmath.fsum(weights)
        return sets, [w / total for w in weights]


def as_tensor(values: list[mpmath.mpf]) -> Tensor:
    return torch.tensor([float(v) for v in values], dtype=torch.float64)


@pytest.mark.parametrize("n, k", SMALL)
@pytest.mark.parametrize("gap", GAPS)
def test_relative_accuracy_of_marginals_and_entropy(gap: float, n: int, k: int) -> None:
    x = scores(n, k, gap, torch.float64, rows=2)
    for row in x:
        with mpmath.workdps(1500):
            sets, p = law(row, k)
            pi = as_tensor([mpmath.fsum(v for S, v in zip(sets, p, strict=True) if i in S) for i in range(n)])
            entropy = float(-mpmath.fsum(v * mpmath.log(v) for v in p))
        # the Fourier transform loses digits of the small probabilities down to a variance of 1e-4
        torch.testing.assert_close(cp.marginals(row, k), pi, rtol=1e-11, atol=1e-307)
        assert cp.entropy(row, k).item() == pytest.approx(entropy, rel=1e-6, abs=1e-306)


@every_gap
def test_functions_of_conditional_poisson(gap: float, dtype: torch.dtype) -> None:
    for n, k in SIZES:
        x = scores(n, k, gap, dtype).requires_grad_()
        draws = cp.sample(x, k, sample_shape=(2,), generator=torch.Generator().manual_seed(0))
        assert (draws.sum(-1) == k).all()
        log_prob, entropy = cp.log_prob(draws, x, k), cp.entropy(x, k)
        joint, pi = cp.joint_marginals(x, k), cp.marginals(x, k)
        assert log_prob.isfinite().all() and (log_prob <= 1e-6).all()
        assert entropy.isfinite().all() and (entropy >= 0).all() and joint.isfinite().all()
        torch.testing.assert_close(
            pi.double().sum(-1), torch.full((4,), float(k)).double(), rtol=0, atol=0.05
        )
        divergence = cp.kl(x, x.detach().flip(0), k)
        assert not divergence.isnan().any() and (divergence >= -1e-6).all()
        value = log_prob.sum() + entropy.sum() + (pi * torch.arange(n)).sum() + joint.square().sum()
        (grad,) = torch.autograd.grad(value, x)
        assert grad.isfinite().all()


@pytest.mark.parametrize("n, k", SMALL)
@pytest.mark.parametrize("gap", GAPS)
def test_jacobian_of_the_marginals(gap: float, n: int, k: int) -> None:
    """The covariance of the indicators, relative to its largest entry."""
    x = scores(n, k, gap, torch.float64, rows=1)[0]
    with mpmath.workdps(1500):
        sets, p = law(x, k)
        both = [[mpmath.fsum(v for S, v in zip(sets, p, strict=True) if i in S and j in S) for j in range(n)]
                for i in range(n)]  # fmt: skip
        rows = [as_tensor([both[i][j] - both[i][i] * both[j][j] for j in range(n)]) for i in range(n)]
    want = torch.stack(rows)
    got = torch.autograd.functional.jacobian(lambda x: cp.marginals(x, k), x)
    assert (got - want).abs().max() <= 1e-11 * want.abs().max()
    got = torch.func.jacfwd(lambda x: cp.marginals(x, k))(x)
    assert (got - want).abs().max() <= 1e-11 * want.abs().max()


@every_gap
def test_calibrate(gap: float, dtype: torch.dtype) -> None:
    for n, k in SIZES:
        probs = khot.sigmoid_topk(scores(n, k, gap, dtype), k)
        wide = probs.double().requires_grad_()
        logits = cp.calibrate(probs)
        assert not logits.isnan().any()
        slack = max(8 * n * torch.finfo(dtype).eps, 1e-12)  # the iteration stops at this error
        assert (cp.marginals(logits.double(), k) - probs.double()).abs().max() <= slack
        if dtype == torch.float64:
            assert not cp.calibrate(wide).isnan().any()
            (grad,) = torch.autograd.grad(cp.calibrate(wide).nan_to_num(0, 0, 0)[:, :-1].sum(), wide)
            assert grad.isfinite().all()


@pytest.mark.parametrize("gap", GAPS)
def test_calibrate_keeps_the_relative_accuracy(gap: float) -> None:
    """From the marginals back to the logits; as long as 1 − π does not vanish."""
    x = scores(5, 2, gap / 2, torch.float64)
    probs = cp.marginals(x, 2)
    keep = ((1 - probs) * (probs > 0.5)).sum(-1) > 1e-12
    found = cp.marginals(cp.calibrate(probs), 2)
    low = probs[keep] < 0.5
    torch.testing.assert_close(found[keep][low], probs[keep][low], rtol=1e-3, atol=0)


def test_gradient_of_calibration() -> None:
    """dθ solves Cov dθ = dprobs, even with a covariance of 1e-14."""
    x = scores(5, 2, 30.0, torch.float64, rows=1)[0]
    probs = cp.marginals(x, 2).requires_grad_()
    weight = torch.tensor([1.0, -1.0, 0.5, -0.5, 0.0], dtype=torch.float64)
    (grad,) = torch.autograd.grad((cp.calibrate(probs) * weight).sum(), probs)
    # at the logits found, since 1 − π has lost its last digits
    found = cp.calibrate(probs).detach()
    covariance = torch.autograd.functional.jacobian(lambda x: cp.marginals(x, 2), found)
    torch.testing.assert_close(covariance @ grad, weight, rtol=0, atol=1e-8)


@every_gap
@pytest.mark.parametrize("design", [*CLOSE, "exact"])
def test_designs(design: str, gap: float, dtype: torch.dtype) -> None:
    """Sizes exactly k, no NaN, gradients finite, and marginals as prescribed."""
    options = {"design": "pareto", "adjust": "exact"} if design == "exact" else {"design": design}
    name = options["design"]
    for n, k in sizes(dtype, gap, len(design)):
        x = scores(n, k, gap, dtype).requires_grad_()
        probs = khot.sigmoid_topk(x.detach() if dtype.itemsize >= 4 else x.detach().float(), k)
        generator = torch.Generator().manual_seed(0)
        draws = sampling.sample(probs, generator=generator, sample_shape=(2,), **options)
        assert (draws.sum(-1) == k).all()
        torch.testing.assert_close(sampling.inclusion_probs(probs, name), probs, rtol=0, atol=2e-3)
        if sampling.designs[name].joint is not None:
            joint = sampling.joint_inclusion_probs(probs, name)
            assert joint.isfinite().all()
            diagonal = joint.diagonal(dim1=-2, dim2=-1)
            torch.testing.assert_close(diagonal, probs, rtol=0, atol=2e-3)
        sample = khot.sample_khot(x, k, design=name, generator=generator)
        assert (sample.sum(-1) == k).all()
        (grad,) = torch.autograd.grad((sample * torch.arange(n)).sum(), x)
        assert grad.isfinite().all()


@pytest.mark.parametrize(("dtype", "gap"), [case for case in CASES if case[0].itemsize >= 4], ids=str)
@pytest.mark.parametrize("design", ["pareto", "conditional_poisson", "sampford"])
def test_log_prob_and_entropy_of_khot(design: str, gap: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for n, k in sizes(dtype, gap, len(design)):
        x = scores(n, k, gap, dtype, rows=2).requires_grad_()
        p = KHot(k, logits=x, design=design)
        value = p.log_prob(p.sample())
        assert value.isfinite().all() and (value <= 1e-6).all()
        (grad,) = torch.autograd.grad(value.sum(), x)
        assert grad.isfinite().all()
        if design == "conditional_poisson":
            entropy = p.entropy()
            assert entropy.isfinite().all() and (entropy >= 0).all()
            assert (entropy <= math.lgamma(n + 1)).all()


@pytest.mark.parametrize("design", [*CLOSE, "exact"])
def test_a_nearly_certain_row_leaves_its_neighbours_alone(design: str) -> None:
    options = {"design": "pareto", "adjust": "exact"} if design == "exact" else {"design": design}
    ordinary, extreme = scores(5, 3, 1, torch.float64, 4), scores(5, 3, 76, torch.float64, 4)
    alone, mixed = (khot.sigmoid_topk(x, 3) for x in (ordinary, torch.cat((ordinary, extreme))))
    torch.testing.assert_close(
        sampling.inclusion_probs(mixed, options["design"])[:4],
        sampling.inclusion_probs(alone, options["design"]),
        rtol=1e-12,
        atol=1e-14,
    )
    torch.testing.assert_close(cp.calibrate(mixed)[:4], cp.calibrate(alone), rtol=1e-12, atol=1e-12)
    draws = sampling.sample(
        mixed, generator=torch.Generator().manual_seed(0), sample_shape=(3000,), **options
    )
    assert (draws.sum(-1) == 3).all()
    truth = sampling.inclusion_probs(mixed, options["design"])
    assert_inclusion(draws.sum(0), 3000, truth if design != "exact" else mixed)


@pytest.mark.parametrize("design", CLOSE)
@pytest.mark.parametrize(
    "probs",
    [
        torch.tensor([1 - 2.0**-23, 1 - 2.0**-23, 1e-25, 1e-25]),
        torch.tensor([1, 1 - 2.0**-24, 1e-38, 1e-45, 0]),
        torch.tensor([1 - 2.0**-53, 1 - 2.0**-53, 1e-320, 1e-300], dtype=torch.float64),
        torch.tensor([1, 1, 1e-17, 1e-18], dtype=torch.float64),
        torch.tensor([1, 0.99609375, 0.0078125, 0], dtype=torch.bfloat16),
        torch.tensor([1, 0.9995, 6e-8, 0.0005], dtype=torch.float16),
    ],
    ids=str,
)
def test_probabilities_that_differ_from_0_and_1_by_rounding_only(design: str, probs: Tensor) -> None:
    draws = sampling.sample(probs, design, sample_shape=(50,), generator=torch.Generator().manual_seed(0))
    assert (draws.sum(-1) == 2).all()
    p = KHot(2, probs=probs, design=design, validate_args=False)
    if sampling.designs[design].log_prob is not None:
        assert p.log_prob(p.sample()).isfinite().all()
    if design == "conditional_poisson":
        assert 0 <= p.entropy() < 0.1
    assert not cp.calibrate(probs).isnan().any()
    assert sampling.inclusion_probs(probs, design).isfinite().all()
