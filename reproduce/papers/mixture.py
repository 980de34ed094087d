"""Which router finds the experts that a task needs? (sparse-topk, section 6, on another task)

Tokens come in 16 kinds: clusters in 16 dimensions, each with a rotation of its own that the model has to
imitate. Kinds are unequally frequent: the r-th has a share proportional to 1/√r, so that the first is four
times as frequent as the last. The model is a mixture of 16 linear experts with 2 experts per token. One
linear expert is exact for one kind and wrong for all others. The methods are:

- `token choice`: `khot.nn.TokenChoiceRouter`, soft in training.
- `expert choice`: `khot.nn.ExpertChoiceRouter`, soft in training; in eval mode each expert takes its tokens
  out of a row of 512.
- `balanced`: `khot.nn.BalancedRouter`, soft in training, with the same load for all experts in every batch.
- `hard`: the 2 experts of largest probability, in training, too; their outputs are multiplied by their
  probabilities among all experts, which is how the router gets a gradient.
- `hard + loss 0.01` and `hard + loss 0.1`: the same with the usual auxiliary loss for an even load, experts ·
  Σ_e (share of the tokens of e) · (mean probability of e), with these weights.

The temperature of the soft ones falls from 2 to 0.05 over the training. Every method has the same tokens, the
same first experts and routers, 1,500 steps of 512 new tokens, and Adam with a learning rate of 0.01 that
falls to 0 along a cosine; none of these numbers was tuned for any of the methods. All are judged in eval
mode, with a hard selection, on the same 8,192 new tokens:

- error: the share of the variance of the targets that is left unexplained; also for the 4 rarest kinds alone;
- violation: the largest load of an expert over the mean load, less 1;
- dropped: the share of the tokens that no expert gets.

    python -m reproduce mixture

Departures from the paper, whose Figure 7 shows classification with vision transformers of V-MoE: this is a
task made here, which takes minutes on one core, and the paper's numbers are not comparable with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import khot
from reproduce.harness import reporting, study, training
from reproduce.harness.study import Checkpoint, Row, Trial

__all__ = ["EXPERIMENT", "METHODS", "Args", "Tokens", "report", "router_of", "run", "trials"]

KINDS, DIM, K, ROW, TEST_ROWS, RARE = 16, 16, 2, 512, 16, 4
NOISE = 0.5  # of a token about the centre of its kind, whose entries have deviation 1
HOT, COLD, RATE = 2.0, 0.05, 1e-2
# the weight of the auxiliary loss of the methods that select hard in training
HARD = {"hard": 0.0, "hard + loss 0.01": 0.01, "hard + loss 0.1": 0.1}
METHODS = ("token choice", "expert choice", "balanced", *HARD)


@dataclass(frozen=True)
class Args(study.Args):
    """The methods, and their training."""

    methods: tuple[str, ...] = field(
        default=METHODS, metadata={"help": f"Methods, out of: {'; '.join(METHODS)}.", "selects": True}
    )
    steps: int = field(default=1_500, metadata={"help": "Steps of training."})
    points: int = field(default=30, metadata={"help": "Number of points of the curves."})

    def __post_init__(self) -> None:
        super().__post_init__()
        study.check_choices("methods", self.methods, METHODS)


class Tokens:
    """Clusters of unequal frequency with a rotation each."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        random = torch.Generator().manual_seed(seed)
        self.centres = torch.randn(KINDS, DIM, generator=random)
        self.rotations = torch.linalg.qr(torch.randn(KINDS, DIM, DIM, generator=random)).Q
        self.shares = torch.arange(1, KINDS + 1).rsqrt()

    def draw(self, rows: int, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """The sample of that number: tokens and targets (rows, 512, 16), and kinds (rows, 512)."""
        random = torch.Generator().manual_seed(1_000_000 * (self.seed + 1) + number)
        kinds = self.shares.multinomial(rows * ROW, replacement=True, generator=random)
        x = self.centres[kinds] + NOISE * torch.randn(rows * ROW, DIM, generator=random)
        y = (self.rotations[kinds] @ x.unsqueeze(-1)).squeeze(-1)
        return x.view(rows, ROW, DIM), y.view(rows, ROW, DIM), kinds.view(rows, ROW)


class _HardRouter(khot.nn.TokenChoiceRouter):
    """The k best experts in train mode, too, weighted by their probabilities among all."""

    def train(self, mode: bool = True) -> _HardRouter:
        super().train(False)
        return self

    def forward(self, input: Tensor, mask: Tensor | None = None) -> khot.nn.Routing:
        routing = super().forward(input, mask)
        return routing._replace(weights=routing.selection * self.probs(input))

    def probs(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight).softmax(-1)


def router_of(
    method: str, steps: int
) -> khot.nn.TokenChoiceRouter | khot.nn.ExpertChoiceRouter | khot.nn.BalancedRouter:
    """The router of a method; a soft one has its schedule as ``tau``."""
    if method in HARD:
        return _HardRouter(DIM, KINDS, K).eval()
    tau = khot.nn.Anneal(HOT, COLD, steps)
    if method == "token choice":
        return khot.nn.TokenChoiceRouter(DIM, KINDS, K, tau=tau)
    if method == "expert choice":
        return khot.nn.ExpertChoiceRouter(DIM, KINDS, K, tau=tau)
    return khot.nn.BalancedRouter(DIM, KINDS, K, tau=tau)


def trials(args: Args) -> list[Trial]:
    return [{"method": method, "seed": seed} for seed in range(args.seeds) for method in args.methods]


def run(args: Args, trial: Trial, checkpoint: Checkpoint) -> Iterator[Row]:
    method, tokens = str(trial["method"]), Tokens(int(trial["seed"]))
    router = router_of(method, args.steps)
    model = khot.nn.MixtureOfExperts(router, [nn.Linear(DIM, DIM) for _ in range(KINDS)]).to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    schedule = training.lr_schedule(optimizer, training.cosine, args.steps)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule}
    test = tokens.draw(TEST_ROWS, args.steps)  # a number that no step of the training has
    for step in training.steps(checkpoint, state, args.steps):
        x, y, _ = (part.to(args.device) for part in tokens.draw(1, step))
        output, routing = model.train()(x)
        loss = F.mse_loss(output, y)
        if isinstance(router, _HardRouter):
            probs = router.probs(x).flatten(0, -2).mean(0)
            loss = loss + HARD[method] * KINDS * (routing.load / K * probs).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if isinstance(router.tau, khot.nn.Anneal):
            router.tau.step()
        if (step + 1) % max(1, args.steps // args.points) == 0:
            yield {"step": step + 1, "error_now": _judge(model, test, args.device)["error"]}
    yield _judge(model, test, args.device)


@torch.no_grad()
def _judge(model: khot.nn.MixtureOfExperts, test: tuple[Tensor, Tensor, Tensor], device: str) -> Row:
    x, y, kinds = (part.to(device) for part in test)
    output, routing = model.eval()(x)
    squares, variances = (output - y).square().mean(-1), (y - y.flatten(0, -2).mean(0)).square().mean(-1)
    rare = kinds >= KINDS - RARE
    load = routing.load
    return {
        "error": (squares.mean() / variances.mean()).item(),
        "error_of_rare": (squares[rare].mean() / variances[rare].mean()).item(),
        "violation": (load.max() / load.mean() - 1).item(),
        "dropped": (routing.selection.sum(-1) == 0).float().mean().item(),
    }


def report(args: Args, rows: list[Row], folder: Path) -> str:
    lines = []
    for method in args.methods:
        found = reporting.where(rows, method=method)
        percent = {
            name: [100 * value for value in reporting.column(found, name)]
            for name in ("error", "error_of_rare", "dropped")
        }
        lines.append(
            (
                method,
                reporting.spread(percent["error"], 2),
                reporting.spread(percent["error_of_rare"], 2),
                reporting.spread(reporting.column(found, "violation"), 2),
                reporting.spread(percent["dropped"], 2),
            )
        )
    _draw(args, rows, folder / "mixture.png")
    head = ("router", "error, %", "error of the rare kinds, %", "violation", "dropped, %")
    return f"""{reporting.table(head, lines)}
Mean and standard deviation over the seeds. If every kind had the expert that it needs, the error would be 0.

![Error in the course of training, and error and violation of the load at its end](mixture.png)
"""


def _draw(args: Args, rows: list[Row], path: Path) -> None:
    from matplotlib.ticker import LogLocator

    figure, (left, right) = reporting.figure(2, width=12)
    for method, color in zip(METHODS, reporting.COLORS, strict=False):
        found = reporting.where(rows, method=method)
        if not found:
            continue
        steps, errors = reporting.curve(found, "error_now")
        left.plot(steps, [100 * error for error in errors], color=color, linewidth=2, label=method)
        right.plot(
            reporting.column(found, "violation"),
            [100 * error for error in reporting.column(found, "error")],
            "o",
            color=color,
            markersize=9,
            label=method,
        )
    left.set_xlabel("step")
    left.set_ylabel("error, %")
    left.set_title("In the course of training", fontsize=13)
    right.set_xlabel("violation of the load")
    right.set_ylabel("error, %")
    right.set_title("At its end, one point per seed", fontsize=13)
    for plot in (left, right):
        reporting.log_axis(plot)
        plot.minorticks_off()
        plot.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    left.legend(frameon=False)
    figure.savefig(path, dpi=120)


EXPERIMENT = study.Experiment(
    source="sparse-topk, section 6, on a task of our own",
    needs="nothing",
    takes="3 min of one core",
    Args=Args,
    smoke={"steps": 6, "points": 3},
    trials=trials,
    run=run,
    report=report,
)
