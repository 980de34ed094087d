"""Distributions over k-hot vectors, relaxed ones and ordered choices, in the manner of torch.distributions.

=====================  ==============================================  ===============  =====================
distribution           parameters                                      a sample         gradient of a sample
=====================  ==============================================  ===============  =====================
KHot                   inclusion probabilities, and a design           k-hot            none
KHotStraightThrough    the same                                        k-hot            of the probabilities
ConditionalPoisson     natural ones: p(x) ∝ exp(⟨logits, x⟩)           k-hot            none
RelaxedKHot            temperature, logits                             sums to k        exact
LogitRelaxedKHot       the same                                        its logits       exact
PlackettLuce           logits                                          k indices        none
=====================  ==============================================  ===============  =====================

They can be used like torch's own distributions: with batch and event shapes, ``expand``, ``Independent``,
``kl_divergence`` and validation. Like torch's they draw from the global random state.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributions import constraints, register_kl
from torch.distributions.constraints import Constraint
from torch.distributions.distribution import Distribution
from torch.distributions.utils import lazy_property
from torch.nn.functional import logsigmoid
from torch.utils.weak import WeakTensorKeyDictionary

from khot import sampling
from khot._core import arguments
from khot._core.precision import at_least_single, in_float64, on, widen
from khot.counting import inverse_soft_count
from khot.masks import sigmoid_topk, soft_topk, topk_mask
from khot.sampling import DesignName, conditional_poisson
from khot.sampling._lookup import resolve
from khot.sampling._noise import gumbel_noise
from khot.selection import topk

__all__ = [
    "ConditionalPoisson",
    "KHot",
    "KHotStraightThrough",
    "LogitRelaxedKHot",
    "PlackettLuce",
    "RelaxedKHot",
    "capped_simplex",
    "k_hot",
]


def __dir__() -> list[str]:
    return __all__


class _WithK(Constraint):
    """The base of the two constraints: they depend on k."""

    event_dim = 1

    def __init__(self, k: float | Tensor) -> None:
        self.k = k
        super().__init__()

    def __repr__(self) -> str:
        # torch's own leaves out the first letter of the name, which is an underscore in torch
        k = self.k
        if isinstance(k, Tensor) and arguments.readable(k) and len(k.unique()) == 1:
            k = k.flatten()[0].item()
        return f"{type(self).__name__}(k={k})"


class k_hot(_WithK):
    """The k-hot vectors {x ∈ {0, 1}ⁿ, Σx = k}.

    Args:
        k: an integer tensor of the batch shape, or an int.

    Example:
        >>> khot.distributions.k_hot(2).check(torch.tensor([[1.0, 0.0, 1.0], [1.0, 0.0, 0.0]]))
        tensor([ True, False])
    """

    is_discrete = True

    def __init__(self, k: int | Tensor) -> None:
        super().__init__(k)

    def check(self, value: Tensor) -> Tensor:
        arguments.check_bool_or_real(value, "value")
        # counted as integers: a sum in half precision need not be exact
        return ((value == 0) | (value == 1)).all(-1) & ((value == 1).sum(-1) == self.k)


class capped_simplex(_WithK):
    """The k-capped simplex {y ∈ [0, 1]ⁿ, Σy = k}, the convex hull of the k-hot vectors.

    The sum is k up to what the operators guarantee: 1e-12·max(1, min(k, n − k)) in float64 and 1e-6 times the
    same in narrower dtypes, plus n·eps of the value's dtype for the rounding of its entries.

    Args:
        k: a tensor of the batch shape, or a number.

    Example:
        >>> khot.distributions.capped_simplex(1).check(torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.5, 0.5]]))
        tensor([ True, False])
    """

    def check(self, value: Tensor) -> Tensor:
        arguments.check_input(value, "value")
        inside = ((value >= 0) & (value <= 1)).all(-1)
        return inside & ((widen(value).sum(-1) - self.k).abs() <= _tolerance(value, self.k))


class _distinct_indices(Constraint):
    """Different indices in [0, n), in any order."""

    is_discrete = True
    event_dim = 1

    def __init__(self, n: int) -> None:
        self.n = n
        super().__init__()

    def __repr__(self) -> str:
        return f"distinct_indices(n={self.n})"

    def check(self, value: Tensor) -> Tensor:
        twice = (value.sort(-1).values.diff(dim=-1) == 0).any(-1)
        return ((value >= 0) & (value < self.n)).all(-1) & ~twice


class _real_vector(Constraint):
    """Vectors without a NaN. torch's own does not take an empty sample."""

    event_dim = 1

    def __repr__(self) -> str:
        return "real_vector"

    def check(self, value: Tensor) -> Tensor:
        return ~value.isnan().any(-1)


def _tolerance(value: Tensor, k: float | Tensor) -> Tensor:
    """How far the sum of a row may be from k: what docs/numerics.md says that the operators guarantee, and
    the rounding of n entries up to 1."""
    n, eps = value.shape[-1], torch.finfo(value.dtype).eps
    k = k.to(value.device) if isinstance(k, Tensor) else torch.as_tensor(k, device=value.device)
    size = widen(torch.minimum(k, n - k)).clamp(min=1)
    return n * eps + (1e-12 if value.dtype == torch.float64 else 1e-6) * size


def _broadcast(batch: torch.Size, shape: torch.Size, what: str, name: str) -> torch.Size:
    """The batch shape, with that of k or the temperature."""
    try:
        return torch.broadcast_shapes(batch, shape)
    except RuntimeError:
        raise ValueError(
            f"{what} must have a shape that broadcasts with the batch shape {tuple(batch)} (that of {name} "
            f"without its last dim), but got {tuple(shape)}"
        ) from None


_Shape = torch.Size | list[int] | tuple[int, ...]

NO_SHAPE = torch.Size()

_Self = TypeVar("_Self", bound="_ChoiceOfK")


class _ChoiceOfK(Distribution):
    """The base of the four: k of the batch shape, and a parameter vector of the shape batch + event."""

    temperature: Tensor

    _vectors: tuple[str, ...] = ("probs", "logits")  # attributes of shape batch + event
    _scalars: tuple[str, ...] = ("k", "temperature")  # attributes of shape batch
    k: Tensor

    def __init__(
        self, k: Any, name: str, param: Tensor, validate_args: bool | None, temperature: Any = None
    ) -> None:
        arguments.check_input(param, name)
        if validate_args is not None:
            arguments.check_flags(validate_args=validate_args)
        if param.dim() == 0:
            raise ValueError(f"{name} must have at least one dim, but got {param}")
        batch_shape = param.shape[:-1]
        for what, value in (("k", k), ("temperature", temperature)):
            if isinstance(value, Tensor):
                batch_shape = _broadcast(batch_shape, value.shape, what, name)
        param = param.expand(batch_shape + param.shape[-1:])
        k = arguments.per_row(k, "k", param, low=0, high=param.shape[-1], integer=True)
        self.k = k.long().expand(batch_shape)
        if temperature is not None:
            temperature = arguments.per_row(temperature, "temperature", param, low=0, low_open=True)
            # at least float32: rounded to half precision it would change z by more than that rounds a sample
            dtype = torch.promote_types(param.dtype, torch.float32)
            self.temperature = temperature.to(dtype).expand(batch_shape)
        setattr(self, name, param)
        super().__init__(batch_shape, param.shape[-1:], validate_args=validate_args)

    def expand(self: _Self, batch_shape: _Shape, _instance: Any = None) -> _Self:
        new: Any = self._get_checked_instance(type(self), _instance)
        batch_shape = torch.Size(batch_shape)
        for name, value in self.__dict__.items():
            if name in self._vectors:
                value = value.expand(batch_shape + self.event_shape)
            elif name in self._scalars:
                value = value.expand(batch_shape)
            elif name.startswith("_"):
                continue
            setattr(new, name, value)
        Distribution.__init__(new, batch_shape, self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    @property
    def _param(self) -> Tensor:
        return self.__dict__["logits"] if "logits" in self.__dict__ else self.__dict__["probs"]

    @property
    def param_shape(self) -> torch.Size:
        return self._param.shape


class _KHotVectors(_ChoiceOfK):
    """The base of the discrete ones: their support, and the moments given by the inclusion probabilities."""

    has_enumerate_support = True
    _instead: str  # what has samples with a gradient
    probs: Any  # a tensor, which the subclasses compute on first use

    @constraints.dependent_property(is_discrete=True, event_dim=1)
    def support(self) -> Constraint:
        return k_hot(self.k)

    @property
    def mean(self) -> Tensor:
        return self.probs

    @property
    def variance(self) -> Tensor:
        probs = at_least_single(self.probs)
        return (probs * (1 - probs)).to(self.probs.dtype)

    def rsample(self, sample_shape: _Shape = NO_SHAPE) -> Tensor:
        raise NotImplementedError(
            f"{type(self).__name__} has no rsample, because its samples are discrete: use {self._instead}, "
            "or khot.estimators.score_function with log_prob"
        )

    def enumerate_support(self, expand: bool = True) -> Tensor:
        """All k-hot vectors, (n choose k, *batch_shape, n); k has to be the same in every row."""
        arguments.check_flags(expand=expand)
        n, k = self.event_shape[0], int(self.k.max()) if self.k.numel() else 0
        if self.k.numel() and int(self.k.min()) != k:
            raise NotImplementedError("enumerate_support needs the same k in every row")
        chosen = torch.tensor(list(itertools.combinations(range(n), k)), dtype=torch.long)
        values = torch.zeros(len(chosen), n, dtype=self._param.dtype).scatter_(-1, chosen, 1.0)
        values = values.to(self._param.device)
        values = values.reshape(-1, *(1,) * len(self.batch_shape), n)
        return values.expand(-1, *self.batch_shape, n) if expand else values


class KHot(_KHotVectors):
    """The k-hot vectors x ∈ {0, 1}ⁿ, Σx = k, with given inclusion probabilities π: E[x] = π.

    The k-hot counterpart of ``OneHotCategorical``. For 1 < k < n − 1 there are many such distributions, the
    designs of :mod:`khot.sampling`.

    Args:
        k: how many; an int, or a tensor of integers that broadcasts with the batch shape.
        probs: π, (*batch, n), in [0, 1], each row summing to k, up to the tolerance of
            :class:`capped_simplex`.
        logits: instead of probs; (*batch, n), with π = σ_k(logits) (:func:`khot.sigmoid_topk`).
        design: a name in :data:`khot.sampling.designs`, of fixed size and with the given inclusion
            probabilities. With ``"pareto"`` and ``"adjusted_conditional_poisson"`` E[x] = π up to 2e-3.

    ``log_prob`` exists for designs in which it is tractable (pareto, conditional_poisson,
    adjusted_conditional_poisson, sampford), ``entropy`` and ``kl_divergence`` for conditional_poisson, and
    ``mode`` where it is known to be the k most probable units (pareto, conditional_poisson, sampford). All
    but mode are differentiable in probs or logits.
    With any other design they raise NotImplementedError. For a policy of k simultaneous actions, which needs
    log_prob, entropy and divergence but no given π, take :class:`ConditionalPoisson`.

    Raises:
        ValueError: probs that do not sum to k, k that is not an integer in [0, n], an unknown design, both or
            neither of probs and logits.
        TypeError: parameters that are not floating-point tensors.

    Source: Wijk, Vinuesa, Azizpour 2025, section 2.2.

    Example:
        >>> p = khot.distributions.KHot(2, probs=torch.tensor([0.9, 0.7, 0.3, 0.1]))
        >>> p.sample((3,)).sum(-1), p.mode
        (tensor([2., 2., 2.]), tensor([1., 1., 0., 0.]))
    """

    arg_constraints: ClassVar[dict[str, Constraint]] = {
        "k": constraints.nonnegative_integer,
        "probs": constraints.independent(constraints.unit_interval, 1),
        "logits": constraints.real_vector,
    }

    _instead = (
        "KHotStraightThrough for a surrogate gradient, RelaxedKHot for relaxed samples with an exact one"
    )

    def __init__(
        self,
        k: int | Tensor,
        probs: Tensor | None = None,
        logits: Tensor | None = None,
        *,
        design: DesignName = "pareto",
        validate_args: bool | None = None,
    ) -> None:
        self.design: DesignName = design
        found = resolve(design)
        if not (found.fixed_size and found.close):
            known = [name for name, other in sampling.designs.items() if other.fixed_size and other.close]
            raise ValueError(
                "design must be one of fixed size with the given inclusion probabilities "
                f"({', '.join(map(repr, known))}), but got {design!r}"
            )
        if (probs is None) == (logits is None):
            raise ValueError("one of probs and logits must be given, and not both")
        if logits is not None:
            super().__init__(k, "logits", logits, validate_args)
        elif probs is not None:
            super().__init__(k, "probs", probs, validate_args)
            if self._validate_args:
                self._check_sum()

    def _check_sum(self) -> None:
        total = widen(self.probs.detach()).sum(-1)
        tolerance = _tolerance(self.probs, self.k)
        bad = (total - self.k).abs() > tolerance
        if bool(bad.any()):
            raise ValueError(
                f"probs must sum to k in every row, up to {tolerance[bad][0].item():.1e}, but got a sum of "
                f"{total[bad][0].item()} for k = {arguments.plain(self.k[bad][0].item())}"
            )

    @lazy_property
    def probs(self) -> Tensor:
        """The inclusion probabilities π."""
        return sigmoid_topk(self.logits, self.k)

    @lazy_property
    def logits(self) -> Tensor:
        """Scores with π = σ_k(logits)."""
        return torch.logit(self.probs)

    @property
    def mode(self) -> Tensor:
        # The variables of the units have monotone likelihood ratios in these designs, so that exchanging a
        # unit for a more probable one raises the probability.
        self._require("mode", ("pareto", "conditional_poisson", "sampford"))
        return topk_mask(self._param, self.k)

    def sample(self, sample_shape: _Shape = NO_SHAPE) -> Tensor:
        with torch.no_grad():
            return sampling.sample(self._summed_probs, self.design, sample_shape=sample_shape).to(self.probs)

    def log_prob(self, value: Tensor) -> Tensor:
        tractable = {name: d.log_prob for name, d in sampling.designs.items() if d.log_prob is not None}
        self._require("log_prob", tractable)
        arguments.check_bool_or_real(value, "value")
        arguments.check_has_values(value, "value", self._param)
        if self._validate_args:
            self._validate_sample(value)
        probs = self._summed_probs
        return tractable[self.design](value.to(probs.device), probs).to(self.probs)

    def entropy(self) -> Tensor:
        return self._natural("entropy").entropy().to(self.probs)

    def _natural(self, what: str) -> ConditionalPoisson:
        """This distribution by its natural parameters, if it has them."""
        self._require(what, ("conditional_poisson",))
        logits = conditional_poisson.calibrate(self._summed_probs)
        return ConditionalPoisson(self.k.to(logits.device), logits, validate_args=False)

    @property
    def _summed_probs(self) -> Tensor:
        """The inclusion probabilities in float64, corrected so that rounding does not change their sum."""
        probs = in_float64(self.probs)
        g = (probs * (1 - probs)).detach()
        share = g / g.sum(-1, keepdim=True).clamp_min(torch.finfo(g.dtype).tiny)
        excess = probs.sum(-1) - self.k.to(probs.device)
        if self.probs.dtype == torch.float64:
            excess = excess.detach()  # a constant, so that the derivatives are those in probs
        return (probs - share * excess.unsqueeze(-1)).clamp(0, 1)

    def _require(self, what: str, designs: Iterable[str]) -> None:
        if self.design not in designs:
            known = ", ".join(map(repr, designs))
            raise NotImplementedError(
                f"{what} is not known for design {self.design!r}, only for {known}; "
                "khot.distributions.ConditionalPoisson has log_prob, entropy and kl_divergence by its logits"
            )

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, design: {self.design})"


class KHotStraightThrough(KHot):
    """:class:`KHot` whose samples carry the gradient of their inclusion probabilities: x − π.detach() + π.

    Args, errors: as for :class:`KHot`.

    ``rsample`` returns zeros and ones with a surrogate gradient, as ``OneHotCategoricalStraightThrough``
    does. It is exact in expectation where the sample is used linearly (Wijk, Vinuesa, Azizpour 2025,
    Proposition 3).

    Example:
        >>> logits = torch.zeros(4, requires_grad=True)
        >>> x = khot.distributions.KHotStraightThrough(2, logits=logits).rsample()
        >>> (x * torch.arange(4)).sum().backward()
        >>> logits.grad
        tensor([-0.3750, -0.1250,  0.1250,  0.3750])
    """

    has_rsample = True

    def rsample(self, sample_shape: _Shape = NO_SHAPE) -> Tensor:
        return self.sample(sample_shape) + (self.probs - self.probs.detach())


class ConditionalPoisson(_KHotVectors):
    """The k-hot softmax: of all distributions with given inclusion probabilities that of largest entropy.

        p(x) ∝ exp⟨logits, x⟩ for x ∈ {0, 1}ⁿ, Σx = k

    It is the distribution of independent Bernoulli variables with these logits, given that k of them are 1.
    Everything is exact and O(n), by :mod:`khot.sampling.conditional_poisson`.

    Args:
        k: how many; an int, or a tensor of integers that broadcasts with the batch shape.
        logits: natural parameters θ, (*batch, n); −inf is never in a sample, +inf always. They are not the
            scores of :class:`KHot`: ``KHot(k, logits=logits, design="conditional_poisson")`` has exactly the
            inclusion probabilities σ_k(logits), whereas those of this distribution are only close to them.

    ``log_prob``, ``mean`` (= ``probs``, the inclusion probabilities), ``variance``, ``entropy`` and
    ``kl_divergence`` are exact and differentiable in logits.

    Raises:
        ValueError: k that is not an integer in [0, n].
        TypeError: logits that are not a floating-point tensor.

    Sources: Chen, Dempster, Liu 1994; Tillé 2006, chapter 5.

    Example:
        >>> p = khot.distributions.ConditionalPoisson(2, torch.zeros(4))
        >>> p.mean, p.entropy().exp()
        (tensor([0.5000, 0.5000, 0.5000, 0.5000]), tensor(6.))
    """

    arg_constraints: ClassVar[dict[str, Constraint]] = {
        "k": constraints.nonnegative_integer,
        "logits": constraints.real_vector,
    }

    _instead = "khot.estimators.simple for the gradient of its inclusion probabilities"

    def __init__(self, k: int | Tensor, logits: Tensor, validate_args: bool | None = None) -> None:
        self.logits: Tensor
        super().__init__(k, "logits", logits, validate_args)

    @lazy_property
    def probs(self) -> Tensor:
        """The inclusion probabilities."""
        return conditional_poisson.marginals(self.logits, self.k)

    @property
    def mode(self) -> Tensor:
        return topk_mask(self.logits, self.k)

    def sample(self, sample_shape: _Shape = NO_SHAPE) -> Tensor:
        with torch.no_grad():
            return conditional_poisson.sample(self.logits, self.k, sample_shape=sample_shape)

    def log_prob(self, value: Tensor) -> Tensor:
        arguments.check_bool_or_real(value, "value")
        arguments.check_has_values(value, "value", self._param)
        if self._validate_args:
            self._validate_sample(value)
        return conditional_poisson.log_prob(value, self.logits, self.k)

    def entropy(self) -> Tensor:
        return conditional_poisson.entropy(self.logits, self.k)

    def _natural(self, what: str) -> ConditionalPoisson:
        return self


class _Relaxed(_ChoiceOfK):
    """The base of the relaxed ones: z = (logits + g)/temperature − t, of which they show σ(z) or z itself."""

    arg_constraints: ClassVar[dict[str, Constraint]] = {
        "temperature": constraints.positive,
        "k": constraints.nonnegative_integer,
        "logits": constraints.real_vector,
    }
    has_rsample = True

    def __init__(
        self,
        temperature: float | Tensor,
        k: int | Tensor,
        logits: Tensor,
        validate_args: bool | None = None,
    ) -> None:
        self.logits: Tensor
        arguments.check_scalar(temperature, "temperature", low=0, low_open=True)
        super().__init__(k, "logits", logits, validate_args, temperature)

    def _perturbed(self, sample_shape: _Shape) -> Tensor:
        """logits + g, in float32 at least."""
        x = self.logits.expand(self._extended_shape(sample_shape))
        x = at_least_single(x)
        return x + gumbel_noise(x)

    def _check_value(self, value: Tensor) -> None:
        arguments.check_input(value, "value")
        arguments.check_has_values(value, "value", self.logits)
        if self._validate_args:
            self._validate_sample(value)

    def _log_density(self, z: Tensor, of_simplex: bool) -> Tensor:
        """log p of the differences of z (*sample, *batch, n), or of σ(z); in z's dtype."""
        theta = self.logits.to(z.dtype)
        free, pinned = theta.isfinite(), (theta == math.inf).sum(-1)
        n = free.sum(-1)
        # an infinite logit has an infinite z, and no other logit has one
        inside = torch.where(free, ~z.isinf(), z == theta)
        inside, free = inside.all(-1), free & ~z.isinf()
        z = torch.where(free, z, 0)
        tau = self.temperature.to(z.dtype)
        a = torch.where(free, tau.unsqueeze(-1) * z - torch.where(free, theta, 0), 0)
        log_total = (-a).masked_fill(~free, -math.inf).logsumexp(-1)
        log_prob = torch.lgamma(n.to(z.dtype)) + (n - 1) * tau.log() - a.sum(-1) - n * log_total
        if of_simplex:
            log_h = logsigmoid(z) + logsigmoid(-z)
            log_sum = log_h.masked_fill(~free, -math.inf).logsumexp(-1)
            log_prob = log_prob + log_sum - torch.where(free, log_h, 0).sum(-1)
        log_prob = log_prob.masked_fill(~inside, -math.inf)
        return log_prob.masked_fill((self.k <= pinned) | (self.k >= pinned + n), math.nan)


class RelaxedKHot(_Relaxed):
    """Points of the k-capped simplex near its corners.

        y = σ_k((logits + g)/temperature),   g_i ~ Gumbel(0, 1)

    The k-hot counterpart of ``RelaxedOneHotCategorical``; as the temperature falls, a sample tends to the
    k-hot vector of Gumbel top-k.

    Args:
        temperature: > 0; a number, or a tensor that broadcasts with the batch shape.
        k: how many; an int, or a tensor of integers that broadcasts with the batch shape.
        logits: θ, (*batch, n). An entry with −inf is 0 in every sample and one with inf is 1; the density is
            then that of the other entries.

    ``rsample`` is differentiable in logits and temperature, exactly. ``log_prob`` is the density of
    any n − 1 of the coordinates. With z = logit y, h = y(1 − y) and a = τz − θ

        log p(y) = log (n−1)! + (n−1) log τ + log Σh − Σ log h − Σa − n log Σe^−a

    by a change of variables from g to y and a common shift of g, which does not affect y and is integrated
    out in closed form, as for the Concrete distribution. It is differentiable in all arguments, and NaN for k
    = 0 and k = n, which have no density. Mean, variance and entropy have no closed form.

    At a low temperature most entries of a sample round to 0 or 1, and their z, on which the density depends,
    cannot be read from them any more. So what ``sample`` and ``rsample`` return is remembered with its z, as
    long as that tensor lives: given to the ``log_prob`` of any RelaxedKHot, it has the density and the
    gradient of the sample before rounding. This does not hold for a copy, a part or a changed sample, nor
    under ``torch.compile``, ``torch.func`` and inference mode. There z is computed from y, where 0 counts as
    half of the least number above 0, and 1 as the greatest one below 1. :class:`LogitRelaxedKHot` has z as
    its sample and so loses nothing anywhere; for the same parameters, differences of log p between two
    distributions, and so KL divergences, are the same in z and in y.

    Raises:
        ValueError: temperature ≤ 0, k that is not an integer in [0, n].
        TypeError: logits that are not a floating-point tensor.

    Sources: Wijk, Vinuesa, Azizpour 2025, Algorithm 3; Maddison, Mnih, Teh 2017, appendix B.

    Example:
        >>> p = khot.distributions.RelaxedKHot(0.5, 2, torch.zeros(4))
        >>> p.rsample((3,)).sum(-1).allclose(torch.tensor(2.0))
        True
    """

    @constraints.dependent_property(is_discrete=False, event_dim=1)
    def support(self) -> Constraint:
        return capped_simplex(self.k)

    def rsample(self, sample_shape: _Shape = NO_SHAPE) -> Tensor:
        perturbed = self._perturbed(sample_shape)
        y = soft_topk(perturbed, self.k, tau=self.temperature).to(self.logits.dtype)
        _remember(y, perturbed, self.k, self.temperature)
        return y

    def log_prob(self, value: Tensor) -> Tensor:
        self._check_value(value)
        z = _remembered(value)
        if z is None:
            z = _logit(value, self.logits.isfinite())
        dtype = torch.promote_types(value.dtype, self.logits.dtype)
        return self._log_density(z, of_simplex=True).to(dtype)


class LogitRelaxedKHot(_Relaxed):
    """The logits of :class:`RelaxedKHot`.

        z = (logits + g)/temperature − t,   with the t for which Σσ(z) = k

    The k-hot counterpart of ``LogitRelaxedBernoulli`` and ``ExpRelaxedCategorical``: ``z.sigmoid()`` is a
    sample of RelaxedKHot, but z does not saturate. Take it for densities and KL divergences of relaxed
    samples, above all in float32, at low temperatures and under ``torch.compile``.

    Args:
        temperature, k, logits: as for :class:`RelaxedKHot`. An entry with an infinite logit has that z; the
            density is then that of the other entries.

    ``rsample`` is differentiable in logits and temperature, exactly. ``log_prob`` is the density of the
    differences z_i − z_j to any one entry j, so it is the same at z and at z + c. With a = τz − θ

        log p(z) = log (n−1)! + (n−1) log τ − Σa − n log Σe^−a

    It is differentiable in all arguments, and NaN for k = 0 and k = n, which have no density. That of
    RelaxedKHot at y = σ(z) is larger by log Σh − Σ log h with h = y(1 − y), which depends on y alone.

    Raises:
        ValueError, TypeError: as for :class:`RelaxedKHot`.

    Sources: those of :class:`RelaxedKHot`; Maddison, Mnih, Teh 2017, appendix C.3.

    Example:
        >>> p = khot.distributions.LogitRelaxedKHot(0.1, 2, torch.tensor([1.0, 0.0, 0.0, -1.0]))
        >>> q = khot.distributions.LogitRelaxedKHot(0.1, 2, torch.zeros(4))
        >>> z = p.rsample((1000,))
        >>> kl = (p.log_prob(z) - q.log_prob(z)).mean()
        >>> z.sigmoid().sum(-1).allclose(torch.tensor(2.0)), bool(kl > 0)
        (True, True)
    """

    @constraints.dependent_property(is_discrete=False, event_dim=1)
    def support(self) -> Constraint:
        return _real_vector()  # of any sum of σ(z), because the density is the same at z + c

    def rsample(self, sample_shape: _Shape = NO_SHAPE) -> Tensor:
        z = _without_shift(self._perturbed(sample_shape), self.k, self.temperature)
        return z.to(self.logits.dtype)

    def log_prob(self, value: Tensor) -> Tensor:
        self._check_value(value)
        dtype = torch.promote_types(value.dtype, self.logits.dtype)
        return self._log_density(widen(value), of_simplex=False).to(dtype)


class PlackettLuce(Distribution):
    """The first k places of a random ranking: k different indices in the order in which they are drawn.

        p(i_1, …, i_k) = Π_j exp(θ_(i_j)) / Σ_(i not drawn before) exp(θ_i)

    Each next entry is drawn with a probability ∝ exp(logits) among those that are left. With k = n it is a
    distribution over permutations, as of the rankings that people give; with k = 1 it is ``Categorical``.

    Args:
        k: how many are drawn; an int in [0, n].
        logits: θ, (*batch, n). −inf is never drawn.

    Samples are int64, (*sample, *batch, k). ``sample`` takes the k largest of logits + Gumbel noise; without
    their order they are the draws of :func:`khot.sampling.gumbel_topk`. ``log_prob`` takes O(n) time and is
    differentiable in logits; indices of which two are equal have −inf where the validation does not refuse
    them. ``probs`` are the probabilities of the first place, and ``mode`` is the descending order of the
    logits.

    Raises:
        ValueError: k that is not in [0, n]; with validation, more than the entries above −inf.
        TypeError: k that is not an int, logits that are not a floating-point tensor.

    Sources: Luce 1959; Plackett 1975; Kool, van Hoof, Welling 2019 for the samples.

    Example:
        >>> p = khot.distributions.PlackettLuce(2, torch.tensor([0.5, 0.3, 0.2]).log())
        >>> p.mode, p.log_prob(p.mode).exp()  # 0.5 · 0.3/(0.3 + 0.2)
        (tensor([0, 1]), tensor(0.3000))
    """

    arg_constraints: ClassVar[dict[str, Constraint]] = {"logits": constraints.real_vector}
    has_enumerate_support = True

    def __init__(self, k: int, logits: Tensor, validate_args: bool | None = None) -> None:
        arguments.check_input(logits, "logits")
        if validate_args is not None:
            arguments.check_flags(validate_args=validate_args)
        if logits.dim() == 0:
            raise ValueError(f"logits must have at least one dim, but got {logits}")
        arguments.check_integer(k, "k", low=0, high=logits.shape[-1])
        self.k, self.logits = int(k), logits
        if not arguments.readable(logits):  # torch would wait for the device to look at them
            validate_args = False
        super().__init__(logits.shape[:-1], torch.Size([self.k]), validate_args=validate_args)
        if self._validate_args and logits.numel():
            fewest = int((logits != -math.inf).sum(-1).min())
            if fewest < k:
                raise ValueError(
                    f"k must lie in [0, number of logits above -inf], but got {k} for a row with {fewest}"
                )

    def expand(self, batch_shape: _Shape, _instance: Any = None) -> PlackettLuce:
        new: Any = self._get_checked_instance(PlackettLuce, _instance)
        new.k, new.logits = self.k, self.logits.expand(*batch_shape, -1)
        Distribution.__init__(new, torch.Size(batch_shape), self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    @constraints.dependent_property(is_discrete=True, event_dim=1)
    def support(self) -> Constraint:
        return _distinct_indices(self.logits.shape[-1])

    @lazy_property
    def probs(self) -> Tensor:
        """The probabilities of the first place, (*batch, n)."""
        return self.logits.softmax(-1)

    @property
    def mode(self) -> Tensor:
        return topk(self.logits, self.k).indices

    def sample(self, sample_shape: _Shape = NO_SHAPE) -> Tensor:
        with torch.no_grad():
            x = at_least_single(self.logits.expand(*sample_shape, *self.logits.shape))
            return topk(x + gumbel_noise(x), self.k).indices

    def rsample(self, sample_shape: _Shape = NO_SHAPE) -> Tensor:
        raise NotImplementedError(
            "PlackettLuce has no rsample, because its samples are discrete: use khot.estimators."
            "score_function with log_prob, or khot.soft_permutation of logits with Gumbel noise"
        )

    def log_prob(self, value: Tensor) -> Tensor:
        arguments.check_index(value, "value", self.logits)
        if self._validate_args:
            self._validate_sample(value)
        batch = _broadcast(self.batch_shape, value.shape[:-1], "value without its last dim", "logits")
        value, logits = value.expand(*batch, -1), at_least_single(self.logits).expand(*batch, -1)
        chosen = logits.gather(-1, value)
        impossible = ~self.support.check(value) | (chosen == -math.inf).any(-1)
        chosen = chosen.masked_fill(impossible.unsqueeze(-1), 0)  # whose gradient would be NaN
        others = logits.scatter(-1, value, -math.inf)
        # what was left before each draw, added up from the last one on
        left = torch.cat((_log_sum(others), chosen.flip(-1)), -1).logcumsumexp(-1)[..., 1:].flip(-1)
        log_prob = (chosen - left).sum(-1).masked_fill(impossible, -math.inf)
        return log_prob.to(self.logits.dtype)

    def enumerate_support(self, expand: bool = True) -> Tensor:
        """All ordered choices, (n!/(n − k)!, *batch_shape, k)."""
        arguments.check_flags(expand=expand)
        every = list(itertools.permutations(range(self.logits.shape[-1]), self.k))
        values = torch.tensor(every, dtype=torch.long, device=self.logits.device)
        values = values.reshape(len(every), *(1,) * len(self.batch_shape), self.k)
        return values.expand(-1, *self.batch_shape, self.k) if expand else values

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, k: {self.k})"


def _log_sum(x: Tensor) -> Tensor:
    """The logarithm of the sum of exponentials of each row; −inf, without a gradient, where all are −inf."""
    nothing = (x == -math.inf).all(-1, keepdim=True)
    return x.masked_fill(nothing, 0).logsumexp(-1, keepdim=True).masked_fill(nothing, -math.inf)


class _Drawn(NamedTuple):
    """What a sample y = σ_k(perturbed/temperature) was computed from."""

    perturbed: Tensor
    k: Tensor
    temperature: Tensor
    version: int  # of the sample: a change in place raises it


# A cache in the distribution, as torch's transforms have one, would not serve the other distribution of a KL
# divergence, nor the last but one sample of a model with several layers.
_drawn: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _remember(y: Tensor, perturbed: Tensor, k: Tensor, temperature: Tensor) -> None:
    # a trace has no tensors that live, and an inference tensor does not show a change in place
    if not torch.compiler.is_compiling() and not y.is_inference():
        _drawn[y] = _Drawn(perturbed, k, temperature, y._version)


def _remembered(y: Tensor) -> Tensor | None:
    """The logits of a sample that is as it was drawn, in the dtype of :func:`widen`."""
    drawn = None if torch.compiler.is_compiling() or y.is_inference() else _drawn.get(y)
    # a sample without a gradient that got one later is a point of its own, and so is a changed one
    if drawn is None or drawn.version != y._version or (y.requires_grad and y.is_leaf):
        return None
    return _without_shift(drawn.perturbed, drawn.k, drawn.temperature)


def _without_shift(perturbed: Tensor, k: Tensor, temperature: Tensor) -> Tensor:
    """z = perturbed/temperature − t with Σσ(z) = k, in the dtype of :func:`widen`; infinite where perturbed
    is."""
    x, tau = widen(perturbed), widen(temperature)
    t = inverse_soft_count(x, k, tau=tau)
    infinite = x.isinf()
    z = (x.masked_fill(infinite, 0) - t.unsqueeze(-1)) / tau.unsqueeze(-1)
    return torch.where(infinite, x.detach(), z)


def _logit(y: Tensor, free: Tensor) -> Tensor:
    """logit y in the dtype of :func:`widen`; of 0 and 1 in free entries, that of a number nearby."""
    given, y = torch.finfo(y.dtype), widen(y)
    least = max(given.smallest_normal * given.eps / 2, torch.finfo(y.dtype).smallest_normal)
    y = torch.where(free, y.clamp(least, 1 - given.eps / 2), y)
    return y.log() - torch.log1p(-y)


@register_kl(ConditionalPoisson, ConditionalPoisson)
@register_kl(ConditionalPoisson, KHot)
@register_kl(KHot, ConditionalPoisson)
@register_kl(KHot, KHot)
def _kl(p: KHot | ConditionalPoisson, q: KHot | ConditionalPoisson) -> Tensor:
    """Exact where both are conditional Poisson designs; inf where their sizes differ. In their dtype."""
    k, other = torch.broadcast_tensors(p.k, q.k)
    dtype = torch.promote_types(p._param.dtype, q._param.dtype)
    p, q = p._natural("kl_divergence"), q._natural("kl_divergence")
    logits, others = (on(k.device, d.logits).expand(*k.shape, -1) for d in (p, q))
    return conditional_poisson.kl(logits, others, k).masked_fill(k != other, math.inf).to(dtype)
