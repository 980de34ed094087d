"""What the trials train with: images, resumable steps, minibatches, learning rates and networks."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from reproduce.harness import data
from reproduce.harness.study import Args, Checkpoint

__all__ = [
    "PRECISIONS",
    "SAVE_EVERY",
    "computing_in",
    "cosine",
    "cosine_over_last_half",
    "images",
    "linear_over_last_third",
    "lr_schedule",
    "minibatches",
    "mlp",
    "one_thread",
    "steps",
]

# Seconds of training between two checkpoints. A stop loses at most this much time.
SAVE_EVERY = 30.0


# What networks may compute in. Parameters, samples and losses are in float32.
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def images(args: Args) -> data.Images:
    """The images to learn from: the data set in ``data_dir``, or scikit-learn's digits if that is None.

    Raises:
        DataError: a file is missing or broken.
    """
    return _images(args.data_dir, args.dataset)


@functools.lru_cache(maxsize=1)
def _images(data_dir: Path | None, dataset: str) -> data.Images:
    if data_dir is None:
        return data.load_digits()
    if dataset == "mnist":
        return data.load_mnist(data_dir)
    return dataclasses.replace(data.load_mnist(data_dir / dataset), name=dataset)


def steps(checkpoint: Checkpoint, state: Mapping[str, Any], total: int) -> Iterator[int]:
    """The numbers of the training steps, from 0 or from where a stopped training was, up to total − 1.

    Between two steps, and at most once in :data:`SAVE_EVERY` seconds, saves ``state`` (modules, optimisers,
    schedules: whatever has a state dict) and torch's random state.

    Raises:
        FileError: the checkpoint is damaged, or cannot be read or written.
    """
    first = 0
    saved = checkpoint.load()
    if saved is not None:
        try:
            first = int(saved["step"])
            for name, part in state.items():
                part.load_state_dict(saved["state"][name])
            torch.set_rng_state(saved["rng"])
        except Exception as error:  # each kind of part has its own for a state that does not fit it
            raise checkpoint.damaged(error) from None
        if "cuda" in saved:
            torch.cuda.set_rng_state_all(saved["cuda"])
    last = time.monotonic()
    for step in range(first, total):
        if step > first and time.monotonic() - last >= SAVE_EVERY:
            content: dict[str, Any] = {
                "step": step,
                "state": {name: part.state_dict() for name, part in state.items()},
                "rng": torch.get_rng_state(),
            }
            if torch.cuda.is_available():
                content["cuda"] = torch.cuda.get_rng_state_all()
            checkpoint.save(content)
            last = time.monotonic()
        yield step


def minibatches(count: int, size: int, step: int, seed: int) -> Tensor:
    """Indices of the examples, out of ``count``, in the minibatch of this step.

    Each epoch is a permutation of the examples, cut into minibatches. The result depends on the arguments
    alone, so that nothing about the order has to be saved.
    """
    size = min(size, count)
    epoch, place = divmod(step, count // size)
    return _permutation(count, epoch, seed)[place * size : (place + 1) * size]


@functools.lru_cache(maxsize=1)
def _permutation(count: int, epoch: int, seed: int) -> Tensor:
    # a different generator for each pair of seed and epoch, as no run has 10⁶ epochs
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed * 1_000_000 + epoch))


def lr_schedule(optimizer: Optimizer, factor: Callable[[float], float], total: int) -> LambdaLR:
    """Multiplies the learning rates by ``factor(progress)``, where the progress goes from 0 to 1 in ``total``
    steps."""
    return LambdaLR(optimizer, lambda step: factor(step / total))


def linear_over_last_third(progress: float) -> float:
    """The factor of a learning rate: constant for two thirds of the steps, then falling linearly to 0."""
    return min(1.0, 3 * (1 - progress))


def cosine(progress: float) -> float:
    """The factor of a learning rate: from 1 to 0 along a cosine."""
    return (1 + math.cos(math.pi * progress)) / 2


def cosine_over_last_half(progress: float) -> float:
    """The factor of a learning rate: constant for half of the steps, then falling to 0 along a cosine.

    The cosine falls slowly at its end, so that the loss settles.
    """
    return 0.5 * (1 + math.cos(math.pi * max(0.0, 2 * progress - 1)))


def computing_in(precision: torch.dtype, device: torch.device) -> torch.autocast:
    """A context in which networks compute in that precision."""
    return torch.autocast(device.type, precision, enabled=precision != torch.float32)


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers of these widths with ReLU between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


@contextmanager
def one_thread() -> Generator[None]:
    """Run torch on one CPU thread.

    The matrices of the experiments are too small to gain from a second thread, and a second thread costs much
    time where another process wants the core. Also, one thread sums in the same order on every machine.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
