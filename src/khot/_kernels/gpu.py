"""The GPU kernels (`triton/`): registered for CUDA and ROCm, and imported at the first call.

If Triton is not installed, or is older than 3.5, the reference kernels are used. With
``KHOT_KERNELS=triton`` and ``TRITON_INTERPRET=1`` they accept CPU tensors too, so that all tests of the
operators can run on them without a GPU.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from khot._core.dispatch import OPERATORS

__all__ = ["KERNELS", "available", "load", "register"]

#: The operators that have a kernel in Triton, by the file of `triton/` that decides which kernels they take.
FILES = {
    "ways": (
        "soft_topk",
        "soft_topk_backward",
        "soft_budget",
        "soft_budget_backward",
        "fenchel_young",
        "fenchel_young_backward",
        "laplace_centred_rank",
        "laplace_count",
        "laplace_count_backward",
        "laplace_thresholds",
        "laplace_thresholds_backward",
        "permutahedron",
        "permutahedron_backward",
    ),
    "magnitude": ("soft_topk_magnitude", "soft_topk_magnitude_backward"),
    "largest": ("topk",),
    "mask": ("topk_mask",),
    "places": ("order_statistics", "order_statistics_backward"),
    "interpolation": ("interpolate", "interpolate_backward"),
    "between": ("quantiles", "quantiles_backward"),
    "selectable": ("selectable",),
    "draws": ("uniform", "order_sample", "pareto_sample"),
    "conditional_poisson": ("conditional_poisson_sample",),
    "designs": ("tournament", "pivotal_sample", "systematic_sample"),
    "assign": ("soft_assign",),
    "assign_backward": ("soft_assign_backward",),
    "greedy": ("budget_mask",),
    "counts": ("soft_count", "soft_count_backward"),
    "permutation": ("soft_permutation", "soft_permutation_backward"),
    "scans": ("decay_scan",),
    "transport": ("sorted_soft_topk",),
    "transport_backward": ("sorted_soft_topk_backward",),
    "ranking_losses": (
        "ndcg_loss",
        "ndcg_loss_backward",
        "centred_places",
        "correlation_loss",
        "correlation_loss_backward",
        "counted_mean",
    ),
    "count_distances": ("count_distances",),
    "ragged": ("packed_soft_topk", "packed_soft_topk_backward"),
}
KERNELS = {name: file for file, names in FILES.items() for name in names}


def available() -> bool:
    """Whether there is a Triton that has what the kernels use: 3.5, which torch 2.9 came with, or newer."""
    return importlib.util.find_spec("triton") is not None and hasattr(
        importlib.import_module("triton"), "constexpr_function"
    )


def register(device: str) -> None:
    for name in KERNELS:
        kernel = _late(name, device.lower())
        torch.library.impl(f"khot::{name}", device)(kernel)
        if name in OPERATORS:
            OPERATORS[name].serve(device.lower(), kernel)


def _late(name: str, device: str) -> Callable[..., Any]:
    operator = OPERATORS.get(name)  # None if there is no reference kernel: who calls it asks for `available`

    def kernel(*args: Any) -> Any:
        found = load(name) if operator is None or available() else operator.kernel
        if operator is not None:
            operator.serve(device, found)  # which later calls find without this one
        return found(*args)

    return kernel


def load(name: str) -> Callable[..., Any]:
    """The operator in Triton."""
    for asked in ("around", "plans"):  # which plain calls of it ask for
        importlib.import_module(f"khot._kernels.triton.{asked}")
    file = importlib.import_module(f"khot._kernels.triton.{KERNELS[name]}")
    found: Callable[..., Any] = getattr(file, name)
    return found
