"""The layers that take a number which changes in the course of a training: one table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import khot
from khot import estimators

__all__ = ["BATCH", "ROWS", "STEPS", "N", "Row", "X", "pruned"]

N, TOKENS, BATCH, STEPS = 6, 5, 4, 4
X = torch.randn(BATCH * STEPS, TOKENS, N, generator=torch.Generator().manual_seed(0))  # of two epochs
LABELS = (torch.arange(TOKENS) % 3).expand(BATCH, TOKENS)


class Row(NamedTuple):
    """A layer, or a function that makes one, the arguments that are annealed, and how it is called."""

    name: str
    make: Callable[..., nn.Module]
    values: tuple[str, ...]
    call: Callable[[nn.Module, Tensor], Any] = lambda layer, x: layer(x)


def gate(k: Any = 2, **options: Any) -> nn.Module:
    layer = khot.nn.KHotGate(N, k, **options)
    with torch.no_grad():  # of equal logits the choice does not depend on tau
        layer.logits.copy_(torch.linspace(-1, 1, N))
    return layer


def gate_of(estimator: str) -> Callable[..., nn.Module]:
    return lambda **values: gate(estimator=estimator, **values)


def router(name: str) -> Callable[..., nn.Module]:
    return lambda **values: getattr(khot.nn, name)(N, 4, **values)


def mixture(**values: Any) -> nn.Module:
    return khot.nn.MixtureOfExperts(
        router("TokenChoiceRouter")(**values), [nn.Linear(N, 2) for _ in range(4)]
    )


def pruned(name: str, **options: Any) -> Callable[..., nn.Module]:
    def make(**values: Any) -> nn.Module:
        given = {"tau": 1.0, **options, **values}
        net = nn.Sequential(nn.Linear(N, 4), nn.Linear(4, 2))
        if name == "prune_global":
            khot.nn.prune_global([(net[0], "weight"), (net[1], "weight")], **given)
        else:
            getattr(khot.nn, name)(net[0], "weight", **given)
        with torch.no_grad():  # of equal scores the choice does not depend on tau
            for path, score in net.named_parameters():
                if path.endswith("score"):
                    score.copy_(torch.linspace(-1, 1, score.numel()).view_as(score))
        return net

    return make


ROWS = [
    Row("SoftTopK", khot.nn.SoftTopK, ("k", "tau")),
    Row(
        "TopKAttention",
        lambda **values: khot.nn.TopKAttention(N, 2, batch_first=True, **values),
        ("top_k", "tau"),
        lambda layer, x: layer(x, x, x),
    ),
    Row("KHotGate", gate, ("k",)),
    Row("KHotGate-prices", lambda **values: gate(cost=[1.0, 0.5, 2, 1, 0, 3], **values), ("k", "tau")),
    *(
        Row(f"KHotGate-{name}", gate_of(name), ("tau",))
        for name, one in estimators._ESTIMATORS.items()
        if "tau" in one.takes
    ),
    *(
        Row(name, router(name), (first, "tau"))
        for name, first in (
            ("ExpertChoiceRouter", "capacity"),
            ("TokenChoiceRouter", "k"),
            ("BalancedRouter", "k"),
        )
    ),
    Row("MixtureOfExperts", mixture, ("k", "tau")),
    Row(
        "SoftKNN",
        lambda **values: khot.nn.SoftKNN(num_classes=3, **values),
        ("k", "tau"),
        lambda layer, x: layer(x, x.flip(1) + 1, LABELS),
    ),
    Row("TopKSAE", lambda **values: khot.nn.TopKSAE(N, 12, **values), ("k", "tau")),
    Row(
        "TopKSAE-batch",
        lambda **values: khot.nn.TopKSAE(N, 12, batch=True, hard=True, **values),
        ("k", "tau"),
    ),
    Row("prune_magnitude", pruned("prune_magnitude"), ("amount", "tau")),
    Row("prune_n_m", pruned("prune_n_m", m=2, n=1), ("tau",)),
    Row("prune_global", pruned("prune_global"), ("amount", "tau")),
    Row("prune_global-score", pruned("prune_global", by="score"), ("amount", "tau")),
    Row("prune_global-cost", pruned("prune_global", cost=[2, 1]), ("amount", "tau")),
    Row("prune_global-shares", pruned("prune_global", min_share=0.2), ("amount", "tau")),
]
