"""Pictures of numbers, which are digits side by side. They have more classes than MNIST, and an order."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["draw", "pick"]


def pick(count: tuple[int, ...], digits: int, seed: int, of: int) -> Tensor:
    """Random indices of images, out of ``of`` images, one for each digit of each number.

    Returns:
        int64 indices with shape (*count, digits).
    """
    return torch.randint(of, (*count, digits), generator=torch.Generator().manual_seed(seed))


def draw(images: Tensor, labels: Tensor, shape: tuple[int, int], index: Tensor) -> tuple[Tensor, Tensor]:
    """The pictures and values of numbers.

    Args:
        images: (N, height · width).
        labels: the digits that the images show, (N,).
        shape: (height, width).
        index: the image of each digit of each number, the most significant first: (..., digits).

    Returns:
        Pictures (..., height, digits · width) and values (...).
    """
    pictures = images[index].unflatten(-1, shape).movedim(-3, -2).flatten(-2)
    place = 10 ** torch.arange(index.shape[-1] - 1, -1, -1)
    return pictures, (labels[index] * place).sum(-1)
