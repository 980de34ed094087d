"""The CDFs that soften a count: one choice of F, one relaxed top-k operator.

Every operator of khot replaces the step in "how many entries lie above b?" by a CDF F. This module is
the table of them, each with what the solver and the gradients need, accurate in both tails.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from khot._core.precision import wide_dtype, widen

__all__ = ["CDF", "CDFName", "Laplace", "Logistic", "Normal", "Power", "Uniform", "resolve"]

CDFName = Literal["logistic", "laplace", "normal", "uniform"]

NEWTON = 4  # steps to a quantile in float32
TINIEST = 1e-37  # the least probability that float32 can tell from 0 there


class CDF:
    """A cumulative distribution function F with density f, as used to soften a count.

    All methods are elementwise on floating-point tensors, keep shape and dtype, and are differentiable
    wherever F is. ``z`` is any real number, infinities included; ``y`` lies in [0, 1].

    Attributes:
        name: what ``cdf="..."`` calls it.
        shape: the parameter p of :class:`Power`; 0 where there is none.
        median: F⁻¹(½).
        mean, variance: moments of a variable distributed as F.
        full_support: whether f > 0 everywhere. Where it is not, y can be exactly 0 and 1.
    """

    name: ClassVar[str]
    full_support: ClassVar[bool] = True
    median: float = 0.0
    mean: float = 0.0
    variance: ClassVar[float]

    @property
    def shape(self) -> float:
        return 0.0

    def cdf(self, z: Tensor) -> Tensor:
        """F(z), in [0, 1], with full relative accuracy in the lower tail."""
        raise NotImplementedError

    def pdf(self, z: Tensor) -> Tensor:
        """The density f(z) = F'(z)."""
        raise NotImplementedError

    def log_cdf(self, z: Tensor) -> Tensor:
        """log F(z), finite where F(z) underflows."""
        raise NotImplementedError

    def log_pdf(self, z: Tensor) -> Tensor:
        """log f(z), finite where f(z) underflows."""
        raise NotImplementedError

    def log_hazard(self, z: Tensor) -> Tensor:
        """log(f(z)/F(z)), the logarithm of how fast log F rises."""
        return self.log_pdf(z) - self.log_cdf(z)

    def icdf(self, y: Tensor) -> Tensor:
        """The quantile F⁻¹(y)."""
        raise NotImplementedError

    def potential(self, y: Tensor) -> Tensor:
        """ω(y) = ∫ F⁻¹, the regulariser whose capped-simplex argmax is the soft top-k of this CDF."""
        raise NotImplementedError

    def conjugate(self, z: Tensor) -> Tensor:
        """ω*(z) = ∫ F from −∞ to z, the convex conjugate of the potential: ω(y) + ω*(z) ≥ yz."""
        raise NotImplementedError

    def tail(self, z: Tensor, above: Tensor) -> Tensor:
        """min(F, 1 − F): 1 − F(z) where ``above`` (z > median), else F(z); never by cancellation."""
        return self.cdf(-z.abs())

    def log_tail(self, z: Tensor, above: Tensor) -> Tensor:
        """The logarithm of :meth:`tail`, finite where that underflows."""
        return self.log_cdf(-z.abs())


@dataclass(frozen=True)
class Logistic(CDF):
    """F(z) = 1/(1 + e^−z): sigmoid top-k (Wijk et al. 2025), SOFT top-k (Xie et al. 2020) at τ = ε/2."""

    name: ClassVar[str] = "logistic"
    variance: ClassVar[float] = math.pi**2 / 3

    def cdf(self, z: Tensor) -> Tensor:
        return torch.sigmoid(z)

    def pdf(self, z: Tensor) -> Tensor:
        return torch.sigmoid(z) * torch.sigmoid(-z)

    def log_cdf(self, z: Tensor) -> Tensor:
        return torch.nn.functional.logsigmoid(z)

    def log_pdf(self, z: Tensor) -> Tensor:
        return torch.nn.functional.logsigmoid(z) + torch.nn.functional.logsigmoid(-z)

    def icdf(self, y: Tensor) -> Tensor:
        return torch.log(y) - torch.log1p(-y)

    def potential(self, y: Tensor) -> Tensor:
        return torch.xlogy(y, y) + torch.special.xlog1py(1 - y, -y)

    def conjugate(self, z: Tensor) -> Tensor:
        return torch.nn.functional.softplus(z)


@dataclass(frozen=True)
class Laplace(CDF):
    """F(z) = ½e^z for z ≤ 0, 1 − ½e^−z for z > 0: LapSum (Struski et al. 2025)."""

    name: ClassVar[str] = "laplace"
    variance: ClassVar[float] = 2.0

    def cdf(self, z: Tensor) -> Tensor:
        positive, above, below = _sides(z)
        return torch.where(positive, 1 - 0.5 * torch.exp(-above), 0.5 * torch.exp(below))

    def pdf(self, z: Tensor) -> Tensor:
        return 0.5 * torch.exp(-z.abs())

    def log_cdf(self, z: Tensor) -> Tensor:
        positive, above, _ = _sides(z)
        return torch.where(positive, torch.log1p(-0.5 * torch.exp(-above)), z - math.log(2))

    def log_pdf(self, z: Tensor) -> Tensor:
        return -z.abs() - math.log(2)

    def icdf(self, y: Tensor) -> Tensor:
        w = torch.where(y > 0.5, 1 - y, y)
        return torch.where(y > 0.5, -torch.log(2 * w), torch.log(2 * w))

    def potential(self, y: Tensor) -> Tensor:
        w = torch.where(y > 0.5, 1 - y, y)
        return torch.xlogy(w, 2 * w) - w

    def conjugate(self, z: Tensor) -> Tensor:
        positive, above, below = _sides(z)
        return torch.where(positive, above + 0.5 * torch.exp(-above), 0.5 * torch.exp(below))


@dataclass(frozen=True)
class Normal(CDF):
    """F = Φ, the standard normal CDF: probit top-k."""

    name: ClassVar[str] = "normal"
    variance: ClassVar[float] = 1.0

    def cdf(self, z: Tensor) -> Tensor:
        return 0.5 * torch.erfc(z * -math.sqrt(0.5))  # torch.special.ndtr is not vectorised

    def pdf(self, z: Tensor) -> Tensor:
        return torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)

    def log_cdf(self, z: Tensor) -> Tensor:
        # torch.special.log_ndtr says the same, but has no batching rule (torch 2.13)
        z, dtype = _at_least_float32(z)
        positive, above, below = _sides(z * math.sqrt(0.5))
        lower = torch.log(0.5 * torch.special.erfcx(-below)) - below * below
        return torch.where(positive, torch.log1p(-0.5 * torch.erfc(above)), lower).to(dtype)

    def log_pdf(self, z: Tensor) -> Tensor:
        return -0.5 * z * z - 0.5 * math.log(2 * math.pi)

    def log_hazard(self, z: Tensor) -> Tensor:
        # without the two squares, next to which all else is rounding far below the median
        z, dtype = _at_least_float32(z)
        positive, above, below = _sides(z)
        upper = self.log_pdf(above) - self.log_cdf(above)
        lower = 0.5 * math.log(2 / math.pi) - torch.log(torch.special.erfcx(below * -math.sqrt(0.5)))
        return torch.where(positive, upper, lower).to(dtype)

    def icdf(self, y: Tensor) -> Tensor:
        y, dtype = _at_least_float32(y)
        if wide_dtype(y.device) == torch.float64:
            return torch.special.ndtri(y).to(dtype)
        # MPS, which is meant, has no ndtri. Newton on log F, concave, from below: Φ(z) ≤ ½ exp(−z²/2)
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
        # −inf·0 has no place in a tail that is 0 below −40
        return torch.where(z < -40, 0, z.clamp(min=-40) * self.cdf(z) + self.pdf(z))


def _sides(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Whether z > 0, z where it is and 0 elsewhere, and z where it is not.

    abs() and, by version of torch, clamp() have no slope at 0, where F has one.
    """
    positive = z > 0
    return positive, z.masked_fill(~positive, 0), z.masked_fill(positive, 0)


def _at_least_float32(z: Tensor) -> tuple[Tensor, torch.dtype]:
    """For functions that torch does not have in half precision; and the dtype to go back to."""
    return z.to(torch.promote_types(z.dtype, torch.float32)), z.dtype


@dataclass(frozen=True)
class Power(CDF):
    """F(z) = clip(z, 0, 1)^(1/(p−1)): the sparse top-k mask with a p-norm (Sander et al. 2023).

    p = 2 is the Euclidean projection onto the capped simplex; p = 4/3 gives z³. F is smooth where y leaves
    0 (p < 2) and kinked where it reaches 1.

    Args:
        p: in [1.15, 2]; below, float32 is lost in the exponent.
    """

    p: float
    name: ClassVar[str] = "power"
    full_support: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not isinstance(self.p, (int, float)) or isinstance(self.p, bool):
            raise TypeError(f"p must be a number in [1.15, 2], but got {type(self.p).__name__}")
        if not 1.15 <= self.p <= 2:
            raise ValueError(f"p must lie in [1.15, 2], but got {self.p}")

    @property
    def exponent(self) -> float:
        """The power q − 1 = 1/(p − 1) of z, with 1/p + 1/q = 1."""
        return 1 / (self.p - 1)

    @property
    def shape(self) -> float:
        return float(self.p)

    @property
    def median(self) -> float:  # type: ignore[override]
        return 0.5 ** (self.p - 1)

    @property
    def mean(self) -> float:  # type: ignore[override]
        return self.exponent / (self.exponent + 1)

    @property
    def variance(self) -> float:  # type: ignore[override]
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
        # torch's float32 power is off by several eps for small y on some processors
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
        """Where z is outside (0, 1), and z with a 1 there: derivatives of z^e blow up at 0, and a NaN in the
        branch that is not taken would still reach the gradient. NaN counts as inside, and so stays NaN."""
        outside = (z <= 0) | (z >= 1)
        return outside, torch.where(outside, 1, z)


class Uniform(Power):
    """F(z) = clip(z, 0, 1): the Euclidean projection onto the capped simplex; :class:`Power` with p = 2."""

    name: ClassVar[str] = "uniform"

    def __init__(self) -> None:
        super().__init__(2.0)

    def __repr__(self) -> str:
        return "Uniform()"


_BY_NAME: dict[str, CDF] = {c.name: c for c in (Logistic(), Laplace(), Normal(), Uniform())}


def resolve(cdf: str | CDF, shape: float = 0.0) -> CDF:
    """The CDF that a name or an object stands for; ``shape`` is p for the name ``"power"``.

    Raises:
        ValueError: for a name that is not in the table.
        TypeError: for anything that is neither a name nor a CDF.
    """
    if isinstance(cdf, CDF):
        return cdf
    if not isinstance(cdf, str):
        raise TypeError(f"cdf must be a name or a khot.cdfs object, but got {type(cdf).__name__}")
    if cdf == "power" and shape:
        return Power(shape)
    if cdf not in _BY_NAME:
        allowed = ", ".join(map(repr, _BY_NAME))
        raise ValueError(f"cdf must be one of {allowed} or khot.cdfs.Power(p), but got {cdf!r}")
    return _BY_NAME[cdf]
