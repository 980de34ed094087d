"""Bad and unusual input: each documented case for every operator, then random input.

Wrong values raise ValueError, wrong types and dtypes TypeError, and wrong dims IndexError. Each message names
the argument and the value. Numbers always raise; tensors raise on the CPU in eager mode and make their row
NaN under torch.compile. Unusual input (±inf, NaN, ends of k, empty tensors) has a result.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import khot
import oracles
from drawn import f64
from khot import cdfs
from khot._core.names import OTHER_NAMES
from operators import FIRST, Operator

INF, NAN = math.inf, math.nan

OPERATORS = [op for op in FIRST if op.arguments.family]


def each(where: Callable[[Operator], bool] = lambda op: True) -> pytest.MarkDecorator:
    chosen = [op for op in OPERATORS if where(op)]
    return pytest.mark.parametrize("op", chosen, ids=[op.name for op in chosen])


# ---------------------------------------------------------------------------- what raises, line by line

X = torch.tensor([[3.0, -1.0, 2.0, 0.5], [0.1, 0.2, 0.3, 0.4]])
MASK = torch.tensor([True, False, True, False])


def test_messages_write_whole_numbers_as_integers() -> None:
    """Unless the user's own tensor has floats."""
    for call, said in (
        (lambda: khot.soft_topk(X, torch.tensor(7)), r"k must lie in \[0, 4\], but got 7"),
        (lambda: khot.soft_topk(X, 3, mask=MASK), r"k must lie in .*, but got 3 for a row with 2"),
        (lambda: khot.soft_topk(X, 2.5, mask=MASK), r"k must lie in .*, but got 2\.5 for a row with 2"),
        (lambda: khot.soft_assign(X, 3, mask=MASK), r"k must lie in .*, but got 3 for a row with 2"),
        (lambda: khot.kth_value(X, 3, mask=MASK), r"k must lie in .*, but got 3 for a row with 2"),
        (
            lambda: khot.inverse_soft_count(X, torch.tensor(-1)),
            r"count must lie in \[0, 4\], but got -1",
        ),
        (
            lambda: khot.sampling.conditional_poisson.log_normalizer(X, torch.tensor(9)),
            r"k must be an integer in \[0, 4\], but got 9",
        ),
        (
            lambda: khot.sampling.conditional_poisson.log_normalizer(X, 9),
            r"k must be an integer in \[0, 4\], but got 9",
        ),
        (
            lambda: khot.losses.FenchelYoungTopKLoss(-1),
            r"k must be finite and >= 0, but got -1",
        ),
        (
            lambda: khot.soft_assign(X, 2, torch.ones(4) / 2),
            r"capacity must .* that of k, 4, but got 2",
        ),
    ):
        with pytest.raises(ValueError, match=f"^{said}"):
            call()


def typename(value: Any) -> str:
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__


@pytest.mark.parametrize("value", [np.int64(2), np.float32(2), Fraction(2)], ids=typename)
@each()
def test_k_tau_and_dim_of_other_number_types(op: Operator, value: Any) -> None:
    assert torch.equal(op.plain(X, value), op.plain(X, 2))
    if op.arguments.tau is not None:
        assert torch.equal(op.plain(X, tau=value), op.plain(X, tau=2))
    assert torch.equal(op.plain(X, 1, dim=np.int64(0)), op.plain(X, 1, dim=0))


@each()
def test_compiled_bad_tensors_give_nan_in_their_row(op: Operator) -> None:
    """There is no exception, because nothing waits for a device; the good row is as in eager mode."""
    torch._dynamo.reset()
    x, at_dim = X[[0, 0, 0]].double(), (3, 1) if op.arguments.family in ("count", "threshold") else (3,)
    compiled = torch.compile(
        lambda x, k, tau: op.plain(x, k, tau=tau, **({"mask": MASK} if op.has_mask else {})),
        fullgraph=True,
        backend="aot_eager",
    )
    good, one = f64([2, 2, 2]), torch.ones(3, dtype=torch.float64)
    want = compiled(x, good.reshape(at_dim), one)
    assert not want.isnan().any()
    if op.arguments.k_in_range:
        above = 3 if op.has_mask else 5  # where the mask allows two
        y = compiled(x, f64([2, above, -1]).reshape(at_dim), one)
        assert y[1:].isnan().all() and torch.equal(y[0], want[0])
    if op.arguments.tau is not None:
        y = compiled(x, good.reshape(at_dim), f64([1, 0, -1]))
        assert y[1:].isnan().all() and torch.equal(y[0], want[0])


# ----------------------------------------------------------------- what gets an answer, line by line

ROW = [3.0, -1.0, 2.0, 0.5]


OPTIONS: dict[str, list[dict[str, Any]]] = {
    "soft_topk": [
        *({"cdf": c} for c in ("logistic", "laplace", "normal", "uniform", cdfs.Power(1.5))),
        {"hard": True},
        {"largest": False},
    ],
    "log_soft_topk": [{"cdf": c} for c in ("logistic", "laplace", "normal", "uniform", cdfs.Power(1.5))],
    "ot_topk": [{}, {"normalize": True}],
    "sparse_topk": [{}, {"p": 4 / 3}],
    "soft_topk_magnitude": [{"p": p, "rescale": r} for p in (2.0, 1.5) for r in (False, True)],
    "inverse_soft_count": [{"cdf": c} for c in ("logistic", "laplace", "normal", "uniform")],
    "soft_count": [{"cdf": c} for c in ("logistic", "laplace", "normal", "uniform")],
}


def variants(
    where: Callable[[Operator], bool] = lambda op: True, without: str | None = None
) -> pytest.MarkDecorator:
    cases = [(op, options) for op in OPERATORS if where(op) for options in OPTIONS.get(op.name, [{}])]
    cases = [(op, options) for op, options in cases if without not in options]
    ids = [f"{op.name}-{'-'.join(map(str, options.values()))}" for op, options in cases]
    return pytest.mark.parametrize(("op", "options"), cases, ids=ids)


@variants(lambda op: op.arguments.family in ("threshold", "count"))
def test_infinite_entries_and_levels(op: Operator, options: dict[str, Any]) -> None:
    """+inf counts as 1 and −inf as 0; all entries are above the level −inf, and none above +inf."""
    kept, x = f64(ROW), f64([INF, *ROW, -INF, INF])
    if op.arguments.family == "count":
        for at in (0.3, 2.0, 1e300, -1e300):
            torch.testing.assert_close(
                op.plain(x, at, tau=0.5, **options), op.plain(kept, at, tau=0.5, **options) + 2
            )
        assert op.plain(kept, INF, **options) == 0 and op.plain(kept, -INF, **options) == 4
        assert op.plain(kept, f64(INF), **options) == 0 and op.plain(
            kept, f64([-INF]), **options
        ).tolist() == [4]
        return
    for count in (0.5, 1, 3.5):
        got, want = op.plain(x, count + 2, tau=0.5, **options), op.plain(kept, count, tau=0.5, **options)
        torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-15)
    assert op.plain(x, 2, **options) == INF and op.plain(x, 6, **options) == -INF
    assert op.plain(x, 1, **options).isnan()


@variants()
def test_zero_has_no_sign(op: Operator, options: dict[str, Any]) -> None:
    for k in (1, 2, 4):
        x = f64([2.0, 0.0, -1.0, 0.0])
        got, want = (
            op.plain(x * f64([1, -1, 1, 1]), k, tau=0.5, **options),
            op.plain(x, k, tau=0.5, **options),
        )
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
# without normalize, because a cost of 1e60 makes all entries equal
@variants(lambda op: op.name in ("soft_topk", "ot_topk"), without="normalize")
def test_finite_numbers_that_stand_for_minus_infinity(
    op: Operator, options: dict[str, Any], dtype: torch.dtype
) -> None:
    """Scores masked by −1e4, −1e9, −1e30 or finfo.min, for several scores and k."""
    info = torch.finfo(dtype)
    fills = [fill for fill in (-1e4, -1e9, -1e30, max(info.min, -1e307)) if fill >= info.min]
    sign = -1 if options.get("largest") is False else 1
    rows = [[*row, fill, fill] for fill in fills for row in ([0.0, 1.0, 2.0], [45.75, 45.75, -INF])]
    x, n = sign * f64(rows).to(dtype), f64([3, 2] * len(fills))
    for k in (torch.ones_like(n), n - 0.5, n):
        for tau in (0.01, 10.0):
            y = op.plain(x, k, tau=tau, **options).double()
            asked = torch.floor(k + 0.5) if options.get("hard") else k
            allowed = (1e-12 if dtype == torch.float64 else 1e-6) * k + x.shape[-1] * info.eps / 2
            assert ((y.sum(-1) - asked).abs() <= allowed).all(), (x, k, tau, y)
            assert (y[:, -2:] <= 1e-200).all(), (x, k, tau, y)  # e^−500 at −1e4


@pytest.mark.parametrize("fill", [-1e9, -1e20, -1e30, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("cdf", ["logistic", "laplace", "normal", "uniform"])
def test_stand_ins_of_minus_infinity_agree_with_50_digits(cdf: str, fill: float) -> None:
    x = torch.tensor([0.0, 1.0, 2.0, fill])
    for k, tau in ((1, 1.0), (1.5, 0.01), (2.5, 10.0)):
        want, _, _ = oracles.soft_topk(x, k, tau, cdf)
        got = khot.soft_topk(x, k, tau=tau, cdf=cdf).double().numpy()
        np.testing.assert_allclose(got, want, atol=5e-7, rtol=0)


CDFS = ["logistic", "laplace", "normal", "uniform", cdfs.Power(4 / 3), cdfs.Power(1.15), cdfs.Power(3)]


def padded(rows: list[list[float]]) -> tuple[Tensor, Tensor]:
    """Rows of different lengths, filled up with −inf, and the lengths."""
    longest = max(map(len, rows))
    return f64([row + [-INF] * (longest - len(row)) for row in rows]), f64([len(row) for row in rows])


def assert_sums(y: Tensor, k: Any, *context: Any) -> None:
    assert ((y.sum(-1) - k).abs() <= 1e-12).all(), (k, *context, y)


any_tau = pytest.mark.parametrize("tau", [1e-300, 1e-100, 1e-17, 1e17, 1e100, 1e300])
PLAIN_ROWS = [[1, 2, 2, -1], [1, 1, 1], [0, 0.5], [1 + 2**-52, -0.75, -0.75], [1e4, 2**-1074, -1e4]]


@any_tau
@pytest.mark.parametrize("cdf", CDFS, ids=str)
def test_tau_of_any_size(cdf: Any, tau: float) -> None:
    x, n = padded(PLAIN_ROWS)
    for k in (0.3, 1, 1.75, n - 0.5):
        assert_sums(khot.soft_topk(x, k, tau=tau, cdf=cdf), k)
        assert_sums(khot.log_soft_topk(x, k, tau=tau, cdf=cdf).exp(), k)


@any_tau
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("cdf", CDFS, ids=str)
def test_tau_of_any_size_in_counts(cdf: Any, tau: float, dtype: torch.dtype) -> None:
    """Also where tau is 0 or inf in the dtype of the scores."""
    x, n = padded(PLAIN_ROWS)
    at = torch.cat([x[:, :2], f64([0, 3e38, -3e38]).expand(5, 3)], -1)
    x = x.to(dtype)
    counts = khot.soft_count(x, at, tau=tau, cdf=cdf)
    assert ((counts >= 0) & (counts <= n[:, None])).all(), counts
    levels = torch.stack([torch.full_like(n, 0.5), torch.ones_like(n), n - 0.25], -1)
    assert not khot.inverse_soft_count(x, levels, tau=tau, cdf=cdf).isnan().any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_ot_topk_normalizes_by_any_cost(dtype: torch.dtype) -> None:
    """(1e30)² overflows float32 and 1e200² float64; the scores are still good ones."""
    big = 1e200 if dtype == torch.float64 else 1e30
    y = khot.ot_topk(torch.tensor([big, 0, 1.0], dtype=torch.float64).to(dtype), 1, normalize=True)
    assert y.double().sum() == pytest.approx(1, abs=1e-12 if dtype == torch.float64 else 4e-3)


@pytest.mark.parametrize("epsilon", [5e-324, torch.tensor(6e-8, dtype=torch.float16)], ids=["number", "half"])
def test_ot_topk_of_the_least_epsilon(epsilon: Any) -> None:
    """Half of it is 0 in its own dtype, although the user passed no tau of 0."""
    y = khot.ot_topk(f64([3, 1, 2]), 1, epsilon=epsilon)
    torch.testing.assert_close(y, f64([1, 0, 0]))


# -------------------------------------------------------------------------------------------- at random

GOOD_VALUES = [0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 3.25, -2.5, 0.1, 17.0]
ODD_VALUES = [INF, -INF, NAN, 1e308, -1e308, 5e-324, 1e-40, 1e4, -1e4, 1e30, -1e30]
SHAPES = [(), (1,), (3,), (5,), (9,), (2, 4), (3, 1), (1, 6), (2, 2, 3), (0,), (0, 4), (2, 0)]
DTYPES = [torch.float64] * 3 + [torch.float32] * 3 + [torch.bfloat16, torch.float16]


def odds(draw: Any, one_in: int) -> bool:
    return draw(st.integers(1, one_in)) == 1


def draw_scalar(draw: Any, batch: tuple[int, ...], good: list[float]) -> Any:
    """A number, or a tensor that broadcasts with the rows."""
    value = st.sampled_from(good)
    if not odds(draw, 3):
        return draw(value)
    dtype = draw(st.sampled_from([torch.float64] * 4 + [torch.float32, torch.int64]))
    shape = draw(st.sampled_from([(), batch, (1,) * len(batch)]))
    tensor = f64([draw(value) for _ in range(math.prod(shape))]).reshape(shape)
    whole = bool((tensor == tensor.floor()).all()) and bool((tensor.abs() < 100).all())
    return tensor.to(dtype) if whole or dtype == torch.float64 else tensor


@dataclass
class Call:
    op: Operator
    x: Tensor
    k: Any
    dim: int
    options: dict[str, Any]


@st.composite
def calls(draw: Any) -> Call:
    """What the documentation allows; test_hostile.py has what it does not."""
    op = draw(st.sampled_from(OPERATORS))
    shape = draw(st.sampled_from(SHAPES))
    dtype = draw(st.sampled_from(DTYPES))
    pool = st.sampled_from(GOOD_VALUES if not odds(draw, 3) else GOOD_VALUES + ODD_VALUES)
    x = f64([draw(pool) for _ in range(math.prod(shape))]).reshape(shape)
    if dtype != torch.float64:  # a large number stays finite
        x = torch.where(x.isfinite(), x.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max), x)
    ndim = max(1, len(shape))
    dim = draw(st.integers(-ndim, ndim - 1))
    batch = tuple(s for i, s in enumerate(shape) if i != dim % ndim)
    call = Call(op, x.to(dtype), 0, dim, {})
    if op.has_mask and odds(draw, 3):
        masked = draw(st.sampled_from([shape, shape, shape[-1:], ()]))
        p = draw(st.sampled_from([1, 2, 4, 8]))  # one in p is left out; all at p = 1
        given = [not odds(draw, p) for _ in range(math.prod(masked))]
        call.options["mask"] = torch.tensor(given, dtype=torch.bool).reshape(masked)
    if op.arguments.family in ("mask", "log", "hard") and odds(draw, 4):
        call.options["largest"] = False
    if op.arguments.family == "mask" and odds(draw, 6):
        call.options["hard"] = True
    if op.name in ("soft_topk", "log_soft_topk", "soft_count", "inverse_soft_count"):
        call.options["cdf"] = draw(st.sampled_from(CDFS))
    if op.name in ("sparse_topk", "soft_topk_magnitude"):
        call.options["p"] = draw(st.sampled_from([2.0, 1.5, 1.15, 2, 4 / 3, 1.9, 3.0]))
    if op.arguments.family == "magnitude" and odds(draw, 3):
        call.options["rescale"] = True
    counts = (scores(call) != -INF).sum(-1)
    n = int(counts.min()) if counts.numel() else 0  # of each row, so many can be selected
    places = [0.0, 1.0, float(n), n / 2, n // 2, n - 0.5, 0.25, 1e-300]
    if op.arguments.family == "magnitude":
        places = [float(round(k)) for k in places]
    good = [k for k in places if 0 <= k <= n]
    if op.arguments.family == "count":
        good = [0.0, 1.0, -3.5, 1e308, INF, -INF]
    call.k = draw_scalar(draw, batch, good)
    if op.arguments.family in ("count", "threshold") and isinstance(call.k, Tensor) and call.k.dim():
        call.k = call.k.reshape(-1)[0].reshape((1,) * len(shape)) if call.k.numel() else call.k
    if op.arguments.tau is not None and not odds(draw, 4):
        call.options["tau"] = draw_scalar(draw, batch, [1.0, 0.1, 10.0, 3.0, 1e-3, 1e-300, 1e300])
    return call


def scores(call: Call) -> Tensor:
    """Rows along the last dim, larger is better, −inf where the mask is False; float64."""
    x = call.x.double()
    if call.op.arguments.family == "magnitude":
        x = x.abs()
    if call.options.get("largest") is False:
        x = -x
    if call.options.get("mask") is not None:
        x = torch.where(call.options["mask"], x, -INF)
    return x.movedim(call.dim, -1) if x.dim() else x.reshape(1)


def has_levels(name: str, value: Any, dims: int) -> bool:
    """The counting operators take a tensor with m levels along dim, or one level per row."""
    return name in ("at", "count") and isinstance(value, Tensor) and value.dim() >= max(dims, 1)


def values_of(value: Any, s: Tensor, levels_dim: int | None = None) -> Tensor:
    """k or tau of each row, (*batch, 1), or its levels, (*batch, m)."""
    if not isinstance(value, Tensor):
        return torch.full((*s.shape[:-1], 1), float(value), dtype=torch.float64)
    if levels_dim is not None:
        value = value.movedim(levels_dim, -1)
        return value.double().expand(*s.shape[:-1], value.shape[-1])
    return value.double().expand(s.shape[:-1]).unsqueeze(-1)


def assert_answer(call: Call, y: Tensor) -> None:
    op, s = call.op, scores(call)
    levels = has_levels(op.arguments.k, call.k, call.x.dim())
    k = values_of(call.k, s, call.dim if levels else None)
    assert y.dtype == call.x.dtype
    y = y.double()
    if op.arguments.family in ("count", "threshold"):
        y = y.movedim(call.dim, -1) if levels else y.unsqueeze(-1)
        assert y.shape == k.shape
        y = y.unsqueeze(-1)
    else:
        assert y.shape == call.x.shape
        y = (y.movedim(call.dim, -1) if y.dim() else y.reshape(1)).unsqueeze(-2)
    if s.numel() and k.numel():
        rows = (a.flatten(0, -d) if a.dim() >= d else a[None] for a, d in ((s, 2), (k, 2), (y, 3)))
        for row, places, outs in zip(*rows, strict=True):
            for place, out in zip(places.tolist(), outs, strict=True):
                assert_row(call, row, place, out)


def assert_row(call: Call, s: Tensor, k: float, y: Tensor) -> None:
    family, n, dtype = call.op.arguments.family, len(s), call.x.dtype
    pinned, selectable = int((s == INF).sum()), int((s != -INF).sum())
    if family == "count":
        assert bool(y.isnan()) == (bool(s.isnan().any()) or math.isnan(k))
        assert y.isnan() or 0 <= y <= n
        return
    if family == "hard" and k < pinned <= math.floor(k + 0.5):
        return  # by "more than k" this row is NaN, but by the rounded k there is room
    if s.isnan().any() or pinned > k:
        assert y.isnan().all()
        return
    assert not y.isnan().any()
    if family == "threshold":
        assert (y == INF) if k == pinned else (y == -INF) if k == selectable else True
    elif family == "magnitude":
        assert (y.abs() <= s.clamp(min=0) * (1 + 1e-14)).all()
        assert y[s.isfinite()].isfinite().all()
    else:
        share = y.exp() if family == "log" else y
        assert (share >= 0).all() and (share <= 1).all()
        assert (share[s == -INF] == 0).all() and (share[s == INF] == 1).all()
        total = math.floor(k + 0.5) if family == "hard" or call.options.get("hard") else k
        exact = 1e-12 if dtype == torch.float64 else 1e-6
        eps = torch.finfo(dtype).eps * (1 if family == "log" else 0.5)  # |y log y| < 0.37, with a last exp
        assert abs(share.sum() - total) <= exact * max(1, min(k, n - k)) + n * eps


@settings(
    max_examples=1000,
    derandomize=True,
    deadline=None,
    database=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(calls())
def test_any_good_call_has_a_valid_answer(call: Call) -> None:
    assert_answer(call, call.op.plain(call.x, call.k, call.dim, **call.options))


@pytest.mark.parametrize(
    "call,error,said",
    [
        (lambda: khot.soft_topk(torch.ones(3), 1, cdf="logistc"), ValueError, "; did you mean 'logistic'?"),
        (
            lambda: khot.soft_rank(torch.ones(3), method="projecton"),
            ValueError,
            "; did you mean 'projection'?",
        ),
        (
            lambda: khot.sample_khot(torch.ones(3), 1, design="paretto"),
            ValueError,
            "; did you mean 'pareto'?",
        ),
        (lambda: khot.nn.Anneal(1.0, 0.5, schedule="linar"), ValueError, "; did you mean 'linear'?"),
        (
            lambda: khot.losses.ndcg_loss(torch.ones(3), torch.ones(3), reduction="meen"),  # type: ignore[arg-type]
            ValueError,
            "; did you mean 'mean'?",
        ),
        (
            lambda: khot.nn.TopKSAE(3, 5, k=2).loss(torch.ones(1, 3), "lgo"),  # type: ignore[arg-type]
            ValueError,
            "; did you mean 'log'?",
        ),
        (
            lambda: khot.nn.sae_to_layout(khot.nn.TopKSAE(3, 5, k=2), "saelen"),  # type: ignore[arg-type]
            ValueError,
            "; did you mean 'saelens'?",
        ),
        (
            lambda: khot.losses.ndcg_loss(torch.ones(2), torch.tensor([1.0, -1.0])),
            ValueError,
            "relevance must be finite and >= 0, but got -1.0",
        ),
        (
            lambda: khot.nn.SoftTopK(torch.tensor([8.0, 4.0])),  # type: ignore[arg-type]
            ValueError,
            "k must be one number, or a module that returns one, but got shape (2,); functions such as "
            "khot.soft_topk take one for each row",
        ),
        (lambda: khot.soft_topk(torch.ones(3), 1, cdf="xyz"), ValueError, "but got 'xyz'"),
        (lambda: khot.soft_topk(torch.ones(3), 1, cdf=khot.cdfs.Normal), TypeError, "call it: Normal()"),
        (lambda: khot.soft_topk(torch.ones(3), 1, 0.5), TypeError, "such as tau, go by name"),
    ],
)
def test_what_was_meant(call: Callable[[], Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error) as info:
        call()
    assert str(info.value).endswith(said)


# A call for each of these arguments, which gives it a name.
NAMED: dict[str, Callable[[Any], Any]] = {
    "cdf": lambda name: khot.soft_topk(torch.ones(3), 1, cdf=name),
    "estimator": lambda name: khot.sample_khot(torch.ones(3), 1, estimator=name),
    "design": lambda name: khot.sample_khot(torch.ones(3), 1, design=name),
    "schedule": lambda name: khot.nn.Anneal(1.0, 0.5, steps=2, schedule=name),
    "regularization": lambda name: khot.project_permutahedron(
        torch.ones(3), torch.ones(3), regularization=name
    ),
    "reduction": lambda name: khot.losses.ndcg_loss(torch.ones(3), torch.ones(3), reduction=name),
}
MEANT = [
    ("cdf", "sigmoid", "logistic"),
    ("cdf", "gaussian", "normal"),
    ("cdf", "probit", "normal"),
    ("cdf", "erf", "normal"),
    ("cdf", "laplacian", "laplace"),
    ("cdf", "double exponential", "laplace"),
    ("cdf", "hard-sigmoid", "uniform"),
    ("estimator", "ste", "straight_through"),
    ("estimator", "st", "straight_through"),
    ("estimator", "straight-through", "straight_through"),
    ("estimator", "gumbel-softmax", "gumbel"),
    ("estimator", "I-MLE", "imle"),
    ("estimator", "reinmax", "second_order"),
    ("design", "maximum entropy", "conditional_poisson"),
    ("schedule", "exp", "exponential"),
    ("schedule", "cos", "cosine"),
    ("regularization", "euclidean", "l2"),
    ("regularization", "entropic", "kl"),
    ("reduction", "average", "mean"),
]


@pytest.mark.parametrize("argument, called, meant", MEANT)
def test_what_other_code_calls_it(argument: str, called: str, meant: str) -> None:
    NAMED[argument](meant)
    for spelled in (called, called.upper(), called.title()):
        with pytest.raises(ValueError, match=rf"^{argument} must be .*; did you mean '{meant}'\?$"):
            NAMED[argument](spelled)


def test_every_other_name_is_of_an_argument() -> None:
    shown = {re.sub("[- ]", "_", called.lower()): meant for _, called, meant in MEANT}
    assert set(shown.values()) >= set(OTHER_NAMES.values())
    for called, meant in OTHER_NAMES.items():
        assert any(_hints(call, called, meant) for call in NAMED.values()), called


def _hints(call: Callable[[Any], Any], called: str, meant: str) -> bool:
    with pytest.raises(ValueError, match="must be") as info:
        call(called)
    return str(info.value).endswith(f"; did you mean {meant!r}?")
