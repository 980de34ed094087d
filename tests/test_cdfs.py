"""Every CDF against 50 digits: values, both tails, the ends, derivatives, moments, names, errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import grad

import oracles
from khot import cdfs
from oracles import mp

TABLE: dict[str, tuple[cdfs.CDF, oracles.MpCdf]] = {
    "logistic": (cdfs.Logistic(), oracles.CDFS["logistic"]),
    "laplace": (cdfs.Laplace(), oracles.CDFS["laplace"]),
    "normal": (cdfs.Normal(), oracles.CDFS["normal"]),
    "uniform": (cdfs.Uniform(), oracles.CDFS["uniform"]),
    "power_1.15": (cdfs.Power(1.15), oracles.power(1.15)),
    "power_4/3": (cdfs.Power(4 / 3), oracles.power(4 / 3)),
    "power_1.9": (cdfs.Power(1.9), oracles.power(1.9)),
    "power_3": (cdfs.Power(3), oracles.power(3)),
}
NAMED = ["logistic", "laplace", "normal", "uniform"]
OF_Z, OF_Y = ["cdf", "pdf", "log_cdf", "log_pdf"], ["icdf", "potential"]

each_cdf = pytest.mark.parametrize("name", TABLE)
each_method = pytest.mark.parametrize("method", OF_Z + OF_Y)
each_float = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])

_POSITIVE = [1e-30, 1e-12, 1e-5, 1e-3, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1 - 1e-9, 1.0, 1 + 1e-9, 1.1]
_POSITIVE += [1.5, 2.0, 3.0, 5.0, 8.3, 13.0, 20.0, 36.0]
_POSITIVE += [37.5, 50.0, 88.0, 103.0, 200.0, 350.0, 700.0, math.inf]
Z = sorted({0.0, *_POSITIVE, *(-z for z in _POSITIVE), *np.linspace(-4.9, 4.9, 41)})
Y = [0.0, 1e-300, 1e-100, 1e-40, 1e-20, 1e-16, 1e-12, 1e-8, 1e-5, 1e-3, 0.01, 0.1, 0.3, 0.49, 0.5 - 1e-9]
Y += [0.5, 0.5 + 1e-12, 0.51, 0.7, 0.9, 0.99, 0.999, 1 - 1e-5, 1 - 1e-9, 1 - 2**-53, 1.0]


def points(method: str, dtype: torch.dtype) -> Tensor:
    return torch.tensor(Y if method in OF_Y else Z, dtype=torch.float64).to(dtype).unique()


def slopes(f: Callable[[Any], Any], a: float, h: Any) -> tuple[Any, Any]:
    """The first two derivatives of an oracle at a; None where f is not smooth within 2h."""
    low2, low, value, high, high2 = (f(mp.mpf(a) + i * h) for i in (-2, -1, 0, 1, 2))
    if not all(map(mp.isfinite, (low2, low, value, high, high2))):
        return None, None

    def agreed(left: Any, middle: Any, right: Any) -> Any:
        return middle if abs(left - right) <= mp.mpf("1e-8") * (1 + abs(middle)) else None

    first = agreed((value - low) / h, (high - low) / (2 * h), (high - value) / h)
    bends = [
        (c - 2 * b + a) / h**2 for a, b, c in ((low2, low, value), (low, value, high), (value, high, high2))
    ]
    return first, None if first is None else agreed(*bends)


def intrinsic(name: str, method: str, a: float, want: Any) -> Any:
    """The error, in units of eps, of any formula with rounded constants and inner results."""
    if name.startswith("power") and method in ("cdf", "pdf", "tail") and 0 < a < 1:
        return abs(want * mp.log(a))  # z^e with e = 1/(p − 1) rounded
    if (name, method) == ("normal", "potential") and 0 < a < 1:
        return abs(want) * TABLE[name][1].icdf(a) ** 2  # φ(z) with z = Φ⁻¹(y) rounded
    return mp.zero


def assert_accurate(
    name: str, method: str, got: Tensor, at: Tensor, f: Callable[[Any], Any], units: int = 4
) -> None:
    """Within a few eps of want + at·want', the error that rounding the argument makes: so in a tail of Φ
    z² eps relative, elsewhere a few eps, and next to a zero of want a few eps of what cancels there.

    What is below the smallest normal number may be 0.
    """
    eps, tiny = torch.finfo(got.dtype).eps, torch.finfo(got.dtype).tiny
    for a, value in zip(at.tolist(), got.tolist(), strict=True):
        want = f(mp.mpf(a))
        if not mp.isfinite(want):
            assert value == float(want), (name, method, a)
            continue
        moved = mp.zero
        if a and math.isfinite(a) and (method not in OF_Y or 0 < a < 1):
            moved = a * (slopes(f, a, abs(mp.mpf(a)) * mp.mpf("1e-25"))[0] or 0)
        allowed = units * eps * (abs(want) + abs(moved) + intrinsic(name, method, a, want)) + tiny
        assert abs(value - want) <= allowed, (name, method, a, value, float(want), float(allowed))


@each_float
@each_method
@each_cdf
def test_value(name: str, method: str, dtype: torch.dtype) -> None:
    F, oracle = TABLE[name]
    at = points(method, dtype)
    got = getattr(F, method)(at)
    assert got.dtype == dtype
    assert_accurate(name, method, got, at, getattr(oracle, method))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@each_method
@each_cdf
def test_half_precision(name: str, method: str, dtype: torch.dtype) -> None:
    """The methods accept any floating-point dtype. The errors are larger, as every step rounds to 8 or 11
    bits."""
    F, oracle = TABLE[name]
    at = torch.tensor([-3.0, -0.5, 0.0, 0.25, 0.5, 0.9, 1.0, 3.0, math.inf, -math.inf])
    at = (torch.tensor([0.01, 0.25, 0.5, 0.75, 0.98]) if method in OF_Y else at).to(dtype)
    got = getattr(F, method)(at)
    assert got.dtype == dtype
    assert_accurate(name, method, got, at, getattr(oracle, method), units=16)


@each_float
@each_cdf
def test_log_hazard(name: str, dtype: torch.dtype) -> None:
    """log f − log F: to a few eps of these two, and of the result where they cancel as they do for Φ."""
    F, oracle = TABLE[name]
    eps = torch.finfo(dtype).eps
    z = points("log_cdf", dtype)
    z = z[z.isfinite() & (F.cdf(z) > 0)] if not F.full_support else z[z.isfinite()]
    for a, value in zip(z.tolist(), F.log_hazard(z).tolist(), strict=True):
        terms = oracle.log_pdf(mp.mpf(a)), oracle.log_cdf(mp.mpf(a))
        if not mp.isfinite(terms[0]):
            assert value == -math.inf, a
            continue
        want = terms[0] - terms[1]
        size = abs(want) if name == "normal" and a < 0 else abs(terms[0]) + abs(terms[1])
        assert abs(value - want) <= 4 * eps * (1 + size), (a, value, float(want))


@each_float
@each_cdf
def test_tail_is_the_smaller_of_F_and_its_complement(name: str, dtype: torch.dtype) -> None:
    F, oracle = TABLE[name]
    z = points("cdf", dtype)
    z = z[z.isfinite()]
    above = z > F.median

    def tail(a: Any) -> Any:
        if oracle.compact:
            return 1 - oracle.cdf(a) if a > mp.mpf(F.median) else oracle.cdf(a)
        return oracle.cdf(-abs(a))

    assert_accurate(name, "tail", F.tail(z, above), z, tail)
    # where 1 − F cancels (power, z near 1) its logarithm has the condition number of log(1 − z)
    got, tails = F.log_tail(z, above), [tail(mp.mpf(a)) for a in z.tolist()]
    for a, value, exact in zip(z.tolist(), got.tolist(), tails, strict=True):
        if exact == 0 or (exact < torch.finfo(dtype).tiny and oracle.compact):
            continue
        want, eps = mp.log(exact), torch.finfo(dtype).eps
        rate = oracle.pdf(a) / exact
        assert abs(value - want) <= 8 * eps * (1 + abs(want) + abs(a) * rate), (a, value, float(want))


@each_method
@each_cdf
def test_nan_stays_nan_and_alone(name: str, method: str) -> None:
    F, _ = TABLE[name]
    got = getattr(F, method)(torch.tensor([0.25, math.nan, 0.75], dtype=torch.float64))
    assert got.isnan().tolist() == [False, True, False]


@each_method
@each_cdf
def test_any_shape(name: str, method: str) -> None:
    f = getattr(TABLE[name][0], method)
    x = torch.linspace(0.1, 0.9, 12, dtype=torch.float64).reshape(3, 4)
    before = x.clone()
    torch.testing.assert_close(f(x.T), f(x).T, rtol=1e-15, atol=1e-15)
    torch.testing.assert_close(f(x[1, 2]), f(x)[1, 2], rtol=1e-15, atol=1e-15)
    torch.testing.assert_close(f(x[:, :1].expand(3, 4)), f(x[:, :1]).expand(3, 4), rtol=1e-15, atol=1e-15)
    torch.testing.assert_close(torch.vmap(f)(x), f(x), rtol=1e-15, atol=1e-15)
    assert f(x[:0]).shape == (0, 4) and f(x[0, 0]).shape == ()
    assert torch.equal(x, before)


@each_float
@each_cdf
def test_icdf_inverts_cdf(name: str, dtype: torch.dtype) -> None:
    F, oracle = TABLE[name]
    eps = torch.finfo(dtype).eps
    z = points("cdf", dtype)
    y = F.cdf(z)
    keep = (y > torch.finfo(dtype).tiny) & (y < 1)
    back = F.icdf(y)[keep]
    assert keep.sum() > 10
    for a, b in zip(z[keep].tolist(), back.tolist(), strict=True):
        rate = oracle.cdf(a) / oracle.pdf(a)  # dz for a relative change in y
        slack = abs(mp.log(a)) if name.startswith("power") else 0
        assert abs(b - a) <= 8 * eps * (abs(a) + (1 + a * a + slack) * rate), (a, b)


# ----------------------------------------------------------------------------------------- derivatives

SMOOTH_Y = [0.07, 0.2, 0.43, 0.61, 0.88]


@pytest.mark.parametrize("order", [1, 2])
@each_method
@each_cdf
def test_derivative_is_that_of_50_digits(name: str, method: str, order: int) -> None:
    """Wherever it exists: at the median too, and beyond the support, where autograd must give 0, not NaN."""
    F, oracle = TABLE[name]
    f = getattr(oracle, method)
    places = [*SMOOTH_Y, 0.5, 0.5 + 1e-09] if method in OF_Y else Z
    places = [a for a in places if math.isfinite(a) and not 0 < abs(a) < 1e-12]
    wants = [(a, slopes(f, a, max(1, abs(a)) * mp.mpf("1e-15"))[order - 1]) for a in places]
    wants = [(a, want) for a, want in wants if want is not None]
    assert len(wants) > 5
    at = torch.tensor([a for a, _ in wants], dtype=torch.float64, requires_grad=True)
    (got,) = grad(getattr(F, method)(at).sum(), at, create_graph=True)
    if order == 2:
        (got,) = grad(got.sum(), at) if got.requires_grad else (torch.zeros_like(at),)
    for (a, want), value in zip(wants, (got + torch.zeros_like(at)).tolist(), strict=True):
        # z² eps in the tails of Φ, as for the values; 1e-14 absolute, where 1 − F is what remains of 1
        assert abs(value - want) <= 1e-12 * (1 + a * a / 100) * abs(want) + 1e-14, (a, value, float(want))


@each_cdf
def test_derivative_is_finite_at_kinks_and_infinities(name: str) -> None:
    """Operators evaluate F there for masked and pinned entries."""
    z = torch.tensor([-math.inf, -700.0, 0.0, 1.0, 700.0, math.inf], dtype=torch.float64, requires_grad=True)
    (got,) = grad(TABLE[name][0].cdf(z).sum(), z)
    assert got.isfinite().all() and (got >= 0).all()


@each_cdf
def test_slope_of_potential_is_icdf(name: str) -> None:
    F, _ = TABLE[name]
    y = torch.tensor([1e-300, 1e-20, 1e-5, *SMOOTH_Y, 0.5, 1 - 1e-9], dtype=torch.float64, requires_grad=True)
    (got,) = grad(F.potential(y).sum(), y)
    # of Φ: d(−φ(z))/dy = zφ(z)·(1/φ(z)), and φ(z) is off by z² eps on both sides
    torch.testing.assert_close(got, F.icdf(y), rtol=1e-12, atol=1e-14)
    h, y = 1e-5, torch.tensor(SMOOTH_Y, dtype=torch.float64)
    central = (F.potential(y + h) - F.potential(y - h)) / (2 * h)
    torch.testing.assert_close(central, F.icdf(y), rtol=1e-7, atol=1e-7)  # h² ω''' / 6


# ------------------------------------------------------------------------------------ what a CDF says


@each_float
@each_cdf
def test_conjugate_is_that_of_the_potential(name: str, dtype: torch.dtype) -> None:
    F, exact = TABLE[name]
    z = points("cdf", dtype)
    z = z[z.abs() < 1e3]
    # yz − ω(y) at its maximum, y = F(z), in 50 digits; where y rounds to 1 the maximum is z − ω(1)
    y = [exact.cdf(mp.mpf(v)) for v in z.tolist()]
    want = [float(b * mp.mpf(v) - exact.potential(b)) for v, b in zip(z.tolist(), y, strict=True)]
    got, want = F.conjugate(z), torch.tensor(want, dtype=torch.float64)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), want, rtol=4 * eps, atol=4 * eps)
    ends = F.conjugate(torch.tensor([-math.inf, math.inf], dtype=dtype))
    assert ends.tolist() == [0, math.inf]


@each_cdf
def test_moments(name: str) -> None:
    F, oracle = TABLE[name]
    support = [0, 1] if oracle.compact else [-mp.inf, -10, 0, 10, mp.inf]
    with mp.workdps(20):
        mean = mp.quad(lambda z: z * oracle.pdf(z), support)
        square = mp.quad(lambda z: z * z * oracle.pdf(z), support)
    assert F.mean == pytest.approx(float(mean), rel=1e-13, abs=1e-13)
    assert F.variance == pytest.approx(float(square - mean**2), rel=1e-13)
    assert F.median == pytest.approx(float(oracle.icdf(0.5)), rel=1e-15, abs=1e-50)
    assert F.full_support is not oracle.compact


@pytest.mark.parametrize("name", NAMED)
def test_names_and_objects_resolve(name: str) -> None:
    F, _ = TABLE[name]
    assert cdfs.resolve(name) == F and F.name == name
    assert cdfs.resolve(F) is F


def test_power_resolves() -> None:
    F = cdfs.Power(4 / 3)
    assert cdfs.resolve(F) is F
    assert cdfs.resolve(F.name, F.shape) == F


def test_table_is_complete() -> None:
    public = {getattr(cdfs, n) for n in cdfs.__all__ if isinstance(getattr(cdfs, n), type)} - {cdfs.CDF}
    assert {type(F) for F, _ in TABLE.values()} == public


@each_cdf
def test_repr_equality_hash(name: str) -> None:
    F, _ = TABLE[name]
    twin = eval(repr(F), vars(cdfs).copy())
    assert twin == F and hash(twin) == hash(F) and repr(twin) == repr(F)
    assert [other for other, _ in TABLE.values() if other == F] == [F]
    with pytest.raises(FrozenInstanceError):
        F.p = 1.5
    assert cdfs.Power(2) == cdfs.Power(2.0)


@pytest.mark.parametrize("name", ["gumbel", "Logistic", "", "power", "logistic "])
def test_unknown_name_lists_the_allowed(name: str) -> None:
    with pytest.raises(ValueError, match=r"^cdf must be one of") as info:
        cdfs.resolve(name)
    assert all(part in str(info.value) for part in (*map(repr, NAMED), "Power(p)", repr(name)))


@pytest.mark.parametrize("p", [1.1, 3.5, 1, 0, -1.5, math.nan, math.inf, 1.1499999, 3.0000001, 10**400])
def test_power_out_of_range(p: float) -> None:
    with pytest.raises(ValueError, match=r"^p must lie in \[1.15, 3\], but got") as info:
        cdfs.Power(p)
    assert str(p) in str(info.value)


@pytest.mark.parametrize("p", ["x", None, True, 1.5j, [1.5], torch.tensor(1.5)])
def test_power_of_wrong_type(p: Any) -> None:
    with pytest.raises(TypeError, match=f"^p must be a number .* got {type(p).__name__}"):
        cdfs.Power(p)


def test_the_smallest_p_is_what_float32_bears() -> None:
    """In float32 F is within 5e-7 for p = 1.15; a z that was rounded once is not, for p = 1.1, even if all
    else is exact."""
    z = torch.linspace(0.5, 1, 20_001, dtype=torch.float64)[:-1]
    F = cdfs.Power(1.15)
    assert (F.cdf(z.float()).double() - F.cdf(z.float().double())).abs().max() <= 5e-7
    rounded = z * (1 - torch.finfo(torch.float32).eps / 2)
    assert (F.cdf(rounded) - F.cdf(z)).abs().max() <= 5e-7
    assert (rounded**10 - z**10).abs().max() > 5e-7
