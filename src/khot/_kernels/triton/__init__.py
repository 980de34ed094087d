"""Triton kernels, for CUDA and ROCm: one read of the row, one write.

A row of up to `RESIDENT` entries stays on chip: one program reads it, runs the whole solver on it and writes
y. Several short rows share a program. A longer row is split over programs: every pass is one launch, whose
programs first take the solver's step from the sums that the pass before left, all of them alike, and then
sum their own part. The number of launches is fixed and rows that are done skip theirs, so that nothing waits
for the device and a CUDA graph can hold it all.

The soft top-k of float32 and narrower scores has kernels of its own, in which per-row scalars are float32 as
well (`resident`, `resident_backward`): with the logistic CDF, and for rows that stay on chip with most others
(`resident.serves`). An evaluation takes a third of the instructions there, and
most rows need only one. For rows that do not converge, the float64 solver takes over in the same launch. A
long row streams past one program if there are many rows, or if the row is not too long.

Elsewhere the arithmetic on entries is in float32 for float32, bfloat16 and float16 scores, and in float64 for
sums and per-row scalars; float64 scores are float64 throughout. The method is the reference's
(`_kernels.reference.solver`), with a bisection in place of its histograms: passes over what lies on chip are
cheap.
"""

from khot._kernels.triton.backward import soft_topk_backward as soft_topk_backward
from khot._kernels.triton.forward import soft_topk as soft_topk
from khot._kernels.triton.magnitude import soft_topk_magnitude as soft_topk_magnitude
from khot._kernels.triton.magnitude import soft_topk_magnitude_backward as soft_topk_magnitude_backward
from khot._kernels.triton.places import order_statistics as order_statistics
from khot._kernels.triton.scans import decay_scan as decay_scan
from khot._kernels.triton.scans import laplace_rank as laplace_rank
from khot._kernels.triton.scans import laplace_rank_backward as laplace_rank_backward
from khot._kernels.triton.scans import laplace_sort as laplace_sort
from khot._kernels.triton.scans import laplace_sort_backward as laplace_sort_backward
from khot._kernels.triton.scans import laplace_thresholds as laplace_thresholds
from khot._kernels.triton.scans import laplace_thresholds_backward as laplace_thresholds_backward
from khot._kernels.triton.selection import topk_mask as topk_mask
from khot._kernels.triton.transport import sorted_soft_topk as sorted_soft_topk

__all__ = [
    "decay_scan",
    "laplace_rank",
    "laplace_rank_backward",
    "laplace_sort",
    "laplace_sort_backward",
    "laplace_thresholds",
    "laplace_thresholds_backward",
    "order_statistics",
    "soft_topk",
    "soft_topk_backward",
    "soft_topk_magnitude",
    "soft_topk_magnitude_backward",
    "sorted_soft_topk",
    "topk_mask",
]
