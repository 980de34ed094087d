"""Plain calls in eager mode, in C++ from their arguments to their result (``csrc/eager``).

A call returns None if it is not a plain call of a tensor on the CPU, and has to take the ordinary way:
dispatch, checks and errors are there. Of hard masks, only small ones are taken. On a GPU, calls of the
operators in :data:`ON_GPUS` are taken from the second of a kind on, which asks for a plan of its launches
(:mod:`khot._kernels.triton.plans`). The ordinary way's own launches go through :data:`start`.
Where a call is asked for, Dynamo must not see it. All other tracers are modes, which the extension sees.
The extension is written in torch's C++ interface, which is not stable, so it is used with the torch that it
was built with, whose version is in its name. Without it every call returns None.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "ON_GPUS",
    "PYTHON_WAY",
    "forget",
    "in_use",
    "inverse_soft_count",
    "launching",
    "load",
    "pareto",
    "remember",
    "sample_khot",
    "gated",
    "hard_topk",
    "selectable",
    "soft_budget",
    "soft_count",
    "soft_rank",
    "soft_sort",
    "soft_topk",
    "soft_topk_magnitude",
    "soft_topk_of_selectable",
    "start",
    "topk",
    "topk_mask",
    "use_driver",
]


def _ordinary(*_: Any) -> None:
    """What every call is without the extension."""


_Call = Callable[..., Tensor | None]

#: soft_topk(input, k, dim, tau, cdf, largest, mask, group, log, offsets), with its gradient; of packed rows
#: those of one length, on the CPU
soft_topk: _Call = _ordinary
#: hard_topk, with the arguments of soft_topk, on the CPU: the hard mask with the gradient of the soft one
hard_topk: _Call = _ordinary
#: soft_count(input, at, dim, tau, cdf), with its gradient, at one level for all rows
soft_count: _Call = _ordinary
#: inverse_soft_count(input, count, dim, tau, cdf), with its gradient, for one count for all rows
inverse_soft_count: _Call = _ordinary
#: topk(input, k, dim, largest, sorted), with its gradient: the values and the indices
topk: Callable[..., tuple[Tensor, Tensor] | None] = _ordinary
#: topk_mask(input, k, dim, largest, mask, group)
topk_mask: _Call = _ordinary

# On a GPU alone:
#: soft_rank(input, dim, tau, cdf, descending, method, regularization, mask), with its gradient
soft_rank: _Call = _ordinary
#: soft_sort(input, dim, tau, cdf, descending, method, regularization, mask), with its gradient
soft_sort: _Call = _ordinary
#: pareto(probs, dim, generator, least): a sample of each row
pareto: _Call = _ordinary
#: soft_topk_magnitude(input, k, dim, tau, p, rescale, mask, group), with its gradient
soft_topk_magnitude: _Call = _ordinary
#: soft_budget(input, cost, budget, dim, tau, cdf, by, at_most, largest, mask, hard, group), with the
#: gradients of all but the cost
soft_budget: _Call = _ordinary
#: selectable(input, dim, most)
selectable: _Call = _ordinary
#: soft_topk_of_selectable(input, k, dim, tau, cdf, largest, mask, group, log): the soft top-k, of which a row
#: with fewer entries that may be selected gets all of them
soft_topk_of_selectable: _Call = _ordinary

#: sample_khot(logits, k, dim, estimator, design, tau, cdf, hard, mask, generator, least): by the default
#: estimator and design, with its gradient
sample_khot: _Call = _ordinary
#: gated(logits, k, input, least): the input (..., n) times, for each row, such a sample of logits (n,)
gated: _Call = _ordinary

#: The calls that are taken on a GPU
ON_GPUS = (
    "soft_topk",
    "topk",
    "topk_mask",
    "soft_topk_magnitude",
    "soft_budget",
    "soft_rank",
    "soft_sort",
    "selectable",
    "soft_topk_of_selectable",
    "sample_khot",
    "gated",
    "pareto",
)

#: What computes in Python, by the ordinary way, the calls on a GPU that have gradients, with their arguments
PYTHON_WAY: dict[str, Callable[..., Tensor]] = {}

#: start(table, programs, arguments): whether a remembered kernel of a GPU was started; if not, nothing was
start: Callable[..., bool | None] = _ordinary
#: remember(table, arguments, function, threads, shared, types): a kernel for arguments like these
remember: Callable[..., bool | None] = _ordinary
#: forget(): all kernels and launches
forget: Callable[[], None] = _ordinary

#: whether there is an extension for this torch that starts the kernels of a GPU
launching = False


def in_use() -> bool:
    """Whether there is an extension for this torch."""
    return soft_topk is not _ordinary


def load(kernels: ctypes.CDLL, cdfs: dict[str, type]) -> None:
    """Use the extension for this torch, if there is one, with the compiled kernels.

    A call takes a CDF by its name in ``cdfs``, or an object of exactly that class.
    """
    global soft_topk, hard_topk, soft_count, inverse_soft_count, topk, topk_mask
    extension = _extension()
    if extension is None or not hasattr(kernels, "khot_served"):  # built from other sources
        return
    kernels.khot_served.restype = ctypes.c_void_p
    extension.serve(kernels.khot_served(), cdfs)
    soft_topk, hard_topk = extension.soft_topk, extension.hard_topk
    topk, topk_mask = extension.topk, extension.topk_mask
    soft_count, inverse_soft_count = extension.soft_count, extension.inverse_soft_count


def use_driver(
    launch: int,
    stream: Callable[[int], int],
    hooks: object,
    unused: int,
    device: str,
    again: Callable[[str, list[Any], list[int], Tensor], tuple[Tensor, ...]],
    around: Callable[[str, int, torch.device, tuple[torch.dtype | None, ...]], tuple[Any, ...]],
    plan: Callable[..., tuple[Any, ...] | None],
    *,
    cdfs: dict[str, type],
) -> None:
    """Let the extension, if there is one, start kernels of a GPU.

    Args:
        launch: the address of the driver's function ``cuLaunchKernel``.
        stream: gives the current stream of a device.
        hooks: has the hooks that Triton tells of launches. While there are any, nothing is started here.
        unused: how many null pointers a kernel gets after its parameters.
        device: "cuda", or "cpu" for tests.
        again: gives the gradients of some arguments of a call in the ordinary way.
        around: has the kernel compiled for what goes around the launches of plain calls.
        plan: says what plain calls of a kind launch (:func:`khot._kernels.triton.plans.plan`).
        cdfs: as for :func:`load`.
    """
    global start, remember, forget, launching
    extension = _extension()
    if extension is None:
        return
    if not in_use():
        extension.serve(0, cdfs)
    extension.use_driver(launch, stream, hooks, unused, device, again, around, plan)
    globals().update({name: getattr(extension, name) for name in ON_GPUS})
    start, remember, forget = extension.start, extension.remember, extension.forget
    launching = True


def _extension() -> Any:
    version = torch.__version__.split("+")[0].replace(".", "_")
    try:
        return importlib.import_module(f"khot._eager_{version}")
    except ImportError:
        return None
