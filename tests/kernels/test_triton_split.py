"""Rows that many programs share, of the soft top-k and of that in magnitude, under Triton's interpreter:
sizes, kinds of rows, launches, offsets."""

from __future__ import annotations

import mmap
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from agreement import error_in_tau
from differences import error
from drawn import f64
from khot._kernels.reference import magnitude
from khot._kernels.reference import soft_topk as reference
from noted import Launches

CDFS: dict[str, float] = {"logistic": 0.0, "laplace": 0.0, "normal": 0.0, "uniform": 2.0, "power": 4 / 3}
every_cdf = pytest.mark.parametrize("cdf", CDFS)
FORWARD = ("_sample_rows", "_sum_parts", "_finish_parts", "_write_parts")
FINE = (*FORWARD[:3], "_polish_parts")
BACKWARD = ("_pull_parts", "_gradient_parts")
SIZES = [("soft_topk_magnitude", 2.0), ("soft_topk_magnitude", 4 / 3)]


def check(
    kernels: ModuleType, x: Tensor, k: Tensor, tau: Tensor, cdf: str, output: str = "y", seed: int = 0
) -> None:
    """Forward and backward against the reference."""
    shape = CDFS[cdf]
    eps = 0.0 if x.dtype == torch.float32 else torch.finfo(x.dtype).eps
    y, hi, lo = kernels.soft_topk(x, k, tau, cdf, shape, output)
    want, *t = reference.soft_topk(x.double(), k, tau, cdf, shape, output)
    assert y.dtype == x.dtype
    assert error(y, want) <= (5e-7 if output == "y" else 1e-5) + eps
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).to(x.dtype)
    args = (tau, cdf, shape, output)
    got = kernels.soft_topk_backward(grad, torch.zeros(()), x, hi, lo, *args)
    wanted = reference.soft_topk_backward(grad.double(), torch.zeros(()), x.double(), *t, *args)
    for a, b in zip(got, wanted, strict=True):
        for row, expected in zip(a.reshape(len(x), -1), b.reshape(len(x), -1), strict=True):
            if expected.isfinite().any():
                assert error(row, expected) <= 2e-4 + eps
            else:
                assert row.isnan().all()


def kinds(n: int) -> Tensor:
    """Normal, sorted log-normal, masked, almost all masked, equal, a gap, +inf, and NaN."""
    x = torch.randn(8, n, generator=torch.Generator().manual_seed(n))
    x[1] = x[1].exp().sort().values
    x[2, ::3] = -torch.inf
    x[3, 12:] = -torch.inf
    x[4] = 0.25
    x[5] = torch.where(torch.arange(n) % 50 == 0, 300.0, -300.0) + x[5]
    x[6, 5:7] = torch.inf
    x[7, n // 2 + 1] = torch.nan
    return x


def clusters(n: int, tau: float, dtype: torch.dtype) -> Tensor:
    """Two, far apart, of a width of τ each: z has few digits, by which its entries differ."""
    x = tau * torch.randn(2, n, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(dtype)
    return torch.where(torch.arange(n) % 10 == 0, 300.0, -300.0).to(dtype) + x


def check_sizes(
    kernels: ModuleType, x: Tensor, k: Tensor, tau: Tensor, p: float, signed: bool = True
) -> None:
    """Forward and backward against the reference in float64."""
    y, *t = kernels.soft_topk_magnitude(x, k, tau, p, signed)
    want, *want_t = magnitude.soft_topk_magnitude(x.double(), k, tau, p, signed)
    assert y.dtype == x.dtype and error(y, want) <= 1e-6
    assert torch.equal(t[0].isnan(), want_t[0].isnan())
    generator = torch.Generator().manual_seed(0)
    v, v_lo = torch.randn(x.shape, generator=generator), torch.randn(len(x), generator=generator).double()
    rest = (k, *want_t, tau, p, signed)
    got = kernels.soft_topk_magnitude_backward(v, v_lo, x, want.to(x.dtype), *rest)
    true = magnitude.soft_topk_magnitude_backward(v.double(), v_lo, x.double(), want, *rest)
    assert error(got[0], true[0]) <= 2e-5
    assert error(got[1], true[1]) <= 1e-4  # a sum of terms of either sign


@every_cdf
@pytest.mark.parametrize("where", ["kernels", "larger"])
def test_thresholds_in_wide_gaps(request: pytest.FixtureRequest, where: str, cdf: str) -> None:
    kernels = request.getfixturevalue(where)
    x, k, tau = clusters(400, 0.01, torch.float32), f64([40.0, 43.5]), f64(0.01)
    args = (k, tau, cdf, CDFS[cdf], "threshold")
    _, *got = kernels.soft_topk(x, *args)
    _, *want = reference.soft_topk(x.double(), *args)
    assert error_in_tau(got, want, 0.01).max() <= (1e-6 if where == "kernels" else 1e-10)


@pytest.mark.parametrize(
    ("cdf", "dtype"),
    [*((cdf, torch.float32) for cdf in CDFS), ("logistic", torch.float64), ("power", torch.float64)],
    ids=str,
)
def test_thresholds_with_the_digits_of_float64(
    larger: ModuleType, monkeypatch: pytest.MonkeyPatch, cdf: str, dtype: torch.dtype
) -> None:
    """One launch more than for float32, and of float64 scores another one, which writes."""
    monkeypatch.setattr(larger.layout, "RESCUE", 1024)
    launches: list[str] = []
    monkeypatch.setattr(larger.launch, "watch", launches.append)
    n, tau, output = 411, 0.1, "threshold" if dtype == torch.float32 else "y"
    x = kinds(n)[[0, 1, 2, 4, 6, 7]].to(dtype)
    if dtype == torch.float64:
        x[0] += 1e-9 * x[0].flip(0)  # digits that float32 does not have
        x[0] += 1e6
    args = (f64([n / 2, 61.0, 60.5, 61.1, 2.0, 3.0]), f64(tau), cdf, CDFS[cdf], output)
    y, *got = larger.soft_topk(x, *args)
    want_y, *want = reference.soft_topk(x.double(), *args)
    assert tuple(launches) == (FINE if output == "threshold" else (*FINE, "_write_fine"))
    assert torch.equal(got[0].isnan(), want[0].isnan())
    # 2⁻⁵² of the scores is all that float64 holds of hi + lo, in τ
    assert error_in_tau(got, want, tau).max() <= 1e-12 + x[x.isfinite()].abs().max() / tau * 2**-52
    assert output == "threshold" or error(y, want_y) <= 1e-12


# half of all combinations, among them all of any two
@pytest.mark.parametrize(
    ("cdf", "dtype", "k", "tau"),
    [
        (cdf, dtype, *((500.5, 1.0), (20.5, 1e-4))[(i + j) % 2])
        for i, cdf in enumerate(CDFS)
        for j, dtype in enumerate((torch.float32, torch.float64))
    ],
    ids=str,
)
def test_ordinary_thresholds_take_one_step_in_float64(
    larger: ModuleType, monkeypatch: pytest.MonkeyPatch, cdf: str, dtype: torch.dtype, k: float, tau: float
) -> None:
    """No program goes through the whole row by itself."""
    monkeypatch.setattr(larger.layout, "WINDOW", 512)

    def none(*_: object) -> None:
        raise AssertionError("a row was solved by one program")

    monkeypatch.setattr(larger.float64_split, "find_in_float64", none)
    x = torch.randn(1, 1500, generator=torch.Generator().manual_seed(8), dtype=torch.float64).to(dtype)
    args = (f64(k), f64(tau), cdf, CDFS[cdf], "threshold")
    _, *got = larger.soft_topk(x, *args)
    _, *want = reference.soft_topk(x.double(), *args)
    assert error_in_tau(got, want, tau).max() <= 1e-12 + 2**-52 / tau


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_thresholds_of_many_rows(
    larger: ModuleType, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """For whose windows there would be no room; in float32 each streams past one program."""
    monkeypatch.setattr(larger.layout, "STREAMS", 1)
    x = torch.randn(3, 300, generator=torch.Generator().manual_seed(9)).to(dtype)
    args = (f64([10.5, 150.0, 20.0]), f64(1e-3), "logistic", 0.0, "threshold")
    _, *got = larger.soft_topk(x, *args)
    _, *want = reference.soft_topk(x.double(), *args)
    assert error_in_tau(got, want, 1e-3).max() <= 1e-12


def test_a_sample_that_tells_nothing(larger: ModuleType) -> None:
    """Its bounds do not hold then, and the row is solved without them."""
    n, blocks = 1000, 32
    x = torch.randn(2, n, generator=torch.Generator().manual_seed(2))
    sampled = (torch.arange(blocks)[:, None] * (n // blocks) + torch.arange(4)).flatten()
    small, low = x.clone(), x
    small[:, sampled] *= 1e-3
    low[:, sampled] -= 50.0
    for cdf, tau in (("logistic", 1.0), ("uniform", 1e-3)):
        check(larger, low, f64([20.0, 700.5]), f64(0.01), cdf)
        check_sizes(larger, small, f64([20.0, 700.0]), f64(tau), 2.0)


def test_one_evaluation_of_an_ordinary_row(larger: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches(larger.split, FORWARD, monkeypatch)
    x = torch.randn(2, 2000, generator=torch.Generator().manual_seed(3))
    larger.soft_topk(x, f64(500.0), f64(1.0), "logistic", 0.0, "y")
    assert launches.given["_sum_parts"]["status"] == [larger.split.DONE.value] * 2


@pytest.mark.parametrize(("operator", "form"), [*(("soft_topk", cdf) for cdf in CDFS), *SIZES], ids=str)
def test_few_undecided_entries_are_gathered(
    larger: ModuleType, monkeypatch: pytest.MonkeyPatch, operator: str, form: Any
) -> None:
    """And the window of them is enough, sorted or not: no program goes through the row by itself."""
    monkeypatch.setattr(larger.layout, "WINDOW", 512)
    launches = Launches(larger.split, FORWARD[:3], monkeypatch)
    x = torch.randn(2, 2000, generator=torch.Generator().manual_seed(4))
    x[1] = x[1].sort().values
    if operator == "soft_topk":
        args, own, sizes = (f64(20.5), f64(1e-4), form, CDFS[form], "y"), reference, x
    else:
        args, own, sizes = (f64(20.0), f64(1e-3), form, True), magnitude, x.abs()
    y, _, _ = getattr(larger, operator)(x, *args)
    assert error(y, getattr(own, operator)(x.double(), *args)[0]) <= 1e-6
    assert launches.given["_sum_parts"]["status"] == [larger.split.GATHER.value] * 2
    window = launches.given["_finish_parts"]["window_pointer"]
    count = launches.given["_finish_parts"]["state_pointer"][:, larger.split.COUNT.value].int()
    for row, size, found, number in zip(x, sizes, window, count.tolist(), strict=True):
        chosen = found[:number] if operator == "soft_topk" else found[:number].abs()
        inside = row[(size >= chosen.min()) & (size <= chosen.max())]
        assert torch.equal(found[:number], inside)  # all of them, in their order


@pytest.mark.parametrize("operator", ["soft_topk", "soft_topk_magnitude"])
def test_launches(split: ModuleType, monkeypatch: pytest.MonkeyPatch, operator: str) -> None:
    """As many whatever the row takes, and what they count is reset, so that they can be replayed."""
    sizes = operator == "soft_topk_magnitude"
    noted = Launches(split.split, FORWARD[: 4 - sizes], monkeypatch)
    writes = Launches(split.magnitude, ["_write_sizes"], monkeypatch)
    rest = Launches(split.pull, BACKWARD, monkeypatch)
    x, k, none = torch.randn(1, 40, generator=torch.Generator().manual_seed(5)), f64(3.0), f64(0.0)
    for tau in (f64(1.0), f64(1e-5)):
        form = (tau, 2.0, True) if sizes else (tau, "laplace", 0.0, "y")
        y, hi, lo = getattr(split, operator)(x, k, *form)
        back = getattr(split, f"{operator}_backward")
        back(x, none, x, *((y, k) if sizes else ()), hi, lo, *form)
        assert noted.given["_finish_parts"]["counter_pointer"].tolist() == [0]
        assert rest.given["_pull_parts"]["counter_pointer"].tolist() == [0]
    assert noted.names == [*FORWARD[: 4 - sizes]] * 2 and rest.names == [*BACKWARD] * 2
    assert writes.names == ["_write_sizes"] * (2 * sizes)


@pytest.mark.parametrize("p", [2.0, 4 / 3])
def test_what_may_not_be_selected(larger: ModuleType, p: float) -> None:
    """Every third entry, and all but twelve, of which as many are asked for as there are, or more."""
    x = torch.randn(4, 500, generator=torch.Generator().manual_seed(1)).abs()
    x[0, ::3] = -torch.inf
    x[1:, 12:] = -torch.inf
    check_sizes(larger, x, f64([60, 5, 12, 13]), f64(0.3), p, signed=False)


@pytest.mark.parametrize(
    ("bad", "p", "signed"),
    [
        (torch.nan, 2.0, True),
        (torch.nan, 4 / 3, False),
        (torch.inf, 4 / 3, True),
        (torch.inf, 2.0, False),
        (-torch.inf, 2.0, True),
        (-torch.inf, 4 / 3, False),
    ],
)
def test_what_the_sample_misses(split: ModuleType, p: float, bad: float, signed: bool) -> None:
    """A NaN spoils its row, and no other; an infinite entry is selected, unless it is one that may not be."""
    x = torch.randn(2, 33, generator=torch.Generator().manual_seed(0)).abs()
    x[0, 3] = bad
    check_sizes(split, x, f64(3.0), f64(1.0), p, signed)
    y, hi, _ = split.soft_topk_magnitude(x, f64(3.0), f64(1.0), p, signed)
    assert y[1].isfinite().all()
    if bad != bad:
        assert y[0].isnan().all() and hi[0].isnan()
    else:
        assert y[0, 3] == (bad if signed or bad > 0 else 0) and y[0].isfinite().sum() >= 32


@pytest.mark.parametrize("p", [2.0, 4 / 3])
def test_ordinary_rows_take_two_evaluations(
    larger: ModuleType, monkeypatch: pytest.MonkeyPatch, p: float
) -> None:
    """And no program goes through a row by itself."""
    monkeypatch.setattr(larger.layout, "CHUNK", 4096)
    monkeypatch.setattr(larger.layout, "sample", lambda: (1, 16384, 1))
    launches = Launches(larger.split, FORWARD[:3], monkeypatch)
    x = torch.randn(2, 40_000, generator=torch.Generator().manual_seed(3))
    args = (f64(10_000.0), f64(1.0), p, True)

    def none(*_: object, **__: object) -> None:
        raise AssertionError("a row was solved by one program")

    own = larger.split.iterate
    monkeypatch.setattr(larger.split, "iterate", none)
    try:
        y, *_ = larger.soft_topk_magnitude(x, *args)
    finally:
        monkeypatch.setattr(larger.split, "iterate", own)
    assert launches.given["_finish_parts"]["status"] == [larger.split.DONE.value] * 2
    assert error(y, magnitude.soft_topk_magnitude(x.double(), *args)[0]) <= 1e-6


@pytest.mark.parametrize("where", ["kernels", "split"])
def test_offsets_beyond_32_bits(request: pytest.FixtureRequest, where: str) -> None:
    """A gradient whose columns are so far apart that their offsets do not fit: that of dim=0."""
    kernels = request.getfixturevalue(where)
    torch.utils.deterministic.fill_uninitialized_memory = False
    n, apart = 18, 1 << 27
    memory = mmap.mmap(-1, 2 * n * apart)  # none of which exists before it is written
    far = torch.frombuffer(memory, dtype=torch.float16).as_strided((1, n), (1, apart))
    x = torch.randn(1, n, generator=torch.Generator().manual_seed(6)).half()
    v = x.flip(-1)
    far.copy_(v)
    for cdf, dtype in (("logistic", torch.float16), ("logistic", torch.float64)):
        args = (f64(1.0), cdf, CDFS[cdf], "y")
        scores = x.to(dtype)
        _, hi, lo = kernels.soft_topk(scores, f64(3.0), *args)
        got = kernels.soft_topk_backward(far, torch.zeros(()), scores, hi, lo, *args)
        want = kernels.soft_topk_backward(v, torch.zeros(()), scores, hi, lo, *args)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
