"""The pivotal method: duels between units, each of which decides one of the two (Deville, Tillé 1998).

If the probabilities of two units have a sum a + b ≤ 1, one unit gets 0 and the other continues with a + b. If
a + b > 1, one unit gets 1 and the other continues with a + b − 1. The duels are a tournament between
neighbours with ⌈log₂ n⌉ rounds, and all duels of a round run at once. Units that are close to each other in
the given order are seldom selected together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from khot._ops import uniform as philox
from khot._ops.draws import random_tournament, tournament

__all__ = ["draw", "draw_random_order"]


def draw(probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    chosen: Tensor = tournament(probs, philox.new_seed(probs.device, generator))
    return chosen


def draw_random_order(probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """As :func:`draw`, with the units shuffled for every draw: more entropy, and no effect of order."""
    order, seed = (philox.new_seed(probs.device, generator) for _ in range(2))
    chosen: Tensor = random_tournament(probs, order, seed)
    return chosen
