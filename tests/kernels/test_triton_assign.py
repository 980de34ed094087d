"""Two-sided assignments of the Triton kernel, interpreted, against the reference and their own conditions."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import khot
from khot import cdfs
from khot._core.dispatch import OPERATORS
from khot._kernels.reference import soft_assign as reference

INF = math.inf
WAYS = {"a program a matrix": 1 << 30, "a launch a step": 0}  # for matrices of up to so many entries
EPS = torch.finfo(torch.float64).eps


@pytest.fixture(autouse=True, params=list(WAYS))
def way(request: pytest.FixtureRequest, kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(kernels.assign, "FEW", WAYS[request.param])
    return str(request.param)


def scores(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64) + torch.linspace(0, 2, shape[-1]).double()


def vector(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def closed(x: Tensor, *places: tuple[int, ...], value: float = -INF) -> Tensor:
    for place in places:
        x[place] = value
    return x


def given(x: Tensor, k: Any, capacity: Any, tau: Any, bias: Any, at_most: bool) -> tuple[Any, ...]:
    *batch, m, n = x.shape
    k = torch.as_tensor(k, dtype=torch.float64).expand(*batch, m)
    capacity = k.sum(-1, keepdim=True) / n if capacity is None else capacity
    capacity, bias = (torch.as_tensor(v, dtype=torch.float64).expand(*batch, n) for v in (capacity, bias))
    return x, k, capacity, torch.as_tensor(tau, dtype=torch.float64).expand(*batch, 1), bias


def check(
    kernels: ModuleType, x: Tensor, k: Any, capacity: Any = None, tau: Any = 0.5, cdf: str = "logistic",
    at_most: bool = False, bias: Any = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The results, which agree with the reference and meet the conditions that define them."""
    arguments = given(x, k, capacity, tau, bias, at_most)
    y, r, c = kernels.soft_assign(*arguments, cdf, 0.0, at_most, "")
    want, _, price = reference.soft_assign(*arguments, cdf, 0.0, at_most, "")
    x, k, capacity, tau = (v.double() for v in arguments[:4])
    tau = tau.unsqueeze(-1)
    scale = (torch.where(x.isfinite(), x, 0).abs().amax() / tau).nan_to_num(nan=1.0).abs().max().item()
    digits = 1e-12 + 32 * EPS * scale + (0 if y.dtype == torch.float64 else torch.finfo(y.dtype).eps)
    assert y.dtype == arguments[0].dtype and r.dtype == c.dtype == torch.float64
    assert torch.equal(y.isnan(), want.isnan())
    torch.testing.assert_close(y, want, rtol=0, atol=digits, equal_nan=True)
    lost = y.isnan().any(-1).any(-1)
    assert torch.equal(lost, y.isnan().all(-1).all(-1))
    assert torch.equal(r.isnan(), lost.unsqueeze(-1).expand(r.shape))
    assert torch.equal(c.isnan(), lost.unsqueeze(-1).expand(c.shape))
    assert torch.equal(c.isinf(), price.isinf())
    inside = x.isfinite() & r.isfinite().unsqueeze(-1) & c.isfinite().unsqueeze(-2)
    z = torch.where(inside, (x - r.nan_to_num().unsqueeze(-1) - c.nan_to_num().unsqueeze(-2)) / tau, 0)
    again = torch.where(inside, cdfs.resolve(cdf).cdf(z), y.double())
    torch.testing.assert_close(again, y.double(), rtol=0, atol=digits, equal_nan=True)
    k, capacity, y_, c_ = k[~lost], capacity[~lost], y[~lost].double(), c[~lost]
    n, m = y.shape[-1], y.shape[-2]
    assert ((y_.sum(-1) - k).abs() <= n * digits * k.clamp(min=1)).all()
    over = y_.sum(-2) - capacity
    assert (over <= m * digits * capacity.clamp(min=1)).all()
    met = over.abs() <= m * digits * capacity.clamp(min=1)
    assert (met | (c_ == 0) if at_most else met).all()
    if at_most:
        assert (c_ >= 0).all()
    return y, r, c


@pytest.mark.parametrize("cdf", ["logistic", "laplace", "normal"])
@pytest.mark.parametrize("tau", [1.0, 3e-3])
def test_as_the_reference(kernels: ModuleType, cdf: str, tau: float) -> None:
    check(kernels, scores(6, 3), 1, tau=tau, cdf=cdf)


DECIDED = closed(closed(scores(6, 5, seed=8), (0, 1), (5,)), (2, 3), value=INF)
CASES: dict[str, dict[str, Any]] = {
    "one column": {"x": scores(4, 1), "k": vector(0.5, 0.2, 0.3, 0.4)},
    "one row": {"x": scores(1, 4), "k": 2, "capacity": vector(0.1, 0.9, 0.6, 0.4)},
    "ties": {"x": torch.zeros(6, 4).double(), "k": 1, "tau": 0.1},
    "tied in part": {"x": scores(1, 4).expand(6, 4), "k": 1.5, "tau": 0.1},
    "nothing": {"x": scores(4, 3), "k": 0},
    "everything": {"x": scores(4, 3), "k": 3},
    "empty and full columns": {"x": scores(6, 4), "k": 2, "capacity": vector(6, 0, 2.5, 3.5)},
    "decided": {"x": DECIDED, "k": vector(2, 1.5, 2, 5, 0, 0), "capacity": vector(1.5, 1, 2, 3, 3)},
    "masked": {"x": closed(scores(6, 3), (0, 0), (3, 2)), "k": 1.25},
    "no entry left": {"x": closed(scores(5, 3), (1,)), "k": vector(1, 0, 1, 1, 1), "tau": 0.1},
    "a row decides a column": {
        "x": closed(scores(3, 3), (0, 0), (0, 1)), "k": vector(1, 1.2, 0.8), "capacity": vector(1, 1, 1),
    },
    "in thousands": {"x": scores(6, 3) + 1e3, "k": 1, "tau": 0.1},
    "huge": {"x": 1e60 * scores(6, 2), "k": 1, "tau": 0.5e60},
    "tiny": {"x": 1e-60 * scores(6, 2), "k": 1, "tau": 0.5e-60, "cdf": "normal"},
    "gaps": {"x": scores(5, 2), "k": 1, "capacity": vector(2, 3), "tau": 1e-6, "cdf": "normal"},
    "stairs": {
        "x": torch.tensor(
            [
                [-22.73, -1.77], [7.25, -31.35], [6.21, -10.34], [-5.67, -8.30],
                [-12.69, -6.56], [-8.90, 17.06], [0.01, -1.60], [1.41, -18.04],
            ]
        ).double(),
        "k": vector(1.1524, 0.1346, 0.1160, 0.5541, 0.2600, 1.3300, 0.5012, 0.4692),
        "capacity": vector(1.7548, 2.7627), "tau": 0.01,
    },
    "a guess": {"x": scores(6, 3), "k": 1, "tau": 0.1, "bias": vector(0.3, 0.8, 1.3)},
    "a bad guess": {"x": scores(6, 3), "k": 1, "tau": 0.5, "bias": vector(9, -40, 3)},
    "at most": {"x": scores(8, 4, seed=2), "k": 2, "capacity": 5.0, "tau": 0.3, "at_most": True},
    "at most, with room": {"x": scores(6, 4, seed=2), "k": 2, "capacity": 60.0, "at_most": True},
    "at most, no more": {"x": scores(6, 3, seed=2), "k": 1, "capacity": 2.0, "at_most": True},
    "at most, sharply": {"x": scores(6, 3, seed=2), "k": 1, "capacity": 2.5, "tau": 3e-3, "at_most": True},
    "float32": {"x": scores(6, 3).float(), "k": 1, "tau": 0.1},
    "bfloat16": {"x": scores(6, 3).bfloat16(), "k": 1, "tau": 0.1},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_hostile_matrices(kernels: ModuleType, name: str) -> None:
    y, _, _ = check(kernels, **CASES[name])
    assert not y.isnan().any()


@pytest.mark.parametrize("seed", range(8))
def test_full_columns_stay_full_where_sums_miss_one_another(kernels: ModuleType, seed: int) -> None:
    """By the rounding of float32, which columns take that are neither empty nor full; also beside entries
    that are infinite."""
    g = torch.Generator().manual_seed(seed)
    m, n = (int(torch.randint(3, 10, (), generator=g)) for _ in range(2))
    x, inside = torch.randn(m, n, generator=g).double(), 0.1 + 0.8 * torch.rand(m, n, generator=g).double()
    inside[:, 0], inside[:, 1] = 1, 0
    if seed % 2:
        x[0, 0], x[1, 2], inside[1, 2] = INF, -INF, 0
    k, capacity = inside.sum(-1).float(), inside.sum(-2).float()
    at_most = seed % 4 > 1
    arguments = given(x, k, capacity, 0.5, 0.0, at_most)
    y, _, _ = kernels.soft_assign(*arguments, "logistic", 0.0, at_most, "")
    want, _, _ = reference.soft_assign(*arguments, "logistic", 0.0, at_most, "")
    torch.testing.assert_close(y, want, rtol=0, atol=1e-12)
    assert bool((y[:, 0] == 1).all()) and bool((y[:, 1] == 0).all())


def test_bad_matrices_are_nan_alone(kernels: ModuleType) -> None:
    good = scores(9, 4, 3)
    x, k, capacity = good.clone(), torch.ones(9, 4).double(), torch.full((9, 3), 4 / 3).double()
    tau, bias = torch.full((9, 1), 0.5).double(), torch.zeros(9, 3).double()
    x[1, 2, 1] = math.nan
    k[2, 0] = -1
    k[3, 0] = math.nan
    capacity[4] = 1.5  # another sum than that of the rows
    capacity[5] = vector(-1, 2.5, 2.5)
    tau[6] = 0
    bias[7, 1] = INF
    x[8, :3, :2] = -INF  # three rows have a single column, which has room for less
    y, _, _ = check(kernels, x, k, capacity, tau, bias=bias)
    assert y[1:].isnan().all() and not y[0].isnan().any()


def test_layouts_and_batches(kernels: ModuleType) -> None:
    base = scores(4, 10)
    tau = vector(0.5, 2.0).unsqueeze(-1)
    check(kernels, base.T[::2], 1, tau=2.0)
    check(kernels, base[:3, ::3].unsqueeze(1).expand(3, 2, 4).movedim(1, 0), 2, tau=tau)
    for shape in ((0, 4, 3), (2, 0, 3), (2, 4, 0)):
        x = torch.empty(shape)
        arguments = given(x, 0, 0, 1.0, 0.0, False)
        y, r, c = kernels.soft_assign(*arguments, "logistic", 0.0, False, "")
        assert y.shape == shape and r.shape == shape[:2] and c.shape == (shape[0], shape[2])


def test_many_blocks(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.assign_whole, "TILE", 64)
    monkeypatch.setattr(kernels.assign_whole, "BLOCK", 16)
    monkeypatch.setattr(kernels.assign_whole, "DEPTH", 16)
    check(kernels, closed(scores(9, 17), (3, 2), (8,)), vector(*[3.0] * 8, 0), tau=4.0)


@pytest.mark.parametrize("at_most", [False, True])
def test_derivatives(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, at_most: bool) -> None:
    """The rule stands on the kernel's thresholds, in both modes, and mapped over a batch."""
    x, weight = scores(2, 3, 2), scores(2, 3, 2, seed=1)
    capacity = 2.0 if at_most else None

    def value(x: Tensor, weight: Tensor) -> Tensor:
        return (weight * khot.soft_assign(x, 1, capacity, tau=0.7, at_most=at_most)).sum()

    def both() -> tuple[Tensor, Tensor]:
        _, along = torch.func.jvp(lambda x: value(x, weight[0]), (x[0],), (weight[1],))
        return torch.func.vmap(torch.func.grad(value))(x, weight), along

    want = both()
    monkeypatch.setattr(OPERATORS["soft_assign"], "compute", kernels.soft_assign)
    torch.testing.assert_close(both(), want, rtol=0, atol=1e-11)


def resting() -> Tensor:
    """Rows of which two in five have a gap of 1.4 to 1.5. At τ = 0.001 their thresholds rest there, where the
    sums of densities of some are so small that the inverse overflows."""
    gaps = torch.linspace(1.4, 1.5, 20).double()[:, None] * vector(0.5, -0.5, 0.5, -0.5)
    gaps[::2] *= -1
    return torch.cat([gaps + 0.05 * scores(20, 4), scores(30, 4, seed=4)])


STEPS: dict[str, dict[str, Any]] = {
    "one way": {},
    "sharp": {"tau": 1e-3},
    "normal": {"cdf": "normal", "tau": 0.1},
    "laplace": {"cdf": "laplace", "tau": 0.03},
    "at most": {"capacity": 5.5, "tau": 0.1, "at_most": True},
    "at most, no more": {"capacity": 5.0, "tau": 0.1, "at_most": True},
    "unequal": {"k": 20 / 12, "capacity": vector(8, 1, 0.25, 5.75, 3, 2), "tau": 0.1},
    "a guess": {"tau": 0.1, "bias": torch.linspace(0, 2, 6).double()},
    "a bad guess": {"tau": 0.1, "bias": 5 * scores(6)},
    "masked": {
        "x": closed(scores(12, 6, seed=4), (0, 0), (5,), (7, 3)), "k": vector(*[1.5] * 5, 0, *[2] * 6),
    },
    "parts": {"x": scores(150, 6, seed=4), "tau": 0.1},
    "rests": {"x": resting(), "tau": 1e-3},
    "several": {"x": scores(2, 70, 3, seed=4), "k": 1, "tau": vector(0.1, 2.0).unsqueeze(-1)},
}  # fmt: skip


@pytest.fixture
def taken(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One for each step that a matrix takes. There is no program of its own for what they leave."""
    find, steps = kernels.assign.variant, kernels.assign_steps
    found: list[None] = []

    def counting(kernel: Any, **constants: Any) -> Any:
        real = find(kernel, **constants)

        def step(programs: int, *given: Any) -> None:
            state, n = given[5].state, given[-4]
            if (state.view(-1, steps.NOTES + 3 * n)[:, steps.STATUS.value] == steps.OPEN.value).any():
                real(programs, *given)
                found.append(None)

        if kernel is kernels.assign_whole.solve_whole:
            return lambda *_: None
        return step if kernel is steps.step_assignments else real

    monkeypatch.setattr(kernels.assign, "variant", counting)
    return found


@pytest.mark.parametrize("way", ["a launch a step"], indirect=True)
@pytest.mark.parametrize("name", STEPS)
def test_steps_arrive_by_themselves(kernels: ModuleType, taken: list[None], name: str) -> None:
    """Matrices of which nothing is decided beforehand leave nothing to a program of their own."""
    y, _, _ = check(kernels, **{"x": scores(12, 6, seed=4), "k": 2} | STEPS[name])
    assert not y.isnan().any() and len(taken) <= kernels.assign.LAUNCHES


@pytest.mark.parametrize("way", ["a launch a step"], indirect=True)
def test_steps_of_many_sharp_rows(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, taken: list[None]
) -> None:
    """Of so many rows, some rest in gaps of any width. They need 10 steps."""
    monkeypatch.setattr(kernels.assign, "TILE", 1 << 12)  # the interpreter's time is that of the blocks
    monkeypatch.setattr(kernels.assign, "PROGRAMS", 2)
    x = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
    check(kernels, x, 2, tau=1e-3)
    assert len(taken) <= 12


@pytest.mark.parametrize("way", ["a launch a step"], indirect=True)
@pytest.mark.parametrize("cdf", ["logistic", "laplace", "normal"])
@pytest.mark.parametrize("at_most", [False, True])
@pytest.mark.parametrize("asked", [False, True], ids=["y", "y, r and c"])
def test_backward_as_the_rule(kernels: ModuleType, cdf: str, at_most: bool, asked: bool) -> None:
    """In all results; with closed entries, decided rows, and a matrix without a solution."""
    x = scores(3, 40, 5, seed=6)
    x[0, :3, 1], x[1, 0], x[2, 0, 0] = -INF, -INF, math.nan
    k = torch.full((3, 40), 1.5).double()
    k[1, 0], k[1, 1] = 0, 5
    given_ = given(x, k, k.sum(-1, keepdim=True) / (4 if at_most else 5), 0.4, 0.0, at_most)
    y, r, c = reference.soft_assign(*given_, cdf, 0.0, at_most, "")
    assert y[:2].isfinite().all() and y[2].isnan().all()
    grads: list[Tensor | None] = [scores(3, 40, 5, seed=7), None, None]
    if asked:
        by_row, by_column = scores(3, 40, seed=8), scores(3, 5, seed=9)
        if not at_most:  # r + δ and c − δ are the same solution, so that only this has a gradient
            moving = by_row * r.isfinite()
            by_column += (moving.sum(-1, keepdim=True) - by_column.sum(-1, keepdim=True)) / 5
        grads[1:] = by_row, by_column
    rest = (x, given_[3], r, c, cdf, 0.0, at_most)
    got = kernels.soft_assign_backward(*grads, *rest)
    want = OPERATORS["soft_assign_backward"].kernel(*grads, *rest)
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10, equal_nan=True)
    assert got[0][2].isnan().all() and got[0][:2].isfinite().all()
    half = kernels.soft_assign_backward(*grads, x.bfloat16(), *rest[1:])
    assert half[0].dtype == torch.bfloat16 and half[1].dtype == torch.float64


@pytest.mark.parametrize("way", ["a launch a step"], indirect=True)
def test_backward_of_what_moves_nothing(kernels: ModuleType) -> None:
    """Decided rows, gaps, expanded gradients, and no entries."""
    for x, k in ((scores(4, 3), 0), (scores(4, 3), 3), (torch.empty(0, 4, 3).double(), 1)):
        arguments = given(x, k, 0 if not x.numel() else None, 1.0, 0.0, False)
        _, r, c = reference.soft_assign(*arguments, "logistic", 0.0, False, "")
        one = torch.ones((), dtype=torch.float64).expand(x.shape)
        found = kernels.soft_assign_backward(one, None, None, x, arguments[3], r, c, "logistic", 0.0, False)
        for grad in found:
            assert not grad.any()


def test_what_the_reference_serves(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices that would take one program too long, and CDFs of the user's own."""
    monkeypatch.setattr(kernels.assign, "variant", lambda *_, **__: pytest.fail("was launched"))
    monkeypatch.setattr(kernels.assign, "ENTRIES", 20)
    for x in (scores(2, 257), scores(7, 3)):
        arguments = given(x, 1, None, 10.0, 0.0, False)
        y, _, _ = kernels.soft_assign(*arguments, "logistic", 0.0, False, "")
        torch.testing.assert_close(y.sum(-1), torch.ones(len(x)).double())
