"""Draws of k units from each row: order and systematic sampling, trials given their sum, tournaments."""

from __future__ import annotations

import torch
from torch import Tensor

from khot._core.dispatch import define
from khot._kernels.reference import draws as kernels
from khot._kernels.reference import halving

__all__ = [
    "conditional_poisson_sample",
    "order_sample",
    "pareto_sample",
    "pivotal_sample",
    "random_tournament",
    "systematic_sample",
    "tournament",
    "trials",
]


def _fake_sample(theta: Tensor, k: Tensor, seed: Tensor) -> Tensor:
    return theta.new_empty(theta.shape, dtype=torch.bool)


def _fake_pareto(probs: Tensor, seed: Tensor, least: float, tolerance: float) -> tuple[Tensor, Tensor]:
    return probs.new_empty(probs.shape), probs.new_empty((), dtype=torch.bool)


def _fake_of_probs(probs: Tensor, seed: Tensor, tolerance: float) -> Tensor:
    return probs.new_empty(probs.shape)


def _fake_random_tournament(probs: Tensor, order: Tensor, seed: Tensor) -> Tensor:
    return _fake_tournament(probs, seed)


def _fake_trials(z: Tensor, k: Tensor, which: Tensor, seed: Tensor) -> Tensor:
    return z.new_empty((which.shape[0], z.shape[-1]), dtype=torch.bool)


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
conditional_poisson_sample = define(
    "conditional_poisson_sample",
    "(Tensor probs, Tensor seed, float tolerance) -> Tensor",
    kernels.conditional_poisson_sample,
    _fake_of_probs,
)
tournament = define(
    "tournament", "(Tensor probs, Tensor seed) -> Tensor", kernels.tournament, _fake_tournament
)
random_tournament = define(
    "random_tournament",
    "(Tensor probs, Tensor order, Tensor seed) -> Tensor",
    kernels.random_tournament,
    _fake_random_tournament,
)
pivotal_sample = define(
    "pivotal_sample",
    "(Tensor probs, Tensor seed, float tolerance) -> Tensor",
    kernels.pivotal_sample,
    _fake_of_probs,
)
systematic_sample = define(
    "systematic_sample",
    "(Tensor probs, Tensor seed, float tolerance) -> Tensor",
    kernels.systematic_sample,
    _fake_of_probs,
)
trials = define(
    "trials", "(Tensor z, Tensor k, Tensor which, Tensor seed) -> Tensor", halving.trials, _fake_trials
)
