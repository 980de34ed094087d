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


def _fake_pareto(probs: Tensor, seed: Tensor, least: float, tolerance: float) -> tuple[Tensor, Tensor]:
    return probs.new_empty(probs.shape), probs.new_empty((), dtype=torch.bool)


def _fake_trials(z: Tensor, k: Tensor, which: Tensor, seed: Tensor) -> Tensor:
    return z.new_empty((which.shape[0], z.shape[-1]), dtype=torch.bool)


order_sample = define("order_sample", kernels.order_sample, "theta bool")
pareto_sample = define("pareto_sample", kernels.pareto_sample, _fake_pareto)
conditional_poisson_sample = define("conditional_poisson_sample", kernels.conditional_poisson_sample, "probs")
tournament = define("tournament", kernels.tournament, "probs bool")
random_tournament = define("random_tournament", kernels.random_tournament, "probs bool")
pivotal_sample = define("pivotal_sample", kernels.pivotal_sample, "probs")
systematic_sample = define("systematic_sample", kernels.systematic_sample, "probs")
trials = define("trials", halving.trials, _fake_trials)
