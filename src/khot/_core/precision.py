"""The dtype of per-row scalars: float64, or float32 on devices without float64."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Generator, Tensor

from khot._core.torch_internals import is_transformed

__all__ = [
    "at_least_single",
    "autocast_dtype",
    "WITHOUT_FLOAT64",
    "greatest",
    "in_dtype",
    "in_float64",
    "invertible",
    "large",
    "not_below_zero",
    "on",
    "on_cpu",
    "vector",
    "wide_dtype",
    "widen",
    "without_autocast",
]

WITHOUT_FLOAT64 = {"mps"}  # types of devices

_Function = TypeVar("_Function", bound=Callable[..., Tensor])


def wide_dtype(device: torch.device) -> torch.dtype:
    """The dtype of sums, thresholds, k and τ on a device."""
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def widen(x: Tensor) -> Tensor:
    """x in the dtype of :func:`wide_dtype`."""
    return x.to(wide_dtype(x.device))


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in this dtype. Where it has it, torch would take as long to say so as for an addition."""
    return x if x.dtype == dtype else x.to(dtype)


def at_least_single(x: Tensor) -> Tensor:
    """x in float32 where it is of half precision."""
    return in_dtype(x, torch.promote_types(x.dtype, torch.float32))


def on(device: torch.device, value: Tensor) -> Tensor:
    """A number or per-row scalars on the device, in a dtype that it has, without waiting for the device."""
    value = value.to(wide_dtype(device)) if value.dtype == torch.float64 else value
    if value.device == device:
        return value
    if value.dim() == 0 and not value.requires_grad and _plain_on_cpu(value):
        return torch.full((), value.item(), dtype=value.dtype, device=device)
    return value.to(device, non_blocking=True)


def vector(device: torch.device, numbers: Sequence[float]) -> Tensor:
    """A few numbers as a tensor on the device, filled there: a copy would wait for the device."""
    dtype = wide_dtype(device)
    if device.type == "cpu":
        return torch.tensor(numbers, dtype=dtype)
    return torch.stack([torch.full((), number, dtype=dtype, device=device) for number in numbers])


def _plain_on_cpu(value: Tensor) -> bool:
    """Whether the tensor is on the CPU and can be read: neither a transform nor a trace hides its values."""
    return (
        value.is_cpu
        and type(value) in (Tensor, torch.nn.Parameter)
        and not torch.compiler.is_compiling()
        and not is_transformed(value)
    )


def greatest(x: Tensor) -> float:
    """The greatest finite number of x's dtype."""
    return torch.finfo(x.dtype).max


def large(x: Tensor) -> float:
    """A number of x's dtype that is larger than all numbers that matter, and still far from overflow."""
    return 1e300 if x.dtype == torch.float64 else 1e30


def invertible(tau: Tensor) -> Tensor:
    """tau, with the least normal number in place of a subnormal one: 1/tau would be infinite. This changes
    only rows whose scores differ by less than 1e-305."""
    least = torch.finfo(tau.dtype).tiny
    return torch.where((tau > 0) & (tau < least), least, tau)


def in_float64(x: Tensor) -> Tensor:
    """x in float64, on the CPU where its own device has none."""
    return (x.cpu() if x.device.type in WITHOUT_FLOAT64 else x).double()


def on_cpu(function: _Function) -> _Function:
    """The function, run on the CPU for tensors of a device without float64; its result goes back to the
    device.

    This is for functions that would be wrong in float32. Gradients are copied in the same way. A generator of
    the device draws the seed of a generator of the CPU.
    """

    @functools.wraps(function)
    def run(*args: Any, **options: Any) -> Tensor:
        for value in (*args, *options.values()):
            if isinstance(value, Tensor) and value.device.type in WITHOUT_FLOAT64:
                here = {name: _here(option) for name, option in options.items()}
                return function(*map(_here, args), **here).to(value.device)
        return function(*args, **options)

    return run  # type: ignore[return-value]


def _here(value: Any) -> Any:
    if isinstance(value, Generator) and value.device.type in WITHOUT_FLOAT64:
        seed = torch.randint(2**63 - 1, (), device=value.device, generator=value)
        return Generator().manual_seed(int(seed))
    return value.cpu() if isinstance(value, Tensor) else value


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that autocast has on the device now; None without it, also on a device that has none."""
    kind = device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return None


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A context in which autocast leaves what runs on the device in its own dtype.

    Near ties decide what is chosen, so the numbers that are compared are not cast to half precision.
    """
    if autocast_dtype(device) is not None:
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def not_below_zero(x: Tensor) -> Tensor:
    """x with 0 where rounding took it below; its gradient stays."""
    return torch.where(x < 0, x - x.detach(), x)
