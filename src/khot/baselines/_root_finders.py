"""Iterations that find the threshold of sigmoid top-k: bisection, Newton's and Halley's method."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["GUESSES", "STEPS", "iterate"]

STEPS = ("bisection", "newton", "halley")
GUESSES = ("zero", "quantile", "logit", "both")


def iterate(
    x: Tensor,
    k: Tensor | float,
    step: str,
    guess: str = "zero",
    quantile: Tensor | None = None,
    *,
    margin: float = 36.0,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields c and the error Σσ(x + c) − k of every row: those of the guess, then those after each step.

    The iteration does not end by itself. In each step Newton and Halley also try the middle of the bracket,
    and take whichever of the two points has the smaller error. Both the middle and the point taken narrow the
    bracket; the guess does not.

    Args:
        x: scores (rows, n), in float64.
        k: a number, or a tensor (rows, 1).
        step: one of STEPS.
        guess: one of GUESSES. Bisection starts from the middle of its bracket, which is zero.
        quantile: x_(n−k) with shape (rows, 1), for the guesses "quantile" and "both".
        margin: the bracket is ±(max |x| + margin). The default, at which σ saturates in float64, encloses the
            root for every k.
    """

    def at(c: Tensor) -> list[Tensor]:
        y = torch.sigmoid(x + c)
        found = [c, y.sum(-1, keepdim=True) - k]
        if step != "bisection":
            f = y * (1 - y)
            found.append(f.sum(-1, keepdim=True))
            if step == "halley":
                found.append((f * (1 - 2 * y)).sum(-1, keepdim=True))
        return found

    def closer(one: list[Tensor], other: list[Tensor]) -> list[Tensor]:
        nearer = one[1].abs() <= other[1].abs()  # False for a step that failed and is NaN
        return [torch.where(nearer, a, b) for a, b in zip(one, other, strict=True)]

    high = x.abs().amax(-1, keepdim=True) + margin
    low = -high

    def narrow(c: Tensor, error: Tensor) -> None:
        nonlocal low, high
        low = torch.where(error < 0, torch.maximum(low, c), low)
        high = torch.where(error > 0, torch.minimum(high, c), high)

    guesses = []
    if guess == "zero":
        guesses.append(torch.zeros_like(low))
    if guess in ("logit", "both"):
        guesses.append(torch.logit(torch.zeros_like(low) + k / x.shape[-1]) - x.mean(-1, keepdim=True))
    if guess in ("quantile", "both"):
        assert quantile is not None
        guesses.append(-quantile)
    here = functools.reduce(closer, map(at, guesses))
    while True:
        c, error = here[:2]
        yield c, error
        middle = at((low + high) / 2)
        narrow(*middle[:2])
        if step == "bisection":
            here = middle
        elif step == "newton":
            here = closer(at(c - error / here[2]), middle)
        else:
            slope, bend = here[2:]
            here = closer(at(c - 2 * error * slope / (2 * slope**2 - error * bend)), middle)
        narrow(*here[:2])
