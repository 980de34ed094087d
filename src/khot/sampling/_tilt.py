"""The logits of a conditional Poisson design as users pass them, checked and tilted."""

from __future__ import annotations

from torch import Tensor

from khot._core import arguments
from khot._core.arguments import Scalar
from khot._ops.tilting import Tilted, tilt_rows
from khot.sampling._axes import to_last

__all__ = ["check_design", "tilt"]


def tilt(logits: Tensor, k: Scalar, dim: int, name: str = "logits") -> Tilted:
    """The trials for logits with the units along dim < 0, and integers k that broadcast with the batch."""
    return tilt_rows(*check_design(logits, k, dim, name))


def check_design(logits: Tensor, k: Scalar, dim: int, name: str = "logits") -> tuple[Tensor, Tensor]:
    """θ with the units along the last dim, and k in its batch shape, both in float64."""
    arguments.check_input(logits, name)
    if not logits.dim():
        raise ValueError(
            f"{name} must have at least one dim, along which the units lie, but got a 0-dim tensor"
        )
    arguments.check_dim(logits, dim)
    theta = to_last(logits, dim).double()
    k = arguments.per_row(k, "k", theta, low=0, high=float(theta.shape[-1]), integer=True).double()
    return theta, k.expand(theta.shape[:-1])
