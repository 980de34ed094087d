"""The command line: `python -m reproduce`."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from reproduce.harness import files, runner, study
from reproduce.harness.data import DataError

__all__ = ["main"]

PROGRAM = "python -m reproduce"
DESCRIPTION = """\
Run the papers' experiments; each writes a report with our figures next to the paper's.

The same command continues a run that was stopped. A folder of results is locked while a run uses it. Results
of other arguments, or of other versions of khot or torch, are not mixed: give another --out, or --force,
which names both in the report."""


def main(words: Sequence[str]) -> int:
    """Run the command with these arguments, and return its exit code."""
    names = study.names()
    if words and words[0] not in ("list", "all", *names) and not words[0].startswith("-"):
        close = difflib.get_close_matches(words[0], ["list", "all", *names], n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"`{PROGRAM} list` prints what there is"
        _fail(f"no experiment {words[0]!r}; {hint}")
    parser = _parser(names)
    given = vars(parser.parse_args(words))
    name = given.pop("name", None)
    if name is None:
        parser.print_help()
    elif name == "list":
        _print_list(names)
    else:
        return _reproduce(names if name == "all" else [name], **given)
    return 0


def _fail(message: str) -> NoReturn:
    """Print one line on stderr and exit with code 2."""
    print(f"reproduce: {message}", file=sys.stderr)
    raise SystemExit(2)


# --- arguments ----------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """A parser that reports every error in one line, and leaves out what was not given."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more, allow_abbrev=False, argument_default=argparse.SUPPRESS)

    def error(self, message: str) -> NoReturn:
        _fail(message)


def _parser(names: list[str]) -> _Parser:
    parser = _Parser(
        prog=PROGRAM, description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="name", metavar="NAME")
    commands.add_parser("list", help="print the experiments, what they need, and how long they take")
    title = "run all experiments with these arguments"
    _add_options(commands.add_parser("all", help=title, description=title), study.Args, None)
    for name in names:
        found = study.find(name)
        title = f"{found.source}. Needs {found.needs}; takes {found.takes}."
        _add_options(
            commands.add_parser(name, help=found.source, description=title), found.Args, found.Args()
        )
    return parser


def _add_options(parser: _Parser, kind: type[study.Args], defaults: study.Args | None) -> None:
    """An option for each field of the arguments, and those of every run."""
    hints = get_type_hints(kind)
    for option in dataclasses.fields(kind):
        value = None if defaults is None else getattr(defaults, option.name)
        text = option.metadata["help"] + ("" if value is None else f" Default: {_words(value)}.")
        flag = f"--{option.name.replace('_', '-')}"
        parser.add_argument(flag, type=_reader(hints[option.name]), help=text.replace("%", "%%"))
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="A short run, on scikit-learn's digits unless --dataset is given.",
    )
    parser.add_argument("--out", type=Path, help="Folder for results. Default: khot-results, or khot-smoke.")
    parser.add_argument("--jobs", type=int, help="Number of trials to run in parallel. Default: 1.")
    parser.add_argument(
        "--force",
        action="store_true",
        help="Continue in a folder with results of other arguments or versions; the report names both.",
    )


def _reader(hint: Any) -> Callable[[str], Any]:
    """What makes an argument of this type from a word."""
    (kind, *_) = [part for part in get_args(hint) or (hint,) if part is not NoneType]
    if get_origin(hint) is not tuple:
        return kind

    def read(text: str) -> tuple[Any, ...]:
        try:
            return tuple(kind(part) for part in text.split(","))
        except ValueError:
            found = f"{text}: expected {kind.__name__}s with commas between them"
            raise argparse.ArgumentTypeError(found) from None

    return read


def _words(value: Any) -> str:
    """The word that :func:`_reader` makes this argument from."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


# --- commands -----------------------------------------------------------------------------------------------


def _print_list(names: list[str]) -> None:
    lines = [("name", "source", "needs", "takes")]
    for name in names:
        found = study.find(name)
        lines.append((name, found.source, found.needs, found.takes))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _reproduce(
    chosen: list[str],
    smoke: bool = False,
    out: Path | None = None,
    jobs: int = 1,
    force: bool = False,
    **given: Any,
) -> int:
    """Run these experiments, print their results and return the exit code."""
    out = out or Path("khot-smoke" if smoke else "khot-results")
    failed: list[str] = []
    try:
        # all arguments are checked before the first experiment starts
        plans = [(name, *_plan(name, smoke, given)) for name in chosen]
        for name, args, command in plans:
            body, lost = runner.reproduce(name, args, out, jobs=jobs, command=command, force=force)
            failed += lost
            if body:
                print(f"{body.strip()}\n\nreport: {out / name / 'report.md'}\n")
    except (DataError, files.FileError, study.ArgumentError) as error:
        _print_failed(failed)
        _fail(str(error))
    except KeyboardInterrupt:
        print("reproduce: stopped; the same command continues from here", file=sys.stderr)
        return 130
    _print_failed(failed)
    return 1 if failed else 0


def _print_failed(lines: list[str]) -> None:
    for line in lines:
        print(f"reproduce: failed: {line}", file=sys.stderr)


def _plan(name: str, smoke: bool, given: dict[str, Any]) -> tuple[study.Args, str]:
    """The arguments of an experiment, and the command that has them, without options that have no effect."""
    found = study.find(name)
    if folder := os.environ.get("KHOT_DATA_DIR"):
        given = {"data_dir": Path(folder), **given}
    known = [option.name for option in dataclasses.fields(found.Args)]
    if found.needs != "MNIST" or (smoke and "dataset" not in given):
        known = [key for key in known if key not in ("data_dir", "dataset")]
    elif "data_dir" not in given:
        if "dataset" in given:
            raise study.ArgumentError(
                f"dataset = {given['dataset']!r}: give --data-dir or KHOT_DATA_DIR the folder that has it"
            )
        raise study.ArgumentError(
            f"{name} needs MNIST: give --data-dir or KHOT_DATA_DIR the folder of its four gzipped "
            "IDX files, or try --smoke"
        )
    given = {key: given[key] for key in known if key in given}
    words = [
        f"--{key.replace('_', '-')} {'FOLDER' if key == 'data_dir' else _words(value)}"
        for key, value in given.items()
    ]
    command = " ".join([f"{PROGRAM} {name}", *(["--smoke"] if smoke else []), *words])
    return found.Args(**{**(found.smoke if smoke else {}), **given}), command
