"""The derivatives of a threshold t with Σ_i w_i F((x_i − t)/τ) = B, and of the output at (x − t)/τ.

With f = f(z) and the shares q_i = f_i/Σ w f of a change of B,

    dt = Σ w q (dx − z dτ) − τ (dB − Σ y dw)/Σ w f
    dy = f (dx − z dτ − dt)/τ,   d log y = (f/F)(dx − z dτ − dt)/τ

written in jnp, differentiable again. :func:`push` has these, and :func:`pull` their transpose. Shares stay
right where every f underflows: they are relative to the largest, and in a wide gap above and below t apart.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from khot_jax._sums import least, most, sums
from khot_jax.cdfs import CDF

__all__ = ["Solved", "output", "pull", "push"]

# log f from which on a gap is wide: z is rounded by more than 1e-6
DEEP = -16.0


class Solved(NamedTuple):
    """A solved row: its arguments and its threshold."""

    x: Array  # (*batch, n)
    cost: Array | None  # of x's shape
    hi: Array  # of the batch shape, as the rest
    lo: Array
    tau: Array
    cdf: CDF
    output: str  # "y" for F, "log" for log F, "threshold" for t alone


class _Weighed(NamedTuple):
    z: Array
    w: Array
    share: Array  # q
    density: Array  # f
    log_mass: Array  # log Σ w f; +inf where t does not depend on anything, or jumps
    centre: Array  # Σ w q z
    rate: Array  # ∂out/∂z
    rise: Array  # ∂out/∂B


def output(s: Solved) -> Array:
    """F((x − t)/τ), its logarithm, or an empty array if the threshold alone is wanted; of x's dtype."""
    if s.output == "threshold":
        return s.x[..., :0]
    z = ((s.x.astype(s.hi.dtype) - s.hi[..., None]) - s.lo[..., None]) / s.tau[..., None]
    return (s.cdf.log_cdf(z) if s.output == "log" else s.cdf.cdf(z)).astype(s.x.dtype)


def _weigh(s: Solved) -> _Weighed:
    F, dtype = s.cdf, s.hi.dtype
    greatest = jnp.finfo(dtype).max
    fixed = jnp.abs(lax.stop_gradient(s.hi)) == greatest
    decided = jnp.isinf(s.x) | fixed[..., None]
    w = jnp.where(decided, 0, 1).astype(dtype)
    if s.cost is not None:
        w = jnp.where(s.x == -jnp.inf, 0, s.cost.astype(dtype))
    x = jnp.where(decided, 0, s.x).astype(dtype)
    hi, lo = (jnp.where(fixed, 0, each)[..., None] for each in (s.hi, s.lo))
    z = jnp.clip(((x - hi) - lo) / s.tau[..., None], -math.sqrt(greatest) / 4, math.sqrt(greatest) / 4)
    z = jnp.where(decided, 0, z)
    log_f = jnp.where(decided, -jnp.inf, F.log_pdf(z))
    still = jnp.isneginf(log_f)
    safe = jnp.where(still, 0, log_f)
    density = jnp.where(still, 0, jnp.exp(safe))
    counts = ~still & (w > 0)
    above = (z > F.median) & counts
    # relative densities
    top = most(lax.stop_gradient(log_f), counts)
    top = jnp.where(jnp.isfinite(top), top, 0)
    relative = jnp.where(still, 0, jnp.exp(jnp.minimum(safe - top[..., None], 80)))
    (mass,) = sums(w * relative)
    dead = mass == 0
    mass = jnp.where(dead, 1, mass)
    log_mass = jnp.where(dead | fixed, jnp.inf, top + jnp.log(mass))
    share = relative / mass[..., None]
    flat, edges = dead & ~fixed, None
    if F.full_support:
        share = _apart(s, x, w, z, counts, above, top, share, fixed)
        (centre,) = sums(w * share * z)
    else:
        payable = ~decided & (w > 0)
        edges = _edges(s, x, w, lax.stop_gradient(z), payable)
        share = jnp.where(flat[..., None], edges[0] + edges[1], share)
        (centre,) = sums(w * share * z)
        centre = jnp.where(flat, 0.5 * (F.support[0] + F.support[1]), centre)
    share, centre = jnp.where(fixed[..., None], 0, share), jnp.where(fixed, 0, centre)
    rate, rise = density, share
    if s.output == "log":
        at_rest = still | jnp.isneginf(F.log_cdf(lax.stop_gradient(z)))
        log_rate = F.log_hazard(jnp.where(at_rest, F.median, z))
        rate = jnp.where(at_rest, 0, jnp.exp(jnp.where(at_rest, 0, log_rate)))
        rise = jnp.where(at_rest, 0, jnp.exp(jnp.where(at_rest, 0, log_rate) - log_mass[..., None]))
        if edges is not None:
            rise = jnp.where(flat[..., None], edges[0], rise)
    return _Weighed(z, w, share, density, log_mass, centre, rate, rise)


def _apart(
    s: Solved,
    x: Array,
    w: Array,
    z: Array,
    counts: Array,
    above: Array,
    top: Array,
    share: Array,
    fixed: Array,
) -> Array:
    """Shares in a wide gap, where A = B holds but neither has digits left for a comparison.

    On each side they are relative to the nearest entry, from which z is measured. Densities are tails times
    hazards, so that the sides weigh as their mean hazards do.
    """
    F = s.cdf
    below = counts & ~above
    a, b = least(x, above), most(x, below)
    wide = (top < DEEP) & jnp.isfinite(a) & jnp.isfinite(b) & ~fixed
    a, b = jnp.where(wide, a, 0), jnp.where(wide, b, 0)
    ends = [((end - s.hi) - s.lo) / s.tau for end in (a, b)]
    ends = [jnp.where(wide, end, 1.0 - 2 * i) for i, end in enumerate(ends)]
    tails = jnp.exp(-_hazard(F, z))  # in densities
    sides, rates = [], []
    for side, end, at in zip((above, below), (a, b), ends, strict=True):
        away = jnp.where(side & wide[..., None], (x - end[..., None]) / s.tau[..., None], 0)
        relative = jnp.where(side, jnp.exp(F.far(at[..., None], away)), 0)
        mass, tail = sums(w * relative, w * relative * tails)
        mass, tail = (jnp.where(wide, each, 1) for each in (mass, tail))
        sides.append(relative / mass[..., None])
        rates.append(mass / tail)
    sides = [
        side * (rate / (rates[0] + rates[1]))[..., None] for side, rate in zip(sides, rates, strict=True)
    ]
    return jnp.where(wide[..., None], sides[0] + sides[1], share)


def _hazard(F: CDF, z: Array) -> Array:
    """log of f over the smaller tail."""
    if F.symmetric:
        return F.log_hazard(-jnp.abs(z))
    return jnp.where(z > F.median, F.log_pdf(z) - F.log_sf(z), F.log_hazard(z))


def _edges(s: Solved, x: Array, w: Array, z: Array, payable: Array) -> tuple[Array, Array]:
    """Of the entries next to a gap without densities, half of a change for each side, equal ones together."""
    above = (z > s.cdf.median) & payable
    below = payable & ~above
    edges = (
        above & (x == least(x, above)[..., None]),
        below & (x == most(x, below)[..., None]),
    )
    paid = sums(*(jnp.where(edge, w, 0) for edge in edges))
    # where rounding has left no entry on one side, the other decides alone
    part = jnp.where((paid[0] > 0) & (paid[1] > 0), 0.5, 1.0)
    above_share, below_share = (
        jnp.where(edge, (part / jnp.where(each > 0, each, 1))[..., None], 0)
        for edge, each in zip(edges, paid, strict=True)
    )
    return above_share, below_share


def push(s: Solved, dx: Array, dgoal: Array, dtau: Array | None, dcost: Array | None) -> tuple[Array, Array]:
    """The tangents of the output and of t."""
    d = _weigh(s)
    along = jnp.where(jnp.isinf(s.x), 0, dx).astype(d.z.dtype)
    still = along if dtau is None else along - d.z * dtau[..., None]
    shifts = sums(d.w * d.share * along)[0]
    if dtau is not None:
        shifts = shifts - d.centre * dtau
    left = dgoal
    if dcost is not None:
        left = left - sums(_spent(s, d) * dcost)[0]
    left = jnp.where(_is_fixed(s), 0, left)
    dt = shifts - _over_mass(left, d, s)
    if s.output == "threshold":
        return s.x[..., :0], dt
    out = d.rate * (still - shifts[..., None]) / s.tau[..., None] + _times(d.rise, left[..., None])
    return out.astype(s.x.dtype), dt


def pull(s: Solved, v: Array, g: Array, with_tau: bool) -> tuple[Array, Array, Array | None, Array | None]:
    """The gradients in x, B, τ and w, from those in the output and in t."""
    d = _weigh(s)
    tau = s.tau
    if s.output == "threshold":
        price, pulled, own = jnp.zeros_like(g), jnp.zeros_like(g), jnp.zeros_like(d.z)
    else:
        v = v.astype(d.z.dtype)
        if s.output == "log":
            v = jnp.where(jnp.isneginf(output(s)), 0, v)
            price, pulled = sums(_times(d.rise, v), d.rate * v)
            own = d.rate * v - d.w * d.share * pulled[..., None]
        else:
            (price,) = sums(d.share * v)
            own = d.density * (v - d.w * price[..., None])
    dx = own / tau[..., None] + d.w * d.share * g[..., None]
    dgoal = price - _over_mass(g, d, s)
    dtau = dcost = None
    if with_tau:
        dtau = -sums(own * (d.z - d.centre[..., None]))[0] / tau - g * d.centre
    if s.cost is not None:
        dcost = (-jnp.where(_is_fixed(s), 0, dgoal)[..., None] * _spent(s, d)).astype(s.cost.dtype)
    dx = jnp.where(jnp.isinf(s.x), 0, dx).astype(s.x.dtype)
    return dx, jnp.where(_is_fixed(s), 0, dgoal), dtau, dcost


def _is_fixed(s: Solved) -> Array:
    return jnp.abs(lax.stop_gradient(s.hi)) == jnp.finfo(s.hi.dtype).max


def _times(a: Array, b: Array) -> Array:
    """The product, 0 where b is 0, even if a overflows."""
    zero = b == 0
    return jnp.where(zero, 0, a * jnp.where(zero, 1, b))


def _over_mass(value: Array, d: _Weighed, s: Solved) -> Array:
    """value·τ/Σ w f; 0 where value is 0, even if the sum underflows, and in a gap, at which t jumps."""
    idle = (value == 0) | jnp.isinf(d.log_mass)
    return jnp.where(idle, 0, value * jnp.exp(jnp.log(s.tau) - jnp.where(idle, 0, d.log_mass)))


def _spent(s: Solved, d: _Weighed) -> Array:
    """F, where an entry that is selected for certain has 1, and one that cannot be selected 0."""
    y = s.cdf.cdf(d.z)
    fixed = _is_fixed(s)[..., None]
    y = jnp.where(fixed, s.hi[..., None] < 0, y)
    return jnp.where(jnp.isinf(s.x), s.x > 0, y).astype(d.z.dtype)
