"""The registered operators and the kernels under them.

`torch.ops.khot.*` is what every caller calls; a faster kernel is registered under the same name for its
device (:mod:`khot.kernels.cpu`, :mod:`khot.kernels.gpu`), and the reference serves all others.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from khot.kernels import cpu, gpu, reference, selection

__all__ = ["active"]

_OPERATORS: dict[str, tuple[str, Callable[..., object]]] = {
    "soft_topk": (
        "(Tensor x, Tensor k, Tensor tau, str cdf, float shape, str output) -> (Tensor, Tensor, Tensor)",
        reference.soft_topk,
    ),
    "soft_topk_backward": (
        "(Tensor grad, Tensor grad_lo, Tensor x, Tensor hi, Tensor lo, Tensor tau, str cdf, float shape, "
        "str output) -> (Tensor, Tensor, Tensor)",
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
    hi = x.new_empty(batch, dtype=torch.float64)
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
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), hi.new_empty(hi.shape), hi.new_empty(hi.shape)


@torch.library.register_fake("khot::topk_mask")
def _(x: Tensor, k: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("khot::soft_topk_magnitude")
def _(s: Tensor, k: Tensor, tau: Tensor, p: float) -> tuple[Tensor, Tensor, Tensor]:
    hi = s.new_empty(s.shape[:-1], dtype=torch.float64)
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


_CPU = cpu.load()
gpu.register()


def active() -> dict[str, str]:
    """Which kernels serve each kind of device, in the words of ``khot info``."""
    return {
        "cpu": f"compiled ({_CPU})" if _CPU else "reference",
        "gpu": ("triton" if gpu.available() else "reference") if torch.cuda.is_available() else "none",
    }
