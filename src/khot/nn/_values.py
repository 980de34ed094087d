"""The numbers k and tau of a layer: fixed, computed by a module, or learned."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from khot._core import arguments
from khot._core.arguments import Scalar
from khot._core.precision import widen

__all__ = ["Positive", "Value", "current", "describe", "positive", "available"]

Value = float | nn.Module  # a module is called without arguments and returns the current number


def positive(value: Value, name: str) -> Value:
    """The value, checked if it is a number."""
    if not isinstance(value, nn.Module):
        arguments.per_row(value, name, torch.empty(1), low=0, low_open=True)
    return value


class Positive(nn.Module):
    """A learned number > 0, log(1 + e^raw): a step multiplies a small number, and adds to a large one."""

    init: float
    raw: nn.Parameter

    def __init__(
        self, init: Value, name: str, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        super().__init__()
        if isinstance(init, nn.Module):
            raise TypeError(f"{name} must be a number if it is learned, but got {type(init).__name__}")
        self.init = float(init)
        self.raw = nn.Parameter(torch.empty((), device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.raw.fill_(self.init + math.log(-math.expm1(-self.init)))

    def forward(self) -> Tensor:
        return F.softplus(self.raw)

    def extra_repr(self) -> str:
        return f"init={self.init}"


def current(value: Value) -> Scalar:
    """The number itself, or the one that the module returns now."""
    return value() if isinstance(value, nn.Module) else value


def describe(**values: object) -> str:
    """``name=value`` of all values but modules, which a repr shows as children of the layer."""
    return ", ".join(f"{name}={v!r}" for name, v in values.items() if not isinstance(v, nn.Module))


def available(k: Scalar, x: Tensor) -> Tensor:
    """k for each row, at most the number of entries that may be selected (> −inf) along the last dim."""
    return widen((x != -math.inf).sum(-1)).clamp(max=k)
