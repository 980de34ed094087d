"""Rows that are spread over processes: what the operators do with ``group=``.

Each process of the group calls the operator with its shard of every row and gets its shard of the result.
What is common to the shards, k and τ, is *replicated*: every process passes the same numbers, and gets the
same gradient, that of the whole loss, which is the sum of the processes' losses. So they stay equal when
every process takes the same step, and nothing has to be summed afterwards. A loss that is computed from such
a gradient (for a second derivative) is replicated, too, and counts once, not once a process.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from khot import cdfs, magnitude, topk
from khot._core import arguments
from khot._core.arguments import Scalar
from khot._core.dispatch import below_autograd, call
from khot._kernels import sharded as kernels
from khot._kernels.sharded import Shards
from khot.cdfs import CDF
from khot.counting import Row, pull

__all__ = ["agreed", "apply", "groups_of", "hard_mask", "names"]

Groups = tuple[dist.ProcessGroup, ...]  # more than one: the dimensions of a grid of processes
Prepared = TypeVar("Prepared", bound=tuple[Any, ...])


def apply(
    operator: Callable[..., Tensor], input: Any, k: Any, dim: int, group: Any, **options: Any
) -> Tensor:
    """An operator on shards of rows: on tensors, with the process group that has them, or on DTensors."""
    if hasattr(input, "placements"):
        from khot._core import dtensor

        if group is not None:
            raise TypeError("group must be None for a DTensor, which knows its own, but got one")
        return dtensor.apply(operator, input, k, dim, **options)
    return _OPERATORS[operator.__name__](input, k, dim, groups=groups_of(group), **options)


def groups_of(group: Any) -> Groups:
    """What users pass as group, checked."""
    groups = group if isinstance(group, tuple) else (group,)
    for each in groups:
        if not isinstance(each, dist.ProcessGroup):
            raise TypeError(f"group must be a torch.distributed.ProcessGroup, but got {type(each).__name__}")
    return groups


# ------------------------------------------------------------------------------ the operators


def _soft_topk(
    input: Tensor,
    k: Scalar,
    dim: int,
    *,
    tau: Scalar,
    cdf: str | CDF,
    largest: bool,
    mask: Tensor | None,
    hard: bool = False,
    output: str = "y",
    groups: Groups,
) -> Tensor:
    """:func:`khot.soft_topk`, or with output "log" :func:`khot.log_soft_topk`, of shards."""

    def prepare() -> tuple[Tensor, Tensor, CDF]:
        x = arguments.rows(input, dim, mask, largest)
        arguments.per_row(k, "k", x, low=0)
        return x, arguments.per_row(tau, "tau", x, low=0, low_open=True), cdfs.resolve(cdf)

    (x, tau, F), lengths = agreed(groups, prepare, k, tau, f"{cdf}, largest={largest}, {output}, {hard}")
    k = arguments.per_row(k, "k", x, low=0, high=sum(lengths))
    y = _soft(x, k, tau, F, output, hard, groups)
    return arguments.unrows(y, input, dim)


def _soft(x: Tensor, k: Tensor, tau: Tensor, F: CDF, output: str, hard: bool, groups: Groups) -> Tensor:
    args = (x, k, tau, F.name, F.shape, output, names(groups))
    y: Tensor = call(_ThresholdMap, kernels.soft_topk._opoverload, *args)[0]
    if hard:
        y = hard_mask(x.detach(), k.detach(), groups) + (y - y.detach())
    return y


def _ot_topk(
    input: Tensor,
    k: Scalar,
    dim: int,
    *,
    epsilon: Scalar,
    normalize: bool,
    largest: bool,
    mask: Tensor | None,
    hard: bool,
    groups: Groups,
) -> Tensor:
    """:func:`khot.ot_topk` of shards."""

    def prepare() -> tuple[Tensor, Tensor]:
        x = arguments.rows(input, dim, mask, largest)
        arguments.per_row(k, "k", x, low=0)
        return x, arguments.per_row(epsilon, "epsilon", x, low=0, low_open=True).double()

    options = f"largest={largest}, normalize={normalize}, {hard}"
    (x, epsilon), lengths = agreed(groups, prepare, k, epsilon, options)
    k = arguments.per_row(k, "k", x, low=0, high=sum(lengths))
    cost = None
    if normalize:
        costs = topk.costs(x)
        cost = costs.amax(-1) if x.shape[-1] else costs.sum(-1)
        (slots,) = _Total.apply(names(groups), Shards(names(groups)).one_a_process(cost))
        cost = slots.amax(-1)
    y = _soft(x, k, topk.ot_temperature(epsilon, cost), cdfs.Logistic(), "y", hard, groups)
    return arguments.unrows(y, input, dim)


def _topk_mask(
    input: Tensor, k: Scalar, dim: int, *, largest: bool, mask: Tensor | None, groups: Groups
) -> Tensor:
    """:func:`khot.topk_mask` of shards; of equal entries, those of the lowest rank come first."""

    def prepare() -> tuple[Tensor]:
        x = arguments.rows(input, dim, mask, largest).detach()
        arguments.per_row(k, "k", x, low=0)
        return (x,)

    (x,), lengths = agreed(groups, prepare, k, None, f"largest={largest}")
    y = hard_mask(x, arguments.per_row(k, "k", x, low=0, high=sum(lengths)).detach(), groups)
    return arguments.unrows(y, input, dim)


def hard_mask(x: Tensor, k: Tensor, groups: Groups) -> Tensor:
    """The hard mask of shards of rows along the last dim."""
    y, found = kernels.topk_mask(x, k, names(groups))
    if not torch.compiler.is_compiling():
        arguments.explain_nan(found, x, k, reduce=_counted(names(groups)))
    return y


def _soft_topk_magnitude(
    input: Tensor,
    k: int | Tensor,
    dim: int,
    *,
    tau: Scalar,
    p: float,
    rescale: bool,
    mask: Tensor | None,
    groups: Groups,
) -> Tensor:
    """:func:`khot.soft_topk_magnitude` of shards."""

    def prepare() -> tuple[Tensor, Tensor, Tensor]:
        arguments.check_number(p, "p", low=1.15, high=2.0)
        s, sign = magnitude.absolute(input, dim, mask)
        arguments.per_row(k, "k", s, low=0, integer=True)
        return s, sign, arguments.per_row(tau, "tau", s, low=0, low_open=True)

    (s, sign, tau), lengths = agreed(groups, prepare, k, tau, f"p={p}, {rescale}")
    k = arguments.per_row(k, "k", s, low=0, high=sum(lengths), integer=True).detach()
    args = (s, k, tau, float(p), names(groups))
    y, hi, lo = call(_Magnitude, kernels.soft_topk_magnitude._opoverload, *args)
    if rescale:
        lo, tau_here = _Share.apply(names(groups), lo, tau.to(hi.dtype).expand(hi.shape))
        y = magnitude.rescaled(s, hi, lo, tau_here, p)
    return arguments.unrows(y * sign, input, dim)


def names(groups: Groups) -> str:
    return ",".join(group.group_name for group in groups)


_OPERATORS: dict[str, Callable[..., Tensor]] = {
    "soft_topk": _soft_topk,
    "log_soft_topk": functools.partial(_soft_topk, output="log"),
    "ot_topk": _ot_topk,
    "topk_mask": _topk_mask,
    "soft_topk_magnitude": _soft_topk_magnitude,
}


# -------------------------------------------------------------------------------- agreement


def agreed(
    groups: Groups, prepare: Callable[[], Prepared], k: Any, tau: Any, options: str
) -> tuple[Prepared, list[float]]:
    """What prepare() returns, its first tensor being this shard, and the lengths of all shards; or the error
    that one of the processes met, on all of them.

    One all-reduce of three numbers a process. Without it the others would wait for the one with the error,
    and so would processes whose arguments lead to different passes. While tracing, errors are those of the
    trace, and lengths stay unknown.
    """
    if torch.compiler.is_compiling():
        return prepare(), [math.inf]
    prepared, error, call, length = None, None, "", 0
    try:
        prepared = prepare()
        x = prepared[0]
        length = x.shape[-1]
        call = f"rows {tuple(x.shape[:-1])} of {x.dtype}, k={_text(k)}, tau={_text(tau)}, {options}"
    except (TypeError, ValueError, IndexError) as caught:
        error = caught
    # on a device of the group's, whatever the input may be
    device = dist.distributed_c10d._get_object_coll_device(groups[0])
    facts = [float(error is not None), float(zlib.crc32(call.encode())), float(length)]
    shards = Shards(names(groups))
    (status,) = shards([shards.one_a_process(torch.tensor(facts, dtype=torch.float64, device=device))])
    failed, calls, lengths = status.tolist()
    if prepared is None or any(failed) or len(set(calls)) > 1:
        met: list[Any] = [error or call]
        for group in reversed(groups):
            parts: list[Any] = [None] * group.size()
            dist.all_gather_object(parts, met, group=group)
            met = [one for part in parts for one in part]
        for one in met:
            if isinstance(one, Exception):
                raise one
        other = next(i for i, one in enumerate(met) if one != met[0])
        raise ValueError(
            f"all processes of group must pass the same arguments but for their shards of the rows, but "
            f"rank 0 has {met[0]}; rank {other} has {met[other]}"
        )
    return prepared, lengths


def _text(value: Any) -> str:
    """Numbers a row as text; the shape alone of those that cannot be read without waiting."""
    if isinstance(value, Tensor):
        return str(value.tolist() if arguments.readable(value) else tuple(value.shape))
    return str(value)


# -------------------------------------------------------------------------- autograd rules


class _Total(torch.autograd.Function):
    """Sums over each shard → sums over the rows, which are replicated, and so are their gradients."""

    @staticmethod
    def forward(ctx: Any, group: str, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(Shards(group)(values))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, *_Share.apply(ctx.group, *grads)


class _Share(torch.autograd.Function):
    """Replicated numbers → the same, for use by this shard: gradients are those of all shards, summed."""

    @staticmethod
    def forward(ctx: Any, group: str, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(v.view_as(v) for v in values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, *_Total.apply(ctx.group, *grads)


def _row(group: str, near: tuple[Tensor, Tensor] | None = None) -> Row:
    return Row(
        lambda values: list(_Total.apply(group, *values)),
        lambda values: list(_Share.apply(group, *values)),
        near,
    )


def _counted(group: str) -> Callable[[Tensor], Tensor]:
    return lambda count: Shards(group)([count])[0]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, k, tau, name, shape, ctx.kind, ctx.group = inputs
    ctx.save_for_backward(x, tau, *output[1:])
    ctx.k_like, ctx.cdf = (k.shape, k.dtype), (name, shape)


def _backward(ctx: Any, grad: Tensor, _: Any, grad_lo: Tensor, *__: Any) -> tuple[Any, ...]:
    x, tau, hi, lo, *near = ctx.saved_tensors
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        row = _row(ctx.group, near)
        dx, dk, dtau = pull(grad, grad_lo, x, hi, lo, tau, cdfs.resolve(*ctx.cdf), ctx.kind, row)
    else:
        dx, dk, dtau = kernels.soft_topk_backward(
            grad, grad_lo, x, hi, lo, *near, tau, *ctx.cdf, ctx.kind, ctx.group
        )
    k_shape, k_dtype = ctx.k_like
    grad_k = dk.sum_to_size(k_shape).to(k_dtype) if ctx.needs_input_grad[1] else None
    grad_tau = dtau.sum_to_size(tau.shape).to(tau.dtype) if ctx.needs_input_grad[2] else None
    return dx, grad_k, grad_tau, None, None, None, None


kernels.soft_topk.register_autograd(_backward, setup_context=_save)


class _ThresholdMap(torch.autograd.Function):
    """As the rule of the same name in :mod:`khot.soft_count`, in reverse mode only."""

    @staticmethod
    def forward(
        x: Tensor, k: Tensor, tau: Tensor, name: str, shape: float, kind: str, group: str
    ) -> tuple[Tensor, ...]:
        with below_autograd():
            output: tuple[Tensor, ...] = kernels.soft_topk(x, k, tau, name, shape, kind, group)
        arguments.explain_nan(output[1], x, k, tau, reduce=_counted(group))
        return output

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _save(ctx, inputs, output)
        ctx.mark_non_differentiable(output[1], *output[3:])

    backward = staticmethod(_backward)


def _save_magnitude(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    s, k, tau, ctx.p, ctx.group = inputs
    y, hi, lo = output
    ctx.save_for_backward(s, y, k, hi, lo, tau)


def _magnitude_backward(ctx: Any, grad: Tensor, _: Any, grad_lo: Tensor) -> tuple[Any, ...]:
    s, y, k, hi, lo, tau = ctx.saved_tensors
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        ds, dtau = magnitude.pull(grad, grad_lo, s, y, k, hi, lo, tau, ctx.p, _row(ctx.group))
    else:
        ds, dtau = kernels.soft_topk_magnitude_backward(grad, grad_lo, s, y, k, hi, lo, tau, ctx.p, ctx.group)
    grad_tau = dtau.sum_to_size(tau.shape).to(tau.dtype) if ctx.needs_input_grad[2] else None
    return ds, None, grad_tau, None, None


kernels.soft_topk_magnitude.register_autograd(_magnitude_backward, setup_context=_save_magnitude)


class _Magnitude(torch.autograd.Function):
    """As the rule of the same name in :mod:`khot.magnitude`, in reverse mode only."""

    @staticmethod
    def forward(s: Tensor, k: Tensor, tau: Tensor, p: float, group: str) -> tuple[Tensor, Tensor, Tensor]:
        with below_autograd():
            output: tuple[Tensor, Tensor, Tensor] = kernels.soft_topk_magnitude(s, k, tau, p, group)
        arguments.explain_nan(output[1], s, k, tau, integer=True, reduce=_counted(group))
        return output

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        _save_magnitude(ctx, inputs, output)
        ctx.mark_non_differentiable(output[1])

    backward = staticmethod(_magnitude_backward)
