"""The `khot` command."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperGroup

import khot
from khot.experiments import demo as demo_module
from khot.experiments.harness import files, runner, study
from khot.experiments.harness.data import DataError
from khot.experiments.harness.entry import MISSING

__all__ = ["app", "main"]


def _fail(message: str) -> NoReturn:
    """Print one line on stderr and exit with code 2."""
    print(f"khot: {message}", file=sys.stderr)
    raise SystemExit(2)


class _Group(TyperGroup):
    """Commands that report every usage error in one line, and suggest a known name for an unknown one."""

    kind = "command"
    listed_by = "khot --help"

    def main(self, *args: Any, **extra: Any) -> Any:
        extra["standalone_mode"] = False
        try:
            code = super().main(*args, **extra)
        except Exception as error:
            # typer's versions raise usage errors from different packages, but all of them have this method
            format_message = getattr(error, "format_message", None)
            if format_message is None:
                raise
            _fail(" ".join(format_message().split()))
        raise SystemExit(code if isinstance(code, int) else 0)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            close = difflib.get_close_matches(name, self.list_commands(ctx), n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"`{self.listed_by}` prints what there is"
            _fail(f"no {self.kind} {name!r}; {hint}")
        return super().resolve_command(ctx, args)


app = typer.Typer(cls=_Group, add_completion=False, pretty_exceptions_enable=False)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"khot {khot.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _khot(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Relaxed top-k operators for PyTorch: choosing k of n as easily as softmax chooses one."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command("info")
def _info() -> None:
    """Print versions, devices, and which kernels are active."""
    khot.show_config()


def _check_packages() -> None:
    """Exit if the packages for training and plots are missing; the command line itself does not need them."""
    if not all(map(importlib.util.find_spec, ("matplotlib", "numpy", "sklearn"))):
        raise SystemExit(MISSING)


HELP = {field.name: field.metadata["help"] for field in dataclasses.fields(demo_module.Args)}


@app.command("demo")
def _demo(
    data_dir: Annotated[
        Path | None, typer.Option(envvar="KHOT_DATA_DIR", help=HELP["data_dir"])
    ] = demo_module.Args.data_dir,
    k: Annotated[int | None, typer.Option(help=HELP["k"])] = demo_module.Args.k,
    steps: Annotated[int, typer.Option(help=HELP["steps"])] = demo_module.Args.steps,
    seed: Annotated[int, typer.Option(help=HELP["seed"])] = demo_module.Args.seed,
    out: Annotated[Path, typer.Option(help=HELP["out"])] = demo_module.Args.out,
) -> None:
    """Which k pixels tell the digits apart? Learn to choose them, and compare with other choices."""
    _check_packages()
    try:
        demo_module.run(demo_module.Args(data_dir=data_dir, k=k, steps=steps, seed=seed, out=out))
    except (DataError, demo_module.ArgumentError, ImportError) as error:
        _fail(str(error))
    except OSError as error:  # the disk is full, for instance
        _fail(str(files.unwritable(Path(error.filename or out), error)))


# --- khot reproduce -----------------------------------------------------------------------------------------


class _Experiments(_Group):
    """The commands of ``khot reproduce``: one per experiment, created when it is asked for."""

    kind = "experiment"
    listed_by = "khot reproduce list"

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), "all", *study.names()]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name == "all":
            title = "Run all experiments with these arguments."
            return _as_command(cmd_name, study.names(), title, _options(study.Args, None))
        if cmd_name not in study.names():
            return super().get_command(ctx, cmd_name)
        found = study.find(cmd_name)
        title = f"{found.source}. Needs {found.needs}; takes {found.takes}."
        return _as_command(cmd_name, [cmd_name], title, _options(found.Args, found.Args()))


_reproduce_app = typer.Typer(cls=_Experiments)
app.add_typer(_reproduce_app, name="reproduce")


@_reproduce_app.callback(invoke_without_command=True)
def _reproduce_help(context: typer.Context) -> None:
    """Run the papers' experiments; each writes a report with our figures next to the paper's.

    The same command continues a run that was stopped. A folder of results is locked while a run uses it.
    Results of other arguments, or of other versions of khot or torch, are not mixed: give another --out, or
    --force, which names both in config.json.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@_reproduce_app.command("list")
def _list_experiments() -> None:
    """Print the experiments, what they need, and how long they take."""
    lines = [("name", "source", "needs", "takes")]
    for name in study.names():
        found = study.find(name)
        lines.append((name, found.source, found.needs, found.takes))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _options(kind: type[study.Args], defaults: study.Args | None) -> dict[str, Any]:
    """An optional parameter for each field of the arguments; None means that it was not given."""
    hints, found = get_type_hints(kind), {}
    for option in dataclasses.fields(kind):
        hint, text = hints[option.name], option.metadata["help"]
        value = None if defaults is None else getattr(defaults, option.name)
        if value is not None:
            text += f" Default: {','.join(map(str, value)) if isinstance(value, tuple) else value}."
        if get_origin(hint) is tuple:
            hint = str
        envvar = "KHOT_DATA_DIR" if option.name == "data_dir" else None
        found[option.name] = Annotated[hint | None, typer.Option(envvar=envvar, help=text)]
    return found


def _as_command(name: str, chosen: list[str], title: str, parameters: dict[str, Any]) -> Any:
    """The command with this name, which runs the chosen experiments."""
    smoke = Annotated[
        bool,
        typer.Option("--smoke", help="A short run, on scikit-learn's digits unless --dataset is given."),
    ]
    out = Annotated[
        Path | None, typer.Option(help="Folder for results. Default: khot-results, or khot-smoke.")
    ]
    jobs = Annotated[int, typer.Option(help="Number of trials to run in parallel.")]
    force = Annotated[
        bool,
        typer.Option(
            "--force",
            help="Continue in a folder with results of other arguments or versions; config.json names both.",
        ),
    ]
    hints = {**parameters, "smoke": smoke, "out": out, "jobs": jobs, "force": force}
    defaults = {"smoke": False, "jobs": 1, "force": False}
    signature = [
        inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=defaults.get(key), annotation=hint)
        for key, hint in hints.items()
    ]

    def command(smoke: bool, out: Path | None, jobs: int, force: bool, **given: Any) -> None:
        raise SystemExit(_reproduce(chosen, smoke, out, jobs, force, given))

    command.__annotations__ = hints
    command.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined]
    single = typer.Typer(add_completion=False)
    single.command(name, help=title)(command)
    return typer.main.get_command(single)


def _reproduce(
    chosen: list[str], smoke: bool, out: Path | None, jobs: int, force: bool, given: dict[str, Any]
) -> int:
    """Run these experiments, print their results and return the exit code."""
    _check_packages()
    given = {key: value for key, value in given.items() if value is not None}
    out = out or Path("khot-smoke" if smoke else "khot-results")
    failed: list[str] = []
    try:
        # all arguments are checked before the first experiment starts
        plans = [(name, *_plan(name, smoke, given)) for name in chosen]
        for name, args, command in plans:
            body, lost = runner.reproduce(name, args, out, jobs=jobs, command=command, force=force)
            failed += lost
            if body:
                typer.echo(f"{body.strip()}\n\nreport: {out / name / 'report.md'}\n")
    except (DataError, files.FileError, study.ArgumentError) as error:
        for line in failed:
            print(f"khot: failed: {line}", file=sys.stderr)
        _fail(str(error))
    except KeyboardInterrupt:
        print("khot: stopped; the same command continues from here", file=sys.stderr)
        return 130
    for line in failed:
        print(f"khot: failed: {line}", file=sys.stderr)
    return 1 if failed else 0


def _plan(name: str, smoke: bool, given: dict[str, Any]) -> tuple[study.Args, str]:
    """The arguments of an experiment, and the command that has them, without options that have no effect."""
    found = study.find(name)
    known = {option.name for option in dataclasses.fields(found.Args)}
    if found.needs != "MNIST" or (smoke and "dataset" not in given):
        known -= {"data_dir", "dataset"}
    elif "data_dir" not in given:
        if "dataset" in given:
            raise study.ArgumentError(
                f"dataset = {given['dataset']!r}: give --data-dir or KHOT_DATA_DIR the folder that has it"
            )
        raise study.ArgumentError(
            f"{name} needs MNIST: give --data-dir or KHOT_DATA_DIR the folder of its four gzipped "
            "IDX files, or try --smoke"
        )
    given = {key: value for key, value in given.items() if key in known}
    hints = get_type_hints(found.Args)
    values = {
        key: _parse(key, hints[key], value) if get_origin(hints[key]) is tuple else value
        for key, value in given.items()
    }
    words = [
        f"--{key.replace('_', '-')} {'FOLDER' if key == 'data_dir' else value}"
        for key, value in given.items()
    ]
    command = " ".join([f"khot reproduce {name}", *(["--smoke"] if smoke else []), *words])
    return found.Args(**{**(found.smoke if smoke else {}), **values}), command


def _parse(name: str, hint: Any, value: str) -> tuple[Any, ...]:
    """The entries of a list that was given as a,b,c."""
    try:
        return tuple(get_args(hint)[0](part) for part in value.split(","))
    except ValueError:
        raise study.ArgumentError(
            f"{name} = {value}: expected {get_args(hint)[0].__name__}s with commas between them"
        ) from None


def main() -> None:
    """Run the command with all its subcommands."""
    app(prog_name="khot")
