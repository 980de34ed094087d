"""The soft top-k of packed rows in one call of a kernel; on the CPU the hard mask, too.

:func:`soft_at_once` and :func:`hard_at_once` are what ``ways.by_shards`` asks first. They return None for
what the kernels do not know, and on the CPU where a row has no result: all else goes by groups of rows
(:mod:`khot._core.packed`), as do the second derivatives. On a GPU nobody waits for the offsets: the rows of
wrong ones are wrong, and a row without a result is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from khot import cdfs
from khot._core import arguments
from khot._core.arguments import Scalar
from khot._core.dispatch import gradient
from khot._core.torch_internals import (
    any_requires_grad,
    as_usual,
    below_autograd,
    forward_mode_is_on,
    has_cpu_kernel,
    transforms_are_on,
)
from khot._kernels import gpu
from khot.cdfs import CDF, CDFName

__all__ = ["hard_at_once", "soft_at_once"]

SOFT, HARD = "packed_soft_topk", "packed_topk_mask"
PLAIN = Tensor, torch.nn.Parameter
OFFSETS = torch.int32, torch.int64
REAL = arguments.FLOATS | arguments.INTEGERS

_ROWS = "Tensor x, Tensor offsets"
_CDF = "str cdf, float shape, str output"
_RESULTS = "(Tensor, Tensor, Tensor)"
torch.library.define("khot::packed_soft_topk", f"({_ROWS}, Tensor k, Tensor tau, {_CDF}) -> {_RESULTS}")
torch.library.define(
    "khot::packed_soft_topk_backward",
    f"(Tensor grad, {_ROWS}, Tensor hi, Tensor lo, Tensor tau, {_CDF}, Tensor? y) -> {_RESULTS}",
)
torch.library.define("khot::packed_topk_mask", f"({_ROWS}, Tensor k) -> Tensor")


def _fake(x: Tensor, offsets: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    hi = x.new_empty(offsets.shape[0] - 1, dtype=torch.float64)
    return torch.empty_like(x), hi, torch.empty_like(hi)


def _fake_backward(
    grad: Tensor, x: Tensor, offsets: Tensor, hi: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(hi), torch.empty_like(hi)


torch.library.register_fake("khot::packed_soft_topk", _fake)
torch.library.register_fake("khot::packed_soft_topk_backward", _fake_backward)
_soft_topk = torch.ops.khot.packed_soft_topk.default
_soft_topk_backward = torch.ops.khot.packed_soft_topk_backward.default
_topk_mask = torch.ops.khot.packed_topk_mask.default


def soft_at_once(
    values: Tensor,
    offsets: Tensor,
    by_groups: Callable[..., Tensor],
    *,
    k: Scalar,
    tau: Scalar,
    cdf: CDFName | CDF,
    hard: bool,
    output: str,
    **others: Any,
) -> Tensor | None:
    """The soft top-k of packed rows: y, log y, or the hard mask with the gradient of y."""
    F = cdfs.resolve(cdf)
    if not F.built_in or type(hard) is not bool or (type(tau) in arguments.NUMBERS and not tau):
        return None
    given = _taken(SOFT, values, offsets, (k, tau), **others)
    if given is None or (hard and not _serves(HARD, [values])):
        return None
    x, count, scale = given

    def otherwise(x: Tensor, k: Tensor, tau: Tensor) -> Tensor:
        return by_groups(x, k=k, tau=tau, largest=True, mask=None, hard=False)

    if torch.is_grad_enabled() and any_requires_grad(*given):
        y: Tensor | None = _SoftTopK.apply(x, count, scale, offsets, F.key, output, otherwise)
    else:
        y = _solved(x, count, scale, offsets, F.key, output)[0]
    if y is None or not hard:
        return y
    chosen = _hard(x, count, offsets)
    return None if chosen is None else chosen + (y - y.detach())


def hard_at_once(
    values: Tensor, offsets: Tensor, by_groups: Callable[..., Tensor], *, k: Scalar, **others: Any
) -> Tensor | None:
    """The mask of the ⌊k + ½⌋ largest entries of packed rows."""
    given = _taken(HARD, values, offsets, (k,), **others)
    return None if given is None else _hard(given[0], given[1], offsets)


def _taken(
    operator: str,
    values: Tensor,
    offsets: Tensor,
    numbers: tuple[Scalar, ...],
    *,
    dim: int,
    group: Any,
    largest: bool,
    mask: Tensor | None,
) -> list[Tensor] | None:
    """The scores, and the numbers for each row or for all, if the kernels take them."""
    tensors = [values, offsets, *[value for value in (mask, *numbers) if isinstance(value, Tensor)]]
    if (
        group is not None
        or type(dim) is not int
        or type(largest) is not bool
        or not _serves(operator, tensors)
    ):
        return None
    rows = offsets.shape
    if len(rows) != 1 or rows[0] < 2 or offsets.dtype not in OFFSETS:
        return None
    if values.dim() != 1 or not -1 <= dim <= 0 or not values.numel() or values.dtype not in arguments.FLOATS:
        return None
    x = values if largest else -values
    if mask is not None:
        if mask.shape != values.shape or mask.dtype != torch.bool:
            return None
        x = arguments.masked(x, mask, -math.inf)
    given = [x]
    for value in numbers:
        if isinstance(value, Tensor):
            if value.dtype not in REAL or (value.dim() and value.shape != (rows[0] - 1,)):
                return None
            given.append(value)
        elif type(value) in arguments.NUMBERS and 0 <= value < math.inf:
            given.append(arguments.constant(value, values, by_value=True))
        else:
            return None
    return given


def _serves(operator: str, tensors: list[Tensor]) -> bool:
    """Whether there is a kernel for these tensors, and nothing but reverse mode sees the call."""
    if forward_mode_is_on():
        return False
    if type(tensors[0]) in PLAIN and tensors[0].is_cpu:
        for t in tensors:
            if type(t) not in PLAIN or not t.is_cpu or t.layout != torch.strided:
                return False
        return as_usual() and has_cpu_kernel(f"khot::{operator}")
    for t in tensors:
        if not isinstance(t, Tensor) or not t.is_cuda or t.layout != torch.strided or arguments.is_dtensor(t):
            return False
        if t.device != tensors[0].device:
            return False
    known = operator in gpu.KERNELS and gpu.available()
    return known and not torch.compiler.is_compiling() and not transforms_are_on()


def _solved(
    x: Tensor, k: Tensor, tau: Tensor, offsets: Tensor, key: Any, output: str
) -> tuple[Tensor | None, Tensor, Tensor]:
    """The output, None where the offsets or a row are wrong, and the thresholds."""
    y, hi, lo = _soft_topk(x, offsets, k, tau, *key, output)
    return y if y.dim() == 1 else None, hi, lo


class _SoftTopK(Function):
    """The output, or None. Second derivatives are those of another function with the same result."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, k: Tensor, tau: Tensor, offsets: Tensor, key: Any, output: str, otherwise: Any
    ) -> Tensor | None:
        y, hi, lo = _solved(x, k, tau, offsets, key, output)
        if y is None:
            return None
        compiled = output == "y" and x.dtype == torch.float32 and x.is_cpu
        by_value = compiled and cdfs.resolve(*key).density_from_value
        kept = y if by_value and not ctx.needs_input_grad[2] else None
        ctx.save_for_backward(x, k, tau, offsets, hi, lo, kept)
        ctx.key, ctx.output, ctx.otherwise = key, output, otherwise
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, k, tau, offsets, hi, lo, y = ctx.saved_tensors
        found: list[Tensor | None]
        if torch.is_grad_enabled() or not _serves(SOFT, [grad]):
            recorded = torch.is_grad_enabled()
            with torch.enable_grad():
                again = ctx.otherwise(x, k, tau)
            asked = [t for t, wanted in zip((x, k, tau), ctx.needs_input_grad[:3], strict=True) if wanted]
            grads = iter(torch.autograd.grad(again, asked, grad, create_graph=recorded, allow_unused=True))
            found = [next(grads) if wanted else None for wanted in ctx.needs_input_grad[:3]]
        else:
            with below_autograd():
                dx, dk, dtau = _soft_topk_backward(grad, x, offsets, hi, lo, tau, *ctx.key, ctx.output, y)
            found = [dx, *(gradient(ctx, i, d, t.shape, t.dtype) for i, t, d in ((1, k, dk), (2, tau, dtau)))]
        return *found, None, None, None, None


def _hard(x: Tensor, k: Tensor, offsets: Tensor) -> Tensor | None:
    with below_autograd():
        y: Tensor = _topk_mask(x.detach(), offsets, k.detach())
    return y if y.dim() == 1 and not bool(y.isnan().any()) else None
