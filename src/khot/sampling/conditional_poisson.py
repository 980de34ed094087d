"""Conditional Poisson sampling: k of n with P(S) ∝ exp(Σ_{i∈S} θ_i), the k-hot softmax.

Of all distributions over k-subsets with given inclusion probabilities it is the one of maximum entropy. It
is what independent trials with logits θ_i make, given that k of them succeed. Everything here is exact and
O(n), up to rounding: :mod:`khot.sampling.tilting` says how.

logits θ have the units along their last dim; any dims may lead. k is an integer, or a tensor of integers
that broadcasts with the batch shape (that of logits without the last dim). Units of logits +inf are certain
and those of −inf impossible: they count for k, and are left out of every sum over θ. Results have the
logits' dtype (they are computed in float64) and derivatives of any order in the logits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from khot._core.arguments import Scalar
from khot._core.precision import on_cpu
from khot.sampling.calibration import calibrate, solve
from khot.sampling.halving import draw_rows, numbered
from khot.sampling.tilting import Tilted, check_design, inclusion, log_size_prob, mixture, tilt

__all__ = [
    "calibrate",
    "design_entropy",
    "design_joint",
    "design_log_prob",
    "draw",
    "entropy",
    "joint_marginals",
    "kl",
    "log_normalizer",
    "log_prob",
    "marginals",
    "sample",
]


@on_cpu
def log_normalizer(logits: Tensor, k: Scalar) -> Tensor:
    """log Z_k(θ) = log Σ_{|S|=k} exp(Σ_{i∈S} θ_i): its gradient is the marginals, its Hessian the covariance.

    Args:
        logits: θ, (*batch, n).
        k: how many are chosen, in [0, n].

    Returns:
        (*batch), of the logits' dtype. Differentiable in logits, exactly and to any order.

    Raises:
        ValueError, TypeError: naming the argument, its value and what is allowed.

    Example:
        >>> from khot.sampling.conditional_poisson import log_normalizer
        >>> log_normalizer(torch.zeros(4), 2).exp()
        tensor(6.)
    """
    trials = tilt(logits, k)
    selected = trials.z > 0
    finite = logits.isfinite()
    # Σ softplus(z) + kt without its two large parts: the θ that a hard choice takes, and what softness adds
    theta = logits.double().masked_fill(~(finite & selected), 0).sum(-1)
    excess = trials.k - selected.sum(-1)
    theta = theta.detach() + excess * trials.hi + excess * trials.lo
    return (theta + _softness(trials) + log_size_prob(trials)).to(logits.dtype)


@on_cpu
def marginals(logits: Tensor, k: Scalar) -> Tensor:
    """The inclusion probabilities π_i = P(i ∈ S): the gradient of :func:`log_normalizer`.

    Args:
        logits, k: as for :func:`log_normalizer`.

    Returns:
        (*batch, n) in [0, 1], of the logits' dtype, with Σπ = k. Differentiable in logits, exactly and to any
        order.

    Raises:
        ValueError, TypeError: naming the argument, its value and what is allowed.

    Example:
        >>> from khot.sampling.conditional_poisson import marginals
        >>> marginals(torch.tensor([0.0, 0.0, 0.0, torch.inf]), 2)
        tensor([0.3333, 0.3333, 0.3333, 1.0000])
    """
    return inclusion(tilt(logits, k))[1].to(logits.dtype)


@on_cpu
def joint_marginals(logits: Tensor, k: Scalar) -> Tensor:
    """P(i ∈ S and j ∈ S) for all pairs; on the diagonal the marginals.

    Args:
        logits, k: as for :func:`log_normalizer`.

    Returns:
        (*batch, n, n) in [0, 1], of the logits' dtype, symmetric. Differentiable in logits.

    Raises:
        ValueError, TypeError: naming the argument, its value and what is allowed.

    Example:
        >>> from khot.sampling.conditional_poisson import joint_marginals
        >>> joint_marginals(torch.zeros(3), 2)
        tensor([[0.6667, 0.3333, 0.3333],
                [0.3333, 0.6667, 0.3333],
                [0.3333, 0.3333, 0.6667]])
    """
    trials = tilt(logits, k)
    weight, ratio = mixture(trials)
    joint = ((ratio * weight.unsqueeze(-1)).mT @ ratio).real.clamp(0, 1)
    single = inclusion(trials)[1]
    diagonal = torch.eye(single.shape[-1], dtype=torch.bool, device=single.device)
    return torch.where(diagonal, single.unsqueeze(-1), joint).to(logits.dtype)


@on_cpu
def log_prob(value: Tensor, logits: Tensor, k: Scalar) -> Tensor:
    """log P(S) = Σ_{i∈S} θ_i − log Z_k(θ).

    Args:
        value: S as a k-hot vector, (*shape, n), 0 and 1 (or bool); broadcasts with logits.
        logits, k: as for :func:`log_normalizer`.

    Returns:
        The broadcast batch shape, of the logits' dtype; −inf for an S that cannot be drawn: of another size,
        with an impossible unit or without a certain one. Differentiable in logits, exactly and to any order.

    Raises:
        ValueError, TypeError: naming the argument, its value and what is allowed.

    Example:
        >>> from khot.sampling.conditional_poisson import log_prob
        >>> log_prob(torch.tensor([1.0, 1.0, 0.0]), torch.zeros(3), 2).exp()
        tensor(0.3333)
    """
    trials = tilt(logits, k)
    chosen = value.bool()
    # Σ_S z − Σ_{z>0} z: nothing large is subtracted
    against = trials.z.abs().where(chosen != (trials.z > 0), 0).sum(-1)
    along = trials.change.where(chosen, 0).sum(-1)
    result = along - against - _softness(trials) - log_size_prob(trials)
    impossible = (chosen.sum(-1) != trials.k) & ~result.isnan()
    return result.masked_fill(impossible, -math.inf).to(logits.dtype)


@on_cpu
def entropy(logits: Tensor, k: Scalar) -> Tensor:
    """−Σ_S P(S) log P(S) = log Z_k(θ) − Σ_i π_i θ_i.

    Args:
        logits, k: as for :func:`log_normalizer`.

    Returns:
        (*batch) in [0, log C(n, k)], of the logits' dtype. Differentiable in logits, exactly and to any
        order.

    Raises:
        ValueError, TypeError: naming the argument, its value and what is allowed.

    Example:
        >>> from khot.sampling.conditional_poisson import entropy
        >>> entropy(torch.zeros(4), 2).exp()
        tensor(6.)
    """
    trials = tilt(logits, k)
    log_size, pi, out = inclusion(trials)
    against = _against(pi, out, trials.z.masked_fill(trials.z.isinf(), 0)) - pi * trials.change
    return (log_size + _softness(trials) + against.sum(-1)).to(logits.dtype)


@on_cpu
def kl(p_logits: Tensor, q_logits: Tensor, k: Scalar) -> Tensor:
    """KL(p ‖ q) = Σ_S p(S) log(p(S)/q(S)) of two such designs of one size.

    Args:
        p_logits, q_logits, k: as for :func:`log_normalizer`; the two broadcast.

    Returns:
        (*batch), ≥ 0, of p_logits' dtype; +inf where q cannot draw what p can. Differentiable in both logits,
        exactly and to any order.

    Raises:
        ValueError, TypeError: naming the argument, its value and what is allowed.

    Example:
        >>> from khot.sampling.conditional_poisson import kl
        >>> kl(torch.zeros(4), torch.zeros(4), 2)
        tensor(0.)
    """
    p, q = tilt(p_logits, k), tilt(q_logits, k)
    log_size, pi, out = inclusion(p)
    # infinite only where p has what q cannot draw
    harmless = q.z.isinf() & (torch.where(q.z > 0, out, pi) == 0)
    own = _against(pi, out, p.z.masked_fill(p.z.isinf(), 0)) - pi * p.change
    cross = _against(pi, out, q.z.masked_fill(harmless, 0)) - pi * q.change
    result = log_size_prob(q) - log_size + _softness(q) - _softness(p) + (cross - own).sum(-1)
    return result.to(p_logits.dtype)


@on_cpu
def sample(
    logits: Tensor, k: Scalar, sample_shape: tuple[int, ...] = (), *, generator: torch.Generator | None = None
) -> Tensor:
    """Draw k-subsets, exactly, in O(n log n): independent draws of one design.

    Half of the units are drawn as independent trials and accepted with a probability in proportion to that
    of the others' making up the rest; then the other half of these, and so on.

    Args:
        logits, k: as for :func:`log_normalizer`.
        sample_shape: of the draws, in front of the logits' shape.
        generator: of the uniforms (float64).

    Returns:
        (*sample_shape, *batch, n) of 0 and 1, of the logits' dtype, k ones in each row; rows with NaN among
        the logits, or more than k of them +inf, are NaN. Not differentiable.

    Raises:
        ValueError, TypeError: naming the argument, its value and what is allowed.

    Example:
        >>> from khot.sampling.conditional_poisson import sample
        >>> sample(torch.tensor([0.0, torch.inf, -torch.inf, torch.inf]), 2)
        tensor([0., 1., 0., 1.])
    """
    theta, k = check_design(logits.detach(), k)
    unsuited = theta.isnan().any(-1) | ((theta == math.inf).sum(-1) > k) | ((theta > -math.inf).sum(-1) < k)
    n, batch = theta.shape[-1], theta.shape[:-1]
    which = torch.arange(batch.numel(), device=theta.device).reshape(batch).expand((*sample_shape, *batch))
    drawn = draw_rows(theta.reshape(batch.numel(), n), k.reshape(-1), which, generator)
    return drawn.to(logits.dtype).masked_fill(unsuited.unsqueeze(-1), math.nan)


def draw(probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Bool k-subsets with inclusion probabilities probs: float64 (*batch, n), each row's sum an integer."""
    rows, which = numbered(probs)
    return draw_rows(solve(rows), rows.sum(-1).round(), which, generator)


def design_log_prob(value: Tensor, probs: Tensor) -> Tensor:
    """:func:`log_prob` under the design of these inclusion probabilities."""
    return log_prob(value, solve(probs), probs.detach().sum(-1).round())


def design_joint(probs: Tensor) -> Tensor:
    """:func:`joint_marginals` of the design of these inclusion probabilities."""
    return joint_marginals(solve(probs), probs.detach().sum(-1).round())


def design_entropy(probs: Tensor) -> Tensor:
    """:func:`entropy` of the design of these inclusion probabilities."""
    return entropy(solve(probs), probs.detach().sum(-1).round())


def _softness(trials: Tilted) -> Tensor:
    """Σ softplus(−|z|), (*batch): what log Π(1 + e^z) has beyond Σ_{z>0} z."""
    return torch.log1p(torch.exp(-trials.z.abs())).sum(-1)


def _against(pi: Tensor, out: Tensor, z: Tensor) -> Tensor:
    """|z| times the probability of the outcome that z's sign speaks against."""
    return torch.where(z > 0, out, pi) * z.abs()
