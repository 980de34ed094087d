"""Thresholds in a gap of compact support: t is the middle of the gap and moves with the entries beside it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.autograd import grad

import khot
import processes
import shards
from khot import cdfs
from khot._kernels.reference import soft_topk as reference


class Bump(cdfs.CDF):
    """A user's CDF whose support is neither (0, 1) nor centred."""

    name = "bump"
    support = (-1.0, 2.0)
    median = 0.5

    def cdf(self, z: Tensor) -> Tensor:
        u = ((z + 1) / 3).clamp(0, 1)
        return u * u * (3 - 2 * u)

    def pdf(self, z: Tensor) -> Tensor:
        u = ((z + 1) / 3).clamp(0, 1)
        return 2 * u * (1 - u)


BUMP = Bump()
CDFS = {"uniform": "uniform", "power 4/3": cdfs.Power(4 / 3), "power 1.5": cdfs.Power(1.5), "bump": BUMP}
every_cdf = pytest.mark.parametrize("cdf", CDFS.values(), ids=CDFS)

BUILT_IN = [("uniform", 2.0), ("power", 4 / 3), ("power", 1.5)]
TAU = 0.01
X = torch.tensor([[0.0, 6.0, 1.0, 2.0], [4.0, -3.0, 0.5, -1.0]], dtype=torch.float64)

# functions of (x, tau, cdf) with a threshold in a gap
FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "soft_median": lambda x, tau, cdf: khot.soft_median(x, tau=tau, cdf=cdf),
    "soft_quantile": lambda x, tau, cdf: khot.soft_quantile(
        torch.cat((x, x[:, :1] - 17), -1), torch.arange(1.0, 8, 2).double() / 8, tau=tau, cdf=cdf
    ),
    "soft_quantile, along dim 0": lambda x, tau, cdf: khot.soft_quantile(x.mT, 0.5, 0, tau=tau, cdf=cdf),
    "soft_median, with a mask": lambda x, tau, cdf: khot.soft_median(
        torch.cat((x, x + 0.3), -1), tau=tau, cdf=cdf, mask=torch.arange(8) < 4
    ),
    "inverse_soft_count": lambda x, tau, cdf: khot.inverse_soft_count(x, 1, tau=tau, cdf=cdf),
    "inverse_soft_count, several levels": lambda x, tau, cdf: khot.inverse_soft_count(
        x, torch.tensor([[1.0, 2.0, 3.0, 0.5]], dtype=torch.float64), tau=tau, cdf=cdf
    ),
    "inverse_soft_count, with infinite scores": lambda x, tau, cdf: khot.inverse_soft_count(
        torch.cat((x, x.new_tensor([[math.inf, -math.inf]] * 2)), -1), 3, tau=tau, cdf=cdf
    ),
    "soft_sort": lambda x, tau, cdf: khot.soft_sort(x, tau=tau, cdf=cdf),
    "soft_permutation": lambda x, tau, cdf: khot.soft_permutation(x, tau=tau, cdf=cdf),
    "soft_topk": lambda x, tau, cdf: khot.soft_topk(x, 2, tau=tau, cdf=cdf),
    "log_soft_topk": lambda x, tau, cdf: khot.log_soft_topk(x, 2, tau=tau, cdf=cdf).exp(),
}
THRESHOLDS = {name: f for name, f in FUNCTIONS.items() if "median" in name or "count" in name}


def leaves() -> tuple[Tensor, Tensor]:
    return X.clone().requires_grad_(), torch.tensor([TAU, 2 * TAU], dtype=torch.float64).requires_grad_()


def differences(f: Callable[[Tensor, Tensor], Tensor], x: Tensor, tau: Tensor) -> Tensor:
    """The Jacobian by central differences; the thresholds are linear in x and τ while the gap is wide."""
    columns = []
    step = 1e-3 * TAU
    for leaf in (0, 1):
        for i in range((x, tau)[leaf].numel()):
            values = []
            for sign in (1, -1):
                moved = [x.detach().clone(), tau.detach().clone()]
                moved[leaf].view(-1)[i] += sign * step
                values.append(f(*moved))
            columns.append((values[0] - values[1]) / (2 * step))
    return torch.stack(columns, -1)


def stacked(parts: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
    """The Jacobians in x and τ, beside each other."""
    return torch.cat([part.reshape(*shape, -1) for part in parts], -1)


# every function with one CDF, and every CDF with functions of one threshold, of several, and of y
@pytest.mark.parametrize(
    ("f", "cdf"),
    [
        pytest.param(f, cdf, id=f"{name}-{of}")
        for name, f in FUNCTIONS.items()
        for of, cdf in CDFS.items()
        if of == "uniform" or name in ("soft_median", "inverse_soft_count, several levels", "soft_topk")
    ],
)
def test_every_mode_agrees_with_finite_differences(f: Callable[..., Tensor], cdf: Any) -> None:
    def g(x: Tensor, tau: Tensor) -> Tensor:
        return f(x, tau, cdf)

    x, tau = leaves()
    want = differences(g, x, tau)
    shape = g(x, tau).shape
    modes = {
        "reverse": torch.autograd.functional.jacobian(g, (x, tau)),
        "recorded": torch.autograd.functional.jacobian(g, (x, tau), create_graph=True),
        "forward": torch.func.jacfwd(g, (0, 1))(x.detach(), tau.detach()),
        "vmapped": torch.func.jacrev(g, (0, 1))(x.detach(), tau.detach()),
    }
    for parts in modes.values():
        torch.testing.assert_close(stacked(parts, shape), want, rtol=1e-7, atol=1e-7)


@every_cdf
@pytest.mark.parametrize("f", THRESHOLDS.values(), ids=THRESHOLDS)
def test_second_derivatives_are_0(f: Callable[..., Tensor], cdf: Any) -> None:
    x, tau = leaves()
    t = f(x, tau, cdf)[..., :3].sum(0)
    if t.dim() and t.shape[-1] == 4:
        t = t[:3]  # the fourth level lies in no gap
    first = torch.autograd.grad((t * torch.arange(1.0, 1 + t.numel())).sum(), (x, tau), create_graph=True)
    assert first[0].abs().sum() > 0
    outer = sum((g * torch.randn_like(g)).sum() for g in first)
    if outer.requires_grad:
        second = torch.autograd.grad(outer, (x, tau), allow_unused=True, materialize_grads=True)
        assert all((g == 0).all() for g in second)


def test_the_values_of_the_median() -> None:
    x = torch.tensor([0.0, 1.0, 2.0, 6.0], requires_grad=True)
    khot.soft_median(x, tau=0.01, cdf="uniform").backward()
    assert x.grad is not None and x.grad.tolist() == [0, 0.5, 0.5, 0]


@every_cdf
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_dtype_and_ties(dtype: torch.dtype, cdf: Any) -> None:
    """Equal entries next to the gap share its half equally."""
    x = torch.tensor([0.0, 2.0, 2.0, 5.0, 0.0, 0.0, -4.0], dtype=dtype).requires_grad_()
    t = khot.inverse_soft_count(x, 3, tau=TAU, cdf=cdf)
    (grad,) = torch.autograd.grad(t, x)
    assert grad.dtype == dtype
    want = torch.tensor([1 / 6, 0.25, 0.25, 0.0, 1 / 6, 1 / 6, 0.0], dtype=dtype)
    torch.testing.assert_close(grad, want)
    _, along = torch.func.jvp(
        lambda x: khot.inverse_soft_count(x, 3, tau=TAU, cdf=cdf), (x.detach(),), (torch.ones_like(x),)
    )
    torch.testing.assert_close(along, torch.ones_like(t))


@pytest.mark.parametrize(("cdf", "shape"), BUILT_IN)
@pytest.mark.parametrize("output", ["y", "log", "threshold"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_the_compiled_kernels_agree_with_the_reference(
    dtype: torch.dtype, output: str, cdf: str, shape: float
) -> None:
    """With gradients in the output and in t, for rows with and without gaps, short and long ones."""
    generator = torch.Generator().manual_seed(0)
    for n in (3, 37, 1000):
        x = (torch.arange(float(n)).expand(40, n) // 2).to(dtype)  # pairs of equal entries
        x = x.gather(-1, torch.rand(40, n, generator=generator).argsort(-1))
        k = torch.arange(40.0, dtype=torch.float64) % (n + 1)
        k[::5] -= 0.5 * (k[::5] > 0)
        tau = torch.full((40,), 0.5, dtype=torch.float64)
        _, hi, lo = torch.ops.khot.soft_topk(x, k, tau, cdf, shape, output)
        v = torch.randn(40, n if output != "threshold" else 0, generator=generator).to(dtype)
        w = torch.randn(40, generator=generator, dtype=torch.float64)
        args = (w, x, hi, lo, tau, cdf, shape, output)
        got = torch.ops.khot.soft_topk_backward(v, *args)
        want = reference.soft_topk_backward(v.double(), w, x.double(), *args[2:])
        tolerance = 1e-9 if dtype == torch.float64 else 1e-4
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)


def gradients(group: Any, x: Tensor, k: Tensor, cdf: Any, cuts: list[int]) -> list[Tensor]:
    """Gradients of t in a shard of x and in τ, in reverse, recorded and forward mode."""
    from khot._core import rows
    from khot._ops.soft_topk import threshold_map

    row = rows.HERE if group is None else rows.named(group)
    F = cdfs.resolve(cdf)
    x = (x if group is None else shards.shard(x, cuts, group.rank(), x.shape[-1])).requires_grad_()
    tau = torch.full_like(k, TAU).requires_grad_()

    def t(x: Tensor, tau: Tensor) -> Tensor:
        return threshold_map(x, k, tau, F, "threshold", row)[2]

    weights = torch.arange(1.0, 1 + k.numel(), dtype=torch.float64)
    first = torch.autograd.grad((t(x, tau) * weights).sum(), (x, tau))
    recorded = torch.autograd.grad((t(x, tau) * weights).sum(), (x, tau), create_graph=True)
    along = torch.autograd.forward_ad
    with along.dual_level():
        dual = t(
            along.make_dual(x.detach(), x.detach().sin()), along.make_dual(tau.detach(), 1 + tau.detach())
        )
        tangent = along.unpack_dual(dual).tangent
    return [v.detach() for v in (*first, *recorded, tangent)]


@pytest.mark.parametrize("cdf", ["uniform", cdfs.Power(4 / 3)], ids=str)
def test_shards(cdf: Any) -> None:
    """The entries next to the gap lie on different processes, and one process has none at all."""
    x = torch.tensor([[0.0, 2, 1, 1, 6, -math.inf, 2], [3.0, 9, 8, 7, 1, 0, math.inf]], dtype=torch.float64)
    k = torch.tensor([3.0, 5.0], dtype=torch.float64)
    want = gradients(None, x.clone(), k, cdf, [])
    assert want[0][0].tolist() == pytest.approx([0, 0.25, 0.25, 0.25, 0, 0, 0.25])
    parts = processes.run(3, gradients, x, k, cdf, [0, 3, 3, 7])
    for shares, whole in zip(zip(*parts, strict=True), want, strict=True):
        if whole.shape == x.shape:
            torch.testing.assert_close(torch.cat(shares, -1), whole, rtol=0, atol=1e-12)
        else:
            assert all(torch.equal(share, shares[0]) for share in shares)
            torch.testing.assert_close(shares[0], whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("k", [1, 2, 3])
@every_cdf
def test_y_does_not_move(k: int, cdf: Any) -> None:
    """y is constant in a gap, and dy/dk is half of the next place for each side."""
    x, tau = leaves()
    count = torch.tensor(float(k), dtype=torch.float64, requires_grad=True)
    v = torch.tensor([[1.0, 2, 4, 8], [16, 32, 64, 128]], dtype=torch.float64)
    y = khot.soft_topk(x, count, tau=tau, cdf=cdf)
    grads = torch.autograd.grad((y * v).sum(), (x, tau, count))
    assert (grads[0] == 0).all() and (grads[1] == 0).all()
    order = x.detach().argsort(-1, descending=True)
    sides = v.gather(-1, order)[:, k - 1 : k + 1]
    assert grads[2].item() == 0.5 * sides.sum().item()


# the reference, which serves users' CDFs, solves rows of any number and dtype alike
@pytest.mark.parametrize(
    ("cdf", "dtype", "count"),
    [
        *itertools.product(
            ("uniform", cdfs.Power(4 / 3)), (torch.float64, torch.float32, torch.bfloat16), (1, 16)
        ),
        (BUMP, torch.float64, 16),
    ],
    ids=lambda v: getattr(v, "name", str(v)),
)
def test_k_within_rounding_of_none_and_of_all(cdf: Any, dtype: torch.dtype, count: int) -> None:
    """Where rounding leaves no entry on one side of t, the next entry of the other side follows k."""
    x = torch.tensor([[0.5, 0.0, -1.0, -2.0, -math.inf]], dtype=dtype).repeat(count, 1)
    for value, moving in ((1e-9, 0), (1e-12, 0), (4 - 1e-8, 3), (4 - 1e-12, 3)):
        k = torch.full((count,), value, dtype=torch.float64, requires_grad=True)
        leaf = x.clone().requires_grad_()
        weights = torch.arange(1, 6).to(dtype)

        def y(k: Tensor) -> Tensor:
            return khot.soft_topk(x, k, cdf=cdf)

        first = torch.autograd.grad((y(k) * weights).sum(), k)[0]
        recorded = torch.autograd.grad((y(k) * weights).sum(), k, create_graph=True)[0]
        _, moved = torch.func.jvp(y, (k.detach(),), (torch.ones_like(k),))
        want = torch.full_like(first, moving + 1)
        torch.testing.assert_close(first, want, rtol=1e-3, atol=0)
        torch.testing.assert_close(recorded.detach(), want, rtol=1e-3, atol=0)
        torch.testing.assert_close(moved.argmax(-1), torch.full((count,), moving))
        torch.testing.assert_close(moved.double().sum(-1), torch.ones_like(k), rtol=1e-2, atol=0)
        grad = torch.autograd.grad((khot.soft_topk(leaf, k, cdf=cdf) * weights).sum(), leaf)[0]
        assert grad.isfinite().all()


# ------------------------------------------------------------------------------------------ ends of gaps

# by so many of its last digits τ is more than the width of a gap
OFF = (-1000, -64, -3, -2, -1, 0, 1, 2, 8)
COMPACT = ("uniform", cdfs.Power(2), cdfs.Power(1.5), cdfs.Power(4 / 3), cdfs.Power(1.7))


class Ends(NamedTuple):
    """Rows in gaps that are hardly wider than τ, or not quite as wide.

    The scores have ties and differ in few of their last digits. All sums, differences and levels of these
    numbers are exact in float64.
    """

    x: Tensor
    cost: Tensor
    amount: Tensor  # what the entries above the gap cost
    tau: Tensor
    y: Tensor  # 1 above the gap and 0 below it
    exists: Tensor  # whether the gap is wider than τ
    edges: tuple[Tensor, Tensor]  # the entries next to it, above and below
    a: Tensor  # the cost by value, 1 by score


def ends(rows: int, n: int, dtype: torch.dtype, by: str, off: tuple[int, ...], seed: int) -> Ends:
    g = torch.Generator().manual_seed(seed)
    eps = torch.finfo(dtype).eps
    whole, digits = (torch.randint(0, high, (rows, n), generator=g) for high in (3, 4))
    kind = torch.randint(0, 3, (rows, 1), generator=g)  # ties; ties but for last digits; last digits alone
    x = torch.where(kind < 2, whole, 1) + digits.double() * (2 * eps) * (kind > 0)
    x[:, 0] = 1 + x.amax(-1) * (kind[:, 0] < 2) + 16 * eps
    x = x.gather(-1, torch.rand(rows, n, generator=g).argsort(-1)).to(dtype).double()
    cost = 2.0 ** torch.randint(0, 3, (rows, n), generator=g) if by != "count" else torch.ones(rows, n)
    cost = cost.double()
    a = cost if by == "value" else torch.ones_like(cost)
    level = x / a
    down = level.gather(-1, torch.randint(0, n, (rows, 1), generator=g))
    least = level.amin(-1, keepdim=True)
    down = torch.where(down < level.amax(-1, keepdim=True), down, least)
    y = level > down
    width = (x - down * a).masked_fill(~y, math.inf).amin(-1)
    size = 1 + torch.tensor(off)[torch.randint(0, len(off), (rows,), generator=g)] * 2.0**-23
    tau = (width * size).float().double()
    ups = ((x - tau.unsqueeze(-1)) / a).masked_fill(~y, math.inf)
    edges = y & (ups == ups.amin(-1, keepdim=True)), ~y & (level == down)
    exact = x.to(dtype), cost.to(dtype), (cost * y).sum(-1), tau
    return Ends(*exact, y.double(), tau < width, edges, a)


def price_of(e: Ends, v: Tensor) -> Tensor:
    """The gradient in the amount, where the gap exists: Σ a v/Σ w a of both edges, weighted by Σ w a/Σ w."""
    v, w = v.double(), e.cost.double()
    sums = [[(part * edge).sum(-1) for part in (e.a * v, w * e.a, w)] for edge in e.edges]
    (up, up_paid, up_cost), (down, down_paid, down_cost) = sums
    a_up, a_down = up_paid / up_cost, down_paid / down_cost
    return (a_up * up / up_paid + a_down * down / down_paid) / (a_up + a_down)


@pytest.mark.parametrize("cdf", COMPACT, ids=str)
@pytest.mark.parametrize("by", ["count", "score", "value"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_ends_of_gaps(dtype: torch.dtype, by: str, cdf: Any) -> None:
    """A gap wider than τ, if barely, decides every entry, and t is not at one of its ends."""
    for seed, (rows, n) in enumerate(itertools.product((1, 3, 16, 17), (2, 3, 5, 8, 24, 200))):
        e = ends(rows, n, dtype, by, OFF, seed)
        leaves = [v.clone().requires_grad_() for v in (e.x, e.amount, e.tau, e.cost)]
        x, amount, tau, cost = leaves
        if by == "count":
            y = khot.soft_topk(x, amount, tau=tau, cdf=cdf)
        else:
            y = khot.soft_budget(x, cost, amount, tau=tau, cdf=cdf, by=by)
        torch.testing.assert_close(y.double(), e.y, rtol=0, atol=2e-6)
        v = torch.arange(1.0, n + 1).flip(-1).to(dtype)
        used = leaves[: 3 if by == "count" else 4]
        got = [part[e.exists].double() for part in torch.autograd.grad((y * v).sum(), used)]
        price = price_of(e, v)[e.exists]
        assert (got[0] == 0).all() and (got[2] == 0).all(), (rows, n)
        torch.testing.assert_close(got[1], price, rtol=1e-5, atol=0)
        if by != "count":
            want = -price.unsqueeze(-1) * e.y[e.exists]
            torch.testing.assert_close(got[3], want, rtol=1e-5 + torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("cdf", ["logistic", "laplace", "normal"])
@pytest.mark.parametrize("n", [8, 64, 255])
def test_one_far_above_the_others(cdf: str, n: int) -> None:
    """Wide gaps in rows of little spread, beside ordinary rows: t is where both ends weigh the same, though
    the tails there are next to nothing."""
    x = 0.33 * torch.randn(64, n, generator=torch.Generator().manual_seed(n))
    x[::2] = -torch.linspace(20, 170, 32)[:, None]
    x[::2, 0] = 0
    k = torch.ones(64, dtype=torch.float64, requires_grad=True)
    for call in (
        partial(khot.soft_topk, k=k, cdf=cdf),
        partial(khot.soft_budget, cost=torch.ones(n), budget=k, cdf=cdf),
    ):
        got, want = (grad(call(row)[:, 0].sum(), k)[0] for row in (x, x.double()))
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


def test_k_hardly_below_a_whole_number() -> None:
    """Such a row is in no gap: one entry is undecided, however little it lacks."""
    k = torch.nextafter(torch.tensor([3.0]), torch.tensor([0.0])).requires_grad_()
    for cdf in ("uniform", cdfs.Power(1.5)):
        x = torch.tensor([[3.0, 1.5, 1.5, -1.0]], requires_grad=True)
        y = khot.soft_topk(x, k, cdf=cdf) * torch.tensor([1.0, 2.0, 3.0, 4.0])
        dx, dk = grad(y.sum(), (x, k))
        assert dk.item() == pytest.approx(2.5)
        torch.testing.assert_close(dx[0], (0.5 if cdf == "uniform" else 1.0) * torch.tensor([0.0, -1, 1, 0]))
