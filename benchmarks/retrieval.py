"""Attention that is trained on short contexts and used on long ones: `python -m benchmarks.retrieval`.

One layer of attention, 64 wide, with 4 heads, looks something up among n places, 32 in training and up to 512
in the test:

- `recall`: a place has a key of length 1 in 8 dimensions and one of 16 words; a query is a noisy key, and its
  answer the word;
- `pairs`: two places have a noisy copy of each tag and one of 8 words; a query is a tag, and its answer the
  sum of the two words.

The same model learns by four forms of attention: by softmax, by `khot.nn.topk_attention` with k = 4 and
tau = 4, and by entmax-1.5 and sparsemax of the package entmax, if it is installed. Its weights are then
tested in several forms, without training again: as they are; with scores times log n / log 32; with the k
best keys alone (`hard=True`); and with weights that fade towards the next score (`gap=4`). Of those with k,
one has the k of 1, 2, 3, 4 and 8 that has the least loss at the length of the training.

Figures are the answers that are right, of 4,096 at each length.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import khot
from benchmarks import report
from reproduce.harness import reporting

PATH = Path(__file__).parent / "results" / "retrieval.md"
WIDTH, HEADS, DIM, PLACES, QUERIES, BATCH = 64, 4, 8, 32, 16, 32
LENGTHS = (32, 128, 512)
TOP_K, KS, TAU, GAP = 4, (1, 2, 3, 4, 8), 4.0, 4.0
TASKS = {"recall": (16, 16), "pairs": (8, 15)}  # how many words there are, and answers

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Batch = tuple[Tensor, Tensor, Tensor]


def sphere(*shape: int, generator: torch.Generator) -> Tensor:
    return F.normalize(torch.randn(*shape, generator=generator), dim=-1)


def near(x: Tensor, noise: float, generator: torch.Generator) -> Tensor:
    """Points of length 1, off by so much in the mean."""
    return F.normalize(x + noise / math.sqrt(DIM) * torch.randn(x.shape, generator=generator), dim=-1)


def recall(batch: int, n: int, generator: torch.Generator) -> Batch:
    keys = sphere(batch, n, DIM, generator=generator)
    words = torch.randint(TASKS["recall"][0], (batch, n), generator=generator)
    asked = torch.randint(n, (batch, QUERIES), generator=generator)
    wanted = keys.gather(1, asked.unsqueeze(-1).expand(-1, -1, DIM))
    places = torch.cat([keys, F.one_hot(words, TASKS["recall"][0])], -1)
    return places, near(wanted, 0.3, generator), words.gather(1, asked)


def pairs(batch: int, n: int, generator: torch.Generator) -> Batch:
    tags = sphere(batch, n // 2, DIM, generator=generator)
    words = torch.randint(TASKS["pairs"][0], (batch, n), generator=generator)
    asked = torch.randint(n // 2, (batch, QUERIES), generator=generator)
    places = torch.cat(
        [near(torch.cat([tags, tags], 1), 0.2, generator), F.one_hot(words, TASKS["pairs"][0])], -1
    )
    answers = words.gather(1, asked) + words.gather(1, asked + n // 2)
    return places, tags.gather(1, asked.unsqueeze(-1).expand(-1, -1, DIM)), answers


DRAWS = {"recall": recall, "pairs": pairs}


class Lookup(nn.Module):
    """Attention between projections as those of nn.MultiheadAttention, in any form."""

    def __init__(self, words: int, answers: int) -> None:
        super().__init__()
        self.of_place, self.of_query = nn.Linear(DIM + words, WIDTH), nn.Linear(DIM, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.answer = nn.Linear(WIDTH, answers)

    def forward(self, places: Tensor, queries: Tensor, attend: Attend) -> Tensor:
        x, q = self.of_place(places), self.of_query(queries)
        weights = self.attention.in_proj_weight.chunk(3)
        biases = self.attention.in_proj_bias.chunk(3)
        heads = [
            F.linear(v, w, b).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for v, w, b in zip((q, x, x), weights, biases, strict=True)
        ]
        output: Tensor = self.attention.out_proj(attend(*heads).transpose(1, 2).flatten(-2))
        return self.answer(output)


def dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value)


def scaled(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return dense(query * (math.log(key.shape[-2]) / math.log(PLACES)), key, value)


def by_entmax(name: str, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    form = getattr(importlib.import_module("entmax"), name)
    weights = form(query @ key.mT / math.sqrt(query.shape[-1]), dim=-1)
    return weights @ value


def among(k: int, gap: float | None, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return khot.nn.topk_attention(query, key, value, k, hard=True, gap=gap)


TRAININGS: dict[str, Attend] = {
    "softmax": dense,
    "top-k": partial(khot.nn.topk_attention, top_k=TOP_K, tau=TAU),
    "entmax-1.5": partial(by_entmax, "entmax15"),
    "sparsemax": partial(by_entmax, "sparsemax"),
}


def forms(training: str) -> dict[str, Attend]:
    """How the weights of a training are tested."""
    found = {"as in training": TRAININGS[training]}
    if training == "softmax":
        found["times log n / log 32"] = scaled
    if training in ("softmax", "top-k"):
        found["hard"] = partial(among, TOP_K, None)
        found["gap"] = partial(among, TOP_K, GAP)
    return found


def trained(task: str, training: str, seed: int, steps: int) -> Lookup:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = Lookup(*TASKS[task])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, 3 * (steps - s) / steps))
    for _ in range(steps):
        places, queries, answers = DRAWS[task](BATCH, PLACES, generator)
        optimizer.zero_grad()
        logits = model(places, queries, TRAININGS[training])
        F.cross_entropy(logits.flatten(0, 1), answers.flatten()).backward()
        optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def judge(model: Lookup, task: str, n: int, attend: Attend) -> tuple[float, float]:
    """The loss, and the share of right answers in %."""
    generator = torch.Generator().manual_seed(10_000 + n)
    loss = right = 0.0
    for _ in range(16):
        places, queries, answers = DRAWS[task](16, n, generator)
        logits = model(places, queries, attend)
        loss += F.cross_entropy(logits.flatten(0, 1), answers.flatten()).item() / 16
        right += 100 * (logits.argmax(-1) == answers).double().mean().item() / 16
    return loss, right


def measure(task: str, training: str, seed: int, steps: int) -> dict[str, Any]:
    model = trained(task, training, seed, steps)
    tested = forms(training)
    chosen = {}
    if training == "top-k":
        for name, gap in (("hard, k chosen", None), ("gap, k chosen", GAP)):
            k = min(KS, key=lambda k: judge(model, task, PLACES, partial(among, k, gap))[0])
            tested[name], chosen[name] = partial(among, k, gap), k
    right = {name: [judge(model, task, n, attend)[1] for n in LENGTHS] for name, attend in tested.items()}
    return {"task": task, "training": training, "seed": seed, "right": right, "chosen": chosen}


def write(path: Path, results: report.Results) -> None:
    cases: list[Any] = list(results["cases"].values())
    parts = []
    for task in TASKS:
        rows = []
        for training in TRAININGS:
            found: list[Any] = reporting.where(cases, task=task, training=training)
            for form in found[0]["right"] if found else ():
                columns = zip(*(case["right"][form] for case in found), strict=True)
                ks = sorted({case["chosen"][form] for case in found if form in case["chosen"]})
                name = f"{form} ({', '.join(map(str, ks))})" if ks else form
                rows.append([training, name, *(reporting.spread(list(column), 1) for column in columns)])
        head = ["training", "test", *(f"{n} places" for n in LENGTHS)]
        parts.append(f"## {task}\n\n{report.table(head, rows)}")
    setting = report.said(results["setting"])
    path.write_text(
        "# Attention on longer contexts than those of the training\n\n`python -m benchmarks.retrieval`\n\n"
        f"{setting}\n\nRight answers, %, mean and standard deviation over the seeds; in parentheses the k "
        "that were chosen.\n\n" + "\n\n".join(parts),
        encoding="utf-8",
    )


def main() -> None:
    what = "attention on longer contexts than those of the training"
    args = report.parser(what, steps=1000, seeds=3, out=PATH).parse_args()
    setting = {"steps": args.steps, **report.machine(cpu_time=True)}
    peers = importlib.util.find_spec("entmax") is not None
    trainings = [name for name in TRAININGS if peers or name in ("softmax", "top-k")]
    todo = {
        f"{task}, {training}, {seed}": partial(measure, task, training, seed, args.steps)
        for seed in range(args.seeds)
        for task in TASKS
        for training in trainings
    }
    report.complete(args.out, setting, todo, write)


if __name__ == "__main__":
    main()
