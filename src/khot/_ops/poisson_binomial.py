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


def _fake_inclusion(z: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return z.new_empty(z.shape[:-1]), z.new_empty(z.shape), z.new_empty(z.shape)


def _fake_covariance(z: Tensor, k: Tensor, u: Tensor) -> Tensor:
    return z.new_empty(z.shape)


def _fake_calibrate(goal: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return goal.new_empty(goal.shape), goal.new_empty(goal.shape[:-1])


def _fake_order_inclusion(z: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return z.new_empty(z.shape), z.new_empty(z.shape)


def _fake_order_calibrate(goal: Tensor, k: Tensor) -> Tensor:
    return goal.new_empty(goal.shape)


characteristic = define(
    "characteristic",
    "(Tensor z) -> (Tensor, Tensor, Tensor)",
    kernels.characteristic_kernel,
    _fake_characteristic,
)
inclusion = define(
    "inclusion", "(Tensor z, Tensor k) -> (Tensor, Tensor, Tensor)", kernels.inclusion_kernel, _fake_inclusion
)
covariance = define(
    "covariance", "(Tensor z, Tensor k, Tensor u) -> Tensor", kernels.covariance_kernel, _fake_covariance
)
calibrate = define(
    "calibrate", "(Tensor goal, Tensor k) -> (Tensor, Tensor)", fixed_point.calibrate_kernel, _fake_calibrate
)
order_inclusion = define(
    "order_inclusion",
    "(Tensor z, Tensor k) -> (Tensor, Tensor)",
    order_sampling.order_inclusion,
    _fake_order_inclusion,
)
order_calibrate = define(
    "order_calibrate",
    "(Tensor goal, Tensor k) -> Tensor",
    order_sampling.order_calibrate,
    _fake_order_calibrate,
)
