"""A GPU that is not there, and what it is asked to start: for tests that run in a process of their own.

Triton gets the driver of `benchmarks.host`, so that tensors on the CPU take the way of those on a GPU. Both
its own launcher and the extension for plain calls end in `libcuda.c`, which records what they start. In the
place of a kernel that is known here, the reference kernel writes the results.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from benchmarks import host
from torch import Tensor
from triton.compiler.compiler import CompiledKernel, make_backend

from khot._core.dispatch import OPERATORS
from khot._kernels.triton import around, counted, exact_sums, functions, magnitude, native, paid, plans, pull

SIZES = {"i32": 4, "fp32": 4}  # of all other parameters 8
CDFS = {number: name for name, number in functions.CDFS.items()}
HOW = {number: name for name, number in around.HOW.items()}
FORMS = {number: name for name, number in exact_sums.BY.items()}
OUTPUTS = {number: name for name, number in functions.OUTPUTS.items()}
DTYPES = {
    "*i1": torch.bool,
    "*u1": torch.bool,
    "*i64": torch.int64,
    "*i32": torch.int32,
    "*fp32": torch.float32,
    "*fp64": torch.float64,
    "*fp16": torch.float16,
    "*bf16": torch.bfloat16,
}


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
                own = (Parameters * 2048).in_dll(library(), "parameters_of")[handle]
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


#: Members of tuples that are known by what holds them; all others are pointers that have a name of their own.
OF_HOLDER = ("pointer", "stride", "row", "column", "high", "low", "third")


def names(kernel: Any, arguments: tuple[Any, ...]) -> tuple[str, ...]:
    """What the members of a kernel's arguments are called: ``x_pointer`` of an ``x`` with a ``pointer``, and
    ``out_pointer`` of results that have an ``out``."""

    def of(name: str, value: Any) -> Iterator[str]:
        if isinstance(value, tuple):
            fields = getattr(value, "_fields", ("high", "low"))  # a plain pair is a number in two parts
            for field, each in zip(fields, value, strict=True):
                own = field if isinstance(each, tuple) else f"{field}_pointer"
                yield from of(f"{name}_{field}" if field in OF_HOLDER else own, each)
        else:
            yield name

    return tuple(one for pair in zip(kernel.arg_names, arguments, strict=False) for one in of(*pair))


class Source:
    """The types of a kernel's parameters, without those that it is compiled for, and these."""

    def __init__(self, source: Any) -> None:
        self.name = source.fn.__name__
        kinds = tuple(source.signature.values())
        called = names(source.fn, kinds)
        passed = zip(called, native.members(kinds), strict=True)
        self.kept = {name: kind for name, kind in passed if kind != "constexpr"}
        self.constants = {called[_number_of(kinds, at)]: value for at, value in source.constants.items()}


def _number_of(kinds: tuple[Any, ...], path: tuple[int, ...]) -> int:
    """Which of all members of tuples within tuples it is that this path leads to."""
    before = len(list(native.members(kinds[: path[0]])))
    return before + (_number_of(kinds[path[0]], path[1:]) if len(path) > 1 else 0)


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


def use(plan: Callable[..., plans.Plan | None] = plans.plan) -> None:
    """Let the extension start kernels by the recording driver."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(native.ASKED, "plan", plan)
        native.use(address("cuLaunchKernel"), native.SCRATCH[version()], "cpu")


# ------------------------------------------------------------------------------------ in place of kernels

_RUN = ctypes.CFUNCTYPE(ctypes.c_int)


def run_instead(run: Callable[[], int]) -> None:
    """What the driver calls in the place of a kernel; its result is the driver's."""
    _RUNNING[:] = [_RUN(run)]
    ctypes.c_void_p.in_dll(library(), "run").value = ctypes.cast(_RUNNING[0], ctypes.c_void_p).value


def running() -> Callable[[], int]:
    """What the driver calls now."""
    found: Callable[[], int] = _RUNNING[0]
    return found


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
        given["kinds"] = source.kept
        given.setdefault("rows", found.place[0][0])  # of a kernel that has a row in each program
        cdf = given["L"].cdf if hasattr(given.get("L"), "cdf") else given.get("CDF", 0)
        if source.name in EMULATED and CDFS[cdf] != "power":  # of others nobody reads results
            EMULATED[source.name](given)
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


def _matrix(values: dict[str, Any], name: str, row: int, column: int = 1) -> Tensor:
    dtype = DTYPES[values["kinds"][f"{name}_pointer"]]
    rows, n = values["rows"], _columns(values)
    held = _memory(values[f"{name}_pointer"], dtype, (rows - 1) * row + (n - 1) * column + 1)
    return held.as_strided((rows, n), (row, column))


def _number(values: dict[str, Any], name: str) -> Tensor:
    if values.get(f"{name}_pointer") is not None:
        shape = (values["rows"],) if values[f"{name}_stride"] else ()
        return _memory(values[f"{name}_pointer"], DTYPES[values["kinds"][f"{name}_pointer"]], *shape)
    parts = (values.get(f"{name}_{part}", 0.0) for part in ("high", "low", "third"))
    return torch.tensor(sum(parts), dtype=torch.float64)


def _columns(values: dict[str, Any]) -> int:
    return int(values["n_columns"] if "n_columns" in values else values["n"])


def _written(values: dict[str, Any], /, **results: Tensor) -> None:
    """Write results to where the parameters of their names point, in the dtypes of these."""
    for name, result in results.items():
        dtype = DTYPES[values["kinds"][f"{name}_pointer"]]
        _memory(values[f"{name}_pointer"], dtype, *result.shape).copy_(result)


def _thresholds(values: dict[str, Any]) -> list[Tensor]:
    return [_memory(values[f"{name}_pointer"], torch.float64, values["rows"]) for name in ("hi", "lo")]


def _solve(values: dict[str, Any]) -> None:
    SOLVED[values["P"]](values)


def _count(values: dict[str, Any]) -> None:
    x = _matrix(values, "x", values["x_stride"])
    law = values["L"]
    out, hi, lo = OPERATORS["soft_topk"].kernel(
        x, _number(values, "k"), _number(values, "tau"), CDFS[law.cdf], 0.0, OUTPUTS[law.output]
    )
    _written(values, out=out, hi=hi, lo=lo)


def _pull_paid(values: dict[str, Any]) -> None:
    law, paid = values["L"], "other_pointer" in values["kinds"]
    found = OPERATORS["soft_budget_backward" if paid else "soft_topk_backward"].kernel(
        _matrix(values, "grad", values["grad_row"], values["grad_column"]),
        _number(values, "grad_lo"),
        _matrix(values, "x", values["x_stride"]),
        *([_matrix(values, "other", values["other_row"], values["other_column"])] if paid else ()),
        *_thresholds(values), _number(values, "tau"), CDFS[law.cdf], 0.0,
        *((FORMS[law.by], law.at_most) if paid else (OUTPUTS[law.output],)),
    )  # fmt: skip
    names = ("dx", "dcost", "dgoal", "dtau") if paid else ("dx", "dgoal", "dtau")
    _written(values, **dict(zip(names, found, strict=True)))


def _resident_mask(values: dict[str, Any]) -> None:
    x = _matrix(values, "x", values["x_stride"])
    _written(values, out=OPERATORS["topk_mask"].kernel(x, _number(values, "k")))


def _selectable(values: dict[str, Any]) -> None:
    x = _matrix(values, "x", values["x_stride"])
    _written(values, out=OPERATORS["selectable"].kernel(x, _number(values, "most").item()))


def _size(values: dict[str, Any]) -> None:
    x = _matrix(values, "x", values["x_stride"])
    given = (x, _number(values, "k"), _number(values, "tau"), values["L"].p, values["L"].signed)
    y, hi, lo = OPERATORS["soft_topk_magnitude"].kernel(*given)
    _written(values, out=y, hi=hi, lo=lo)


def _pull_sizes(values: dict[str, Any]) -> None:
    law = values["L"]
    dx, dtau = OPERATORS["soft_topk_magnitude_backward"].kernel(
        _matrix(values, "grad", values["grad_row"], values["grad_column"]),
        _number(values, "grad_lo"),
        _matrix(values, "x", values["x_stride"]),
        _matrix(values, "other", values["other_row"], values["other_column"]),
        _number(values, "goal"), *_thresholds(values), _number(values, "tau"), law.p, law.signed,
    )  # fmt: skip
    _written(values, dx=dx, dtau=dtau)


def _budget(values: dict[str, Any]) -> None:
    law = values["L"]
    y, hi, lo = OPERATORS["soft_budget"].kernel(
        _matrix(values, "x", values["x_stride"]),
        _matrix(values, "other", values["other_row"], values["other_column"]),
        _number(values, "k") + values["digits_third"], _number(values, "tau"),
        CDFS[law.cdf], 0.0, FORMS[law.by], law.at_most,
    )  # fmt: skip
    _written(values, out=y, hi=hi, lo=lo)


def _rank_rows(values: dict[str, Any]) -> None:
    x = _matrix(values, "x", values["x_stride"])
    rank, order, _ = OPERATORS["laplace_count"].kernel(x, None, _number(values, "tau"), values["DESCENDING"])
    _written(values, out=rank, index=order)


def _sort_rows(values: dict[str, Any]) -> None:
    x = _matrix(values, "x", values["x_stride"])
    _, out, order, place = OPERATORS["laplace_thresholds"].kernel(
        x, None, _number(values, "tau"), values["DESCENDING"]
    )
    _written(values, out=out, index=order, place=place)


def _pull_laplace(operator: str, values: dict[str, Any]) -> None:
    x = _matrix(values, "x", values["x_stride"])
    index, place = (
        _memory(values[name], torch.int32, *x.shape) if name in values else x.new_empty(len(x), 0)
        for name in ("index_pointer", "place_pointer")
    )
    dx, _, dtau = OPERATORS[operator].kernel(
        _matrix(values, "grad", values["grad_row"], values["grad_column"]), x, index, None, place,
        _number(values, "tau"), values["ASKED"], values["DESCENDING"],
    )  # fmt: skip
    _written(values, dx=dx, **({"dtau": dtau} if values["ASKED"] else {}))


def _sort_short_rows(values: dict[str, Any]) -> None:
    x, k = _matrix(values, "x", values["x_stride"]), values["k"]
    found, index = OPERATORS["topk"].kernel(x, k, values["LARGEST"], True)
    _written(values, values=found, index=index)


def _part_scan(values: dict[str, Any]) -> None:
    w, g = (_matrix(values, name, values[f"{name}_stride"]) for name in ("w", "g"))
    w = torch.ones_like(w) if values["ONES"] else w
    _written(values, out=OPERATORS["decay_scan"].kernel(w, g, values["REVERSE"]))


def _pareto(values: dict[str, Any]) -> None:
    """Draws from the rows of probabilities, and says which these are. The reference kernel would start other
    kernels; so the units are others than those of the design, but depend on all that is given."""
    x = _matrix(values, "x", values["x_stride"]).double()
    fair = ((x >= 0) & (x <= 1)).all(-1)
    pi = x.where(fair.unsqueeze(-1), 0)
    seed = int(_memory(values["seed_pointer"], torch.int64)) & (2**63 - 1)
    uniform = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    place = (uniform.logit() - pi.logit()).argsort(-1).argsort(-1)
    sample = (place < (pi.sum(-1, keepdim=True) + values["tolerance"]).floor()).double()
    _written(values, out=sample, drawn=fair, probabilities=torch.ones((), dtype=torch.bool))


def _careful(values: dict[str, Any]) -> None:
    """Marks the others. It gets the memory of the first launch, and the same memory twice."""
    assert values["numbers_pointer"] == values["keys_pointer"]
    drawn = _memory(values["drawn_pointer"], torch.bool, values["rows"])
    out = _matrix(values, "out", values["n"])
    out[~drawn] = torch.nan
    _written(values, probabilities=drawn.all())
    size = values["programs"] * 4 * (values["n"] + 1)
    _memory(values["numbers_pointer"], torch.float64, size).fill_(7)  # as it may write anything there


def _spread(values: dict[str, Any], name: str) -> Tensor:
    """The entries of a tensor as rows."""
    kind = values["kinds"][f"{name}_pointer"]
    inner, outer, row, column = (values[f"{name}_{each}"] for each in ("inner", "outer", "row", "column"))
    size, found = DTYPES[kind].itemsize, torch.empty(values["rows"], values["n"], dtype=DTYPES[kind])
    for i in range(values["rows"]):
        for j in range(values["n"]):
            at = i // inner * outer + i % inner * row + j * column
            found[i, j] = _memory(values[f"{name}_pointer"] + size * at, DTYPES[kind])
    return found


def _around(values: dict[str, Any]) -> None:
    if values["rows"] == 0:  # it is compiled
        return
    v = _spread(values, "v")
    mask = _spread(values, "mask") if values.get("mask_pointer") else torch.ones_like(v, dtype=torch.bool)
    other = _spread(values, "other") if values.get("other_pointer") else v
    sign, out = torch.ones_like(other).copysign(other), (~mask).sum(-1, keepdim=True)
    places = torch.arange(1, values["n"] + 1)
    result = {
        "fill": lambda: torch.where(mask, v * values["sign"], values["fill"]),
        "sizes": lambda: torch.where(mask, v * sign, values["fill"]),
        "signs": lambda: v * sign,
        "ranks": lambda: torch.where(other == values["fill"], v - out * 0.5, v) * mask,
        "product": lambda: v * (other if values.get("other_pointer") else mask),
        "places": lambda: torch.where((places <= mask.sum(-1, keepdim=True)) | other.isnan(), v, 0),
    }[HOW[values["HOW"]]]()
    _memory(values["out_pointer"], v.dtype, *v.shape).copy_(result)
    if values.get("second_pointer"):
        _memory(values["second_pointer"], other.dtype, *v.shape).copy_(torch.where(mask, other, 0))


SOLVED = {counted.COUNT: _count, magnitude.SIZED: _size, paid.PAID: _budget}
PULLED = {pull.PULL_PAID: _pull_paid, magnitude.PULL_SIZED: _pull_sizes}

EMULATED = {
    "_around": _around,
    "_pareto": _pareto,
    "_careful": _careful,
    "_part_scan": _part_scan,
    "_selectable": _selectable,
    "solve": _solve,
    "pull_rows": lambda values: PULLED[values["P"]](values),
    "_resident_mask": _resident_mask,
    "_rank_rows": _rank_rows,
    "_pull_ranks": functools.partial(_pull_laplace, "laplace_count_backward"),
    "_sort_rows": _sort_rows,
    "_sort_short_rows": _sort_short_rows,
    "_pull_sorts": functools.partial(_pull_laplace, "laplace_thresholds_backward"),
}
