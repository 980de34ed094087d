"""Products in float32 of what is in half precision: against float64, and whatever autocast would do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import hessian, jacfwd, jacrev, jvp, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from khot._kernels.reference import product as kernels
from khot._ops.product import product

HALF = (torch.float16, torch.bfloat16)
each_half = pytest.mark.parametrize("dtype", HALF)
SHAPES = {
    "matrices": ((4, 8), (8, 5)),
    "vector": ((8,), (8, 5)),
    "one matrix for a batch": ((2, 3, 4, 8), (8, 5)),
    "batch": ((2, 3, 4, 8), (2, 3, 8, 5)),
    "broadcast": ((3, 4, 8), (2, 1, 8, 5)),
    "one row": ((2, 1, 8), (2, 8, 50)),
    "no rows": ((2, 0, 8), (2, 8, 5)),
    "no columns": ((3, 0), (0, 5)),
    "no batch": ((0, 3, 8), (0, 8, 5)),
}
each_shape = pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES.keys())


def factors(shapes: tuple[tuple[int, ...], tuple[int, ...]], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return a, b


@each_half
@each_shape
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
def test_values_and_gradients(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], dtype: torch.dtype, autocast: torch.dtype | None
) -> None:
    a, b = (x.requires_grad_() for x in factors(shapes, dtype))
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        y = product(a, b)
    want = a.double() @ b.double()
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double(), want, rtol=0, atol=1e-5)
    grad = torch.randn_like(y).to(dtype)
    got = torch.autograd.grad(y, (a, b), grad.float())
    wanted = torch.autograd.grad(want, (a, b), grad.double())
    for x, expected in zip(got, wanted, strict=True):
        # sums of products that are exact in float32, which are rounded once
        torch.testing.assert_close(x, expected, rtol=torch.finfo(dtype).eps, atol=1e-4)


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.float64, torch.float16)])
def test_different_dtypes_and_wide_ones_under_autocast(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    wide, narrow = dtypes
    a, b = factors(((4, 8), (8, 5)), wide)
    with torch.autocast("cpu", torch.bfloat16):
        for x, y in ((a, b), (a, b.to(narrow)), (a.to(narrow), b)):
            got = product(x, y)
            assert got.dtype == wide
            torch.testing.assert_close(got.double(), x.double() @ y.double(), rtol=1e-6, atol=1e-6)


def test_float16_does_not_overflow() -> None:
    a = torch.full((3, 64), 100.0, dtype=torch.float16)
    assert (product(a, a.mT) == 640_000).all()


class _Widened(TorchDispatchMode):
    """The sizes of what is copied to float32."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.dtype == torch.float32:
            self.sizes.append(out.numel())
        return out


@pytest.mark.parametrize("shapes", [((4, 8), (8, 500)), ((500, 8), (8, 4)), ((2, 300, 8), (2, 8, 3))])
def test_the_larger_factor_is_widened_in_parts(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "PART", 64)
    a, b = factors(shapes, torch.bfloat16)
    with _Widened() as widened:
        got = kernels.product(a, b)
    torch.testing.assert_close(got, a.float() @ b.float())
    assert len(widened.sizes) > 30 and max(widened.sizes) <= 64


def test_transforms_are_those_of_the_float32_product() -> None:
    a, b = factors(((3, 3, 4), (3, 4, 3)), torch.bfloat16)

    def direct(a: Tensor, b: Tensor) -> Tensor:
        return a.float() @ b.float()

    for dims in ((0, 0), (0, None), (None, 0), (1, 0)):
        got, want = (vmap(f, dims, out_dims=1)(a, b) for f in (product, direct))
        torch.testing.assert_close(got, want)
    twice = vmap(vmap(product, (0, None)), (None, 0))
    torch.testing.assert_close(twice(a, b), vmap(vmap(direct, (0, None)), (None, 0))(a, b))
    tangents = (torch.ones_like(a), torch.ones_like(b))
    torch.testing.assert_close(jvp(product, (a, b), tangents), jvp(direct, (a, b), tangents))
    for transform in (jacrev, jacfwd, hessian):
        got = vmap(transform(lambda a, b: product(a, b).square().sum(0)))(a, b)
        want = vmap(transform(lambda a, b: direct(a, b).square().sum(0)))(a, b)
        torch.testing.assert_close(got, want, rtol=0.02, atol=0.1)  # gradients are rounded to bfloat16


@each_half
def test_compiles(dtype: torch.dtype) -> None:
    a, b = (x.requires_grad_() for x in factors(((2, 4, 8), (8, 5)), dtype))
    compiled = torch.compile(lambda a, b: product(a, b).relu(), fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        got = compiled(a, b)
    want = product(a, b).relu()
    torch.testing.assert_close(got, want)
    for x, y in zip(*(torch.autograd.grad(y.sum(), (a, b)) for y in (got, want)), strict=True):
        torch.testing.assert_close(x, y)


def test_compiles_with_transforms() -> None:
    a, b = factors(((2, 3, 4), (2, 4, 5)), torch.bfloat16)

    def slopes(a: Tensor, b: Tensor) -> Any:
        return vmap(jacfwd(lambda a, b: product(a, b).sum(0)))(a, b)

    torch.testing.assert_close(torch.compile(slopes, fullgraph=True, backend="aot_eager")(a, b), slopes(a, b))
