"""Gradient estimators against gradients by enumeration, and the arguments that each accepts.

Statistical tests fix their seed; each would fail for 1 seed in 10⁶ if the claim is true.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import khot
from khot import distributions, estimators, losses, sampling
from khot.estimators import sample_khot
from khot.sampling import conditional_poisson
from khot.sampling._noise import gumbel_noise
from subsets import assert_mean, iterative_poisson_law, softmax_law, subsets, successive_law, vectors

NAMES = ("straight_through", "second_order", "gumbel", "simple", "imle", "sequential_softmax", "ncpss")
SIZED = tuple(name for name in NAMES if name != "ncpss")  # always k ones, and certain ones at ±inf
LEARN_SIZE = ("straight_through", "second_order")
THETA = torch.tensor([0.9, -0.4, 0.1, -1.3], dtype=torch.float64)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def poisson_probs(theta: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k-hot vectors, and their probabilities ∝ exp(⟨θ, x⟩)."""
    x = subsets(len(theta), k)
    return x, softmax_law(theta, x)


def gumbel_probs(theta: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k-hot vectors, and their probabilities when drawn without replacement, each unit ∝ exp(θ)."""
    return subsets(len(theta), k), successive_law(theta, k)


def loss(x: Tensor) -> Tensor:
    """Neither linear nor quadratic."""
    a = torch.tensor([0.7, -0.3, 1.1, 0.2], dtype=x.dtype)[: x.shape[-1]]
    return (x @ a - 0.4).sin() + (x * a).square().sum(-1) * x[..., 0] + (x @ a.flip(0)) ** 3


def sampled_gradients(
    draw: Callable[[Tensor], Tensor], theta: Tensor, samples: int, f: Callable[[Tensor], Tensor] = loss
) -> Tensor:
    """One gradient per sample, (samples, n)."""
    rows = theta.detach().expand(samples, -1).clone().requires_grad_()
    return torch.autograd.grad(f(draw(rows)).sum(), rows)[0]


def assert_frequencies(x: Tensor, support: Tensor, probs: Tensor) -> None:
    """The rows of x are drawn from the support with these probabilities."""
    assert_mean((x.unsqueeze(-2) == support).all(-1).double(), probs.detach())


# ------------------------------------------------------------------------------ what all of them share


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_samples_are_k_hot_along_dim_and_carry_a_gradient(name: str, dtype: torch.dtype) -> None:
    logits = torch.randn(4, 9, 3, generator=generator()).to(dtype).requires_grad_()
    k = torch.tensor([[2, 3, 4]]).expand(4, 3)
    design = "pivotal" if name in LEARN_SIZE else None  # for few units pareto is calibrated, which takes time
    for dim, size in ((1, k), (-2, 5), (-1, 1)):
        x = sample_khot(logits, size, dim, estimator=name, design=design, generator=generator())
        assert x.shape == logits.shape and x.dtype == dtype
        assert ((x == 0) | (x == 1)).all()
        off = (x.double().sum(dim) - size).abs()
        assert off.mean() < 0.7 if name == "ncpss" else not off.any()
        v = torch.randn(x.shape, generator=generator(1)).to(dtype)
        (grad,) = torch.autograd.grad((x * v).sum(), logits)
        assert grad.isfinite().all() and grad.abs().sum() > 0
        if name == "ncpss":
            continue
        # adding a constant to a row changes nothing except rounding
        total = grad.double().sum(dim).abs().max()
        assert total <= 100 * torch.finfo(dtype).eps * grad.double().abs().sum(dim).max()


@pytest.mark.parametrize("name", NAMES)
def test_generator_decides_the_draw_and_nothing_else_does(name: str) -> None:
    logits = torch.randn(50, 30, generator=generator())

    def draw(seed: int) -> Tensor:
        return sample_khot(logits, 10, estimator=name, generator=generator(seed))

    state = torch.get_rng_state()
    first = draw(1)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, draw(1))
    assert not torch.equal(first, draw(2))
    torch.manual_seed(3)
    default = sample_khot(logits, 10, estimator=name)
    torch.manual_seed(3)
    assert torch.equal(default, sample_khot(logits, 10, estimator=name))


@pytest.mark.parametrize("name", SIZED)
def test_extreme_logits_and_ends_of_k(name: str) -> None:
    inf = math.inf
    logits = torch.tensor([[inf, 0.0, -inf, 1e4], [0.0, -1e4, 0.0, -inf]], requires_grad=True)
    for k in (1, 2, 3):
        x = sample_khot(logits, k, estimator=name, generator=generator())
        assert (x.sum(-1) == k).all()
        assert (x[logits == inf] == 1).all() and (x[logits == -inf] == 0).all()
        (grad,) = torch.autograd.grad((x * torch.arange(4)).sum(), logits)
        assert grad.isfinite().all()
        if k == 3 and name != "sequential_softmax":  # all that may be drawn
            assert grad.abs().max() <= 1e-12
    x = sample_khot(logits[1:], 0, estimator=name)
    assert (x == 0).all()
    assert (torch.autograd.grad((x * torch.arange(4)).sum(), logits)[0] == 0).all()
    assert sample_khot(torch.randn(5, 1), 1, estimator=name).tolist() == [[1.0]] * 5
    assert sample_khot(torch.randn(0, 6), 2, estimator=name).shape == (0, 6)


@pytest.mark.parametrize("name", NAMES)
def test_nan_stays_in_its_row(name: str) -> None:
    logits = torch.tensor([[0.0, math.nan, 1.0, 2.0], [0.0, 3.0, 1.0, 2.0]], requires_grad=True)
    x = sample_khot(logits, 2, estimator=name, generator=generator())
    assert x[0].isnan().all() and (x[1].sum() == 2 or name == "ncpss")
    (grad,) = torch.autograd.grad((x[1] * torch.arange(4)).sum(), logits)
    assert grad[1].isfinite().all() and grad[1].abs().sum() > 0


def test_every_public_estimator_is_tested_here() -> None:
    others = {"EstimatorName", "reinmax", "sample_khot", "score_function"}
    assert set(estimators.__all__) == {*NAMES, *others}
    with pytest.raises(ValueError, match=", ".join(map(repr, NAMES))):
        sample_khot(THETA, 2, estimator="reinforce")


# ---------------------------------------------------------------------------------------- straight_through


@pytest.mark.parametrize("design", [name for name, d in sampling.designs.items() if d.fixed_size])
def test_straight_through_draws_the_design_and_has_the_gradient_of_its_probabilities(design: str) -> None:
    logits = torch.randn(6, 7, dtype=torch.float64, generator=generator(), requires_grad=True)
    k = torch.full((6,), 3.0, dtype=torch.float64, requires_grad=True)
    v = torch.randn(6, 7, dtype=torch.float64, generator=generator(1))
    x = sample_khot(logits, k, design=design, generator=generator(2))
    probs = khot.sigmoid_topk(logits, k)
    assert torch.equal(x, sampling.sample(probs.detach(), design, generator=generator(2)))
    for got, expected in zip(
        torch.autograd.grad((x * v).sum(), (logits, k)),
        torch.autograd.grad((probs * v).sum(), (logits, k)),
        strict=True,
    ):
        assert torch.equal(got, expected)


# -------------------------------------------------------------------------------------------- second_order


# F and F⁻¹ of torch and scipy alone
BY_HAND: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "logistic": (torch.sigmoid, torch.logit),
    "normal": (torch.special.ndtr, torch.special.ndtri),
    "laplace": (
        lambda z: torch.where(z < 0, z.clamp(max=0).exp() / 2, 1 - (-z.clamp(min=0)).exp() / 2),
        lambda y: torch.where(y < 0.5, (2 * y.clamp(max=0.5)).log(), -(2 - 2 * y.clamp(min=0.5)).log()),
    ),
}


def algorithm_5(x: Tensor, theta: Tensor, k: float | None, tau: float, cdf: str) -> Tensor:
    """Lines 1, 3, 4 and 5 as they stand, for a given sample x."""
    F, inverse = BY_HAND[cdf]

    def project(z: Tensor) -> Tensor:
        return F(z) if k is None else khot.soft_topk(z, k, cdf=cdf)  # type: ignore[arg-type]

    pi_0 = project(theta)
    pi_1 = (x + project(theta / tau)) / 2
    pi_1 = project((inverse(pi_1) - theta).detach() + theta)
    return 2 * pi_1 - pi_0 / 2


@pytest.mark.parametrize("cdf", BY_HAND)
@pytest.mark.parametrize("tau", [1.0, 0.3])
@pytest.mark.parametrize("k", [3, 2.6, None])
def test_second_order_is_algorithm_5(k: float | None, tau: float, cdf: str) -> None:
    theta = torch.randn(40, 7, dtype=torch.float64, generator=generator(), requires_grad=True)
    v = torch.randn(40, 7, dtype=torch.float64, generator=generator(1))
    x = sample_khot(theta, k, estimator="second_order", tau=tau, cdf=cdf, generator=generator(2))
    (got,) = torch.autograd.grad((x * v).sum(), theta)
    (expected,) = torch.autograd.grad((algorithm_5(x.detach(), theta, k, tau, cdf) * v).sum(), theta)
    torch.testing.assert_close(got, expected, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("cdf", [*BY_HAND, "uniform", khot.cdfs.Power(1.5)])
@pytest.mark.parametrize("k", [3, 2.6, None])
def test_any_cdf_gives_the_probabilities_and_their_gradient(k: float | None, cdf: Any) -> None:
    logits = torch.randn(6, 7, dtype=torch.float64, generator=generator(), requires_grad=True)
    v = torch.randn(6, 7, dtype=torch.float64, generator=generator(1))
    F = khot.cdfs.resolve(cdf)
    probs = F.cdf(logits) if k is None else khot.soft_topk(logits, k, cdf=cdf)
    (expected,) = torch.autograd.grad((probs * v).sum(), logits, retain_graph=True)
    for name in LEARN_SIZE:
        x = sample_khot(logits, k, estimator=name, cdf=cdf, generator=generator(2))
        assert torch.equal(x, sampling.sample(probs.detach(), generator=generator(2)))
        (got,) = torch.autograd.grad((x * v).sum(), logits)
        assert got.isfinite().all()
        if name == "straight_through":
            assert torch.equal(got, expected)
    if k is None:
        return
    relaxed = [
        sample_khot(logits, k, estimator="gumbel", tau=0.7, cdf=cdf, hard=hard, generator=generator(3))
        for hard in (False, True)
    ]
    noisy = logits.detach() + gumbel_noise(logits, generator=generator(3))
    torch.testing.assert_close(relaxed[0].detach(), khot.soft_topk(noisy, k, tau=0.7, cdf=cdf))
    assert torch.equal(relaxed[1], khot.topk_mask(relaxed[0], k))
    grads = [torch.autograd.grad((x * v).sum(), logits)[0] for x in relaxed]
    torch.testing.assert_close(*grads)


# ------------------------------------------------------------------------------------------------- reinmax


@pytest.mark.parametrize("tau", [1.0, 0.3])
def test_reinmax_is_algorithm_4(tau: float) -> None:
    theta = torch.randn(40, 5, dtype=torch.float64, generator=generator(), requires_grad=True)
    v = torch.randn(40, 5, dtype=torch.float64, generator=generator(1))
    x = estimators.reinmax(theta, tau=tau, generator=generator(2))
    assert (x.sum(-1) == 1).all() and ((x == 0) | (x == 1)).all()
    pi_1 = (x.detach() + (theta / tau).softmax(-1)) / 2
    pi_1 = ((pi_1.log() - theta).detach() + theta).softmax(-1)
    expected = 2 * pi_1 - theta.softmax(-1) / 2
    for a, b in zip(
        torch.autograd.grad((x * v).sum(), theta),
        torch.autograd.grad((expected * v).sum(), theta),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_reinmax_draws_the_softmax() -> None:
    theta = torch.tensor([0.5, -0.2, 0.9], dtype=torch.float64)
    x = estimators.reinmax(theta.expand(100_000, -1), generator=generator(4))
    assert_mean(x, theta.softmax(-1))


def test_reinmax_with_infinite_logits_nan_and_dims() -> None:
    inf, nan = math.inf, math.nan
    logits = torch.tensor([[0.3, -inf, 0.1], [inf, 2.0, -inf], [nan, 0.0, 1.0]], requires_grad=True)
    x = estimators.reinmax(logits, generator=generator())
    assert x[0, 1] == 0 and x[0].sum() == 1 and x[1].tolist() == [1, 0, 0] and x[2].isnan().all()
    (grad,) = torch.autograd.grad((x[:2] * torch.arange(6.0).view(2, 3)).sum(), logits)
    assert grad[:2].isfinite().all() and (grad[1] == 0).all() and grad[0, 1] == 0
    half = torch.randn(4, 6, dtype=torch.bfloat16, requires_grad=True)
    y = estimators.reinmax(half, 0)
    assert y.dtype == torch.bfloat16 and (y.sum(0) == 1).all()


def test_second_order_has_no_gradient_in_k() -> None:
    with pytest.raises(ValueError, match="k must not require a gradient"):
        estimators.second_order(THETA, torch.tensor(2.0, requires_grad=True))


# ------------------------------------------------------------------------------------------ gumbel and imle


def test_gumbel_relaxed_has_the_exact_gradient() -> None:
    theta = torch.randn(3, 6, dtype=torch.float64, generator=generator(), requires_grad=True)
    k = torch.tensor([2.0, 2.5, 4.0], dtype=torch.float64, requires_grad=True)
    tau = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64, requires_grad=True)

    def relaxed(theta: Tensor, k: Tensor, tau: Tensor) -> Tensor:
        return sample_khot(theta, k, estimator="gumbel", tau=tau, hard=False, generator=generator())

    y = relaxed(theta, k, tau)
    assert ((y > 0) & (y < 1)).all()
    torch.testing.assert_close(y.sum(-1), k, rtol=0, atol=1e-12)
    assert torch.autograd.gradcheck(relaxed, (theta, k, tau))


@pytest.mark.parametrize(
    "name, tau", [("gumbel", 1.0), ("imle", 1.0), ("imle", 0.5), ("sequential_softmax", 1.0)]
)
def test_draws_without_replacement(name: str, tau: float) -> None:
    """The temperature of imle scales the noise."""
    x = sample_khot(THETA.expand(50_000, -1), 2, estimator=name, tau=tau, generator=generator())
    assert_frequencies(x.detach(), *gumbel_probs(THETA / tau, 2))


def test_imle_is_a_difference_quotient_of_the_mean() -> None:
    v = torch.tensor([0.3, -1.0, 2.0, 0.7], dtype=torch.float64)
    got = sampled_gradients(
        lambda rows: estimators.imle(rows, 2, step=0.5, generator=generator()), THETA, 50_000, lambda x: x @ v
    )
    x, here = gumbel_probs(THETA, 2)
    _, there = gumbel_probs(THETA - 0.5 * v, 2)
    assert_mean(got, (here - there) @ x / 0.5)


# -------------------------------------------------------------------------------------------------- simple


def test_simple_draws_conditional_poisson_and_has_the_gradient_of_its_marginals() -> None:
    theta = THETA.clone().requires_grad_()
    x, probs = poisson_probs(theta, 2)
    v = torch.tensor([0.3, -1.0, 2.0, 0.7], dtype=torch.float64)
    (expected,) = torch.autograd.grad(probs @ x @ v, theta)
    draw = sample_khot(theta.expand(50_000, -1), 2, estimator="simple", generator=generator())
    assert_frequencies(draw.detach(), x, probs)
    (got,) = torch.autograd.grad(draw[0] @ v, theta)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    same = {"design": "conditional_poisson", "generator": generator()}
    named = sample_khot(theta.expand(50_000, -1), 2, estimator="simple", **same)
    assert torch.equal(draw, named)


# ------------------------------------------------------------------------------------------ size is learned


@pytest.mark.parametrize("name", LEARN_SIZE)
def test_learned_size(name: str) -> None:
    logits = torch.tensor([1.0, -0.5, 0.3, -2.0, 0.1], dtype=torch.float64)
    probs = torch.sigmoid(logits)
    x = sample_khot(logits.expand(50_000, -1), estimator=name, design="pivotal", generator=generator())
    assert_mean(x, probs)
    size = probs.sum().item()
    assert set(x.sum(-1).unique().tolist()) == {math.floor(size), math.ceil(size)}


def test_size_penalty() -> None:
    probs = torch.rand(3, 4, dtype=torch.float64, generator=generator(), requires_grad=True)
    weight = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64, requires_grad=True)
    expected = sum(w * sum(row) for w, row in zip(weight.tolist(), probs.tolist(), strict=True)) / 3
    assert losses.size_penalty(probs, weight).item() == pytest.approx(expected, rel=1e-14)
    assert torch.autograd.gradcheck(losses.size_penalty, (probs, weight))
    assert losses.size_penalty(torch.ones(3, dtype=torch.bfloat16), 0.5).dtype == torch.bfloat16
    many = torch.ones(100_000, dtype=torch.float16)  # more than float16 counts, at less than it can say
    assert losses.size_penalty(many, 1e-8).item() == pytest.approx(1e-3, rel=1e-3)


# ------------------------------------------------------------------------------------------ score_function


@pytest.mark.parametrize("baseline", [None, "leave_one_out"])
def test_score_function_is_unbiased(baseline: str | None) -> None:
    """Exactly: the mean of its gradient over all pairs of samples, also in what the loss depends on."""
    theta = THETA.clone().requires_grad_()
    scale = torch.tensor(1.7, dtype=torch.float64, requires_grad=True)
    x, probs = poisson_probs(theta, 2)
    expected = torch.autograd.grad(scale * (probs @ loss(x)), (theta, scale))
    log_prob = conditional_poisson.log_prob(x, theta, 2)
    pairs = torch.cartesian_prod(torch.arange(len(x)), torch.arange(len(x))).T  # (2 samples, batch)
    surrogate = estimators.score_function(scale * loss(x)[pairs], log_prob[pairs], baseline)
    assert torch.equal(surrogate, scale * loss(x)[pairs])
    weight = probs.detach()[pairs].prod(0)
    got = torch.autograd.grad(weight @ surrogate.mean(0), (theta, scale))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("design", ["conditional_poisson", "sampford"])
def test_the_score_of_the_product_of_inclusion_probabilities(design: str) -> None:
    """Its gradient is f(x)(x − π), the sample by sample, and so its mean is Cov(f, x), by enumeration."""
    theta = THETA.clone().requires_grad_()
    y = subsets(4, 2)
    probs = khot.sigmoid_topk(theta, 2)
    law = distributions.KHot(2, logits=theta, design=design).log_prob(y).exp().detach()
    product = sampling.designs["poisson"].log_prob
    assert product is not None
    torch.testing.assert_close(
        product(y, probs), (y * probs.log() + (1 - y) * (1 - probs).log()).sum(-1), rtol=1e-13, atol=0
    )
    for f in (loss(y), torch.ones(len(y), dtype=torch.float64)):
        surrogate = estimators.score_function(f, product(y, probs))
        (got,) = torch.autograd.grad(law @ surrogate, theta, retain_graph=True)
        centred = f - law @ f
        torch.testing.assert_close(got, (law * centred) @ y, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("design", ["poisson", "iterative_poisson"])
@pytest.mark.parametrize("name", LEARN_SIZE)
def test_designs_of_random_size_serve_only_where_the_size_is_learned(name: str, design: str) -> None:
    with pytest.raises(ValueError, match=f"design must be one of fixed size .* but got '{design}'"):
        sample_khot(THETA, 2, estimator=name, design=design)
    x = sample_khot(THETA.expand(20_000, -1), estimator=name, design=design, generator=generator())
    assert ((x == 0) | (x == 1)).all() and len(x.sum(-1).unique()) > 2
    if design == "poisson":
        assert_mean(x, torch.sigmoid(THETA))


# ------------------------------------------------------------------------------------------------- masks

# what lies under False, and where
HIDDEN = torch.tensor([math.nan, math.inf, -math.inf], dtype=torch.float64)
PLACES = torch.tensor([1, 2, 4, 6])  # of THETA among 7 entries
ALLOWED = torch.zeros(7, dtype=torch.bool).index_fill(0, PLACES, True)


def hidden(theta: Tensor) -> Tensor:
    """Rows of 7 entries with theta, (..., 4), where they may be drawn."""
    rows = torch.empty(*theta.shape[:-1], 7, dtype=theta.dtype)
    rows[..., PLACES] = theta
    rows[..., ~ALLOWED] = HIDDEN.to(theta.dtype)
    return rows


MASKED = [
    *[(name, {"k": 2}) for name in NAMES],
    *[(name, {"k": None}) for name in LEARN_SIZE],
    *[("gumbel", {"k": k, "hard": False}) for k in (2, 1.5)],
    ("sequential_softmax", {"k": 2, "hard": False}),
    ("straight_through", {"k": 2, "cdf": "normal"}),
    ("second_order", {"k": 2, "tau": 0.5, "cdf": "uniform"}),
]


@pytest.mark.parametrize("name, options", MASKED, ids=str)
def test_a_masked_row_is_the_row_without_these_entries(name: str, options: dict[str, Any]) -> None:
    """Its samples and their gradients have the same means, and the others get 0."""
    if name in LEARN_SIZE:
        options = {**options, "design": "pivotal"}
    samples = 10_000
    rows = hidden(THETA.expand(samples, 4)).requires_grad_()
    x = sample_khot(rows, estimator=name, mask=ALLOWED, generator=generator(), **options)
    assert (x[:, ~ALLOWED] == 0).all()
    if name in SIZED and options["k"] is not None:
        torch.testing.assert_close(x.sum(-1), torch.full_like(x[:, 0], options["k"]))
    (grad,) = torch.autograd.grad(loss(x[:, PLACES]).sum(), rows)
    assert (grad[:, ~ALLOWED] == 0).all() and grad.isfinite().all()
    few = THETA.expand(samples, 4).clone().requires_grad_()
    y = sample_khot(few, estimator=name, generator=generator(1), **options)
    (expected,) = torch.autograd.grad(loss(y).sum(), few)
    assert_mean((x[:, PLACES] - y).detach(), torch.zeros(4, dtype=torch.float64))
    assert_mean(grad[:, PLACES] - expected, torch.zeros(4, dtype=torch.float64))


@pytest.mark.parametrize("design", sampling.designs)
@pytest.mark.parametrize("k", [2, None])
def test_masks_with_every_design(design: Any, k: int | None) -> None:
    if k is not None and not sampling.designs[design].fixed_size:
        return
    rows = hidden(THETA.expand(500, 4))
    x = sample_khot(rows, k, design=design, mask=ALLOWED, generator=generator())
    assert (x[:, ~ALLOWED] == 0).all() and ((x == 0) | (x == 1)).all()
    assert k is None or (x.sum(-1) == k).all()
    probs = torch.sigmoid(THETA) if k is None else khot.sigmoid_topk(THETA, k)
    if sampling.designs[design].exact:
        assert_mean(x[:, PLACES], probs)


@pytest.mark.parametrize("name", NAMES)
def test_a_mask_along_any_dim(name: str) -> None:
    logits = torch.randn(5, 3, 4, generator=generator()).half()
    mask = torch.tensor([True, False, True, True, True]).view(5, 1, 1)
    k = torch.tensor([[1, 2, 3, 4]]).expand(3, 4)
    logits[1] = math.nan
    x = sample_khot(logits, k, 0, estimator=name, mask=mask, generator=generator())
    assert x.shape == logits.shape and x.dtype == torch.half and (x[1] == 0).all()
    assert name == "ncpss" or (x.sum(0) == k).all()
    same = sample_khot(logits.movedim(0, -1), k, estimator=name, mask=mask.view(5), generator=generator())
    assert torch.equal(same.movedim(-1, 0), x)
    one = sample_khot(torch.tensor(0.3), 0, estimator=name, mask=torch.tensor(False))
    assert one.shape == () and one == 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("k", [5, torch.tensor(5), torch.tensor([2, 5])], ids=str)
def test_a_size_above_what_may_be_drawn(name: str, k: Any) -> None:
    rows = hidden(THETA.expand(2, 4))
    for options in ({}, {"hard": False}) if "softmax" in name or name == "gumbel" else ({},):
        with pytest.raises(ValueError, match=r"^k must lie in .* but got 5 for a row with 4"):
            sample_khot(rows, k, estimator=name, mask=ALLOWED, **options)


def test_masks_in_a_trace_and_under_vmap() -> None:
    torch._dynamo.reset()
    rows = hidden(THETA.expand(3, 4))
    masks = torch.stack([ALLOWED, ALLOWED & (torch.arange(7) != 1), ALLOWED])

    def draw(rows: Tensor, mask: Tensor) -> Tensor:
        return sample_khot(rows, 2, mask=mask)

    compiled = torch.compile(draw, fullgraph=True, backend="aot_eager")
    for x in (compiled(rows, masks), torch.func.vmap(draw, randomness="different")(rows, masks)):
        assert (x[~masks] == 0).all() and (x.sum(-1) == 2).all()


def test_score_function_refuses() -> None:
    with pytest.raises(ValueError, match=r"log_prob must have the loss's shape \(3,\), but got \(3, 1\)"):
        estimators.score_function(torch.ones(3), torch.ones(3, 1))
    for one in (torch.ones(1), torch.ones(())):
        with pytest.raises(ValueError, match="at least 2 samples"):
            estimators.score_function(one, one, "leave_one_out")


# ----------------------------------------------------------------------------- sequential_softmax and ncpss


def one_after_the_other(alpha: Tensor, k: int, tau: float) -> Tensor:
    """Xie and Ermon's relaxation: the mean of each draw, whose share the next one can no longer have."""
    left, y = torch.ones_like(alpha), torch.zeros_like(alpha)
    for _ in range(k):
        p = left * (alpha / tau).exp()
        p = p / p.sum(-1, keepdim=True)
        left, y = left * (1 - p) ** (1 / tau), y + p
    return y


@pytest.mark.parametrize("tau", [1.0, 0.4])
def test_sequential_softmax_is_the_relaxation_of_the_perturbed_logits(tau: float) -> None:
    theta = torch.randn(40, 6, dtype=torch.float64, generator=generator(), requires_grad=True)
    v = torch.randn(40, 6, dtype=torch.float64, generator=generator(1))
    noisy = theta + gumbel_noise(theta, generator=generator(2))
    relaxed = one_after_the_other(noisy, 3, tau)
    (expected,) = torch.autograd.grad((relaxed * v).sum(), theta)
    for hard in (True, False):
        x = sample_khot(theta, 3, estimator="sequential_softmax", tau=tau, hard=hard, generator=generator(2))
        places = noisy.argsort(-1, descending=True).argsort(-1)
        torch.testing.assert_close(x.detach(), (places < 3).double() if hard else relaxed.detach())
        torch.testing.assert_close(torch.autograd.grad((x * v).sum(), theta)[0], expected)


def scaled(p: list[float], size: float) -> list[float]:
    """NCPSS: numbers in [0, 1], scaled linearly to a sum, from 0 or from 1."""
    total = sum(p)
    if total >= size:
        return [q * size / total for q in p]
    return [1 - (1 - q) * (len(p) - size) / (len(p) - total) for q in p]


@pytest.mark.parametrize(("k", "rounds"), [(1, 3), (2, 0), (2, 1), (3, 3)])
def test_ncpss_is_iterative_poisson_sampling_with_the_gradient_of_its_probabilities(
    k: int, rounds: int
) -> None:
    theta = THETA.expand(20_000, -1).clone().requires_grad_()
    x = estimators.ncpss(theta, k, tau=0.8, rounds=rounds, generator=generator())
    probs = scaled((THETA / 0.8).sigmoid().tolist(), k)
    law = iterative_poisson_law(probs, k, rounds)
    likely = law > 1e-3
    assert law[likely].sum() > 0.99
    assert_frequencies(x.detach(), vectors(4)[likely], law[likely])
    v = torch.tensor([0.7, -0.3, 1.1, 0.2]).double()
    (got,) = torch.autograd.grad((x * v).sum(), theta)
    theta = THETA.clone().requires_grad_()
    s = (theta / 0.8).sigmoid()
    relaxed = s * k / s.sum() if s.sum() >= k else 1 - (1 - s) * (4 - k) / (4 - s.sum())
    (expected,) = torch.autograd.grad((relaxed * v).sum(), theta)
    torch.testing.assert_close(got, expected.expand(20_000, -1))


def test_ncpss_ends_and_how_close_it_comes() -> None:
    logits = torch.tensor([40.0, -math.inf, 0, 0, 0, 0]).expand(2000, -1).clone().requires_grad_()
    x = estimators.ncpss(logits, 3, generator=generator())
    first = estimators.ncpss(logits, 3, rounds=0, generator=generator())
    assert (x[:, 1] == 0).all() and (first[:, 0] == 1).all() and (x[:, 0] == 1).double().mean() > 0.9
    hits = [(y.sum(-1) == 3).double().mean() for y in (first, x)]
    assert hits[0] < 0.5 < 0.8 < hits[1]
    assert torch.autograd.grad(x.sum(), logits)[0].isfinite().all()
    assert not estimators.ncpss(logits, 0).any() and estimators.ncpss(logits[:, 2:], 4).all()


# ----------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("option", ["design", "tau", "cdf", "hard", "k=None"])
def test_options_go_with_the_estimators_that_take_them(name: str, option: str) -> None:
    takes = {
        "design": ("straight_through", "second_order"),
        "tau": ("second_order", "gumbel", "imle", "sequential_softmax", "ncpss"),
        "cdf": ("straight_through", "second_order", "gumbel"),
        "hard": ("gumbel", "sequential_softmax"),
        "k=None": LEARN_SIZE,
    }
    given = {"design": "systematic", "tau": 0.5, "cdf": "normal", "hard": False, "k=None": None}
    argument = option.removesuffix("=None")
    options = {"k": 2, argument: given[option]}
    if name in takes[option]:
        x = sample_khot(THETA, estimator=name, **options)
        assert x.shape == THETA.shape
    else:
        message = f"{argument} has no effect with estimator '{name}'; it is used by "
        users = {
            "design": "straight_through and second_order",
            "tau": "second_order, gumbel, imle, sequential_softmax and ncpss",
            "cdf": "straight_through, second_order and gumbel",
        }
        if option == "k=None":
            message = f"k must be a number or tensor for estimator '{name}', but got None"
        elif (name, option) == ("simple", "design"):
            message = (
                "design must be None or 'conditional_poisson' for estimator 'simple', but got 'systematic'"
            )
        else:
            message += users.get(option, "gumbel and sequential_softmax")
        with pytest.raises(ValueError, match=rf"^{re.escape(message)}$"):
            sample_khot(THETA, estimator=name, **options)


@pytest.mark.parametrize("name", ["simple", "sequential_softmax", "ncpss"])
def test_sizes_that_are_no_integers(name: str) -> None:
    with pytest.raises(ValueError, match=r"^k must be an integer"):
        sample_khot(THETA, 2.5, estimator=name)
