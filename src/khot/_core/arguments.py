"""Checks of the users' arguments, and the one layout that the kernels know: rows along the last dim.

Wrong values raise ValueError, wrong types and dtypes TypeError, and wrong dims IndexError. Python numbers are
checked here. The values of tensors are only read where this does not wait for a device. Elsewhere the
kernel marks a row that it cannot solve with NaN; on the CPU and in eager mode, :func:`explain_nan` then says
what was wrong.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from khot._core import precision
from khot._core.torch_internals import is_transformed

__all__ = [
    "Scalar",
    "check_dim",
    "check_input",
    "check_number",
    "check_values",
    "explain_nan",
    "mask_rows",
    "per_row",
    "readable",
    "rows",
    "unrows",
]

Scalar = float | Tensor  # a number, or a tensor with one entry per row
# The largest τ for rows whose differences overflow: for smaller ones, they are infinite in τ, too.
STEEPEST = 1e290


def check_input(input: Any, name: str = "input") -> None:
    if not isinstance(input, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, but got {type(input).__name__}")
    if not input.is_floating_point():
        raise TypeError(f"{name} must have a floating-point dtype, but got {input.dtype}")


def check_dim(input: Tensor, dim: Any) -> int:
    """dim, counted from the front. A 0-dim input counts as a row of one entry, as for torch.softmax."""
    if isinstance(dim, bool) or not isinstance(dim, (int, numbers.Integral)):
        raise TypeError(f"dim must be an int, but got {type(dim).__name__}")
    index, ndim = int(dim), max(input.dim(), 1)
    if not -ndim <= index < ndim:
        raise IndexError(f"dim must be in [{-ndim}, {ndim - 1}], but got {index}")
    return index % ndim


def rows(
    input: Tensor, dim: int, mask: Tensor | None = None, largest: bool = True, fill: float = -math.inf
) -> Tensor:
    """The scores with dim last, negated unless ``largest``, and ``fill`` where the mask is False."""
    check_input(input)
    dim = check_dim(input, dim)
    x = input
    if dim != input.dim() - 1:
        x = input.movedim(dim, -1) if input.dim() else input.reshape(1)
    if not largest:
        x = -x
    if mask is not None:
        x = torch.where(mask_rows(mask, input, dim), x, fill)
    return x


def unrows(y: Tensor, input: Tensor, dim: int) -> Tensor:
    """The inverse of the move in :func:`rows`, for a result of the input's shape."""
    if dim in (-1, input.dim() - 1) and input.dim():
        return y
    return y.movedim(-1, dim) if input.dim() else y.reshape(())


def mask_rows(mask: Any, input: Tensor, dim: int) -> Tensor:
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask must be a torch.Tensor, but got {type(mask).__name__}")
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must have dtype torch.bool, but got {mask.dtype}")
    if not _broadcasts(mask.shape, input.shape):
        raise ValueError(
            f"mask must broadcast to the input's shape {tuple(input.shape)}, but got {tuple(mask.shape)}"
        )
    if input.dim() == 0:
        return mask.reshape(1)
    return mask.expand(input.shape).movedim(dim, -1)


def _broadcasts(shape: torch.Size, target: torch.Size) -> bool:
    if len(shape) > len(target):
        return False
    return all(s in (1, t) for s, t in zip(reversed(shape), reversed(target), strict=False))


def per_row(
    value: Any,
    name: str,
    x: Tensor,
    *,
    low: float,
    high: float = math.inf,
    low_open: bool = False,
    integer: bool = False,
    by_value: bool = False,
) -> Tensor:
    """A number or a tensor as a floating-point tensor on x's device that broadcasts with x's batch shape.

    A number must lie in [low, high]; with ``low_open`` it must be finite and greater than low. With
    ``by_value`` a number stays on the CPU if the kernels for x's device accept it there, because a launch to
    fill a tensor of one element takes as long as the kernel for a short row.
    """
    if isinstance(value, Tensor):
        if value.dtype == torch.bool or value.is_complex():
            raise TypeError(f"{name} must be a real number or tensor, but got dtype {value.dtype}")
        if not _broadcasts(value.shape, x.shape[:-1]):
            raise ValueError(
                f"{name} must broadcast with the batch shape {tuple(x.shape[:-1])} (the input's shape "
                f"without dim), but got {tuple(value.shape)}"
            )
        if value.device != x.device and value.dim():
            raise ValueError(f"{name} must be on the input's device {x.device}, but got {value.device}")
        value = precision.on(x.device, value)
        return check_values(value, name, low=low, high=high, low_open=low_open, integer=integer)
    if isinstance(value, bool) or not isinstance(
        value, (int, float, torch.SymInt, torch.SymFloat, numbers.Real)
    ):
        raise TypeError(f"{name} must be a real number or tensor, but got {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    inside_number = low < number < math.inf if low_open else low <= number <= high
    if not inside_number or (integer and number != math.floor(number)):
        raise ValueError(f"{name} must {_domain(low, high, low_open, integer)}, but got {value}")
    device = x.device
    by_value = by_value and device.type == "cuda" and not torch.compiler.is_compiling()
    where = torch.device("cpu") if by_value else device
    return torch.full((), number, dtype=precision.wide_dtype(device), device=where)


def check_values(
    value: Tensor,
    name: str,
    *,
    low: float,
    high: float = math.inf,
    low_open: bool = False,
    integer: bool = False,
) -> Tensor:
    """The tensor in a floating-point dtype. Its values are checked if :func:`readable`."""
    if not value.is_floating_point():
        value = precision.widen(value)
    if readable(value):
        inside = (value > low) & (value < math.inf) if low_open else (value >= low) & (value <= high)
        inside = inside & (value == torch.floor(value)) if integer else inside
        if not bool(inside.all()):
            bad = value.detach()[~inside][0].item()
            raise ValueError(f"{name} must {_domain(low, high, low_open, integer)}, but got {bad}")
    return value


def _domain(low: float, high: float, low_open: bool, integer: bool) -> str:
    if low_open:
        return f"be finite and > {low}"
    return f"be an integer in [{low}, {high}]" if integer else f"lie in [{low}, {high}]"


def readable(value: Tensor) -> bool:
    """Whether values can be read without waiting: on the CPU, and not under a transform or a trace."""
    return (
        value.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and type(value) in (Tensor, torch.nn.Parameter)
        and not is_transformed(value)
    )


def check_number(value: Any, name: str, *, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a real number, but got {type(value).__name__}")
    if not low <= value <= high:
        raise ValueError(f"{name} must lie in [{low}, {high}], but got {value}")


def explain_nan(
    result: Tensor,
    x: Tensor,
    k: Tensor,
    tau: Tensor | None = None,
    name: str = "k",
    integer: bool = False,
    count: Callable[[Tensor], Tensor] = lambda selectable: selectable,
) -> None:
    """Raise if a row of the result is NaN because of k or tau, and not because of its scores.

    This happens on the CPU only: elsewhere reading the values would wait for the device, and such rows stay
    NaN. ``count`` turns the number of selectable entries of a shard into the number for the row.
    """
    # one NaN makes the sum NaN, at half the cost of isnan().any()
    if not readable(result) or not math.isnan(result.sum().item()):
        return
    if tau is not None:
        check_values(tau, "tau", low=0, low_open=True)
    k, selectable = torch.broadcast_tensors(k, count((x != -math.inf).sum(-1)))
    bad = ~((k >= 0) & (k <= selectable))
    if bool(bad.any()):
        raise ValueError(
            f"{name} must lie in [0, number of entries that may be selected], but got "
            f"{k[bad][0].item()} for a row with {selectable[bad][0].item()}"
        )
    if integer:
        check_values(k, name, low=0, integer=True)
    if tau is not None and x.dtype == torch.float64 and x.shape[-1]:
        finite = x.detach().masked_fill(x.isinf(), 0)
        bad = (finite.amax(-1) - finite.amin(-1)).isinf() & (tau > STEEPEST)
        if bool(bad.any()):
            raise ValueError(
                f"tau must be at most {STEEPEST} for a row with differences of scores that overflow, but "
                f"got {tau.expand(bad.shape)[bad][0].item()}"
            )
