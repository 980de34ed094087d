"""The registered operators. Each has a file with its schema, kernel, shapes, and rule (vjp and jvp)."""

from khot import _kernels
from khot._ops import (
    assign_pass,
    budget_mask,
    decay_scan,
    draws,
    fenchel_young,
    laplace,
    magnitude,
    order_statistics,
    permutahedron,
    permutation_shares,
    poisson_binomial,
    product,
    selectable,
    shared,
    soft_assign,
    soft_budget,
    soft_count,
    soft_topk,
    solve,
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
    "laplace",
    "magnitude",
    "order_statistics",
    "permutahedron",
    "permutation_shares",
    "poisson_binomial",
    "product",
    "selectable",
    "shared",
    "soft_assign",
    "soft_budget",
    "soft_count",
    "soft_topk",
    "solve",
    "sorted_soft_topk",
    "topk_mask",
    "uniform",
]

_kernels.register()  # now that the operators are defined
