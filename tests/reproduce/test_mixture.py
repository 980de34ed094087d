"""Experts for kinds of tokens: the task has an exact answer, and routers are what they are called."""

from __future__ import annotations

import pytest
import torch

import khot
from reproduce.papers.mixture import METHODS, Tokens, router_of


def test_tokens_are_of_unequal_kinds_with_a_rotation_each() -> None:
    tokens = Tokens(seed=0)
    x, y, kinds = tokens.draw(8, 3)
    assert x.shape == y.shape == (8, 512, 16) and kinds.shape == (8, 512)
    torch.testing.assert_close(x.norm(dim=-1), y.norm(dim=-1))
    one = kinds == 5
    solved = torch.linalg.lstsq(x[one], y[one]).solution
    torch.testing.assert_close(solved.mT, tokens.rotations[5], rtol=0, atol=1e-4)
    counts = kinds.flatten().bincount(minlength=16)
    assert counts[0] > 2.5 * counts[-1] > 0


def test_a_draw_depends_on_seed_and_number_alone() -> None:
    first = Tokens(seed=0).draw(1, 7)
    torch.manual_seed(5)
    for a, b in zip(first, Tokens(seed=0).draw(1, 7), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(first[0], Tokens(seed=0).draw(1, 8)[0])
    assert not torch.equal(first[0], Tokens(seed=1).draw(1, 7)[0])


@pytest.mark.parametrize("method", METHODS)
def test_routers_are_hard_in_training_where_they_are_called_so(method: str) -> None:
    torch.manual_seed(0)
    x = Tokens(seed=0).draw(1, 0)[0]
    router = router_of(method, 10)
    selection = router.train()(x).selection
    assert bool(((selection == 0) | (selection == 1)).all()) == method.startswith("hard")
    assert bool(((s := router.eval()(x).selection) == 0).logical_or(s == 1).all())
    if method.startswith("hard"):
        routing = router(x)
        want = routing.selection * (x @ router.weight.mT).softmax(-1)
        torch.testing.assert_close(routing.weights, want)
        routing.weights.sum().backward()
        assert router.weight.grad is not None and router.weight.grad.any()
    else:
        assert isinstance(router.tau, khot.nn.Anneal)


def test_smoke_run(smoke) -> None:
    found = smoke("mixture")
    for method in METHODS:
        assert f"| {method} |" in found.report
        assert 0 < found.last("error", method=method) < 1.2
    # each expert takes equally many tokens of a row
    assert found.last("violation", method="expert choice") == 0
    assert all(found.last("dropped", method=method) == 0 for method in METHODS if method != "expert choice")
