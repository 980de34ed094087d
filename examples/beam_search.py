"""Find the ball again: an encoder-decoder that learns from its own beam search, beside teacher forcing.

A ball lies under one of six cups, which are shuffled 20 times; the task is to tell where it was after each
shuffle, from the last back to the first. With teacher forcing the decoder sees the right tokens before each
token, so it learns to undo one shuffle at a time. This suffices for 19 tokens of 20. In use it has to guess
where the ball is at the end, and if the guess is wrong, all later tokens are wrong: this is exposure bias.
`nn.soft_beam_loss` shows the decoder its own beginnings instead. There the token before says little, so the
encoder has to learn to follow the ball, and then knows where it is at the end.

    python examples/beam_search.py                 # 55 s on one core
    python examples/beam_search.py --seed 1 --out beam_search.png
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
import typer
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import khot

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # to import from reproduce/, beside this folder
from reproduce.tasks.shell_game import Retracer, Score, draw_games, draw_shuffles, no_denormals, score

LENGTH, BATCH, SIZE, BEAMS, LR = 20, 64, 32, 3, 1e-2
RHO = {"beam": 0.0, "forced": 1.0, "longer": 1.0}
NAMES = {
    "beam": "nn.soft_beam_loss",
    "forced": "teacher forcing",
    "longer": "teacher forcing, longer",
}


class Result(NamedTuple):
    steps: list[int]
    scores: list[Score]
    seconds: float


def train(method: str, steps: int, seed: int, progress: Progress) -> Result:
    torch.manual_seed(seed)
    shuffles = draw_shuffles()
    test, model = draw_games(shuffles, 1000, LENGTH), Retracer(SIZE)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, 3 * (1 - step / steps)))
    task, result, seconds = progress.add_task(NAMES[method], total=steps), Result([], [], 0.0), 0.0
    for step in range(1, steps + 1):
        start = time.process_time()
        source, target = draw_games(shuffles, BATCH, LENGTH)
        optimizer.zero_grad()
        khot.nn.soft_beam_loss(*model(source), target, BEAMS, rho=RHO[method]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        seconds += time.process_time() - start
        if step % max(1, steps // 10) == 0 or step == steps:
            result.steps.append(step)
            result.scores.append(score(model, *test, BEAMS))
        progress.advance(task)
    return result._replace(seconds=seconds)


def run(steps: int = 200, seed: int = 0, methods: Iterable[str] = NAMES) -> dict[str, Result]:
    """What beam search finds after each way of training."""
    with no_denormals(), Progress(console=Console(stderr=True)) as progress:
        return {
            method: train(method, steps * 4 if method == "longer" else steps, seed, progress)
            for method in methods
        }


def draw(results: dict[str, Result], out: Path) -> None:
    figure = Figure(figsize=(9, 4), layout="constrained")
    through, places = figure.subplots(1, 2)
    for method, color in (("beam", "#0b6e99"), ("forced", "#d9730d")):
        result = results[method]
        exact = [100 * score.exact for score in result.scores]
        through.plot(result.steps, exact, "o-", color=color, linewidth=2, label=NAMES[method])
        last, at = result.scores[-1], range(1, LENGTH + 1)
        for shares, style, after in ((last.tokens, "o-", "its own"), (last.forced, ":", "right")):
            label = f"{NAMES[method]}, after {after} tokens"
            places.plot(at, [100 * share for share in shares], style, color=color, linewidth=2, label=label)
    through.set_title("Sequences found by beam search\n")
    through.set_xlabel("step")
    through.set_ylabel("exact match, %")
    places.set_title("Tokens, by their place\n")
    places.set_xlabel("place")
    places.set_ylabel("right, %")
    places.set_xticks(range(5, LENGTH + 1, 5))
    for axes in (through, places):
        axes.set_ylim(0, 104)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="center right", fontsize=9)
    figure.savefig(out, dpi=100)


def main(steps: int = 200, seed: int = 0, out: Path = Path("beam_search.png")) -> None:
    """Find the ball again."""
    results = run(steps, seed)
    table = Table(title=f"Where the ball was after {LENGTH} shuffles, by search with {BEAMS} beams")
    for column in ("training", "exact match", "tokens", "after right ones", "steps", "seconds"):
        table.add_column(column, justify="left" if column == "training" else "right")
    for method, name in NAMES.items():
        result = results[method]
        exact, tokens, forced = result.scores[-1]
        shares = (exact, sum(tokens) / LENGTH, sum(forced) / LENGTH)
        cost = (str(result.steps[-1]), f"{result.seconds:.0f}")
        table.add_row(name, *(f"{100 * share:.1f} %" for share in shares), *cost)
    Console().print(table)
    draw(results, out)


if __name__ == "__main__":
    typer.run(main)
