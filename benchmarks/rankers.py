"""Losses of ranking beside each other: which one trains the better ranker?

Each loss trains networks with one hidden layer of 32 units by Adam, 400 steps, and is judged by NDCG@10 of
test lists, with gains as they are (linear) and hard ranks. A loss has the learning rate whose NDCG@10 of
validation lists at the last step is best on average over the seeds; the test figure is that of the last step,
too. khot's losses have their default settings; the rivals are written as published.

    python -m benchmarks.rankers                           # everything, with MNIST in KHOT_DATA_DIR
    python -m benchmarks.rankers digits diabetes           # these sets only
    python -m benchmarks.rankers --only log_rank_loss RankNet

A run goes on where the last one stopped. The sets:

- synthetic: 1,000 queries of 20 to 200 documents with 46 features and five grades; 600 for training.
- MNIST: lists of 20 to 60 images, 3,000 for training; a 9 has relevance 3, an 8 has 2, a 7 has 1.
- MNIST, 30 % wrong: the same with three of ten labels of training and validation drawn at random.
- digits: the same as MNIST with scikit-learn's digits.
- diabetes: lists of 20 to 60 patients, with grades 4 to 1 for the targets' highest 5, 15, 30 and 50 %.

The time is that of one step's loss and gradient, on one core, in lists of five grades.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import report, timing
from khot import losses
from reproduce.harness import data, reporting

SEEDS, RATES, STEPS, HIDDEN, PLACES = range(8), (0.001, 0.003, 0.01), 400, 32, 10
RESULTS = Path(__file__).parent / "results" / "rankers"
LENGTHS = ((8, 60), (8, 200), (1, 1_000), (1, 4_096))

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # of scores, relevance and mask, all of them (lists, n)


# -------------------------------------------------------------------------------------------- losses


def ordered_pairs(relevance: Tensor, mask: Tensor) -> Tensor:
    """Whether i is more relevant than j: (lists, i, j)."""
    better = relevance.unsqueeze(-1) > relevance.unsqueeze(-2)
    return better & mask.unsqueeze(-1) & mask.unsqueeze(-2)


def ideal_gain(relevance: Tensor, mask: Tensor) -> Tensor:
    best = (relevance * mask).sort(-1, descending=True).values
    return (best / torch.log2(torch.arange(best.shape[-1]) + 2.0)).sum(-1)


def ranknet(x: Tensor, relevance: Tensor, mask: Tensor) -> Tensor:
    """Burges et al. 2005; the mean over all pairs of the batch."""
    pairs = ordered_pairs(relevance, mask)
    return (F.softplus(x.unsqueeze(-2) - x.unsqueeze(-1)) * pairs).sum() / pairs.sum().clamp(min=1)


def lambdarank(x: Tensor, relevance: Tensor, mask: Tensor) -> Tensor:
    """Burges 2010: RankNet's pairs weighted by how much NDCG changes when the two change places."""
    with torch.no_grad():
        order = x.masked_fill(~mask, -math.inf).argsort(-1, descending=True)
        discount = 1 / torch.log2(order.argsort(-1) + 2.0)
        gain, best = relevance * mask, ideal_gain(relevance, mask).clamp(min=1e-9)
        change = (gain.unsqueeze(-1) - gain.unsqueeze(-2)) * (
            discount.unsqueeze(-1) - discount.unsqueeze(-2)
        ).abs()
        weight = change * ordered_pairs(relevance, mask) / best[..., None, None]
    return (weight * F.softplus(x.unsqueeze(-2) - x.unsqueeze(-1))).sum((-2, -1)).mean()


def listnet(x: Tensor, relevance: Tensor, mask: Tensor) -> Tensor:
    """Cao et al. 2007, with the probabilities of the first place."""
    target = relevance.float().masked_fill(~mask, -math.inf).softmax(-1)
    log_p = x.masked_fill(~mask, -math.inf).log_softmax(-1).masked_fill(~mask, 0)
    return -(target * log_p).sum(-1).mean()


def approx_ndcg(x: Tensor, relevance: Tensor, mask: Tensor) -> Tensor:
    """Qin, Liu, Li 2010, with their α = 10: the logistic CDF at a temperature of 0.1."""
    return losses.ndcg_loss(x, relevance, tau=0.1, cdf="logistic", mask=mask)


def neural_ndcg(x: Tensor, relevance: Tensor, mask: Tensor) -> Tensor:
    """Pobrotyn, Białobrzeski 2021: NDCG of NeuralSort's matrix, with five rounds of Sinkhorn's scaling."""
    m = mask.sum(-1, keepdim=True)
    pairs = mask.unsqueeze(-1) & mask.unsqueeze(-2)
    spread = ((x.unsqueeze(-1) - x.unsqueeze(-2)).abs() * pairs).sum(-1)
    place = torch.arange(x.shape[-1]) + 1.0
    logits = (m + 1 - 2 * place).unsqueeze(-1) * x.unsqueeze(-2) - spread.unsqueeze(-2)
    matrix = logits.masked_fill(~mask.unsqueeze(-2), -math.inf).softmax(-1) * (place <= m).unsqueeze(-1)
    for _ in range(5):
        for axis in (-2, -1):
            total = matrix.sum(axis, keepdim=True)
            matrix = matrix / torch.where(total > 1e-20, total, 1)
    gain = (relevance * mask).float()
    found = ((matrix @ gain.unsqueeze(-1)).squeeze(-1) / torch.log2(1 + place)).sum(-1)
    best = ideal_gain(relevance, mask)
    return ((1 - found / best.clamp(min=1e-9)) * (best > 0)).sum() / (best > 0).sum().clamp(min=1)


LOSSES: dict[str, Loss] = {
    "log_rank_loss": lambda x, relevance, mask: losses.log_rank_loss(x, relevance, mask=mask),
    "ndcg_loss": lambda x, relevance, mask: losses.ndcg_loss(x, relevance, mask=mask),
    "RankNet": ranknet,
    "LambdaRank": lambdarank,
    "ListNet": listnet,
    "ApproxNDCG": approx_ndcg,
    "NeuralNDCG": neural_ndcg,
}
OURS = "log_rank_loss"


# ---------------------------------------------------------------------------------------------- data


@dataclass
class Lists:
    """Ragged lists: features of a pool, rows of indices into it, grades of these, and which take part."""

    pool: Tensor
    index: Tensor
    relevance: Tensor
    mask: Tensor


@dataclass
class Task:
    validation: Lists
    test: Lists
    draw: Callable[[torch.Generator], Lists]  # a batch for training


def drawn(pool: Tensor, grade: Tensor, part: Tensor, count: int, random: torch.Generator) -> Lists:
    """Lists of 20 to 60 random entries of a part of the pool."""
    length = torch.randint(20, 61, (count, 1), generator=random)
    index = torch.stack([part[torch.randperm(len(part), generator=random)[:60]] for _ in range(count)])
    return Lists(pool, index, grade[index], torch.arange(60) < length)


def mnist(seed: int, wrong: float = 0.0) -> Task:
    images, random = _mnist(), torch.Generator().manual_seed(10_000 + seed)
    some = torch.randperm(len(images.train_labels), generator=random)[:4_500]
    pool, label = images.train_images[some], images.train_labels[some]
    other = torch.randint(10, label.shape, generator=random)
    label = torch.where(torch.rand(label.shape, generator=random) < wrong, other, label)
    grade, right = (label - 6).clamp(min=0), (images.test_labels - 6).clamp(min=0)
    first, last = torch.arange(3_000), torch.arange(3_000, 4_500)
    return Task(
        drawn(pool, grade, last, 150, random),
        drawn(images.test_images, right, torch.arange(len(right)), 300, random),
        lambda random: drawn(pool, grade, first, 8, random),
    )


@cache
def _mnist() -> data.Images:
    return data.load_mnist(Path(os.environ["KHOT_DATA_DIR"]))


def scikit(name: str, seed: int) -> Task:
    from sklearn import datasets

    x, y = (torch.from_numpy(v) for v in getattr(datasets, f"load_{name}")(return_X_y=True))
    x = ((x - x.mean(0)) / (x.std(0) + 1e-6)).float()
    cuts = torch.quantile(y.double(), torch.tensor([0.5, 0.7, 0.85, 0.95]).double())
    grade = (y - 6).clamp(min=0).long() if name == "digits" else torch.bucketize(y.double(), cuts)
    random = torch.Generator().manual_seed(20_000 + seed)
    order, a, b = torch.randperm(len(x), generator=random), len(x) // 2, 7 * len(x) // 10
    return Task(
        drawn(x, grade, order[a:b], 150, random),
        drawn(x, grade, order[b:], 300, random),
        lambda random: drawn(x, grade, order[:a], 8, random),
    )


def synthetic(seed: int, queries: int = 1_000, d: int = 46, longest: int = 200) -> Task:
    random = torch.Generator().manual_seed(30_000 + seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    mask = torch.arange(longest) < torch.randint(20, longest + 1, (queries, 1), generator=random)
    x = normal(queries, longest, d) + 0.5 * normal(queries, 1, d)
    bent, folded = torch.tanh(1.5 * x @ normal(d, 24) / d**0.5), torch.relu(x @ normal(d, 8) / d**0.5)
    y = (bent @ normal(24, 1) / 24**0.5 + 0.6 * (folded @ normal(8, 1)) / 8**0.5).squeeze(-1)
    y = y / y[mask].std() + 0.5 * normal(queries, longest) + 0.5 * normal(queries, 1)
    grade = torch.bucketize(y, torch.quantile(y[mask][:100_000], torch.tensor([0.6, 0.8, 0.92, 0.98])))
    pool, index = x.flatten(0, 1), torch.arange(queries * longest).view(queries, longest)

    def some(which: Tensor) -> Lists:
        return Lists(pool, index[which], grade[which], mask[which])

    return Task(
        some(torch.arange(600, 750)),
        some(torch.arange(750, queries)),
        lambda random: some(torch.randint(600, (6,), generator=random)),
    )


SETS: dict[str, Callable[[int], Task]] = {
    "synthetic": synthetic,
    "MNIST": mnist,
    "MNIST, 30 % wrong": lambda seed: mnist(seed, 0.3),
    "digits": lambda seed: scikit("digits", seed),
    "diabetes": lambda seed: scikit("diabetes", seed),
}


# ------------------------------------------------------------------------------------------ training


@torch.no_grad()
def ndcg(x: Tensor, relevance: Tensor, mask: Tensor) -> float:
    """NDCG at 10 of the hard order, over lists with a relevant entry."""
    places = torch.arange(x.shape[-1])
    discount = (places < PLACES) / torch.log2(places + 2.0)
    gain = (relevance * mask).float()
    found = gain.gather(-1, x.masked_fill(~mask, -math.inf).argsort(-1, descending=True))
    best = (gain.sort(-1, descending=True).values * discount).sum(-1)
    return ((found * discount).sum(-1) / best)[best > 0].mean().item()


def score(model: nn.Module, lists: Lists) -> Tensor:
    return model(lists.pool[lists.index]).squeeze(-1)


def train(task: Task, loss: Loss, rate: float, seed: int) -> list[float]:
    """NDCG@10 of the validation and of the test lists after the last step."""
    torch.manual_seed(40_000 + seed)
    random = torch.Generator().manual_seed(50_000 + seed)
    width = task.validation.pool.shape[-1]
    model = nn.Sequential(nn.Linear(width, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    for _ in range(STEPS):
        lists = task.draw(random)
        optimizer.zero_grad()
        loss(score(model, lists), lists.relevance, lists.mask).backward()
        optimizer.step()
    return [ndcg(score(model, part), part.relevance, part.mask) for part in (task.validation, task.test)]


def milliseconds(lists: int, n: int) -> dict[str, float]:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(lists, n, generator=random).requires_grad_()
    relevance, mask = torch.randint(0, 5, x.shape, generator=random), torch.ones(x.shape, dtype=torch.bool)
    calls: dict[str, timing.Call] = {
        name: (lambda loss=loss: torch.autograd.grad(loss(x, relevance, mask), x))
        for name, loss in LOSSES.items()
        if n < 4_096 or name != "NeuralNDCG"
    }
    return {name: 1e3 * t for name, t in timing.medians(calls, seconds=1, clock=time.thread_time).items()}


# ------------------------------------------------------------------------------------------- results


def cases(sets: list[str], names: list[str]) -> Iterator[tuple[str, str, int]]:
    """A seed of all sets before the next one, so that a run that is stopped compares what it has."""
    for seed in SEEDS:
        for place in sets:
            for name in names:
                yield place, name, seed


def chosen(results: report.Results, place: str, name: str) -> list[float]:
    """The test figures of each seed at the learning rate that is best on validation lists, in percent."""
    found = [results["cases"].get(f"{place}/{name}/{seed}") for seed in SEEDS]
    runs = [each for each in found if each]
    if not runs:
        return []
    rate = max(runs[0], key=lambda rate: statistics.mean(run[rate][0] for run in runs))
    return [100 * run[rate][1] for run in runs]


def lead(results: report.Results, place: str, name: str) -> str:
    """Ours less another loss: mean and standard error of the seeds' differences."""
    both = zip(chosen(results, place, OURS), chosen(results, place, name), strict=False)
    gains = [a - b for a, b in both]
    error = statistics.stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else 0.0
    return f"{statistics.mean(gains):+.2f} ± {error:.2f}" if gains else "–"


def write(results: report.Results, folder: Path) -> None:
    label = {name: f"`{name}`" if hasattr(losses, name) else name for name in LOSSES}
    rows = [
        [label[name], *(reporting.spread(chosen(results, place, name), 1) for place in SETS)]
        for name in LOSSES
    ]
    paired = [
        [label[name], *(lead(results, place, name) for place in SETS)] for name in LOSSES if name != OURS
    ]
    times = [
        [label[name], *(f"{t[name]:.2g}" if name in t else "–" for t in results["times"].values())]
        for name in LOSSES
    ]
    seeds = max((len(chosen(results, place, OURS)) for place in SETS), default=0)
    settings = report.said(results["machine"])
    text = f"""# Losses of ranking

Written by `python -m benchmarks.rankers`. {settings}.

{(__doc__ or "").partition("These")[0].partition(chr(10))[2].strip()}

## NDCG@10 of test lists, %: mean and standard deviation of {seeds} seeds

{report.table(["", *SETS], rows).strip()}

## `{OURS}` less the others: mean and standard error of the seeds' differences

{report.table(["", *SETS], paired).strip()}

## Time of a loss and its gradient, ms of one core

{report.table(["", *(f"{lists} list{'s' * (lists > 1)} of {n:,}" for lists, n in LENGTHS)], times).strip()}
"""
    folder.with_suffix(".md").write_text(text, encoding="utf-8")


def main() -> None:
    parser = report.parser("losses of ranking", out=RESULTS)
    parser.add_argument("sets", nargs="*", choices=[[], *SETS], default=[], metavar="SET")
    parser.add_argument("--only", nargs="*", choices=list(LOSSES), default=list(LOSSES), metavar="LOSS")
    args = parser.parse_args()
    path = args.out.with_suffix(".json")
    results = report.resume(path, {"steps": STEPS, "rates": list(RATES), "torch": torch.__version__})
    results.setdefault("machine", report.machine(cpu_time=True))
    for place, name, seed in cases(args.sets or list(SETS), args.only):
        key = f"{place}/{name}/{seed}"
        if key in results["cases"]:
            continue
        task = SETS[place](seed)
        results["cases"][key] = {str(rate): train(task, LOSSES[name], rate, seed) for rate in RATES}
        report.save(path, results)
        print(key, results["cases"][key], flush=True)
    if "times" not in results:
        results["times"] = {f"{lists}x{n}": milliseconds(lists, n) for lists, n in LENGTHS}
        report.save(path, results)
    write(results, args.out)


if __name__ == "__main__":
    main()
