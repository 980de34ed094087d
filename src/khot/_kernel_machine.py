"""A kernel machine that is solved, not trained, and says how good a set of features is.

Two examples x and x' are compared by

    K = a Z + b Z² + c exp(−½ s D) + 1,    Z = mean_j Σ_d φ_jd φ'_jd / DEGREE,    D = mean_j (φ_j1 − φ'_j1)²,

where φ_j1, φ_j2, φ_j3 are orthonormal polynomials of feature j, of degree 1, 2 and 3, and the means are over
the selected features: Z has the effects of single features, those that are not monotone included; Z² has
those of pairs; and the third term has all others. A least-squares machine with this kernel has no weights to
train, so that a set of features can be judged at once: by half the negative log evidence of the Gaussian
process and half the log of the leave-one-out error. The evidence finds features faster. But it takes each
example for one of its own, whatever its weight, and would so prefer wrong sets where a class is rare and
weighs as much as others. There it counts less, and the prior more. Both go with the square of the share of
examples that the weighted ones are worth: with the share itself, one of the three features that tell a class
of 2 % was missed.

A feature is one column or a group of them, which has the mean over its columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

__all__ = ["DEGREE", "START", "Data", "Examples", "draw", "orthonormal"]

DEGREE = 3
# Values beyond are moved there, or the third power of a few of them would be all that a feature has.
FARTHEST = 3.0
# A power of which the lower ones leave less than this share of its deviation is one of them, as the square
# of a feature that has two values.
ROUNDING = 0.05
# The share of the evidence in the loss where all examples weigh alike; the rest is the leave-one-out error.
EVIDENCE = 0.5
# The logs of a, b, c, s and the noise before the learning; and the part of the noise that is not learned, as
# a share of the mean of the kernel's diagonal.
START, FLOOR = (1.0, 0.0, 1.0, 0.0, -1.0), 1e-3


def orthonormal(x: Tensor) -> Tensor:
    """Coefficients (columns, DEGREE, DEGREE + 1) of polynomials of the standardised x (n, columns), constant
    term first, that are orthonormal over these examples; 0 where a column has too few values for one."""
    powers = torch.stack([x.clamp(-FARTHEST, FARTHEST) ** degree for degree in range(DEGREE + 1)], -1)
    products = torch.einsum("nce,ncf->cef", powers, powers) / len(x)
    unit = torch.eye(DEGREE + 1, dtype=x.dtype).expand(x.shape[1], -1, -1)

    def dot(a: Tensor, b: Tensor) -> Tensor:
        return (a[:, None] @ products @ b[..., None])[..., 0]

    found = [unit[:, 0]]
    for degree in range(1, DEGREE + 1):
        rest = unit[:, degree] - found[0] * dot(found[0], unit[:, degree])
        all_of_it = dot(rest, rest).clamp_min(0).sqrt()
        for lower in found[1:]:
            rest = rest - lower * dot(lower, rest)
        deviation = dot(rest, rest).clamp_min(0).sqrt()
        new = deviation > ROUNDING * all_of_it
        found.append(torch.where(new, rest / deviation.where(new, torch.ones_like(deviation)), 0.0))
    return torch.stack(found[1:], 1)


def draw(weights: Tensor, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Indices of ``size`` of n examples, or of all, and their weights, of mean 1.

    An example is drawn as often as it weighs while it lasts, and weighs what that leaves: of a rare class
    hardly any example would be seen. Examples of the same weight are as many as these probabilities say."""
    n = len(weights)
    share = torch.ones_like(weights, dtype=torch.float64)
    if n > size:
        share = weights.double() / weights.double().mean() * (size / n)
        while share.max() > 1 + 1e-9:  # what is drawn for sure leaves the more for others
            sure = share >= 1
            share[sure] = 1.0
            share[~sure] *= (size - int(sure.sum())) / share[~sure].sum()
    order = torch.randperm(n, generator=generator)
    order = order[share[order].argsort(stable=True)]
    ends = share[order].cumsum(0)
    ends = ends * (min(n, size) / ends[-1])  # which it is but for rounding
    start = torch.rand((), generator=generator, dtype=torch.float64)
    before = torch.cat([torch.zeros(1, dtype=torch.float64), ends[:-1]])
    rows = order[(ends - start).ceil() > (before - start).ceil()]
    left = weights[rows] / share[rows]
    return rows, (left / left.mean()).float()


@dataclass(frozen=True)
class Data:
    """Examples of which a few are looked at together.

    Attributes:
        rows: the standardised columns (m, columns) of the examples of these indices (m,).
        coefficients: the polynomials' of :func:`orthonormal`, (columns, DEGREE, DEGREE + 1).
        feature: which feature each column belongs to, (columns,).
        targets, weights: (n, outputs); (n,), > 0.
    """

    rows: Callable[[Tensor], Tensor]
    coefficients: Tensor
    feature: Tensor
    targets: Tensor
    weights: Tensor

    def polynomials(self, rows: Tensor) -> Tensor:
        """The polynomials of each column, (m, columns, DEGREE), less where a group has many columns."""
        x = self.rows(rows).clamp(-FARTHEST, FARTHEST)[..., None]
        *lower, value = self._terms
        for term in reversed(lower):
            value = torch.addcmul(term, value, x)
        return value

    @cached_property
    def _terms(self) -> Tensor:
        """The coefficients (DEGREE + 1, columns, DEGREE), so that the columns of a group have a mean."""
        alike = 1 / self.feature.bincount()[self.feature].to(self.coefficients)
        return (self.coefficients * alike.sqrt()[:, None, None]).movedim(-1, 0).contiguous()

    def subset(self, size: int, generator: torch.Generator) -> Examples:
        """Random examples, drawn by their weights."""
        rows, weights = draw(self.weights, size, generator)
        targets = self.targets[rows]
        mean = (weights[:, None] * targets).mean(0)
        return Examples(self.polynomials(rows), targets - mean, weights, self.feature, mean)

    def subsets(self, size: int, number: int, generator: torch.Generator) -> Examples:
        """Several of these; a single one where it has all examples."""
        number = number if len(self.weights) > size else 1
        drawn = [self.subset(size, generator) for _ in range(number)]
        polynomials, targets, weights, mean = (
            torch.stack(part)
            for part in zip(*((e.polynomials, e.targets, e.weights, e.mean) for e in drawn), strict=True)
        )
        return Examples(polynomials, targets, weights, self.feature, mean)


@dataclass(frozen=True)
class Examples:
    """Polynomials (..., m, columns, DEGREE), centred targets (..., m, outputs), weights of mean 1 (..., m);
    the feature of each column (columns,); what was taken off the targets (..., outputs)."""

    polynomials: Tensor
    targets: Tensor
    weights: Tensor
    feature: Tensor
    mean: Tensor

    @cached_property
    def trust(self) -> Tensor:
        """How far the loss can be trusted, in (0, 1], 1 where all examples weigh alike; (...).

        It is the square of Kish's effective size of a weighted sample, as a share of its size."""
        return 1 / self.weights.square().mean(-1) ** 2

    def likeness(self, gates: Tensor, size: float) -> tuple[Tensor, Tensor]:
        """Z and D, the sums over features weighted by the gates (features,), divided by ``size``; each
        (..., m, m)."""
        return likeness(self.polynomials, self.polynomials, gates[self.feature], size)

    def likeness_of(self, features: list[int], size: float) -> tuple[Tensor, Tensor]:
        """What each of these features adds to Z and D; (features, ..., m, m)."""
        alone = [self.of([feature]) for feature in features]
        Z, D = zip(
            *(each.likeness(torch.ones(1, dtype=each.weights.dtype), size) for each in alone), strict=True
        )
        return torch.stack(Z), torch.stack(D)

    @cached_property
    def columns(self) -> list[list[int]]:
        """The columns of each feature."""
        found: list[list[int]] = [[] for _ in range(int(self.feature.max()) + 1)]
        for column, feature in enumerate(self.feature.tolist()):
            found[feature].append(column)
        return found

    def of(self, features: list[int]) -> Examples:
        """These features alone, which are counted anew."""
        columns = [column for feature in features for column in self.columns[feature]]
        members = [at for at, feature in enumerate(features) for _ in self.columns[feature]]
        new = torch.tensor(members, dtype=torch.int64)
        return Examples(self.polynomials[..., columns, :], self.targets, self.weights, new, self.mean)

    def loss(self, Z: Tensor, D: Tensor, kernel: Tensor) -> Tensor:
        """The loss of this module's docstring, per example and output and less a constant; (...).

        The scale of the whole kernel is at its best value."""
        inverse, logdet = _Inverse.apply(self._noisy(combined(Z, D, kernel), kernel))
        solution = inverse @ self.targets
        # targets that are all equal have no error, and log 0 no gradient
        tiny = torch.finfo(Z.dtype).tiny
        explained = (self.targets * solution).mean((-2, -1)).clamp_min(tiny).log()
        evidence = 0.5 * (explained + logdet / Z.shape[-1])
        left_out = solution / inverse.diagonal(dim1=-2, dim2=-1)[..., None]
        error = (self.weights[..., None] * left_out.square()).mean((-2, -1)).clamp_min(tiny).log()
        share = EVIDENCE * self.trust
        return share * evidence + (1 - share) * 0.5 * error

    def _noisy(self, K: Tensor, kernel: Tensor) -> Tensor:
        least = FLOOR * K.detach().diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)
        return K + torch.diag_embed(kernel[4].exp() / self.weights + least)

    def predicted(self, polynomials: Tensor, kernel: Tensor, size: float) -> Tensor:
        """What the machine, of all features here, says of others, of which (n, columns, DEGREE) are the
        polynomials; (n, outputs), the mean over subsets."""
        gates = torch.ones(len(self.columns), dtype=polynomials.dtype)
        K = self._noisy(combined(*self.likeness(gates, size), kernel), kernel)
        solution = torch.cholesky_solve(self.targets, torch.linalg.cholesky(K))
        across = combined(*likeness(polynomials, self.polynomials, gates[self.feature], size), kernel)
        return (across @ solution + self.mean[..., None, :]).flatten(0, -3).mean(0)

    def slopes(self, Z: Tensor, D: Tensor, kernel: Tensor, size: float) -> tuple[float, Tensor]:
        """The mean loss at Z and D, and its derivative in the gate of each feature, (features,).

        This is what :meth:`likeness` would give, at the cost of the products with one matrix."""
        Z, D = Z.detach().requires_grad_(), D.detach().requires_grad_()
        with torch.enable_grad():
            loss = self.loss(Z, D, kernel).mean()
            by_product, by_distance = torch.autograd.grad(loss, (Z, D))
        both = by_distance + by_distance.mT
        phi = self.polynomials
        flat = phi.flatten(-2)
        slope = (flat * (by_product @ flat)).view_as(phi).sum(-1) / DEGREE
        slope = slope + both.sum(-1)[..., None] * phi[..., 0].square() - phi[..., 0] * (both @ phi[..., 0])
        slope = slope.flatten(0, -2).sum(0) / size
        return loss.item(), slope.new_zeros(len(self.columns)).index_add(0, self.feature, slope)


def likeness(left: Tensor, right: Tensor, gates: Tensor, size: float) -> tuple[Tensor, Tensor]:
    """Z and D between the polynomials of two sets of examples, with the gates (columns,)."""
    scaled = left * (gates[:, None] / size)
    Z = scaled.flatten(-2) @ right.flatten(-2).mT / DEGREE
    a, b, products = left[..., 0], right[..., 0], scaled[..., 0] @ right[..., 0].mT
    if left is right:
        squares = others = products.diagonal(dim1=-2, dim2=-1)
    else:
        squares, others = (x.square() @ gates / size for x in (a, b))
    return Z, (squares[..., :, None] + others[..., None, :] - 2 * products).clamp_min(0)


def combined(Z: Tensor, D: Tensor, kernel: Tensor) -> Tensor:
    """K without the noise."""
    a, b, c, s, _ = kernel.exp()
    return a * Z + b * Z * Z + c * (-0.5 * s * D).exp() + 1.0


class _Inverse(torch.autograd.Function):
    """The inverse of symmetric positive definite matrices and the log of their determinants.

    Two products are its whole gradient; that of torch's own functions takes several solutions."""

    @staticmethod
    def forward(ctx: Any, K: Tensor) -> tuple[Tensor, Tensor]:
        L = torch.linalg.cholesky(K)
        inverse = torch.cholesky_inverse(L)
        ctx.save_for_backward(inverse)
        return inverse, 2 * L.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (inverse,), (by_inverse, by_logdet) = ctx.saved_tensors, grads
        return by_logdet[..., None, None] * inverse - inverse @ by_inverse @ inverse
