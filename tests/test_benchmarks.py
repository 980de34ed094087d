"""The benchmarks time what they report, reject wrong results, and continue after an interruption."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import inspect
import multiprocessing
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks import __main__ as listing
from benchmarks import cpu, device, latency, operators, report, rivals, times, timing
from benchmarks.operators import OPERATORS
from torch import Tensor

import khot


class FakeClock:
    """A clock that only moves when a test moves it."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """For calls that need no memory, so that none has to be kept."""
    monkeypatch.setattr(timing, "_keep_freed_memory", lambda keep: None)
    return FakeClock()


def test_medians_take_turns_within_their_seconds(clock: FakeClock) -> None:
    order: list[str] = []

    def call(name: str, seconds: float) -> None:
        order.append(name)
        clock.wait(seconds)

    calls = {
        name: lambda n=name, s=s: call(n, s) for name, s in (("quick", 0.25), ("slow", 2.0), ("huge", 20.0))
    }
    found = timing.medians(calls, seconds=1.0, clock=clock)
    assert found == {"quick": 0.25, "slow": 2.0, "huge": 20.0}
    # the first calls do not count, except one that takes ten times its share of seconds; the others run
    # until that share is used up, and three times at least, taking turns
    assert order[:3] == ["quick", "slow", "huge"]
    assert [sorted(order[i : i + 2]) for i in (3, 5, 7)] == [["quick", "slow"]] * 3
    assert order[9:] == ["quick"]


def test_medians_outlive_a_run_of_a_hundred_times(clock: FakeClock) -> None:
    """A run that uses up all the time at once is not the only one that counts."""
    waits = iter([1, 100, 1, 1])
    assert timing.medians({"a": lambda: clock.wait(next(waits))}, seconds=2, clock=clock) == {"a": 1}


def test_medians_ignore_the_odd_slow_call(clock: FakeClock) -> None:
    waits = iter([5, 1, 1, 9, 1, 1])
    assert timing.medians({"a": lambda: clock.wait(next(waits))}, seconds=99, rounds=5, clock=clock) == {
        "a": 1
    }


def test_medians_have_no_page_faults() -> None:
    """Softmax of 40 MB gets its memory from the system each time, unless the process keeps it."""
    if not timing.CLEAR_REFS.exists():
        pytest.skip("only on Linux")
    x, faults = torch.zeros(100, 100_000), []

    def call() -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.softmax(x, -1)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

    timing.medians({"softmax": call}, rounds=40)
    # A fresh result has 9,766 pages. The first calls may still take new memory, and no median is of them.
    assert statistics.median(faults) < 100, faults


def test_forward_backward_gives_fresh_gradients() -> None:
    x, order = torch.randn(3, 4), torch.arange(3)
    call = timing.forward_backward(lambda x, i: (x * x)[i], x, order)
    (first,), (second,) = call(), call()
    assert torch.equal(first, second)
    v = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    assert torch.equal(first, 2 * x * v)
    assert not x.requires_grad


def test_memory_of_another_process_is_told_as_in_this_one() -> None:
    size = report.peak_memory(lambda: torch.ones(4_000_000))
    if size is None:
        pytest.skip("memory is measured on Linux only")
    assert size == pytest.approx(16e6, rel=0.05)
    assert [report.megabytes(n) for n in (None, 99_999, 100_000, 1_234_560_000)] == [
        "",
        "< 0.1",
        "0.1",
        "1,234.6",
    ]
    with pytest.raises(SystemExit, match="could not be measured: exit code 1"):
        report.peak_memory(lambda: 1 / 0)


TINY: dict[str, tuple[Any, ...]] = {
    "assign": ((32, 4),),
    "attention": (64,),
    "budget": ((3, 20),),
    "calls": ((4, 20, 3),),
    "conditional_poisson": ((2, 20, 3.0), (2, 20, 4), (1, 1_000, 500)),
    "long_lists": (40,),
    "memory": (16, 64),
    "packages": ((4, 20, 3),),
    "packed": ("4,096 rows of 64",),
    "permutahedron": ((2, 20),),
    "quantile": ((2, 20), (30,)),
    "ranking": ((2, 50), (2, 50, 30)),
    "reference": ((2, 16),),
    "sampling": ((4, 8, 2), (4, 1_200, 5)),
    "selected": (
        ("rows", 3, 60, 4),
        ("layer", 8, 6, 20, 3),
        ("heads", 1, 16, 4, 2),
        ("neighbours", 5, 60, 4, 3),
    ),
    "simple": (20, 40),
    "transport": ((2, 30, 3),),
}


@pytest.mark.parametrize("name", times.SUBJECTS)
def test_a_subject_writes_its_tables(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the heads of the committed ones, but for sizes and for peers that are not installed."""
    pytest.importorskip("ot") if name == "assign" else None
    monkeypatch.setattr(timing, "_keep_freed_memory", lambda keep: None)
    monkeypatch.setattr(report, "peak_memory", lambda call: call() is not None and 1_000_000)
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: SimpleNamespace(Pool=ThreadPool))
    monkeypatch.setitem(times.SUBJECTS, name, times.SUBJECTS[name]._replace(cases=TINY[name]))
    times.main([name, "--seconds", "0", "--wall-time", "--out", str(tmp_path)])
    text = (tmp_path / f"{name}.md").read_text(encoding="utf-8")
    assert f"`python -m benchmarks.times {name} --seconds 0 --wall-time`" in text and "nan | nan" not in text
    old = (times.RESULTS / f"{name}.md").read_text(encoding="utf-8")
    heads = [re.findall(r"^(\|.*)\n\|[-:| ]+\|$", each, flags=re.MULTILINE) for each in (text, old)]
    for mine, committed in zip(*heads, strict=name != "simple"):  # memory was measured later
        sized = re.compile(r"\(?\b[\d,]+|n = ")
        want = [cell for cell in committed.split(" | ") if not sized.search(cell)]
        assert [cell for cell in mine.split(" | ") if cell in want] == [
            cell for cell in want if not re.search("torchsort|fast-soft-sort", cell)
        ]


def test_what_is_wrong_is_not_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, right = rivals.simple_counts, khot.kth_value
    monkeypatch.setattr(rivals, "simple_counts", lambda x, k: [row * 1.01 for row in counts(x, k)])
    monkeypatch.setattr(khot, "kth_value", lambda *given, **options: right(*given, **options) + 1e-6)
    for name in ("simple", "quantile"):
        monkeypatch.setitem(times.SUBJECTS, name, times.SUBJECTS[name]._replace(cases=TINY[name]))
        with pytest.raises(SystemExit, match="nothing is reported"):
            times.main([name, "--seconds", "0", "--wall-time", "--out", str(tmp_path)])
    assert not list(tmp_path.glob("*.md"))


def test_results_go_on_where_they_stopped(tmp_path: Path) -> None:
    path, setting = tmp_path / "new" / "cpu.json", {"processor": "one"}
    results = report.resume(path, setting)
    assert results["cases"] == {}
    results["cases"]["a"] = {"seconds": [1.0]}
    report.save(path, results)
    assert report.resume(path, setting) == results
    assert report.resume(path, {"processor": "another"})["cases"] == {}
    assert [p.name for p in path.parent.iterdir()] == ["cpu.json"]


def test_all_benchmarks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    listing.main()
    listed = {line.partition("  ")[0].strip() for line in capsys.readouterr().out.splitlines()}
    assert {"cpu", "headline", "device", *(f"times {name}" for name in times.SUBJECTS)} <= listed


def test_machine_names_what_figures_depend_on_and_no_host() -> None:
    import socket

    found = report.machine(cpu_time=True)
    assert {"processor", "threads", "kernels", "khot", "torch", "python"} <= set(found)
    assert socket.gethostname() not in " ".join(found.values()).split()


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_agree_with_their_oracles(name: str) -> None:
    x = cpu.spread_normal(5, 200, torch.Generator().manual_seed(0))
    assert operators.disagreement(OPERATORS[name], x, 20, 0.8) is None


@pytest.mark.parametrize("name", OPERATORS)
def test_a_wrong_operator_is_found(name: str) -> None:
    def wrong(x: Tensor, k: int, *, tau: float) -> Tensor:
        y = OPERATORS[name].call(x, k, tau=tau)
        return y + 1e-4 * y.abs().clamp(min=0.1)

    x = cpu.spread_normal(5, 200, torch.Generator().manual_seed(0))
    assert operators.disagreement(dataclasses.replace(OPERATORS[name], call=wrong), x, 20, 0.8)


def test_a_wrong_gradient_is_found() -> None:
    right = OPERATORS["soft_topk, logistic"]

    def wrong(x: Tensor, k: int, *, tau: float) -> Tensor:
        y = right.call(x, k, tau=tau)
        return y.detach() + 1.01 * (y - y.detach())

    x = cpu.spread_normal(5, 200, torch.Generator().manual_seed(0))
    found = operators.disagreement(dataclasses.replace(right, call=wrong), x, 20, 0.8)
    assert found is not None and "gradients" in found


def test_nan_is_a_disagreement() -> None:
    operator = dataclasses.replace(
        OPERATORS["log_soft_topk"], call=lambda x, k, *, tau: torch.full_like(x, torch.nan)
    )
    assert operators.disagreement(operator, torch.randn(2, 9), 3, 1.0)


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"bisection": cpu.PEERS["bisection"], "pav": cpu.PEERS["pav"], "lml": cpu.PEERS["lml"]}
    monkeypatch.setattr(cpu, "PEERS", small)
    monkeypatch.setattr(cpu, "SHAPES", {(3, 50): (5, 1.0, 1.0)})
    monkeypatch.setattr(cpu, "SCORES_AT", ((3, 50),))
    monkeypatch.setattr(cpu, "GROWTH_N", [16, 64])
    monkeypatch.setattr(cpu, "FAMILIES", {n: cpu.FAMILIES[n] for n in ("N(0, s²)", "Cauchy")})
    threads = torch.get_num_threads()
    try:
        cpu.main(["--out", str(tmp_path), "--cpu-time"])
    finally:
        torch.set_num_threads(threads)


def test_a_run_writes_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(timing, "medians", lambda calls, **_: {name: 1.0 + len(name) for name in calls})
    run(tmp_path, monkeypatch)
    text = (tmp_path / "cpu.md").read_text(encoding="utf-8")
    assert text in capsys.readouterr().out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cpu.json", "cpu.md", "cpu.png"]
    # len("sigmoid_topk") + 1 over len("softmax") + 1
    assert "| `sigmoid_topk` | 1.62 / 1.62 |" in text
    assert "| `topk_mask` | 1.25 / – |" in text
    assert "| Cauchy, (3, 50) | 4x | 1.12 / 1.12 |" in text
    assert "| bisection | " in text and "not installed" not in text

    before = (tmp_path / "cpu.json").read_bytes()
    monkeypatch.setattr(cpu, "measure", None)  # nothing is measured twice
    run(tmp_path, monkeypatch)
    assert (tmp_path / "cpu.json").read_bytes() == before


def test_a_run_refuses_to_report_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = dataclasses.replace(
        OPERATORS["sparse_topk"], call=lambda x, k, *, tau: khot.sparse_topk(x, k, tau=tau) * 1.001
    )
    monkeypatch.setitem(cpu.OPERATORS, "sparse_topk", wrong)
    with pytest.raises(SystemExit, match=r"sparse_topk.*Nothing is reported"):
        run(tmp_path, monkeypatch)
    assert not (tmp_path / "cpu.md").exists()


# ------------------------------------------------------------------------------------------- GPU


@pytest.mark.needs_cuda
def test_the_device_is_measured() -> None:
    x = torch.randn(1_000, 1_000, device="cuda")
    found = device.times(lambda: torch.softmax(x, -1), x.device)
    assert found["kernels"] == 1 and 1e-6 < found["device"] < 1e-3
    assert found["memory"] == 4_000_000


@pytest.mark.parametrize("what", ["bench", "layers"])
def test_the_rehearsal_for_a_device_writes_its_report_and_goes_on(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KHOT_REVISION", "of the variable")
    command = [what, "--dry-run", "--out", str(tmp_path)]
    device.main(command)
    text = (tmp_path / "device.md").read_text(encoding="utf-8")
    assert "of the variable" in text
    expected = {
        "bench": ["log_soft_topk", "(2, 33) bfloat16"],
        "layers": ["autoencoder, its loss", "by hand"],
    }
    assert all(name in text for name in expected[what])
    assert "Error: " not in text  # of a function that failed
    before = (tmp_path / "device.json").read_bytes()
    for name in ("measure", "measure_layer"):
        monkeypatch.setattr(device, name, None)  # nothing is done twice
    device.main(command)
    assert (tmp_path / "device.json").read_bytes() == before


def test_every_function_of_the_bench_runs() -> None:
    case = device.Case(3, 20, 16)
    x = device.scores(case, torch.device("cpu"))
    made = device.others(case, x) | device.slow(case, x)
    assert device.streaming(case, x).keys() < made.keys()
    for function in made.values():
        for call in device.both_ways(function, x):
            call()
    assert len(made) > 25


OPTIONAL = (
    "entmax hypothesis lightning matplotlib mpmath onnx ot peft pytest rich scipy sklearn transformers typer"
)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_rehearsal_for_a_device_needs_no_install(tmp_path: Path) -> None:
    """From the sources alone, without git, and with no package but torch, Triton and what they need."""
    root, left_out = Path(__file__).parents[1], shutil.ignore_patterns("*.so", "__pycache__", "results")
    for name in ("src", "benchmarks", "reproduce"):
        shutil.copytree(root / name, tmp_path / name, ignore=left_out)
    shutil.copy(root / "tests" / "interpreting.py", tmp_path)
    environment = {
        "PATH": os.defpath, "HOME": str(tmp_path), "PYTHONPATH": f"{tmp_path / 'src'}:{tmp_path}",
        "KHOT_REVISION": "of the variable", "KHOT_KERNELS": "triton", "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    # as `python -m benchmarks.device`, with an interpreter that is twice as quick
    start = (
        f"import sys; sys.modules.update(dict.fromkeys({OPTIONAL.split()}))\n"
        "import runpy, interpreting; interpreting.quicken()\n"
        "runpy.run_module('benchmarks.device', run_name='__main__', alter_sys=True)"
    )
    command = [sys.executable, "-c", start, "layers", "--dry-run", "--out", str(tmp_path), "--only", "router"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "of the variable" in done.stdout and "router, hard" in done.stdout


def test_latency_times_every_public_name() -> None:
    """Functions, layers and distributions, some of them with several options behind a comma."""
    timed = {name.partition(",")[0] for name in latency.entries(16) | latency.layers(16)}
    modules = {
        "": khot,
        **{
            f"{name}.": getattr(khot, name)
            for name in ("sampling", "estimators", "losses", "distributions", "nn")
        },
        "conditional_poisson.": khot.sampling.conditional_poisson,
    }
    kinds = (torch.nn.Module, torch.distributions.Distribution)
    public = {
        prefix + name
        for prefix, module in modules.items()
        for name in module.__all__
        if inspect.isfunction(value := getattr(module, name))
        or (inspect.isclass(value) and issubclass(value, kinds))
    }
    assert len(public) > 50
    assert public - timed - set(latency.ELSEWHERE) == set()


def test_latency_measures_and_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "SHAPES", ((1, 16),))
    monkeypatch.setattr(latency, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["latency", "--seconds", "0.0001"])
    latency.main()
    text = (tmp_path / "latency.md").read_text(encoding="utf-8")
    assert text.count("| `softmax` |") == 2
    assert "| `soft_topk` |" in text
