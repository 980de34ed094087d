"""Training through beam search, beside teacher forcing. (soft-ot-topk, Table 2)

The paper trains a recurrent translator of WMT'14 English to French by teacher forcing, goes on through soft
beam search with a share ρ = 0.8 of teacher forcing, and reports BLEU. The translation corpora are not at
hand. What is transduced here is generated, and made to show exposure bias
(`khot.experiments.shell_game`): a ball lies under one of six cups, they are shuffled 20 times in one of three
ways, drawn with the seed, and where the ball was is told from the end back to the start. After the right
tokens every token but the first follows from the one before it. The figures are the shares of sequences and
tokens that beam search with 5 beams finds.

- `teacher_forcing`: ρ = 1.
- `teacher_forcing_longer`: the same for 4 times as many steps, which is about the time of `beam`.
- `pretrained`: the paper's recipe, teacher forcing for half of the steps, then ρ = 0.8.
- `beam`: through the beams from the start, ρ = 0.
- `greedy`: also after the model's own tokens from the start, but chosen hard and one at a time, so that no
  gradient comes through the choice: whether the soft selection is what helps.

Where it departs from the paper: data and metric, as said. 200 steps of Adam instead of 10⁶; a recurrent
encoder (both ways) and decoder of 32 units, that reads along instead of by attention. 3 beams in training.
ε = 2, in units of log-likelihood: the paper's 0.1 is for an operator whose code divides the cost by its
largest entry; as it stands it makes the choice all but hard, and the gradient through it, in proportion to
k/ε at every step, drowns the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import khot
from khot.experiments import shell_game, study
from khot.experiments.study import ArgumentError, Checkpoint, Row, Trial

__all__ = ["EXPERIMENT", "METHODS", "Args"]

METHODS = ("teacher_forcing", "teacher_forcing_longer", "pretrained", "beam", "greedy")
LONGER = 4
TEST = 1000


@dataclass(frozen=True)
class Args(study.Args):
    """Sizes, and what the selection takes."""

    methods: tuple[str, ...] = field(
        default=METHODS, metadata={"help": "Ways to train, comma-separated.", "selects": True}
    )
    length: int = field(default=20, metadata={"help": "Shuffles of a sequence."})
    steps: int = field(default=200, metadata={"help": "Steps of Adam."})
    batch: int = field(default=64, metadata={"help": "Sequences a step."})
    size: int = field(default=32, metadata={"help": "Units of the encoder, each way, and of the decoder."})
    lr: float = field(default=1e-2, metadata={"help": "Learning rate; it falls over the last third."})
    beams: int = field(default=3, metadata={"help": "Beams in training."})
    test_beams: int = field(default=5, metadata={"help": "Beams in the test."})
    epsilon: float = field(default=2.0, metadata={"help": "Regularisation of the selection."})
    rho: float = field(default=0.8, metadata={"help": "Share of teacher forcing after the pretraining."})

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.methods:
            if name not in METHODS:
                raise ArgumentError(f"methods = {name!r}: expected some of {', '.join(METHODS)}")
        for name, beams in (("beams", self.beams), ("test_beams", self.test_beams)):
            if beams > shell_game.CUPS:
                raise ArgumentError(f"{name} = {beams}: expected at most {shell_game.CUPS}")
        if self.rho > 1:
            raise ArgumentError(f"rho = {self.rho}: expected at most 1")


def trials(args: Args) -> list[Trial]:
    return [{"method": name, "seed": seed} for seed in range(args.seeds) for name in args.methods]


def run(args: Args, trial: Trial, checkpoint: Checkpoint) -> Iterator[Row]:
    method = str(trial["method"])
    shuffles = shell_game.draw_shuffles().to(args.device)
    test = shell_game.draw_games(shuffles, TEST, args.length)
    model = shell_game.Retracer(args.size).to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    total = args.steps * (LONGER if method == "teacher_forcing_longer" else 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: study.falling(step / total))
    state = {"model": model, "optimizer": optimizer, "schedule": schedule}
    with shell_game.no_denormals():
        for step in study.steps(checkpoint, state, total):
            source, target = shell_game.draw_games(shuffles, args.batch, args.length)
            optimizer.zero_grad()
            loss_of(args, method, step, model(source), target).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            if (step + 1) % max(1, total // 10) == 0 or step + 1 == total:
                exact, tokens, forced = shell_game.score(model, *test, args.test_beams)
                row: Row = {
                    "step": step + 1,
                    "exact": exact,
                    "tokens": fmean(tokens),
                    "forced": fmean(forced),
                }
                if step + 1 == total:
                    row["seconds"] = round(checkpoint.clock(), 1)
                yield row


def loss_of(args: Args, method: str, step: int, decoder: shell_game.Decoder, target: Tensor) -> Tensor:
    if method == "greedy":
        found = khot.nn.soft_beam_search(*decoder, target.shape[1], 1, hard=True)
        return F.nll_loss(found.log_probs.flatten(0, 1), target.flatten())
    rho = {"beam": 0.0, "pretrained": args.rho if 2 * step >= args.steps else 1.0}.get(method, 1.0)
    return khot.nn.soft_beam_loss(*decoder, target, args.beams, epsilon=args.epsilon, rho=rho)


def report(args: Args, rows: list[Row], folder: Path) -> str:
    lines = []
    for name in METHODS:
        last = [row for row in study.where(rows, method=name) if "seconds" in row]
        if last:
            shares = ([100 * x for x in study.column(last, y)] for y in ("exact", "tokens", "forced"))
            seconds = study.spread(study.column(last, "seconds"), 0)
            lines.append((f"`{name}`", *(study.spread(x, 1) for x in shares), str(last[0]["step"]), seconds))
    draw(rows, folder / "beam_search.png")
    head = ("training", "exact match, %", "tokens, %", "tokens after right ones, %", "steps", "CPU seconds")
    return f"""{study.table(head, lines)}
Of {TEST} sequences, mean and standard deviation over the seeds. A guess of the first token is right one time
in {shell_game.CUPS}. The paper, on WMT'14 English to French: BLEU 35.38 by teacher forcing, 36.27 through
beam search. The figures have different units and cannot be compared but in their order.

![Exact match by step](beam_search.png)
"""


def draw(rows: list[Row], path: Path) -> None:
    figure, (plot,) = study.figure()
    for name, color in zip(METHODS, study.COLORS, strict=False):
        steps, exact = study.curve(study.where(rows, method=name), "exact")
        if steps:
            share, percent = [step / steps[-1] for step in steps], [100 * y for y in exact]
            plot.plot(share, percent, "o-", color=color, linewidth=2, label=name.replace("_", " "))
    plot.set_title("Sequences found by beam search", fontsize=13)
    plot.set_xlabel("share of the training")
    plot.set_ylabel("exact match, %")
    plot.set_ylim(0, 104)
    plot.legend(frameon=False)
    figure.savefig(path, dpi=120)


EXPERIMENT = study.Experiment(
    source="soft-ot-topk, Table 2",
    needs="nothing",
    takes="4 min of one core",
    Args=Args,
    smoke={"length": 6, "steps": 20, "batch": 16, "size": 16, "seeds": 1},
    trials=trials,
    run=run,
    report=report,
)
