"""Parameters of a design for prescribed inclusion probabilities: a fixed point with Anderson acceleration."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["calibrate_kernel", "fixed_point"]

DEPTH = 3  # how many earlier steps the acceleration combines; more steps were no faster
ITERATIONS = 40  # over the hard cases of the tests, at most 11 were needed for an error of 1e-12
NEAR = 1e-13  # an error of probabilities after which one more step reaches rounding errors
CLOSE = 1e-3  # the same for the errors of logits
RIDGE = 1e-13  # relative to the trace; anything smaller is lost to rounding anyway
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

    return fixed_point(goal, k, marginals)


def fixed_point(goal: Tensor, k: Tensor, marginals: Marginals, near: float = NEAR) -> tuple[Tensor, Tensor]:
    """θ for which marginals(θ, k) = (π, 1 − π) has π = σ(goal). It takes one step after π is within ``near``.

    The step is θ ← θ + goal − logit π(θ), with Anderson acceleration in the metric of the variances.
    """
    certain = goal.isinf()
    goal_pi = torch.sigmoid(goal)
    variance = goal_pi * torch.sigmoid(-goal)
    theta, active = goal, torch.ones_like(k, dtype=torch.bool).unsqueeze(-1)
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
