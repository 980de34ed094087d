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
from khot._kernels.triton import around, counted, functions, magnitude, native, paid, plans, pull
from khot._kernels.triton.float64_sums import BY

SIZES = {"i32": 4, "fp32": 4}  # of all other parameters 8
CDFS = {number: name for name, number in functions.CDFS.items()}
HOW = {number: name for name, number in around.HOW.items()}
FORMS = {number: name for name, number in BY.items()}
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


def _given(values: dict[str, Any], name: str) -> Any:
    """An argument of an operator: rows, thresholds, places, or a number."""
    if name == "x":
        return _matrix(values, name, values["x_stride"])
    if name in ("grad", "other"):
        return _matrix(values, name, values[f"{name}_row"], values[f"{name}_column"])
    if name in ("hi", "lo"):
        return _memory(values[f"{name}_pointer"], torch.float64, values["rows"])
    if name in ("index", "place"):
        rows, pointer = values["rows"], values.get(f"{name}_pointer")
        return (
            torch.empty(rows, 0) if pointer is None else _memory(pointer, torch.int32, rows, _columns(values))
        )
    if name == "budget":
        return _number(values, "k") + values["digits_third"]
    return None if name == "none" else _number(values, name)


def _operator(
    name: str, given: str, results: str, choices: Callable[[dict[str, Any]], tuple[Any, ...]] = lambda v: ()
) -> Callable[[dict[str, Any]], None]:
    """In the place of a kernel, this operator. Results called _ are not written, and those with a ? where
    they are asked for."""

    def run(values: dict[str, Any]) -> None:
        arguments = (_given(values, each) for each in given.split())
        found = OPERATORS[name].kernel(*arguments, *choices(values))
        named = zip(results.split(), found if isinstance(found, tuple) else (found,), strict=True)
        asked = "_" if values.get("ASKED") else "?_"
        wanted = {each.strip("?"): result for each, result in named if each[-1] not in asked}
        _written(values, **wanted)

    return run


def _of_counts(values: dict[str, Any]) -> tuple[Any, ...]:
    return CDFS[values["L"].cdf], 0.0, OUTPUTS[values["L"].output]


def _of_budgets(values: dict[str, Any]) -> tuple[Any, ...]:
    return CDFS[values["L"].cdf], 0.0, FORMS[values["L"].by], values["L"].at_most


def _of_sizes(values: dict[str, Any]) -> tuple[Any, ...]:
    return values["L"].p, values["L"].signed


def _of_pulls(values: dict[str, Any]) -> tuple[Any, ...]:
    return values["ASKED"], values["DESCENDING"]


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
    dtype = DTYPES[values["kinds"][f"{name}_pointer"]]
    inner, outer, row, column = (values[f"{name}_{each}"] for each in ("inner", "outer", "row", "column"))
    i, j = torch.arange(values["rows"]).unsqueeze(-1), torch.arange(values["n"])
    at = i // inner * outer + i % inner * row + j * column
    return _memory(values[f"{name}_pointer"], dtype, int(at.max()) + 1)[at]


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


SOLVED = {
    counted.COUNT: _operator("soft_topk", "x k tau", "out hi lo", _of_counts),
    magnitude.SIZED: _operator("soft_topk_magnitude", "x k tau", "out hi lo", _of_sizes),
    paid.PAID: _operator("soft_budget", "x other budget tau", "out hi lo", _of_budgets),
}
#: Also by whether entries have costs.
PULLED = {
    (pull.PULL_PAID, False): _operator(
        "soft_topk_backward", "grad grad_lo x hi lo tau", "dx dgoal dtau", _of_counts
    ),
    (pull.PULL_PAID, True): _operator(
        "soft_budget_backward", "grad grad_lo x other hi lo tau", "dx dcost dgoal dtau", _of_budgets
    ),
    (magnitude.PULL_SIZED, True): _operator(
        "soft_topk_magnitude_backward", "grad grad_lo x other goal hi lo tau", "dx dtau", _of_sizes
    ),
}
PLACES = "grad x index none place tau"

EMULATED = {
    "_around": _around,
    "_pareto": _pareto,
    "_careful": _careful,
    "_part_scan": _part_scan,
    "_selectable": _operator("selectable", "x", "out", lambda values: (_number(values, "most").item(),)),
    "solve": lambda values: SOLVED[values["P"]](values),
    "pull_rows": lambda values: PULLED[values["P"], "other_pointer" in values["kinds"]](values),
    "_resident_mask": _operator("topk_mask", "x k", "out"),
    "_rank_rows": _operator("laplace_count", "x none tau", "out index _", lambda v: (v["DESCENDING"],)),
    "_pull_ranks": _operator("laplace_count_backward", PLACES, "dx _ dtau?", _of_pulls),
    "_sort_rows": _operator(
        "laplace_thresholds", "x none tau", "_ out index place", lambda v: (v["DESCENDING"],)
    ),
    "_sort_short_rows": _operator("topk", "x", "values index", lambda v: (v["k"], v["LARGEST"], True)),
    "_pull_sorts": _operator("laplace_thresholds_backward", PLACES, "dx _ dtau?", _of_pulls),
}
