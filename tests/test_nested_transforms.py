"""Transforms inside transforms: every operator, loss and density under two of them, against plain loops.

The loops are those of torch.autograd, one row and one entry of the result after the other. Sizes that
coincide (as many rows as entries and levels) show dims that are taken for one another, and sizes that differ
show errors.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from torch.autograd import functional
from torch.func import hessian, jacfwd, jacrev, vmap

import khot
import operators
from khot import counting
from khot.distributions import KHot, RelaxedKHot
from khot.losses import (
    FenchelYoungTopKLoss,
    TopKCrossEntropyLoss,
    hit_at_k_loss,
    precision_at_k_loss,
    recall_at_k_loss,
)
from khot.sampling import conditional_poisson

#: Rows, entries and levels.
SIZES = [(3, 3, 3), (2, 4, 3)]
every_size = pytest.mark.parametrize("sizes", SIZES, ids=["same", "different"])

Make = Callable[[int, int, torch.Generator], Tensor]


def normal(n: int, m: int, generator: torch.Generator) -> Tensor:
    return torch.randn(n, generator=generator, dtype=torch.float64)


def positive(n: int, m: int, generator: torch.Generator) -> Tensor:
    return 0.5 + torch.rand(n, generator=generator, dtype=torch.float64)


def between(low: float, high: float, levels: bool = False) -> Make:
    """A number, or one for each level."""

    def make(n: int, m: int, generator: torch.Generator) -> Tensor:
        share = torch.rand(m if levels else (), generator=generator, dtype=torch.float64)
        return low + (high - low) * share

    return make


def fixed(value: float) -> Make:
    return lambda n, m, generator: torch.tensor(value, dtype=torch.float64)


def matrix(n: int, m: int, generator: torch.Generator) -> Tensor:
    return torch.randn(m, n, generator=generator, dtype=torch.float64)


def sums(n: int, m: int, generator: torch.Generator) -> Tensor:
    """The sums of the m rows of a matrix, 1.2 m in all."""
    share = 0.5 + torch.rand(m, generator=generator, dtype=torch.float64)
    return 1.2 * m * share / share.sum()


def capacities(n: int, m: int, generator: torch.Generator) -> Tensor:
    share = 0.5 + torch.rand(n, generator=generator, dtype=torch.float64)
    return 1.2 * m * share / share.sum()


def chosen(n: int, m: int, generator: torch.Generator) -> Tensor:
    """Two of n."""
    return torch.zeros(n, dtype=torch.float64).scatter(0, torch.randperm(n, generator=generator)[:2], 1)


def mask(n: int, m: int, generator: torch.Generator) -> Tensor:
    return torch.arange(n).ne(torch.randint(n, (), generator=generator))


def order(n: int, m: int, generator: torch.Generator) -> Tensor:
    return torch.randperm(n, generator=generator)


def label(n: int, m: int, generator: torch.Generator) -> Tensor:
    return torch.randint(n, (), generator=generator)


@dataclass(frozen=True)
class Row:
    """A function of one row, the makers of its tensors, and which of these it is differentiable in."""

    id: str
    call: Callable[..., Tensor]
    make: Sequence[Make]
    of: Sequence[int] = field(default=(0,))
    vectorizes: bool = True  # whether torch.autograd.functional can map it: it decides nothing by values


def _row(op: operators.Operator) -> Row:
    k = fixed(2.0) if op.integer_k or op.name == "topk_mask" else between(1.6, 2.4)
    tau = 3.0 if op.name == "log_soft_topk" else 0.7  # with compact support, so that no logarithm is -inf
    of = (0, *[1] * (not op.integer_k), *[2] * op.has_tau) if op.differentiable else ()
    return Row(op.id, op.call, (normal, k, between(tau, tau + 0.2)), of)


def _by_scans(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The way for many levels, also for few."""

    def call(*args: Tensor) -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(counting, "FEW_ON_CPU", counting._Few(0, 0))
            return function(*args)

    return call


TAU = between(0.6, 0.9)

ROWS = [
    *map(_row, operators.OPERATORS),
    *(
        Row(
            f"soft_budget-{cdf}-{by}-cost",
            lambda x, w, b, tau, by=by, cdf=cdf: khot.soft_budget(x, w, b, tau=tau, by=by, cdf=cdf),
            (normal, positive, between(0.6, 1.2), TAU),
            (0, 1, 2, 3),
        )
        for by, cdf in itertools.product(("score", "value"), ("logistic", "uniform"))
    ),
    Row("budget_mask-cost", khot.budget_mask, (normal, positive, between(1, 2)), ()),
    *(
        Row(
            f"project_permutahedron-{name}-w",
            lambda x, w, tau, options=options: khot.project_permutahedron(x, w, tau=tau, **options),
            (normal, normal, TAU),
            (0, 1, 2),
        )
        for name, options in (
            ("l2", {}),
            ("kl", {"regularization": "kl"}),
            ("power", {"p": 1.5}),
        )
    ),
    Row(
        "project_permutahedron-mask",
        lambda x, w, tau, mask: khot.project_permutahedron(x, w, tau=tau, mask=mask),
        (normal, normal, TAU, mask),
        (0, 1, 2),
    ),
    *(
        Row(
            f"{name}-{cdf}-levels{'-scans' * scans}",
            (_by_scans if scans else lambda f: f)(
                lambda x, at, tau, name=name, cdf=cdf: getattr(khot, name)(x, at, tau=tau, cdf=cdf)
            ),
            (normal, between(0.5, 2.5, levels=True), TAU),
            (0, 1, 2),
        )
        for name in ("soft_count", "inverse_soft_count")
        for cdf, scans in (("logistic", False), ("laplace", False), ("laplace", True))
    ),
    *(
        Row(
            f"soft_quantile-{cdf}-q",
            lambda x, q, tau, cdf=cdf: khot.soft_quantile(x, q, tau=tau, cdf=cdf),
            (normal, between(0.1, 0.9, levels=True), TAU),
            (0, 1, 2),
        )
        for cdf in ("logistic", "laplace")
    ),
    Row("quantile-q", khot.quantile, (normal, between(0.1, 0.9, levels=True)), (0, 1)),
    Row(
        "quantile-mask",
        lambda x, q, mask: khot.quantile(x, q, mask=mask),
        (normal, between(0.1, 0.9, levels=True), mask),
        (0, 1),
    ),
    Row("kth_value-mask", lambda x, k, mask: khot.kth_value(x, k, mask=mask), (normal, fixed(2.0), mask)),
    Row(
        "soft_topk-mask",
        lambda x, k, mask: khot.soft_topk(x, k, mask=mask),
        (normal, between(1.2, 1.6), mask),
        (0, 1),
    ),
    *(
        Row(
            f"soft_assign-{cdf}-capacity",
            lambda x, k, capacity, tau, cdf=cdf: khot.soft_assign(x, k, capacity, tau=tau, cdf=cdf),
            (matrix, sums, capacities, TAU),
            (0, 3),
        )
        for cdf in ("logistic", "laplace")
    ),
    Row(
        "soft_assign-at_most",
        lambda x, k, capacity: khot.soft_assign(x, k, 1.1 * capacity, at_most=True),
        (matrix, sums, capacities),
        (0, 1),
    ),
    Row(
        "soft_assign-bounds",
        lambda x, k, capacity, tau: khot.soft_assign(
            x, (0.8 * k, k), (0.6 * capacity, 0.97 * capacity), total=0.9 * k.sum(-1), tau=tau
        ),
        (matrix, sums, capacities, TAU),
        (0, 1, 3),
    ),
    Row(
        "sorted_soft_topk-all",
        lambda x, epsilon: khot.sorted_soft_topk(x, 2, epsilon=epsilon),
        (normal, TAU),
        (0, 1),
    ),
    Row("log_rank_loss", khot.losses.log_rank_loss, (normal, positive), (0,)),
    *(
        Row(f"{loss.__name__}", lambda x, target, tau, loss=loss: loss(x, target, tau=tau), makers, (0, 2))
        for loss, makers in (
            (khot.losses.spearman_loss, (normal, normal, TAU)),
            (khot.losses.ndcg_loss, (normal, positive, TAU)),
            (khot.losses.average_precision_loss, (normal, chosen, TAU)),
        )
    ),
    *(
        Row(
            f"{loss.__name__}",
            lambda x, target, tau, loss=loss: loss(x, target, 2, tau=tau),
            (normal, chosen, TAU),
            (0, 2),
        )
        for loss in (recall_at_k_loss, precision_at_k_loss, hit_at_k_loss)
    ),
    Row("permutation_cross_entropy", khot.losses.permutation_cross_entropy, (normal, order)),
    Row("FenchelYoungTopKLoss", FenchelYoungTopKLoss(2), (normal, chosen), (0,)),
    Row("TopKCrossEntropyLoss", TopKCrossEntropyLoss(2), (normal, label)),
    *(
        Row(
            f"conditional_poisson.{name}",
            lambda x, k, name=name: getattr(conditional_poisson, name)(x, k),
            (normal, fixed(2.0)),
        )
        for name in ("log_normalizer", "marginals", "joint_marginals", "entropy")
    ),
    Row("conditional_poisson.log_prob", conditional_poisson.log_prob, (chosen, normal, fixed(2.0)), (1,)),
    Row("conditional_poisson.kl", conditional_poisson.kl, (normal, normal, fixed(2.0)), (0, 1)),
    Row(
        "conditional_poisson.calibrate",
        lambda x: conditional_poisson.calibrate(khot.soft_topk(x, 2)),
        (normal,),
        vectorizes=False,
    ),
    Row(
        "KHot.log_prob",
        lambda x, value: KHot(
            2, khot.soft_topk(x, 2), design="conditional_poisson", validate_args=False
        ).log_prob(value),
        (normal, chosen),
        vectorizes=False,
    ),
    Row(
        "RelaxedKHot.log_prob",
        lambda x, y, tau: RelaxedKHot(tau, 2, logits=x, validate_args=False).log_prob(khot.soft_topk(y, 2)),
        (normal, normal, TAU),
        (0, 1, 2),
    ),
]


def _kind(row: Row) -> tuple[str, bool, bool]:
    """Operators of one kind take the same way; one of them is enough where time is short."""
    return row.id.split("-")[0], "laplace" in row.id, "projection" in row.id


_FIRST = {id(row) for row in {_kind(row): row for row in reversed(ROWS)}.values()}
_OTHERS = {id(row) for row in ROWS[: len(operators.OPERATORS)]} - _FIRST


def _each(rows: list[Row]) -> pytest.MarkDecorator:
    params = [pytest.param(r, id=r.id, marks=[pytest.mark.slow] * (id(r) in _OTHERS)) for r in rows]
    return pytest.mark.parametrize("row", params)


every = _each(ROWS)
every_differentiable = _each([row for row in ROWS if row.of])

#: The levels that the arguments in even and in odd places are mapped at.
LEVELS = [
    ("outer", "inner"),
    ("inner", "outer"),
    ("both", "outer"),
    ("both", "inner"),
    ("inner", "both"),
    ("outer", "both"),
    ("both", "none"),
    ("none", "both"),
]


def made(row: Row, place: int, n: int, m: int, seed: int) -> Tensor:
    return row.make[place](n, m, torch.Generator().manual_seed(100 * place + seed))


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)


@every_size
@every
def test_vmap_in_vmap(row: Row, sizes: tuple[int, int, int]) -> None:
    """Each tensor mapped at the outer or at the inner level, at both, or at none, in one of the sizes."""
    rows, n, m = sizes
    places = range(len(row.make))
    seeds = {(i, j): i * rows + j for i in range(rows) for j in range(rows)}
    tensors = [[made(row, place, n, m, seed) for seed in seeds.values()] for place in places]
    for pair in LEVELS[SIZES.index(sizes) :: 2]:
        level = [pair[place % 2] for place in places]
        if len(places) == 1:
            level = ["both"]

        def at(i: int, j: int, level: list[str] = level) -> list[Tensor]:
            seed = {"outer": (i, 0), "inner": (0, j), "both": (i, j), "none": (0, 0)}
            return [tensors[place][seeds[seed[level[place]]]] for place in places]

        want = torch.stack([torch.stack([row.call(*at(i, j)) for j in range(rows)]) for i in range(rows)])
        stacked = [torch.stack(each).unflatten(0, (rows, rows)) for each in tensors]
        part = {"outer": (slice(None), 0), "inner": (0,), "both": (), "none": (0, 0)}
        args = [each[part[at]] for each, at in zip(stacked, level, strict=True)]
        outer, inner = (
            tuple(0 if each in ("both", which) else None for each in level) for which in ("outer", "inner")
        )
        assert_close(vmap(vmap(row.call, inner), outer)(*args), want)
        if len(places) == 1:
            break


@every_differentiable
def test_derivatives_in_transforms(row: Row) -> None:
    rows, n, m = SIZES[0]
    examples = [[made(row, place, n, m, i) for place in range(len(row.make))] for i in range(rows)]
    shapes = [examples[0][place].shape for place in row.of]

    def f(flat: Tensor) -> Tensor:
        """The function of all that it is differentiable in, as one vector. The rest is not mapped."""
        args = list(examples[0])
        parts = flat.split([shape.numel() for shape in shapes])
        for place, part, shape in zip(row.of, parts, shapes, strict=True):
            args[place] = part.reshape(shape)
        y = row.call(*args)
        return y.masked_fill(y.isinf(), 0)

    def g(flat: Tensor) -> Tensor:
        return (f(flat) + 0.5).pow(3).sum()

    x = torch.stack([torch.cat([args[place].reshape(-1) for place in row.of]) for args in examples])
    jacobians = torch.stack([functional.jacobian(f, each) for each in x])
    hessians = torch.stack([functional.hessian(g, each) for each in x])
    assert_close(vmap(jacrev(f))(x), jacobians)
    assert_close(vmap(jacfwd(f))(x), jacobians)
    assert_close(vmap(hessian(g))(x), hessians)
    assert_close(vmap(jacfwd(jacfwd(g)))(x), hessians)
    assert_close(jacfwd(jacfwd(g))(x[0]), hessians[0])
    if row.vectorizes:
        assert_close(functional.hessian(g, x[0], vectorize=True), hessians[0])
