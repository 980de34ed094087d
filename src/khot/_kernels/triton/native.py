"""What the extension for plain calls has to know of Triton, to start its kernels without a line of Python.

The driver's launch function is looked up here, where the first kernel has been compiled: neither a build nor
an import of khot needs CUDA. Triton's own way is left to kernels that it would give more than their
parameters and unused pointers, and to other versions of Triton than those that were tried.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, get_args

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from khot import cdfs
from khot._core import eager

__all__ = ["SCRATCH", "prepare", "prepare_all", "remember", "serve_around", "use"]

#: How many pointers Triton's launcher passes after a kernel's parameters, by Triton's version: those to
#: scratch memory, for the kernel and for a profiler. They are null for kernels that ask for none.
SCRATCH = {"3.5": 2, "3.6": 2, "3.7": 2, "3.8": 2, "3.9": 2}

#: With more shared memory newer launchers ask the driver for another mode.
MOST_SHARED = 228 * 1024

WARP = 32


class Launch(NamedTuple):
    """What a launch for a plain call gets anew, by the names of the kernel's parameters; or several, which
    share their results.

    Attributes:
        inputs: what is read: the rows "x", a "cost", a "seed", the gradient "grad", and results of the
            forward launch, as "out=y" where the parameter has another name.
        results: what is written, as "dk=dgoal" where the parameter has another name. The call has the first
            of them. A backward launch may read the others, of which those that it reads come first.
        numbers: the parameters that are a number or one for each row.

    ``x`` stands for its pointer, and a number for its pointer, stride and parts, as far as the kernel has
    them, as parameters or as members of a tuple (:func:`names`).
    """

    inputs: tuple[str, ...]
    results: tuple[str, ...]
    numbers: tuple[str, ...]


_MAGNITUDE = (
    Launch(("x",), ("out", "hi", "lo"), ("k", "tau")),
    Launch(("grad", "x", "out=y", "hi", "lo"), ("dx", "dtau"), ("k", "tau")),
)

#: The launches of the operators in ``csrc/eager/prepared.h``: forward, and backward if there is one.
LAUNCHES = {
    "soft_topk": (
        Launch(("x",), ("out", "hi", "lo"), ("k", "tau")),
        Launch(("grad", "x", "hi", "lo"), ("dx", "dk=dgoal", "dtau"), ("tau",)),
    ),
    "topk_mask": (Launch(("x",), ("out",), ("k",)),),
    "selectable": (Launch(("x",), ("out",), ("most",)),),
    "soft_topk_magnitude": _MAGNITUDE,
    "sizes": _MAGNITUDE,
    "pareto_sample": (
        Launch(("x", "seed"), ("out", "drawn", "probabilities", "numbers", "keys", "singles"), ()),
    ),
    "topk": (Launch(("x",), ("values", "index"), ()),),
    "soft_budget": (
        Launch(("x", "cost"), ("out", "hi", "lo"), ("budget", "tau")),
        Launch(("grad", "x", "cost", "hi", "lo"), ("dx", "dcost", "dbudget=dgoal", "dtau"), ("tau",)),
    ),
    "soft_rank": (
        Launch(("x",), ("out", "index"), ("tau",)),
        Launch(("grad", "x", "index"), ("dx", "dtau"), ("tau",)),
    ),
    "soft_sort": (
        Launch(("x",), ("out", "index", "place", "scratch"), ("tau",)),
        Launch(("grad", "x", "index", "place"), ("dx", "dtau", "scratch"), ("tau",)),
    ),
}


def again(operator: str, given: list[Any], asked: list[int], grad: Tensor) -> tuple[Tensor, ...]:
    """The gradients of these arguments of a plain call, from the same call in the ordinary way: where they
    are to be differentiated again, or mapped, or have no prepared launch."""
    wanted, call = torch.is_grad_enabled(), eager.PYTHON_WAY[operator]
    with torch.enable_grad():
        for i in asked:  # one tensor may be two arguments, such as k and tau
            given[i] = given[i].view_as(given[i])
        y = call(*given)
    return torch.autograd.grad(y, [given[i] for i in asked], grad, create_graph=wanted)


@functools.cache
def _look() -> None:
    """Use the driver of CUDA if it is there, and Triton is one that was tried."""
    scratch = SCRATCH.get(".".join(triton.__version__.split(".")[:2]))
    if scratch is None:
        return
    try:
        launch = ctypes.cast(ctypes.CDLL("libcuda.so.1").cuLaunchKernel, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return
    assert launch is not None
    use(launch, scratch)


def use(launch: int, scratch: int, device: str = "cuda") -> None:
    """Let the extension start kernels by the function at this address."""
    classes = {name: type(cdfs.resolve(name)) for name in get_args(cdfs.CDFName)}
    stream = driver.active.get_current_stream
    eager.use_driver(launch, stream, knobs.runtime, scratch, device, again, _around[0], cdfs=classes)


def serve_around(
    compiled: Callable[[str, int, torch.device, tuple[torch.dtype | None, ...]], tuple[Any, ...]],
) -> None:
    """Let the extension have this compile what goes around the launches of plain calls."""
    _around[:] = [compiled]


_around: list[Any] = []


def remember(table: int, arguments: tuple[Any, ...], kernel: Any) -> None:
    """Let the extension start this compiled kernel for arguments like these."""
    if not eager.launching:
        _look()
    if not eager.launching or not _is_plain(kernel.metadata):
        return
    types = tuple(members(tuple(kernel.src.signature.values())[: len(arguments)]))
    threads, shared = WARP * kernel.metadata.num_warps, kernel.metadata.shared
    eager.remember(table, arguments, kernel.function, threads, shared, types)


def members(value: tuple[Any, ...]) -> Iterator[Any]:
    """What is passed of arguments, or of their types: a tuple's members are arguments of their own."""
    for each in value:
        if isinstance(each, tuple):
            yield from members(each)
        else:
            yield each


#: Members of tuples that are known by what holds them; all others are pointers that have a name of their own.
OF_HOLDER = ("pointer", "stride", "row", "column", "high", "low", "rest")


def names(kernel: Any, arguments: tuple[Any, ...]) -> tuple[str, ...]:
    """What the members of a kernel's arguments are called: ``x_pointer`` of an ``x`` with a ``pointer``, and
    ``out_pointer`` of results that have an ``out``."""

    def of(name: str, value: Any) -> Iterator[str]:
        if isinstance(value, tuple):
            fields = getattr(value, "_fields", ("high", "low"))  # a plain pair is a number in two parts
            for field, each in zip(fields, value, strict=True):
                yield from of(f"{name}_{field}" if field in OF_HOLDER else f"{field}_pointer", each)
        else:
            yield name

    return tuple(one for pair in zip(kernel.arg_names, arguments, strict=False) for one in of(*pair))


def _is_plain(metadata: Any) -> bool:
    """Whether Triton's launcher gives the kernel nothing but its parameters and pointers that are null, and
    the driver nothing but the grid, the block and the size of the shared memory."""
    return (
        metadata.num_ctas == 1
        and not metadata.launch_cooperative_grid
        and not metadata.launch_pdl
        and metadata.global_scratch_size == 0
        and metadata.profile_scratch_size == 0
        and metadata.shared <= MOST_SHARED
        and metadata.target.backend == "cuda"
        and metadata.target.warp_size == WARP
        and not getattr(metadata, "instrumentation_mode", "")
    )


def prepare(
    operator: str,
    x: Tensor,
    variant: Any,
    programs: int,
    arguments: tuple[Any, ...],
    *choices: Any,
    **known: Any,
) -> None:
    """Let plain calls of the operator with contiguous rows like those of x make the launch just made: see
    :func:`prepare_all`."""
    if eager.missed():
        prepare_all(operator, x, ((variant, programs, arguments),), *choices, **known)


def prepare_all(
    operator: str,
    x: Tensor,
    launches: tuple[tuple[Any, int, tuple[Any, ...]], ...],
    *choices: Any,
    backward: bool = False,
    asked: bool | None = None,
) -> None:
    """Let plain calls of the operator with contiguous rows like those of x make the launches just made.

    Args:
        launches: of each the variant, the programs, and the arguments.
        choices: the names, flags and numbers that decide the launches beside x, in the order of the call.
        backward: whether they compute the gradients of such calls.
        asked: whether these are the gradients of the numbers, too, if there is another launch for only the
            others, or for all.
    """
    if not eager.missed():  # the call is not plain, or its launches are prepared
        return
    sources, *rest = _told(operator, backward, asked)
    results: list[Tensor | None] = [None] * len(LAUNCHES[operator][backward].results)
    told = []
    for variant, programs, given in launches:
        places = _places(names(variant.kernel, given), operator, backward)
        given = tuple(members(given))
        for at, source in zip(places[0], sources or (1, 2), strict=False):
            value = given[at]
            like_x = source == 0 and (value.dtype != x.dtype or value.numel() != x.numel())  # a gradient
            if like_x or not (value.is_contiguous() or places[3][:1] == (at,)):
                return
        results = [given[at] if at >= 0 else before for at, before in zip(places[1], results, strict=True)]
        told.append((variant.table, programs, given, places))
    eager.prepare(operator, backward, x, choices, tuple(told), (sources, _sizes(results), *rest))


def _sizes(results: list[Tensor | None]) -> list[int]:
    """The bytes of each result, 0 for one that lies where the one before does."""
    sizes, before = [], None
    for result in results:
        assert result is not None
        address = result.data_ptr()
        sizes.append(0 if address == before else result.nbytes)
        before = address
    return sizes


@functools.cache
def _places(names: tuple[str, ...], operator: str, backward: bool) -> tuple[Any, ...]:
    """Where, among arguments of these names, those are that a call has anew."""
    launch = LAUNCHES[operator][backward]

    def place(name: str) -> int:
        return names.index(name) if name in names else -1

    def number(name: str) -> tuple[int, ...]:
        parts = [f"{name}_{part}" for part in ("high", "low", "rest")]
        return place(f"{name}_pointer"), place(f"{name}_stride"), *(place(p) for p in parts if p in names)

    return (
        tuple(place(f"{name.rpartition('=')[2]}_pointer") for name in launch.inputs),
        tuple(place(f"{name.rpartition('=')[2]}_pointer") for name in launch.results),
        tuple(map(number, launch.numbers)),
        tuple(map(place, ("cost_pointer", "cost_row", "cost_column"))) if "cost" in launch.inputs else (),
    )


@functools.cache
def _told(operator: str, backward: bool, asked: bool | None) -> tuple[Any, ...]:
    """What the extension is told of launches besides, but for the sizes of their results."""
    forward, last, launch = (LAUNCHES[operator][at] for at in (0, -1, backward))
    known = ("grad", *forward.inputs, *forward.results)
    results = [name.partition("=")[0] for name in launch.results]
    gradients = {} if asked is False else {name: at for at, name in enumerate(results)}
    return (
        tuple(known.index(name.partition("=")[0]) for name in launch.inputs) if backward else (),
        () if backward or last is forward else tuple(map(forward.numbers.index, last.numbers)),
        any(name.startswith("out=") for name in last.inputs),
        0 if backward else sum(name in last.inputs for name in forward.results[1:]),
        tuple(gradients.get(f"d{name}", -1) for name in forward.numbers) if backward else (),
        bool(asked),
    )
