"""What the GPU kernels take of a device: `python -m benchmarks.resources`. Needs no GPU.

Compiles the kernels that the calls of tests/kernels/test_host.py launch in float32, mostly with the logistic
CDF, as `benchmarks.ptx_guard` finds them. Of each kernel it writes the instructions of PTX, and the registers
of a thread, the bytes of spills and the bytes of shared memory that ptxas makes of them: to
results/resources.md, and to resources.json what the next run is held to.

With --check nothing is written, and the exit code is 1 if a kernel takes more registers than a thread may
have, or more than a twentieth beyond the instructions or the spills of resources.json, which holds for the
version of Triton that it names. --few takes some calls only. No figure here was measured on a GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import triton
import typer

from benchmarks import report

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FEW = r"^(soft_topk|soft_budget), logistic(, value)? \(4096, 64\) float32"
CALLS = (
    r"^(soft_topk|soft_budget), logistic.* \(4096, 64\) float32"
    r"|^(?!.*, (logistic|laplace|normal|uniform|power))(?!thresholds|soft_topk_magnitude).* float32"
)
REGISTERS = 128  # of a thread; a kernel that says otherwise may have twice as many
MORE = 1.05  # times what was recorded
SPILLS = 16  # bytes that need no explanation

Notes = dict[str, dict[str, Any]]


def kernels(only: str, jobs: int) -> Notes:
    """Of each launch, by its place: the kernel, and what it takes."""
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        command = [sys.executable, "-m", "benchmarks.ptx_guard", "note", ROOT, out.name, "--machine"]
        subprocess.run([*map(str, command), "--only", only, "--jobs", str(jobs)], check=True, cwd=ROOT)
        found: Notes = json.loads(Path(out.name).read_text(encoding="utf-8"))
    for each in found.values():
        each["instructions"] = sum(each.pop("opcodes").values())
    return found


def faults(found: Notes, recorded: Notes) -> Iterator[str]:
    for place, each in found.items():
        if "error" in each:
            yield f"{place}, {each['kernel']}: {each['error']}"
            continue
        allowed = {"registers": 2 * REGISTERS}
        if place in recorded:
            before = recorded[place]
            allowed = {
                "registers": max(REGISTERS, before["registers"]),
                "instructions": MORE * before["instructions"],
                "spills": MORE * before["spills"] + SPILLS,
            }
        for what, limit in allowed.items():
            if each[what] > limit:
                yield f"{place}, {each['kernel']}: {each[what]} {what}, and {limit:.0f} are allowed"


def table(found: Notes) -> str:
    """A line for each kernel, of the first launch that needs it."""
    head = ["launch", "kernel", "instructions", "registers", "spills, bytes", "shared memory, bytes"]
    numbers = ("instructions", "registers", "spills", "shared")
    first = {each["text"]: (place, each) for place, each in reversed(found.items())}
    rows = [
        [place, f"`{each['kernel']}`", *(f"{each[what]:,}" for what in numbers)]
        for place, each in reversed(first.values())
    ]
    return report.table(head, rows)


def main(
    check: Annotated[bool, typer.Option("--check", help="Only compare with what is recorded.")] = False,
    few: Annotated[bool, typer.Option("--few/--no-few", help="Some calls only.")] = False,
    jobs: Annotated[int, typer.Option(help="Processes that compile.")] = 2,
) -> None:
    path = RESULTS / "resources.json"
    found = kernels(FEW if few else CALLS, jobs)
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    recorded = known["kernels"] if known.get("triton") == triton.__version__ else {}
    wrong = list(faults(found, recorded))
    if not check:
        kept = {"triton": triton.__version__, "kernels": found}
        path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        title = f"# Machine code of the GPU kernels\n\n{(__doc__ or '').partition(chr(10) * 2)[2]}\n"
        text = f"{title}Triton {triton.__version__}, sm_90.\n\n{table(found)}\n"
        path.with_suffix(".md").write_text(text, encoding="utf-8")
    print(f"{len(found)} launches", *wrong, sep="\n")
    raise typer.Exit(bool(wrong))


if __name__ == "__main__":
    typer.run(main)
