"""The operators that are timed, each with the float64 answer that it is held to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor

import khot
from khot import cdfs
from khot._kernels.reference import magnitude
from khot._kernels.reference import soft_topk as reference
from khot._kernels.reference import topk_mask as mask

__all__ = ["CDFS", "OPERATORS", "Operator", "disagreement"]

EPS = torch.finfo(torch.float32).eps
ROWS_CHECKED = 4


@dataclass(frozen=True)
class Operator:
    """One thing to time, with the float64 answer that it is held to.

    Attributes:
        public: the name in khot.
        call: of x, k and tau=.
        exact: the same in float64, by the reference kernels.
        relative: the error allowed, as a share of the answer, on top of 5e-7.
        sums: whether the result sums to k.
        smooth: the CDF whose gradient is compared, too; empty where it has kinks, at which neither side is
            wrong.
    """

    public: str
    call: Callable[..., Tensor]
    exact: Callable[[Tensor, Tensor, Tensor], Tensor]
    relative: float = 0.0
    sums: bool = True
    smooth: str = ""


def _soft(cdf: str, shape: float = 0.0, output: str = "y") -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def exact(x: Tensor, k: Tensor, tau: Tensor) -> Tensor:
        out, hi, lo = reference.soft_topk(x, k, tau, cdf, shape, output)
        return hi + lo if output == "threshold" else out

    return exact


def _magnitude(x: Tensor, k: Tensor, tau: Tensor, p: float) -> Tensor:
    return magnitude.soft_topk_magnitude(x.abs(), k, tau, p, False)[0] * x.sign()


FIRST = 4  # rows of a permutation


@cache
def _weights(n: int) -> Tensor:
    return torch.rand(n, generator=torch.Generator().manual_seed(3))


def _packed(x: Tensor, k: int, *, tau: float) -> Tensor:
    offsets = torch.arange(0, x.numel() + 1, x.shape[-1])
    return khot.soft_topk(x.flatten(), k, tau=tau, offsets=offsets).view_as(x)


def _nucleus(x: Tensor, k: Tensor, tau: Tensor) -> Tensor:
    probs, order = x.softmax(-1).sort(descending=True)
    return torch.zeros_like(x).scatter(-1, order, (probs.cumsum(-1) - probs < 0.9).to(x.dtype))


def _weighted(x: Tensor, k: Tensor, tau: Tensor) -> Tensor:
    weights = _weights(x.shape[-1]).expand_as(x)
    return torch.from_numpy(np.quantile(x, 0.9, axis=-1, method="inverted_cdf", weights=weights))


def _conformal(x: Tensor, k: Tensor, tau: Tensor) -> Tensor:
    n = x.shape[-1]
    return x.kthvalue(n + 1 - (n + 1) // 10).values  # ⌈0.9 (n + 1)⌉


def _first_places(x: Tensor, k: Tensor, tau: Tensor) -> Tensor:
    tops = [_soft("laplace")(x, torch.full_like(k, i), tau) for i in range(1, FIRST + 1)]
    return torch.stack(tops, -2).diff(dim=-2, prepend=torch.zeros_like(x).unsqueeze(-2))


def _choices(x: Tensor, k: int, *, tau: float) -> Tensor:
    return khot.distributions.PlackettLuce(k, x).log_prob(torch.arange(k))


def _exact_choices(x: Tensor, k: Tensor, tau: Tensor) -> Tensor:
    first = int(k[0])
    return (x - x.flip(-1).logcumsumexp(-1).flip(-1))[:, :first].sum(-1)


CDFS = {
    cdf: Operator("soft_topk", partial(khot.soft_topk, cdf=cdf), _soft(cdf), smooth=cdf * (cdf != "uniform"))
    for cdf in ("logistic", "laplace", "normal", "uniform")
}
CDFS["power 4/3"] = Operator(
    "soft_topk", partial(khot.soft_topk, cdf=cdfs.Power(4 / 3)), _soft("power", 4 / 3)
)
# what does not sum to k has a relative error
_other = partial(Operator, sums=False)
OPERATORS = {f"soft_topk, {name}": operator for name, operator in CDFS.items()} | {
    **{
        name: Operator(name, getattr(khot, name), _soft(cdf))
        for name, cdf in {
            "sigmoid_topk": "logistic",
            "laplace_topk": "laplace",
            "sparse_topk": "uniform",
        }.items()
    },
    "ot_topk": Operator(
        "ot_topk", lambda x, k, *, tau: khot.ot_topk(x, k, epsilon=2 * tau), _soft("logistic")
    ),
    "log_soft_topk": _other(
        "log_soft_topk", khot.log_soft_topk, _soft("logistic", output="log"), relative=1e-5
    ),
    **{
        f"soft_topk_magnitude, p = {name}": _other(
            "soft_topk_magnitude",
            partial(khot.soft_topk_magnitude, p=p),
            partial(_magnitude, p=p),
            relative=5e-7,
        )
        for name, p in {"2": 2.0, "4/3": 4 / 3}.items()
    },
    "topk_mask": Operator(
        "topk_mask", lambda x, k, *, tau: khot.topk_mask(x, k), lambda x, k, tau: mask.topk_mask(x, k)
    ),
    "soft_count": _other(
        "soft_count",
        lambda x, k, *, tau: khot.soft_count(x, 0.0, tau=tau),
        lambda x, k, tau: torch.sigmoid(x / tau[:, None]).sum(-1),
        relative=1e-6,
    ),
    "inverse_soft_count": _other(
        "inverse_soft_count", khot.inverse_soft_count, _soft("logistic", output="threshold"), relative=1e-6
    ),
    "soft_topk, packed": Operator("soft_topk", _packed, _soft("logistic")),
    "nucleus_mask": _other("nucleus_mask", lambda x, k, *, tau: khot.nucleus_mask(x, 0.9, tau=tau), _nucleus),
    "quantile, weights": _other(
        "quantile", lambda x, k, *, tau: khot.quantile(x, 0.9, weights=_weights(x.shape[-1])), _weighted
    ),
    "conformal_quantile": _other(
        "conformal_quantile", lambda x, k, *, tau: khot.conformal_quantile(x, 0.1), _conformal
    ),
    f"soft_permutation, k = {FIRST}": _other(
        "soft_permutation",
        lambda x, k, *, tau: khot.soft_permutation(x, tau=tau, k=FIRST, descending=True),
        _first_places,
    ),
    "PlackettLuce": _other("distributions.PlackettLuce", _choices, _exact_choices, relative=1e-6),
}


def disagreement(operator: Operator, x: Tensor, k: int, tau: float) -> str | None:
    """How the operator misses the accuracy that the design states for the dtype, or None.

    Sums are looked at in every row, values in a few, and gradients there where the operator is smooth.
    """
    n = x.shape[-1]
    half = torch.finfo(x.dtype).eps > EPS
    rounding = torch.finfo(x.dtype).eps / 2 if half else 0.0
    if operator.sums:
        allowed = max(1, k / 200) if half else 1e-6 * max(1, min(k, n - k)) + n * EPS / 2
        off = (operator.call(x, k, tau=tau).double().sum(-1) - k).abs().max().item()
        if not off <= allowed:
            return f"sums are off by {off:.1e}, allowed is {allowed:.1e}"
    part = x[:: max(1, len(x) // ROWS_CHECKED)][:ROWS_CHECKED].clone().requires_grad_(bool(operator.smooth))
    y = operator.call(part, k, tau=tau)
    given, one = part.detach().cpu().double(), torch.ones(len(part), dtype=torch.float64)
    want = operator.exact(given, k * one, tau * one)
    if (miss := _miss(y.detach(), want, 5e-7, operator.relative + rounding)) > 1:
        return f"values are off by {miss:.1f} times what is allowed"
    if operator.smooth:
        v = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(x.dtype)
        (grad,) = torch.autograd.grad(y, part, v.to(x.device))
        args = (given, k * one, tau * one, operator.smooth, 0.0, "y")
        _, hi, lo = reference.soft_topk(*args)
        want, _, _ = reference.soft_topk_backward(v.double(), torch.zeros_like(lo), given, hi, lo, *args[2:])
        if (miss := _miss(grad, want, 1e-5 / tau, rounding)) > 1:
            return f"gradients are off by {miss:.1f} times what is allowed"
    return None


def _miss(got: Tensor, want: Tensor, absolute: float, relative: float) -> float:
    """The largest error, in units of the allowed one; inf where only one is NaN or infinite."""
    got = got.cpu().double()
    error = (got - want).abs() / (absolute + relative * want.abs())
    return error.masked_fill(got == want, 0).nan_to_num(nan=torch.inf).max().item()
