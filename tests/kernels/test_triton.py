"""The Triton kernels under Triton's interpreter, against the reference kernels; and that they compile."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import oracles
from agreement import error_in_tau
from differences import error as relative_error
from differences import far
from drawn import f64
from khot import cdfs
from khot._kernels.reference import soft_topk as reference
from operators import log_limit
from selection_rows import LOG_TAILS, rows_in_gaps

ROOT = Path(__file__).parents[2]
CDFS: dict[str, float] = {"logistic": 0.0, "laplace": 0.0, "normal": 0.0, "uniform": 2.0, "power": 4 / 3}
every_cdf = pytest.mark.parametrize("cdf", CDFS)

FORWARD = {torch.float64: 1e-12, torch.float32: 5e-7}
every_dtype = pytest.mark.parametrize("dtype", FORWARD, ids=str)
# in a gap between two clusters, z is 1e4, and float32 scores give z a relative error of 1e-7
BACKWARD = {torch.float64: 1e-10, torch.float32: 2e-4}


either = pytest.mark.parametrize("where", ["kernels", "split"])


def rows(name: str, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A row of the adversarial list with every k."""
    x = oracles.ADVERSARIAL[name](n, torch.Generator().manual_seed(n)).to(dtype)
    selectable = int((x > -torch.inf).sum())
    ks = [0.0, *(min(max(k, 0.0), selectable) for k in oracles.adversarial_ks(selectable)), selectable]
    return x.expand(len(ks), n), f64(ks)


def error(got: Tensor, want: Tensor, relative: bool = False) -> float:
    return relative_error(got, want) if relative else far(got, want).max().item()


def error_in_scale(got: Tensor, want: Tensor) -> float:
    """The largest difference of finite numbers, in units of the largest of them."""
    finite = want.isfinite()  # dL/dk of log y overflows in a deep gap
    if not finite.any():
        return 0.0
    scale = 1 + want[finite].abs().amax()
    return error(got[finite] / scale, want[finite] / scale)


def check_forward(kernels: ModuleType, x: Tensor, k: Tensor, tau: float, cdf: str) -> None:
    dtype, shape = x.dtype, CDFS[cdf]
    y, _, _ = kernels.soft_topk(x, k, f64(tau), cdf, shape, "y")
    want, _, _ = reference.soft_topk(x.double(), k, f64(tau), cdf, shape, "y")
    assert error(y, want) <= FORWARD[dtype]
    share = torch.minimum(k, (x > -torch.inf).sum(-1) - k).clamp(min=1)
    goal = (1e-12 if dtype == torch.float64 else 1e-6) * share + x.shape[-1] * torch.finfo(dtype).eps / 2
    assert ((y.double().sum(-1) - k).abs() <= goal).all()
    log_y, _, _ = kernels.soft_topk(x, k, f64(tau), cdf, shape, "log")
    want, _, _ = reference.soft_topk(x.double(), k, f64(tau), cdf, shape, "log")
    assert error(log_y, want, relative=True) <= (1e-12 if dtype == torch.float64 else 1e-5)


@every_cdf
def test_adversarial_rows(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, cdf: str) -> None:
    # all of them in one program: the interpreter spends most of its time between instructions
    monkeypatch.setattr(kernels.layout, "tile", lambda rows, n: kernels.layout.Tile(128, 2, 32, 1))
    x, k = zip(*(rows(scores, 45, torch.float32) for scores in oracles.ADVERSARIAL), strict=True)
    assert len(k[0]) % 2  # so that every second k is taken of a row, and the others of the next row
    check_forward(kernels, torch.cat(x)[::2], torch.cat(k)[::2], 0.01, cdf)


def leave_hard_rows_out(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that the float32 solver does not solve stay NaN."""
    counted = kernels.counted
    monkeypatch.setattr(counted, "COUNT", counted.COUNT._replace(in_float64=lambda *_: None))
    monkeypatch.setattr(counted, "_variant", counted._variant.__wrapped__)


# n; rows per program, number and width of the pieces, warps, whether the row is streamed
TILES = [
    (29, (4, 3, 16, 1, False)),
    (40, (2, 5, 8, 1, False)),
    (29, (1, 3, 16, 1, False)),
    (40, (1, 10, 4, 1, False)),
    (29, (1, 2, 8, 1, True)),
]


@pytest.mark.parametrize(
    ("cdf", "n", "tile"),
    # by turns: every CDF in two or three of the layouts, and every layout with as many CDFs
    [(cdf, n, tile) for i, cdf in enumerate(CDFS) for j, (n, tile) in enumerate(TILES) if (i + j) % 2 == 0],
    ids=str,
)
def test_rows_in_float32(
    kernels: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    cdf: str,
    n: int,
    tile: tuple[int, int, int, int, bool],
) -> None:
    """For every layout in a program: with and without padding, and one row by itself."""
    shape = CDFS[cdf]
    monkeypatch.setattr(kernels.layout, "tile", lambda rows, n: kernels.layout.Tile(*tile))
    monkeypatch.setattr(kernels.layout, "RESCUE", 64)
    if tile[-1]:
        monkeypatch.setattr(kernels.layout, "RESIDENT", 8)
        monkeypatch.setattr(kernels.layout, "STREAMS", 1)
    generator = torch.Generator().manual_seed(5)
    x = 2 * torch.randn(6, n, generator=generator)
    x[1], x[2, ::3], x[4, :2], x[5, 5] = 0.25, -torch.inf, torch.inf, torch.nan
    # a gap so wide that all exponentials underflow
    x[3] = torch.where(torch.arange(n) % 5 == 0, 400.0, -400.0) + x[3]
    k = f64([3.0, 3.0, n / 2 + 0.5, float(len(range(0, n, 5))), 3.0, 3.0])
    grad = torch.randn(x.shape, generator=generator)
    for output, some, tau in (("y", slice(6), f64(0.7)), ("log", slice(3), f64([0.7] * 3))):
        s, level, incoming = x[some], k[some] if output == "y" else f64(3.5), grad[some]
        y, hi, lo = kernels.soft_topk(s, level, tau, cdf, shape, output)
        want, *t = reference.soft_topk(s.double(), level, tau, cdf, shape, output)
        assert error(y, want, relative=output == "log") <= (5e-7 if output == "y" else 1e-5)
        args = (tau, cdf, shape, output)
        got = kernels.soft_topk_backward(incoming, torch.zeros(()), s, hi, lo, *args)
        wanted = reference.soft_topk_backward(incoming.double(), torch.zeros(()), s.double(), *t, *args)
        for a, b in zip(got, wanted, strict=True):
            assert error_in_scale(a[:5], b[:5]) <= 2e-4
            assert a[5:].isnan().all()


@pytest.mark.parametrize(
    ("cdf", "shape", "output"),
    [("power", 3.0, "y"), ("power", 3.0, "log"), ("power", 4 / 3, "log"), ("uniform", 0.0, "log")],
)
@either
def test_an_entry_at_the_end_of_a_support(
    request: pytest.FixtureRequest, where: str, cdf: str, shape: float, output: str
) -> None:
    """There the slope of its result in the threshold has no bound."""
    kernels, k, tau = request.getfixturevalue(where), f64(9.0), f64(1.0)
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    x[:, 7] = -torch.inf
    for _ in range(8):  # the entry follows the threshold, which hardly follows it
        _, hi, lo = reference.soft_topk(x.double(), k, tau, cdf, shape, "threshold")
        x[:, 7] = (hi + lo + 1e-6).float()
    want, *_ = reference.soft_topk(x.double(), k, tau, cdf, shape, output)
    slope = want[:, 7].exp() if output == "log" else want[:, 7]
    assert ((slope > 0) & (slope < 0.02)).all()
    got, *_ = kernels.soft_topk(x, k, tau, cdf, shape, output)
    assert error(got, want, relative=output == "log") <= (1e-5 if output == "log" else 5e-7)


@pytest.mark.parametrize(
    ("where", "cdf", "tau"),
    [
        (("kernels", "split")[(i + j) % 2], cdf, tau)
        for i, cdf in enumerate(CDFS)
        for j, tau in enumerate((1e-42, 1e35, 1e300))
        if (cdf, tau) != ("logistic", 1e300)  # which misses k
    ],
)
def test_temperatures_beyond_float32_for_every_cdf(
    request: pytest.FixtureRequest, where: str, cdf: str, tau: float
) -> None:
    kernels = request.getfixturevalue(where)
    x = torch.randn(1, 20, generator=torch.Generator().manual_seed(6))
    args = (f64(tau), cdf, CDFS[cdf], "y")
    y, hi, lo = kernels.soft_topk(x, f64(4.5), *args)
    want, *t = reference.soft_topk(x.double(), f64(4.5), *args)
    assert error(y, want) <= 5e-7
    got = kernels.soft_topk_backward(x, f64(0.0), x, hi, lo, *args)
    wanted = reference.soft_topk_backward(x.double(), f64(0.0), x.double(), *t, *args)
    for a, b in zip(got, wanted, strict=True):
        assert error_in_scale(a, b) <= 2e-4


@pytest.mark.parametrize("cdf", ["logistic", "laplace", "uniform"])
def test_gaps_of_rows_with_a_program_of_their_own(kernels: Any, cdf: str) -> None:
    """Such a row is read again where its threshold lies in a gap."""
    x = torch.randn(2, 1100, generator=torch.Generator().manual_seed(6))
    x[0, ::110] += 50
    x[1, 7::275] += 40
    k = f64([10.0, 4.0])
    assert kernels.layout.tile(2, 1100).together == 1
    y, hi, lo = kernels.soft_topk(x, k, f64(0.01), cdf, CDFS[cdf], "y")
    _, up, low = reference.soft_topk(x.double(), k, f64(0.01), cdf, CDFS[cdf], "y")
    assert torch.equal(y, (x > 20).float())
    torch.testing.assert_close(hi + lo, up + low, rtol=0, atol=1e-5)


@pytest.mark.parametrize("cdf", ["logistic", "laplace", "normal"])
def test_sharp_rows_need_no_float64(kernels: Any, monkeypatch: pytest.MonkeyPatch, cdf: str) -> None:
    """There a row takes hundreds of times as long."""
    leave_hard_rows_out(kernels, monkeypatch)
    x = torch.randn(64, 500, generator=torch.Generator().manual_seed(12))
    for tau in (1e-3, 3e-4):
        y, _, _ = kernels.soft_topk(x, f64(8.0), f64(tau), cdf, 0.0, "y")
        want, _, _ = reference.soft_topk(x.double(), f64(8.0), f64(tau), cdf, 0.0, "y")
        assert error(y, want) <= 5e-7


@pytest.mark.parametrize("where", ["kernels", "split"])
@pytest.mark.parametrize("cdf", ["logistic", "laplace", "normal"])
def test_gaps_of_any_width_need_no_float64(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, where: str, cdf: str
) -> None:
    """As much is missing above t as is left over below."""
    kernels = request.getfixturevalue(where)
    leave_hard_rows_out(kernels, monkeypatch)
    tau = 2.0**-10
    x, log_tail = rows_in_gaps(tau), LOG_TAILS[cdf]
    y, hi, lo = kernels.soft_topk(x, f64(7.0), f64(tau), cdf, 0.0, "y")
    assert not y.isnan().any()
    z = ((x.double() - hi[:, None].double()) - lo[:, None].double()) / tau
    missing, over = log_tail(z[:, :7]).logsumexp(1), log_tail(-z[:, 7:]).logsumexp(1)
    torch.testing.assert_close(missing, over, rtol=0, atol=1e-4)


def test_where_no_entry_is_taken_in_part_t_is_the_middle_of_the_gap(
    kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its end one entry alone would decide dL/dk."""
    leave_hard_rows_out(kernels, monkeypatch)
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(1)).sort(descending=True).values
    up, down = x[:, 9].double(), x[:, 10].double()
    for tau in (0.03, 1e-3):
        _, hi, lo = kernels.soft_topk(x, f64(10.0), f64(tau), "uniform", 0.0, "y")
        wide = up - down > 1.01 * tau
        torch.testing.assert_close((hi + lo)[wide], ((up - tau + down) / 2)[wide], rtol=0, atol=1e-6 * tau)


@pytest.mark.parametrize(
    ("where", "dtype", "cdf", "tau"),
    # half of all combinations, among them all of any three
    [
        (where, dtype, cdf, (1e-35, 1e-17)[(i + j + m) % 2])
        for i, where in enumerate(("kernels", "split"))
        for j, dtype in enumerate(FORWARD)
        for m, cdf in enumerate(("uniform", "power"))
    ],
    ids=str,
)
def test_temperatures_below_the_spacing_of_scores(
    request: pytest.FixtureRequest, where: str, dtype: torch.dtype, cdf: str, tau: float
) -> None:
    """Ties share what is left of k. Of the scores' own precision, t = hi + lo has nothing for that."""
    kernels = request.getfixturevalue(where)
    x = torch.randn(3, 20, generator=torch.Generator().manual_seed(6)).to(dtype)
    x[1] = x[1].round(decimals=1)  # several ties
    x[2] = 0.7
    for k in (4.5, 19.3):
        args = (f64(tau), cdf, CDFS[cdf], "y")
        y, _, _ = kernels.soft_topk(x, f64(k), *args)
        want, _, _ = reference.soft_topk(x.double(), f64(k), *args)
        assert error(y, want) <= 5e-7
        torch.testing.assert_close(
            y.double().sum(-1), torch.full((3,), k, dtype=torch.float64), rtol=1e-6, atol=0
        )


@pytest.mark.parametrize(
    ("where", "dtype", "output", "cdf"),
    [
        (where, dtype, output, ("uniform", "power")[(i + j + m) % 2])
        for i, where in enumerate(("kernels", "split"))
        for j, dtype in enumerate(FORWARD)
        for m, output in enumerate(("y", "log", "threshold"))
    ],
    ids=str,
)
def test_gaps_of_compact_support(
    request: pytest.FixtureRequest, where: str, cdf: str, output: str, dtype: torch.dtype
) -> None:
    """t is the middle of the gap, so that its gradient is ½ on either side, shared by equal entries."""
    kernels = request.getfixturevalue(where)
    x = torch.zeros(3, 37, dtype=dtype)
    x[:, 5::7], x[:, 36], x[2, 8] = 2.0, 9.0, torch.inf  # 5 entries of 2, one of 9
    k, tau = f64([1.0, 6.0, 2.0]), f64(0.25)
    _, hi, lo = kernels.soft_topk(x, k, tau, cdf, CDFS[cdf], output)
    v = torch.arange(37.0, dtype=dtype).expand(3, 37)
    v = v[:, :0] if output == "threshold" else v
    dx, dk, dtau = kernels.soft_topk_backward(v, f64([4.0, 2.0, 1.0]), x, hi, lo, tau, cdf, CDFS[cdf], output)
    want = torch.zeros_like(x)
    want[0, 5::7], want[0, 36] = 0.4, 2.0
    want[1] = torch.where(x[1] == 2, 0.2, torch.where(x[1] == 0, 1 / 31, 0.0))
    want[2, 5::7], want[2, 36] = 0.1, 0.5
    torch.testing.assert_close(dx, want)
    assert dtau.tolist() == [-2.0, -1.0, -0.5]
    if output == "threshold":
        assert dk.tolist() == [0, 0, 0]
    else:
        low = [v[0, 5::7].mean().item(), v[1][x[1] == 0].mean().item(), v[0, 5::7].mean().item()]
        high = [36.0, v[1, 5::7].mean().item(), 36.0]
        below = 0.0 if output == "log" else 0.5
        expected = [0.5 * a + below * b for a, b in zip(high, low, strict=True)]
        torch.testing.assert_close(dk, f64(expected), rtol=1e-6, atol=0)


def hard_rows(n: int) -> Tensor:
    """Scores that float32 arithmetic could fail on: near ties far from 0, heavy tails of either sign, one
    entry far off, an equal half, many entries in the tail beside one near t, and multiples of a half."""
    r, u = torch.rand(2, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    normal = math.sqrt(2) * torch.erfinv(2 * r - 1)
    far, equal, beside = normal.clone(), normal.clone(), 0.01 * normal - 4
    far[0], equal[::2], beside[0] = 1e4, 0.5, 0.0
    x = [
        normal, 1e6 + normal, -1e6 - normal, torch.tan(math.pi * (u - 0.5)), torch.exp(3 * normal),
        -torch.exp(3 * normal), far, -far.flip(0), equal, beside, (4 * normal).round() / 2,
    ]  # fmt: skip
    return torch.stack(x).float()


@every_cdf
@pytest.mark.parametrize(
    ("n", "k", "tau"), [(2, 1.0, 0.3), (7, 1.5, 0.01), (45, 18.0, 1.0), (45, 44.5, 0.1), (2000, 40.25, 1.0)]
)
def test_rows_that_are_hard_for_float32(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, cdf: str, n: int, k: float, tau: float
) -> None:
    monkeypatch.setattr(kernels.layout, "RESCUE", 2048)
    if n < 100:  # all in one program
        monkeypatch.setattr(
            kernels.layout, "tile", lambda rows, n: kernels.layout.Tile(16, -(-n // 32), 32, 1)
        )
    x, args = hard_rows(n), (f64(tau), cdf, CDFS[cdf], "y")
    y, hi, lo = kernels.soft_topk(x, f64(k), *args)
    want, *t = reference.soft_topk(x.double(), f64(k), *args)
    assert error(y, want) <= FORWARD[torch.float32]
    goal = 1e-6 * max(1.0, min(k, n - k)) + n * torch.finfo(torch.float32).eps / 2
    assert error(y.double().sum(-1), torch.full((len(x),), k)) <= goal
    v = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    got = kernels.soft_topk_backward(v, torch.zeros(()), x, hi, lo, *args)
    wanted = reference.soft_topk_backward(v.double(), torch.zeros(()), x.double(), *t, *args)
    # z has a relative error of 1e-7, which the logarithm of a density far out multiplies
    near = ((x.double() - (t[0] + t[1])[:, None]) / tau).abs().amin(-1)
    tolerance = BACKWARD[torch.float32] + 2e-7 * (near**2 if cdf == "normal" else near)
    for a, b in zip(got, wanted, strict=True):
        a, b = a.double().reshape(len(x), -1), b.reshape(len(x), -1)
        assert ((a - b).abs().amax(-1) <= tolerance * (1 + b.abs().amax(-1))).all()


@every_cdf
def test_thresholds_of_float32_have_the_digits_of_float64(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, cdf: str
) -> None:
    monkeypatch.setattr(kernels.layout, "RESCUE", 64)
    monkeypatch.setattr(kernels.layout, "tile", lambda rows, n: kernels.layout.Tile(32, 2, 32, 1))
    parts = [rows(scores, 45, torch.float32) for scores in oracles.ADVERSARIAL]
    x, k = (torch.cat([part[i][2::4] for part in parts]) for i in (0, 1))
    scores, counts, tau = torch.cat((x, hard_rows(45))), torch.cat((k, f64([18.25] * 11))), 0.1
    args = (counts, f64(tau), cdf, CDFS[cdf], "threshold")
    _, *got = kernels.soft_topk(scores, *args)
    _, *want = reference.soft_topk(scores.double(), *args)
    # 2⁻⁵² of the scores is all that float64 holds of hi + lo, in τ
    size = scores.masked_fill(scores.isinf(), 0).abs().amax(-1).double()
    assert (error_in_tau(got, want, tau) <= 1e-12 + size / tau * 2**-52).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("layout", ["together", "alone", "past", "split"])
def test_a_rounded_threshold_is_its_two_parts_in_the_scores_dtype(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, layout: str, dtype: torch.dtype
) -> None:
    """Also that of rows which are searched in float64, and of rows without a finite one."""
    kernels = request.getfixturevalue("split" if layout == "split" else "kernels")
    tile = {"together": (4, 1, 64, 1), "alone": (1, 2, 32, 1), "past": (1, 2, 16, 1, True)}.get(layout)
    if tile:
        monkeypatch.setattr(kernels.layout, "tile", lambda rows, n: kernels.layout.Tile(*tile))
    x = torch.randn(7, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[1], x[2, 3], x[3, ::2], x[4, ::2] = 1.0, torch.nan, -torch.inf, torch.inf
    k = f64([3.5, 3.5, 3.5, 20.0, 30.0, 0.0, 50.0])
    args = (k, f64(0.3), "logistic", 0.0)
    t, hi, lo = kernels.soft_topk(x, *args, "rounded")
    _, *parts = kernels.soft_topk(x, *args, "threshold")
    _, *want = reference.soft_topk(x.double(), *args, "threshold")
    assert t.dtype == dtype and t.shape == (7,)
    assert t.isnan().tolist() == [i == 2 for i in range(7)] and t[5:].tolist() == [torch.inf, -torch.inf]
    for a, b in zip((hi, lo, t), (*parts, (hi + lo).to(dtype)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(
        t, sum(want).to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-12, equal_nan=True
    )


@pytest.mark.parametrize(("cdf", "steps"), [("logistic", 1), ("laplace", 1), ("normal", 1), ("power", 2)])
@pytest.mark.parametrize("layout", ["together", "alone", "past"])
def test_ordinary_thresholds_take_one_step_in_float64(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, layout: str, cdf: str, steps: int
) -> None:
    """No row is searched in float64. Where the support is compact, the second step finds the first right."""

    def none(*_: object) -> None:
        raise AssertionError("a row was searched in float64")

    tile = {"together": (4, 1, 256, 1), "alone": (1, 2, 128, 1), "past": (1, 2, 64, 1, True)}[layout]
    monkeypatch.setattr(kernels.layout, "tile", lambda rows, n: kernels.layout.Tile(*tile))
    monkeypatch.setattr(kernels.float64, "find_in_float64", none)
    monkeypatch.setattr(kernels.polish, "STEPS", kernels.polish.tl.constexpr(steps))
    x = torch.randn(4, 250, generator=torch.Generator().manual_seed(2))
    args = (f64(31.3), f64(0.7), cdf, CDFS[cdf], "threshold")
    _, *got = kernels.soft_topk(x, *args)
    _, *want = reference.soft_topk(x.double(), *args)
    assert error_in_tau(got, want, 0.7).max() <= 1e-12


def soft_topk_by_bisection(x: Tensor, k: Tensor, p: float) -> Tensor:
    """Of rows at τ = 1, with Power(p) in float64."""
    x = x.double()
    low, high = x.amin(-1, keepdim=True) - 1, x.amax(-1, keepdim=True)
    for _ in range(60):
        middle = (low + high) / 2
        many = ((x - middle).clamp(0, 1) ** (1 / (p - 1))).sum(-1, keepdim=True) > k[:, None]
        low, high = torch.where(many, middle, low), torch.where(many, high, middle)
    return (x - high).clamp(0, 1) ** (1 / (p - 1))


@pytest.mark.parametrize("p", [1.15, 4 / 3, 1.5, 1.9])
def test_powers_of_many_rows(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, p: float) -> None:
    """A step that ends too early, or a rounding error that the exponent multiplies, shows in few rows."""
    # many rows in a program: the interpreter spends most of its time between instructions
    monkeypatch.setattr(kernels.layout, "tile", lambda rows, n: kernels.layout.Tile(64, 1, 256, 1))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(384, 200, generator=generator)
    k = f64([2.25, 20.5, 73.0, 140.75]).repeat(96)
    y, _, _ = kernels.soft_topk(x, k, f64(1.0), "power", p, "y")
    assert error(y, soft_topk_by_bisection(x, k, p)) <= FORWARD[torch.float32]


def test_one_evaluation_does_ordinary_rows(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.counted, "EVALUATIONS", 0)
    leave_hard_rows_out(kernels, monkeypatch)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(7))
    y, _, _ = kernels.soft_topk(x, f64(8.0), f64(1.0), "logistic", 0.0, "y")
    want, _, _ = reference.soft_topk(x.double(), f64(8.0), f64(1.0), "logistic", 0.0, "y")
    assert error(y, want) <= 5e-7
    x[3] *= 100  # and only these rows
    y, _, _ = kernels.soft_topk(x, f64(8.0), f64(1.0), "logistic", 0.0, "y")
    assert torch.equal(y.isnan().any(-1), torch.arange(4) == 3)


@every_cdf
def test_one_launch_a_direction(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, cdf: str) -> None:
    launches: list[str] = []
    monkeypatch.setattr(kernels.launch, "watch", launches.append)
    x = torch.randn(2, 40, generator=torch.Generator().manual_seed(8))
    for scores, output, grad_lo, names in (
        (x, "y", torch.zeros(()), ["solve", "pull_rows"]),
        (x, "threshold", torch.ones(2), ["solve", "pull_rows"]),
        (x.double(), "y", torch.zeros(()), ["solve_in_float64", "pull_rows_in_float64"]),
    ):
        launches.clear()
        args = (f64(1.0), cdf, CDFS[cdf], output)
        _, hi, lo = kernels.soft_topk(scores, f64(3.0), *args)
        kernels.soft_topk_backward(scores, grad_lo, scores, hi, lo, *args)
        assert launches == names


def test_one_number_goes_by_value(kernels: ModuleType) -> None:
    values = kernels.layout.values
    device = torch.device("cpu")
    pointer, stride, high, low = values(f64(100_000.3), torch.Size((3,)), device)
    assert pointer is None and stride == 0
    assert high == torch.tensor(100_000.3).item() and abs(high + low - 100_000.3) < 1e-15 * 1e5
    assert values(f64(1e300), torch.Size((3,)), device).pointer is not None
    assert values(f64([1.0, 2.0, 3.0]), torch.Size((3,)), device).stride == 1


def test_the_median_row_takes_few_passes(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ordinary scores are solved to float32 accuracy within 6 evaluations."""
    x = torch.randn(16, 40, generator=torch.Generator().manual_seed(4)) * torch.linspace(0.1, 5, 16)[:, None]
    monkeypatch.setattr(kernels.counted, "EVALUATIONS", 6)
    leave_hard_rows_out(kernels, monkeypatch)
    for cdf, shape in CDFS.items():
        y, _, _ = kernels.soft_topk(x, f64(4.0), f64(1.0), cdf, shape, "y")
        want, _, _ = reference.soft_topk(x.double(), f64(4.0), f64(1.0), cdf, shape, "y")
        assert error(y, want) <= 5e-7, cdf


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_compiles_for_a_device_that_is_not_there(dtype: str, tmp_path: Path) -> None:
    """The interpreter accepts code that the compiler may reject. What float32 takes is in test_resources."""
    out = tmp_path / "notes.json"
    # not the products of operators, CDFs and shapes
    only = rf"^(?!.*, (logistic|laplace|normal|uniform|power))(?!soft_topk_magnitude, ).* {dtype}"
    command = [sys.executable, "-m", "benchmarks.ptx_guard", "note", ROOT, out, "--machine", "--only", only]
    subprocess.run(list(map(str, command)), cwd=ROOT, check=True, timeout=3000)
    found = json.loads(out.read_text(encoding="utf-8"))
    assert len(found) > 100
    assert {place: each["error"] for place, each in found.items() if "error" in each} == {}


def test_the_table_of_cdfs_is_complete() -> None:
    named = {cdfs.resolve(name).name for name in ("logistic", "laplace", "normal", "uniform")}
    assert set(CDFS) == named | {cdfs.Power(4 / 3).name}


def test_a_cdf_that_the_kernels_do_not_have_is_named(kernels: ModuleType) -> None:
    assert [kernels.layout.cdf_id(name) for name in CDFS] == list(range(len(CDFS)))
    with pytest.raises(ValueError, match=r"have the CDFs 'logistic', .*'power', but not 'gumbel'"):
        kernels.layout.cdf_id("gumbel")


def test_every_cdf_has_traits_that_agree_with_it(kernels: ModuleType) -> None:
    functions = sys.modules["khot._kernels.triton.functions"]
    assert len(functions.TRAITS.value) == len(CDFS)
    for name, shape in CDFS.items():
        F, which = cdfs.resolve(name, shape), functions.CDFS[name]
        traits = functions.traits(which)
        assert traits.full_support == F.full_support
        if name == "power":
            assert sum(kernels.layout.power(F)) == pytest.approx(3, abs=1e-14)
            assert kernels.layout.whole(F) == 3 and kernels.layout.whole(cdfs.Power(1.15)) == 0
        else:
            assert traits.median == pytest.approx(F.median, abs=0)
            assert traits.moments == pytest.approx((F.mean, F.variance))


def test_an_id_that_no_cdf_has_fails(kernels: ModuleType) -> None:
    functions = sys.modules["khot._kernels.triton.functions"]
    with pytest.raises(ValueError, match="no CDF has the id 5"):
        functions.full_support(len(CDFS))


@pytest.mark.parametrize("cdf", ["uniform", "power"])
@every_dtype
def test_logs_where_y_leaves_0(kernels: ModuleType, cdf: str, dtype: torch.dtype) -> None:
    """There, log y multiplies the error of z by e/z; the threshold has the digits for it."""
    x = torch.randn(3, 7, generator=torch.Generator().manual_seed(7), dtype=torch.float64).float().to(dtype)
    args = f64([2.3, 3.0, 4.6]), f64([0.5, 1.0, 1.7]), cdf, CDFS[cdf], "log"
    got, _, _ = kernels.soft_topk(x, *args)
    want, _, _ = reference.soft_topk(x.double(), *args)
    limit = log_limit(cdfs.resolve(cdf, CDFS[cdf]), want, FORWARD[dtype])
    assert torch.equal(got.isinf(), want.isinf())
    assert ((got.double() - want).abs().nan_to_num(0) <= limit).all()
    assert error(got, want, relative=True) <= 1e-6
