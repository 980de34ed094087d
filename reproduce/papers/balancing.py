"""How fast do biases balance the load of experts? (quantile-balancing)

Each token of a batch gets the k of E experts with the largest biased scores s + b. After every update of the
biases we measure how far the largest load is above the mean,

    violation = max_e load_e / mean load − 1,

on the batch that the biases were computed from, after 10 updates also on a fresh batch. Every method gets the
same tokens, all of them in each update:

- khot: `khot.nn.QuantileBalancer`, whose 1,024 bins follow the bits of the distance from a token's cutoff.
- exact: the same step with the exact quantiles of all tokens. It needs all scores at once.
- histogram: quantiles of the bias at which an expert would just get a token, cutoff − score with one cutoff
  per token, from 1,000 bins of equal width between the smallest bias less 1 and the largest bias plus 1.
- micro-batches: exact quantiles of the same of each of 8 parts of the batch, and their average.
- sign rule: each bias moves by 0.001 towards the mean load.
- cold start: `QuantileBalancer.solve`, without any update.

    python -m reproduce balancing

The logits are synthetic: tokens lie around 64 centres, each expert has a direction and a preference of its
own, so that the loads differ widely without biases. They are used as they are, as sigmoid scores, and as
small scores (the sigmoid of the logit less 6). The rules are written from their descriptions, and with no
framework's code. A batch does not change between updates, as it would in training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

import khot
from reproduce.harness import reporting, study
from reproduce.tasks.balancers import centred, histogram, load, sign_rule, wanted

__all__ = [
    "EXPERIMENT",
    "KINDS",
    "RULES",
    "Args",
    "batches",
    "report",
    "run",
    "trials",
    "violation",
]

KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "logits": lambda x: x,
    "sigmoid": torch.sigmoid,
    "small": lambda x: torch.sigmoid(x - 6),
}
SHOWN = (1, 3, 10)  # updates
FEATURES, CENTRES = 32, 64
MICRO_BATCHES = 8


@dataclass(frozen=True)
class Args(study.Args):
    """The batches of tokens."""

    seeds: int = field(default=2, metadata={"help": "Number of seeds; they are 0, 1, ...", "selects": True})
    tokens: int = field(default=8_192, metadata={"help": "Tokens per batch."})
    experts: str = field(
        default="64,256", metadata={"help": "Numbers of experts, with commas.", "selects": True}
    )
    ks: str = field(
        default="2,8", metadata={"help": "Numbers of experts per token, with commas.", "selects": True}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("experts", "ks"):
            if not all(part.isdecimal() and int(part) > 0 for part in getattr(self, name).split(",")):
                raise study.ArgumentError(f"{name} = {getattr(self, name)!r}: expected numbers such as 2,8")
        if max(_numbers(self.ks)) >= min(_numbers(self.experts)):
            raise study.ArgumentError(f"ks = {self.ks!r}: expected less than the experts, {self.experts}")


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def trials(args: Args) -> list[study.Trial]:
    return [
        {"scores": kind, "experts": experts, "k": k, "seed": seed}
        for kind in KINDS
        for experts in _numbers(args.experts)
        for k in _numbers(args.ks)
        for seed in range(args.seeds)
    ]


def batches(tokens: int, experts: int, seed: int) -> tuple[Tensor, Tensor]:
    """Two batches of logits (tokens, experts) from the same distribution."""
    random = torch.Generator().manual_seed(seed)
    directions = torch.randn(FEATURES, experts, generator=random)
    centres = torch.randn(CENTRES, FEATURES, generator=random)
    preferences = torch.randn(experts, generator=random)

    def batch() -> Tensor:
        x = centres[torch.randint(CENTRES, (tokens,), generator=random)]
        x = x + torch.randn(tokens, FEATURES, generator=random)
        return 1.5 / math.sqrt(2 * FEATURES) * (x @ directions) + preferences

    return batch(), batch()


def violation(scores: Tensor, bias: Tensor, k: int) -> float:
    """The largest load over the mean load, less 1."""
    loads = load(scores, bias, k)
    return (loads.max() / loads.mean() - 1).item()


def _exact(scores: Tensor, bias: Tensor, k: int, updates: int) -> Tensor:
    """The step of `khot.nn.QuantileBalancer`, from all distances. `updates` is how many came before."""
    biased = scores + bias
    best = biased.topk(k + 1, -1)
    last, after = best.values[:, k - 1 :].split(1, -1)
    chosen = torch.zeros_like(biased, dtype=torch.bool).scatter(-1, best.indices[:, :k], True)
    cutoff = torch.where(chosen, after, last) if updates % 2 == 0 else (last + after) / 2
    distance = (cutoff - biased).sort(0).values
    share = k / scores.shape[-1] * len(scores)
    low, high = distance[math.ceil(share) - 1], distance[math.floor(share)]  # all between them are quantiles
    bias = bias + torch.zeros_like(bias).clamp(low, high)
    return bias - bias.max()


def _quantiles(scores: Tensor, bias: Tensor, k: int, updates: int) -> Tensor:
    return centred(wanted(scores, bias, k).quantile(k / scores.shape[-1], 0))


def _micro_batches(scores: Tensor, bias: Tensor, k: int, updates: int) -> Tensor:
    return torch.stack([_quantiles(part, bias, k, updates) for part in scores.chunk(MICRO_BATCHES)]).mean(0)


def _khot(experts: int, k: int) -> Callable[[Tensor], Tensor]:
    balancer = khot.nn.QuantileBalancer(experts, k)

    def update(scores: Tensor) -> Tensor:
        balancer(scores)
        balancer.update()
        return balancer.bias.clone()

    return update


def _from_zero(
    step: Callable[[Tensor, Tensor, int, int], Tensor],
) -> Callable[[int, int], Callable[[Tensor], Tensor]]:
    """The rule that takes this step again and again."""

    def start(experts: int, k: int) -> Callable[[Tensor], Tensor]:
        biases = [torch.zeros(experts)]

        def update(scores: Tensor) -> Tensor:
            biases.append(step(scores, biases[-1], k, len(biases) - 1))
            return biases[-1]

        return update

    return start


#: E and k → one update: scores → the next bias. The first bias is 0.
RULES: dict[str, Callable[[int, int], Callable[[Tensor], Tensor]]] = {
    "khot": _khot,
    "exact": _from_zero(_exact),
    "histogram": _from_zero(histogram),
    "micro-batches": _from_zero(_micro_batches),
    "sign rule": _from_zero(sign_rule),
}
COLD = "cold start"


def run(args: Args, trial: study.Trial, checkpoint: study.Checkpoint) -> Iterator[study.Row]:
    experts, k = int(trial["experts"]), int(trial["k"])
    logits, fresh = batches(args.tokens, experts, int(trial["seed"]))
    score = KINDS[str(trial["scores"])]
    x, other = score(logits), score(fresh)
    for method, rule in RULES.items():
        bias, update = torch.zeros(experts), rule(experts, k)
        yield {"method": method, "step": 0, "violation": violation(x, bias, k)}
        for step in range(1, max(SHOWN) + 1):
            bias = update(x)
            yield {"method": method, "step": step, "violation": violation(x, bias, k)}
        yield {"method": method, "fresh": violation(other, bias, k)}
    balancer = khot.nn.QuantileBalancer(experts, k)
    balancer.solve(x)
    yield {"method": COLD, "step": 0, "violation": violation(x, balancer.bias, k)}
    yield {"method": COLD, "fresh": violation(other, balancer.bias, k)}


def report(args: Args, rows: list[study.Row], folder: Path) -> str:
    """A table for each kind of scores, and the courses."""
    parts = []
    for kind in KINDS:
        lines = []
        for experts in _numbers(args.experts):
            for k in _numbers(args.ks):
                here = reporting.where(rows, scores=kind, experts=experts, k=k)
                for method in (*RULES, COLD):
                    own = reporting.where(here, method=method)
                    steps = [
                        reporting.column(reporting.where(own, step=step), "violation")
                        for step in ((0, 0, 0) if method == COLD else SHOWN)
                    ]
                    if method == COLD:
                        steps = [steps[0], [], []]
                    cells = [reporting.spread(values) for values in steps]
                    fresh = reporting.spread(reporting.column(own, "fresh"))
                    lines.append([f"E = {experts}, k = {k}: {method}", *cells, fresh])
        head = ["", *(f"{n} update{'s' * (n > 1)}" for n in SHOWN), "fresh batch"]
        parts.append(f"Scores: {kind}\n\n" + reporting.table(head, lines))
    _draw(args, rows, folder / "violation.png")
    text = "\n".join(parts)
    return (
        f"Largest load over the mean load, less 1, in batches of {args.tokens:,} tokens. The first column "
        f"has that of the cold start, too.\n\n{text}\n![Load violation after each update](violation.png)"
    )


def _draw(args: Args, rows: list[study.Row], path: Path) -> None:
    """Plot the violation after each update, at the most experts and the largest k."""
    experts, k = max(_numbers(args.experts)), max(_numbers(args.ks))
    figure, plots = reporting.figure(len(KINDS), width=11)
    colors = (*reporting.COLORS, reporting.GREY)
    for plot, kind in zip(plots, KINDS, strict=True):
        here = reporting.where(rows, scores=kind, experts=experts, k=k)
        for method, color in zip(RULES, colors, strict=False):
            steps, values = reporting.curve(reporting.where(here, method=method), "violation")
            dashed = "--" if method == "exact" else "-"
            plot.plot(
                steps, values, color=color, linestyle=dashed, label=method if kind == "logits" else None
            )
        plot.set_title(f"{kind}, E = {experts}, k = {k}")
        plot.set_xlabel("updates")
        reporting.log_axis(plot)
    plots[0].set_ylabel("largest load / mean load − 1")
    figure.legend(frameon=False, fontsize=9, loc="outside right center")
    figure.savefig(path, dpi=120)


EXPERIMENT = study.Experiment(
    source="quantile-balancing",
    needs="nothing",
    takes="3 min of one core",
    Args=Args,
    smoke={"seeds": 1, "tokens": 512, "experts": "16", "ks": "2"},
    trials=trials,
    run=run,
    report=report,
)
