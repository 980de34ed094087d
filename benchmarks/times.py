"""What calls cost on the CPU beside what else does the same: `python -m benchmarks.times NAME`.

Each name in SUBJECTS is a function below, which says what it times, with the cases that are the rows or the
columns of its tables. All calls of a case take turns, and the median counts; the time is CPU time of one
thread, which neighbours disturb less, unless ``--wall-time`` is given. Ratios are of one run. Nothing is
reported of calls whose results are wrong. The tables go to NAME.md in ``--out``, row by row, and to the
screen; a plot lies beside them.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

import khot
from benchmarks import report, rivals, timing
from benchmarks.cpu import spread_normal
from khot import baselines, estimators
from khot._kernels.reference import laplace as scans
from khot._kernels.reference import soft_count as reference_count
from khot.sampling import conditional_poisson as poisson
from khot.sampling import designs, gumbel_topk, sample
from reproduce.tasks.peers import PEERS, missing

RESULTS = Path(__file__).parent / "results"
Function = Callable[[Tensor], Tensor]
Times = dict[str, float]
Table = tuple[Sequence[str], Iterable[Sequence[str]]]  # its head, and its rows as they are measured


@dataclass(frozen=True)
class Run:
    """How calls are timed, and where a plot goes."""

    seconds: float
    clock: timing.Clock
    out: Path

    def __call__(self, calls: Mapping[str, timing.Call], rounds: int = 300) -> Times:
        return timing.medians(calls, seconds=self.seconds, rounds=rounds, clock=self.clock)

    def both(self, calls: Mapping[str, tuple[Any, ...]]) -> list[Times]:
        """Forward, and forward + backward, of functions and what they are given."""
        forward = self({name: partial(*call) for name, call in calls.items()})
        return [forward, self({name: timing.forward_backward(*call) for name, call in calls.items()})]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=generator(seed))


def right(agrees: Any, what: str) -> None:
    if not agrees:
        raise SystemExit(f"{what}: nothing is reported")


def ratios(times: Sequence[Times], name: str, unit: str) -> str:
    """Forward / forward + backward, in those of another call."""
    return " / ".join(report.ratio(t[name] / t[unit]) for t in times)


def milliseconds(*times: float) -> str:
    return " / ".join(f"{1e3 * t:.3g}" for t in times)


def across(title: str, names: Iterable[str], columns: Mapping[str, Mapping[str, str]]) -> Table:
    """A table with a case in each column, whose cell is empty where the case has no such name."""
    return [title, *columns], ([name, *(c.get(name, "") for c in columns.values())] for name in names)


# -------------------------------------------------------------------------------------- operators


def budget(run: Run, *shapes: tuple[int, int]) -> Iterator[Table]:
    """What a budget costs beside a count: soft_budget beside soft_topk and torch.softmax.

    Float32 scores (normal, sd 1; costs uniform in 0.05 to 1.05; a tenth of them is paid for), with gradients
    in the scores and, for the budget, in the costs. Set KHOT_KERNELS=avx2 for the older instruction set.
    Each cell: forward / forward + backward.
    """

    def rows() -> Iterator[list[str]]:
        for shape in shapes:
            g = generator()
            x, cost = torch.randn(shape, generator=g), torch.rand(shape, generator=g) + 0.05
            amount = 0.1 * cost.sum(-1)
            for cdf in ("logistic", "normal", "uniform"):
                calls: dict[str, tuple[Any, ...]] = {
                    "softmax": (partial(torch.softmax, dim=-1), x),
                    "top-k": (partial(khot.soft_topk, k=0.1 * shape[1], cdf=cdf), x),
                    "score": (partial(khot.soft_budget, budget=amount, cdf=cdf), x, cost),
                    "value": (partial(khot.soft_budget, budget=amount, cdf=cdf, by="value"), x, cost),
                }
                for name in ("score", "value"):
                    call, *given = calls[name]
                    spent = (cost.double() * call(*given).double()).sum(-1)
                    agrees = torch.allclose(spent, amount.double(), rtol=2e-6, atol=0)
                    right(agrees, f"by {name}, the budget is missed")
                times = run.both(calls)
                cells = [ratios(times, n, unit) for unit in ("top-k", "softmax") for n in ("score", "value")]
                yield [f"{shape[0]} x {shape[1]}", cdf, *cells]

    head = [f"by {by} : {unit}" for unit in ("top-k", "softmax") for by in ("score", "value")]
    yield ["shape", "cdf", *head], rows()


def calls(run: Run, *shapes: tuple[int, int, int]) -> Iterator[Table]:
    """What the calls that models make cost beside torch.softmax of the same tensor.

    Float32 scores, normal, sd 1, by the logistic CDF at a temperature of 1, unless the row says otherwise.
    Masks leave 70 % of the entries. Set KHOT_KERNELS=avx2 for the older instruction set. The second table has
    other operators, over their own plain calls; a tenth of the costs that a mask leaves is paid for, each of
    0.05 to 1.05.
    Each cell: forward / forward + backward.
    """

    def columns(rows: int, n: int, k: int) -> dict[str, str]:
        x, mask = normal(rows, n), torch.rand(rows, n, generator=generator(1)) < 0.7
        mask[:, :k] = True
        each = 1 + torch.rand(rows, generator=generator(2))
        soft = partial(khot.soft_topk, k=k)
        softmax, target = partial(torch.softmax, dim=-1), torch.zeros(rows, n)
        target[:, :k] = 1
        # the call, its unit, and its inputs, of which the unit has the first
        found: dict[str, tuple[Any, ...]] = {"plain": (soft, softmax, x)}
        for cdf in ("logistic", "laplace", "normal", "uniform", khot.cdfs.Power(4 / 3)):
            for tau in (0.1, 0.03, 0.01, 1e-3, 1e-6):
                name = cdf if isinstance(cdf, str) else "Power(4/3)"
                found[f"{name}, tau = {tau:g}"] = partial(soft, tau=tau, cdf=cdf), softmax, x
        found |= {
            "k = n - 1": (partial(soft, k=n - 1), softmax, x),
            "masked": (partial(soft, mask=mask), softmax, x),
            "masked, over softmax of masked_fill": (
                partial(soft, mask=mask),
                lambda x: torch.softmax(x.masked_fill(~mask, -torch.inf), -1),
                x,
            ),
            "hard": (partial(soft, hard=True), softmax, x),
            "k of each row": (partial(soft, k=each * k / 2), softmax, x),
            "tau of each row": (partial(soft, tau=each), softmax, x),
            "k learned": (khot.soft_topk, softmax, x, torch.tensor(float(k))),
            "tau learned": (lambda x, tau: soft(x, tau=tau), softmax, x, torch.tensor(1.0)),
            "log_soft_topk": (partial(khot.log_soft_topk, k=k), softmax, x),
            "log_soft_topk, tau = 0.03": (partial(khot.log_soft_topk, k=k, tau=0.03), softmax, x),
            "log_soft_topk, tau = 1e-06": (partial(khot.log_soft_topk, k=k, tau=1e-6), softmax, x),
            "log_soft_topk, normal": (partial(khot.log_soft_topk, k=k, cdf="normal"), softmax, x),
            "FenchelYoungTopKLoss": (partial(khot.losses.FenchelYoungTopKLoss(k), target=target), softmax, x),
            "bfloat16, over its softmax": (soft, softmax, x.bfloat16()),
            "float64, over its softmax": (soft, softmax, x.double()),
            "float64, tau = 0.03, over its softmax": (partial(soft, tau=0.03), softmax, x.double()),
            "float64, normal, over its softmax": (partial(soft, cdf="normal"), softmax, x.double()),
            "dim=0, over its softmax": (
                partial(soft, dim=0),
                partial(torch.softmax, dim=0),
                x.T.contiguous(),
            ),
        }
        cells = {}
        for name, (call, unit, *given) in found.items():
            times = run.both({name: (call, *given), "unit": (unit, given[0])})
            cells[name] = ratios(times, name, "unit")
        return cells

    def others(rows: int, n: int, k: int) -> dict[str, str]:
        x, mask = normal(rows, n), torch.rand(rows, n, generator=generator(1)) < 0.7
        mask[:, :k] = True
        cost, target = torch.rand(rows, n, generator=generator(2)) + 0.05, torch.zeros(rows, n)
        target[:, :k] = 1
        spent = partial(khot.soft_budget, cost=cost, budget=0.1 * (cost * mask).sum(-1))
        operators: dict[str, Function] = {
            "soft_budget": spent,
            "soft_budget, at_most": partial(spent, at_most=True),
            "soft_budget, uniform": partial(spent, cdf="uniform"),
            "soft_budget, by value": partial(spent, by="value"),
            "soft_topk_magnitude": partial(khot.soft_topk_magnitude, k=k),
            "FenchelYoungTopKLoss": lambda x, tau=1.0, mask=None: khot.losses.FenchelYoungTopKLoss(
                k, tau=tau
            )(x, target, mask=mask),
        }
        cells = {}
        for name, call in operators.items():
            ways: dict[str, Function] = {f"tau = {tau:g}": partial(call, tau=tau) for tau in (0.03, 1e-3)}
            times = run.both(
                {
                    how: (f, x)
                    for how, f in {"plain": call, **ways, "masked": partial(call, mask=mask)}.items()
                }
            )
            cells |= {f"{name}, {how}": ratios(times, how, "plain") for how in (*ways, "masked")}
        return cells

    for title, cells in (("call", columns), ("over the operator's own plain call", others)):
        measured = {f"{rows} x {n}, k = {k}": cells(rows, n, k) for rows, n, k in shapes}
        yield across(title, next(iter(measured.values())), measured)


LENGTHS: dict[str, Callable[[torch.Generator], Tensor]] = {
    "4,096 rows of 64": lambda g: torch.full((4096,), 64),
    "4,096 rows of 1 to 200": lambda g: torch.randint(1, 201, (4096,), generator=g),
    "one row of 20,000, 2,000 of 20": lambda g: torch.tensor([20_000] + [20] * 2000),
    "4,096 rows, log-normal": lambda g: (torch.randn(4096, generator=g) + 3.5).exp().long().clamp(1, 20_000),
    "100,000 rows of 1 to 10": lambda g: torch.randint(1, 11, (100_000,), generator=g),
}


def packed(run: Run, *cases: str) -> Iterator[Table]:
    """Rows of different lengths, by offsets, beside what one does without them.

    Float32 scores, normal, sd 1; k is half of a row, at most 8, and whole for hard masks; tau = 1. Beside it:
    rows padded to the longest, with a mask; a loop over rows; for hard masks the two sorts of libraries for
    graphs. Times are milliseconds, forward / forward + backward, and the others multiples of them. Memory is
    the growth of the process in forward + backward, in MB.
    """

    def rows() -> Iterator[list[str]]:
        for case in cases:
            lengths = LENGTHS[case](generator())
            offsets = F.pad(lengths.cumsum(0), (1, 0))
            x, k = normal(int(offsets[-1])), (lengths / 2).clamp(max=8)
            calls: dict[str, Function] = {
                "offsets": lambda x, k=k, offsets=offsets: khot.soft_topk(x, k, offsets=offsets),
                "padded": partial(rivals.padded, khot.soft_topk, k=k, offsets=offsets),
                "loop": partial(rivals.each_row, khot.soft_topk, k=k, offsets=offsets),
            }
            want = calls["padded"](x)
            right(all(torch.allclose(f(x), want, atol=2e-6) for f in calls.values()), "the rows differ")
            times = run.both({name: (f, x) for name, f in calls.items()})
            cells = [milliseconds(*(t["offsets"] for t in times))]
            cells += [ratios(times, name, "offsets") for name in ("padded", "loop")]
            grow = [report.peak_memory(timing.forward_backward(calls[n], x)) for n in ("offsets", "padded")]
            whole = k.floor()
            masks: dict[str, Function] = {
                "offsets": lambda x, k=whole, offsets=offsets: khot.topk_mask(x, k, offsets=offsets),
                "padded": partial(rivals.padded, khot.topk_mask, k=whole, offsets=offsets),
                "sorts": partial(rivals.largest_by_sorts, k=whole, offsets=offsets),
            }
            right(all(torch.equal(f(x), masks["sorts"](x)) for f in masks.values()), "the masks differ")
            hard = [run({name: partial(f, x) for name, f in masks.items()})]
            cells += [milliseconds(hard[0]["offsets"])]
            cells += [ratios(hard, name, "offsets") for name in ("padded", "sorts")]
            yield [case, *cells, " / ".join(report.megabytes(b) for b in grow)]

    head = ["soft_topk, ms", ": padded", ": loop", "topk_mask, ms", ": padded", ": sorts", "MB, and padded"]
    yield ["rows", *head], rows()


def long_lists(run: Run, *lengths: int) -> Iterator[Table]:
    """What log_rank_loss costs where all relevances of a long list differ, beside the matrix of all pairs.

    Float32 scores, normal, sd 1. Times are milliseconds, forward / forward + backward, and the others
    multiples of them. Memory is the growth of the process in forward + backward, in MB.
    """

    def rows() -> Iterator[list[str]]:
        for n in lengths:
            x, relevance = normal(n), 1 + torch.randperm(n, generator=generator(1))
            calls: dict[str, Function] = {
                "khot": lambda x, relevance=relevance: khot.losses.log_rank_loss(x, relevance),
                "pairs": partial(rivals.log_rank_of_pairs, relevance=relevance),
            }
            right(torch.allclose(calls["khot"](x), calls["pairs"](x), rtol=2e-6), f"{n}: the losses differ")
            times = run.both({name: (f, x) for name, f in calls.items()})
            grow = [report.peak_memory(timing.forward_backward(f, x)) for f in calls.values()]
            mine = milliseconds(*(t["khot"] for t in times))
            yield [f"{n:,}", mine, ratios(times, "pairs", "khot"), *map(report.megabytes, grow)]

    yield ["entries", "khot, ms", "pairs : khot", "khot, MB", "pairs, MB"], rows()


def quantile(run: Run, *shapes: tuple[int, ...]) -> Iterator[Table]:
    """What exact order statistics cost beside torch's: the median, and the quantile of 0.9.

    Float32. torch.quantile takes no more than 2^24 entries.
    """

    def rows() -> Iterator[list[str]]:
        for shape in shapes:
            x, k, short = normal(*shape), shape[-1] // 2, shape[-1] <= 2**24
            tied = x.clone()
            tied[..., ::2] = 0.1
            calls: dict[str, Callable[[], Tensor]] = {
                "kth_value": partial(khot.kth_value, x, k, largest=False),
                "tied": partial(khot.kth_value, tied, k, largest=False),
                "torch.kthvalue": lambda x=x, k=k: x.kthvalue(k).values,
            }
            right(torch.equal(calls["kth_value"](), calls["torch.kthvalue"]()), f"{shape}: the k-th differs")
            if short:
                calls["quantile"] = partial(khot.quantile, x, 0.9)
                calls["torch.quantile"] = partial(torch.quantile, x, 0.9, -1)
                right(torch.allclose(calls["quantile"](), calls["torch.quantile"]()), "quantiles differ")
            t = run(calls)
            whole = report.ratio(t["torch.quantile"] / t["quantile"]) if short else "–"
            of_kth = report.ratio(t["torch.kthvalue"] / t["kth_value"])
            size = " x ".join(f"{size:,}" for size in shape)
            yield [size, milliseconds(t["kth_value"]), of_kth, whole, f"{t['tied'] / t['kth_value']:.2f}"]

    yield (
        ["shape", "khot, ms", "torch.kthvalue : kth_value", "torch.quantile : quantile", "half tied : not"],
        rows(),
    )


def ranking(run: Run, *shapes: tuple[int, ...]) -> Iterator[Table]:
    """What soft ranks, sorting and soft counts of many levels cost beside torch.sort.

    With the Laplace CDF, forward / forward + backward, as ratios to torch.sort of the values, differentiated
    where the operator is. Of the counts of m levels, every other case has twice the entries and twice the
    levels of the one before.
    """
    one = torch.ones((), dtype=torch.float64)

    def beside_sort(x: Tensor, functions: dict[str, Function]) -> list[str]:
        functions = {"sort": lambda x: torch.sort(x, -1).values, **functions}
        times = run.both({name: (f, x) for name, f in functions.items()})
        return [ratios(times, name, "sort") for name in list(functions)[1:]]

    def ranks() -> Iterator[list[str]]:
        for shape in (s for s in shapes if len(s) == 2):
            x = spread_normal(*shape, generator())
            row, n = -x[:1].double(), shape[1]
            hi, lo, _, _ = scans.laplace_thresholds(row, torch.arange(n).double() + 0.5, one)
            off = (khot.soft_rank(x[:1]) - scans.laplace_count(row, None, one)[0]).abs().max() / n
            sort = (khot.soft_sort(x[:1]) + (hi + lo)).abs().max() / (hi + lo).abs().max()
            right(max(off, sort) <= 1e-7, f"{shape}: off by {off:.1e} and {sort:.1e}")
            yield [
                f"{shape}",
                "1.1 / 1.3",
                *beside_sort(x, {n: getattr(khot, n) for n in ("soft_rank", "soft_sort")}),
            ]

    def counts() -> Iterator[list[str]]:
        for rows, n, m in (s for s in shapes if len(s) == 3):
            g = generator()
            x, levels = spread_normal(rows, n, g), torch.randn(rows, m, generator=g)
            counts = 1 + (n - 2) * torch.rand(rows, m, generator=g)
            row, few = x[:1].double(), slice(0, 20)  # the first levels, one by one
            count = partial(reference_count.soft_count, row, tau=one, cdf="laplace", shape=0.0, centred=False)
            there = khot.soft_count(row, levels[:1].double(), cdf="laplace")[:, few]
            back = khot.inverse_soft_count(row, counts[:1].double(), cdf="laplace")[:, few]
            off = max(
                (there - count(levels[:1, few].double())).abs().max(),
                (count(back) - counts[:1, few].double()).abs().max(),
            )
            right(off <= 1e-9 * n, f"{(rows, n, m)}: off by {off:.1e}")
            functions: dict[str, Function] = {
                "soft_count": lambda x, at=levels: khot.soft_count(x, at, cdf="laplace"),
                "inverse_soft_count": lambda x, k=counts: khot.inverse_soft_count(x, k, cdf="laplace"),
            }
            yield [f"{(rows, n, m)}", *beside_sort(x, functions)]

    yield ["rows, n", "goal", "soft_rank", "soft_sort"], ranks()
    yield ["rows, n, m", "soft_count", "inverse_soft_count"], counts()


def permutahedron(run: Run, *shapes: tuple[int, int]) -> Iterator[Table]:
    """Ranks and sorting by projection beside torchsort and fast-soft-sort.

    khot.soft_rank and khot.soft_sort with method="projection", torchsort's on the same float32 rows, and
    fast-soft-sort's NumPy classes with Numba, which take one float64 row at a time. The scores are normal.
    For each operator, the first τ makes a row one block or few, and the second one blocks of a few entries.
    Times: forward / forward + backward. Errors: of the first row, of the values / of the gradient that
    belongs to a fixed normal one, relative to the largest entry, against pooling in 80-bit floats.

    torchsort is on the package index; of fast-soft-sort, which is not, a checkout has to be on PYTHONPATH
    (with `np.int`, which NumPy has removed, replaced by `int`). A peer that is not there has no columns. The
    temperature of its soft_sort takes no part for "kl".
    """
    modules = {"torchsort": "torchsort", "fast-soft-sort": "fast_soft_sort"}
    peers = [name for name, module in modules.items() if importlib.util.find_spec(module)]

    def value_and_gradient(operator: Function, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        leaf = x.clone().requires_grad_()
        y = operator(leaf)
        return y.detach(), torch.autograd.grad(y, leaf, v)[0]

    def error(got: tuple[Any, Any], want: list[np.ndarray]) -> str:
        pairs = [(np.asarray(a[0]).astype(rivals.Long), b) for a, b in zip(got, want, strict=True)]
        return " / ".join(f"{np.abs(a - b).max() / np.abs(b).max():.0e}" for a, b in pairs)

    def row(shape: tuple[int, int], name: str, kind: str, tau: float) -> list[str]:
        x, v = normal(2, *shape)
        x64, v64 = x.double().numpy(), v.double().numpy()
        want = rivals.pooled(name, kind, tau, x64[0], v64[0])
        functions = {"khot": partial(getattr(khot, name), method="projection", regularization=kind, tau=tau)}
        if "torchsort" in peers:
            theirs = getattr(importlib.import_module("torchsort"), name)
            functions["torchsort"] = partial(theirs, regularization=kind, regularization_strength=tau)
        errors = [
            error(value_and_gradient(function, x.to(dtype), v.to(dtype)), want)
            for dtype in (torch.float32, torch.float64)
            for function in functions.values()
        ]
        forward: dict[str, timing.Call] = {who: partial(f, x) for who, f in functions.items()}
        whole: dict[str, timing.Call] = {
            who: partial(value_and_gradient, f, x, v) for who, f in functions.items()
        }
        if "fast-soft-sort" in peers:
            errors.append("")
            if name == "soft_rank" or kind == "l2":
                rows = rivals.FastSoftSort(name, kind, tau)
                errors[-1] = error(rows.both(x64, v64), want)
                forward["fast-soft-sort"] = partial(rows.forward, x64)
                whole["fast-soft-sort"] = partial(rows.both, x64, v64)
        times = [run(forward), run(whole)]
        beside = [ratios(times, who, "khot") if who in forward else "" for who in peers]
        ours = " / ".join(f"{1e3 * t['khot']:.2f}" for t in times)
        return [f"{shape}", f"{name}, {kind}", f"{tau:g}", ours, *beside, *errors]

    def rows() -> Iterator[list[str]]:
        for shape in shapes:
            n = shape[1]
            for name, taus in {"soft_rank": (1.0, 2 / n), "soft_sort": (10.0 * n, n / 2)}.items():
                yield from (row(shape, name, kind, tau) for kind in ("l2", "kl") for tau in taus)

    head = ["rows, n", "operator", "τ", "khot, ms", *(f"{name} : khot" for name in peers)]
    compared = ["khot", *(name for name in peers if name == "torchsort")]
    head += [f"error, {bits}: {name}" for bits in ("float32", "float64") for name in compared]
    yield head + ["error, float64: fast-soft-sort"] * ("fast-soft-sort" in peers), rows()


def transport(run: Run, *shapes: tuple[int, int, int]) -> Iterator[Table]:
    """The sorted SOFT top-k beside 200 Sinkhorn sweeps.

    Times are forward / forward + backward, in float64. The sweeps come in logarithms and in plain numbers,
    which are faster and underflow; their backward pass is the closed form of Xie et al. 2020, algorithm 4.
    What is left of accuracy shows in the row sums, which should be 1.
    """

    def row(rows: int, n: int, k: int, epsilon: float) -> list[str]:
        x = normal(rows, n, dtype=torch.float64)
        forms: dict[str, Function] = {
            "khot": lambda x: khot.sorted_soft_topk(x, k, epsilon=epsilon),
            "log": lambda x: rivals.ClosedForm.apply(x, k, epsilon, rivals.log_sweeps, 200),
            "plain": lambda x: rivals.ClosedForm.apply(x, k, epsilon, rivals.plain_sweeps, 200),
        }
        times = run.both({name: (form, x) for name, form in forms.items()})
        off = [f"{(form(x).sum(-1) - 1).abs().max():.0e}" for form in forms.values()]
        sweeps = [ratios(times, name, "khot") for name in ("log", "plain")]
        return [
            f"({rows}, {n})",
            f"{k}",
            f"{epsilon}",
            milliseconds(*(t["khot"] for t in times)),
            *sweeps,
            *off,
        ]

    head = ["rows, n", "k", "ε", "khot, ms", "log sweeps : khot", "plain sweeps : khot"]
    head += ["row sums off by: khot", "log", "plain"]
    yield head, (row(*shape, epsilon) for shape in shapes for epsilon in (0.01, 0.1, 1.0))


def assign(run: Run, *shapes: tuple[int, int]) -> Iterator[Table]:
    """The two-sided assignment beside Sinkhorn's sweeps at equal error.

    khot.soft_assign beside the sweeps of POT (`ot.sinkhorn` on NumPy arrays, in plain numbers and in
    logarithms), for float64 scores (normal, sd 1), with rows of sum 1 and columns of equal sums. The
    regularisers differ: Sinkhorn's is the entropy of y, khot's that of y and of 1 − y. So both are compared
    at the same error: for each, the temperature is sought at which Σ x y is 0.02 % below the optimum of the
    linear programme (`ot.emd`), with the sums of the columns right to a relative 1e-6. Sinkhorn's `stopThr`
    is tightened until they are. `at_most` has a tenth more room than it needs. The warm start is the solution
    plus noise of 0.1 τ. The steps are those of Newton's method, in part on some of the rows or in float32.
    """
    import ot

    goal, sums, methods = 2e-4, 1e-6, ("sinkhorn", "sinkhorn_log")

    def temperature(gap: Callable[[float], float]) -> float:
        """Where the gap, which grows with the temperature, is the goal, by bisection of its logarithm."""
        low, high = 0.002, 0.1
        for _ in range(8):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if gap(middle) < goal else (low, middle)
        return low

    def off(y: Any) -> float:
        """By how much the sum of a column or of a row is off, relative."""
        m, width = y.shape
        return max(float(abs(y.sum(0) * width / m - 1).max()), float(abs(y.sum(1) - 1).max()))

    def row(m: int, width: int) -> list[str]:
        x = normal(m, width, dtype=torch.float64)
        scores = x.numpy()
        best = ot.emd(np.ones(m), np.full(width, m / width), -scores, numItermax=10**7)
        best = float((scores * best).sum())

        def gap(y: Any) -> float:
            return 1 - float((x * torch.as_tensor(y)).sum()) / best

        stop = 1e-6
        epsilon = temperature(lambda e: gap(rivals.pot_sweeps(scores, e, "sinkhorn", stop)[0]))
        while off(rivals.pot_sweeps(scores, epsilon, "sinkhorn", stop)[0]) > sums:
            stop /= 1.5
        plan, count = rivals.pot_sweeps(scores, epsilon, "sinkhorn", stop)
        tau = temperature(lambda tau: gap(khot.soft_assign(x, 1, tau=tau)))
        y, bias = khot.soft_assign(x, 1, tau=tau, return_bias=True)
        right(max(gap(y), gap(plan)) <= goal * 1.01 and off(y) <= sums, f"{(m, width)} is wrong")
        ours = partial(khot.soft_assign, x, tau=tau)
        calls: dict[str, timing.Call] = {
            "khot": partial(ours, k=1),
            **{name: partial(rivals.pot_sweeps, scores, epsilon, name, stop) for name in methods},
            "two": partial(ours, k=2),
            "at_most": partial(ours, 1, 1.1 * m / width, at_most=True),
            "warm": partial(ours, k=1, bias=bias + 0.1 * tau * normal(width, seed=1)),
        }
        t = run(calls)
        steps = ", ".join(f"{newton_steps(calls[c])} {w}" for c, w in (("khot", "cold"), ("warm", "warm")))
        return [
            f"{m:,} x {width}", f"{tau:.4f} : {epsilon:.4f}", milliseconds(t["khot"]),
            *(report.ratio(t[name] / t["khot"]) for name in methods), f"{off(y):.0e}", f"{off(plan):.0e}",
            f"{count}", steps, *(milliseconds(t[name]) for name in ("two", "at_most", "warm")),
        ]  # fmt: skip

    head = ["shape", "τ : ε", "khot, ms", *(f"{name} : khot" for name in methods), "sums off by: khot"]
    head += ["sinkhorn", "sweeps", "Newton steps", "khot k = 2, ms", "at_most, ms", "warm start, ms"]
    yield head, (row(*shape) for shape in shapes)


def newton_steps(call: timing.Call) -> int:
    """The linear systems solved in a call."""
    count, solves = 0, {name: getattr(torch.linalg, name) for name in ("solve", "solve_ex")}

    def counted(solve: Callable[..., Any], *args: Any) -> Any:
        nonlocal count
        count += 1
        return solve(*args)

    try:
        for name, solve in solves.items():
            setattr(torch.linalg, name, partial(counted, solve))
        call()
    finally:
        for name, solve in solves.items():
            setattr(torch.linalg, name, solve)
    return count


# --------------------------------------------------------------------------------------- sampling


def sampling(run: Run, *shapes: tuple[int, int, int]) -> Iterator[Table]:
    """What a k-hot draw costs beside torch.topk.

    One draw of every design for each row of σ_k(scores), as a ratio to torch.topk on the same scores.
    """
    goals = {"pareto": "3.5", "pivotal": "4.0", "random_pivotal": "2.0"}
    goals |= dict.fromkeys(("conditional_poisson", "sampford", "pareto, exact"), "8.0")

    def check(name: str, probs: Tensor, k: int, draw: Function) -> None:
        """Sizes are k, and units of a few short rows are selected as often as they should be: within 6
        standard deviations of 2,000 draws, which is 1e-5 for 5,000 units."""
        right((draw(probs[:4]).sum(-1) == k).all(), f"{name} at {tuple(probs.shape)} draws the wrong size")
        short = khot.sigmoid_topk(spread_normal(5, 100, generator()).double(), 10)
        error = (draw(short.expand(2_000, 5, 100)).double().mean(0) - short).abs()
        bound = 6 * (short * (1 - short) / 2_000).sqrt() + 36 / 2_000
        right((error <= bound).all(), f"{name} has the wrong inclusion probabilities")

    columns = {}
    for rows, n, k in shapes:
        x = spread_normal(rows, n, generator())
        probs = khot.sigmoid_topk(x, k)
        draws = {
            name: partial(sample, design=name) for name, d in designs.items() if d.fixed_size and d.close
        }
        draws["pareto, exact"] = partial(sample, adjust="exact")
        if n > 1_000:
            del draws["brewer"]  # O(nk)
        for name, draw in draws.items():
            check(name, probs, k, draw)
        times = run(
            {
                "torch.topk": partial(torch.topk, x, k),
                **{n: partial(draw, probs) for n, draw in draws.items()},
            }
            | {"gumbel_topk": partial(gumbel_topk, x, k)}
        )
        columns[f"{(rows, n)}"] = {name: report.ratio(t / times["torch.topk"]) for name, t in times.items()}
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    yield across("one draw, in torch.topk", names, {"goal": goals, **columns})


def simple(run: Run, *sizes: int) -> Iterator[Table]:
    """Algorithm 1 beside SIMPLE (Figure 6, right, of sigmoid-topk): time and memory.

    One k-hot sample of each of 32 rows with its gradient, k = n/10. khot's own `simple` has the distribution
    and the gradient of SIMPLE in O(n).
    """
    x, weight = normal(4, sizes[0]).double().requires_grad_(), torch.linspace(-1, 1, sizes[0]).double()
    drawn = rivals.simple(x, sizes[0] // 10)
    (got,) = torch.autograd.grad((drawn * weight).sum(), x)
    (want,) = torch.autograd.grad((poisson.marginals(x, sizes[0] // 10) * weight).sum(), x)
    agrees = bool((drawn.sum(-1).round() == sizes[0] // 10).all()) and torch.allclose(got, want, atol=1e-8)
    right(agrees, "SIMPLE's programme is wrong")

    def both(draw: Function, logits: Tensor) -> Tensor:
        """The gradient of a weighted sum of one sample of each row."""
        leaf = logits.detach().requires_grad_()
        return torch.autograd.grad((draw(leaf) * torch.arange(float(leaf.shape[-1]))).sum(), leaf)[0]

    draws: dict[str, Callable[..., Tensor]] = {
        "Algorithm 1 (straight_through, pareto)": estimators.straight_through,
        "khot.estimators.simple": estimators.simple,
        "SIMPLE, by dynamic programming": rivals.simple,
    }
    calls = {
        n: {name: partial(both, partial(f, k=n // 10), normal(32, n)) for name, f in draws.items()}
        for n in sizes
    }
    ours, *others = names = list(draws)
    # memory comes first: a process that has timed keeps the memory that it frees
    memory = {n: {name: report.peak_memory(call) for name, call in calls[n].items()} for n in sizes}
    times = {n: run(calls[n]) for n in sizes}
    title = "forward and backward, 32 rows, k = n/10"
    columns = {
        f"n = {n:,}": {
            ours: f"{milliseconds(t[ours])} ms",
            **{o: report.ratio(t[o] / t[ours]) for o in others},
        }
        for n, t in times.items()
    }
    yield across(f"{title}, in Algorithm 1", names, columns)
    grown = {f"n = {n:,}": {m: report.megabytes(b) for m, b in found.items()} for n, found in memory.items()}
    yield across(f"{title}, MB", names, grown)
    panels: dict[str, report.Curves] = {
        f"seconds: {title}": {name: [(n, times[n][name]) for n in sizes] for name in names},
        "memory, MB": {name: [(n, (memory[n][name] or 0) / 1e6) for n in sizes] for name in names},
    }
    report.loglog(run.out.with_suffix(".png"), panels, "n", names[:2])


def conditional_poisson(run: Run, *cases: tuple[int, int, Any]) -> Iterator[Table]:
    """What conditional Poisson sampling costs.

    log_prob beside the log-domain dynamic programme that it replaces, marginals with gradients beside
    log_prob (cases with a goal; k = n/2); exact draws beside pareto's, which are one torch.topk (cases with
    k); and log_prob from n = 10^3 to 10^6.
    """

    def given(rows: int, n: int, k: int) -> tuple[Tensor, Tensor, int]:
        spread = torch.linspace(0.3, 3, rows, dtype=torch.float64).unsqueeze(-1)
        hot = khot.topk_mask(torch.rand(rows, n, generator=generator(1)), k).double()
        return hot, normal(rows, n, dtype=torch.float64) * spread, k

    def programme(rows: int, n: int, goal: float) -> list[str]:
        value, theta, k = given(rows, n, n // 2)
        new, old = (partial(f, value, theta, k) for f in (poisson.log_prob, rivals.log_prob_by_programme))
        right(torch.allclose(new(), old(), rtol=1e-10, atol=1e-10), f"the normalizers differ at {(rows, n)}")
        gradients = timing.forward_backward(partial(poisson.marginals, k=k), theta)
        t = run({"old": old, "new": new, "both": gradients})
        times = f"{t['old'] / t['new']:.3g} (≥ {goal:g})", f"{t['both'] / t['new']:.2f} (≤ 4)"
        return [f"{(rows, n)}, k = {k}", f"{milliseconds(t['new'])} ms", *times]

    def pareto(rows: int, n: int, k: int) -> list[str]:
        _, theta, _ = given(rows, n, k)
        calls: dict[str, timing.Call] = {
            "draw": partial(poisson.sample, theta, k),
            "pareto": partial(sample, khot.sigmoid_topk(theta, k)),
            "topk": partial(torch.topk, theta, k),
        }
        t = run(calls)
        times = f"{t['draw'] / t['pareto']:.1f} (≤ 20)", f"{t['draw'] / t['topk']:.1f}"
        return [f"{(rows, n)}, k = {k}", f"{milliseconds(t['draw'])} ms", *times]

    def by_size(most: int) -> Iterator[list[str]]:
        ours, theirs = "conditional_poisson.log_prob", "dynamic programme, O(nk)"
        curves: dict[str, list[tuple[float, float]]] = {ours: [], theirs: []}
        for n in (n for n in (1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000) if n <= most):
            arguments = given(1, n, n // 2)
            calls = {ours: partial(poisson.log_prob, *arguments)}
            if n <= 10_000:
                calls[theirs] = partial(rivals.log_prob_by_programme, *arguments)
            times = run(calls)
            for name, t in times.items():
                curves[name].append((n, t))
            yield [f"{n:,}", f"{milliseconds(times[ours])} ms", f"{times[ours] / n * 1e9:.0f} ns"]
        title = "log p of one k-hot vector, k = n/2: seconds"
        report.loglog(run.out.with_suffix(".png"), {title: curves}, "n", [ours])

    head = ["shape", "log_prob", "dynamic programme, in log_prob", "marginals with gradients, in log_prob"]
    yield head, (programme(*case) for case in cases if isinstance(case[2], float))
    draws = [case for case in cases if isinstance(case[2], int)]
    yield ["shape", "exact draw", "in pareto", "in torch.topk"], (pareto(*case) for case in draws)
    yield ["n", "log_prob", "a unit"], by_size(max(n for _, n, _ in cases))


# ---------------------------------------------------------------------------------- other subjects


def packages(run: Run, *cases: tuple[int, int, int]) -> Iterator[Table]:
    """Packages that choose k of n, beside khot.sigmoid_topk.

    Those of the peers in :mod:`reproduce.tasks.peers` that are packages, where they are installed. They
    compute different functions, which the last columns tell apart: the largest error of the sum of a row, and
    the largest weight.
    """
    installed = {name: peer for name, peer in PEERS.items() if peer.needs and not missing(peer)}
    times, sums = {}, {}
    for rows, n, k in cases:
        fitting = {name: peer for name, peer in installed.items() if peer.fits(rows, n, k)}
        calls: dict[str, Function] = {"khot": partial(khot.sigmoid_topk, k=k)}
        calls |= {name: lambda x, call=p.call, k=k: call(x, k, 1.0) for name, p in fitting.items()}
        x = spread_normal(rows, n, generator())
        both = run.both({name: (call, x) for name, call in calls.items()})
        times[f"{(rows, n)}, k = {k}"] = {
            name: ratios(both, name, "khot") if name in calls else "too large" for name in installed
        }
        weights = {
            name: f(x).detach().double()
            for name, f in calls.items()
            if name == "khot" or not PEERS[name].ranks
        }
        sums[f"{(rows, n)}"] = dict.fromkeys(calls, "–") | {
            name: f"{(y.sum(-1) - k).abs().max():.0e}, {y.max():.2f}" for name, y in weights.items()
        }
    yield across("forward / forward + backward, in khot.sigmoid_topk", installed, times)
    yield across("largest error of a sum, largest weight", ["khot", *installed], sums)


def attention(run: Run, *lengths: int) -> Iterator[Table]:
    """Attention to the k best of many keys beside dense attention: time and memory.

    One head of 64 entries in float32, as many queries as keys, k = 32. khot.nn.topk_attention, soft, soft
    among candidates and hard, beside what one would write by hand, torch's scaled_dot_product_attention with
    a mask of each query's k best keys, and beside plain attention without a selection. Peaks of memory are
    beyond the arguments. Each cell: forward / forward + backward.
    """
    ours = khot.nn.topk_attention
    calls: dict[str, Callable[..., Tensor]] = {
        "topk_attention": partial(ours, top_k=32, tau=0.1),
        "topk_attention, 128 candidates": partial(ours, top_k=32, tau=0.1, candidates=128),
        "topk_attention, hard": partial(ours, top_k=32, hard=True),
        "by hand: topk, mask, attention": partial(rivals.masked_attention, top_k=32),
        "attention to all keys": F.scaled_dot_product_attention,
    }
    for length in lengths:
        q, k, v = normal(3, 1, length, 64)
        hard, hand = (calls[name](q, k, v) for name in list(calls)[2:4])
        right(torch.allclose(hard, hand, rtol=0, atol=1e-5), "hard and by hand disagree")
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]

        def both(f: Callable[..., Tensor], leaves: list[Tensor] = leaves) -> Any:
            return torch.autograd.grad(f(*leaves).sum(), leaves)

        forward: dict[str, timing.Call] = {name: partial(f, q, k, v) for name, f in calls.items()}
        whole: dict[str, timing.Call] = {name: partial(both, f) for name, f in calls.items()}
        times = [run(each, rounds=5) for each in (forward, whole)]
        memory = [{n: timing.peak_memory(call) or 0 for n, call in each.items()} for each in (forward, whole)]
        cells = {
            "seconds": {name: " / ".join(f"{t[name]:.1f}" for t in times) for name in calls},
            "peak memory, MiB": {
                name: " / ".join(f"{m[name] / 2**20:,.0f}" for m in memory) for name in calls
            },
        }
        yield across(f"{length:,} queries and keys", calls, cells)


def reference_calls(k: int) -> dict[str, Function]:
    named = ("sigmoid_topk", "laplace_topk", "sparse_topk", "log_soft_topk", "topk_mask", "sample_khot")
    return {
        "softmax": lambda x: torch.softmax(x, -1),
        **{name: partial(getattr(khot, name), k=k) for name in named[:3]},
        "soft_topk, normal": partial(khot.soft_topk, k=k, cdf="normal"),
        **{name: partial(getattr(khot, name), k=k) for name in named[3:5]},
        "soft_rank": khot.soft_rank,
        "sample_khot": partial(khot.sample_khot, k=k),
    }


def reference_times(
    seconds: float, wall: bool, out: Path, shapes: Sequence[tuple[int, int]]
) -> list[list[Times]]:
    run, found = Run(seconds, timing.clock(not wall), out), []
    for shape in shapes:
        x, calls = spread_normal(*shape, generator()), reference_calls(shape[1] // 8)
        forward, _ = run({name: partial(f, x) for name, f in calls.items()}), calls.pop("topk_mask")
        found.append([forward, run({name: timing.forward_backward(f, x) for name, f in calls.items()})])
    return found


def reference(run: Run, *shapes: tuple[int, int]) -> Iterator[Table]:
    """What a pure build costs: the reference kernels beside the compiled ones.

    The same calls with both, each in a process of its own beside torch.softmax of the same tensor: forward /
    forward + backward, in softmaxes, and how many times as long the reference takes.
    """

    def times(kernels: str) -> list[list[Times]]:
        before = os.environ.get("KHOT_KERNELS")
        os.environ["KHOT_KERNELS"] = kernels  # which the process reads when it imports khot
        try:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                wall = run.clock is timing.clock(False)
                return pool.apply(reference_times, (run.seconds, wall, run.out, shapes))
        finally:
            del os.environ["KHOT_KERNELS"]
            os.environ |= {} if before is None else {"KHOT_KERNELS": before}

    found, names = (
        {kernels: times(kernels) for kernels in ("compiled", "reference")},
        list(reference_calls(8))[1:],
    )

    def table(title: str, mine: list[list[Times]], units: list[list[Times]], unit: str = "") -> Table:
        def cell(t: list[Times], u: list[Times], name: str) -> str:
            pairs = zip(t, u, strict=True)
            return " / ".join(report.ratio(a[name] / b[unit or name]) if name in a else "–" for a, b in pairs)

        columns = {
            f"({rows:,}, {n:,})": {f"`{name}`": cell(t, u, name) for name in names}
            for (rows, n), t, u in zip(shapes, mine, units, strict=True)
        }
        return across(f"{title}, forward / forward + backward", [f"`{name}`" for name in names], columns)

    slow, fast = found["reference"], found["compiled"]
    yield table("reference, in times of the compiled kernels", slow, fast)
    yield table("reference, in softmaxes", slow, slow, "softmax")
    yield table("compiled, in softmaxes", fast, fast, "softmax")


def half(function: Callable[..., Tensor]) -> Function:
    return lambda x: function(x, x.shape[-1] // 2)


# a function of a row, and the largest n for which it is called: within a minute and 2 GB
LONGEST = 1 << 20
TOPK: dict[str, tuple[Function, int]] = {
    "laplace_topk": (half(khot.laplace_topk), LONGEST),
    "sigmoid_topk": (half(khot.sigmoid_topk), LONGEST),
    "sparse_topk": (half(khot.sparse_topk), LONGEST),
    "rescaled sigmoid": (half(baselines.rescaled_sigmoid_topk), LONGEST),
    "Sinkhorn": (half(baselines.sinkhorn_topk), LONGEST),
    "Dykstra": (half(baselines.dykstra_topk), LONGEST),
    "PAV": (half(baselines.pav_topk), LONGEST),
    "sequential softmax": (half(baselines.sequential_softmax_topk), 4096),
    "softmax k times": (half(baselines.masked_softmax_topk), 4096),
    "SoftSort": (half(baselines.softsort_topk), 4096),
    "NeuralSort": (half(baselines.neuralsort_topk), 4096),
}
SORTS: dict[str, tuple[Function, int]] = {
    "soft_sort *": (khot.soft_sort, LONGEST),
    "permutation_cross_entropy *": (
        lambda x: khot.losses.permutation_cross_entropy(x, x.detach().argsort(-1)), LONGEST,
    ),
    "soft_permutation": (khot.soft_permutation, 4096),
    "SoftSort": (baselines.softsort_permutation, 4096),
    "NeuralSort": (baselines.neuralsort_permutation, 4096),
    "sorted Sinkhorn, k = n/2": (half(baselines.sorted_sinkhorn_topk), 1024),
}  # fmt: skip


def memory(run: Run, *sizes: int) -> Iterator[Table]:
    """The memory of forward + backward against n (lapsum, appendix F).

    The largest growth of the process in MB, for one row of normal scores in float32: soft top-k with k = n/2
    beside the methods of khot.baselines (lapsum's Figures 10 and 11), and soft permutations beside the other
    relaxed sorts, with their times and a plot of both (Figure 14). The calls of khot marked * need no
    matrix of places by entries. A cell is empty where a call would take more than a minute or 2 GB.
    """
    for cases, total in ((TOPK, 32), (SORTS, 1)):  # a selection sums to k, or to 1 for each place
        for name, (call, _) in cases.items():
            off = (call(normal(64)).detach().double().sum(-1) / total - 1).abs().max()
            right(name.endswith("*") or off <= 1e-3, f"{name} does not sum to {total}")

    def passes(cases: dict[str, tuple[Function, int]], n: int) -> dict[str, timing.Call]:
        return {
            name: timing.forward_backward(call, normal(n))
            for name, (call, most) in cases.items()
            if n <= most
        }

    found: dict[int, dict[str, int | None]] = {}
    for title, cases in (("soft top-k, k = n/2", TOPK), ("soft permutations and sorts", SORTS)):
        found = {n: {m: report.peak_memory(call) for m, call in passes(cases, n).items()} for n in sizes}
        columns = {
            f"n = {n:,}": {m: report.megabytes(b) for m, b in each.items()} for n, each in found.items()
        }
        yield across(f"{title}, MB", cases, columns)
    times = {n: run(passes(SORTS, n)) for n in sizes}
    columns = {f"n = {n:,}": {name: milliseconds(t) for name, t in each.items()} for n, each in times.items()}
    yield across("soft permutations and sorts, ms", SORTS, columns)
    panels: dict[str, report.Curves] = {
        "memory, MB: forward + backward of one row": {
            name: [(n, size / 1e6) for n, each in found.items() if (size := each.get(name))] for name in SORTS
        },
        "CPU time, s": {name: [(n, t[name]) for n, t in times.items() if name in t] for name in SORTS},
    }
    report.loglog(run.out.with_suffix(".png"), panels, "n", [name for name in SORTS if name.endswith("*")])


KINDS: dict[str, Function] = {
    "normal": lambda x: x,
    "ascending": lambda x: x.sort(-1).values,
    "descending": lambda x: x.sort(-1, descending=True).values,
    "ties": lambda x: (2 * x).round(),
    "equal": torch.ones_like,
    "periodic": lambda x: (torch.arange(x.shape[-1]) % 64).float().expand_as(x).contiguous(),
    "Cauchy": lambda x: torch.tan(1.57 * torch.erf(x / 2**0.5)),
    "infinite": lambda x: x.where(x < 1, torch.inf).where(x > -1, -torch.inf),
}


def selected(run: Run, *cases: tuple[str, Any, Any, Any, int]) -> Iterator[Table]:
    """Selecting the k largest, and summing what was selected.

    In float32: khot.topk beside torch.topk (not sorted) and softmax, on rows of several kinds, and a plot of
    it against n; hard masks and the k-th largest entry; khot.linear_topk, and a step of TopKSAE with the mean
    squared error and with its own loss, beside one that is written by hand with torch.topk and a dense code;
    topk_attention, hard and among 4 k candidates, forward and forward + backward; SoftKNN's predict, and a
    step among 4 k candidates and among all templates.
    """
    tau = 0.1

    def of(kind: str) -> Iterator[Any]:
        return (case[1:] for case in cases if case[0] == kind)

    def beside(calls: Mapping[str, timing.Call], unit: str, rounds: int = 300) -> list[str]:
        t = run(calls, rounds)
        return [report.ratio(t[name] / t[unit]) for name in calls if name != unit]

    def topks(x: Tensor, k: int) -> dict[str, timing.Call]:
        values, indices = khot.topk(x, k)
        agrees = torch.equal(values, x.topk(k).values) and torch.equal(x.gather(-1, indices), values)
        right(agrees, f"khot.topk differs from torch.topk for {tuple(x.shape)}, k = {k}")
        return {
            "khot.topk": partial(khot.topk, x, k, sorted=False),
            "torch.topk": partial(torch.topk, x, k, sorted=False),
            "softmax": partial(torch.softmax, x, -1),
        }

    def rows() -> Iterator[list[str]]:
        for count, n, k in of("rows"):
            found = [run(topks(kind(normal(count, n)), k)) for kind in KINDS.values()]
            softmaxes = report.ratio(max(t["khot.topk"] / t["softmax"] for t in found))
            ratios = (report.ratio(t["torch.topk"] / t["khot.topk"]) for t in found)
            yield [f"({count:,}, {n:,}), k = {k}", softmaxes, *ratios]

    def masks() -> Iterator[list[str]]:
        for count, n, k in of("rows"):
            x = normal(count, n)
            calls = {"softmax": partial(torch.softmax, x, -1), "mask": partial(khot.topk_mask, x, k)}
            cells = beside({**calls, "k-th": partial(khot.kth_value, x, k)}, "softmax")
            yield [f"({count:,}, {n:,}), k = {k}", *cells]

    def steps() -> Iterator[list[str]]:
        for batch, size, latents, k in of("layer"):
            torch.manual_seed(0)
            sae, x = khot.nn.TopKSAE(size, latents, k), torch.randn(batch, size)
            own = F.mse_loss(sae(x), x)  # which sets the bias
            names = ("encoder", "encoder_bias", "decoder", "bias")
            hand = [getattr(sae, name).detach().clone().requires_grad_() for name in names]

            def by_hand(x: Tensor = x, hand: list[Tensor] = hand, k: int = k) -> Tensor:
                encoder, encoder_bias, decoder, bias = hand
                a = F.linear(x - bias, encoder, encoder_bias).relu()
                best = a.topk(k, sorted=False)
                code = torch.zeros_like(a).scatter(-1, best.indices, best.values)
                return F.mse_loss(F.linear(code, decoder.mT, bias), x)

            right(torch.allclose(own, by_hand(), rtol=1e-4, atol=1e-5), "the code by hand is another")
            ours, weight = list(sae.parameters()), sae.encoder.detach()
            calls: dict[str, timing.Call] = {
                "product": lambda x=x, w=weight: x @ w.mT,
                "choice": partial(khot.linear_topk, x, weight, k),
                "error": lambda sae=sae, x=x, p=ours: torch.autograd.grad(F.mse_loss(sae(x), x), p),
                "loss": lambda sae=sae, x=x, p=ours: torch.autograd.grad(sae.loss(x), p),
                "by hand": lambda f=by_hand, p=hand: torch.autograd.grad(f(), p),
            }
            yield [f"({batch:,}, {size} → {latents:,}), k = {k}", *beside(calls, "product")]

    def attentions() -> Iterator[list[str]]:
        for heads, length, size, k in of("heads"):
            # with a batch dim: without one, torch's attention took five times as long
            given = [x.clone().requires_grad_() for x in normal(3, 1, heads, length, size)]
            ways: dict[str, Callable[..., Tensor]] = {
                "dense": F.scaled_dot_product_attention,
                "hard": partial(khot.nn.topk_attention, top_k=k, hard=True),
                "candidates": partial(khot.nn.topk_attention, top_k=k, tau=tau, candidates=4 * k),
            }
            forward = {n: partial(f, *(x.detach() for x in given)) for n, f in ways.items()}
            both = {n: lambda f=f, x=given: torch.autograd.grad(f(*x).sum(), x) for n, f in ways.items()}
            cells = (cell for calls in (forward, both) for cell in beside(calls, "dense"))
            yield [f"{heads} heads of {size}, {length:,} keys, k = {k}", *cells]

    def neighbours() -> Iterator[list[str]]:
        for queries, templates, size, k in of("neighbours"):
            leaves = [normal(count, size, seed=count).requires_grad_() for count in (queries, templates)]
            q, t = (x.detach() for x in leaves)
            asked, label = (torch.randint(10, (len(x),), generator=generator()) for x in leaves)
            every, among = (khot.nn.SoftKNN(k, 10, tau=tau, candidates=m) for m in (None, 4 * k))

            def step(knn: Any, x: Any = leaves, asked: Tensor = asked, label: Tensor = label) -> object:
                return torch.autograd.grad(knn.loss(x[0], asked, x[1], label), x)

            calls: dict[str, timing.Call] = {
                "product": lambda q=q, t=t: q @ t.mT,
                "predict": partial(every.predict, q, t, label),
                "candidates": partial(step, among),
                "all": partial(step, every),
            }
            cells = beside(calls, "product")
            yield [f"{queries:,} of {templates:,} × {size}, k = {k}", *cells]

    yield ["topk: softmaxes at most; times as fast as torch.topk", "softmaxes", *KINDS], rows()
    yield ["masks and order statistics, in softmaxes", "mask", "k-th"], masks()
    yield ["a training step, in products of the encoder", "linear_topk", "error", "loss", "by hand"], steps()
    head = ["hard", f"candidates, τ = {tau}", "hard, both", "candidates, both"]
    yield ["attention, in dense attention", *head], attentions()
    head = ["nearest neighbours, in products with templates", "predict", "step, candidates", "step, all"]
    yield head, neighbours()
    curves: dict[str, list[tuple[float, float]]] = {}
    longest = max(n for _, n, _ in of("rows"))
    for n in (1 << i for i in range(6, 21, 2) if 1 << i <= 16 * longest):
        x = normal(max(1, (1 << 18) // n), n)
        for name, seconds in run(topks(x, max(1, min(64, n // 64)))).items():
            curves.setdefault(name, []).append((n, 1e9 * seconds / x.numel()))
    title = "ns an entry: the n/64 largest of n, at most 64, one CPU thread"
    published = Path(__file__).parents[1] / "docs" / "figures" / "topk.png"
    path = published if run.out.parent == RESULTS else run.out.with_suffix(".png")
    report.loglog(path, {title: curves}, "n", ["khot.topk"])


# ------------------------------------------------------------------------------------------- main


class Subject(NamedTuple):
    tables: Callable[..., Iterator[Table]]
    cases: tuple[Any, ...]
    seconds: float = 1.0  # for each call
    beside: tuple[str, ...] = ()  # packages, whose versions are told

    @property
    def title(self) -> str:
        return (self.tables.__doc__ or "").partition(".\n")[0]


SUBJECTS = {
    s.tables.__name__: s
    for s in (
        Subject(assign, ((1024, 16), (1024, 64), (4096, 64)), 2.0, ("POT",)),
        Subject(attention, (16_384,)),
        Subject(budget, ((4096, 64), (128, 1000), (100, 10_000), (100, 100_000), (16, 1_000_000))),
        Subject(
            calls,
            ((4096, 64, 8), (128, 1000, 100), (100, 10_000, 1000), (512, 4096, 64), (16_384, 8, 2)),
            0.3,
        ),
        Subject(
            conditional_poisson,
            (
                (128, 1_000, 3.0),
                (1, 10_000, 20.0),
                (128, 1_000, 100),
                (100, 10_000, 1_000),
                (1, 1_000_000, 500_000),
            ),
        ),
        Subject(long_lists, (300, 1_000, 4_000)),
        Subject(memory, (256, 1024, 4096, 65_536, LONGEST), 0.3),
        Subject(packages, ((64, 64, 8), (4_096, 64, 8), (128, 1_000, 100)), 0.3, ("entmax", "softtorch")),
        Subject(packed, tuple(LENGTHS)),
        Subject(permutahedron, ((100, 1_000), (16, 100_000)), beside=("torchsort",)),
        Subject(quantile, (*((10**i,) for i in (3, 4, 5, 6, 7, 8)), (64,), (4096, 64), (128, 1000)), 2.0),
        Subject(
            ranking,
            (
                *((128, 1_000), (100, 10_000), (16, 1_000_000)),
                *((100, 1_000, 1_000), (100, 2_000, 2_000), (16, 100_000, 10_000), (16, 200_000, 20_000)),
            ),
            2.0,
        ),
        Subject(reference, ((4, 64), (4_096, 64), (128, 1_000), (100, 10_000), (100, 100_000)), 0.3),
        Subject(sampling, ((4_096, 8, 2), (128, 1_000, 100), (100, 10_000, 1_000))),
        Subject(
            selected,
            (
                *(("rows", *c) for c in ((1024, 1000, 10), (256, 8192, 32), (256, 8192, 256))),
                *(("rows", *c) for c in ((64, 65_536, 64), (1, 50_257, 50))),
                *(("layer", *c) for c in ((1024, 512, 16_384, 32), (512, 768, 65_536, 64))),
                ("layer", 256, 128, 512, 16),  # a batch, and the size of its inputs; latents; k
                *(("heads", *c) for c in ((4, 1024, 32, 32), (4, 8192, 32, 32), (4, 8192, 64, 64))),
                *(("neighbours", *c) for c in ((2000, 8192, 64, 9), (500, 60_000, 32, 9))),
            ),
        ),
        Subject(simple, (100, 200, 400, 800, 1_600), 0.3),
        Subject(transport, ((1, 10_000, 5), (16, 10_000, 5), (100, 1_000, 5), (4, 1_000, 64)), 2.0),
    )
}


def write(run: Run, command: str, subject: Subject, cases: Sequence[Any], wall: bool) -> None:
    """Measure the cases, and write what there is after each row."""
    installed = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    versions = {name: installed[name] for name in subject.beside if name in installed}
    setting = {**report.machine(cpu_time=not wall), **versions}
    text = f"`{command}`: all calls taking turns, medians.\n\n"
    text += report.said(setting)
    text += f"\nload: {os.getloadavg()[0]:.1f}\n"
    run.out.parent.mkdir(parents=True, exist_ok=True)
    for head, rows in subject.tables(run, *cases):
        done: list[Sequence[str]] = []
        for row in rows:
            done.append(row)
            run.out.write_text(f"{text}\n{report.table(head, done)}", encoding="utf-8")
            print(*row, sep=" | ", flush=True)
        text += f"\n{report.table(head, done)}"
    print(f"\n{text}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.times", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", choices=SUBJECTS, help="what is timed")
    parser.add_argument("--seconds", type=float, help="for each call")
    parser.add_argument("--first", type=int, help="only so many of the cases")
    parser.add_argument("--wall-time", action="store_true", help="of all threads, on an idle machine")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the tables")
    args = parser.parse_args(arguments)
    subject = SUBJECTS[args.name]
    seconds = subject.seconds if args.seconds is None else args.seconds
    command = f"python -m benchmarks.times {args.name} --seconds {seconds:g}{' --wall-time' * args.wall_time}"
    run = Run(seconds, timing.clock(not args.wall_time), args.out / f"{args.name}.md")
    write(run, command, subject, subject.cases[: args.first], args.wall_time)


if __name__ == "__main__":
    main()
