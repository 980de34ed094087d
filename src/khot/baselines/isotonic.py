"""Sparse top-k by isotonic regression, for which there are four methods."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from khot._core import arguments
from khot._core.arguments import Scalar
from khot._core.precision import on_cpu
from khot.baselines._regression import Solver, ascend, dykstra, merge, pool, power_of, power_slope
from khot.baselines._rows import check_iterations, prepare

__all__ = ["block_ascent_topk", "dykstra_topk", "generic_pav_topk", "pav_topk"]


@on_cpu
def pav_topk(
    input: Tensor,
    k: int | Tensor,
    dim: int = -1,
    *,
    tau: Scalar = 1.0,
    p: float = 2.0,
    magnitude: bool = False,
) -> Tensor:
    """The sparse top-k, mask or in magnitude, by isotonic regression: pool adjacent violators.

    Converges to :func:`khot.sparse_topk`, or for magnitude to :func:`khot.soft_topk_magnitude`. Sorts, then
    finds v_1 ≥ … ≥ v_n that minimises Σ r*(s_i − v_i) + w_i φ(v_i), with w = 1_k, R = τ/p ‖·‖_p^p and φ(v) =
    v or ½v²; y = r*'(s − v). With these w violators can only be pooled around the k-th place. The pool is
    extended in turn by all violators to its left and all violators to its right, in every row at once. This
    takes one sort, and O(n) for each turn; we saw at most 5 turns.

    Defects: y is computed from the difference s − v, so that it has no correct digit and exceeds 1 where
    scores are much larger than τ. An infinite score gives NaN. k is an integer and p is 2 or 4/3. O(n log n).

    Args:
        input: scores, of any floating-point dtype.
        k: an integer in [0, n]; a number or a tensor that broadcasts with the batch shape (the input's
            shape without ``dim``). No gradient.
        dim: the dimension to select along.
        tau: regularisation > 0; a number or a tensor, as k.
        p: 2 or 4/3.
        magnitude: select by magnitude, and return values instead of a mask.

    Returns:
        Same shape and dtype as the input; the mask sums to k in each row. Differentiable in input and tau,
        to first order, by the closed form of the Jacobian.

    Raises:
        ValueError: k out of range or not an integer; tau ≤ 0; another p.
        TypeError, IndexError: as for :func:`khot.soft_topk`.

    Source: Sander et al. 2023, Algorithm 1 of appendix B.2 and Proposition 7 (whose denominator for
    magnitude is Σ[(q−1)|γ−s_j|^(q−2) + w_j]).

    Example:
        >>> khot.baselines.pav_topk(torch.tensor([1.0, 3.0, 2.5, 0.0]), 1)
        tensor([0.0000, 0.7500, 0.2500, 0.0000])
    """
    if isinstance(p, Tensor) or p not in (2, 4 / 3):
        raise ValueError(f"p must be 2 or 4/3, but got {p}")
    return _isotonic_topk(input, k, dim, tau, round(1 / (p - 1)), magnitude, pool)


def dykstra_topk(
    input: Tensor,
    k: int | Tensor,
    dim: int = -1,
    *,
    tau: Scalar = 1.0,
    magnitude: bool = False,
    iterations: int = 100,
) -> Tensor:
    """The sparse top-k with p = 2, mask or in magnitude, by Dykstra's alternating projections.

    Solves the isotonic regression of :func:`pav_topk` by projecting in turn onto {v_1 ≥ v_2, v_3 ≥ v_4, …}
    and {v_2 ≥ v_3, v_4 ≥ v_5, …}, with corrections.

    Defects: if the iterations stop early, equal scores get unequal values and the gradient is that of another
    problem. m entries between 0 and 1 take of the order of m² iterations. Values within √eps of their
    neighbour count as pooled with it, so that tied scores that are not selected get gradients. All the
    defects of :func:`pav_topk` apply, too.

    Args:
        input, k, dim, tau, magnitude: as for :func:`pav_topk`.
        iterations: of two projections each; at least 1.

    Returns, raises: as for :func:`pav_topk`; ValueError also for iterations < 1.

    Source: Sander et al. 2023, Algorithm 1 and Proposition 7; Boyle and Dykstra 1986. φ enters once, in the
    point that is projected, and not in each projection as printed.

    Example:
        >>> khot.baselines.dykstra_topk(torch.tensor([1.0, 3.0, 2.5, 0.0]), 1)
        tensor([0.0000, 0.7500, 0.2500, 0.0000])
    """
    check_iterations(iterations)
    return _isotonic_topk(input, k, dim, tau, 1, magnitude, partial(dykstra, iterations))


@on_cpu
def generic_pav_topk(
    input: Tensor,
    k: int | Tensor,
    dim: int = -1,
    *,
    tau: Scalar = 1.0,
    p: float = 2.0,
    magnitude: bool = False,
) -> Tensor:
    """The sparse top-k by pool adjacent violators as printed, for any p: mask or in magnitude.

    Computes :func:`khot.sparse_topk`, or for magnitude :func:`khot.soft_topk_magnitude`, with the same p.
    Solves the isotonic regression of :func:`pav_topk`. The entries are taken in descending order, each as a
    block of its own. While the block before the last one has a smaller value than the last one, the two are
    merged. This ends after at most n − 1 merges. The value of a block, the minimiser of its Σ h_i, is found
    by nested intervals in float64.

    Defects: a loop in Python over the entries of every row. Each merge searches its value anew, in time
    proportional to the size of the block, so that O(n²) is the worst case. k is an integer. y is computed
    from the difference s − v, as in :func:`pav_topk`; for p > 2 its digits are halved where it is near 0. An
    infinite score gives NaN.

    Args:
        input, k, dim, tau, magnitude: as for :func:`pav_topk`.
        p: in [1.15, 3].

    Returns, raises: as for :func:`pav_topk`.

    Source: Sander et al. 2023, Algorithm 1 of appendix B.2 and Proposition 7.

    Example:
        >>> khot.baselines.generic_pav_topk(torch.tensor([1.0, 3.0, 2.5, 0.0]), 1, p=1.5)
        tensor([0.0000, 0.8307, 0.1693, 0.0000])
    """
    arguments.check_number(p, "p", low=1.15, high=3.0)
    return _isotonic_topk(input, k, dim, tau, 1 / (p - 1), magnitude, merge)


@on_cpu
def block_ascent_topk(
    input: Tensor,
    k: int | Tensor,
    dim: int = -1,
    *,
    tau: Scalar = 1.0,
    p: float = 2.0,
    magnitude: bool = False,
    iterations: int = 100,
) -> Tensor:
    """The sparse top-k by block coordinate ascent in the dual of the isotonic regression, for any p.

    The dual variables α_i ≥ 0 belong to the constraints v_i ≥ v_(i+1). Those of odd i are maximised over in
    parallel, then those of even i; v_i solves h_i'(v_i) = α_i − α_(i−1). As the iterations go on, the result
    converges to that of :func:`generic_pav_topk`. For p = 2 these are the iterates of :func:`dykstra_topk`.
    There are exactly ``iterations`` of two updates each, without an earlier stop, and each update is found by
    nested intervals in float64. With n = 12 and k = 3, 50 iterations came within 1e-7 of the limit.

    Defects: those of :func:`dykstra_topk`; besides, an iteration takes about 100 times as long.

    Args:
        input, k, dim, tau, magnitude: as for :func:`pav_topk`.
        p: in [1.15, 3].
        iterations: of two updates each; at least 1.

    Returns, raises: as for :func:`dykstra_topk`.

    Source: Sander et al. 2023, appendix A.8 and Proposition 7.

    Example:
        >>> khot.baselines.block_ascent_topk(torch.tensor([1.0, 3.0, 2.5, 0.0]), 1, p=1.5)
        tensor([0.0000, 0.8307, 0.1693, 0.0000])
    """
    check_iterations(iterations)
    arguments.check_number(p, "p", low=1.15, high=3.0)
    return _isotonic_topk(input, k, dim, tau, 1 / (p - 1), magnitude, partial(ascend, iterations))


def _isotonic_topk(
    input: Tensor, k: Any, dim: int, tau: Scalar, power: float, magnitude: bool, solve: Solver
) -> Tensor:
    """In units of τ: z = s/τ, and h_i' = w_i(c v + 1 − [magnitude]) − (z − v)^(q−1) with c = τ or 0."""
    arguments.check_flags(magnitude=magnitude)
    x, k, tau = prepare(input, k, dim, tau, integer=True)
    if not x.numel():
        return torch.zeros_like(input)
    sign = torch.where(x < 0, -1, 1).to(x.dtype) if magnitude else 1
    z, order = torch.sort(x * sign / tau, -1, descending=True)
    c = tau if magnitude else torch.zeros_like(tau)
    v = _Isotonic.apply(z, c, k.long(), power, 0.0 if magnitude else 1.0, solve)
    y = torch.zeros_like(z).scatter(-1, order, power_of(z - v, power)) * sign
    return arguments.unrows(y.to(input.dtype), input, dim)


class _Isotonic(Function):
    """v_1 ≥ … ≥ v_n that minimises Σ h_i(v_i), h_i' = w_i(c v + e) − (z_i − v)^power, w = 1_k."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, c: Tensor, k: Tensor, power: float, e: float, solve: Solver) -> Tensor:
        selected = torch.arange(z.shape[-1], device=z.device) < k
        v, block = solve(z, c, k, selected, power, e)
        ctx.save_for_backward(z, c, v, selected, block)
        ctx.power = power
        return v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        z, c, v, selected, block = ctx.saved_tensors
        slope = power_slope(z - v, ctx.power)

        def pooled(value: Tensor) -> Tensor:
            return torch.zeros_like(z).scatter_add(-1, block, value).gather(-1, block)

        curvature = pooled(slope + c * selected)
        # the curvature is 0 for an unselected entry on its own, where y is constant
        share = pooled(grad) / curvature.masked_fill(curvature == 0, 1)
        grad_c = -(share * v * selected).sum_to_size(c.shape)
        return slope * share, grad_c, None, None, None, None
