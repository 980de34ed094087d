"""Order sampling with Pareto variables: its inclusion probabilities, and the parameters for given ones.

Let L_i = logit U_i − θ_i, whose distribution function is σ(t + θ_i), and S the k units with the smallest.
With t the largest of these, P(S) = ∫ Σ_{i∈S} σ'(t + θ_i) Π_{j∈S∖i} σ(t + θ_j) Π_{j∉S} σ(−t − θ_j) dt, so that

    P(S) = exp(Σ_{i∈S} θ_i) Σ_{i∈S} c_i,    c_i = ∫ σ(−t − θ_i) e^(kt) Π_j σ(−t − θ_j) dt

(Traat, Bondesson, Meister 2004): a conditional Poisson design, weighted by the sum of the coefficients c_i.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from khot._kernels.reference import fixed_point, poisson_binomial

__all__ = [
    "LARGEST",
    "LEAST",
    "NEGLIGIBLE",
    "NEWTON",
    "NORMAL_STEP",
    "SETTLED",
    "STEP",
    "coefficients",
    "order_calibrate",
    "order_inclusion",
]

# The least d = Σπ(1 − π) for the adjustment's formula: below, its bias exceeds 1e-3, and at d = 0.02 it
# prefers 0.01 to 0.99.
LEAST = 2.5
ACCURACY = fixed_point.Accuracy(1e-7, 1e-9)  # one step from the first leads to less than 1e-8
NEGLIGIBLE = 40.0  # e^−40 times the integrand's maximum is less than its rounding error
# The trapezoidal rule has the error exp(−2π·π/step), because the integrand's poles are π away from the real
# line, times a factor for their order, and, where the integrand is like a normal density of variance 1/V,
# exp(−2π²/(step²V)). With a step of 0.5 the error reaches 1e-10 for twelve equal units, with 0.4 it is 1e-14.
STEP, NORMAL_STEP = 0.4, 0.75
LARGEST = 600.0  # the largest t: no exponential overflows, and only a logit below −560 would need more
# d below which the θ of the conditional Poisson design serve: they make the unlikely units at most
# log(1/π) times as likely as prescribed, which is less than 1e-8.
SETTLED = 1e-10
AT_ONCE = 1 << 16  # entries times nodes that are computed together
NEWTON = 6  # Newton steps: the ends of the integral need not be exact, and no step falls short of them


def order_inclusion(z: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """The reference of khot::order_inclusion: π and 1 − π, each of full relative accuracy.

    Under the conditional Poisson design E[x_j Σ c x]/E[Σ c x] = π_j + Cov(x_j, Σ c x)/Σ c π.

    Args:
        z: θ (*batch, n) in float64, shifted so that Σσ(z) = k.
        k: (*batch), integers.
    """
    c, settled = coefficients(z, k, torch.zeros_like(z))
    _, pi, out = poisson_binomial.inclusion_kernel(z, k)
    mean = (c * pi).sum(-1, keepdim=True).masked_fill(settled, 1)
    more = (poisson_binomial.covariance_kernel(z, k, c) / mean).masked_fill(settled, 0)
    return (pi + more).clamp(0, 1), (out - more).clamp(0, 1)


def order_calibrate(goal: Tensor, k: Tensor) -> Tensor:
    """The reference of khot::order_calibrate: θ with the inclusion probabilities σ(goal), within 1e-8.

    Args:
        goal: (*batch, n) in float64, with Σσ(goal) = k up to rounding; ±inf for certain units.
        k: (*batch), integers.

    Returns:
        θ, (*batch, n), up to one constant per row; ±inf for certain units.
    """
    if not goal.numel():
        return goal.clone()
    goal = fixed_point.tilted(goal, k)
    pi = goal.sigmoid()
    d = _variance(goal)
    settled = d < SETTLED
    # the iteration needs no logit π(θ) of these rows, which may be infinite
    started = torch.where(settled, goal.sign() * torch.inf, goal)
    change = pi * (1 - pi) * (0.5 - pi) / d.clamp(min=LEAST).square()
    found, _ = fixed_point.fixed_point(
        started,
        k,
        lambda theta, k: order_inclusion(fixed_point.tilted(theta, k), k),
        ACCURACY,
        started + torch.where(d < LEAST, 0, change),
    )
    return torch.where(settled, fixed_point.from_swaps(goal, k), found)


def _variance(z: Tensor) -> Tensor:
    """Of the sum of trials with logits z, (*batch, 1)."""
    return (z.sigmoid() * (-z).sigmoid()).sum(-1, keepdim=True)


def coefficients(theta: Tensor, k: Tensor, change: Tensor) -> tuple[Tensor, Tensor]:
    """c, up to one factor per row, and whether the row has no random unit, or nearly none, (*batch, 1).

    The integrand is σ(−t − z_i) e^−D(t) with D(t) = Σ [softplus(t + z) − softplus(z)] − kt, which is convex
    and has its minimum, 0, at t = 0. Units with z = ∞ are left out, and k is reduced by their number. z are
    the given logits, with Σσ(z) = k, and ``change`` is 0, with their derivatives.
    """
    if not theta.numel():
        return torch.zeros_like(theta), theta.new_ones((*theta.shape[:-1], 1), dtype=torch.bool)
    always = theta == torch.inf
    z = theta.masked_fill(always, -torch.inf)
    k = k - always.sum(-1)
    settled = (k <= 0) | (k >= z.isfinite().sum(-1)) | (_variance(theta).squeeze(-1) < SETTLED)
    level = softplus(z, threshold=40).sum(-1)
    variance = _variance(theta).squeeze(-1).masked_fill(settled, 1)

    def end(side: int, least: Tensor) -> tuple[Tensor, Tensor]:
        """t beyond which D exceeds least, and the variance of the size there."""
        t = side * (2 * least / variance).sqrt()
        for _ in range(NEWTON):
            y = z + t.unsqueeze(-1)
            t = t - (softplus(y, threshold=40).sum(-1) - level - k * t - least) / (y.sigmoid().sum(-1) - k)
        t = t.masked_fill(settled, side)
        p = (z + t.unsqueeze(-1)).sigmoid()
        return t, (p * (1 - p)).sum(-1)

    # where z_i is large, σ(−t − z_i) is small around t = 0, so that the lower tail matters more
    low, low_variance = end(-1, NEGLIGIBLE + softplus(z.amax(-1)))
    high, high_variance = end(1, torch.full_like(low, NEGLIGIBLE))
    high = high.clamp(max=LARGEST)
    widest = torch.maximum(variance, torch.maximum(low_variance, high_variance))
    step = (NORMAL_STEP / widest.sqrt()).clamp(max=STEP)
    intervals = ((high - low) / step).nan_to_num(1.0)  # a row with NaN has NaN whatever the nodes
    nodes = int(intervals.max().ceil()) + 1
    # the nodes and the level are constants; what a row without a random unit would have is not used
    odds = (z + change.masked_fill(settled.unsqueeze(-1), 0)).exp()
    c = torch.zeros_like(z)
    # all nodes at once are faster, and autograd keeps all of them anyway
    if odds.requires_grad or nodes * odds.numel() <= AT_ONCE:
        t = low.unsqueeze(-1) + (high - low).unsqueeze(-1) * torch.linspace(
            0, 1, nodes, dtype=low.dtype, device=low.device
        )
        raised = 1 + odds.unsqueeze(-2) * t.exp().unsqueeze(-1)
        D = raised.log().sum(-1) - level.unsqueeze(-1) - k.unsqueeze(-1) * t
        c, nodes = ((-D).exp().unsqueeze(-1) / raised).sum(-2), 0
    for node in range(nodes):
        t = low + (high - low) * (node / (nodes - 1))
        raised = (odds * t.exp().unsqueeze(-1)).add_(1)
        D = raised.log().sum(-1) - level - k * t
        c.addcdiv_((-D).exp().unsqueeze(-1), raised)
    c = c.masked_fill(always, 0)
    return c / c.detach().amax(-1, keepdim=True), settled.unsqueeze(-1)
