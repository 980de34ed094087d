"""The `khot` command.

It lies outside of the package, which takes seconds to import: `khot --help` does not have to wait for it, and
Ctrl-C has to be quiet meanwhile.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
import warnings
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["main", "tidy"]


def main() -> None:
    """The entry point of the console script."""
    with tidy("khot"):
        about = "Relaxed top-k operators for PyTorch: choosing k of n as easily as softmax chooses one."
        parser = argparse.ArgumentParser("khot", description=about)
        parser.add_argument("--version", action="store_true", help="print the version")
        commands = parser.add_subparsers(dest="command", metavar="COMMAND")
        commands.add_parser("info", help="print versions, devices, and which kernels are active")
        given = parser.parse_args()
        # torch greets every user who has no numpy
        warnings.filterwarnings("ignore", "Failed to initialize NumPy")
        if given.version:
            import khot

            print(f"khot {khot.__version__}")
        elif given.command == "info":
            import khot

            khot.show_config()
        else:
            parser.print_help()


@contextmanager
def tidy(name: str) -> Generator[None]:
    """How a command ends where something from outside stops it.

    Ctrl-C ends it quietly, and so does a reader, such as head, that has enough. If the output cannot be
    written, the command says so in one line and exits with code 2.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        raise SystemExit(130) from None  # what shells report for a command that Ctrl-C ended
    except BrokenPipeError:
        _discard_output()
        raise SystemExit(1) from None
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _discard_output()
        print(f"{name}: cannot write the output: {error.strerror}", file=sys.stderr)
        raise SystemExit(2) from None


def _discard_output() -> None:
    """Let Python's last flush, at its exit, not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
