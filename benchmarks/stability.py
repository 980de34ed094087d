"""Where the training of `khot.nn.TopKSAE` is steady: `python -m benchmarks.stability`.

Short trainings by :func:`khot.nn.fit_sae` at a constant rate, on sums of 8 of 256 random directions in 64
dimensions with an offset, as in `benchmarks.sae`: every width with every number of latents, at four rates;
and the other options at one width. Each says what is left unexplained, how many latents new vectors leave
unused, and the highest rise: the largest error of a batch beside the smallest one before it, from step 20 on.
Batches differ by a few percent; a rise of 1.5 is no chance.

    python -m benchmarks.stability --steps 10000 --only "512 latents, k = 16"    # longer
"""

from __future__ import annotations

from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import khot
from benchmarks import report
from benchmarks.sae import sums

PATH = Path(__file__).parent / "results" / "stability.md"
LATENTS, NUMBERS, RATES = (512, 2048, 16_384), (4, 16, 128), (3e-4, 1e-3, 3e-3, 1e-2)
OPTIONS: dict[str, dict[str, Any]] = {
    "batch": {"batch": True},
    "widths": {"widths": [64, 256, 1024]},
    "batch, widths": {"batch": True, "widths": [64, 256, 1024]},
    "bfloat16": {"dtype": torch.bfloat16},
    "bfloat16, batch": {"dtype": torch.bfloat16, "batch": True},
    "straight-through": {"tau": 0.1, "hard": True},
}
STEPS, START, RISE = 200, 20, 1.5


def measure(latents: int, k: int, rate: float, options: dict[str, Any], steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    x, test = vectors()
    sae = khot.nn.TopKSAE(x.shape[-1], latents, k, **options)
    x, test = x.to(sae.shift.dtype), test.to(sae.shift.dtype)
    try:
        record = khot.nn.fit_sae(sae, x, steps, lr=rate, decay=0, every=1)
    except FloatingPointError as error:
        return {"stopped": str(error)}
    lowest, rise = record[START]["error"], 1.0
    for row in record[START:]:
        rise, lowest = max(rise, row["error"] / lowest), min(lowest, row["error"])
    with torch.no_grad():
        used = torch.cat([sae.eval().encode(part).gt(0).any(0)[None] for part in test.split(500)]).any(0)
    unexplained = khot.nn.unexplained(sae, test).item()
    return {"unexplained": 100 * unexplained, "dead": 100 * (~used).double().mean().item(), "rise": rise}


@lru_cache(1)
def vectors() -> tuple[Tensor, Tensor]:
    x, test = sums()
    return x, test[:2000]


def cell(found: dict[str, Any] | None) -> str:
    if found is None:
        return "–"
    if "stopped" in found:
        return "stopped"
    rise = f", **rise {found['rise']:.1f}**" if found["rise"] > RISE else ""
    return f"{found['unexplained']:.1f} ({found['dead']:.0f}{rise})"


def every_case() -> list[tuple[str, int, int, dict[str, Any]]]:
    cases: list[tuple[str, int, int, dict[str, Any]]] = [
        (f"{n} latents, k = {k}", n, k, {}) for n in LATENTS for k in NUMBERS
    ]
    cases += [(f"2048 latents, k = 16, {name}", 2048, 16, options) for name, options in OPTIONS.items()]
    return cases


def main() -> None:
    parser = report.parser("where the training of sparse autoencoders is steady", steps=STEPS, out=PATH)
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="WORDS", help="rows with any of these words"
    )
    args = parser.parse_args()
    cases = [case for case in every_case() if any(words in case[0] for words in args.only)]
    todo = {
        f"{name}, {rate:g}": partial(measure, latents, k, rate, options, args.steps)
        for name, latents, k, options in sorted(cases, key=lambda case: case[1])  # the short ones first
        for rate in RATES
    }
    setting = {"steps": args.steps, **report.machine(cpu_time=True)}
    report.complete(args.out, setting, todo, write, f"_{args.steps}" * (args.steps != STEPS))


def write(path: Path, _: report.Results) -> None:
    """A table for each number of steps."""
    text = (
        "# Where the training of sparse autoencoders is steady\n\nVariance of new vectors unexplained, % "
        "(latents that none of them uses, %; and how far the error of a batch rises above the smallest one "
        f"before it, where that is more than {RISE})."
    )
    for results in report.by_steps(path):
        setting, cases = results["setting"], results["cases"]
        rows = [
            [name, *(cell(cases.get(f"{name}, {rate:g}")) for rate in RATES)]
            for name, *_ in every_case()
            if any(f"{name}, {rate:g}" in cases for rate in RATES)
        ]
        text += f"\n\n## {setting['steps']:,} steps\n\n"
        text += report.table(["rate", *(f"{rate:g}" for rate in RATES)], rows).strip()
        text += "\n\n" + report.said({key: value for key, value in setting.items() if key != "steps"})
    path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
