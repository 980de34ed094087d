"""Every layer names its width when it gets an input of another one, before broadcasting hides the error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import khot

WIDTH = 8
# layers that take inputs of any width
ANY_WIDTH = {"Anneal", "SoftTopK"}


class Layer(NamedTuple):
    make: Callable[[], nn.Module]
    call: Callable[[Any, Tensor], object]  # with an input whose last dim should be WIDTH
    name: str = "input"


def good(*shape: int) -> Tensor:
    return torch.zeros(*shape, WIDTH)


def moe() -> khot.nn.MixtureOfExperts:
    router = khot.nn.TokenChoiceRouter(WIDTH, num_experts=4, k=2)
    return khot.nn.MixtureOfExperts(router, [nn.Identity() for _ in range(4)])


def attention() -> khot.nn.TopKAttention:
    return khot.nn.TopKAttention(WIDTH, 2, 2, batch_first=True)


def sae(**options: Any) -> khot.nn.TopKSAE:
    return khot.nn.TopKSAE(WIDTH, 16, 4, **options)


LAYERS = {
    "KHotGate": Layer(lambda: khot.nn.KHotGate(WIDTH, 3), nn.Module.__call__),
    "KHotGate-prices": Layer(
        lambda: khot.nn.KHotGate(WIDTH, 1.0, cost=torch.ones(WIDTH)), nn.Module.__call__
    ),
    "TopKSAE": Layer(sae, nn.Module.__call__),
    "TopKSAE-batch": Layer(lambda: sae(batch=True), nn.Module.__call__),
    "TopKSAE-encode": Layer(sae, khot.nn.TopKSAE.encode),
    "TopKSAE-top": Layer(sae, khot.nn.TopKSAE.top),
    "TopKSAE-decode": Layer(
        lambda: khot.nn.TopKSAE(5, WIDTH, 4), lambda sae, code: sae.decode(code), name="code"
    ),
    "ExpertChoiceRouter": Layer(lambda: khot.nn.ExpertChoiceRouter(WIDTH, num_experts=4), nn.Module.__call__),
    "TokenChoiceRouter": Layer(
        lambda: khot.nn.TokenChoiceRouter(WIDTH, num_experts=4, k=2), nn.Module.__call__
    ),
    "BalancedRouter": Layer(lambda: khot.nn.BalancedRouter(WIDTH, num_experts=4, k=2), nn.Module.__call__),
    "TopKRouter": Layer(lambda: khot.nn.TopKRouter(WIDTH, num_experts=4, k=2), nn.Module.__call__),
    "TokenChoiceRouter-learned": Layer(
        lambda: khot.nn.TokenChoiceRouter(WIDTH, num_experts=4, k=2, learnable_k=True), nn.Module.__call__
    ),
    "MixtureOfExperts": Layer(moe, nn.Module.__call__),
    "QuantileBalancer": Layer(lambda: khot.nn.QuantileBalancer(WIDTH, 2), nn.Module.__call__, name="scores"),
    "TopKAttention-query": Layer(attention, lambda layer, x: layer(x, good(3, 3), good(3, 3)), name="query"),
    "TopKAttention-key": Layer(attention, lambda layer, x: layer(good(3, 3), x, good(3, 3)), name="key"),
    "TopKAttention-value": Layer(attention, lambda layer, x: layer(good(3, 3), good(3, 3), x), name="value"),
}
OTHERS = {"SoftKNN"}  # whose width is the templates': below


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("width", [1, WIDTH - 1, WIDTH + 1, 2 * WIDTH])
@pytest.mark.parametrize("name", LAYERS)
def test_another_width_is_named(name: str, width: int, training: bool) -> None:
    layer = LAYERS[name]
    module = layer.make().train(training)
    layer.call(module, good(3, 3))
    x = torch.zeros(3, 3, width)
    message = (
        rf"^{layer.name} must have shape \(\.\.\., {WIDTH}\) for this \w+, but got shape \(3, 3, {width}\)$"
    )
    with pytest.raises(ValueError, match=message):
        layer.call(module, x)


def test_features_of_queries_and_templates() -> None:
    knn = khot.nn.SoftKNN(2, 3)
    query, label = torch.zeros(4, WIDTH), torch.zeros(5, dtype=torch.int64)
    for width in (1, WIDTH + 1):
        for call in (knn, knn.predict):
            with pytest.raises(
                ValueError, match=rf"equally many features .* shapes \(4, {WIDTH}\) and \(5, {width}\)"
            ):
                call(query, torch.zeros(5, width), label)


def test_sizes_of_queries_keys_and_values() -> None:
    query = torch.zeros(2, 3, WIDTH)
    with pytest.raises(ValueError, match=r"query and key .* \(2, 3, 8\) and \(2, 3, 1\)"):
        khot.nn.topk_attention(query, query[..., :1], query, 2)
    with pytest.raises(ValueError, match=r"key and value .* \(2, 3, 8\) and \(2, 1, 8\)"):
        khot.nn.topk_attention(query, query, query[:, :1], 2)


def test_values_and_indices_of_one_shape() -> None:
    values, indices = sae().top(good(3))
    with pytest.raises(ValueError, match=r"the same shape \(\.\.\., m\), but got \(3, 1\) and \(3, 4\)"):
        sae().decode(values[:, :1], indices)


def test_every_layer_is_here() -> None:
    public = [getattr(khot.nn, name) for name in khot.nn.__all__]
    layers = {c.__name__ for c in public if isinstance(c, type) and issubclass(c, nn.Module)}
    assert layers == {name.partition("-")[0] for name in LAYERS} | OTHERS | ANY_WIDTH
