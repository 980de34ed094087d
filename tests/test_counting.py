"""The solver: accuracy, passes and memory on the adversarial list; gaps; levels; exact gradients."""

from __future__ import annotations

import math
import sys
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import khot
import oracles
from khot import cdfs, counting
from khot._core.dispatch import OPERATORS
from khot._kernels.reference import root
from khot._kernels.reference import soft_topk as reference

CDFS: dict[str, tuple[str | cdfs.CDF, float | None]] = {
    "logistic": ("logistic", None),
    "laplace": ("laplace", None),
    "normal": ("normal", None),
    "uniform": ("uniform", None),
    "power": (cdfs.Power(4 / 3), 4 / 3),
}
EPS = {torch.float64: 2.0**-52, torch.float32: 2.0**-23}
every_cdf = pytest.mark.parametrize("name", CDFS)
every_row = pytest.mark.parametrize("scores", oracles.ADVERSARIAL)


def row(scores: str, n: int, seed: int = 0) -> Tensor:
    return oracles.ADVERSARIAL[scores](n, torch.Generator().manual_seed(seed))


def selectable(x: Tensor) -> int:
    return int((x > -math.inf).sum())


def sum_error(y: Tensor, k: float, n: int) -> float:
    """abs(Σy − k) in units of the goal of DESIGN section 5."""
    goal = {torch.float64: 1e-12, torch.float32: 1e-6}[y.dtype] * max(1, min(k, n - k))
    return abs(math.fsum(y.double().tolist()) - k) / (goal + y.numel() * EPS[y.dtype] / 2)


# ----------------------------------------------------------------------------------- accuracy


@every_cdf
@every_row
def test_within_rounding_of_50_digits_on_the_adversarial_list(name: str, scores: str) -> None:
    cdf, p = CDFS[name]
    x64 = row(scores, 30)
    # each k with the temperatures by turns, which are others in the other dtype, CDF and kind of row; float32
    # has every second k, and all of them against the reference in kernels/test_cpu.py
    turn = list(oracles.ADVERSARIAL).index(scores) + list(CDFS).index(name)
    for dtype, absolute, relative in ((torch.float64, 1e-12, 1e-12), (torch.float32, 5e-7, 1e-5)):
        x, turn = x64.to(dtype), turn + 1
        n = selectable(x)
        cases = list(enumerate(oracles.adversarial_ks(n)))
        for i, k in cases if dtype == torch.float64 else cases[turn % 2 :: 2]:
            tau = oracles.TAUS[(turn + i + i // 2) % len(oracles.TAUS)]
            case = f"{dtype}, tau={tau}, k={k}"
            want, log_want, t_want = oracles.soft_topk(x, k, tau, name, p)
            y = khot.soft_topk(x, k, tau=tau, cdf=cdf)
            assert np.abs(y.double().numpy() - want).max() <= absolute, case
            assert sum_error(y, k, n) <= 1, case
            if khot.cdfs.resolve(cdf).full_support:  # elsewhere log y is singular at the edge
                log_y = khot.log_soft_topk(x, k, tau=tau, cdf=cdf).double().numpy()
                np.testing.assert_allclose(log_y, log_want, rtol=relative, atol=absolute, err_msg=case)
            t = khot.inverse_soft_count(x, k, tau=tau, cdf=cdf).item()
            scale = abs(t_want) + tau
            assert abs(t - t_want) <= 4 * EPS[dtype] * scale + 1e-12 * tau, case


@pytest.mark.slow
@every_cdf
@every_row
def test_within_rounding_of_50_digits_at_300_entries(name: str, scores: str) -> None:
    cdf, p = CDFS[name]
    x = row(scores, 300, seed=1)
    for tau in oracles.TAUS:
        for k in oracles.adversarial_ks(selectable(x)):
            want, _, _ = oracles.soft_topk(x, k, tau, name, p)
            y = khot.soft_topk(x, k, tau=tau, cdf=cdf)
            assert np.abs(y.numpy() - want).max() <= 1e-12, (tau, k)


@every_cdf
def test_rows_of_every_kind_together_sum_to_k(name: str) -> None:
    n = 500
    rows = torch.stack([row(scores, n) for scores in oracles.ADVERSARIAL])
    for dtype in EPS:
        for tau in oracles.TAUS:
            for j, _ in enumerate(oracles.adversarial_ks(n)):
                ks = [oracles.adversarial_ks(selectable(x))[j] for x in rows]
                k = torch.tensor(ks, dtype=torch.float64)
                y = khot.soft_topk(rows.to(dtype), k, tau=tau, cdf=CDFS[name][0])
                for x, y_x, k_x in zip(rows, y, ks, strict=True):
                    assert sum_error(y_x, k_x, selectable(x)) <= 1, (tau, k_x)


@pytest.mark.parametrize("name", ["logistic", "power"])  # of full and of compact support
def test_six_million_equal_scores(name: str) -> None:
    # the row on which a bracket of ±10 gives a sum of 285
    n, k = 6_290_000, 64
    for dtype in EPS:
        y = khot.soft_topk(torch.full((n,), 0.3, dtype=dtype), k, cdf=CDFS[name][0])
        want = torch.tensor(k / n, dtype=torch.float64).to(dtype)
        assert (y - want).abs().max() <= ({4: 1e-6, 8: 1e-12}[y.itemsize] + EPS[dtype] / 2) * k / n
        assert y.unique().numel() == 1
        assert abs(n * y[0].double().item() - k) <= {4: 1e-6, 8: 1e-12}[y.itemsize] * k + n * EPS[dtype] / 2


# --------------------------------------------------------------------------- passes and memory


@every_cdf
@pytest.mark.parametrize("n", [30, 1_000, pytest.param(5_000, marks=pytest.mark.slow)])
def test_at_most_ten_passes(name: str, n: int) -> None:
    counts = []
    for scores in oracles.ADVERSARIAL:
        x = row(scores, n)
        cases = [(k, tau) for tau in oracles.TAUS for k in oracles.adversarial_ks(selectable(x))]
        cases = cases[:: 1 if n == 30 else 3]
        k, tau = torch.tensor(cases, dtype=torch.float64).unbind(-1)
        _, _, passes = reference.solve(x.expand(len(cases), n), k, tau, cdfs.resolve(CDFS[name][0]))
        counts += passes.tolist()
    assert max(counts) <= 10
    assert sorted(counts)[len(counts) // 2] <= 5


@every_cdf
@pytest.mark.parametrize("spread", [1e2, 1e4, 1e8])
def test_rows_that_spread_far_beyond_tau_are_counted_and_not_searched(
    name: str, spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass of the search takes as long as fifty others. Only the steep end of a power needs it."""
    searched = []

    def search(*args: Any) -> Any:
        searched.append(args)
        return search_pass(*args)

    search_pass = root.search_pass
    monkeypatch.setattr(root, "search_pass", search)
    z = torch.randn(5_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = torch.stack((z, z.exp(), (3 * z).round(), torch.where(z > 2, z, z - 1e6))) * spread
    k = torch.tensor([2.5, 50.25, 500.5, 2_500.75, 4_998.5], dtype=torch.float64).expand(4, 5)
    tau = torch.ones((), dtype=torch.float64)
    _, t, passes = reference.solve(rows[:, None].expand(4, 5, -1), k, tau, cdfs.resolve(CDFS[name][0]))
    assert t.isfinite().all() and passes.max() <= 10
    assert len(searched) <= (2 if name == "power" else 0)


class PeakMemory(TorchDispatchMode):
    """The largest number of bytes that tensors created inside held at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {id(self.storage(t)) for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for t in tree_iter(out):
            if not isinstance(t, Tensor):
                continue
            storage = self.storage(t)
            key = storage._cdata
            if key in self.seen or id(storage) in known or storage.nbytes() == 0:
                continue
            self.seen.add(key)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(t, self.free, key, storage.nbytes())
        return out

    @staticmethod
    def storage(t: Tensor) -> Any:
        return t.untyped_storage()

    def free(self, key: int, nbytes: int) -> None:
        if key in self.seen:
            self.seen.remove(key)
            self.now -= nbytes


@pytest.mark.parametrize("shape", [(1, 500_000), (5_000, 100)], ids=str)
@pytest.mark.parametrize("name", ["logistic", "power"])
def test_at_most_three_buffers_of_the_input(name: str, shape: tuple[int, int]) -> None:
    x = 30 * torch.randn(shape, generator=torch.Generator().manual_seed(0))  # wide: histograms too
    x.requires_grad_()
    grad = torch.ones_like(x)
    size = x.numel() * x.element_size()
    with PeakMemory() as forward:
        y = khot.soft_topk(x, shape[1] / 10, tau=0.1, cdf=CDFS[name][0])
    assert forward.peak <= 3 * size
    with PeakMemory() as backward:
        torch.autograd.grad(y, x, grad)
    assert backward.peak <= 3 * size


# --------------------------------------------------------------------------------------- gaps


@every_cdf
@pytest.mark.parametrize("tau", [1.0, 0.01, 1e-4])
def test_a_gap_determines_the_threshold(name: str, tau: float) -> None:
    cdf, p = CDFS[name]
    # two above, three below, and far apart: C is flat at 2 in floating point
    x = torch.tensor([52.0, 50.5, -50.0, -50.0, -53.0], dtype=torch.float64)
    _, log_want, t_want = oracles.soft_topk(x, 2, tau, name, p)
    assert abs(khot.inverse_soft_count(x, 2, tau=tau, cdf=cdf).item() - t_want) <= 1e-13 * 50
    if cdfs.resolve(cdf).full_support:
        log_y = khot.log_soft_topk(x, 2, tau=tau, cdf=cdf)
        np.testing.assert_allclose(log_y.numpy(), log_want, rtol=1e-12)


@every_cdf
@pytest.mark.parametrize("tau", [1.0, 0.01])
def test_dk_in_a_gap_is_the_limit_of_the_smooth_cdfs(name: str, tau: float) -> None:
    cdf, p = CDFS[name]
    x = torch.tensor([52.0, 50.0, 50.0, -50.0, -50.0, -50.0, -53.0], dtype=torch.float64)
    v = torch.tensor([1.0, 2.0, 5.0, -3.0, 4.0, 7.0, 9.0], dtype=torch.float64)
    _, dk_want, _ = oracles.soft_topk_grad(x, 3, tau, name, v, p)
    for create_graph in (False, True):
        k = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
        y = khot.soft_topk(x, k, tau=tau, cdf=cdf)
        (dk,) = torch.autograd.grad(y, k, v, create_graph=create_graph)
        assert abs(dk.item() - dk_want) <= 1e-7 * 9
    if not cdfs.resolve(cdf).full_support:
        # ½ of the mean over ties on either side
        assert dk_want == pytest.approx(0.5 * (2 + 5) / 2 + 0.5 * (-3 + 4 + 7) / 3, abs=1e-15)
        assert dk.item() == pytest.approx(dk_want, abs=1e-14)


@pytest.mark.parametrize("name", ["logistic", "laplace", "normal"])
def test_means_survive_underflow_of_every_density(name: str) -> None:
    # between entries 2e4 τ apart every f underflows, and v̄ is still the mean of the two neighbours
    x = torch.tensor([1.0, -1.0], dtype=torch.float64)
    k = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    y = khot.soft_topk(x, k, tau=1e-4, cdf=name)
    (dk,) = torch.autograd.grad(y, k, torch.tensor([1.0, 3.0], dtype=torch.float64))
    assert dk.item() == pytest.approx(2, abs=1e-6)


# ---------------------------------------------------------------------------------- gradients


@every_cdf
@every_row
def test_gradients_against_50_digits(name: str, scores: str) -> None:
    cdf, p = CDFS[name]
    x = row(scores, 12)
    finite = x.isfinite()
    v = torch.linspace(-1, 2, 12, dtype=torch.float64)
    for tau in oracles.TAUS:
        for k in (1.5, 4.0, 7.3):
            leaves = [
                x.clone().requires_grad_(),
                torch.tensor(k, dtype=torch.float64, requires_grad=True),
                torch.tensor(tau, dtype=torch.float64, requires_grad=True),
            ]
            y = khot.soft_topk(leaves[0], leaves[1], tau=leaves[2], cdf=cdf)
            dx, dk, dtau = torch.autograd.grad(y, leaves, v)
            want_dx, want_dk, want_dtau = oracles.soft_topk_grad(x, k, tau, name, v, p)
            case = f"tau={tau}, k={k}"
            # ties at a threshold: log f of a gap of z errs by eps·z², and so do the weights
            z = ((x[finite] - x[finite].median()) / tau).abs().max().item()
            weights = 1e-10 + 2.0**-52 * (z**2 if name == "normal" else z)
            np.testing.assert_allclose(dx.numpy(), want_dx, rtol=1e-9, atol=4 * weights / tau, err_msg=case)
            assert abs(dk.item() - want_dk) <= 4 * weights, case
            assert abs(dtau.item() - want_dtau) <= 1e-9 * abs(want_dtau) + 10 * weights / tau, case


# ------------------------------------------------------------------------------------- levels


@every_cdf
def test_infinite_entries_and_levels(name: str) -> None:
    """+inf counts as 1 and −inf as 0; all entries are above the level −inf, and none above +inf."""
    kept = torch.tensor([3.0, -1.0, 2.0, 0.5], dtype=torch.float64)
    x = torch.cat((kept, torch.tensor([math.inf, -math.inf, math.inf])))
    of: dict[str, Any] = {"tau": 0.5, "cdf": CDFS[name][0]}
    for at in (0.3, 2.0, 1e300, -1e300):
        torch.testing.assert_close(khot.soft_count(x, at, **of), khot.soft_count(kept, at, **of) + 2)
    ends = torch.tensor([math.inf, -math.inf], dtype=torch.float64)
    assert khot.soft_count(x, ends, **of).tolist() == [2, 6]
    assert [khot.soft_count(kept, at, **of) for at in ends.tolist()] == [0, 4]
    for count in (0.5, 1, 3.5):
        got, want = (khot.inverse_soft_count(v, c, **of) for v, c in ((x, count + 2), (kept, count)))
        torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-15)
    assert khot.inverse_soft_count(x, ends.new_tensor([2, 6]), **of).tolist() == ends.tolist()
    assert khot.inverse_soft_count(x, 1, **of).isnan()


@every_cdf
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rows", [1, 16])
def test_counts_at_subnormal_temperatures(rows: int, dtype: torch.dtype, name: str) -> None:
    x, cdf = torch.tensor([[0.0, 1.0, 2.0]], dtype=dtype).repeat(rows, 1).requires_grad_(), CDFS[name][0]
    half = float(cdfs.resolve(cdf).cdf(torch.zeros(())))
    for tau in (1e-310, 5e-324):
        for at, want in ((1.0, 1 + half), (1.5, 1.0)):
            count = khot.soft_count(x, at, tau=tau, cdf=cdf)
            assert (count == want).all()
            (grad,) = torch.autograd.grad(count.sum(), x)
            assert (grad[:, [0, 2]] == 0).all() and not grad.isnan().any()


def test_many_levels_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 30, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    counts = torch.linspace(0.5, 29.5, 30, dtype=torch.float64).expand(2, 30)
    whole = khot.inverse_soft_count(x, counts, tau=0.5)
    (grad,) = torch.autograd.grad(whole.square().sum(), x)
    monkeypatch.setattr(sys.modules["khot._ops.soft_topk"], "LEVELS_AT_ONCE", 200)
    grouped = khot.inverse_soft_count(x, counts, tau=0.5)
    (grouped_grad,) = torch.autograd.grad(grouped.square().sum(), x)
    torch.testing.assert_close(grouped, whole, rtol=0, atol=1e-14)
    torch.testing.assert_close(grouped_grad, grad, rtol=1e-12, atol=1e-12)


@every_cdf
def test_one_level_for_all_rows_is_that_level_of_each(name: str) -> None:
    """As calls on a GPU give a number, by the operator that serves all devices."""
    cdf = cdfs.resolve(CDFS[name][0])
    count = OPERATORS["soft_count"].spread
    assert count is not None
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[1, 0], x[2, 3] = -math.inf, math.inf
    number, tau = torch.tensor(0.3, dtype=torch.float64), torch.tensor(0.7, dtype=torch.float64)

    def one(x: Tensor) -> Tensor:
        return count(x, number, tau, *cdf.key, False, "")

    def each(x: Tensor) -> Tensor:
        return count(x, number.expand(*x.shape[:-1], 1), tau, *cdf.key, False, "").squeeze(-1)

    v = torch.randn(3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for derived in (
        lambda f: f(x),
        lambda f: torch.func.vmap(f)(x),
        lambda f: torch.func.jvp(f, (x,), (v,))[1],
        lambda f: torch.func.grad(lambda x: f(x).sin().sum())(x),
        lambda f: torch.func.vmap(torch.func.hessian(f))(x),
    ):
        torch.testing.assert_close(derived(one), derived(each), rtol=0, atol=0)
    assert one(x.float()).dtype == torch.float32
    assert torch.autograd.gradgradcheck(one, x[:1].clone().requires_grad_())


@every_cdf
def test_a_rounded_threshold_is_the_threshold_in_the_scores_dtype(name: str) -> None:
    """As calls on a GPU ask for it, by the operator that serves all devices."""
    cdf = cdfs.resolve(CDFS[name][0])
    solve = OPERATORS["soft_topk"].spread
    assert solve is not None
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[1, 0], x[2, 3] = -math.inf, math.inf
    count, tau = torch.tensor([1.5, 2.0, 2.25]).double(), torch.tensor(0.7).double()

    def rounded(x: Tensor, count: Tensor = count) -> Tensor:
        return solve(x, count, tau, *cdf.key, "rounded", "")[0]

    def threshold(x: Tensor, count: Tensor = count) -> Tensor:
        _, hi, lo = solve(x, count, tau, *cdf.key, "threshold", "")
        return (hi + lo).to(x.dtype)

    v = torch.randn(3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for derived in (
        lambda f: f(x),
        lambda f: f(x.float()),
        lambda f: torch.func.vmap(f)(x, count),
        lambda f: torch.func.jvp(f, (x, count), (v, v[:, 0]))[1],
        lambda f: torch.func.jvp(f, (x.float(),), (v.float(),))[1],
        lambda f: torch.func.grad(lambda x: f(x).sin().sum())(x.half()),
        lambda f: torch.func.hessian(lambda x: f(x).sin().sum())(x),
    ):
        torch.testing.assert_close(derived(rounded), derived(threshold), rtol=1e-14, atol=1e-15)


def test_levels_broadcast_outside_dim() -> None:
    x = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    at = torch.tensor([0.1, -0.4], dtype=torch.float64).reshape(1, 2, 1)
    got = khot.soft_count(x, at, dim=1)
    assert got.shape == (2, 2, 3)
    for i, level in enumerate((0.1, -0.4)):
        torch.testing.assert_close(got[:, i], khot.soft_count(x, level, dim=1))
    count = torch.tensor([1.5, 2.0, 4.0], dtype=torch.float64).reshape(1, 3, 1)
    t = khot.inverse_soft_count(x, count, dim=1, tau=torch.tensor([[0.5], [1.0]], dtype=torch.float64))
    assert t.shape == (2, 3, 3)
    torch.testing.assert_close(t[1, 2], khot.inverse_soft_count(x[1], 4.0, dim=0, tau=1.0))


# ---------------------------------------------------------------- many levels, by sorting, for Laplace


def many(x: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    """Levels around all finite scores and at some of them; and counts from all entries of +inf to all that
    are not −inf."""
    finite = x[x.isfinite()]
    pad = 3 * tau
    inside = torch.linspace(finite.min().item() - pad, finite.max().item() + pad, 35, dtype=torch.float64)
    share = torch.linspace(0.001, 0.999, 8, dtype=torch.float64)
    first, last = int((x == math.inf).sum()), selectable(x)
    return torch.cat((inside.flip(0), finite[:5].double())), first + share * (last - first)


@every_row
@pytest.mark.parametrize("dtype", EPS, ids=str)
def test_many_levels_within_rounding_of_50_digits(scores: str, dtype: torch.dtype) -> None:
    mp = oracles.mp
    x = row(scores, 40, seed=2).to(dtype)
    F = oracles.CDFS["laplace"].cdf
    for tau in oracles.TAUS:
        levels, ks = many(x, tau)
        got = khot.soft_count(x, levels, tau=tau, cdf="laplace")
        finite = [mp.mpf(v) for v in x.double().tolist() if math.isfinite(v)]
        want = [float(sum(F((v - mp.mpf(b)) / mp.mpf(tau)) for v in finite)) for b in levels.tolist()]
        # z of a single entry is rounded, and the more so the larger it is
        np.testing.assert_allclose(got.double().numpy(), want, rtol=EPS[dtype] + 1e-13, atol=1e-300)
        t = khot.inverse_soft_count(x, ks, tau=tau, cdf="laplace").double().numpy()
        exact = oracles.soft_levels(x, ks.tolist(), tau, "laplace")
        assert (np.abs(t - exact) <= 4 * EPS[dtype] * (np.abs(exact) + tau) + 1e-12 * tau).all()


def call(name: str, x: Tensor, levels: Tensor, tau: Tensor | float = 0.7) -> Tensor:
    result: Tensor = getattr(khot, name)(x, levels, tau=tau, cdf="laplace")
    return result


#: The levels that each of the two takes, for rows of 40 scores.
LEVELS = {"soft_count": (-2.0, 2.5), "inverse_soft_count": (0.7, 39.2)}
both_ways = pytest.mark.parametrize("name", LEVELS)


def scattered(name: str, rows: int = 3, m: int = 44) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    x = torch.randn(rows, 40, generator=g, dtype=torch.float64)
    x[-1] = x[-1].round()  # ties
    low, high = LEVELS[name]
    return x, low + (high - low) * torch.rand(rows, m, generator=g, dtype=torch.float64)


@both_ways
def test_sorting_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The values and both derivatives are those of one pass or search for each level."""
    x, levels = scattered(name)
    tau = torch.tensor([0.1, 1.0, 5.0], dtype=torch.float64)
    weights = torch.linspace(-1, 2, levels.shape[-1], dtype=torch.float64)

    def derivatives() -> list[Tensor]:
        leaves = [v.clone().requires_grad_() for v in (x, levels, tau)]
        y = call(name, *leaves)
        first = torch.autograd.grad(y, leaves, weights.expand(y.shape), create_graph=True)
        mixed = sum((g * torch.linspace(1, 3, g.shape[-1]).double()).sum() for g in first)
        (plain,) = torch.autograd.grad(call(name, *leaves), leaves[:1], weights.expand(y.shape))
        return [y, plain, *first, *torch.autograd.grad(mixed, leaves)]

    by_sorting = derivatives()
    monkeypatch.setattr(counting, "FEW_ON_CPU", counting.FEW_ELSEWHERE)
    for a, b in zip(by_sorting, derivatives(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@both_ways
def test_many_levels_of_scores_with_ties_have_exact_derivatives(name: str) -> None:
    x, levels = scattered(name)
    levels = levels[-1:, :34].requires_grad_()
    x, tau = x[-1:].requires_grad_(), torch.tensor([0.7], dtype=torch.float64, requires_grad=True)
    some = torch.linspace(-1, 1, 34, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda *a: call(name, *a) @ some, (x, levels, tau), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda *a: call(name, *a) @ some, (x, levels, tau))


def test_many_counts_keep_their_answers_to_bad_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    x, _ = scattered("inverse_soft_count", rows=4)
    x[0, :3], x[1, ::2], x[2, 0] = -math.inf, math.inf, math.nan
    x[3] = math.inf
    ks = torch.linspace(0, 37, 44, dtype=torch.float64).expand(4, 44)

    def answers() -> list[Any]:
        found: list[Any] = [call("inverse_soft_count", x, ks)]
        for row, k in ((0, 38.0), (0, 41.0), (1, -1.0)):
            with pytest.raises(ValueError, match="count must lie in") as raised:
                call("inverse_soft_count", x[row], torch.full((44,), k))
            found.append(str(raised.value))
        return found

    first, *messages = answers()
    assert first[1, ks[0] < 20].isnan().all() and first[2].isnan().all()
    monkeypatch.setattr(counting, "FEW_ON_CPU", counting.FEW_ELSEWHERE)
    second, *others = answers()
    torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-12, equal_nan=True)
    assert messages == others


@pytest.mark.parametrize("call", [khot.soft_count, khot.inverse_soft_count])
def test_masked_entries_are_not_counted(call: Any) -> None:
    """Not even NaN: the result is that of a row without them, at one level and at many."""
    x, mask = torch.tensor([3.0, torch.nan, 1.0, torch.inf, 0.5]), torch.tensor([1, 0, 1, 0, 1]).bool()
    for level in (1.5, torch.tensor([0.5, 2.5])):
        assert torch.equal(call(x, level, tau=0.3, mask=mask), call(x[mask], level, tau=0.3))
