"""The pivotal method: duels between units, each of which decides one of the two (Deville, Tillé 1998).

Of two units with probabilities a + b ≤ 1 one gets 0 and the other goes on with a + b; if a + b > 1, one gets
1 and the other goes on with a + b − 1. Played as a tournament between neighbours: ⌈log₂ n⌉ rounds, all duels
of a round at once. In the order given, units close to each other are seldom selected together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from khot._ops import uniform as philox

__all__ = ["draw", "draw_random_order"]


def draw(probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    return torch.ops.khot.tournament.default(probs, philox.new_seed(probs.device, generator))


def draw_random_order(probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """As :func:`draw`, with the units shuffled for every draw: more entropy, and no order that matters."""
    order = philox.rand(probs.shape, probs.device, generator).argsort(-1)
    chosen = draw(probs.gather(-1, order), generator)
    return torch.empty_like(chosen).scatter_(-1, order, chosen)
