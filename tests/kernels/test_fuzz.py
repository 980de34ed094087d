"""Random small rows of every kind through the kernels in use, against the reference kernels in float64.

`python tests/kernels/test_fuzz.py ROWS SEED` runs more rows than the test, and prints the failures.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Generator, Tensor

import oracles
from differences import far
from khot import _kernels as kernels
from khot._core import rows
from khot._kernels.reference import implicit, magnitude, soft_budget, soft_count, topk_mask
from khot._kernels.reference import soft_topk as reference

CDFS = {"logistic": 0.0, "laplace": 0.0, "normal": 0.0, "uniform": 0.0, "power": 4 / 3}
DTYPES = (torch.float32, torch.float64, torch.float32, torch.bfloat16, torch.float16)
INF = math.inf


def _masked(fill: float, share: float) -> oracles.Scores:
    return lambda n, g: torch.randn(n, generator=g).masked_fill(torch.rand(n, generator=g) < share, fill)


WIDE = ("normal_100", "normal_10000")  # rows are scaled here
SCORES = {name: make for name, make in oracles.ADVERSARIAL.items() if name not in WIDE}
SCORES |= {"masked": _masked(-INF, 0.3), "certain": _masked(INF, 0.02)}


class Case(NamedTuple):
    x: Tensor
    k: Tensor
    tau: Tensor
    cdf: str
    kinds: list[str]


def cases(rows: int, seed: int) -> Iterator[Case]:
    """About this many rows, in batches of 8 to 48 with the same length, dtype and CDF."""
    g = Generator().manual_seed(seed)

    def pick(options: int) -> int:
        return int(torch.randint(options, (), generator=g))

    def uniform(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=g))

    while rows > 0:
        n = int(math.exp(uniform(0, math.log(2_001))))
        dtype, cdf = DTYPES[pick(len(DTYPES))], list(CDFS)[pick(len(CDFS))]
        tau_all = 10 ** uniform(-3, 3)
        count = (8, 32, 48)[pick(3)]
        x, k, tau, kinds = [], [], [], []
        for _ in range(count // 8):  # blocks of one kind, because the lanes hold two blocks at once
            kind = list(SCORES)[pick(len(SCORES))]
            scale = (1.0, 1.0, 10 ** uniform(-3, 3))[pick(3)]
            block = (torch.stack([SCORES[kind](n, g) for _ in range(8)]) * scale).to(dtype)
            if dtype == torch.float16 and kind not in ("masked", "certain", "minus_inf"):
                block = block.masked_fill(block.isinf(), 60_000.0)
            for row in block:
                pinned, free = int((row == INF).sum()), int((row > -INF).sum())
                span = free - pinned
                inside = (
                    pick(span + 1),
                    uniform(0, span),
                    min(span, 1 + pick(3)),
                    max(0, span - 1 - pick(2)),
                    min(span, 0.5),
                    max(0, span - 0.5),
                    uniform(0, min(span, 1e-2)),
                    span // 10,
                    min(span, n // 2 + 0.5),
                )
                k.append(pinned + inside[pick(len(inside))])
                tau.append(tau_all if pick(4) else 10 ** uniform(-3, 3))
            x.append(block)
            kinds += [kind] * 8
        numbers = (torch.tensor(each, dtype=torch.float64) for each in (k, tau))
        yield Case(torch.cat(x), *numbers, cdf, kinds)
        rows -= count


def _overflow(want: Tensor, dtype: torch.dtype) -> Tensor:
    rounded = want.to(dtype)
    return want.where(~rounded.isinf(), rounded.double())


def excesses(case: Case, g: Generator) -> dict[str, Tensor]:
    """The error of each row in units of the allowed error, for each result."""
    x, k, tau, cdf, _ = case
    x64, dtype, rest = x.double(), x.dtype, (cdf, CDFS[cdf])
    single = dtype != torch.float64
    half = dtype in (torch.float16, torch.bfloat16)
    eps = torch.finfo(dtype).eps
    compact = cdf in ("uniform", "power")

    y, hi, lo = torch.ops.khot.soft_topk(x, k, tau, *rest, "y")
    want = reference.soft_topk(x64, k, tau, *rest, "y")[0]
    absolute = 5e-7 if single else 1e-12
    tiny = torch.finfo(dtype).tiny * eps
    if half:
        rounding = 0.51 * eps * want.abs() + tiny
        found = {"y": (far(y, want) / (absolute + rounding)).amax(-1)}
    else:
        found = {"y": far(y, want).amax(-1) / absolute}
        selectable = (x > -INF).sum(-1)
        goal = (1e-6 if single else 1e-12) * torch.minimum(k, selectable - k).clamp(min=1)
        found["sum"] = far(y.double().sum(-1), k) / (goal + x.shape[-1] * eps / 2)
    found["range"] = ((y < 0) | (y > 1)).any(-1) * INF
    found["range"] = found["range"].nan_to_num(nan=0.0)

    log_y = torch.ops.khot.soft_topk(x, k, tau, *rest, "log")[0]
    log_want = reference.soft_topk(x64, k, tau, *rest, "log")[0]
    size = log_want.abs().masked_fill(log_want == -INF, 0)
    scale = (1e-5 if single else 1e-12) * size + 1e-30
    if compact:  # log y = log(z)/(p − 1)
        slope = 1.0 if cdf == "uniform" else 1 / (CDFS[cdf] - 1)
        scale = scale + 10 * absolute * slope * torch.exp(size / slope)
    if half:
        scale = scale + 0.51 * eps * size + tiny
    found["log y"] = (far(log_y, _overflow(log_want, dtype)) / scale).amax(-1)

    _, t_hi, t_lo = torch.ops.khot.soft_topk(x, k, tau, *rest, "threshold")
    _, want_t_hi, want_t_lo = reference.soft_topk(x64, k, tau, *rest, "threshold")
    t, t_want = t_hi + t_lo, want_t_hi + want_t_lo
    found["t"] = far(t, t_want) / (1e-9 * tau + 1e-14 * t_want.abs().clamp(max=1e300))

    z = reference.standardize(x64, hi, lo, tau)
    edge = torch.minimum(z.abs(), (z - 1).abs()).amin(-1) < (1e-6 if single else 1e-14)
    grad = torch.randn(x.shape, generator=g).to(dtype)
    grad_lo = torch.zeros_like(k)
    still, one = torch.zeros_like(x64), torch.ones_like(k)
    width = reference.soft_topk_backward(still, one, x64, hi, lo, tau, *rest, "y")[1].abs()  # τ/Σf
    width = width.nan_to_num(0, 0, 0)
    for output, given in (("y", None), ("y", y), ("log", None)):
        got = torch.ops.khot.soft_topk_backward(grad, grad_lo, x, hi, lo, tau, *rest, output, given)
        true = reference.soft_topk_backward(grad.double(), grad_lo, x64, hi, lo, tau, *rest, output)
        # f/F is the exponential of a difference of two logarithms
        lost = 2e-14 * size.amax(-1) if output == "log" else torch.zeros_like(k)
        unclear = (lost > 1e-3) | (edge if compact else lost.isnan())
        terms = (true[0] * (1 + z.abs())).abs().nan_to_num(0, 0, 0).sum(-1)
        for name, a, b in zip(("dx", "dk", "dtau"), got, true, strict=True):
            if name == "dtau" and given is not None:
                continue
            unit = 1 + b.abs().nan_to_num(0, 0, 0) if name == "dk" else 1 / tau + terms
            allowed = ((2e-5 if single else 1e-10) + lost) * unit
            if name == "dk":  # dk is the mean of f/F weighted by f, and its terms may cancel
                allowed = allowed + lost * width * true[0].abs().nan_to_num(0, 0, 0).sum(-1)
            if name == "dx":
                error = far(a, _overflow(b, dtype))
                rounding = eps * b.abs().nan_to_num(0, 0, 0) + tiny if half else 0
                excess = (error / (allowed.unsqueeze(-1) + rounding)).amax(-1)
            else:
                excess = far(a, b) / allowed
                # dk is about as large as 1/Σf, and the kernels' exponentials overflow slightly before doubles
                # do
                excess = excess.masked_fill(b.isfinite() & (b.abs() > 1e305), 0)
            label = f"{name} of {output}" if given is None else f"{name} from {output}"
            found[label] = excess.masked_fill(unclear, 0)
    return found


def selection_excesses(case: Case, g: Generator) -> dict[str, Tensor]:
    """The same for the operators that need the k-th largest entry: the hard mask and top-k in magnitude."""
    x, k, tau, cdf, _ = case
    found = {}
    mask, want = torch.ops.khot.topk_mask(x, k), topk_mask.topk_mask(x, k)
    found["mask"] = far(mask, want).amax(-1) * INF

    s = torch.where(x == -INF, x, x.abs())
    k = torch.minimum(torch.floor(k), (s > -INF).sum(-1))
    p = {"logistic": 2.0, "laplace": 2.0, "normal": 1.5, "uniform": 4 / 3, "power": 1.15}[cdf]
    y, hi, lo = torch.ops.khot.soft_topk_magnitude(s, k, tau, p, False)
    want, want_hi, want_lo = magnitude.soft_topk_magnitude(s.double(), k, tau, p, False)
    eps = torch.finfo(x.dtype).eps
    size = want.abs().nan_to_num(0, 0, 0)
    # Y is the power 1/(p − 1) of the distance from γ
    allowed = (
        (0.51 * eps + 1e-11 / (p - 1)) * size + torch.finfo(x.dtype).tiny * eps + 1e-13 * size.amax(-1, True)
    )
    found["magnitude"] = (far(y, _overflow(want, x.dtype)) / allowed).nan_to_num(nan=0.0).amax(-1)
    gamma, want_gamma = hi + lo, want_hi + want_lo
    found["γ"] = far(gamma, want_gamma) / (1e-11 * want_gamma.abs().clamp(max=1e300) + 1e-300)

    grad = torch.randn(x.shape, generator=g).to(x.dtype)
    rest = (k, want_hi, want_lo, tau, p, False)
    given = want.to(x.dtype)
    got = torch.ops.khot.soft_topk_magnitude_backward(grad, torch.zeros_like(k), s, given, *rest)
    true = magnitude.soft_topk_magnitude_backward(grad, torch.zeros_like(k), s, given, *rest)
    for name, a, b in zip(("ds", "dtau of magnitude"), got, true, strict=True):
        size = b.double().abs().nan_to_num(0, 0, 0)
        size = (
            size.amax(-1, True) if name == "ds" else size + true[0].double().abs().nan_to_num(0, 0, 0).sum(-1)
        )
        excess = far(a, b) / ((1e-9 + 2 * eps) * size + torch.finfo(x.dtype).tiny)
        found[name] = excess.amax(-1) if name == "ds" else excess
    return {name: excess.nan_to_num(nan=0.0) for name, excess in found.items()}


def order_excesses(case: Case, g: Generator) -> dict[str, Tensor]:
    """Whether the order statistics are those of a sort."""
    x = case.x
    n = x.shape[-1]
    places = torch.randint(1, n + 1, (len(x), 5), generator=g).double()
    places[:, 0], places[:, 1] = 1, n
    got = torch.ops.khot.order_statistics(x, places)
    want = x.sort(-1, descending=True).values.gather(-1, places.long() - 1)
    return {"order statistics": (far(got, want).amax(-1) > 0) * 2.0}


def budget_excesses(case: Case, g: Generator) -> dict[str, Tensor]:
    """The same for the soft budget: what is spent, and its gradients against those of the reference."""
    x, k, tau, cdf, _ = case
    if x.dtype in (torch.float16, torch.bfloat16):
        x = x.float()
    n, single = x.shape[-1], x.dtype == torch.float32
    costs = (
        torch.rand(x.shape, generator=g) + 0.01,
        torch.empty(x.shape).exponential_(generator=g),
        10 ** (12 * torch.rand(x.shape, generator=g) - 6),
        torch.rand(x.shape, generator=g).masked_fill(torch.rand(x.shape, generator=g) < 0.2, 0),
        torch.ones(x.shape),
    )
    w = costs[int(torch.randint(len(costs), (), generator=g))].to(x.dtype)
    there, pinned = (x > -INF), (x == INF)
    most, least = (w.double() * there).sum(-1), (w.double() * pinned).sum(-1)
    share = (k - pinned.sum(-1)) / (there.sum(-1) - pinned.sum(-1)).clamp(min=1)
    budget = least + share.clamp(0, 1) * (most - least)
    by = ("score", "value")[int(torch.randint(2, (), generator=g))]
    if torch.rand((), generator=g) < 0.3:  # what the best entries cost, so that t lies in a gap
        paid = w.double().where(there & ~pinned & (w > 0), 0)
        level = (x.double() / paid if by == "value" else x.double()).masked_fill(paid == 0, -INF)
        prefix = paid.gather(-1, level.argsort(dim=-1, descending=True, stable=True)).cumsum(-1)
        last = (share.clamp(0, 1) * n).long().clamp(max=n - 1).unsqueeze(-1)
        budget = least + prefix.gather(-1, last).squeeze(-1)
    at_most = bool(torch.randint(2, (), generator=g))
    rest = (tau, cdf, CDFS[cdf], by, at_most)
    y, hi, lo = torch.ops.khot.soft_budget(x, w, budget, *rest)
    bound = (hi.abs() < 1e300) & ~(at_most & (hi == 0) & (lo == 0))
    spent = (w.double() * y.double()).where(there, 0).sum(-1)
    limit = (1e-6 if single else 1e-12) * budget + n * 1e-17 * most
    found = {"spend": (far(spent, budget) / limit).where(bound, 0)}
    found["budget's range"] = (((y < 0) | (y > 1)).any(-1) | hi.isnan()) * 2.0

    grad = torch.randn(x.shape, generator=g).to(x.dtype)
    zero = torch.zeros_like(hi)
    got = torch.ops.khot.soft_budget_backward(grad, zero, x, w, hi, lo, *rest)
    given = (grad.double(), zero, x.double(), w.double(), hi, lo, *rest)
    true = soft_budget.soft_budget_backward(*given)
    F = soft_budget.cdfs.resolve(cdf, CDFS[cdf])
    value = by == "value"
    d = implicit.weigh(
        implicit.Solved(x.double(), w.double(), hi, lo, tau, F, "y", value, at_most, rows.HERE)
    )
    a = torch.ones_like(d.z) if d.a is None else d.a
    edge = torch.minimum(d.z.abs(), (d.z - 1).abs()).amin(-1) < (1e-4 if single else 1e-11)
    v = grad.double().abs()
    mass = (d.w * a * d.weight).sum(-1)
    price = (a * v * d.weight).sum(-1) / mass.where(mass > 0, 1)
    price = price.where(mass > 0, v.amax(-1) / d.w.masked_fill(d.w == 0, INF).amin(-1))
    dx = d.rate * (v + d.w * price.unsqueeze(-1)) / tau.unsqueeze(-1)
    t = ((hi + lo).abs() * value).masked_fill(hi.abs() > 1e300, 0)
    z = d.z.abs() + 1e-5  # a z of 0 is only known to rounding
    units = (dx.amax(-1), price + t * dx.amax(-1), price, (dx * z).sum(-1))
    for name, a, b, unit in zip(("dx", "dw", "dB", "dtau"), got, true, units, strict=True):
        error = far(a, _overflow(b, a.dtype)).reshape(len(x), -1).amax(-1)
        excess = error / ((2e-5 if single else 1e-10) * unit + 1e-30)
        found[f"{name} of the budget"] = excess.masked_fill(edge & (cdf in ("uniform", "power")), 0)
    return {name: excess.nan_to_num(nan=0.0) for name, excess in found.items()}


def level_excesses(case: Case, g: Generator) -> dict[str, Tensor]:
    """The counts at many levels by sorting, and their gradients, against the sums over all entries."""
    x, tau = case.x, case.tau
    n = x.shape[-1]
    chosen = x.double().gather(-1, torch.randint(n, (len(x), 9), generator=g)).nan_to_num(0, 1e30, -1e30)
    levels = chosen + tau.unsqueeze(-1) * 3 * torch.randn(chosen.shape, generator=g).double()
    levels[:, 0], levels[:, 1] = x[:, 0].double(), INF
    grad = torch.randn(levels.shape, generator=g).double()
    count, order, place = torch.ops.khot.laplace_count(x, levels, tau, True)
    rest = (levels, tau, "laplace", 0.0, False)
    found = {"counts": (far(count, soft_count.soft_count(x.double(), *rest)) / (1e-12 * n)).amax(-1)}
    got = torch.ops.khot.laplace_count_backward(grad, x, order, levels, place, tau, True, True)
    true = soft_count.soft_count_backward(grad, x.double(), *rest)
    unit = grad.abs().sum(-1) / tau
    limits = (2 * torch.finfo(x.dtype).eps + 1e-12, 1e-12 * n, 1e-12 * n)
    for name, a, b, limit in zip(("dx", "dlevel", "dtau"), got, true, limits, strict=True):
        error = far(a, _overflow(b, a.dtype)).reshape(len(x), -1).amax(-1)
        found[f"{name} of counts"] = error / (limit * unit + 1e-30)
    return {name: excess.nan_to_num(nan=0.0) for name, excess in found.items()}


def all_excesses(case: Case, g: Generator) -> dict[str, Tensor]:
    parts = (excesses, selection_excesses, order_excesses, budget_excesses, level_excesses)
    return {name: excess for part in parts for name, excess in part(case, g).items()}


def failures(rows: int, seed: int) -> list[str]:
    g = Generator().manual_seed(seed)
    found = []
    for number, case in enumerate(cases(rows, seed)):
        for name, excess in all_excesses(case, g).items():
            for i in (excess > 1).nonzero().flatten().tolist():
                found.append(
                    f"{name} is off by {excess[i]:.3g} times the limit: case {number}, row {i}, {case.cdf}, "
                    f"{case.x.dtype}, {case.kinds[i]}, n={case.x.shape[-1]}, k={case.k[i]:.17g}, "
                    f"tau={case.tau[i]:.17g}"
                )
    return found


needs_extension = pytest.mark.skipif(
    kernels.active()["cpu"] == "reference", reason="the compiled kernels are not in use"
)


@needs_extension
def test_random_rows_as_the_reference() -> None:
    assert failures(1_000, seed=0) == []


@needs_extension
@pytest.mark.slow
def test_a_hundred_thousand_random_rows_as_the_reference() -> None:
    assert failures(100_000, seed=1) == []


if __name__ == "__main__":
    found = failures(int(sys.argv[1]), int(sys.argv[2]))
    print("\n".join(found[:400]) or "no row fails", f"\n{len(found)} failures")
    sys.exit(bool(found))
