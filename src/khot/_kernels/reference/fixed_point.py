"""Parameters of a design for prescribed inclusion probabilities: a fixed point with Anderson acceleration."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from khot._kernels.reference.poisson_binomial import swaps

__all__ = ["calibrate_kernel", "fixed_point", "start"]

DEPTH = 3  # how many earlier steps the acceleration combines; more steps were no faster
ITERATIONS = 40  # over the hard cases of the tests, at most 11 were needed for an error of 1e-12
NEAR = 1e-13  # an error of probabilities after which one more step reaches rounding errors
CLOSE = 1e-3  # the same for the errors of logits
RIDGE = 1e-13  # relative to the trace; anything smaller is lost to rounding anyway
CERTAIN = 700.0  # a logit beyond which a probability is nearly the smallest number of float64
TINY = torch.finfo(torch.float64).tiny

Marginals = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def calibrate_kernel(goal: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """The reference of khot::calibrate: the logits of the conditional Poisson design with π = σ(goal).

    Args:
        goal: (*batch, n) in float64; ±inf for certain units. Σσ(goal) = k.
        k: (*batch), integers.

    Returns:
        θ, (*batch, n), up to one constant per row; and the number of iterations for each row, (*batch).
    """
    one = goal.new_ones(())

    def marginals(theta: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        _, hi, lo = torch.ops.khot.soft_topk.default(theta, k, one, "logistic", 0.0, "threshold")
        _, pi, out = torch.ops.khot.inclusion.default((theta - hi.unsqueeze(-1)) - lo.unsqueeze(-1), k)
        return pi, out

    goal = torch.where(goal.abs() > CERTAIN, goal.sign() * math.inf, goal)
    return fixed_point(goal, k, marginals, begin=start(goal, k))


def start(goal: Tensor, k: Tensor) -> Tensor:
    """Where the fixed point of the conditional Poisson design begins: goal, or where its variance is tiny,
    nearly the solution.

    There π is nearly the odds w times the sum of the odds on the other side of ½
    (:class:`~khot._kernels.reference.poisson_binomial.Swaps`), so that w is nearly π/√Σπ. A start from w = π
    would be wrong by many orders of magnitude.
    """
    s = swaps(torch.sigmoid(-goal), torch.sigmoid(goal), k)
    above, below = (s.odds.where(side, 0).sum(-1, keepdim=True) for side in (s.above, ~s.above))
    free = s.apply & (above > 0) & (below > 0)
    above, below = above.where(free, 1), below.where(free, 1)
    return goal + 0.5 * torch.where(s.above, above.log(), -below.log())


def fixed_point(
    goal: Tensor, k: Tensor, marginals: Marginals, near: float = NEAR, begin: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """θ for which marginals(θ, k) = (π, 1 − π) has π = σ(goal). It takes one step after π is within ``near``.

    The step is θ ← θ + goal − logit π(θ), with Anderson acceleration in the metric of the variances.
    """
    certain = goal.isinf()
    goal_pi = torch.sigmoid(goal)
    variance = goal_pi * torch.sigmoid(-goal)
    theta, active = goal if begin is None else begin, torch.ones_like(k, dtype=torch.bool).unsqueeze(-1)
    iterations = torch.zeros_like(k, dtype=goal.dtype)
    moves: list[Tensor] = []  # the last changes of θ; turns are those of the residual
    turns: list[Tensor] = []
    for _ in range(ITERATIONS):
        iterations = iterations + active.squeeze(-1)
        pi, out = marginals(theta, k)
        residual = (goal - (pi.log() - out.log())).masked_fill(certain, 0)
        move = residual
        if moves:
            turns[-1] = residual - turns[-1]
            moves, turns = moves[-DEPTH:], turns[-DEPTH:]
            F, X = torch.stack(turns, -1), torch.stack(moves, -1)
            weighted = F * variance.unsqueeze(-1)
            gram = F.mT @ weighted
            ridge = RIDGE * gram.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None] + TINY
            gram = gram + ridge * torch.eye(len(turns), dtype=gram.dtype, device=gram.device)
            gamma = torch.linalg.solve(gram, weighted.mT @ residual.unsqueeze(-1))
            move = residual - ((X + F) @ gamma).squeeze(-1)
        move = move.where(active, 0)  # a row that has arrived stays
        theta = theta + move
        # Small probabilities need a small relative error, too, or else the last step may go wrong.
        far = ((pi - goal_pi).abs() > near) | (residual.abs() > CLOSE)
        active = active & far.any(-1, keepdim=True)
        if not bool(active.any()):
            break
        moves.append(move)
        turns.append(residual)
    return theta, iterations
