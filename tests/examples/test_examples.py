"""The examples in a shortened form: the claim of each example holds, and its picture is drawn."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from reproduce.harness import data

# so few steps leave a layer soft, and it says so
pytestmark = pytest.mark.filterwarnings("ignore:.* is not used as it was trained:UserWarning")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def short_or(steps: int, *, short: int = 20) -> Any:
    """The longest examples run for a few steps, which show that they run, and in the slow tests for as many
    as their claim takes."""
    return pytest.mark.parametrize("steps", [short, pytest.param(steps, marks=pytest.mark.slow)])


def example(name: str) -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name=name))


@pytest.fixture
def picture(tmp_path: Path) -> Iterator[Path]:
    """Where an example draws, which it has to."""
    path = tmp_path / "drawn.png"
    yield path
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert path.stat().st_size < 100_000


def test_soft_topk(picture: Path) -> None:
    script = example("soft_topk")
    result = script.run(steps=160, items=64)
    found = {method: course[-1] for method, course in result.found.items()}
    assert found["soft"] > found["softmax"] > found["hard"] + 0.2
    assert result.error["soft"] < 0.7 * result.error["softmax"]
    script.draw(result, 64, picture)


@short_or(300)
def test_attention(picture: Path, steps: int) -> None:
    script = example("attention")
    errors = script.run(steps=steps)
    if steps == 300:
        assert errors["topk"][32] < 0.5 * errors["softmax"][32]
        assert errors["topk"][1024] < 0.2 * errors["softmax"][1024]
    script.draw(errors, picture)


@short_or(120, short=2)
def test_beam_search(picture: Path, steps: int) -> None:
    script = example("beam_search")
    results = script.run(steps=steps, methods=("beam", "forced"))
    beam, forced = (results[method].scores[-1] for method in ("beam", "forced"))
    if steps == 120:
        assert min(forced.forced[1:]) > 0.95  # it learned to undo a shuffle,
        assert forced.exact < 0.4 < 0.6 < beam.exact  # and to guess
    script.draw(results, picture)


@short_or(700)
def test_gate(picture: Path, steps: int) -> None:
    script = example("gate")
    images = data.load_digits()
    results = script.run(images, 10, steps=steps)
    assert results["fixed"].mask.sum() == 10
    assert results["learned"].size[-1] < results["learned"].size[0]
    if steps == 700:
        assert results["fixed"].accuracy > results["variance"].accuracy
    script.draw(images, results, picture)


def test_pruning(picture: Path) -> None:
    script = example("pruning")
    images = data.load_digits()
    results = script.run(images, steps=300)
    assert min(results[method].weights for method in ("score", "cuts")) >= 169  # of 64·32 + 32·32 + 32·10
    assert max(results[method].weights for method in ("score", "cuts")) <= 170
    assert results["score"].error[-1] < 0.7 * results["cuts"].error[-1]
    script.draw(images, results, picture)


@short_or(400)
def test_mixture(picture: Path, steps: int) -> None:
    script = example("mixture")
    results = script.run(steps=steps, runs=1)
    if steps == 400:
        assert results["soft"].error < 0.8 * min(results["hard"].error, results["balanced"].error)
        assert results["soft"].entropy > results["hard"].entropy
    script.draw(results, picture)


@short_or(160)
def test_sae(picture: Path, steps: int) -> None:
    script = example("sae")
    images = data.load_digits()
    results = script.run(images, 6, steps=steps)
    straight, hard = results["straight"], results["hard"]
    if steps == 160:
        assert straight.dead < 0.5 * hard.dead and straight.error[-1] < 1.15 * hard.error[-1]
    script.draw(images, results, picture)


def test_assign(picture: Path) -> None:
    script = example("assign")
    x = script.points(data.load_digits())[:600]
    results = script.run(x, steps=24)
    for method in ("moved", "sinkhorn", "assign"):
        assert results[method].sizes.tolist() == [60] * 10
    assert results["lloyd"].sizes.max() > 75
    assert results["assign"].cost < 0.99 * results["moved"].cost
    assert results["assign"].cost < 1.01 * results["sinkhorn"].cost
    assert results["assign"].off < 1e-12
    script.draw(x, results, picture)


@short_or(800)
def test_gate_prices(picture: Path, steps: int) -> None:
    script = example("gate_prices")
    images = data.load_digits()
    results = script.run(images, steps)
    prices = script.price_list(images)
    for result in results.values():
        assert result.price == (result.mask * prices).sum() <= 0.1 * prices.sum()
    if steps == 800:
        assert results["prices"].accuracy > results["count"].accuracy + 0.02
    script.draw(images, results, picture)


def test_packed(picture: Path) -> None:
    script = example("packed")
    images = data.load_digits()
    kept, ranked = found = script.run(images, keep=8, steps=60, seeds=1)
    assert kept["soft_topk"][0] > kept["at random"][0] + 0.05
    assert min(values[0] for values in ranked.values()) > 0.8  # at random it is 0.5
    script.draw(images, found, 8, picture)


def pruned_to_macs(script: Any, picture: Path) -> None:
    dense, results = script.run(data.load_digits(), steps=4, runs=1, shares=(0.1,))
    whole = script.macs(script.network())
    assert 0.099 * whole < results["cost"][0][0].macs <= 0.1 * whole
    script.draw(dense, results, (0.1,), picture)


def pruned_in_patterns(script: Any, picture: Path) -> None:
    patterns = ((1, 16),)
    dense, errors, weight = script.run(data.load_digits(), steps=4, runs=2, patterns=patterns)
    assert ((weight != 0).unflatten(1, (-1, 16)).sum(-1) == 1).all()
    script.draw("digits", dense, errors, weight, picture, patterns)


def quantiles(script: Any, picture: Path) -> None:
    images = data.load_digits()
    script.draw(images, script.run(images, steps=20), 0, picture)


# What these claim is held by test_defaults.py, with the numbers of the pages; here they run and draw.
RUNS: dict[str, Callable[[Any, Path], None]] = {
    "balancing": lambda script, picture: script.draw(script.run(steps=4), picture),
    "budget": lambda script, picture: script.draw(script.run(steps=5, runs=1), picture),
    "indexer": lambda script, picture: script.draw(script.run(steps=4), picture),
    "knn": lambda script, picture: script.draw(script.run(data.load_digits(), steps=4), picture),
    "moe_llm": lambda script, picture: script.draw(
        {method: script.train(method, 4, 0)[0] for method in ("none", "khot")}, picture
    ),
    "policy": lambda script, picture: script.picture(script.run(steps=2, runs=1), 2, picture),
    "pruning_macs": pruned_to_macs,
    "pruning_n_m": pruned_in_patterns,
    "quantile": quantiles,
    "ranking": lambda script, picture: script.draw(
        script.run(data.load_digits(), steps=20, seeds=1, rates=(0.03,)), picture, lengths=(16, 64)
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_runs_and_draws(name: str, picture: Path) -> None:
    RUNS[name](example(name), picture)


def test_policies_draw_sets() -> None:
    script = example("policy")
    torch.manual_seed(0)
    logits = torch.randn(3, script.N)
    for policy in script.NAMES:
        scores = logits @ torch.randn(script.N, len(script.SETS)) if policy == "all" else logits
        chosen, log_prob, entropy = script.draw(policy, scores)
        assert chosen.shape == (script.SAMPLES, 3, script.N) and (chosen.sum(-1) == script.K).all()
        assert log_prob.shape == (script.SAMPLES, 3) and entropy.shape == (3,)
    # the probability of a set is the sum of those of its 24 orders; here, of equal logits
    _, log_prob, _ = script.draw("order", torch.zeros(1, script.N))
    assert torch.allclose(log_prob, -torch.tensor(16.0 * 15 * 14 * 13).log())
    world, state = script.valves(0), torch.randn(5, script.STATE)
    best = script.SETS[world.reward(state.unsqueeze(1), script.SETS).argmax(1)]
    assert torch.allclose(world.share(state, best), torch.tensor(1.0))
