"""A simulated device without float64, like Apple's, for machines that have none.

Its tensors report the device "meta" and keep their data on the CPU. A float64 tensor on it is an error, and
so is an operation on tensors of two devices. The kernels are the reference's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from khot._core.dispatch import OPERATORS

__all__ = ["NAME", "Device"]

NAME = "meta"  # the only device but the CPU that autograd knows in every build of torch
NOT_THERE = (torch.float64, torch.complex128)


# torch's own functions for this took half of the time of the tests


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


def _mapped(kind: type[Tensor], f: Callable[[Any], Any], value: Any) -> Any:
    """The value, with f of each tensor of this kind in it."""
    if isinstance(value, kind):
        return f(value)
    if isinstance(value, (tuple, list)):
        return type(value)(_mapped(kind, f, v) for v in value)
    return value


class _There(Tensor):
    """A tensor on the device."""

    data_here: Tensor

    @staticmethod
    def __new__(cls, data: Tensor) -> _There:
        if data.dtype in NOT_THERE:
            raise AssertionError(f"the device has no {data.dtype}")  # a TypeError can be caught by operators
        there: _There = torch.Tensor._make_wrapper_subclass(
            cls,
            data.shape,
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=data.dtype,
            device=NAME,
        )
        there.data_here = data
        return there

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("used without its Device")


class Device(TorchDispatchMode):
    """While it is active, tensors created on `NAME` are on the device, and stay there until they are
    copied."""

    def put(self, data: Tensor, *, requires_grad: bool = False) -> Tensor:
        return _There(data.detach().clone()).requires_grad_(requires_grad)

    def fetch(self, there: Tensor) -> Tensor:
        assert there.device.type == NAME, "the result is on the CPU"
        return there.detach().to("cpu")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [*_tensors(args), *_tensors(kwargs.values())]
        there = any(isinstance(v, _There) for v in tensors)
        if func.namespace == "khot" and there:
            with self:
                return OPERATORS[func._schema.name.removeprefix("khot::")].kernel(*args, **kwargs)
        moves = func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
        if there and not moves and any(v.dim() and not isinstance(v, _There) for v in tensors):
            raise RuntimeError(f"{func} of tensors on two devices")
        if kwargs.get("device") is not None:
            there = torch.device(kwargs["device"]).type == NAME
            kwargs["device"] = torch.device("cpu")
        inner = {name: _mapped(_There, lambda v: v.data_here, value) for name, value in kwargs.items()}
        result = func(*_mapped(_There, lambda v: v.data_here, args), **inner)
        if not there:
            return result
        known = {id(v.data_here): v for v in tensors if isinstance(v, _There)}  # changed in place
        return _mapped(Tensor, lambda v: known[id(v)] if id(v) in known else _There(v), result)
