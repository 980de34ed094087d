"""Time and memory of several calls, measured side by side in one run.

The speed of a shared machine changes from run to run, so only ratios within a run are comparable. The calls
take turns, each round in another order, because a call that follows a large one finds the caches cold. The
time of a call is the median over its rounds.
"""

from __future__ import annotations

import ctypes
import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["Call", "Clock", "clock", "forward_backward", "medians", "peak_memory"]

Call = Callable[[], Any]
Clock = Callable[[], float]

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # glibc's numbers of these options


def clock(cpu_time: bool = False) -> Clock:
    """A clock of wall time, or of the CPU time of one thread, which other processes disturb less."""
    if not cpu_time:
        return time.perf_counter
    torch.set_num_threads(1)
    return time.thread_time


def _keep_freed_memory(keep: bool) -> None:
    """Whether glibc keeps the memory that is freed, or gives every large block back to the system.

    By default it gives back blocks of more than 32 MB, and the end of its heap once that is large. Two calls
    may then differ only in the page faults of the memory that they get anew each time.
    """
    if not CLEAR_REFS.exists() or not hasattr(libc := ctypes.CDLL(None), "mallopt"):  # only glibc has it
        return
    libc.mallopt(M_MMAP_MAX, 0 if keep else 1 << 16)
    libc.mallopt(M_MMAP_THRESHOLD, 1 << (25 if keep else 16))  # 2^25 is the largest that glibc takes
    libc.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1 if keep else 1 << 17)
    if keep:  # 1 GB to carve from: a freed block into which a small one has settled fits no more
        torch.ones(1 << 28)


def medians(
    calls: Mapping[str, Call], *, seconds: float = 1.0, rounds: int = 300, clock: Clock = time.perf_counter
) -> dict[str, float]:
    """The median seconds of each call, without the page faults of memory that it had before.

    From here on the process keeps the memory that it frees (glibc only; 1 to 2 GB).

    Args:
        calls: what to time, by name.
        seconds: the time for each call; a call that has used it up takes no part in later rounds, but in
            three at least, as one run may take a hundred times as long as the others. The first run of each
            call is a warm-up and does not count, unless it takes more than ten times ``seconds``; such a call
            is not run again.
        rounds: the largest number of rounds.
        clock: see :func:`clock`.
    """

    def spent(call: Call) -> float:
        start = clock()
        call()
        return clock() - start

    _keep_freed_memory(True)
    times = {name: [t for t in [spent(call)] if t >= 10 * seconds] for name, call in calls.items()}
    slow = {name for name, found in times.items() if found}
    order, shuffle = list(calls.items()), random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name, call in order:
            if name not in slow and (len(times[name]) < 3 or sum(times[name]) < seconds):
                times[name].append(spent(call))
    return {name: statistics.median(t) for name, t in times.items()}


def forward_backward(function: Callable[..., Tensor], *inputs: Tensor) -> Call:
    """A call that runs function(*inputs) and its backward pass, from fixed random gradients.

    Inputs of floating-point dtype are copied, and gradients are computed for them.
    """
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    wanted = [x for x in leaves if x.requires_grad]
    with torch.no_grad():
        y = function(*leaves)
    generator = torch.Generator(y.device).manual_seed(1)
    grad = torch.randn(y.shape, generator=generator, device=y.device).to(y)

    def call() -> tuple[Tensor, ...]:
        return torch.autograd.grad(function(*leaves), wanted, grad)

    return call


def peak_memory(call: Call) -> int | None:
    """The largest growth of the process in bytes while the call runs, including its results; None off Linux.

    The accuracy is about 0.1 MB. During the measurement every tensor gets its own memory map, so that free
    space in the heap does not hide a tensor. It is the least of three runs, since whatever else happens in
    the process at the same time can only add to a run.
    """
    if not CLEAR_REFS.exists():
        return None
    _keep_freed_memory(False)
    call()  # so that what is loaded or compiled on first use is not counted
    gc.collect()
    gc.freeze()  # each run collects what it leaves, and need not look at a million older objects
    return min(_growth(call) for _ in range(3))


def _growth(call: Call) -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    CLEAR_REFS.write_text("5")  # the kernel's way to reset the peak
    before = _status("VmRSS")
    result = call()
    peak = _status("VmHWM")
    del result
    return max(0, peak - before)


def _status(field: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])
