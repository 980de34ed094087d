"""Other ways to compute a relaxed top-k, to compare khot with.

:data:`PEERS` lists them with one signature, ``call(x, k, tau)`` for rows along the last dim and an integer k:
loops that users write by hand and methods of papers, both written anew from their descriptions, the methods
of :mod:`khot.baselines`, and packages where they are installed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import khot
from khot import baselines

__all__ = ["PEERS", "Peer", "TopK", "bisection_topk", "halley_topk", "missing", "sorted_laplace_topk"]

TopK = Callable[[Tensor, int, float], Tensor]


@dataclass(frozen=True)
class Peer:
    """One way to compute a relaxed top-k.

    Attributes:
        call: a function of x (*batch, n), k and tau.
        source: the authors who described it, or the package.
        equals: khot's operator for the same function, or None if there is none. Peers with a fixed number of
            iterations only approach that function.
        fits: a function of rows, n and k that tells whether the call takes less than about 10 GB and a
            minute.
        ranks: True if it computes soft ranks and no top-k, and is listed to show what a sort costs.
        needs: the module and its attribute that ``call`` imports, as "module:attribute"; empty if none.
    """

    call: TopK
    source: str
    equals: TopK | None = None
    fits: Callable[[int, int, int], bool] = lambda rows, n, k: True
    ranks: bool = False
    needs: str = ""


def missing(peer: Peer) -> str | None:
    """Why the peer cannot run here, or None."""
    module, _, attribute = peer.needs.partition(":")
    if not module:
        return None
    if importlib.util.find_spec(module) is None:
        return "not installed"
    try:
        found = hasattr(importlib.import_module(module), attribute)
    except ImportError as error:
        return f"not installed: {error}"
    return None if found else f"not installed: the {module} that is here has no {attribute}"


def bisection_topk(x: Tensor, k: int, tau: float) -> Tensor:
    """Sigmoid top-k by 50 steps of bisection in the input's dtype, from 10 below to 10 above the scores.

    The bracket misses the threshold where k/n is beyond σ(±10): for 6.29 million equal scores and k = 64
    the sum is 285. In bfloat16 the threshold has only two digits, and the sum has a large error, too.
    """
    z = x.detach() / tau
    low, high = z.amin(-1, keepdim=True) - 10, z.amax(-1, keepdim=True) + 10
    for _ in range(50):
        middle = (low + high) / 2
        above = torch.sigmoid(z - middle).sum(-1, keepdim=True) > k
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return _Implicit.apply(x, torch.sigmoid(z - (low + high) / 2), tau, "logistic")


def halley_topk(x: Tensor, k: int, tau: float) -> Tensor:
    """Sigmoid top-k as published: Halley's method from the better of two guesses."""
    return baselines.root_finding_topk(x, k, tau=tau, method="halley", guess="both")


def sorted_laplace_topk(x: Tensor, k: int, tau: float) -> Tensor:
    """LapSum top-k as published: a sort, the soft count at every score by scans, and a closed form between
    neighbouring scores."""
    z = x.detach() / tau
    n = z.shape[-1]
    s = z.sort(-1, descending=True).values
    # with i scores above t, C(t) = i − e^t A + e^−t B
    infinite = torch.full_like(s[..., :1], -math.inf)
    log_a = torch.cat((infinite, torch.logcumsumexp(-s, -1)), -1) - math.log(2)
    log_b = torch.cat((torch.logcumsumexp(s.flip(-1), -1).flip(-1), infinite), -1) - math.log(2)
    place = torch.arange(1, n + 1, device=z.device)
    count = place - torch.exp(log_a[..., 1:] + s) + torch.exp(log_b[..., 1:] - s)
    i = (count < k).sum(-1, keepdim=True)
    log_a, log_b = log_a.gather(-1, i), log_b.gather(-1, i)
    rest = i - k
    root = torch.sqrt(rest**2 + 4 * torch.exp(log_a + log_b))
    t = torch.where(
        rest > 0,
        torch.log((rest + root) / 2) - log_a,
        torch.where(rest < 0, log_b - torch.log((root - rest) / 2), (log_b - log_a) / 2),
    )
    half = torch.exp(-(z - t).abs()) / 2
    return _Implicit.apply(x, torch.where(z > t, 1 - half, half), tau, "laplace")


class _Implicit(torch.autograd.Function):
    """Returns y, whose rows sum to a constant, with its gradient by the implicit function theorem."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, tau: float, cdf: str) -> Tensor:
        ctx.save_for_backward(y)
        ctx.tau, ctx.cdf = tau, cdf
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (y,) = ctx.saved_tensors
        f = (y * (1 - y) if ctx.cdf == "logistic" else torch.minimum(y, 1 - y)) / ctx.tau
        mean = (f * grad).sum(-1, keepdim=True) / f.sum(-1, keepdim=True)
        return f * (grad - mean), None, None, None


def _sigmoid(x: Tensor, k: int, tau: float) -> Tensor:
    return khot.sigmoid_topk(x, k, tau=tau)


def _sparse(x: Tensor, k: int, tau: float) -> Tensor:
    return khot.sparse_topk(x, k, tau=tau)


def _sinkhorn(x: Tensor, k: int, tau: float) -> Tensor:
    # undoes the division by the batch's largest cost, so that the temperature has the units of the scores
    cost = torch.maximum(x.detach() ** 2, (x.detach() - 1) ** 2).max()
    return baselines.sinkhorn_topk(x, k, epsilon=2 * tau / cost)


def _entmax(x: Tensor, k: int, tau: float) -> Tensor:
    y: Tensor = importlib.import_module("entmax").budget_bisect(x / tau, budget=k)
    return y


def _lml(x: Tensor, k: int, tau: float) -> Tensor:
    y: Tensor = importlib.import_module("lml").LML(N=k)(x / tau)
    return y


def _difftopk(x: Tensor, k: int, tau: float) -> Tensor:
    _, matrix = _bitonic_network(x.shape[-1], k, tau)(x.float())
    y: Tensor = matrix.sum(-1).to(x.dtype)
    return y


@functools.lru_cache
def _bitonic_network(n: int, k: int, tau: float) -> Any:
    return importlib.import_module("difftopk").DiffTopkNet("bitonic", n, k, steepness=1 / tau)


def _torchsort(x: Tensor, k: int, tau: float) -> Tensor:
    y: Tensor = importlib.import_module("torchsort").soft_rank(x, regularization_strength=tau)
    return y


def _softtorch(x: Tensor, k: int, tau: float, method: str) -> Tensor:
    topk = importlib.import_module("softtorch").topk
    indices: Tensor = topk(x, k, softness=tau, method=method, standardize=False).indices
    return indices.sum(-2)


PEERS: dict[str, Peer] = {
    "bisection": Peer(bisection_topk, "written by hand, eager", _sigmoid),
    "halley": Peer(halley_topk, "Wijk, Vinuesa, Azizpour 2025, appendix A", _sigmoid),
    "sorted laplace": Peer(
        sorted_laplace_topk,
        "Struski et al. 2025, section 4.1",
        lambda x, k, tau: khot.laplace_topk(x, k, tau=tau),
    ),
    "sinkhorn": Peer(
        _sinkhorn, "Xie et al. 2020, 200 iterations", _sigmoid, lambda rows, n, k: rows * n <= 2_000_000
    ),
    "sequential softmax": Peer(
        lambda x, k, tau: baselines.sequential_softmax_topk(x, k, tau=tau),
        "Xie and Ermon 2019",
        fits=lambda rows, n, k: rows * n * k <= 200_000_000,
    ),
    "rescaled sigmoid": Peer(
        lambda x, k, tau: baselines.rescaled_sigmoid_topk(x, k, tau=tau), "Pervez, Lippe, Gavves 2023"
    ),
    "pav": Peer(
        lambda x, k, tau: baselines.pav_topk(x, k, tau=tau), "Sander et al. 2023, appendix B.2", _sparse
    ),
    "dykstra": Peer(
        lambda x, k, tau: baselines.dykstra_topk(x, k, tau=tau),
        "Sander et al. 2023, 100 iterations",
        _sparse,
        lambda rows, n, k: rows * n <= 2_000_000,
    ),
    "entmax": Peer(_entmax, "package entmax, budget_bisect", _sparse, needs="entmax:budget_bisect"),
    "lml": Peer(
        _lml,
        "package lml (Amos, Koltun, Kolter 2019); the package index has another of that name",
        _sigmoid,
        needs="lml:LML",
    ),
    "difftopk": Peer(
        _difftopk,
        "package difftopk, bitonic network",
        fits=lambda rows, n, k: n & (n - 1) == 0 and rows * n**3 <= 2_000_000_000,
        needs="difftopk:DiffTopkNet",
    ),
    "softtorch, softsort": Peer(
        functools.partial(_softtorch, method="softsort"),
        "package softtorch, the sum of topk's k soft indices",
        fits=lambda rows, n, k: rows * n * k <= 50_000_000,
        needs="softtorch:topk",
    ),
    "softtorch, neuralsort": Peer(
        functools.partial(_softtorch, method="neuralsort"),
        "the same by its default method",
        fits=lambda rows, n, k: rows * n * n <= 200_000_000,
        needs="softtorch:topk",
    ),
    "softtorch, ot": Peer(
        functools.partial(_softtorch, method="ot"),
        "the same by optimal transport to k + 1 anchors",
        fits=lambda rows, n, k: rows * n * k <= 50_000,
        needs="softtorch:topk",
    ),
    "torchsort": Peer(_torchsort, "package torchsort, soft_rank", ranks=True, needs="torchsort:soft_rank"),
}
