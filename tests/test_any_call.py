"""Unusual input to any operator on rows: random calls that the documentation allows, and what holds for each.

±inf, NaN, numbers that stand for −inf, ends of k, temperatures of any size and empty tensors have a result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from drawn import f64
from khot import cdfs
from operators import FIRST, Operator

INF, NAN = math.inf, math.nan
OPERATORS = [op for op in FIRST if op.arguments.family]
CDFS = ["logistic", "laplace", "normal", "uniform", cdfs.Power(4 / 3), cdfs.Power(1.15), cdfs.Power(3)]

GOOD_VALUES = [0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 3.25, -2.5, 0.1, 17.0]
ODD_VALUES = [INF, -INF, NAN, 1e308, -1e308, 5e-324, 1e-40, 1e4, -1e4, -1e9, 1e30, -1e30]
TAUS = [1.0, 0.1, 10.0, 3.0, 1e-3, 1e-300, 1e-17, 1e17, 1e300]
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
    """What the documentation allows; test_bad_input.py has what it does not."""
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
    if op.name == "ot_topk" and odds(draw, 2):
        call.options["normalize"] = True
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
        call.options["tau"] = draw_scalar(
            draw, batch, [*TAUS, 5e-324][: None if op.name == "ot_topk" else -1]
        )
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
