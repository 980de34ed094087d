"""What the callbacks for training frameworks share."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from khot.nn.anneal import Anneal
from khot.nn.balancer import QuantileBalancer

__all__ = ["begin", "loads", "step", "update_balancers"]


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


def update_balancers(model: nn.Module) -> None:
    """Update every balancer, from the tokens of all processes."""
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    QuantileBalancer.update_all(model, dist.group.WORLD if several else None)


def loads(model: nn.Module) -> dict[str, float]:
    """How even the loads were that the last update knew; nothing before there was one."""
    balancers = [module for module in model.modules() if isinstance(module, QuantileBalancer)]
    loads = [balancer.load.double().cpu() for balancer in balancers]
    shares = [load / load.mean() for load in loads if load.sum() > 0]
    if not shares:
        return {}
    return {
        "violation": max(share.max().item() for share in shares) - 1,
        "least_load": min(share.min().item() for share in shares),
    }
