"""Sparse top-k by isotonic regression."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from khot._core import arguments
from khot._core.arguments import Scalar
from khot._core.precision import on_cpu
from khot.baselines._rows import check_iterations, prepare

__all__ = ["dykstra_topk", "pav_topk"]


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
    if p not in (2, 4 / 3):
        raise ValueError(f"p must be 2 or 4/3, but got {p}")
    return _isotonic_topk(input, k, dim, tau, round(1 / (p - 1)), magnitude, None)


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
    return _isotonic_topk(input, k, dim, tau, 1, magnitude, iterations)


def _isotonic_topk(
    input: Tensor, k: Any, dim: int, tau: Scalar, power: int, magnitude: bool, iterations: int | None
) -> Tensor:
    """In units of τ: z = s/τ, and h_i' = w_i(c v + 1 − [magnitude]) − (z − v)^(q−1) with c = τ or 0."""
    x, k, tau = prepare(input, k, dim, tau, integer=True)
    if not x.numel():
        return torch.zeros_like(input)
    sign = torch.where(x < 0, -1, 1).to(x.dtype) if magnitude else 1
    z, order = torch.sort(x * sign / tau, -1, descending=True)
    c = tau if magnitude else torch.zeros_like(tau)
    v = _Isotonic.apply(z, c, k.long(), power, 0.0 if magnitude else 1.0, iterations)
    y = torch.zeros_like(z).scatter(-1, order, (z - v) ** power) * sign
    return arguments.unrows(y.to(input.dtype), input, dim)


class _Isotonic(Function):
    """v_1 ≥ … ≥ v_n that minimises Σ h_i(v_i), h_i' = w_i(c v + e) − (z_i − v)^power, w = 1_k."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, c: Tensor, k: Tensor, power: int, e: float, iterations: int | None
    ) -> Tensor:
        selected = torch.arange(z.shape[-1], device=z.device) < k
        if iterations is None:
            v, block = _pool(z, c, k, selected, power, e)
        else:
            v, block = _dykstra(z, c, selected, e, iterations)
        ctx.save_for_backward(z, c, v, selected, block)
        ctx.power = power
        return v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        z, c, v, selected, block = ctx.saved_tensors
        slope = ctx.power * (z - v) ** (ctx.power - 1)  # of (z − v)^power, an odd one

        def pooled(value: Tensor) -> Tensor:
            return torch.zeros_like(z).scatter_add(-1, block, value).gather(-1, block)

        curvature = pooled(slope + c * selected)
        # the curvature is 0 for an unselected entry on its own, where y is constant
        share = pooled(grad) / curvature.masked_fill(curvature == 0, 1)
        grad_c = -(share * v * selected).sum_to_size(c.shape)
        return slope * share, grad_c, None, None, None, None


def _pool(z: Tensor, c: Tensor, k: Tensor, selected: Tensor, power: int, e: float) -> tuple[Tensor, Tensor]:
    """Pool adjacent violators; v, and for each entry the first index of its block.

    The sign of h'_B(v), which says whether γ_B > v, is computed from the power sums of the block. They are
    summed from the k-th place outwards, so that far entries do not round off those of near ones.
    """
    n, index = z.shape[-1], torch.arange(z.shape[-1], device=z.device)
    k = k.expand(*z.shape[:-1], 1)
    z = z.double()
    alone = torch.where(selected, _alone(z, c.double(), power, e), z)
    last, first = (k - 1).clamp(min=0), k.clamp(max=n - 1)
    centre = z.gather(-1, last)
    powers = torch.stack([(z - centre) ** r for r in range(power + 1)])
    above = torch.where(selected, powers, 0).flip(-1).cumsum(-1).flip(-1)
    below = torch.where(selected, 0, powers).cumsum(-1)

    def at(sums: Tensor, place: Tensor) -> Tensor:
        return sums.gather(-1, place.expand(power + 1, *place.shape))

    def slope(v: Tensor, count: Tensor, sums: Tensor) -> Tensor:
        """Σ h_i'(v) of a block that holds `count` of the selected."""
        u = v - centre
        spread = sum(math.comb(power, r) * sums[r] * (-u) ** (power - r) for r in range(power + 1))
        return count * (c * v + e) - spread

    violated = (alone.gather(-1, last) < alone.gather(-1, first)) & (k > 0) & (k < n)
    start, stop = k - violated.long(), k + violated.long()  # an empty interval: no block
    while True:
        left = selected & violated & (slope(alone, k - index, above + at(below, (stop - 1).clamp(min=0))) < 0)
        new_start = torch.minimum(start, torch.where(left, index, n).amin(-1, keepdim=True))
        sums = below + at(above, new_start.clamp(max=n - 1))
        right = ~selected & violated & (slope(alone, k - new_start, sums) > 0)
        new_stop = torch.maximum(stop, torch.where(right, index + 1, 0).amax(-1, keepdim=True))
        if torch.equal(new_start, start) and torch.equal(new_stop, stop):
            break
        start, stop = new_start, new_stop
    inside = (index >= start) & (index < stop)
    v = torch.where(inside, _pooled_value(z, c, inside, selected, power, e), alone)
    return v.to(c.dtype), torch.where(inside, start, index)


def _alone(z: Tensor, c: Tensor, power: int, e: float) -> Tensor:
    """The value of a selected entry that is not in a block: h_i'(v) = 0."""
    return (z - e) / (1 + c) if power == 1 else z - _cubic_root(c, e + c * z)


def _pooled_value(z: Tensor, c: Tensor, inside: Tensor, selected: Tensor, power: int, e: float) -> Tensor:
    """γ with Σ_inside h_i'(γ) = 0."""

    def total(value: Tensor) -> Tensor:
        return torch.where(inside, value, 0).sum(-1, keepdim=True)

    size, chosen = inside.sum(-1, keepdim=True).clamp(min=1), (inside & selected).sum(-1, keepdim=True)
    mean = total(z) / size
    if power == 1:
        return (size * mean - chosen * e) / (size + chosen * c)
    d = z - mean
    linear = (3 * total(d**2) + chosen * c) / size
    return mean + _cubic_root(linear, (total(d**3) - chosen * (e + c * mean)) / size)


def _cubic_root(a: Tensor, b: Tensor) -> Tensor:
    """The real g with g³ + a g = b, for a ≥ 0."""
    scale = torch.sqrt(a.masked_fill(a == 0, 1) / 3)
    g = 2 * scale * torch.sinh(torch.asinh(b / (2 * scale**3)) / 3)
    return torch.where(a == 0, b.sign() * b.abs() ** (1 / 3), g)


def _dykstra(z: Tensor, c: Tensor, selected: Tensor, e: float, iterations: int) -> tuple[Tensor, Tensor]:
    """The projection onto the monotone cone, weighted by 1 + c w; v, and the tied block of each entry."""
    weight = 1 + c * selected
    v = (z - e * selected) / weight
    corrections = [torch.zeros_like(v), torch.zeros_like(v)]
    for _ in range(iterations):
        for first in (0, 1):
            point = v + corrections[first]
            v = _project_pairs(point, weight, first)
            corrections[first] = point - v
    apart = v.diff(dim=-1).abs() > math.sqrt(torch.finfo(v.dtype).eps)
    return v, torch.nn.functional.pad(apart.cumsum(-1), (1, 0))


def _project_pairs(v: Tensor, weight: Tensor, first: int) -> Tensor:
    """Replace each ascending pair (first + 2i, first + 2i + 1) by its mean."""
    stop = first + (v.shape[-1] - first) // 2 * 2
    pair, share = (t[..., first:stop].unflatten(-1, (-1, 2)) for t in (v, weight))
    mean = (pair * share).sum(-1, keepdim=True) / share.sum(-1, keepdim=True)
    pair = torch.where(pair[..., :1] < pair[..., 1:], mean, pair)
    return torch.cat((v[..., :first], pair.flatten(-2), v[..., stop:]), -1)
