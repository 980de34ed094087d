"""A fixed set of calls, and the bits of their results: `python -m benchmarks.bits record FILE`.

`python -m benchmarks.bits compare FILE` makes the same calls again and lists every result that is not the
same to the bit. It is for changes that must not change a number: record before, compare after, once with the
compiled kernels and once with KHOT_KERNELS=reference. Only public names are called, so that what is behind
them may move. Where a public parameter has two spellings, RENAMED holds them.

Each call has a key, such as ``soft_topk(cdf=laplace)/float32/4x64/ties``, and its results have names, such as
``y``, ``grad.input`` or ``jvp``. A result is the SHA-256 of dtype, shape and contents (with one bit pattern
for every NaN), or the type and the message of an exception. FILE.bin holds the values beside the hashes, up
to 256 evenly spaced entries of each result, so that the size of a difference can be told.

Results depend on the machine, the torch version and the number of threads, which is 1 here. Compare on the
machine that recorded.
"""

# ruff: noqa: B023 (a function made in a loop is called before the loop goes on)

from __future__ import annotations

import argparse
import functools
import hashlib
import inspect
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import khot

# New spelling of a parameter, as it is written below, and the older ones to try where a callable lacks it.
RENAMED = {
    "hard": ("straight_through",),
    "in_features": ("dim",),
}

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    "1x1": ((1, 1), -1),
    "5x7": ((5, 7), -1),
    "4x64": ((4, 64), -1),
    "2x3x33,dim=1": ((2, 33, 3), 1),
    "3x1000": ((3, 1000), -1),
    "2x20000": ((2, 20000), -1),
}
SMALL = 64  # entries in a row up to which forward mode, vmap and second order are recorded
KEPT = 256  # values of each result that are stored
WORLD = 2
PATIENCE = 60.0  # seconds for a collective

Result = list[Any]


def call(target: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call with each option in the spelling that the callable has."""
    names = inspect.signature(target).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in names.values()):
        for new, olds in RENAMED.items():
            if new in options and new not in names:
                old = next((old for old in olds if old in names), new)
                options[old] = options.pop(new)
    return target(*args, **options)


class Recorder:
    """The results of the calls, and the values of some of their entries."""

    def __init__(self, calls: dict[str, dict[str, Result]] | None = None, values: bytes = b"") -> None:
        self.calls: dict[str, dict[str, Result]] = {} if calls is None else calls
        self.values = bytearray(values)
        self._places: dict[str, int] = {}
        self._key = ""

    def begin(self, key: str) -> None:
        if key in self.calls:
            raise ValueError(f"two calls have the key {key}")
        self._key = key
        self.calls[key] = {}
        torch.manual_seed(0)

    def put(self, name: str, value: Any) -> None:
        results = self.calls[self._key]
        if isinstance(value, (tuple, list)):
            for i, part in enumerate(value):
                self.put(f"{name}.{i}", part)
            return
        if name in results:
            raise ValueError(f"two results of {self._key} have the name {name}")
        if isinstance(value, Tensor):
            results[name] = self._tensor(value.detach())
        elif isinstance(value, Exception):
            results[name] = ["error", type(value).__name__, str(value)]
        else:
            results[name] = ["value", repr(value)]

    def attempt(self, name: str, work: Callable[[], Any]) -> Any:
        """The result of the work, put down under the name; None where it raises, which is put down, too."""
        try:
            value = work()
        except Exception as error:
            self.put(name, error)
            return None
        self.put(name, value)
        return value

    def _tensor(self, x: Tensor) -> Result:
        x = x.contiguous()
        if x.is_floating_point():
            x = torch.where(x.isnan(), torch.full((), math.nan, dtype=x.dtype), x)
        flat = x.reshape(-1)
        name = str(x.dtype).removeprefix("torch.")
        digest = hashlib.sha256(f"{name} {tuple(x.shape)} ".encode())
        digest.update(raw(flat))
        sha = digest.hexdigest()
        if sha not in self._places:
            self._places[sha] = len(self.values)
            self.values += raw(flat[:: step_between(flat.numel())].contiguous())
        return ["tensor", sha, name, list(x.shape), self._places[sha]]

    def stored(self, result: Result) -> Tensor:
        dtype, numel, start = getattr(torch, result[2]), math.prod(result[3]), result[4]
        count = len(range(0, numel, step_between(numel)))
        if not count:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self.values, dtype=dtype, count=count, offset=start).clone()

    def add(self, other: Recorder, prefix: str) -> None:
        """Take in what another process recorded."""
        start = len(self.values)
        self.values += other.values
        for key, results in other.calls.items():
            moved = {n: [*r[:4], r[4] + start] if r[0] == "tensor" else r for n, r in results.items()}
            self.calls[prefix + key] = moved

    def save(self, path: Path) -> None:
        path.write_text(json.dumps({"setting": setting(), "calls": self.calls}, separators=(",", ":")))
        values_of(path).write_bytes(self.values)


def values_of(path: Path) -> Path:
    return path.with_name(path.name + ".bin")


def load(path: Path) -> tuple[dict[str, Any], Recorder]:
    found = json.loads(path.read_text())
    return found["setting"], Recorder(found["calls"], values_of(path).read_bytes())


def raw(flat: Tensor) -> bytes:
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def step_between(numel: int) -> int:
    return max(1, -(-numel // KEPT))


def setting() -> dict[str, Any]:
    """What has to be the same for two runs to be compared."""
    return {
        "kernels": os.environ.get("KHOT_KERNELS", ""),
        "compiled": any("khot" in Path(library).parts for library in torch.ops.loaded_libraries)
        or any(name.startswith("khot.") and name.rpartition(".")[2] == "_C" for name in sys.modules),
        "torch": torch.__version__,
    }


# Inputs


def generator(*names: object) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(repr(names).encode()))


def randn(shape: Sequence[int], *names: object) -> Tensor:
    return torch.randn(tuple(shape), dtype=torch.float64, generator=generator(tuple(shape), *names))


@functools.cache
def scores(kind: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    """Never written to: every caller takes a copy."""
    x = randn(shape, kind)
    if kind == "ties":
        x = (4 * x.clamp(min=0)).round() / 4
    elif kind == "wide":
        x = 1e4 * x
    elif kind == "cauchy":
        x = (x / randn(shape, "denominator")).clamp(-1e30, 1e30)
    elif kind == "holes":
        x = x.masked_fill(randn(shape, "where") > 0.8, -math.inf)
    elif kind == "infinite":
        x = x.masked_fill(randn(shape, "where") > 1.5, -math.inf)
        x = x.masked_fill(randn(shape, "where else") > 1.8, math.inf)
    elif kind == "nan":
        x = x.masked_fill(randn(shape, "where") > 2.0, math.nan)
        x.view(-1)[0] = math.nan
    elif kind != "normal":
        raise ValueError(f"unknown scores {kind!r}")
    return x.to(dtype)


def mask_of(shape: Sequence[int]) -> Tensor:
    return randn(shape, "mask") > -0.5


def batch_of(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    dim %= len(shape)
    return shape[:dim] + shape[dim + 1 :]


def spread(batch: tuple[int, ...], low: float, high: float) -> Tensor:
    """Different numbers for the rows of a batch, from low to high."""
    return torch.linspace(low, high, math.prod(batch) + 1, dtype=torch.float64)[1:].view(batch)


def narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(torch.float32 if dtype == torch.bfloat16 else dtype)


# Derivatives


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for part in value for t in tensors(part)] if isinstance(value, (tuple, list)) else []


def weights_of(values: Sequence[Tensor], name: str) -> list[Tensor]:
    return [randn(v.shape, name, i).to(v.dtype) for i, v in enumerate(values)]


def record(
    to: Recorder, key: str, function: Callable[..., Any], leaves: dict[str, Tensor], *, second: bool = False
) -> None:
    """The value, the gradients, and with ``second`` forward mode and the gradients of the gradients."""
    to.begin(key)
    names = list(leaves)
    given = [leaf.detach().clone().requires_grad_() for leaf in leaves.values()]

    def of(*args: Tensor) -> Any:
        torch.manual_seed(0)
        return function(**dict(zip(names, args, strict=True)))

    value = to.attempt("y", lambda: of(*given))
    outputs = [v for v in tensors(value) if v.requires_grad]
    if not outputs:
        return
    weights = weights_of(outputs, "weights")
    options = {"allow_unused": True, "retain_graph": True}
    try:
        first = torch.autograd.grad(outputs, given, weights, **options)
    except Exception as error:
        to.put("grad", error)
    else:
        for name, grad in zip(names, first, strict=True):
            to.put(f"grad.{name}", grad)
    if not second:
        return

    def twice() -> list[Tensor | None]:
        cotangents = [w.clone().requires_grad_() for w in weights]
        grads = torch.autograd.grad(outputs, given, cotangents, create_graph=True, allow_unused=True)
        found = [g for g in grads if g is not None and g.requires_grad]
        if not found:
            return []
        again = weights_of(found, "second weights")
        return list(torch.autograd.grad(found, [*given, *cotangents], again, allow_unused=True))

    to.attempt("second", twice)
    tangents = tuple(weights_of(given, "tangents"))
    plain = tuple(v.detach() for v in given)
    to.attempt("jvp", lambda: torch.func.jvp(lambda *args: tensors(of(*args)), plain, tangents)[1])


def record_plain(to: Recorder, key: str, function: Callable[[], Any]) -> None:
    to.begin(key)
    to.attempt("y", function)


# The operators that select k


def operators() -> dict[str, tuple[Callable[..., Tensor], dict[str, Any]]]:
    cdfs: dict[str, Any] = {name: name for name in ("logistic", "laplace", "normal", "uniform")}
    cdfs["Power(4:3)"] = khot.cdfs.Power(p=4 / 3)
    cdfs["Power(1.5)"] = khot.cdfs.Power(p=1.5)
    table: dict[str, tuple[Callable[..., Tensor], dict[str, Any]]] = {}
    for name, cdf in cdfs.items():
        table[f"soft_topk(cdf={name})"] = khot.soft_topk, {"cdf": cdf}
        table[f"log_soft_topk(cdf={name})"] = khot.log_soft_topk, {"cdf": cdf}
    table["sigmoid_topk"] = khot.sigmoid_topk, {}
    table["laplace_topk"] = khot.laplace_topk, {}
    table["ot_topk"] = khot.ot_topk, {}
    table["ot_topk(normalize)"] = khot.ot_topk, {"normalize": True}
    for p, name in ((2.0, "2"), (4 / 3, "4:3"), (1.5, "1.5")):
        table[f"sparse_topk(p={name})"] = khot.sparse_topk, {"p": p}
        for rescale in (False, True):
            options = {"p": p, "rescale": rescale}
            table[f"soft_topk_magnitude(p={name},rescale={rescale})"] = khot.soft_topk_magnitude, options
    table["topk_mask"] = khot.topk_mask, {}
    return table


# name: (scores, k, tau, options). k: "frac" and "int" are shares of n, "rows" is one for each row.
SETTINGS: dict[str, tuple[str, str, float | str, dict[str, Any]]] = {
    "normal": ("normal", "frac", 1.0, {}),
    "cold": ("normal", "int", 0.01, {}),
    "ties": ("ties", "int", 1.0, {}),
    "ties, cold, smallest": ("ties", "frac", 0.01, {"largest": False}),
    "wide": ("wide", "int", 1.0, {}),
    "wide, cold": ("wide", "frac", 0.01, {}),
    "cauchy": ("cauchy", "int", 1.0, {}),
    "cauchy, cold": ("cauchy", "frac", 0.01, {}),
    "holes": ("holes", "frac", 1.0, {}),
    "holes, cold": ("holes", "int", 0.01, {}),
    "infinite": ("infinite", "frac", 1.0, {}),
    "nan": ("nan", "int", 1.0, {}),
    "mask": ("normal", "frac", 1.0, {"mask": True}),
    "mask, ties, cold": ("ties", "int", 0.01, {"mask": True}),
    "none": ("normal", "0", 1.0, {}),
    "all": ("normal", "n", 1.0, {}),
    "too many": ("normal", "n + 1", 1.0, {}),
    "no tau": ("normal", "int", 0.0, {}),
    "rows": ("normal", "rows", "rows", {}),
    "rows, ties, smallest": ("ties", "rows", "rows", {"largest": False}),
    "rows, holes": ("holes", "rows", 1.0, {}),
    "hard": ("normal", "frac", 1.0, {"hard": True}),
    "hard, rows, mask": ("ties", "rows", "rows", {"hard": True, "mask": True}),
}
SECOND = {
    "normal",
    "ties, cold, smallest",
    "wide",
    "infinite",
    "mask",
    "rows",
    "rows, ties, smallest",
    "hard",
}
IN_BFLOAT16 = {"normal", "cold", "ties", "wide", "cauchy, cold", "infinite", "mask", "rows", "hard", "all"}
ON_LONG_ROWS = {"normal", "cold", "ties", "wide", "cauchy, cold", "holes", "mask", "rows", "nan", "hard"}


def wanted(name: str, n: int, dtype: torch.dtype) -> bool:
    """Fewer settings in bfloat16 and for long rows: for time."""
    if dtype == torch.bfloat16 and name not in IN_BFLOAT16:
        return False
    return n < 10_000 or name in ON_LONG_ROWS


def selection_case(
    operator: Callable[..., Tensor],
    options: dict[str, Any],
    name: str,
    shape: tuple[int, ...],
    dim: int,
    dtype: torch.dtype,
) -> tuple[Callable[..., Tensor], dict[str, Tensor]] | None:
    """The function of its leaves; None for a setting that the operator has no parameter for."""
    kind, size, tau, extra = SETTINGS[name]
    takes = inspect.signature(operator).parameters
    if any(option not in takes for option in extra):
        return None
    n, batch, fixed = shape[dim], batch_of(shape, dim), {**options, **extra}
    if "mask" in extra:
        fixed["mask"] = mask_of(shape)
    scale = "epsilon" if "epsilon" in takes else "tau"
    if scale not in takes:
        if name == "no tau":
            return None
    elif tau != "rows":
        fixed[scale] = tau
    integer = operator is khot.soft_topk_magnitude
    leaves = {"input": scores(kind, shape, dtype)}
    k: float | Tensor
    if size == "rows":
        k = narrow(spread(batch, 0, 0.5 * n), dtype)
        if integer or operator is khot.topk_mask:
            fixed["k"] = k.floor()
        else:
            leaves["k"] = k
        if tau == "rows" and scale in takes:
            leaves[scale] = narrow(spread(batch, 0.01, 2.0), dtype)
    else:
        fixed["k"] = {"int": max(1, n // 4), "frac": 0.3 * n, "0": 0, "n": n, "n + 1": n + 1}[size]
        if integer and size == "frac":
            fixed["k"] = max(1, n // 3)

    def function(**leaves: Tensor) -> Tensor:
        return call(operator, dim=dim, **fixed, **leaves)

    return function, leaves


def selections(to: Recorder) -> None:
    for spelled, (operator, options) in operators().items():
        for dtype_name, dtype in DTYPES.items():
            for shape_name, (shape, dim) in SHAPES.items():
                n = shape[dim]
                for name in SETTINGS:
                    if not wanted(name, n, dtype):
                        continue
                    case = selection_case(operator, options, name, shape, dim, dtype)
                    if case is None:
                        continue
                    second = (n < SMALL and name in SECOND) or (n == SMALL and name in ("normal", "rows"))
                    second = second and dtype != torch.bfloat16
                    record(to, f"{spelled}/{dtype_name}/{shape_name}/{name}", *case, second=second)
        x = scores("normal", (4, 64))
        record_plain(
            to, f"{spelled}/vmap", lambda: torch.func.vmap(lambda row: call(operator, row, 5, **options))(x)
        )


# Counts, ranks and transport

KINDS = ("normal", "ties", "wide", "cauchy", "holes", "infinite", "nan")


def temperatures(kind: str, n: int) -> tuple[float | str, ...]:
    """All for scores like most, one or two for the others: for time."""
    if n > SMALL:
        return (1.0,)
    return (1.0, 0.01, "rows") if kind == "normal" else (1.0, 0.01) if kind == "ties" else (1.0,)


def counting_calls(
    dim: int, shape: tuple[int, ...]
) -> Iterator[tuple[str, Callable[..., Any], dict[str, Any]]]:
    n, m = shape[dim], 3
    several = [1] * len(shape)
    several[dim % len(shape)] = m
    every = list(shape)
    every[dim % len(shape)] = m
    yield "one", khot.soft_count, {"at": 0.3}
    yield "m levels", khot.soft_count, {"at": spread((m,), -1, 1).view(several)}
    yield "m levels per row", khot.soft_count, {"at": spread(tuple(every), -1, 1)}
    yield "one", khot.inverse_soft_count, {"count": 0.4 * n}
    yield "integer", khot.inverse_soft_count, {"count": max(1, n // 4)}
    yield "none", khot.inverse_soft_count, {"count": 0}
    yield "m levels", khot.inverse_soft_count, {"count": spread((m,), 0, 0.6 * n).view(several)}
    yield "m levels per row", khot.inverse_soft_count, {"count": spread(tuple(every), 0, 0.6 * n)}


def counts(to: Recorder) -> None:
    cdfs = {"logistic": "logistic", "laplace": "laplace", "normal": "normal", "uniform": "uniform"}
    for cdf_name, cdf in {**cdfs, "Power(1.5)": khot.cdfs.Power(p=1.5)}.items():
        for dtype_name, dtype in DTYPES.items():
            for shape_name, (shape, dim) in SHAPES.items():
                n = shape[dim]
                for what, operator, options in counting_calls(dim, shape):
                    for kind in KINDS if n <= SMALL and what != "none" else ("normal", "ties"):
                        for tau in temperatures(kind, n):
                            if dtype == torch.bfloat16 and (kind != "normal" or n > SMALL):
                                continue
                            leaves = {"input": scores(kind, shape, dtype)}
                            fixed: dict[str, Any] = {"dim": dim, "cdf": cdf}
                            for name, value in options.items():
                                if isinstance(value, Tensor):
                                    leaves[name] = narrow(value, dtype)
                                else:
                                    fixed[name] = value
                            if tau == "rows":
                                leaves["tau"] = narrow(spread(batch_of(shape, dim), 0.01, 2), dtype)
                            else:
                                fixed["tau"] = tau
                            key = f"{operator.__name__}(cdf={cdf_name})/{dtype_name}/{shape_name}/{what}"
                            second = (
                                n <= SMALL
                                and tau == ("rows" if kind == "normal" else 1.0)
                                and kind in ("normal", "ties")
                            )
                            record(
                                to,
                                f"{key}/{kind}/tau={tau}",
                                functools.partial(call, operator, **fixed),
                                leaves,
                                second=second and dtype != torch.bfloat16,
                            )


def ranks(to: Recorder) -> None:
    directed: dict[str, Callable[..., Tensor]] = {
        "soft_rank": khot.soft_rank,
        "soft_sort": khot.soft_sort,
        "soft_permutation": khot.soft_permutation,
        "log_soft_permutation": khot.log_soft_permutation,
    }
    calls: list[tuple[str, Callable[..., Tensor], dict[str, Any]]] = []
    for name, operator in directed.items():
        for descending in (False, True):
            calls.append((f"{name}(descending={descending})", operator, {"descending": descending}))
    calls += [
        ("soft_median", khot.soft_median, {}),
        ("soft_median(keepdim)", khot.soft_median, {"keepdim": True}),
        ("soft_quantile(0.3)", khot.soft_quantile, {"q": 0.3}),
        ("soft_quantile(3 levels)", khot.soft_quantile, {"q": torch.tensor([0.0, 0.25, 0.9])}),
    ]
    for cdf in ("laplace", "logistic"):
        for spelled, operator, options in calls:
            for dtype_name, dtype in DTYPES.items():
                for shape_name, (shape, dim) in SHAPES.items():
                    n = shape[dim]
                    # n² entries, or n² time: not on the longest rows, and once on the next
                    square = "permutation" in spelled or (
                        cdf == "logistic" and "soft_quantile" not in spelled
                    )
                    if n > 1000 and square:
                        continue
                    for kind in (
                        KINDS if n <= SMALL else ("normal",) if square else ("normal", "ties", "wide")
                    ):
                        for tau in temperatures(kind, n):
                            if dtype == torch.bfloat16 and (kind != "normal" or n > SMALL):
                                continue
                            leaves = {"input": scores(kind, shape, dtype)}
                            fixed: dict[str, Any] = {"dim": dim, "cdf": cdf, **options}
                            if isinstance(options.get("q"), Tensor):
                                leaves["q"] = narrow(fixed.pop("q"), dtype)
                            if tau == "rows":
                                leaves["tau"] = narrow(spread(batch_of(shape, dim), 0.01, 2), dtype)
                            else:
                                fixed["tau"] = tau
                            second = (
                                n <= SMALL
                                and tau == ("rows" if kind == "normal" else 1.0)
                                and kind in ("normal", "ties")
                            )
                            record(
                                to,
                                f"{spelled}/cdf={cdf}/{dtype_name}/{shape_name}/{kind}/tau={tau}",
                                functools.partial(call, operator, **fixed),
                                leaves,
                                second=second and dtype != torch.bfloat16,
                            )


def transport(to: Recorder) -> None:
    for options in ({}, {"normalize": True}, {"largest": False}):
        for dtype_name, dtype in DTYPES.items():
            for shape_name, (shape, dim) in SHAPES.items():
                n = shape[dim]
                for kind in KINDS if n <= SMALL else ("normal", "ties"):
                    for k in sorted({1, 3, n}) if n < 10 else (1, 5):
                        for epsilon in (1.0, 0.01, "rows") if n <= SMALL else (0.1,):
                            leaves = {"input": scores(kind, shape, dtype)}
                            fixed: dict[str, Any] = {"dim": dim, "k": k, **options}
                            if epsilon == "rows":
                                leaves["epsilon"] = narrow(spread(batch_of(shape, dim), 0.01, 2), dtype)
                            else:
                                fixed["epsilon"] = epsilon
                            key = f"sorted_soft_topk({','.join(options)})/{dtype_name}/{shape_name}/{kind}"
                            second = n <= SMALL and kind == "normal" and dtype != torch.bfloat16
                            record(
                                to,
                                f"{key}/k={k}/epsilon={epsilon}",
                                functools.partial(call, khot.sorted_soft_topk, **fixed),
                                leaves,
                                second=second,
                            )


def baselines(to: Recorder) -> None:
    b = khot.baselines
    table: list[tuple[str, Callable[..., Tensor], dict[str, Any]]] = [
        ("dykstra_topk", b.dykstra_topk, {"tau": 0.5, "iterations": 30}),
        ("dykstra_topk(magnitude)", b.dykstra_topk, {"tau": 0.5, "iterations": 30, "magnitude": True}),
        ("pav_topk", b.pav_topk, {"tau": 0.5}),
        ("pav_topk(p=4:3)", b.pav_topk, {"tau": 0.5, "p": 4 / 3}),
        ("pav_topk(magnitude)", b.pav_topk, {"tau": 0.5, "magnitude": True}),
        ("rescaled_sigmoid_topk", b.rescaled_sigmoid_topk, {"tau": 0.5}),
        ("sequential_softmax_topk", b.sequential_softmax_topk, {"tau": 0.5}),
        ("sinkhorn_topk", b.sinkhorn_topk, {"epsilon": 0.5, "iterations": 50}),
    ]
    for spelled, operator, options in table:
        for dtype_name, dtype in DTYPES.items():
            for shape_name in ("1x1", "5x7", "4x64", "2x3x33,dim=1"):
                shape, dim = SHAPES[shape_name]
                for kind in ("normal", "ties", "holes"):
                    record(
                        to,
                        f"baselines.{spelled}/{dtype_name}/{shape_name}/{kind}",
                        functools.partial(call, operator, k=min(3, shape[dim]), dim=dim, **options),
                        {"input": scores(kind, shape, dtype)},
                        second=kind == "normal" and dtype == torch.float64,
                    )


# Losses


def losses(to: Recorder) -> None:
    shape = (5, 7)
    label, target = (
        torch.arange(5) + 1,
        torch.zeros(shape).scatter(1, torch.tensor([[0, 3], [1, 2], [6, 0], [2, 5], [4, 3]]), 1),
    )
    cdfs: dict[str, Any] = {name: name for name in ("logistic", "laplace", "normal", "uniform")}
    cdfs["Power(1.5)"] = khot.cdfs.Power(p=1.5)
    for dtype_name, dtype in DTYPES.items():
        for kind in ("normal", "ties", "wide", "infinite", "holes"):
            leaves = {"input": scores(kind, shape, dtype)}
            second = kind in ("normal", "ties") and dtype != torch.bfloat16
            for cdf_name, cdf in cdfs.items():
                for reduction in ("mean", "sum", "none"):
                    for tau in (1.0, 0.01, "rows"):
                        if reduction != "mean" and (kind, tau) != ("normal", 1.0):
                            continue
                        key = f"{dtype_name}/{kind}/cdf={cdf_name}/{reduction}/tau={tau}"
                        more = {"tau": narrow(spread((5,), 0.01, 2), dtype)} if tau == "rows" else {}
                        options = {"cdf": cdf, "reduction": reduction, **({} if more else {"tau": tau})}

                        def young(input: Tensor, options: Any = options, **tau: Tensor) -> Tensor:
                            return call(khot.losses.FenchelYoungTopKLoss, k=2, **options, **tau)(
                                input, target
                            )

                        def entropy(input: Tensor, options: Any = options, **tau: Tensor) -> Tensor:
                            loss = call(khot.losses.TopKCrossEntropyLoss, {1: 0.5, 3: 0.5}, **options, **tau)
                            return loss(input, label)

                        def order(input: Tensor, options: Any = options, **tau: Tensor) -> Tensor:
                            true = torch.argsort(randn(shape, "true order"))
                            return call(khot.losses.permutation_cross_entropy, input, true, **options, **tau)

                        record(
                            to, f"losses.FenchelYoungTopKLoss/{key}", young, {**leaves, **more}, second=second
                        )
                        record(
                            to,
                            f"losses.TopKCrossEntropyLoss/{key}",
                            entropy,
                            {**leaves, **more},
                            second=second,
                        )
                        record(
                            to,
                            f"losses.permutation_cross_entropy/{key}",
                            order,
                            {**leaves, **more},
                            second=second,
                        )
        probs = scores("normal", shape, dtype).sigmoid()
        weight = spread((5,), 0, 1).to(dtype)
        record(
            to,
            f"losses.size_penalty/{dtype_name}",
            khot.losses.size_penalty,
            {"probs": probs, "weight": weight},
        )


# Samples


def probs_of(shape: tuple[int, ...], k: int, dtype: torch.dtype) -> Tensor:
    return khot.soft_topk(scores("normal", shape), min(k, shape[-1])).to(dtype)


def sampling(to: Recorder) -> None:
    shapes = [(4, 64), (5, 7), (1, 1), (3, 200)]
    for design in khot.sampling.designs:
        for dtype_name, dtype in DTYPES.items():
            for shape in shapes:
                key = f"sampling.{{}}({design})/{dtype_name}/{'x'.join(map(str, shape))}"
                probs = probs_of(shape, 3, dtype)
                for sample_shape in ((), (3,)):
                    source = generator(design)

                    def draw(source: torch.Generator = source) -> Any:
                        x = khot.sampling.sample(probs, design, sample_shape=sample_shape, generator=source)
                        return x, source.get_state()

                    record_plain(to, f"{key.format('sample')}/{sample_shape}", draw)
                record_plain(
                    to, key.format("inclusion_probs"), lambda: khot.sampling.inclusion_probs(probs, design)
                )
                if shape[-1] <= SMALL:
                    record_plain(
                        to,
                        key.format("joint_inclusion_probs"),
                        lambda: khot.sampling.joint_inclusion_probs(probs, design),
                    )
    for dtype_name, dtype in DTYPES.items():
        for shape in shapes:
            key = f"{dtype_name}/{'x'.join(map(str, shape))}"
            k, logits, probs = min(3, shape[-1]), scores("normal", shape, dtype), probs_of(shape, 3, dtype)
            second = dtype == torch.float64 and shape[-1] <= SMALL
            record_plain(
                to,
                f"sampling.sample(pareto,adjust=exact)/{key}",
                lambda: khot.sampling.sample(probs, "pareto", adjust="exact", generator=generator("draws")),
            )
            record_plain(
                to,
                f"sampling.sample(pareto,seed)/{key}",
                lambda: (khot.sampling.sample(probs), torch.rand(1)),
            )
            for sample_shape in ((), (3,)):
                record_plain(
                    to,
                    f"sampling.gumbel_topk/{key}/{sample_shape}",
                    lambda: khot.sampling.gumbel_topk(
                        logits, k, sample_shape=sample_shape, generator=generator("draws")
                    ),
                )
            cp = khot.sampling.conditional_poisson
            value = khot.topk_mask(logits, k)
            design: Any = khot.sampling.designs["conditional_poisson"]
            functions: dict[str, tuple[Callable[..., Any], dict[str, Tensor]]] = {
                "calibrate": (cp.calibrate, {"probs": probs}),
                "design_joint": (design.joint, {"probs": probs}),
                "design_log_prob": (lambda probs: design.log_prob(value, probs), {"probs": probs}),
                "draw": (lambda probs: design.draw(probs, generator("cp")), {"probs": probs}),
                "entropy": (lambda logits: cp.entropy(logits, k), {"logits": logits}),
                "joint_marginals": (lambda logits: cp.joint_marginals(logits, k), {"logits": logits}),
                "kl": (
                    lambda logits, other: cp.kl(logits, other, k),
                    {"logits": logits, "other": scores("ties", shape, dtype)},
                ),
                "log_normalizer": (lambda logits: cp.log_normalizer(logits, k), {"logits": logits}),
                "log_prob": (lambda logits: cp.log_prob(value, logits, k), {"logits": logits}),
                "marginals": (lambda logits: cp.marginals(logits, k), {"logits": logits}),
                "sample": (
                    lambda logits: cp.sample(logits, k, sample_shape=(2,), generator=generator("cp")),
                    {"logits": logits},
                ),
            }
            for name, (function, leaves) in functions.items():
                record(to, f"sampling.conditional_poisson.{name}/{key}", function, leaves, second=second)
            for kind in ("ties", "holes", "wide", "infinite"):
                other = scores(kind, shape, dtype)
                for name in ("entropy", "log_normalizer", "marginals"):
                    record(
                        to,
                        f"sampling.conditional_poisson.{name}/{key}/{kind}",
                        lambda logits, name=name: getattr(cp, name)(logits, k),
                        {"logits": other},
                    )


def estimators(to: Recorder) -> None:
    options: list[dict[str, Any]] = [{"estimator": "straight_through"}, {"estimator": "second_order"}]
    options += [{"estimator": "second_order", "tau": 0.5}, {"estimator": "straight_through", "k": None}]
    options += [{"estimator": "second_order", "k": None}, {"estimator": "straight_through", "k": 2.5}]
    options += [{"estimator": "second_order", "k": 2.5}, {"estimator": "simple"}]
    options += [{"estimator": "gumbel"}, {"estimator": "gumbel", "tau": 0.5, "hard": False}]
    options += [{"estimator": "imle"}, {"estimator": "imle", "tau": 0.5}]
    for design in khot.sampling.designs:
        options.append({"estimator": "straight_through", "design": design})
        options.append({"estimator": "second_order", "design": design})
    for option in options:
        spelled = ",".join(f"{name}={value}" for name, value in option.items())
        for dtype_name, dtype in DTYPES.items():
            for shape_name in ("5x7", "4x64", "2x3x33,dim=1"):
                shape, dim = SHAPES[shape_name]
                for kind in ("normal", "ties", "holes"):

                    def draw(logits: Tensor, dim: int = dim, option: Any = option) -> Tensor:
                        given = {"k": 3, **option, "generator": generator("estimators")}
                        return call(khot.sample_khot, logits, dim=dim, **given)

                    second = kind == "normal" and dtype != torch.bfloat16
                    leaves = {"logits": scores(kind, shape, dtype)}
                    record(
                        to,
                        f"sample_khot({spelled})/{dtype_name}/{shape_name}/{kind}",
                        draw,
                        leaves,
                        second=second,
                    )
    x = scores("normal", (4, 64))

    def with_step(logits: Tensor) -> Any:
        return khot.estimators.imle(logits, 3, step=0.3, generator=generator("imle"))

    record(to, "estimators.imle(step)/float64", with_step, {"logits": x})

    for baseline in (None, "leave_one_out"):

        def score_function(logits: Tensor, baseline: Any = baseline) -> Any:
            p = khot.distributions.ConditionalPoisson(3, logits=logits)
            sample = p.sample((5,))
            loss = (sample * torch.arange(64)).sum(-1)
            return khot.estimators.score_function(loss, p.log_prob(sample), baseline)

        record(to, f"estimators.score_function({baseline})", score_function, {"logits": x})


def distributions(to: Recorder) -> None:
    d = khot.distributions
    logits = scores("normal", (4, 9))
    makes: dict[str, Callable[[Tensor], Any]] = {
        "ConditionalPoisson": lambda x: d.ConditionalPoisson(3, logits=x),
        "RelaxedKHot": lambda x: d.RelaxedKHot(0.5, 3, logits=x),
        "LogitRelaxedKHot": lambda x: d.LogitRelaxedKHot(0.5, 3, logits=x),
    }
    for design in khot.sampling.designs:
        makes[f"KHot({design})"] = lambda x, design=design: d.KHot(3, logits=x, design=design)
        makes[f"KHotStraightThrough({design})"] = lambda x, design=design: d.KHotStraightThrough(
            3, logits=x, design=design
        )
    uses: dict[str, Callable[[Any], Any]] = {
        "sample": lambda p: p.sample((2,)),
        "rsample": lambda p: p.rsample((2,)),
        "log_prob": lambda p: p.log_prob(p.sample((2,))),
        "entropy": lambda p: p.entropy(),
        "mean": lambda p: p.mean,
        "variance": lambda p: p.variance,
        "probs": lambda p: p.probs,
    }
    for dtype_name in ("float32", "float64"):
        for name, make in makes.items():
            for what, use in uses.items():
                record(
                    to,
                    f"distributions.{name}/{dtype_name}/{what}",
                    lambda logits, make=make, use=use: use(make(logits)),
                    {"logits": logits.to(DTYPES[dtype_name])},
                )


# Layers


def layers() -> dict[str, tuple[Callable[..., nn.Module], list[Any], dict[str, Any]]]:
    """Name: how it is made of device and dtype, its inputs, and options of its call."""
    L = khot.nn
    x, tokens = randn((3, 6), "layer"), randn((2, 7, 5), "tokens")
    mask, padding = mask_of((3, 6)), mask_of((2, 7))
    table: dict[str, tuple[Callable[..., nn.Module], list[Any], dict[str, Any]]] = {}

    def add(name: str, make: Callable[..., nn.Module], inputs: list[Any], **options: Any) -> None:
        table[name] = make, inputs, options

    for cdf in ("logistic", "laplace", "normal", "uniform"):
        add(
            f"SoftTopK({cdf})",
            lambda cdf=cdf, **kw: call(L.SoftTopK, k=2.5, tau=0.5, cdf=cdf, **kw),
            [x],
            mask=mask,
        )
    learned = {"k": 2.5, "dim": 0, "tau": 0.7, "learnable_tau": True, "learnable_k": True}
    add("SoftTopK(learned)", lambda **kw: call(L.SoftTopK, **learned, **kw), [x])
    add("SoftTopK(hard)", lambda **kw: call(L.SoftTopK, k=2, hard=True, **kw), [x])
    add("SoftTopK(soft_eval)", lambda **kw: call(L.SoftTopK, k=9, tau=0.1, soft_eval=True, **kw), [x])
    for schedule in ("linear", "cosine", "exponential"):

        def annealed(schedule: str = schedule, **kw: Any) -> nn.Module:
            tau = call(L.Anneal, start=1.0, end=0.1, steps=4, schedule=schedule)
            tau.step()
            return call(L.SoftTopK, k=2, tau=tau, **kw)

        add(f"SoftTopK(tau={schedule})", annealed, [x])
    q, key, value = (randn((n, 2, 8), "attention", i) for i, n in enumerate((5, 6, 6)))
    options: dict[str, Any] = {"embed_dim": 8, "num_heads": 2, "top_k": 3}
    add("TopKAttention", lambda **kw: call(L.TopKAttention, tau=0.5, **options, **kw), [q, key, value])
    padded = torch.zeros(2, 6, dtype=torch.bool)
    padded[0, 4:] = True
    add(
        "TopKAttention(laplace,dropout,padding)",
        lambda **kw: call(L.TopKAttention, tau=0.5, cdf="laplace", dropout=0.2, **options, **kw),
        [q, key, value],
        key_padding_mask=padded,
    )
    add(
        "TopKAttention(fractional)",
        lambda **kw: call(L.TopKAttention, **{**options, "top_k": 2.5}, **kw),
        [q, key, value],
        need_weights=False,
    )
    for k in (2.5, 3, None):
        add(f"KHotGate(k={k})", lambda k=k, **kw: call(L.KHotGate, n=6, k=k, **kw), [x])
    for estimator in ("second_order", "gumbel", "simple", "imle"):
        add(
            f"KHotGate({estimator})",
            lambda estimator=estimator, **kw: call(L.KHotGate, n=6, k=3, estimator=estimator, **kw),
            [x],
        )
    for design in khot.sampling.designs:
        add(
            f"KHotGate({design})",
            lambda design=design, **kw: call(L.KHotGate, n=6, k=3, design=design, **kw),
            [x],
        )

    experts: dict[str, Any] = {"in_features": 5, "num_experts": 4, "tau": 0.5}
    routers: dict[str, Callable[..., Any]] = {
        "ExpertChoiceRouter": lambda **kw: call(L.ExpertChoiceRouter, capacity=1.5, **experts, **kw),
        "ExpertChoiceRouter(laplace)": lambda **kw: call(
            L.ExpertChoiceRouter, cdf="laplace", **experts, **kw
        ),
        "TokenChoiceRouter": lambda **kw: call(L.TokenChoiceRouter, k=2, **experts, **kw),
        "TokenChoiceRouter(uniform)": lambda **kw: call(
            L.TokenChoiceRouter, k=1.5, cdf="uniform", **experts, **kw
        ),
        "BalancedRouter": lambda **kw: call(L.BalancedRouter, k=2, **experts, **kw),
        "TokenChoiceRouter(learned)": lambda **kw: call(
            L.TokenChoiceRouter, k=2, learnable_k=True, **experts, **kw
        ),
    }
    for name, make in routers.items():
        add(name, make, [tokens])
        add(f"{name}/mask", make, [tokens], mask=padding)

        def mixture(make: Callable[..., Any] = make, **kw: Any) -> nn.Module:
            return call(
                L.MixtureOfExperts, router=make(**kw), experts=[nn.Linear(5, 3, **kw) for _ in range(4)]
            )

        add(f"MixtureOfExperts/{name}", mixture, [tokens])
    query, template = randn((2, 5, 6), "query"), randn((2, 9, 6), "template")
    labels = torch.arange(18).view(2, 9) % 4
    for cdf in ("logistic", "laplace"):
        add(
            f"SoftKNN({cdf})",
            lambda cdf=cdf, **kw: call(L.SoftKNN, k=3, num_classes=4, tau=0.5, cdf=cdf),
            [query, template, labels],
        )
    sae: dict[str, Any] = {"in_features": 5, "latents": 12, "tau": 0.5}
    add("TopKSAE", lambda **kw: call(L.TopKSAE, k=2.5, **sae, **kw), [tokens])
    add("TopKSAE(laplace)", lambda **kw: call(L.TopKSAE, k=3, cdf="laplace", **sae, **kw), [tokens])
    add(
        "TopKSAE(batch,hard)", lambda **kw: call(L.TopKSAE, k=3, hard=True, batch=True, **sae, **kw), [tokens]
    )
    return table


def neural(to: Recorder) -> None:
    for name, (make, inputs, options) in layers().items():
        for dtype_name, dtype in DTYPES.items():
            for mode in ("train", "eval"):
                to.begin(f"nn.{name}/{dtype_name}/{mode}")
                to.attempt("", functools.partial(_layer, to, make, inputs, options, dtype, mode))
    anneal(to)
    attention(to)
    knn_and_sae(to)
    pruning(to)
    beams(to)


def _layer(
    to: Recorder,
    make: Callable[..., nn.Module],
    inputs: list[Any],
    options: dict[str, Any],
    dtype: torch.dtype,
    mode: str,
) -> str:
    torch.manual_seed(1)
    layer = make(dtype=dtype).train(mode == "train")
    parameters = list(layer.parameters())
    with torch.no_grad():
        for i, parameter in enumerate(parameters):  # biases and logits that start as zeros
            parameter.add_(0.1 * randn(parameter.shape, "parameter", i).to(dtype))
    given = [v.to(dtype).requires_grad_() if v.is_floating_point() else v for v in inputs]
    leaves = [v for v in given if v.requires_grad] + parameters
    for step in range(2):
        torch.manual_seed(2 + step)
        outputs = layer(*given, **options)
        to.put(f"y{step}", outputs)
        found = [v for v in tensors(outputs) if v.requires_grad]
        if found:
            grads = torch.autograd.grad(found, leaves, weights_of(found, "weights"), allow_unused=True)
            to.put(f"grad{step}", grads)
            with torch.no_grad():
                for parameter, grad in zip(parameters, grads[len(leaves) - len(parameters) :], strict=True):
                    if grad is not None:
                        parameter.sub_(0.01 * grad.nan_to_num(0))
    to.put("buffers", [b.clone() for b in layer.buffers()])
    return "done"


def anneal(to: Recorder) -> None:
    for schedule in ("linear", "cosine", "exponential"):
        to.begin(f"nn.Anneal({schedule})")
        layer = call(khot.nn.Anneal, start=2.0, end=0.1, steps=3, schedule=schedule)
        for step in range(5):
            to.attempt(f"y{step}", layer)
            layer.step()


def attention(to: Recorder) -> None:
    shape = (2, 4, 6, 8)
    for dtype_name, dtype in DTYPES.items():
        options: dict[str, dict[str, Any]] = {
            "plain": {"top_k": 3},
            "causal": {"top_k": 3, "is_causal": True},
            "laplace": {"top_k": 2.5, "cdf": "laplace", "tau": 0.1},
            "hard": {"top_k": 2, "hard": True},
            "masked": {"top_k": 2, "attn_mask": mask_of((6, 6))},
            "biased": {"top_k": 2, "attn_mask": randn((6, 6), "bias").to(dtype)},
            "scaled, dropout": {"top_k": 2, "scale": 0.3, "dropout_p": 0.2},
            "grouped": {"top_k": 2, "enable_gqa": True},
        }
        for name, option in options.items():
            few = (2, 2, 6, 8) if name == "grouped" else shape
            leaves = {"query": randn(shape, "q"), "key": randn(few, "k"), "value": randn(few, "v")}
            record(
                to,
                f"nn.topk_attention/{dtype_name}/{name}",
                functools.partial(call, khot.nn.topk_attention, **option),
                {key: leaf.to(dtype) for key, leaf in leaves.items()},
                second=dtype == torch.float64,
            )


def knn_and_sae(to: Recorder) -> None:
    for dtype_name, dtype in DTYPES.items():
        query, template = (randn((n, 6), "knn").to(dtype) for n in (7, 40))
        label = torch.arange(40) % 4
        layer = call(khot.nn.SoftKNN, k=3, num_classes=4, tau=0.5)
        record_plain(
            to,
            f"nn.SoftKNN.predict/{dtype_name}",
            lambda: layer.predict(query, template, label),
        )
        record(
            to,
            f"nn.SoftKNN.loss/{dtype_name}",
            lambda query, template: layer.loss(query, torch.arange(7) % 4, template, label),
            {"query": query, "template": template},
        )
        torch.manual_seed(1)
        sae = call(khot.nn.TopKSAE, in_features=6, latents=12, k=3, tau=0.5, dtype=dtype)
        for mode in (True, False):
            sae.train(mode)
            record_plain(to, f"nn.TopKSAE.encode/{dtype_name}/{mode}", lambda: sae.encode(template))
            record_plain(
                to, f"nn.TopKSAE.decode/{dtype_name}/{mode}", lambda: sae.decode(sae.encode(template))
            )
            record_plain(to, f"nn.TopKSAE.dead/{dtype_name}/{mode}", lambda: (sae(template), sae.dead(20)))
        record_plain(to, f"nn.TopKSAE.top/{dtype_name}", lambda: sae.top(template))
        record_plain(to, f"nn.TopKSAE.decode(top)/{dtype_name}", lambda: sae.decode(*sae.top(template)))


def pruning(to: Recorder) -> None:
    L = khot.nn
    for dtype_name, dtype in DTYPES.items():
        for kind in ("global", "magnitude"):
            for amount in (0.5, 7, "anneal"):
                for p in (2.0, 1.5, 4 / 3):
                    to.begin(f"nn.prune_{kind}/{dtype_name}/{amount}/p={p:.3g}")
                    to.attempt("", functools.partial(_prune, to, L, kind, amount, p, dtype))


def _prune(to: Recorder, L: Any, kind: str, amount: Any, p: float, dtype: torch.dtype) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4)).to(dtype)
    x, target = randn((8, 6), "prune").to(dtype), randn((8, 4), "pruned").to(dtype)
    schedule = call(L.Anneal, start=0.1, end=0.8, steps=3)
    amount = schedule if amount == "anneal" else amount
    if kind == "global":
        call(L.prune_global, [(model[0], "weight"), (model[2], "weight")], amount, tau=0.5, p=p)
    else:
        call(L.prune_magnitude, model[0], "weight", amount, tau=0.5, p=p)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss = (model(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        to.put(f"loss{step}", loss)
        to.put(f"grad{step}", [v.grad for v in model.parameters()])
        optimizer.step()
        schedule.step()
    to.put("eval", model.eval()(x))
    call(L.make_permanent, model)
    to.put("weights", [v.detach() for v in model.parameters()])
    return "done"


def beams(to: Recorder) -> None:
    for dtype_name in ("float32", "float64"):
        dtype = DTYPES[dtype_name]
        torch.manual_seed(0)
        table = torch.randn(6, 4, dtype=dtype)
        cell, head = nn.GRUCell(4, 8, dtype=dtype), nn.Linear(8, 6, dtype=dtype)

        def step(
            x: Tensor, h: Tensor, cell: nn.Module = cell, head: nn.Module = head
        ) -> tuple[Tensor, Tensor]:
            new = cell(x.flatten(0, 1), h.flatten(0, 1)).view_as(h)
            return head(new), new

        state = torch.zeros(2, 8, dtype=dtype)
        for options in ({}, {"epsilon": 0.1}, {"end": 2}, {"hard": True}):
            spelled = ",".join(f"{name}={value}" for name, value in options.items())

            def search(
                embedding: Tensor, options: Any = options, step: Any = step, state: Tensor = state
            ) -> Any:
                start = embedding[0]
                return call(khot.nn.soft_beam_search, step, embedding, start, state, length=5, k=3, **options)

            record(to, f"nn.soft_beam_search({spelled})/{dtype_name}", search, {"embedding": table})
        target = torch.tensor([[1, 2, 3], [4, 5, -100]])

        def loss(embedding: Tensor, step: Any = step, state: Tensor = state) -> Any:
            return call(khot.nn.soft_beam_loss, step, embedding, embedding[0], state, target, k=2)

        record(to, f"nn.soft_beam_loss/{dtype_name}", loss, {"embedding": table})


# Rows spread over processes


def part(value: Any, cuts: list[int], rank: int) -> Any:
    if isinstance(value, Tensor) and value.dim() and value.shape[-1] == cuts[-1]:
        return value[..., cuts[rank] : cuts[rank + 1]].contiguous()
    return value


def spread_rows(to: Recorder, group: Any) -> None:
    """The calls of one process; the others make the same ones."""
    rank = group.rank()
    for spelled, (operator, options) in operators().items():
        for dtype_name, dtype in DTYPES.items():
            for cuts in ([0, 30, 64], [0, 0, 7], [0, 700, 1000]):
                n = cuts[-1]
                for name in (
                    "normal",
                    "cold",
                    "ties",
                    "wide",
                    "infinite",
                    "mask",
                    "rows",
                    "hard",
                    "all",
                    "nan",
                ):
                    case = selection_case(operator, options, name, (3, n), -1, dtype)
                    if case is None or (n > SMALL and name not in ("normal", "ties")):
                        continue  # fewer, for time
                    if dtype == torch.bfloat16 and (n > SMALL or name not in ("normal", "rows")):
                        continue
                    fixed_mask = mask_of((3, n)) if "mask" in SETTINGS[name][3] else None
                    _, leaves = case
                    fixed = {**options, **SETTINGS[name][3]}
                    if fixed_mask is not None:
                        fixed["mask"] = part(fixed_mask, cuts, rank)
                    fixed.update(_scalars(operator, name, n))

                    def function(operator: Any = operator, fixed: Any = fixed, **leaves: Tensor) -> Tensor:
                        return call(operator, **{**fixed, **leaves}, group=group)

                    second = n <= SMALL and dtype != torch.bfloat16 and name in ("normal", "mask", "rows")
                    _record_spread(
                        to,
                        f"{spelled}/{dtype_name}/{cuts}/{name}",
                        function,
                        {leaf: part(value, cuts, rank) for leaf, value in leaves.items()},
                        second,
                    )
    for dtype_name, dtype in DTYPES.items():
        cuts = [0, 30, 64]
        probs, logits = (
            part(v, cuts, rank) for v in (probs_of((4, 64), 3, dtype), scores("normal", (4, 64), dtype))
        )
        for sample_shape in ((), (2,)):
            for given in ("generator", "seed"):
                source: dict[str, Any] = (
                    {"seed": 5} if given == "seed" else {"generator": generator("rank", rank)}
                )
                key = f"{dtype_name}/{sample_shape}/{given}"
                record_plain(
                    to,
                    f"sampling.sample/{key}",
                    lambda: khot.sampling.sample(
                        probs, "pareto", sample_shape=sample_shape, group=group, **source
                    ),
                )
                record_plain(
                    to,
                    f"sampling.gumbel_topk/{key}",
                    lambda: khot.sampling.gumbel_topk(
                        logits, 3, sample_shape=sample_shape, group=group, **source
                    ),
                )


def _scalars(operator: Callable[..., Any], name: str, n: int) -> dict[str, Any]:
    """k and tau of a setting where they are no leaves."""
    _, size, tau, _ = SETTINGS[name]
    takes, fixed = inspect.signature(operator).parameters, {}
    integer = operator in (khot.soft_topk_magnitude, khot.topk_mask)
    if size == "rows":
        if integer:
            fixed["k"] = spread((3,), 0, 0.5 * n).floor()
    else:
        fixed["k"] = {"int": max(1, n // 4), "frac": n // 3 if integer else 0.3 * n, "n": n}[size]
    if tau != "rows":
        for scale in ("tau", "epsilon"):
            if scale in takes:
                fixed[scale] = tau
    return fixed


def _record_spread(
    to: Recorder, key: str, function: Callable[..., Tensor], leaves: dict[str, Tensor], second: bool
) -> None:
    """As `record`, but without forward mode."""
    to.begin(key)
    names = list(leaves)
    given = [leaf.detach().clone().requires_grad_() for leaf in leaves.values()]
    y = to.attempt("y", lambda: function(**dict(zip(names, given, strict=True))))
    if y is None or not y.requires_grad:
        return
    weights = randn(y.shape, "weights").to(y.dtype)

    def once() -> Any:
        return torch.autograd.grad(y, given, weights, retain_graph=True, allow_unused=True)

    def twice() -> Any:
        cotangent = weights.clone().requires_grad_()
        grads = torch.autograd.grad(y, given, cotangent, create_graph=True, allow_unused=True)
        found = [g for g in grads if g is not None and g.requires_grad]
        # those of k and tau are replicated, and so have to be their weights
        again = weights_of(found, "second weights")
        return torch.autograd.grad(found, [*given, cotangent], again, allow_unused=True)

    to.attempt("grad", once)
    if second:
        to.attempt("second", twice)


def run_process(rank: int, folder: Path) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=PATIENCE),
    )
    to = Recorder()
    spread_rows(to, dist.group.WORLD)
    to.save(folder / f"{rank}.json")
    dist.destroy_process_group()


def sharded(to: Recorder) -> None:
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "benchmarks.bits", "process"]
        processes = [subprocess.Popen([*command, str(rank), name]) for rank in range(WORLD)]
        codes = [process.wait() for process in processes]
        if any(codes):
            raise RuntimeError(f"the processes ended with {codes}")
        for rank in range(WORLD):
            _, part = load(Path(name) / f"{rank}.json")
            to.add(part, f"group/rank {rank}/")


# Record and compare

SECTIONS: dict[str, Callable[[Recorder], None]] = {
    "selections": selections,
    "counts": counts,
    "ranks": ranks,
    "transport": transport,
    "baselines": baselines,
    "losses": losses,
    "sampling": sampling,
    "estimators": estimators,
    "distributions": distributions,
    "neural": neural,
    "sharded": sharded,
}


def run_all(only: Sequence[str]) -> Recorder:
    to = Recorder()
    for name in only or SECTIONS:
        start, before = time.monotonic(), len(to.calls)
        SECTIONS[name](to)
        print(f"{name}: {len(to.calls) - before} calls, {time.monotonic() - start:.0f} s", flush=True)
    return to


def distance(a: Tensor, b: Tensor) -> str:
    """How far apart two stored results are."""
    if not a.is_floating_point():
        return f"{int((a != b).sum())} of {a.numel()} stored entries differ"
    if not torch.equal(a.isnan(), b.isnan()):
        return f"NaN in {int(a.isnan().sum())}, now in {int(b.isnan().sum())} of {a.numel()} stored entries"
    differs = (a != b) & ~a.isnan()
    if not differs.any():
        signs = int((a.signbit() != b.signbit()).logical_and(~a.isnan()).sum())
        return f"the signs of {signs} zeros" if signs else "none of the stored entries differs"
    bits = {8: torch.int64, 4: torch.int32, 2: torch.int16}[a.element_size()]

    def steps(x: Tensor) -> list[int]:
        low = torch.iinfo(bits).min
        return [v if v >= 0 else low - v for v in x[differs].contiguous().view(bits).tolist()]

    ulp = max(abs(p - q) for p, q in zip(steps(a), steps(b), strict=True))
    gap = (a[differs].double() - b[differs].double()).abs().max().item()
    return f"at most {ulp} ulp, {gap:.2g} absolute, in {int(differs.sum())} of {a.numel()} stored entries"


def differences(
    before: Recorder, after: Recorder
) -> tuple[list[tuple[str, str]], list[tuple[str, str]], int]:
    """(key, what differs) of results; the same of messages of exceptions alone; the number of equal ones."""
    results: list[tuple[str, str]] = []
    messages: list[tuple[str, str]] = []
    equal = 0
    for key in {**before.calls, **after.calls}:
        if key not in before.calls or key not in after.calls:
            results.append((key, "was not called before" if key in after.calls else "is not called any more"))
            continue
        old, new = before.calls[key], after.calls[key]
        for name in {**old, **new}:
            a, b, where = old.get(name), new.get(name), f"{key} {name}"
            if a is None or b is None:
                results.append((where, f"is new: {brief(b)}" if a is None else f"is gone: {brief(a)}"))
            elif a[0] == b[0] == "tensor":
                if a[1] == b[1]:
                    equal += 1
                elif a[2:4] != b[2:4]:
                    results.append((where, f"was {brief(a)}, is {brief(b)}"))
                else:
                    results.append((where, distance(before.stored(a), after.stored(b))))
            elif a == b:
                equal += 1
            elif a[0] == b[0] == "error" and a[1] == b[1]:
                messages.append((where, f"was {a[2]!r}, is {b[2]!r}"))
            else:
                results.append((where, f"was {brief(a)}, is {brief(b)}"))
    return results, messages, equal


def brief(result: Result | None) -> str:
    if result is None:
        return "nothing"
    if result[0] == "tensor":
        return f"{result[2]} of shape {tuple(result[3])}"
    return ": ".join(result[1:])


def compare(path: Path, only: Sequence[str], ignore_messages: bool) -> int:
    then, before = load(path)
    if then != setting():
        print(f"recorded with {then}, but this is {setting()}")
        return 2
    after = run_all(only)
    if only:  # what is compared is only what has been called
        before.calls = {key: value for key, value in before.calls.items() if key in after.calls}
    results, messages, equal = differences(before, after)
    for title, found in (("Messages", messages), ("Results", results)):
        if found:
            print(f"\n{title} that differ:")
            for key, what in found:
                print(f"  {key}: {what}")
            groups = Counter(
                "/".join(key.split("/")[: 3 if key.startswith("group/") else 1]) for key, _ in found
            )
            print("  " + ", ".join(f"{name}: {count}" for name, count in groups.most_common()))
    print(
        f"\n{len(after.calls)} calls, {equal} results equal, {len(results)} results differ, "
        f"{len(messages)} messages of exceptions differ"
    )
    return int(bool(results or (messages and not ignore_messages)))


def summary(to: Recorder) -> str:
    kinds = Counter(result[0] for results in to.calls.values() for result in results.values())
    return f"{len(to.calls)} calls, {sum(kinds.values())} results: {dict(kinds)}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bits", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("record", "compare"):
        command = commands.add_parser(name)
        command.add_argument("file", type=Path)
        command.add_argument("--only", nargs="*", default=[], choices=list(SECTIONS))
        if name == "compare":
            command.add_argument(
                "--ignore-messages", action="store_true", help="list other messages, but do not fail for them"
            )
    process = commands.add_parser("process", help="what `record` and `compare` start")
    process.add_argument("rank", type=int)
    process.add_argument("folder", type=Path)
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if options.command == "process":
        run_process(options.rank, options.folder)
        return 0
    print(f"{khot.__file__}, {setting()}")
    if options.command == "compare":
        return compare(options.file, options.only, options.ignore_messages)
    to = run_all(options.only)
    to.save(options.file)
    print(summary(to))
    return 0


if __name__ == "__main__":
    sys.exit(main())
