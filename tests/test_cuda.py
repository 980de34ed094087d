"""Every public operator on a CUDA device: its results against the CPU's, and its use of the device.

The table is in operators.py. The tests are skipped if there is no device, unless KHOT_REQUIRE_CUDA=1 makes
that a failure. `pytest tests/test_cuda.py -n 12` compiles Triton's kernels in several processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import khot
import oracles
from agreement import (
    ROUNDING,
    arguments,
    error,
    excess,
    fits,
    leaves,
    never_waiting,
    poisoned,
    value_and_gradients,
)
from khot import _kernels as kernels
from khot import cdfs
from operators import OPERATORS, Operator

pytestmark = [
    pytest.mark.needs_cuda,
    # Triton 3.9's own, when it first compiles
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]

# the row shares a program with others; it has a program to itself; it streams past a program
SIZES = (7, 1001, 40_001)

every = pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.id)
every_differentiable = pytest.mark.parametrize(
    "op", [op for op in OPERATORS if op.differentiable], ids=lambda op: op.id
)
CDFS = ["logistic", "laplace", "normal", "uniform", cdfs.Power(4 / 3)]
every_cdf = pytest.mark.parametrize("cdf", CDFS, ids=str)


def test_triton_serves() -> None:
    assert kernels.active()["gpu"] == "triton"


# ------------------------------------------------------------------------------------- results


@every
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_agrees_with_the_cpu(op: Operator, dtype: torch.dtype) -> None:
    for n in SIZES:
        if not fits(op, n) or (n == SIZES[-1] and dtype == torch.float16):
            continue
        args = arguments(op, n, dtype)
        want = value_and_gradients(op, leaves(op, [a.double() for a in args], "cpu"))
        with poisoned():
            got = value_and_gradients(op, leaves(op, args, "cuda"))
        assert got[0].dtype == dtype
        assert max(excess(op, got, want, n, dtype)) <= 1, n


@every_cdf
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("n", [2, 45, 3000, 36_000])
def test_adversarial_rows(cdf: str | cdfs.CDF, dtype: torch.dtype, n: int) -> None:
    rows, ks = [], []
    for draw in oracles.ADVERSARIAL.values():
        x = draw(n, torch.Generator().manual_seed(n)).to(dtype)
        selectable = int((x > -torch.inf).sum())
        for k in (0.0, *oracles.adversarial_ks(selectable), selectable):
            rows.append(x)
            ks.append(min(max(k, 0.0), selectable))
    x, k = torch.stack(rows), torch.tensor(ks, dtype=torch.float64)
    free = (x > -torch.inf).sum(-1)
    goal = (1e-12 if dtype == torch.float64 else 1e-6) * torch.minimum(k, free - k).clamp(min=1)
    goal = goal + n * torch.finfo(dtype).eps / 2
    for tau in oracles.TAUS:
        y = khot.soft_topk(x.cuda(), k.cuda(), tau=tau, cdf=cdf).cpu()
        assert error(y, khot.soft_topk(x.double(), k, tau=tau, cdf=cdf)) <= ROUNDING[dtype]
        assert ((y.double().sum(-1) - k).abs() <= goal).all()


@every
def test_any_layout(op: Operator) -> None:
    x = torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64).cuda()
    want = op.call(x, op.k[1], 0.8).cpu()
    transposed = x.transpose(0, 2).contiguous().transpose(0, 2)
    strided = torch.stack((x, x + 9), -1).flatten(-2)[..., ::2]
    for layout in (transposed, strided):
        assert error(op.call(layout, op.k[1], 0.8), want) <= 1e-13
    expanded = op.call(x[:1].expand(4, 6, 5), op.k[1], 0.8)
    assert error(expanded, want[:1].expand(4, *want.shape[1:])) <= 1e-13


@every
def test_bad_rows_are_nan_and_spoil_no_other(op: Operator) -> None:
    x, k, tau = (a.cuda() for a in arguments(op))
    want = op.call(x, k, tau)
    tau = tau.index_fill(0, torch.tensor([1], device="cuda"), -1.0)
    y = op.call(x, k, tau)
    rows = [0, 2]
    if op.has_tau:
        assert y[1].isnan().all()
    else:
        assert torch.equal(y, want)
    assert torch.equal(y[rows], want[rows])
    x[1, 3] = torch.nan
    y = op.call(x, k, tau)
    assert y[1].isnan().all() and torch.equal(y[rows], want[rows])


def test_more_rows_than_a_grid_is_high(monkeypatch: pytest.MonkeyPatch) -> None:
    from khot._kernels.triton import layout

    x = torch.randn(70_000, 100, device="cuda")
    want = [khot.sigmoid_topk(x, 9), khot.topk_mask(x, 9), khot.soft_topk_magnitude(x, 9)]
    for name, value in {"RESIDENT": 64, "STREAMED": 0, "STREAMS": 1 << 30}.items():
        monkeypatch.setattr(layout, name, value)
    got = [khot.sigmoid_topk(x, 9), khot.topk_mask(x, 9), khot.soft_topk_magnitude(x, 9)]
    for a, b in zip(got, want, strict=True):
        assert error(a, b.cpu()) <= 1e-6


@pytest.mark.parametrize("output", [khot.soft_topk, khot.log_soft_topk], ids=["y", "log"])
@every_cdf
def test_rows_split_over_programs(cdf: str | cdfs.CDF, output: Callable[..., Tensor]) -> None:
    x = torch.randn(2, 300_001, generator=torch.Generator().manual_seed(0))
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    results = []
    for device, dtype in (("cuda", torch.float32), ("cpu", torch.float64)):
        row = x.to(device, dtype).requires_grad_()
        y = output(row, 3_000.5, tau=0.5, cdf=cdf)
        finite = y.detach() > -torch.inf
        (dx,) = torch.autograd.grad(y.masked_fill(~finite, 0), row, grad.to(device, dtype))
        results.append((y, dx))
    (got, dx), (want, dwant) = results
    assert error(got, want) <= 1e-5 if output is khot.log_soft_topk else error(got, want) <= 5e-7
    assert error(dx / dwant.abs().max().item(), dwant / dwant.abs().max()) <= 1e-4


def test_millions_of_equal_scores() -> None:
    y = khot.sigmoid_topk(torch.full((1, 6_290_000), 0.7, device="cuda"), 64)
    assert abs(y.double().sum().item() - 64) <= 6_290_000 * torch.finfo(torch.float32).eps / 2


def test_half_precision_keeps_the_sum() -> None:
    x = torch.randn(64, 16_384, device="cuda").bfloat16()
    y = khot.sigmoid_topk(x, 64).double()
    assert ((y.sum(-1) - 64).abs() <= 64 / 200).all()


# ---------------------------------------------------------------------------------- derivatives


@every_differentiable
def test_gradcheck(op: Operator) -> None:
    args = leaves(op, arguments(op), "cuda")

    def call(*args: Tensor) -> Tensor:
        y = op.call(*args)
        return y.masked_fill(y.detach().isinf(), 0)

    # sums by atomic addition come in any order
    torch.autograd.gradcheck(call, args, fast_mode=True, check_forward_ad=True, nondet_tol=1e-10)
    torch.autograd.gradgradcheck(call, args, fast_mode=True, nondet_tol=1e-10)


@every
def test_vmap(op: Operator) -> None:
    x, k, tau = (a.cuda() for a in arguments(op))
    assert error(torch.func.vmap(op.call)(x, k, tau), op.call(x, k, tau).cpu()) <= 1e-13


# ------------------------------------------------------------------- the device at its own pace


@every
def test_the_host_never_waits(op: Operator) -> None:
    for n in (7, 40_001):
        if not fits(op, n):
            continue
        args = leaves(op, arguments(op, n, torch.float32), "cuda")
        value_and_gradients(op, args)  # the first call may wait, because it compiles and loads kernels
        with never_waiting():
            y = op.call(*args)
            if op.differentiable:
                torch.autograd.grad(y, [a for a in args if a.requires_grad], torch.ones_like(y))


@every
def test_cuda_graph(op: Operator) -> None:
    """Captured with one input and replayed with another."""
    for n in (7, 40_001):
        if not fits(op, n):
            continue
        args = leaves(op, arguments(op, n, torch.float32), "cuda")

        def step(args: list[Tensor] = args) -> list[Tensor]:
            y = op.call(*args)
            if not op.differentiable:
                return [y]
            wanted = [a for a in args if a.requires_grad]
            return [y, *torch.autograd.grad(y, wanted, torch.ones_like(y))]

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        with torch.no_grad():
            args[0].copy_(args[0].flip(-1) * 0.9 + 0.1)
        graph.replay()
        for a, b in zip(captured, step(), strict=True):
            assert error(a, b.detach().cpu()) <= 1e-6


@every
def test_compile(op: Operator) -> None:
    torch.compiler.reset()
    compiled = torch.compile(op.call, fullgraph=True, backend="aot_eager")
    eager, traced = (leaves(op, arguments(op, 7, torch.float32), "cuda") for _ in range(2))
    want, got = op.call(*eager), compiled(*traced)
    assert error(got, want.detach().cpu()) <= 1e-6
    if op.differentiable:
        for y in (want, got):
            y.nan_to_num(0, 0, 0).square().sum().backward()
        for a, b in zip(traced, eager, strict=True):
            if b.grad is not None:
                assert a.grad is not None and error(a.grad, b.grad.cpu()) <= 1e-4


@pytest.mark.parametrize(
    "call",
    [
        lambda x, k: khot.sigmoid_topk(x, k, tau=0.5),
        lambda x, k: khot.soft_topk_magnitude(x, 3, tau=0.5),
        lambda x, k: khot.sigmoid_topk(x, k, hard=True),
        lambda x, k: khot.soft_sort(x),
    ],
    ids=["sigmoid_topk", "magnitude", "hard", "sort"],
)
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_inductor(call: Callable[..., Tensor], mode: str) -> None:
    torch.compiler.reset()
    weights = torch.randn(8, 33, device="cuda")

    def loss(x: Tensor, k: Tensor) -> Tensor:
        return (call(x * 2, k) * weights).sum()

    compiled = torch.compile(loss, fullgraph=True, mode=mode)
    for seed in range(3):  # CUDA graphs record in the second call
        generator = torch.Generator("cuda").manual_seed(seed)
        x = torch.randn(8, 33, device="cuda", generator=generator, requires_grad=True)
        k = torch.full((8,), 4.0, device="cuda")
        (got,) = torch.autograd.grad(compiled(x, k), x)
        got = got.clone()
        (want,) = torch.autograd.grad(loss(x, k), x)
        assert error(got, want.cpu()) <= 1e-5


@every
def test_autocast_keeps_the_dtype(op: Operator) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        args: list[Any] = [a.cuda() for a in arguments(op, 7, dtype)]
        want = op.call(*args)
        with torch.autocast("cuda", torch.bfloat16):
            y = op.call(*args)
        assert y.dtype == dtype
        assert torch.equal(y, want)
