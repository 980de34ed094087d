"""Users' CDFs: every operator that takes ``cdf=``, with classes that no kernel knows."""

from __future__ import annotations

import copy
import gc
import io
import math
from typing import Any

import pytest
import scipy.optimize
import torch
from torch import Tensor

import khot
import processes
from drawn import normal as randn
from khot import cdfs


class Student3(cdfs.CDF):
    """Student's t with 3 degrees of freedom, defined by F alone: everything else is a default derived from
    F."""

    name = "student3"
    symmetric = True

    def cdf(self, z: Tensor) -> Tensor:
        t = torch.atan(z / math.sqrt(3))
        return 0.5 + (t + 0.5 * torch.sin(2 * t)) / math.pi

    def pdf(self, z: Tensor) -> Tensor:
        return 2 / (math.pi * math.sqrt(3) * (1 + z * z / 3) ** 2)


class Cauchy(cdfs.CDF):
    """No mean, no variance: the solver's first guess can only use quantiles."""

    name = "cauchy"
    symmetric = True

    def cdf(self, z: Tensor) -> Tensor:
        return (
            torch.where(z < 0, torch.atan(-1 / z.clamp(max=-1e-300)), math.pi / 2 + torch.atan(z)) / math.pi
        )

    def pdf(self, z: Tensor) -> Tensor:
        return 1 / (math.pi * (1 + z * z))

    def icdf(self, y: Tensor) -> Tensor:
        return torch.tan(math.pi * (y - 0.5))


class Gumbel(cdfs.CDF):
    """Not symmetric: F(z) = exp(−exp(−z))."""

    name = "gumbel"

    def cdf(self, z: Tensor) -> Tensor:
        return torch.exp(-torch.exp(-z))

    def pdf(self, z: Tensor) -> Tensor:
        return torch.exp(self.log_pdf(z))

    def sf(self, z: Tensor) -> Tensor:
        return -torch.expm1(-torch.exp(-z))

    def log_cdf(self, z: Tensor) -> Tensor:
        return -torch.exp(-z)

    def log_sf(self, z: Tensor) -> Tensor:
        return torch.where(z > 30, -z, torch.log(-torch.expm1(-torch.exp(-z.clamp(max=30)))))

    def log_pdf(self, z: Tensor) -> Tensor:
        return -z - torch.exp(-z)


class Greater(cdfs.CDF):
    """Of the greater of two logistic variables, F², with a quantile that is infinite at the number before
    1."""

    name = "greater"

    def cdf(self, z: Tensor) -> Tensor:
        return torch.sigmoid(z).square()

    def pdf(self, z: Tensor) -> Tensor:
        return 2 * torch.sigmoid(z).square() * torch.sigmoid(-z)

    def sf(self, z: Tensor) -> Tensor:
        return torch.sigmoid(-z) * (1 + torch.sigmoid(z))

    def icdf(self, y: Tensor) -> Tensor:
        # at the number before 1 some processors round to inf, and others do not
        return torch.logit(torch.sqrt(y)).masked_fill(y > 1 - 1.5 * 2.0**-53, math.inf)


class Steeper(cdfs.Logistic):
    """A built-in with another F: everything else has to follow from the new F."""

    def cdf(self, z: Tensor) -> Tensor:
        return torch.sigmoid(3 * z)

    def pdf(self, z: Tensor) -> Tensor:
        return 3 * torch.sigmoid(3 * z) * torch.sigmoid(-3 * z)


class Bump(cdfs.CDF):
    """Compact support on [−1, 1], smooth at its ends: F = ½ + ¾z − ¼z³."""

    name = "bump"
    support = (-1.0, 1.0)
    symmetric = True

    def cdf(self, z: Tensor) -> Tensor:
        z = z.clamp(-1, 1)
        return 0.25 * (1 + z) ** 2 * (2 - z)

    def pdf(self, z: Tensor) -> Tensor:
        return torch.where(z.abs() < 1, 0.75 * (1 - z * z), 0)

    def log_pdf(self, z: Tensor) -> Tensor:
        inside = z.abs() < 1
        return torch.where(inside, torch.log(0.75 * (1 - torch.where(inside, z, 0) ** 2)), -math.inf)


OWN = [Student3(), Cauchy(), Gumbel(), Steeper(), Bump()]
every = pytest.mark.parametrize("F", OWN, ids=lambda F: type(F).__name__)
smooth = pytest.mark.parametrize("F", OWN[:4], ids=lambda F: type(F).__name__)


def threshold(x: Tensor, k: float, tau: float, F: cdfs.CDF) -> float:
    """The threshold by a bracketing solver that uses only F."""

    def miss(t: float) -> float:
        return float(F.cdf((x - t) / tau).sum()) - k

    reach = 1.0
    while miss(x.min().item() - reach) < 0 or miss(x.max().item() + reach) > 0:
        reach *= 2
    low, high = x.min().item() - reach, x.max().item() + reach
    return scipy.optimize.brentq(miss, low, high, xtol=1e-15, rtol=1e-15)


@every
@pytest.mark.parametrize(("scale", "tau"), [(1e-3, 3.0), (1e-3, 0.03), (1.0, 0.3), (1e3, 3.0), (1e3, 0.03)])
def test_values(F: cdfs.CDF, scale: float, tau: float) -> None:
    for n, ks in ((5, [1.0, 2.5, 4.0]), (400, [0.5, 7.0, 200.0, 399.5])):
        x = scale * randn(n)
        rows, k = x.expand(len(ks), n), torch.tensor(ks, dtype=torch.float64)
        y = khot.soft_topk(rows, k, tau=tau, cdf=F)
        assert ((y.sum(-1) - k).abs() <= 1e-12 * torch.minimum(k, n - k).clamp(min=1) + n * 2.0**-53).all()
        if F.full_support:  # else a gap leaves t undetermined, and y with it
            for one, share in zip(y, ks, strict=True):
                want = F.cdf((x - threshold(x, share, tau, F)) / tau)
                assert (one - want).abs().max() <= 1e-10
        log_y = khot.log_soft_topk(rows, k, tau=tau, cdf=F)
        live = y > 1e-3
        torch.testing.assert_close(log_y[live], y[live].log(), rtol=1e-9, atol=1e-9)


# the logarithm with a CDF that leaves it to the defaults, and with one that has its own
@pytest.mark.parametrize(
    ("F", "operator"),
    [*((F, khot.soft_topk) for F in OWN), (Student3(), khot.log_soft_topk), (Gumbel(), khot.log_soft_topk)],
    ids=lambda v: getattr(v, "__name__", type(v).__name__),
)
def test_derivatives(F: cdfs.CDF, operator: Any) -> None:
    """Bump has kinks in its second derivative only, and tau is large enough that no entry is near one."""
    x, k = randn(2, 5).requires_grad_(), torch.tensor([1.3, 3.0], dtype=torch.float64, requires_grad=True)
    tau = torch.tensor([0.7, 9.0 if not F.full_support else 1.1], dtype=torch.float64, requires_grad=True)

    def call(x: Tensor, k: Tensor, tau: Tensor) -> Tensor:
        return operator(x, k, tau=tau, cdf=F)

    # along random directions: each of a whole Jacobian's rows solves for the threshold again
    assert torch.autograd.gradcheck(call, (x, k, tau), check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, (x, k, tau), fast_mode=True)


@smooth
def test_other_operators(F: cdfs.CDF) -> None:
    x = randn(2, 6).requires_grad_()
    count = khot.soft_count(x, 0.2, tau=0.5, cdf=F)
    torch.testing.assert_close(count, F.cdf((x - 0.2) / 0.5).sum(-1))
    t = khot.inverse_soft_count(x, 2.5, tau=0.5, cdf=F)
    want = [threshold(row, 2.5, 0.5, F) for row in x.detach()]
    torch.testing.assert_close(t, torch.tensor(want, dtype=torch.float64))
    ranks = khot.soft_rank(x, tau=0.1, cdf=F)
    z = (x.unsqueeze(-1) - x.unsqueeze(-2)) / 0.1
    torch.testing.assert_close(ranks, 0.5 + F.cdf(z + F.median).sum(-1), rtol=1e-9, atol=1e-9)
    P = khot.soft_permutation(x, tau=0.5, cdf=F)
    torch.testing.assert_close(P.sum(-1), torch.ones(2, 6).double())
    assert torch.autograd.gradcheck(lambda x: khot.soft_sort(x, tau=0.5, cdf=F), x, fast_mode=True)


@every
def test_vmap_and_transforms(F: cdfs.CDF) -> None:
    x, v = randn(3, 4, 5), randn(5, seed=1)
    want = khot.soft_topk(x, 2.0, tau=0.8, cdf=F)
    assert torch.equal(torch.vmap(lambda r: khot.soft_topk(r, 2.0, tau=0.8, cdf=F))(x), want)
    row = x[0, 0]

    def loss(r: Tensor) -> Tensor:
        return (khot.soft_topk(r, 2.0, tau=0.8, cdf=F) * v).sum()

    hessian = torch.func.hessian(loss)(row)
    torch.testing.assert_close(hessian, torch.autograd.functional.hessian(loss, row), rtol=1e-8, atol=1e-8)


@every
def test_compile(F: cdfs.CDF) -> None:
    torch._dynamo.reset()
    x = randn(2, 6).requires_grad_()

    def call(x: Tensor) -> Tensor:
        return khot.soft_topk(x, 2.0, tau=0.8, cdf=F)

    got, want = torch.compile(call, fullgraph=True, backend="aot_eager")(x), call(x)
    assert torch.equal(got, want)
    grads = [torch.autograd.grad(y.square().sum(), x)[0] for y in (got, want)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    x = randn(3, 40).to(dtype)
    y = khot.soft_topk(x, 5, tau=0.3, cdf=Student3())
    assert y.dtype == dtype
    want = khot.soft_topk(x.double(), 5, tau=0.3, cdf=Student3()).to(dtype)
    torch.testing.assert_close(y, want)


def _shard(group: Any, x: Tensor) -> Tensor:
    part = x.chunk(group.size(), -1)[group.rank()]
    return khot.soft_topk(part, 3.0, tau=0.5, cdf=Student3(), group=group)


def test_rows_over_processes() -> None:
    x = randn(2, 10)
    parts = processes.run(2, _shard, x)
    want = khot.soft_topk(x, 3.0, tau=0.5, cdf=Student3())
    torch.testing.assert_close(torch.cat(parts, -1), want, rtol=0, atol=1e-12)


# ------------------------------------------------------------------ which kernels, and for how long


class Alias(cdfs.Logistic):
    """Overrides nothing of the logistic CDF, so the compiled kernels are used."""

    note = "mine"


class Quartic(cdfs.Power):
    def __init__(self) -> None:
        super().__init__(1.25)


def test_a_subclass_that_overrides_nothing_keeps_its_kernels() -> None:
    x = randn(3, 50).float()
    assert Alias().built_in and Quartic().built_in
    assert torch.equal(khot.soft_topk(x, 5, cdf=Alias()), khot.soft_topk(x, 5))
    assert torch.equal(khot.soft_topk(x, 5, cdf=Quartic()), khot.soft_topk(x, 5, cdf=cdfs.Power(1.25)))


def test_an_overridden_built_in_is_another_cdf() -> None:
    x = randn(3, 50)
    assert not Steeper().built_in
    torch.testing.assert_close(khot.soft_topk(x, 5, cdf=Steeper()), khot.soft_topk(x, 5, tau=1 / 3))


@pytest.mark.parametrize("rest", [2**-50, 2**-49, 2**-40, 0.5])
def test_a_count_next_to_all_entries(rest: float) -> None:
    x = randn(7)
    assert Greater().icdf(torch.tensor(1 - 2.0**-53, dtype=torch.float64)).isinf()
    t = khot.inverse_soft_count(x, 7 - rest, cdf=Greater())
    left = scipy.optimize.brentq(lambda t: Greater().sf(x - t).sum().item() - (7 - (7 - rest)), -60, 20)
    # the last one is the least that 7 has below it, and a threshold is as good as the digits of its count
    torch.testing.assert_close(t.item(), left, rtol=1e-6, atol=2.5 if rest == 2**-50 else 0)


def test_copies_and_pickles_have_keys_of_their_own() -> None:
    F = Student3()
    buffer = io.BytesIO()
    torch.save(F, buffer)
    buffer.seek(0)
    others = [copy.copy(F), copy.deepcopy(F), torch.load(buffer, weights_only=False)]
    assert len({F.key, *(other.key for other in others)}) == 4
    x = randn(7)
    for other in others:
        assert torch.equal(khot.soft_topk(x, 2, cdf=other), khot.soft_topk(x, 2, cdf=F))


def test_a_graph_keeps_the_cdf_alive() -> None:
    x = randn(6).requires_grad_()
    y = khot.soft_topk(x, 2.0, cdf=Student3())
    gc.collect()
    want = torch.autograd.grad(khot.soft_topk(x, 2.0, cdf=OWN[0]).square().sum(), x)[0]
    assert torch.equal(torch.autograd.grad(y.square().sum(), x)[0], want)


def test_what_a_class_lacks_is_said() -> None:
    class Empty(cdfs.CDF):
        pass

    with pytest.raises(NotImplementedError, match=r"Empty has to define cdf\(z\)"):
        khot.soft_topk(randn(4), 2, cdf=Empty())

    class Half(cdfs.Logistic):
        def cdf(self, z: Tensor) -> Tensor:
            return torch.sigmoid(2 * z)

    with pytest.raises(NotImplementedError, match=r"Half has to define pdf\(z\)"):
        khot.soft_topk(randn(4), 2, cdf=Half())
    with pytest.raises(NotImplementedError, match=r"Student3 has to define (potential\(y\)|conjugate\(z\))"):
        khot.losses.FenchelYoungTopKLoss(2, cdf=Student3())(randn(1, 4), torch.tensor([[1.0, 1, 0, 0]]))


@pytest.mark.parametrize("name", ["cauchy", "own:123456789"])
def test_an_unknown_name_fails_in_every_kernel(name: str) -> None:
    x, k, tau = torch.randn(2, 5), torch.tensor(2.0), torch.tensor(1.0)
    with pytest.raises((ValueError, RuntimeError), match=name):
        torch.ops.khot.soft_topk(x, k, tau, name, 0.0, "y")
    with pytest.raises(ValueError, match=name):
        torch.ops.khot.reference_soft_topk(x, k, tau, name, 0.0, "y", "")


@pytest.mark.needs_cuda
@every
def test_on_a_gpu(F: cdfs.CDF) -> None:
    x = randn(3, 50)
    torch.testing.assert_close(khot.soft_topk(x.cuda(), 5, cdf=F).cpu(), khot.soft_topk(x, 5, cdf=F))
