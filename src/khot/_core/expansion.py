"""An operator under transforms of torch.func that are compiled together with it.

Dynamo rejects a Function that defines jvp, and torch has no forward mode for a registered operator: it would
drop the tangents. So the operator is applied to constants, and a term is added whose value is 0 and whose
derivatives are those of the operator. It solves dy/ds = J(x₀ + sδ, y)·δ from s = 0 to 1, where J·δ is the
rule's jvp, x₀ the arguments as constants, and δ = x − x₀ is 0 but carries the derivatives of x. A
Runge–Kutta method of order p has an error of order δ^(p+1), so that all derivatives up to order p are exact.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["MOST_LEVELS", "expand", "expanded"]

#: Derivatives that can be taken inside a compiled region; one more can be taken outside.
MOST_LEVELS = 3

# The points s of each stage, each of which starts from the slope before it, and the weights of the slopes:
# the methods of Heun (orders 2 and 3) and Kutta (order 4), by the number of derivatives inside.
_METHODS = {
    1: ((0.0, 1.0), (1 / 2, 1 / 2)),
    2: ((0.0, 1 / 3, 2 / 3), (1 / 4, 0.0, 3 / 4)),
    3: ((0.0, 1 / 2, 1 / 2, 1.0), (1 / 6, 1 / 3, 1 / 3, 1 / 6)),
}


class _Context:
    """What a rule expects of torch's context."""

    group = ""
    saved_tensors: tuple[Tensor | None, ...]
    needs_input_grad: tuple[bool, ...]


def expanded(operator: Any, levels: int, args: tuple[Any, ...]) -> Any:
    """The registered operator under transforms that are traced with it."""
    rule = operator.rule
    if rule is not None and rule.plain:
        return operator.kernel(*args)
    fixed = tuple(_constant(a.detach()) if isinstance(a, Tensor) else a for a in args)
    output = operator.overload(*fixed)
    if rule is None or not rule.differentiable:
        return output
    if not isinstance(output, tuple):
        return expand(rule, levels, args, fixed, (output,))[0]
    return expand(rule, levels, args, fixed, output)


@torch.library.custom_op("khot::constant", mutates_args=())
def _constant(x: Tensor) -> Tensor:
    """A copy that carries no tangent; ``detach`` removes what reverse mode needs, but keeps the tangent."""
    return x.clone()


@_constant.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@_constant.register_vmap
def _(info: Any, in_dims: tuple[Any, ...], x: Tensor) -> tuple[Tensor, Any]:
    return _constant(x), in_dims[0]


def expand(
    rule: Any, levels: int, args: tuple[Any, ...], fixed: tuple[Any, ...], outputs: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """The outputs with the derivatives of the operator.

    Args:
        rule: the operator's rule.
        levels: how many derivatives are being taken.
        args: the operator's arguments.
        fixed: the same as constants.
        outputs: the operator's outputs for these constants.
    """
    if levels > MOST_LEVELS:
        raise RuntimeError(
            f"khot supports at most {MOST_LEVELS} nested derivatives of torch.func inside torch.compile, but "
            f"got {levels}; take the derivatives outside of the compiled function"
        )
    points, weights = _METHODS[levels]
    change = tuple(_change(a, b) for a, b in zip(args, fixed, strict=True))
    slopes: list[Any] = []
    for s in points:
        at = tuple(b if d is None else b + s * d for b, d in zip(fixed, change, strict=True))
        start = _moved(rule, outputs, [(s, slopes[-1])] if slopes else [])
        ctx = _Context()
        ctx.needs_input_grad = (True,) * len(args)
        ctx.saved_tensors = rule.save(ctx, at, start[0] if len(start) == 1 else start)
        slope = rule.jvp(ctx, *change)
        slopes.append(slope if isinstance(slope, tuple) else (slope,))
    return _moved(rule, outputs, list(zip(weights, slopes, strict=True)))


def _change(value: Any, fixed: Any) -> Tensor | None:
    """The value minus its constant; 0 and without derivatives where it is not finite."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return None
    return torch.where(fixed.isfinite(), value - fixed, 0)


def _moved(rule: Any, outputs: tuple[Tensor, ...], terms: list[tuple[float, Any]]) -> tuple[Tensor, ...]:
    """The outputs plus weights times slopes, except for those that are constants."""
    moved = []
    for i, output in enumerate(outputs):
        if i not in rule.constants:
            for weight, slope in terms:
                if weight and slope[i] is not None:
                    output = output + (weight * slope[i]).to(output.dtype)
        moved.append(output)
    return tuple(moved)
