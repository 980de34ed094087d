"""Small systems of linear equations.

Forward mode of ``torch.linalg.solve_ex`` inside two vmaps, as in a vmap of a Hessian, is wrong for every
element of the batch but the first. So the solution is an operator with a rule of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from khot._core.dispatch import Rule, define

__all__ = ["solve"]


def solve(a: Tensor, b: Tensor) -> Tensor:
    """The solution x of a x = b. It does not wait for a device, as a check for errors would.

    Args:
        a: (*batch, n, n).
        b: (*batch, n).
    """
    x: Tensor = _solve(a, b)
    return x


class _Rule(Rule):
    own_dims = (2, 1)
    plain = True  # its derivatives are solutions again, so an expansion would not end

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], outputs: Tensor) -> tuple[Tensor, ...]:
        return inputs[0], outputs

    @staticmethod
    def vjp(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, Tensor]:
        a, x = ctx.saved_tensors
        db = solve(a.mT, grad)
        return -db.unsqueeze(-1) * x.unsqueeze(-2) if ctx.needs_input_grad[0] else None, db

    @staticmethod
    def jvp(ctx: Any, da: Tensor | None, db: Tensor | None) -> Tensor:
        a, x = ctx.saved_tensors
        right = torch.zeros_like(x) if db is None else db
        return solve(a, right if da is None else right - (da @ x.unsqueeze(-1)).squeeze(-1))


def _kernel(a: Tensor, b: Tensor) -> Tensor:
    return torch.linalg.solve_ex(a, b.unsqueeze(-1)).result.squeeze(-1)


_solve = define("solve", _kernel, "b", _Rule)
