"""The GPU kernels (`triton/`): registered for CUDA and ROCm, and imported at the first call.

If Triton is not installed, or is older than 3.5, the reference kernels are used. With
``KHOT_KERNELS=triton`` and ``TRITON_INTERPRET=1`` they accept CPU tensors too, so that all tests of the
operators can run on them without a GPU.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from khot._core.dispatch import OPERATORS

__all__ = ["KERNELS", "available", "register"]

#: The operators that have a kernel in Triton.
KERNELS = (
    "soft_topk",
    "soft_topk_backward",
    "soft_topk_magnitude",
    "soft_topk_magnitude_backward",
    "topk",
    "topk_mask",
    "order_statistics",
    "order_statistics_backward",
    "interpolate",
    "interpolate_backward",
    "quantiles",
    "quantiles_backward",
    "selectable",
    "uniform",
    "order_sample",
    "pareto_sample",
    "conditional_poisson_sample",
    "tournament",
    "pivotal_sample",
    "systematic_sample",
    "soft_assign",
    "soft_assign_backward",
    "soft_budget",
    "soft_budget_backward",
    "budget_mask",
    "soft_count",
    "soft_count_backward",
    "soft_permutation",
    "soft_permutation_backward",
    "fenchel_young",
    "fenchel_young_backward",
    "decay_scan",
    "laplace_centred_rank",
    "laplace_count",
    "laplace_count_backward",
    "laplace_thresholds",
    "laplace_thresholds_backward",
    "sorted_soft_topk",
    "sorted_soft_topk_backward",
    "permutahedron",
    "permutahedron_backward",
    "ndcg_loss",
    "ndcg_loss_backward",
    "centred_places",
    "correlation_loss",
    "correlation_loss_backward",
    "counted_mean",
    "count_distances",
)


def available() -> bool:
    """Whether there is a Triton that has what the kernels use: 3.5, which torch 2.9 came with, or newer."""
    return importlib.util.find_spec("triton") is not None and hasattr(
        importlib.import_module("triton"), "constexpr_function"
    )


def register(device: str) -> None:
    for name in KERNELS:
        kernel = _late(name, device.lower())
        torch.library.impl(f"khot::{name}", device)(kernel)
        OPERATORS[name].serve(device.lower(), kernel)


def _late(name: str, device: str) -> Callable[..., Any]:
    def kernel(*args: Any) -> Any:
        found = _kernels()[name]
        OPERATORS[name].serve(device, found)  # which later calls find without this one
        return found(*args)

    return kernel


@functools.cache
def _kernels() -> dict[str, Callable[..., Any]]:
    if not available():
        return {name: OPERATORS[name].kernel for name in KERNELS}
    from khot._kernels import triton

    return {name: getattr(triton, name) for name in KERNELS}
