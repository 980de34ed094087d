"""The two-sided selection, against programmes, other packages, and its own equations."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import khot
import processes
import shards
from khot._kernels.reference import soft_assign as solver

CDFS = ("logistic", "laplace", "normal")
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}


def scores(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=g, dtype=torch.float64) + torch.linspace(0, 2, shape[-1]).double()
    return x.to(dtype)


def assert_sums(y: Tensor, k: Any, capacity: Any, tolerance: float) -> None:
    wide = y.double()
    k, capacity = (torch.as_tensor(v, dtype=torch.float64) for v in (k, capacity))
    assert bool(((wide.sum(-1) - k).abs() <= tolerance * k.clamp(min=1)).all())
    assert bool(((wide.sum(-2) - capacity).abs() <= tolerance * capacity).all())


# ------------------------------------------------------------------------------------------ values


@pytest.mark.parametrize("cdf", CDFS)
@pytest.mark.parametrize("tau", [3.0, 0.1, 0.01])
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_sums_of_rows_and_columns(dtype: torch.dtype, tau: float, cdf: str) -> None:
    y = khot.soft_assign(scores(60, 6, dtype=dtype), 2, tau=tau, cdf=cdf)
    assert y.dtype == dtype
    assert bool(((y >= 0) & (y <= 1)).all())
    assert_sums(y, 2.0, 20.0, ROUNDING[dtype])


def test_capacities_in_half_precision_miss_the_sum_by_rounding() -> None:
    x = scores(40, 3)
    shares = torch.full((3,), 1 / 3, dtype=torch.float64)
    for dtype in (torch.float16, torch.bfloat16):
        capacity = (40 * 1.3 * shares).to(dtype).requires_grad_()
        assert (capacity.double().sum() - 40 * 1.3).abs() > 1e-3
        y = khot.soft_assign(x, 1.3, capacity, tau=0.3)
        assert_sums(y, 1.3, capacity.double() * (40 * 1.3 / capacity.double().sum()), 1e-11)
        (grad,) = torch.autograd.grad(y[0, 0], capacity)
        assert grad.dtype == dtype and bool(grad.isfinite().all())
        k = torch.full((40,), 0.3, dtype=dtype)
        assert_sums(khot.soft_assign(x, k, 12 * shares, tau=0.3), k, k.double().sum() * shares, 1e-11)
        full = khot.soft_assign(x, 1.3, capacity, tau=0.3, at_most=True)
        assert bool((full.sum(-1) - 1.3).abs().max() < 1e-11)
        with pytest.raises(ValueError, match=r"^capacity must have a sum that is the same as that of k, 52"):
            khot.soft_assign(x, 1.3, capacity * 1.02)


def test_own_capacities_fractional_k_and_batches() -> None:
    x, k = scores(2, 3, 8, 4), torch.tensor([1.5, 2.0, 0.25]).double()
    share = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    capacity = 8 * k.unsqueeze(-1) * share
    tau = torch.tensor([[0.5], [2.0]]).double()
    y = khot.soft_assign(x, k.unsqueeze(-1), capacity, tau=tau)
    assert_sums(y, k.unsqueeze(-1), capacity, 1e-12)
    for i, j in itertools.product(range(2), range(3)):
        alone = khot.soft_assign(x[i, j], k[j], capacity[j], tau=tau[i, 0])
        torch.testing.assert_close(y[i, j], alone, rtol=0, atol=1e-12)


def test_bias_gives_the_rows_and_does_not_change_the_result() -> None:
    x = scores(30, 5)
    y, bias = khot.soft_assign(x, 2, tau=0.1, return_bias=True)
    torch.testing.assert_close(y, khot.soft_topk(x + bias, 2, tau=0.1), rtol=0, atol=1e-10)
    assert abs(bias.mean().item()) < 1e-12
    for guess in (bias, bias + 3, -10 * bias, torch.zeros(1)):
        torch.testing.assert_close(khot.soft_assign(x, 2, tau=0.1, bias=guess), y, rtol=0, atol=1e-10)


def test_masks() -> None:
    x = scores(12, 4)
    mask = torch.ones(12, 4, dtype=torch.bool)
    mask[0, 0] = mask[3, 2] = False
    mask[5] = False  # a row that takes no part
    y = khot.soft_assign(x.masked_fill(~mask, float("nan")), 2, tau=0.3, mask=mask)
    assert bool((y[~mask] == 0).all())
    assert_sums(y, 2.0 * mask.any(-1), 5.5, 1e-12)
    minus = khot.soft_assign(x.masked_fill(~mask, -torch.inf), 2, tau=0.3)
    assert torch.equal(y, minus)


def test_empty_and_full_columns_and_rows() -> None:
    x = scores(6, 4)
    capacity = torch.tensor([6.0, 0.0, 2.5, 3.5]).double()
    y, bias = khot.soft_assign(x, 2, capacity, tau=0.3, return_bias=True)
    assert_sums(y, 2.0, capacity, 1e-12)
    assert bias[0] == torch.inf
    assert bias[1] == -torch.inf
    assert torch.equal(khot.soft_assign(x, 4), torch.ones_like(x))
    assert torch.equal(khot.soft_assign(x, 0), torch.zeros_like(x))
    assert khot.soft_assign(x[:0], 2).shape == (0, 4)
    assert khot.soft_assign(x.expand(0, 6, 4), 2).shape == (0, 6, 4)


@pytest.mark.parametrize("shape", [(3, 0), (2, 3, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("at_most", [False, True])
def test_no_columns(at_most: bool, shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    tau = torch.full(shape[:-2], 0.5, dtype=torch.float64, requires_grad=True)
    capacity = 1 if at_most else None
    y, bias = khot.soft_assign(x, 0, capacity, tau=tau, at_most=at_most, return_bias=True)
    assert y.shape == shape and bias.shape == (*shape[:-2], 0)
    y.sum().backward()
    assert x.grad.shape == shape and (tau.grad == 0).all()
    with pytest.raises(ValueError, match=r"^k must lie in \[0, 0\], but got 1"):
        khot.soft_assign(x, 1)


@pytest.mark.parametrize("at_most", [False, True])
def test_the_derivatives_of_a_matrix_with_nan_are_nan(at_most: bool) -> None:
    x, k, capacity = scores(2, 6, 4), torch.full((2, 6), 2.0).double(), torch.full((2, 4), 3.0).double()
    tau = torch.tensor([0.5, 0.7]).double()
    weight = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(3)).double()
    capacity = capacity + at_most

    def gradients(*inputs: torch.Tensor) -> list[torch.Tensor]:
        leaves = [v.clone().requires_grad_() for v in inputs]
        y = khot.soft_assign(*leaves[:3], tau=leaves[3], at_most=at_most)
        return list(torch.autograd.grad((y * weight[-len(y) :]).sum(), leaves))

    alone = gradients(x[1:], k[1:], capacity[1:], tau[1:])
    x[0, 1, 2] = float("nan")
    for both, one in zip(gradients(x, k, capacity, tau), alone, strict=True):
        assert bool(both[0].isnan().all())
        torch.testing.assert_close(both[1:], one, rtol=0, atol=1e-12)
    _, along = torch.func.jvp(
        lambda x: khot.soft_assign(x, k, capacity, tau=tau, at_most=at_most), (x,), (weight,)
    )
    assert bool(along[0].isnan().all())
    assert bool(along[1].isfinite().all())


# ------------------------------------------------------------------------------------ derivatives


@pytest.mark.parametrize("at_most", [False, True])
@pytest.mark.parametrize("cdf", ["logistic", "normal"])
def test_derivatives_to_second_order(cdf: str, at_most: bool) -> None:
    x = scores(2, 5, 3).requires_grad_()
    tau = torch.tensor(0.7).double().requires_grad_()
    k = torch.tensor(1.25).double().requires_grad_()

    def call(x: Tensor, k: Tensor, tau: Tensor) -> Any:
        capacity = 2.5 if at_most else None
        return khot.soft_assign(x, k, capacity, tau=tau, cdf=cdf, at_most=at_most, return_bias=True)[0]

    assert torch.autograd.gradcheck(call, (x, k, tau), check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, (x, k, tau), fast_mode=True)


@pytest.mark.parametrize("gap", [5.0, 14.0, 16.0, 40.0])
def test_derivatives_of_parts_that_are_nearly_separate(gap: float) -> None:
    """What links the parts is a share of e^−gap/τ, which rounding reaches from gap = 18 on."""
    x, weights = scores(6, 4), scores(6, 4, seed=1)
    x[:3, 2:] -= gap
    x[3:, :2] -= gap
    x.requires_grad_()

    def call(x: Tensor) -> Tensor:
        return khot.soft_assign(x, 1.5, tau=0.5)

    (dx,) = torch.autograd.grad((weights * call(x)).sum(), x)
    assert dx.sum(-1).abs().max() <= 1e-14 and dx.sum(-2).abs().max() <= 1e-14
    assert torch.autograd.gradcheck(call, x)
    assert torch.autograd.gradgradcheck(call, x, weights, fast_mode=True)


@pytest.mark.parametrize("cdf", CDFS)
def test_gradients_where_columns_hardly_move(cdf: str) -> None:
    for tau in (1e-3, 3e-4, 1e-4):
        x = scores(40, 6).requires_grad_()
        (dx,) = torch.autograd.grad(
            (scores(40, 6, seed=1) * khot.soft_assign(x, 2, tau=tau, cdf=cdf)).sum(), x
        )
        assert dx.sum(-1).abs().max() <= 1e-14 / tau and dx.sum(-2).abs().max() <= 1e-14 / tau


def test_derivative_in_the_capacity() -> None:
    x = scores(5, 3)
    base = torch.tensor([2.0, 1.0, 3.25]).double()

    def call(moved: Tensor) -> Any:  # along the capacities with the same sum
        capacity = base + moved - moved.mean()
        return khot.soft_assign(x, 1.25, capacity, tau=0.5, return_bias=True)

    assert torch.autograd.gradcheck(call, torch.zeros(3).double().requires_grad_(), check_forward_ad=True)


def test_gradients_with_empty_full_and_masked() -> None:
    x = scores(6, 4)
    x[2, 3] = -torch.inf
    capacity = torch.tensor([6.0, 0.0, 2.5, 3.5]).double()
    weights = scores(6, 4, seed=1)
    leaf = x.clone().requires_grad_()
    (weights * khot.soft_assign(leaf, 2, capacity, tau=0.5)).sum().backward()
    assert leaf.grad is not None
    assert bool(leaf.grad.isfinite().all())
    step = 1e-6
    for place in ((1, 2), (4, 3), (2, 3), (0, 0), (3, 1)):
        up, down = x.clone(), x.clone()
        up[place] += step
        down[place] -= step
        sides = [(weights * khot.soft_assign(v, 2, capacity, tau=0.5)).sum() for v in (up, down)]
        assert abs((sides[0] - sides[1]).item() / (2 * step) - leaf.grad[place].item()) < 1e-7


# ---------------------------------------------------------------------------------------- bad input

X = scores(6, 4)
BAD: list[tuple[str, type[Exception], str, dict[str, Any]]] = [
    ("one dim", ValueError, "input", {"input": X[0]}),
    ("k above the mask", ValueError, "k", {"mask": torch.tensor([True, False, False, False])}),
    ("sum of capacity", ValueError, "capacity", {"capacity": 3.1}),
    ("sum of capacity, too little", ValueError, "capacity", {"capacity": 2.9, "at_most": True}),
    ("capacity too large", ValueError, "capacity", {"capacity": torch.tensor([7.0, 1.0, 2.0, 2.0])}),
    ("capacity negative", ValueError, "capacity", {"capacity": torch.tensor([-1.0, 5.0, 4.0, 4.0])}),
    ("capacity of another width", ValueError, "capacity", {"capacity": torch.ones(3)}),
    ("bias of another width", ValueError, "bias", {"bias": torch.ones(3)}),
    ("bias of integers", TypeError, "bias", {"bias": torch.ones(4).long()}),
]


@pytest.mark.parametrize(("why", "error", "argument", "changed"), BAD, ids=[b[0] for b in BAD])
def test_bad_input(why: str, error: type[Exception], argument: str, changed: dict[str, Any]) -> None:
    with pytest.raises(error, match=f"^{argument} must "):
        khot.soft_assign(**{"input": X, "k": 2, **changed})


def test_a_mask_that_no_matrix_meets() -> None:
    mask = torch.ones(6, 4, dtype=torch.bool)
    mask[:4, :2] = False  # four rows have only two columns, which have room for six of their eight
    with pytest.raises(ValueError, match=r"^capacity must "):
        khot.soft_assign(X, 2, mask=mask)


# ------------------------------------------------------------------------------- sums of each row


@pytest.mark.parametrize("cdf", CDFS)
@pytest.mark.parametrize("tau", [1e3, 0.1, 1e-3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rows_with_sums_of_their_own(cdf: str, tau: float, dtype: torch.dtype) -> None:
    x = (scores(1, 60, 6) + 2 * scores(6, seed=1)).to(dtype)
    k = torch.linspace(0.5, 4.5, 60, dtype=torch.float64)
    capacity = torch.tensor([5.0, 15.0, 25.0, 30.0, 35.0, 40.0], dtype=torch.float64)
    y = khot.soft_assign(x, k, capacity, tau=tau, cdf=cdf)
    assert y.dtype == dtype and bool(((y >= 0) & (y <= 1)).all())
    tolerance = 1e-11 if dtype == torch.float64 else 1e-6
    assert ((y.double().sum(-1) - k).abs() / k).max() <= tolerance
    assert ((y.double().sum(-2) - capacity).abs() / capacity).max() <= tolerance


@pytest.mark.parametrize("cdf", CDFS)
@pytest.mark.parametrize("k", [1.0, 2.0, 2.5])
@pytest.mark.parametrize("tau", [1.0, 0.1, 0.01])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("room", [1.0, 1.02, 1.3])
def test_the_quick_way_gives_what_the_safe_way_does(
    room: float, masked: bool, tau: float, k: float, cdf: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = scores(600, 8, seed=4) + torch.linspace(0, 1, 8, dtype=torch.float64)
    if masked:
        x[::3, 2] = x[1::5, 6] = -math.inf  # a sample of every ninth row would lose column 2
    arrived, follow = [], solver.follow

    def watched(*args: Any) -> Any:
        arrived.append(follow(*args))
        return arrived[-1]

    def assign(bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        capacity = room * k * len(x) / 8
        return khot.soft_assign(
            x, k, capacity, tau=tau, cdf=cdf, at_most=room > 1, bias=bias, return_bias=True
        )

    monkeypatch.setattr(solver, "follow", watched)
    y, bias = assign()
    warm, _ = assign(bias)
    monkeypatch.setattr(solver, "follow", lambda *_: None)
    want, price = assign()
    assert arrived[1] is not None
    assert arrived[0] is not None or cdf != "logistic"
    torch.testing.assert_close(y, want, rtol=0, atol=1e-9)
    torch.testing.assert_close(warm, want, rtol=0, atol=1e-9)
    torch.testing.assert_close(bias, price, rtol=0, atol=1e-9)


def test_the_safe_way_passes_stairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums that rise in steps many τ apart: where the stage before ended with an error of 1e-3, it was on the
    wrong one, and no step led off it."""
    x = torch.tensor(
        [
            [-22.73, -1.77], [7.25, -31.35], [6.21, -10.34], [-5.67, -8.30],
            [-12.69, -6.56], [-8.90, 17.06], [0.01, -1.60], [1.41, -18.04],
        ], dtype=torch.float64,
    )  # fmt: skip
    k = torch.tensor([1.1524, 0.1346, 0.1160, 0.5541, 0.2600, 1.3300, 0.5012, 0.4692], dtype=torch.float64)
    capacity = torch.tensor([1.7548, 2.7627], dtype=torch.float64)
    quick = khot.soft_assign(x, k, capacity * k.sum() / capacity.sum(), tau=0.01)
    monkeypatch.setattr(solver, "follow", lambda *_: None)
    safe = khot.soft_assign(x, k, capacity * k.sum() / capacity.sum(), tau=0.01)
    torch.testing.assert_close(safe, quick, rtol=0, atol=1e-9)


@pytest.mark.parametrize("size", [1e-30, 1e30, 1e60])
def test_scores_beyond_float32(size: float) -> None:
    x = scores(64, 2)
    want = khot.soft_assign(x, 1, tau=0.5)
    torch.testing.assert_close(khot.soft_assign(size * x, 1, tau=0.5 * size), want, rtol=0, atol=1e-9)


def test_gradients_with_decided_rows_and_columns() -> None:
    x = scores(6, 5, seed=8)
    x[0, 1], x[2, 3], x[5] = -math.inf, math.inf, -math.inf
    finite = x.isfinite()
    k = torch.tensor([2.0, 1.5, 2.0, 5.0, 0.0, 0.0], dtype=torch.float64)
    capacity = torch.tensor([1.5, 1.0, 2.0, 3.0, 3.0], dtype=torch.float64)

    def call(values: Tensor) -> Tensor:
        return khot.soft_assign(torch.where(finite, values, x), k, capacity, tau=0.7)

    y = call(x)
    assert y[2, 3] == 1 and y[0, 1] == 0 and bool((y[3] == 1).all()) and bool((y[4:] == 0).all())
    assert torch.allclose(y.sum(-1), k, atol=1e-12) and torch.allclose(y.sum(0), capacity, atol=1e-12)
    values = x.masked_fill(~finite, 0).requires_grad_()
    assert torch.autograd.gradcheck(call, values, check_forward_ad=True)


# ------------------------------------------------------------------------------------------- shards


@pytest.mark.parametrize(
    ("special", "at_most", "cuts"),
    [(False, False, [0, 4, 9]), (False, True, [0, 0, 9]), (True, False, [0, 0, 9]), (True, True, [0, 4, 9])],
)
def test_rows_over_processes(special: bool, at_most: bool, cuts: list[int]) -> None:
    x, k = scores(2, 9, 4, seed=9), torch.linspace(0.5, 2.5, 18, dtype=torch.float64).view(2, 9)
    capacity = k.sum(-1, keepdim=True) * torch.tensor([0.1, 0.2, 0.3, 0.4]).double()
    if special:
        x[0, 2], x[0, 5, 1], x[0, 6, 3], k[0, 2], k[1, 4], k[1, 7] = -math.inf, math.inf, -math.inf, 0, 0, 4
        capacity = k.sum(-1, keepdim=True) * torch.tensor([0.2, 0.25, 0.25, 0.3]).double()
    capacity = capacity * (1.1 if at_most else 1)
    args = [x, k, capacity, torch.tensor([0.3, 1.0]).double()]
    weights = scores(2, 9, 4, seed=10)
    options = {"at_most": at_most}
    shards.assert_like_whole_rows(2, "soft_assign", options, args, weights, cuts)


def test_rows_over_processes_have_equal_columns_by_default_and_masks() -> None:
    x, mask = scores(30, 5, seed=11), scores(30, 5, seed=12) > -1
    options = {"tau": 0.1, "mask": mask}
    parts = processes.run(2, shards.rows_assigned, x, 2, options, [0, 13, 30])
    torch.testing.assert_close(torch.cat(parts), khot.soft_assign(x, 2, **options), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("why", "changed"),
    [
        ("all processes of group must pass the same arguments", [{"tau": 0.1}, {"tau": 0.2}]),
        ("capacity must have a sum that is the same as that of k, 8", [{"capacity": 4.0}] * 2),
        ("k must lie in", [{"k": 4.0}, {}]),
        (
            "but got 2.6666666666666665 for a column with 0",
            [{"mask": torch.tensor([True, True, False]), "capacity": 8 / 3}] * 2,
        ),
    ],
)
def test_bad_input_over_processes(why: str, changed: list[dict[str, Any]]) -> None:
    """Each process has an error: none waits for another."""
    calls = [((), {"input": scores(4, 3), "k": 1.0, "tau": 0.1, **one}) for one in changed]
    for message in processes.run(2, shards.failure, "soft_assign", calls):
        assert message.startswith("ValueError") and why in message


@pytest.mark.parametrize("tau", [1e-3, 1e-2, 0.1])
@pytest.mark.parametrize(("shape", "k"), [((64, 64), 2), ((40, 10), 2), ((200, 16), 1)])
def test_gradients_are_no_longer_than_what_is_projected(shape: tuple[int, int], k: int, tau: float) -> None:
    """√f (v − a − b) is a projection of √f v. At small tau the densities of some columns are below 1e-100."""
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        x, v = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
        y = khot.soft_assign(x.requires_grad_(), k, tau=tau)
        (grad,) = torch.autograd.grad(y, x, v)
        f = (y * (1 - y)).detach()  # of the logistic CDF, times tau
        bound = (f * (f * v.square()).sum()).sqrt() / tau
        assert (grad.abs() <= bound + 1e-6 * bound.max()).all()
