"""Rows that many programs share, under Triton's interpreter: sizes, kinds of rows, launches, offsets."""

from __future__ import annotations

import mmap
from types import ModuleType

import pytest
import torch
from torch import Tensor

from agreement import error_in_tau
from khot._kernels.reference import soft_topk as reference
from noted import Launches

CDFS: dict[str, float] = {"logistic": 0.0, "laplace": 0.0, "normal": 0.0, "uniform": 2.0, "power": 4 / 3}
every_cdf = pytest.mark.parametrize("cdf", CDFS)
FORWARD = ("_sample_rows", "_sum_parts", "_finish_parts", "_write_parts")
FINE = (*FORWARD[:3], "_polish_parts")
BACKWARD = ("_pull_parts", "_gradient_parts")


def number(value: float | list[float]) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def error(got: Tensor, want: Tensor) -> float:
    """The largest difference of finite numbers, in units of 1 + the largest; inf where NaN do not agree."""
    got, want = got.double(), want.double()
    if not torch.equal(got.isnan(), want.isnan()):
        return float("inf")
    scale = 1 + want[want.isfinite()].abs().amax().item()
    return (got - want).masked_fill((got == want) | want.isnan(), 0).abs().max().item() / scale


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


@every_cdf
@pytest.mark.parametrize("where", ["kernels", "larger"])
def test_thresholds_in_wide_gaps(request: pytest.FixtureRequest, where: str, cdf: str) -> None:
    kernels = request.getfixturevalue(where)
    x, k, tau = clusters(400, 0.01, torch.float32), number([40.0, 43.5]), number(0.01)
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
    args = (number([n / 2, 61.0, 60.5, 61.1, 2.0, 3.0]), number(tau), cdf, CDFS[cdf], output)
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

    monkeypatch.setattr(larger.exact_split, "find_exactly", none)
    x = torch.randn(1, 1500, generator=torch.Generator().manual_seed(8), dtype=torch.float64).to(dtype)
    args = (number(k), number(tau), cdf, CDFS[cdf], "threshold")
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
    args = (number([10.5, 150.0, 20.0]), number(1e-3), "logistic", 0.0, "threshold")
    _, *got = larger.soft_topk(x, *args)
    _, *want = reference.soft_topk(x.double(), *args)
    assert error_in_tau(got, want, 1e-3).max() <= 1e-12


def test_a_sample_that_tells_nothing(larger: ModuleType) -> None:
    """Its bounds do not hold then, and the row is solved without them."""
    n, blocks = 1000, 32
    x = torch.randn(2, n, generator=torch.Generator().manual_seed(2))
    sampled = (torch.arange(blocks)[:, None] * (n // blocks) + torch.arange(4)).flatten()
    x[:, sampled] -= 50.0
    for cdf in ("logistic", "uniform"):
        check(larger, x, number([20.0, 700.5]), number(0.01), cdf)


def test_one_evaluation_of_an_ordinary_row(larger: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches(larger.split, FORWARD, monkeypatch)
    x = torch.randn(2, 2000, generator=torch.Generator().manual_seed(3))
    larger.soft_topk(x, number(500.0), number(1.0), "logistic", 0.0, "y")
    assert launches.given["_sum_parts"]["status"] == [larger.split.DONE.value] * 2


@every_cdf
def test_few_undecided_entries_are_gathered(
    larger: ModuleType, monkeypatch: pytest.MonkeyPatch, cdf: str
) -> None:
    """And the window of them is enough, sorted or not: no program goes through the row by itself."""
    monkeypatch.setattr(larger.layout, "WINDOW", 512)
    launches = Launches(larger.split, FORWARD, monkeypatch)
    x = torch.randn(2, 2000, generator=torch.Generator().manual_seed(4))
    x[1] = x[1].sort().values
    args = (number(20.5), number(1e-4), cdf, CDFS[cdf], "y")
    y, _, _ = larger.soft_topk(x, *args)
    assert error(y, reference.soft_topk(x.double(), *args)[0]) <= 5e-7
    assert launches.given["_sum_parts"]["status"] == [larger.split.GATHER.value] * 2
    window = launches.given["_finish_parts"]["window_pointer"]
    count = launches.given["_finish_parts"]["state_pointer"][:, larger.split.COUNT.value].int()
    for row, found, size in zip(x, window, count.tolist(), strict=True):
        chosen = found[:size]
        inside = row[(row >= chosen.min()) & (row <= chosen.max())]
        assert torch.equal(chosen, inside)  # all of them, in their order


def test_launches(split: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many whatever the row takes, and what they count is reset, so that they can be replayed."""
    forward = Launches(split.split, FORWARD, monkeypatch)
    backward = Launches(split.pull, BACKWARD, monkeypatch)
    x = torch.randn(1, 40, generator=torch.Generator().manual_seed(5))
    for tau in (1.0, 1e-5):
        _, hi, lo = split.soft_topk(x, number(3.0), number(tau), "laplace", 0.0, "y")
        split.soft_topk_backward(x, torch.zeros(()), x, hi, lo, number(tau), "laplace", 0.0, "y")
        assert tuple(forward.names) == FORWARD and tuple(backward.names) == BACKWARD
        assert forward.given["_finish_parts"]["counter_pointer"].tolist() == [0]
        assert backward.given["_pull_parts"]["counter_pointer"].tolist() == [0]
        forward.names.clear()
        backward.names.clear()


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
        args = (number(1.0), cdf, CDFS[cdf], "y")
        scores = x.to(dtype)
        _, hi, lo = kernels.soft_topk(scores, number(3.0), *args)
        got = kernels.soft_topk_backward(far, torch.zeros(()), scores, hi, lo, *args)
        want = kernels.soft_topk_backward(v, torch.zeros(()), scores, hi, lo, *args)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
