"""The numbers k and tau of a layer: fixed, computed by a module, or learned."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn import functional as F

from khot._core import arguments, eager
from khot._core.arguments import Scalar
from khot._core.precision import widen
from khot._core.torch_internals import is_transformed
from khot._ops.selectable import selectable

__all__ = ["SEVERAL", "Positive", "Value", "available", "current", "describe", "number", "positive"]

# After so many passes in train mode a layer was not just tried out: it was trained.
SEVERAL = 10

Value = float | nn.Module  # a module is called without arguments and returns the current number


def positive(value: Value, name: str) -> Value:
    """The value, checked to be > 0 if it is a number."""
    return number(value, name, low=0, low_open=True)


def number(value: Value, name: str, *, low: float, high: float = math.inf, low_open: bool = False) -> Value:
    """The value, checked if it is a number."""
    if isinstance(value, Tensor) and value.dim() > 0:
        raise ValueError(
            f"{name} must be one number, or a module that returns one, but got shape {tuple(value.shape)}; "
            "functions such as khot.soft_topk take one for each row"
        )
    if not isinstance(value, nn.Module):
        arguments.per_row(value, name, torch.empty(1), low=low, high=high, low_open=low_open)
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
        # one element and not 0-dim, because FSDP2 can only share out tensors that have a dim
        self.raw = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.raw.fill_(self.init + math.log(-math.expm1(-self.init)))

    def forward(self) -> Tensor:
        return F.softplus(self.raw).squeeze(0)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        raw = state_dict.get(prefix + "raw")
        if isinstance(raw, Tensor) and not raw.dim():  # saved up to khot 0.1, where it was 0-dim
            state_dict[prefix + "raw"] = raw.reshape(1)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f"init={self.init}"


def current(value: Value) -> Scalar:
    """The number itself, or the one that the module returns now."""
    return value() if isinstance(value, nn.Module) else value


def describe(**values: object) -> str:
    """``name=value`` of all values but modules, which a repr shows as children of the layer."""
    return ", ".join(f"{name}={v!r}" for name, v in values.items() if not isinstance(v, nn.Module))


def available(k: Scalar, x: Tensor) -> Scalar:
    """k for each row, at most the number of entries that may be selected (> −inf) along the last dim.

    A number stays one where all entries may be selected: the operators take a number as it is.
    """
    number = not isinstance(k, Tensor) and k <= x.shape[-1]
    if number and not is_dynamo_compiling() and eager.launching:
        counts = eager.selectable(x, -1, float(k))
        if counts is not None:
            return counts
    if number and x.numel() and arguments.readable(x) and x.detach().amin().item() > -math.inf:
        return k  # not so with a NaN
    if number and selectable.is_served(x) and not torch.compiler.is_compiling() and not is_transformed(x):
        return selectable(x.detach(), float(k))
    return widen((x != -math.inf).sum(-1)).clamp(max=k)
