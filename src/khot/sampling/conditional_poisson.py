"""Conditional Poisson sampling: k of n with P(S) ∝ exp(Σ_{i∈S} θ_i), the k-hot softmax.

Of all distributions over k-subsets with given inclusion probabilities it is the one of maximum entropy. It is
the distribution of independent trials with logits θ_i, given that k of them succeed. All functions here are
exact up to rounding, and O(n); drawing is O(n log n). The trials are tilted so that k successes are as likely
as can be, and P(k successes) comes from a Fourier transform of at most 26 frequencies, whatever n and k.

The units of the logits θ lie along ``dim``; the other dims are the batch. k is an integer, or a tensor of
integers that broadcasts with the batch shape (the shape of the logits without ``dim``). Units with logits
+inf are certain and units with −inf impossible: they count for k, and are left out of every sum over θ.
Results have the logits' dtype (they are computed in float64) and derivatives of any order in the logits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from khot._core import arguments
from khot._core.arguments import Scalar
from khot._core.precision import not_below_zero, on_cpu
from khot._core.ways import by_lengths, by_rows
from khot._kernels.reference import poisson_binomial
from khot._ops.calibration import solve
from khot._ops.tilting import Tilted, inclusion, log_size_prob, mixture, tilt_rows
from khot.sampling import _hidden
from khot.sampling._axes import check_sample_shape, from_end, to_dim, to_last, to_pair
from khot.sampling._halving import draw_rows
from khot.sampling._tilt import check_design, tilt

__all__ = [
    "calibrate",
    "entropy",
    "joint_marginals",
    "kl",
    "log_normalizer",
    "log_prob",
    "marginals",
    "sample",
]


def __dir__() -> list[str]:
    return __all__


@by_rows(0)
@on_cpu
def log_normalizer(logits: Tensor, k: Scalar, dim: int = -1, *, offsets: Tensor | None = None) -> Tensor:
    """The logarithm of the sum over all k-subsets; its gradient is the marginals, its Hessian the covariance.

        log Z_k(θ) = log Σ_(|S|=k) exp(Σ_(i∈S) θ_i)


    Args:
        logits: θ, of any floating-point dtype.
        k: how many are chosen, in [0, n].
        dim: the dimension along which the units lie.
        offsets: of packed rows, as for :func:`khot.soft_topk`.

    Returns:
        The batch shape, of the logits' dtype. Differentiable in logits, exactly and to any order.

    Raises:
        ValueError, TypeError, IndexError: naming the argument, its value and what is allowed.

    Example:
        >>> from khot.sampling.conditional_poisson import log_normalizer
        >>> log_normalizer(torch.zeros(4), 2).exp()
        tensor(6.)
    """
    dim = from_end(logits, dim)
    trials = tilt(logits, k, dim)
    selected = trials.z > 0
    rows = to_last(logits, dim)
    finite = rows.isfinite()
    # Σ softplus(z) + kt, as the θ that a hard choice takes plus what softness adds: the large parts cancel
    theta = rows.double().masked_fill(~(finite & selected), 0).sum(-1)
    excess = trials.k - selected.sum(-1)
    theta = theta.detach() + excess * trials.hi + excess * trials.lo
    return (theta + _softness(trials) + log_size_prob(trials)).to(logits.dtype)


@by_rows(1)
@on_cpu
def marginals(logits: Tensor, k: Scalar, dim: int = -1, *, offsets: Tensor | None = None) -> Tensor:
    """The inclusion probabilities π_i = P(i ∈ S): the gradient of :func:`log_normalizer`.

    Args:
        logits, k, dim: as for :func:`log_normalizer`.
        offsets: of packed rows, as for :func:`khot.soft_topk`.

    Returns:
        The logits' shape and dtype, in [0, 1], with Σπ = k. Differentiable in logits, exactly and to any
        order.

    Raises:
        ValueError, TypeError, IndexError: naming the argument, its value and what is allowed.

    Example:
        >>> from khot.sampling.conditional_poisson import marginals
        >>> marginals(torch.tensor([0.0, 0.0, 0.0, torch.inf]), 2)
        tensor([0.3333, 0.3333, 0.3333, 1.0000])
    """
    dim = from_end(logits, dim)
    return to_dim(inclusion(tilt(logits, k, dim))[1].to(logits.dtype), logits, dim)


@by_rows(2)
@on_cpu
def joint_marginals(logits: Tensor, k: Scalar, dim: int = -1) -> Tensor:
    """P(i ∈ S and j ∈ S) for all pairs; on the diagonal the marginals.

    Args:
        logits, k, dim: as for :func:`log_normalizer`.

    Returns:
        The logits' shape with ``dim`` replaced by two dims (n, n), and their dtype; in [0, 1], symmetric in
        the two dims. Differentiable in logits.

    Raises:
        ValueError, TypeError, IndexError: naming the argument, its value and what is allowed.

    Example:
        >>> from khot.sampling.conditional_poisson import joint_marginals
        >>> joint_marginals(torch.zeros(3), 2)
        tensor([[0.6667, 0.3333, 0.3333],
                [0.3333, 0.6667, 0.3333],
                [0.3333, 0.3333, 0.6667]])
    """
    dim = from_end(logits, dim)
    trials = tilt(logits, k, dim)
    weight, ratio = mixture(trials)
    joint = ((ratio * weight.unsqueeze(-1)).mT @ ratio).real.clamp(0, 1)
    single = inclusion(trials)[1]
    diagonal = torch.eye(single.shape[-1], dtype=torch.bool, device=single.device)
    return to_pair(torch.where(diagonal, single.unsqueeze(-1), joint).to(logits.dtype), dim)


@by_rows(0)
@on_cpu
def log_prob(
    value: Tensor, logits: Tensor, k: Scalar, dim: int = -1, *, offsets: Tensor | None = None
) -> Tensor:
    """The logarithm of the probability of a subset.

        log P(S) = Σ_(i∈S) θ_i − log Z_k(θ)


    Args:
        value: S as a k-hot vector, 0 and 1 (or bool); broadcasts with logits, so that draws have their dims
            in front. Of packed rows one draw (N,), in a floating-point dtype, as they are drawn; for several,
            take ``torch.vmap`` over them.
        logits, k, dim: as for :func:`log_normalizer`.
        offsets: of packed rows, as for :func:`khot.soft_topk`.

    Returns:
        The broadcast batch shape, of the logits' dtype; −inf for an S that cannot be drawn: of another size,
        with an impossible unit or without a certain one; NaN for a value with a NaN. Differentiable in
        logits, exactly and to any order.

    Raises:
        ValueError: a value other than 0 and 1 (on the CPU in eager mode; elsewhere the result is NaN).
        ValueError, TypeError, IndexError: naming the argument, its value and what is allowed.

    Example:
        >>> from khot.sampling.conditional_poisson import log_prob
        >>> log_prob(torch.tensor([1.0, 1.0, 0.0]), torch.zeros(3), 2).exp()
        tensor(0.3333)
    """
    dim = from_end(logits, dim)
    trials = tilt(logits, k, dim)
    wrong = arguments.not_binary(value, "value")
    arguments.check_has_values(value, "value", logits)
    arguments.check_dim(value, dim)
    chosen, wrong = to_last(value == 1, dim), to_last(wrong, dim).any(-1)
    # Σ_S z − Σ_{z>0} z, without subtracting large numbers
    against = trials.z.abs().where(chosen != (trials.z > 0), 0).sum(-1)
    along = trials.change.where(chosen, 0).sum(-1)
    result = along - against - _softness(trials) - log_size_prob(trials)
    impossible = (chosen.sum(-1) != trials.k) & ~result.isnan()
    return result.masked_fill(impossible, -math.inf).masked_fill(wrong, math.nan).to(logits.dtype)


@by_rows(0)
@on_cpu
def entropy(logits: Tensor, k: Scalar, dim: int = -1, *, offsets: Tensor | None = None) -> Tensor:
    """The entropy of the design.

        −Σ_S P(S) log P(S) = log Z_k(θ) − Σ_i π_i θ_i


    Args:
        logits, k, dim: as for :func:`log_normalizer`.
        offsets: of packed rows, as for :func:`khot.soft_topk`.

    Returns:
        The batch shape, in [0, log C(n, k)], of the logits' dtype. Differentiable in logits, exactly and to
        any order.

    Raises:
        ValueError, TypeError, IndexError: naming the argument, its value and what is allowed.

    Example:
        >>> from khot.sampling.conditional_poisson import entropy
        >>> entropy(torch.zeros(4), 2).exp()
        tensor(6.)
    """
    trials = tilt(logits, k, from_end(logits, dim))
    log_size, pi, out = inclusion(trials)
    against = _against(pi, out, trials.z.masked_fill(trials.z.isinf(), 0)) - pi * trials.change
    # of nearly certain rows the sum of these two is far smaller than either
    q, p = torch.sigmoid(-trials.z), torch.sigmoid(trials.z)
    swaps = poisson_binomial.swaps(q, p, trials.k)
    exact = swaps.more.log1p().squeeze(-1) + (log_size - log_size.detach())
    level = torch.where(swaps.apply.squeeze(-1), exact, log_size + _softness(trials))
    return (level + against.sum(-1)).to(logits.dtype)


@by_rows(0)
@on_cpu
def kl(
    p_logits: Tensor, q_logits: Tensor, k: Scalar, dim: int = -1, *, offsets: Tensor | None = None
) -> Tensor:
    """The Kullback-Leibler divergence of two such designs of the same size.

        KL(p, q) = Σ_S p(S) log(p(S)/q(S))


    Args:
        p_logits, q_logits, k, dim: as for :func:`log_normalizer`; the two logits broadcast.
        offsets: of packed rows, as for :func:`khot.soft_topk`.

    Returns:
        The broadcast batch shape, ≥ 0, of p_logits' dtype; +inf where q cannot draw what p can.
        Differentiable in both logits, exactly and to any order.

    Raises:
        ValueError, TypeError, IndexError: naming the argument, its value and what is allowed.

    Example:
        >>> from khot.sampling.conditional_poisson import kl
        >>> kl(torch.zeros(4), torch.zeros(4), 2)
        tensor(0.)
    """
    dim = from_end(p_logits, dim, "p_logits")
    p, q = tilt(p_logits, k, dim, "p_logits"), tilt(q_logits, k, dim, "q_logits")
    _, pi, out = inclusion(p)
    # the divergence is infinite only where p can draw what q cannot
    harmless = q.z.isinf() & (torch.where(q.z > 0, out, pi) == 0)
    own = _against(pi, out, p.z.masked_fill(p.z.isinf(), 0)) - pi * p.change
    cross = _against(pi, out, q.z.masked_fill(harmless, 0)) - pi * q.change
    # of p in the same way as of q, so that equal designs have a divergence of exactly 0
    result = log_size_prob(q) - log_size_prob(p) + _softness(q) - _softness(p) + (cross - own).sum(-1)
    return not_below_zero(result).to(p_logits.dtype)


@by_lengths
@on_cpu
def sample(
    logits: Tensor,
    k: Scalar,
    dim: int = -1,
    *,
    sample_shape: Sequence[int] = (),
    generator: torch.Generator | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """Draw k-subsets, exactly, in O(n log n): independent draws of each design.

    Half of the units are drawn as independent trials and accepted with a probability in proportion to the
    probability that the other half selects the remaining units; then the other half is drawn in the same way.

    Args:
        logits, k, dim: as for :func:`log_normalizer`.
        sample_shape: shape of the draws for each row, in front of the logits' shape.
        generator: the source of randomness, on the device of logits.
        offsets: of packed rows, as for :func:`khot.soft_topk`.

    Returns:
        Zeros and ones of shape sample_shape + logits.shape, in the logits' dtype, with k ones in each row.
        Rows with a NaN among the logits, or with more than k of them +inf, are NaN. Not differentiable.

    Raises:
        ValueError, TypeError, IndexError: naming the argument, its value and what is allowed.

    Example:
        >>> from khot.sampling.conditional_poisson import sample
        >>> sample(torch.tensor([0.0, torch.inf, -torch.inf, torch.inf]), 2)
        tensor([0., 1., 0., 1.])
    """
    check_sample_shape(sample_shape)
    dim = from_end(logits, dim)
    theta, k = check_design(logits.detach(), k, dim)
    unsuited = theta.isnan().any(-1) | ((theta == math.inf).sum(-1) > k) | ((theta > -math.inf).sum(-1) < k)
    if _hidden.values_are_hidden(theta):
        drawn = _draw_hidden(theta, k, sample_shape=sample_shape, generator=generator)
    else:
        drawn = _draw(theta, k, sample_shape, generator)
    return to_dim(drawn.to(logits.dtype).masked_fill(unsuited.unsqueeze(-1), math.nan), logits, dim)


@by_rows(1)
@on_cpu
def calibrate(probs: Tensor, dim: int = -1, *, offsets: Tensor | None = None) -> Tensor:
    """The logits θ whose :func:`marginals` are probs: with k = Σ probs, π(θ) = probs.

    They are unique up to a constant, which is chosen so that Σσ(θ) = k.

    Args:
        probs: in [0, 1], with integer sums (to within 8n·eps).
        dim: the dimension along which the units lie.
        offsets: of packed rows, as for :func:`khot.soft_topk`.

    Returns:
        θ, of probs' shape and dtype; −inf and +inf for units of probability 0 and 1. Differentiable in probs
        along changes that keep their sum, exactly and to any order: the derivative solves
        Cov(θ) dθ = dprobs.

    Raises:
        ValueError, TypeError, IndexError: naming the argument, its value and what is allowed.

    Sources: Chen, Dempster, Liu 1994 for the design; Anderson 1965 for the acceleration of the fixed point.

    Example:
        >>> from khot.sampling.conditional_poisson import calibrate, marginals
        >>> logits = calibrate(torch.tensor([0.9, 0.6, 0.5, 0.0]))
        >>> marginals(logits, 2)
        tensor([0.9000, 0.6000, 0.5000, 0.0000])
    """
    arguments.check_input(probs, "probs")
    if not probs.dim():
        raise ValueError(
            "probs must have at least one dim, along which the units lie, but got a 0-dim tensor"
        )
    dim = from_end(probs, dim)
    arguments.check_values(probs, "probs", low=0, high=1)
    pi = to_last(probs, dim).double()
    size = pi.detach().sum(-1)
    slack = 8 * pi.shape[-1] * torch.finfo(probs.dtype).eps
    arguments.check_values(
        (size - size.round()).abs(), "the distance of probs' sum from an integer", low=0, high=slack
    )
    return to_dim(solve(pi).to(probs.dtype), probs, dim)


def _draw(theta: Tensor, k: Tensor, sample_shape: Sequence[int], generator: torch.Generator | None) -> Tensor:
    """Bool draws (*sample_shape, *batch, n) of the designs θ (*batch, n) and k (*batch)."""
    n, batch = theta.shape[-1], theta.shape[:-1]
    which = torch.arange(batch.numel(), device=theta.device).reshape(batch).expand((*sample_shape, *batch))
    theta, k = theta.reshape(batch.numel(), n), k.reshape(-1)
    return draw_rows(tilt_rows(theta, k).z, k, which, generator)


_draw_hidden = _hidden.operator("draw_conditional_poisson", "Tensor k", _draw, torch.bool)


def _softness(trials: Tilted) -> Tensor:
    """Σ softplus(−|z|), (*batch): the difference between log Π(1 + e^z) and Σ_{z>0} z."""
    return torch.log1p(torch.exp(-trials.z.abs())).sum(-1)


def _against(pi: Tensor, out: Tensor, z: Tensor) -> Tensor:
    """|z| times the probability of the outcome that the sign of z makes the less likely one."""
    return torch.where(z > 0, out, pi) * z.abs()
