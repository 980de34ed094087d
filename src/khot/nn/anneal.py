"""Numbers that change in the course of training."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from khot._core.precision import widen

__all__ = ["Anneal"]

SCHEDULES: dict[str, Callable[[float, float, Tensor], Tensor]] = {
    "linear": lambda a, b, t: a + (b - a) * t,
    "cosine": lambda a, b, t: b + (a - b) * (1 + torch.cos(math.pi * t)) / 2,
    "exponential": lambda a, b, t: a * (b / a) ** t,
}


class Anneal(nn.Module):
    """A number that goes from ``start`` to ``end`` in a number of steps: the tau or k of other layers.

    With t = min(steps taken / steps, 1), from 0 to 1:

        linear       start + (end − start)·t
        cosine       end + (start − end)·(1 + cos πt)/2
        exponential  start·(end/start)^t

    Every layer of :mod:`khot.nn` takes one in the place of a number. It is then its submodule, so that the
    steps taken are part of the state dict and training resumes where it stopped. Call :meth:`step` once a
    training step; several layers can share one.

    Args:
        start, end: finite numbers; for ``"exponential"`` both > 0.
        steps: how many steps it takes, at least 1.
        schedule: ``"linear"``, ``"cosine"`` or ``"exponential"``. Temperatures differ by factors, so for
            them the last is usual.

    Returns:
        Called without arguments, the number of the moment: a 0-dim tensor on the module's device, in float64
        where that has it. Reading it waits for nothing, and stepping compiles nothing anew.

    Raises:
        ValueError: steps, schedule, start or end out of range.

    Example:
        >>> tau = khot.nn.Anneal(1.0, 0.25, steps=2, schedule="exponential")
        >>> select = khot.nn.SoftTopK(2, tau=tau)
        >>> for _ in range(3):
        ...     print(f"{tau():.2f}", select(torch.tensor([1.0, 3.0, 2.0, 0.0])))
        ...     tau.step()
        1.00 tensor([0.3775, 0.8176, 0.6225, 0.1824])
        0.50 tensor([0.2689, 0.9526, 0.7311, 0.0474])
        0.25 tensor([0.1192, 0.9975, 0.8808, 0.0025])
    """

    start: float
    end: float
    steps: int
    schedule: str

    taken: Tensor

    def __init__(self, start: float, end: float, steps: int, schedule: str = "linear") -> None:
        super().__init__()
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, but got {schedule!r}")
        if not steps >= 1:
            raise ValueError(f"steps must be at least 1, but got {steps}")
        for name, value in (("start", start), ("end", end)):
            if not math.isfinite(value) or (schedule == "exponential" and value <= 0):
                domain = "finite and > 0" if schedule == "exponential" else "finite"
                raise ValueError(f"{name} must be {domain} for the {schedule} schedule, but got {value}")
        self.start, self.end, self.steps, self.schedule = start, end, steps, schedule
        self.register_buffer("taken", torch.zeros((), dtype=torch.int64))

    def step(self) -> None:
        """One step further towards the end; past it nothing changes."""
        self.taken += 1

    def forward(self) -> Tensor:
        t = (widen(self.taken) / self.steps).clamp(max=1)
        return SCHEDULES[self.schedule](self.start, self.end, t)

    def extra_repr(self) -> str:
        return f"{self.start}, {self.end}, steps={self.steps}, schedule={self.schedule!r}"
