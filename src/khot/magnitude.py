"""Top-k in magnitude: the relaxed version of x·(|x| is among the k largest)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from khot._core import arguments, rows
from khot._core.arguments import Scalar
from khot._ops.magnitude import magnitude, rescaled

__all__ = ["soft_topk_magnitude"]


def soft_topk_magnitude(
    input: Tensor,
    k: int | Tensor,
    dim: int = -1,
    *,
    tau: Scalar = 1.0,
    p: float = 2.0,
    rescale: bool = False,
    mask: Tensor | None = None,
    group: Any = None,
) -> Tensor:
    """The k entries of largest magnitude, with the others set to 0; relaxed so that the result is continuous.

    The result y maximises ⟨y, x⟩ − f*(y) − τ/p Σ|y_i|^p, where f* is half the squared k-support norm (Sander
    et al. 2023, section 4). As τ → 0, y tends to x on the k entries of largest magnitude and to 0 elsewhere.
    Some entries around the k-th place may share one value γ of the dual. The others have closed forms: up to
    signs, a selected entry satisfies y + τ·y^(p−1) = x, and a rejected one is exactly 0.

    Args:
        input: of any floating-point dtype.
        k: an integer in [0, n]; a number or a tensor that broadcasts with the batch shape (the input's
            shape without ``dim``). It has no gradient.
        dim: the dimension to select along.
        tau: regularisation > 0; a number or a tensor, as k. Its unit is that of the input to the power
            2 − p.
        p: in [1.15, 3], of which 1.15 is what float32 bears. The result is piecewise linear for p = 2 and
            continuously differentiable for p < 2; for p > 2 its slope is infinite where y leaves 0.
        rescale: return y + τ·y^(p−1), which equals the input on selected entries that do not share the value
            γ around the k-th place.
        mask: bool, broadcastable to the input; True where an entry may be selected. Entries under False are
            ignored and get 0.
        group: as for :func:`khot.soft_topk`.

    Returns:
        Same shape and dtype as the input, with the input's signs. A row with a NaN, or with more than k
        infinite entries, is NaN. Differentiable, exactly, in input and tau, to second order and in forward
        mode.

    Raises:
        ValueError: k is negative, not an integer, or larger than the number of entries that may be selected;
            tau ≤ 0; p out of range.
        TypeError, IndexError: as for :func:`khot.soft_topk`.

    Example:
        >>> x = torch.tensor([-3.0, 1.0, 2.0, 0.0])
        >>> khot.soft_topk_magnitude(x, 2, tau=0.5)
        tensor([-2.0000,  0.0000,  1.3333,  0.0000])
        >>> khot.soft_topk_magnitude(x, 2, tau=0.5, rescale=True)
        tensor([-3.,  0.,  2.,  0.])
    """
    if rows.is_dtensor(input):
        return rows.on_dtensor(
            soft_topk_magnitude, input, k, dim, group, tau=tau, p=p, rescale=rescale, mask=mask
        )
    row = rows.named(group)

    def prepare() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        arguments.check_number(p, "p", low=1.15, high=3.0)
        s, sign = _absolute(input, dim, mask)
        count = arguments.per_row(k, "k", s, low=0, high=row.limit(s), integer=True).detach()
        return s, sign, count, arguments.per_row(tau, "tau", s, low=0, low_open=True)

    s, sign, count, scale = row.agree(prepare, k=k, tau=tau, p=p, rescale=rescale)
    row.check(k, s, integer=True)
    y, hi, lo = magnitude(s, count, scale, float(p), row)
    if rescale:
        y = rescaled(s, hi, lo, scale, p, row)
    return arguments.unrows(y * sign, input, dim)


def _absolute(input: Tensor, dim: int, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The rows' magnitudes, −inf where the mask is False, and their signs."""
    x = arguments.rows(input, dim)
    sign = torch.copysign(torch.ones_like(x), x.detach())  # unlike abs(), it has a nonzero slope at 0
    s = x * sign
    if mask is not None:
        s = torch.where(arguments.mask_rows(mask, input, dim), s, -math.inf)
    return s, sign
