"""The reference kernel of what stands between two entries, and its derivatives."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from khot._core import arguments
from khot._core.precision import on, widen

__all__ = ["differences", "interpolate", "interpolate_backward"]


def interpolate(both: Tensor, weight: Tensor) -> Tensor:
    """lower + weight (upper − lower), computed from the nearer end, as numpy does, and rounded once.

    Strictly between a finite and an infinite entry it is the infinite one, and between −inf and inf NaN.

    Args:
        both: (*batch, 2m), the m upper entries first, then the m lower ones.
        weight: (*batch, m), or one number on any device.
    """
    above, below = widen(both.contiguous()).chunk(2, -1)
    weight = on(both.device, weight).contiguous()
    line = _line(below, above, weight)
    if arguments.readable(line) and math.isfinite(line.sum().item()):
        return line.to(both.dtype)
    infinite = below.isinf() | above.isinf()
    a, b = below.masked_fill(infinite, 0), above.masked_fill(infinite, 0)
    # the difference of two finite numbers may overflow
    line = torch.where((b - a).isinf(), (1 - weight) * a + weight * b, _line(a, b, weight))
    same = (below == above) | (weight == 0)
    ends = torch.where(same, below, below * (1 - weight) + above * weight)
    return torch.where(infinite, ends, line).to(both.dtype)


def _line(a: Tensor, b: Tensor, weight: Tensor) -> Tensor:
    rise = b - a
    return torch.where(weight < 0.5, a + rise * weight, b - rise * (1 - weight))


def interpolate_backward(both: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of both and of the weight. A result with an infinite end is a constant."""
    rise, infinite = differences(both.contiguous())
    weight = on(both.device, weight).contiguous()
    grad = widen(grad.contiguous()).masked_fill(infinite, 0)
    pulled = torch.cat((grad * weight, grad * (1 - weight)), -1).to(both.dtype)
    return pulled, grad * rise if weight.dim() else weight.new_empty(0)


def differences(both: Tensor) -> tuple[Tensor, Tensor]:
    """How far the upper entries are from the lower ones, and where one of the two is infinite."""
    above, below = widen(both).chunk(2, -1)
    infinite = (below.isinf() | above.isinf()).detach()
    return (above - below).masked_fill(infinite, 0), infinite
