"""What the callbacks for training frameworks share."""

from __future__ import annotations

from torch import nn

from khot.nn.anneal import Anneal

__all__ = ["begin", "step"]


def begin(model: nn.Module, steps: float) -> None:
    """Give every Anneal without a length that of the training."""
    for anneal in _anneals(model):
        if anneal.steps is None:
            if not 1 <= steps < float("inf"):
                raise ValueError(
                    f"steps must be given to {anneal}, because the length of the training is not known"
                )
            anneal.steps = int(steps)


def step(model: nn.Module) -> None:
    """Let every Anneal take a step."""
    for anneal in _anneals(model):
        anneal.step()


def _anneals(model: nn.Module) -> list[Anneal]:
    """Each one once, however many layers share it."""
    return [module for module in model.modules() if isinstance(module, Anneal)]
