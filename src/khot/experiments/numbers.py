"""Pictures of numbers, made by setting digits side by side: more classes, and an order, from MNIST."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["draw", "pick"]


def pick(count: tuple[int, ...], digits: int, seed: int, of: int) -> Tensor:
    """Which of ``of`` images the digits of that many numbers are: int64, (*count, digits)."""
    return torch.randint(of, (*count, digits), generator=torch.Generator().manual_seed(seed))


def draw(images: Tensor, labels: Tensor, shape: tuple[int, int], index: Tensor) -> tuple[Tensor, Tensor]:
    """The pictures and values of numbers.

    Args:
        images: (N, height · width).
        labels: their digits, (N,).
        shape: (height, width).
        index: which images are the digits of each number, the most significant first: (..., digits).

    Returns:
        Pictures (..., height, digits · width) and values (...).
    """
    pictures = images[index].unflatten(-1, shape).movedim(-3, -2).flatten(-2)
    place = 10 ** torch.arange(index.shape[-1] - 1, -1, -1)
    return pictures, (labels[index] * place).sum(-1)
