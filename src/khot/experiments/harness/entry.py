"""The `khot` command without its packages. It needs torch alone for --help, --version and info."""

from __future__ import annotations

import errno
import importlib
import os
import sys

import khot

__all__ = ["MISSING", "main"]

MISSING = "khot: this command needs packages that are not installed; pip install khot[demo]"

HELP = """\
Usage: khot [--version] [--help] COMMAND

Relaxed top-k operators for PyTorch: choosing k of n as easily as softmax chooses one.

Options:
  --version  Print the version.
  --help     Show this message and exit.

Commands:
  info       Print versions, devices, and which kernels are active.
  demo       Which k pixels tell the digits apart? (needs khot[demo])
  reproduce  Run the papers' experiments. (needs khot[demo])

This is the short help, because the packages of the demo are not installed: pip install khot[demo]"""


def main() -> None:
    """Run the command. If its output cannot be written, say so in one line and exit with code 2."""
    try:
        try:
            _run()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has enough
        _discard_output()
        raise SystemExit(1) from None
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _discard_output()
        print(f"khot: cannot write the output: {error.strerror}", file=sys.stderr)
        raise SystemExit(2) from None


def _discard_output() -> None:
    """Let Python's last flush, at its exit, not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run() -> None:
    try:
        cli = importlib.import_module("khot.experiments.harness.cli")
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "khot":
            raise
        raise SystemExit(_plain(sys.argv[1:])) from None
    cli.main()


def _plain(arguments: list[str]) -> str | None:
    """The command without the packages of the extra. Returns what a failure says."""
    if arguments == ["info"]:
        khot.show_config()
    elif arguments == ["--version"]:
        print(f"khot {khot.__version__}")
    elif arguments in ([], ["--help"]):
        print(HELP)
    elif arguments == ["info", "--help"]:
        print("Usage: khot info\n\nPrint versions, devices, and which kernels are active.")
    else:
        return MISSING
    return None
