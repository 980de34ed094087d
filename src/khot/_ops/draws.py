"""Draws of k units from each row: order sampling, and the tournament of the pivotal method."""

from __future__ import annotations

import torch
from torch import Tensor

from khot._core.dispatch import define
from khot._kernels.reference import draws as kernels

__all__ = ["order_sample", "pareto_sample", "tournament"]


def _fake_sample(theta: Tensor, k: Tensor, seed: Tensor) -> Tensor:
    return theta.new_empty(theta.shape, dtype=torch.bool)


def _fake_pareto(probs: Tensor, seed: Tensor, least: float, tolerance: float) -> tuple[Tensor, Tensor]:
    return probs.new_empty(probs.shape), probs.new_empty((), dtype=torch.bool)


def _fake_tournament(probs: Tensor, seed: Tensor) -> Tensor:
    return probs.new_empty(probs.shape, dtype=torch.bool)


order_sample = define(
    "order_sample", "(Tensor theta, Tensor k, Tensor seed) -> Tensor", kernels.order_sample, _fake_sample
)
pareto_sample = define(
    "pareto_sample",
    "(Tensor probs, Tensor seed, float least, float tolerance) -> (Tensor, Tensor)",
    kernels.pareto_sample,
    _fake_pareto,
)
tournament = define(
    "tournament", "(Tensor probs, Tensor seed) -> Tensor", kernels.tournament, _fake_tournament
)
