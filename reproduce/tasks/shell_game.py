"""A transduction task on which teacher forcing fails: the places of a hidden ball, in reverse order.

A ball lies under the first of six cups. The cups are shuffled many times, each time in one of a few fixed
ways. The source is the list of shuffles, the last one first. The target is the cup with the ball after each
shuffle, in the same order. The first token of the target therefore depends on all shuffles, and every other
token follows from the one before it by undoing one shuffle.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from khot.nn import soft_beam_search

__all__ = ["CUPS", "Decoder", "Retracer", "Score", "draw_games", "draw_shuffles", "no_denormals", "score"]

CUPS, SHUFFLES = 6, 3


def draw_shuffles() -> Tensor:
    """The new place of each cup in each way to shuffle, (SHUFFLES, CUPS)."""
    return torch.stack([torch.randperm(CUPS) for _ in range(SHUFFLES)])


def draw_games(shuffles: Tensor, size: int, length: int) -> tuple[Tensor, Tensor]:
    """Sources and targets, (size, length) each."""
    source = torch.randint(len(shuffles), (size, length), device=shuffles.device)
    cup, cups = torch.zeros_like(source[:, 0]), []
    for done in reversed(source.unbind(1)):
        cup = shuffles[done, cup]
        cups.append(cup)
    return source, torch.stack(cups[::-1], 1)


class Decoder(NamedTuple):
    """The first four arguments of :func:`khot.nn.soft_beam_search`."""

    step: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    embedding: Tensor
    start: Tensor
    state: Tensor


class Retracer(nn.Module):
    """A recurrent encoder in both directions, and a recurrent decoder.

    Step t of the decoder sees output t of the encoder.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.shuffles, self.cups = nn.Embedding(SHUFFLES, size), nn.Embedding(CUPS + 1, size)
        self.encoder = nn.GRU(size, size, batch_first=True, bidirectional=True)
        self.cell = nn.GRUCell(size, size)
        self.head = nn.Sequential(nn.Linear(3 * size, size), nn.Tanh(), nn.Linear(size, CUPS))

    def forward(self, source: Tensor) -> Decoder:
        """The decoder for these sources, (B, length)."""
        memory, _ = self.encoder(self.shuffles(source))

        def step(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            # the last entry of a state counts the steps: it is the same in all beams, so mixing does not
            # change it
            h, place = state[..., :-1], state[..., -1:]
            h = self.cell(x.flatten(0, 1), h.flatten(0, 1)).unflatten(0, x.shape[:2])
            here = memory[:, int(place[0, 0].round())].unsqueeze(1).expand(-1, x.shape[1], -1)
            return self.head(torch.cat([h, here], -1)), torch.cat([h, place + 1], -1)

        table = self.cups.weight
        return Decoder(step, table[:-1], table[-1], table.new_zeros(len(source), table.shape[1] + 1))


@contextmanager
def no_denormals() -> Generator[None]:
    """Round numbers below the smallest normal number to 0.

    When the model is certain of its tokens, most gradients through the beams are that small, and would make
    steps on a CPU several times slower.
    """
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


class Score(NamedTuple):
    """Shares of right sequences, of right tokens at each place, and of right tokens after right prefixes."""

    exact: float
    tokens: list[float]
    forced: list[float]


@torch.no_grad()
def score(model: Retracer, source: Tensor, target: Tensor, k: int) -> Score:
    """The score of beam search with k beams."""
    decoder: Decoder = model(source)
    right = soft_beam_search(*decoder, target.shape[1], k, hard=True).tokens[:, 0] == target
    x, state, forced = decoder.start.expand(len(source), 1, -1), decoder.state.unsqueeze(1), []
    for token in target.split(1, 1):
        logits, state = decoder.step(x, state)
        forced.append((logits.argmax(-1) == token).double().mean().item())
        x = decoder.embedding[token]
    return Score(right.all(1).double().mean().item(), right.double().mean(0).tolist(), forced)
