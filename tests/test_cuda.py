"""Every public operator on a CUDA device: its results against the CPU's, and its use of the device.

The table is in operators.py. The tests are skipped if there is no device, unless KHOT_REQUIRE_CUDA=1 makes
that a failure. `pytest tests/test_cuda.py -n 12` compiles Triton's kernels in several processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from benchmarks.host import plain_calls
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
from khot._core import eager
from operators import OPERATORS, Operator

if not torch.cuda.is_available() and os.environ.get("KHOT_REQUIRE_CUDA") != "1":
    pytest.skip("no CUDA device", allow_module_level=True)  # 1,600 tests are not even collected

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


@contextlib.contextmanager
def other_stream() -> Iterator[None]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def capture(step: Callable[[], list[Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    with other_stream():
        for _ in range(3):
            step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    return graph, captured


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


def spent(x: Tensor, budget: float, tau: float, by: Any) -> Tensor:
    """A budget for costs that differ by as much as a decade, and are the same in float32 and float64."""
    cost = (1 + x.detach().flip(-1).abs()).float().to(x.dtype)
    return khot.soft_budget(x, cost, budget, tau=tau, by=by)


SHORT, LONG = "soft_topk-logistic", "soft_topk_magnitude-2.00"
WAYS: list[tuple[str, int, int, float, float, torch.dtype]] = [  # rows, n, k, tau
    (SHORT, 4_096, 64, 8.5, 1.0, torch.float32),  # several rows to a program
    (SHORT, 4_096, 64, 8.5, 0.01, torch.float32),
    (SHORT, 512, 64, 8, 1e-4, torch.float32),  # a gap no exponential crosses
    (SHORT, 64, 64, 8.5, 1.0, torch.float64),
    (SHORT, 256, 512, 32, 1.0, torch.bfloat16),
    (SHORT, 256, 512, 32, 1.0, torch.float16),
    (SHORT, 256, 1_000, 100, 1.0, torch.float32),
    (SHORT, 64, 8_192, 64, 1.0, torch.float32),  # rows of several warps
    ("log_soft_topk-logistic", 64, 8_192, 64, 1.0, torch.float32),
    (SHORT, 32, 32_768, 3_000, 1.0, torch.float32),  # the longest rows on chip
    (SHORT, 32, 65_536, 6_000, 1.0, torch.bfloat16),  # two entries to a register
    (SHORT, 32, 40_000, 3_000.5, 1.0, torch.float16),
    (SHORT, 64, 100_000, 10_000, 1.0, torch.float32),  # rows that stream past
    (SHORT, 64, 70_001, 64, 0.01, torch.float32),
    (SHORT, 2, 1_000_000, 64, 1.0, torch.float32),  # rows split over programs
    ("soft_topk-laplace", 2, 300_000, 64, 1.0, torch.float32),
    (LONG, 2, 300_001, 64, 1.0, torch.float32),
    (LONG, 2, 300_001, 64, 0.01, torch.float32),
    (LONG, 1, 6_300_000, 64, 1.0, torch.float32),
    ("soft_topk_magnitude-1.33", 2, 300_001, 64, 1.0, torch.float32),
    *(
        (f"soft_budget-logistic-{by}", *sizes, torch.float32)
        for by in ("score", "value")
        for sizes in ((2, 300_001, 30_000, 1.0), (2, 300_001, 100, 0.01), (1, 6_300_000, 64, 1.0))
    ),
    ("soft_assign-logistic", 4_096, 64, 2, 1.0, torch.float32),
    ("soft_assign-logistic", 4_096, 64, 2, 0.001, torch.float32),
    *(
        (f"soft_permutation-{cdf}", rows, n, 1, 1.0, torch.float32)
        for rows, n in ((256, 64), (64, 256), (16, 512))
        for cdf in ("laplace", "logistic")
    ),
]


@pytest.mark.parametrize(("name", "rows", "n", "k", "tau", "dtype"), WAYS, ids=str)
def test_ways_through_the_kernels(
    name: str, rows: int, n: int, k: float, tau: float, dtype: torch.dtype
) -> None:
    """Those that depend on how many rows there are, with k and tau as numbers."""
    op = next(op for op in OPERATORS if op.id == name.replace("-value", "-score"))
    called = op.call
    if name.startswith("soft_budget"):
        called = partial(spent, by=name.rpartition("-")[2])
    elif name.startswith("soft_assign"):  # each row's k, spread evenly over the columns
        called = lambda x, k, tau: khot.soft_assign(x, k, tau=tau)  # noqa: E731
    op = dataclasses.replace(op, call=lambda x, *_: called(x, k, tau), integer_k=True, has_tau=False)
    x = torch.randn(rows, n, generator=torch.Generator().manual_seed(0)).to(dtype)
    args = [x, torch.ones(()), torch.ones(())]
    want = value_and_gradients(op, leaves(op, [a.double() for a in args], "cpu"))
    with poisoned():
        got = value_and_gradients(op, leaves(op, args, "cuda"))
    assert max(excess(op, got, want, n, dtype)) <= 1


@contextlib.contextmanager
def ordinary() -> Iterator[None]:
    """The ordinary way for every call, and Triton's launcher for every kernel."""
    with pytest.MonkeyPatch.context() as patch:
        for name in (*eager.ON_GPUS, "start"):
            patch.setattr(eager, name, eager._ordinary)
        yield


def calls_without_python(like: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
    """What the extension has launches for, of inputs like this one."""
    cost, each, mask = 1 + like.flip(-1).abs(), 2 + like[:, 0].sigmoid(), like < like.amax()
    tau = like.new_full((), 0.7, dtype=torch.float32).requires_grad_()
    learned = each.float().requires_grad_()
    given: dict[str, list[dict[str, Any]]] = {
        "soft_topk": [
            {"k": 3, "cdf": "laplace"}, {"k": 3, "hard": True}, {"k": each, "tau": each},
            {"k": 3, "mask": mask}, {"k": 1, "dim": 0}, {"k": 3, "tau": tau}, {"k": learned, "tau": learned},
        ],
        "log_soft_topk": [{"k": 2.5, "tau": 0.3}],
        "soft_topk_magnitude": [{"k": 3, "tau": each}, {"k": 3, "mask": mask}, {"k": 3, "tau": tau}],
        "soft_budget": [
            {"cost": cost, "budget": 3.0, "mask": mask}, {"cost": cost, "budget": 3.0, "by": "value"},
            {"cost": cost, "budget": each}, {"cost": cost, "budget": learned, "tau": tau},
        ],
        "soft_rank": [{"mask": mask}, {"tau": tau, "descending": True}],
        "soft_sort": [{"mask": mask}, {"tau": learned, "descending": True}],
    }  # fmt: skip
    return plain_calls(like) | {
        f"{name}, {at}": partial(getattr(khot, name), **options)
        for name, each_options in given.items()
        for at, options in enumerate(each_options)
    }


@pytest.mark.parametrize("name", calls_without_python(torch.ones(1, 8)))
@pytest.mark.parametrize(
    ("rows", "n", "dtype"),
    [(3, 20, torch.float32), (4_096, 64, torch.float32), (64, 8_192, torch.bfloat16)],
    ids=str,
)
def test_calls_without_python_have_the_bits_of_the_ordinary_way(
    name: str, rows: int, n: int, dtype: torch.dtype
) -> None:
    """Once prepared, in a thread, on another stream, in a graph, and for a gradient that is not contiguous,
    which such a call copies."""
    x = torch.randn(rows, n, device="cuda").to(dtype).requires_grad_()
    function, contiguous = calls_without_python(x.detach())[name], torch.randn_like(x)
    options = function.keywords.values() if isinstance(function, partial) else ()
    inputs = [x, *(v for v in options if isinstance(v, Tensor) and v.requires_grad)]

    def results(grad: Tensor = contiguous) -> list[Tensor]:
        y = function(x)
        return [y.detach(), *torch.autograd.grad(y, inputs, grad), khot.topk_mask(x.detach(), 3)]

    results()  # the first launch puts the extension's functions in place, which `ordinary` takes away
    with ordinary():
        want = results()
    results()
    assert eager.launching
    got = {"prepared": results(), "transposed": results(contiguous.mT.contiguous().mT)}
    with ThreadPoolExecutor(1) as thread:
        got["thread"] = thread.submit(results).result()
    if x.is_cuda:
        with other_stream():
            got["stream"] = results()
        graph, got["graph"] = capture(results)
        graph.replay()
    for how, found in got.items():
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True)), how


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


@pytest.mark.parametrize("output", [khot.soft_topk, khot.log_soft_topk], ids=["y", "log"])
@every_cdf
def test_packed_rows(cdf: str | cdfs.CDF, output: Callable[..., Tensor]) -> None:
    """Several in a program, or past one; of some rows none or all are selected. The host does not wait."""
    g = torch.Generator().manual_seed(0)
    lengths = torch.cat([torch.randint(0, 200, (5_000,), generator=g), torch.tensor([40_001, 0, 3_000])])
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    x, k = torch.randn(int(offsets[-1]), generator=g), torch.minimum(torch.arange(5_003) % 9, lengths) / 1
    grad = torch.randn(x.shape, generator=g)
    results = []
    for device, dtype in (("cuda", torch.float32), ("cuda", torch.float32), ("cpu", torch.float64)):
        rows, count, ends = x.to(device, dtype).requires_grad_(), k.to(device), offsets.to(device)
        v = grad.to(device, dtype)
        with never_waiting() if len(results) == 1 else contextlib.nullcontext():
            y = output(rows, count, tau=0.5, cdf=cdf, offsets=ends)
            (dx,) = torch.autograd.grad(y.clamp(min=-50), rows, v)
        results.append((y, dx))
    _, (got, dx), (want, dwant) = results
    assert error(got.clamp(min=-50), want.clamp(min=-50)) <= 1e-5
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

        graph, captured = capture(step)
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
