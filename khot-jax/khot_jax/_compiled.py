"""The compiled CPU kernels, where they were built: XLA's foreign functions, by ctypes."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import warnings
from collections.abc import Callable, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.sharding import NamedSharding, PartitionSpec

try:
    # primitives whose lowering asks which devices there are, as custom_partitioning does
    from jax._src.dispatch import prim_requires_devices_during_lowering as needs_devices
except ImportError:  # then calls are not split over devices, and XLA gathers their operands
    needs_devices: set[Primitive] | None = None
# without it the partitioner of jax 0.6 asks a function, `inferred`
_NAMES_WHOLE_FACTORS = "need_replication_factors" in signature(custom_partitioning.def_partition).parameters

__all__ = ["call", "instruction_set", "needs_devices"]

# Of each the operands and results are those of the primitive of this name
KERNELS = ("khot_solve", "khot_pull", "khot_mask", "khot_order", "khot_order_pull")


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The library, whose functions XLA then knows; None where the pure engine serves."""
    if os.environ.get("KHOT_JAX_PURE") == "1":
        return None
    path = next(iter(sorted(Path(__file__).parent.glob("_kernels*"))), None)
    try:
        if path is None:
            raise OSError("it was installed without a C++ compiler")
        library = ctypes.CDLL(str(path))
        for name in KERNELS:
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    except Exception as error:
        warnings.warn(
            f"khot_jax runs without its compiled CPU kernels, on the pure engine, which takes 5 to 20 times "
            f"as long: {error}",
            stacklevel=2,
        )
        return None
    library.khot_isa.restype = ctypes.c_char_p
    return library


def instruction_set() -> str | None:
    """What the compiled kernels use, or None if they are not in use."""
    library = _library()
    return None if library is None else library.khot_isa().decode()


def call(
    name: str, operands: Sequence[Array], results_of: Callable[..., Any], params: dict[str, Any]
) -> Sequence[Array] | None:
    """What a primitive is on a CPU: a compiled kernel; None where there is none for these operands."""
    x = operands[0]
    if name not in KERNELS or x.dtype == jnp.float64 or x.size == 0 or _library() is None:
        return None
    attributes = params["law"].attributes(x.shape[-1]) if params else {}
    if attributes is None:
        return None

    def run(*operands: Array) -> Sequence[Array]:
        return jax.ffi.ffi_call(name, results_of(operands, params))(*operands, **attributes)

    return run(*operands) if needs_devices is None or x.ndim == 1 else _where_rows_are(run, operands)


def _where_rows_are(run: Callable[..., Sequence[Array]], operands: Sequence[Array]) -> Sequence[Array]:
    """The call, which XLA's partitioner splits along the batch. Without this it would gather everything."""
    batch = operands[0].shape[:-1]
    axes = [f"b{i}" for i in range(len(batch))]

    def factors(shapes: Sequence[Any]) -> str:
        lasts = ([f"n{size}" for size in each.shape[len(batch) :]] for each in shapes)
        return ", ".join(" ".join([*axes, *last]) for last in lasts)

    def along_batch(mesh: Any, each: Any) -> NamedSharding:
        spec = [*each.sharding.spec, *[None] * each.ndim][: len(batch)]
        return NamedSharding(mesh, PartitionSpec(*spec))

    def partition(mesh: Any, shapes: Any, results: Any) -> Any:
        # that of the scores for all: the partitioner may leave numbers of rows whole, or split them otherwise
        rows = along_batch(mesh, shapes[0])
        return mesh, run, (rows,) * len(results), (rows,) * len(shapes)

    def inferred(mesh: Any, shapes: Any, results: Any) -> Any:
        return (along_batch(mesh, shapes[0]),) * len(results)

    results = jax.eval_shape(run, *operands)
    split = custom_partitioning(lambda *given: tuple(run(*given)))
    rule = f"{factors(operands)} -> {factors(results)}"
    last = tuple(dict.fromkeys(re.findall(r"n\d+", rule)))  # in the order that they are named in
    whole = {"need_replication_factors": last} if _NAMES_WHOLE_FACTORS else {}
    split.def_partition(partition, inferred, sharding_rule=rule, **whole)
    return split(*operands)
