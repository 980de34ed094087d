"""Parameters of a design for prescribed inclusion probabilities: a fixed point with Anderson acceleration."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from khot._kernels.reference.poisson_binomial import swaps

__all__ = ["CLOSE", "HAJEK", "Accuracy", "calibrate_kernel", "fixed_point", "from_swaps", "tilted"]

DEPTH = 3  # how many earlier steps the acceleration combines; more steps were no faster
ITERATIONS = 40  # over the hard cases of the tests, at most 11 were needed for an error of 1e-12
CLOSE = 1e-3  # an error of logits from which the next step is safe
HAJEK = 1.0  # a variance from which on Hájek's formula is a better start, and the iteration smooth
RIDGE = 1e-13  # relative to the trace; anything smaller is lost to rounding anyway
CERTAIN = 700.0  # a logit beyond which a probability is nearly the smallest number of float64
TINY = torch.finfo(torch.float64).tiny

Marginals = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Accuracy(NamedTuple):
    """How close the inclusion probabilities come."""

    near: float  # a step from such an error is the last one
    # so is a step that leaves at most this, if it is as good as the step before it; with a variance below
    # HAJEK one step says little about the next
    reached: float


EXACT = Accuracy(1e-13, 1e-14)  # one step from the first reaches rounding errors


def calibrate_kernel(goal: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """The reference of khot::calibrate: the logits of the conditional Poisson design with π = σ(goal).

    Args:
        goal: (*batch, n) in float64, with Σσ(goal) = k up to rounding; ±inf for certain units.
        k: (*batch), integers.

    Returns:
        θ, (*batch, n), up to one constant per row; and the number of iterations for each row, (*batch).
    """
    goal = tilted(goal, k)
    p = goal.sigmoid()
    variance = (p * (-goal).sigmoid()).sum(-1, keepdim=True)
    # Hájek 1964, theorem 5.2, solved for the parameters
    begin = torch.where(variance >= HAJEK, goal + (0.5 - p) / variance, from_swaps(goal, k))

    def marginals(theta: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        _, pi, out = torch.ops.khot.inclusion.default(tilted(theta, k), k)
        return pi, out

    goal = torch.where(goal.abs() > CERTAIN, goal.sign() * math.inf, goal)
    return fixed_point(goal, k, marginals, EXACT, begin)


def tilted(theta: Tensor, k: Tensor) -> Tensor:
    """θ − t with Σσ(θ − t) = k."""
    one = theta.new_ones(())
    _, hi, lo = torch.ops.khot.soft_topk.default(theta, k, one, "logistic", 0.0, "threshold")
    return (theta - hi.unsqueeze(-1)) - lo.unsqueeze(-1)


def from_swaps(goal: Tensor, k: Tensor) -> Tensor:
    """Where the variance is tiny, nearly the parameters of the conditional Poisson design; elsewhere goal.

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
    goal: Tensor, k: Tensor, marginals: Marginals, accuracy: Accuracy, begin: Tensor
) -> tuple[Tensor, Tensor]:
    """θ for which marginals(θ, k) = (π, 1 − π) has π = σ(goal), and the number of iterations.

    The step is θ ← θ + goal − logit π(θ), with Anderson acceleration in the metric of the variances.
    """
    if not goal.shape[-1]:
        return begin, torch.zeros_like(k, dtype=goal.dtype)
    certain = goal.isinf()
    goal_pi = torch.sigmoid(goal)
    variance = goal_pi * torch.sigmoid(-goal)
    reached = torch.where(variance.sum(-1, keepdim=True) >= HAJEK, accuracy.reached, 0.0)
    theta, active = begin, torch.ones_like(k, dtype=torch.bool).unsqueeze(-1)
    before = torch.zeros_like(k, dtype=goal.dtype).unsqueeze(-1)
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
        error = (pi - goal_pi).abs().amax(-1, keepdim=True)
        arrived = (error <= accuracy.near) | (error.square() <= reached * before)
        active = active & ~(arrived & (residual.abs() <= CLOSE).all(-1, keepdim=True))
        before = error
        if not bool(active.any()):
            break
        moves.append(move)
        turns.append(residual)
    return theta, iterations
