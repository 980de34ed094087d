"""The projection onto the permutahedron: the set of all vectors that a sorted row majorises."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from khot import cdfs
from khot._core import arguments
from khot._core.arguments import Scalar
from khot._core.precision import widen
from khot._core.ways import by_rows
from khot._ops.permutahedron import (
    RegularizationName,
    check_regularization,
    permutahedron,
    power_permutahedron,
    without,
)

__all__ = ["project_permutahedron"]


@by_rows(1)
def project_permutahedron(
    input: Tensor,
    w: Tensor,
    dim: int = -1,
    *,
    tau: Scalar = 1.0,
    regularization: RegularizationName = "l2",
    p: float = 2.0,
    mask: Tensor | None = None,
    hard: bool = False,
    offsets: Tensor | None = None,
) -> Tensor:
    """The point of the permutahedron of w that is nearest to z/τ, where z is the input.

    The permutahedron P(w) is the convex hull of all permutations of w. With ``"l2"`` the result is

        argmin_(y ∈ P(w)) ½‖y − z/τ‖²

    or with a p-norm the argmin of Σ |y|^p/p − ⟨y, z/τ⟩, which for p = 2 is the same. With ``"kl"`` it is
    log μ for μ = argmin_(μ ∈ P(e^w)) Σ μ (log μ − z/τ − 1). As τ → 0 it tends to w, permuted as the scores:
    the largest score gets the largest w. As τ → ∞, it tends to the mean of w, or to log(mean(e^w)). With
    w = (n, …, 1) these are ranks, with w = (m, …, 1, 0, …, 0) ranks of the m largest scores alone (partial
    ranking), and with w = (1, …, 1, 0, …, 0) a top-k mask.

    Args:
        input: scores z, of any floating-point dtype. Infinite ones get the largest or smallest w, and equal
            ones share theirs.
        w: n finite numbers, in any order: a tensor of one dim, or one that broadcasts to the input's shape
            and has n entries along ``dim``.
        dim: the dimension to project along.
        tau: regularisation > 0; a number or a tensor that broadcasts with the batch shape (the input's shape
            without ``dim``).
        regularization: ``"l2"`` or ``"kl"``.
        p: the norm of ``"l2"``, in [1.15, 3], a number. Other p than 2 have no compiled CPU kernel.
        mask: bool, broadcastable to the input; True where an entry takes part. The entries of the input and
            of w under False are left out, even NaN and inf, so that n is the number of the others.
        hard: return the limit τ → 0, w permuted as the scores, with the gradient of the projection
            (straight-through). It is the point of P(w) with the largest ⟨y, z⟩ (the linear maximisation
            oracle). Of equal scores, the one with the lowest index gets the largest w.
        offsets: of packed rows, as for :func:`khot.soft_topk`.

    Returns:
        Same shape and dtype as the input, and 0 where the mask is False. Each row sums to the sum of w (with
        "kl", its exponential sums to the sum of e^w). A row with a NaN is NaN.

    The gradient in input, w and tau is exact, to any order and in either mode. With ``"l2"`` the function is
    piecewise linear in z and w. Where two blocks of equal values meet, it has a kink, and the gradient is
    that of the blocks taken together. With another p, it is a generalised gradient where an entry of w or of
    the result is 0, where |y|^p has no second derivative. It takes O(n log n) time and O(n) memory.

    Raises:
        ValueError: w without n entries along dim, not finite, or of a shape that does not broadcast; tau ≤ 0,
            or of a shape that does not broadcast; another regularization; p out of range, or not 2 with "kl".
            (The values of tensors are checked on the CPU in eager mode; elsewhere a row with a NaN in w or a
            bad tau is NaN.)
        TypeError: input or w that is not a tensor of real numbers; a p that is not a number.
        IndexError: dim out of range.

    Source: Blondel, Teboul, Berthet, Djolonga 2020, "Fast differentiable sorting and ranking", Propositions 2
    to 4; Sander et al. 2023, where w = 1_k gives the top-k masks, and appendix B.2 has other p.

    Example:
        >>> khot.project_permutahedron(torch.tensor([2.0, 0.0, 1.5]), torch.tensor([3.0, 2.0, 1.0]))
        tensor([2.7500, 1.0000, 2.2500])
    """
    check_regularization(regularization)
    arguments.check_flags(hard=hard)
    p = cdfs.Power(p).p
    if p != 2 and regularization != "l2":
        raise ValueError(f"p must be left out with regularization={regularization!r}, but got {p}")
    z = arguments.rows(input, dim)
    weights = _weights(w, input, dim, z)
    tau = arguments.per_row(tau, "tau", z, low=0, low_open=True, by_value=p == 2)
    selected = None
    if mask is not None:
        selected = arguments.mask_rows(mask, input, dim)
        z, weights = without(z, weights, selected)
    if arguments.readable(weights) and not bool(weights.isfinite().all()):
        bad = weights.detach()[~weights.isfinite()][0].item()
        raise ValueError(f"w must be finite, but got {bad}")
    of_two = p == 2
    y = permutahedron(z, weights, tau, regularization) if of_two else power_permutahedron(z, weights, tau, p)
    if hard:
        y = _vertex(z.detach(), weights.detach(), y.detach()) + (y - y.detach())
    if selected is not None:
        y = torch.where(selected | y.isnan(), y, 0)
    return arguments.unrows(y, input, dim)


def _vertex(z: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """w permuted as the scores, where the projection y is no NaN."""
    order = z.sort(dim=-1, descending=True, stable=True).indices
    w = w.sort(dim=-1, descending=True).values.to(y.dtype).expand(y.shape)
    return torch.where(y.isnan(), y, torch.empty_like(y).scatter(-1, order, w))


def _weights(w: Any, input: Tensor, dim: int, z: Tensor) -> Tensor:
    """w as rows with as many dims as z."""
    arguments.check_real(w, "w") if isinstance(w, Tensor) else arguments.check_tensor(w, "w")
    arguments.check_has_values(w, "w", input)
    arguments.check_device(w, "w", input)
    w = w if w.is_floating_point() else widen(w)
    shape, n = tuple(w.shape), z.shape[-1]
    if w.dim() == 1 or (w.dim() == 0 and z.dim() == 1):
        w = w.reshape((1,) * (z.dim() - 1) + (w.numel(),))
    elif w.dim() <= input.dim():
        w = w[(None,) * (input.dim() - w.dim())].movedim(dim, -1)
    fits = w.dim() == z.dim() and arguments.broadcasts(w.shape[:-1], z.shape[:-1])
    if not fits or w.shape[-1] != n:
        raise ValueError(
            f"w must have the {n} entries of the input along dim, and one dim or a shape that broadcasts to "
            f"the input's shape {tuple(input.shape)}, but got {shape}"
        )
    return w
