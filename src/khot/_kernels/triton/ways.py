"""Which kernels take a batch of soft top-ks: the one place that decides it.

- Float32 and narrower: `resident`, whose programs have a row or several; for few rows longer than
  `layout.STREAMED`, `split`, where programs share a row. `pull` has the gradients of both.
- Float64: `exact`, whose programs have a row each; for rows longer than `layout.RESIDENT`, `exact_split`,
  where programs share a row.
- A threshold that is asked for by itself, or that results depend on steeply (`layout.steep`), has the digits
  of float64: `resident` finds it in float32 and polishes it; for the few rows that are split, `exact_split`
  does.
- Gradients in float64: `exact_backward` and `exact_split`, by the same length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from khot import cdfs
from khot._kernels.reference import soft_topk as reference
from khot._kernels.triton import exact, exact_backward, exact_split, layout, pull, resident, split
from khot._kernels.triton.arguments import Threshold


def soft_topk(
    x: Tensor, k: Tensor, tau: Tensor, cdf: str, shape: float, output: str
) -> tuple[Tensor, Tensor, Tensor]:
    """`soft_topk.soft_topk`, in Triton."""
    batch, n = x.shape[:-1], x.shape[-1]
    if n == 0:
        return reference.soft_topk(x, k, tau, cdf, shape, output)
    F = cdfs.resolve(cdf, shape)
    if output in ("threshold", "rounded"):
        out = x.new_empty((*batch, 0) if output == "threshold" else batch)
    else:
        out = layout.like(x)
    hi = x.new_empty(batch, dtype=torch.float64)
    lo = torch.empty_like(hi)
    rows = hi.numel()
    if rows == 0:
        return out, hi, lo
    source = layout.rows(x, n)
    goal, tau_row = layout.values(k, batch, x.device), layout.values(tau, batch, x.device)
    fine = x.dtype == torch.float64
    if fine and n <= layout.RESIDENT:
        left = layout.rest(k, goal)
        exact.solve(source, None, (*goal, left), tau_row, out, hi, lo, n, F, output=output)
        return _rounded(out, hi, lo, output), hi, lo
    splits = layout.splits(rows, n)
    kernels = split if splits else resident
    if fine or (splits and layout.steep(F, output)):
        kernels = exact_split
    kernels.soft_topk(source, goal, tau_row, out, hi, lo, rows, n, F, output)
    return out if kernels is resident else _rounded(out, hi, lo, output), hi, lo


def _rounded(out: Tensor, hi: Tensor, lo: Tensor, output: str) -> Tensor:
    """What a kernel leaves that does not write a rounded threshold itself."""
    return torch.add(hi, lo, out=out) if output == "rounded" else out


def soft_topk_backward(
    grad: Tensor,
    grad_lo: Tensor,
    x: Tensor,
    hi: Tensor,
    lo: Tensor,
    tau: Tensor,
    cdf: str,
    shape: float,
    output: str,
    y: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`soft_topk.soft_topk_backward`, in Triton."""
    batch, n = x.shape[:-1], x.shape[-1]
    if n == 0:
        return reference.soft_topk_backward(grad, grad_lo, x, hi, lo, tau, cdf, shape, output)
    F = cdfs.resolve(cdf, shape)
    dx, dk, dtau = layout.like(x), layout.like(hi), layout.like(hi)
    rows = dk.numel()
    if rows == 0:
        return dx, dk, dtau
    t = Threshold(hi.contiguous(), lo.contiguous())
    # a threshold alone has no incoming gradient of this kind, and what takes its place is not used
    cotangent, source = layout.matrix(x if output == "threshold" else grad, x), layout.rows(x, n)
    tau_row, lo_row = layout.values(tau, batch, x.device), layout.values(grad_lo, batch, x.device)
    results = (dx, None, dk, dtau)
    if x.dtype != torch.float64:
        pull.backward(cotangent, lo_row, source, None, t, tau_row, results, n, F, output=output)
    elif n <= layout.RESIDENT:
        exact_backward.backward(
            cotangent, lo_row, source, None, t, tau_row, results, n, F, output=output
        )  # fmt: skip
    else:
        exact_split.soft_topk_backward(
            cotangent, lo_row, source, t, tau_row, (dx, dk, dtau), rows, n, F, output
        )  # fmt: skip
    return dx, dk, dtau
