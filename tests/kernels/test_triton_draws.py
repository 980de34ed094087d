"""The draws of the Triton kernels, interpreted: the same seed gives the same units as the reference."""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from khot import sigmoid_topk
from khot._kernels.reference import draws as reference
from khot._kernels.reference import philox
from khot.sampling._designs.pareto import LEAST

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    # Triton reads this variable at import, so a test cannot set it
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs with TRITON_INTERPRET=1"),
    # the interpreter computes with NumPy, which warns of infinities; they are intended
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

SEED = torch.tensor(-5)
SEEDS = [-1, 2**63 - 1, -(2**63), 0x299F31D0A4093822]


@pytest.fixture
def draws(kernels: ModuleType) -> Any:
    return sys.modules["khot._kernels.triton.draws"]


@pytest.fixture
def parts(draws: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The same, with rows in several parts."""
    for name, value in {"HELD": 8, "CHUNK": 16, "NODES": 4}.items():
        monkeypatch.setattr(draws, name, value)
    return draws


either = pytest.mark.parametrize("where", ["draws", "parts"])


def rows(n: int) -> tuple[Tensor, Tensor]:
    """Probabilities with some certain units, and their sums."""
    k = torch.tensor([n // 3, n // 2, n - n // 5])
    scores = 1.5 * torch.randn(3, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    scores[::2, : n // 10] = math.inf
    scores[1, : n // 10] = -math.inf
    return sigmoid_topk(scores, k), k


@pytest.mark.parametrize("value", SEEDS)
@pytest.mark.parametrize(("n", "offset"), [(1, 0), (33, 5), (64, 2**33 - 7)])
def test_uniforms(parts: Any, value: int, n: int, offset: int) -> None:
    seed = torch.tensor(value)
    assert torch.equal(parts.uniform(seed, 2, n, offset), philox.uniform_kernel(seed, 2, n, offset))


@either
@pytest.mark.parametrize("n", [1, 2, 19])
def test_tournaments(request: pytest.FixtureRequest, where: str, n: int) -> None:
    kernels, (probs, _) = request.getfixturevalue(where), rows(n)
    for x in (probs[1:], probs[:1].float().expand(2, n)):
        assert torch.equal(kernels.tournament(x, SEED), reference.tournament(x, SEED))


@either
def test_order_sampling(request: pytest.FixtureRequest, where: str) -> None:
    kernels, (probs, k) = request.getfixturevalue(where), rows(33)
    theta = torch.logit(probs)
    for x in (theta, 1e4 * theta + 100, theta.mT.contiguous().mT.float()):
        assert torch.equal(kernels.order_sample(x, k, SEED), reference.order_sample(x, k, SEED))
    theta = torch.tensor([[math.nan, 1.0, 2.0], [math.inf, -math.inf, math.inf], [math.nan] * 3])
    for size in (0, 2, 3):
        got = kernels.order_sample(theta, torch.tensor([size] * 3), SEED)
        assert (got.sum(-1) == size).all()
        assert size != 2 or not got[:2, :2].all(-1).any()


@either
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_pareto_samples(request: pytest.FixtureRequest, where: str, dtype: torch.dtype) -> None:
    """Whole sums and others, with certain units, in any layout."""
    kernels, probs = request.getfixturevalue(where), rows(45)[0].to(dtype)
    tolerance = 45 * torch.finfo(dtype).eps
    for x in (probs[1:], 0.9 * probs[:1].T.contiguous().T, probs[:1].expand(2, 45)):
        got, drawn = kernels.pareto_sample(x, SEED, LEAST, tolerance)
        want, _ = reference.pareto_sample(x, SEED, LEAST, tolerance)
        assert drawn and got.dtype == dtype and torch.equal(got, want) and got.any()


@either
def test_pareto_samples_are_left_to_the_reference(request: pytest.FixtureRequest, where: str) -> None:
    """Where some row has to be calibrated, or is not of probabilities."""
    kernels = request.getfixturevalue(where)
    good = torch.full((2, 20), 0.5)
    few = torch.stack((good[0], torch.tensor([0.99] + [0.01] * 19)))
    wrong = [good.clone() for _ in range(4)]
    for x, value in zip(wrong, (math.nan, 1.5, -0.1, math.inf), strict=True):
        x[1, 3] = value
    rule = SEED, LEAST, 1e-6
    for x in (few, *wrong) if where == "draws" else (few, wrong[0]):
        assert not kernels._by_formula(x, *rule, 2, 20)[1].all()
        (got, drawn), (want, same) = kernels.pareto_sample(x, *rule), reference.pareto_sample(x, *rule)
        assert drawn == same == (x is few) and torch.equal(got, want)
    assert kernels._by_formula(good, *rule, 2, 20)[1].all()


def test_a_threshold_out_of_reach_is_left_to_the_reference(
    parts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long row lists only the keys near 1."""
    x = torch.full((1, 33), 0.5)
    rule = SEED, LEAST, 1e-6
    assert parts._by_formula(x, *rule, 1, 33)[1].all()
    monkeypatch.setattr(parts, "DEVIATIONS", parts.tl.constexpr(1e-3))
    assert not parts._by_formula(x, *rule, 1, 33)[1].all()
    got, drawn = parts.pareto_sample(x, *rule)
    assert drawn and torch.equal(got, reference.pareto_sample(x, *rule)[0])


def test_equal_keys_are_chosen_from_the_left(draws: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there is room for, with every key the same."""
    x, k = torch.full((1, 30), 0.5), 15
    for held in (64, 8):
        monkeypatch.setattr(draws, "HELD", held)
        monkeypatch.setattr(draws, "uniforms", _halves.__get__(draws))
        got, drawn = draws.pareto_sample(x, SEED, LEAST, 1e-6)
        assert drawn and torch.equal(got, (torch.arange(30) < k).float()[None])


def _halves(draws: Any, seed: Any, row: Any, block: Any) -> Any:
    half = block.to(draws.tl.float64) * 0 + 0.5
    return half, half


def test_nothing_to_draw(draws: Any) -> None:
    for shape in ((0, 4), (3, 0)):
        x = torch.zeros(shape, dtype=torch.float64)
        assert draws.tournament(x, SEED).shape == shape
        assert draws.order_sample(x, torch.zeros(shape[0]), SEED).shape == shape
        assert draws.pareto_sample(x, SEED, LEAST, 0.0)[0].shape == shape
        assert draws.uniform(SEED, *shape, 3).shape == shape


def test_launches(draws: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for rows that a program holds, three for longer ones; a launch for every NODES units of a row."""
    launches: list[str] = []
    for kernel in draws.KERNELS:
        name = kernel.fn.__name__

        class Counted:
            def __getitem__(self, grid: object, name: str = name) -> Any:
                return lambda *args, **options: launches.append(name)

        monkeypatch.setattr(draws, name, Counted())
    x = torch.empty(5, 4096)
    draws.pareto_sample(x, SEED, LEAST, 0.0)
    draws.tournament(x[:, :2048], SEED)
    draws.uniform(SEED, 5, 4096, 0)
    assert launches == ["_pareto", "_duels", "_uniform"]
    draws.pareto_sample(torch.empty(1, 100_000), SEED, LEAST, 0.0)
    assert launches[3:] == ["_part_moments", "_part_keys", "_choose"]
