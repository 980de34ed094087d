"""What the layers check about their inputs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from khot._core import arguments
from khot._core.precision import autocast_dtype

__all__ = ["check_dtype", "check_width"]


def check_width(input: Tensor, width: int, layer: nn.Module, name: str = "input") -> None:
    """Raise unless it is a floating-point tensor whose last dim has the layer's size, because broadcasting
    would hide another size."""
    arguments.check_input(input, name, distributed=True)
    if input.shape[-1:] != (width,):
        raise ValueError(
            f"{name} must have shape (..., {width}) for this {type(layer).__name__}, but got shape "
            f"{tuple(input.shape)}"
        )


def check_dtype(input: Tensor, weight: Tensor, layer: nn.Module, name: str = "input") -> None:
    """Raise if a matrix product with the weight would refuse its dtype."""
    # autocast casts both
    fits = torch.promote_types(input.dtype, weight.dtype) == weight.dtype
    if not fits and autocast_dtype(input.device) is None:
        raise TypeError(
            f"{name} must have dtype {weight.dtype}, as the parameters of this {type(layer).__name__}, "
            f"but got {input.dtype}"
        )
