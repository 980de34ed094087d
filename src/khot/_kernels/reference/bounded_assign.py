"""Thresholds of rows and columns whose sums lie within bounds, with a total or without.

    y = F((x − r_i − c_j)/τ)

A column has c = 0 if its sum lies between its bounds, c > 0 if it is at its most, and c < 0 if it is at its
least. Rows whose sums lie between their bounds have one threshold t in common: 0, or with a total the one
that gives the total. A row that would leave its bounds has the threshold that gives the bound.

So for given c each row has two exact roots, one for each bound, and t lies between them or beyond one of
them; with a total, t is the root of a sum of rows that are clipped to their bounds. What is left is a convex
problem in c alone,

    min  D(c) + Σ_j (most_j max(c_j, 0) + least_j min(c_j, 0)),

where the columns' sums are −D', and D'' is the Schur complement in which the rows at t count as one row.
Newton's method solves a model of it exactly, kinks included, by active sets. Far from the solution it stalls
at a small τ, so that τ falls in stages. With compact support the model may know little: sums are flat where
all entries are 0 or 1, and the curvature jumps where one of them becomes 0 or 1. Where a step does not help,
the columns take their exact roots beside the thresholds of the rows, which always helps, if not much.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from khot import cdfs
from khot._core import rows
from khot._core.precision import in_float64, wide_dtype
from khot._core.rows import HERE, Row
from khot._kernels.reference.sides import AT_LEAST, AT_MOST, BETWEEN, Sides, settle
from khot._kernels.reference.soft_assign import ACCEPTED, NEAR, STAGE, thresholds
from khot.cdfs import CDF

__all__ = ["FINE", "Problem", "bounded_assign"]

STEPS = 60  # per stage
MODELS = 40  # active sets that are tried for one step; mostly there are 1 to 4
# The error, relative to the largest load, at which all stages but the last end, in a first and in a second,
# patient attempt, in which τ also falls more slowly.
ATTEMPTS = ((1e-2, STAGE), (1e-6, 2.0))
FINE, ROUNDING = 1e-15, 1e-12  # the error at which the last stage ends, and one that may be rounding
REACH = 8.0  # the longest step, in τ
BEYOND = 0.25  # how steeply the objective may rise where a step ends, relative to how it fell at its start
FLAT = 1e-3  # relative to the loads, the density below which a step is damped as if there were so much
COMMON = 100  # sums that are tried for the common threshold; mostly there are 2 to 5
EPS = torch.finfo(torch.float64).eps


def bounded_assign(
    x: Tensor,
    least_k: Tensor,
    most_k: Tensor,
    least: Tensor,
    most: Tensor,
    total: Tensor,
    tau: Tensor,
    bias: Tensor,
    cdf: str,
    shape: float,
    has_total: bool,
    equal: bool,
    slack: float,
    group: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y, r, c, t, and on which side of their bounds rows and columns are.

    x is (*batch, m, E); least_k and most_k (*batch, m), least, most and bias (*batch, E), total and tau
    (*batch, 1). The results are (*batch, m, E), (*batch, m), (*batch, E), (*batch, 1), (*batch, m) and
    (*batch, E). A row or column that takes nothing has the threshold +inf, and one that takes all has −inf.
    Where there is no solution, thresholds are NaN. With a group, x, least_k and most_k are a shard: some of
    the rows of each matrix.
    """
    shards = rows.of(group)
    *batch, m, width = x.shape
    F, count, wide = cdfs.resolve(cdf, shape), math.prod(batch), wide_dtype(x.device)

    def flat(value: Tensor, *own: int) -> Tensor:
        return in_float64(value).expand(*batch, *own).reshape(count, *own)

    scores, of_rows = flat(x, m, width), (flat(least_k, m), flat(most_k, m))
    of_columns, start = (flat(least, width), flat(most, width)), flat(bias, width)
    totals, scale = flat(total, 1), flat(tau, 1)
    shapes = ((m, width), (m,), (width,), (1,), (m,), (width,))
    dtypes = (x.dtype, wide, wide, wide, torch.int8, torch.int8)
    results = [x.new_empty(count, *own, dtype=dtype) for own, dtype in zip(shapes, dtypes, strict=True)]
    for i in range(count):
        sides = Sides(
            of_rows[0][i], of_rows[1][i], of_columns[0][i], of_columns[1][i],
            float(totals[i]) if has_total else None,
        )  # fmt: skip
        found = _assign(scores[i], sides, float(scale[i]), start[i], F, slack, shards)
        for result, value in zip(results, found, strict=True):
            result[i] = value  # rounded once, and moved back to its device
    y, r, c, t, row_side, side = (
        result.view(*batch, *own) for result, own in zip(results, shapes, strict=True)
    )
    return y, r, c, t, row_side, side


class State(NamedTuple):
    """What is known at the columns' thresholds c."""

    c: Tensor
    t: float
    r: Tensor
    row_side: Tensor
    y: Tensor
    load: Tensor
    curvature: Tensor  # the derivative of the loads in −c
    error: float  # the largest distance of a load from where it has to be


def _assign(
    x: Tensor, sides: Sides, tau: float, bias: Tensor, F: CDF, slack: float, shards: Row
) -> tuple[Tensor, ...]:
    row_side, side = (x.new_zeros(n, dtype=torch.int8) for n in x.shape)

    def nothing() -> tuple[Tensor, ...]:
        shapes = (x.shape, row_side.shape, side.shape, (1,))
        return *(x.new_full(own, math.nan) for own in shapes), row_side, side

    if not (0 < tau < math.inf) or not bool(bias.isfinite().all()):
        return nothing()
    left = settle(x, sides, slack, shards)
    if left is None:
        return nothing()
    y, r, c, t = left.y, left.r, left.c, x.new_zeros(1)
    if not bool(left.columns.any()):
        return y, r, c, t, row_side, side
    problem = Problem(left.x, left.sides, F, shards, left.missed)
    state = problem.solve(bias[left.columns], tau)
    if state is None:
        return nothing()
    y[left.open_] = state.y[~problem.closed]
    c[left.columns], r[left.lines] = problem.centred(state)
    row_side[left.lines] = state.row_side if left.rows_at == BETWEEN else left.rows_at
    side[left.columns] = problem.side(state.c) if left.columns_at == BETWEEN else left.columns_at
    return y, r, c, t + state.t, row_side, side


class Problem:
    """Rows and columns with bounds, and with a total or without; x is −inf where nothing may be.

    No row or column has to take all that it may, or nothing.
    """

    def __init__(self, x: Tensor, sides: Sides, F: CDF, shards: Row = HERE, missed: float = 0.0) -> None:
        # columns that no row links cannot share what sums missed one another by their rounding
        self.accepted = max(ACCEPTED, 2 * missed)
        self.x, self.sides, self.F, self.shards = x, sides, F, shards
        self.closed = x == -math.inf
        self.left = (~self.closed).sum(-1).to(x)
        self.fixed = sides.least == sides.most  # columns whose sum is given
        self.given = sides.least_k == sides.most_k  # rows whose sum is given
        capped, filled = sides.most_k < self.left, sides.least_k > 0
        self.capped = capped.nonzero().squeeze(-1)
        self.filled = (filled & ~(self.given & capped)).nonzero().squeeze(-1)
        free, self.below = shards.reduce([(~self.given).sum().to(x), (~self.closed).sum(0).to(x)])
        #: whether the same number can be added to all r and subtracted from all c
        self.loose = bool(free == 0) and bool(self.fixed.all())
        self.some_free = bool(free > 0)
        self.t = 0.0
        self.passes = 0

    def side(self, c: Tensor) -> Tensor:
        return c.sign().to(torch.int8).masked_fill(self.fixed, AT_MOST)

    def centred(self, state: State) -> tuple[Tensor, Tensor]:
        """c and r; of all that are the same, those in which c has the mean 0."""
        shift = state.c.mean() if self.loose else 0.0
        return state.c - shift, state.r + shift

    def solve(self, bias: Tensor, tau: float) -> State | None:
        """The solution, or None if there is none."""
        near = self.at(self.start(bias), tau)
        if near.error <= NEAR * self.scale(near):  # the guess saves the stages
            state = self.descend(near, tau, FINE)
            if state.error <= self.accepted * self.scale(state):
                return state
        for rough, fall in ATTEMPTS:
            self.t = 0.0
            stages, spread = [tau], self.spread()
            while stages[-1] * fall < spread / 4:
                stages.append(stages[-1] * fall)
            c, state = torch.zeros_like(bias), near
            for stage in reversed(stages):
                state = self.descend(self.at(c, stage), stage, FINE if stage == tau else rough)
                c = state.c
                if stage == stages[-1] and state.error > max(rough, self.accepted) * self.scale(state):
                    return None  # the easiest of all: there is no solution
            if state.error <= self.accepted * self.scale(state):
                return state
        return None

    def start(self, guess: Tensor) -> Tensor:
        """c from a guess of it up to a constant. Where t makes up for a constant, the objective is least for
        the one with which columns at their most, one column between its bounds, and columns at their least
        have the sum of all."""
        total = self.sides.total
        if total is None:
            if self.some_free:
                return guess
            total = float(self.shards.reduce([self.sides.most_k.sum()])[0])
        order = guess.argsort(descending=True)
        least, most = self.sides.least[order], self.sides.most[order]
        sums = most.cumsum(0) + (least.sum() - least.cumsum(0))
        place = (sums < total).sum().clamp(max=len(guess) - 1)
        return guess - guess[order[place]]

    def spread(self) -> float:
        """How far apart scores are, and how far from t where that is given."""
        inside = self.x[~self.closed]
        ends = torch.cat([inside, inside.new_zeros(0 if self.loose or self.sides.total is not None else 1)])
        ends = ends if ends.numel() else ends.new_zeros(1)
        high, low = self.shards.reduce([], [ends.amax(), -ends.amin()])
        return float(high + low)

    def scale(self, state: State) -> float:
        """What errors are relative to: the largest load, as it is or as it has to be."""
        goal = torch.where(state.c > 0, self.sides.most, self.sides.least)
        return float(torch.maximum(state.load, goal).amax())

    # ------------------------------------------------------------------------------- one evaluation

    def at(self, c: Tensor, tau: float) -> State:
        self.passes += 1
        u = self.x - c
        # beyond `low`, the row would have more than its most, and beyond `high`, less than its least
        low, high = torch.full_like(self.left, -math.inf), torch.full_like(self.left, math.inf)
        for place, bound, end in (
            (self.capped, self.sides.most_k, low),
            (self.filled, self.sides.least_k, high),
        ):
            if len(place):
                end[place] = thresholds(u[place], bound[place], tau, self.F)
        high = torch.where(self.given, low, torch.maximum(low, high))
        t = self.t = self._common(u, low, high, tau)
        r = torch.minimum(torch.maximum(low, low.new_tensor(t)), high)
        row_side = torch.where(t >= high, AT_LEAST, BETWEEN).masked_fill(self.given | (t <= low), AT_MOST)
        row_side = row_side.to(torch.int8)
        z = ((u - r.unsqueeze(-1)) / tau).masked_fill(self.closed, 0)
        y, f = self.F.cdf(z).masked_fill(self.closed, 0), self.F.pdf(z).masked_fill(self.closed, 0)
        sums = f.sum(-1, keepdim=True)
        own = (row_side != BETWEEN).unsqueeze(-1)
        # where no entry of a row is between 0 and 1, the row does not move
        shares = f * own / sums.masked_fill(sums == 0, 1)
        together = (f * ~own).sum(0)
        block = torch.cat([y.sum(0)[None], f.sum(0)[None], together[None], f.T @ shares])
        block = self.shards.reduce([block])[0]
        load, together = block[0], block[2]
        curvature = block[1].diag() - block[3:]
        whole = together.sum()
        if self.sides.total is not None and bool(whole > 0):
            curvature = curvature - together.unsqueeze(-1) * (together / whole)
        error = float(self.off(c, load).abs().amax())
        if self.sides.total is not None:
            error = max(error, abs(float(load.sum()) - self.sides.total))
        return State(c, t, r, row_side, y, load, curvature / tau, error)

    def off(self, c: Tensor, load: Tensor) -> Tensor:
        """By how much the loads exceed what they have to be."""
        above, below = load - self.sides.most, load - self.sides.least
        between = above.clamp(min=0) + below.clamp(max=0)
        return torch.where(self.fixed | (c > 0), above, torch.where(c < 0, below, between))

    def _common(self, u: Tensor, low: Tensor, high: Tensor, tau: float) -> float:
        """t, from the last one: with a total, the root of the rows' clipped sums."""
        total = self.sides.total
        if total is None or not self.some_free:
            return 0.0
        ends = torch.cat([low, high])
        ends = torch.cat([ends[ends.isfinite()], ends.new_full((1,), self.t)])
        greatest, least = self.shards.reduce([], [ends.amax(), -ends.amin()])
        # outside of these, the set of rows between their bounds does not change
        top, bottom = float(greatest) + tau, -float(least) - tau
        t, left, right = self.t, -math.inf, math.inf
        for _ in range(COMMON):
            capped, filled = self.given | (t <= low), t >= high
            own = capped | filled
            z = (u[~own] - t) / tau
            part = self.F.cdf(z.masked_fill(self.closed[~own], 0)).masked_fill(self.closed[~own], 0)
            bounds = torch.where(capped, self.sides.most_k, self.sides.least_k)[own]
            sums = [bounds.sum(), part.sum(), self.left[~own].sum()]
            at_bounds, between, room = (float(v) for v in self.shards.reduce(sums))
            want = total - at_bounds
            if abs(between - want) <= 4 * EPS * total:
                break
            if between > want:
                left = t
            else:
                right = t
            trial = math.nan
            if 0 < want < room:
                trial = self._pooled(u[~own], want, tau)
            if not left < trial < right:
                trial = bottom if left == -math.inf else top if right == math.inf else 0.5 * (left + right)
            if not left < trial < right:
                break
            t = trial
        return t

    def _pooled(self, u: Tensor, want: float, tau: float) -> float:
        """The threshold that rows have in common if their sum is this."""
        k = u.new_tensor([want])
        return float(thresholds(u.reshape(1, -1), k, tau, self.F, self.shards.name))

    # ----------------------------------------------------------------------------------- all steps

    def descend(self, state: State, tau: float, goal: float) -> State:
        """Steps until no load is off by more than the goal, or no step helps any more."""
        damping, reach = 1e-12, REACH * tau
        for _ in range(STEPS):
            scale = self.scale(state)
            if state.error <= goal * scale:
                break
            step = self._step(state, damping, scale / tau)
            if step is not None:
                step = self.shards.same(step)
                length = float(step.abs().amax())
                fall = self.slope(state.c, state.load, step, ahead=True)
                moved = state.c + step * min(1.0, reach / max(length, 1e-300))
                if fall < 0 and not bool((moved == state.c).all()):
                    tried = self.at(moved, tau)
                    if self.slope(moved, tried.load, step, ahead=False) <= -BEYOND * fall:
                        if state.error <= ROUNDING * scale and tried.error > state.error / 2:
                            return min(state, tried, key=lambda found: found.error)
                        state, damping, reach = tried, max(damping / 100, 1e-12), min(2 * reach, REACH * tau)
                        continue
                    reach = min(reach, length) / 4
            if damping > 1e6 or state.error <= ROUNDING * scale:
                break
            damping = max(10 * damping, 1e-3)
            state = self.at(self.alternate(state, tau), tau)
        return state

    def alternate(self, state: State, tau: float) -> Tensor:
        """The exact thresholds of the columns beside those that the rows have."""
        u, below = (self.x - state.r.unsqueeze(-1)).mT, self.below
        low, high = torch.full_like(below, -math.inf), torch.full_like(below, math.inf)
        for bound, inside, end in (
            (self.sides.most, self.sides.most < below, low),
            (self.sides.least, self.sides.least > 0, high),
        ):
            place = inside.nonzero().squeeze(-1)
            if len(place):
                part = u[place].contiguous()
                end[place] = thresholds(part, bound[place], tau, self.F, self.shards.name)
        return torch.where(self.fixed, low, low.clamp(min=0) + high.clamp(max=0))

    def slope(self, c: Tensor, load: Tensor, step: Tensor, ahead: bool) -> float:
        """The derivative of the objective along a step, ahead of c or behind it. It tells whether a step went
        too far more exactly than values of the objective, which round, and needs no integral of F."""
        above = (c > 0) | ((c == 0) & ((step > 0) == ahead))
        return float(step @ (torch.where(above, self.sides.most, self.sides.least) - load))

    def _step(self, state: State, damping: float, unit: float) -> Tensor | None:
        """The step to the least point of the model, with its kinks; None if none is found.

        A column is between its bounds with c = 0, or at one of them. Which one, the last solution says (the
        active sets of Hintermüller, Ito, Kunisch 2002).
        """
        c, load, H = state.c, state.load, state.curvature
        least, most = self.sides.least, self.sides.most
        one = H.diagonal().mean() + FLAT * unit
        H = H + (one * (damping + 1e-13)) * torch.eye(len(c), dtype=c.dtype, device=c.device)
        if self.loose:
            H = H + one / len(c)
        side = self.side(c)
        for _ in range(MODELS):
            rests = side == BETWEEN
            goal = torch.where(side == AT_LEAST, least, most)
            miss = load - goal
            # what is rounding would move a column far whose sum is flat, and hold up all others
            miss = miss.masked_fill(miss.abs() <= 16 * EPS * goal, 0)
            system = torch.where(rests.unsqueeze(-1), torch.zeros_like(H), H) + rests.to(c).diag()
            step, info = torch.linalg.solve_ex(system, torch.where(rests, -c, miss))
            if int(info) or not bool(step.isfinite().all()):
                return None
            flow, after = load - H @ step, c + step
            moved = torch.where(flow > most, AT_MOST, torch.where(flow < least, AT_LEAST, BETWEEN))
            moved = torch.where(side == AT_MOST, torch.where(after < 0, BETWEEN, AT_MOST), moved)
            moved = torch.where(side == AT_LEAST, torch.where(after > 0, BETWEEN, AT_LEAST), moved)
            moved = torch.where(self.fixed, AT_MOST, moved).to(torch.int8)
            if torch.equal(moved, side):
                return torch.where(rests, -c, step)  # c + step is exactly 0
            side = moved
        return None
