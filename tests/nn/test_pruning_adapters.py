"""Adapters of peft on pruned layers, and pruned adapters: what happens is right, or said aloud."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import pruned
from khot.nn import make_permanent, prune_global, prune_magnitude

# what importing and training with the package warns of is its own
pytestmark = pytest.mark.filterwarnings("ignore")

X = torch.randn(4, 16, generator=torch.Generator().manual_seed(3))


class Model(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a, self.b, self.head = nn.Linear(16, 12), nn.Linear(12, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.a(x).relu()).relu())


KINDS = {name: kind for name, kind in pruned.KINDS.items() if name in ("one by one", "n of m", "score")}
KINDS |= {"together": pruned.together, "one layer": lambda model: prune_magnitude(model.b, "weight", 0.5)}
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
ADAPTERS: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "rank-stabilised": {"use_rslora": True},
    "DoRA": {"use_dora": True},
    "PiSSA": {"init_lora_weights": "pissa"},
    "OLoRA": {"init_lora_weights": "olora"},
}
each_adapter = pytest.mark.parametrize("options", ADAPTERS.values(), ids=ADAPTERS)
IS_LOST = r"the pruned 'weight' of a Linear is lost.*khot\.nn\.make_permanent before"


def adapted(model: nn.Module, **options: Any) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(**{"r": 3, "target_modules": ["a", "b"], **options})
    return peft.get_peft_model(model, config)


def trained(model: nn.Module) -> None:
    """Some steps, after which the adapters do something."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.02)
    for _ in range(10):
        optimizer.zero_grad()
        (model.train()(X) - 1).square().mean().backward()
        optimizer.step()
    assert model.eval()(X).isfinite().all()


WAYS: dict[str, Any] = {
    "merge_adapter": lambda model: (model.merge_adapter(), model)[1],
    "merge_adapter safely": lambda model: (model.merge_adapter(safe_merge=True), model)[1],
    "merge_and_unload": lambda model: model.merge_and_unload(),
    "merge_and_unload, make_permanent": lambda model: make_permanent(model.merge_and_unload()),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@each_adapter
@each_kind
def test_what_is_merged_into_a_pruned_layer_is_not_lost_in_silence(kind: Any, options: Any, way: Any) -> None:
    """Nor what an adapter takes from it when it is initialised."""
    model = Model(0)
    kind(model)

    def merged() -> Tensor:
        made = adapted(model.eval(), **options)
        trained(made)
        result: Tensor = way(made)(X)
        return result

    with pytest.raises(RuntimeError, match=IS_LOST):
        merged()


@pytest.mark.parametrize("way", list(WAYS.values())[:3], ids=list(WAYS)[:3])
@each_adapter
@each_kind
def test_all_is_right_if_it_is_permanent_before(kind: Any, options: Any, way: Any) -> None:
    model = Model(1)
    kind(model)
    want = make_permanent(model).eval()(X).detach()
    made = adapted(model, **options)
    torch.testing.assert_close(made.eval()(X), want)
    trained(made)
    assert not torch.allclose(want, made(X), atol=1e-3)
    want = made(X).detach()
    torch.testing.assert_close(way(made)(X), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [ADAPTERS["LoRA"], ADAPTERS["DoRA"]], ids=["LoRA", "DoRA"])
@each_kind
def test_an_adapter_on_a_pruned_layer_learns(kind: Any, options: Any) -> None:
    model = Model(2)
    kind(model)
    want = model.eval()(X).detach()
    made = adapted(model, **options)
    torch.testing.assert_close(made.eval()(X), want)
    trained(made)
    assert not torch.allclose(made(X), want)
    with made.disable_adapter():
        torch.testing.assert_close(made(X), want)


@each_kind
def test_modules_to_save(kind: Any) -> None:
    """peft trains a copy of the module. A layer that was pruned with others cannot be copied alone."""
    model = Model(3)
    kind(model)
    made = adapted(model, modules_to_save=["head"])
    if kind in (KINDS["together"], KINDS["score"]):
        with pytest.raises(RuntimeError, match=r"was copied without others of the 3 .* modules_to_save"):
            made(X)
        model = Model(3)
        kind(model)
        made = adapted(make_permanent(model), modules_to_save=["head"])
    own = made.base_model.model.head.modules_to_save["default"]
    hidden = made.base_model.model.head.original_module
    before = hidden.weight.detach().clone()
    weight = own.weight.detach().clone()
    trained(made)
    assert torch.equal(hidden.eval().weight, before.where(before == 0, hidden.weight))
    assert not torch.equal(own.weight, weight)
    learned = {id(parameter) for parameter in made.parameters() if parameter.grad is not None}
    assert all(id(parameter) in learned for parameter in own.parameters())


@pytest.mark.parametrize("by", ["score", "magnitude"])
def test_pruned_adapters_are_merged_and_saved(by: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    made = adapted(Model(4))
    layers = [each for name, each in made.named_modules() if "lora_" in name and isinstance(each, nn.Linear)]
    trained(made)  # lora_B starts at 0
    prune_global([(layer, "weight") for layer in layers], 0.5, by=by, tau=0.5)
    pruned.mix_scores(made)
    trained(made)
    want = made.eval()(X).detach()
    make_permanent(made)
    assert not any(parametrize.is_parametrized(layer) for layer in layers)
    made.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(Model(4), tmp_path).eval()
    torch.testing.assert_close(loaded(X), want)
    torch.testing.assert_close(made.merge_and_unload()(X), want)
