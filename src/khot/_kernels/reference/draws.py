"""The kernels of the designs that draw a whole row at once: order sampling and the pivotal tournament."""

from __future__ import annotations

import torch
from torch import Tensor

from khot._kernels.reference import philox

__all__ = ["order_sample", "smallest", "tournament"]


def order_sample(theta: Tensor, k: Tensor, seed: Tensor) -> Tensor:
    """True for the k units of each row with the smallest logit U_i − θ_i, where U is philox.uniform(seed).

    Args:
        theta: (*batch, n); ±inf for units that are certain or impossible.
        k: (*batch), from the number of certain units to the number of possible ones.
        seed: of philox, 0-dim.
    """
    return smallest(philox.uniform(seed, theta.shape).logit_().sub_(theta), k)


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
    """True for the winners of ⌈log₂ n⌉ rounds of duels between neighbours: see :mod:`khot.sampling.pivotal`.

    Args:
        probs: (*batch, n), each row's sum an integer.
        seed: of philox, 0-dim; the duels take its columns one after another.
    """
    return _rounds(probs.double(), seed, 0)


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
