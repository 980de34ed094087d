"""Algorithm 1 beside SIMPLE (Figure 6, right, of sigmoid-topk): `python -m benchmarks.simple`.

One k-hot sample of each row with its gradient, forward and backward together: the time, and the largest
growth of the process. SIMPLE's programme is written
anew from its description: log P(j of the first m trials) by dynamic programming, O(nk) and vectorised
over the rows and j; an exact sample, from the last trial back to the first; the marginals as the gradient of
log P(k of n), which is what backward differentiates. khot's own `simple` has the same distribution and
gradient in O(n). Unlike in the paper, nothing is compiled or precomputed. Nothing is reported if the
programme's gradient is not that of khot's marginals.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import report, timing
from khot import estimators
from khot.sampling import conditional_poisson

ROWS, SIZES = 32, (100, 200, 400, 800, 1_600)  # k = n/10
PLOT = Path(__file__).parent / "results" / "simple.png"


def counts(logits: Tensor, k: int) -> list[Tensor]:
    """For m = 0, ..., n: log P(j of the first m trials succeed), (rows, k + 1)."""
    yes, no = torch.nn.functional.logsigmoid(logits), torch.nn.functional.logsigmoid(-logits)
    # with −inf the gradients would be NaN, and with logaddexp the second derivatives
    row = torch.full((len(logits), k + 1), -1e30, dtype=logits.dtype)
    row[:, 0] = 0
    rows = [row]
    for m in range(logits.shape[-1]):
        fewer = torch.nn.functional.pad(row[:, :-1], (1, 0), value=-1e30)
        row = torch.stack((row + no[:, m, None], fewer + yes[:, m, None])).logsumexp(0)
        rows.append(row)
    return rows


def published(logits: Tensor, k: int) -> Tensor:
    """A sample with the gradient of the marginals."""
    with torch.enable_grad():
        leaf = logits if logits.requires_grad else logits.detach().requires_grad_()
        rows = counts(leaf, k)
        (marginals,) = torch.autograd.grad(rows[-1][:, k].sum(), leaf, create_graph=True)
    # the derivative of log P(k of n) in the logits is the marginal less the probability of the trial
    marginals = marginals + leaf.sigmoid()
    with torch.no_grad():
        sample = torch.zeros_like(logits)
        left = torch.full((len(logits), 1), k)
        yes = torch.nn.functional.logsigmoid(logits)
        uniform = torch.rand(logits.shape).log()
        for m in reversed(range(logits.shape[-1])):
            fewer = rows[m].gather(-1, (left - 1).clamp(min=0)).masked_fill(left == 0, -math.inf)
            chosen = uniform[:, m, None] < fewer + yes[:, m, None] - rows[m + 1].gather(-1, left)
            sample[:, m, None] = chosen.to(sample)
            left = left - chosen.long()
    return sample + (marginals - marginals.detach())


def check(logits: Tensor, k: int) -> None:
    """Raise unless the programme samples k of n and has the right gradient."""
    x = logits.double().requires_grad_()
    sample, weight = published(x, k), torch.linspace(-1, 1, x.shape[-1], dtype=x.dtype)
    (got,) = torch.autograd.grad((sample * weight).sum(), x)
    (want,) = torch.autograd.grad((conditional_poisson.marginals(x, k) * weight).sum(), x)
    if not (bool((sample.sum(-1).round() == k).all()) and torch.allclose(got, want, atol=1e-8)):
        raise SystemExit("SIMPLE's programme is wrong: nothing is reported")


def both(draw: Callable[[Tensor], Tensor], logits: Tensor, weight: Tensor) -> Tensor:
    """The gradient of a weighted sum of one sample of each row."""
    leaf = logits.detach().requires_grad_()
    (grad,) = torch.autograd.grad((draw(leaf) * weight).sum(), leaf)
    return grad


def main() -> None:
    seconds, clock = report.begin("Algorithm 1 beside SIMPLE, on the CPU", 0.3)
    check(torch.randn(4, SIZES[0], generator=torch.Generator().manual_seed(0)), SIZES[0] // 10)
    calls: dict[int, dict[str, timing.Call]] = {}
    for n in SIZES:
        logits = torch.randn(ROWS, n, generator=torch.Generator().manual_seed(0))
        draws: dict[str, Callable[[Tensor], Tensor]] = {
            "Algorithm 1 (straight_through, pareto)": partial(estimators.straight_through, k=n // 10),
            "khot.estimators.simple": partial(estimators.simple, k=n // 10),
            "SIMPLE, by dynamic programming": partial(published, k=n // 10),
        }
        weight = torch.arange(float(n))
        calls[n] = {name: partial(both, draw, logits, weight) for name, draw in draws.items()}
    ours, *others = names = list(calls[SIZES[0]])
    # memory comes first: a process that has timed keeps the memory that it frees
    memory = {n: {name: report.peak_memory(call) for name, call in calls[n].items()} for n in SIZES}
    times = {n: timing.medians(calls[n], seconds=seconds, clock=clock) for n in SIZES}
    heads = [f"n = {n:,}" for n in SIZES]
    rows = [[ours, *(f"{times[n][ours] * 1e3:.3g} ms" for n in SIZES)]]
    rows += [[name, *(report.ratio(times[n][name] / times[n][ours]) for n in SIZES)] for name in others]
    title = f"forward and backward, {ROWS} rows, k = n/10"
    print(report.table([f"{title}, in Algorithm 1", *heads], rows))
    rows = [[name, *(report.megabytes(memory[n][name]) for n in SIZES)] for name in names]
    print(report.table([f"{title}, MB", *heads], rows))
    panels: dict[str, report.Curves] = {
        f"seconds: {title}": {name: [(n, times[n][name]) for n in SIZES] for name in names},
        "memory, MB": {name: [(n, (memory[n][name] or 0) / 1e6) for n in SIZES] for name in names},
    }
    report.loglog(PLOT, panels, "n", names[:2])


if __name__ == "__main__":
    main()
