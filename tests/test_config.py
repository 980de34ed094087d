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

import khot
from khot import _config as config
from khot import _kernels as kernels
from khot._kernels import cpu
from khot.experiments.harness import entry

setuptools = pytest.importorskip("setuptools")
ROOT = Path(__file__).resolve().parents[1]
LINES = ["khot", "torch", "python", "triton", "devices", "cpu kernels", "gpu kernels"]
# what the extras bring; none of it may be needed
EXTRAS = ("typer", "click", "rich", "matplotlib", "numpy", "sklearn", "scipy")


RUN = """
import contextlib, io, json, sys
sys.modules.update(dict.fromkeys(%(missing)r))
from khot.experiments.harness.entry import main
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
    code: int | str
    stdout: str
    stderr: str


def commands(*calls: tuple[str, ...], missing: tuple[str, ...], **environment: str) -> list[Run]:
    """What `khot` does with each of these lists of arguments, in a process without these packages."""
    done = subprocess.run(
        # torch warns where numpy is missing
        [sys.executable, "-W", "ignore", "-c", RUN % {"missing": missing, "calls": calls}],
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


def test_a_library_that_does_not_load_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str) -> None:
        raise OSError("undefined symbol:\n  xyz")

    monkeypatch.delenv("KHOT_KERNELS", raising=False)
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.13.0"))
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([Path("/x/_C.abi3.so")]))
    monkeypatch.setattr(torch.ops, "load_library", fail)
    with pytest.warns(UserWarning, match="does not load"):
        isa, note = cpu.load()
    assert isa is None
    assert "\n" not in note
    assert "/x/_C.abi3.so does not load" in note and "undefined symbol: xyz" in note


# ------------------------------------------------------------------------------ the command, with torch alone

INFO, VERSION, BARE, HELP = ("info",), ("--version",), (), ("--help",)
OTHERS = [("demo",), ("reproduce", "list"), ("info", "--what"), ("xyz",)]
CALLS = [INFO, VERSION, BARE, HELP, ("info", "--help"), *OTHERS]


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, ...], Run]:
    """What the command does without any extra."""
    return dict(zip(CALLS, commands(*CALLS, missing=EXTRAS), strict=True))


def test_info_needs_torch_alone(alone: dict[tuple[str, ...], Run]) -> None:
    assert (alone[INFO].code, alone[INFO].stderr) == (0, "")
    assert list(parts(alone[INFO].stdout))[: len(LINES)] == LINES


def test_version_needs_torch_alone(alone: dict[tuple[str, ...], Run]) -> None:
    assert alone[VERSION] == (0, f"khot {khot.__version__}\n", "")


@pytest.mark.parametrize("arguments", [BARE, HELP], ids=["no command", "--help"])
def test_help_needs_torch_alone(arguments: tuple[str, ...], alone: dict[tuple[str, ...], Run]) -> None:
    run = alone[arguments]
    assert (run.code, run.stderr) == (0, "")
    assert run.stdout.startswith("Usage: khot ")
    for name in ("info", "demo", "reproduce", "--version", "--help", "pip install khot[demo]"):
        assert name in run.stdout


def test_help_of_info_needs_torch_alone(alone: dict[tuple[str, ...], Run]) -> None:
    run = alone["info", "--help"]
    assert (run.code, run.stderr) == (0, "")
    assert run.stdout.startswith("Usage: khot info\n")


@pytest.mark.parametrize("arguments", OTHERS, ids=" ".join)
def test_other_commands_name_the_extra_in_one_line(
    arguments: tuple[str, ...], alone: dict[tuple[str, ...], Run]
) -> None:
    # a process that ends with a string prints it on stderr and returns 1
    assert alone[arguments] == (entry.MISSING, "", "")
    assert "\n" not in entry.MISSING and "pip install khot[demo]" in entry.MISSING


@pytest.mark.parametrize("missing", [("typer",), ("rich",)], ids="-".join)
def test_info_is_the_same_with_and_without_the_extra(
    missing: tuple[str, ...], alone: dict[tuple[str, ...], Run]
) -> None:
    assert commands(INFO, missing=missing) == [alone[INFO]]


def test_info_of_the_full_command_is_the_same(
    alone: dict[tuple[str, ...], Run], capsys: pytest.CaptureFixture[str]
) -> None:
    if os.environ.get("KHOT_KERNELS"):
        pytest.skip("the other process ran with other kernels")
    khot.show_config()
    told, other = parts(capsys.readouterr().out), parts(alone[INFO].stdout)
    assert {**told, "devices": ""} == {**other, "devices": ""}  # the number of threads may differ


def test_short_help_lists_the_commands_that_there_are() -> None:
    typer = pytest.importorskip("typer")
    cli = pytest.importorskip("khot.experiments.harness.cli")
    names = typer.main.get_command(cli.app).commands
    lines = entry.HELP.partition("Commands:\n")[2].splitlines()
    assert {line.split()[0] for line in lines if line.startswith("  ")} == set(names)


@pytest.mark.parametrize("name", ["typer", "rich.table", "numpy", "sklearn"])
def test_a_missing_package_leads_to_the_short_command(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(module: str) -> None:
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(importlib, "import_module", fail)
    monkeypatch.setattr(sys, "argv", ["khot", "--help"])
    with pytest.raises(SystemExit) as end:
        entry.main()
    assert end.value.code is None
    assert capsys.readouterr().out == f"{entry.HELP}\n"


def test_an_error_of_our_own_is_not_taken_for_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(module: str) -> None:
        raise ImportError("no such name", name="khot.experiments.harness.study")

    monkeypatch.setattr(importlib, "import_module", fail)
    monkeypatch.setattr(sys, "argv", ["khot", "info"])
    with pytest.raises(ImportError, match="no such name"):
        entry.main()


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
