"""What is pruned from the start as a whole gets no gradient, and the call says so."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from khot.nn import Anneal, prune_global, prune_magnitude

DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def said(*args: Any, **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prune_global(*args, **options)
    assert all(issubclass(each.category, UserWarning) and each.filename == __file__ for each in caught)
    return [str(each.message) for each in caught]


def gradients(model: nn.ParameterList, hosts: list[nn.Module]) -> list[Tensor]:
    """Of a loss in which every computed tensor has a part."""
    loss = sum((host.w.double() * torch.rand(host.w.shape).add(1)).sum() for host in hosts)
    return list(torch.autograd.grad(loss, list(model)))  # type: ignore[arg-type]


class Host(nn.Module):
    def __init__(self, w: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(w)


def drawn(rng: random.Random) -> tuple[list[nn.Module], dict[str, Any]]:
    """Tensors of several sizes and scales, of which some start at 0, and a way to prune them."""
    dtype = rng.choice(DTYPES)
    count = rng.randint(2, 4)
    scales = [rng.choice([0.0, 0.0, 1e-3, 1.0, 1.0]) for _ in range(count)]
    shapes = [[rng.randint(1, 4) for _ in range(rng.randint(1, 2))] for _ in range(count)]
    tensors = [scale * torch.randn(shape, dtype=dtype) for scale, shape in zip(scales, shapes, strict=True)]
    share = rng.choice([0.0, 0.2, 0.5, 0.9])
    options: dict[str, Any] = {"tau": rng.choice([0.1, 1.0, Anneal(2.0, 0.1, 5), Anneal(2.0, 0.1, None)])}
    options["amount"] = rng.choice([share, Anneal(share, 0.95, 10), Anneal(0.0, 0.9), Anneal(0.3, 0.9, None)])
    how = rng.choice(["plain", "p", "min_share", "cost", "free"])
    if how == "p":
        options["p"] = 1.5
    elif how == "min_share":
        options["min_share"] = rng.choice([0.05, 0.4])
        options["amount"] = 0.4
    elif how in ("cost", "free"):
        options["cost"] = [
            rng.choice([0.0] if how == "free" and i == 0 else [1.0, 5.0]) for i in range(count)
        ]
    return [Host(x) for x in tensors], options


@pytest.mark.parametrize("seed", range(80))
def test_the_call_names_exactly_what_gets_no_gradient(seed: int) -> None:
    torch.manual_seed(seed)
    hosts, options = drawn(random.Random(seed))
    messages = said([(host, "w") for host in hosts], **options)
    for value in options.values():
        if isinstance(value, Anneal):
            assert value._reads == 0
            value.steps = value.steps or 10
    originals = [host.parametrizations["w"].original for host in hosts]  # type: ignore[index]
    assert all(x.grad is None and x.requires_grad for x in originals)
    got = gradients(originals, hosts)  # type: ignore[arg-type]
    stuck = [i for i, grad in enumerate(got) if not grad.any()]
    if not stuck or len(stuck) == len(hosts):
        assert messages == []
        return
    [message] = messages
    named = [i for i in range(len(hosts)) if f"parameters[{i}] (w of Host)" in message]
    assert named == stuck[:3] and ("more" in message) == (len(stuck) > 3)
    assert all(cure in message for cure in ("by='score'", "min_share", "khot.nn.Anneal(0.0,"))


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_zero_biases_beside_weights(mode: str) -> None:
    """Many models are loaded in eval mode, pruned, and trained then."""
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).train(mode == "train")
    for layer in (model[0], model[2]):
        nn.init.zeros_(layer.bias)
    names = [(layer, name) for layer in (model[0], model[2]) for name in ("weight", "bias")]
    [message] = said(names, 0.5)
    assert "parameters[1] (bias of Linear), parameters[3] (bias of Linear) are pruned" in message


def test_silent_where_nothing_is_to_be_learned_or_known() -> None:
    def pair(**made: Any) -> list[tuple[nn.Module, str]]:
        modules = [nn.Linear(4, 3, bias=False, **made), nn.Linear(3, 4, bias=False, **made)]
        nn.init.zeros_(modules[1].weight)
        return [(module, "weight") for module in modules]

    class Half(nn.Module):
        def forward(self) -> float:
            raise AssertionError("is not asked before it is needed")

    assert said(pair(), 0.5)
    assert not said(pair(), 1.0) and not said(pair(), Half()) and not said(pair(), 0.5, tau=Half())
    assert not said(pair(device="meta"), 0.5)
    with FakeTensorMode():
        assert not said(pair(), 0.5)
    with torch.inference_mode():
        assert not said(pair(), 0.5)
    with torch.no_grad():
        assert said(pair(), 0.5)
    frozen = pair()
    frozen[1][0].requires_grad_(False)
    assert not said(frozen, 0.5)
    prune_magnitude(pair()[1][0], "weight", 0.5)  # alone, all of its entries are at the threshold
