"""The k largest entries with their indices, against the first k of a stable sort by NumPy."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from torch import Tensor

import khot

INF, NAN = math.inf, math.nan
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
KINDS = (
    *("normal", "ascending", "descending", "ties", "equal", "periodic", "cauchy"),
    *("infinite", "nan", "all nan", "zeros", "outlier", "no numbers"),
)


def rows(kind: str, count: int, n: int) -> Tensor:
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(count, n, generator=generator, dtype=torch.float64)
    place = torch.arange(n)
    if kind in ("ascending", "descending"):
        x = x.sort(-1, descending=kind == "descending").values
    elif kind == "ties":
        x = (4 * x).round() / 4
    elif kind == "equal":
        x = torch.full_like(x, -3.0)
    elif kind == "periodic":  # every 128th entry is among the largest
        x = torch.sin(place * 2 * math.pi / 128) + 1e-3 * x
    elif kind == "cauchy":
        x = x / torch.randn(count, n, generator=generator, dtype=torch.float64)
    elif kind == "infinite":
        x = torch.where(x > 1, INF, torch.where(x < -0.5, -INF, x))
    elif kind == "nan":
        x = torch.where(x > 1.5, NAN, x)
        x[:, ::7] *= -1  # the sign of a NaN does not count
    elif kind == "all nan":
        x = torch.full_like(x, NAN)
    elif kind == "zeros":  # of both signs, which are equal
        x = torch.where(x > 1.5, x, 0.0 * x)
    elif kind == "outlier":
        x = torch.full_like(x, 1.0)
        x[:, n // 3] = 2.0
    elif kind == "no numbers":
        x = torch.where(x > 0, INF, torch.where(x < -1, -INF, NAN))
    return x


def order(x: Tensor, largest: bool) -> Tensor:
    """The indices of a stable sort along the last dim, NaN as the largest number."""
    numbers = x.double().numpy()
    found = np.argsort(numbers, -1, "stable")  # NaN last
    if largest:  # the stable order of the falling entries is that of the reversed row, reversed
        found = x.shape[-1] - 1 - np.argsort(numbers[..., ::-1], -1, "stable")[..., ::-1]
    return torch.from_numpy(np.ascontiguousarray(found))


def assert_same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def check(x: Tensor, places: Iterable[int]) -> None:
    for largest in (True, False):
        whole = order(x, largest)
        for k in places:
            want = whole[..., :k]
            values, indices = khot.topk(x, k, largest=largest)
            assert (values.dtype, indices.dtype) == (x.dtype, torch.int64)
            assert torch.equal(indices, want)
            assert_same(values, x.gather(-1, want))
            signs = [v.masked_fill(v.isnan(), 1).signbit() for v in (values, x.gather(-1, want))]
            assert torch.equal(*signs)  # a zero keeps its sign
            values, indices = khot.topk(x, k, largest=largest, sorted=False)
            assert torch.equal(indices.sort(-1).values, want.sort(-1).values)
            assert_same(values, x.gather(-1, indices))


# 17 rows, so that some are taken together by kernels that do so
SIZES = [(17, 1), (17, 40), (17, 256), (2, 257), (3, 1000), (1, 9000)]


@DTYPES
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_is_the_first_k_of_a_stable_sort(dtype: torch.dtype, kind: str, size: tuple[int, int]) -> None:
    n = size[1]
    places = {0, 1, 2, 7, 16, 33, n // 100, n // 3, n - 1, n} & set(range(n + 1))
    check(rows(kind, *size).to(dtype), places)


# Vectors of 4 to 32 entries, groups of 4 to 64, and lengths one beside theirs: whole strips, a part of one
# and single entries behind the last.
BOUNDARIES = [128, 129, 255, 257, 511, 512, 513, 1023, 1025, 2049, 4095, 8193]


@DTYPES
@pytest.mark.parametrize("kind", ["normal", "ascending", "ties", "periodic", "nan", "zeros", "infinite"])
def test_groups_of_all_sizes(dtype: torch.dtype, kind: str) -> None:
    for n in BOUNDARIES:
        check(rows(kind, 1, n).to(dtype), {1, n // 100 + 1, n // 17, n // 16, n // 16 + 1})


@DTYPES
@pytest.mark.parametrize("place", [0, 1, 5, 31, 63])
def test_a_largest_entry_is_found_in_every_lane(dtype: torch.dtype, place: int) -> None:
    """At the end of each vector of a row, and behind the last of them."""
    x = torch.zeros(32, 1_030, dtype=dtype)
    x[torch.arange(32), 32 * torch.arange(32) + place % 32] = 1
    x[:, 1_029 - place] = 2
    check(x, [1, 2, 3])


@DTYPES
def test_rows_of_infinities_and_of_nan_alone(dtype: torch.dtype) -> None:
    for fill in (-INF, INF, NAN, -NAN, -0.0):
        for n in (100, 1_000):
            check(torch.full((2, n), fill, dtype=dtype), [1, n // 17, n // 2, n])
            lone = torch.full((2, n), fill, dtype=dtype)
            lone[0, n - 1], lone[1, n // 2] = 1, -NAN
            check(lone, [1, 2, n // 17, n // 2])


@DTYPES
def test_masks_and_order_statistics_find_the_same(dtype: torch.dtype) -> None:
    for kind in ("normal", "ascending", "ties", "equal", "periodic", "zeros", "outlier"):
        for n in (100, 129, 1_000, 4_100, 9_000):
            x = rows(kind, 2, n).to(dtype)
            indices = order(x, True)
            for k in (1, n // 17 + 1, n // 16 + 1, n // 2, n - n // 20, n):
                expected = torch.zeros_like(x).scatter(-1, indices[..., :k], 1)
                assert torch.equal(khot.topk_mask(x, k), expected)
                assert torch.equal(khot.kth_value(x, k), x.gather(-1, indices[..., k - 1 : k])[..., 0])


@DTYPES
def test_several_order_statistics_near_an_end(dtype: torch.dtype) -> None:
    """Quantiles that are entries of the row."""
    x = rows("ties", 3, 1_001).to(dtype)
    falling = x.gather(-1, order(x, True))
    for places in ([0, 1, 7, 40], [960, 999, 1_000], [0, 1_000], [3, 500]):
        q = 1 - torch.tensor(places, dtype=torch.float64) / 1_000
        found = khot.quantile(x, q, interpolation="nearest")
        assert torch.equal(found, falling[:, places].mT)


@DTYPES
@pytest.mark.parametrize("end", [-INF, INF, NAN])
def test_masks_of_rows_without_k_finite_entries(dtype: torch.dtype, end: float) -> None:
    x = torch.full((1, 1_000), end, dtype=dtype)
    x[:, ::100] = torch.arange(10, dtype=dtype)
    finite = torch.zeros_like(x).index_fill(-1, torch.arange(0, 1_000, 100), 1)
    if end == -INF:  # -inf is never selected
        assert torch.equal(khot.topk_mask(x, 10), finite)
        with pytest.raises(ValueError, match="k"):
            khot.topk_mask(x, 11)
    else:  # more than k entries are +inf, or one is NaN
        assert khot.topk_mask(x, 10).isnan().all()
    if end == INF:
        assert torch.equal(khot.topk_mask(x, 990), 1 - finite)


def test_is_torch_s_named_tuple() -> None:
    found = khot.topk(torch.tensor([2.0, 9.0, 5.0]), k=2, dim=0, largest=True, sorted=True)
    assert found._fields == ("values", "indices")
    assert found.values.tolist() == [9.0, 5.0]
    assert found.indices.tolist() == [1, 2]


def test_empty_and_zero_dims() -> None:
    values, indices = khot.topk(torch.tensor(3.0), 1)
    assert (values.item(), indices.item(), values.dim()) == (3.0, 0, 0)
    assert khot.topk(torch.empty(0, 5), 3).values.shape == (0, 3)
    assert khot.topk(torch.empty(4, 0), 0).indices.shape == (4, 0)
    assert khot.topk(torch.empty(4, 5), 0, 0).values.shape == (0, 5)
    assert khot.topk(torch.empty(3, 9, device="meta"), 4).indices.shape == (3, 4)


@DTYPES
def test_the_gradient_goes_to_the_selected_entries(dtype: torch.dtype) -> None:
    x = torch.tensor([[1.0, 7.0, 7.0, 7.0, 0.0], [NAN, INF, 2.0, 0.0, 1.0]], dtype=dtype, requires_grad=True)
    values, indices = khot.topk(x, 2)
    assert not indices.requires_grad
    (grad,) = torch.autograd.grad(values, x, torch.tensor([[3.0, 5.0], [2.0, 4.0]], dtype=dtype))
    assert grad.tolist() == [[0, 3, 5, 0, 0], [2, 4, 0, 0, 0]]
    assert grad.dtype == dtype


class _Layer(torch.nn.Module):
    def forward(self, x: Tensor) -> khot.selection.TopK:
        return khot.topk(x, 3, largest=False)


@pytest.mark.parametrize("largest", [True, False])
def test_a_mask_leaves_entries_out(largest: bool) -> None:
    x, mask = rows("normal", 5, 20), rows("ascending", 5, 20) > rows("normal", 5, 20)
    mask[:, :3] = True
    values, indices = khot.topk(x, 3, largest=largest, mask=mask)
    for row, there, value, index in zip(x, mask, values, indices, strict=True):
        places = there.nonzero().flatten()
        expected = khot.topk(row[there], 3, largest=largest)
        assert torch.equal(value, expected.values)
        assert torch.equal(index, places[expected.indices])
    mask[1, 2:] = False
    with pytest.raises(ValueError, match=r"k must be at most .* got 3 for a row with 2"):
        khot.topk(x, 3, mask=mask)
    transposed = khot.topk(x.T, 2, 0, mask=mask.T)
    assert torch.equal(transposed.values, khot.topk(x, 2, mask=mask).values.T)


def test_exported_programs_are_saved() -> None:
    x = rows("ties", 4, 9).float()
    n = torch.export.Dim("n", min=4, max=100)
    program = torch.export.export(_Layer(), (x,), dynamic_shapes=({1: n},))
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    y = rows("ties", 4, 30).float()
    for got, want in zip(torch.export.load(buffer).module()(y), khot.topk(y, 3, largest=False), strict=True):
        assert torch.equal(got, want)


def test_compiles_with_k_of_any_size() -> None:
    compiled = torch.compile(khot.topk, fullgraph=True, dynamic=True, backend="aot_eager")
    for n, k in ((9, 2), (12, 3), (30, 7)):
        x = rows("ties", 3, n)
        for got, want in zip(compiled(x, k), khot.topk(x, k), strict=True):
            assert torch.equal(got, want)


def test_the_exported_form_agrees_without_ties() -> None:
    from khot._kernels.reference.topk import exported_topk

    x = rows("normal", 3, 20).half()
    for largest in (True, False):
        for got, want in zip(exported_topk(x, 4, largest, True), khot.topk(x, 4, -1, largest), strict=True):
            assert torch.equal(got, want)
