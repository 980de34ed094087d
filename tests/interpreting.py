"""Triton's interpreter without what it does again at each operation.

It spends more time on the types of values than on the values: it describes a block, looks for a dtype of
NumPy, compares shapes and promotes dtypes anew each time. What it computes stays the same, but that
reductions and scans by a function of ours take the entries in another order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
from triton.language import core, semantic
from triton.runtime import interpreter

FLOATS = {"fp32": core.float32, "fp64": core.float64}
NUMBERS = FLOATS | {"int32": core.int32, "int64": core.int64}
EQUAL = {*NUMBERS, "int1", "uint32", "uint64"}  # not half precision, which a division widens
OFFSETS = {"int32", "int64"}


def quicken() -> None:
    """For all kernels that this process interprets."""
    replace_names_once()
    describe_types_once()
    compare_shapes_by_identity()
    pass_equal_types()
    interpreter.ReduceOps.generic_reduce = reduce
    interpreter.ScanOps.generic_scan = scan


def replace_names_once() -> None:
    """A launch replaces the names in Triton's language by interpreted ones, and restores them afterwards. The
    interpreter looks all of them through again at each call of a device function. Here they stay."""
    replace = interpreter._patch_lang

    @functools.cache
    def modules(fn: Callable[..., object]) -> list[ModuleType]:
        return [v for v in fn.__globals__.values() if v is interpreter.tl or v is core]

    def replace_once(fn: Callable[..., object]) -> object:
        if any(core.is_builtin(module.load) for module in modules(fn)):
            replace(fn)
        return interpreter._LangPatchScope()

    def replace_one(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        # without a check that it is not called from the host
        fn = getattr(member, "__wrapped__", member)

        def interpreted(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
            return fn(*args, _semantic=interpreter.interpreter_semantic, **kwargs)

        scope.set_attr(obj, name, interpreted)

    interpreter._patch_lang, interpreter._patch_attr = replace_once, replace_one


def describe_types_once() -> None:
    """Blocks of the same shape share it, whatever their dtype, and so do their tensors."""
    block, numpy_dtype = core.block_type.__init__, interpreter._get_np_dtype
    blocks: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, Any] = {}
    extents: dict[Any, tuple[Any, Any]] = {(): (core.tuple([]), core.constexpr(1))}
    dtypes: dict[str, Any] = {}

    def block_init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(
            [s.value if isinstance(s, core.constexpr) else s for s in getattr(shape, "values", shape)]
        )
        known = blocks.get((element_ty.name, sizes))
        if known is None:
            block(self, element_ty, shape)
            self.shape = shapes.setdefault(sizes, self.shape)
            extents[sizes] = core.tuple([core.constexpr(s) for s in sizes]), core.constexpr(self.numel)
            self.extent = extents[sizes]
            blocks[element_ty.name, sizes] = dict(vars(self))
        else:
            vars(self).update(known)

    def tensor_init(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.extent if type.is_block() else extents[()]

    def numpy_dtype_of(dtype: Any) -> Any:
        found = dtypes.get(dtype.name)
        if found is None:
            found = dtypes[dtype.name] = numpy_dtype(dtype)
        return found

    core.block_type.__init__, core.tensor.__init__ = block_init, tensor_init
    interpreter._get_np_dtype = numpy_dtype_of


def compare_shapes_by_identity() -> None:
    """Operands of the same shape, which :func:`describe_types_once` has made the same object, need no
    broadcasting."""
    broadcast = semantic.TritonSemantic.broadcast_impl_value

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    semantic.TritonSemantic.broadcast_impl_value = broadcast_impl_value


def pass_equal_types() -> None:
    """Operands of the same dtype, and numbers beside a tensor whose dtype they take, need no promotion. NumPy
    broadcasts them within the operation, so that they only need the type of the result."""
    check, tensor = semantic.TritonSemantic.binary_op_type_checking_impl, core.tensor
    types: dict[Any, Any] = {}

    @functools.lru_cache(4096, typed=True)  # 1 and 1.0 differ
    def constant(value: float, sign: float, dtype: str) -> Any:  # so do 0.0 and −0.0
        return interpreter.interpreter_semantic.scalar_constant(value, NUMBERS[dtype]).handle

    def number(value: Any, beside: Any) -> Any:
        """The number as such a tensor, or None where this is not known to be its dtype."""
        name, kind = beside.dtype.name, type(value)
        if (kind is float and name in FLOATS) or (
            kind is int and name in NUMBERS and -(2**31) <= value < 2**31
        ):
            return tensor(constant(value, math.copysign(1.0, value), name), beside.type)
        return None

    def result_type(first: Any, second: Any) -> Any:
        """Of the dtype of the first, and of the shape that both have together."""
        key = first.name, second.name
        found = types.get(key)
        if found is None:
            shapes = [tuple(t.shape) if t.is_block() else () for t in (first, second)]
            shape = list(np.broadcast_shapes(*shapes))
            found = types[key] = core.block_type(first.scalar, shape) if shape else first
        return found

    def quick(
        self: Any, lhs: Any, rhs: Any, allow_lhs_ptr: bool = False, allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True, div_or_mod: bool = False,
    ) -> tuple[Any, Any]:  # fmt: skip
        if arithmetic_check:
            if type(lhs) is tensor and type(rhs) is not tensor:
                as_tensor = number(rhs, lhs)
                if as_tensor is not None:
                    return lhs, as_tensor
            elif type(rhs) is tensor and type(lhs) is not tensor:
                as_tensor = number(lhs, rhs)
                if as_tensor is not None:
                    return as_tensor, rhs
            elif type(lhs) is tensor and lhs.dtype.name == rhs.dtype.name and lhs.dtype.name in EQUAL:
                if lhs.shape is rhs.shape:
                    return lhs, rhs
                common = result_type(lhs.type, rhs.type)
                return tensor(lhs.handle, common), tensor(rhs.handle, common)
            elif type(lhs) is tensor and allow_lhs_ptr and lhs.dtype.is_ptr() and rhs.dtype.name in OFFSETS:
                return tensor(lhs.handle, result_type(lhs.type, rhs.type)), rhs
        return check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    semantic.TritonSemantic.binary_op_type_checking_impl = quick
    # whether integers overflow, which the interpreter computes and then does not assert
    semantic.TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None


def reduce(self: Any, given: Any) -> list[Any]:
    """The interpreter's reduction by a function of ours, of halves, as a device takes them. Its own calls the
    function for each entry."""
    given, axis = self.unravel(given, self.axis)
    values, dims = [np.moveaxis(v.handle.data, axis, 0) for v in given], given[0].handle.data.ndim
    while len(values[0]) > 1:
        half = len(values[0]) // 2
        values = joined(self, [v[:half] for v in values], [v[half:] for v in values], given)
    if not self.keep_dims:
        values = [v[0] for v in values]
    elif self.axis is None:
        values = [v.reshape((1,) * dims) for v in values]
    else:
        values = [np.moveaxis(v, 0, axis) for v in values]
    return [self.to_tensor(v, g.dtype) for v, g in zip(values, given, strict=True)]


def scan(self: Any, given: Any) -> list[Any]:
    """The interpreter's scan in steps that double their reach, as a device takes them, over whole tensors."""
    values, reach = [v.handle.data for v in given], 1
    place = np.arange(values[0].shape[self.axis])
    place = place if self.axis else place.reshape(-1, *(1,) * (values[0].ndim - 1))
    while reach < place.size:
        rolled = [np.roll(v, reach, self.axis) for v in values]
        found = joined(self, rolled, values, given)
        values = [np.where(place < reach, v, j) for v, j in zip(values, found, strict=True)]
        reach *= 2
    return [self.to_tensor(v, g.dtype) for v, g in zip(values, given, strict=True)]


def joined(self: Any, first: list[Any], second: list[Any], given: Any) -> list[Any]:
    """What the function of a reduction or a scan makes of two arrays for each of the tensors given."""
    pieces = [
        self.to_tensor(v, g.dtype) for part in (first, second) for v, g in zip(part, given, strict=True)
    ]
    found = self.combine_fn.fn(*pieces)
    return [v.handle.data for v in (found if isinstance(found, tuple) else (found,))]
