"""The compiled CPU kernels, where they were built: XLA's foreign functions, by ctypes."""

from __future__ import annotations

import ctypes
import functools
import os
import warnings
from collections.abc import Callable, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import jax
from jax import Array
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.sharding import NamedSharding, PartitionSpec

from khot_jax import _root

try:
    # primitives whose lowering asks which devices there are, as custom_partitioning does
    from jax._src.dispatch import prim_requires_devices_during_lowering as _needs_devices
except ImportError:  # then calls are not split over devices, and XLA gathers their operands
    _needs_devices = None
# without it the partitioner of jax 0.6 asks a function, `inferred`
_NAMES_WHOLE_FACTORS = "need_replication_factors" in signature(custom_partitioning.def_partition).parameters

__all__ = ["call", "instruction_set", "register", "takes_value"]

TARGETS = ("topk", "topk_pull", "budget", "budget_pull", "mask", "order", "order_pull")


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
        for name in TARGETS:
            function = jax.ffi.pycapsule(getattr(library, f"khot_{name}"))
            jax.ffi.register_ffi_target(f"khot_{name}", function, platform="cpu")
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


def takes_value(name: str | None) -> bool:
    """Whether the compiled kernels of a CDF take its density from its value."""
    return name in ("logistic", "laplace")


def call(name: str, body: Callable[..., Sequence[Array]], *operands: Array, **params: Any) -> Sequence[Array]:
    """What a primitive is on a CPU: a compiled kernel, or its body where there is none for these operands."""
    run = _CALLS.get(name)
    cdf = getattr(params.get("law"), "cdf", None)
    if (
        run is None
        or (cdf is not None and cdf.compiled is None)
        or _library() is None
        or operands[0].size == 0
    ):
        return body(*operands, **params)
    run = functools.partial(run, **params)
    return (
        run(*operands) if _needs_devices is None or operands[0].ndim == 1 else _where_rows_are(run, operands)
    )


def register(p: Primitive) -> None:
    """Has to know a primitive that :func:`call` serves."""
    if _needs_devices is not None:
        _needs_devices.add(p)


def _where_rows_are(run: Callable[..., Sequence[Array]], operands: Sequence[Array]) -> Sequence[Array]:
    """The call, which XLA's partitioner splits along the batch. Without this it would gather everything."""
    batch = operands[0].shape[:-1]
    axes = [f"b{i}" for i in range(len(batch))]

    def factors(shapes: Sequence[Any]) -> str:
        rest = (["n"] if each.shape[-1:] != (0,) else ["z"] for each in shapes if each.ndim > len(batch))
        return ", ".join(" ".join(axes + (next(rest) if each.ndim > len(batch) else [])) for each in shapes)

    def along_batch(mesh: Any, each: Any) -> NamedSharding:
        spec = [*each.sharding.spec, *[None] * each.ndim][: len(batch)]
        return NamedSharding(mesh, PartitionSpec(*spec))

    def partition(mesh: Any, shapes: Any, results: Any) -> Any:
        return (
            mesh,
            run,
            tuple(along_batch(mesh, each) for each in results),
            tuple(along_batch(mesh, each) for each in shapes),
        )

    def inferred(mesh: Any, shapes: Any, results: Any) -> Any:
        return (along_batch(mesh, shapes[0]),) * len(results)

    results = jax.eval_shape(run, *operands)
    split = custom_partitioning(lambda *given: tuple(run(*given)))
    rule = f"{factors(operands)} -> {factors(results)}"
    last = tuple(each for each in ("n", "z") if each in rule.split())
    whole = {"need_replication_factors": last} if _NAMES_WHOLE_FACTORS else {}
    split.def_partition(partition, inferred, sharding_rule=rule, **whole)
    return split(*operands)


def _like(x: Array, *, row: bool = False, empty: bool = False, dtype: Any = None) -> jax.ShapeDtypeStruct:
    shape = x.shape[:-1] if row else (*x.shape[:-1], 0) if empty else x.shape
    return jax.ShapeDtypeStruct(shape, x.dtype if dtype is None else dtype)


def _attributes(law: Any, cost: Array | None) -> dict[str, Any]:
    named = {"cdf": law.cdf.compiled, "output": law.output, "shape": law.cdf.parameter}
    if cost is not None:
        named["slack"] = _root.rounding(cost.shape[-1], cost)
    return named


def _solve(*operands: Array, law: Any) -> Sequence[Array]:
    x, goal, _, *cost = operands
    target = "khot_budget" if law.cost else "khot_topk"
    pair = _like(x, row=True, dtype=goal.dtype)
    results = (_like(x, empty=law.output == "threshold"), pair, pair)
    return jax.ffi.ffi_call(target, results)(*operands, **_attributes(law, cost[0] if cost else None))


def _pull(*operands: Array, law: Any) -> Sequence[Array]:
    x, _, hi = operands[:3]
    cost = operands[5] if law.cost else None
    target = "khot_budget_pull" if law.cost else "khot_topk_pull"
    number = _like(x, row=True, dtype=hi.dtype)
    results = (_like(x), number, number, *(() if cost is None else (_like(cost),)))
    dx, dgoal, dtau, *dcost = jax.ffi.ffi_call(target, results)(*operands, **_attributes(law, cost))
    return [dx, dgoal, *([dtau] if law.tau else []), *dcost]


def _mask(x: Array, k: Array) -> Sequence[Array]:
    return [jax.ffi.ffi_call("khot_mask", _like(x))(x, k)]


def _order(x: Array, tau: Array, *, law: Any) -> Sequence[Array]:
    call = jax.ffi.ffi_call("khot_order", _like(x))
    return [call(x, tau, what=law.what, descending=law.descending)]


def _order_pull(x: Array, tau: Array, v: Array, *, law: Any) -> Sequence[Array]:
    call = jax.ffi.ffi_call("khot_order_pull", (_like(x), _like(x, row=True)))
    return call(x, tau, v, what=law.what, descending=law.descending)


_CALLS: dict[str, Callable[..., Sequence[Array]]] = {
    "khot_solve": _solve,
    "khot_pull": _pull,
    "khot_mask": _mask,
    "khot_order": _order,
    "khot_order_pull": _order_pull,
}
