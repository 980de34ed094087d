"""A GPU that is not there, and what it is asked to start: for tests that run in a process of their own.

Triton gets the driver of `benchmarks.host`, so that tensors on the CPU take the way of those on a GPU. Both
its own launcher and the extension for plain calls end in `libcuda.c`, which records what they start. In the
place of a kernel that is known here, the reference kernel writes the results.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import triton
from benchmarks import host
from torch import Tensor
from triton.compiler.compiler import CompiledKernel, make_backend

from khot._core.dispatch import OPERATORS
from khot._kernels.triton import functions, native

SIZES = {"i32": 4, "fp32": 4}  # of all other parameters 8
CDFS = {number: name for name, number in functions.CDFS.items()}
OUTPUTS = {number: name for name, number in functions.OUTPUTS.items()}
DTYPES = {"*fp32": torch.float32, "*fp64": torch.float64, "*fp16": torch.float16, "*bf16": torch.bfloat16}


class Record(ctypes.Structure):
    """What was started last."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("attributes", ctypes.c_uint),
        ("parameters", ctypes.c_int),
        ("values", ctypes.c_uint64 * 64),
    )


@functools.cache
def library() -> ctypes.CDLL:
    return ctypes.CDLL(f"{os.environ['TRITON_LIBCUDA_PATH']}/libcuda.so.1", ctypes.RTLD_GLOBAL)


class Parameters(ctypes.Structure):
    """The sizes of a kernel's parameters."""

    _fields_ = (("count", ctypes.c_int), ("sizes", ctypes.c_int * 64))


class Driver(host._Driver):
    """The driver of `benchmarks.host`, with Triton's own launcher, and a handle of its own for each kernel.

    Triton makes a launcher for a kernel and then loads it.
    """

    STREAM = 12345

    def __init__(self) -> None:
        from triton.backends.nvidia import driver

        real = driver.CudaUtils()

        class Utilities(host._Utilities):
            launch = staticmethod(getattr(real, "launch", None) or (lambda *_: None))
            build_signature_metadata = staticmethod(
                getattr(real, "build_signature_metadata", None) or (lambda *_: None)
            )

            def load_binary(self, name: str, *_: Any) -> tuple[int, ...]:
                compiled.append(made[0])
                handle = len(compiled)
                kept = [SIZES.get(kind, 8) for kind in made[0].kept.values()]
                kept += [8] * native.SCRATCH[version()]
                own = (Parameters * 256).in_dll(library(), "parameters_of")[handle]
                own.count, own.sizes[: len(kept)] = len(kept), kept
                return 1, handle, 64, 0, 1024

        def launcher(source: Any, metadata: Any) -> Any:
            made[:] = [Source(source)]
            return driver.CudaLauncher(source, metadata)

        made: list[Source] = []
        self.utils = Utilities()  # type: ignore[misc]
        self.launcher_cls = launcher  # type: ignore[misc,assignment]

    def get_current_stream(self, _: int) -> int:
        return self.STREAM


class NotCompiled(CompiledKernel):  # type: ignore[misc]
    """What Triton makes of a kernel, without its code, which takes seconds and which nothing here runs."""

    def __init__(self, src: Any, target: Any, options: dict[str, Any], **_: Any) -> None:
        self.module = self.function = self._run = self._module_pid = None
        self.src, self.name, self.hash = src, src.fn.__name__, ""
        known = {"name": self.name, "target": target, "warp_size": 32, "shared": 48, "tmem_size": None}
        scratch = {
            f"{kind}_scratch_{what}": what == "align"
            for kind in ("global", "profile")
            for what in ("size", "align")
        }
        self.metadata = SimpleNamespace(**(options | known | scratch))
        self.packed_metadata = make_backend(target).pack_metadata(self.metadata)
        self.kernel, self.metadata_group = b"", {}


class Source:
    """The types of a kernel's parameters, without those that it is compiled for, and these."""

    def __init__(self, source: Any) -> None:
        names = source.fn.arg_names
        self.name = source.fn.__name__
        self.kept = {name: kind for name, kind in source.signature.items() if kind != "constexpr"}
        self.constants = {names[at[0]]: value for at, value in source.constants.items()}


compiled: list[Source] = []  # by their handles, which count from 1


class Launch:
    """One launch: what was started, and with which parameters."""

    def __init__(self) -> None:
        record = Record.in_dll(library(), "record")
        self.function = record.function
        self.place = tuple(record.grid), tuple(record.block), record.shared, record.stream
        self.attributes = record.attributes
        self.values = tuple(record.values[: record.parameters])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Launch) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return str(vars(self))


def version() -> str:
    return ".".join(triton.__version__.split(".")[:2])


def starts() -> int:
    return ctypes.c_int.in_dll(library(), "starts").value


def address(function: str) -> int:
    found = ctypes.cast(getattr(library(), function), ctypes.c_void_p).value
    assert found is not None
    return found


def use(device: str = "cpu") -> None:
    """Let the extension start kernels by the recording driver."""
    native.use(address("cuLaunchKernel"), native.SCRATCH[version()], device)


# ------------------------------------------------------------------------------------ in place of kernels

_RUN = ctypes.CFUNCTYPE(ctypes.c_int)


def run_instead(run: Callable[[], int]) -> None:
    """What the driver calls in the place of a kernel; its result is the driver's."""
    _RUNNING[:] = [_RUN(run)]
    ctypes.c_void_p.in_dll(library(), "run").value = ctypes.cast(_RUNNING[0], ctypes.c_void_p).value


def emulate(seen: list[Launch]) -> None:
    """Let the reference kernels write the results, and note each launch."""

    def run() -> int:
        found = Launch()
        source = compiled[found.function - 1]
        values = {
            name: _value(kind, value)
            for (name, kind), value in zip(source.kept.items(), found.values, strict=False)
        }
        given = source.constants | values
        known = source.name in EMULATED and CDFS[given.get("CDF", 0)] != "power"
        shared_k = given.get("k_pointer") is not None and given["k_stride"] == 0
        if known and not shared_k and given.get("tau_pointer") is None:  # of others nobody reads the results
            EMULATED[source.name](given, DTYPES[source.kept["x_pointer"]])
        seen.append(found)
        return 0

    run_instead(run)


_RUNNING: list[Any] = []  # which the driver may call


def stop() -> None:
    ctypes.c_void_p.in_dll(library(), "run").value = None


def _value(kind: str, value: int) -> Any:
    data = value.to_bytes(8, "little")
    if kind == "fp32":
        return ctypes.c_float.from_buffer_copy(data).value
    return int.from_bytes(data[:4], "little", signed=True) if kind == "i32" else value


def _memory(pointer: int, dtype: torch.dtype, *shape: int) -> Tensor:
    count = 1
    for size in shape:
        count *= size
    raw = (ctypes.c_char * (count * dtype.itemsize)).from_address(pointer)
    return torch.frombuffer(raw, dtype=dtype).view(shape)


def _matrix(values: dict[str, Any], name: str, dtype: torch.dtype, row: int, column: int) -> Tensor:
    rows, n = values["rows"], values["n_columns"]
    held = _memory(values[f"{name}_pointer"], dtype, (rows - 1) * row + (n - 1) * column + 1)
    return held.as_strided((rows, n), (row, column))


def _number(values: dict[str, Any], name: str) -> Tensor:
    if values.get(f"{name}_pointer") is not None:  # of tests, float64
        return _memory(values[f"{name}_pointer"], torch.float64, values["rows"])
    return torch.tensor(values[f"{name}_high"] + values[f"{name}_low"], dtype=torch.float64)


def _solve_rows(values: dict[str, Any], dtype: torch.dtype) -> None:
    rows, n = values["rows"], values["n_columns"]
    x = _matrix(values, "x", dtype, values["x_stride"], 1)
    out, hi, lo = OPERATORS["soft_topk"].kernel(
        x, _number(values, "k"), _number(values, "tau"), CDFS[values["CDF"]], 0.0,
        OUTPUTS[values["OUTPUT"]],
    )  # fmt: skip
    _memory(values["out_pointer"], dtype, rows, n).copy_(out)
    _memory(values["hi_pointer"], torch.float64, rows).copy_(hi)
    _memory(values["lo_pointer"], torch.float64, rows).copy_(lo)


def _pull_rows(values: dict[str, Any], dtype: torch.dtype) -> None:
    rows, n = values["rows"], values["n_columns"]
    grad = _matrix(values, "grad", dtype, values["grad_row"], values["grad_column"])
    hi, lo = (_memory(values[f"{name}_pointer"], torch.float64, rows) for name in ("hi", "lo"))
    grad_lo = torch.zeros((), dtype=torch.float64)
    if values["grad_lo_pointer"] is not None:
        grad_lo = _memory(values["grad_lo_pointer"], torch.float64, rows)
    dx, dk, dtau = OPERATORS["soft_topk_backward"].kernel(
        grad, grad_lo,
        _matrix(values, "x", dtype, values["x_stride"], 1), hi, lo, _number(values, "tau"),
        CDFS[values["CDF"]], 0.0, OUTPUTS[values["OUTPUT"]],
    )  # fmt: skip
    _memory(values["dx_pointer"], dtype, rows, n).copy_(dx)
    _memory(values["dk_pointer"], torch.float64, rows).copy_(dk)
    _memory(values["dtau_pointer"], torch.float64, rows).copy_(dtau)


def _resident_mask(values: dict[str, Any], dtype: torch.dtype) -> None:
    rows, n = values["rows"], values["n"]
    y = OPERATORS["topk_mask"].kernel(_memory(values["x_pointer"], dtype, rows, n), _number(values, "k"))
    _memory(values["out_pointer"], dtype, rows, n).copy_(y)


def _selectable(values: dict[str, Any], dtype: torch.dtype) -> None:
    rows, n = values["rows"], values["n"]
    x = _memory(values["x_pointer"], dtype, rows, n)
    _memory(values["out_pointer"], torch.float64, rows).copy_(
        OPERATORS["selectable"].kernel(x, _number(values, "most").item())
    )


EMULATED = {
    "_selectable": _selectable,
    "solve_rows": _solve_rows,
    "pull_rows": _pull_rows,
    "_resident_mask": _resident_mask,
}
