"""What a soft top-k costs the host of a GPU, and what it has Triton build: `python -m benchmarks.host`.

Needs no GPU: Triton gets a driver that starts nothing, and the extension for plain calls a launch function
that does nothing, so that everything before a launch runs as it would for an NVIDIA GPU of compute capability
9.0, on tensors that lie on the CPU. Figures are CPU time of one thread, and hold what torch takes for empty
tensors on the CPU instead of its allocator on a device. Calls are of (512, 64), and those with a mask, of
columns, of samples and of the gate, in some of which torch's own operations compute, of (4, 64), as
softmax's. Other layers, of the same (4, 64), are mostly operations of torch, so they stand beside the same
layers with torch.softmax or torch.topk in the place of khot's operator: routers with 8 experts, of which a
token gets 2, and a sparse autoencoder with 256 latents, of which an input gets 8. With --calls it prints the
times of calls alone.

The builds are those of the soft top-k in float32, with every CDF, and its gradient: how many different
kernels Triton compiles while the number of rows and the length of a row change, and how long two processes
take for all of one dtype: short, long and very long rows of each CDF, forward and backward.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

RESULTS = Path(__file__).parent / "results" / "host.md"
CDFS = ("logistic", "laplace", "normal", "uniform", "power")
ROWS = (1, 3, 16, 128, 1_000, 4_096)
LENGTHS = (33, 48, 50, 60, 64)  # of rows that are padded to the same width
BINDS = (
    "A call should take at most 1.5 times what softmax takes, and a layer of one operator 2.5 times. A "
    "masked call makes one or two more launches than a plain one, a sample two, with a seed that an "
    "operation of torch draws, and a gate four. Layers of several operations are mostly torch's, whatever "
    "selects in them. Those that choose by a soft or hard top-k do so in plain calls; `nn.BalancedRouter` "
    "and `nn.TopKSAE` take the ordinary way, whose Python is what they cost beyond the layers beside "
    "them."
)
SHAPES = ((512, 64), (64, 8_192), (64, 50_000))


#: The kernel of `topk` for short rows, whose places other operations of a layer read.
FINDS_PLACES = "_sort_short_rows"

#: A launch function that does nothing, but for the places, which become 0.
NOTHING = """
#include <string.h>
int nothing(void* function, unsigned x, unsigned y, unsigned z, unsigned block_x, unsigned block_y,
            unsigned block_z, unsigned shared, void* stream, void** parameters, void** extra) {
  if (function == (void*)2) {
    int rows = *(int*)parameters[4], k = *(int*)parameters[6];
    memset(*(void**)parameters[3], 0, 8ull * rows * k);
  }
  return 0;
}
"""


class _Utilities:
    def load_binary(self, name: str, *_: Any) -> tuple[int, ...]:
        return 1, 1 + (name == FINDS_PLACES), 64, 0, 1024

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {
            "max_shared_mem": 232_448,
            "multiprocessor_count": 132,
            "max_num_regs": 65_536,
            "warpSize": 32,
        }

    def unload_module(self, _: Any) -> None: ...


class _Launcher:
    def __init__(self, *_: Any) -> None: ...

    def __call__(self, *given: Any) -> None:
        import torch

        for each in given:
            if isinstance(each, torch.Tensor) and each.dtype == torch.int64:
                each.zero_()  # places, as `NOTHING` has it


class _Driver:
    """What Triton asks of the driver of a device, for one that does not exist."""

    utils, launcher_cls = _Utilities(), _Launcher

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


@functools.cache
def _register() -> None:
    from khot._kernels import gpu

    gpu.register("CPU")


@functools.cache
def _start_nothing() -> None:
    """Let the extension for plain calls start kernels by a function that does nothing."""
    import ctypes

    from khot._kernels.triton import native

    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/nothing.so"
        command = ["cc", "-shared", "-fPIC", "-xc", "-", "-o", library]
        subprocess.run(command, input=NOTHING.encode(), check=True)
        address = ctypes.cast(ctypes.CDLL(library).nothing, ctypes.c_void_p).value
    assert address is not None
    native.use(address, max(native.SCRATCH.values()), "cpu")


@contextmanager
def device() -> Iterator[None]:
    """Tensors on the CPU take the way of those on a GPU, in a process that uses the reference kernels."""
    import triton
    from triton.runtime import driver

    from khot._core import arguments

    if triton.knobs.runtime.interpret or os.environ.get("KHOT_KERNELS") != "reference":
        raise RuntimeError("this needs KHOT_KERNELS=reference, without TRITON_INTERPRET=1")
    driver.set_active(_Driver())  # type: ignore[arg-type]
    _register()
    readable = arguments.readable
    # as on a device: values can be read by who may wait
    arguments.readable = lambda value, wait=False: wait and readable(value)
    yield
    arguments.readable = readable


def calls(cdf: str, rows: int, n: int) -> Callable[[], Any]:
    import torch

    import khot

    F = khot.cdfs.Power(4 / 3) if cdf == "power" else cdf
    x, grad = torch.ones(rows, n, requires_grad=True), torch.ones(rows, n)
    return lambda: torch.autograd.grad(khot.soft_topk(x, 8, cdf=F), x, grad)  # type: ignore[arg-type]


def plain_calls(like: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
    """Calls that go without Python once they are prepared, of inputs like this one."""
    import torch

    import khot

    cost, each = torch.ones_like(like), like.new_ones(like.shape[0])
    return {
        "soft_topk": lambda x: khot.soft_topk(x, 8),
        "soft_topk_magnitude": lambda x: khot.soft_topk_magnitude(x, 8),
        "soft_budget": lambda x: khot.soft_budget(x, cost, 8.0),
        "soft_rank, descending": lambda x: khot.soft_rank(x, descending=True),
        "soft_sort, descending": lambda x: khot.soft_sort(x, descending=True),
        "soft_topk with k and tau of each row": lambda x: khot.soft_topk(x, each, tau=each),
        "nn.SoftTopK": khot.nn.SoftTopK(8).to(like.device),
    }


def calls_with_more() -> dict[str, Callable[[Tensor], Tensor]]:
    """Other such calls, of rows (4, 64), which make more launches or operations of torch."""
    import torch

    import khot

    mask, cost = torch.ones(64, dtype=torch.bool), torch.ones(64)
    return {
        "soft_topk, masked": lambda x: khot.soft_topk(x, 8, mask=mask),
        "soft_topk of columns": lambda x: khot.soft_topk(x, 2, 0),
        "soft_topk_magnitude, masked": lambda x: khot.soft_topk_magnitude(x, 8, mask=mask),
        "soft_budget, masked": lambda x: khot.soft_budget(x, cost, 8.0, mask=mask),
        "soft_rank, descending, masked": lambda x: khot.soft_rank(x, descending=True, mask=mask),
        "soft_sort, descending, masked": lambda x: khot.soft_sort(x, descending=True, mask=mask),
        "nn.SoftTopK, masked": partial(khot.nn.SoftTopK(8), mask=mask),
        "sample_khot": lambda x: khot.sample_khot(x, 8),
        "nn.KHotGate": khot.nn.KHotGate(64, 8),
    }


def layers() -> dict[str, tuple[Any, Any]]:
    """Layers of inputs (4, 64), most of whose operations are torch's, and the same layers with torch.softmax
    or torch.topk in the place of khot's operator."""
    import torch

    from khot import nn

    def soft(base: Any) -> Any:
        class Soft(base):
            def _route(self, x: Tensor, scores: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
                selection = scores.softmax(-2 if base is nn.ExpertChoiceRouter else -1)
                return selection, selection * scores.exp()

        return Soft

    class Router(nn.TopKRouter):
        def _choose(self, scores: Tensor, mask: Tensor | None) -> Tensor:
            return torch.topk(scores.detach(), self.k).indices

    class SAE(nn.TopKSAE):
        def _best(self, input: Tensor, count: int, idle: Any = None) -> tuple[Tensor, Tensor]:
            x, weight, bias = self._map(input)
            values, indices = torch.nn.functional.linear(x, weight, bias).topk(count)
            return self._values(values), indices

    choosing = {"nn.TokenChoiceRouter": nn.TokenChoiceRouter, "nn.BalancedRouter": nn.BalancedRouter}
    balancer = nn.QuantileBalancer(8, 2).eval()
    return {
        **{name: (layer(64, 8, 2), soft(layer)(64, 8, 2)) for name, layer in choosing.items()},
        "nn.ExpertChoiceRouter": (nn.ExpertChoiceRouter(64, 8), soft(nn.ExpertChoiceRouter)(64, 8)),
        "nn.TopKRouter": (nn.TopKRouter(64, 8, 2), Router(64, 8, 2)),
        "nn.TopKRouter with biases": (nn.TopKRouter(64, 8, 2, balancer=balancer), Router(64, 8, 2)),
        "nn.TopKSAE": (nn.TopKSAE(64, 256, 8), SAE(64, 256, 8)),
    }


def of_layers() -> dict[str, tuple[float, ...]]:
    """As :func:`microseconds`, of :func:`layers`, of the same with torch's operation, and of nn.Softmax."""
    import torch

    _start_nothing()
    x, softmax = torch.ones(4, 64), torch.nn.Softmax(-1)
    leaf = x.clone().requires_grad_()

    def both(layer: Any) -> Callable[[], Any]:
        wanted = list(layer.parameters()) or [leaf]

        def run() -> Any:
            found = layer(leaf)
            first = found if isinstance(found, torch.Tensor) else found[0]
            return torch.autograd.grad(first.sum(), wanted, allow_unused=True)

        return run

    calls: dict[str, tuple[Callable[[], Any], ...]] = {}
    for name, pair in layers().items():
        beside = *pair, softmax
        calls[name] = tuple(partial(layer, x) for layer in beside)
        calls[f"{name} and its gradient"] = tuple(map(both, beside))
    return _least(calls, 25, 50)


def microseconds() -> dict[str, tuple[float, ...]]:
    """Of a call, and of torch.softmax's in its place, the least, which a busy machine disturbs least; they
    take turns: (512, 64) float32, k and τ numbers, beside (4, 64) on the CPU, where little is computing; and
    :func:`calls_with_more`, whose operations of torch compute, of (4, 64) as well."""
    import torch

    import khot
    from khot._core import eager

    _start_nothing()
    x, grad = torch.ones(512, 64), torch.ones(512, 64)
    wanted, few = x.clone().requires_grad_(), x[:4].clone()
    few_wanted, few_grad = few.clone().requires_grad_(), grad[:4].clone()
    softmax = partial(torch.softmax, dim=-1)

    def in_its_place(call: Any) -> Callable[[Tensor], Tensor]:
        """A layer's, if the call is one."""
        return torch.nn.Softmax(-1) if isinstance(getattr(call, "func", call), torch.nn.Module) else softmax

    def both(call: Callable[[Any], Any], x: Any, grad: Any) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(call(x), x, grad)

    def ordinary(call: Callable[[], Any]) -> Callable[[], Any]:
        """The call where nothing is prepared for it, but its kernels are known."""

        def run() -> Any:
            plain, eager.soft_topk = eager.soft_topk, eager._ordinary
            try:
                return call()
            finally:
                eager.soft_topk = plain

        return run

    calls: dict[str, tuple[Callable[[], Any], ...]] = {}
    for name, call in plain_calls(x).items():
        soft = in_its_place(call)
        calls[name] = partial(call, x), partial(soft, few)
        calls[f"{name} and its gradient"] = both(call, wanted, grad), both(soft, few_wanted, few_grad)
    for name, call in calls_with_more().items():  # torch's own operations compute here, so of few rows
        soft = in_its_place(call)
        calls[name] = partial(call, few), partial(soft, few)
        calls[f"{name} and its gradient"] = both(call, few_wanted, few_grad), both(soft, few_wanted, few_grad)
    forward, with_gradient = calls["soft_topk"], calls["soft_topk and its gradient"]
    calls |= {
        "soft_topk of a tensor that requires a gradient": (
            partial(khot.soft_topk, wanted, 8),
            partial(softmax, few_wanted),
        ),
        "topk_mask": (partial(khot.topk_mask, x, 8), forward[1]),
        "sample_khot, beside torch's gumbel_softmax(hard=True)": (
            calls["sample_khot"][0],
            partial(torch.nn.functional.gumbel_softmax, few, hard=True),
        ),
        "soft_topk, the ordinary way": (ordinary(forward[0]), forward[1]),
        "soft_topk and its gradient, the ordinary way": (ordinary(with_gradient[0]), with_gradient[1]),
    }
    return _least(calls, 25, 200)


def _least(
    calls: dict[str, tuple[Callable[[], Any], ...]], repeats: int, count: int
) -> dict[str, tuple[float, ...]]:
    """The least µs of so many calls of each function; those of a name take turns."""
    times: dict[str, list[list[float]]] = {name: [[] for _ in beside] for name, beside in calls.items()}
    for repeat in range(repeats + 1):
        for name, beside in calls.items():
            for function, found in zip(beside, times[name], strict=True):
                function()
                start = time.process_time()
                for _ in range(count if repeat else 3):
                    function()
                if repeat:
                    found.append(1e6 * (time.process_time() - start) / count)
    return {name: tuple(map(min, each)) for name, each in times.items()}


def builds(shapes: list[tuple[int, int]]) -> int:
    """How many kernels Triton would compile for these shapes, all with the logistic CDF, and gradients."""
    from triton.runtime.jit import JITFunction

    from khot._kernels.triton import launch, pull, rows

    built = []

    class Nothing:
        packed_metadata = function = None
        metadata = SimpleNamespace(num_ctas=0)  # which the extension for plain calls leaves to Triton

        def launch_metadata(self, *_: Any) -> None: ...
        def run(self, *_: Any) -> None: ...
        def __getitem__(self, _: Any) -> Any:
            return lambda *_, **__: None

    def compile_nothing(self: Any, key: Any, signature: Any, device: int, *_: Any) -> Any:
        built.append((self.fn.__name__, key))
        kernel = self.device_caches[device][0][key] = Nothing()
        return kernel

    def forget() -> None:
        launch.forget()
        for kernel in (*rows.KERNELS, *pull.KERNELS):
            kernel.device_caches.clear()

    forget()
    original, JITFunction._do_compile = JITFunction._do_compile, compile_nothing
    try:
        for shape in shapes:
            calls("logistic", *shape)()
    finally:
        JITFunction._do_compile = original
        forget()
    return len(set(built))


def compile_all(cdf: str, shape: tuple[int, int]) -> float:
    with device():
        start = _used()
        calls(cdf, *shape)()
        return _used() - start


def _used() -> float:
    """CPU time, with that of ptxas, which is another process."""
    return sum(os.times()[:4])


def seconds(compile_one: Callable[..., float], tasks: list[tuple[Any, ...]]) -> tuple[float, float]:
    """The wall time of two processes for these builds, with an empty cache, and the CPU time."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        start = time.perf_counter()
        with ProcessPoolExecutor(2, get_context("spawn")) as pool:
            used = sum(pool.map(compile_one, *zip(*tasks, strict=True)))
        return time.perf_counter() - start, used


def main() -> None:
    settings = {"KHOT_KERNELS": "reference", "TRITON_DEFAULT_FP_FUSION": "1", "OMP_NUM_THREADS": "1"}
    if os.environ.get("KHOT_KERNELS") != "reference":  # too late to set it: khot has been imported
        command = [sys.executable, "-m", "benchmarks.host", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **settings})
    import triton

    from benchmarks import report

    with device():
        rows = builds([(rows, 64) for rows in ROWS])
        lengths = builds([(128, n) for n in LENGTHS])
        times = microseconds() if "--builds" not in sys.argv else {}
        layers = of_layers() if "--builds" not in sys.argv else {}
        if "--calls" in sys.argv:
            for name, (ours, *others) in (times | layers).items():
                print(
                    f"{name}:", *(f"{x:.1f}" for x in (ours, *others)), *(f"{ours / x:.2f}" for x in others)
                )
            return
    wall, used = seconds(compile_all, [(cdf, shape) for shape in SHAPES for cdf in CDFS])
    lines = [
        "# The host of a GPU",
        (__doc__ or "").partition("\n\n")[2].strip(),
        report.said(report.machine(cpu_time=True))
        + f"; Triton {triton.__version__}; load {os.getloadavg()[0]:.1f}",
        report.table(
            ["call", "µs", "softmax in its place", "ratio"],
            [
                [name, f"{ours:.1f}", f"{soft:.1f}", f"{ours / soft:.2f}"]
                for name, (ours, soft) in times.items()
            ],
        ),
        report.table(
            ["layer", "µs", "with torch's operation", "ratio", "nn.Softmax", "ratio"],
            [
                [name, f"{ours:.1f}", *(cell for x in others for cell in (f"{x:.1f}", f"{ours / x:.2f}"))]
                for name, (ours, *others) in layers.items()
            ],
        ),
        BINDS,
        report.table(
            ["builds, logistic, forward and backward", "kernels"],
            [
                [f"{len(ROWS)} numbers of rows from 1 to 4,096, n = 64", str(rows)],
                [f"{len(LENGTHS)} lengths from 33 to 64, 128 rows", str(lengths)],
            ],
        ),
        f"All of float32, {len(SHAPES)} shapes with {len(CDFS)} CDFs, forward and backward, by two "
        f"processes: {wall:.0f} s of wall time, {used:.0f} s of CPU time.",
    ]
    text = "\n\n".join(lines) + "\n"
    print(text)
    RESULTS.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
