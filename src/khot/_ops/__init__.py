"""The registered operators. Each has a file with its schema, kernel, shapes, and rule (vjp and jvp)."""

from khot import _kernels
from khot._ops import (
    assign_pass,
    budget_mask,
    decay_scan,
    draws,
    fenchel_young,
    laplace_count,
    laplace_rank,
    laplace_sort,
    laplace_thresholds,
    magnitude,
    order_statistics,
    permutahedron,
    poisson_binomial,
    selectable,
    shared,
    soft_assign,
    soft_budget,
    soft_count,
    soft_topk,
    sorted_soft_topk,
    topk_mask,
    uniform,
)

__all__ = [
    "assign_pass",
    "budget_mask",
    "decay_scan",
    "draws",
    "fenchel_young",
    "laplace_count",
    "laplace_rank",
    "laplace_sort",
    "laplace_thresholds",
    "magnitude",
    "order_statistics",
    "permutahedron",
    "poisson_binomial",
    "selectable",
    "shared",
    "soft_assign",
    "soft_budget",
    "soft_count",
    "soft_topk",
    "sorted_soft_topk",
    "topk_mask",
    "uniform",
]

_kernels.register()  # now that the operators are defined
