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
M_MMAP_THRESHOLD = -3  # malloc.h


def clock(cpu_time: bool = False) -> Clock:
    """A clock of wall time, or of the CPU time of one thread, which other processes disturb less."""
    if not cpu_time:
        return time.perf_counter
    torch.set_num_threads(1)
    return time.thread_time


def _settle_allocator() -> None:
    """Bring glibc's allocator into the state of a training process, which keeps up to 64 MB of freed memory.

    Its threshold for that is twice the largest block below 32 MB that was freed so far. With a low threshold,
    a call whose results are slightly larger than those of another gives all its memory back each time, and
    its time includes the page faults.
    """
    torch.zeros((1 << 23) - 4_096)  # freed at once


def medians(
    calls: Mapping[str, Call], *, seconds: float = 1.0, rounds: int = 300, clock: Clock = time.perf_counter
) -> dict[str, float]:
    """The median seconds of each call.

    Args:
        calls: what to time, by name.
        seconds: the time for each call; a call that has used it up takes no part in later rounds. The first
            run of each call is a warm-up and does not count, unless it takes more than ten times ``seconds``.
        rounds: the largest number of rounds.
        clock: see :func:`clock`.
    """

    def spent(call: Call) -> float:
        start = clock()
        call()
        return clock() - start

    _settle_allocator()
    times = {name: [t for t in [spent(call)] if t >= 10 * seconds] for name, call in calls.items()}
    order, shuffle = list(calls.items()), random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name, call in order:
            if sum(times[name]) < seconds:
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
    space in the heap does not hide a tensor. The allocator's threshold for that stays fixed afterwards, so
    measure times before memory.
    """
    if not CLEAR_REFS.exists():
        return None
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 16)
    call()  # so that what is loaded or compiled on first use is not counted
    gc.collect()
    libc.malloc_trim(0)
    CLEAR_REFS.write_text("5")  # the kernel's way to reset the peak
    before = _status("VmRSS")
    result = call()
    peak = _status("VmHWM")
    del result
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 25)  # the largest value of glibc's own threshold
    return max(0, peak - before)


def _status(field: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])
