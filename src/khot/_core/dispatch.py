"""How an operator on rows is called: eagerly, under transforms, and while torch.compile traces."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import unwrap_dead_wrappers
from torch.autograd import Function, forward_ad

__all__ = ["below_autograd", "call", "register", "vmap_rows"]


def register(operator: str, backward: Any = None, save: Any = None) -> None:
    """Give the operator itself the batching rule and the reverse mode of its Function."""
    if backward is not None:
        torch.library.register_autograd(operator, backward, setup_context=save)
    namespace, _, name = operator.partition("::")
    overload = getattr(getattr(torch.ops, namespace), name)

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        return vmap_rows(overload, info, in_dims, *args)

    torch.library.register_vmap(operator, rule)


def call(rule: type[Function], operator: Any, *args: Any) -> Any:
    """Apply an operator in the cheapest form that serves.

    Dynamo rejects a Function that defines jvp, so while it traces the operator stands for itself, with what
    :func:`register` gave it. In eager mode ``rule``, a Function around it, adds forward mode; where no
    derivative of any kind is asked for, its forward alone will do.
    """
    if torch.compiler.is_compiling():
        return operator(*args)
    if torch._C._are_functorch_transforms_active():
        return rule.apply(*args)
    reverse = torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args)
    if not reverse and forward_ad._current_level < 0:  # tangents do not show in requires_grad
        return rule.forward(*args)
    # what Function.apply does outside of transforms, less 10 µs of binding the arguments by signature
    return super(Function, rule).apply(*unwrap_dead_wrappers(args))  # type: ignore[misc]


# Inside a Function the operator's own autograd rule has nothing to do, and costs more than a small row.
below_autograd = torch._C._AutoDispatchBelowAutograd


def vmap_rows(function: Any, info: Any, in_dims: tuple[Any, ...], x: Tensor, *args: Any) -> tuple[Any, Any]:
    """The vmap rule of an operator on rows: the mapped dimension becomes one more batch dim in front.

    Tensors among args broadcast with the batch shape.
    """
    x = x.expand(info.batch_size, *x.shape) if in_dims[0] is None else x.movedim(in_dims[0], 0)
    batch = x.dim() - 1

    def align(value: Any, dim: int | None) -> Any:
        if dim is None:
            return value
        value = value.movedim(dim, 0)
        return value.reshape(value.shape[0], *(1,) * (batch - value.dim()), *value.shape[1:])

    out = function(x, *(align(a, d) for a, d in zip(args, in_dims[1:], strict=True)))
    return out, (0,) * len(out) if isinstance(out, tuple) else 0
