"""Selection from a product that is not kept, and sums over what was selected: against the product that is."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import hessian, jacfwd, jacrev, jvp, vmap
from torch.nn import functional as F

import khot
from khot._ops import selected
from khot._ops.selected import best_of_product, selected_dot, selected_sum
from largest import Largest

DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
# input, n, k: parts of rows that are full, that are not, and none at all
SIZES = {
    "one row": ((5,), 9, 3),
    "rows": ((7, 5), 9, 4),
    "parts": ((530, 6), 11, 2),
    "narrow parts": ((2, 65, 3), 8, 3),
    "wide": ((3, 70), 40, 5),
    "none selected": ((4, 5), 9, 0),
    "all selected": ((4, 5), 9, 9),
    "no rows": ((0, 5), 9, 3),
    "no batch": ((2, 0, 5), 9, 3),
    "no columns": ((3, 0), 4, 2),
    "nothing to select from": ((3, 4), 0, 0),
}


def of_sizes(shape: tuple[int, ...], n: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(n)
    sizes = (shape, (n, shape[-1]), (n,))
    return [
        torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in sizes
    ]


def direct(input: Tensor, weight: Tensor, k: int, bias: Tensor | None = None) -> Any:
    """The same with the product, which is kept, in float64 and by a stable sort."""
    scores = F.linear(*(x if x is None else x.double() for x in (input, weight, bias)))
    values, indices = scores.sort(dim=-1, descending=True, stable=True)
    return values[..., :k], indices[..., :k]


@DTYPES
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("with_bias", [True, False])
def test_values_indices_and_gradients(dtype: torch.dtype, size: Any, with_bias: bool) -> None:
    shape, n, k = size
    input, weight, bias = of_sizes(shape, n, dtype)
    args = (input, weight, bias) if with_bias else (input, weight)
    got = khot.linear_topk(input, weight, k, *args[2:])
    want = direct(input, weight, k, *args[2:])
    assert (got.values.dtype, got.indices.dtype) == (dtype, torch.int64)
    assert not got.indices.requires_grad
    assert torch.equal(got.indices, want[1])
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(got.values.double(), want[0], rtol=eps, atol=64 * min(eps, 2**-23))
    grad = torch.randn(got.values.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    grads = torch.autograd.grad(got.values, args, grad)
    wanted = torch.autograd.grad(want[0], args, grad.double())
    for x, expected in zip(grads, wanted, strict=True):
        assert x.dtype == dtype
        # sums of products that are exact in float32, or rounded once, and are rounded once more
        torch.testing.assert_close(x.double(), expected.double(), rtol=2 * eps, atol=64 * min(eps, 2**-23))


def test_of_equal_scores_those_of_lowest_index() -> None:
    weight = torch.tensor([[1.0], [2.0], [1.0], [2.0], [2.0]])
    values, indices = khot.linear_topk(torch.tensor([[1.0], [-1.0], [0.0]]), weight, 3)
    assert indices.tolist() == [[1, 3, 4], [0, 2, 1], [0, 1, 2]]
    assert values.tolist() == [[2, 2, 2], [-1, -1, -2], [0, 0, 0]]


def test_half_precision_is_selected_by_what_it_was_before_rounding() -> None:
    weight = torch.tensor([[1.0, 0.0], [1.0, 2**-9]], dtype=torch.bfloat16)
    values, indices = khot.linear_topk(torch.ones(1, 2, dtype=torch.bfloat16), weight, 2)
    assert indices.tolist() == [[1, 0]]
    assert values.tolist() == [[1, 1]]  # bfloat16 has eight digits
    big = torch.full((1, 100), 100.0, dtype=torch.float16)
    values, indices = khot.linear_topk(big, torch.cat((big, 2 * big)), 2)
    assert indices.tolist() == [[1, 0]]
    assert values.tolist() == [[math.inf, math.inf]]  # as those of F.linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_autocast_casts_as_linear_does(dtype: torch.dtype) -> None:
    args = of_sizes((6, 5), 9, dtype)
    with torch.autocast("cpu", torch.bfloat16):
        got = khot.linear_topk(*args[:2], 3, args[2])
        assert got.values.dtype == F.linear(*args).dtype
    wanted = args if dtype == torch.float64 else [x.bfloat16() for x in args]
    want = khot.linear_topk(*wanted[:2], 3, wanted[2])
    for x, expected in zip(got, want, strict=True):
        assert torch.equal(x, expected)
    grads, expected_grads = (torch.autograd.grad(y.values.float().sum(), args) for y in (got, want))
    for x, expected in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(x, expected)


def test_infinite_and_nan_scores() -> None:
    bias = torch.tensor([0.0, -math.inf, math.inf, math.nan], requires_grad=True)
    input, weight = torch.ones(1, 2, requires_grad=True), torch.ones(4, 2, requires_grad=True)
    values, indices = khot.linear_topk(input, weight, 4, bias)
    assert indices.tolist() == [[3, 2, 0, 1]]
    torch.testing.assert_close(values, torch.tensor([[math.nan, math.inf, 2, -math.inf]]), equal_nan=True)
    grads = torch.autograd.grad(values, (input, weight, bias), torch.tensor([[0.0, 0.0, 1.0, 0.0]]))
    assert grads[0].tolist() == [[1, 1]]
    assert grads[1].tolist() == [[1, 1], [0, 0], [0, 0], [0, 0]]
    assert grads[2].tolist() == [1, 0, 0, 0]


def test_a_bias_of_minus_infinity_leaves_out() -> None:
    x, weight = (t.requires_grad_() for t in (torch.randn(5, 8), torch.randn(20, 8)))
    mask = torch.arange(20) % 3 > 0
    bias = torch.zeros(20).masked_fill(~mask, -math.inf)
    values, indices = khot.linear_topk(x, weight, 4, bias)
    expected = khot.topk(x @ weight.T, 4, mask=mask)
    assert torch.equal(indices, expected.indices)
    torch.testing.assert_close(values, expected.values)
    got, wanted = (torch.autograd.grad(v.sin().sum(), (x, weight)) for v in (values, expected.values))
    torch.testing.assert_close(got, wanted)


def test_derivatives_of_both_orders_and_modes() -> None:
    args = tuple(of_sizes((2, 3, 4), 6))

    def values(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return khot.linear_topk(input, weight, 2, bias).values

    options = {"check_batched_grad": True, "check_forward_ad": True, "check_batched_forward_grad": True}
    assert torch.autograd.gradcheck(values, args, **options)
    assert torch.autograd.gradgradcheck(values, args)


def maps(function: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """Transforms of a function of (input (B, d), weight, bias), to arguments with a batch each."""
    square = lambda *args: function(*args).square().sum(0)  # noqa: E731
    return {
        "over input": lambda x, w, b: vmap(function, (0, None, None))(x, w[0], b[0]),
        "over weight": lambda x, w, b: vmap(function, (None, 0, None))(x[0], w, b[0]),
        "over all": lambda x, w, b: vmap(function)(x, w, b),
        "nested": lambda x, w, b: vmap(vmap(function, (None, 0, 0)), (0, None, None))(x, w, b),
        "reverse": lambda x, w, b: vmap(jacrev(square, (0, 1, 2)))(x, w, b),
        "forward": lambda x, w, b: vmap(jacfwd(square, (0, 1, 2)))(x, w, b),
        "second order": lambda x, w, b: hessian(square, (0, 1, 2))(x[0], w[0], b[0]),
        "third order": lambda x, w, b: jacfwd(jacrev(jacfwd(square, 1), 0), 2)(x[0], w[0], b[0]),
    }


FUNCTIONS = {
    "linear_topk": (
        lambda x, w, b: khot.linear_topk(x, w, 2, b).values,
        lambda x, w, b: khot.topk(x @ w.mT + b, 2).values,
    ),
    "selected_sum": (
        lambda x, w, b: selected_sum(x[:, :3].exp(), w * b[:, None], INDICES),
        lambda x, w, b: (x[:, :3].exp().unsqueeze(-1) * (w * b[:, None])[INDICES]).sum(-2),
    ),
    "selected_dot": (
        lambda x, w, b: selected_dot(x, w, INDICES, b),
        lambda x, w, b: (x.unsqueeze(-2) * w[INDICES]).sum(-1) + b[INDICES],
    ),
}
INDICES = torch.tensor([[1, 4, 1], [0, 0, 0]])


def of_maps() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 2, 4), (2, 5, 4), (2, 5))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("name", maps(len))
@pytest.mark.parametrize("function", FUNCTIONS)
def test_transforms_are_those_of_the_plain_formula(function: str, name: str) -> None:
    args = of_maps()
    got, want = (maps(f)[name](*args) for f in FUNCTIONS[function])
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("function", "name"),
    [("linear_topk", "forward"), ("selected_sum", "over weight"), ("selected_dot", "reverse")],
)
def test_compiled_transforms(function: str, name: str) -> None:
    args = of_maps()
    transformed = maps(FUNCTIONS[function][0])[name]
    compiled = torch.compile(transformed, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*args), transformed(*args))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiles(dtype: torch.dtype) -> None:
    compiled = torch.compile(khot.linear_topk, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape, n, k in (((6, 5), 9, 2), ((8, 7), 30, 5)):
        args = of_sizes(shape, n, dtype)
        got, want = (f(*args[:2], k, args[2]) for f in (compiled, khot.linear_topk))
        assert torch.equal(got.indices, want.indices)
        grads = [torch.autograd.grad(y.values.square().sum(), args) for y in (got, want)]
        torch.testing.assert_close((got.values, *grads[0]), (want.values, *grads[1]))


def test_forward_mode_sees_the_bias_alone() -> None:
    input, weight, bias = (x.detach() for x in of_sizes((3, 4), 6))
    found = khot.linear_topk(input, weight, 2, bias)
    tangent = torch.arange(6.0, dtype=torch.float64)
    got = jvp(lambda b: khot.linear_topk(input, weight, 2, b).values, (bias,), (tangent,))
    torch.testing.assert_close(got, (found.values, tangent[found.indices]))


class _Layer(torch.nn.Module):
    def forward(self, x: Tensor, weight: Tensor) -> khot.selection.TopK:
        return khot.linear_topk(x, weight, 3)


def test_exported_programs_are_saved() -> None:
    x, weight, _ = (x.detach() for x in of_sizes((4, 5), 9))
    rows = torch.export.Dim("rows", min=2, max=100)
    program = torch.export.export(_Layer(), (x, weight), dynamic_shapes=({0: rows}, None))
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    x = torch.cat((x, -x))
    for got, want in zip(torch.export.load(buffer).module()(x, weight), _Layer()(x, weight), strict=True):
        assert torch.equal(got, want)


def test_exported_forms_agree() -> None:
    x, weight, bias = (x.detach().bfloat16() for x in of_sizes((4, 5), 9))
    from khot._kernels.reference import selected as kernels

    chosen = selected._exported_choice(x, weight, bias, 3)
    for got, want in zip(chosen, best_of_product(x, weight, 3, bias), strict=True):
        torch.testing.assert_close(got, want)
    i = chosen[1]
    w = chosen[0].bfloat16()
    for name, args in (("sum", (w, weight, i)), ("dot", (x, weight, i, bias)), ("outer", (w, x, i, 9))):
        got, want = (getattr(kernels, f"{way}_{name}")(*args) for way in ("gathered", "selected"))
        torch.testing.assert_close(got, want)


def test_meta_tensors() -> None:
    x, weight = (torch.empty(shape, device="meta", requires_grad=True) for shape in ((3, 2, 5), (9, 5)))
    found = khot.linear_topk(x, weight, 4)
    assert found.values.shape == found.indices.shape == (3, 2, 4)
    found.values.sum().backward()
    assert x.grad is not None and weight.grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neither_the_scores_nor_the_selected_rows_are_kept(dtype: torch.dtype) -> None:
    rows, n, d, k = 2000, 300, 40, 60
    x, weight, bias = of_sizes((rows, d), n, dtype)
    with Largest() as largest:
        values, _ = khot.linear_topk(x, weight, k, bias)
        torch.autograd.grad(values.sum(), (x, weight, bias))
    assert largest.numel <= max(rows * k, 256 * n) < rows * n


def heads(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 3, 70, 4), (2, 3, 11, 4), (2, 3, 11, 5))
    q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores, i = best_of_product(q, k, 3, adjust=lambda where, s: s.masked_fill(~mask[where], -math.inf))
    return selected_sum(selected_dot(q, k, i, known=scores).softmax(-1), v, i)


def dense_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = (q @ k.mT).masked_fill(~mask, -math.inf)
    kept = torch.full_like(scores, -math.inf).scatter(-1, *_turned(scores.topk(3, -1)))
    return kept.softmax(-1) @ v


def _turned(pair: Any) -> Any:
    return pair[1], pair[0]


def causal(q: Tensor, k: Tensor) -> Tensor:
    """At least two keys for each query, so that some have fewer than are selected."""
    at = torch.arange(q.shape[-2]).unsqueeze(-1)
    return (torch.arange(k.shape[-2]) <= at + 1).expand(*q.shape[:-1], k.shape[-2])


def test_batches_of_matrices_with_a_mask() -> None:
    args = heads()
    mask = causal(*args[:2])
    got, want = (f(*args, mask) for f in (attention, dense_attention))
    torch.testing.assert_close(got, want)
    grad = torch.randn(got.shape, generator=torch.Generator().manual_seed(1), dtype=got.dtype)
    grads = [torch.autograd.grad(y, args, grad, create_graph=True) for y in (got, want)]
    torch.testing.assert_close(*grads)
    twice = [torch.autograd.grad(sum(g.square().sum() for g in each), args) for each in grads]  # type: ignore[arg-type]
    torch.testing.assert_close(*twice)


@pytest.mark.parametrize("way", ["compiled", "mapped", "compiled and mapped"])
def test_masks_under_a_trace_or_a_transform(way: str) -> None:
    args = [x.detach() for x in heads()]
    mask = causal(*args[:2]).contiguous()
    function: Callable[..., Any] = attention
    if "mapped" in way:
        function = vmap(lambda *args: vmap(jacfwd(lambda *a: attention(*a).sum(0)))(*args))
    if "compiled" in way:
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    want: Callable[..., Any] = dense_attention
    if "mapped" in way:
        want = vmap(lambda *args: vmap(jacfwd(lambda *a: dense_attention(*a).sum(0)))(*args))
    torch.testing.assert_close(function(*args, mask), want(*args, mask))


def test_columns_are_not_multiplied_but_the_result_is_the_same() -> None:
    q, k, _ = (x.detach()[0, 0] for x in heads())
    mask, seen = causal(q, k), []

    def adjust(where: selected.Where, scores: Tensor) -> Tensor:
        seen.append(tuple(scores.shape))
        return scores.masked_fill_(~mask[where][:, : scores.shape[1]], -math.inf)

    got = best_of_product(q, k, 3, adjust=adjust, columns=lambda stop: 1 if stop == 64 else 5)
    for x, want in zip(got, best_of_product(q, k[:5], 3), strict=True):
        assert torch.equal(x[64:], want[64:])
    assert seen == [(64, 3), (6, 5)]  # never fewer than are selected


@DTYPES
def test_half_precision_sums_are_rounded_once(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    i = torch.randint(0, 3, (200, 40), generator=generator)
    w, M, v = (
        torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in ((200, 40), (3, 8), (200, 8))
    )
    eps = torch.finfo(dtype).eps
    for got, want in (
        (selected_sum(w, M, i), (w.double().unsqueeze(-1) * M.double()[i]).sum(-2)),
        (selected_dot(v, M, i), (v.double().unsqueeze(-2) * M.double()[i]).sum(-1)),
    ):
        torch.testing.assert_close(got.double(), want, rtol=eps, atol=64 * min(eps, 2**-23))
        grad = torch.randn(got.shape, generator=generator).to(dtype)
        of = (w, M) if got.shape == v.shape else (v, M)
        grads = torch.autograd.grad(got, of, grad.to(got.dtype))
        for x, expected in zip(grads, torch.autograd.grad(want, of, grad.double()), strict=True):
            torch.testing.assert_close(x, expected, rtol=2 * eps, atol=2**10 * min(eps, 2**-23))


@pytest.mark.parametrize("part", [slice(1), slice(0, 6, 3), slice(2, 2)], ids=str)
def test_parts_of_what_was_selected(part: slice) -> None:
    """Layouts with steps, which torch's own operators refuse."""
    v, M = (x.mT.contiguous().mT for x in of_sizes((20, 4), 9)[:2])
    values, i = khot.topk(v @ M.mT, 6)
    w, i = values[:, part], i[:, part]
    want = (w.unsqueeze(-1) * M[i]).sum(-2), (v.unsqueeze(-2) * M[i]).sum(-1)
    for got, expected in zip((selected_sum(w, M, i), selected_dot(v, M, i)), want, strict=True):
        torch.testing.assert_close(got, expected)
        grad = torch.ones(*got.shape[::-1], dtype=got.dtype).cumsum(-1).mT
        grads = [torch.autograd.grad(y, M, grad, retain_graph=True) for y in (got, expected)]
        torch.testing.assert_close(*grads)


def test_a_few_products_of_half_precision_widen_no_matrix() -> None:
    M = torch.ones(1000, 4, dtype=torch.bfloat16)
    with Largest() as largest:
        selected_dot(M[:2], M, torch.tensor([[1, 2], [3, 4]]))
    assert largest.numel <= 16


X, W = torch.zeros(3, 4), torch.zeros(5, 4)


@pytest.mark.parametrize(
    ("error", "message", "args"),
    [
        (ValueError, r"k must lie in \[0, 5\], but got 6", (X, W, 6)),
        (ValueError, r"k must lie in \[0, 5\], but got -1", (X, W, -1)),
        (ValueError, r"weight must have the shape \(n, 4\), .*, but got \(4, 5\)", (X, W.mT, 2)),
        (ValueError, r"weight must have the shape \(n, 4\), .*, but got \(4,\)", (X, W[0], 2)),
        (ValueError, r"bias must have the shape \(5,\), .*, but got \(4,\)", (X, W, 2, W[0])),
        (ValueError, r"input must have the shape \(\.\.\., d\)", (torch.tensor(1.0), W, 2)),
        (
            TypeError,
            r"weight must have input's dtype torch.float32, but got torch.float64",
            (X, W.double(), 2),
        ),
        (TypeError, r"bias must have input's dtype .*, but got torch.float16", (X, W, 2, W[:, 0].half())),
        (ValueError, r"weight must be on input's device cpu, but got meta", (X, W.to("meta"), 2)),
    ],
)
def test_bad_arguments(error: type[Exception], message: str, args: tuple[Any, ...]) -> None:
    with pytest.raises(error, match=message):
        khot.linear_topk(*args)


def test_rows_without_columns_have_products_and_derivatives() -> None:
    v, M = torch.ones(2, 3, 0).requires_grad_(), torch.ones(2, 4, 0).requires_grad_()
    i = torch.zeros(2, 3, 2, dtype=torch.int64)
    products = selected_dot(v, M, i)
    assert torch.equal(products, torch.zeros(2, 3, 2))
    first = torch.autograd.grad(products.sum(), (v, M), create_graph=True)
    assert [x.shape for x in first] == [v.shape, M.shape]


def test_a_part_of_many_columns_has_fewer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selected, "SCORES", 40)
    x, weight = of_sizes((7, 3), 20)[:2]
    sizes = []
    best_of_product(x, weight, 2, watch=lambda where, scores, best: sizes.append(scores.shape[0]))
    assert sizes == [2, 2, 2, 1]


def test_batches_without_rows() -> None:
    best, indices = best_of_product(torch.ones(2, 0, 3), torch.ones(2, 4, 3), 2)
    assert best.shape == indices.shape == (2, 0, 2)
