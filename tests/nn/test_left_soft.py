"""A layer that is trained with one selection and used with another says so, and no other does.

(Warnings are errors in these tests.)
"""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import khot
import modes
from drawn import normal as scores
from khot.nn import Anneal
from khot.nn._left_soft import FAR, LeftSoft, outside
from khot.nn.anneal import SEVERAL

SOFT, SHARP = 3.0, 1e-3
TAU = "lower its tau in the course of training with khot.nn.Anneal"
LABELS = torch.arange(9) % 4

# these tensors are small, so that some are pruned away as a whole
pytestmark = pytest.mark.filterwarnings("ignore:all entries of parameters")


@dataclass(frozen=True)
class Case:
    make: Callable[[Any], nn.Module]  # takes tau
    inputs: tuple[Tensor, ...]
    name: str  # how the warning starts
    cure: str = TAU
    keywords: tuple[tuple[str, Any], ...] = ()


def gate(tau: float) -> nn.Module:
    """Without a tau in the selection of eval mode: far where all logits are equal."""
    layer = khot.nn.KHotGate(6, 2, dtype=torch.float64)
    if tau == SHARP:
        with torch.no_grad():
            layer.logits += 50 * scores(6)
    return layer


def prices(tau: float) -> nn.Module:
    layer = khot.nn.KHotGate(6, 2.0, cost=[1, 1, 1, 2, 1, 1], tau=tau, dtype=torch.float64)
    with torch.no_grad():
        layer.logits += scores(6)
    return layer


def router(name: str) -> Callable[[Any], nn.Module]:
    def make(tau: Any) -> nn.Module:
        torch.manual_seed(0)
        return getattr(khot.nn, name)(5, 4, 1, tau=tau, dtype=torch.float64)

    return make


def mixture(tau: Any) -> nn.Module:
    experts = [nn.Linear(5, 3, dtype=torch.float64) for _ in range(4)]
    return khot.nn.MixtureOfExperts(router("TokenChoiceRouter")(tau), experts)


def pruned(tau: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    khot.nn.prune_global([(model[0], "weight"), (model[2], "weight")], 0.9, tau=tau)
    return model


def pruned_one(tau: Any) -> nn.Module:
    torch.manual_seed(0)
    return khot.nn.prune_magnitude(nn.Linear(5, 8, dtype=torch.float64), "weight", 0.9, tau=tau)


def pruned_blocks(tau: Any) -> nn.Module:
    torch.manual_seed(0)
    return khot.nn.prune_n_m(nn.Linear(8, 8, dtype=torch.float64), "weight", 1, 8, tau=tau)


def sae(tau: Any, **kw: Any) -> nn.Module:
    torch.manual_seed(0)
    return khot.nn.TopKSAE(5, 30, 2, tau=tau, dtype=torch.float64, **kw)


def attention(tau: Any) -> nn.Module:
    torch.manual_seed(0)
    return khot.nn.TopKAttention(8, 2, 2, tau=tau, batch_first=True, dtype=torch.float64)


TOKENS, SEQUENCE = scores(2, 9, 5), scores(2, 9, 8)
CASES = {
    "SoftTopK": Case(
        lambda tau: khot.nn.SoftTopK(2, dim=0, tau=tau),
        (scores(9, 3),),
        "SoftTopK(k=2",
        TAU + ", or set hard",
    ),
    "SoftKNN": Case(
        lambda tau: khot.nn.SoftKNN(2, 4, tau=tau), (scores(5, 6), scores(9, 6), LABELS), "SoftKNN(k=2"
    ),
    "TopKAttention": Case(attention, (SEQUENCE,) * 3, "TopKAttention(embed_dim=8"),
    "TopKAttention-thrifty": Case(
        attention, (SEQUENCE,) * 3, "TopKAttention(embed_dim=8", keywords=(("need_weights", False),)
    ),
    "KHotGate": Case(
        gate, (scores(3, 6),), "KHotGate(n=6", "train it longer, or with a larger learning rate"
    ),
    "KHotGate-prices": Case(prices, (scores(3, 6),), "KHotGate(n=6"),
    "ExpertChoiceRouter": Case(router("ExpertChoiceRouter"), (TOKENS,), "ExpertChoiceRouter(in_features=5"),
    "TokenChoiceRouter": Case(router("TokenChoiceRouter"), (TOKENS,), "TokenChoiceRouter(in_features=5"),
    "BalancedRouter": Case(router("BalancedRouter"), (TOKENS,), "BalancedRouter(in_features=5"),
    "MixtureOfExperts": Case(mixture, (TOKENS,), "TokenChoiceRouter(in_features=5"),
    "TopKSAE": Case(sae, (TOKENS,), "TopKSAE(in_features=5", TAU + ", set hard=True, or leave out tau"),
    "TopKSAE-batch": Case(lambda tau: sae(tau, batch=True), (TOKENS,), "TopKSAE(in_features=5"),
    "prune_magnitude": Case(pruned_one, (TOKENS,), "The pruned weight of Linear ("),
    "prune_global": Case(pruned, (TOKENS,), "The pruned weight of Linear and 1 more ("),
    "prune_n_m": Case(pruned_blocks, (SEQUENCE,), "The pruned weight of Linear ("),
}
# What selects hard in train mode, too, whatever its tau; or also softly in eval mode; or selects nothing.
SILENT = {
    "SoftTopK-hard": Case(lambda tau: khot.nn.SoftTopK(2, tau=tau, hard=True), (scores(9, 6),), ""),
    "SoftTopK-soft": Case(lambda tau: khot.nn.SoftTopK(2, tau=tau, soft_eval=True), (scores(9, 6),), ""),
    "TopKSAE-hard": Case(lambda tau: sae(None), (TOKENS,), ""),
    "TopKSAE-straight through": Case(lambda tau: sae(tau, hard=True), (TOKENS,), ""),
    "QuantileBalancer": Case(lambda tau: khot.nn.QuantileBalancer(6, 2), (scores(4, 7, 6),), ""),
    "TopKRouter": Case(lambda tau: khot.nn.TopKRouter(5, 4, 2), (TOKENS,), ""),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def learnable(case: Case) -> list[Tensor]:
    return [x.clone().requires_grad_() if x.is_floating_point() else x for x in case.inputs]


def train(layer: nn.Module, case: Case, steps: int = SEVERAL) -> None:
    inputs = learnable(case)
    for _ in range(steps):
        layer(*inputs, **dict(case.keywords))
        khot.nn.QuantileBalancer.update_all(layer)


def said(layer: nn.Module, mode: bool = False) -> str:
    with pytest.warns(UserWarning, match="not used as it was trained") as caught:
        layer.train(mode)
    [warning] = caught
    return str(warning.message)


def test_every_layer_is_in_a_table() -> None:
    """With the table of `test_layers.py`, which a test there holds against the public names."""
    layers = {name.partition("-")[0] for name in modes.ROWS} | {"prune_magnitude"}
    assert {name.partition("-")[0] for name in (*CASES, *SILENT)} | {"Anneal"} == layers


@each_case
def test_a_layer_that_is_left_soft_warns_once(case: Case) -> None:
    layer = case.make(SOFT)
    state = list(layer.state_dict())
    train(layer, case)
    found = re.fullmatch(
        r"(?s)(.*) is not used as it was trained: (\d+) % of its selection lies outside of what eval mode "
        r"selects; (.*)",
        said(layer),
    )
    assert found and found[1].startswith(case.name) and found[3].startswith(case.cure)
    assert 100 * FAR <= int(found[2]) <= 100
    train(layer.train(), case)
    layer.eval()
    assert list(layer.state_dict()) == state


def test_an_early_warning_does_not_silence_that_at_the_end() -> None:
    """It comes again after ten times as many training steps, and not before."""
    case = CASES["SoftTopK"]
    layer = case.make(SOFT)
    train(layer, case)
    said(layer)
    train(layer.train(), case, 9 * SEVERAL - 1)
    layer.eval()
    train(layer.train(), case, 1)
    said(layer)


@each_case
def test_a_layer_that_is_sharp_is_silent(case: Case) -> None:
    layer = case.make(SHARP)
    train(layer, case)
    layer.eval()


@pytest.mark.parametrize("case", SILENT.values(), ids=SILENT)
def test_a_layer_that_selects_alike_in_both_modes_is_silent(case: Case) -> None:
    layer = case.make(SOFT)
    train(layer, case)
    layer.eval()


@each_case
def test_silent_where_nothing_was_trained(case: Case) -> None:
    tried, without_gradient, evaluated = (case.make(SOFT) for _ in range(3))
    train(tried, case, SEVERAL - 1)
    with torch.no_grad():
        train(without_gradient, case)
    train(evaluated.eval(), case)
    for layer in (tried, without_gradient, evaluated.train()):
        layer.eval()


@each_case
def test_a_copy_starts_anew_and_leaves_the_original_alone(case: Case) -> None:
    layer = case.make(SOFT)
    train(layer, case)
    parametrized = any(hasattr(m, "parametrizations") for m in layer.modules())  # which pickle refuses
    copies = [copy.deepcopy(layer), *([] if parametrized else [pickle.loads(pickle.dumps(layer))])]
    for each in copies:
        each.eval()
    said(layer)


@pytest.mark.parametrize("name", ["SoftTopK", "TopKSAE", "TokenChoiceRouter", "prune_global"])
def test_silent_under_compile(name: str) -> None:
    torch._dynamo.reset()
    case = CASES[name]
    layer = case.make(SOFT)
    compiled, inputs = torch.compile(layer, backend="eager", fullgraph=True), learnable(case)
    for _ in range(SEVERAL):
        compiled(*inputs)
    layer.eval()


def test_a_schedule_that_has_not_ended_is_silent() -> None:
    case = CASES["SoftTopK"]
    tau = Anneal(100.0, SOFT, steps=SEVERAL)
    layer = case.make(tau)
    tau.step()
    train(layer, case)
    layer.eval().train()
    for _ in range(SEVERAL - 1):
        tau.step()
    train(layer, case)
    said(layer)


def test_silent_after_a_schedule_that_ends_sharp() -> None:
    case = CASES["SoftTopK"]
    tau = Anneal(SOFT, SHARP, steps=SEVERAL)
    layer = case.make(tau)
    for _ in range(SEVERAL + 1):
        train(layer, case, 1)
        tau.step()
    layer.eval()


def test_the_whole_model_warns_once_for_each_layer() -> None:
    case = CASES["SoftTopK"]
    model = nn.Sequential(case.make(SOFT), case.make(SOFT))
    train(model, case)
    with pytest.warns(UserWarning, match="not used as it was trained") as caught:
        model.eval()
    assert len(caught) == 2


@pytest.mark.parametrize(
    ("rows", "k", "want"),
    [
        ([[0.5, 0.5, 0.5, 0.5]], None, 0.5),
        ([[1.0, 0.0, 1.0, 0.0]], None, 0.0),
        ([[0.9, 0.1, 0.7, 0.3]], None, 0.2),
        ([[1.0, 0.5, 0.0, 0.0]], None, 0.0),  # k = 1.5: no tau makes it hard
        ([[0.2, 0.6, 0.1, 0.1]], 2, 0.2),
        ([[0.5, 0.5, 0.5, 0.5], [1.0, 1.0, 0.0, 0.0]], None, 0.25),
        ([[0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]], None, 0.0),  # the first is padding
    ],
)
def test_share_outside(rows: list[list[float]], k: float | None, want: float) -> None:
    assert outside(torch.tensor(rows), k) == pytest.approx(want, abs=1e-6)


def test_what_is_kept_until_eval_is_small() -> None:
    layer = khot.nn.SoftTopK(2)
    x = torch.zeros(3000, 1000, requires_grad=True)
    for _ in range(SEVERAL):
        layer(x)
    kept = layer.__dict__["_seen"].selection
    assert isinstance(layer, LeftSoft) and kept.numel() <= 2**16
    assert kept.untyped_storage().nbytes() <= 4 * 2**16


def test_a_selection_that_was_changed_is_not_known() -> None:
    layer = khot.nn.SoftTopK(2)
    x = torch.zeros(3, 8, requires_grad=True)
    for _ in range(SEVERAL):
        y = layer(x)
    with torch.no_grad():
        y.mul_(0)
    layer.eval()  # without a warning, though all entries had the same share
