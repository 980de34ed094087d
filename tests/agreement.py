"""How the rows of the operators' table are held against the CPU on another device, and what it may not do."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

import differences
from operators import Operator, log_limit

ROUNDING = {torch.float64: 1e-12, torch.float32: 5e-7, torch.bfloat16: 2**-8, torch.float16: 2**-10}
TAU = [0.5, 1.0, 1.7]


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory is filled with NaN, to show what a kernel does not write."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of operators that are not deterministic
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


@contextmanager
def never_waiting() -> Iterator[None]:
    """An error as soon as the host waits for the device."""
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("default")


def arguments(op: Operator, n: int = 7, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """On the CPU: x (3, n), and one k and one tau per row, in the operator's domain; k grows with n."""
    x = torch.randn(3, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64).to(dtype)
    k = torch.tensor(op.k, dtype=torch.float64)
    if op.name != "soft_count":
        k = k * (n // 7)
    if op.name in ("soft_count", "inverse_soft_count"):
        k = k.unsqueeze(-1)  # levels lie along dim
    return [x, k, torch.tensor(TAU, dtype=torch.float64)]


def leaves(op: Operator, args: list[Tensor], device: str) -> list[Tensor]:
    """Copies on the device, requiring grad where the operator is differentiable in them."""
    wanted = [op.differentiable and there for there in (True, not op.integer_k, op.has_tau)]
    return [a.detach().to(device, copy=True).requires_grad_(w) for a, w in zip(args, wanted, strict=True)]


def value_and_gradients(op: Operator, args: list[Tensor], seed: int = 1) -> list[Tensor]:
    y = op.call(*args)
    if not op.differentiable:
        return [y]
    cotangent = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed)).to(y)
    wanted = [a for a in args if a.requires_grad]
    return [y, *torch.autograd.grad(y, wanted, cotangent.masked_fill(y.detach().isinf(), 0))]


def error(got: Tensor, want: Tensor) -> float:
    """The largest difference in units of 1 + abs(want)."""
    return differences.error(got.detach().cpu(), want.detach())


def fits(op: Operator, n: int) -> bool:
    """Whether n is small enough for an operator that costs n² or more, or waits where rows are long."""
    by_count = op.name in ("soft_rank", "soft_sort", "project_permutahedron") and "projection" not in op.id
    quadratic = op.out_dims == 2 or op.name == "soft_assign" or (by_count and "laplace" not in op.id)
    return n <= 7 or not (quadratic or (n > 10_000 and op.name in ("soft_quantile", "soft_median")))


def excess(op: Operator, got: list[Tensor], want: list[Tensor], n: int, dtype: torch.dtype) -> list[float]:
    """The errors of a value and of its gradients, in units of what the contract allows: 1 is the limit."""
    tolerance = 2 * ROUNDING[dtype] + op.tolerance
    if op.log_of is None:
        value = error(got[0], want[0]) / (tolerance * (20 if not op.selects else 1))
    else:
        y, exact = got[0].detach().cpu().double(), want[0].detach()
        off = ((y - exact).abs() / log_limit(op.log_of, exact, ROUNDING[dtype])).masked_fill(y == exact, 0)
        value = off.nan_to_num(nan=torch.inf).max().item()
    # the cotangent is rounded to the dtype, and an entry's share of a sum of n of them with it
    rest = [error(a, b) / (100 * tolerance * n**0.5) for a, b in zip(got[1:], want[1:], strict=True)]
    return [value, *rest]


def error_in_tau(got: Sequence[Tensor], want: Sequence[Tensor], tau: float) -> Tensor:
    """Of thresholds hi + lo; 0 where both have none."""
    miss = ((got[0] - want[0]) + (got[1] - want[1])).abs() / tau
    return miss.masked_fill((got[0] == want[0]) & (got[1] == want[1]) | got[0].isnan() & want[0].isnan(), 0)
