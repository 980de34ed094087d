"""The first ten minutes on a GPU: `python -m benchmarks.device check`, then `bench`, then `tests`.

`check` (at most 4 minutes) says what the machine is and what a copy moves, runs one forward and backward of
each path through the kernels against the CPU in float64, and looks whether the host waits and whether a CUDA
graph can be captured and replayed. `bench` (at most 9 minutes) times the soft top-k (logistic) on the shapes
that the project has goals for, beside torch.softmax, torch.topk, a bisection of 50 steps under torch.compile
and, where it is installed, entmax. `tests` runs the tests that need a GPU, spread over processes.

All run from a bare checkout, with PYTHONPATH=src, without git (KHOT_REVISION names the revision) and without
a network. Each writes device.json and device.md into --out after every step, and goes on from there when it
is started again. --dry-run takes tiny shapes and the CPU, for a rehearsal: under KHOT_KERNELS=triton and
TRITON_INTERPRET=1 with the kernels themselves, interpreted.

benchmarks.gpu times every other operator and every peer, and takes longer.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import khot
from benchmarks import gpu, report, timing
from benchmarks.gpu import Case, scores

GOALS = [
    Case(4_096, 64, 8, torch.float32, 1.5),
    Case(128, 1_000, 100, torch.float32, 1.5),
    Case(4_096, 8_192, 64, torch.float32, 1.5),
    Case(32_768, 512, 32, torch.bfloat16, 1.5),
    Case(2_048, 65_536, 64, torch.bfloat16, None),
    Case(100, 100_000, 10_000, torch.float32, None),
    Case(16, 1_000_000, 100_000, torch.float32, 2.0),
    Case(1, 6_300_000, 64, torch.float32, 2.0),
]
DRY_GOALS = [Case(3, 20, 4, torch.float32, 1.5), Case(2, 33, 5, torch.bfloat16, None)]
ROUNDING = {torch.float64: 1e-12, torch.float32: 5e-7, torch.bfloat16: 2**-8, torch.float16: 2**-10}
SECONDS = {"check": 240, "bench": 540, "tests": 560}  # after which nothing new is begun


class Route(NamedTuple):
    """One way through the kernels."""

    name: str
    rows: int
    n: int
    k: float
    tau: float = 1.0
    dtype: torch.dtype = torch.float32
    cdf: str = "logistic"
    output: str = "y"


ROUTES = [
    Route("short rows, several to a program", 4_096, 64, 8.5),
    Route("short rows, small τ", 4_096, 64, 8.5, tau=0.01),
    Route("a gap no exponential crosses", 512, 64, 8, tau=1e-4),
    Route("medium rows", 256, 1_000, 100),
    Route("medium rows in bfloat16", 256, 512, 32, dtype=torch.bfloat16),
    Route("medium rows in float16", 256, 512, 32, dtype=torch.float16),
    Route("rows of several warps", 64, 8_192, 64),
    Route("rows of several warps, logarithm", 64, 8_192, 64, output="log"),
    Route("the longest rows on chip", 32, 32_768, 3_000),
    Route("rows that stream past", 64, 100_000, 10_000),
    Route("rows that stream past, small τ", 64, 70_001, 64, tau=0.01),
    Route("rows split over programs", 2, 1_000_000, 64),
    Route("short rows, float64", 64, 64, 8.5, dtype=torch.float64),
    *(Route(f"medium rows, {cdf}", 64, 1_000, 100, cdf=cdf) for cdf in ("laplace", "normal", "uniform")),
    Route("split rows, laplace", 2, 100_000, 64, cdf="laplace"),
]
DRY_ROUTES = [Route("short rows", 3, 20, 4.5), Route("short rows, logarithm", 2, 20, 4.5, output="log")]


def call(route: Route, x: Tensor) -> Tensor:
    operator = khot.log_soft_topk if route.output == "log" else khot.soft_topk
    return operator(x, route.k, tau=route.tau, cdf=route.cdf)  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------- check


def inputs(route: Route, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(route.rows, route.n, generator=generator).to(route.dtype) for _ in range(2))
    return x.to(device).requires_grad_(), grad.to(device)


def examine(route: Route, device: torch.device) -> dict[str, Any]:
    """The errors of y and of its gradient, whether the host waits, and whether a graph replays."""
    x, grad = inputs(route, device)
    start = time.perf_counter()
    y = call(route, x)
    (dx,) = torch.autograd.grad(y, x, grad)
    synchronize(device)
    found: dict[str, Any] = {"first call, s": round(time.perf_counter() - start, 1)}

    some = slice(0, 8)
    wide = x.detach()[some].double().cpu().requires_grad_()
    want = call(route, wide)
    (dwant,) = torch.autograd.grad(want, wide, grad[some].double().cpu())
    relative = 1 + want.detach().abs() if route.output == "log" else torch.ones_like(want)
    found["error of y"] = ((y.detach()[some].cpu().double() - want.detach()) / relative).abs().max().item()
    scale = max(dwant.abs().max().item(), 1e-30)
    found["error of the gradient"] = (dx[some].cpu().double() - dwant).abs().max().item() / scale
    if route.output == "y":
        found["error of the sum"] = (y.detach().double().sum(-1) - route.k).abs().max().item()
    bound = 1e-5 if route.output == "log" else ROUNDING[route.dtype] + 5e-7 * (route.dtype != torch.float64)
    found["right"] = bool(found["error of y"] <= bound and found["error of the gradient"] <= 4e-3 + bound)
    if device.type == "cuda":
        found["waits"] = waits(route, x, grad)
        found["graph"] = replays(route, x)
    return found


def waits(route: Route, x: Tensor, grad: Tensor) -> str:
    """What makes the host wait for the device, if anything does."""
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    try:
        torch.cuda.set_sync_debug_mode("error")
        torch.autograd.grad(call(route, x), x, grad)
    except RuntimeError as error:
        return str(error)[:200]
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    return ""


def replays(route: Route, x: Tensor) -> bool:
    """Whether a graph captured with one input computes another's result."""
    held = x.detach().clone()
    graph = capture(lambda: call(route, held))
    if graph is None:
        return False
    held.copy_(x.detach().flip(-1))
    graph[0].replay()
    return torch.equal(graph[1], call(route, held))


def capture(function: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any] | None:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            result = function()
    except RuntimeError:
        return None
    return graph, result


def copied(device: torch.device, dry: bool) -> float:
    """Bytes a second that a copy reads and writes."""
    source = torch.randn(1 << (12 if dry else 28), device=device)
    target = torch.empty_like(source)
    seconds = events(lambda: target.copy_(source), device)
    return 2 * source.numel() * 4 / seconds


# --------------------------------------------------------------------------------------- bench


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def events(function: Callable[[], Any], device: torch.device, repeats: int = 20) -> float:
    """The median seconds of a call on the device, gaps between its kernels included."""
    if device.type != "cuda":
        return timing.medians({"": function}, seconds=0.01)[""]
    for _ in range(3):
        function()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def on_host(function: Callable[[], Any], device: torch.device, repeats: int = 100) -> float:
    """The median seconds until a call comes back, with an idle device and without waiting for it."""
    function()
    times = []
    for _ in range(repeats if device.type == "cuda" else 2):
        synchronize(device)
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def replayed(function: Callable[[], Any], device: torch.device) -> float | None:
    """The seconds of a replay: many in a row, so that no launch shows."""
    if device.type != "cuda" or (graph := capture(function)) is None:
        return None
    count = 10

    def several() -> None:
        for _ in range(count):
            graph[0].replay()

    return events(several, device) / count


def bisection(x: Tensor, k: float) -> Tensor:
    """What one writes without a library: 50 halvings between bounds that no row leaves."""
    z = x.float()
    low, high = z.amin(-1, keepdim=True) - 40, z.amax(-1, keepdim=True) + 40
    for _ in range(50):
        middle = (low + high) / 2
        above = torch.sigmoid(z - middle).sum(-1, keepdim=True) > k
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return torch.sigmoid(z - (low + high) / 2).to(x.dtype)


def functions(case: Case, dry: bool) -> dict[str, Callable[[Tensor], Tensor]]:
    found: dict[str, Callable[[Tensor], Tensor]] = {
        "softmax": partial(torch.softmax, dim=-1),
        "khot": lambda x: khot.soft_topk(x, case.k),
        "khot, τ = 0.1": lambda x: khot.soft_topk(x, case.k, tau=0.1),
        "khot, log": lambda x: khot.log_soft_topk(x, case.k),
        "topk": lambda x: torch.topk(x, case.k).values,
    }
    if not dry:
        compiled = torch.compile(bisection)
        found["bisection, compiled"] = lambda x: compiled(x, float(case.k))
    if importlib.util.find_spec("entmax") is not None:
        import entmax

        found["entmax, budget bisection"] = lambda x: entmax.budget_bisect(x, budget=case.k)
    return found


def measure(case: Case, device: torch.device, dry: bool) -> dict[str, Any]:
    """Seconds of each function: device, host, replay; forward, and forward + backward."""
    x = scores(case, device)
    found: dict[str, Any] = {"bytes": x.numel() * x.element_size()}
    for name, function in functions(case, dry).items():
        both = [lambda f=function: f(x)]
        if name not in ("topk", "bisection, compiled"):
            both.append(timing.forward_backward(function, x))
        try:
            with torch.no_grad():
                forward = times(both[0], device)
            found[name] = [forward, *(times(each, device) for each in both[1:])]
        except Exception as error:  # what does not compile or fit: the others count
            found[name] = f"{type(error).__name__}: {str(error)[:200]}"
    return found


def times(function: Callable[[], Any], device: torch.device) -> dict[str, float | None]:
    profiled = gpu.on_device(function, device) if device.type == "cuda" else (None, None)
    return {
        "device": profiled[0],
        "kernels": profiled[1],
        "call": events(function, device),
        "host": on_host(function, device),
        "replay": replayed(function, device) if device.type == "cuda" else None,
    }


def warm(item: Case | Route, device: str) -> None:
    """Have Triton compile what a case or a route needs; its cache is on disk, for all processes."""
    there = torch.device(device)
    if isinstance(item, Route):
        x, grad = inputs(item, there)
        torch.autograd.grad(call(item, x), x, grad)
        return
    x = scores(item, there)
    for name, function in functions(item, False).items():
        if name.startswith("khot"):
            timing.forward_backward(function, x)()


def warm_all(items: Sequence[Case | Route], device: torch.device, jobs: int) -> None:
    """Compile for all of them, in parallel processes. What fails fails again where it is told."""
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for task in [pool.submit(warm, item, str(device)) for item in items]:
            task.exception()


# ---------------------------------------------------------------------------------------- report


def microseconds(value: float | None) -> str:
    return "–" if value is None else f"{value * 1e6:,.1f}"


def text(results: report.Results) -> str:
    done = results["cases"]
    setting = [f"- {key}: {value}" for key, value in results["setting"].items()]
    parts = ["# khot on a GPU", "\n".join(setting)]
    checks = {name: found for name, found in done.items() if name.startswith("check: ")}
    if checks:
        head = ["path", *dict.fromkeys(key for found in checks.values() for key in found)]
        rows = [
            [name.removeprefix("check: "), *(short(found.get(key)) for key in head[1:])]
            for name, found in checks.items()
        ]
        parts += ["## One forward and backward of each path", report.table(head, rows)]
    for direction, title in enumerate(("forward", "forward + backward")):
        head = [
            "shape", "", "device, µs", "kernels", "in softmaxes", "goal", "call, µs", "host, µs", "replay, µs"
        ]  # fmt: skip
        rows = []
        for case in [*GOALS, *DRY_GOALS]:
            found = done.get(f"bench: {case.id}", {})
            for name, value in found.items():
                if isinstance(value, list) and len(value) > direction:
                    rows.append([case.id, name, *cells(value, found, case, name, direction)])
        if rows:
            parts += [f"## {title.capitalize()}", report.table(head, rows)]
    for step, found in done.items():
        if step.startswith("bench: "):
            parts += [f"- {step}, {name}: {value}" for name, value in found.items() if isinstance(value, str)]
    if "tests" in done:
        parts += ["## Tests that need a GPU", "```\n" + done["tests"]["tail"] + "\n```"]
    return "\n\n".join(parts) + "\n"


def cells(value: list[Any], found: dict[str, Any], case: Case, name: str, direction: int) -> list[str]:
    mine, unit = value[direction], found["softmax"][direction]
    key = "device" if mine["device"] is not None else "call"
    goal = (case.goal, 1.3)[direction] if name == "khot" and case.goal else None
    return [
        microseconds(mine["device"]),
        "–" if mine["kernels"] is None else f"{mine['kernels']:.0f}",
        report.ratio(mine[key] / unit[key]),
        "–" if goal is None else str(goal),
        *(microseconds(mine[what]) for what in ("call", "host", "replay")),
    ]


def short(value: Any) -> str:
    return f"{value:.1e}" if isinstance(value, float) and abs(value) < 0.01 else str(value)


# ------------------------------------------------------------------------------------------ main


def run_tests(results: report.Results, jobs: int, dry: bool) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "needs_cuda", "tests"]
    command += ["--collect-only"] if dry else ["-n", str(jobs)]
    environment = os.environ if dry else {**os.environ, "KHOT_REQUIRE_CUDA": "1"}
    try:
        done = subprocess.run(
            command,
            env=environment,
            timeout=SECONDS["tests"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        output, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as stopped:
        output, code = stopped.stdout or b"", 124
    results["cases"]["tests"] = {"code": code, "tail": output.decode(errors="replace")[-6_000:]}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.device", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=list(SECONDS))
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument(
        "--jobs", type=int, default=min(12, os.cpu_count() or 1), help="processes that compile and test"
    )
    parser.add_argument("--out", type=Path, default=gpu.RESULTS, help="folder for device.json and device.md")
    args = parser.parse_args(arguments)
    begun = time.perf_counter()
    device = torch.device("cpu" if args.dry_run else "cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        print("benchmarks.device: torch sees no GPU, so nothing was measured", file=sys.stderr)
        raise SystemExit(2)

    path = args.out / "device"
    results = report.resume(path.with_suffix(".json"), gpu.machine(device))
    done = results["cases"]

    def keep() -> None:
        report.save(path.with_suffix(".json"), results)
        path.with_suffix(".md").write_text(text(results), encoding="utf-8")

    def late() -> bool:
        return time.perf_counter() - begun > SECONDS[args.what]

    if args.what == "check":
        if "copy" not in done:
            done["copy"] = {"GB/s": copied(device, args.dry_run) / 1e9}
        routes = [
            route for route in (DRY_ROUTES if args.dry_run else ROUTES) if f"check: {route.name}" not in done
        ]
        if routes and not args.dry_run:
            warm_all(routes, device, args.jobs)
        for route in routes:
            if not late():
                try:
                    done[f"check: {route.name}"] = examine(route, device)
                except Exception as error:  # the other paths count
                    done[f"check: {route.name}"] = {"right": False, "error": f"{error!r}"[:300]}
                keep()
    elif args.what == "bench":
        cases = DRY_GOALS if args.dry_run else GOALS
        cases = [case for case in cases if f"bench: {case.id}" not in done]
        if cases and not args.dry_run:
            warm_all(cases, device, args.jobs)
        for case in cases:
            if not late():
                done[f"bench: {case.id}"] = measure(case, device, args.dry_run)
                keep()
    else:
        run_tests(results, args.jobs, args.dry_run)
        keep()
    print(path.with_suffix(".md").read_text(encoding="utf-8"))
    bad = [name for name, found in done.items() if found.get("right") is False or found.get("code")]
    print(*bad, sep="\n", file=sys.stderr)
    raise SystemExit(1 if bad else 0)


if __name__ == "__main__":
    main()
