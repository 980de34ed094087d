"""Training through beam search, compared with teacher forcing (soft-ot-topk, Table 2)

The paper trains a recurrent translator from English to French (WMT'14) by teacher forcing, then continues
through soft beam search with a share ρ = 0.8 of teacher forcing, and reports BLEU. This experiment uses
generated data instead of the translation corpora, on a task that shows exposure bias
(`reproduce.tasks.shell_game`). A ball lies under one of six cups, which are shuffled 20 times. Each
shuffle is one of three ways, which are drawn with the seed. The target lists the places of the ball from the
end back to the start. Given the right prefix, every token but the first follows from the token before it. The
figures are the shares of sequences and tokens that beam search with 5 beams finds. The ways to train are:

- `teacher_forcing`: ρ = 1.
- `teacher_forcing_longer`: the same with 4 times as many steps, which takes about as long as `beam`.
- `pretrained`: the paper's recipe, with teacher forcing for half of the steps and ρ = 0.8 for the rest.
- `beam`: through the beams from the start, with ρ = 0.
- `greedy`: the model also sees its own tokens from the start, but selects one token at a time by a hard
  choice, so that no gradient goes through the choice. This shows whether the soft selection is what helps.

Departures from the paper:

- The data and the metric are different, as described above.
- There are 200 steps of Adam instead of 10⁶, and 3 beams in training.
- The encoder is bidirectional and the decoder has 32 units. Step t of the decoder sees output t of the
  encoder; the paper uses attention.
- ε is 2, in units of log-likelihood. The paper's 0.1 is for an operator whose code divides the cost by its
  largest entry. Without that division 0.1 makes the choice almost hard, and the gradient through it, which is
  proportional to k/ε at every step, dominates everything else.
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
from reproduce.harness import reporting, study, training
from reproduce.harness.study import ArgumentError, Checkpoint, Row, Trial
from reproduce.tasks import shell_game

__all__ = ["EXPERIMENT", "METHODS", "Args", "report", "run", "trials"]

METHODS = ("teacher_forcing", "teacher_forcing_longer", "pretrained", "beam", "greedy")
LONGER = 4
TEST = 1000


@dataclass(frozen=True)
class Args(study.Args):
    """Sizes, the training, and the arguments of the soft selection."""

    methods: tuple[str, ...] = field(
        default=METHODS, metadata={"help": "Ways to train, comma-separated.", "selects": True}
    )
    length: int = field(default=20, metadata={"help": "Shuffles per sequence."})
    steps: int = field(default=200, metadata={"help": "Steps of Adam."})
    batch: int = field(default=64, metadata={"help": "Sequences per step."})
    size: int = field(
        default=32, metadata={"help": "Units of the encoder in each direction, and of the decoder."}
    )
    lr: float = field(
        default=1e-2, metadata={"help": "Learning rate; it falls to 0 over the last third of the steps."}
    )
    beams: int = field(default=3, metadata={"help": "Beams in training."})
    test_beams: int = field(default=5, metadata={"help": "Beams in the test."})
    epsilon: float = field(default=2.0, metadata={"help": "Regularisation of the selection."})
    rho: float = field(default=0.8, metadata={"help": "Share of teacher forcing after the pretraining."})

    def __post_init__(self) -> None:
        super().__post_init__()
        study.check_choices("methods", self.methods, METHODS)
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
    schedule = training.lr_schedule(optimizer, training.linear_over_last_third, total)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule}
    with shell_game.no_denormals():
        for step in training.steps(checkpoint, state, total):
            source, target = shell_game.draw_games(shuffles, args.batch, args.length)
            optimizer.zero_grad()
            _loss(args, method, step, model(source), target).backward()
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


def _loss(args: Args, method: str, step: int, decoder: shell_game.Decoder, target: Tensor) -> Tensor:
    if method == "greedy":
        found = khot.nn.soft_beam_search(*decoder, target.shape[1], 1, hard=True)
        return F.nll_loss(found.log_probs.flatten(0, 1), target.flatten())
    rho = {"beam": 0.0, "pretrained": args.rho if 2 * step >= args.steps else 1.0}.get(method, 1.0)
    return khot.nn.soft_beam_loss(*decoder, target, args.beams, epsilon=args.epsilon, rho=rho)


def report(args: Args, rows: list[Row], folder: Path) -> str:
    lines = []
    for name in METHODS:
        last = [row for row in reporting.where(rows, method=name) if "seconds" in row]
        if last:
            shares = ([100 * x for x in reporting.column(last, y)] for y in ("exact", "tokens", "forced"))
            seconds = reporting.spread(reporting.column(last, "seconds"), 0)
            lines.append(
                (f"`{name}`", *(reporting.spread(x, 1) for x in shares), str(last[0]["step"]), seconds)
            )
    _draw(rows, folder / "beam_search.png")
    head = (
        "training",
        "exact match, %",
        "tokens, %",
        "tokens after right prefixes, %",
        "steps",
        "CPU seconds",
    )
    return f"""{reporting.table(head, lines)}
Mean and standard deviation over the seeds, of {TEST} test sequences. A random guess of the first token is
right with probability 1/{shell_game.CUPS}. The paper reports for WMT'14 English to French: BLEU 35.38 by
teacher forcing, 36.27 through beam search. The figures have different units, so that only their order can be
compared.

![Exact match by step](beam_search.png)
"""


def _draw(rows: list[Row], path: Path) -> None:
    figure, (plot,) = reporting.figure()
    for name, color in zip(METHODS, reporting.COLORS, strict=False):
        steps, exact = reporting.curve(reporting.where(rows, method=name), "exact")
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
    smoke={"length": 6, "steps": 4, "batch": 16, "size": 16, "seeds": 1},
    trials=trials,
    run=run,
    report=report,
)
