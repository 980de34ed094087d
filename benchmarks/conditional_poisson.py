"""What conditional Poisson sampling costs: `python -m benchmarks.conditional_poisson`.

log_prob beside the log-domain dynamic programme that it replaces, marginals with gradients beside log_prob,
exact draws beside pareto's (one torch.topk), and log_prob from n = 10^3 to 10^6: all calls of a table take
turns, medians. Nothing is reported if the two normalizers differ.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import khot
from benchmarks import report, timing
from khot.sampling import conditional_poisson, sample

AGAINST_PROGRAMME = {(128, 1_000): 3.0, (1, 10_000): 20.0}  # shape → the goal; k = n/2
GRADIENT_GOAL, DRAW_GOAL = 4.0, 20.0
DRAWS = {(128, 1_000): 100, (100, 10_000): 1_000, (1, 1_000_000): 500_000}
SIZES = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
OF_THE_PROGRAMME = 10_000  # the largest n that it is timed at by size
PLOT = Path(__file__).parent / "results" / "conditional_poisson.png"


def logits(rows: int, n: int) -> Tensor:
    """N(0, s²), s from 0.3 to 3 evenly over the rows; float64."""
    spread = torch.linspace(0.3, 3, rows, dtype=torch.float64).unsqueeze(-1)
    return torch.randn(rows, n, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * spread


def k_hot(rows: int, n: int, k: int) -> Tensor:
    noise = torch.rand(rows, n, generator=torch.Generator().manual_seed(1))
    return khot.topk_mask(noise, k).double()


def dynamic_programme(value: Tensor, theta: Tensor, k: int) -> Tensor:
    """log_prob in O(nk): log Z_j ← logaddexp(log Z_j, log Z_(j−1) + θ), unit by unit."""
    log_z = theta.new_full((*theta.shape[:-1], k + 1), -torch.inf)
    log_z[..., 0] = 0
    for unit in theta.unbind(-1):
        grown = torch.logaddexp(log_z[..., 1:], log_z[..., :-1] + unit.unsqueeze(-1))
        log_z = torch.cat((log_z[..., :1], grown), -1)
    return (value * theta).sum(-1) - log_z[..., -1]


def against_programme(shape: tuple[int, int], seconds: float, clock: timing.Clock) -> list[str]:
    theta, k = logits(*shape), shape[1] // 2
    value = k_hot(*shape, k)
    new = partial(conditional_poisson.log_prob, value, theta, k)
    old = partial(dynamic_programme, value, theta, k)
    if not torch.allclose(new(), old(), rtol=1e-10, atol=1e-10):
        raise SystemExit(f"the two normalizers differ at {shape}: nothing is reported")
    gradients = timing.forward_backward(partial(conditional_poisson.marginals, k=k), theta)
    times = timing.medians({"old": old, "new": new, "both": gradients}, seconds=seconds, clock=clock)
    return [
        f"{shape}, k = {k}",
        f"{times['new'] * 1e3:.3g} ms",
        f"{times['old'] / times['new']:.3g} (≥ {AGAINST_PROGRAMME[shape]:g})",
        f"{times['both'] / times['new']:.2f} (≤ {GRADIENT_GOAL:g})",
    ]


def against_pareto(shape: tuple[int, int], seconds: float, clock: timing.Clock) -> list[str]:
    theta, k = logits(*shape), DRAWS[shape]
    probs = khot.sigmoid_topk(theta, k)
    calls = {
        "draw": partial(conditional_poisson.sample, theta, k),
        "pareto": partial(sample, probs),
        "topk": partial(torch.topk, theta, k),
    }
    times = timing.medians(calls, seconds=seconds, clock=clock)
    return [
        f"{shape}, k = {k}",
        f"{times['draw'] * 1e3:.3g} ms",
        f"{times['draw'] / times['pareto']:.1f} (≤ {DRAW_GOAL:g})",
        f"{times['draw'] / times['topk']:.1f}",
    ]


def by_size(seconds: float, clock: timing.Clock) -> tuple[list[list[str]], report.Curves]:
    """log_prob of one row, k = n/2: the cost per unit; and the curves, with the dynamic programme's."""
    rows, curves = [], {"conditional_poisson.log_prob": [], "dynamic programme, O(nk)": []}
    for n in SIZES:
        arguments = k_hot(1, n, n // 2), logits(1, n), n // 2
        calls = {
            name: partial(f, *arguments)
            for name, f in zip(curves, (conditional_poisson.log_prob, dynamic_programme), strict=True)
        }
        if n > OF_THE_PROGRAMME:
            del calls["dynamic programme, O(nk)"]
        times = timing.medians(calls, seconds=seconds, clock=clock)
        for name, t in times.items():
            curves[name].append((n, t))
        t = times["conditional_poisson.log_prob"]
        rows.append([f"{n:,}", f"{t * 1e3:.3g} ms", f"{t / n * 1e9:.0f} ns"])
    return rows, curves


def main() -> None:
    seconds, clock = report.begin("conditional Poisson sampling, on the CPU")
    rows = [against_programme(shape, seconds, clock) for shape in AGAINST_PROGRAMME]
    header = ["shape", "log_prob", "dynamic programme, in log_prob", "marginals with gradients, in log_prob"]
    print(report.table(header, rows) + "\n")
    rows = [against_pareto(shape, seconds, clock) for shape in DRAWS]
    print(report.table(["shape", "exact draw", "in pareto", "in torch.topk"], rows) + "\n")
    rows, curves = by_size(seconds, clock)
    print(report.table(["n", "log_prob", "a unit"], rows))
    title = "log p of one k-hot vector, k = n/2: seconds"
    PLOT.parent.mkdir(exist_ok=True)
    report.loglog(PLOT, {title: curves}, "n", ["conditional_poisson.log_prob"])


if __name__ == "__main__":
    main()
