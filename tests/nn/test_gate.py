"""KHotGate: the samples are sample_khot's, the choice is the hard operator's, and it finds what counts."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import khot
from drawn import normal as scores
from khot.nn import Anneal, KHotGate

ESTIMATORS = ("straight_through", "second_order", "gumbel", "simple", "imle", "sequential_softmax", "ncpss")


def gate(
    k: float | None, n: int = 8, estimator: str = "straight_through", design: str | None = None
) -> KHotGate:
    layer = KHotGate(n, k, estimator=estimator, design=design, dtype=torch.float64)
    with torch.no_grad():
        layer.logits.copy_(scores(n, seed=7))
    return layer


@pytest.mark.parametrize(
    ("k", "estimator"), [*((3, e) for e in ESTIMATORS), (None, "straight_through"), (None, "second_order")]
)
def test_train_mode_is_sample_khot_and_its_gradient(k: int | None, estimator: str) -> None:
    layer, x = gate(k, estimator=estimator), scores(5, 8).requires_grad_()
    weight = scores(5, 8, seed=1)
    torch.manual_seed(0)
    (layer(x) * weight).sum().backward()
    torch.manual_seed(0)
    logits = layer.logits.detach().requires_grad_()
    sample = khot.estimators.sample_khot(logits.expand(5, 8), k, estimator=estimator)
    (x.detach() * sample * weight).sum().backward()
    torch.testing.assert_close(layer.logits.grad, logits.grad)
    torch.testing.assert_close(x.grad, sample.detach() * weight)
    if k is not None:
        assert (sample.sum(-1) == k).all()


@pytest.mark.parametrize("design", ["pareto", "conditional_poisson", "pivotal", "systematic"])
def test_design_and_probs(design: str) -> None:
    layer, size = gate(3, design=design), 4000
    torch.manual_seed(0)
    share = layer(torch.ones(size, 8, dtype=torch.float64)).mean(0)
    # a share of 4000 draws deviates by at most 0.0079; 8 of them stay within 5.4 deviations but for 1e-6,
    # and pareto is off by 1e-3 itself
    torch.testing.assert_close(share, layer.probs, rtol=0, atol=5.4 * 0.0079 + 1e-3)
    assert f"design='{design}'" in repr(layer)


def test_eval_mode_is_the_hard_operator() -> None:
    x = scores(5, 8)
    layer = gate(3).eval()
    want = khot.topk_mask(layer.logits, 3)
    assert layer.mask.equal(want) and layer(x).equal(x * want) and not layer.mask.requires_grad
    learned = gate(None).eval()
    want = (learned.probs > 0.5).double()
    assert 0 < want.sum() < 8 and learned(x).equal(x * want)


def test_probs() -> None:
    torch.testing.assert_close(gate(2.5).probs, khot.sigmoid_topk(gate(2.5).logits, 2.5))
    torch.testing.assert_close(gate(None).probs, gate(None).logits.sigmoid())


def test_every_example_gets_a_sample_of_its_own() -> None:
    torch.manual_seed(0)
    # 200 samples of 70 subsets: all alike happens with probability 70^-199
    assert len(gate(4)(torch.ones(2, 100, 8)).view(-1, 8).unique(dim=0)) > 1


def test_refuses() -> None:
    with pytest.raises(ValueError, match="k must"):
        KHotGate(4, None, estimator="gumbel")
    with pytest.raises(ValueError, match="design must"):
        KHotGate(4, 2, estimator="simple", design="pareto")


def test_the_generator_of_the_user_is_left_alone() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    KHotGate(4, 2)
    assert torch.get_rng_state().equal(state)


PLACES = {
    "meta": lambda: torch.device("meta"),
    "fake": FakeTensorMode,
    "fake meta": lambda: stacked(FakeTensorMode(), torch.device("meta")),
}


@contextlib.contextmanager
def stacked(*contexts: AbstractContextManager[object]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("k", "estimator"), [*((3, e) for e in ESTIMATORS), (None, "straight_through"), ("annealed", "gumbel")]
)
def test_made_without_data(k: object, estimator: str, place: str) -> None:
    """Arguments are checked by a draw, which needs data of its own."""
    state = torch.get_rng_state()
    with PLACES[place]():
        size = Anneal(3, 2, 5) if k == "annealed" else k
        layer = KHotGate(8, size, estimator=estimator)
        got = layer.eval()(torch.ones(5, 8))
        assert got.shape == (5, 8) and layer.probs.shape == (8,)
        with pytest.raises(ValueError, match="k must"):
            KHotGate(4, 5, estimator=estimator)
        with pytest.raises(ValueError, match="design must"):
            KHotGate(4, 2, design="no design")
    assert torch.get_rng_state().equal(state)
    assert isinstance(layer.logits, FakeTensor) or layer.logits.device.type == "meta"


def test_numbers_of_modules_are_still_checked() -> None:
    with pytest.raises(ValueError, match="k must"):
        KHotGate(4, Anneal(5, 2, 5))
    with pytest.raises(ValueError, match="tau must"):
        KHotGate(4, 2, estimator="gumbel", tau=Anneal(-1, 2, 5))


@pytest.mark.parametrize("seed", range(5))
def test_numbers_that_get_their_steps_later_are_checked_as_far_as_they_are_known(seed: int) -> None:
    """An Anneal without steps has a start; a module that computes with one has nothing yet."""

    class Scaled(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self) -> Tensor:
            return 0.5 * self.inner()

    draw = random.Random(seed)
    n = draw.randint(2, 9)
    good, bad = draw.uniform(1, n), draw.uniform(n + 0.1, 99)
    estimator = draw.choice(["second_order", "gumbel", "imle"])
    options: list[dict[str, Any]] = [{"estimator": estimator}, {"cost": [1.0] * n}]
    for option in options:
        for k in (good, Anneal(good, 1.0), Scaled(Anneal(2 * good, 1.0)), Scaled(Scaled(Anneal(4, 2)))):
            for tau in (None, 0.3, Anneal(1.0, 0.05), Scaled(Anneal(1.0, 0.05))):
                layer = KHotGate(n, k, tau=tau, **option)
                anneals = [part for part in layer.modules() if isinstance(part, Anneal)]
                assert all(each.steps is None and each._reads == 0 for each in anneals)
                for each in anneals:
                    each.steps = 10
                assert layer(torch.ones(3, n)).shape == (3, n)
                for each in anneals:
                    each.steps, each._reads = None, 0
        KHotGate(n, Scaled(Anneal(bad, bad)), tau=Scaled(Anneal(1.0, 0.05)), **option)
        with pytest.raises(ValueError, match=r"^k must"):
            KHotGate(n, Anneal(bad, good), tau=Anneal(1.0, 0.05), **option)
        with pytest.raises(ValueError, match=r"^tau must"):
            KHotGate(n, good, tau=Anneal(-1.0, 0.05), **option)
        with pytest.raises(RuntimeError, match="steps must be set before training"):
            KHotGate(n, good, tau=Anneal(1.0, 0.05), **option)(torch.ones(3, n))


@pytest.mark.parametrize("steps", [None, 5])
@pytest.mark.parametrize("estimator", ["straight_through", "simple"])
def test_an_annealed_tau_without_effect_is_refused(estimator: str, steps: int | None) -> None:
    with pytest.raises(
        ValueError, match=f"tau has no effect with estimator '{estimator}'; it is used by sec"
    ):
        KHotGate(8, 3, tau=Anneal(1.0, 0.05, steps), estimator=estimator)


# --------------------------------------------------------------------------- features with prices

PRICES = [1.0, 0.5, 2.0, 1.0, 0.0, 3.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("budget", [0.0, 1.7, 4.0, 7.5])
def test_prices(budget: float, dtype: torch.dtype) -> None:
    layer = KHotGate(6, budget or Anneal(0, 0, 1), cost=PRICES, tau=0.5, dtype=dtype)
    with torch.no_grad():
        layer.logits.copy_(torch.tensor([0.3, -1.0, 2.0, 0.5, 0.1, 1.0]))
    cost, x = torch.tensor(PRICES).double(), torch.ones(3, 6, dtype=dtype)
    soft = layer(x)
    assert soft.dtype == dtype and torch.equal(soft[0], layer.probs) and torch.equal(soft[0], soft[2])
    assert torch.equal(layer.probs, khot.soft_budget(layer.logits, cost, budget, tau=0.5))
    assert abs((soft[0].double() * cost).sum().item() - budget) <= 2e-2 if dtype == torch.bfloat16 else 1e-5
    hard = layer.eval()(x)
    assert torch.equal(hard[0], khot.budget_mask(layer.logits, cost, budget))
    assert torch.equal(hard[0], layer.mask)
    assert (hard[0].double() * cost).sum() <= budget


def test_prices_are_never_cast_nor_saved_and_come_back() -> None:
    layer = KHotGate(2, 0.3, cost=[0.1, 0.7])
    for moved in (layer.half(), layer.bfloat16(), layer.to(torch.float64)):
        assert moved.cost.dtype == torch.float64 and moved.cost.tolist() == [0.1, 0.7]
    assert set(layer.state_dict()) == {"logits"}
    with torch.device("meta"):
        empty = KHotGate(2, 0.3, cost=[0.1, 0.7])
    assert empty.cost.is_meta
    made = empty.to_empty(device="cpu")
    made.load_state_dict(layer.state_dict())
    assert made.cost.tolist() == [0.1, 0.7] and torch.equal(made.mask.double(), layer.mask.double())


@pytest.mark.parametrize(
    ("args", "options", "error", "message"),
    [
        ((3, None), {}, ValueError, "^k must be a budget with a cost, but got None"),
        ((3, 4.0), {}, ValueError, r"^k must lie in \[0, 3.0\], the cost of all features, but got 4.0"),
        ((3, Anneal(4.0, 1.0, 3)), {}, ValueError, r"^k must lie in \[0, 3.0\]"),
        ((3, 1.0), {"cost": [1.0, 1.0]}, ValueError, r"^cost must have shape \(3,\), but got \(2,\)"),
        ((3, 1.0), {"cost": [1.0, -1.0, 1.0]}, ValueError, "^cost must be finite and >= 0"),
        ((3, 1.0), {"cost": torch.tensor([1.0, math.inf, 1.0])}, ValueError, "^cost must be finite and >= 0"),
        ((3, 1.0), {"cost": torch.ones(3).bool()}, TypeError, "^cost must be a real"),
        ((3, 1.0), {"cost": 1.0}, TypeError, "^cost must be a tensor or a list"),
        ((3, 1.0), {"cost": torch.ones(3, device="meta")}, ValueError, "^cost must have values"),
        ((3, 1.0), {"estimator": "gumbel"}, ValueError, "^estimator must not be given with a cost"),
        ((3, 1.0), {"design": "pivotal"}, ValueError, "^design must not be given with a cost"),
        ((3, 1.0), {"tau": 0.0}, ValueError, "^tau must"),
        ((3, 1.0), {"tau": Anneal(-1.0, 1.0, 2)}, ValueError, "^tau must"),
    ],
    ids=str,
)
def test_refuses_with_prices(
    args: tuple[Any, ...], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        KHotGate(*args, **{"cost": [1.0, 1.0, 1.0], **options})


@pytest.mark.parametrize("k", [3, 2.5, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_samples_are_those_of_each_example_alone(k: float | None, dtype: torch.dtype) -> None:
    """The probabilities, which are the same for all examples, are computed once."""
    gate = khot.nn.KHotGate(8, k, dtype=dtype)
    with torch.no_grad():
        gate.logits.copy_(torch.linspace(-2, 2, 8))
    x, grad = torch.rand(5, 6, 8), torch.randn(5, 6, 8, generator=torch.Generator().manual_seed(0))
    found = []
    for call in (gate, lambda x: x * khot.sample_khot(gate.logits.expand(x.shape), k)):
        torch.manual_seed(1)
        y = call(x)
        found.append((y.detach(), *torch.autograd.grad(y, gate.logits, grad), torch.get_rng_state()))
    (y, dx, state), (each, of_each, after) = found
    assert torch.equal(y, each) and torch.equal(state, after)
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(dx, of_each, rtol=tolerance, atol=tolerance)
