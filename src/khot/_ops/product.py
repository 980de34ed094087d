"""Products whose results decide something, such as which keys a query attends to: in float32 at least."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from khot._core.dispatch import Rule, define
from khot._core.precision import without_autocast
from khot._kernels.reference import product as kernels

__all__ = ["product"]


def product(a: Tensor, b: Tensor, scale: float | None = None) -> Tensor:
    """scale · a @ b in float32, or in float64 if a or b is: of half precision and under autocast, too.

    Half precision has so few digits that other entries would be chosen, and scores above 65504 are infinite
    in float16. The gradients have the dtypes of a and b; they are products of these dtypes, as those of a @ b
    are, with sums in float32.

    Args:
        a: (..., n, d), or (d,) for a matrix b.
        b: (..., d, m); the batch dims broadcast.
    """
    if a.dtype != b.dtype or a.dtype not in (torch.float16, torch.bfloat16):
        wide = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
        a, b = (x if x.dtype == wide else x.to(wide) for x in (a, b))
        with without_autocast(a.device):
            return (a if scale is None else a * scale) @ b  # fewer entries than those of the product
    if b.dim() == 2 and a.dim() != 2:  # one product instead of many, and one gradient of b
        rows = _product(a.reshape(math.prod(a.shape[:-1]), a.shape[-1]), b)
        out: Tensor = rows.view(*a.shape[:-1], b.shape[-1])
    else:
        # the same number of dims, which the rule for vmap keeps
        out = _product(*(x[(None,) * (max(a.dim(), b.dim()) - x.dim())] for x in (a, b)))
    return out if scale is None else out * scale


class _Rule(Rule):
    plain = True  # its derivatives are products again, so an expansion would not end
    own_dims = (2, 2)

    @staticmethod
    def vjp(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        grad = grad.to(a.dtype)
        return (
            _product(grad, b.mT).sum_to_size(a.shape).to(a.dtype) if ctx.needs_input_grad[0] else None,
            _product(a.mT, grad).sum_to_size(b.shape).to(b.dtype) if ctx.needs_input_grad[1] else None,
        )

    @staticmethod
    def jvp(ctx: Any, da: Tensor | None, db: Tensor | None) -> Tensor:
        a, b = ctx.saved_tensors
        terms = [_product(*factors) for factors in ((da, b), (a, db)) if None not in factors]
        return terms[0] if len(terms) == 1 else terms[0] + terms[1]


def _fake(a: Tensor, b: Tensor) -> Tensor:
    return (a @ b).float()


def _widened(a: Tensor, b: Tensor) -> Tensor:
    return a.float() @ b.float()


_product = define("product", kernels.product, _fake, _Rule, decomposition=_widened)
