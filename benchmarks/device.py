"""khot on a GPU, in three commands of less than five minutes each: `python -m benchmarks.device check`, then
`bench`, then `layers`.

`check` first compares calls without Python with the ordinary way, bit by bit. Then it runs every row of the
operators' table (tests/operators.py) forward and backward at a short and a long size, and each path through
the soft top-k and some through others, against the CPU in float64, with memory that is filled with NaN
before; and says whether the host waits and whether a CUDA graph can be captured and replayed.
`bench` times the soft top-k on the shapes that the project has goals for, and the other operators, beside
torch's softmax, sort and topk. `layers` times layers beside what one would write by hand.

All run from a bare checkout with PYTHONPATH=src:tests, without git (KHOT_REVISION names the revision) and
without a network. They compile in as many processes as --jobs says, stop by themselves after four minutes,
write device.json and device.md into --out after every step, and go on from there when they are started again.
--only takes some of the steps, say `bench --only "other operators"`.
--dry-run takes tiny shapes and the CPU, for a rehearsal: under KHOT_KERNELS=triton and TRITON_INTERPRET=1
with the kernels themselves, interpreted.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures import TimeoutError as Late
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import khot
from benchmarks import report, timing
from benchmarks.cpu import spread_normal
from benchmarks.host import plain_calls
from khot import _kernels as kernels
from khot import cdfs
from khot._core import eager
from khot.losses import FenchelYoungTopKLoss

RESULTS = Path(__file__).parent / "results"
SECONDS = {"check": 240, "bench": 240, "layers": 120}  # after which nothing new is begun
REPEATS, LONG = 20, 0.1  # calls that are timed, but no more of them than take so many seconds
CALLS = "without Python"  # the first checks
TOGETHER = 10  # replays of a graph that are timed together, so that no launch shows

Function = Callable[..., Any]
Maker = Callable[["Case", Tensor], dict[str, Function]]


class Case(NamedTuple):
    """Scores N(0, s²), how many to select, and the goals in softmaxes: forward, forward + backward."""

    rows: int
    n: int
    k: int
    dtype: torch.dtype = torch.float32
    goals: tuple[float | None, float | None] = (None, None)

    @property
    def id(self) -> str:
        return f"({self.rows:,}, {self.n:,}) {str(self.dtype).removeprefix('torch.')}"


SOFT_TOPK = [
    Case(4_096, 64, 8, goals=(1.3, 1.0)),
    Case(128, 1_000, 100, goals=(1.5, 1.3)),
    Case(4_096, 8_192, 64, goals=(1.5, 1.3)),
    Case(32_768, 512, 32, torch.bfloat16, (1.5, 1.3)),
    Case(2_048, 65_536, 64, torch.bfloat16, (1.2, 0.9)),
    Case(100, 100_000, 10_000),
    Case(16, 1_000_000, 100_000, goals=(2.0, 1.3)),
    Case(1, 6_300_000, 64, goals=(2.0, 1.3)),
]
MANY = [Case(4_096, 64, 8), Case(4_096, 8_192, 1_024)]
SQUARES = [Case(256, 64, 8), Case(64, 256, 16)]
DRY = [Case(3, 20, 4, goals=(1.5, 1.3)), Case(2, 33, 5, torch.bfloat16)]


def balanced(x: Tensor, k: float, tau: float) -> Tensor:
    """Each row's k, spread evenly over the columns."""
    return khot.soft_assign(x, k, tau=tau)


def spent(x: Tensor, budget: float, tau: float, by: Any) -> Tensor:
    """A budget for costs that differ by as much as a decade."""
    return khot.soft_budget(x, 1 + x.detach().flip(-1).abs(), budget, tau=tau, by=by)


class Route(NamedTuple):
    """One way through the kernels of an operator, which may be called in another way than in the table."""

    name: str
    rows: int
    n: int
    k: float
    tau: float = 1.0
    dtype: torch.dtype = torch.float32
    operator: str = "soft_topk-logistic"
    call: Callable[[Tensor, float, float], Tensor] | None = None


ROUTES = [
    Route("short rows, several to a program", 4_096, 64, 8.5),
    Route("short rows, small τ", 4_096, 64, 8.5, tau=0.01),
    Route("a gap no exponential crosses", 512, 64, 8, tau=1e-4),
    Route("medium rows", 256, 1_000, 100),
    Route("medium rows in bfloat16", 256, 512, 32, dtype=torch.bfloat16),
    Route("medium rows in float16", 256, 512, 32, dtype=torch.float16),
    Route("rows of several warps", 64, 8_192, 64),
    Route("rows of several warps, logarithm", 64, 8_192, 64, operator="log_soft_topk-logistic"),
    Route("the longest rows on chip", 32, 32_768, 3_000),
    Route("rows of two entries to a register", 32, 65_536, 6_000, dtype=torch.bfloat16),
    Route("rows of two entries to a register, padded", 32, 40_000, 3_000.5, dtype=torch.float16),
    Route("rows that stream past", 64, 100_000, 10_000),
    Route("rows that stream past, small τ", 64, 70_001, 64, tau=0.01),
    Route("rows split over programs", 2, 1_000_000, 64),
    Route("short rows, float64", 64, 64, 8.5, dtype=torch.float64),
    Route("split rows, laplace", 2, 300_000, 64, operator="soft_topk-laplace"),
    Route("split magnitudes", 2, 300_001, 64, operator="soft_topk_magnitude-2.00"),
    Route("split magnitudes, small τ", 2, 300_001, 64, tau=0.01, operator="soft_topk_magnitude-2.00"),
    Route("split magnitudes, p = 4/3", 2, 300_001, 64, operator="soft_topk_magnitude-1.33"),
    Route("a row of magnitudes in millions", 1, 6_300_000, 64, operator="soft_topk_magnitude-2.00"),
    *(
        Route(
            f"a budget split over programs, by {by}, τ = {tau:g}, of ({rows:,}, {n:,})",
            rows,
            n,
            budget,
            tau,
            operator="soft_budget-logistic-score",
            call=partial(spent, by=by),
        )
        for rows, n, budget, tau in (
            (2, 300_001, 30_000, 1.0),
            (2, 300_001, 100, 0.01),
            (1, 6_300_000, 64, 1.0),
        )
        for by in ("score", "value")
    ),
    *(
        Route(f"assignment, τ = {tau:g}", 4_096, 64, 2, tau, operator="soft_assign-logistic", call=balanced)
        for tau in (1.0, 0.001)
    ),
    *(
        Route(f"permutations of {n}, {cdf}", rows, n, 1, operator=f"soft_permutation-{cdf}")
        for rows, n in ((256, 64), (64, 256), (16, 512))
        for cdf in ("laplace", "logistic")
    ),
]
SIZES = (1_001, 40_001)  # of the table's rows; an operator that costs n² takes 7


def gpu_or_cpu(dry: bool) -> torch.device:
    return torch.device("cpu" if dry else "cuda")


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


# --------------------------------------------------------------------------------------- check


def checks(dry: bool) -> dict[str, tuple[str, Any]]:
    """What is looked at, by name: a row of the table and its size, or a route."""
    from agreement import fits  # tests/ has to be on the path for `check` only
    from operators import OPERATORS

    if dry:
        return {
            "soft_topk-logistic, n = 7": ("soft_topk-logistic", 7),
            "quantile-linear, n = 7": ("quantile-linear", 7),
            "short rows, logarithm": ("", Route("", 2, 20, 4.5, operator="log_soft_topk-logistic")),
            "assignment": ("", Route("", 6, 4, 1, operator="soft_assign-logistic", call=balanced)),
        }
    found: dict[str, tuple[str, Any]] = {}
    for short in (True, False):
        for op in OPERATORS:
            n = SIZES[not short] if fits(op, SIZES[not short]) else 7
            if short or n > SIZES[0]:
                found[f"{op.id}, n = {n:,}"] = (op.id, n)
        if short:
            found |= {route.name: ("", route) for route in ROUTES}
    return found


def examine(operator: str, what: Any, dry: bool) -> dict[str, Any]:
    """The errors of the value and of the gradients in units of what is allowed, whether the host waits, and
    whether a graph replays."""
    import agreement
    from operators import OPERATORS

    device, start = gpu_or_cpu(dry), time.perf_counter()
    table = {op.id: op for op in OPERATORS}
    if isinstance(what, Route):
        op, dtype = table[what.operator], what.dtype
        # k and τ by value
        called = what.call or op.call
        call = lambda x, k, tau, **options: called(x, what.k, what.tau, **options)  # noqa: E731
        op = dataclasses.replace(op, call=call, integer_k=True, has_tau=False)
        x = torch.randn(what.rows, what.n, generator=torch.Generator().manual_seed(0)).to(dtype)
        args = [x, torch.ones(()), torch.ones(())]
    else:
        op, dtype = table[operator], torch.float32
        args = agreement.arguments(op, what, dtype)
    exact = agreement.leaves(op, [a.double() for a in args], "cpu")
    want = agreement.value_and_gradients(op, exact)
    given = agreement.leaves(op, args, device.type)
    with agreement.poisoned():
        got = agreement.value_and_gradients(op, given)
    value, *rest = agreement.excess(op, got, want, args[0].shape[-1], dtype)
    found: dict[str, Any] = {"value": value, "gradients": max(rest, default=0.0)}
    found["right"] = value <= 1 and found["gradients"] <= 1
    if device.type == "cuda":
        found["waits"] = waits(op, given)
        found["graph"] = replays(op, given)
    found["seconds"] = round(time.perf_counter() - start, 1)
    return found


def waits(op: Any, args: list[Tensor]) -> str:
    """What makes the host wait for the device, if anything does."""
    from agreement import never_waiting

    try:
        with never_waiting():
            y = op.call(*args)
            if op.differentiable:
                torch.autograd.grad(y, [a for a in args if a.requires_grad], torch.ones_like(y))
    except RuntimeError as error:
        return str(error)[:200]
    return ""


def replays(op: Any, args: list[Tensor]) -> bool:
    """Whether a graph captured with one input computes another's result."""
    from agreement import error

    held = [a.detach().clone() for a in args]
    graph = capture(lambda: op.call(*held))
    if graph is None:
        return False
    held[0].copy_(held[0].flip(-1) * 0.9)
    graph[0].replay()
    return error(graph[1], op.call(*held).cpu()) <= 1e-6


def capture(function: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any] | None:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(stream):
            for _ in range(3):
                function()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            result = function()
    except RuntimeError:
        return None
    return graph, result


@contextmanager
def ordinary() -> Iterator[None]:
    """The ordinary way for every call, and Triton's launcher for every kernel."""
    names = (*eager.ON_GPUS, "start")
    held = {name: getattr(eager, name) for name in names}
    try:
        for name in names:
            setattr(eager, name, eager._ordinary)
        yield
    finally:
        for name, call in held.items():
            setattr(eager, name, call)


def examine_calls(name: str, dry: bool) -> dict[str, Any]:
    """Whether calls without Python have the bits of the ordinary way."""
    device = gpu_or_cpu(dry)
    shapes = ((3, 20, torch.float32), (4_096, 64, torch.float32), (64, 8_192, torch.bfloat16))
    wrong = [
        f"({rows}, {n}): {how}"
        for rows, n, dtype in shapes[: 1 if dry else None]
        for x in [torch.randn(rows, n, device=device).to(dtype).requires_grad_()]
        for how in differences(different_calls(x.detach())[name], x)
    ]
    return {"right": not wrong and (dry or eager.launching), "wrong": "; ".join(wrong)}


def different_calls(like: Tensor) -> dict[str, Function]:
    """What the extension has launches for, of inputs like this one."""
    cost, each, mask = 1 + like.flip(-1).abs(), 2 + like[:, 0].sigmoid(), like < like.amax()
    tau = like.new_full((), 0.7, dtype=torch.float32).requires_grad_()
    learned = each.float().requires_grad_()
    return {
        **plain_calls(like),
        "soft_topk, laplace": partial(khot.soft_topk, k=3, cdf="laplace"),
        "log_soft_topk": partial(khot.log_soft_topk, k=2.5, tau=0.3),
        "hard": partial(khot.soft_topk, k=3, hard=True),
        "k and tau of each row": partial(khot.soft_topk, k=each, tau=each),
        "mask": partial(khot.soft_topk, k=3, mask=mask),
        "magnitude, tau of each row": partial(khot.soft_topk_magnitude, k=3, tau=each),
        "magnitude, masked": partial(khot.soft_topk_magnitude, k=3, mask=mask),
        "budget, masked": partial(khot.soft_budget, cost=cost, budget=3.0, mask=mask),
        "rank, masked": partial(khot.soft_rank, mask=mask),
        "sort, masked": partial(khot.soft_sort, mask=mask),
        "of columns": partial(khot.soft_topk, k=1, dim=0),
        "budget, by value": partial(khot.soft_budget, cost=cost, budget=3.0, by="value"),
        "budget of each row": partial(khot.soft_budget, cost=cost, budget=each),
        "learned tau": partial(khot.soft_topk, k=3, tau=tau),
        "learned k and tau": partial(khot.soft_topk, k=learned, tau=learned),
        "magnitude, learned tau": partial(khot.soft_topk_magnitude, k=3, tau=tau),
        "learned budget": partial(khot.soft_budget, cost=cost, budget=learned, tau=tau),
        "rank, learned tau": partial(khot.soft_rank, tau=tau, descending=True),
        "sort, learned tau": partial(khot.soft_sort, tau=learned, descending=True),
    }


def differences(function: Function, x: Tensor) -> Iterator[str]:
    """Where a call and its gradient differ from the ordinary way's: once prepared, in a thread, on another
    stream, in a graph, and for a gradient that is not contiguous, which such a call copies."""
    contiguous = torch.randn_like(x)
    given = function.keywords.values() if isinstance(function, partial) else ()
    leaves = [x, *(v for v in given if isinstance(v, Tensor) and v.requires_grad)]

    def results(grad: Tensor = contiguous) -> list[Tensor]:
        y = function(x)
        return [y.detach(), *torch.autograd.grad(y, leaves, grad), khot.topk_mask(x.detach(), 3)]

    results()  # the first launch puts the extension's functions in place, which `ordinary` takes away
    with ordinary():
        wanted = results()
    results()
    got = {"prepared": results(), "transposed": results(contiguous.mT.contiguous().mT)}
    with ThreadPoolExecutor(1) as thread:
        got["thread"] = thread.submit(results).result()
    if x.is_cuda:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            got["stream"] = results()
        torch.cuda.current_stream().wait_stream(stream)
        graph = capture(results)
        if graph is None:
            yield "no graph"
        else:
            graph[0].replay()
            got["graph"] = graph[1]
    for how, found in got.items():
        if not all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)):
            yield how


def copied(device: torch.device, dry: bool) -> float:
    """Bytes a second that a copy reads and writes."""
    source = torch.randn(1 << (12 if dry else 28), device=device)
    target = torch.empty_like(source)
    seconds = events(lambda: target.copy_(source), device, REPEATS)
    return 2 * source.numel() * 4 / seconds


# ------------------------------------------------------------------------------- one measurement


def events(function: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """The median seconds of a call on the device, gaps between its kernels included."""
    if device.type != "cuda":
        return timing.medians({"": function}, seconds=0.01)[""]
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def on_host(function: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """The median seconds until a call comes back, with an idle device and without waiting for it."""
    times = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def on_device(function: Callable[[], Any], device: torch.device, repeats: int) -> tuple[float, float]:
    """Seconds that the kernels of a call take, the gaps between them left out; and how many there are."""
    with torch.profiler.profile() as profile:
        for _ in range(repeats):
            function()
        synchronize(device)
    kind = getattr(torch.autograd.DeviceType, device.type.upper())
    own = ("Activity Buffer Request", "Command Buffer Full", "Buffer Flush", "Lazy Function Loading")
    found = [e for e in profile.events() if e.device_type == kind and e.name not in own]
    return sum(e.time_range.elapsed_us() for e in found) / 1e6 / repeats, len(found) / repeats


def times(function: Callable[[], Any], device: torch.device) -> dict[str, float | None]:
    """Seconds on the device, of a call, until it returns, and of a graph's replay; kernels and memory."""
    function()
    synchronize(device)
    start = time.perf_counter()
    function()
    synchronize(device)
    seconds = time.perf_counter() - start
    if seconds > 1:
        return {"call": seconds}
    repeats = max(3, min(REPEATS, int(LONG / seconds)))
    for _ in range(repeats):  # the clocks are up then
        function()
    found: dict[str, float | None] = {
        "call": events(function, device, repeats),
        "host": on_host(function, device, repeats),
    }
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = function()
        found["memory"] = torch.cuda.max_memory_allocated() - before
        del result
        found["device"], found["kernels"] = on_device(function, device, repeats)
        graph = capture(function) if repeats == REPEATS else None
        if graph is not None:
            several = partial(_several, graph[0].replay)
            found["replay"] = events(several, device, repeats) / TOGETHER
    return found


def _several(function: Callable[[], Any]) -> None:
    for _ in range(TOGETHER):
        function()


def both_ways(function: Function, *inputs: Tensor, weights: Sequence[Tensor] = ()) -> list[Callable[[], Any]]:
    """Forward without a gradient, and forward + backward if there is one, in the inputs and the weights."""

    def forward() -> Any:
        with torch.no_grad():
            return function(*inputs)

    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    y = function(*leaves)
    if not (isinstance(y, Tensor) and y.requires_grad):
        return [forward]
    cotangent = torch.randn(y.shape, generator=torch.Generator(y.device).manual_seed(1), device=y.device).to(
        y
    )

    def both() -> Any:
        return torch.autograd.grad(function(*leaves), [*leaves, *weights], cotangent, allow_unused=True)

    return [forward, both]


# --------------------------------------------------------------------------------------- bench


def scores(case: Case, device: torch.device) -> Tensor:
    x = spread_normal(case.rows, case.n, torch.Generator().manual_seed(0))
    return x.to(device=device, dtype=case.dtype)


def bisection(x: Tensor, k: float) -> Tensor:
    """What one writes without a library: 50 halvings between bounds that no row leaves."""
    z = x.float()
    low, high = z.amin(-1, keepdim=True) - 40, z.amax(-1, keepdim=True) + 40
    for _ in range(50):
        middle = (low + high) / 2
        above = torch.sigmoid(z - middle).sum(-1, keepdim=True) > k
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return torch.sigmoid(z - (low + high) / 2).to(x.dtype)


def soft_topks(case: Case, x: Tensor) -> dict[str, Function]:
    return {
        "softmax": partial(torch.softmax, dim=-1),
        "torch.topk": lambda x: torch.topk(x, case.k).values,
        "topk": lambda x: khot.topk(x, case.k).values,
        "soft_topk": lambda x: khot.soft_topk(x, case.k),
        "soft_topk, τ = 0.1": lambda x: khot.soft_topk(x, case.k, tau=0.1),
        "log_soft_topk": lambda x: khot.log_soft_topk(x, case.k),
        "topk_mask": lambda x: khot.topk_mask(x, case.k),
    }


def plain(case: Case, x: Tensor) -> dict[str, Function]:
    """Calls that go without Python, for the time that they keep the host."""
    tau = x.new_ones(()).requires_grad_()
    learned = {"soft_topk with a learned tau": lambda x: khot.soft_topk(x, 8, tau=tau)}
    return {"softmax": partial(torch.softmax, dim=-1), **plain_calls(x), **learned}


def peers(case: Case, x: Tensor) -> dict[str, Function]:
    """The same function by what people use today."""
    compiled = torch.compile(bisection, dynamic=False)
    found: dict[str, Function] = {
        "softmax": partial(torch.softmax, dim=-1),
        "bisection, compiled": lambda x: compiled(x, float(case.k)),
    }
    if importlib.util.find_spec("entmax") is not None:
        import entmax

        found["entmax, budget bisection"] = lambda x: entmax.budget_bisect(x, budget=case.k)
    return found


def others(case: Case, x: Tensor) -> dict[str, Function]:
    """The operators of rows that cost no more than n log n, by default settings."""
    k, costs = case.k, 1 + x.flip(-1).abs()
    rising = torch.linspace(-1, 1, case.n, dtype=x.dtype, device=x.device).expand(x.shape)
    mask, probs, fenchel_young = khot.topk_mask(x.flip(-1), k), khot.soft_topk(x, k), FenchelYoungTopKLoss(k)
    relevance = (rising > 0.5).to(x)
    # longer rows take seconds
    conditional_poisson = lambda x: khot.sampling.sample(probs, "conditional_poisson")  # noqa: E731
    return {
        "softmax": partial(torch.softmax, dim=-1),
        "torch.sort": lambda x: torch.sort(x).values,
        "torch.topk": lambda x: torch.topk(x, k).values,
        "torch.kthvalue": lambda x: torch.kthvalue(x, k).values,
        **{
            f"soft_topk, {cdf}": partial(khot.soft_topk, k=k, cdf=cdf)
            for cdf in ("laplace", "normal", "uniform", cdfs.Power(4 / 3))
        },
        "soft_topk_magnitude": lambda x: khot.soft_topk_magnitude(x, k),
        "soft_count": lambda x: khot.soft_count(x, 0.0),
        "inverse_soft_count": lambda x: khot.inverse_soft_count(x, k),
        "kth_value": lambda x: khot.kth_value(x, k),
        "quantile": lambda x: khot.quantile(x, 0.5),
        "FenchelYoungTopKLoss": lambda x: fenchel_young(x, mask),
        "soft_budget, by score": lambda x: khot.soft_budget(x, costs, float(k)),
        "soft_budget, by value": lambda x: khot.soft_budget(x, costs, float(k), by="value"),
        "budget_mask": lambda x: khot.budget_mask(x, costs, float(k)),
        "soft_rank": khot.soft_rank,
        "soft_sort": khot.soft_sort,
        "soft_rank, projection": partial(khot.soft_rank, method="projection"),
        "ndcg_loss": lambda x: khot.losses.ndcg_loss(x, relevance),
        "spearman_loss": lambda x: khot.losses.spearman_loss(x, rising),
        "sample_khot": lambda x: khot.sample_khot(x, k),
        "sample, systematic": lambda x: khot.sampling.sample(probs, "systematic"),
        "sample, pivotal": lambda x: khot.sampling.sample(probs, "pivotal"),
        **({"sample, conditional_poisson": conditional_poisson} if case.n <= 1_024 else {}),
    }


def slow(case: Case, x: Tensor) -> dict[str, Function]:
    """What costs n² a row, or takes long."""
    if case in MANY:
        return {
            "softmax": partial(torch.softmax, dim=-1),
            "soft_assign": lambda x: khot.soft_assign(x, 2, 2 * case.rows / case.n),
        }
    return {
        "softmax of n²": lambda x: torch.softmax(x.unsqueeze(-1) - x.unsqueeze(-2), -1),
        "soft_permutation": khot.soft_permutation,
        "sorted_soft_topk, k = 16": lambda x: khot.sorted_soft_topk(x, 16),
    }


def streaming(case: Case, x: Tensor) -> dict[str, Function]:
    """What gives a row to one program, however long it is, or did so until lately."""
    names = ("softmax", "soft_topk_magnitude", "FenchelYoungTopKLoss", "soft_budget, by score",
             "soft_budget, by value", "kth_value", "quantile", "budget_mask")  # fmt: skip
    made = others(case, x)
    return {name: made[name] for name in names}


BENCHES = {
    f"without Python, {MANY[0].id}": (plain, MANY[0]),
    **{f"soft top-k, {case.id}": (soft_topks, case) for case in SOFT_TOPK},
    **{f"other operators, {case.id}": (others, case) for case in MANY},
    **{f"long rows, {case.id}": (streaming, case) for case in (SOFT_TOPK[5], SOFT_TOPK[-1])},
    **{f"n² and more, {case.id}": (slow, case) for case in [*SQUARES, MANY[0]]},
    **{f"peers, {case.id}": (peers, case) for case in SOFT_TOPK},
}
DRY_BENCHES = {f"soft top-k, {case.id}": (soft_topks, case) for case in DRY}
COMPILING = 0.6  # of the time of `bench`, at most; what is not compiled by then is when it is timed


def measure(make: Maker, case: Case, dry: bool) -> dict[str, Any]:
    device = gpu_or_cpu(dry)
    x, found = scores(case, device), {}
    for name, function in make(case, x).items():
        try:
            found[name] = [times(call, device) for call in both_ways(function, x)]
        except Exception as error:  # what does not compile or fit: the others count
            found[name] = f"{type(error).__name__}: {str(error)[:200]}"
    return found


def warm(make: Maker, case: Case, part: int, parts: int) -> None:
    """Have Triton compile what every ``parts``-th function needs; its cache is on disk, for all processes."""
    x = scores(case, torch.device("cuda"))
    for name, function in list(make(case, x).items())[part::parts]:
        if not name.startswith(("softmax", "torch.")):
            for call in both_ways(function, x):
                call()


# -------------------------------------------------------------------------------------- layers


class Made(NamedTuple):
    """A step that is timed, what it is held against, its inputs and the parameters that it trains."""

    ours: Function
    by_hand: Function
    inputs: tuple[Tensor, ...]
    weights: tuple[Tensor, ...] = ()


def layers(device: torch.device, dry: bool) -> dict[str, Callable[[], Made]]:
    size = (lambda large, small: small) if dry else (lambda large, small: large)
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=draw).to(device, dtype)

    def autoencoder(loss: bool) -> Made:
        width, latents, k = size(1_024, 16), size(16_384, 64), size(32, 4)
        sae = khot.nn.TopKSAE(width, latents, k=k, device=device)
        names = ("encoder", "encoder_bias", "decoder", "bias")
        hand = tuple(getattr(sae, name).detach().clone().requires_grad_() for name in names)

        def by_hand(x: Tensor) -> Tensor:
            encoder, encoder_bias, decoder, bias = hand
            scores = F.linear(x - bias, encoder, encoder_bias)
            values, indices = scores.topk(k)
            code = torch.zeros_like(scores).scatter(-1, indices, values.relu())
            return (code @ decoder + bias - x).square().mean()

        ours = sae.loss if loss else lambda x: (sae(x) - x).square().mean()
        return Made(ours, by_hand, (normal(size(4_096, 8), width),), (*sae.parameters(), *hand))

    def router() -> Made:
        width, experts, k = size(2_048, 16), size(64, 8), size(8, 2)
        layer = khot.nn.TokenChoiceRouter(width, experts, k, device=device).eval()
        (weight,) = layer.parameters()

        def by_hand(x: Tensor) -> Tensor:
            values, indices = F.linear(x, weight).topk(k)
            return x.new_zeros(*x.shape[:-1], experts).scatter(-1, indices, values.softmax(-1))

        return Made(lambda x: layer(x).weights, by_hand, (normal(size(16_384, 16), width),), (weight,))

    def balancer() -> Made:
        experts, k = size(256, 8), size(8, 2)
        layer, bias = khot.nn.QuantileBalancer(experts, k).to(device), torch.zeros(experts, device=device)

        def ours(x: Tensor) -> None:
            layer(x)
            layer.update()

        def by_hand(x: Tensor) -> None:  # the sign rule
            indices = (x + bias).topk(k).indices.flatten()
            load = torch.zeros_like(bias).scatter_add_(0, indices, torch.ones_like(indices, dtype=bias.dtype))
            bias.add_((load.mean() - load).sign(), alpha=1e-3)

        return Made(ours, by_hand, (normal(size(16_384, 16), experts),))

    def attention(hard: bool) -> Made:
        k, scale = size(32, 4), size(64, 8) ** -0.5
        shape = (size(8, 2), size(4_096, 16), size(64, 8))
        dtype = torch.bfloat16 if not dry else torch.float32

        def by_hand(q: Tensor, key: Tensor, v: Tensor) -> Tensor:
            scores = (q @ key.mT).float() * scale
            least = scores.topk(k).values[..., -1:]
            return scores.masked_fill(scores < least, -torch.inf).softmax(-1).to(v.dtype) @ v

        return Made(
            partial(khot.nn.topk_attention, top_k=k, hard=hard),
            by_hand,
            tuple(normal(*shape, dtype=dtype) for _ in range(3)),
        )

    return {
        "autoencoder, squared error": partial(autoencoder, False),
        "autoencoder, its loss": partial(autoencoder, True),
        "router, hard": router,
        "balancer, with its update": balancer,
        "attention, hard": partial(attention, True),
        "attention, soft": partial(attention, False),
    }


def measure_layer(name: str, dry: bool) -> dict[str, Any]:
    device, found = gpu_or_cpu(dry), {}
    made = layers(device, dry)[name]()
    for side, function in (("by hand", made.by_hand), ("khot", made.ours)):
        try:
            calls = both_ways(function, *made.inputs, weights=made.weights)
            found[side] = [times(call, device) for call in calls]
        except Exception as error:
            found[side] = f"{type(error).__name__}: {str(error)[:200]}"
    return found


# ---------------------------------------------------------------------------------------- report


def text(results: report.Results) -> str:
    done = results["cases"]
    setting = [f"- {key}: {value}" for key, value in results["setting"].items()]
    setting += [f"- {key}: {value}" for key, value in done.get("copy", {}).items()]
    parts = ["# khot on a GPU", "\n".join(setting)]
    found = {n.removeprefix("check: "): f for n, f in done.items() if n.startswith("check: ")}
    if found:
        right = sum(f["right"] for f in found.values())
        head = ["", *dict.fromkeys(key for each in found.values() for key in each)]
        # of what is right, the least exact
        worst = sorted(found, key=lambda n: (found[n]["right"], -found[n].get("value", 0)))
        shown = [n for n in worst if not found[n]["right"]] + [n for n in worst if found[n]["right"]][:10]
        rows = [[n, *(short(found[n].get(key, "–")) for key in head[1:])] for n in shown]
        parts += [
            "## Values and gradients beside the CPU in float64",
            f"{right} of {len(found)} are right. Errors are in units of what is allowed; the worst ten.",
            report.table(head, rows),
        ]
    for kind, title in (("bench", "Time, in microseconds"), ("layer", "Layers, in microseconds")):
        found = {n.removeprefix(f"{kind}: "): f for n, f in done.items() if n.startswith(f"{kind}: ")}
        rows = [row for name, each in found.items() for row in table_rows(name, each)]
        if rows:
            head = [
                "", "", "device", "kernels", "ratio", "call", "host", "replay", "memory, MB",
                "both: device", "kernels", "ratio", "call", "host", "memory, MB",
            ]  # fmt: skip
            parts += [f"## {title}", report.table(head, rows)]
        parts += [
            f"- {step}, {name}: {value}"
            for step, each in found.items()
            for name, value in each.items()
            if isinstance(value, str)
        ]
    return "\n\n".join(parts) + "\n"


def table_rows(title: str, found: dict[str, Any]) -> Iterator[list[str]]:
    """The first function is what the others are held against."""
    measured = {name: value for name, value in found.items() if isinstance(value, list)}
    unit = next(iter(measured.values()), [])
    for name, value in measured.items():
        forward, *both = value
        row = [title, name, *cells(forward, unit[0]), microseconds(forward.get("replay")), memory(forward)]
        empty = ["–"] * 6
        against = unit[1] if len(unit) > 1 else None
        yield [*row, *([*cells(both[0], against), memory(both[0])] if both else empty)]


def cells(mine: dict[str, Any], unit: dict[str, Any] | None) -> list[str]:
    key = "device" if mine.get("device") else "call"
    against = (unit or {}).get(key)
    kernels = mine.get("kernels")
    return [
        microseconds(mine.get("device")),
        "–" if kernels is None else f"{kernels:,.0f}",
        "–" if not against else report.ratio(mine[key] / against),
        microseconds(mine.get("call")),
        microseconds(mine.get("host")),
    ]


def microseconds(value: float | None) -> str:
    return "–" if value is None else f"{value * 1e6:,.1f}"


def memory(found: dict[str, Any]) -> str:
    return report.megabytes(found["memory"]) if "memory" in found else "–"


def short(value: Any) -> str:
    return f"{value:.2g}" if isinstance(value, float) else str(value)


# ------------------------------------------------------------------------------------------ main


def machine(device: torch.device) -> dict[str, str]:
    """What the figures depend on, but for the name of the machine."""
    own = report.machine(cpu_time=False)
    found = {"device": own["processor"]}
    if device.type == "cuda":
        version = torch.version.cuda or f"ROCm {torch.version.hip}"
        found = {"device": torch.cuda.get_device_name(device), "CUDA": version}
    if kernels.active()["gpu"] == "triton":
        import triton  # its metadata may be under another name, or missing

        found["triton"] = triton.__version__
    return {
        **found,
        "kernels": kernels.active()["gpu"],
        "khot": own["khot"],
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.device", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=list(SECONDS))
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--jobs", type=int, default=min(14, os.cpu_count() or 1), help="processes")
    parser.add_argument("--seconds", type=float, help="after which nothing new is begun")
    parser.add_argument("--only", default="", metavar="TEXT", help="steps whose names match this expression")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for device.json and device.md")
    args = parser.parse_args(arguments)
    end = time.monotonic() + (SECONDS[args.what] if args.seconds is None else args.seconds)
    dry: bool = args.dry_run
    device = gpu_or_cpu(dry)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("benchmarks.device: torch sees no GPU, so nothing was measured", file=sys.stderr)
        raise SystemExit(2)

    path = args.out / "device"
    results = report.resume(path.with_suffix(".json"), machine(device))
    done = results["cases"]

    def keep(name: str, found: dict[str, Any]) -> None:
        done[name] = found
        report.save(path.with_suffix(".json"), results)
        path.with_suffix(".md").write_text(text(results), encoding="utf-8")

    def wanted(name: str) -> bool:
        return name not in done and re.search(args.only, name) is not None

    if "copy" not in done:
        keep("copy", {"a copy, GB/s": round(copied(device, dry) / 1e9)})
    if args.what == "check":
        todo = {n: c for n, c in checks(dry).items() if wanted(f"check: {n}")}
        tasks: dict[str, Callable[[], Any]] = {n: partial(examine, *c, dry) for n, c in todo.items()}
        known = {f"{CALLS}: {name}": name for name in different_calls(torch.ones(1, 8))}
        plain = {n: partial(examine_calls, name, dry) for n, name in known.items() if wanted(f"check: {n}")}
        tasks = {**plain, **tasks}
        for name, found in run(tasks, 1 if dry else args.jobs, end):
            if isinstance(found, Exception):
                found = {"right": False, "error": f"{found!r}"[:300]}
            keep(f"check: {name}", found)
    elif args.what == "bench":
        cases = {n: c for n, c in (DRY_BENCHES if dry else BENCHES).items() if wanted(f"bench: {n}")}
        compiles: dict[str, Callable[[], Any]] = {
            f"{n}, {part}": partial(warm, *c, part, parts)
            for n, c in cases.items()
            if c[0] is not peers
            for parts in [12 if c[0] is others else 4]
            for part in range(parts)
        }
        now = time.monotonic()
        if compiles and not dry:
            for _ in run(compiles, args.jobs, now + COMPILING * (end - now)):
                pass  # what fails fails again where it is told
        for name, (make, case) in cases.items():
            if time.monotonic() < end:
                keep(f"bench: {name}", measure(make, case, dry))
    else:
        for name in layers(device, dry):
            if wanted(f"layer: {name}") and time.monotonic() < end:
                keep(f"layer: {name}", measure_layer(name, dry))
    print(path.with_suffix(".md").read_text(encoding="utf-8"))
    bad = [name for name, found in done.items() if found.get("right") is False]
    print(*bad, sep="\n", file=sys.stderr)
    raise SystemExit(1 if bad else 0)


def run(tasks: dict[str, Callable[[], Any]], jobs: int, end: float) -> Iterator[tuple[str, Any]]:
    """What the tasks return, or the exception that they raise, as they come; until it is too late."""
    if jobs == 1:
        for name, task in tasks.items():
            if time.monotonic() < end:
                try:
                    yield name, task()
                except Exception as error:
                    yield name, error
        return
    # the processor computes what is right, and each process would take all of its cores for that
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), torch.set_num_threads, (1,))
    futures = {pool.submit(task): name for name, task in tasks.items()}
    try:
        for future in as_completed(futures, timeout=max(0.0, end - time.monotonic())):
            yield futures[future], future.exception() or future.result()
    except Late:
        print(f"{sum(not f.done() for f in futures)} were not reached in time", file=sys.stderr)
    finally:
        processes = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()


if __name__ == "__main__":
    main()
