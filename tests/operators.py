"""The table of public operators, each with its domain and an independent oracle.

`test_operators.py` runs the same checks for every row of the table, and fails if a public operator is missing
here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

import khot
import oracles
from khot import cdfs
from khot._core.precision import wide_dtype
from khot.quantiles import InterpolationName

Oracle = Callable[[Tensor, float, float], "np.ndarray | float"]


@dataclass(frozen=True)
class Arguments:
    """What an operator calls its arguments, and what is bad input to it."""

    family: str = ""  # how test_any_call.py checks it; not at all, if a file of the operator has its own
    k: str = "k"
    tau: str | None = "tau"


ARGUMENTS: dict[str, Arguments] = {
    **dict.fromkeys(("soft_topk", "sigmoid_topk", "laplace_topk", "sparse_topk"), Arguments("mask")),
    "log_soft_topk": Arguments("log"),
    "ot_topk": Arguments("mask", tau="epsilon"),
    "soft_topk_magnitude": Arguments("magnitude"),
    "topk_mask": Arguments("hard", tau=None),
    "soft_count": Arguments("count", k="at"),
    "inverse_soft_count": Arguments("threshold", k="count"),
    # in test_assignment.py, test_budgets.py, test_phi.py, test_quantile.py, test_ranking.py,
    # test_permutahedron.py, test_selection.py and test_transport.py
    **dict.fromkeys(("soft_assign", "soft_budget", "budget_mask", "sorted_soft_topk"), Arguments()),
    **dict.fromkeys(("soft_topk_exp", "soft_topk_signed", "soft_topk_sum"), Arguments()),
    **dict.fromkeys(("soft_rank", "soft_sort", "soft_permutation", "log_soft_permutation"), Arguments()),
    **dict.fromkeys(("soft_quantile", "soft_median", "quantile", "project_permutahedron"), Arguments()),
    **dict.fromkeys(("k_support_norm", "k_support_negentropy", "kth_value", "topk"), Arguments(tau=None)),
    "nucleus_mask": Arguments(k="p", tau=None),
    "conformal_quantile": Arguments(k="alpha", tau=None),
}


@dataclass(frozen=True)
class Operator:
    """One row of the table. ``call(x, k, tau, **options)`` is the operator with its variant fixed.

    ``k`` is the second argument, whether it is a number of entries, a level or a count. An operator without
    one ignores it.
    """

    id: str
    name: str
    call: Callable[..., Tensor]
    oracle: Oracle
    out_dims: int = 1  # how many dims of length n replace dim in the result
    selects: bool = True  # whether each entry gets a share of k, or its logarithm
    sums_to_k: bool = False
    differentiable: bool = True
    piecewise_linear: bool = False  # whether its first derivatives are constant
    integer_k: bool = False
    has_tau: bool = True
    has_mask: bool = True
    tolerance: float = 1e-12
    masked: float = 0.0  # the value of an entry that may not be selected
    k: tuple[float, ...] = field(default=(2.3, 3.0, 4.6))  # one per row, inside the domain
    log_of: str | cdfs.CDF | None = None  # the CDF of y, if the values are its logarithms

    @property
    def keeps_dim(self) -> bool:
        return self.out_dims == 1

    @property
    def arguments(self) -> Arguments:
        return ARGUMENTS[self.name]

    def plain(self, x: Any, k: Any = 2, dim: Any = -1, **options: Any) -> Tensor:
        """The operator with no variant fixed; ``tau=`` under the name that it has there."""
        if "tau" in options:
            tau = options.pop("tau")
            if self.arguments.tau is not None:
                options[self.arguments.tau] = tau
        return getattr(khot, self.name)(x, k, dim, **options)


def _variant(name: str, **fixed: Any) -> Callable[..., Tensor]:
    operator, scale = getattr(khot, name), ARGUMENTS[name].tau

    def call(x: Tensor, k: Any, tau: Any, **options: Any) -> Tensor:
        return operator(x, k, **({scale: tau} if scale else {}), **fixed, **options)

    return call


def _budget(name: str, **fixed: Any) -> Callable[..., Tensor]:
    """An operator with a budget, of which every entry costs 1."""
    operator = getattr(khot, name)

    def call(x: Tensor, k: Any, tau: Any, **options: Any) -> Tensor:
        scale = {"tau": tau} if name == "soft_budget" else {}
        return operator(x, x.new_ones(()), k, **scale, **fixed, **options)

    return call


def _mirrored(cdf: str) -> Callable[..., Tensor]:
    """soft_assign of a row and its negative, which share the columns: for an F that is symmetric about its
    median, the soft top-k."""

    def call(x: Tensor, k: Any, tau: Any, dim: int = -1) -> Tensor:
        row = x.movedim(dim, -1) if x.dim() else x.unsqueeze(0)
        second = torch.arange(2, dtype=wide_dtype(x.device), device=x.device)
        k = k.unsqueeze(-1) if isinstance(k, Tensor) and k.dim() else k
        both, sums = torch.stack((row, -row), -2), k * (1 - 2 * second) + row.shape[-1] * second
        y = khot.soft_assign(both, sums, 1, tau=tau, cdf=cdf)[..., 0, :]
        return y.movedim(-1, dim) if x.dim() else y.squeeze(0)

    return call


def _ranking(name: str, **fixed: Any) -> Callable[..., Tensor]:
    """The operators without a k. The q of a quantile is fixed, because a tensor q would add a dim."""
    operator = getattr(khot, name)
    first = (fixed.pop("q"),) if "q" in fixed else ()
    return lambda x, k, tau, **options: operator(x, *first, tau=tau, **fixed, **options)


def _ranking_oracle(
    name: str,
    cdf: str | cdfs.CDF,
    descending: bool = False,
    q: float = 0.5,
    interpolation: str | None = None,
) -> Oracle:
    def oracle(x: Tensor, k: float, tau: float) -> np.ndarray | float:
        n, sign = len(x), 1 if descending else -1
        if name == "soft_rank":
            return oracles.soft_rank(sign * x, tau, *_cdf(cdf))
        if name == "soft_sort":
            return sign * oracles.soft_levels(sign * x, np.arange(n) + 0.5, tau, *_cdf(cdf))
        if interpolation is not None:
            places = oracles.soft_levels(x, np.arange(n) + 0.5, tau, *_cdf(cdf))
            return float(np.quantile(places, q, method=interpolation))
        if name in ("soft_quantile", "soft_median"):
            return float(oracles.soft_levels(x, [0.5 + (1 - q) * (n - 1)], tau, *_cdf(cdf))[0])
        return oracles.soft_permutation(sign * x, tau, *_cdf(cdf))[name.startswith("log")]

    return oracle


def _cdf(cdf: str | cdfs.CDF) -> tuple[str, float | None]:
    return ("power", cdf.p) if isinstance(cdf, cdfs.Power) else (str(cdf), None)


def _soft(cdf: str | cdfs.CDF, part: int = 0) -> Oracle:
    return lambda x, k, tau: oracles.soft_topk(x, k, tau, *_cdf(cdf))[part]


def _count(cdf: str | cdfs.CDF) -> Oracle:
    name, p = _cdf(cdf)
    F = (oracles.CDFS[name] if p is None else oracles.power(p)).cdf

    def oracle(x: Tensor, at: float, tau: float) -> float:
        mp = oracles.mp
        return float(sum(F((mp.mpf(v) - mp.mpf(at)) / mp.mpf(tau)) for v in x.double().tolist()))

    return oracle


def _ot_normalized(x: Tensor, k: float, epsilon: float) -> np.ndarray:
    x = x.double()
    cost = float(torch.maximum(x**2, (x - 1) ** 2).max())
    return oracles.sinkhorn_topk(x, k, epsilon * cost)


_CDFS: dict[str, str | cdfs.CDF] = {
    "logistic": "logistic",
    "laplace": "laplace",
    "normal": "normal",
    "uniform": "uniform",
    "power": cdfs.Power(4 / 3),
}
_SMOOTH = ("logistic", "laplace", "normal")


def log_limit(cdf: str | cdfs.CDF, log_y: Tensor, rounding: float) -> Tensor:
    """How far a logarithm of y may be off, given float32's or float64's rounding of y: by 1e-5 or 1e-12 of
    itself, or by what an error of z within that of y is multiplied by. Where y leaves 0, that is f/F = e/z,
    without a bound."""
    F = cdfs.resolve(cdf)
    relative = (1e-12 if rounding <= 1e-12 else max(1e-5, 2 * rounding)) * (1 + log_y.abs())
    if F.full_support:
        return relative
    z = F.icdf(log_y.double().exp())
    return (relative + rounding * torch.exp(F.log_hazard(z))).masked_fill(log_y == -torch.inf, 0)


def _sorted(normalize: bool) -> Callable[..., Tensor]:
    """Per-row scalars for two places of sorted_soft_topk: its own k is an int, so k is the weight of the
    second."""

    def call(x: Tensor, k: Any, tau: Any, dim: int = -1) -> Tensor:
        places = min(2, x.shape[dim] if x.dim() else 1)
        y = khot.sorted_soft_topk(x, places, dim, epsilon=tau, normalize=normalize)
        at = dim - max(x.dim(), 1) if dim >= 0 else dim
        first, *second = _weighed(y.movedim((at - 1, at), (-2, -1))).unbind(-1)
        return sum((k * s for s in second), first).to(x.dtype)

    return call


def _weighed(y: Tensor) -> Tensor:
    # made where they are used: a copy from the CPU would wait for the device
    weights = torch.arange(y.shape[-1], dtype=wide_dtype(y.device), device=y.device).cos()
    return (y * weights).sum(-1)


def _selected(x: Tensor, k: Any, tau: Any, dim: int = -1) -> Tensor:
    """Two entries of topk, which has an int for k: here k is the weight of the second."""
    values = khot.topk(x, min(2, x.shape[dim] if x.dim() else 1), dim).values
    first, *second = values.movedim(dim, -1).unbind(-1) if x.dim() else (values,)
    return sum((k * s for s in second), first).to(x.dtype)


def _sorted_oracle(normalize: bool) -> Oracle:
    def oracle(x: Tensor, k: float, epsilon: float) -> float:
        import ot  # imported late, so that the table can be used without POT

        n = len(x)
        cost = (x.double()[:, None] - torch.tensor([2.0, 1.0, 0.0])).square().numpy()
        mass = np.append(np.ones(2), n - 2) / n
        options = {"method": "sinkhorn_log", "numItermax": 20_000, "stopThr": 1e-14, "warn": False}
        epsilon *= cost.max() if normalize else 1
        plan = ot.sinkhorn(np.full(n, 1 / n), mass, cost, epsilon, **options)
        first, second = _weighed(torch.from_numpy(n * plan[:, :2].T))
        return float(first + k * second)

    return oracle


# What gives a share of k to each entry, a row of other numbers, and one number for each row.
_shares = partial(Operator, sums_to_k=True)
_row = partial(Operator, selects=False, has_mask=False)
_number = partial(_row, out_dims=0)
_ranks = partial(_row, integer_k=True)
_place = partial(Operator, out_dims=0, selects=False, piecewise_linear=True, integer_k=True, has_tau=False)
_WHOLE = (2.0, 3.0, 5.0)
_PAID = (2.3, 3.0, 4.4)  # for the hard selection, which never exceeds the budget

OPERATORS: list[Operator] = [
    *(
        _shares(f"soft_topk-{n}", "soft_topk", _variant("soft_topk", cdf=c), _soft(c))
        for n, c in _CDFS.items()
    ),
    *(
        Operator(
            f"log_soft_topk-{n}",
            "log_soft_topk",
            _variant("log_soft_topk", cdf=c),
            _soft(c, 1),
            masked=-float("inf"),
            log_of=c,
        )
        for n, c in _CDFS.items()
    ),
    _shares("sigmoid_topk", "sigmoid_topk", _variant("sigmoid_topk"), _soft("logistic")),
    _shares("laplace_topk", "laplace_topk", _variant("laplace_topk"), _soft("laplace")),
    _shares("ot_topk", "ot_topk", _variant("ot_topk"), oracles.sinkhorn_topk, tolerance=1e-10),
    _shares(
        "ot_topk-normalize", "ot_topk", _variant("ot_topk", normalize=True), _ot_normalized, tolerance=1e-10
    ),
    _shares("sparse_topk-2", "sparse_topk", _variant("sparse_topk"), _soft("uniform")),
    *(
        _shares(f"sparse_topk-{n}", "sparse_topk", _variant("sparse_topk", p=p), _soft(cdfs.Power(p)))
        for n, p in (("4/3", 4 / 3), ("3", 3.0))
    ),
    *(
        Operator(
            f"soft_topk_magnitude-{p:.2f}{'-rescale' * rescale}",
            "soft_topk_magnitude",
            _variant("soft_topk_magnitude", p=p, rescale=rescale),
            lambda x, k, tau, p=p, rescale=rescale: _magnitude(x, k, tau, p, rescale),
            integer_k=True,
            tolerance=1e-9,
            k=_WHOLE,
        )
        for p in (2.0, 4 / 3, 3.0)
        for rescale in (False, True)
    ),
    # with equal costs; test_budgets.py has the others
    *(
        _shares(
            f"soft_budget-{n}-{by}", "soft_budget", _budget("soft_budget", cdf=c, by=by), _soft(c), k=_PAID
        )
        for (n, c), by in zip(_CDFS.items(), ("score", "value", "score", "value", "score"), strict=True)
    ),
    Operator(
        "budget_mask",
        "budget_mask",
        _budget("budget_mask"),
        lambda x, k, tau: oracles.topk_mask(x, k),
        differentiable=False,
        has_tau=False,
        k=_PAID,
    ),
    # its masks, infinite entries and gradient are in test_budgets.py
    _row(
        "nucleus_mask",
        "nucleus_mask",
        lambda x, k, tau, **options: khot.nucleus_mask(x, k / 7, tau=tau, **options),
        lambda x, k, tau: oracles.nucleus(x, k / 7),
        differentiable=False,
        has_tau=False,
    ),
    # its masks, infinite entries and bounds are in test_assignment.py
    *(
        _row(f"soft_assign-{n}", "soft_assign", _mirrored(n), _soft(n), piecewise_linear=n == "uniform")
        for n in (*_SMOOTH, "uniform")
    ),
    # its order, indices and other k are in test_selection.py
    _number(
        "topk",
        "topk",
        _selected,
        lambda x, k, tau: float(np.dot(np.sort(-x.double())[:2], (-1, -k))),
        has_tau=False,
    ),
    Operator(
        "topk_mask",
        "topk_mask",
        _variant("topk_mask"),
        lambda x, k, tau: oracles.topk_mask(x, k),
        differentiable=False,
        has_tau=False,
    ),
    *(
        _number(f"soft_count-{n}", "soft_count", _variant("soft_count", cdf=c), _count(c), k=(-0.4, 0.1, 0.7))
        for n, c in _CDFS.items()
    ),
    *(
        _number(
            f"inverse_soft_count-{n}",
            "inverse_soft_count",
            _variant("inverse_soft_count", cdf=c),
            _soft(c, 2),
        )
        for n, c in _CDFS.items()
    ),
    *(
        _number(
            f"sorted_soft_topk{'-normalize' * normalize}",
            "sorted_soft_topk",
            _sorted(normalize),
            _sorted_oracle(normalize),
            tolerance=1e-9,
        )
        for normalize in (False, True)
    ),
]


OPERATORS += [
    _ranks(
        f"{name}-{n}{'-descending' * ('descending' in options)}{'-linear' * ('interpolation' in options)}",
        name,
        _ranking(name, cdf=c, **options),
        _ranking_oracle(name, c, **options),
        out_dims={"soft_quantile": 0, "soft_median": 0, "soft_rank": 1, "soft_sort": 1}.get(name, 2),
    )
    for n, c in _CDFS.items()
    for name, options in [
        ("soft_rank", {}),
        ("soft_sort", {}),
        ("soft_permutation", {}),
        ("log_soft_permutation", {}),
        ("soft_quantile", {"q": 0.3}),
        *([("soft_median", {})] if n == "laplace" else []),
        *([("soft_quantile", {"q": 0.3, "interpolation": "linear"})] if n in ("laplace", "power") else []),
        *(
            [(f"soft_{what}", {"descending": True}) for what in ("rank", "sort")]
            if n in ("laplace", "power")
            else []
        ),
    ]
]


def _first_places(name: str, cdf: str | cdfs.CDF) -> Callable[..., Tensor]:
    """Two rows of a permutation, weighed: k is the weight of the second."""

    def call(x: Tensor, k: Any, tau: Any, dim: int = -1) -> Tensor:
        at = dim % max(x.dim(), 1)
        p = getattr(khot, name)(x, dim, k=min(2, x.shape[at] if x.dim() else 1), tau=tau, cdf=cdf)
        first, *second = p.movedim((at, at + 1), (-2, -1)).unbind(-2)
        k = k.unsqueeze(-1) if isinstance(k, Tensor) and k.dim() else k
        y = sum((k * s for s in second), first).to(x.dtype)
        return y.movedim(-1, at) if x.dim() else y.squeeze(-1)

    return call


def _first_places_oracle(name: str, cdf: str | cdfs.CDF) -> Oracle:
    def oracle(x: Tensor, k: float, tau: float) -> np.ndarray:
        p = oracles.soft_permutation(-x, tau, *_cdf(cdf))[name.startswith("log")]
        return p[0] + k * p[1]

    return oracle


OPERATORS += [
    _row(f"{name}-{cdf}-first", name, _first_places(name, cdf), _first_places_oracle(name, cdf))
    for name, cdf in [
        ("soft_permutation", "laplace"),
        ("soft_permutation", "logistic"),
        ("soft_permutation", "uniform"),
        ("log_soft_permutation", "laplace"),
        ("log_soft_permutation", "normal"),
    ]
]


def _projection(name: str, **fixed: Any) -> Callable[..., Tensor]:
    """An operator by projection onto a permutahedron: that of cos 0, …, cos (n − 1) where w is not fixed."""
    if name != "project_permutahedron":
        return _ranking(name, method="projection", **fixed)

    def call(x: Tensor, k: Any, tau: Any, dim: int = -1, **options: Any) -> Tensor:
        n = x.shape[dim] if x.dim() else 1
        w = torch.arange(n, dtype=wide_dtype(x.device), device=x.device).cos()
        return khot.project_permutahedron(x, w, dim, tau=tau, **fixed, **options)

    return call


def _projection_oracle(name: str, regularization: str, descending: bool = False, p: float = 2.0) -> Oracle:
    kl = regularization == "kl"

    def oracle(x: Tensor, k: float, tau: float) -> np.ndarray:
        n, row = len(x), x.double().numpy()
        ranks = np.arange(n, 0, -1)
        if name == "project_permutahedron":
            return oracles.permutahedron(row / tau, np.cos(np.arange(n)), kl, p)
        sign = 1 if descending == (name == "soft_sort") else -1
        if name == "soft_sort":
            return sign * oracles.permutahedron(ranks / tau, sign * row, kl)
        if kl:
            return np.exp(oracles.permutahedron(sign * row / tau, np.log(ranks), kl))
        return oracles.permutahedron(sign * row / tau, ranks)

    return oracle


OPERATORS += [
    _ranks(
        f"{name}-projection-{regularization}{'-descending' * options.get('descending', False)}",
        name,
        _projection(name, regularization=regularization, **options),
        _projection_oracle(name, regularization, **options),
    )
    for regularization in ("l2", "kl")
    for name, options in [
        ("project_permutahedron", {}),
        ("soft_rank", {}),
        ("soft_rank", {"descending": True}),
        ("soft_sort", {}),
        ("soft_sort", {"descending": True}),
    ]
]

OPERATORS += [
    _ranks(
        f"project_permutahedron-{p:.2f}",
        "project_permutahedron",
        _projection("project_permutahedron", p=p),
        _projection_oracle("project_permutahedron", "l2", p=p),
        tolerance=1e-9,
    )
    for p in (4 / 3, 3.0)
]

# The relatives of top-k in magnitude; test_phi.py has their masks and infinite entries.
OPERATORS += [
    *(
        Operator(
            f"soft_topk_signed-{p:.2f}",
            "soft_topk_signed",
            _variant("soft_topk_signed", p=p),
            lambda x, k, tau, p=p: oracles.signed_pav(x, k, tau, p),
            selects=False,
            piecewise_linear=p == 2,
            tolerance=1e-9,
        )
        for p in (2.0, 4 / 3)
    ),
    *(
        Operator(
            f"soft_topk_exp-{p:.2f}",
            "soft_topk_exp",
            _variant("soft_topk_exp", p=p),
            lambda x, k, tau, p=p: oracles.exp_pav(x, k, tau, p),
            selects=False,
            integer_k=True,
            tolerance=1e-9,
            k=_WHOLE,
        )
        for p in (2.0, 4 / 3)
    ),
    *(
        Operator(
            f"soft_topk_sum-{phi}",
            "soft_topk_sum",
            _variant("soft_topk_sum", phi=phi, p=1.5),
            lambda x, k, tau, phi=phi: oracles.relaxed_sum_pav(x, k, tau, 1.5, phi),
            out_dims=0,
            selects=False,
            integer_k=phi in ("square", "exp"),
            tolerance=1e-9,
            k=_WHOLE,
        )
        for phi in ("identity", "abs", "square", "exp")
    ),
    Operator(
        "k_support_norm",
        "k_support_norm",
        _variant("k_support_norm"),
        lambda x, k, tau: oracles.k_support_mp(x, k, "square"),
        out_dims=0,
        selects=False,
        integer_k=True,
        has_tau=False,
        k=_WHOLE,
    ),
    Operator(
        "k_support_negentropy",
        "k_support_negentropy",
        lambda x, k, tau, dim=-1, **options: khot.k_support_negentropy(x.square(), k, dim, **options),
        lambda x, k, tau: oracles.k_support_mp(x.square(), k, "exp"),
        out_dims=0,
        selects=False,
        integer_k=True,
        has_tau=False,
        k=_WHOLE,
    ),
]


def _weighted_quantile(x: Tensor, k: Any, tau: Any, dim: int = -1) -> Tensor:
    shape = [1] * x.dim()
    if shape:
        shape[dim] = x.shape[dim]
    n = torch.arange(1, 1 + (x.shape[dim] if shape else 1), device=x.device)
    return khot.quantile(x, 0.7, dim, weights=(n % 3).reshape(shape))


# Exact order statistics have no tau. The q of a quantile is fixed, as above.
OPERATORS += [
    *(
        _place(
            f"kth_value-{'largest' if largest else 'smallest'}",
            "kth_value",
            _variant("kth_value", largest=largest),
            lambda x, k, tau, sign=-1 if largest else 1: sign * np.sort(sign * x.double())[int(k) - 1],
            k=_WHOLE,
        )
        for largest in (True, False)
    ),
    *(
        _place(
            f"quantile-{interpolation}",
            "quantile",
            lambda x, k, tau, dim=-1, i=interpolation, **options: khot.quantile(
                x, 0.3, dim, interpolation=i, **options
            ),
            lambda x, k, tau, i=interpolation: float(np.quantile(x.double(), 0.3, method=i)),
        )
        for interpolation in get_args(InterpolationName)
    ),
    _place(
        "quantile-weights",
        "quantile",
        _weighted_quantile,
        lambda x, k, tau: float(
            np.quantile(x.double(), 0.7, method="inverted_cdf", weights=np.arange(1, len(x) + 1) % 3)
        ),
        has_mask=False,
    ),
    # of 7 scores and one more
    _place(
        "conformal_quantile",
        "conformal_quantile",
        lambda x, k, tau, **options: khot.conformal_quantile(x, 1 - k / 8, **options),
        lambda x, k, tau: float(np.sort(x.double())[math.ceil(k) - 1]),
        has_mask=False,
    ),
]


# one variant of each operator
FIRST = list({op.name: op for op in reversed(OPERATORS)}.values())[::-1]


def _magnitude(x: Tensor, k: float, tau: float, p: float, rescale: bool) -> np.ndarray:
    y = oracles.magnitude_pav(x, k, tau, p)
    return y + tau * np.sign(y) * np.abs(y) ** (p - 1) if rescale else y


def expected(operator: Operator, x: Tensor, k: list[float], tau: list[float]) -> Tensor:
    """The oracle over rows along the last dim of a 2-D x."""
    rows = [operator.oracle(row, a, b) for row, a, b in zip(x, k, tau, strict=True)]
    return torch.tensor(np.array(rows), dtype=torch.float64)
