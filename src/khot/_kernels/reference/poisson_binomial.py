"""The number of successes of independent trials: P(S = k) for S = Σ_j Bernoulli(p_j), in O(n).

P(S = k) = (1/N) Σ_l e^(−iω_l k) Φ(ω_l) with Φ(ω) = Π_j (q_j + p_j e^(iω)) and ω_l = 2πl/N. Only P(S = k ± N)
aliases, so N only has to exceed some 18 standard deviations. And |Φ(ω)| ≤ exp(−V(1 − cos ω)) with V = Σpq, so
at most 26 of the N frequencies matter, whatever n is.

P is a polynomial that is linear in each p_j and in each q_j. We treat q_j and p_j as independent arguments.
The derivatives with respect to them are probabilities of the other trials: P(S − X_j = k) for q_j and
P(S − X_j = k − 1) for p_j.

Where V is tiny, the sum over frequencies loses the relative accuracy of the small probabilities. Then the
design is seen as what differs from its likeliest outcome (:class:`Swaps`).

Given that S = k, the trials are a mixture of independent ones, with complex weights and probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = [
    "FREQUENCIES",
    "Frequencies",
    "Swaps",
    "characteristic",
    "characteristic_kernel",
    "covariance_kernel",
    "covariance_product",
    "frequencies",
    "inclusion",
    "inclusion_kernel",
    "mixture",
    "of_period",
    "pmf",
    "pmf_of_others",
    "size_prob",
    "swaps",
]

# V = 21 needs N = 51, and so all of ω_0, ..., ω_25. For any other V, V(1 − cos ω_26) > 42 or N < 53.
FREQUENCIES = 26
BLOCK = 16  # trials whose sum is found by convolution, before the transform; chosen by timing
# Below this V, the frequencies' rounding errors matter for the small probabilities, and the terms of `swaps`
# after the second are below rounding.
NEARLY_CERTAIN = 1e-4


class Frequencies(NamedTuple):
    """ω_l = 2πl/N for l = 0, 1, ...; Φ(ω_−l) is the conjugate of Φ(ω_l)."""

    period: Tensor  # N, of the batch shape
    order: Tensor  # l
    weight: Tensor  # (*batch, l): of ω_l and ω_−l in the mean over all N; 0 where they repeat others

    def angle(self, count: Tensor) -> Tensor:
        """ω_l·count modulo 2π, (*batch, l, *), for integers (*batch, *): exact before the one rounding."""
        period = self.period[..., None, None]
        turns = self.order.unsqueeze(-1) * count.unsqueeze(-2)
        return (2 * math.pi) * (torch.remainder(turns, period) / period)


def frequencies(variance: Tensor, n: int) -> Frequencies:
    """The frequencies that P(S = k) needs, for n trials of this total variance and any k within 4.5
    deviations.

    9√V + 8 is the width of a window around the mean; the probability of S outside it is below rounding.
    """
    all_of_them = 2 * ((n + 1) // 2) + 1  # an odd number avoids ω = π, where a factor can be 0
    return of_period((2 * torch.ceil((9 * variance.sqrt() + 8).ceil() / 2) + 1).clamp(max=all_of_them))


def of_period(period: Tensor) -> Frequencies:
    order = torch.arange(FREQUENCIES, dtype=period.dtype, device=period.device)
    copies = 2.0 - (order == 0).to(period.dtype)
    within = 2 * order < period.unsqueeze(-1)
    return Frequencies(period, order, within * copies / period.unsqueeze(-1))


def characteristic(q: Tensor, p: Tensor, at: Frequencies) -> tuple[Tensor, Tensor]:
    """Π_j (q_j + p_j e^(iω)): its real and imaginary part, (*batch, l)."""
    re, im = _product_tree(q, p, at).values[-1]
    return re.squeeze(-1), im.squeeze(-1)


def pmf(re: Tensor, im: Tensor, k: Tensor, at: Frequencies) -> Tensor:
    """P(S = k) from Φ, for k of the batch shape."""
    angle = at.angle(k.unsqueeze(-1)).squeeze(-1)
    return (at.weight * (re * angle.cos() + im * angle.sin())).sum(-1)


def pmf_of_others(q: Tensor, p: Tensor, k: Tensor, at: Frequencies) -> tuple[Tensor, Tensor, Tensor]:
    """P(S = k), (*batch), and P(S − X_j = k) and P(S − X_j = k − 1), (*batch, n).

    The last two are the derivatives of the first with respect to q_j and p_j. They are computed down the tree
    of products: the product of all trials outside a child is that of all trials outside its parent, times the
    child's sibling.
    """
    tree = _product_tree(q, p, at)
    re, im = (value.squeeze(-1) for value in tree.values[-1])
    angle = at.angle(k.unsqueeze(-1))
    g, h = at.weight.unsqueeze(-1) * angle.cos(), at.weight.unsqueeze(-1) * angle.sin()
    for below in reversed(tree.values[:-1]):
        (a, b), (c, d) = (value.chunk(2, -1) for value in below)
        g, h = (value[..., : a.shape[-1]] for value in (g, h))  # without the padding to an even number
        g, h = torch.cat((g * b + h * d, g * a + h * c), -1), torch.cat((h * b - g * d, h * a - g * c), -1)
    g, h = (value[..., : tree.masses[-1][0].shape[-1]] for value in (g, h))
    beside = list((tree.transform.mT @ torch.cat((g, h), -2)).unbind(-2))
    for masses in reversed(tree.masses[:-1]):
        left, right = zip(*(mass.chunk(2, -1) for mass in masses), strict=True)
        halves = zip(_correlate(beside, right), _correlate(beside, left), strict=True)
        beside = [torch.cat(both, -1) for both in halves]
    n = q.shape[-1]
    return pmf(re, im, k, at), beside[0][..., :n], beside[1][..., :n]


class Swaps(NamedTuple):
    """Trials of a tiny variance, seen as what differs from the likeliest outcome, the units with p > ½.

    Given that S = k, as many of these are left out as others are taken in their place. The weight of m such
    swaps is e_m(a) e_m(b): a and b are the odds of the unlikely outcomes, above and below ½, and e_m the
    elementary symmetric polynomials. Every term is positive, so that no digit is lost.
    """

    apply: Tensor  # whether the row has a tiny variance, and k units with p > ½, (*batch, 1)
    above: Tensor  # p > ½
    odds: Tensor  # of the less likely outcome
    first: tuple[Tensor, Tensor]  # e_1 of the other odds on the same side, e_1 of the opposite side
    second: tuple[Tensor, Tensor]  # the same for e_2
    more: Tensor  # the weight of all outcomes, minus that of the likeliest, which is 1; (*batch, 1)


def swaps(q: Tensor, p: Tensor, k: Tensor) -> Swaps:
    """What :class:`Swaps` says of trials; differentiable in q and p."""
    above = p.detach() > q.detach()
    tiny = (p * q).detach().sum(-1) < NEARLY_CERTAIN
    apply = (tiny & (above.sum(-1) == k)).unsqueeze(-1)
    odds = torch.where(above, q, p) / torch.where(above, p, q)
    sides = odds.masked_fill(~above, 0), odds.masked_fill(above, 0)
    one = [side.sum(-1, keepdim=True) for side in sides]
    two = [0.5 * (e * e - (side * side).sum(-1, keepdim=True)) for e, side in zip(one, sides, strict=True)]
    own, opposite = torch.where(above, one[0], one[1]), torch.where(above, one[1], one[0])
    others = own - odds
    pairs, opposite_pairs = torch.where(above, two[0], two[1]), torch.where(above, two[1], two[0])
    more = one[0] * one[1] + two[0] * two[1]
    return Swaps(apply, above, odds, (others, opposite), (pairs - odds * others, opposite_pairs), more)


def size_prob(q: Tensor, p: Tensor, k: Tensor, at: Frequencies) -> Tensor:
    """P(S = k), (*batch)."""
    return pmf(*characteristic(q, p, at), k, at)


def inclusion(q: Tensor, p: Tensor, k: Tensor, at: Frequencies) -> tuple[Tensor, Tensor, Tensor]:
    """P(S = k), and π_j = P(X_j = 1) and 1 − π_j given that S = k, both computed without subtraction.

    π_j = p_j P(the others make k − 1)/P(all make k) and 1 − π_j = q_j P(the others make k)/P(all make k).
    """
    prob, same, one_less = pmf_of_others(q, p, k, at)
    pi, out = (value / prob.unsqueeze(-1) for value in (p * one_less, q * same))
    never, always = p.detach() == 0, q == 0
    # rounding may turn a 0 into −1e-17
    pi, out = pi.clamp(0, 1).masked_fill(always, 1), out.clamp(0, 1).masked_fill(never, 1)
    s = swaps(q, p, k)
    unlikely, likely = _swapped(s)
    pi = torch.where(s.apply, torch.where(s.above, likely, unlikely), pi)
    return prob, pi, torch.where(s.apply, torch.where(s.above, unlikely, likely), out)


def _swapped(s: Swaps) -> tuple[Tensor, Tensor]:
    """The probabilities of the less likely and of the likelier outcome of each unit."""
    others, opposite = s.first
    total = 1 + s.more
    unlikely = s.odds * (opposite + s.second[1] * others) / total
    likely = (1 + opposite * others + s.second[1] * s.second[0]) / total
    return unlikely.clamp(max=1), likely.clamp(max=1)


def mixture(q: Tensor, p: Tensor, k: Tensor, at: Frequencies) -> tuple[Tensor, Tensor]:
    """The trials given that S = k: P(x) = Re Σ_l a_l Π_{x_j=1} r_lj Π_{x_j=0} (1 − r_lj).

    a (*batch, l) and r (*batch, l, n) are complex, Σ_l Re a_l = 1, with r = p e^(iω)/(q + p e^(iω)).
    """
    re, im = characteristic(q, p, at)
    size = at.angle(k.unsqueeze(-1)).squeeze(-1)
    weight = at.weight * torch.complex(re, im) * torch.polar(torch.ones_like(size), -size)
    weight = weight / weight.sum(-1, keepdim=True).real
    turned = _turned(p, at)
    return weight, turned / (q.unsqueeze(-2) + turned)


def covariance_product(q: Tensor, p: Tensor, k: Tensor, at: Frequencies, u: Tensor) -> Tensor:
    """Cov·u for u (*batch, n), Cov being the covariance of the trials given that S = k."""
    _, pi, out = inclusion(q, p, k, at)
    weight, ratio = mixture(q, p, k, at)
    # r − π is computed from the smaller of r and 1 − r
    rest = q.unsqueeze(-2) / (q.unsqueeze(-2) + _turned(p, at))
    deviation = torch.where((pi < out).unsqueeze(-2), ratio - pi.unsqueeze(-2), out.unsqueeze(-2) - rest)
    own = (weight.unsqueeze(-1) * ratio * rest).sum(-2).real
    along = weight * (deviation * u.unsqueeze(-2)).sum(-1)
    product = (along.unsqueeze(-1) * deviation).sum(-2).real + own * u
    return torch.where((s := swaps(q, p, k)).apply, _swapped_covariance(s, u), product)


def _swapped_covariance(s: Swaps, u: Tensor) -> Tensor:
    """The derivative of π along u: the logarithms of the odds grow at the rate u below ½, and −u above."""
    rate = torch.where(s.above, -u, u)
    others, opposite = s.first
    change = s.odds * rate
    sides = change.masked_fill(~s.above, 0), change.masked_fill(s.above, 0)
    one = [side.sum(-1, keepdim=True) for side in sides]
    # the derivative of e_2 is Σ_i (the sum of the other odds)·(the change of odds i)
    two = [(side * others).sum(-1, keepdim=True) for side in sides]
    own, across = torch.where(s.above, one[0], one[1]), torch.where(s.above, one[1], one[0])
    across_pairs = torch.where(s.above, two[1], two[0])
    pairs_above = (0.5 * s.odds * others).masked_fill(~s.above, 0).sum(-1, keepdim=True)
    pairs_below = (0.5 * s.odds * others).masked_fill(s.above, 0).sum(-1, keepdim=True)
    sum_above, sum_below = (s.odds.where(side, 0).sum(-1, keepdim=True) for side in (s.above, ~s.above))
    growth = one[0] * sum_below + sum_above * one[1] + two[0] * pairs_below + pairs_above * two[1]
    total = 1 + s.more
    moved = (rate - growth / total) * (opposite + s.second[1] * others)
    moved = moved + across + across_pairs * others + s.second[1] * (own - change)
    return torch.where(s.above, -s.odds, s.odds) * moved / total + 0.0  # without −0


def _turned(p: Tensor, at: Frequencies) -> Tensor:
    """p e^(iω), (*batch, l, n)."""
    angle = at.angle(torch.ones_like(at.period).unsqueeze(-1))
    return p.unsqueeze(-2) * torch.polar(torch.ones_like(angle), angle)


def _of_logits(z: Tensor) -> tuple[Tensor, Tensor, Frequencies]:
    q, p = torch.sigmoid(-z), torch.sigmoid(z)
    return q, p, frequencies((p * q).sum(-1), z.shape[-1])


def characteristic_kernel(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The reference of khot::characteristic: N and :func:`characteristic` of trials with logits z."""
    q, p, at = _of_logits(z)
    return at.period, *characteristic(q, p, at)


def inclusion_kernel(z: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The reference of khot::inclusion: :func:`inclusion` of trials with logits z."""
    q, p, at = _of_logits(z)
    return inclusion(q, p, k, at)


def covariance_kernel(z: Tensor, k: Tensor, u: Tensor) -> Tensor:
    """The reference of khot::covariance: :func:`covariance_product` of trials with logits z."""
    q, p, at = _of_logits(z)
    return covariance_product(q, p, k, at, u)


class _Tree(NamedTuple):
    """Products over more and more trials: each level has half as many nodes as the level before it."""

    masses: list[list[Tensor]]  # P(a node's trials sum to 0), P(they sum to 1), ..., each (*batch, nodes)
    transform: Tensor  # (*batch, 2l, counts): the rows of cos ωm, then those of sin ωm
    values: list[tuple[Tensor, Tensor]]  # Φ of each node, (*batch, l, nodes); the last level has all trials


def _product_tree(q: Tensor, p: Tensor, at: Frequencies) -> _Tree:
    """Starts with convolutions in blocks of trials, so that a frequency costs only one product per block."""
    n = q.shape[-1]
    block = min(BLOCK, 1 << max(0, n - 1).bit_length())
    short = block * max(1, -(-n // block)) - n  # padded with trials that always fail
    masses = [[pad(q, (0, short), value=1.0), pad(p, (0, short))]]
    while len(masses[-1]) <= block:
        masses.append(_convolve(*zip(*(mass.chunk(2, -1) for mass in masses[-1]), strict=True)))
    angle = at.angle(torch.arange(block + 1, dtype=q.dtype, device=q.device))
    transform = torch.cat((angle.cos(), angle.sin()), -2)
    re, im = (transform @ torch.stack(masses[-1], -2)).chunk(2, -2)
    values = [(re, im)]
    while (blocks := re.shape[-1]) > 1:
        if blocks % 2:
            re, im = pad(re, (0, 1), value=1.0), pad(im, (0, 1))
            values[-1] = re, im
        (a, b), (c, d) = re.chunk(2, -1), im.chunk(2, -1)
        re, im = a * b - c * d, a * d + b * c
        values.append((re, im))
    return _Tree(masses, transform, values)


def _convolve(a: Sequence[Tensor], b: Sequence[Tensor]) -> list[Tensor]:
    """Σ_i a_i b_(s−i) for all s."""
    size = len(a)
    return [
        _dot(a[max(0, s - size + 1) : s + 1], b[max(0, s - size + 1) : s + 1][::-1])
        for s in range(2 * size - 1)
    ]


def _correlate(g: Sequence[Tensor], b: Sequence[Tensor]) -> list[Tensor]:
    """Σ_j g_(i+j) b_j for all i."""
    return [_dot(g[i : i + len(b)], b) for i in range(len(b))]


def _dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    total = a[0] * b[0]
    for x, y in zip(a[1:], b[1:], strict=True):
        total = torch.addcmul(total, x, y)
    return total
