"""The CDFs that soften a count: one choice of F, one relaxed top-k operator.

Every operator of khot replaces the step in "how many entries lie above b?" by a CDF F. This module contains
the CDFs of the papers, each with the functions that the solver and the gradients need, accurate in both
tails. It also contains the base class from which you derive your own.
"""

from __future__ import annotations

import itertools
import math
import weakref
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from khot._core.names import unknown
from khot._core.precision import wide_dtype, widen

__all__ = ["CDF", "CDFName", "Laplace", "Logistic", "Normal", "Power", "Uniform", "resolve"]


def __dir__() -> list[str]:
    return __all__


NEWTON = 4  # Newton steps to a quantile in float32
TINIEST = 1e-37  # the smallest probability that those steps distinguish from 0
DOUBLINGS = 1100  # of a bracket for a quantile: enough to exceed float64's range
STEPS = 200  # towards that quantile: at least a quarter of them halve the bracket
QUARTILES = 1.3489795003921634  # the distance between the quartiles of the standard normal distribution

CDFName = Literal["logistic", "laplace", "normal", "uniform"]
"""The names that ``cdf=`` takes."""
_OWN: weakref.WeakValueDictionary[str, CDF] = weakref.WeakValueDictionary()  # users' CDFs by their keys
_numbers = itertools.count()


class CDF:
    """A cumulative distribution function F with density f, as used to soften a count.

    To use your own, derive a class from this one and define :meth:`cdf` and :meth:`pdf`; every operator that
    takes ``cdf=`` takes an object of it. It runs on the reference kernels, on any device, with exact
    gradients to second order, under ``vmap`` and ``torch.compile``. All other methods have a default that is
    derived from these two. Override :meth:`icdf` if it has a closed form, because the default searches.
    Override :meth:`sf`, :meth:`log_cdf`, :meth:`log_sf` and :meth:`log_pdf` if the default is inaccurate in a
    tail.

    A class derived from :class:`Logistic` or another CDF of this module keeps that CDF's compiled kernels as
    long as it overrides nothing. A class that overrides something is treated as a new CDF, and a class that
    overrides :meth:`cdf` inherits nothing else except the support.

    All methods are elementwise on floating-point tensors, keep shape and dtype, and are differentiable
    wherever F is. ``z`` is any real number, infinities included; ``y`` lies in [0, 1].

    Attributes:
        name: the name in ``cdf="..."`` and in error messages.
        shape: the parameter p of :class:`Power`; 0 for CDFs without a parameter.
        median: F⁻¹(½).
        mean, variance: the moments of a variable distributed as F. They only guide the solver's first
            guess, so that a distribution without moments may give any location and squared scale. The
            defaults are the median, and the variance of the normal distribution with the same quartiles.
        support: the interval in which f > 0: the whole line, or an interval bounded on both sides. If it is
            bounded, y can be exactly 0 and 1.
        full_support: whether the support is the whole line.
        symmetric: whether F(−z) = 1 − F(z); the default of :meth:`sf` then takes the upper tail from F(−z).
        smooth: whether f is continuous, so that a Newton step next to the root squares the error. The default
            is ``full_support``.
        density_from_value: whether :meth:`pdf_from_cdf` computes f from y without losing digits.

    Source of the example: Student's distribution with 3 degrees of freedom.

    Example:
        >>> class Student3(khot.cdfs.CDF):
        ...     name, symmetric = "student3", True
        ...
        ...     def cdf(self, z):
        ...         t = torch.atan(z / 3**0.5)
        ...         return 0.5 + (t + 0.5 * torch.sin(2 * t)) / torch.pi
        ...
        ...     def pdf(self, z):
        ...         return 2 / (torch.pi * 3**0.5 * (1 + z * z / 3) ** 2)
        >>> y = khot.soft_topk(torch.tensor([1.0, 3.0, 2.0, 0.0]), 2, tau=0.5, cdf=Student3())
        >>> y
        tensor([0.1955, 0.9712, 0.8045, 0.0288])
    """

    name: ClassVar[str] = "custom"
    support: ClassVar[tuple[float, float]] = (-math.inf, math.inf)
    symmetric: ClassVar[bool] = False
    density_from_value: ClassVar[bool] = False
    _built_in: ClassVar[bool] = False

    def __init_subclass__(cls, built_in: bool = False, **options: Any) -> None:
        super().__init_subclass__(**options)
        if math.isinf(cls.support[0]) != math.isinf(cls.support[1]):
            raise ValueError(f"support must be bounded on both sides or on neither, but got {cls.support}")
        if built_in:
            cls._built_in = True
        elif cls._built_in:  # inherited; a subclass that overrides something loses it
            parent = super(cls, cls)
            cls._built_in = not any(hasattr(parent, n) for n in vars(cls) if not n.startswith("__"))
            if "cdf" in vars(cls):  # the parent's other methods describe its own F, not the new one
                for name in _DERIVED:
                    if name not in vars(cls):
                        setattr(cls, name, vars(CDF)[name])

    def __new__(cls, *args: Any, **options: Any) -> CDF:
        self = super().__new__(cls)
        if not cls._built_in:
            object.__setattr__(self, "_key", f"own:{next(_numbers)}")  # works for frozen dataclasses, too
            _OWN[self._key] = self  # type: ignore[attr-defined]
        return self

    def __getstate__(self) -> dict[str, Any]:
        """The state without the key, because a copy, here or in another process, needs a key of its own."""
        return {name: value for name, value in vars(self).items() if name != "_key"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    @property
    def built_in(self) -> bool:
        """Whether compiled kernels know this CDF."""
        return self._built_in

    @property
    def key(self) -> tuple[str, float]:
        """The name and the parameter that stand for this CDF in an operator's schema: see :func:`resolve`."""
        return (self.name, self.shape) if self._built_in else (self._key, 0.0)  # type: ignore[attr-defined]

    @property
    def shape(self) -> float:
        return 0.0

    @property
    def median(self) -> float:
        return 0.0 if self.symmetric else self._quantile(0.5)

    @property
    def mean(self) -> float:
        return self.median

    @property
    def variance(self) -> float:
        return ((self._quantile(0.75) - self._quantile(0.25)) / QUARTILES) ** 2

    @property
    def full_support(self) -> bool:
        return self.support == (-math.inf, math.inf)

    @property
    def smooth(self) -> bool:
        return self.full_support

    def _quantile(self, y: float) -> float:
        return float(self.icdf(torch.tensor(y, dtype=torch.float64)))

    def cdf(self, z: Tensor) -> Tensor:
        """F(z), in [0, 1], with full relative accuracy in the lower tail."""
        raise NotImplementedError(f"{type(self).__name__} has to define cdf(z)")

    def pdf(self, z: Tensor) -> Tensor:
        """The density f(z) = F'(z)."""
        raise NotImplementedError(f"{type(self).__name__} has to define pdf(z)")

    def sf(self, z: Tensor) -> Tensor:
        """1 − F(z), with full relative accuracy in the upper tail."""
        return self.cdf(-z) if self.symmetric else 1 - self.cdf(z)

    def log_cdf(self, z: Tensor) -> Tensor:
        """log F(z), finite where F(z) underflows."""
        return torch.log(self.cdf(z))

    def log_sf(self, z: Tensor) -> Tensor:
        """log(1 − F(z)), finite where 1 − F(z) underflows."""
        return self.log_cdf(-z) if self.symmetric else torch.log(self.sf(z))

    def log_pdf(self, z: Tensor) -> Tensor:
        """log f(z), finite where f(z) underflows."""
        return torch.log(self.pdf(z))

    def log_hazard(self, z: Tensor) -> Tensor:
        """log(f(z)/F(z)), the logarithm of the derivative of log F."""
        return self.log_pdf(z) - self.log_cdf(z)

    def pdf_from_cdf(self, y: Tensor) -> Tensor:
        """f at the point where F = y, if ``density_from_value``."""
        raise NotImplementedError(f"{type(self).__name__} does not find its density from its value")

    def icdf(self, y: Tensor) -> Tensor:
        """The quantile F⁻¹(y). The default uses secant steps and bisection; it is not differentiable."""
        y = y.detach()
        inside = (y > 0) & (y < 1)
        low, high = torch.full_like(y, -1.0), torch.ones_like(y)
        for _ in range(DOUBLINGS):
            under, over = inside & (self.cdf(low) > y), inside & (self.cdf(high) < y)
            if not bool((under | over).any()):
                break
            low, high = torch.where(under, 2 * low, low), torch.where(over, 2 * high, high)
        last, z = low, 0.5 * low + 0.5 * high
        last_miss = self.cdf(last) - y
        for step in range(STEPS):
            miss = self.cdf(z) - y
            low, high = torch.where(miss < 0, z, low), torch.where(miss > 0, z, high)
            secant, middle = z - miss * (z - last) / (miss - last_miss), 0.5 * low + 0.5 * high
            use = (secant > low) & (secant < high) & (step % 4 < 3)
            new = torch.where(miss == 0, z, torch.where(use, secant, middle))
            moved, last, last_miss, z = (new - z).abs(), z, miss, new
            if not bool((inside & (moved > 4 * torch.finfo(y.dtype).eps * z.abs().clamp(min=1e-3))).any()):
                break
        ends = torch.where(y <= 0, -math.inf, math.inf).to(y.dtype)
        return torch.where(y.isnan(), y, torch.where(inside, z, ends))

    def potential(self, y: Tensor) -> Tensor:
        """ω(y) = ∫ F⁻¹, the regulariser whose capped-simplex argmax is the soft top-k of this CDF."""
        raise NotImplementedError(f"{type(self).__name__} has to define potential(y) for this")

    def conjugate(self, z: Tensor) -> Tensor:
        """ω*(z) = ∫ F from −∞ to z, the convex conjugate of the potential: ω(y) + ω*(z) ≥ yz."""
        raise NotImplementedError(f"{type(self).__name__} has to define conjugate(z) for this")

    def tail(self, z: Tensor, above: Tensor) -> Tensor:
        """min(F, 1 − F): 1 − F(z) where ``above`` (z > median), else F(z); computed without cancellation."""
        return self.cdf(-z.abs()) if self.symmetric else torch.where(above, self.sf(z), self.cdf(z))

    def log_tail(self, z: Tensor, above: Tensor) -> Tensor:
        """The logarithm of :meth:`tail`, finite where the tail underflows."""
        if self.symmetric:
            return self.log_cdf(-z.abs())
        return torch.where(above, self.log_sf(z), self.log_cdf(z))


# the attributes that follow from F and have a default in CDF
_DERIVED = (
    "conjugate",
    "density_from_value",
    "icdf",
    "log_cdf",
    "log_hazard",
    "log_pdf",
    "log_sf",
    "log_tail",
    "mean",
    "median",
    "pdf",
    "pdf_from_cdf",
    "potential",
    "sf",
    "shape",
    "smooth",
    "symmetric",
    "tail",
    "variance",
)


@dataclass(frozen=True)
class Logistic(CDF, built_in=True):
    """The CDF of sigmoid top-k (Wijk et al. 2025), and at τ = ε/2 of SOFT top-k (Xie et al. 2020).

        F(z) = σ(z) = 1/(1 + e^−z)

    Example:
        >>> x = torch.tensor([1.0, 3.0, 2.0, 0.0])
        >>> khot.soft_topk(x, 2, tau=0.5, cdf=khot.cdfs.Logistic())  # the default
        tensor([0.2689, 0.9526, 0.7311, 0.0474])
    """

    name: ClassVar[str] = "logistic"
    symmetric: ClassVar[bool] = True
    density_from_value: ClassVar[bool] = True
    median: ClassVar[float] = 0.0
    mean: ClassVar[float] = 0.0
    variance: ClassVar[float] = math.pi**2 / 3

    def cdf(self, z: Tensor) -> Tensor:
        return torch.sigmoid(z)

    def pdf(self, z: Tensor) -> Tensor:
        return torch.sigmoid(z) * torch.sigmoid(-z)

    def log_cdf(self, z: Tensor) -> Tensor:
        return torch.nn.functional.logsigmoid(z)

    def log_pdf(self, z: Tensor) -> Tensor:
        return torch.nn.functional.logsigmoid(z) + torch.nn.functional.logsigmoid(-z)

    def pdf_from_cdf(self, y: Tensor) -> Tensor:
        return y * (1 - y)

    def icdf(self, y: Tensor) -> Tensor:
        return torch.log(y) - torch.log1p(-y)

    def potential(self, y: Tensor) -> Tensor:
        return torch.xlogy(y, y) + torch.special.xlog1py(1 - y, -y)

    def conjugate(self, z: Tensor) -> Tensor:
        return torch.nn.functional.softplus(z)


@dataclass(frozen=True)
class Laplace(CDF, built_in=True):
    """The CDF of LapSum (Struski et al. 2025).

        F(z) = ½e^z for z ≤ 0,   F(z) = 1 − ½e^−z for z > 0

    Example:
        >>> x = torch.tensor([1.0, 3.0, 2.0, 0.0])
        >>> khot.soft_topk(x, 2, tau=0.5, cdf=khot.cdfs.Laplace())
        tensor([0.1839, 0.9751, 0.8161, 0.0249])
    """

    name: ClassVar[str] = "laplace"
    symmetric: ClassVar[bool] = True
    density_from_value: ClassVar[bool] = True
    median: ClassVar[float] = 0.0
    mean: ClassVar[float] = 0.0
    variance: ClassVar[float] = 2.0

    def cdf(self, z: Tensor) -> Tensor:
        above, below = _sides(z)
        return 0.5 * torch.exp(below) + (0.5 - 0.5 * torch.exp(-above))

    def pdf(self, z: Tensor) -> Tensor:
        return 0.5 * torch.exp(-z.abs())

    def log_cdf(self, z: Tensor) -> Tensor:
        above, below = _sides(z)
        return below + torch.log1p(-0.5 * torch.exp(-above))

    def log_pdf(self, z: Tensor) -> Tensor:
        return -z.abs() - math.log(2)

    def pdf_from_cdf(self, y: Tensor) -> Tensor:
        return torch.minimum(y, 1 - y)

    def icdf(self, y: Tensor) -> Tensor:
        w = torch.where(y > 0.5, 1 - y, y)
        return torch.where(y > 0.5, -torch.log(2 * w), torch.log(2 * w))

    def potential(self, y: Tensor) -> Tensor:
        w = torch.where(y > 0.5, 1 - y, y)
        return torch.xlogy(w, 2 * w) - w

    def conjugate(self, z: Tensor) -> Tensor:
        above, below = _sides(z)
        return 0.5 * torch.exp(below) + (0.5 * torch.exp(-above) - 0.5) + above


@dataclass(frozen=True)
class Normal(CDF, built_in=True):
    """The standard normal CDF, for a probit top-k.

        F(z) = Φ(z) = ½ + ½ erf(z/√2)

    Example:
        >>> x = torch.tensor([1.0, 3.0, 2.0, 0.0])
        >>> khot.soft_topk(x, 2, tau=0.5, cdf=khot.cdfs.Normal())
        tensor([0.1587, 0.9987, 0.8413, 0.0013])
    """

    name: ClassVar[str] = "normal"
    symmetric: ClassVar[bool] = True
    median: ClassVar[float] = 0.0
    mean: ClassVar[float] = 0.0
    variance: ClassVar[float] = 1.0

    def cdf(self, z: Tensor) -> Tensor:
        return 0.5 * torch.erfc(z * -math.sqrt(0.5))  # torch.special.ndtr is not vectorised

    def pdf(self, z: Tensor) -> Tensor:
        return torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)

    def log_cdf(self, z: Tensor) -> Tensor:
        # torch.special.log_ndtr is the same function, but has no batching rule (torch 2.13)
        z, dtype = _at_least_float32(z)
        above, below = _sides(z * math.sqrt(0.5))
        positive = (z > 0).to(z.dtype)  # each side is exactly 0 on the other: no digit is lost in the sum
        lower = torch.log((0.5 + 0.5 * positive) * torch.special.erfcx(-below)) - below * below
        return (lower + torch.log1p(-0.5 * positive * torch.erfc(above))).to(dtype)

    def log_pdf(self, z: Tensor) -> Tensor:
        return -0.5 * z * z - 0.5 * math.log(2 * math.pi)

    def log_hazard(self, z: Tensor) -> Tensor:
        # Far below the median, the two squares in log f − log F would round off everything else.
        z, dtype = _at_least_float32(z)
        above, below = _sides(z)
        lower = torch.log(torch.special.erfcx(below * -math.sqrt(0.5)))
        return (self.log_pdf(above) - self.log_cdf(above) - lower).to(dtype)

    def icdf(self, y: Tensor) -> Tensor:
        y, dtype = _at_least_float32(y)
        if wide_dtype(y.device) == torch.float64:
            return torch.special.ndtri(y).to(dtype)
        # This branch is for MPS, which has no ndtri. log F is concave, so Newton's method on it converges
        # from below, where it starts: Φ(z) ≤ ½ exp(−z²/2).
        w = torch.where(y > 0.5, 1 - y, y)
        log_w = torch.log(w).clamp(min=math.log(TINIEST))
        z = -torch.sqrt((-2 * (log_w.detach() + math.log(2))).clamp(min=0))
        for _ in range(NEWTON):
            z = z - (self.log_cdf(z) - log_w) * torch.exp(-self.log_hazard(z))
        z = torch.where(w == 0, -math.inf, z)
        return torch.where(y > 0.5, -z, z).to(dtype)

    def potential(self, y: Tensor) -> Tensor:
        y, dtype = _at_least_float32(y)
        return -self.pdf(self.icdf(y)).to(dtype)

    def conjugate(self, z: Tensor) -> Tensor:
        # ω* is 0 below −40, where z·F(z) may be −inf·0
        return torch.where(z < -40, 0, z.clamp(min=-40) * self.cdf(z) + self.pdf(z))


def _sides(z: Tensor) -> tuple[Tensor, Tensor]:
    """z where it is positive and z where it is not, each 0 elsewhere, so that a function of either side is a
    sum of two: where() and masked_fill() take several times as long as an exponential.

    Their derivatives at 0 are 0 and 1, as F's is not 0 there; that of abs() is 0, and in some versions of
    torch that of clamp().
    """
    return torch.relu(z), -torch.threshold(-z, -torch.finfo(z.dtype).tiny, 0.0)


def _at_least_float32(z: Tensor) -> tuple[Tensor, torch.dtype]:
    """z for functions that torch lacks in half precision, and the dtype to convert the result back to."""
    return z.to(torch.promote_types(z.dtype, torch.float32)), z.dtype


@dataclass(frozen=True)
class Power(CDF, built_in=True):
    """The CDF of the sparse top-k mask with a p-norm (Sander et al. 2023).

        F(z) = clip(z, 0, 1)^(1/(p−1))

    p = 2 is the Euclidean projection onto the capped simplex; p = 4/3 gives z³, p = 3 gives √z. F is smooth
    where y leaves 0 for p < 2, of infinite slope there for p > 2, and kinked where it reaches 1.

    Args:
        p: in [1.15, 3]. The rounding of z in float32, 6e-8 of itself, is multiplied by the exponent
            1/(p − 1). It is 4e-7 of y for p = 1.15, and would exceed the 5e-7 that khot promises for
            p < 1.12.

    Example:
        >>> x = torch.tensor([1.0, 3.0, 2.0, 0.0])
        >>> khot.soft_topk(x, 2, tau=2.0, cdf=khot.cdfs.Power(4 / 3))
        tensor([0.1007, 1.0000, 0.8993, 0.0000])
    """

    p: float
    name: ClassVar[str] = "power"
    support: ClassVar[tuple[float, float]] = (0.0, 1.0)

    def __post_init__(self) -> None:
        if not isinstance(self.p, (int, float)) or isinstance(self.p, bool):
            raise TypeError(f"p must be a number in [1.15, 3], but got {type(self.p).__name__}")
        if not 1.15 <= self.p <= 3:
            raise ValueError(f"p must lie in [1.15, 3], but got {self.p}")

    @property
    def exponent(self) -> float:
        """The power q − 1 = 1/(p − 1) of z, with 1/p + 1/q = 1."""
        return 1 / (self.p - 1)

    @property
    def shape(self) -> float:
        return float(self.p)

    @property
    def median(self) -> float:
        return 0.5 ** (self.p - 1)

    @property
    def mean(self) -> float:
        return self.exponent / (self.exponent + 1)

    @property
    def variance(self) -> float:
        return self.exponent / (self.exponent + 2) - self.mean**2

    def cdf(self, z: Tensor) -> Tensor:
        outside, base = self._split(z)
        return torch.where(outside, (z > 0).to(z.dtype), base**self.exponent)

    def pdf(self, z: Tensor) -> Tensor:
        outside, base = self._split(z)
        f = torch.where(outside, 0, self.exponent * base ** (self.exponent - 1))
        return torch.where(z.isnan(), z, f)  # NaN to the power 0 is 1

    def log_cdf(self, z: Tensor) -> Tensor:
        outside, base = self._split(z)
        edge = torch.where(z > 0, 0.0, -math.inf).to(z.dtype)
        return torch.where(outside, edge, self.exponent * torch.log(base))

    def log_pdf(self, z: Tensor) -> Tensor:
        outside, base = self._split(z)
        log_f = math.log(self.exponent) + (self.exponent - 1) * torch.log(base)
        return torch.where(z.isnan(), z, torch.where(outside, -math.inf, log_f))

    def icdf(self, y: Tensor) -> Tensor:
        # on some processors, torch's float32 power has an error of several eps for small y
        return (widen(y) ** (self.p - 1)).to(y.dtype)

    def potential(self, y: Tensor) -> Tensor:
        return (widen(y) ** self.p / self.p).to(y.dtype)

    def conjugate(self, z: Tensor) -> Tensor:
        outside, base = self._split(z)
        q = self.exponent + 1
        return torch.where(outside, (z - 1 / self.p).masked_fill(z <= 0, 0), base**q / q)

    def tail(self, z: Tensor, above: Tensor) -> Tensor:
        F = self.cdf(z)
        return torch.where(above, 1 - F, F)

    def log_tail(self, z: Tensor, above: Tensor) -> Tensor:
        return torch.log(self.tail(z, above))

    @staticmethod
    def _split(z: Tensor) -> tuple[Tensor, Tensor]:
        """Where z is outside (0, 1), and z with those entries replaced by 1. Derivatives of z^e are infinite
        at 0, and a NaN in the branch that is not taken would still reach the gradient. NaN counts as inside,
        so that it stays NaN."""
        outside = (z <= 0) | (z >= 1)
        return outside, torch.where(outside, 1, z)


class Uniform(Power, built_in=True):
    """The CDF of the Euclidean projection onto the capped simplex: :class:`Power` with p = 2.

        F(z) = clip(z, 0, 1)

    Example:
        >>> x = torch.tensor([1.0, 3.0, 2.0, 0.0])
        >>> khot.soft_topk(x, 2, tau=2.0, cdf=khot.cdfs.Uniform())
        tensor([0.2500, 1.0000, 0.7500, 0.0000])
    """

    name: ClassVar[str] = "uniform"

    def __init__(self) -> None:
        super().__init__(2.0)

    def __repr__(self) -> str:
        return "Uniform()"


_BY_NAME: dict[str, CDF] = {c.name: c for c in (Logistic(), Laplace(), Normal(), Uniform())}


def resolve(cdf: str | CDF, shape: float = 0.0) -> CDF:
    """The CDF that a name or an object stands for; ``shape`` is p for the name ``"power"``.

    Raises:
        ValueError: for a name that is not in the table, and for the key of a CDF that no longer exists.
        TypeError: for anything that is neither a name nor a CDF.
    """
    if isinstance(cdf, CDF):
        return cdf
    if not isinstance(cdf, str):
        got = type(cdf).__name__
        if isinstance(cdf, type) and issubclass(cdf, CDF):
            got = f"type {cdf.__name__}; call it: {cdf.__name__}()"
        raise TypeError(f"cdf must be a name or a khot.cdfs object, but got {got}")
    if cdf == "power" and shape:
        return Power(shape)
    if cdf in _BY_NAME:
        return _BY_NAME[cdf]
    if cdf.startswith("own:"):
        own = _OWN.get(cdf)
        if own is None:
            raise ValueError(f"the CDF with the key {cdf!r} no longer exists: keep a reference to it")
        return own
    raise unknown("cdf", cdf, _BY_NAME, " or khot.cdfs.Power(p)")
