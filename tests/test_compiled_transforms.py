"""Transforms of torch.func and forward mode with torch.compile, in either order, against eager mode.

Whatever torch.softmax computes there, every differentiable operator must compute. Most cases use the eager
backend of Dynamo, whose tracing is what matters here and which adds no time of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp

from khot._core import expansion
from operators import OPERATORS, Operator

X = torch.tensor([0.3, -1.1, 0.8, 0.1], dtype=torch.float64)
V = torch.tensor([0.7, 0.2, -0.5, 1.3], dtype=torch.float64)

Function = Callable[[Tensor], Tensor]


def _scalar(f: Function) -> Function:
    return lambda x: f(x).sin().sum()


def _dual(f: Function) -> Function:
    def tangent(x: Tensor) -> Tensor:
        with forward_ad.dual_level():
            out: Any = forward_ad.unpack_dual(f(forward_ad.make_dual(x, V))).tangent
            return out

    return tangent


TRANSFORMS: dict[str, Callable[[Function], Callable[..., Any]]] = {
    "jvp": lambda f: lambda x: jvp(f, (x,), (V,))[1],
    "forward_ad": _dual,
    "grad": lambda f: grad(_scalar(f)),
    "vjp": lambda f: lambda x: vjp(_scalar(f), x)[1](torch.ones_like(x[0]))[0],
    "jacfwd": jacfwd,
    "jacrev": jacrev,
    "jvp of grad": lambda f: lambda x: jvp(grad(_scalar(f)), (x,), (V,))[1],
    "hessian": lambda f: hessian(_scalar(f)),
}
DIFFERENTIABLE = [op for op in OPERATORS if op.differentiable]
BY_ID = {op.id: op for op in DIFFERENTIABLE}
REPRESENTATIVE = [
    ("soft_topk-logistic", "jvp"),
    ("soft_topk-logistic", "grad"),
    ("soft_topk-logistic", "jvp of grad"),
    ("soft_permutation-logistic", "jvp"),
    ("soft_rank-laplace", "grad"),
    ("sorted_soft_topk", "jvp"),
    ("soft_topk_magnitude-2.00", "jvp"),
    ("soft_count-normal", "grad"),
]


def _call(op: Operator) -> Function:
    k = 2.0 if op.integer_k else 1.7
    tau = 3.0 if op.name == "log_soft_topk" else 0.7  # with compact support, so that no logarithm is -inf
    return lambda x: op.call(x, k, tau)


def _softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def _check(f: Function, transform: str, inside: bool, backend: str = "eager") -> None:
    torch.compiler.reset()
    apply = TRANSFORMS[transform]
    want = apply(f)(X)
    if inside:
        got = apply(torch.compile(f, backend=backend))(X)
    else:
        got = torch.compile(apply(f), backend=backend)(X)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_softmax_has_every_combination(transform: str, inside: bool) -> None:
    _check(_softmax, transform, inside)


@pytest.mark.slow
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("op", DIFFERENTIABLE, ids=lambda op: op.id)
def test_every_operator_equals_eager_mode(op: Operator, transform: str, inside: bool) -> None:
    _check(_call(op), transform, inside)


@pytest.mark.parametrize(("name", "transform"), REPRESENTATIVE)
def test_transforms_that_are_compiled(name: str, transform: str) -> None:
    _check(_call(BY_ID[name]), transform, inside=False)


@pytest.mark.parametrize("transform", ["jvp", "jacfwd", "hessian"])
def test_transforms_of_compiled_functions(transform: str) -> None:
    """No warning, either, which pytest would raise."""
    _check(_call(BY_ID["soft_topk-logistic"]), transform, inside=True)


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_forward_mode_of_torch_autograd(inside: bool) -> None:
    _check(_call(BY_ID["soft_topk-logistic"]), "forward_ad", inside)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch._prims_common.check` is deprecated:FutureWarning")
@pytest.mark.parametrize("transform", ["jvp", "hessian"])
def test_inductor(transform: str) -> None:
    _check(_call(BY_ID["soft_topk-logistic"]), transform, inside=False, backend="inductor")


def test_values_are_those_of_the_kernel_and_infinite_scores_stay_decided() -> None:
    f = _call(BY_ID["soft_topk-logistic"])
    x = X.clone()
    x[1] = -torch.inf
    torch.compiler.reset()
    compiled = torch.compile(lambda x: jvp(f, (x,), (V,)), backend="aot_eager", fullgraph=True)
    (y, dy), (want, dwant) = compiled(x), jvp(f, (x,), (V,))
    torch.testing.assert_close(y, want, rtol=0, atol=0)
    torch.testing.assert_close(dy, dwant, rtol=1e-12, atol=1e-14)


def test_the_result_of_a_compiled_jvp_has_a_gradient() -> None:
    f = _call(BY_ID["soft_topk-logistic"])

    def loss(x: Tensor) -> Tensor:
        return jvp(f, (x,), (V,))[1].sin().sum()

    torch.compiler.reset()
    x = X.clone().requires_grad_()
    (got,) = torch.autograd.grad(torch.compile(loss, backend="aot_eager")(x), x)
    (want,) = torch.autograd.grad(loss(x), x)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_too_many_derivatives_are_an_error_in_words() -> None:
    levels = expansion.MOST_LEVELS + 1
    with pytest.raises(RuntimeError, match=re.escape(f"at most {expansion.MOST_LEVELS} nested derivatives")):
        expansion.expand(None, levels, (X,), (X,), (X,))
