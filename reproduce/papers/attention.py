"""Attention to the k best places of the source, compared with softmax attention (soft-ot-topk, Table 4)

The paper puts softmax(s + log A), where A is the soft top-k of the scores s, into a translator from English
to German (WMT'16), and reports BLEU. This experiment uses generated data instead of the translation corpora.
A source is a set of places without an order. Each place has a tag, which is a vector of length 1, and a word.
Six tags are fixed, and two places have each of them. The t-th token of the target is the sum, modulo eight,
of the two words at the places with the t-th fixed tag. The tags of all other places are random points on the
sphere. Sources have 24 places in training and up to 384 in the test. The more places there are, the more
random tags are close to a fixed one, and the more of softmax's weight goes to them.

All decoders have the same parameters and the same initial values, and train by teacher forcing. The figures
are the shares of sequences and tokens that beam search with 5 beams finds. `topk` selects softly in training
and hard in the test (`khot.nn.TopKAttention`); `hard` also selects hard in training.

Departures from the paper:

- The data and the metric are different, as described above.
- A source is embedded, but not read by a recurrent encoder, since its order has no meaning.
- k is 2, and the temperature falls from 4 to 1; the paper names neither k nor ε for this table.
- There is one attention head.
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
from reproduce.harness.study import ArgumentError, Checkpoint, Row, Trial
from reproduce.tasks.shell_game import Decoder

__all__ = ["EXPERIMENT", "METHODS", "Args", "report", "run", "trials"]

METHODS = ("softmax", "topk", "hard")
TOKENS, WORDS = 6, 8  # tokens of a target, and different words
DIM, K = 8, 2  # dimension of a tag, and places with each of the fixed tags
BEAMS, TEST = 5, 1000
TAU = (4.0, 1.0)


@dataclass(frozen=True)
class Args(study.Args):
    """Sizes of the sources, and the training."""

    methods: tuple[str, ...] = field(
        default=METHODS, metadata={"help": "Kinds of attention, comma-separated.", "selects": True}
    )
    places: int = field(default=24, metadata={"help": "Places of a source in training."})
    steps: int = field(default=400, metadata={"help": "Steps of Adam."})
    batch: int = field(default=64, metadata={"help": "Sequences per step."})
    size: int = field(default=32, metadata={"help": "Units of the embeddings and of the decoder."})
    lr: float = field(
        default=1e-2, metadata={"help": "Learning rate; it falls to 0 over the last third of the steps."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        study.check_choices("methods", self.methods, METHODS)
        if self.places < K * TOKENS:
            raise ArgumentError(f"places = {self.places}: expected at least {K * TOKENS}")


def trials(args: Args) -> list[Trial]:
    return [{"method": name, "seed": seed} for seed in range(args.seeds) for name in args.methods]


def _draw_tags(*shape: int) -> Tensor:
    return F.normalize(torch.randn(*shape, DIM), dim=-1)


def _draw_sources(fixed: Tensor, size: int, places: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tags (size, places, DIM), words (size, places) and targets (size, TOKENS)."""
    tags = torch.cat([fixed.repeat(size, K, 1), _draw_tags(size, places - K * TOKENS)], 1)
    words = torch.randint(WORDS, (size, places))
    target = words[:, : K * TOKENS].unflatten(1, (K, TOKENS)).sum(1) % WORDS
    order = torch.rand(size, places).argsort(1)
    return tags.take_along_dim(order.unsqueeze(-1), 1), words.gather(1, order), target


class _Translator(nn.Module):
    """A recurrent decoder that attends to the places of a source."""

    def __init__(self, size: int, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        self.tags, self.words = nn.Linear(DIM, size), nn.Embedding(WORDS, size)
        self.tokens = nn.Embedding(WORDS + 1, size)  # the last one is the start token
        self.cell, self.attention = nn.GRUCell(size, size), attention
        self.head = nn.Sequential(nn.Linear(size, 2 * size), nn.ReLU(), nn.Linear(2 * size, WORDS))

    def forward(self, tags: Tensor, words: Tensor) -> Decoder:
        keys, values = self.tags(tags), self.words(words)

        def step(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            h = self.cell(x.flatten(0, 1), h.flatten(0, 1)).unflatten(0, x.shape[:2])
            return self.head(self.attention(h, keys, values, need_weights=False)[0]), h

        table = self.tokens.weight
        return Decoder(step, table[:-1], table[-1], table.new_zeros(len(tags), table.shape[1]))


def _make(args: Args, method: str) -> tuple[_Translator, khot.nn.Anneal]:
    tau = khot.nn.Anneal(*TAU, args.steps, "exponential")
    plain = nn.MultiheadAttention(args.size, 1, batch_first=True)
    if method == "softmax":
        attention = plain
    else:
        attention = khot.nn.TopKAttention(args.size, 1, K, batch_first=True, tau=tau)
        attention.load_state_dict(plain.state_dict(), strict=False)
    return _Translator(args.size, attention).to(args.device), tau


def run(args: Args, trial: Trial, checkpoint: Checkpoint) -> Iterator[Row]:
    method, fixed = str(trial["method"]), _draw_tags(TOKENS)
    model, tau = _make(args, method)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    schedule = training.lr_schedule(optimizer, training.linear_over_last_third, args.steps)
    state = {"model": model, "tau": tau, "optimizer": optimizer, "schedule": schedule}
    for step in training.steps(checkpoint, state, args.steps):
        model.train()
        model.attention.train(method != "hard")
        tags, words, target = (x.to(args.device) for x in _draw_sources(fixed, args.batch, args.places))
        decoder: Decoder = model(tags, words)
        loss = khot.nn.soft_beam_loss(*decoder, target, k=1, rho=1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        tau.step()
        if (step + 1) % max(1, args.steps // 20) == 0:
            yield {"step": step + 1, "loss": loss.item()}
    model.eval()
    for places in (args.places * 2**i for i in range(5)):
        exact, tokens = _score(args, model, fixed, places)
        yield {"places": places, "exact": exact, "tokens": tokens, "seconds": round(checkpoint.clock(), 1)}


@torch.no_grad()
def _score(args: Args, model: _Translator, fixed: Tensor, places: int) -> tuple[float, float]:
    """The shares of sequences and of tokens that beam search finds."""
    tags, words, target = (x.to(args.device) for x in _draw_sources(fixed, TEST, places))
    decoder: Decoder = model(tags, words)
    found = khot.nn.soft_beam_search(*decoder, TOKENS, BEAMS, hard=True)
    right = found.tokens[:, 0] == target
    return right.all(1).double().mean().item(), right.double().mean().item()


def report(args: Args, rows: list[Row], folder: Path) -> str:
    places = sorted({int(row["places"]) for row in rows if "places" in row})
    parts = []
    for name in ("exact", "tokens"):
        lines = []
        for method in METHODS:
            of = reporting.where(rows, method=method)
            cells = ([100 * x for x in reporting.column(reporting.where(of, places=n), name)] for n in places)
            if of:
                lines.append((f"`{method}`", *(reporting.spread(cell, 1) for cell in cells)))
        parts.append(reporting.table(("attention", *(f"{n} places" for n in places)), lines))
    _draw(args, rows, folder / "attention.png")
    return f"""Exact match, %:

{parts[0]}
Tokens, %:

{parts[1]}
Mean and standard deviation over the seeds, of {TEST} test sequences, after training with {args.places}
places. The paper reports for WMT'16 English to German: BLEU 36.54 with softmax attention, 37.30 with top-k
attention. The figures have different units, so that only their order can be compared.

![Exact match by number of places, and the training loss](attention.png)
"""


def _draw(args: Args, rows: list[Row], path: Path) -> None:
    figure, (right, loss) = reporting.figure(2, width=9)
    for name, color in zip(METHODS, reporting.COLORS, strict=False):
        of = reporting.where(rows, method=name)
        places = sorted({int(row["places"]) for row in of if "places" in row})
        exact = [reporting.column(reporting.where(of, places=n), "exact") for n in places]
        means = [100 * sum(shares) / len(shares) for shares in exact]
        right.plot(places, means, "o-", color=color, linewidth=2, label=name)
        loss.plot(*reporting.curve(of, "loss"), color=color, linewidth=2, label=name)
    right.axvline(args.places, color="#cccccc", linestyle="--", zorder=0)
    right.set_title("Sequences found by beam search", fontsize=13)
    right.set_xscale("log", base=2)
    right.xaxis.set_major_formatter("{x:g}")
    right.set_xlabel(f"places of the source; trained with {args.places}")
    right.set_ylabel("exact match, %")
    right.set_ylim(0, 104)
    loss.set_title("Training", fontsize=13)
    reporting.log_axis(loss)
    loss.set_xlabel("step of Adam")
    loss.set_ylabel("cross-entropy per token")
    right.legend(frameon=False)
    figure.savefig(path, dpi=120)


EXPERIMENT = study.Experiment(
    source="soft-ot-topk, Table 4",
    needs="nothing",
    takes="2 min of one core",
    Args=Args,
    smoke={"places": 12, "steps": 5, "batch": 16, "size": 16, "seeds": 1},
    trials=trials,
    run=run,
    report=report,
)
