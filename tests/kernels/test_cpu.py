"""The compiled CPU kernels against the reference kernels, and their other promises."""

from __future__ import annotations

import ctypes
import gc
import itertools
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fresh
import khot
import oracles
from differences import far
from khot import _kernels as kernels
from khot._kernels.reference import soft_topk as reference
from khot._kernels.reference import topk_mask

compiled = kernels.active()["cpu"] != "reference"
needs_extension = pytest.mark.skipif(not compiled, reason="the compiled kernels are not in use")

CDFS = {"logistic": 0.0, "laplace": 0.0, "normal": 0.0, "uniform": 0.0, "power": 4 / 3}
every_cdf = pytest.mark.parametrize("cdf", CDFS)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-7}
every_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def forward(x: Tensor, k: Tensor | float, tau: float, cdf: str, output: str = "y") -> tuple[Tensor, ...]:
    k, t = torch.as_tensor(k, dtype=torch.float64), torch.tensor(tau, dtype=torch.float64)
    return torch.ops.khot.soft_topk(x, k, t, cdf, CDFS[cdf], output)


def expected(x: Tensor, k: Tensor | float, tau: float, cdf: str, output: str = "y") -> tuple[Tensor, ...]:
    k, t = torch.as_tensor(k, dtype=torch.float64), torch.tensor(tau, dtype=torch.float64)
    return reference.soft_topk(x.double(), k, t, cdf, CDFS[cdf], output)


def adversarial(n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows of every kind with every k."""
    rows, ks = [], []
    for scores in oracles.ADVERSARIAL.values():
        x = scores(n, torch.Generator().manual_seed(n)).to(dtype)
        selectable = int((x > -torch.inf).sum())
        for k in oracles.adversarial_ks(selectable):
            rows.append(x)
            ks.append(min(max(k, 0.0), selectable))
    return torch.stack(rows), torch.tensor(ks, dtype=torch.float64)


def error(got: Tensor, want: Tensor) -> float:
    return far(got, want).amax().item()


def test_the_extension_is_there_where_it_must_be() -> None:
    if os.environ.get("KHOT_REQUIRE_COMPILED") == "1":
        assert compiled, "KHOT_REQUIRE_COMPILED=1, but the reference kernels serve the CPU"


@needs_extension
@every_dtype
@every_cdf
@pytest.mark.parametrize("n", [1, 2, 33, 256, 257])
def test_adversarial_rows_as_the_reference(cdf: str, dtype: torch.dtype, n: int) -> None:
    x, k = adversarial(n, dtype)
    for tau in oracles.TAUS:
        y, hi, lo = forward(x, k, tau, cdf)
        want_y, want_hi, want_lo = expected(x, k, tau, cdf)
        assert error(y, want_y) <= TOLERANCE[dtype]
        assert (y.nan_to_num() >= 0).all() and (y.nan_to_num() <= 1).all()
        assert hi.dtype == lo.dtype == torch.float64

        _, hi, lo = forward(x, k, tau, cdf, "threshold")
        t, want = hi + lo, want_hi + want_lo
        assert ((t - want).abs() <= 1e-9 * tau + 1e-14 * want.abs()).logical_or(t == want).all()


@needs_extension
@every_cdf
@pytest.mark.parametrize("k", [1.0, 7.3, 8.0, 63.0])
def test_many_short_rows_with_few_undecided_entries(cdf: str, k: float) -> None:
    """Under a CDF of compact support often none: then a gap gives the count, and t is its middle."""
    spread = torch.linspace(0.1, 30, 256)[:, None]
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(0)) * spread
    y, hi, lo = forward(x, k, 1.0, cdf)
    want, want_hi, want_lo = expected(x, k, 1.0, cdf)
    assert error(y, want) <= TOLERANCE[torch.float32]
    assert (y.double().sum(-1) - k).abs().max() <= 2e-6
    if cdf in ("uniform", "power"):
        decided = ((want == 0) | (want == 1)).all(-1)
        assert decided.sum() > (75 if k == round(k) else -1)
        assert not ((hi + lo) - (want_hi + want_lo))[decided].abs().gt(1e-5).any()
    _, hi, lo = forward(x, k, 1.0, cdf, "threshold")
    assert ((hi + lo) - (want_hi + want_lo)).abs().max() <= 1e-9


@needs_extension
@every_cdf
@pytest.mark.parametrize("masked", [0.0, 0.6])
def test_many_short_rows_with_many_selected_entries(cdf: str, masked: float) -> None:
    """A sum of up to 128 entries that are nearly 1 has to leave the digits of those that are not."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(128, 256, generator=g) * torch.linspace(1, 20, 128)[:, None] + 20
    x = x.masked_fill(torch.rand(x.shape, generator=g) < masked, -math.inf)
    selectable = (x > -math.inf).sum(-1).double()
    k = selectable * torch.rand(128, generator=g, dtype=torch.float64)
    y, _, _ = forward(x, k, 1.5, cdf)
    assert error(y, expected(x, k, 1.5, cdf)[0]) <= TOLERANCE[torch.float32]
    assert not y[x == -math.inf].any()
    log_y, _, _ = forward(x, k, 1.5, cdf, "log")
    assert (log_y[x == -math.inf] == -math.inf).all()


@needs_extension
@pytest.mark.parametrize("cdf", ["uniform", "power"])
@pytest.mark.parametrize("n", [16, 256])
def test_short_rows_in_a_gap_have_its_middle(cdf: str, n: int) -> None:
    """Also where a step ends at an end of the gap, and rounding leaves the entry there a little undecided."""
    g = torch.Generator().manual_seed(1)
    rows = 600 if n == 16 else 150  # of which the search takes longest
    x = torch.randn(rows, n, generator=g)
    k = torch.randint(1, n, (rows,), generator=g).double()
    for tau in (0.03, 1e-3):
        want, want_hi, want_lo = expected(x, k, tau, cdf)
        for output in ("threshold", "y"):
            _, hi, lo = forward(x, k, tau, cdf, output)
            off = ((hi + lo) - (want_hi + want_lo)).abs()
            if output == "y":  # beside y, float has the threshold of other rows less exactly
                off = off[((want == 0) | (want == 1)).all(-1)]
            assert len(off) > rows / 8
            assert off.max() <= (1e-9 * tau if output == "threshold" else 2.5e-7)


WIDE = {
    "Cauchy": lambda x: torch.tan(1.5707 * torch.erf(x / 2**0.5)),
    "log-normal": lambda x: torch.exp(3 * x).clamp(max=6e4),
    "a thousand tau": lambda x: 1e3 * x,
    "few values": lambda x: (3 * x).round() * 40,
    "ends": lambda x: (300 * x).where(x < 1.8, torch.inf).where(x > -1.5, -torch.inf),
}


@needs_extension
@pytest.mark.parametrize(
    ("cdf", "dtype", "n"),
    [
        *itertools.product(CDFS, (torch.float32, torch.bfloat16, torch.float16), (300,)),
        *itertools.product(CDFS, (torch.float32,), (5_000, 70_000)),
        # the search does not depend on the CDF, nor the formulas on the length
        *itertools.product(("logistic",), (torch.bfloat16, torch.float16), (5_000, 70_000)),
    ],
    ids=str,
)
def test_scores_that_spread_beyond_tau_as_the_reference(cdf: str, dtype: torch.dtype, n: int) -> None:
    """The k-th largest entry shows where to search, and most others are clearly above or below."""
    z = torch.randn(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    rounding = 0.51 * torch.finfo(dtype).eps if dtype != torch.float32 else 0.0
    long = n > 5_000  # the reference takes its time
    for scores in (WIDE["Cauchy"], WIDE["ends"]) if long else WIDE.values():
        x = scores(z).to(dtype)
        pinned, selectable = int((x == torch.inf).sum()), int((x > -torch.inf).sum())
        free = selectable - pinned
        ks = [1, 2.5, free // 10, free // 10 + 1e-3, free // 2 - 1e-3, free - 1]
        k = torch.tensor(ks[1:4:2] if long else ks).double() + pinned
        rows = x.repeat(len(k), 1)
        y, want = forward(rows, k, 1.0, cdf)[0].double(), expected(rows, k, 1.0, cdf)[0]
        assert ((y - want).abs() <= 5e-7 + rounding * want).all()
        if dtype == torch.float32:
            allowed = 1e-6 * torch.minimum(k, selectable - k).clamp(min=1) + n * 2**-24
            assert ((y.sum(-1) - k).abs() <= allowed).all()
        if cdf not in ("uniform", "power") and n < 5_000:
            y, want = forward(rows, k, 1.0, cdf, "log")[0], expected(rows, k, 1.0, cdf, "log")[0]
            subnormal = max(torch.finfo(dtype).tiny * torch.finfo(dtype).eps, 1e-30)
            close = (y.double() - want).abs() <= (1e-5 + rounding) * want.abs() + subnormal
            assert (close | (y == want.to(dtype))).all()


@needs_extension
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_mask_of_long_rows_as_the_reference(dtype: torch.dtype) -> None:
    z = torch.randn(30_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for x in (z, (3 * z).round(), z.relu(), torch.exp(3 * z).clamp(max=6e4), z.clamp(max=-1)):
        k = torch.tensor([1, 2, 300, 15_000, 29_999, 30_000]).double()
        rows = x.to(dtype).repeat(len(k), 1)
        assert torch.equal(torch.ops.khot.topk_mask(rows, k), topk_mask.topk_mask(rows, k))


@needs_extension
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("n", [1, 4, 63, 256])
def test_masks_of_many_short_rows_as_the_reference(dtype: torch.dtype, n: int) -> None:
    """Rows with and without ties and masks, beside each other, with a k each."""
    g = torch.Generator().manual_seed(n)
    x = torch.randn(103, n, generator=g)
    x[::3] = x[::3].relu()
    x[1::7] = x[1::7].round() * 0.0  # 0 and -0 are equal
    x[2::7] = torch.where(torch.rand(x[2::7].shape, generator=g) < 0.4, -torch.inf, x[2::7])
    x[3::7, ::5] = torch.inf
    x[4::7] *= 1e-40 if dtype == torch.float32 else 1e-6  # subnormal numbers
    x[50:66] = torch.rand(16, n, generator=g)  # a group without ties
    x[5, 0] = torch.nan
    k = (torch.rand(103, generator=g) * (n + 1)).floor().clamp(max=n).double()
    k[::4] = (k[::4] - 0.4).clamp(min=0)
    k[7], k[8], k[9] = 0, n, n + 1
    x = x.to(dtype)
    for rows in (x, x[:15], x.T.contiguous().T):
        got, want = torch.ops.khot.topk_mask(rows, k[: len(rows)]), topk_mask.topk_mask(rows, k[: len(rows)])
        assert torch.equal(got.nan_to_num(nan=7), want.nan_to_num(nan=7))
    assert want[5].isnan().all() and want[9].isnan().all() and not want[50:66].isnan().any()


@needs_extension
@pytest.mark.parametrize("cdf", ["logistic", "laplace", "normal"])
@pytest.mark.parametrize("shape", [(40, 5), (40, 64), (6, 3_000)], ids=str)
def test_rows_in_double_have_all_its_digits(cdf: str, shape: tuple[int, int]) -> None:
    """Float looks for their thresholds first; it resolves no differences of scores that are far from 0."""
    generator = torch.Generator().manual_seed(shape[1])
    plain = torch.randn(shape, generator=generator, dtype=torch.float64)
    masked = plain.masked_fill(torch.rand(shape, generator=generator) < 0.4, -torch.inf)
    masked[:, :2] = plain[:, :2]
    for x in (plain, plain + 1e6, plain + 1e12, plain * 1e-9, masked):
        selectable = (x > -torch.inf).sum(-1)
        for k in (0.5 + 0 * selectable, selectable / 3, selectable - 0.25):
            for tau in (1.0, 0.1, x.std().nan_to_num(nan=0.3).item()):
                y, hi, lo = forward(x, k, tau, cdf)
                want, want_hi, want_lo = expected(x, k, tau, cdf)
                assert error(y, want) <= 1e-12
                few = torch.minimum(k, selectable - k).clamp(min=1)
                assert ((y.sum(-1) - k).abs() <= 1e-12 * few + shape[1] * 2**-53).all()
                miss = ((hi - want_hi) + (lo - want_lo)).abs() / tau
                assert (miss * few <= 1e-11 * shape[1] + 4e-16 * hi.abs() / tau).all()


@needs_extension
@every_cdf
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tau", [1.0, 1e-3])
def test_long_rows_of_half_precision_have_the_bits_of_float(cdf: str, dtype: torch.dtype, tau: float) -> None:
    """They are solved in a copy in float, so that nothing but the result is rounded."""
    x, k = adversarial(700, torch.float64)
    half = x.clamp(-60_000, 60_000).to(dtype)
    k = torch.minimum(k, (half > -torch.inf).sum(-1))
    v = torch.randn(half.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    nothing, scale = torch.zeros((), dtype=torch.float64), torch.tensor(tau, dtype=torch.float64)
    for output in ("y", "log", "threshold"):
        found = []
        for s in (half, half.float()):
            y, hi, lo = forward(s, k, tau, cdf, output)
            grad = v.to(s.dtype) if y.numel() else y
            grads = torch.ops.khot.soft_topk_backward(
                grad, nothing if y.numel() else torch.ones_like(hi), s, hi, lo, scale, cdf, CDFS[cdf], output
            )
            found.append([y.to(dtype), hi, lo, grads[0].to(dtype), *grads[1:]])
        for got, want in zip(*found, strict=True):
            assert torch.equal(got.nan_to_num(nan=7.0), want.nan_to_num(nan=7.0))


@needs_extension
@every_cdf
@pytest.mark.parametrize("output", ["y", "log", "threshold"])
@pytest.mark.parametrize("n", [2, 7, 64, 203])
def test_gradients_of_many_short_rows_as_the_reference(cdf: str, output: str, n: int) -> None:
    """Rows that are taken several at once, among them such that float does not carry."""
    count = 50
    x = torch.randn(count, n, generator=torch.Generator().manual_seed(n))
    x *= torch.linspace(0.1, 8, count).unsqueeze(-1)
    x[::9, 0], x[4::9, -1] = -torch.inf, 60.0
    k = torch.linspace(0.2, (n - 1) * 0.9, count, dtype=torch.float64)
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    if output == "threshold":
        grad = grad[..., :0]
    grad_lo = torch.linspace(-1, 1, count, dtype=torch.float64)
    t = torch.tensor(1.0, dtype=torch.float64)
    _, hi, lo = expected(x, k, 1.0, cdf)
    rest = (hi, lo, t, cdf, CDFS[cdf], output)
    got = torch.ops.khot.soft_topk_backward(grad, grad_lo, x, *rest)
    want = reference.soft_topk_backward(grad.double(), grad_lo, x.double(), *rest)
    for a, b in zip(got, want, strict=True):
        scale = b.abs().reshape(count, -1).amax(-1, keepdim=True) + 1
        assert error(a.reshape(count, -1) / scale, b.reshape(count, -1) / scale) <= 2e-5


@needs_extension
@pytest.mark.parametrize("cdf", ["logistic", "laplace"])
@pytest.mark.parametrize("largest", [30.0, 100.0])
def test_the_gradient_of_log_y_in_double_has_all_digits(cdf: str, largest: float) -> None:
    """f/F is not the exponential of a difference of two logarithms. The threshold is 0, and so z is exact."""
    mp = oracles.mp
    half = torch.cat([torch.zeros(1), largest * torch.linspace(0.3, 1, 40)]).double()
    x, grad = torch.cat([half, -half]), torch.linspace(1, 2, 82, dtype=torch.float64)
    zero, tau = torch.zeros(1, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64)
    given = (grad[None], zero, x[None], zero, zero, tau, cdf, 0.0, "log")
    dx, dk, _ = torch.ops.khot.soft_topk_backward(*given)

    F = oracles.CDFS[cdf]
    f = [F.pdf(mp.mpf(z)) for z in x.tolist()]
    u = [mp.mpf(v) * p / F.cdf(mp.mpf(z)) for v, p, z in zip(grad.tolist(), f, x.tolist(), strict=True)]
    mean = mp.fsum(u) / mp.fsum(f)
    want = torch.tensor([float(a - p * mean) for a, p in zip(u, f, strict=True)], dtype=torch.float64)
    torch.testing.assert_close(dx[0], want, rtol=4 * 2.0**-52, atol=0)
    assert dk.item() == pytest.approx(float(mean), rel=4 * 2.0**-52, abs=0)


@needs_extension
@every_cdf
def test_densities_that_fade_have_the_reference_gradients(cdf: str) -> None:
    """t lies between two clusters, where f is from 1e-1 down to below 1e-300; the backward pass works with
    logarithms, too."""
    gaps = torch.tensor([4.0, 30, 42.5, 43, 60, 74, 450, 470, 1_000, 1_350, 3_000], dtype=torch.float64)
    x = torch.randn(len(gaps), 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) / 4
    x[:, :4] += gaps.unsqueeze(-1)
    if cdf in ("uniform", "power"):  # compact support: gaps of 0.4 to 4 instead of 4 to 3,000
        x[:, :4] -= (gaps - torch.linspace(0.4, 4, len(gaps), dtype=torch.float64)).unsqueeze(-1)
    k = torch.full_like(gaps, 4)
    grad = torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for output in ("y", "threshold"):
        _, hi, lo = expected(x, k, 1.0, cdf)
        grad_lo = torch.linspace(-1, 1, len(gaps), dtype=torch.float64) if output == "threshold" else hi * 0
        given = grad[..., :0] if output == "threshold" else grad
        rest = (hi, lo, torch.tensor(1.0, dtype=torch.float64), cdf, CDFS[cdf], output)
        got = torch.ops.khot.soft_topk_backward(given, grad_lo, x, *rest)
        want = reference.soft_topk_backward(given, grad_lo, x, *rest)
        if output == "y":
            assert (want[0].abs().amax(-1) > 0).sum() >= 5
        largest = want[0].abs().amax(-1)
        assert ((got[0] - want[0]).abs().amax(-1) <= 1e-11 * largest).all()
        torch.testing.assert_close(got[1], want[1], rtol=1e-11, atol=1e-11)  # inf where f is 0
        assert ((got[2] - want[2]).abs() <= 1e-11 * (largest * (1 + gaps) + grad_lo.abs() * gaps)).all()


@needs_extension
@pytest.mark.parametrize("cdf", ["logistic", "laplace"])
@pytest.mark.parametrize("shape", [(40, 1), (40, 7), (40, 64), (12, 1_500), (3, 300_000)], ids=str)
def test_gradients_from_the_output(cdf: str, shape: tuple[int, int]) -> None:
    count, n = shape
    g = torch.Generator().manual_seed(n)
    x = torch.randn(shape, generator=g)
    x[::4] = x[::4].sign() * 40  # all entries are clearly in or out, and f cannot be computed from y near 1
    x[1::4] *= 30
    x[2::4, ::3] = -torch.inf
    k = ((x > 0).sum(-1) + torch.linspace(0, 0.5, count, dtype=torch.float64)).clamp(max=n)
    k = k.minimum((x > -torch.inf).sum(-1).double())
    grad = torch.randn(shape, generator=g)
    for tau in (1.0, 0.05):
        y, hi, lo = forward(x, k, tau, cdf)
        grad_lo = torch.zeros_like(hi)
        rest = (hi, lo, torch.tensor(tau, dtype=torch.float64), cdf, CDFS[cdf], "y")
        got = torch.ops.khot.soft_topk_backward(grad, grad_lo, x, *rest, y)
        want = reference.soft_topk_backward(grad.double(), grad_lo, x.double(), *rest)
        z = reference.standardize(x.double(), hi, lo, rest[2])
        terms = torch.exp(-z.abs()).amax(-1) / tau  # these cancel in dx where n is small
        assert ((got[0] - want[0]).abs().amax(-1) <= 2e-5 * want[0].abs().amax(-1) + 2e-6 * terms).all()
        assert error(got[1], want[1]) <= 2e-5


@needs_extension
@every_cdf
def test_gaps_and_ends_have_the_reference_gradients(cdf: str) -> None:
    x = torch.tensor([[5.0, 3.0, 3.0, 0.0, -2.0]] * 6, dtype=torch.float64)
    k = torch.tensor([0.0, 1.0, 3.0, 4.0, 5.0, 2.5], dtype=torch.float64)
    grad = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    t = torch.tensor(0.05, dtype=torch.float64)
    for output in ("y", "log"):
        _, hi, lo = forward(x, k, 0.05, cdf)
        rest = (torch.zeros_like(hi), x, hi, lo, t, cdf, CDFS[cdf], output)
        got = torch.ops.khot.soft_topk_backward(grad, *rest)
        want = reference.soft_topk_backward(grad, *rest)
        for a, b in zip(got, want, strict=True):
            assert error(a, b) <= 1e-9 * (1 + b.abs().nan_to_num().amax().item())


@needs_extension
@every_dtype
def test_every_length(dtype: torch.dtype) -> None:
    for n in range(1, 71):
        x = torch.randn(17, n, generator=torch.Generator().manual_seed(n)).to(dtype)
        assert (
            error(forward(x, n / 3, 0.3, "logistic")[0], expected(x, n / 3, 0.3, "logistic")[0])
            <= (TOLERANCE[dtype])
        )


@needs_extension
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_one_openmp_runtime() -> None:
    khot.sigmoid_topk(torch.randn(64, 4_096), 10)
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    files = {Path(line.split()[-1]) for line in maps.splitlines() if "/" in line}
    runtimes = {f for f in files if f.name.startswith(("libgomp", "libiomp", "libomp"))}
    assert len({f for f in runtimes if "torch" in str(f)} or runtimes) == 1


@pytest.mark.parametrize("choice", ["", "reference", "baseline", "avx2"])
def test_the_choice_of_kernels(choice: str) -> None:
    program = (
        "import khot, torch; from khot import _kernels as kernels; print(kernels.active()['cpu'])\n"
        "print(khot.sigmoid_topk(torch.arange(300.0) / 50, 30).sum().item())"
    )
    run = fresh.run(program, KHOT_KERNELS=choice)
    assert run.returncode == 0, run.stderr
    active, total = run.stdout.split("\n")[:2]
    built = any(Path(khot.__file__).parent.glob("_C.*"))
    if choice == "reference" or not built:
        assert active == "reference"
    else:
        assert active.startswith("compiled (baseline" if choice == "baseline" else "compiled (")
    assert abs(float(total) - 30) <= 1e-4


@pytest.mark.parametrize(
    ("choice", "message"), [("fast", "KHOT_KERNELS must be one of"), ("triton", "needs TRITON_INTERPRET=1")]
)
def test_an_unknown_choice_is_an_error(choice: str, message: str) -> None:
    run = fresh.run("import khot", KHOT_KERNELS=choice, TRITON_INTERPRET="0")
    assert run.returncode != 0 and message in run.stderr


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "soft_topk": lambda x: khot.soft_topk(x, torch.full((4,), 2.0)),
    "soft_count": lambda x: khot.soft_count(x, 0.0),
    "soft_budget": lambda x: khot.soft_budget(x, torch.ones(8), 3.0),
    "project_permutahedron": lambda x: khot.project_permutahedron(x, torch.arange(8.0).flip(0)),
    "soft_assign": lambda x: khot.soft_assign(x, 2.0),
}


class _Heap(ctypes.Structure):
    """What glibc's mallinfo2 returns."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
            "keepcost",
        )
    ]  # fmt: skip


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_calls_leave_nothing_on_the_heap(call: Callable[[Tensor], Tensor]) -> None:
    """A few bytes that a call leaves keep what is around them from being used again, in a long training."""
    heap = getattr(ctypes.CDLL(None), "mallinfo2", None) if sys.platform == "linux" else None
    if heap is None:
        pytest.skip("needs glibc 2.33")
    heap.restype = _Heap
    x = torch.randn(4, 8, requires_grad=True)

    def used(calls: int) -> int:
        for _ in range(calls):
            call(x).square().sum().backward()
            x.grad = None
        gc.collect()
        return int(heap().uordblks)

    sizes = [used(50), used(100), used(100)]  # what happens beside the calls only adds to it
    assert min(sizes[1] - sizes[0], sizes[2] - sizes[1]) < 100 * 16
