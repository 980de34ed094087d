"""What does an even load cost a language model, and what does it bring? (quantile-balancing, in a model)

A small transformer learns to write documentation, letter by letter. In each of its 2 layers, every letter
goes to 2 of 16 experts. The text is the documentation of the installed Python: its help topics, and the
docstrings and the licence of its standard library. Every tenth part of 2,048 letters is kept for the test.
The methods differ in how they keep some experts from getting most of the letters:

- nothing: the 2 experts with the largest logits, and no more.
- auxiliary loss 0.01 and 0.1: the same, with experts · Σ_e (share of the letters of e) · (mean probability of
  e) of both layers in the loss, with this weight.
- sign rule 0.001 and 0.01: a bias for each expert, which the choice adds to the logits. After each step it
  moves by this rate towards the mean load.
- histogram: the biases are quantiles of those at which an expert would just get a letter, from 1,000 bins of
  equal width between the smallest bias less 1 and the largest plus 1.
- khot: `khot.nn.QuantileBalancer`.
- balanced: `khot.nn.BalancedRouter`, soft in training, with a temperature that falls from 1 to 0.05.
- expert choice: `khot.nn.ExpertChoiceRouter` with the same temperature. Its experts choose among the letters
  of a context, later ones included, so that its loss is not that of a model that can write.

All but the last two are a `khot.nn.TopKRouter`. All have the same start, the same text, 1,000 steps of 16
contexts of 128 letters, and AdamW with a rate of 3e-3 that falls to 0 along a cosine. The logits are those of
the router's map alone; the weights of the experts have no bias. Nothing was tuned for any method.

All are judged in eval mode, with a hard choice, on the same text that was not trained on:

- loss: the cross-entropy of the next letter, in nats;
- violation: the largest load of an expert over the mean load, less 1, in the worse layer, as a mean over
  batches of 2,048 letters; it says how much longer the layer takes if each expert is on a device of its own;
- least load: the smallest load over the mean, of both layers and all letters of the test;
- the CPU time of a training step. In the soft ones every expert computes every letter.

    python -m reproduce experts

Departures: the rules are written from their descriptions, and with no framework's code.
"""

from __future__ import annotations

import ast
import functools
import math
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import khot
from reproduce.harness import reporting, study, training
from reproduce.harness.study import Checkpoint, Row, Trial
from reproduce.tasks.balancers import histogram, sign_rule

__all__ = [
    "EXPERIMENT",
    "METHODS",
    "Args",
    "LanguageModel",
    "Layer",
    "letters",
    "report",
    "router_of",
    "run",
    "trials",
]

LETTERS, PART, SIZE, LAYERS, HEADS, EXPERTS, K, HIDDEN = 128, 2_048, 64, 2, 4, 16, 2, 128
BATCH, RATE, HOT, COLD = 16, 3e-3, 1.0, 0.05
LOSSES = {"auxiliary loss 0.01": 0.01, "auxiliary loss 0.1": 0.1}
RULES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sign rule 0.001": lambda logits, bias: sign_rule(logits, bias, K, rate=1e-3),
    "sign rule 0.01": lambda logits, bias: sign_rule(logits, bias, K, rate=1e-2),
    "histogram": lambda logits, bias: histogram(logits, bias, K),
}
METHODS = ("nothing", *LOSSES, *RULES, "khot", "balanced", "expert choice")


@dataclass(frozen=True)
class Args(study.Args):
    """The methods, and their training."""

    methods: tuple[str, ...] = field(
        default=METHODS, metadata={"help": f"Methods, out of: {'; '.join(METHODS)}.", "selects": True}
    )
    steps: int = field(default=1_000, metadata={"help": "Steps of training."})
    context: int = field(default=128, metadata={"help": "Letters of a context."})
    test: int = field(default=64, metadata={"help": "Batches of the test, each of 16 contexts."})
    points: int = field(default=50, metadata={"help": "Number of points of the curves."})

    def __post_init__(self) -> None:
        super().__post_init__()
        study.check_choices("methods", self.methods, METHODS)


@functools.lru_cache(maxsize=1)
def letters() -> tuple[Tensor, Tensor]:
    """The text to learn from, and the text to test on, as ASCII codes."""
    texts = [topics[name] for name in sorted(topics)]
    library = Path(sysconfig.get_path("stdlib"))
    texts += [path.read_text("utf-8") for path in library.glob("LICENSE.txt")]
    for path in sorted(library.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                texts.append(ast.get_docstring(node) or "")
    codes = torch.frombuffer(
        bytearray("\n\n".join(filter(None, texts)).encode("ascii", "ignore")), dtype=torch.uint8
    )
    parts = codes[: len(codes) // PART * PART].view(-1, PART).long()
    held = torch.arange(len(parts)) % 10 == 9
    return parts[~held].flatten(), parts[held].flatten()


class _Biased(khot.nn.TopKRouter):
    """A router whose choice has a bias that a rule moves after each step."""

    bias: Tensor

    def __init__(self, rule: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(SIZE, EXPERTS, K)
        self.rule, self.seen = rule, torch.empty(0)
        self.register_buffer("bias", torch.zeros(EXPERTS))

    def _choose(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        self.seen = scores.detach().flatten(0, -2)
        return (scores.detach() + self.bias).topk(K).indices

    def update(self) -> None:
        self.bias = self.rule(self.seen, self.bias)


def router_of(
    method: str, steps: int
) -> khot.nn.TopKRouter | khot.nn.BalancedRouter | khot.nn.ExpertChoiceRouter:
    if method in RULES:
        return _Biased(RULES[method])
    if method == "balanced":
        return khot.nn.BalancedRouter(SIZE, EXPERTS, K, tau=khot.nn.Anneal(HOT, COLD, steps))
    if method == "expert choice":
        return khot.nn.ExpertChoiceRouter(SIZE, EXPERTS, K, tau=khot.nn.Anneal(HOT, COLD, steps))
    balancer = khot.nn.QuantileBalancer(EXPERTS, K) if method == "khot" else None
    return khot.nn.TopKRouter(SIZE, EXPERTS, K, balancer=balancer)


class Layer(nn.Module):
    """Attention to earlier letters, and a mixture of experts."""

    def __init__(self, method: str, steps: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(SIZE), nn.LayerNorm(SIZE)
        self.inward, self.outward = nn.Linear(SIZE, 3 * SIZE), nn.Linear(SIZE, SIZE)
        experts = [
            nn.Sequential(nn.Linear(SIZE, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, SIZE)) for _ in range(EXPERTS)
        ]
        self.mixture = khot.nn.MixtureOfExperts(router_of(method, steps), experts)

    def forward(self, x: Tensor) -> tuple[Tensor, khot.nn.Routing | khot.nn.TopKRouting]:
        q, k, v = self.inward(self.before(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.outward(attended.transpose(1, 2).flatten(-2))
        output, routing = self.mixture(self.between(x))
        return x + output, routing


class LanguageModel(nn.Module):
    """Letters (batch, context) → logits of the next ones, and what the routers of the layers decided."""

    def __init__(self, method: str, context: int, steps: int) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(LETTERS, SIZE), nn.Embedding(context, SIZE)
        self.layers = nn.ModuleList(Layer(method, steps) for _ in range(LAYERS))
        self.after, self.next = nn.LayerNorm(SIZE), nn.Linear(SIZE, LETTERS)

    def forward(self, text: Tensor) -> tuple[Tensor, list[khot.nn.Routing | khot.nn.TopKRouting]]:
        x = self.letters(text) + self.places.weight[: text.shape[-1]]
        routings = []
        for layer in self.layers:
            x, routing = layer(x)
            routings.append(routing)
        return self.next(self.after(x)), routings

    def update(self) -> None:
        """After a step of the optimizer: the biases, and the temperatures."""
        khot.nn.QuantileBalancer.update_all(self)
        for part in self.modules():
            if isinstance(part, _Biased):
                part.update()
            elif isinstance(part, khot.nn.Anneal):
                part.step()


def trials(args: Args) -> list[Trial]:
    return [{"method": method, "seed": seed} for seed in range(args.seeds) for method in args.methods]


def run(args: Args, trial: Trial, checkpoint: Checkpoint) -> Iterator[Row]:
    method, seed = str(trial["method"]), int(trial["seed"])
    text, test = letters()
    torch.manual_seed(seed)
    model = LanguageModel(method, args.context, args.steps).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    schedule = training.lr_schedule(optimizer, training.cosine, args.steps)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule}
    every = max(1, args.steps // args.points)
    violations, start = [], time.process_time()
    for step in training.steps(checkpoint, state, args.steps):
        random = torch.Generator().manual_seed(1_000_000 * seed + step)
        starts = torch.randint(len(text) - args.context, (BATCH, 1), generator=random)
        loss, routings = _loss(model.train(), text[starts + torch.arange(args.context)].to(args.device))
        violations.append(max(_violation(routing.load) for routing in routings))
        for routing in routings if method in LOSSES else []:
            assert isinstance(routing, khot.nn.TopKRouting)
            probs = routing.logits.softmax(-1).flatten(0, -2).mean(0)
            loss = loss + LOSSES[method] * EXPERTS * (routing.load / K * probs).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        model.update()
        if (step + 1) % every == 0:
            yield {
                "step": step + 1,
                "violation_now": math.fsum(violations) / len(violations),
                "ms": 1000 * (time.process_time() - start) / len(violations),
            }
            violations, start = [], time.process_time()
    yield _judge(
        model, test[: args.test * BATCH * args.context].view(-1, BATCH, args.context).to(args.device)
    )


def _loss(model: LanguageModel, text: Tensor) -> tuple[Tensor, list[khot.nn.Routing | khot.nn.TopKRouting]]:
    logits, routings = model(text)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), text[:, 1:].flatten()), routings


def _violation(load: Tensor) -> float:
    return (load.max() / load.mean() - 1).item()


@torch.no_grad()
def _judge(model: LanguageModel, batches: Tensor) -> Row:
    losses, violations, loads = [], [], []
    for batch in batches:
        loss, routings = _loss(model.eval(), batch)
        losses.append(loss.item())
        loads.append(torch.stack([routing.load for routing in routings]))
        violations.append(max(map(_violation, loads[-1])))
    whole = torch.stack(loads).mean(0)
    return {
        "loss": math.fsum(losses) / len(losses),
        "violation": math.fsum(violations) / len(violations),
        "least": (whole / whole.mean(-1, keepdim=True)).min().item(),
    }


def report(args: Args, rows: list[Row], folder: Path) -> str:
    lines = []
    for method in args.methods:
        found = reporting.where(rows, method=method)
        times = sorted(reporting.column(found, "ms"))
        lines.append(
            (
                method,
                *(
                    reporting.spread(reporting.column(found, name), digits)
                    for name, digits in (("loss", 3), ("violation", 2), ("least", 2))
                ),
                f"{times[len(times) // 2]:.0f}" if times else "–",
            )
        )
    _draw(args, rows, folder / "experts.png")
    head = ("balanced by", "loss", "violation", "least load", "ms a step")
    return f"""{reporting.table(head, lines)}
Mean and standard deviation over the seeds; of the times the median.

In training the soft ways are even by construction, and below the picture.

![Violation in the course of training, and loss and violation at its end](experts.png)
"""


def _draw(args: Args, rows: list[Row], path: Path) -> None:
    figure, (left, right) = reporting.figure(2, width=12)
    colors = (*reporting.COLORS, "#e3b505", "#6b4226")
    for method, color in zip(METHODS, colors, strict=True):
        found = reporting.where(rows, method=method)
        if not found:
            continue
        steps, values = reporting.curve(found, "violation_now")
        left.plot(steps, values, color=color, linewidth=2, label=method)
        violations, losses = (reporting.column(found, name) for name in ("violation", "loss"))
        right.plot(violations, losses, "o", color=color, markersize=8)
    left.set_xlabel("step")
    left.set_ylabel("largest load over the mean, less 1")
    left.set_title("In training", fontsize=13)
    right.set_xlabel("largest load over the mean, less 1")
    right.set_ylabel("loss")
    right.set_title("On new text, one point per seed", fontsize=13)
    left.set_ylim(bottom=0.1)  # loads that are even by construction are below
    reporting.log_axis(left)
    figure.legend(frameon=False, fontsize=9, loc="outside right center")
    figure.savefig(path, dpi=120)


EXPERIMENT = study.Experiment(
    source="quantile-balancing",
    needs="nothing",
    takes="1 h of one core",
    Args=Args,
    smoke={"steps": 3, "context": 16, "test": 1, "points": 1, "seeds": 1},
    trials=trials,
    run=run,
    report=report,
)
