"""Where the solver starts: statistics of the rows, a first guess of the threshold, and a bracket for it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from khot._core.precision import greatest, wide_dtype, widen
from khot._core.rows import Row
from khot._kernels.reference.steps import DIGITS
from khot._kernels.reference.tiles import some, tiles
from khot.cdfs import CDF, Normal

__all__ = ["Bracket", "Statistics", "first_guess", "histogram_search", "order_bounds", "statistics"]

FINE = 4.0  # width, in τ, at which a histogram's window is narrow enough for Newton
FAR = 1e12  # width, in τ, for which histograms of equal bins would need too many passes
HISTOGRAMS = 5


class Statistics(NamedTuple):
    free: Tensor  # number of finite entries
    pinned: Tensor  # number of +inf entries
    nan: Tensor
    low: Tensor  # least finite entry
    high: Tensor
    mean: Tensor  # of the finite entries
    variance: Tensor


def statistics(x: Tensor, row: Row) -> Statistics:
    batch = x.shape[:-1]
    zero = x.new_zeros(batch, dtype=wide_dtype(x.device))
    free, pinned, nan, total, squares, shift = zero, zero, zero, zero, zero, zero
    low, high = zero + math.inf, zero - math.inf
    for part, tile in tiles(x):
        finite = tile.isfinite()
        count = widen(finite.sum(-1))
        if part.start == 0:  # a shift near the data avoids cancellation in the one-pass variance
            shift = tile.where(finite, 0).sum(-1) / count.clamp(min=1)
        centred = (tile - shift.unsqueeze(-1)).where(finite, 0)
        free = free + count
        pinned = pinned + (tile == math.inf).sum(-1)
        nan = nan + tile.isnan().sum(-1)
        low = torch.minimum(low, tile.where(finite, math.inf).amin(-1))
        high = torch.maximum(high, tile.where(finite, -math.inf).amax(-1))
        total = total + centred.sum(-1)
        squares = squares + (centred * centred).sum(-1)
    n = free.clamp(min=1)
    mean = total / n
    spread, mean = (squares - total * mean).clamp(min=0), shift + mean

    # the variance of a spread row: the spread within the shards plus that of their means
    moments = [free * mean, free * mean * mean, spread]
    free, pinned, nan, total, squares, spread, low, high = row.reduce(
        [free, pinned, nan, *moments], [-low, high]
    )
    n, low = free.clamp(min=1), -low
    mean = (total / n).clamp(low, high)
    variance = (spread + (squares - total * mean).clamp(min=0)) / n
    # the spread of the means is inaccurate if they are far from 0; this is an upper bound of any variance
    variance = torch.minimum(variance, (0.5 * high - 0.5 * low).square())
    return Statistics(free, pinned, nan > 0, low, high, mean, variance)


@dataclass
class Bracket:
    """t lies in [low, high]; both bounds only move inwards."""

    low: Tensor
    high: Tensor

    def tighten(self, low: Tensor, high: Tensor) -> None:
        self.low = torch.fmax(self.low, low)  # fmax ignores a bound that is NaN
        self.high = torch.fmin(self.high, high)


def order_bounds(
    value: Tensor, rank: Tensor, k: Tensor, n: Tensor, tau: Tensor, cdf: CDF
) -> tuple[Tensor, Tensor]:
    """Bounds on t from one order statistic: the rank-th largest of n entries equals value.

    C(b) ≥ rank·F((value − b)/τ) bounds t from below where rank > k, and
    C(b) ≤ (rank − 1) + (n − rank + 1)·F((value − b)/τ) bounds it from above where rank − 1 < k.
    The bounds are padded against rounding; they are −inf and +inf where there is none.
    """
    digits = DIGITS[tau.dtype]
    pad = digits.quantile * tau + digits.value * value.abs()
    from_below = value - tau * cdf.icdf((k / rank).clamp(digits.tiny, 1)) - pad
    share = (k - (rank - 1)) / (n - (rank - 1))  # k − rank may round
    from_above = value - tau * cdf.icdf(share.clamp(digits.tiny, 1)) + pad
    return (
        torch.where((rank > k) & (rank >= 1), from_below, -math.inf),
        torch.where((rank - 1 < k) & (rank <= n), from_above, math.inf),
    )


def first_guess(
    stats: Statistics, k: Tensor, n: Tensor, tau: Tensor, cdf: CDF, live: Tensor
) -> tuple[Tensor, Bracket]:
    """A guess: the threshold of a distribution that has the moments of the scores plus noise of law τF.

    Its quantiles are those of F where the noise dominates (exact where all scores are equal), and those of
    the normal distribution where the scores dominate.
    """
    low, high = torch.where(live, stats.low, 0), torch.where(live, stats.high, 0)
    bracket = Bracket(*order_bounds(low, n, k, n, tau, cdf))
    bracket.tighten(*order_bounds(high, torch.ones_like(n), k, n, tau, cdf))
    digits = DIGITS[tau.dtype]
    share = (k / n).clamp(digits.tiny, digits.below_one)
    noise = tau * tau * cdf.variance
    total = noise + stats.variance
    own = (cdf.icdf(share) - cdf.mean) / math.sqrt(cdf.variance)
    quantile = torch.lerp(Normal().icdf(share), own, noise / total)
    guess = stats.mean - tau * cdf.mean - quantile * torch.sqrt(total)
    return guess, bracket


def histogram_search(
    x: Tensor,
    k: Tensor,
    n: Tensor,
    tau: Tensor,
    cdf: CDF,
    stats: Statistics,
    wide: Tensor,
    guess: Tensor,
    bracket: Bracket,
    row: Row,
) -> tuple[Tensor, int]:
    """Narrow the guess and the bracket to the order statistics around rank k, in the rows marked wide.

    It counts the entries in equal bins of a window and zooms in on the bins of the ranks ⌈k⌉ and ⌊k⌋ + 1 (one
    entry for a fractional k, two neighbours for an integer one). It stops when the window is at most `FINE`·τ
    wide, when it holds at most two entries, or when there is a gap between the two. A very wide window, for
    example with −1e9 in place of −inf, is first cut into bins of equal ratio of abs(x), down to τ.
    """
    digits = DIGITS[tau.dtype]
    bins = 256 if x.shape[-1] <= 512 and row.here else 1024  # must be the same for every shard
    rank_high, rank_low = torch.ceil(k), torch.floor(k) + 1
    log_tau = torch.log(tau)

    def fold(v: Tensor, log_tau: Tensor) -> Tensor:
        return torch.sign(v) * (torch.log(v.abs()) - log_tau).clamp(min=0)

    def unfold(v: Tensor) -> Tensor:
        return torch.sign(v) * torch.exp(v.abs() + log_tau).clamp(max=greatest(v))

    low = torch.where(wide, stats.low, 0.0)
    high = torch.where(wide, stats.high, 1.0)
    searching, passes = wide, 0
    while passes < HISTOGRAMS and some(searching, row):
        passes += 1
        folded = searching & (high - low > FAR * tau)
        bottom, top = (
            torch.where(folded, fold(low, log_tau), low),
            torch.where(folded, fold(high, log_tau), high),
        )
        top = top + digits.bin**2 * (top - bottom)  # the window is half open, and the maximum belongs to it
        width = top / bins - bottom / bins  # the difference of the two may overflow
        # bin 0 and bin `bins` + 1 count the entries below and above the window
        counts = x.new_zeros(*x.shape[:-1], bins + 2, dtype=torch.int32)
        one = counts.new_ones(())
        any_folded = x.is_cuda or bool(folded.any())
        for _, tile in tiles(x):
            if any_folded:
                tile = torch.where(folded.unsqueeze(-1), fold(tile, log_tau.unsqueeze(-1)), tile)
            index = (tile - bottom.unsqueeze(-1)).div_(width.unsqueeze(-1)).floor_()
            index = index.nan_to_num_(nan=0.0).clamp_(-1, bins).add_(1).long()
            counts.scatter_add_(-1, index, one.expand(index.shape))
        (counts,) = row.reduce([widen(counts)])
        above = counts.flip(-1).cumsum(-1).flip(-1) - stats.pinned.unsqueeze(-1)
        bin_high = (above >= rank_high.unsqueeze(-1)).sum(-1) - 1
        bin_low = (above >= rank_low.unsqueeze(-1)).sum(-1) - 1
        inside = above.gather(-1, bin_low.clamp(min=0).unsqueeze(-1)) - above.gather(
            -1, (bin_high + 1).clamp(max=bins + 1).unsqueeze(-1)
        )
        pad = digits.bin * width + digits.value * torch.maximum(bottom.abs(), top.abs())
        bottom, top = bottom + (bin_low - 1) * width - pad, bottom + bin_high * width + pad
        # folding maps everything within τ of 0 to the same point
        next_low = torch.where(folded, unfold(bottom) - tau, bottom)
        next_high = torch.where(folded, unfold(top) + tau, top)
        low = torch.where(searching, torch.maximum(next_low, low), low)
        high = torch.where(searching, torch.minimum(next_high, high), high)
        found = (high - low <= FINE * tau) | (inside.squeeze(-1) <= 2) | (bin_high - bin_low >= 4)
        searching = searching & ~found
    bracket.tighten(
        torch.where(wide, order_bounds(low, rank_low, k, n, tau, cdf)[0], -math.inf),
        torch.where(wide, order_bounds(high, rank_high, k, n, tau, cdf)[1], math.inf),
    )
    middle = 0.5 * low + 0.5 * high - tau * cdf.median
    return torch.where(wide, middle, guess), passes
