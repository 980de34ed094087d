"""The CDFs that soften a count, in jnp: objects without arrays, hashable, so that jit caches on them.

They are those of khot.cdfs. A CDF of your own is a subclass of :class:`CDF`; it runs on the pure engine.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.special import erfc, log_ndtr, ndtri

__all__ = ["CDF", "Laplace", "Logistic", "Normal", "Power", "Uniform", "resolve"]


QUARTILES = 1.3489795003921634  # the distance between the quartiles of the standard normal distribution
DOUBLINGS, HALVINGS = 120, 60  # of a bracket for a quantile


class CDF:
    """A cumulative distribution function F, as used to soften a count.

    To use your own, derive a class and define :meth:`cdf`. Everything else has a default, derived from it.
    Override :meth:`icdf` if it has a closed form, because the default searches, and :meth:`sf`,
    :meth:`log_cdf`, :meth:`log_sf` and :meth:`log_pdf` if the default is inaccurate in a tail.

    Objects are static arguments of jit: two that are equal share what was compiled. A dataclass with
    ``frozen=True`` has the equality that is meant; without it, an object equals itself only.

    All methods are elementwise on arrays, keep shape and dtype, and are differentiable wherever F is.

    Attributes:
        support: the interval in which the density is positive: the whole line, or bounded on both sides.
        symmetric: whether F(−z) = 1 − F(z).
        median, variance: F⁻¹(½), and the variance, which only guides the first guess.

    Example:
        >>> class Cauchy(khot_jax.cdfs.CDF):
        ...     symmetric = True
        ...
        ...     def cdf(self, z):
        ...         return 0.5 + jnp.atan(z) / jnp.pi
        >>> y = khot_jax.soft_topk(jnp.array([1.0, 3.0, 2.0, 0.0]), 2, tau=0.5, cdf=Cauchy())
        >>> bool(abs(y.sum() - 2) < 1e-6)
        True
    """

    support: ClassVar[tuple[float, float]] = (-math.inf, math.inf)
    symmetric: ClassVar[bool] = False

    @property
    def full_support(self) -> bool:
        """Whether the support is the whole line."""
        return self.support == (-math.inf, math.inf)

    @property
    def median(self) -> float:
        return 0.0 if self.symmetric else _number(self, 0.5)

    @property
    def variance(self) -> float:
        return ((_number(self, 0.75) - _number(self, 0.25)) / QUARTILES) ** 2

    def cdf(self, z: Array) -> Array:
        """F(z), in [0, 1], with full relative accuracy in the lower tail."""
        raise NotImplementedError(f"{type(self).__name__} has to define cdf(z)")

    def pdf(self, z: Array) -> Array:
        """The density f(z) = F'(z)."""
        z = -jnp.abs(z) if self.symmetric else z  # where F has all its digits
        return jax.jvp(self.cdf, (z,), (jnp.ones_like(z),))[1]

    def sf(self, z: Array) -> Array:
        """1 − F(z), with full relative accuracy in the upper tail."""
        return self.cdf(-z) if self.symmetric else 1 - self.cdf(z)

    def log_cdf(self, z: Array) -> Array:
        """log F(z), finite where F(z) underflows."""
        return jnp.log(self.cdf(z))

    def log_sf(self, z: Array) -> Array:
        """log(1 − F(z)), finite where 1 − F(z) underflows."""
        return self.log_cdf(-z) if self.symmetric else jnp.log(self.sf(z))

    def log_pdf(self, z: Array) -> Array:
        """log f(z), finite where f(z) underflows."""
        return jnp.log(self.pdf(z))

    def log_hazard(self, z: Array) -> Array:
        """log(f(z)/F(z)), the logarithm of the derivative of log F."""
        return self.log_pdf(z) - self.log_cdf(z)

    def far(self, z: Array, change: Array) -> Array:
        """log f(z + change) − log f(z), in a tail and away from the median."""
        return self.log_pdf(z + change) - self.log_pdf(z)

    def icdf(self, y: Array) -> Array:
        """The quantile F⁻¹(y). The default is a bisection, which is not differentiable."""
        y = jax.lax.stop_gradient(y)
        one = jnp.ones_like(y)

        def double(_: int, ends: tuple[Array, Array]) -> tuple[Array, Array]:
            low, high = ends
            return jnp.where(self.cdf(low) > y, 2 * low, low), jnp.where(self.cdf(high) < y, 2 * high, high)

        def halve(_: int, ends: tuple[Array, Array]) -> tuple[Array, Array]:
            low, high = ends
            middle = 0.5 * low + 0.5 * high
            under = self.cdf(middle) < y
            return jnp.where(under, middle, low), jnp.where(under, high, middle)

        ends = jax.lax.fori_loop(0, DOUBLINGS, double, (-one, one))
        low, high = jax.lax.fori_loop(0, HALVINGS, halve, ends)
        return 0.5 * low + 0.5 * high

    def tail(self, z: Array, above: Array) -> Array:
        """1 − F(z) where ``above`` (z > median), else F(z), without cancellation."""
        return self.cdf(-jnp.abs(z)) if self.symmetric else jnp.where(above, self.sf(z), self.cdf(z))

    def log_tail(self, z: Array, above: Array) -> Array:
        """The logarithm of :meth:`tail`, finite where the tail underflows."""
        if self.symmetric:
            return self.log_cdf(-jnp.abs(z))
        return jnp.where(above, self.log_sf(z), self.log_cdf(z))

    def quantile(self, y: Array, rest: Array) -> Array:
        """F⁻¹(y) from y and 1 − y, of which the smaller has all its digits."""
        if not self.symmetric:
            return self.icdf(y)
        z = self.icdf(jnp.minimum(y, rest))
        return jnp.where(y < rest, z, -z)


@functools.cache
def _number(cdf: CDF, y: float) -> float:
    """A quantile as a number, also while something is traced."""
    with jax.ensure_compile_time_eval():
        return float(jax.jit(cdf.icdf)(jnp.asarray(y, jnp.float32)))


@dataclass(frozen=True)
class Logistic(CDF):
    """The CDF of sigmoid top-k: F(z) = σ(z) = 1/(1 + e^−z)."""

    symmetric: ClassVar[bool] = True
    variance: ClassVar[float] = math.pi**2 / 3  # type: ignore[misc]

    def cdf(self, z: Array) -> Array:
        return jax.nn.sigmoid(z)

    def log_cdf(self, z: Array) -> Array:
        return jax.nn.log_sigmoid(z)

    def log_pdf(self, z: Array) -> Array:
        return -jnp.abs(z) - 2 * jnp.log1p(jnp.exp(-jnp.abs(z)))

    def far(self, z: Array, change: Array) -> Array:
        return -jnp.sign(z) * change

    def icdf(self, y: Array) -> Array:
        return jnp.log(y) - jnp.log1p(-y)


@dataclass(frozen=True)
class Laplace(CDF):
    """The CDF of LapSum: F(z) = ½e^z for z ≤ 0, 1 − ½e^−z for z > 0."""

    symmetric: ClassVar[bool] = True
    variance: ClassVar[float] = 2.0  # type: ignore[misc]

    def cdf(self, z: Array) -> Array:
        tail = 0.5 * jnp.exp(jnp.where(z > 0, -z, z))  # not −|z|, which has no derivative at 0
        return jnp.where(z > 0, 1 - tail, tail)

    def log_cdf(self, z: Array) -> Array:
        size = jnp.abs(z)
        return jnp.where(z > 0, jnp.log1p(-0.5 * jnp.exp(-size)), -size - math.log(2))

    def log_pdf(self, z: Array) -> Array:
        return -jnp.abs(z) - math.log(2)

    def far(self, z: Array, change: Array) -> Array:
        return -jnp.sign(z) * change

    def icdf(self, y: Array) -> Array:
        low = jnp.log(2 * jnp.minimum(y, 1 - y))
        return jnp.where(y < 0.5, low, -low)


@dataclass(frozen=True)
class Normal(CDF):
    """The standard normal CDF, for a probit top-k: F(z) = Φ(z)."""

    symmetric: ClassVar[bool] = True
    variance: ClassVar[float] = 1.0  # type: ignore[misc]

    def cdf(self, z: Array) -> Array:
        return 0.5 * erfc(z * -math.sqrt(0.5))

    def log_cdf(self, z: Array) -> Array:
        # the far tail has a derivative with digits
        return jnp.where(z < -20, self.log_pdf(z) - self.log_hazard(z), log_ndtr(jnp.maximum(z, -20.0)))

    def log_pdf(self, z: Array) -> Array:
        return -0.5 * z * z - 0.5 * math.log(2 * math.pi)

    def log_hazard(self, z: Array) -> Array:
        # far below the median, the two squares in log f − log F would round off everything else
        far = jnp.minimum(z, -20.0)
        series = jnp.log(-far) - jnp.log1p(-1 / (far * far) + 3 / (far * far) ** 2)
        near = jnp.maximum(z, -20.0)
        return jnp.where(z < -20, series, self.log_pdf(near) - log_ndtr(near))

    def far(self, z: Array, change: Array) -> Array:
        return -change * (z + 0.5 * change)

    def icdf(self, y: Array) -> Array:
        return ndtri(y)


@dataclass(frozen=True)
class Power(CDF):
    """The CDF of the sparse top-k mask with a p-norm: F(z) = clip(z, 0, 1)^(1/(p−1)).

    Args:
        p: in [1.15, 3]. p = 2 is the Euclidean projection onto the capped simplex.
    """

    p: float
    support: ClassVar[tuple[float, float]] = (0.0, 1.0)

    def __post_init__(self) -> None:
        if isinstance(self.p, bool) or not isinstance(self.p, (int, float)):
            raise TypeError(f"p must be a number in [1.15, 3], but got {type(self.p).__name__}")
        if not 1.15 <= self.p <= 3:
            raise ValueError(f"p must lie in [1.15, 3], but got {self.p}")

    @property
    def exponent(self) -> float:
        """1/(p − 1)."""
        return 1 / (self.p - 1)

    @property
    def median(self) -> float:
        return 0.5 ** (self.p - 1)

    def cdf(self, z: Array) -> Array:
        outside, base = self._split(z)
        return jnp.where(outside, (z > 0).astype(z.dtype), base**self.exponent)

    def sf(self, z: Array) -> Array:
        outside, base = self._split(z)
        if self.p == 2:
            return jnp.where(outside, (z <= 0).astype(z.dtype), 1 - base)
        return jnp.where(outside, (z <= 0).astype(z.dtype), -jnp.expm1(self.exponent * jnp.log(base)))

    def log_cdf(self, z: Array) -> Array:
        outside, base = self._split(z)
        edge = jnp.where(z > 0, 0.0, -math.inf).astype(z.dtype)
        return jnp.where(outside, edge, self.exponent * jnp.log(base))

    def log_pdf(self, z: Array) -> Array:
        outside, base = self._split(z)
        log_f = math.log(self.exponent) + (self.exponent - 1) * jnp.log(base)
        return jnp.where(jnp.isnan(z), z, jnp.where(outside, -math.inf, log_f))

    def icdf(self, y: Array) -> Array:
        return y ** (self.p - 1)

    @staticmethod
    def _split(z: Array) -> tuple[Array, Array]:
        """Where z is outside (0, 1), and z with those entries replaced by 1: a NaN or an infinity in the
        branch that is not taken would reach the gradient."""
        outside = (z <= 0) | (z >= 1)
        return outside, jnp.where(outside, 1, z)


class Uniform(Power):
    """The CDF of the Euclidean projection onto the capped simplex: :class:`Power` with p = 2."""

    def __init__(self) -> None:
        super().__init__(2.0)

    def __repr__(self) -> str:
        return "Uniform()"


_BY_NAME = {"logistic": Logistic(), "laplace": Laplace(), "normal": Normal(), "uniform": Uniform()}
# the names of their compiled kernels
KERNELS: dict[Any, str] = {type(cdf): name for name, cdf in _BY_NAME.items()} | {Power: "power"}


def resolve(cdf: str | CDF) -> CDF:
    """The CDF that a name or an object stands for."""
    if isinstance(cdf, CDF):
        return cdf
    if not isinstance(cdf, str):
        raise TypeError(f"cdf must be a name or a khot_jax.cdfs object, but got {type(cdf).__name__}")
    if cdf not in _BY_NAME:
        known = ", ".join(sorted(_BY_NAME))
        raise ValueError(f"cdf must be one of {known} or khot_jax.cdfs.Power(p), but got {cdf!r}")
    return _BY_NAME[cdf]
