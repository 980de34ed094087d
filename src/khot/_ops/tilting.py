"""The design P(S) ∝ exp(Σ_{i∈S} θ_i) on k-subsets, as independent trials given that their sum is k.

The trials' logits are z = θ − t, with t from the sigmoid top-k: σ(z) sums to k, so that the sum of the trials
is k with nearly the largest probability possible. The design does not depend on t, which is therefore a
constant in every derivative.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from khot._core import arguments
from khot._core.torch_internals import differentiable
from khot._kernels.reference import poisson_binomial
from khot._kernels.reference.poisson_binomial import Frequencies
from khot._ops import poisson_binomial as operators

__all__ = [
    "Tilted",
    "covariance_product",
    "in_front",
    "inclusion",
    "log_size_prob",
    "mixture",
    "tilt_rows",
]


class Tilted(NamedTuple):
    """Independent trials; given that their sum is k, they are the design. Only change is not constant."""

    k: Tensor  # of the batch shape
    hi: Tensor  # t = hi + lo
    lo: Tensor
    z: Tensor  # θ − t, infinite for units that are certain
    change: Tensor  # θ minus its detached value: 0, with the derivatives of θ; a constant 0 for infinite θ


def tilt_rows(theta: Tensor, k: Tensor) -> Tilted:
    """The trials for θ (*batch, n) and integers k (*batch), both in float64."""
    value = theta.detach()
    one = value.new_ones(())
    _, hi, lo = torch.ops.khot.soft_topk.default(value, k, one, "logistic", 0.0, "threshold")
    arguments.explain_nan(hi, value, k, integer=True)
    z = (value - hi.unsqueeze(-1)) - lo.unsqueeze(-1)
    infinite = value.isinf()
    change = theta.masked_fill(infinite, 0) - value.masked_fill(infinite, 0)
    return Tilted(k, hi, lo, z, change)


def log_size_prob(trials: Tilted) -> Tensor:
    """log P(size = k), of the batch shape: its derivatives are the design's cumulants."""
    if torch.compiler.is_compiling():  # Dynamo rejects a Function that defines jvp
        q, p, at = _trials(trials.z, trials.change)
        return poisson_binomial.size_prob(q, p, trials.k, at).log()
    return _LogSizeProb.apply(trials.change, trials.z, trials.k)


def inclusion(trials: Tilted) -> tuple[Tensor, Tensor, Tensor]:
    """log P(size = k), π and 1 − π; neither of the last two is computed by subtraction."""
    if torch.compiler.is_compiling():
        q, p, at = _trials(trials.z, trials.change)
        prob, pi, out = poisson_binomial.inclusion(q, p, trials.k, at)
        return prob.log(), pi, out
    return _Inclusion.apply(trials.change, trials.z, trials.k)


def covariance_product(trials: Tilted, u: Tensor) -> Tensor:
    """Cov·u for u (*batch, n), Cov being the covariance of the units' indicators."""
    return _Covariance.apply(trials.change, u, trials.z, trials.k)


def mixture(trials: Tilted) -> tuple[Tensor, Tensor]:
    """`poisson_binomial.mixture`: the design as a mixture of independent trials."""
    q, p, at = _trials(trials.z, trials.change)
    return poisson_binomial.mixture(q, p, trials.k, at)


def _trials(z: Tensor, change: Tensor) -> tuple[Tensor, Tensor, Frequencies]:
    """q, p and the frequencies, differentiable in change."""
    q, p = torch.sigmoid(-z), torch.sigmoid(z)
    return q, p * change.exp(), poisson_binomial.frequencies((p * q).sum(-1), z.shape[-1])


class _LogSizeProb(Function):
    """log P(size = k): its gradient is π."""

    @staticmethod
    def forward(change: Tensor, z: Tensor, k: Tensor) -> Tensor:
        period, re, im = operators.characteristic(z)
        return poisson_binomial.pmf(re, im, k, poisson_binomial.of_period(period)).log()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.unsqueeze(-1) * _Inclusion.apply(*ctx.saved_tensors)[1], None, None

    @staticmethod
    @differentiable
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return (tangent * _Inclusion.apply(*ctx.saved_tensors)[1]).sum(-1)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Tensor) -> tuple[Tensor, int]:
        return _LogSizeProb.apply(*in_front(info, in_dims, args)), 0


class _Inclusion(Function):
    """log P(size = k), π and 1 − π. The first has the gradient π, and π has the covariance as Jacobian."""

    @staticmethod
    def forward(change: Tensor, z: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        prob, pi, out = operators.inclusion(z, k)
        return prob.log(), pi, out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, grad_pi: Tensor | None, grad_out: Tensor | None
    ) -> tuple[Tensor | None, None, None]:
        change, z, k = ctx.saved_tensors
        total = None if grad is None else grad.unsqueeze(-1) * _Inclusion.apply(change, z, k)[1]
        if grad_pi is not None or grad_out is not None:
            u = (0 if grad_pi is None else grad_pi) - (0 if grad_out is None else grad_out)
            image = _Covariance.apply(change, u, z, k)
            total = image if total is None else total + image
        return total, None, None

    @staticmethod
    @differentiable
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> tuple[Tensor, Tensor, Tensor]:
        change, z, k = ctx.saved_tensors
        image = _Covariance.apply(change, tangent, z, k)
        return (tangent * _Inclusion.apply(change, z, k)[1]).sum(-1), image, -image

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], *args: Tensor
    ) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[int, int, int]]:
        return _Inclusion.apply(*in_front(info, in_dims, args)), (0, 0, 0)


class _Covariance(Function):
    """Cov·u. Its derivative in change is taken through the torch operations of the reference kernels."""

    @staticmethod
    def forward(change: Tensor, u: Tensor, z: Tensor, k: Tensor) -> Tensor:
        image: Tensor = operators.covariance(z, k, u)
        return image

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        change, u, z, k = ctx.saved_tensors
        by_change = None
        if ctx.needs_input_grad[0]:
            by_change = torch.func.vjp(lambda change: _reference(change, u, z, k), change)[1](grad)[0]
        return by_change, _Covariance.apply(change, grad, z, k), None, None

    @staticmethod
    @differentiable
    def jvp(ctx: Any, of_change: Tensor | None, of_u: Tensor | None, *_: None) -> Tensor:
        change, u, z, k = ctx.saved_tensors
        total = torch.zeros_like(u) if of_u is None else _Covariance.apply(change, of_u, z, k)
        if of_change is None:
            return total
        return total + torch.func.jvp(lambda change: _reference(change, u, z, k), (change,), (of_change,))[1]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Tensor) -> tuple[Tensor, int]:
        return _Covariance.apply(*in_front(info, in_dims, args)), 0


def _reference(change: Tensor, u: Tensor, z: Tensor, k: Tensor) -> Tensor:
    q, p, at = _trials(z, change)
    return poisson_binomial.covariance_product(q, p, k, at, u)


def in_front(info: Any, in_dims: tuple[Any, ...], args: tuple[Tensor, ...]) -> list[Tensor]:
    """The arguments with the dim that vmap maps over in front, as one more batch dim of each of them."""
    return [
        arg.expand(info.batch_size, *arg.shape) if dim is None else arg.movedim(dim, 0)
        for arg, dim in zip(args, in_dims, strict=True)
    ]
