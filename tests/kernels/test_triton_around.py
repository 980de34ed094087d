"""What plain calls do around the launches of their operators, interpreted, against torch's operations."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

every_dtype = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str
)
every_width = pytest.mark.parametrize("n", [1, 7, 1500])  # the last are of two programs


def entries(rows: int, n: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Among them NaN, infinities and both zeros."""
    x = torch.randn(rows, n, generator=torch.Generator().manual_seed(seed))
    for i, special in enumerate((torch.nan, torch.inf, -torch.inf, 0.0, -0.0)):
        x[i % rows, (3 * i + seed) % n] = special
    return x.to(dtype)


def some(rows: int, n: int) -> Tensor:
    return torch.rand(rows, n, generator=torch.Generator().manual_seed(9)) > 0.4


def spread(x: Tensor | None, inner: int = 1) -> tuple[Any, ...]:
    """Where the entries of (rows, n) or (outer, inner, n) lie."""
    if x is None:
        return None, 1, 0, 0, 0
    outer, row = (x.stride(0), 0) if x.dim() == 2 else (x.stride(0), x.stride(1))
    return x, inner, outer, row, x.stride(-1)


def run(kernels: ModuleType, how: str, v: Tensor, **more: Any) -> Tensor:
    inner = v.shape[1] if v.dim() == 3 else 1
    rows, n = v[..., 0].numel(), v.shape[-1]
    out, second = v.new_empty(rows, n), more.get("second")
    mask, other = (spread(more.get(name), inner) for name in ("mask", "other"))
    width = min(kernels.around.WIDTH, 1 << (n - 1).bit_length())
    together = min(4, kernels.around.WIDTH // width)
    programs = -(-rows // together) * -(-n // width)
    given = (*spread(v, inner), *mask, *other, out, second, rows, n, more.get("sign", 1.0))
    start = kernels.launch.variant(
        kernels.around._around, HOW=kernels.around.HOW[how], TOGETHER=together, WIDTH=width, num_warps=4
    )
    start(programs, *given, more.get("fill", 0.0))
    return out.view(v.shape)


def same(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    numbers = ~wanted.isnan()
    assert torch.equal(found.signbit()[numbers], wanted.signbit()[numbers])


@every_dtype
@every_width
def test_masks_and_signs(kernels: ModuleType, n: int, dtype: torch.dtype) -> None:
    x, other, mask = entries(5, n, dtype, 0), entries(5, n, dtype, 1).nan_to_num(2), some(5, n)
    sign = torch.ones_like(other).copysign(other)
    same(run(kernels, "fill", x, mask=mask, fill=-torch.inf), x.where(mask, -torch.inf))
    same(run(kernels, "fill", x, sign=-1.0), -x)
    same(run(kernels, "fill", x, mask=mask[:, :1].expand(5, n), sign=-1.0), (-x).where(mask[:, :1], 0))
    same(
        run(kernels, "sizes", x, mask=mask, other=other, fill=-torch.inf), (x * sign).where(mask, -torch.inf)
    )
    same(run(kernels, "signs", x, other=other), x * sign)
    cost = torch.empty_like(other)
    run(kernels, "fill", x, mask=mask, other=other[0].expand(5, n), second=cost)
    same(cost, other[0].where(mask, 0))


@every_dtype
@every_width
def test_ranks(kernels: ModuleType, n: int, dtype: torch.dtype) -> None:
    rank, x, mask = entries(5, n, dtype, 2), entries(5, n, dtype, 3), some(5, n)
    out = (~mask).sum(-1, keepdim=True)
    for last in (-torch.inf, torch.inf):
        wanted = (rank - 0.5 * out).where(x == last, rank) * mask
        if dtype == torch.bfloat16:  # the interpreter cuts off what it does not store
            wanted = (wanted.view(torch.int32) & -(1 << 16)).view(torch.float32)
        same(run(kernels, "ranks", rank, mask=mask, other=x, fill=last), wanted.to(dtype))
    same(run(kernels, "product", rank, mask=mask), rank * mask)
    sample = mask.to(dtype)  # other products the interpreter rounds in its own way
    sample[0] = torch.nan
    same(run(kernels, "product", rank, other=sample), rank * sample)


@every_dtype
@every_width
def test_places(kernels: ModuleType, n: int, dtype: torch.dtype) -> None:
    t, y, mask = entries(5, n, dtype, 4), entries(5, n, dtype, 5), some(5, n)
    taken = torch.arange(1, n + 1) <= mask.sum(-1, keepdim=True)
    same(run(kernels, "places", t, mask=mask), t.where(taken | t.isnan(), 0))
    same(run(kernels, "places", t, mask=mask, other=y), t.where(taken | y.isnan(), 0))


def test_rows_that_lie_elsewhere(kernels: ModuleType) -> None:
    """Along every dimension of a tensor, and of one without distances."""
    x, mask = entries(6, 20, torch.float32, 6).view(6, 4, 5), some(6, 20).view(6, 4, 5)
    for dim in range(3):
        v, m = x.movedim(dim, -1), mask.movedim(dim, -1)
        same(run(kernels, "fill", v, mask=m, fill=7.0), v.where(m, 7.0))
    row = x[0, :1].expand(4, 5)
    same(run(kernels, "fill", row), row)
