"""All shared checks for every public operator; the table is in operators.py."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.utils.checkpoint import checkpoint

import khot
import operators
from khot._core import eager
from khot._ops import exponential
from operators import ARGUMENTS, FIRST, OPERATORS, Operator

ROWS, N = 3, 7
TAU = [0.5, 1.0, 1.7]

# The interpreter takes milliseconds per call, so finite differences use random directions, not every entry.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

every = pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.id)
every_differentiable = pytest.mark.parametrize(
    "op", [op for op in OPERATORS if op.differentiable], ids=lambda op: op.id
)
every_mask = pytest.mark.parametrize("op", [op for op in OPERATORS if op.selects], ids=lambda op: op.id)


#: Whose trace only hands on the name of the CDF, p and which cost is counted.
HANDED_ON = {"soft_topk", "log_soft_topk", "sparse_topk", "soft_topk_magnitude", "soft_topk_exp"}
HANDED_ON |= {"soft_budget", "soft_count", "inverse_soft_count"}


def graph(op: Operator) -> tuple[str, ...]:
    """What is traced depends on: elsewhere the name of a smooth CDF or of a compact one is only handed on, as
    are p and the rule of a quantile; and an ascending order is a descending one of the negative."""
    alike = {"normal": "logistic", "power": "uniform", "descending": ""}
    alike |= dict.fromkeys(("higher", "midpoint", "nearest"), "lower") | {"3.00": "1.33"}
    parts = op.id.removeprefix(op.name).split("-")
    if op.name in HANDED_ON:
        parts = ["rescale"] * ("rescale" in parts)
    return op.name, *filter(None, (alike.get(part, part) for part in parts))


DISTINCT = list({graph(op): op for op in reversed(OPERATORS)}.values())
# what has no arithmetic of a CDF in it
every_distinct = pytest.mark.parametrize("op", DISTINCT, ids=lambda op: op.id)
every_distinct_differentiable = pytest.mark.parametrize(
    "op", [op for op in DISTINCT if op.differentiable], ids=lambda op: op.id
)


def scores(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    # scores of unit scale, apart from one another: no entry sits on a kink of F
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*(shape or (ROWS, N)), generator=generator, dtype=torch.float64).to(dtype)


def arguments(op: Operator, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """x (ROWS, N), and one k and one tau per row, in the operator's domain."""
    k = torch.tensor(op.k, dtype=dtype)
    if op.name in ("soft_count", "inverse_soft_count"):
        k = k.unsqueeze(-1)  # levels lie along dim
    return scores(dtype=dtype), k, torch.tensor(TAU, dtype=dtype)


def leaves(op: Operator) -> list[Tensor]:
    """The arguments, requiring grad where the operator is differentiable in them."""
    x, k, tau = arguments(op)
    return [x.requires_grad_(), k.requires_grad_(not op.integer_k), tau.requires_grad_(op.has_tau)]


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


def test_every_public_operator_is_in_the_table() -> None:
    public = {name for name in khot.__all__ if callable(getattr(khot, name))} - {"show_config"}  # no operator
    # the first is random, in test_estimators.py, and the second has a matrix, in test_selected.py
    public -= {"sample_khot", "linear_topk"}
    assert {op.name for op in OPERATORS} == set(ARGUMENTS) == public


# ------------------------------------------------------------------------------------- values


# those of half precision by turns
@pytest.mark.parametrize(
    ("op", "dtype", "rounding"),
    [
        pytest.param(op, dtype, rounding, id=f"{op.id}-{dtype}")
        for i, op in enumerate(OPERATORS)
        for dtype, rounding in (
            (torch.float64, 0),
            (torch.float32, 5e-7),
            ((torch.bfloat16, 2**-8), (torch.float16, 2**-11))[i % 2],
        )
    ],
)
def test_agrees_with_its_oracle(op: Operator, dtype: torch.dtype, rounding: float) -> None:
    x, k, tau = arguments(op, dtype)
    y = op.call(x, k.double(), tau.double())
    assert y.dtype == dtype
    want = operators.expected(op, x, list(op.k), tau.double().tolist())
    assert_close(y.reshape(want.shape), want, op.tolerance + 2 * rounding)


@every_distinct
def test_numbers_and_tensors_agree(op: Operator) -> None:
    x, _, _ = arguments(op)
    as_numbers = op.call(x, op.k[1], 0.8)
    as_tensors = op.call(x, *torch.tensor([op.k[1], 0.8], dtype=torch.float64))
    assert torch.equal(as_numbers, as_tensors)


@every_distinct
def test_any_dim_any_layout(op: Operator) -> None:
    x = scores(4, 6, 5)
    want = op.call(x, op.k[1], 0.8)
    for dim in range(-3, 3):
        moved = op.call(x.movedim(dim, -1).contiguous(), op.k[1], 0.8)
        places = [dim % 3 + i for i in range(op.out_dims)]
        moved = moved.movedim(list(range(-op.out_dims, 0)), places)
        assert_close(op.call(x, op.k[1], 0.8, dim=dim), moved, 1e-14)
    layouts = {
        "transposed": x.transpose(0, 2).contiguous().transpose(0, 2),
        "strided": torch.stack((x, x + 9), -1).flatten(-2)[..., ::2],
        "offset": torch.cat((x.new_zeros(1, 6, 5), x))[1:],
    }
    for layout in layouts.values():
        assert_close(op.call(layout, op.k[1], 0.8), want, 1e-14)
    expanded = x[:1].expand(4, 6, 5)
    assert_close(op.call(expanded, op.k[1], 0.8), want[:1].expand(4, *want.shape[1:]), 1e-14)


@every_distinct
def test_does_not_change_its_arguments(op: Operator) -> None:
    args = leaves(op)
    before = [a.detach().clone() for a in args]
    y = op.call(*args)
    if op.differentiable:
        y.square().nan_to_num(0, 0, 0).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(args, before, strict=True))


@every_distinct
def test_empty_batch_and_zero_dims(op: Operator) -> None:
    y = op.call(torch.empty(0, 5), op.k[1], 1.0)
    assert y.shape == (0, *(5,) * op.out_dims)
    y = op.call(torch.tensor(0.3), 1 if op.name != "soft_count" else 0.0, 1.0)
    assert y.shape == ((1, 1) if op.out_dims == 2 else ())


@every_mask
def test_ends_of_k(op: Operator) -> None:
    x = scores()
    for k in (0, N):
        x_k = x.clone().requires_grad_()
        y = op.call(x_k, k, 0.8)
        plain = op.name not in ("soft_topk_magnitude",)
        if plain:
            end = float(k == N)
            want = torch.full_like(x, end)
            assert torch.equal(y, want.log() if op.name == "log_soft_topk" else want)
        elif k == 0:
            assert torch.equal(y.abs(), torch.zeros_like(x))
        if op.differentiable and plain:
            (grad,) = torch.autograd.grad(y.nan_to_num(0, 0, 0).sum(), x_k, materialize_grads=True)
            assert torch.equal(grad, torch.zeros_like(x))


@every_mask
def test_ties_share_equally(op: Operator) -> None:
    x = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]], dtype=torch.float64)
    y = op.call(x, 2, 0.7)
    if op.name in ("topk_mask", "budget_mask"):  # hard masks cannot: lowest index first
        assert y.tolist() == [[1, 1, 0, 0, 0]]
    else:
        assert y[0, 1] == y[0, 2] == y[0, 3]


@every_mask
def test_masked_and_infinite_entries(op: Operator) -> None:
    k = 2.0 if op.integer_k or op.name == "topk_mask" else 1.5
    x, hole = scores(1, 5), [1, 3]
    keep = torch.ones(5, dtype=torch.bool)
    keep[hole] = False
    want = op.call(x[:, keep], k, 0.7)
    for inside in (float("nan"), float("inf"), -float("inf"), 1e30):
        masked = x.clone()
        masked[:, hole] = inside
        masked.requires_grad_(op.differentiable)
        y = op.call(masked, k, 0.7, mask=keep)
        assert_close(y[:, keep], want, 1e-14)
        assert (y[:, ~keep] == op.masked).all()
        if op.differentiable:
            (grad,) = torch.autograd.grad(y[:, keep].square().sum(), masked)
            assert (grad[:, ~keep] == 0).all()
            assert grad.isfinite().all()
    if op.name == "soft_topk_magnitude":
        return  # −inf is of infinite magnitude there
    y = op.call(x.masked_fill(~keep, -float("inf")), k, 0.7)
    assert_close(y[:, keep], want, 1e-14)
    assert (y[:, ~keep] == op.masked).all()
    if op.name.startswith("ot_topk") and "normalize" in op.id:
        return  # the cost of the remaining entries alone normalises; checked above
    raised = x.clone()
    raised[:, 1] = float("inf")
    rest = torch.tensor([0, 2, 3, 4])
    y = op.call(raised, k, 0.7)
    assert_close(y[:, rest], op.call(x[:, rest], k - 1, 0.7), 1e-14)
    assert y[0, 1] == (0 if op.name == "log_soft_topk" else 1)


@every
def test_one_bad_row_spoils_no_other(op: Operator) -> None:
    x = scores()
    want = op.call(x, 2.0, 0.7)
    for bad in (float("nan"), float("inf"))[: 1 + op.selects]:
        spoiled = x.clone()
        spoiled[1, :3] = bad  # more than k of +inf have no answer either
        y = op.call(spoiled, 2.0, 0.7)
        if op.name == "budget_mask" and bad == float("inf"):
            assert y[1].tolist() == [1, 1, 0, 0, 0, 0, 0]  # as many of them as the budget pays for
        else:
            assert y[1].isnan().all()
        assert_close(y[[0, 2]], want[[0, 2]], 1e-13)  # of rows side by side one may take a step more


@every
def test_a_bad_number_spoils_its_row_where_nobody_looks(
    op: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where raising an error would wait for the device."""
    monkeypatch.setattr(khot._core.arguments, "readable", lambda value: False)
    (x, k, tau), second = arguments(op), torch.tensor(1)
    want = op.call(x, k, tau)
    bad = [(k, tau.index_fill(0, second, v)) for v in (-1.0, 0.0, float("inf"), float("nan")) if op.has_tau]
    if op.arguments.family not in ("", "count"):
        bad += [(k.index_fill(0, second, v), tau) for v in (-1.0, N + 0.6, float("nan"))]
    for case in bad:
        y = op.call(x, *case)
        assert y[1].isnan().all()
        assert_close(y[[0, 2]], want[[0, 2]], 1e-13)


@every_distinct
def test_looks_at_no_value_off_the_cpu(op: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor without data takes the place of one whose data is still being computed."""
    monkeypatch.setattr(exponential, "STEPS", 3)  # all of which are taken, one like the other
    args = [a.detach().to("meta").requires_grad_(a.requires_grad) for a in leaves(op)]
    y = op.call(*args)
    assert y.shape == op.call(*arguments(op)).shape
    if op.differentiable:
        y.square().sum().backward()


# ---------------------------------------------------------------------------------- gradients


@every_differentiable
def test_gradcheck_in_both_modes(op: Operator) -> None:
    call, args = scalar_dims(op)
    # the whole Jacobian of one variant of each operator, and of the others random directions
    fast = INTERPRETED or op not in FIRST
    torch.autograd.gradcheck(call, args, check_forward_ad=True, check_batched_grad=True, fast_mode=fast)


#: Where the second derivatives in x of each CDF are; other operators on a CDF are made of these.
OF_A_CDF = ("soft_topk", "log_soft_topk", "soft_count", "inverse_soft_count")
REPEATED = {"normal", "power", "descending", "3.00", "3", "higher", "nearest", "midpoint"}


@pytest.mark.parametrize(
    "op",
    [
        op
        for op in OPERATORS
        if op.differentiable and (op.name in OF_A_CDF or not REPEATED & set(op.id.split("-")))
    ],
    ids=lambda op: op.id,
)
def test_gradgradcheck(op: Operator) -> None:
    call, args = scalar_dims(op)
    # along random directions: whole Jacobians took a third of the time of this file
    torch.autograd.gradgradcheck(call, args, check_fwd_over_rev=True, fast_mode=True)


def scalar_dims(op: Operator) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """The call with −inf replaced (log y of compact support), which finite differences cannot take."""
    return (lambda *args: op.call(*args).masked_fill(no_slope(op, args), 0)), leaves(op)


def no_slope(op: Operator, args: Any) -> Tensor:
    with torch.no_grad():
        return op.call(*(a.detach() for a in args)).isinf()


@every_distinct_differentiable
def test_checkpoints(op: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is saved is unpacked once, and as much of it when the call is made again."""
    for name in (*eager.ON_GPUS, "soft_count", "inverse_soft_count"):  # the ordinary way, as of larger calls
        monkeypatch.setattr(eager, name, eager._ordinary)
    x, k, tau = arguments(op)
    grads = []
    for call in (op.call, partial(checkpoint, op.call, use_reentrant=False)):
        leaf = x.clone().requires_grad_()
        y = call(leaf, k, tau)
        grads.append(torch.autograd.grad(y, leaf, torch.ones_like(y))[0])
    assert torch.equal(grads[0].nan_to_num(7), grads[1].nan_to_num(7))


@every_differentiable
def test_forward_mode_equals_reverse_mode(op: Operator) -> None:
    x, k, tau = arguments(op)
    tangent = scores(seed=1)
    cotangent = scores(*op.call(x, k, tau).shape, seed=2)
    cotangent = cotangent.masked_fill(no_slope(op, (x, k, tau)), 0)
    with dual_level(), warnings.catch_warnings():
        dual = unpack_dual(op.call(make_dual(x, tangent), k, tau))
    x.requires_grad_()
    (grad,) = torch.autograd.grad(op.call(x, k, tau), x, cotangent)
    assert_close((dual.tangent * cotangent).sum(), (grad * tangent).sum(), 1e-12)


@every_distinct_differentiable
def test_hessian_is_symmetric_and_agrees_between_modes(op: Operator) -> None:
    weights = scores(N, seed=3)

    def f(x: Tensor) -> Tensor:
        y = op.call(x, op.k[1], 0.8)
        return (y.masked_fill(y.isinf(), 0) * (weights if op.keeps_dim else 1)).square().sum()

    x = scores(N)
    forward_over_reverse = torch.func.hessian(f)(x)
    reverse_over_reverse = torch.func.jacrev(torch.func.jacrev(f))(x)
    assert_close(forward_over_reverse, reverse_over_reverse, 1e-10)
    assert_close(forward_over_reverse, forward_over_reverse.mT, 1e-10)


@every_differentiable
def test_fused_backward_equals_differentiable_backward(op: Operator) -> None:
    args = leaves(op)
    inputs = [a for a in args if a.requires_grad]
    y = op.call(*args).nan_to_num(0, 0, 0)
    cotangent = scores(*y.shape, seed=4)
    fused = torch.autograd.grad(y, inputs, cotangent, retain_graph=True)
    differentiable = torch.autograd.grad(y, inputs, cotangent, create_graph=True)
    for a, b in zip(fused, differentiable, strict=True):
        assert_close(a, b, 1e-12)


@every_mask
def test_hard_is_the_mask_forward_and_the_soft_gradient_backward(op: Operator) -> None:
    if op.name in ("log_soft_topk", "soft_topk_magnitude", "topk_mask", "budget_mask"):
        return
    x, k, tau = arguments(op)
    grads = []
    for hard in (False, True):
        leaf = x.clone().requires_grad_()
        y = op.call(leaf, k, tau, hard=hard)
        grads.append(torch.autograd.grad(y, leaf, scores(seed=5))[0])
    assert torch.equal(y, khot.topk_mask(x, k))
    assert torch.equal(*grads)


@every_mask
def test_smallest_is_largest_of_the_negative(op: Operator) -> None:
    if op.name == "soft_topk_magnitude":
        return
    x = scores()
    assert torch.equal(op.call(x, 2.0, 0.7, largest=False), op.call(-x, 2.0, 0.7))


@every_distinct_differentiable
def test_results_can_be_changed_in_place(op: Operator) -> None:
    x, k, tau = arguments(op)
    grads = []
    for change in (torch.mul, Tensor.mul_):
        leaf = x.clone().requires_grad_()
        y = change(op.call(leaf, k, tau), 2)
        try:
            y.nan_to_num(0, 0, 0).sin().sum().backward()
        except RuntimeError as error:  # as for torch.exp, the gradient is computed from the result
            if "modified by an inplace operation" in str(error):
                return
            raise
        assert leaf.grad is not None
        grads.append(leaf.grad)
        assert torch.equal(leaf, x)
    assert torch.equal(*grads)


@pytest.mark.parametrize("name", ["soft_assign", "sorted_soft_topk"])
def test_whole_results_can_be_changed_in_place(name: str) -> None:
    """The table has only rows and sums of these."""
    grads = []
    for change in (torch.mul, Tensor.mul_):
        leaf = scores().requires_grad_()
        y: Tensor = change(getattr(khot, name)(leaf, 2), 2)
        y.sin().sum().backward()
        assert leaf.grad is not None
        grads.append(leaf.grad)
    assert torch.equal(*grads)


# --------------------------------------------------------------------------------- transforms


@every_distinct
def test_vmap_over_each_argument(op: Operator) -> None:
    x, k, tau = arguments(op)
    want = op.call(x, k, tau)
    for dims in ((0, 0, 0), (0, None, None), (None, 0, None), (None, None, 0)):
        args = [v if d == 0 else v[0] for v, d in zip((x, k, tau), dims, strict=True)]
        rows = [
            op.call(*(v[i] if d == 0 else v for v, d in zip(args, dims, strict=True))) for i in range(ROWS)
        ]
        got = torch.func.vmap(op.call, in_dims=dims)(*args)
        assert_close(got, torch.stack(rows), 1e-13)
    assert_close(torch.func.vmap(op.call)(x, k, tau), want, 1e-13)
    across = torch.func.vmap(lambda column: op.call(column, 1.0, 0.8), in_dims=1, out_dims=-1)(x)
    assert_close(across, op.call(x, 1.0, 0.8, dim=0), 1e-13)


@every_distinct_differentiable
def test_grad_under_vmap(op: Operator) -> None:
    def loss(x: Tensor, k: Tensor, tau: Tensor) -> Tensor:
        return op.call(x, k, tau).nan_to_num(0, 0, 0).square().sum()

    x, k, tau = arguments(op)
    argnums = (0, *[1] * (not op.integer_k), *[2] * op.has_tau)
    got = torch.func.vmap(torch.func.grad(loss, argnums=argnums))(x, k, tau)
    leaf = [a.clone().requires_grad_() for a in (x, k, tau)]
    want = torch.autograd.grad(loss(*leaf), [leaf[i] for i in argnums])
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, 1e-12)


# shapes do not depend on the CDF, so one variant of each operator is traced with dynamic ones, but for
# soft_assign, which is traced for each shape
@torch._dynamo.config.patch(specialize_float=True)  # which is found late: what came before is traced again
@pytest.mark.parametrize(
    ("op", "dynamic"),
    [(op, op in FIRST and op.name != "soft_assign") for op in DISTINCT],
    ids=lambda v: v.id if isinstance(v, Operator) else "dynamic" if v else "static",
)
def test_compile(op: Operator, dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # steps that are traced one after the other; these rows need at most 5, and one trace goes on beyond
    monkeypatch.setattr(exponential, "STEPS", 6 if dynamic else 2)
    monkeypatch.setattr(exponential, "OMEGA_STEPS", 3)
    # aot_eager traces everything that inductor would see, and does not wait for a C++ compiler
    torch.compiler.reset()
    compiled = torch.compile(op.call, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for n in (N, N + 2) if dynamic else (N,):
        x, k, tau = scores(ROWS, n), *arguments(op)[1:]
        eager = [a.clone().requires_grad_(op.differentiable) for a in (x, k, tau)]
        traced = [a.clone().requires_grad_(op.differentiable) for a in (x, k, tau)]
        if op.integer_k:
            eager[1].requires_grad_(False), traced[1].requires_grad_(False)
        want, got = op.call(*eager), compiled(*traced)
        assert_close(got, want, 1e-13)
        if op.differentiable:
            for y in (want, got):
                y.nan_to_num(0, 0, 0).square().sum().backward()
            for a, b in zip(eager, traced, strict=True):
                if a.grad is not None:
                    assert b.grad is not None
                    assert_close(b.grad, a.grad, 1e-12)


@pytest.mark.slow
def test_inductor_compiles_the_whole_graph() -> None:
    def loss(x: Tensor, k: Tensor) -> Tensor:
        return (khot.sigmoid_topk(x, k, tau=0.5) * x).sum()

    x, k = scores().requires_grad_(), torch.tensor(op_k := [2.3, 3.0, 4.6], requires_grad=True)
    torch.compile(loss, fullgraph=True)(x, k).backward()
    leaf, k_leaf = scores().requires_grad_(), torch.tensor(op_k, requires_grad=True)
    loss(leaf, k_leaf).backward()
    assert x.grad is not None
    assert leaf.grad is not None
    assert_close(x.grad, leaf.grad, 1e-12)


def test_compiled_vmap() -> None:
    torch.compiler.reset()
    x, k = scores(), torch.tensor([2.3, 3.0, 4.6])
    mapped = torch.func.vmap(lambda x, k: khot.sigmoid_topk(x, k) * khot.topk_mask(x, k))
    got = torch.compile(mapped, fullgraph=True, backend="aot_eager")(x.clone().requires_grad_(), k)
    assert_close(got.detach(), mapped(x, k), 1e-13)


def test_compiled_func_grad() -> None:
    def loss(x: Tensor) -> Tensor:
        return khot.sigmoid_topk(x, 2.0, tau=0.5).square().sum()

    torch.compiler.reset()
    want = torch.func.grad(loss)(scores(N))
    got = torch.compile(torch.func.grad(loss), backend="aot_eager")(scores(N))
    assert_close(got, want, 1e-12)


@every_distinct
def test_autocast_computes_in_float32_and_keeps_the_dtype(op: Operator) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        x, k, tau = arguments(op, dtype)
        want = op.call(x, k.double(), tau.double())
        with torch.autocast("cpu", torch.bfloat16):
            y = op.call(x, k.double(), tau.double())
        assert y.dtype == dtype
        assert torch.equal(y, want)


@every_differentiable
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_of_half_precision_are_rounded_once(op: Operator, dtype: torch.dtype) -> None:
    if op.name in ("soft_assign", "sorted_soft_topk", "topk") or op.id.endswith("-first"):
        pytest.skip("the table calls it in a function that itself adds in half precision")
    x, _, tau = arguments(op, dtype)
    k = torch.tensor(op.k, dtype=torch.float64).reshape(arguments(op)[1].shape)

    def gradient(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        y = op.call(x, k, tau.double())
        v = scores(*y.shape, seed=1, dtype=dtype).to(y.dtype).masked_fill(~y.isfinite(), 0)
        return torch.autograd.grad(y, x, v * 2**14)[0]  # as of a scaled loss

    want, got = gradient(x.float()), gradient(x)
    ulp = torch.finfo(dtype).eps * want.abs() + 1e-6 * want.abs().amax()
    overflow = want.abs() > torch.finfo(dtype).max * (1 - torch.finfo(dtype).eps)
    assert (((got - want).abs() <= ulp) | (overflow & ~got.isnan())).all()
