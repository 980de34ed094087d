"""Four processes that share rows. They are started once, with a process group for each size up to four.

`run(world, work, *args)` lets the first `world` processes call ``work(group, *args)``, a function of a module
that they can import, and returns their results in the order of their ranks. World 0 is a group of all
processes that a test may break.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["MOST", "renew", "run"]

MOST = 4
PATIENCE = 60.0  # seconds for a collective; only a busy machine takes as long
START = 240.0  # seconds for a result, including the start of the processes


def run(world: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    ends, stop = _pool()
    task = pickle.dumps((world, work, args))
    results, errors = [], []
    for end in ends[: world or MOST]:
        end.send_bytes(task)
    for rank, end in enumerate(ends[: world or MOST]):
        if end.poll(START):
            right, result = pickle.loads(end.recv_bytes())
            (results if right else errors).append(result)
        else:
            errors.append(f"rank {rank} of {world} does not answer")
    if errors:  # more errors may follow, and groups are broken: the next call starts new processes
        stop()
        _pool.cache_clear()
        raise RuntimeError("\n".join(errors))
    return results


def renew() -> None:
    """Let the next call start new processes: after many groups gloo may not connect."""
    _pool()[1]()
    _pool.cache_clear()


@functools.cache
def _pool() -> tuple[list[Connection], Callable[[], None]]:
    # a server imports torch, its tracer and khot once, and is forked before they start a thread
    forks = "forkserver" in multiprocessing.get_all_start_methods()
    start = multiprocessing.get_context("forkserver" if forks else "spawn")
    if forks:
        start.set_forkserver_preload(["khot", "torch._dynamo", "torch.distributed.tensor", "shards"])
    folder = tempfile.TemporaryDirectory()
    ends, processes = [], []
    for rank in range(MOST):
        ours, theirs = start.Pipe()
        process = start.Process(target=_serve, args=(rank, folder.name, theirs), daemon=True)
        process.start()
        theirs.close()
        ends.append(ours)
        processes.append(process)

    def stop() -> None:
        atexit.unregister(stop)
        for end in ends:
            end.close()
        for process in processes:
            process.join(2)
            process.kill()
        folder.cleanup()

    atexit.register(stop)
    return ends, stop


def _serve(rank: int, folder: str, end: Connection) -> None:
    torch.set_num_threads(1)
    wait = timedelta(seconds=PATIENCE)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=MOST, timeout=wait
    )
    groups = [dist.new_group(list(range(world or MOST)), timeout=wait) for world in range(MOST + 1)]
    while True:
        try:
            world, work, args = pickle.loads(end.recv_bytes())
        except EOFError:
            return
        try:
            answer = True, work(groups[world], *args)
        except BaseException:
            answer = False, f"rank {rank} of {world}:\n{traceback.format_exc()}"
        end.send_bytes(pickle.dumps(answer))
