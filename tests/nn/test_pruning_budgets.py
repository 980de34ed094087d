"""Pruning with bounds for every parameter, and N of every M entries."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import khot
from khot.nn import Anneal, make_permanent, prune_global, prune_n_m

# these tensors are small, so that some are pruned away as a whole
pytestmark = pytest.mark.filterwarnings("ignore:all entries of parameters")

SIZES = [(2, 3), (3, 4), (1, 5)]
SCALES = {"alike": (1.0, 1.0, 1.0), "one small": (1.0, 1e-3, 1.0), "apart": (1e-4, 1.0, 1e3)}


def tensors(scales: tuple[float, ...], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        s * torch.randn(size, generator=generator, dtype=torch.float64)
        for s, size in zip(scales, SIZES, strict=True)
    ]


def model_of(weights: list[Tensor], *args: Any, **options: Any) -> nn.ModuleList:
    model = nn.ModuleList(nn.Linear(w.shape[1], w.shape[0], bias=False, dtype=w.dtype) for w in weights)
    with torch.no_grad():
        for layer, w in zip(model, weights, strict=True):
            layer.weight.copy_(w)
    prune_global([(layer, "weight") for layer in model], *args, **options)
    return model


def bounds(weights: list[Tensor], low: float, high: float) -> list[tuple[int, int]]:
    return [(round(low * w.numel()), round(high * w.numel())) for w in weights]


def best_counts(weights: list[Tensor], k: int, limits: list[tuple[int, int]]) -> tuple[int, ...]:
    """How many entries each tensor keeps in the selection of most magnitude, by trying all."""
    sums = [
        torch.cat([torch.zeros(1), w.abs().flatten().sort(descending=True).values.cumsum(0)]) for w in weights
    ]
    allowed = itertools.product(*(range(low, high + 1) for low, high in limits))
    return max(
        (c for c in allowed if sum(c) == k),
        key=lambda c: sum(float(s[i]) for s, i in zip(sums, c, strict=True)),
    )


@pytest.mark.parametrize(("low", "high"), [(0.2, 1.0), (0.0, 0.6), (0.2, 0.6), (0.35, 0.5), (0.4, 0.4)])
@pytest.mark.parametrize("scales", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_hard_selection_is_the_best_within_the_bounds(
    low: float, high: float, scales: tuple[float, ...], seed: int
) -> None:
    weights = tensors(scales, seed)
    n, limits = sum(w.numel() for w in weights), bounds(weights, low, high)
    least, most = sum(a for a, _ in limits), sum(b for _, b in limits)
    for k in range(least, most + 1):
        model = model_of(weights, n - k, min_share=low, max_share=high).eval()
        want = best_counts(weights, k, limits)
        for layer, w, count in zip(model, weights, want, strict=True):
            mask = khot.topk_mask(w.abs().flatten(), count).view(w.shape)
            assert torch.equal(layer.weight, w * mask)


def test_bounds_that_do_not_bind_change_nothing() -> None:
    weights = tensors(SCALES["alike"])
    plain = model_of(weights, 12, tau=0.4)
    bounded = model_of(weights, 12, tau=0.4, min_share=0.01, max_share=0.99)  # rounded to 0 and to all
    for training in (True, False):
        for a, b in zip(plain.train(training), bounded.train(training), strict=True):
            assert torch.equal(a.weight, b.weight)


@pytest.mark.parametrize("p", [2.0, 1.5])
def test_parameters_at_a_bound_are_selected_by_themselves(p: float) -> None:
    first, small, last = tensors(SCALES["one small"])
    model = model_of(
        [first, small, last], 13, tau=0.3, p=p, min_share=0.25
    )  # 10 of 23, 3 of them of the small one
    options = {"tau": 0.3, "p": p, "rescale": True}
    both = khot.soft_topk_magnitude(torch.cat([first.flatten(), last.flatten()]), 7, **options)
    alone = khot.soft_topk_magnitude(small.flatten(), 3, **options)
    want = [both[:6].view(2, 3), alone.view(3, 4), both[6:].view(1, 5)]
    torch.testing.assert_close([layer.weight for layer in model], want, rtol=0, atol=0)
    assert (model.eval()[1].weight != 0).sum() == 3


def test_an_annealed_amount_that_cannot_be_kept() -> None:
    model = model_of(tensors(SCALES["one small"]), Anneal(0.5, 0.9, steps=1), min_share=0.25)
    model[0].parametrizations.weight[0].amount.step()
    with pytest.raises(ValueError, match="amount must keep 6 to 23 of the 23 entries"):
        model[0].weight  # noqa: B018


def blocks(weight: Tensor, m: int, dim: int) -> Tensor:
    """The entries of which n are kept, as rows."""
    return weight.movedim(dim, -1).reshape(-1, m)


LAYERS = {
    "linear": (lambda: nn.Linear(8, 6, dtype=torch.float64), 1),
    "linear, outputs": (lambda: nn.Linear(6, 8, dtype=torch.float64), 0),
    "convolution": (lambda: nn.Conv2d(8, 3, (3, 2), dtype=torch.float64), 1),
    "last dim": (lambda: nn.Conv1d(3, 2, 8, dtype=torch.float64), -1),
}


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (0, 2), (8, 8), (1, 2), (1, 1)])
@pytest.mark.parametrize(("make", "dim"), LAYERS.values(), ids=LAYERS)
def test_n_of_every_m(make: Any, dim: int, n: int, m: int) -> None:
    layer = make()
    learned = layer.weight
    w = learned.detach().clone()
    assert prune_n_m(layer, "weight", n, m, dim, tau=0.5) is layer
    rows = blocks(w, m, dim)
    soft = khot.soft_topk_magnitude(rows, n, tau=0.5, rescale=True)
    torch.testing.assert_close(blocks(layer.weight, m, dim), soft, rtol=0, atol=0)
    assert layer.parametrizations.weight.original is learned
    layer.eval()
    assert torch.equal(blocks(layer.weight, m, dim), rows * khot.topk_mask(rows.abs(), n))
    assert ((blocks(layer.weight, m, dim) != 0).sum(-1) == n).all()
    layer.weight.sum().backward()
    assert torch.equal(learned.grad, (layer.weight != 0).double())
    kept = layer.weight.detach().clone()
    assert make_permanent(layer) is layer
    assert torch.equal(layer.weight, kept) and layer.weight is learned
