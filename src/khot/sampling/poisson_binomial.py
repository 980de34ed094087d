"""The number of successes of independent trials: P(S = k) for S = Σ_j Bernoulli(p_j), in O(n).

P(S = k) = (1/N) Σ_l e^(−iω_l k) Φ(ω_l) with Φ(ω) = Π_j (q_j + p_j e^(iω)) and ω_l = 2πl/N. Only P(S = k ± N)
aliases, so that N need only exceed some 18 standard deviations; and |Φ(ω)| ≤ exp(−V(1 − cos ω)) with
V = Σpq, so that of N frequencies at most 26 count, whatever n.

P is a polynomial, linear in each p_j and in each q_j, and is treated as one: q_j and p_j are independent
arguments, the derivatives by them being what the other trials make, P(S − X_j = k) and P(S − X_j = k − 1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["Frequencies", "characteristic", "frequencies", "pmf"]

# V = 21 needs N = 51, so all of ω_0, ..., ω_25; for every other V, V(1 − cos ω_26) > 42 or N < 53
FREQUENCIES = 26
BLOCK = 16  # trials whose sums' distribution is made by convolution, before the transform; by timing


class Frequencies(NamedTuple):
    """ω_l = 2πl/N for l = 0, 1, ...; those of −l are conjugate."""

    period: Tensor  # N, of the batch shape
    order: Tensor  # l
    weight: (
        Tensor  # (*batch, l): of ω_l and ω_−l in the mean over all N; 0 where these are others' duplicates
    )

    def angle(self, count: Tensor) -> Tensor:
        """ω_l·count modulo 2π, (*batch, l, *), for integers (*batch, *): exact before its one rounding."""
        period = self.period[..., None, None]
        turns = self.order.unsqueeze(-1) * count.unsqueeze(-2)
        return (2 * math.pi) * (torch.remainder(turns, period) / period)


def frequencies(variance: Tensor, n: int) -> Frequencies:
    """Those that P(S = k) needs, for n trials of this total variance, at any k within 4.5 deviations.

    9√V + 8 is the width of a window around the mean beyond which less than a rounding error of S lies.
    """
    all_of_them = 2 * ((n + 1) // 2) + 1  # odd: at ω = π a factor can be 0
    period = (2 * torch.ceil((9 * variance.sqrt() + 8).ceil() / 2) + 1).clamp(max=all_of_them)
    order = torch.arange(min(FREQUENCIES, all_of_them // 2 + 1), dtype=variance.dtype, device=variance.device)
    copies = 2.0 - (order == 0).to(variance.dtype)
    within = 2 * order < period.unsqueeze(-1)
    return Frequencies(period, order, within * copies / period.unsqueeze(-1))


def characteristic(q: Tensor, p: Tensor, at: Frequencies) -> tuple[Tensor, Tensor]:
    """Π_j (q_j + p_j e^(iω)): its real and imaginary part, (*batch, l).

    Convolutions first, in blocks of trials: a block's transform then costs a frequency but one product.
    """
    n = q.shape[-1]
    block = min(BLOCK, 1 << max(0, n - 1).bit_length())
    short = -n % block if n else block
    sums = [pad(q, (0, short), value=1.0), pad(p, (0, short))]  # P(a block makes 0), P(it makes 1), ...
    while len(sums) <= block:
        sums = _convolve(*zip(*(mass.chunk(2, -1) for mass in sums), strict=True))
    angle = at.angle(torch.arange(block + 1, dtype=q.dtype, device=q.device))
    re, im = (torch.cat((angle.cos(), angle.sin()), -2) @ torch.stack(sums, -2)).chunk(2, -2)
    while (blocks := re.shape[-1]) > 1:
        if blocks % 2:
            re, im = pad(re, (0, 1), value=1.0), pad(im, (0, 1))
        (a, b), (c, d) = re.chunk(2, -1), im.chunk(2, -1)
        re, im = a * b - c * d, a * d + b * c
    return re.squeeze(-1), im.squeeze(-1)


def _convolve(a: Sequence[Tensor], b: Sequence[Tensor]) -> list[Tensor]:
    """Σ_i a_i b_(s−i) for all s."""
    size = len(a)
    result = []
    for s in range(2 * size - 1):
        first, *others = range(max(0, s - size + 1), min(size, s + 1))
        total = a[first] * b[s - first]
        for i in others:
            total = torch.addcmul(total, a[i], b[s - i])
        result.append(total)
    return result


def pmf(re: Tensor, im: Tensor, k: Tensor, at: Frequencies) -> Tensor:
    """P(S = k) from Φ, for k of the batch shape."""
    angle = at.angle(k.unsqueeze(-1)).squeeze(-1)
    return (at.weight * (re * angle.cos() + im * angle.sin())).sum(-1)
