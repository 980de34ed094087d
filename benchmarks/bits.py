"""Whether a change left every number as it was: `python -m benchmarks.bits record FILE`.

`python -m benchmarks.bits compare FILE` makes the same calls again, those of `benchmarks.latency` (every
public function and layer), on several kinds of rows in three dtypes, and names each result or gradient that
is another. Record before a change that must not change a number, and compare after it, with the compiled
kernels and with KHOT_KERNELS=reference. Numbers depend on the machine, on torch and on the number of threads,
which is 1 here. Of large results up to 4,096 evenly spaced entries are compared.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import track
from torch import Tensor

from benchmarks import latency

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
SHAPES = ((1, 8), (4, 64), (3, 1_000))
KEPT = 4_096  # entries of each result, at most
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "wide": lambda x: 100 * x,
    "ties": lambda x: x.round(),
    "infinite": lambda x: x.index_fill(-1, torch.tensor([1]), -math.inf).index_fill(
        -1, torch.tensor([2]), math.inf
    ),
    "NaN": lambda x: torch.cat([x[:-1], x[-1:].index_fill(-1, torch.tensor([0]), math.nan)]),
}

Found = dict[str, Tensor | str]  # an error's type and message in the place of a result

app = typer.Typer(help=(__doc__ or "").partition("\n")[0], add_completion=False)
File = Annotated[Path, typer.Argument(help="the results, as torch.save writes them")]


def calls() -> Iterator[tuple[str, Callable[[Tensor], Tensor], Tensor]]:
    """A key for each call, the function, and its argument."""
    for rows, n in SHAPES:
        torch.manual_seed(0)  # for the parameters of layers
        functions = latency.entries(n) | latency.layers(n)
        x = torch.randn(rows, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        for dtype in DTYPES:
            for kind, of in KINDS.items():
                for name, function in functions.items():
                    if isinstance(function, torch.nn.Module):
                        function.to(dtype)
                    yield f"{name}, {kind} ({rows}, {n}) {dtype}", function, of(x).to(dtype)


def results() -> Found:
    found: Found = {}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for key, function, x in track(list(calls()), description="calls"):
        torch.manual_seed(0)  # for samples
        leaf = x.clone().requires_grad_()
        try:
            y = function(leaf)
            found[key] = some(y)
            if y.requires_grad:
                v = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
                found[f"gradient of {key}"] = some(torch.autograd.grad(y, leaf, v)[0])
        except Exception as error:
            found[key] = f"{type(error).__name__}: {error}"
    return found


def some(y: Tensor) -> Tensor:
    flat = y.detach().flatten()
    return flat[:: -(-len(flat) // KEPT) or 1].clone()


def difference(a: Tensor | str | None, b: Tensor | str | None) -> str | None:
    if isinstance(a, Tensor) and isinstance(b, Tensor) and (a.shape, a.dtype) == (b.shape, b.dtype):
        if torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(0), b.nan_to_num(0)):
            return None
        if not torch.equal(a.isnan(), b.isnan()):
            return "NaN elsewhere"
        return f"off by up to {(a.double() - b.double()).nan_to_num(0).abs().max().item():.2g}"
    if isinstance(a, str) and a == b:
        return None
    return f"was {brief(a)}, is {brief(b)}"


def brief(result: Tensor | str | None) -> str:
    return f"{result.dtype} {tuple(result.shape)}" if isinstance(result, Tensor) else str(result)


@app.command()
def record(file: File) -> None:
    """Write the results of all calls."""
    torch.save(results(), file)


@app.command()
def compare(file: File) -> None:
    """Make the calls again, and name those with another result."""
    before: Found = torch.load(file)
    after = results()
    found = {key: difference(before.get(key), after.get(key)) for key in {**before, **after}}
    other = {key: what for key, what in found.items() if what is not None}
    for key, what in other.items():
        print(f"{key}: {what}")
    names = Counter(key.removeprefix("gradient of ").partition(",")[0] for key in other)
    print(f"{len(found) - len(other)} results are equal, {len(other)} are not: {dict(names)}")
    raise typer.Exit(bool(other))


if __name__ == "__main__":
    app()
