"""The `khot` command."""

from __future__ import annotations

import dataclasses
import importlib.util
import platform
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch

import khot
from khot import kernels

MISSING = "khot: the command line needs packages that are not installed; pip install khot[demo]"

try:
    import typer
    from typer.core import TyperGroup

    from khot.experiments import demo as experiment
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
    if not all(map(importlib.util.find_spec, ("matplotlib", "numpy", "sklearn"))):
        raise SystemExit(MISSING)
    try:
        experiment.run(
            experiment.Args(data_dir=data_dir, k=k, steps=steps, cdf=cdf, device=device, seed=seed, out=out)
        )
    except (DataError, experiment.ArgumentError) as error:
        fail(str(error))


def main() -> None:
    """The entry point."""
    app(prog_name="khot")
