"""What the extension for plain calls has to know of Triton, to start its kernels without a line of Python.

The driver's launch function is looked up here, where the first kernel has been compiled: neither a build nor
an import of khot needs CUDA. Triton's own way is left to kernels that it would give more than their
parameters and unused pointers, and to other versions of Triton than those that were tried.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from typing import Any, get_args

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from khot import cdfs
from khot._core import eager

#: How many pointers Triton's launcher passes after a kernel's parameters, by Triton's version: those to
#: scratch memory, for the kernel and for a profiler. They are null for kernels that ask for none.
SCRATCH = {"3.5": 2, "3.6": 2, "3.7": 2, "3.8": 2, "3.9": 2}

#: With more shared memory newer launchers ask the driver for another mode.
MOST_SHARED = 228 * 1024

WARP = 32

#: What the extension asks for, of files that launch kernels: :func:`.around.compiled`, :func:`.plans.plan`.
ASKED: dict[str, Callable[..., Any]] = {}


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
    stream, asked = driver.active.get_current_stream, (again, ASKED["around"], ASKED["plan"])
    eager.use_driver(launch, stream, knobs.runtime, scratch, device, *asked, cdfs=classes)


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
