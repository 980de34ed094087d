"""Gradients through a k-hot sample: estimates of d E f(x) / dθ for x ∈ {0, 1}ⁿ with Σx = k.

Seven of the functions return a sample that carries a gradient; :func:`sample_khot` chooses among them by
name. They differ in how x is drawn from the logits θ and in what is used as its derivative. In the table J(π)
is the Jacobian diag(g) − ggᵀ/Σg of sigmoid top-k, with g = π(1 − π), and v = df/dx; the first three also take
another CDF than the logistic:

==================  ==============================================  ========================================
estimator           the sample                                      the gradient
==================  ==============================================  ========================================
straight_through    a design with inclusion probabilities σ_k(θ)    J(π)v
second_order        the same                                        2J(½(x + σ_k(θ/τ)))v − ½J(π)v
gumbel              top-k of θ + Gumbel noise, or a relaxed one     that of σ_k((θ + noise)/τ)
simple              conditional Poisson with parameters θ           that of its inclusion probabilities, exact
imle                top-k of θ + τ·noise                            the difference to the top-k moved along −v
sequential_softmax  top-k of θ + Gumbel noise, or a relaxed one     that of k softmaxes in turn
ncpss               iterative Poisson; its size may differ from k   that of rescaled sigmoids
==================  ==============================================  ========================================

:func:`reinmax` is what second_order comes from, for one-hot samples and softmax.
:func:`score_function` takes losses and log-probabilities instead. It needs no derivative of f and is
unbiased.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from inspect import unwrap
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Generator, Tensor
from torch.compiler import is_dynamo_compiling

from khot import baselines, cdfs, sampling
from khot._core import arguments, eager
from khot._core.arguments import Scalar
from khot._core.names import unknown
from khot._core.precision import wide_dtype
from khot._core.ways import by_lengths
from khot._kernels.reference.order_sampling import LEAST
from khot.cdfs import CDF, CDFName
from khot.masks import soft_topk, topk_mask
from khot.sampling import DesignName, conditional_poisson
from khot.sampling._designs import pareto
from khot.sampling._lookup import resolve
from khot.sampling._noise import gumbel_noise

__all__ = [
    "EstimatorName",
    "gumbel",
    "imle",
    "ncpss",
    "reinmax",
    "sample_khot",
    "score_function",
    "second_order",
    "sequential_softmax",
    "simple",
    "straight_through",
]


def __dir__() -> list[str]:
    return __all__


EstimatorName = Literal[
    "straight_through", "second_order", "gumbel", "simple", "imle", "sequential_softmax", "ncpss"
]
"""The names of the estimators, which are the values of the argument ``estimator``."""

_NAMES = get_args(EstimatorName)  # at every call it would take longer than the checks of the others


def sample_khot(
    logits: Tensor,
    k: Scalar | None = None,
    dim: int = -1,
    *,
    estimator: EstimatorName = "straight_through",
    design: DesignName | None = None,
    tau: Scalar | None = None,
    cdf: CDFName | CDF = "logistic",
    hard: bool = True,
    mask: Tensor | None = None,
    generator: Generator | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """Draw k of n at random, with a gradient: a k-hot sample, as F.gumbel_softmax draws a one-hot sample.

    With the default estimator x ∈ {0, 1}ⁿ has Σx = k and E[x] = σ_k(logits) (:func:`khot.sigmoid_topk`), and
    the gradient of x is that of σ_k. With ``k=None`` the size is learned: E[x] = σ(logits), and Σx is one of
    the two integers next to Σσ(logits).

    Args:
        logits: scores of any floating-point dtype; larger ones are drawn more often. −inf is never drawn,
            +inf always.
        k: how many to draw; a number in [0, n], a tensor that broadcasts with the batch shape (the shape of
            logits without ``dim``), or None to learn the size.
        dim: the dimension to draw along.
        estimator: which of :mod:`khot.estimators` draws the sample and gives it its gradient.

            ======================  ===================  =======  =======  =====  ===========
            estimator               design               tau      cdf      hard   k
            ======================  ===================  =======  =======  =====  ===========
            ``straight_through``    any*                 –        any      –      any or None
            ``second_order``        any*                 yes      any      –      any or None
            ``gumbel``              –                    yes      any      yes    any
            ``simple``              conditional_poisson  –        –        –      an integer
            ``imle``                –                    yes      –        –      any
            ``sequential_softmax``  –                    yes      –        yes    an integer
            ``ncpss``               –                    yes      –        –      an integer
            ======================  ===================  =======  =======  =====  ===========

            (*) If k is given, one of fixed size: not ``poisson`` or ``iterative_poisson``.

            ``ncpss`` keeps less than the others do: the size of its samples may differ from k, and logits of
            +inf are not certain.
        design: the sampling design, a name in :data:`khot.sampling.designs`. None: ``"pareto"``, and for
            ``simple`` ``"conditional_poisson"``.
        tau: temperature > 0; see the estimator. None: 1.
        cdf: the CDF of the probabilities or of the relaxed sample, as for :func:`khot.soft_topk`, which then
            stands for σ_k; with ``k=None`` F(logits) stands for σ(logits).
        hard: False gives a relaxed sample that sums to k, in [0, 1]ⁿ except for ``sequential_softmax``.
        mask: bool, broadcastable to the logits; True where an entry may be drawn. Entries under False are
            ignored, even NaN and inf, and get 0.
        generator: the source of randomness, on the device of logits.
        offsets: of packed rows, as for :func:`khot.soft_topk`.

    Returns:
        Zeros and ones (with ``hard=False``: the relaxed numbers) of the logits' shape and dtype. A row with a
        NaN is NaN.

    Differentiable in logits, as the estimator says. The gradient is biased, except with ``hard=False``.

    Raises:
        ValueError: an unknown estimator or design, an option that has no effect with the estimator, k or tau
            out of range, k larger than the number of entries that may be drawn. (The values of tensors are
            checked on the CPU in eager mode; elsewhere that row is NaN.)
        TypeError: logits that are not a floating-point tensor, mask that is not bool.
        IndexError: dim out of range.

    Source: Wijk, Vinuesa, Azizpour 2025, Algorithms 1, 2, 3 and 5.

    Example:
        >>> logits = torch.zeros(3, 8, requires_grad=True)
        >>> x = khot.sample_khot(logits, 2)
        >>> x.sum(-1)
        tensor([2., 2., 2.], grad_fn=<SumBackward1>)
    """
    if offsets is not None or (type(logits) is not Tensor and arguments.is_nested(logits)):
        return _of_lengths(
            logits,
            k,
            dim,
            estimator=estimator,
            design=design,
            tau=tau,
            cdf=cdf,
            hard=hard,
            mask=mask,
            generator=generator,
            offsets=offsets,
        )
    if eager.launching and not is_dynamo_compiling():
        plain = eager.sample_khot(
            logits, k, dim, estimator, design, tau, cdf, hard, mask, generator, LEAST
        )  # fmt: skip
        if plain is not None:
            return plain
    if estimator not in _NAMES:
        raise unknown("estimator", estimator, _ESTIMATORS)
    draw, takes, designs = _ESTIMATORS[estimator]
    if k is None and "k=None" not in takes:
        raise ValueError(f"k must be a number or tensor for estimator {estimator!r}, but got None")
    given: dict[str, Any] = {}
    if design is not None:
        if designs and design not in designs:
            allowed = " or ".join(("None", *map(repr, designs)))
            raise ValueError(f"design must be {allowed} for estimator {estimator!r}, but got {design!r}")
        if not designs:
            given["design"] = design
    if tau is not None:
        given["tau"] = tau
    F = cdfs.resolve(cdf)
    if not isinstance(F, cdfs.Logistic):
        given["cdf"] = F
    if hard is not True:
        arguments.check_flags(hard=hard)
        given["hard"] = False
    for name in given:
        if name not in takes:
            users = [other for other, (_, options, _) in _ESTIMATORS.items() if name in options]
            raise ValueError(
                f"{name} has no effect with estimator {estimator!r}; it is used by {_listed(users)}"
            )
    if mask is not None:
        arguments.check_input(logits, "logits")
        arguments.mask_rows(mask, logits, -1)
        logits = arguments.masked(logits, mask.expand(logits.shape), -math.inf)
    return draw(logits, k, dim, generator=generator, **given)


_of_lengths = by_lengths(sample_khot)


@by_lengths
def straight_through(
    logits: Tensor,
    k: Scalar | None = None,
    dim: int = -1,
    *,
    design: DesignName = "pareto",
    cdf: CDFName | CDF = "logistic",
    generator: Generator | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """A k-hot sample with inclusion probabilities π, and their gradient: x − π.detach() + π.

        π = σ_k(logits),   E[x] = π,   v → J(π)v in backward,   with the Jacobian J of σ_k

    E[J(π) df/dx] is the first-order approximation of the gradient of E f(x): exact where f is linear
    (Proposition 3). With ``k=None``, π = σ(logits), and the size of the sample is learned (Algorithm 2).

    Args:
        logits, k, dim, cdf, generator: as for :func:`sample_khot`.
        design: the sampling design, a name in :data:`khot.sampling.designs`.
        offsets: of packed rows, as for :func:`khot.soft_topk`.

    Returns:
        Zeros and ones of the logits' shape and dtype, differentiable in logits and k.

    Errors: as for :func:`sample_khot`.

    Source: Wijk, Vinuesa, Azizpour 2025, Algorithms 1 and 2; Bengio, Léonard, Courville 2013.

    Example:
        >>> khot.estimators.straight_through(torch.tensor([9.0, -9.0, 9.0]), 2)
        tensor([1., 0., 1.])
    """
    _check_size(design, k)
    x = _rows(logits, dim)
    probs = _inclusion_probs(x, k, cdf)
    return _unrows(_through(_draw(probs, design, generator), probs), logits, dim)


@by_lengths
def second_order(
    logits: Tensor,
    k: Scalar | None = None,
    dim: int = -1,
    *,
    design: DesignName = "pareto",
    tau: Scalar = 1.0,
    cdf: CDFName | CDF = "logistic",
    generator: Generator | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """A k-hot sample as :func:`straight_through` draws it, with the gradient 2J(π₁)v − ½J(π₀)v.

        π₀ = σ_k(logits),   π₁ = ½(x + σ_k(logits/τ))
        J(π) = diag(g) − g gᵀ / Σg,   g = π(1 − π)

    With ``k=None`` π₀ = σ(logits) and J(π) = diag(g). With another CDF F, g = F'(F⁻¹(π)). At τ = 1 and n = 2
    its mean is the gradient of E f(x) for every quadratic f; for larger n it is a heuristic. At k = 1 it is
    not :func:`reinmax`, since σ_1 is not softmax.

    Args:
        logits, k, dim, cdf, generator: as for :func:`sample_khot`.
        design: the sampling design, a name in :data:`khot.sampling.designs`.
        tau: temperature > 0 of the second half of π₁; a number or a tensor that broadcasts with the batch
            shape.
        offsets: of packed rows, as for :func:`khot.soft_topk`.

    Returns:
        Zeros and ones of the logits' shape and dtype, differentiable in logits, not in tau or k.

    Errors: as for :func:`sample_khot`; also ValueError for a k that requires a gradient.

    Source: Wijk, Vinuesa, Azizpour 2025, Algorithm 5; Liu et al. 2023 (ReinMax).

    Example:
        >>> khot.estimators.second_order(torch.tensor([9.0, -9.0, 9.0]), 2)
        tensor([1., 0., 1.])
    """
    arguments.check_scalar(tau, "tau", low=0, low_open=True)
    if isinstance(k, Tensor) and k.requires_grad:
        raise ValueError(
            "k must not require a gradient: second_order has none for it; k=None learns the size"
        )
    _check_size(design, k)
    x = _rows(logits, dim)
    F = cdfs.resolve(cdf)
    probs = _inclusion_probs(x, k, F)
    sample = _draw(probs, design, generator)
    with torch.no_grad():
        tempered = probs if not isinstance(tau, Tensor) and tau == 1 else _inclusion_probs(x, k, F, tau)
        between = (sample + tempered) / 2
        if k is not None and not _is_integer(k):  # the sample has a size next to k: project back
            between = soft_topk(F.icdf(between), k, cdf=F)
        g = F.pdf_from_cdf(between) if F.density_from_value else F.pdf(F.icdf(between))
    # linear in the logits, with J(π₁) as its derivative; infinite ones have g = 0
    z = x.masked_fill(x.isinf(), 0)
    if k is not None:
        z = z - (g * z).sum(-1, keepdim=True) / g.sum(-1, keepdim=True).clamp_min(torch.finfo(g.dtype).tiny)
    return _unrows(_through(sample, 2 * g * z - probs / 2), logits, dim)


@by_lengths
def reinmax(
    logits: Tensor,
    dim: int = -1,
    *,
    tau: Scalar = 1.0,
    generator: Generator | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """A one-hot sample with probabilities π = softmax(logits), and the gradient 2J(π₁)v − ½J(π)v.

        π₁ = ½(x + softmax(logits/τ)),   J(π) = diag(π) − ππᵀ

    At τ = 1 its mean is the gradient of E f(x) for every
    quadratic f. :func:`second_order` is what becomes of it for k-hot samples.

    Args:
        logits, dim, generator: as for :func:`sample_khot`.
        tau: temperature > 0 of the second half of π₁; a number or a tensor that broadcasts with the batch
            shape.
        offsets: of packed rows, as for :func:`khot.soft_topk`.

    Returns:
        Zeros and a one along ``dim``, of the logits' shape and dtype, differentiable in logits.

    Errors: as for :func:`sample_khot`.

    Source: Liu et al. 2023 (ReinMax); Wijk, Vinuesa, Azizpour 2025, Algorithm 4.

    Example:
        >>> khot.estimators.reinmax(torch.tensor([9.0, -99.0, -99.0]))
        tensor([1., 0., 0.])
    """
    x = _rows(logits, dim)
    tau = arguments.per_row(tau, "tau", x, low=0, low_open=True).detach().to(x.dtype).unsqueeze(-1)
    certain = (x == math.inf).any(-1, keepdim=True)
    z = torch.where(certain, torch.where(x == math.inf, 0, -math.inf), x)
    sample = topk_mask((z + gumbel_noise(z, generator=generator)).detach(), 1)
    probs = torch.softmax(z, -1)
    between = ((sample + torch.softmax(z / tau, -1)) / 2).detach()
    # linear in the logits, with J(π₁) as its derivative; infinite ones have no part in it
    finite = z.masked_fill(z.isinf(), 0)
    towards = between * (finite - (between * finite).sum(-1, keepdim=True))
    return _unrows(_through(sample, 2 * towards - probs / 2), logits, dim)


@by_lengths
def gumbel(
    logits: Tensor,
    k: Scalar,
    dim: int = -1,
    *,
    tau: Scalar = 1.0,
    cdf: CDFName | CDF = "logistic",
    hard: bool = True,
    generator: Generator | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """The Gumbel-softmax of k-hot vectors.

        y = σ_k((logits + g)/τ),   g_i ~ Gumbel(0, 1)

    ``hard=False`` is a relaxed sample with its exact, reparametrised gradient. ``hard=True`` is the k-hot
    vector of the k largest logits + g, with the gradient of the relaxed one, as in F.gumbel_softmax: the
    sample is then that of Gumbel top-k (sampling without replacement), whose inclusion probabilities are not
    σ_k(logits).

    Args:
        logits, k, dim, cdf, generator: as for :func:`sample_khot`.
        tau: temperature > 0; a number or a tensor that broadcasts with the batch shape.
        hard: True for a k-hot sample, False for a relaxed one.
        offsets: of packed rows, as for :func:`khot.soft_topk`.

    Returns:
        Numbers in [0, 1] of the logits' shape and dtype, each row summing to k (hard: to ⌊k + ½⌋);
        differentiable in logits, k and tau.

    Errors: as for :func:`sample_khot`.

    Source: Wijk, Vinuesa, Azizpour 2025, Algorithm 3; Kool, van Hoof, Welling 2019.

    Example:
        >>> khot.estimators.gumbel(torch.zeros(8), 3).sum()
        tensor(3.)
    """
    x = _rows(logits, dim)
    sample = soft_topk(x + gumbel_noise(x, generator=generator), k, tau=tau, cdf=cdf, hard=hard)
    return _unrows(sample, logits, dim)


@by_lengths
def simple(
    logits: Tensor,
    k: Scalar,
    dim: int = -1,
    *,
    generator: Generator | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """A conditional Poisson sample with parameters θ = logits, and the exact gradient of its marginals.

        p(x) ∝ exp⟨θ, x⟩ for x ∈ {0, 1}ⁿ, Σx = k

    Backward is the gradient of E[x]. Unlike in
    :func:`straight_through`, the logits are the natural parameters of the distribution, and the inclusion
    probabilities follow from them.

    Args:
        logits, dim, generator: as for :func:`sample_khot`.
        k: how many; an integer in [0, n], or a tensor of integers that broadcasts with the batch shape.
        offsets: of packed rows, as for :func:`khot.soft_topk`.

    Returns:
        Zeros and ones of the logits' shape and dtype, differentiable in logits.

    Errors: as for :func:`sample_khot`; also ValueError for a k that is not an integer.

    Source: Ahmed, Zeng, Niepert, Van den Broeck 2023.

    Example:
        >>> khot.estimators.simple(torch.zeros(8), 3).sum()
        tensor(3.)
    """
    x = _rows(logits, dim)
    sample = conditional_poisson.sample(x.detach(), k, generator=generator)
    return _unrows(_through(sample, conditional_poisson.marginals(x, k)), logits, dim)


@by_lengths
def imle(
    logits: Tensor,
    k: Scalar,
    dim: int = -1,
    *,
    tau: Scalar = 1.0,
    step: float = 1.0,
    generator: Generator | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """Implicit maximum likelihood: the top k of perturbed logits, compared with those that the loss prefers.

        x = topk(θ + τg),   g_i ~ Gumbel(0, 1),   v → (x − topk(θ + τg − λv))/λ in backward

    with v = ∂f/∂x and the same noise g. As λ → 0 this finite difference has the mean J v, with J the Jacobian
    of E[x].

    Args:
        logits, k, dim, generator: as for :func:`sample_khot`. The top k are ⌊k + ½⌋.
        tau: scale of the noise > 0; a number or a tensor that broadcasts with the batch shape.
        step: λ > 0, in the units of θ divided by those of v: small for little bias, large for little
            variance.
        offsets: of packed rows, as for :func:`khot.soft_topk`.

    Returns:
        Zeros and ones of the logits' shape and dtype, differentiable in logits.

    Errors: as for :func:`sample_khot`.

    Source: Niepert, Minervini, Franceschi 2021, with Gumbel noise.

    Example:
        >>> khot.estimators.imle(torch.zeros(8), 3).sum()
        tensor(3.)
    """
    arguments.check_scalar(step, "step", low=0)
    if not step > 0:
        raise ValueError(f"step must be > 0, but got {step}")
    x = _rows(logits, dim)
    k = arguments.per_row(k, "k", x, low=0, high=x.shape[-1])
    scale = arguments.per_row(tau, "tau", x, low=0, low_open=True).detach().to(x.dtype).unsqueeze(-1)
    perturbed = x + scale * gumbel_noise(x, generator=generator)
    return _unrows(_PerturbAndMap.apply(perturbed, k, step), logits, dim)


class _PerturbAndMap(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(perturbed: Tensor, k: Tensor, step: float) -> Tensor:
        return topk_mask(perturbed, k)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2], output)
        ctx.step = inputs[2]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        perturbed, k, sample = ctx.saved_tensors
        wanted = topk_mask(perturbed - ctx.step * grad, k)
        return (sample - wanted) / ctx.step, None, None


@by_lengths
def sequential_softmax(
    logits: Tensor,
    k: int | Tensor,
    dim: int = -1,
    *,
    tau: Scalar = 1.0,
    hard: bool = True,
    generator: Generator | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """The top k of perturbed logits, with the gradient of k softmaxes in turn (Xie and Ermon).

    The relaxed sample is :func:`khot.baselines.sequential_softmax_topk` of θ + g with g_i ~ Gumbel(0, 1).
    ``hard=True`` is the k-hot vector of the k largest θ + g, drawn as by :func:`gumbel`, with the gradient of
    the relaxed one. This is an earlier method, to compare :func:`gumbel` with: entries of the relaxed sample
    may exceed 1, and it takes O(nk) time and memory.

    Args:
        logits, dim, generator: as for :func:`sample_khot`.
        k: how many; an integer in [0, n], or a tensor of integers that broadcasts with the batch shape.
        tau: temperature > 0; a number or a tensor that broadcasts with the batch shape.
        hard: True for a k-hot sample, False for a relaxed one.
        offsets: of packed rows, as for :func:`khot.soft_topk`.

    Returns:
        Zeros and ones, or with ``hard=False`` numbers in [0, k], of the logits' shape and dtype, each row
        summing to k; differentiable in logits and tau.

    Errors: as for :func:`sample_khot`; also ValueError for a k that is not an integer. Compiling and vmap are
    not supported.

    Source: Xie, Ermon 2019, Algorithm 2; the comparison of Wijk, Vinuesa, Azizpour 2025.

    Example:
        >>> khot.estimators.sequential_softmax(torch.tensor([99.0, -99.0, 99.0]), 2)
        tensor([1., 0., 1.])
    """
    arguments.check_flags(hard=hard)
    x = _rows(logits, dim)
    perturbed = x + gumbel_noise(x, generator=generator)
    # infinite scores, which would make softmax NaN, become finite ones that are still too large for sums
    far = math.sqrt(torch.finfo(x.dtype).max)
    finite = perturbed.clamp(-far, far)
    # for k = 0 there is no softmax, but there is a gradient, which is 0
    relaxed = baselines.sequential_softmax_topk(finite, k, tau=tau) + 0 * finite
    # the mask is NaN, or raises, for a row that has fewer entries than k
    chosen = topk_mask(perturbed.detach(), k)
    sample = _through(chosen, relaxed) if hard else relaxed.where(~chosen.isnan(), math.nan)
    return _unrows(sample, logits, dim)


@by_lengths
def ncpss(
    logits: Tensor,
    k: int | Tensor,
    dim: int = -1,
    *,
    tau: Scalar = 1.0,
    rounds: int = 3,
    generator: Generator | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """Iterative Poisson samples of about k, with the gradient of rescaled sigmoids (NCPSS).

    The probabilities π are those of :func:`khot.baselines.rescaled_sigmoid_topk`. Every unit is first drawn
    independently, with its π_i. Each of the ``rounds`` then corrects the size: of too many ones, k are drawn
    again in expectation; if there are too few, the missing number is drawn among the zeros in expectation.
    The π_i of the units among which a round draws are rescaled, as the sigmoids are, so that they sum to the
    wanted number. The gradient is x − π.detach() + π.

    This is an earlier method, to compare :func:`straight_through` with. Its defects: sizes come closer to k
    in each round, but need not reach it. The inclusion probabilities are not π, and adding a constant to the
    logits changes them. A logit of +inf does not make a unit certain. A unit with −inf is never drawn, as
    with the others.

    Args:
        logits, dim, generator: as for :func:`sample_khot`.
        k: how many; an integer in [0, n], or a tensor of integers that broadcasts with the batch shape.
        tau: temperature > 0 of the sigmoids; a number or a tensor that broadcasts with the batch shape.
        rounds: the number of corrections, at least 0.
        offsets: of packed rows, as for :func:`khot.soft_topk`.

    Returns:
        Zeros and ones of the logits' shape and dtype, differentiable in logits and tau.

    Errors: as for :func:`sample_khot`; also ValueError for a k that is not an integer, and for rounds < 0.
    Compiling and vmap are not supported.

    Source: Pervez, Lippe, Gavves 2023.

    Example:
        >>> khot.estimators.ncpss(torch.tensor([99.0, -99.0, 99.0]), 2)
        tensor([1., 0., 1.])
    """
    arguments.check_integer(rounds, "rounds", low=0)
    x = _rows(logits, dim)
    probs = baselines.rescaled_sigmoid_topk(x, k, tau=tau)
    k = arguments.per_row(k, "k", x, low=0, high=x.shape[-1], integer=True)
    sample = _iterative_poisson(probs.detach(), k.unsqueeze(-1), x != -math.inf, rounds, generator)
    return _unrows(_through(sample.to(x.dtype), probs), logits, dim)


def _iterative_poisson(
    probs: Tensor, k: Tensor, possible: Tensor, rounds: int, generator: Generator | None
) -> Tensor:
    """Independent draws of what is possible, and corrections of the size: see :func:`ncpss`."""
    probs = probs.to(wide_dtype(probs.device))

    def draw(p: Tensor) -> Tensor:
        uniform = torch.rand(p.shape, dtype=p.dtype, device=p.device, generator=generator)
        return (uniform < p).to(p.dtype)

    x = draw(probs)
    for _ in range(rounds):
        size = x.sum(-1, keepdim=True)
        over = size > k
        among = torch.where(over, x, possible * (1 - x))
        wanted = torch.where(over, k, k - size)
        count, total = among.sum(-1, keepdim=True), (among * probs).sum(-1, keepdim=True)
        down = probs * wanted / total.clamp_min(1e-12)
        up = 1 - (1 - probs) * (count - wanted) / (count - total).clamp_min(1e-12)
        drawn = draw(torch.where(total >= wanted, down, up)) * among
        x = torch.where(over, drawn, x + drawn)
    return x


def score_function(
    loss: Tensor,
    log_prob: Tensor,
    baseline: Literal["leave_one_out"] | None = None,
) -> Tensor:
    """A surrogate of the losses of samples, with the score-function (REINFORCE) gradient of their mean.

    Equal to the losses in value; its gradient is that of the losses plus (loss − b)·∇log p, whose
    expectation is the gradient of E[loss], without bias, in whatever the losses and log p depend on. f need
    not be differentiable.

    Args:
        loss: f(x) of each sample. Independent samples from p lie along the first dim, and any batch dims
            follow. f is not differentiated with respect to x.
        log_prob: log p(x) of the same samples, of the same shape, from the distribution that drew them. Where
            p is not tractable, the product of inclusion probabilities can take its place, which is
            ``khot.sampling.designs["poisson"].log_prob(x, probs)``: with probs = σ_k(θ) its gradient in θ is
            x − probs. It is biased, unless the units are independent; its mean is 0 with any exact design,
            so that a constant in the loss still adds no bias.
        baseline: None for b = 0, or ``"leave_one_out"``: b is the mean loss of the other samples, which
            reduces the variance and adds no bias.

    Returns:
        The losses' shape and dtype; take its mean over the samples and call backward.

    Raises:
        ValueError: shapes that differ, an unknown baseline, fewer than two samples for leave_one_out.
        TypeError: an argument that is not a floating-point tensor.

    Sources: Williams 1992; Kool, van Hoof, Welling 2019 (leave one out); Wijk, Vinuesa, Azizpour 2025,
    sections 2.4 and 3.

    Example:
        >>> logits = torch.zeros(4, requires_grad=True)
        >>> p = khot.distributions.ConditionalPoisson(2, logits)
        >>> x = p.sample((100,))
        >>> loss = (x * torch.arange(4)).sum(-1)
        >>> khot.estimators.score_function(loss, p.log_prob(x), "leave_one_out").mean().backward()
        >>> logits.grad.argmax()
        tensor(3)
    """
    arguments.check_input(loss, "loss")
    arguments.check_input(log_prob, "log_prob")
    if loss.shape != log_prob.shape:
        raise ValueError(
            f"log_prob must have the loss's shape {tuple(loss.shape)}, but got {tuple(log_prob.shape)}"
        )
    advantage = loss.detach()
    if baseline == "leave_one_out":
        samples = loss.shape[0] if loss.dim() else 1
        if samples < 2:
            raise ValueError(f"loss must have at least 2 samples for leave_one_out, but got {samples}")
        # minus the mean of the others: (S·loss − total)/(S − 1)
        advantage = (advantage - advantage.mean(0)) * (samples / (samples - 1))
    elif baseline is not None:
        raise ValueError(f"baseline must be None or 'leave_one_out', but got {baseline!r}")
    return loss + advantage * (log_prob - log_prob.detach())


class _Estimator(NamedTuple):
    draw: Callable[..., Tensor]
    takes: frozenset[str]  # the options of sample_khot that have an effect
    designs: tuple[DesignName, ...] = ()  # for an estimator with a fixed design: its name, which is accepted


# Of rows that are whole: packed ones have been taken apart before.
_ESTIMATORS: dict[EstimatorName, _Estimator] = {
    "straight_through": _Estimator(unwrap(straight_through), frozenset({"k=None", "design", "cdf"})),
    "second_order": _Estimator(unwrap(second_order), frozenset({"k=None", "design", "tau", "cdf"})),
    "gumbel": _Estimator(unwrap(gumbel), frozenset({"tau", "cdf", "hard"})),
    "simple": _Estimator(unwrap(simple), frozenset(), ("conditional_poisson",)),
    "imle": _Estimator(unwrap(imle), frozenset({"tau"})),
    "sequential_softmax": _Estimator(unwrap(sequential_softmax), frozenset({"tau", "hard"})),
    "ncpss": _Estimator(unwrap(ncpss), frozenset({"tau"})),
}


def _listed(names: Sequence[str]) -> str:
    """a, b and c."""
    return " and ".join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else names[0]


def _rows(logits: Tensor, dim: int) -> Tensor:
    """Rows along the last dim, in float32 at least: in half precision π would not sum to k."""
    arguments.check_input(logits, "logits")
    x = arguments.rows(logits, dim)
    return x if x.dtype.itemsize >= 4 else x.float()


def _unrows(sample: Tensor, logits: Tensor, dim: int) -> Tensor:
    return arguments.unrows(sample.to(logits.dtype), logits, dim)


def _inclusion_probs(x: Tensor, k: Scalar | None, cdf: CDFName | CDF, tau: Scalar = 1.0) -> Tensor:
    if k is not None:
        return soft_topk(x, k, tau=tau, cdf=cdf)
    F = cdfs.resolve(cdf)
    tau = arguments.per_row(tau, "tau", x, low=0, low_open=True)
    return F.cdf(x / tau.to(x.dtype).unsqueeze(-1))


def _draw(probs: Tensor, design: DesignName, generator: Generator | None) -> Tensor:
    if design == "pareto" and arguments.readable(probs):
        small = pareto.draw_small(probs, -1, generator, False)
        if small is not None:
            return small
    given = probs.detach()
    if not given.is_cuda:  # a row of NaN draws nothing here; π − π.detach() makes it NaN again
        given = given.nan_to_num(nan=0.0)
    return sampling.sample(given, design, generator=generator)


def _check_size(design: DesignName, k: Scalar | None) -> None:
    if k is not None and not resolve(design).fixed_size:
        fixed = ", ".join(repr(name) for name, other in sampling.designs.items() if other.fixed_size)
        raise ValueError(f"design must be one of fixed size ({fixed}) where k is given, but got {design!r}")


def _through(sample: Tensor, surrogate: Tensor) -> Tensor:
    """The sample, with the gradient of the surrogate."""
    return sample + (surrogate - surrogate.detach())


def _is_integer(k: Scalar) -> bool:
    """Whether k is known to be an integer without looking at a device."""
    return not k.is_floating_point() if isinstance(k, Tensor) else float(k).is_integer()
