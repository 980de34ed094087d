"""The sorted SOFT top-k: k soft selections, of the largest entry, the second largest, and so on."""

from __future__ import annotations

import math
import numbers
from typing import Any

import torch
from torch import Tensor

import khot._kernels  # noqa: F401  (registers torch.ops.khot)
from khot._core import arguments
from khot._core.arguments import Scalar
from khot._core.dispatch import below_autograd, call, register, vmap_rows
from khot._core.precision import large, on_cpu
from khot._kernels.reference.transport import FAR, plan, scale_of, solve_laplacian

__all__ = ["sorted_soft_topk"]


@on_cpu
def sorted_soft_topk(
    input: Tensor,
    k: int,
    dim: int = -1,
    *,
    epsilon: Scalar = 0.1,
    largest: bool = True,
    normalize: bool = False,
) -> Tensor:
    """k rows that softly select the largest entry, the second largest, ..., the k-th largest.

    n times the plan Γ that minimises ⟨C, Γ⟩ + ε Σ Γ log Γ with mass 1/n at every score, 1/n at the anchors
    k, k − 1, ..., 1 each and (n − k)/n at the anchor 0, for the cost C_ri = (x_i − a_r)²; without the last
    anchor's row. As ε → 0 it tends to the first k rows of the permutation matrix that sorts the scores (tied
    scores share their places equally), as ε → ∞ to 1/n everywhere.

    Args:
        input: scores, of any floating-point dtype. −inf is never selected; entries of +inf share the first
            places.
        k: how many, an int in [1, n].
        dim: the dimension to select along.
        epsilon: regularisation > 0, in the units of the scores (the anchors are 1 apart, and twice the
            product of score and anchor is divided by it); a number or a tensor that broadcasts with the batch
            shape (the input's shape without ``dim``).
        largest: select the largest entries, in descending order; if False, the smallest, in ascending order.
        normalize: divide the cost by the row's largest entry, as the published code does (there over the
            whole batch and without its gradient).

    Returns:
        The input's shape with ``dim`` replaced by (k, n), and its dtype: in [0, 1]; each of the k rows sums
        to 1 (to 1e-10 before rounding to the dtype), each of the n columns to at most 1. NaN for a row of
        scores with a NaN, or with more than k entries of +inf.

    The gradient in input and epsilon is exact (implicit differentiation, in O(nk) memory; nothing is
    unrolled), also of second order and in forward mode.

    Raises:
        ValueError: k not in [1, n], or more than the entries above −inf; epsilon ≤ 0 or of a shape that does
            not broadcast. (The values of tensors are checked on the CPU in eager mode; elsewhere that row is
            NaN.)
        TypeError: input that is not a floating-point tensor, k that is not an int.
        IndexError: dim out of range.

    Source: Xie et al. 2020, appendix B, with Newton's method on the k potentials in place of Sinkhorn's.

    Example:
        >>> scores = torch.tensor([1.0, 3.0, 2.0, 0.0])
        >>> khot.sorted_soft_topk(scores, 2, epsilon=2.0)
        tensor([[0.0753, 0.6202, 0.2914, 0.0131],
                [0.2493, 0.2779, 0.3549, 0.1180]])
        >>> khot.sorted_soft_topk(scores, 2, epsilon=0.01) @ scores
        tensor([3., 2.])
    """
    x = arguments.rows(input, dim, largest=largest)
    n = x.shape[-1]
    if isinstance(k, bool) or not isinstance(k, (int, torch.SymInt, numbers.Integral)):
        raise TypeError(f"k must be an int, but got {type(k).__name__}")
    if not 1 <= k <= n:
        raise ValueError(f"k must be an integer in [1, {n}], but got {k}")
    epsilon = arguments.per_row(epsilon, "epsilon", x, low=0, low_open=True).double()
    if normalize:
        # neither infinite entries nor a NaN (which makes its row NaN anyway) have a cost
        finite = x.double().nan_to_num(0.0, 0.0, 0.0)
        cost = torch.maximum(finite**2, (finite - k) ** 2).masked_fill(x.isinf(), 0).amax(-1)
        scaled = (epsilon * cost.masked_fill(cost == 0, 1)).clamp(1 / large(epsilon), large(epsilon))
        epsilon = scaled.where((epsilon > 0) & (epsilon < math.inf), math.nan)
    y, *_ = call(_SortedTopk, torch.ops.khot.sorted_soft_topk, x, k, epsilon)
    return y.movedim((-2, -1), (dim % max(input.dim(), 1), dim % max(input.dim(), 1) + 1))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, _, epsilon = inputs
    ctx.save_for_backward(x, epsilon, *output[1:])


def _backward(ctx: Any, grad: Tensor, _: None, __: None, grad_shift: Tensor) -> tuple[Any, ...]:
    x, epsilon, order, hi, shift = ctx.saved_tensors
    dx, depsilon = _pull(grad, grad_shift, x, epsilon, order, hi, shift)
    grad_epsilon = depsilon.sum_to_size(epsilon.shape).to(epsilon.dtype) if ctx.needs_input_grad[2] else None
    return dx, None, grad_epsilon


register("khot::sorted_soft_topk", _backward, _save)


class _SortedTopk(torch.autograd.Function):
    """As soft_count._ThresholdMap: the potentials are outputs, so backward can be differentiated."""

    @staticmethod
    def forward(x: Tensor, k: int, epsilon: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        with below_autograd():
            y, order, hi, shift = torch.ops.khot.sorted_soft_topk.default(x, k, epsilon)
        arguments.check_values(epsilon, "epsilon", low=0, low_open=True)  # again: vmap hid them before
        arguments.explain_nan(shift, x, torch.full((), k, dtype=torch.float64))
        return y, order, hi, shift

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _save(ctx, inputs, output)
        ctx.mark_non_differentiable(*output[1:3])
        x, _, epsilon = inputs
        ctx.save_for_forward(x, epsilon, *output[1:])

    backward = staticmethod(_backward)

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, _: None, depsilon: Tensor | None) -> Any:
        dy, dshift = _push(dx, depsilon, *ctx.saved_tensors)
        return dy, None, None, dshift

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        return vmap_rows(_SortedTopk.apply, info, in_dims, *args)


# With a_r the anchors, s = 2/ε, w_r = Σ_(q ≥ r) hi_q, and everything in terms of
#
#     L_ri = s·(a_r x_i − w_r) + b_r,   Γ = softmax of L over r,   shift_r = b_(r+1) − b_r,   b_(k+1) = 0,
#
# b is implicit: db = −K⁻¹ dc for the change dc of the column sums at fixed b. dc, and its adjoint, are sums
# over pairs of anchors, dc_r = Σ_q Σ_i Γ_ri Γ_qi (dL_ri − dL_qi), so that they vanish as K does where the
# plan is nearly hard, and K⁻¹ of them is bounded.


def _points(x: Tensor, epsilon: Tensor, hi: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """s (*batch, 1); a_r; x_i and w_r relative to the largest score that is nobody's: only x − hi matters."""
    k = hi.shape[-1]
    scale = scale_of(epsilon.to(hi.dtype)).expand(hi.shape[:-1]).unsqueeze(-1)
    anchors = torch.arange(k, -1, -1, dtype=hi.dtype, device=hi.device)
    far = hi.abs() == FAR
    origin = hi[..., -1:].masked_fill(far[..., -1:], 0)
    centred = x.to(hi.dtype).masked_fill(x.isinf(), 0) - origin
    w = (hi - origin).masked_fill(far, 0).flip(-1).cumsum(-1).flip(-1)
    return scale, anchors, centred, torch.nn.functional.pad(w, (0, 1))


def _pull(
    grad: Tensor,
    grad_shift: Tensor,
    x: Tensor,
    epsilon: Tensor,
    order: Tensor,
    hi: Tensor,
    shift: Tensor,
) -> tuple[Tensor, Tensor]:
    """Reverse mode: the gradients in x and ε (of the batch shape), differentiable."""
    scale, anchors, centred, w = _points(x, epsilon, hi)
    gamma = plan(x.to(hi.dtype), epsilon.to(hi.dtype).expand(hi.shape[:-1]), order, hi, shift)
    placed, v = gamma[..., :-1, :], grad.to(hi.dtype)
    flow = (placed * v) @ gamma.mT
    between = flow[..., :-1]
    grad_b = (between - between.mT).sum(-1) + flow[..., -1]
    grad_b_shift = torch.nn.functional.pad(grad_shift, (1, 0))[..., :-1] - grad_shift
    pull = solve_laplacian(gamma @ gamma.mT, hi, grad_b + grad_b_shift)
    v = placed * (v - pull.unsqueeze(-1))
    along = anchors[:-1] @ v - (anchors @ gamma) * v.sum(-2)
    dscale = (centred * along).sum(-1) + (w[..., :-1] * grad_b_shift).sum(-1)
    return (scale * along).to(x.dtype), -(scale.squeeze(-1) * dscale) / epsilon


def _push(
    dx: Tensor | None,
    depsilon: Tensor | None,
    x: Tensor,
    epsilon: Tensor,
    order: Tensor,
    hi: Tensor,
    shift: Tensor,
) -> tuple[Tensor, Tensor]:
    """Forward mode: the tangents of y and of shift."""
    scale, anchors, centred, w = _points(x, epsilon, hi)
    gamma = plan(x.to(hi.dtype), epsilon.to(hi.dtype).expand(hi.shape[:-1]), order, hi, shift)
    along = torch.zeros_like(centred) if dx is None else scale * dx.to(hi.dtype)
    dw = torch.zeros_like(w)
    if depsilon is not None:
        dscale = -scale * (depsilon / epsilon).to(hi.dtype).expand(hi.shape[:-1]).unsqueeze(-1)
        along, dw = along + dscale * centred, dscale * w
    gram = gamma @ gamma.mT
    flow = (gamma * along.unsqueeze(-2)) @ gamma.mT * (anchors.unsqueeze(-1) - anchors)
    flow = flow - gram * (dw.unsqueeze(-1) - dw.unsqueeze(-2))
    db = -solve_laplacian(gram, hi, flow.sum(-1)[..., :-1])
    db = torch.nn.functional.pad(db, (0, 1))
    dlogits = anchors.unsqueeze(-1) * along.unsqueeze(-2) + (db - dw).unsqueeze(-1)
    mean = (gamma * dlogits).sum(-2, keepdim=True)
    dy = gamma[..., :-1, :] * (dlogits[..., :-1, :] - mean)
    return dy.to(x.dtype), db.diff(dim=-1)
