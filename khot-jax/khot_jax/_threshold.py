"""The threshold of a row with its output, as primitives: what the soft top-k, budgets and quantiles are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import Array

from khot_jax import _compiled, _implicit, _root
from khot_jax._implicit import Solved
from khot_jax._primitives import bind, define, derivatives, is_zero, zeros
from khot_jax.cdfs import CDF

__all__ = ["solve"]


@dataclass(frozen=True)
class Law:
    """What is fixed when a call is traced."""

    cdf: CDF
    output: str  # "y", "log" or "threshold"
    cost: bool  # whether entries have costs
    tau: bool = True  # whether a derivative in τ is asked for

    def solved(self, operands: Sequence[Array]) -> tuple[Solved, Sequence[Array]]:
        """What push and pull have in common, and the linear rest."""
        x, _, hi, lo, tau, *rest = operands
        cost, rest = (rest[0], rest[1:]) if self.cost else (None, rest)
        return Solved(x, cost, hi, lo, tau, self.cdf, self.output), rest

    @property
    def known(self) -> int:
        """The number of operands in which push and pull are not linear."""
        return 6 if self.cost else 5


def _solve_body(x: Array, goal: Array, tau: Array, cost: Array | None = None, *, law: Law) -> list[Array]:
    hi, lo, _ = _root.solve(x, cost, goal, tau, law.cdf)
    return [_implicit.output(Solved(x, cost, hi, lo, tau, law.cdf, law.output)), hi, lo]


def _push_body(*operands: Array, law: Law) -> list[Array]:
    solved, (dx, dgoal, *rest) = law.solved(operands)
    dcost = rest.pop() if law.cost else None
    return list(_implicit.push(solved, dx, dgoal, rest[0] if rest else None, dcost))


def _pull_body(*operands: Array, law: Law) -> list[Array]:
    solved, (v, g) = law.solved(operands)
    return [each for each in _implicit.pull(solved, v, g, law.tau) if each is not None]


_solve = define("khot_solve", _solve_body)
_push = define("khot_push", _push_body)
_pull = define("khot_pull", _pull_body)


def solve(
    x: Array, goal: Array, tau: Array, cost: Array | None, cdf: CDF, output: str
) -> tuple[Array, Array, Array]:
    """The output and the threshold t = hi + lo, of which hi has the derivatives of t."""
    operands = [x, goal, tau] if cost is None else [x, goal, tau, cost]
    out, hi, lo = bind(_solve, *operands, law=Law(cdf, output, cost is not None))
    return out, hi, lo


def _solve_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, law: Law) -> tuple[Any, Any]:
    results = bind(_solve, *primals, law=law)
    x, _, tau, *cost = primals
    law = replace(law, tau=not is_zero(tangents[2]))
    dx, dgoal, dtau, *dcost = zeros(tangents)
    out, hi, lo = results
    # the compiled kernels take f from y, if they need not differentiate in τ
    takes = law.output == "y" and not law.tau and not law.cost and _compiled.takes_value(law.cdf.compiled)
    hint = out if takes and x.dtype == jnp.float32 else x[..., :0]
    moves = [dx, dgoal, dtau] if law.tau else [dx, dgoal]
    dout, dt = bind(_push, x, hint, hi, lo, tau, *cost, *moves, *dcost, law=law)
    return results, [dout, dt, jnp.zeros_like(lo)]


derivatives(_solve, _solve_jvp, _push, _pull)
