"""The threshold t of a row, Σ_i w_i F((x_i − t)/τ) = B, with its output at (x − t)/τ, as primitives.

They are what the soft top-k, budgets and quantiles are. With f = f(z) and the shares q_i = f_i/Σ w f of a
change of B, the derivatives are

    dt = Σ w q (dx − z dτ) − τ (dB − Σ y dw)/Σ w f
    dy = f (dx − z dτ − dt)/τ,   d log y = (f/F)(dx − z dτ − dt)/τ

written in jnp, differentiable again, and linear in the tangents to jax.linear_transpose. Shares stay right
where every f underflows: they are relative to the largest, and in a wide gap above and below t apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.interpreters import ad

from khot_jax import _root
from khot_jax._primitives import arrays, bind, define, linear
from khot_jax._sums import least, most, sums
from khot_jax.cdfs import CDF, KERNELS

__all__ = ["solve"]

# log f from which on a gap is wide: z is rounded by more than 1e-6
DEEP = -16.0


@dataclass(frozen=True)
class Law:
    """What is fixed when a call is traced."""

    cdf: CDF
    output: str  # "y" for F, "log" for log F, "threshold" for t alone
    cost: bool  # whether entries have costs
    tau: bool = True  # whether a derivative in τ is asked for

    @property
    def known(self) -> int:
        """The number of operands of push that are no tangents: x, the output, hi, lo, τ and the costs."""
        return 5 + self.cost

    @property
    def moved(self) -> tuple[int, ...]:
        """Those that the tangents are like: of x, the goal, τ and the costs."""
        return (0, 2) + (4,) * self.tau + (5,) * self.cost

    def attributes(self, n: int) -> dict[str, Any] | None:
        """What the compiled kernels ask for; None if there are none."""
        if type(self.cdf) not in KERNELS:
            return None
        slack = _root.rounding(n, jnp.float32) if self.cost else 0.0
        shape = float(getattr(self.cdf, "p", 0))
        return {"cdf": KERNELS[type(self.cdf)], "output": self.output, "shape": shape, "slack": slack}


def _solve_body(x: Array, goal: Array, tau: Array, cost: Array | None = None, *, law: Law) -> list[Array]:
    hi, lo, _ = _root.solve(x, cost, goal, tau, law.cdf)
    if law.output == "threshold":
        return [x[..., :0], hi, lo]
    z = ((x.astype(hi.dtype) - hi[..., None]) - lo[..., None]) / tau[..., None]
    out = law.cdf.log_cdf(z) if law.output == "log" else law.cdf.cdf(z)
    return [out.astype(x.dtype), hi, lo]


def _push_body(x: Array, _: Array, hi: Array, lo: Array, tau: Array, *rest: Array, law: Law) -> list[Array]:
    """The tangents of the output and of t."""
    F, dtype, greatest = law.cdf, hi.dtype, float(jnp.finfo(hi.dtype).max)
    cost = rest[0] if law.cost else jnp.ones_like(x, dtype)
    dx, dgoal, *others = rest[law.cost :]
    infinite, fixed = jnp.isinf(x), jnp.abs(hi) == greatest
    # what F is where it is certain
    certain = jnp.where(infinite, x > 0, hi[..., None] < 0)
    decided = infinite | fixed[..., None]
    x, w = jnp.where(decided, 0, x).astype(dtype), jnp.where(decided, 0, cost).astype(dtype)
    hi, lo = jnp.where(fixed, 0, hi), jnp.where(fixed, 0, lo)
    z = ((x - hi[..., None]) - lo[..., None]) / tau[..., None]
    z = jnp.where(decided, 0, jnp.clip(z, -math.sqrt(greatest) / 4, math.sqrt(greatest) / 4))
    log_f = jnp.where(decided, -jnp.inf, F.log_pdf(z))
    still = jnp.isneginf(log_f)
    log_f = jnp.where(still, 0, log_f)
    density = jnp.where(still, 0, jnp.exp(log_f))
    counts = ~still & (w > 0)
    top = most(lax.stop_gradient(log_f), counts)
    top = jnp.where(jnp.isfinite(top), top, 0)
    relative = jnp.where(still, 0, jnp.exp(jnp.minimum(log_f - top[..., None], 80)))
    (mass,) = sums(w * relative)
    dead = mass == 0
    mass = jnp.where(dead, 1, mass)
    idle = dead | fixed  # t does not depend on the goal, or jumps
    log_mass = top + jnp.log(mass)
    share = relative / mass[..., None]
    if F.full_support:
        share = _apart(F, x, tau, w, z, counts, top, share)
        (centre,) = sums(w * share * z)
        edge = share
    else:
        flat = dead & ~fixed
        edge, other = _edges(x, w, z > F.median, ~decided & (w > 0))
        share = jnp.where(flat[..., None], edge + other, share)
        (centre,) = sums(w * share * z)
        centre = jnp.where(flat, 0.5 * (F.support[0] + F.support[1]), centre)

    dz = jnp.where(infinite, 0, dx).astype(dtype)
    (dt,) = sums(w * share * dz)
    dz = dz - dt[..., None]
    if law.tau:
        dz, dt = dz - (z - centre[..., None]) * others[0][..., None], dt - centre * others[0]
    if law.cost:
        dgoal = dgoal - sums(jnp.where(decided, certain, F.cdf(z)).astype(dtype) * others[-1])[0]
    dgoal = jnp.where(fixed, 0, dgoal)
    dt = dt - jnp.where(idle, 0, _exp(jnp.log(tau) - log_mass)) * dgoal
    if law.output == "threshold":
        return [dx[..., :0], dt]
    rate, rise = density, share  # of the output in z, and in the goal
    if law.output == "log":
        still = still | jnp.isneginf(F.log_cdf(lax.stop_gradient(z)))
        log_rate = F.log_hazard(jnp.where(still, F.median, z))
        rate = jnp.where(still, 0, jnp.exp(log_rate))
        rise = jnp.where(still, 0, _exp(log_rate - log_mass[..., None]))
        rise = jnp.where(idle[..., None], edge, rise)
    dout = rate * dz / tau[..., None] + rise * dgoal[..., None]
    return [dout.astype(dx.dtype), dt]


def _exp(x: Array) -> Array:
    """exp x, and 0 where it overflows."""
    large = x > math.log(float(jnp.finfo(x.dtype).max)) - 1e-3
    return jnp.where(large, 0, jnp.exp(jnp.where(large, 0, x)))


def _apart(
    F: CDF, x: Array, tau: Array, w: Array, z: Array, counts: Array, top: Array, share: Array
) -> Array:
    """Shares in a wide gap, where A = B holds but neither has digits left for a comparison.

    On each side they are relative to the nearest entry, from which z is measured. Densities are tails times
    hazards, so that the sides weigh as their mean hazards do.
    """
    above, below = (z > F.median) & counts, (z <= F.median) & counts
    a, b = least(x, above), most(x, below)
    wide = (top < DEEP) & jnp.isfinite(a) & jnp.isfinite(b)
    log_hazard = F.log_hazard(-jnp.abs(z)) if F.symmetric else F.log_pdf(z) - F.log_tail(z, z > F.median)
    tails = jnp.exp(-log_hazard)  # in densities
    sides, rates = [], []
    for side, end, at in ((above, a, least(z, above)), (below, b, most(z, below))):
        at = jnp.where(wide, at, 1.0)[..., None]
        away = jnp.where(side & wide[..., None], (x - jnp.where(wide, end, 0)[..., None]) / tau[..., None], 0)
        relative = jnp.where(side, jnp.exp(F.far(at, away)), 0)
        mass, tail = sums(w * relative, w * relative * tails)
        mass, tail = (jnp.where(wide, each, 1) for each in (mass, tail))
        sides.append(relative / mass[..., None])
        rates.append((mass / tail)[..., None])
    total = rates[0] + rates[1]
    return jnp.where(wide[..., None], sides[0] * (rates[0] / total) + sides[1] * (rates[1] / total), share)


def _edges(x: Array, w: Array, above: Array, payable: Array) -> list[Array]:
    """Of the entries next to a gap without densities, half of a change for each side, equal ones together."""
    above, below = above & payable, ~above & payable
    edges = above & (x == least(x, above)[..., None]), below & (x == most(x, below)[..., None])
    paid = sums(*(jnp.where(edge, w, 0) for edge in edges))
    # where rounding has left no entry on one side, the other decides alone
    part = jnp.where((paid[0] > 0) & (paid[1] > 0), 0.5, 1.0)
    return [
        jnp.where(edge, (part / jnp.where(each > 0, each, 1))[..., None], 0)
        for edge, each in zip(edges, paid, strict=True)
    ]


def _solve_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, law: Law) -> tuple[Any, Any]:
    x, _, tau, *cost = primals
    results = bind(_solve, *primals, law=law)
    law = replace(law, tau=type(tangents[2]) is not ad.Zero)
    dx, dgoal, dtau, *dcost = arrays(tangents)
    moves = [dx, dgoal, *([dtau] if law.tau else []), *dcost]
    dout, dt = bind(_push, x, *results, tau, *cost, *moves, law=law)
    return results, [dout, dt, jnp.zeros_like(results[2])]


_push = linear("khot", _push_body)
_solve = define("khot_solve", _solve_body, _solve_jvp)


def solve(x: Array, goal: Array, tau: Array, cost: Array | None, cdf: CDF, output: str) -> list[Array]:
    """The output and the threshold t = hi + lo, of which hi has the derivatives of t."""
    operands = [x, goal, tau] if cost is None else [x, goal, tau, cost]
    return bind(_solve, *operands, law=Law(cdf, output, cost is not None))
