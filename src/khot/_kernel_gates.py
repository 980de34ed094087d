"""Feature selection by gates before a kernel machine that is solved, not trained.

Two examples x and x' are compared by

    K = a Z + b Z² + c exp(−½ s D) + 1,    Z = mean_j Σ_d φ_jd φ'_jd / DEGREE,    D = mean_j (φ_j1 − φ'_j1)²,

where φ_j1, φ_j2, φ_j3 are orthonormal polynomials of feature j, of degree 1, 2 and 3, and the means are over
the selected features: Z has the effects of single features, those that are not monotone included; Z² has
those of pairs; and the third term has all others. A least-squares machine with this kernel has no weights to
train, so that a set of features can be judged at once: by half the negative log evidence of the Gaussian
process and half the log of the leave-one-out error, in which classes count alike. The evidence finds features
faster. But it takes each example for one of its own, whatever its weight, and would so prefer wrong sets
where a class is rare. There it counts less, and the prior more. Both go with the square of the share of
examples that the weighted ones are worth: with the share itself, one of the three features that tell a class
of 2 % was missed.

:func:`choose` first learns gates, the weights of the features in both means, by gradient descent on random
examples. Then it exchanges features as long as exact evaluations say that another set is better. Both start
from, and are held to, a prior: what somebody else believes about the features.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from khot.budgets import budget_mask, soft_budget
from khot.masks import soft_topk, topk_mask

__all__ = ["Data", "choose", "draw"]

DEGREE = 3
# Values beyond are moved there, or the third power of a few of them would be all that a feature has.
FARTHEST = 3.0
# A power of which the lower ones leave less than this share of its deviation is one of them, as the square
# of a feature that has two values.
ROUNDING = 0.05
# The learning of the gates: examples per step, the rates of gates and kernel, tau, which falls by a constant
# factor per step and stays at its last value in the last tenth. All were chosen on eight data sets that no
# published figure is of, as were those of the exchange.
BATCH, RATE, KERNEL_RATE = 160, 0.15, 0.03
HOT, COLD, COOLING = 1.0, 0.05, 0.9
# The exchange: examples per subset and subsets; how many features are tried in a round, and how many of these
# in turn until one is accepted; steps and rate by which the kernel is fitted to a set.
EXAMPLES, SUBSETS, TRIED, FOLLOWED, ROUNDS = 400, 2, 16, 2, 20
FITTING, FITTING_RATE = 30, 0.1
# A set is better if the loss falls by this, in nats over all examples; and the weight of the prior, in nats.
MARGIN, BELIEF = 0.04, 10.0
# The share of the evidence in the loss where all examples weigh alike; the rest is the leave-one-out error.
EVIDENCE = 0.5
# The logs of a, b, c, s and the noise before the learning; and the part of the noise that is not learned, as
# a share of the mean of the kernel's diagonal.
START, FLOOR = (1.0, 0.0, 1.0, 0.0, -1.0), 1e-3


@dataclass(frozen=True)
class Data:
    """Standardised features (n, p), targets (n, outputs), and for a classification classes (n,)."""

    features: Tensor
    targets: Tensor
    classes: Tensor | None

    @cached_property
    def polynomials(self) -> Tensor:
        """Orthonormal polynomials of each feature, (n, p, DEGREE); 0 where it has too few values for one."""
        x = self.features.clamp(-FARTHEST, FARTHEST)
        found: list[Tensor] = []
        for degree in range(1, DEGREE + 1):
            power = x**degree
            rest = power - power.mean(0)
            all_of_it = rest.square().mean(0).sqrt()
            for lower in found:
                rest = rest - lower * (lower * rest).mean(0)
            deviation = rest.square().mean(0).sqrt()
            new = deviation > ROUNDING * all_of_it
            found.append(torch.where(new, rest / deviation.where(new, torch.ones_like(deviation)), 0.0))
        return torch.stack(found, -1)

    def subset(self, size: int, generator: torch.Generator) -> _Examples:
        """Random examples, in which each class has the same weight."""
        rows = draw(self.classes, len(self.features), size, generator)
        if self.classes is None:
            weights = torch.ones(len(rows), dtype=torch.float32)
        else:
            classes = self.classes[rows]
            weights = 1 / classes.bincount()[classes].float()
            weights = weights / weights.mean()
        targets = self.targets[rows]
        centred = targets - (weights[:, None] * targets).mean(0)
        return _Examples(self.polynomials[rows], centred, weights)


def draw(classes: Tensor | None, n: int, size: int, generator: torch.Generator) -> Tensor:
    """Indices of ``size`` of n examples, or of all. Each class is drawn as often as any other while it lasts:
    of a rare one hardly any example would be seen."""
    if classes is None:
        return torch.randperm(n, generator=generator)[:size]
    return (1 / classes.bincount()[classes].float()).multinomial(min(size, n), generator=generator)


@dataclass(frozen=True)
class _Examples:
    """Polynomials (..., m, p, DEGREE), centred targets (..., m, outputs), weights of mean 1 (..., m)."""

    polynomials: Tensor
    targets: Tensor
    weights: Tensor

    @cached_property
    def trust(self) -> Tensor:
        """How far the loss can be trusted, in (0, 1], 1 where all examples weigh alike; (...).

        It is the square of Kish's effective size of a weighted sample, as a share of its size."""
        return 1 / self.weights.square().mean(-1) ** 2

    def likeness(self, gates: Tensor, size: float) -> tuple[Tensor, Tensor]:
        """Z and D, the sums over features weighted by the gates (p,), divided by ``size``; (..., m, m)."""
        scaled = self.polynomials * (gates[:, None] / size)
        Z = scaled.flatten(-2) @ self.polynomials.flatten(-2).mT / DEGREE
        products = scaled[..., 0] @ self.polynomials[..., 0].mT
        squares = products.diagonal(dim1=-2, dim2=-1)
        return Z, (squares[..., :, None] + squares[..., None, :] - 2 * products).clamp_min(0)

    def likeness_of(self, features: list[int], size: float) -> tuple[Tensor, Tensor]:
        """What each of these features adds to Z and D; (features, ..., m, m)."""
        chosen = self.polynomials[..., features, :].movedim(-2, 0)
        Z = chosen @ chosen.mT / (DEGREE * size)
        return Z, (chosen[..., :, None, 0] - chosen[..., None, :, 0]).square() / size

    def loss(self, Z: Tensor, D: Tensor, kernel: Tensor) -> Tensor:
        """The loss of this module's docstring, per example and output and less a constant; (...).

        The scale of the whole kernel is at its best value."""
        a, b, c, s, noise = kernel.exp()
        K = a * Z + b * Z * Z + c * (-0.5 * s * D).exp() + 1.0
        least = FLOOR * K.detach().diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)
        inverse, logdet = _Inverse.apply(K + torch.diag_embed(noise / self.weights + least))
        solution = inverse @ self.targets
        # targets that are all equal have no error, and log 0 no gradient
        tiny = torch.finfo(K.dtype).tiny
        explained = (self.targets * solution).mean((-2, -1)).clamp_min(tiny).log()
        evidence = 0.5 * (explained + logdet / K.shape[-1])
        left_out = solution / inverse.diagonal(dim1=-2, dim2=-1)[..., None]
        error = (self.weights[..., None] * left_out.square()).mean((-2, -1)).clamp_min(tiny).log()
        share = EVIDENCE * self.trust
        return share * evidence + (1 - share) * 0.5 * error

    def slopes(self, Z: Tensor, D: Tensor, kernel: Tensor, size: float) -> tuple[float, Tensor]:
        """The mean loss at Z and D, and its derivative in the gate of each feature, (p,).

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
        return loss.item(), slope.flatten(0, -2).sum(0) / size


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


def choose(
    data: Data,
    prior: Tensor,
    prices: Tensor | None,
    size: float,
    steps: int,
    generator: torch.Generator,
    report: Callable[[str], None],
) -> tuple[Tensor, Tensor]:
    """The learned logits and the selection, both (p,).

    Args:
        prior: log of how much each feature is believed to matter, (p,).
        prices, size: prices of the features and what may be spent; or None and how many features.
        steps: number of training steps of the gates.
        report: is told how far it is.
    """
    logits, kernel = _learn(data, prior, prices, size, steps, generator, report)
    mask = topk_mask(logits, size) if prices is None else budget_mask(logits, prices, size)
    # one is enough where it has all examples
    subsets = SUBSETS if len(data.features) > EXAMPLES else 1
    drawn = [data.subset(EXAMPLES, generator) for _ in range(subsets)]
    few = _Examples(
        *(
            torch.stack(part)
            for part in zip(*((e.polynomials, e.targets, e.weights) for e in drawn), strict=True)
        )
    )
    search = _Search(few, prior, torch.ones_like(prior) if prices is None else prices, size, report)
    chosen = search.run(mask.nonzero().flatten().tolist(), kernel)
    mask = torch.zeros_like(mask)
    mask[chosen] = 1.0
    return logits, mask


def _learn(
    data: Data,
    prior: Tensor,
    prices: Tensor | None,
    size: float,
    steps: int,
    generator: torch.Generator,
    report: Callable[[str], None],
) -> tuple[Tensor, Tensor]:
    """The logits of the gates, and the logs of the kernel's parameters, by gradient descent."""
    logits = (prior - prior.mean()).requires_grad_()
    kernel = torch.tensor(START, dtype=torch.float32, requires_grad=True)
    optimizer = torch.optim.Adam(
        [{"params": [logits], "lr": RATE}, {"params": [kernel], "lr": KERNEL_RATE}], fused=True
    )
    for step in range(steps):
        tau = HOT * (COLD / HOT) ** min(step / (COOLING * steps), 1.0)
        # noise tries other sets: the learning would otherwise stay with the first good one
        uniform = torch.rand(len(prior), generator=generator, dtype=torch.float32)
        noisy = logits + tau * uniform.logit(1e-6)
        gates = (
            soft_topk(noisy, size, tau=tau) if prices is None else soft_budget(noisy, prices, size, tau=tau)
        )
        examples = data.subset(BATCH, generator)
        loss = examples.loss(*examples.likeness(gates, float(gates.detach().sum())), kernel)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) * 10 // steps > step * 10 // steps:
            report(f"step {step + 1} of {steps}, tau {tau:.2f}, loss {loss.item():.3f}")
    return logits.detach(), kernel.detach()


class _Search:
    """Exchanges features while the loss, less the prior of the selected ones, falls."""

    def __init__(
        self, examples: _Examples, prior: Tensor, prices: Tensor, size: float, report: Callable[[str], None]
    ) -> None:
        self.examples = examples
        nats = (examples.trust * examples.weights.shape[-1]).sum().item()
        self.margin = MARGIN / nats
        self.prior = BELIEF / nats * prior
        self.prices = prices.tolist()
        self.budget = size
        self.report = report

    def run(self, chosen: list[int], kernel: Tensor) -> list[int]:
        """The selection from which no exchange leads to a better one; the kernel is fitted twice."""
        self.size = float(max(len(chosen), 1))
        for fit in range(2):
            kernel = self._fitted(chosen, kernel)
            before = set(chosen)
            for turn in range(ROUNDS):
                better = self._better(chosen, kernel)
                if better is None:
                    break
                chosen = better
                self.report(f"exchange {turn + 1} of at most {ROUNDS}, pass {fit + 1} of 2")
            if set(chosen) == before:
                break
        return chosen

    def _likeness(self, chosen: list[int]) -> tuple[Tensor, Tensor]:
        polynomials = self.examples.polynomials[..., chosen, :]
        part = _Examples(polynomials, self.examples.targets, self.examples.weights)
        return part.likeness(torch.ones(len(chosen), dtype=torch.float32), self.size)

    def _fitted(self, chosen: list[int], kernel: Tensor) -> Tensor:
        """The kernel's parameters that suit this selection."""
        Z, D = self._likeness(chosen)
        kernel = kernel.clone().requires_grad_()
        optimizer = torch.optim.Adam([kernel], lr=FITTING_RATE, fused=True)
        for _ in range(FITTING):
            optimizer.zero_grad()
            self.examples.loss(Z, D, kernel).mean().backward()
            optimizer.step()
        return kernel.detach()

    @torch.no_grad()
    def _better(self, chosen: list[int], kernel: Tensor) -> list[int] | None:
        """A better selection, with one more feature and without those that it takes to pay for it; or None
        if none was found."""
        Z, D = self._likeness(chosen)
        loss, slope = self.examples.slopes(Z, D, kernel, self.size)
        # to first order the objective changes by this if a feature is added, and by the opposite if removed
        steep = slope - self.prior
        best = loss - self.prior[chosen].sum().item() - self.margin
        inside = set(chosen)
        outside = [j for j in steep.argsort().tolist() if j not in inside and self.prices[j] <= self.budget]
        if not outside:
            return None
        outside = outside[:TRIED]
        z, d = self.examples.likeness_of(outside, self.size)
        added = self._losses(Z + z, D + d, kernel) - self.prior[outside]
        for at in added.argsort()[:FOLLOWED].tolist():
            selection = [*chosen, outside[at]]
            value = self._paid(selection, Z + z[at], D + d[at], kernel, steep)
            if value < best:
                return selection
        return None

    def _paid(self, selection: list[int], Z: Tensor, D: Tensor, kernel: Tensor, steep: Tensor) -> float:
        """The objective of the selection, from which this removes features until the budget pays for it. The
        last one stays."""
        value = math.inf
        spent = sum(self.prices[i] for i in selection)
        if spent <= self.budget:
            value = self._losses(Z[None], D[None], kernel).item()
        while spent > self.budget:
            paid = [i for i in selection[:-1] if self.prices[i] > 0]
            candidates = sorted(paid, key=lambda i: -steep[i].item())[:TRIED]
            z, d = self.examples.likeness_of(candidates, self.size)
            losses = self._losses(Z - z, (D - d).clamp_min(0), kernel)
            at = int((losses + self.prior[candidates]).argmin())
            value, out = losses[at].item(), candidates[at]
            Z, D = Z - z[at], (D - d[at]).clamp_min(0)
            selection.remove(out)
            spent = sum(self.prices[i] for i in selection)
        return value - self.prior[selection].sum().item()

    def _losses(self, Z: Tensor, D: Tensor, kernel: Tensor) -> Tensor:
        """The loss of several selections, one after the other so that a few matrices are held at a time."""
        return torch.stack([self.examples.loss(z, d, kernel).mean() for z, d in zip(Z, D, strict=True)])
