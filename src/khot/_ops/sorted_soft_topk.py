"""The sorted SOFT top-k. It also returns its potentials, so that the vjp can be differentiated again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from khot._core import arguments
from khot._core.dispatch import Rule, define, gradient
from khot._core.precision import on, wide_dtype
from khot._core.ways import by_kernel
from khot._kernels.reference import transport as kernels
from khot._kernels.reference.transport import FAR, laplacian, pinned, plan, scale_of
from khot._ops.solve import solve

__all__ = ["sorted_soft_topk"]

HIGHEST, SCALE = 1e290, 2.0**-64


def sorted_soft_topk(x: Tensor, k: int, epsilon: Tensor) -> Tensor:
    """n times the transport plan of rows (*batch, n), without its last anchor: (*batch, k, n).

    Args:
        epsilon: broadcasts with batch; a number may be on the CPU.
    """
    if x.dtype == torch.float64 and x.shape[-1]:  # scores beyond the kernels' range are scaled into it
        highest = x.detach().abs().masked_fill(x.isinf(), 0).amax(-1, keepdim=True)
        factor = torch.where(highest > HIGHEST, SCALE, 1.0).to(x.dtype)
        x, epsilon = x * factor, epsilon * factor.squeeze(-1)
    y: Tensor = _sorted_soft_topk(x, k, epsilon)[0]
    return y


class _Rule(Rule):
    constants = (1, 2)

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, _, epsilon = inputs
        return x, epsilon, *outputs[1:]

    @staticmethod
    def vjp(ctx: Any, grad: Tensor | None, _: Any, __: Any, grad_shift: Tensor | None) -> tuple[Any, ...]:
        x, epsilon, order, hi, shift = ctx.saved_tensors
        cotangent = x.new_zeros(*hi.shape, x.shape[-1]) if grad is None else grad
        if by_kernel() and grad_shift is None:  # this is so for every first derivative
            dx, depsilon = _sorted_soft_topk_backward(cotangent, x, epsilon, order, hi, shift)
        else:
            dx, depsilon = _vjp(cotangent, grad_shift, ctx.saved_tensors)
        return dx, None, gradient(ctx, 2, depsilon, epsilon.shape, epsilon.dtype)

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, _: None, depsilon: Tensor | None) -> Any:
        dy, dshift = _jvp(dx, depsilon, ctx.saved_tensors)
        return dy, None, None, dshift

    @staticmethod
    def examine(outputs: tuple[Tensor, ...], *inputs: Any) -> None:
        x, k, epsilon = inputs
        # checked again, because vmap hid the values before
        arguments.check_values(epsilon, "epsilon", low=0, low_open=True)
        arguments.explain_nan(outputs[3], x, torch.full((), k, dtype=torch.float64))


def _fake(x: Tensor, k: int, epsilon: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *batch, n = x.shape
    hi = x.new_empty(*batch, k, dtype=wide_dtype(x.device))
    return x.new_empty(*batch, k, n), torch.empty_like(hi, dtype=torch.int64), hi, torch.empty_like(hi)


def _reference_backward(
    grad: Tensor, x: Tensor, epsilon: Tensor, order: Tensor, hi: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor]:
    return _vjp(grad, None, (x, epsilon, order, hi, shift))


_sorted_soft_topk = define("sorted_soft_topk", kernels.sorted_soft_topk, _fake, _Rule)
_sorted_soft_topk_backward = define("sorted_soft_topk_backward", _reference_backward, "x, hi[row]")


# ------------------------------------------------------------------------------------ derivatives


# With a_r the anchors, s = 2/ε and w_r = Σ_(q ≥ r) hi_q, everything is expressed by
#
#     L_ri = s·(a_r x_i − w_r) + b_r,   Γ = softmax of L over r,   shift_r = b_(r+1) − b_r,   b_(k+1) = 0,
#
# b is implicit: db = −K⁻¹ dc for the change dc of the column sums at fixed b. dc and its adjoint are sums
# over pairs of anchors, dc_r = Σ_q Σ_i Γ_ri Γ_qi (dL_ri − dL_qi). So where the plan is nearly hard, they tend
# to 0 together with K, and K⁻¹dc stays bounded.


def _points(saved: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """s (*batch, 1); a_r; x_i and w_r relative to hi_k, since only the differences x − hi matter; and Γ."""
    x, epsilon, order, hi, shift = saved
    k, rows = hi.shape[-1], on(x.device, epsilon).to(hi.dtype).expand(hi.shape[:-1])
    scale = scale_of(rows).unsqueeze(-1)
    anchors = torch.arange(k, -1, -1, dtype=hi.dtype, device=hi.device)
    far = hi.abs() == FAR
    origin = hi[..., -1:].masked_fill(far[..., -1:], 0)
    centred = x.to(hi.dtype).masked_fill(x.isinf(), 0) - origin
    w = (hi - origin).masked_fill(far, 0).flip(-1).cumsum(-1).flip(-1)
    gamma = plan(x.to(hi.dtype), rows, order, hi, shift)
    return scale, anchors, centred, torch.nn.functional.pad(w, (0, 1)), gamma


def _vjp(grad: Tensor, grad_shift: Tensor | None, saved: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Reverse mode: the gradients in x and ε (of the batch shape), differentiable."""
    x, epsilon, _, hi, _ = saved
    scale, anchors, centred, w, gamma = _points(saved)
    placed, v = gamma[..., :-1, :], grad.to(hi.dtype)
    flow = (placed * v) @ gamma.mT
    between = flow[..., :-1]
    grad_b = (between - between.mT).sum(-1) + flow[..., -1]
    dscale: Tensor | float = 0.0
    if grad_shift is not None:
        grad_b_shift = torch.nn.functional.pad(grad_shift, (1, 0))[..., :-1] - grad_shift
        grad_b, dscale = grad_b + grad_b_shift, (w[..., :-1] * grad_b_shift).sum(-1)
    through_b = _solve_laplacian(gamma @ gamma.mT, hi, grad_b)
    v = placed * (v - through_b.unsqueeze(-1))
    along = anchors[:-1] @ v - (anchors @ gamma) * v.sum(-2)
    dscale = (centred * along).sum(-1) + dscale
    return (scale * along).to(x.dtype), -(scale.squeeze(-1) * dscale) / on(x.device, epsilon)


def _jvp(dx: Tensor | None, depsilon: Tensor | None, saved: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Forward mode: the tangents of y and of shift."""
    x, epsilon, _, hi, _ = saved
    scale, anchors, centred, w, gamma = _points(saved)
    along = torch.zeros_like(centred) if dx is None else scale * dx.to(hi.dtype)
    dw = torch.zeros_like(w)
    if depsilon is not None:
        dscale = -scale * (depsilon / on(x.device, epsilon)).to(hi.dtype).expand(hi.shape[:-1]).unsqueeze(-1)
        along, dw = along + dscale * centred, dscale * w
    gram = gamma @ gamma.mT
    flow = (gamma * along.unsqueeze(-2)) @ gamma.mT * (anchors.unsqueeze(-1) - anchors)
    flow = flow - gram * (dw.unsqueeze(-1) - dw.unsqueeze(-2))
    db = -_solve_laplacian(gram, hi, flow.sum(-1)[..., :-1])
    db = torch.nn.functional.pad(db, (0, 1))
    dlogits = anchors.unsqueeze(-1) * along.unsqueeze(-2) + (db - dw).unsqueeze(-1)
    mean = (gamma * dlogits).sum(-2, keepdim=True)
    dy = gamma[..., :-1, :] * (dlogits[..., :-1, :] - mean)
    return dy.to(x.dtype), db.diff(dim=-1)


def _solve_laplacian(gram: Tensor, hi: Tensor, v: Tensor) -> Tensor:
    """K⁻¹v, where K may have underflowed in part or be nearly singular.

    Rows are scaled to a diagonal of 1. A little damping keeps the potential of an anchor bounded if its
    coupling to the others is lost in rounding; the plan hardly depends on such a potential.
    """
    K = laplacian(gram, pinned(hi))
    diagonal = K.diagonal(dim1=-2, dim2=-1)
    idle = diagonal <= 0
    root = torch.rsqrt(diagonal.masked_fill(idle, 1))
    damping = torch.diag_embed(torch.full_like(hi, 1e-15).masked_fill(idle, 1))
    scaled = K * root.unsqueeze(-1) * root.unsqueeze(-2) + damping
    return root * solve(scaled, v * root)
