"""What khot says about itself: `khot.show_config`, and the command where only torch is installed."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import json
import os
import runpy
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import fresh
import khot
from khot import _config as config
from khot import _kernels as kernels
from khot._kernels import cpu

setuptools = pytest.importorskip("setuptools")
ROOT = Path(__file__).resolve().parents[1]
LINES = ["khot", "torch", "python", "triton", "devices", "cpu kernels", "gpu kernels"]
# what the extras bring; none of it may be needed
EXTRAS = ("typer", "click", "rich", "matplotlib", "numpy", "sklearn", "scipy")


RUN = """
import contextlib, io, json, sys
sys.modules.update(dict.fromkeys(%(missing)r))
from _khot import main
for arguments in %(calls)r:
    sys.argv = ["khot", *arguments]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main()
        except SystemExit as end:
            code = end.code
    print(json.dumps([code or 0, out.getvalue(), err.getvalue()]))
"""


class Run(NamedTuple):
    code: int
    stdout: str
    stderr: str


def commands(*calls: tuple[str, ...], missing: tuple[str, ...], **environment: str) -> list[Run]:
    """What `khot` does with each of these lists of arguments, in a process without these packages."""
    done = subprocess.run(
        [sys.executable, "-c", RUN % {"missing": missing, "calls": calls}],
        env={**os.environ, "KHOT_KERNELS": "", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return [Run(*json.loads(line)) for line in done.stdout.splitlines()]


def parts(text: str) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in text.splitlines())


# --------------------------------------------------------------------------------------------- show_config


def test_show_config_prints_versions_devices_and_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    assert khot.show_config() is None
    told = parts(capsys.readouterr().out)
    assert list(told)[: len(LINES)] == LINES
    assert told["khot"] == khot.__version__
    assert told["torch"] == torch.__version__
    assert told["python"] == ".".join(map(str, sys.version_info[:3]))
    assert told["devices"].startswith("cpu (")
    assert told["cpu kernels"] == kernels.active()["cpu"]
    assert (told["gpu kernels"] == "none") == (not torch.cuda.is_available())
    # a note exactly where the compiled kernels are not in use
    compiled = told["cpu kernels"].startswith("compiled")
    assert set(told) - set(LINES) == (set() if compiled else {"note"})


@pytest.mark.parametrize("found", [{}, {"triton": "3.9.0"}, {"pytorch-triton-rocm": "3.4.0"}], ids=str)
def test_show_config_names_triton(
    found: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def version(name: str) -> str:
        if name in found or name == "khot":
            return found.get(name, "1.2.3")
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    khot.show_config()
    told = parts(capsys.readouterr().out)
    assert told["triton"] == next(iter(found.values()), "not installed")
    assert told["khot"] == config.version() == "1.2.3"


def test_version_of_a_checkout_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert config.version() == "0+unknown"


# -------------------------------------------------------------------------- why there are no compiled kernels


def test_kernels_in_use_need_no_note(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        class khot_isa:
            def __new__(cls) -> bytes:  # type: ignore[misc]
                return b"baseline"

    monkeypatch.setenv("KHOT_KERNELS", "compiled")
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.10.0"))
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([Path("_C.abi3.so")]))
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    monkeypatch.setattr(ctypes, "CDLL", lambda path: Library)
    assert cpu.load() == ("baseline", "")


@pytest.mark.parametrize("choice", ["reference", "triton"])
def test_note_names_the_variable_that_switches_them_off(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KHOT_KERNELS", choice)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    isa, note = cpu.load()
    assert isa is None
    assert note == f"KHOT_KERNELS={choice} switches the compiled CPU kernels off"


@pytest.mark.parametrize("built", [True, False])
@pytest.mark.parametrize("version", ["2.6.0", "2.6.0+cpu", "2.9.1", "2.10.0a0+git123"])
def test_kernels_are_left_alone_under_a_torch_that_is_too_old(
    version: str, built: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KHOT_KERNELS", raising=False)
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([Path("_C.abi3.so")] if built else []))
    monkeypatch.setattr(torch.ops, "load_library", lambda path: pytest.fail("loaded"))
    isa, note = cpu.load()
    assert isa is None
    assert "\n" not in note
    assert "need torch 2.10 or newer" in note and "install a newer torch" in note
    assert ("then khot again" in note) == (not built)


def test_a_pure_build_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KHOT_KERNELS", raising=False)
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.13.0"))
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([]))
    isa, note = cpu.load()
    assert isa is None
    assert "\n" not in note
    assert note.startswith("this is a pure build") and "`pip install .`" in note and "-v" in note
    assert "`uv pip install --no-build-isolation .`" in note


def test_a_library_that_does_not_load_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str) -> None:
        raise OSError("undefined symbol:\n  xyz")

    monkeypatch.delenv("KHOT_KERNELS", raising=False)
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.13.0"))
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([Path("/x/_C.abi3.so")]))
    monkeypatch.setattr(torch.ops, "load_library", fail)
    isa, note = cpu.load()
    assert isa is None
    assert "\n" not in note
    assert "/x/_C.abi3.so does not load" in note and "undefined symbol: xyz" in note


USE = """
import warnings
from pathlib import Path
glob = Path.glob
Path.glob = lambda self, pattern: iter(()) if pattern == "_C.*" else glob(self, pattern)
import torch, khot
x = torch.randn(3, 5, requires_grad=True)
khot.soft_topk(x.to("meta"), 2)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    torch.func.vmap(lambda row: khot.nn.SoftTopK(2)(row))(x)
    khot.soft_topk(x, 2).sum().backward()
    khot.soft_rank(x)
for warning in told:
    print(warning.filename, warning.message)
"""


def warned(kernels: str) -> list[str]:
    """What a pure build says when operators are used, and where."""
    done = fresh.run(USE, KHOT_KERNELS=kernels)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_a_pure_build_warns_once_where_it_is_first_used_on_a_cpu() -> None:
    (line,) = warned("")
    assert line.startswith("<string> khot: ")
    newer = torch.__version__ < cpu.OLDEST_TORCH  # of an older torch there is nothing to build
    assert "times as long" in line and ("install a newer torch" if newer else "--no-build-isolation") in line


def test_who_asks_for_the_reference_is_not_warned() -> None:
    assert warned("reference") == []


# ------------------------------------------------------------------------------------------------ the command

INFO, VERSION, BARE, HELP, OTHER = ("info",), ("--version",), (), ("--help",), ("xyz",)


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, ...], Run]:
    """What the command does without any extra."""
    calls = [INFO, VERSION, BARE, HELP, OTHER]
    return dict(zip(calls, commands(*calls, missing=EXTRAS), strict=True))


def test_info_needs_torch_alone(alone: dict[tuple[str, ...], Run]) -> None:
    assert (alone[INFO].code, alone[INFO].stderr) == (0, "")
    assert list(parts(alone[INFO].stdout))[: len(LINES)] == LINES


def test_info_is_the_configuration(
    alone: dict[tuple[str, ...], Run], capsys: pytest.CaptureFixture[str]
) -> None:
    if os.environ.get("KHOT_KERNELS"):
        pytest.skip("the other process ran with other kernels")
    khot.show_config()
    told, other = parts(capsys.readouterr().out), parts(alone[INFO].stdout)
    assert {**told, "devices": ""} == {**other, "devices": ""}  # the number of threads may differ


def test_version_needs_torch_alone(alone: dict[tuple[str, ...], Run]) -> None:
    assert alone[VERSION] == (0, f"khot {khot.__version__}\n", "")


def test_help_and_refusals_do_not_wait_for_torch(alone: dict[tuple[str, ...], Run]) -> None:
    assert commands(BARE, HELP, OTHER, missing=("torch",)) == [alone[BARE], alone[HELP], alone[OTHER]]
    assert alone[BARE] == alone[HELP]
    assert (alone[HELP].code, alone[HELP].stderr) == (0, "")
    assert all(part in alone[HELP].stdout for part in ("usage: khot ", "info", "--version"))
    assert (alone[OTHER].code, alone[OTHER].stdout) == (2, "")
    assert "'xyz'" in alone[OTHER].stderr and "info" in alone[OTHER].stderr


MODULE = """
import os, runpy, sys
{}
runpy.run_module("khot", run_name="__main__", alter_sys=True)
"""


def test_module_is_the_same_command(alone: dict[tuple[str, ...], Run]) -> None:
    run = fresh.run(MODULE.format(""), "--version")
    assert (run.returncode, run.stdout, run.stderr) == alone[VERSION]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is a device of Linux")
def test_output_that_cannot_be_written_is_one_line() -> None:
    run = fresh.run(MODULE.format("os.dup2(os.open('/dev/full', os.O_WRONLY), 1)"), "info")
    assert (run.returncode, run.stderr) == (2, "khot: cannot write the output: No space left on device\n")


def test_a_reader_that_has_enough_is_no_error() -> None:
    closed = "read, write = os.pipe(); os.dup2(write, 1); os.close(write); os.close(read)"
    run = fresh.run(MODULE.format(closed), "info")
    assert (run.returncode, run.stderr) == (1, "")


def test_an_interrupt_while_torch_is_imported_is_quiet() -> None:
    # what Ctrl-C does, at the moment that the import of torch begins
    code = """
import sys
class Interrupted:
    def find_spec(self, name, *_):
        if name == "torch":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
sys.argv = ["khot", "info"]
[command] = importlib.metadata.entry_points(group="console_scripts", name="khot")
command.load()()
"""
    run = subprocess.run([sys.executable, "-c", "import importlib.metadata" + code], capture_output=True)
    assert (run.returncode, run.stdout, run.stderr) == (130, b"", b"")


# ---------------------------------------------------------------------------------------------- what is built

checkout = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="not a checkout")


def extensions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the extensions that setup.py builds."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: given.update(arguments))
    monkeypatch.chdir(ROOT)
    runpy.run_path("setup.py")
    return [module.name for module in given.get("ext_modules", [])]


@checkout
@pytest.mark.parametrize("version", ["2.10.0", "2.13.0+cpu", "3.0.0"])
def test_kernels_are_built_where_torch_is_new_enough(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KHOT_PURE", raising=False)
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
    assert extensions(monkeypatch) == ["khot._C", "khot._eager_" + version.split("+")[0].replace(".", "_")]


@checkout
@pytest.mark.parametrize(
    "version, said",
    [
        ("2.6.0+cpu", "torch 2.6.0+cpu is older than 2.10"),
        ("2.9.1", "torch 2.9.1 is older than 2.10"),
        ("", "torch is not installed"),
        ("2.13.0", "KHOT_PURE=1"),
    ],
)
def test_a_pure_build_says_why(
    version: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KHOT_PURE", "1" if said == "KHOT_PURE=1" else "")
    if version:
        monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
    else:
        monkeypatch.setitem(sys.modules, "torch", None)
    assert extensions(monkeypatch) == []
    assert f"khot: the CPU kernels are not built: {said}" in capsys.readouterr().err


@checkout
def test_an_isolated_build_uses_the_torch_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    # pip takes what is installed out of the path, and puts the build's own tools into it
    place = sysconfig.get_path("platlib")
    monkeypatch.delenv("KHOT_PURE", raising=False)
    monkeypatch.setattr(sys, "path", ["/tools", *(p for p in sys.path if p != place)])
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.13.0"))
    assert extensions(monkeypatch) == ["khot._C", "khot._eager_2_13_0"]
    assert sys.path[0] == "/tools" and sys.path[-1] == place


@checkout
def test_the_oldest_torch_is_the_same_everywhere() -> None:
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    major, minor = map(int, cpu.OLDEST_TORCH.split("."))
    assert f'OLDEST_TORCH = "{cpu.OLDEST_TORCH}"' in setup
    # 2.10 is 0x020a: the stable interface that the extension is compiled for
    assert f"0x{major:02x}{minor:02x}000000000000" in setup
