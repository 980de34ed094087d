"""The `khot` command."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import platform
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_args, get_origin, get_type_hints

import torch

import khot
from khot import _kernels as kernels

MISSING = "khot: the command line needs packages that are not installed; pip install khot[demo]"

try:
    import typer
    from typer.core import TyperGroup

    from khot.experiments import demo as experiment
    from khot.experiments import runner, study
    from khot.experiments.data import DataError
except ImportError as error:
    if (error.name or "").partition(".")[0] == "khot":
        raise
    raise SystemExit(MISSING) from None

__all__ = ["app", "main"]


def fail(message: str) -> NoReturn:
    """One line on stderr, and exit code 2."""
    print(f"khot: {message}", file=sys.stderr)
    raise SystemExit(2)


class OneLineErrors(TyperGroup):
    """Says in one line, too, what is wrong with options that cannot be parsed."""

    def main(self, *args: Any, **extra: Any) -> Any:
        extra["standalone_mode"] = False
        try:
            code = super().main(*args, **extra)
        except Exception as error:
            # Which package a usage error comes from differs between typer's versions; this method does not.
            if not hasattr(error, "format_message"):
                raise
            fail(" ".join(error.format_message().split()))
        raise SystemExit(code if isinstance(code, int) else 0)


app = typer.Typer(cls=OneLineErrors, add_completion=False, pretty_exceptions_enable=False)


def show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"khot {khot.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def khot_command(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Relaxed top-k operators for PyTorch: choosing k of n as easily as softmax chooses one."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def info() -> None:
    """Print versions, devices, and which kernels are active."""
    typer.echo(f"khot: {khot.__version__}")
    typer.echo(f"torch: {torch.__version__}")
    typer.echo(f"python: {platform.python_version()}")
    typer.echo(f"devices: {', '.join(devices())}")
    for kind, active in kernels.active().items():
        typer.echo(f"{kind} kernels: {active}")


def devices() -> list[str]:
    """What can be given to ``--device``, each with what it is."""
    found = [f"cpu ({torch.get_num_threads()} threads)"]
    found += [
        f"cuda:{index} ({torch.cuda.get_device_name(index)})" for index in range(torch.cuda.device_count())
    ]
    if torch.backends.mps.is_available():
        found.append("mps")
    return found


def check_packages() -> None:
    """What training and plots need, and the command line does not."""
    if not all(map(importlib.util.find_spec, ("matplotlib", "numpy", "sklearn"))):
        raise SystemExit(MISSING)


HELP = {field.name: field.metadata["help"] for field in dataclasses.fields(experiment.Args)}


@app.command()
def demo(
    data_dir: Annotated[
        Path | None, typer.Option(envvar="KHOT_DATA_DIR", help=HELP["data_dir"])
    ] = experiment.Args.data_dir,
    k: Annotated[int | None, typer.Option(help=HELP["k"])] = experiment.Args.k,
    steps: Annotated[int, typer.Option(help=HELP["steps"])] = experiment.Args.steps,
    cdf: Annotated[str, typer.Option(help=HELP["cdf"])] = experiment.Args.cdf,
    device: Annotated[str, typer.Option(help=HELP["device"])] = experiment.Args.device,
    seed: Annotated[int, typer.Option(help=HELP["seed"])] = experiment.Args.seed,
    out: Annotated[Path, typer.Option(help=HELP["out"])] = experiment.Args.out,
) -> None:
    """Which k pixels tell the digits apart? Learn a choice of pixels, and set it beside others."""
    check_packages()
    try:
        experiment.run(
            experiment.Args(data_dir=data_dir, k=k, steps=steps, cdf=cdf, device=device, seed=seed, out=out)
        )
    except (DataError, experiment.ArgumentError) as error:
        fail(str(error))


# --- khot reproduce -----------------------------------------------------------------------------------------


class Experiments(TyperGroup):
    """The commands of ``khot reproduce``: one an experiment, made when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), "all", *study.names()]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name == "all":
            title = "All of them, with these arguments."
            return as_command(cmd_name, study.names(), title, options(study.Args, None))
        if cmd_name not in study.names():
            return super().get_command(ctx, cmd_name)
        found = study.find(cmd_name)
        title = f"{found.source}. Needs {found.needs}; takes {found.takes}."
        return as_command(cmd_name, [cmd_name], title, options(found.Args, found.Args()))


reproduce_app = typer.Typer(cls=Experiments)
app.add_typer(reproduce_app, name="reproduce")


@reproduce_app.callback(invoke_without_command=True)
def reproduce_command(context: typer.Context) -> None:
    """Run the papers' experiments; each writes a report with our figures beside the paper's."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@reproduce_app.command("list")
def list_experiments() -> None:
    """Print what there is, what it needs and how long it takes."""
    lines = [("name", "source", "needs", "takes")]
    for name in study.names():
        found = study.find(name)
        lines.append((name, found.source, found.needs, found.takes))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def options(kind: type[study.Args], defaults: study.Args | None) -> dict[str, Any]:
    """A parameter for each field of the arguments; None stands for what was not given."""
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


def as_command(name: str, chosen: list[str], title: str, parameters: dict[str, Any]) -> Any:
    """The command of that name, which runs these experiments."""
    smoke = Annotated[bool, typer.Option("--smoke", help="Seconds only, on scikit-learn's digits.")]
    out = Annotated[
        Path | None, typer.Option(help="Folder for results. Default: khot-results, or khot-smoke.")
    ]
    jobs = Annotated[int, typer.Option(help="How many trials to run at a time.")]
    hints = {**parameters, "smoke": smoke, "out": out, "jobs": jobs}
    defaults = {"smoke": False, "jobs": 1}
    signature = [
        inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=defaults.get(key), annotation=hint)
        for key, hint in hints.items()
    ]

    def command(smoke: bool, out: Path | None, jobs: int, **given: Any) -> None:
        raise SystemExit(reproduce(chosen, smoke, out, jobs, given))

    command.__annotations__ = hints
    command.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined]
    single = typer.Typer(add_completion=False)
    single.command(name, help=title)(command)
    return typer.main.get_command(single)


def parse(name: str, hint: Any, value: str) -> tuple[Any, ...]:
    """The entries of a list that was given as a,b,c."""
    try:
        return tuple(get_args(hint)[0](part) for part in value.split(","))
    except ValueError:
        raise study.ArgumentError(
            f"{name} = {value}: expected {get_args(hint)[0].__name__}s with commas between them"
        ) from None


def reproduce(chosen: list[str], smoke: bool, out: Path | None, jobs: int, given: dict[str, Any]) -> int:
    """Run these experiments, print their results and return the exit code."""
    check_packages()
    given = {key: value for key, value in given.items() if value is not None}
    if smoke:
        given = {key: value for key, value in given.items() if key not in ("data_dir", "dataset")}
    failed: list[str] = []
    out = out or Path("khot-smoke" if smoke else "khot-results")
    try:
        plans = []
        for name in chosen:
            found = study.find(name)
            if found.needs == "MNIST" and "data_dir" not in given and not smoke:
                raise study.ArgumentError(
                    f"{name} needs MNIST: give --data-dir or KHOT_DATA_DIR the folder of its four gzipped "
                    "IDX files, or try --smoke"
                )
            hints = get_type_hints(found.Args)
            known = {option.name for option in dataclasses.fields(found.Args)}
            values = {
                key: parse(key, hints[key], value) if get_origin(hints[key]) is tuple else value
                for key, value in given.items()
                if key in known
            }
            plans.append((name, found.Args(**{**(found.smoke if smoke else {}), **values})))
        words = " ".join(
            f"--{key.replace('_', '-')} {'FOLDER' if key == 'data_dir' else value}"
            for key, value in given.items()
        )
        for name, args in plans:
            command = f"khot reproduce {name}{' --smoke' if smoke else ''} {words}".strip()
            body, lost = runner.reproduce(name, args, out, jobs=jobs, command=command)
            failed += lost
            if body:
                typer.echo(f"{body.strip()}\n\nreport: {out / name / 'report.md'}\n")
    except (DataError, study.ArgumentError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        print("khot: stopped; the same command goes on from here", file=sys.stderr)
        return 130
    for line in failed:
        print(f"khot: failed: {line}", file=sys.stderr)
    return 1 if failed else 0


def main() -> None:
    """The entry point."""
    app(prog_name="khot")
