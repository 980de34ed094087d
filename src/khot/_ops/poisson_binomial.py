"""Two designs: size, inclusion, covariance and calibration of trials, and the same of order sampling."""

from __future__ import annotations

import torch
from torch import Tensor

from khot._core.dispatch import define
from khot._kernels.reference import fixed_point, order_sampling
from khot._kernels.reference import poisson_binomial as kernels

__all__ = ["calibrate", "characteristic", "covariance", "inclusion", "order_calibrate", "order_inclusion"]


def _fake_characteristic(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    phi = z.new_empty((*z.shape[:-1], kernels.FREQUENCIES))
    return z.new_empty(z.shape[:-1]), phi, torch.empty_like(phi)


characteristic = define("characteristic", kernels.characteristic_kernel, _fake_characteristic)
inclusion = define("inclusion", kernels.inclusion_kernel, "z[row], z, z")
covariance = define("covariance", kernels.covariance_kernel, "z")
calibrate = define("calibrate", fixed_point.calibrate_kernel, "goal, goal[row]")
order_inclusion = define("order_inclusion", order_sampling.order_inclusion, "z, z")
order_calibrate = define("order_calibrate", order_sampling.order_calibrate, "goal")
