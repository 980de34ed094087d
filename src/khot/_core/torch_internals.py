"""torch's private names: the only file that touches them, so that a new torch has one place to break.

Each of them has no public counterpart (torch 2.10 to 2.14).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._functorch.utils import unwrap_dead_wrappers
from torch.autograd import Function, forward_ad

__all__ = [
    "apply_outside_transforms",
    "below_autograd",
    "collective_device",
    "forward_mode_is_on",
    "is_transformed",
    "process_group",
    "transforms_are_on",
]

# A context in which an operator's own autograd rule is skipped. Inside a Function that rule has nothing to
# do, and it costs more than the kernel of a small row.
below_autograd = torch._C._AutoDispatchBelowAutograd


def transforms_are_on() -> bool:
    """Whether a transform of torch.func is being applied."""
    return torch._C._are_functorch_transforms_active()


def is_transformed(value: Tensor) -> bool:
    """Whether the tensor stands for many, or for a value and its tangent, under a transform of torch.func."""
    return torch._C._functorch.is_functorch_wrapped_tensor(value)


def forward_mode_is_on() -> bool:
    """Whether tensors may carry tangents. They do not show in ``requires_grad``."""
    return forward_ad._current_level >= 0


def apply_outside_transforms(function: type[Function], args: tuple[Any, ...]) -> Any:
    """What ``function.apply`` does outside of transforms, less 10 µs of binding arguments by signature."""
    return super(Function, function).apply(*unwrap_dead_wrappers(args))  # type: ignore[misc]


def process_group(name: str) -> dist.ProcessGroup:
    """The process group of that name."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type,attr-defined]


def collective_device(group: dist.ProcessGroup) -> torch.device:
    """A device that the group's backend can communicate from."""
    return torch.device(dist.distributed_c10d._get_object_coll_device(group))
