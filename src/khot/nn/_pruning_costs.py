"""What the entries of pruned parameters cost."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from khot._core import arguments
from khot._core.precision import wide_dtype

__all__ = ["checked_costs", "cost_row", "shown", "summed", "total"]


def checked_costs(cost: Any, members: list[tuple[nn.Module, str]]) -> list[float | Tensor]:
    """The costs of the entries of each member: numbers, and tensors that broadcast to it."""
    if isinstance(cost, (str, Tensor)) or not isinstance(cost, Sequence):
        raise TypeError(f"cost must be a list of numbers and tensors, but got {type(cost).__name__}")
    if len(cost) != len(members):
        raise ValueError(f"cost must have one entry per parameter, {len(members)}, but got {len(cost)}")
    found: list[float | Tensor] = []
    for each, (module, name) in zip(cost, members, strict=True):
        if isinstance(each, Tensor):
            arguments.check_real(each, "cost")
            shape = module.get_parameter(name).shape
            try:
                each.expand(shape)
            except RuntimeError:
                raise ValueError(
                    f"cost must broadcast to {name!r} of shape {tuple(shape)}, but got {tuple(each.shape)}"
                ) from None
            each = each.detach().clone()  # a later change by the caller is not meant
            bad = ~((each >= 0) & (each < math.inf))
            if arguments.readable(each) and bool(bad.any()):
                raise ValueError(f"cost must be finite and >= 0, but got {each[bad][0].item()}")
        else:
            arguments.check_number(each, "cost", low=0, high=sys.float_info.max)
        found.append(each)
    return found


def summed(cost: list[float | Tensor], places: list[int]) -> list[float | Tensor]:
    """The cost of each tensor: of tied weights that of all their uses."""
    return [sum(c for c, at in zip(cost, places, strict=True) if at == i) for i in range(max(places) + 1)]


def shown(cost: list[float | Tensor]) -> tuple[float | str, ...]:
    """The costs in a few words, for the repr."""
    return tuple(f"tensor {tuple(c.shape)}" if isinstance(c, Tensor) else c for c in cost)


def total(cost: list[float | Tensor], sizes: list[int]) -> float:
    """The cost of all entries."""
    parts = (
        each.double().mean().item() * size if isinstance(each, Tensor) else each * size
        for each, size in zip(cost, sizes, strict=True)
    )
    return float(sum(parts))


def cost_row(cost: list[float | Tensor], tensors: list[Tensor]) -> Tensor:
    """The cost of every entry, in one row."""
    parts = []
    for each, x in zip(cost, tensors, strict=True):
        if isinstance(each, Tensor):
            parts.append(each.to(x.device, wide_dtype(x.device)).expand(x.shape).flatten())
        else:
            parts.append(torch.full((x.numel(),), each, dtype=wide_dtype(x.device), device=x.device))
    return torch.cat(parts)
