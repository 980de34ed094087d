"""The distributions against enumeration of their support, in torch.distributions' own terms.

Statistical tests fix their seed; each would fail for 1 seed in 10⁶ if the claim is true.
"""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import mpmath
import pytest
import torch
from mpmath import mp
from torch import Tensor
from torch.distributions import Distribution, Independent, kl_divergence

import khot
from khot import distributions, sampling
from khot.distributions import (
    ConditionalPoisson,
    KHot,
    KHotStraightThrough,
    LogitRelaxedKHot,
    RelaxedKHot,
)
from khot.sampling._noise import gumbel_noise
from subsets import assert_mean, calibrated, order_law, softmax_law, subsets

F64 = torch.float64
ONE = torch.tensor([0.9, -0.4, 0.1, -1.3, 0.0], dtype=F64)
BATCH = torch.randn(3, 2, 6, dtype=F64, generator=torch.Generator().manual_seed(0))
PROBS = khot.sigmoid_topk(BATCH, 3)
K = torch.tensor([[1], [2], [4]])
TRACTABLE = ("pareto", "conditional_poisson", "adjusted_conditional_poisson", "sampford")
CLOSE = [name for name, d in sampling.designs.items() if d.fixed_size and d.close]
MODES = ("pareto", "conditional_poisson", "sampford")


@pytest.fixture(autouse=True)
def validation() -> Iterator[None]:
    """Validation is on, as in torch until something is compiled; after that it is off for the whole
    process."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(True)
    yield
    Distribution.set_default_validate_args(before)


# Every public class, and the arguments that its examples are made of.
EXAMPLES: dict[type[Distribution], list[dict[str, Any]]] = {
    cls: [
        {"k": 2, "logits": ONE},
        {"k": 3, "probs": PROBS, "design": "systematic"},
        {"k": K, "logits": BATCH, "design": "conditional_poisson"},
        {"k": K, "logits": ONE, "design": "sampford"},
        {"k": 3, "probs": PROBS, "design": "pivotal"},
    ]
    for cls in (KHot, KHotStraightThrough)
}
EXAMPLES[ConditionalPoisson] = [
    {"k": 2, "logits": ONE},
    {"k": K, "logits": BATCH},
    {"k": 3, "logits": BATCH},
]
EXAMPLES |= {
    cls: [
        {"temperature": 0.5, "k": 2, "logits": ONE},
        {"temperature": torch.tensor([0.5, 1.0], dtype=F64), "k": K, "logits": BATCH},
    ]
    for cls in (RelaxedKHot, LogitRelaxedKHot)
}
CASES = [
    pytest.param(cls, arguments, id=f"{cls.__name__}-{i}")
    for cls, examples in EXAMPLES.items()
    for i, arguments in enumerate(examples)
]
RELAXED = (RelaxedKHot, LogitRelaxedKHot)
DISCRETE = [case for case in CASES if case.values[0] not in RELAXED]


def batch_shape(arguments: dict[str, Any]) -> torch.Size:
    vector = arguments.get("logits", arguments.get("probs"))
    scalars = [arguments[name] for name in ("k", "temperature") if isinstance(arguments.get(name), Tensor)]
    return torch.broadcast_shapes(vector.shape[:-1], *(s.shape for s in scalars))


def has_log_prob(p: Distribution) -> bool:
    return not isinstance(p, KHot) or p.design in TRACTABLE


def test_every_public_class_has_an_example() -> None:
    public = [getattr(distributions, name) for name in distributions.__all__]
    # whose samples are indices: test_plackett_luce.py
    elsewhere = {distributions.PlackettLuce}
    assert {cls for cls in public if issubclass(cls, Distribution)} - elsewhere == set(EXAMPLES)


# ---------------------------------------------------------------------------------------- what torch expects


@pytest.mark.parametrize("cls, arguments", CASES)
def test_shapes_and_support(cls: type[Distribution], arguments: dict[str, Any]) -> None:
    p = cls(**arguments)
    vector = arguments.get("logits", arguments.get("probs"))
    assert p.batch_shape == batch_shape(arguments)
    assert p.event_shape == vector.shape[-1:]
    assert p.support.event_dim == 1 and p.support.is_discrete == p.has_enumerate_support
    for shape in ((), (4,), (2, 3), (0,)):
        draws = [p.sample(shape)] + ([p.rsample(shape)] if p.has_rsample else [])
        for x in draws:
            assert x.shape == shape + p.batch_shape + p.event_shape
            assert x.dtype == vector.dtype
            assert p.support.check(x).all()
        assert not draws[0].requires_grad
        if has_log_prob(p):
            log_prob = p.log_prob(draws[0])
            assert log_prob.shape == shape + p.batch_shape and log_prob.dtype == vector.dtype
            assert log_prob.isfinite().all()
            if draws[0].numel():  # where there is nothing, torch's Independent fails on its own
                event = Independent(p, len(p.batch_shape))
                assert event.log_prob(draws[0]).shape == shape
    if not p.has_rsample:
        with pytest.raises(NotImplementedError):
            p.rsample()


@pytest.mark.parametrize("cls, arguments", CASES)
def test_expand(cls: type[Distribution], arguments: dict[str, Any]) -> None:
    p = cls(**arguments)
    shape = (4, *p.batch_shape)
    for wide in (p.expand(shape), p.expand(torch.Size(shape)).expand((2, *shape)).expand((2, *shape))):
        assert type(wide) is cls and repr(wide).startswith(cls.__name__)
        assert wide.event_shape == p.event_shape and wide.batch_shape[-len(shape) :] == shape
        for name in ("k", "temperature"):
            assert not hasattr(p, name) or getattr(wide, name).shape == wide.batch_shape
        x = wide.sample((2,))
        assert x.shape == (2, *wide.batch_shape, *p.event_shape)
        assert not torch.equal(x[0], x[1]) or not torch.equal(x[:, 0], x[:, 1])  # independent draws
        if has_log_prob(p):
            torch.testing.assert_close(wide.log_prob(x), p.log_prob(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cls, arguments", CASES)
def test_seed_repr_and_pickle(cls: type[Distribution], arguments: dict[str, Any]) -> None:
    p = cls(**arguments)
    assert repr(p).startswith(f"{cls.__name__}(") and "k: " in repr(p)
    again = pickle.loads(pickle.dumps(p))
    draws = []
    for q in (p, again):
        torch.manual_seed(1)
        draws.append(q.sample((5,)))
    assert torch.equal(*draws)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("design", CLOSE)
def test_dtypes(design: str, dtype: torch.dtype) -> None:
    logits = torch.randn(2, 200, generator=torch.Generator().manual_seed(0)).to(dtype)
    for p in (
        KHot(50, logits=logits, design=design),
        KHot(50, probs=khot.sigmoid_topk(logits, 50), design=design),
        ConditionalPoisson(50, logits),
        RelaxedKHot(0.5, 50, logits),
        LogitRelaxedKHot(0.5, 50, logits),
    ):
        x = p.sample((3,))
        assert x.dtype == dtype and p.support.check(x).all()
        if has_log_prob(p):
            assert p.log_prob(x).dtype == dtype


# ------------------------------------------------------------------------------------------- by enumeration


@pytest.mark.parametrize("cls, arguments", DISCRETE)
def test_enumerate_support(cls: type[Distribution], arguments: dict[str, Any]) -> None:
    if isinstance(arguments["k"], Tensor):
        with pytest.raises(NotImplementedError, match="same k"):
            cls(**arguments).enumerate_support()
        return
    p = cls(**arguments)
    n, k = p.event_shape[0], arguments["k"]
    x = p.enumerate_support()
    assert x.shape == (math.comb(n, k), *p.batch_shape, n) and x.dtype == F64
    assert p.support.check(x).all()
    narrow = p.enumerate_support(expand=False)
    assert narrow.shape == (math.comb(n, k), *(1,) * len(p.batch_shape), n)
    assert torch.equal(narrow.expand_as(x), x)
    rows = {tuple(row) for row in narrow.reshape(-1, n).tolist()}
    assert rows == {v for v in itertools.product((0.0, 1.0), repeat=n) if sum(v) == k}


def oracle(logits: Tensor, k: int, design: str) -> tuple[Tensor, Tensor]:
    """All k-hot vectors and their probabilities, from the definitions; for one row."""
    x = subsets(len(logits), k)
    if design == "natural":
        return x, softmax_law(logits, x)
    pi = khot.sigmoid_topk(logits, k)
    if design == "sampford":
        weight = (x * (1 - pi)).sum(-1) * torch.exp(x @ torch.logit(pi))
        return x, weight / weight.sum()
    law = order_law if design == "pareto" else softmax_law
    return x, law(calibrated(law, pi, x), x)


def make(logits: Tensor, k: int, design: str) -> Distribution:
    if design == "natural":
        return ConditionalPoisson(k, logits)
    return KHot(k, logits=logits, design=design)


@pytest.mark.parametrize("scale", [0.3, 2.0])
@pytest.mark.parametrize("n, k", [(2, 1), (4, 2), (6, 1), (6, 3), (6, 5)])
@pytest.mark.parametrize("design", ["natural", *TRACTABLE])
def test_against_enumeration(design: str, n: int, k: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(n + k)
    logits = (scale * torch.randn(n, dtype=F64, generator=generator)).requires_grad_()
    p = make(logits, k, design)
    x, probs = oracle(logits, k, design)
    expected = {
        "log_prob": probs.log(),
        "mean": probs @ x,
        "variance": probs @ x**2 - (probs @ x) ** 2,
    }
    got = {"log_prob": p.log_prob(x), "mean": p.mean, "variance": p.variance}
    if design in ("natural", "conditional_poisson"):
        expected["entropy"] = -(probs * probs.log()).sum()
        got["entropy"] = p.entropy()
    if design in ("natural", *MODES):
        assert torch.equal(p.mode, x[probs.argmax()])
    weight = torch.randn(max(len(x), n), dtype=F64, generator=generator)
    # pareto's calibration stops at errors of 1e-8 of the probabilities
    tolerance = 1e-8 / probs.min().item() if design == "pareto" else 1e-10
    for name, value in got.items():
        torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=tolerance)
        v = weight[: len(value)] if value.dim() else weight[0]
        grads = [
            torch.autograd.grad((v * y).sum(), logits, retain_graph=True)[0] for y in (value, expected[name])
        ]
        torch.testing.assert_close(*grads, rtol=1e2 * tolerance, atol=1e2 * tolerance)


@pytest.mark.parametrize("q_design", ["natural", "conditional_poisson"])
@pytest.mark.parametrize("p_design", ["natural", "conditional_poisson"])
def test_kl(p_design: str, q_design: str) -> None:
    a, b = ONE.clone().requires_grad_(), ONE.flip(0).mul(2).requires_grad_()
    _, p = oracle(a, 2, p_design)
    _, q = oracle(b, 2, q_design)
    expected = (p * (p / q).log()).sum()
    got = kl_divergence(make(a, 2, p_design), make(b, 2, q_design))
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    for one, other in zip(*(torch.autograd.grad(y, (a, b)) for y in (got, expected)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)
    assert kl_divergence(make(a, 2, p_design), make(b, 3, q_design)) == math.inf


def test_kl_of_batches() -> None:
    p, q = ConditionalPoisson(K, BATCH), ConditionalPoisson(2, ONE.new_zeros(6))
    value = kl_divergence(p, q)
    assert value.shape == (3, 2)
    assert (value[1] > 0).all() and (value[[0, 2]] == math.inf).all()
    straight = KHotStraightThrough(2, logits=BATCH, design="conditional_poisson")
    assert torch.equal(kl_divergence(straight, straight), torch.zeros(3, 2, dtype=F64))


@pytest.mark.parametrize("design", sorted(set(sampling.designs) - set(CLOSE)))
def test_designs_of_random_size_or_other_probabilities_are_refused(design: str) -> None:
    for cls in (KHot, KHotStraightThrough):
        with pytest.raises(
            ValueError, match=rf"design must be one of fixed size .*'pareto', .* got '{design}'"
        ):
            cls(2, logits=ONE, design=design)


@pytest.mark.parametrize("k", [0, 5])
def test_ends_of_k(k: int) -> None:
    for p in (ConditionalPoisson(k, ONE), *(KHot(k, logits=ONE, design=d) for d in CLOSE)):
        x = p.sample((3,))
        assert torch.equal(x, torch.full((3, 5), float(k == 5), dtype=F64))
        assert torch.equal(p.mean, x[0]) and (p.variance == 0).all()
        assert torch.equal(p.enumerate_support(), x[:1])
        if has_log_prob(p):
            torch.testing.assert_close(p.log_prob(x), x.new_zeros(3), rtol=0, atol=1e-12)
    assert ConditionalPoisson(k, ONE).entropy().abs() <= 1e-12
    relaxed, logit = RelaxedKHot(0.5, k, ONE), LogitRelaxedKHot(0.5, k, ONE)
    assert torch.equal(relaxed.rsample(), x[0])
    assert relaxed.log_prob(x).isnan().all() and relaxed.log_prob(relaxed.sample()).isnan()
    assert torch.equal(logit.rsample().sigmoid(), x[0])
    assert logit.log_prob(logit.sample()).isnan()


# ---------------------------------------------------------------------------------------------------- draws


@pytest.mark.parametrize("design", ["natural", *TRACTABLE])
def test_draws_have_the_probabilities_of_log_prob(design: str) -> None:
    torch.manual_seed(0)
    p = make(ONE, 2, design)
    x = p.enumerate_support()
    draws = p.sample((40_000,))
    assert_mean((draws.unsqueeze(-2) == x).all(-1).to(F64), p.log_prob(x).exp())


def test_straight_through_carries_the_gradient_of_the_probabilities() -> None:
    logits = BATCH.clone().requires_grad_()
    p = KHotStraightThrough(3, logits=logits)
    x = p.rsample((4,))
    v = torch.randn(x.shape, dtype=F64, generator=torch.Generator().manual_seed(1))
    (got,) = torch.autograd.grad((v * x).sum(), logits)
    (expected,) = torch.autograd.grad((v.sum(0) * khot.sigmoid_topk(logits, 3)).sum(), logits)
    torch.testing.assert_close(got, expected)
    assert KHotStraightThrough.has_rsample and not KHot.has_rsample


# -------------------------------------------------------------------------------------------------- relaxed


@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_two_densities_differ_by_the_change_of_variables(k: int) -> None:
    """From y without its last entry to the differences of logit y to the last one."""
    torch.manual_seed(0)
    p, q = RelaxedKHot(0.7, k, ONE), LogitRelaxedKHot(0.7, k, ONE)
    for y in p.sample((3,)):

        def differences(free: Tensor) -> Tensor:
            return torch.logit(free) - torch.logit(k - free.sum())

        volume = torch.linalg.slogdet(torch.func.jacrev(differences)(y[:-1])).logabsdet
        torch.testing.assert_close(p.log_prob(y), q.log_prob(torch.logit(y)) + volume, rtol=0, atol=1e-10)


def exact_logits(perturbed: Tensor, k: int, tau: Any) -> list[Any]:
    """perturbed/τ less the number for which the sigmoids sum to k, with mpmath."""
    x = [mp.mpf(v) / tau for v in perturbed.tolist()]

    def total(t: Any) -> Any:
        return sum(1 / (1 + mp.exp(t - v)) for v in x) - k

    t = mpmath.findroot(total, (min(x) - 200, max(x) + 200), solver="anderson", tol=1e-40, maxsteps=1000)
    return [v - t for v in x]


def exact_log_prob(z: list[Any], tau: Any, theta: list[float]) -> Any:
    """log p of y = σ(z) by definition: the density of the noise times |∂noise/∂(y₁..y_{n−1}, shift)|,
    integrated over the shift."""
    n = len(z)
    h = [1 / ((1 + mp.exp(-v)) * (1 + mp.exp(v))) for v in z]
    jacobian = mp.zeros(n)
    for i in range(n):
        jacobian[i, n - 1] = 1
        for j in range(n - 1):
            jacobian[i, j] = (tau / h[i]) * (i == j) if i < n - 1 else -tau / h[i]
    a = [tau * v - mp.mpf(t) for v, t in zip(z, theta, strict=True)]
    # ∫ Π e^{−(a + s)} exp(−e^{−(a + s)}) ds, about its mode s = log(Σe^{−a}/n)
    mode = mp.log(sum(mp.exp(-v) for v in a) / n)

    def density(s: Any) -> Any:
        return mp.exp(sum(-(v + s) - mp.exp(-(v + s)) + (v + mode + 1) for v in a))

    integral = mp.quad(density, [mode - 8, mode - 2, mode, mode + 3, mode + 10, mode + 60])
    return mp.log(integral) - sum(v + mode + 1 for v in a) + mp.log(abs(mp.det(jacobian)))


@pytest.mark.parametrize("temperature", [0.2, 0.05])
@pytest.mark.parametrize("n, k", [(2, 1), (5, 2), (5, 4)])
def test_samples_are_judged_without_loss_in_float32(n: int, k: int, temperature: float) -> None:
    """By another distribution, too. Most entries of these samples have rounded to 0 or 1."""
    p = RelaxedKHot(temperature, k, ONE[:n].float())
    q = RelaxedKHot(2 * temperature, k, torch.zeros(n))
    torch.manual_seed(0)
    y = p.rsample((2,))
    torch.manual_seed(0)
    logit = LogitRelaxedKHot(temperature, k, p.logits).rsample((2,))
    torch.manual_seed(0)
    perturbed = p.logits + gumbel_noise(p.logits.expand(2, n))
    got = [p.log_prob(y), q.log_prob(y)]
    for i in range(2):
        with mp.workdps(30):
            z = exact_logits(perturbed[i], k, mp.mpf(p.temperature.item()))
            expected = [
                float(exact_log_prob(z, mp.mpf(d.temperature.item()), d.logits.tolist())) for d in (p, q)
            ]
        assert [v[i].item() for v in got] == pytest.approx(expected, rel=2e-7, abs=2e-6)
        torch.testing.assert_close(logit[i], torch.tensor([float(v) for v in z]), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("cls", RELAXED)
def test_the_gradient_of_an_estimated_kl_in_float32(cls: type[Distribution]) -> None:
    """At saturated samples, through the sample and through both densities: against the closed form of
    log p − log q in the noise g, of which a = τz − θ is a shift."""
    theta = torch.randn(8, 10, generator=torch.Generator().manual_seed(0)).requires_grad_()
    torch.manual_seed(0)
    p, q = cls(0.05, 3, theta), cls(0.05, 3, torch.zeros(8, 10))
    x = p.rsample((5,))
    (got,) = torch.autograd.grad((p.log_prob(x) - q.log_prob(x)).sum(), theta)
    torch.manual_seed(0)
    g = gumbel_noise(theta.expand(5, 8, 10)).double()
    wide = theta.detach().double().requires_grad_()
    ratio = wide.sum(-1) + 10 * ((-g - wide).logsumexp(-1) - (-g).logsumexp(-1))
    (expected,) = torch.autograd.grad(ratio.sum(), wide)
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cls", RELAXED)
def test_an_infinite_logit_leaves_the_density_of_the_others(cls: type[Distribution]) -> None:
    inf = math.inf
    theta = torch.tensor([[0.9, -inf, 0.1, inf, -1.3], [0.5, -inf, -inf, inf, 0.2]], requires_grad=True)
    p = cls(0.3, 2, theta)
    torch.manual_seed(0)
    x = p.rsample((3,))
    torch.autograd.grad(x[..., [0, 4]].sum(), theta, retain_graph=True)
    for row, free in ((0, [0, 2, 4]), (1, [0, 4])):
        others = cls(0.3, 1, theta.detach()[row, free])
        values = x[:, row].detach()
        expected = others.log_prob(values[:, free])
        torch.testing.assert_close(p.log_prob(x)[:, row], expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(p.log_prob(x.clone())[:, row], expected, rtol=1e-5, atol=1e-5)
    for value in (x, x.detach().clone()):
        (grad,) = torch.autograd.grad(p.log_prob(value).sum(), theta, retain_graph=True)
        assert grad.isfinite().all() and (grad[theta.isinf()] == 0).all()
    assert (grad[theta.isfinite()] != 0).all()
    # what such an entry cannot be has no density
    swapped = x.detach()[..., [1, 0, 2, 3, 4]]
    assert (cls(0.3, 2, theta.detach()).log_prob(swapped) == -inf).all()
    assert cls(0.3, 1, theta.detach(), validate_args=False).log_prob(x).isnan().all()


def test_only_the_sample_as_it_was_drawn_is_remembered() -> None:
    p = RelaxedKHot(0.02, 3, torch.zeros(8))
    torch.manual_seed(0)
    y, other = p.sample((50,)), p.sample((50,))
    exact, rounded = p.log_prob(y), p.log_prob(y.clone())
    assert not torch.allclose(exact, rounded, rtol=0.01)
    assert torch.equal(p.expand((2,)).log_prob(y.unsqueeze(1))[:, 0], rounded)
    assert torch.equal(p.log_prob(copy.deepcopy(y)), rounded)
    assert torch.equal(p.log_prob(y), exact)  # and not forgotten for the sample that was drawn after it
    leaf = other.requires_grad_()
    torch.autograd.grad(p.log_prob(leaf).sum(), leaf)
    y[0] = y[1].clone()
    assert torch.equal(p.log_prob(y)[1:], rounded[1:]) and torch.equal(p.log_prob(y)[0], rounded[1])
    with torch.inference_mode():
        y = p.sample()
        assert torch.equal(p.log_prob(y), p.log_prob(y.clone()))


def test_a_remembered_sample_is_freed() -> None:
    p = RelaxedKHot(0.5, 2, torch.zeros(4, requires_grad=True))
    gc.collect()
    before = len(distributions._drawn)
    y = p.rsample()
    p.log_prob(y).backward()
    assert len(distributions._drawn) == before + 1
    del y
    assert len(distributions._drawn) == before


def test_samples_under_transforms_are_judged_without_loss() -> None:
    theta = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))

    def ratio(cls: type[Distribution], theta: Tensor) -> Tensor:
        p, q = cls(0.05, 2, theta), cls(0.05, 2, torch.zeros(6))
        x = p.rsample()
        return p.log_prob(x) - q.log_prob(x)

    results = []
    for cls in RELAXED:
        each = torch.func.grad_and_value(functools.partial(ratio, cls))
        torch.manual_seed(0)
        results.append(torch.func.vmap(each, randomness="same")(theta))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_a_value_keeps_the_digits_that_it_has() -> None:
    """Numbers near 0 are not taken for eps, in any dtype."""
    for dtype, small in ((torch.float16, 2.0**-24), (torch.float32, 1e-30), (F64, 1e-40)):
        y = torch.tensor([0.625, 0.375, small], dtype=dtype)
        got = RelaxedKHot(0.5, 1, torch.zeros(3, dtype=dtype)).log_prob(y)
        with mp.workdps(60):
            z = [mp.log(mp.mpf(v) / (1 - mp.mpf(v))) for v in y.tolist()]
            expected = float(exact_log_prob(z, mp.mpf("0.5"), [0.0] * 3))
        assert got.item() == pytest.approx(expected, rel=2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("cls", RELAXED)
def test_relaxed_gradients(cls: type[Distribution]) -> None:
    theta = BATCH[:, 0].clone().requires_grad_()
    tau = torch.tensor([0.5, 1.0, 2.0], dtype=F64, requires_grad=True)
    x = cls(1.0, 2, theta.detach()).sample().requires_grad_(cls is LogitRelaxedKHot)

    def log_prob(tau: Tensor, theta: Tensor, x: Tensor) -> Tensor:
        return cls(tau, 2, theta).log_prob(x)

    def rsample(tau: Tensor, theta: Tensor) -> Tensor:
        torch.manual_seed(0)
        return cls(tau, 2, theta).rsample()

    assert torch.autograd.gradcheck(log_prob, (tau, theta, x))
    assert torch.autograd.gradcheck(rsample, (tau, theta))


# ------------------------------------------------------------------------- what rounding must not change

SIZES = [(n, k) for n in (1, 2, 100, 1000) for k in sorted({1, n // 2, n - 1, n}) if 0 < k <= n]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_relaxed_samples_of_half_precision_are_rounded_once(dtype: torch.dtype) -> None:
    logits = (4 * torch.arange(-3.0, 4.0)).to(dtype)

    def sample(logits: Tensor) -> Tensor:
        torch.manual_seed(0)
        return RelaxedKHot(0.3, 3, logits).rsample((50,))  # 0.3 is no number of half precision

    want, rounding = sample(logits.float()), torch.finfo(dtype).eps
    torch.testing.assert_close(sample(logits).float(), want, rtol=rounding, atol=1e-7)


def test_variance_in_half_precision_is_rounded_once() -> None:
    logits = torch.linspace(-3, 3, 9)
    for dtype in (torch.float16, torch.bfloat16):
        p = ConditionalPoisson(3, logits.to(dtype))
        want = p.mean.float() * (1 - p.mean.float())
        assert torch.equal(p.variance, want.to(dtype))


DTYPES = (torch.float16, torch.bfloat16, torch.float32, F64)


@pytest.mark.parametrize("tau", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("n, k", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_relaxed_samples_are_in_the_support(dtype: torch.dtype, n: int, k: int, tau: float) -> None:
    torch.manual_seed(0)
    p = RelaxedKHot(tau, k, 3 * torch.randn(4, n, dtype=dtype))
    y = p.rsample((5,))
    assert p.support.check(y).all()
    assert p.log_prob(y).isnan().all() == (k == n)
    wrong = y.detach().clone()
    wrong[..., 0] += torch.where(wrong[..., 0] > 0.5, -0.25, 0.25).to(dtype)
    assert n * torch.finfo(dtype).eps > 0.1 or not p.support.check(wrong).any()


@pytest.mark.parametrize("n, k", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_soft_topk_gives_inclusion_probs_that_are_accepted(dtype: torch.dtype, n: int, k: int) -> None:
    """And a sum that is off by rounding does not change the size of a sample."""
    torch.manual_seed(0)
    for cdf in ("logistic", "normal", "uniform"):
        probs = khot.soft_topk(3 * torch.randn(4, n, dtype=dtype), k, cdf=cdf)
        p = KHot(k, probs=probs, design="systematic")
        assert (p.sample((5,)).double().sum(-1) == k).all()


@pytest.mark.parametrize("q_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kl_divergence_has_the_dtype_of_its_arguments(dtype: torch.dtype, q_dtype: torch.dtype) -> None:
    def both(dtype: torch.dtype) -> list[Distribution]:
        logits = ONE.to(dtype)
        return [ConditionalPoisson(2, logits), KHot(2, logits=logits, design="conditional_poisson")]

    for p, q in itertools.product(both(dtype), both(q_dtype)):
        assert kl_divergence(p, q).dtype == torch.promote_types(dtype, q_dtype)


@pytest.mark.parametrize(
    "k, said",
    [
        (2, "2"),
        (torch.tensor(2), "2"),
        (torch.tensor([[2], [2]]), "2"),
        (torch.tensor([1, 2]), "tensor([1, 2])"),
        (torch.ones(0), "tensor([])"),
    ],
    ids=str,
)
def test_constraints_say_their_name_and_k(k: Any, said: str) -> None:
    assert repr(distributions.k_hot(k)) == f"k_hot(k={said})"
    assert repr(distributions.capped_simplex(k)) == f"capped_simplex(k={said})"
    with pytest.raises(ValueError, match=r"capped_simplex\(k=2\)"):
        RelaxedKHot(1.0, 2, ONE).log_prob(ONE)
    with pytest.raises(ValueError, match=r"k_hot\(k=2\)"):
        ConditionalPoisson(2, ONE).log_prob(ONE)


# ------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("design", [d for d in CLOSE if d not in TRACTABLE])
def test_what_is_not_known_names_the_designs_where_it_is(design: str) -> None:
    p = KHot(2, logits=ONE, design=design)
    with pytest.raises(
        NotImplementedError, match=f"log_prob .*'{design}'.*'pareto', .*'conditional_poisson', .*'sampford'"
    ):
        p.log_prob(p.sample())
    with pytest.raises(
        NotImplementedError,
        match=f"entropy .*'{design}', only for 'conditional_poisson'; .*ConditionalPoisson",
    ):
        p.entropy()
    with pytest.raises(NotImplementedError, match="kl_divergence"):
        kl_divergence(p, ConditionalPoisson(2, ONE))
    with pytest.raises(NotImplementedError, match="mode"):
        _ = p.mode


HALF = torch.full((4,), 0.5)


BROADCASTS = r"^{} must have a shape that broadcasts with the batch shape \(2,\) .* of {} .* got \({},\)"
WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: KHot(2, probs=torch.tensor([0.5, 0.5, 0.5])), "probs must sum to k.* 1.5 for k = 2"),
    (lambda: KHot(2, probs=HALF + torch.tensor([1e-5, 0, 0, 0])), "probs must sum to k"),
    (lambda: KHot(2, probs=HALF, logits=HALF), "one of probs and logits"),
    (lambda: KHot(2), "one of probs and logits"),
    (lambda: KHot(torch.arange(3), logits=torch.zeros(2, 4)), BROADCASTS.format("k", "logits", 3)),
    (lambda: KHot(torch.ones(4), probs=torch.zeros(2, 4)), BROADCASTS.format("k", "probs", 4)),
    (
        lambda: RelaxedKHot(torch.ones(3), torch.tensor([1, 2]), HALF),
        BROADCASTS.format("temperature", "k", 3).replace(" of k", ""),
    ),
    (
        lambda: ConditionalPoisson(2, HALF).rsample(),
        "^ConditionalPoisson has no rsample.* khot.estimators.simple",
    ),
    (
        lambda: KHot(2, logits=HALF).rsample((3,)),
        "^KHot has no rsample.* KHotStraightThrough .*RelaxedKHot .*score_function",
    ),
    (lambda: ConditionalPoisson(2, HALF).log_prob(HALF), "within the support"),
    (lambda: ConditionalPoisson(2, HALF).log_prob(torch.eye(4)[0]), "within the support"),
    (lambda: RelaxedKHot(1.0, 1, HALF).log_prob(HALF), "within the support"),
]


@pytest.mark.parametrize("make, message", WRONG)
def test_bad_input_is_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(NotImplementedError if "rsample" in message else ValueError, match=message):
        make()


def test_without_validation_nothing_is_looked_at() -> None:
    p = KHot(2, probs=torch.tensor([0.5, 0.5, 0.5]), validate_args=False)
    assert p.expand((3,))._validate_args is False
    value = ConditionalPoisson(2, HALF, validate_args=False).log_prob(torch.eye(4)[0])
    assert value == -math.inf
