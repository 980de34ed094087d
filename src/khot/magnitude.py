"""Top-k in magnitude: the relaxed version of x·(|x| is among the k largest), and its relatives.

All are the gradients of one function, which Sander et al. 2023 write f_φ,R(x, 1_k): the relaxed sum of the k
largest φ(x). φ is ½x² for top-k in magnitude, |x| for the signed mask and e^(x−1) for the exponential.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from khot import cdfs
from khot._core import arguments, eager, rows
from khot._core.arguments import Scalar
from khot._core.precision import at_least_single, in_dtype, widen
from khot._core.ways import by_rows, by_shards
from khot._ops.exponential import exponential
from khot._ops.magnitude import magnitude, magnitude_with_signs, rescaled
from khot._ops.soft_topk import threshold_map
from khot.cdfs import CDF

__all__ = [
    "k_support_negentropy",
    "k_support_norm",
    "soft_topk_exp",
    "soft_topk_magnitude",
    "soft_topk_signed",
    "soft_topk_sum",
]

PhiName = Literal["identity", "abs", "square", "exp"]


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
    offsets: Tensor | None = None,
) -> Tensor:
    """The k entries of largest magnitude, with the others set to 0; relaxed so that the result is continuous.

        y = argmax_y ⟨y, x⟩ − f*(y) − τ/p Σ_i |y_i|^p

    where f* is half the squared k-support norm (Sander et al. 2023, section 4). As τ → 0, y tends to x on the
    k entries of largest magnitude and to 0 elsewhere. Some entries around the k-th place may share one value
    γ of the dual. The others have closed forms: up to signs, a selected entry satisfies y + τ·y^(p−1) = x,
    and a rejected one is exactly 0.

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
        offsets: of packed rows, as for :func:`khot.soft_topk`.

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
    if offsets is None and not is_dynamo_compiling() and not _underflows(input, p):
        plain = eager.soft_topk_magnitude(input, k, dim, tau, p, rescale, mask, group)
        if plain is not None:
            return plain
    return _magnitude(input, k, dim, group, tau, p, rescale, mask, offsets=offsets)


@by_shards()
def _magnitude(
    input: Tensor,
    k: int | Tensor,
    dim: int,
    group: Any,
    tau: Scalar,
    p: float,
    rescale: bool,
    mask: Tensor | None,
    offsets: Tensor | None = None,
) -> Tensor:
    """:func:`soft_topk_magnitude`."""
    row = rows.named(group)
    known = mask is None or (isinstance(mask, Tensor) and arguments.readable(mask))
    if rescale is False and row.here and isinstance(input, Tensor) and known:
        # one operator, because |x|, the signs and their product would take longer than the kernel
        _check_p(p)
        x = arguments.rows(input, dim, mask, fill=0)  # an entry of 0 takes nothing from others
        x = at_least_single(x) if _underflows(x, p) else x
        count = arguments.per_row(k, "k", x, low=0, high=row.limit(x), integer=True, by_value=True)
        scale = arguments.per_row(tau, "tau", x, low=0, low_open=True, by_value=True)
        if mask is None or _enough(arguments.mask_rows(mask, input, dim), count):
            y = magnitude_with_signs(x, arguments.detached(count), scale, float(p))
            return arguments.unrows(in_dtype(y, input.dtype), input, dim)

    def prepare() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        arguments.check_flags(rescale=rescale)
        _check_p(p)
        s, sign = _absolute(input, dim, mask)
        if rescale or _underflows(s, p):
            s = at_least_single(s)  # the two gradients of rescaled entries are summed in its dtype
        by_value = row.here and not rescale
        count = arguments.per_row(k, "k", s, low=0, high=row.limit(s), integer=True, by_value=by_value)
        scale = arguments.per_row(tau, "tau", s, low=0, low_open=True, by_value=by_value)
        return s, sign, arguments.detached(count), scale

    s, sign, count, scale = row.agree(prepare, k=k, tau=tau, p=p, rescale=rescale)
    row.check(k, s, integer=True)
    y, hi, lo = magnitude(s, count, scale, float(p), row)
    if rescale:
        y = rescaled(s, hi, lo, scale, p, row)
    return arguments.unrows((y * sign).to(input.dtype), input, dim)


eager.PYTHON_WAY["soft_topk_magnitude"] = eager.PYTHON_WAY["sizes"] = (
    lambda input, k, dim, tau, p, rescale, mask, group: _magnitude(
        input, k, dim, group, tau, p, rescale, mask
    )
)


def _underflows(input: Any, p: Any) -> bool:
    """Whether the input's dtype may have no such small numbers as y, s^(1/(p−1)) of a small s, of which the
    gradient is computed."""
    return isinstance(input, Tensor) and input.dtype == torch.float16 and isinstance(p, float) and p < 2


def _enough(mask: Tensor, count: Tensor) -> bool:
    """Whether it is known that each row has as many entries under the mask as are to be selected."""
    return arguments.readable(count) and bool((arguments.sizes(mask) >= count).all())


def _absolute(input: Tensor, dim: int, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The rows' magnitudes, −inf where the mask is False, and their signs."""
    x = arguments.rows(input, dim)
    sign = torch.copysign(torch.ones_like(x), x.detach())  # unlike abs(), it has a nonzero slope at 0
    s = x * sign
    if mask is not None:
        s = arguments.masked(s, arguments.mask_rows(mask, input, dim), -math.inf)
    return s, sign


@by_rows(1)
def soft_topk_signed(
    input: Tensor,
    k: Scalar,
    dim: int = -1,
    *,
    tau: Scalar = 1.0,
    p: float = 2.0,
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """The signs of the k entries of largest magnitude, with 0 for the others; relaxed.

        y_i = sign(x_i) · clip((|x_i| − t)/τ, 0, 1)^(1/(p−1))

    where t is the threshold of :func:`khot.sparse_topk` of |x|, or 0 if that one is negative. y maximises
    ⟨y, x⟩ − τ/p Σ|y_i|^p over {|y_i| ≤ 1, Σ|y_i| ≤ k}, the unit ball of the dual of the OWL norm with weights
    1_k (Sander et al. 2023, section 4, φ(x) = |x|).

    Args:
        input: of any floating-point dtype.
        k: in [0, n], not necessarily an integer; a number or a tensor that broadcasts with the batch shape
            (the input's shape without ``dim``).
        dim: the dimension to select along.
        tau: regularisation > 0, in the unit of the input; a number or a tensor, as k.
        p: in [1.15, 3].
        mask: bool, broadcastable to the input; True where an entry may be selected. Entries under False are
            ignored and get 0.
        offsets: of packed rows, as for :func:`khot.soft_topk`.

    Returns:
        Same shape and dtype as the input, in [−1, 1]; the magnitudes of a row sum to at most k, and to k if
        they can. A row with a NaN, or with more than k infinite entries, is NaN. Differentiable, exactly, in
        input, k and tau, to second order and in forward mode.

    Raises:
        ValueError, TypeError, IndexError: as for :func:`khot.sparse_topk`.

    Example:
        >>> x = torch.tensor([-3.0, 1.0, 2.0, 0.0])
        >>> khot.soft_topk_signed(x, 2, tau=0.5)
        tensor([-1.,  0.,  1.,  0.])
        >>> khot.soft_topk_signed(x, 2, tau=10.0)
        tensor([-0.3000,  0.1000,  0.2000,  0.0000])
    """
    F = _norm_cdf(p)
    s, sign = _absolute(input, dim, mask)
    count = arguments.per_row(k, "k", s, low=0, high=s.shape[-1])
    y = _signed(s, count, arguments.per_row(tau, "tau", s, low=0, low_open=True), F)
    return arguments.unrows(y.to(input.dtype) * sign, input, dim)


@by_rows(1)
def soft_topk_exp(
    input: Tensor,
    k: int | Tensor,
    dim: int = -1,
    *,
    tau: Scalar = 1.0,
    p: float = 2.0,
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """e^(x−1) for the k largest entries and 0 for the others; relaxed.

        y = argmax_(y ≥ 0) ⟨y, x⟩ − f*(y) − τ/p Σ_i y_i^p

    where f* is :func:`khot.k_support_negentropy` (Sander et al. 2023, appendix B.1, φ(x) = e^(x−1)). A
    selected entry satisfies 1 + log y + τ·y^(p−1) = x, unless it shares the value of the dual with others
    around the k-th place. A rejected one is exactly 0.

    Args:
        input, dim, mask: as for :func:`khot.sparse_topk`.
        k: an integer in [0, n]; a number or a tensor that broadcasts with the batch shape. It has no
            gradient.
        tau: regularisation > 0; a number or a tensor, as k.
        p: in [1.15, 3].
        offsets: of packed rows, as for :func:`khot.soft_topk`.

    Returns:
        Same shape and dtype as the input. A row with a NaN, or with more than k entries of +inf, is NaN.
        Differentiable, exactly, in input and tau, to second order and in forward mode.

    Raises:
        ValueError, TypeError, IndexError: as for :func:`khot.soft_topk_magnitude`.

    Example:
        >>> khot.soft_topk_exp(torch.tensor([1.0, 3.0, 2.0, 0.0]), 2, tau=1e-6)
        tensor([0.0000, 7.3890, 2.7183, 0.0000])
        >>> khot.soft_topk_exp(torch.tensor([1.0, 3.0, 2.0, 0.0]), 2, tau=0.5)
        tensor([0.0000, 2.3183, 1.3702, 0.0000])
    """
    _check_p(p)
    s = widen(arguments.rows(input, dim, mask))
    count = arguments.per_row(k, "k", s, low=0, high=s.shape[-1], integer=True).detach()
    y, _ = _exponential(s, count, arguments.per_row(tau, "tau", s, low=0, low_open=True), p)
    return arguments.unrows(y.to(input.dtype), input, dim)


@by_rows(0)
def soft_topk_sum(
    input: Tensor,
    k: Scalar,
    dim: int = -1,
    *,
    tau: Scalar = 1.0,
    phi: PhiName = "identity",
    p: float = 2.0,
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """The sum of φ(x) over the k entries where it is largest; relaxed so that it is differentiable.

        f(x) = max_y ⟨y, x⟩ − f*(y) − τ/p Σ_i |y_i|^p

    It is convex in x (Sander et al. 2023, Proposition 2). As τ → 0 it tends to the sum. Its gradient is the
    relaxed operator of the same φ:

    - ``"identity"``: φ(x) = x, f* is 0 where y ∈ [0, 1]ⁿ and Σy = k, else inf; :func:`khot.sparse_topk`
    - ``"abs"``: φ(x) = |x|, f* is 0 where |y_i| ≤ 1 and Σ|y_i| ≤ k, else inf; :func:`khot.soft_topk_signed`
    - ``"square"``: φ(x) = ½x², f* is ½·:func:`khot.k_support_norm`²; :func:`khot.soft_topk_magnitude`
    - ``"exp"``: φ(x) = e^(x−1), f* is :func:`khot.k_support_negentropy`; :func:`khot.soft_topk_exp`

    Args:
        input, k, dim, tau, p, mask: as for the operator that is the gradient; k is an integer for "square"
            and "exp", and has a gradient for the others.
        phi: what is summed.
        offsets: of packed rows, as for :func:`khot.soft_topk`.

    Returns:
        The input's shape without ``dim``, and its dtype. A row of NaN of the operator is NaN. Differentiable
        in input and tau, and for "identity" and "abs" in k, exactly, to second order and in forward mode.

    Raises:
        ValueError, TypeError, IndexError: as for the operator; ValueError for an unknown phi.

    Example:
        >>> x = torch.tensor([-3.0, 1.0, 2.0, 0.0])
        >>> khot.soft_topk_sum(x, 2, phi="square", tau=1e-6)
        tensor(6.5000)
        >>> khot.soft_topk_sum(x, 2, phi="square", tau=0.5)
        tensor(4.3333)
    """
    _check_phi(phi)
    F, whole = _norm_cdf(p), phi in ("square", "exp")
    if phi in ("abs", "square"):
        s, _ = _absolute(input, dim, mask)
    else:
        s = arguments.rows(input, dim, mask)
    s = widen(s)
    count = arguments.per_row(k, "k", s, low=0, high=s.shape[-1], integer=whole)
    scale = arguments.per_row(tau, "tau", s, low=0, low_open=True)
    level: Tensor | None = None  # of y: the entries below it share one value of the dual
    if phi == "identity":
        y, _, _ = threshold_map(s, count, scale, F, "y")
    elif phi == "abs":
        y = _signed(s, count, scale, F)
    elif phi == "square":
        y, hi, lo = magnitude(s, count.detach(), scale, float(p))
        level = (hi + lo).unsqueeze(-1)
    else:
        y, level = _exponential(s, count.detach(), scale, p)
    # f* is Σ z φ*(y/z) with z = min(1, y/level): here is φ*(r)/r at r = y/z
    none = (y == 0) | y.isinf()
    r = y.masked_fill(none, 1)
    if level is not None:
        r = torch.maximum(r, level.masked_fill(none.all(-1, keepdim=True), 0))
    price = {"square": 0.5 * r, "exp": torch.log(r)}.get(phi, torch.zeros_like(r))
    s = s.masked_fill(none, 0)
    size = y.masked_fill(none, 0)
    cost = widen(scale).unsqueeze(-1) * y.masked_fill(none, 1) ** p / p
    value = (size * (s - price) - cost.masked_fill(none, 0)).sum(-1)
    endless = ((y != 0) & (arguments.rows(input, dim).isinf() | y.isinf())).any(-1)
    return torch.where(endless, math.inf, value).to(input.dtype)


@by_rows(0)
def k_support_norm(
    input: Tensor,
    k: int | Tensor,
    dim: int = -1,
    *,
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """The k-support norm: its unit ball is the convex hull of the k-sparse vectors of Euclidean length 1.

        ‖y‖² = min_(z ∈ [0, 1]ⁿ, Σz = k) Σ_i y_i²/z_i

    With the number a for which Σ min(1, |y_i|/a) = k, it is
    Σ |y_i|·max(|y_i|, a). For k = 1 it is the sum of magnitudes, for k = n the Euclidean norm.

    Args:
        input: of any floating-point dtype.
        k: an integer in [1, n]; a number or a tensor that broadcasts with the batch shape (the input's shape
            without ``dim``). It has no gradient.
        dim: the dimension of the vectors.
        mask: bool, broadcastable to the input. Entries under False count as 0, even NaN and inf.
        offsets: of packed rows, as for :func:`khot.soft_topk`.

    Returns:
        The input's shape without ``dim``, and its dtype. Differentiable to second order and in forward mode
        (at 0 with the subgradient 0); inf for a row with an infinite entry.

    Raises:
        ValueError: k is not an integer in [1, n].
        TypeError, IndexError: as for :func:`khot.soft_topk`.

    Source: Argyriou, Foygel, Srebro 2012; Sander et al. 2023, section 4, where half its square is the
    conjugate of half the sum of the k largest x².

    Example:
        >>> khot.k_support_norm(torch.tensor([3.0, -1.0, 1.0, 0.0]), 2)
        tensor(3.6056)
    """
    x = widen(arguments.rows(input, dim, mask, fill=0))
    u, count = _vectors(x * x.detach().sign(), k)
    size = u.detach().amax(-1, keepdim=True)
    unit = u / size.masked_fill((size == 0) | size.isinf(), 1)
    unit = unit.masked_fill(size.isinf(), 0)
    square = (unit * torch.maximum(unit, _level(unit, count))).sum(-1)
    nothing = square == 0
    norm = square.masked_fill(nothing, 1).sqrt().masked_fill(nothing, 0) * size.squeeze(-1).nan_to_num(
        math.nan, 1
    )
    return torch.where(size.squeeze(-1) == math.inf, math.inf, norm).to(input.dtype)


@by_rows(0)
def k_support_negentropy(
    input: Tensor,
    k: int | Tensor,
    dim: int = -1,
    *,
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """The k-support negative entropy: the tightest convex bound of Σ y log y on k-sparse vectors.

        min_(z ∈ [0, 1]ⁿ, Σz = k) Σ_i y_i log(y_i/z_i)

    With the number a for which Σ min(1, y_i/a) = k, it is
    Σ y_i log max(y_i, a). For k = n it is the negative entropy.

    Args:
        input: y ≥ 0, of any floating-point dtype; 0·log 0 is 0.
        k, dim, mask: as for :func:`khot.k_support_norm`.
        offsets: of packed rows, as for :func:`khot.soft_topk`.

    Returns:
        The input's shape without ``dim``, and its dtype; inf for a row with a negative entry, which is
        outside of the domain, or with an infinite one. Differentiable to second order and in forward mode
        for y > 0.

    Raises:
        ValueError, TypeError, IndexError: as for :func:`khot.k_support_norm`.

    Source: Sander et al. 2023, appendix B.1.

    Example:
        >>> khot.k_support_negentropy(torch.tensor([0.5, 0.3, 0.2]), 2)
        tensor(-0.6931)
    """
    u, count = _vectors(widen(arguments.rows(input, dim, mask, fill=0)), k)
    outside = ((u < 0) | (u == math.inf)).any(-1)
    u = u.masked_fill(outside.unsqueeze(-1), 1)
    r = torch.maximum(u, _level(u, count))
    value = (u * torch.log(r.masked_fill(u == 0, 1))).sum(-1)
    return torch.where(outside, math.inf, value).to(input.dtype)


def _norm_cdf(p: float) -> CDF:
    _check_p(p)
    return cdfs.Uniform() if p == 2 else cdfs.Power(p)


def _check_p(p: Any) -> None:
    arguments.check_number(p, "p", low=1.15, high=3.0)


def _check_phi(phi: Any) -> None:
    if not isinstance(phi, str):
        raise TypeError(f"phi must be a name, but got {type(phi).__name__}")
    if phi not in ("identity", "abs", "square", "exp"):
        raise ValueError(f"phi must be 'identity', 'abs', 'square' or 'exp', but got {phi!r}")


def _signed(s: Tensor, k: Tensor, tau: Tensor, F: CDF) -> Tensor:
    """The magnitudes of the signed mask, from those of the input; wide, or in s's dtype."""
    y, hi, _ = threshold_map(s, k, tau, F, "y")
    infinite = s.isinf()
    z = widen(s).masked_fill(infinite, 0) / widen(tau).unsqueeze(-1)
    # clamp, unlike F, has a slope at 0, where the signed mask with p = 2 is linear
    free = z.clamp(max=1) if isinstance(F, cdfs.Uniform) else F.cdf(z)
    free = torch.where(infinite, (s > 0).to(z.dtype), free)
    within = (free.detach().sum(-1) <= widen(k)) & ~hi.isnan()
    return torch.where(within.unsqueeze(-1), free, y)


def _exponential(s: Tensor, k: Tensor, tau: Tensor, p: float) -> tuple[Tensor, Tensor]:
    y, level = exponential(s, k, tau, float(p))
    arguments.explain_nan(level.detach(), s, k, tau, integer=True)
    return y, level


def _vectors(u: Tensor, k: Any) -> tuple[Tensor, Tensor]:
    count = widen(arguments.per_row(k, "k", u, low=1, high=u.shape[-1], integer=True)).detach()
    count = count.expand(u.shape[:-1]).unsqueeze(-1)
    bad = ~((count >= 1) & (count <= u.shape[-1]) & (count == torch.floor(count)))
    bad = bad | u.isnan().any(-1, keepdim=True)
    return u.masked_fill(bad, math.nan), count.masked_fill(bad, 1)


def _level(u: Tensor, k: Tensor) -> Tensor:
    """(*batch, 1): the number a for which Σ min(1, u/a) = k, or the sum's limit for fewer than k entries."""
    ordered = u.detach().sort(-1, descending=True).values
    rest = ordered.flip(-1).cumsum(-1).flip(-1)
    left = k - torch.arange(u.shape[-1], dtype=u.dtype, device=u.device)
    # with j entries above it, a is the sum of the others over k − j; j is the first that leaves none above
    first = ((left > 0) & (rest >= left * ordered)).to(torch.int8).argmax(-1, keepdim=True)
    above = u.detach() > rest.gather(-1, first) / left.gather(-1, first)
    return u.masked_fill(above, 0).sum(-1, keepdim=True) / (k - above.sum(-1, keepdim=True))
