"""Triton kernels, for CUDA and ROCm: one read of the row, one write. `README.md` beside this file says how a
call becomes a launch, and which file has what."""

from khot._kernels.triton import around as around
from khot._kernels.triton.assign import soft_assign as soft_assign
from khot._kernels.triton.assign_backward import soft_assign_backward as soft_assign_backward
from khot._kernels.triton.between import quantiles as quantiles
from khot._kernels.triton.between import quantiles_backward as quantiles_backward
from khot._kernels.triton.budget import soft_budget as soft_budget
from khot._kernels.triton.budget import soft_budget_backward as soft_budget_backward
from khot._kernels.triton.conditional_poisson import (
    conditional_poisson_sample as conditional_poisson_sample,
)
from khot._kernels.triton.count_distances import count_distances as count_distances
from khot._kernels.triton.counts import soft_count as soft_count
from khot._kernels.triton.counts import soft_count_backward as soft_count_backward
from khot._kernels.triton.designs import pivotal_sample as pivotal_sample
from khot._kernels.triton.designs import systematic_sample as systematic_sample
from khot._kernels.triton.designs import tournament as tournament
from khot._kernels.triton.draws import order_sample as order_sample
from khot._kernels.triton.draws import pareto_sample as pareto_sample
from khot._kernels.triton.draws import uniform as uniform
from khot._kernels.triton.fenchel import fenchel_young as fenchel_young
from khot._kernels.triton.fenchel import fenchel_young_backward as fenchel_young_backward
from khot._kernels.triton.greedy import budget_mask as budget_mask
from khot._kernels.triton.interpolation import interpolate as interpolate
from khot._kernels.triton.interpolation import interpolate_backward as interpolate_backward
from khot._kernels.triton.laplace import laplace_centred_rank as laplace_centred_rank
from khot._kernels.triton.laplace import laplace_count as laplace_count
from khot._kernels.triton.laplace import laplace_count_backward as laplace_count_backward
from khot._kernels.triton.laplace import laplace_thresholds as laplace_thresholds
from khot._kernels.triton.laplace import laplace_thresholds_backward as laplace_thresholds_backward
from khot._kernels.triton.largest import topk as topk
from khot._kernels.triton.magnitude import soft_topk_magnitude as soft_topk_magnitude
from khot._kernels.triton.magnitude import soft_topk_magnitude_backward as soft_topk_magnitude_backward
from khot._kernels.triton.mask import topk_mask as topk_mask
from khot._kernels.triton.permutation import soft_permutation as soft_permutation
from khot._kernels.triton.permutation import soft_permutation_backward as soft_permutation_backward
from khot._kernels.triton.places import order_statistics as order_statistics
from khot._kernels.triton.places import order_statistics_backward as order_statistics_backward
from khot._kernels.triton.projection_ways import permutahedron as permutahedron
from khot._kernels.triton.projection_ways import permutahedron_backward as permutahedron_backward
from khot._kernels.triton.ranking_losses import centred_places as centred_places
from khot._kernels.triton.ranking_losses import correlation_loss as correlation_loss
from khot._kernels.triton.ranking_losses import correlation_loss_backward as correlation_loss_backward
from khot._kernels.triton.ranking_losses import counted_mean as counted_mean
from khot._kernels.triton.ranking_losses import ndcg_loss as ndcg_loss
from khot._kernels.triton.ranking_losses import ndcg_loss_backward as ndcg_loss_backward
from khot._kernels.triton.scans import decay_scan as decay_scan
from khot._kernels.triton.selectable import selectable as selectable
from khot._kernels.triton.transport import sorted_soft_topk as sorted_soft_topk
from khot._kernels.triton.transport_backward import (
    sorted_soft_topk_backward as sorted_soft_topk_backward,
)
from khot._kernels.triton.ways import soft_topk as soft_topk
from khot._kernels.triton.ways import soft_topk_backward as soft_topk_backward

__all__ = [
    "budget_mask",
    "centred_places",
    "conditional_poisson_sample",
    "correlation_loss",
    "correlation_loss_backward",
    "count_distances",
    "counted_mean",
    "decay_scan",
    "fenchel_young",
    "fenchel_young_backward",
    "interpolate",
    "interpolate_backward",
    "laplace_centred_rank",
    "laplace_count",
    "laplace_count_backward",
    "laplace_thresholds",
    "laplace_thresholds_backward",
    "ndcg_loss",
    "ndcg_loss_backward",
    "order_sample",
    "order_statistics",
    "order_statistics_backward",
    "pareto_sample",
    "permutahedron",
    "permutahedron_backward",
    "pivotal_sample",
    "quantiles",
    "quantiles_backward",
    "selectable",
    "soft_assign",
    "soft_assign_backward",
    "soft_budget",
    "soft_budget_backward",
    "soft_count",
    "soft_count_backward",
    "soft_permutation",
    "soft_permutation_backward",
    "soft_topk",
    "soft_topk_backward",
    "soft_topk_magnitude",
    "soft_topk_magnitude_backward",
    "sorted_soft_topk",
    "sorted_soft_topk_backward",
    "systematic_sample",
    "topk",
    "topk_mask",
    "tournament",
    "uniform",
]
