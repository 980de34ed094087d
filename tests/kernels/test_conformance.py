"""What every kernel of an operator on rows promises, whatever the operator: one table for all engines.

A kernel agrees with the reference kernel in float64 for rows of every kind; does not mind how its arguments
lie in memory, or that they are broadcast; rounds half precision once; answers a row that has no answer with
NaN, and no other; takes empty batches and empty rows; and gives the same bits in any number of threads. What
is special to an operator is tested in the file of its kernel. And every operator is what it is registered as.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Generator, Tensor

from khot import _kernels, cdfs
from khot._core.dispatch import OPERATORS
from khot._kernels import gpu

INF, NAN = math.inf, math.nan
#: All of them, as kernels know them.
CDFS = dict(
    (F(4 / 3) if F is cdfs.Power else F()).key
    for F in map(vars(cdfs).get, cdfs.__all__)
    if isinstance(F, type) and F is not cdfs.CDF
)
SEED = torch.tensor(-5)
EXACT = {torch.float64: 1e-11, torch.float32: 2e-5}
HALF = [torch.bfloat16, torch.float16]

Given = dict[str, Tensor]
Draw = Callable[[Generator, tuple[int, ...]], Tensor]
Engine = Callable[[str], Callable[..., Any]]


class Kernel(NamedTuple):
    """Operators that are called together: forward, and backward from what that has left.

    Args:
        operators: their names.
        call: the results of an engine for rows and numbers by name, in a fixed order.
        rows: how each argument that has entries is drawn.
        numbers: what each argument that has one number for a row is, by the row x.
        bad: for an argument, what no row is to have, in one entry or as its number.
        spoiled: the results that are NaN then; None for all with fractions.
        dtypes: of rows.
        kinds: the names in `KINDS` of the rows that it takes.
        exact: the error that is allowed, in units of 1 + the largest number of the row.
        through: whether the gradients are those at y as it was rounded.
        square: whether it costs n² a row, and needs one entry at least.
        long: the engines of long rows that it has.
    """

    operators: tuple[str, ...]
    call: Callable[[Engine, Given], tuple[Tensor, ...]]
    rows: dict[str, Draw]
    numbers: dict[str, Callable[[Tensor], Tensor]]
    bad: dict[str, tuple[float, ...]]
    spoiled: tuple[int, ...] | None = None
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32, *HALF)
    kinds: tuple[str, ...] = ("normal", "ties", "equal", "wide", "masked", "certain")
    exact: dict[torch.dtype, float] = EXACT
    square: bool = False
    through: bool = False
    long: tuple[str, ...] = ("split",)


# ------------------------------------------------------------------------------------------ arguments


def normal(g: Generator, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=g, dtype=torch.float64)


def price(g: Generator, shape: tuple[int, ...]) -> Tensor:
    return torch.rand(shape, generator=g, dtype=torch.float64) + 0.5


def costs(g: Generator, shape: tuple[int, ...]) -> Tensor:
    """Of which each part of a long row has its own size."""
    return price(g, shape) * 2.0 ** (torch.arange(shape[-1]) // 16)


def heavy(g: Generator, shape: tuple[int, ...]) -> Tensor:
    """Targets that sum to more than any k of :func:`counted`."""
    return 0.85 + 0.1 * torch.rand(shape, generator=g, dtype=torch.float64)


def shares(g: Generator, shape: tuple[int, ...]) -> Tensor:
    """Probabilities, of which every row has a whole sum where its length is even, and certain ones."""
    half = torch.rand(*shape[:-1], shape[-1] // 2, generator=g, dtype=torch.float64) * 0.9 + 0.05
    half[..., 1::8] = 0
    return torch.cat((half, 1 - half, torch.full((*shape[:-1], shape[-1] % 2), 0.3)), -1).double()


def logits(g: Generator, shape: tuple[int, ...]) -> Tensor:
    return torch.logit(shares(g, shape).clamp(0.01, 0.99))


def steps(g: Generator, shape: tuple[int, ...]) -> Tensor:
    """Scores in descending order, close to each other but for three."""
    x = -1 - 0.016 * torch.arange(shape[-1], dtype=torch.float64).repeat(*shape[:-1], 1)
    x[..., :1] = 0
    x[..., -2:-1] -= 2.5
    x[..., -1:] -= 6
    return x


def nearly_steps(g: Generator, shape: tuple[int, ...]) -> Tensor:
    """Less of :func:`steps` by almost the same everywhere, so that the means of blocks differ by little. They
    are in one segment, because the last difference is greater than all but the first one."""
    difference = 0.002 * normal(g, shape) - 1
    difference[..., :1] = 0
    difference[..., -2:-1] = -3
    difference[..., -1:] = 0.1
    return steps(g, shape) - difference


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "ties": lambda x: x.round(),
    "equal": lambda x: torch.full_like(x, 0.25),
    "wide": lambda x: 300 * x,
    "gaps": lambda x: 1e5 * x,  # which no exponential crosses
    "masked": lambda x: x.masked_fill(torch.arange(x.shape[-1]) % 3 == 2, -INF),
    "certain": lambda x: x.masked_fill(torch.arange(x.shape[-1]) % 16 == 5, INF),
}
PLAIN = ("normal", "ties", "equal", "wide")
#: The engines of long rows: programs share them, or they stream past one.
STREAMS = ("split", "streamed")


def counted(x: Tensor) -> Tensor:
    """A number k of what may be selected, another for each row, more than are certain."""
    free = (x > -INF).sum(-1).double()
    share = torch.linspace(0.3, 0.8, x.shape[:-1].numel()).view(x.shape[:-1]).double()
    return torch.maximum(free * share, (x == INF).sum(-1) + 0.25 * (x.abs() < INF).any(-1))


def affordable(x: Tensor) -> Tensor:
    """Less than all entries cost, by :func:`price` or :func:`costs`."""
    return 0.4 * counted(x)


def whole(x: Tensor) -> Tensor:
    return counted(x).round().clamp(max=x.shape[-1])


def expected(x: Tensor) -> Tensor:
    """The whole number next to the sum of the shares σ(x)."""
    return x.sigmoid().sum(-1).round()


def level(x: Tensor) -> Tensor:
    return torch.linspace(0, 1, x.shape[:-1].numel()).view(x.shape[:-1]).double()


def temperature(x: Tensor) -> Tensor:
    return torch.linspace(0.4, 1.5, x.shape[:-1].numel()).view(x.shape[:-1]).double()


def sign(x: Tensor) -> Tensor:
    return torch.linspace(-1, 1, x.shape[:-1].numel()).view(x.shape[:-1]).double()


K, TAU = (-1.0, 1e9, NAN), (0.0, -1.0, NAN, INF)

# ---------------------------------------------------------------------------------------- the kernels


def soft_topk(cdf: str, output: str = "y") -> Kernel:
    def call(on: Engine, a: Given) -> tuple[Tensor, ...]:
        rest = (cdf, CDFS[cdf], output)
        y, hi, lo = on("soft_topk")(a["x"], a["k"], a["tau"], *rest)
        v = a["v"][..., :0] if output == "threshold" else a["v"]
        along = a["u"] if output == "threshold" else torch.zeros(())
        grads = on("soft_topk_backward")(v, along, a["x"], hi, lo, a["tau"], *rest)
        return (hi + lo, *grads) if output == "threshold" else (y, hi + lo, *grads)

    return Kernel(
        ("soft_topk", "soft_topk_backward"), call, {"x": normal, "v": normal},
        {"k": counted, "tau": temperature, "u": sign}, {"x": (NAN,), "k": K, "tau": TAU},
        # where scores spread far beyond τ the gradient of a threshold in a gap is one of few entries
        kinds=("normal", "ties", "equal", "masked", "certain"), long=STREAMS,
    )  # fmt: skip


def in_gaps(cdf: str) -> Kernel:
    """The values alone, where scores spread far beyond τ; no row is drawn so that it has none."""
    return Kernel(
        ("soft_topk",), lambda on, a: on("soft_topk")(a["x"], a["k"], a["tau"], cdf, CDFS[cdf], "y")[:1],
        {"x": normal}, {"k": counted, "tau": temperature}, {}, kinds=("wide", "gaps"), long=STREAMS,
    )  # fmt: skip


def soft_budget(cdf: str, by: str) -> Kernel:
    def call(on: Engine, a: Given) -> tuple[Tensor, ...]:
        rest = (a["tau"], cdf, CDFS[cdf], by, False)
        y, hi, lo = on("soft_budget")(a["x"], a["cost"], a["budget"], *rest)
        zero = torch.zeros_like(hi)
        return y, *on("soft_budget_backward")(a["v"], zero, a["x"], a["cost"], hi, lo, *rest)

    return Kernel(
        ("soft_budget", "soft_budget_backward"), call,
        {"x": normal, "cost": costs, "v": normal}, {"budget": affordable, "tau": temperature},
        {"x": (NAN,), "cost": (-1.0, INF, NAN), "budget": (-1.0, 1e9, NAN), "tau": TAU},
        kinds=("normal", "ties", "equal", "masked"), long=STREAMS,
    )  # fmt: skip


def magnitude(p: float, signs: bool) -> Kernel:
    def call(on: Engine, a: Given) -> tuple[Tensor, ...]:
        x = a["x"] if signs else a["x"].abs()
        y, hi, lo = on("soft_topk_magnitude")(x, a["k"], a["tau"], p, signs)
        given = a["v"], a["u"], x, y, a["k"], hi, lo, a["tau"], p, signs
        grads = on("soft_topk_magnitude_backward")(*given)
        return y, hi + lo, *grads

    return Kernel(
        ("soft_topk_magnitude", "soft_topk_magnitude_backward"), call, {"x": normal, "v": normal},
        {"k": whole, "tau": temperature, "u": sign}, {"x": (NAN,), "k": K, "tau": TAU}, kinds=PLAIN,
        through=True, long=STREAMS,
    )  # fmt: skip


def soft_count(cdf: str, centred: bool) -> Kernel:
    """At three levels of each row, and at both infinite ones."""

    def call(on: Engine, a: Given) -> tuple[Tensor, ...]:
        u = a["u"].expand(a["x"].shape[:-1])
        at = torch.stack((u, 2 * u, u - 1, 0 * u + INF, 0 * u - INF), -1)
        rest = (at, a["tau"], cdf, CDFS[cdf], centred)
        return on("soft_count")(a["x"], *rest), *on("soft_count_backward")(at.atan(), a["x"], *rest)

    return Kernel(
        ("soft_count", "soft_count_backward"), call, {"x": normal}, {"u": sign, "tau": temperature},
        {"x": (NAN,), "tau": TAU}, spoiled=(0, 3),
    )  # fmt: skip


def laplace(name: str) -> Kernel:
    def call(on: Engine, a: Given) -> tuple[Tensor, ...]:
        results: list[Tensor] = []
        for descending in (True, False):
            value, order, place = on(f"laplace_{name}")(a["x"], None, a["tau"], descending)[-3:]
            dx, _, dtau = on(f"laplace_{name}_backward")(
                a["v"].to(value.dtype), a["x"], order, None, place, a["tau"], True, descending
            )
            results += value, dx, dtau
        return tuple(results)

    return Kernel(
        (f"laplace_{name}", f"laplace_{name}_backward"), call, {"x": normal, "v": normal},
        {"tau": temperature}, {"x": (NAN, -NAN), "tau": TAU}, kinds=PLAIN,
        spoiled=None if name == "count" else (0, 2, 3, 5),
    )  # fmt: skip


def permutahedron(regularization: str) -> Kernel:
    def call(on: Engine, a: Given) -> tuple[Tensor, ...]:
        y, *places = on("permutahedron")(a["x"], a["w"], a["tau"], regularization)
        grads = on("permutahedron_backward")(a["v"], a["x"], a["w"], a["tau"], *places, regularization, True)
        return y, *grads

    return Kernel(
        ("permutahedron", "permutahedron_backward"), call,
        {"x": normal, "w": normal, "v": normal}, {"tau": temperature},
        {"x": (NAN,), "w": (NAN,), "tau": TAU}, spoiled=(0,), kinds=PLAIN, long=STREAMS,
    )  # fmt: skip


def fenchel_young(cdf: str) -> Kernel:
    def call(on: Engine, a: Given) -> tuple[Tensor, ...]:
        # a target that sums to k, as half of its entries do
        target, rest = a["target"], (cdf, CDFS[cdf])
        loss, share, hi, lo = on("fenchel_young")(a["x"], target, a["k"], a["tau"], *rest)
        grads = on("fenchel_young_backward")(a["u"], a["x"], target, share, loss, hi, lo, a["tau"], *rest)
        return loss, *grads

    return Kernel(
        ("fenchel_young", "fenchel_young_backward"), call, {"x": normal, "target": heavy},
        {"k": counted, "tau": temperature, "u": sign}, {"x": (NAN,), "tau": TAU},
        kinds=("normal", "ties", "equal"), long=STREAMS,
    )  # fmt: skip


def places(a: Given) -> Tensor:
    """Two of each row, the second of which may be the first one's equal."""
    k = a["k"].clamp(min=1).expand(a["x"].shape[:-1])
    return torch.stack((k, (k - 1).clamp(min=1)), -1)


def weighted_quantiles(on: Engine, a: Given) -> tuple[Tensor, ...]:
    q = a["q"].expand(a["x"].shape[:-1])
    return (on("weighted_quantiles")(a["x"], a["w"].expand(a["x"].shape), torch.stack((q, 1 - q), -1)),)


def order_statistics_backward(on: Engine, a: Given) -> tuple[Tensor, ...]:
    values = OPERATORS["order_statistics"].kernel(a["x"], places(a))
    u = a["u"].expand(a["x"].shape[:-1]).to(values.dtype)
    return (on("order_statistics_backward")(a["x"], values, torch.stack((u, u + 2), -1)),)


def interpolate(on: Engine, a: Given) -> tuple[Tensor, ...]:
    both, weight = torch.cat((a["x"], a["v"]), -1), a["w"].expand(a["x"].shape).double() - 0.5
    found = [on("interpolate")(both, weight), *on("interpolate_backward")(both, weight, a["v"])]
    for number in (0.3, 0.5):  # of all pairs, by value
        one = torch.tensor(number, dtype=torch.float64)
        found += on("interpolate")(both, one), on("interpolate_backward")(both, one, a["v"])[0]
    return tuple(found)


def quantiles(on: Engine, a: Given) -> tuple[Tensor, ...]:
    """Of each row two, with weights of their own, and one between neighbours by a number."""
    k = torch.cat((places(a), places(a) + 1), -1).clamp(max=a["x"].shape[-1])
    batch = a["x"].shape[:-1]
    share = (a["w"].expand(batch).double() + 1) / 2
    weight = torch.stack((share, 1 - share / 2), -1)
    found: list[Tensor] = []
    for at, one in ((k, weight), (k[..., ::2], torch.tensor(0.3, dtype=torch.float64))):
        value, both = on("quantiles")(a["x"], at, one)
        grad = a["u"].expand(batch).unsqueeze(-1).expand(value.shape).to(value.dtype)
        dx, dweight = on("quantiles_backward")(a["x"], both, one, grad)
        found += (value, both, dx, dweight)[: 4 if one.dim() else 3]
    return tuple(found)


def permutation_shares(on: Engine, a: Given) -> tuple[Tensor, ...]:
    most = torch.full((*a["x"].shape[:-1], 1), torch.finfo(a["x"].dtype).max, dtype=torch.float64)
    hi = torch.cat((most, a["t"].double().sort(-1, descending=True).values[..., :-1], -most), -1)
    rest = (a["x"], hi, torch.zeros_like(hi), a["tau"], "normal", 0.0)
    return on("permutation_shares")(*rest), *on("permutation_shares_backward")(
        a["v"].unsqueeze(-1) * a["t"].unsqueeze(-2), *rest
    )


def soft_permutation(cdf: str) -> Kernel:
    def call(on: Engine, a: Given) -> tuple[Tensor, ...]:
        rest = (a["tau"], cdf, CDFS[cdf])
        p, hi, lo = on("soft_permutation")(a["x"], *rest)
        v = a["v"].unsqueeze(-1) * a["t"].sign().unsqueeze(-2)  # without rounding
        return p, *on("soft_permutation_backward")(v, a["x"], hi, lo, *rest, True)

    return Kernel(
        ("soft_permutation", "soft_permutation_backward"), call, {"x": normal, "t": normal, "v": normal},
        {"tau": temperature}, {"x": (NAN,), "tau": TAU}, spoiled=(0,),
        kinds=("normal", "ties", "equal", "masked", "certain"), square=True, long=(),
    )  # fmt: skip


def sorted_soft_topk(on: Engine, a: Given) -> tuple[Tensor, ...]:
    y, *places = on("sorted_soft_topk")(a["x"], min(2, a["x"].shape[-1]), a["tau"])
    v = a["v"].unsqueeze(-2) * torch.tensor([1.0, -1.0], dtype=a["v"].dtype)[: y.shape[-2], None]
    return y, *on("sorted_soft_topk_backward")(v, a["x"], a["tau"], *places)


ROUNDED = {torch.float64: 0.0, torch.float32: 0.0}
KERNELS: dict[str, Kernel] = {
    **{f"soft_topk, {cdf}": soft_topk(cdf) for cdf in CDFS},
    "soft_topk, logarithm": soft_topk("logistic", "log"),
    "soft_topk, threshold": soft_topk("laplace", "threshold"),
    **{f"soft_topk in gaps, {cdf}": in_gaps(cdf) for cdf in CDFS},
    "soft_budget, by score": soft_budget("logistic", "score"),
    "soft_budget, by value": soft_budget("uniform", "value"),
    "budget_mask": Kernel(
        ("budget_mask",), lambda on, a: (on("budget_mask")(a["x"], a["cost"], a["budget"]),),
        {"x": normal, "cost": price}, {"budget": affordable},
        {"x": (NAN,), "cost": (-1.0, INF, NAN), "budget": (-1.0, NAN)}, exact=ROUNDED,
    ),
    "magnitude, p = 2": magnitude(2.0, False),
    "magnitude with signs, p = 4/3": magnitude(4 / 3, True),
    "topk_mask": Kernel(
        ("topk_mask",), lambda on, a: (on("topk_mask")(a["x"], a["k"]),),
        {"x": normal}, {"k": whole}, {"x": (NAN,), "k": K}, exact=ROUNDED,
    ),
    "topk": Kernel(
        ("topk",), lambda on, a: on("topk")(a["x"], (a["x"].shape[-1] + 2) // 3, True, True),
        {"x": normal}, {}, {}, exact=ROUNDED,
    ),
    "order_statistics": Kernel(
        ("order_statistics",), lambda on, a: (on("order_statistics")(a["x"], places(a)),),
        {"x": normal}, {"k": whole}, {"x": (NAN,), "k": (1e9, NAN)}, exact=ROUNDED,
    ),
    "weighted_quantiles": Kernel(
        ("weighted_quantiles",), weighted_quantiles, {"x": normal, "w": price}, {"q": level},
        {"x": (NAN,), "w": (-1.0, INF, NAN), "q": (-0.1, NAN)}, exact=ROUNDED,
    ),
    "order_statistics_backward": Kernel(
        ("order_statistics_backward",), order_statistics_backward,
        {"x": normal}, {"k": whole, "u": sign}, {"x": (NAN,), "k": (1e9, NAN)}, through=True,
    ),
    "interpolate": Kernel(
        ("interpolate", "interpolate_backward"), interpolate, {"x": normal, "v": normal, "w": price}, {}, {},
        exact={torch.float64: 1e-15, torch.float32: 1e-7}, long=(),
    ),
    "quantiles": Kernel(
        ("quantiles", "quantiles_backward"), quantiles, {"x": normal},
        {"k": whole, "u": sign, "w": sign}, {"x": (NAN,), "k": (NAN,)}, through=True,
    ),
    "selectable": Kernel(
        ("selectable",), lambda on, a: (on("selectable")(a["x"], 1e9),), {"x": normal}, {}, {}, exact=ROUNDED,
        long=(),
    ),
    "soft_count, normal": soft_count("normal", False),
    "soft_count, centred": soft_count("logistic", True),
    "laplace_count": laplace("count"),
    "laplace_thresholds": laplace("thresholds"),
    "laplace_centred_rank": Kernel(
        ("laplace_centred_rank",), lambda on, a: on("laplace_centred_rank")(a["x"], a["tau"])[:1],
        {"x": normal}, {"tau": temperature}, {"x": (NAN,), "tau": TAU}, kinds=PLAIN,
    ),
    "decay_scan": Kernel(
        ("decay_scan",), lambda on, a: (on("decay_scan")(a["x"], a["w"], False),),
        {"x": normal, "w": price}, {}, {}, dtypes=(torch.float64,), kinds=PLAIN,
    ),
    "fenchel_young": fenchel_young("normal"),
    "permutahedron, l2": permutahedron("l2"),
    "permutahedron, kl": permutahedron("kl"),
    "permutahedron of blocks that hardly differ": permutahedron("l2")._replace(
        rows={"x": steps, "w": nearly_steps, "v": normal}, kinds=("normal",) * 8,
        numbers={"tau": lambda x: torch.ones(x.shape[:-1], dtype=torch.float64)},
    ),
    "soft_permutation": soft_permutation("laplace"),
    "permutation_shares": Kernel(
        ("permutation_shares", "permutation_shares_backward"), permutation_shares,
        {"x": normal, "t": normal, "v": normal}, {"tau": temperature}, {"tau": TAU}, spoiled=(),
        dtypes=(torch.float64, torch.float32), kinds=("normal", "ties", "equal"), square=True,
        exact={torch.float64: 1e-11, torch.float32: 1e-4},
    ),
    "sorted_soft_topk": Kernel(
        ("sorted_soft_topk", "sorted_soft_topk_backward"), sorted_soft_topk, {"x": normal, "v": normal},
        {"tau": temperature}, {"x": (NAN,), "tau": TAU}, kinds=("normal", "ties", "equal"),
        square=True,
    ),
    "order_sample": Kernel(
        ("order_sample",), lambda on, a: (on("order_sample")(a["x"], a["k"], SEED),),
        {"x": normal}, {"k": whole}, {}, dtypes=(torch.float64, torch.float32), exact=ROUNDED,
    ),
    "pareto_sample": Kernel(
        ("pareto_sample",), lambda on, a: (on("pareto_sample")(a["x"], SEED, 2.5, 1e-4)[0],),
        {"x": shares}, {}, {}, kinds=("normal",), exact=ROUNDED,
    ),
    "conditional_poisson_sample": Kernel(
        ("conditional_poisson_sample",),
        lambda on, a: (on("conditional_poisson_sample")(a["x"], SEED, 1e-4),),
        {"x": shares}, {}, {"x": (NAN, 1.5, -0.1)}, dtypes=(torch.float64, torch.float32),
        kinds=(), exact=ROUNDED, long=(),
    ),
    "tournament": Kernel(
        ("tournament",), lambda on, a: (on("tournament")(a["x"], SEED),), {"x": shares}, {}, {},
        dtypes=(torch.float64, torch.float32), kinds=("normal",), exact=ROUNDED,
    ),
    **{
        name: Kernel(
            (name,), lambda on, a, name=name: (on(name)(a["x"], SEED, 1e-4),), {"x": shares}, {},
            {"x": (NAN, 1.5, -0.1)}, kinds=("normal",), exact=ROUNDED,
        )
        for name in ("pivotal_sample", "systematic_sample")
    },
    "random_tournament": Kernel(
        ("random_tournament",), lambda on, a: (on("random_tournament")(a["x"], torch.tensor(7), SEED),),
        {"x": shares}, {}, {}, dtypes=(torch.float64, torch.float32), kinds=("normal",), exact=ROUNDED,
    ),
    "order_calibrate": Kernel(
        ("order_calibrate",), lambda on, a: (on("order_calibrate")(a["x"], a["k"]),),
        {"x": logits}, {"k": expected}, {"x": (NAN,)}, dtypes=(torch.float64,), kinds=("normal",),
        exact={torch.float64: 1e-6},
    ),
    "inclusion": Kernel(
        ("inclusion", "covariance"),
        lambda on, a: (*on("inclusion")(a["x"], a["k"]), on("covariance")(a["x"], a["k"], a["v"])),
        {"x": normal, "v": normal}, {"k": expected}, {"x": (NAN,)}, dtypes=(torch.float64,),
        kinds=("normal", "ties", "equal"),
    ),
    "order_inclusion": Kernel(
        ("order_inclusion",), lambda on, a: on("order_inclusion")(a["x"], a["k"]),
        {"x": normal}, {"k": expected}, {"x": (NAN,)}, spoiled=(0,), dtypes=(torch.float64,),
        kinds=("normal", "ties", "equal"),
    ),
}  # fmt: skip

#: What has no rows, or arguments of a shape of its own.
ELSEWHERE = {
    "characteristic": "test_poisson_binomial.py",
    "calibrate": "test_poisson_binomial.py",
    "uniform": "test_philox.py",
    "trials": "test_draws.py",
    "assign_pass": "test_assign_pass.py",
    "soft_assign": "test_triton_assign.py",
    "soft_assign_backward": "test_triton_assign.py",
    "ndcg_loss": "test_triton_ranking_losses.py",
    "ndcg_loss_backward": "test_triton_ranking_losses.py",
    "correlation_loss": "test_triton_ranking_losses.py",
    "correlation_loss_backward": "test_triton_ranking_losses.py",
    "centred_places": "test_triton_ranking_losses.py",
    "counted_mean": "test_triton_ranking_losses.py",
    "count_distances": "test_count_distances.py",
    "packed_soft_topk": "test_triton_ragged.py",
    "packed_soft_topk_backward": "test_triton_ragged.py",
    "masked": "../test_masked.py",
}

# ---------------------------------------------------------------------------------------- the engines

TRITON = ("triton", *STREAMS)
COMPILED = _kernels.active()["cpu"].startswith("compiled")
# Triton reads this variable at import, so a test cannot set it
INTERPRETED = importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"


def has(engine: str, kernel: Kernel) -> bool:
    if engine in TRITON:
        return all(name in gpu.KERNELS for name in kernel.operators) and engine in ("triton", *kernel.long)
    names = kernel.operators if engine == "compiled" else ()
    return all(torch._C._dispatch_has_kernel_for_dispatch_key(f"khot::{name}", "CPU") for name in names)


def first(name: str) -> bool:
    """Whether no row above has the same operators, which read and write rows alike whatever the CDF is."""
    rows = {kernel.operators[0]: name for name, kernel in reversed(KERNELS.items())}
    return rows[KERNELS[name].operators[0]] == name


def cases(*engines: str, once: Sequence[str] = ()) -> Any:
    """The kernels of each engine; under the interpreter, those of Triton alone. Engines in `once` have each
    operator once."""
    return pytest.mark.parametrize(
        ("engine", "name"),
        [
            pytest.param(engine, name, id=f"{engine}-{name}")
            for engine in engines
            for name, kernel in KERNELS.items()
            if (engine in TRITON) == INTERPRETED
            and (COMPILED or engine != "compiled")
            and has(engine, kernel)
            and (engine not in once or first(name))
        ],
    )


#: How far results may differ, in the same units, where an engine sums in an order that follows the strides
#: and the rows beside.
SAME = {"reference": 1e-6, "compiled": 0.0, "triton": 1e-6, "split": 1e-6, "streamed": 1e-6}


def reference(name: str) -> Callable[..., Any]:
    return OPERATORS[name].kernel


@pytest.fixture
def on(engine: str, request: pytest.FixtureRequest) -> Engine:
    if engine == "reference":
        return reference
    if engine == "compiled":
        return lambda name: getattr(torch.ops.khot, name)
    module = request.getfixturevalue("kernels" if engine == "triton" else engine)
    # the interpreter takes as long for rows of a program that are not there as for those that are
    request.getfixturevalue("monkeypatch").setattr(module.layout, "TOGETHER", 64)
    return lambda name: getattr(module, name)


pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning"
)  # of NumPy, with which Triton is interpreted


def drawn(
    kernel: Kernel,
    shape: tuple[int, ...],
    kinds: tuple[str, ...] = ("normal",),
    dtype: torch.dtype = torch.float64,
) -> Given:
    """The arguments; x has rows of these kinds, as many of each."""
    g = Generator().manual_seed(shape[-1])
    given = {key: draw(g, shape) for key, draw in kernel.rows.items()}
    if kinds != ("normal",):
        parts = given["x"].chunk(len(kinds))
        given["x"] = torch.cat([KINDS[kind](x) for kind, x in zip(kinds, parts, strict=True)])
    given = {key: v.to(dtype) for key, v in given.items()}
    return given | {key: draw(given["x"]) for key, draw in kernel.numbers.items()}


def widened(kernel: Kernel, given: Given) -> Given:
    """In float64, where the result is a rounded one."""
    return {key: v.double() for key, v in given.items()} if kernel.exact[torch.float64] else given


def narrow(kernel: Kernel) -> torch.dtype:
    return torch.float32 if torch.float32 in kernel.dtypes else torch.float64


def off(got: Tensor, want: Tensor) -> Tensor:
    """The difference in units of 1 + the largest number of the row; infinite where one is not a number."""
    got, want = got.double(), want.double()
    size = want.abs().nan_to_num(0, 0, 0)
    size = size.amax(-1, keepdim=True) if want.dim() > 1 and want.shape[-1] else size
    difference = (got - want).abs() / (1 + size)
    return difference.masked_fill((got == want) | (got.isnan() & want.isnan()), 0).nan_to_num(nan=INF)


def alike(got: Sequence[Tensor], want: Sequence[Tensor], allowed: float) -> None:
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.shape == b.shape, i
        error = off(a, b).max().item() if a.numel() else 0.0
        assert error <= allowed, f"result {i} is off by {error}"


# -------------------------------------------------------------------------------------------- the tests


@cases("compiled", *TRITON)
def test_rows_of_every_kind_as_the_reference(engine: str, name: str, on: Engine) -> None:
    kernel = KERNELS[name]
    if not kernel.kinds:  # its samples have the reference's law, and are others
        return
    for n in {"compiled": (1, 7, 20, 300), "triton": (20,)}.get(engine, (45,)):
        for dtype in kernel.dtypes[1 if engine == "streamed" else 0 : 2]:  # float64 does not stream
            rows = len(kernel.kinds) * (1 if engine in STREAMS else 2)
            given = drawn(kernel, (rows, n), kernel.kinds, dtype)
            want = kernel.call(reference, widened(kernel, given))
            assert not any(v.isnan().any() for v in want)
            alike(kernel.call(on, given), want, kernel.exact[dtype])


#: What takes a CDF; the table above has few of these with each.
WITH_CDF: dict[str, Callable[[str], Kernel]] = {
    "soft_budget, by score": lambda cdf: soft_budget(cdf, "score"),
    "soft_budget, by value": lambda cdf: soft_budget(cdf, "value"),
    "soft_count": lambda cdf: soft_count(cdf, False),
    "fenchel_young": fenchel_young,
    "soft_permutation": soft_permutation,
}


ENGINE = "triton" if INTERPRETED else "compiled"


@pytest.mark.parametrize("engine", [ENGINE] if INTERPRETED or COMPILED else [])
@pytest.mark.parametrize("name", [name for name, of in WITH_CDF.items() if has(ENGINE, of("logistic"))])
@pytest.mark.parametrize("cdf", CDFS)
def test_every_cdf_as_the_reference(engine: str, name: str, cdf: str, on: Engine) -> None:
    """A CDF that a kernel has no branch for would be taken for another."""
    kernel = WITH_CDF[name](cdf)
    for dtype in kernel.dtypes[:2]:
        given = drawn(kernel, (4, 20), dtype=dtype)
        alike(kernel.call(on, given), kernel.call(reference, given), kernel.exact[dtype])


@cases("reference", "compiled", *TRITON, once=STREAMS)
def test_a_row_without_an_answer_is_nan_alone(engine: str, name: str, on: Engine) -> None:
    """Beside rows with the same results as without it."""
    kernel = KERNELS[name]
    bad = [(key, value) for key, values in kernel.bad.items() for value in values]
    given = drawn(kernel, (len(bad) + 2, 20), dtype=narrow(kernel))
    good = kernel.call(on, given)
    for row, (key, value) in enumerate(bad):
        given[key] = given[key].clone()
        given[key][(row, (3, 17)[row % 2]) if key in kernel.rows else row] = value
    found = kernel.call(on, given)
    alike([v[len(bad) :] for v in found], [v[len(bad) :] for v in good], SAME[engine])
    for i, result in enumerate(found):
        if result.is_floating_point() and (kernel.spoiled is None or i in kernel.spoiled):
            assert result[: len(bad)].isnan().all(), i


LAYOUTS: list[Callable[[Tensor], Tensor]] = [
    lambda v: v.mT.contiguous().mT,  # rows that are columns
    lambda v: torch.stack((v, v), -1)[..., 0],  # every second entry
    lambda v: torch.cat((v.flatten()[:1], v.flatten()))[1:].view(v.shape),  # from an odd address on
    lambda v: torch.stack((v, v), 1)[:, 1],  # rows that are apart
]


@cases("reference", "compiled", *TRITON, once=TRITON)
def test_layouts_and_what_is_broadcast(engine: str, name: str, on: Engine) -> None:
    """Each row of the arguments lies in memory in another way; batches of two dims; rows and numbers that are
    the same throughout, and gradients as sum() sends them back."""
    kernel = KERNELS[name]
    rows = 2 if engine in STREAMS else 6
    given = drawn(kernel, (rows, 20), dtype=narrow(kernel))
    want = kernel.call(on, given)
    for turn in {"triton": (0, 1), "split": (1,), "streamed": (1,)}.get(engine, range(len(LAYOUTS))):
        laid = {
            key: LAYOUTS[(turn + i) % len(LAYOUTS)](v) if key in kernel.rows else v
            for i, (key, v) in enumerate(given.items())
        }
        if turn % 2:
            laid = {key: v.unflatten(0, (2, -1)) for key, v in laid.items()}
        found = [v.flatten(0, 1) if turn % 2 else v for v in kernel.call(on, laid)]
        alike(found, want, SAME[engine])
    one = {
        key: v[1] if key in kernel.numbers else v[1:2, : None if key == "x" else 1].expand(rows, 20)
        for key, v in given.items()
    }
    dense = {key: v.expand(rows) if key in kernel.numbers else v for key, v in one.items()}
    alike(kernel.call(on, one), kernel.call(on, {k: v.contiguous() for k, v in dense.items()}), SAME[engine])


@cases("reference", "compiled", *TRITON, once=TRITON)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_half_precision_is_rounded_once(engine: str, name: str, on: Engine, dtype: torch.dtype) -> None:
    kernel = KERNELS[name]
    if dtype not in kernel.dtypes[: 3 if engine in STREAMS else 4]:  # bfloat16 alone of long rows
        return
    given = drawn(kernel, (2 if engine in STREAMS else 6, 20), dtype=dtype)
    want = kernel.call(reference, widened(kernel, given))
    # the interpreter cuts digits off where it stores bfloat16, and a device rounds
    ulp = torch.finfo(dtype).eps * (1 if engine in TRITON else 0.51)
    for a, b in zip(kernel.call(on, given), want, strict=True):
        rounded = a.dtype == dtype or kernel.through
        assert off(a, b).max() <= 2e-5 + ulp * (2 if kernel.through else 1) * rounded


@cases("reference", "compiled", *TRITON, once=TRITON)
def test_empty_batches_and_rows(engine: str, name: str, on: Engine) -> None:
    kernel, dtype = KERNELS[name], narrow(KERNELS[name])
    for shape in ((0, 20), (3, 0), (2, 0, 3)):
        if kernel.square and shape[-1] == 0:
            continue
        given = drawn(kernel, shape, dtype=dtype)
        want = kernel.call(reference, given)
        found = kernel.call(on, given)
        alike(found, want, 0)
        assert [v.dtype for v in found] == [v.dtype for v in want]


@cases("compiled")
def test_threads_do_not_change_a_bit(engine: str, name: str, on: Engine) -> None:
    """Of many short rows, and of one that threads share."""
    kernel, before = KERNELS[name], torch.get_num_threads()
    for shape in ((37, 64), (1, 200 if kernel.square else 200_000)):
        given, results = drawn(kernel, shape, dtype=narrow(kernel)), []
        try:
            for threads in (1, 2, 4):
                torch.set_num_threads(threads)
                results.append(kernel.call(on, given))
        finally:
            torch.set_num_threads(before)
        alike(results[1], results[0], 0)
        alike(results[2], results[0], 0)


def test_the_table_has_every_kernel() -> None:
    """Or another file of tests has it."""
    known = {name for kernel in KERNELS.values() for name in kernel.operators} | set(ELSEWHERE)
    compiled = [
        name for name in OPERATORS if torch._C._dispatch_has_kernel_for_dispatch_key(f"khot::{name}", "CPU")
    ]
    assert not {*compiled, *gpu.KERNELS} - known


# --------------------------------------------------------------------------------- what is registered

STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x,
    "columns": lambda x: x.mT.contiguous().mT,
    "expanded": lambda x: x[..., :1, :].expand(x.shape),
}
registered = pytest.mark.skipif(INTERPRETED, reason="operators are called as they come")
every_stride = pytest.mark.parametrize("layout", STRIDES)
#: No gradient is registered for these, nor for what is drawn or calibrated.
CONSTANT = {
    "topk_mask", "budget_mask", "nucleus_mask", "power_blocks", "selectable", "centred_places",
    "count_distances", "decay_scan", "inclusion", "covariance", "assign_pass", "characteristic", "calibrate",
    "trials", "uniform", "tournament", "random_tournament", "best_of_product",
}  # fmt: skip


def check(name: str, args: tuple[Any, ...], traced: bool) -> None:
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    checks += ["test_aot_dispatch_dynamic"] * traced
    if not (name in CONSTANT or name.endswith(("backward", "sample")) or name.startswith("order_")):
        args = (args[0].detach().clone().requires_grad_(), *args[1:])
    torch.library.opcheck(OPERATORS[name].overload, args, test_utils=checks)


@registered
@every_stride
@pytest.mark.parametrize("name", [name for name in KERNELS if first(name) or not name.endswith((*CDFS,))])
def test_operators_on_rows(name: str, layout: str) -> None:
    """One layout is traced, too, and one is of another dtype: fake tensors show how results differ."""
    dtype = narrow(KERNELS[name]) if layout == "columns" else torch.float64
    given = drawn(KERNELS[name], (3, 7), dtype=dtype)
    given = {key: STRIDES[layout](v) if key in KERNELS[name].rows else v for key, v in given.items()}
    if layout == "expanded" and "v" in given:
        given["v"] = given["v"][:1, :1].expand(3, 7)  # what sum() sends back: stride 0

    def on(name: str) -> Callable[..., Any]:
        def checked(*args: Any) -> Any:
            check(name, args, layout == "rows")
            return OPERATORS[name].overload(*args)

        return checked

    KERNELS[name].call(on, given)


def others(layout: str) -> dict[str, list[tuple[Any, ...]]]:
    ops, lay = torch.ops.khot, STRIDES[layout]
    g = torch.Generator().manual_seed(0)
    x, w, square = lay(normal(g, (3, 7))), normal(g, (3, 7)), normal(g, (3, 7, 7))
    k, tau = torch.tensor([1.0, 2.0, 4.0]).double(), torch.tensor([0.5, 1.0, 1.7]).double()
    sent, of_rows = torch.ones(1).double().expand(3), torch.ones(1).double().expand(3, 7)
    cases: dict[str, list[tuple[Any, ...]]] = {
        "masked": [(x, x > 0, -torch.inf)],
        "nucleus_mask": [(x, k / 5)],
        "power_blocks": [(x, w, tau, 1.5), (x, w[:1], tau, 1.5)],
        "solve": [(torch.eye(7).double() + systems, x) for systems in (square, square[:1].expand(3, 7, 7))],
        "product": [(x.bfloat16(), x.mT.bfloat16())],
        "uniform": [(SEED, 3, 7, 2)],
        "trials": [(x, k.long(), torch.arange(3), SEED)],
        "characteristic": [(x,)],
        "calibrate": [(x, k)],
        "centred_places": [(x.round(), x)],
        "best_of_product": [(x, w, None, 3), (x, w, w[:, 0], 3)],
    }
    # permutations without the gradient of w
    _, *places = ops.permutahedron(x, w, tau, "l2")
    cases["permutahedron_backward"] = [(of_rows, x, w, tau, *places, "l2", False)]
    for operator in ("laplace_count", "laplace_thresholds"):  # at levels for all rows, and of each
        cases[operator], cases[f"{operator}_backward"] = [], []
        for levels in (torch.tensor([0.5, 3.0]).double(), k[:, None] * torch.tensor([0.1, 1.0]).double()):
            *_, out, order, place = getattr(ops, operator)(x, levels, tau, True)
            cases[operator].append((x, levels, tau, True))
            back = (out.new_ones(1).expand(out.shape), x, order, levels, place, tau, True, True)
            cases[f"{operator}_backward"].append(back)
    none = torch.zeros((), dtype=torch.int64)
    counted = (torch.zeros(65, 7, dtype=torch.int64), x, *x.topk(3), none, none, x[:, 0] > 0)
    cases["count_distances"] = [(*counted, None, None, None)]
    # ranking losses
    cases["ndcg_loss"] = [(x.exp() + 1, x.exp(), x, x.sigmoid(), k)]
    loss, found, weight = ops.ndcg_loss(*cases["ndcg_loss"][0])
    cases["ndcg_loss_backward"] = [(sent, x.exp() + 1, weight, x.sigmoid())]
    pair = (x, ops.centred_places(x.round(), x))
    cases |= {"correlation_loss": [pair], "correlation_loss_backward": [(sent, *pair)]}
    cases["counted_mean"] = [(loss, found, torch.float32)]
    # matrices
    sums = (torch.full_like(k, 2.0), torch.full_like(x[0], 2.0 * 3 / 7))
    bounds = (0.5 * sums[0], sums[0], 0.9 * sums[1], 1.1 * sums[1], torch.full_like(tau[:1], 1.8 * 3))
    rest = (tau[:1], sums[1], "logistic", 1.0)
    cases["soft_assign"] = [(x, *sums, *rest, False, "")]
    _, r, c, *_ = ops.soft_assign(*cases["soft_assign"][0])
    cases["soft_assign_backward"] = [(of_rows, None, None, x, rest[0], r, c, "logistic", 1.0, False)]
    cases["assign_pass"] = [(x, sums[0], r, c, 0.5, "logistic", 0.0, 3, 1e-13, True, True)]
    cases["bounded_assign"] = [(x, *bounds, *rest, True, False, 1e-6, "")]
    # products of the best alone
    i = torch.arange(3 * 3).view(3, 3) % 7
    matrix = lay(normal(g, (7, 7))).requires_grad_()
    cases["selected_sum"] = [(w[:, :3], matrix, i)]
    cases["selected_dot"] = [(x, matrix, i, w[0], None), (x, matrix, i, None, w[:, :3])]
    cases["selected_outer"] = [(w[:, :3], x, i, 7)]
    return cases


OTHERS = others("rows")


@registered
@every_stride
@pytest.mark.parametrize("name", OTHERS)
def test_other_operators(name: str, layout: str) -> None:
    for i, args in enumerate(others(layout)[name]):
        check(name, args, layout == "rows" and i == 0)


def test_every_operator_is_checked() -> None:
    checked = {name for kernel in KERNELS.values() for name in kernel.operators} | set(OTHERS)
    assert {name for name in OPERATORS if not name.startswith("reference_")} == checked
