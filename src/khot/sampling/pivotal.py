"""The pivotal method: duels between units, each of which decides one of the two (Deville, Tillé 1998).

Of two units with probabilities a + b ≤ 1 one gets 0 and the other goes on with a + b; if a + b > 1, one gets
1 and the other goes on with a + b − 1. Played as a tournament between neighbours: ⌈log₂ n⌉ rounds, all duels
of a round at once. In the order given, units close to each other are seldom selected together.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["draw", "draw_random_order"]


def draw(probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    return _tournament(probs, generator)


def draw_random_order(probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """As :func:`draw`, with the units shuffled for every draw: more entropy, and no order that matters."""
    order = torch.rand(probs.shape, dtype=torch.float64, device=probs.device, generator=generator).argsort(-1)
    chosen = _tournament(probs.gather(-1, order), generator)
    return torch.empty_like(chosen).scatter_(-1, order, chosen)


def _tournament(probs: Tensor, generator: torch.Generator | None) -> Tensor:
    n = probs.shape[-1]
    if n < 2:
        return probs > 0.5  # 0 or 1, up to rounding
    even = probs if n % 2 == 0 else torch.nn.functional.pad(probs, (0, 1))
    a, b = even.unflatten(-1, (-1, 2)).unbind(-1)
    total = a + b
    over = total > 1
    # both ways at once: the first goes on with probability a/(a + b), or (1 − a)/(2 − a − b) if over
    one = over.to(probs.dtype)
    uniform = torch.rand(a.shape, dtype=torch.float64, device=probs.device, generator=generator)
    first = uniform.mul_(torch.sub(total, one, alpha=2).abs_()) < (a - one).abs_()
    goes_on = _tournament(total.sub_(one), generator)
    # whichever goes on gets that result, the other gets `over`; in bits, as torch.where costs far more
    differ = goes_on.bitwise_xor_(over)
    x = torch.empty((*a.shape, 2), dtype=torch.bool, device=probs.device)
    torch.bitwise_and(differ, first, out=first).bitwise_xor_(over)
    x[..., 0] = first
    x[..., 1] = first.bitwise_xor_(differ)
    return x.flatten(-2)[..., :n]
