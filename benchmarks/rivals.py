"""What one would run instead of khot, where no package has it in this form; :mod:`benchmarks.times` does."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

Long = np.longdouble


# ------------------------------------------------------------------------------------- packed rows


def padded(function: Callable[..., Tensor], x: Tensor, k: Tensor, offsets: Tensor) -> Tensor:
    """A function of packed rows as one of a matrix with a mask, which is as wide as the longest row."""
    lengths = offsets.diff()
    mask = torch.arange(int(lengths.max())) < lengths.unsqueeze(-1)
    return function(x.new_zeros(mask.shape).masked_scatter(mask, x), k, mask=mask)[mask]


def each_row(function: Callable[..., Tensor], x: Tensor, k: Tensor, offsets: Tensor) -> Tensor:
    """A function of one row after the other."""
    rows = zip(x.split(offsets.diff().tolist()), k.tolist(), strict=True)
    return torch.cat([function(row, number) for row, number in rows])


def largest_by_sorts(x: Tensor, k: Tensor, offsets: Tensor) -> Tensor:
    """The k largest entries of each row by two stable sorts, as libraries for graphs select nodes."""
    lengths = offsets.diff()
    row = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    order = x.sort(descending=True, stable=True).indices
    order = order[row[order].sort(stable=True).indices]
    place = torch.arange(len(x)) - torch.repeat_interleave(offsets[:-1], lengths)
    mask = torch.zeros_like(x)
    mask[order] = (place < torch.repeat_interleave(k, lengths)).to(x.dtype)
    return mask


# ----------------------------------------------------------------------------------- ranking losses


def log_rank_of_pairs(x: Tensor, relevance: Tensor) -> Tensor:
    """`khot.losses.log_rank_loss` of a list of distinct relevances > 0, from the matrix of all pairs."""
    grade, order = relevance.double().sort()
    y = x[order].double()
    apart = y - y.unsqueeze(-1)
    before = (apart.clamp(min=0) + 0.5 * torch.exp(-apart.abs())).cumsum(-1)
    below = F.pad(before[:, :-1], (1, 0))  # of each grade, whose place in the perfect order is best
    best = torch.arange(len(x) + 1, 1, -1) / 2
    step = grade.diff(prepend=grade.new_zeros(1))
    return ((torch.log1p(below / best) * step).tril().sum() / grade.sum()).to(x.dtype)


# -------------------------------------------------------------------------------------- assignment


def pot_sweeps(x: np.ndarray, epsilon: float, method: str, stop: float) -> tuple[np.ndarray, int]:
    """The plan of POT's Sinkhorn, with rows of sum 1 and columns of equal sums, and how many sweeps."""
    import ot

    m, width = x.shape
    sums = np.full(m, 1 / m), np.full(width, 1 / width)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan, log = ot.sinkhorn(*sums, -x, epsilon, method=method, numItermax=100_000, stopThr=stop, log=True)
    return m * plan, log["niter"]


# --------------------------------------------------------------------------------------- transport


def log_sweeps(x: Tensor, k: int, epsilon: float, sweeps: int) -> Tensor:
    """n times the plan, less its last anchor, (batch, k, n): alternate scaling in logarithms."""
    n = x.shape[-1]
    anchors = torch.arange(k, -1, -1, dtype=x.dtype)
    kernel = -((x[:, None, :] - anchors[:, None]) ** 2) / epsilon
    log_mass = torch.zeros(k + 1, dtype=x.dtype)
    log_mass[k] = torch.tensor(float(max(n - k, 1e-300))).log()
    b = torch.zeros(len(x), k + 1, 1, dtype=x.dtype)
    for _ in range(sweeps):
        a = -(kernel + b).logsumexp(-2, keepdim=True)
        b = log_mass[:, None] - (kernel + a).logsumexp(-1, keepdim=True)
    return (kernel + a + b).exp()[:, :k]


def plain_sweeps(x: Tensor, k: int, epsilon: float, sweeps: int) -> Tensor:
    """The same without logarithms: two matrix-vector products per sweep, and NaN where exp underflows."""
    n = x.shape[-1]
    anchors = torch.arange(k, -1, -1, dtype=x.dtype)
    kernel = torch.exp(-((x[:, None, :] - anchors[:, None]) ** 2) / epsilon)
    mass = torch.ones(k + 1, 1, dtype=x.dtype)
    mass[k] = n - k
    q = torch.ones(len(x), k + 1, 1, dtype=x.dtype)
    for _ in range(sweeps):
        p = 1 / (kernel.mT @ q)
        q = mass / (kernel @ p)
    return (kernel * p.mT * q)[:, :k]


class ClosedForm(torch.autograd.Function):
    """Sweeps forward, and backward the implicit gradient at the plan that they have come to."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, k: int, epsilon: float, sweeps: Callable[..., Tensor], count: int
    ) -> Tensor:
        y = sweeps(x, k, epsilon, count)
        ctx.save_for_backward(y)
        ctx.epsilon = epsilon
        return y

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Any, ...]:
        (y,) = ctx.saved_tensors
        h = y * (v - (v * y).sum(-2, keepdim=True))
        K = torch.diag_embed(y.sum(-1)) - y @ y.mT
        pull = torch.linalg.solve(K, h.sum(-1, keepdim=True))
        h = h - y * (pull - (pull * y).sum(-2, keepdim=True))
        anchors = torch.arange(y.shape[-2], 0, -1, dtype=y.dtype)
        return 2 / ctx.epsilon * (anchors[:, None] * h).sum(-2), None, None, None, None


# ---------------------------------------------------------------------------------- permutahedron


class FastSoftSort:
    """An operator of fast-soft-sort on each row of an array, and its gradient. The temperature of its
    soft_sort only adds to the ranks: for "l2" the scores are multiplied by τ and the result is divided by it,
    which is the same."""

    def __init__(self, name: str, regularization: str, tau: float) -> None:
        from fast_soft_sort import numpy_ops

        self.scale, strength = (1.0, tau) if name == "soft_rank" else (tau, 1.0)
        kind = getattr(numpy_ops, {"soft_rank": "SoftRank", "soft_sort": "SoftSort"}[name])
        self.make = partial(kind, regularization_strength=strength, regularization=regularization)

    def forward(self, x: np.ndarray) -> np.ndarray:
        return np.stack([self.make(self.scale * row).compute() for row in x]) / self.scale

    def both(self, x: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        operators = [self.make(self.scale * row) for row in x]
        values = [operator.compute() / self.scale for operator in operators]
        grads = [operator.vjp(one) for operator, one in zip(operators, v, strict=True)]
        return np.stack(values), np.stack(grads)


def pooled(name: str, regularization: str, tau: float, x: np.ndarray, v: np.ndarray) -> list[np.ndarray]:
    """Ranks or sorting of a row by projection, and the gradient, by pooling one entry after the other in
    80-bit floats."""
    x, v, n, kl = x.astype(Long), v.astype(Long), len(x), regularization == "kl"
    ranks = np.arange(n, 0, -1).astype(Long)
    sign = 1 if name == "soft_rank" else -1
    order = np.argsort(-sign * x, kind="stable")
    scores = sign * x[order]
    u, w = (scores / tau, np.log(ranks) if kl else ranks) if name == "soft_rank" else (ranks / tau, scores)
    # the first place of each block, and the sums of u and w or of their exponentials
    blocks: list[tuple[int, Any, Any]] = []
    for i in range(n):
        first, a, b = (i, u[i], w[i])
        while blocks:
            p, c, d = blocks[-1]
            before, now = (c - d, a - b) if kl else ((c - d) / (first - p), (a - b) / (i + 1 - first))
            if before > now:
                break
            blocks.pop()
            first, a, b = (p, np.logaddexp(c, a), np.logaddexp(d, b)) if kl else (p, a + c, b + d)
        blocks.append((first, a, b))
    y, grad = np.empty(n, Long), np.empty(n, Long)
    stops = [p for p, _, _ in blocks[1:]] + [n]
    v = v[order] if name == "soft_rank" else v
    for (p, a, b), stop in zip(blocks, stops, strict=True):
        here = slice(p, stop)
        y[here] = u[here] - (a - b if kl else (a - b) / (stop - p))
        if name == "soft_rank":
            y[here] = np.exp(y[here]) if kl else y[here]
            g = v[here] * (y[here] if kl else 1)
            share = np.exp(u[here] - a) if kl else 1 / Long(stop - p)
            grad[here] = (g - share * g.sum()) / tau
        else:
            grad[here] = v[here].sum() * (np.exp(w[here] - b) if kl else 1 / Long(stop - p))
    placed = np.empty((2, n), Long)
    placed[:, order] = y, grad
    return [placed[0], placed[1]] if name == "soft_rank" else [sign * y, placed[1]]


# ---------------------------------------------------------------------------------------- sampling


def simple_counts(logits: Tensor, k: int) -> list[Tensor]:
    """For m = 0, ..., n: log P(j of the first m trials succeed), (rows, k + 1)."""
    yes, no = F.logsigmoid(logits), F.logsigmoid(-logits)
    # with −inf the gradients would be NaN, and with logaddexp the second derivatives
    row = torch.full((len(logits), k + 1), -1e30, dtype=logits.dtype)
    row[:, 0] = 0
    rows = [row]
    for m in range(logits.shape[-1]):
        fewer = F.pad(row[:, :-1], (1, 0), value=-1e30)
        row = torch.stack((row + no[:, m, None], fewer + yes[:, m, None])).logsumexp(0)
        rows.append(row)
    return rows


def simple(logits: Tensor, k: int) -> Tensor:
    """SIMPLE written anew from its description: log P(j of the first m trials) by dynamic programming, O(nk)
    and vectorised over the rows and j; an exact sample, from the last trial back to the first; its gradient
    is that of the marginals, which are the gradient of log P(k of n). Unlike in the paper, nothing is
    compiled or precomputed."""
    with torch.enable_grad():
        leaf = logits if logits.requires_grad else logits.detach().requires_grad_()
        rows = simple_counts(leaf, k)
        (marginals,) = torch.autograd.grad(rows[-1][:, k].sum(), leaf, create_graph=True)
    # the derivative of log P(k of n) in the logits is the marginal less the probability of the trial
    marginals = marginals + leaf.sigmoid()
    with torch.no_grad():
        sample = torch.zeros_like(logits)
        left = torch.full((len(logits), 1), k)
        yes = F.logsigmoid(logits)
        uniform = torch.rand(logits.shape).log()
        for m in reversed(range(logits.shape[-1])):
            fewer = rows[m].gather(-1, (left - 1).clamp(min=0)).masked_fill(left == 0, -math.inf)
            chosen = uniform[:, m, None] < fewer + yes[:, m, None] - rows[m + 1].gather(-1, left)
            sample[:, m, None] = chosen.to(sample)
            left = left - chosen.long()
    return sample + (marginals - marginals.detach())


def log_prob_by_programme(value: Tensor, theta: Tensor, k: int) -> Tensor:
    """Of conditional Poisson sampling in O(nk): log Z_j ← logaddexp(log Z_j, log Z_(j−1) + θ)."""
    log_z = theta.new_full((*theta.shape[:-1], k + 1), -torch.inf)
    log_z[..., 0] = 0
    for unit in theta.unbind(-1):
        grown = torch.logaddexp(log_z[..., 1:], log_z[..., :-1] + unit.unsqueeze(-1))
        log_z = torch.cat((log_z[..., :1], grown), -1)
    return (value * theta).sum(-1) - log_z[..., -1]


# --------------------------------------------------------------------------------------- attention


def masked_attention(q: Tensor, k: Tensor, v: Tensor, top_k: int) -> Tensor:
    best = (q @ k.mT).topk(top_k, -1).indices
    mask = torch.zeros(*q.shape[:-1], k.shape[-2], dtype=torch.bool).scatter(-1, best, True)
    return F.scaled_dot_product_attention(q, k, v, mask)
