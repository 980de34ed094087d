"""An Anneal whose step() was forgotten says so, and no other does. (Warnings are errors in these tests.)"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import khot
from khot.nn import Anneal, SoftTopK
from khot.nn.anneal import SEVERAL

FORGOTTEN = (
    r"^Anneal\(1.0, 0.1, steps=100, schedule='exponential'\) was used for training but never stepped, so "
    r"that its value is still 1.0; call its step\(\) once per training step$"
)


def model() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(4, 4), SoftTopK(2, tau=Anneal(1.0, 0.1, 100)))


def train(model: torch.nn.Module, steps: int) -> None:
    for _ in range(steps):
        model(torch.zeros(3, 4))


def test_a_forgotten_step_warns_once() -> None:
    net = model()
    train(net, SEVERAL)
    with pytest.warns(UserWarning, match=FORGOTTEN):
        net.eval()
    train(net.train(), SEVERAL)
    net.eval()


def test_an_anneal_that_is_stepped_is_silent() -> None:
    net = model()
    train(net, SEVERAL)
    net[1].tau.step()
    net.eval()


def test_trying_a_layer_out_is_silent() -> None:
    net = model()
    train(net, SEVERAL - 1)
    net.eval()


def test_evaluation_does_not_count() -> None:
    net = model().eval()
    train(net, 3 * SEVERAL)
    net.train().eval()


def test_training_that_was_resumed_is_silent() -> None:
    before, net = model(), model()
    before[1].tau.step()
    net.load_state_dict(before.state_dict())
    train(net, SEVERAL)
    net.eval()


def test_a_shared_anneal_and_a_copy_warn_once_each() -> None:
    tau = Anneal(1.0, 0.1, 100)
    net = torch.nn.Sequential(SoftTopK(2, tau=tau), SoftTopK(2, tau=tau))
    train(net, SEVERAL)
    other = copy.deepcopy(net)
    for each in (net, other):
        with pytest.warns(UserWarning, match=FORGOTTEN) as caught:
            each.eval()
        assert len(caught) == 1


def test_on_the_meta_device_nothing_is_read() -> None:
    net = model().to("meta")
    for _ in range(SEVERAL):
        net(torch.zeros(3, 4, device="meta"))
    net.eval()


def test_pruning_with_a_forgotten_step_warns() -> None:
    layer = khot.nn.prune_magnitude(torch.nn.Linear(4, 4), "weight", 0.5, tau=Anneal(1.0, 0.1, 100))
    train(layer, SEVERAL)
    with pytest.warns(UserWarning, match=FORGOTTEN):
        layer.eval()


def test_compiled_training_counts_and_compiles_once() -> None:
    torch._dynamo.reset()
    net, graphs = model(), []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(net, fullgraph=True, backend=backend)
    train(compiled, SEVERAL)
    assert len(graphs) == 1
    with pytest.warns(UserWarning, match=FORGOTTEN):
        net.eval()


@pytest.mark.parametrize(
    "number",
    [float, np.float64, np.float32, lambda v: torch.tensor(v), lambda v: torch.tensor([v]).half()],
    ids=["float", "float64", "float32", "tensor", "half tensor"],
)
def test_numbers_of_any_kind_have_the_same_schedule(number: Any) -> None:
    tau, plain = Anneal(number(2.0), number(0.5), np.int64(4)), Anneal(2.0, 0.5, 4)
    assert repr(tau) == repr(plain) and type(tau.steps) is int
    assert tau.schedule == "exponential"
    for each in (tau, plain):
        each.step()
    assert torch.equal(tau(), plain())
    assert Anneal(number(2.0), number(-0.5), 4).schedule == "linear"


@pytest.mark.parametrize(
    "steps, error",
    [
        (torch.tensor(4), TypeError),
        (math.inf, TypeError),
        (math.nan, TypeError),
        (1.5, TypeError),
        ("4", TypeError),
        (True, TypeError),
        (0, ValueError),
        (-1, ValueError),
    ],
    ids=str,
)
def test_steps_are_an_int_wherever_they_are_set(steps: Any, error: type[Exception]) -> None:
    tau = Anneal(1.0, 0.1)
    with pytest.raises(error, match=r"^steps must be .* but got"):
        tau.steps = steps
    assert tau.steps is None


def test_without_steps_it_says_what_to_do() -> None:
    layer = SoftTopK(2, tau=Anneal(1.0, 0.1))
    with pytest.raises(RuntimeError) as info:
        layer(torch.zeros(4))
    said = str(info.value)
    assert said.startswith("steps must be set before training")
    assert "Anneal(1.0, 0.1, steps=None, schedule='exponential')" in said
    for cure in ("steps=", "khot.lightning.AnnealCallback()", "khot.transformers.AnnealCallback()"):
        assert cure in said


@pytest.mark.parametrize("users", [1, 2, 5])
def test_what_several_layers_share_is_saved_in_memory_of_its_own(users: int, tmp_path: Path) -> None:
    """safetensors, which Hugging Face's Trainer saves with, refuses tensors of one memory."""
    tau = Anneal(1.0, 0.1, 100)
    net = torch.nn.Sequential(*(SoftTopK(2, tau=tau) for _ in range(users)))
    tau.step()
    state = net.state_dict()
    assert len({x.data_ptr() for x in state.values()}) == len(state) == users
    assert state["0.tau.taken"].data_ptr() == tau.taken.data_ptr()
    assert all(x is tau.taken for x in net.state_dict(keep_vars=True).values())
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    other = Anneal(1.0, 0.1, 100)
    again = torch.nn.Sequential(*(SoftTopK(2, tau=other) for _ in range(users)))
    again.load_state_dict(safetensors.torch.load_file(tmp_path / "model.safetensors"))
    assert other.taken == 1
    assert set(net.to("meta").state_dict()) == set(state)
