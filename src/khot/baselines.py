"""Earlier relaxed top-k operators, each as published, for comparisons.

Each has defects that its docstring names and that khot's own operators do not have. Nothing was added to what
the sources describe: there are no masks, an infinite score may give NaN, k has no gradient (except in
:func:`rescaled_sigmoid_topk`), and :func:`torch.compile` and :func:`torch.func.vmap` are not supported.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from khot._core import arguments
from khot._core.arguments import Scalar
from khot._core.precision import on_cpu

__all__ = [
    "dykstra_topk",
    "masked_softmax_topk",
    "neuralsort_permutation",
    "neuralsort_topk",
    "pav_topk",
    "rescaled_sigmoid_topk",
    "sequential_softmax_topk",
    "sinkhorn_topk",
    "softsort_permutation",
    "softsort_topk",
    "sorted_sinkhorn_topk",
]


def sequential_softmax_topk(input: Tensor, k: int | Tensor, dim: int = -1, *, tau: Scalar = 1.0) -> Tensor:
    """k softmaxes, one after the other; each one takes off what the earlier ones have selected.

    y = p¹ + … + pᵏ with pʲ = softmax(αʲ/τ), α¹ = x, αʲ⁺¹ = αʲ + log(1 − pʲ).

    Defects: entries exceed 1 (for n = k = 2 one of them does unless they are equal); their order may differ
    from that of the scores; k is an integer; O(nk) time, and O(nk) memory for the gradient.

    Args:
        input: scores, of any floating-point dtype.
        k: an integer in [0, n]; a number or a tensor that broadcasts with the batch shape (the input's
            shape without ``dim``).
        dim: the dimension to select along.
        tau: temperature > 0; a number or a tensor, as k.

    Returns:
        Same shape and dtype as the input, in [0, k], each row summing to k. Differentiable in input and tau,
        by unrolling.

    Raises:
        ValueError: k out of range or not an integer; tau ≤ 0.
        TypeError, IndexError: as for :func:`khot.soft_topk`.

    Source: Xie and Ermon 2019, Algorithm 2; Plötz and Roth 2018. log(1 − p) is kept finite as in their code.

    Example:
        >>> khot.baselines.sequential_softmax_topk(torch.tensor([0.2, 0.0]), 2)
        tensor([1.0498, 0.9502])
    """
    x, k, tau = _prepare(input, k, dim, tau, integer=True)
    y, p = torch.zeros_like(x), torch.zeros_like(x)
    tiny = torch.finfo(x.dtype).tiny
    for step in range(int(k.max()) if k.numel() else 0):
        x = x + torch.log(torch.clamp(1 - p, min=tiny))
        p = torch.softmax(x / tau, -1)
        y = y + (p if k.numel() == 1 else torch.where(step < k, p, 0))
    return arguments.unrows(y.to(input.dtype), input, dim)


def masked_softmax_topk(input: Tensor, k: int | Tensor, dim: int = -1, *, tau: Scalar = 1.0) -> Tensor:
    """k softmaxes, one after the other; each one is over the scores without the largest of the one before.

    y = p¹ + … + pᵏ, where pʲ is the softmax of x/τ over all scores but the j − 1 largest.

    Defects: entries exceed 1 (for n = k = 2 the smaller score's does). The larger of two close scores, which
    is masked first, gets the smaller entry, so that y jumps where scores change their order, and equal scores
    get different entries. k is an integer; O(nk) time, and O(nk) memory for the gradient.

    Args:
        input, k, dim, tau: as for :func:`sequential_softmax_topk`. Of equal scores the first is masked first.

    Returns, raises: as for :func:`sequential_softmax_topk`.

    Source: Xie et al. 2020, appendix C ("softmax k times"); after Goyal et al. 2018.

    Example:
        >>> khot.baselines.masked_softmax_topk(torch.tensor([0.2, 0.0]), 2)
        tensor([0.5498, 1.4502])
    """
    x, k, tau = _prepare(input, k, dim, tau, integer=True)
    z, y = x / tau, torch.zeros_like(x)
    for step in range(int(k.max()) if k.numel() else 0):
        p = torch.softmax(z, -1)
        y = y + (p if k.numel() == 1 else torch.where(step < k, p, 0))
        z = z.scatter(-1, z.argmax(-1, keepdim=True), -math.inf)
    return arguments.unrows(y.to(input.dtype), input, dim)


def rescaled_sigmoid_topk(input: Tensor, k: Scalar, dim: int = -1, *, tau: Scalar = 1.0) -> Tensor:
    """Sigmoids, scaled linearly so that they sum to k (NCPSS).

    With s = σ(x/τ): s·k/Σs where Σs ≥ k, else 1 − (1 − s)(n − k)/(n − Σs).

    Defects: adding a constant to the scores changes the result. If all scores have the same sign, the limit
    τ → 0 is k/n everywhere instead of the top k. Saturated sigmoids have no gradient, even if their sum is
    far from k.

    Args:
        input, dim, tau: as for :func:`sequential_softmax_topk`.
        k: how many, in [0, n], not necessarily an integer; a number or a tensor that broadcasts with the
            batch shape.

    Returns:
        Same shape and dtype as the input, in [0, 1], each row summing to k. Differentiable, exactly, in
        input, k and tau.

    Raises:
        ValueError, TypeError, IndexError: as for :func:`khot.soft_topk`.

    Source: Pervez, Lippe, Gavves 2023.

    Example:
        >>> x = torch.tensor([1.0, -1.0, 0.0])
        >>> khot.baselines.rescaled_sigmoid_topk(x, 1)
        tensor([0.4874, 0.1793, 0.3333])
        >>> khot.baselines.rescaled_sigmoid_topk(x + 9, 1)
        tensor([0.3334, 0.3333, 0.3333])
    """
    x, k, tau = _prepare(input, k, dim, tau)
    n = x.shape[-1]
    s, rest = torch.sigmoid(x / tau), torch.sigmoid(-x / tau)
    total, left = s.sum(-1, keepdim=True), rest.sum(-1, keepdim=True)
    shrink = total >= k
    # neither branch may divide by 0, even where the other one is used, because the gradient would be NaN
    down = k / torch.where(shrink & (total > 0), total, 1)
    up = (n - k) / torch.where(shrink, 1, left)
    y = torch.where(shrink, s * down, 1 - rest * up)
    return arguments.unrows(y.to(input.dtype), input, dim)


def sinkhorn_topk(
    input: Tensor, k: Scalar, dim: int = -1, *, epsilon: Scalar = 0.1, iterations: int = 200
) -> Tensor:
    """SOFT top-k by a fixed number of Sinkhorn iterations.

    The result is n times the mass that goes to the anchor 1 in the entropic optimal transport of the scores
    onto 0 and 1, with cost C_ij = (x_i − a_j)² divided by its maximum over the whole batch. When converged,
    it is :func:`khot.ot_topk` at epsilon·max C. For ε ≤ 0.01, and after a NaN, the iterations work with
    logarithms.

    Defects: a row's result depends on the other rows through the maximum, so that one NaN makes the whole
    batch NaN, and one +inf makes every entry of the other rows k/n. If the iterations stop early, as they do
    for small ε, entries exceed 1, and the gradient is that of a fixed point that was not reached. The maximum
    has no gradient. For k = 0 and k = n the gradient is NaN.

    Args:
        input: scores, of any floating-point dtype. −inf is replaced by a score that is as far below the
            smallest of the batch as this is below the largest.
        k: as for :func:`rescaled_sigmoid_topk`.
        dim: the dimension to select along.
        epsilon: regularisation > 0; a number or a tensor that broadcasts with the batch shape. No gradient.
        iterations: at least 1.

    Returns:
        Same shape and dtype as the input, each row summing to k, in [0, 1] if converged. Differentiable in
        input, to first order, by the implicit function theorem at the last iterate.

    Raises:
        ValueError, TypeError, IndexError: as for :func:`khot.ot_topk`; iterations < 1.

    Source: Xie et al. 2020, Algorithm 1 and appendix H.

    Example:
        >>> x = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
        >>> khot.baselines.sinkhorn_topk(x, 2)
        tensor([[0.2477, 0.9656, 0.7523, 0.0344]])
        >>> khot.baselines.sinkhorn_topk(torch.cat((x, x * 5)), 2)[:1]
        tensor([[0.4889, 0.5333, 0.5111, 0.4667]])
    """
    _check_iterations(iterations)
    x, k, epsilon = _prepare(input, k, dim, epsilon, tau_name="epsilon")
    if not x.numel():
        return torch.zeros_like(input)
    share = (k / x.shape[-1]).detach()
    plan = _plan(x, torch.tensor([1.0, 0.0]), torch.stack((share, 1 - share), -1), epsilon, iterations)
    return arguments.unrows((x.shape[-1] * plan[..., 0]).to(input.dtype), input, dim)


def sorted_sinkhorn_topk(
    input: Tensor, k: int, dim: int = -1, *, epsilon: Scalar = 0.1, iterations: int = 200
) -> Tensor:
    """Sorted SOFT top-k by a fixed number of Sinkhorn iterations.

    As :func:`sinkhorn_topk`, with the anchors k, k − 1, …, 1, each of mass 1/n, and the anchor 0 with the
    rest. When converged, it is :func:`khot.sorted_soft_topk` at epsilon·max C.

    Defects: as for :func:`sinkhorn_topk`, in entries and columns. For k = n the matrix whose inverse the
    gradient needs is singular. O(nk) memory for the iterations and for the gradient.

    Args:
        input, dim, epsilon, iterations: as for :func:`sinkhorn_topk`.
        k: an int in [1, n].

    Returns:
        A tensor of the input's dtype and shape, with ``dim`` replaced by (k, n): one row per place. Each row
        sums to 1. Differentiable in input, to first order, by the implicit function theorem at the last
        iterate.

    Raises:
        ValueError, TypeError, IndexError: as for :func:`khot.sorted_soft_topk`; iterations < 1.

    Source: Xie et al. 2020, appendices B and H: Algorithm 3, in the order of multiplications of Algorithm 4.

    Example:
        >>> khot.baselines.sorted_sinkhorn_topk(torch.tensor([1.0, 3.0, 2.0, 0.5]), 2)
        tensor([[0.0080, 0.7779, 0.2131, 0.0010],
                [0.1847, 0.2112, 0.5340, 0.0700]])
    """
    _check_iterations(iterations)
    x, _, epsilon = _prepare(input, 0, dim, epsilon, tau_name="epsilon")
    n = x.shape[-1]
    arguments.check_integer(k, "k", low=1, high=n)
    anchors = torch.arange(k, -1, -1)
    nu = torch.where(anchors > 0, 1, n - k).to(x) / n
    plan = _plan(x, anchors, nu.expand(*x.shape[:-1], 1, k + 1), epsilon, iterations)
    return _at((n * plan[..., :k]).mT.to(input.dtype), input, dim)


def _plan(x: Tensor, anchors: Tensor, nu: Tensor, epsilon: Tensor, iterations: int) -> Tensor:
    """The transport of the scores (*batch, n) to m anchors of mass nu (*batch, 1, m): (*batch, n, m)."""
    if not x.numel():
        return x.unsqueeze(-1).expand(*x.shape, len(anchors))
    finite = x.detach().masked_fill(x == -math.inf, math.inf)
    x = x.masked_fill(x == -math.inf, finite.amin() - (x.detach().amax() - finite.amin()))
    cost = (x.unsqueeze(-1) - anchors.to(x)) ** 2
    cost = cost / cost.detach().max()
    plan: Tensor = _Sinkhorn.apply(cost, nu, epsilon.detach().unsqueeze(-1), iterations)
    return plan


class _Sinkhorn(Function):
    """The plan (*batch, n, m) with row sums 1/n and column sums nu (*batch, 1, m)."""

    @staticmethod
    def forward(ctx: Any, cost: Tensor, nu: Tensor, epsilon: Tensor, iterations: int) -> Tensor:
        n = cost.shape[-2]
        plan = _scale(torch.exp(-cost / epsilon), nu, iterations) if bool((epsilon > 1e-2).all()) else None
        if plan is None or bool(plan.isnan().any()):
            g = torch.zeros_like(nu)
            for _ in range(iterations):
                f = -math.log(n) - torch.logsumexp(g - cost / epsilon, -1, keepdim=True)
                g = torch.log(nu) - torch.logsumexp(f - cost / epsilon, -2, keepdim=True)
            plan = torch.exp(f + g - cost / epsilon)
        ctx.save_for_backward(plan, nu, epsilon)
        return plan

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Appendix H: the dual of the last anchor is fixed, so that K belongs to the m − 1 others."""
        plan, nu, epsilon = ctx.saved_tensors
        others = plan[..., :-1]
        first = plan.shape[-2] * others  # Γ̄/μ
        kappa = torch.diag_embed(nu[..., 0, :-1]) - first.mT @ others
        weighted = grad * plan
        by_row = plan.shape[-2] * weighted.sum(-1, keepdim=True)
        by_column = weighted[..., :-1].sum(-2).unsqueeze(-1)
        # of the duals: ζ of the anchors, and ξ of each entry
        zeta = torch.linalg.inv_ex(kappa).inverse @ (by_column - others.mT @ by_row)
        xi = by_row - first @ zeta
        zeta = torch.nn.functional.pad(zeta.mT, (0, 1))
        return plan * (xi + zeta - grad) / epsilon, None, None, None


def _scale(kernel: Tensor, nu: Tensor, iterations: int) -> Tensor:
    q = torch.full_like(nu, 0.5)
    for _ in range(iterations):
        p = 1 / (kernel.shape[-2] * (kernel * q).sum(-1, keepdim=True))
        q = nu / (kernel * p).sum(-2, keepdim=True)
    return p * kernel * q


def neuralsort_permutation(input: Tensor, dim: int = -1, *, tau: Scalar = 1.0) -> Tensor:
    """The matrix that sorts a row in descending order, relaxed to one whose rows are softmaxes (NeuralSort).

    Row i of P is the softmax of ((n + 1 − 2i) x_j − Σ_l |x_j − x_l|)/τ over the entries j.

    Defects: rows sum to 1, but columns do not. An infinite score gives NaN. O(n²) time and memory, even for
    one row of the matrix.

    Args:
        input: scores, of any floating-point dtype.
        dim: the dimension to sort along.
        tau: temperature > 0; a number or a tensor that broadcasts with the batch shape (the input's shape
            without ``dim``).

    Returns:
        A tensor of the input's dtype and shape, with ``dim`` replaced by (n, n), places by entries, as from
        ``khot.soft_permutation(input, descending=True)``. Differentiable in input and tau.

    Raises:
        ValueError: tau ≤ 0.
        TypeError, IndexError: as for :func:`khot.soft_permutation`.

    Source: Grover, Wang, Zweig, Ermon 2019.

    Example:
        >>> khot.baselines.neuralsort_permutation(torch.tensor([1.0, 3.0, 2.0]))
        tensor([[0.0132, 0.7214, 0.2654],
                [0.2119, 0.2119, 0.5761],
                [0.7214, 0.0132, 0.2654]])
    """
    x, _, tau = _prepare(input, 0, dim, tau)
    return _at(_neuralsort(x, tau, x.shape[-1]).to(input.dtype), input, dim)


def softsort_permutation(input: Tensor, dim: int = -1, *, tau: Scalar = 1.0) -> Tensor:
    """The matrix that sorts a row in descending order, relaxed to one whose rows are softmaxes (SoftSort).

    Row i of P is the softmax of −|s_i − x_j|/τ over the entries j, where s is the sorted row.

    Defects: rows sum to 1, but columns do not: of close entries, the middle ones are selected more than once,
    and the outer ones less. An infinite score gives NaN. O(n²) time and memory.

    Args:
        input, dim, tau: as for :func:`neuralsort_permutation`.

    Returns, raises: as for :func:`neuralsort_permutation`.

    Source: Prillo, Eisenschlos 2020, with the distance |·|.

    Example:
        >>> khot.baselines.softsort_permutation(torch.tensor([1.0, 3.0, 2.0]))
        tensor([[0.0900, 0.6652, 0.2447],
                [0.2119, 0.2119, 0.5761],
                [0.6652, 0.0900, 0.2447]])
    """
    x, _, tau = _prepare(input, 0, dim, tau)
    return _at(_softsort(x, tau, x.shape[-1]).to(input.dtype), input, dim)


def neuralsort_topk(input: Tensor, k: int | Tensor, dim: int = -1, *, tau: Scalar = 1.0) -> Tensor:
    """The sum of the first k rows of :func:`neuralsort_permutation`.

    Defects: entries exceed 1, and their order may differ from that of the scores; k is an integer; others as
    for :func:`neuralsort_permutation`.

    Args:
        input, k, dim, tau: as for :func:`sequential_softmax_topk`.

    Returns, raises: as for :func:`sequential_softmax_topk`.

    Source: Grover, Wang, Zweig, Ermon 2019; used so by Xie et al. 2020, appendix C.

    Example:
        >>> khot.baselines.neuralsort_topk(torch.tensor([1.0, 3.0, 2.0]), 2)
        tensor([0.2252, 0.9333, 0.8415])
    """
    return _first_rows(_neuralsort, input, k, dim, tau)


def softsort_topk(input: Tensor, k: int | Tensor, dim: int = -1, *, tau: Scalar = 1.0) -> Tensor:
    """The sum of the first k rows of :func:`softsort_permutation`.

    Defects: entries exceed 1, and their order may differ from that of the scores; k is an integer; others as
    for :func:`softsort_permutation`, in O(nk) time and memory and a sort.

    Args:
        input, k, dim, tau: as for :func:`sequential_softmax_topk`.

    Returns, raises: as for :func:`sequential_softmax_topk`.

    Source: Prillo, Eisenschlos 2020.

    Example:
        >>> khot.baselines.softsort_topk(torch.tensor([1.0, 3.0, 2.0]), 2)
        tensor([0.3020, 0.8772, 0.8208])
    """
    return _first_rows(_softsort, input, k, dim, tau)


def _neuralsort(x: Tensor, tau: Tensor, rows: int) -> Tensor:
    """The first rows of the matrix: (*batch, rows, n)."""
    n = x.shape[-1]
    spread = (x.unsqueeze(-1) - x.unsqueeze(-2)).abs().sum(-1)
    scale = n - 1 - 2 * torch.arange(rows, device=x.device).unsqueeze(-1)
    return torch.softmax((scale * x.unsqueeze(-2) - spread.unsqueeze(-2)) / tau.unsqueeze(-1), -1)


def _softsort(x: Tensor, tau: Tensor, rows: int) -> Tensor:
    """The first rows of the matrix: (*batch, rows, n)."""
    s = x.sort(-1, descending=True).values[..., :rows].unsqueeze(-1)
    return torch.softmax(-(s - x.unsqueeze(-2)).abs() / tau.unsqueeze(-1), -1)


def _first_rows(
    permutation: Callable[[Tensor, Tensor, int], Tensor], input: Tensor, k: Any, dim: int, tau: Scalar
) -> Tensor:
    x, k, tau = _prepare(input, k, dim, tau, integer=True)
    most = int(k.max()) if k.numel() else 0
    selected = torch.arange(most, device=x.device) < k
    y = (permutation(x, tau, most) * selected.unsqueeze(-1)).sum(-2)
    return arguments.unrows(y.to(input.dtype), input, dim)


def _at(matrix: Tensor, input: Tensor, dim: int) -> Tensor:
    """(*batch, places, n) with its last two dims where the input has dim."""
    dim = arguments.check_dim(input, dim)
    return matrix.movedim((-2, -1), (dim, dim + 1))


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
    _check_iterations(iterations)
    return _isotonic_topk(input, k, dim, tau, 1, magnitude, iterations)


def _isotonic_topk(
    input: Tensor, k: Any, dim: int, tau: Scalar, power: int, magnitude: bool, iterations: int | None
) -> Tensor:
    """In units of τ: z = s/τ, and h_i' = w_i(c v + 1 − [magnitude]) − (z − v)^(q−1) with c = τ or 0."""
    x, k, tau = _prepare(input, k, dim, tau, integer=True)
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


def _prepare(
    input: Tensor, k: Any, dim: int, scale: Any, *, integer: bool = False, tau_name: str = "tau"
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows in float32 or float64, and k and the scale in the same dtype with a dim for the entries."""
    x = arguments.rows(input, dim)
    k = arguments.per_row(k, "k", x, low=0, high=x.shape[-1], integer=integer)
    scale = arguments.per_row(scale, tau_name, x, low=0, low_open=True)
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.to(dtype), k.to(dtype).unsqueeze(-1), scale.to(dtype).unsqueeze(-1)


def _check_iterations(iterations: Any) -> None:
    if isinstance(iterations, bool) or not isinstance(iterations, int):
        raise TypeError(f"iterations must be an int, but got {type(iterations).__name__}")
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, but got {iterations}")
