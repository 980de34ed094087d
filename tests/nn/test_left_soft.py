"""A layer that is trained with one selection and used with another says so, and no other does.

(Warnings are errors in these tests.)
"""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest
import torch
from torch import nn

import khot
import modes
from changing import BATCH, ROWS, N, Row, X, pruned
from khot.nn import Anneal
from khot.nn._left_soft import FAR, LeftSoft, outside
from khot.nn.anneal import SEVERAL

SOFT, SHARP = 3.0, 1e-3
TAU = "lower its tau in the course of training with khot.nn.Anneal"

# these tensors are small, so that some are pruned away as a whole
pytestmark = pytest.mark.filterwarnings("ignore:all entries of parameters")


def sae(tau: Any, **options: Any) -> nn.Module:
    return khot.nn.TopKSAE(N, 30, 2, tau=tau, **options)


# estimators draw samples, whatever their tau, and a batch is chosen hard
CASES = {r.name: r for r in ROWS if r.name != "TopKSAE-batch" and r.values != ("tau",)}
CASES["prune_n_m"] = Row("prune_n_m", pruned("prune_n_m", m=N, n=1), ("tau",))
CASES["TopKSAE-batch"] = Row("TopKSAE-batch", lambda tau: sae(tau, batch=True), ("tau",))
CASES["TopKAttention-thrifty"] = CASES["TopKAttention"]._replace(
    call=lambda layer, x: layer(x, x, x, need_weights=False)
)
# What selects hard in train mode, too, whatever its tau; or also softly in eval mode; or selects nothing.
SILENT = {
    name: Row(name, make, ("tau",))
    for name, make in {
        "SoftTopK-hard": lambda tau: khot.nn.SoftTopK(2, tau=tau, hard=True),
        "SoftTopK-soft": lambda tau: khot.nn.SoftTopK(2, tau=tau, soft_eval=True),
        "TopKSAE-hard": lambda tau: sae(None),
        "TopKSAE-straight through": lambda tau: sae(tau, hard=True),
        "QuantileBalancer": lambda tau: khot.nn.QuantileBalancer(N, 2),
        "TopKRouter": lambda tau: khot.nn.TopKRouter(N, 4, 2),
    }.items()
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
# how the warning starts, and what it advises
NAMES = {
    "MixtureOfExperts": "TokenChoiceRouter(",
    "prune_global": "The pruned weight of Linear and 1 more (",
    **dict.fromkeys(("prune_magnitude", "prune_n_m"), "The pruned weight of Linear ("),
}
CURES = {
    "SoftTopK": TAU + ", or set hard",
    "KHotGate": "train it longer, or with a larger learning rate",
    "TopKSAE": TAU + ", set hard=True, or leave out tau",
}


def make(case: Row, tau: Any) -> nn.Module:
    torch.manual_seed(0)
    given = {"k": 2, "top_k": 2, "capacity": 1.0, "amount": 0.7, "tau": tau}
    layer = case.make(**{name: given[name] for name in case.values})
    if case.name == "KHotGate" and tau == SHARP:  # it has no tau
        with torch.no_grad():
            layer.logits.mul_(50)
    return layer


def train(layer: nn.Module, case: Row, steps: int = SEVERAL) -> None:
    x = X[:BATCH].clone().requires_grad_()
    for _ in range(steps):
        case.call(layer, x)
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
def test_a_layer_that_is_left_soft_warns_once(case: Row) -> None:
    layer = make(case, SOFT)
    state = list(layer.state_dict())
    train(layer, case)
    found = re.fullmatch(
        r"(?s)(.*) is not used as it was trained: (\d+) % of its selection lies outside of what eval mode "
        r"selects; (.*)",
        said(layer),
    )
    name = case.name.partition("-")[0]
    assert found and found[1].startswith(NAMES.get(name, f"{name}("))
    assert found[3].startswith(CURES.get(case.name, TAU))
    assert 100 * FAR <= int(found[2]) <= 100
    train(layer.train(), case)
    layer.eval()
    assert list(layer.state_dict()) == state


def test_an_early_warning_does_not_silence_that_at_the_end() -> None:
    """It comes again after ten times as many training steps, and not before."""
    case = CASES["SoftTopK"]
    layer = make(case, SOFT)
    train(layer, case)
    said(layer)
    train(layer.train(), case, 9 * SEVERAL - 1)
    layer.eval()
    train(layer.train(), case, 1)
    said(layer)


@each_case
def test_a_layer_that_is_sharp_is_silent(case: Row) -> None:
    layer = make(case, SHARP)
    train(layer, case)
    layer.eval()


@pytest.mark.parametrize("case", SILENT.values(), ids=SILENT)
def test_a_layer_that_selects_alike_in_both_modes_is_silent(case: Row) -> None:
    layer = make(case, SOFT)
    train(layer, case)
    layer.eval()


@each_case
def test_silent_where_nothing_was_trained(case: Row) -> None:
    tried, without_gradient, evaluated = (make(case, SOFT) for _ in range(3))
    train(tried, case, SEVERAL - 1)
    with torch.no_grad():
        train(without_gradient, case)
    train(evaluated.eval(), case)
    for layer in (tried, without_gradient, evaluated.train()):
        layer.eval()


@each_case
def test_a_copy_starts_anew_and_leaves_the_original_alone(case: Row) -> None:
    layer = make(case, SOFT)
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
    layer = make(case, SOFT)
    train(torch.compile(layer, backend="eager", fullgraph=True), case)
    layer.eval()


def test_a_schedule_that_has_not_ended_is_silent() -> None:
    case = CASES["SoftTopK"]
    tau = Anneal(100.0, SOFT, steps=SEVERAL)
    layer = make(case, tau)
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
    layer = make(case, tau)
    for _ in range(SEVERAL + 1):
        train(layer, case, 1)
        tau.step()
    layer.eval()


def test_the_whole_model_warns_once_for_each_layer() -> None:
    case = CASES["SoftTopK"]
    model = nn.Sequential(make(case, SOFT), make(case, SOFT))
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
