"""The kernels of the designs that draw whole rows: order sampling, conditional Poisson, the tournament of the
pivotal method, systematic sampling."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from khot._kernels.reference import order_sampling, phantom, philox

__all__ = [
    "adjusted",
    "conditional_poisson",
    "conditional_poisson_sample",
    "line_bits",
    "order_sample",
    "pareto_sample",
    "pivotal_sample",
    "random_tournament",
    "smallest",
    "systematic",
    "systematic_sample",
    "tournament",
]


def order_sample(theta: Tensor, k: Tensor, seed: Tensor) -> Tensor:
    """True for the k units of each row with the smallest logit U_i − θ_i, where U is philox.uniform(seed).

    Args:
        theta: (*batch, n); ±inf for units that are certain or impossible.
        k: (*batch), from the number of certain units to the number of possible ones.
        seed: of philox, 0-dim.
    """
    return smallest(philox.uniform(seed, theta.shape).logit_().sub_(theta), k)


def adjusted(probs: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """θ (*batch, n), and d = Σπ(1 − π), (*batch, 1), of Pareto sampling: θ = logit π − π(1 − π)(π − ½)/d².

    The formula is wrong where d < least.
    """
    variance = torch.addcmul(probs, probs, probs, value=-1)
    d = variance.sum(-1, keepdim=True)
    return torch.logit(probs).addcmul_(variance.mul_(0.5 - probs), d.clamp(min=least) ** -2), d


def pareto_sample(probs: Tensor, seed: Tensor, least: float, tolerance: float) -> tuple[Tensor, Tensor]:
    """A draw of Pareto sampling by the formula of :func:`adjusted`: zeros and ones in probs' dtype.

    Args:
        probs: π (*batch, n). A phantom unit, which is not returned, makes each sum an integer.
        seed: of philox, 0-dim.
        least: the least d for the formula; rows with less are calibrated.
        tolerance: a sum that is so near to an integer is that integer.

    Returns:
        The sample; and True, or False if a row is not of probabilities. Such a row is NaN. (Compiled kernels
        of the CPU, where the second result is looked at, leave the whole sample without meaning.)
    """
    pi, fair = _with_phantom(probs, tolerance)
    k = pi.sum(-1).round()
    theta, d = adjusted(pi, least)
    few = d.squeeze(-1) < least
    if bool(few.any()):
        theta[few] = order_sampling.order_calibrate(torch.logit(pi[few]), k[few])
    chosen = order_sample(theta, k.long(), seed)
    return chosen[..., :-1].to(probs.dtype).masked_fill(~fair, math.nan).contiguous(), fair.all()


def _with_phantom(probs: Tensor, tolerance: float) -> tuple[Tensor, Tensor]:
    """The probabilities in float64 with a phantom unit behind each row, 0 where the row needs none; and which
    rows are of probabilities, (*batch, 1). The others are 0."""
    pi = probs.double()
    fair = ((pi >= 0) & (pi <= 1)).all(-1, keepdim=True)
    pi = pi.where(fair, 0)
    total = pi.sum(-1, keepdim=True)
    phantom = (total.ceil() - total).masked_fill((total - total.round()).abs() <= tolerance, 0)
    return torch.cat((pi, phantom), -1), fair


def conditional_poisson_sample(probs: Tensor, seed: Tensor, tolerance: float) -> Tensor:
    """A draw of the conditional Poisson design: zeros and ones in probs' dtype.

    Args:
        probs: π (*batch, n). A phantom unit, which is not returned, makes each sum an integer. Rows that
            expand() repeats are calibrated once.
        seed: of philox, 0-dim.
        tolerance: a sum that is so near to an integer is that integer.

    Returns:
        The sample. A row that is not of probabilities is NaN.
    """
    n = probs.shape[-1]
    few = phantom.distinct(probs).double()
    fair = ((few >= 0) & (few <= 1)).all(-1, keepdim=True)
    pi = phantom.append(few.where(fair, 0), tolerance)
    drawn = conditional_poisson(pi.expand(*probs.shape[:-1], pi.shape[-1]), seed)[..., :n]
    return drawn.to(probs.dtype).masked_fill(~fair, math.nan).contiguous()


def conditional_poisson(probs: Tensor, seed: Tensor) -> Tensor:
    """Bool (*batch, n) of the conditional Poisson design for probs (*batch, n) in float64, whose sums are
    integers up to rounding. Rows that expand() repeats are calibrated once."""
    rows, which = phantom.numbered(probs)
    k = rows.sum(-1).round()
    theta, _ = torch.ops.khot.calibrate.default(torch.logit(rows), k)
    drawn: Tensor = torch.ops.khot.trials.default(theta, k, which.reshape(-1), seed)
    return drawn.reshape(probs.shape)


def smallest(keys: Tensor, k: Tensor) -> Tensor:
    """True for the k smallest keys of each row; exactly k of them, even with equal keys."""
    n = keys.shape[-1]
    most = int(k.max()) if k.numel() else 0
    chosen = torch.zeros(keys.shape, dtype=torch.bool, device=keys.device)
    if keys.numel() == 0 or most == 0:
        return chosen
    if int(k.min()) == most:
        return chosen.scatter_(-1, keys.topk(most, largest=False, sorted=False).indices, True)
    ranked = torch.arange(most, device=keys.device) < k.unsqueeze(-1)
    order = keys.topk(min(most, n), largest=False).indices
    return chosen.scatter_(-1, order, ranked.expand(order.shape))


def tournament(probs: Tensor, seed: Tensor) -> Tensor:
    """True for the winners of ⌈log₂ n⌉ rounds of duels between neighbours, as in `_designs/pivotal.py`.

    Args:
        probs: (*batch, n), each row's sum an integer.
        seed: of philox, 0-dim; the duels take its columns one after another.
    """
    return _rounds(probs.double(), seed, 0)


def pivotal_sample(probs: Tensor, seed: Tensor, tolerance: float) -> Tensor:
    """A draw of the pivotal method: zeros and ones in probs' dtype, from arguments as those of
    :func:`pareto_sample`. A row that is not of probabilities is NaN."""
    pi, fair = _with_phantom(probs, tolerance)
    return tournament(pi, seed)[..., :-1].to(probs.dtype).masked_fill(~fair, math.nan).contiguous()


def systematic_sample(probs: Tensor, seed: Tensor, tolerance: float) -> Tensor:
    """The same by systematic sampling."""
    pi, fair = _with_phantom(probs, tolerance)
    drawn = systematic(pi, philox.uniform(seed, (*probs.shape[:-1], 1)))
    return drawn[..., :-1].to(probs.dtype).masked_fill(~fair, math.nan).contiguous()


def systematic(probs: Tensor, uniform: Tensor) -> Tensor:
    """True for the units whose interval, of length π, contains one of the ticks u, u + 1, ..., u + k − 1.

    Lengths are integer multiples of 2^−bits. Sums of floats are rounded, so that a unit could get two ticks,
    and on a GPU they are not even monotone. With integers, rounding affects only where the line ends.

    Args:
        probs: (*batch, n) in float64, each row's sum an integer.
        uniform: u, (*batch, 1).
    """
    bits = line_bits(probs.shape[-1])
    uncertain = (probs > 0) & (probs < 1)
    k = (phantom.size(probs) - (probs == 1).sum(-1)).unsqueeze(-1)
    line = (probs * 2**bits).add_(0.5).floor_().long().mul_(uncertain).cumsum_(-1)
    ticks = torch.minimum((line + (2**bits - 1 - (uniform * 2**bits).long())) >> bits, k)
    places = uncertain.cumsum(-1)
    ticks = torch.maximum(ticks, k - (places[..., -1:] - places))
    before = torch.nn.functional.pad(ticks, (1, 0))[..., :-1]
    return (ticks > before) | (probs == 1)


def line_bits(n: int) -> int:
    """In units of which power of ½ the lengths of n units are: their sum, n·2^bits, is an int64."""
    return 62 - n.bit_length()


def random_tournament(probs: Tensor, order: Tensor, seed: Tensor) -> Tensor:
    """As :func:`tournament`, each row being in the order of the uniforms of the seed ``order``."""
    shuffled = philox.uniform(order, probs.shape).argsort(-1)
    chosen = tournament(probs.gather(-1, shuffled), seed)
    return torch.empty_like(chosen).scatter_(-1, shuffled, chosen)


def _rounds(probs: Tensor, seed: Tensor, column: int) -> Tensor:
    n = probs.shape[-1]
    if n < 2:
        return probs > 0.5  # 0 or 1, up to rounding
    even = probs if n % 2 == 0 else torch.nn.functional.pad(probs, (0, 1))
    a, b = even.unflatten(-1, (-1, 2)).unbind(-1)
    total = a + b
    over = total > 1
    # both cases in one formula: the first unit goes on with probability a/(a + b), or (1 − a)/(2 − a − b) if
    # over
    one = over.to(probs.dtype)
    uniform = philox.uniform(seed, a.shape, offset=column)
    first = uniform.mul_(torch.sub(total, one, alpha=2).abs_()) < (a - one).abs_()
    goes_on = _rounds(total.sub_(one), seed, column + a.shape[-1])
    # the unit that goes on gets that result, the other gets `over`; bit operations are faster than
    # torch.where
    differ = goes_on.bitwise_xor_(over)
    x = torch.empty((*a.shape, 2), dtype=torch.bool, device=probs.device)
    torch.bitwise_and(differ, first, out=first).bitwise_xor_(over)
    x[..., 0] = first
    x[..., 1] = first.bitwise_xor_(differ)
    return x.flatten(-2)[..., :n]
