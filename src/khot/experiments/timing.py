"""Time and memory of calls beside one another, in one run.

A shared machine is never equally fast twice, so what counts are ratios: the calls take turns, round after
round and each round in another order, since a call that follows a large one finds the caches cold. Each is
summed up by its median.
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
    """Wall time; or one thread and its CPU time, which others on the machine disturb less."""
    if not cpu_time:
        return time.perf_counter
    torch.set_num_threads(1)
    return time.thread_time


def settle_allocator() -> None:
    """Bring glibc to where a training process soon is: it keeps freed memory of up to 64 MB.

    Its threshold is twice the largest block under 32 MB that was freed so far. Below it a call whose results
    outgrow those of another by a few numbers a row hands all its memory back each time, and pays for the
    page faults.
    """
    torch.zeros((1 << 23) - 4_096)  # freed at once


def medians(
    calls: Mapping[str, Call], *, seconds: float = 1.0, rounds: int = 300, clock: Clock = time.perf_counter
) -> dict[str, float]:
    """The median seconds of each call.

    Args:
        calls: what to time, by name.
        seconds: of time for each call; one that has used them up sits out the later rounds. The first call
            of each does not count, unless it takes ten times as long, and repeating it nearly doubles that.
        rounds: at most.
        clock: see :func:`clock`.
    """

    def spent(call: Call) -> float:
        start = clock()
        call()
        return clock() - start

    settle_allocator()
    times = {name: [t for t in [spent(call)] if t >= 10 * seconds] for name, call in calls.items()}
    order, shuffle = list(calls.items()), random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name, call in order:
            if sum(times[name]) < seconds:
                times[name].append(spent(call))
    return {name: statistics.median(t) for name, t in times.items()}


def forward_backward(function: Callable[..., Tensor], *inputs: Tensor) -> Call:
    """A call of function(*inputs) and of its backward from random gradients, anew each time.

    Inputs of floating-point dtype are copied and get gradients.
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
    """Bytes by which the process grows at most while the call runs, results included; None off Linux.

    Good to about 0.1 MB. Meanwhile every tensor is mapped and unmapped on its own, so that no hole in the
    heap hides or doubles one. The allocator's threshold for that stays fixed afterwards, so measure times
    first.
    """
    if not CLEAR_REFS.exists():
        return None
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 16)
    call()  # what is loaded or compiled on first use is not counted
    gc.collect()
    libc.malloc_trim(0)
    CLEAR_REFS.write_text("5")  # the kernel's way to reset the peak
    before = _status("VmRSS")
    result = call()
    peak = _status("VmHWM")
    del result
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 25)  # where glibc's own, growing threshold ends
    return max(0, peak - before)


def _status(field: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])
