"""What the layers check about their inputs."""

from __future__ import annotations

from torch import Tensor, nn

from khot._core import arguments

__all__ = ["check_width"]


def check_width(input: Tensor, width: int, layer: nn.Module, name: str = "input") -> None:
    """Raise unless it is a floating-point tensor whose last dim has the layer's size, because broadcasting
    would hide another size."""
    arguments.check_input(input, name)
    if input.shape[-1:] != (width,):
        raise ValueError(
            f"{name} must have shape (..., {width}) for this {type(layer).__name__}, but got shape "
            f"{tuple(input.shape)}"
        )
