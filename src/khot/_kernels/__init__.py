"""The registered operators and the kernels under them.

`torch.ops.khot.*` is what every caller calls; a faster kernel is registered under the same name for its
device (:mod:`khot._kernels.cpu`, :mod:`khot._kernels.gpu`), and the reference serves all others.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor

from khot._core.precision import wide_dtype
from khot._kernels import cpu, gpu
from khot._kernels.reference import draws, fixed_point, philox, poisson_binomial, selection, transport
from khot._kernels.reference import laplace as scans
from khot._kernels.reference import soft_count as counting
from khot._kernels.reference import soft_topk as reference

__all__ = ["active"]

_OPERATORS: dict[str, tuple[str, Callable[..., object]]] = {
    "soft_topk": (
        "(Tensor x, Tensor k, Tensor tau, str cdf, float shape, str output) -> (Tensor, Tensor, Tensor)",
        reference.soft_topk,
    ),
    "soft_topk_backward": (
        "(Tensor grad, Tensor grad_lo, Tensor x, Tensor hi, Tensor lo, Tensor tau, str cdf, float shape, "
        "str output, Tensor? y=None) -> (Tensor, Tensor, Tensor)",
        reference.soft_topk_backward,
    ),
    "topk_mask": ("(Tensor x, Tensor k) -> Tensor", selection.topk_mask),
    "soft_topk_magnitude": (
        "(Tensor s, Tensor k, Tensor tau, float p) -> (Tensor, Tensor, Tensor)",
        selection.soft_topk_magnitude,
    ),
    "soft_topk_magnitude_backward": (
        "(Tensor grad, Tensor grad_lo, Tensor s, Tensor y, Tensor k, Tensor hi, Tensor lo, Tensor tau, "
        "float p) -> (Tensor, Tensor)",
        selection.soft_topk_magnitude_backward,
    ),
    "soft_count": (
        "(Tensor x, Tensor at, Tensor tau, str cdf, float shape, bool centred) -> Tensor",
        counting.soft_count,
    ),
    "soft_count_backward": (
        "(Tensor grad, Tensor x, Tensor at, Tensor tau, str cdf, float shape, bool centred) "
        "-> (Tensor, Tensor, Tensor)",
        counting.soft_count_backward,
    ),
    "decay_scan": ("(Tensor w, Tensor g, bool reverse) -> Tensor", scans.decay_scan),
    "laplace_rank": ("(Tensor x, Tensor tau) -> (Tensor, Tensor)", scans.laplace_rank),
    "laplace_rank_backward": (
        "(Tensor grad, Tensor x, Tensor order, Tensor tau) -> (Tensor, Tensor)",
        scans.laplace_rank_backward,
    ),
    "laplace_sort": ("(Tensor x, Tensor tau, bool descending) -> (Tensor, Tensor)", scans.laplace_sort),
    "laplace_sort_backward": (
        "(Tensor grad, Tensor x, Tensor order, Tensor tau, bool descending, bool want_tau) "
        "-> (Tensor, Tensor)",
        scans.laplace_sort_backward,
    ),
    "laplace_thresholds": (
        "(Tensor x, Tensor levels, Tensor tau) -> (Tensor, Tensor, Tensor, Tensor)",
        scans.laplace_thresholds,
    ),
    "laplace_thresholds_backward": (
        "(Tensor grad, Tensor x, Tensor order, Tensor hi, Tensor lo, Tensor place, Tensor tau) "
        "-> (Tensor, Tensor, Tensor)",
        scans.laplace_thresholds_backward,
    ),
    "sorted_soft_topk": (
        "(Tensor x, SymInt k, Tensor epsilon) -> (Tensor, Tensor, Tensor, Tensor)",
        transport.sorted_soft_topk,
    ),
    "uniform": ("(Tensor seed, SymInt rows, SymInt n, SymInt offset) -> Tensor", philox.uniform_kernel),
    "order_sample": ("(Tensor theta, Tensor k, Tensor seed) -> Tensor", draws.order_sample),
    "tournament": ("(Tensor probs, Tensor seed) -> Tensor", draws.tournament),
    "characteristic": ("(Tensor z) -> (Tensor, Tensor, Tensor)", poisson_binomial.characteristic_kernel),
    "inclusion": ("(Tensor z, Tensor k) -> (Tensor, Tensor, Tensor)", poisson_binomial.inclusion_kernel),
    "covariance": ("(Tensor z, Tensor k, Tensor u) -> Tensor", poisson_binomial.covariance_kernel),
    "calibrate": ("(Tensor goal, Tensor k) -> (Tensor, Tensor)", fixed_point.calibrate_kernel),
}
for _name, (_schema, _kernel) in _OPERATORS.items():
    torch.library.define(f"khot::{_name}", _schema)
    torch.library.impl(f"khot::{_name}", "CompositeExplicitAutograd")(_kernel)


@torch.library.register_fake("khot::soft_topk")
def _(
    x: Tensor, k: Tensor, tau: Tensor, cdf: str, shape: float, output: str
) -> tuple[Tensor, Tensor, Tensor]:
    batch = x.shape[:-1]
    out = x.new_empty((*batch, 0) if output == "threshold" else x.shape)
    hi = x.new_empty(batch, dtype=wide_dtype(x.device))
    return out, hi, torch.empty_like(hi)


@torch.library.register_fake("khot::soft_topk_backward")
def _(
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
    return x.new_empty(x.shape), hi.new_empty(hi.shape), hi.new_empty(hi.shape)


@torch.library.register_fake("khot::topk_mask")
def _(x: Tensor, k: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("khot::soft_topk_magnitude")
def _(s: Tensor, k: Tensor, tau: Tensor, p: float) -> tuple[Tensor, Tensor, Tensor]:
    hi = s.new_empty(s.shape[:-1], dtype=wide_dtype(s.device))
    return s.new_empty(s.shape), hi, torch.empty_like(hi)


@torch.library.register_fake("khot::soft_topk_magnitude_backward")
def _(
    grad: Tensor,
    grad_lo: Tensor,
    s: Tensor,
    y: Tensor,
    k: Tensor,
    hi: Tensor,
    lo: Tensor,
    tau: Tensor,
    p: float,
) -> tuple[Tensor, Tensor]:
    return s.new_empty(s.shape), hi.new_empty(hi.shape)


@torch.library.register_fake("khot::soft_count")
def _(x: Tensor, at: Tensor, tau: Tensor, cdf: str, shape: float, centred: bool) -> Tensor:
    return x.new_empty(at.shape, dtype=wide_dtype(x.device))


@torch.library.register_fake("khot::soft_count_backward")
def _(
    grad: Tensor, x: Tensor, at: Tensor, tau: Tensor, cdf: str, shape: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), at.new_empty(at.shape), x.new_empty(x.shape[:-1], dtype=wide_dtype(x.device))


@torch.library.register_fake("khot::decay_scan")
def _(w: Tensor, g: Tensor, reverse: bool) -> Tensor:
    return w.new_empty(torch.broadcast_shapes(w.shape, g.shape))


@torch.library.register_fake("khot::laplace_rank")
def _(x: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.int32)


@torch.library.register_fake("khot::laplace_rank_backward")
def _(grad: Tensor, x: Tensor, order: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=wide_dtype(x.device))


@torch.library.register_fake("khot::laplace_sort")
def _(x: Tensor, tau: Tensor, descending: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.int32)


@torch.library.register_fake("khot::laplace_sort_backward")
def _(
    grad: Tensor, x: Tensor, order: Tensor, tau: Tensor, descending: bool, want_tau: bool
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=wide_dtype(x.device))


@torch.library.register_fake("khot::laplace_thresholds")
def _(x: Tensor, levels: Tensor, tau: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hi = levels.new_empty((*x.shape[:-1], levels.shape[-1]))
    order, place = x.new_empty(x.shape, dtype=torch.int32), hi.new_empty(hi.shape, dtype=torch.int32)
    return hi, torch.empty_like(hi), order, place


@torch.library.register_fake("khot::laplace_thresholds_backward")
def _(
    grad: Tensor, x: Tensor, order: Tensor, hi: Tensor, lo: Tensor, place: Tensor, tau: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), hi.new_empty(hi.shape), hi.new_empty(hi.shape[:-1])


@torch.library.register_fake("khot::sorted_soft_topk")
def _(x: Tensor, k: int, epsilon: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *batch, n = x.shape
    hi = x.new_empty(*batch, k, dtype=wide_dtype(x.device))
    return x.new_empty(*batch, k, n), torch.empty_like(hi, dtype=torch.int64), hi, torch.empty_like(hi)


@torch.library.register_fake("khot::uniform")
def _(seed: Tensor, rows: int, n: int, offset: int) -> Tensor:
    return seed.new_empty((rows, n), dtype=torch.float64)


@torch.library.register_fake("khot::order_sample")
def _(theta: Tensor, k: Tensor, seed: Tensor) -> Tensor:
    return theta.new_empty(theta.shape, dtype=torch.bool)


@torch.library.register_fake("khot::tournament")
def _(probs: Tensor, seed: Tensor) -> Tensor:
    return probs.new_empty(probs.shape, dtype=torch.bool)


@torch.library.register_fake("khot::characteristic")
def _(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    phi = z.new_empty((*z.shape[:-1], poisson_binomial.FREQUENCIES))
    return z.new_empty(z.shape[:-1]), phi, torch.empty_like(phi)


@torch.library.register_fake("khot::inclusion")
def _(z: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return z.new_empty(z.shape[:-1]), z.new_empty(z.shape), z.new_empty(z.shape)


@torch.library.register_fake("khot::covariance")
def _(z: Tensor, k: Tensor, u: Tensor) -> Tensor:
    return z.new_empty(z.shape)


@torch.library.register_fake("khot::calibrate")
def _(goal: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return goal.new_empty(goal.shape), goal.new_empty(goal.shape[:-1])


_CPU = cpu.load()
_INTERPRETED = os.environ.get("KHOT_KERNELS") == "triton"
gpu.register("CUDA")
if _INTERPRETED:
    gpu.register("CPU")


def active() -> dict[str, str]:
    """Which kernels serve each kind of device, in the words of ``khot info``."""
    return {
        "cpu": f"compiled ({_CPU})" if _CPU else "triton, interpreted" if _INTERPRETED else "reference",
        "gpu": ("triton" if gpu.available() else "reference") if torch.cuda.is_available() else "none",
    }
