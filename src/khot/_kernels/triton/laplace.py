"""Which kernels take Laplace's counts, thresholds, ranks and sorts: the one place that decides it.

- Ranks and sorts of short rows in float32 and narrower: `ranks` and `sorts`, in one launch each way. Long
  rows, unless these are few: the same, once they are sorted, but for a sort's gradient in τ.
- Everything else: the reference's torch operations with the scan in Triton, and between them `scans` for
  ranks forward; in float64, of which each step is a launch. None of them waits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from khot._kernels.reference import laplace as reference
from khot._kernels.triton import ranks, scans, sorts


def laplace_count(
    x: Tensor, levels: Tensor | None, tau: Tensor, descending: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """`laplace.laplace_count`, in Triton."""
    if levels is not None:
        return reference.laplace_count(x, levels, tau, scan=scans.decay_scan)
    rank, order = (ranks if ranks.serves(x, True) else scans).laplace_rank(x, tau, descending)
    return rank, order, order.new_empty((*x.shape[:-1], 0))


def laplace_centred_rank(x: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
    """`laplace.laplace_centred_rank`, in Triton."""
    if ranks.serves(x, True):
        return ranks.laplace_rank(x, tau, centred=True)
    return reference.laplace_centred_rank(x, tau, laplace_count)


def laplace_count_backward(
    grad: Tensor, x: Tensor, order: Tensor, levels: Tensor | None, place: Tensor, tau: Tensor, want_tau: bool,
    descending: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`laplace.laplace_count_backward`, in Triton."""
    if levels is not None or not ranks.serves(x, True):
        return reference.laplace_count_backward(
            grad, x, order, levels, place, tau, want_tau, descending, scan=scans.decay_scan
        )
    dx, dtau = ranks.laplace_rank_backward(grad, x, order, tau, want_tau, descending)
    return dx, dtau.new_empty((*dtau.shape, 0)), dtau


def laplace_thresholds(
    x: Tensor, levels: Tensor | None, tau: Tensor, descending: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`laplace.laplace_thresholds`, in Triton."""
    if levels is not None or not ranks.serves(x, True):
        return reference.laplace_thresholds(x, levels, tau, descending, scan=scans.decay_scan)
    t, order, place = sorts.laplace_sort(x, tau, descending)
    return t.new_empty((*x.shape[:-1], 0), dtype=torch.float64), t, order, place


def laplace_thresholds_backward(
    grad: Tensor, x: Tensor, order: Tensor, levels: Tensor | None, place: Tensor, tau: Tensor, want_tau: bool,
    descending: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`laplace.laplace_thresholds_backward`, in Triton."""
    if levels is not None or not ranks.serves(x, not want_tau):
        return reference.laplace_thresholds_backward(
            grad, x, order, levels, place, tau, want_tau, descending, scan=scans.decay_scan
        )
    dx, dtau = sorts.laplace_sort_backward(grad, x, order, place, tau, want_tau, descending)
    return dx, dtau.new_empty((*dtau.shape, 0)), dtau
