"""The sorted SOFT top-k: entropic transport of n scores onto k + 1 anchors, by Newton on its dual.

Everything is in float64. n times the plan is Γ_ri = softmax over r of s·a_r·x_i + b_r, with s = 2/ε and the
anchors a = k, k − 1, ..., 1, 0. Each entry has mass 1 whatever b is, so only the k equations for the column
sums Σ_i Γ_ri = 1 have to be solved. The potentials b are stored as thresholds between neighbouring anchors,

    L_r − L_(r+1) = s·(x_i − hi_r) − shift_r,

where hi_r is the (r + 2)-th largest score, so that all terms are small near the threshold, whatever the
scores and ε are. hi_r = ±`FAR` means that an anchor takes no finite entry: for +FAR, anchor r belongs to an
entry of +inf; for −FAR, nothing is left for the last anchor.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from khot._core.precision import on

__all__ = [
    "FAR",
    "FARTHEST",
    "FLOOR",
    "GOAL",
    "HIGHEST",
    "STEEPEST",
    "STEPS",
    "TOLERANCE",
    "begin",
    "laplacian",
    "pinned",
    "plan",
    "scale_of",
    "sorted_soft_topk",
]

FARTHEST = 1e300  # scores and s are clamped to ±FARTHEST and [1/FARTHEST, FARTHEST],
FAR = 1e305  # so that the distance between FAR and a score, times s, acts as infinite
STEEPEST = 1e150  # bound on logits: sums of k of them stay finite, and exp(−STEEPEST) = 0
STEPS = 40  # of Newton; at most 8 in 13,000 random problems with n ≤ 1000, k ≤ 64, ε from 1e-3 to 100
SWEEPS = 20_000  # of Sinkhorn, for rows that Newton does not solve
TOLERANCE = 1e-10  # the relative error of a column sum that we accept
GOAL = 1e-13  # the error at which Newton, which converges quadratically, stops
FLOOR = 1e-13  # damping against the rounding of column sums, where the matrix has underflowed
# the entries that the solver leaves out have at most exp(−NEGLIGIBLE) of a column sum together
NEGLIGIBLE = 40.0
HIGHEST = 300.0  # bound on the potentials that the solver tries: exp of twice as much is finite
BLOCK = 1 << 20  # entries of the plan that the solver works on at once


def sorted_soft_topk(x: Tensor, k: int, epsilon: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """n times the plan, without its last anchor, and the potentials.

    Args:
        x: scores, (*batch, n); −inf is never selected, +inf comes first.
        k: in [1, n].
        epsilon: broadcasts with batch; a number may be on the CPU.

    Returns:
        The plan, (*batch, k, n) of x's dtype; the int64 indices of the k largest, (*batch, k); hi and shift,
        (*batch, k). They are NaN in rows with a NaN, with more than k entries of +inf or fewer than k above
        −inf, and where ε is not positive and finite.
    """
    *batch, n = x.shape
    flat = x.reshape(-1, n)
    eps = on(x.device, epsilon).double().expand(batch).reshape(-1)
    y = x.new_empty(flat.shape[0], k, n)
    order = torch.empty(flat.shape[0], k, dtype=torch.int64, device=x.device)
    hi = x.new_empty(flat.shape[0], k, dtype=torch.float64)
    shift = torch.empty_like(hi)
    rows = max(1, BLOCK // ((k + 1) * n))
    for start in range(0, flat.shape[0], rows):
        part = slice(start, start + rows)
        tile, e = flat[part].double(), eps[part]
        order[part], hi[part], shift[part] = _solve(tile, k, e)
        y[part] = plan(tile, e, order[part], hi[part], shift[part])[:, :-1]
    # entries of +inf share the first places
    infinite = flat == math.inf
    if x.is_cuda or bool(infinite.any()):
        share = (1 / infinite.sum(-1).to(x.dtype))[:, None, None]
        y = torch.where((hi == FAR)[:, :, None] & infinite[:, None, :], share, y)
    return y.reshape(*batch, k, n), order.reshape(*batch, k), hi.reshape(*batch, k), shift.reshape(*batch, k)


class _Frame(NamedTuple):
    """The parts of the logits that do not depend on shift."""

    slopes: Tensor  # s·a_r·(x_i − hi_k), (*batch, k + 1, n)
    offsets: Tensor  # s·(hi_k − hi_r), (*batch, k)
    order: Tensor
    head: Tensor  # s·(x_i − hi_r) for the k largest, (*batch, k, k)
    lower: Tensor  # where head is not positive
    above: Tensor  # q ≥ r, (k + 1, k): sums over the thresholds from anchor r on


def plan(x: Tensor, epsilon: Tensor, order: Tensor, hi: Tensor, shift: Tensor) -> Tensor:
    """Γ, (*batch, k + 1, n), differentiable in x, ε and shift.

    Entries of −inf belong to the last anchor, those of +inf to the first.
    """
    return _gamma(_frame(x, epsilon, order, hi), shift)


def _frame(x: Tensor, epsilon: Tensor, order: Tensor, hi: Tensor) -> _Frame:
    k = hi.shape[-1]
    scale = scale_of(epsilon).unsqueeze(-1)
    x = x.masked_fill(x == -math.inf, -2 * FAR).masked_fill(x == math.inf, 2 * FAR)  # beyond every threshold
    below = scale * (x - hi[..., -1:])
    below = below.clamp(min=-STEEPEST).masked_fill(below > 0, 0)  # clamp() would have no slope at 0
    anchors = torch.arange(k, -1, -1, dtype=torch.float64, device=x.device)
    offsets = (scale * (hi[..., -1:] - hi)).clamp(-STEEPEST, STEEPEST)
    largest = x.gather(-1, order).unsqueeze(-2)
    head = (scale.unsqueeze(-1) * (largest - hi.unsqueeze(-1))).clamp(-STEEPEST, STEEPEST)
    above = torch.ones(k + 1, k, dtype=torch.float64, device=x.device).triu()
    return _Frame(anchors.unsqueeze(-1) * below.unsqueeze(-2), offsets, order, head, head <= 0, above)


def _gamma(frame: _Frame, shift: Tensor) -> Tensor:
    logits = frame.slopes + _potentials(frame, shift).unsqueeze(-1)
    head = _head_logits(frame, shift)
    return logits.scatter(-1, frame.order.unsqueeze(-2).expand(head.shape), head).softmax(-2)


def _potentials(frame: _Frame, shift: Tensor) -> Tensor:
    """b relative to the last anchor, (*batch, k + 1). At the solution it is ≤ 0 or of the order of log k,
    because the (k + 1)-th largest score, where slopes are 0, gives the last anchor at least 1/(k + 1)."""
    return (frame.offsets - shift) @ frame.above.mT


def _head_logits(frame: _Frame, shift: Tensor) -> Tensor:
    """Logits of the k largest, (*batch, k + 1, k), relative to the anchor that each of them gets as ε → 0:
    sums over the thresholds between that anchor and the others."""
    steps = frame.head - shift.unsqueeze(-1)
    return frame.above @ steps.where(frame.lower, 0) - (1 - frame.above) @ steps.where(~frame.lower, 0)


def scale_of(epsilon: Tensor) -> Tensor:
    """s = 2/ε; NaN where ε is not positive and finite."""
    good = (epsilon > 0) & (epsilon < math.inf)
    return (2 / epsilon.masked_fill(~good, math.nan)).clamp(1 / FARTHEST, FARTHEST)


def laplacian(gram: Tensor, ridge: Tensor) -> Tensor:
    """∂(column sums)/∂b = diag(c) − ΓΓᵀ, (*batch, k, k), plus a ridge on its diagonal.

    The diagonal is computed from the off-diagonal part of ΓΓᵀ, without cancellation.
    """
    k = ridge.shape[-1]
    between = gram.masked_fill(torch.eye(k + 1, dtype=torch.bool, device=gram.device), 0)
    return torch.diag_embed(between.sum(-1)[..., :k] + ridge) - between[..., :k, :k]


def pinned(hi: Tensor) -> Tensor:
    """The ridge that fixes the potential of an anchor that takes no finite entry. If the last anchor takes
    none, the one before it is fixed, because then only differences of potentials matter."""
    return (hi.abs() == FAR).to(hi.dtype)


def begin(x: Tensor, k: int, scale: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What the solver starts from, for rows x (rows, n) and s (rows, 1).

    Returns:
        The indices of the k largest scores and these scores; hi; the first shifts; the target column sums if
        all of x takes part; and the number of entries of +inf, (rows, 1).
    """
    n = x.shape[-1]
    top, order = x.topk(min(k + 1, n))
    if k == n:
        top = torch.nn.functional.pad(top, (0, 1), value=-math.inf)
    taken = (x == math.inf).sum(-1, keepdim=True)
    bad = x.isnan().any(-1, keepdim=True) | (taken > k) | (top[:, k - 1 : k] == -math.inf)
    above, below = (part.clamp(-FARTHEST, FARTHEST) for part in (top[:, :-1], top[:, 1:]))
    hi = below.masked_fill(top[:, 1:] == -math.inf, -FAR).masked_fill(top[:, :-1] == math.inf, FAR)
    hi = hi.masked_fill(bad, math.nan)
    # the thresholds start half-way between neighbours
    shift = 0.5 * (scale * (above - below)).clamp(max=STEEPEST).masked_fill(hi.abs() == FAR, 0)
    target = torch.ones_like(top)
    target[:, :k].masked_fill_(hi == FAR, 0)  # plan puts all entries of +inf on the first anchor
    target[:, :1] += taken
    target[:, k] = n - k
    return order[:, :k], top[:, :k], hi, shift, target, taken


def _solve(x: Tensor, k: int, epsilon: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The indices of the k largest, hi and shift, for rows x (rows, n)."""
    scale = scale_of(epsilon).unsqueeze(-1)
    order, _, hi, shift, target, _ = begin(x, k, scale)
    x = _relevant(x, k, scale)
    target[:, k] = x.shape[-1] - k
    frame = _frame(x, epsilon, x.topk(k).indices, hi)
    return order, hi, _newton(frame, hi, shift, target)


def _relevant(x: Tensor, k: int, scale: Tensor) -> Tensor:
    """The largest scores, without those that contribute a negligible amount to every column sum.

    At most 2k entries give the last anchor less than half of their mass. Below them, the odds of any other
    anchor fall like exp(−s·distance). So all entries that are more than (log(n) + `NEGLIGIBLE`)/s below the
    2k-th score contribute at most exp(−`NEGLIGIBLE`) together.
    """
    n = x.shape[-1]
    if x.is_cuda or 2 * k >= n or not x.shape[0]:  # on a GPU, counting the entries would wait for the device
        return x
    last = x.topk(2 * k).values[:, -1:] - (math.log(n) + NEGLIGIBLE) / scale
    kept = max(2 * k, int((x >= last).sum(-1).max()))
    return x if 2 * kept > n else x.topk(kept).values


def _newton(frame: _Frame, hi: Tensor, shift: Tensor, target: Tensor) -> Tensor:
    """The shifts at which every column sum is its target."""
    k, pin = hi.shape[-1], pinned(hi)
    size = target.clamp(min=1)
    # the exponentials of the other entries are exp(slopes)·exp(b), so they are computed only once
    weights = frame.slopes.exp().scatter(-1, frame.order.unsqueeze(-2).expand(-1, k + 1, -1), 0)

    def evaluate(shift: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        factor = _potentials(frame, shift).clamp(max=HIGHEST).exp().unsqueeze(-1)
        # the last anchor alone contributes 1; the clamp is for the columns of the k largest, which are 0
        tail = weights / (factor.mT @ weights).clamp(min=1)
        head = _head_logits(frame, shift).softmax(-2)
        sums = (factor * tail.sum(-1, keepdim=True)).squeeze(-1) + head.sum(-1)
        gram = factor * (tail @ tail.mT) * factor.mT + head @ head.mT
        return sums, gram, ((sums - target).abs() / size).amax(-1)

    shift = _first_step(shift, *evaluate(shift)[:2], target)
    sums, gram, error = evaluate(shift)
    damping, live = torch.zeros_like(error), error > GOAL
    for _ in range(STEPS):
        if not hi.is_cuda and not bool(live.any()):
            break
        K = laplacian(gram, pin + (FLOOR + damping).unsqueeze(-1))  # Levenberg damping; the sums are near 1
        missing = target - sums
        step, _ = torch.linalg.solve_ex(K, missing[:, :k])
        step = torch.nn.functional.pad(step, (0, 1))
        trial = _move(shift, step)
        new_sums, new_gram, new_error = evaluate(trial)
        # the slope of the convex dual at the end of the step must not exceed half its first descent
        climb, fall = ((new_sums - target) * step).sum(-1), (missing * step).sum(-1)
        good = live & ((climb <= 0.5 * fall) | (new_error < error))
        damping = torch.where(
            good, torch.where(damping > 1e-3, damping / 10, 0), 10 * damping.clamp(min=1e-3)
        )
        accept = good.unsqueeze(-1)
        shift, sums = trial.where(accept, shift), new_sums.where(accept, sums)
        gram, error = new_gram.where(accept.unsqueeze(-1), gram), new_error.where(good, error)
        # a row that no longer improves has reached rounding errors
        live = live & (error > GOAL) & (good | (error > TOLERANCE))
    left = error > TOLERANCE
    if bool(left.any()):
        rows = _Frame._make([*(part[left] for part in frame[:5]), frame.above])
        shift[left] = _sinkhorn(rows, shift[left], target[left])
    return shift


def _first_step(shift: Tensor, sums: Tensor, gram: Tensor, target: Tensor) -> Tensor:
    """A Sinkhorn sweep without the entries that clearly belong to the last anchor.

    These entries hide how much the potentials have to move. If m other entries all gave the first k anchors
    the share p, the sum of these anchors would be C = mp and its derivative C' = mp(1 − p). So
    m = C²/(C − C'), which is n for equal scores.
    """
    k = shift.shape[-1]
    free = sums[:, :k].where(target[:, :k] == 1, 0)  # the other anchors belong to entries of +inf
    total, wanted = free.sum(-1), (target[:, :k] == 1).sum(-1)
    leverage = gram[:, :k, k].sum(-1)
    others = total**2 / (total - leverage)
    good = (leverage > 0) & (others > wanted + 0.5)  # closer to it, rounding would decide
    sums, target = sums.clone(), target.clone()
    sums[:, k] = (others - total).where(good, sums[:, k])
    target[:, k] = (others - wanted).where(good, target[:, k])
    return _sweep(shift, sums, target)


def _sinkhorn(frame: _Frame, shift: Tensor, target: Tensor) -> Tensor:
    """The solution by log-domain Sinkhorn sweeps, which always converge but may be slow."""
    for _ in range(SWEEPS):
        sums = _gamma(frame, shift).sum(-1)
        if bool(((sums - target).abs() <= TOLERANCE * target.clamp(min=1)).all()):
            break
        shift = _sweep(shift, sums, target)
    return shift


def _sweep(shift: Tensor, sums: Tensor, target: Tensor) -> Tensor:
    """One Sinkhorn sweep: the potential of each anchor moves by log(target/sum)."""
    tiny = torch.finfo(sums.dtype).tiny
    return _move(shift, torch.log(target.clamp(min=tiny) / sums.clamp(min=tiny)).masked_fill(target == 0, 0))


def _move(shift: Tensor, step: Tensor) -> Tensor:
    """The shifts once b has moved by step, (*batch, k + 1)."""
    return shift + step.diff(dim=-1)
