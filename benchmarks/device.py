"""khot on a GPU, in two commands of less than five minutes each: `python -m benchmarks.device bench`, then
`layers`. What it computes there is tests/test_cuda.py's.

`bench` times the soft top-k on the shapes that the project has goals for, and the other operators, beside
torch's softmax, sort and topk. `layers` times layers beside what one would write by hand.

Both run from a bare checkout with PYTHONPATH=src:tests, without git (KHOT_REVISION names the revision) and
without a network. They compile in as many processes as --jobs says, stop by themselves after four minutes,
write device.json and device.md into --out after every step, and go on from there when they are started
again. --only takes some of the steps, say `bench --only "other operators"`.
--dry-run takes tiny shapes and the CPU, for a rehearsal: under KHOT_KERNELS=triton and TRITON_INTERPRET=1
with the kernels themselves, interpreted.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
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
from khot.losses import FenchelYoungTopKLoss

RESULTS = Path(__file__).parent / "results"
SECONDS = {"bench": 240, "layers": 120}  # after which nothing new is begun
REPEATS, LONG = 20, 0.1  # calls that are timed, but no more of them than take so many seconds
TOGETHER = 10  # replays of a graph that are timed together, so that no launch shows

Function = Callable[..., Any]
Maker = Callable[["Case", Tensor], dict[str, Function]]


class Case(NamedTuple):
    """Scores N(0, s²), and how many to select."""

    rows: int
    n: int
    k: int
    dtype: torch.dtype = torch.float32

    @property
    def id(self) -> str:
        return f"({self.rows:,}, {self.n:,}) {str(self.dtype).removeprefix('torch.')}"


SOFT_TOPK = [
    *(Case(4_096, 64, 8), Case(128, 1_000, 100), Case(4_096, 8_192, 64)),
    *(Case(32_768, 512, 32, torch.bfloat16), Case(2_048, 65_536, 64, torch.bfloat16)),
    *(Case(100, 100_000, 10_000), Case(16, 1_000_000, 100_000), Case(1, 6_300_000, 64)),
]
MANY = [Case(4_096, 64, 8), Case(4_096, 8_192, 1_024)]
SQUARES = [Case(256, 64, 8), Case(64, 256, 16)]
DRY = [Case(3, 20, 4), Case(2, 33, 5, torch.bfloat16)]


def gpu_or_cpu(dry: bool) -> torch.device:
    return torch.device("cpu" if dry else "cuda")


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


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
    offsets = torch.arange(case.rows + 1, device=x.device) * case.n
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
        "soft_topk, packed": lambda x: khot.soft_topk(x.flatten(), k, offsets=offsets),
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
    parser.add_argument("what", choices=SECONDS)
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--jobs", type=int, default=min(14, os.cpu_count() or 1), help="processes")
    parser.add_argument("--seconds", type=float, help="after which nothing new is begun")
    parser.add_argument("--only", default="", metavar="TEXT", help="steps whose names match this expression")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for device.json and device.md")
    args = parser.parse_args(arguments)
    dry: bool = args.dry_run
    device = gpu_or_cpu(dry)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("benchmarks.device: torch sees no GPU, so nothing was measured", file=sys.stderr)
        raise SystemExit(2)
    end = time.monotonic() + (SECONDS[args.what] if args.seconds is None else args.seconds)

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
    if args.what == "bench":
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
            compile_all(compiles, args.jobs, now + COMPILING * (end - now))
        for name, (make, case) in cases.items():
            if time.monotonic() < end:
                keep(f"bench: {name}", measure(make, case, dry))
    else:
        for name in layers(device, dry):
            if wanted(f"layer: {name}") and time.monotonic() < end:
                keep(f"layer: {name}", measure_layer(name, dry))
    print(path.with_suffix(".md").read_text(encoding="utf-8"))


def compile_all(tasks: dict[str, Callable[[], Any]], jobs: int, end: float) -> None:
    """In processes, until it is too late. What fails fails again where it is told."""
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), torch.set_num_threads, (1,))
    futures = {pool.submit(task): name for name, task in tasks.items()}
    if late := wait(futures, timeout=max(0.0, end - time.monotonic())).not_done:
        print(f"{len(late)} were not reached in time", file=sys.stderr)
    processes = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.terminate()


if __name__ == "__main__":
    main()
