"""Sigmoid top-k, whose threshold is found by bisection, Newton's or Halley's method."""

from __future__ import annotations

import itertools
from typing import Literal

import torch
from torch import Tensor

from khot._core import arguments
from khot._core.arguments import Scalar
from khot._core.names import unknown
from khot._core.precision import on_cpu
from khot.baselines._root_finders import GUESSES, STEPS, iterate
from khot.baselines._rows import check_iterations, prepare

__all__ = ["root_finding_topk"]


@on_cpu
def root_finding_topk(
    input: Tensor,
    k: Scalar,
    dim: int = -1,
    *,
    tau: Scalar = 1.0,
    method: Literal["bisection", "newton", "halley"] = "halley",
    guess: Literal["zero", "quantile", "logit", "both"] | None = None,
    iterations: int = 100,
) -> Tensor:
    """Sigmoid top-k as published: σ(x/τ + c), with c found by an iteration in float64 until Σσ = k.

    The iteration converges to :func:`khot.sigmoid_topk`. It ends when the sums of all rows are within 1e-8 of
    k, or after ``iterations``. Bisection halves the bracket ±(max abs(x/τ) + 36). Newton's and Halley's steps
    use it as a safeguard: each also tries the middle of the bracket, and takes whichever of the two points
    has the smaller error; both points narrow the bracket. In the paper's problems (n = 10⁴, normal scores)
    Halley's method takes 3 steps from the best guess, Newton's 5, and bisection 43.

    Defects: rows that are done wait for the slowest one, and each step of Newton and Halley evaluates two
    points. The sum is only within 1e-8 of k, so that entries smaller than that may have no correct digit. An
    infinite score gives NaN.

    Args:
        input: scores, of any floating-point dtype.
        k: how many, in [0, n], not necessarily an integer; a number or a tensor that broadcasts with the
            batch shape (the input's shape without ``dim``).
        dim: the dimension to select along.
        tau: temperature > 0; a number or a tensor, as k.
        method: ``"bisection"``, ``"newton"`` or ``"halley"``.
        guess: where Newton and Halley start: ``"zero"`` at c = 0; ``"quantile"`` at minus the (n − k)-th
            smallest score; ``"logit"`` at logit(k/n) − mean(x/τ), which is exact for equal scores; ``"both"``
            at the better of the last two. None: ``"both"``; bisection takes no other, and starts from the
            middle of its bracket.
        iterations: at most so many steps; at least 1.

    Returns:
        Same shape and dtype as the input, in [0, 1], each row summing to k. Differentiable in input, k and
        tau, to first order, by the implicit function theorem.

    Raises:
        ValueError: k or tau out of range; another method or guess; a guess for bisection; iterations < 1.
        TypeError, IndexError: as for :func:`khot.soft_topk`.

    Source: Wijk, Vinuesa, Azizpour 2025, appendix A and Table 5.

    Example:
        >>> khot.baselines.root_finding_topk(torch.tensor([1.0, 3.0, 2.0, 0.0]), 2)
        tensor([0.3775, 0.8176, 0.6225, 0.1824])
    """
    if method not in STEPS:
        raise unknown("method", method, STEPS)
    if guess is not None and guess not in GUESSES:
        raise ValueError(f"guess must be None or one of {', '.join(GUESSES)}, but got {guess!r}")
    if guess is not None and method == "bisection":
        raise ValueError(f"guess must be None for method 'bisection', but got {guess!r}")
    check_iterations(iterations)
    x, k, tau = prepare(input, k, dim, tau)
    if not x.numel():
        return torch.zeros_like(input)
    x, k = x.double() / tau.double(), k.double()
    n = x.shape[-1]
    z, size = x.detach(), k.detach()
    start = "zero" if method == "bisection" else guess or "both"
    place = (n - size.round().long() - 1).clamp(min=0).expand(*z.shape[:-1], 1)
    quantile = z.sort(-1).values.gather(-1, place) if start in ("quantile", "both") else None
    c = torch.zeros_like(size)
    for found in itertools.islice(iterate(z, size, method, start, quantile), iterations + 1):
        c, error = found
        if bool((error.abs() <= 1e-8).all()):
            break
    # c + dc, where dc = 0 has the derivatives of the root
    y = torch.sigmoid(z + c)
    slope = (y * (1 - y)).sum(-1, keepdim=True).clamp_min(torch.finfo(y.dtype).tiny)
    residual = torch.sigmoid(x + c).sum(-1, keepdim=True) - k
    y = torch.sigmoid(x + c - (residual - residual.detach()) / slope)
    return arguments.unrows(y.to(input.dtype), input, dim)
