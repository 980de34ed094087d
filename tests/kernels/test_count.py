"""The soft count and its inverse by the kernels in use, against the reference kernels in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from differences import compare
from khot import _kernels as kernels
from khot._kernels.reference import soft_count as counts
from khot._kernels.reference import soft_topk as reference

pytestmark = pytest.mark.skipif(
    not kernels.active()["cpu"].startswith("compiled"), reason="the compiled kernels are not in use"
)

CDFS = {"logistic": 0.0, "laplace": 0.0, "normal": 0.0, "uniform": 0.0, "power": 4 / 3}
every_cdf = pytest.mark.parametrize("cdf", CDFS)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
INF = torch.inf


def rows(n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of several kinds with a temperature each, and levels inside and outside of them."""
    g = torch.Generator().manual_seed(n)
    x = torch.randn(20, n, generator=g, dtype=torch.float64)
    x[1] *= 50
    x[2] = x[2].round()
    x[3] = x[3].relu()
    x[4] += 300
    x[5] = torch.exp(3 * x[5]).clamp(max=6e4)
    x[6, ::3], x[7, ::2], x[8, ::3], x[8, 1::3] = -INF, INF, INF, -INF
    x[9] = -INF
    x = x.to(dtype)
    tau = torch.tensor([1.0, 0.3, 7.0, 0.01, 1.0]).double().repeat(4)
    tau[12], tau[13] = 1e-30, 1e30  # float carries neither
    finite = x.double().masked_fill(x.isinf(), 0)
    at = finite.mean(-1, keepdim=True) + torch.tensor([0.0, -1.5, 4.0, 0.1, 30.0]).double() * tau[:, None]
    return x, at, tau


# Short rows are taken in groups: three that float carries, and one that it does not.
GOOD = [i for i in range(20) if i not in (12, 13)]
IN_GROUPS = (3 * GOOD)[:48] + list(range(20))


@every_cdf
@every_dtype
@pytest.mark.parametrize("n", [1, 5, 64, 300, 3_000])
def test_counts_and_gradients_as_the_reference(cdf: str, dtype: torch.dtype, n: int) -> None:
    x, at, tau = (t[IN_GROUPS] for t in rows(n, dtype))
    # one entry of F in float; Power raises the error of z, and the normal tail has an absolute one
    relative = 1e-13 if dtype == torch.float64 else 1.2e-6 if cdf == "power" else 4e-7
    absolute = 1e-12
    if dtype != torch.float64:  # at the edge of a support, z has an absolute error as well
        absolute = n * {"normal": 2.5e-8, "uniform": 1e-10, "power": 1e-10}.get(cdf, 0) + 1e-12
    ends = torch.tensor([INF, -INF]).double().expand(len(x), 2)
    for levels, centred in itertools.product((at[:, :1], at, ends), (False, True)):
        rest = (levels, tau, cdf, CDFS[cdf], centred)
        got, want = torch.ops.khot.soft_count(x, *rest), counts.soft_count(x.double(), *rest)
        assert got.dtype == torch.float64 and got.shape == levels.shape
        compare(got, want, relative * want + absolute)

        v = torch.randn(levels.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        found = torch.ops.khot.soft_count_backward(v, x, *rest)
        wanted = counts.soft_count_backward(v, x.double(), *rest)
        rounding = torch.finfo(dtype).eps if dtype != torch.float64 else 1e-13
        # where z is large, f errs by z times the rounding of z
        size = v.abs().sum(-1) / tau
        compare(found[0], wanted[0].to(dtype), (20 * relative + rounding) * size[:, None] + 1e-12)
        compare(found[1], wanted[1], 20 * relative * (n * size)[:, None] + 1e-12)
        compare(found[2], wanted[2], 100 * relative * n * size + 1e-12)
        assert [t.dtype for t in found] == [dtype, torch.float64, torch.float64]


@every_dtype
@pytest.mark.parametrize("n", [1, 5, 64, 300, 3_000])
def test_counts_from_a_sorted_row(dtype: torch.dtype, n: int) -> None:
    """Against the sums over all entries, at levels in any order, among them entries and infinities."""
    x, at, tau = rows(n, dtype)
    g = torch.Generator().manual_seed(n)
    scattered = at[:, :1] + 3 * tau[:, None] * torch.randn(20, 40, generator=g, dtype=torch.float64)
    ends = torch.tensor([INF, -INF, 1e30]).double().expand(20, 3)
    levels = torch.cat((at, x[:, :7].double(), scattered, ends), -1)
    rest = (levels, tau, "laplace", 0.0, False)
    got, order, place = torch.ops.khot.laplace_count(x, levels, tau, True)
    want = counts.soft_count(x.double(), *rest)
    assert got.dtype == torch.float64 and order.dtype == place.dtype == torch.int32
    compare(got, want, 1e-13 * want)

    v = torch.randn(levels.shape, generator=g, dtype=torch.float64)
    found = torch.ops.khot.laplace_count_backward(v, x, order, levels, place, tau, True, True)
    wanted = counts.soft_count_backward(v, x.double(), *rest)
    size = v.abs().sum(-1) / tau
    rounding = torch.finfo(dtype).eps if dtype != torch.float64 else 1e-13
    compare(found[0], wanted[0].to(dtype), (1e-13 + rounding) * size[:, None] + torch.finfo(dtype).tiny)
    compare(found[1], wanted[1], 1e-13 * (n * size)[:, None])
    compare(found[2], wanted[2], 1e-12 * n * size)
    assert [t.dtype for t in found] == [dtype, torch.float64, torch.float64]


@every_cdf
@pytest.mark.parametrize("level", [0.0, 1.0])
def test_groups_of_rows_without_a_temperature(cdf: str, level: float) -> None:
    x, tau = torch.zeros(32, 8), torch.zeros(32).double()
    tau[16:] = 1.0
    rest = (torch.full((32, 1), level).double(), tau, cdf, CDFS[cdf], False)
    got = torch.ops.khot.soft_count(x, *rest)
    assert got[:16].isnan().all() and not got[16:].isnan().any()
    dx, dat, dtau = torch.ops.khot.soft_count_backward(torch.ones(32, 1).double(), x, *rest)
    for found in (dx, dat, dtau):
        assert found[:16].isnan().all() and not found[16:].isnan().any()


@pytest.mark.parametrize("cdf", ["logistic", "laplace", "normal"])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("n", [3, 64, 256, 1_000, 70_000])
def test_thresholds_as_the_reference(cdf: str, dtype: torch.dtype, n: int) -> None:
    """To more digits than float has: the search in float is followed by a step in double."""
    g = torch.Generator().manual_seed(n)
    count = 4 if n > 10_000 else 37
    x = torch.randn(count, n, generator=g) * torch.linspace(0.1, 6, count)[:, None]
    x[1::4] = x[1::4].round() + 20
    x[2::4, ::3] = -INF
    x = x.to(dtype)
    k = torch.linspace(0.3, (x > -INF).sum(-1).min() - 0.3, count, dtype=torch.float64)
    for scale in (1.0, 0.02):
        tau = torch.tensor(scale, dtype=torch.float64)
        empty, hi, lo = torch.ops.khot.soft_topk(x, k, tau, cdf, 0.0, "threshold")
        _, want_hi, want_lo = reference.soft_topk(x.double(), k, tau, cdf, 0.0, "threshold")
        want = want_hi + want_lo
        assert empty.shape == (count, 0)
        compare(hi + lo, want, 1e-9 * tau + 1e-14 * want.abs())
        grad_lo = torch.linspace(-1, 2, count, dtype=torch.float64)
        rest = (hi, lo, tau, cdf, 0.0, "threshold")
        got = torch.ops.khot.soft_topk_backward(empty, grad_lo, x, *rest)
        wanted = reference.soft_topk_backward(empty.double(), grad_lo, x.double(), *rest)
        info = torch.finfo(dtype)
        for a, b in zip(got, wanted, strict=True):
            size = b.abs().amax(-1, keepdim=True) + 1e-6
            compare(a, b, (2e-5 + info.eps) * size + info.tiny * info.eps)


@pytest.mark.parametrize("cdf", ["logistic", "laplace", "normal"])
@pytest.mark.parametrize("n", [64, 1_000, 70_000])
def test_thresholds_beside_far_and_infinite_scores(cdf: str, n: int) -> None:
    x = torch.randn(20, n, generator=torch.Generator().manual_seed(n))
    x[1::5, 1], x[2::5, 2], x[3::5, 3], x[3::5, 4] = 1e4, -1e30, INF, -INF
    x[4::5] += 1e4
    k = torch.linspace(2.5, n - 2.5, 20, dtype=torch.float64)
    tau = torch.tensor([1.0, 30.0, 0.1, 3.0]).double().repeat(5)
    _, hi, lo = torch.ops.khot.soft_topk(x, k, tau, cdf, 0.0, "threshold")
    _, want_hi, want_lo = reference.soft_topk(x.double(), k, tau, cdf, 0.0, "threshold")
    want = want_hi + want_lo
    compare(hi + lo, want, 1e-9 * tau + 1e-14 * want.abs())
