"""What the extension for plain calls has to know of Triton, to start its kernels without a line of Python.

The driver's launch function is looked up here, where the first kernel has been compiled: neither a build nor
an import of khot needs CUDA. Triton's own way is left to kernels that it would give more than their
parameters and unused pointers, and to other versions of Triton than those that were tried.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, get_args

import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from khot import cdfs
from khot._core import eager

__all__ = ["SCRATCH", "prepare", "remember", "use"]

#: How many pointers Triton's launcher passes after a kernel's parameters, by Triton's version: those to
#: scratch memory, for the kernel and for a profiler. They are null for kernels that ask for none.
SCRATCH = {"3.5": 2, "3.6": 2, "3.7": 2, "3.8": 2, "3.9": 2}

#: With more shared memory newer launchers ask the driver for another mode.
MOST_SHARED = 228 * 1024

WARP = 32

#: What a prepared launch gets anew in each call, by the names of the kernel's parameters: the addresses, and
#: the two halves of each number, in the order in which ``csrc/bindings/eager.cpp`` passes them.
GIVEN = {
    "soft_topk": (
        "x_pointer", "out_pointer", "hi_pointer", "lo_pointer", "k_high", "k_low", "tau_high", "tau_low",
    ),
    "soft_topk_of_rows": (
        "x_pointer", "out_pointer", "hi_pointer", "lo_pointer", "k_pointer", "tau_high", "tau_low",
    ),
    "soft_topk_backward": (
        "grad_pointer", "x_pointer", "hi_pointer", "lo_pointer", "dx_pointer", "dk_pointer", "dtau_pointer",
        "tau_high", "tau_low",
    ),
    "topk_mask": ("x_pointer", "out_pointer", "k_high", "k_low"),
    "selectable": ("x_pointer", "out_pointer", "most_high", "most_low"),
}  # fmt: skip


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
    eager.use_driver(launch, driver.active.get_current_stream, knobs.runtime, scratch, device, cdfs=classes)


def remember(table: int, arguments: tuple[Any, ...], kernel: Any) -> None:
    """Let the extension start this compiled kernel for arguments like these."""
    if not eager.launching:
        _look()
    if not eager.launching or not _is_plain(kernel.metadata):
        return
    types = tuple(kernel.src.signature.values())[: len(arguments)]
    threads, shared = WARP * kernel.metadata.num_warps, kernel.metadata.shared
    eager.remember(table, arguments, kernel.function, threads, shared, types)


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
    operator: str, x: Tensor, variant: Any, programs: int, arguments: tuple[Any, ...], *choices: str
) -> None:
    """Let plain calls of the operator with contiguous rows like those of x make the launch just made.

    Args:
        choices: the CDF and the output, where the operator has them.
    """
    cdf, output = choices or ("", "")
    places = _places(variant.kernel, GIVEN[operator])
    eager.prepare(operator, x, cdf, output, variant.table, programs, arguments, places)


@functools.cache
def _places(kernel: Any, names: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(map(kernel.arg_names.index, names))
