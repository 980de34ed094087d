"""Which kernels take a batch: the one place that decides it, for operators with kernels in several files.
What is in one file only is named in :data:`khot._kernels.gpu.FILES`.

| operators | rows | file |
|---|---|---|
| soft top-k | float32 and narrower, one or several in a program | `counted` |
| | the same, few that are longer than `layout.STREAMED`: programs share a row | `split` |
| | float64, one in a program | `float64` |
| | float64, longer than `layout.RESIDENT`; those of `split` if results are steep in t | `float64_split` |
| its gradient | float32 and narrower | `pull` |
| | float64, by the same lengths | `float64_backward`, `float64_split` |
| soft budget | float32 and narrower; few of these that are long | `paid`; `split_budget` |
| | float64 | `float64` |
| its gradient | float32 and narrower; float64 | `pull`; `float64_backward` |
| Fenchel-Young loss | all; few that are long, but not in float64 | `losses`; `split_losses` |
| Laplace's ranks, sorts | float32 and narrower, short, or long and not few | `ranks`; `sorts` |
| | others, and counts and thresholds of levels, by torch's operations and scans | `scans` |
| projection | float32, up to 1,024 entries, with "kl" up to 256 | `short_projection` |
| | float32, longer, "l2", one in a program; its gradient | `long_projection`; `projection` |
| | longer with "kl", float64, or split over programs | `projection` |

A threshold that is asked for by itself, or that results depend on steeply (`layout.steep`), has the digits of
float64. A batch without entries goes to the reference. A file is imported at the first call that needs it:
its kernels take Triton a hundredth to a tenth of a second.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from khot import cdfs
from khot._kernels.reference import fenchel_young as reference_losses
from khot._kernels.reference import laplace as reference_laplace
from khot._kernels.reference import soft_budget as reference_budget
from khot._kernels.reference import soft_topk as reference_topk
from khot._kernels.triton import layout
from khot._kernels.triton.arguments import Digits, Found, Pairs, Pulled, Threshold


@functools.cache
def kernels(file: str) -> Any:
    """The file with the kernels that were chosen."""
    return importlib.import_module(f"khot._kernels.triton.{file}")


# ------------------------------------------------------------------------------------ soft top-k


def soft_topk(
    x: Tensor, k: Tensor, tau: Tensor, cdf: str, shape: float, output: str
) -> tuple[Tensor, Tensor, Tensor]:
    """`soft_topk.soft_topk`, in Triton."""
    batch, n = x.shape[:-1], x.shape[-1]
    if n == 0:
        return reference_topk.soft_topk(x, k, tau, cdf, shape, output)
    asked = layout.asked(cdf, shape, output=output)
    if output in ("threshold", "rounded"):
        out = x.new_empty((*batch, 0) if output == "threshold" else batch)
    else:
        out = layout.like(x)
    hi = x.new_empty(batch, dtype=torch.float64)
    lo = torch.empty_like(hi)
    rows = hi.numel()
    if rows == 0:
        return out, hi, lo
    source, found = layout.rows(x, n), Found(out, hi, lo)
    goal, tau_row = layout.values(k, batch, x.device), layout.values(tau, batch, x.device)
    if x.dtype == torch.float64:
        file = "float64" if n <= layout.RESIDENT else "float64_split"
    elif layout.splits(rows, n):
        file = "float64_split" if layout.steep(asked.F, output) else "split"
    else:
        file = "counted"
    if file == "float64":
        digits = Digits(layout.third(k, goal), 0.0, 0.0, 0.0)
        kernels(file).solve(source, None, goal, tau_row, found, asked, digits)
    else:
        kernels(file).soft_topk(source, goal, tau_row, found, asked)
    if output == "rounded" and file != "counted":  # the others leave it open
        torch.add(hi, lo, out=out)
    return out, hi, lo


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
        return reference_topk.soft_topk_backward(grad, grad_lo, x, hi, lo, tau, cdf, shape, output)
    dx, dk, dtau = layout.like(x), layout.like(hi), layout.like(hi)
    if dk.numel() == 0:
        return dx, dk, dtau
    file = "pull"
    if x.dtype == torch.float64:
        file = "float64_backward" if n <= layout.RESIDENT else "float64_split"
    if output == "threshold":  # which alone has no incoming gradient of this kind: it is not read
        grad = x
    kernels(file).backward(
        layout.matrix(grad, x), layout.values(grad_lo, batch, x.device), Pairs(layout.rows(x, n), None),
        layout.solved(hi, lo, tau), Pulled(dx, dk, dtau, None),
        layout.asked(cdf, shape, output=output),
    )  # fmt: skip
    return dx, dk, dtau


# ------------------------------------------------------------------------------------ soft budgets


def soft_budget(
    x: Tensor, cost: Tensor, budget: Tensor, tau: Tensor, cdf: str, shape: float, by: str, at_most: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`soft_budget.soft_budget`, in Triton."""
    batch, n = x.shape[:-1], x.shape[-1]
    if x.numel() == 0:
        return reference_budget.soft_budget(x, cost, budget, tau, cdf, shape, by, at_most)
    y = x.new_empty(x.shape)
    hi = torch.empty(batch, dtype=torch.float64, device=x.device)
    lo = torch.empty_like(hi)
    if torch.float64 in (x.dtype, cost.dtype):
        solve = kernels("float64").solve
    else:
        solve = kernels("split_budget" if layout.splits(hi.numel(), n) else "paid").soft_budget
    goal = layout.values(budget, batch, x.device)
    solve(
        layout.rows(x, n), layout.matrix(cost, x), goal, layout.values(tau, batch, x.device),
        Found(y, hi, lo), layout.asked(cdf, shape, by, at_most=at_most),
        Digits(layout.third(budget, goal), _slack(n, cost.dtype), 0.0, 0.0),
    )  # fmt: skip
    return y, hi, lo


@functools.lru_cache(maxsize=256)
def _slack(n: int, dtype: torch.dtype) -> float:
    return reference_budget.slack(torch.tensor(n, dtype=torch.float64), dtype).item()


def soft_budget_backward(
    grad: Tensor, grad_lo: Tensor, x: Tensor, cost: Tensor, hi: Tensor, lo: Tensor, tau: Tensor, cdf: str,
    shape: float, by: str, at_most: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`soft_budget.soft_budget_backward`, in Triton."""
    batch, n = x.shape[:-1], x.shape[-1]
    if x.numel() == 0:
        return reference_budget.soft_budget_backward(
            grad, grad_lo, x, cost, hi, lo, tau, cdf, shape, by, at_most
        )  # fmt: skip
    dx, dcost = x.new_empty(x.shape), cost.new_empty(x.shape)
    dbudget, dtau = hi.new_empty(batch), hi.new_empty(batch)
    file = "float64_backward" if torch.float64 in (x.dtype, cost.dtype) else "pull"
    kernels(file).backward(
        layout.matrix(grad, x), layout.values(grad_lo, batch, x.device),
        Pairs(layout.rows(x, n), layout.matrix(cost, x)), layout.solved(hi, lo, tau),
        Pulled(dx, dbudget, dtau, dcost), layout.asked(cdf, shape, by, at_most=at_most),
    )  # fmt: skip
    return dx, dcost, dbudget, dtau


# ------------------------------------------------------------------------------------ Fenchel-Young losses


def fenchel_young(
    x: Tensor, target: Tensor, k: Tensor, tau: Tensor, cdf: str, shape: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`fenchel_young.fenchel_young`, in Triton."""
    if x.numel() == 0:
        return reference_losses.fenchel_young(x, target, k, tau, cdf, shape)
    batch, n = x.shape[:-1], x.shape[-1]
    loss = torch.empty(batch, dtype=torch.float64, device=x.device)
    share, hi, lo = torch.empty_like(loss), torch.empty_like(loss), torch.empty_like(loss)
    kernels(_of_losses(x, loss.numel())).fenchel_young(
        layout.rows(x, n), layout.rows(target, n), layout.values(k, batch, x.device),
        layout.values(tau, batch, x.device), Found((loss, share), hi, lo), cdfs.resolve(cdf, shape),
    )  # fmt: skip
    return loss, share, hi, lo


def _of_losses(x: Tensor, rows: int) -> str:
    splits = layout.splits(rows, x.shape[-1]) and x.dtype != torch.float64
    return "split_losses" if splits else "losses"


def fenchel_young_backward(
    grad: Tensor, x: Tensor, target: Tensor, share: Tensor, loss: Tensor, hi: Tensor, lo: Tensor, tau: Tensor,
    cdf: str, shape: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`fenchel_young.fenchel_young_backward`, in Triton."""
    if x.numel() == 0:
        return reference_losses.fenchel_young_backward(grad, x, target, share, loss, hi, lo, tau, cdf, shape)
    batch, n = x.shape[:-1], x.shape[-1]
    dx, dtau = x.new_empty(x.shape), hi.new_empty(batch)
    if not any(grad.stride()):  # one number for all rows, as a mean's
        grad = grad.as_strided((), ())
    kernels(_of_losses(x, dtau.numel())).fenchel_young_backward(
        layout.rows(x, n), layout.rows(target, n), layout.values(grad, batch, x.device),
        (share.contiguous(), loss.contiguous(), Threshold(hi.contiguous(), lo.contiguous())),
        layout.values(tau, batch, x.device), dx, dtau, cdfs.resolve(cdf, shape),
    )  # fmt: skip
    return dx, dtau


# ------------------------------------------------------------------------------------ Laplace's ranks, sorts


def sorts_rows(x: Tensor, long: bool = True) -> bool:
    """Whether a row of x has a program: a short one, which sorts it, or a long one, which takes it sorted.
    Few very long rows would leave most of a device idle."""
    n = x.shape[-1]
    if x.dtype == torch.float64 or x.numel() == 0:
        return False
    short: bool = n <= kernels("ranks").SHORT
    return short or (long and (n <= layout.RESIDENT or x.numel() >= n * layout.STREAMS))


def laplace_count(
    x: Tensor, levels: Tensor | None, tau: Tensor, descending: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """`laplace.laplace_count`, in Triton."""
    if levels is not None:
        return reference_laplace.laplace_count(x, levels, tau, scan=kernels("scans").decay_scan)
    rank, order = kernels("ranks" if sorts_rows(x) else "scans").laplace_rank(x, tau, descending)
    return rank, order, order.new_empty((*x.shape[:-1], 0))


def laplace_centred_rank(x: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
    """`laplace.laplace_centred_rank`, in Triton."""
    if sorts_rows(x):
        rank, order = kernels("ranks").laplace_rank(x, tau, centred=True)
        return rank, order
    return reference_laplace.laplace_centred_rank(x, tau, laplace_count)


def laplace_count_backward(
    grad: Tensor, x: Tensor, order: Tensor, levels: Tensor | None, place: Tensor, tau: Tensor, want_tau: bool,
    descending: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`laplace.laplace_count_backward`, in Triton."""
    if levels is not None or not sorts_rows(x):
        return reference_laplace.laplace_count_backward(
            grad, x, order, levels, place, tau, want_tau, descending, scan=kernels("scans").decay_scan
        )
    dx, dtau = kernels("ranks").laplace_rank_backward(grad, x, order, tau, want_tau, descending)
    return dx, dtau.new_empty((*dtau.shape, 0)), dtau


def laplace_thresholds(
    x: Tensor, levels: Tensor | None, tau: Tensor, descending: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`laplace.laplace_thresholds`, in Triton."""
    if levels is not None or not sorts_rows(x):
        scan = kernels("scans").decay_scan
        return reference_laplace.laplace_thresholds(x, levels, tau, descending, scan=scan)
    t, order, place = kernels("sorts").laplace_sort(x, tau, descending)
    return t.new_empty((*x.shape[:-1], 0), dtype=torch.float64), t, order, place


def laplace_thresholds_backward(
    grad: Tensor, x: Tensor, order: Tensor, levels: Tensor | None, place: Tensor, tau: Tensor, want_tau: bool,
    descending: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`laplace.laplace_thresholds_backward`, in Triton."""
    if levels is not None or not sorts_rows(x, long=not want_tau):
        return reference_laplace.laplace_thresholds_backward(
            grad, x, order, levels, place, tau, want_tau, descending, scan=kernels("scans").decay_scan
        )
    dx, dtau = kernels("sorts").laplace_sort_backward(grad, x, order, place, tau, want_tau, descending)
    return dx, dtau.new_empty((*dtau.shape, 0)), dtau


# ------------------------------------------------------------------------------------ projections


def permutahedron(
    z: Tensor, w: Tensor, tau: Tensor, regularization: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`permutahedron.permutahedron`, in Triton."""
    file = _of_projection(z, w, regularization)
    found: tuple[Tensor, Tensor, Tensor, Tensor] = kernels(file).permutahedron(z, w, tau, regularization)
    return found


def permutahedron_backward(
    grad: Tensor, z: Tensor, w: Tensor, tau: Tensor, order: Tensor, w_order: Tensor, start: Tensor,
    regularization: str, want_w: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`permutahedron.permutahedron_backward`, in Triton."""
    file = _of_projection(z, w, regularization).replace("long_", "")  # which have the same gradient
    given = grad, z, w, tau, order, w_order, start, regularization, want_w
    found: tuple[Tensor, Tensor, Tensor] = kernels(file).permutahedron_backward(*given)
    return found


def _of_projection(z: Tensor, w: Tensor, regularization: str) -> str:
    n = z.shape[-1]
    if torch.float64 in (z.dtype, w.dtype) or z.numel() == 0:
        return "projection"
    short = kernels("short_projection")
    if n <= (short.LONGEST if regularization == "l2" else short.LONGEST_POWERS):
        return "short_projection"
    if regularization == "l2" and not kernels("projection").splits(z.numel() // n, n):
        return "long_projection"
    return "projection"
