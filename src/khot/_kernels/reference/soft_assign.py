"""Thresholds of rows and columns together, by Newton's method.

The quick way, `follow`, moves the thresholds of rows and columns at once. It mostly arrives, and where it
does not, the safe way takes over: for given thresholds c of the columns, the threshold of each row is an
exact root, which the soft top-k finds. What is left is a convex problem in c alone, with the columns' sums as
gradient and an E × E Schur complement as second derivative. From far away Newton's method stalls at a small
τ, so that in both ways τ falls in stages.
"""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor

from khot import cdfs
from khot._core import rows
from khot._core.precision import in_float64, wide_dtype
from khot._core.rows import HERE, Row
from khot._kernels.reference.assign_pass import assign_pass
from khot.cdfs import CDF

__all__ = [
    "ACCEPTED",
    "EQUAL",
    "FINE",
    "NEAR",
    "REACH",
    "ROUGH",
    "ROUNDING",
    "SLACK",
    "STAGE",
    "STEPS",
    "Problem",
    "filled",
    "follow",
    "soft_assign",
    "thresholds",
]

STEPS = 60  # per stage
NEAR = 0.1  # with an error below it, relative to the largest goal, Newton's method needs no stages
# The error, relative to the largest goal, at which a stage ends, and the last. Sums rise in stairs of many τ:
# a rougher solution may lie anywhere on one of nearly the right height, out of reach of the next stage.
ROUGH, FINE = 1e-5, 1e-14
ROUNDING = 1e-12  # an error of this size, relative to the largest goal, may be rounding
REACH = 4.0  # the longest step, in τ
ACCEPTED = 1e-9  # an error, relative to the largest goal, above which there is no solution
STAGE = 4.0  # how much τ falls from stage to stage
FALL = 6.0  # the same on the quick way
# The errors at which a stage ends on the quick way, where r and c are only a start for the next, in a first
# and in a second, patient attempt. From too rough a start the next stage crawls.
COARSE, PATIENT = 0.3, 0.03
EXACT = (
    2e-13  # the error, relative to k of the row and load of the column, at which the quick way has arrived
)
FEW = 16  # steps per stage on the quick way; it takes 3 to 6 where it arrives
ROW_STEPS = 16  # moves of a row's threshold in a sweep; mostly it takes 1 or 2
LOOSE, TIGHT = 1e-3, 1e-6  # how far a row may stay from its threshold, in τ, in float32 and on the way
CLOSE = 3e-3  # from this error on, the last stage is left to float64, and there the next step may be the last
SAME = 1e-7  # below this error, the second derivative of the step before serves again
SETTLED, NO_DENSITY = 1e-10, 1e-280  # a threshold this exact, in τ, is known, unless densities underflow
SAMPLE = 16  # rows per column that suffice for the first stages
SINGLE_ROUNDING = 2e-6  # of a share in float32, per score in units of τ
SINGLE = 1e30  # up to here, scores and temperatures fit float32
GOLDEN = (math.sqrt(5) - 1) / 2
DECIDED = 1e-4  # with less density than this, a row has its sum whatever its threshold
KEPT = 4  # evaluations that are remembered
EQUAL = 1e-9  # sums that differ by less, relative, are equal
SLACK = 1e-6  # by how much sums of rows and columns may miss one another, relative: by rounding in float32


def soft_assign(
    x: Tensor,
    k: Tensor,
    capacity: Tensor,
    tau: Tensor,
    bias: Tensor,
    cdf: str,
    shape: float,
    at_most: bool,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """y = F((x − r − c)/τ), r and c, for x (*batch, m, E), k (*batch, m), capacity and bias (*batch, E), and
    tau (*batch, 1). A row or column that takes nothing has the threshold +inf, and one that takes all
    has −inf. With a group, x and k are a shard: some of the rows of each matrix."""
    shards = rows.of(group)
    *batch, m, width = x.shape
    F = cdfs.resolve(cdf, shape)
    count = math.prod(batch)
    wide = in_float64(x).reshape(count, m, width)
    k = in_float64(k).expand(*batch, m).reshape(count, m)
    capacity = in_float64(capacity).expand(*batch, width).reshape(count, width)
    bias = in_float64(bias).expand(*batch, width).reshape(count, width)
    tau = in_float64(tau).expand(*batch, 1).reshape(count)
    found = [
        _assign(wide[i], k[i], capacity[i], float(tau[i]), bias[i], F, at_most, shards) for i in range(count)
    ]

    if found:
        y, r, c = (torch.stack(parts) if count > 1 else parts[0] for parts in zip(*found, strict=True))
    else:
        y, r, c = (torch.empty_like(value) for value in (wide, k, capacity))

    def back(value: Tensor, dtype: torch.dtype) -> Tensor:
        """Rounded once, and moved back if it was computed elsewhere, on a device that has float64."""
        if value.device == x.device:
            return value.to(dtype)
        return x.new_empty(value.shape, dtype=dtype).copy_(value)

    wide_type = wide_dtype(x.device)
    y, r, c = back(y, x.dtype), back(r, wide_type), back(c, wide_type)
    return y.view(x.shape), r.view(*batch, m), c.view(*batch, width)


def _assign(
    x: Tensor, k: Tensor, capacity: Tensor, tau: float, bias: Tensor, F: CDF, at_most: bool, shards: Row
) -> tuple[Tensor, Tensor, Tensor]:
    r, c = torch.zeros_like(k), torch.zeros_like(capacity)
    spread = float(x.amax() - x.amin()) if x.numel() else 0.0
    some_closed = not math.isfinite(spread)
    nan = x.isnan().any() if some_closed else x.new_zeros((), dtype=torch.bool)
    ends = torch.stack([x == math.inf, x == -math.inf]) if some_closed else x.new_zeros(2, 0, x.shape[-1])
    facts = [nan | (k < 0).any(), k.sum(), k.new_tensor(float(len(x))), ends.sum(-2)]
    wrong, sum_of_k, height, (taken, never) = shards.reduce([v.to(k.dtype) for v in facts])
    total, room = float(sum_of_k), float(capacity.sum())
    if not float(height) * len(c):
        return torch.zeros_like(x), r, c
    slack = EQUAL * max(1.0, total)
    wide_slack = max(slack, SLACK * total)
    bad = bool(wrong > 0) or not (0 < tau < math.inf) or not bool(bias.isfinite().all())
    bad = bad or not math.isfinite(room + total) or room < total - wide_slack or bool((capacity < 0).any())
    if bad or (not at_most and room - total > wide_slack):
        return _nothing(x, r, c)
    k, goal = k.clone(), capacity.clone()
    equal = room <= total + wide_slack
    if equal and room != total:  # the sums agree up to their rounding
        goal = filled(goal, taken, height - never, total - room)
    goal -= taken  # on any process

    def solved(problem: Problem, start: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        start = start - start.mean() if equal else start.clamp(min=0)
        found = follow(problem, start, tau) if shards.here else None
        if found is None:
            found = _safe(problem, start, tau)
        if found is None or not equal:
            return found
        part, r, c = found
        shift = c.amin() if at_most else c.mean()
        return part, r + shift, c - shift

    if shards.here and not some_closed and _undecided(k, goal, equal):  # the usual case
        found = solved(Problem(x, k, goal, F, shards, not equal, spread), bias)
        return _nothing(x, r, c) if found is None else found
    y = torch.zeros_like(x)
    if some_closed:
        y[x == math.inf] = 1
        k -= ends[0].sum(-1)
    open_ = x.isfinite()
    if not _decide(y, r, c, k, goal, open_, equal, shards):
        return _nothing(x, r, c)
    lines, columns = open_.any(-1), shards.count(open_.sum(0).to(k)) > 0
    if not bool(columns.any()):
        return y, r, c
    inner = x[lines][:, columns].masked_fill(~open_[lines][:, columns], -math.inf)
    found = solved(Problem(inner, k[lines], goal[columns], F, shards, not equal), bias[columns])
    if found is None:
        return _nothing(x, r, c)
    part, r_, c_ = found
    where = lines.unsqueeze(-1) & columns
    y[where] = torch.where(open_[where], part.flatten(), y[where])
    r[lines], c[columns] = r_, c_
    return y, r, c


def filled(bounds: Tensor, fewest: Tensor, entries: Tensor, missing: Tensor | float) -> Tensor:
    """These bounds, along the last dim, with so much more in sum. Those at an end, fewest or entries, stay
    there, and the others stay between."""
    weight = torch.minimum(bounds - fewest, entries - bounds).clamp(min=0)
    total = weight.sum(-1, keepdim=True)
    return bounds + weight * (missing / torch.where(total > 0, total, 1)).clamp(-1, 1)


def _nothing(y: Tensor, r: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The answer where there is none: NaN."""
    return torch.full_like(y, math.nan), torch.full_like(r, math.nan), torch.full_like(c, math.nan)


def _undecided(k: Tensor, goal: Tensor, equal: bool) -> bool:
    """Whether `_decide` would settle nothing in a matrix of which no entry is infinite."""
    rounding = 64 * torch.finfo(k.dtype).eps
    lack, spare = rounding * (1 + k.abs().amax()), rounding * (1 + goal.abs().amax())
    inside = ((k > lack) & (k < len(goal) - lack)).all() & (goal > spare).all()
    return bool(inside & (goal < len(k) - spare).all()) if equal else bool(inside)


def _decide(
    y: Tensor, r: Tensor, c: Tensor, k: Tensor, goal: Tensor, open_: Tensor, equal: bool, shards: Row
) -> bool:
    """Settle, in place, the rows and columns that take nothing, or all that is left. False if one of them
    has to take more than there is, or less than nothing."""
    spread = shards.reduce([k.abs().sum()], [torch.cat([k.abs(), k.new_zeros(1)]).amax()])
    slack, rounding = EQUAL * max(1.0, float(spread[0])), 64 * torch.finfo(k.dtype).eps
    lack, spare = rounding * (1 + float(spread[1])), rounding * (1 + goal.abs().amax())
    left = open_.sum(-1)
    while True:
        none, full = (k <= lack) & (left > 0), (k >= left - lack) & (left > 0)
        broken = ((k < -slack) | (k > left + slack)).any()
        taken = torch.zeros_like(goal)
        if bool((none | full).any()):
            take = full.unsqueeze(-1) & open_
            y[take] = 1
            taken += take.sum(0)
            k[full | none] = 0
            r[none], r[full] = math.inf, -math.inf
            open_ &= ~(full | none).unsqueeze(-1)
        broken, taken, below = shards.reduce([broken.to(k), taken, open_.sum(0).to(k)])
        if bool(broken > 0):
            return False
        goal -= taken
        none = (goal <= spare) & (below > 0)
        full = (goal >= below - spare) & (below > 0) if equal else torch.zeros_like(none)
        if bool((goal < -slack).any() | (equal & (goal > below + slack).any())):
            return False
        if not bool((none | full).any()):
            return True
        take = full & open_
        y[take] = 1
        k -= take.sum(-1)
        goal[full] = 0
        c[none], c[full] = math.inf, -math.inf
        open_ &= ~(full | none)
        left = open_.sum(-1)


class Problem:
    """Rows with sums k and columns with sums (or, with ``nonnegative`` thresholds, at most) load.

    x is −inf where nothing may be; every row has at least two entries and a k strictly between. ``spread``
    is that of the scores, if it is known and all are finite.
    """

    def __init__(
        self,
        x: Tensor,
        k: Tensor,
        load: Tensor,
        F: CDF,
        shards: Row = HERE,
        nonnegative: bool = False,
        spread: float | None = None,
    ) -> None:
        self.x, self.k, self.load, self.F = x, k, load, F
        self.shards, self.nonnegative, self.spread = shards, nonnegative, spread
        self.any_closed = spread is None and bool(x.numel()) and bool(x.amin() == -math.inf)
        self.seen: list[tuple[Tensor, float, tuple[Tensor, Tensor, Tensor]]] = []

    def of(self, x: Tensor, k: Tensor, load: Tensor) -> Problem:
        """The same for some of the rows, or in another dtype."""
        return Problem(x, k, load, self.F, nonnegative=self.nonnegative, spread=self.spread)

    @cached_property
    def closed(self) -> Tensor:
        return self.x == -math.inf

    def miss(self, c: Tensor, by_column: Tensor) -> Tensor:
        """By how much the loads exceed their goals, where that is an error: with nonnegative thresholds, a
        load may be below its goal where c = 0."""
        return torch.where(c > 0, by_column, by_column.clamp(min=0)) if self.nonnegative else by_column

    def sweep(
        self, r: Tensor, c: Tensor, tau: float, tolerance: float, slopes: bool = True, values: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Rows moved to their thresholds for these of the columns, and the sums over them."""
        options = (self.x, self.k, r, c, tau, *self.F.key, ROW_STEPS, tolerance, slopes, values)
        found = torch.ops.khot.assign_pass.default(*options) if self.F.built_in else assign_pass(*options)
        return found

    def __call__(self, c: Tensor, tau: float) -> tuple[Tensor, Tensor]:
        """By how much the loads exceed their goal, (E,), and their derivatives in −c."""
        return self._at(c, tau)[1:]

    def rows(self, c: Tensor, tau: float) -> Tensor:
        """The rows' thresholds for these of the columns."""
        for known, at, result in self.seen:
            if known is c and at == tau:
                return result[0]
        return self._solve_rows(c, tau)

    def _at(self, c: Tensor, tau: float) -> tuple[Tensor, Tensor, Tensor]:
        """All of it. The last results are kept, because a solution is evaluated again where it is used."""
        for known, at, result in self.seen:
            if known is c and at == tau:  # thresholds are never changed in place
                return result
        result = self._evaluate(c, tau)
        self.seen = [(c, tau, result), *self.seen[: KEPT - 1]]
        return result

    def _solve_rows(self, c: Tensor, tau: float) -> Tensor:
        return thresholds(self.x - c, self.k, tau, self.F)

    def _evaluate(self, c: Tensor, tau: float) -> tuple[Tensor, Tensor, Tensor]:
        r = self._solve_rows(c, tau)
        z = (self.x - c - r.unsqueeze(-1)) / tau
        if self.any_closed:
            z = z.masked_fill(self.closed, 0)
            y, f = self.F.cdf(z).masked_fill(self.closed, 0), self.F.pdf(z).masked_fill(self.closed, 0)
        else:
            y, f = self.F.cdf(z), self.F.pdf(z)
        sums = f.sum(-1, keepdim=True)
        # where no entry of a row is between 0 and 1, the row does not move
        shares = f / sums.masked_fill(sums == 0, 1)
        block = torch.cat([y.sum(0)[None], f.sum(0)[None], f.T @ shares])
        block = self.shards.reduce([block])[0]
        return r, block[0] - self.load, (block[1].diag() - block[2:]) / tau

    def off(self, c: Tensor, tau: float) -> float:
        """The largest error of a load."""
        return float(self.miss(c, self(c, tau)[0]).abs().max())

    def solve(self, c: Tensor, tau: float) -> Tensor:
        """The columns' thresholds, from c, through falling temperatures."""
        most = float(self.load.max())
        if self.off(c, tau) <= NEAR * most:
            near = descend(self, c, tau, FINE * most)
            if self.off(near, tau) <= ACCEPTED * most:
                return near
        finite = torch.cat([self.x.masked_fill(self.closed, 0).flatten(), self.x.new_zeros(1)])
        high, low = self.shards.reduce([], [finite.amax(), -finite.amin()])
        spread = float(high + low)
        stages = [tau]
        while stages[-1] * STAGE < spread / 4:
            stages.append(stages[-1] * STAGE)
        before = math.inf
        while stages:
            stage = stages[-1]
            moved = descend(self, c, stage, (FINE if stage == tau else ROUGH) * most)
            limit = ACCEPTED if stage == tau else 10 * ROUGH
            if self.off(moved, stage) > limit * most and 1.01 * stage < before < math.inf:
                # too far from the solution before: in a gap, densities underflow and give no direction
                stages.append(math.sqrt(stage * before))
                continue
            c, before = moved, stages.pop()
        return c


def thresholds(u: Tensor, k: Tensor, tau: float, F: CDF, group: str = "") -> Tensor:
    """The exact threshold of each row, or of rows that are spread over a group."""
    options = (u, k, u.new_full((), tau), *F.key, "threshold")
    if F.built_in and not group:
        _, hi, lo = torch.ops.khot.soft_topk.default(*options)
    else:
        _, hi, lo = torch.ops.khot.reference_soft_topk.default(*options, group)
    return (hi + lo).to(u.dtype)


def follow(problem: Problem, c: Tensor, tau: float) -> tuple[Tensor, Tensor, Tensor] | None:
    """y, r and c by steps in r and c at once, from c; None if they do not arrive."""
    x, k, load = problem.x, problem.k, problem.load
    if bool(c.any()):  # a guess may save the stages
        found = _exact(problem, torch.full_like(k, math.nan), c, tau, near=NEAR)
        if found is not None:
            return found
        c = torch.zeros_like(c)
    spread = problem.spread
    if spread is None:
        finite = x.masked_fill(problem.closed, 0) if problem.any_closed else x
        spread = float(finite.amax() - finite.amin())
    if not (1 / SINGLE < tau < SINGLE and spread < SINGLE):
        return None
    stages = [tau]
    while stages[-1] * FALL < spread / 4:
        stages.append(stages[-1] * FALL)
    # float32 is enough for all stages but the end, and a part of the rows tells roughly what columns want
    single, goal = problem.of(x.float(), k.float(), load), CLOSE + SINGLE_ROUNDING * spread / tau
    some = len(x) > 2 * SAMPLE * x.shape[-1] and len(stages) > 2
    for coarse in (COARSE, PATIENT):
        start, left = c.float(), stages
        if some and coarse == COARSE:
            rough = _stages(_sample(single), start, stages[2:], coarse, coarse)
            if rough is not None:
                start, left = rough[1], stages[:2]
        near = _stages(single, start, left, coarse, goal)
        found = None if near is None else _exact(problem, near[0].to(x.dtype), near[1].to(x.dtype), tau)
        if found is not None or len(stages) == 1:
            return found
    return None


def _sample(problem: Problem) -> Problem:
    """A part of the rows, by multiples of the golden ratio, which avoid all periods that data may have."""
    count = SAMPLE * problem.x.shape[-1]
    places = torch.arange(count, dtype=torch.float64, device=problem.x.device)
    rows = ((places * GOLDEN).frac() * len(problem.x)).long()
    x, k = problem.x[rows], problem.k[rows]
    load = problem.load * (k.sum() / problem.k.sum())
    return problem.of(x, k, load)


def _stages(
    problem: Problem, c: Tensor, stages: list[float], coarse: float, goal: float
) -> tuple[Tensor, Tensor] | None:
    """The thresholds, roughly, at the first of these temperatures, from c at the last; None if they do not
    arrive. The step after the goal is reached is taken as well, because it is known by then."""
    r = torch.full_like(problem.k, math.nan)
    for tau in reversed(stages):
        for _ in range(FEW):
            r, miss, _, sums, _ = problem.sweep(r, c, tau, LOOSE)
            by_column = sums[0] - problem.load
            # on the way, a few rows may stay behind
            off = problem.miss(c, by_column) / problem.load
            error = max(float((miss / problem.k).abs().mean()), float(off.abs().amax()))
            step = _step(problem, _schur(sums), by_column - sums[2], c, tau) if math.isfinite(error) else None
            if step is None:
                return None
            c = step
            if error <= (goal if tau == stages[0] else coarse):
                break
        else:
            return None
    return r, c


def _exact(
    problem: Problem, r: Tensor, c: Tensor, tau: float, near: float = math.inf
) -> tuple[Tensor, Tensor, Tensor] | None:
    """y, r and c after steps at one temperature; None if they do not arrive, or if the first error is above
    ``near``."""
    error, schur = math.inf, None
    for step in range(FEW):
        close, fresh = error <= CLOSE, schur is None or error > SAME
        r, miss, density, sums, y = problem.sweep(r, c, tau, FINE if close else TIGHT, fresh, close)
        by_column = sums[0] - problem.load
        off = problem.miss(c, by_column) / problem.load
        error = max(float((miss / problem.k).abs().amax()), float(off.abs().amax()))
        if not math.isfinite(error) or (step == 0 and error > near):
            return None
        if error <= EXACT:
            if close:
                return _settled(problem, y, r, c, miss, density, tau)
            continue  # the same once more, with sharp rows and y
        if fresh:
            schur = _schur(sums)
        assert schur is not None
        moved = _step(problem, schur, by_column - sums[2], c, tau)
        if moved is None:
            return None
        c = moved
    return None


def _schur(sums: Tensor) -> Tensor:
    """The derivative of the loads in −c/τ, where the rows keep their sums."""
    slopes, schur = sums[1], sums[3:].neg()
    schur.diagonal().add_(slopes + 1e-12 * (slopes.mean() + 1e-30))
    return schur


def _step(problem: Problem, schur: Tensor, miss: Tensor, c: Tensor, tau: float) -> Tensor | None:
    """The columns' thresholds after a step of Newton's method; None if there is none.

    With nonnegative thresholds, a column has the threshold 0 or its goal as load, whichever the last step
    says it is nearer to (Hintermüller, Ito, Kunisch 2002).
    """
    # the same constant added to all c changes nothing, so that one direction has to be fixed
    ones = (schur.diagonal().mean() + 1e-30) / len(c)
    if not problem.nonnegative:
        schur = schur + ones
    else:
        free = c > -tau * miss / schur.diagonal()
        schur = schur + ones * free.all()
        back = torch.where(free, 0, -c / tau).to(schur.dtype)
        miss = torch.where(free, miss - schur @ back, back)
        schur = torch.where(free.unsqueeze(-1) & free, schur, (~free).diag().to(schur.dtype))
    dc, info = torch.linalg.solve_ex(schur, miss)
    if int(info):
        return None
    # farther out, the sums are flat and say nothing of the way back
    length = float(dc.abs().amax())
    c = c + (dc if length <= REACH else dc * (REACH / length)).to(c.dtype) * tau
    return c.sub(c.amin().clamp(min=0)).clamp(min=0) if problem.nonnegative else c


def _settled(
    problem: Problem, y: Tensor, r: Tensor, c: Tensor, miss: Tensor, density: Tensor, tau: float
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Rows whose entries are nearly 0 and 1, and whose sums leave their thresholds open, get exact ones."""
    known = (miss.abs() <= SETTLED * density) & (density > NO_DENSITY)
    rows = ((density < DECIDED) & ~known).nonzero().squeeze(-1)
    if len(rows):
        part = problem.of(problem.x[rows], problem.k[rows], problem.load)
        r[rows] = part.rows(c, tau)
        moved = problem.F.cdf((part.x - c - r[rows].unsqueeze(-1)) / tau).masked_fill_(part.closed, 0)
        y[rows] = moved
        off = problem.miss(c, y.sum(0) - problem.load) / problem.load
        if float(off.abs().amax()) > 1e-12:
            return None
    return y, r, c


def _safe(problem: Problem, c: Tensor, tau: float) -> tuple[Tensor, Tensor, Tensor] | None:
    """y, r and c by exact rows and steps in c alone, from c; None if there is no solution."""
    c = problem.solve(c, tau)
    if problem.off(c, tau) > ACCEPTED * float(problem.load.max()):
        return None
    r = problem.rows(c, tau)
    y = problem.F.cdf((problem.x - r.unsqueeze(-1) - c) / tau).masked_fill(problem.closed, 0)
    return y, r, c


def descend(problem: Problem, c: Tensor, tau: float, goal: float) -> Tensor:
    """From c, damped steps until no load is off by more than the goal, or no step helps any more."""
    damping, identity = 1e-6, torch.eye(len(c), dtype=c.dtype, device=c.device)
    miss, curvature = problem(c, tau)
    slope = float(curvature.diagonal().mean()) + float(problem.load.max()) / tau * 1e-12

    def error(c: Tensor, miss: Tensor) -> Tensor:
        if not problem.nonnegative:
            return miss
        return (c + miss / slope).clamp(min=0).sub(c) * slope  # 0 where c = 0 and the load is below its goal

    off = error(c, miss)
    for _ in range(STEPS):
        if off.abs().max() <= goal:
            break
        # the same constant added to all thresholds changes nothing, so that one direction has to be fixed
        scale = curvature.diagonal().mean() + problem.load.max() / tau * 1e-12
        if problem.nonnegative:
            moves = (c > 0) | (miss > 0)
            fixed = torch.where(moves.unsqueeze(-1) & moves, curvature, 0) + (~moves).diag() * scale
            wanted = torch.where(moves, miss, 0)
        else:
            fixed, wanted = curvature + scale / len(c), miss
        step = problem.shards.same(torch.linalg.solve(fixed + damping * scale * identity, wanted))
        # farther out, the sums are flat and say nothing of the way back
        step = step * (REACH * tau / step.abs().max().clamp(min=REACH * tau))
        tried = c + step
        tried = tried.clamp(min=0) if problem.nonnegative else tried
        next_miss, next_curvature = problem(tried, tau)
        next_off = error(tried, next_miss)
        if next_off.square().sum() < off.square().sum():
            c, miss, curvature, off = tried, next_miss, next_curvature, next_off
            damping = max(damping / 10, 1e-12)
        elif damping > 1e6 or off.abs().max() <= ROUNDING * problem.load.max():
            break
        else:
            damping = damping * 10 if damping >= 1e-3 else 1e-3
    return c
