"""Ways to prune the linear layers of a model: one table for all tests of what happens to pruned models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from khot.nn import Anneal, prune_global, prune_magnitude, prune_n_m

__all__ = ["GROUPS", "KINDS", "linear", "mix_scores", "together"]


def linear(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def mix_scores(model: nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("score"):
                parameter.normal_()


def each(prune: Callable[..., Any], *args: Any, **options: Any) -> Callable[[nn.Module], None]:
    def pruned(model: nn.Module) -> None:
        for layer in linear(model):
            prune(layer, "weight", *args, **options)

    return pruned


def together(model: nn.Module, **options: Any) -> None:
    prune_global([(layer, "weight") for layer in linear(model)], 0.5, **options)
    mix_scores(model)


def weights_and_biases(model: nn.Module) -> None:
    names = [(layer, name) for layer in linear(model) for name in ("weight", "bias")]
    prune_global([(m, name) for m, name in names if not parametrize.is_parametrized(m, name)], 0.5)


GROUPS: dict[str, Callable[[nn.Module], None]] = {
    "together": together,
    "score": lambda model: together(model, by="score", tau=0.3),
    "cost": lambda model: together(model, cost=[*range(1, 1 + len(linear(model)))]),
    "shares": lambda model: together(model, min_share=0.2),
    "annealed": lambda model: together(model, tau=Anneal(1.0, 0.1, 10)),
    "weights and biases": weights_and_biases,
}
KINDS = {
    "one by one": each(prune_magnitude, 0.5),
    "n of m": each(prune_n_m, 2, 4, tau=0.3),
    **GROUPS,
}
